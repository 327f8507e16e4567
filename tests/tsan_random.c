/*
 * Random operations from four threads on one pool, over a simulator in real time and with the reaper at work; for
 * ThreadSanitizer, and useful without it.
 *
 * Blocks lie in slots that all threads share: whoever finds one there frees it, mostly not the thread that allocated
 * it and often on another stream, ordered after the block's own by an event. Some blocks carry a stamp, which is
 * written on their stream and looked at before the free.
 *
 *   VPMM_TEST_OPS   mallocs and frees in all; 1,000,000
 *   VPMM_TEST_SEED  of the random numbers
 *
 * Exit status 0: no failure, no race, no lost stamp, the audit passes and nothing leaks.
 */
#include "payload.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include <vpmm/sim.h>
#include <vpmm/vpmm.h>

enum { THREADS = 4, STREAMS = 6, SLOTS = 96, LONGEST = 32, ONE_STAMP_IN = 4 };

struct block {
    CUdeviceptr pointer;
    size_t pages;   /* 0: not a whole number of them */
    uint32_t stamp; /* 0: none */
    int stream;
};

static struct {
    vpmm_sim *sim;
    const vpmm_driver *driver;
    vpmm_pool *pool;
    CUcontext context;
    CUstream stream[STREAMS];
    _Atomic(struct block *) slot[SLOTS];
    atomic_uint_fast64_t mismatches, failures, refusals;
    uint64_t operations;
} shared;

struct worker {
    pthread_t thread;
    uint64_t random;
    CUevent event;
    uint32_t stamps;
};

static void failed(const char *what)
{
    if (atomic_fetch_add(&shared.failures, 1) < 20)
        fprintf(stderr, "%s: %s\n", what, vpmm_last_error());
}

static uint64_t draw(struct worker *worker, uint64_t below)
{
    worker->random ^= worker->random << 13;
    worker->random ^= worker->random >> 7;
    worker->random ^= worker->random << 17;
    return (worker->random >> 11) % below;
}

/* One in three is of 256 bytes to 4 MiB, each octave as often as the next; the others are whole pages. */
static size_t draw_bytes(struct worker *worker)
{
    if (draw(worker, 3) != 0)
        return (1 + draw(worker, draw(worker, 4) == 0 ? LONGEST : 4)) * PAGE;
    size_t octave = (size_t)256 << draw(worker, 14);
    return octave + draw(worker, octave);
}

/* The words of the stamp: one a page, one in all where it is not of pages. */
static size_t words_of(const struct block *b)
{
    return b->pages > 0 ? b->pages : 1;
}

static struct block *make_block(struct worker *worker)
{
    struct block *b = calloc(1, sizeof *b);
    if (b == NULL)
        return NULL;
    b->stream = (int)draw(worker, STREAMS);
    size_t bytes = draw_bytes(worker);
    b->pages = bytes % PAGE == 0 ? bytes / PAGE : 0;
    CUstream stream = shared.stream[b->stream];
    vpmm_status status = vpmm_malloc(shared.pool, bytes, stream, &b->pointer);
    if (status != VPMM_SUCCESS) {
        if (status == VPMM_ERROR_OUT_OF_MEMORY)
            atomic_fetch_add(&shared.refusals, 1);
        else
            failed("vpmm_malloc");
        free(b);
        return NULL;
    }
    if (draw(worker, ONE_STAMP_IN) == 0) {
        b->stamp = ++worker->stamps;
        if (!payload_write(shared.driver, b->pointer, words_of(b), b->stamp, stream))
            failed("cuMemsetD2D32Async");
    }
    return b;
}

static void end_block(struct worker *worker, struct block *b)
{
    CUstream stream = shared.stream[b->stream];
    if (b->stamp != 0 && !payload_expect(shared.driver, b->pointer, words_of(b), b->stamp, stream, &shared.mismatches))
        failed("cuMemcpy2DAsync");
    if (draw(worker, 4) == 0) {
        CUstream other = shared.stream[draw(worker, STREAMS)];
        if (shared.driver->cuEventRecord(worker->event, stream) != CUDA_SUCCESS ||
            shared.driver->cuStreamWaitEvent(other, worker->event, 0) != CUDA_SUCCESS)
            failed("cuStreamWaitEvent");
        stream = other;
    }
    if (vpmm_free(shared.pool, b->pointer, stream) != VPMM_SUCCESS)
        failed("vpmm_free");
    free(b);
}

static void one_operation(struct worker *worker)
{
    _Atomic(struct block *) *slot = &shared.slot[draw(worker, SLOTS)];
    struct block *b = atomic_exchange_explicit(slot, NULL, memory_order_acq_rel);
    if (b == NULL) {
        struct block *fresh = make_block(worker);
        b = atomic_exchange_explicit(slot, fresh, memory_order_acq_rel);
    }
    if (b != NULL)
        end_block(worker, b);
    if (draw(worker, 20000) == 0 && vpmm_trim(shared.pool, 64 * PAGE, NULL) != VPMM_SUCCESS)
        failed("vpmm_trim");
    if (draw(worker, 5000) == 0 && vpmm_poll(shared.pool) != VPMM_SUCCESS)
        failed("vpmm_poll");
    vpmm_stats stats;
    if (draw(worker, 5000) == 0 && vpmm_stats_get(shared.pool, &stats) != VPMM_SUCCESS)
        failed("vpmm_stats_get");
}

static void *work(void *argument)
{
    struct worker *worker = argument;
    const vpmm_driver *driver = shared.driver;
    if (driver->cuCtxSetCurrent(shared.context) != CUDA_SUCCESS ||
        driver->cuEventCreate(&worker->event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS) {
        failed("the thread's beginning");
        return NULL;
    }
    for (uint64_t i = 0; i < shared.operations / THREADS; i++)
        one_operation(worker);
    if (driver->cuEventDestroy(worker->event) != CUDA_SUCCESS)
        failed("cuEventDestroy");
    return NULL;
}

static bool begin(void)
{
    vpmm_sim_config sim = vpmm_sim_config_default();
    sim.memory_bytes = 512 * PAGE;
    shared.sim = vpmm_sim_create(&sim);
    if (shared.sim == NULL)
        return false;
    const vpmm_driver *driver = shared.driver = vpmm_sim_driver(shared.sim);
    vpmm_config config = vpmm_config_default();
    config.driver = driver;
    config.va_size = 1024 * PAGE;
    config.page_size = PAGE;
    config.cache_bytes = 0;
    if (driver->cuInit(0) != CUDA_SUCCESS || driver->cuDevicePrimaryCtxRetain(&shared.context, 0) != CUDA_SUCCESS ||
        driver->cuCtxSetCurrent(shared.context) != CUDA_SUCCESS)
        return false;
    for (int i = 0; i < STREAMS; i++)
        if (driver->cuStreamCreate(&shared.stream[i], CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS)
            return false;
    return vpmm_pool_create(&config, &shared.pool) == VPMM_SUCCESS;
}

static void finish(void)
{
    struct worker last = {.random = 1};
    if (shared.driver->cuEventCreate(&last.event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS)
        failed("cuEventCreate");
    for (int i = 0; i < SLOTS; i++) {
        struct block *b = atomic_load(&shared.slot[i]);
        if (b != NULL)
            end_block(&last, b);
    }
    shared.driver->cuEventDestroy(last.event);
    if (vpmm_check(shared.pool) != VPMM_SUCCESS)
        failed("the audit");
    vpmm_stats stats;
    memset(&stats, 0, sizeof stats);
    (void)vpmm_stats_get(shared.pool, &stats);
    printf("mallocs %llu, of which own %llu, completed %llu, waited %llu, built %llu, small %llu; reclaims %llu, "
           "refused %llu\n",
           (unsigned long long)stats.mallocs, (unsigned long long)stats.hits_own_stream,
           (unsigned long long)stats.hits_completed, (unsigned long long)stats.hits_waited,
           (unsigned long long)stats.builds, (unsigned long long)stats.hits_small, (unsigned long long)stats.reclaims,
           (unsigned long long)atomic_load(&shared.refusals));
    if (stats.requested_bytes != 0 || stats.mallocs != stats.frees)
        failed("something is live at the end");
    if (vpmm_pool_destroy(shared.pool) != VPMM_SUCCESS)
        failed("vpmm_pool_destroy");
    for (int i = 0; i < STREAMS; i++)
        if (shared.driver->cuStreamDestroy(shared.stream[i]) != CUDA_SUCCESS)
            failed("cuStreamDestroy");
    shared.driver->cuDevicePrimaryCtxRelease(0);
    if (atomic_load(&shared.mismatches) != 0)
        failed("stamps are lost");
    if (vpmm_sim_races(shared.sim) != 0)
        failed("races on the device");
    if (vpmm_sim_misuses(shared.sim) != 0)
        failed("the driver was misused");
    if (vpmm_sim_destroy(shared.sim) != 0)
        failed("leaks");
}

int main(void)
{
    const char *operations = getenv("VPMM_TEST_OPS"), *seed = getenv("VPMM_TEST_SEED");
    shared.operations = operations != NULL ? strtoull(operations, NULL, 0) : 1000000;
    uint64_t first = seed != NULL ? strtoull(seed, NULL, 0) : 1;
    if (!begin()) {
        fprintf(stderr, "cannot begin: %s\n", vpmm_last_error());
        return 1;
    }
    struct worker worker[THREADS];
    memset(worker, 0, sizeof worker);
    for (uint64_t i = 0; i < THREADS; i++) {
        worker[i].random = (first + i) * 0x9e3779b97f4a7c15;
        worker[i].stamps = (uint32_t)i << 28;
        pthread_create(&worker[i].thread, NULL, work, &worker[i]);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(worker[i].thread, NULL);
    finish();
    uint64_t failures = atomic_load(&shared.failures);
    printf("%llu operations, seed %llu: %llu failures\n", (unsigned long long)shared.operations,
           (unsigned long long)first, (unsigned long long)failures);
    return failures != 0;
}
