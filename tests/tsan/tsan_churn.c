/*
 * Threads and streams that come and go, four at a time on one pool, over a simulator in real time and with the reaper
 * at work; for ThreadSanitizer, and useful without it.
 *
 * Each thread makes a stream, allocates and frees on it, on the legacy stream and, some of them, on their per-thread
 * stream, leaves some blocks to threads that come after it, releases and destroys its stream, with work still queued,
 * and ends.
 *
 *   VPMM_TEST_OPS   mallocs and frees in all; 100,000
 *   VPMM_TEST_SEED  of the random numbers
 *
 * Exit status 0: no failure, no race, no lost stamp, the audit passes and nothing leaks.
 */
#include "world.h"

enum { AT_ONCE = 4, OPERATIONS_A_THREAD = 200, SLOTS = 32, HELD = 6 };

/* The event stands for the end of the block's use on a stream that may be gone. */
struct legacy {
    CUdeviceptr pointer;
    size_t pages;
    uint32_t stamp;
    CUevent used;
};

static _Atomic(struct legacy *) slots[SLOTS];

struct held {
    CUdeviceptr pointer;
    size_t pages;
    uint32_t stamp;
    CUstream stream;
};

static void take(struct held *h, CUstream stream)
{
    size_t pages = 1 + draw(6);
    CUdeviceptr pointer = 0;
    if (vpmm_malloc(world.pool, pages * PAGE, stream, &pointer) != VPMM_SUCCESS) {
        failed("vpmm_malloc");
        return;
    }
    *h = (struct held){pointer, pages, write_stamp(pointer, pages, stream), stream};
}

static void give(struct held *h)
{
    expect_stamp(h->pointer, h->pages, h->stamp, h->stream);
    needs(vpmm_free(world.pool, h->pointer, h->stream) == VPMM_SUCCESS);
    h->pointer = 0;
}

static void inherit(struct legacy *l, CUstream stream)
{
    needs(world.driver->cuStreamWaitEvent(stream, l->used, 0) == CUDA_SUCCESS);
    needs(world.driver->cuEventDestroy(l->used) == CUDA_SUCCESS);
    struct held h = {l->pointer, l->pages, l->stamp, stream};
    give(&h);
    free(l);
}

static void leave(struct held *h, CUstream stream)
{
    struct legacy *l = malloc(sizeof *l);
    if (l == NULL) {
        give(h);
        return;
    }
    *l = (struct legacy){.pointer = h->pointer, .pages = h->pages, .stamp = h->stamp};
    needs(world.driver->cuEventCreate(&l->used, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS);
    needs(world.driver->cuEventRecord(l->used, h->stream) == CUDA_SUCCESS);
    h->pointer = 0;
    struct legacy *earlier = atomic_exchange(&slots[draw(SLOTS)], l);
    if (earlier != NULL)
        inherit(earlier, stream);
}

static void live_and_die(uint64_t index)
{
    CUstream own = NULL;
    needs(world.driver->cuStreamCreate(&own, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
    bool uses_its_default = index % 8 == 0;
    const CUstream streams[4] = {own, own, uses_its_default ? CU_STREAM_PER_THREAD : own, NULL};
    struct held held[HELD] = {{0}};
    for (int i = 0; i < OPERATIONS_A_THREAD; i++) {
        struct held *h = &held[draw(HELD)];
        if (h->pointer == 0)
            take(h, streams[draw(4)]);
        else if (draw(8) == 0)
            leave(h, own);
        else
            give(h);
    }
    for (int i = 0; i < HELD; i++)
        if (held[i].pointer != 0)
            give(&held[i]);
    needs(vpmm_stream_release(world.pool, own) == VPMM_SUCCESS);
    needs(world.driver->cuStreamDestroy(own) == CUDA_SUCCESS);
}

static void configure(vpmm_sim_config *sim, vpmm_config *config)
{
    sim->memory_bytes = 1024 * PAGE;
    config->va_size = 2048 * PAGE;
    config->small = VPMM_SMALL_ASYNC;
    config->cache_bytes = 0;
}

static void finish(void)
{
    for (int i = 0; i < SLOTS; i++) {
        struct legacy *l = atomic_load(&slots[i]);
        if (l != NULL)
            inherit(l, NULL);
    }
}

static void look(const vpmm_stats *stats)
{
    needs(stats->live_bytes == 0);
}

const struct program program = {
    .variable = "VPMM_TEST_OPS",
    .amount = 100000,
    .threads = AT_ONCE,
    .life = OPERATIONS_A_THREAD,
    .configure = configure,
    .work = live_and_die,
    .finish = finish,
    .look = look,
};
