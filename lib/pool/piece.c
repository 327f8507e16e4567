#include "pool/piece.h"

#include "cache/regions.h"
#include "cache/slices.h"
#include "pool/tiers.h"
#include "remap/cut.h"
#include "remap/ending.h"
#include "remap/hands.h"
#include "remap/pass.h"
#include "remap/slab_page.h"

/* ---- a region of subpages ---- */

/* What was found for a want: subpages in the caller's hands, or whole pages where none can be cut; or a slice. */
struct found_piece {
    struct region region;
    struct space *space;
    bool built;
    bool begins_page;  /* that slabs are cut from */
    CUdeviceptr slice; /* handed out; 0: none, the region is for a slab */
};

/* Who wants a slab is content with one slice, whoever's it was. */
struct slice_want {
    struct cache *cache;
    unsigned class;
    size_t bytes;
};

static uint64_t pages_for(const struct arena *arena, struct want want)
{
    return (want.units - 1) / arena->cut.page_subpages + 1;
}

/* A region of pages that is at least long enough, as what was wanted. */
static struct found_piece cut_as_piece(struct arena *arena, struct region region, uint64_t pages)
{
    if (region.units > pages)
        region = region_keep_front(&arena->space, region, pages);
    bool can = cut_possible(arena, &region);
    return can ? (struct found_piece){.region = cut_pages(arena, region), .space = &arena->cut}
               : (struct found_piece){.region = region, .space = &arena->space};
}

/* What cannot be waited for is free again, and looked for again; at last only what need not be waited for. */
static bool find_subpages(struct arena *arena, struct want want, struct stream *stream, bool may_wait,
                          struct found_piece *found)
{
    int tries = 0;
    do {
        bool waits = may_wait && tries++ < TIER_4_TRIES;
        enum region_source source = find_thoroughly(&arena->cut, stream, want, waits, &found->region);
        if (source != REGION_WAITED)
            return source != REGION_NONE;
    } while (region_await(&arena->cut, stream, found->region) == REGION_NONE);
    return true;
}

/* Free pages that the stream may use without waiting, cut. */
static bool cut_free_pages(struct arena *arena, struct want want, struct stream *stream, struct found_piece *found)
{
    struct want pages = {pages_for(arena, want), 1};
    if (find_free(&arena->space, stream, pages, false, false, &found->region) == REGION_NONE)
        return false;
    *found = cut_as_piece(arena, found->region, pages.units);
    return true;
}

/*
 * Free subpages that the stream may use without waiting, without asking anybody. What takes pages anyway is cut from
 * free ones sooner than free subpages are joined for it, for which all of them are looked at, and than caches are
 * emptied; what is smaller is not, so that few pages are cut.
 */
static bool find_at_hand(struct arena *arena, struct want want, struct stream *stream, struct found_piece *found)
{
    if (want.units > arena->cut.page_subpages)
        return region_take(&arena->cut, stream, want, false, &found->region) != REGION_NONE ||
               cut_free_pages(arena, want, stream, found);
    return find_free(&arena->cut, stream, want, false, false, &found->region) != REGION_NONE;
}

/* What the stream's caches and the thread's own hold becomes free to all. */
static void publish_caches_of(struct arena *arena, const struct stream *stream)
{
    fronts_flush_own(arena->cut.fronts);
    fronts_flush(arena->cut.fronts, stream, false);
}

/* Beyond the subpages there are: pages beside them or by themselves, that the stream would not have to wait for. */
static bool find_at_once(struct arena *arena, struct want want, struct stream *stream, struct found_piece *found)
{
    if (cut_extend(arena, stream, want) && find_subpages(arena, want, stream, false, found))
        return true;
    return cut_free_pages(arena, want, stream, found);
}

/* Subpages that others have cached, or freed behind fences that the policy lets the stream wait for. */
static bool find_elsewhere(struct arena *arena, struct want want, struct stream *stream, struct found_piece *found)
{
    fronts_flush(arena->cut.fronts, NULL, true);
    pass_refresh(arena, stream);
    return find_subpages(arena, want, stream, tiers_policy_waits(arena), found);
}

/*
 * Where small requests are most of what is in use, a build for each page would be most of their time. The surplus is
 * free pages, which the next ones find. It costs the request that makes it MOST handles, of a page each or of what the
 * driver makes at least: at most 0.2 ms.
 */
static uint64_t growth(const struct arena *arena)
{
    enum { SHARE = 16, MOST = 8 };
    uint64_t pages = stats_sum(arena->stats, STAT_slab_bytes) / arena->space.units.unit_size / SHARE;
    uint64_t most = (uint64_t)MOST * arena->policy.step;
    return pages < most ? pages : most;
}

/*
 * Pages that are cut become free one by one, wherever the last piece of one was, so each has a handle of its own: it
 * can move by itself. (Where pages are smaller than the driver's handles, the shortest of these.) Where nothing moves
 * it need not.
 */
static uint32_t longest_handle(const struct arena *arena)
{
    return arena->is_graph ? UINT32_MAX : 1;
}

static bool find_slice(struct arena *arena, const struct slice_want *slice, struct stream *stream, bool every_one,
                       struct found_piece *found)
{
    found->slice = slices_find(&arena->slabs, stream, slice->cache, slice->class, slice->bytes, every_one);
    return found->slice;
}

/*
 * What was taken back when pages were asked for, and what comes out of others' hands, with waits where the setting has
 * none before a request fails. `slice`: one does, too; else NULL.
 */
static bool find_at_last(struct arena *arena, struct want want, const struct slice_want *slice, struct stream *stream,
                         struct found_piece *found)
{
    struct hands hands = {.class = slice ? slice->class : 0};
    bool may_wait = tiers_policy_waits(arena) || !arena->is_graph; /* as tiers_take_pages at last */
    do {
        slab_page_give_up(arena);
        fronts_flush_every(arena->cut.fronts);
        pass_refresh(arena, stream);
        slabs_dissolve_empty(&arena->slabs);
        if ((slice && find_slice(arena, slice, stream, true, found)) ||
            find_subpages(arena, want, stream, may_wait, found) || find_at_once(arena, want, stream, found))
            return true;
    } while (hands_try_again(arena, slice ? HANDS_SLICES : HANDS_SUBPAGES, &hands));
    return false;
}

/* Pages, cut. What was taken back before there are none may have left subpages instead. */
static vpmm_status find_pages(struct arena *arena, struct want want, const struct slice_want *slice,
                              struct stream *stream, struct found_piece *found)
{
    enum region_source source;
    uint64_t pages = pages_for(arena, want);
    vpmm_status status =
        tiers_take_pages(arena, pages + growth(arena), pages, longest_handle(arena), stream, &found->region, &source);
    if (status != VPMM_SUCCESS && !device_lost(arena->device) && find_at_last(arena, want, slice, stream, found))
        return VPMM_SUCCESS;
    if (status == VPMM_SUCCESS) {
        *found = cut_as_piece(arena, found->region, pages);
        found->built = source == REGION_NONE;
    }
    return status;
}

/* Where there was nothing at hand, nor in the stream's caches, nor has it passed by now. */
static vpmm_status find_further(struct arena *arena, struct want want, const struct slice_want *slice,
                                struct stream *stream, struct found_piece *found)
{
    if (find_at_once(arena, want, stream, found) || find_elsewhere(arena, want, stream, found))
        return VPMM_SUCCESS;
    return find_pages(arena, want, slice, stream, found);
}

/* What was found, from where the want may begin; it may be longer. */
static void drop_what_is_before(struct arena *arena, struct want want, struct found_piece *found)
{
    uint64_t place = want_place(want, found->region.first);
    if (found->space == &arena->cut && place > found->region.first)
        found->region = region_drop_front(&arena->cut, found->region, place - found->region.first);
}

static vpmm_status find_piece(struct arena *arena, struct want want, struct stream *stream, struct found_piece *found)
{
    vpmm_status status = VPMM_SUCCESS;
    *found = (struct found_piece){.space = &arena->cut};
    if (!find_at_hand(arena, want, stream, found)) {
        publish_caches_of(arena, stream);
        if (!find_subpages(arena, want, stream, false, found) &&
            !(pass_refresh(arena, stream) && find_subpages(arena, want, stream, false, found)))
            status = find_further(arena, want, NULL, stream, found);
    }
    if (status == VPMM_SUCCESS)
        drop_what_is_before(arena, want, found);
    return status;
}

static void count_malloc(struct arena *arena, bool built)
{
    stats_count(arena->stats, STAT_mallocs);
    stats_count(arena->stats, built ? STAT_builds : STAT_hits_slab);
}

static vpmm_status malloc_subpages(struct arena *arena, size_t bytes, struct stream *stream, CUdeviceptr *out)
{
    uint64_t subpages = (bytes - 1) / SUBPAGE_BYTES + 1, a_page = arena->cut.page_subpages;
    bool is_power = !(subpages & (subpages - 1)) && subpages <= a_page;
    struct cache *cache = front_cache(arena->cut.fronts, stream);
    struct found_piece found;
    CUdeviceptr address = 0;
    if (cache)
        address = regions_take_or_steal(cache, subpages, bytes);
    if (!address) {
        vpmm_status status = find_piece(arena, (struct want){subpages, is_power ? subpages : 1}, stream, &found);
        if (status != VPMM_SUCCESS)
            return status;
        count_malloc(arena, found.built);
        if (found.space == &arena->space)
            subpages = found.region.units; /* of pages: all of them */
        address = region_hand_out(found.space, found.region, subpages, bytes);
    }
    *out = address;
    return VPMM_SUCCESS;
}

/* ---- a slice ---- */

/* The page that slabs are cut from, or, if one is due, a free one that becomes it. */
static bool find_slab_page(struct arena *arena, struct want want, struct stream *stream, struct found_piece *found)
{
    if (slab_page_take(arena, want, &found->region))
        return true;
    found->begins_page = slab_page_is_due(arena) && cut_free_pages(arena, want, stream, found);
    return found->begins_page;
}

/*
 * A slab for the stream, of what was found; it may be other threads' by the time that the caller looks into it: 0.
 * Where there can be none, the request is given more than a slice.
 */
static CUdeviceptr make_slab(struct arena *arena, struct found_piece *found, struct stream *stream, unsigned class,
                             size_t bytes)
{
    struct want want = slab_want(class);
    if (found->space == &arena->space)
        return region_hand_out(&arena->space, found->region, found->region.units, bytes);
    drop_what_is_before(arena, want, found);
    if (found->region.units > want.units)
        found->region = found->begins_page ? slab_page_begin(arena, found->region, want.units)
                                           : region_keep_front(&arena->cut, found->region, want.units);
    if (slab_format(&arena->slabs, &found->region, stream, class))
        return 0;
    return region_hand_out(&arena->cut, found->region, (bytes - 1) / SUBPAGE_BYTES + 1, bytes);
}

/* A slice, or what a slab may be made of: free subpages at hand sooner than a cache is emptied, that sooner than more.
 */
static vpmm_status find_slice_or_slab(struct arena *arena, const struct slice_want *slice, struct stream *stream,
                                      struct found_piece *found)
{
    struct want want = slab_want(slice->class);
    *found = (struct found_piece){.space = &arena->cut};
    bool asked = false;
    if (find_slice(arena, slice, stream, false, found) || find_slab_page(arena, want, stream, found) ||
        find_at_hand(arena, want, stream, found))
        return VPMM_SUCCESS;
    publish_caches_of(arena, stream);
    do {
        if (find_slice(arena, slice, stream, false, found) || find_subpages(arena, want, stream, false, found))
            return VPMM_SUCCESS;
    } while (!asked && (asked = pass_refresh(arena, stream)));
    return find_further(arena, want, slice, stream, found);
}

static vpmm_status malloc_slice(struct arena *arena, size_t bytes, struct stream *stream, CUdeviceptr *out)
{
    unsigned class = slice_class(bytes);
    struct slice_want slice = {front_cache(arena->cut.fronts, stream), class, bytes};
    struct found_piece found;
    bool built = false;
    if (slice.cache && (*out = slices_take(slice.cache, class, bytes)))
        return VPMM_SUCCESS;
    do { /* lock-free: where a fresh slab is empty again, other threads have had its slices */
        vpmm_status status = find_slice_or_slab(arena, &slice, stream, &found);
        built |= found.built;
        if (status != VPMM_SUCCESS)
            return status;
        *out = found.slice ? found.slice : make_slab(arena, &found, stream, class, bytes);
    } while (!*out);
    count_malloc(arena, built);
    return VPMM_SUCCESS;
}

vpmm_status piece_malloc(struct arena *arena, size_t bytes, struct stream *stream, CUdeviceptr *out)
{
    CUdeviceptr address = 0;
    bool is_slice = bytes <= SLICE_MAX && !arena->is_graph; /* a slab's free slices are for one stream or wait */
    vpmm_status status =
        is_slice ? malloc_slice(arena, bytes, stream, &address) : malloc_subpages(arena, bytes, stream, &address);
    if (status == VPMM_SUCCESS)
        *out = address;
    return status;
}

/* ---- free ---- */

bool piece_is_at(const struct arena *arena, CUdeviceptr address)
{
    uint64_t subpage;
    return cut_subpage_of(arena, address, &subpage);
}

/* The slice that an address may be of; NULL: it may be a region of subpages. False: it is neither. */
static bool find_slice_of(const struct arena *arena, CUdeviceptr address, struct slice **slice)
{
    uint64_t subpage;
    if (!cut_subpage_of(arena, address, &subpage))
        return false;
    struct slab *slab = slab_of_subpage(&arena->cut, subpage);
    *slice = slab ? slab_slice_at(slab, address) : NULL;
    return !slab || *slice;
}

vpmm_status piece_use(struct arena *arena, CUdeviceptr address, struct stream *stream)
{
    struct slice *slice;
    if (!find_slice_of(arena, address, &slice))
        return region_not_live(address);
    return slice ? slab_use(&arena->slabs, slice, address, stream) : region_use(&arena->cut, address, stream);
}

vpmm_status piece_free(struct arena *arena, CUdeviceptr address, struct stream *stream)
{
    struct cache *cache = front_cache(arena->cut.fronts, stream);
    struct slice *slice;
    if (!find_slice_of(arena, address, &slice))
        return region_not_live(address);
    bool is_cached = cache && (slice ? slices_give(cache, slice, address) : regions_give(cache, address));
    if (!is_cached) {
        vpmm_status status = slice ? ending_free_slice(arena, slice, address, stream)
                                   : ending_free_region(arena, &arena->cut, address, stream);
        if (status != VPMM_SUCCESS)
            return status;
        stream_mark(&arena->streams, stream);
        bell_ring(&arena->bell); /* the mark is what the reaper watches */
        stats_count(arena->stats, STAT_frees_slab);
    }
    cut_tidy(arena);
    return VPMM_SUCCESS;
}
