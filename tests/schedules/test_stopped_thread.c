/*
 * A thread that is stopped anywhere in tiers 1 to 3 stops no other thread's malloc or free there, and what others do
 * meanwhile is not undone when it goes on. One that is stopped in a build, or waits for its turn, stops nobody in
 * tiers 1 to 4.
 *
 * The library under this test calls vpmm_schedule_point before each of its atomic operations. One thread does one
 * malloc and one free, or one free, and is parked at its k-th such point, for each k in turn until it comes through;
 * while it is parked other threads pass both tiers many times, before a deadline, or free the same memory, or the
 * memory beside it.
 */
#include "base/schedule.h"
#include "pool/pool.h"
#include "support.h"

#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdlib.h>
#include <time.h>

enum { OWN = 8, PASSED = 8, PAIRS = 24, DEADLINE_SECONDS = 20 };

static struct {
    sem_t started, stopped, go;
    uint64_t at; /* the point to park at */
    bool came_through, over;
    atomic_bool waits;              /* points are not counted meanwhile */
    _Atomic(uint64_t) clock_slowed; /* the time, which goes on by 100 ns a look: nobody loses patience; 0: as usual */
} park;

static _Thread_local uint64_t points_left; /* 0: this thread is not watched */

void vpmm_schedule_point(const volatile void *at, bool changes)
{
    (void)at, (void)changes;
    if (points_left == 0 || atomic_load(&park.waits) || --points_left > 0)
        return;
    sem_post(&park.stopped);
    sem_wait(&park.go);
}

void vpmm_schedule_wait(void *lock)
{
    (void)lock;
    sched_yield();
}

void vpmm_schedule_sleep(const void *object, uint64_t ns)
{
    const struct timespec time = {.tv_nsec = 100000};
    (void)object, (void)ns; /* who sleeps looks again: a thread of these tests sleeps for another one's step */
    clock_nanosleep(CLOCK_MONOTONIC, 0, &time, NULL);
}

void vpmm_schedule_wake(const void *object)
{
    (void)object;
}

uint64_t vpmm_schedule_clock(void)
{
    struct timespec now;
    if (atomic_load(&park.clock_slowed))
        return atomic_fetch_add(&park.clock_slowed, 100);
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

struct actor {
    struct world *w;
    CUstream own, other;
    vpmm_status (*act)(struct actor *); /* what the stopped thread does */
    size_t pages;
    CUdeviceptr pointer;
    CUstream stream;
    vpmm_status status; /* of what it did last */
};

static vpmm_status pair(struct actor *a, size_t pages, CUstream stream)
{
    CUdeviceptr p = 0;
    vpmm_status status = vpmm_malloc(a->w->pool, pages * PAGE, stream, &p);
    return status == VPMM_SUCCESS ? vpmm_free(a->w->pool, p, stream) : status;
}

static vpmm_status malloc_and_free(struct actor *a)
{
    return pair(a, a->pages, a->stream);
}

static vpmm_status only_malloc(struct actor *a)
{
    return vpmm_malloc(a->w->pool, a->pages * PAGE, a->stream, &a->pointer);
}

static vpmm_status only_free(struct actor *a)
{
    return vpmm_free(a->w->pool, a->pointer, a->stream);
}

/* Acts each time that it is told to start. */
static void *be_stopped(void *argument)
{
    struct actor *a = argument;
    a->status = pair(a, 1, a->stream); /* what is done once a thread is done now */
    sem_post(&park.stopped);
    for (;;) {
        sem_wait(&park.started);
        if (park.over)
            return NULL;
        points_left = park.at;
        a->status = a->act(a);
        park.came_through = points_left > 0;
        points_left = 0;
        sem_post(&park.stopped);
    }
}

/* Hits of both tiers, beside the stopped thread: on its stream and on another. */
static void *go_on(void *argument)
{
    struct actor *a = argument;
    for (int i = 0; i < PAIRS && a->status == VPMM_SUCCESS; i++)
        a->status = pair(a, 1 + (size_t)i % 2, i % 4 < 2 ? a->own : a->other);
    sem_post(&park.stopped);
    return NULL;
}

/* Whether it is posted within so long. */
static bool is_posted_within(sem_t *semaphore, long ms)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += ms % 1000 * 1000000;
    until.tv_sec += ms / 1000 + until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    return sem_timedwait(semaphore, &until) == 0;
}

static bool stopped_in_time(void)
{
    return is_posted_within(&park.stopped, DEADLINE_SECONDS * 1000);
}

static pthread_t start_actor(struct actor *a)
{
    pthread_t thread;
    park.over = false;
    sem_init(&park.started, 0, 0);
    sem_init(&park.stopped, 0, 0);
    sem_init(&park.go, 0, 0);
    pthread_create(&thread, NULL, be_stopped, a);
    cr_assert(stopped_in_time());
    return thread;
}

/* The actor acts, up to its point. False: it is through already. */
static bool stop_at(uint64_t point)
{
    park.at = point;
    park.came_through = false;
    sem_post(&park.started);
    require(stopped_in_time(), "the thread does not reach its point %llu", (unsigned long long)point);
    return !park.came_through;
}

static void let_go(void)
{
    sem_post(&park.go);
    require(stopped_in_time(), "the thread does not go on from its point %llu", (unsigned long long)park.at);
    park.came_through = false;
}

static void dismiss_actor(pthread_t thread)
{
    park.over = true;
    sem_post(&park.started);
    pthread_join(thread, NULL);
}

/* After one that has come through. */
static void end_actor(pthread_t thread)
{
    cr_expect_gt(park.at, 12, "only %llu points: the library is not built for this test",
                 (unsigned long long)park.at - 1);
    dismiss_actor(thread);
}

/* Free memory of both kinds: what has passed, in regions of one and two pages, and what only `own` may use. */
static void lay_out(struct world *w, CUstream own)
{
    world_drain(w);
    CUdeviceptr p[OWN][2];
    for (int i = 0; i < OWN; i++)
        for (size_t k = 0; k < 2; k++)
            p[i][k] = take(w, k + 1, own);
    keep_busy(w, own);
    for (int i = 0; i < OWN; i++)
        for (size_t k = 0; k < 2; k++)
            give(w, p[i][k], own);
}

static void stop_everywhere(size_t pages, bool on_other)
{
    struct world w;
    world_open(&w, NULL);
    CUstream own = world_stream(&w), other = world_stream(&w);
    enum { BLOCKS = 2 * (OWN + PASSED) };
    CUdeviceptr region[BLOCKS], wall[BLOCKS];
    for (size_t i = 0; i < BLOCKS; i++) { /* regions that walls keep from merging */
        region[i] = take(&w, 1 + i % 2, own);
        wall[i] = take(&w, 1, other);
    }
    for (size_t i = 0; i < BLOCKS; i++)
        give(&w, region[i], own);

    struct actor a = {.w = &w, .own = own, .other = other, .act = malloc_and_free, .pages = pages};
    a.stream = on_other ? other : own;
    pthread_t stopped = start_actor(&a);
    uint64_t builds = stats_of(&w).builds;
    for (uint64_t point = 1;; point++) {
        lay_out(&w, own);
        if (!stop_at(point))
            break;
        struct actor b = {.w = &w, .own = own, .other = other, .status = VPMM_SUCCESS};
        pthread_t free_one;
        pthread_create(&free_one, NULL, go_on, &b);
        require(stopped_in_time(), "a thread stopped at its point %llu stops another one", (unsigned long long)point);
        pthread_join(free_one, NULL);
        require(b.status == VPMM_SUCCESS, "beside a thread stopped at its point %llu: %s", (unsigned long long)point,
                vpmm_status_name(b.status));
        let_go();
        require(a.status == VPMM_SUCCESS, "stopped at its point %llu, then: %s", (unsigned long long)point,
                vpmm_status_name(a.status));
        world_audit(&w);
    }
    cr_expect_eq(stats_of(&w).builds, builds, "more than tiers 2 and 3 was passed");
    end_actor(stopped);
    for (size_t i = 0; i < BLOCKS; i++)
        give(&w, wall[i], other);
    world_close(&w);
}

Test(stopped_thread, in_tier_2_with_an_exact_fit, .timeout = 300)
{
    stop_everywhere(2, false);
}
Test(stopped_thread, in_tier_2_with_a_split, .timeout = 300)
{
    stop_everywhere(1, false);
}
Test(stopped_thread, in_tier_3, .timeout = 300)
{
    stop_everywhere(2, true);
}

Test(stopped_thread, while_it_frees_what_another_thread_frees, .timeout = 300)
{
    struct world w;
    world_open(&w, NULL);
    CUstream s = world_stream(&w);
    struct actor a = {.w = &w, .act = only_free, .stream = s};
    pthread_t stopped = start_actor(&a);
    for (uint64_t point = 1;; point++) {
        a.pointer = take(&w, 2, s);
        if (!stop_at(point))
            break;
        vpmm_status status = vpmm_free(w.pool, a.pointer, s);
        let_go();
        require((status == VPMM_SUCCESS) != (a.status == VPMM_SUCCESS), "stopped at its point %llu: %s, and %s",
                (unsigned long long)point, vpmm_status_name(a.status), vpmm_status_name(status));
        require(status == VPMM_ERROR_INVALID_POINTER || a.status == VPMM_ERROR_INVALID_POINTER, "%s, and %s",
                vpmm_status_name(a.status), vpmm_status_name(status));
        world_audit(&w);
    }
    end_actor(stopped);
    world_close(&w);
}

/* Left or right of a block that is being freed, another is freed: they become one region, whoever does it. */
static void frees_merge(bool left_is_stopped)
{
    struct world w;
    world_open(&w, NULL);
    CUstream s = world_stream(&w);
    CUdeviceptr wall[2];
    wall[0] = take(&w, 1, s);
    CUdeviceptr both = take(&w, 2, s);
    wall[1] = take(&w, 1, s);
    give(&w, both, s);
    struct actor a = {.w = &w, .act = only_free, .stream = s};
    pthread_t stopped = start_actor(&a);
    for (uint64_t point = 1;; point++) {
        CUdeviceptr block[2] = {take(&w, 1, s), take(&w, 1, s)};
        require(block[1] == block[0] + PAGE, "the blocks do not adjoin");
        a.pointer = block[left_is_stopped ? 0 : 1];
        bool is_stopped = stop_at(point);
        give(&w, block[left_is_stopped ? 1 : 0], s);
        if (is_stopped)
            let_go();
        world_audit(&w);
        uint64_t builds = stats_of(&w).builds;
        CUdeviceptr again = take(&w, 2, s);
        require(again == block[0] && stats_of(&w).builds == builds, "stopped at its point %llu: %s",
                (unsigned long long)point, layout(&w));
        give(&w, again, s);
        if (!is_stopped)
            break;
    }
    end_actor(stopped);
    give(&w, wall[0], s);
    give(&w, wall[1], s);
    world_close(&w);
}

Test(stopped_thread, while_it_frees_beside_what_another_thread_frees_on_the_right, .timeout = 300)
{
    frees_merge(true);
}
Test(stopped_thread, while_it_frees_beside_what_another_thread_frees_on_the_left, .timeout = 300)
{
    frees_merge(false);
}

/*
 * While the thread is about to take a region that waits for nothing, another takes it, uses it on its stream, and
 * frees it there: it is not idle any more, whatever the stopped thread saw. The simulator finds a use that is too
 * early.
 */
static void region_changes_hands(size_t pages)
{
    struct world w;
    world_open(&w, NULL);
    CUstream own = world_stream(&w), other = world_stream(&w);
    CUdeviceptr region[2], wall[2];
    for (size_t i = 0; i < 2; i++) {
        region[i] = take(&w, 1 + i, own);
        wall[i] = take(&w, 1, own);
    }
    give(&w, region[0], own);
    give(&w, region[1], own);
    struct actor a = {.w = &w, .act = only_malloc, .pages = pages, .stream = other};
    pthread_t stopped = start_actor(&a);
    for (uint64_t point = 1;; point++) {
        world_drain(&w);
        bool is_stopped = stop_at(point);
        CUdeviceptr p = take(&w, pages, own);
        fill(&w, p, pages, 1, own);
        give(&w, p, own);
        if (is_stopped)
            let_go();
        require(a.status == VPMM_SUCCESS, "%s", vpmm_status_name(a.status));
        fill(&w, a.pointer, pages, 2, other);
        vpmm_sim_step(w.sim, other, SIZE_MAX);
        world_step(&w);
        require(vpmm_sim_races(w.sim) == 0, "stopped at its point %llu it takes memory that is in use",
                (unsigned long long)point);
        give(&w, a.pointer, other);
        world_audit(&w);
        if (!is_stopped)
            break;
    }
    end_actor(stopped);
    give(&w, wall[0], own);
    give(&w, wall[1], own);
    world_close(&w);
}

Test(stopped_thread, while_the_region_that_it_looks_at_changes_hands, .timeout = 300)
{
    region_changes_hands(1);
}
Test(stopped_thread, while_the_longer_region_that_it_looks_at_changes_hands, .timeout = 300)
{
    region_changes_hands(2);
}

/* --- with front caches ----------------------------------------------------------------------------------------------
 */

enum { BIN = 31 }; /* regions of one length in a cache, at most */

/* Enough is mapped that nothing is built, and what is longer than a page is cached too. */
static void world_open_cached(struct world *w, vpmm_reuse reuse)
{
    struct setup setup = setup_default();
    setup.pool.cache_bytes = 256 * PAGE;
    setup.pool.initial_pages = 256;
    setup.pool.reuse = reuse;
    world_open(w, &setup);
}

/* What of world_audit holds while a thread stands still in the middle of a call. */
static void audit_cached(struct world *w, uint64_t point)
{
    vpmm_status status = vpmm_check(w->pool);
    require(status == VPMM_SUCCESS, "stopped at its point %llu: %s", (unsigned long long)point, vpmm_last_error());
    require(vpmm_sim_races(w->sim) == 0, "stopped at its point %llu: races", (unsigned long long)point);
}

/* What an act does first is not watched. */
static uint64_t unwatched(void)
{
    uint64_t left = points_left;
    points_left = 0;
    return left;
}

/* Its bin is full of free regions; one more overflows it. */
static vpmm_status overflow(struct actor *a)
{
    uint64_t left = unwatched();
    CUdeviceptr p[BIN + 1];
    vpmm_status status = VPMM_SUCCESS;
    for (int i = 0; i <= BIN && status == VPMM_SUCCESS; i++)
        status = vpmm_malloc(a->w->pool, a->pages * PAGE, a->stream, &p[i]);
    for (int i = 0; i < BIN && status == VPMM_SUCCESS; i++)
        status = vpmm_free(a->w->pool, p[i], a->stream);
    points_left = left;
    return status == VPMM_SUCCESS ? vpmm_free(a->w->pool, p[BIN], a->stream) : status;
}

/* A region of another stream's, and one that its cache has no bin for yet. */
static vpmm_status first_free_of_a_length(struct actor *a)
{
    uint64_t left = unwatched();
    CUdeviceptr p = 0;
    static _Thread_local size_t pages = 4;
    pages = pages < 40 ? pages + 1 : 5;
    vpmm_status status = vpmm_malloc(a->w->pool, pages * PAGE, a->other, &p);
    points_left = left;
    return status == VPMM_SUCCESS ? vpmm_free(a->w->pool, p, a->stream) : status;
}

static void stop_in_tier_1(vpmm_status (*act)(struct actor *), bool on_other)
{
    struct world w;
    world_open_cached(&w, VPMM_REUSE_WAIT_DEVICE);
    CUstream own = world_stream(&w), other = world_stream(&w);
    struct actor a = {.w = &w, .own = own, .other = other, .act = act, .pages = 2};
    a.stream = on_other ? other : own;
    pthread_t stopped = start_actor(&a);
    uint64_t builds = stats_of(&w).builds;
    for (uint64_t point = 1; stop_at(point); point++) {
        struct actor b = {.w = &w, .own = own, .other = other, .status = VPMM_SUCCESS};
        pthread_t free_one;
        pthread_create(&free_one, NULL, go_on, &b);
        require(stopped_in_time(), "a thread stopped at its point %llu stops another one", (unsigned long long)point);
        pthread_join(free_one, NULL);
        require(b.status == VPMM_SUCCESS, "beside a thread stopped at its point %llu: %s", (unsigned long long)point,
                vpmm_status_name(b.status));
        let_go();
        require(a.status == VPMM_SUCCESS, "stopped at its point %llu, then: %s", (unsigned long long)point,
                vpmm_status_name(a.status));
        audit_cached(&w, point);
        if (point % 8 == 0)
            world_drain(&w);
    }
    cr_expect_eq(stats_of(&w).builds, builds, "more than tiers 1 to 3 was passed");
    end_actor(stopped);
    world_close(&w);
}

Test(stopped_thread, in_tier_1, .timeout = 300)
{
    stop_in_tier_1(malloc_and_free, false);
}
Test(stopped_thread, in_tier_1_on_another_stream, .timeout = 300)
{
    stop_in_tier_1(malloc_and_free, true);
}
Test(stopped_thread, while_its_cache_overflows, .timeout = 300)
{
    stop_in_tier_1(overflow, false);
}
Test(stopped_thread, while_it_frees_a_length_for_the_first_time, .timeout = 300)
{
    stop_in_tier_1(first_free_of_a_length, false);
}

/* A thief keeps hints of what else it has seen. It tries them while nothing is there, and has none the next time. */
static void forget_hints(struct world *w, struct actor *a, CUstream stream)
{
    enum { MANY = 16 };
    CUdeviceptr p[MANY];
    for (int i = 0; i < MANY; i++)
        p[i] = take(w, a->pages, stream);
    require(!stop_at(UINT64_MAX) && a->status == VPMM_SUCCESS, "the thread does not come through");
    give(w, a->pointer, stream);
    for (int i = 0; i < MANY; i++)
        give(w, p[i], stream);
}

/* What lies in this thread's cache is taken by the stopped one, and by a third. */
Test(stopped_thread, while_it_steals, .timeout = 300)
{
    enum { REGIONS = 5 };
    struct world w;
    world_open_cached(&w, VPMM_REUSE_WAIT_DEVICE);
    CUstream own = world_stream(&w), other = world_stream(&w);
    struct actor a = {.w = &w, .act = only_malloc, .pages = 2, .stream = own};
    pthread_t stopped = start_actor(&a);
    uint64_t stolen = 0;
    for (uint64_t point = 1;; point++) {
        must_work(vpmm_trim(w.pool, SIZE_MAX, NULL)); /* nothing is in the other's cache */
        CUdeviceptr p[REGIONS];
        for (int i = 0; i < REGIONS; i++)
            p[i] = take(&w, 2, own);
        for (int i = 0; i < REGIONS; i++) {
            fill(&w, p[i], 2, 1, own);
            give(&w, p[i], own);
        }
        uint64_t before = stats_of(&w).hits_neighbour;
        bool is_stopped = stop_at(point);
        if (is_stopped) {
            struct actor b = {.w = &w, .own = own, .other = other, .status = VPMM_SUCCESS};
            pthread_t free_one;
            pthread_create(&free_one, NULL, go_on, &b);
            require(stopped_in_time(), "a thread stopped at its point %llu stops another one",
                    (unsigned long long)point);
            pthread_join(free_one, NULL);
            require(b.status == VPMM_SUCCESS, "beside point %llu: %s", (unsigned long long)point,
                    vpmm_status_name(b.status));
            CUdeviceptr q = take(&w, 2, own);
            fill(&w, q, 2, 2, own);
            let_go();
            require(a.status == VPMM_SUCCESS && a.pointer != q, "stopped at its point %llu: memory has two owners",
                    (unsigned long long)point);
            give(&w, q, own);
        }
        stolen += stats_of(&w).hits_neighbour - before;
        fill(&w, a.pointer, 2, 3, own);
        expect_later(&w, a.pointer, 2, 3, own);
        audit_cached(&w, point);
        give(&w, a.pointer, own);
        forget_hints(&w, &a, own);
        world_step(&w);
        if (!is_stopped)
            break;
    }
    cr_expect_gt(stolen, 10);
    end_actor(stopped);
    world_close(&w);
}

static vpmm_status cache_one_and_malloc(struct actor *a)
{
    uint64_t left = unwatched();
    CUdeviceptr p = 0;
    vpmm_status status = vpmm_malloc(a->w->pool, a->pages * PAGE, a->stream, &p);
    if (status == VPMM_SUCCESS)
        status = vpmm_free(a->w->pool, p, a->stream);
    points_left = left;
    return status == VPMM_SUCCESS ? vpmm_malloc(a->w->pool, a->pages * PAGE, a->stream, &a->pointer) : status;
}

/*
 * While the thread is about to hit a region, another steals it, uses it, and frees it on another stream: its word is
 * CACHED again, and not for the stopped thread.
 */
static void hit_changes_hands(bool taken_again)
{
    struct world w;
    world_open_cached(&w, VPMM_REUSE_COMPLETED);
    CUstream own = world_stream(&w), other = world_stream(&w);
    struct actor a = {.w = &w, .act = cache_one_and_malloc, .pages = 2, .stream = own};
    pthread_t stopped = start_actor(&a);
    for (uint64_t point = 1;; point++) {
        must_work(vpmm_trim(w.pool, SIZE_MAX, NULL));
        world_drain(&w);
        bool is_stopped = stop_at(point);
        CUdeviceptr p = take(&w, 2, own); /* the region, at its first points */
        fill(&w, p, 2, 1, own);
        order_after(&w, other, own);
        fill(&w, p, 2, 2, other);
        give(&w, p, other);
        CUdeviceptr q = taken_again ? take(&w, 2, other) : 0;
        if (q)
            fill(&w, q, 2, 3, other);
        if (is_stopped)
            let_go();
        require(a.status == VPMM_SUCCESS && a.pointer != q, "stopped at its point %llu: %s", (unsigned long long)point,
                vpmm_status_name(a.status));
        fill(&w, a.pointer, 2, 4, own);
        expect_later(&w, a.pointer, 2, 4, own);
        vpmm_sim_step(w.sim, own, SIZE_MAX);
        world_step(&w);
        audit_cached(&w, point);
        if (q)
            give(&w, q, other);
        give(&w, a.pointer, own);
        if (!is_stopped)
            break;
    }
    end_actor(stopped);
    world_close(&w);
}

Test(stopped_thread, while_its_hit_goes_to_another_stream_s_cache, .timeout = 300)
{
    hit_changes_hands(false);
}
Test(stopped_thread, while_its_hit_goes_through_another_stream_s_cache, .timeout = 300)
{
    hit_changes_hands(true);
}

Test(stopped_thread, while_it_caches_what_another_thread_frees, .timeout = 300)
{
    struct world w;
    world_open_cached(&w, VPMM_REUSE_WAIT_DEVICE);
    CUstream s = world_stream(&w);
    struct actor a = {.w = &w, .act = only_free, .stream = s};
    pthread_t stopped = start_actor(&a);
    for (uint64_t point = 1;; point++) {
        a.pointer = take(&w, 2, s);
        if (!stop_at(point))
            break;
        vpmm_status status = vpmm_free(w.pool, a.pointer, s);
        let_go();
        require((status == VPMM_SUCCESS) != (a.status == VPMM_SUCCESS), "stopped at its point %llu: %s, and %s",
                (unsigned long long)point, vpmm_status_name(a.status), vpmm_status_name(status));
        audit_cached(&w, point);
    }
    end_actor(stopped);
    world_close(&w);
}

/*
 * While a thread empties caches, their stream is released and destroyed. What the thread had in its hands passes all
 * the same, and the record of the stream is done with.
 */
static vpmm_status empty_caches(struct actor *a)
{
    return vpmm_trim(a->w->pool, SIZE_MAX, NULL);
}

struct releaser {
    struct world *w;
    CUstream stream;
    vpmm_status status;
    sem_t done;
};

static void *release_stream(void *argument)
{
    struct releaser *r = argument;
    r->status = vpmm_stream_release(r->w->pool, r->stream);
    sem_post(&r->done);
    return NULL;
}

Test(stopped_thread, while_it_empties_the_caches_of_a_stream_that_is_released, .timeout = 300)
{
    enum { POINTS = 400, PATIENCE_MS = 10 };
    struct world w;
    struct setup setup = setup_default();
    setup.pool.cache_bytes = 64 * PAGE;
    setup.pool.initial_pages = 6; /* and no more: what is stranded is missed */
    setup.pool.reuse = VPMM_REUSE_COMPLETED;
    world_open(&w, &setup);
    CUstream other = world_stream(&w);
    struct actor a = {.w = &w, .act = empty_caches, .stream = other};
    pthread_t stopped = start_actor(&a);
    must_work(vpmm_trim(w.pool, SIZE_MAX, NULL));
    world_drain(&w);
    for (uint64_t point = 1; point <= POINTS; point++) {
        CUstream s = world_stream(&w);
        CUdeviceptr p[3];
        for (int i = 0; i < 3; i++)
            p[i] = take(&w, 2, s);
        for (int i = 0; i < 3; i++) {
            fill(&w, p[i], 2, 1, s);
            give(&w, p[i], s);
        }
        bool is_stopped = stop_at(point);
        struct releaser r = {.w = &w, .stream = s};
        sem_init(&r.done, 0, 0);
        pthread_t thread;
        pthread_create(&thread, NULL, release_stream, &r);
        bool released = is_stopped && is_posted_within(&r.done, PATIENCE_MS);
        if (released) /* it may wait for the stopped thread, which is counted in */
            world_stream_destroy(&w, s);
        if (is_stopped)
            let_go();
        pthread_join(thread, NULL);
        require(r.status == VPMM_SUCCESS, "stopped at its point %llu: %s", (unsigned long long)point,
                vpmm_status_name(r.status));
        if (!released)
            world_stream_destroy(&w, s);
        for (int i = 0; i < 3; i++) {
            vpmm_sim_step(w.sim, s, SIZE_MAX);
            must_work(vpmm_poll(w.pool));
        }
        must_work(vpmm_trim(w.pool, SIZE_MAX, NULL));
        world_drain(&w);
        uint64_t builds = stats_of(&w).builds, mapped = stats_of(&w).mapped_bytes;
        CUdeviceptr q = take_bytes(&w, mapped, other); /* all there is */
        require(stats_of(&w).builds == builds, "stopped at its point %llu it strands memory: %s",
                (unsigned long long)point, layout(&w));
        give(&w, q, other);
        world_drain(&w);
        audit_cached(&w, point);
        if (!is_stopped)
            break;
    }
    end_actor(stopped);
    world_close(&w);
}

/* --- pieces ---------------------------------------------------------------------------------------------------------
 */

enum { BIG = 64 << 10, SMALL = 256, SUBPAGES = 100 << 10, A_SLAB = 2, A_BIN = 4 };

static vpmm_status pair_of_bytes(struct actor *a, size_t bytes, CUstream stream)
{
    CUdeviceptr p = 0;
    vpmm_status status = vpmm_malloc(a->w->pool, bytes, stream, &p);
    return status == VPMM_SUCCESS ? vpmm_free(a->w->pool, p, stream) : status;
}

static vpmm_status take_big(struct actor *a, CUdeviceptr *p, int n, CUstream stream)
{
    vpmm_status status = VPMM_SUCCESS;
    for (int i = 0; i < n && status == VPMM_SUCCESS; i++)
        status = vpmm_malloc(a->w->pool, BIG, stream, &p[i]);
    return status;
}

static vpmm_status give_big(struct actor *a, const CUdeviceptr *p, int n, CUstream stream)
{
    vpmm_status status = VPMM_SUCCESS;
    for (int i = 0; i < n && status == VPMM_SUCCESS; i++)
        status = vpmm_free(a->w->pool, p[i], stream);
    return status;
}

/* Slices of two classes and subpages, on the stopped thread's stream and on another. */
static void *go_on_with_pieces(void *argument)
{
    static const size_t sizes[] = {BIG, SMALL, SUBPAGES};
    struct actor *a = argument;
    for (int i = 0; i < PAIRS && a->status == VPMM_SUCCESS; i++)
        a->status = pair_of_bytes(a, sizes[i / 2 % 3], i % 2 ? a->own : a->other);
    sem_post(&park.stopped);
    return NULL;
}

static vpmm_status pair_of_slices(struct actor *a)
{
    return pair_of_bytes(a, BIG, a->stream);
}

static vpmm_status pair_of_subpages(struct actor *a)
{
    return pair_of_bytes(a, SUBPAGES, a->stream);
}

/* A bin is filled again when it is empty, and gives half back when it is full. */
static vpmm_status empty_and_fill_the_bin(struct actor *a)
{
    CUdeviceptr p[A_BIN + 1];
    vpmm_status status = take_big(a, p, A_BIN + 1, a->stream);
    return status == VPMM_SUCCESS ? give_big(a, p, A_BIN + 1, a->stream) : status;
}

/* With a slab of its own that has a slice to spare, the last free of another one dissolves it. */
static vpmm_status free_the_last(struct actor *a)
{
    uint64_t left = unwatched();
    CUdeviceptr p[2 * A_SLAB];
    vpmm_status status = take_big(a, p, 2 * A_SLAB, a->stream);
    if (status == VPMM_SUCCESS)
        status = give_big(a, p + 1, 2 * A_SLAB - 1, a->stream);
    points_left = left;
    return status == VPMM_SUCCESS ? give_big(a, p, 1, a->stream) : status;
}

/* What the slab's own stream is not done with is deferred. */
static vpmm_status free_on_another_stream(struct actor *a)
{
    uint64_t left = unwatched();
    CUdeviceptr p[A_SLAB];
    vpmm_status status = take_big(a, p, A_SLAB, a->own);
    points_left = left;
    return status == VPMM_SUCCESS ? give_big(a, p, A_SLAB, a->other) : status;
}

static vpmm_status malloc_on_another_stream(struct actor *a)
{
    vpmm_status status = vpmm_malloc(a->w->pool, BIG, a->other, &a->pointer);
    uint64_t left = unwatched();
    status = status == VPMM_SUCCESS ? vpmm_free(a->w->pool, a->pointer, a->other) : status;
    points_left = left;
    return status;
}

/* `own` has a slab with a free slice that has passed, and `other` has none. */
static void leave_for_adoption(struct world *w, CUstream own, CUdeviceptr *held)
{
    world_drain(w);
    must_work(vpmm_trim(w->pool, SIZE_MAX, NULL));
    *held = take_bytes(w, BIG, own);
    world_drain(w);
}

static void stop_among_pieces(vpmm_status (*act)(struct actor *), size_t cache_pages, bool adopts)
{
    struct setup setup = setup_default();
    setup.pool.cache_bytes = cache_pages * PAGE;
    setup.pool.initial_pages = 16;
    struct world w;
    world_open(&w, &setup);
    CUstream own = world_stream(&w), other = world_stream(&w);
    struct actor a = {.w = &w, .own = own, .other = other, .act = act, .stream = own};
    pthread_t stopped = start_actor(&a);
    CUdeviceptr held = 0, wall = take_bytes(&w, SUBPAGES, own); /* a page that stays cut */
    for (uint64_t point = 1;; point++) {
        if (adopts)
            leave_for_adoption(&w, own, &held);
        bool is_stopped = stop_at(point);
        struct actor b = {.w = &w, .own = own, .other = other, .status = VPMM_SUCCESS};
        pthread_t free_one;
        if (is_stopped) {
            pthread_create(&free_one, NULL, go_on_with_pieces, &b);
            require(stopped_in_time(), "a thread stopped at its point %llu stops another one",
                    (unsigned long long)point);
            pthread_join(free_one, NULL);
            let_go();
        }
        require(b.status == VPMM_SUCCESS && a.status == VPMM_SUCCESS, "stopped at its point %llu: %s, and beside it %s",
                (unsigned long long)point, vpmm_status_name(a.status), vpmm_status_name(b.status));
        if (held)
            give(&w, held, own);
        held = 0;
        audit_cached(&w, point);
        if (!is_stopped)
            break;
        if (point % 8 == 0)
            world_drain(&w);
    }
    end_actor(stopped);
    give(&w, wall, own);
    world_close(&w);
}

Test(stopped_thread, while_it_hits_a_slice, .timeout = 300)
{
    stop_among_pieces(pair_of_slices, 64, false);
}
Test(stopped_thread, while_it_takes_and_gives_a_slice, .timeout = 300)
{
    stop_among_pieces(pair_of_slices, 0, false);
}
Test(stopped_thread, while_it_takes_and_gives_subpages, .timeout = 300)
{
    stop_among_pieces(pair_of_subpages, 0, false);
}
Test(stopped_thread, while_its_bin_of_slices_is_filled_and_overflows, .timeout = 300)
{
    stop_among_pieces(empty_and_fill_the_bin, 64, false);
}
Test(stopped_thread, while_it_dissolves_a_slab, .timeout = 300)
{
    stop_among_pieces(free_the_last, 0, false);
}
Test(stopped_thread, while_it_defers_a_slice, .timeout = 300)
{
    stop_among_pieces(free_on_another_stream, 0, false);
}
Test(stopped_thread, while_it_adopts_a_slab, .timeout = 300)
{
    stop_among_pieces(malloc_on_another_stream, 0, true);
}

struct last_slice {
    struct world *w;
    CUstream stream;
    vpmm_status status;
    sem_t done;
};

static void *take_last_slice(void *argument)
{
    struct last_slice *want = argument;
    struct actor a = {.w = want->w};
    want->status = pair_of_bytes(&a, BIG, want->stream);
    sem_post(&want->done);
    return NULL;
}

/*
 * Two slices are left, and two threads want one each, on their own streams: whatever the stopped thread has in its
 * hands, the other's request waits for it, or has the other slice. It does not fail.
 */
static void stop_with_the_last_slices(size_t cache_pages)
{
    struct setup setup = setup_default();
    setup.pool.cache_bytes = cache_pages * PAGE;
    setup.pool.max_mapped = PAGE;
    struct world w;
    world_open(&w, &setup);
    CUstream own = world_stream(&w), other = world_stream(&w);
    struct actor a = {.w = &w, .act = pair_of_slices, .stream = own};
    pthread_t stopped = start_actor(&a);
    CUdeviceptr wall = take_bytes(&w, PAGE - A_SLAB * BIG, own);
    for (uint64_t point = 1;; point++) {
        world_drain(&w);
        must_work(vpmm_trim(w.pool, SIZE_MAX, NULL)); /* nothing is cached: the thread makes a slab */
        bool is_stopped = stop_at(point);
        struct last_slice want = {.w = &w, .stream = other};
        pthread_t thread;
        sem_init(&want.done, 0, 0);
        atomic_store(&park.clock_slowed, vpmm_schedule_clock());
        pthread_create(&thread, NULL, take_last_slice, &want);
        if (is_stopped) {
            is_posted_within(&want.done, 10); /* else it waits for the stopped thread, and loses no patience */
            let_go();
        }
        pthread_join(thread, NULL);
        atomic_store(&park.clock_slowed, 0);
        require(want.status == VPMM_SUCCESS && a.status == VPMM_SUCCESS,
                "stopped at its point %llu: %s, and beside it %s", (unsigned long long)point,
                vpmm_status_name(a.status), vpmm_status_name(want.status));
        audit_cached(&w, point);
        if (!is_stopped)
            break;
    }
    end_actor(stopped);
    give(&w, wall, own);
    world_close(&w);
}

Test(stopped_thread, while_another_needs_the_last_slice, .timeout = 300)
{
    stop_with_the_last_slices(0);
}
Test(stopped_thread, while_another_needs_the_last_cached_slice, .timeout = 300)
{
    stop_with_the_last_slices(64);
}

/* While it frees a slice another thread frees the same: one of them has freed it, and the other is told. */
static void slice_is_freed_twice(size_t cache_pages)
{
    struct setup setup = setup_default();
    setup.pool.cache_bytes = cache_pages * PAGE;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    struct actor a = {.w = &w, .act = only_free, .stream = s};
    pthread_t stopped = start_actor(&a);
    for (uint64_t point = 1;; point++) {
        a.pointer = take_bytes(&w, BIG, s);
        if (!stop_at(point))
            break;
        vpmm_status status = vpmm_free(w.pool, a.pointer, s);
        let_go();
        require((status == VPMM_SUCCESS) != (a.status == VPMM_SUCCESS), "stopped at its point %llu: %s, and %s",
                (unsigned long long)point, vpmm_status_name(a.status), vpmm_status_name(status));
        audit_cached(&w, point);
    }
    end_actor(stopped);
    world_close(&w);
}

Test(stopped_thread, while_it_frees_a_slice_that_another_thread_frees, .timeout = 300)
{
    slice_is_freed_twice(0);
}
Test(stopped_thread, while_it_caches_a_slice_that_another_thread_frees, .timeout = 300)
{
    slice_is_freed_twice(64);
}

/* --- a build --------------------------------------------------------------------------------------------------------
 */

enum { MAPPED = 96, TIER_4_PAGES = 3, BUILT = 60 };

/* Free memory that a build does not move: no extent is wholly free. */
struct laid_out {
    CUdeviceptr region[2 * (OWN + PASSED)], wall[MAPPED], waiting;
    size_t regions, walls;
    CUstream stream[2]; /* what is in `waiting` goes from one to the other */
};

static void open_for_builds(struct world *w, struct laid_out *l)
{
    struct setup setup = setup_default();
    setup.pool.initial_pages = MAPPED;
    setup.pool.reuse = VPMM_REUSE_WAIT_DEVICE;
    world_open(w, &setup);
    *l = (struct laid_out){.stream = {world_stream(w), world_stream(w)}};
    size_t left = MAPPED;
    for (; l->regions < sizeof l->region / sizeof l->region[0]; l->regions++) {
        l->region[l->regions] = take(w, 1 + l->regions % 2, l->stream[0]);
        l->wall[l->walls++] = take(w, 1, l->stream[0]);
        left -= 2 + l->regions % 2;
    }
    l->waiting = take(w, TIER_4_PAGES, l->stream[0]);
    for (left -= TIER_4_PAGES; left > 0; left--)
        l->wall[l->walls++] = take(w, 1, l->stream[0]);
    for (size_t i = 0; i < l->regions; i++)
        give(w, l->region[i], l->stream[0]);
    world_drain(w);
}

static void close_for_builds(struct world *w, struct laid_out *l)
{
    give(w, l->waiting, l->stream[0]);
    for (size_t i = 0; i < l->walls; i++)
        give(w, l->wall[i], l->stream[0]);
    world_close(w);
}

/* Its memory has no other use: the next build finds none. */
static vpmm_status build_apart(struct actor *a)
{
    CUdeviceptr p = 0;
    vpmm_status status = vpmm_malloc(a->w->pool, BUILT * PAGE, a->stream, &p);
    uint64_t left = unwatched();
    status = status == VPMM_SUCCESS ? vpmm_free(a->w->pool, p, a->stream) : status;
    points_left = left;
    return status;
}

/* What is freed behind work that does not come to an end is taken on another stream, which waits for it. */
static vpmm_status pass_to_and_fro(struct actor *a)
{
    CUstream from = a->own, to = a->other;
    vpmm_status status = VPMM_SUCCESS;
    for (int i = 0; i < PAIRS && status == VPMM_SUCCESS; i++) {
        if (!write_later(a->w, a->pointer, 1, 1, from))
            return VPMM_ERROR_DRIVER;
        status = vpmm_free(a->w->pool, a->pointer, from);
        if (status == VPMM_SUCCESS)
            status = vpmm_malloc(a->w->pool, TIER_4_PAGES * PAGE, to, &a->pointer);
        CUstream kept = from;
        from = to;
        to = kept;
    }
    return status;
}

/* Tiers 2 and 3, frees, and tier 4. */
static void *go_on_up_to_tier_4(void *argument)
{
    struct actor *a = argument;
    a->w->driver->cuCtxSetCurrent(a->w->context);
    for (int i = 0; i < PAIRS && a->status == VPMM_SUCCESS; i++)
        a->status = pair(a, 1 + (size_t)i % 2, i % 4 < 2 ? a->own : a->other);
    if (a->status == VPMM_SUCCESS)
        a->status = pass_to_and_fro(a);
    sem_post(&park.stopped);
    return NULL;
}

/* So many others may build meanwhile. */
static void go_on_beside(struct world *w, struct laid_out *l, uint64_t point, uint64_t builders)
{
    struct actor b = {
        .w = w, .own = l->stream[0], .other = l->stream[1], .pointer = l->waiting, .status = VPMM_SUCCESS};
    vpmm_stats before = stats_of(w);
    pthread_t free_one;
    pthread_create(&free_one, NULL, go_on_up_to_tier_4, &b);
    require(stopped_in_time(), "a thread stopped at its point %llu stops another one", (unsigned long long)point);
    pthread_join(free_one, NULL);
    require(b.status == VPMM_SUCCESS, "beside a thread stopped at its point %llu: %s", (unsigned long long)point,
            vpmm_status_name(b.status));
    require(stats_of(w).hits_waited - before.hits_waited == PAIRS && stats_of(w).builds - before.builds <= builders,
            "beside point %llu %llu were waited for, and %llu built", (unsigned long long)point,
            (unsigned long long)(stats_of(w).hits_waited - before.hits_waited),
            (unsigned long long)(stats_of(w).builds - before.builds));
    l->waiting = b.pointer;
}

static void end_a_round(struct world *w, const struct actor *a, uint64_t point)
{
    require(a->status == VPMM_SUCCESS, "stopped at its point %llu, then: %s", (unsigned long long)point,
            vpmm_status_name(a->status));
    world_drain(w);
    must_work(vpmm_trim(w->pool, 0, NULL));
    audit_cached(w, point);
    require(!w->pool->arena.turn.first && !atomic_load(&w->pool->arena.space.await.waiting),
            "stopped at its point %llu: somebody is left in the queue", (unsigned long long)point);
}

/* With the turn, or after it was waited for. */
Test(stopped_thread, while_it_builds, .timeout = 600)
{
    struct world w;
    struct laid_out l;
    open_for_builds(&w, &l);
    struct actor a = {.w = &w, .act = build_apart, .stream = world_stream(&w)};
    pthread_t stopped = start_actor(&a);
    for (uint64_t point = 1; stop_at(point); point++) {
        go_on_beside(&w, &l, point, 0);
        let_go();
        end_a_round(&w, &a, point);
    }
    end_actor(stopped);
    close_for_builds(&w, &l);
}

/* The turn is this thread's meanwhile. */
Test(stopped_thread, while_it_waits_for_its_turn, .timeout = 600)
{
    enum { POINTS = 400 }; /* more than one look for memory has */
    struct world w;
    struct laid_out l;
    open_for_builds(&w, &l);
    struct actor a = {.w = &w, .act = build_apart, .stream = world_stream(&w)};
    pthread_t stopped = start_actor(&a);
    struct turn *turn = &w.pool->arena.turn;
    bool is_stopped = true;
    for (uint64_t point = 1; point <= POINTS && is_stopped; point++) {
        struct turn_place place;
        turn_take(turn, &place);
        is_stopped = stop_at(point);
        if (is_stopped) {
            go_on_beside(&w, &l, point, 0);
            sem_post(&park.go); /* before the turn is given up, whose lock it may have */
        }
        turn_leave(turn, &place);
        require(!is_stopped || stopped_in_time(), "the thread does not go on from its point %llu",
                (unsigned long long)point);
        end_a_round(&w, &a, point);
    }
    cr_expect(is_stopped, "it did not wait");
    end_actor(stopped);
    close_for_builds(&w, &l);
}

static void *act_once(void *argument)
{
    struct actor *a = argument;
    a->w->driver->cuCtxSetCurrent(a->w->context);
    a->status = a->act(a);
    return NULL;
}

static void wait_for_queue(struct turn *turn, uint32_t length)
{
    while (atomic_load(&turn->length) < length)
        sched_yield();
}

/*
 * The turn is this thread's until both are in the queue: then the first of them builds for the other, and for itself.
 */
Test(stopped_thread, while_it_builds_for_another, .timeout = 600)
{
    struct world w;
    struct laid_out l;
    open_for_builds(&w, &l);
    struct actor a = {.w = &w, .act = build_apart, .stream = world_stream(&w)};
    struct actor c = {.w = &w, .act = build_apart, .stream = world_stream(&w)};
    pthread_t stopped = start_actor(&a), other;
    struct turn *turn = &w.pool->arena.turn;
    bool is_stopped = true;
    for (uint64_t point = 1; is_stopped; point++) {
        struct turn_place place;
        turn_take(turn, &place);
        atomic_store(&park.clock_slowed, vpmm_schedule_clock()); /* however slow this machine is */
        atomic_store(&park.waits, true);
        park.at = point;
        sem_post(&park.started);
        wait_for_queue(turn, 2);
        pthread_create(&other, NULL, act_once, &c);
        wait_for_queue(turn, 3);
        atomic_store(&park.waits, false);
        turn_leave(turn, &place); /* from which their patience begins anew */
        atomic_store(&park.clock_slowed, 0);
        require(stopped_in_time(), "the thread does not reach its point %llu", (unsigned long long)point);
        is_stopped = !park.came_through;
        if (is_stopped) {
            go_on_beside(&w, &l, point, 1);
            let_go();
        }
        pthread_join(other, NULL);
        require(c.status == VPMM_SUCCESS, "beside a thread stopped at its point %llu: %s", (unsigned long long)point,
                vpmm_status_name(c.status));
        park.came_through = false;
        end_a_round(&w, &a, point);
    }
    end_actor(stopped);
    close_for_builds(&w, &l);
}

static vpmm_status empty_all_caches(struct actor *a)
{
    fronts_flush(&a->w->pool->fronts, NULL, false);
    return VPMM_SUCCESS;
}

/*
 * Wherever the thread is stopped, all that the stream has been given so far passes, and then the memory that it is
 * about to take out of the cache is used again, and freed. That work is later than anything that has passed: another
 * stream has the memory only behind it.
 */
Test(stopped_thread, while_it_empties_a_cache_that_is_in_use, .timeout = 300)
{
    struct world w;
    struct setup setup = setup_default();
    setup.pool.cache_bytes = 64 * PAGE;
    setup.pool.reuse = VPMM_REUSE_COMPLETED;
    world_open(&w, &setup);
    CUstream s = world_stream(&w), t = world_stream(&w);
    struct actor a = {.w = &w, .act = empty_all_caches, .stream = world_stream(&w)};
    pthread_t stopped = start_actor(&a);
    bool is_stopped = true;
    for (uint64_t point = 1; is_stopped; point++) {
        give(&w, take(&w, 1, s), s);
        is_stopped = stop_at(point);
        must_work(vpmm_poll(w.pool));
        world_run(&w, s, SIZE_MAX);
        must_work(vpmm_poll(w.pool));
        CUdeviceptr p = take(&w, 1, s), q;
        fill(&w, p, 1, (uint32_t)point, s);
        give(&w, p, s);
        if (is_stopped)
            let_go();
        q = take(&w, 1, t);
        fill(&w, q, 1, ~(uint32_t)point, t);
        give(&w, q, t);
        world_step(&w);
        world_audit(&w);
        must_work(vpmm_trim(w.pool, 0, NULL));
    }
    end_actor(stopped);
    world_close(&w);
}

/*
 * Beside a pass of the reaper's, which gives cut pages back: they are no longer live, nor are they cut, and who
 * destroys the pool sees both or neither.
 */
static vpmm_status destroy(struct actor *a)
{
    vpmm_status status = vpmm_pool_destroy(a->w->pool);
    if (status == VPMM_SUCCESS)
        a->w->pool = NULL;
    return status;
}

/* Free subpages of whole pages, freed on two streams, and known to have passed: a pass gives them back. */
static void leave_free_subpages(struct world *w, CUstream s, CUstream t)
{
    enum { PIECES = 40 };
    CUdeviceptr p[PIECES];
    for (int i = 0; i < PIECES; i++)
        p[i] = take_bytes(w, PAGE / 4, s);
    for (int i = 0; i < PIECES; i++)
        give(w, p[i], i % 2 ? s : t);
    world_run(w, s, SIZE_MAX);
    world_run(w, t, SIZE_MAX);
    must_work(vpmm_poll(w->pool));
}

Test(stopped_thread, while_it_destroys_the_pool, .timeout = 300)
{
    enum { POINTS = 60 }; /* more than it needs to look at what is live, and far fewer than until the reaper ends */
    uint64_t given_back = 0;
    for (uint64_t point = 1; point <= POINTS; point++) {
        struct world w;
        struct setup setup = setup_default();
        setup.pool.small = VPMM_SMALL_SLAB;
        setup.pool.cache_bytes = 0;
        world_open(&w, &setup);
        struct actor a = {.w = &w, .act = destroy, .pages = 1, .stream = world_stream(&w)};
        pthread_t stopped = start_actor(&a);
        leave_free_subpages(&w, a.stream, world_stream(&w));
        uint64_t cut = stats_of(&w).slab_bytes;
        require(stop_at(point), "only %llu points", (unsigned long long)point);
        must_work(vpmm_poll(w.pool));
        given_back += cut - stats_of(&w).slab_bytes;
        let_go();
        require(a.status == VPMM_SUCCESS, "stopped at its point %llu: %s", (unsigned long long)point,
                vpmm_status_name(a.status));
        dismiss_actor(stopped);
        world_close(&w);
    }
    cr_expect_gt(given_back, 0);
}

/*
 * At its turn the thread finds one region, which is all that the pool may map and longer than it asks for. Once the
 * turn is the next one's, so is what the thread does not need.
 */
static bool turn_is_free(struct turn *turn)
{
    if (pthread_mutex_trylock(&turn->lock))
        return false;
    bool is_free = !turn->first;
    pthread_mutex_unlock(&turn->lock);
    return is_free;
}

Test(stopped_thread, after_its_turn_it_holds_no_more_than_it_asked_for, .timeout = 300)
{
    enum { ALL = 16, MUCH = 8 };
    struct world w;
    struct setup setup = setup_default();
    setup.pool.max_mapped = ALL * PAGE;
    setup.pool.reuse = VPMM_REUSE_COMPLETED;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    struct actor a = {.w = &w, .act = only_malloc, .pages = 2, .stream = world_stream(&w)};
    pthread_t stopped = start_actor(&a);
    bool is_stopped = true;
    for (uint64_t point = 1; is_stopped; point++) {
        world_drain(&w);
        CUdeviceptr p = take(&w, ALL, s), q = 0;
        fill(&w, p, 1, 1, s);
        give(&w, p, s);
        world_step(&w); /* it has passed, and nobody knows it yet */
        is_stopped = stop_at(point);
        vpmm_status status = VPMM_SUCCESS;
        if (is_stopped && turn_is_free(&w.pool->arena.turn))
            status = vpmm_malloc(w.pool, MUCH * PAGE, s, &q);
        if (is_stopped)
            let_go();
        require(status == VPMM_SUCCESS, "stopped at its point %llu it has all memory, and not the turn",
                (unsigned long long)point);
        require(a.status == VPMM_SUCCESS, "stopped at its point %llu, then: %s", (unsigned long long)point,
                vpmm_status_name(a.status));
        give(&w, a.pointer, a.stream);
        if (q)
            give(&w, q, s);
        world_audit(&w);
    }
    end_actor(stopped);
    world_close(&w);
}
