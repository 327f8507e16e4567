/*
 * A thread that is stopped anywhere in tiers 2 and 3 stops no other thread's malloc or free there, and what others do
 * meanwhile is not undone when it goes on.
 *
 * The library under this test calls vpmm_schedule_point before each of its atomic operations. One thread does one
 * malloc and one free, or one free, and is parked at its k-th such point, for each k in turn until it comes through;
 * while it is parked other threads pass both tiers many times, before a deadline, or free the same memory, or the
 * memory beside it.
 */
#include "support.h"

#include <pthread.h>
#include <semaphore.h>
#include <time.h>

enum { OWN = 8, PASSED = 8, PAIRS = 24, DEADLINE_SECONDS = 20 };

void vpmm_schedule_point(void);

static struct {
    sem_t started, stopped, go;
    uint64_t at; /* the point to park at */
    bool came_through, over;
} park;

static _Thread_local uint64_t points_left; /* 0: this thread is not watched */

void vpmm_schedule_point(void)
{
    if (points_left == 0 || --points_left > 0)
        return;
    sem_post(&park.stopped);
    sem_wait(&park.go);
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

static bool stopped_in_time(void)
{
    struct timespec deadline;
    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_sec += DEADLINE_SECONDS;
    return sem_timedwait(&park.stopped, &deadline) == 0;
}

static pthread_t start_actor(struct actor *a)
{
    pthread_t thread;
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

static void end_actor(pthread_t thread)
{
    cr_expect_gt(park.at, 20, "only %llu points: the library is not built for this test",
                 (unsigned long long)park.at - 1);
    park.over = true;
    sem_post(&park.started);
    pthread_join(thread, NULL);
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
