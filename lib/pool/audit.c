#include "pool/audit.h"

#include "cache/slices.h"
#include "remap/cut.h"
#include "remap/park.h"
#include "remap/slab_page.h"

#include <inttypes.h>
#include <stdarg.h>

/* Of one space, in its units. Slices count in bytes. */
struct tally {
    uint64_t live, cut, free, cached, ending, hole, zombie, requested, rest;
    uint64_t free_regions, hole_regions, extents, extent_pages, parked_pages;
    uint64_t whole_pages, empty_slabs, slice_live_bytes, slice_cached_bytes, slice_ending_bytes;
};

struct auditor {
    struct arena *arena;
    struct space *space;
    struct tally tally;
    uint64_t first, units; /* the region under the lens */
};

__attribute__((format(printf, 2, 3))) static vpmm_status violation(const struct auditor *auditor, const char *format,
                                                                   ...)
{
    char what[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    return fail(VPMM_ERROR_INVALID_VALUE, "audit: region of %" PRIu64 " %s at %" PRIu64 ": %s", auditor->units,
                auditor->space->level == SPACE_PAGES ? "pages" : "subpages", auditor->first, what);
}

static struct unit *at(const struct auditor *auditor, uint64_t unit)
{
    return unit_at(&auditor->space->units, unit);
}

static vpmm_status check_interior(const struct auditor *auditor)
{
    for (uint64_t i = 1; i < auditor->units; i++)
        if (word_state(load_relaxed_u64(&at(auditor, auditor->first + i)->word)) != UNIT_NONE)
            return violation(auditor, "unit %" PRIu64 " of it has a state of its own", i);
    return VPMM_SUCCESS;
}

/* Every page of a mapped region lies in the extent that it names; an extent is counted at its first page. */
static vpmm_status check_extents(struct auditor *auditor)
{
    for (uint64_t page = auditor->first; page < auditor->first + auditor->units; page++) {
        const struct extent *extent = unit_extent(at(auditor, page));
        if (!extent)
            return violation(auditor, "page %" PRIu64 " has no physical memory", page);
        uint64_t first = load_relaxed_u64(&extent->page);
        if (page < first || page >= first + extent->pages)
            return violation(auditor, "page %" PRIu64 " names an extent at %" PRIu64 " of %u pages", page, first,
                             extent->pages);
        if (unit_index(&auditor->space->units, first) % auditor->arena->policy.step ||
            extent->pages % auditor->arena->policy.step)
            return violation(auditor, "page %" PRIu64 " names an extent at %" PRIu64 " of %u pages: no whole steps",
                             page, first, extent->pages);
        if ((extent->memory == EXTENT_MAPPED) == arena_is_parked(auditor->arena))
            return violation(auditor, "page %" PRIu64 " names an extent whose memory is %d, and the pool is %sparked",
                             page, (int)extent->memory, arena_is_parked(auditor->arena) ? "" : "not ");
        if (page == first) {
            bool is_held = extent->memory != EXTENT_PARKED;
            auditor->tally.extents += is_held;
            auditor->tally.extent_pages += extent->pages;
            auditor->tally.parked_pages += is_held ? 0 : extent->pages;
        }
    }
    return VPMM_SUCCESS;
}

static vpmm_status check_unmapped(const struct auditor *auditor, uint64_t pages)
{
    for (uint64_t i = 0; i < pages; i++)
        if (unit_extent(at(auditor, auditor->first + i)))
            return violation(auditor, "its page %" PRIu64 " names an extent", i);
    return VPMM_SUCCESS;
}

static vpmm_status check_free(struct auditor *auditor, enum unit_state left)
{
    struct space *space = auditor->space;
    struct unit *first = at(auditor, auditor->first);
    struct fence fence = unit_fence(first);
    struct hints *hints = fence.stream ? &stream_at(space->streams, fence.stream)->free[space->level] : &space->passed;
    auditor->tally.free += auditor->units;
    auditor->tally.free_regions++;
    if (!hints_holds(hints, first, auditor->first))
        return violation(auditor, "it is free and not hinted where its fence says");
    if (load_relaxed_u32(&at(auditor, auditor->first + auditor->units - 1)->back) != auditor->units)
        return violation(auditor, "its last unit does not know its length");
    uint64_t units = 0;
    while (units < auditor->units && load_relaxed_u32(&at(auditor, auditor->first + units)->span_units))
        units += load_relaxed_u32(&at(auditor, auditor->first + units)->span_units);
    if (units != auditor->units)
        return violation(auditor, "its spans have %" PRIu64 " units", units);
    if (left == UNIT_FREE) {
        uint64_t length = load_relaxed_u32(&at(auditor, auditor->first - 1)->back);
        struct fence other = unit_fence(at(auditor, auditor->first - length));
        if (other.stream == fence.stream || !other.stream || !fence.stream)
            return violation(auditor, "it is not merged with the free region before it");
    }
    return VPMM_SUCCESS;
}

static vpmm_status check_hole(struct auditor *auditor, enum unit_state left)
{
    auditor->tally.hole += auditor->units;
    auditor->tally.hole_regions++;
    if (left == UNIT_HOLE)
        return violation(auditor, "it is a hole after a hole");
    if (!hints_holds(&auditor->arena->holes, at(auditor, auditor->first), auditor->first))
        return violation(auditor, "it is a hole and not hinted");
    if (load_relaxed_u32(&at(auditor, auditor->first + auditor->units - 1)->back) != auditor->units)
        return violation(auditor, "its last unit does not know its length");
    return VPMM_SUCCESS;
}

static vpmm_status check_cached(struct auditor *auditor)
{
    auditor->tally.cached += auditor->units;
    if (!fronts_hold(auditor->space->fronts, auditor->first))
        return violation(auditor, "it is cached and in no cache of its stream that is noted");
    return VPMM_SUCCESS;
}

static vpmm_status check_region(struct auditor *auditor, enum unit_state state, enum unit_state left)
{
    enum { HOLE_PAGES_LOOKED_AT = 64 }; /* of what may be millions that were never touched */
    uint64_t looked = auditor->units < HOLE_PAGES_LOOKED_AT ? auditor->units : HOLE_PAGES_LOOKED_AT;
    vpmm_status status = state == UNIT_HOLE ? VPMM_SUCCESS : check_interior(auditor);
    if (status != VPMM_SUCCESS)
        return status;
    switch (state) {
    case UNIT_LIVE:
    case UNIT_USED:
        auditor->tally.live += auditor->units;
        auditor->tally.requested += load_relaxed_u64(&at(auditor, auditor->first)->requested);
        return check_extents(auditor);
    case UNIT_FREE:
        status = check_free(auditor, left);
        return status == VPMM_SUCCESS ? check_extents(auditor) : status;
    case UNIT_CACHED:
        status = check_cached(auditor);
        return status == VPMM_SUCCESS ? check_extents(auditor) : status;
    case UNIT_ENDING:
        auditor->tally.ending += auditor->units;
        return check_extents(auditor);
    case UNIT_CUT:
        auditor->tally.cut += auditor->units;
        return check_extents(auditor);
    case UNIT_HOLE:
        status = check_hole(auditor, left);
        return status == VPMM_SUCCESS ? check_unmapped(auditor, looked) : status;
    case UNIT_ZOMBIE:
        auditor->tally.zombie += auditor->units;
        return check_unmapped(auditor, auditor->units);
    default:
        return violation(auditor, "its state is %d, which none has at rest", (int)state);
    }
}

static vpmm_status check_chunk(struct auditor *auditor, uint32_t chunk)
{
    struct units *units = &auditor->arena->space.units;
    uint64_t first = (uint64_t)chunk << units->chunk_shift, end = first + units->chunk_units;
    enum unit_state left = UNIT_NONE;
    for (auditor->first = first; auditor->first < end; auditor->first += auditor->units) {
        uint64_t word = load_acquire_u64(&at(auditor, auditor->first)->word);
        auditor->units = word_units(word);
        if (!auditor->units || auditor->first + auditor->units > end)
            return violation(auditor, "no region of this length can begin here (state %d)", (int)word_state(word));
        vpmm_status status = check_region(auditor, word_state(word), left);
        if (status != VPMM_SUCCESS)
            return status;
        left = word_state(word);
    }
    return VPMM_SUCCESS;
}

/* ---- cut pages ---- */

static vpmm_status check_slice(struct auditor *auditor, const struct slab *slab, unsigned i)
{
    uint64_t word = load_acquire_u64(&slab->slice[i].word);
    unsigned class = load_relaxed_u32(&slab->class);
    bool is_free = slab_free_bits(load_sc_u64(&slab->word)) >> i & 1;
    if (slice_class_of(word) != class)
        return violation(auditor, "slice %u of a slab of class %u is of class %u", i, class, slice_class_of(word));
    if (is_free != (slice_state(word) == SLICE_FREE))
        return violation(auditor, "the slab and slice %u do not agree whether it is free", i);
    if (slice_state(word) == SLICE_LIVE || slice_state(word) == SLICE_USED) {
        auditor->tally.slice_live_bytes += slice_size[class].bytes;
        auditor->tally.requested += slice_requested(word);
    }
    if (slice_state(word) == SLICE_ENDING)
        auditor->tally.slice_ending_bytes += slice_size[class].bytes;
    if (slice_state(word) == SLICE_CACHED) {
        auditor->tally.slice_cached_bytes += slice_size[class].bytes;
        if (!fronts_hold_slice(auditor->space->fronts, &slab->slice[i], word))
            return violation(auditor, "slice %u is cached and in no cache of its stream that is noted", i);
    }
    return VPMM_SUCCESS;
}

static vpmm_status check_slab(struct auditor *auditor)
{
    struct slab *slab = slab_of_subpage(auditor->space, auditor->first);
    uint32_t free = slab ? slab_free_bits(load_sc_u64(&slab->word)) : 0;
    if (!slab || slab->subpage != auditor->first)
        return violation(auditor, "it is cut, and is no slab's");
    if (slab_want(load_relaxed_u32(&slab->class)).units != auditor->units)
        return violation(auditor, "it has not the length of a slab of class %u", load_relaxed_u32(&slab->class));
    for (uint64_t i = 1; i < auditor->units; i++)
        if (slab_of_subpage(auditor->space, auditor->first + i) != slab)
            return violation(auditor, "its subpage %" PRIu64 " does not name the slab", i);
    if (free && !slab_is_listed(&auditor->arena->slabs, slab)) /* the other way about, the next search takes it out */
        return violation(auditor, "it has free slices, and its owner's tree does not have it");
    auditor->tally.cut += auditor->units;
    auditor->tally.empty_slabs += free == slab_all(slab);
    vpmm_status status = VPMM_SUCCESS;
    for (unsigned i = 0; i < slab->slices && status == VPMM_SUCCESS; i++)
        status = check_slice(auditor, slab, i);
    return status;
}

static vpmm_status check_subpages(struct auditor *auditor, enum unit_state state, enum unit_state left)
{
    uint64_t a_page = auditor->space->page_subpages;
    vpmm_status status = check_interior(auditor);
    if (status != VPMM_SUCCESS || state == UNIT_CUT)
        return status == VPMM_SUCCESS ? check_slab(auditor) : status;
    for (uint64_t i = 0; i < auditor->units; i++)
        if (slab_of_subpage(auditor->space, auditor->first + i))
            return violation(auditor, "its subpage %" PRIu64 " names a slab", i);
    switch (state) {
    case UNIT_LIVE:
    case UNIT_USED:
        auditor->tally.live += auditor->units;
        auditor->tally.requested += load_relaxed_u64(&at(auditor, auditor->first)->requested);
        return VPMM_SUCCESS;
    case UNIT_FREE: {
        uint64_t first = (auditor->first + a_page - 1) / a_page, end = (auditor->first + auditor->units) / a_page;
        auditor->tally.whole_pages += end > first ? end - first : 0;
        return check_free(auditor, left);
    }
    case UNIT_CACHED:
        return check_cached(auditor);
    case UNIT_ENDING:
        auditor->tally.ending += auditor->units;
        return VPMM_SUCCESS;
    case UNIT_OWN:
        auditor->tally.rest += auditor->units;
        return slab_page_is_rest(auditor->arena, auditor->first, auditor->units)
                   ? VPMM_SUCCESS
                   : violation(auditor, "it is nobody's, and not the rest of the page that slabs are cut from");
    default:
        return violation(auditor, "its state is %d, which none has at rest", (int)state);
    }
}

/* The regions of subpages from `page`'s first one, or from where the last one of the page before ended. */
static vpmm_status check_cut_page(struct auditor *auditor, uint64_t subpage, bool adjoins, enum unit_state *left)
{
    uint64_t end = subpage + auditor->space->page_subpages, from = auditor->first + auditor->units;
    if (adjoins && from > subpage)
        subpage = from;
    else if (!adjoins && from > subpage && from < end)
        return violation(auditor, "it reaches into a page that it is not of");
    for (; subpage < end; subpage += auditor->units) {
        uint64_t word = load_acquire_u64(&at(auditor, subpage)->word);
        auditor->first = subpage;
        auditor->units = word_units(word);
        if (!auditor->units)
            return violation(auditor, "no region begins here (state %d)", (int)word_state(word));
        vpmm_status status = check_subpages(auditor, word_state(word), *left);
        if (status != VPMM_SUCCESS)
            return status;
        *left = word_state(word);
    }
    return VPMM_SUCCESS;
}

/* Whether a region of subpages ends with the last cut page of a run. */
static vpmm_status check_run_end(const struct auditor *auditor, uint64_t subpage)
{
    return auditor->first + auditor->units > subpage && auditor->first < subpage
               ? violation(auditor, "it reaches into a page that is not cut")
               : VPMM_SUCCESS;
}

static vpmm_status check_cut_chunk(struct auditor *auditor, uint32_t chunk)
{
    const struct units *units = &auditor->arena->space.units;
    uint64_t index = 0, a_page = auditor->space->page_subpages;
    enum unit_state left = UNIT_NONE;
    bool adjoins = false;
    vpmm_status status = VPMM_SUCCESS;
    for (uint64_t length; index < units->chunk_units && status == VPMM_SUCCESS; index += length) {
        uint64_t word = load_acquire_u64(&units->chunk[chunk].unit[index].word);
        uint64_t subpage = ((uint64_t)chunk << auditor->space->units.chunk_shift) + index * a_page;
        bool is_cut = word_state(word) == UNIT_CUT;
        length = word_units(word);
        left = adjoins ? left : UNIT_NONE;
        status = is_cut ? check_cut_page(auditor, subpage, adjoins, &left) : check_run_end(auditor, subpage);
        adjoins = is_cut;
    }
    return status;
}

static vpmm_status check_equal(const char *what, uint64_t walked, uint64_t counted)
{
    if (walked == counted)
        return VPMM_SUCCESS;
    return fail(VPMM_ERROR_INVALID_VALUE, "audit: %s: %" PRIu64 " walked, %" PRIu64 " counted", what, walked, counted);
}

static uint64_t hinted_regions(const struct space *space)
{
    uint64_t count = hints_count(&space->passed);
    for (uint32_t slot = 1; slot < load_acquire_u32(&space->streams->slots); slot++)
        count += hints_count(&stream_at(space->streams, slot)->free[space->level]);
    return count;
}

struct pair {
    const char *what;
    uint64_t walked, counted;
};

static vpmm_status check_pairs(const struct pair *pair, size_t pairs)
{
    vpmm_status status = VPMM_SUCCESS;
    for (size_t i = 0; i < pairs && status == VPMM_SUCCESS; i++)
        status = check_equal(pair[i].what, pair[i].walked, pair[i].counted);
    return status;
}

static vpmm_status check_page_tally(const struct auditor *auditor)
{
    const struct arena *arena = auditor->arena;
    const struct tally *tally = &auditor->tally;
    unsigned shift = arena->space.units.unit_shift;
    uint64_t live = tally->live + tally->cut, parked = stats_sum(arena->stats, STAT_parked_bytes);
    uint64_t placed = stats_sum(arena->stats, STAT_mapped_bytes) + parked;
    uint64_t extents = stats_sum(arena->stats, STAT_extents_created) - stats_sum(arena->stats, STAT_extents_released);
    const struct pair pair[] = {
        {"live bytes", live << shift, stats_sum(arena->stats, STAT_live_bytes)},
        {"bytes of cut pages", tally->cut << shift, stats_sum(arena->stats, STAT_slab_bytes)},
        {"cached bytes", tally->cached << shift, stats_sum(arena->stats, STAT_cached_bytes)},
        {"mapped and parked bytes", (live + tally->free + tally->cached + tally->ending) << shift, placed},
        {"bytes of extents", tally->extent_pages << shift, placed},
        {"parked bytes", tally->parked_pages << shift, parked},
        {"pages in the budget", tally->extent_pages, arena->budgeted_pages},
        {"bytes in quarantine", arena->quarantined_pages << shift, stats_sum(arena->stats, STAT_quarantined_bytes)},
        {"extents", tally->extents, extents},
        {"bytes pending unmap", tally->zombie << shift, stats_sum(arena->stats, STAT_pending_unmap_bytes)},
        {"reserved bytes", (live + tally->free + tally->cached + tally->ending + tally->hole + tally->zombie) << shift,
         stats_sum(arena->stats, STAT_reserved_bytes)},
        {"hinted free regions", tally->free_regions, hinted_regions(&arena->space)},
        {"hinted holes", tally->hole_regions, hints_count(&arena->holes)},
        {"builders at rest", 0, load_sc_u32(&arena->builders)},
    };
    return check_pairs(pair, sizeof pair / sizeof pair[0]);
}

static vpmm_status check_cut_tally(const struct auditor *auditor)
{
    const struct arena *arena = auditor->arena;
    const struct tally *tally = &auditor->tally;
    const struct pair pair[] = {
        {"bytes of subpages",
         (tally->live + tally->free + tally->cached + tally->ending + tally->cut + tally->rest) * SUBPAGE_BYTES,
         stats_sum(arena->stats, STAT_slab_bytes)},
        {"live bytes of pieces", tally->live * SUBPAGE_BYTES + tally->slice_live_bytes,
         stats_sum(arena->stats, STAT_slab_live_bytes)},
        {"cached bytes of pieces", tally->cached * SUBPAGE_BYTES + tally->slice_cached_bytes,
         stats_sum(arena->stats, STAT_slab_cached_bytes)},
        {"whole free pages", tally->whole_pages, load_sc_u64(&arena->cut.whole)},
        {"empty slabs", tally->empty_slabs, load_sc_u64(&arena->slabs.empty)},
        {"hinted free regions of subpages", tally->free_regions, hinted_regions(&arena->cut)},
    };
    return check_pairs(pair, sizeof pair / sizeof pair[0]);
}

static vpmm_status audit_pages(struct auditor *auditor)
{
    vpmm_status status = VPMM_SUCCESS;
    uint32_t chunks = load_acquire_u32(&auditor->arena->space.units.chunks);
    for (uint32_t chunk = 0; chunk < chunks && status == VPMM_SUCCESS; chunk++)
        status = check_chunk(auditor, chunk);
    return status == VPMM_SUCCESS ? check_page_tally(auditor) : status;
}

static vpmm_status audit_cut(struct auditor *auditor)
{
    vpmm_status status = VPMM_SUCCESS;
    uint32_t chunks = load_acquire_u32(&auditor->arena->cut.units.chunks);
    for (uint32_t chunk = 0; chunk < chunks && status == VPMM_SUCCESS; chunk++)
        status = check_cut_chunk(auditor, chunk);
    return status == VPMM_SUCCESS ? check_cut_tally(auditor) : status;
}

/* What fence.h says of a record's numbers; and no call that was given a stream is under way. */
static vpmm_status check_streams(const struct arena *arena)
{
    for (uint32_t slot = 1; slot < load_acquire_u32(&arena->streams.slots); slot++) {
        const struct stream *stream = stream_at(&arena->streams, slot);
        uint64_t completed = load_sc_u64(&stream->completed), recorded = load_relaxed_u64(&stream->recorded);
        uint64_t published = load_sc_u64(&stream->published);
        if (completed > recorded || recorded > published)
            return fail(VPMM_ERROR_INVALID_VALUE,
                        "audit: stream %" PRIu32 " has completed %" PRIu64 ", recorded %" PRIu64
                        " and published %" PRIu64,
                        slot, completed, recorded, published);
        if (stream_given(stream))
            return fail(VPMM_ERROR_INVALID_VALUE, "audit: stream %" PRIu32 " has %" PRIu32 " calls under way", slot,
                        stream_given(stream));
    }
    return VPMM_SUCCESS;
}

vpmm_status audit(struct arena *arena)
{
    struct auditor pages = {.arena = arena, .space = &arena->space}, cut = {.arena = arena, .space = &arena->cut};
    vpmm_status status = audit_pages(&pages);
    if (status == VPMM_SUCCESS && arena->cut.page_subpages)
        status = audit_cut(&cut);
    if (status == VPMM_SUCCESS)
        status = check_streams(arena);
    if (status != VPMM_SUCCESS)
        return status;
    uint64_t ending = (pages.tally.ending << arena->space.units.unit_shift) + cut.tally.ending * SUBPAGE_BYTES +
                      cut.tally.slice_ending_bytes;
    status = check_equal("ending bytes", ending, stats_sum(arena->stats, STAT_ending_bytes));
    if (status != VPMM_SUCCESS)
        return status;
    return check_equal("requested bytes", pages.tally.requested + cut.tally.requested,
                       stats_sum(arena->stats, STAT_requested_bytes) - stats_sum(arena->stats, STAT_async_bytes));
}

/* ---- the map ---- */

/* Of a space, from one unit to another. Between two states, merged or split at this moment, a unit is passed over. */
static void dump_span(const struct space *space, uint64_t unit, uint64_t end, const char brackets[2], FILE *file)
{
    static const char *const sign[] = {
        [UNIT_LIVE] = "",    [UNIT_USED] = "",    [UNIT_NOTING] = "", [UNIT_CUT] = "",   [UNIT_FREE] = "-",
        [UNIT_CACHED] = "-", [UNIT_ENDING] = "-", [UNIT_OWN] = "?",   [UNIT_HOLE] = "*", [UNIT_ZOMBIE] = "~",
    };
    fprintf(file, "0x%llx ", (unsigned long long)unit_address(&space->units, unit));
    for (uint64_t first = unit, units; unit < end; unit += units) {
        uint64_t word = load_acquire_u64(&unit_at(&space->units, unit)->word);
        units = space_to_next(space, first, unit, word);
        bool is_slab = word_state(word) == UNIT_CUT && space->level == SPACE_SUBPAGES;
        if (word_state(word) != UNIT_NONE)
            fprintf(file, "%c%s%" PRIu64 "%c", brackets[0], is_slab ? "/" : sign[word_state(word)], units, brackets[1]);
    }
    fputc('\n', file);
}

/* A line for each run of cut pages of a chunk. */
static void dump_cut(const struct arena *arena, uint32_t chunk, FILE *file)
{
    struct cut_run run = {.chunk = chunk};
    while (cut_next_run(arena, &run))
        dump_span(&arena->cut, run.subpage, run.end, "()", file);
}

/* A line for each class that has slabs. */
static void dump_slabs(const struct slabs *slabs, FILE *file)
{
    uint64_t count[SLICE_CLASSES] = {0}, free[SLICE_CLASSES] = {0};
    for (uint32_t i = 0, n = load_relaxed_u32(&slabs->records); i < n && i < SLABS_MAX; i++) {
        const struct slab *slab = load_acquire_ptr(&slabs->record[i]);
        uint64_t word = slab ? load_sc_u64(&slab->word) : 0;
        if (!slab_owner(word))
            continue; /* a record of no slab */
        count[load_relaxed_u32(&slab->class)]++;
        free[load_relaxed_u32(&slab->class)] += (unsigned)__builtin_popcount(slab_free_bits(word));
    }
    for (unsigned class = 0; class < SLICE_CLASSES; class ++)
        if (count[class])
            fprintf(file, "slices of %5" PRIu32 " bytes: %" PRIu64 " slabs, %" PRIu64 " of %" PRIu64 " slices free\n",
                    slice_size[class].bytes, count[class], free[class],
                    count[class] * slab_slices(slice_size[class].kind));
}

void dump_regions(struct arena *arena, FILE *file)
{
    for (uint32_t chunk = 0; chunk < load_acquire_u32(&arena->space.units.chunks); chunk++) {
        uint64_t page = (uint64_t)chunk << arena->space.units.chunk_shift;
        dump_span(&arena->space, page, page + arena->space.units.chunk_units, "[]", file);
    }
    if (!stats_sum(arena->stats, STAT_slab_bytes))
        return;
    fprintf(file, "of live pages, those that are cut, in subpages of %d bytes: (X) live, (-X) free, (/X) a slab\n",
            SUBPAGE_BYTES);
    for (uint32_t chunk = 0; chunk < load_acquire_u32(&arena->cut.units.chunks); chunk++)
        dump_cut(arena, chunk, file);
    dump_slabs(&arena->slabs, file);
}
