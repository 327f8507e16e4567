/*
 * The race detector proves itself: an allocator that is wrong on purpose is caught, the pool in its place is not.
 */
#include "support.h"

/* Hands the memory freed last to whoever asks next, on whatever stream: no wait, no fence. */
struct hasty {
    struct world *w;
    CUdeviceptr block, free;
    CUmemGenericAllocationHandle handle;
};

enum { BLOCK = 4 };

static void hasty_open(struct hasty *h, struct world *w)
{
    h->w = w;
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
    CUmemAccessDesc access = {.location = prop.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    cr_assert_eq(w->driver->cuMemAddressReserve(&h->block, BLOCK * PAGE, 0, 0, 0), CUDA_SUCCESS);
    cr_assert_eq(w->driver->cuMemCreate(&h->handle, BLOCK * PAGE, &prop, 0), CUDA_SUCCESS);
    cr_assert_eq(w->driver->cuMemMap(h->block, BLOCK * PAGE, 0, h->handle, 0), CUDA_SUCCESS);
    cr_assert_eq(w->driver->cuMemSetAccess(h->block, BLOCK * PAGE, &access, 1), CUDA_SUCCESS);
    h->free = h->block;
}

static void hasty_unmap(struct hasty *h)
{
    cr_assert_eq(h->w->driver->cuMemUnmap(h->block, BLOCK * PAGE), CUDA_SUCCESS);
    cr_assert_eq(h->w->driver->cuMemRelease(h->handle), CUDA_SUCCESS);
    cr_assert_eq(h->w->driver->cuMemAddressFree(h->block, BLOCK * PAGE), CUDA_SUCCESS);
}

static CUdeviceptr hasty_malloc(struct hasty *h)
{
    CUdeviceptr p = h->free;
    cr_assert_neq(p, 0);
    h->free = 0;
    return p;
}

static void hasty_free(struct hasty *h, CUdeviceptr p)
{
    h->free = p;
}

/* Ends the world of a test whose races are meant. */
static void close_with_races(struct world *w)
{
    world_step(w);
    while (w->streams > 0)
        world_stream_destroy(w, w->stream[w->streams - 1]);
    cr_assert_eq(w->driver->cuDevicePrimaryCtxRelease(w->device), CUDA_SUCCESS);
    cr_assert_eq(vpmm_sim_destroy(w->sim), 0);
}

enum order { FIRST_RUNS_FIRST, SECOND_RUNS_FIRST };

static uint64_t races_of_hasty(enum order order, bool ordered)
{
    struct world w;
    struct hasty h;
    world_open_without_pool(&w, NULL);
    hasty_open(&h, &w);
    CUstream a = world_stream(&w), b = world_stream(&w);
    CUdeviceptr p = hasty_malloc(&h);
    fill(&w, p, BLOCK, 1, a);
    hasty_free(&h, p);
    if (ordered)
        order_after(&w, b, a);
    CUdeviceptr q = hasty_malloc(&h);
    fill(&w, q, BLOCK, 2, b);
    if (order == SECOND_RUNS_FIRST)
        vpmm_sim_step(w.sim, b, SIZE_MAX);
    world_step(&w);
    uint64_t races = vpmm_sim_races(w.sim);
    cr_assert_eq(w.driver->cuCtxSynchronize(), CUDA_SUCCESS);
    hasty_unmap(&h);
    cr_expect_eq(vpmm_sim_races(w.sim), races, "an unmap after everything is no race");
    close_with_races(&w);
    return races;
}

Test(race_detector, reuse_without_a_wait_is_caught)
{
    cr_expect_gt(races_of_hasty(FIRST_RUNS_FIRST, false), 0);
}
Test(race_detector, reuse_without_a_wait_is_caught_whichever_runs_first)
{
    cr_expect_gt(races_of_hasty(SECOND_RUNS_FIRST, false), 0);
}
Test(race_detector, reuse_with_a_wait_is_not)
{
    cr_expect_eq(races_of_hasty(FIRST_RUNS_FIRST, true), 0);
    cr_expect_eq(races_of_hasty(SECOND_RUNS_FIRST, true), 0);
}

Test(race_detector, an_unmap_before_the_work_is_done_is_caught)
{
    struct world w;
    struct hasty h;
    world_open_without_pool(&w, NULL);
    hasty_open(&h, &w);
    CUstream a = world_stream(&w);
    fill(&w, hasty_malloc(&h), BLOCK, 1, a);
    world_step(&w); /* it ran, but no query or wait told the host so */
    hasty_unmap(&h);
    cr_expect_gt(vpmm_sim_races(w.sim), 0);
    close_with_races(&w);
}

Test(race_detector, a_race_through_a_second_address_is_caught)
{
    struct world w;
    struct hasty h;
    world_open_without_pool(&w, NULL);
    hasty_open(&h, &w);
    CUdeviceptr second = 0;
    CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0},
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    cr_assert_eq(w.driver->cuMemAddressReserve(&second, BLOCK * PAGE, 0, 0, 0), CUDA_SUCCESS);
    cr_assert_eq(w.driver->cuMemMap(second, BLOCK * PAGE, 0, h.handle, 0), CUDA_SUCCESS);
    cr_assert_eq(w.driver->cuMemSetAccess(second, BLOCK * PAGE, &access, 1), CUDA_SUCCESS);
    CUstream a = world_stream(&w), b = world_stream(&w);
    fill(&w, hasty_malloc(&h), BLOCK, 1, a);
    fill(&w, second, BLOCK, 2, b);
    world_step(&w);
    cr_expect_gt(vpmm_sim_races(w.sim), 0);
    cr_assert_eq(w.driver->cuCtxSynchronize(), CUDA_SUCCESS);
    cr_assert_eq(w.driver->cuMemUnmap(second, BLOCK * PAGE), CUDA_SUCCESS);
    cr_assert_eq(w.driver->cuMemAddressFree(second, BLOCK * PAGE), CUDA_SUCCESS);
    hasty_unmap(&h);
    close_with_races(&w);
}

Test(race_detector, two_readers_are_no_race)
{
    struct world w;
    struct hasty h;
    world_open_without_pool(&w, NULL);
    hasty_open(&h, &w);
    CUstream a = world_stream(&w), b = world_stream(&w);
    fill(&w, h.block, BLOCK, 1, a);
    order_after(&w, b, a);
    expect_later(&w, h.block, BLOCK, 1, a);
    expect_later(&w, h.block, BLOCK, 1, b);
    world_step(&w);
    cr_expect_eq(vpmm_sim_races(w.sim), 0);
    cr_assert_eq(w.driver->cuCtxSynchronize(), CUDA_SUCCESS);
    hasty_unmap(&h);
    world_close(&w);
}

/* The same story with the pool as the allocator. */
static void pool_in_its_place(vpmm_reuse reuse, enum order order)
{
    struct setup setup = setup_default();
    setup.pool.reuse = reuse;
    setup.pool.max_mapped = BLOCK * PAGE;
    struct world w;
    world_open(&w, &setup);
    CUstream a = world_stream(&w), b = world_stream(&w);
    CUdeviceptr p = take(&w, BLOCK, a);
    fill(&w, p, BLOCK, 1, a);
    give(&w, p, a);
    CUdeviceptr q = take(&w, BLOCK, b);
    cr_expect_eq(q, p);
    fill(&w, q, BLOCK, 2, b);
    if (order == SECOND_RUNS_FIRST)
        vpmm_sim_step(w.sim, b, SIZE_MAX);
    world_step(&w);
    cr_expect_eq(vpmm_sim_races(w.sim), 0);
    give(&w, q, b);
    world_close(&w);
}

Test(race_detector, the_pool_waits_on_the_device)
{
    pool_in_its_place(VPMM_REUSE_WAIT_DEVICE, FIRST_RUNS_FIRST);
    pool_in_its_place(VPMM_REUSE_WAIT_DEVICE, SECOND_RUNS_FIRST);
}
Test(race_detector, the_pool_waits_on_the_host)
{
    pool_in_its_place(VPMM_REUSE_WAIT_HOST, FIRST_RUNS_FIRST);
    pool_in_its_place(VPMM_REUSE_WAIT_HOST, SECOND_RUNS_FIRST);
}
Test(race_detector, the_pool_waits_at_the_last)
{
    pool_in_its_place(VPMM_REUSE_COMPLETED, FIRST_RUNS_FIRST);
    pool_in_its_place(VPMM_REUSE_COMPLETED, SECOND_RUNS_FIRST);
}
