/*
 * pass.h - a pass: what is done behind the threads that allocate.
 *
 * A pass, under the pass lock:
 *   0 raises the peaks (stats.h)
 *   1 publishes what has lain untouched in front caches, and gives back pages of which all subpages are free
 *   2 asks the driver which marks have passed, and publishes them (under the event lock)
 *   3 moves the regions behind those marks to the ones that wait for nothing, which also merges them across streams,
 *     publishes what several streams have used (ending.h), and gives deferred slices to their slabs (under the event
 *     lock)
 *   4 unmaps zombies that are due (zombie.h)
 *   5 gives back what is no longer needed (decay.h)
 *
 * The pool's thread makes passes (pool/reaper.h), and so do vpmm_poll and a malloc that is about to fail. A malloc that
 * is about to build makes 2 and 3 alone. Nothing is waited for in a pass but locks.
 */
#ifndef VPMM_LIB_PASS_H
#define VPMM_LIB_PASS_H

#include "remap/arena.h"

/* A whole pass, unless another thread is making one. */
vpmm_status pass_try(struct arena *);

/* What the reaper's thread has to look at after a pass. */
struct pass_outlook {
    bool any;           /* something was done, and more may follow from it */
    bool zombies;       /* some are left: refused, behind a fence that has not passed, or put off for a build */
    bool cached;        /* front caches hold something that may turn out to be untouched */
    uint64_t decays_us; /* until memory is due to decay; 0: none is */
};

/* A whole pass after waiting for the pass lock. The outlook is filled in whatever the status is. */
vpmm_status pass_of_reaper(struct arena *, struct pass_outlook *);

/*
 * Steps 2 and 3 alone, unless another thread is at them for long. For a malloc on the stream that is about to build, to
 * which a few queries are nothing, and whose memory may just have become free. Where something is outstanding that the
 * stream would have to wait for it is asked about for some microseconds more. False: there was nothing to ask.
 */
bool pass_refresh(struct arena *, const struct stream *);

/* Steps 1 to 4 after waiting for the pass lock. For a malloc that is about to fail. */
vpmm_status pass_now(struct arena *);

/* The same, but where another thread makes a pass, or gives memory back, 2 and 3 alone. */
vpmm_status pass_soon(struct arena *);

/* give_back_down_to after waiting for the pass lock. For a trim, and for who needs the device's memory elsewhere. */
vpmm_status pass_release(struct arena *, uint64_t keep_pages, uint64_t *released_pages);

/* Step 3 alone, which makes no driver call; under the event lock. `any`: something has passed since the last time. */
void pass_regions(struct arena *, bool any);

/* Waits for the contexts of the streams on which there is freed memory that has not passed, and publishes it. */
vpmm_status pass_wait_for_contexts(struct arena *);

#endif
