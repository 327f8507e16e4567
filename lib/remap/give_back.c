#include "remap/give_back.h"

#include "base/assert.h"
#include "base/lock.h"
#include "remap/cut.h"
#include "remap/hands.h"
#include "remap/hole.h"
#include "remap/mapping.h"
#include "remap/view.h"
#include "remap/zombie.h"

#include <stdlib.h>

static void count_removed(struct arena *arena, uint64_t pages)
{
    stats_sub(arena->stats, STAT_mapped_bytes, pages << arena->space.units.unit_shift);
    stats_count(arena->stats, STAT_extents_released);
    lock_take(&arena->plan_lock);
    vpmm_assert(pages <= arena->budgeted_pages);
    arena->budgeted_pages -= pages;
    arena_quarantine(arena, pages);
    pthread_mutex_unlock(&arena->plan_lock);
}

static void forget_extent(struct arena *arena, uint64_t page, uint64_t pages)
{
    for (uint64_t i = page; i < page + pages; i++)
        store_relaxed_ptr(&unit_at(&arena->space.units, i)->extent, NULL);
}

enum removal {
    REMOVED,       /* the memory is the device's, the pages are in the caller's hands, */
    REMOVED_PLACE, /* these alone: old mappings are left, or the release was refused, */
    REMOVED_NONE,  /* and neither: it may be unmapped all the same, and the reaper tries until it surely is */
};

/* Of an extent that is unmapped where it is. */
static enum removal release_removed(struct arena *arena, struct extent *extent, struct zombie *spare)
{
    bool last = load_acquire_u32(&extent->holders) == 1;
    spare->unmapped = 1;
    if (!zombie_let_go(arena, spare)) {
        zombie_push(arena, spare);
        return REMOVED_PLACE;
    }
    free(spare);
    return last ? REMOVED : REMOVED_PLACE;
}

/* Unmaps and releases a claimed extent, which is the spare zombie's from here on. */
static enum removal remove_extent(struct arena *arena, struct extent *extent, struct zombie *spare)
{
    uint64_t page = load_relaxed_u64(&extent->page);
    uint32_t pages = extent->pages;
    bool unmapped = mapping_unmap(arena, page, pages) == CUDA_SUCCESS;
    spare->part[0] = (struct zombie_part){pages, extent};
    count_removed(arena, pages);
    if (unmapped) {
        forget_extent(arena, page, pages);
        return release_removed(arena, extent, spare);
    }
    stats_count(arena->stats, STAT_unmap_failures);
    spare->page = page;
    spare->pages = pages;
    zombie_push(arena, spare);
    return REMOVED_NONE;
}

/* Claims the run of one extent under the plan lock, and keeps the extent alone. */
static struct extent *claim_extent(struct arena *arena, struct view *view, uint32_t index, struct region *kept)
{
    const struct policy_extent *seen = &view->extent[index];
    struct region region;
    if (!view_claim_run(view, arena, seen->run, &region)) {
        if (region.units)
            region_publish(&arena->space, region);
        return NULL;
    }
    struct extent *extent = unit_extent(unit_at(&arena->space.units, seen->page));
    *kept = (struct region){seen->page, seen->pages, region.fence, false};
    region_publish_part(&arena->space, region, region.first, seen->page);
    unit_set(unit_at(&arena->space.units, seen->page), UNIT_OWN, seen->pages);
    region_publish_part(&arena->space, region, seen->page + seen->pages, region.first + region.units);
    return extent;
}

/* One extent out. How many pages the driver has taken back. */
static uint32_t release_extent(struct arena *arena, struct region kept, struct extent *extent, struct zombie *spare)
{
    enum removal removal = remove_extent(arena, extent, spare);
    if (removal != REMOVED_NONE) {
        cut_forget(arena, kept.first, kept.units);
        lock_take(&arena->plan_lock);
        hole_add(arena, kept.first, kept.units);
        pthread_mutex_unlock(&arena->plan_lock);
    }
    return removal == REMOVED ? (uint32_t)kept.units : 0;
}

/* The longest that is not more than what is to go, most memory for each call; else, if more may go, the shortest. */
static uint32_t choose_release(const struct view *view, uint64_t excess, bool more)
{
    uint32_t longest = UINT32_MAX, shortest = UINT32_MAX;
    for (uint32_t i = 0; i < view->extents; i++) {
        uint32_t pages = view->extent[i].pages;
        if (pages <= excess && (longest == UINT32_MAX || pages > view->extent[longest].pages))
            longest = i;
        if (shortest == UINT32_MAX || pages < view->extent[shortest].pages)
            shortest = i;
    }
    return longest != UINT32_MAX || !more ? longest : shortest;
}

enum giving {
    GIVEN,        /* an extent is, as far as the driver took it; */
    GIVEN_ENOUGH, /* no more than what is to be kept is mapped; */
    GIVEN_NONE,   /* nothing that may go was found, or a malloc or a free took it first */
};

/* Under the plan lock. */
static enum giving choose_and_claim(struct arena *arena, uint64_t keep_pages, bool more, struct region *kept,
                                    struct extent **extent, vpmm_status *status)
{
    uint64_t mapped = arena->budgeted_pages;
    if (mapped <= keep_pages)
        return GIVEN_ENOUGH;
    if (!view_make(arena->view, arena, NULL, VIEW_PASSED, true, UINT64_MAX)) {
        *status = fail(VPMM_ERROR_HOST_MEMORY, "no host memory to look at what is free");
        return GIVEN_NONE;
    }
    uint32_t chosen = choose_release(arena->view, mapped - keep_pages, more);
    if (chosen == UINT32_MAX)
        return GIVEN_NONE;
    *extent = claim_extent(arena, arena->view, chosen, kept);
    return *extent ? GIVEN : GIVEN_NONE;
}

static enum giving release_one(struct arena *arena, uint64_t keep_pages, bool more, uint32_t *released,
                               vpmm_status *status)
{
    struct region kept;
    struct extent *extent;
    struct zombie *spare = zombie_create(1);
    *released = 0;
    if (!spare) {
        *status = fail(VPMM_ERROR_HOST_MEMORY, "no host memory for the record of memory that is given back");
        return GIVEN_NONE;
    }
    lock_take(&arena->plan_lock);
    enum giving giving = choose_and_claim(arena, keep_pages, more, &kept, &extent, status);
    pthread_mutex_unlock(&arena->plan_lock);
    if (giving == GIVEN)
        *released = release_extent(arena, kept, extent, spare);
    else
        free(spare);
    return giving;
}

/*
 * Whether to look once more. After each extent the time for which others' hands are waited for begins anew. What came
 * back while this thread looked, it may have missed.
 */
static bool goes_on(const struct arena *arena, enum giving giving, uint64_t published, struct hands *hands)
{
    if (giving == GIVEN)
        *hands = (struct hands){.is_brief = true};
    if (load_sc_u64(&arena->space.publications) != published)
        hands->had_none = false;
    return giving == GIVEN || (giving == GIVEN_NONE && hands_try_again(arena, HANDS_PAGES, hands));
}

vpmm_status give_back_down_to(struct arena *arena, uint64_t keep_pages, uint64_t most, uint64_t *released_pages)
{
    vpmm_status status = VPMM_SUCCESS;
    struct hands hands = {.is_brief = true};
    enum giving giving;
    uint64_t published;
    do { /* others may build between two extents */
        uint32_t released;
        struct turn_place place;
        published = load_sc_u64(&arena->space.publications);
        turn_take(&arena->turn, &place);
        giving = release_one(arena, keep_pages, true, &released, &status);
        turn_leave(&arena->turn, &place);
        *released_pages += released;
        most -= giving == GIVEN;
    } while (status == VPMM_SUCCESS && most && goes_on(arena, giving, published, &hands));
    return status;
}

vpmm_status give_back_one(struct arena *arena, uint64_t keep_pages, uint32_t *released_pages, bool *is_given)
{
    vpmm_status status = VPMM_SUCCESS;
    *is_given = release_one(arena, keep_pages, false, released_pages, &status) == GIVEN;
    return status;
}
