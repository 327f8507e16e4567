/*
 * The wait for a whole context by a block of memory (space/context.h), also over a driver that hands addresses out
 * again, as CUDA's does and the simulator does not. And the calling thread's context, which no call changes.
 */
#include "pool/pool.h"
#include "support.h"

#include <limits.h>

enum { BLOCKS = 8 };

/* What cuMemAlloc and cuMemFree do below: addresses that were freed come back in turn. */
static struct {
    const vpmm_driver *below;
    CUcontext made_in[BLOCKS];        /* NULL: free */
    unsigned freed_at[BLOCKS], frees; /* UINT_MAX: never */
    bool refuses;                     /* the next free takes effect, and answers otherwise; */
    CUcontext of_program; /* then the program has memory at that address, made in this one; NULL: it has not */
} driver;

static const CUdeviceptr first_block = 0x7000000000000000;

static CUresult CUDAAPI alloc_block(CUdeviceptr *address, size_t bytes)
{
    int free = -1;
    (void)bytes;
    for (int i = 0; i < BLOCKS; i++)
        if (!driver.made_in[i] && (free < 0 || driver.freed_at[i] < driver.freed_at[free]))
            free = i;
    if (free < 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *address = first_block + (CUdeviceptr)free * 512;
    return driver.below->cuCtxGetCurrent(&driver.made_in[free]);
}

static CUresult CUDAAPI free_block(CUdeviceptr address)
{
    unsigned i = (unsigned)((address - first_block) / 512);
    CUcontext context = i < BLOCKS ? driver.made_in[i] : NULL, popped;
    if (!context)
        return CUDA_ERROR_INVALID_VALUE;
    driver.below->cuCtxPushCurrent(context);
    CUresult result = driver.below->cuCtxSynchronize();
    driver.below->cuCtxPopCurrent(&popped);
    bool refuses = driver.refuses;
    driver.refuses = false;
    driver.made_in[i] = refuses ? driver.of_program : NULL;
    driver.freed_at[i] = ++driver.frees;
    return refuses ? CUDA_ERROR_UNKNOWN : result;
}

struct stage {
    struct world w;
    vpmm_driver table;
    CUcontext other;
    CUstream s;
};

static void make_other(struct stage *k)
{
    CUcontext popped;
    cr_assert_eq(k->w.driver->cuCtxCreate(&k->other, 0, k->w.device), CUDA_SUCCESS);
    cr_assert_eq(k->w.driver->cuCtxPopCurrent(&popped), CUDA_SUCCESS);
}

static void open_stage(struct stage *k)
{
    struct setup setup = setup_default();
    setup.pool.captures = true; /* nobody can mark what a default stream uses, but a call on it */
    setup.pool.max_mapped = 6 * PAGE;
    world_open_without_pool(&k->w, &setup);
    make_other(k);
    driver.below = k->w.driver;
    for (int i = 0; i < BLOCKS; i++)
        driver.freed_at[i] = UINT_MAX;
    k->table = *k->w.driver;
    k->table.cuMemAlloc = alloc_block;
    k->table.cuMemFree = free_block;
    setup.pool.driver = &k->table;
    must_work(vpmm_pool_create(&setup.pool, &k->w.pool));
    k->s = world_stream(&k->w);
}

static void close_stage(struct stage *k)
{
    must_work(vpmm_pool_destroy(k->w.pool));
    k->w.pool = NULL;
    for (int i = 0; i < BLOCKS; i++)
        cr_expect_null(driver.made_in[i], "block %d is left", i);
    world_close_with(&k->w, k->other);
}

static void in_context(struct stage *k, CUcontext context)
{
    cr_assert_eq(k->w.driver->cuCtxSetCurrent(context), CUDA_SUCCESS);
}

enum users { OTHER = 1, OWN = 2 };

/* Memory of s that default streams use, the other context's in a kernel that has not ended if `works`. Freed on s. */
static void use_and_free(struct stage *k, unsigned users, bool works)
{
    CUdeviceptr p = take(&k->w, 2, k->s);
    if (users & OWN)
        must_work(vpmm_use(k->w.pool, p, 0));
    in_context(k, k->other);
    must_work(vpmm_use(k->w.pool, p, 0));
    if (works)
        fill(&k->w, p, 2, 1, 0);
    in_context(k, k->w.context);
    give(&k->w, p, k->s);
}

/* On the context's default stream. */
static size_t pending_in(struct stage *k, CUcontext context)
{
    in_context(k, context);
    size_t pending = vpmm_sim_pending(k->w.sim, 0);
    in_context(k, k->w.context);
    return pending;
}

/* A block of the other context, which the pool meets first, is freed, but the driver says that it is not. */
static void refuse_a_wait(struct stage *k, unsigned users)
{
    in_context(k, k->other);
    give(&k->w, take(&k->w, 2, 0), 0);
    in_context(k, k->w.context);
    must_work(vpmm_trim(k->w.pool, 0, NULL));
    use_and_free(k, users, false);
    driver.refuses = true;
    vpmm_trim(k->w.pool, 0, NULL); /* whatever it answers */
    cr_assert_not(driver.refuses, "no wait was refused");
}

/* All that was freed is seen to have passed, and has. */
static void expect_waited(struct stage *k)
{
    world_run(&k->w, k->s, SIZE_MAX);
    must_work(vpmm_trim(k->w.pool, 0, NULL));
    cr_expect_eq(pending_in(k, k->other), 0, "memory is taken to have passed under its user");
    cr_expect_eq(stats_of(&k->w).mapped_bytes, 0, "memory never passes");
}

/* Its address is another context's block then: the next free of it waits for that one, and shows nothing of its own. */
Test(contexts, a_block_whose_address_is_another_s_is_no_wait)
{
    needs_simulator();
    struct stage k;
    open_stage(&k);
    refuse_a_wait(&k, OTHER | OWN);
    use_and_free(&k, OTHER, true);
    expect_waited(&k);
    use_and_free(&k, OTHER | OWN, true);
    expect_waited(&k);
    close_stage(&k);
}

/* The same where it is memory of the program's. */
Test(contexts, a_block_whose_address_is_the_program_s_is_no_wait)
{
    needs_simulator();
    struct stage k;
    open_stage(&k);
    driver.of_program = k.w.context;
    refuse_a_wait(&k, OTHER);
    use_and_free(&k, OTHER, true);
    expect_waited(&k);
    close_stage(&k);
}

/* At a pool's end nothing is waited for by them any more: what was taken is known by a second try. */
Test(contexts, the_end_of_a_pool_bears_a_free_that_is_refused)
{
    needs_simulator();
    struct stage k;
    open_stage(&k);
    give(&k.w, take(&k.w, 2, k.s), k.s);
    world_run(&k.w, k.s, SIZE_MAX);
    must_work(vpmm_poll(k.w.pool));
    driver.refuses = true;
    close_stage(&k);
    cr_assert_not(driver.refuses, "no block was given back");
}

/*
 * What the only stream leaves without a mark others get by a wait for its context alone. On a device that the pool has
 * filled there is no block for that, so it is marked.
 */
Test(contexts, nothing_is_left_unmarked_that_cannot_be_waited_for)
{
    needs_simulator();
    struct setup setup = setup_default();
    struct world w;
    enum { MEMORY = 64, LONG = 56 };
    setup.sim.memory_bytes = MEMORY * PAGE;
    setup.sim.stepped = false;
    setup.pool.initial_pages = MEMORY;
    setup.pool.reaper = true;
    world_open(&w, &setup);
    for (int i = 0; i < 2; i++)
        give(&w, take(&w, LONG, NULL), NULL);
    cr_assert_eq(w.driver->cuStreamSynchronize(NULL), CUDA_SUCCESS);
    CUstream s = world_stream(&w);
    give(&w, take(&w, LONG, s), s);
    world_close(&w);
}

/* Waits look whether a context is there still, by making it current; the thread's own stack is as it was. */
Test(contexts, the_thread_s_own_context_stays_current)
{
    needs_simulator();
    struct stage k;
    CUcontext current = NULL;
    open_stage(&k);
    use_and_free(&k, OTHER | OWN, false);
    must_work(vpmm_trim(k.w.pool, 0, NULL));
    cr_assert_eq(k.w.driver->cuCtxPopCurrent(&current), CUDA_SUCCESS);
    cr_expect_eq(current, k.w.context, "another context is current after the wait");
    cr_assert_eq(k.w.driver->cuCtxGetCurrent(&current), CUDA_SUCCESS);
    cr_expect_null(current, "the wait has left a context below the thread's own");
    in_context(&k, k.w.context);
    close_stage(&k);
}

/* ---- two contexts, over the simulator's own blocks ---- */

static void open_two(struct stage *k, const struct setup *setup)
{
    *k = (struct stage){.s = NULL};
    world_open(&k->w, setup);
    make_other(k);
    in_context(k, k->w.context);
}

/* Where a default stream's frees are cached, nothing of it has a mark. */
static void open_two_unmarked(struct stage *k)
{
    struct setup setup = setup_default();
    setup.pool.captures = true;
    setup.pool.cache_bytes = 64 * PAGE;
    open_two(k, &setup);
}

static void use_and_cache(struct stage *k, CUcontext context, bool works)
{
    in_context(k, context);
    CUdeviceptr p = take(&k->w, 2, 0);
    if (works)
        fill(&k->w, p, 2, 1, 0);
    give(&k->w, p, 0);
    in_context(k, k->w.context);
}

/* Whichever the pool has met first. */
Test(contexts, a_trim_waits_for_each_context)
{
    needs_simulator();
    for (int first = 0; first < 2; first++) {
        struct stage k;
        open_two_unmarked(&k);
        use_and_cache(&k, first ? k.other : k.w.context, first);
        use_and_cache(&k, first ? k.w.context : k.other, !first);
        cr_assert_gt(pending_in(&k, k.other), 0);
        must_work(vpmm_trim(k.w.pool, 0, NULL));
        cr_expect_eq(pending_in(&k, k.other), 0, "order %d: the other context is not waited for", first);
        world_close_with(&k.w, k.other);
    }
}

/* That the other one could be waited for is no answer for both. */
Test(contexts, a_context_that_is_not_waited_for_keeps_the_pool)
{
    needs_simulator();
    struct stage k;
    open_two_unmarked(&k);
    use_and_cache(&k, k.w.context, true);
    use_and_cache(&k, k.other, false);
    vpmm_sim_fail(k.w.sim, "cuMemFree", 1, CUDA_ERROR_UNKNOWN, false);
    must_fail(VPMM_ERROR_BUSY, vpmm_pool_destroy(k.w.pool));
    cr_expect_gt(pending_in(&k, k.w.context), 0);
    world_close_with(&k.w, k.other);
}

/* A record that another context's stream had before has events of that one, which do not fit. */
Test(contexts, a_record_s_events_are_of_its_stream_s_context)
{
    needs_simulator();
    struct stage k;
    CUstream t;
    size_t released = 0;
    open_two(&k, NULL);
    CUstream s = world_stream(&k.w);
    for (int i = 0; i < STREAM_MARKS; i++) { /* each mark has its event */
        give(&k.w, take(&k.w, 2, s), s);
        world_drain(&k.w);
    }
    must_work(vpmm_stream_release(k.w.pool, s));
    world_drain(&k.w);
    must_work(vpmm_trim(k.w.pool, 0, NULL));
    in_context(&k, k.other);
    cr_assert_eq(k.w.driver->cuStreamCreate(&t, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CUdeviceptr p = take(&k.w, 2, t);
    fill(&k.w, p, 2, 1, t);
    give(&k.w, p, t);
    vpmm_sim_step(k.w.sim, t, SIZE_MAX);
    must_work(vpmm_poll(k.w.pool));
    must_work(vpmm_poll(k.w.pool));
    must_work(vpmm_trim(k.w.pool, 0, &released));
    cr_expect_eq(released, 2 * PAGE, "what the stream has freed never passes");
    must_work(vpmm_stream_release(k.w.pool, t));
    must_work(vpmm_poll(k.w.pool));
    cr_assert_eq(k.w.driver->cuStreamDestroy(t), CUDA_SUCCESS);
    in_context(&k, k.w.context);
    world_close_with(&k.w, k.other);
}

static bool has_block_of(struct stage *k, CUcontext context)
{
    const struct streams *streams = &k->w.pool->arena.streams;
    bool any = streams->wait.block && streams->wait.context == context;
    for (uint32_t slot = 1; slot < load_relaxed_u32(&streams->slots); slot++) {
        const struct wait_holder *holder = &stream_at(streams, slot)->wait;
        any |= holder->block && holder->context == context;
    }
    return any;
}

/* To wait by, once the device is full. */
Test(contexts, each_context_has_a_block)
{
    needs_simulator();
    struct stage k;
    open_two_unmarked(&k);
    use_and_cache(&k, k.w.context, false);
    in_context(&k, k.other);
    CUstream t;
    cr_assert_eq(k.w.driver->cuStreamCreate(&t, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    give(&k.w, take(&k.w, 2, t), t);
    cr_expect(has_block_of(&k, k.w.context));
    cr_expect(has_block_of(&k, k.other));
    must_work(vpmm_stream_release(k.w.pool, t));
    cr_assert_eq(k.w.driver->cuStreamDestroy(t), CUDA_SUCCESS);
    in_context(&k, k.w.context);
    world_close_with(&k.w, k.other);
}

/* Who meets it then cannot make the block, and says that it is wanted. */
Test(contexts, a_context_that_was_met_beside_a_wait_has_a_block_after_the_next)
{
    needs_simulator();
    struct stage k;
    open_two_unmarked(&k);
    pthread_mutex_lock(&k.w.pool->arena.streams.wait_lock);
    use_and_cache(&k, k.other, true);
    pthread_mutex_unlock(&k.w.pool->arena.streams.wait_lock);
    cr_assert_not(has_block_of(&k, k.other));
    must_work(vpmm_trim(k.w.pool, 0, NULL));
    cr_expect(has_block_of(&k, k.other));
    world_close_with(&k.w, k.other);
}

/* However many of a context's streams were met while there was no memory for it. */
Test(contexts, a_block_that_could_not_be_had_is_asked_for_once)
{
    enum { STREAMS = 8 };
    needs_simulator();
    struct setup setup = setup_default();
    setup.pool.captures = true;
    struct world w;
    world_open_without_pool(&w, &setup);
    vpmm_sim_fail(w.sim, "cuMemAlloc", 1, CUDA_ERROR_OUT_OF_MEMORY, true);
    setup.pool.driver = w.driver;
    must_work(vpmm_pool_create(&setup.pool, &w.pool));
    for (int i = 0; i < STREAMS; i++) {
        CUstream s = world_stream(&w);
        give(&w, take(&w, 1, s), s);
    }
    uint64_t asked = world_calls(&w, "cuMemAlloc");
    CUstream s = w.stream[0];
    CUdeviceptr p = take(&w, 100, s);
    cr_expect_eq(world_calls(&w, "cuMemAlloc") - asked, 1);
    vpmm_sim_fail(w.sim, "cuMemAlloc", 0, CUDA_SUCCESS, false);
    give(&w, p, s);
    world_close(&w);
}

/* ---- a call leaves the thread as it was ---- */

/* Without memory left for it, a malloc waits for what another stream has freed. */
Test(contexts, each_call_leaves_the_thread_as_it_was)
{
    needs_simulator();
    for (int captures = 0; captures < 2; captures++) {
        struct setup setup = setup_default();
        struct world w;
        CUdeviceptr p, q;
        setup.pool.captures = captures;
        setup.pool.cache_bytes = captures ? 64 * PAGE : 0;
        setup.pool.max_mapped = 8 * PAGE;
        world_open_without_pool(&w, &setup);
        setup.pool.driver = w.driver;
        CUstream s = world_stream(&w), t = world_stream(&w);
        cr_assert_eq(w.driver->cuCtxSetCurrent(NULL), CUDA_SUCCESS);
        must_leave_the_thread(&w, vpmm_pool_create(&setup.pool, &w.pool));
        must_leave_the_thread(&w, vpmm_malloc(w.pool, 6 * PAGE, s, &p));
        must_leave_the_thread(&w, vpmm_use(w.pool, p, t));
        must_leave_the_thread(&w, vpmm_free(w.pool, p, s));
        must_leave_the_thread(&w, vpmm_malloc(w.pool, 6 * PAGE, t, &p));
        must_leave_the_thread(&w, vpmm_malloc(w.pool, 1, 0, &q));
        must_leave_the_thread(&w, vpmm_free(w.pool, q, 0));
        must_leave_the_thread(&w, vpmm_malloc(w.pool, PAGE, 0, &q));
        must_leave_the_thread(&w, vpmm_free(w.pool, q, 0));
        must_leave_the_thread(&w, vpmm_free(w.pool, p, t));
        must_leave_the_thread(&w, vpmm_trim(w.pool, 0, NULL));
        must_leave_the_thread(&w, vpmm_poll(w.pool));
        must_leave_the_thread(&w, vpmm_stream_release(w.pool, s));
        must_leave_the_thread(&w, vpmm_pool_destroy(w.pool));
        w.pool = NULL;
        cr_assert_eq(w.driver->cuCtxSetCurrent(w.context), CUDA_SUCCESS);
        world_close(&w);
    }
}

/* ---- contexts that the driver does not let in ---- */

static int unknown; /* so many looks for the current context fail */

static CUresult CUDAAPI look_in_vain(CUcontext *context)
{
    return unknown > 0 && unknown-- ? CUDA_ERROR_UNKNOWN : driver.below->cuCtxGetCurrent(context);
}

/* Where it is not known what was current before a push that failed, nothing is popped: it may be the program's own. */
Test(contexts, the_program_s_own_is_not_popped)
{
    needs_simulator();
    for (int looks = 0; looks < 5; looks++) {
        struct setup setup = setup_default();
        struct world w;
        vpmm_driver table;
        CUdeviceptr p;
        CUcontext now = NULL;
        world_open_without_pool(&w, NULL);
        driver.below = w.driver;
        table = *w.driver;
        table.cuCtxGetCurrent = look_in_vain;
        setup.pool.driver = &table;
        must_work(vpmm_pool_create(&setup.pool, &w.pool));
        CUstream s = world_stream(&w);
        unknown = looks;
        vpmm_sim_fail(w.sim, "cuCtxPushCurrent", 1, CUDA_ERROR_UNKNOWN, true);
        if (vpmm_malloc(w.pool, 100 * PAGE, s, &p) == VPMM_SUCCESS)
            give(&w, p, s);
        unknown = 0;
        vpmm_sim_fail(w.sim, "cuCtxPushCurrent", 0, CUDA_SUCCESS, false);
        cr_assert_eq(w.driver->cuCtxGetCurrent(&now), CUDA_SUCCESS);
        cr_expect_eq(now, w.context, "after %d looks in vain", looks);
        world_close(&w);
    }
}

/* Whichever of its steps cannot enter it. */
Test(contexts, a_build_whose_context_is_refused_leaves_nothing)
{
    needs_simulator();
    uint64_t unwound = 0;
    for (uint64_t nth = 1; nth <= 8; nth++) {
        struct world w;
        CUdeviceptr p;
        world_open(&w, NULL);
        CUstream s = world_stream(&w);
        give(&w, take(&w, 1, s), s);
        world_drain(&w);
        cr_assert_eq(w.driver->cuCtxSetCurrent(NULL), CUDA_SUCCESS);
        vpmm_sim_fail(w.sim, "cuCtxPushCurrent", nth, CUDA_ERROR_UNKNOWN, false);
        if (vpmm_malloc(w.pool, 8 * PAGE, s, &p) == VPMM_SUCCESS)
            give(&w, p, s);
        vpmm_sim_fail(w.sim, "cuCtxPushCurrent", 0, CUDA_SUCCESS, false);
        cr_assert_eq(w.driver->cuCtxSetCurrent(w.context), CUDA_SUCCESS);
        unwound += stats_of(&w).unwound_context;
        world_audit(&w);
        give(&w, take(&w, 8, s), s);
        world_close(&w);
    }
    cr_expect_gt(unwound, 0, "no build's context was refused");
}

static void *destroy_in_another_context(void *data)
{
    struct world *w = data;
    CUcontext own;
    cr_assert_eq(w->driver->cuCtxCreate(&own, 0, w->device), CUDA_SUCCESS);
    vpmm_sim_fail(w->sim, "cuCtxPushCurrent", 2, CUDA_ERROR_UNKNOWN, true);
    (void)vpmm_pool_destroy(w->pool);
    vpmm_sim_fail(w->sim, "cuCtxPushCurrent", 0, CUDA_SUCCESS, false);
    w->pool = NULL;
    cr_assert_eq(w->driver->cuCtxDestroy(own), CUDA_SUCCESS);
    return NULL;
}

/*
 * A pool that ends makes calls that end others' captures, unless the thread's mode allows them: also where it cannot
 * enter.
 */
Test(contexts, a_pool_s_end_leaves_captures_alone_whatever_is_refused)
{
    needs_simulator();
    struct setup setup = setup_default();
    struct world w;
    pthread_t thread;
    CUgraph graph = NULL;
    setup.pool.captures = true;
    world_open(&w, &setup);
    CUstream s = world_stream(&w), t = world_stream(&w);
    give(&w, take(&w, 1, t), t);
    cr_assert_eq(w.driver->cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
    cr_assert_eq(pthread_create(&thread, NULL, destroy_in_another_context, &w), 0);
    pthread_join(thread, NULL);
    cr_expect_eq(w.driver->cuStreamEndCapture(s, &graph), CUDA_SUCCESS, "the capture is lost");
    if (graph)
        w.driver->cuGraphDestroy(graph);
    world_step(&w);
    while (w.streams > 0)
        world_stream_destroy(&w, w.stream[w.streams - 1]);
    (void)vpmm_sim_destroy(w.sim); /* what was refused stays behind */
}
