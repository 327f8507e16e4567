/*
 * space.h - what regions live in: a table of units, the hints of its FREE regions, and the caches in front of them.
 *
 * A pool has two. In the one, regions are runs of pages, and what becomes of physical memory is decided (build.h). In
 * the other they are runs of subpages, the parts that pages are cut into for small requests (cut.h): the same states,
 * fences, merging and caches at a finer grain. Both are of the same streams.
 *
 *   units      the truth about every region                                   by exchange of words (units.h)
 *   passed     hints of FREE regions that wait for nothing                    lock-free (hints.h)
 *   streams    records, each with hints of the FREE regions behind its fences lock-free (stream.h, fence.h)
 *   fronts     what threads keep for themselves, CACHED                       lock-free (front.h)
 */
#ifndef VPMM_LIB_SPACE_H
#define VPMM_LIB_SPACE_H

#include "base/bell.h"
#include "base/stats.h"
#include "space/await.h"
#include "space/fence.h"
#include "space/hints.h"
#include "space/stream.h"
#include "space/units.h"

enum { SUBPAGE_BYTES = 8192 };

struct fronts;

struct space {
    struct stats *stats; /* constant, as are all up to page_subpages */
    struct streams *streams;
    struct fronts *fronts;
    struct bell *bell;                 /* the reaper's: something was published */
    const _Atomic(uint32_t) *rebuilds; /* of the pool: see front.h, */
    const _Atomic(uint32_t) *reuse;    /* and its vpmm_reuse */
    enum space_level level;            /* which of a stream's hints are of this space */
    enum stat live_stat, cached_stat;  /* the levels of bytes handed out, and in caches */
    uint64_t page_subpages;            /* of subpages: how many a page has; 0: of pages, or no page is ever cut */
    struct units units;
    struct hint_arena hint_arena;
    struct hints passed;
    _Atomic(uint64_t) whole;        /* pages in FREE regions of subpages, each region by itself */
    _Atomic(uint32_t) mixed;        /* set once: there may be regions whose spans have passed in part */
    _Atomic(uint64_t) publications; /* counts memory that became FREE: a search that saw it move looks again */
    struct await await;             /* threads that wait for some */
};

/* The tables and hints, empty. What is constant is the caller's to set before. HOST_MEMORY. */
vpmm_status space_init(struct space *, size_t unit_size, size_t va_size);
void space_free(struct space *);

/* For a look from `first` on that has come to a unit with this word: how far it is to the next one to look at. */
uint64_t space_to_next(const struct space *, uint64_t first, uint64_t unit, uint64_t word);

#endif
