#include "support.h"

#include "gpu.h"

#include <stdio.h>
#include <stdlib.h>

struct setup setup_default(void)
{
    struct setup setup = {.sim = vpmm_sim_config_default(), .pool = vpmm_config_default()};
    setup.sim.stepped = true;
    setup.pool.page_size = PAGE;
    setup.pool.va_size = (size_t)1 << 30;
    const char *cached = getenv("VPMM_TEST_CACHE_BYTES");
    setup.pool.cache_bytes = cached ? strtoull(cached, NULL, 10) : 0;
    setup.pool.reaper = false;
    setup.pool.decay_ms = VPMM_DECAY_NEVER; /* what stays mapped does not depend on how fast the machine is */
    return setup;
}

void needs_simulator(void)
{
    if (gpu_chosen())
        cr_skip_test("needs the simulated GPU");
}

static bool like_a_real_device(const vpmm_sim_config *sim)
{
    vpmm_sim_config usual = vpmm_sim_config_default();
    return sim->memory_bytes == usual.memory_bytes && sim->devices == usual.devices && sim->vmm == usual.vmm &&
           sim->va_bytes == usual.va_bytes;
}

static void open_driver(struct world *w, const struct setup *setup)
{
    if (!gpu_chosen()) {
        w->sim = vpmm_sim_create(&setup->sim);
        require(w->sim != NULL, "no simulator: %s", vpmm_last_error());
        w->driver = vpmm_sim_driver(w->sim);
        return;
    }
    if (!like_a_real_device(&setup->sim))
        needs_simulator();
    w->driver = gpu_driver();
    require(w->driver != NULL, "VPMM_TEST_DRIVER is cuda: %s", vpmm_last_error());
}

void world_open_without_pool(struct world *w, const struct setup *setup)
{
    struct setup defaults = setup_default();
    if (setup == NULL)
        setup = &defaults;
    memset(w, 0, sizeof *w);
    w->stepped = setup->sim.stepped;
    open_driver(w, setup);
    require(w->driver->cuInit(0) == CUDA_SUCCESS, "cuInit");
    require(w->driver->cuDeviceGet(&w->device, setup->pool.device) == CUDA_SUCCESS, "cuDeviceGet");
    require(w->driver->cuDevicePrimaryCtxRetain(&w->context, w->device) == CUDA_SUCCESS, "cuDevicePrimaryCtxRetain");
    require(w->driver->cuCtxSetCurrent(w->context) == CUDA_SUCCESS, "cuCtxSetCurrent");
    require(w->sim != NULL || gpu_open(), "gpu_open");
}

void world_open(struct world *w, const struct setup *setup)
{
    struct setup chosen = setup != NULL ? *setup : setup_default();
    world_open_without_pool(w, &chosen);
    if (chosen.pool.driver == NULL)
        chosen.pool.driver = w->driver;
    must_work(vpmm_pool_create(&chosen.pool, &w->pool));
}

/* Whatever it was, it is the one that a thread begins with afterwards. */
static bool mode_is_global(const struct world *w)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    require(w->driver->cuThreadExchangeStreamCaptureMode(&mode) == CUDA_SUCCESS, "cuThreadExchangeStreamCaptureMode");
    return mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
}

void expect_bare_thread(struct world *w, const char *call)
{
    CUcontext current = w->context;
    require(w->driver->cuCtxGetCurrent(&current) == CUDA_SUCCESS && !current, "%s leaves a context current", call);
    require(mode_is_global(w), "%s leaves the thread's captures in another mode", call);
}

void world_close(struct world *w)
{
    if (w->pool != NULL)
        must_work(vpmm_pool_destroy(w->pool));
    w->pool = NULL;
    require(mode_is_global(w), "a call has left the thread's captures in another mode");
    while (w->streams > 0)
        world_stream_destroy(w, w->stream[w->streams - 1]);
    require(w->sim != NULL || gpu_close(), "gpu_close: the device fails");
    require(w->driver->cuDevicePrimaryCtxRelease(w->device) == CUDA_SUCCESS, "cuDevicePrimaryCtxRelease");
    require(atomic_load(&w->mismatches) == 0, "%llu words were overwritten",
            (unsigned long long)atomic_load(&w->mismatches));
    if (w->sim == NULL)
        return;
    require(vpmm_sim_races(w->sim) == 0, "%llu races", (unsigned long long)vpmm_sim_races(w->sim));
    require(vpmm_sim_misuses(w->sim) == 0, "%llu misuses", (unsigned long long)vpmm_sim_misuses(w->sim));
    int leaks = vpmm_sim_destroy(w->sim);
    require(leaks == 0, "%d driver objects leak", leaks);
    w->sim = NULL;
}

void world_close_with(struct world *w, CUcontext context)
{
    must_work(vpmm_pool_destroy(w->pool));
    w->pool = NULL;
    require(w->driver->cuCtxSetCurrent(w->context) == CUDA_SUCCESS, "cuCtxSetCurrent");
    require(w->driver->cuCtxDestroy(context) == CUDA_SUCCESS, "cuCtxDestroy");
    world_close(w);
}

CUstream world_stream(struct world *w)
{
    require(w->streams < WORLD_STREAMS, "a test uses more streams than the world has room for");
    CUstream stream = NULL;
    require(w->driver->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS, "cuStreamCreate");
    w->stream[w->streams++] = stream;
    return stream;
}

void world_stream_destroy(struct world *w, CUstream stream)
{
    for (int i = 0; i < w->streams; i++)
        if (w->stream[i] == stream) {
            w->stream[i] = w->stream[--w->streams];
            if (w->sim == NULL)
                gpu_forget(stream);
            require(w->driver->cuStreamDestroy(stream) == CUDA_SUCCESS, "cuStreamDestroy");
            return;
        }
    require(false, "the stream is not one of the world's");
}

size_t world_run(struct world *w, CUstream stream, size_t n)
{
    return w->sim != NULL ? vpmm_sim_step(w->sim, stream, n) : gpu_run_stream(stream, n == SIZE_MAX);
}

bool world_pending(struct world *w, CUstream stream)
{
    return w->sim != NULL ? vpmm_sim_pending(w->sim, stream) > 0 : gpu_pending(stream);
}

uint64_t world_calls(struct world *w, const char *call)
{
    return w->sim != NULL ? vpmm_sim_calls(w->sim, call) : gpu_calls(call);
}

size_t world_step(struct world *w)
{
    if (w->sim == NULL) {
        size_t ran = gpu_run();
        require(ran != SIZE_MAX, "cuCtxSynchronize: the device fails");
        return ran;
    }
    size_t total = 0;
    for (;;) { /* a stream may wait for another one, so one round is not always enough */
        size_t ran = vpmm_sim_step(w->sim, NULL, SIZE_MAX);
        for (int i = 0; i < w->streams; i++)
            ran += vpmm_sim_step(w->sim, w->stream[i], SIZE_MAX);
        if (ran == 0)
            return total;
        total += ran;
    }
}

void world_become_steady(struct world *w, size_t pages)
{
    enum { FREES = 160000 }; /* STEADY_FREES, cache.c, for each time that 8 MiB can double up to 4 GiB, and some */
    CUstream stream = world_stream(w);
    if (pages)
        give(w, take(w, pages, stream), stream);
    for (int i = 0; i < FREES; i++)
        give(w, take(w, 1, stream), stream);
    must_work(vpmm_trim(w->pool, SIZE_MAX, NULL));
}

void world_drain(struct world *w)
{
    vpmm_stats last = stats_of(w);
    for (int quiet = 0, round = 0; quiet < 2; round++) {
        require(round < 1000, "the pool does not come to rest");
        size_t ran = world_step(w);
        must_work(vpmm_poll(w->pool));
        vpmm_stats now = stats_of(w);
        bool same = ran == 0 && now.marks == last.marks && now.zombies_retired == last.zombies_retired &&
                    now.unmap_failures == last.unmap_failures && now.hole_bytes == last.hole_bytes;
        quiet = same ? quiet + 1 : 0;
        last = now;
    }
}

vpmm_stats stats_of(struct world *w)
{
    vpmm_stats stats;
    memset(&stats, 0xff, sizeof stats);
    must_work(vpmm_stats_get(w->pool, &stats));
    return stats;
}

/* The sum of the parts of a counter that VPMM_STATS names. */
#define PART_gauge(value, which)         0
#define PART_counter(value, which)       0
#define PART_counter_by(label)           PART_gauge
#define PART_part_of(sum, label)         PART_OF_##sum
#define PART_counter_part_of(sum, label) PART_OF_##sum
#define PART_OF_mallocs(value, which)    ((which) == OF_MALLOCS ? (value) : 0)
#define PART_OF_frees(value, which)      ((which) == OF_FREES ? (value) : 0)
#define PART_OF_unwound(value, which)    ((which) == OF_UNWOUND ? (value) : 0)
#define PART_OF_failures(value, which)   ((which) == OF_FAILURES ? (value) : 0)

enum counted { OF_MALLOCS, OF_FREES, OF_UNWOUND, OF_FAILURES };

static uint64_t sum_of_parts(const vpmm_stats *s, enum counted which)
{
    uint64_t sum = 0;
#define ADD_PART(name, kind, help) sum += PART_##kind(s->name, which);
    VPMM_STATS(ADD_PART)
#undef ADD_PART
    return sum;
}

const char *stats_violation(const vpmm_stats *s)
{
    if (s->reserved_bytes != s->live_bytes + s->reusable_bytes + s->hole_bytes + s->pending_unmap_bytes)
        return "reserved is not live + reusable + hole + pending";
    if (s->mapped_bytes + s->parked_bytes != s->live_bytes + s->reusable_bytes)
        return "mapped + parked is not live + reusable";
    if (s->mallocs != sum_of_parts(s, OF_MALLOCS))
        return "mallocs are not the sum of the tiers";
    if (s->frees != sum_of_parts(s, OF_FREES))
        return "frees are not the sum of the tiers";
    if (s->unwound != sum_of_parts(s, OF_UNWOUND))
        return "what was unwound is not the sum of the steps";
    if (s->failures != sum_of_parts(s, OF_FAILURES))
        return "failures are not the sum of the errors";
    if (s->frees > s->mallocs)
        return "more frees than mallocs";
    if (s->cached_bytes > s->reusable_bytes)
        return "more is cached than is reusable";
    if (s->requested_bytes > s->live_bytes + s->async_bytes)
        return "more is requested than is live";
    if (s->peak_mapped_bytes < s->mapped_bytes)
        return "the peak of mapped is below mapped";
    if (s->peak_live_bytes < s->live_bytes)
        return "the peak of live is below live";
    if (s->peak_requested_bytes < s->requested_bytes)
        return "the peak of requested is below requested";
    if (s->largest_free_bytes > s->reusable_bytes)
        return "the longest free region is longer than all";
    if (s->largest_hole_bytes > s->hole_bytes)
        return "the longest hole is longer than all";
    return NULL;
}

void world_audit_at(struct world *w, const char *file, int line)
{
    vpmm_status status = vpmm_check(w->pool);
    require(status == VPMM_SUCCESS, "%s:%d: the audit finds: %s", file, line, vpmm_last_error());
    vpmm_stats stats = stats_of(w);
    const char *violation = stats_violation(&stats);
    require(violation == NULL, "%s:%d: %s", file, line, violation);
    if (w->sim == NULL)
        return;
    require(vpmm_sim_races(w->sim) == 0, "%s:%d: %llu races", file, line, (unsigned long long)vpmm_sim_races(w->sim));
    require(vpmm_sim_misuses(w->sim) == 0, "%s:%d: %llu misuses", file, line,
            (unsigned long long)vpmm_sim_misuses(w->sim));
}

CUdeviceptr take_at(struct world *w, size_t bytes, CUstream stream, const char *file, int line)
{
    CUdeviceptr pointer = 0;
    vpmm_status status = vpmm_malloc(w->pool, bytes, stream, &pointer);
    require(status == VPMM_SUCCESS, "%s:%d: vpmm_malloc of %zu bytes: %s: %s", file, line, bytes,
            vpmm_status_name(status), vpmm_last_error());
    require(pointer != 0, "%s:%d: vpmm_malloc succeeds without a pointer", file, line);
    return pointer;
}

void give_at(struct world *w, CUdeviceptr pointer, CUstream stream, const char *file, int line)
{
    vpmm_status status = vpmm_free(w->pool, pointer, stream);
    require(status == VPMM_SUCCESS, "%s:%d: vpmm_free: %s: %s", file, line, vpmm_status_name(status),
            vpmm_last_error());
}

bool write_later(struct world *w, CUdeviceptr pointer, size_t pages, uint32_t value, CUstream stream)
{
    bool held = w->sim != NULL || !w->stepped || gpu_hold(stream);
    return held && payload_write(w->driver, pointer, pages, value, stream);
}

void fill(struct world *w, CUdeviceptr pointer, size_t pages, uint32_t value, CUstream stream)
{
    require(write_later(w, pointer, pages, value, stream), "cuMemsetD2D32Async");
}

bool expect_later(struct world *w, CUdeviceptr pointer, size_t pages, uint32_t value, CUstream stream)
{
    if (w->sim != NULL)
        return payload_expect(w->driver, pointer, pages, value, stream, &w->mismatches);
    if (w->stepped && !gpu_hold(stream))
        return false;
    struct payload_expectation *e = gpu_host_memory(payload_expectation_bytes(pages));
    if (e == NULL)
        return false;
    e->freed = false;
    return payload_expect_in(w->driver, e, pointer, pages, value, stream, &w->mismatches);
}

static void CUDA_CB nothing(void *argument)
{
    (void)argument;
}

void keep_busy(struct world *w, CUstream stream)
{
    if (w->sim == NULL) {
        require(gpu_hold(stream), "cuStreamWaitValue32");
        return;
    }
    CUresult result = w->driver->cuLaunchHostFunc(stream, nothing, NULL);
    require(result == CUDA_SUCCESS, "cuLaunchHostFunc: %d", result);
}

void order_after(struct world *w, CUstream later, CUstream earlier)
{
    CUevent event = NULL;
    require(w->driver->cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS, "cuEventCreate");
    require(w->driver->cuEventRecord(event, earlier) == CUDA_SUCCESS, "cuEventRecord");
    require(w->driver->cuStreamWaitEvent(later, event, 0) == CUDA_SUCCESS, "cuStreamWaitEvent");
    require(w->driver->cuEventDestroy(event) == CUDA_SUCCESS, "cuEventDestroy");
}

/* ---- threads that ask ---- */

static _Thread_local CUstream stream_of_thread;

CUstream malloc_thread_stream(void)
{
    return stream_of_thread;
}

void *malloc_thread_run(void *argument)
{
    struct malloc_thread *asker = argument;
    stream_of_thread = asker->stream;
    asker->w->driver->cuCtxSetCurrent(asker->w->context);
    asker->status = vpmm_malloc(asker->w->pool, asker->pages * PAGE, asker->stream, &asker->pointer);
    atomic_store(&asker->done, true);
    return NULL;
}

void malloc_thread_start(struct malloc_thread *asker, struct world *w, CUstream stream, size_t pages)
{
    *asker = (struct malloc_thread){.w = w, .stream = stream, .pages = pages};
    cr_assert_eq(pthread_create(&asker->thread, NULL, malloc_thread_run, asker), 0);
}

/* The length of the region "[-12]" that begins at text, 0 if none does. */
static size_t region_length(const char *text)
{
    const char *p = text;
    if (*p++ != '[')
        return 0;
    if (strchr("-*~+#", *p) != NULL && *p != 0)
        p++;
    const char *digits = p;
    while (*p >= '0' && *p <= '9')
        p++;
    return p > digits && *p == ']' ? (size_t)(p + 1 - text) : 0;
}

static char *dump_text(struct world *w)
{
    char *text = NULL;
    size_t length = 0;
    FILE *stream = open_memstream(&text, &length);
    require(stream != NULL, "open_memstream");
    must_work(vpmm_dump(w->pool, stream));
    fclose(stream);
    return text;
}

/* Without `ends` the holes before the first region of another kind and after the last one are left out. */
static const char *region_map(struct world *w, bool ends)
{
    static _Thread_local char map[1 << 16];
    char *text = dump_text(w);
    size_t used = 0, last = 0;
    for (const char *p = text; *p != 0;) {
        size_t length = region_length(p);
        if (length == 0) {
            p++;
            continue;
        }
        bool hole = p[1] == '*';
        if (ends || used > 0 || !hole) {
            require(used + length < sizeof map, "the region map is too long for a test to read");
            memcpy(map + used, p, length);
            used += length;
            if (ends || !hole)
                last = used;
        }
        p += length;
    }
    map[last] = 0;
    free(text);
    return map;
}

const char *layout(struct world *w)
{
    return region_map(w, false);
}

const char *layout_whole(struct world *w)
{
    return region_map(w, true);
}

static _Thread_local char known_words[1024];

void clear_words(void)
{
    (void)vpmm_stats_get(NULL, NULL);
    snprintf(known_words, sizeof known_words, "%s", vpmm_last_error());
}

void fail_once(void *unused)
{
    (void)unused;
    (void)vpmm_stats_get(NULL, NULL);
}

bool spoke(void)
{
    const char *words = vpmm_last_error();
    return words[0] != 0 && strcmp(words, known_words) != 0;
}
