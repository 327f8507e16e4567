/*
 * decay.h - how memory that is no longer needed goes back to the device, little by little.
 *
 *   use      bytes that are live or in front caches. What lies there untouched is published soon (front.h)
 *   epoch    a sixteenth of decay_ms, at least DECAY_EPOCH_LEAST_MS. Its peak is the most that was in use at its two
 *            ends, or live where the statistics look for peaks in between (stats.h). What a hit takes is in use already
 *   claim    of a past epoch, on memory that is not used now: its peak for half of decay_ms, and evenly less from then
 *            on until decay_ms are over
 *   peaks    what the peaks claim together
 *   growth   a build has made physical memory, because what was mapped did not do. It leaves what is mapped then, and
 *            what is in use, with its own request
 *   margin   of the latest growth: what was mapped beyond the peaks, for free memory that is not in one piece, or waits
 *   floor    what stays however long nothing happens
 *   target   what stays now
 *
 *   claim(e) = peak(e) * min(1, 2 * (1 - (now - end(e)) / decay))     while that is above 0
 *   peaks    = max(peak(present epoch), claim(e) of each past epoch)
 *   margin   = max(0, mapped - of), where of = max(peaks, use), at the growth
 *   floor    = max(release_threshold, use)
 *   target   = max(floor, peaks * (1 + margin / of)); with decay_ms 0, the floor
 *   a step gives extents back only as long as mapped - target >= the extent: mapped never falls below the target by it
 *
 * The margin is for programs that do the same again and again. Without it what was mapped went back to the peak, and
 * the next round moved and made handles for what was not in one piece: training a ResNet under PyTorch, on the
 * simulated GPU by a recorded trace, built 24 and 21 times in twenty steps each; with it 5 times and never, with
 * decay_ms NEVER 4 and 3 times. It goes as the peaks go, and is measured anew at each growth.
 *
 * The first half is for programs that come back to their peak every few seconds. While claims shrank from the beginning
 * a server gave back and made anew what it would need again: vpmm-server with four workers over llama_two_streams
 * (stress/README.md), on the simulated GPU from its tenth second on, built in 0.89 of 1,000 mallocs, and made 1,058
 * handles; now it is 0.13 and 65, and with decay_ms NEVER 0.05 and none.
 *
 * A step is a part of a pass of the reaper's thread or of vpmm_poll, so one runs at a time, under the pass lock. It
 * is small (DECAY_EXTENTS), gives way to mallocs that are building, and takes only wholly free extents that wait for
 * nothing, as a trim does (give_back.h); mallocs and frees go on beside it, and keep what they claim first.
 *
 * What is kept beyond live memory for small requests (empty slabs, whole pages of subpages, the rest of the page that
 * slabs are cut from) is given up after an epoch without a malloc.
 *
 * There is something to wait for while mapped > floor, but for memory that was found to be in no extent that can go, as
 * long as none is published after that (space.publications); or while spares of cut pages are kept, and more is mapped
 * than the threshold. Else nothing wakes the reaper. An extent can go if it is
 * wholly free, and not longer than what is mapped beyond the floor.
 */
#ifndef VPMM_LIB_DECAY_H
#define VPMM_LIB_DECAY_H

#include "base/atomic.h"

#include <vpmm/vpmm.h>

struct arena;

enum {
    DECAY_EPOCHS = 16,
    DECAY_EPOCH_LEAST_MS = 10, /* in which untouched caches are emptied */
    DECAY_EXTENTS = 4,         /* given back in one step */
    DECAY_AGAIN_US = 1000,     /* until a step is tried again that gave way to a build */
};

#define DECAY_MS_MAX UINT64_C(1000000000) /* eleven days; VPMM_DECAY_NEVER is above it */

struct decay {
    _Atomic(uint64_t) release_threshold; /* bytes; any thread, relaxed, */
    _Atomic(uint64_t) ms;                /* likewise */
    _Atomic(uint32_t) changes;           /* of the two: stored after them, and before the reaper is rung for */

    _Atomic(uint32_t) changes_seen; /* stored under the pass lock */
    _Atomic(uint64_t) growth;       /* the latest, mapped:32 | used:32, in pages; 0: none that a step has not seen. Who
                                       builds stores it, relaxed: nothing but the word is meant; a step takes it */

    /* Below: under the pass lock. */
    struct {
        uint64_t peak, end_ns; /* end_ns 0: none yet */
    } epoch[DECAY_EPOCHS];
    unsigned newest;
    uint64_t margin, margin_of; /* bytes; 0: none */
    uint64_t epoch_end_ns;      /* of the present one */
    uint64_t look_ns;           /* when the next step is due */
    uint64_t mallocs;           /* when the present epoch began */
    bool in_vain;               /* the floor was reached for, and nothing more could go, */
    uint64_t publications;      /* when so many regions had been published */
};

void decay_init(struct decay *, const vpmm_config *, size_t granularity);

/* Any thread; the reaper is rung for. */
void decay_set_release_threshold(struct arena *, uint64_t bytes);
void decay_set_ms(struct arena *, uint64_t ms);

/* Physical memory was made for a request of so many pages, and is counted as mapped; the request is not live yet. */
void decay_note_growth(struct arena *, uint64_t pages);

/* Whether a setting has changed since the latest step. Any thread. */
bool decay_changed(const struct decay *);

/* A step, if one is due; `passed`: fences have passed since the last. True: something was given back. */
bool decay_step(struct arena *, bool passed);

/* Microseconds until the next step is due; 0: nothing is left to give back. */
uint64_t decay_wait_us(const struct arena *);

#endif
