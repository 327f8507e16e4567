#define _GNU_SOURCE 1

#include "replay.h"

#include <string.h>

#define SIM_MEMORY_BYTES ((size_t)128 << 30)

bool target_cuda_ok(const target *t, const char *what, CUresult result)
{
    const char *name = NULL;
    if (result == CUDA_SUCCESS)
        return true;
    if (t->driver->cuGetErrorName(result, &name) != CUDA_SUCCESS || name == NULL)
        name = "an unknown error";
    fprintf(stderr, "vpmm-replay: %s: %s (%d)\n", what, name, (int)result);
    return false;
}

static bool vpmm_ok(const char *what, vpmm_status status)
{
    if (status != VPMM_SUCCESS)
        fprintf(stderr, "vpmm-replay: %s: %s: %s\n", what, vpmm_status_name(status), vpmm_last_error());
    return status == VPMM_SUCCESS;
}

static bool open_driver(target *t)
{
    if (t->options->cuda) {
        t->driver = vpmm_driver_cuda();
        if (t->driver == NULL)
            fprintf(stderr, "vpmm-replay: %s\nvpmm-replay: without a GPU, use --driver sim\n", vpmm_last_error());
        return t->driver != NULL;
    }
    vpmm_sim_config config = vpmm_sim_config_default();
    config.memory_bytes = SIM_MEMORY_BYTES;
    config.stepped = true;
    t->sim = vpmm_sim_create(&config);
    if (t->sim == NULL) {
        fprintf(stderr, "vpmm-replay: the simulator: %s\n", vpmm_last_error());
        return false;
    }
    t->driver = vpmm_sim_driver(t->sim);
    return true;
}

static bool open_context(target *t, int ordinal)
{
    return target_cuda_ok(t, "cuInit", t->driver->cuInit(0)) &&
           target_cuda_ok(t, "cuDeviceGet", t->driver->cuDeviceGet(&t->device, ordinal)) &&
           target_cuda_ok(t, "cuDevicePrimaryCtxRetain", t->driver->cuDevicePrimaryCtxRetain(&t->context, t->device)) &&
           target_enter(t);
}

bool target_enter(const target *t)
{
    return target_cuda_ok(t, "cuCtxSetCurrent", t->driver->cuCtxSetCurrent(t->context));
}

static bool find_page_size(target *t, size_t configured)
{
    CUmemAllocationProp prop = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = t->device},
    };
    t->page_size = configured;
    return configured != 0 || target_cuda_ok(t, "cuMemGetAllocationGranularity",
                                             t->driver->cuMemGetAllocationGranularity(
                                                 &t->page_size, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
}

static bool open_memory_pool(target *t)
{
    CUmemPoolProps props = {
        .allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = t->device},
    };
    cuuint64_t threshold = UINT64_MAX;
    return target_cuda_ok(t, "cuMemPoolCreate", t->driver->cuMemPoolCreate(&t->memory_pool, &props)) &&
           target_cuda_ok(
               t, "cuMemPoolSetAttribute",
               t->driver->cuMemPoolSetAttribute(t->memory_pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
}

bool target_open(target *t, const replay_options *options)
{
    vpmm_config config = vpmm_config_default();
    *t = (target){.options = options};
    if (!vpmm_ok("the environment", vpmm_config_from_env(&config)) || !open_driver(t) ||
        !open_context(t, config.device) || !find_page_size(t, config.page_size))
        return false;
    if (options->async)
        return open_memory_pool(t);
    config.driver = t->driver;
    config.reaper = options->cuda;
    if (!options->cuda)
        config.decay_ms = VPMM_DECAY_NEVER; /* the simulator's time is not the clock's, by which memory decays */
    return vpmm_ok("vpmm_pool_create", vpmm_pool_create(&config, &t->pool));
}

unsigned target_close(target *t)
{
    unsigned leaks = 0;
    if (t->pool != NULL)
        leaks += !vpmm_ok("vpmm_pool_destroy", vpmm_pool_destroy(t->pool));
    if (t->memory_pool != NULL)
        leaks += !target_cuda_ok(t, "cuMemPoolDestroy", t->driver->cuMemPoolDestroy(t->memory_pool));
    if (t->context != NULL) {
        t->driver->cuCtxSetCurrent(NULL);
        leaks += !target_cuda_ok(t, "cuDevicePrimaryCtxRelease", t->driver->cuDevicePrimaryCtxRelease(t->device));
    }
    if (t->sim != NULL)
        leaks += (unsigned)vpmm_sim_destroy(t->sim);
    *t = (target){0};
    return leaks;
}

static target_status async_malloc(target *t, size_t bytes, CUstream stream, CUdeviceptr *out)
{
    CUresult result = t->driver->cuMemAllocFromPoolAsync(out, bytes, t->memory_pool, stream);
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
        return TARGET_REFUSED;
    return target_cuda_ok(t, "cuMemAllocFromPoolAsync", result) ? TARGET_OK : TARGET_FAILED;
}

target_status target_malloc(target *t, size_t bytes, CUstream stream, CUdeviceptr *out)
{
    if (t->pool == NULL)
        return async_malloc(t, bytes, stream, out);
    vpmm_status status = vpmm_malloc(t->pool, bytes, stream, out);
    if (status == VPMM_ERROR_OUT_OF_MEMORY)
        return TARGET_REFUSED;
    return vpmm_ok("vpmm_malloc", status) ? TARGET_OK : TARGET_FAILED;
}

bool target_free(target *t, CUdeviceptr address, CUstream stream)
{
    if (t->pool == NULL)
        return target_cuda_ok(t, "cuMemFreeAsync", t->driver->cuMemFreeAsync(address, stream));
    return vpmm_ok("vpmm_free", vpmm_free(t->pool, address, stream));
}

/* A stream on which the trace did nothing is unknown to the pool; that is no failure. */
bool target_release_stream(target *t, CUstream stream)
{
    if (t->pool == NULL)
        return true;
    vpmm_status status = vpmm_stream_release(t->pool, stream);
    return status == VPMM_ERROR_INVALID_VALUE || vpmm_ok("vpmm_stream_release", status);
}

bool target_poll(target *t, unsigned budget_us)
{
    return t->pool == NULL || t->options->cuda || vpmm_ok("vpmm_poll_for", vpmm_poll_for(t->pool, budget_us));
}

bool target_audit(target *t)
{
    return t->pool == NULL || vpmm_ok("the audit", vpmm_check(t->pool));
}

target_level target_held(target *t)
{
    cuuint64_t reserved = 0;
    vpmm_stats stats;
    if (t->pool == NULL) {
        t->driver->cuMemPoolGetAttribute(t->memory_pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved);
        return (target_level){.mapped = reserved};
    }
    target_stats(t, &stats);
    return (target_level){
        .mapped = stats.mapped_bytes + stats.async_bytes, .slab = stats.slab_bytes, .slab_live = stats.slab_live_bytes};
}

void target_stats(target *t, vpmm_stats *stats)
{
    memset(stats, 0, sizeof *stats);
    if (t->pool != NULL)
        vpmm_stats_get(t->pool, stats);
}

double target_charged_us(const target *t)
{
    return t->sim == NULL ? 0 : vpmm_sim_thread_charged_us(t->sim);
}
