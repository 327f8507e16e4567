/*
 * vpmm_use: memory that further streams use, from the word about it to the end of its use on all of them.
 *
 * What is done to pages is done to subpages and slices as well: each of the three has descriptors of its own.
 */
#include "base/clock.h"
#include "pool/pool.h"
#include "support.h"

#include <pthread.h>

enum { PAGES = 4, SUBPAGES = 100 << 10, SLICE = 1024 };

static const size_t kinds[] = {PAGES * PAGE, SUBPAGES, SLICE};

#define EACH_KIND(bytes) for (const size_t *bytes = kinds; bytes < kinds + sizeof kinds / sizeof kinds[0]; bytes++)

static void use_at(struct world *w, CUdeviceptr p, CUstream stream, int line)
{
    vpmm_status status = vpmm_use(w->pool, p, stream);
    require(status == VPMM_SUCCESS, "line %d: vpmm_use gives %s: %s", line, vpmm_status_name(status),
            vpmm_last_error());
}
#define use(w, p, stream) use_at((w), (p), (stream), __LINE__)

static uint64_t ending(struct world *w)
{
    return stats_of(w).ending_bytes;
}

static void poll_pool(struct world *w)
{
    must_work(vpmm_poll(w->pool));
}

/* Memory that s allocates, s and x work on, x behind s, and s frees: x is still at it. */
static CUdeviceptr free_while_used(struct world *w, size_t bytes, CUstream s, CUstream x)
{
    CUdeviceptr p = take_bytes(w, bytes, s);
    fill(w, p, 1, 1, s);
    order_after(w, x, s);
    keep_busy(w, x);
    expect_later(w, p, 1, 1, x);
    use(w, p, x);
    give(w, p, s);
    return p;
}

/* Whoever gets memory now writes to it: the simulator finds a race if it is still used. */
static CUdeviceptr take_and_write(struct world *w, size_t bytes, CUstream stream)
{
    CUdeviceptr p = take_bytes(w, bytes, stream);
    fill(w, p, 1, 2, stream);
    return p;
}

Test(use, memory_is_nobody_s_before_the_other_stream_has_passed)
{
    struct setup setup = setup_default();
    setup.pool.reuse = VPMM_REUSE_COMPLETED;
    setup.pool.cache_bytes = 64 << 20; /* a free that goes into it asks nobody */
    EACH_KIND(bytes)
    {
        struct world w;
        world_open(&w, &setup);
        CUstream s = world_stream(&w), x = world_stream(&w);
        CUdeviceptr p = free_while_used(&w, *bytes, s, x);
        cr_expect_eq(stats_of(&w).requested_bytes, 0);
        cr_expect_geq(ending(&w), *bytes);
        world_audit(&w);
        world_run(&w, s, SIZE_MAX); /* s has passed, x has not */
        CUdeviceptr q = take_and_write(&w, *bytes, s);
        cr_expect_neq(q, p, "memory of %zu bytes is handed out while another stream uses it", *bytes);
        give(&w, q, s);
        world_drain(&w);
        cr_expect_eq(ending(&w), 0);
        cr_expect_eq(w.mismatches, 0);
        world_close(&w);
    }
}

/* The slowest stream may have it at once, and then no other waits for more than that one. */
Test(use, what_is_left_is_an_ordinary_fence)
{
    EACH_KIND(bytes)
    {
        struct setup setup = setup_default();
        setup.pool.reuse = VPMM_REUSE_WAIT_DEVICE;
        struct world w;
        world_open(&w, &setup);
        CUstream s = world_stream(&w), x = world_stream(&w);
        CUdeviceptr p = free_while_used(&w, *bytes, s, x);
        world_run(&w, s, SIZE_MAX);
        poll_pool(&w);
        cr_expect_eq(ending(&w), 0, "%zu bytes wait for more than the one stream that has not passed", *bytes);
        uint64_t waits = world_calls(&w, "cuStreamWaitEvent");
        if (*bytes != SLICE) { /* a slice's slab is still of the stream that allocated */
            CUdeviceptr q = take_and_write(&w, *bytes, x);
            cr_expect_eq(q, p);
            cr_expect_eq(world_calls(&w, "cuStreamWaitEvent"), waits);
            give(&w, q, x);
        }
        world_audit(&w);
        world_close(&w);
    }
}

/* The other way about: x has passed, and s, which freed, has not. */
Test(use, the_freeing_stream_may_be_the_slowest)
{
    EACH_KIND(bytes)
    {
        struct world w;
        world_open(&w, NULL);
        CUstream s = world_stream(&w), x = world_stream(&w);
        CUdeviceptr p = take_bytes(&w, *bytes, s);
        keep_busy(&w, s);
        use(&w, p, x);
        give(&w, p, s);
        world_run(&w, x, SIZE_MAX);
        poll_pool(&w);
        cr_expect_eq(ending(&w), 0);
        CUdeviceptr q = take_and_write(&w, *bytes, s);
        cr_expect_eq(q, p, "%zu bytes are kept from the stream that has them by its own order", *bytes);
        give(&w, q, s);
        world_close(&w);
    }
}

Test(use, no_stream_waits_and_nothing_is_recorded_before_the_free)
{
    EACH_KIND(bytes)
    {
        struct world w;
        world_open(&w, NULL);
        CUstream s = world_stream(&w), x = world_stream(&w);
        CUdeviceptr p = take_bytes(&w, *bytes, s);
        keep_busy(&w, x);
        uint64_t records = world_calls(&w, "cuEventRecord"), waits = world_calls(&w, "cuStreamWaitEvent");
        use(&w, p, x);
        use(&w, p, x);
        cr_expect_eq(world_calls(&w, "cuEventRecord"), records);
        give(&w, p, s);
        cr_expect_eq(world_calls(&w, "cuEventRecord"), records + 2, "one for each stream");
        cr_expect_eq(world_calls(&w, "cuStreamWaitEvent"), waits);
        cr_expect_eq(stats_of(&w).uses, 2);
        world_close(&w);
    }
}

static void free_on_the_using_stream(vpmm_streams streams)
{
    struct setup setup = setup_default();
    setup.pool.streams = streams;
    EACH_KIND(bytes)
    {
        struct world w;
        world_open(&w, &setup);
        CUstream s = world_stream(&w);
        keep_busy(&w, s);
        CUdeviceptr p = take_bytes(&w, *bytes, s);
        use(&w, p, s);
        world_audit(&w);
        keep_busy(&w, s);
        give(&w, p, s);
        cr_expect_eq(ending(&w), 0);
        CUdeviceptr q = take_bytes(&w, *bytes, s);
        cr_expect_eq(q, p);
        give(&w, q, s);
        world_close(&w);
    }
}

Test(use, of_the_freeing_stream_itself_is_none)
{
    free_on_the_using_stream(VPMM_STREAMS_CHECKED);
}
Test(use, of_the_freeing_stream_itself_is_none_where_it_may_end_at_once)
{
    free_on_the_using_stream(VPMM_STREAMS_EAGER);
}

Test(use, all_of_many_streams_are_waited_for)
{
    enum { STREAMS = 12 };
    EACH_KIND(bytes)
    {
        struct world w;
        world_open(&w, NULL);
        CUstream s = world_stream(&w), x[STREAMS];
        CUdeviceptr p = take_bytes(&w, *bytes, s);
        for (int i = 0; i < STREAMS; i++) {
            x[i] = world_stream(&w);
            keep_busy(&w, x[i]);
            use(&w, p, x[i]);
        }
        give(&w, p, s);
        world_run(&w, s, SIZE_MAX);
        for (int i = 0; i < STREAMS; i++) {
            poll_pool(&w);
            cr_expect_eq(ending(&w) != 0, i < STREAMS - 1, "%d of %d streams have passed", i, STREAMS);
            world_run(&w, x[i], SIZE_MAX);
        }
        world_audit(&w);
        world_close(&w);
    }
}

/* The next life of an address begins without the uses of the one before. */
Test(use, is_of_one_life_of_the_allocation)
{
    EACH_KIND(bytes)
    {
        struct setup setup = setup_default();
        setup.pool.cache_bytes = 64 << 20;
        struct world w;
        world_open(&w, &setup);
        CUstream s = world_stream(&w), x = world_stream(&w);
        CUdeviceptr p = take_bytes(&w, *bytes, s);
        use(&w, p, x);
        give(&w, p, s);
        world_drain(&w);
        CUdeviceptr q = take_bytes(&w, *bytes, s);
        keep_busy(&w, x);
        give(&w, q, s);
        cr_expect_eq(ending(&w), 0);
        cr_expect_eq(take_bytes(&w, *bytes, s), q, "a pair of %zu bytes is no hit any more", *bytes);
        give(&w, q, s);
        world_close(&w);
    }
}

/* ---- what is refused ---- */

Test(use, of_what_is_not_live_is_refused)
{
    EACH_KIND(bytes)
    {
        struct world w;
        world_open(&w, NULL);
        CUstream s = world_stream(&w), x = world_stream(&w);
        CUdeviceptr p = take_bytes(&w, *bytes, s);
        must_fail(VPMM_ERROR_INVALID_POINTER, vpmm_use(w.pool, p + 256, x));
        must_fail(VPMM_ERROR_INVALID_POINTER, vpmm_use(w.pool, 0x1000, x));
        must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_use(NULL, p, x));
        must_work(vpmm_use(w.pool, 0, x));
        keep_busy(&w, x);
        use(&w, p, x);
        give(&w, p, s);
        must_fail(VPMM_ERROR_INVALID_POINTER, vpmm_use(w.pool, p, x));
        must_fail(VPMM_ERROR_INVALID_POINTER, vpmm_free(w.pool, p, s));
        world_drain(&w);
        must_fail(VPMM_ERROR_INVALID_POINTER, vpmm_use(w.pool, p, x));
        cr_expect_eq(stats_of(&w).failed_invalid_pointer, 5);
        world_close(&w);
    }
}

Test(use, on_a_capturing_stream_is_refused)
{
    struct world w;
    world_open(&w, NULL);
    CUstream s = world_stream(&w), x = world_stream(&w);
    CUdeviceptr p = take(&w, PAGES, s);
    CUgraph graph;
    cr_assert_eq(w.driver->cuStreamBeginCapture(x, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
    must_fail(VPMM_ERROR_NOT_SUPPORTED, vpmm_use(w.pool, p, x));
    cr_assert_eq(w.driver->cuStreamEndCapture(x, &graph), CUDA_SUCCESS);
    cr_assert_eq(w.driver->cuGraphDestroy(graph), CUDA_SUCCESS);
    give(&w, p, s);
    cr_expect_eq(ending(&w), 0);
    world_close(&w);
}

Test(use, of_the_driver_s_own_memory_is_refused)
{
    struct setup setup = setup_default();
    setup.pool.small = VPMM_SMALL_ASYNC;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w), x = world_stream(&w);
    CUdeviceptr p = take_bytes(&w, SLICE, s);
    must_fail(VPMM_ERROR_NOT_SUPPORTED, vpmm_use(w.pool, p, x));
    give(&w, p, s);
    world_close(&w);
}

/* ---- streams that end ---- */

/* The free finds a stream that has been released, and perhaps destroyed: what it did before then is waited for. */
static void end_a_used_stream(size_t bytes, bool by_release, vpmm_streams streams)
{
    struct setup setup = setup_default();
    setup.pool.streams = streams;
    setup.pool.reuse = VPMM_REUSE_COMPLETED;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w), x = world_stream(&w), third = world_stream(&w);
    CUdeviceptr p = take_bytes(&w, bytes, s);
    keep_busy(&w, x);
    use(&w, p, x);
    if (by_release)
        must_work(vpmm_stream_release(w.pool, x));
    CUstream ended = x;
    world_stream_destroy(&w, x);
    give(&w, p, s);
    world_run(&w, s, SIZE_MAX);
    poll_pool(&w);
    CUdeviceptr q = take_and_write(&w, bytes, third);
    cr_expect_neq(q, p);
    give(&w, q, third);
    if (w.sim)
        vpmm_sim_step(w.sim, ended, SIZE_MAX);
    world_drain(&w);
    must_work(vpmm_trim(w.pool, 0, NULL));
    cr_expect_eq(stats_of(&w).mapped_bytes, 0, "memory is kept for a stream that is gone");
    world_close(&w);
}

Test(use, ends_with_a_release_of_the_stream)
{
    needs_simulator();
    EACH_KIND(bytes)
    end_a_used_stream(*bytes, true, VPMM_STREAMS_CHECKED);
}
Test(use, ends_with_a_destroyed_stream_where_nothing_need_be_said)
{
    needs_simulator();
    EACH_KIND(bytes)
    end_a_used_stream(*bytes, false, VPMM_STREAMS_EAGER);
}

/* A record is not another stream's as long as memory names it. */
Test(use, keeps_the_record_of_its_stream)
{
    struct setup setup = setup_default();
    setup.pool.reuse = VPMM_REUSE_COMPLETED;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w), x = world_stream(&w);
    CUdeviceptr p = take(&w, PAGES, s);
    use(&w, p, x);
    must_work(vpmm_stream_release(w.pool, x));
    world_drain(&w);
    cr_expect_not(streams_pending(&w.pool->arena.streams, NULL), "the reaper is kept awake until the free");
    CUstream y = world_stream(&w); /* would take the record over */
    give(&w, take(&w, 1, y), y);
    keep_busy(&w, y);
    give(&w, p, s);
    world_run(&w, s, SIZE_MAX);
    poll_pool(&w);
    CUdeviceptr q = take(&w, PAGES, world_stream(&w));
    cr_expect_eq(q, p, "the memory waits for a stream that never used it");
    give(&w, q, s);
    world_close(&w);
}

/* Also where it was freed on that stream, which is the end of its use there. */
Test(use, of_the_freeing_stream_keeps_no_record)
{
    struct world w;
    world_open(&w, NULL);
    CUstream s = world_stream(&w), t = world_stream(&w);
    CUdeviceptr p = take(&w, 2, t);
    use(&w, p, s);
    give(&w, p, s);
    must_work(vpmm_stream_release(w.pool, s));
    must_work(vpmm_stream_release(w.pool, t));
    world_drain(&w);
    cr_expect_eq(load_sc_u32(&stream_at(&w.pool->arena.streams, 1)->state), STREAM_UNUSED);
    cr_expect_eq(load_sc_u32(&stream_at(&w.pool->arena.streams, 2)->state), STREAM_UNUSED);
    world_close(&w);
}

/* Only a later call with such a stream records on it. */
Test(use, of_a_private_stream_ends_with_its_next_call)
{
    EACH_KIND(bytes)
    {
        struct setup setup = setup_default();
        setup.pool.captures = true;
        setup.pool.reuse = VPMM_REUSE_COMPLETED;
        struct world w;
        world_open(&w, &setup);
        CUstream s = world_stream(&w), x = world_stream(&w);
        CUdeviceptr p = free_while_used(&w, *bytes, s, x);
        world_drain(&w); /* all work is done, and of x nobody knows it */
        CUdeviceptr q = take_bytes(&w, *bytes, s);
        cr_expect_neq(q, p, "%zu bytes are free before x has recorded anything", *bytes);
        give(&w, take(&w, 1, x), x);
        world_drain(&w);
        cr_expect_eq(take_bytes(&w, *bytes, s), p, "%zu bytes are not free again", *bytes);
        give(&w, p, s);
        give(&w, q, s);
        world_close(&w);
    }
}

/* Nobody may look at such a stream after the call that was given it: the use ends with the latest vpmm_use. */
Test(use, of_an_eager_stream_ends_with_the_latest_word_about_it)
{
    EACH_KIND(bytes)
    {
        struct setup setup = setup_default();
        setup.pool.streams = VPMM_STREAMS_EAGER;
        setup.pool.reuse = VPMM_REUSE_COMPLETED;
        struct world w;
        world_open(&w, &setup);
        CUstream s = world_stream(&w), x = world_stream(&w);
        CUdeviceptr p = take_bytes(&w, *bytes, s);
        use(&w, p, x);
        order_after(&w, x, s);
        keep_busy(&w, x);
        fill(&w, p, 1, 1, x);
        use(&w, p, x);
        uint64_t records = world_calls(&w, "cuEventRecord");
        give(&w, p, s);
        cr_expect_eq(world_calls(&w, "cuEventRecord"), records + 1, "of s alone");
        world_run(&w, s, SIZE_MAX);
        CUdeviceptr q = take_and_write(&w, *bytes, s);
        cr_expect_neq(q, p);
        give(&w, q, s);
        world_drain(&w);
        cr_expect_eq(ending(&w), 0);
        world_close(&w);
    }
}

/* Streams come and go, and neither their records nor the memory that they have used pile up. */
static void expect_nothing_piled_up(struct world *w)
{
    uint32_t records = load_acquire_u32(&w->pool->arena.streams.slots) - 1;
    cr_expect_lt(records, 10, "%u records of streams", records);
    cr_expect_leq(stats_of(w).mapped_bytes, 8 * PAGE);
    cr_expect_leq(ending(w), 4 * PAGE);
}

enum { LIVES = 100 };

static void streams_come_and_go(vpmm_streams streams)
{
    struct setup setup = setup_default();
    setup.pool.streams = streams;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    for (int i = 0; i < LIVES; i++) {
        CUstream x = world_stream(&w);
        CUdeviceptr p = take(&w, 1, s);
        use(&w, p, x);
        if (streams != VPMM_STREAMS_EAGER)
            must_work(vpmm_stream_release(w.pool, x));
        world_stream_destroy(&w, x);
        give(&w, p, s);
        world_drain(&w);
    }
    expect_nothing_piled_up(&w);
    world_close(&w);
}
/* Of one allocation that lives on: neither a record for each stream nor a list of them. */
Test(use, of_streams_that_come_and_go_is_forgotten_before_the_free)
{
    enum { STREAMS = 300, RECORDS = 16 };
    EACH_KIND(bytes)
    {
        struct world w;
        world_open(&w, NULL);
        CUstream s = world_stream(&w);
        CUdeviceptr p = take_bytes(&w, *bytes, s);
        for (int i = 0; i < STREAMS; i++) {
            CUstream x = world_stream(&w);
            use(&w, p, x);
            must_work(vpmm_stream_release(w.pool, x));
            world_run(&w, x, SIZE_MAX);
            world_stream_destroy(&w, x);
            poll_pool(&w);
        }
        uint32_t slots = load_acquire_u32(&w.pool->arena.streams.slots);
        cr_expect_leq(slots, RECORDS, "%u records for one stream at once", slots);
        CUstream last = world_stream(&w);
        order_after(&w, last, s);
        use(&w, p, last);
        keep_busy(&w, last);
        fill(&w, p, 1, 1, last); /* a race, if the memory is another's before it */
        must_work(vpmm_stream_release(w.pool, last));
        give(&w, p, s);
        world_run(&w, s, SIZE_MAX);
        poll_pool(&w);
        give(&w, take_and_write(&w, *bytes, s), s);
        world_drain(&w);
        cr_expect_eq(ending(&w), 0);
        world_close(&w);
    }
}

/* A list that is full makes room by what has passed, not by what is merely released. */
Test(use, of_a_released_stream_stays_in_a_full_list)
{
    needs_simulator();
    struct setup setup = setup_default();
    struct world w;
    setup.pool.reuse = VPMM_REUSE_COMPLETED;
    world_open(&w, &setup);
    CUstream s = world_stream(&w), t[4];
    CUdeviceptr p = take(&w, 4, s);
    for (int i = 0; i < 4; i++)
        t[i] = world_stream(&w);
    for (int i = 0; i < 3; i++)
        use(&w, p, t[i]);
    keep_busy(&w, t[0]);
    must_work(vpmm_stream_release(w.pool, t[0]));
    use(&w, p, t[3]);
    give(&w, p, s);
    for (int i = 0; i < 3; i++) {
        world_run(&w, s, SIZE_MAX);
        for (int j = 1; j < 4; j++)
            world_run(&w, t[j], SIZE_MAX);
        poll_pool(&w);
    }
    CUdeviceptr q = take(&w, 4, t[1]);
    cr_expect_neq(q, p, "memory is handed out that a released stream uses");
    give(&w, q, t[1]);
    world_drain(&w);
    world_close(&w);
}

Test(use, of_streams_that_are_released_leaves_nothing_behind)
{
    needs_simulator();
    streams_come_and_go(VPMM_STREAMS_CHECKED);
}
Test(use, of_eager_streams_leaves_nothing_behind)
{
    needs_simulator();
    streams_come_and_go(VPMM_STREAMS_EAGER);
}

struct life {
    struct world *w;
    CUdeviceptr p;
    vpmm_status status;
};

static void *live(void *data)
{
    struct life *life = data;
    life->w->driver->cuCtxSetCurrent(life->w->context);
    life->status = vpmm_use_ptsz(life->w->pool, life->p, 0);
    life->w->driver->cuStreamSynchronize(CU_STREAM_PER_THREAD); /* nobody else can run it */
    return NULL;
}
Test(use, of_threads_own_streams_leaves_nothing_behind)
{
    needs_simulator();
    struct setup setup = setup_default();
    setup.sim.stepped = false;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    for (int i = 0; i < LIVES; i++) {
        struct life life = {.w = &w, .p = take(&w, 1, s)};
        pthread_t thread;
        cr_assert_eq(pthread_create(&thread, NULL, live, &life), 0);
        pthread_join(thread, NULL);
        require(life.status == VPMM_SUCCESS, "%s", vpmm_status_name(life.status));
        give(&w, life.p, s);
        world_drain(&w);
    }
    expect_nothing_piled_up(&w);
    world_close(&w);
}

/*
 * A thread's own stream has ended, with all that it did, and its record is another stream's, which uses the memory too.
 */
Test(use, by_the_next_stream_of_a_record_counts)
{
    needs_simulator();
    EACH_KIND(bytes)
    {
        struct setup setup = setup_default();
        setup.pool.reuse = VPMM_REUSE_COMPLETED;
        struct world w;
        world_open(&w, &setup);
        CUstream s = world_stream(&w);
        struct life life = {.w = &w, .p = take_bytes(&w, *bytes, s)};
        pthread_t thread;
        cr_assert_eq(pthread_create(&thread, NULL, live, &life), 0);
        pthread_join(thread, NULL);
        cr_assert_eq(life.status, VPMM_SUCCESS);
        for (int i = 0; i < 3; i++) /* its end is seen, and then that nothing is left of it */
            world_drain(&w);
        CUstream x = world_stream(&w);
        keep_busy(&w, x);
        fill(&w, life.p, 1, 1, x);
        uint32_t records = load_acquire_u32(&w.pool->arena.streams.slots);
        use(&w, life.p, x);
        cr_assert_eq(load_acquire_u32(&w.pool->arena.streams.slots), records, "the record is not used again");
        give(&w, life.p, s);
        world_run(&w, s, SIZE_MAX);
        CUdeviceptr q = take_and_write(&w, *bytes, s);
        cr_expect_neq(q, life.p);
        give(&w, q, s);
        world_close(&w);
    }
}

/* ---- when memory is needed ---- */

/* All of the device is freed memory that a stream has used on which nobody records: a wait needs a byte of it. */
static void fill_the_device(const struct setup *setup, CUstream special)
{
    enum { ALL = 16 };
    needs_simulator();
    struct world w;
    CUdeviceptr p[ALL];
    size_t n = 0;
    world_open(&w, setup);
    CUstream s = world_stream(&w), x = special ? special : world_stream(&w), other = world_stream(&w);
    CUdeviceptr first = take(&w, 1, s);
    use(&w, first, x); /* the pool meets x while there is memory */
    give(&w, first, s);
    world_drain(&w);
    while (n < ALL && vpmm_malloc(w.pool, PAGE, s, &p[n]) == VPMM_SUCCESS)
        n++;
    for (size_t i = 0; i < n; i++)
        use(&w, p[i], x);
    for (size_t i = 0; i < n; i++)
        give(&w, p[i], s);
    world_step(&w);
    must_work(vpmm_poll(w.pool));
    give(&w, take(&w, 2, other), other);
    must_work(vpmm_trim(w.pool, 0, NULL));
    cr_expect_eq(ending(&w), 0);
    world_close(&w);
}

Test(use, of_a_full_device_is_waited_for_where_the_program_captures)
{
    struct setup setup = setup_default();
    setup.sim.memory_bytes = 16 * PAGE;
    setup.pool.captures = true;
    fill_the_device(&setup, NULL);
}
Test(use, of_a_full_device_is_waited_for_where_stream_0_uses_it)
{
    struct setup setup = setup_default();
    setup.sim.memory_bytes = 16 * PAGE;
    fill_the_device(&setup, CU_STREAM_LEGACY);
}

Test(use, a_request_that_would_fail_waits_for_the_end)
{
    struct setup setup = setup_default();
    setup.pool.max_mapped = PAGES * PAGE;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w), x = world_stream(&w);
    free_while_used(&w, PAGES * PAGE, s, x);
    CUdeviceptr q = take_and_write(&w, PAGES * PAGE, s);
    give(&w, q, s);
    cr_expect_eq(w.mismatches, 0);
    world_close(&w);
}

Test(use, an_event_that_cannot_be_recorded_is_made_up_for_later)
{
    needs_simulator();
    EACH_KIND(bytes)
    {
        struct world w;
        world_open(&w, NULL);
        CUstream s = world_stream(&w), x = world_stream(&w);
        CUdeviceptr p = take_bytes(&w, *bytes, s);
        keep_busy(&w, x);
        use(&w, p, x);
        vpmm_sim_fail(w.sim, "cuEventRecord", 1, CUDA_ERROR_OUT_OF_MEMORY, true);
        give(&w, p, s);
        poll_pool(&w);
        vpmm_sim_fail(w.sim, "cuEventRecord", 0, CUDA_SUCCESS, false);
        cr_expect_neq(ending(&w), 0);
        world_drain(&w);
        cr_expect_eq(ending(&w), 0);
        world_close(&w);
    }
}

/* A pool whose device is lost ends with memory in each of the new states, and leaves none of the host's. */
Test(use, of_a_lost_device_ends_with_the_pool)
{
    needs_simulator();
    struct world w;
    world_open(&w, NULL);
    CUstream s = world_stream(&w), x = world_stream(&w);
    EACH_KIND(bytes)
    {
        free_while_used(&w, *bytes, s, x);
        use(&w, take_bytes(&w, *bytes, s), x);
    }
    vpmm_sim_fail(w.sim, "cuEventQuery", 1, CUDA_ERROR_LAUNCH_FAILED, true);
    must_fail(VPMM_ERROR_DRIVER, vpmm_poll(w.pool));
    must_fail(VPMM_ERROR_DRIVER, vpmm_pool_destroy(w.pool));
    world_stream_destroy(&w, s);
    world_stream_destroy(&w, x);
    cr_assert_eq(w.driver->cuDevicePrimaryCtxRelease(w.device), CUDA_SUCCESS);
    cr_expect_gt(vpmm_sim_destroy(w.sim), 0); /* what the pool had to give up */
}

/* ---- threads ---- */

enum { THREADS = 4, ROUNDS = 2000 };

struct user {
    struct world *w;
    CUdeviceptr p;
    CUstream stream;
    vpmm_status status;
};

static void *use_again_and_again(void *data)
{
    struct user *user = data;
    for (int i = 0; i < ROUNDS && user->status == VPMM_SUCCESS; i++)
        user->status = vpmm_use(user->w->pool, user->p, user->stream);
    return NULL;
}

Test(use, by_several_threads_at_once_is_of_all_their_streams)
{
    EACH_KIND(bytes)
    {
        struct world w;
        world_open(&w, NULL);
        CUstream s = world_stream(&w);
        struct user user[THREADS];
        pthread_t thread[THREADS];
        CUdeviceptr p = take_bytes(&w, *bytes, s);
        for (int i = 0; i < THREADS; i++) {
            user[i] = (struct user){.w = &w, .p = p, .stream = world_stream(&w)};
            keep_busy(&w, user[i].stream);
            cr_assert_eq(pthread_create(&thread[i], NULL, use_again_and_again, &user[i]), 0);
        }
        for (int i = 0; i < THREADS; i++) {
            pthread_join(thread[i], NULL);
            cr_expect_eq(user[i].status, VPMM_SUCCESS);
        }
        give(&w, p, s);
        world_run(&w, s, SIZE_MAX);
        for (int i = 0; i < THREADS; i++) {
            poll_pool(&w);
            cr_expect_eq(ending(&w) != 0, i < THREADS - 1);
            world_run(&w, user[i].stream, SIZE_MAX);
        }
        world_close(&w);
    }
}

/* ---- a release that fails ---- */

/* The driver refuses each event of one stream; within the first refusal another thread frees what the stream uses. */
static struct {
    const vpmm_driver *real;
    struct world *w;
    CUstream stream, freeing;
    CUdeviceptr p;
    bool refuses, has_slept; /* the reaper, before the refusal */
    vpmm_status status;
} refusal;

static void *free_meanwhile(void *unused)
{
    (void)unused;
    refusal.w->driver->cuCtxSetCurrent(refusal.w->context);
    refusal.status = vpmm_free(refusal.w->pool, refusal.p, refusal.freeing);
    return NULL;
}

/* False: it is late. */
static bool wait_until(bool (*holds)(const struct arena *))
{
    for (int i = 0; i < 20000; i++) {
        if (holds(&refusal.w->pool->arena))
            return true;
        clock_sleep_us(1000);
    }
    return false;
}

static bool sleeps(const struct arena *arena)
{
    return load_sc_u32(&arena->bell.asleep);
}

static bool has_marked_all(const struct arena *arena)
{
    return !streams_unmarked(&arena->streams);
}

static CUresult CUDAAPI record_or_refuse(CUevent event, CUstream stream)
{
    pthread_t thread;
    if (stream != refusal.stream || !refusal.refuses)
        return refusal.real->cuEventRecord(event, stream);
    if (refusal.p) {
        pthread_create(&thread, NULL, free_meanwhile, NULL);
        pthread_join(thread, NULL);
        refusal.p = 0;
        refusal.has_slept = wait_until(sleeps);
    }
    return CUDA_ERROR_OUT_OF_MEMORY;
}

Test(use, freed_during_a_release_that_fails_is_the_reaper_s_to_end)
{
    needs_simulator();
    struct setup setup = setup_default();
    struct world w;
    setup.sim.stepped = false;
    setup.pool.reaper = true;
    world_open_without_pool(&w, &setup);
    vpmm_driver driver = *w.driver;
    driver.cuEventRecord = record_or_refuse;
    setup.pool.driver = &driver;
    must_work(vpmm_pool_create(&setup.pool, &w.pool));
    refusal.real = w.driver;
    refusal.w = &w;
    refusal.freeing = world_stream(&w);
    refusal.stream = world_stream(&w);
    CUdeviceptr p = refusal.p = take(&w, PAGES, refusal.freeing);
    use(&w, p, refusal.stream);
    refusal.refuses = true;
    must_fail(VPMM_ERROR_DRIVER, vpmm_stream_release(w.pool, refusal.stream));
    cr_expect_eq(refusal.status, VPMM_SUCCESS);
    cr_expect(refusal.has_slept, "the reaper was busy all the time: this shows nothing");
    refusal.refuses = false;
    cr_expect(wait_until(has_marked_all), "the reaper sleeps over a fence that has no event");
    must_work(vpmm_pool_destroy(w.pool));
    w.pool = NULL;
    world_close(&w);
}
