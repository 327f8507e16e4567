#include "play.h"

#include <stddef.h>

struct play play;

/* ---- the driver, with a schedule point before what orders streams ---- */

static const vpmm_driver *real;
static char ordered; /* an address for all of them: which is first can matter to the others */

static CUresult looked_at(CUresult result, CUstream stream)
{
    if (play.look_at_stream)
        play.look_at_stream(stream);
    return result;
}

static CUresult CUDAAPI event_record(CUevent event, CUstream stream)
{
    vpmm_schedule_point(&ordered, true);
    looked_at(CUDA_SUCCESS, stream);
    return looked_at(real->cuEventRecord(event, stream), stream);
}

static CUresult CUDAAPI is_capturing(CUstream stream, CUstreamCaptureStatus *status)
{
    looked_at(CUDA_SUCCESS, stream);
    return looked_at(real->cuStreamIsCapturing(stream, status), stream);
}

static CUresult CUDAAPI event_query(CUevent event)
{
    vpmm_schedule_point(&ordered, true);
    return real->cuEventQuery(event);
}

static CUresult CUDAAPI wait_event(CUstream stream, CUevent event, unsigned flags)
{
    vpmm_schedule_point(&ordered, true);
    return real->cuStreamWaitEvent(stream, event, flags);
}

static CUresult CUDAAPI unmap(CUdeviceptr address, size_t bytes)
{
    vpmm_schedule_point(&ordered, true);
    return real->cuMemUnmap(address, bytes);
}

static const vpmm_driver *scheduled_driver(const vpmm_driver *of)
{
    static vpmm_driver driver;
    real = of;
    driver = *of;
    driver.cuEventRecord = event_record;
    driver.cuStreamIsCapturing = is_capturing;
    driver.cuEventQuery = event_query;
    driver.cuStreamWaitEvent = wait_event;
    driver.cuMemUnmap = unmap;
    return &driver;
}

/* ---- what actors do ---- */

static struct block *find_owned(CUdeviceptr at)
{
    for (int i = 0; i < OWNED; i++)
        if (play.owned[i].at == at)
            return &play.owned[i];
    return NULL;
}

void own(CUdeviceptr at, size_t bytes, CUstream stream)
{
    for (int i = 0; i < OWNED; i++) {
        const struct block *b = &play.owned[i];
        explore_check(!b->at || at + bytes <= b->at || b->at + b->bytes <= at,
                      "%zu bytes at 0x%llx are handed out, and %zu at 0x%llx are in use", bytes, (unsigned long long)at,
                      b->bytes, (unsigned long long)b->at);
    }
    struct block *none = find_owned(0);
    explore_check(none, "too many blocks");
    if (none)
        *none = (struct block){at, bytes, stream};
}

void disown(CUdeviceptr at)
{
    struct block *b = find_owned(at);
    if (b)
        b->at = 0;
}

/* A word of each page, or the first. */
CUdeviceptr try_get_bytes(size_t bytes, CUstream stream, vpmm_status *status)
{
    CUdeviceptr at = 0;
    *status = vpmm_malloc(play.w.pool, bytes, stream, &at);
    if (*status != VPMM_SUCCESS)
        return 0;
    own(at, bytes, stream);
    explore_check(write_later(&play.w, at, bytes < PAGE ? 1 : bytes / PAGE, ++play.stamp, stream), "the write fails");
    return at;
}

CUdeviceptr get_bytes(size_t bytes, CUstream stream)
{
    vpmm_status status;
    CUdeviceptr at = try_get_bytes(bytes, stream, &status);
    explore_check(status == VPMM_SUCCESS, "malloc of %zu bytes: %s: %s", bytes, vpmm_status_name(status),
                  vpmm_last_error());
    return at;
}

CUdeviceptr try_get(size_t pages, CUstream stream, vpmm_status *status)
{
    return try_get_bytes(pages * PAGE, stream, status);
}

CUdeviceptr get(size_t pages, CUstream stream)
{
    return get_bytes(pages * PAGE, stream);
}

void put(CUdeviceptr at, CUstream stream)
{
    disown(at);
    vpmm_status status = at ? vpmm_free(play.w.pool, at, stream) : VPMM_SUCCESS;
    explore_check(status == VPMM_SUCCESS, "free: %s: %s", vpmm_status_name(status), vpmm_last_error());
}

void poll_pool(void)
{
    vpmm_status status = vpmm_poll(play.w.pool);
    explore_check(status == VPMM_SUCCESS, "poll: %s: %s", vpmm_status_name(status), vpmm_last_error());
}

void release(CUstream stream)
{
    vpmm_status status = vpmm_stream_release(play.w.pool, stream);
    explore_check(status == VPMM_SUCCESS, "release: %s: %s", vpmm_status_name(status), vpmm_last_error());
}

void run_stream(CUstream stream)
{
    vpmm_sim_step(play.w.sim, stream, SIZE_MAX);
}

/* ---- before and after ---- */

struct vpmm_pool *inside(void)
{
    return play.w.pool;
}

/* The statistics are counters that order nothing. */
static void ignore_statistics(void)
{
    const struct stats *stats = &inside()->stats;
    play.what.ignored[0] = (uint64_t)(uintptr_t)stats;
    play.what.ignored[1] = play.what.ignored[0] + offsetof(struct stats, tallies);
}

void open_world(void)
{
    struct setup setup = setup_default();
    struct play kept = play;
    play = (struct play){.cache_pages = kept.cache_pages,
                         .cap = kept.cap,
                         .extent_pages = kept.extent_pages,
                         .reuse = kept.reuse,
                         .streams = kept.streams,
                         .graph = kept.graph,
                         .devices = kept.devices,
                         .captures = kept.captures,
                         .capture_gate = kept.capture_gate,
                         .look_at_stream = kept.look_at_stream,
                         .what = kept.what,
                         .w = {.sim = NULL}};
    setup.sim.memory_bytes = 2 * CHUNK_PAGES * PAGE;
    setup.sim.devices = play.devices ? play.devices : setup.sim.devices;
    setup.pool.va_size = CHUNK_PAGES * PAGE;
    setup.pool.extent_size = (play.extent_pages ? play.extent_pages : 1) * PAGE; /* 1: no free memory is ever stuck */
    setup.pool.cache_bytes = play.cache_pages * PAGE;
    setup.pool.max_mapped = (play.cap ? play.cap : CAP) * PAGE;
    setup.pool.reuse = play.reuse;
    setup.pool.streams = play.streams;
    setup.pool.graph = play.graph;
    setup.pool.captures = play.captures;
    setup.pool.capture_gate = play.capture_gate;
    world_open_without_pool(&play.w, &setup);
    setup.pool.driver = scheduled_driver(play.w.driver);
    must_work(vpmm_pool_create(&setup.pool, &play.w.pool));
    ignore_statistics();
    play.s = world_stream(&play.w);
    play.t = world_stream(&play.w);
}

/* Also what the audit does not ask for: searches would not find what a bit hides, though a last look would. */
static void look_at_bits(const struct hints *hints)
{
    for (unsigned bin = 0; bin < HINT_BINS; bin++)
        explore_check(!atomic_load(&hints->count[bin]) || atomic_load(&hints->bits[bin / 64]) >> bin % 64 & 1,
                      "a bin has entries and no bit");
}

/* A flush and the reaper look into listed caches alone: what another has noted is found before a failure at most. */
static void look_at_caches(const struct fronts *fronts)
{
    for (const struct front *front = atomic_load(&fronts->first); front; front = front->next)
        for (const struct cache *cache = atomic_load(&front->caches); cache; cache = cache->next) {
            uint64_t index = cache->index;
            bool listed = tree_next(&fronts->noted_caches, index, &index) && index == cache->index;
            explore_check(listed || !cache_noted(cache), "a cache has something noted, and is not listed");
        }
}

void look(void)
{
    vpmm_stats stats = stats_of(&play.w);
    const char *violation = stats_violation(&stats);
    explore_check(vpmm_check(play.w.pool) == VPMM_SUCCESS, "the audit finds: %s", vpmm_last_error());
    explore_check(!violation, "%s", violation);
    look_at_bits(&inside()->arena.space.passed);
    look_at_bits(&inside()->arena.cut.passed);
    look_at_caches(&inside()->fronts);
    look_at_caches(&inside()->cut_fronts);
    for (uint32_t slot = 1; slot < atomic_load(&inside()->arena.streams.slots); slot++)
        for (int level = 0; level < SPACES; level++)
            look_at_bits(&stream_at(&inside()->arena.streams, slot)->free[level]);
    explore_check(!vpmm_sim_races(play.w.sim), "a race");
    explore_check(!vpmm_sim_misuses(play.w.sim), "a misuse");
}

/* Every free is behind a mark, and with its stream's work done it has passed: nothing waits for the last resort. */
static void look_at_streams(void)
{
    const struct streams *streams = &inside()->arena.streams;
    for (uint32_t slot = 1; slot < atomic_load(&streams->slots); slot++) {
        const struct stream *stream = stream_at(streams, slot);
        explore_check(atomic_load(&stream->published) == atomic_load(&stream->completed) || stream->thread,
                      "of stream %u %llu are published, %llu marked, and %llu have passed (state %u)", slot,
                      (unsigned long long)atomic_load(&stream->published),
                      (unsigned long long)atomic_load(&stream->recorded),
                      (unsigned long long)atomic_load(&stream->completed), atomic_load(&stream->state));
    }
}

void put_all(void)
{
    for (int i = 0; i < OWNED; i++)
        if (play.owned[i].at)
            put(play.owned[i].at, play.owned[i].stream);
}

/* Everything that is free is found, also as one region: nothing was lost on the way. */
void close_world(void)
{
    vpmm_stats stats;
    look();
    put_all();
    world_drain(&play.w);
    look();
    if (!play.lost)
        look_at_streams();
    size_t cap = play.cap ? play.cap : CAP;
    CUdeviceptr all = take(&play.w, cap, play.w.stream[0]);
    stats = stats_of(&play.w);
    require(stats.mapped_bytes == cap * PAGE, "%llu pages are mapped under a cap of %zu",
            (unsigned long long)(stats.mapped_bytes / PAGE), cap);
    give(&play.w, all, play.w.stream[0]);
    world_close(&play.w);
}

/* Actors work in the primary context, which is current on the test's thread alone until they say so. */
void use_context(void)
{
    play.w.driver->cuCtxSetCurrent(play.w.context);
}

/* What the library keeps of the test's own thread is not of one schedule's. */
static void settle_this_thread(void)
{
    struct world w;
    world_open(&w, NULL);
    give(&w, take(&w, 1, CU_STREAM_PER_THREAD), CU_STREAM_PER_THREAD);
    world_close(&w);
}

void explore_play(const char *name, size_t cache_pages, struct exploration what)
{
    needs_simulator();
    settle_this_thread();
    play.cache_pages = cache_pages;
    play.what = what;
    play.what.data = &play;
    play.what.settle = fail_once;
    explore(name, &play.what);
}

uint64_t builds_now(void)
{
    return stats_of(&play.w).builds;
}

void meet(CUstream stream)
{
    put(get(1, stream), stream);
}

void open_plain(void *data)
{
    (void)data;
    open_world();
}

void close_plain(void *data)
{
    (void)data;
    close_world();
}
