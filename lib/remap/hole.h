/*
 * hole.h - address space without memory: carved for a build, given back when its mappings are gone.
 *
 * Everything here is under the plan lock. Two holes of a chunk never adjoin.
 */
#ifndef VPMM_LIB_HOLE_H
#define VPMM_LIB_HOLE_H

#include "remap/arena.h"

/* Makes owned (or new) address space a hole, merged with its neighbours. */
void hole_add(struct arena *, uint64_t page, uint64_t pages);

/* Takes [page, page + pages) out of the hole that contains it; the result is OWN. */
void hole_carve(struct arena *, uint64_t hole, uint64_t page, uint64_t pages);

/* Pages of the hole that begins at this page, or that ends before it; 0: none. */
uint64_t hole_from(struct arena *, uint64_t page);
uint64_t hole_until(struct arena *, uint64_t page);

#endif
