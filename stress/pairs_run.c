/*
 * pairs_run.c - a case: threads that start together, a pass after the other.
 *
 *   warm-up   not counted: caches and windows fill
 *   trials    without --pairs: longer and longer, until it is known how many pairs take a quarter of a second
 *   timed     nothing in the loop but the calls: ns_per_pair, driver_calls, locks
 *   sampled   the clock is read around some of the pairs: p99_ns. A pass of its own, so that the clock's cost is not
 *             in the mean
 *
 * The main thread meets the others at a barrier before and after each pass, and looks at the pool only in between.
 */
#define _GNU_SOURCE 1

#include "pairs.h"

#include "metrics.h"
#include "random.h"
#include "timing.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#ifdef VPMM_DEBUG_CHECKS
uint64_t vpmm_debug_locks(void); /* lib/base/lock.h: of the calling thread, so far */
#endif

enum {
    LINE = 128,
    RING = 64,   /* pointers on their way from a producer to its consumer */
    MOVES = 4096 /* of a window, drawn before the timed loop, and gone through again and again */
};

#define WARM_UP_PAIRS     UINT64_C(2048)
#define MAX_SAMPLED_PAIRS UINT64_C(262144)
#define FIRST_TRIAL_PAIRS UINT64_C(1024)
#define TRIAL_NS          20e6
#define TIMED_NS          250e6
#define SHORTEST_NS       200e6

/* ---- a ring with one producer and one consumer ---- */

struct ring {
    _Alignas(LINE) _Atomic(uint64_t) pushed; /* written by the producer */
    uint64_t seen_popped;                    /* the producer's last look */
    _Alignas(LINE) _Atomic(uint64_t) popped; /* written by the consumer */
    uint64_t seen_pushed;                    /* the consumer's last look */
    _Alignas(LINE) CUdeviceptr slot[RING];
};

/* Spins a little, then lets others run: there may be more threads than processors. False: a thread has failed. */
static bool wait_a_moment(unsigned *waited, const atomic_bool *failed)
{
    enum { SPINS = 256 };
    if (++*waited >= SPINS)
        sched_yield();
    return !atomic_load_explicit(failed, memory_order_relaxed);
}

static bool ring_push(struct ring *ring, CUdeviceptr address, const atomic_bool *failed)
{
    uint64_t pushed = atomic_load_explicit(&ring->pushed, memory_order_relaxed);
    for (unsigned waited = 0; pushed - ring->seen_popped == RING;) {
        ring->seen_popped = atomic_load_explicit(&ring->popped, memory_order_acquire); /* with ring_pop's release */
        if (pushed - ring->seen_popped == RING && !wait_a_moment(&waited, failed))
            return false;
    }
    ring->slot[pushed % RING] = address;
    atomic_store_explicit(&ring->pushed, pushed + 1, memory_order_release);
    return true;
}

static bool ring_pop(struct ring *ring, CUdeviceptr *address, const atomic_bool *failed)
{
    uint64_t popped = atomic_load_explicit(&ring->popped, memory_order_relaxed);
    for (unsigned waited = 0; popped == ring->seen_pushed;) {
        ring->seen_pushed = atomic_load_explicit(&ring->pushed, memory_order_acquire); /* with ring_push's release */
        if (popped == ring->seen_pushed && !wait_a_moment(&waited, failed))
            return false;
    }
    *address = ring->slot[popped % RING];
    atomic_store_explicit(&ring->popped, popped + 1, memory_order_release);
    return true;
}

/* ---- threads ---- */

enum role { ROLE_PAIR, ROLE_WINDOW, ROLE_PRODUCER, ROLE_CONSUMER };

struct move {
    uint16_t slot;
    uint16_t length; /* in --bytes */
};

struct worker {
    _Alignas(LINE) struct bench *bench;
    enum role role;
    size_t bytes;
    target target;
    CUstream stream;
    CUdeviceptr held;    /* 0, or the allocation of the pair under way */
    CUdeviceptr *window; /* [PAIRS_WINDOW], of ROLE_WINDOW; 0: none there */
    struct move *moves;  /* [MOVES], likewise */
    struct ring *ring;   /* of a couple */
    pthread_t thread;
    uint64_t begin_ns, end_ns, locks; /* of the last pass */
    double *sample;                   /* nanoseconds, of the last sampled pass */
    uint64_t samples;
};

struct bench {
    const pairs_case *of;
    target target;
    struct worker *worker;
    struct ring *ring;
    CUstream *stream, *known;
    unsigned streams, knowns, started;
    pthread_mutex_t gate; /* held until the barrier is there */
    pthread_barrier_t barrier;
    atomic_bool failed;
    bool shown;            /* by the exporter */
    bool stop;             /* at the barrier: the threads are to end */
    uint64_t pairs, every; /* of the pass; every: 0 timed, else each so many pairs are sampled */
};

/* False: told. Apart, so that the timed loop holds no more than the call and a test of its result. */
static bool malloc_failed(const target *t, size_t bytes, target_status status)
{
    if (status != TARGET_REFUSED)
        return false;
    target_tell_refused(t);
    fprintf(stderr,
            "vpmm-pairs: a request of %zu bytes was refused: use fewer --threads or --bytes (window and handoff "
            "keep %d allocations in flight a thread or couple), or raise VPMM_MAX_MAPPED if it is set\n",
            bytes, PAIRS_WINDOW);
    return false;
}

static inline bool allocate(target *t, size_t bytes, CUstream stream, CUdeviceptr *out)
{
    target_status status = target_malloc(t, bytes, stream, out);
    return status == TARGET_OK || malloc_failed(t, bytes, status);
}

static bool window_move(struct worker *w, const struct move *move)
{
    CUdeviceptr *place = &w->window[move->slot];
    CUdeviceptr old = *place;
    *place = 0;
    return (old == 0 || target_free(&w->target, old, w->stream)) &&
           allocate(&w->target, move->length * w->bytes, w->stream, place);
}

static inline bool consume(struct worker *w)
{
    CUdeviceptr address = w->held;
    w->held = 0;
    return target_free(&w->target, address, w->stream);
}

/* What belongs to the pair: its calls. */
static inline bool calls(struct worker *w, enum role role, uint64_t i)
{
    switch (role) {
    case ROLE_PAIR:
        return allocate(&w->target, w->bytes, w->stream, &w->held) && consume(w);
    case ROLE_WINDOW:
        return window_move(w, &w->moves[i % MOVES]);
    case ROLE_PRODUCER:
        return allocate(&w->target, w->bytes, w->stream, &w->held);
    case ROLE_CONSUMER:
        return consume(w);
    }
    return false;
}

/* What does not: the way from thread to thread. */
static inline bool before_calls(struct worker *w, enum role role)
{
    return role != ROLE_CONSUMER || ring_pop(w->ring, &w->held, &w->bench->failed);
}

static inline bool after_calls(struct worker *w, enum role role)
{
    if (role != ROLE_PRODUCER)
        return true;
    CUdeviceptr address = w->held;
    w->held = 0;
    if (ring_push(w->ring, address, &w->bench->failed))
        return true;
    w->held = address;
    return false;
}

static inline bool sampled_calls(struct worker *w, enum role role, uint64_t i)
{
    uint64_t begin = now_ns();
    bool ok = calls(w, role, i);
    w->sample[w->samples++] = (double)(now_ns() - begin);
    return ok;
}

/* Inlined for each role, with and without sampling, so that the timed loop decides nothing. */
static inline __attribute__((always_inline)) bool loop(struct worker *w, enum role role, uint64_t pairs, uint64_t every)
{
    bool ok = true;
    for (uint64_t i = 0; ok && i < pairs; i++)
        ok = before_calls(w, role) && (every != 0 && i % every == 0 ? sampled_calls(w, role, i) : calls(w, role, i)) &&
             after_calls(w, role);
    return ok;
}

static bool run_loop(struct worker *w, uint64_t pairs, uint64_t every)
{
    switch (w->role) {
    case ROLE_PAIR:
        return every != 0 ? loop(w, ROLE_PAIR, pairs, every) : loop(w, ROLE_PAIR, pairs, 0);
    case ROLE_WINDOW:
        return every != 0 ? loop(w, ROLE_WINDOW, pairs, every) : loop(w, ROLE_WINDOW, pairs, 0);
    case ROLE_PRODUCER:
        return every != 0 ? loop(w, ROLE_PRODUCER, pairs, every) : loop(w, ROLE_PRODUCER, pairs, 0);
    case ROLE_CONSUMER:
        return every != 0 ? loop(w, ROLE_CONSUMER, pairs, every) : loop(w, ROLE_CONSUMER, pairs, 0);
    }
    return false;
}

static uint64_t locks_so_far(void)
{
#ifdef VPMM_DEBUG_CHECKS
    return vpmm_debug_locks();
#else
    return 0;
#endif
}

static bool locks_are_counted(const pairs_case *c)
{
#ifdef VPMM_DEBUG_CHECKS
    return !c->async; /* the driver does not tell of its own */
#else
    (void)c;
    return false;
#endif
}

static void run_pass(struct worker *w)
{
    struct bench *b = w->bench;
    uint64_t locks = locks_so_far();
    w->samples = 0;
    w->begin_ns = now_ns();
    if (!atomic_load(&b->failed) && !run_loop(w, b->pairs, b->every))
        atomic_store(&b->failed, true);
    w->end_ns = now_ns();
    w->locks = locks_so_far() - locks;
}

static bool fill_window(struct worker *w)
{
    bool ok = true;
    for (unsigned i = 0; ok && w->window != NULL && i < PAIRS_WINDOW; i++)
        ok = window_move(w, &(struct move){(uint16_t)i, w->moves[i].length});
    return ok;
}

/* After the last pass, also one that failed: no other thread is at the ring. */
static bool give_back(struct worker *w)
{
    bool ok = w->held == 0 || consume(w);
    for (unsigned i = 0; w->window != NULL && i < PAIRS_WINDOW; i++)
        if (w->window[i] != 0)
            ok = target_free(&w->target, w->window[i], w->stream) && ok;
    if (w->role == ROLE_CONSUMER)
        while (atomic_load(&w->ring->popped) != atomic_load(&w->ring->pushed))
            ok = ring_pop(w->ring, &w->held, &w->bench->failed) && consume(w) && ok;
    return ok;
}

static void *worker_main(void *argument)
{
    struct worker *w = argument;
    struct bench *b = w->bench;
    pthread_mutex_lock(&b->gate);
    pthread_mutex_unlock(&b->gate);
    bool ok = gpu_enter(w->target.gpu) && fill_window(w);
    if (!ok)
        atomic_store(&b->failed, true);
    for (;;) {
        pthread_barrier_wait(&b->barrier);
        if (b->stop)
            break;
        run_pass(w);
        pthread_barrier_wait(&b->barrier);
    }
    if (!give_back(w))
        atomic_store(&b->failed, true);
    return NULL;
}

/* ---- a bench: streams, threads and what they work with ---- */

static bool no_memory(void)
{
    fprintf(stderr, "vpmm-pairs: the host has no memory for the benchmark: use fewer --threads or --pairs\n");
    return false;
}

/* Cleared. NULL: told. */
static void *lines_of(size_t n, size_t bytes)
{
    size_t size = (n * bytes + LINE - 1) / LINE * LINE;
    void *memory = aligned_alloc(LINE, size);
    if (memory != NULL)
        return memset(memory, 0, size);
    no_memory();
    return NULL;
}

static bool make_streams(gpu *g, CUstream **streams, unsigned wanted, unsigned *made)
{
    *streams = lines_of(wanted + 1, sizeof(CUstream));
    if (*streams == NULL)
        return false;
    for (; *made < wanted; ++*made)
        if (!gpu_ok(g, "cuStreamCreate", g->driver->cuStreamCreate(&(*streams)[*made], CU_STREAM_NON_BLOCKING)))
            return false;
    return true;
}

static bool unmake_streams(target *t, CUstream *streams, unsigned n)
{
    bool ok = true;
    for (unsigned i = 0; i < n; i++) {
        ok = target_release_stream(t, streams[i]) && ok;
        ok = gpu_ok(t->gpu, "cuStreamDestroy", t->gpu->driver->cuStreamDestroy(streams[i])) && ok;
    }
    free(streams);
    return ok;
}

/* The pool meets the further streams of --streams-known. */
static bool meet_streams(struct bench *b)
{
    CUdeviceptr address;
    for (unsigned i = 0; i < b->knowns; i++)
        if (!allocate(&b->target, b->of->bytes, b->known[i], &address) ||
            !target_free(&b->target, address, b->known[i]))
            return false;
    return true;
}

static bool make_window(struct worker *w, uint64_t seed)
{
    w->window = lines_of(PAIRS_WINDOW, sizeof *w->window);
    w->moves = lines_of(MOVES, sizeof *w->moves);
    if (w->window == NULL || w->moves == NULL)
        return false;
    for (int i = 0; i < MOVES; i++) {
        w->moves[i].slot = (uint16_t)(random_next(&seed) % PAIRS_WINDOW);
        w->moves[i].length = (uint16_t)(1 + random_next(&seed) % PAIRS_LONGEST);
    }
    return true;
}

static enum role role_of(pairs_pattern pattern, unsigned i)
{
    if (pattern == PATTERN_HANDOFF)
        return i % 2 == 0 ? ROLE_PRODUCER : ROLE_CONSUMER;
    return pattern == PATTERN_WINDOW ? ROLE_WINDOW : ROLE_PAIR;
}

static bool make_workers(struct bench *b)
{
    unsigned share = b->of->pattern == PATTERN_HANDOFF ? 2 : 1; /* threads to a stream */
    b->worker = lines_of(b->of->threads, sizeof *b->worker);
    b->ring = lines_of(b->streams, sizeof *b->ring);
    if (b->worker == NULL || b->ring == NULL)
        return false;
    for (unsigned i = 0; i < b->of->threads; i++) {
        struct worker *w = &b->worker[i];
        w->bench = b;
        w->role = role_of(b->of->pattern, i);
        w->bytes = b->of->bytes;
        w->target = b->target;
        w->stream = b->stream[i / share];
        w->ring = &b->ring[i / share];
        if (w->role == ROLE_WINDOW && !make_window(w, i + 1))
            return false;
    }
    return true;
}

/* The threads that could be started wait at the gate until it is known how many they are. */
static bool start_threads(struct bench *b)
{
    int error = 0;
    pthread_mutex_lock(&b->gate);
    while (error == 0 && b->started < b->of->threads) {
        error = pthread_create(&b->worker[b->started].thread, NULL, worker_main, &b->worker[b->started]);
        b->started += error == 0;
    }
    pthread_barrier_init(&b->barrier, NULL, b->started + 1);
    pthread_mutex_unlock(&b->gate);
    if (error != 0)
        fprintf(stderr, "vpmm-pairs: only %u of %u threads could be started: %s\n", b->started, b->of->threads,
                strerror(error));
    return error == 0;
}

static void stop_threads(struct bench *b)
{
    b->stop = true;
    if (b->started == 0)
        return;
    pthread_barrier_wait(&b->barrier);
    for (unsigned i = 0; i < b->started; i++)
        pthread_join(b->worker[i].thread, NULL);
    pthread_barrier_destroy(&b->barrier);
}

/* The exporter shows vpmm's pools alone. */
static bool show_pool(struct bench *b)
{
    b->shown = b->target.pool != NULL && metrics_add(b->of->exporter, b->target.pool, "pairs");
    return b->shown || b->target.pool == NULL;
}

static bool bench_open(struct bench *b, gpu *g, const pairs_case *c)
{
    unsigned streams = c->pattern == PATTERN_HANDOFF ? c->threads / 2 : c->threads;
    *b = (struct bench){.of = c};
    pthread_mutex_init(&b->gate, NULL);
    return target_open(&b->target, g, c->async ? NULL : &c->options->config) && show_pool(b) &&
           make_streams(g, &b->known, c->options->streams_known, &b->knowns) &&
           make_streams(g, &b->stream, streams, &b->streams) && meet_streams(b) && make_workers(b) && start_threads(b);
}

/* Takes back whatever has been made. False: told. */
static bool bench_close(struct bench *b)
{
    stop_threads(b);
    bool ok = !atomic_load(&b->failed);
    for (unsigned i = 0; b->worker != NULL && i < b->of->threads; i++) {
        free(b->worker[i].window);
        free(b->worker[i].moves);
        free(b->worker[i].sample);
    }
    free(b->worker);
    free(b->ring);
    pthread_mutex_destroy(&b->gate);
    /* First, for no scrape may be beside the audit. */
    ok = (!b->shown || metrics_remove(b->of->exporter, b->target.pool)) && ok;
    ok = target_audit(&b->target) && ok;
    ok = unmake_streams(&b->target, b->stream, b->streams) && ok;
    ok = unmake_streams(&b->target, b->known, b->knowns) && ok;
    return target_close(&b->target) == 0 && ok;
}

/* ---- passes ---- */

static bool pass(struct bench *b, uint64_t pairs, uint64_t every)
{
    b->pairs = pairs;
    b->every = every;
    pthread_barrier_wait(&b->barrier);
    pthread_barrier_wait(&b->barrier);
    return !atomic_load(&b->failed);
}

/* From the first thread's begin to the last one's end. */
static double wall_ns(const struct bench *b)
{
    uint64_t begin = UINT64_MAX, end = 0;
    for (unsigned i = 0; i < b->started; i++) {
        begin = b->worker[i].begin_ns < begin ? b->worker[i].begin_ns : begin;
        end = b->worker[i].end_ns > end ? b->worker[i].end_ns : end;
    }
    return (double)(end - begin) + 1; /* never zero */
}

static bool find_length(struct bench *b, uint64_t *pairs)
{
    uint64_t trial = FIRST_TRIAL_PAIRS;
    for (;; trial *= 4) {
        if (!pass(b, trial, 0))
            return false;
        if (wall_ns(b) >= TRIAL_NS)
            break;
    }
    *pairs = 1 + (uint64_t)((double)trial * TIMED_NS / wall_ns(b));
    return true;
}

/* Counters: what they grew by. Levels come out of it without meaning. */
static void subtract_stats(vpmm_stats *after, const vpmm_stats *before)
{
#define SUBTRACT(name, kind, help) after->name -= before->name;
    VPMM_STATS(SUBTRACT)
#undef SUBTRACT
}

static bool timed_pass(struct bench *b, uint64_t pairs, pairs_result *r)
{
    vpmm_stats before;
    if (!target_stats(&b->target, &before) || !pass(b, pairs, 0) || !target_stats(&b->target, &r->tiers))
        return false;
    subtract_stats(&r->tiers, &before);
    r->pairs = pairs * b->streams;
    r->ns_per_pair = wall_ns(b) * b->of->threads / (double)r->pairs;
    r->pairs_per_second = 1e9 * (double)r->pairs / wall_ns(b);
    r->driver_calls = b->of->async ? 2 * r->pairs : r->tiers.driver_calls;
    r->has_locks = locks_are_counted(b->of);
    r->locks = 0;
    for (unsigned i = 0; i < b->started; i++)
        r->locks += b->worker[i].locks;
    return true;
}

/* Of a length given, or found. What was found in trials that were still slow is corrected once it is seen. */
static bool timed_passes(struct bench *b, uint64_t *pairs, pairs_result *r)
{
    enum { TRIES = 3 };
    *pairs = b->of->options->pairs;
    if (*pairs != 0)
        return timed_pass(b, *pairs, r);
    if (!find_length(b, pairs))
        return false;
    for (int i = 0; i < TRIES; i++) {
        if (!timed_pass(b, *pairs, r))
            return false;
        if (wall_ns(b) >= SHORTEST_NS)
            break;
        *pairs = 1 + (uint64_t)((double)*pairs * TIMED_NS / wall_ns(b));
    }
    return true;
}

/* ---- the 99th percentile ---- */

/* What two readings of the clock show with nothing between them: the median. */
static double clock_cost(void)
{
    enum { READINGS = 1001 };
    double cost[READINGS];
    for (int i = 0; i < READINGS; i++) {
        uint64_t begin = now_ns();
        cost[i] = (double)(now_ns() - begin);
    }
    qsort(cost, READINGS, sizeof cost[0], compare_doubles);
    return cost[READINGS / 2];
}

/*
 * All threads' samples into one array: how many. A couple's ring keeps the order, so the producer's kth
 * sample and the consumer's are of one pair, and its time is their sum: what was spent in the ring is in neither.
 */
static size_t gather_samples(const struct bench *b, double *all, double clock)
{
    size_t n = 0;
    for (unsigned i = 0; i < b->started; i++) {
        const struct worker *w = &b->worker[i];
        if (w->role == ROLE_CONSUMER)
            continue;
        for (uint64_t k = 0; k < w->samples; k++) {
            double ns = w->sample[k] - clock;
            if (w->role == ROLE_PRODUCER)
                ns += w[1].sample[k] - clock;
            all[n++] = ns > 0 ? ns : 0;
        }
    }
    return n;
}

static bool sampled_pass(struct bench *b, uint64_t pairs, pairs_result *r)
{
    uint64_t n = pairs < MAX_SAMPLED_PAIRS ? pairs : MAX_SAMPLED_PAIRS, every = n / 1024;
    every = every < 1 ? 1 : every > 16 ? 16 : every;
    size_t room = (size_t)(n / every + 1);
    for (unsigned i = 0; i < b->started; i++)
        if ((b->worker[i].sample = lines_of(room, sizeof(double))) == NULL)
            return false;
    double *all = lines_of(room * b->started, sizeof *all);
    bool ok = all != NULL && pass(b, n, every);
    if (ok) {
        size_t samples = gather_samples(b, all, clock_cost());
        qsort(all, samples, sizeof *all, compare_doubles);
        r->p99_ns = all[(samples * 99 + 99) / 100 - 1];
        r->has_p99 = true;
    }
    free(all);
    return ok;
}

/* With VPMM_SMALL=async what is live in the driver's pool between the passes counts: no peak of both is kept. */
static bool peak_of(target *t, uint64_t *bytes)
{
    target_level now;
    bool ok = target_peak_mapped(t, bytes) && target_held(t, &now);
    if (ok && now.mapped > *bytes)
        *bytes = now.mapped;
    return ok;
}

bool pairs_run(gpu *g, const pairs_case *c, pairs_result *r)
{
    struct bench bench;
    uint64_t pairs;
    *r = (pairs_result){.of = *c};
    bool ok = bench_open(&bench, g, c) && pass(&bench, WARM_UP_PAIRS, 0) && timed_passes(&bench, &pairs, r) &&
              (c->options->no_p99 || sampled_pass(&bench, pairs, r)) && peak_of(&bench.target, &r->peak_mapped_bytes);
    r->good = bench_close(&bench);
    return ok;
}
