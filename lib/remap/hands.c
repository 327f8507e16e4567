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
};

static bool any_owned(const struct arena *arena, enum hands_units units, struct hands *hands)
{
    struct owned_look look = {&arena->space.units, &hands->seen};
    if (units == HANDS_PAGES)
        return units_any_of_chunks(&arena->space.units, unit_is_owned, &look);
    return (units == HANDS_SLICES && slabs_any_to_come(&arena->slabs, hands->stream, hands->class, &hands->seen)) ||
           cut_any_owned(arena, &hands->seen);
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

/* How often something has come back so far: pages that were published; of less than pages, these, subpages, and what was freed.
 */
static uint64_t count_back(const struct arena *arena, enum hands_units units)
{
    uint64_t pages = load_sc_u64(&arena->space.publications);
    vpmm_stats stats;
    if (units == HANDS_PAGES)
        return pages;
    stats_read(arena->stats, &stats);
    return pages + load_sc_u64(&arena->cut.publications) + stats.frees;
}

/*
 * Whether anything has come back since the last look. The try after that may have come by while it was away, and a look
 * as well: it goes from one to the next, and what it has seen in use may be free, and what was free in use, when it
 * comes to its end.
 */
static bool came_back(const struct arena *arena, enum hands_units units, struct hands *hands)
{
    uint64_t before = hands->back;
    hands->back = count_back(arena, units);
    return hands->back != before && !hands->is_brief;
}

static bool is_held_up(const struct hands *hands, uint64_t now)
{
    return word_is_as_seen(&hands->seen) && now - hands->seen_ns >= HELD_UP_NS;
}

/* Until the region has come back, or anything else has, or it is time to try again all the same. */
static void sleep_while_held_up(const struct arena *arena, const struct hands *hands)
{
    uint64_t published = load_sc_u64(&arena->space.publications);
    for (int i = 0; i < SLEEPS_HELD_UP && word_is_as_seen(&hands->seen); i++) {
        clock_sleep_us(SLEEP_HELD_UP_US);
        if (load_sc_u64(&arena->space.publications) != published)
            return;
    }
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
        hands->back = count_back(arena, units);
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
    bool any_back = came_back(arena, units, hands); /* before the look: what has come back since is not in hands */
    hands->had_none = !any_in_hands(arena, units, hands) && !any_back;
    if (held_up)
        sleep_while_held_up(arena, hands);
    else if (!hands->had_none)
        clock_sleep_us(SLEEP_US);
    return !had_none || !hands->had_none;
}
