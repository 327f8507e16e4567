#include "remap/hands.h"

#include "base/clock.h"
#include "remap/cut.h"

enum {
    MOST_NS = 10 * 1000 * 1000,
    HELD_UP_NS = 2 * 1000 * 1000,
    LONGEST_NS = 1000 * 1000 * 1000,
    SLEEP_US = 100,
    SLEEP_HELD_UP_US = 1000,
    SLEEPS_HELD_UP = 10,
    LOOKS_AT_SLICES = 3,
};

/*
 * A slice may be freed after the look has come by, and the one that its thread takes instead be looked at later: so a
 * look that finds none is made again.
 */
static bool any_slice_to_come(const struct arena *arena, struct hands *hands)
{
    bool any = false;
    for (int i = 0; i < LOOKS_AT_SLICES && !any; i++)
        any = slabs_any_to_come(&arena->slabs, hands->class, &hands->seen);
    return any;
}

static bool any_owned(const struct arena *arena, enum hands_units units, struct hands *hands)
{
    struct owned_look look = {&arena->space.units, &hands->seen};
    if (units == HANDS_PAGES)
        return units_any_of_chunks(&arena->space.units, unit_is_owned, &look);
    return (units == HANDS_SLICES && any_slice_to_come(arena, hands)) || cut_any_owned(arena, &hands->seen);
}

/* A region that is still in the same hands is looked at alone, so that it is known for how long. */
static bool any_in_hands(const struct arena *arena, enum hands_units units, struct hands *hands)
{
    if (word_is_as_seen(&hands->seen))
        return true;
    bool any = any_owned(arena, units, hands);
    hands->seen_ns = clock_now_ns(); /* after the look, which may take longer than HELD_UP_NS */
    return any || load_sc_u32(&arena->builders) || load_sc_u32(&arena->streams.closing);
}

static bool is_held_up(const struct hands *hands, uint64_t now)
{
    return word_is_as_seen(&hands->seen) && now - hands->seen_ns >= HELD_UP_NS;
}

static uint64_t publications(const struct arena *arena)
{
    return load_sc_u64(&arena->space.publications) + load_sc_u64(&arena->cut.publications);
}

/* Until what is held up has come back, or anything else has, or it is time to try again all the same. */
static void sleep_while_held_up(const struct arena *arena, const struct hands *hands)
{
    uint64_t published = publications(arena);
    for (int i = 0; i < SLEEPS_HELD_UP && word_is_as_seen(&hands->seen) && publications(arena) == published; i++)
        clock_sleep_us(SLEEP_HELD_UP_US);
}

/*
 * Blocking: such a release waits for visitors, who are through at once, and for marks of its stream, and no longer.
 * Each record by itself: of two releases the later one may end first. False: there was none.
 */
static bool await_releases(const struct streams *streams)
{
    if (!load_sc_u32(&streams->closing))
        return false;
    for (uint32_t slot = 1, n = load_acquire_u32(&streams->slots); slot < n; slot++)
        while (load_sc_u32(&stream_at(streams, slot)->state) == STREAM_CLOSING)
            clock_sleep_us(SLEEP_US);
    return true;
}

bool hands_try_again(const struct arena *arena, enum hands_units units, struct hands *hands)
{
    uint64_t now = clock_now_ns();
    if (!hands->until_ns) {
        hands->until_ns = now + MOST_NS;
        hands->at_most_ns = now + LONGEST_NS;
    }
    bool held_up = !hands->is_brief && is_held_up(hands, now) && now < hands->at_most_ns;
    if (held_up) {
        hands->until_ns = now + MOST_NS;
        hands->is_over = false; /* the last try is to come after these again */
    }
    if (now >= hands->until_ns) {
        if (hands->is_over)
            return false;
        hands->is_over = true;
        return await_releases(&arena->streams) || !hands->had_none; /* which may have come back since that look */
    }
    bool had_none = hands->had_none;
    hands->had_none = !any_in_hands(arena, units, hands);
    if (held_up)
        sleep_while_held_up(arena, hands);
    else if (!hands->had_none)
        clock_sleep_us(SLEEP_US);
    return !had_none || !hands->had_none;
}
