/*
 * Threads whose slabs are cut from one page after another, beside trims that give its rest up (lib/remap/slab_page.h);
 * for ThreadSanitizer, and useful without it.
 *
 * Each allocates slices on its own stream, of which two make a slab, stamps them, and frees them all: again and again.
 * They begin each round together: the first slabs find whole pages. Threads that are at different points of a round
 * leave each other room in cut pages, and then a run may pass without a rest.
 *
 *   VPMM_TEST_OPS   mallocs in all; 20,000
 *   VPMM_TEST_SEED  of the random numbers
 *
 * Exit status 0: no failure, no race, no lost stamp, the audit passes, nothing leaks, and the rest has changed.
 */
#include "world.h"

#include "pool/pool.h"

#include <pthread.h>

enum { THREADS = 4, EACH = 250, FREE_PAGES = 256 };

static _Atomic(uint32_t) working, changes;
static pthread_barrier_t all_free;

static uint64_t rest(void)
{
    return load_relaxed_u64(&world.pool->arena.slab_page);
}

static CUdeviceptr take_slice(uint64_t index, uint32_t *stamp)
{
    const size_t KIB = 1024;
    CUdeviceptr slice = 0;
    uint64_t before = rest();
    if (vpmm_malloc(world.pool, 40 * KIB + draw(24 * KIB), world.stream[index], &slice) != VPMM_SUCCESS)
        failed("vpmm_malloc");
    else
        *stamp = write_stamp(slice, 1, world.stream[index]);
    fetch_add_relaxed_u32(&changes, rest() != before);
    return slice;
}

static void work(uint64_t index)
{
    CUdeviceptr slice[EACH];
    uint32_t stamp[EACH];
    for (uint64_t done = 0; done < world.amount / THREADS; done += EACH) {
        for (int i = 0; i < EACH; i++)
            slice[i] = take_slice(index, &stamp[i]);
        for (int i = 0; i < EACH; i++) {
            expect_stamp(slice[i], 1, stamp[i], world.stream[index]);
            if (slice[i] && vpmm_free(world.pool, slice[i], world.stream[index]) != VPMM_SUCCESS)
                failed("vpmm_free");
        }
        pthread_barrier_wait(&all_free);
    }
    fetch_sub_relaxed_u32(&working, 1);
}

static void configure(vpmm_sim_config *sim, vpmm_config *config)
{
    sim->memory_bytes = 1024 * PAGE;
    config->va_size = 4096 * PAGE;
    config->cache_bytes = 0;
}

/* Free pages, one of which the first slab begins. */
static void begin(void)
{
    CUdeviceptr pages;
    world.pool->arena.slab_pages_from = 0;
    store_relaxed_u32(&working, THREADS);
    needs(pthread_barrier_init(&all_free, NULL, THREADS) == 0);
    needs(vpmm_malloc(world.pool, FREE_PAGES * PAGE, world.stream[0], &pages) == VPMM_SUCCESS);
    needs(vpmm_free(world.pool, pages, world.stream[0]) == VPMM_SUCCESS);
}

static void meanwhile(void)
{
    while (load_relaxed_u32(&working))
        needs(vpmm_trim(world.pool, FREE_PAGES * PAGE, NULL) == VPMM_SUCCESS);
}

static void finish(void)
{
    needs(pthread_barrier_destroy(&all_free) == 0);
    needs(load_relaxed_u32(&changes) > 0);
}

const struct program program = {
    .variable = "VPMM_TEST_OPS",
    .amount = 20000,
    .threads = THREADS,
    .streams = THREADS,
    .configure = configure,
    .begin = begin,
    .work = work,
    .meanwhile = meanwhile,
    .finish = finish,
};
