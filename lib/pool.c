/*
 * pool.c - the public functions: arguments checked, tiers in their order, errors in words.
 */
#include "arena_life.h"
#include "audit.h"
#include "build.h"
#include "clock.h"
#include "config.h"
#include "front.h"
#include "process.h"
#include "reaper.h"
#include "region.h"
#include "small.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

struct vpmm_pool {
    vpmm_config config; /* with page_size filled in */
    struct device device;
    struct stats stats;
    struct fronts fronts;
    struct arena arena;
    struct small small;
    bool paged;  /* false: no page could serve any request, or the device has no virtual memory management */
    bool opened; /* the device's context is retained */
    uint32_t generation;
    struct process_entry process;
};

/* ---- creation ---- */

static vpmm_status read_config(const vpmm_config *given, vpmm_config *config)
{
    *config = given ? *given : vpmm_config_default();
    if (!given) {
        vpmm_status status = vpmm_config_from_env(config);
        if (status != VPMM_SUCCESS)
            return status;
    }
    if (!config->driver)
        config->driver = vpmm_driver_cuda();
    return config->driver ? VPMM_SUCCESS : VPMM_ERROR_NO_DRIVER;
}

static vpmm_status open_device(struct vpmm_pool *pool)
{
    vpmm_config *config = &pool->config;
    vpmm_status status = device_open(&pool->device, config->driver, config->device, &pool->stats);
    if (status != VPMM_SUCCESS)
        return status;
    pool->opened = true;
    status = config_check(config, pool->device.granularity);
    if (!config->page_size)
        config->page_size = pool->device.granularity;
    pool->paged = pool->device.has_vmm && config->page_size <= pool->device.total_bytes;
    return status;
}

static vpmm_status fill_pool(struct vpmm_pool *pool)
{
    vpmm_status status = VPMM_SUCCESS;
    if (pool->device.has_pools)
        status = small_init(&pool->small, &pool->device);
    fronts_init(&pool->fronts, &pool->arena, pool->paged ? &pool->config : NULL);
    pool->arena.fronts = &pool->fronts;
    if (status == VPMM_SUCCESS && pool->paged)
        status = arena_init(&pool->arena, &pool->device, &pool->stats, &pool->config);
    if (status == VPMM_SUCCESS && pool->paged)
        status = build_initial(&pool->arena, pool->config.initial_pages);
    if (status == VPMM_SUCCESS && pool->paged && pool->config.reaper)
        status = reaper_start(&pool->arena, &pool->process.reaper);
    return status;
}

/* Gives back whatever has been made so far, and frees the pool. The first failure's words stay. */
static vpmm_status close_pool(struct vpmm_pool *pool)
{
    vpmm_status status = VPMM_SUCCESS, later;
    char words[256] = "";
    struct device_scope scope;
    bool entered = pool->opened && device_enter(&pool->device, &scope) == VPMM_SUCCESS;
    if (pool->paged && pool->arena.device)
        status = arena_give_back(&pool->arena);
    if (status != VPMM_SUCCESS)
        snprintf(words, sizeof words, "%s", vpmm_last_error());
    fronts_free(&pool->fronts);
    if (pool->arena.device)
        arena_free(&pool->arena);
    later = small_destroy(&pool->small);
    if (status == VPMM_SUCCESS && later != VPMM_SUCCESS) {
        status = later;
        snprintf(words, sizeof words, "%s", vpmm_last_error());
    }
    if (entered)
        device_leave(&pool->device, &scope);
    later = pool->opened ? device_close(&pool->device) : VPMM_SUCCESS;
    if (status != VPMM_SUCCESS)
        fail(status, "%s", words);
    bool silent = load_relaxed_u32(&pool->device.gone);
    free(pool);
    return silent ? VPMM_SUCCESS : status != VPMM_SUCCESS ? status : later;
}

vpmm_status vpmm_pool_create(const vpmm_config *given, vpmm_pool **out)
{
    if (!out)
        return fail(VPMM_ERROR_INVALID_VALUE, "vpmm_pool_create: the output is NULL");
    vpmm_config config;
    vpmm_status status = read_config(given, &config);
    if (status != VPMM_SUCCESS)
        return status;
    struct vpmm_pool *pool = aligned_alloc(128, (sizeof *pool + 127) / 128 * 128);
    if (!pool)
        return fail(VPMM_ERROR_HOST_MEMORY, "no host memory for a pool of %zu bytes", sizeof *pool);
    memset(pool, 0, sizeof *pool);
    pool->config = config;
    status = open_device(pool);
    if (status == VPMM_SUCCESS)
        status = fill_pool(pool);
    if (status != VPMM_SUCCESS) {
        char words[256];
        snprintf(words, sizeof words, "%s", vpmm_last_error());
        close_pool(pool);
        return fail(status, "%s", words);
    }
    process_add(&pool->process);
    pool->generation = process_generation();
    *out = pool;
    return VPMM_SUCCESS;
}

vpmm_status vpmm_pool_default(int device, vpmm_pool **out)
{
    enum { DEVICES = 256 };
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static vpmm_pool *pools[DEVICES];
    if (!out)
        return fail(VPMM_ERROR_INVALID_VALUE, "vpmm_pool_default: the output is NULL");
    if (device < 0 || device >= DEVICES)
        return fail(VPMM_ERROR_NO_DRIVER, "device %d does not exist: devices are numbered 0 to %d", device,
                    DEVICES - 1);
    vpmm_status status = VPMM_SUCCESS;
    pthread_mutex_lock(&lock);
    if (!pools[device]) {
        vpmm_config config = vpmm_config_default();
        status = vpmm_config_from_env(&config);
        config.device = device;
        if (status == VPMM_SUCCESS)
            status = vpmm_pool_create(&config, &pools[device]);
    }
    if (status == VPMM_SUCCESS)
        *out = pools[device];
    pthread_mutex_unlock(&lock);
    return status;
}

/* ---- what every call looks at first ---- */

static vpmm_status check_pool(const struct vpmm_pool *pool, const char *function)
{
    if (!pool)
        return fail(VPMM_ERROR_INVALID_VALUE, "%s: the pool is NULL", function);
    if (pool->generation != process_generation())
        return fail(VPMM_ERROR_NOT_SUPPORTED,
                    "%s: the pool was made before this process was forked; CUDA cannot be "
                    "used in the child: make a pool after fork and exec",
                    function);
    if (device_lost(&pool->device))
        return device_lost_status();
    return VPMM_SUCCESS;
}

static uint64_t live_allocations(const struct vpmm_pool *pool)
{
    return stats_sum(&pool->stats, STAT_live_bytes) + load_relaxed_u64(&pool->small.count);
}

vpmm_status vpmm_pool_destroy(vpmm_pool *pool)
{
    if (!pool)
        return VPMM_SUCCESS;
    vpmm_status status = check_pool(pool, "vpmm_pool_destroy");
    if (status == VPMM_ERROR_NOT_SUPPORTED)
        return status;
    if (status == VPMM_SUCCESS && live_allocations(pool))
        return fail(VPMM_ERROR_BUSY,
                    "the pool has %" PRIu64 " bytes of pages and %" PRIu64 " small allocations live: free "
                    "them first",
                    stats_sum(&pool->stats, STAT_live_bytes), load_relaxed_u64(&pool->small.count));
    bool lost = device_lost(&pool->device);
    reaper_stop(process_remove(&pool->process));
    vpmm_status closed = close_pool(pool);
    return lost ? status : closed;
}

/* ---- malloc ---- */

static void count_hit(struct vpmm_pool *pool, enum region_source source)
{
    static const enum stat counter[] = {
        [REGION_NONE] = STAT_builds, /* found nowhere, so built */
        [REGION_OWN_STREAM] = STAT_hits_own_stream,
        [REGION_COMPLETED] = STAT_hits_completed,
        [REGION_WAITED] = STAT_hits_waited,
    };
    stats_count(&pool->stats, counter[source]);
}

/* A region that another stream has freed, made safe by a wait. What cannot be waited for is put back. */
static enum region_source take_waiting(struct arena *arena, struct stream *stream, uint64_t pages, bool every_bin,
                                       struct region *region)
{
    if (!region_take_waiting(arena, stream, pages, every_bin, region))
        return REGION_NONE;
    bool passed = fence_passed(&arena->streams, region->fence);
    vpmm_status status = arena->reuse == VPMM_REUSE_WAIT_HOST ? stream_wait_host(&arena->streams, region->fence)
                                                              : stream_wait(&arena->streams, stream, region->fence);
    if (status != VPMM_SUCCESS) {
        region_publish(arena, *region);
        return REGION_NONE;
    }
    if (passed)
        return REGION_COMPLETED;
    /* The rest of the region is free as it was: its own stream and its own fence. */
    return REGION_WAITED;
}

/* Tiers 2 to 4. */
static enum region_source find(struct arena *arena, struct stream *stream, uint64_t pages, bool may_wait,
                               bool every_bin, struct region *region)
{
    enum region_source source = region_take(arena, stream, pages, every_bin, region);
    if (source == REGION_NONE)
        source = region_join(arena, stream, pages, region);
    if (source == REGION_NONE && region_take_part(arena, stream, pages, region))
        source = REGION_COMPLETED;
    if (source == REGION_NONE && may_wait)
        source = take_waiting(arena, stream, pages, every_bin, region);
    return source;
}

/* The same, with the last look that the bits of the bins cannot spoil: again while memory keeps being published. */
static enum region_source find_thoroughly(struct arena *arena, struct stream *stream, uint64_t pages, bool may_wait,
                                          struct region *region)
{
    enum { LAST_LOOKS = 3 };
    enum region_source source = find(arena, stream, pages, may_wait, false, region);
    for (int i = 0; source == REGION_NONE && i < LAST_LOOKS; i++) {
        uint64_t seen = load_sc_u64(&arena->publications);
        source = find(arena, stream, pages, may_wait, true, region);
        if (load_sc_u64(&arena->publications) == seen)
            break;
    }
    return source;
}

static bool is_shortage(vpmm_status status)
{
    return status == VPMM_ERROR_OUT_OF_MEMORY || status == VPMM_ERROR_OUT_OF_ADDRESS_SPACE;
}

/* Tiers 2 to 4, and before them what the thread itself has cached for the stream in another shape. */
static enum region_source find_with_own_cache(struct vpmm_pool *pool, struct stream *stream, uint64_t pages,
                                              struct region *region)
{
    enum region_source source = find(&pool->arena, stream, pages, false, false, region);
    struct cache *cache = source == REGION_NONE ? front_cache(&pool->fronts, stream) : NULL;
    if (cache && cache_take_longer(cache, pages, region))
        source = REGION_OWN_STREAM;
    if (source == REGION_NONE && fronts_flush(&pool->fronts, stream, false))
        source = find(&pool->arena, stream, pages, false, false, region);
    return source;
}

static vpmm_status refresh_and_build(struct vpmm_pool *pool, struct stream *stream, uint64_t pages, bool may_wait,
                                     struct build_limits *limits, struct region *region, enum region_source *source)
{
    reaper_refresh(&pool->arena);
    *source = find_thoroughly(&pool->arena, stream, pages, may_wait, region);
    if (*source != REGION_NONE)
        return VPMM_SUCCESS;
    return build_region(&pool->arena, stream, pages, limits, region, source);
}

/* Tier 5, or what became free meanwhile. Before the pool grows, the caches of all threads and streams give what they
 * have. */
static vpmm_status find_or_build(struct vpmm_pool *pool, struct stream *stream, uint64_t pages, bool may_wait,
                                 struct build_limits *limits, struct region *region)
{
    vpmm_status status = VPMM_SUCCESS;
    enum region_source source = find_with_own_cache(pool, stream, pages, region);
    if (source == REGION_NONE) {
        if (!limits->since_ns)
            limits->since_ns = clock_now_ns();
        limits->keep_size = fronts_noted(&pool->fronts);
        status = refresh_and_build(pool, stream, pages, may_wait, limits, region, &source);
    }
    if (limits->keep_size && is_shortage(status)) {
        limits->keep_size = false;
        fronts_flush(&pool->fronts, NULL, true);
        status = refresh_and_build(pool, stream, pages, may_wait, limits, region, &source);
    }
    if (status == VPMM_SUCCESS)
        count_hit(pool, source);
    return status;
}

/* Memory in other threads' hands comes back in a moment: at most 10 ms. */
static void await_builders(struct vpmm_pool *pool)
{
    for (int i = 0; i < 100 && load_sc_u32(&pool->arena.builders); i++)
        clock_sleep_us(100);
}

static void trim_small(struct vpmm_pool *pool)
{
    if (pool->small.pool)
        small_trim(&pool->small);
}

/* Tier 6: before a request fails, everything is taken back, cheapest first. */
static vpmm_status reclaim(struct vpmm_pool *pool, struct stream *stream, uint64_t pages, uint64_t device_gave,
                           struct region *region)
{
    struct arena *arena = &pool->arena;
    struct build_limits usable = {.reach = VIEW_USABLE, .creatable_pages = device_gave};
    struct build_limits all = {.reach = VIEW_ALL, .creatable_pages = device_gave};
    stats_count(&pool->stats, STAT_reclaims);
    fronts_flush(&pool->fronts, NULL, true);
    reaper_pass_now(arena);
    vpmm_status status = find_or_build(pool, stream, pages, arena->reuse != VPMM_REUSE_COMPLETED, &usable, region);
    if (is_shortage(status)) {
        await_builders(pool);
        status = find_or_build(pool, stream, pages, true, &all, region);
    }
    if (is_shortage(status)) {
        reaper_settle(arena); /* for what could not be waited for, and so that the driver's pool can let go */
        trim_small(pool);
        all.creatable_pages = UINT64_MAX;
        status = find_or_build(pool, stream, pages, true, &all, region);
    }
    if (is_shortage(status)) /* the device gave less than was asked of it: with just that */
        status = find_or_build(pool, stream, pages, true, &all, region);
    return status;
}

static vpmm_status out_of_memory(struct vpmm_pool *pool, size_t bytes)
{
    vpmm_stats stats;
    char cap[64] = "none";
    stats_read(&pool->stats, &stats);
    stats_count(&pool->stats, STAT_out_of_memory);
    if (pool->config.max_mapped)
        snprintf(cap, sizeof cap, "%zu", pool->config.max_mapped);
    return fail(VPMM_ERROR_OUT_OF_MEMORY,
                "%zu bytes were asked for: mapped %" PRIu64 ", live %" PRIu64 ", reusable %" PRIu64
                " (in pieces that cannot be joined), in the driver's pool for small requests %" PRIu64
                ", cap %s, of %zu on device %d",
                bytes, stats.mapped_bytes, stats.live_bytes, stats.reusable_bytes, stats.async_bytes, cap,
                pool->device.total_bytes, pool->device.ordinal);
}

static vpmm_status malloc_pages(struct vpmm_pool *pool, size_t bytes, struct stream *stream, CUdeviceptr *out)
{
    struct arena *arena = &pool->arena;
    struct build_limits limits = {.reach = VIEW_USABLE, .creatable_pages = UINT64_MAX};
    struct region region;
    uint64_t pages = (bytes - 1) / pool->config.page_size + 1;
    policy_note(&arena->policy, (uint32_t)pages);
    vpmm_status status = find_or_build(pool, stream, pages, arena->reuse != VPMM_REUSE_COMPLETED, &limits, &region);
    if (is_shortage(status) && pages <= arena->pages.chunk_pages)
        status = reclaim(pool, stream, pages, limits.creatable_pages, &region);
    if (limits.since_ns)
        stats_note_latency(&pool->stats, clock_now_ns() - limits.since_ns);
    if (status == VPMM_ERROR_OUT_OF_MEMORY)
        return out_of_memory(pool, bytes);
    if (status == VPMM_SUCCESS) {
        *out = region_hand_out(arena, region, pages, bytes);
        front_peak_noted(&pool->fronts);
    }
    return status;
}

/* Tiers 1 and 1b. */
static bool malloc_cached(struct vpmm_pool *pool, size_t bytes, struct cache *cache, CUdeviceptr *out)
{
    uint64_t pages = (bytes - 1) / pool->config.page_size + 1;
    if (pages > pool->fronts.longest)
        return false;
    CUdeviceptr address = cache_take(cache, pages, bytes);
    if (!address)
        address = cache_steal(cache, pages, bytes);
    if (address)
        *out = address;
    return address != 0;
}

static void release_pages(struct vpmm_pool *pool)
{
    struct device_scope scope;
    uint64_t released = 0;
    if (device_enter(&pool->device, &scope) != VPMM_SUCCESS)
        return;
    fronts_flush(&pool->fronts, NULL, true);
    reaper_pass_now(&pool->arena);
    build_release(&pool->arena, 0, &released);
    device_leave(&pool->device, &scope);
}

/* The driver's pool and this one take from the same device: before one fails the other gives what it can. */
static vpmm_status malloc_small(struct vpmm_pool *pool, size_t bytes, CUstream stream, CUdeviceptr *out)
{
    if (!pool->device.has_pools)
        return fail(VPMM_ERROR_NOT_SUPPORTED,
                    "%zu bytes are less than a page of %zu, and the device has no memory pools "
                    "to take them from",
                    bytes, pool->config.page_size);
    vpmm_status status = small_malloc(&pool->small, bytes, stream, out);
    if (status == VPMM_ERROR_OUT_OF_MEMORY && pool->paged) {
        release_pages(pool);
        status = small_malloc(&pool->small, bytes, stream, out);
    }
    if (status == VPMM_ERROR_OUT_OF_MEMORY && pool->paged) {
        reaper_settle(&pool->arena);
        release_pages(pool);
        status = small_malloc(&pool->small, bytes, stream, out);
    }
    if (status == VPMM_ERROR_OUT_OF_MEMORY)
        return out_of_memory(pool, bytes);
    if (status == VPMM_SUCCESS)
        stats_count(&pool->stats, STAT_hits_small);
    return status;
}

static vpmm_status check_size(const struct vpmm_pool *pool, size_t bytes)
{
    if (!bytes)
        return fail(VPMM_ERROR_INVALID_VALUE, "vpmm_malloc: zero bytes were asked for; at least 1 is allowed");
    if (bytes > SIZE_MAX - (pool->config.page_size - 1) ||
        (pool->paged && bytes / pool->config.page_size >= UINT32_MAX))
        return fail(VPMM_ERROR_INVALID_VALUE,
                    "vpmm_malloc: %zu bytes overflow when they are rounded up to pages of %zu", bytes,
                    pool->config.page_size);
    return VPMM_SUCCESS;
}

static bool is_small(const struct vpmm_pool *pool, size_t bytes)
{
    return !pool->paged || bytes < pool->config.page_size;
}

/* A pool without pages keeps no streams: the driver's pool knows them. */
static vpmm_status enter(struct vpmm_pool *pool, CUstream handle, struct stream **stream)
{
    *stream = NULL;
    return pool->paged ? stream_enter(&pool->arena.streams, handle, stream) : VPMM_SUCCESS;
}

static void leave(struct stream *stream)
{
    if (stream)
        stream_leave(stream);
}

/* What a call answers, counted if it is a failure. */
static vpmm_status answer(struct vpmm_pool *pool, vpmm_status status)
{
    if (status != VPMM_SUCCESS && pool)
        stats_count_failure(&pool->stats, status);
    return status;
}

static vpmm_status malloc_by_tiers(vpmm_pool *pool, size_t bytes, CUstream handle, CUdeviceptr *out)
{
    struct stream *stream;
    vpmm_status status = check_pool(pool, "vpmm_malloc");
    if (status == VPMM_SUCCESS && !out)
        status = fail(VPMM_ERROR_INVALID_VALUE, "vpmm_malloc: the output is NULL");
    if (status == VPMM_SUCCESS)
        status = check_size(pool, bytes);
    if (status == VPMM_SUCCESS)
        status = enter(pool, handle, &stream);
    if (status != VPMM_SUCCESS)
        return status;
    struct cache *cache = is_small(pool, bytes) ? NULL : front_cache(&pool->fronts, stream);
    if (!cache || !malloc_cached(pool, bytes, cache, out)) {
        status =
            is_small(pool, bytes) ? malloc_small(pool, bytes, handle, out) : malloc_pages(pool, bytes, stream, out);
        if (status == VPMM_SUCCESS)
            stats_count(&pool->stats, STAT_mallocs);
    }
    leave(stream);
    return status;
}

/* Everything that is not a hit of the thread's own cache: the arguments are checked here. */
static __attribute__((noinline)) vpmm_status malloc_slowly(vpmm_pool *pool, size_t bytes, CUstream handle,
                                                           CUdeviceptr *out)
{
    return answer(pool, malloc_by_tiers(pool, bytes, handle, out));
}

/* A build for debugging looks for captures here too, which costs more than the hit. */
static bool is_capturing(const struct vpmm_pool *pool, CUstream handle)
{
#ifdef VPMM_DEBUG_CHECKS
    CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
    return pool->device.driver.cuStreamIsCapturing(handle, &capture) != CUDA_SUCCESS ||
           capture != CU_STREAM_CAPTURE_STATUS_NONE;
#else
    (void)pool, (void)handle;
    return false;
#endif
}

/* The thread's cache for the stream, if it has met both before. False: the long way. */
static inline bool hit_cache(const struct vpmm_pool *pool, CUstream handle, struct cache **cache)
{
    return front_lookup(&pool->fronts, handle, cache) && !is_capturing(pool, handle);
}

/* What the hit is not made for, and the cache or a neighbour's may still serve; else the long way. */
static __attribute__((noinline)) vpmm_status malloc_hit(vpmm_pool *pool, size_t bytes, CUstream handle,
                                                        CUdeviceptr *out, struct cache *cache)
{
    bool is_page = bytes - pool->config.page_size <= pool->fronts.span;
    return is_page && malloc_cached(pool, bytes, cache, out) ? VPMM_SUCCESS : malloc_slowly(pool, bytes, handle, out);
}

static __attribute__((noinline)) vpmm_status after_new_peak(struct cache *cache)
{
    front_note_peak(cache->front);
    return VPMM_SUCCESS;
}

/* Tier 1 where it is no more than an exchange; else all tiers. Its calls are in tail position: see cache_take_newest.
 */
static inline vpmm_status malloc_at_once(vpmm_pool *pool, size_t bytes, CUstream handle, CUdeviceptr *out,
                                         struct cache *cache)
{
    const struct pages *pages = &pool->arena.pages;
    bool peak;
    /* What is less than a page wraps, and is too long as well. */
    if (bytes - pages->page_size > pool->fronts.span ||
        !cache_take_newest(cache, pages, ((bytes - 1) >> pages->page_shift) + 1, bytes, out, &peak))
        return malloc_hit(pool, bytes, handle, out, cache);
    return peak ? after_new_peak(cache) : VPMM_SUCCESS;
}

static __attribute__((noinline)) vpmm_status malloc_checked(vpmm_pool *pool, size_t bytes, CUstream handle,
                                                            CUdeviceptr *out, struct cache *cache)
{
    unsigned long long id;
    if (!cache->is_default)
        add_alone_u64(&cache->front->tally.driver_calls, 1);
    if (cache->is_default ? !cache_is_current(cache)
                          : pool->device.driver.cuStreamGetId(handle, &id) != CUDA_SUCCESS || id != cache->id)
        return malloc_slowly(pool, bytes, handle, out);
    return malloc_at_once(pool, bytes, handle, out, cache);
}

vpmm_status vpmm_malloc(vpmm_pool *pool, size_t bytes, CUstream handle, CUdeviceptr *out)
{
    struct cache *cache;
    if (!pool || !out || !hit_cache(pool, handle, &cache))
        return malloc_slowly(pool, bytes, handle, out);
    return cache->check_id || cache->is_default ? malloc_checked(pool, bytes, handle, out, cache)
                                                : malloc_at_once(pool, bytes, handle, out, cache);
}

/* ---- free ---- */

static vpmm_status free_pages(struct vpmm_pool *pool, CUdeviceptr address, struct stream *stream)
{
    struct region region;
    vpmm_status status = region_take_back(&pool->arena, address, &region);
    if (status != VPMM_SUCCESS)
        return status;
    region.fence = fence_take(stream);
    region_publish(&pool->arena, region);
    stream_mark(&pool->arena.streams, stream);
    arena_wake_reaper(&pool->arena); /* the mark is what it watches */
    return VPMM_SUCCESS;
}

/* Into the cache, made here on a thread's first free on the stream; else to all, behind a fence. */
static vpmm_status free_or_cache(struct vpmm_pool *pool, CUdeviceptr address, struct stream *stream)
{
    struct cache *cache = front_cache(&pool->fronts, stream);
    if (cache && cache_give(cache, address))
        return VPMM_SUCCESS;
    vpmm_status status = free_pages(pool, address, stream);
    if (status == VPMM_SUCCESS)
        stats_count(&pool->stats, STAT_frees_pages);
    return status;
}

static vpmm_status free_checked(vpmm_pool *pool, CUdeviceptr address, CUstream handle)
{
    struct stream *stream;
    uint64_t page;
    vpmm_status status = check_pool(pool, "vpmm_free");
    if (status != VPMM_SUCCESS || !address)
        return status;
    status = enter(pool, handle, &stream);
    if (status != VPMM_SUCCESS)
        return status;
    bool is_page = pool->paged && (page_of_address(&pool->arena.pages, address, &page) || !pool->device.has_pools);
    if (is_page) {
        status = free_or_cache(pool, address, stream);
    } else {
        status = small_free(&pool->small, address, handle);
        if (stream)
            store_relaxed_u32(&stream->freed_small, 1);
        if (status == VPMM_SUCCESS)
            stats_count(&pool->stats, STAT_frees_small);
    }
    leave(stream);
    return status;
}

static __attribute__((noinline)) vpmm_status free_slowly(vpmm_pool *pool, CUdeviceptr address, CUstream handle)
{
    return answer(pool, free_checked(pool, address, handle));
}

static __attribute__((noinline)) vpmm_status after_first_free(struct cache *cache, const struct cache_bin *bin)
{
    cache_note(cache, bin);
    return VPMM_SUCCESS;
}

/* What the hit is not made for, and the cache may still take; else the long way. */
static __attribute__((noinline)) vpmm_status free_hit(vpmm_pool *pool, CUdeviceptr address, CUstream handle,
                                                      struct cache *cache)
{
    bool is_of = !cache->is_default || cache_is_current(cache);
    return is_of && cache_give(cache, address) ? VPMM_SUCCESS : free_slowly(pool, address, handle);
}

/* The stream's id is not looked at: if the handle has gone to another stream, the next malloc or mark finds out. */
vpmm_status vpmm_free(vpmm_pool *pool, CUdeviceptr address, CUstream handle)
{
    struct cache *cache;
    struct cache_bin *unnoted;
    if (!pool || !hit_cache(pool, handle, &cache))
        return free_slowly(pool, address, handle);
    if (cache->is_default || !cache_give_newest(cache, &pool->arena.pages, address, &unnoted))
        return free_hit(pool, address, handle, cache);
    return unnoted ? after_first_free(cache, unnoted) : VPMM_SUCCESS;
}

/* ---- the rest ---- */

static void close_caches(struct stream *stream, void *fronts)
{
    fronts_close(fronts, stream);
}

vpmm_status vpmm_stream_release(vpmm_pool *pool, CUstream handle)
{
    vpmm_status status = check_pool(pool, "vpmm_stream_release");
    if (status != VPMM_SUCCESS || !pool->paged)
        return status;
    status = stream_release(&pool->arena.streams, handle, close_caches, &pool->fronts);
    if (status == VPMM_SUCCESS)
        arena_wake_reaper(&pool->arena);
    return status;
}

vpmm_status vpmm_trim(vpmm_pool *pool, size_t keep_bytes, size_t *released)
{
    uint64_t pages = 0;
    struct device_scope scope;
    vpmm_status status = check_pool(pool, "vpmm_trim");
    if (status == VPMM_SUCCESS)
        status = device_enter(&pool->device, &scope);
    if (status != VPMM_SUCCESS)
        return status;
    if (pool->paged) {
        fronts_flush(&pool->fronts, NULL, true);
        status = reaper_pass_now(&pool->arena);
        if (status == VPMM_SUCCESS)
            status = build_release(&pool->arena, keep_bytes / pool->config.page_size, &pages);
    }
    if (status == VPMM_SUCCESS && !keep_bytes)
        trim_small(pool);
    device_leave(&pool->device, &scope);
    if (released)
        *released = (size_t)pages * pool->config.page_size;
    return status;
}

static uint64_t longest_free(const struct arena *arena)
{
    uint64_t longest = hints_longest(&arena->passed, &arena->pages, PAGE_FREE);
    for (uint32_t slot = 1; slot < load_acquire_u32(&arena->streams.slots); slot++) {
        uint64_t pages = hints_longest(&stream_at(&arena->streams, slot)->free, &arena->pages, PAGE_FREE);
        longest = pages > longest ? pages : longest;
    }
    return longest;
}

vpmm_status vpmm_stats_get(vpmm_pool *pool, vpmm_stats *out)
{
    if (!pool || !out)
        return fail(VPMM_ERROR_INVALID_VALUE, "vpmm_stats_get: the %s is NULL", pool ? "output" : "pool");
    stats_read(&pool->stats, out);
    if (pool->paged) {
        out->largest_free_bytes = longest_free(&pool->arena) * pool->config.page_size;
        out->largest_hole_bytes =
            hints_longest(&pool->arena.holes, &pool->arena.pages, PAGE_HOLE) * pool->config.page_size;
    }
    return VPMM_SUCCESS;
}

vpmm_status vpmm_dump(vpmm_pool *pool, FILE *file)
{
    vpmm_stats stats;
    if (!pool || !file)
        return fail(VPMM_ERROR_INVALID_VALUE, "vpmm_dump: the %s is NULL", pool ? "file" : "pool");
    vpmm_stats_get(pool, &stats);
#define DUMP_LINE(name, kind, help) fprintf(file, "%-20s %20" PRIu64 "  %s\n", #name, stats.name, help);
    VPMM_STATS(DUMP_LINE)
#undef DUMP_LINE
    fprintf(file, "regions of %zu-byte pages: [X] live, [-X] reusable, [*X] hole, [~X] pending unmap\n",
            pool->config.page_size);
    if (pool->paged)
        dump_regions(&pool->arena, file);
    if (ferror(file))
        return fail(VPMM_ERROR_INVALID_VALUE, "vpmm_dump: the file cannot be written");
    return VPMM_SUCCESS;
}

vpmm_status vpmm_poll_for(vpmm_pool *pool, unsigned budget_us)
{
    vpmm_status status = check_pool(pool, "vpmm_poll");
    if (status != VPMM_SUCCESS || !pool->paged)
        return status;
    return reaper_pass(&pool->arena, budget_us);
}

vpmm_status vpmm_poll(vpmm_pool *pool)
{
    enum { BUDGET_US = 200 };
    return vpmm_poll_for(pool, BUDGET_US);
}

vpmm_status vpmm_check(vpmm_pool *pool)
{
    if (!pool)
        return fail(VPMM_ERROR_INVALID_VALUE, "vpmm_check: the pool is NULL");
    if (pool->generation != process_generation())
        return check_pool(pool, "vpmm_check");
    if (!pool->paged)
        return VPMM_SUCCESS;
    /* The reaper is the pool's own thread: it is kept from making a pass meanwhile. */
    pthread_mutex_lock(&pool->arena.reaping);
    vpmm_status status = audit(&pool->arena);
    pthread_mutex_unlock(&pool->arena.reaping);
    return status;
}

/* ---- observing ---- */

static vpmm_status check_observer(const struct vpmm_pool *pool, const void *out, const char *function)
{
    return pool && out ? VPMM_SUCCESS
                       : fail(VPMM_ERROR_INVALID_VALUE, "%s: the %s is NULL", function, pool ? "output" : "pool");
}

vpmm_status vpmm_calls_get(vpmm_pool *pool, vpmm_call_counts out[VPMM_DRIVER_CALLS])
{
    vpmm_status status = check_observer(pool, out, "vpmm_calls_get");
    if (status == VPMM_SUCCESS)
        stats_read_calls(&pool->stats, out);
    return status;
}

vpmm_status vpmm_latency_get(vpmm_pool *pool, vpmm_latency *out)
{
    vpmm_status status = check_observer(pool, out, "vpmm_latency_get");
    if (status == VPMM_SUCCESS)
        stats_read_latency(&pool->stats, out);
    return status;
}

vpmm_status vpmm_health_get(vpmm_pool *pool, vpmm_health *out)
{
    vpmm_status status = check_observer(pool, out, "vpmm_health_get");
    if (status == VPMM_SUCCESS)
        *out = (vpmm_health){.lost = device_dead(&pool->device),
                             .reaper = pool->paged && pool->config.reaper,
                             .reaper_age_ns = pool->paged ? reaper_age_ns(&pool->arena) : 0};
    return status;
}

vpmm_status vpmm_device_get(vpmm_pool *pool, vpmm_device *out)
{
    vpmm_status status = check_observer(pool, out, "vpmm_device_get");
    if (status != VPMM_SUCCESS)
        return status;
    *out = (vpmm_device){.ordinal = pool->device.ordinal,
                         .memory_bytes = pool->device.total_bytes,
                         .page_size = pool->config.page_size,
                         .max_mapped = pool->config.max_mapped};
    memcpy(out->name, pool->device.name, sizeof out->name);
    memcpy(out->uuid, pool->device.uuid, sizeof out->uuid);
    return VPMM_SUCCESS;
}

const vpmm_driver *vpmm_pool_driver(vpmm_pool *pool)
{
    return pool ? &pool->device.driver : NULL;
}
