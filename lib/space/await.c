#include "space/await.h"

#include "base/assert.h"
#include "base/clock.h"

enum { SLOT_BITS = 32 };

void await_init(struct await *await)
{
    for (unsigned i = 0; i < AWAIT_PLACES; i++)
        wakeup_init(&await->place[i].news);
}

unsigned await_enter(struct await *await, uint64_t units, uint32_t slot)
{
    for (unsigned i = 0; i < AWAIT_PLACES; i++) {
        uint64_t nobody = 0;
        if (load_relaxed_u64(&await->place[i].want) ||
            !cas_sc_u64(&await->place[i].want, &nobody, units << SLOT_BITS | slot))
            continue;
        fetch_add_sc_u32(&await->waiting, 1);
        return i;
    }
    return AWAIT_NO_PLACE;
}

void await_leave(struct await *await, unsigned place)
{
    if (place == AWAIT_NO_PLACE)
        return;
    vpmm_assert(peek_u64(&await->place[place].want));
    store_sc_u64(&await->place[place].want, 0);
    fetch_add_sc_u32(&await->waiting, UINT32_MAX);
}

uint32_t await_read(struct await *await, unsigned place)
{
    return place == AWAIT_NO_PLACE ? 0 : wakeup_read(&await->place[place].news);
}

void await_sleep(struct await *await, unsigned place, uint32_t seen, uint64_t ns)
{
    enum { SHORT_US = 50 };
    if (place == AWAIT_NO_PLACE)
        clock_sleep_us(SHORT_US);
    else
        wakeup_wait(&await->place[place].news, seen, ns);
}

bool await_spin(struct await *await, unsigned place, uint32_t seen, uint64_t ns)
{
    return place != AWAIT_NO_PLACE && wakeup_spin(&await->place[place].news, seen, ns);
}

void await_wake(struct await *await, unsigned place)
{
    if (place != AWAIT_NO_PLACE)
        wakeup_signal(&await->place[place].news);
}

void await_wake_wanting(struct await *await, uint64_t units, struct fence fence)
{
    for (unsigned i = 0; i < AWAIT_PLACES; i++) {
        uint64_t want = load_sc_u64(&await->place[i].want);
        bool in_reach = !fence.stream || fence.stream == (uint32_t)want;
        if (want && want >> SLOT_BITS <= units && in_reach)
            await_wake(await, i);
    }
}
