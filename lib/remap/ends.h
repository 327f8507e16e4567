/*
 * ends.h - which end of a free region a request takes.
 *
 * A free region is seldom as long as the request, and what is left of it is the more useful the more whole extents it
 * has: these can move to where memory is asked for next, a part of one can only be used where it stands. So the request
 * takes the end that leaves fewer stuck pages (policy.h), and of equals the front.
 *
 *   stuck pages of a region = those of its first extent if that begins before it + of its last one if that ends after
 *
 * Only where more than one thread builds. There what lives side by side was asked for by several and ends in no order,
 * and whole extents are what is scarce. With one thread it saves memory too, but costs more than that is worth: growth
 * that would have been a few long handles moves many short ones instead (policy.c has the figures).
 *
 * A region's owner alone may do this: the extents of pages that it owns, in part even, are nobody's to move.
 */
#ifndef VPMM_LIB_ENDS_H
#define VPMM_LIB_ENDS_H

#include "remap/arena.h"
#include "space/region.h"

/* What a request of so many pages takes of an owned region, and what lies after that. What lies before is published. */
struct region ends_choose(struct arena *, struct region, uint64_t pages);

/* Notes that this thread builds, for itself or for another. Under the plan lock. True: several threads have by now. */
bool ends_note_builder(struct arena *, bool for_another);

#endif
