/*
 * tiers.h - free memory for a request, from the cheapest tier on that is past the front caches.
 *
 *   2 own stream, 3 completed   a region that the stream may use without waiting
 *   4 waited                    a region that another stream has freed, and a wait for it
 *   5 build                     memory made where there is none: extended, moved, created
 *   6 reclaim                   before a request fails, everything is taken back and 2 to 5 are tried again
 *
 * Tiers 2 to 4 are of either space; 5 and 6 are of pages alone.
 */
#ifndef VPMM_LIB_TIERS_H
#define VPMM_LIB_TIERS_H

#include "pool/pool.h"
#include "space/region.h"

/*
 * Tiers 2 to 4, 4 only if `may_wait`. A region that the want fits into, in the caller's hands: it may be longer.
 * `every_bin`: also those whose bins are just being emptied or filled.
 */
enum region_source tiers_find(struct arena *, struct space *, struct stream *, struct want, bool may_wait,
                              bool every_bin, struct region *);

/* The same with a last look, and again while memory keeps being published. */
enum region_source tiers_find_thoroughly(struct arena *, struct space *, struct stream *, struct want, bool may_wait,
                                         struct region *);

/*
 * Tiers 2 to 6: a region of at least `pages` pages, or if there is no memory for that of at least `enough`, in the
 * caller's hands; the source is REGION_NONE for what was built. Errors as for vpmm_malloc; OUT_OF_MEMORY is the
 * caller's to put into words (tiers_out_of_memory).
 */
vpmm_status tiers_take_pages(struct vpmm_pool *, uint64_t pages, uint64_t enough, struct stream *, struct region *,
                             enum region_source *);

/* Counts the malloc that was served so. */
void tiers_count(struct vpmm_pool *, enum region_source);

/* Gives memory back to the device, for a request to the driver's own pool. */
void tiers_release_pages(struct vpmm_pool *);

/* Publishes, with an event for each stream, what all caches hold, and makes pages of what is cut and free. */
void tiers_flush(struct vpmm_pool *);

/* Of a request for so many bytes that fails: counts it, and says what there is. */
vpmm_status tiers_out_of_memory(struct vpmm_pool *, size_t bytes);

bool tiers_is_shortage(vpmm_status);

#endif
