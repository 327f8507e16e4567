/*
 * bell.h - how the reaper is told of new work without a lock, and at no cost while it is awake.
 */
#ifndef VPMM_LIB_BELL_H
#define VPMM_LIB_BELL_H

#include "base/atomic.h"
#include "base/queue.h"

struct bell {
    struct wakeup work;       /* something was published, marked or retired */
    _Atomic(uint32_t) asleep; /* the reaper is, or is about to be, waiting on it */
};

/*
 * The reaper stores asleep and then looks for work; the caller has published work and now looks at asleep, all
 * sequentially consistent: one of the two sees the other.
 */
static inline void bell_ring(struct bell *bell)
{
    if (load_sc_u32(&bell->asleep))
        wakeup_signal(&bell->work);
}

#endif
