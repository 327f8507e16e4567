#include "cache/regions.h"

#include "base/assert.h"

/* ---- of a kind ---- */

/* Nothing: two lengths may have the place, and ready_bin says which of them has it. */
static void begin(struct bin *bin, uint32_t index)
{
    (void)bin;
    (void)index;
}

/* Takes the region of a slot out of the cache, if it is still there, and is longer than this. */
static bool claim_longer(const struct cache *cache, const struct stream *stream, CUdeviceptr slot, uint64_t longer_than,
                         struct region *region)
{
    const struct space *space = cache->front->fronts->space;
    uint64_t unit;
    if (!slot || !unit_of_address(&space->units, slot, &unit))
        return false;
    struct unit *first = unit_at(&space->units, unit);
    uint64_t word = load_sc_u64(&first->word); /* after the noted bits: see front.h */
    if (word_state(word) != UNIT_CACHED || word_units(word) <= longer_than ||
        load_relaxed_u32(&first->fence_stream) != stream->slot || !unit_take(first, word))
        return false;
    *region = (struct region){unit, word_units(word), FENCE_PASSED, false};
    stats_sub(space->stats, space->cached_stat, region->units << space->units.unit_shift);
    return true;
}

/* A bin's slots may be left from longer ago than its length: what stands there now may be of any. */
static bool claim(const struct cache *cache, const struct stream *stream, uint32_t index, uint64_t slot)
{
    struct region region;
    (void)index;
    return claim_longer(cache, stream, slot, 0, &region);
}

static void publish(const struct cache *cache, uint64_t slot, struct fence fence)
{
    struct space *space = cache->front->fronts->space;
    uint64_t unit = 0;
    unit_of_address(&space->units, slot, &unit);
    uint64_t word = load_relaxed_u64(&unit_at(&space->units, unit)->word);
    vpmm_assert(word_state(word) == UNIT_OWN); /* claimed by this thread */
    region_publish(space, (struct region){unit, word_units(word), fence, false});
}

static bool undo(const struct cache *cache, uint32_t index, uint64_t slot, uint64_t *requested)
{
    struct unit *first = unit_at_address(&cache->front->fronts->space->units, slot);
    vpmm_assert(first);
    if (!regions_exchange(cache, first, load_relaxed_u32(&regions_bin_at(cache, index)->length)))
        return false;
    *requested = load_relaxed_u64(&first->requested);
    return true;
}

const struct cached_kind cached_regions = {CACHE_BINS, begin, claim, publish, undo};

/* ---- taking ---- */

static void set_count(struct cache *cache, struct bin *bin, uint32_t count)
{
    cache_set_count(cache, CACHED_REGIONS, bin, count);
}

/* The region is not, or no more, in the counts of slots. */
static void count_taken(struct front *front, _Atomic(uint64_t) *hits, uint64_t length, size_t bytes)
{
    uint64_t size = length << front->fronts->space->units.unit_shift;
    front->stock += size;
    front_set_floor(front);
    if (front_count_malloc(front, hits, size, bytes))
        front_look(front);
}

/* Wait-free: each slot is tried once. */
static CUdeviceptr take(struct cache *cache, uint64_t length, size_t bytes)
{
    const struct units *units = &cache->front->fronts->space->units;
    struct bin *bin = regions_bin_at(cache, regions_bin_of(cache, length));
    uint32_t count = load_relaxed_u32(&bin->length) == length ? load_relaxed_u16(&bin->count) : 0;
    if (!count)
        return 0;
    CUdeviceptr address = 0;
    struct unit *first;
    bool taken = false;
    while (count && !taken) {
        address = load_relaxed_u64(&bin->slot[--count]);
        first = unit_at_address(units, address);
        vpmm_assert(first);                             /* a slot that counts was filled with a region's address */
        taken = regions_exchange(cache, first, length); /* not so: it was stolen */
    }
    set_count(cache, bin, count);
    cache_touch(cache);
    if (!taken)
        return 0;
    store_relaxed_u64(&first->requested, bytes);
    count_taken(cache->front, &cache->front->tally.hits, length, bytes);
    return address;
}

static bool take_from_bin(struct cache *cache, struct bin *bin, const struct stream *stream, uint64_t longer_than,
                          struct region *region)
{
    bool taken = false;
    uint32_t count = load_relaxed_u16(&bin->count);
    vpmm_assert(stream && stream->slot == cache->slot && peek_u32(&stream->users) > 0);
    while (count && !taken)
        taken = claim_longer(cache, stream, load_relaxed_u64(&bin->slot[--count]), longer_than, region);
    set_count(cache, bin, count);
    return taken;
}

/* The bin of the shortest length above this that has slots in use; NULL: none. */
static struct bin *next_longer(const struct cache *cache, uint64_t length)
{
    struct bin *best = NULL;
    for (uint64_t bins = load_relaxed_u64(&cache->regions.noted); bins; bins &= bins - 1) {
        struct bin *bin = regions_bin_at(cache, (uint32_t)__builtin_ctzll(bins));
        if (load_relaxed_u16(&bin->count) && load_relaxed_u32(&bin->length) > length &&
            (!best || load_relaxed_u32(&bin->length) < load_relaxed_u32(&best->length)))
            best = bin;
    }
    return best;
}

bool regions_take_longer(struct cache *cache, uint64_t length, struct region *region)
{
    struct stream *stream = load_relaxed_ptr(&cache->stream);
    struct bin *bin;
    while ((bin = next_longer(cache, length))) /* each turn empties a bin or ends */
        if (take_from_bin(cache, bin, stream, length, region)) {
            region->fence = fence_take(stream);
            return true;
        }
    return false;
}

/* ---- making room ---- */

static bool is_cached_for(const struct cache *cache, CUdeviceptr address, uint64_t length)
{
    const struct unit *first = unit_at_address(&cache->front->fronts->space->units, address);
    return first && word_is_cached(load_acquire_u64(&first->word), length) &&
           load_relaxed_u32(&first->fence_stream) == cache->slot;
}

/* The descriptors of a bin's newest slots, which other threads' processors have: all at once, not one after another. */
static void prefetch_newest(const struct units *units, const struct bin *bin, uint32_t slots)
{
    for (uint32_t i = load_relaxed_u16(&bin->count); i-- && slots; slots--)
        __builtin_prefetch(unit_at_address(units, load_relaxed_u64(&bin->slot[i])), 1);
}

/* Who moves addresses between slots notes the bin again. */
void regions_drop_stale(struct cache *cache, uint32_t index)
{
    struct bin *bin = regions_bin_at(cache, index);
    uint32_t length = load_relaxed_u32(&bin->length), kept = 0;
    prefetch_newest(&cache->front->fronts->space->units, bin, BIN_SLOTS);
    for (uint32_t i = 0; i < load_relaxed_u16(&bin->count); i++) {
        CUdeviceptr address = load_relaxed_u64(&bin->slot[i]);
        if (is_cached_for(cache, address, length))
            store_relaxed_u64(&bin->slot[kept++], address);
    }
    set_count(cache, bin, kept);
    if (kept)
        cache_note_filled(cache, CACHED_REGIONS, index);
}

/* The bin of a place in the directory, empty and of the length. False: there is no memory. */
static bool ready_bin(struct cache *cache, uint32_t index, uint64_t length)
{
    struct bin *bin = cache_make_bin(cache, CACHED_REGIONS, index);
    if (!bin)
        return false;
    vpmm_assert(!peek_u16(&bin->count)); /* what stands in it would be of the other length */
    store_relaxed_u32(&bin->length, (uint32_t)length);
    return true;
}

/* A bin for the length, which another length's may have to leave. *any: something was published. CACHE_BINS: none. */
static uint32_t choose_bin(struct cache *cache, uint64_t length, bool *any)
{
    uint32_t second = regions_bin_of(cache, length), first = length <= EXACT_LENGTHS ? second : second ^ 1;
    if (load_relaxed_u32(&regions_bin_at(cache, second)->length) == length)
        return second;
    bool is_first = load_relaxed_u16(&regions_bin_at(cache, first)->count) <
                    load_relaxed_u16(&regions_bin_at(cache, second)->count);
    uint32_t index = is_first ? first : second;
    if (load_relaxed_u16(&cache->bin[index]) != EMPTY_BIN) {
        regions_drop_stale(cache, index);
        *any |=
            cache_flush_oldest(cache, CACHED_REGIONS, index, load_relaxed_u16(&regions_bin_at(cache, index)->count));
    }
    return ready_bin(cache, index, length) ? index : CACHE_BINS;
}

/* A bin for the length, with room for one more. CACHE_BINS: none. */
static uint32_t make_slot(struct cache *cache, uint64_t length, bool *any)
{
    enum { KEPT = BIN_SLOTS * 3 / 4 }; /* of a full bin: so often is a search for what was stolen worth it */
    uint32_t index = choose_bin(cache, length, any);
    if (index == CACHE_BINS || load_relaxed_u16(&regions_bin_at(cache, index)->count) < BIN_SLOTS)
        return index;
    regions_drop_stale(cache, index);
    uint32_t count = load_relaxed_u16(&regions_bin_at(cache, index)->count);
    if (count > KEPT)
        *any |= cache_flush_oldest(cache, CACHED_REGIONS, index, count - KEPT);
    return index;
}

/* The bin of the length, if it is there and has room; no address moves for it. CACHE_BINS: not so. */
static uint32_t bin_with_room(struct cache *cache, uint64_t length)
{
    uint32_t index = regions_bin_of(cache, length);
    const struct bin *bin = regions_bin_at(cache, index);
    bool has_room = load_relaxed_u32(&bin->length) == length && load_relaxed_u16(&bin->count) < BIN_SLOTS;
    return has_room ? index : CACHE_BINS;
}

/* The same, by moving what there is; marked once for the batch. CACHE_BINS: the stream is CLOSING, or no memory.
 */
static uint32_t rearrange(struct cache *cache, uint64_t length)
{
    struct stream *stream = cache_enter(cache);
    bool any = false;
    if (!stream)
        return CACHE_BINS;
    uint32_t index = make_slot(cache, length, &any);
    if (any)
        stream_mark(cache->front->fronts->space->streams, stream);
    stream_end_visit(stream);
    return index;
}

static uint32_t find_room(struct cache *cache, uint64_t length)
{
    uint32_t index = bin_with_room(cache, length);
    return index == CACHE_BINS ? rearrange(cache, length) : index;
}

/*
 * Room for one more region in the bin of its length. CACHE_BINS: it is too long, the stream is CLOSING, or there
 * is no memory. When the front is full, what others have taken is forgotten, and if that is not enough the older half
 * of each bin leaves.
 */
static uint32_t make_room(struct cache *cache, uint64_t length)
{
    struct front *front = cache->front;
    const struct stream *stream = load_relaxed_ptr(&cache->stream);
    uint64_t size = length << front->fronts->space->units.unit_shift;
    if (!stream)
        return CACHE_BINS;
    front_adjust_limit(front);
    if (size > front->limit) {
        front->refused++;
        return CACHE_BINS;
    }
    uint32_t index = find_room(cache, length);
    if (index != CACHE_BINS && front_held(front) + size > front->limit)
        cache_drop_stale_all(front);
    if (index != CACHE_BINS && front_held(front) + size > front->limit)
        cache_halve_all(cache);
    return front_held(front) + size <= front->limit ? index : CACHE_BINS;
}

/* ---- giving ---- */

/* LIVE to CACHED, of memory that was last free on another stream. */
static bool exchange_foreign(const struct cache *cache, struct unit *first, uint64_t word)
{
    if (!unit_take(first, word))
        return false;
    unit_set_fence(first, (struct fence){cache->slot, 0});
    vpmm_assert(word_state(peek_u64(&first->word)) == UNIT_OWN && word_units(word) <= cache->front->fronts->longest);
    unit_set(first, UNIT_CACHED, word_units(word));
    return true;
}

static bool exchange_live(const struct cache *cache, struct unit *first, uint64_t word)
{
    if (load_relaxed_u32(&first->fence_stream) != cache->slot)
        return exchange_foreign(cache, first, word);
    return cas_sc_u64(&first->word, &word, word_next(word, UNIT_LIVE, UNIT_CACHED));
}

bool regions_give_told(struct cache *cache, CUdeviceptr address)
{
    struct front *front = cache->front;
    const struct units *units = &front->fronts->space->units;
    struct unit *first = unit_at_address(units, address);
    uint64_t word = first ? load_acquire_u64(&first->word) : 0, size = word_units(word) << units->unit_shift;
    uint32_t unnoted;
    if (word_state(word) != UNIT_LIVE || front_has_room(front, size) || front_held(front) + size > front->limit)
        return false;
    front_tell_of_free(front, size, load_relaxed_u64(&first->requested));
    return regions_give_newest(cache, units, address, first, word, &unnoted) &&
           (unnoted == CACHE_BINS || cache_note(cache, CACHED_REGIONS, unnoted));
}

bool regions_give(struct cache *cache, CUdeviceptr address)
{
    struct front *front = cache->front;
    struct unit *first = unit_at_address(&front->fronts->space->units, address);
    uint64_t word = first ? load_acquire_u64(&first->word) : 0, length = word_units(word);
    if (word_state(word) != UNIT_LIVE || length > front->fronts->longest)
        return false;
    uint32_t index = make_room(cache, length);
    if (index == CACHE_BINS)
        return false;
    struct bin *bin = regions_bin_at(cache, index);
    uint32_t count = load_relaxed_u16(&bin->count);
    uint64_t requested = load_relaxed_u64(&first->requested);
    vpmm_assert(count < BIN_SLOTS && peek_u32(&bin->length) == length);
    store_relaxed_u64(&bin->slot[count], address);
    if (!exchange_live(cache, first, word))
        return false;                                      /* freed by another thread meanwhile */
    store_relaxed_u16(&bin->count, (uint16_t)(count + 1)); /* as in a hit, the stock is the same */
    cache_touch(cache);
    front_count_free(front, length << front->fronts->space->units.unit_shift, requested);
    if (!front_has_room(front, 0))
        front_tell_of_free(front, 0, 0);
    return load_sc_u64(&cache->regions.noted) >> index & 1 || cache_note(cache, CACHED_REGIONS, index);
}

/* ---- neighbours ---- */

/* A region that another cache has, in a slot of this one, where a take may find it. False: there is no room. */
static bool copy_hint(struct cache *cache, CUdeviceptr address, uint64_t length)
{
    uint32_t index = find_room(cache, length);
    if (index == CACHE_BINS)
        return false;
    struct bin *bin = regions_bin_at(cache, index);
    uint32_t count = load_relaxed_u16(&bin->count);
    vpmm_assert(count < BIN_SLOTS && peek_u32(&bin->length) == length);
    store_relaxed_u64(&bin->slot[count], address);
    set_count(cache, bin, count + 1);
    return true;
}

/* What one cache's bin gives another of the same stream: one region, and hints of some more. */
static CUdeviceptr steal_from(struct cache *cache, const struct bin *theirs, uint64_t length, size_t bytes)
{
    enum { HINTS = 15 };
    struct front *front = cache->front;
    const struct units *units = &front->fronts->space->units;
    CUdeviceptr stolen = 0;
    uint32_t hints = 0;
    prefetch_newest(units, theirs, HINTS + 1);
    for (uint32_t i = load_relaxed_u16(&theirs->count); i-- && hints < HINTS;) {
        CUdeviceptr address = load_relaxed_u64(&theirs->slot[i]);
        struct unit *first = unit_at_address(units, address);
        if (stolen && is_cached_for(cache, address, length)) {
            if (!copy_hint(cache, address, length))
                break;
            hints++;
        } else if (!stolen && first && regions_exchange(cache, first, length)) {
            stolen = address;
            store_relaxed_u64(&first->requested, bytes);
            count_taken(front, &front->tally.neighbour_hits, length, bytes);
        }
    }
    return stolen;
}

static CUdeviceptr steal(struct cache *cache, uint64_t length, size_t bytes)
{
    _Atomic(void *) *neighbour = cache->front->fronts->of_stream[cache->slot].neighbour;
    CUdeviceptr address = 0;
    bool is_attached = load_relaxed_ptr(&cache->stream);
    for (int i = 0; is_attached && i < STREAM_NEIGHBOURS && !address; i++) {
        struct cache *other = load_acquire_ptr(&neighbour[i]); /* pairs with add_neighbour's exchange */
        if (!other || other == cache)
            continue;
        const struct bin *theirs = regions_bin_at(other, regions_bin_of(other, length));
        if (load_relaxed_u32(&theirs->length) == length)
            address = steal_from(cache, theirs, length, bytes);
    }
    return address;
}

CUdeviceptr regions_take_or_steal(struct cache *cache, uint64_t length, size_t bytes)
{
    if (length > cache->front->fronts->longest)
        return 0;
    CUdeviceptr address = take(cache, length, bytes);
    return address ? address : steal(cache, length, bytes);
}
