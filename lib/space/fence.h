/*
 * fence.h - fences: which memory a stream may use without waiting, and how one waits for the rest.
 *
 * A fence is a point in a stream: the slot of its record (stream.h), and a number.
 *   published   fence numbers given out: memory freed on the stream takes published + 1
 *   recorded    the highest number that an event covers
 *   completed   the highest number whose event has passed
 *               completed <= recorded <= published at rest, and all three only grow, also when a record is used again
 *               for another stream (a mark may be seen to have passed before it counts as recorded): so a fence (slot,
 *               n) has passed if and only if n <= completed, for ever, and no serial number is needed against slots
 *               that come back
 *   mark        reads n = published, then records an event, then appends (n, event) to the ring. What was freed with
 *               a number up to n was freed before n was read, so its stream's work is before the event.
 *               So what completes is recorded before; a late mark only waits longer
 *
 * Who may do what
 *   take, passed   any thread, lock-free
 *   mark           any thread, under the record's try-lock, `marking`: who loses it leaves, and the holder looks again
 *                  after unlocking. Two wait: a call on a gated stream of its own, until who marks that through the
 *                  gate is out, and stream_mark_all for each other marker
 *   wait           for no thread; on the host for the GPU
 *   complete       one thread at a time (the event lock, arena.h): alone asks for marks, and publishes completed
 *   Who takes, marks or waits is counted among the stream's users, so that the record and its events stay the stream's
 *   meanwhile.
 *
 * Marks. Each of a record's STREAM_MARKS places has an event, created there once and recorded again only on the
 * record's stream, so that a late waiter waits for a later point of the same stream. A place's word is number:62 |
 * state:2:
 *   FREE       its mark has passed, or it never had one           -> RECORDED by a marker
 *   RECORDED   the event covers the number, and will pass         -> FREE by a pass, in the order of marking; BUSY
 *   BUSY       it is the newest, and is being recorded again      -> RECORDED, with a higher number
 * When every place is RECORDED a call that was given the stream records the newest again, at a later point: so its mark
 * is never refused for want of a place. A pass reads the word before it asks the event, and frees the place by
 * exchange of what it has read: a mark that was raised in between is asked again.
 * While a pool has met one stream alone nobody but its reaper waits for what passes there, which looks every few
 * milliseconds; the stream itself need not. So if the pool has a reaper, marks wait until MARK_ALONE_NS, a pause of the
 * reaper's, are over since the latest, or more than MARK_ALONE_BYTES and an eighth of what is mapped was freed. What
 * then stays unmarked as the program falls silent is marked by the reaper, or, of a private stream, lies as what is in
 * its caches does: until the stream's next call, one of another's through the gate, or a wait for its context. With a
 * mark at each free, training a ResNet under PyTorch recorded, and asked for, 320 events a step, and was 14 % slower
 * (an H200).
 * `waiters` counts threads between the choice of an event and the end of their wait for it, for which the record stays
 * the stream's. Who marks for another records nothing while there are any: the place it would take may be one that a
 * waiter has chosen before it passed.
 *
 * Which thread may record on a stream, or look at it, is "Whose handle", stream.h.
 */
#ifndef VPMM_LIB_FENCE_H
#define VPMM_LIB_FENCE_H

#include "space/stream.h"

/* The fence of memory freed on the stream now; one may serve a batch. */
static inline struct fence fence_take(struct stream *stream)
{
    vpmm_assert(peek_u32(&stream->users) > 0);
    return (struct fence){stream->slot, fetch_add_sc_u64(&stream->published, 1) + 1};
}

/* Pairs with the store in fences_complete: what the stream's work did is before what the caller does next. */
static inline bool fence_passed(const struct streams *streams, struct fence fence)
{
    const struct stream *stream = fence.stream ? stream_seen(streams, fence.stream) : NULL;
    return !fence.stream || (stream && fence.number <= load_sc_u64(&stream->completed));
}

/* Whether work on `stream` may use memory behind the fence with no wait. */
static inline bool fence_usable(const struct streams *streams, struct fence fence, const struct stream *stream)
{
    return fence.stream == stream->slot || fence_passed(streams, fence);
}

/* ---- marks ---- */

/* So much has been freed to all behind a fence, or is left of what was: it counts while the fence has no mark. */
static inline void fence_count_bytes(const struct streams *streams, struct fence fence, uint64_t bytes)
{
    if (!streams->marks_may_wait || !fence.stream || !streams_has_one(streams))
        return;
    struct stream *stream = stream_at(streams, fence.stream);
    if (fence.number > load_relaxed_u64(&stream->recorded))
        fetch_add_relaxed_u64(&stream->unmarked_bytes, bytes);
}

enum { MARK_ALONE_NS = 5000000, MARK_ALONE_BYTES = 128 << 20, MARK_ALONE_PART = 8 };

/*
 * Covers what is published with an event, in a call that was given the stream, unless the mark may wait: see above.
 * Nothing is lost if the driver refuses, or the stream captures: a later mark covers it.
 */
void stream_mark(struct streams *, struct stream *);

/*
 * The same by another, who is counted in: if the stream is ACTIVE or RELEASING, is open or has a gate that lets the
 * caller in, captures nothing, and has a free place. Nothing is lost if not.
 */
void stream_mark_by_other(struct streams *, struct stream *);

/* As stream_mark, until everything that is published by now is covered. False: the driver does not let it. */
bool stream_mark_all(struct streams *, struct stream *);

/* Events that are no record's any more: a record that goes to a stream of another context has no use for its own. */
struct stale_events {
    CUevent event[STREAM_MARKS];
    unsigned count;
};

/* Of a record that nobody else uses. */
void stream_take_events(struct stream *, struct stale_events *);
void stale_events_destroy(struct streams *, const struct stale_events *);

/* ---- waits ---- */

/* Whether a wait for it is possible: not for what an orphaned stream left unmarked, nor for what a private one did. */
bool fence_waitable(const struct streams *, struct fence);

/* The same without a call of the driver, for who holds a lock: the stream may turn out to capture. */
bool fence_seems_waitable(const struct streams *, struct fence);

/* Makes work queued on `waiter` from now on wait, on the device, for the fence. */
vpmm_status stream_wait(struct streams *, struct stream *waiter, struct fence);

/* Makes the calling thread wait for the fence. */
vpmm_status stream_wait_host(struct streams *, struct fence);

/* A new fence number, of no memory: a point to wait for, if one can be recorded now. */
void stream_new_point(struct streams *, struct stream *);

/* ---- what has passed; under the event lock ---- */

/* Asks the driver for the oldest marks of one stream and publishes what has passed, in the ring's order. True: some. */
bool fences_complete(struct streams *, struct stream *);

/* Publishes that everything up to this number has passed, as the caller knows without any mark. */
void fences_complete_until(struct stream *, uint64_t number);

#endif
