/*
 * find.h - memory that is free already, for a request: the tiers past the caches that make no call that changes
 * mappings, in either space.
 *
 *   2 own stream, 3 completed   a region that the stream may use without waiting
 *   4 waited                    a region that another stream has freed, and that is yet to be waited for
 *
 * Each function returns a region in the caller's hands, which may be longer than the want, and where it comes from;
 * REGION_NONE: there is none. REGION_WAITED: the caller is to wait for it by region_await, with nothing else in hand
 * that others may want. The thread is one of the stream's users. Lock-free.
 */
#ifndef VPMM_LIB_FIND_H
#define VPMM_LIB_FIND_H

#include "space/region.h"

/* So often a request asks for a wait for what tier 4 has found; each time it may be refused, and other memory found. */
enum { TIER_4_TRIES = 3 };

/* Tiers 2 to 4, 4 only if `may_wait`. `every_bin`: also regions whose bins are just being emptied or filled. */
enum region_source find_free(struct space *, struct stream *, struct want, bool may_wait, bool every_bin,
                             struct region *);

/* The same with a last look, and again while memory keeps being published. */
enum region_source find_thoroughly(struct space *, struct stream *, struct want, bool may_wait, struct region *);

#endif
