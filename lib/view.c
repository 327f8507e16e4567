#include "view.h"

#include <stdlib.h>

/* Room for one more element; keeps the array if there is none to be had. */
static bool room(void **array, size_t *capacity, size_t used, size_t element)
{
    if (used < *capacity)
        return true;
    size_t wanted = *capacity ? *capacity * 2 : 64;
    void *larger = realloc(*array, wanted * element);
    if (!larger)
        return false;
    *array = larger;
    *capacity = wanted;
    return true;
}

static bool add_found(const struct found *found, void *data)
{
    struct view *view = data;
    if (!room((void **)&view->found, &view->found_capacity, view->runs, sizeof *view->found)) {
        view->out_of_memory = true;
        return false;
    }
    view->found[view->runs++] = *found;
    return true;
}

struct waitable {
    struct view *view;
    const struct arena *arena;
};

static bool add_waitable(const struct found *found, void *data)
{
    const struct waitable *waitable = data;
    struct fence fence = page_fence(page_at(&waitable->arena->pages, found->page));
    return !fence_waitable(&waitable->arena->streams, fence) || add_found(found, waitable->view);
}

static bool add_hole(const struct found *found, void *data)
{
    struct view *view = data;
    if (!room((void **)&view->hole, &view->hole_capacity, view->holes, sizeof *view->hole)) {
        view->out_of_memory = true;
        return false;
    }
    view->hole[view->holes++] = (struct policy_hole){found->page, found->pages};
    return true;
}

static int by_page(const void *one, const void *other)
{
    /* Of struct found and of struct policy_hole the page is the first member. */
    uint64_t a = *(const uint64_t *)one, b = *(const uint64_t *)other;
    return a < b ? -1 : a > b;
}

static uint32_t cut_off(uint64_t pages) { return pages > UINT32_MAX ? UINT32_MAX : (uint32_t)pages; }

/* The extents that lie wholly inside the run. */
static bool add_extents(struct view *view, const struct arena *arena, struct policy_run *run, uint32_t index)
{
    uint64_t end = run->page + run->pages;
    run->first_extent = (uint32_t)view->extents;
    for (uint64_t page = run->page; page < end;) {
        const struct extent *extent = page_extent(page_at(&arena->pages, page));
        if (!extent) /* the run was handed out, freed and built over since it was seen: its claim will fail */
            break;
        uint64_t first = load_relaxed_u64(&extent->page);
        if (first + extent->pages <= page)
            break;
        if (first >= run->page && first + extent->pages <= end) {
            if (!room((void **)&view->extent, &view->extent_capacity, view->extents, sizeof *view->extent))
                return false;
            view->extent[view->extents++] = (struct policy_extent){first, extent->pages, index};
        }
        page = first + extent->pages;
    }
    run->extents = (uint32_t)view->extents - run->first_extent;
    return true;
}

static bool add_runs(struct view *view, struct arena *arena)
{
    for (size_t i = 0; i < view->runs; i++) {
        if (!room((void **)&view->run, &view->run_capacity, i, sizeof *view->run))
            return false;
        const struct found *found = &view->found[i];
        struct policy_run *run = &view->run[i];
        bool at_end = found->pages == pages_to_chunk_end(&arena->pages, found->page);
        *run = (struct policy_run){.page = found->page,
                                   .pages = (uint32_t)found->pages,
                                   .hole_before = cut_off(hole_until(arena, found->page)),
                                   .hole_after = at_end ? 0 : cut_off(hole_from(arena, found->page + found->pages))};
        if (!add_extents(view, arena, run, (uint32_t)i))
            return false;
    }
    return true;
}

/* A region that changed while it was looked for may have been met twice. */
static void drop_doubles(struct view *view)
{
    size_t kept = 0;
    for (size_t i = 0; i < view->runs; i++)
        if (!kept || view->found[i].page >= view->found[kept - 1].page + view->found[kept - 1].pages)
            view->found[kept++] = view->found[i];
    view->runs = kept;
}

bool view_make(struct view *view, struct arena *arena, const struct stream *stream, enum view_reach reach)
{
    view->runs = view->extents = view->holes = 0;
    view->out_of_memory = false;
    struct waitable waitable = {view, arena};
    hints_each(&arena->passed, &arena->pages, PAGE_FREE, add_found, view);
    if (reach == VIEW_USABLE)
        hints_each(&stream->free, &arena->pages, PAGE_FREE, add_found, view);
    for (uint32_t slot = 1; reach == VIEW_ALL && slot < load_acquire_u32(&arena->streams.slots); slot++)
        hints_each(&stream_at(&arena->streams, slot)->free, &arena->pages, PAGE_FREE, add_waitable, &waitable);
    hints_each(&arena->holes, &arena->pages, PAGE_HOLE, add_hole, view);
    if (view->out_of_memory)
        return false;
    if (view->runs)
        qsort(view->found, view->runs, sizeof *view->found, by_page);
    if (view->holes)
        qsort(view->hole, view->holes, sizeof *view->hole, by_page);
    drop_doubles(view);
    return add_runs(view, arena);
}

void view_free(struct view *view)
{
    free(view->found);
    free(view->run);
    free(view->extent);
    free(view->hole);
    *view = (struct view){0};
}

struct policy_view view_for_policy(const struct view *view, bool with_runs, uint64_t mapped_pages,
                                   uint64_t creatable_pages)
{
    return (struct policy_view){.run = view->run,
                                .runs = with_runs ? view->runs : 0,
                                .extent = view->extent,
                                .extents = with_runs ? view->extents : 0,
                                .hole = view->hole,
                                .holes = view->holes,
                                .mapped_pages = mapped_pages,
                                .creatable_pages = creatable_pages};
}
