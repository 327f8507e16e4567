/*
 * The fault loop. A scenario is run once in peace and the library's driver calls are counted by name. Then, for each
 * name and each i, it is run again with the i-th such call failing once, or from then on, with each of several codes,
 * before the call takes effect or after. Calls that the library makes in answer to a fault alone are failed together
 * with it, so that none is left that never failed. Whatever happens: each function of the pool succeeds or gives an
 * error with words, the audit passes after each failure, the pool's figures of physical memory are the simulator's and
 * stay under the cap, memory that is live can be freed, and once the fault is gone the next malloc works and nothing
 * leaks.
 *
 * Each scenario is run so in one setting or two with every fault, and in all settings (SETTINGS) with some: each name
 * once and from then on, before its effect and after, of which call and with which code being drawn (VPMM_TEST_SEED;
 * 1). VPMM_TEST_SETTINGS=2/5 is the third fifth of the settings. In each fifth, and in 2/17, is each value of each
 * setting.
 *
 * What is excused, since no caller of the driver could do better:
 *   - the leak of an object that a creating call made and, reporting failure, did not hand over;
 *   - the leak of an object that the driver refused to take back, if the pool said so, or it was an event;
 *   - with a free that took effect and reported failure, the free of the same address failing again, if it was handed
 *     out in between: the caller then holds it twice;
 *   - a handle or an allocation that the driver calls none, again and again, while it is one: the pool then takes it
 * for released;
 *   - a pool whose device is lost, by an answer that speaks of the device and not of the call, for good.
 */
#include "pool/pool.h"
#include "support.h"

#include <stdio.h>
#include <stdlib.h>

static const char *const entry_names[] = {
#define ENTRY_NAME(name, version, parameters, arguments) #name,
    VPMM_DRIVER_ENTRIES(ENTRY_NAME)
#undef ENTRY_NAME
};
enum { ENTRIES = sizeof entry_names / sizeof entry_names[0] };

static const CUresult codes[] = {CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_UNKNOWN};
enum { CODES = sizeof codes / sizeof codes[0] };

/* ---- the library's calls, told from the test's ---- */

static const vpmm_driver *simulated;
static uint64_t made[ENTRIES]; /* since they were last cleared */

#define COUNTED_ENTRY(name, version, parameters, arguments)                                                            \
    static CUresult CUDAAPI counted_##name parameters                                                                  \
    {                                                                                                                  \
        made[ENTRY_##name]++;                                                                                          \
        return simulated->name arguments;                                                                              \
    }
VPMM_DRIVER_ENTRIES(COUNTED_ENTRY)

static const vpmm_driver counted = {.size = sizeof(vpmm_driver),
#define COUNTED_ROW(name, version, parameters, arguments) .name = counted_##name,
                                    VPMM_DRIVER_ENTRIES(COUNTED_ROW)};

/* The first calls of a name each fail once; of a name that is called more often, some of the others too. */
enum { EVERY_CALL_UP_TO = 24, SAMPLES_BEYOND = 8, HELD = 64 };

struct fault {
    const char *call;
    uint64_t nth;
    CUresult code;
    bool from_then_on, after;
};

struct held {
    CUdeviceptr pointer;
    CUstream stream;
    CUcontext context; /* that was current */
};

struct run {
    struct world w;
    struct setup setup;
    struct fault fault, second; /* the second with "" mostly */
    CUcontext other, current;   /* a second context of the device, and which one is the thread's */
    CUstream a, b;
    struct held held[HELD];
    int holds;
    bool failed;        /* some call of the pool's did */
    bool lost;          /* the pool is, for good */
    bool given_up;      /* a lost pool was destroyed, and said that it left things behind */
    size_t left_behind; /* by an earlier pool: physical memory */
};

typedef void scenario(struct run *);

#define run_assert(r, condition, ...) run_assert_at((r), (condition), #condition, __LINE__, "" __VA_ARGS__)

static void run_assert_at(struct run *r, bool good, const char *condition, int line, const char *more)
{
    const vpmm_config *c = &r->setup.pool;
    require(
        good,
        "line %d: %s %s: with call %llu of %s giving %d %s%s%s%s; streams %d, reuse %d, small %d, cache %zu, extent "
        "%zu, cap %zu; the pool's last words: %s",
        line, condition, more, (unsigned long long)r->fault.nth, r->fault.call, (int)r->fault.code,
        r->fault.from_then_on ? "from then on" : "once", r->fault.after ? ", having done it" : "",
        r->second.call[0] != 0 ? ", and with it " : "", r->second.call, (int)c->streams, (int)c->reuse, (int)c->small,
        c->cache_bytes, c->extent_size, c->max_mapped, vpmm_last_error());
}

static bool is_of(const struct fault *fault, const char *call)
{
    return strcmp(fault->call, call) == 0;
}

static bool concerns(const struct run *r, const char *call)
{
    return is_of(&r->fault, call) || is_of(&r->second, call);
}

/* What the driver says again and again is no handle, or no allocation, is taken for released. */
static bool lies(const struct fault *fault)
{
    bool takes = is_of(fault, "cuMemRelease") || is_of(fault, "cuMemFreeAsync") || is_of(fault, "cuMemFree");
    return takes && !fault->after && fault->code == CUDA_ERROR_INVALID_VALUE && fault->from_then_on;
}

/* What the driver's pool for small requests holds. */
static size_t small_bytes(struct run *r)
{
    cuuint64_t bytes = 0;
    CUmemoryPool pool = r->w.pool->async.pool;
    if (pool != NULL)
        run_assert(r, r->w.driver->cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &bytes) ==
                          CUDA_SUCCESS);
    return bytes;
}

/* What the pool has to wait for the device by, and what of it the driver would not take back. */
static size_t wait_blocks(const struct run *r)
{
    const struct streams *streams = &r->w.pool->arena.streams;
    size_t blocks = streams->wait.block != 0;
    for (uint32_t slot = 1; r->w.pool->paged && slot < load_acquire_u32(&streams->slots); slot++)
        blocks += stream_at(streams, slot)->wait.block != 0;
    return blocks;
}

/* The pool's figures against the simulator's. What was released, and not said to be, is quarantined too long at most.
 */
static void compare_held(struct run *r, const vpmm_stats *stats)
{
    size_t used = vpmm_sim_used_bytes(r->w.sim) - small_bytes(r) - r->left_behind,
           said = stats->mapped_bytes + stats->quarantined_bytes;
    char words[128];
    snprintf(words, sizeof words, "the device holds %zu bytes, the pool says %zu:", used, said);
    if (lies(&r->fault) || lies(&r->second))
        return;
    size_t blocks = wait_blocks(r) * PAGE;
    run_assert_at(r, (used >= said && used <= said + blocks) || (used < said && concerns(r, "cuMemRelease")),
                  "physical memory:", __LINE__, words);
    run_assert_at(r, !r->setup.pool.max_mapped || used <= r->setup.pool.max_mapped + blocks, "the cap:", __LINE__,
                  words);
}

static bool documented(vpmm_status status)
{
    return status == VPMM_ERROR_OUT_OF_MEMORY || status == VPMM_ERROR_OUT_OF_ADDRESS_SPACE ||
           status == VPMM_ERROR_NOT_SUPPORTED || status == VPMM_ERROR_NO_DRIVER || status == VPMM_ERROR_DRIVER ||
           status == VPMM_ERROR_HOST_MEMORY || status == VPMM_ERROR_INVALID_VALUE;
}

static void audit(struct run *r)
{
    if (r->w.pool == NULL)
        return;
    run_assert(r, vpmm_check(r->w.pool) == VPMM_SUCCESS, "the audit");
    vpmm_stats stats;
    run_assert(r, vpmm_stats_get(r->w.pool, &stats) == VPMM_SUCCESS);
    const char *violation = stats_violation(&stats);
    run_assert_at(r, violation == NULL, "statistics:", __LINE__, violation != NULL ? violation : "");
    compare_held(r, &stats);
}

/* Whoever has built, or waited to, is out of the queue, however that ended. */
static void expect_nobody_builds(struct run *r)
{
    const struct arena *arena = r->w.pool != NULL ? &r->w.pool->arena : NULL;
    run_assert(r, arena == NULL || (arena->turn.first == NULL && load_relaxed_u32(&arena->space.await.waiting) == 0),
               "the builder's turn was not given back");
}

/* What a function of the pool answered: whether it worked. */
static bool worked(struct run *r, vpmm_status status)
{
    expect_nobody_builds(r);
    if (status == VPMM_SUCCESS)
        return true;
    run_assert(r, documented(status), "an error that is not documented for this");
    run_assert(r, spoke(), "an error without words");
    r->failed = true;
    audit(r);
    return false;
}

/* The same of one that asks for no memory: nobody would know what to do about a want of it. */
static bool worked_without_memory(struct run *r, vpmm_status status)
{
    run_assert(r, status != VPMM_ERROR_OUT_OF_MEMORY, "a want of memory where none is asked for");
    return worked(r, status);
}

/* The driver would not wait: the pool is as it was. */
static void note_busy(struct run *r)
{
    run_assert(r, spoke(), "a refusal without words");
    r->failed = true;
    audit(r);
}

static void make_current(struct run *r, CUcontext context)
{
    r->current = context;
    run_assert(r, simulated->cuCtxSetCurrent(context) == CUDA_SUCCESS);
}

static void try_malloc(struct run *r, size_t bytes, CUstream stream)
{
    CUdeviceptr pointer = 0xdead;
    clear_words();
    if (!worked(r, vpmm_malloc(r->w.pool, bytes, stream, &pointer))) {
        run_assert(r, pointer == 0xdead, "the output is written on failure");
        return;
    }
    run_assert(r, r->holds < HELD, "(the scenario holds too much)");
    r->held[r->holds++] = (struct held){pointer, stream, r->current};
}

/* Frees the i-th that is held, on its stream; it stays held if that fails. */
static void try_free(struct run *r, int i)
{
    if (i >= r->holds)
        return;
    clear_words();
    if (worked(r, vpmm_free(r->w.pool, r->held[i].pointer, r->held[i].stream)))
        r->held[i] = r->held[--r->holds];
}

static void try_poll(struct run *r)
{
    clear_words();
    (void)worked_without_memory(r, vpmm_poll(r->w.pool));
}

static void try_trim(struct run *r)
{
    clear_words();
    (void)worked_without_memory(r, vpmm_trim(r->w.pool, 0, NULL));
}

static void settle(struct run *r)
{
    for (int i = 0; i < 4; i++) {
        world_step(&r->w);
        try_poll(r);
    }
}

static bool takes_back(const char *call)
{
    return strstr(call, "Release") != NULL || strstr(call, "Destroy") != NULL || strstr(call, "Free") != NULL ||
           strstr(call, "Unmap") != NULL;
}

static void arm(struct run *r, const struct fault *fault)
{
    if (fault->call[0] != 0)
        (fault->after ? vpmm_sim_fail_after : vpmm_sim_fail)(r->w.sim, fault->call, fault->nth, fault->code,
                                                             fault->from_then_on);
}

static void disarm(struct run *r, const struct fault *fault)
{
    if (fault->call[0] != 0)
        vpmm_sim_fail(r->w.sim, fault->call, 0, CUDA_SUCCESS, false);
}

/* The pool took an answer for the loss of its device: for good, so the fault's end does not help. */
static bool may_be_lost(const struct fault *fault)
{
    return strstr(fault->call, "Query") != NULL || strstr(fault->call, "Synchronize") != NULL ||
           fault->code == CUDA_ERROR_UNKNOWN;
}

/* --- scenarios ------------------------------------------------------------------------------------------------------
 */

static void create(struct run *r)
{
    clear_words();
    vpmm_pool *pool = NULL;
    if (worked(r, vpmm_pool_create(&r->setup.pool, &pool)))
        r->w.pool = pool;
    else
        run_assert(r, pool == NULL, "a pool comes with an error");
}

static bool may_be_lost_in(const struct run *r)
{
    return may_be_lost(&r->fault) || (r->second.call[0] != 0 && may_be_lost(&r->second));
}

static void create_and_destroy(struct run *r)
{
    create(r);
    if (r->w.pool == NULL)
        return;
    try_malloc(r, 2 * PAGE, r->a);
    try_free(r, 0);
    if (r->holds > 0)
        return;
    clear_words();
    vpmm_status status = vpmm_pool_destroy(r->w.pool);
    if (status == VPMM_ERROR_BUSY) { /* it ends when the fault has */
        note_busy(r);
        return;
    }
    r->w.pool = NULL; /* gone all the same */
    if (status != VPMM_SUCCESS)
        r->given_up = !worked_without_memory(r, status) && may_be_lost_in(r);
}

static void growth(struct run *r)
{
    try_malloc(r, PAGE, r->a);
    try_malloc(r, 5 * PAGE, r->a);
    try_malloc(r, 20 * PAGE, r->a);
    try_free(r, 1);
    try_malloc(r, 9 * PAGE, r->a);
}

static void moving(struct run *r)
{
    for (int i = 0; i < 8; i++)
        try_malloc(r, 2 * PAGE, r->a);
    for (int i = 0; i < 4; i++)
        try_free(r, i); /* every other one, since the last takes its place */
    try_malloc(r, 8 * PAGE, r->a);
    settle(r);
    try_malloc(r, 3 * PAGE, r->a);
}

/* The last that is held, by a stream that works on it while it is freed. */
static void try_use_and_free(struct run *r, size_t bytes, CUstream by)
{
    int last = r->holds;
    try_malloc(r, bytes, r->a);
    if (r->holds == last)
        return;
    keep_busy(&r->w, by);
    clear_words();
    (void)worked_without_memory(r, vpmm_use(r->w.pool, r->held[last].pointer, by));
    try_free(r, last);
}

static const size_t kinds[] = {4 * PAGE, 100 << 10, 1000};

static void using(struct run *r)
{
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        try_use_and_free(r, kinds[i], r->b);
    try_malloc(r, 4 * PAGE, r->a);
    clear_words();
    (void)worked_without_memory(r, vpmm_stream_release(r->w.pool, r->b));
    settle(r);
    try_use_and_free(r, 2 * PAGE, r->b);
    try_trim(r);
}

static void trimming(struct run *r)
{
    try_malloc(r, 4 * PAGE, r->a);
    try_malloc(r, 4 * PAGE, r->a);
    try_free(r, 0);
    settle(r);
    try_trim(r);
    try_malloc(r, 6 * PAGE, r->a);
}

static void waiting(struct run *r)
{
    try_malloc(r, 4 * PAGE, r->a);
    keep_busy(&r->w, r->a);
    try_free(r, 0);
    try_malloc(r, 4 * PAGE, r->b);
    keep_busy(&r->w, r->b);
    try_free(r, 0);
    try_malloc(r, 6 * PAGE, r->a);
    settle(r);
}

static void releasing(struct run *r)
{
    try_malloc(r, 4 * PAGE, r->a);
    keep_busy(&r->w, r->a);
    try_free(r, 0);
    if (stats_of(&r->w).mallocs > 0) {
        clear_words();
        (void)worked_without_memory(r, vpmm_stream_release(r->w.pool, r->a));
    }
    try_malloc(r, 4 * PAGE, r->b);
    settle(r);
}

static void small(struct run *r)
{
    for (int i = 0; i < 4; i++)
        try_malloc(r, 1000, r->a);
    try_free(r, 0);
    try_free(r, 0);
    try_malloc(r, PAGE / 2, r->b);
    settle(r);
    try_trim(r);
}

/* Device memory runs out: everything is tried, each part of which can fail. */
static void scarcity(struct run *r)
{
    for (int i = 0; i < 12; i++)
        try_malloc(r, 5 * PAGE, i % 2 != 0 ? r->a : r->b);
    try_malloc(r, 1000, r->a);
    keep_busy(&r->w, r->a);
    for (int i = 0; i < 6; i++)
        try_free(r, i);
    try_malloc(r, 28 * PAGE, r->a);
    try_malloc(r, 60 * PAGE, r->b);
    settle(r);
}

/*
 * Handles are in the way of the request (remap/make_way.h), and one is behind other work: [-1][1][-3][*4][-8][1][5] of
 * a device that has two pages more. Only what comes then fails.
 */
enum { MADE_WAY_FOR = 3 + 4 + 7 };

static void put_handles_in_the_way(struct run *r)
{
    try_malloc(r, PAGE, r->b);
    const size_t pages[] = {4, 4, 8, 1};
    for (size_t i = 0; i < sizeof pages / sizeof pages[0]; i++)
        try_malloc(r, pages[i] * PAGE, r->a);
    try_free(r, 2);
    settle(r);
    try_trim(r);
    try_malloc(r, 5 * PAGE, r->b);
    try_free(r, 3);
    try_free(r, 1);
    try_malloc(r, PAGE, r->a);
    settle(r);
    keep_busy(&r->w, r->b);
    try_free(r, 0);
    run_assert(r, !r->failed && strcmp(layout(&r->w), "[-1][1][-3][*4][-8][1][5]") == 0, "(before the fault)");
}

static bool is_gone(const struct run *r)
{
    return device_lost(r->w.pool->arena.device);
}

static void making_way(struct run *r)
{
    disarm(r, &r->fault);
    disarm(r, &r->second);
    put_handles_in_the_way(r);
    memset(made, 0, sizeof made);
    arm(r, &r->fault);
    arm(r, &r->second);
    int before = r->holds;
    uint64_t released = stats_of(&r->w).extents_released;
    try_malloc(r, MADE_WAY_FOR * PAGE, r->a);
    bool is_served = r->holds > before, is_once = !r->fault.from_then_on && r->second.call[0] == 0;
    if (r->fault.call[0] == 0)
        run_assert(r, is_served && stats_of(&r->w).extents_released >= released + 2, "no way was made");
    if (is_once && takes_back(r->fault.call))
        run_assert(r, is_served, "what the driver refused once is in the way for good");
    if (!is_served)
        try_malloc(r, MADE_WAY_FOR * PAGE, r->a);
    if (is_once && !is_gone(r))
        run_assert(r, r->holds > before, "the next request is not served");
}

/* The default streams of two contexts, whose work on the same memory nothing orders but the pool. */
static void two_contexts(struct run *r)
{
    const CUstream stream[] = {NULL, CU_STREAM_LEGACY, CU_STREAM_PER_THREAD};
    for (int i = 0; i < 3; i++) {
        make_current(r, i % 2 == 0 ? r->other : r->w.context);
        for (int j = 0; j < 3; j++) {
            int before = r->holds;
            try_malloc(r, 2 * PAGE, stream[j]);
            if (r->holds > before)
                (void)write_later(&r->w, r->held[before].pointer, 2, 1, stream[j]);
            try_free(r, before);
        }
    }
    make_current(r, r->w.context);
}

static void end_capture(struct run *r, CUstream stream)
{
    CUgraph graph = NULL;
    run_assert(r, simulated->cuStreamEndCapture(stream, &graph) == CUDA_SUCCESS, "the capture is lost");
    run_assert(r, simulated->cuGraphDestroy(graph) == CUDA_SUCCESS);
}

static void try_kinds(struct run *r)
{
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        try_malloc(r, kinds[i], r->a);
}

/* In a pool of graphs, as is the next. */
static void capturing(struct run *r)
{
    run_assert(r, simulated->cuStreamBeginCapture(r->a, CU_STREAM_CAPTURE_MODE_GLOBAL) == CUDA_SUCCESS);
    try_kinds(r);
    try_free(r, 1);
    try_free(r, 0);
    try_kinds(r);
    try_malloc(r, 9 * PAGE, r->b); /* which does not capture */
    end_capture(r, r->a);
    try_malloc(r, 6 * PAGE, r->a);
    try_trim(r);
}

static void try_park(struct run *r)
{
    clear_words();
    vpmm_status status = vpmm_park(r->w.pool);
    if (status != VPMM_ERROR_BUSY) {
        (void)worked_without_memory(r, status);
        return;
    }
    note_busy(r);
}

static void try_wake(struct run *r)
{
    clear_words();
    (void)worked(r, vpmm_wake(r->w.pool));
}

static void parking(struct run *r)
{
    try_kinds(r);
    try_malloc(r, 9 * PAGE, r->b);
    try_free(r, 1);
    keep_busy(&r->w, r->a);
    try_park(r);
    try_free(r, 0);
    try_park(r); /* what the driver has refused it may take now */
    try_wake(r);
    try_wake(r);
    try_kinds(r);
    try_park(r);
}

/* --- the loop -------------------------------------------------------------------------------------------------------
 */

static bool makes(const char *call)
{
    return strstr(call, "Create") != NULL || strstr(call, "Reserve") != NULL || strstr(call, "Retain") != NULL ||
           strstr(call, "Alloc") != NULL;
}

/* An error that is excused because the device is lost; the pool is from here on. */
static bool lost(struct run *r, vpmm_status status)
{
    if (status != VPMM_ERROR_DRIVER || !may_be_lost_in(r))
        return r->lost;
    run_assert(r, spoke(), "a lost device without words");
    r->lost = true;
    return true;
}

static void free_what_is_held(struct run *r)
{
    while (r->holds > 0) {
        struct held h = r->held[--r->holds];
        make_current(r, h.context);
        clear_words();
        vpmm_status status = vpmm_free(r->w.pool, h.pointer, h.stream);
        bool twice = status == VPMM_ERROR_INVALID_POINTER && concerns(r, "cuMemFreeAsync");
        run_assert(r, status == VPMM_SUCCESS || lost(r, status) || twice, "live memory cannot be freed");
    }
    make_current(r, r->w.context);
}

static void pool_works_again(struct run *r)
{
    clear_words();
    CUdeviceptr pointer = 0;
    vpmm_status status = vpmm_malloc(r->w.pool, 2 * PAGE, r->b, &pointer);
    if (lost(r, status))
        return;
    run_assert(r, status == VPMM_SUCCESS, "malloc after the fault is gone");
    run_assert(r, vpmm_free(r->w.pool, pointer, r->b) == VPMM_SUCCESS, "free after the fault is gone");
}

static void pool_wakes(struct run *r)
{
    clear_words();
    vpmm_status status = vpmm_wake(r->w.pool);
    run_assert(r, status == VPMM_SUCCESS || lost(r, status), "a pool cannot be woken after the fault is gone");
}

static void close_pool(struct run *r)
{
    clear_words();
    vpmm_status status = vpmm_pool_destroy(r->w.pool);
    run_assert(r, status != VPMM_ERROR_BUSY, "destroy finds live memory");
    r->w.pool = NULL;
    if (status != VPMM_SUCCESS)
        (void)worked_without_memory(r, status);
    run_assert(r, status == VPMM_SUCCESS || r->lost, "destroy");
}

/* Of one fault, if the pool is not lost. What the pool tries again it has given back by its end. */
static int leaks_by(const struct run *r, const struct fault *f, bool pool_first)
{
    bool tried_again = is_of(f, "cuMemUnmap") || is_of(f, "cuMemRelease") || is_of(f, "cuMemFreeAsync");
    if (lies(f) || is_of(f, "cuEventDestroy"))
        return 1000;
    if (takes_back(f->call) && r->failed && !(tried_again && pool_first))
        return 1000;
    if (f->after && makes(f->call) && strstr(f->call, "Retain") != NULL)
        return f->from_then_on ? 1000 : 1;
    return 0;
}

static int leaks_allowed(const struct run *r, bool pool_first)
{
    int leaks = leaks_by(r, &r->fault, pool_first) + leaks_by(r, &r->second, pool_first);
    return r->lost || r->given_up ? 1000 : leaks;
}

/* A call that took effect and reported failure may be made again on what is gone: harmless, and not to be told. */
static bool misuses_allowed(const struct run *r)
{
    return (r->fault.after && takes_back(r->fault.call)) || (r->second.after && takes_back(r->second.call));
}

static void open_run(struct run *r, const struct setup *setup, const struct fault *fault, const struct fault *second)
{
    static const struct fault none = {.call = ""};
    memset(r, 0, sizeof *r);
    r->setup = *setup;
    r->fault = fault != NULL ? *fault : none;
    r->second = second != NULL ? *second : none;
    world_open_without_pool(&r->w, setup);
    simulated = r->w.driver;
    r->setup.pool.driver = &counted;
    run_assert(r, simulated->cuCtxCreate(&r->other, 0, r->w.device) == CUDA_SUCCESS);
    make_current(r, r->w.context);
    r->a = world_stream(&r->w);
    r->b = world_stream(&r->w);
}

static void close_run(struct run *r, bool pool_first)
{
    run_assert(r, vpmm_sim_races(r->w.sim) == 0, "a race");
    run_assert(r, vpmm_sim_misuses(r->w.sim) == 0 || misuses_allowed(r), "a misuse");
    while (r->w.streams > 0)
        world_stream_destroy(&r->w, r->w.stream[r->w.streams - 1]);
    run_assert(r, simulated->cuCtxDestroy(r->other) == CUDA_SUCCESS);
    run_assert(r, simulated->cuDevicePrimaryCtxRelease(r->w.device) == CUDA_SUCCESS);
    int leaks = vpmm_sim_destroy(r->w.sim);
    run_assert(r, leaks <= leaks_allowed(r, pool_first), "leaks");
}

/* The pool is gone, or was never made: the device has all its memory again, unless the pool has said otherwise. */
static void look_behind(struct run *r)
{
    run_assert(r, simulated->cuCtxSynchronize() == CUDA_SUCCESS); /* the driver's pools go in stream order */
    r->left_behind = vpmm_sim_used_bytes(r->w.sim);
    run_assert(r, r->left_behind == 0 || (r->failed && takes_back(r->fault.call)) || r->given_up || lies(&r->fault),
               "memory stays behind");
}

/* `calls`: how often the library called each entry while the faults were there. */
static void run_scenario(struct run *r, scenario *play, const struct setup *setup, bool pool_first,
                         const struct fault *fault, const struct fault *second, uint64_t calls[ENTRIES])
{
    open_run(r, setup, fault, second);
    if (pool_first)
        create(r);
    memset(made, 0, sizeof made);
    arm(r, &r->fault);
    arm(r, &r->second);
    play(r);
    memcpy(calls, made, sizeof made);
    disarm(r, &r->fault);
    disarm(r, &r->second);
    if (r->w.pool == NULL)
        look_behind(r);
    audit(r);
    if (r->w.pool == NULL && !pool_first)
        create(r);
    run_assert(r, r->w.pool != NULL, "no pool after the fault is gone");
    if (setup->pool.graph)
        pool_wakes(r);
    free_what_is_held(r);
    pool_works_again(r);
    audit(r);
    close_pool(r);
    close_run(r, pool_first);
}

static struct fault fault_of(int entry, uint64_t nth, unsigned kind)
{
    return (struct fault){.call = entry_names[entry],
                          .nth = nth,
                          .code = codes[kind / 4 % CODES],
                          .from_then_on = (kind & 1) != 0,
                          .after = (kind & 2) != 0};
}

/* A scenario in one setting, and what of its entries has failed. */
struct loop {
    scenario *play;
    const struct setup *setup;
    bool pool_first;
    uint64_t calls[ENTRIES];     /* in peace */
    bool failed[ENTRIES];        /* in some run */
    struct fault cause[ENTRIES]; /* of the others: a fault in answer to which the library called them */
    uint64_t runs;
};

static void fail_one(struct loop *l, int entry, uint64_t nth, unsigned kind)
{
    static struct run r;
    uint64_t calls[ENTRIES];
    struct fault fault = fault_of(entry, nth, kind);
    run_scenario(&r, l->play, l->setup, l->pool_first, &fault, NULL, calls);
    l->runs++;
    l->failed[entry] = true;
    for (int i = 0; i < ENTRIES; i++)
        if (calls[i] > 0 && l->calls[i] == 0 && l->cause[i].call == NULL)
            l->cause[i] = fault;
}

/* Each entry that was called in answer to a fault alone, in all ways, with the fault that it answers. What only both
 * together lead to is failed in another scenario. */
static void fail_answers(struct loop *l)
{
    static struct run r;
    uint64_t calls[ENTRIES];
    for (int entry = 0; entry < ENTRIES; entry++)
        for (unsigned kind = 0; l->cause[entry].call != NULL && kind < 4 * CODES; kind++) {
            struct fault second = fault_of(entry, 1, kind);
            run_scenario(&r, l->play, l->setup, l->pool_first, &l->cause[entry], &second, calls);
            l->failed[entry] = true;
        }
}

static void loop_begin(struct loop *l, scenario *play, const struct setup *setup, bool pool_first)
{
    static struct run r;
    memset(l, 0, sizeof *l);
    l->play = play;
    l->setup = setup;
    l->pool_first = pool_first;
    run_scenario(&r, play, setup, pool_first, NULL, NULL, l->calls);
}

static void loop_end(struct loop *l)
{
    fail_answers(l);
    for (int entry = 0; entry < ENTRIES; entry++)
        require(l->failed[entry] || (l->calls[entry] == 0 && l->cause[entry].call == NULL),
                "the library calls %s, which was never made to fail", entry_names[entry]);
}

static bool worth_failing(uint64_t nth, uint64_t calls)
{
    return nth <= EVERY_CALL_UP_TO || nth % (1 + (calls - EVERY_CALL_UP_TO) / SAMPLES_BEYOND) == 0;
}

static void loop(scenario *play, const struct setup *setup, bool pool_first)
{
    struct loop l;
    loop_begin(&l, play, setup, pool_first);
    for (int entry = 0; entry < ENTRIES; entry++)
        for (uint64_t nth = 1; nth <= l.calls[entry]; nth++)
            for (unsigned kind = 0; worth_failing(nth, l.calls[entry]) && kind < 4 * CODES; kind++)
                fail_one(&l, entry, nth, kind);
    loop_end(&l);
    cr_assert_gt(l.runs, 100, "the scenario makes no driver calls to speak of");
}

/* ---- in all settings ---- */

enum { SETTINGS = 3 * 3 * 2 * 2 * 3 * 2 };

/* Every how many-th setting is played, and which is the first. */
static void settings_share(unsigned *first, unsigned *step)
{
    const char *text = getenv("VPMM_TEST_SETTINGS");
    *first = 0;
    *step = 1;
    require(text == NULL || (sscanf(text, "%u/%u", first, step) == 2 && *first < *step && *step < SETTINGS),
            "VPMM_TEST_SETTINGS=%s: it is a part of so many, 0/5 to 4/5 for example", text);
}

static unsigned digit(unsigned *index, unsigned base)
{
    unsigned value = *index % base;
    *index /= base;
    return value;
}

static void apply_setting(struct setup *setup, unsigned index)
{
    static const vpmm_streams streams[] = {VPMM_STREAMS_CHECKED, VPMM_STREAMS_TRUSTED, VPMM_STREAMS_EAGER};
    static const vpmm_reuse reuse[] = {VPMM_REUSE_WAIT_DEVICE, VPMM_REUSE_COMPLETED, VPMM_REUSE_WAIT_HOST};
    static const vpmm_small small[] = {VPMM_SMALL_SLAB, VPMM_SMALL_ASYNC};
    setup->pool.streams = streams[digit(&index, 3)];
    setup->pool.reuse = reuse[digit(&index, 3)];
    setup->pool.small = small[digit(&index, 2)];
    setup->pool.cache_bytes = digit(&index, 2) ? 64 * PAGE : 0;
    unsigned pages = digit(&index, 3);
    setup->pool.extent_size = pages == 1 ? PAGE : 0;
    setup->pool.page_size = pages == 2 ? PAGE / 8 : PAGE;
    setup->pool.max_mapped = digit(&index, 2) ? 24 * PAGE : 0;
}

static uint64_t seed(void)
{
    const char *text = getenv("VPMM_TEST_SEED");
    return text != NULL ? strtoull(text, NULL, 10) : 1;
}

static uint64_t draw(uint64_t *state)
{
    *state += UINT64_C(0x9E3779B97F4A7C15);
    uint64_t x = (*state ^ *state >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    return (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB) >> 20;
}

static void loop_in_all_settings(scenario *play, const struct setup *setup, bool pool_first)
{
    uint64_t state = seed();
    unsigned first, step;
    settings_share(&first, &step);
    for (unsigned index = first; index < SETTINGS; index += step) {
        struct setup chosen = *setup;
        struct loop l;
        apply_setting(&chosen, index);
        loop_begin(&l, play, &chosen, pool_first);
        for (int entry = 0; entry < ENTRIES; entry++)
            for (unsigned how = 0; l.calls[entry] > 0 && how < 4; how++) {
                uint64_t nth = 1 + draw(&state) % l.calls[entry]; /* drawn before the code, by each compiler */
                fail_one(&l, entry, nth, how + 4 * (unsigned)(draw(&state) % CODES));
            }
        loop_end(&l);
    }
}

TestSuite(faults, .init = needs_simulator);
TestSuite(all_settings, .init = needs_simulator);

Test(faults, create_and_destroy, .timeout = 300)
{
    struct setup setup = setup_default();
    setup.pool.initial_pages = 4;
    loop(create_and_destroy, &setup, false);
}

Test(faults, growth, .timeout = 300)
{
    struct setup setup = setup_default();
    loop(growth, &setup, true);
}

Test(faults, growth_with_one_page_extents, .timeout = 300)
{
    struct setup setup = setup_default();
    setup.pool.extent_size = PAGE;
    loop(growth, &setup, true);
}

Test(faults, moving_pages, .timeout = 300)
{
    struct setup setup = setup_default();
    setup.pool.extent_size = PAGE;
    setup.pool.max_mapped = 24 * PAGE;
    loop(moving, &setup, true);
}

Test(faults, trim, .timeout = 300)
{
    struct setup setup = setup_default();
    loop(trimming, &setup, true);
}

Test(faults, waiting_on_the_device, .timeout = 300)
{
    struct setup setup = setup_default();
    loop(waiting, &setup, true);
}

Test(faults, waiting_on_the_host, .timeout = 300)
{
    struct setup setup = setup_default();
    setup.pool.reuse = VPMM_REUSE_WAIT_HOST;
    loop(waiting, &setup, true);
}

Test(faults, stream_release, .timeout = 300)
{
    struct setup setup = setup_default();
    loop(releasing, &setup, true);
}

Test(faults, memory_that_two_streams_use, .timeout = 300)
{
    struct setup setup = setup_default();
    loop(using, &setup, true);
}

Test(faults, small_requests, .timeout = 300)
{
    struct setup setup = setup_default();
    loop(small, &setup, true);
}

Test(faults, small_requests_of_the_driver_s_pool, .timeout = 300)
{
    struct setup setup = setup_default();
    setup.pool.small = VPMM_SMALL_ASYNC;
    loop(small, &setup, true);
}

Test(faults, memory_runs_out, .timeout = 300)
{
    struct setup setup = setup_default();
    setup.sim.memory_bytes = 64 * PAGE;
    loop(scarcity, &setup, true);
}

Test(faults, handles_in_the_way_of_a_request, .timeout = 300)
{
    struct setup setup = setup_default();
    setup.sim.memory_bytes = 21 * PAGE;
    setup.pool.extent_size = 16 * PAGE;
    setup.pool.cache_bytes = 0; /* what is freed lies where the layout says */
    loop(making_way, &setup, true);
}

Test(faults, default_streams_of_two_contexts, .timeout = 300)
{
    struct setup setup = setup_default();
    loop(two_contexts, &setup, true);
}

static struct setup setup_of_graphs(void)
{
    struct setup setup = setup_default();
    setup.pool.graph = true;
    return setup;
}

Test(faults, a_pool_of_graphs_comes_and_goes, .timeout = 300)
{
    struct setup setup = setup_of_graphs();
    setup.pool.initial_pages = 4;
    loop(create_and_destroy, &setup, false);
}

Test(faults, a_pool_of_graphs_during_a_capture, .timeout = 300)
{
    struct setup setup = setup_of_graphs();
    loop(capturing, &setup, true);
}

Test(faults, a_pool_of_graphs_that_is_parked, .timeout = 300)
{
    struct setup setup = setup_of_graphs();
    setup.pool.max_mapped = 24 * PAGE;
    loop(parking, &setup, true);
}

Test(all_settings, create_and_destroy, .timeout = 300)
{
    struct setup setup = setup_default();
    setup.pool.initial_pages = 4;
    loop_in_all_settings(create_and_destroy, &setup, false);
}

Test(all_settings, growth, .timeout = 300)
{
    struct setup setup = setup_default();
    loop_in_all_settings(growth, &setup, true);
}

Test(all_settings, moving_pages, .timeout = 300)
{
    struct setup setup = setup_default();
    loop_in_all_settings(moving, &setup, true);
}

Test(all_settings, trim, .timeout = 300)
{
    struct setup setup = setup_default();
    loop_in_all_settings(trimming, &setup, true);
}

Test(all_settings, waiting, .timeout = 300)
{
    struct setup setup = setup_default();
    loop_in_all_settings(waiting, &setup, true);
}

Test(all_settings, stream_release, .timeout = 300)
{
    struct setup setup = setup_default();
    loop_in_all_settings(releasing, &setup, true);
}

Test(all_settings, memory_that_two_streams_use, .timeout = 300)
{
    struct setup setup = setup_default();
    loop_in_all_settings(using, &setup, true);
}

Test(all_settings, small_requests, .timeout = 300)
{
    struct setup setup = setup_default();
    loop_in_all_settings(small, &setup, true);
}

Test(all_settings, default_streams_of_two_contexts, .timeout = 300)
{
    struct setup setup = setup_default();
    loop_in_all_settings(two_contexts, &setup, true);
}

Test(all_settings, memory_runs_out, .timeout = 300)
{
    struct setup setup = setup_default();
    setup.sim.memory_bytes = 64 * PAGE;
    loop_in_all_settings(scarcity, &setup, true);
}
