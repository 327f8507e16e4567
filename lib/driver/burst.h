/*
 * burst.h - long runs of driver calls, and the builds of the whole process that want the driver meanwhile.
 *
 * The driver maps, unmaps and grants access for one caller at a time, whichever its device, and its lock goes to whoever
 * asks again first, which is whoever has just had it; a call for many handles asks anew for each. On two H200s, beside
 * a thread that changed the rights of one device's memory without a pause, a page of the other's took 3.4 ms to map and
 * 6.8 ms to unmap, 160 ms at worst, for 1 and 18 us alone. So who calls for long queues here, and who builds beside it,
 * and not there.
 *
 *   burst   what a thread calls in its turn: so many calls as BURST_NS takes, and one beyond it, if another waits
 *   line    the threads that have asked for one, each with a number in the order of asking: `served` <= number < `taken`.
 *           Whose number is `served` has its burst
 *   long    who calls for long: a change of rights, a park, a wake, the end of a pool
 *
 *   (1) whoever calls for long calls in its bursts alone, and counts as such from its first to its last
 *   (2) a build that finds such a thread, before any of its calls, joins the line until its last call
 *
 * Among themselves, while nobody calls for long, builds are left to the driver's lock: in the line they had a sixth less
 * of the driver's time, which went to handing it over (two H200s, two pools that grow by three threads each). Beside
 * a change of a pool's rights 99 of 100 of its mallocs took 36 to 54 ms at most in the line, and 82 to 87 where changes
 * paused in place of it.
 *
 * The line is an order, no exclusion: nothing is written under it. A thread that has waited at its head for
 * BURST_PATIENCE_NS, while nobody's burst ended, begins beside whoever has the burst, which so has ended before that
 * thread knows. This bounds what a thread costs the others that the kernel has preempted, or the driver keeps. Who has
 * a builder's turn (remap/turn.h) may wait for a burst; nobody who has a burst waits for a turn, for the GPU, or for
 * a lock that is held over a burst.
 *
 * Progress. The lock guards two numbers, and is held for some instructions. The numbers only grow, so that none comes
 * back while a thread looks away.
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

/* Whether its time is over, also if nobody waits; and its end, before others of the same thread. */
bool burst_is_over(const struct burst *);
void burst_pause(struct burst *);

/* Before a call of a build: see (2). How many nanoseconds it has waited. */
uint64_t burst_give_way(struct burst *);

/* After the last call of either. There may have been none. */
void burst_end(struct burst *);

#endif
