/*
 * schedule.h - where a test takes hold of the library's threads.
 *
 * A build with VPMM_SCHEDULE_POINTS calls these, which the test defines: before each atomic operation and each look
 * into Concurrency Kit's structures; where a thread cannot go on before another one does; where it sleeps; and for the
 * time. A test that explores schedules chooses who goes on at each point; stress/virtual.h keeps a clock for each
 * thread. Other builds have nothing of it.
 */
#ifndef VPMM_LIB_SCHEDULE_H
#define VPMM_LIB_SCHEDULE_H

#include <stdbool.h>
#include <stdint.h>

#ifdef VPMM_SCHEDULE_POINTS
/* What the operation is on, NULL for a fence, and whether it may change it. */
void vpmm_schedule_point(const volatile void *at, bool changes);

/* The caller has found this pthread_mutex_t taken; NULL: it waits for any change. Returns when it may look again. */
void vpmm_schedule_wait(void *lock);

/* The caller sleeps for so many nanoseconds, 0: for ever, or until the object is woken; NULL: nothing wakes it. */
void vpmm_schedule_sleep(const void *object, uint64_t ns);
void vpmm_schedule_wake(const void *object);

uint64_t vpmm_schedule_clock(void); /* nanoseconds */
#else
static inline void vpmm_schedule_point(const volatile void *at, bool changes)
{
    (void)at, (void)changes;
}
#endif

#endif
