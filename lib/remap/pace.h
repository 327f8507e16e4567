/*
 * pace.h - how slow the driver is: what its calls take in builds, over what the policy's cost model says.
 *
 * The model's prices are those of one host on a quiet day. A handle has cost twice as much on another, and four times
 * as much where sixteen threads build in turn. The policy bounds the time that one malloc takes, so it has to know.
 *
 *   slowness   1 to PACE_MOST. Each build moves it by a 32nd, up if the calls took longer than slowness times their
 *              price, else down: so it follows the median, and a build that was preempted for long counts as any other
 *
 * Never below 1: what a faster driver leaves is not spent on more handles. Nor above 2: the fewer handles growth is
 * made of, the more of them are broken later. Without a bound sixteen threads held 1.12 to 1.18 times what was in use
 * on an H100 for 1.07 to 1.12 (llama_two_streams), and waited no less.
 *
 * It begins at 1 and is not measured when a pool is created, though that would take a few handles and less than a
 * millisecond: to begin at 2 where the driver is twice as slow changed nothing at all with four and sixteen threads, in
 * virtual time over the four traces at scales of 1 and 2, and with one thread held by 0.005 at most, either way, and
 * the longest malloc by a fiftieth.
 *
 * Any thread notes, any thread reads, without a lock: one of two notes at once may be lost, which does no harm.
 */
#ifndef VPMM_LIB_PACE_H
#define VPMM_LIB_PACE_H

#include "base/atomic.h"

struct pace {
    _Atomic(uint32_t) slowness; /* in units of 1 / PACE_ONE */
};

enum { PACE_ONE = 1 << 16, PACE_MOST = 2 };

void pace_init(struct pace *);

/* A build's driver calls took so long, and their price by the cost model, in microseconds, is this. */
void pace_note(struct pace *, double price_us, uint64_t took_ns);

double pace_slowness(const struct pace *);

#endif
