#include "remap/claim.h"

#include "base/assert.h"
#include "base/lock.h"
#include "remap/hole.h"
#include "remap/zombie.h"

#include <stdlib.h>

/* ---- what is allocated before anything is claimed, so that no later step can want for host memory ---- */

void claim_free(struct claim *claim)
{
    for (size_t i = claim->moved; claim->extent && i < claim->extents; i++)
        free(claim->extent[i]); /* created ones that were not committed */
    for (size_t i = 0; claim->donor && i < claim->donor_places; i++)
        free(claim->donor[i].zombie);
    free(claim->spare);
    free(claim->extent);
    free(claim->donor);
}

/* How many of the plan's moves from the ith on lie in one run with no gap: they will be one zombie. */
static size_t contiguous(const struct view *view, const struct policy_plan *plan, size_t i)
{
    size_t n = 1;
    for (; i + n < plan->moves; n++) {
        const struct policy_extent *last = &view->extent[plan->move[i + n - 1]];
        const struct policy_extent *next = &view->extent[plan->move[i + n]];
        if (next->run != last->run || next->page != last->page + last->pages)
            break;
    }
    return n;
}

static bool alloc_donors(struct claim *claim, const struct view *view, const struct policy_plan *plan)
{
    for (size_t i = 0, n; i < plan->moves; i += n) {
        n = contiguous(view, plan, i);
        struct zombie *zombie = zombie_create((uint32_t)n);
        if (!zombie)
            return false;
        claim->donor[claim->donor_places++].zombie = zombie;
    }
    return true;
}

static bool alloc_extents(struct claim *claim, const struct policy_plan *plan)
{
    for (size_t i = 0; i < plan->creates; i++) {
        struct extent *extent = calloc(1, sizeof *extent);
        if (!extent)
            return false;
        extent->pages = plan->create[i];
        store_relaxed_u32(&extent->holders, 1); /* the place that it will have */
        claim->extent[claim->moved + i] = extent;
    }
    return true;
}

bool claim_alloc(struct claim *claim, struct view *view, const struct policy_plan *plan)
{
    claim->moved = plan->moves;
    claim->extents = plan->moves + plan->creates;
    claim->extent = calloc(claim->extents + 1, sizeof(struct extent *));
    claim->donor = calloc(claim->moved + 1, sizeof(struct donor));
    claim->spare = zombie_create((uint32_t)claim->extents);
    return view_may_keep(view, plan->moves + 1) && claim->extent && claim->donor && claim->spare &&
           alloc_donors(claim, view, plan) && alloc_extents(claim, plan);
}

/* ---- claiming, under the plan lock ---- */

/* As contiguous() has counted: extents of one run with no gap are one donor. */
static void donor_add(struct claim *claim, struct extent *extent, uint64_t page, struct fence fence, size_t index,
                      bool first_of_run)
{
    struct donor *last = claim->donors ? &claim->donor[claim->donors - 1] : NULL;
    vpmm_assert(extent && peek_u64(&extent->page) == page); /* it lies where the view has seen it */
    claim->extent[index] = extent;
    if (!first_of_run && last->region.first + last->region.units == page) {
        last->region.units += extent->pages;
        last->extents++;
        return;
    }
    struct zombie *zombie = claim->donor[claim->donors].zombie;
    claim->donor[claim->donors++] =
        (struct donor){.region = {page, extent->pages, fence, false}, .first = index, .extents = 1, .zombie = zombie};
}

/*
 * Takes the extents plan->move[first .. last), all of one run, out of the claimed region, and publishes what lies
 * between them.
 */
static void divide(struct claim *claim, const struct view *view, const struct policy_plan *plan, size_t first,
                   size_t last, struct region region)
{
    struct arena *arena = claim->arena;
    uint64_t done = region.first, end = region.first + region.units;
    for (size_t i = first; i < last; i++) {
        const struct policy_extent *seen = &view->extent[plan->move[i]];
        donor_add(claim, unit_extent(unit_at(&arena->space.units, seen->page)), seen->page, region.fence, i,
                  i == first);
        region_publish_part(&arena->space, region, done, seen->page);
        done = seen->page + seen->pages;
    }
    region_publish_part(&arena->space, region, done, end);
    for (size_t i = 0; i < claim->donors; i++) {
        struct region *donor = &claim->donor[i].region;
        if (donor->first >= region.first && donor->first < end)
            unit_set(unit_at(&arena->space.units, donor->first), UNIT_OWN, donor->units);
    }
}

static bool extends(const struct policy_plan *plan)
{
    return plan->place == POLICY_EXTEND_UP || plan->place == POLICY_EXTEND_DOWN;
}

/* Which of the plan's moves is the first of another run than the ith. */
static size_t next_run(const struct view *view, const struct policy_plan *plan, size_t i)
{
    uint32_t run = view->extent[plan->move[i]].run;
    while (i < plan->moves && view->extent[plan->move[i]].run == run)
        i++;
    return i;
}

/* All of the plan's runs, of which as many as are still there are kept. False: one has changed since it was seen. */
static bool claim_runs(const struct claim *claim, struct view *view, const struct policy_plan *plan)
{
    bool all = !extends(plan) || view_claim_and_keep(view, claim->arena, (uint32_t)plan->run);
    for (size_t i = 0; i < plan->moves; i = next_run(view, plan, i))
        all &= view_claim_and_keep(view, claim->arena, view->extent[plan->move[i]].run);
    return all;
}

/* What of the plan's runs is neither extended nor moved is published. False: one has changed; the others are kept. */
static bool claim_regions(struct claim *claim, struct view *view, const struct policy_plan *plan)
{
    size_t keeps = view->keeps;
    if (!claim_runs(claim, view, plan))
        return false;
    const struct region *region = view->kept + keeps;
    view->keeps = keeps;
    if (extends(plan))
        claim->base = *region++;
    for (size_t i = 0, next; i < plan->moves; i = next) {
        next = next_run(view, plan, i);
        divide(claim, view, plan, i, next, *region++);
    }
    return true;
}

/* The page at which the shown hole begins that a page lies in. */
static uint64_t hole_around(const struct view *view, uint64_t page)
{
    size_t low = 0, high = view->holes;
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        *(view->hole[middle].page <= page ? &low : &high) = middle;
    }
    return view->hole[low].page;
}

static void carve(struct claim *claim, const struct view *view, const struct policy_plan *plan)
{
    uint64_t page, hole, pages = 0;
    for (size_t i = 0; i < claim->extents; i++)
        pages += claim->extent[i]->pages;
    if (plan->place == POLICY_EXTEND_UP) {
        hole = page = claim->base.first + claim->base.units;
    } else if (plan->place == POLICY_EXTEND_DOWN) {
        hole = claim->base.first - hole_until(claim->arena, claim->base.first);
        page = claim->base.first - pages;
    } else {
        hole = hole_around(view, plan->page);
        page = plan->page;
    }
    claim->base_first = plan->place == POLICY_EXTEND_UP;
    claim->target = (struct region){page, pages, FENCE_PASSED, false};
    vpmm_assert(pages > 0);
    hole_carve(claim->arena, hole, page, pages);
    for (size_t i = claim->moved; i < claim->extents; i++)
        claim->new_pages += claim->extent[i]->pages;
    claim->arena->budgeted_pages += claim->new_pages;
}

bool claim_plan(struct claim *claim, struct view *view, const struct policy_plan *plan)
{
    vpmm_assert(lock_is_taken(&claim->arena->plan_lock));
    if (!claim_regions(claim, view, plan))
        return false;
    carve(claim, view, plan);
    claim->cost_us = plan->cost_us;
    return true;
}

void claim_return(struct claim *claim)
{
    for (size_t i = 0; i < claim->donors; i++)
        region_publish(&claim->arena->space, claim->donor[i].region);
    if (claim->base.units)
        region_publish(&claim->arena->space, claim->base);
    claim->donors = 0;
    claim->base.units = 0;
}
