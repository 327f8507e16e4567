/*
 * still_clock.h - for a program of which CMakeLists.txt wraps clock_gettime and wakeup_wait: a clock that goes on when
 * the test says so, and who waits is seen. So nobody loses patience because the machine is busy, and a thread is waited
 * for until it waits, in place of some milliseconds. Included once in a program.
 */
#ifndef VPMM_TESTS_STILL_CLOCK_H
#define VPMM_TESTS_STILL_CLOCK_H

#include "base/clock.h"
#include "base/queue.h"

#include <stdatomic.h>

enum { STILL_LOOK_US = 50 };

static struct {
    _Atomic(uint64_t) ns;
    atomic_uint waits, waiting; /* waits that have begun; threads in one */
    atomic_bool hurries;        /* who waits finds that its time has passed */
} still = {.ns = 1000000000};

int __wrap_clock_gettime(clockid_t clock, struct timespec *now);
void __wrap_wakeup_wait(struct wakeup *wakeup, uint32_t seen, uint64_t ns);

int __wrap_clock_gettime(clockid_t clock, struct timespec *now)
{
    uint64_t ns = atomic_load(&still.ns);
    (void)clock;
    *now = (struct timespec){.tv_sec = (time_t)(ns / 1000000000), .tv_nsec = (long)(ns % 1000000000)};
    return 0;
}

static inline void still_pass(uint64_t ns)
{
    atomic_fetch_add(&still.ns, ns);
}

void __wrap_wakeup_wait(struct wakeup *wakeup, uint32_t seen, uint64_t ns)
{
    const uint64_t end = clock_now_ns() + ns;
    atomic_fetch_add(&still.waits, 1);
    if (atomic_load(&still.hurries))
        still_pass(ns);
    atomic_fetch_add(&still.waiting, 1);
    while (wakeup_read(wakeup) == seen && (!ns || clock_now_ns() < end))
        clock_sleep_us(STILL_LOOK_US);
    atomic_fetch_sub(&still.waiting, 1);
}

#endif
