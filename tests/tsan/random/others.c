/*
 * others.c - what is done to pools rather than to blocks, and threads with streams of their own.
 */
#include "random.h"

#include <stdio.h>

#include <vpmm/observe.h>

void operation_trim(struct worker *worker)
{
    size_t released;
    vpmm_must(vpmm_trim(current.pool, draw(worker, 64) * PAGE, &released));
    count(COUNT_trims);
}

void operation_poll(struct worker *worker)
{
    if (one_in(worker, 2))
        vpmm_must(vpmm_poll(current.pool));
    else
        vpmm_must(vpmm_poll(current.pool));
    count(COUNT_polls);
}

/* ---- looking ---- */

static void add_bytes(void *sum, const vpmm_range *range)
{
    *(uint64_t *)sum += range->bytes;
}

static void look_at_all(void)
{
    uint64_t mapped = 0;
    vpmm_stats stats;
    vpmm_call_counts calls[VPMM_DRIVER_CALLS];
    vpmm_latency latency;
    vpmm_health health;
    vpmm_device device;
    vpmm_must(vpmm_stats_get(current.pool, &stats));
    vpmm_must(vpmm_calls_get(current.pool, calls));
    vpmm_must(vpmm_latency_get(current.pool, &latency));
    vpmm_must(vpmm_device_get(current.pool, &device));
    vpmm_must(vpmm_health_get(current.pool, &health));
    vpmm_must(vpmm_ranges_visit(current.pool, add_bytes, &mapped));
    needs(!health.lost);
}

static void dump_to_nowhere(void)
{
    FILE *nowhere = fopen("/dev/null", "w");
    if (!nowhere)
        return;
    vpmm_must(vpmm_dump(current.pool, nowhere));
    fclose(nowhere);
}

/* Whoever captures on a lane has it alone: on this one nobody does. */
static void look_for_captures(const struct lane *lane)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    cuda_must(current.driver->cuStreamIsCapturing(lane->stream, &status));
    if (status != CU_STREAM_CAPTURE_STATUS_NONE)
        failed("a stream on which nobody captures reports capture status %d", (int)status);
}

void operation_look(struct worker *worker)
{
    struct lane *lane = lane_share_any(worker);
    if (lane) {
        look_for_captures(lane);
        lane_leave(lane);
    }
    look_at_all();
    if (one_in(worker, 4))
        dump_to_nowhere();
    count(COUNT_looks);
}

/* ---- shortage ---- */

static void exhaust(struct worker *worker, CUstream stream)
{
    enum { MOST = 100, LONGEST = 12 };
    CUdeviceptr p[MOST];
    size_t n = 0;
    while (n < MOST && take((1 + draw(worker, LONGEST)) * PAGE, stream, &p[n]))
        n++;
    while (n > 0)
        give(p[--n], stream);
}

void operation_exhaust(struct worker *worker)
{
    struct lane *lane = lane_share_any(worker);
    if (!lane)
        return;
    exhaust(worker, lane->stream);
    lane_leave(lane);
    count(COUNT_exhaustions);
}

/* ---- a second pool ---- */

/* The first pool may have the whole device. */
bool take_from(vpmm_pool *pool, size_t bytes, CUstream stream, CUdeviceptr *out)
{
    vpmm_status status = vpmm_malloc(pool, bytes, stream, out);
    if (status != VPMM_ERROR_OUT_OF_MEMORY)
        needs_success(status, "vpmm_malloc from the second pool");
    return status == VPMM_SUCCESS;
}

static void use_pool(struct worker *worker, vpmm_pool *pool, CUstream stream)
{
    enum { BLOCKS = 4 };
    CUdeviceptr p[BLOCKS];
    int n = 0;
    while (n < BLOCKS && take_from(pool, one_in(worker, 2) ? PAGE : 1000, stream, &p[n]))
        n++;
    if (n > 0)
        needs(relaxed(payload_write(current.driver, p[0], 1, 1, stream)));
    while (n > 0)
        vpmm_must(vpmm_free(pool, p[--n], stream));
}

/*
 * BUSY: what lies in caches of stream 0 has no end but a wait for the device, and the first pool has left no byte of
 * the device to wait by. It makes room, as a program would.
 */
void pool_end_second(struct worker *worker, vpmm_pool *pool)
{
    enum { TRIES = 5000 }; /* others fill the device again and again: on a loaded machine a second */
    vpmm_status status = vpmm_pool_destroy(pool);
    for (int i = 0; status == VPMM_ERROR_BUSY && i < TRIES; i++) {
        vpmm_must(vpmm_trim(current.pool, 0, NULL));
        linger(worker, 300);
        status = vpmm_pool_destroy(pool);
    }
    needs_success(status, "vpmm_pool_destroy of the second pool");
}

/* The lane is kept until the pool is gone, so no stream of it ends before. */
void operation_pool(struct worker *worker)
{
    enum { PAGES = 8 };
    vpmm_config config = current.config;
    vpmm_pool *pool = NULL;
    struct lane *lane = lane_share_any(worker);
    if (!lane)
        return;
    config.max_mapped = PAGES * PAGE;
    config.reaper = one_in(worker, 2);
    vpmm_must(vpmm_pool_create(&config, &pool));
    if (pool)
        use_pool(worker, pool, lane->stream);
    linger(worker, 300);
    pool_end_second(worker, pool);
    lane_leave(lane);
    count(COUNT_pools);
}

/* ---- a thread ---- */

enum { LIFE_BLOCKS = 160, LIFE_LEAST = 101 }; /* more than the fences that a record of the pool can have outstanding */

struct life {
    struct worker worker;
    atomic_uint *over;
};

static size_t life_bytes(struct worker *worker)
{
    return one_in(worker, 8) ? PAGE : 256 + draw(worker, 60000);
}

static void *live(void *argument)
{
    struct life *life = argument;
    struct worker *worker = &life->worker;
    CUdeviceptr p[LIFE_BLOCKS];
    size_t n = 0, wanted = LIFE_LEAST + draw(worker, LIFE_BLOCKS - LIFE_LEAST);
    bool one_by_one = one_in(worker, 2); /* under any cap, and where pieces are the driver's */
    cuda_must(current.driver->cuCtxSetCurrent(current.context));
    jitter_join();
    stream_hold_until(CU_STREAM_PER_THREAD, life->over);
    for (size_t i = 0; i < wanted && one_by_one && take(PAGE, CU_STREAM_PER_THREAD, &p[0]); i++)
        give(p[0], CU_STREAM_PER_THREAD);
    while (n < wanted && take(life_bytes(worker), CU_STREAM_PER_THREAD, &p[n]))
        n++;
    if (n > 0)
        needs(relaxed(payload_write(current.driver, p[0], 1, 1, CU_STREAM_PER_THREAD)));
    while (n > 0)
        give(p[--n], CU_STREAM_PER_THREAD);
    jitter_leave();
    return NULL;
}

/* Its work goes on when it is dead. */
void operation_life(struct worker *worker)
{
    struct life life = {.worker = {.random = random_from(draw(worker, UINT32_MAX))}, .over = &worker->life_over};
    atomic_store(life.over, 0);
    if (pthread_create(&life.worker.thread, NULL, live, &life) != 0) {
        failed("no thread");
        return;
    }
    pthread_join(life.worker.thread, NULL);
    linger(worker, 500);
    atomic_store(life.over, 1);
    count(COUNT_lives);
}
