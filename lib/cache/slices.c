#include "cache/slices.h"

#include "base/assert.h"

/* Of a bin that is new: what a thread needs once it does not need by the dozen. */
enum { FIRST_REFILL = 4 };

struct slice_cache *slices_of(struct cache *cache)
{
    struct slice_cache *slices = load_relaxed_ptr(&cache->slices);
    if (slices)
        return slices;
    slices = (struct slice_cache *)cache->front->fronts->slice_caches + cache->index;
    slices->bins = cache->front->fronts->slice_bins.base;
    store_release_ptr(&cache->slices, slices); /* pairs with each acquire of `slices` by other threads */
    return slices;
}

/* The class's bin, made if there is none. NULL: there is no memory. */
static struct slice_bin *make_bin(struct cache *cache, unsigned class)
{
    struct slice_cache *slices = load_relaxed_ptr(&cache->slices);
    struct front *front = cache->front;
    if (load_relaxed_u16(&slices->bin[class]) != EMPTY_BIN)
        return slice_bin_at(slices, class);
    uint32_t fresh = cache_find_bin(cache, &front->fronts->slice_bins, &front->slice_bins);
    if (fresh == EMPTY_BIN)
        return NULL;
    struct slice_bin *bin = bin_at(slices->bins, fresh);
    uint32_t most = SLICE_BIN_BYTES / slice_size[class].bytes;
    store_relaxed_u32(&bin->count, 0);
    bin->bytes = slice_size[class].bytes;
    bin->most = (uint16_t)(most < SLICE_SLOTS ? most : SLICE_SLOTS);
    bin->refill = FIRST_REFILL;
    store_relaxed_u16(&slices->bin[class], (uint16_t)fresh);
    slices->own_bins++;
    return bin;
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
static bool flush_slots(struct cache *cache, struct stream *stream, unsigned class, uint32_t slots)
{
    const struct slice_cache *slices = load_relaxed_ptr(&cache->slices);
    struct slice_bin *bin = slice_bin_at(slices, class);
    unsigned taken = 0;
    struct slice *slice[SLICE_SLOTS];
    vpmm_assert(slots <= SLICE_SLOTS && peek_u32(&stream->users) > 0);
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
    fence_sc(); /* as for regions: see flush_bins, cache.c */
    for (bins = slices ? bins & ((UINT64_C(1) << SLICE_CLASSES) - 1) : 0; bins; bins &= bins - 1)
        any |= flush_slots(cache, stream, (unsigned)__builtin_ctzll(bins), SLICE_SLOTS);
    return any;
}

/* ---- the owner's ---- */

static void set_count(struct cache *cache, struct slice_bin *bin, uint32_t count)
{
    vpmm_assert(front_is_own(cache->front) && count <= bin->most && peek_u32(&bin->count) <= bin->most);
    cache->front->stock += ((uint64_t)count - load_relaxed_u32(&bin->count)) * bin->bytes; /* down: it wraps */
    front_set_floor(cache->front);
    store_relaxed_u32(&bin->count, count);
}

void slices_forget(struct cache *cache)
{
    struct slice_cache *slices = load_relaxed_ptr(&cache->slices);
    for (unsigned i = 0; slices && i < SLICE_CLASSES && slices->own_bins; i++)
        if (load_relaxed_u16(&slices->bin[i]) != EMPTY_BIN)
            set_count(cache, slice_bin_at(slices, i), 0);
}

void slices_return_bins(struct cache *cache)
{
    struct slice_cache *slices = load_relaxed_ptr(&cache->slices);
    struct front *front = cache->front;
    for (unsigned i = 0; slices && i < SLICE_CLASSES && slices->own_bins; i++) {
        uint32_t bin = load_relaxed_u16(&slices->bin[i]);
        if (bin == EMPTY_BIN)
            continue;
        vpmm_assert(!peek_u32(&((struct slice_bin *)bin_at(slices->bins, bin))->count));
        store_relaxed_u16(&slices->bin[i], EMPTY_BIN);
        bins_keep(&front->fronts->slice_bins, &front->slice_bins, bin);
        slices->own_bins--;
    }
    vpmm_assert(!slices || !slices->own_bins); /* the directory has named as many as are counted */
}

uint32_t slices_own_bins(const struct cache *cache)
{
    const struct slice_cache *slices = load_relaxed_ptr(&cache->slices);
    return slices ? slices->own_bins : 0;
}

uint64_t slices_bytes(const struct cache *cache)
{
    const struct slice_cache *slices = peek_ptr(&cache->slices);
    uint64_t bytes = 0;
    for (unsigned i = 0; slices && i < SLICE_CLASSES; i++) {
        const struct slice_bin *bin = bin_at(slices->bins, peek_u16(&slices->bin[i]));
        bytes += (uint64_t)peek_u32(&bin->count) * slice_size[i].bytes;
    }
    return bytes;
}

/* After the slots' and the words' stores. The reaper is told once until the cache is next emptied. */
static void note(struct cache *cache, unsigned class)
{
    struct slice_cache *slices = load_relaxed_ptr(&cache->slices);
    vpmm_assert(class < SLICE_CLASSES && peek_u16(&slices->bin[class]) != EMPTY_BIN);
    if (!fetch_or_sc_u64(&slices->noted, UINT64_C(1) << class))
        cache_list_noted(cache);
}

/* CACHED to LIVE again, of the newest slot. False: another thread has taken it out of the cache. */
static bool undo_give(struct cache *cache, unsigned class)
{
    struct slice_bin *bin = slice_bin_at(load_relaxed_ptr(&cache->slices), class);
    vpmm_assert(peek_u32(&bin->count) > 0);
    uint32_t count = load_relaxed_u32(&bin->count) - 1;
    struct slice *slice = load_relaxed_ptr(&bin->slot[count]);
    uint64_t word = slice_word(SLICE_CACHED, cache->slot, class, 0);
    if (!cas_sc_u64(&slice->word, &word, slice_word(SLICE_LIVE, 0, class, bin->bytes))) /* what was asked for is lost */
        return false;
    store_relaxed_u32(&bin->count, count);
    front_uncount_free(cache->front, bin->bytes, bin->bytes);
    return true;
}

/* As in cache_note, the handle is looked at after the slice was made CACHED. */
bool slices_note(struct cache *cache, unsigned class)
{
    if (load_sc_ptr(&cache->handle) == CACHE_CLOSED)
        return !undo_give(cache, class);
    note(cache, class);
    return true;
}

/* The oldest so many go back to the slabs. Who moves addresses between slots notes the bin again. */
static bool flush_oldest(struct cache *cache, unsigned class, uint32_t slots)
{
    struct slice_bin *bin = slice_bin_at(load_relaxed_ptr(&cache->slices), class);
    uint32_t count = load_relaxed_u32(&bin->count);
    vpmm_assert(slots <= count);
    bool any = flush_slots(cache, load_relaxed_ptr(&cache->stream), class, slots);
    for (uint32_t i = slots; i < count; i++)
        store_release_ptr(&bin->slot[i - slots], load_relaxed_ptr(&bin->slot[i]));
    set_count(cache, bin, count - slots);
    if (count > slots)
        note(cache, class);
    return any;
}

bool slices_halve(struct cache *cache)
{
    struct slice_cache *slices = load_relaxed_ptr(&cache->slices);
    bool any = false;
    for (unsigned i = 0; slices && i < SLICE_CLASSES; i++) {
        uint32_t count = load_relaxed_u32(&slice_bin_at(slices, i)->count);
        if (count)
            any |= flush_oldest(cache, i, (count + 1) / 2);
    }
    return any;
}

/* ---- taking ---- */

/* What stands in the bin's slots, until one is still there. */
CUdeviceptr slices_take(struct cache *cache, unsigned class, size_t bytes)
{
    struct slice_cache *slices = load_relaxed_ptr(&cache->slices);
    CUdeviceptr address = 0;
    bool look = false;
    while (slices && !slices_take_newest(cache, class, bytes, &address, &look) &&
           load_relaxed_u32(&slice_bin_at(slices, class)->count)) {
        struct slice_bin *bin = slice_bin_at(slices, class);
        set_count(cache, bin, load_relaxed_u32(&bin->count) - 1); /* it was taken out of the cache */
    }
    if (look)
        front_look(cache->front);
    return address;
}

/* How many slices are to be taken for an empty bin: half of it at most, as far as the front has room; at least one. */
static unsigned next_refill(const struct front *front, struct slice_bin *bin)
{
    unsigned half = (bin->most + 1u) / 2 < SLAB_SLICES ? (bin->most + 1u) / 2 : SLAB_SLICES;
    unsigned most = bin->refill < half ? bin->refill : half;
    uint64_t held = front_held(front), room = held < front->limit ? (front->limit - held) / bin->bytes : 0;
    bin->refill = (uint16_t)(most * 2);
    return room < 1 ? 1 : room < most ? (unsigned)room : most;
}

/* From one slab: the first is the caller's, the others go into the cache. NULL: there is none, or no bin for them. */
static struct slice *refill(struct cache *cache, unsigned class)
{
    slices_of(cache);
    struct slice_bin *bin = make_bin(cache, class);
    if (!bin)
        return NULL;
    struct front *front = cache->front;
    struct slice *taken[SLAB_SLICES];
    uint64_t size = bin->bytes;
    vpmm_assert(!peek_u32(&bin->count)); /* its slots are written over */
    unsigned most = next_refill(front, bin);
    unsigned n = slab_take(front->fronts->slabs, load_relaxed_ptr(&cache->stream), class, most, taken);
    if (!n)
        return NULL;
    for (unsigned i = 1; i < n; i++) { /* the lowest is to be taken next: last in */
        vpmm_assert(slice_state(peek_u64(&taken[i]->word)) == SLICE_OWN);
        store_release_ptr(&bin->slot[n - 1 - i], taken[i]);
        store_sc_u64(&taken[i]->word, slice_word(SLICE_CACHED, cache->slot, class, 0));
    }
    stats_add(front->fronts->space->stats, front->fronts->space->cached_stat, (n - 1) * size);
    set_count(cache, bin, n - 1);
    if (n > 1)
        note(cache, class);
    return taken[0];
}

CUdeviceptr slices_find(struct slabs *slabs, struct stream *stream, struct cache *cache, unsigned class, size_t bytes,
                        bool every_one)
{
    struct slice *slice;
    do { /* lock-free: where an adopted slab is empty again, other threads have had its slices */
        slice = cache ? refill(cache, class) : NULL;
        if (!slice && !slab_take(slabs, stream, class, 1, &slice))
            slice = NULL;
    } while (!slice && slab_adopt(slabs, stream, class, every_one));
    return slice ? slab_hand_out(slabs, slice, class, bytes) : 0;
}

/* ---- filling ---- */

static bool give_and_note(struct cache *cache, struct slice *slice, CUdeviceptr address)
{
    unsigned unnoted;
    return slices_give_newest(cache, slice, address, &unnoted) &&
           (unnoted == SLICE_CLASSES || slices_note(cache, unnoted));
}

bool slices_give(struct cache *cache, struct slice *slice, CUdeviceptr address)
{
    uint64_t word;
    slices_of(cache);
    if (!slice_is_live(slice, address, &word))
        return false;
    unsigned class = slice_class_of(word);
    const struct slice_bin *bin = make_bin(cache, class);
    if (!bin)
        return false;
    front_adjust_limit(cache->front, false);
    if (load_relaxed_u32(&bin->count) == bin->most && flush_oldest(cache, class, (bin->most + 1) / 2))
        stream_mark(cache->front->fronts->space->streams, load_relaxed_ptr(&cache->stream));
    if (front_held(cache->front) + bin->bytes > cache->front->limit)
        cache_halve_all(cache);
    if (!front_has_room(cache->front, bin->bytes))
        front_tell_of_free(cache->front, bin->bytes, slice_requested(word));
    return give_and_note(cache, slice, address);
}

bool slices_give_told(struct cache *cache, struct slice *slice, CUdeviceptr address)
{
    uint64_t word;
    if (!slice_is_live(slice, address, &word))
        return false;
    uint64_t bytes = slice_size[slice_class_of(word)].bytes;
    if (front_has_room(cache->front, bytes) || front_held(cache->front) + bytes > cache->front->limit)
        return false;
    front_tell_of_free(cache->front, bytes, slice_requested(word));
    return give_and_note(cache, slice, address);
}

bool slices_hold(const struct cache *cache, const struct slice *slice, unsigned class)
{
    const struct slice_cache *slices = load_acquire_ptr(&cache->slices);
    if (!slices || !(load_sc_u64(&slices->noted) >> class & 1))
        return false;
    const struct slice_bin *bin = slice_bin_at(slices, class);
    for (uint32_t i = 0; i < load_relaxed_u32(&bin->count); i++)
        if (load_relaxed_ptr(&bin->slot[i]) == slice)
            return true;
    return false;
}
