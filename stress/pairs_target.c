#define _GNU_SOURCE 1

#include "pairs.h"

#include <string.h>

bool gpu_ok(const gpu *g, const char *what, CUresult result)
{
    const char *name = NULL;
    if (result == CUDA_SUCCESS)
        return true;
    if (g->driver->cuGetErrorName(result, &name) != CUDA_SUCCESS || name == NULL)
        name = "an unknown error";
    fprintf(stderr, "vpmm-pairs: %s: %s (%d)\n", what, name, (int)result);
    return false;
}

bool vpmm_ok(const char *what, vpmm_status status)
{
    if (status != VPMM_SUCCESS)
        fprintf(stderr, "vpmm-pairs: %s: %s: %s\n", what, vpmm_status_name(status), vpmm_last_error());
    return status == VPMM_SUCCESS;
}

/* ---- the device ---- */

static uint64_t largest(const pairs_list *list)
{
    uint64_t most = 0;
    for (size_t i = 0; i < list->n; i++)
        most = list->value[i] > most ? list->value[i] : most;
    return most;
}

/* What the largest case can have in flight, half as much again, and a little: valgrind has no room for 128 GiB. */
static size_t simulated_bytes(const pairs_options *o)
{
    uint64_t in_flight = largest(&o->threads) * largest(&o->bytes) * PAIRS_WINDOW;
    if (largest(&o->patterns) != PATTERN_PAIR)
        in_flight *= PAIRS_LONGEST;
    return in_flight / 2 * 3 + ((size_t)2 << 30);
}

/*
 * Its streams run by themselves: what is freed passes as on an idle GPU. Nothing here touches the memory, so there is
 * no race to find, and the looking for one would be charged to each pair.
 */
static bool open_simulator(gpu *g, const pairs_options *options)
{
    vpmm_sim_config config = vpmm_sim_config_default();
    config.memory_bytes = simulated_bytes(options);
    config.detect_races = false;
    g->sim = vpmm_sim_create(&config);
    if (g->sim == NULL) {
        fprintf(stderr, "vpmm-pairs: the simulator: %s: use fewer --threads or --bytes\n", vpmm_last_error());
        return false;
    }
    g->driver = vpmm_sim_driver(g->sim);
    return true;
}

static bool open_cuda(gpu *g)
{
    g->driver = vpmm_driver_cuda();
    if (g->driver == NULL)
        fprintf(stderr, "vpmm-pairs: %s\nvpmm-pairs: without a GPU, use --driver sim\n", vpmm_last_error());
    return g->driver != NULL;
}

bool gpu_open(gpu *g, const pairs_options *options)
{
    *g = (gpu){0};
    return (options->cuda ? open_cuda(g) : open_simulator(g, options)) && gpu_ok(g, "cuInit", g->driver->cuInit(0)) &&
           gpu_ok(g, "cuDeviceGet", g->driver->cuDeviceGet(&g->device, options->config.device)) &&
           gpu_ok(g, "cuDevicePrimaryCtxRetain", g->driver->cuDevicePrimaryCtxRetain(&g->context, g->device)) &&
           gpu_enter(g);
}

bool gpu_enter(const gpu *g)
{
    return gpu_ok(g, "cuCtxSetCurrent", g->driver->cuCtxSetCurrent(g->context));
}

bool gpu_close(gpu *g)
{
    bool good = true;
    if (g->context != NULL) {
        g->driver->cuCtxSetCurrent(NULL);
        good = gpu_ok(g, "cuDevicePrimaryCtxRelease", g->driver->cuDevicePrimaryCtxRelease(g->device));
    }
    if (g->sim != NULL) { /* what is wrong, it names on stderr */
        good = vpmm_sim_misuses(g->sim) == 0 && good;
        good = vpmm_sim_destroy(g->sim) == 0 && good;
    }
    *g = (gpu){0};
    return good;
}

/* ---- the allocator ---- */

static bool open_memory_pool(target *t)
{
    const vpmm_driver *driver = t->gpu->driver;
    CUmemPoolProps props = {
        .allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = t->gpu->device},
    };
    cuuint64_t threshold = UINT64_MAX;
    return gpu_ok(t->gpu, "cuMemPoolCreate", driver->cuMemPoolCreate(&t->memory_pool, &props)) &&
           gpu_ok(t->gpu, "cuMemPoolSetAttribute",
                  driver->cuMemPoolSetAttribute(t->memory_pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
}

bool target_open(target *t, gpu *g, const pairs_case *c)
{
    vpmm_config config = c->options->config;
    *t = (target){.gpu = g};
    if (c->async)
        return open_memory_pool(t);
    config.driver = g->driver;
    if (!vpmm_ok("vpmm_pool_create", vpmm_pool_create(&config, &t->pool)) || !metrics_add(c->exporter, t->pool))
        return false;
    t->exporter = c->exporter;
    return true;
}

bool target_audit(target *t)
{
    return t->pool == NULL || vpmm_ok("the audit", vpmm_check(t->pool));
}

bool target_close(target *t)
{
    bool good = true;
    if (t->pool != NULL) {
        good = metrics_remove(t->exporter, t->pool);
        good = vpmm_ok("vpmm_pool_destroy", vpmm_pool_destroy(t->pool)) && good;
    }
    if (t->memory_pool != NULL)
        good = gpu_ok(t->gpu, "cuMemPoolDestroy", t->gpu->driver->cuMemPoolDestroy(t->memory_pool)) && good;
    *t = (target){0};
    return good;
}

/* A stream that nothing was allocated on is unknown to the pool; that is no failure. */
bool target_release_stream(target *t, CUstream stream)
{
    if (t->pool == NULL)
        return true;
    vpmm_status status = vpmm_stream_release(t->pool, stream);
    return status == VPMM_ERROR_INVALID_VALUE || vpmm_ok("vpmm_stream_release", status);
}

bool target_stats(target *t, vpmm_stats *stats)
{
    memset(stats, 0, sizeof *stats);
    return t->pool == NULL || vpmm_ok("vpmm_stats_get", vpmm_stats_get(t->pool, stats));
}

bool target_peak_mapped(target *t, uint64_t *bytes)
{
    vpmm_stats stats;
    cuuint64_t reserved = 0;
    if (t->pool == NULL) {
        bool ok =
            gpu_ok(t->gpu, "cuMemPoolGetAttribute",
                   t->gpu->driver->cuMemPoolGetAttribute(t->memory_pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, &reserved));
        *bytes = reserved;
        return ok;
    }
    bool ok = target_stats(t, &stats);
    *bytes = stats.peak_mapped_bytes;
    return ok;
}

bool target_malloc_failed(const target *t, size_t bytes, vpmm_status status, CUresult result)
{
    vpmm_ok("vpmm_malloc", status);
    gpu_ok(t->gpu, "cuMemAllocFromPoolAsync", result);
    if (status == VPMM_ERROR_OUT_OF_MEMORY || result == CUDA_ERROR_OUT_OF_MEMORY)
        fprintf(stderr,
                "vpmm-pairs: a request of %zu bytes was refused: use fewer --threads or --bytes (window and handoff "
                "keep %d allocations in flight a thread or couple), or raise VPMM_MAX_MAPPED if it is set\n",
                bytes, PAIRS_WINDOW);
    return false;
}

bool target_free_failed(const target *t, vpmm_status status, CUresult result)
{
    vpmm_ok("vpmm_free", status);
    gpu_ok(t->gpu, "cuMemFreeAsync", result);
    return false;
}
