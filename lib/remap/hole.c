#include "remap/hole.h"

#include "base/assert.h"
#include "base/lock.h"

static struct unit *at(const struct arena *arena, uint64_t page)
{
    return unit_at(&arena->space.units, page);
}

uint64_t hole_from(struct arena *arena, uint64_t page)
{
    uint64_t word = load_acquire_u64(&at(arena, page)->word);
    return word_state(word) == UNIT_HOLE ? word_units(word) : 0;
}

uint64_t hole_until(struct arena *arena, uint64_t page)
{
    uint64_t index = unit_index(&arena->space.units, page);
    uint64_t length = index ? load_relaxed_u32(&at(arena, page - 1)->back) : 0;
    return length && length <= index && hole_from(arena, page - length) == length ? length : 0;
}

static void hole_put(struct arena *arena, uint64_t page, uint64_t pages)
{
    if (!pages)
        return;
    struct unit *first = at(arena, page);
    store_relaxed_u32(&at(arena, page + pages - 1)->back, (uint32_t)pages);
    hints_enter(&arena->holes, &arena->space.hint_arena, first, page, pages);
    unit_set(first, UNIT_HOLE, pages);
}

static void hole_take(struct arena *arena, uint64_t page)
{
    hints_remove(at(arena, page));
    unit_set(at(arena, page), UNIT_NONE, 0);
}

void hole_add(struct arena *arena, uint64_t page, uint64_t pages)
{
    vpmm_assert(lock_is_taken(&arena->plan_lock) && pages > 0 && !hole_from(arena, page));
    uint64_t before = hole_until(arena, page);
    uint64_t after = pages < units_to_chunk_end(&arena->space.units, page) ? hole_from(arena, page + pages) : 0;
    if (after)
        hole_take(arena, page + pages);
    if (before)
        hole_take(arena, page - before);
    unit_set(at(arena, page), UNIT_NONE, 0);
    hole_put(arena, page - before, before + pages + after);
}

void hole_carve(struct arena *arena, uint64_t hole, uint64_t page, uint64_t pages)
{
    uint64_t length = hole_from(arena, hole);
    vpmm_assert(lock_is_taken(&arena->plan_lock) && page >= hole && page + pages <= hole + length);
    hole_take(arena, hole);
    unit_set(at(arena, page), UNIT_OWN, pages);
    hole_put(arena, hole, page - hole);
    hole_put(arena, page + pages, hole + length - (page + pages));
}
