/*
 * build.h - making a free region where there is none: extend, harvest, create.
 *
 *   plan     under the plan lock: the policy is shown what is free, and says what to map where
 *   claim    under the plan lock: the plan's free regions by exchange, its hole by carving, its new pages from the
 *            budget. What of a claimed region is not moved is published again at once. Where one has changed meanwhile
 *            the others are kept for the next plan (view.h)
 *   map      without the plan lock: create the new handles, map everything, a cuMemSetAccess for each MAPPINGS_A_CALL
 *            of them. A build that makes new memory looks before each handle that it creates, and before and after each
 *            call for access, for a region that others have freed meanwhile and that serves its request: then it is
 *            overtaken, and unwinds
 *   commit   no call left that can fail: extents learn their new place, old addresses become zombies
 *   unwind   on any failure, or where it is overtaken: unmap what was mapped (an unmap that the driver refuses leaves a
 *            zombie, never a hole), release what was created, put the hole back, publish the claimed regions behind a
 *            fence no earlier.
 *            The budget comes back with the memory: what the driver has not taken stays quarantined (zombie.h)
 *
 * Memory of several fences, all usable by the stream, comes out behind the latest of them; memory that the stream was
 * made to wait for comes out behind a new fence of the stream.
 */
#ifndef VPMM_LIB_BUILD_H
#define VPMM_LIB_BUILD_H

#include "remap/arena.h"
#include "remap/view.h"
#include "space/region.h"

struct build_limits {
    enum view_reach reach;
    uint64_t creatable_pages; /* UINT64_MAX: as the cap allows. After a refusal: what the device was seen to give */
    uint32_t longest_handle;  /* pages of one that is created, at most; UINT32_MAX: the policy's to say */
    bool keep_size;           /* a plan that makes new memory is not carried out: OUT_OF_MEMORY */
    bool for_another;         /* the stream is another thread's: nor is a plan that would make it wait (turn.h) */
    bool may_wait;            /* what other streams have freed and serves as it is comes before a plan (tier 4) */
    bool is_short;            /* tier 6: the view looks into every bin, and the thread serves nobody first */
    uint64_t since_ns;        /* when the request was first found to need the driver; 0: not yet */
};

/*
 * A region of at least `pages` pages for the stream, in the caller's hands. OUT_OF_MEMORY: what may be moved and
 * created does not suffice, and after a create that the device refused limits->creatable_pages says how much it gave;
 * the caller says it in words. OUT_OF_ADDRESS_SPACE, DRIVER, HOST_MEMORY; NOT_SUPPORTED: the pool is parked. The
 * message of these is set. The source is REGION_NONE for memory that was built, else what tier 2, 3 or, with may_wait,
 * 4 found: it was freed while the thread waited for the plan lock, or while it built. REGION_WAITED is yet to be waited
 * for by region_await, as the wait may be the host's, and the caller has the turn.
 */
vpmm_status build_region(struct arena *, struct stream *, uint64_t pages, struct build_limits *, struct region *,
                         enum region_source *);

/* A pool's beginning: its first chunk of address space, and so many pages of memory, waiting for nothing. */
vpmm_status build_initial(struct arena *, uint64_t pages);

#endif
