/*
 * Two threads that hand pieces to each other, over a simulator in real time, with front caches and the reaper at work;
 * for ThreadSanitizer, and useful without it.
 *
 * Each allocates 256 bytes to 4 MiB on its own stream, stamps them, and lays them where the other finds them; that one
 * looks at the stamp and frees on its own stream, ordered after the first by an event. One in four is freed by who
 * allocated it, so that both threads' caches have something to give.
 *
 *   VPMM_TEST_OPS   mallocs in all; 200,000
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

enum { THREADS = 2, SLOTS = 64 };

struct piece {
    CUdeviceptr pointer;
    uint32_t stamp;
    CUstream stream; /* that it was written on */
};

static struct {
    vpmm_sim *sim;
    const vpmm_driver *driver;
    vpmm_pool *pool;
    CUcontext context;
    CUstream stream[THREADS];
    _Atomic(struct piece *) slot[THREADS][SLOTS]; /* for that thread to take */
    atomic_uint_fast64_t mismatches, failures;
    uint64_t operations;
} shared;

struct worker {
    pthread_t thread;
    unsigned index;
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

static struct piece *make_piece(struct worker *worker)
{
    struct piece *p = calloc(1, sizeof *p);
    size_t octave = (size_t)256 << draw(worker, 14);
    if (p == NULL)
        return NULL;
    p->stream = shared.stream[worker->index];
    p->stamp = ++worker->stamps;
    if (vpmm_malloc(shared.pool, octave + draw(worker, octave), p->stream, &p->pointer) != VPMM_SUCCESS) {
        failed("vpmm_malloc");
        free(p);
        return NULL;
    }
    if (!payload_write(shared.driver, p->pointer, 1, p->stamp, p->stream))
        failed("cuMemsetD2D32Async");
    return p;
}

/* On the worker's own stream, after all that the piece's has been given. */
static void end_piece(struct worker *worker, struct piece *p)
{
    CUstream own = shared.stream[worker->index];
    if (p->stream != own && (shared.driver->cuEventRecord(worker->event, p->stream) != CUDA_SUCCESS ||
                             shared.driver->cuStreamWaitEvent(own, worker->event, 0) != CUDA_SUCCESS))
        failed("cuStreamWaitEvent");
    if (!payload_expect(shared.driver, p->pointer, 1, p->stamp, own, &shared.mismatches))
        failed("cuMemcpy2DAsync");
    if (vpmm_free(shared.pool, p->pointer, own) != VPMM_SUCCESS)
        failed("vpmm_free");
    free(p);
}

static void take_what_lies_there(struct worker *worker, unsigned slot)
{
    struct piece *p = atomic_exchange_explicit(&shared.slot[worker->index][slot], NULL, memory_order_acq_rel);
    if (p != NULL)
        end_piece(worker, p);
}

static void one_operation(struct worker *worker)
{
    unsigned to = draw(worker, 4) == 0 ? worker->index : 1 - worker->index;
    struct piece *fresh = make_piece(worker);
    struct piece *old = atomic_exchange_explicit(&shared.slot[to][draw(worker, SLOTS)], fresh, memory_order_acq_rel);
    if (old != NULL)
        end_piece(worker, old);
    take_what_lies_there(worker, (unsigned)draw(worker, SLOTS));
    if (draw(worker, 20000) == 0 && vpmm_trim(shared.pool, 0, NULL) != VPMM_SUCCESS)
        failed("vpmm_trim");
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
    sim.memory_bytes = 1024 * PAGE;
    shared.sim = vpmm_sim_create(&sim);
    if (shared.sim == NULL)
        return false;
    const vpmm_driver *driver = shared.driver = vpmm_sim_driver(shared.sim);
    vpmm_config config = vpmm_config_default();
    config.driver = driver;
    config.va_size = 2048 * PAGE;
    config.page_size = PAGE;
    if (driver->cuInit(0) != CUDA_SUCCESS || driver->cuDevicePrimaryCtxRetain(&shared.context, 0) != CUDA_SUCCESS ||
        driver->cuCtxSetCurrent(shared.context) != CUDA_SUCCESS)
        return false;
    for (int i = 0; i < THREADS; i++)
        if (driver->cuStreamCreate(&shared.stream[i], CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS)
            return false;
    return vpmm_pool_create(&config, &shared.pool) == VPMM_SUCCESS;
}

/* What still lies in the slots is freed by who was to find it. */
static void free_the_rest(void)
{
    struct worker last = {.index = 0};
    if (shared.driver->cuEventCreate(&last.event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS)
        failed("cuEventCreate");
    for (last.index = 0; last.index < THREADS; last.index++)
        for (unsigned slot = 0; slot < SLOTS; slot++)
            take_what_lies_there(&last, slot);
    shared.driver->cuEventDestroy(last.event);
}

static void check_the_pool(void)
{
    vpmm_stats stats;
    memset(&stats, 0, sizeof stats);
    if (vpmm_check(shared.pool) != VPMM_SUCCESS)
        failed("the audit");
    (void)vpmm_stats_get(shared.pool, &stats);
    if (stats.requested_bytes != 0 || stats.mallocs != stats.frees)
        failed("something is live at the end");
    for (int i = 0; i < THREADS; i++)
        if (vpmm_stream_release(shared.pool, shared.stream[i]) != VPMM_SUCCESS)
            failed("vpmm_stream_release");
    if (vpmm_pool_destroy(shared.pool) != VPMM_SUCCESS)
        failed("vpmm_pool_destroy");
}

static void finish(void)
{
    free_the_rest();
    check_the_pool();
    for (int i = 0; i < THREADS; i++)
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
    shared.operations = operations != NULL ? strtoull(operations, NULL, 0) : 200000;
    uint64_t first = seed != NULL ? strtoull(seed, NULL, 0) : 1;
    if (!begin()) {
        fprintf(stderr, "cannot begin: %s\n", vpmm_last_error());
        return 1;
    }
    struct worker worker[THREADS];
    memset(worker, 0, sizeof worker);
    for (unsigned i = 0; i < THREADS; i++) {
        worker[i].index = i;
        worker[i].random = (first + i) * 0x9e3779b97f4a7c15;
        worker[i].stamps = i << 28;
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
