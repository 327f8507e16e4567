#include "remap/extents.h"

#include "base/assert.h"
#include "base/lock.h"

/*
 * How many units lie before the next one to look at. The bounds of holes and of what is pending unmap are known by
 * their first unit; where builds change them meanwhile, the rest is looked at unit by unit.
 */
static uint64_t gap_at(const struct unit *unit)
{
    uint64_t word = load_acquire_u64(&unit->word);
    bool is_gap = word_state(word) == UNIT_HOLE || word_state(word) == UNIT_ZOMBIE;
    return is_gap && word_units(word) ? word_units(word) : 1;
}

/* The first extent that begins at a page from *page on, and where; NULL: there is none. */
static struct extent *find_next(const struct units *units, uint64_t *page, uint64_t end)
{
    while (*page < end) {
        const struct unit *unit = unit_at(units, *page);
        struct extent *extent = load_acquire_ptr(&unit->extent); /* pairs with the release of place_extents */
        if (extent && load_relaxed_u64(&extent->page) == *page)
            return extent;
        *page += gap_at(unit);
    }
    return NULL;
}

bool extents_visit(struct arena *arena, bool ends, bool (*visit)(struct arena *, struct extent *, uint64_t, void *),
                   void *data)
{
    const struct units *units = &arena->space.units;
    bool all = true;
    vpmm_assert(lock_is_taken(&arena->pass_lock));
    for (uint32_t chunk = 0; chunk < load_acquire_u32(&units->chunks); chunk++) {
        uint64_t page = (uint64_t)chunk << units->chunk_shift, end = page + units->chunk_units;
        for (struct extent *extent; (all || !ends) && (extent = find_next(units, &page, end));) {
            uint32_t pages = extent->pages;
            all &= visit(arena, extent, page, data);
            page += pages;
        }
    }
    return all;
}
