#include "remap/hands.h"

#include "base/clock.h"
#include "remap/cut.h"

enum { MOST_NS = 10 * 1000 * 1000, SLEEP_US = 100 };

static bool any_in_hands(const struct arena *arena, enum hands_units units)
{
    return load_sc_u32(&arena->builders) ||
           (units == HANDS_PAGES ? units_any_of_chunks(&arena->space.units, unit_is_owned, NULL)
                                 : cut_any_owned(arena));
}

bool hands_try_again(const struct arena *arena, enum hands_units units, struct hands *hands)
{
    uint64_t now = clock_now_ns();
    if (!hands->until_ns)
        hands->until_ns = now + MOST_NS;
    if (now >= hands->until_ns)
        return false;
    bool had_none = hands->had_none;
    hands->had_none = !any_in_hands(arena, units);
    if (!hands->had_none)
        clock_sleep_us(SLEEP_US);
    return !had_none || !hands->had_none;
}
