#include "pool/tiers.h"

#include "base/clock.h"
#include "cache/regions.h"
#include "remap/build.h"
#include "remap/cut.h"
#include "remap/hands.h"
#include "remap/make_way.h"
#include "remap/pass.h"
#include "remap/settle.h"

#include <stdio.h>

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

static bool is_shortage(vpmm_status status)
{
    return status == VPMM_ERROR_OUT_OF_MEMORY || status == VPMM_ERROR_OUT_OF_ADDRESS_SPACE;
}

void tiers_flush(struct arena *arena)
{
    cut_flush_to_grow(arena);
    fronts_flush(arena->space.fronts, NULL, true);
}

bool tiers_policy_waits(const struct arena *arena)
{
    return load_relaxed_u32(&arena->reuse) != VPMM_REUSE_COMPLETED;
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

static vpmm_status build(struct arena *arena, const struct turn_request *request, struct build_limits *limits,
                         struct turn_answer *answer)
{
    return build_region(arena, request->stream, request->pages, limits, &answer->region, &answer->source);
}

/* Where the setting lets the stream wait on the device, what others have freed is used before the pool grows. */
static vpmm_status build_or_grow(struct arena *arena, const struct turn_request *request, struct build_limits *limits,
                                 struct turn_answer *answer)
{
    struct build_limits waiting = *limits;
    if (load_relaxed_u32(&arena->reuse) == VPMM_REUSE_WAIT_DEVICE && limits->reach != VIEW_ALL) {
        waiting.reach = VIEW_ALL;
        vpmm_status status = build(arena, request, &waiting, answer);
        limits->room = waiting.room;
        if (!is_shortage(status) || limits->for_another)
            return status;
    }
    return build(arena, request, limits, answer); /* not all of it could be waited for, or made */
}

/* Whether tier 4 would serve another thread's request: that is left to it (turn.h). */
static bool is_left_to_its_thread(const struct arena *arena, const struct turn_request *request,
                                  const struct build_limits *limits)
{
    return limits->for_another && tiers_policy_waits(arena) &&
           region_may_wait(&arena->space, request->stream, request->pages);
}

/* What has passed by now, and with it tiers 2 to 4 once more. */
static bool refresh_and_find(struct arena *arena, const struct turn_request *request, const struct build_limits *limits,
                             struct turn_answer *answer)
{
    pass_refresh(arena, request->stream);
    answer->source = find_thoroughly(&arena->space, request->stream, (struct want){request->pages, 1}, limits->may_wait,
                                     &answer->region);
    return answer->source != REGION_NONE;
}

/*
 * Tier 5 with the turn, or what became free meanwhile. Before the pool grows, the caches of all threads and streams
 * give what they have, and so do the pages that are cut.
 *
 * Where many threads build the first plan, for what there is, is in vain in 60 to 85 of 100 builds. It is made all the
 * same. Without it where the build before had grown and threads have waited since, the second plan grows where the
 * first would have moved more: in virtual time (stress/policy.py) four threads held 1.059 for 1.051 times what was in
 * use, and the fourth pass of sixteen took 17 ms of driver time for 7. To flush the caches before it where threads
 * wait, so that it sees more, helps no more: 1.063 for 1.051, and 11 ms for 7.
 */
static vpmm_status build_at_turn(struct arena *arena, const struct turn_request *request, struct build_limits *limits,
                                 struct turn_answer *answer)
{
    struct build_limits keeping = *limits;
    keeping.keep_size = true;
    if (refresh_and_find(arena, request, limits, answer))
        return VPMM_SUCCESS;
    if (is_left_to_its_thread(arena, request, limits))
        return VPMM_ERROR_OUT_OF_MEMORY;
    vpmm_status status = build(arena, request, &keeping, answer);
    if (!is_shortage(status))
        return status;
    if (fronts_noted(arena->space.fronts) || cut_noted(arena)) {
        tiers_flush(arena);
        if (refresh_and_find(arena, request, limits, answer))
            return VPMM_SUCCESS;
        if (is_left_to_its_thread(arena, request, limits))
            return VPMM_ERROR_OUT_OF_MEMORY;
    }
    return build_or_grow(arena, request, limits, answer);
}

/* The next one is to see the rest. */
static void keep_what_was_asked_for(struct arena *arena, uint64_t pages, struct region *region)
{
    if (region->units > pages)
        *region = region_keep_front(&arena->space, *region, pages);
}

/* For who waits next. False: it is to see to that itself. */
static bool serve_one(struct arena *arena, struct turn_place *place, const struct turn_request *request)
{
    struct build_limits limits = {.reach = VIEW_USABLE,
                                  .room = DEVICE_ROOM_UNKNOWN,
                                  .longest_handle = request->longest_handle,
                                  .for_another = true};
    struct turn_answer answer;
    bool is_built = build_at_turn(arena, request, &limits, &answer) == VPMM_SUCCESS;
    if (is_built)
        keep_what_was_asked_for(arena, request->pages, &answer.region);
    if (!turn_answer(&arena->turn, place, is_built ? &answer : NULL) && is_built)
        region_publish(&arena->space, answer.region); /* it has found memory elsewhere, or waits no longer */
    stream_leave(request->stream);
    return is_built;
}

/*
 * The calling thread, which has the turn, builds for those who wait: see turn.h. As many as wait now, so that its own
 * request takes no longer than if it had been the last of them.
 */
static void serve_others(struct arena *arena, struct turn_place *place)
{
    struct turn_request request;
    uint64_t end = clock_now_ns() + TURN_SERVES_NS;
    bool goes_on = true;
    for (uint32_t n = turn_waiters(&arena->turn); goes_on && n > 0 && clock_now_ns() < end; n--)
        goes_on = turn_serve(&arena->turn, place, &request) && serve_one(arena, place, &request);
}

/* Enters the queue of builders. False: it is the caller's turn. Else it has memory, found or built by another. */
static bool await_turn(struct arena *arena, const struct turn_request *request, struct turn_place *place,
                       struct turn_answer *answer)
{
    struct turn *turn = &arena->turn;
    enum turn_news news;
    if (turn_enter(turn, place, *request))
        return false;
    do {
        turn_read(turn, place);
        answer->source = find_pages(arena, request->stream, request->pages, &answer->region);
        if (answer->source != REGION_NONE) {
            if (turn_withdraw(turn, place))
                region_publish(&arena->space, place->answer.region);
            return true;
        }
        news = turn_wait(turn, place);
    } while (news == TURN_LOOK);
    if (news == TURN_SERVED)
        *answer = place->answer;
    return news == TURN_SERVED;
}

/*
 * Tiers 2 to 5; what is REGION_WAITED is yet to be waited for. Where another thread builds, tier 4 comes before the
 * queue: it waits for no turn and no lock of the queue's.
 */
static vpmm_status find_or_take_turn(struct arena *arena, const struct turn_request *request,
                                     struct build_limits *limits, struct turn_answer *answer)
{
    struct turn *turn = &arena->turn;
    struct turn_place place;
    answer->source = find_with_own_cache(arena, request->stream, request->pages, &answer->region);
    if (answer->source != REGION_NONE)
        return VPMM_SUCCESS;
    if (!limits->since_ns)
        limits->since_ns = clock_now_ns();
    bool has_turn = turn_try(turn, &place);
    if (!has_turn && limits->may_wait &&
        region_take_freed_elsewhere(&arena->space, request->stream, (struct want){request->pages, 1}, false,
                                    fence_waitable, &answer->region)) {
        answer->source = REGION_WAITED;
        return VPMM_SUCCESS;
    }
    if (!has_turn && await_turn(arena, request, &place, answer)) {
        keep_what_was_asked_for(arena, request->pages, &answer->region);
        return VPMM_SUCCESS;
    }
    if (!has_turn && !limits->is_short)
        serve_others(arena, &place);
    vpmm_status status = build_at_turn(arena, request, limits, answer);
    if (status == VPMM_SUCCESS)
        keep_what_was_asked_for(arena, request->pages, &answer->region);
    turn_leave(turn, &place);
    return status;
}

/*
 * Tiers 2 to 5. Who waits on the host for what tier 4 has found has neither the turn nor a place in the queue: it keeps
 * nobody from building. What cannot be waited for is free again; other memory may do, or the same a moment later: so it
 * is all tried again, TIER_4_TRIES times in all with tier 4, and at last without it.
 */
static vpmm_status find_or_build(struct arena *arena, const struct turn_request *request, struct build_limits *limits,
                                 struct turn_answer *answer)
{
    bool may_wait = limits->may_wait;
    vpmm_status status;
    for (int tries = 1;; tries++) {
        status = find_or_take_turn(arena, request, limits, answer);
        if (status != VPMM_SUCCESS || answer->source != REGION_WAITED)
            break;
        vpmm_assert(limits->may_wait);
        answer->source = region_await(&arena->space, request->stream, answer->region);
        if (answer->source != REGION_NONE)
            break;
        limits->may_wait = tries < TIER_4_TRIES;
    }
    limits->may_wait = may_wait;
    return status;
}

/* What others have claimed for a build that fails comes back in a moment: at most 10 ms. */
static void await_builders(struct arena *arena)
{
    for (int i = 0; i < 100 && load_sc_u32(&arena->builders); i++)
        clock_sleep_us(100);
}

void tiers_note_wait(struct tiers_wait *wait, vpmm_status status)
{
    wait->status = status;
    if (status != VPMM_SUCCESS)
        snprintf(wait->words, sizeof wait->words, "%s", vpmm_last_error());
}

vpmm_status tiers_after_wait(const struct tiers_wait *wait, vpmm_status status)
{
    bool is_refused = wait->status != VPMM_SUCCESS && !is_shortage(wait->status);
    return is_refused && is_shortage(status) ? fail(wait->status, "%s", wait->words) : status;
}

/*
 * Waits for what was freed before, and tries again whenever some of it has passed: what the request needs may be the
 * first of it. At last the device is asked anew: other pools may have given it something back.
 */
static vpmm_status find_while_settling(struct arena *arena, struct settling *settling,
                                       const struct turn_request *request, struct build_limits *limits,
                                       struct turn_answer *answer, struct tiers_wait *wait)
{
    bool more = true;
    vpmm_status status;
    do {
        tiers_note_wait(wait, settling_wait_for_some(arena, settling, &more));
        if (!more) {
            async_pool_trim(arena->async);
            limits->room = DEVICE_ROOM_UNKNOWN;
        }
        cut_flush(arena); /* now that slices have passed, slabs are empty */
        status = find_or_build(arena, request, limits, answer);
    } while (more && is_shortage(status));
    return status;
}

/*
 * What the pool may have mapped: no more than the cap, and than what it has, what is in quarantine and what the device
 * says is free. The device is asked last, so that what leaves quarantine meanwhile is counted twice rather than not at
 * all. Where it does not say, the cap alone counts. What the driver's own pool keeps (async_pool.h) is not counted: it
 * lets go when the last settling ends.
 */
static uint64_t may_be_mapped(const struct arena *arena)
{
    uint64_t mapped = stats_level(arena->stats, STAT_mapped_bytes), cap = load_relaxed_u64(&arena->max_mapped);
    uint64_t most = mapped + stats_level(arena->stats, STAT_quarantined_bytes);
    size_t room;
    if (device_free_memory(arena->device, &room) == CUDA_SUCCESS)
        most += room;
    else if (cap)
        most = cap;
    if (cap && cap < most)
        most = cap;
    return most > mapped ? most : mapped;
}

/*
 * Whether so much is free, what is free of cut pages among it, or may be made. What it is behind, or beside, is not
 * looked at.
 */
static bool may_suffice(const struct arena *arena, uint64_t pages)
{
    const struct stats *stats = arena->stats;
    uint64_t most = may_be_mapped(arena) + stats_level(stats, STAT_slab_bytes);
    uint64_t used = stats_level(stats, STAT_live_bytes) + stats_level(stats, STAT_slab_live_bytes);
    return most > used && (most - used) >> arena->space.units.unit_shift >= pages;
}

/*
 * What others have freed meanwhile is waited for too, if there is enough free memory for the request: but not for ever,
 * since where others are served all the time there may always be some.
 */
static vpmm_status settle_and_find(struct arena *arena, const struct turn_request *request, struct build_limits *limits,
                                   struct turn_answer *answer, struct tiers_wait *wait)
{
    enum { SETTLINGS = 4 };
    vpmm_status status = VPMM_ERROR_OUT_OF_MEMORY;
    for (int i = 0; i < SETTLINGS && is_shortage(status) && wait->status == VPMM_SUCCESS; i++) {
        struct settling settling;
        vpmm_status begun = settling_begin(arena, &settling);
        if (begun != VPMM_SUCCESS)
            return begun;
        bool waits = !i || (settling.points && may_suffice(arena, request->pages));
        if (waits)
            status = find_while_settling(arena, &settling, request, limits, answer, wait);
        settling_end(&settling);
        if (!waits)
            return status;
    }
    return status;
}

/* For a request that has failed with this status: what other threads have in their hands (hands.h). */
static vpmm_status find_in_hands(struct arena *arena, const struct turn_request *request, struct build_limits *limits,
                                 struct turn_answer *answer, vpmm_status status)
{
    struct hands hands = {0};
    while (is_shortage(status) && hands_try_again(arena, HANDS_PAGES, &hands)) {
        fronts_flush_every(arena->space.fronts);
        fronts_flush_every(arena->cut.fronts);
        status = find_or_build(arena, request, limits, answer);
    }
    return status;
}

/*
 * After all else, for a request that has failed with this status: free handles may be in the way (make_way.h). With the
 * room that there is then the policy plans for no more than the device has. Others that build meanwhile may move
 * handles, or take the place where the request would have gone: then there may be another one.
 */
static vpmm_status find_when_way_is_made(struct arena *arena, const struct turn_request *request,
                                         struct build_limits *limits, struct turn_answer *answer, vpmm_status status)
{
    enum { TRIES = 3 };
    for (int i = 0; i < TRIES && is_shortage(status) && make_way(arena, request->pages, &limits->room); i++)
        status = find_or_build(arena, request, limits, answer);
    return status;
}

/* Tier 6: before a request fails within these limits, everything is taken back, cheapest first. */
static vpmm_status reclaim(struct arena *arena, const struct turn_request *request, struct build_limits usable,
                           struct turn_answer *answer)
{
    usable.is_short = true;
    struct build_limits all = usable;
    struct tiers_wait wait = {.status = VPMM_SUCCESS};
    all.reach = VIEW_ALL;
    all.may_wait = true;
    stats_count(arena->stats, STAT_reclaims);
    tiers_flush(arena);
    pass_soon(arena);
    cut_flush(arena); /* now that slices have passed, slabs are empty */
    vpmm_status status = find_or_build(arena, request, &usable, answer);
    if (arena->is_graph) /* no wait of this pool's frees memory for another stream */
        return find_in_hands(arena, request, &usable, answer, status);
    if (is_shortage(status)) {
        await_builders(arena);
        status = find_or_build(arena, request, &all, answer);
    }
    if (is_shortage(status)) /* for what could not be waited for, and so that the driver's pool can let go */
        status = settle_and_find(arena, request, &all, answer, &wait);
    if (is_shortage(status)) /* the device gave less than was asked of it: with just that */
        status = find_or_build(arena, request, &all, answer);
    status = find_in_hands(arena, request, &all, answer, status);
    status = find_when_way_is_made(arena, request, &all, answer, status);
    return tiers_after_wait(&wait, status);
}

/*
 * What takes long to build is built by the thread that needs it: it loses little by that, and may be done with so much
 * memory by the time that the next one plans (in virtual time four threads held 1.10 to 1.36 times what was in use when
 * all were served, for 1.06).
 */
static bool may_be_served(const struct arena *arena, uint64_t pages)
{
    const uint64_t most_bytes = UINT64_C(256) << 20;
    return pages << arena->space.units.unit_shift <= most_bytes;
}

vpmm_status tiers_take_pages(struct arena *arena, uint64_t pages, uint64_t enough, uint32_t longest_handle,
                             struct stream *stream, struct region *region, enum region_source *source)
{
    struct build_limits limits = {.reach = VIEW_USABLE,
                                  .room = DEVICE_ROOM_UNKNOWN,
                                  .longest_handle = longest_handle,
                                  .may_wait = tiers_policy_waits(arena)};
    struct turn_request request = {stream, pages, longest_handle, may_be_served(arena, pages)};
    struct turn_answer answer = {.source = REGION_NONE};
    vpmm_status status = find_or_build(arena, &request, &limits, &answer);
    if (is_shortage(status) && enough < pages) {
        request.pages = enough;
        limits.room = DEVICE_ROOM_UNKNOWN; /* a longer handle that was refused says nothing of a shorter one */
        status = find_or_build(arena, &request, &limits, &answer);
    }
    if (is_shortage(status) && request.pages <= arena->space.units.chunk_units)
        status = reclaim(arena, &request, limits, &answer);
    if (limits.since_ns)
        stats_note_latency(arena->stats, clock_now_ns() - limits.since_ns);
    *region = answer.region;
    *source = answer.source;
    return status;
}

void tiers_release_pages(struct arena *arena)
{
    struct device_scope scope;
    uint64_t released = 0;
    if (device_enter(arena->device, &scope) != VPMM_SUCCESS)
        return;
    tiers_flush(arena);
    pass_refresh(arena, NULL); /* as vpmm_trim */
    pass_now(arena);
    pass_release(arena, 0, &released);
    device_leave(arena->device, &scope);
}
