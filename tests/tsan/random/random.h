/*
 * random.h - the random stress: its nouns, and how its files fit together.
 *
 *   ../tsan_random.c  the options, the rounds one after the other, the summary
 *   kinds.c           which operations a kind of round is made of, and how often each
 *   round.c           one round: settings, a fresh simulator and pool, threads, then everything is given back and
 *                     looked at
 *   lanes.c           streams that threads share: who may call with one, who may end it or capture on it
 *   blocks.c          allocations, stamped, handed from thread to thread and freed in the order of their streams
 *   streams.c         operations on streams: short lives, releases beside calls, ends
 *   captures.c        stream captures beside all the rest
 *   others.c          operations on pools and threads: trims, polls, statistics, shortage, second pools, short threads
 *   jitter.c          a driver table that dawdles between calls, and signals that stop a thread anywhere
 *   watch.c           failures in words, progress, the watchdog
 *
 *   round   one choice of settings and one kind; its seed makes every choice but the threads' timing
 *   lane    a place for a stream. Its lock is the caller's duty made visible: shared for vpmm calls with the stream,
 *           alone to end the stream or to capture on it
 *   hold    a host function that keeps a stream's later work back for a while
 */
#ifndef VPMM_TESTS_RANDOM_H
#define VPMM_TESTS_RANDOM_H

#include "payload.h"

#include <pthread.h>

#include <vpmm/sim.h>
#include <vpmm/vpmm.h>

enum {
    THREADS = 4,
    LANES = 6,
    LEGACY = 0, /* the lane of the legacy stream, which never ends */
    SLOTS = 96,
    LANE_LIVES = 2048, /* streams of one lane in a round */
    HOLD_LIMIT_US = 20000,
};

/* ---- what is counted, for the summary ---- */

#define COUNTS(X)                                                                                                      \
    X(mallocs)                                                                                                         \
    X(frees)                                                                                                           \
    X(refusals)                                                                                                        \
    X(crossings)                                                                                                       \
    X(uses)                                                                                                            \
    X(inherited)                                                                                                       \
    X(overflows)                                                                                                       \
    X(holds)                                                                                                           \
    X(flashes)                                                                                                         \
    X(handles_back)                                                                                                    \
    X(long_queues)                                                                                                     \
    X(ends)                                                                                                            \
    X(releases)                                                                                                        \
    X(releases_beside_calls)                                                                                           \
    X(captures_global)                                                                                                 \
    X(captures_thread_local)                                                                                           \
    X(captures_relaxed)                                                                                                \
    X(graphs)                                                                                                          \
    X(captures_blocking)                                                                                               \
    X(gates)                                                                                                           \
    X(exhaustions)                                                                                                     \
    X(pools)                                                                                                           \
    X(lives)                                                                                                           \
    X(trims)                                                                                                           \
    X(polls)                                                                                                           \
    X(looks)                                                                                                           \
    X(dawdles)                                                                                                         \
    X(jolts)

enum count {
#define COUNT_MEMBER(name) COUNT_##name,
    COUNTS(COUNT_MEMBER)
#undef COUNT_MEMBER
        COUNT_KINDS
};

extern atomic_uint_fast64_t counted[COUNT_KINDS];

static inline void count(enum count which)
{
    atomic_fetch_add_explicit(&counted[which], 1, memory_order_relaxed);
}

/* ---- threads ---- */

struct worker {
    pthread_t thread;
    uint64_t random;
    CUevent event;
    uint32_t stamps;
    atomic_uint life_over; /* what the per-thread stream of its last short thread waits for */
};

uint64_t random_from(uint64_t seed);
uint64_t draw(struct worker *, uint64_t below);

static inline bool one_in(struct worker *worker, uint64_t n)
{
    return draw(worker, n) == 0;
}

/* Lets others go first: nothing, a yield, or at most so many microseconds. */
void linger(struct worker *, unsigned most_us);

/* ---- lanes ---- */

struct lane {
    pthread_rwlock_t lock;
    CUstream stream;         /* from here on under the lock */
    unsigned flags;          /* of the stream */
    uint32_t generation;     /* how many streams have ended here */
    atomic_uint endings;     /* streams that have begun to end here */
    atomic_uint fills;       /* caches that were filled with the stream's memory */
    CUevent end[LANE_LIVES]; /* by generation: the end of all work of the stream that has ended */
};

bool lanes_open(void);
void lanes_close(struct worker *);

/* For vpmm calls with the stream; NULL: another thread ends it or captures on it. */
struct lane *lane_share(struct lane *);
struct lane *lane_share_any(struct worker *);
/* To end the stream or to capture on it; NULL: others call with it. */
struct lane *lane_own(struct lane *);
/* The same, when others have left it: the caller has no other lane. */
struct lane *lane_await(struct lane *);
void lane_leave(struct lane *);

/* The caller owns the lane: its stream ends, as the pool's mode asks, and another takes its place. */
void lane_renew(struct worker *, struct lane *);

/* vpmm_stream_release where the mode asks for it, then cuStreamDestroy. */
void stream_end(struct worker *, CUstream);
void stream_leave_alone(struct worker *, CUstream); /* before a capture */
CUstream stream_new(struct worker *, unsigned *flags);

/* Later work of the stream waits for `us` microseconds, or for *open, and at most for HOLD_LIMIT_US. */
void stream_hold(CUstream, unsigned us);
void stream_hold_until(CUstream, atomic_uint *open);

/* ---- blocks ---- */

struct block {
    CUdeviceptr pointer;
    size_t words;   /* of the stamp */
    uint32_t stamp; /* 0: none */
    struct lane *lane;
    uint32_t generation;
};

/* What vpmm_malloc gives; false: refused, as it may be, or failed. */
bool take(size_t bytes, CUstream, CUdeviceptr *);
void give(CUdeviceptr, CUstream);
size_t draw_bytes(struct worker *);

/* On a lane that the caller shares or owns. */
struct block *block_new(struct worker *, struct lane *);
/*
 * Frees it on such a lane, ordered after its use, or with a word about it (vpmm_use). False: not now, another thread
 * has the lane that it was made on.
 */
bool block_end(struct worker *, struct block *, struct lane *on);
void blocks_end(struct worker *);

/* ---- the operations ---- */

#define OPERATIONS(X)                                                                                                  \
    X(exchange) /* a block from a slot is freed, a new one takes its place */                                          \
    X(overflow) /* the thread's cache fills with one lane's memory, and then with another's */                         \
    X(hold)     /* a lane's stream is kept busy */                                                                     \
    X(flash)    /* a stream of the thread's own, used, perhaps with a long queue, and destroyed at once */             \
    X(renew)    /* a lane's stream is released and destroyed, beside calls with other streams */                       \
    X(release)  /* a lane's stream is released beside calls with it; then alone, released again and destroyed */       \
    X(capture)  /* on a lane's stream, or on one of the thread's own */                                                \
    X(exhaust)  /* until the pool refuses */                                                                           \
    X(pool)     /* a second pool, made, used and destroyed */                                                          \
    X(life)     /* a thread that frees on its per-thread stream, behind work held back, and dies */                    \
    X(trim)                                                                                                            \
    X(poll)                                                                                                            \
    X(look) /* statistics, dumps, health, and that no stream captures which nobody captures on */

enum operation {
#define OPERATION_MEMBER(name) OPERATION_##name,
    OPERATIONS(OPERATION_MEMBER)
#undef OPERATION_MEMBER
        OPERATION_KINDS
};

#define OPERATION_DECLARE(name) void operation_##name(struct worker *);
OPERATIONS(OPERATION_DECLARE)
#undef OPERATION_DECLARE

/* ---- rounds ---- */

enum { MODE_CHECKED = 1 << VPMM_STREAMS_CHECKED, MODE_TRUSTED = 1 << VPMM_STREAMS_TRUSTED };
enum { MODE_EAGER = 1 << VPMM_STREAMS_EAGER, MODE_ANY = MODE_CHECKED | MODE_TRUSTED | MODE_EAGER };

enum room { ROOM_ANY, ROOM_TIGHT, ROOM_AMPLE }; /* a cap of a few pages, or none, or either */

struct kind {
    const char *name;
    unsigned modes; /* of vpmm_streams */
    enum room room;
    bool small_caches;   /* front caches of a few pages */
    unsigned operations; /* of one thread */
    unsigned weight[OPERATION_KINDS];
};

extern const struct kind kinds[];
extern const size_t kinds_count;

struct round {
    uint64_t seed;
    const struct kind *kind;
    vpmm_config config;
    size_t device_pages;
    vpmm_sim *sim;             /* NULL: a real device */
    const vpmm_driver *driver; /* for the program's own calls; the pool's table dawdles */
    CUcontext context;
    vpmm_pool *pool;
    struct lane lane[LANES];
    _Atomic(struct block *) slot[SLOTS];
    atomic_uint_fast64_t mismatches, mallocs, frees;
    atomic_uint ended; /* threads of the round */
};

extern struct round current;

/* Of pools whose configuration has `captures`, in some rounds. */
extern const vpmm_capture_gate capture_gate;

/* What a pool beside the round's gives; false: it has no more, or failed. */
bool take_from(vpmm_pool *, size_t bytes, CUstream, CUdeviceptr *);
/* Destroys such a pool, for which the round's makes room if it must. */
void pool_end_second(struct worker *, vpmm_pool *);
/* The pool ends while a stream captures. */
void pool_end_beside_capture(struct worker *);

/* Whether nothing failed in it. */
bool round_run(uint64_t seed, const struct kind *, const vpmm_driver *cuda);

/* A call of the program's own that a capture of another thread forbids in the default mode. */
#define relaxed(call)                                                                                                  \
    (current.driver->cuThreadExchangeStreamCaptureMode(&(CUstreamCaptureMode){CU_STREAM_CAPTURE_MODE_RELAXED}),        \
     relaxed_end(call))
int relaxed_end(int result);

/* ---- jitter ---- */

/* A copy of the table whose calls, which only pools make, dawdle now and then. */
const vpmm_driver *jitter_table(const vpmm_driver *);
/* The call of a pool's that was last answered a capture's error; "none" before the first. */
const char *jitter_refused(void);
void jitter_begin(void); /* signals that stop the threads that jitter_join anywhere */
void jitter_end(void);
void jitter_join(void); /* each thread of a round */
void jitter_leave(void);
/* Stops the calling thread for a moment, anywhere in what it does in the next so many microseconds. */
void jitter_aim(struct worker *, unsigned within_us);

/* ---- watch ---- */

void watch_begin(void);
void watch_round(void);
void watch_summary(uint64_t rounds);
__attribute__((format(printf, 1, 2))) void failed(const char *format, ...);
uint64_t failures(void);

#define needs(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            failed("%s", #condition);                                                                                  \
    } while (0)

/* The same for a call of vpmm, with its words. */
void needs_success(vpmm_status, const char *call);
void needs_cuda(CUresult, const char *call);
#define vpmm_must(call) needs_success(call, #call)
#define cuda_must(call) needs_cuda(call, #call)

#endif
