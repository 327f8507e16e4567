/*
 * world.h - how the programs of this folder begin and end: world.c has their main.
 *
 * Each defines `program`, and runs like this:
 *
 *   1. the amount and the seed are read from the environment;
 *   2. a simulator in real time is opened, with its primary context, the program's streams and a pool: with defaults
 *      that program.configure changes. A program without configure has none of these. Then begin;
 *   3. threads run work, each with the context current and random numbers of its own, the main thread runs meanwhile;
 *   4. finish gives back what is left. The pool is audited, nothing is live in it, and look looks at its statistics;
 *   5. all is closed: stamps lost, races and misuses that the simulator saw and leaks are failures;
 *   6. a line says how to run the same again, and how many failures there were. Without any, the exit status is 0.
 *
 * The functions below may be called by any thread of the program. `world` is written before step 3 only.
 *
 * tsan_random.c has many worlds, one after the other, and a main of its own.
 */
#ifndef VPMM_TESTS_TSAN_WORLD_H
#define VPMM_TESTS_TSAN_WORLD_H

#include "payload.h"

#include <stdio.h>

#include <vpmm/sim.h>
#include <vpmm/vpmm.h>

enum { WORLD_THREADS = 8, WORLD_STREAMS = 4 };

struct program {
    const char *variable; /* of the environment: says how much is done */
    uint64_t amount;      /* without it */
    unsigned threads;     /* at once; up to WORLD_THREADS */
    unsigned life;        /* 0: a thread lives as long as the program. Else that much is done in a life, then another
                             thread takes the place */
    unsigned streams;     /* up to WORLD_STREAMS; destroyed after the pool */
    void (*configure)(vpmm_sim_config *, vpmm_config *);
    const vpmm_driver *(*drive)(const vpmm_driver *); /* what the pool calls; NULL: the simulator itself */
    void (*work)(uint64_t index);                     /* of the thread, from 0 */

    /* On the main thread; NULL: nothing to do. After a failure in begin there are no threads. */
    void (*begin)(void);
    void (*meanwhile)(void);
    void (*finish)(void);
    void (*look)(const vpmm_stats *); /* only with a pool */
};

/* What a source of this folder defines. */
extern const struct program program;

extern struct world {
    uint64_t amount;
    const vpmm_driver *driver;
    vpmm_pool *pool;
    CUstream stream[WORLD_STREAMS]; /* non-blocking ones */
} world;

/* Counts a failure; the first few are told, with the thread's last error. */
void failed(const char *what);

#define needs(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            failed(#condition);                                                                                        \
    } while (0)

/* At most a second. */
void sleep_us(long);

/* The thread's next random number. */
uint64_t draw(uint64_t below);

/* Queues the writing of a stamp into each page, and returns it. Never 0. */
uint32_t write_stamp(CUdeviceptr, size_t pages, CUstream);

/* Queues a look at the stamp. One that is lost is a failure in the end. */
void expect_stamp(CUdeviceptr, size_t pages, uint32_t stamp, CUstream);

/* What is queued on `later` from now on waits for what has been queued on `earlier`. */
void order_streams(CUstream earlier, CUstream later);

#endif
