#include "audit.h"

#include "front.h"
#include "region.h"
#include "zombie.h"

#include <inttypes.h>
#include <stdarg.h>

struct tally {
    uint64_t live, free, cached, hole, zombie, requested;
    uint64_t free_regions, hole_regions, extents, extent_pages;
};

struct auditor {
    struct arena *arena;
    struct tally tally;
    uint64_t page, pages; /* the region under the lens */
};

__attribute__((format(printf, 2, 3))) static vpmm_status violation(const struct auditor *auditor, const char *format,
                                                                   ...)
{
    char what[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    return fail(VPMM_ERROR_INVALID_VALUE, "audit: region of %" PRIu64 " pages at page %" PRIu64 ": %s", auditor->pages,
                auditor->page, what);
}

static struct page *at(const struct auditor *auditor, uint64_t page)
{
    return page_at(&auditor->arena->pages, page);
}

static vpmm_status check_interior(const struct auditor *auditor)
{
    for (uint64_t i = 1; i < auditor->pages; i++)
        if (word_state(load_relaxed_u64(&at(auditor, auditor->page + i)->word)) != PAGE_NONE)
            return violation(auditor, "page %" PRIu64 " of it has a state of its own", i);
    return VPMM_SUCCESS;
}

/* Every page of a mapped region lies in the extent that it names; an extent is counted at its first page. */
static vpmm_status check_extents(struct auditor *auditor)
{
    for (uint64_t page = auditor->page; page < auditor->page + auditor->pages; page++) {
        const struct extent *extent = page_extent(at(auditor, page));
        if (!extent)
            return violation(auditor, "page %" PRIu64 " has no physical memory", page);
        uint64_t first = load_relaxed_u64(&extent->page);
        if (page < first || page >= first + extent->pages)
            return violation(auditor, "page %" PRIu64 " names an extent at %" PRIu64 " of %u pages", page, first,
                             extent->pages);
        if (page == first) {
            auditor->tally.extents++;
            auditor->tally.extent_pages += extent->pages;
        }
    }
    return VPMM_SUCCESS;
}

static vpmm_status check_unmapped(const struct auditor *auditor, uint64_t pages)
{
    for (uint64_t i = 0; i < pages; i++)
        if (page_extent(at(auditor, auditor->page + i)))
            return violation(auditor, "its page %" PRIu64 " names an extent", i);
    return VPMM_SUCCESS;
}

static vpmm_status check_free(struct auditor *auditor, enum page_state left)
{
    struct arena *arena = auditor->arena;
    struct page *first = at(auditor, auditor->page);
    struct fence fence = page_fence(first);
    struct hints *hints = fence.stream ? &stream_at(&arena->streams, fence.stream)->free : &arena->passed;
    auditor->tally.free += auditor->pages;
    auditor->tally.free_regions++;
    if (!hints_holds(hints, first, auditor->page))
        return violation(auditor, "it is free and not hinted where its fence says");
    if (load_relaxed_u32(&at(auditor, auditor->page + auditor->pages - 1)->back) != auditor->pages)
        return violation(auditor, "its last page does not know its length");
    uint64_t pieces = 0;
    while (pieces < auditor->pages && load_relaxed_u32(&at(auditor, auditor->page + pieces)->piece_pages))
        pieces += load_relaxed_u32(&at(auditor, auditor->page + pieces)->piece_pages);
    if (pieces != auditor->pages)
        return violation(auditor, "its pieces have %" PRIu64 " pages", pieces);
    if (left == PAGE_FREE) {
        uint64_t length = load_relaxed_u32(&at(auditor, auditor->page - 1)->back);
        struct fence other = page_fence(at(auditor, auditor->page - length));
        if (other.stream == fence.stream || !other.stream || !fence.stream)
            return violation(auditor, "it is not merged with the free region before it");
    }
    return VPMM_SUCCESS;
}

static vpmm_status check_hole(struct auditor *auditor, enum page_state left)
{
    auditor->tally.hole += auditor->pages;
    auditor->tally.hole_regions++;
    if (left == PAGE_HOLE)
        return violation(auditor, "it is a hole after a hole");
    if (!hints_holds(&auditor->arena->holes, at(auditor, auditor->page), auditor->page))
        return violation(auditor, "it is a hole and not hinted");
    if (load_relaxed_u32(&at(auditor, auditor->page + auditor->pages - 1)->back) != auditor->pages)
        return violation(auditor, "its last page does not know its length");
    return VPMM_SUCCESS;
}

static vpmm_status check_region(struct auditor *auditor, enum page_state state, enum page_state left)
{
    enum { HOLE_PAGES_LOOKED_AT = 64 }; /* of what may be millions that were never touched */
    uint64_t looked = auditor->pages < HOLE_PAGES_LOOKED_AT ? auditor->pages : HOLE_PAGES_LOOKED_AT;
    vpmm_status status = state == PAGE_HOLE ? VPMM_SUCCESS : check_interior(auditor);
    if (status != VPMM_SUCCESS)
        return status;
    switch (state) {
    case PAGE_LIVE:
        auditor->tally.live += auditor->pages;
        auditor->tally.requested += load_relaxed_u64(&at(auditor, auditor->page)->requested);
        return check_extents(auditor);
    case PAGE_FREE:
        status = check_free(auditor, left);
        return status == VPMM_SUCCESS ? check_extents(auditor) : status;
    case PAGE_CACHED:
        auditor->tally.cached += auditor->pages;
        if (!fronts_hold(auditor->arena->fronts, auditor->page))
            return violation(auditor, "it is cached and in no cache of its stream that is noted");
        return check_extents(auditor);
    case PAGE_HOLE:
        status = check_hole(auditor, left);
        return status == VPMM_SUCCESS ? check_unmapped(auditor, looked) : status;
    case PAGE_ZOMBIE:
        auditor->tally.zombie += auditor->pages;
        return check_unmapped(auditor, auditor->pages);
    default:
        return violation(auditor, "its state is %d, which none has at rest", (int)state);
    }
}

static vpmm_status check_chunk(struct auditor *auditor, uint32_t chunk)
{
    struct pages *pages = &auditor->arena->pages;
    uint64_t first = (uint64_t)chunk << pages->chunk_shift, end = first + pages->chunk_pages;
    enum page_state left = PAGE_NONE;
    for (auditor->page = first; auditor->page < end; auditor->page += auditor->pages) {
        uint64_t word = load_acquire_u64(&at(auditor, auditor->page)->word);
        auditor->pages = word_pages(word);
        if (!auditor->pages || auditor->page + auditor->pages > end)
            return violation(auditor, "no region of this length can begin here (state %d)", (int)word_state(word));
        vpmm_status status = check_region(auditor, word_state(word), left);
        if (status != VPMM_SUCCESS)
            return status;
        left = word_state(word);
    }
    return VPMM_SUCCESS;
}

static vpmm_status check_equal(const char *what, uint64_t walked, uint64_t counted)
{
    if (walked == counted)
        return VPMM_SUCCESS;
    return fail(VPMM_ERROR_INVALID_VALUE, "audit: %s: %" PRIu64 " walked, %" PRIu64 " counted", what, walked, counted);
}

static uint64_t hinted_regions(const struct arena *arena)
{
    uint64_t count = hints_count(&arena->passed);
    for (uint32_t slot = 1; slot < load_acquire_u32(&arena->streams.slots); slot++)
        count += hints_count(&stream_at(&arena->streams, slot)->free);
    return count;
}

static vpmm_status check_tally(const struct auditor *auditor)
{
    const struct arena *arena = auditor->arena;
    const struct tally *tally = &auditor->tally;
    unsigned shift = arena->pages.page_shift;
    uint64_t mapped = stats_sum(arena->stats, STAT_mapped_bytes);
    uint64_t extents = stats_sum(arena->stats, STAT_extents_created) - stats_sum(arena->stats, STAT_extents_released);
    const struct {
        const char *what;
        uint64_t walked, counted;
    } pair[] = {
        {"live bytes", tally->live << shift, stats_sum(arena->stats, STAT_live_bytes)},
        {"cached bytes", tally->cached << shift, stats_sum(arena->stats, STAT_cached_bytes)},
        {"mapped bytes", (tally->live + tally->free + tally->cached) << shift, mapped},
        {"bytes of extents", tally->extent_pages << shift, mapped},
        {"pages in the budget", tally->extent_pages, arena->budgeted_pages},
        {"extents", tally->extents, extents},
        {"bytes pending unmap", tally->zombie << shift, stats_sum(arena->stats, STAT_pending_unmap_bytes)},
        {"reserved bytes", (tally->live + tally->free + tally->cached + tally->hole + tally->zombie) << shift,
         stats_sum(arena->stats, STAT_reserved_bytes)},
        {"requested bytes", tally->requested,
         stats_sum(arena->stats, STAT_requested_bytes) - stats_sum(arena->stats, STAT_async_bytes)},
        {"hinted free regions", tally->free_regions, hinted_regions(arena)},
        {"hinted holes", tally->hole_regions, hints_count(&arena->holes)},
        {"builders at rest", 0, load_sc_u32(&arena->builders)},
    };
    vpmm_status status = VPMM_SUCCESS;
    for (size_t i = 0; i < sizeof pair / sizeof pair[0] && status == VPMM_SUCCESS; i++)
        status = check_equal(pair[i].what, pair[i].walked, pair[i].counted);
    return status;
}

vpmm_status audit(struct arena *arena)
{
    struct auditor auditor = {.arena = arena};
    vpmm_status status = VPMM_SUCCESS;
    for (uint32_t chunk = 0; chunk < load_acquire_u32(&arena->pages.chunks) && status == VPMM_SUCCESS; chunk++)
        status = check_chunk(&auditor, chunk);
    return status == VPMM_SUCCESS ? check_tally(&auditor) : status;
}

void dump_regions(struct arena *arena, FILE *file)
{
    static const char *const sign[] = {[PAGE_LIVE] = "", [PAGE_FREE] = "-", [PAGE_CACHED] = "-",
                                       [PAGE_OWN] = "?", [PAGE_HOLE] = "*", [PAGE_ZOMBIE] = "~"};
    for (uint32_t chunk = 0; chunk < load_acquire_u32(&arena->pages.chunks); chunk++) {
        uint64_t page = (uint64_t)chunk << arena->pages.chunk_shift, end = page + arena->pages.chunk_pages;
        fprintf(file, "0x%llx ", (unsigned long long)page_address(&arena->pages, page));
        while (page < end) {
            uint64_t word = load_acquire_u64(&page_at(&arena->pages, page)->word);
            if (word_state(word) == PAGE_NONE || !word_pages(word)) { /* merged or split at this moment */
                page++;
                continue;
            }
            fprintf(file, "[%s%" PRIu64 "]", sign[word_state(word)], word_pages(word));
            page += word_pages(word);
        }
        fputc('\n', file);
    }
}
