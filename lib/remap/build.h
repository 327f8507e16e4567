/*
 * build.h - making a free region where there is none: extend, harvest, create.
 *
 *   plan       under the plan lock: the policy is shown what is free (view.h), and says what to map where (policy.h)
 *   claim      under the plan lock: what the plan needs, by exchange (claim.h). Where a region has changed meanwhile
 *              the others are kept for the next plan (view.h)
 *   carry out  without the plan lock: the driver is called, and the claim is committed or undone (carry_out.h)
 *
 * Where several build, a plan that moves memory for long and then makes some is carried out in two parts, and planned
 * anew between them: what others have freed while the first part moved may move in place of what would be made. What
 * the first part has made stays in the builder's hands, and nobody else can take it. Neither the budget nor the hole is
 * reserved for the rest: who builds beside may take them. Where the rest is found the request is a hit, though handles
 * have moved for it.
 *
 * A plan that finds no hole has a chunk of address space reserved, and another is made (chunk.h). What others have
 * freed and serves as it is comes before each plan, and during the driver calls (lookout.h).
 */
#ifndef VPMM_LIB_BUILD_H
#define VPMM_LIB_BUILD_H

#include "remap/arena.h"
#include "remap/view.h"
#include "space/region.h"

struct build_limits {
    enum view_reach reach;
    struct device_room room; /* beside the cap: noted by a build that the device has refused a create */
    uint32_t longest_handle; /* pages of one that is created, at most; UINT32_MAX: the policy's to say */
    bool keep_size;          /* a plan that makes new memory is not carried out: OUT_OF_MEMORY */
    bool for_another;        /* the stream is another thread's: nor is a plan that would make it wait (turn.h) */
    bool may_wait;           /* what other streams have freed and serves as it is comes before a plan (tier 4) */
    bool is_short;           /* tier 6: the view looks into every bin, and the thread serves nobody first */
    uint64_t since_ns;       /* when the request was first found to need the driver; 0: not yet */
};

/*
 * A region of at least `pages` pages for the stream, in the caller's hands. OUT_OF_MEMORY: what may be moved and
 * created does not suffice, and after a create that the device refused limits->room says how much it gave; the caller
 * says it in words. OUT_OF_ADDRESS_SPACE, DRIVER, HOST_MEMORY; NOT_SUPPORTED: the pool is parked. The
 * message of these is set. The source is REGION_NONE for memory that was built, else what tier 2, 3 or, with may_wait,
 * 4 found: it was freed while the thread waited for the plan lock, or while it built. What is REGION_WAITED the caller
 * waits for by region_await when it has left the turn: the wait may be the host's.
 */
vpmm_status build_region(struct arena *, struct stream *, uint64_t pages, struct build_limits *, struct region *,
                         enum region_source *);

/*
 * How many pages may be created once `returned` of the pool's have gone back to the device: what the cap leaves, and no
 * more than the room, where that is known; UINT64_MAX: neither sets a limit. Under the plan lock.
 */
uint64_t build_creatable(const struct arena *, struct device_room, uint64_t returned);

/* A pool's beginning: its first chunk of address space, and so many pages of memory, waiting for nothing. */
vpmm_status build_initial(struct arena *, uint64_t pages);

#endif
