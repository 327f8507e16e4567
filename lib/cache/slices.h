/*
 * slices.h - the slices in a front cache: a malloc and a free of up to 64 KiB that meet nobody else.
 *
 * What front.h says of regions holds for slices, with the slice's word in the place of the unit's: a slice is cached
 * for a stream if and only if its word is CACHED for it (slab.h); a slot, with the slice's record, is a hint; the bin
 * of a cached slice is noted.
 *
 * A bin is of one class, and is filled from the stream's slabs when it is empty: by a few slices at first, and by twice
 * as many each time, up to half of it. Neighbours are not asked: what one thread's cache gives back when it is full is
 * in the slabs for the others.
 */
#ifndef VPMM_LIB_SLICES_H
#define VPMM_LIB_SLICES_H

#include "cache/front.h"
#include "cache/slab.h"

struct slice_cache {
    _Alignas(64) struct bin_set set;      /* first: see cache_set */
    _Atomic(uint16_t) bin[SLICE_CLASSES]; /* the directory */
};

_Static_assert(sizeof(struct slice_cache) == 128, "two caches and one of slices are less than 1 KiB");

extern const struct cached_kind cached_slices;

static inline struct bin *slice_bin_at(const struct slice_cache *slices, unsigned class)
{
    return bin_at(slices->set.base, load_relaxed_u16(&slices->bin[class]));
}

/* A slice of the class from the cache, handed out and counted. 0: there is none. */
CUdeviceptr slices_take(struct cache *, unsigned class, size_t bytes);

/*
 * A slice from a slab of the stream, or of another stream whose work on it is done: of a few, or of every one. With a
 * cache, some more of the slab's go there; it may be NULL. The malloc is not counted. 0: there is none.
 */
CUdeviceptr slices_find(struct slabs *, struct stream *, struct cache *, unsigned class, size_t bytes, bool every_one);

/*
 * Frees into the cache, by a call that was given the stream, and is counted in. False: it is not a live slice, or there
 * is no room at all; nothing was changed.
 */
bool slices_give(struct cache *, struct slice *, CUdeviceptr);

/* ---- the hit, both ways ---- */

/* The free that was no hit again, as regions_give_told. */
bool slices_give_told(struct cache *, struct slice *, CUdeviceptr);

static inline struct slice *slice_of_slot(uint64_t slot)
{
    return (struct slice *)(uintptr_t)slot;
}

/* The newest of the class, without a call. *look: front_look is due. */
static inline bool slices_take_newest(struct cache *cache, unsigned class, size_t bytes, CUdeviceptr *out, bool *look)
{
    struct slice_cache *slices = load_relaxed_ptr(&cache->slices);
    struct bin *bin = slices ? slice_bin_at(slices, class) : NULL;
    uint32_t count = bin ? load_relaxed_u16(&bin->count) : 0;
    if (!count)
        return false;
    struct slice *slice = slice_of_slot(load_relaxed_u64(&bin->slot[count - 1]));
    uint64_t word = slice_word(SLICE_CACHED, cache->slot, class, 0);
    if (!cas_sc_u64(&slice->word, &word, slice_word(SLICE_LIVE, 0, class, bytes)))
        return false;
    store_relaxed_u16(&bin->count, (uint16_t)(count - 1));
    cache_touch(cache);
    *out = load_relaxed_u64(&slice->address);
    *look = front_count_malloc(cache->front, &cache->front->tally.hits, load_relaxed_u32(&bin->length), bytes);
    return true;
}

/* True: freed; *unnoted: the class, if cache_note is due for it, else SLICE_CLASSES. */
static inline __attribute__((always_inline)) bool slices_give_newest(struct cache *cache, struct slice *slice,
                                                                     CUdeviceptr address, unsigned *unnoted)
{
    struct slice_cache *slices = load_relaxed_ptr(&cache->slices);
    uint64_t word;
    if (!slices || !slice_is_live(slice, address, &word))
        return false;
    unsigned class = slice_class_of(word);
    struct bin *bin = slice_bin_at(slices, class);
    uint32_t count = load_relaxed_u16(&bin->count), bytes = load_relaxed_u32(&bin->length);
    if (count >= bin->most || !front_has_room(cache->front, bytes))
        return false;
    /* Pairs with flush_slots' acquire: who empties the cache may not have met the slice's record before. */
    store_release_u64(&bin->slot[count], (uint64_t)(uintptr_t)slice);
    if (!cas_sc_u64(&slice->word, &word, slice_word(SLICE_CACHED, cache->slot, class, 0)))
        return false; /* freed by another thread meanwhile */
    store_relaxed_u16(&bin->count, (uint16_t)(count + 1));
    cache_touch(cache);
    front_count_free(cache->front, bytes, slice_requested(word));
    *unnoted = !(load_sc_u64(&slices->set.noted) >> class & 1) ? class : SLICE_CLASSES;
    return true;
}

#endif
