#include "cache/slices.h"

#include "base/assert.h"

/* Of a bin: so many slots and so many bytes at most, and so many slices in its first filling. */
enum { SLICE_SLOTS = 62, SLICE_BIN_BYTES = 256 << 10, FIRST_REFILL = 4 };

/* ---- of a kind ---- */

/* `refill`: so many slices are taken for the bin when it is empty, and next time twice as many. */
static void begin(struct bin *bin, uint32_t class)
{
    uint32_t most = SLICE_BIN_BYTES / slice_size[class].bytes;
    store_relaxed_u32(&bin->length, slice_size[class].bytes);
    bin->most = (uint8_t)(most < SLICE_SLOTS ? most : SLICE_SLOTS);
    bin->refill = FIRST_REFILL;
}

static bool claim(const struct cache *cache, const struct stream *stream, uint32_t class, uint64_t slot)
{
    const struct space *space = cache->front->fronts->space;
    struct slice *slice = slice_of_slot(slot);
    uint64_t word = slice_word(SLICE_CACHED, stream->slot, class, 0);
    if (!cas_sc_u64(&slice->word, &word, slice_word(SLICE_OWN, 0, class, 0)))
        return false;
    stats_sub(space->stats, space->cached_stat, slice_size[class].bytes);
    return true;
}

static void publish(const struct cache *cache, uint64_t slot, struct fence fence)
{
    slab_give(cache->front->fronts->slabs, slice_of_slot(slot), fence);
}

/* What was asked for is lost. */
static bool undo(const struct cache *cache, uint32_t class, uint64_t slot, uint64_t *requested)
{
    uint64_t word = slice_word(SLICE_CACHED, cache->slot, class, 0);
    *requested = slice_size[class].bytes;
    return cas_sc_u64(&slice_of_slot(slot)->word, &word, slice_word(SLICE_LIVE, 0, class, *requested));
}

const struct cached_kind cached_slices = {SLICE_CLASSES, begin, claim, publish, undo};

static struct slice_cache *slices_of(struct cache *cache)
{
    const struct fronts *fronts = cache->front->fronts;
    struct slice_cache *slices = load_relaxed_ptr(&cache->slices);
    if (slices)
        return slices;
    slices = (struct slice_cache *)fronts->slice_caches + cache->index;
    slices->set.base = fronts->bins[CACHED_SLICES].base;
    slices->set.bin = slices->bin;
    store_release_ptr(&cache->slices, slices); /* pairs with each acquire of `slices` by other threads */
    return slices;
}

/* ---- taking ---- */

/* What stands in the bin's slots, until one is still there. */
CUdeviceptr slices_take(struct cache *cache, unsigned class, size_t bytes)
{
    struct slice_cache *slices = load_relaxed_ptr(&cache->slices);
    CUdeviceptr address = 0;
    bool look = false;
    while (slices && !slices_take_newest(cache, class, bytes, &address, &look) &&
           load_relaxed_u16(&slice_bin_at(slices, class)->count)) {
        struct bin *bin = slice_bin_at(slices, class);
        cache_set_count(cache, CACHED_SLICES, bin, load_relaxed_u16(&bin->count) - 1u); /* it was taken out */
    }
    if (look)
        front_look(cache->front);
    return address;
}

/* How many slices are to be taken for an empty bin: half of it at most, as far as the front has room; at least one. */
static unsigned next_refill(const struct front *front, struct bin *bin)
{
    unsigned half = (bin->most + 1u) / 2 < SLAB_SLICES ? (bin->most + 1u) / 2 : SLAB_SLICES;
    unsigned most = bin->refill < half ? bin->refill : half;
    uint64_t held = front_held(front), bytes = load_relaxed_u32(&bin->length);
    uint64_t room = held < front->limit ? (front->limit - held) / bytes : 0;
    bin->refill = (uint8_t)(most * 2);
    return room < 1 ? 1 : room < most ? (unsigned)room : most;
}

/* From one slab: the first is the caller's, the others go into the cache. NULL: there is none, or no bin for them. */
static struct slice *refill(struct cache *cache, unsigned class)
{
    slices_of(cache);
    struct bin *bin = cache_make_bin(cache, CACHED_SLICES, class);
    if (!bin)
        return NULL;
    struct front *front = cache->front;
    struct slice *taken[SLAB_SLICES];
    vpmm_assert(!peek_u16(&bin->count)); /* its slots are written over */
    unsigned most = next_refill(front, bin);
    unsigned n = slab_take(front->fronts->slabs, load_relaxed_ptr(&cache->stream), class, most, taken);
    if (!n)
        return NULL;
    for (unsigned i = 1; i < n; i++) { /* the lowest is to be taken next: last in */
        vpmm_assert(slice_state(peek_u64(&taken[i]->word)) == SLICE_OWN);
        store_release_u64(&bin->slot[n - 1 - i], (uint64_t)(uintptr_t)taken[i]); /* pairs as in slices_give_newest */
        store_sc_u64(&taken[i]->word, slice_word(SLICE_CACHED, cache->slot, class, 0));
    }
    stats_add(front->fronts->space->stats, front->fronts->space->cached_stat,
              (uint64_t)(n - 1) * slice_size[class].bytes);
    cache_set_count(cache, CACHED_SLICES, bin, n - 1);
    if (n > 1)
        cache_note_filled(cache, CACHED_SLICES, class);
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
           (unnoted == SLICE_CLASSES || cache_note(cache, CACHED_SLICES, unnoted));
}

bool slices_give(struct cache *cache, struct slice *slice, CUdeviceptr address)
{
    uint64_t word;
    slices_of(cache);
    if (!slice_is_live(slice, address, &word))
        return false;
    unsigned class = slice_class_of(word);
    const struct bin *bin = cache_make_bin(cache, CACHED_SLICES, class);
    if (!bin)
        return false;
    uint64_t bytes = slice_size[class].bytes;
    front_adjust_limit(cache->front);
    if (load_relaxed_u16(&bin->count) == bin->most &&
        cache_flush_oldest(cache, CACHED_SLICES, class, (bin->most + 1u) / 2))
        stream_mark(cache->front->fronts->space->streams, load_relaxed_ptr(&cache->stream));
    if (front_held(cache->front) + bytes > cache->front->limit)
        cache_halve_all(cache);
    if (!front_has_room(cache->front, bytes))
        front_tell_of_free(cache->front, bytes, slice_requested(word));
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
