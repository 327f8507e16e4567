#include "plugin.h"

#include <vpmm/observe.h>
#include <vpmm/sim.h>
#include <vpmm/vpmm.h>

enum { STREAMS = 4, ROUNDS = 50, PIECE = 1000 };

static const size_t PAGE_BYTES = (size_t)2 << 20;

static struct {
    vpmm_sim *sim;
    const vpmm_driver *cu;
    vpmm_pool *pool;
    CUcontext context;
    CUstream stream[STREAMS];
} own;

static bool make_pool(void)
{
    vpmm_config config = vpmm_config_default();
    config.driver = own.cu;
    config.page_size = PAGE_BYTES;
    config.va_size = (size_t)8 << 30;
    return vpmm_pool_create(&config, &own.pool) == VPMM_SUCCESS;
}

static bool open_pool(void)
{
    own.sim = vpmm_sim_create(NULL);
    if (!own.sim)
        return false;
    own.cu = vpmm_sim_driver(own.sim);
    bool good = make_pool() && own.cu->cuDevicePrimaryCtxRetain(&own.context, 0) == CUDA_SUCCESS &&
                own.cu->cuCtxSetCurrent(own.context) == CUDA_SUCCESS;
    for (int i = 0; i < STREAMS && good; i++)
        good = own.cu->cuStreamCreate(&own.stream[i], CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS;
    return good;
}

static bool use(size_t bytes, CUstream stream)
{
    CUdeviceptr p;
    return vpmm_malloc(own.pool, bytes, stream, &p) == VPMM_SUCCESS &&
           own.cu->cuMemsetD8Async(p, 1, bytes, stream) == CUDA_SUCCESS &&
           vpmm_free(own.pool, p, stream) == VPMM_SUCCESS;
}

static bool work(unsigned number)
{
    CUstream stream = own.stream[number % STREAMS];
    bool good = own.cu->cuCtxSetCurrent(own.context) == CUDA_SUCCESS;
    for (int i = 0; i < ROUNDS && good; i++)
        good = use(PAGE_BYTES, stream) && use(PIECE, stream);
    return good && use(PAGE_BYTES, CU_STREAM_PER_THREAD) && use(PIECE, CU_STREAM_PER_THREAD);
}

static bool refuse(uint64_t address)
{
    return vpmm_free(own.pool, (CUdeviceptr)address, own.stream[0]) == VPMM_ERROR_INVALID_POINTER;
}

static bool front_caches_were_used(void)
{
    vpmm_stats stats;
    return vpmm_stats_get(own.pool, &stats) == VPMM_SUCCESS && stats.hits_cache > 0;
}

static void *pool(void)
{
    return own.pool;
}

static bool close_pool(void)
{
    bool good = vpmm_pool_destroy(own.pool) == VPMM_SUCCESS;
    for (int i = 0; i < STREAMS; i++)
        good &= own.cu->cuStreamDestroy(own.stream[i]) == CUDA_SUCCESS;
    good &= own.cu->cuDevicePrimaryCtxRelease(0) == CUDA_SUCCESS;
    good &= vpmm_sim_races(own.sim) == 0 && vpmm_sim_misuses(own.sim) == 0;
    return vpmm_sim_destroy(own.sim) == 0 && good;
}

__attribute__((visibility("default"))) const struct plugin plugin = {
    .open = open_pool,
    .work = work,
    .refuse = refuse,
    .words = vpmm_last_error,
    .front_caches_were_used = front_caches_were_used,
    .pool = pool,
    .close = close_pool,
};
