/*
 * Scrapes while pools are allocated from, come and go; for ThreadSanitizer, and useful without it.
 *
 * Two threads allocate and free on a pool with a reaper, two ask the exporter for its metrics and for its health, and
 * the main thread makes a pool, adds, removes and destroys it, again and again, then starts and stops a second
 * exporter.
 *
 *   VPMM_TEST_OPS   mallocs and frees in all; 60,000
 *
 * Exit status 0: no failure, every answer is whole, the identities hold in every scrape, nothing leaks.
 */
#include "exporter/client.h"

#include <pthread.h>
#include <stdatomic.h>

#include <vpmm/exporter.h>
#include <vpmm/sim.h>

static struct {
    vpmm_sim *sim;
    const vpmm_driver *driver;
    CUcontext context;
    vpmm_pool *pool;
    vpmm_exporter *exporter;
    unsigned long operations;
    atomic_bool done;
    atomic_uint failures, scrapes;
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

static void *allocate(void *unused)
{
    CUstream stream;
    (void)unused;
    needs(shared.driver->cuCtxSetCurrent(shared.context) == CUDA_SUCCESS);
    needs(shared.driver->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
    for (unsigned long i = 0; i < shared.operations / 2; i++) {
        CUdeviceptr p;
        needs(vpmm_malloc(shared.pool, (size_t)(i % 7 + 1) << 20, stream, &p) == VPMM_SUCCESS);
        needs(vpmm_free(shared.pool, p, stream) == VPMM_SUCCESS);
    }
    needs(vpmm_stream_release(shared.pool, stream) == VPMM_SUCCESS);
    needs(shared.driver->cuStreamDestroy(stream) == CUDA_SUCCESS);
    return NULL;
}

static double of_pool(const char *text, const char *metric)
{
    char series[128];
    snprintf(series, sizeof series, "%s{device=\"0\",pool=\"p\"}", metric);
    return sample(text, series);
}

static void check(const char *text)
{
    double mapped = of_pool(text, "vpmm_mapped_bytes"), live = of_pool(text, "vpmm_live_bytes");
    double reusable = of_pool(text, "vpmm_reusable_bytes"), hole = of_pool(text, "vpmm_hole_bytes");
    double pending = of_pool(text, "vpmm_pending_unmap_bytes"), reserved = of_pool(text, "vpmm_reserved_bytes");
    /* Levels of different instants: a level that would be below zero is shown as 0, all else sums up. */
    needs(mapped == live + reusable || (live > mapped && reusable == 0));
    needs(reserved == mapped + hole + pending || (mapped + pending > reserved && hole == 0));
}

static void *scrape(void *unused)
{
    (void)unused;
    while (!atomic_load(&shared.done)) {
        struct reply reply = client_get(vpmm_exporter_port(shared.exporter), "/metrics", "");
        needs(reply.status == 200);
        if (reply.status == 200)
            check(reply.body);
        reply_free(&reply);
        reply = client_get(vpmm_exporter_port(shared.exporter), "/-/ready", "");
        needs(reply.status == 200);
        reply_free(&reply);
        atomic_fetch_add(&shared.scrapes, 1);
    }
    return NULL;
}

static void come_and_go(void)
{
    vpmm_config config = vpmm_config_default();
    vpmm_exporter_config second = vpmm_exporter_config_default();
    vpmm_exporter *exporter;
    config.driver = shared.driver;
    config.va_size = (size_t)1 << 30;
    second.port = 0;
    for (int i = 0; i < 40; i++) {
        vpmm_pool *pool;
        needs(vpmm_pool_create(&config, &pool) == VPMM_SUCCESS);
        needs(vpmm_exporter_add(shared.exporter, pool, "other") == VPMM_SUCCESS);
        needs(vpmm_exporter_start(&second, &exporter) == VPMM_SUCCESS);
        needs(vpmm_exporter_add(exporter, pool, "other") == VPMM_SUCCESS);
        needs(vpmm_exporter_remove(shared.exporter, pool) == VPMM_SUCCESS);
        needs(vpmm_exporter_stop(exporter) == VPMM_SUCCESS);
        needs(vpmm_pool_destroy(pool) == VPMM_SUCCESS);
    }
}

static void open_all(void)
{
    vpmm_config config = vpmm_config_default();
    vpmm_exporter_config exporter = vpmm_exporter_config_default();
    CUdevice device;
    shared.sim = vpmm_sim_create(NULL);
    shared.driver = vpmm_sim_driver(shared.sim);
    config.driver = shared.driver;
    config.va_size = (size_t)16 << 30;
    exporter.port = 0;
    exporter.limits.requests_per_second = 100000;
    needs(vpmm_pool_create(&config, &shared.pool) == VPMM_SUCCESS);
    needs(shared.driver->cuDeviceGet(&device, 0) == CUDA_SUCCESS);
    needs(shared.driver->cuDevicePrimaryCtxRetain(&shared.context, device) == CUDA_SUCCESS);
    needs(vpmm_exporter_start(&exporter, &shared.exporter) == VPMM_SUCCESS);
    needs(vpmm_exporter_add(shared.exporter, shared.pool, "p") == VPMM_SUCCESS);
}

int main(void)
{
    const char *operations = getenv("VPMM_TEST_OPS");
    pthread_t thread[4];
    shared.operations = operations ? strtoul(operations, NULL, 10) : 60000;
    open_all();
    for (int i = 0; i < 4; i++)
        needs(pthread_create(&thread[i], NULL, i < 2 ? allocate : scrape, NULL) == 0);
    come_and_go();
    for (int i = 0; i < 4; i++) {
        pthread_join(thread[i], NULL);
        if (i == 1)
            atomic_store(&shared.done, true);
    }
    needs(vpmm_exporter_remove(shared.exporter, shared.pool) == VPMM_SUCCESS);
    needs(vpmm_exporter_stop(shared.exporter) == VPMM_SUCCESS);
    needs(vpmm_pool_destroy(shared.pool) == VPMM_SUCCESS);
    needs(shared.driver->cuDevicePrimaryCtxRelease(0) == CUDA_SUCCESS);
    needs(vpmm_sim_destroy(shared.sim) == 0);
    printf("%lu operations, %u scrapes: %u failures\n", shared.operations, atomic_load(&shared.scrapes),
           atomic_load(&shared.failures));
    return atomic_load(&shared.failures) != 0;
}
