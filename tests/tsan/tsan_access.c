/*
 * Threads whose requests move memory, each on its own stream, beside one that gives another device access to the pool
 * and takes it away, trims and polls; for ThreadSanitizer, and useful without it.
 *
 *   VPMM_TEST_OPS   mallocs in all; 8,000
 *   VPMM_TEST_SEED  of the random numbers
 *
 * Exit status 0: no failure, no race, no lost stamp, the audit passes, nothing leaks.
 */
#include "world.h"

#include "base/atomic.h"

enum { THREADS = 3, HELD = 6, LONGEST = 6, PEER = 1 };

static _Atomic(uint32_t) working;

struct block {
    CUdeviceptr at;
    size_t pages;
    uint32_t stamp;
};

static void replace(struct block *block, CUstream stream)
{
    if (block->at != 0) {
        expect_stamp(block->at, block->pages, block->stamp, stream);
        needs(vpmm_free(world.pool, block->at, stream) == VPMM_SUCCESS);
    }
    block->at = 0;
    block->pages = 1 + draw(LONGEST);
    if (vpmm_malloc(world.pool, block->pages * PAGE, stream, &block->at) != VPMM_SUCCESS)
        failed("vpmm_malloc");
    else
        block->stamp = write_stamp(block->at, block->pages, stream);
}

static void work(uint64_t index)
{
    struct block held[HELD] = {{0}};
    for (uint64_t done = 0; done < world.amount / THREADS; done++)
        replace(&held[draw(HELD)], world.stream[index]);
    for (int i = 0; i < HELD; i++)
        needs(vpmm_free(world.pool, held[i].at, world.stream[index]) == VPMM_SUCCESS);
    fetch_sub_relaxed_u32(&working, 1);
}

/* No caches, and handles of a page: what is free in one shape moves to serve another. */
static void configure(vpmm_sim_config *sim, vpmm_config *config)
{
    sim->memory_bytes = 1024 * PAGE;
    sim->devices = 2;
    config->va_size = 4096 * PAGE;
    config->extent_size = PAGE;
    config->cache_bytes = 0;
}

static void begin(void)
{
    store_relaxed_u32(&working, THREADS);
}

static void meanwhile(void)
{
    static const CUmemAccess_flags flags[] = {CU_MEM_ACCESS_FLAGS_PROT_NONE, CU_MEM_ACCESS_FLAGS_PROT_READ,
                                              CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    while (load_relaxed_u32(&working)) {
        needs(vpmm_pool_set_access(world.pool, PEER, flags[draw(3)]) == VPMM_SUCCESS);
        if (draw(8) == 0)
            needs(vpmm_trim(world.pool, 0, NULL) == VPMM_SUCCESS);
        needs(vpmm_poll(world.pool) == VPMM_SUCCESS);
    }
}

const struct program program = {
    .variable = "VPMM_TEST_OPS",
    .amount = 8000,
    .threads = THREADS,
    .streams = THREADS,
    .configure = configure,
    .begin = begin,
    .work = work,
    .meanwhile = meanwhile,
};
