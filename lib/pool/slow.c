#include "pool/slow.h"

#include "cache/regions.h"
#include "pool/config.h"
#include "pool/piece.h"
#include "pool/tiers.h"
#include "remap/ending.h"
#include "remap/ends.h"
#include "remap/park.h"
#include "remap/settle.h"
#include "space/identity.h"

#include <inttypes.h>

/* As in hit.c. */
#undef vpmm_malloc
#undef vpmm_free

/* ---- malloc ---- */

bool slow_malloc_cached(struct vpmm_pool *pool, size_t bytes, struct cache *cache, CUdeviceptr *out)
{
    CUdeviceptr address = regions_take_or_steal(cache, (bytes - 1) / pool->config.page_size + 1, bytes);
    if (address)
        *out = address;
    return address != 0;
}

/* The driver's pool and this one take from the same device: before one fails the other gives what it can. */
static vpmm_status malloc_async(struct vpmm_pool *pool, size_t bytes, CUstream stream, CUdeviceptr *out)
{
    if (!pool->device.has_pools)
        return fail(VPMM_ERROR_NOT_SUPPORTED,
                    "%zu bytes are less than a page of %zu, and the device has no memory pools "
                    "to take them from",
                    bytes, pool->config.page_size);
    vpmm_status status = async_pool_malloc(&pool->async, bytes, stream, out);
    if (status == VPMM_ERROR_OUT_OF_MEMORY && pool->paged) {
        tiers_release_pages(&pool->arena);
        status = async_pool_malloc(&pool->async, bytes, stream, out);
    }
    if (status == VPMM_ERROR_OUT_OF_MEMORY && pool->paged) {
        struct tiers_wait wait;
        tiers_note_wait(&wait, settle(&pool->arena));
        tiers_release_pages(&pool->arena);
        status = tiers_after_wait(&wait, async_pool_malloc(&pool->async, bytes, stream, out));
    }
    if (status == VPMM_SUCCESS) {
        stats_count(&pool->stats, STAT_mallocs);
        stats_count(&pool->stats, STAT_hits_async);
    }
    return status;
}

/* `tried`: the cache that has had nothing for the request; NULL: none was asked. */
static vpmm_status malloc_pages(struct vpmm_pool *pool, size_t bytes, struct stream *stream, const struct cache *tried,
                                CUdeviceptr *out)
{
    struct region region;
    enum region_source source;
    uint64_t pages = (bytes - 1) / pool->config.page_size + 1;
    struct cache *cache = front_cache(&pool->fronts, stream);
    if (cache && cache != tried && slow_malloc_cached(pool, bytes, cache, out))
        return VPMM_SUCCESS;
    vpmm_status status = tiers_take_pages(&pool->arena, pages, pages, UINT32_MAX, stream, &region, &source);
    if (status != VPMM_SUCCESS)
        return status;
    stats_count(&pool->stats, STAT_mallocs);
    tiers_count(&pool->arena, source);
    *out = region_hand_out(&pool->arena.space, ends_choose(&pool->arena, region, pages), pages, bytes);
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
static bool is_async(const struct vpmm_pool *pool, size_t bytes)
{
    return !pool->paged || (!pool->arena.cut_below && bytes < pool->config.page_size);
}

/* A pool without pages keeps no streams: the driver's pool knows them. It would make a graph's node of a call there. */
static vpmm_status enter(struct vpmm_pool *pool, CUstream handle, struct stream **stream)
{
    *stream = NULL;
    return pool->paged ? stream_enter(&pool->arena.streams, handle, stream) : identity_check(&pool->device, handle);
}

/* The same where the thread's cache is of the stream; NULL: that is not known. */
static vpmm_status enter_past(struct vpmm_pool *pool, CUstream handle, struct cache *cache, struct stream **stream)
{
    vpmm_status status = VPMM_SUCCESS;
    *stream = NULL;
    if (cache && (cache->check_id || cache->is_default)) {
        status = identity_refuse_capture(&pool->device, handle, cache->is_default ? cache->context : NULL);
        *stream = status == VPMM_SUCCESS ? cache_enter_again(cache) : NULL;
    }
    return status == VPMM_SUCCESS && !*stream ? enter(pool, handle, stream) : status;
}

static void leave(struct vpmm_pool *pool, struct stream *stream)
{
    bool is_private = stream && stream_is_private(stream);
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

/* After a malloc that has raised the levels elsewhere than in the front caches: their marks are for what was below. */
static void look_at_levels(struct vpmm_pool *pool)
{
    bool pages = pool->paged && fronts_look(&pool->fronts);
    if (pool->paged && pool->arena.cut_below)
        fronts_look(&pool->cut_fronts);
    if (!pages) /* which alone have live_bytes */
        stats_look_past_tallies(&pool->stats);
}

/* Whether others have what a request lacks: neither the pool's cap nor what it holds itself is in the way. */
static bool others_hold(const struct vpmm_pool *pool, size_t bytes, const vpmm_stats *stats, uint64_t max_mapped)
{
    size_t unit = config_mapped_unit(pool->config.page_size, pool->device.granularity);
    uint64_t held = stats->mapped_bytes + stats->quarantined_bytes;
    bool no_pages = is_async(pool, bytes); /* and under no cap */
    uint64_t least = no_pages ? bytes : (bytes - 1) / unit * unit + unit;
    bool is_capped = max_mapped && !no_pages && held + least > max_mapped;
    return !is_capped && held + stats->async_bytes + least <= pool->device.total_bytes;
}

/* In words, if others have it: and how much is left, where the driver says so. */
static void describe_others(struct vpmm_pool *pool, bool others_hold_it, char *text, size_t length)
{
    static const char others[] = "others hold the rest; what another pool keeps free vpmm_trim gives back";
    size_t bytes;
    text[0] = '\0';
    if (others_hold_it && device_free_memory(&pool->device, &bytes) == CUDA_SUCCESS)
        snprintf(text, length, ", where %zu are free: %s", bytes, others);
    else if (others_hold_it)
        snprintf(text, length, ", where %s", others);
}

/* Of a request that fails: counts it, and says what there is. */
static vpmm_status out_of_memory(struct vpmm_pool *pool, size_t bytes)
{
    vpmm_stats stats;
    char cap[64] = "none", others[160];
    stats_read(&pool->stats, &stats);
    stats_count(&pool->stats, STAT_out_of_memory);
    uint64_t max_mapped = load_relaxed_u64(&pool->arena.max_mapped);
    if (max_mapped)
        snprintf(cap, sizeof cap, "%" PRIu64, max_mapped);
    bool is_stuck = stats.live_bytes && stats.reusable_bytes >= bytes; /* by now: others may have freed it meanwhile */
    describe_others(pool, others_hold(pool, bytes, &stats, max_mapped), others, sizeof others);
    return fail(
        VPMM_ERROR_OUT_OF_MEMORY,
        "%zu bytes were asked for: mapped %" PRIu64 ", live %" PRIu64 ", reusable %" PRIu64 "%s, quarantined %" PRIu64
        ", in the driver's pool for small requests %" PRIu64 ", cap %s, of %zu on device %d%s",
        bytes, stats.mapped_bytes, stats.live_bytes, stats.reusable_bytes,
        is_stuck ? " (in pieces that share handles with live memory, or behind work that cannot be waited for)" : "",
        stats.quarantined_bytes, stats.async_bytes, cap, pool->device.total_bytes, pool->device.ordinal, others);
}

static vpmm_status malloc_by_tiers(vpmm_pool *pool, size_t bytes, CUstream handle, CUdeviceptr *out,
                                   struct cache *cache)
{
    struct stream *stream;
    vpmm_status status = pool_check(pool, "vpmm_malloc");
    if (status == VPMM_SUCCESS && !out)
        status = fail(VPMM_ERROR_INVALID_VALUE, "vpmm_malloc: the output is NULL");
    if (status == VPMM_SUCCESS)
        status = check_size(pool, bytes);
    if (status == VPMM_SUCCESS && arena_is_parked(&pool->arena))
        status = parked_status();
    if (status == VPMM_SUCCESS)
        status = without_shortage(enter_past(pool, handle, cache, &stream));
    if (status != VPMM_SUCCESS)
        return status;
    if (is_async(pool, bytes))
        status = malloc_async(pool, bytes, handle, out);
    else if (piece_serves(&pool->arena, bytes))
        status = piece_malloc(&pool->arena, bytes, stream, out);
    else
        status = malloc_pages(pool, bytes, stream, cache, out);
    if (status == VPMM_ERROR_OUT_OF_MEMORY)
        status = out_of_memory(pool, bytes);
    leave(pool, stream);
    look_at_levels(pool);
    return status;
}

/* The legacy stream has two names, and its caches are found by the other one. So it is with a free. */
vpmm_status slow_malloc(vpmm_pool *pool, size_t bytes, CUstream handle, CUdeviceptr *out)
{
    if (handle == CU_STREAM_LEGACY)
        return vpmm_malloc(pool, bytes, NULL, out);
    return answer(pool, malloc_by_tiers(pool, bytes, handle, out, NULL));
}

vpmm_status slow_malloc_past(vpmm_pool *pool, size_t bytes, CUstream handle, CUdeviceptr *out, struct cache *cache)
{
    return answer(pool, malloc_by_tiers(pool, bytes, handle, out, cache));
}

/* ---- free ---- */

static vpmm_status free_pages(struct vpmm_pool *pool, CUdeviceptr address, struct stream *stream)
{
    vpmm_status status = ending_free_region(&pool->arena, &pool->arena.space, address, stream);
    if (status == VPMM_SUCCESS) {
        stream_mark(&pool->arena.streams, stream);
        bell_ring(&pool->arena.bell); /* the mark is what it watches */
    }
    return status;
}

/* Into the cache, made here on a thread's first free on the stream; else to all, behind a fence. */
static vpmm_status free_or_cache(struct vpmm_pool *pool, CUdeviceptr address, struct stream *stream)
{
    struct cache *cache = front_cache(&pool->fronts, stream);
    if (cache && regions_give(cache, address))
        return VPMM_SUCCESS;
    vpmm_status status = free_pages(pool, address, stream);
    if (status == VPMM_SUCCESS)
        stats_count(&pool->stats, STAT_frees_pages);
    return status;
}

static vpmm_status free_async(struct vpmm_pool *pool, CUdeviceptr address, CUstream handle, struct stream *stream)
{
    vpmm_status status = async_pool_free(&pool->async, address, handle);
    if (stream && stream_is_private(stream))
        fence_take(stream); /* the call marks it at its end: nobody else could */
    else if (stream)
        store_relaxed_u32(&pool->arena.note[stream->slot].freed_async, 1);
    if (status == VPMM_SUCCESS)
        stats_count(&pool->stats, STAT_frees_async);
    return status;
}

/* Whether an address can only be a page's. */
static bool is_paged(const struct vpmm_pool *pool, CUdeviceptr address)
{
    uint64_t page;
    return pool->paged &&
           (unit_around(&pool->arena.space.units, address, &page) || pool->arena.cut_below || !pool->device.has_pools);
}

static vpmm_status free_checked(vpmm_pool *pool, CUdeviceptr address, CUstream handle, struct cache *cache)
{
    struct stream *stream;
    vpmm_status status = pool_check(pool, "vpmm_free");
    if (status != VPMM_SUCCESS || !address)
        return status;
    status = enter_past(pool, handle, cache, &stream);
    if (status != VPMM_SUCCESS)
        return status;
    if (pool->arena.cut_below && piece_is_at(&pool->arena, address))
        status = piece_free(&pool->arena, address, stream);
    else if (is_paged(pool, address))
        status = free_or_cache(pool, address, stream);
    else
        status = free_async(pool, address, handle, stream);
    leave(pool, stream);
    return status;
}

vpmm_status slow_free(vpmm_pool *pool, CUdeviceptr address, CUstream handle)
{
    if (handle == CU_STREAM_LEGACY)
        return vpmm_free(pool, address, NULL);
    return answer(pool, without_shortage(free_checked(pool, address, handle, NULL)));
}

vpmm_status slow_free_past(vpmm_pool *pool, CUdeviceptr address, CUstream handle, struct cache *cache)
{
    return answer(pool, without_shortage(free_checked(pool, address, handle, cache->is_default ? cache : NULL)));
}

/* ---- use ---- */

static vpmm_status use_checked(vpmm_pool *pool, CUdeviceptr address, CUstream handle)
{
    struct stream *stream;
    vpmm_status status = pool_check(pool, "vpmm_use");
    if (status != VPMM_SUCCESS || !address)
        return status;
    if (!is_paged(pool, address))
        return fail(VPMM_ERROR_NOT_SUPPORTED,
                    "0x%llx is not in the pool's pages, and what the driver's pool hands out (VPMM_SMALL=async) is for "
                    "the streams that its free is ordered behind alone",
                    (unsigned long long)address);
    status = enter(pool, handle, &stream);
    if (status != VPMM_SUCCESS)
        return status;
    if (pool->arena.cut_below && piece_is_at(&pool->arena, address))
        status = piece_use(&pool->arena, address, stream);
    else
        status = region_use(&pool->arena.space, address, stream);
    if (status == VPMM_SUCCESS)
        stats_count(&pool->stats, STAT_uses);
    leave(pool, stream);
    return status;
}

vpmm_status slow_use(vpmm_pool *pool, CUdeviceptr address, CUstream handle)
{
    return answer(pool, without_shortage(use_checked(pool, address, handle)));
}
