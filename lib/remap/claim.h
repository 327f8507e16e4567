/*
 * claim.h - what a plan needs, in the builder's hands: memory that moves, a run that is extended, a hole, a budget.
 *
 *   base     the run that is extended, if one is
 *   donor    a contiguous run of claimed memory that moves
 *   extents  what is mapped side by side into the target, in address order: those of the donors, then those that are
 *            to be created
 *   target   the hole: target.units = the pages of all extents
 *
 * Records are allocated first, so that no later step can want for host memory. Then regions are claimed by exchange;
 * where one has changed the others are the view's (view.h). What of a claimed region is not moved is published again at
 * once. Then the hole is carved, and the new pages are taken from the budget. From there the claim is carried out
 * (carry_out.h), which ends in a region of base and target or in claim_return. A claim is its thread's alone.
 */
#ifndef VPMM_LIB_CLAIM_H
#define VPMM_LIB_CLAIM_H

#include "remap/arena.h"
#include "remap/view.h"
#include "space/region.h"

/* Extents [first, first + extents) of the claim, in order. */
struct donor {
    struct region region;
    size_t first, extents;
    struct zombie *zombie; /* of its old address */
};

struct claim {
    struct arena *arena;
    struct stream *stream;  /* that it is for; NULL: nobody's yet */
    struct region base;     /* units 0: none */
    struct region target;   /* the carved hole */
    bool base_first;        /* base lies before target */
    struct extent **extent; /* moved, then created: these have no handle yet */
    size_t extents, moved;
    size_t created, mapped; /* so far, while it is carried out */
    struct zombie *spare;   /* for an unwind in which the driver refuses: a part for each extent */
    struct donor *donor;
    size_t donors, donor_places;
    uint64_t new_pages; /* in the budget */
    double cost_us;     /* of the driver calls, by the policy's cost model */
};

/*
 * Under the plan lock, for a claim that is zero but for the arena and the stream. False: no host memory. Whatever it
 * answers, claim_free is due.
 */
bool claim_alloc(struct claim *, struct view *, const struct policy_plan *);

/* Under the plan lock. False: a run has changed since it was seen; the view keeps the others. */
bool claim_plan(struct claim *, struct view *, const struct policy_plan *);

/* Publishes the donors and the base, behind their fences. The target and the budget are the caller's to give back. */
void claim_return(struct claim *);

/* Frees the records; nothing that is claimed. */
void claim_free(struct claim *);

#endif
