/*
 * Threads that allocate and free in a graph's pool, each on its own stream, which is parked and woken all the time,
 * polled and read; for ThreadSanitizer, and useful without it.
 *
 * A thread that is refused because the pool is parked tries again a little later. Nothing is written: the memory may be
 * parked at any time.
 *
 *   VPMM_TEST_OPS   mallocs in all; 100,000
 *   VPMM_TEST_SEED  of the random numbers
 *
 * Exit status 0: no failure, no race, each malloc is served or refused, the audit passes, nothing leaks.
 */
#include "world.h"

#include "base/atomic.h"

enum { THREADS = 3, HELD = 8, LONGEST = 4 };

static _Atomic(uint32_t) working;

/* False: the pool is parked. */
static bool serve(size_t bytes, CUstream stream, CUdeviceptr *held)
{
    vpmm_status status = vpmm_malloc(world.pool, bytes, stream, held);
    needs(status == VPMM_SUCCESS || (status == VPMM_ERROR_NOT_SUPPORTED && *held == 0));
    return status != VPMM_ERROR_NOT_SUPPORTED;
}

static void replace(CUdeviceptr *held, CUstream stream)
{
    if (*held != 0)
        needs(vpmm_free(world.pool, *held, stream) == VPMM_SUCCESS);
    *held = 0;
    size_t bytes = draw(2) ? (1 + draw(LONGEST)) * PAGE : 8192 + draw(PAGE);
    while (!serve(bytes, stream, held))
        sleep_us(20);
}

static void work(uint64_t index)
{
    CUdeviceptr held[HELD] = {0};
    for (uint64_t done = 0; done < world.amount / THREADS; done++)
        replace(&held[draw(HELD)], world.stream[index]);
    for (int i = 0; i < HELD; i++)
        needs(vpmm_free(world.pool, held[i], world.stream[index]) == VPMM_SUCCESS);
    fetch_sub_relaxed_u32(&working, 1);
}

static void configure(vpmm_sim_config *sim, vpmm_config *config)
{
    sim->memory_bytes = 1024 * PAGE;
    config->va_size = 4096 * PAGE;
    config->graph = true;
}

static void begin(void)
{
    store_relaxed_u32(&working, THREADS);
}

static void meanwhile(void)
{
    vpmm_stats stats;
    while (load_relaxed_u32(&working)) {
        needs(vpmm_park(world.pool) == VPMM_SUCCESS);
        needs(vpmm_poll(world.pool) == VPMM_SUCCESS);
        needs(vpmm_stats_get(world.pool, &stats) == VPMM_SUCCESS);
        needs(stats.mapped_bytes == 0);
        needs(vpmm_wake(world.pool) == VPMM_SUCCESS);
        sleep_us((long)draw(200));
    }
}

const struct program program = {
    .variable = "VPMM_TEST_OPS",
    .amount = 100000,
    .threads = THREADS,
    .streams = THREADS,
    .configure = configure,
    .begin = begin,
    .work = work,
    .meanwhile = meanwhile,
};
