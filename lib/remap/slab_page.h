/*
 * slab_page.h - a page that slabs alone are cut from, one after another.
 *
 * A small request that stays holds the page that it lies in. Of a slab's slices one nearly always stays: where nine
 * tenths of all are freed at random, 97 of 100 slabs of 32 slices have one that does. Strewn among larger pieces, slabs
 * hold most pages. Side by side they hold few, and the pages of larger pieces become free (vpmm-fragment: 1.17 times
 * the peak in use for 1.33).
 *
 *   rest   what is left of the page: a region of subpages that has passed, OWN, and so nobody else's. A pool has at
 *          most one. The word is 0 where there is none
 *   (1) the word names a region  =>  its first subpage is OWN with that length, and its fence has passed
 *
 * Who makes the word SLAB_PAGE_BUSY has the rest until it stores another; others do meanwhile as if there were none.
 * Nobody waits or tries again here, and what is published is lock-free (region.h). ABA: a word that comes again names
 * the same subpages, OWN and passed again, and nothing else is known of a rest.
 *
 * A pool begins a page for slabs only once SLAB_PAGES_FROM pages are cut, so that a page more is little, and only while
 * the cut pages are full: else free subpages between pieces serve. The rest stays while the pool grows, and is given up
 * with other spares: after an epoch without a malloc (decay.h), for a trim, and before a request fails.
 */
#ifndef VPMM_LIB_SLAB_PAGE_H
#define VPMM_LIB_SLAB_PAGE_H

#include "remap/arena.h"
#include "space/region.h"

enum { SLAB_PAGES_FROM = 32 };

#define SLAB_PAGE_BUSY UINT64_MAX

/* The rest's front, in the caller's hands, passed. False: it is too short, not there, or in another thread's hands. */
bool slab_page_take(struct arena *, struct want, struct region *);

/* Whether the next slab is to begin a page of its own. */
bool slab_page_is_due(const struct arena *);

/* Keeps the first `units` subpages of an owned, longer region. What follows becomes the rest, if the region has passed,
   or is published. */
struct region slab_page_begin(struct arena *, struct region, uint64_t units);

/* Publishes the rest. */
void slab_page_give_up(struct arena *);

/* Whether there is a rest. */
static inline bool slab_page_is_kept(const struct arena *arena)
{
    return load_relaxed_u64(&arena->slab_page) != 0;
}

/* For the audit. */
bool slab_page_is_rest(const struct arena *, uint64_t subpage, uint64_t subpages);

#endif
