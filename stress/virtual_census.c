#include "virtual.h"

#include "pool/pool.h"
#include "space/region.h"
#include "space/stream.h"

/* What of a free region is in handles that lie wholly in it. */
static uint64_t whole_pages(const struct pages *pages, uint64_t first, uint64_t count)
{
    uint64_t whole = 0;
    for (uint64_t page = first; page < first + count;) {
        const struct extent *extent = page_extent(page_at(pages, page));
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
    if (!fence_passed(&arena->streams, page_fence(page_at(&arena->space.pages, page)))) {
        census->fenced += count;
        return;
    }
    uint64_t whole = whole_pages(&arena->space.pages, page, count);
    census->whole += whole;
    census->stuck += count - whole;
}

static void count_region(const struct arena *arena, uint64_t page, uint64_t word, virtual_census *census)
{
    uint64_t count = word_pages(word);
    switch (word_state(word)) {
    case PAGE_LIVE:
    case PAGE_CUT:
        census->live += count;
        break;
    case PAGE_CACHED:
        census->cached += count;
        break;
    case PAGE_FREE:
        count_free(arena, page, count, census);
        break;
    default: /* what is in a thread's hands is what is mapped beside all that */
        break;
    }
}

virtual_census virtual_census_take(const vpmm_pool *pool)
{
    const struct arena *arena = &pool->arena;
    const struct pages *pages = &arena->space.pages;
    virtual_census census = {0};
    for (uint64_t c = 0; c < load_acquire_u32(&pages->chunks); c++) {
        uint64_t first = c << pages->chunk_shift, end = first + pages->chunk_pages, step;
        for (uint64_t page = first; page < end; page += step) {
            uint64_t word = load_acquire_u64(&page_at(pages, page)->word);
            step = word_pages(word) ? word_pages(word) : 1;
            count_region(arena, page, word, &census);
            if (word_state(word) == PAGE_NONE && page_extent(page_at(pages, page)) == NULL)
                break; /* never used from here on */
        }
    }
    uint64_t counted = census.live + census.cached + census.fenced + census.stuck + census.whole;
    uint64_t mapped = stats_sum(arena->stats, STAT_mapped_bytes) >> pages->page_shift;
    census.hands = mapped > counted ? mapped - counted : 0;
    uint64_t *const of[] = {&census.live,   &census.hands, &census.cached,
                            &census.fenced, &census.stuck, &census.whole};
    for (size_t i = 0; i < sizeof of / sizeof *of; i++)
        *of[i] <<= pages->page_shift;
    return census;
}
