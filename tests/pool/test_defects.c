/*
 * What an earlier allocator of this design got wrong, one test an item: each fails on that defect.
 */
#include "support.h"

#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>

/* --- correctness ---------------------------------------------------------------------------------------------------
 */

Test(defects, defect_01_growth_returns_unused_hole_tail)
{
    struct setup setup = setup_default();
    setup.pool.va_size = 64 * PAGE;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    uint64_t reserved = 0;
    for (size_t round = 0; round < 200; round++) { /* a free region, growth that joins it, and back to nothing */
        size_t first = 1 + round % 7;
        give(&w, take(&w, first, s), s);
        CUdeviceptr longer = take(&w, first + 1 + round % 9, s);
        world_audit(&w);
        give(&w, longer, s);
        world_drain(&w);
        must_work(vpmm_trim(w.pool, 0, NULL));
        world_audit(&w);
        if (round == 0)
            reserved = stats_of(&w).reserved_bytes;
    }
    cr_expect_eq(stats_of(&w).reserved_bytes, reserved, "address space leaks");
    world_close(&w);
}

static void growth_is_undone(const char *call)
{
    needs_simulator();
    struct world w;
    world_open(&w, NULL);
    CUstream s = world_stream(&w);
    CUdeviceptr kept = take(&w, 3, s);
    fill(&w, kept, 3, 3, s);
    vpmm_stats before = stats_of(&w);
    size_t used = vpmm_sim_used_bytes(w.sim);
    vpmm_sim_fail(w.sim, call, 1, CUDA_ERROR_INVALID_VALUE, true);
    CUdeviceptr pointer = 0xdead;
    must_fail(VPMM_ERROR_DRIVER, vpmm_malloc(w.pool, 20 * PAGE, s, &pointer));
    cr_expect(strstr(vpmm_last_error(), call) != NULL, "the message does not name %s: %s", call, vpmm_last_error());
    cr_expect_eq(pointer, 0xdead, "the output is written on failure");
    world_audit(&w);
    vpmm_stats after = stats_of(&w);
    cr_expect_eq(after.mapped_bytes, before.mapped_bytes);
    cr_expect_eq(after.hole_bytes, before.hole_bytes);
    cr_expect_eq(after.live_bytes, before.live_bytes);
    cr_expect_eq(after.pending_unmap_bytes, 0);
    cr_expect_eq(vpmm_sim_used_bytes(w.sim), used, "physical memory belongs to no one");
    vpmm_sim_fail(w.sim, call, 0, CUDA_SUCCESS, false);
    CUdeviceptr again = take(&w, 20, s);
    fill(&w, again, 20, 20, s);
    expect_later(&w, kept, 3, 3, s);
    give(&w, again, s);
    give(&w, kept, s);
    world_close(&w);
}

Test(defects, defect_02_failed_create_is_undone)
{
    growth_is_undone("cuMemCreate");
}
Test(defects, defect_02_failed_map_is_undone)
{
    growth_is_undone("cuMemMap");
}
Test(defects, defect_02_failed_set_access_is_undone)
{
    growth_is_undone("cuMemSetAccess");
}

struct waiting {
    CUstream busy;
    CUdeviceptr wall, end; /* live, one page each */
};

/* Two scattered regions of four pages freed on `busy`, whose work waits; the pool may not grow. */
static struct waiting two_waiting_regions(struct world *w)
{
    struct setup setup = setup_default();
    setup.pool.max_mapped = 10 * PAGE;
    setup.pool.extent_size = PAGE;
    world_open(w, &setup);
    CUstream s = world_stream(w);
    CUdeviceptr a = take(w, 4, s), wall = take(w, 1, s), b = take(w, 4, s), end = take(w, 1, s);
    fill(w, a, 4, 1, s);
    fill(w, b, 4, 2, s);
    fill(w, wall, 1, 3, s);
    fill(w, end, 1, 4, s);
    give(w, a, s);
    give(w, b, s);
    return (struct waiting){s, wall, end};
}

static void close_waiting(struct world *w, struct waiting waiting)
{
    expect_later(w, waiting.wall, 1, 3, waiting.busy);
    expect_later(w, waiting.end, 1, 4, waiting.busy);
    give(w, waiting.wall, waiting.busy);
    give(w, waiting.end, waiting.busy);
    world_close(w);
}

Test(defects, defect_03_failed_wait_of_a_harvest_loses_nothing)
{
    needs_simulator();
    struct world w;
    struct waiting waiting = two_waiting_regions(&w);
    CUstream asking = world_stream(&w);
    vpmm_stats before = stats_of(&w);
    vpmm_sim_fail(w.sim, "cuStreamWaitEvent", 1, CUDA_ERROR_UNKNOWN, true);
    CUdeviceptr pointer = 0;
    vpmm_status status = vpmm_malloc(w.pool, 8 * PAGE, asking, &pointer);
    world_audit(&w);
    cr_expect_eq(stats_of(&w).mapped_bytes, before.mapped_bytes);
    vpmm_sim_fail(w.sim, "cuStreamWaitEvent", 0, CUDA_SUCCESS, false);
    if (status == VPMM_SUCCESS) { /* it may have waited in another way */
        fill(&w, pointer, 8, 8, asking);
    } else {
        cr_expect_eq(stats_of(&w).reusable_bytes, before.reusable_bytes);
        pointer = take(&w, 8, asking);
        fill(&w, pointer, 8, 8, asking);
    }
    expect_later(&w, pointer, 8, 8, asking);
    world_drain(&w);
    world_audit(&w);
    give(&w, pointer, asking);
    close_waiting(&w, waiting);
}

Test(defects, defect_04_a_failed_move_keeps_its_handles)
{
    needs_simulator();
    struct world w;
    struct waiting waiting = two_waiting_regions(&w);
    CUstream s = waiting.busy;
    vpmm_stats before = stats_of(&w);
    for (uint64_t nth = 1; nth <= 4; nth++) { /* some of the pages are moved already when one is refused */
        CUdeviceptr pointer = 0;
        vpmm_sim_fail(w.sim, "cuMemMap", nth, CUDA_ERROR_INVALID_VALUE, true);
        must_fail(VPMM_ERROR_DRIVER, vpmm_malloc(w.pool, 8 * PAGE, s, &pointer));
        vpmm_sim_fail(w.sim, "cuMemMap", 0, CUDA_SUCCESS, false);
        world_audit(&w);
        vpmm_stats after = stats_of(&w);
        cr_expect_eq(after.mapped_bytes, before.mapped_bytes);
        cr_expect_eq(after.reusable_bytes, before.reusable_bytes);
        cr_expect_eq(vpmm_sim_used_bytes(w.sim), before.mapped_bytes);
    }
    CUdeviceptr eight = take(&w, 8, s);
    fill(&w, eight, 8, 8, s);
    expect_later(&w, eight, 8, 8, s);
    world_drain(&w);
    world_audit(&w);
    give(&w, eight, s);
    close_waiting(&w, waiting);
}

Test(defects, defect_05_an_address_that_stays_mapped_is_not_handed_out)
{
    needs_simulator();
    struct setup setup = setup_default();
    setup.pool.va_size = 64 * PAGE;
    setup.pool.extent_size = PAGE;
    setup.pool.initial_pages = 10;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr a = take(&w, 4, s), wall = take(&w, 1, s), b = take(&w, 4, s), end = take(&w, 1, s);
    give(&w, a, s);
    give(&w, b, s);
    CUdeviceptr moved = take(&w, 8, s);
    uint64_t pending = stats_of(&w).pending_unmap_bytes;
    cr_assert_gt(pending, 0, "nothing was moved");
    vpmm_sim_fail(w.sim, "cuMemUnmap", 1, CUDA_ERROR_INVALID_VALUE, true);
    world_step(&w);
    for (int i = 0; i < 10; i++)
        (void)vpmm_poll(w.pool); /* may say that the driver refused */
    world_audit(&w);
    cr_expect_eq(stats_of(&w).pending_unmap_bytes, pending, "a mapped address counts as unmapped");
    cr_expect_gt(stats_of(&w).unmap_failures, 0);

    /* All of a and b that was moved away is out of reach, whatever is asked for. */
    CUdeviceptr taken[40];
    size_t n = 0;
    for (; n < 40; n++) {
        taken[n] = take(&w, 1, s);
        fill(&w, taken[n], 1, (uint32_t)n, s);
    }
    world_step(&w);
    world_audit(&w);
    cr_expect_eq(stats_of(&w).pending_unmap_bytes, pending);
    vpmm_sim_fail(w.sim, "cuMemUnmap", 0, CUDA_SUCCESS, false);
    for (size_t i = 0; i < n; i++)
        give(&w, taken[i], s);
    give(&w, moved, s);
    give(&w, wall, s);
    give(&w, end, s);
    world_close(&w);
}

Test(defects, defect_05_an_address_that_undoing_leaves_mapped_is_not_handed_out)
{
    needs_simulator();
    struct setup setup = setup_default();
    setup.pool.va_size = 64 * PAGE;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr pointer = 0;
    vpmm_sim_fail(w.sim, "cuMemSetAccess", 1, CUDA_ERROR_INVALID_VALUE, true);
    vpmm_sim_fail(w.sim, "cuMemUnmap", 1, CUDA_ERROR_INVALID_VALUE, true);
    must_fail(VPMM_ERROR_DRIVER, vpmm_malloc(w.pool, 20 * PAGE, s, &pointer));
    vpmm_sim_fail(w.sim, "cuMemSetAccess", 0, CUDA_SUCCESS, false);
    world_audit(&w);
    cr_expect_geq(stats_of(&w).pending_unmap_bytes, 20 * PAGE, "a mapped address counts as unmapped");
    CUdeviceptr p[16]; /* more than the chunk has left: a map of what is mapped would be refused */
    for (size_t i = 0; i < 16; i++) {
        p[i] = take(&w, 4, s);
        fill(&w, p[i], 4, (uint32_t)i, s);
    }
    world_audit(&w);
    for (size_t i = 0; i < 16; i++) {
        expect_later(&w, p[i], 4, (uint32_t)i, s);
        give(&w, p[i], s);
    }
    vpmm_sim_fail(w.sim, "cuMemUnmap", 0, CUDA_SUCCESS, false);
    world_close(&w);
}

Test(defects, defect_06_a_broken_event_is_not_taken_for_a_busy_one)
{
    needs_simulator();
    struct world w;
    world_open(&w, NULL);
    CUstream s = world_stream(&w);
    keep_busy(&w, s);
    give(&w, take(&w, 4, s), s);
    (void)vpmm_poll(w.pool); /* records the mark */
    vpmm_sim_fail(w.sim, "cuEventQuery", 1, CUDA_ERROR_LAUNCH_FAILED, true);
    must_fail(VPMM_ERROR_DRIVER, vpmm_poll(w.pool));
    CUdeviceptr pointer = 0;
    must_fail(VPMM_ERROR_DRIVER, vpmm_malloc(w.pool, 4 * PAGE, s, &pointer));
    world_audit(&w);
    must_fail(VPMM_ERROR_DRIVER, vpmm_pool_destroy(w.pool)); /* gives up what it cannot return */
    world_stream_destroy(&w, s);
    cr_assert_eq(w.driver->cuDevicePrimaryCtxRelease(w.device), CUDA_SUCCESS);
    cr_expect_gt(vpmm_sim_destroy(w.sim), 0);
}

Test(defects, defect_07_free_speaks_for_the_stream_that_it_names)
{
    struct setup setup = setup_default();
    setup.pool.reuse = VPMM_REUSE_COMPLETED;
    struct world w;
    world_open(&w, &setup);
    CUstream first = world_stream(&w), second = world_stream(&w);
    CUdeviceptr p = take(&w, 4, first);
    order_after(&w, second, first);
    fill(&w, p, 4, 2, second);
    expect_later(&w, p, 4, 2, second);
    give(&w, p, second);
    world_run(&w, first, SIZE_MAX); /* all of first's own work is done */
    must_work(vpmm_poll(w.pool));
    CUdeviceptr q = take(&w, 4, first);
    cr_expect_neq(q, p, "memory that the second stream still uses is given to the first");
    fill(&w, q, 4, 1, first);
    world_drain(&w);
    CUdeviceptr r = take(&w, 4, first);
    cr_expect_eq(r, p, "memory that the second stream is done with is not used again");
    fill(&w, r, 4, 3, first);
    give(&w, q, first);
    give(&w, r, first);
    world_close(&w);
}

static void *allocate_without_a_context(void *argument)
{
    struct world *w = argument;
    CUdeviceptr p = 0;
    bool good = vpmm_malloc(w->pool, 5 * PAGE, w->stream[0], &p) == VPMM_SUCCESS &&
                vpmm_free(w->pool, p, w->stream[0]) == VPMM_SUCCESS;
    CUcontext current = (CUcontext)1;
    good = good && w->driver->cuCtxGetCurrent(&current) == CUDA_SUCCESS && current == NULL;
    return good ? w : NULL;
}

Test(defects, defect_08_the_current_device_does_not_matter)
{
    struct setup setup = setup_default();
    setup.sim.devices = 2;
    setup.pool.device = 1;
    struct world w;
    world_open(&w, &setup);
    CUstream on_second = world_stream(&w);
    CUcontext other = NULL;
    CUdevice first = 0;
    cr_assert_eq(w.driver->cuDeviceGet(&first, 0), CUDA_SUCCESS);
    cr_assert_eq(w.driver->cuDevicePrimaryCtxRetain(&other, first), CUDA_SUCCESS);
    cr_assert_eq(w.driver->cuCtxSetCurrent(other), CUDA_SUCCESS);
    CUdeviceptr p = take(&w, 4, on_second);
    fill(&w, p, 4, 4, on_second);
    cr_expect_eq(vpmm_sim_used_bytes(w.sim), 0, "the memory is of the current device, not of the pool's");
    CUcontext current = NULL;
    w.driver->cuCtxGetCurrent(&current);
    cr_expect_eq(current, other, "the caller's context is not the current one any more");
    give(&w, p, on_second);
    world_drain(&w);

    pthread_t thread;
    void *good = NULL;
    pthread_create(&thread, NULL, allocate_without_a_context, &w);
    pthread_join(thread, &good);
    cr_expect(good != NULL, "a thread without a context cannot allocate, or is left with one");
    cr_assert_eq(w.driver->cuCtxSetCurrent(w.context), CUDA_SUCCESS);
    cr_assert_eq(w.driver->cuDevicePrimaryCtxRelease(first), CUDA_SUCCESS);
    world_close(&w);
}

Test(defects, defect_09_settings_made_in_main_are_heard)
{
    setenv("VPMM_PAGE_SIZE", "4M", 1);
    setenv("VPMM_PAGES", "3", 1);
    vpmm_config config = vpmm_config_default();
    must_work(vpmm_config_from_env(&config));
    cr_expect_eq(config.page_size, 2 * PAGE);
    cr_expect_eq(config.initial_pages, 3);
    if (vpmm_driver_cuda() == NULL) { /* no GPU: a status and words, not an abort */
        vpmm_pool *pool = NULL;
        must_fail(VPMM_ERROR_NO_DRIVER, vpmm_pool_create(NULL, &pool));
        cr_expect_null(pool);
    }
}

Test(defects, defect_10_destroy_refuses_live_memory_and_waits_for_its_own_device)
{
    struct setup setup = setup_default();
    setup.sim.devices = 2;
    setup.pool.device = 1;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr p = take(&w, 4, s);
    must_fail(VPMM_ERROR_BUSY, vpmm_pool_destroy(w.pool));
    fill(&w, p, 4, 4, s); /* it is all still there */
    expect_later(&w, p, 4, 4, s);
    give(&w, p, s);
    CUcontext other = NULL;
    CUdevice first = 0;
    cr_assert_eq(w.driver->cuDeviceGet(&first, 0), CUDA_SUCCESS);
    cr_assert_eq(w.driver->cuDevicePrimaryCtxRetain(&other, first), CUDA_SUCCESS);
    cr_assert_eq(w.driver->cuCtxSetCurrent(other), CUDA_SUCCESS);
    must_work(vpmm_pool_destroy(w.pool)); /* with work queued: an unmap before it ran would be a race */
    w.pool = NULL;
    cr_expect_not(world_pending(&w, s), "destroy did not wait for the pool's device");
    cr_assert_eq(w.driver->cuCtxSetCurrent(w.context), CUDA_SUCCESS);
    cr_assert_eq(w.driver->cuDevicePrimaryCtxRelease(first), CUDA_SUCCESS);
    world_close(&w);
}

Test(defects, defect_11_a_refused_free_forgets_nothing)
{
    needs_simulator();
    struct setup setup = setup_default();
    setup.pool.small = VPMM_SMALL_ASYNC; /* the driver's free is what is refused */
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr p = take_bytes(&w, 1000, s);
    vpmm_stats before = stats_of(&w);
    vpmm_sim_fail(w.sim, "cuMemFreeAsync", 1, CUDA_ERROR_UNKNOWN, false);
    must_fail(VPMM_ERROR_DRIVER, vpmm_free(w.pool, p, s));
    cr_expect_eq(stats_of(&w).async_bytes, before.async_bytes);
    cr_expect_eq(stats_of(&w).frees, before.frees);
    give(&w, p, s); /* a pool's end would do it too: see test_sound_faults */
    must_fail(VPMM_ERROR_INVALID_POINTER, vpmm_free(w.pool, p, s));
    world_close(&w);
}

Test(defects, defect_12_regions_of_two_chunks_stay_apart)
{
    struct setup setup = setup_default();
    setup.pool.va_size = 16 * PAGE;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr p[32];
    for (size_t i = 0; i < 32; i++)
        p[i] = take(&w, 2, s);
    cr_assert_geq(stats_of(&w).reserved_bytes, 64 * PAGE, "there is one chunk only");
    for (size_t i = 0; i < 32; i++)
        give(&w, p[i], s);
    world_drain(&w);
    world_audit(&w);
    cr_expect_leq(stats_of(&w).largest_free_bytes, 16 * PAGE, "a region reaches over the end of its chunk");
    CUdeviceptr whole = take(&w, 16, s);
    fill(&w, whole, 16, 16, s);
    give(&w, whole, s);
    world_close(&w);
}

Test(defects, defect_13_sizes_do_not_overflow)
{
    struct world w;
    world_open(&w, NULL);
    CUstream s = world_stream(&w);
    static const size_t overflowing[] = {SIZE_MAX, SIZE_MAX - 1, SIZE_MAX - PAGE + 2, SIZE_MAX - PAGE / 2};
    CUdeviceptr pointer = 0;
    for (size_t i = 0; i < sizeof overflowing / sizeof overflowing[0]; i++)
        must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_malloc(w.pool, overflowing[i], s, &pointer));
    for (int bit = 50; bit < 64; bit++) {
        vpmm_status status = vpmm_malloc(w.pool, (size_t)1 << bit, s, &pointer);
        cr_expect(status == VPMM_ERROR_OUT_OF_MEMORY || status == VPMM_ERROR_OUT_OF_ADDRESS_SPACE ||
                      status == VPMM_ERROR_INVALID_VALUE,
                  "2^%d bytes give %s", bit, vpmm_status_name(status));
    }
    world_audit(&w);
    cr_expect_eq(stats_of(&w).mapped_bytes, 0);
    world_close(&w);
}

Test(defects, defect_13_the_page_size_is_checked)
{
    struct world w;
    struct setup setup = setup_default();
    world_open_without_pool(&w, &setup);
    setup.pool.driver = w.driver;
    static const size_t wrong[] = {1, 4096, PAGE - 1, PAGE / 16, PAGE / 2 + PAGE / 4, 3 * PAGE, PAGE + 4096};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        setup.pool.page_size = wrong[i];
        vpmm_pool *pool = NULL;
        must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_pool_create(&setup.pool, &pool));
        cr_expect_null(pool);
    }
    world_close(&w);
}

Test(defects, defect_14_a_capturing_stream_is_left_alone)
{
    struct world w;
    world_open(&w, NULL);
    CUstream s = world_stream(&w);
    CUdeviceptr p = take(&w, 4, s), q = 0;
    cr_assert_eq(w.driver->cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
    must_fail(VPMM_ERROR_NOT_SUPPORTED, vpmm_malloc(w.pool, PAGE, s, &q));
    must_fail(VPMM_ERROR_NOT_SUPPORTED, vpmm_free(w.pool, p, s));
    CUgraph graph = NULL;
    cr_assert_eq(w.driver->cuStreamEndCapture(s, &graph), CUDA_SUCCESS, "the capture is lost");
    cr_assert_eq(w.driver->cuGraphDestroy(graph), CUDA_SUCCESS);
    give(&w, p, s);
    world_close(&w);
}

/* --- cost ----------------------------------------------------------------------------------------------------------
 */

Test(defects, defect_15_merging_does_not_make_idle_memory_wait)
{
    struct setup setup = setup_default();
    setup.pool.va_size = (size_t)8 << 30;
    setup.pool.initial_pages = 1000;
    setup.pool.max_mapped = 1000 * PAGE;
    setup.pool.reuse = VPMM_REUSE_COMPLETED;
    struct world w;
    world_open(&w, &setup);
    CUstream busy = world_stream(&w), asking = world_stream(&w);
    CUdeviceptr one = take(&w, 1, busy);
    fill(&w, one, 1, 1, busy);
    give(&w, one, busy); /* one page that waits, beside 999 that do not */
    must_work(vpmm_poll(w.pool));
    uint64_t waits = world_calls(&w, "cuStreamWaitEvent"), maps = world_calls(&w, "cuMemMap");
    CUdeviceptr rest = take(&w, 999, asking);
    fill(&w, rest, 999, 999, asking);
    cr_expect_eq(world_calls(&w, "cuStreamWaitEvent"), waits, "idle memory is waited for");
    cr_expect_eq(world_calls(&w, "cuMemMap"), maps, "idle memory is not found");
    cr_expect_eq(stats_of(&w).hits_completed + stats_of(&w).hits_own_stream, stats_of(&w).mallocs);
    cr_expect(world_pending(&w, busy));
    give(&w, rest, asking);
    world_close(&w);
}

Test(defects, defect_16_one_waiting_region_is_waited_for_not_moved)
{
    struct world w;
    world_open(&w, NULL);
    CUstream busy = world_stream(&w), asking = world_stream(&w);
    CUdeviceptr p = take(&w, 8, busy);
    fill(&w, p, 8, 8, busy);
    expect_later(&w, p, 8, 8, busy);
    give(&w, p, busy);
    uint64_t maps = world_calls(&w, "cuMemMap"), waits = world_calls(&w, "cuStreamWaitEvent");
    CUdeviceptr q = take(&w, 8, asking);
    cr_expect_eq(q, p);
    cr_expect_eq(world_calls(&w, "cuMemMap"), maps, "pages are moved without need");
    cr_expect_eq(world_calls(&w, "cuStreamWaitEvent"), waits + 1);
    cr_expect_eq(stats_of(&w).pending_unmap_bytes, 0);
    cr_expect_eq(stats_of(&w).extents_remapped, 0);
    cr_expect_eq(stats_of(&w).hits_waited, 1);
    fill(&w, q, 8, 9, asking);
    give(&w, q, asking);
    world_close(&w);
}

Test(defects, defect_17_a_shortfall_does_not_take_every_stream_s_memory)
{
    struct setup setup = setup_default();
    setup.pool.reuse = VPMM_REUSE_COMPLETED;
    struct world w;
    world_open(&w, &setup);
    CUdeviceptr p[6];
    for (size_t i = 0; i < 6; i++) {
        CUstream s = world_stream(&w);
        p[i] = take(&w, 8, s);
        fill(&w, p[i], 8, (uint32_t)i, s);
    }
    for (size_t i = 0; i < 6; i += 2)
        give(&w, p[i], w.stream[i]);
    CUstream asking = world_stream(&w);
    uint64_t waits = world_calls(&w, "cuStreamWaitEvent");
    CUdeviceptr q = take(&w, 12, asking);
    fill(&w, q, 12, 12, asking);
    cr_expect_eq(world_calls(&w, "cuStreamWaitEvent"), waits, "waited, though the device had memory");
    cr_expect_geq(stats_of(&w).reusable_bytes, 24 * PAGE, "other streams' memory is taken, though the device had some");
    for (size_t i = 1; i < 6; i += 2)
        give(&w, p[i], w.stream[i]);
    give(&w, q, asking);
    world_close(&w);
}

/* A driver whose cuMemCreate does not return before it is let go. */
static struct {
    const vpmm_driver *real;
    sem_t entered, go;
    atomic_bool armed;
} slow_driver;

static CUresult CUDAAPI slow_create(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                                    unsigned long long flags)
{
    if (atomic_exchange(&slow_driver.armed, false)) {
        sem_post(&slow_driver.entered);
        sem_wait(&slow_driver.go);
    }
    return slow_driver.real->cuMemCreate(handle, size, prop, flags);
}

static void *grow_slowly(void *argument)
{
    struct world *w = argument;
    CUdeviceptr p = 0;
    bool good = vpmm_malloc(w->pool, 64 * PAGE, w->stream[0], &p) == VPMM_SUCCESS &&
                vpmm_free(w->pool, p, w->stream[0]) == VPMM_SUCCESS;
    return good ? w : NULL;
}

/* Hangs, and is ended by its time limit, where a lock is held over the driver call. */
Test(defects, defect_18_a_driver_call_in_progress_stops_no_hit_and_no_other_device, .timeout = 60)
{
    struct setup setup = setup_default();
    setup.sim.devices = 2;
    struct world w;
    world_open_without_pool(&w, &setup);
    slow_driver.real = w.driver;
    sem_init(&slow_driver.entered, 0, 0);
    sem_init(&slow_driver.go, 0, 0);
    vpmm_driver table = *w.driver;
    table.cuMemCreate = slow_create;
    setup.pool.driver = &table;
    must_work(vpmm_pool_create(&setup.pool, &w.pool));
    setup.pool.device = 1;
    vpmm_pool *second = NULL;
    must_work(vpmm_pool_create(&setup.pool, &second));
    world_stream(&w);
    CUstream s = world_stream(&w);
    CUcontext other = NULL;
    cr_assert_eq(w.driver->cuDevicePrimaryCtxRetain(&other, 1), CUDA_SUCCESS);
    cr_assert_eq(w.driver->cuCtxSetCurrent(other), CUDA_SUCCESS);
    CUstream on_second = world_stream(&w);
    cr_assert_eq(w.driver->cuCtxSetCurrent(w.context), CUDA_SUCCESS);
    give(&w, take(&w, 4, s), s);
    CUdeviceptr held = take(&w, 1, s);

    atomic_store(&slow_driver.armed, true);
    pthread_t thread;
    pthread_create(&thread, NULL, grow_slowly, &w);
    sem_wait(&slow_driver.entered);
    for (int i = 0; i < 100; i++)
        give(&w, take(&w, 2, s), s);
    give(&w, held, s);
    CUdeviceptr p = 0;
    must_work(vpmm_malloc(second, 4 * PAGE, on_second, &p));
    must_work(vpmm_free(second, p, on_second));
    sem_post(&slow_driver.go);
    void *good = NULL;
    pthread_join(thread, &good);
    cr_expect(good != NULL);
    must_work(vpmm_pool_destroy(second));
    world_stream_destroy(&w, on_second);
    cr_assert_eq(w.driver->cuDevicePrimaryCtxRelease(1), CUDA_SUCCESS);
    world_close(&w);
}

static struct {
    const vpmm_driver *real;
    unsigned timing_events;
    unsigned handles, exportable, rdma;
} seen;

static CUresult CUDAAPI seen_event_create(CUevent *event, unsigned flags)
{
    seen.timing_events += (flags & CU_EVENT_DISABLE_TIMING) == 0;
    return seen.real->cuEventCreate(event, flags);
}

static CUresult CUDAAPI seen_create(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                                    unsigned long long flags)
{
    seen.handles++;
    seen.exportable += (prop->requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0;
    seen.rdma += prop->allocFlags.gpuDirectRDMACapable != 0;
    return seen.real->cuMemCreate(handle, size, prop, flags);
}

static void world_open_watched(struct world *w, struct setup *setup, vpmm_driver *table)
{
    world_open_without_pool(w, setup);
    memset(&seen, 0, sizeof seen);
    seen.real = w->driver;
    *table = *w->driver;
    table->cuEventCreate = seen_event_create;
    table->cuMemCreate = seen_create;
    setup->pool.driver = table;
    must_work(vpmm_pool_create(&setup->pool, &w->pool));
}

Test(defects, defect_19_malloc_and_free_ask_no_event)
{
    struct setup setup = setup_default();
    setup.pool.extent_size = PAGE;
    vpmm_driver table;
    struct world w;
    world_open_watched(&w, &setup, &table);
    CUstream s = world_stream(&w), other = world_stream(&w);
    CUdeviceptr kept[64];
    for (size_t i = 0; i < 64; i++) { /* many regions that wait, on another stream, and some old addresses */
        CUdeviceptr p = take(&w, 2, other);
        kept[i] = take(&w, 1, other);
        fill(&w, p, 2, 2, other);
        give(&w, p, other);
    }
    CUdeviceptr moved = take(&w, 40, other);
    give(&w, take(&w, 4, s), s);
    uint64_t queries = world_calls(&w, "cuEventQuery"), maps = world_calls(&w, "cuMemMap");
    uint64_t events = world_calls(&w, "cuEventCreate");
    for (int i = 0; i < 1000; i++)
        give(&w, take(&w, 4, s), s);
    cr_expect_eq(world_calls(&w, "cuEventQuery"), queries, "malloc or free asks events");
    cr_expect_eq(world_calls(&w, "cuMemMap"), maps);
    cr_expect_leq(world_calls(&w, "cuEventCreate") - events, 64, "an event is made for each free");
    cr_expect_eq(seen.timing_events, 0, "an event that takes times costs more");
    give(&w, moved, other);
    for (size_t i = 0; i < 64; i++)
        give(&w, kept[i], other);
    world_close(&w);
}

Test(defects, defect_19_growth_is_not_page_by_page)
{
    struct setup setup = setup_default();
    vpmm_driver table;
    struct world w;
    world_open_watched(&w, &setup, &table);
    CUstream s = world_stream(&w);
    CUdeviceptr p = take(&w, 256, s);
    cr_expect_leq(seen.handles, 32, "%u handles for 256 pages", seen.handles);
    give(&w, p, s);
    world_close(&w);
}

Test(defects, defect_20_pages_go_back_to_the_device)
{
    struct world w;
    world_open(&w, NULL);
    CUstream s = world_stream(&w);
    CUdeviceptr kept = take(&w, 2, s);
    give(&w, take(&w, 100, s), s);
    world_drain(&w);
    size_t released = 0;
    must_work(vpmm_trim(w.pool, 0, &released));
    cr_expect_geq(released, 90 * PAGE);
    if (w.sim != NULL)
        cr_expect_eq(vpmm_sim_used_bytes(w.sim), stats_of(&w).mapped_bytes);
    world_audit(&w);
    give(&w, kept, s);
    world_close(&w);
}

static struct setup small_device(size_t pages)
{
    struct setup setup = setup_default();
    setup.sim.memory_bytes = pages * PAGE;
    return setup;
}

Test(defects, defect_20_the_small_pool_gives_way_to_pages)
{
    struct setup setup = small_device(64);
    setup.pool.small = VPMM_SMALL_ASYNC;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr p[80];
    for (size_t i = 0; i < 80; i++)
        p[i] = take_bytes(&w, PAGE / 2, s);
    for (size_t i = 0; i < 80; i++)
        give(&w, p[i], s);
    CUdeviceptr large = take(&w, 60, s);
    fill(&w, large, 60, 60, s);
    world_audit(&w);
    give(&w, large, s);
    world_close(&w);
}

Test(defects, defect_20_free_pages_give_way_to_small_requests)
{
    struct setup setup = small_device(64);
    setup.pool.small = VPMM_SMALL_ASYNC;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    give(&w, take(&w, 62, s), s);
    CUdeviceptr p[60];
    for (size_t i = 0; i < 60; i++)
        p[i] = take_bytes(&w, PAGE / 2, s);
    world_audit(&w);
    for (size_t i = 0; i < 60; i++)
        give(&w, p[i], s);
    world_close(&w);
}

Test(defects, defect_21_what_rounding_costs_is_shown)
{
    struct setup setup = setup_default();
    setup.pool.small = VPMM_SMALL_ASYNC; /* pages are not cut */
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr p = take_bytes(&w, PAGE + 1, s); /* a page is wholly free or wholly used */
    cr_expect_eq(stats_of(&w).live_bytes, 2 * PAGE);
    cr_expect_eq(stats_of(&w).requested_bytes, PAGE + 1);
    give(&w, p, s);
    cr_expect_eq(stats_of(&w).requested_bytes, 0);
    world_close(&w);
}

Test(defects, defect_22_streams_that_come_and_go_leave_one_region)
{
    struct setup setup = setup_default();
    setup.pool.initial_pages = 64;
    struct world w;
    world_open(&w, &setup);
    CUdeviceptr p[32];
    CUstream s[32];
    for (size_t i = 0; i < 32; i++) {
        s[i] = world_stream(&w);
        p[i] = take(&w, 2, s[i]);
        fill(&w, p[i], 2, (uint32_t)i, s[i]);
    }
    for (size_t i = 0; i < 32; i++) {
        give(&w, p[i], s[i]);
        must_work(vpmm_stream_release(w.pool, s[i]));
        world_stream_destroy(&w, s[i]);
    }
    cr_assert_eq(w.driver->cuCtxSynchronize(), CUDA_SUCCESS); /* their work has no handle any more to step it by */
    world_drain(&w);
    cr_expect_str_eq(layout(&w), "[-64]", "the regions of dead streams do not merge: %s", layout(&w));
    world_audit(&w);
    world_close(&w);
}

Test(defects, defect_23_handles_can_be_exported_and_registered)
{
    struct setup setup = setup_default();
    vpmm_driver table;
    setup.pool.rdma = true;
    struct world w;
    world_open_watched(&w, &setup, &table);
    int posix = 0, rdma = 0;
    w.driver->cuDeviceGetAttribute(&posix, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, w.device);
    w.driver->cuDeviceGetAttribute(&rdma, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, w.device);
    CUstream s = world_stream(&w);
    CUdeviceptr p = take(&w, 16, s);
    cr_assert_gt(seen.handles, 0);
    if (posix)
        cr_expect_eq(seen.exportable, seen.handles);
    if (rdma)
        cr_expect_eq(seen.rdma, seen.handles);
    give(&w, p, s);
    world_close(&w);
}

Test(defects, defect_24_old_addresses_are_in_the_dump)
{
    struct setup setup = setup_default();
    setup.pool.extent_size = PAGE;
    setup.pool.initial_pages = 15;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr ten = take(&w, 10, s), one = take(&w, 1, s);
    keep_busy(&w, s);
    give(&w, ten, s);
    CUdeviceptr four = take(&w, 4, s), eleven = take(&w, 11, s);
    size_t pending = stats_of(&w).pending_unmap_bytes / PAGE;
    cr_assert_gt(pending, 0);
    char text[32];
    snprintf(text, sizeof text, "[~%zu]", pending);
    cr_expect(strstr(layout(&w), text) != NULL, "no %s in %s", text, layout(&w));
    give(&w, one, s);
    give(&w, four, s);
    give(&w, eleven, s);
    world_close(&w);
}

Test(defects, defect_25_memory_of_three_streams_is_waited_for_on_each)
{
    struct setup setup = setup_default();
    setup.pool.max_mapped = 14 * PAGE;
    setup.pool.extent_size = PAGE;
    struct world w;
    world_open(&w, &setup);
    CUstream a = world_stream(&w), b = world_stream(&w), asking = world_stream(&w);
    CUdeviceptr p = take(&w, 6, a), wall = take(&w, 2, asking), q = take(&w, 6, b);
    fill(&w, p, 6, 1, a);
    fill(&w, q, 6, 2, b);
    expect_later(&w, p, 6, 1, a);
    expect_later(&w, q, 6, 2, b);
    give(&w, p, a);
    give(&w, q, b);
    uint64_t waits = world_calls(&w, "cuStreamWaitEvent");
    CUdeviceptr all = take(&w, 12, asking);
    fill(&w, all, 12, 3, asking);
    expect_later(&w, all, 12, 3, asking);
    cr_expect_eq(world_calls(&w, "cuStreamWaitEvent") - waits, 2, "one wait for each of the two streams");
    cr_expect_eq(world_run(&w, asking, SIZE_MAX), 0, "the stream runs before what it waits for");
    give(&w, all, asking);
    give(&w, wall, asking);
    world_close(&w);
}
