#include "pool/piece.h"

#include "cache/slices.h"
#include "pool/tiers.h"
#include "remap/cut.h"
#include "remap/pass.h"

/* ---- a region of granules ---- */

/* What was found for a want: granules in the caller's hands, or whole pages where none can be cut. */
struct found_piece {
    struct region region;
    bool is_pages;
    bool built;
};

static uint64_t pages_for(const struct vpmm_pool *pool, struct want want)
{
    return (want.pages - 1) / pool->arena.cut.page_granules + 1;
}

/* A region of pages that is at least long enough, as what was wanted. */
static struct found_piece cut(struct vpmm_pool *pool, struct region region, uint64_t pages)
{
    if (region.pages > pages)
        region = region_keep_front(&pool->arena.space, region, pages);
    bool can = cut_possible(&pool->arena, &region);
    return (struct found_piece){.region = can ? cut_pages(&pool->arena, region) : region, .is_pages = !can};
}

static bool find_granules(struct vpmm_pool *pool, struct want want, struct stream *stream, bool may_wait,
                          struct found_piece *found)
{
    return tiers_find_thoroughly(&pool->arena, &pool->arena.cut, stream, want, may_wait, &found->region) != REGION_NONE;
}

/* Free pages that the stream may use without waiting, cut. */
static bool cut_free_pages(struct vpmm_pool *pool, struct want want, struct stream *stream, struct found_piece *found)
{
    struct arena *arena = &pool->arena;
    struct want pages = {pages_for(pool, want), 1};
    if (tiers_find(arena, &arena->space, stream, pages, false, false, &found->region) == REGION_NONE)
        return false;
    *found = cut(pool, found->region, pages.pages);
    return true;
}

/*
 * Free granules that the stream may use without waiting, without asking anybody. What takes pages anyway is cut from
 * free ones sooner than caches are emptied for it; what is smaller is not, so that few pages are cut.
 */
static bool find_at_hand(struct vpmm_pool *pool, struct want want, struct stream *stream, struct found_piece *found)
{
    struct arena *arena = &pool->arena;
    if (tiers_find(arena, &arena->cut, stream, want, false, false, &found->region) != REGION_NONE)
        return true;
    return want.pages > arena->cut.page_granules && cut_free_pages(pool, want, stream, found);
}

/* What the stream's caches and the thread's own have, and what has passed by now, is free to all. */
static void gather(struct vpmm_pool *pool, const struct stream *stream)
{
    fronts_flush_own(&pool->cut_fronts);
    fronts_flush(&pool->cut_fronts, stream, false);
    pass_refresh(&pool->arena);
}

/* Free granules, or pages, that wait for nothing that the stream would have to wait for. */
static bool find_at_once(struct vpmm_pool *pool, struct want want, struct stream *stream, struct found_piece *found)
{
    if (find_granules(pool, want, stream, false, found))
        return true;
    if (cut_extend(&pool->arena, stream, want) && find_granules(pool, want, stream, false, found))
        return true;
    return cut_free_pages(pool, want, stream, found);
}

/* Granules that others have cached, or freed behind fences that the policy lets the stream wait for. */
static bool find_elsewhere(struct vpmm_pool *pool, struct want want, struct stream *stream, struct found_piece *found)
{
    fronts_flush(&pool->cut_fronts, NULL, true);
    pass_refresh(&pool->arena);
    return find_granules(pool, want, stream, load_relaxed_u32(&pool->arena.reuse) != VPMM_REUSE_COMPLETED, found);
}

/*
 * Where small requests are most of what is in use, a build for each page would be most of their time. The surplus is
 * free pages, which the next ones find.
 */
static uint64_t growth(const struct vpmm_pool *pool)
{
    enum { SHARE = 16, MOST = 32 };
    uint64_t pages = stats_sum(&pool->stats, STAT_slab_bytes) / pool->config.page_size / SHARE;
    return pages < MOST ? pages : MOST;
}

/* Pages, cut. What was taken back before there are none may have left granules instead. */
static vpmm_status find_pages(struct vpmm_pool *pool, struct want want, struct stream *stream,
                              struct found_piece *found)
{
    enum region_source source;
    uint64_t pages = pages_for(pool, want);
    vpmm_status status = tiers_take_pages(pool, pages + growth(pool), pages, stream, &found->region, &source);
    if (tiers_is_shortage(status) && find_elsewhere(pool, want, stream, found))
        return VPMM_SUCCESS;
    if (status == VPMM_SUCCESS) {
        *found = cut(pool, found->region, pages);
        found->built = source == REGION_NONE;
    }
    return status;
}

/* Where there was nothing at hand, and the stream's caches are emptied. */
static vpmm_status find(struct vpmm_pool *pool, struct want want, struct stream *stream, struct found_piece *found)
{
    if (find_at_once(pool, want, stream, found) || find_elsewhere(pool, want, stream, found))
        return VPMM_SUCCESS;
    return find_pages(pool, want, stream, found);
}

/* What was found, from where the want may begin; it may be longer. */
static void fit(struct vpmm_pool *pool, struct want want, struct found_piece *found)
{
    uint64_t place = want_place(want, found->region.page);
    if (!found->is_pages && place > found->region.page)
        found->region = region_drop_front(&pool->arena.cut, found->region, place - found->region.page);
}

static vpmm_status take(struct vpmm_pool *pool, struct want want, struct stream *stream, struct found_piece *found)
{
    vpmm_status status = VPMM_SUCCESS;
    *found = (struct found_piece){.is_pages = false};
    if (!find_at_hand(pool, want, stream, found)) {
        gather(pool, stream);
        status = find(pool, want, stream, found);
    }
    if (status == VPMM_SUCCESS)
        fit(pool, want, found);
    return status;
}

static void count_malloc(struct vpmm_pool *pool, bool built)
{
    stats_count(&pool->stats, STAT_mallocs);
    stats_count(&pool->stats, built ? STAT_builds : STAT_hits_slab);
}

static CUdeviceptr hand_out_pages(struct vpmm_pool *pool, struct region region, size_t bytes)
{
    return region_hand_out(&pool->arena.space, region, region.pages, bytes);
}

static vpmm_status malloc_granules(struct vpmm_pool *pool, size_t bytes, struct stream *stream, CUdeviceptr *out)
{
    uint64_t granules = (bytes - 1) / GRANULE_BYTES + 1, a_page = pool->arena.cut.page_granules;
    bool is_power = !(granules & (granules - 1)) && granules <= a_page;
    struct cache *cache = front_cache(&pool->cut_fronts, stream);
    struct found_piece found;
    CUdeviceptr address = 0;
    if (cache)
        address = cache_take_or_steal(cache, granules, bytes);
    if (!address) {
        vpmm_status status = take(pool, (struct want){granules, is_power ? granules : 1}, stream, &found);
        if (status != VPMM_SUCCESS)
            return status;
        count_malloc(pool, found.built);
        address = found.is_pages ? hand_out_pages(pool, found.region, bytes)
                                 : region_hand_out(&pool->arena.cut, found.region, granules, bytes);
    }
    *out = address;
    return VPMM_SUCCESS;
}

/* ---- a slice ---- */

/*
 * A slab for the stream, of what was found; it may be other threads' by the time that the caller looks into it: 0.
 * Where there can be none, the request is given more than a slice.
 */
static CUdeviceptr make_slab(struct vpmm_pool *pool, struct found_piece *found, struct stream *stream, unsigned class,
                             size_t bytes)
{
    struct want want = slab_want(class);
    if (found->is_pages)
        return hand_out_pages(pool, found->region, bytes);
    fit(pool, want, found);
    if (found->region.pages > want.pages)
        found->region = region_keep_front(&pool->arena.cut, found->region, want.pages);
    if (slab_format(&pool->arena.slabs, &found->region, stream, class))
        return 0;
    return region_hand_out(&pool->arena.cut, found->region, (bytes - 1) / GRANULE_BYTES + 1, bytes);
}

/* A slice, or what a slab may be made of: free granules at hand sooner than a cache is emptied, that sooner than more.
 */
static vpmm_status find_slice_or_slab(struct vpmm_pool *pool, struct stream *stream, struct cache *cache,
                                      unsigned class, size_t bytes, CUdeviceptr *out, struct found_piece *found)
{
    struct want want = slab_want(class);
    *found = (struct found_piece){.is_pages = false};
    struct slabs *slabs = &pool->arena.slabs;
    if ((*out = slices_find(slabs, stream, cache, class, bytes, false)) || find_at_hand(pool, want, stream, found))
        return VPMM_SUCCESS;
    gather(pool, stream);
    if ((*out = slices_find(slabs, stream, cache, class, bytes, false)))
        return VPMM_SUCCESS;
    vpmm_status status = find(pool, want, stream, found);
    if (tiers_is_shortage(status) && (*out = slices_find(slabs, stream, cache, class, bytes, true)))
        return VPMM_SUCCESS; /* one that had to be waited for */
    return status;
}

static vpmm_status malloc_slice(struct vpmm_pool *pool, size_t bytes, struct stream *stream, CUdeviceptr *out)
{
    unsigned class = slice_class(bytes);
    struct cache *cache = front_cache(&pool->cut_fronts, stream);
    struct found_piece found;
    bool built = false;
    if (cache && (*out = slices_take(cache, class, bytes)))
        return VPMM_SUCCESS;
    do { /* lock-free: where a fresh slab is empty again, other threads have had its slices */
        vpmm_status status = find_slice_or_slab(pool, stream, cache, class, bytes, out, &found);
        built |= found.built;
        if (status != VPMM_SUCCESS)
            return status;
        if (!*out)
            *out = make_slab(pool, &found, stream, class, bytes);
    } while (!*out);
    count_malloc(pool, built);
    return VPMM_SUCCESS;
}

vpmm_status piece_malloc(struct vpmm_pool *pool, size_t bytes, struct stream *stream, CUdeviceptr *out)
{
    CUdeviceptr address = 0;
    vpmm_status status = bytes <= SLICE_MAX ? malloc_slice(pool, bytes, stream, &address)
                                            : malloc_granules(pool, bytes, stream, &address);
    if (status == VPMM_SUCCESS)
        *out = address;
    return status == VPMM_ERROR_OUT_OF_MEMORY ? tiers_out_of_memory(pool, bytes) : status;
}

/* ---- free ---- */

bool piece_is_at(const struct vpmm_pool *pool, CUdeviceptr address)
{
    uint64_t granule;
    return cut_granule_of(&pool->arena, address, &granule);
}

static vpmm_status end_granules(struct vpmm_pool *pool, CUdeviceptr address, struct stream *stream)
{
    struct region region;
    vpmm_status status = region_take_back(&pool->arena.cut, address, &region);
    if (status != VPMM_SUCCESS)
        return status;
    region.fence = fence_take(stream);
    region_publish(&pool->arena.cut, region);
    return VPMM_SUCCESS;
}

vpmm_status piece_free(struct vpmm_pool *pool, CUdeviceptr address, struct stream *stream)
{
    struct cache *cache = front_cache(&pool->cut_fronts, stream);
    uint64_t granule;
    if (!cut_granule_of(&pool->arena, address, &granule))
        return region_not_live(address);
    struct slab *slab = slab_of_granule(&pool->arena.cut, granule);
    struct slice *slice = slab ? slab_slice_at(slab, address) : NULL;
    if (slab && !slice)
        return region_not_live(address);
    bool is_cached = cache && (slice ? slices_give(cache, slice, address) : cache_give(cache, address));
    if (!is_cached) {
        vpmm_status status = VPMM_SUCCESS;
        if (!slice)
            status = end_granules(pool, address, stream);
        else if (!slab_end_live(&pool->arena.slabs, slice, address, stream))
            status = region_not_live(address);
        if (status != VPMM_SUCCESS)
            return status;
        stream_mark(&pool->arena.streams, stream);
        bell_ring(&pool->arena.bell); /* the mark is what the reaper watches */
        stats_count(&pool->stats, STAT_frees_slab);
    }
    cut_tidy(&pool->arena);
    return VPMM_SUCCESS;
}
