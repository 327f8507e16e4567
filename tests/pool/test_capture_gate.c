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

/* A world with an open gate, whose driver is watched, and two streams in it. */
struct scene {
    struct gate gate;
    vpmm_driver driver;
    struct world w;
    CUstream s, t;
};

static void open_watched(struct scene *scene, bool has_reaper)
{
    struct setup setup = gated(&scene->gate);
    setup.pool.reaper = has_reaper;
    world_open_without_pool(&scene->w, &setup);
    scene->driver = *scene->w.driver;
    scene->driver.cuStreamIsCapturing = watched_cuStreamIsCapturing;
    scene->driver.cuStreamGetId = watched_cuStreamGetId;
    scene->driver.cuEventRecord = watched_cuEventRecord;
    scene->driver.cuStreamWaitEvent = watched_cuStreamWaitEvent;
    setup.pool.driver = &scene->driver;
    memset(&watched, 0, sizeof watched);
    watched.real = scene->w.driver;
    watched.gate = &scene->gate;
    must_work(vpmm_pool_create(&setup.pool, &scene->w.pool));
    scene->s = watched.stream = world_stream(&scene->w);
    scene->t = world_stream(&scene->w);
}

static void close_watched(struct scene *scene)
{
    cr_expect_eq(watched.outside, 0);
    cr_expect_eq(scene->gate.entered, scene->gate.left);
    world_drain(&scene->w);
    world_audit(&scene->w);
    world_close(&scene->w);
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
    struct scene scene = {.w = {.sim = NULL}};
    open_watched(&scene, false);
    for (size_t i = 0; i < 8; i++) {
        leave_in_cache(&scene.w, scene.s, 1 + i % 4);
        CUdeviceptr p = take(&scene.w, 5 + i, scene.t);
        leave_in_cache(&scene.w, scene.s, 2);
        give(&scene.w, p, scene.t);
        if (i % 3 == 0)
            must_work(vpmm_poll(scene.w.pool));
        if (i % 4 == 3)
            must_work(vpmm_trim(scene.w.pool, 0, NULL));
        world_drain(&scene.w);
    }
    cr_expect_gt(watched.touched, 0);
    close_watched(&scene);
}

static void sleep_ms(long ms)
{
    nanosleep(&(struct timespec){.tv_nsec = ms * 1000000}, NULL);
}

/* It flushes the caches that nobody touches, and marks nothing of theirs. */
Test(capture_gate, the_pool_s_own_thread_does_not_enter)
{
    needs_simulator();
    struct scene scene = {.w = {.sim = NULL}};
    open_watched(&scene, true);
    give(&scene.w, take(&scene.w, 1, scene.t), scene.t);
    leave_in_cache(&scene.w, scene.s, 4);
    int entered = scene.gate.entered;
    for (int i = 0; i < 2000 && stats_of(&scene.w).cached_bytes; i++)
        sleep_ms(10);
    cr_expect_eq(stats_of(&scene.w).cached_bytes, 0);
    sleep_ms(20);
    cr_expect_eq(scene.gate.entered, entered);
    cr_expect_eq(watched.touched, 0);
    close_watched(&scene);
}

/* To record on the legacy stream destroys captures on others, and a per-thread one is its thread's: no gate helps. */
Test(capture_gate, default_streams_stay_their_own_calls)
{
    needs_simulator();
    struct scene scene = {.w = {.sim = NULL}};
    open_watched(&scene, false);
    leave_in_cache(&scene.w, NULL, 4);
    give(&scene.w, take(&scene.w, 5, scene.t), scene.t);
    cr_expect_eq(scene.gate.entered, 0);
    close_watched(&scene);
}

static CUstream new_stream(const struct world *w)
{
    CUstream stream;
    cr_assert_eq(w->driver->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    return stream;
}

/* A stream is destroyed without a word to the pool, and the next one has its handle. */
static void replace(const struct world *w, CUstream gone)
{
    cr_assert_eq(w->driver->cuStreamDestroy(gone), CUDA_SUCCESS);
    cr_assert_eq(new_stream(w), gone);
}

/* The next one's work says nothing of what the first one's memory waits for. */
Test(capture_gate, a_handle_that_is_another_stream_s_is_left_alone)
{
    needs_simulator();
    struct scene scene = {.w = {.sim = NULL}};
    open_watched(&scene, false);
    CUstream handle = watched.stream = new_stream(&scene.w);
    keep_busy(&scene.w, handle);
    leave_in_cache(&scene.w, handle, 4);
    replace(&scene.w, handle);
    for (size_t i = 0; i < 3; i++) {
        CUdeviceptr q = take(&scene.w, 4 + i, scene.t);
        fill(&scene.w, q, 4, 5, scene.t);
        give(&scene.w, q, scene.t);
        world_run(&scene.w, scene.t, SIZE_MAX);
    }
    cr_expect_gt(scene.gate.entered, 0);
    cr_expect_eq(watched.recorded, 0);
    cr_expect_eq(watched.outside, 0);
    world_drain(&scene.w);
    cr_assert_eq(scene.w.driver->cuStreamDestroy(handle), CUDA_SUCCESS);
    world_close(&scene.w); /* no race */
}

/* Once a call with the later stream has told: the record that the earlier one has left is of no stream. */
Test(capture_gate, nobody_asks_for_a_stream_that_is_known_to_be_gone)
{
    needs_simulator();
    struct scene scene = {.w = {.sim = NULL}};
    open_watched(&scene, false);
    CUstream handle = new_stream(&scene.w);
    leave_in_cache(&scene.w, handle, 4);
    replace(&scene.w, handle);
    CUdeviceptr p = take(&scene.w, 1, handle);
    give(&scene.w, take(&scene.w, 5, scene.t), scene.t);
    cr_expect_eq(scene.gate.entered + scene.gate.refused, 0);
    give(&scene.w, p, handle);
    must_work(vpmm_stream_release(scene.w.pool, handle));
    cr_assert_eq(scene.w.driver->cuStreamDestroy(handle), CUDA_SUCCESS);
    close_watched(&scene);
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
    must_work(vpmm_pool_create(&setup.pool, &w.pool));
    mapped_for_five(&w, world_stream(&w), world_stream(&w));
    cr_expect_eq(gate.entered + gate.refused, 0);
    world_close(&w);
}

/* ---- failures ---- */

/* Whichever call of the mark is refused, who has entered leaves, and what is not marked now is at the next request. */
static void refuse(const char *call, bool is_of_stream)
{
    struct scene scene = {.w = {.sim = NULL}};
    open_watched(&scene, false);
    struct world *w = &scene.w;
    give(w, take(w, 1, scene.t), scene.t);
    leave_in_cache(w, scene.s, 4);
    watched.refused = is_of_stream ? call : NULL;
    if (!is_of_stream)
        vpmm_sim_fail(w->sim, call, 1, CUDA_ERROR_OUT_OF_MEMORY, true);
    CUdeviceptr q = take(w, 3, scene.t);
    watched.refused = NULL;
    vpmm_sim_fail(w->sim, call, 0, CUDA_SUCCESS, false);
    cr_expect_gt(scene.gate.entered, 0, "%s", call);
    cr_expect_eq(scene.gate.entered, scene.gate.left, "%s", call);
    give(w, q, scene.t);
    world_drain(w);
    for (int i = 0; i < 2; i++) {
        give(w, take(w, 8, scene.t), scene.t); /* longer than anything that is free */
        world_drain(w);
    }
    cr_expect_leq(stats_of(w).peak_mapped_bytes, 12 * PAGE, "%s", call);
    close_watched(&scene);
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
