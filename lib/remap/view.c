#include "remap/view.h"

#include "base/assert.h"
#include "base/radix.h"
#include "remap/hole.h"

#include <stdlib.h>

/* Room for so many elements; keeps the array if there is none to be had. */
static bool room_for(void **array, size_t *capacity, size_t elements, size_t element)
{
    size_t wanted = *capacity ? *capacity : 64;
    if (elements <= *capacity)
        return true;
    while (wanted < elements)
        wanted *= 2;
    void *larger = realloc(*array, wanted * element);
    if (!larger)
        return false;
    *array = larger;
    *capacity = wanted;
    return true;
}

static bool room(void **array, size_t *capacity, size_t used, size_t element)
{
    return room_for(array, capacity, used + 1, element);
}

struct collector {
    struct view *view;
    struct arena *arena;
    const struct stream *stream;
    enum view_reach reach;
    bool (*visit)(const struct seen_region *, void *); /* what is free; its data is this */
    uint64_t least;                                    /* pages of what is visited */
    uint64_t wanted, kept, enough;                     /* pages, where each is kept as it is visited: useful ones */
};

/* What the stream itself freed it need not wait for, also where nobody could: others do not mark a default stream. */
static bool fence_in_reach(const struct collector *collector, struct fence fence)
{
    const struct streams *streams = &collector->arena->streams;
    bool own = collector->stream && collector->reach != VIEW_PASSED;
    return (own && fence_usable(streams, fence, collector->stream)) ||
           (collector->reach == VIEW_ALL ? fence_seems_waitable(streams, fence) : fence_passed(streams, fence));
}

/* By the region's own fence, not by where its hint was: see region.c. What of it is in reach; pages 0: nothing. */
static struct view_region in_reach(const struct collector *collector, const struct seen_region *found)
{
    struct fence fence = unit_fence(unit_at(&collector->arena->space.units, found->first));
    struct view_region region = {.page = found->first, .pages = found->units, .found = *found};
    bool whole = fence_in_reach(collector, fence);
    region.part = !whole;
    if (region.part)
        region_longest_part(&collector->arena->space, found, &region.page, &region.pages);
    return region;
}

/* What add_run will look at, when all regions are known: the descriptors around the region, and its first extent. */
static void prefetch_around(const struct units *units, const struct view_region *region)
{
    uint64_t end = region->page + region->pages;
    __builtin_prefetch(load_relaxed_ptr(&unit_at(units, region->page)->extent));
    if (unit_index(units, region->page))
        __builtin_prefetch(unit_at(units, region->page - 1));
    if (unit_index(units, end))
        __builtin_prefetch(unit_at(units, end));
}

static bool add_region(const struct seen_region *found, void *data)
{
    const struct collector *collector = data;
    struct view *view = collector->view;
    struct view_region region = in_reach(collector, found);
    if (!region.pages)
        return true;
    if (!room((void **)&view->met, &view->met_capacity, view->regions, sizeof *view->met)) {
        view->out_of_memory = true;
        return false;
    }
    view->met[view->regions++] = region;
    prefetch_around(&collector->arena->space.units, &region);
    return true;
}

/* They are in reach, as they were when they were claimed. */
static bool add_kept(struct collector *collector)
{
    struct view *view = collector->view;
    for (size_t i = 0; i < view->keeps; i++) {
        const struct region *kept = &view->kept[i];
        if (!kept->units)
            continue;
        if (!room((void **)&view->met, &view->met_capacity, view->regions, sizeof *view->met))
            return false;
        view->met[view->regions++] =
            (struct view_region){.page = kept->first, .pages = kept->units, .kept = (uint32_t)i + 1};
    }
    return true;
}

static bool add_hole(const struct seen_region *found, void *data)
{
    struct view *view = data;
    if (!room((void **)&view->hole, &view->hole_capacity, view->holes, sizeof *view->hole)) {
        view->out_of_memory = true;
        return false;
    }
    view->hole[view->holes++] = (struct policy_hole){found->first, found->units};
    return true;
}

static int by_page(const void *one, const void *other)
{
    const struct policy_hole *a = one, *b = other;
    return a->page < b->page ? -1 : a->page > b->page;
}

static uint32_t cut_off(uint64_t pages)
{
    return pages > UINT32_MAX ? UINT32_MAX : (uint32_t)pages;
}

/* The next extent from *page on that lies wholly in [begin, end), of free pages as they were seen. NULL: none. */
static const struct extent *next_whole_extent(const struct units *units, uint64_t begin, uint64_t end, uint64_t *page)
{
    while (*page < end) {
        const struct extent *extent = unit_extent(unit_at(units, *page));
        vpmm_assert(extent); /* nobody moves them: that takes a claim under the plan lock */
        uint64_t first = load_relaxed_u64(&extent->page), next = first + extent->pages;
        vpmm_assert(next > *page);
        *page = next;
        if (first >= begin && next <= end)
            return extent;
    }
    return NULL;
}

/* The extents that lie wholly inside the run, and may move. */
static bool add_extents(struct view *view, const struct arena *arena, struct policy_run *run, uint32_t index)
{
    uint64_t page = run->page, end = arena->is_graph ? page : page + run->pages;
    const struct extent *extent;
    run->first_extent = (uint32_t)view->extents;
    while ((extent = next_whole_extent(&arena->space.units, run->page, end, &page))) {
        if (!room((void **)&view->extent, &view->extent_capacity, view->extents, sizeof *view->extent))
            return false;
        view->extent[view->extents++] = (struct policy_extent){page - extent->pages, extent->pages, index};
    }
    run->extents = (uint32_t)view->extents - run->first_extent;
    return true;
}

/* Whether the stream need not wait for it: what it must wait for is a run by itself. */
static bool is_usable(const struct view *view, const struct arena *arena, const struct stream *stream,
                      const struct view_region *region)
{
    struct fence fence = region->kept ? view->kept[region->kept - 1].fence
                                      : unit_fence(unit_at(&arena->space.units, region->found.first));
    return region->part ||
           (stream ? fence_usable(&arena->streams, fence, stream) : fence_passed(&arena->streams, fence));
}

/* How many regions from the ith on, which is usable without waiting, adjoin and are so too; at least 1. */
static uint32_t count_adjoining(const struct view *view, const struct arena *arena, const struct stream *stream,
                                size_t i)
{
    uint32_t n = 1;
    while (i + n < view->regions &&
           view->region[i + n].page == view->region[i + n - 1].page + view->region[i + n - 1].pages &&
           is_usable(view, arena, stream, &view->region[i + n]))
        n++;
    return n;
}

static bool add_run(struct view *view, struct arena *arena, size_t first, uint32_t regions, bool waits)
{
    const struct view_region *last = &view->region[first + regions - 1];
    if (!room((void **)&view->run, &view->run_capacity, view->runs, sizeof *view->run) ||
        !room((void **)&view->members, &view->members_capacity, view->runs, sizeof *view->members))
        return false;
    uint64_t page = view->region[first].page, end = last->page + last->pages;
    bool at_end = last->pages == units_to_chunk_end(&arena->space.units, last->page);
    view->members[view->runs] = (struct view_members){(uint32_t)first, regions};
    view->run[view->runs] = (struct policy_run){.page = page,
                                                .pages = (uint32_t)(end - page),
                                                .hole_before = cut_off(hole_until(arena, page)),
                                                .hole_after = at_end ? 0 : cut_off(hole_from(arena, end)),
                                                .waits = waits};
    view->runs++;
    return add_extents(view, arena, &view->run[view->runs - 1], (uint32_t)view->runs - 1);
}

static bool add_runs(struct view *view, struct arena *arena, const struct stream *stream)
{
    uint32_t regions;
    for (size_t i = 0; i < view->regions; i += regions) {
        bool waits = !is_usable(view, arena, stream, &view->region[i]);
        regions = waits ? 1 : count_adjoining(view, arena, stream, i);
        if (!add_run(view, arena, i, regions, waits))
            return false;
    }
    return true;
}

static bool claim_member(struct view *view, const struct view_region *seen, struct arena *arena, struct region *region)
{
    if (seen->kept) {
        *region = view->kept[seen->kept - 1];
        view->kept[seen->kept - 1].units = 0;
        return true;
    }
    if (!region_claim(&arena->space, &seen->found, region))
        return false;
    if (seen->part)
        *region = region_take_out(&arena->space, *region, seen->page, seen->pages);
    return true;
}

bool view_claim_run(struct view *view, struct arena *arena, uint32_t run, struct region *region)
{
    const struct view_members *members = &view->members[run];
    struct region next;
    region->units = 0;
    if (!claim_member(view, &view->region[members->first], arena, region))
        return false;
    for (uint32_t i = 1; i < members->regions; i++) {
        if (!claim_member(view, &view->region[members->first + i], arena, &next))
            return false;
        *region = region_unite(&arena->space, *region, next);
    }
    return true;
}

bool view_may_keep(struct view *view, size_t regions)
{
    return room_for((void **)&view->kept, &view->keep_capacity, view->keeps + regions, sizeof *view->kept);
}

void view_keep(struct view *view, struct region region)
{
    vpmm_assert(region.units && view->keeps < view->keep_capacity);
    view->kept[view->keeps++] = region;
}

bool view_claim_and_keep(struct view *view, struct arena *arena, uint32_t run)
{
    struct region region;
    bool whole = view_claim_run(view, arena, run, &region);
    if (region.units)
        view_keep(view, region);
    return whole;
}

void view_let_go(struct view *view, struct arena *arena)
{
    for (size_t i = 0; i < view->keeps; i++)
        if (view->kept[i].units)
            region_publish(&arena->space, view->kept[i]);
    view->keeps = 0;
}

/*
 * By page, which is a hint's and so of 32 bits, from the order in which they were met. What changed while it was looked
 * for may have been met twice.
 */
static bool sort_regions(struct view *view)
{
    size_t met = view->regions;
    if (!room_for((void **)&view->place, &view->place_capacity, 2 * met, sizeof *view->place) ||
        !room_for((void **)&view->region, &view->region_capacity, met, sizeof *view->region))
        return false;
    for (size_t i = 0; i < met; i++)
        view->place[i] = radix_key((uint32_t)view->met[i].page, (uint32_t)i);
    if (met) /* there may be no array yet */
        radix_sort(view->place, view->place + met, met);
    view->regions = 0;
    for (size_t i = 0; i < met; i++) {
        const struct view_region *next = &view->met[radix_number(view->place[i])];
        const struct view_region *last = view->regions ? &view->region[view->regions - 1] : NULL;
        if (!last || next->page >= last->page + last->pages)
            view->region[view->regions++] = *next;
    }
    return true;
}

static void add_holes(struct view *view, const struct arena *arena, uint64_t pages)
{
    const struct units *units = &arena->space.units;
    uint64_t longest = hints_longest(&arena->holes, units, UNIT_HOLE);
    if (longest)
        hints_each_from(&arena->holes, units, UNIT_HOLE, longest < pages ? longest : pages, add_hole, view);
}

static void visit_regions_of(const struct hints *free, bool every_bin, struct collector *collector)
{
    const struct units *units = &collector->arena->space.units;
    if (every_bin)
        hints_each(free, units, UNIT_FREE, collector->visit, collector);
    else
        hints_each_from(free, units, UNIT_FREE, collector->least, collector->visit, collector);
}

static void visit_free_regions(bool every_bin, struct collector *collector)
{
    const struct arena *arena = collector->arena;
    const struct stream *stream = collector->stream;
    enum view_reach reach = collector->reach;
    visit_regions_of(&arena->space.passed, every_bin, collector);
    bool own_first = stream && reach != VIEW_PASSED; /* which need not be waited for */
    if (own_first)
        visit_regions_of(&stream->free[SPACE_PAGES], every_bin, collector);
    bool others = reach == VIEW_ALL || load_relaxed_u32(&arena->space.mixed);
    for (uint32_t slot = 1, slots = load_acquire_u32(&arena->streams.slots); others && slot < slots; slot++) {
        if (slot + 1 < slots)
            hints_prefetch(&stream_at(&arena->streams, slot + 1)->free[SPACE_PAGES], every_bin);
        if (!own_first || slot != stream->slot)
            visit_regions_of(&stream_at(&arena->streams, slot)->free[SPACE_PAGES], every_bin, collector);
    }
}

/*
 * What a plan can make of so many pages from `page` on, which are free as far as was seen: all where they serve as they
 * lie, else the handles that lie wholly in them.
 */
static uint64_t useful_pages(const struct collector *collector, uint64_t page, uint64_t pages)
{
    uint64_t begin = page, end = page + pages, useful = 0;
    const struct extent *extent;
    if (pages >= collector->wanted || collector->arena->is_graph)
        return pages;
    while ((extent = next_whole_extent(&collector->arena->space.units, begin, end, &page)))
        useful += extent->pages;
    return useful;
}

static bool has_enough(const struct collector *collector)
{
    return collector->kept >= collector->enough || collector->view->out_of_memory;
}

/* What is of no use is left to others, but where all is to be kept: a run of it can be extended. */
static bool keep_region(const struct seen_region *found, void *data)
{
    struct collector *collector = data;
    struct view *view = collector->view;
    struct view_region seen = in_reach(collector, found);
    struct region region;
    if (has_enough(collector))
        return false;
    uint64_t useful = useful_pages(collector, seen.page, seen.pages);
    view->out_of_memory = !view_may_keep(view, 1);
    if (!view->out_of_memory && seen.pages && (useful || collector->enough == UINT64_MAX) &&
        claim_member(view, &seen, collector->arena, &region)) {
        view_keep(view, region);
        collector->kept += useful;
    }
    return !has_enough(collector);
}

bool view_keep_what_is_free(struct view *view, struct arena *arena, const struct stream *stream, enum view_reach reach,
                            bool every_bin, uint64_t wanted, uint64_t enough)
{
    enum { SHORTER = 4 };
    struct collector collector = {.view = view,
                                  .arena = arena,
                                  .stream = stream,
                                  .reach = reach,
                                  .visit = keep_region,
                                  .wanted = wanted,
                                  .enough = enough};
    view->out_of_memory = false;
    for (size_t i = 0; i < view->keeps; i++)
        collector.kept += useful_pages(&collector, view->kept[i].first, view->kept[i].units);
    for (uint64_t least = wanted; least && !has_enough(&collector); least = least > 1 ? (least - 1) / SHORTER + 1 : 0) {
        collector.least = least;
        visit_free_regions(every_bin && least == 1, &collector);
    }
    return !view->out_of_memory;
}

bool view_make(struct view *view, struct arena *arena, const struct stream *stream, enum view_reach reach,
               bool every_bin, uint64_t hole_pages)
{
    view->regions = view->runs = view->extents = view->holes = 0;
    view->out_of_memory = false;
    struct collector collector = {
        .view = view, .arena = arena, .stream = stream, .reach = reach, .visit = add_region, .least = 1};
    if (reach != VIEW_KEPT)
        visit_free_regions(every_bin, &collector);
    add_holes(view, arena, hole_pages);
    if (view->out_of_memory || !add_kept(&collector))
        return false;
    if (view->holes)
        qsort(view->hole, view->holes, sizeof *view->hole, by_page);
    return sort_regions(view) && add_runs(view, arena, stream);
}

void view_free(struct view *view)
{
    free(view->met);
    free(view->place);
    free(view->region);
    free(view->members);
    free(view->run);
    free(view->extent);
    free(view->hole);
    free(view->kept);
    *view = (struct view){0};
}

struct policy_view view_for_policy(const struct view *view)
{
    return (struct policy_view){.run = view->run,
                                .runs = view->runs,
                                .extent = view->extent,
                                .extents = view->extents,
                                .hole = view->hole,
                                .holes = view->holes};
}
