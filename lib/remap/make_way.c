#include "remap/make_way.h"

#include "base/lock.h"
#include "remap/build.h"
#include "remap/give_back.h"
#include "remap/view.h"
#include "remap/zombie.h"

/* A look at the free runs, in ascending order. */
struct look {
    uint64_t pages, creatable; /* what is asked for, and what could be made for it */
    uint64_t before, stuck;    /* the latest stuck pages, 0: none yet, and the gap before them */
    uint64_t gap;              /* what follows them so far */
    bool fits;
};

/* The gap has ended. Pages fit that are made beside the stuck ones, or in the gap alone. */
static void end_gap(struct look *look)
{
    uint64_t room = look->gap > look->before ? look->gap : look->before;
    uint64_t missing = look->pages > look->stuck ? look->pages - look->stuck : 0;
    look->fits |= missing <= room && missing <= look->creatable;
}

static void meet_stuck(struct look *look, uint64_t pages)
{
    if (!pages)
        return;
    end_gap(look);
    look->before = look->gap;
    look->stuck = pages;
    look->gap = 0;
}

static void meet_run(struct look *look, const struct view *view, const struct policy_run *run)
{
    uint64_t page = run->page;
    for (uint32_t i = run->first_extent; i < run->first_extent + run->extents; i++) {
        meet_stuck(look, view->extent[i].page - page);
        look->gap += view->extent[i].pages;
        page = view->extent[i].page + view->extent[i].pages;
    }
    meet_stuck(look, run->page + run->pages - page);
    look->gap += run->hole_after;
}

static uint64_t free_handles(const struct view *view)
{
    uint64_t pages = 0;
    for (size_t i = 0; i < view->extents; i++)
        pages += view->extent[i].pages;
    return pages;
}

/* Whether the request fits when every handle of the view is a hole, and the device has its memory. */
static bool fits_then(const struct view *view, uint64_t pages, uint64_t creatable)
{
    struct look look = {.pages = pages, .creatable = creatable};
    uint64_t end = UINT64_MAX; /* of the run before, with the hole behind it */
    for (size_t i = 0; i < view->holes; i++)
        look.fits |= view->hole[i].pages >= pages && creatable >= pages;
    for (size_t i = 0; i < view->runs && !look.fits; i++) {
        const struct policy_run *run = &view->run[i];
        if (run->page != end) {
            end_gap(&look);
            look.before = look.stuck = 0;
            look.gap = run->hole_before;
        }
        meet_run(&look, view, run);
        end = run->page + run->pages + run->hole_after;
    }
    end_gap(&look);
    return look.fits;
}

/* Handles are whole steps (policy.h). */
static uint64_t in_steps(const struct arena *arena, uint64_t pages)
{
    return pages - pages % arena->policy.step;
}

/* What the device says that it has free, in whole pages. False: it does not say. */
static bool ask_for_room(const struct arena *arena, struct device_room *room)
{
    size_t bytes;
    room->releases = load_relaxed_u64(&arena->releases); /* what is given back from here on makes it stale */
    if (device_free_memory(arena->device, &bytes) != CUDA_SUCCESS)
        return false;
    room->pages = bytes >> arena->space.units.unit_shift;
    return true;
}

/* Others may have freed it since the request has failed. */
static bool is_free(const struct view *view, uint64_t pages)
{
    bool is_free = false;
    for (size_t i = 0; i < view->runs; i++)
        is_free |= view->run[i].pages >= pages;
    return is_free;
}

/*
 * Under the plan lock: whether the request fits, and how many handles are to go for that. No host memory to look is no
 * reason to give anything back.
 */
static bool look_at_what_is_free(struct arena *arena, uint64_t pages, struct device_room room, uint64_t *handles)
{
    const struct view *view = arena->view;
    if (!view_make(arena->view, arena, NULL, VIEW_PASSED, true, UINT64_MAX))
        return false;
    if (is_free(view, pages))
        return true;
    *handles = view->extents;
    return fits_then(view, pages, in_steps(arena, build_creatable(arena, room, free_handles(view))));
}

/* With the turn: what a build has made, and may give back, is else not the device's. */
static bool helps(struct arena *arena, uint64_t pages, struct device_room *room, uint64_t *handles)
{
    struct turn_place place;
    turn_take(&arena->turn, &place);
    bool fits = ask_for_room(arena, room);
    if (fits) {
        room->releases = load_relaxed_u64(&arena->releases); /* it says what there is at least, if not all */
        lock_take(&arena->plan_lock);
        fits = look_at_what_is_free(arena, pages, *room, handles);
        pthread_mutex_unlock(&arena->plan_lock);
    }
    turn_leave(&arena->turn, &place);
    return fits;
}

/* Under the pass lock. Old addresses of handles that have moved since the last pass are no holes yet. */
static bool give_back_what_helps(struct arena *arena, uint64_t pages, struct device_room *room)
{
    uint64_t handles = 0, released = 0;
    zombies_retire(arena, false);
    if (!helps(arena, pages, room, &handles))
        return false;
    if (handles)
        give_back_down_to(arena, 0, handles, &released);
    if (!ask_for_room(arena, room))
        *room = DEVICE_ROOM_UNKNOWN;
    return true;
}

bool make_way(struct arena *arena, uint64_t pages, struct device_room *room)
{
    struct device_scope scope;
    if (device_enter(arena->device, &scope) != VPMM_SUCCESS)
        return false;
    lock_take(&arena->pass_lock);
    bool is_made = give_back_what_helps(arena, pages, room);
    pthread_mutex_unlock(&arena->pass_lock);
    device_leave(arena->device, &scope);
    return is_made;
}
