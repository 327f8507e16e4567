/*
 * clock.h - time, and waiting for less than a sleep takes.
 */
#ifndef VPMM_LIB_CLOCK_H
#define VPMM_LIB_CLOCK_H

#include "base/schedule.h"

#include <sched.h>
#include <stdint.h>
#include <time.h>

static inline uint64_t clock_now_ns(void)
{
#ifdef VPMM_SCHEDULE_POINTS
    return vpmm_schedule_clock();
#else
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
#endif
}

/* For a thread that waits for what another one is about to do. */
static inline void clock_yield(void)
{
#ifdef VPMM_SCHEDULE_POINTS
    vpmm_schedule_wait(NULL);
#else
    sched_yield();
#endif
}

/* For less than a second. */
static inline void clock_sleep_us(long us)
{
#ifdef VPMM_SCHEDULE_POINTS
    vpmm_schedule_sleep(NULL, (uint64_t)us * 1000);
#else
    const struct timespec time = {.tv_nsec = us * 1000};
    clock_nanosleep(CLOCK_MONOTONIC, 0, &time, NULL);
#endif
}

/*
 * For a few microseconds. A thread of the program's has a timer slack of 50 us: a sleep of 5 would be one of 55. Nor
 * does it yield: who gives up its core on a host without an idle one may have it back after some milliseconds.
 */
static inline void clock_spin_ns(uint64_t ns)
{
    uint64_t end = clock_now_ns() + ns;
    do {
#ifdef VPMM_SCHEDULE_POINTS
        clock_yield();
#endif
    } while (clock_now_ns() < end);
}

#endif
