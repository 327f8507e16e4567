#include "stream.h"

#include "clock.h"
#include "lock.h"

#include <stdlib.h>
#include <string.h>

/* ---- threads, for per-thread streams ---- */

struct thread {
    _Atomic(uint32_t) references;
    _Atomic(uint32_t) exited;
};

static pthread_key_t thread_key;
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
    pthread_key_create(&thread_key, thread_exits);
}

/* The calling thread, NULL: no memory. The record that keeps it takes a reference. */
static struct thread *thread_self(void)
{
    pthread_once(&thread_key_once, make_thread_key);
    struct thread *self = pthread_getspecific(thread_key);
    if (self)
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

vpmm_status streams_init(struct streams *streams, struct device *device)
{
    streams->device = device;
    streams->registry = object_map_create();
    if (!streams->registry)
        return fail(VPMM_ERROR_HOST_MEMORY, "no host memory for the registry of streams");
    pthread_mutex_init(&streams->lock, NULL);
    store_relaxed_u32(&streams->slots, 1);
    return VPMM_SUCCESS;
}

static void destroy_events(struct streams *streams, struct stream *stream)
{
    for (int i = 0; i < STREAM_MARKS; i++) {
        CUevent event = load_relaxed_ptr(&stream->mark[i].event);
        if (event)
            device_call(streams->device, cuEventDestroy, event);
        store_relaxed_ptr(&stream->mark[i].event, NULL);
    }
}

void streams_free(struct streams *streams)
{
    if (!streams->registry)
        return;
    for (uint32_t slot = 1; slot < load_relaxed_u32(&streams->slots); slot++) {
        struct stream *stream = stream_at(streams, slot);
        destroy_events(streams, stream);
        ring_destroy(stream->pending);
        thread_unref(stream->thread);
        free(stream);
    }
    for (size_t i = 0; i < STREAMS_MAX / STREAMS_A_SEGMENT; i++)
        free(load_relaxed_ptr(&streams->segment[i]));
    object_map_destroy(streams->registry);
    pthread_mutex_destroy(&streams->lock);
}

/* Under the lock. A record that was never used before. */
static struct stream *record_new(struct streams *streams)
{
    uint32_t slot = load_relaxed_u32(&streams->slots);
    if (slot == STREAM_NONE) /* the last slot's number */
        return NULL;
    _Atomic(void *) *place = &streams->segment[slot / STREAMS_A_SEGMENT];
    struct stream **segment = load_relaxed_ptr(place);
    if (!segment)
        segment = calloc(STREAMS_A_SEGMENT, sizeof *segment);
    if (!segment)
        return NULL;
    store_release_ptr(place, segment); /* pairs with stream_at's acquire */
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
    segment[slot % STREAMS_A_SEGMENT] = stream;
    store_release_u32(&streams->slots, slot + 1); /* pairs with the reaper's acquire */
    return stream;
}

/* Under the lock. Events belong to a context: those of another one are of no use to the new stream. */
static struct stream *record_take(struct streams *streams, CUcontext context)
{
    uint32_t slot = streams->unused;
    if (!slot)
        return record_new(streams);
    struct stream *stream = stream_at(streams, slot);
    streams->unused = stream->next_unused;
    if (stream->context != context)
        destroy_events(streams, stream);
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
    CUcontext popped;
    if (device_call(device, cuCtxPushCurrent, context) != CUDA_SUCCESS)
        return device_failed(device, "looking at the stream's context");
    CUresult result = device_call(device, cuCtxGetDevice, &id);
    device_call(device, cuCtxPopCurrent, &popped);
    if (result != CUDA_SUCCESS)
        return device_failed(device, "looking at the stream's device");
    if (id != device->id)
        return fail(VPMM_ERROR_INVALID_VALUE, "the stream belongs to device %d and the pool to device %d", (int)id,
                    (int)device->id);
    return VPMM_SUCCESS;
}

/* Which record is the stream's; for default streams, by context and thread. */
static vpmm_status find_key(struct streams *streams, CUstream handle, struct identity *identity)
{
    struct device *device = streams->device;
    *identity = (struct identity){.key = {(uint64_t)(uintptr_t)handle, 0}};
    if (is_legacy(handle)) {
        identity->context = device_current_context(device);
        identity->key = (struct object_key){(uint64_t)(uintptr_t)identity->context, 1};
    } else if (handle == CU_STREAM_PER_THREAD) {
        identity->context = device_current_context(device);
        identity->thread = thread_self();
        if (!identity->thread)
            return fail(VPMM_ERROR_HOST_MEMORY, "no host memory for this thread's record");
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
    store_sc_u32(&stream->state, state); /* before users is read: see enter_known */
    object_map_remove(streams->registry, stream->key);
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
    lock_take(&streams->lock);
    struct stream *known = object_map_get(streams->registry, identity->key);
    struct stream *stream = known ? NULL : record_take(streams, context);
    if (stream) {
        stream->key = identity->key;
        stream->handle = handle;
        stream->context = context;
        stream->id = identity->id;
        stream->has_id = identity->has_id;
        stream->thread = identity->thread;
        if (stream->thread)
            fetch_add_relaxed_u32(&stream->thread->references, 1);
        store_sc_u32(&stream->state, STREAM_ACTIVE); /* pairs with enter_known's load: the fields above are set */
        if (!object_map_put(streams->registry, stream)) {
            store_sc_u32(&stream->state, STREAM_RELEASED); /* the reaper takes it back */
            stream = NULL;
        }
    }
    pthread_mutex_unlock(&streams->lock);
    if (!known && !stream)
        return fail(VPMM_ERROR_HOST_MEMORY, "no host memory for another stream, or %d streams are known",
                    STREAMS_MAX - 2);
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

/* Whether the handle still names the stream of the record: the driver may have given it to another one. */
static bool is_same(const struct streams *streams, const struct stream *stream)
{
    unsigned long long id;
    return !stream->has_id ||
           (device_call(streams->device, cuStreamGetId, stream->handle, &id) == CUDA_SUCCESS && id == stream->id);
}

/* The handle is good. The capture is asked about first: see identify. */
static bool handle_recordable(const struct streams *streams, const struct stream *stream)
{
    if (stream->thread && stream->thread != thread_self())
        return false;
    CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
    return device_call(streams->device, cuStreamIsCapturing, stream->handle, &capture) == CUDA_SUCCESS &&
           capture == CU_STREAM_CAPTURE_STATUS_NONE && is_same(streams, stream);
}

bool stream_recordable(const struct streams *streams, const struct stream *stream)
{
    return load_sc_u32(&stream->state) == STREAM_ACTIVE && handle_recordable(streams, stream);
}

/* The marks of a stream's release, which may use every place, and for which the handle is good in any state. */
enum { RELEASE_LIMIT = STREAM_MARKS, USUAL_LIMIT = RELEASE_LIMIT - 2 };

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

/* Under the try-lock. False: nothing was marked, and trying again at once is of no use. */
static bool mark_once(struct streams *streams, struct stream *stream, uint32_t limit)
{
    uint64_t number = load_sc_u64(&stream->published); /* before the event is recorded */
    if (number <= load_relaxed_u64(&stream->recorded) || load_acquire_u32(&stream->outstanding) >= limit ||
        !(limit == RELEASE_LIMIT ? handle_recordable(streams, stream) : stream_recordable(streams, stream)))
        return false;
    struct mark *mark = &stream->mark[stream->next_mark];
    CUevent event = event_of(streams, mark);
    if (!event || device_call(streams->device, cuEventRecord, event, stream->handle) != CUDA_SUCCESS)
        return false;
    store_release_u64(&mark->number, number); /* pairs with the acquire in covering_event */
    stream->next_mark = (stream->next_mark + 1) % STREAM_MARKS;
    fetch_add_acq_rel_u32(&stream->outstanding, 1);
    ring_put(stream->pending, mark); /* cannot be full: it holds more than STREAM_MARKS */
    raise_relaxed_u64(&stream->recorded, number);
    stats_count(streams->device->stats, STAT_marks);
    return true;
}

/* At most `limit` marks may then be outstanding. False: another thread is at it. */
static bool mark(struct streams *streams, struct stream *stream, uint32_t limit)
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
        bool marked = mark_once(streams, stream, limit);
        store_sc_u32(&stream->marking, 0); /* pairs with the exchange */
        again = marked && load_sc_u64(&stream->published) > load_relaxed_u64(&stream->recorded);
    }
    device_leave(streams->device, &scope);
    return had_it;
}

void stream_mark(struct streams *streams, struct stream *stream)
{
    mark(streams, stream, USUAL_LIMIT);
}

/* The event of the earliest mark that covers the number. A place that is recorded again meanwhile holds a later
   point of the same stream, which covers it too. */
static CUevent covering_event(struct stream *stream, uint64_t number)
{
    uint64_t best = UINT64_MAX;
    CUevent event = NULL;
    for (int i = 0; i < STREAM_MARKS; i++) {
        uint64_t covers = load_acquire_u64(&stream->mark[i].number);
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
    bool recordable = load_sc_u32(&stream->state) == STREAM_ACTIVE &&
                      device_enter_context(streams->device, stream->context, &scope) == VPMM_SUCCESS;
    if (recordable) {
        recordable = stream_recordable(streams, stream);
        if (recordable && take_fence)
            fence_take(stream);
        device_leave(streams->device, &scope);
    }
    stream_leave(stream);
    return recordable;
}

bool fence_waitable(const struct streams *streams, struct fence fence)
{
    if (fence_passed(streams, fence))
        return true;
    struct stream *stream = stream_at(streams, fence.stream);
    return load_relaxed_u64(&stream->recorded) >= fence.number || recordable_now(streams, stream, false);
}

/*
 * An event that covers the number, for one wait; *once: to be destroyed after it. The caller is among the stream's
 * users. With all marks outstanding, or another thread at marking, a point of its own is recorded.
 */
static CUevent event_for(struct streams *streams, struct stream *stream, uint64_t number, bool *once)
{
    *once = false;
    if (load_relaxed_u64(&stream->recorded) < number)
        stream_mark(streams, stream);
    CUevent event = covering_event(stream, number);
    if (event || !stream_recordable(streams, stream))
        return event;
    if (device_call(streams->device, cuEventCreate, &event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS &&
        device_call(streams->device, cuEventRecord, event, stream->handle) == CUDA_SUCCESS) {
        *once = true;
        return event;
    }
    if (event)
        device_call(streams->device, cuEventDestroy, event);
    return NULL;
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

/* Counted in among the freeing stream's users, so that its record and its events stay its own meanwhile. */
static vpmm_status wait_counted(struct streams *streams, struct stream *stream, uint64_t number,
                                const struct stream *waiter)
{
    struct device_scope scope;
    bool once;
    if (number <= load_sc_u64(&stream->completed))
        return VPMM_SUCCESS;
    vpmm_status status = device_enter_context(streams->device, stream->context, &scope);
    if (status != VPMM_SUCCESS)
        return status;
    CUevent event = event_for(streams, stream, number, &once);
    status = event ? await_event(streams, event, waiter) : no_event();
    if (event && once)
        device_call(streams->device, cuEventDestroy, event); /* a wait that is queued keeps what it needs */
    device_leave(streams->device, &scope);
    return status;
}

/* `waiter` NULL: the calling thread waits. */
static vpmm_status wait_for(struct streams *streams, struct fence fence, const struct stream *waiter)
{
    struct stream *stream = stream_at(streams, fence.stream);
    fetch_add_sc_u32(&stream->users, 1);
    vpmm_status status = wait_counted(streams, stream, fence.number, waiter);
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

/* Everything published until now, if the driver lets it. */
static bool mark_for_release(struct streams *streams, struct stream *stream)
{
    enum { TRIES = 3 }; /* that the driver refused */
    uint64_t last = load_sc_u64(&stream->published);
    for (int tries = 0; load_relaxed_u64(&stream->recorded) < last && tries < TRIES;)
        if (mark(streams, stream, RELEASE_LIMIT))
            tries++;
        else
            clock_yield(); /* another thread is marking, and will be done */
    return load_relaxed_u64(&stream->recorded) >= last;
}

static bool unregister_released(struct streams *streams, struct stream *stream, struct object_key key)
{
    lock_take(&streams->lock);
    bool ours = load_sc_u32(&stream->state) == STREAM_ACTIVE && object_map_get(streams->registry, key) == stream;
    if (ours)
        unregister(streams, stream, STREAM_RELEASED);
    pthread_mutex_unlock(&streams->lock);
    return ours;
}

/*
 * Out of the registry, and no thread inside but this one, which is counted until the end, so that the record is not
 * used again. Threads that were taking the stream's memory out of caches meanwhile have published it behind later
 * fences, which nobody could mark after the return.
 */
static void leave_released(struct streams *streams, struct stream *stream, struct object_key key)
{
    bool ours = unregister_released(streams, stream, key);
    while (ours && load_sc_u32(&stream->users) > 1) /* also other threads' calls, which they should not be making */
        clock_yield();
    if (ours)
        mark_for_release(streams, stream);
    stream_leave(stream);
    while (!ours && load_sc_u32(&stream->users)) /* two threads release it: this one waits for the other */
        clock_yield();
}

vpmm_status stream_release(struct streams *streams, CUstream handle, void (*flush)(struct stream *, void *), void *data)
{
    struct identity identity;
    vpmm_status status = identify(streams, handle, &identity);
    if (status != VPMM_SUCCESS)
        return status;
    struct stream *stream = object_map_get(streams->registry, identity.key);
    bool known = stream && enter_known(stream, identity.key);
    if (known && stream->id != identity.id) {
        orphan(streams, stream, &identity);
        stream_leave(stream);
        known = false;
    }
    if (!known)
        return fail(VPMM_ERROR_INVALID_VALUE, "the pool does not know the stream: nothing was allocated or freed on it "
                                              "since it was created or last released");
    flush(stream, data);
    if (!mark_for_release(streams, stream)) {
        stream_leave(stream);
        return fail(VPMM_ERROR_DRIVER, "the stream's last point cannot be recorded now: synchronise the stream, call "
                                       "vpmm_poll, and release it again");
    }
    leave_released(streams, stream, identity.key);
    return VPMM_SUCCESS;
}

/* ---- the reaper's part ---- */

/* The program has destroyed the stream's context, which is not the primary one. */
static bool context_is_gone(struct streams *streams, const struct stream *stream)
{
    CUcontext popped;
    if (stream->context == streams->device->primary)
        return false;
    CUresult result = device_call(streams->device, cuCtxPushCurrent, stream->context);
    if (result == CUDA_SUCCESS)
        device_call(streams->device, cuCtxPopCurrent, &popped);
    return result == CUDA_ERROR_CONTEXT_IS_DESTROYED || result == CUDA_ERROR_INVALID_CONTEXT;
}

/* 1: the ith taken mark has passed; 0: not yet, or it cannot be told. */
static bool has_passed(struct streams *streams, const struct stream *stream, uint32_t i)
{
    CUevent event = load_acquire_ptr(&stream->taken[i]->event);
    CUresult result = device_call(streams->device, cuEventQuery, event);
    if (result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_READY || device_result_is_capture(result))
        return result == CUDA_SUCCESS;
    if (context_is_gone(streams, stream))
        return true; /* with its context went its work */
    device_lose(streams->device);
    return false;
}

/*
 * How many of the taken marks have passed. They pass in order, and queries are dear (the driver serves one at a time
 * for the whole process), so the newest is asked first, which mostly answers for all, then the oldest, then halves.
 */
static uint32_t count_passed(struct streams *streams, const struct stream *stream)
{
    uint32_t low = 0, high = stream->taken_marks; /* the first `low` have passed, mark `high` has not */
    if (has_passed(streams, stream, high - 1))
        return high;
    high--;
    for (uint32_t ask = 0; low < high && !device_lost(streams->device); ask = (low + high) / 2) {
        if (has_passed(streams, stream, ask))
            low = ask + 1;
        else
            high = ask;
    }
    return low;
}

/* Publishes what has passed of one stream, in the ring's order. */
static bool complete_stream(struct streams *streams, struct stream *stream)
{
    struct mark *mark;
    while (stream->taken_marks < STREAM_MARKS && (mark = ring_get(stream->pending)))
        stream->taken[stream->taken_marks++] = mark;
    uint32_t passed = stream->taken_marks ? count_passed(streams, stream) : 0;
    if (!passed || device_lost(streams->device))
        return false;
    uint64_t number = load_acquire_u64(&stream->taken[passed - 1]->number);
    if (number > load_relaxed_u64(&stream->completed))
        store_sc_u64(&stream->completed, number); /* pairs with fence_passed */
    stream->taken_marks -= passed;
    memmove(stream->taken, stream->taken + passed, stream->taken_marks * sizeof stream->taken[0]);
    fetch_add_acq_rel_u32(&stream->outstanding, 0 - passed); /* its places may be recorded again from here on */
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
            stream_mark(streams, stream);
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

/* Counted in: a record that is in use keeps its thread. */
static bool is_unmarked(struct stream *stream)
{
    if (load_sc_u64(&stream->published) <= load_relaxed_u64(&stream->recorded))
        return false;
    fetch_add_sc_u32(&stream->users, 1);
    bool unmarked = load_sc_u32(&stream->state) == STREAM_ACTIVE && !stream->thread;
    stream_leave(stream);
    return unmarked;
}

bool streams_unmarked(const struct streams *streams)
{
    for (uint32_t slot = 1, n = load_acquire_u32(&streams->slots); slot < n; slot++)
        if (is_unmarked(stream_at(streams, slot)))
            return true;
    return false;
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

/* Synchronises one context and completes what was published on its streams before. */
static vpmm_status synchronise_context(struct streams *streams, struct snapshot *snapshot, uint32_t slots,
                                       CUcontext context)
{
    struct device_scope scope;
    vpmm_status status = device_enter_context(streams->device, context, &scope);
    if (status != VPMM_SUCCESS)
        return status;
    if (device_call(streams->device, cuCtxSynchronize) != CUDA_SUCCESS)
        status = device_failed(streams->device, "waiting for the device before giving up");
    for (uint32_t slot = 1; slot < slots; slot++)
        if (snapshot[slot].context == context) {
            if (status == VPMM_SUCCESS)
                complete_until(stream_at(streams, slot), snapshot[slot].published);
            snapshot[slot].context = NULL;
        }
    device_leave(streams->device, &scope);
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
            vpmm_status one = synchronise_context(streams, snapshot, slots, snapshot[slot].context);
            status = status == VPMM_SUCCESS ? one : status;
        }
    free(snapshot);
    return status;
}

void stream_new_point(struct streams *streams, struct stream *stream)
{
    recordable_now(streams, stream, true);
}
