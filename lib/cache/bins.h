/*
 * bins.h - the memory of front caches' bins: small, of one size, used again, and never unmapped before the pool ends.
 *
 *   bin      slots, used as a stack, for things of one length. What stands in them is a hint (front.h), so a thread
 *            that still looks into a bin which has become another cache's finds nothing that it could take by mistake
 *   number   of a bin; it takes 2 bytes where a pointer would take 8. EMPTY_BIN is that of a bin which is all zeros for
 *            ever: a cache that has none of a length names it, so a hit needs no test
 *   set      a cache's bins of one kind of thing: a directory of numbers
 *
 * A front takes bins for the lengths that its thread frees, at most FRONT_BINS of each kind. When it needs more it
 * takes them back from its caches that have not been touched lately, else from the next cache around. So a cache that
 * is quiet costs its directory of numbers alone.
 *
 *   bins_new     any thread; an atomic addition
 *   a bin        its owner's: the thread of the front that has it. Read by all
 *   bins_keep,   a front's spare bins, by its thread
 *   bins_reuse
 */
#ifndef VPMM_LIB_BINS_H
#define VPMM_LIB_BINS_H

#include "base/atomic.h"

enum { BIN_BYTES = 512, BIN_SLOTS = 63, BINS_MAX = UINT16_MAX, FRONT_BINS = 160, EMPTY_BIN = 0 };

/* Where a slot was, or is to be, is the owner's alone; what stands in it is read by all. */
struct bin {
    _Alignas(128) _Atomic(uint32_t) length; /* of what is in it, in units of its set; 0: none yet */
    _Atomic(uint16_t) count;                /* slots in use, from the first on */
    uint8_t most;                           /* of slices (slices.c): slots that may be in use, at most; the owner's, */
    uint8_t refill;                         /* as is how many the next filling takes */
    _Atomic(uint64_t) slot[BIN_SLOTS];
};

_Static_assert(sizeof(struct bin) == BIN_BYTES, "a number and BIN_BYTES say where a bin is");

struct bin_set {
    _Atomic(uint64_t) noted; /* a bit for each bin that may have something to empty */
    uint64_t own;            /* the owner's: a bit for each that is not EMPTY_BIN */
    unsigned char *base;     /* of the store; constant, as is the next */
    _Atomic(uint16_t) *bin;  /* the directory */
};

struct bins {
    unsigned char *base; /* constant */
    _Atomic(uint32_t) used;
};

/* A front's. The spare ones are a list by number, which stands where their lengths were. */
struct bin_stock {
    uint32_t spare; /* the first; EMPTY_BIN: none */
    uint32_t taken; /* from the store, spare ones included */
};

bool bins_init(struct bins *); /* false: no address space */
void bins_free(struct bins *);

static inline struct bin *bin_at(const unsigned char *base, uint32_t bin)
{
    return (struct bin *)(void *)((unsigned char *)base + (size_t)bin * BIN_BYTES);
}

/* The bin of a place in the directory. */
static inline struct bin *set_bin(const struct bin_set *set, uint32_t index)
{
    return bin_at(set->base, load_relaxed_u16(&set->bin[index]));
}

/* A bin that has never been used, all zeros. EMPTY_BIN: there is none any more. */
uint32_t bins_new(struct bins *);

void bins_keep(const struct bins *, struct bin_stock *, uint32_t bin);
uint32_t bins_reuse(const struct bins *, struct bin_stock *); /* EMPTY_BIN: none is spare */

#endif
