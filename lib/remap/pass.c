#include "remap/pass.h"

#include "base/clock.h"
#include "base/lock.h"
#include "cache/front.h"
#include "remap/cut.h"
#include "remap/decay.h"
#include "remap/ending.h"
#include "remap/give_back.h"
#include "remap/zombie.h"
#include "space/context.h"
#include "space/region.h"

void pass_regions(struct arena *arena, bool any)
{
    for (uint32_t slot = 1, n = load_acquire_u32(&arena->streams.slots); slot < n; slot++) {
        struct stream *stream = stream_at(&arena->streams, slot);
        uint64_t completed = load_sc_u64(&stream->completed);
        if (completed == arena->note[slot].moved_until)
            continue; /* what is published behind it later sees that it has passed: see region_publish */
        arena->note[slot].moved_until = completed;
        region_pass(&arena->space, stream);
        if (arena->cut.page_subpages)
            region_pass(&arena->cut, stream);
    }
    if (any || ending_came(arena)) /* else nothing of it ends now, and there may be much */
        ending_pass(arena);
    slabs_pass(&arena->slabs);
}

/* True: the device is lost, at whichever call it was, and no hit hides that from its thread any more. */
static bool end_hits_if_lost(struct arena *arena)
{
    if (!device_lost(arena->device))
        return false;
    fronts_disable(arena->space.fronts);
    fronts_disable(arena->cut.fronts);
    return true;
}

/* Under the event lock. */
static bool publish_passed(struct arena *arena)
{
    bool any = streams_complete(&arena->streams);
    end_hits_if_lost(arena);
    pass_regions(arena, any);
    return any;
}

/* Under the pass lock. True: something was done, and more may follow from it. */
static bool pass(struct arena *arena, bool decays)
{
    stats_note_peaks(arena->stats);
    fronts_flush_idle(arena->space.fronts);
    fronts_flush_idle(arena->cut.fronts);
    cut_tidy(arena);
    lock_take(&arena->event_lock);
    bool any = publish_passed(arena);
    pthread_mutex_unlock(&arena->event_lock);
    any |= zombies_retire(arena, decays); /* a pass that somebody waits for does not decay */
    if (decays && !device_lost(arena->device))
        any |= decay_step(arena, any);
    return any;
}

static vpmm_status locked_pass(struct arena *arena, bool decays, bool *any)
{
    struct device_scope scope;
    vpmm_status status = device_lost(arena->device) ? device_lost_status() : device_enter(arena->device, &scope);
    if (status == VPMM_SUCCESS) {
        *any = pass(arena, decays);
        device_leave(arena->device, &scope);
        store_relaxed_u64(&arena->passed_at_ns, clock_now_ns());
    }
    return end_hits_if_lost(arena) ? device_lost_status() : status;
}

vpmm_status pass_of_reaper(struct arena *arena, struct pass_outlook *outlook)
{
    *outlook = (struct pass_outlook){.any = false};
    lock_take(&arena->pass_lock);
    vpmm_status status = locked_pass(arena, true, &outlook->any);
    outlook->decays_us = decay_wait_us(arena);
    outlook->zombies = arena->waiting != NULL;
    outlook->cached = arena->space.fronts->noted || arena->cut.fronts->noted;
    pthread_mutex_unlock(&arena->pass_lock);
    return status;
}

vpmm_status pass_try(struct arena *arena)
{
    bool any;
    if (!lock_try(&arena->pass_lock))
        return VPMM_SUCCESS;
    vpmm_status status = locked_pass(arena, true, &any);
    pthread_mutex_unlock(&arena->pass_lock);
    return status;
}

enum {
    REFRESH_PATIENCE_NS = 200000, /* for who has the event lock: it asks the driver a few questions, */
    LOCK_PAUSE_NS = 500,          /* and the time between looks at it */
    REFRESH_ROUNDS = 4,           /* of looks at marks that may be about to pass, */
    REFRESH_PAUSE_NS = 5000,      /* and the time between them: what an idle device takes */
};

static bool try_event_lock(struct arena *arena)
{
    uint64_t end = clock_now_ns() + REFRESH_PATIENCE_NS;
    while (!lock_try(&arena->event_lock)) {
        if (clock_now_ns() > end)
            return false;
        clock_spin_ns(LOCK_PAUSE_NS);
    }
    return true;
}

/* What the stream would have to wait for. What it has freed itself is its own, but for a slice of another's slab. */
static bool may_be_about_to_pass(const struct arena *arena, const struct stream *stream)
{
    return streams_pending(&arena->streams, slabs_wait(&arena->slabs) ? NULL : stream);
}

bool pass_refresh(struct arena *arena, const struct stream *stream)
{
    struct device_scope scope;
    bool any = streams_pending(&arena->streams, NULL) || streams_unmarked(&arena->streams) ||
               slabs_deferred(&arena->slabs) || ending_came(arena); /* what has passed before it came */
    if (!any || !try_event_lock(arena))
        return any; /* another thread asks */
    if (!device_lost(arena->device) && device_enter(arena->device, &scope) == VPMM_SUCCESS) {
        publish_passed(arena);
        for (int i = 1; i < REFRESH_ROUNDS && may_be_about_to_pass(arena, stream); i++) {
            clock_spin_ns(REFRESH_PAUSE_NS);
            publish_passed(arena);
        }
        device_leave(arena->device, &scope);
    }
    pthread_mutex_unlock(&arena->event_lock);
    return true;
}

vpmm_status pass_now(struct arena *arena)
{
    bool any;
    lock_take(&arena->pass_lock);
    vpmm_status status = locked_pass(arena, false, &any);
    pthread_mutex_unlock(&arena->pass_lock);
    return status;
}

vpmm_status pass_soon(struct arena *arena)
{
    struct device_scope scope;
    bool any;
    vpmm_status status;
    if (lock_try(&arena->pass_lock)) {
        status = locked_pass(arena, false, &any);
        pthread_mutex_unlock(&arena->pass_lock);
        return status;
    }
    status = device_lost(arena->device) ? device_lost_status() : device_enter(arena->device, &scope);
    if (status != VPMM_SUCCESS)
        return status;
    lock_take(&arena->event_lock);
    publish_passed(arena);
    pthread_mutex_unlock(&arena->event_lock);
    device_leave(arena->device, &scope);
    return VPMM_SUCCESS;
}

vpmm_status pass_release(struct arena *arena, uint64_t keep_pages, uint64_t *released_pages)
{
    lock_take(&arena->pass_lock);
    vpmm_status status = give_back_down_to(arena, keep_pages, UINT64_MAX, released_pages);
    pthread_mutex_unlock(&arena->pass_lock);
    return status;
}

vpmm_status pass_wait_for_contexts(struct arena *arena)
{
    struct device_scope scope;
    vpmm_status status = device_enter(arena->device, &scope);
    if (status != VPMM_SUCCESS)
        return status;
    status = streams_synchronise(&arena->streams, &arena->event_lock);
    lock_take(&arena->event_lock);
    pass_regions(arena, true);
    pthread_mutex_unlock(&arena->event_lock);
    device_leave(arena->device, &scope);
    return status;
}
