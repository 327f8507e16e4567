/*
 * cost.c - what each call costs on an H200, in microseconds, measured with driver 580 by one thread. A price that
 * depends on the size is interpolated between the sizes that were measured; beyond the largest it goes on with the
 * last slope, below the smallest it stays. What was not measured costs 0.1.
 *
 * Contention is left out on purpose: a price is then a property of the calls made, the same in each run.
 */
#include "internal.h"

#define MIB (1024.0 * 1024.0)

struct point {
    double mib, us;
};

#define UNMEASURED 0.1
#define BY_SIZE    (-1.0) /* the entry charges for itself, when it knows the size */

static const double prices[SIM_ENTRIES] = {
    [SIM_cuMemAddressReserve] = 1.0, /* 8 GiB .. 64 TiB alike */
    [SIM_cuMemCreate] = BY_SIZE,
    [SIM_cuMemMap] = 0.45, /* one handle, any size */
    [SIM_cuMemSetAccess] = BY_SIZE,
    [SIM_cuMemUnmap] = BY_SIZE,
    [SIM_cuMemRelease] = BY_SIZE,
    [SIM_cuMemExportToShareableHandle] = 1009.0,
    [SIM_cuMemImportFromShareableHandle] = 42.0,
    [SIM_cuMemGetInfo] = 16.0,
    [SIM_cuMemAlloc] = BY_SIZE,
    [SIM_cuMemFree] = BY_SIZE,
    [SIM_cuMemAllocAsync] = 0.23, /* a pair that hits costs 0.46; growth comes on top */
    [SIM_cuMemAllocFromPoolAsync] = 0.23,
    [SIM_cuMemFreeAsync] = 0.23,
    [SIM_cuEventRecord] = 0.14,
    [SIM_cuEventQuery] = 1.26,
    [SIM_cuStreamWaitEvent] = 0.10,
    [SIM_cuEventCreate] = 0.095, /* with the destruction 0.19 */
    [SIM_cuEventDestroy] = 0.095,
    [SIM_cuStreamGetId] = 0.013,
    [SIM_cuStreamIsCapturing] = 0.014,
    [SIM_cuCtxGetCurrent] = 0.007,
    [SIM_cuThreadExchangeStreamCaptureMode] = 0.0065, /* two cost 0.013 */
    [SIM_cuCtxPushCurrent] = 0.012,                   /* with the pop 0.024 */
    [SIM_cuCtxPopCurrent] = 0.012,
};

static const struct point create_points[] = {{2, 5.7}, {32, 7.7}, {256, 12}, {1024, 29}, {8192, 114}, {0, 0}};
static const struct point access_points[] = {{2, 18}, {32, 21}, {128, 25}, {256, 31}, {1024, 51}, {0, 0}};
static const struct point unmap_points[] = {{2, 12.5}, {128, 14.7}, {256, 16.4}, {0, 0}};
static const struct point release_points[] = {{2, 7.2}, {32, 23}, {256, 79}, {0, 0}};
static const struct point plain_alloc_points[] = {{128, 56}, {1024, 100}, {0, 0}};
static const struct point plain_free_points[] = {{128, 65}, {1024, 275}, {0, 0}};

static double interpolate(const struct point *p, size_t bytes)
{
    double mib = (double)bytes / MIB;
    if (mib <= p->mib)
        return p->us;
    while (p[2].mib > 0 && mib > p[1].mib)
        p++;
    return p->us + (p[1].us - p->us) * (mib - p->mib) / (p[1].mib - p->mib);
}

double sim_price(enum sim_entry entry)
{
    double price = prices[entry];
    return price < 0 ? 0 : price > 0 ? price : UNMEASURED;
}

double sim_price_create(size_t bytes)
{
    return interpolate(create_points, bytes);
}

double sim_price_access(size_t bytes)
{
    return interpolate(access_points, bytes);
}

double sim_price_unmap(size_t bytes)
{
    return interpolate(unmap_points, bytes);
}

double sim_price_release(size_t bytes)
{
    return interpolate(release_points, bytes);
}

double sim_price_plain_alloc(size_t bytes)
{
    return interpolate(plain_alloc_points, bytes);
}

double sim_price_plain_free(size_t bytes)
{
    return interpolate(plain_free_points, bytes);
}

/* cuMemAllocAsync of fresh 64 MiB took 185. */
double sim_price_pool_growth(size_t bytes)
{
    return 185.0 * (double)bytes / (64 * MIB);
}

void sim_charge(vpmm_sim *sim, double microseconds)
{
    uint64_t ps = (uint64_t)(microseconds * 1e6 + 0.5);
    sim_thread(sim)->charged_ps += ps;
    atomic_fetch_add_explicit(&sim->charged_ps, ps, memory_order_relaxed);
}

double vpmm_sim_charged_us(vpmm_sim *sim)
{
    return (double)atomic_load(&sim->charged_ps) / 1e6;
}

double vpmm_sim_thread_charged_us(vpmm_sim *sim)
{
    const struct sim_thread *thread = sim_thread(sim);
    return thread ? (double)thread->charged_ps / 1e6 : 0;
}
