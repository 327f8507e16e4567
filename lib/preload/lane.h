/*
 * lane.h - what is counted, and who is inside.
 *
 * A thread that calls vpmm does it between lane_enter and lane_leave. The end of a device's pool (served.h) shuts the
 * lanes: it waits until nobody is inside, and who comes meanwhile waits until it is over. Threads are spread over the
 * lanes, a cache line or two each, so that none writes what others read all the time.
 *
 *   lane_enter    one sequentially consistent addition, and a load of what shuts them
 *   lane_shut     stores it, and then reads the lanes: so either it sees who is inside, or that thread sees it. Who is
 *                 inside may wait for work of the GPU that a thread has to let go on which is about to enter: so where
 *                 somebody stays, the lanes are opened for a while, and shut again
 *
 * A thread inside enters no second time, and does not shut. After fork the child has one thread, which is outside: its
 * lanes are made empty and open, whatever the parent's other threads were doing there.
 */
#ifndef VPMM_PRELOAD_LANE_H
#define VPMM_PRELOAD_LANE_H

#include <stdint.h>

/* X(name, what the line at the exit says) */
#define COUNTS(X)                                                                                                      \
    X(served, "mallocs")                                                                                               \
    X(served_at_once, "synchronous mallocs")                                                                           \
    X(freed, "frees")                                                                                                  \
    X(trims, "trims for the driver's other memory")                                                                    \
    X(left_capture, "captured")                                                                                        \
    X(left_pool, "of another pool")                                                                                    \
    X(left_context, "of no primary context")                                                                           \
    X(left_shared, "shared with other devices")                                                                        \
    X(left_size, "without a size")                                                                                     \
    X(left_no_memory, "that vpmm had no memory for")                                                                   \
    X(left_refused, "refused by vpmm")                                                                                 \
    X(left_busy, "synchronous beside memory still in use")                                                             \
    X(left_unserved, "on a device without a pool of vpmm's")                                                           \
    X(drivers_frees, "frees of the driver's memory")

enum count {
#define COUNT_OF(name, words) COUNT_##name,
    COUNTS(COUNT_OF)
#undef COUNT_OF
        COUNT_COUNT
};

void lane_enter(void);
void lane_leave(void);

/* One thread at a time shuts the lanes. */
void lane_shut(void);
void lane_open(void);

/* The first call makes sure that VPMM_PRELOAD_VERBOSE has its line at the exit, as lane_prepare does. */
void lane_count(enum count);

/*
 * The line comes after what is registered for the exit from here on. A process has it that has looked at the driver
 * (real.c), also where nothing is counted: who asks for the line sees by it that vpmm was there, and served nothing.
 */
void lane_prepare(void);

/*
 * What the pool of a device counts as used beyond what the program sees of the default pool: bytes that requests were
 * rounded up by, and what was asked for at once. Less where that is freed.
 */
void lane_add_beyond(int device, int64_t bytes);
int64_t lane_beyond(int device);
void lane_clear_beyond(int device); /* the pool has ended; with the lanes shut */

/* The first reason why a device has no pool, or a trace has ended, for the line: it is copied. */
void lane_explain(const char *reason);

#endif
