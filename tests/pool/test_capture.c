/*
 * Graph capture. While one thread captures, in any mode, other threads pass every tier of the pool, and the capture
 * ends valid. On the capturing stream itself the pool does nothing, and says so.
 */
#include "support.h"

#include <pthread.h>

#include <vpmm/observe.h>

struct user {
    struct world *w;
    CUstream a, b;
    const char *failed;
};

#define user_needs(u, condition)                                                                                       \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            (u)->failed = #condition;                                                                                  \
            return NULL;                                                                                               \
        }                                                                                                              \
    } while (0)

/* Own hit, completed, waited, build by creation and by moving, small, trim, poll, release: all of it. */
static void *pass_every_tier(void *argument)
{
    struct user *u = argument;
    struct world *w = u->w;
    vpmm_pool *pool = w->pool;
    vpmm_stats before, after;
    CUdeviceptr p[8], q = 0, r = 0;
    user_needs(u, w->driver->cuCtxSetCurrent(w->context) == CUDA_SUCCESS);
    user_needs(u, vpmm_stats_get(pool, &before) == VPMM_SUCCESS);
    for (int i = 0; i < 8; i++)
        user_needs(u, vpmm_malloc(pool, 4 * PAGE, u->a, &p[i]) == VPMM_SUCCESS);
    user_needs(u, write_later(w, p[0], 4, 1, u->a));
    user_needs(u, vpmm_free(pool, p[0], u->a) == VPMM_SUCCESS);
    user_needs(u, vpmm_malloc(pool, 4 * PAGE, u->a, &p[0]) == VPMM_SUCCESS); /* own */
    for (int i = 0; i < 8; i += 2)
        user_needs(u, vpmm_free(pool, p[i], u->a) == VPMM_SUCCESS);
    user_needs(u, vpmm_malloc(pool, 4 * PAGE, u->b, &q) == VPMM_SUCCESS); /* waited */
    user_needs(u, write_later(w, q, 4, 2, u->b));
    for (int i = 0; i < 4; i++) {
        world_run(w, u->a, SIZE_MAX);
        world_run(w, u->b, SIZE_MAX);
        user_needs(u, vpmm_poll(pool) == VPMM_SUCCESS);
    }
    user_needs(u, vpmm_malloc(pool, 4 * PAGE, u->b, &r) == VPMM_SUCCESS); /* completed */
    user_needs(u, vpmm_free(pool, r, u->b) == VPMM_SUCCESS);
    user_needs(u, vpmm_malloc(pool, 10 * PAGE, u->b, &r) == VPMM_SUCCESS); /* build */
    user_needs(u, vpmm_free(pool, r, u->b) == VPMM_SUCCESS);
    user_needs(u, vpmm_free(pool, q, u->b) == VPMM_SUCCESS);
    user_needs(u, vpmm_malloc(pool, 1000, u->a, &r) == VPMM_SUCCESS); /* small */
    user_needs(u, vpmm_free(pool, r, u->a) == VPMM_SUCCESS);
    for (int i = 1; i < 8; i += 2)
        user_needs(u, vpmm_free(pool, p[i], u->a) == VPMM_SUCCESS);
    user_needs(u, vpmm_stream_release(pool, u->a) == VPMM_SUCCESS);
    world_run(w, u->a, SIZE_MAX);
    world_run(w, u->b, SIZE_MAX);
    user_needs(u, vpmm_poll(pool) == VPMM_SUCCESS);
    user_needs(u, vpmm_trim(pool, 0, NULL) == VPMM_SUCCESS);
    user_needs(u, vpmm_poll(pool) == VPMM_SUCCESS);
    user_needs(u, vpmm_stats_get(pool, &after) == VPMM_SUCCESS);
    user_needs(u, after.hits_own_stream > before.hits_own_stream);
    user_needs(u, after.hits_waited > before.hits_waited);
    user_needs(u, after.hits_completed > before.hits_completed);
    user_needs(u, after.hits_async > before.hits_async);
    user_needs(u, after.builds > before.builds);
    user_needs(u, vpmm_check(pool) == VPMM_SUCCESS);
    return NULL;
}

static struct setup capture_setup(void)
{
    struct setup setup = setup_default();
    setup.pool.max_mapped = 40 * PAGE;
    setup.pool.extent_size = PAGE;
    setup.pool.small = VPMM_SMALL_ASYNC; /* one of the tiers that are passed */
    return setup;
}

static CUgraph end_capture(struct world *w, CUstream s)
{
    CUgraph graph = NULL;
    CUresult result = w->driver->cuStreamEndCapture(s, &graph);
    cr_assert_eq(result, CUDA_SUCCESS, "the capture is lost: %d", result);
    cr_assert_not_null(graph);
    return graph;
}

static void others_go_on(CUstreamCaptureMode mode, bool own_thread_too)
{
    struct setup setup = capture_setup();
    struct world w;
    world_open(&w, &setup);
    CUstream captured = world_stream(&w);
    struct user user = {.w = &w, .a = world_stream(&w), .b = world_stream(&w)};
    cr_assert_eq(w.driver->cuStreamBeginCapture(captured, mode), CUDA_SUCCESS);
    if (own_thread_too) {
        pass_every_tier(&user);
    } else {
        pthread_t thread;
        pthread_create(&thread, NULL, pass_every_tier, &user);
        pthread_join(thread, NULL);
    }
    cr_expect(user.failed == NULL, "%s: %s", user.failed, vpmm_last_error());
    CUgraph graph = end_capture(&w, captured);
    cr_assert_eq(w.driver->cuGraphDestroy(graph), CUDA_SUCCESS);
    world_drain(&w);
    world_audit(&w);
    world_close(&w);
}

Test(capture, others_go_on_beside_a_global_one)
{
    others_go_on(CU_STREAM_CAPTURE_MODE_GLOBAL, false);
}
Test(capture, others_go_on_beside_a_thread_local_one)
{
    others_go_on(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, false);
}
Test(capture, others_go_on_beside_a_relaxed_one)
{
    others_go_on(CU_STREAM_CAPTURE_MODE_RELAXED, false);
}
Test(capture, the_capturing_thread_goes_on_elsewhere_in_global_mode)
{
    others_go_on(CU_STREAM_CAPTURE_MODE_GLOBAL, true);
}
Test(capture, the_capturing_thread_goes_on_elsewhere_in_thread_local_mode)
{
    others_go_on(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, true);
}
Test(capture, the_capturing_thread_goes_on_elsewhere_in_relaxed_mode)
{
    others_go_on(CU_STREAM_CAPTURE_MODE_RELAXED, true);
}

/* What can be had by waiting for marks, and what the cap can never give, needs no synchronised context. */
static void shortage_costs_no_capture(size_t pages, vpmm_status want)
{
    struct setup setup = capture_setup();
    setup.pool.reuse = VPMM_REUSE_COMPLETED;
    struct world w;
    world_open(&w, &setup);
    CUstream captured = world_stream(&w), busy = world_stream(&w), asking = world_stream(&w);
    CUdeviceptr p = take(&w, 40, busy), q = 0;
    cr_assert_eq(w.driver->cuStreamBeginCapture(captured, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
    fill(&w, p, 40, 1, busy);
    give(&w, p, busy);
    vpmm_status status = vpmm_malloc(w.pool, pages * PAGE, asking, &q);
    cr_expect_eq(status, want, "%s", vpmm_status_name(status));
    if (status == VPMM_SUCCESS) {
        fill(&w, q, pages, 2, asking);
        give(&w, q, asking);
    }
    cr_assert_eq(w.driver->cuGraphDestroy(end_capture(&w, captured)), CUDA_SUCCESS);
    world_audit(&w);
    world_close(&w);
}

Test(capture, a_request_that_has_to_wait_costs_no_capture)
{
    shortage_costs_no_capture(40, VPMM_SUCCESS);
}
Test(capture, a_request_above_the_cap_costs_no_capture)
{
    shortage_costs_no_capture(41, VPMM_ERROR_OUT_OF_MEMORY);
}

static void capturing_stream_is_refused(CUstreamCaptureMode mode)
{
    struct world w;
    world_open(&w, NULL);
    CUstream s = world_stream(&w);
    CUdeviceptr p = take(&w, 4, s), q = 0xdead, small = take_bytes(&w, 100, s);
    give(&w, take(&w, 2, s), s); /* free memory of the stream's own, too */
    vpmm_stats before = stats_of(&w);
    cr_assert_eq(w.driver->cuStreamBeginCapture(s, mode), CUDA_SUCCESS);
    must_fail(VPMM_ERROR_NOT_SUPPORTED, vpmm_malloc(w.pool, 2 * PAGE, s, &q));
    must_fail(VPMM_ERROR_NOT_SUPPORTED, vpmm_malloc(w.pool, 50 * PAGE, s, &q));
    must_fail(VPMM_ERROR_NOT_SUPPORTED, vpmm_malloc(w.pool, 100, s, &q));
    must_fail(VPMM_ERROR_NOT_SUPPORTED, vpmm_free(w.pool, p, s));
    must_fail(VPMM_ERROR_NOT_SUPPORTED, vpmm_free(w.pool, small, s));
    must_fail(VPMM_ERROR_NOT_SUPPORTED, vpmm_stream_release(w.pool, s));
    cr_expect_eq(q, 0xdead);
    CUgraph graph = end_capture(&w, s);
    vpmm_stats after = stats_of(&w);
    cr_expect_eq(after.live_bytes, before.live_bytes);
    cr_expect_eq(after.mapped_bytes, before.mapped_bytes);
    cr_expect_eq(after.async_bytes, before.async_bytes);
    cr_expect_eq(after.mallocs, before.mallocs);
    cr_expect_eq(after.frees, before.frees);
    world_audit(&w);
    cr_assert_eq(w.driver->cuGraphDestroy(graph), CUDA_SUCCESS);
    give(&w, p, s);
    give(&w, small, s);
    world_close(&w);
}

Test(capture, the_stream_itself_is_refused_in_global_mode)
{
    capturing_stream_is_refused(CU_STREAM_CAPTURE_MODE_GLOBAL);
}
Test(capture, the_stream_itself_is_refused_in_thread_local_mode)
{
    capturing_stream_is_refused(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
}
Test(capture, the_stream_itself_is_refused_in_relaxed_mode)
{
    capturing_stream_is_refused(CU_STREAM_CAPTURE_MODE_RELAXED);
}

/* Also where nothing of it needs an event any more: the release is one of the calls with the stream. */
Test(capture, a_release_of_a_capturing_stream_is_refused_whatever_it_has_left)
{
    struct world w;
    world_open(&w, NULL);
    CUstream s = world_stream(&w);
    CUdeviceptr p = take(&w, 4, s);
    give(&w, take(&w, 2, s), s);
    world_drain(&w);
    cr_assert_eq(w.driver->cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
    must_fail(VPMM_ERROR_NOT_SUPPORTED, vpmm_stream_release(w.pool, s));
    cr_assert_eq(w.driver->cuGraphDestroy(end_capture(&w, s)), CUDA_SUCCESS);
    give(&w, p, s); /* it is as it was */
    must_work(vpmm_stream_release(w.pool, s));
    world_drain(&w);
    world_audit(&w);
    world_close(&w);
}

/* Whether a hit looks for a capture before it asks anything: a build with checks. */
#ifdef VPMM_DEBUG_CHECKS
enum { LOOKS_FIRST = true };
#else
enum { LOOKS_FIRST = false };
#endif

/* The question for the stream's id ends the capture; who looks at the calls sees that it has failed. */
Test(capture, a_hit_that_ends_a_capture_is_counted)
{
    needs_simulator();
    struct setup setup = setup_default();
    struct world w;
    vpmm_call_counts calls[VPMM_DRIVER_CALLS];
    CUdeviceptr p;
    CUgraph graph = NULL;
    uint64_t failed = 0;
    setup.pool.cache_bytes = 8 * PAGE;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    give(&w, take(&w, 1, s), s);
    cr_assert_eq(w.driver->cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    cr_assert_neq(vpmm_malloc(w.pool, PAGE, s, &p), VPMM_SUCCESS);
    must_work(vpmm_calls_get(w.pool, calls));
    for (int i = 0; i < VPMM_DRIVER_CALLS; i++)
        if (strcmp(calls[i].call, "cuStreamGetId") == 0)
            failed = calls[i].failed;
    cr_expect_eq(failed > 0, !LOOKS_FIRST);
    CUresult ended = w.driver->cuStreamEndCapture(s, &graph);
    cr_expect_eq(ended == CUDA_SUCCESS, LOOKS_FIRST);
    if (ended == CUDA_SUCCESS)
        cr_expect_eq(w.driver->cuGraphDestroy(graph), CUDA_SUCCESS);
    world_close(&w);
}

/* A hit looks for no capture: a malloc of a trusted stream, and a free of any; and it leaves the capture as it is. */
static void hits_on_a_capturing_stream(vpmm_streams streams)
{
    needs_simulator();
    struct setup setup = setup_default();
    struct world w;
    CUdeviceptr p = 0;
    setup.pool.cache_bytes = 8 * PAGE;
    setup.pool.streams = streams;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    give(&w, take(&w, 1, s), s); /* the thread has a cache of the stream */
    CUdeviceptr live = take(&w, 1, s);
    give(&w, take(&w, 2, s), s);
    vpmm_stats before = stats_of(&w);
    cr_assert_eq(w.driver->cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
    vpmm_status freed = vpmm_free(w.pool, live, s), taken = VPMM_ERROR_NOT_SUPPORTED;
    if (streams == VPMM_STREAMS_TRUSTED)
        taken = vpmm_malloc(w.pool, 2 * PAGE, s, &p);
    cr_assert_eq(w.driver->cuGraphDestroy(end_capture(&w, s)), CUDA_SUCCESS);
    vpmm_stats after = stats_of(&w);
    bool hits = !LOOKS_FIRST;
    cr_expect_eq(freed, hits ? VPMM_SUCCESS : VPMM_ERROR_NOT_SUPPORTED, "%s", vpmm_status_name(freed));
    cr_expect_eq(after.frees_cache - before.frees_cache, hits);
    cr_expect_eq(taken, hits && streams == VPMM_STREAMS_TRUSTED ? VPMM_SUCCESS : VPMM_ERROR_NOT_SUPPORTED, "%s",
                 vpmm_status_name(taken));
    cr_expect_eq(after.hits_cache - before.hits_cache, hits && streams == VPMM_STREAMS_TRUSTED);
    if (freed != VPMM_SUCCESS)
        give(&w, live, s);
    if (taken == VPMM_SUCCESS)
        give(&w, p, s);
    world_drain(&w);
    world_audit(&w);
    world_close(&w);
}

Test(capture, a_free_that_hits_looks_for_none)
{
    hits_on_a_capturing_stream(VPMM_STREAMS_CHECKED);
}
Test(capture, hits_of_a_trusted_stream_look_for_none)
{
    hits_on_a_capturing_stream(VPMM_STREAMS_TRUSTED);
}

/* What goes past the cache sees the capture of a stream that the default one would wait for. */
Test(capture, a_default_stream_with_a_cache_is_refused_past_it)
{
    struct setup setup = setup_default();
    struct world w;
    CUstream blocking;
    CUdeviceptr q = 0xdead;
    setup.pool.cache_bytes = 8 * PAGE;
    world_open(&w, &setup);
    cr_assert_eq(w.driver->cuStreamCreate(&blocking, CU_STREAM_DEFAULT), CUDA_SUCCESS);
    CUdeviceptr more = take(&w, 9, NULL);
    give(&w, take(&w, 1, NULL), NULL);
    cr_assert_eq(w.driver->cuStreamBeginCapture(blocking, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    must_fail(VPMM_ERROR_NOT_SUPPORTED, vpmm_malloc(w.pool, 2 * PAGE, NULL, &q));
    must_fail(VPMM_ERROR_NOT_SUPPORTED, vpmm_malloc(w.pool, 100, NULL, &q));
    must_fail(VPMM_ERROR_NOT_SUPPORTED, vpmm_free(w.pool, more, NULL)); /* too long for the cache */
    must_fail(VPMM_ERROR_NOT_SUPPORTED, vpmm_use(w.pool, more, NULL));
    must_fail(VPMM_ERROR_NOT_SUPPORTED, vpmm_stream_release(w.pool, NULL));
    cr_expect_eq(q, 0xdead);
    cr_assert_eq(w.driver->cuGraphDestroy(end_capture(&w, blocking)), CUDA_SUCCESS);
    cr_assert_eq(w.driver->cuStreamDestroy(blocking), CUDA_SUCCESS);
    give(&w, more, NULL);
    world_drain(&w);
    world_audit(&w);
    world_close(&w);
}

/* Memory that was freed on a stream before it began to capture, and not yet marked: it waits for the capture's end. */
Test(capture, memory_freed_before_the_capture_comes_back_after_it)
{
    struct setup setup = setup_default();
    setup.pool.reuse = VPMM_REUSE_COMPLETED;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w), other = world_stream(&w);
    CUdeviceptr p = take(&w, 4, s);
    fill(&w, p, 4, 1, s);
    give(&w, p, s);
    cr_assert_eq(w.driver->cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
    must_work(vpmm_poll(w.pool));
    CUdeviceptr q = take(&w, 4, other);
    fill(&w, q, 4, 2, other);
    CUgraph graph = end_capture(&w, s);
    cr_assert_eq(w.driver->cuGraphDestroy(graph), CUDA_SUCCESS);
    world_drain(&w);
    CUdeviceptr r = take(&w, 4, other);
    cr_expect_eq(r, p);
    fill(&w, r, 4, 3, other);
    give(&w, q, other);
    give(&w, r, other);
    world_audit(&w);
    world_close(&w);
}
