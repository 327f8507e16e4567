/*
 * pool.c - the public functions: arguments checked, tiers in their order, errors in words.
 */
#include "pool/pool.h"

#include "cache/slices.h"
#include "pool/audit.h"
#include "pool/piece.h"
#include "pool/reaper.h"
#include "pool/tiers.h"
#include "remap/cut.h"
#include "remap/pass.h"

#include <inttypes.h>
#include <string.h>

/* Where the library is built with per-thread default streams, these are still the functions of these names. */
#undef vpmm_malloc
#undef vpmm_free
#undef vpmm_stream_release

/* ---- what every call looks at first ---- */

vpmm_status pool_check(const struct vpmm_pool *pool, const char *function)
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

/* ---- malloc ---- */

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

/* The driver's pool and this one take from the same device: before one fails the other gives what it can. */
static vpmm_status malloc_small(struct vpmm_pool *pool, size_t bytes, CUstream stream, CUdeviceptr *out)
{
    if (!pool->device.has_pools)
        return fail(VPMM_ERROR_NOT_SUPPORTED,
                    "%zu bytes are less than a page of %zu, and the device has no memory pools "
                    "to take them from",
                    bytes, pool->config.page_size);
    vpmm_status status = async_pool_malloc(&pool->async, bytes, stream, out);
    if (status == VPMM_ERROR_OUT_OF_MEMORY && pool->paged) {
        tiers_release_pages(pool);
        status = async_pool_malloc(&pool->async, bytes, stream, out);
    }
    if (status == VPMM_ERROR_OUT_OF_MEMORY && pool->paged) {
        pass_settle(&pool->arena);
        tiers_release_pages(pool);
        status = async_pool_malloc(&pool->async, bytes, stream, out);
    }
    if (status == VPMM_ERROR_OUT_OF_MEMORY)
        return tiers_out_of_memory(pool, bytes);
    if (status == VPMM_SUCCESS) {
        stats_count(&pool->stats, STAT_mallocs);
        stats_count(&pool->stats, STAT_hits_small);
    }
    return status;
}

static vpmm_status malloc_pages(struct vpmm_pool *pool, size_t bytes, struct stream *stream, CUdeviceptr *out)
{
    struct region region;
    enum region_source source;
    uint64_t pages = (bytes - 1) / pool->config.page_size + 1;
    struct cache *cache = front_cache(&pool->fronts, stream);
    if (cache && malloc_cached(pool, bytes, cache, out))
        return VPMM_SUCCESS;
    vpmm_status status = tiers_take_pages(pool, pages, pages, stream, &region, &source);
    if (status != VPMM_SUCCESS)
        return status == VPMM_ERROR_OUT_OF_MEMORY ? tiers_out_of_memory(pool, bytes) : status;
    stats_count(&pool->stats, STAT_mallocs);
    tiers_count(pool, source);
    *out = region_hand_out(&pool->arena.space, region, pages, bytes);
    front_peak_noted(&pool->fronts);
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

/* Whether the driver's pool serves it. */
static bool is_small(const struct vpmm_pool *pool, size_t bytes)
{
    return !pool->paged || (!pool->cut_below && bytes < pool->config.page_size);
}

/* A pool without pages keeps no streams: the driver's pool knows them. */
static vpmm_status enter(struct vpmm_pool *pool, CUstream handle, struct stream **stream)
{
    *stream = NULL;
    return pool->paged ? stream_enter(&pool->arena.streams, handle, stream) : VPMM_SUCCESS;
}

static void leave(struct vpmm_pool *pool, struct stream *stream)
{
    bool is_private = stream && stream->is_private;
    if (stream)
        stream_finish(&pool->arena.streams, stream);
    if (is_private)
        bell_ring(&pool->arena.bell); /* what had no mark yet is left to the reaper, which no longer looks at it */
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
    vpmm_status status = pool_check(pool, "vpmm_malloc");
    if (status == VPMM_SUCCESS && !out)
        status = fail(VPMM_ERROR_INVALID_VALUE, "vpmm_malloc: the output is NULL");
    if (status == VPMM_SUCCESS)
        status = check_size(pool, bytes);
    if (status == VPMM_SUCCESS)
        status = enter(pool, handle, &stream);
    if (status != VPMM_SUCCESS)
        return status;
    if (is_small(pool, bytes))
        status = malloc_small(pool, bytes, handle, out);
    else if (piece_serves(pool, bytes))
        status = piece_malloc(pool, bytes, stream, out);
    else
        status = malloc_pages(pool, bytes, stream, out);
    leave(pool, stream);
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
static inline bool hit_cache(const struct vpmm_pool *pool, const struct fronts *fronts, CUstream handle,
                             struct cache **cache)
{
    return front_lookup(fronts, handle, cache) && !is_capturing(pool, handle);
}

/* Whether the handle is still that of the cache's stream. */
static inline bool is_same_stream(const struct vpmm_pool *pool, CUstream handle, const struct cache *cache)
{
    unsigned long long id;
    if (cache->is_default)
        return cache_is_current(cache);
    add_alone_u64(&cache->front->tally.driver_calls, 1);
    return pool->device.driver.cuStreamGetId(handle, &id) == CUDA_SUCCESS && id == cache->id;
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
    const struct pages *pages = &pool->arena.space.pages;
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
    return is_same_stream(pool, handle, cache) ? malloc_at_once(pool, bytes, handle, out, cache)
                                               : malloc_slowly(pool, bytes, handle, out);
}

/* Tier 1 for what is cut from pages. Its calls, too, are in tail position. */
static inline vpmm_status malloc_piece_at_once(vpmm_pool *pool, size_t bytes, CUstream handle, CUdeviceptr *out,
                                               struct cache *cache)
{
    bool peak; /* of pages alone */
    bool taken = bytes <= SLICE_MAX ? slices_take_newest(cache, slice_class(bytes), bytes, out)
                                    : cache_take_newest(cache, &pool->arena.cut.pages, (bytes - 1) / GRANULE_BYTES + 1,
                                                        bytes, out, &peak);
    return taken ? VPMM_SUCCESS : malloc_slowly(pool, bytes, handle, out);
}

static __attribute__((noinline)) vpmm_status malloc_piece_checked(vpmm_pool *pool, size_t bytes, CUstream handle,
                                                                  CUdeviceptr *out, struct cache *cache)
{
    return is_same_stream(pool, handle, cache) ? malloc_piece_at_once(pool, bytes, handle, out, cache)
                                               : malloc_slowly(pool, bytes, handle, out);
}

static __attribute__((noinline)) vpmm_status malloc_piece(vpmm_pool *pool, size_t bytes, CUstream handle,
                                                          CUdeviceptr *out)
{
    struct cache *cache;
    if (!out || !hit_cache(pool, &pool->cut_fronts, handle, &cache)) /* zero bytes are no piece */
        return malloc_slowly(pool, bytes, handle, out);
    return cache->check_id || cache->is_default ? malloc_piece_checked(pool, bytes, handle, out, cache)
                                                : malloc_piece_at_once(pool, bytes, handle, out, cache);
}

vpmm_status vpmm_malloc(vpmm_pool *pool, size_t bytes, CUstream handle, CUdeviceptr *out)
{
    struct cache *cache;
    if (pool && bytes & pool->cut_mask && piece_serves(pool, bytes))
        return malloc_piece(pool, bytes, handle, out);
    if (!pool || !out || !hit_cache(pool, &pool->fronts, handle, &cache))
        return malloc_slowly(pool, bytes, handle, out);
    return cache->check_id || cache->is_default ? malloc_checked(pool, bytes, handle, out, cache)
                                                : malloc_at_once(pool, bytes, handle, out, cache);
}

/* ---- free ---- */

static vpmm_status free_pages(struct vpmm_pool *pool, CUdeviceptr address, struct stream *stream)
{
    struct region region;
    vpmm_status status = region_take_back(&pool->arena.space, address, &region);
    if (status != VPMM_SUCCESS)
        return status;
    region.fence = fence_take(stream);
    region_publish(&pool->arena.space, region);
    stream_mark(&pool->arena.streams, stream);
    bell_ring(&pool->arena.bell); /* the mark is what it watches */
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

static vpmm_status free_small(struct vpmm_pool *pool, CUdeviceptr address, CUstream handle, struct stream *stream)
{
    vpmm_status status = async_pool_free(&pool->async, address, handle);
    if (stream && stream->is_private)
        fence_take(stream); /* the call marks it at its end: nobody else could */
    else if (stream)
        store_relaxed_u32(&stream->freed_small, 1);
    if (status == VPMM_SUCCESS)
        stats_count(&pool->stats, STAT_frees_small);
    return status;
}

/* Whether an address can only be a page's. */
static bool is_paged(const struct vpmm_pool *pool, CUdeviceptr address)
{
    uint64_t page;
    return pool->paged &&
           (page_around(&pool->arena.space.pages, address, &page) || pool->cut_below || !pool->device.has_pools);
}

static vpmm_status free_checked(vpmm_pool *pool, CUdeviceptr address, CUstream handle)
{
    struct stream *stream;
    vpmm_status status = pool_check(pool, "vpmm_free");
    if (status != VPMM_SUCCESS || !address)
        return status;
    status = enter(pool, handle, &stream);
    if (status != VPMM_SUCCESS)
        return status;
    if (pool->cut_below && piece_is_at(pool, address))
        status = piece_free(pool, address, stream);
    else if (is_paged(pool, address))
        status = free_or_cache(pool, address, stream);
    else
        status = free_small(pool, address, handle, stream);
    leave(pool, stream);
    return status;
}

static __attribute__((noinline)) vpmm_status free_slowly(vpmm_pool *pool, CUdeviceptr address, CUstream handle)
{
    return answer(pool, free_checked(pool, address, handle));
}

static __attribute__((noinline)) vpmm_status after_first_free(vpmm_pool *pool, CUdeviceptr address, CUstream handle,
                                                              struct cache *cache, uint32_t bin)
{
    return cache_note(cache, bin, address) ? VPMM_SUCCESS : free_slowly(pool, address, handle);
}

static __attribute__((noinline)) vpmm_status after_first_slice(vpmm_pool *pool, CUdeviceptr address, CUstream handle,
                                                               struct cache *cache, unsigned class)
{
    return slices_note(cache, class) ? VPMM_SUCCESS : free_slowly(pool, address, handle);
}

/* As vpmm_free, of a region of granules. */
static __attribute__((noinline)) vpmm_status free_granules(vpmm_pool *pool, CUdeviceptr address, CUstream handle,
                                                           struct cache *cache)
{
    uint32_t unnoted;
    struct page *first;
    if (!page_in_first_chunk(&pool->arena.cut.pages, address, &first))
        return free_slowly(pool, address, handle);
    uint64_t word = load_acquire_u64(&first->word);
    if (word_state(word) != PAGE_LIVE ||
        !cache_give_newest(cache, &pool->arena.cut.pages, address, first, word, &unnoted))
        return free_slowly(pool, address, handle);
    return unnoted != CACHE_BINS ? after_first_free(pool, address, handle, cache, unnoted) : VPMM_SUCCESS;
}

/* The same of an address where no live region of pages begins. */
static __attribute__((noinline)) vpmm_status free_piece(vpmm_pool *pool, CUdeviceptr address, CUstream handle)
{
    const struct pages *granules = &pool->arena.cut.pages;
    uint64_t granule = (address - granules->chunk[0].base) / GRANULE_BYTES;
    struct cache *cache;
    if (!pool->cut_mask || !hit_cache(pool, &pool->cut_fronts, handle, &cache) || cache->is_default ||
        granule >= granules->chunk_pages)
        return free_slowly(pool, address, handle);
    struct slab *slab = load_acquire_ptr(&granules->chunk[0].page[granule].extent);
    if (!slab)
        return free_granules(pool, address, handle, cache);
    struct slice *slice = slab_slice_at(slab, address);
    unsigned unnoted;
    if (!slice || !slices_give_newest(cache, slice, address, &unnoted))
        return free_slowly(pool, address, handle);
    return unnoted != SLICE_CLASSES ? after_first_slice(pool, address, handle, cache, unnoted) : VPMM_SUCCESS;
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
    uint32_t unnoted;
    struct page *first;
    if (!pool)
        return free_slowly(pool, address, handle);
    const struct pages *pages = &pool->arena.space.pages;
    if (!page_in_first_chunk(pages, address, &first))
        return free_piece(pool, address, handle);
    uint64_t word = load_acquire_u64(&first->word);
    if (word_state(word) != PAGE_LIVE)
        return free_piece(pool, address, handle);
    if (!hit_cache(pool, &pool->fronts, handle, &cache))
        return free_slowly(pool, address, handle);
    if (cache->is_default || !cache_give_newest(cache, pages, address, first, word, &unnoted))
        return free_hit(pool, address, handle, cache);
    return unnoted != CACHE_BINS ? after_first_free(pool, address, handle, cache, unnoted) : VPMM_SUCCESS;
}

/* ---- the rest ---- */

static void close_caches(struct stream *stream, void *data)
{
    struct vpmm_pool *pool = data;
    fronts_close(&pool->fronts, stream);
    fronts_close(&pool->cut_fronts, stream);
}

vpmm_status vpmm_stream_release(vpmm_pool *pool, CUstream handle)
{
    vpmm_status status = pool_check(pool, "vpmm_stream_release");
    if (status != VPMM_SUCCESS || !pool->paged)
        return status;
    status = stream_release(&pool->arena.streams, handle, close_caches, pool);
    if (status == VPMM_SUCCESS)
        bell_ring(&pool->arena.bell);
    return status;
}

/* ---- under per-thread default streams ---- */

static CUstream per_thread(CUstream handle)
{
    return handle ? handle : CU_STREAM_PER_THREAD;
}

vpmm_status vpmm_malloc_ptsz(vpmm_pool *pool, size_t bytes, CUstream handle, CUdeviceptr *out)
{
    return vpmm_malloc(pool, bytes, per_thread(handle), out);
}

vpmm_status vpmm_free_ptsz(vpmm_pool *pool, CUdeviceptr address, CUstream handle)
{
    return vpmm_free(pool, address, per_thread(handle));
}

vpmm_status vpmm_stream_release_ptsz(vpmm_pool *pool, CUstream handle)
{
    return vpmm_stream_release(pool, per_thread(handle));
}

/* ---- giving back, and seeing into it ---- */

vpmm_status vpmm_trim(vpmm_pool *pool, size_t keep_bytes, size_t *released)
{
    uint64_t pages = 0;
    struct device_scope scope;
    vpmm_status status = pool_check(pool, "vpmm_trim");
    if (status == VPMM_SUCCESS)
        status = device_enter(&pool->device, &scope);
    if (status != VPMM_SUCCESS)
        return status;
    if (pool->paged) {
        tiers_flush(pool);
        status = pass_now(&pool->arena);
        if (status == VPMM_SUCCESS && streams_unmarkable(&pool->arena.streams))
            pass_wait_for_contexts(&pool->arena); /* what cannot be waited for now stays */
        cut_flush(&pool->arena);                  /* slabs of which the last slices have passed now */
        if (status == VPMM_SUCCESS)
            status = pass_release(&pool->arena, keep_bytes / pool->config.page_size, &pages);
    }
    if (status == VPMM_SUCCESS && !keep_bytes)
        async_pool_trim(&pool->async);
    device_leave(&pool->device, &scope);
    if (released)
        *released = (size_t)pages * pool->config.page_size;
    return status;
}

static uint64_t longest_free(const struct arena *arena)
{
    uint64_t longest = hints_longest(&arena->space.passed, &arena->space.pages, PAGE_FREE);
    for (uint32_t slot = 1; slot < load_acquire_u32(&arena->streams.slots); slot++) {
        uint64_t pages =
            hints_longest(&stream_at(&arena->streams, slot)->free[SPACE_PAGES], &arena->space.pages, PAGE_FREE);
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
            hints_longest(&pool->arena.holes, &pool->arena.space.pages, PAGE_HOLE) * pool->config.page_size;
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
    vpmm_status status = pool_check(pool, "vpmm_poll");
    if (status != VPMM_SUCCESS || !pool->paged)
        return status;
    return pass_try(&pool->arena, budget_us);
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
        return pool_check(pool, "vpmm_check");
    if (!pool->paged)
        return VPMM_SUCCESS;
    /* The reaper is the pool's own thread: it is kept from making a pass meanwhile. */
    pthread_mutex_lock(&pool->arena.pass_lock);
    vpmm_status status = audit(&pool->arena);
    pthread_mutex_unlock(&pool->arena.pass_lock);
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
                         .max_mapped = (size_t)load_relaxed_u64(&pool->arena.max_mapped)};
    memcpy(out->name, pool->device.name, sizeof out->name);
    memcpy(out->uuid, pool->device.uuid, sizeof out->uuid);
    return VPMM_SUCCESS;
}

const vpmm_driver *vpmm_pool_driver(vpmm_pool *pool)
{
    return pool ? &pool->device.driver : NULL;
}
