#include "arena.h"

void arena_wake_reaper(struct arena *arena)
{
    /* The reaper stores asleep and then looks for work; the caller has published work and now looks at asleep, all
       sequentially consistent: one of the two sees the other. */
    if (load_sc_u32(&arena->asleep))
        wakeup_signal(&arena->work);
}
