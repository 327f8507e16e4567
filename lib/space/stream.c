#include "space/stream.h"

#include "base/clock.h"
#include "base/lock.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

/* ---- threads, for per-thread streams ---- */

struct thread {
    _Atomic(uint32_t) references;
    _Atomic(uint32_t) exited;
};

static pthread_key_t thread_key;
static bool has_thread_key; /* false: other libraries have taken all keys, and no per-thread stream can be known */
static pthread_once_t thread_key_once = PTHREAD_ONCE_INIT;

static void thread_unref(struct thread *thread)
{
    if (thread && fetch_add_acq_rel_u32(&thread->references, UINT32_MAX) == 1)
        free(thread);
}

static void thread_exits(void *data)
{
    struct thread *thread = data;
    store_release_u32(&thread->exited, 1); /* pairs with the reaper's acquire in retire_record */
    thread_unref(thread);
}

static void make_thread_key(void)
{
    has_thread_key = pthread_key_create(&thread_key, thread_exits) == 0;
}

/* The calling thread, NULL: no memory, or no key. The record that keeps it takes a reference. */
static struct thread *thread_self(void)
{
    pthread_once(&thread_key_once, make_thread_key);
    struct thread *self = has_thread_key ? pthread_getspecific(thread_key) : NULL;
    if (self || !has_thread_key)
        return self;
    self = calloc(1, sizeof *self);
    if (!self)
        return NULL;
    store_relaxed_u32(&self->references, 1);
    if (pthread_setspecific(thread_key, self)) {
        free(self);
        return NULL;
    }
    return self;
}

/* ---- records ---- */

vpmm_status streams_init(struct streams *streams, struct device *device, const vpmm_config *config)
{
    streams->device = device;
    streams->is_private = config->streams == VPMM_STREAMS_EAGER || config->captures;
    streams->cached = config->cache_bytes && config->streams != VPMM_STREAMS_EAGER;
    streams->registry = object_map_create();
    if (!streams->registry)
        return fail(VPMM_ERROR_HOST_MEMORY, "no host memory for the registry of streams");
    pthread_mutex_init(&streams->lock, NULL);
    pthread_mutex_init(&streams->wait_lock, NULL);
    store_relaxed_u32(&streams->slots, 1);
    return VPMM_SUCCESS;
}

/* Events that are no record's any more. */
struct stale_events {
    CUevent event[STREAM_MARKS];
    unsigned count;
};

static void take_events(struct stream *stream, struct stale_events *stale)
{
    for (int i = 0; i < STREAM_MARKS; i++) {
        CUevent event = load_relaxed_ptr(&stream->mark[i].event);
        if (event)
            stale->event[stale->count++] = event;
        store_relaxed_ptr(&stream->mark[i].event, NULL);
    }
}

static void destroy_events(struct streams *streams, const struct stale_events *stale)
{
    for (unsigned i = 0; i < stale->count; i++)
        device_call(streams->device, cuEventDestroy, stale->event[i]);
}

void streams_free(struct streams *streams)
{
    if (!streams->registry)
        return;
    for (uint32_t slot = 1; slot < load_relaxed_u32(&streams->slots); slot++) {
        struct stream *stream = stream_at(streams, slot);
        struct stale_events events = {.count = 0};
        take_events(stream, &events);
        destroy_events(streams, &events);
        if (stream->wait_block)
            device_call(streams->device, cuMemFree, stream->wait_block);
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
    store_release_u32(&streams->slots, slot + 1);                          /* pairs with the reaper's acquire */
    return stream;
}

/* For assertions: nothing waits for the record's stream, and no cache holds memory of it. */
static bool is_at_rest(const struct stream *stream)
{
    return peek_u64(&stream->completed) == peek_u64(&stream->published) && !peek_u32(&stream->caches[SPACE_PAGES]) &&
           !peek_u32(&stream->caches[SPACE_GRANULES]) && !peek_u32(&stream->outstanding);
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
        take_events(stream, stale);
    return stream;
}

/* ---- from a handle to its record ---- */

struct identity {
    struct object_key key;
    CUcontext context;
    unsigned long long id;
    bool has_id;
    struct thread *thread;
};

static bool is_legacy(CUstream handle)
{
    return !handle || handle == CU_STREAM_LEGACY;
}

static vpmm_status check_device(struct device *device, CUcontext context)
{
    CUdevice id = -1;
    bool pushed;
    if (device_push_context(device, context, &pushed) != CUDA_SUCCESS)
        return device_failed(device, "looking at the stream's context");
    CUresult result = device_call(device, cuCtxGetDevice, &id);
    if (pushed)
        device_pop_context(device);
    if (result != CUDA_SUCCESS)
        return device_failed(device, "looking at the stream's device");
    if (id != device->id)
        return fail(VPMM_ERROR_INVALID_VALUE, "the stream belongs to device %d and the pool to device %d", (int)id,
                    (int)device->id);
    return VPMM_SUCCESS;
}

static vpmm_status no_thread(void)
{
    if (has_thread_key)
        return fail(VPMM_ERROR_HOST_MEMORY, "no host memory for this thread's record");
    return fail(
        VPMM_ERROR_HOST_MEMORY,
        "CU_STREAM_PER_THREAD needs a pthread key, by which a thread's end is known, and when the process first "
        "asked for one its %d keys were all taken: use another stream",
        PTHREAD_KEYS_MAX);
}

/* Which record is the stream's; for default streams, by context and thread. */
static vpmm_status find_key(struct streams *streams, CUstream handle, struct identity *identity)
{
    *identity = (struct identity){.key = {(uint64_t)(uintptr_t)handle, 0}};
    if (!is_legacy(handle) && handle != CU_STREAM_PER_THREAD)
        return VPMM_SUCCESS;
    vpmm_status status = device_current_context(streams->device, &identity->context);
    if (status != VPMM_SUCCESS)
        return status;
    if (is_legacy(handle)) {
        identity->key = (struct object_key){(uint64_t)(uintptr_t)identity->context, 1};
    } else {
        identity->thread = thread_self();
        if (!identity->thread)
            return no_thread();
        identity->key =
            (struct object_key){(uint64_t)(uintptr_t)identity->context, (uint64_t)(uintptr_t)identity->thread};
    }
    return VPMM_SUCCESS;
}

/* A default stream is asked in its own context, which identify has chosen; any other by its handle alone. */
static CUresult ask_capture(struct device *device, CUstream handle, CUcontext context, CUstreamCaptureStatus *capture)
{
    struct device_scope scope;
    if (!context)
        return device_call(device, cuStreamIsCapturing, handle, capture);
    if (device_enter_context(device, context, &scope) != VPMM_SUCCESS)
        return CUDA_ERROR_INVALID_CONTEXT;
    CUresult result = device_call(device, cuStreamIsCapturing, handle, capture);
    device_leave(device, &scope);
    return result;
}

static vpmm_status refuse_capture(struct device *device, CUstream handle, const struct identity *identity)
{
    CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult result = ask_capture(device, handle, identity->context, &capture);
    if (result != CUDA_SUCCESS && !device_result_is_capture(result))
        return device_failed(device, "asking whether the stream captures");
    if (result != CUDA_SUCCESS || capture != CU_STREAM_CAPTURE_STATUS_NONE)
        return fail(VPMM_ERROR_NOT_SUPPORTED, "the stream is being captured into a graph: allocate and free outside of "
                                              "the capture");
    return VPMM_SUCCESS;
}

/*
 * What a hit needs to know, in this order: cuStreamGetId of a capturing stream answers an error, and destroys the
 * capture (seen on an H200, driver 580).
 */
static vpmm_status identify(struct streams *streams, CUstream handle, struct identity *identity)
{
    struct device *device = streams->device;
    vpmm_status status = find_key(streams, handle, identity);
    if (status == VPMM_SUCCESS)
        status = refuse_capture(device, handle, identity);
    if (status != VPMM_SUCCESS || identity->context || !device->driver.cuStreamGetId)
        return status;
    if (device_call(device, cuStreamGetId, handle, &identity->id) != CUDA_SUCCESS)
        return device_failed(device, "looking at the stream");
    identity->has_id = true;
    return VPMM_SUCCESS;
}

/* Under the lock. */
static void unregister(struct streams *streams, struct stream *stream, enum stream_state state)
{
    vpmm_assert(lock_is_taken(&streams->lock) && object_map_get(streams->registry, stream->key) == stream);
    store_sc_u32(&stream->state, state); /* before users is read: see enter_known */
    if (state == STREAM_ORPHAN)
        fetch_add_sc_u32(&streams->orphans, 1); /* after the state: see close_orphans in front.c */
    object_map_remove(streams->registry, stream->key);
}

/* Under wait_lock. */
static bool has_wait_block(const struct streams *streams, CUcontext context)
{
    for (uint32_t slot = 1; slot < load_acquire_u32(&streams->slots); slot++) {
        const struct stream *stream = stream_at(streams, slot);
        if (stream->wait_block && stream->wait_context == context)
            return true;
    }
    return false;
}

/*
 * The block that a wait for the context takes, which is hard to have when it is needed: when the device is full. What
 * lies in caches of a private stream may have no other end than such a wait. Where there is no memory for it now, it is
 * tried then. The record is where it is kept; whose it is by now does not matter.
 */
static void keep_wait_block(struct streams *streams, struct stream *holder, CUcontext context)
{
    struct device_scope scope;
    lock_take(&streams->wait_lock);
    if (!holder->wait_block && !has_wait_block(streams, context) &&
        device_enter_context(streams->device, context, &scope) == VPMM_SUCCESS) {
        device_call(streams->device, cuMemAlloc, &holder->wait_block, 1);
        holder->wait_context = context;
        device_leave(streams->device, &scope);
    }
    pthread_mutex_unlock(&streams->wait_lock);
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
    stream->is_private = streams->is_private || stream->thread || is_legacy(handle);
    if (stream->thread)
        fetch_add_relaxed_u32(&stream->thread->references, 1);
    store_sc_u32(&stream->state, STREAM_ACTIVE); /* pairs with enter_known's load: the fields above are set */
    bool put = object_map_put(streams->registry, stream);
    if (!put)
        store_sc_u32(&stream->state, STREAM_RELEASED); /* the reaper takes it back */
    return put;
}

static vpmm_status register_stream(struct streams *streams, CUstream handle, const struct identity *identity)
{
    struct device *device = streams->device;
    CUcontext context = identity->context;
    vpmm_status status = VPMM_SUCCESS;
    if (!context) {
        if (device_call(device, cuStreamGetCtx, handle, &context) != CUDA_SUCCESS)
            return device_failed(device, "looking for the stream's context");
        status = check_device(device, context);
    }
    if (status != VPMM_SUCCESS)
        return status;
    bool keeps = streams->cached && (streams->is_private || is_legacy(handle)) && !identity->thread;
    struct stale_events stale = {.count = 0};
    lock_take(&streams->lock);
    struct stream *known = object_map_get(streams->registry, identity->key);
    struct stream *stream = known ? NULL : record_take(streams, context, &stale);
    if (stream && !record_for(streams, stream, handle, context, identity))
        stream = NULL;
    pthread_mutex_unlock(&streams->lock);
    destroy_events(streams, &stale);
    if (!known && !stream)
        return fail(VPMM_ERROR_HOST_MEMORY, "no host memory for another stream, or %d streams are known",
                    STREAMS_MAX - 2);
    if (stream && keeps)
        keep_wait_block(streams, stream, context);
    return VPMM_SUCCESS;
}

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

void stream_leave(struct stream *stream)
{
    vpmm_assert(peek_u32(&stream->users) > 0);
    fetch_add_sc_u32(&stream->users, UINT32_MAX);
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
    vpmm_status status = identify(streams, handle, &identity);
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
        if (stream->has_id == identity.has_id && stream->id == identity.id) {
            *out = stream;
            return VPMM_SUCCESS;
        }
        orphan(streams, stream, &identity);
        stream_leave(stream);
    }
    return status;
}

/* ---- marks ---- */

enum { MARK_FREE, MARK_RECORDED, MARK_BUSY, MARK_STATE_BITS = 2 };

static uint64_t mark_word(uint64_t number, unsigned state)
{
    return number << MARK_STATE_BITS | state;
}

static uint64_t mark_number(uint64_t word)
{
    return word >> MARK_STATE_BITS;
}

static unsigned mark_state(uint64_t word)
{
    return word & ((1u << MARK_STATE_BITS) - 1);
}

static bool captures_nothing(const struct streams *streams, const struct stream *stream)
{
    CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
    return device_call(streams->device, cuStreamIsCapturing, stream->handle, &capture) == CUDA_SUCCESS &&
           capture == CU_STREAM_CAPTURE_STATUS_NONE;
}

/* Whether another than a call that was given the stream may record on it. The caller is counted in. */
static bool is_open_to_others(const struct streams *streams, const struct stream *stream)
{
    return !stream->is_private && load_sc_u32(&stream->state) == STREAM_ACTIVE && captures_nothing(streams, stream);
}

/*
 * Of an event that was recorded for another: whether it is none of a capture that began meanwhile. A capture that is
 * there now may be the event's, which must then not be asked. Where there is none, the event's own has ended if it had
 * one, and to ask it harms nobody.
 */
static bool is_uncaptured(const struct streams *streams, const struct stream *stream, CUevent event)
{
    if (!captures_nothing(streams, stream))
        return false;
    CUresult result = device_call(streams->device, cuEventQuery, event);
    return result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_READY;
}

static bool record(struct streams *streams, const struct stream *stream, CUevent event, bool by_other)
{
    return device_call(streams->device, cuEventRecord, event, stream->handle) == CUDA_SUCCESS &&
           (!by_other || is_uncaptured(streams, stream, event));
}

static CUevent event_of(struct streams *streams, struct mark *mark)
{
    CUevent event = load_relaxed_ptr(&mark->event);
    if (event)
        return event;
    if (device_call(streams->device, cuEventCreate, &event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS) {
        store_release_ptr(&mark->event, event); /* pairs with the acquire in covering_event */
        return event;
    }
    if (event) /* it was made, whatever the driver said */
        streams->device->driver.cuEventDestroy(event);
    return NULL;
}

static bool mark_place(struct streams *streams, struct stream *stream, struct mark *mark, uint64_t number,
                       bool by_other)
{
    CUevent event = event_of(streams, mark);
    vpmm_assert(mark_state(peek_u64(&mark->word)) == MARK_FREE);
    if (!event || !record(streams, stream, event, by_other))
        return false;
    store_release_u64(&mark->word, mark_word(number, MARK_RECORDED)); /* pairs with the acquire in covering_event */
    stream->next_mark = (stream->next_mark + 1) % STREAM_MARKS;
    fetch_add_acq_rel_u32(&stream->outstanding, 1);
    ring_put(stream->pending, mark); /* cannot be full: it holds more than STREAM_MARKS */
    return true;
}

/* The newest mark, to be recorded again. NULL: it has passed, and with it every other, so that each place is free. */
static struct mark *claim_newest(struct stream *stream)
{
    struct mark *newest = &stream->mark[(stream->next_mark + STREAM_MARKS - 1) % STREAM_MARKS];
    uint64_t word = load_sc_u64(&newest->word);
    bool claimed =
        mark_state(word) == MARK_RECORDED && cas_sc_u64(&newest->word, &word, mark_word(mark_number(word), MARK_BUSY));
    return claimed ? newest : NULL;
}

/* If the driver refuses, the event covers what it covered, or more. */
static bool mark_again(struct streams *streams, struct stream *stream, struct mark *newest, uint64_t number)
{
    uint64_t before = mark_number(load_relaxed_u64(&newest->word));
    vpmm_assert(mark_state(peek_u64(&newest->word)) == MARK_BUSY && before <= number);
    bool recorded = record(streams, stream, load_relaxed_ptr(&newest->event), false);
    /* Pairs with the acquire in covering_event, and in has_passed. */
    store_release_u64(&newest->word, mark_word(recorded ? number : before, MARK_RECORDED));
    return recorded;
}

/* Under the try-lock. False: nothing was marked, and trying again at once is of no use. */
static bool mark_once(struct streams *streams, struct stream *stream, bool by_other)
{
    uint64_t number = load_sc_u64(&stream->published); /* before the event is recorded */
    struct mark *place = &stream->mark[stream->next_mark], *newest = NULL;
    if (number <= load_relaxed_u64(&stream->recorded) ||
        !(by_other ? is_open_to_others(streams, stream) : captures_nothing(streams, stream)))
        return false;
    bool is_free = mark_state(load_acquire_u64(&place->word)) == MARK_FREE; /* pairs with retire_marks */
    if (by_other && (!is_free || load_sc_u32(&stream->waiters)))
        return false;
    if (!is_free)
        newest = claim_newest(stream);
    if (!(newest ? mark_again(streams, stream, newest, number) : mark_place(streams, stream, place, number, by_other)))
        return false;
    raise_relaxed_u64(&stream->recorded, number);
    vpmm_assert(peek_u32(&stream->marking) && peek_u64(&stream->recorded) <= peek_u64(&stream->published));
    stats_count(streams->device->stats, STAT_marks);
    return true;
}

/* False: another thread is at it. */
static bool mark(struct streams *streams, struct stream *stream, bool by_other)
{
    struct device_scope scope;
    if (load_sc_u64(&stream->published) <= load_relaxed_u64(&stream->recorded) || device_lost(streams->device))
        return true;
    if (device_enter_context(streams->device, stream->context, &scope) != VPMM_SUCCESS)
        return true;
    /* Each turn of the loop has marked what another thread published meanwhile, and left to this one to mark. */
    bool again = true, had_it = false;
    while (again && !exchange_acq_rel_u32(&stream->marking, 1)) {
        had_it = true;
        lock_count();
        bool marked = mark_once(streams, stream, by_other);
        store_sc_u32(&stream->marking, 0); /* pairs with the exchange */
        again = marked && load_sc_u64(&stream->published) > load_relaxed_u64(&stream->recorded);
    }
    device_leave(streams->device, &scope);
    return had_it;
}

void stream_mark_by_other(struct streams *streams, struct stream *stream)
{
    if (!stream->is_private)
        mark(streams, stream, true);
}

void stream_mark(struct streams *streams, struct stream *stream)
{
    mark(streams, stream, false);
}

/* The event of the earliest mark that covers the number. A place that is recorded again meanwhile holds a later
   point of the same stream, which covers it too. */
static CUevent covering_event(struct stream *stream, uint64_t number)
{
    uint64_t best = UINT64_MAX;
    CUevent event = NULL;
    for (int i = 0; i < STREAM_MARKS; i++) {
        uint64_t covers = mark_number(load_acquire_u64(&stream->mark[i].word));
        if (covers >= number && covers < best) {
            best = covers;
            event = load_acquire_ptr(&stream->mark[i].event);
        }
    }
    return event;
}

/* Counted in, so that a release of the stream does not return while its handle is looked at, nor without this fence. */
static bool recordable_now(const struct streams *streams, struct stream *stream, bool take_fence)
{
    struct device_scope scope;
    fetch_add_sc_u32(&stream->users, 1);
    bool recordable = load_sc_u32(&stream->state) == STREAM_ACTIVE && !stream->is_private &&
                      device_enter_context(streams->device, stream->context, &scope) == VPMM_SUCCESS;
    if (recordable) {
        recordable = is_open_to_others(streams, stream);
        if (recordable && take_fence)
            fence_take(stream);
        device_leave(streams->device, &scope);
    }
    stream_leave(stream);
    return recordable;
}

bool fence_seems_waitable(const struct streams *streams, struct fence fence)
{
    const struct stream *stream = fence.stream ? stream_seen(streams, fence.stream) : NULL;
    return fence_passed(streams, fence) ||
           (stream && (load_relaxed_u64(&stream->recorded) >= fence.number ||
                       (load_sc_u32(&stream->state) == STREAM_ACTIVE && !stream->is_private)));
}

bool fence_waitable(const struct streams *streams, struct fence fence)
{
    struct stream *stream = fence.stream ? stream_seen(streams, fence.stream) : NULL;
    return fence_passed(streams, fence) ||
           (stream && (load_relaxed_u64(&stream->recorded) >= fence.number || recordable_now(streams, stream, false)));
}

/* A point of its own, for one wait, where marks are not to be had. NULL: nor is this. */
static CUevent event_once(struct streams *streams, struct stream *stream)
{
    CUevent event = NULL;
    if (!is_open_to_others(streams, stream))
        return NULL;
    if (device_call(streams->device, cuEventCreate, &event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS &&
        record(streams, stream, event, true))
        return event;
    if (event)
        device_call(streams->device, cuEventDestroy, event);
    return NULL;
}

/*
 * An event that covers the number, for one wait; *once: to be destroyed after it. The caller is among the stream's
 * users, and its waiters. With all marks outstanding, or another thread at marking, a point of its own is recorded.
 */
static CUevent event_for(struct streams *streams, struct stream *stream, uint64_t number, bool *once)
{
    CUevent event = covering_event(stream, number);
    *once = !event;
    return event ? event : event_once(streams, stream);
}

static vpmm_status no_event(void)
{
    return fail(VPMM_ERROR_DRIVER, "the point at which the memory was freed cannot be recorded on its stream now");
}

/* The waiter's own context is current for its wait: for a default stream that decides which stream it is. */
static vpmm_status await_event(struct streams *streams, CUevent event, const struct stream *waiter)
{
    struct device_scope scope;
    if (!waiter) {
        if (device_call(streams->device, cuEventSynchronize, event) != CUDA_SUCCESS)
            return device_failed(streams->device, "waiting for memory that a stream has freed");
        return VPMM_SUCCESS;
    }
    vpmm_status status = device_enter_context(streams->device, waiter->context, &scope);
    if (status != VPMM_SUCCESS)
        return status;
    if (device_call(streams->device, cuStreamWaitEvent, waiter->handle, event, 0) != CUDA_SUCCESS)
        status = device_failed(streams->device, "making a stream wait for memory that another has freed");
    device_leave(streams->device, &scope);
    return status;
}

/* Counted among the waiters before completed is read: a mark that is chosen then is not recorded again under it. */
static vpmm_status wait_counted(struct streams *streams, struct stream *stream, uint64_t number,
                                const struct stream *waiter)
{
    bool once;
    if (number <= load_sc_u64(&stream->completed))
        return VPMM_SUCCESS;
    CUevent event = event_for(streams, stream, number, &once);
    vpmm_status status = event ? await_event(streams, event, waiter) : no_event();
    if (event && once)
        device_call(streams->device, cuEventDestroy, event); /* a wait that is queued keeps what it needs */
    return status;
}

/* Counted in among the freeing stream's users, so that its record and its events stay its own meanwhile. */
static vpmm_status wait_entered(struct streams *streams, struct stream *stream, uint64_t number,
                                const struct stream *waiter)
{
    struct device_scope scope;
    if (number <= load_sc_u64(&stream->completed))
        return VPMM_SUCCESS;
    vpmm_status status = device_enter_context(streams->device, stream->context, &scope);
    if (status != VPMM_SUCCESS)
        return status;
    if (load_relaxed_u64(&stream->recorded) < number)
        stream_mark_by_other(streams, stream);
    fetch_add_sc_u32(&stream->waiters, 1);
    status = wait_counted(streams, stream, number, waiter);
    fetch_add_sc_u32(&stream->waiters, UINT32_MAX);
    device_leave(streams->device, &scope);
    return status;
}

/* `waiter` NULL: the calling thread waits. */
static vpmm_status wait_for(struct streams *streams, struct fence fence, const struct stream *waiter)
{
    struct stream *stream = stream_at(streams, fence.stream);
    fetch_add_sc_u32(&stream->users, 1);
    vpmm_status status = wait_entered(streams, stream, fence.number, waiter);
    stream_leave(stream);
    return status;
}

vpmm_status stream_wait(struct streams *streams, struct stream *waiter, struct fence fence)
{
    if (fence_usable(streams, fence, waiter))
        return VPMM_SUCCESS;
    return wait_for(streams, fence, waiter);
}

vpmm_status stream_wait_host(struct streams *streams, struct fence fence)
{
    if (fence_passed(streams, fence))
        return VPMM_SUCCESS;
    return wait_for(streams, fence, NULL);
}

/* ---- release ---- */

bool stream_enter_cached(struct stream *stream)
{
    fetch_add_sc_u32(&stream->users, 1);
    enum stream_state state = load_sc_u32(&stream->state);
    if (state == STREAM_ACTIVE || state == STREAM_ORPHAN)
        return true;
    stream_leave(stream);
    return false;
}

void stream_finish(struct streams *streams, struct stream *stream)
{
    if (stream->is_private)
        stream_mark(streams, stream);
    stream_leave(stream);
}

/* Everything published until now, if the driver lets it. */
static bool mark_for_release(struct streams *streams, struct stream *stream)
{
    enum { TRIES = 3 }; /* that the driver refused */
    uint64_t last = load_sc_u64(&stream->published);
    for (int tries = 0; load_relaxed_u64(&stream->recorded) < last && tries < TRIES;)
        if (mark(streams, stream, false))
            tries++;
        else
            clock_yield(); /* another thread is marking, and will be done */
    return load_relaxed_u64(&stream->recorded) >= last;
}

enum release { RELEASE_OURS, RELEASE_OTHERS, RELEASE_UNKNOWN };

/* Makes the record RELEASING, with this thread counted in; or says that another thread does, or that there is none. */
static enum release begin_release(struct streams *streams, const struct identity *identity, struct stream **out)
{
    lock_take(&streams->lock);
    struct stream *stream = *out = object_map_get(streams->registry, identity->key);
    enum release release = !stream ? RELEASE_UNKNOWN : RELEASE_OURS;
    if (stream && load_sc_u32(&stream->state) == STREAM_RELEASING) {
        release = RELEASE_OTHERS;
    } else if (stream && stream->id != identity->id) {
        unregister(streams, stream, STREAM_ORPHAN); /* the handle has come back as another stream's */
        release = RELEASE_UNKNOWN;
    } else if (stream) {
        fetch_add_sc_u32(&stream->users, 1);
        store_sc_u32(&stream->state, STREAM_RELEASING); /* before users is read: see stream_enter_cached */
    }
    pthread_mutex_unlock(&streams->lock);
    return release;
}

/* The record as it was, or out of the registry. */
static void end_release(struct streams *streams, struct stream *stream, bool marked)
{
    lock_take(&streams->lock);
    vpmm_assert(peek_u32(&stream->state) == STREAM_RELEASING && peek_u32(&stream->users) > 0);
    if (marked)
        unregister(streams, stream, STREAM_RELEASED);
    else
        store_sc_u32(&stream->state, STREAM_ACTIVE);
    pthread_mutex_unlock(&streams->lock);
    stream_leave(stream);
}

/*
 * Calls that were given the stream, and threads at its caches, have come before: they are waited for. Whoever comes now
 * waits in stream_enter, or leaves the stream alone; only hits of its caches go on, until these are closed by `flush`,
 * and a free that hits then finds out (cache_note).
 */
static bool empty_and_mark(struct streams *streams, struct stream *stream, void (*flush)(struct stream *, void *),
                           void *data)
{
    while (load_sc_u32(&stream->users) > 1)
        clock_yield();
    flush(stream, data);
    return mark_for_release(streams, stream);
}

vpmm_status stream_release(struct streams *streams, CUstream handle, void (*flush)(struct stream *, void *), void *data)
{
    struct identity identity;
    struct stream *stream;
    enum release release;
    bool others = false;
    vpmm_status status = identify(streams, handle, &identity);
    if (status != VPMM_SUCCESS)
        return status;
    while ((release = begin_release(streams, &identity, &stream)) == RELEASE_OTHERS) {
        others = true;
        clock_yield();
    }
    if (release == RELEASE_UNKNOWN)
        return others ? VPMM_SUCCESS
                      : fail(VPMM_ERROR_INVALID_VALUE,
                             "the pool does not know the stream: nothing was allocated or freed on it "
                             "since it was created or last released");
    bool marked = empty_and_mark(streams, stream, flush, data);
    end_release(streams, stream, marked);
    return marked
               ? VPMM_SUCCESS
               : fail(VPMM_ERROR_DRIVER, "the stream's last point cannot be recorded now: synchronise the stream, call "
                                         "vpmm_poll, and release it again");
}

/* ---- the reaper's part ---- */

/*
 * Whether the ith taken mark has passed; no: not yet, or it cannot be told. `word`: as the mark was before its event
 * was asked. One that is being recorded again is still to come.
 */
static bool has_passed(struct streams *streams, const struct stream *stream, uint32_t i, uint64_t *word)
{
    *word = load_acquire_u64(&stream->taken[i]->word);
    if (mark_state(*word) != MARK_RECORDED)
        return false;
    CUevent event = load_acquire_ptr(&stream->taken[i]->event);
    CUresult result = device_call(streams->device, cuEventQuery, event);
    if (result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_READY || device_result_is_capture(result))
        return result == CUDA_SUCCESS;
    if (device_context_is_gone(streams->device, stream->context))
        return true; /* with its context went its work */
    device_lose(streams->device);
    return false;
}

/*
 * How many of the taken marks have passed; `last`: the last of them, as it was before it was asked. They pass in order,
 * and queries are dear (the driver serves one at a time for the whole process), so the newest is asked first, which
 * mostly answers for all, then the oldest, then halves.
 */
static uint32_t count_passed(struct streams *streams, const struct stream *stream, uint64_t *last)
{
    uint64_t word;
    uint32_t low = 0, high = stream->taken_marks; /* the first `low` have passed, mark `high` has not */
    if (has_passed(streams, stream, high - 1, last))
        return high;
    high--;
    for (uint32_t ask = 0; low < high && !device_lost(streams->device); ask = (low + high) / 2) {
        if (has_passed(streams, stream, ask, &word)) {
            *last = word;
            low = ask + 1;
        } else {
            high = ask;
        }
    }
    return low;
}

/*
 * Frees the places of the first marks, oldest first: of the last, if it was not recorded again since it was asked. The
 * others are not the newest, so nobody records them again. How many it was.
 */
static uint32_t retire_marks(struct stream *stream, uint32_t passed, uint64_t last)
{
    for (uint32_t i = 0; i + 1 < passed; i++) {
        uint64_t number = mark_number(load_relaxed_u64(&stream->taken[i]->word));
        store_release_u64(&stream->taken[i]->word, mark_word(number, MARK_FREE)); /* pairs with mark_once's acquire */
    }
    bool retired = cas_sc_u64(&stream->taken[passed - 1]->word, &last, mark_word(mark_number(last), MARK_FREE));
    return retired ? passed : passed - 1;
}

/* Publishes what has passed of one stream, in the ring's order. */
static bool complete_stream(struct streams *streams, struct stream *stream)
{
    struct mark *mark;
    uint64_t last = 0;
    while (stream->taken_marks < STREAM_MARKS && (mark = ring_get(stream->pending)))
        stream->taken[stream->taken_marks++] = mark;
    uint32_t passed = stream->taken_marks ? count_passed(streams, stream, &last) : 0;
    if (!passed || device_lost(streams->device))
        return false;
    if (mark_number(last) > load_relaxed_u64(&stream->completed))
        store_sc_u64(&stream->completed, mark_number(last)); /* pairs with fence_passed, and before a place is free */
    vpmm_assert(mark_number(last) <= peek_u64(&stream->published));
    uint32_t retired = retire_marks(stream, passed, last);
    vpmm_assert(retired <= stream->taken_marks && retired <= peek_u32(&stream->outstanding));
    stream->taken_marks -= retired;
    memmove(stream->taken, stream->taken + retired, stream->taken_marks * sizeof stream->taken[0]);
    fetch_add_acq_rel_u32(&stream->outstanding, 0 - retired);
    return true;
}

static bool has_caches(const struct stream *stream)
{
    return load_sc_u32(&stream->caches[SPACE_PAGES]) || load_sc_u32(&stream->caches[SPACE_GRANULES]);
}

/* Takes a record out of use when nothing refers to its stream any more. */
static void retire_record(struct streams *streams, struct stream *stream)
{
    enum stream_state state = load_sc_u32(&stream->state);
    bool thread_gone = state == STREAM_ACTIVE && stream->thread && load_acquire_u32(&stream->thread->exited);
    if (!thread_gone && state != STREAM_RELEASED && state != STREAM_ORPHAN)
        return;
    lock_take(&streams->lock);
    if (thread_gone && load_sc_u32(&stream->state) == STREAM_ACTIVE)
        unregister(streams, stream, STREAM_ORPHAN);
    /* The caches before the users: a flusher counts itself in, and then looks whether the cache is still attached. */
    if (load_sc_u32(&stream->state) != STREAM_UNUSED && !has_caches(stream) && !load_sc_u32(&stream->users) &&
        load_sc_u64(&stream->published) == load_relaxed_u64(&stream->completed) &&
        !load_relaxed_u32(&stream->outstanding) && !hints_count(&stream->free[SPACE_PAGES]) &&
        !hints_count(&stream->free[SPACE_GRANULES])) {
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
        any |= complete_stream(streams, stream);
        if (load_sc_u64(&stream->published) <= load_relaxed_u64(&stream->recorded)) {
            retire_record(streams, stream);
            continue;
        }
        fetch_add_sc_u32(&stream->users, 1); /* the handle stays valid while it is marked */
        if (load_sc_u32(&stream->state) == STREAM_ACTIVE)
            stream_mark_by_other(streams, stream);
        stream_leave(stream);
        retire_record(streams, stream);
    }
    return any;
}

bool streams_pending(const struct streams *streams)
{
    for (uint32_t slot = 1, n = load_acquire_u32(&streams->slots); slot < n; slot++) {
        struct stream *stream = stream_at(streams, slot);
        enum stream_state state = load_sc_u32(&stream->state);
        bool ending = state == STREAM_RELEASED && !has_caches(stream); /* detach wakes the reaper */
        if (load_sc_u32(&stream->outstanding) || ending)
            return true;
    }
    return false;
}

/* Counted in: a record that is in use keeps what it is. */
static bool is_unmarked(struct stream *stream, bool *markable)
{
    if (load_sc_u64(&stream->published) <= load_relaxed_u64(&stream->recorded))
        return false;
    fetch_add_sc_u32(&stream->users, 1);
    enum stream_state state = load_sc_u32(&stream->state);
    *markable = state == STREAM_ACTIVE && !stream->is_private;
    stream_leave(stream);
    return state == STREAM_ACTIVE || state == STREAM_ORPHAN;
}

static bool any_unmarked(const struct streams *streams, bool by_others)
{
    bool markable;
    for (uint32_t slot = 1, n = load_acquire_u32(&streams->slots); slot < n; slot++)
        if (is_unmarked(stream_at(streams, slot), &markable) && markable == by_others)
            return true;
    return false;
}

bool streams_unmarked(const struct streams *streams)
{
    return any_unmarked(streams, true);
}

bool streams_unmarkable(const struct streams *streams)
{
    return any_unmarked(streams, false);
}

/* ---- the last resort ---- */

struct snapshot {
    CUcontext context; /* NULL: nothing of the slot is waited for */
    uint64_t published;
};

static void complete_until(struct stream *stream, uint64_t published)
{
    if (published > load_relaxed_u64(&stream->completed))
        store_sc_u64(&stream->completed, published);
    raise_relaxed_u64(&stream->recorded, published);
}

/*
 * Waits for everything that the context's streams were given. cuMemFree does (an H200 waits 50 ms for a kernel of 50
 * ms, of a stream that is destroyed as well), and leaves captures alone in relaxed mode; cuCtxSynchronize would destroy
 * each capture in the context, whatever the mode.
 */
static vpmm_status wait_for_context(struct streams *streams, struct stream *holder, CUcontext context)
{
    CUdeviceptr *block = &holder->wait_block;
    bool kept = *block != 0;
    CUresult result = kept ? device_call(streams->device, cuMemFree, *block) : CUDA_SUCCESS;
    if (kept && holder->wait_refused && result == CUDA_ERROR_INVALID_VALUE) /* it was taken though the driver said no */
        kept = false;
    if (!kept) {
        *block = 0;
        holder->wait_context = context;
        /* If there is a block it was made, whatever the driver said. */
        if (device_call(streams->device, cuMemAlloc, block, 1) != CUDA_SUCCESS && !*block)
            return device_failed(streams->device, "making a block to wait for the device by");
        result = device_call(streams->device, cuMemFree, *block);
    }
    holder->wait_refused = result != CUDA_SUCCESS;
    if (holder->wait_refused) /* the block is tried again another time */
        return device_failed(streams->device, "waiting for the device before giving up");
    *block = 0;
    return VPMM_SUCCESS;
}

/* The record that has a block of the context, the only one whose end the block's freeing waits for; else `stream`. */
static struct stream *holder_of(struct streams *streams, uint32_t slots, struct stream *stream)
{
    struct stream *empty = stream;
    for (uint32_t slot = 1; slot < slots; slot++) {
        struct stream *other = stream_at(streams, slot);
        if (other->wait_block && other->wait_context == stream->context)
            return other;
        if (!other->wait_block && empty->wait_block)
            empty = other;
    }
    return empty;
}

/* Waits for one context and completes what was published on its streams before. With a context went its work. */
static vpmm_status synchronise_context(struct streams *streams, struct snapshot *snapshot, uint32_t slots,
                                       struct stream *one)
{
    struct device_scope scope;
    CUcontext context = one->context;
    bool gone = device_context_is_gone(streams->device, one->context);
    vpmm_status status = gone ? VPMM_SUCCESS : device_enter_context(streams->device, context, &scope);
    if (status == VPMM_SUCCESS && !gone) {
        lock_take(&streams->wait_lock);
        struct stream *holder = holder_of(streams, slots, one);
        bool kept = holder->wait_block;
        status = wait_for_context(streams, holder, context);
        pthread_mutex_unlock(&streams->wait_lock);
        if (kept)
            keep_wait_block(streams, holder, context); /* for the next time */
        device_leave(streams->device, &scope);
    }
    for (uint32_t slot = 1; slot < slots; slot++)
        if (snapshot[slot].context == context) {
            if (status == VPMM_SUCCESS)
                complete_until(stream_at(streams, slot), snapshot[slot].published);
            snapshot[slot].context = NULL;
        }
    return status;
}

vpmm_status streams_synchronise(struct streams *streams)
{
    uint32_t slots = load_acquire_u32(&streams->slots);
    struct snapshot *snapshot = calloc(slots, sizeof *snapshot);
    vpmm_status status = VPMM_SUCCESS;
    if (!snapshot)
        return fail(VPMM_ERROR_HOST_MEMORY, "no host memory for a list of streams");
    for (uint32_t slot = 1; slot < slots; slot++) {
        struct stream *stream = stream_at(streams, slot);
        snapshot[slot].published = load_sc_u64(&stream->published);
        if (snapshot[slot].published > load_relaxed_u64(&stream->completed))
            snapshot[slot].context = stream->context;
    }
    for (uint32_t slot = 1; slot < slots; slot++)
        if (snapshot[slot].context) {
            vpmm_status one = synchronise_context(streams, snapshot, slots, stream_at(streams, slot));
            status = status == VPMM_SUCCESS ? one : status;
        }
    free(snapshot);
    return status;
}

void stream_new_point(struct streams *streams, struct stream *stream)
{
    recordable_now(streams, stream, true);
}
