/*
 * view.h - what the policy is shown: the free runs, the extents that can move, and the holes, as they stand now.
 *
 * Made under the plan lock from the hints. Runs are seen, not claimed: a malloc or free elsewhere may change one at
 * any moment, which the claim by its word then finds out. Extents change only while somebody owns their pages, which of
 * free pages is by a claim under the plan lock: so those of a run that is claimed are as they were seen.
 *
 *   kept   a region that was claimed for a plan of which another run had changed. It stays in the builder's hands, and
 *          in the next view beside what is free, where its claim cannot fail; what has become free beside it may be one
 *          run with it by then, which fits. So each plan has less to lose than the one before it. (Beside fifteen
 *          threads on an H200 plans for 3.6 GiB were spoiled eight times in a row, for 3 ms, and then new memory was
 *          made beside enough that was free.) After two plans what is free is kept as it is met: claimed right after
 *          the look, and not after a look at all of it and a plan, 10 us and more later. The third plan is made of what
 *          is kept alone. What the first part of a build has made is kept as well, for the plan of the rest
 *          (build.h). None is kept when the plan lock is let go
 */
#ifndef VPMM_LIB_VIEW_H
#define VPMM_LIB_VIEW_H

#include "remap/arena.h"
#include "space/region.h"

/* What is kept is in reach of each. */
enum view_reach {
    VIEW_KEPT,   /* nothing that another thread can take */
    VIEW_PASSED, /* what waits for nothing */
    VIEW_USABLE, /* that, and what the stream itself freed */
    VIEW_ALL,    /* all free memory: its user may have to wait */
};

/* A free region, and what of it is in reach: all, or of another stream's the longest run of spans that has passed. */
struct view_region {
    uint64_t page, pages;
    struct seen_region found;
    bool part;     /* of a region that has not passed as a whole */
    uint32_t kept; /* its number in view.kept, from 1 on; 0: it is free */
};

/* The regions of a run: view.region[first .. first + regions), adjacent, kept apart by their fences alone. */
struct view_members {
    uint32_t first, regions;
};

struct view {
    struct view_region *met;    /* in the order of the sets that they are found in */
    uint64_t *place;            /* keys of them, sorted in place of the regions, which are longer (radix.h) */
    struct view_region *region; /* by page */
    size_t regions;
    struct view_members *members; /* parallel to run */
    struct policy_run *run;
    struct policy_extent *extent;
    struct policy_hole *hole;
    size_t runs, extents, holes;
    struct region *kept; /* units 0: it is not kept any more */
    size_t keeps, keep_capacity;
    size_t met_capacity, place_capacity, region_capacity;
    size_t run_capacity, members_capacity, extent_capacity, hole_capacity;
    bool out_of_memory;
};

/*
 * `stream` may be NULL but for VIEW_USABLE. `every_bin`: also regions whose bins are just being emptied or filled, for
 * a last look before giving up: it reads fifteen lines of each stream, which other threads write, and else one. Holes
 * shorter than `hole_pages` are left out, since there may be thousands; where none is as long, all but the longest are.
 * false: no host memory.
 */
bool view_make(struct view *, struct arena *, const struct stream *, enum view_reach, bool every_bin,
               uint64_t hole_pages);
void view_free(struct view *);

/*
 * Takes a run as it was seen. False: some of it has changed; *region is what of it was taken before that, or no page.
 */
bool view_claim_run(struct view *, struct arena *, uint32_t run, struct region *);

/* Before regions are claimed that are to be kept: room for so many more. false: no host memory. */
bool view_may_keep(struct view *, size_t regions);

/* As view_claim_run, but what was taken is kept, last: for which there must be room. */
bool view_claim_and_keep(struct view *, struct arena *, uint32_t run);

/* A region in the caller's hands is kept from now on. There is room if there ever was, with nothing kept. */
void view_keep(struct view *, struct region);

/*
 * Keeps what is free and in reach, each region as it is met, first those of `wanted` pages and more, then ever shorter
 * ones, until `enough` pages are kept that serve as they lie or in handles that can move. What has none of these is
 * left to others; UINT64_MAX: everything is kept. `every_bin` as above, for the shortest. false: no host memory.
 */
bool view_keep_what_is_free(struct view *, struct arena *, const struct stream *, enum view_reach, bool every_bin,
                            uint64_t wanted, uint64_t enough);

/* Publishes what is kept. */
void view_let_go(struct view *, struct arena *);

/* The view's part of what the policy reads. */
struct policy_view view_for_policy(const struct view *);

#endif
