/*
 * The wait for a whole context by a block of memory (space/context.h), over a driver that hands addresses out again, as
 * CUDA's does and the simulator does not.
 */
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

static void open_stage(struct stage *k)
{
    struct setup setup = setup_default();
    CUcontext popped;
    setup.pool.captures = true; /* nobody can mark what a default stream uses, but a call on it */
    setup.pool.max_mapped = 6 * PAGE;
    world_open_without_pool(&k->w, &setup);
    cr_assert_eq(k->w.driver->cuCtxCreate(&k->other, 0, k->w.device), CUDA_SUCCESS);
    cr_assert_eq(k->w.driver->cuCtxPopCurrent(&popped), CUDA_SUCCESS);
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

static size_t pending_in_other(struct stage *k)
{
    in_context(k, k->other);
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
    cr_expect_eq(pending_in_other(k), 0, "memory is taken to have passed under its user");
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

/* A pool that ends makes calls that end others' captures, unless the thread's mode allows them: also where it cannot enter. */
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
