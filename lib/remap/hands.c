#include "remap/hands.h"

#include "base/clock.h"
#include "remap/cut.h"

enum { MOST_NS = 10 * 1000 * 1000, SLEEP_US = 100 };

static bool any_in_hands(const struct arena *arena, enum hands_units units)
{
    return load_sc_u32(&arena->builders) || load_sc_u32(&arena->streams.closing) ||
           (units == HANDS_PAGES ? units_any_of_chunks(&arena->space.units, unit_is_owned, NULL)
                                 : cut_any_owned(arena));
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
    if (!hands->until_ns)
        hands->until_ns = now + MOST_NS;
    if (now >= hands->until_ns) {
        if (hands->is_over)
            return false;
        hands->is_over = true;
        return await_releases(&arena->streams) || !hands->had_none; /* which may have come back since that look */
    }
    bool had_none = hands->had_none;
    hands->had_none = !any_in_hands(arena, units);
    if (!hands->had_none)
        clock_sleep_us(SLEEP_US);
    return !had_none || !hands->had_none;
}
