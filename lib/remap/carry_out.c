#include "remap/carry_out.h"

#include "base/assert.h"
#include "base/clock.h"
#include "base/lock.h"
#include "driver/burst.h"
#include "remap/decay.h"
#include "remap/hole.h"
#include "remap/mapping.h"
#include "remap/zombie.h"
#include "space/context.h"

/* A claim that is being carried out. */
struct work {
    struct claim *claim;
    struct lookout *lookout;
    /* Of the driver calls, and of the lookout's questions beside them; while a step's calls are made, less the time
       when they began. */
    uint64_t calls_ns;
    struct access_list given; /* the rights that the target has (access.h); no device: none yet */
    struct burst burst;       /* of a step's calls, beside who calls for long */
};

/* ---- the steps ---- */

/* A driver call of the build's was refused: what it was at, and the counter of builds that end there. */
static vpmm_status step_failed(const struct claim *claim, const char *doing, enum stat unwound)
{
    stats_count(claim->arena->stats, unwound);
    return device_failed(claim->arena->device, doing);
}

static void calls_begin(struct work *work)
{
    work->calls_ns -= clock_now_ns();
}

/* Before each call. The wait for others' bursts is not the calls' time. */
static void wait_for_place(struct work *work)
{
    work->calls_ns -= burst_give_way(&work->burst);
}

static void calls_end(struct work *work)
{
    work->calls_ns += clock_now_ns();
    burst_end(&work->burst);
}

static bool goes_on(const struct work *work, vpmm_status status)
{
    return status == VPMM_SUCCESS && !work->lookout->found.units;
}

/* What the device gave, before it gave no more. */
static uint64_t created_pages(const struct claim *claim)
{
    uint64_t pages = 0;
    for (size_t i = claim->moved; i < claim->moved + claim->created; i++)
        pages += claim->extent[i]->pages;
    return pages;
}

static vpmm_status create_all(struct work *work)
{
    struct claim *claim = work->claim;
    for (size_t i = claim->moved; !lookout_sees(work->lookout) && i < claim->extents; i++) {
        wait_for_place(work);
        CUresult result = mapping_create(claim->arena, claim->extent[i]);
        claim->created += result == CUDA_SUCCESS || claim->extent[i]->handle;
        if (result != CUDA_SUCCESS)
            return step_failed(claim, "creating physical memory", STAT_unwound_create);
    }
    return VPMM_SUCCESS;
}

static vpmm_status create_handles(struct work *work)
{
    struct claim *claim = work->claim;
    if (claim->moved == claim->extents)
        return VPMM_SUCCESS;
    context_keep_missing_blocks(&claim->arena->streams); /* before this takes the last of the device's memory */
    calls_begin(work);
    vpmm_status status = create_all(work);
    calls_end(work);
    return status;
}

static vpmm_status map_all(struct work *work)
{
    struct claim *claim = work->claim;
    struct arena *arena = claim->arena;
    uint64_t page = claim->target.first;
    for (size_t i = 0; i < claim->extents; i++) {
        struct extent *extent = claim->extent[i];
        claim->mapped = i + 1; /* an attempt counts: unmapping what is not mapped does no harm */
        wait_for_place(work);
        if (mapping_map(arena, page, extent) != CUDA_SUCCESS)
            return step_failed(claim, "mapping memory", STAT_unwound_map);
        page += extent->pages;
    }
    return VPMM_SUCCESS;
}

/* In parts, between which it sees who calls for long. A handle takes the driver as long in a call for many. */
static bool allow_all(struct work *work, const struct access_list *list)
{
    struct claim *claim = work->claim;
    struct arena *arena = claim->arena;
    uint64_t page = claim->target.first;
    for (size_t i = 0; !lookout_sees(work->lookout) && i < claim->extents;) {
        uint64_t pages = 0;
        for (size_t end = i + MAPPINGS_A_CALL; i < end && i < claim->extents; i++)
            pages += claim->extent[i]->pages;
        wait_for_place(work);
        if (mapping_allow(arena, page, pages, list) != CUDA_SUCCESS)
            return false;
        page += pages;
    }
    return true;
}

static vpmm_status give_access(struct work *work)
{
    struct claim *claim = work->claim;
    struct access_list list = access_read(&claim->arena->access), taken;
    access_taken(&work->given, &list, &taken);
    if ((taken.devices && !allow_all(work, &taken)) || !allow_all(work, &list))
        return step_failed(claim, "giving a device access to a mapping", STAT_unwound_access);
    work->given = list;
    return VPMM_SUCCESS;
}

/*
 * For one region. Where no point could be recorded (its stream is CLOSING, or begins to capture) the answer
 * changes with the moment: it is tried again while it may be had. What can no longer be had is left to reclaim.
 */
static vpmm_status wait_for_region(const struct claim *claim, struct fence fence)
{
    enum { TRIES = 16 };
    struct arena *arena = claim->arena;
    vpmm_status status = VPMM_ERROR_OUT_OF_MEMORY;
    bool waitable = true;
    for (int i = 0; status != VPMM_SUCCESS && i < TRIES && (waitable = fence_waitable(&arena->streams, fence)); i++) {
        if (i)
            clock_yield();
        status = load_relaxed_u32(&arena->reuse) == VPMM_REUSE_WAIT_HOST
                     ? stream_wait_host(&arena->streams, fence)
                     : stream_wait(&arena->streams, claim->stream, fence);
    }
    return status == VPMM_SUCCESS || waitable ? status : VPMM_ERROR_OUT_OF_MEMORY;
}

/* Waits for everything that the stream may not use yet. For another thread's: OUT_OF_MEMORY, without a message. */
static vpmm_status wait_for_donors(const struct claim *claim, bool for_another, bool *waited)
{
    struct arena *arena = claim->arena;
    vpmm_status status = VPMM_SUCCESS;
    *waited = false;
    for (size_t i = 0; i <= claim->donors && status == VPMM_SUCCESS; i++) {
        const struct region *region = i < claim->donors ? &claim->donor[i].region : &claim->base;
        if (!region->units || (claim->stream && fence_usable(&arena->streams, region->fence, claim->stream)))
            continue;
        if (fence_passed(&arena->streams, region->fence))
            continue;
        *waited = true;
        status = for_another ? VPMM_ERROR_OUT_OF_MEMORY : wait_for_region(claim, region->fence);
    }
    if (status != VPMM_SUCCESS)
        stats_count(arena->stats, STAT_unwound_wait);
    return status;
}

/* ---- the two ways out ---- */

/* The latest of the fences of all that it is made of; they are all of the stream, or passed. */
static struct fence joint_fence(const struct claim *claim, bool waited)
{
    const struct arena *arena = claim->arena;
    struct fence latest = FENCE_PASSED;
    if (waited)
        return fence_take(claim->stream);
    for (size_t i = 0; i <= claim->donors; i++) {
        const struct region *region = i < claim->donors ? &claim->donor[i].region : &claim->base;
        if (region->units && !fence_passed(&arena->streams, region->fence) && region->fence.number > latest.number)
            latest = region->fence;
    }
    return latest;
}

static void place_extents(struct claim *claim)
{
    struct arena *arena = claim->arena;
    uint64_t page = claim->target.first;
    for (size_t i = 0; i < claim->extents; i++) {
        struct extent *extent = claim->extent[i];
        vpmm_assert(peek_u32(&extent->holders) > 0);
        store_relaxed_u64(&extent->page, page);
        for (uint32_t j = 0; j < extent->pages; j++)
            store_release_ptr(&unit_at(&arena->space.units, page + j)->extent, extent); /* pairs with find_next's */
        page += extent->pages;
    }
}

static void bury_donors(struct claim *claim)
{
    for (size_t i = 0; i < claim->donors; i++) {
        struct donor *donor = &claim->donor[i];
        struct zombie *zombie = donor->zombie;
        vpmm_assert(zombie && zombie->parts == donor->extents);
        zombie->page = donor->region.first;
        zombie->pages = donor->region.units;
        zombie->fence = donor->region.fence;
        for (size_t j = 0; j < donor->extents; j++)
            zombie_hold(zombie, (uint32_t)j, claim->extent[donor->first + j]);
        donor->zombie = NULL;
        zombie_push(claim->arena, zombie);
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

static void count_commit(struct claim *claim)
{
    struct stats *stats = claim->arena->stats;
    stats_add(stats, STAT_mapped_bytes, claim->new_pages << claim->arena->space.units.unit_shift);
    stats_add(stats, STAT_pages_created, claim->new_pages);
    note_rebuild(claim->arena, claim->target.units);
    stats_add(stats, STAT_extents_created, claim->extents - claim->moved);
    stats_add(stats, STAT_extents_remapped, claim->moved);
    stats_note_peak_mapped(stats);
    if (claim->new_pages) {
        store_relaxed_u32(&claim->arena->overtaken, 0);
        decay_note_growth(claim->arena, claim->target.units + claim->base.units);
    }
}

/*
 * False: the rights that were given are not those of the pool any more, and nothing has happened. Else memory has
 * moved, and nothing can fail from here on.
 */
static bool commit(struct work *work, bool waited, struct region *result)
{
    struct claim *claim = work->claim;
    struct arena *arena = claim->arena;
    if (!access_may_place(&arena->access, work->given.version))
        return false;
    struct fence fence = joint_fence(claim, waited);
    bury_donors(claim); /* before their extents learn a new place: a page of the old address names none */
    place_extents(claim);
    access_placed(&arena->access);
    count_commit(claim);
    pace_note(&arena->pace, claim->cost_us, work->calls_ns - work->lookout->asked_ns);
    struct region *first = &claim->target, *second = &claim->base;
    if (claim->base_first) {
        first = &claim->base;
        second = &claim->target;
    }
    if (second->units)
        unit_set(unit_at(&arena->space.units, second->first), UNIT_NONE, 0);
    *result = (struct region){first->first, first->units + second->units, fence, false};
    unit_set(unit_at(&arena->space.units, result->first), UNIT_OWN, result->units);
    for (size_t i = claim->moved; i < claim->extents; i++)
        claim->extent[i] = NULL; /* the pages' now */
    return true;
}

static bool unmap_one(struct work *work, uint64_t page, uint64_t pages)
{
    wait_for_place(work);
    return mapping_unmap(work->claim->arena, page, pages) == CUDA_SUCCESS;
}

/*
 * The parts of the spare zombie become holders of the extents whose mapping stays. False: there are such. What was not
 * tried may be unmapped with the rest later: unmapping what is not mapped does no harm.
 */
static bool unmap_target(struct work *work)
{
    struct claim *claim = work->claim;
    uint64_t page = claim->target.first;
    bool gone = true;
    calls_begin(work);
    for (size_t i = 0; i < claim->extents; i++) {
        uint32_t pages = claim->extent[i]->pages;
        claim->spare->part[i].pages = pages;
        if (i < claim->mapped && !unmap_one(work, page, pages)) {
            zombie_hold(claim->spare, (uint32_t)i, claim->extent[i]);
            gone = false;
        }
        page += pages;
    }
    calls_end(work);
    return gone;
}

/* The created extents go to the spare zombie's parts; the place that they would have had holds them no longer. */
static void disown_created(struct claim *claim)
{
    for (size_t i = claim->moved; i < claim->moved + claim->created; i++) {
        if (claim->spare->part[i].extent)
            extent_let_go(claim->extent[i]);
        claim->spare->part[i].extent = claim->extent[i];
        claim->extent[i] = NULL;
    }
}

/*
 * Address space with a mapping that the driver would not remove stays pending: never a hole, never handed out. A handle
 * that it would not take back is the reaper's to try again.
 */
static void give_up_target(struct claim *claim, bool gone)
{
    struct zombie *zombie = claim->spare;
    zombie->fence = FENCE_PASSED;
    if (gone) {
        zombie->unmapped = zombie->parts;
        if (zombie_let_go(claim->arena, zombie))
            return;
    } else {
        zombie->page = claim->target.first;
        zombie->pages = claim->target.units;
        stats_count(claim->arena->stats, STAT_unmap_failures);
    }
    claim->spare = NULL;
    zombie_push(claim->arena, zombie);
}

static void unwind(struct work *work)
{
    struct claim *claim = work->claim;
    struct arena *arena = claim->arena;
    uint64_t made = created_pages(claim);
    bool gone = unmap_target(work);
    disown_created(claim);
    lock_take(&arena->plan_lock);
    vpmm_assert(made <= claim->new_pages && claim->new_pages <= arena->budgeted_pages);
    if (gone)
        hole_add(arena, claim->target.first, claim->target.units);
    arena_quarantine(arena, made); /* what was made leaves the budget only as the driver takes it */
    arena->budgeted_pages -= claim->new_pages;
    pthread_mutex_unlock(&arena->plan_lock);
    give_up_target(claim, gone);
    claim_return(claim);
}

/* ---- all of it ---- */

/* Once more, where the program has changed them meanwhile. */
static vpmm_status place_with_new_rights(struct work *work, bool waited, struct region *result)
{
    struct claim *claim = work->claim;
    struct access *access = &claim->arena->access;
    access_hold(access);
    calls_begin(work);
    vpmm_status status = give_access(work);
    calls_end(work);
    bool placed = goes_on(work, status) && commit(work, waited, result);
    vpmm_assert(placed || !goes_on(work, status)); /* nobody has changed them again */
    access_let_go(access);
    return status;
}

static vpmm_status map_and_place(struct work *work, bool waited, struct region *result)
{
    calls_begin(work);
    vpmm_status status = map_all(work);
    if (status == VPMM_SUCCESS)
        status = give_access(work);
    calls_end(work);
    if (goes_on(work, status) && !commit(work, waited, result))
        status = place_with_new_rights(work, waited, result);
    return status;
}

/*
 * What was created is given back by the unwind. Where the driver does not take it then, or others have given something
 * back since the first create, it is asked for more later.
 */
static struct device_room room_of(const struct claim *claim, uint64_t releases_before)
{
    return (struct device_room){created_pages(claim), releases_before + claim->created};
}

static vpmm_status make_calls(struct work *work, bool for_another, struct device_room *room, struct region *result)
{
    bool waited = false;
    uint64_t releases = load_relaxed_u64(&work->claim->arena->releases);
    vpmm_status status = create_handles(work);
    if (status == VPMM_ERROR_OUT_OF_MEMORY)
        *room = room_of(work->claim, releases);
    if (goes_on(work, status))
        status = wait_for_donors(work->claim, for_another, &waited);
    if (goes_on(work, status))
        status = map_and_place(work, waited, result);
    if (!goes_on(work, status))
        unwind(work);
    return status;
}

vpmm_status carry_out(struct claim *claim, struct lookout *lookout, bool for_another, struct device_room *room,
                      struct region *result)
{
    struct arena *arena = claim->arena;
    struct work work = {.claim = claim, .lookout = lookout};
    struct device_scope scope;
    lookout_begin(lookout, claim->new_pages);
    vpmm_status status = device_enter(arena->device, &scope);
    if (status != VPMM_SUCCESS) {
        stats_count(arena->stats, STAT_unwound_context);
        unwind(&work);
        return status;
    }
    status = make_calls(&work, for_another, room, result);
    device_leave(arena->device, &scope);
    if (lookout->found.units) {
        stats_count(arena->stats, STAT_unwound_overtaken);
        fetch_add_relaxed_u32(&arena->overtaken, 1);
        *result = lookout->found;
    }
    return status;
}
