/*
 * cut.h - pages cut into subpages, for requests that a page does not fit.
 *
 *   subpage   8 KiB of a page that is cut. A request of more than 64 KiB takes a region of subpages, which wastes less
 *             than an eighth of it; what is smaller takes a slice of a slab, which is such a region (slab.h)
 *   cut page  a page whose memory is subpages: CUT in the space of pages, where it is live, a page at a time. Its
 *             subpages are regions in the space of subpages: LIVE, USED, FREE, CACHED, ENDING, CUT (a slab), with
 *             fences that hold for both spaces, so a region keeps its fence when its pages are cut and when they are
 *             given back
 *
 *   slab_bytes = bytes of cut pages = sum of bytes of LIVE, USED, FREE, CACHED, ENDING, OWN and CUT regions of subpages
 *
 * Subpages are numbered as their pages are: of one chunk, of adjacent pages the subpages adjoin. Free subpages merge
 * across pages; a free region that covers whole pages gives them back to the space of pages, but for a few that are
 * kept against flutter, and all of them before the pool grows.
 *
 * Who has all subpages of a page in a region of its own (OWN) has the page, and alone changes its word from CUT; who
 * has a region of pages (OWN) makes them CUT. Everything here is lock-free.
 *
 * The descriptors of a page's subpages are written when it is first cut, and forgotten when its address is unmapped. A
 * pool's first pages keep theirs where memory has only moved away. So of the words of one page none is 0, or all are
 * (but for a generation that comes round to 0).
 */
#ifndef VPMM_LIB_CUT_H
#define VPMM_LIB_CUT_H

#include "cache/front.h"
#include "remap/arena.h"
#include "space/region.h"

enum {
    CUT_PAGES_KEPT = 2,
    CUT_DESCRIBED_BYTES = 64 << 20, /* of descriptors, which the first pages of a pool keep: 4,096 of 2 MiB */
};

/* HOST_MEMORY. A chunk's table is mapped when its address space is reserved. */
vpmm_status cut_init(struct arena *, const vpmm_config *);

/* Whether the pages of one more chunk can be cut: not beyond what hints can number. */
bool cut_takes_chunk(const struct arena *);

/* Whether these pages can be cut. */
bool cut_possible(const struct arena *, const struct region *pages);

/* An owned region of pages as one of subpages, behind the same fence. */
struct region cut_pages(struct arena *, struct region pages);

/*
 * Cuts the free pages that follow a free run of subpages too short for the want, so that it fits there. Pieces of a
 * little more than half a page then lie one after another, where each would have a page of its own. All is what the
 * stream may use without waiting. True: look again.
 */
bool cut_extend(struct arena *, const struct stream *, struct want);

/* Gives back whole pages of free subpages until so many are left. */
void cut_give_back(struct arena *, uint64_t keep_pages);

/* After a free: what is above CUT_PAGES_KEPT. */
static inline void cut_tidy(struct arena *arena)
{
    if (load_relaxed_u64(&arena->cut.whole) > CUT_PAGES_KEPT)
        cut_give_back(arena, CUT_PAGES_KEPT);
}

/*
 * Before the pool grows: publishes what all threads have cached of cut pages, makes subpages of empty slabs and gives
 * back whole pages.
 */
void cut_flush_to_grow(struct arena *);

/* Does what cut_flush_to_grow does, and gives up the rest of the page that slabs are cut from (slab_page.h). */
void cut_flush(struct arena *);

/*
 * Of pages in the caller's hands that are about to become a hole: gives the memory of their subpages' descriptors back
 * to the host. Else what wanders through address space would leave 16 KiB behind for each 2 MiB.
 *
 * No word comes again by it. The descriptors read as 0 then, and begin anew when their page is cut the next time, with
 * the page's generation; that is raised first to the highest of its subpages. A thread that has read a word before, and
 * would exchange it after, meets it again only when generations have gone round from there: they are raised below half
 * their range alone (pages with higher ones keep their descriptors), so that is 2^33 transitions later, of the subpage
 * and of its page together.
 */
void cut_forget(struct arena *, uint64_t page, uint64_t pages);

/*
 * The same of pages that memory has moved away from, but for the pool's first (CUT_DESCRIBED_BYTES): low addresses
 * are the first to be mapped again. Who then cuts such a page would meet a page fault for each 4 KiB of descriptors:
 * training a ResNet with batches of 4 under PyTorch spent 1 ms in 20 on that, in a virtual machine.
 */
void cut_forget_moved(struct arena *, uint64_t page, uint64_t pages);

/* At the pool's end: the uses of live subpages of these pages, if any are left. */
void cut_free_uses(struct arena *, uint64_t page, uint64_t pages);

/* Whether there is anything that cut_flush_to_grow might free. */
bool cut_noted(const struct arena *);

/* Whether there is anything that cut_flush might free. */
bool cut_has_spares(const struct arena *);

/* Whether a region of subpages is in a thread's hands, or one of pages, which may be about to be cut: that one is
   stored. What changes is missed; what is left of the page that slabs are cut from counts as in somebody's hands. */
bool cut_any_owned(const struct arena *, struct word_seen *);

/* The subpage that holds an address of a cut page; false: no page there is, or may be, cut. */
bool cut_subpage_of(const struct arena *, CUdeviceptr, uint64_t *subpage);

/* A run of cut pages beside one another, for a look at all of a chunk: only `chunk` is filled in before the first. */
struct cut_run {
    uint32_t chunk;
    uint64_t subpage, end; /* its subpages */
    uint64_t pages;        /* so many of the chunk have been looked at */
};

/*
 * The next one. False: there is none. What is cut, or whole again, meanwhile may be missed, or be there all the same.
 */
bool cut_next_run(const struct arena *, struct cut_run *);

#endif
