/*
 * settle.h - to settle is to wait for what was freed before, and for no more: what is freed meanwhile is somebody
 * else's to wait for, or a busy pool would never be settled.
 *
 *   point      the last fence of a stream when the settling began. It has passed, or is waited for by an event, or no
 *              event can show its end, and its context is waited for when all others have passed
 *   look       publishes what has passed (pass.h)
 *   patience   how long there are looks alone, a little later each time, while nothing passes: so whichever stream is
 *              first ends the wait. When it is over the thread waits on the host for the next mark of the stream with
 *              the fewest fences to go, in case the streams go on only while somebody does. Without a reaper there is
 *              no patience, because nobody would look meanwhile: the thread waits on the host at once
 *
 * No lock is held over a wait but, over that for a context, streams.wait_lock, whose other takers wait for the same or
 * meet a stream for the first time; and who settles waits for no pass of another thread's before everything has passed.
 */
#ifndef VPMM_LIB_SETTLE_H
#define VPMM_LIB_SETTLE_H

#include "remap/arena.h"

struct settling {
    struct settling_point *point; /* of streams on which something had not passed when it began */
    uint32_t points;
    uint64_t passed;    /* fences up to the points, as far as the latest look has seen */
    uint64_t begun_ns;  /* the time of its beginning, */
    uint64_t passed_ns; /* and of the latest look that saw something pass */
};

/* Publishes what lies in caches first. HOST_MEMORY. What it has is given back by settling_end, also after a failure. */
vpmm_status settling_begin(struct arena *, struct settling *);
void settling_end(struct settling *);

/*
 * Waits until something more has passed, whatever it is, and publishes it. *more: there may be more to come; else
 * everything has passed that it can wait for, and a whole pass was made. A failure: not everything has passed, and
 * nothing more is to be had by waiting.
 */
vpmm_status settling_wait_for_some(struct arena *, struct settling *, bool *more);

/*
 * Waits until everything that was freed before has passed, what lies in caches included: stream by stream, by events,
 * and by context for what no event shows the end of. No capture is harmed. A failure: not everything has passed.
 */
vpmm_status settle(struct arena *);

#endif
