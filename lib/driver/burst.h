/*
 * burst.h - long runs of driver calls, and the builds of the whole process that want the driver meanwhile.
 *
 * The driver maps, unmaps and grants access for one caller at a time, whichever its device. Its lock goes to whoever
 * asks again first, which is whoever has just had it, and a call for many handles asks anew for each. On two H200s,
 * beside a thread that changed the rights of one device's memory without a pause, a page of the other's took 3.4 ms to
 * map and 6.8 ms to unmap, 160 ms at worst, for 1 and 18 us alone. So a thread that calls for long stands in a line,
 * and builds beside it stand there too, in place of a contest for the driver's lock.
 *
 *   burst   what a thread calls in its turn: so many calls as BURST_NS takes, and one beyond it, if another waits
 *   line    the threads that have asked for one, each with a number in the order of asking: `served` <= number <
 *           `taken`. Whose number is `served` has its burst
 *   long    a change of rights, a park, a wake, and the end of a pool once its old addresses are unmapped
 *
 *   (1) who calls for long maps, unmaps, creates, releases and grants in bursts alone, and counts from the first to the
 *       last of them
 *   (2) a build that finds such a thread, when it is about to create, map, unmap or grant, has its burst first. It
 *       leaves the line after each of these steps; what it releases when it fails it does outside
 *
 * Who unmaps old addresses (remap/zombie.h), or gives memory back handle by handle, is in no line: a few handles a
 * call, and builds of the same pool first.
 *
 * Among themselves, while nobody calls for long, builds are left to the driver's lock: in the line they had a sixth
 * less of the driver's time, which went to handing it over (two H200s, two pools that grow by three threads each).
 * Beside a change of a pool's rights 99 of 100 of its mallocs took 82 to 87 ms at most where changes paused in place of
 * the line, 36 to 38 with all builds in it, and 54 as it is, on a slower host.
 *
 * The line is an order, no exclusion: nothing is written under it. A thread that has waited for BURST_PATIENCE_NS while
 * nobody's burst ended passes by whoever has it: the next one begins beside it. Who is passed by has had its burst,
 * whether it has begun or not: it waits no longer, and its end ends nothing. This bounds what a thread costs the others
 * that the kernel has preempted, or the driver keeps. Who has a builder's turn (remap/turn.h) may wait for a burst;
 * nobody who has a burst waits for a turn, for the GPU, or for a lock that is held over a burst.
 *
 * Progress. The lock guards a few numbers, and is held for some instructions. `served` only grows, and whose number it
 * has reached goes on, so a thread that looks late misses nothing.
 */
#ifndef VPMM_LIB_BURST_H
#define VPMM_LIB_BURST_H

#include <stdbool.h>
#include <stdint.h>

#define BURST_NS          UINT64_C(1000000)
#define BURST_PATIENCE_NS (20 * UINT64_C(1000000))

/* Of one thread, on its stack. Zero-filled: none is under way. */
struct burst {
    uint64_t number;
    uint64_t end_ns; /* 0: none is under way */
    bool is_long;    /* it counts as such */
};

/* Of who calls for long: begins one, when those that have come before have had theirs. */
void burst_begin(struct burst *);

/* Between two of its calls: if its time is over, those who wait have a burst each before it goes on. */
void burst_breathe(struct burst *);

/* Whether its time is over, also if nobody waits. */
bool burst_is_over(const struct burst *);

/* Ends one, and the thread will begin another. */
void burst_pause(struct burst *);

/* Before a call of a build: see (2). How many nanoseconds it has waited. */
uint64_t burst_give_way(struct burst *);

/* After the last call of either. There may have been none. */
void burst_end(struct burst *);

#endif
