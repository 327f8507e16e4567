/*
 * Streams and threads: whose memory may be used by whom, and when.
 */
#include "pool/pool.h"
#include "support.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

static struct setup setup_with(vpmm_reuse reuse)
{
    struct setup setup = setup_default();
    setup.pool.reuse = reuse;
    return setup;
}

static uint64_t waits(struct world *w)
{
    return world_calls(w, "cuStreamWaitEvent");
}

static uint64_t maps(struct world *w)
{
    return world_calls(w, "cuMemMap");
}

/* --- reuse ----------------------------------------------------------------------------------------------------------
 */

Test(streams, own_memory_is_used_again_at_once)
{
    struct world w;
    world_open(&w, NULL);
    CUstream s = world_stream(&w);
    CUdeviceptr p = take(&w, 4, s);
    fill(&w, p, 4, 1, s);
    give(&w, p, s);
    uint64_t calls = maps(&w) + waits(&w);
    CUdeviceptr q = take(&w, 4, s);
    cr_expect_eq(q, p);
    cr_expect_eq(stats_of(&w).hits_own_stream, 1);
    cr_expect_eq(maps(&w) + waits(&w), calls);
    fill(&w, q, 4, 2, s);
    give(&w, q, s);
    world_close(&w);
}

static uint64_t not_waitable; /* a fence's number */

static bool is_waitable(const struct streams *streams, struct fence fence)
{
    (void)streams;
    return fence.number != not_waitable;
}

/* Of a stream's regions of a length, whichever of them is looked at first. */
Test(streams, what_can_be_waited_for_is_found_beside_what_cannot)
{
    enum { REGIONS = 2 };
    for (int first = 0; first < REGIONS; first++) {
        struct world w;
        world_open(&w, NULL);
        CUstream s = world_stream(&w), t = world_stream(&w);
        CUdeviceptr p[REGIONS], between[REGIONS];
        struct stream *asking;
        struct fence fence[REGIONS];
        struct region region;
        for (int i = 0; i < REGIONS; i++) {
            p[i] = take(&w, 8, s);
            between[i] = take(&w, 1, s);
        }
        keep_busy(&w, s);
        for (int i = 0; i < REGIONS; i++) {
            uint64_t unit;
            give(&w, p[i], s);
            cr_assert(unit_of_address(&w.pool->arena.space.units, p[i], &unit));
            fence[i] = unit_fence(unit_at(&w.pool->arena.space.units, unit));
        }
        not_waitable = fence[first].number;
        must_work(stream_enter(&w.pool->arena.streams, t, &asking));
        cr_assert(region_take_freed_elsewhere(&w.pool->arena.space, asking, (struct want){8, 1}, false, is_waitable,
                                              &region));
        cr_expect_eq(region.fence.number, fence[1 - first].number);
        region_publish(&w.pool->arena.space, region);
        stream_finish(&w.pool->arena.streams, asking);
        for (int i = 0; i < REGIONS; i++)
            give(&w, between[i], s);
        world_close(&w);
    }
}

/* Two regions are one behind the later fence. Who takes the earlier one's part of it waits for that one's fence. */
Test(streams, a_part_is_waited_for_by_its_own_fence)
{
    needs_simulator(); /* a real GPU is not told where to stop */
    struct setup setup = setup_with(VPMM_REUSE_WAIT_DEVICE);
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w), t = world_stream(&w);
    CUdeviceptr both = take(&w, 8, s), behind = take(&w, 1, s);
    give(&w, both, s);
    world_run(&w, s, SIZE_MAX);
    CUdeviceptr first = take(&w, 4, s), second = take(&w, 4, s);
    cr_assert(first == both && second == both + 4 * PAGE);
    keep_busy(&w, s);
    give(&w, first, s);
    size_t earlier = 2; /* the work, and the mark behind it */
    keep_busy(&w, s);
    give(&w, second, s);
    CUdeviceptr q = take(&w, 4, t);
    cr_assert_eq(q, first);
    fill(&w, q, 4, 1, t);
    world_run(&w, s, earlier);
    world_run(&w, t, SIZE_MAX);
    cr_expect_not(world_pending(&w, t), "it waits for what it does not need");
    cr_expect(world_pending(&w, s));
    give(&w, q, t);
    give(&w, behind, s);
    world_close(&w);
}

/* How often a malloc that builds asks whether what has been freed on another stream, or on its own, has passed. */
static uint64_t questions_of_a_build(bool of_another)
{
    struct setup setup = setup_with(VPMM_REUSE_COMPLETED);
    setup.pool.cache_bytes = 0;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w), other = world_stream(&w);
    CUdeviceptr p = take(&w, 4, s);
    keep_busy(&w, s);
    give(&w, p, s);
    uint64_t before = vpmm_sim_calls(w.sim, "cuEventQuery");
    p = take(&w, 8, of_another ? other : s);
    uint64_t questions = vpmm_sim_calls(w.sim, "cuEventQuery") - before;
    cr_expect_gt(stats_of(&w).builds, 1);
    give(&w, p, of_another ? other : s);
    world_step(&w);
    world_close(&w);
    return questions;
}

/* To ask again and again takes longer than most of what a program does between two mallocs. */
Test(streams, what_the_stream_itself_has_freed_is_not_waited_for)
{
    needs_simulator();
    uint64_t own = questions_of_a_build(false), another = questions_of_a_build(true);
    cr_expect_leq(own, 1);
    cr_expect_gt(another, 2);
}

Test(streams, what_is_longer_than_the_request_is_split_and_counted)
{
    struct world w;
    world_open(&w, NULL);
    CUstream s = world_stream(&w);
    give(&w, take(&w, 4, s), s);
    uint64_t splits = stats_of(&w).splits;
    give(&w, take(&w, 4, s), s);
    cr_expect_eq(stats_of(&w).splits, splits, "a request that fits splits a region");
    CUdeviceptr p = take(&w, 1, s);
    cr_expect_eq(stats_of(&w).splits, splits + 1);
    give(&w, p, s);
    world_close(&w);
}

Test(streams, memory_whose_fence_has_passed_is_everyone_s)
{
    struct world w;
    world_open(&w, NULL);
    CUstream s = world_stream(&w), other = world_stream(&w);
    CUdeviceptr p = take(&w, 4, s);
    fill(&w, p, 4, 1, s);
    give(&w, p, s);
    world_drain(&w);
    uint64_t calls = maps(&w) + waits(&w);
    CUdeviceptr q = take(&w, 4, other);
    cr_expect_eq(q, p);
    cr_expect_eq(stats_of(&w).hits_completed, 1);
    cr_expect_eq(maps(&w) + waits(&w), calls);
    fill(&w, q, 4, 2, other);
    give(&w, q, other);
    world_close(&w);
}

Test(streams, device_reuse_waits_once_and_moves_nothing)
{
    struct setup setup = setup_with(VPMM_REUSE_WAIT_DEVICE);
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w), other = world_stream(&w);
    CUdeviceptr p = take(&w, 4, s);
    fill(&w, p, 4, 1, s);
    expect_later(&w, p, 4, 1, s);
    give(&w, p, s);
    uint64_t mapped = maps(&w), waited = waits(&w);
    CUdeviceptr q = take(&w, 4, other);
    cr_expect_eq(q, p);
    cr_expect_eq(stats_of(&w).hits_waited, 1);
    cr_expect_eq(waits(&w), waited + 1);
    cr_expect_eq(maps(&w), mapped);
    fill(&w, q, 4, 2, other);
    expect_later(&w, q, 4, 2, other);
    cr_expect_eq(world_run(&w, other, SIZE_MAX), 0, "it does not wait for the other stream");
    give(&w, q, other);
    world_close(&w);
}

Test(streams, a_part_of_a_waiting_region_will_do)
{
    struct setup setup = setup_with(VPMM_REUSE_WAIT_DEVICE);
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w), other = world_stream(&w), third = world_stream(&w);
    CUdeviceptr p = take(&w, 12, s);
    fill(&w, p, 12, 1, s);
    give(&w, p, s);
    uint64_t mapped = maps(&w);
    CUdeviceptr q = take(&w, 4, other), r = take(&w, 4, third);
    fill(&w, q, 4, 2, other);
    fill(&w, r, 4, 3, third);
    cr_expect_eq(maps(&w), mapped);
    cr_expect_eq(stats_of(&w).hits_waited, 2);
    expect_later(&w, q, 4, 2, other);
    expect_later(&w, r, 4, 3, third);
    give(&w, q, other);
    give(&w, r, third);
    world_close(&w);
}

/* What has passed of a region is one part, though it was freed in several. */
Test(streams, the_part_that_has_passed_is_as_long_as_all_that_has)
{
    needs_simulator();
    struct setup setup = setup_with(VPMM_REUSE_COMPLETED);
    struct world w;
    setup.pool.captures = true;
    world_open(&w, &setup);
    CUstream s = world_stream(&w), t = world_stream(&w);
    give(&w, take(&w, 6, s), s);
    CUdeviceptr a = take(&w, 2, s), b = take(&w, 1, s), c = take(&w, 3, s);
    give(&w, a, s);
    give(&w, b, s);
    size_t before = vpmm_sim_pending(w.sim, s);
    keep_busy(&w, s);
    give(&w, c, s);
    world_run(&w, s, before);
    must_work(vpmm_poll(w.pool));
    uint64_t builds = stats_of(&w).builds;
    CUdeviceptr d = take(&w, 3, t);
    cr_expect_eq(stats_of(&w).builds, builds, "it builds beside what has passed");
    cr_expect_eq(d, a);
    give(&w, d, t);
    world_close(&w);
}

Test(streams, completed_reuse_keeps_streams_independent)
{
    struct setup setup = setup_with(VPMM_REUSE_COMPLETED);
    struct world w;
    world_open(&w, &setup);
    CUstream s[4];
    for (int i = 0; i < 4; i++)
        s[i] = world_stream(&w);
    uint64_t before = waits(&w);
    for (int round = 0; round < 50; round++)
        for (int i = 0; i < 4; i++) {
            CUdeviceptr p = take(&w, 1 + (size_t)(round * 7 + i) % 5, s[i]);
            fill(&w, p, 1, (uint32_t)round, s[i]);
            give(&w, p, s[i]);
        }
    cr_expect_eq(waits(&w), before, "one stream was made to wait for another");
    cr_expect_eq(world_calls(&w, "cuEventSynchronize") + world_calls(&w, "cuStreamSynchronize"), 0);
    cr_expect_eq(stats_of(&w).hits_waited, 0);
    world_close(&w);
}

Test(streams, completed_reuse_waits_before_it_fails)
{
    struct setup setup = setup_with(VPMM_REUSE_COMPLETED);
    setup.pool.max_mapped = 8 * PAGE;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w), other = world_stream(&w);
    CUdeviceptr p = take(&w, 8, s);
    fill(&w, p, 8, 1, s);
    give(&w, p, s);
    CUdeviceptr q = take(&w, 8, other);
    fill(&w, q, 8, 2, other);
    give(&w, q, other);
    world_close(&w);
}

Test(streams, host_reuse_makes_the_caller_wait)
{
    struct setup setup = setup_with(VPMM_REUSE_WAIT_HOST);
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w), other = world_stream(&w);
    CUdeviceptr p = take(&w, 4, s);
    fill(&w, p, 4, 1, s);
    give(&w, p, s);
    uint64_t mapped = maps(&w), waited = waits(&w);
    CUdeviceptr q = take(&w, 4, other);
    cr_expect_eq(q, p);
    cr_expect_eq(maps(&w), mapped);
    cr_expect_eq(waits(&w), waited, "the device waits too");
    cr_expect_eq(stats_of(&w).hits_waited, 1);
    cr_expect_eq(world_pending(&w, s), false, "the memory is given away before the work on it is done");
    fill(&w, q, 4, 2, other);
    cr_expect_gt(world_run(&w, other, SIZE_MAX), 0);
    give(&w, q, other);
    world_close(&w);
}

/* All marks are in use, so the newest is recorded again: where that is refused it is as old as it was. */
Test(streams, a_mark_that_is_refused_covers_no_more_than_before)
{
    needs_simulator();
    struct setup setup = setup_with(VPMM_REUSE_COMPLETED);
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w), t = world_stream(&w);
    CUdeviceptr p = take(&w, 4, s), one = take(&w, 1, s);
    for (int i = 0; i < STREAM_MARKS; i++) {
        give(&w, one, s);
        one = take(&w, 1, s);
    }
    size_t before = vpmm_sim_pending(w.sim, s);
    fill(&w, p, 4, 1, s);
    vpmm_sim_fail(w.sim, "cuEventRecord", 1, CUDA_ERROR_UNKNOWN, true);
    give(&w, p, s);
    world_run(&w, s, before);
    must_work(vpmm_poll(w.pool));
    CUdeviceptr q = take(&w, 4, t);
    vpmm_sim_fail(w.sim, "cuEventRecord", 0, CUDA_SUCCESS, false);
    cr_expect_neq(q, p, "memory is handed out whose work is not done");
    fill(&w, q, 4, 2, t);
    give(&w, q, t);
    give(&w, one, s);
    world_close(&w);
}

static const vpmm_driver *below;
static int refusals; /* so many records of events fail */

static CUresult CUDAAPI record_in_vain(CUevent event, CUstream stream)
{
    return refusals > 0 && refusals-- ? CUDA_ERROR_UNKNOWN : below->cuEventRecord(event, stream);
}

/* Who waits where no mark can be had, neither by the free nor afterwards, records an event for this wait alone. */
Test(streams, an_event_for_one_wait_is_destroyed)
{
    needs_simulator();
    struct setup setup = setup_default();
    struct world w;
    vpmm_driver table;
    setup.pool.max_mapped = 4 * PAGE;
    world_open_without_pool(&w, &setup);
    below = w.driver;
    table = *below;
    table.cuEventRecord = record_in_vain;
    setup.pool.driver = &table;
    must_work(vpmm_pool_create(&setup.pool, &w.pool));
    CUstream s = world_stream(&w), t = world_stream(&w);
    CUdeviceptr p = take(&w, 4, s);
    fill(&w, p, 4, 1, s);
    refusals = 3; /* of the free, of the request, and of its wait */
    give(&w, p, s);
    uint64_t created = world_calls(&w, "cuEventCreate"), destroyed = world_calls(&w, "cuEventDestroy");
    CUdeviceptr q = take(&w, 4, t);
    cr_expect_eq(world_calls(&w, "cuEventCreate"), created + 1);
    cr_expect_eq(world_calls(&w, "cuEventDestroy"), destroyed + 1);
    cr_expect_eq(q, p);
    fill(&w, q, 4, 2, t);
    give(&w, q, t);
    world_close(&w);
}

Test(streams, memory_that_needs_no_wait_comes_first)
{
    struct setup setup = setup_with(VPMM_REUSE_WAIT_DEVICE);
    struct world w;
    world_open(&w, &setup);
    CUstream busy = world_stream(&w), idle = world_stream(&w), asking = world_stream(&w);
    CUdeviceptr passed = take(&w, 6, idle), wall = take(&w, 1, idle), waiting = take(&w, 4, busy);
    give(&w, passed, idle);
    world_drain(&w);
    fill(&w, waiting, 4, 1, busy);
    give(&w, waiting, busy); /* fits better, but must be waited for */
    uint64_t waited = waits(&w);
    CUdeviceptr p = take(&w, 4, asking);
    cr_expect_eq(waits(&w), waited);
    cr_expect(p >= passed && p < passed + 6 * PAGE);
    give(&w, wall, idle);
    give(&w, p, asking);
    world_close(&w);
}

Test(streams, the_wait_covers_all_that_was_queued_before_the_free)
{
    struct setup setup = setup_with(VPMM_REUSE_WAIT_DEVICE);
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w), other = world_stream(&w);
    for (uint32_t round = 0; round < 100;
         round++) { /* the marks of earlier frees must not be mistaken for later ones */
        CUdeviceptr p = take(&w, 2, s);
        fill(&w, p, 2, round, s);
        expect_later(&w, p, 2, round, s);
        give(&w, p, s);
        if (round % 3 == 0)
            must_work(vpmm_poll(w.pool));
        CUdeviceptr q = take(&w, 2, other);
        fill(&w, q, 2, ~round, other);
        expect_later(&w, q, 2, ~round, other);
        give(&w, q, other);
        world_run(&w, other, 2);
        world_run(&w, s, 3);
        world_audit(&w);
    }
    world_close(&w);
}

/* --- merging --------------------------------------------------------------------------------------------------------
 */

Test(streams, merging_never_makes_idle_memory_busy)
{
    struct setup setup = setup_with(VPMM_REUSE_COMPLETED);
    setup.pool.initial_pages = 32;
    setup.pool.max_mapped = 32 * PAGE;
    struct world w;
    world_open(&w, &setup);
    CUstream busy = world_stream(&w), asking = world_stream(&w);
    for (int i = 0; i < 8; i++) { /* pages here and there, freed beside idle ones by a stream with work to do */
        CUdeviceptr p = take(&w, 1, busy);
        keep_busy(&w, busy);
        give(&w, p, busy);
        uint64_t waited = waits(&w), mapped = maps(&w);
        CUdeviceptr q = take(&w, 31, asking);
        cr_expect_eq(waits(&w), waited);
        cr_expect_eq(maps(&w), mapped);
        cr_expect_eq(world_pending(&w, busy), true);
        give(&w, q, asking);
        world_step(&w);
        world_drain(&w);
    }
    world_audit(&w);
    world_close(&w);
}

Test(streams, regions_of_one_stream_merge_before_their_fence_passes)
{
    struct setup setup = setup_default();
    setup.pool.initial_pages = 12;
    setup.pool.max_mapped = 12 * PAGE;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr p[4];
    for (size_t i = 0; i < 4; i++)
        p[i] = take(&w, 3, s);
    keep_busy(&w, s);
    give(&w, p[1], s);
    give(&w, p[3], s);
    give(&w, p[0], s);
    give(&w, p[2], s);
    cr_expect_str_eq(layout(&w), "[-12]", "%s", layout(&w));
    CUdeviceptr all = take(&w, 12, s);
    cr_expect_eq(stats_of(&w).hits_own_stream, 1);
    cr_expect_eq(stats_of(&w).extents_remapped, 0);
    give(&w, all, s);
    world_close(&w);
}

Test(streams, regions_of_two_streams_merge_once_both_have_passed)
{
    struct setup setup = setup_default();
    setup.pool.initial_pages = 8;
    struct world w;
    world_open(&w, &setup);
    CUstream a = world_stream(&w), b = world_stream(&w);
    CUdeviceptr p = take(&w, 4, a), q = take(&w, 4, b);
    keep_busy(&w, a);
    keep_busy(&w, b);
    give(&w, p, a);
    give(&w, q, b);
    world_drain(&w);
    cr_expect_str_eq(layout(&w), "[-8]", "%s", layout(&w));
    world_close(&w);
}

/* The spans of a region follow each other to its end, whatever is cut off. */
Test(streams, a_span_that_is_cut_ends_at_the_cut)
{
    struct world w;
    struct region region;
    world_open(&w, NULL);
    CUstream s = world_stream(&w);
    give(&w, take(&w, 8, s), s);
    CUdeviceptr p = take(&w, 4, s), q = take(&w, 4, s);
    give(&w, p, s);
    give(&w, q, s);
    struct space *space = &w.pool->arena.space;
    struct stream *stream = stream_at(&w.pool->arena.streams, 1);
    cr_assert_eq(region_take(space, stream, (struct want){8, 1}, false, &region), REGION_OWN_STREAM);
    uint64_t first = region.first;
    struct region rest = region_drop_front(space, region, 2);
    cr_expect_eq(load_relaxed_u32(&unit_at(&space->units, first)->span_units), 2);
    region_publish(space, rest);
    world_close(&w);
}

Test(streams, a_thousand_short_lived_streams_leave_one_region, .timeout = 120)
{
    struct setup setup = setup_default();
    setup.pool.initial_pages = 128;
    setup.pool.max_mapped = 128 * PAGE;
    struct world w;
    world_open(&w, &setup);
    CUdeviceptr p[32];
    CUstream s[32];
    for (uint32_t i = 0; i < 1000; i++) {
        size_t k = i % 32;
        if (i >= 32) { /* the stream of 32 rounds ago ends here, with its work still queued */
            give(&w, p[k], s[k]);
            must_work(vpmm_stream_release(w.pool, s[k]));
            world_stream_destroy(&w, s[k]);
        }
        s[k] = world_stream(&w);
        p[k] = take(&w, 1 + i % 3, s[k]);
        fill(&w, p[k], 1 + i % 3, i, s[k]);
        if (i % 16 == 0)
            must_work(vpmm_poll(w.pool));
    }
    for (size_t k = 0; k < 32; k++) {
        give(&w, p[k], s[k]);
        must_work(vpmm_stream_release(w.pool, s[k]));
    }
    world_drain(&w);
    world_audit(&w);
    uint64_t moved = stats_of(&w).extents_remapped, created = stats_of(&w).extents_created;
    CUstream last = world_stream(&w);
    CUdeviceptr all = take(&w, 128, last);
    cr_expect_eq(stats_of(&w).extents_remapped, moved, "free memory is left in pieces: %s", layout(&w));
    cr_expect_eq(stats_of(&w).extents_created, created);
    give(&w, all, last);
    world_close(&w);
}

/* --- release, and handles that come back ----------------------------------------------------------------------------
 */

Test(streams, release_gives_memory_to_every_stream)
{
    struct setup setup = setup_with(VPMM_REUSE_COMPLETED);
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w), other = world_stream(&w);
    CUdeviceptr p = take(&w, 4, s);
    fill(&w, p, 4, 1, s);
    give(&w, p, s);
    must_work(vpmm_stream_release(w.pool, s));
    world_step(&w);
    world_stream_destroy(&w, s);
    world_drain(&w);
    CUdeviceptr q = take(&w, 4, other);
    cr_expect_eq(q, p);
    give(&w, q, other);
    world_close(&w);
}

/* By the driver's call and its answer. */
Test(streams, a_release_that_the_driver_refuses_says_why)
{
    needs_simulator();
    struct setup setup = setup_with(VPMM_REUSE_COMPLETED);
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr p = take(&w, 4, s);
    vpmm_sim_fail(w.sim, "cuEventRecord", 1, CUDA_ERROR_UNKNOWN, true);
    give(&w, p, s);
    must_fail(VPMM_ERROR_DRIVER, vpmm_stream_release(w.pool, s));
    cr_expect(strstr(vpmm_last_error(), "cuEventRecord answered 999"), "%s", vpmm_last_error());
    vpmm_sim_fail(w.sim, "cuEventRecord", 0, CUDA_SUCCESS, false);
    must_work(vpmm_stream_release(w.pool, s));
    world_stream_destroy(&w, s);
    world_drain(&w);
    world_close(&w);
}

static uint32_t state_of(struct world *w, uint32_t slot)
{
    return load_sc_u32(&stream_at(&w->pool->arena.streams, slot)->state);
}

/* Who waits for a stream keeps its record, and no longer. */
Test(streams, a_record_is_unused_after_the_waits_for_it)
{
    struct setup setup = setup_default();
    struct world w;
    setup.pool.max_mapped = 4 * PAGE;
    world_open(&w, &setup);
    CUstream s = world_stream(&w), t = world_stream(&w);
    CUdeviceptr p = take(&w, 4, s);
    fill(&w, p, 4, 1, s);
    give(&w, p, s);
    give(&w, take(&w, 4, t), t);
    must_work(vpmm_stream_release(w.pool, s));
    must_work(vpmm_stream_release(w.pool, t));
    world_drain(&w);
    cr_expect_eq(state_of(&w, 1), STREAM_UNUSED);
    cr_expect_eq(state_of(&w, 2), STREAM_UNUSED);
    world_close(&w);
}

Test(streams, release_with_work_queued_does_not_give_too_early)
{
    struct setup setup = setup_with(VPMM_REUSE_COMPLETED);
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w), other = world_stream(&w);
    CUdeviceptr p = take(&w, 4, s);
    fill(&w, p, 4, 1, s);
    give(&w, p, s);
    must_work(vpmm_stream_release(w.pool, s));
    must_work(vpmm_poll(w.pool));
    CUdeviceptr q = take(&w, 4, other);
    cr_expect_neq(q, p);
    fill(&w, q, 4, 2, other);
    give(&w, q, other);
    world_audit(&w);
    world_close(&w);
}

static CUstream same_handle_again(struct world *w, CUstream s)
{
    world_stream_destroy(w, s);
    CUstream again = world_stream(w);
    if (w->sim != NULL) /* a real driver may or may not */
        cr_assert_eq(again, s, "the simulator does not hand the handle out again");
    return again;
}

/* The stream is destroyed with work queued; the next one has its handle, and must not pass for it. */
static void a_handle_comes_back(vpmm_reuse reuse, vpmm_streams streams, bool release)
{
    struct setup setup = setup_with(reuse);
    setup.pool.streams = streams;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    for (uint32_t round = 0; round < 20; round++) {
        CUdeviceptr p = take(&w, 4, s);
        fill(&w, p, 4, round, s);
        expect_later(&w, p, 4, round, s);
        give(&w, p, s);
        if (release)
            must_work(vpmm_stream_release(w.pool, s));
        s = same_handle_again(&w, s);
        CUdeviceptr q = take(&w, 4, s);
        fill(&w, q, 4, ~round, s);
        expect_later(&w, q, 4, ~round, s);
        world_run(&w, s, 1 + round % 3);
        if (round % 2 != 0)
            must_work(vpmm_poll(w.pool));
        give(&w, q, s);
        world_audit(&w);
    }
    world_drain(&w);
    world_audit(&w);
    world_close(&w);
}

Test(streams, a_released_handle_comes_back_and_waits_on_the_device)
{
    a_handle_comes_back(VPMM_REUSE_WAIT_DEVICE, VPMM_STREAMS_CHECKED, true);
}
Test(streams, a_released_handle_comes_back_to_independent_streams)
{
    a_handle_comes_back(VPMM_REUSE_COMPLETED, VPMM_STREAMS_CHECKED, true);
}
Test(streams, an_unreleased_handle_comes_back_and_is_noticed)
{
    a_handle_comes_back(VPMM_REUSE_WAIT_DEVICE, VPMM_STREAMS_CHECKED, false);
}
Test(streams, an_unreleased_handle_comes_back_to_independent_streams)
{
    a_handle_comes_back(VPMM_REUSE_COMPLETED, VPMM_STREAMS_CHECKED, false);
}
Test(streams, an_unreleased_handle_comes_back_to_eager_streams)
{
    a_handle_comes_back(VPMM_REUSE_WAIT_DEVICE, VPMM_STREAMS_EAGER, false);
}

Test(streams, memory_of_a_lost_stream_is_found_again)
{
    struct setup setup = setup_with(VPMM_REUSE_WAIT_DEVICE);
    setup.pool.max_mapped = 8 * PAGE;
    setup.pool.extent_size = PAGE;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr p = take(&w, 8, s);
    fill(&w, p, 8, 1, s);
    give(&w, p, s);
    s = same_handle_again(&w, s); /* without a word */
    CUdeviceptr q = take(&w, 8, s);
    fill(&w, q, 8, 2, s);
    expect_later(&w, q, 8, 2, s);
    give(&w, q, s);
    world_drain(&w);
    world_audit(&w);
    world_close(&w);
}

/* Freed, with no mark to wait for; then its stream's handle is another stream's, which the pool has not met. */
static CUstream freed_unmarked_and_the_handle_back(struct world *w, CUdeviceptr p, size_t pages, CUstream s)
{
    fill(w, p, pages, 1, s);
    vpmm_sim_fail(w->sim, "cuEventRecord", 1, CUDA_ERROR_OUT_OF_MEMORY, false);
    give(w, p, s);
    return same_handle_again(w, s);
}

static void a_mark_belongs_to_its_stream(vpmm_streams streams, bool release)
{
    needs_simulator();
    struct setup setup = setup_with(VPMM_REUSE_COMPLETED);
    setup.pool.streams = streams;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w), other = world_stream(&w);
    CUdeviceptr p = take(&w, 8, s);
    CUstream again = freed_unmarked_and_the_handle_back(&w, p, 8, s);
    if (release)
        must_work(vpmm_stream_release(w.pool, again)); /* which the pool has not met */
    for (int i = 0; i < 3; i++)                        /* a mark on the idle new stream would pass here */
        must_work(vpmm_poll(w.pool));
    CUdeviceptr q = take(&w, 8, other);
    cr_expect_neq(q, p, "memory is given away before the work on it is done");
    fill(&w, q, 8, 2, other);
    expect_later(&w, q, 8, 2, other);
    world_run(&w, other, SIZE_MAX);
    world_step(&w);
    world_audit(&w);
    give(&w, q, other);
    world_close(&w);
}

Test(streams, no_mark_is_recorded_on_the_next_stream_of_a_handle)
{
    a_mark_belongs_to_its_stream(VPMM_STREAMS_EAGER, false); /* in other modes it must be released first */
}
Test(streams, release_of_a_handle_that_came_back_gives_nothing)
{
    a_mark_belongs_to_its_stream(VPMM_STREAMS_CHECKED, true);
}

/* --- streams with names of their own --------------------------------------------------------------------------------
 */

Test(streams, zero_and_legacy_are_one_stream)
{
    struct setup setup = setup_with(VPMM_REUSE_COMPLETED);
    struct world w;
    world_open(&w, &setup);
    CUdeviceptr p = take(&w, 4, NULL);
    fill(&w, p, 4, 1, NULL);
    give(&w, p, NULL);
    CUdeviceptr q = take(&w, 4, CU_STREAM_LEGACY);
    cr_expect_eq(q, p);
    cr_expect_eq(stats_of(&w).hits_own_stream, 1);
    fill(&w, q, 4, 2, CU_STREAM_LEGACY);
    give(&w, q, CU_STREAM_LEGACY);
    world_close(&w);
}

struct default_stream_user {
    struct world *w;
    CUdeviceptr pointer;
    uint64_t own_before, own_after;
    bool good, keeps;
};

static void *use_per_thread_stream(void *argument)
{
    struct default_stream_user *u = argument;
    struct world *w = u->w;
    vpmm_stats stats;
    u->good = w->driver->cuCtxSetCurrent(w->context) == CUDA_SUCCESS &&
              vpmm_malloc(w->pool, 4 * PAGE, CU_STREAM_PER_THREAD, &u->pointer) == VPMM_SUCCESS &&
              w->driver->cuMemsetD2D32Async(u->pointer, PAGE, 1, 1, 4, CU_STREAM_PER_THREAD) == CUDA_SUCCESS;
    u->good = u->good && vpmm_free(w->pool, u->pointer, CU_STREAM_PER_THREAD) == VPMM_SUCCESS;
    u->good = u->good && vpmm_stats_get(w->pool, &stats) == VPMM_SUCCESS;
    u->own_before = stats.hits_own_stream;
    if (u->keeps)
        return NULL;
    CUdeviceptr again = 0;
    u->good = u->good && vpmm_malloc(w->pool, 4 * PAGE, CU_STREAM_PER_THREAD, &again) == VPMM_SUCCESS &&
              vpmm_free(w->pool, again, CU_STREAM_PER_THREAD) == VPMM_SUCCESS;
    u->good = u->good && vpmm_stats_get(w->pool, &stats) == VPMM_SUCCESS;
    u->own_after = stats.hits_own_stream;
    return NULL;
}

static void on_a_thread(void *(*function)(void *), void *argument)
{
    pthread_t thread;
    cr_assert_eq(pthread_create(&thread, NULL, function, argument), 0);
    pthread_join(thread, NULL);
}

Test(streams, the_per_thread_stream_is_another_one_in_each_thread)
{
    struct setup setup = setup_with(VPMM_REUSE_COMPLETED);
    struct world w;
    world_open(&w, &setup);
    CUdeviceptr p = take(&w, 4, CU_STREAM_PER_THREAD);
    fill(&w, p, 4, 1, CU_STREAM_PER_THREAD);
    give(&w, p, CU_STREAM_PER_THREAD);
    struct default_stream_user first = {.w = &w}, second = {.w = &w};
    on_a_thread(use_per_thread_stream, &first);
    cr_expect(first.good);
    cr_expect_neq(first.pointer, p, "the memory of this thread's stream goes to another thread's");
    cr_expect_eq(first.own_after, first.own_before + 1, "a thread's own stream is not its own");
    on_a_thread(use_per_thread_stream, &second);
    cr_expect(second.good);
    cr_expect_neq(second.pointer, p);
    world_audit(&w);
    cr_assert_eq(w.driver->cuCtxSynchronize(), CUDA_SUCCESS);
    world_drain(&w);
    world_close(&w);
}

Test(streams, threads_that_die_leave_their_memory_to_the_others, .timeout = 60)
{
    struct setup setup = setup_with(VPMM_REUSE_WAIT_DEVICE);
    setup.pool.max_mapped = 16 * PAGE;
    struct world w;
    world_open(&w, &setup);
    for (int i = 0; i < 200; i++) {
        struct default_stream_user user = {.w = &w, .keeps = i % 2 != 0};
        on_a_thread(use_per_thread_stream, &user);
        cr_assert(user.good, "thread %d: %s", i, vpmm_last_error());
        if (i % 8 == 0)
            must_work(vpmm_poll(w.pool));
    }
    cr_assert_eq(w.driver->cuCtxSynchronize(), CUDA_SUCCESS);
    world_audit(&w);
    CUstream s = world_stream(&w);
    give(&w, take(&w, 16, s), s);
    world_close(&w);
}

static void *use_its_own_stream(void *data)
{
    struct world *w = data;
    CUdeviceptr p;
    if (w->driver->cuCtxSetCurrent(w->context) == CUDA_SUCCESS &&
        vpmm_malloc(w->pool, PAGE, CU_STREAM_PER_THREAD, &p) == VPMM_SUCCESS)
        vpmm_free(w->pool, p, CU_STREAM_PER_THREAD);
    world_run(w, CU_STREAM_PER_THREAD, SIZE_MAX);
    return NULL;
}

/* That a thread has ended is seen a pass or two later. */
Test(streams, a_thread_s_record_is_another_s_after_its_end)
{
    enum { THREADS = 20, RECORDS = 6 };
    needs_simulator();
    struct world w;
    world_open(&w, NULL);
    for (int i = 0; i < THREADS; i++) {
        on_a_thread(use_its_own_stream, &w);
        world_drain(&w);
        must_work(vpmm_poll(w.pool));
    }
    uint32_t slots = load_acquire_u32(&w.pool->arena.streams.slots);
    cr_expect_leq(slots, RECORDS, "%u records", slots);
    world_close(&w);
}

/*
 * Nothing was looked for, so nothing is short: what the driver says of the stream is its refusal, whatever the number.
 */
Test(streams, a_stream_that_cannot_be_looked_at_is_no_shortage)
{
    static const char *const calls[] = {"cuStreamIsCapturing", "cuStreamGetId", "cuStreamGetCtx"};
    needs_simulator();
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        struct world w;
        CUdeviceptr p;
        world_open(&w, NULL);
        CUstream s = world_stream(&w);
        vpmm_sim_fail(w.sim, calls[i], 1, CUDA_ERROR_OUT_OF_MEMORY, false);
        must_fail(VPMM_ERROR_DRIVER, vpmm_malloc(w.pool, PAGE, s, &p));
        cr_expect_eq(stats_of(&w).failed_out_of_memory, 0, "%s", calls[i]);
        give(&w, take(&w, 1, s), s);
        world_close(&w);
    }
}

Test(streams, a_stream_of_another_device_is_refused)
{
    struct setup setup = setup_default();
    setup.sim.devices = 2;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUcontext other = NULL;
    cr_assert_eq(w.driver->cuDevicePrimaryCtxRetain(&other, 1), CUDA_SUCCESS);
    cr_assert_eq(w.driver->cuCtxSetCurrent(other), CUDA_SUCCESS);
    CUstream foreign = world_stream(&w);
    cr_assert_eq(w.driver->cuCtxSetCurrent(w.context), CUDA_SUCCESS);
    CUdeviceptr p = take(&w, 4, s), q = 0xdead;
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_malloc(w.pool, 4 * PAGE, foreign, &q));
    cr_expect_eq(q, 0xdead);
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_free(w.pool, p, foreign));
    cr_expect_eq(stats_of(&w).live_bytes, 4 * PAGE);
    world_audit(&w);
    give(&w, p, s);
    world_stream_destroy(&w, foreign);
    cr_assert_eq(w.driver->cuDevicePrimaryCtxRelease(1), CUDA_SUCCESS);
    world_close(&w);
}

Test(streams, a_stream_of_another_context_of_the_device_will_do)
{
    struct world w;
    world_open(&w, NULL);
    CUcontext second = NULL;
    cr_assert_eq(w.driver->cuCtxCreate(&second, 0, w.device), CUDA_SUCCESS);
    CUstream s = NULL;
    cr_assert_eq(w.driver->cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CUdeviceptr p = take(&w, 4, s);
    give(&w, p, s);
    CUdeviceptr q = take(&w, 4, s);
    cr_expect_eq(q, p);
    give(&w, q, s);
    world_audit(&w);
    must_work(vpmm_stream_release(w.pool, s));
    must_work(vpmm_pool_destroy(w.pool));
    w.pool = NULL;
    cr_assert_eq(w.driver->cuStreamDestroy(s), CUDA_SUCCESS);
    cr_assert_eq(w.driver->cuCtxDestroy(second), CUDA_SUCCESS);
    world_close(&w);
}

/* Memory freed in another context: this context's default stream waits, not that one's. */
static void a_default_stream_waits_itself(CUstream waiter)
{
    needs_simulator();
    struct setup setup = setup_with(VPMM_REUSE_WAIT_DEVICE);
    setup.pool.max_mapped = 8 * PAGE;
    struct world w;
    world_open(&w, &setup);
    CUcontext second = NULL;
    cr_assert_eq(w.driver->cuCtxCreate(&second, 0, w.device), CUDA_SUCCESS);
    CUstream foreign = world_stream(&w);
    CUdeviceptr p = take(&w, 8, foreign);
    fill(&w, p, 8, 1, foreign);
    give(&w, p, foreign);
    cr_assert_eq(w.driver->cuCtxSetCurrent(w.context), CUDA_SUCCESS);
    CUdeviceptr q = take(&w, 8, waiter);
    cr_expect_eq(q, p);
    cr_expect_eq(stats_of(&w).hits_waited, 1);
    fill(&w, q, 8, 2, waiter);
    expect_later(&w, q, 8, 2, waiter);
    cr_expect_eq(world_run(&w, waiter, SIZE_MAX), 0, "it does not wait for the other context's stream");
    world_step(&w);
    cr_assert_eq(w.driver->cuCtxSynchronize(), CUDA_SUCCESS);
    world_audit(&w);
    give(&w, q, waiter);
    must_work(vpmm_pool_destroy(w.pool));
    w.pool = NULL;
    world_stream_destroy(&w, foreign);
    cr_assert_eq(w.driver->cuCtxDestroy(second), CUDA_SUCCESS);
    world_close(&w);
}

Test(streams, the_legacy_stream_waits_for_another_context_s_stream)
{
    a_default_stream_waits_itself(NULL);
}
Test(streams, the_per_thread_stream_waits_for_another_context_s_stream)
{
    a_default_stream_waits_itself(CU_STREAM_PER_THREAD);
}

Test(streams, without_a_context_the_default_stream_is_the_primary_one_s)
{
    struct world w;
    world_open(&w, NULL);
    CUcontext current = w.context;
    cr_assert_eq(w.driver->cuCtxSetCurrent(NULL), CUDA_SUCCESS);
    CUdeviceptr p = take(&w, 4, NULL);
    give(&w, p, NULL);
    cr_assert_eq(w.driver->cuCtxGetCurrent(&current), CUDA_SUCCESS);
    cr_expect_null(current, "a context is left behind");
    cr_assert_eq(w.driver->cuCtxSetCurrent(w.context), CUDA_SUCCESS);
    CUdeviceptr q = take(&w, 4, NULL);
    cr_expect_eq(q, p);
    cr_expect_eq(stats_of(&w).hits_own_stream, 1);
    give(&w, q, NULL);
    world_audit(&w);
    world_close(&w);
}

/* Whatever the thread has current of another device: the pool's calls name its own device's stream. */
Test(streams, beside_another_device_s_context_the_default_stream_is_the_primary_one_s)
{
    enum { OTHER = 1 };
    struct setup setup = setup_default();
    setup.sim.devices = 2;
    struct world w;
    CUcontext other = NULL, current = NULL;
    world_open(&w, &setup);
    cr_assert_eq(w.driver->cuDevicePrimaryCtxRetain(&other, OTHER), CUDA_SUCCESS);
    CUdeviceptr p = take(&w, 4, NULL);
    cr_assert_eq(w.driver->cuCtxSetCurrent(other), CUDA_SUCCESS);
    give(&w, p, NULL);
    CUdeviceptr q = take(&w, 4, CU_STREAM_LEGACY);
    cr_expect_eq(q, p);
    cr_assert_eq(w.driver->cuCtxGetCurrent(&current), CUDA_SUCCESS);
    cr_expect_eq(current, other, "another context is left behind");
    give(&w, q, NULL);
    cr_assert_eq(w.driver->cuCtxSetCurrent(w.context), CUDA_SUCCESS);
    q = take(&w, 4, NULL);
    cr_expect_eq(q, p);
    cr_expect_eq(stats_of(&w).hits_own_stream, 2);
    fill(&w, q, 4, 1, NULL);
    give(&w, q, NULL);
    world_audit(&w);
    cr_assert_eq(w.driver->cuDevicePrimaryCtxRelease(OTHER), CUDA_SUCCESS);
    world_close(&w);
}

/* The program did all that it was asked to, and the pool goes on; by what the pool keeps it still learns of the end. */
Test(streams, a_context_destroyed_after_its_streams_does_not_lose_the_device)
{
    needs_simulator();
    struct setup setup = setup_with(VPMM_REUSE_COMPLETED);
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUcontext second = NULL;
    cr_assert_eq(w.driver->cuCtxCreate(&second, 0, w.device), CUDA_SUCCESS);
    CUstream foreign = world_stream(&w);
    CUdeviceptr p = take(&w, 8, foreign);
    give(&w, p, foreign);
    cr_assert_eq(w.driver->cuStreamSynchronize(foreign), CUDA_SUCCESS);
    must_work(vpmm_stream_release(w.pool, foreign));
    world_stream_destroy(&w, foreign);
    cr_assert_eq(w.driver->cuCtxDestroy(second), CUDA_SUCCESS);
    cr_assert_eq(w.driver->cuCtxSetCurrent(w.context), CUDA_SUCCESS);
    must_work(vpmm_poll(w.pool));
    CUdeviceptr q = take(&w, 8, s);
    cr_expect_eq(q, p, "what was freed in the context is not found again");
    give(&w, q, s);
    must_work(vpmm_check(w.pool));
    must_work(vpmm_pool_destroy(w.pool));
    world_stream_destroy(&w, s);
    cr_assert_eq(w.driver->cuDevicePrimaryCtxRelease(w.device), CUDA_SUCCESS);
    cr_expect_eq(vpmm_sim_races(w.sim), 0);
    cr_expect_eq(vpmm_sim_destroy(w.sim), 0); /* its misuses are the questions about what is destroyed */
}

/* --- other streams and threads free ---------------------------------------------------------------------------------
 */

Test(streams, free_on_another_stream)
{
    struct setup setup = setup_with(VPMM_REUSE_WAIT_DEVICE);
    struct world w;
    world_open(&w, &setup);
    CUstream a = world_stream(&w), b = world_stream(&w);
    CUdeviceptr p = take(&w, 4, a);
    fill(&w, p, 4, 1, a);
    order_after(&w, b, a);
    fill(&w, p, 4, 2, b);
    expect_later(&w, p, 4, 2, b);
    give(&w, p, b);
    CUdeviceptr q = take(&w, 4, b); /* b's own now */
    cr_expect_eq(q, p);
    cr_expect_eq(stats_of(&w).hits_own_stream, 1);
    fill(&w, q, 4, 3, b);
    give(&w, q, b);
    CUdeviceptr r = take(&w, 4, a);
    fill(&w, r, 4, 4, a);
    give(&w, r, a);
    world_audit(&w);
    world_close(&w);
}

/* Thread and stream pairs that come and go: each frees what the one before left to it. */
struct relay {
    struct world *w;
    CUstream stream;
    CUdeviceptr inherited, left;
    vpmm_status status;
};

static void *run_relay(void *argument)
{
    struct relay *r = argument;
    CUdeviceptr p = 0;
    r->status = r->inherited != 0 ? vpmm_free(r->w->pool, r->inherited, r->stream) : VPMM_SUCCESS;
    for (size_t i = 1; i <= 4 && r->status == VPMM_SUCCESS; i++) {
        r->status = vpmm_malloc(r->w->pool, i * PAGE, r->stream, &p);
        if (r->status == VPMM_SUCCESS)
            r->status = vpmm_free(r->w->pool, p, r->stream);
    }
    if (r->status == VPMM_SUCCESS)
        r->status = vpmm_malloc(r->w->pool, 3 * PAGE, r->stream, &r->left);
    return NULL;
}

Test(streams, hundreds_of_threads_come_and_go, .timeout = 60)
{
    struct world w;
    world_open(&w, NULL);
    CUstream s[3];
    for (int i = 0; i < 3; i++)
        s[i] = world_stream(&w);
    CUdeviceptr left = 0;
    for (int i = 0; i < 500; i++) {
        struct relay r = {.w = &w, .stream = s[i % 3], .inherited = left};
        if (i > 0)
            order_after(&w, s[i % 3], s[(i + 2) % 3]);
        on_a_thread(run_relay, &r);
        cr_assert_eq(r.status, VPMM_SUCCESS, "thread %d: %s", i, vpmm_status_name(r.status));
        left = r.left;
        if (i % 16 == 0)
            must_work(vpmm_poll(w.pool));
    }
    give(&w, left, s[499 % 3]);
    world_drain(&w);
    world_audit(&w);
    cr_expect_leq(stats_of(&w).mapped_bytes, 64 * PAGE, "each thread leaves something behind");
    world_close(&w);
}

struct worker {
    struct world *w;
    CUstream stream;
    uint32_t seed;
    int failures;
};

static void *work(void *argument)
{
    struct worker *worker = argument;
    CUdeviceptr p[8] = {0};
    for (uint32_t i = 0; i < 20000; i++) {
        worker->seed = worker->seed * 1664525 + 1013904223;
        uint32_t k = (worker->seed >> 10) % 8, pages = 1 + (worker->seed >> 20) % 8;
        if (p[k] != 0) {
            worker->failures += vpmm_free(worker->w->pool, p[k], worker->stream) != VPMM_SUCCESS;
            p[k] = 0;
        } else {
            worker->failures += vpmm_malloc(worker->w->pool, pages * PAGE, worker->stream, &p[k]) != VPMM_SUCCESS;
        }
    }
    for (int k = 0; k < 8; k++)
        if (p[k] != 0)
            worker->failures += vpmm_free(worker->w->pool, p[k], worker->stream) != VPMM_SUCCESS;
    return NULL;
}

Test(streams, four_threads_at_once, .timeout = 120)
{
    struct setup setup = setup_default();
    setup.sim.stepped = false;
    setup.pool.reaper = true;
    struct world w;
    world_open(&w, &setup);
    pthread_t thread[4];
    struct worker worker[4];
    for (uint32_t i = 0; i < 4; i++)
        worker[i] = (struct worker){.w = &w, .stream = world_stream(&w), .seed = i + 1};
    for (int i = 0; i < 4; i++)
        pthread_create(&thread[i], NULL, work, &worker[i]);
    for (int i = 0; i < 4; i++)
        pthread_join(thread[i], NULL);
    for (int i = 0; i < 4; i++)
        cr_expect_eq(worker[i].failures, 0);
    cr_expect_eq(stats_of(&w).live_bytes, 0);
    world_close(&w);
}

/* The last slot's number stands for no stream in the words of slabs: no record may have it. */
Test(streams, the_last_slot_is_no_stream_s)
{
    struct world w;
    world_open(&w, NULL);
    CUstream known = world_stream(&w), one_too_many = world_stream(&w);
    CUdeviceptr p = take(&w, 1, known), none = 0;
    uint32_t slots = atomic_exchange(&w.pool->arena.streams.slots, STREAM_NONE);
    must_fail(VPMM_ERROR_HOST_MEMORY, vpmm_malloc(w.pool, PAGE, one_too_many, &none));
    atomic_store(&w.pool->arena.streams.slots, slots);
    give(&w, p, known);
    world_close(&w);
}

/* What fence.h says of a record's numbers, and that nobody is inside a call: the audit looks. */
Test(streams, the_audit_looks_at_each_stream_s_numbers)
{
    struct world w;
    world_open(&w, NULL);
    CUstream s = world_stream(&w);
    give(&w, take(&w, 1, s), s);
    struct stream *stream = stream_at(&w.pool->arena.streams, 1);
    world_audit(&w);
    uint64_t published = atomic_load(&stream->published), recorded = atomic_load(&stream->recorded);
    atomic_store(&stream->recorded, published + 1);
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_check(w.pool));
    atomic_store(&stream->recorded, recorded);
    uint64_t completed = atomic_exchange(&stream->completed, recorded + 1);
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_check(w.pool));
    atomic_store(&stream->completed, completed);
    atomic_fetch_add(&stream->users, 1);
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_check(w.pool));
    atomic_fetch_sub(&stream->users, 1);
    world_audit(&w);
    world_close(&w);
}
