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
#include "world.h"

#include "exporter/client.h"

#include <vpmm/exporter.h>

enum { ALLOCATORS = 2, SCRAPERS = 2 };

static struct {
    vpmm_exporter *exporter;
    atomic_uint busy; /* allocators, and the main thread: scrapes go on until all have ended */
    atomic_uint scrapes;
} shared;

static void allocate(void)
{
    CUstream stream;
    needs(world.driver->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
    for (uint64_t i = 0; i < world.amount / ALLOCATORS; i++) {
        CUdeviceptr p;
        needs(vpmm_malloc(world.pool, (size_t)(i % 7 + 1) << 20, stream, &p) == VPMM_SUCCESS);
        needs(vpmm_free(world.pool, p, stream) == VPMM_SUCCESS);
    }
    needs(vpmm_stream_release(world.pool, stream) == VPMM_SUCCESS);
    needs(world.driver->cuStreamDestroy(stream) == CUDA_SUCCESS);
    atomic_fetch_sub(&shared.busy, 1);
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

static void scrape(void)
{
    while (atomic_load(&shared.busy) != 0) {
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
}

static void work(uint64_t index)
{
    if (index < ALLOCATORS)
        allocate();
    else
        scrape();
}

static void come_and_go(void)
{
    vpmm_config config = vpmm_config_default();
    vpmm_exporter_config second = vpmm_exporter_config_default();
    vpmm_exporter *exporter;
    config.driver = world.driver;
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
    atomic_fetch_sub(&shared.busy, 1);
}

static void configure(vpmm_sim_config *sim, vpmm_config *config)
{
    (void)sim;
    config->va_size = (size_t)16 << 30;
}

static void begin(void)
{
    vpmm_exporter_config exporter = vpmm_exporter_config_default();
    exporter.port = 0;
    exporter.limits.requests_per_second = 100000;
    needs(vpmm_exporter_start(&exporter, &shared.exporter) == VPMM_SUCCESS);
    needs(vpmm_exporter_add(shared.exporter, world.pool, "p") == VPMM_SUCCESS);
    atomic_store(&shared.busy, ALLOCATORS + 1);
}

static void finish(void)
{
    needs(vpmm_exporter_remove(shared.exporter, world.pool) == VPMM_SUCCESS);
    needs(vpmm_exporter_stop(shared.exporter) == VPMM_SUCCESS);
    printf("%u scrapes\n", atomic_load(&shared.scrapes));
}

const struct program program = {
    .variable = "VPMM_TEST_OPS",
    .amount = 60000,
    .threads = ALLOCATORS + SCRAPERS,
    .configure = configure,
    .work = work,
    .begin = begin,
    .meanwhile = come_and_go,
    .finish = finish,
};
