#include "remap/build.h"

#include "base/assert.h"
#include "base/clock.h"
#include "base/lock.h"
#include "driver/burst.h"
#include "remap/cut.h"
#include "remap/decay.h"
#include "remap/ends.h"
#include "remap/hole.h"
#include "remap/mapping.h"
#include "remap/park.h"
#include "remap/pass.h"
#include "remap/zombie.h"
#include "space/context.h"

#include <stdlib.h>

/* A contiguous run of claimed memory that moves: extents [first, first + extents) of the build, in order. */
struct donor {
    struct region region;
    size_t first, extents;
    struct zombie *zombie; /* of its old address */
};

struct build {
    struct arena *arena;
    struct stream *stream;  /* NULL: for nobody yet */
    uint64_t wanted;        /* pages that the request is for */
    bool may_wait;          /* tier 4 serves it too */
    struct region base;     /* the run that is extended; units 0: none */
    struct region target;   /* the carved hole */
    bool base_first;        /* base lies before target */
    struct extent **extent; /* in address order: moved, then created */
    size_t extents, moved, created, mapped;
    struct zombie *spare; /* for an unwind in which the driver refuses: a part for each extent */
    struct donor *donor;
    size_t donors, donor_places;
    uint64_t new_pages;
    uint64_t published;  /* regions of the pool so far, when one that fits was last looked for */
    uint64_t idle_pages; /* of the pool: mapped and not live, after the claim or when much had been freed since */
    struct region found; /* in the builder's hands: it serves in place of what is built; units 0: none */
    enum region_source found_as;
    struct access_list given; /* the rights that the target has (access.h); no device: none yet */
    double cost_us;           /* of its driver calls, by the policy's cost model, */
    uint64_t calls_ns;        /* and what they have taken; while a step's are made, less the time when they began */
    struct burst burst;       /* of a step's calls, beside who calls for long */
};

/* ---- what is allocated before anything is claimed, so that no later step can want for host memory ---- */

static void build_free(struct build *build)
{
    for (size_t i = build->moved; build->extent && i < build->extents; i++)
        free(build->extent[i]); /* created ones that were not committed */
    for (size_t i = 0; build->donor && i < build->donor_places; i++)
        free(build->donor[i].zombie);
    free(build->spare);
    free(build->extent);
    free(build->donor);
}

/* How many of the plan's moves from the ith on lie in one run with no gap: they will be one zombie. */
static size_t contiguous(const struct view *view, const struct policy_plan *plan, size_t i)
{
    size_t n = 1;
    for (; i + n < plan->moves; n++) {
        const struct policy_extent *last = &view->extent[plan->move[i + n - 1]];
        const struct policy_extent *next = &view->extent[plan->move[i + n]];
        if (next->run != last->run || next->page != last->page + last->pages)
            break;
    }
    return n;
}

static bool alloc_donors(struct build *build, const struct view *view, const struct policy_plan *plan)
{
    for (size_t i = 0, n; i < plan->moves; i += n) {
        n = contiguous(view, plan, i);
        struct zombie *zombie = zombie_create((uint32_t)n);
        if (!zombie)
            return false;
        build->donor[build->donor_places++].zombie = zombie;
    }
    return true;
}

static bool alloc_extents(struct build *build, const struct policy_plan *plan)
{
    for (size_t i = 0; i < plan->creates; i++) {
        struct extent *extent = calloc(1, sizeof *extent);
        if (!extent)
            return false;
        extent->pages = plan->create[i];
        store_relaxed_u32(&extent->holders, 1); /* the place that it will have */
        build->extent[build->moved + i] = extent;
    }
    return true;
}

static bool build_alloc(struct build *build, struct view *view, const struct policy_plan *plan)
{
    build->moved = plan->moves;
    build->extents = plan->moves + plan->creates;
    build->extent = calloc(build->extents + 1, sizeof(struct extent *));
    build->donor = calloc(build->moved + 1, sizeof(struct donor));
    build->spare = zombie_create((uint32_t)build->extents);
    return view_may_keep(view, plan->moves + 1) && build->extent && build->donor && build->spare &&
           alloc_donors(build, view, plan) && alloc_extents(build, plan);
}

static vpmm_status no_host_memory(void)
{
    return fail(VPMM_ERROR_HOST_MEMORY, "no host memory for the records of a mapping");
}

/* ---- claiming, under the plan lock ---- */

/* As contiguous() has counted: extents of one run with no gap are one donor. */
static void donor_add(struct build *build, struct extent *extent, uint64_t page, struct fence fence, size_t index,
                      bool first_of_run)
{
    struct donor *last = build->donors ? &build->donor[build->donors - 1] : NULL;
    vpmm_assert(extent && peek_u64(&extent->page) == page); /* it lies where the view has seen it */
    build->extent[index] = extent;
    if (!first_of_run && last->region.first + last->region.units == page) {
        last->region.units += extent->pages;
        last->extents++;
        return;
    }
    struct zombie *zombie = build->donor[build->donors].zombie;
    build->donor[build->donors++] =
        (struct donor){.region = {page, extent->pages, fence, false}, .first = index, .extents = 1, .zombie = zombie};
}

/*
 * Takes the extents plan->move[first .. last), all of one run, out of the claimed region, and publishes what lies
 * between them.
 */
static void divide(struct build *build, const struct view *view, const struct policy_plan *plan, size_t first,
                   size_t last, struct region region)
{
    struct arena *arena = build->arena;
    uint64_t done = region.first, end = region.first + region.units;
    for (size_t i = first; i < last; i++) {
        const struct policy_extent *seen = &view->extent[plan->move[i]];
        donor_add(build, unit_extent(unit_at(&arena->space.units, seen->page)), seen->page, region.fence, i,
                  i == first);
        region_publish_part(&arena->space, region, done, seen->page);
        done = seen->page + seen->pages;
    }
    region_publish_part(&arena->space, region, done, end);
    for (size_t i = 0; i < build->donors; i++) {
        struct region *donor = &build->donor[i].region;
        if (donor->first >= region.first && donor->first < end)
            unit_set(unit_at(&arena->space.units, donor->first), UNIT_OWN, donor->units);
    }
}

static void return_donors(struct build *build)
{
    for (size_t i = 0; i < build->donors; i++)
        region_publish(&build->arena->space, build->donor[i].region);
    build->donors = 0;
}

static void return_base(struct build *build)
{
    if (build->base.units)
        region_publish(&build->arena->space, build->base);
    build->base.units = 0;
}

static bool extends(const struct policy_plan *plan)
{
    return plan->place == POLICY_EXTEND_UP || plan->place == POLICY_EXTEND_DOWN;
}

/* Which of the plan's moves is the first of another run than the ith. */
static size_t next_run(const struct view *view, const struct policy_plan *plan, size_t i)
{
    uint32_t run = view->extent[plan->move[i]].run;
    while (i < plan->moves && view->extent[plan->move[i]].run == run)
        i++;
    return i;
}

static bool claim_and_keep(struct view *view, struct arena *arena, uint32_t run)
{
    struct region region;
    bool whole = view_claim_run(view, arena, run, &region);
    if (region.units)
        view_keep(view, region);
    return whole;
}

/* All of the plan's runs, of which as many as are still there are kept. False: one has changed since it was seen. */
static bool claim_runs(const struct build *build, struct view *view, const struct policy_plan *plan)
{
    bool all = !extends(plan) || claim_and_keep(view, build->arena, (uint32_t)plan->run);
    for (size_t i = 0; i < plan->moves; i = next_run(view, plan, i))
        all &= claim_and_keep(view, build->arena, view->extent[plan->move[i]].run);
    return all;
}

/* What of the plan's runs is neither extended nor moved is published. False: one has changed; the others are kept. */
static bool claim_regions(struct build *build, struct view *view, const struct policy_plan *plan)
{
    size_t keeps = view->keeps;
    if (!claim_runs(build, view, plan))
        return false;
    const struct region *region = view->kept + keeps;
    view->keeps = keeps;
    if (extends(plan))
        build->base = *region++;
    for (size_t i = 0, next; i < plan->moves; i = next) {
        next = next_run(view, plan, i);
        divide(build, view, plan, i, next, *region++);
    }
    return true;
}

/* The page at which the shown hole begins that a page lies in. */
static uint64_t hole_around(const struct view *view, uint64_t page)
{
    size_t low = 0, high = view->holes;
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        *(view->hole[middle].page <= page ? &low : &high) = middle;
    }
    return view->hole[low].page;
}

static void carve(struct build *build, const struct view *view, const struct policy_plan *plan)
{
    uint64_t page, hole, pages = 0;
    for (size_t i = 0; i < build->extents; i++)
        pages += build->extent[i]->pages;
    if (plan->place == POLICY_EXTEND_UP) {
        hole = page = build->base.first + build->base.units;
    } else if (plan->place == POLICY_EXTEND_DOWN) {
        hole = build->base.first - hole_until(build->arena, build->base.first);
        page = build->base.first - pages;
    } else {
        hole = hole_around(view, plan->page);
        page = plan->page;
    }
    build->base_first = plan->place == POLICY_EXTEND_UP;
    build->target = (struct region){page, pages, FENCE_PASSED, false};
    vpmm_assert(pages > 0 && lock_is_taken(&build->arena->plan_lock));
    hole_carve(build->arena, hole, page, pages);
    for (size_t i = build->moved; i < build->extents; i++)
        build->new_pages += build->extent[i]->pages;
    build->arena->budgeted_pages += build->new_pages;
}

static uint64_t creatable(const struct arena *arena, const struct build_limits *limits)
{
    uint64_t cap = UINT64_MAX;
    uint64_t max_mapped = load_relaxed_u64(&arena->max_mapped);
    if (max_mapped) {
        cap = max_mapped >> arena->space.units.unit_shift;
        uint64_t held = arena->budgeted_pages + arena->quarantined_pages;
        cap = cap > held ? cap - held : 0;
    }
    return cap < limits->creatable_pages ? cap : limits->creatable_pages;
}

/* ---- mapping, without the plan lock ---- */

/* A driver call of the build's was refused: what it was at, and the counter of builds that end there. */
static vpmm_status step_failed(const struct build *build, const char *doing, enum stat unwound)
{
    stats_count(build->arena->stats, unwound);
    return device_failed(build->arena->device, doing);
}

static void calls_begin(struct build *build)
{
    build->calls_ns -= clock_now_ns();
}

/* Before each call. The wait for others' bursts is not the calls' time. */
static void wait_for_place(struct build *build)
{
    build->calls_ns -= burst_give_way(&build->burst);
}

static void calls_end(struct build *build)
{
    build->calls_ns += clock_now_ns();
    burst_end(&build->burst);
}

/* Without a call of the driver. REGION_WAITED: what is found is yet to be waited for. */
static enum region_source take_what_fits(const struct build *build, struct region *region)
{
    struct space *space = &build->arena->space;
    struct want want = {build->wanted, 1};
    enum region_source source = region_take(space, build->stream, want, false, region);
    if (source == REGION_NONE && build->may_wait &&
        region_take_freed_elsewhere(space, build->stream, want, false, fence_seems_waitable, region))
        source = REGION_WAITED;
    return source;
}

static uint64_t idle_pages(const struct arena *arena)
{
    uint64_t mapped = stats_level(arena->stats, STAT_mapped_bytes), live = stats_level(arena->stats, STAT_live_bytes);
    return mapped > live ? (mapped - live) >> arena->space.units.unit_shift : 0;
}

/*
 * True: since the claim, or since this was last true, idle memory has grown by half of what the build makes. What
 * others take again meanwhile counts against it. Then it is worth a question to the driver whether what was freed has
 * passed.
 */
static bool much_was_freed(struct build *build)
{
    uint64_t idle = idle_pages(build->arena);
    bool much = idle > build->idle_pages && 2 * (idle - build->idle_pages) >= build->new_pages;
    if (much)
        build->idle_pages = idle;
    return much;
}

/* While a step's calls are made, whose time this is not. False: there was nothing to ask. */
static bool ask_what_has_passed(struct build *build)
{
    uint64_t since = clock_now_ns();
    bool any = pass_refresh(build->arena, build->stream);
    build->calls_ns -= clock_now_ns() - since;
    return any;
}

/*
 * Takes a region that others have freed since the plan and that serves in place of new memory, if there is one: then
 * the build is given up. A build of 7 GiB takes 3 ms, in which the thread before it may be done with as much. After
 * four passes of llama_four_threads by four threads on an H200 the pool held 1.109 times what was in use (the mean of
 * 24 runs, at most 1.27), and without this, in turn, 1.132 (two were above 1.3, at most 1.44). Sixteen threads hold no
 * less with it.
 *
 * Not more often in turn than AT_MOST, with nothing made in between: where each build is overtaken the pool needs what
 * they make, and each malloc would pay for a build, and for its end, for ever.
 */
static bool is_overtaken(struct build *build)
{
    enum { AT_MOST = 8 };
    struct space *space = &build->arena->space;
    uint64_t published = load_sc_u64(&space->publications); /* before the look: see find.c */
    if (build->found.units || !build->stream || !build->new_pages || published == build->published ||
        load_relaxed_u32(&build->arena->overtaken) >= AT_MOST)
        return build->found.units > 0;
    build->published = published;
    build->found_as = take_what_fits(build, &build->found);
    if (build->found_as == REGION_NONE && much_was_freed(build) && ask_what_has_passed(build))
        build->found_as = take_what_fits(build, &build->found);
    if (build->found.units > build->wanted) /* others may have the rest while the build unwinds */
        build->found = region_keep_front(space, build->found, build->wanted);
    return build->found.units > 0;
}

static bool goes_on(const struct build *build, vpmm_status status)
{
    return status == VPMM_SUCCESS && !build->found.units;
}

static vpmm_status create_all(struct build *build)
{
    for (size_t i = build->moved; !is_overtaken(build) && i < build->extents; i++) {
        wait_for_place(build);
        CUresult result = mapping_create(build->arena, build->extent[i]);
        build->created += result == CUDA_SUCCESS || build->extent[i]->handle;
        if (result != CUDA_SUCCESS)
            return step_failed(build, "creating physical memory", STAT_unwound_create);
    }
    return VPMM_SUCCESS;
}

static vpmm_status create_handles(struct build *build)
{
    if (build->moved == build->extents)
        return VPMM_SUCCESS;
    context_keep_missing_blocks(&build->arena->streams); /* before this takes the last of the device's memory */
    calls_begin(build);
    vpmm_status status = create_all(build);
    calls_end(build);
    return status;
}

static vpmm_status map_all(struct build *build)
{
    struct arena *arena = build->arena;
    uint64_t page = build->target.first;
    for (size_t i = 0; i < build->extents; i++) {
        struct extent *extent = build->extent[i];
        build->mapped = i + 1; /* an attempt counts: unmapping what is not mapped does no harm */
        wait_for_place(build);
        if (mapping_map(arena, page, extent) != CUDA_SUCCESS)
            return step_failed(build, "mapping memory", STAT_unwound_map);
        page += extent->pages;
    }
    return VPMM_SUCCESS;
}

/* In parts, between which it sees who calls for long. A handle takes the driver as long in a call for many. */
static bool allow_all(struct build *build, const struct access_list *list)
{
    struct arena *arena = build->arena;
    uint64_t page = build->target.first;
    for (size_t i = 0; !is_overtaken(build) && i < build->extents;) {
        uint64_t pages = 0;
        for (size_t end = i + MAPPINGS_A_CALL; i < end && i < build->extents; i++)
            pages += build->extent[i]->pages;
        wait_for_place(build);
        if (mapping_allow(arena, page, pages, list) != CUDA_SUCCESS)
            return false;
        page += pages;
    }
    return true;
}

static vpmm_status give_access(struct build *build)
{
    struct access_list list = access_read(&build->arena->access), taken;
    access_taken(&build->given, &list, &taken);
    if ((taken.devices && !allow_all(build, &taken)) || !allow_all(build, &list))
        return step_failed(build, "giving a device access to a mapping", STAT_unwound_access);
    build->given = list;
    return VPMM_SUCCESS;
}

/*
 * For one region. Where no point could be recorded (its stream is CLOSING, or begins to capture) the answer
 * changes with the moment: it is tried again while it may be had. What can no longer be had is left to reclaim.
 */
static vpmm_status wait_for_region(struct build *build, struct fence fence)
{
    enum { TRIES = 16 };
    struct arena *arena = build->arena;
    vpmm_status status = VPMM_ERROR_OUT_OF_MEMORY;
    for (int i = 0; status != VPMM_SUCCESS && i < TRIES && fence_waitable(&arena->streams, fence); i++) {
        if (i)
            clock_yield();
        status = load_relaxed_u32(&arena->reuse) == VPMM_REUSE_WAIT_HOST
                     ? stream_wait_host(&arena->streams, fence)
                     : stream_wait(&arena->streams, build->stream, fence);
    }
    return status == VPMM_SUCCESS || fence_waitable(&arena->streams, fence) ? status : VPMM_ERROR_OUT_OF_MEMORY;
}

/* Waits for everything that the stream may not use yet. For another thread's: OUT_OF_MEMORY, without a message. */
static vpmm_status wait_for_donors(struct build *build, const struct build_limits *limits, bool *waited)
{
    struct arena *arena = build->arena;
    vpmm_status status = VPMM_SUCCESS;
    *waited = false;
    for (size_t i = 0; i <= build->donors && status == VPMM_SUCCESS; i++) {
        const struct region *region = i < build->donors ? &build->donor[i].region : &build->base;
        if (!region->units || (build->stream && fence_usable(&arena->streams, region->fence, build->stream)))
            continue;
        if (fence_passed(&arena->streams, region->fence))
            continue;
        *waited = true;
        status = limits->for_another ? VPMM_ERROR_OUT_OF_MEMORY : wait_for_region(build, region->fence);
    }
    if (status != VPMM_SUCCESS)
        stats_count(arena->stats, STAT_unwound_wait);
    return status;
}

/* ---- the two ways out ---- */

/* The latest of the fences of all that it is made of; they are all of the stream, or passed. */
static struct fence joint_fence(const struct build *build, bool waited)
{
    const struct arena *arena = build->arena;
    struct fence latest = FENCE_PASSED;
    if (waited)
        return fence_take(build->stream);
    for (size_t i = 0; i <= build->donors; i++) {
        const struct region *region = i < build->donors ? &build->donor[i].region : &build->base;
        if (region->units && !fence_passed(&arena->streams, region->fence) && region->fence.number > latest.number)
            latest = region->fence;
    }
    return latest;
}

static void place_extents(struct build *build)
{
    struct arena *arena = build->arena;
    uint64_t page = build->target.first;
    for (size_t i = 0; i < build->extents; i++) {
        struct extent *extent = build->extent[i];
        vpmm_assert(peek_u32(&extent->holders) > 0);
        store_relaxed_u64(&extent->page, page);
        for (uint32_t j = 0; j < extent->pages; j++)
            store_release_ptr(&unit_at(&arena->space.units, page + j)->extent, extent); /* pairs with find_next's */
        page += extent->pages;
    }
}

static void bury_donors(struct build *build)
{
    for (size_t i = 0; i < build->donors; i++) {
        struct donor *donor = &build->donor[i];
        struct zombie *zombie = donor->zombie;
        vpmm_assert(zombie && zombie->parts == donor->extents);
        zombie->page = donor->region.first;
        zombie->pages = donor->region.units;
        zombie->fence = donor->region.fence;
        for (size_t j = 0; j < donor->extents; j++)
            zombie_hold(zombie, (uint32_t)j, build->extent[donor->first + j]);
        donor->zombie = NULL;
        zombie_push(build->arena, zombie);
    }
}

/* Pages created or moved. Few change no shape: see front_adjust_limit. Two threads at once may count one as two. */
static void note_rebuild(struct arena *arena, uint64_t pages)
{
    enum { SHARE = 64 };
    uint64_t mapped = stats_sum(arena->stats, STAT_mapped_bytes) >> arena->space.units.unit_shift;
    uint64_t built = fetch_add_relaxed_u64(&arena->built_pages, pages) + pages;
    if (built * SHARE < mapped)
        return;
    store_relaxed_u64(&arena->built_pages, 0);
    fetch_add_relaxed_u32(&arena->rebuilds, 1);
}

static void count_commit(struct build *build)
{
    struct stats *stats = build->arena->stats;
    stats_add(stats, STAT_mapped_bytes, build->new_pages << build->arena->space.units.unit_shift);
    stats_add(stats, STAT_pages_created, build->new_pages);
    note_rebuild(build->arena, build->target.units);
    stats_add(stats, STAT_extents_created, build->extents - build->moved);
    stats_add(stats, STAT_extents_remapped, build->moved);
    stats_note_peak_mapped(stats);
    if (build->new_pages) {
        store_relaxed_u32(&build->arena->overtaken, 0);
        decay_note_growth(build->arena, build->target.units + build->base.units);
    }
}

/*
 * False: the rights that were given are not those of the pool any more, and nothing has happened. Else memory has
 * moved, and nothing can fail from here on.
 */
static bool commit(struct build *build, bool waited, struct region *result)
{
    struct arena *arena = build->arena;
    if (!access_may_place(&arena->access, build->given.version))
        return false;
    struct fence fence = joint_fence(build, waited);
    bury_donors(build); /* before their extents learn a new place: a page of the old address names none */
    place_extents(build);
    access_placed(&arena->access);
    count_commit(build);
    pace_note(&arena->pace, build->cost_us, build->calls_ns);
    struct region *first = &build->target, *second = &build->base;
    if (build->base_first) {
        first = &build->base;
        second = &build->target;
    }
    if (second->units)
        unit_set(unit_at(&arena->space.units, second->first), UNIT_NONE, 0);
    *result = (struct region){first->first, first->units + second->units, fence, false};
    unit_set(unit_at(&arena->space.units, result->first), UNIT_OWN, result->units);
    for (size_t i = build->moved; i < build->extents; i++)
        build->extent[i] = NULL; /* the pages' now */
    return true;
}

static bool unmap_one(struct build *build, uint64_t page, uint64_t pages)
{
    wait_for_place(build);
    return mapping_unmap(build->arena, page, pages) == CUDA_SUCCESS;
}

/*
 * The parts of the spare zombie become holders of the extents whose mapping stays. False: there are such. What was not
 * tried may be unmapped with the rest later: unmapping what is not mapped does no harm.
 */
static bool unmap_target(struct build *build)
{
    uint64_t page = build->target.first;
    bool gone = true;
    calls_begin(build);
    for (size_t i = 0; i < build->extents; i++) {
        uint32_t pages = build->extent[i]->pages;
        build->spare->part[i].pages = pages;
        if (i < build->mapped && !unmap_one(build, page, pages)) {
            zombie_hold(build->spare, (uint32_t)i, build->extent[i]);
            gone = false;
        }
        page += pages;
    }
    calls_end(build);
    return gone;
}

/* The created extents go to the spare zombie's parts; the place that they would have had holds them no longer. */
static void disown_created(struct build *build)
{
    for (size_t i = build->moved; i < build->moved + build->created; i++) {
        if (build->spare->part[i].extent)
            extent_let_go(build->extent[i]);
        build->spare->part[i].extent = build->extent[i];
        build->extent[i] = NULL;
    }
}

/*
 * Address space with a mapping that the driver would not remove stays pending: never a hole, never handed out. A handle
 * that it would not take back is the reaper's to try again.
 */
static void give_up_target(struct build *build, bool gone)
{
    struct zombie *zombie = build->spare;
    zombie->fence = FENCE_PASSED;
    if (gone) {
        zombie->unmapped = zombie->parts;
        if (zombie_let_go(build->arena, zombie))
            return;
    } else {
        zombie->page = build->target.first;
        zombie->pages = build->target.units;
        stats_count(build->arena->stats, STAT_unmap_failures);
    }
    build->spare = NULL;
    zombie_push(build->arena, zombie);
}

static void unwind(struct build *build)
{
    struct arena *arena = build->arena;
    uint64_t made = 0;
    bool gone = unmap_target(build);
    for (size_t i = build->moved; i < build->moved + build->created; i++)
        made += build->extent[i]->pages;
    disown_created(build);
    lock_take(&arena->plan_lock);
    vpmm_assert(made <= build->new_pages && build->new_pages <= arena->budgeted_pages);
    if (gone)
        hole_add(arena, build->target.first, build->target.units);
    arena_quarantine(arena, made); /* what was made leaves the budget only as the driver takes it */
    arena->budgeted_pages -= build->new_pages;
    pthread_mutex_unlock(&arena->plan_lock);
    give_up_target(build, gone);
    return_donors(build);
    return_base(build);
}

/* ---- one build ---- */

/* Once more, where the program has changed them meanwhile. */
static vpmm_status place_with_new_rights(struct build *build, bool waited, struct region *result)
{
    struct access *access = &build->arena->access;
    access_hold(access);
    calls_begin(build);
    vpmm_status status = give_access(build);
    calls_end(build);
    bool placed = goes_on(build, status) && commit(build, waited, result);
    vpmm_assert(placed || !goes_on(build, status)); /* nobody has changed them again */
    access_let_go(access);
    return status;
}

static vpmm_status map_and_place(struct build *build, bool waited, struct region *result)
{
    calls_begin(build);
    vpmm_status status = map_all(build);
    if (status == VPMM_SUCCESS)
        status = give_access(build);
    calls_end(build);
    if (goes_on(build, status) && !commit(build, waited, result))
        status = place_with_new_rights(build, waited, result);
    return status;
}

static vpmm_status carry_out(struct build *build, struct build_limits *limits, struct region *result)
{
    struct device_scope scope;
    bool waited = false;
    if (build->stream && build->new_pages)
        build->idle_pages = idle_pages(build->arena);
    vpmm_status status = device_enter(build->arena->device, &scope);
    if (status == VPMM_SUCCESS) {
        status = create_handles(build);
        if (status == VPMM_ERROR_OUT_OF_MEMORY) {
            limits->creatable_pages = 0;
            for (size_t i = 0; i < build->created; i++)
                limits->creatable_pages += build->extent[build->moved + i]->pages;
        }
        if (goes_on(build, status))
            status = wait_for_donors(build, limits, &waited);
        if (goes_on(build, status))
            status = map_and_place(build, waited, result);
        if (!goes_on(build, status))
            unwind(build);
        if (build->found.units) {
            stats_count(build->arena->stats, STAT_unwound_overtaken);
            fetch_add_relaxed_u32(&build->arena->overtaken, 1);
            *result = build->found;
        }
        device_leave(build->arena->device, &scope);
    } else {
        stats_count(build->arena->stats, STAT_unwound_context);
        unwind(build);
    }
    return status;
}

/* Under the plan lock. The subpages of a chunk are numbered as its pages are, so both get it or neither. */
static vpmm_status add_chunk(struct arena *arena, CUdeviceptr base)
{
    void *pages = NULL, *subpages = NULL;
    vpmm_status status = units_table_new(&arena->space.units, &pages);
    if (status == VPMM_SUCCESS && cut_takes_chunk(arena))
        status = units_table_new(&arena->cut.units, &subpages);
    if (status != VPMM_SUCCESS) {
        units_table_free(&arena->space.units, pages);
        return status;
    }
    if (subpages)
        units_add_chunk(&arena->cut.units, base, subpages);
    hole_add(arena, units_add_chunk(&arena->space.units, base, pages), arena->space.units.chunk_units);
    return VPMM_SUCCESS;
}

static vpmm_status reserve_failed(const struct arena *arena, size_t bytes)
{
    vpmm_status status = device_failed(arena->device, "reserving address space");
    if (status != VPMM_ERROR_OUT_OF_MEMORY)
        return status;
    return fail(VPMM_ERROR_OUT_OF_ADDRESS_SPACE,
                "cuMemAddressReserve refused another %zu bytes: the device's "
                "addresses are exhausted, or VPMM_VA_SIZE is too large",
                bytes);
}

/* Under the reserve lock. */
static vpmm_status reserve_one(struct arena *arena)
{
    CUdeviceptr base = 0;
    size_t bytes = (size_t)arena->space.units.chunk_units << arena->space.units.unit_shift;
    size_t alignment = arena->space.units.unit_size * arena->policy.step;
    vpmm_status status = VPMM_SUCCESS;
    if (device_call(arena->device, cuMemAddressReserve, &base, bytes, alignment, 0, 0) != CUDA_SUCCESS) {
        status = reserve_failed(arena, bytes);
    } else {
        lock_take(&arena->plan_lock);
        status = add_chunk(arena, base);
        if (status == VPMM_SUCCESS)
            stats_add(arena->stats, STAT_reserved_bytes, bytes);
        pthread_mutex_unlock(&arena->plan_lock);
    }
    if (status != VPMM_SUCCESS && base)
        arena->device->driver.cuMemAddressFree(base, bytes);
    return status;
}

/* One more chunk than `seen`, in which there was no room, if no other thread has added it meanwhile: see arena.h. */
static vpmm_status reserve_chunk(struct arena *arena, uint32_t seen)
{
    struct device_scope scope;
    vpmm_status status = device_enter(arena->device, &scope);
    if (status != VPMM_SUCCESS)
        return status;
    lock_take(&arena->reserve_lock);
    if (load_acquire_u32(&arena->space.units.chunks) == seen)
        status = reserve_one(arena);
    pthread_mutex_unlock(&arena->reserve_lock);
    device_leave(arena->device, &scope);
    return status;
}

static bool plan_waits(const struct view *view, const struct policy_plan *plan)
{
    bool waits = plan->place != POLICY_FRESH && view->run[plan->run].waits;
    for (size_t i = 0; !waits && i < plan->moves; i++)
        waits = view->run[view->extent[plan->move[i]].run].waits;
    return waits;
}

enum claim_result {
    CLAIM_DONE,
    CLAIM_FOUND,   /* a free region that will do */
    CLAIM_SPOILED, /* what the plan was made for has changed */
    CLAIM_NO_HOLE, /* one chunk more is needed */
    CLAIM_FAILED,
};

/* Under the plan lock: from the policy's plan to a build that owns all it needs. */
static enum claim_result claim_plan(struct build *build, struct view *view, const struct policy_plan *plan,
                                    vpmm_status *status)
{
    if (!build_alloc(build, view, plan)) {
        *status = no_host_memory();
        return CLAIM_FAILED;
    }
    if (!claim_regions(build, view, plan))
        return CLAIM_SPOILED;
    carve(build, view, plan);
    build->cost_us = plan->cost_us;
    fetch_add_sc_u32(&build->arena->builders, 1);
    return CLAIM_DONE;
}

/*
 * What is left of a handle beside something live is stuck there, so a handle is a small part of all that the pool can
 * ever have. With handles of any length a pool of 2 GiB, filled to nine tenths with requests of up to 64 MiB in turn,
 * refused 17 % of them though there were 328 MiB free; with 4 MiB, a 512th, none of them, nor at 95 %.
 */
static uint32_t longest_handle(const struct arena *arena, const struct build_limits *limits)
{
    enum { HANDLES_AT_LEAST = 512 };
    if (arena->policy.max_extent != UINT32_MAX) /* the program has said how long */
        return limits->longest_handle;
    uint64_t cap = load_relaxed_u64(&arena->max_mapped), most = arena->device->total_bytes;
    uint64_t part = (cap && cap < most ? cap : most) / HANDLES_AT_LEAST >> arena->space.units.unit_shift;
    return part < limits->longest_handle ? (uint32_t)part : limits->longest_handle;
}

/*
 * What is kept and what was freed beside it since are one run, which no search finds, and the policy passes over. Best
 * is what need not be waited for.
 */
static size_t run_that_fits(const struct build *build, const struct view *view)
{
    size_t fits = view->runs;
    for (size_t i = 0; view->keeps && i < view->runs; i++) {
        const struct policy_run *run = &view->run[i];
        if (run->pages >= build->wanted && !run->waits)
            return i;
        if (run->pages >= build->wanted && build->may_wait)
            fits = i;
    }
    return fits;
}

/* What is not needed is free before any wait for it. */
static enum claim_result claim_what_fits(const struct build *build, struct view *view, uint32_t run,
                                         struct region *found, vpmm_status *status)
{
    struct arena *arena = build->arena;
    if (!view_may_keep(view, 1)) {
        *status = no_host_memory();
        return CLAIM_FAILED;
    }
    if (!claim_and_keep(view, arena, run))
        return CLAIM_SPOILED;
    *found = view->kept[--view->keeps];
    if (found->units > build->wanted)
        *found = region_keep_front(&arena->space, *found, build->wanted);
    return CLAIM_FOUND;
}

/* What the policy is to know: the view, and what of the arena bears on a plan. */
static struct policy_view what_is_shown(const struct build *build, const struct build_limits *limits)
{
    struct arena *arena = build->arena;
    struct policy_view shown = view_for_policy(arena->view);
    shown.mapped_pages = arena->budgeted_pages;
    shown.creatable_pages = creatable(arena, limits);
    shown.longest_handle = longest_handle(arena, limits); /* of no page: the shortest */
    shown.waiters = turn_waiters(&arena->turn);
    shown.slowness = pace_slowness(&arena->pace);
    /* Who makes the pool builds for nobody. */
    shown.several_builders = build->stream && ends_note_builder(arena, limits->for_another);
    return shown;
}

static enum claim_result plan_and_claim(struct build *build, const struct build_limits *limits, enum view_reach reach,
                                        struct region *found, vpmm_status *status)
{
    struct arena *arena = build->arena;
    struct view *view = arena->view;
    struct policy_plan *plan = arena->plan;
    uint64_t pages = build->wanted;
    if (arena_is_parked(arena)) {
        *status = parked_status();
        return CLAIM_FAILED;
    }
    uint64_t hole_pages = policy_hole_pages(&arena->policy, arena->budgeted_pages, (uint32_t)pages);
    if (!view_make(view, arena, build->stream, reach, limits->is_short, hole_pages)) {
        *status = no_host_memory();
        return CLAIM_FAILED;
    }
    size_t fits = run_that_fits(build, view);
    if (fits < view->runs)
        return claim_what_fits(build, view, (uint32_t)fits, found, status);
    struct policy_view shown = what_is_shown(build, limits);
    if (!policy_plan(&arena->policy, &shown, (uint32_t)pages, plan)) {
        *status = no_host_memory();
        return CLAIM_FAILED;
    }
    if (plan->place == POLICY_NO_HOLE)
        return CLAIM_NO_HOLE;
    if (plan->place == POLICY_NO_MEMORY) {
        *status = fail(VPMM_ERROR_OUT_OF_MEMORY, "the device's memory or the pool's cap is exhausted");
        return CLAIM_FAILED;
    }
    if ((limits->keep_size && plan->creates) || (limits->for_another && plan_waits(view, plan))) {
        *status = VPMM_ERROR_OUT_OF_MEMORY; /* the caller knows better: no message */
        return CLAIM_FAILED;
    }
    return claim_plan(build, view, plan, status);
}

static void finish(struct build *build)
{
    fetch_add_sc_u32(&build->arena->builders, UINT32_MAX);
    build_free(build);
}

static vpmm_status no_room(const struct arena *arena, uint64_t pages)
{
    return fail(VPMM_ERROR_OUT_OF_ADDRESS_SPACE,
                "%llu bytes were asked for, and a chunk of address space has %llu: raise VPMM_VA_SIZE",
                (unsigned long long)pages << arena->space.units.unit_shift,
                (unsigned long long)arena->space.units.chunk_units << arena->space.units.unit_shift);
}

/* The scratch of a plan that came to nothing. What is published from here on the next plan may not have seen. */
static void begin_again(struct build *build)
{
    struct arena *arena = build->arena;
    build_free(build);
    *build = (struct build){.arena = arena,
                            .stream = build->stream,
                            .wanted = build->wanted,
                            .may_wait = build->may_wait,
                            .published = load_sc_u64(&arena->space.publications)};
}

/* What is kept nobody can spoil. Twice what is wanted, so that the policy has a choice; before a request fails, all. */
static enum claim_result plan_with_what_is_kept(struct build *build, const struct build_limits *limits,
                                                struct region *found, vpmm_status *status)
{
    uint64_t enough = limits->is_short ? UINT64_MAX : 2 * build->wanted;
    if (view_keep_what_is_free(build->arena->view, build->arena, build->stream, limits->reach, limits->is_short,
                               build->wanted, enough))
        return plan_and_claim(build, limits, VIEW_KEPT, found, status);
    *status = no_host_memory();
    return CLAIM_FAILED;
}

static enum region_source source_of(const struct build *build, struct fence fence)
{
    const struct streams *streams = &build->arena->streams;
    if (fence_passed(streams, fence))
        return REGION_COMPLETED;
    if (fence_usable(streams, fence, build->stream))
        return REGION_OWN_STREAM;
    vpmm_assert(build->may_wait);
    return REGION_WAITED;
}

/*
 * Under the plan lock, until it has something or there is nothing to be had. Other threads spoil plans by taking what
 * was seen free; each thereby makes progress. What is free by now comes first. The last plan nobody can spoil. (After
 * four passes of llama_four_threads by four threads on H200s the pool held 1.10 times what was in use, never more than
 * 1.16 in 100 runs. Where eight plans came first, and the last was made of what they had kept, which was a quarter of
 * what was free, it was 1.14 to 1.20, with a tenth to a quarter of the runs above 1.3; where the last was of new memory
 * alone, 1.27 to 1.40.)
 */
static enum claim_result find_or_claim(struct build *build, const struct build_limits *limits, struct region *found,
                                       enum region_source *source, vpmm_status *status)
{
    enum { TRIES = 2 };
    enum claim_result claimed = CLAIM_SPOILED;
    for (int i = 0; claimed == CLAIM_SPOILED; i++) {
        begin_again(build);
        *source = build->stream ? take_what_fits(build, found) : REGION_NONE;
        claimed = *source != REGION_NONE ? CLAIM_FOUND
                  : i < TRIES            ? plan_and_claim(build, limits, limits->reach, found, status)
                                         : plan_with_what_is_kept(build, limits, found, status);
        if (claimed == CLAIM_FOUND && *source == REGION_NONE)
            *source = source_of(build, found->fence);
    }
    view_let_go(build->arena->view, build->arena);
    return claimed;
}

vpmm_status build_region(struct arena *arena, struct stream *stream, uint64_t pages, struct build_limits *limits,
                         struct region *result, enum region_source *source)
{
    if (pages > arena->space.units.chunk_units)
        return no_room(arena, pages);
    for (;;) {
        struct build build = {.arena = arena, .stream = stream, .wanted = pages, .may_wait = limits->may_wait};
        vpmm_status status = VPMM_SUCCESS;
        lock_take(&arena->plan_lock);
        uint32_t seen = load_acquire_u32(&arena->space.units.chunks);
        enum claim_result claimed = find_or_claim(&build, limits, result, source, &status);
        pthread_mutex_unlock(&arena->plan_lock);
        if (claimed == CLAIM_DONE) {
            status = carry_out(&build, limits, result);
            *source = build.found_as;
            finish(&build);
        } else {
            build_free(&build);
        }
        if (claimed == CLAIM_NO_HOLE) /* a fresh one has room, but other threads may be quicker to fill it */
            status = reserve_chunk(arena, seen);
        if (status != VPMM_SUCCESS || claimed != CLAIM_NO_HOLE)
            return status;
    }
}

vpmm_status build_initial(struct arena *arena, uint64_t pages)
{
    struct build_limits limits = {.reach = VIEW_PASSED, .creatable_pages = UINT64_MAX, .longest_handle = UINT32_MAX};
    enum region_source source;
    struct region region;
    vpmm_status status = reserve_chunk(arena, 0);
    if (status != VPMM_SUCCESS || !pages)
        return status;
    status = build_region(arena, NULL, pages, &limits, &region, &source);
    if (status == VPMM_SUCCESS)
        region_publish(&arena->space, region);
    return status;
}
