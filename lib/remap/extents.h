/*
 * extents.h - all extents of a pool, one after the other, found by their pages.
 *
 * Under the pass lock: no extent is given back meanwhile. Builds may go on: one that is moved or made meanwhile is
 * visited where it was, where it is, or not at all; its builder knows why that will do (access.h).
 */
#ifndef VPMM_LIB_EXTENTS_H
#define VPMM_LIB_EXTENTS_H

#include "remap/arena.h"

/* Until one answers no, if it is to end there. True: none did. `page` is where the extent was found. */
bool extents_visit(struct arena *, bool ends, bool (*visit)(struct arena *, struct extent *, uint64_t page, void *),
                   void *data);

#endif
