/*
 * Threads that build all at once, eight at a time on one pool without front caches, over a simulator in real time and
 * with the reaper at work; for ThreadSanitizer, and useful without it.
 *
 * Each allocates a few blocks of one to 48 pages, stamps them, frees them on its stream, which is another thread's too,
 * waits for it, and gives back to the device what is free: so there is always something to build.
 *
 *   VPMM_TEST_OPS   mallocs in all; 10,000
 *   VPMM_TEST_SEED  of the random numbers
 *
 * Exit status 0: no failure, no race, no lost stamp, the audit passes and nothing leaks; and threads have built.
 */
#include "world.h"

enum { THREADS = 8, STREAMS = 4, HELD = 6, MOST_PAGES = 48 };

struct block {
    CUdeviceptr pointer;
    size_t pages;
    uint32_t stamp;
};

static void take(struct block *b, CUstream stream)
{
    b->pages = 1 + draw(MOST_PAGES);
    b->pointer = 0;
    if (vpmm_malloc(world.pool, b->pages * PAGE, stream, &b->pointer) != VPMM_SUCCESS)
        failed("vpmm_malloc");
    else
        b->stamp = write_stamp(b->pointer, b->pages, stream);
}

static void give(struct block *b, CUstream stream)
{
    if (b->pointer == 0)
        return;
    expect_stamp(b->pointer, b->pages, b->stamp, stream);
    if (vpmm_free(world.pool, b->pointer, stream) != VPMM_SUCCESS)
        failed("vpmm_free");
    b->pointer = 0;
}

static void work(uint64_t index)
{
    struct block held[HELD];
    CUstream stream = world.stream[index % STREAMS];
    for (uint64_t i = 0; i < world.amount / THREADS / HELD; i++) {
        for (int k = 0; k < HELD; k++)
            take(&held[k], stream);
        for (int k = 0; k < HELD; k++)
            give(&held[k], stream);
        needs(world.driver->cuStreamSynchronize(stream) == CUDA_SUCCESS);
        needs(vpmm_trim(world.pool, 0, NULL) == VPMM_SUCCESS);
    }
}

static void configure(vpmm_sim_config *sim, vpmm_config *config)
{
    sim->memory_bytes = 2048 * PAGE;
    config->va_size = 4096 * PAGE;
    config->cache_bytes = 0;
}

static void look(const vpmm_stats *stats)
{
    printf("%llu of %llu mallocs built\n", (unsigned long long)stats->builds, (unsigned long long)stats->mallocs);
    needs(stats->builds > world.amount / 20);
}

const struct program program = {
    .variable = "VPMM_TEST_OPS",
    .amount = 10000,
    .threads = THREADS,
    .streams = STREAMS,
    .configure = configure,
    .work = work,
    .look = look,
};
