/*
 * The front caches with four threads at once, in real time and with the reaper at work; for ThreadSanitizer, and useful
 * without it.
 *
 * Caches are small, so that they overflow all the time. Blocks lie in slots that all threads share, so that mostly
 * another thread frees a block than the one that allocated it, on the block's stream (which fills a neighbour's cache,
 * to be stolen from) or, ordered after it, on another one. A few lengths are asked for again and again, some now and
 * then, some are longer than is cached. Each thread has a stream of its own that it releases, destroys and makes again,
 * and trims and polls now and then. Some blocks carry a stamp, written on their stream and looked at before the free.
 *
 *   VPMM_TEST_OPS   mallocs and frees in all; 1,000,000
 *   VPMM_TEST_SEED  of the random numbers
 *
 * Exit status 0: no failure, no race, no lost stamp, the caches were hit, stolen from and emptied, the statistics are
 * what the threads counted, the audit passes and nothing leaks.
 */
#include "payload.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include <vpmm/sim.h>
#include <vpmm/vpmm.h>

enum {
    THREADS = 4,
    SHARED = 3,           /* streams that all threads use */
    STREAMS = SHARED + 1, /* and one of the thread's own */
    SLOTS = 64,
    CACHE = 24, /* pages in a thread's cache */
    ONE_STAMP_IN = 64,
    STREAM_LIFE = 4000, /* operations of a thread between two streams of its own */
};

struct block {
    CUdeviceptr pointer;
    size_t pages;
    uint32_t stamp; /* 0: none */
    int stream;     /* of the shared ones; SHARED: the thread's own, and then only that thread has the block */
};

static struct {
    vpmm_sim *sim;
    const vpmm_driver *driver;
    vpmm_pool *pool;
    CUcontext context;
    CUstream stream[SHARED];
    _Atomic(struct block *) slot[SLOTS];
    atomic_uint_fast64_t mismatches, failures, refusals, mallocs, frees;
    uint64_t operations;
} shared;

struct worker {
    pthread_t thread;
    uint64_t random, mallocs, frees;
    CUevent event;
    CUstream own;
    struct block *kept; /* on the thread's own stream */
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

static CUstream stream_of(const struct worker *worker, int stream)
{
    return stream == SHARED ? worker->own : shared.stream[stream];
}

/* Mostly one of three lengths; else any, up to what is too long for a cache. */
static size_t choose_pages(struct worker *worker)
{
    static const size_t usual[] = {1, 1, 2, 3};
    return draw(worker, 32) ? usual[draw(worker, 4)] : 1 + draw(worker, CACHE / 4 + 2);
}

static struct block *make_block(struct worker *worker, int stream)
{
    struct block *b = calloc(1, sizeof *b);
    if (b == NULL)
        return NULL;
    b->stream = stream;
    b->pages = choose_pages(worker);
    vpmm_status status = vpmm_malloc(shared.pool, b->pages * PAGE, stream_of(worker, stream), &b->pointer);
    if (status != VPMM_SUCCESS) {
        if (status == VPMM_ERROR_OUT_OF_MEMORY)
            atomic_fetch_add(&shared.refusals, 1);
        else
            failed("vpmm_malloc");
        free(b);
        return NULL;
    }
    worker->mallocs++;
    if (draw(worker, ONE_STAMP_IN) == 0) {
        b->stamp = ++worker->stamps;
        if (!payload_write(shared.driver, b->pointer, b->pages, b->stamp, stream_of(worker, stream)))
            failed("cuMemsetD2D32Async");
    }
    return b;
}

static void end_block(struct worker *worker, struct block *b)
{
    CUstream stream = stream_of(worker, b->stream);
    if (b->stamp != 0 && !payload_expect(shared.driver, b->pointer, b->pages, b->stamp, stream, &shared.mismatches))
        failed("cuMemcpy2DAsync");
    if (draw(worker, 32) == 0) {
        CUstream other = stream_of(worker, (int)draw(worker, worker->own != NULL ? STREAMS : SHARED));
        if (shared.driver->cuEventRecord(worker->event, stream) != CUDA_SUCCESS ||
            shared.driver->cuStreamWaitEvent(other, worker->event, 0) != CUDA_SUCCESS)
            failed("cuStreamWaitEvent");
        stream = other;
    }
    if (vpmm_free(shared.pool, b->pointer, stream) != VPMM_SUCCESS)
        failed("vpmm_free");
    else
        worker->frees++;
    free(b);
}

static bool new_stream(struct worker *worker)
{
    return shared.driver->cuStreamCreate(&worker->own, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS;
}

static void end_stream(struct worker *worker)
{
    if (worker->kept != NULL)
        end_block(worker, worker->kept);
    worker->kept = NULL;
    CUdeviceptr p = 0; /* so that the pool has met it */
    if (vpmm_malloc(shared.pool, PAGE, worker->own, &p) == VPMM_SUCCESS) {
        worker->mallocs++;
        if (vpmm_free(shared.pool, p, worker->own) == VPMM_SUCCESS)
            worker->frees++;
        else
            failed("vpmm_free on a stream that ends");
        if (vpmm_stream_release(shared.pool, worker->own) != VPMM_SUCCESS)
            failed("vpmm_stream_release");
    } else {
        (void)vpmm_stream_release(shared.pool, worker->own); /* refused, or never met */
    }
    if (shared.driver->cuStreamDestroy(worker->own) != CUDA_SUCCESS)
        failed("cuStreamDestroy");
    worker->own = NULL;
}

static void use_own_stream(struct worker *worker)
{
    if (worker->kept != NULL)
        end_block(worker, worker->kept);
    worker->kept = make_block(worker, SHARED);
}

static void use_shared_streams(struct worker *worker)
{
    _Atomic(struct block *) *slot = &shared.slot[draw(worker, SLOTS)];
    struct block *b = atomic_exchange_explicit(slot, NULL, memory_order_acq_rel);
    if (b == NULL) {
        struct block *fresh = make_block(worker, (int)draw(worker, SHARED));
        b = atomic_exchange_explicit(slot, fresh, memory_order_acq_rel);
    }
    if (b != NULL)
        end_block(worker, b);
}

static void one_operation(struct worker *worker, uint64_t i)
{
    if (draw(worker, 8) == 0)
        use_own_stream(worker);
    else
        use_shared_streams(worker);
    if (i % STREAM_LIFE == STREAM_LIFE - 1) {
        end_stream(worker);
        if (!new_stream(worker))
            failed("cuStreamCreate");
    }
    if (draw(worker, 20000) == 0 && vpmm_trim(shared.pool, draw(worker, 128) * PAGE, NULL) != VPMM_SUCCESS)
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
        driver->cuEventCreate(&worker->event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS || !new_stream(worker)) {
        failed("the thread's beginning");
        return NULL;
    }
    for (uint64_t i = 0; worker->mallocs + worker->frees < shared.operations / THREADS && i < shared.operations; i++)
        one_operation(worker, i);
    end_stream(worker);
    if (driver->cuEventDestroy(worker->event) != CUDA_SUCCESS)
        failed("cuEventDestroy");
    atomic_fetch_add(&shared.mallocs, worker->mallocs);
    atomic_fetch_add(&shared.frees, worker->frees);
    return NULL;
}

static bool begin(void)
{
    vpmm_sim_config sim = vpmm_sim_config_default();
    sim.memory_bytes = 256 * PAGE;
    shared.sim = vpmm_sim_create(&sim);
    if (shared.sim == NULL)
        return false;
    const vpmm_driver *driver = shared.driver = vpmm_sim_driver(shared.sim);
    vpmm_config config = vpmm_config_default();
    config.driver = driver;
    config.va_size = 512 * PAGE;
    config.page_size = PAGE;
    config.small = VPMM_SMALL_ASYNC;
    config.cache_bytes = CACHE * PAGE;
    if (driver->cuInit(0) != CUDA_SUCCESS || driver->cuDevicePrimaryCtxRetain(&shared.context, 0) != CUDA_SUCCESS ||
        driver->cuCtxSetCurrent(shared.context) != CUDA_SUCCESS)
        return false;
    for (int i = 0; i < SHARED; i++)
        if (driver->cuStreamCreate(&shared.stream[i], CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS)
            return false;
    return vpmm_pool_create(&config, &shared.pool) == VPMM_SUCCESS;
}

static void check_statistics(uint64_t mallocs, uint64_t frees)
{
    vpmm_stats stats;
    memset(&stats, 0, sizeof stats);
    if (vpmm_check(shared.pool) != VPMM_SUCCESS)
        failed("the audit");
    (void)vpmm_stats_get(shared.pool, &stats);
    printf("mallocs %llu, of which cached %llu, neighbour's %llu, own %llu, completed %llu, waited %llu, built %llu; "
           "reclaims %llu, refused %llu, marks %llu, cached at the end %llu pages\n",
           (unsigned long long)stats.mallocs, (unsigned long long)stats.hits_cache,
           (unsigned long long)stats.hits_neighbour, (unsigned long long)stats.hits_own_stream,
           (unsigned long long)stats.hits_completed, (unsigned long long)stats.hits_waited,
           (unsigned long long)stats.builds, (unsigned long long)stats.reclaims,
           (unsigned long long)atomic_load(&shared.refusals), (unsigned long long)stats.marks,
           (unsigned long long)(stats.cached_bytes / PAGE));
    if (stats.live_bytes != 0 || stats.requested_bytes != 0)
        failed("something is live at the end");
    if (stats.mallocs != mallocs || stats.frees != frees || mallocs != frees)
        failed("the statistics are not what the threads counted");
    if (stats.mallocs != stats.hits_cache + stats.hits_neighbour + stats.hits_own_stream + stats.hits_completed +
                             stats.hits_waited + stats.builds)
        failed("the mallocs are not the sum of the tiers");
    if (stats.cached_bytes > (THREADS + 1) * CACHE * PAGE)
        failed("more is cached than may be");
    if (stats.hits_cache < stats.mallocs / 10 || stats.hits_neighbour == 0 || stats.builds == 0)
        failed("the caches are hardly used: what is tested is not what is meant to be");
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
    check_statistics(atomic_load(&shared.mallocs), atomic_load(&shared.frees) + last.frees);
    if (vpmm_pool_destroy(shared.pool) != VPMM_SUCCESS)
        failed("vpmm_pool_destroy");
    for (int i = 0; i < SHARED; i++)
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
