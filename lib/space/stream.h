/*
 * stream.h - the registry of streams: from a handle to its record, who uses the record, and its end.
 *
 * A stream is a record, not a handle: CUDA gives a destroyed stream's handle to the next one while the old one's work
 * still runs. A record is found by handle without a lock and checked by cuStreamGetId (identity.h); when the id has
 * changed, the old record is orphaned and a new one made.
 *
 *   slot     index of the record; fences name it. 0 is no stream: memory that waits for nothing. What other modules
 *            keep of a stream they keep in tables of their own, by slot (front.h, slab.h, arena.h)
 *   users    a thread is counted in the record while it uses the handle or takes fences of the stream. It looks at the
 *            state after that, and who takes a record out of use changes the state before it looks at the count (all
 *            sequentially consistent): one of the two sees the other. Visitors, which were not given the stream and are
 *            through at once, are counted in the upper half as well:
 *              users = given + visitors + visitors * 65536
 *   unused   a record is used again for another stream when all of its fences have passed (completed = published,
 *            fence.h), no front cache is attached to it, no live memory names it as a user (use.h), no mark of it is to
 *            be seen yet, no free region is hinted under it, and nobody is counted in or waits for one of its events
 *
 * Whose handle. A handle is the program's: it destroys the stream, or begins a capture on it, as soon as no call that
 * was given the stream is under way. The library therefore uses a handle in three ways, and in no fourth:
 *   in a call that was given the stream   the handle is good, and no capture begins on it, while the call is counted in
 *                                         `users`. Only here, and through the gate, is cuStreamGetId asked: of a stream
 *                                         that captures it returns an error and destroys the capture
 *   by another                            (the reaper, a thread that needs the memory, vpmm_trim) of an ACTIVE or
 *                                         RELEASING record that is not private: it is good until vpmm_stream_release
 *                                         has returned, and the program begins no capture before. Should it do so all
 *                                         the same, and the driver bear with it: an event that is recorded in a capture
 *                                         does it no harm, but to ask it destroys the capture, and who waits for it is
 *                                         drawn in. So such an event is seen by nobody before it is known to be none
 *   through the gate                      (vpmm_capture_gate) of a gated stream, by any call, given another one or
 *                                         none: while it is inside the program neither destroys the stream nor
 *                                         captures, so its id is asked here too. The reaper, which is no call of the
 *                                         program's, stays outside: a program of one thread need not keep anything
 *                                         waiting
 *   private                               only calls that are given the stream use its handle (those of a gated one
 *                                         also as above), and they leave nothing unmarked behind:
 *                                           - with VPMM_STREAMS_EAGER every stream, since the program destroys it
 *                                             without a word;
 *                                           - CU_STREAM_PER_THREAD, on which only its thread can record
 *                                         and, though their caches, and uses of live memory (use.h), leave memory
 *                                         unmarked,
 *                                           - the legacy stream: to record on it destroys each capture on a blocking
 *                                             stream of its context;
 *                                           - with `captures` in the configuration every stream, gated where there is
 *                                             a gate: to record on it while the program begins or ends a capture there
 *                                             crashes the driver. While it is the pool's only stream a little may stay
 *                                             unmarked, too: fence.h
 *   by name                               in the pool of a graph nobody uses a handle, nor asks for an id: a record is
 *                                         that of its handle, nothing is marked, and nothing passes before the end
 * What nobody can mark any more (of an orphan; of a private stream if the driver refused) passes when the context has
 * been waited for, before a request fails, and in vpmm_trim (context.h).
 *
 * Who may do what
 *   enter, leave                any thread, lock-free but for the first sight of a stream, or of its handle's next one;
 *                               enter waits while the record is RELEASING or CLOSING
 *   orphan, a change of state   under the registry's lock
 *   release                     one thread at a time for a record: who finds it RELEASING or CLOSING waits. It makes
 *                               the record RELEASING, so that no call with the stream comes in any more, and waits
 *                               until no other such call is counted in; visitors take from the stream's caches, and
 *                               mark it, meanwhile, because a malloc that was given it may wait for the GPU for long,
 *                               and for them. Then it makes the record CLOSING, so that no visitor comes either, and
 *                               waits for these: from then on nobody moves addresses in the stream's caches, or takes a
 *                               fence of it. Who finds no memory meanwhile waits for its end (hands.h)
 *   complete                    one thread at a time (the event lock, arena.h): it goes through all records, and takes
 *                               those out of use whose streams have ended
 */
#ifndef VPMM_LIB_STREAM_H
#define VPMM_LIB_STREAM_H

#include "base/assert.h"
#include "base/queue.h"
#include "driver/device.h"
#include "space/hints.h"

#include <pthread.h>

struct thread; /* identity.h */

enum { STREAM_MARKS = 64, STREAMS_MAX = 1 << 20, STREAMS_A_SEGMENT = 256 };

/* A slot that no record has: for who needs a number that is no stream's. */
#define STREAM_NONE ((uint32_t)STREAMS_MAX - 1)

/* The two spaces of a pool: see space.h. */
enum space_level { SPACE_PAGES, SPACE_SUBPAGES, SPACES };

enum stream_state {
    STREAM_UNUSED,    /* may be taken for another stream */
    STREAM_ACTIVE,    /* in the registry */
    STREAM_RELEASING, /* in the registry; vpmm_stream_release waits for the calls that were given the stream */
    STREAM_CLOSING,   /* likewise, and then for who is at its caches: becomes RELEASED, or ACTIVE again */
    STREAM_RELEASED,  /* out of the registry; everything is marked, and passes by itself */
    STREAM_ORPHAN,    /* out of the registry, its handle gone: what has no mark passes by a wait for its context */
};

struct mark {
    _Atomic(uint64_t) word; /* stored after the event is recorded: a reader of the number waits for it or for later */
    _Atomic(void *) event;  /* CUevent */
};

/* What is kept to wait for a context by: context.h. */
struct wait_holder {
    CUdeviceptr block; /* 0: none */
    CUcontext context; /* that it was, or is to be, made in */
    bool is_kept;      /* the next one is made after each wait, and when there was no memory for it */
    bool is_refused;   /* the driver has said no to taking it back, which need not be true */
};

/* Who uses the handle beside the calls that are given the stream. */
enum stream_privacy {
    STREAM_OPEN,    /* any other */
    STREAM_GATED,   /* other calls, while they are inside the program's gate */
    STREAM_PRIVATE, /* nobody */
};

struct stream {
    struct object_key key; /* first: the registry's. Constant while the record is in use, as are all up to `thread` */
    uint32_t slot;
    CUstream handle;
    CUcontext context;
    unsigned long long id;
    bool has_id;               /* not so: stream 0, per-thread, a driver without cuStreamGetId */
    _Atomic(uint32_t) privacy; /* read, as a hint, also by who is not counted in: fence_seems_waitable */
    struct thread *thread;     /* of a per-thread stream: the only one that may record; NULL: any */
    uint32_t next_unused;      /* under the registry's lock */
    _Atomic(uint32_t) state;
    _Atomic(uint32_t) users;
    _Atomic(uint32_t) caches[SPACES]; /* so many front caches are attached: their memory has no fence yet */
    _Atomic(uint32_t) uses;           /* of live memory (use.h): twice their number, and 1 if a release has begun */

    /* Fences: fence.h. */
    _Alignas(64) _Atomic(uint64_t) published;
    _Atomic(uint64_t) recorded;
    _Alignas(64) _Atomic(uint64_t) completed;
    _Alignas(64) _Atomic(uint32_t) marking; /* the try-lock */
    uint32_t next_mark;                     /* under marking */
    _Atomic(uint64_t) marked_at_ns;         /* the latest mark; a hint, as are the next: see stream_mark */
    _Atomic(uint64_t) unmarked_bytes;       /* freed to all since then, */
    _Atomic(uint64_t) unmarked_most;        /* and how much that may be */
    _Atomic(uint32_t) waiters;
    struct mark mark[STREAM_MARKS];
    struct ring *pending; /* of struct mark, from the marker to a pass */
    _Atomic(uint32_t) outstanding;
    uint32_t taken_marks;             /* under the event lock, as is the next */
    struct mark *taken[STREAM_MARKS]; /* from the ring, oldest first, not yet seen to have passed */

    struct wait_holder wait; /* under wait_lock */

    struct hints free[SPACES]; /* FREE regions whose fence is of this stream */
};

struct streams {
    struct device *device;
    bool by_name;  /* constant, as are the next two: no driver call is made with a stream; a graph's pool */
    bool is_eager; /* a stream may be destroyed after any call that was given it */
    enum stream_privacy privacy; /* of each stream at least so much: with EAGER, `captures` or by name */
    vpmm_capture_gate gate;      /* constant; for streams that are gated, */
    _Atomic(uint64_t) reaper;    /* and never for this thread, pthread_self(); 0: none yet */
    bool marks_may_wait;         /* constant: stream_mark */
    pthread_mutex_t wait_lock;   /* over the driver calls of a wait for a context (context.h) */
    struct wait_holder wait;     /* under it: of the device's primary context */
    /* CUcontext: the latest in which a stream was met while another thread had that lock. */
    _Atomic(void *) wants_block;
    /* A hint: a holder that is to keep a block has none, as there was no memory for it. */
    _Atomic(uint32_t) lacks_block;
    pthread_mutex_t lock; /* registry writers, changes of state, unused records */
    uint32_t unused;      /* first slot of a list; 0: none */
    struct object_map *registry;
    _Atomic(uint32_t) closing; /* so many records are CLOSING: a releasing thread has what is in their caches */
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

/* Whether the pool has met one stream alone: slot 0 is none's. Once it has met two at a time, it is not any more. */
static inline bool streams_has_one(const struct streams *streams)
{
    return load_acquire_u32(&streams->slots) <= 2;
}

/* Whether a record has its handle for who is counted in, but was not given the stream: see "Whose handle". */
static inline bool stream_state_has_handle(enum stream_state state)
{
    return state == STREAM_ACTIVE || state == STREAM_RELEASING;
}

static inline bool stream_has_handle(const struct stream *stream)
{
    return stream_state_has_handle(load_sc_u32(&stream->state));
}

/* Whether the calling thread is the pool's own. */
static inline bool is_reaper(const struct streams *streams)
{
    return load_relaxed_u64(&streams->reaper) == (uint64_t)pthread_self();
}

/* Private or gated: not everybody may mark it. */
static inline bool stream_is_private(const struct stream *stream)
{
    return load_relaxed_u32(&stream->privacy) != STREAM_OPEN;
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

/* One thread more, by who knows that another one is counted in meanwhile. */
static inline void stream_join(struct stream *stream)
{
    vpmm_assert(peek_u32(&stream->users) > 0);
    fetch_add_sc_u32(&stream->users, 1);
}

static inline void stream_leave(struct stream *stream)
{
    vpmm_assert(peek_u32(&stream->users) > 0);
    fetch_add_sc_u32(&stream->users, UINT32_MAX);
}

/* A visitor's: by who was not given the stream, and is through at once. */
enum { STREAM_VISIT = 1 << 16 | 1 };

static inline void stream_visit(struct stream *stream)
{
    fetch_add_sc_u32(&stream->users, STREAM_VISIT);
}

static inline void stream_end_visit(struct stream *stream)
{
    vpmm_assert(peek_u32(&stream->users) >= STREAM_VISIT);
    fetch_add_sc_u32(&stream->users, 0 - (uint32_t)STREAM_VISIT);
}

/* A call that was given the stream. The state is looked at after it, as in enter_known. */
static inline void stream_count_in(struct stream *stream)
{
    fetch_add_sc_u32(&stream->users, 1);
}

static inline uint32_t stream_given(const struct stream *stream)
{
    uint32_t users = load_sc_u32(&stream->users);
    return (users & UINT16_MAX) - (users >> 16);
}

/* As stream_leave, at the end of a call that was given the stream: a private one has nothing unmarked behind it. */
void stream_finish(struct streams *, struct stream *);

/*
 * Counts a thread in that takes memory out of the stream's caches, or the fence that ends a use, but was not given the
 * stream; until stream_end_visit. False: it is CLOSING, or was released: what is in its caches is the releasing
 * thread's, and its uses have their fence (use.h).
 */
bool stream_enter_cached(struct stream *);

/*
 * Whether its handle may be gone, or nobody left to record on it, once a call that was given it has returned: a use of
 * memory by it ends with this call (use.h).
 */
static inline bool stream_is_brief(const struct streams *streams, const struct stream *stream)
{
    return streams->is_eager || stream->thread;
}

/*
 * One use of live memory by the stream more, by who is counted in with it ACTIVE; or less, by any thread that has the
 * uses. True: the stream is being released, and the caller takes a fence for the use (use.h).
 */
static inline bool stream_begin_use(struct stream *stream)
{
    vpmm_assert(peek_u32(&stream->users) > 0);
    return fetch_add_sc_u32(&stream->uses, 2) & 1;
}

/* Of a use that there is already, said once more: as stream_begin_use. */
static inline bool stream_uses_are_closed(struct stream *stream)
{
    vpmm_assert(peek_u32(&stream->users) > 0);
    return load_sc_u32(&stream->uses) & 1;
}

static inline void stream_end_use(struct stream *stream)
{
    vpmm_assert(peek_u32(&stream->uses) > 1);
    fetch_add_sc_u32(&stream->uses, 0 - 2u);
}

/*
 * Everything marked, out of the registry, and no thread inside. `flush` is called when this thread alone is counted in:
 * what has no fence yet takes one. Of two at once the later one waits for the earlier, and tries itself if that failed.
 * A stream that is not known is released. DRIVER: the end cannot be recorded now; the record is as before.
 */
vpmm_status stream_release(struct streams *, CUstream, void (*flush)(struct stream *, void *data), void *data);

/*
 * Under the event lock (arena.h). Asks the driver for each stream's oldest marks and publishes those that have passed;
 * marks what is left over; frees records whose work has ended. True: something has passed. May lose the device.
 */
bool streams_complete(struct streams *);

/*
 * Whether any mark is outstanding, of another stream than this one (NULL: of any): the reaper has something to watch.
 */
bool streams_pending(const struct streams *, const struct stream *but);

/* Whether anything freed has no mark and the calling thread may mark it: of gated streams the reaper may not. */
bool streams_unmarked(const struct streams *);

/* Whether anything is freed that perhaps only a wait for its context can show to have passed. */
bool streams_unmarkable(const struct streams *);

#endif
