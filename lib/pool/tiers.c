#include "pool/tiers.h"

#include "base/clock.h"
#include "cache/regions.h"
#include "remap/build.h"
#include "remap/cut.h"
#include "remap/pass.h"
#include "remap/settle.h"

void tiers_count(struct arena *arena, enum region_source source)
{
    static const enum stat counter[] = {
        [REGION_NONE] = STAT_builds, /* found nowhere, so built */
        [REGION_OWN_STREAM] = STAT_hits_own_stream,
        [REGION_COMPLETED] = STAT_hits_completed,
        [REGION_WAITED] = STAT_hits_waited,
    };
    stats_count(arena->stats, counter[source]);
}

bool tiers_is_shortage(vpmm_status status)
{
    return status == VPMM_ERROR_OUT_OF_MEMORY || status == VPMM_ERROR_OUT_OF_ADDRESS_SPACE;
}

void tiers_flush(struct arena *arena)
{
    cut_flush(arena);
    fronts_flush(arena->space.fronts, NULL, true);
}

/* Tiers 2 and 3. */
static enum region_source find_pages(struct arena *arena, struct stream *stream, uint64_t pages, struct region *region)
{
    return find_free(&arena->space, stream, (struct want){pages, 1}, false, false, region);
}

/* Tiers 2 and 3; then what the thread itself has cached for the stream in another shape; then what others have. */
static enum region_source find_with_own_cache(struct arena *arena, struct stream *stream, uint64_t pages,
                                              struct region *region)
{
    enum region_source source = find_pages(arena, stream, pages, region);
    struct cache *cache = source == REGION_NONE ? front_cache(arena->space.fronts, stream) : NULL;
    if (cache && regions_take_longer(cache, pages, region))
        source = REGION_OWN_STREAM;
    if (source == REGION_NONE && fronts_flush(arena->space.fronts, stream, false))
        source = find_pages(arena, stream, pages, region);
    return source;
}

/* What has passed by now, and with it tiers 2 to 4 once more. */
static enum region_source refresh_and_find(struct arena *arena, struct stream *stream, uint64_t pages, bool may_wait,
                                           struct region *region)
{
    pass_refresh(arena);
    return find_thoroughly(&arena->space, stream, (struct want){pages, 1}, may_wait, region);
}

/* Where the setting lets the stream wait on the device, what others have freed is used before the pool grows. */
static vpmm_status build_or_grow(struct arena *arena, struct stream *stream, uint64_t pages,
                                 struct build_limits *limits, struct region *region, enum region_source *source)
{
    struct build_limits waiting = *limits;
    if (load_relaxed_u32(&arena->reuse) == VPMM_REUSE_WAIT_DEVICE && limits->reach != VIEW_ALL) {
        waiting.reach = VIEW_ALL;
        vpmm_status status = build_region(arena, stream, pages, &waiting, region, source);
        if (!tiers_is_shortage(status))
            return status;
    }
    return build_region(arena, stream, pages, limits, region, source); /* not all of it could be waited for */
}

/*
 * Tier 5 with the turn, or what became free meanwhile. Before the pool grows, the caches of all threads and streams give
 * what they have, and so do the pages that are cut.
 */
static vpmm_status build_at_turn(struct arena *arena, struct stream *stream, uint64_t pages, bool may_wait,
                                 struct build_limits *limits, struct region *region, enum region_source *source)
{
    struct build_limits keeping = *limits;
    keeping.keep_size = true;
    *source = refresh_and_find(arena, stream, pages, may_wait, region);
    if (*source != REGION_NONE)
        return VPMM_SUCCESS;
    vpmm_status status = build_region(arena, stream, pages, &keeping, region, source);
    if (!tiers_is_shortage(status))
        return status;
    if (fronts_noted(arena->space.fronts) || cut_noted(arena)) {
        tiers_flush(arena);
        *source = refresh_and_find(arena, stream, pages, may_wait, region);
    }
    return *source != REGION_NONE ? VPMM_SUCCESS : build_or_grow(arena, stream, pages, limits, region, source);
}

/* Enters the queue of builders. REGION_NONE: it is the caller's turn. Else memory was published meanwhile. */
static enum region_source await_turn(struct arena *arena, struct stream *stream, uint64_t pages,
                                     struct turn_place *place, struct region *region)
{
    struct turn *turn = &arena->turn;
    enum region_source source = REGION_NONE;
    if (turn_enter(turn, place, pages, stream->slot))
        return REGION_NONE;
    do {
        turn_read(turn, place);
        source = find_pages(arena, stream, pages, region);
    } while (source == REGION_NONE && turn_wait(turn, place));
    return source;
}

/*
 * Tiers 2 to 5. Where another thread builds, tier 4 comes before the queue: it waits for no turn and no lock of the
 * queue's, and who waits on the host for the memory that it has found keeps nobody behind it from building.
 */
static vpmm_status find_or_build(struct arena *arena, struct stream *stream, uint64_t pages, bool may_wait,
                                 struct build_limits *limits, struct region *region, enum region_source *source)
{
    struct turn *turn = &arena->turn;
    struct turn_place place;
    vpmm_status status = VPMM_SUCCESS;
    *source = find_with_own_cache(arena, stream, pages, region);
    if (*source != REGION_NONE)
        return VPMM_SUCCESS;
    if (!limits->since_ns)
        limits->since_ns = clock_now_ns();
    bool has_turn = turn_try(turn, &place);
    if (!has_turn && may_wait)
        *source = region_take_waiting(&arena->space, stream, pages, false, region);
    if (*source != REGION_NONE)
        return VPMM_SUCCESS;
    if (!has_turn)
        *source = await_turn(arena, stream, pages, &place, region);
    if (*source == REGION_NONE)
        status = build_at_turn(arena, stream, pages, may_wait, limits, region, source);
    if (status == VPMM_SUCCESS && region->units > pages)
        *region = region_keep_front(&arena->space, *region, pages); /* the next one is to see the rest */
    turn_leave(turn, &place);
    return status;
}

/* Memory in other threads' hands comes back in a moment: at most 10 ms. */
static void await_builders(struct arena *arena)
{
    for (int i = 0; i < 100 && load_sc_u32(&arena->builders); i++)
        clock_sleep_us(100);
}

static bool policy_waits(const struct arena *arena)
{
    return load_relaxed_u32(&arena->reuse) != VPMM_REUSE_COMPLETED;
}

/*
 * Waits for what was freed before, and tries again whenever some of it has passed: what the request needs may be the
 * first of it. What the device gives is asked for anew when it has been given something back, and at last.
 */
static vpmm_status settle_and_find(struct arena *arena, struct stream *stream, uint64_t pages,
                                   struct build_limits *limits, struct region *region, enum region_source *source)
{
    struct settling settling;
    bool more = true;
    vpmm_status status = settling_begin(arena, &settling);
    if (status != VPMM_SUCCESS)
        return status;
    do {
        uint64_t quarantined = stats_sum(arena->stats, STAT_quarantined_bytes);
        settling_wait_for_some(arena, &settling, &more);
        if (!more)
            async_pool_trim(arena->async);
        cut_flush(arena); /* now that slices have passed, slabs are empty */
        if (!more || stats_sum(arena->stats, STAT_quarantined_bytes) < quarantined)
            limits->creatable_pages = UINT64_MAX;
        status = find_or_build(arena, stream, pages, true, limits, region, source);
    } while (more && tiers_is_shortage(status));
    settling_end(&settling);
    return status;
}

/* Tier 6: before a request fails within these limits, everything is taken back, cheapest first. */
static vpmm_status reclaim(struct arena *arena, struct stream *stream, uint64_t pages, struct build_limits usable,
                           struct region *region, enum region_source *source)
{
    struct build_limits all = usable;
    all.reach = VIEW_ALL;
    stats_count(arena->stats, STAT_reclaims);
    tiers_flush(arena);
    pass_soon(arena);
    cut_flush(arena); /* now that slices have passed, slabs are empty */
    vpmm_status status = find_or_build(arena, stream, pages, policy_waits(arena), &usable, region, source);
    if (arena->is_graph) /* no wait of this pool's frees memory for another stream */
        return status;
    if (tiers_is_shortage(status)) {
        await_builders(arena);
        status = find_or_build(arena, stream, pages, true, &all, region, source);
    }
    if (tiers_is_shortage(status)) /* for what could not be waited for, and so that the driver's pool can let go */
        status = settle_and_find(arena, stream, pages, &all, region, source);
    if (tiers_is_shortage(status)) /* the device gave less than was asked of it: with just that */
        status = find_or_build(arena, stream, pages, true, &all, region, source);
    return status;
}

vpmm_status tiers_take_pages(struct arena *arena, uint64_t pages, uint64_t enough, uint32_t longest_handle,
                             struct stream *stream, struct region *region, enum region_source *source)
{
    struct build_limits limits = {
        .reach = VIEW_USABLE, .creatable_pages = UINT64_MAX, .longest_handle = longest_handle};
    vpmm_status status = find_or_build(arena, stream, pages, policy_waits(arena), &limits, region, source);
    if (tiers_is_shortage(status) && enough < pages) {
        pages = enough;
        status = find_or_build(arena, stream, pages, policy_waits(arena), &limits, region, source);
    }
    if (tiers_is_shortage(status) && pages <= arena->space.units.chunk_units)
        status = reclaim(arena, stream, pages, limits, region, source);
    if (limits.since_ns)
        stats_note_latency(arena->stats, clock_now_ns() - limits.since_ns);
    return status;
}

void tiers_release_pages(struct arena *arena)
{
    struct device_scope scope;
    uint64_t released = 0;
    if (device_enter(arena->device, &scope) != VPMM_SUCCESS)
        return;
    tiers_flush(arena);
    pass_now(arena);
    pass_release(arena, 0, &released);
    device_leave(arena->device, &scope);
}
