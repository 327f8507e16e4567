#include "remap/build.h"

#include "base/assert.h"
#include "base/lock.h"
#include "remap/carry_out.h"
#include "remap/chunk.h"
#include "remap/claim.h"
#include "remap/ends.h"
#include "remap/lookout.h"
#include "remap/park.h"

struct build {
    struct lookout lookout; /* with the request */
    struct claim claim;     /* of the last plan */
    bool may_put_off;       /* what it makes: it is the first part */
    bool puts_off;          /* the last plan does */
};

enum plan_result {
    PLAN_CLAIMED,
    PLAN_FOUND,   /* a free region that will do */
    PLAN_SPOILED, /* what the plan was made for has changed */
    PLAN_NO_HOLE, /* one chunk more is needed */
    PLAN_FAILED,
};

static vpmm_status no_host_memory(void)
{
    return fail(VPMM_ERROR_HOST_MEMORY, "no host memory for the records of a mapping");
}

uint64_t build_creatable(const struct arena *arena, struct device_room room, uint64_t returned)
{
    uint64_t cap = UINT64_MAX;
    uint64_t max_mapped = load_relaxed_u64(&arena->max_mapped);
    if (max_mapped) {
        cap = max_mapped >> arena->space.units.unit_shift;
        uint64_t held = arena->budgeted_pages + arena->quarantined_pages;
        vpmm_assert(returned <= held);
        held -= returned;
        cap = cap > held ? cap - held : 0;
    }
    bool is_known = room.releases == load_relaxed_u64(&arena->releases);
    return is_known && room.pages + returned < cap ? room.pages + returned : cap;
}

static bool plan_waits(const struct view *view, const struct policy_plan *plan)
{
    bool waits = plan->place != POLICY_FRESH && view->run[plan->run].waits;
    for (size_t i = 0; !waits && i < plan->moves; i++)
        waits = view->run[view->extent[plan->move[i]].run].waits;
    return waits;
}

/* Under the plan lock: from the policy's plan to a build that owns all it needs. */
static enum plan_result claim_or_keep(struct claim *claim, struct view *view, const struct policy_plan *plan,
                                      vpmm_status *status)
{
    if (!claim_alloc(claim, view, plan)) {
        *status = no_host_memory();
        return PLAN_FAILED;
    }
    if (!claim_plan(claim, view, plan))
        return PLAN_SPOILED;
    fetch_add_sc_u32(&claim->arena->builders, 1);
    return PLAN_CLAIMED;
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
        if (run->pages >= build->lookout.wanted && !run->waits)
            return i;
        if (run->pages >= build->lookout.wanted && build->lookout.may_wait)
            fits = i;
    }
    return fits;
}

/* What is not needed is free before any wait for it. */
static enum plan_result claim_what_fits(const struct build *build, struct view *view, uint32_t run,
                                        struct region *found, vpmm_status *status)
{
    struct arena *arena = build->lookout.arena;
    if (!view_may_keep(view, 1)) {
        *status = no_host_memory();
        return PLAN_FAILED;
    }
    if (!view_claim_and_keep(view, arena, run))
        return PLAN_SPOILED;
    *found = view->kept[--view->keeps];
    if (found->units > build->lookout.wanted)
        *found = region_keep_front(&arena->space, *found, build->lookout.wanted);
    return PLAN_FOUND;
}

/* What the policy is to know: the view, and what of the arena bears on a plan. */
static struct policy_view what_is_shown(const struct build *build, const struct build_limits *limits)
{
    struct arena *arena = build->lookout.arena;
    struct policy_view shown = view_for_policy(arena->view);
    shown.mapped_pages = arena->budgeted_pages;
    shown.creatable_pages = build_creatable(arena, limits->room, 0);
    shown.longest_handle = longest_handle(arena, limits); /* of no page: the shortest */
    shown.waiters = turn_waiters(&arena->turn);
    shown.slowness = pace_slowness(&arena->pace);
    /* Who makes the pool builds for nobody. */
    shown.several_builders = build->lookout.stream && ends_note_builder(arena, limits->for_another);
    return shown;
}

static enum plan_result plan_and_claim(struct build *build, const struct build_limits *limits, enum view_reach reach,
                                       struct region *found, vpmm_status *status)
{
    struct arena *arena = build->lookout.arena;
    struct view *view = arena->view;
    struct policy_plan *plan = arena->plan;
    uint64_t pages = build->lookout.wanted;
    if (arena_is_parked(arena)) {
        *status = parked_status();
        return PLAN_FAILED;
    }
    uint64_t hole_pages = policy_hole_pages(&arena->policy, arena->budgeted_pages, (uint32_t)pages);
    if (!view_make(view, arena, build->lookout.stream, reach, limits->is_short, hole_pages)) {
        *status = no_host_memory();
        return PLAN_FAILED;
    }
    size_t fits = run_that_fits(build, view);
    if (fits < view->runs)
        return claim_what_fits(build, view, (uint32_t)fits, found, status);
    struct policy_view shown = what_is_shown(build, limits);
    if (!policy_plan(&arena->policy, &shown, (uint32_t)pages, plan)) {
        *status = no_host_memory();
        return PLAN_FAILED;
    }
    if (plan->place == POLICY_NO_HOLE)
        return PLAN_NO_HOLE;
    if (plan->place == POLICY_NO_MEMORY) {
        *status = fail(VPMM_ERROR_OUT_OF_MEMORY, "the device's memory or the pool's cap is exhausted");
        return PLAN_FAILED;
    }
    if ((limits->keep_size && plan->creates) || (limits->for_another && plan_waits(view, plan))) {
        *status = VPMM_ERROR_OUT_OF_MEMORY; /* the caller knows better: no message */
        return PLAN_FAILED;
    }
    build->puts_off = build->may_put_off && policy_put_growth_off(&arena->policy, &shown, plan);
    return claim_or_keep(&build->claim, view, plan, status);
}

static vpmm_status no_room(const struct arena *arena, uint64_t pages)
{
    return fail(VPMM_ERROR_OUT_OF_ADDRESS_SPACE,
                "%llu bytes were asked for, and a chunk of address space has %llu: raise VPMM_VA_SIZE",
                (unsigned long long)pages << arena->space.units.unit_shift,
                (unsigned long long)arena->space.units.chunk_units << arena->space.units.unit_shift);
}

/* The records of a plan that came to nothing go. What is published from here on the next plan may not have seen. */
static void begin_again(struct build *build)
{
    struct lookout *lookout = &build->lookout;
    claim_free(&build->claim);
    build->claim = (struct claim){.arena = lookout->arena, .stream = lookout->stream};
    lookout->published = load_sc_u64(&lookout->arena->space.publications);
}

/* What is kept nobody can spoil. Twice what is wanted, so that the policy has a choice; before a request fails, all. */
static enum plan_result plan_with_what_is_kept(struct build *build, const struct build_limits *limits,
                                               struct region *found, vpmm_status *status)
{
    const struct lookout *request = &build->lookout;
    uint64_t enough = limits->is_short ? UINT64_MAX : 2 * request->wanted;
    if (view_keep_what_is_free(request->arena->view, request->arena, request->stream, limits->reach, limits->is_short,
                               request->wanted, enough))
        return plan_and_claim(build, limits, VIEW_KEPT, found, status);
    *status = no_host_memory();
    return PLAN_FAILED;
}

static enum region_source source_of(const struct build *build, struct fence fence)
{
    const struct streams *streams = &build->lookout.arena->streams;
    if (fence_passed(streams, fence))
        return REGION_COMPLETED;
    if (fence_usable(streams, fence, build->lookout.stream))
        return REGION_OWN_STREAM;
    vpmm_assert(build->lookout.may_wait);
    return REGION_WAITED;
}

/*
 * Under the plan lock, until it has something or there is nothing to be had. Other threads spoil plans by taking what
 * was seen free; each thereby makes progress. What is free by now comes first. The last plan nobody can spoil. (After
 * four passes of llama_four_threads by four threads on H200s the pool held 1.10 times what was in use, and in three of
 * 355 runs more than 1.2 (1.30). Where eight plans came first, and the last was made of what they had kept, which was a
 * quarter of what was free, it was 1.14 to 1.20, with a tenth to a quarter of the runs above 1.3; where the last was of
 * new memory alone, 1.27 to 1.40.)
 */
static enum plan_result find_or_claim(struct build *build, const struct build_limits *limits, struct region *found,
                                      enum region_source *source, vpmm_status *status)
{
    enum { TRIES = 2 };
    enum plan_result planned = PLAN_SPOILED;
    for (int i = 0; planned == PLAN_SPOILED; i++) {
        begin_again(build);
        *source = lookout_take(&build->lookout, found);
        planned = *source != REGION_NONE ? PLAN_FOUND
                  : i < TRIES            ? plan_and_claim(build, limits, limits->reach, found, status)
                                         : plan_with_what_is_kept(build, limits, found, status);
        if (planned == PLAN_FOUND && *source == REGION_NONE)
            *source = source_of(build, found->fence);
    }
    view_let_go(build->lookout.arena->view, build->lookout.arena);
    return planned;
}

/*
 * Finds or claims with what a first part has made, if there is one. Its builder stays counted in until that is the new
 * claim's, or everybody's again: who finds no memory waits for those who are counted in (hands.h, tiers.c). Who parks a
 * pool meets no part, since nothing moves in a graph's pool.
 */
static enum plan_result plan_with_part(struct build *build, const struct build_limits *limits, struct region *part,
                                       struct region *found, enum region_source *source, vpmm_status *status)
{
    struct arena *arena = build->lookout.arena;
    if (!part->units)
        return find_or_claim(build, limits, found, source, status);
    view_keep(arena->view, *part); /* there is room: claim_alloc made some for the first part */
    part->units = 0;
    enum plan_result planned = find_or_claim(build, limits, found, source, status);
    fetch_add_sc_u32(&arena->builders, UINT32_MAX);
    return planned;
}

/* What was claimed, made into a region: the whole of what was asked for, or its first part. */
static vpmm_status finish(struct build *build, struct build_limits *limits, struct region *result,
                          enum region_source *source)
{
    vpmm_status status = carry_out(&build->claim, &build->lookout, limits->for_another, &limits->room, result);
    *source = build->lookout.source;
    vpmm_assert(!build->puts_off || !build->lookout.found.units); /* it looks for nothing where it makes nothing */
    if (!build->puts_off || status != VPMM_SUCCESS)
        fetch_add_sc_u32(&build->lookout.arena->builders, UINT32_MAX);
    return status;
}

vpmm_status build_region(struct arena *arena, struct stream *stream, uint64_t pages, struct build_limits *limits,
                         struct region *result, enum region_source *source)
{
    struct region part = {.units = 0};
    bool may_put_off = true; /* once */
    if (pages > arena->space.units.chunk_units)
        return no_room(arena, pages);
    for (;;) {
        struct build build = {
            .lookout = {.arena = arena, .stream = stream, .wanted = pages, .may_wait = limits->may_wait},
            .may_put_off = may_put_off};
        vpmm_status status = VPMM_SUCCESS;
        lock_take(&arena->plan_lock);
        uint32_t seen = load_acquire_u32(&arena->space.units.chunks);
        enum plan_result planned = plan_with_part(&build, limits, &part, result, source, &status);
        pthread_mutex_unlock(&arena->plan_lock);
        bool is_part = planned == PLAN_CLAIMED && build.puts_off;
        if (planned == PLAN_CLAIMED)
            status = finish(&build, limits, is_part ? &part : result, source);
        if (planned == PLAN_NO_HOLE) /* a fresh one has room, but other threads may be quicker to fill it */
            status = chunk_reserve(arena, seen);
        claim_free(&build.claim);
        if (status != VPMM_SUCCESS || (planned != PLAN_NO_HOLE && !is_part))
            return status;
        may_put_off = may_put_off && !is_part;
    }
}

vpmm_status build_initial(struct arena *arena, uint64_t pages)
{
    struct build_limits limits = {.reach = VIEW_PASSED, .room = DEVICE_ROOM_UNKNOWN, .longest_handle = UINT32_MAX};
    enum region_source source;
    struct region region;
    vpmm_status status = chunk_reserve(arena, 0);
    if (status != VPMM_SUCCESS || !pages)
        return status;
    status = build_region(arena, NULL, pages, &limits, &region, &source);
    if (status == VPMM_SUCCESS)
        region_publish(&arena->space, region);
    return status;
}
