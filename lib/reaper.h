/*
 * reaper.h - what happens behind the threads that allocate: a pass, and the thread that makes passes.
 *
 * A pass, under the reaper's turn: publishes what has lain untouched in front caches, and gives back pages of which all
 * granules are free; asks the driver which marks have passed and publishes them; moves the regions behind them to those
 * that wait for nothing (which also merges them across streams), and gives deferred slices to their slabs; unmaps
 * zombies that are due; and, with time to spare, does the policy's work ahead of need.
 *
 * The thread makes passes while anything is pending, with pauses of REAPER_TICK_US in between, looks after the caches
 * every FRONT_IDLE_US while they hold something, and otherwise sleeps on an event count until there is work: an idle
 * process has no wake-ups. It begins only when the pool is created with
 * `reaper`, and is stopped by destroy, or by exit() before the driver's own exit handler runs. A forked child has none.
 */
#ifndef VPMM_LIB_REAPER_H
#define VPMM_LIB_REAPER_H

#include "arena.h"

enum {
    REAPER_TICK_US = 50,
    REAPER_QUIET_US = 1000,  /* without a build, before there is time for work ahead */
    REAPER_RETRY_US = 10000, /* between tries to unmap what the driver has refused */
};

/* Since the latest pass ended; 0 while the thread sleeps because nothing is pending. Any thread. */
uint64_t reaper_age_ns(const struct arena *);

/* One pass, unless another thread is making one. */
vpmm_status reaper_pass(struct arena *, unsigned budget_us);

/*
 * The first half of a pass, unless another thread is making one: what has passed is published and merged. For a malloc
 * that is about to build, to which a few queries are nothing, and whose memory may just have become free.
 */
void reaper_refresh(struct arena *);

/* One pass after waiting for the turn; budget 0. For a malloc that is about to fail. */
vpmm_status reaper_pass_now(struct arena *);

/*
 * Waits until everything that was freed before has passed, and makes two passes. Stream by stream, by events, which
 * leaves a capture elsewhere good; the whole context is synchronised, which would destroy one, only if an end
 * cannot be seen by an event: of a stream that was destroyed before its last point was recorded.
 */
vpmm_status reaper_settle(struct arena *);

struct reaper;

vpmm_status reaper_start(struct arena *, struct reaper **);
void reaper_stop(struct reaper *); /* returns when the thread has ended; NULL is a no-op */

#endif
