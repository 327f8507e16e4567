/*
 * Threads and streams that come and go, four at a time on one pool, over a simulator in real time and with the reaper
 * at work; for ThreadSanitizer, and useful without it.
 *
 * Each thread makes a stream, allocates and frees on it, on the legacy stream and, some of them, on their per-thread
 * stream, leaves some blocks to threads that come after it, releases and destroys its stream, with work still queued,
 * and ends.
 *
 *   VPMM_TEST_OPS   mallocs and frees in all; 100,000
 *
 * Exit status 0: no failure, no race, no lost stamp, the audit passes and nothing leaks.
 */
#include "payload.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include <vpmm/sim.h>
#include <vpmm/vpmm.h>

enum { AT_ONCE = 4, OPERATIONS_A_THREAD = 200, SLOTS = 32, HELD = 6 };

/* The event stands for the end of the block's use on a stream that may be gone. */
struct legacy {
    CUdeviceptr pointer;
    size_t pages;
    uint32_t stamp;
    CUevent used;
};

static struct {
    vpmm_sim *sim;
    const vpmm_driver *driver;
    vpmm_pool *pool;
    CUcontext context;
    _Atomic(struct legacy *) slot[SLOTS];
    atomic_uint_fast64_t mismatches, failures;
    atomic_uint stamps;
} shared;

static void failed(const char *what)
{
    if (atomic_fetch_add(&shared.failures, 1) < 20)
        fprintf(stderr, "%s: %s\n", what, vpmm_last_error());
}

#define needs(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            failed(#condition);                                                                                        \
    } while (0)

struct held {
    CUdeviceptr pointer;
    size_t pages;
    uint32_t stamp;
    CUstream stream;
};

static void take(struct held *h, uint32_t random, CUstream stream)
{
    size_t pages = 1 + random % 6;
    CUdeviceptr pointer = 0;
    if (vpmm_malloc(shared.pool, pages * PAGE, stream, &pointer) != VPMM_SUCCESS) {
        failed("vpmm_malloc");
        return;
    }
    *h = (struct held){pointer, pages, atomic_fetch_add(&shared.stamps, 1) + 1, stream};
    needs(payload_write(shared.driver, h->pointer, h->pages, h->stamp, h->stream));
}

static void give(struct held *h)
{
    needs(payload_expect(shared.driver, h->pointer, h->pages, h->stamp, h->stream, &shared.mismatches));
    needs(vpmm_free(shared.pool, h->pointer, h->stream) == VPMM_SUCCESS);
    h->pointer = 0;
}

static void inherit(struct legacy *l, CUstream stream)
{
    needs(shared.driver->cuStreamWaitEvent(stream, l->used, 0) == CUDA_SUCCESS);
    needs(shared.driver->cuEventDestroy(l->used) == CUDA_SUCCESS);
    struct held h = {l->pointer, l->pages, l->stamp, stream};
    give(&h);
    free(l);
}

static void leave(struct held *h, uint32_t random, CUstream stream)
{
    struct legacy *l = malloc(sizeof *l);
    if (l == NULL) {
        give(h);
        return;
    }
    *l = (struct legacy){.pointer = h->pointer, .pages = h->pages, .stamp = h->stamp};
    needs(shared.driver->cuEventCreate(&l->used, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS);
    needs(shared.driver->cuEventRecord(l->used, h->stream) == CUDA_SUCCESS);
    h->pointer = 0;
    struct legacy *earlier = atomic_exchange(&shared.slot[random % SLOTS], l);
    if (earlier != NULL)
        inherit(earlier, stream);
}

static void *live_and_die(void *argument)
{
    uint32_t random = *(uint32_t *)argument;
    CUstream own = NULL;
    needs(shared.driver->cuCtxSetCurrent(shared.context) == CUDA_SUCCESS);
    needs(shared.driver->cuStreamCreate(&own, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
    bool uses_its_default = random % 8 == 0;
    const CUstream streams[4] = {own, own, uses_its_default ? CU_STREAM_PER_THREAD : own, NULL};
    struct held held[HELD] = {{0}};
    for (int i = 0; i < OPERATIONS_A_THREAD; i++) {
        random = random * 1664525 + 1013904223;
        struct held *h = &held[(random >> 8) % HELD];
        if (h->pointer == 0)
            take(h, random >> 16, streams[(random >> 12) % 4]);
        else if ((random >> 24) % 8 == 0)
            leave(h, random >> 16, own);
        else
            give(h);
    }
    for (int i = 0; i < HELD; i++)
        if (held[i].pointer != 0)
            give(&held[i]);
    needs(vpmm_stream_release(shared.pool, own) == VPMM_SUCCESS);
    needs(shared.driver->cuStreamDestroy(own) == CUDA_SUCCESS);
    return NULL;
}

static bool begin(void)
{
    vpmm_sim_config sim = vpmm_sim_config_default();
    sim.memory_bytes = 1024 * PAGE;
    shared.sim = vpmm_sim_create(&sim);
    if (shared.sim == NULL)
        return false;
    const vpmm_driver *driver = shared.driver = vpmm_sim_driver(shared.sim);
    vpmm_config config = vpmm_config_default();
    config.driver = driver;
    config.va_size = 2048 * PAGE;
    config.page_size = PAGE;
    config.small = VPMM_SMALL_ASYNC;
    config.cache_bytes = 0;
    return driver->cuInit(0) == CUDA_SUCCESS && driver->cuDevicePrimaryCtxRetain(&shared.context, 0) == CUDA_SUCCESS &&
           driver->cuCtxSetCurrent(shared.context) == CUDA_SUCCESS &&
           vpmm_pool_create(&config, &shared.pool) == VPMM_SUCCESS;
}

static void finish(void)
{
    for (int i = 0; i < SLOTS; i++) {
        struct legacy *l = atomic_load(&shared.slot[i]);
        if (l != NULL)
            inherit(l, NULL);
    }
    needs(vpmm_check(shared.pool) == VPMM_SUCCESS);
    vpmm_stats stats;
    needs(vpmm_stats_get(shared.pool, &stats) == VPMM_SUCCESS && stats.live_bytes == 0);
    needs(vpmm_pool_destroy(shared.pool) == VPMM_SUCCESS);
    needs(shared.driver->cuDevicePrimaryCtxRelease(0) == CUDA_SUCCESS);
    needs(atomic_load(&shared.mismatches) == 0);
    needs(vpmm_sim_races(shared.sim) == 0);
    needs(vpmm_sim_misuses(shared.sim) == 0);
    needs(vpmm_sim_destroy(shared.sim) == 0);
}

int main(void)
{
    const char *text = getenv("VPMM_TEST_OPS");
    uint64_t operations = text != NULL ? strtoull(text, NULL, 0) : 100000;
    if (!begin()) {
        fprintf(stderr, "cannot begin: %s\n", vpmm_last_error());
        return 1;
    }
    uint64_t lives = operations / OPERATIONS_A_THREAD + AT_ONCE;
    pthread_t thread[AT_ONCE];
    uint32_t seed[AT_ONCE];
    for (uint64_t i = 0; i < lives; i++) { /* the oldest is waited for before the next one begins */
        size_t k = i % AT_ONCE;
        if (i >= AT_ONCE)
            pthread_join(thread[k], NULL);
        seed[k] = (uint32_t)i * 2654435761u;
        if (pthread_create(&thread[k], NULL, live_and_die, &seed[k]) != 0) {
            fprintf(stderr, "no thread\n");
            return 1;
        }
    }
    for (int k = 0; k < AT_ONCE; k++)
        pthread_join(thread[k], NULL);
    finish();
    uint64_t failures = atomic_load(&shared.failures);
    printf("%llu threads: %llu failures\n", (unsigned long long)lives, (unsigned long long)failures);
    return failures != 0;
}
