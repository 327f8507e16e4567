#include "virtual.h"

#include "pool/pool.h"
#include "space/region.h"
#include "space/stream.h"

/* What of a free region is in handles that lie wholly in it. */
static uint64_t whole_pages(const struct units *units, uint64_t first, uint64_t count)
{
    uint64_t whole = 0;
    for (uint64_t page = first; page < first + count;) {
        const struct extent *extent = unit_extent(unit_at(units, page));
        if (!extent)
            break;
        uint64_t begin = load_relaxed_u64(&extent->page), end = begin + extent->pages;
        if (end <= page)
            break;
        whole += begin >= first && end <= first + count ? extent->pages : 0;
        page = end;
    }
    return whole;
}

static void count_free(const struct arena *arena, uint64_t page, uint64_t count, virtual_census *census)
{
    if (!fence_passed(&arena->streams, unit_fence(unit_at(&arena->space.units, page)))) {
        census->fenced += count;
        return;
    }
    uint64_t whole = whole_pages(&arena->space.units, page, count);
    census->whole += whole;
    census->stuck += count - whole;
}

static void count_region(const struct arena *arena, uint64_t page, uint64_t word, virtual_census *census)
{
    uint64_t count = word_units(word);
    switch (word_state(word)) {
    case UNIT_LIVE:
    case UNIT_CUT:
        census->live += count;
        break;
    case UNIT_CACHED:
        census->cached += count;
        break;
    case UNIT_FREE:
        count_free(arena, page, count, census);
        break;
    default: /* what is in a thread's hands is what is mapped beside all that */
        break;
    }
}

virtual_census virtual_census_take(const vpmm_pool *pool)
{
    const struct arena *arena = &pool->arena;
    const struct units *units = &arena->space.units;
    virtual_census census = {0};
    for (uint64_t c = 0; c < load_acquire_u32(&units->chunks); c++) {
        uint64_t first = c << units->chunk_shift, end = first + units->chunk_units, step;
        for (uint64_t page = first; page < end; page += step) {
            uint64_t word = load_acquire_u64(&unit_at(units, page)->word);
            step = word_units(word) ? word_units(word) : 1;
            count_region(arena, page, word, &census);
            if (word_state(word) == UNIT_NONE && unit_extent(unit_at(units, page)) == NULL)
                break; /* never used from here on */
        }
    }
    uint64_t counted = census.live + census.cached + census.fenced + census.stuck + census.whole;
    uint64_t mapped = stats_sum(arena->stats, STAT_mapped_bytes) >> units->unit_shift;
    census.hands = mapped > counted ? mapped - counted : 0;
    uint64_t *const of[] = {&census.live, &census.hands, &census.cached, &census.fenced, &census.stuck, &census.whole};
    for (size_t i = 0; i < sizeof of / sizeof *of; i++)
        *of[i] <<= units->unit_shift;
    return census;
}
