/*
 * The peaks of live and requested bytes: what hits of front caches reach counts, in one thread and in several, within
 * the bound that lib/base/stats.h gives. Nothing reads the statistics between a peak and its end, which would note it.
 */
#include "support.h"

#include "pool/pool.h"

#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <time.h>

#define MIB ((size_t)1 << 20)

enum { THREADS = 4, CACHE_MIB = 512 };

static struct setup cached(void)
{
    struct setup setup = setup_default();
    setup.sim.stepped = false;
    setup.pool.cache_bytes = CACHE_MIB * MIB;
    setup.pool.streams = VPMM_STREAMS_TRUSTED;
    return setup;
}

static uint64_t attribute(struct world *w, vpmm_attribute which)
{
    uint64_t value;
    must_work(vpmm_pool_get_attribute(w->pool, which, &value));
    return value;
}

static void begin_again(struct world *w)
{
    must_work(vpmm_pool_set_attribute(w->pool, VPMM_ATTRIBUTE_PEAK_LIVE, 0));
    must_work(vpmm_pool_set_attribute(w->pool, VPMM_ATTRIBUTE_PEAK_REQUESTED, 0));
}

/* The most that the slacks of all parts can be. */
static uint64_t slacks(const struct world *w)
{
    const struct stats *stats = &((const struct vpmm_pool *)w->pool)->stats;
    uint64_t sum = (uint64_t)THREADS * SLACK_OF_STRIPE;
    for (const struct stats_tally *tally = atomic_load(&stats->tallies); tally; tally = tally->next)
        sum += tally->slack_most;
    return sum;
}

/* --- one thread that allocates, beside others that have ----------------------------------------------------------- */

struct rise {
    struct world *w;
    CUstream stream;
    size_t bytes, count;
    CUdeviceptr at[3000];
    vpmm_status status;
};

static void up(struct rise *r)
{
    for (size_t i = 0; i < r->count && r->status == VPMM_SUCCESS; i++)
        r->status = vpmm_malloc(r->w->pool, r->bytes, r->stream, &r->at[i]);
}

static void down(struct rise *r)
{
    for (size_t i = 0; i < r->count && r->status == VPMM_SUCCESS; i++)
        r->status = vpmm_free(r->w->pool, r->at[i], r->stream);
}

/* With it the pool is not one thread's, whose looks add all parts up. It has its front until it ends. */
struct other {
    struct rise rise;
    pthread_t thread;
    sem_t done, dismissed;
};

static void *up_and_down(void *argument)
{
    struct other *other = argument;
    other->rise.w->driver->cuCtxSetCurrent(other->rise.w->context);
    up(&other->rise);
    down(&other->rise);
    sem_post(&other->done);
    sem_wait(&other->dismissed);
    return NULL;
}

static void start_other(struct other *other, struct world *w, size_t bytes)
{
    other->rise = (struct rise){.w = w, .stream = world_stream(w), .bytes = bytes, .count = 1};
    sem_init(&other->done, 0, 0);
    sem_init(&other->dismissed, 0, 0);
    cr_assert_eq(pthread_create(&other->thread, NULL, up_and_down, other), 0);
    sem_wait(&other->done);
}

static void end_other(struct other *other)
{
    sem_post(&other->dismissed);
    pthread_join(other->thread, NULL);
    must_work(other->rise.status);
}

/* Peaks of which no malloc but hits has a part; each lower than that before. */
static void peaks_of_hits(size_t bytes, size_t rounded, size_t count)
{
    struct setup setup = cached();
    struct world w;
    world_open(&w, &setup);
    static struct other other;
    start_other(&other, &w, bytes);
    static struct rise r;
    r = (struct rise){.w = &w, .stream = world_stream(&w), .bytes = bytes, .count = count};
    for (size_t i = 0; i < 3 + 160000 / count; i++) { /* till the cache holds as much as it may, and has all of it */
        up(&r);
        down(&r);
    }
    for (; r.count > 2; r.count -= 3) {
        vpmm_stats before = stats_of(&w);
        begin_again(&w);
        up(&r);
        down(&r);
        must_work(r.status);
        vpmm_stats after = stats_of(&w);
        cr_assert_eq(after.hits_cache - before.hits_cache, r.count, "not all are hits");
        cr_expect_leq(after.peak_requested_bytes, r.count * bytes);
        cr_expect_geq(after.peak_requested_bytes + (bytes < LEAST_RISE ? LEAST_RISE : 0), r.count * bytes,
                      "%llu, not %zu", (unsigned long long)after.peak_requested_bytes, r.count * bytes);
        if (rounded)
            cr_expect_eq(after.peak_live_bytes, r.count * rounded, "%llu, not %zu",
                         (unsigned long long)after.peak_live_bytes, r.count * rounded);
        cr_expect_eq(attribute(&w, VPMM_ATTRIBUTE_PEAK_LIVE), after.peak_live_bytes);
        cr_expect_eq(attribute(&w, VPMM_ATTRIBUTE_PEAK_REQUESTED), after.peak_requested_bytes);
    }
    end_other(&other);
    world_audit(&w);
    world_close(&w);
}

Test(peaks, hits_of_pages_count)
{
    peaks_of_hits(PAGE, PAGE, 24);
}
Test(peaks, hits_of_regions_count_as_requested_and_as_rounded)
{
    peaks_of_hits(3 * PAGE - 4096, 3 * PAGE, 9);
}
Test(peaks, hits_of_subpages_count)
{
    peaks_of_hits(200 << 10, 0, 24);
}

/* Slices of which a cache holds a few hundred kilobytes: mostly hits. */
Test(peaks, slices_count)
{
    enum { SLICE = 4000, COUNT = 3000 };
    struct setup setup = cached();
    struct world w;
    world_open(&w, &setup);
    static struct other other;
    start_other(&other, &w, SLICE);
    static struct rise r;
    r = (struct rise){.w = &w, .stream = world_stream(&w), .bytes = SLICE, .count = COUNT};
    for (int i = 0; i < 3; i++) {
        begin_again(&w);
        up(&r);
        down(&r);
        must_work(r.status);
        /* The thread's two fronts are parts like two threads', and this is as fast as it can be. */
        uint64_t peak = stats_of(&w).peak_requested_bytes;
        cr_expect(peak > COUNT * SLICE / 2 && peak < COUNT * SLICE * 3 / 2, "%llu", (unsigned long long)peak);
    }
    end_other(&other);
    world_close(&w);
}
/* With one thread each hit that is the highest so far is seen, however small. */
Test(peaks, hits_of_slices_of_one_thread_are_exact)
{
    struct setup setup = cached();
    struct world w;
    world_open(&w, &setup);
    static struct rise r;
    r = (struct rise){.w = &w, .stream = world_stream(&w), .bytes = 1000, .count = 24};
    for (int i = 0; i < 3; i++, r.count -= 5) {
        uint64_t hits = stats_of(&w).hits_cache;
        begin_again(&w);
        up(&r);
        down(&r);
        must_work(r.status);
        cr_expect(i == 0 || stats_of(&w).hits_cache == hits + r.count);
        cr_expect_eq(stats_of(&w).peak_requested_bytes, r.count * 1000);
    }
    world_close(&w);
}

/* A thread has a tally of pages and one of pieces, and the peak is that of their sum. */
enum { PIECES = 12, WHOLE = 6, BOTH = PIECES + WHOLE };

static size_t length_of(int i)
{
    return i < WHOLE ? (size_t)(1 + i % 2) * PAGE : i % 4 ? MIB : 300;
}

struct both {
    struct world w;
    CUstream stream;
    CUdeviceptr at[BOTH];
    uint64_t level, peak;
};

static void change(struct both *b, int i)
{
    if (b->at[i]) {
        give(&b->w, b->at[i], b->stream);
        b->level -= length_of(i);
        b->at[i] = 0;
    } else {
        b->at[i] = take_bytes(&b->w, length_of(i), b->stream);
        b->level += length_of(i);
    }
    b->peak = b->level > b->peak ? b->level : b->peak;
}

/*
 * One thread takes and frees what it likes of some of them, and then frees all. Nothing looks meanwhile but the malloc
 * at the beginning, of a length of its own, which no cache has.
 */
static void rise_and_fall(struct both *b, int round, uint32_t *seed)
{
    size_t other = (size_t)(20 + round) << 13;
    int first = round % 3 == 1 ? WHOLE : 0, end = round % 3 == 2 ? WHOLE : BOTH;
    give(&b->w, take_bytes(&b->w, other, b->stream), b->stream);
    b->peak = other > b->peak ? other : b->peak;
    for (int step = 0; step < 2 * BOTH; step++) {
        *seed = *seed * 1664525 + 1013904223;
        change(b, first + (int)(*seed >> 8) % (end - first));
    }
    for (int i = 0; i < BOTH; i++)
        if (b->at[i])
            change(b, i);
}

static void both_are_exact(uint32_t seed)
{
    enum { ROUNDS = 60 };
    struct setup setup = cached();
    struct both b = {.level = 0};
    world_open(&b.w, &setup);
    b.stream = world_stream(&b.w);
    for (int round = 0; round < ROUNDS; round++) {
        if (round % 5 == 4) {
            begin_again(&b.w);
            b.peak = 0;
        }
        rise_and_fall(&b, round, &seed);
        uint64_t told = attribute(&b.w, VPMM_ATTRIBUTE_PEAK_REQUESTED);
        require(told == b.peak, "round %d: %llu, not %llu", round, (unsigned long long)told,
                (unsigned long long)b.peak);
    }
    cr_expect_gt(stats_of(&b.w).hits_cache, stats_of(&b.w).mallocs / 2);
    world_close(&b.w);
}

Test(peaks, hits_of_pages_and_of_pieces_by_one_thread_are_exact)
{
    for (uint32_t seed = 1; seed <= 8; seed++)
        both_are_exact(seed);
}

/* What is live before the peak begins again is its least value. */
Test(peaks, a_peak_begins_at_what_is_there)
{
    struct setup setup = cached();
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr kept = take_bytes(&w, 5 * PAGE - 100, s);
    give(&w, take(&w, 7, s), s);
    cr_expect_eq(attribute(&w, VPMM_ATTRIBUTE_PEAK_LIVE), 12 * PAGE);
    cr_expect_eq(attribute(&w, VPMM_ATTRIBUTE_PEAK_REQUESTED), 12 * PAGE - 100);
    begin_again(&w);
    cr_expect_eq(attribute(&w, VPMM_ATTRIBUTE_PEAK_LIVE), 5 * PAGE);
    cr_expect_eq(attribute(&w, VPMM_ATTRIBUTE_PEAK_REQUESTED), 5 * PAGE - 100);
    give(&w, kept, s);
    cr_expect_eq(attribute(&w, VPMM_ATTRIBUTE_PEAK_REQUESTED), 5 * PAGE - 100);
    world_close(&w);
}

/* With one thread the highest sum of what was asked for is seen also where as much, or more, was live before. */
Test(peaks, requested_has_a_peak_of_its_own)
{
    struct setup setup = cached();
    struct world w;
    world_open(&w, &setup);
    static struct rise low, high;
    low = high = (struct rise){.w = &w, .stream = world_stream(&w), .bytes = PAGE + 1, .count = 12};
    high.bytes = 2 * PAGE;
    high.count = 11;
    for (int i = 0; i < 2; i++) {
        up(&low);
        down(&low);
        up(&high);
        down(&high);
    }
    must_work(low.status);
    must_work(high.status);
    cr_expect_eq(stats_of(&w).peak_live_bytes, 12 * 2 * PAGE);
    cr_expect_eq(stats_of(&w).peak_requested_bytes, 11 * 2 * PAGE);
    world_close(&w);
}

/* Either level alone may be at a new height: here that of requested, where as much was live before, */
Test(peaks, a_hit_that_asks_for_more_of_as_much_is_seen)
{
    struct setup setup = cached();
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    give(&w, take_bytes(&w, 2 * PAGE - 4096, s), s);
    give(&w, take_bytes(&w, 2 * PAGE, s), s);
    cr_assert_eq(stats_of(&w).hits_cache, 1);
    cr_expect_eq(stats_of(&w).peak_requested_bytes, 2 * PAGE);
    cr_expect_eq(stats_of(&w).peak_live_bytes, 2 * PAGE);
    world_close(&w);
}

/* and here that of live, where more was asked for before, of the driver's pool. */
Test(peaks, hits_are_seen_below_what_was_asked_for_before)
{
    struct setup setup = cached();
    setup.pool.small = VPMM_SMALL_ASYNC;
    struct world w;
    world_open(&w, &setup);
    static struct rise pages, small;
    pages = small = (struct rise){.w = &w, .stream = world_stream(&w), .bytes = PAGE, .count = 2};
    small.bytes = MIB;
    small.count = 10;
    up(&pages);
    down(&pages);
    begin_again(&w);
    up(&small);
    down(&small);
    up(&pages);
    down(&pages);
    must_work(pages.status);
    must_work(small.status);
    cr_assert_eq(stats_of(&w).hits_cache, 2);
    cr_expect_eq(stats_of(&w).peak_requested_bytes, 10 * MIB);
    cr_expect_eq(stats_of(&w).peak_live_bytes, 2 * PAGE);
    world_close(&w);
}

/* Requests that the driver's pool serves are requested, and not live. */
Test(peaks, what_the_driver_s_pool_serves_is_requested)
{
    struct setup setup = cached();
    setup.pool.small = VPMM_SMALL_ASYNC;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    for (int i = 0; i < 2; i++)
        give(&w, take_bytes(&w, 1000, s), s);
    cr_expect_eq(attribute(&w, VPMM_ATTRIBUTE_PEAK_REQUESTED), 1000);
    cr_expect_eq(attribute(&w, VPMM_ATTRIBUTE_PEAK_LIVE), 0);
    world_close(&w);
}

/* So many bytes at a time come and go, far more in sum than all slacks; then the other thread looks. */
static vpmm_stats come_and_go(const struct setup *setup, size_t bytes)
{
    enum { ROUNDS = 300 };
    struct world w;
    world_open(&w, setup);
    static struct other other[2];
    start_other(&other[0], &w, bytes);
    CUstream s = world_stream(&w);
    for (int i = 0; i < ROUNDS; i++)
        give(&w, take_bytes(&w, bytes, s), s);
    start_other(&other[1], &w, bytes);
    vpmm_stats stats = stats_of(&w);
    cr_expect_eq(stats.live_bytes, 0);
    cr_expect_leq(stats.peak_live_bytes, bytes + 2 * slacks(&w));
    end_other(&other[0]);
    end_other(&other[1]);
    world_close(&w);
    return stats;
}

/* Of requests that the driver's pool serves nothing is told as live, beside other threads either. */
Test(peaks, what_the_driver_s_pool_serves_is_live_to_no_other)
{
    struct setup setup = cached();
    setup.pool.small = VPMM_SMALL_ASYNC;
    cr_expect_eq(come_and_go(&setup, MIB).peak_live_bytes, 0);
}

/* What is made live past the caches is told, and its end as well. */
Test(peaks, what_comes_and_goes_past_the_caches_does_not_add_up)
{
    struct setup setup = cached();
    setup.pool.cache_bytes = 0;
    cr_expect_eq(come_and_go(&setup, 8 * PAGE).hits_cache, 0);
}

/* The slacks of all parts as they are. */
static uint64_t slacks_now(const struct world *w)
{
    const struct stats *stats = &((const struct vpmm_pool *)w->pool)->stats;
    uint64_t sum = 0;
    for (const struct stats_tally *tally = atomic_load(&stats->tallies); tally; tally = tally->next)
        sum += atomic_load(&tally->part.slack);
    for (uint64_t left = atomic_load(&stats->allocating); left; left &= left - 1) {
        uint64_t slack = atomic_load(&stats->stripe[__builtin_ctzll(left)].part.slack);
        sum += slack > SLACK_LEAST ? slack : SLACK_LEAST;
    }
    return sum;
}

/* Each free is the first into its cache, and no hit: the thread's tally falls by all of them, and has to tell. */
Test(peaks, first_frees_on_many_streams_are_told)
{
    enum { STREAMS = 12, LENGTH = 32 };
    struct setup setup = cached();
    struct world w;
    world_open(&w, &setup);
    world_become_steady(&w, (STREAMS + 1) * LENGTH);
    static struct other other[2];
    static struct rise r;
    r = (struct rise){.w = &w, .stream = world_stream(&w), .bytes = LENGTH * PAGE, .count = STREAMS};
    uint64_t before = stats_of(&w).frees_cache;
    start_other(&other[0], &w, PAGE);
    up(&r);
    must_work(r.status);
    for (int i = 0; i < STREAMS; i++)
        give(&w, r.at[i], world_stream(&w));
    begin_again(&w);
    start_other(&other[1], &w, PAGE);
    vpmm_stats stats = stats_of(&w);
    cr_expect_eq(stats.frees_cache - before, STREAMS + 2);
    cr_expect_leq(stats.peak_live_bytes, PAGE + 2 * slacks_now(&w));
    end_other(&other[0]);
    end_other(&other[1]);
    world_close(&w);
}

/* --- several threads ---------------------------------------------------------------------------------------------- */

static void expect_near(const char *what, uint64_t peak, uint64_t least, uint64_t most, uint64_t bound)
{
    cr_expect_geq(peak + bound, least, "%s: the peak is %zu MiB, %zu were there (bound %zu)", what, peak / MIB,
                  least / MIB, bound / MIB);
    cr_expect_leq(peak, most + bound, "%s: the peak is %zu MiB, at most %zu were there (bound %zu)", what, peak / MIB,
                  most / MIB, bound / MIB);
}

struct crew {
    struct rise rise[THREADS];
    pthread_barrier_t barrier;
};

struct member {
    struct crew *crew;
    struct rise *rise;
    int index;
};

static void wait_us(long us)
{
    const struct timespec time = {.tv_nsec = us * 1000};
    nanosleep(&time, NULL);
}

static void rise_at_a_server_s_pace(struct rise *r)
{
    for (size_t i = 0; i < r->count && r->status == VPMM_SUCCESS; i++, wait_us(20))
        r->status = vpmm_malloc(r->w->pool, r->bytes, r->stream, &r->at[i]);
}

/* What all need is in their caches, and the peaks begin again. */
static void fill_caches(struct member *m)
{
    m->rise->w->driver->cuCtxSetCurrent(m->rise->w->context);
    for (int i = 0; i < 3; i++) {
        up(m->rise);
        down(m->rise);
    }
    if (pthread_barrier_wait(&m->crew->barrier) == PTHREAD_BARRIER_SERIAL_THREAD) {
        vpmm_pool_set_attribute(m->rise->w->pool, VPMM_ATTRIBUTE_PEAK_LIVE, 0);
        vpmm_pool_set_attribute(m->rise->w->pool, VPMM_ATTRIBUTE_PEAK_REQUESTED, 0);
    }
    pthread_barrier_wait(&m->crew->barrier);
}

/* Each reaches its own height first, alone; then all rise one after another, and only then anyone falls. */
static void *rise_in_turn(void *argument)
{
    struct member *m = argument;
    fill_caches(m);
    for (int turn = 0; turn < 2 * THREADS; turn++, pthread_barrier_wait(&m->crew->barrier)) {
        if (turn % THREADS == m->index)
            rise_at_a_server_s_pace(m->rise);
        if (turn == m->index)
            down(m->rise);
    }
    down(m->rise);
    return NULL;
}

static void run_crew(struct crew *crew, void *(*act)(void *))
{
    pthread_t thread[THREADS];
    struct member member[THREADS];
    pthread_barrier_init(&crew->barrier, NULL, THREADS);
    for (int i = 0; i < THREADS; i++) {
        member[i] = (struct member){crew, &crew->rise[i], i};
        cr_assert_eq(pthread_create(&thread[i], NULL, act, &member[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(thread[i], NULL);
        must_work(crew->rise[i].status);
    }
    pthread_barrier_destroy(&crew->barrier);
}

/* A server's peak: threads whose own peaks were known are at them together for once. */
Test(peaks, four_threads_that_rise_together, .timeout = 60)
{
    enum { COUNT = 14 };
    struct setup setup = cached();
    struct world w;
    world_open(&w, &setup);
    static struct crew crew;
    for (int i = 0; i < THREADS; i++)
        crew.rise[i] = (struct rise){.w = &w, .stream = world_stream(&w), .bytes = 2 * PAGE, .count = COUNT};
    run_crew(&crew, rise_in_turn);
    uint64_t top = (uint64_t)THREADS * COUNT * 2 * PAGE;
    expect_near("in turn", stats_of(&w).peak_live_bytes, top, top, top / 6);
    expect_near("in turn, requested", stats_of(&w).peak_requested_bytes, top, top, top / 6);
    world_close(&w);
}

/* The level as the program knows it: between what it certainly has and what it may have. */
static struct {
    atomic_uint_fast64_t certain, possible, most_certain, most_possible;
} known;

static void raise_to(atomic_uint_fast64_t *most, uint64_t value)
{
    uint_fast64_t seen = atomic_load(most);
    while (seen < value && !atomic_compare_exchange_weak(most, &seen, value))
        ;
}

static vpmm_status known_malloc(struct rise *r, CUdeviceptr *at)
{
    raise_to(&known.most_possible, atomic_fetch_add(&known.possible, r->bytes) + r->bytes);
    vpmm_status status = vpmm_malloc(r->w->pool, r->bytes, r->stream, at);
    raise_to(&known.most_certain, atomic_fetch_add(&known.certain, r->bytes) + r->bytes);
    return status;
}

static vpmm_status known_free(struct rise *r, CUdeviceptr at)
{
    atomic_fetch_sub(&known.certain, r->bytes);
    vpmm_status status = vpmm_free(r->w->pool, at, r->stream);
    atomic_fetch_sub(&known.possible, r->bytes);
    return status;
}

static void *churn(void *argument)
{
    enum { OPERATIONS = 60000 };
    struct rise *r = ((struct member *)argument)->rise;
    uint32_t seed = 12345 + (uint32_t)((struct member *)argument)->index;
    r->w->driver->cuCtxSetCurrent(r->w->context);
    for (int i = 0; i < OPERATIONS && r->status == VPMM_SUCCESS; i++) {
        seed = seed * 1664525 + 1013904223;
        CUdeviceptr *at = &r->at[(seed >> 8) % r->count], old = *at;
        *at = 0;
        r->status = old ? known_free(r, old) : known_malloc(r, at);
    }
    for (size_t k = 0; k < r->count; k++)
        if (r->at[k] && r->status == VPMM_SUCCESS)
            r->status = known_free(r, r->at[k]);
    return NULL;
}

/* What goes to the next thread is freed there: one thread's tally rises without end, and another's falls. */
static struct {
    _Atomic(CUdeviceptr) slot[THREADS / 2][32];
} handed;

static vpmm_status hand_over(struct rise *r, _Atomic(CUdeviceptr) *slot)
{
    CUdeviceptr at;
    while (atomic_load(slot))
        sched_yield();
    vpmm_status status = known_malloc(r, &at);
    atomic_store(slot, status == VPMM_SUCCESS ? at : 1); /* 1: the end */
    return status;
}

static vpmm_status take_over(struct rise *r, _Atomic(CUdeviceptr) *slot)
{
    CUdeviceptr at;
    while (!(at = atomic_load(slot)))
        sched_yield();
    vpmm_status status = at == 1 ? VPMM_ERROR_OUT_OF_MEMORY : known_free(r, at);
    atomic_store(slot, 0);
    return status;
}

static void *hand(void *argument)
{
    enum { OPERATIONS = 30000 };
    const struct member *m = argument;
    struct rise *r = m->rise;
    r->w->driver->cuCtxSetCurrent(r->w->context);
    for (int i = 0; i < OPERATIONS && r->status == VPMM_SUCCESS; i++) {
        _Atomic(CUdeviceptr) *slot = &handed.slot[m->index / 2][i % 32];
        r->status = m->index % 2 ? take_over(r, slot) : hand_over(r, slot);
    }
    return NULL;
}

static void peaks_of_a_crew(void *(*act)(void *), const char *what, size_t count)
{
    struct setup setup = cached();
    setup.pool.cache_bytes = 64 * MIB;
    setup.pool.reaper = true; /* whose passes add up all parts meanwhile */
    struct world w;
    world_open(&w, &setup);
    static struct crew crew;
    for (int i = 0; i < THREADS; i++)
        crew.rise[i] = (struct rise){.w = &w, .bytes = 3 * PAGE, .count = count};
    for (int i = 0; i < THREADS; i++) /* those that hand over share a stream */
        crew.rise[i].stream = i % 2 ? crew.rise[i - 1].stream : world_stream(&w);
    run_crew(&crew, act);
    vpmm_stats stats = stats_of(&w);
    expect_near(what, stats.peak_live_bytes, known.most_certain, known.most_possible, 2 * slacks(&w));
    expect_near(what, stats.peak_requested_bytes, known.most_certain, known.most_possible, 2 * slacks(&w));
    cr_expect_eq(stats.live_bytes, 0);
    world_close(&w);
}

Test(peaks, four_threads_at_random, .timeout = 120)
{
    peaks_of_a_crew(churn, "at random", 64);
}

/* 360 GB go from thread to thread, of which 400 MB are live at a time. */
Test(peaks, memory_that_is_handed_over, .timeout = 120)
{
    peaks_of_a_crew(hand, "handed over", 0);
}
