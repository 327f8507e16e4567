/*
 * virtual.h - vpmm-virtual's parts: the library itself, run by many threads in a time of its own.
 *
 *   virtual.c         options, players and passes
 *   virtual_time.c    the threads' clocks, and who goes on
 *   virtual_driver.c  the simulated driver under that time: prices, the queue for its lock, a GPU that lags
 *   virtual_census.c  what mapped memory is at one moment
 *   virtual_report.c  the table and the JSON
 *
 * Time. Each thread has a clock, and one thread at a time goes on: the one whose clock is lowest. A driver call moves
 * its caller's clock on by its price (vpmm/sim.h). A thread that finds a lock taken goes on when its holder has let go,
 * with the holder's clock; one that sleeps, when its time has come or it is woken. Nothing depends on the host's time
 * or on how its kernel schedules, so that a run repeats itself. What the library itself computes takes no time; the
 * program under it takes OP_NS between two calls.
 *
 * The driver. Calls that change mappings are served one after the other, first come first served, as the driver serves
 * them under its lock: a caller's clock moves on to the end of those before it and then by the price of its own.
 *
 * The GPU is `lag` behind: what is queued at a time has run so much later.
 *
 * The library is the one that schedules are explored with, whose hooks virtual_time.c defines (lib/base/schedule.h).
 */
#ifndef VPMM_STRESS_VIRTUAL_H
#define VPMM_STRESS_VIRTUAL_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <vpmm/sim.h>
#include <vpmm/vpmm.h>

/* ---- time ---- */

/* The caller becomes the first of the threads under virtual time, which begins at 0. */
void virtual_begin(void);

/* One more, whose clock starts at so many nanoseconds. It goes on when its turn comes. */
bool virtual_start(pthread_t *, void *(*)(void *), void *data, uint64_t at_ns);

/* Waits until the library has started a thread of its own, which comes under virtual time with its first look at the
 * clock or its first driver call. */
void virtual_await_thread(void);

/* From now on all threads run freely, and time is the host's. For the end. */
void virtual_end(void);
bool virtual_is_on(void); /* between the two */

uint64_t virtual_now_ns(void);

/* The caller's clock moves on; who is behind it goes on first. */
void virtual_spend(uint64_t ns);

/* The same, but the caller may be a few microseconds ahead of others, so that threads change less often. */
void virtual_spend_loosely(uint64_t ns);

void virtual_sleep_until(uint64_t ns);

/* A gate: who waits at it goes on when another thread opens it. */
void virtual_wait_at(const void *gate);
void virtual_open(const void *gate);

/* ---- the driver ---- */

/* What one thread's driver calls took, and what they did. */
typedef struct virtual_account {
    uint64_t calls, ns; /* that change mappings, and their own price */
    uint64_t creates, created_bytes, moves;
} virtual_account;

/* The table; the program's only one. `creates` is called before each cuMemCreate by a thread that has an account. */
const vpmm_driver *virtual_driver_open(vpmm_sim *, uint64_t lag_ns, uint64_t stall_ns, void (*creates)(void));
void virtual_driver_close(void);

/* Where the calling thread's calls are counted from now on. Threads that have none are counted together: background. */
void virtual_driver_account(virtual_account *);
virtual_account virtual_driver_background(void);

/* ---- a census ---- */

/* Bytes. mapped = their sum. */
typedef struct virtual_census {
    uint64_t live;   /* handed out, whole or cut */
    uint64_t hands;  /* of a thread that is inside a call: of other builders */
    uint64_t cached; /* in front caches */
    uint64_t fenced; /* free, and waits for its fence */
    uint64_t stuck;  /* free, in a handle that is partly live */
    uint64_t whole;  /* free, in wholly free handles: it can move */
} virtual_census;

virtual_census virtual_census_take(const vpmm_pool *);

/* ---- results ---- */

typedef struct virtual_options {
    unsigned threads, passes;
    double scale;
    uint64_t min_bytes, lag_us, stall_us, shift_us, seed;
    bool pace, default_stream;
    const char *json; /* NULL: none; "-": standard output */
} virtual_options;

typedef struct virtual_result {
    unsigned pass;
    uint64_t mallocs, builds, peak_in_use, peak_demand, peak_mapped; /* peaks since the pool's creation */
    double seconds;                                                  /* that the pass took, */
    double p50_us, p99_us, p999_us, max_us;                          /* and its mallocs */
    double max_own_us;                                               /* what driver calls took that the longest made */
    virtual_account by_malloc, background;
    virtual_census missed;  /* while memory was made: where as much as that was; live: nowhere */
    virtual_census at_peak; /* of the highest mapped so far */
    bool good;              /* nothing was refused, and the audit is clean */
} virtual_result;

typedef struct virtual_report {
    const virtual_options *options;
    FILE *json, *table;
    bool first;
} virtual_report;

bool virtual_report_open(virtual_report *, const virtual_options *, const char *traces);
void virtual_report_pass(virtual_report *, const virtual_result *);
bool virtual_report_close(virtual_report *);

#endif
