/*
 * slices.h - the slices in a front cache: a malloc and a free of up to 64 KiB that meet nobody else.
 *
 * What front.h says of regions holds for slices, with the slice's word in the place of the page's: a slice is cached
 * for a stream if and only if its word is CACHED for it (slab.h); a slot is a hint; the bin of a cached slice is noted.
 * A bin is of one class, and is filled by half from the stream's slabs when it is empty. Neighbours are not asked: what
 * one thread's cache gives back when it is full is in the slabs for the others.
 */
#ifndef VPMM_LIB_SLICES_H
#define VPMM_LIB_SLICES_H

#include "cache/front.h"
#include "cache/slab.h"

enum { SLICE_SLOTS = 62, SLICE_BIN_BYTES = 256 << 10 };

/* Where a slot was, or is to be, is the owner's alone; what stands in it is read by all. */
struct slice_bin {
    _Alignas(64) _Atomic(uint32_t) count; /* slots in use, from the first on */
    uint16_t most;                        /* of SLICE_SLOTS, or of SLICE_BIN_BYTES; the owner's, as are the next two: */
    uint16_t refill;                   /* so many slices are taken for it when it is empty, next time twice as many */
    uint64_t bytes;                    /* of a slice of the class */
    _Atomic(void *) slot[SLICE_SLOTS]; /* struct slice */
};

_Static_assert(sizeof(struct slice_bin) == BIN_BYTES, "a bin of slices is a bin");

struct slice_cache {
    _Alignas(64) _Atomic(uint64_t) noted; /* a bit for each bin that may have something to empty */
    unsigned char *bins;                  /* the store's base; constant */
    uint32_t own_bins;                    /* the owner's: how many are not EMPTY_BIN */
    _Atomic(uint16_t) bin[SLICE_CLASSES];
};

_Static_assert(sizeof(struct slice_cache) == 128, "two caches and one of slices are less than 1 KiB");

static inline struct slice_bin *slice_bin_at(const struct slice_cache *slices, unsigned class)
{
    return bin_at(slices->bins, load_relaxed_u16(&slices->bin[class]));
}

/* The cache's, of a front of granules; made on first use. */
struct slice_cache *slices_of(struct cache *);

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

/* The noted bins, and no longer noted; by who empties them. */
uint64_t slices_take_noted(struct cache *);

/* Gives back to the slabs what these bins hold for the stream, behind one fence. True: there was something. */
bool slices_flush(struct cache *, struct stream *, uint64_t bins);

/* The owner's, of an emptied cache: no slot counts any more; and its bins are the front's again. */
void slices_forget(struct cache *);
void slices_return_bins(struct cache *);
uint32_t slices_own_bins(const struct cache *);
uint64_t slices_bytes(const struct cache *); /* for assertions: of the slots that count */

/* The owner's, of an attached cache: the older half of each bin goes back to the slabs. True: there was something. */
bool slices_halve(struct cache *);

/* For the audit: whether a noted bin of a cache of the stream has it. */
bool slices_hold(const struct cache *, const struct slice *, unsigned class);

static inline bool slices_noted(const struct cache *cache)
{
    const struct slice_cache *slices = load_acquire_ptr(&cache->slices);
    return slices && load_sc_u64(&slices->noted);
}

/* ---- the hit, both ways ---- */

/* As cache_note, of the slice in the newest slot. */
bool slices_note(struct cache *, unsigned class);

/* The free that was no hit again, as cache_give_told. */
bool slices_give_told(struct cache *, struct slice *, CUdeviceptr);

/* The newest of the class, without a call. *look: front_look is due. */
static inline bool slices_take_newest(struct cache *cache, unsigned class, size_t bytes, CUdeviceptr *out, bool *look)
{
    struct slice_cache *slices = load_relaxed_ptr(&cache->slices);
    struct slice_bin *bin = slices ? slice_bin_at(slices, class) : NULL;
    uint32_t count = bin ? load_relaxed_u32(&bin->count) : 0;
    if (!count)
        return false;
    struct slice *slice = load_relaxed_ptr(&bin->slot[count - 1]);
    uint64_t word = slice_word(SLICE_CACHED, cache->slot, class, 0);
    if (!cas_sc_u64(&slice->word, &word, slice_word(SLICE_LIVE, 0, class, bytes)))
        return false;
    store_relaxed_u32(&bin->count, count - 1);
    cache_touch(cache);
    *out = load_relaxed_u64(&slice->address);
    *look = front_count_malloc(cache->front, &cache->front->tally.hits, bin->bytes, bytes);
    return true;
}

/* True: freed; *unnoted: the class, if slices_note is due for it, else SLICE_CLASSES. */
static inline bool slices_give_newest(struct cache *cache, struct slice *slice, CUdeviceptr address, unsigned *unnoted)
{
    struct slice_cache *slices = load_relaxed_ptr(&cache->slices);
    uint64_t word;
    if (!slices || !slice_is_live(slice, address, &word))
        return false;
    unsigned class = slice_class_of(word);
    struct slice_bin *bin = slice_bin_at(slices, class);
    uint32_t count = load_relaxed_u32(&bin->count);
    if (count >= bin->most || !front_has_room(cache->front, bin->bytes))
        return false;
    /* Pairs with the acquire of who empties the cache, who may not have met the slice's record before. */
    store_release_ptr(&bin->slot[count], slice);
    if (!cas_sc_u64(&slice->word, &word, slice_word(SLICE_CACHED, cache->slot, class, 0)))
        return false; /* freed by another thread meanwhile */
    store_relaxed_u32(&bin->count, count + 1);
    cache_touch(cache);
    front_count_free(cache->front, bin->bytes, slice_requested(word));
    *unnoted = !(load_sc_u64(&slices->noted) >> class & 1) ? class : SLICE_CLASSES;
    return true;
}

#endif
