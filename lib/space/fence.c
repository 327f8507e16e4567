#include "space/fence.h"

#include "base/clock.h"
#include "base/lock.h"

#include <string.h>

/* ---- events ---- */

void stream_take_events(struct stream *stream, struct stale_events *stale)
{
    for (int i = 0; i < STREAM_MARKS; i++) {
        CUevent event = load_relaxed_ptr(&stream->mark[i].event);
        if (event)
            stale->event[stale->count++] = event;
        store_relaxed_ptr(&stream->mark[i].event, NULL);
    }
}

void stale_events_destroy(struct streams *streams, const struct stale_events *stale)
{
    for (unsigned i = 0; i < stale->count; i++)
        device_call(streams->device, cuEventDestroy, stale->event[i]);
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

/*
 * Of an open stream, or one whose gate the caller is in: whether another than a call that was given it may record on
 * it. The caller is counted in.
 */
static bool is_open_now(const struct streams *streams, const struct stream *stream)
{
    return stream_has_handle(stream) && captures_nothing(streams, stream);
}

/*
 * Of a stream that captures nothing, so that its id may be asked. A program that has destroyed it without a word may
 * have another one with its handle by now, which the gate lets in, or whose frees fill this one's cache; and the work
 * of that one says nothing of what the memory waits for. Not of an open one, whose end the program has to say.
 */
static bool has_its_handle(const struct streams *streams, const struct stream *stream)
{
    unsigned long long id;
    return load_relaxed_u32(&stream->privacy) == STREAM_OPEN || !stream->has_id ||
           (device_call(streams->device, cuStreamGetId, stream->handle, &id) == CUDA_SUCCESS && id == stream->id);
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
        store_release_ptr(&mark->event, event); /* pairs with those in covering_event and has_passed */
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
    store_release_u64(&mark->word, mark_word(number, MARK_RECORDED)); /* as the event's */
    stream->next_mark = (stream->next_mark + 1) % STREAM_MARKS;
    fetch_add_sc_u32(&stream->outstanding, 1); /* before bell_ring's load: see bell.h */
    ring_put(stream->pending, mark);           /* cannot be full: it holds more than STREAM_MARKS */
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

/* For may_wait. */
static void note_marked(const struct streams *streams, struct stream *stream)
{
    if (!streams->marks_may_wait || !streams_has_one(streams))
        return;
    uint64_t part = stats_level(streams->device->stats, STAT_mapped_bytes) / MARK_ALONE_PART;
    store_relaxed_u64(&stream->marked_at_ns, clock_now_ns());
    store_relaxed_u64(&stream->unmarked_bytes, 0);
    store_relaxed_u64(&stream->unmarked_most, part > MARK_ALONE_BYTES ? part : MARK_ALONE_BYTES);
}

/* Under the try-lock. False: nothing can be marked, and trying again at once is of no use. */
static bool mark_once(struct streams *streams, struct stream *stream, bool by_other)
{
    uint64_t number = load_sc_u64(&stream->published); /* before the event is recorded */
    struct mark *place = &stream->mark[stream->next_mark], *newest = NULL;
    if (number <= load_relaxed_u64(&stream->recorded))
        return true;
    if ((by_other ? !is_open_now(streams, stream) : !captures_nothing(streams, stream)) ||
        !has_its_handle(streams, stream))
        return false;
    bool is_free = mark_state(load_acquire_u64(&place->word)) == MARK_FREE; /* pairs with retire_marks */
    if (by_other && (!is_free || load_sc_u32(&stream->waiters)))
        return false;
    if (!is_free)
        newest = claim_newest(stream);
    if (!(newest ? mark_again(streams, stream, newest, number) : mark_place(streams, stream, place, number, by_other)))
        return false;
    raise_relaxed_u64(&stream->recorded, number);
    note_marked(streams, stream);
    vpmm_assert(peek_u32(&stream->marking) && peek_u64(&stream->recorded) <= peek_u64(&stream->published));
    stats_count(streams->device->stats, STAT_marks);
    return true;
}

/* False: another thread is at it. */
static bool mark(struct streams *streams, struct stream *stream, bool by_other)
{
    struct device_scope scope;
    if (load_sc_u64(&stream->published) <= load_relaxed_u64(&stream->recorded) || device_lost(streams->device) ||
        streams->by_name)
        return true;
    if (device_enter_context(streams->device, stream->context, &scope) != VPMM_SUCCESS)
        return true;
    /*
     * Each turn of the loop marks what another thread published meanwhile, and left to this one to mark: also if others
     * have already marked this thread's own fence.
     */
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
    const vpmm_capture_gate *gate = &streams->gate;
    enum stream_privacy privacy = load_relaxed_u32(&stream->privacy);
    if (load_sc_u64(&stream->published) <= load_relaxed_u64(&stream->recorded) ||
        !stream_has_handle(stream)) /* of an orphan the program has the handle no more */
        return;
    if (privacy == STREAM_OPEN) {
        mark(streams, stream, true);
    } else if (privacy == STREAM_GATED && !is_reaper(streams) && gate->enter(gate->data, stream->handle)) {
        mark(streams, stream, true);
        gate->leave(gate->data, stream->handle);
    }
}

/*
 * What a private stream leaves without a mark only a wait for its context ends, for which there has to be a block
 * (context.h). Where no mark may ever wait, unmarked_most is 0.
 */
static bool may_wait(const struct streams *streams, const struct stream *stream)
{
    return streams_has_one(streams) && !stream_is_brief(streams, stream) &&
           !(stream_is_private(stream) && load_relaxed_u32(&streams->lacks_block)) &&
           load_relaxed_u64(&stream->unmarked_bytes) < load_relaxed_u64(&stream->unmarked_most) &&
           clock_now_ns() - load_relaxed_u64(&stream->marked_at_ns) < MARK_ALONE_NS;
}

/*
 * Who marks a gated stream from another call may give up where this one would not, which nobody makes up for: this one
 * waits until it is out of the gate, a few driver calls, and looks again.
 */
void stream_mark(struct streams *streams, struct stream *stream)
{
    if (may_wait(streams, stream))
        return;
    while (!mark(streams, stream, false) && load_relaxed_u32(&stream->privacy) == STREAM_GATED &&
           load_sc_u64(&stream->published) > load_relaxed_u64(&stream->recorded))
        clock_yield();
}

bool stream_mark_all(struct streams *streams, struct stream *stream)
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

/* ---- waits ---- */

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
    stream_visit(stream);
    bool recordable = !device_lost(streams->device) && /* of such a pool streams go unreleased */
                      stream_has_handle(stream) && !stream_is_private(stream) &&
                      device_enter_context(streams->device, stream->context, &scope) == VPMM_SUCCESS;
    if (recordable) {
        recordable = is_open_now(streams, stream);
        if (recordable && take_fence)
            fence_take(stream);
        device_leave(streams->device, &scope);
    }
    stream_end_visit(stream);
    return recordable;
}

bool fence_seems_waitable(const struct streams *streams, struct fence fence)
{
    const struct stream *stream = fence.stream ? stream_seen(streams, fence.stream) : NULL;
    return fence_passed(streams, fence) || (stream && (load_relaxed_u64(&stream->recorded) >= fence.number ||
                                                       (stream_has_handle(stream) && !stream_is_private(stream))));
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
    if (stream_is_private(stream) || !is_open_now(streams, stream))
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

/* By a refused call since device_forget_failure, or because nobody else may record on the stream just now. */
static vpmm_status no_event(struct device *device)
{
    if (device_has_failed())
        device_failed(device, "recording the point at which a stream has freed memory");
    else
        fail(VPMM_ERROR_DRIVER, "the point at which the memory was freed cannot be recorded on its stream now");
    return VPMM_ERROR_DRIVER;
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

/*
 * Counted among the waiters before completed is read: a mark that is chosen then is not recorded again under it by
 * another, whose record might be a capture's; by the stream's own calls it may be, at a later point that covers it. Who
 * waits on the host leaves the stream's users first: a release of the stream waits for these, and not for its work. The
 * waiters keep the record, and so its events, for this stream.
 */
static vpmm_status wait_counted(struct streams *streams, struct stream *stream, uint64_t number,
                                const struct stream *waiter, bool *is_inside)
{
    bool once;
    if (number <= load_sc_u64(&stream->completed))
        return VPMM_SUCCESS;
    device_forget_failure();
    CUevent event = event_for(streams, stream, number, &once);
    *is_inside = waiter;
    if (!waiter)
        stream_end_visit(stream); /* counted among the waiters by now: see retire_record */
    vpmm_status status = event ? await_event(streams, event, waiter) : no_event(streams->device);
    if (event && once)
        device_call(streams->device, cuEventDestroy, event); /* a wait that is queued keeps what it needs */
    return status;
}

/* Counted in among the freeing stream's users, so that its handle and its events stay its own meanwhile. */
static vpmm_status wait_entered(struct streams *streams, struct stream *stream, uint64_t number,
                                const struct stream *waiter, bool *is_inside)
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
    status = wait_counted(streams, stream, number, waiter, is_inside);
    fetch_add_sc_u32(&stream->waiters, UINT32_MAX);
    device_leave(streams->device, &scope);
    return status;
}

/* `waiter` NULL: the calling thread waits. */
static vpmm_status wait_for(struct streams *streams, struct fence fence, const struct stream *waiter)
{
    struct stream *stream = stream_at(streams, fence.stream);
    bool is_inside = true;
    stream_visit(stream);
    vpmm_status status = wait_entered(streams, stream, fence.number, waiter, &is_inside);
    if (is_inside)
        stream_end_visit(stream);
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

void stream_new_point(struct streams *streams, struct stream *stream)
{
    recordable_now(streams, stream, true);
}

/* ---- what has passed ---- */

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
    if (result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_READY || device_result_is_capture(result) ||
        result == CUDA_ERROR_OUT_OF_MEMORY) /* the driver's own, which may pass */
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

bool fences_complete(struct streams *streams, struct stream *stream)
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
    fetch_add_sc_u32(&stream->outstanding, 0 - retired);
    return true;
}

void fences_complete_until(struct stream *stream, uint64_t number)
{
    if (number > load_relaxed_u64(&stream->completed))
        store_sc_u64(&stream->completed, number);
    raise_relaxed_u64(&stream->recorded, number);
}
