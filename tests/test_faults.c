/*
 * The fault loop. A scenario is run once in peace and its driver calls are counted by name. Then, for each name and
 * each i, it is run again with the i-th such call failing once, or from then on, with each of several codes, before
 * the call takes effect or after. Whatever happens: each function of the pool succeeds or gives an error with words,
 * the audit passes after each failure, memory that is live can be freed, and once the fault is gone the next malloc
 * works and nothing leaks.
 *
 * What is excused, since no caller of the driver could do better:
 *   - the leak of an object that a creating call made and, reporting failure, did not hand over;
 *   - the leak of an object that the driver refused to take back, if the pool said so;
 *   - with a free that took effect and reported failure, the free of the same memory failing again;
 *   - a pool whose device is lost, by an answer that speaks of the device and not of the call, for good.
 */
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
};

struct run {
    struct world w;
    struct setup setup;
    struct fault fault;
    CUstream a, b;
    struct held held[HELD];
    int holds;
    bool failed;   /* some call of the pool's did */
    bool lost;     /* the pool is, for good */
    bool given_up; /* a lost pool was destroyed, and said that it left things behind */
};

typedef void scenario(struct run *);

#define run_assert(r, condition, ...) run_assert_at((r), (condition), #condition, __LINE__, "" __VA_ARGS__)

static void run_assert_at(struct run *r, bool good, const char *condition, int line, const char *more)
{
    require(good, "line %d: %s %s: with call %llu of %s giving %d %s%s; the pool's last words: %s", line, condition,
            more, (unsigned long long)r->fault.nth, r->fault.call, (int)r->fault.code,
            r->fault.from_then_on ? "from then on" : "once", r->fault.after ? ", having done it" : "",
            vpmm_last_error());
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
}

/* What a function of the pool answered: whether it worked. */
static bool worked(struct run *r, vpmm_status status)
{
    if (status == VPMM_SUCCESS)
        return true;
    run_assert(r, documented(status), "an error that is not documented for this");
    run_assert(r, spoke(), "an error without words");
    r->failed = true;
    audit(r);
    return false;
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
    r->held[r->holds++] = (struct held){pointer, stream};
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
    (void)worked(r, vpmm_poll(r->w.pool));
}

static void try_trim(struct run *r)
{
    clear_words();
    (void)worked(r, vpmm_trim(r->w.pool, 0, NULL));
}

static void settle(struct run *r)
{
    for (int i = 0; i < 4; i++) {
        world_step(&r->w);
        try_poll(r);
    }
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
    r->w.pool = NULL; /* gone all the same */
    if (status != VPMM_SUCCESS)
        r->given_up = !worked(r, status) && may_be_lost(&r->fault);
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
        (void)worked(r, vpmm_stream_release(r->w.pool, r->a));
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

/* --- the loop -------------------------------------------------------------------------------------------------------
 */

static bool takes_back(const char *call)
{
    return strstr(call, "Release") != NULL || strstr(call, "Destroy") != NULL || strstr(call, "Free") != NULL ||
           strstr(call, "Unmap") != NULL;
}

static bool makes(const char *call)
{
    return strstr(call, "Create") != NULL || strstr(call, "Reserve") != NULL || strstr(call, "Retain") != NULL ||
           strstr(call, "Alloc") != NULL;
}

/* An error that is excused because the device is lost; the pool is from here on. */
static bool lost(struct run *r, vpmm_status status)
{
    if (status != VPMM_ERROR_DRIVER || !may_be_lost(&r->fault))
        return r->lost;
    run_assert(r, spoke(), "a lost device without words");
    r->lost = true;
    return true;
}

static void free_what_is_held(struct run *r)
{
    bool freed_already = r->fault.after && strstr(r->fault.call, "cuMemFreeAsync") != NULL;
    while (r->holds > 0) {
        struct held h = r->held[--r->holds];
        clear_words();
        vpmm_status status = vpmm_free(r->w.pool, h.pointer, h.stream);
        run_assert(r, status == VPMM_SUCCESS || lost(r, status) || freed_already, "live memory cannot be freed");
    }
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

/* Memory that stays live for good keeps its pool busy for good, unless the device is lost. */
static void abandon(struct run *r)
{
    CUdeviceptr pointer = 0;
    run_assert(r, vpmm_malloc(r->w.pool, PAGE, r->a, &pointer) == VPMM_SUCCESS || r->lost);
    keep_busy(&r->w, r->a);
    run_assert(r, vpmm_free(r->w.pool, pointer, r->a) == VPMM_SUCCESS || r->lost);
    vpmm_sim_fail(r->w.sim, "cuEventQuery", 1, CUDA_ERROR_LAUNCH_FAILED, true);
    run_assert(r, vpmm_poll_for(r->w.pool, 0) == VPMM_ERROR_DRIVER, "the device is not lost");
    run_assert(r, vpmm_pool_destroy(r->w.pool) == VPMM_ERROR_DRIVER, "destroy of a lost pool");
    r->lost = true;
    r->w.pool = NULL;
}

static void close_pool(struct run *r)
{
    clear_words();
    vpmm_status status = vpmm_pool_destroy(r->w.pool);
    if (status == VPMM_ERROR_BUSY) { /* only where a free was excused above */
        run_assert(r, r->fault.after, "destroy finds live memory");
        abandon(r);
        return;
    }
    r->w.pool = NULL;
    if (status != VPMM_SUCCESS)
        (void)worked(r, status);
    run_assert(r, status == VPMM_SUCCESS || r->lost || takes_back(r->fault.call), "destroy");
}

static int leaks_allowed(const struct run *r)
{
    const struct fault *f = &r->fault;
    if (f->call[0] == 0)
        return 0;
    if (r->lost || r->given_up)
        return 1000;
    if (takes_back(f->call) && r->failed)
        return 1000;
    if (f->after && makes(f->call))
        return f->from_then_on ? 1000 : 1;
    return 0;
}

/* A call that took effect and reported failure may be made again on what is gone: harmless, and not to be told. */
static bool misuses_allowed(const struct run *r)
{
    return r->fault.after && takes_back(r->fault.call);
}

static void run_scenario(struct run *r, scenario *play, const struct setup *setup, bool pool_first,
                         const struct fault *fault, uint64_t *calls)
{
    memset(r, 0, sizeof *r);
    r->setup = *setup;
    r->fault = fault != NULL ? *fault : (struct fault){.call = ""};
    world_open_without_pool(&r->w, setup);
    r->setup.pool.driver = r->w.driver;
    r->a = world_stream(&r->w);
    r->b = world_stream(&r->w);
    if (pool_first)
        create(r);
    for (int i = 0; calls != NULL && i < ENTRIES; i++)
        calls[i] = vpmm_sim_calls(r->w.sim, entry_names[i]);
    if (fault != NULL)
        (fault->after ? vpmm_sim_fail_after : vpmm_sim_fail)(r->w.sim, fault->call, fault->nth, fault->code,
                                                             fault->from_then_on);
    play(r);
    for (int i = 0; calls != NULL && i < ENTRIES; i++)
        calls[i] = vpmm_sim_calls(r->w.sim, entry_names[i]) - calls[i];
    if (fault != NULL)
        vpmm_sim_fail(r->w.sim, fault->call, 0, CUDA_SUCCESS, false);
    audit(r);
    if (r->w.pool == NULL && !pool_first)
        create(r);
    run_assert(r, r->w.pool != NULL, "no pool after the fault is gone");
    free_what_is_held(r);
    pool_works_again(r);
    audit(r);
    close_pool(r);
    run_assert(r, vpmm_sim_races(r->w.sim) == 0, "a race");
    run_assert(r, vpmm_sim_misuses(r->w.sim) == 0 || misuses_allowed(r), "a misuse");
    while (r->w.streams > 0)
        world_stream_destroy(&r->w, r->w.stream[r->w.streams - 1]);
    run_assert(r, r->w.driver->cuDevicePrimaryCtxRelease(r->w.device) == CUDA_SUCCESS);
    int leaks = vpmm_sim_destroy(r->w.sim);
    run_assert(r, leaks <= leaks_allowed(r), "leaks");
}

static bool worth_failing(const char *call, uint64_t nth, uint64_t calls)
{
    if (strcmp(call, "cuLaunchHostFunc") == 0) /* the scenario's own work, not the pool's */
        return false;
    return nth <= EVERY_CALL_UP_TO || nth % (1 + (calls - EVERY_CALL_UP_TO) / SAMPLES_BEYOND) == 0;
}

static void loop(scenario *play, const struct setup *setup, bool pool_first)
{
    static struct run r;
    uint64_t calls[ENTRIES];
    run_scenario(&r, play, setup, pool_first, NULL, calls);
    uint64_t runs = 0;
    for (int entry = 0; entry < ENTRIES; entry++)
        for (uint64_t nth = 1; nth <= calls[entry]; nth++) {
            if (!worth_failing(entry_names[entry], nth, calls[entry]))
                continue;
            for (int kind = 0; kind < 4 * CODES; kind++) {
                struct fault fault = {.call = entry_names[entry],
                                      .nth = nth,
                                      .code = codes[kind / 4],
                                      .from_then_on = (kind & 1) != 0,
                                      .after = (kind & 2) != 0};
                run_scenario(&r, play, setup, pool_first, &fault, NULL);
                runs++;
            }
        }
    cr_assert_gt(runs, 100, "the scenario makes no driver calls to speak of");
}

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
