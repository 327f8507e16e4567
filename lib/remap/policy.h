/*
 * policy.h - where memory is placed, and of what extents it is made.
 *
 * A module of its own: it sees counts of pages, never a driver, a stream or a lock. The caller (build.c, holding the
 * plan lock) shows it what is free now; it answers with a plan; the caller carries it out or drops it.
 *
 *   run     a maximal run of mapped free pages that the request may use without waiting; or, where the caller lets a
 *           request wait, free pages that are behind another stream's fence
 *   extent  a physical handle that lies wholly inside one run, and so can be moved to another address
 *   step    pages of the shortest handle that the driver makes, its granularity; 1 unless pages are smaller. Extents
 *           and holes are whole steps and begin at one; runs need not
 *   stuck   pages of a run whose extent is partly live: they can be used where they stand, or extended, never moved
 *   hole    a run of unmapped pages
 *
 *   sum(run.pages) = sum(extent.pages) + stuck pages
 *   where a hole adjoins a run, the run ends (or begins) at a step
 */
#ifndef VPMM_LIB_POLICY_H
#define VPMM_LIB_POLICY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct policy_run {
    uint64_t page; /* global page number of its first page */
    uint32_t pages;
    uint32_t hole_before, hole_after; /* pages of the adjoining holes, 0: none; at most UINT32_MAX */
    uint32_t first_extent, extents;   /* its extents: view.extent[first_extent .. first_extent + extents) */
    bool waits;                       /* the request's stream would have to wait for it */
};

struct policy_extent {
    uint64_t page;
    uint32_t pages;
    uint32_t run;
};

struct policy_hole {
    uint64_t page;
    uint64_t pages;
};

/* All arrays in ascending page order. Of the holes those that policy_hole_pages says are enough. */
struct policy_view {
    const struct policy_run *run;
    size_t runs;
    const struct policy_extent *extent;
    size_t extents;
    const struct policy_hole *hole;
    size_t holes;
    uint64_t mapped_pages;
    uint64_t creatable_pages; /* what the cap, or a device found full, leaves; UINT64_MAX: no cap */
    uint32_t longest_handle;  /* pages of one that is created, at most; UINT32_MAX: no limit */
    bool several_builders;    /* more than one thread builds in this pool */
    uint32_t waiters;         /* threads that will build after this one, and wait for it */
    double slowness;          /* what driver calls take of late, over what the cost model says: at least 1 */
};

enum policy_place {
    POLICY_FRESH,       /* at `page`, inside a hole */
    POLICY_EXTEND_UP,   /* run `run` stays, what moves or is created is mapped right after it */
    POLICY_EXTEND_DOWN, /* run `run` stays, what moves or is created is mapped right before it */
    POLICY_NO_HOLE,     /* no hole is long enough: reserve a chunk, plan again */
    POLICY_NO_MEMORY,   /* creatable_pages and what can be moved do not suffice */
};

/*
 * What to map, in ascending address order: the moved extents first, then the created ones, of whole steps each.
 *   pages(run, if one is extended) + sum(moved) + sum(created) >= pages asked for; the surplus becomes free.
 * The request takes the front of the result. A zero-filled plan is a valid, empty one.
 */
struct policy_plan {
    enum policy_place place;
    size_t run;
    uint64_t page;
    uint32_t *move; /* indices into view.extent, ascending */
    size_t moves;
    uint32_t *create; /* pages of each new extent */
    size_t creates;
    size_t move_capacity, create_capacity; /* of the arrays, which the policy grows and the caller keeps */
    double cost_us;                        /* driver time, by the cost model: slowness 1 */
};

struct policy {
    uint32_t max_extent; /* pages of the largest handle, UINT32_MAX: no limit; 1: the specification's mode */
    uint32_t step;       /* pages of the shortest one */
    double page_mib;

    double handle_pages; /* pages of a handle that growth is created in, by the last look at how much memory is stuck */
    double patience;     /* what who waits counts for: 1, and less where memory lies idle, by the last look */
    uint64_t *by_size;   /* scratch: the view's extents, those worth most first */
    size_t by_size_capacity;
};

/*
 * max_extent_pages 0: the policy decides; else it is whole steps. 1, where that is a step: the specification's mode,
 * exact and deterministic.
 */
void policy_init(struct policy *, uint64_t page_size_bytes, uint32_t step_pages, uint32_t max_extent_pages);
void policy_destroy(struct policy *);

/*
 * How long a hole has to be that a plan for so many pages may choose, with so many mapped, if any is as long: shorter
 * ones need not be shown. Else the longest is to be.
 */
uint64_t policy_hole_pages(const struct policy *, uint64_t mapped_pages, uint32_t pages);

/* How to serve a request that no run fits (one that does is not looked at). false: host memory is exhausted. */
bool policy_plan(struct policy *, const struct policy_view *, uint32_t pages, struct policy_plan *);

/*
 * Where several build, and the plan moves extents for so long that others are likely to free some meanwhile (rule 12),
 * takes out what it makes. The caller keeps what is moved in its hands, shows it as a run, and plans for the same
 * request again. false: the plan is as it was.
 */
bool policy_put_growth_off(const struct policy *, const struct policy_view *, struct policy_plan *);

void policy_plan_free(struct policy_plan *);

#endif
