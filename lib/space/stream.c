#include "space/stream.h"

#include "base/clock.h"
#include "base/lock.h"
#include "space/context.h"
#include "space/fence.h"
#include "space/identity.h"

#include <stdlib.h>
#include <string.h>

/* ---- records ---- */

vpmm_status streams_init(struct streams *streams, struct device *device, const vpmm_config *config)
{
    streams->device = device;
    streams->by_name = config->graph;
    streams->is_eager = config->streams == VPMM_STREAMS_EAGER;
    streams->privacy = streams->is_eager || config->graph ? STREAM_PRIVATE
                       : !config->captures                ? STREAM_OPEN
                       : config->capture_gate.enter       ? STREAM_GATED
                                                          : STREAM_PRIVATE;
    streams->gate = config->capture_gate;
    streams->marks_may_wait = config->reaper && !config->graph;
    streams->registry = object_map_create();
    if (!streams->registry)
        return fail(VPMM_ERROR_HOST_MEMORY, "no host memory for the registry of streams");
    pthread_mutex_init(&streams->lock, NULL);
    pthread_mutex_init(&streams->wait_lock, NULL);
    store_relaxed_u32(&streams->slots, 1);
    return VPMM_SUCCESS;
}

void streams_free(struct streams *streams)
{
    if (!streams->registry)
        return;
    for (uint32_t slot = 1; slot < load_relaxed_u32(&streams->slots); slot++) {
        struct stream *stream = stream_at(streams, slot);
        struct stale_events events = {.count = 0};
        stream_take_events(stream, &events);
        stale_events_destroy(streams, &events);
        ring_destroy(stream->pending);
        thread_unref(stream->thread);
        free(stream);
    }
    for (size_t i = 0; i < STREAMS_MAX / STREAMS_A_SEGMENT; i++)
        free(load_relaxed_ptr(&streams->segment[i]));
    object_map_destroy(streams->registry);
    pthread_mutex_destroy(&streams->lock);
    pthread_mutex_destroy(&streams->wait_lock);
}

/* Under the lock. A record that was never used before. */
static struct stream *record_new(struct streams *streams)
{
    uint32_t slot = load_relaxed_u32(&streams->slots);
    if (slot == STREAM_NONE) /* the last slot's number */
        return NULL;
    _Atomic(void *) *place = &streams->segment[slot / STREAMS_A_SEGMENT];
    struct stream_segment *segment = load_relaxed_ptr(place);
    if (!segment)
        segment = calloc(1, sizeof *segment);
    if (!segment)
        return NULL;
    store_release_ptr(place, segment); /* pairs with stream_seen's acquire */
    struct stream *stream = aligned_alloc(64, sizeof *stream);
    if (!stream)
        return NULL;
    memset(stream, 0, sizeof *stream);
    stream->pending = ring_create();
    if (!stream->pending) {
        free(stream);
        return NULL;
    }
    stream->slot = slot;
    store_release_ptr(&segment->record[slot % STREAMS_A_SEGMENT], stream); /* pairs with stream_seen's acquire */
    store_release_u32(&streams->slots, slot + 1);                          /* pairs with each walk's acquire */
    return stream;
}

/* For assertions: nothing waits for the record's stream, and no cache holds memory of it. */
static bool is_at_rest(const struct stream *stream)
{
    return peek_u64(&stream->completed) == peek_u64(&stream->published) && !peek_u32(&stream->caches[SPACE_PAGES]) &&
           !peek_u32(&stream->caches[SPACE_SUBPAGES]) && !peek_u32(&stream->outstanding) && peek_u32(&stream->uses) < 2;
}

/*
 * Under the lock. Events belong to a context: those of another one are of no use to the new stream, and are the
 * caller's to destroy when it has given the lock up.
 */
static struct stream *record_take(struct streams *streams, CUcontext context, struct stale_events *stale)
{
    uint32_t slot = streams->unused;
    if (!slot)
        return record_new(streams);
    struct stream *stream = stream_at(streams, slot);
    streams->unused = stream->next_unused;
    vpmm_assert(is_at_rest(stream));
    if (stream->context != context)
        stream_take_events(stream, stale);
    return stream;
}

/* ---- from a handle to its record ---- */

/* Under the lock. */
static void unregister(struct streams *streams, struct stream *stream, enum stream_state state)
{
    vpmm_assert(lock_is_taken(&streams->lock) && object_map_get(streams->registry, stream->key) == stream);
    store_sc_u32(&stream->state, state); /* before users is read: see enter_known */
    if (state == STREAM_ORPHAN)
        fetch_add_sc_u32(&streams->orphans, 1); /* after the state: see close_orphans in front.c */
    object_map_remove(streams->registry, stream->key);
}

/* A gated one is told from a later stream with its handle by its id. */
static enum stream_privacy privacy_of(const struct streams *streams, const struct stream *stream)
{
    bool is_default = stream->thread || handle_is_legacy(stream->handle);
    bool cannot_be_told = streams->privacy == STREAM_GATED && !stream->has_id;
    return is_default || cannot_be_told ? STREAM_PRIVATE : streams->privacy;
}

/* Under the lock. False: there is no host memory for its place in the registry. */
static bool record_for(struct streams *streams, struct stream *stream, CUstream handle, CUcontext context,
                       const struct identity *identity)
{
    stream->key = identity->key;
    stream->handle = handle;
    stream->context = context;
    stream->id = identity->id;
    stream->has_id = identity->has_id;
    stream->thread = identity->thread;
    store_relaxed_u32(&stream->uses, 0);
    store_relaxed_u32(&stream->privacy, privacy_of(streams, stream));
    thread_ref(stream->thread);
    store_sc_u32(&stream->state, STREAM_ACTIVE); /* pairs with enter_known's load: the fields above are set */
    bool put = object_map_put(streams->registry, stream);
    if (!put)
        store_sc_u32(&stream->state, STREAM_RELEASED); /* the reaper takes it back */
    return put;
}

static vpmm_status register_stream(struct streams *streams, CUstream handle, const struct identity *identity)
{
    CUcontext context = identity->context ? identity->context : streams->device->primary;
    vpmm_status status =
        streams->by_name ? VPMM_SUCCESS : identity_find_context(streams->device, handle, identity, &context);
    if (status != VPMM_SUCCESS)
        return status;
    bool keeps =
        (streams->privacy != STREAM_OPEN || handle_is_legacy(handle)) && !streams->is_eager && !identity->thread;
    struct stale_events stale = {.count = 0};
    lock_take(&streams->lock);
    struct stream *known = object_map_get(streams->registry, identity->key);
    struct stream *stream = known ? NULL : record_take(streams, context, &stale);
    if (stream && !record_for(streams, stream, handle, context, identity))
        stream = NULL;
    pthread_mutex_unlock(&streams->lock);
    stale_events_destroy(streams, &stale);
    if (!known && !stream)
        return fail(VPMM_ERROR_HOST_MEMORY, "no host memory for another stream, or %d streams are known",
                    STREAMS_MAX - 2);
    if (stream && keeps)
        context_keep_block_if_free(streams, &stream->wait, context);
    return VPMM_SUCCESS;
}

/* ---- users ---- */

/*
 * Counts the thread in and makes sure that the record is still the stream's. The count is raised before the state is
 * read, and whoever takes a record out of use stores the state before it reads the count (all sequentially
 * consistent): one of the two sees the other.
 */
static bool enter_known(struct stream *stream, struct object_key key)
{
    fetch_add_sc_u32(&stream->users, 1);
    if (load_sc_u32(&stream->state) == STREAM_ACTIVE && stream->key.a == key.a && stream->key.b == key.b)
        return true;
    stream_leave(stream);
    return false;
}

bool stream_enter_cached(struct stream *stream)
{
    stream_visit(stream);
    enum stream_state state = load_sc_u32(&stream->state);
    if (stream_state_has_handle(state) || state == STREAM_ORPHAN)
        return true;
    stream_end_visit(stream);
    return false;
}

void stream_finish(struct streams *streams, struct stream *stream)
{
    if (stream_is_private(stream))
        stream_mark(streams, stream);
    stream_leave(stream);
}

/* The handle names another stream now: the record keeps what the old one left. */
static void orphan(struct streams *streams, struct stream *stream, const struct identity *identity)
{
    lock_take(&streams->lock);
    if (object_map_get(streams->registry, identity->key) == stream && stream->id != identity->id)
        unregister(streams, stream, STREAM_ORPHAN);
    pthread_mutex_unlock(&streams->lock);
}

vpmm_status stream_enter(struct streams *streams, CUstream handle, struct stream **out)
{
    struct identity identity;
    vpmm_status status = identify(streams->device, handle, streams->by_name, &identity);
    while (status == VPMM_SUCCESS) {
        struct stream *stream = object_map_get(streams->registry, identity.key);
        if (!stream) {
            status = register_stream(streams, handle, &identity);
            continue;
        }
        if (!enter_known(stream, identity.key)) {
            clock_yield(); /* it is being released: look again when it is out of the registry */
            continue;
        }
        /* Whoever takes it out of use waits for this thread from here on. */
        vpmm_assert(peek_u32(&stream->state) != STREAM_RELEASED && peek_u32(&stream->state) != STREAM_UNUSED);
        if (stream->has_id == identity.has_id && stream->id == identity.id) {
            *out = stream;
            return VPMM_SUCCESS;
        }
        orphan(streams, stream, &identity);
        stream_leave(stream);
    }
    return status;
}

/* ---- release ---- */

enum release { RELEASE_OURS, RELEASE_OTHERS, RELEASE_UNKNOWN };

/*
 * What live memory is used for on the stream ends with this fence. Before the record is RELEASING, so that a free that
 * finds it so finds the fence as well; a use that comes later finds the count closed, and takes a fence itself.
 */
static void close_uses(struct stream *stream)
{
    if (fetch_or_sc_u32(&stream->uses, 1) > 1)
        fence_take(stream);
}

/* Makes the record RELEASING, with this thread counted in; or says that another thread does, or that there is none. */
static enum release begin_release(struct streams *streams, const struct identity *identity, struct stream **out)
{
    lock_take(&streams->lock);
    struct stream *stream = *out = object_map_get(streams->registry, identity->key);
    enum release release = !stream ? RELEASE_UNKNOWN : RELEASE_OURS;
    if (stream && load_sc_u32(&stream->state) != STREAM_ACTIVE) { /* in the registry: RELEASING or CLOSING */
        release = RELEASE_OTHERS;
    } else if (stream && stream->id != identity->id) {
        unregister(streams, stream, STREAM_ORPHAN); /* the handle has come back as another stream's */
        release = RELEASE_UNKNOWN;
    } else if (stream) {
        fetch_add_sc_u32(&stream->users, 1);
        close_uses(stream);
        store_sc_u32(&stream->state, STREAM_RELEASING); /* before users is read: see stream_enter_cached */
    }
    pthread_mutex_unlock(&streams->lock);
    return release;
}

/* The record as it was, or out of the registry. */
static void end_release(struct streams *streams, struct stream *stream, bool marked)
{
    lock_take(&streams->lock);
    vpmm_assert(peek_u32(&stream->state) == STREAM_CLOSING && peek_u32(&stream->users) > 0);
    vpmm_assert(!marked || peek_u64(&stream->recorded) >= peek_u64(&stream->published));
    if (marked) {
        unregister(streams, stream, STREAM_RELEASED);
    } else {
        fetch_and_sc_u32(&stream->uses, ~1u); /* before it is ACTIVE: uses are counted in from then on */
        store_sc_u32(&stream->state, STREAM_ACTIVE);
    }
    pthread_mutex_unlock(&streams->lock);
    vpmm_assert(peek_u32(&streams->closing) > 0);
    fetch_add_sc_u32(&streams->closing, UINT32_MAX); /* after what lay in its caches was published */
    stream_leave(stream);
}

/*
 * Both waits end: whom they wait for goes, and nobody of that kind stays that comes later. (Some visitors count
 * themselves in before they look at the state, and out again at once.)
 */
static void await_given(const struct stream *stream)
{
    while (stream_given(stream) > 1) /* the caller is one: such a call may wait for the GPU, and for others' memory */
        clock_yield();
}

static void await_visitors(const struct stream *stream)
{
    while (load_sc_u32(&stream->users) > 1)
        clock_yield();
}

/*
 * First calls that were given the stream are waited for, and others take from its caches meanwhile what they need;
 * then, when it is CLOSING, who is at its caches. Whoever comes after that waits in stream_enter, or leaves the stream
 * alone; only hits of its caches go on, until these are closed by `flush`, and a free that hits then finds out
 * (cache_note).
 */
static bool empty_and_mark(struct streams *streams, struct stream *stream, void (*flush)(struct stream *, void *),
                           void *data)
{
    await_given(stream);
    fetch_add_sc_u32(&streams->closing, 1);
    store_sc_u32(&stream->state, STREAM_CLOSING); /* before users is read, once more: see stream_enter_cached */
    await_visitors(stream);
    flush(stream, data);
    return stream_mark_all(streams, stream);
}

/* A release that the driver refuses, or a capture that has begun since, says so; the caller may try again. */
static vpmm_status not_marked(struct device *device)
{
    if (device_lost(device))
        return device_lost_status();
    if (device_has_failed())
        device_failed(device,
                      "recording the stream's last point: synchronise the stream, call vpmm_poll, and release it "
                      "again");
    else
        fail(VPMM_ERROR_DRIVER,
             "the stream's last point cannot be recorded now: synchronise the stream, call vpmm_poll, "
             "and release it again");
    return VPMM_ERROR_DRIVER;
}

vpmm_status stream_release(struct streams *streams, CUstream handle, void (*flush)(struct stream *, void *), void *data)
{
    struct identity identity;
    struct stream *stream;
    enum release release;
    vpmm_status status = identify(streams->device, handle, streams->by_name, &identity);
    if (status != VPMM_SUCCESS)
        return status;
    while ((release = begin_release(streams, &identity, &stream)) == RELEASE_OTHERS)
        clock_yield();
    if (release == RELEASE_UNKNOWN)
        return VPMM_SUCCESS;
    device_forget_failure();
    bool marked = empty_and_mark(streams, stream, flush, data);
    status = marked ? VPMM_SUCCESS : not_marked(streams->device);
    end_release(streams, stream, marked);
    return status;
}

/* ---- the reaper's part ---- */

static bool has_caches(const struct stream *stream)
{
    return load_sc_u32(&stream->caches[SPACE_PAGES]) || load_sc_u32(&stream->caches[SPACE_SUBPAGES]);
}

static bool has_uses(const struct stream *stream)
{
    return load_sc_u32(&stream->uses) > 1;
}

/* Takes a record out of use when nothing refers to its stream any more. */
static void retire_record(struct streams *streams, struct stream *stream)
{
    enum stream_state state = load_sc_u32(&stream->state);
    bool thread_gone = state == STREAM_ACTIVE && stream->thread && thread_has_exited(stream->thread);
    if (streams->by_name || (!thread_gone && state != STREAM_RELEASED && state != STREAM_ORPHAN))
        return; /* by name a record says which context is to be waited for, to the end */
    lock_take(&streams->lock);
    if (thread_gone && load_sc_u32(&stream->state) == STREAM_ACTIVE)
        unregister(streams, stream, STREAM_ORPHAN);
    /*
     * The caches before the users: a flusher counts itself in, and then looks whether the cache is still attached. The
     * uses after the users, who alone begin one, and so the waiters; and before the fences, of which the end of a use
     * takes the last.
     */
    if (load_sc_u32(&stream->state) != STREAM_UNUSED && !has_caches(stream) && !load_sc_u32(&stream->users) &&
        !has_uses(stream) && !load_sc_u32(&stream->waiters) &&
        load_sc_u64(&stream->published) == load_relaxed_u64(&stream->completed) &&
        !load_relaxed_u32(&stream->outstanding) && !hints_count(&stream->free[SPACE_PAGES]) &&
        !hints_count(&stream->free[SPACE_SUBPAGES])) {
        thread_unref(stream->thread);
        stream->thread = NULL;
        store_sc_u32(&stream->state, STREAM_UNUSED);
        stream->next_unused = streams->unused;
        streams->unused = stream->slot;
    }
    pthread_mutex_unlock(&streams->lock);
}

bool streams_complete(struct streams *streams)
{
    bool any = false;
    for (uint32_t slot = 1, n = load_acquire_u32(&streams->slots); slot < n && !device_lost(streams->device); slot++) {
        struct stream *stream = stream_at(streams, slot);
        if (load_sc_u32(&stream->state) == STREAM_UNUSED)
            continue;
        any |= fences_complete(streams, stream);
        if (load_sc_u64(&stream->published) <= load_relaxed_u64(&stream->recorded)) {
            retire_record(streams, stream);
            continue;
        }
        stream_visit(stream); /* the handle stays valid while it is marked */
        if (stream_has_handle(stream))
            stream_mark_by_other(streams, stream);
        stream_end_visit(stream);
        retire_record(streams, stream);
    }
    return any;
}

bool streams_pending(const struct streams *streams, const struct stream *but)
{
    for (uint32_t slot = 1, n = load_acquire_u32(&streams->slots); slot < n; slot++) {
        struct stream *stream = stream_at(streams, slot);
        enum stream_state state = load_sc_u32(&stream->state);
        /* Who detaches the last cache, or ends the last use, wakes the reaper. */
        bool is_idle = state == STREAM_RELEASED && !has_caches(stream) && !has_uses(stream);
        if (stream != but && (load_sc_u32(&stream->outstanding) || is_idle))
            return true;
    }
    return false;
}

/*
 * Counted in: a record that is in use keeps what it is. PRIVATE: nobody has its handle any more, too. *soon: a call
 * with a stream of which nothing may be left unmarked is about to mark what it has published.
 */
static bool is_unmarked(const struct streams *streams, struct stream *stream, enum stream_privacy *privacy, bool *soon)
{
    if (load_sc_u64(&stream->published) <= load_relaxed_u64(&stream->recorded))
        return false;
    stream_visit(stream);
    enum stream_state state = load_sc_u32(&stream->state);
    bool has_handle = stream_state_has_handle(state);
    *privacy = has_handle ? load_relaxed_u32(&stream->privacy) : STREAM_PRIVATE;
    *soon = stream_is_brief(streams, stream) && stream_given(stream);
    stream_end_visit(stream);
    return has_handle || state == STREAM_ORPHAN;
}

bool streams_unmarked(const struct streams *streams)
{
    bool soon;
    enum stream_privacy privacy, most = is_reaper(streams) ? STREAM_OPEN : STREAM_GATED;
    for (uint32_t slot = 1, n = load_acquire_u32(&streams->slots); slot < n; slot++)
        if (is_unmarked(streams, stream_at(streams, slot), &privacy, &soon) && privacy <= most)
            return true;
    return false;
}

bool streams_unmarkable(const struct streams *streams)
{
    bool soon;
    enum stream_privacy privacy;
    for (uint32_t slot = 1, n = load_acquire_u32(&streams->slots); slot < n; slot++)
        if (is_unmarked(streams, stream_at(streams, slot), &privacy, &soon) && privacy >= STREAM_GATED && !soon)
            return true;
    return false;
}
