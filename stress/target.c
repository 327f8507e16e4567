#define _GNU_SOURCE 1

#include "target.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool vpmm_ok(const char *what, vpmm_status status)
{
    if (status != VPMM_SUCCESS)
        fprintf(stderr, "%s: %s: %s: %s\n", program_name, what, vpmm_status_name(status), vpmm_last_error());
    return status == VPMM_SUCCESS;
}

bool gpu_ok(const gpu *g, const char *what, CUresult result)
{
    const char *name = NULL;
    if (result == CUDA_SUCCESS)
        return true;
    if (g->driver->cuGetErrorName(result, &name) != CUDA_SUCCESS || name == NULL)
        name = "an unknown error";
    fprintf(stderr, "%s: %s: %s (%d)\n", program_name, what, name, (int)result);
    return false;
}

/* ---- the GPU ---- */

static bool open_simulator(gpu *g, const gpu_options *options)
{
    g->sim = vpmm_sim_create(options->sim);
    if (g->sim == NULL) {
        fprintf(stderr, "%s: the simulator: %s%s%s\n", program_name, vpmm_last_error(),
                options->advice == NULL ? "" : ": ", options->advice == NULL ? "" : options->advice);
        return false;
    }
    g->driver = vpmm_sim_driver(g->sim);
    return true;
}

static bool open_cuda(gpu *g)
{
    g->driver = vpmm_driver_cuda();
    if (g->driver == NULL)
        fprintf(stderr, "%s: %s\n%s: without a GPU, use --driver sim\n", program_name, vpmm_last_error(), program_name);
    return g->driver != NULL;
}

static bool find_device(gpu *g, int ordinal)
{
    int devices = 0;
    if (!gpu_ok(g, "cuDeviceGetCount", g->driver->cuDeviceGetCount(&devices)))
        return false;
    if (ordinal >= 0 && ordinal < devices)
        return gpu_ok(g, "cuDeviceGet", g->driver->cuDeviceGet(&g->device, ordinal));
    fprintf(stderr, "%s: VPMM_DEVICE is %d, and the driver shows %d device%s, numbered from 0\n", program_name, ordinal,
            devices, devices == 1 ? "" : "s");
    return false;
}

bool gpu_open(gpu *g, const gpu_options *options)
{
    *g = (gpu){0};
    return (options->sim != NULL ? open_simulator(g, options) : open_cuda(g)) &&
           gpu_ok(g, "cuInit", g->driver->cuInit(0)) && find_device(g, options->ordinal) &&
           gpu_ok(g, "cuDevicePrimaryCtxRetain", g->driver->cuDevicePrimaryCtxRetain(&g->context, g->device)) &&
           gpu_enter(g);
}

unsigned gpu_close(gpu *g)
{
    unsigned failures = 0;
    if (g->context != NULL) {
        g->driver->cuCtxSetCurrent(NULL);
        failures += !gpu_ok(g, "cuDevicePrimaryCtxRelease", g->driver->cuDevicePrimaryCtxRelease(g->device));
    }
    if (g->sim != NULL) {
        failures += vpmm_sim_misuses(g->sim) != 0;      /* which it has named */
        failures += (unsigned)vpmm_sim_destroy(g->sim); /* names the leaks on stderr */
    }
    *g = (gpu){0};
    return failures;
}

bool gpu_enter(const gpu *g)
{
    return gpu_ok(g, "cuCtxSetCurrent", g->driver->cuCtxSetCurrent(g->context));
}

bool gpu_page_size(const gpu *g, size_t configured, size_t *bytes)
{
    CUmemAllocationProp prop = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = g->device},
    };
    *bytes = configured;
    return configured != 0 ||
           gpu_ok(g, "cuMemGetAllocationGranularity",
                  g->driver->cuMemGetAllocationGranularity(bytes, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
}

double gpu_charged_us(const gpu *g)
{
    return g->sim == NULL ? 0 : vpmm_sim_thread_charged_us(g->sim);
}

/* ---- the allocator ---- */

void target_tell_no_decay(void)
{
    static const char *const names[] = {"VPMM_DECAY_MS", "VPMM_RELEASE_THRESHOLD", "VPMM_REAPER"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *value = getenv(names[i]);
        if (value != NULL && *value != '\0')
            fprintf(stderr, "%s: %s=%s is ignored here: no memory decays, and passes are made by hand\n", program_name,
                    names[i], value);
    }
}

/* Once. */
static void tell_simulated_pool(void)
{
    static atomic_bool told;
    if (!atomic_exchange(&told, true))
        fprintf(stderr,
                "%s: async on the simulated GPU is the simulator's own pool, a plain best fit: it holds more and takes "
                "other times than cuMemAllocAsync, which --driver cuda measures\n",
                program_name);
}

static bool open_memory_pool(target *t)
{
    const vpmm_driver *driver = t->gpu->driver;
    if (t->gpu->sim != NULL)
        tell_simulated_pool();
    CUmemPoolProps props = {
        .allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = t->gpu->device},
    };
    cuuint64_t threshold = UINT64_MAX;
    return gpu_ok(t->gpu, "cuMemPoolCreate", driver->cuMemPoolCreate(&t->memory_pool, &props)) &&
           gpu_ok(t->gpu, "cuMemPoolSetAttribute",
                  driver->cuMemPoolSetAttribute(t->memory_pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
}

bool target_open(target *t, gpu *g, const vpmm_config *config)
{
    *t = (target){.gpu = g};
    if (config == NULL)
        return open_memory_pool(t);
    vpmm_config on_gpu = *config;
    on_gpu.driver = g->driver;
    t->made = vpmm_pool_create(&on_gpu, &t->pool);
    return vpmm_ok("vpmm_pool_create", t->made);
}

unsigned target_close(target *t)
{
    unsigned failures = 0;
    if (t->pool != NULL)
        failures += !vpmm_ok("vpmm_pool_destroy", vpmm_pool_destroy(t->pool));
    if (t->memory_pool != NULL)
        failures += !gpu_ok(t->gpu, "cuMemPoolDestroy", t->gpu->driver->cuMemPoolDestroy(t->memory_pool));
    *t = (target){0};
    return failures;
}

bool target_release_stream(target *t, CUstream stream)
{
    return t->pool == NULL || vpmm_ok("vpmm_stream_release", vpmm_stream_release(t->pool, stream));
}

bool target_poll(target *t)
{
    return t->pool == NULL || vpmm_ok("vpmm_poll", vpmm_poll(t->pool));
}

bool target_audit(target *t)
{
    return t->pool == NULL || vpmm_ok("the audit", vpmm_check(t->pool));
}

bool target_stats(target *t, vpmm_stats *stats)
{
    memset(stats, 0, sizeof *stats);
    return t->pool == NULL || vpmm_ok("vpmm_stats_get", vpmm_stats_get(t->pool, stats));
}

static bool driver_pool_bytes(const target *t, CUmemPool_attribute attribute, uint64_t *bytes)
{
    cuuint64_t value = 0;
    bool ok = gpu_ok(t->gpu, "cuMemPoolGetAttribute",
                     t->gpu->driver->cuMemPoolGetAttribute(t->memory_pool, attribute, &value));
    *bytes = value;
    return ok;
}

bool target_held(target *t, target_level *level)
{
    vpmm_stats stats;
    *level = (target_level){0};
    if (t->pool == NULL)
        return driver_pool_bytes(t, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &level->mapped);
    bool ok = target_stats(t, &stats);
    *level = (target_level){
        .mapped = stats.mapped_bytes + stats.async_bytes, .slab = stats.slab_bytes, .slab_live = stats.slab_live_bytes};
    return ok;
}

bool target_peak_mapped(target *t, uint64_t *bytes)
{
    vpmm_stats stats;
    if (t->pool == NULL)
        return driver_pool_bytes(t, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, bytes);
    bool ok = target_stats(t, &stats);
    *bytes = stats.peak_mapped_bytes;
    return ok;
}

target_status target_malloc_failed(const target *t, vpmm_status status, CUresult result)
{
    if (status == VPMM_ERROR_OUT_OF_MEMORY || result == CUDA_ERROR_OUT_OF_MEMORY)
        return TARGET_REFUSED;
    vpmm_ok("vpmm_malloc", status);
    gpu_ok(t->gpu, "cuMemAllocFromPoolAsync", result);
    return TARGET_FAILED;
}

void target_tell_refused(const target *t)
{
    if (t->pool != NULL)
        vpmm_ok("vpmm_malloc", VPMM_ERROR_OUT_OF_MEMORY);
    else
        gpu_ok(t->gpu, "cuMemAllocFromPoolAsync", CUDA_ERROR_OUT_OF_MEMORY);
}

bool target_free_failed(const target *t, vpmm_status status, CUresult result)
{
    vpmm_ok("vpmm_free", status);
    gpu_ok(t->gpu, "cuMemFreeAsync", result);
    return false;
}
