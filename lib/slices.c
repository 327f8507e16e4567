#include "slices.h"

#include <stdlib.h>
#include <string.h>

struct slice_cache *slices_of(struct cache *cache)
{
    struct slice_cache *slices = load_relaxed_ptr(&cache->slices);
    if (slices)
        return slices;
    slices = aligned_alloc(_Alignof(struct slice_cache), sizeof *slices);
    if (!slices)
        return NULL;
    memset(slices, 0, sizeof *slices);
    for (unsigned i = 0; i < SLICE_CLASSES; i++) {
        uint32_t most = SLICE_BIN_BYTES / slice_size[i].bytes;
        slices->bin[i].bytes = slice_size[i].bytes;
        slices->bin[i].most = most < SLICE_SLOTS ? most : SLICE_SLOTS;
    }
    store_release_ptr(&cache->slices, slices); /* pairs with each acquire of `slices` by other threads */
    return slices;
}

/* ---- emptying ---- */

/* Takes the slice of a slot out of the cache, if it is still there. */
static bool claim(const struct cache *cache, const struct stream *stream, unsigned class, struct slice *slice)
{
    const struct space *space = cache->front->fronts->space;
    uint64_t word = slice_word(SLICE_CACHED, stream->slot, class, 0);
    if (!slice || !cas_sc_u64(&slice->word, &word, slice_word(SLICE_OWN, stream->slot, class, 0)))
        return false;
    stats_sub(space->stats, space->cached_stat, slice_size[class].bytes);
    return true;
}

/* The first so many slots of a bin. The fence is taken after all of them were freed. */
static bool flush_slots(struct cache *cache, struct stream *stream, struct slice_bin *bin, uint32_t slots)
{
    const struct slice_cache *slices = load_relaxed_ptr(&cache->slices);
    unsigned class = (unsigned)(bin - slices->bin), taken = 0;
    struct slice *slice[SLICE_SLOTS];
    for (uint32_t i = 0; i < slots; i++) {
        slice[taken] = load_acquire_ptr(&bin->slot[i]); /* pairs with the release of who filled it */
        taken += claim(cache, stream, class, slice[taken]);
    }
    if (!taken)
        return false;
    struct fence fence = fence_take(stream);
    for (unsigned i = 0; i < taken; i++)
        slab_give(cache->front->fronts->slabs, slice[i], fence);
    return true;
}

uint64_t slices_take_noted(struct cache *cache)
{
    struct slice_cache *slices = load_acquire_ptr(&cache->slices);
    return slices && load_sc_u64(&slices->noted) ? exchange_sc_u64(&slices->noted, 0) : 0;
}

bool slices_flush(struct cache *cache, struct stream *stream, uint64_t bins)
{
    struct slice_cache *slices = load_acquire_ptr(&cache->slices);
    bool any = false;
    for (bins = slices ? bins & ((UINT64_C(1) << SLICE_CLASSES) - 1) : 0; bins; bins &= bins - 1)
        any |= flush_slots(cache, stream, &slices->bin[__builtin_ctzll(bins)], SLICE_SLOTS);
    return any;
}

/* ---- the owner's ---- */

static void set_count(struct cache *cache, struct slice_bin *bin, uint32_t count)
{
    cache->front->stock += ((uint64_t)count - load_relaxed_u32(&bin->count)) * bin->bytes; /* down: it wraps */
    store_relaxed_u32(&bin->count, count);
}

void slices_forget(struct cache *cache)
{
    struct slice_cache *slices = load_relaxed_ptr(&cache->slices);
    for (unsigned i = 0; slices && i < SLICE_CLASSES; i++)
        set_count(cache, &slices->bin[i], 0);
}

void slices_note(struct cache *cache, const struct slice_bin *bin)
{
    struct slice_cache *slices = load_relaxed_ptr(&cache->slices);
    uint64_t bit = UINT64_C(1) << (bin - slices->bin);
    if (!(fetch_or_sc_u64(&slices->noted, bit) & bit)) /* after the slots' and the words' stores */
        bell_ring(cache->front->fronts->space->bell);
}

/* The oldest so many go back to the slabs. Who moves addresses between slots notes the bin again. */
static bool flush_oldest(struct cache *cache, struct slice_bin *bin, uint32_t slots)
{
    uint32_t count = load_relaxed_u32(&bin->count);
    bool any = flush_slots(cache, load_relaxed_ptr(&cache->stream), bin, slots);
    for (uint32_t i = slots; i < count; i++)
        store_release_ptr(&bin->slot[i - slots], load_relaxed_ptr(&bin->slot[i]));
    set_count(cache, bin, count - slots);
    if (count > slots)
        slices_note(cache, bin);
    return any;
}

bool slices_halve(struct cache *cache)
{
    struct slice_cache *slices = load_relaxed_ptr(&cache->slices);
    bool any = false;
    for (unsigned i = 0; slices && i < SLICE_CLASSES; i++) {
        struct slice_bin *bin = &slices->bin[i];
        if (load_relaxed_u32(&bin->count))
            any |= flush_oldest(cache, bin, (load_relaxed_u32(&bin->count) + 1) / 2);
    }
    return any;
}

/* ---- taking ---- */

/* What stands in the bin's slots, until one is still there. */
CUdeviceptr slices_take(struct cache *cache, unsigned class, size_t bytes)
{
    struct slice_cache *slices = load_relaxed_ptr(&cache->slices);
    CUdeviceptr address = 0;
    while (slices && !slices_take_newest(cache, class, bytes, &address) &&
           load_relaxed_u32(&slices->bin[class].count)) {
        struct slice_bin *bin = &slices->bin[class];
        set_count(cache, bin, load_relaxed_u32(&bin->count) - 1); /* it was taken out of the cache */
    }
    return address;
}

/* Half a bin from one slab, of which the first is handed out. */
CUdeviceptr slices_refill(struct cache *cache, unsigned class, size_t bytes)
{
    struct slice_cache *slices = slices_of(cache);
    if (!slices)
        return 0;
    struct slice_bin *bin = &slices->bin[class];
    struct front *front = cache->front;
    struct slice *taken[SLAB_SLICES];
    uint64_t size = bin->bytes, room = front->limit - front_held(front);
    unsigned most = (bin->most + 1) / 2 < SLAB_SLICES ? (bin->most + 1) / 2 : SLAB_SLICES;
    if (front_held(front) + most * size > front->limit)
        most = front_held(front) + size > front->limit ? 1 : (unsigned)(room / size);
    unsigned n = slab_take(front->fronts->slabs, load_relaxed_ptr(&cache->stream), class, most, taken);
    if (!n)
        return 0;
    for (unsigned i = 1; i < n; i++) { /* the lowest is to be taken next: last in */
        store_release_ptr(&bin->slot[n - 1 - i], taken[i]);
        store_sc_u64(&taken[i]->word, slice_word(SLICE_CACHED, cache->slot, class, 0));
    }
    stats_add(front->fronts->space->stats, front->fronts->space->cached_stat, (n - 1) * size);
    set_count(cache, bin, n - 1);
    if (n > 1)
        slices_note(cache, bin);
    store_release_u64(&taken[0]->word, slice_word(SLICE_LIVE, 0, class, bytes));
    stats_begin_live(front->fronts->space->stats, front->fronts->space->live_stat, size, bytes);
    return load_relaxed_u64(&taken[0]->address);
}

/* ---- filling ---- */

bool slices_give(struct cache *cache, struct slice *slice, CUdeviceptr address)
{
    struct slice_cache *slices = slices_of(cache);
    uint64_t word;
    struct slice_bin *bin, *unnoted = NULL;
    if (!slices || !slice_is_live(slice, address, &word))
        return false;
    bin = &slices->bin[slice_class_of(word)];
    front_adjust_limit(cache->front, false);
    bool any = load_relaxed_u32(&bin->count) == bin->most && flush_oldest(cache, bin, (bin->most + 1) / 2);
    if (any)
        cache_mark_own(cache);
    if (front_held(cache->front) + bin->bytes > cache->front->limit)
        front_halve(cache->front);
    if (!slices_give_newest(cache, slice, address, &unnoted))
        return false;
    if (unnoted)
        slices_note(cache, unnoted);
    return true;
}

bool slices_hold(const struct cache *cache, const struct slice *slice, unsigned class)
{
    const struct slice_cache *slices = load_acquire_ptr(&cache->slices);
    if (!slices || !(load_sc_u64(&slices->noted) >> class & 1))
        return false;
    for (uint32_t i = 0; i < load_relaxed_u32(&slices->bin[class].count); i++)
        if (load_relaxed_ptr(&slices->bin[class].slot[i]) == slice)
            return true;
    return false;
}
