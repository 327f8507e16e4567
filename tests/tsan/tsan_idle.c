/*
 * Threads that allocate in bursts on a pool whose memory decays all the time, while others change its attributes, poll,
 * trim and read; for ThreadSanitizer, and useful without it. The simulator's race detector sees what is unmapped too
 * soon.
 *
 *   VPMM_TEST_MS   how long; 1,500
 *
 * Exit status 0: no failure, no race, the audit passes and nothing leaks.
 */
#include "payload.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <vpmm/sim.h>
#include <vpmm/vpmm.h>

enum { WORKERS = 3, BURST = 12, LONGEST = 40 };

static struct {
    const vpmm_driver *driver;
    vpmm_pool *pool;
    CUcontext context;
    atomic_int stop, failures;
} shared;

static void need(bool holds, const char *what)
{
    if (!holds && atomic_fetch_add(&shared.failures, 1) < 20)
        fprintf(stderr, "%s: %s\n", what, vpmm_last_error());
}

static void works(vpmm_status status, const char *what)
{
    need(status == VPMM_SUCCESS, what);
}

static void sleep_us(long us)
{
    const struct timespec time = {.tv_nsec = us * 1000};
    nanosleep(&time, NULL);
}

static uint64_t draw(uint64_t *random, uint64_t below)
{
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    return *random % below;
}

static void burst(CUstream stream, uint64_t *random)
{
    CUdeviceptr p[BURST];
    for (int i = 0; i < BURST; i++) {
        size_t bytes = draw(random, 2) ? (1 + draw(random, LONGEST)) * PAGE : 256 + draw(random, PAGE);
        works(vpmm_malloc(shared.pool, bytes, stream, &p[i]), "vpmm_malloc");
        need(shared.driver->cuMemsetD8Async(p[i], 1, 256, stream) == CUDA_SUCCESS, "cuMemsetD8Async");
    }
    for (int i = 0; i < BURST; i++)
        works(vpmm_free(shared.pool, p[i], stream), "vpmm_free");
}

static void *allocate(void *data)
{
    uint64_t random = 88172645463325252u + (uintptr_t)data;
    CUstream stream = NULL;
    shared.driver->cuCtxSetCurrent(shared.context);
    need(shared.driver->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS, "cuStreamCreate");
    while (!atomic_load(&shared.stop)) {
        burst(stream, &random);
        sleep_us((long)draw(&random, 30000));
    }
    works(vpmm_stream_release(shared.pool, stream), "vpmm_stream_release");
    need(shared.driver->cuStreamDestroy(stream) == CUDA_SUCCESS, "cuStreamDestroy");
    return NULL;
}

static void change(vpmm_attribute attribute, uint64_t value)
{
    uint64_t read;
    works(vpmm_pool_set_attribute(shared.pool, attribute, value), "vpmm_pool_set_attribute");
    works(vpmm_pool_get_attribute(shared.pool, attribute, &read), "vpmm_pool_get_attribute");
}

static void *meddle(void *data)
{
    uint64_t random = 362436069, turns = 0;
    (void)data;
    shared.driver->cuCtxSetCurrent(shared.context);
    while (!atomic_load(&shared.stop)) {
        change(VPMM_ATTRIBUTE_DECAY_MS, draw(&random, 4) ? draw(&random, 60) : VPMM_DECAY_NEVER);
        change(VPMM_ATTRIBUTE_RELEASE_THRESHOLD, draw(&random, 64) * PAGE);
        change(VPMM_ATTRIBUTE_REUSE, draw(&random, 3));
        change(VPMM_ATTRIBUTE_MAX_MAPPED, draw(&random, 2) * 8000 * PAGE);
        change(draw(&random, 2) ? VPMM_ATTRIBUTE_PEAK_LIVE : VPMM_ATTRIBUTE_PEAK_MAPPED, 0);
        works(vpmm_poll(shared.pool), "vpmm_poll");
        if (++turns % 16 == 0)
            works(vpmm_trim(shared.pool, draw(&random, 32) * PAGE, NULL), "vpmm_trim");
        sleep_us((long)draw(&random, 5000));
    }
    return NULL;
}

static void run(long ms)
{
    pthread_t thread[WORKERS + 1];
    for (uintptr_t i = 0; i <= WORKERS; i++)
        need(!pthread_create(&thread[i], NULL, i < WORKERS ? allocate : meddle, (void *)i), "pthread_create");
    for (long i = 0; i < ms; i++)
        sleep_us(1000);
    atomic_store(&shared.stop, 1);
    for (int i = 0; i <= WORKERS; i++)
        pthread_join(thread[i], NULL);
}

static void open_pool(vpmm_sim *sim)
{
    CUdevice device = 0;
    vpmm_config config = vpmm_config_default();
    config.driver = shared.driver = vpmm_sim_driver(sim);
    config.page_size = PAGE;
    config.va_size = (size_t)16 << 30;
    config.decay_ms = 20;
    need(shared.driver->cuInit(0) == CUDA_SUCCESS && shared.driver->cuDeviceGet(&device, 0) == CUDA_SUCCESS &&
             shared.driver->cuDevicePrimaryCtxRetain(&shared.context, device) == CUDA_SUCCESS,
         "the device");
    works(vpmm_pool_create(&config, &shared.pool), "vpmm_pool_create");
}

int main(void)
{
    const char *ms = getenv("VPMM_TEST_MS");
    vpmm_stats stats = {0};
    vpmm_sim *sim = vpmm_sim_create(NULL);
    if (!sim)
        return 1;
    open_pool(sim);
    run(ms ? atol(ms) : 1500);
    works(vpmm_check(shared.pool), "vpmm_check");
    works(vpmm_stats_get(shared.pool, &stats), "vpmm_stats_get");
    need(stats.decayed_bytes > 0, "nothing has decayed");
    works(vpmm_pool_destroy(shared.pool), "vpmm_pool_destroy");
    need(shared.driver->cuDevicePrimaryCtxRelease(0) == CUDA_SUCCESS, "cuDevicePrimaryCtxRelease");
    need(!vpmm_sim_races(sim) && !vpmm_sim_misuses(sim), "races or misuses");
    need(!vpmm_sim_destroy(sim), "leaks");
    printf("%llu MiB decayed, %d failures\n", (unsigned long long)(stats.decayed_bytes >> 20),
           atomic_load(&shared.failures));
    return atomic_load(&shared.failures) != 0;
}
