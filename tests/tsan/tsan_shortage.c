/*
 * Threads that take together all that the cap allows, eight at a time on one pool, over a simulator in real time whose
 * work takes a while, and with a driver that is busy for others now and then; for ThreadSanitizer, and useful without
 * it.
 *
 * Each takes blocks of one to twelve pages, as long as all that is live or asked for is within the cap, and frees them
 * behind work, on its stream, which is another thread's too. Each page has a handle of its own, so that nothing is
 * stuck beside what is live: none of these requests may fail. The main thread trims and polls meanwhile, and changes
 * the cap while no more is used.
 *
 *   VPMM_TEST_OPS    mallocs in all; 4,000
 *   VPMM_TEST_SEED   of the random numbers
 *   VPMM_TEST_REUSE  device, completed or host: the pool's setting; completed
 *
 * Exit status 0: no malloc has failed, no race, no lost stamp, the audit passes and nothing leaks; and, where the
 * setting is not another, some were about to fail.
 */
#include "world.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { THREADS = 8, STREAMS = 4, HELD = 6, MOST_PAGES = 12, CAP = 96, LOW_CAP = 64, STALLS = 500 };

struct block {
    CUdeviceptr pointer;
    size_t pages;
    uint32_t stamp;
};

static pthread_mutex_t reserving = PTHREAD_MUTEX_INITIALIZER;
static atomic_size_t used;  /* pages that are live, or asked for; it grows under that lock */
static size_t cap = CAP;    /* how many may be; under it, too */
static atomic_uint working; /* threads that have not ended */

/* ---- a driver that is busy ---- */

static const vpmm_driver *simulated;
static pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER;
static atomic_uint calls;

/* One thread at a time changes mappings, and each STALLS-th call takes longer than anybody waits for who makes none. */
static void begin_call(void)
{
    pthread_mutex_lock(&busy);
    if (atomic_fetch_add(&calls, 1) % STALLS == STALLS - 1)
        sleep_us(30000);
}

static CUresult end_call(CUresult result)
{
    pthread_mutex_unlock(&busy);
    return result;
}

static CUresult CUDAAPI create(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop,
                               unsigned long long flags)
{
    begin_call();
    return end_call(simulated->cuMemCreate(handle, bytes, prop, flags));
}

static CUresult CUDAAPI map(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                            unsigned long long flags)
{
    begin_call();
    return end_call(simulated->cuMemMap(at, bytes, offset, handle, flags));
}

static CUresult CUDAAPI unmap(CUdeviceptr at, size_t bytes)
{
    begin_call();
    return end_call(simulated->cuMemUnmap(at, bytes));
}

static const vpmm_driver *drive(const vpmm_driver *of)
{
    static vpmm_driver driver;
    simulated = of;
    driver = *of;
    driver.cuMemCreate = create;
    driver.cuMemMap = map;
    driver.cuMemUnmap = unmap;
    return &driver;
}

/* ---- blocks ---- */

static bool reserve(size_t pages)
{
    pthread_mutex_lock(&reserving);
    bool is_left = atomic_load(&used) + pages <= cap;
    if (is_left)
        atomic_fetch_add(&used, pages);
    pthread_mutex_unlock(&reserving);
    return is_left;
}

static void be_slow(void *us)
{
    sleep_us((long)(uintptr_t)us);
}

/* Of so many pages as are reserved for it. */
static void take(struct block *b, CUstream stream)
{
    if (vpmm_malloc(world.pool, b->pages * PAGE, stream, &b->pointer) == VPMM_SUCCESS) {
        b->stamp = write_stamp(b->pointer, b->pages, stream);
        return;
    }
    failed("vpmm_malloc");
    b->pointer = 0;
    atomic_fetch_sub(&used, b->pages);
}

static void give(struct block *b, CUstream stream)
{
    enum { SLOW_ONES = 8, MOST_US = 3000 };
    if (b->pointer == 0)
        return;
    expect_stamp(b->pointer, b->pages, b->stamp, stream);
    if (draw(SLOW_ONES) == 0)
        needs(world.driver->cuLaunchHostFunc(stream, be_slow, (void *)(uintptr_t)draw(MOST_US)) == CUDA_SUCCESS);
    needs(vpmm_free(world.pool, b->pointer, stream) == VPMM_SUCCESS);
    atomic_fetch_sub(&used, b->pages);
    b->pointer = 0;
}

static void work(uint64_t index)
{
    struct block held[HELD] = {{0}};
    CUstream stream = world.stream[index % STREAMS];
    for (uint64_t i = 0; i < world.amount / THREADS; i++) {
        struct block *b = &held[draw(HELD)];
        give(b, stream);
        for (b->pages = 1 + draw(MOST_PAGES); !reserve(b->pages);)
            give(&held[draw(HELD)], stream);
        take(b, stream);
    }
    for (int k = 0; k < HELD; k++)
        give(&held[k], stream);
    atomic_fetch_sub(&working, 1);
}

/* ---- beside them ---- */

/* Unless more is used. */
static void set_cap(size_t pages)
{
    pthread_mutex_lock(&reserving);
    if (atomic_load(&used) <= pages) {
        cap = pages;
        needs(vpmm_pool_set_attribute(world.pool, VPMM_ATTRIBUTE_MAX_MAPPED, pages * PAGE) == VPMM_SUCCESS);
    }
    pthread_mutex_unlock(&reserving);
}

static void meanwhile(void)
{
    enum { PAUSE_US = 2000 };
    while (atomic_load(&working)) {
        sleep_us(PAUSE_US);
        set_cap(draw(2) ? CAP : LOW_CAP);
        needs(vpmm_trim(world.pool, draw(CAP) * PAGE, NULL) == VPMM_SUCCESS);
        needs(vpmm_poll(world.pool) == VPMM_SUCCESS);
    }
}

static void configure(vpmm_sim_config *sim, vpmm_config *config)
{
    const char *reuse = getenv("VPMM_TEST_REUSE");
    sim->memory_bytes = 2048 * PAGE;
    config->va_size = 4096 * PAGE;
    config->cache_bytes = 16 * PAGE;
    config->max_mapped = CAP * PAGE;
    config->extent_size = PAGE;
    config->captures = true; /* what a stream has freed last waits for a mark */
    config->reuse = VPMM_REUSE_COMPLETED;
    if (reuse && !strcmp(reuse, "device"))
        config->reuse = VPMM_REUSE_WAIT_DEVICE;
    if (reuse && !strcmp(reuse, "host"))
        config->reuse = VPMM_REUSE_WAIT_HOST;
    atomic_store(&working, THREADS);
}

static void look(const vpmm_stats *stats)
{
    printf("%llu of %llu mallocs built, %llu were about to fail\n", (unsigned long long)stats->builds,
           (unsigned long long)stats->mallocs, (unsigned long long)stats->reclaims);
    needs(stats->reclaims > 0 || getenv("VPMM_TEST_REUSE"));
}

const struct program program = {
    .variable = "VPMM_TEST_OPS",
    .amount = 4000,
    .threads = THREADS,
    .streams = STREAMS,
    .configure = configure,
    .drive = drive,
    .work = work,
    .meanwhile = meanwhile,
    .look = look,
};
