#include "remap/pace.h"

#include "base/assert.h"

enum { STEPS = 32 };

void pace_init(struct pace *pace)
{
    store_relaxed_u32(&pace->slowness, PACE_ONE);
}

static uint32_t within(uint32_t slowness)
{
    const uint32_t most = (uint32_t)PACE_ONE * PACE_MOST;
    return slowness < PACE_ONE ? PACE_ONE : slowness > most ? most : slowness;
}

void pace_note(struct pace *pace, double price_us, uint64_t took_ns)
{
    uint32_t slowness = load_relaxed_u32(&pace->slowness), step = slowness / STEPS;
    bool slower = (double)took_ns * (double)PACE_ONE > price_us * 1e3 * slowness;
    vpmm_assert(slowness >= PACE_ONE);
    store_relaxed_u32(&pace->slowness, within(slower ? slowness + step : slowness - step));
}

double pace_slowness(const struct pace *pace)
{
    return (double)load_relaxed_u32(&pace->slowness) / (double)PACE_ONE;
}
