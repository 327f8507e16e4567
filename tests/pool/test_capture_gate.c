/*
 * The capture gate: what lies freed on a stream that nobody calls with any more comes into others' reach, and only
 * while the program says so is another's stream touched.
 */
#include "support.h"

#include <time.h>

/* The program's gate: who is inside, and of which stream. */
struct gate {
    bool is_shut;
    atomic_int entered, left, refused;
    _Atomic(CUstream) inside;
};

static bool gate_enter(void *data, CUstream stream)
{
    struct gate *gate = data;
    if (gate->is_shut) {
        gate->refused++;
        return false;
    }
    gate->entered++;
    gate->inside = stream;
    return true;
}

static void gate_leave(void *data, CUstream stream)
{
    struct gate *gate = data;
    gate->left += gate->inside == stream;
    gate->inside = NULL;
}

static struct setup gated(struct gate *gate)
{
    struct setup setup = setup_default();
    setup.pool.cache_bytes = 16 * PAGE;
    setup.pool.extent_size = PAGE;
    setup.pool.reuse = VPMM_REUSE_COMPLETED;
    setup.pool.captures = true;
    if (gate)
        setup.pool.capture_gate = (vpmm_capture_gate){gate_enter, gate_leave, gate};
    return setup;
}

/* Of a pool in which s has freed four pages, long ago, and calls no more: what it holds when t has five. */
static uint64_t mapped_for_five(struct world *w, CUstream s, CUstream t)
{
    CUdeviceptr p = take(w, 4, s);
    fill(w, p, 4, 4, s);
    expect_later(w, p, 4, 4, s);
    give(w, p, s);
    world_drain(w);
    for (int i = 0; i < 2; i++) { /* the first of them finds what has no mark yet */
        CUdeviceptr q = take(w, 5 + (size_t)i, t);
        fill(w, q, 5, 5, t);
        expect_later(w, q, 5, 5, t);
        give(w, q, t);
        world_drain(w);
    }
    return stats_of(w).peak_mapped_bytes / PAGE;
}

static uint64_t mapped_behind(struct gate *gate)
{
    struct setup setup = gated(gate);
    struct world w;
    world_open(&w, &setup);
    uint64_t pages = mapped_for_five(&w, world_stream(&w), world_stream(&w));
    world_audit(&w);
    world_close(&w);
    return pages;
}

Test(capture_gate, what_a_stream_has_left_in_a_cache_serves_another)
{
    needs_simulator();
    struct gate gate = {.is_shut = false};
    uint64_t without = mapped_behind(NULL), with = mapped_behind(&gate);
    cr_expect_lt(with, without, "%d pages with a gate, %d without one", (int)with, (int)without);
    cr_expect_gt(gate.entered, 0);
    cr_expect_eq(gate.entered, gate.left);
}

Test(capture_gate, a_shut_one_is_as_none)
{
    needs_simulator();
    struct gate gate = {.is_shut = true};
    cr_expect_eq(mapped_behind(&gate), mapped_behind(NULL));
    cr_expect_gt(gate.refused, 0);
}

/* ---- nobody touches a stream outside ---- */

static struct {
    const vpmm_driver *real;
    const struct gate *gate;
    CUstream stream;
    atomic_bool is_given; /* the stream, to a call that is under way */
    const char *refused;  /* to others; NULL: nothing */
    atomic_int touched, outside, recorded;
} watched;

/* True: the call is to be refused. */
static bool look(const char *call, CUstream stream)
{
    if (stream != watched.stream || watched.is_given)
        return false;
    watched.touched++;
    watched.outside += watched.gate->inside != stream;
    watched.recorded += strcmp(call, "cuEventRecord") == 0;
    return watched.refused && strcmp(call, watched.refused) == 0;
}

static CUresult CUDAAPI watched_cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status)
{
    return look("cuStreamIsCapturing", stream) ? CUDA_ERROR_OUT_OF_MEMORY
                                               : watched.real->cuStreamIsCapturing(stream, status);
}

static CUresult CUDAAPI watched_cuStreamGetId(CUstream stream, unsigned long long *id)
{
    return look("cuStreamGetId", stream) ? CUDA_ERROR_OUT_OF_MEMORY : watched.real->cuStreamGetId(stream, id);
}

static CUresult CUDAAPI watched_cuEventRecord(CUevent event, CUstream stream)
{
    return look("cuEventRecord", stream) ? CUDA_ERROR_OUT_OF_MEMORY : watched.real->cuEventRecord(event, stream);
}

static CUresult CUDAAPI watched_cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags)
{
    return look("cuStreamWaitEvent", stream) ? CUDA_ERROR_OUT_OF_MEMORY
                                             : watched.real->cuStreamWaitEvent(stream, event, flags);
}

static void watch(struct world *w, struct setup *setup, struct gate *gate, vpmm_driver *driver)
{
    world_open_without_pool(w, setup);
    *driver = *w->driver;
    driver->cuStreamIsCapturing = watched_cuStreamIsCapturing;
    driver->cuStreamGetId = watched_cuStreamGetId;
    driver->cuEventRecord = watched_cuEventRecord;
    driver->cuStreamWaitEvent = watched_cuStreamWaitEvent;
    setup->pool.driver = driver;
    memset(&watched, 0, sizeof watched);
    watched.real = w->driver;
    watched.gate = gate;
    cr_assert_eq(vpmm_pool_create(&setup->pool, &w->pool), VPMM_SUCCESS, "%s", vpmm_last_error());
}

/* Into the front cache; the call is given the stream. */
static void leave_in_cache(struct world *w, CUstream s, size_t pages)
{
    watched.is_given = true;
    CUdeviceptr p = take(w, pages, s);
    fill(w, p, pages, 1, s);
    give(w, p, s);
    watched.is_given = false;
}

/* Builds, trims and polls, given another stream, beside what was left in the cache of one. */
Test(capture_gate, calls_with_other_streams_stay_outside_but_inside_it)
{
    needs_simulator();
    struct gate gate = {.is_shut = false};
    struct setup setup = gated(&gate);
    vpmm_driver driver;
    struct world w;
    watch(&w, &setup, &gate, &driver);
    CUstream s = world_stream(&w), t = world_stream(&w);
    watched.stream = s;
    for (size_t i = 0; i < 8; i++) {
        leave_in_cache(&w, s, 1 + i % 4);
        CUdeviceptr p = take(&w, 5 + i, t);
        leave_in_cache(&w, s, 2);
        give(&w, p, t);
        if (i % 3 == 0)
            cr_expect_eq(vpmm_poll(w.pool), VPMM_SUCCESS);
        if (i % 4 == 3)
            cr_expect_eq(vpmm_trim(w.pool, 0, NULL), VPMM_SUCCESS);
        world_drain(&w);
    }
    cr_expect_gt(watched.touched, 0);
    cr_expect_eq(watched.outside, 0);
    cr_expect_eq(gate.entered, gate.left);
    world_drain(&w);
    world_audit(&w);
    world_close(&w);
}

static void sleep_ms(long ms)
{
    nanosleep(&(struct timespec){.tv_nsec = ms * 1000000}, NULL);
}

/* It flushes the caches that nobody touches, and marks nothing of theirs. */
Test(capture_gate, the_pool_s_own_thread_does_not_enter)
{
    needs_simulator();
    struct gate gate = {.is_shut = false};
    struct setup setup = gated(&gate);
    setup.pool.reaper = true;
    vpmm_driver driver;
    struct world w;
    watch(&w, &setup, &gate, &driver);
    CUstream s = world_stream(&w), t = world_stream(&w);
    watched.stream = s;
    give(&w, take(&w, 1, t), t);
    leave_in_cache(&w, s, 4);
    int entered = gate.entered;
    for (int i = 0; i < 100 && stats_of(&w).cached_bytes; i++)
        sleep_ms(10);
    cr_expect_eq(stats_of(&w).cached_bytes, 0);
    sleep_ms(20);
    cr_expect_eq(gate.entered, entered);
    cr_expect_eq(watched.touched, 0);
    world_drain(&w);
    world_close(&w);
}

/* To record on the legacy stream destroys captures on others, and a per-thread one is its thread's: no gate helps. */
Test(capture_gate, default_streams_stay_their_own_calls)
{
    needs_simulator();
    struct gate gate = {.is_shut = false};
    struct setup setup = gated(&gate);
    vpmm_driver driver;
    struct world w;
    watch(&w, &setup, &gate, &driver);
    CUstream t = world_stream(&w);
    leave_in_cache(&w, NULL, 4);
    give(&w, take(&w, 5, t), t);
    cr_expect_eq(gate.entered, 0);
    world_drain(&w);
    world_close(&w);
}

/* A stream that was destroyed without a word, and whose handle another one has by now: that one's work is not its own. */
Test(capture_gate, a_handle_that_is_another_stream_s_is_left_alone)
{
    needs_simulator();
    struct gate gate = {.is_shut = false};
    struct setup setup = gated(&gate);
    vpmm_driver driver;
    struct world w;
    watch(&w, &setup, &gate, &driver);
    CUstream gone, next, t = world_stream(&w);
    cr_assert_eq(w.driver->cuStreamCreate(&gone, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    keep_busy(&w, gone);
    CUdeviceptr p = take(&w, 4, gone);
    fill(&w, p, 4, 4, gone);
    give(&w, p, gone);
    cr_assert_eq(w.driver->cuStreamDestroy(gone), CUDA_SUCCESS);
    cr_assert_eq(w.driver->cuStreamCreate(&next, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    cr_assert_eq(next, gone);
    watched.stream = next;
    watched.refused = NULL;
    for (size_t i = 0; i < 3; i++) {
        CUdeviceptr q = take(&w, 4 + i, t);
        fill(&w, q, 4, 5, t);
        give(&w, q, t);
        world_run(&w, t, SIZE_MAX);
    }
    cr_expect_gt(gate.entered, 0);
    cr_expect_eq(watched.recorded, 0);
    world_drain(&w);
    cr_assert_eq(w.driver->cuStreamDestroy(next), CUDA_SUCCESS);
    world_close(&w); /* no race */
}

/* Once a call with the later stream has told: the record that the earlier one has left is of no stream. */
Test(capture_gate, nobody_asks_for_a_stream_that_is_known_to_be_gone)
{
    needs_simulator();
    struct gate gate = {.is_shut = false};
    struct setup setup = gated(&gate);
    struct world w;
    world_open(&w, &setup);
    CUstream gone, next, t = world_stream(&w);
    cr_assert_eq(w.driver->cuStreamCreate(&gone, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    give(&w, take(&w, 4, gone), gone);
    cr_assert_eq(w.driver->cuStreamDestroy(gone), CUDA_SUCCESS);
    cr_assert_eq(w.driver->cuStreamCreate(&next, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    cr_assert_eq(next, gone);
    CUdeviceptr p = take(&w, 1, next);
    give(&w, take(&w, 5, t), t);
    cr_expect_eq(gate.entered + gate.refused, 0);
    give(&w, p, next);
    must_work(vpmm_stream_release(w.pool, next));
    cr_assert_eq(w.driver->cuStreamDestroy(next), CUDA_SUCCESS);
    world_drain(&w);
    world_close(&w);
}

/* Before CUDA 12 such a handle cannot be told from the stream's own. */
Test(capture_gate, without_ids_nobody_asks)
{
    needs_simulator();
    struct gate gate = {.is_shut = false};
    struct setup setup = gated(&gate);
    struct world w;
    world_open_without_pool(&w, &setup);
    vpmm_driver driver = *w.driver;
    driver.cuStreamGetId = NULL;
    setup.pool.driver = &driver;
    cr_assert_eq(vpmm_pool_create(&setup.pool, &w.pool), VPMM_SUCCESS, "%s", vpmm_last_error());
    mapped_for_five(&w, world_stream(&w), world_stream(&w));
    cr_expect_eq(gate.entered + gate.refused, 0);
    world_close(&w);
}

/* ---- failures ---- */

/* Whichever call of the mark is refused, who has entered leaves, and what is not marked now is at the next request. */
static void refuse(const char *call, bool is_of_stream)
{
    struct gate gate = {.is_shut = false};
    struct setup setup = gated(&gate);
    vpmm_driver driver;
    struct world w;
    watch(&w, &setup, &gate, &driver);
    CUstream s = world_stream(&w), t = world_stream(&w);
    watched.stream = s;
    give(&w, take(&w, 1, t), t);
    leave_in_cache(&w, s, 4);
    watched.refused = is_of_stream ? call : NULL;
    if (!is_of_stream)
        vpmm_sim_fail(w.sim, call, 1, CUDA_ERROR_OUT_OF_MEMORY, true);
    CUdeviceptr q = take(&w, 3, t);
    watched.refused = NULL;
    vpmm_sim_fail(w.sim, call, 0, CUDA_SUCCESS, false);
    cr_expect_gt(gate.entered, 0, "%s", call);
    cr_expect_eq(gate.entered, gate.left, "%s", call);
    give(&w, q, t);
    world_drain(&w);
    for (int i = 0; i < 2; i++) {
        give(&w, take(&w, 8, t), t); /* longer than anything that is free */
        world_drain(&w);
    }
    cr_expect_leq(stats_of(&w).peak_mapped_bytes, 12 * PAGE, "%s", call);
    cr_expect_eq(watched.outside, 0);
    world_audit(&w);
    world_close(&w);
}

Test(capture_gate, is_left_whatever_the_driver_refuses)
{
    needs_simulator();
    refuse("cuStreamIsCapturing", true);
    refuse("cuEventRecord", true);
    refuse("cuEventCreate", false);
}

Test(capture_gate, has_both_functions_or_none)
{
    needs_simulator();
    struct gate gate = {.is_shut = false};
    struct setup setup = gated(&gate);
    struct world w;
    vpmm_pool *pool = NULL;
    world_open_without_pool(&w, &setup);
    setup.pool.driver = w.driver;
    setup.pool.capture_gate.leave = NULL;
    cr_expect_eq(vpmm_pool_create(&setup.pool, &pool), VPMM_ERROR_INVALID_VALUE);
    cr_expect(strstr(vpmm_last_error(), "capture_gate"), "%s", vpmm_last_error());
    setup.pool.capture_gate = (vpmm_capture_gate){NULL, gate_leave, &gate};
    cr_expect_eq(vpmm_pool_create(&setup.pool, &pool), VPMM_ERROR_INVALID_VALUE);
    cr_expect_null(pool);
    world_close(&w);
}
