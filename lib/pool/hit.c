/*
 * hit.c - vpmm_malloc and vpmm_free, as far as the calling thread's own cache serves them: no lock, no write to a line
 * that other threads write but the region's own descriptor, and no driver call but the check of the stream's id, or on
 * a default stream of the current context. (free_hit may give older regions up to make room: it then marks the stream.)
 *
 *   vpmm_malloc ─┬─ a piece of a page ──> malloc_piece ─┬─ trusted ──────────> malloc_piece_at_once ─┬─ slices
 *                │                                      └─ checked: same id ─> malloc_piece_checked ─┘  or subpages
 *                └─ pages ─┬─ trusted ───────────────────────────────────────> malloc_at_once ─────── pages
 *                          └─ checked: same id, or a default stream: current ─> malloc_checked ──────┘
 *
 *   vpmm_free ─┬─ a page of the first chunk is live there ─┬─ a default stream: current ─┬─> free_at_once ─── pages
 *              │                                           └─ any other ─────────────────┘
 *              └─ anything else ──> free_piece ─┬─ a default stream: current ─┬─> free_piece_at_once ─┬─ a slab ──> slices
 *                                               └─ any other ─────────────────┘                       └─ none ──> subpages
 *
 * Whatever is not served so goes to slow_malloc or slow_free, or to slow_..._past if whose stream it is was seen on the
 * way (slow.h): they check the arguments. Those that name CU_STREAM_LEGACY begin here once more with stream 0, so that
 * a hit need not know two names.
 *
 * Every call that leaves one of these functions stands in tail position, what a hit needs is inlined, and what is
 * seldom needed is not: so a hit calls nothing, saves few registers, and is one function to the processor. (On aarch64
 * its exchange is a call, unless the compiler is told that the processor has LSE: -march=armv8.1-a.) A malloc and a
 * free of 2 MiB are 196 instructions together, on a default stream 258, of 1 KiB 218 (trusted, gcc 12, x86-64).
 */
#include "cache/regions.h"
#include "cache/slices.h"
#include "pool/piece.h"
#include "pool/slow.h"
#include "remap/cut.h"

/* Where the library is built with per-thread default streams, these are still the functions of these names. */
#undef vpmm_malloc
#undef vpmm_free
#undef vpmm_use

/* ---- malloc ---- */

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

/* In a thread with another context current, or none, a default stream may be that of the primary one. */
static __attribute__((noinline)) bool is_current_elsewhere(struct vpmm_pool *pool, const struct cache *cache)
{
    CUcontext context;
    return device_current_context(&pool->device, &context) == VPMM_SUCCESS && context == cache->context;
}

/* Whether a default stream is the cache's: which one its handle names depends on the current context. */
static inline bool is_current(struct vpmm_pool *pool, const struct cache *cache)
{
    CUcontext current;
    return (pool->device.driver.cuCtxGetCurrent(&current) == CUDA_SUCCESS && current == cache->context) ||
           is_current_elsewhere(pool, cache);
}

/* The question ends a capture, and is counted as what failed. */
static __attribute__((noinline)) bool is_refused(struct vpmm_pool *pool, CUresult result)
{
    device_called(&pool->device, ENTRY_cuStreamGetId, "cuStreamGetId", result);
    return false;
}

/* Whether the handle is still that of the cache's stream. */
static inline bool is_same_stream(struct vpmm_pool *pool, CUstream handle, const struct cache *cache)
{
    unsigned long long id;
    if (cache->is_default)
        return is_current(pool, cache);
    CUresult result = pool->device.driver.cuStreamGetId(handle, &id);
    if (result != CUDA_SUCCESS)
        return is_refused(pool, result);
    add_alone_u64(&cache->front->tally.driver_calls, 1);
    return id == cache->id;
}

/* What the hit is not made for, and the cache or a neighbour's may still serve; else the long way. */
static __attribute__((noinline)) vpmm_status malloc_hit(vpmm_pool *pool, size_t bytes, CUstream handle,
                                                        CUdeviceptr *out, struct cache *cache)
{
    bool is_page = bytes - pool->config.page_size <= pool->fronts.span;
    return is_page && slow_malloc_cached(pool, bytes, cache, out) ? VPMM_SUCCESS
                                                                  : slow_malloc_past(pool, bytes, handle, out, cache);
}

static __attribute__((noinline)) vpmm_status after_rise(struct cache *cache)
{
    front_look(cache->front);
    return VPMM_SUCCESS;
}

/* Tier 1 where it is no more than an exchange; else all tiers. */
static inline vpmm_status malloc_at_once(vpmm_pool *pool, size_t bytes, CUstream handle, CUdeviceptr *out,
                                         struct cache *cache)
{
    const struct units *units = &pool->arena.space.units;
    bool look;
    /* What is less than a page wraps, and is too long as well. */
    if (bytes - units->unit_size > pool->fronts.span ||
        !regions_take_newest(cache, units, ((bytes - 1) >> units->unit_shift) + 1, bytes, out, &look))
        return malloc_hit(pool, bytes, handle, out, cache);
    return look ? after_rise(cache) : VPMM_SUCCESS;
}

static __attribute__((noinline)) vpmm_status malloc_checked(vpmm_pool *pool, size_t bytes, CUstream handle,
                                                            CUdeviceptr *out, struct cache *cache)
{
    return is_same_stream(pool, handle, cache) ? malloc_at_once(pool, bytes, handle, out, cache)
                                               : slow_malloc(pool, bytes, handle, out);
}

static __attribute__((noinline)) vpmm_status malloc_subpages_at_once(vpmm_pool *pool, size_t bytes, CUstream handle,
                                                                     CUdeviceptr *out, struct cache *cache)
{
    bool look;
    uint64_t subpages = (bytes - 1) / SUBPAGE_BYTES + 1;
    if (!regions_take_newest(cache, &pool->arena.cut.units, subpages, bytes, out, &look))
        return slow_malloc_past(pool, bytes, handle, out, cache);
    return look ? after_rise(cache) : VPMM_SUCCESS;
}

/* Tier 1 for what is cut from pages. */
static inline vpmm_status malloc_piece_at_once(vpmm_pool *pool, size_t bytes, CUstream handle, CUdeviceptr *out,
                                               struct cache *cache)
{
    bool look;
    if (bytes > SLICE_MAX)
        return malloc_subpages_at_once(pool, bytes, handle, out, cache);
    if (!slices_take_newest(cache, slice_class(bytes), bytes, out, &look))
        return slow_malloc_past(pool, bytes, handle, out, cache);
    return look ? after_rise(cache) : VPMM_SUCCESS;
}

static __attribute__((noinline)) vpmm_status malloc_piece_checked(vpmm_pool *pool, size_t bytes, CUstream handle,
                                                                  CUdeviceptr *out, struct cache *cache)
{
    return is_same_stream(pool, handle, cache) ? malloc_piece_at_once(pool, bytes, handle, out, cache)
                                               : slow_malloc(pool, bytes, handle, out);
}

static __attribute__((noinline)) vpmm_status malloc_piece(vpmm_pool *pool, size_t bytes, CUstream handle,
                                                          CUdeviceptr *out)
{
    struct cache *cache;
    if (!out || !hit_cache(pool, &pool->cut_fronts, handle, &cache)) /* zero bytes are no piece */
        return slow_malloc(pool, bytes, handle, out);
    return cache->check_id || cache->is_default ? malloc_piece_checked(pool, bytes, handle, out, cache)
                                                : malloc_piece_at_once(pool, bytes, handle, out, cache);
}

vpmm_status vpmm_malloc(vpmm_pool *pool, size_t bytes, CUstream handle, CUdeviceptr *out)
{
    struct cache *cache;
    if (pool && bytes & pool->arena.cut_mask && piece_serves(&pool->arena, bytes))
        return malloc_piece(pool, bytes, handle, out);
    if (!pool || !out || !hit_cache(pool, &pool->fronts, handle, &cache))
        return slow_malloc(pool, bytes, handle, out);
    return cache->check_id || cache->is_default ? malloc_checked(pool, bytes, handle, out, cache)
                                                : malloc_at_once(pool, bytes, handle, out, cache);
}

/* ---- free ---- */

static __attribute__((noinline)) vpmm_status after_first_free(vpmm_pool *pool, CUdeviceptr address, CUstream handle,
                                                              struct cache *cache, uint32_t bin)
{
    return cache_note(cache, CACHED_REGIONS, bin) ? VPMM_SUCCESS : slow_free(pool, address, handle);
}

static __attribute__((noinline)) vpmm_status after_first_slice(vpmm_pool *pool, CUdeviceptr address, CUstream handle,
                                                               struct cache *cache, unsigned class)
{
    return cache_note(cache, CACHED_SLICES, class) ? VPMM_SUCCESS : slow_free(pool, address, handle);
}

/*
 * What the hit is not made for, and the cache may still take, if need be in the place of older ones; else the long way.
 */
static __attribute__((noinline)) vpmm_status free_subpages_hit(vpmm_pool *pool, CUdeviceptr address, CUstream handle,
                                                               struct cache *cache)
{
    if (!regions_give_told(cache, address) && !regions_give(cache, address))
        return slow_free_past(pool, address, handle, cache);
    cut_tidy(&pool->arena); /* what has left the cache may make pages whole */
    return VPMM_SUCCESS;
}

/* What is no hit, and may be one once the front has told how much it has freed; else the long way. */
static __attribute__((noinline)) vpmm_status free_slice_hit(vpmm_pool *pool, CUdeviceptr address, CUstream handle,
                                                            struct cache *cache, struct slice *slice)
{
    return slices_give_told(cache, slice, address) ? VPMM_SUCCESS : slow_free_past(pool, address, handle, cache);
}

/* As vpmm_free, of a region of subpages. */
static __attribute__((noinline)) vpmm_status free_subpages(vpmm_pool *pool, CUdeviceptr address, CUstream handle,
                                                           struct cache *cache)
{
    uint32_t unnoted;
    struct unit *first;
    if (!unit_in_first_chunk(&pool->arena.cut.units, address, &first))
        return slow_free(pool, address, handle);
    uint64_t word = load_acquire_u64(&first->word);
    if (word_state(word) != UNIT_LIVE ||
        !regions_give_newest(cache, &pool->arena.cut.units, address, first, word, &unnoted))
        return free_subpages_hit(pool, address, handle, cache);
    return unnoted != CACHE_BINS ? after_first_free(pool, address, handle, cache, unnoted) : VPMM_SUCCESS;
}

/* The same of a piece of a page, into a cache whose stream the handle is known to be. */
static inline vpmm_status free_piece_at_once(vpmm_pool *pool, CUdeviceptr address, CUstream handle, struct cache *cache)
{
    const struct units *subpages = &pool->arena.cut.units;
    uint64_t subpage = (address - subpages->chunk[0].base) / SUBPAGE_BYTES;
    if (subpage >= subpages->chunk_units)
        return slow_free(pool, address, handle);
    struct slab *slab = load_acquire_ptr(&subpages->chunk[0].unit[subpage].extent);
    if (!slab)
        return free_subpages(pool, address, handle, cache);
    struct slice *slice = slab_slice_at(slab, address);
    unsigned unnoted;
    if (!slice)
        return slow_free(pool, address, handle);
    if (!slices_give_newest(cache, slice, address, &unnoted))
        return free_slice_hit(pool, address, handle, cache, slice);
    return unnoted != SLICE_CLASSES ? after_first_slice(pool, address, handle, cache, unnoted) : VPMM_SUCCESS;
}

static __attribute__((noinline)) vpmm_status free_piece_checked(vpmm_pool *pool, CUdeviceptr address, CUstream handle,
                                                                struct cache *cache)
{
    return is_current(pool, cache) ? free_piece_at_once(pool, address, handle, cache)
                                   : slow_free(pool, address, handle);
}

/* Of an address where no live region of pages begins. */
static __attribute__((noinline)) vpmm_status free_piece(vpmm_pool *pool, CUdeviceptr address, CUstream handle)
{
    struct cache *cache;
    if (!pool->arena.cut_mask || !hit_cache(pool, &pool->cut_fronts, handle, &cache))
        return slow_free(pool, address, handle);
    return cache->is_default ? free_piece_checked(pool, address, handle, cache)
                             : free_piece_at_once(pool, address, handle, cache);
}

/* What the hit is not made for, and the cache may still take; else the long way. */
static __attribute__((noinline)) vpmm_status free_hit(vpmm_pool *pool, CUdeviceptr address, CUstream handle,
                                                      struct cache *cache)
{
    return regions_give_told(cache, address) || regions_give(cache, address)
               ? VPMM_SUCCESS
               : slow_free_past(pool, address, handle, cache);
}

/* Into a cache whose stream the handle is known to be. `first` and `word`: as of regions_give_newest. */
static inline __attribute__((always_inline)) vpmm_status free_at_once(vpmm_pool *pool, CUdeviceptr address,
                                                                      CUstream handle, struct cache *cache,
                                                                      struct unit *first, uint64_t word)
{
    uint32_t unnoted;
    if (!regions_give_newest(cache, &pool->arena.space.units, address, first, word, &unnoted))
        return free_hit(pool, address, handle, cache);
    return unnoted != CACHE_BINS ? after_first_free(pool, address, handle, cache, unnoted) : VPMM_SUCCESS;
}

/* On a default stream. What vpmm_free has read is read again: to pass it along would cost the other streams' hits. */
static __attribute__((noinline)) vpmm_status free_checked(vpmm_pool *pool, CUdeviceptr address, CUstream handle,
                                                          struct cache *cache)
{
    struct unit *first;
    if (!is_current(pool, cache) || !unit_in_first_chunk(&pool->arena.space.units, address, &first))
        return slow_free(pool, address, handle);
    uint64_t word = load_acquire_u64(&first->word);
    return word_state(word) == UNIT_LIVE ? free_at_once(pool, address, handle, cache, first, word)
                                         : slow_free(pool, address, handle);
}

/* The stream's id is not looked at: if the handle has gone to another stream, the next malloc or mark finds out. */
vpmm_status vpmm_free(vpmm_pool *pool, CUdeviceptr address, CUstream handle)
{
    struct cache *cache;
    struct unit *first = NULL; /* else gcc -Og warns of it */
    if (!pool)
        return slow_free(pool, address, handle);
    if (!unit_in_first_chunk(&pool->arena.space.units, address, &first))
        return free_piece(pool, address, handle);
    uint64_t word = load_acquire_u64(&first->word);
    if (word_state(word) != UNIT_LIVE)
        return free_piece(pool, address, handle);
    if (!hit_cache(pool, &pool->fronts, handle, &cache))
        return slow_free(pool, address, handle);
    return cache->is_default ? free_checked(pool, address, handle, cache)
                             : free_at_once(pool, address, handle, cache, first, word);
}

/* No hit: what is used on several streams is rare, and its free goes the long way. */
vpmm_status vpmm_use(vpmm_pool *pool, CUdeviceptr address, CUstream handle)
{
    return slow_use(pool, address, handle);
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

vpmm_status vpmm_use_ptsz(vpmm_pool *pool, CUdeviceptr address, CUstream handle)
{
    return vpmm_use(pool, address, per_thread(handle));
}
