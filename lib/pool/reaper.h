/*
 * reaper.h - the pool's own thread, which makes passes (remap/pass.h).
 *
 * The thread makes passes while anything is pending, looks after the caches every FRONT_IDLE_US while they hold
 * something, makes one when memory is due to decay, and otherwise sleeps on an event count until there is work: an idle
 * process of which nothing is left to give back has no wake-ups.
 *
 *   pause after a pass = REAPER_TICK_US if something passed, or marks came, since the one before (REAPER_ALONE_US in a
 *   pool that has met one stream alone, where nobody waits for that); else twice the last pause, at most
 *   REAPER_LONGEST_US
 *
 * A pause of REAPER_CALL_US and more ends when the thread is rung for, which costs the one who rings a wake-up; shorter
 * ones, and the first after news, are slept out, also where nothing is pending any more: so nobody rings more than once
 * in the time that the pauses take to grow so long. Where the GPU keeps up with the program each mark passes at once.
 * When the thread went to sleep at once too, each free rang: training a ResNet with batches of 4 under PyTorch spent 5
 * % of its time on that (an H200), and another 5 % when pauses beside one stream were of 0.9 ms. A mark may therefore
 * be seen to have passed REAPER_LONGEST_US late. No malloc waits for that: one that finds no memory asks the driver
 * itself (pass_refresh) before it builds.
 *
 * The thread begins only when the pool is created with `reaper`, and is stopped by destroy, or by exit() before the
 * driver's own exit handler runs. A forked child has none.
 */
#ifndef VPMM_LIB_REAPER_H
#define VPMM_LIB_REAPER_H

#include "remap/arena.h"

enum {
    REAPER_TICK_US = 50,
    REAPER_ALONE_US = 5000,   /* the same in a pool that has met one stream alone */
    REAPER_CALL_US = 1000,    /* a pause that a ring ends */
    REAPER_LONGEST_US = 5000, /* of these pauses */
    REAPER_RETRY_US = 10000,  /* between tries of what the driver has refused: to unmap something, or a whole pass */
};

/*
 * Since the latest pass ended, by the pool's thread or, where it has none, by hand. 0 while the thread sleeps because
 * nothing is pending, without one while nothing is, and of a graph's pool. Any thread.
 */
uint64_t reaper_age_ns(const struct arena *, bool has_thread);

struct reaper;

vpmm_status reaper_start(struct arena *, struct reaper **);
void reaper_stop(struct reaper *); /* returns when the thread has ended; NULL is a no-op */

#endif
