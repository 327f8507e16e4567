/*
 * reaper.h - what happens behind the threads that allocate: a pass, and the thread that makes passes.
 *
 * A pass, under the reaper's turn: publishes what has lain untouched in front caches, and gives back pages of which all
 * granules are free; asks the driver which marks have passed and publishes them; moves the regions behind them to those
 * that wait for nothing (which also merges them across streams), and gives deferred slices to their slabs; unmaps
 * zombies that are due; gives back what is no longer needed (decay.h); and, with time to spare, does the policy's work
 * ahead of need.
 *
 * The thread makes passes while anything is pending, looks after the caches every FRONT_IDLE_US while they hold
 * something, makes one when memory is due to decay, and otherwise sleeps on an event count until there is work: an idle
 * process of which nothing is left to give back has no wake-ups.
 *
 *   pause after a pass = REAPER_TICK_US if something passed, or marks came, since the one before; else twice the last
 *   pause, at most REAPER_LONGEST_US
 *
 * A pause of REAPER_CALL_US and more ends when the thread is rung for, which costs the one who rings a wake-up; shorter
 * ones are slept out, so that nobody rings more than once in the time that the pauses take to grow so long. A mark may
 * therefore be seen to have passed REAPER_LONGEST_US late. No malloc waits for that: one that finds no memory asks the
 * driver itself (reaper_refresh) before it builds.
 *
 * The thread begins only when the pool is created with `reaper`, and is stopped by destroy, or by exit() before the
 * driver's own exit handler runs. A forked child has none.
 */
#ifndef VPMM_LIB_REAPER_H
#define VPMM_LIB_REAPER_H

#include "remap/arena.h"

enum {
    REAPER_TICK_US = 50,
    REAPER_CALL_US = 1000,    /* a pause that a ring ends */
    REAPER_LONGEST_US = 5000, /* of the pauses while marks are outstanding */
    REAPER_QUIET_US = 1000,   /* without a build, before there is time for work ahead */
    REAPER_RETRY_US = 10000,  /* between tries to unmap what the driver has refused */
};

/* Since the latest pass ended; 0 while the thread sleeps because nothing is pending. Any thread. */
uint64_t reaper_age_ns(const struct arena *);

/* One pass, decay included, unless another thread is making one. */
vpmm_status reaper_pass(struct arena *, unsigned budget_us);

/*
 * The first half of a pass, unless another thread is making one: what has passed is published and merged. For a malloc
 * that is about to build, to which a few queries are nothing, and whose memory may just have become free.
 */
void reaper_refresh(struct arena *);

/* One pass after waiting for the turn; budget 0, nothing decays. For a malloc that is about to fail. */
vpmm_status reaper_pass_now(struct arena *);

/* build_release after waiting for the turn. For who gives back by hand, or needs the device's memory elsewhere. */
vpmm_status reaper_release(struct arena *, uint64_t keep_pages, uint64_t *released_pages);

/*
 * Waits until everything that was freed before has passed, and makes two passes. Stream by stream, by events, and then
 * by context for what no event can show the end of. No capture is harmed. A failure: not everything has passed.
 */
vpmm_status reaper_settle(struct arena *);

/* Waits for the contexts of the streams on which there is freed memory that has not passed, and publishes it. */
vpmm_status reaper_wait_for_contexts(struct arena *);

struct reaper;

vpmm_status reaper_start(struct arena *, struct reaper **);
void reaper_stop(struct reaper *); /* returns when the thread has ended; NULL is a no-op */

#endif
