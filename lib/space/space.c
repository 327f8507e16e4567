#include "space/space.h"

#define HINT_ARENA_BYTES ((size_t)4 << 30) /* reserved, not committed: 8 million blocks of 60 hints */

vpmm_status space_init(struct space *space, size_t unit_size, size_t va_size)
{
    units_init(&space->units, unit_size, va_size);
    await_init(&space->await);
    return hint_arena_init(&space->hint_arena, HINT_ARENA_BYTES)
               ? VPMM_SUCCESS
               : fail(VPMM_ERROR_HOST_MEMORY, "no address space for a pool's records");
}

void space_free(struct space *space)
{
    hint_arena_free(&space->hint_arena);
    units_free(&space->units);
}

/* Pages that are no longer cut have no regions of subpages, so from `first` on there may be none of these to go by. */
uint64_t space_to_next(const struct space *space, uint64_t first, uint64_t unit, uint64_t word)
{
    if (space->level == SPACE_PAGES)
        return units_to_next(&space->units, first, unit, word);
    return word_units(word) ? word_units(word) : 1;
}
