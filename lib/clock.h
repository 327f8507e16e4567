/*
 * clock.h - time, and waiting for less than a sleep takes.
 */
#ifndef VPMM_LIB_CLOCK_H
#define VPMM_LIB_CLOCK_H

#include <sched.h>
#include <stdint.h>
#include <time.h>

static inline uint64_t clock_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* A thread of the program's has a timer slack of 50 us: a sleep of 5 would be one of 55. It yields instead. */
static inline void clock_spin_ns(uint64_t ns)
{
    uint64_t end = clock_now_ns() + ns;
    do
        sched_yield();
    while (clock_now_ns() < end);
}

#endif
