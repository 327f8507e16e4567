/*
 * The pool of a captured graph: what a capturing stream allocates and frees there, what stays as it is until the pool's
 * end, and what its end gives back.
 */
#include "support.h"

enum { PAGES = 4, SUBPAGES = 100 << 10, SMALL = 300 };

static const size_t kinds[] = {PAGES * PAGE, SUBPAGES, SMALL};

#define EACH_KIND(bytes) for (const size_t *bytes = kinds; bytes < kinds + sizeof kinds / sizeof kinds[0]; bytes++)

static struct setup graph_setup(void)
{
    struct setup setup = setup_default();
    setup.pool.graph = true;
    return setup;
}

static void open_graph(struct world *w)
{
    struct setup setup = graph_setup();
    world_open(w, &setup);
}

static void begin_capture(struct world *w, CUstream stream, CUstreamCaptureMode mode)
{
    cr_assert_eq(w->driver->cuStreamBeginCapture(stream, mode), CUDA_SUCCESS);
}

static void end_capture(struct world *w, CUstream stream)
{
    CUgraph graph = NULL;
    cr_assert_eq(w->driver->cuStreamEndCapture(stream, &graph), CUDA_SUCCESS, "the capture is lost");
    cr_assert_eq(w->driver->cuGraphDestroy(graph), CUDA_SUCCESS);
}

/* Calls that name a stream, or an event of one. */
static uint64_t calls_with_streams(struct world *w)
{
    static const char *const calls[] = {"cuStreamIsCapturing", "cuStreamGetId", "cuStreamGetCtx",
                                        "cuStreamWaitEvent",   "cuEventRecord", "cuEventQuery",
                                        "cuEventSynchronize"};
    uint64_t sum = 0;
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++)
        sum += world_calls(w, calls[i]);
    return sum;
}

/* ---- what a capture may do ---- */

static void capture_with_pairs(CUstreamCaptureMode mode)
{
    struct world w;
    open_graph(&w);
    CUstream s = world_stream(&w);
    begin_capture(&w, s, mode);
    uint64_t calls = calls_with_streams(&w);
    EACH_KIND(bytes)
    {
        CUdeviceptr p = take_bytes(&w, *bytes, s), more = take_bytes(&w, *bytes, s);
        give(&w, p, s);
        cr_expect_eq(take_bytes(&w, *bytes, s), p, "what a capture frees it does not use again");
        give(&w, p, s);
        give(&w, more, s);
    }
    must_work(vpmm_poll(w.pool));
    must_work(vpmm_trim(w.pool, 0, NULL));
    must_work(vpmm_stream_release(w.pool, s));
    cr_expect_eq(calls_with_streams(&w), calls, "a call is made with a stream that captures");
    end_capture(&w, s);
    world_audit(&w);
    world_close(&w);
}

Test(graph, a_capture_in_global_mode_allocates_and_frees)
{
    capture_with_pairs(CU_STREAM_CAPTURE_MODE_GLOBAL);
}
Test(graph, a_capture_in_thread_local_mode_allocates_and_frees)
{
    capture_with_pairs(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
}
Test(graph, a_capture_in_relaxed_mode_allocates_and_frees)
{
    capture_with_pairs(CU_STREAM_CAPTURE_MODE_RELAXED);
}

Test(graph, a_later_capture_uses_what_an_earlier_one_has_freed)
{
    EACH_KIND(bytes)
    {
        struct world w;
        open_graph(&w);
        CUstream s = world_stream(&w);
        begin_capture(&w, s, CU_STREAM_CAPTURE_MODE_GLOBAL);
        CUdeviceptr p = take_bytes(&w, *bytes, s);
        give(&w, p, s);
        end_capture(&w, s);
        uint64_t mapped = stats_of(&w).mapped_bytes;
        begin_capture(&w, s, CU_STREAM_CAPTURE_MODE_GLOBAL);
        cr_expect_eq(take_bytes(&w, *bytes, s), p);
        give(&w, p, s);
        end_capture(&w, s);
        cr_expect_eq(stats_of(&w).mapped_bytes, mapped);
        world_close(&w);
    }
}

/* No event orders two streams of a capture: whatever has passed outside of it says nothing about a replay. */
Test(graph, another_stream_never_gets_what_one_has_freed)
{
    EACH_KIND(bytes)
    {
        struct world w;
        open_graph(&w);
        CUstream s = world_stream(&w), other = world_stream(&w);
        CUdeviceptr p = take_bytes(&w, *bytes, s);
        give(&w, p, s);
        world_drain(&w);
        must_work(vpmm_trim(w.pool, 0, NULL));
        CUdeviceptr q = take_bytes(&w, *bytes, other);
        cr_expect_neq(q, p);
        cr_expect_eq(take_bytes(&w, *bytes, s), p);
        give(&w, p, s);
        give(&w, q, other);
        world_close(&w);
    }
}

/* What is freed on another stream than it was allocated on is that one's. */
Test(graph, memory_goes_over_to_the_stream_that_frees_it)
{
    EACH_KIND(bytes)
    {
        struct world w;
        open_graph(&w);
        CUstream s = world_stream(&w), other = world_stream(&w);
        CUdeviceptr p = take_bytes(&w, *bytes, s);
        give(&w, p, other);
        cr_expect_eq(take_bytes(&w, *bytes, other), p, "%zu bytes are nobody's any more", *bytes);
        give(&w, p, s);
        cr_expect_eq(take_bytes(&w, *bytes, s), p);
        give(&w, p, s);
        world_close(&w);
    }
}

Test(graph, what_further_streams_use_stays_until_the_end)
{
    EACH_KIND(bytes)
    {
        struct world w;
        open_graph(&w);
        CUstream s = world_stream(&w), x = world_stream(&w);
        CUdeviceptr p = take_bytes(&w, *bytes, s);
        must_work(vpmm_use(w.pool, p, x));
        give(&w, p, s);
        world_drain(&w);
        CUdeviceptr q = take_bytes(&w, *bytes, s), r = take_bytes(&w, *bytes, x);
        cr_expect(q != p && r != p);
        give(&w, q, s);
        give(&w, r, x);
        world_audit(&w);
        world_close(&w);
    }
}

/* ---- what stays as it is ---- */

/* Every other one of eight is free. */
static void scatter(struct world *w, CUstream s, CUdeviceptr p[8])
{
    for (int i = 0; i < 8; i++)
        p[i] = take(w, 2, s);
    for (int i = 0; i < 8; i += 2)
        give(w, p[i], s);
}

static void gather(struct world *w, CUstream s, CUdeviceptr p[8])
{
    for (int i = 1; i < 8; i += 2)
        give(w, p[i], s);
}

Test(graph, nothing_moves_and_nothing_is_unmapped)
{
    struct world w;
    CUdeviceptr p[8];
    open_graph(&w);
    CUstream s = world_stream(&w);
    scatter(&w, s, p);
    CUdeviceptr q = take(&w, 8, s);
    must_work(vpmm_pool_set_attribute(w.pool, VPMM_ATTRIBUTE_DECAY_MS, 0));
    world_drain(&w);
    size_t released = 1;
    must_work(vpmm_trim(w.pool, 0, &released));
    cr_expect_eq(released, 0);
    vpmm_stats stats = stats_of(&w);
    cr_expect_eq(stats.extents_remapped, 0);
    cr_expect_eq(stats.extents_released, 0);
    cr_expect_eq(stats.mapped_bytes, 24 * PAGE);
    cr_expect_eq(world_calls(&w, "cuMemUnmap"), 0);
    gather(&w, s, p);
    give(&w, q, s);
    world_close(&w);
}

Test(graph, a_request_that_fails_moves_nothing_either)
{
    struct setup setup = graph_setup();
    setup.pool.max_mapped = 16 * PAGE;
    struct world w;
    CUdeviceptr p[8], q = 0;
    world_open(&w, &setup);
    CUstream s = world_stream(&w), other = world_stream(&w);
    scatter(&w, s, p);
    must_fail(VPMM_ERROR_OUT_OF_MEMORY, vpmm_malloc(w.pool, 8 * PAGE, s, &q));
    must_fail(VPMM_ERROR_OUT_OF_MEMORY, vpmm_malloc(w.pool, 2 * PAGE, other, &q));
    cr_expect_eq(world_calls(&w, "cuMemUnmap"), 0);
    cr_expect_eq(stats_of(&w).extents_remapped, 0);
    give(&w, take(&w, 2, s), s);
    gather(&w, s, p);
    give(&w, take(&w, 16, s), s); /* all of it lies where it lay, and is one region again */
    cr_expect_eq(stats_of(&w).mapped_bytes, 16 * PAGE);
    world_close(&w);
}

static size_t device_free(struct world *w)
{
    size_t bytes, total;
    cr_assert_eq(w->driver->cuMemGetInfo(&bytes, &total), CUDA_SUCCESS);
    return bytes;
}

/*
 * Pages to be cut are made several at a time, in one handle where nothing moves. Where the device has no room for that
 * it may have room for one.
 */
Test(graph, pieces_fill_the_device_to_the_last_page)
{
    enum { CUT = 300, LEFT = 7, MOST = 500 };
    needs_simulator();
    struct setup setup = graph_setup();
    struct world w;
    CUdeviceptr p[MOST];
    int n = 0;
    vpmm_status status = VPMM_SUCCESS;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    while (n < CUT)
        p[n++] = take_bytes(&w, PAGE / 2, s);
    for (size_t rest; (rest = device_free(&w) / PAGE) > LEFT;)
        p[n++] = take(&w, rest - LEFT > 128 ? 128 : rest - LEFT, s);
    while (n < MOST && (status = vpmm_malloc(w.pool, PAGE / 2, s, &p[n])) == VPMM_SUCCESS)
        n++;
    cr_expect_eq(status, VPMM_ERROR_OUT_OF_MEMORY);
    cr_expect_lt(device_free(&w), PAGE, "%zu bytes of the device are left", device_free(&w));
    while (n)
        give(&w, p[--n], s);
    world_close(&w);
}

/* ---- the end ---- */

Test(graph, its_end_waits_for_the_device_and_gives_all_back)
{
    struct world w;
    open_graph(&w);
    CUstream s = world_stream(&w), other = world_stream(&w);
    EACH_KIND(bytes)
    {
        CUdeviceptr p = take_bytes(&w, *bytes, s);
        fill(&w, p, 1, 1, s);
        expect_later(&w, p, 1, 1, s); /* as a replay would, on any stream */
        give(&w, p, s);
    }
    keep_busy(&w, other);
    must_work(vpmm_pool_destroy(w.pool));
    w.pool = NULL;
    cr_expect_not(world_pending(&w, s), "memory is unmapped under a stream's work");
    world_close(&w);
}

/* A replay uses what was freed elsewhere, and needs no context but its own. */
Test(graph, its_end_waits_for_replays_whatever_was_freed_where)
{
    needs_simulator();
    struct world w;
    CUcontext other, popped;
    open_graph(&w);
    CUstream s = world_stream(&w);
    CUdeviceptr p = take(&w, PAGES, s);
    cr_assert_eq(w.driver->cuCtxCreate(&other, 0, w.device), CUDA_SUCCESS);
    give(&w, p, 0);
    cr_assert_eq(w.driver->cuCtxPopCurrent(&popped), CUDA_SUCCESS);
    fill(&w, p, PAGES, 1, s);
    must_work(vpmm_pool_destroy(w.pool));
    w.pool = NULL;
    cr_expect_not(world_pending(&w, s), "memory is unmapped under a replay");
    world_close_with(&w, other);
}

/*
 * The nth wait for a context is refused, of two: the pool is as it was. What the one stream has freed is not another's,
 * and the next try waits for what has been replayed since.
 */
static void end_that_is_refused(uint64_t nth)
{
    struct world w;
    CUcontext other, popped;
    open_graph(&w);
    CUstream s = world_stream(&w), t = world_stream(&w);
    CUdeviceptr p = take(&w, PAGES, s), q = take(&w, PAGES, s);
    give(&w, p, s);
    cr_assert_eq(w.driver->cuCtxCreate(&other, 0, w.device), CUDA_SUCCESS);
    give(&w, q, 0);
    cr_assert_eq(w.driver->cuCtxPopCurrent(&popped), CUDA_SUCCESS);
    vpmm_sim_fail(w.sim, "cuMemFree", nth, CUDA_ERROR_UNKNOWN, true);
    must_fail(VPMM_ERROR_BUSY, vpmm_pool_destroy(w.pool));
    vpmm_sim_fail(w.sim, "cuMemFree", 0, CUDA_SUCCESS, false);
    CUdeviceptr r = take(&w, PAGES, t);
    cr_expect(r != p && r != q, "what a stream has freed in a graph is another's");
    give(&w, r, t);
    fill(&w, p, PAGES, 1, s);
    must_work(vpmm_pool_destroy(w.pool));
    w.pool = NULL;
    cr_expect_not(world_pending(&w, s), "memory is unmapped under a replay");
    world_close_with(&w, other);
}

Test(graph, an_end_that_is_refused_changes_nothing)
{
    needs_simulator();
    end_that_is_refused(1);
    end_that_is_refused(2);
}

/*
 * The wait is over, and from then on the device is full. `what`: of a piece, beside it whole pages, a further stream's
 * use, another stream's piece.
 */
static void end_on_a_full_device(unsigned what)
{
    enum { WHOLE = 1, USED = 2, SECOND = 4 };
    struct setup setup = graph_setup();
    struct world w;
    world_open_without_pool(&w, &setup);
    size_t begin = vpmm_sim_used_bytes(w.sim);
    setup.pool.driver = w.driver;
    must_work(vpmm_pool_create(&setup.pool, &w.pool));
    CUstream s = world_stream(&w), t = world_stream(&w);
    CUdeviceptr p = take_bytes(&w, SMALL, s), pages = what & WHOLE ? take(&w, PAGES, s) : 0;
    if (what & USED)
        must_work(vpmm_use(w.pool, p, t));
    if (what & USED && pages)
        must_work(vpmm_use(w.pool, pages, t));
    if (what & SECOND)
        give(&w, take_bytes(&w, SMALL, t), t);
    give(&w, p, s);
    if (pages)
        give(&w, pages, s);
    vpmm_sim_fail(w.sim, "cuMemAlloc", 1, CUDA_ERROR_OUT_OF_MEMORY, true); /* there is a block for the one wait */
    must_work(vpmm_pool_destroy(w.pool));
    vpmm_sim_fail(w.sim, "cuMemAlloc", 0, CUDA_SUCCESS, false);
    w.pool = NULL;
    cr_expect_eq(vpmm_sim_used_bytes(w.sim), begin, "case %u: the device has lost memory", what);
    cr_expect_eq(vpmm_sim_misuses(w.sim), 0, "case %u", what);
    world_close(&w);
}

Test(graph, its_end_gives_all_back_where_the_device_is_full_by_then)
{
    needs_simulator();
    for (unsigned what = 0; what < 8; what++)
        end_on_a_full_device(what);
}

/*
 * Pages that two streams have freed in pieces, and which are less than a handle, become whole before anything is given
 * back, whichever call the driver refuses: handles go as they were made.
 */
Test(graph, its_end_gives_back_whole_handles_whatever_is_refused)
{
    enum { CALLS = 20, PIECES = 18 };
    static const size_t lengths[] = {104 << 10, 152 << 10, 256 << 10};
    needs_simulator();
    for (uint64_t nth = 1; nth <= CALLS; nth++) {
        struct setup setup = graph_setup();
        struct world w;
        CUdeviceptr p[PIECES];
        setup.pool.page_size = 256 << 10;
        world_open(&w, &setup);
        CUstream s = world_stream(&w), t = world_stream(&w);
        size_t begin = vpmm_sim_used_bytes(w.sim);
        for (int i = 0; i < PIECES; i++)
            p[i] = take_bytes(&w, lengths[i % 3], s);
        for (int i = 0; i < PIECES; i++)
            give(&w, p[i], i % 3 == 1 ? s : t);
        vpmm_sim_fail(w.sim, "cuThreadExchangeStreamCaptureMode", nth, CUDA_ERROR_UNKNOWN, false);
        vpmm_status status = vpmm_pool_destroy(w.pool);
        vpmm_sim_fail(w.sim, "cuThreadExchangeStreamCaptureMode", 0, CUDA_SUCCESS, false);
        CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL; /* what was refused may have been to put it back */
        cr_assert_eq(w.driver->cuThreadExchangeStreamCaptureMode(&mode), CUDA_SUCCESS);
        if (status == VPMM_ERROR_BUSY) /* it could not be waited for, and is as it was */
            must_work(vpmm_pool_destroy(w.pool));
        w.pool = NULL;
        cr_expect_leq(vpmm_sim_used_bytes(w.sim), begin, "call %d: memory is left behind", (int)nth);
        cr_expect_eq(vpmm_sim_misuses(w.sim), 0, "call %d", (int)nth);
        world_close(&w);
    }
}

Test(graph, it_does_not_end_while_an_output_lives)
{
    struct world w;
    open_graph(&w);
    CUstream s = world_stream(&w);
    begin_capture(&w, s, CU_STREAM_CAPTURE_MODE_GLOBAL);
    CUdeviceptr p = take(&w, PAGES, s);
    end_capture(&w, s);
    must_fail(VPMM_ERROR_BUSY, vpmm_pool_destroy(w.pool));
    give(&w, p, s);
    world_close(&w);
}

/* A lost capture leaves the memory to the program, and the pool to be destroyed. */
Test(graph, a_capture_that_fails_gives_everything_back)
{
    needs_simulator();
    struct world w;
    open_graph(&w);
    CUstream s = world_stream(&w);
    CUgraph graph = NULL;
    begin_capture(&w, s, CU_STREAM_CAPTURE_MODE_GLOBAL);
    CUdeviceptr p = take(&w, PAGES, s), q = take_bytes(&w, SMALL, s);
    give(&w, q, s);
    w.driver->cuStreamSynchronize(s);
    cr_expect_neq(w.driver->cuStreamEndCapture(s, &graph), CUDA_SUCCESS);
    give(&w, p, s);
    world_audit(&w);
    world_close(&w);
}

/* ---- streams and devices ---- */

/* To the pool a handle is a name: it says nothing of what its stream did before. */
Test(graph, a_handle_that_comes_back_is_the_same_stream)
{
    needs_simulator();
    struct world w;
    open_graph(&w);
    CUstream s = world_stream(&w);
    CUdeviceptr p = take(&w, PAGES, s);
    give(&w, p, s);
    world_step(&w);
    must_work(vpmm_stream_release(w.pool, s));
    world_stream_destroy(&w, s);
    CUstream t = world_stream(&w);
    CUdeviceptr q = take(&w, PAGES, t);
    cr_expect_eq(q == p, t == s);
    give(&w, q, t);
    world_close(&w);
}

Test(graph, default_streams_of_two_contexts_are_two)
{
    needs_simulator();
    struct world w;
    CUcontext other;
    open_graph(&w);
    CUdeviceptr p = take(&w, PAGES, 0);
    give(&w, p, 0);
    cr_assert_eq(w.driver->cuCtxCreate(&other, 0, w.device), CUDA_SUCCESS);
    CUdeviceptr q = take(&w, PAGES, 0);
    cr_expect_neq(q, p);
    give(&w, q, 0);
    cr_assert_eq(w.driver->cuCtxSetCurrent(w.context), CUDA_SUCCESS);
    cr_expect_eq(take(&w, PAGES, 0), p);
    give(&w, p, 0);
    must_work(vpmm_pool_destroy(w.pool));
    w.pool = NULL;
    cr_assert_eq(w.driver->cuCtxDestroy(other), CUDA_SUCCESS);
    world_close(&w);
}

Test(graph, a_device_without_pages_has_none)
{
    needs_simulator();
    struct setup setup = graph_setup();
    struct world w;
    setup.sim.vmm = false;
    world_open_without_pool(&w, &setup);
    setup.pool.driver = w.driver;
    must_fail(VPMM_ERROR_NOT_SUPPORTED, vpmm_pool_create(&setup.pool, &w.pool));
    w.pool = NULL;
    world_close(&w);
}
