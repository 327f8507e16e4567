/*
 * bins.h - the memory of front caches' bins: small, of one size, used again, and never unmapped before the pool ends.
 *
 *   bin      BIN_BYTES of slots. What stands in them is a hint (front.h), so a thread that still looks into a bin which
 *            has become another cache's finds nothing that it could take by mistake
 *   number   of a bin; it takes 2 bytes where a pointer would take 8. EMPTY_BIN is that of a bin which is all zeros for
 *            ever: a cache that has none of a length names it, so a hit needs no test
 *
 * A front takes bins for the lengths that its thread frees, at most FRONT_BINS, and takes them back from its caches
 * that have not been touched lately when it needs more. So a cache that is quiet costs its directory of numbers alone.
 *
 *   bins_new     any thread; an atomic addition
 *   a bin        its owner's: the thread of the front that has it. Read by all
 *   bins_keep,   a front's spare bins, by its thread
 *   bins_reuse
 */
#ifndef VPMM_LIB_BINS_H
#define VPMM_LIB_BINS_H

#include "base/atomic.h"

enum { BIN_BYTES = 512, BINS_MAX = UINT16_MAX, FRONT_BINS = 160, EMPTY_BIN = 0 };

struct bins {
    unsigned char *base; /* constant */
    _Atomic(uint32_t) used;
};

/* A front's. The spare ones are a list by number, which stands where a bin's first four bytes are. */
struct bin_stock {
    uint32_t spare; /* the first; EMPTY_BIN: none */
    uint32_t taken; /* from the store, spare ones included */
};

bool bins_init(struct bins *); /* false: no address space */
void bins_free(struct bins *);

static inline void *bin_at(const unsigned char *base, uint32_t bin)
{
    return (unsigned char *)base + (size_t)bin * BIN_BYTES;
}

/* A bin that has never been used, all zeros. EMPTY_BIN: there is none any more. */
uint32_t bins_new(struct bins *);

/* The first four bytes of every kind of bin are a count or a length that is the owner's to write: the list's link. */
void bins_keep(const struct bins *, struct bin_stock *, uint32_t bin);
uint32_t bins_reuse(const struct bins *, struct bin_stock *); /* EMPTY_BIN: none is spare */

#endif
