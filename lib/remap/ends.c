#include "remap/ends.h"

#include "base/assert.h"

/* Of the owned, mapped pages [first, end). */
static uint64_t stuck_pages(const struct units *units, uint64_t first, uint64_t end)
{
    if (first == end)
        return 0;
    const struct extent *front = unit_extent(unit_at(units, first)), *back = unit_extent(unit_at(units, end - 1));
    uint64_t front_page = load_relaxed_u64(&front->page), back_end = load_relaxed_u64(&back->page) + back->pages;
    uint64_t stuck = 0;
    if (front == back)
        return front_page < first || back_end > end ? end - first : 0;
    if (front_page < first)
        stuck += front_page + front->pages - first;
    if (back_end > end)
        stuck += end - load_relaxed_u64(&back->page);
    return stuck;
}

struct region ends_choose(struct arena *arena, struct region region, uint64_t pages)
{
    const struct units *units = &arena->space.units;
    uint64_t end = region.first + region.units;
    vpmm_assert(pages > 0 && pages <= region.units);
    if (region.units == pages || !load_relaxed_u32(&arena->several_builders))
        return region;
    uint64_t left_by_front = stuck_pages(units, region.first + pages, end);
    uint64_t left_by_back = stuck_pages(units, region.first, end - pages);
    return left_by_back < left_by_front ? region_drop_front(&arena->space, region, region.units - pages) : region;
}

bool ends_note_builder(struct arena *arena, bool for_another)
{
    pthread_t self = pthread_self();
    if (for_another) {
        store_relaxed_u32(&arena->several_builders, 1);
    } else if (!arena->has_builder) {
        arena->has_builder = true;
        arena->builder = self;
    } else if (!pthread_equal(arena->builder, self)) {
        store_relaxed_u32(&arena->several_builders, 1);
    }
    return load_relaxed_u32(&arena->several_builders) != 0;
}
