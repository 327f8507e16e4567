#include "remap/settle.h"

#include "base/clock.h"
#include "cache/front.h"
#include "remap/pass.h"

#include <stdlib.h>

enum {
    TRIES = 3, /* at a point that waits do not bring nearer */
    PATIENCE_NS = 100000000,
    FIRST_PAUSE_NS = 100000,
    LONGEST_PAUSE_NS = 5000000,
    PAUSE_PART = 4, /* of the time so far is the next pause: what has passed is seen late by so much */
};

struct settling_point {
    struct fence fence;
    uint32_t tries; /* TRIES: it is left to the wait for its context */
};

/* ---- the points ---- */

/* False: everything of the stream has passed. */
static bool point_of(struct arena *arena, uint32_t slot, struct settling_point *point)
{
    struct stream *stream = stream_at(&arena->streams, slot);
    if (exchange_relaxed_u32(&arena->note[slot].freed_async, 0)) /* the driver's pool lets go of what has completed */
        stream_new_point(&arena->streams, stream);
    *point = (struct settling_point){.fence = {slot, load_sc_u64(&stream->published)}};
    if (fence_passed(&arena->streams, point->fence))
        return false;
    if (!fence_waitable(&arena->streams, point->fence))
        point->tries = TRIES;
    return true;
}

static uint64_t completed_of(const struct arena *arena, const struct settling_point *point)
{
    uint64_t completed = load_sc_u64(&stream_at(&arena->streams, point->fence.stream)->completed);
    return completed < point->fence.number ? completed : point->fence.number;
}

/* How many fences up to the points have passed, of streams whose events can show it or not. */
static uint64_t count_passed(const struct arena *arena, const struct settling *settling)
{
    uint64_t passed = 0;
    for (uint32_t i = 0; i < settling->points; i++)
        passed += completed_of(arena, &settling->point[i]);
    return passed;
}

static bool all_passed(const struct arena *arena, const struct settling *settling)
{
    for (uint32_t i = 0; i < settling->points; i++)
        if (!fence_passed(&arena->streams, settling->point[i].fence))
            return false;
    return true;
}

/* Of those that events can show to pass, the one with the fewest fences to go. NULL: all have passed. */
static struct settling_point *nearest(const struct arena *arena, const struct settling *settling)
{
    struct settling_point *nearest = NULL;
    uint64_t least = UINT64_MAX;
    for (uint32_t i = 0; i < settling->points; i++) {
        struct settling_point *point = &settling->point[i];
        uint64_t left = point->fence.number - completed_of(arena, point);
        if (left && left < least && point->tries < TRIES) {
            least = left;
            nearest = point;
        }
    }
    return nearest;
}

vpmm_status settling_begin(struct arena *arena, struct settling *settling)
{
    fronts_flush(arena->space.fronts, NULL, true);
    fronts_flush(arena->cut.fronts, NULL, true);
    uint32_t slots = load_acquire_u32(&arena->streams.slots);
    *settling = (struct settling){.point = calloc(slots, sizeof *settling->point)};
    if (!settling->point)
        return fail(VPMM_ERROR_HOST_MEMORY, "no host memory for a list of streams");
    for (uint32_t slot = 1; slot < slots; slot++)
        settling->points += point_of(arena, slot, &settling->point[settling->points]);
    settling->passed = count_passed(arena, settling);
    settling->begun_ns = settling->passed_ns = clock_now_ns();
    return VPMM_SUCCESS;
}

void settling_end(struct settling *settling)
{
    free(settling->point);
}

/* ---- the wait ---- */

/* True: something more has passed, by whoever's look. */
static bool has_advanced(const struct arena *arena, struct settling *settling)
{
    uint64_t passed = count_passed(arena, settling);
    if (passed == settling->passed)
        return false;
    settling->passed = passed;
    settling->passed_ns = clock_now_ns();
    return true;
}

static void pause_before_look(const struct settling *settling)
{
    uint64_t ns = (clock_now_ns() - settling->begun_ns) / PAUSE_PART;
    ns = ns < FIRST_PAUSE_NS ? FIRST_PAUSE_NS : ns > LONGEST_PAUSE_NS ? LONGEST_PAUSE_NS : ns;
    clock_sleep_us((long)(ns / 1000));
}

/*
 * On the host, up to this number of the point's stream. While every place for a mark is taken what is not marked is
 * waited for by an event of its own, which tells this thread alone; the marks that have passed then make room for one
 * that covers it.
 */
static vpmm_status wait_on_host(struct arena *arena, struct settling_point *point, uint64_t number)
{
    uint64_t before = completed_of(arena, point);
    struct fence fence = {point->fence.stream, number};
    bool waited = stream_wait_host(&arena->streams, fence) == VPMM_SUCCESS;
    vpmm_status status = pass_soon(arena);
    if (completed_of(arena, point) == before)
        point->tries = waited ? point->tries + 1 : TRIES;
    return status;
}

/* What is left when all that events can show has passed. */
static vpmm_status finish(struct arena *arena, const struct settling *settling)
{
    vpmm_status status = VPMM_SUCCESS;
    if (!all_passed(arena, settling))
        status = pass_wait_for_contexts(arena);
    return status == VPMM_SUCCESS ? pass_now(arena) : status;
}

/* A look after a pause; where the patience is over, a wait for the point's next mark. */
static vpmm_status wait_a_little(struct arena *arena, const struct settling *settling, struct settling_point *point)
{
    if (!arena->has_reaper || clock_now_ns() - settling->passed_ns >= PATIENCE_NS)
        return wait_on_host(arena, point, completed_of(arena, point) + 1);
    pause_before_look(settling);
    return pass_soon(arena);
}

vpmm_status settling_wait_for_some(struct arena *arena, struct settling *settling, bool *more)
{
    struct settling_point *point;
    vpmm_status status = VPMM_SUCCESS;
    *more = true;
    while (status == VPMM_SUCCESS && (point = nearest(arena, settling))) {
        if (has_advanced(arena, settling))
            return VPMM_SUCCESS;
        status = wait_a_little(arena, settling, point);
    }
    *more = false;
    return status == VPMM_SUCCESS ? finish(arena, settling) : status;
}

vpmm_status settle(struct arena *arena)
{
    struct settling settling;
    struct settling_point *point;
    vpmm_status status = settling_begin(arena, &settling);
    while (status == VPMM_SUCCESS && (point = nearest(arena, &settling)))
        status = wait_on_host(arena, point, point->fence.number);
    if (status == VPMM_SUCCESS)
        status = finish(arena, &settling);
    settling_end(&settling);
    return status;
}
