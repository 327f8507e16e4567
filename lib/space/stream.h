/*
 * stream.h - streams as records, and fences: which memory a stream may use without waiting.
 *
 * A stream is a record, not a handle: CUDA gives a destroyed stream's handle to the next one while the old one's work
 * still runs. A record is found by handle without a lock and checked by cuStreamGetId; when the id has changed, the
 * old record is orphaned and a new one made.
 *
 *   slot        index of the record; fences name it. 0 is no stream: memory that waits for nothing
 *   published   fence numbers given out: memory freed on the stream takes published + 1
 *   recorded    the highest number that an event covers
 *   completed   the highest number whose event has passed
 *               completed <= recorded <= published, and all three only grow, also when a record is used again for
 *               another stream: so a fence (slot, n) has passed if and only if n <= completed, for ever, and no
 *               serial number is needed against slots that come back. A record is used again only when
 *               completed = published and no front cache is attached to it
 *   mark        reads n = published, then records an event, then appends (n, event) to the ring. What was freed with
 *               a number up to n was freed before n was read, so its stream's work is before the event.
 *               A number is never published for a point that is not yet recorded; a late mark only waits longer
 *
 * Whose handle. A handle is the program's: it destroys the stream, or begins a capture on it, as soon as no call that
 * was given the stream is under way. The library therefore uses a handle in two ways, and in no third:
 *   in a call that was given the stream   the handle is good, and no capture begins on it, while the call is counted in
 *                                         `users`. Only here is cuStreamGetId asked: of a stream that captures it
 *                                         answers an error and destroys the capture
 *   by another                            (the reaper, a thread that needs the memory, vpmm_trim) of an ACTIVE record
 *                                         that is not private: it is good until vpmm_stream_release has returned, and
 *                                         the program begins no capture before. Should it do so all the same, and the
 *                                         driver bear with it: an event that is recorded in a capture does it no harm,
 *                                         but to ask it destroys the capture, and who waits for it is drawn in. So such
 *                                         an event is seen by nobody before it is known to be none
 *   private                               only calls that are given the stream use its handle, and they leave nothing
 *                                         unmarked behind:
 *                                           - with VPMM_STREAMS_EAGER every stream, since the program destroys it
 *                                             without a word;
 *                                           - CU_STREAM_PER_THREAD, on which only its thread can record
 *                                         and, though their caches leave memory unmarked,
 *                                           - the legacy stream: to record on it destroys each capture on a blocking
 *                                             stream of its context;
 *                                           - with `captures` in the configuration every stream: to record on it while
 *                                             the program begins or ends a capture there crashes the driver
 * What nobody can mark any more (of an orphan; of a private stream if the driver refused) passes when the context has
 * been waited for, before a request fails, and in vpmm_trim.
 *
 * Who may do what
 *   lookup, fence_take, fence_passed, mark, wait   any thread, lock-free but for the first sight of a stream
 *   mark            under the record's try-lock: who loses it leaves, the holder looks again after unlocking
 *   complete        one thread at a time (the event lock, arena.h): alone asks the driver, publishes completed
 *   orphan, a change of state                      under the registry's lock
 *   release         one thread at a time for a record: who finds it RELEASING waits. It first makes the record
 *                   RELEASING, so that nobody else is counted in for good, and waits until it alone is: from then on
 *                   nobody moves addresses in the stream's caches, or takes a fence of it
 *   users           a thread is counted in the record while it uses the handle or takes fences of the stream
 *
 * Marks. Each of a record's STREAM_MARKS places has an event, created there once and recorded again only on the
 * record's stream, so that a late waiter waits for a later point of the same stream. A place's word is number:62 |
 * state:2:
 *   FREE       its mark has passed, or it never had one           -> RECORDED by a marker
 *   RECORDED   the event covers the number, and will pass         -> FREE by the reaper, in the order of marking; BUSY
 *   BUSY       it is the newest, and is being recorded again      -> RECORDED, with a higher number
 * When every place is RECORDED a call that was given the stream records the newest again, at a later point: so its mark
 * is never refused for want of a place. The reaper reads the word before it asks the event, and frees the place by
 * exchange of what it has read: a mark that was raised in between is asked again.
 * `waiters` counts threads between the choice of an event and the end of their wait for it. Who marks for another
 * records nothing while there are any: the place it would take may be one that a waiter has chosen before it passed.
 *
 * Streams 0 and CU_STREAM_LEGACY are one a context, CU_STREAM_PER_THREAD one a context and thread. The thread's end is
 * known by a pthread key; in a process that had none left when such a stream was first met, none is known: HOST_MEMORY.
 */
#ifndef VPMM_LIB_STREAM_H
#define VPMM_LIB_STREAM_H

#include "base/assert.h"
#include "base/queue.h"
#include "driver/device.h"
#include "space/hints.h"

#include <pthread.h>

struct thread; /* a thread of the program, as long as anyone asks whether it still runs */

enum { STREAM_MARKS = 64, STREAMS_MAX = 1 << 20, STREAMS_A_SEGMENT = 256, STREAM_NEIGHBOURS = 8 };

/* A slot that no record has: for who needs a number that is no stream's. */
#define STREAM_NONE ((uint32_t)STREAMS_MAX - 1)

/* The two spaces of a pool: see space.h. */
enum space_level { SPACE_PAGES, SPACE_GRANULES, SPACES };

enum stream_state {
    STREAM_UNUSED,    /* may be taken for another stream */
    STREAM_ACTIVE,    /* in the registry */
    STREAM_RELEASING, /* in the registry; vpmm_stream_release is at it: becomes RELEASED, or ACTIVE again */
    STREAM_RELEASED,  /* out of the registry; everything is marked, and passes by itself */
    STREAM_ORPHAN,    /* out of the registry, its handle gone: what has no mark passes by a wait for its context */
};

struct mark {
    _Atomic(uint64_t) word; /* stored after the event is recorded: a reader of the number waits for it or for later */
    _Atomic(void *) event;  /* CUevent */
};

struct stream {
    struct object_key key; /* first: the registry's */
    uint32_t slot;
    CUstream handle;
    CUcontext context;
    unsigned long long id;
    bool has_id;           /* not so: stream 0, per-thread, a driver without cuStreamGetId */
    bool is_private;       /* its handle is for calls that are given the stream alone */
    struct thread *thread; /* of a per-thread stream: the only one that may record; NULL: any */
    uint32_t next_unused;  /* under the registry's lock */
    _Atomic(uint32_t) state;
    _Atomic(uint32_t) users;
    _Atomic(uint32_t) caches[SPACES];                     /* front caches attached: their memory has no fence yet */
    _Atomic(void *) neighbour[SPACES][STREAM_NEIGHBOURS]; /* some of them, for threads that look for memory (front.h) */
    void *attached[SPACES]; /* all of them, a list: under the registry's lock, or alone while it is RELEASING */
    _Alignas(64) _Atomic(uint64_t) published;
    _Atomic(uint64_t) recorded;
    _Alignas(64) _Atomic(uint64_t) completed;
    _Alignas(64) _Atomic(uint32_t) marking; /* the try-lock */
    uint32_t next_mark;                     /* under marking */
    _Atomic(uint32_t) waiters;
    struct mark mark[STREAM_MARKS];
    struct ring *pending; /* of struct mark, from the marker to the reaper */
    _Atomic(uint32_t) outstanding;
    CUdeviceptr wait_block; /* under wait_lock, as are the next two: a block to wait for a context by; 0: none */
    CUcontext wait_context;
    bool wait_refused;                /* the driver has said no to taking it back, which need not be true */
    _Atomic(void *) slabs;            /* its slabs with free slices (slab.h); they stay with the record */
    _Atomic(uint32_t) freed_small;    /* to the driver's own pool, with no fence of ours, since the last settling */
    struct mark *taken[STREAM_MARKS]; /* the reaper's: from the ring, oldest first, not yet seen to have passed */
    uint32_t taken_marks;
    uint64_t moved_until; /* likewise: the regions behind fences up to here were moved to those that wait for nothing */
    struct hints free[SPACES]; /* FREE regions whose fence is of this stream */
};

struct streams {
    struct device *device;
    bool is_private;           /* constant, as is the next: every stream is, with EAGER or `captures` */
    bool cached;               /* there are front caches: what lies in those of a legacy stream has no mark */
    pthread_mutex_t wait_lock; /* over the driver calls of a wait for a context; only others who wait meet it, and who
                                  meets a legacy stream for the first time */
    pthread_mutex_t lock;      /* registry writers, changes of state, unused records */
    uint32_t unused;           /* first slot of a list; 0: none */
    struct object_map *registry;
    _Atomic(uint32_t) orphans; /* changes when a record has become one, or a cache was attached to one */
    _Atomic(void *) segment[STREAMS_MAX / STREAMS_A_SEGMENT]; /* struct stream_segment */
    _Atomic(uint32_t) slots;                                  /* slots 1 .. slots - 1 exist */
};

struct stream_segment {
    _Atomic(void *) record[STREAMS_A_SEGMENT]; /* struct stream */
};

vpmm_status streams_init(struct streams *, struct device *, const vpmm_config *);
void streams_free(struct streams *); /* destroys the events too, as far as the driver lets it */

/* The record in a slot; NULL: the thread does not see yet that there is one. */
static inline struct stream *stream_seen(const struct streams *streams, uint32_t slot)
{
    const struct stream_segment *segment = load_acquire_ptr(&streams->segment[slot / STREAMS_A_SEGMENT]);
    return segment ? load_acquire_ptr(&segment->record[slot % STREAMS_A_SEGMENT]) : NULL;
}

/* The record in a slot below `slots`, or of the fence of a region that the caller has, or has just claimed. */
static inline struct stream *stream_at(const struct streams *streams, uint32_t slot)
{
    const struct stream_segment *segment = load_acquire_ptr(&streams->segment[slot / STREAMS_A_SEGMENT]);
    return load_acquire_ptr(&segment->record[slot % STREAMS_A_SEGMENT]);
}

/*
 * The record of a handle, made on first sight, with this thread counted among its users until stream_leave.
 * INVALID_VALUE: a stream of another device. NOT_SUPPORTED: it captures. DRIVER, HOST_MEMORY.
 */
vpmm_status stream_enter(struct streams *, CUstream, struct stream **);
void stream_leave(struct stream *);

/* As stream_leave, at the end of a call that was given the stream: a private one has nothing unmarked behind it. */
void stream_finish(struct streams *, struct stream *);

/*
 * Counts a thread in that takes memory out of the stream's caches, and its fences, but was not given the stream. False:
 * it is being released, or was: what is in its caches is the releasing thread's.
 */
bool stream_enter_cached(struct stream *);

/*
 * Everything marked, out of the registry, and no thread inside. `flush` is called when this thread alone is counted in:
 * what has no fence yet takes one. Of two at once the later one waits for the earlier, and has its answer.
 * INVALID_VALUE: not known. DRIVER: the end cannot be recorded now; the record is as before.
 */
vpmm_status stream_release(struct streams *, CUstream, void (*flush)(struct stream *, void *data), void *data);

/* The fence of memory freed on the stream now; one may serve a batch. */
static inline struct fence fence_take(struct stream *stream)
{
    vpmm_assert(peek_u32(&stream->users) > 0);
    return (struct fence){stream->slot, fetch_add_sc_u64(&stream->published, 1) + 1};
}

/* Pairs with the store in complete_stream: what the stream's work did is before what the caller does next. */
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

/*
 * Covers what is published with an event, in a call that was given the stream. Nothing is lost if the driver refuses,
 * or the stream captures: a later mark covers it.
 */
void stream_mark(struct streams *, struct stream *);

/*
 * The same by another, who is counted in: if the stream is ACTIVE and not private, captures nothing, and a place is
 * free. Nothing is lost if not.
 */
void stream_mark_by_other(struct streams *, struct stream *);

/*
 * Whether a wait for it is possible: not for what an orphaned stream left unmarked, nor for what another thread's
 * per-thread stream did.
 */
bool fence_waitable(const struct streams *, struct fence);

/* The same without a call of the driver, for who holds a lock: the stream may turn out to capture. */
bool fence_seems_waitable(const struct streams *, struct fence);

/* Makes work queued on `waiter` from now on wait, on the device, for the fence. */
vpmm_status stream_wait(struct streams *, struct stream *waiter, struct fence);

/* Makes the calling thread wait for the fence. */
vpmm_status stream_wait_host(struct streams *, struct fence);

/*
 * Under the event lock (arena.h). Asks the driver for each stream's oldest marks and publishes those that have passed;
 * marks what is left over; frees records whose work has ended. True: something has passed. May lose the device.
 */
bool streams_complete(struct streams *);

/* Whether any mark is outstanding: the reaper has something to watch. */
bool streams_pending(const struct streams *);

/* Whether anything is freed and not marked, which the reaper may have to try again. */
bool streams_unmarked(const struct streams *);

/* Whether anything is freed that only a wait for its context can show to have passed. */
bool streams_unmarkable(const struct streams *);

/*
 * Under the event lock. The last resort: waits for each context with streams whose end no event can show, and publishes
 * what was freed on them before. No capture is harmed. The first failure; the other contexts are waited for all the
 * same.
 */
vpmm_status streams_synchronise(struct streams *);

/* A new fence number, of no memory: a point to wait for, if one can be recorded now. */
void stream_new_point(struct streams *, struct stream *);

#endif
