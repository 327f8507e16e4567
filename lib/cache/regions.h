/*
 * regions.h - the regions in a front cache: a malloc and a free of pages, or of subpages, that meet nobody else.
 *
 * A bin is of one length: those up to EXACT_LENGTHS have a bin each; of the others two bins may hold one. What front.h
 * says of a word holds for that of a region's first unit. Another thread with the same stream may steal a region, and
 * copies the addresses of some more into its own slots, as hints.
 *
 *   take, give   the front's thread; wait-free: at most a bin's slots are tried, but where a give has to make room
 *   steal        any thread whose cache is of the same stream: by exchange of CACHED words, found by reading slots
 */
#ifndef VPMM_LIB_REGIONS_H
#define VPMM_LIB_REGIONS_H

#include "cache/front.h"

enum { EXACT_LENGTHS = 32 };

extern const struct cached_kind cached_regions;

/*
 * A region of this length from the cache, handed out, or else from another thread's cache for the stream: then the
 * addresses of some more go into this cache's slots, as hints. As for a hit, the thread need not be counted among the
 * stream's users: to take does no harm beside a release. 0: none.
 */
CUdeviceptr regions_take_or_steal(struct cache *, uint64_t length, size_t bytes);

/*
 * A longer region than this, the shortest that there is, out of the cache: better than to publish everything for it. It
 * is in the caller's hands, behind a new fence of the cache's stream.
 */
bool regions_take_longer(struct cache *, uint64_t length, struct region *);

/* Frees into the cache. False: it is not a live region of a length that is cached; nothing was changed. */
bool regions_give(struct cache *, CUdeviceptr);

/* Forgets the slots of a bin whose regions others have taken. */
void regions_drop_stale(struct cache *, uint32_t index);

/* ---- the hit, both ways ---- */

/*
 * The free that was no hit again, where the one thing in its way was that the front had to tell. False: that was not
 * so, or not all; nothing was changed.
 */
bool regions_give_told(struct cache *, CUdeviceptr);

static inline struct bin *regions_bin_at(const struct cache *cache, uint32_t index)
{
    return bin_at(cache->regions.base, load_relaxed_u16(&cache->bin[index]));
}

/* Of the two bins that may hold a length: its own, or the one beside it. */
static inline uint32_t regions_bin_of(const struct cache *cache, uint64_t length)
{
    if (length <= EXACT_LENGTHS)
        return (uint32_t)length - 1;
    uint32_t index = EXACT_LENGTHS + (((uint32_t)length * 0x9E3779B1u) >> 27);
    return load_relaxed_u32(&regions_bin_at(cache, index)->length) == length ? index : index ^ 1;
}

_Static_assert(CACHE_BINS - EXACT_LENGTHS == 1 << (32 - 27), "regions_bin_of's shift");

/* Whether a word is that of a region of this length that is cached. */
static inline bool word_is_cached(uint64_t word, uint64_t units)
{
    return ((word ^ ((uint64_t)UNIT_CACHED | units << UNIT_STATE_BITS)) &
            ((UINT64_C(1) << (UNIT_STATE_BITS + UNIT_COUNT_BITS)) - 1)) == 0;
}

/* CACHED to LIVE, if it is of this length and of the cache's stream. */
static inline bool regions_exchange(const struct cache *cache, struct unit *first, uint64_t length)
{
    uint64_t word = load_acquire_u64(&first->word);
    return word_is_cached(word, length) && load_relaxed_u32(&first->fence_stream) == cache->slot &&
           cas_sc_u64(&first->word, &word, word_next(word, UNIT_CACHED, UNIT_LIVE));
}

/*
 * The two below are the hit: what regions_take_or_steal and regions_give do when nothing is in the way, with no call in
 * them, so that the public functions need no stack. `units`: the pool's table, whose place they know.
 */

/* The newest of the length. True: handed out; *look: front_look is due. */
static inline __attribute__((always_inline)) bool regions_take_newest(struct cache *cache, const struct units *units,
                                                                      uint64_t length, size_t bytes, CUdeviceptr *out,
                                                                      bool *look)
{
    struct bin *bin = regions_bin_at(cache, regions_bin_of(cache, length));
    uint32_t count = load_relaxed_u16(&bin->count);
    if (load_relaxed_u32(&bin->length) != length || !count)
        return false;
    CUdeviceptr address = load_relaxed_u64(&bin->slot[count - 1]);
    struct unit *first;
    if (!unit_in_first_chunk(units, address, &first) || !regions_exchange(cache, first, length))
        return false;
    store_relaxed_u16(&bin->count, (uint16_t)(count - 1));
    cache_touch(cache);
    store_relaxed_u64(&first->requested, bytes);
    *out = address;
    *look = front_count_malloc(cache->front, &cache->front->tally.hits, length << units->unit_shift, bytes);
    return true;
}

/*
 * True: freed; *unnoted: the bin, if cache_note is due for it, else CACHE_BINS. `first` and `word`: the address's unit,
 * and its word as it was read: LIVE.
 */
static inline __attribute__((always_inline)) bool regions_give_newest(struct cache *cache, const struct units *units,
                                                                      CUdeviceptr address, struct unit *first,
                                                                      uint64_t word, uint32_t *unnoted)
{
    struct front *front = cache->front;
    uint64_t length = word_units(word), bytes = length << units->unit_shift;
    uint32_t index = regions_bin_of(cache, length);
    struct bin *bin = regions_bin_at(cache, index);
    uint32_t count = load_relaxed_u16(&bin->count);
    uint64_t requested = load_relaxed_u64(&first->requested);
    if (load_relaxed_u32(&bin->length) != length || count == BIN_SLOTS || !front_has_room(front, bytes) ||
        load_relaxed_u32(&first->fence_stream) != cache->slot)
        return false;
    store_relaxed_u64(&bin->slot[count], address);
    if (!cas_sc_u64(&first->word, &word, word_next(word, UNIT_LIVE, UNIT_CACHED)))
        return false; /* freed by another thread meanwhile */
    store_relaxed_u16(&bin->count, (uint16_t)(count + 1));
    cache_touch(cache);
    front_count_free(front, bytes, requested);
    *unnoted = !(load_sc_u64(&cache->regions.noted) >> index & 1) ? index : CACHE_BINS;
    return true;
}

#endif
