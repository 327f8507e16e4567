/*
 * What an attack on the public functions found in the first version, where streams, threads and captures meet. The
 * orders of two threads are in test_schedules.c; here one thread does each step, and a driver table begins a capture,
 * or looks at a handle, in the midst of a call.
 */
#include "pool/pool.h"
#include "support.h"

#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>

/* --- eager streams: nothing is done with a handle after the call that took it -------------------------------------- */

static struct setup eager_setup(void)
{
    struct setup setup = setup_default();
    setup.pool.streams = VPMM_STREAMS_EAGER;
    setup.pool.extent_size = PAGE; /* so that a trim can give all back */
    return setup;
}

static CUstream replaced(struct world *w, CUstream s)
{
    world_stream_destroy(w, s);
    return world_stream(w);
}

/* All that was allocated has been freed, and its streams are gone: the pool finds all of it when the work has ended. */
static void nothing_is_stranded(struct world *w)
{
    must_work(vpmm_trim(w->pool, 0, NULL)); /* marks what lies in caches; its events pass as the streams are stepped */
    world_drain(w);
    world_audit(w);
    must_work(vpmm_trim(w->pool, 0, NULL));
    cr_expect_eq(stats_of(w).mapped_bytes, 0, "%llu bytes are stranded", (unsigned long long)stats_of(w).mapped_bytes);
}

Test(sound, eager_01_each_free_is_marked_however_many_are_outstanding)
{
    enum { BLOCKS = 200 };
    needs_simulator(); /* a real stream that is held does not take so much work */
    struct setup setup = eager_setup();
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr p[BLOCKS];
    for (int i = 0; i < BLOCKS; i++)
        p[i] = take(&w, 1, s);
    for (int i = 0; i < BLOCKS; i++) {
        fill(&w, p[i], 1, (uint32_t)i, s);
        expect_later(&w, p[i], 1, (uint32_t)i, s);
        give(&w, p[i], s);
    }
    s = replaced(&w, s);
    must_work(vpmm_poll(w.pool));
    CUdeviceptr q = take(&w, 4, s); /* the handle is another stream's now: what the old one uses is not its own */
    fill(&w, q, 4, 1000, s);
    expect_later(&w, q, 4, 1000, s);
    give(&w, q, s);
    s = replaced(&w, s);
    nothing_is_stranded(&w);
    world_close(&w);
}

/* A slab is cut from memory that the stream has to wait for, and has a fence of its own behind that wait. */
Test(sound, eager_01_a_malloc_leaves_no_fence_unmarked)
{
    static const size_t sizes[] = {1000, 3 * PAGE, PAGE / 4};
    needs_simulator(); /* streams are destroyed with work that is held back */
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        struct setup setup = eager_setup();
        setup.pool.max_mapped = 4 * PAGE; /* so that nothing is created beside it */
        struct world w;
        world_open(&w, &setup);
        CUstream s = world_stream(&w), t = world_stream(&w);
        CUdeviceptr p[4];
        for (int j = 0; j < 4; j++)
            p[j] = take(&w, 1, s);
        keep_busy(&w, s);
        for (int j = 0; j < 4; j++)
            give(&w, p[j], s);
        CUdeviceptr q = take_bytes(&w, sizes[i], t);
        cr_expect(!streams_unmarkable(&w.pool->arena.streams), "a malloc of %zu bytes leaves a fence unmarked",
                  sizes[i]);
        t = replaced(&w, t);
        s = replaced(&w, s);
        must_work(vpmm_poll(w.pool));
        order_after(&w, t, s);
        give(&w, q, t);
        t = replaced(&w, t);
        nothing_is_stranded(&w);
        world_close(&w);
    }
}

/* The simulator reports the use of a destroyed stream by name, which fails the test in world_close. */
Test(sound, eager_01_the_driver_s_pool_needs_no_handle_later)
{
    needs_simulator(); /* a real GPU's work is held back, and destroy waits for it */
    struct setup setup = eager_setup();
    setup.pool.small = VPMM_SMALL_ASYNC;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr p = take_bytes(&w, 1000, s), q = take(&w, 2, s);
    keep_busy(&w, s);
    give(&w, p, s);
    give(&w, q, s);
    world_stream_destroy(&w, s);
    must_work(vpmm_poll(w.pool));
    must_work(vpmm_pool_destroy(w.pool));
    w.pool = NULL;
    world_close(&w);
}

Test(sound, eager_01_is_refused_where_streams_have_no_id)
{
    needs_simulator();
    struct setup setup = eager_setup();
    struct world w;
    world_open_without_pool(&w, &setup);
    vpmm_driver driver = *w.driver;
    driver.cuStreamGetId = NULL;
    setup.pool.driver = &driver;
    must_fail(VPMM_ERROR_NOT_SUPPORTED, vpmm_pool_create(&setup.pool, &w.pool));
    cr_expect(strstr(vpmm_last_error(), "cuStreamGetId") != NULL, "%s", vpmm_last_error());
    world_close(&w);
}

/* --- a release that the driver refuses ----------------------------------------------------------------------------- */

static void refused_release(size_t cache_bytes)
{
    needs_simulator();
    struct setup setup = setup_default();
    setup.pool.cache_bytes = cache_bytes;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr p = take(&w, 2, s), q = take(&w, 2, s);
    keep_busy(&w, s);
    vpmm_sim_fail(w.sim, "cuEventRecord", 1, CUDA_ERROR_OUT_OF_MEMORY, true);
    give(&w, p, s);
    must_fail(VPMM_ERROR_DRIVER, vpmm_stream_release(w.pool, s));
    give(&w, q, s); /* the stream is as it was */
    vpmm_sim_fail(w.sim, "cuEventRecord", 0, CUDA_SUCCESS, false);
    must_work(vpmm_stream_release(w.pool, s));
    cr_expect(!streams_unmarked(&w.pool->arena.streams) && !streams_unmarkable(&w.pool->arena.streams));
    world_stream_destroy(&w, s);
    world_drain(&w);
    world_close(&w);
}

Test(sound, release_04_refused_may_be_tried_again)
{
    refused_release(0);
    refused_release(16 * PAGE);
}

/* --- captures that begin in the midst of a call ---------------------------------------------------------------------
 */

enum moment { BEFORE_IT, AFTER_IT, AROUND_IT };

/* The program's other thread: begins a capture on `stream` as the library's next call of the entry comes by. */
static struct {
    const vpmm_driver *real;
    CUstream stream;
    const char *entry;
    enum moment moment;
    bool armed, begun;
    CUgraph graph;
} program;

static void begin_capture(void)
{
    program.begun = program.real->cuStreamBeginCapture(program.stream, CU_STREAM_CAPTURE_MODE_RELAXED) == CUDA_SUCCESS;
}

static bool comes_by(const char *entry, CUstream stream)
{
    if (!program.armed || stream != program.stream || strcmp(entry, program.entry) != 0)
        return false;
    program.armed = false;
    return true;
}

static CUresult end_of(CUresult result, bool now)
{
    if (now && program.moment == AFTER_IT)
        begin_capture();
    if (now && program.moment == AROUND_IT)
        program.real->cuStreamEndCapture(program.stream, &program.graph);
    return result;
}

static bool beginning_of(const char *entry, CUstream stream)
{
    bool now = comes_by(entry, stream);
    if (now && program.moment != AFTER_IT)
        begin_capture();
    return now;
}

static CUresult CUDAAPI watched_cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status)
{
    bool now = beginning_of("cuStreamIsCapturing", stream);
    return end_of(program.real->cuStreamIsCapturing(stream, status), now);
}

static CUresult CUDAAPI watched_cuStreamGetId(CUstream stream, unsigned long long *id)
{
    bool now = beginning_of("cuStreamGetId", stream);
    return end_of(program.real->cuStreamGetId(stream, id), now);
}

static CUresult CUDAAPI watched_cuEventRecord(CUevent event, CUstream stream)
{
    bool now = beginning_of("cuEventRecord", stream);
    return end_of(program.real->cuEventRecord(event, stream), now);
}

static void watch(struct world *w, struct setup *setup, vpmm_driver *driver)
{
    world_open_without_pool(w, setup);
    *driver = *w->driver;
    driver->cuStreamIsCapturing = watched_cuStreamIsCapturing;
    driver->cuStreamGetId = watched_cuStreamGetId;
    driver->cuEventRecord = watched_cuEventRecord;
    setup->pool.driver = driver;
    memset(&program, 0, sizeof program);
    program.real = w->driver;
    must_work(vpmm_pool_create(&setup->pool, &w->pool));
}

static CUstreamCaptureStatus capture_of(const struct world *w, CUstream stream)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
    cr_assert_eq(w->driver->cuStreamIsCapturing(stream, &status), CUDA_SUCCESS);
    return status;
}

static void the_capture_is_good(const struct world *w, CUstream stream)
{
    CUgraph graph = NULL;
    cr_expect_eq(capture_of(w, stream), CU_STREAM_CAPTURE_STATUS_ACTIVE, "the capture is lost");
    cr_expect_eq(w->driver->cuStreamEndCapture(stream, &graph), CUDA_SUCCESS);
    if (graph != NULL)
        w->driver->cuGraphDestroy(graph);
}

/* What lies in a cache of s is marked by a call that was not given s, while the program begins a capture on s. */
static void mark_against_capture(const char *entry, enum moment moment)
{
    needs_simulator();
    struct setup setup = setup_default();
    setup.pool.cache_bytes = 16 * PAGE;
    setup.pool.extent_size = PAGE;
    vpmm_driver driver;
    struct world w;
    watch(&w, &setup, &driver);
    CUstream s = world_stream(&w), t = world_stream(&w);
    CUdeviceptr p = take(&w, 4, s), q = take(&w, 2, t);
    fill(&w, p, 4, 4, s);
    expect_later(&w, p, 4, 4, s);
    give(&w, p, s);
    program.stream = s;
    program.entry = entry;
    program.moment = moment;
    program.armed = true;
    must_work(vpmm_trim(w.pool, 0, NULL));
    program.armed = false;
    CUdeviceptr r = take(&w, 5, t); /* longer than anything that is free: it may have to wait for what s has freed */
    fill(&w, r, 5, 5, t);
    cr_expect_eq(capture_of(&w, t), CU_STREAM_CAPTURE_STATUS_NONE, "a stream that never captured is drawn in");
    if (program.begun && moment != AROUND_IT)
        the_capture_is_good(&w, s);
    if (program.begun && moment == AROUND_IT)
        cr_expect(program.graph != NULL, "the capture is lost");
    if (program.graph != NULL)
        w.driver->cuGraphDestroy(program.graph);
    expect_later(&w, r, 5, 5, t);
    give(&w, r, t);
    give(&w, q, t);
    nothing_is_stranded(&w);
    world_close(&w);
}

Test(sound, capture_02_begins_before_the_mark)
{
    mark_against_capture("cuEventRecord", BEFORE_IT);
    mark_against_capture("cuStreamGetId", BEFORE_IT);
    mark_against_capture("cuStreamIsCapturing", BEFORE_IT);
}
Test(sound, capture_02_begins_after_a_look)
{
    mark_against_capture("cuStreamIsCapturing", AFTER_IT);
    mark_against_capture("cuStreamGetId", AFTER_IT);
    mark_against_capture("cuEventRecord", AFTER_IT);
}
/* With `captures` nobody but calls that are given a stream records on it, or asks about it. */
static CUresult CUDAAPI no_cuEventRecord(CUevent event, CUstream stream)
{
    if (stream == program.stream)
        program.begun = true;
    return program.real->cuEventRecord(event, stream);
}

Test(sound, capture_02_no_other_thread_touches_a_stream_that_may_be_captured)
{
    needs_simulator();
    struct setup setup = setup_default();
    setup.pool.cache_bytes = 16 * PAGE;
    setup.pool.extent_size = PAGE;
    setup.pool.captures = true;
    setup.pool.max_mapped = 8 * PAGE;
    vpmm_driver driver;
    struct world w;
    watch(&w, &setup, &driver);
    must_work(vpmm_pool_destroy(w.pool));
    driver.cuEventRecord = no_cuEventRecord;
    must_work(vpmm_pool_create(&setup.pool, &w.pool));
    CUstream s = world_stream(&w), t = world_stream(&w);
    CUdeviceptr p = take(&w, 6, s);
    fill(&w, p, 6, 6, s);
    expect_later(&w, p, 6, 6, s);
    give(&w, p, s);
    program.stream = s;
    cr_assert_eq(w.driver->cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
    must_work(vpmm_poll(w.pool));
    CUdeviceptr q = take(&w, 8, t); /* all that there is: by a wait for the device */
    fill(&w, q, 8, 8, t);
    must_work(vpmm_poll(w.pool));
    cr_expect(!program.begun, "an event is recorded on the stream");
    the_capture_is_good(&w, s);
    give(&w, q, t);
    nothing_is_stranded(&w);
    world_close(&w);
}

Test(sound, capture_02_begins_and_ends_around_the_mark)
{
    mark_against_capture("cuEventRecord", AROUND_IT);
    mark_against_capture("cuStreamIsCapturing", AROUND_IT);
}

/* --- captures beside what is slow -----------------------------------------------------------------------------------
 */

/* s has freed memory into its cache, with work queued that uses it, and captures then. */
static CUstream freed_then_capturing(struct world *w, size_t pages, CUstreamCaptureMode mode)
{
    CUstream s = world_stream(w);
    CUdeviceptr p = take(w, pages, s);
    fill(w, p, pages, 7, s);
    expect_later(w, p, pages, 7, s);
    give(w, p, s);
    cr_assert_eq(w->driver->cuStreamBeginCapture(s, mode), CUDA_SUCCESS);
    return s;
}

static void destroy_beside_capture(CUstreamCaptureMode mode)
{
    needs_simulator(); /* on a real GPU the wait for what is held back would not end */
    struct setup setup = setup_default();
    setup.pool.cache_bytes = 16 * PAGE;
    struct world w;
    world_open(&w, &setup);
    CUstream s = freed_then_capturing(&w, 4, mode);
    must_work(vpmm_pool_destroy(w.pool));
    w.pool = NULL;
    the_capture_is_good(&w, s);
    world_close(&w); /* no race: what the work used was not unmapped under it */
}

Test(sound, capture_05_a_pool_is_destroyed_beside_one)
{
    destroy_beside_capture(CU_STREAM_CAPTURE_MODE_GLOBAL);
    destroy_beside_capture(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    destroy_beside_capture(CU_STREAM_CAPTURE_MODE_RELAXED);
}

static void shortage_beside_capture(vpmm_reuse reuse)
{
    needs_simulator();
    struct setup setup = setup_default();
    setup.pool.cache_bytes = 16 * PAGE;
    setup.pool.max_mapped = 8 * PAGE;
    setup.pool.extent_size = PAGE;
    setup.pool.reuse = reuse;
    struct world w;
    world_open(&w, &setup);
    CUstream t = world_stream(&w), s = freed_then_capturing(&w, 6, CU_STREAM_CAPTURE_MODE_GLOBAL);
    CUdeviceptr q = take(&w, 8, t); /* all that there is */
    fill(&w, q, 8, 8, t);
    expect_later(&w, q, 8, 8, t);
    CUdeviceptr none;
    must_fail(VPMM_ERROR_OUT_OF_MEMORY, vpmm_malloc(w.pool, PAGE, t, &none));
    the_capture_is_good(&w, s);
    give(&w, q, t);
    world_drain(&w);
    world_audit(&w);
    world_close(&w);
}

Test(sound, capture_05_memory_runs_out_beside_one)
{
    shortage_beside_capture(VPMM_REUSE_WAIT_DEVICE);
    shortage_beside_capture(VPMM_REUSE_COMPLETED);
    shortage_beside_capture(VPMM_REUSE_WAIT_HOST);
}

static void *create_and_destroy(void *data)
{
    struct setup *setup = data;
    vpmm_pool *pool = NULL;
    bool good = vpmm_pool_create(&setup->pool, &pool) == VPMM_SUCCESS && vpmm_pool_destroy(pool) == VPMM_SUCCESS;
    return good ? setup : NULL;
}

Test(sound, capture_05_a_pool_is_created_beside_one)
{
    static const vpmm_small smalls[] = {VPMM_SMALL_SLAB, VPMM_SMALL_ASYNC};
    for (size_t i = 0; i < 2; i++) {
        struct setup setup = setup_default();
        setup.pool.small = smalls[i];
        struct world w;
        pthread_t thread;
        void *good = NULL;
        world_open_without_pool(&w, &setup);
        setup.pool.driver = w.driver;
        CUstream s = world_stream(&w);
        cr_assert_eq(w.driver->cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
        cr_assert_eq(pthread_create(&thread, NULL, create_and_destroy, &setup), 0);
        pthread_join(thread, &good);
        cr_expect_not_null(good, "a pool cannot be made beside a capture");
        the_capture_is_good(&w, s);
        world_close(&w);
    }
}

/* --- what no event can show the end of ------------------------------------------------------------------------------
 */

/* All of the device, freed on stream 0 and in its caches: there is no memory left to wait by. */
static void full_device(struct world *w, size_t pages)
{
    struct setup setup = setup_default();
    setup.sim.memory_bytes = (pages + 1) * PAGE; /* and the block that the pool keeps for such a wait */
    setup.pool.cache_bytes = pages * PAGE;
    setup.pool.extent_size = PAGE;
    needs_simulator();
    world_open(w, &setup);
    CUdeviceptr p[64];
    for (size_t i = 0; i < pages; i++)
        p[i] = take(w, 1, 0);
    for (size_t i = 0; i < pages; i++)
        give(w, p[i], 0);
    world_step(w);
}

Test(sound, legacy_a_full_device_goes_to_another_stream)
{
    struct world w;
    full_device(&w, 16);
    CUstream s = world_stream(&w);
    give(&w, take(&w, 16, s), s);
    world_drain(&w);
    world_close(&w);
}
Test(sound, legacy_a_full_device_is_given_back)
{
    struct world w;
    full_device(&w, 16);
    must_work(vpmm_trim(w.pool, 0, NULL));
    cr_expect_eq(stats_of(&w).mapped_bytes, 0);
    world_close(&w);
}
Test(sound, legacy_a_full_device_s_pool_is_destroyed)
{
    struct world w;
    full_device(&w, 16);
    must_work(vpmm_pool_destroy(w.pool));
    w.pool = NULL;
    world_close(&w);
}

Test(sound, legacy_what_a_destroyed_context_left_is_found)
{
    needs_simulator();
    struct setup setup = setup_default();
    setup.pool.cache_bytes = 16 * PAGE;
    setup.pool.extent_size = PAGE;
    struct world w;
    CUcontext other;
    world_open(&w, &setup);
    cr_assert_eq(w.driver->cuCtxCreate(&other, 0, w.device), CUDA_SUCCESS);
    give(&w, take(&w, 1, 0), 0);
    cr_assert_eq(w.driver->cuCtxSynchronize(), CUDA_SUCCESS);
    cr_assert_eq(w.driver->cuCtxDestroy(other), CUDA_SUCCESS);
    cr_assert_eq(w.driver->cuCtxSetCurrent(w.context), CUDA_SUCCESS);
    must_work(vpmm_trim(w.pool, 0, NULL));
    cr_expect_eq(stats_of(&w).mapped_bytes, 0);
    must_work(vpmm_pool_destroy(w.pool));
    cr_assert_eq(w.driver->cuDevicePrimaryCtxRelease(w.device), CUDA_SUCCESS);
    cr_expect_eq(vpmm_sim_races(w.sim), 0);
    cr_expect_eq(vpmm_sim_destroy(w.sim), 0); /* its misuses are the questions about what is destroyed */
}

/* --- per-thread streams ---------------------------------------------------------------------------------------------
 */

enum { THREADS_BORN = 40, BLOCKS_A_THREAD = 100 };

struct mortal {
    struct world *w;
    sem_t *gate;
    bool good;
};

static void CUDA_CB wait_at(void *gate)
{
    sem_wait(gate);
    sem_post(gate);
}

/* Frees behind work that is held back, and ends. */
static void *live_and_die(void *data)
{
    struct mortal *mortal = data;
    const vpmm_driver *driver = mortal->w->driver;
    CUdeviceptr p[BLOCKS_A_THREAD];
    bool good = driver->cuCtxSetCurrent(mortal->w->context) == CUDA_SUCCESS;
    for (int i = 0; i < BLOCKS_A_THREAD; i++)
        good = good && vpmm_malloc(mortal->w->pool, PAGE, CU_STREAM_PER_THREAD, &p[i]) == VPMM_SUCCESS;
    good = good && driver->cuLaunchHostFunc(CU_STREAM_PER_THREAD, wait_at, mortal->gate) == CUDA_SUCCESS;
    for (int i = 0; i < BLOCKS_A_THREAD; i++)
        good = good && driver->cuMemsetD32Async(p[i], 1, 1, CU_STREAM_PER_THREAD) == CUDA_SUCCESS &&
               vpmm_free(mortal->w->pool, p[i], CU_STREAM_PER_THREAD) == VPMM_SUCCESS;
    mortal->good = good;
    return NULL;
}

Test(sound, per_thread_06_what_ended_threads_freed_is_found, .timeout = 120)
{
    struct setup setup = setup_default();
    setup.sim.stepped = false;
    setup.pool.extent_size = PAGE;
    struct world w;
    sem_t gate;
    world_open(&w, &setup);
    if (w.sim == NULL)
        cr_skip("a real GPU does not say when the streams of ended threads are done");
    for (int i = 0; i < THREADS_BORN; i++) {
        struct mortal mortal = {.w = &w, .gate = &gate};
        pthread_t thread;
        sem_init(&gate, 0, 0);
        cr_assert_eq(pthread_create(&thread, NULL, live_and_die, &mortal), 0);
        pthread_join(thread, NULL);
        cr_assert(mortal.good, "%s", vpmm_last_error());
        sem_post(&gate);
        cr_assert_eq(w.driver->cuCtxSynchronize(), CUDA_SUCCESS);
        must_work(vpmm_poll(w.pool)); /* without a trim, which could wait for the context */
        must_work(vpmm_poll(w.pool));
        sem_destroy(&gate);
    }
    vpmm_stats stats = stats_of(&w);
    cr_expect_leq(stats.mapped_bytes, (BLOCKS_A_THREAD + BLOCKS_A_THREAD / 8) * PAGE,
                  "%llu pages are mapped where %d were in use at most", (unsigned long long)(stats.mapped_bytes / PAGE),
                  BLOCKS_A_THREAD);
    nothing_is_stranded(&w);
    world_close(&w);
}
