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
 * Who may do what
 *   lookup, fence_take, fence_passed, mark, wait   any thread, lock-free but for the first sight of a stream
 *   mark            under the record's try-lock: who loses it leaves, the holder looks again after unlocking
 *   complete        one thread at a time (`watching`, arena.h): alone asks the driver, publishes completed
 *   release, orphan under the registry's lock
 *   users           a thread is counted in the record while it uses the handle; release waits for zero
 *
 * Events belong to a mark's place in the record's ring of 64, are created there once and recorded again only on the
 * record's stream, so that a late waiter waits for a later point of the same stream.
 *
 * Streams 0 and CU_STREAM_LEGACY are one a context, CU_STREAM_PER_THREAD one a context and thread: only that thread
 * can record on it, so only it marks.
 */
#ifndef VPMM_LIB_STREAM_H
#define VPMM_LIB_STREAM_H

#include "device.h"
#include "hints.h"
#include "queue.h"

#include <pthread.h>

struct thread; /* a thread of the program, as long as anyone asks whether it still runs */

enum { STREAM_MARKS = 64, STREAMS_MAX = 1 << 20, STREAMS_A_SEGMENT = 256, STREAM_NEIGHBOURS = 8 };

/* A slot that no record has: for who needs a number that is no stream's. */
#define STREAM_NONE ((uint32_t)STREAMS_MAX - 1)

/* The two spaces of a pool: see space.h. */
enum space_level { SPACE_PAGES, SPACE_GRANULES, SPACES };

enum stream_state {
    STREAM_UNUSED,   /* may be taken for another stream */
    STREAM_ACTIVE,   /* in the registry */
    STREAM_RELEASED, /* out of the registry; everything is marked, and passes by itself */
    STREAM_ORPHAN,   /* out of the registry, its handle gone: what is not marked passes with a synchronised context */
};

struct mark {
    _Atomic(uint64_t) number; /* stored after the event is recorded: a reader of number waits for it or for later */
    _Atomic(void *) event;    /* CUevent */
};

struct stream {
    struct object_key key; /* first: the registry's */
    uint32_t slot;
    CUstream handle;
    CUcontext context;
    unsigned long long id;
    bool has_id;           /* not so: stream 0, per-thread, a driver without cuStreamGetId */
    struct thread *thread; /* of a per-thread stream: the only one that may record; NULL: any */
    uint32_t next_unused;  /* under the registry's lock */
    _Atomic(uint32_t) state;
    _Atomic(uint32_t) users;
    _Atomic(uint32_t) caches[SPACES];                     /* front caches attached: their memory has no fence yet */
    _Atomic(void *) neighbour[SPACES][STREAM_NEIGHBOURS]; /* some of them, for threads that look for memory (front.h) */
    _Alignas(64) _Atomic(uint64_t) published;
    _Atomic(uint64_t) recorded;
    _Alignas(64) _Atomic(uint64_t) completed;
    _Alignas(64) _Atomic(uint32_t) marking; /* the try-lock */
    uint32_t next_mark;                     /* under marking */
    struct mark mark[STREAM_MARKS];
    struct ring *pending; /* of struct mark, from the marker to the reaper */
    _Atomic(uint32_t) outstanding;
    _Atomic(void *) slabs;            /* its slabs with free slices (slab.h); they stay with the record */
    _Atomic(uint32_t) freed_small;    /* to the driver's own pool, with no fence of ours, since the last settling */
    struct mark *taken[STREAM_MARKS]; /* the reaper's: from the ring, oldest first, not yet seen to have passed */
    uint32_t taken_marks;
    uint64_t moved_until; /* likewise: the regions behind fences up to here were moved to those that wait for nothing */
    struct hints free[SPACES]; /* FREE regions whose fence is of this stream */
};

struct streams {
    struct device *device;
    pthread_mutex_t lock; /* registry writers, changes of state, unused records */
    uint32_t unused;      /* first slot of a list; 0: none */
    struct object_map *registry;
    _Atomic(void *) segment[STREAMS_MAX / STREAMS_A_SEGMENT]; /* struct stream *[STREAMS_A_SEGMENT] */
    _Atomic(uint32_t) slots;                                  /* slots 1 .. slots - 1 exist */
};

vpmm_status streams_init(struct streams *, struct device *);
void streams_free(struct streams *); /* destroys the events too, as far as the driver lets it */

/* The record in a slot that exists. */
static inline struct stream *stream_at(const struct streams *streams, uint32_t slot)
{
    struct stream **segment = load_acquire_ptr(&streams->segment[slot / STREAMS_A_SEGMENT]);
    return segment[slot % STREAMS_A_SEGMENT];
}

/*
 * The record of a handle, made on first sight, with this thread counted among its users until stream_leave.
 * INVALID_VALUE: a stream of another device. NOT_SUPPORTED: it captures. DRIVER, HOST_MEMORY.
 */
vpmm_status stream_enter(struct streams *, CUstream, struct stream **);
void stream_leave(struct stream *);

/*
 * Everything marked, out of the registry, and no thread inside. `flush` is called first, with the thread counted in:
 * what has no fence yet takes one. INVALID_VALUE: not known.
 */
vpmm_status stream_release(struct streams *, CUstream, void (*flush)(struct stream *, void *data), void *data);

/* The fence of memory freed on the stream now; one may serve a batch. */
static inline struct fence fence_take(struct stream *stream)
{
    return (struct fence){stream->slot, fetch_add_sc_u64(&stream->published, 1) + 1};
}

/* Pairs with the store in complete_stream: what the stream's work did is before what the caller does next. */
static inline bool fence_passed(const struct streams *streams, struct fence fence)
{
    return !fence.stream || fence.number <= load_sc_u64(&stream_at(streams, fence.stream)->completed);
}

/* Whether work on `stream` may use memory behind the fence with no wait. */
static inline bool fence_usable(const struct streams *streams, struct fence fence, const struct stream *stream)
{
    return fence.stream == stream->slot || fence_passed(streams, fence);
}

/*
 * Covers what is published with an event, if that is possible now: not while the stream captures, not while 62 marks
 * are outstanding, and not by another thread than a per-thread stream's own. Nothing is lost if not: a later mark
 * covers it. The caller is counted among the stream's users.
 */
void stream_mark(struct streams *, struct stream *);

/* Whether the calling thread can record an event on the stream: not if it captures, or its handle is gone. */
bool stream_recordable(const struct streams *, const struct stream *);

/*
 * Whether a wait for it is possible: not for what an orphaned stream left unmarked, nor for what another thread's
 * per-thread stream did.
 */
bool fence_waitable(const struct streams *, struct fence);

/* Makes work queued on `waiter` from now on wait, on the device, for the fence. */
vpmm_status stream_wait(struct streams *, struct stream *waiter, struct fence);

/* Makes the calling thread wait for the fence. */
vpmm_status stream_wait_host(struct streams *, struct fence);

/*
 * Under `watching` (arena.h). Asks the driver for each stream's oldest marks and publishes those that have passed;
 * marks what is left over; frees records whose work has ended. True: something has passed. May lose the device.
 */
bool streams_complete(struct streams *);

/* Whether any mark is outstanding: the reaper has something to watch. */
bool streams_pending(const struct streams *);

/* Whether anything is freed and not marked, which the reaper may have to try again. */
bool streams_unmarked(const struct streams *);

/*
 * Under `watching`. The last resort: synchronises each context with streams whose end cannot be seen by an event, and
 * publishes what was freed on them before. The first failure; the other contexts are synchronised all the same.
 */
vpmm_status streams_synchronise(struct streams *);

/* A new fence number, of no memory: a point to wait for, if one can be recorded now. */
void stream_new_point(struct streams *, struct stream *);

#endif
