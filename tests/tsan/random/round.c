/*
 * round.c - one round, from its settings to the last look: nothing may be live, lost, leaked or stranded.
 */
#include "random.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

struct round current;

/* ---- settings ---- */

static vpmm_streams draw_mode(struct worker *chooser, unsigned modes)
{
    vpmm_streams mode;
    do
        mode = (vpmm_streams)draw(chooser, 3);
    while (!(modes & 1u << mode));
    return mode;
}

static size_t draw_cache(struct worker *chooser, const struct kind *kind)
{
    uint64_t how = kind->small_caches ? 0 : draw(chooser, 3);
    return how == 0 ? (8 + draw(chooser, 25)) * PAGE : how == 1 ? 0 : 64 * PAGE;
}

static void draw_config(struct worker *chooser, const struct kind *kind, const vpmm_driver *driver)
{
    bool is_tight = kind->room == ROOM_ANY ? one_in(chooser, 2) : kind->room == ROOM_TIGHT;
    vpmm_config *config = &current.config;
    *config = vpmm_config_default();
    config->driver = jitter_table(driver);
    config->page_size = one_in(chooser, 3) ? PAGE / 8 : PAGE;
    config->va_size = (is_tight && one_in(chooser, 2) ? 256 : 1024) * PAGE;
    config->streams = draw_mode(chooser, kind->modes);
    config->reuse = (vpmm_reuse)draw(chooser, 3);
    config->small = (vpmm_small)draw(chooser, 2);
    config->reaper = !one_in(chooser, 3);
    config->captures = one_in(chooser, 2);
    config->cache_bytes = draw_cache(chooser, kind);
    config->extent_size = one_in(chooser, 2) ? PAGE : 0;
    config->max_mapped = is_tight ? (48 + draw(chooser, 64)) * PAGE : current.sim ? 0 : current.device_pages * PAGE;
    if (config->captures && one_in(chooser, 2))
        config->capture_gate = capture_gate;
}

static bool open_driver(const vpmm_driver *cuda)
{
    vpmm_sim_config sim = vpmm_sim_config_default();
    sim.memory_bytes = current.device_pages * PAGE;
    current.sim = cuda ? NULL : vpmm_sim_create(&sim);
    current.driver = cuda ? cuda : current.sim ? vpmm_sim_driver(current.sim) : NULL;
    return current.driver && current.driver->cuInit(0) == CUDA_SUCCESS &&
           current.driver->cuDevicePrimaryCtxRetain(&current.context, 0) == CUDA_SUCCESS &&
           current.driver->cuCtxSetCurrent(current.context) == CUDA_SUCCESS;
}

static bool begin(uint64_t seed, const struct kind *kind, const vpmm_driver *cuda)
{
    enum { DEVICE_PAGES = 512 };
    struct worker chooser = {.random = random_from(seed)};
    memset(&current, 0, sizeof current);
    current.seed = seed;
    current.kind = kind;
    current.device_pages = DEVICE_PAGES;
    if (!open_driver(cuda))
        return false;
    draw_config(&chooser, kind, current.driver);
    watch_round();
    return lanes_open() && vpmm_pool_create(&current.config, &current.pool) == VPMM_SUCCESS;
}

/* ---- threads ---- */

static void one_operation(struct worker *worker)
{
    static void (*const operations[])(struct worker *) = {
#define OPERATION_ENTRY(name) [OPERATION_##name] = operation_##name,
        OPERATIONS(OPERATION_ENTRY)
#undef OPERATION_ENTRY
    };
    uint64_t sum = 0, at;
    for (int i = 0; i < OPERATION_KINDS; i++)
        sum += current.kind->weight[i];
    at = draw(worker, sum);
    for (int i = 0; i < OPERATION_KINDS; i++) {
        if (at < current.kind->weight[i]) {
            operations[i](worker);
            return;
        }
        at -= current.kind->weight[i];
    }
}

/* ThreadSanitizer makes everything slower. */
static uint64_t operations_of_a_thread(void)
{
    const char *text = getenv("VPMM_TEST_OPS");
    if (text)
        return strtoull(text, NULL, 0);
#ifdef VPMM_TSAN
    return current.kind->operations / 5;
#else
    return current.kind->operations;
#endif
}

static void *work(void *argument)
{
    struct worker *worker = argument;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    cuda_must(current.driver->cuCtxSetCurrent(current.context));
    cuda_must(current.driver->cuEventCreate(&worker->event, CU_EVENT_DISABLE_TIMING));
    jitter_join();
    for (uint64_t i = operations_of_a_thread(); i > 0 && failures() == 0; i--)
        one_operation(worker);
    jitter_leave();
    cuda_must(current.driver->cuEventDestroy(worker->event));
    cuda_must(current.driver->cuThreadExchangeStreamCaptureMode(&mode));
    needs(mode == CU_STREAM_CAPTURE_MODE_GLOBAL);
    atomic_fetch_add(&current.ended, 1);
    return NULL;
}

/* In place of the reaper: the program's own. */
static void *poll_all_along(void *argument)
{
    struct worker *worker = argument;
    cuda_must(current.driver->cuCtxSetCurrent(current.context));
    while (atomic_load(&current.ended) < THREADS) {
        operation_poll(worker);
        linger(worker, 200);
    }
    return NULL;
}

static void run_threads(void)
{
    struct worker worker[THREADS + 1];
    size_t n = current.config.reaper ? THREADS : THREADS + 1;
    memset(worker, 0, sizeof worker);
    if (current.sim) /* a real driver is not asked to bear with it */
        jitter_begin();
    for (size_t i = 0; i < n; i++) {
        worker[i].random = random_from(current.seed * 8 + i + 1);
        worker[i].stamps = (uint32_t)i << 28;
        pthread_create(&worker[i].thread, NULL, i < THREADS ? work : poll_all_along, &worker[i]);
    }
    for (size_t i = 0; i < n; i++)
        pthread_join(worker[i].thread, NULL);
    if (current.sim)
        jitter_end();
    cuda_must(current.driver->cuCtxSynchronize()); /* holds look into the workers */
}

/* ---- the end ---- */

static void check_nothing_live(void)
{
    vpmm_stats stats;
    vpmm_must(vpmm_check(current.pool));
    vpmm_must(vpmm_stats_get(current.pool, &stats));
    uint64_t mallocs = atomic_load(&current.mallocs), frees = atomic_load(&current.frees);
    if (stats.requested_bytes || stats.mallocs != mallocs || stats.frees != frees || mallocs != frees)
        failed("%" PRIu64 " bytes are live; %" PRIu64 " mallocs and %" PRIu64 " frees are counted, %" PRIu64
               " and %" PRIu64 " were made",
               stats.requested_bytes, stats.mallocs, stats.frees, mallocs, frees);
}

/* All work is done, and no stream is left: there is nothing that the pool would have to keep. */
static void check_nothing_stranded(void)
{
    enum { TRIES = 100, PAUSE_US = 2000 };
    vpmm_stats stats = {.mapped_bytes = 1};
    for (int i = 0; i < TRIES && stats.mapped_bytes; i++) {
        if (i > 0)
            usleep(PAUSE_US);
        vpmm_must(vpmm_poll(current.pool));
        vpmm_must(vpmm_trim(current.pool, 0, NULL));
        vpmm_must(vpmm_stats_get(current.pool, &stats));
    }
    if (stats.mapped_bytes)
        failed("stranded: of %" PRIu64 " bytes mapped, with nothing in use, no trim gives back; live %" PRIu64
               ", reusable %" PRIu64 ", cut %" PRIu64,
               stats.mapped_bytes, stats.live_bytes, stats.reusable_bytes, stats.slab_bytes);
}

static void check_all_can_be_had(struct worker *worker)
{
    size_t cap = current.config.max_mapped ? current.config.max_mapped / PAGE : current.device_pages;
    unsigned flags;
    CUdeviceptr p;
    CUstream stream = stream_new(worker, &flags);
    if (take((cap - cap / 8) * PAGE, stream, &p))
        give(p, stream);
    else
        failed("with nothing in use seven eighths of all memory cannot be had: %s", vpmm_last_error());
    stream_end(worker, stream);
}

static void check_simulator(void)
{
    needs(vpmm_sim_races(current.sim) == 0);
    needs(vpmm_sim_misuses(current.sim) == 0);
    needs(vpmm_sim_destroy(current.sim) == 0);
}

static void end_pool(struct worker *worker)
{
    if (current.kind->weight[OPERATION_pool])
        pool_end_beside_capture(worker);
    else
        vpmm_must(vpmm_pool_destroy(current.pool));
}

static void end(void)
{
    struct worker worker = {.random = random_from(current.seed)};
    cuda_must(current.driver->cuEventCreate(&worker.event, CU_EVENT_DISABLE_TIMING));
    blocks_end(&worker);
    cuda_must(current.driver->cuEventDestroy(worker.event));
    lanes_close(&worker);
    cuda_must(current.driver->cuCtxSynchronize());
    check_nothing_live();
    check_nothing_stranded();
    check_all_can_be_had(&worker);
    end_pool(&worker);
    cuda_must(current.driver->cuDevicePrimaryCtxRelease(0));
    needs(atomic_load(&current.mismatches) == 0);
    if (current.sim)
        check_simulator();
}

bool round_run(uint64_t seed, const struct kind *kind, const vpmm_driver *cuda)
{
    uint64_t before = failures();
    if (!begin(seed, kind, cuda)) {
        failed("the round cannot begin: %s", vpmm_last_error());
        return false;
    }
    run_threads();
    end();
    return failures() == before;
}
