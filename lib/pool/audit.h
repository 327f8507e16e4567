/*
 * audit.h - every invariant of an arena, checked, and its regions written out.
 */
#ifndef VPMM_LIB_AUDIT_H
#define VPMM_LIB_AUDIT_H

#include "remap/arena.h"

#include <stdio.h>

/*
 * While no one else calls in. Walks every chunk: regions without gap or overlap, no interior unit with a state, hints
 * where they belong and nowhere else, neighbours merged, each mapped page of exactly one extent, the statistics equal
 * to what was walked, and each stream's fences in their order. INVALID_VALUE with the first violation.
 */
vpmm_status audit(struct arena *);

/* Every region in ascending address order, a line a chunk. While others work, a region may be met half changed. */
void dump_regions(struct arena *, FILE *);

#endif
