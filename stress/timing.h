/*
 * timing.h - what is timed, and in what order.
 */
#ifndef VPMM_STRESS_TIMING_H
#define VPMM_STRESS_TIMING_H

#include <stdint.h>
#include <time.h>

static inline uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return UINT64_C(1000000000) * (uint64_t)t.tv_sec + (uint64_t)t.tv_nsec;
}

/* For qsort. */
static inline int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

#endif
