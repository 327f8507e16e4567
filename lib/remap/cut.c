#include "remap/cut.h"

#include "base/assert.h"
#include "base/reserve.h"
#include "cache/slab.h"
#include "remap/slab_page.h"
#include "space/use.h"

/*
 * What of a chunk can be cut: its beginning, where builds place memory as long as there is room. The table takes a
 * hundred and twenty-eighth of it, of address space alone; a chunk of 8 TiB in whole would take 64 GiB, which not every
 * process can have (valgrind's cannot).
 */
#define CUT_BYTES_MAX (UINT64_C(1) << 40)

vpmm_status cut_init(struct arena *arena, const vpmm_config *config)
{
    size_t bytes = config->va_size < CUT_BYTES_MAX ? config->va_size : CUT_BYTES_MAX;
    arena->cut.page_subpages = config->page_size / SUBPAGE_BYTES;
    arena->slab_pages_from = SLAB_PAGES_FROM;
    arena->described_pages = CUT_DESCRIBED_BYTES / (arena->cut.page_subpages * sizeof(struct unit));
    return space_init(&arena->cut, SUBPAGE_BYTES, bytes);
}

bool cut_takes_chunk(const struct arena *arena)
{
    uint32_t chunks = load_acquire_u32(&arena->cut.units.chunks);
    return arena->cut.page_subpages && chunks == load_acquire_u32(&arena->space.units.chunks) &&
           chunks < arena->cut.units.max_chunks;
}

static uint64_t first_subpage(const struct arena *arena, uint64_t page)
{
    const struct units *units = &arena->space.units, *subpages = &arena->cut.units;
    return page >> units->chunk_shift << subpages->chunk_shift | unit_index(units, page) * arena->cut.page_subpages;
}

static uint64_t page_of_subpage(const struct arena *arena, uint64_t subpage)
{
    const struct units *units = &arena->space.units, *subpages = &arena->cut.units;
    return subpage >> subpages->chunk_shift << units->chunk_shift |
           unit_index(subpages, subpage) / arena->cut.page_subpages;
}

bool cut_possible(const struct arena *arena, const struct region *region)
{
    uint64_t chunk = region->first >> arena->space.units.chunk_shift;
    uint64_t end = unit_index(&arena->space.units, region->first) + region->units;
    return chunk < load_acquire_u32(&arena->cut.units.chunks) &&
           end * arena->cut.page_subpages <= arena->cut.units.chunk_units;
}

/* ---- a page's subpages ---- */

static struct unit *subpages_of(const struct arena *arena, uint64_t page)
{
    return unit_at(&arena->cut.units, first_subpage(arena, page));
}

/* For the page's owner, as are the next two. */
static bool are_described(const struct arena *arena, uint64_t page)
{
    return peek_u64(&subpages_of(arena, page)->word);
}

static void describe(struct arena *arena, uint64_t page)
{
    struct unit *subpage = subpages_of(arena, page);
    uint64_t none = word_make(UNIT_NONE, 0, load_relaxed_u64(&unit_at(&arena->space.units, page)->word));
    for (uint64_t i = 0; i < arena->cut.page_subpages; i++)
        poke_u64(&subpage[i].word, none);
}

/*
 * Raises the page's generation, if its subpages are described; *any: they are. False: they cannot be, or generations
 * are too high for it.
 */
static bool begin_to_forget(struct arena *arena, uint64_t page, bool *any)
{
    struct region one = {page, 1, FENCE_PASSED, false};
    if (!cut_possible(arena, &one))
        return false;
    if (!are_described(arena, page))
        return true;
    _Atomic(uint64_t) *word = &unit_at(&arena->space.units, page)->word;
    struct unit *subpage = subpages_of(arena, page);
    uint64_t highest = word_generation(load_relaxed_u64(word));
    for (uint64_t i = 0; i < arena->cut.page_subpages; i++) {
        uint64_t generation = word_generation(peek_u64(&subpage[i].word));
        vpmm_assert(word_state(peek_u64(&subpage[i].word)) == UNIT_NONE);
        highest = generation > highest ? generation : highest;
    }
    if (highest >> (UNIT_GENERATION_BITS - 1))
        return false;
    *any = true;
    /* The caller's store of what the page becomes is the release. */
    store_relaxed_u64(word, word_of_generation(load_relaxed_u64(word), highest));
    return true;
}

void cut_forget(struct arena *arena, uint64_t page, uint64_t pages)
{
    size_t bytes = arena->cut.page_subpages * sizeof(struct unit);
    for (uint64_t i = page, run; i < page + pages; i += run + 1) {
        bool any = false;
        run = 0;
        while (i + run < page + pages && begin_to_forget(arena, i + run, &any))
            run++;
        if (any) /* with what was never described beside it: of small pages a host's page has several */
            reserve_forget(subpages_of(arena, i), run * bytes);
    }
}

void cut_forget_moved(struct arena *arena, uint64_t page, uint64_t pages)
{
    uint64_t end = page + pages, from = page > arena->described_pages ? page : arena->described_pages;
    if (from < end)
        cut_forget(arena, from, end - from);
}

struct region cut_pages(struct arena *arena, struct region pages)
{
    uint64_t bytes = pages.units << arena->space.units.unit_shift;
    struct region subpages = {first_subpage(arena, pages.first), pages.units * arena->cut.page_subpages, pages.fence,
                              false};
    for (uint64_t i = 0; i < pages.units; i++)
        if (!are_described(arena, pages.first + i))
            describe(arena, pages.first + i);
    unit_set(unit_at(&arena->cut.units, subpages.first), UNIT_OWN, subpages.units);
    stats_begin_live(arena->stats, STAT_live_bytes, bytes, 0);
    stats_add(arena->stats, STAT_slab_bytes, bytes);
    for (uint64_t i = 0; i < pages.units; i++)
        unit_set(unit_at(&arena->space.units, pages.first + i), UNIT_CUT, 1); /* pairs with the acquire in a free */
    return subpages;
}

/* The same the other way: whole pages. */
static struct region uncut(struct arena *arena, struct region subpages)
{
    struct region pages = {page_of_subpage(arena, subpages.first), subpages.units / arena->cut.page_subpages,
                           subpages.fence, false};
    uint64_t bytes = pages.units << arena->space.units.unit_shift;
    unit_set(unit_at(&arena->cut.units, subpages.first), UNIT_NONE, 0);
    for (uint64_t i = 1; i < pages.units; i++)
        unit_set(unit_at(&arena->space.units, pages.first + i), UNIT_NONE, 0);
    unit_set(unit_at(&arena->space.units, pages.first), UNIT_OWN, pages.units);
    stats_end_live(arena->stats, STAT_live_bytes, bytes, 0);
    stats_sub(arena->stats, STAT_slab_bytes, bytes);
    return pages;
}

/* ---- extending ---- */

struct extension {
    const struct arena *arena;
    const struct stream *stream;
    uint64_t wanted;          /* subpages */
    struct seen_region pages; /* the free region of pages that follows */
    uint64_t take;            /* pages of it; 0: none found yet */
    unsigned looked;
};

/* The run that needs the fewest pages. */
static bool look_for_extension(const struct seen_region *found, void *data)
{
    enum { REGIONS_LOOKED_AT = 256 };
    struct extension *extension = data;
    const struct arena *arena = extension->arena;
    uint64_t end = found->first + found->units, a_page = arena->cut.page_subpages;
    uint64_t take = (extension->wanted - found->units + a_page - 1) / a_page;
    if (found->units >= extension->wanted || end % a_page ||
        unit_index(&arena->cut.units, end) == arena->cut.units.chunk_units ||
        (extension->take && take >= extension->take) || !region_is_usable(&arena->cut, extension->stream, found->first))
        return ++extension->looked < REGIONS_LOOKED_AT;
    struct seen_region pages = {.first = page_of_subpage(arena, end)};
    pages.word = load_sc_u64(&unit_at(&arena->space.units, pages.first)->word);
    pages.units = word_units(pages.word);
    if (word_state(pages.word) == UNIT_FREE && pages.units >= take &&
        region_is_usable(&arena->space, extension->stream, pages.first)) {
        extension->pages = pages;
        extension->take = take;
    }
    return ++extension->looked < REGIONS_LOOKED_AT;
}

bool cut_extend(struct arena *arena, const struct stream *stream, struct want want)
{
    struct extension found = {.arena = arena, .stream = stream, .wanted = want.units + want.align - 1};
    struct region region;
    hints_each(&stream->free[SPACE_SUBPAGES], &arena->cut.units, UNIT_FREE, look_for_extension, &found);
    hints_each(&arena->cut.passed, &arena->cut.units, UNIT_FREE, look_for_extension, &found);
    if (!found.take || !region_claim(&arena->space, &found.pages, &region))
        return false;
    if (region.units > found.take)
        region = region_keep_front(&arena->space, region, found.take);
    if (cut_possible(arena, &region))
        region_publish(&arena->cut, cut_pages(arena, region));
    else
        region_publish(&arena->space, region);
    return true;
}

/* ---- giving back ---- */

struct whole {
    const struct arena *arena;
    uint64_t most;            /* pages to be taken at once */
    struct seen_region in;    /* the region of subpages */
    uint64_t first, subpages; /* the part of it that is whole pages; subpages 0: none found */
};

static bool look_for_whole(const struct seen_region *found, void *data)
{
    struct whole *whole = data;
    uint64_t a_page = whole->arena->cut.page_subpages;
    uint64_t first = want_place((struct want){0, a_page}, found->first);
    uint64_t end = (found->first + found->units) / a_page * a_page;
    if (end <= first)
        return true;
    whole->in = *found;
    whole->first = first;
    whole->subpages = end - first < whole->most * a_page ? end - first : whole->most * a_page;
    return false;
}

static bool find_whole(struct whole *whole)
{
    const struct space *cut = &whole->arena->cut;
    uint64_t a_page = cut->page_subpages;
    hints_each_from(&cut->passed, &cut->units, UNIT_FREE, a_page, look_for_whole, whole);
    for (uint32_t slot = 1, n = load_acquire_u32(&cut->streams->slots); slot < n && !whole->subpages; slot++)
        hints_each_from(&stream_at(cut->streams, slot)->free[SPACE_SUBPAGES], &cut->units, UNIT_FREE, a_page,
                        look_for_whole, whole);
    return whole->subpages;
}

/* Lock-free: a claim fails because another thread has taken the region. */
void cut_give_back(struct arena *arena, uint64_t keep_pages)
{
    for (uint64_t whole; (whole = load_relaxed_u64(&arena->cut.whole)) > keep_pages;) {
        struct whole found = {.arena = arena, .most = whole - keep_pages};
        struct region region;
        if (!find_whole(&found))
            break;
        if (!region_claim(&arena->cut, &found.in, &region))
            continue;
        if (found.first > region.first)
            region = region_drop_front(&arena->cut, region, found.first - region.first);
        if (region.units > found.subpages)
            region = region_keep_front(&arena->cut, region, found.subpages);
        region_publish(&arena->space, uncut(arena, region));
    }
}

void cut_flush_to_grow(struct arena *arena)
{
    if (!arena->cut.page_subpages)
        return;
    fronts_flush(arena->cut.fronts, NULL, true);
    slabs_dissolve_empty(&arena->slabs);
    cut_give_back(arena, 0);
}

void cut_flush(struct arena *arena)
{
    slab_page_give_up(arena);
    cut_flush_to_grow(arena);
}

void cut_free_uses(struct arena *arena, uint64_t page, uint64_t pages)
{
    struct unit *subpage = subpages_of(arena, page);
    for (uint64_t i = 0; i < pages * arena->cut.page_subpages; i++)
        if (word_state(load_relaxed_u64(&subpage[i].word)) == UNIT_USED)
            uses_free(&arena->streams, unit_uses(&subpage[i]));
}

bool cut_noted(const struct arena *arena)
{
    return arena->cut.page_subpages &&
           (fronts_noted(arena->cut.fronts) || load_relaxed_u64(&arena->cut.whole) || slabs_empty(&arena->slabs));
}

bool cut_has_spares(const struct arena *arena)
{
    return slab_page_is_kept(arena) || cut_noted(arena);
}

struct pieces_look {
    const struct arena *arena;
    struct owned_look pages, subpages;
};

/* Of a page, whether it or one of its subpages is. The subpages of a page's chunk are there, if any of it was cut. */
static bool is_page_owned(uint64_t page, uint64_t word, const void *data)
{
    const struct pieces_look *look = data;
    const struct arena *arena = look->arena;
    return unit_is_owned(page, word, &look->pages) ||
           (word_state(word) == UNIT_CUT &&
            units_any(&arena->cut.units, first_subpage(arena, page), word_units(word) * arena->cut.page_subpages,
                      unit_is_owned, &look->subpages));
}

bool cut_any_owned(const struct arena *arena, struct word_seen *seen)
{
    struct pieces_look look = {arena, {&arena->space.units, seen}, {&arena->cut.units, seen}};
    return units_any_of_chunks(&arena->space.units, is_page_owned, &look);
}

static bool is_page_cut(const struct units *pages, uint64_t page)
{
    return word_state(load_acquire_u64(&unit_at(pages, page)->word)) == UNIT_CUT;
}

bool cut_subpage_of(const struct arena *arena, CUdeviceptr address, uint64_t *subpage)
{
    uint64_t page;
    return unit_around(&arena->cut.units, address, subpage) && unit_around(&arena->space.units, address, &page) &&
           is_page_cut(&arena->space.units, page);
}

bool cut_next_run(const struct arena *arena, struct cut_run *run)
{
    const struct units *pages = &arena->space.units, *subpages = &arena->cut.units;
    uint64_t first = (uint64_t)run->chunk << pages->chunk_shift, page = first + run->pages;
    uint64_t end = first + pages->chunk_units, a_page = arena->cut.page_subpages;
    while (page < end && !is_page_cut(pages, page))
        page += units_to_next(pages, first, page, load_acquire_u64(&unit_at(pages, page)->word));
    run->subpage = ((uint64_t)run->chunk << subpages->chunk_shift) + (page - first) * a_page;
    uint64_t from = page;
    for (page += page < end; page < end && is_page_cut(pages, page);) /* the first was: by now it may be whole again */
        page++;
    run->end = run->subpage + (page - from) * a_page;
    run->pages = page - first;
    return page > from;
}
