#include "remap/park.h"

#include "base/assert.h"
#include "base/clock.h"
#include "base/lock.h"
#include "driver/burst.h"
#include "remap/extents.h"
#include "remap/mapping.h"
#include "remap/zombie.h"
#include "space/context.h"

vpmm_status parked_status(void)
{
    return fail(VPMM_ERROR_NOT_SUPPORTED, "vpmm_malloc: the pool is parked, its memory the device's: vpmm_wake first");
}

static uint64_t bytes_of(const struct arena *arena, const struct extent *extent)
{
    return (uint64_t)extent->pages << arena->space.units.unit_shift;
}

/* ---- one extent ---- */

static void become_parked(struct arena *arena, struct extent *extent)
{
    extent->memory = EXTENT_PARKED;
    extent->handle = 0;
    stats_sub(arena->stats, STAT_mapped_bytes, bytes_of(arena, extent));
    stats_add(arena->stats, STAT_parked_bytes, bytes_of(arena, extent));
    stats_count(arena->stats, STAT_extents_released);
}

/* It has a handle again, and is UNSURE until it is known to be mapped. */
static void become_held(struct arena *arena, struct extent *extent)
{
    extent->memory = EXTENT_UNSURE;
    stats_sub(arena->stats, STAT_parked_bytes, bytes_of(arena, extent));
    stats_add(arena->stats, STAT_mapped_bytes, bytes_of(arena, extent));
    stats_count(arena->stats, STAT_extents_created);
    stats_add(arena->stats, STAT_pages_created, extent->pages);
    stats_note_peak_mapped(arena->stats);
}

/* To PARKED. False: the driver refuses, and it is UNSURE: what was refused may have been done all the same. */
static bool park_extent(struct arena *arena, struct extent *extent, uint64_t page)
{
    vpmm_assert(peek_u32(&extent->holders) == 1);
    if (extent->memory == EXTENT_PARKED)
        return true;
    extent->memory = EXTENT_UNSURE;
    if (mapping_unmap(arena, page, extent->pages) != CUDA_SUCCESS) {
        stats_count(arena->stats, STAT_unmap_failures);
        return false;
    }
    if (mapping_release(arena, extent) != CUDA_SUCCESS)
        return false;
    become_parked(arena, extent);
    return true;
}

/* To MAPPED. False: the driver refuses, and the extent is PARKED or UNSURE. */
static bool wake_extent(struct arena *arena, struct extent *extent, uint64_t page, const struct access_list *list)
{
    if (!park_extent(arena, extent, page)) /* the only way to know what it has */
        return false;
    CUresult result = mapping_create(arena, extent);
    if (result == CUDA_SUCCESS || extent->handle)
        become_held(arena, extent);
    if (result != CUDA_SUCCESS || mapping_map(arena, page, extent) != CUDA_SUCCESS ||
        mapping_allow(arena, page, extent->pages, list) != CUDA_SUCCESS)
        return false;
    extent->memory = EXTENT_MAPPED;
    return true;
}

/* ---- all extents ---- */

struct step {
    const struct access_list *rights; /* to wake with; NULL: to park */
    struct burst burst;
};

static bool step_one(struct arena *arena, struct extent *extent, uint64_t page, void *data)
{
    struct step *step = data;
    bool done = step->rights ? wake_extent(arena, extent, page, step->rights) : park_extent(arena, extent, page);
    burst_breathe(&step->burst);
    return done;
}

/* Under the pass lock. `rights` NULL: all that can be is parked. Else the first refusal ends it. */
static bool step_all(struct arena *arena, const struct access_list *rights)
{
    struct step step = {.rights = rights};
    burst_begin(&step.burst);
    bool all = extents_visit(arena, rights != NULL, step_one, &step);
    burst_end(&step.burst);
    return all;
}

/* ---- the pool ---- */

/* No build claims anything once this has returned. */
static void end_builds(struct arena *arena)
{
    enum { PAUSE_US = 20 };
    lock_take(&arena->plan_lock);
    store_relaxed_u32(&arena->parked, 1); /* builds look under this lock; a malloc that misses it came before */
    pthread_mutex_unlock(&arena->plan_lock);
    while (load_sc_u32(&arena->builders))
        clock_sleep_us(PAUSE_US);
}

vpmm_status park_cannot_begin(void)
{
    return fail(VPMM_ERROR_BUSY, "the device cannot be waited for now, so nothing has changed: %s", vpmm_last_error());
}

static vpmm_status park_all(struct arena *arena)
{
    lock_take(&arena->pass_lock);
    end_builds(arena);
    bool all = step_all(arena, NULL);
    zombies_retire(arena, false); /* what a build that unwound could not give back */
    all &= !zombies_wait(arena);
    vpmm_status status =
        all ? VPMM_SUCCESS : device_failed(arena->device, "parking a pool, the rest of which is parked");
    pthread_mutex_unlock(&arena->pass_lock);
    return status;
}

/* A wake that comes while the device is waited for is after this, not before. */
vpmm_status park(struct arena *arena)
{
    vpmm_assert(arena->is_graph);
    lock_take(&arena->park_lock);
    vpmm_status status = streams_wait_for_all(&arena->streams) == VPMM_SUCCESS ? park_all(arena) : park_cannot_begin();
    pthread_mutex_unlock(&arena->park_lock);
    return status;
}

/* The words are those of the first refusal. */
static vpmm_status park_again(struct arena *arena)
{
    char words[256];
    vpmm_status status = device_failed(arena->device, "waking a pool");
    snprintf(words, sizeof words, "%s", vpmm_last_error());
    step_all(arena, NULL);
    return fail(status, "%s; the pool is parked as before", words);
}

vpmm_status park_wake(struct arena *arena)
{
    vpmm_status status = VPMM_SUCCESS;
    lock_take(&arena->park_lock);
    lock_take(&arena->pass_lock);
    struct access_list list = access_read(&arena->access); /* it does not change under the pass lock */
    if (arena_is_parked(arena)) {
        context_keep_missing_blocks(&arena->streams); /* else it could not be parked again on a device that it fills */
        if (!step_all(arena, &list))
            status = park_again(arena);
        else
            store_release_u32(&arena->parked, 0); /* pairs with arena_is_parked's acquire */
    }
    pthread_mutex_unlock(&arena->pass_lock);
    pthread_mutex_unlock(&arena->park_lock);
    return status;
}
