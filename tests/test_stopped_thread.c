/*
 * A thread that is stopped anywhere in tiers 2 and 3 stops no other thread's malloc or free there.
 *
 * The library under this test calls vpmm_schedule_point before each of its atomic operations. One thread does one
 * malloc and one free, and is parked at its k-th such point, for each k in turn until it comes through; while it is
 * parked another thread, new each time, passes both tiers many times, and has to be done before a deadline.
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
    size_t pages; /* of the stopped thread's request */
    CUstream stream;
    vpmm_status status;
};

static vpmm_status pair(struct actor *a, size_t pages, CUstream stream)
{
    CUdeviceptr p = 0;
    vpmm_status status = vpmm_malloc(a->w->pool, pages * PAGE, stream, &p);
    return status == VPMM_SUCCESS ? vpmm_free(a->w->pool, p, stream) : status;
}

/* One malloc and free each time that it is told to start. */
static void *be_stopped(void *argument)
{
    struct actor *a = argument;
    a->status = pair(a, a->pages, a->stream); /* what is done once a thread is done now */
    sem_post(&park.stopped);
    for (;;) {
        sem_wait(&park.started);
        if (park.over)
            return NULL;
        points_left = park.at;
        vpmm_status status = pair(a, a->pages, a->stream);
        park.came_through = points_left > 0;
        points_left = 0;
        if (status != VPMM_SUCCESS)
            a->status = status;
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

    sem_init(&park.started, 0, 0);
    sem_init(&park.stopped, 0, 0);
    sem_init(&park.go, 0, 0);
    struct actor a = {.w = &w, .own = own, .other = other, .pages = pages, .stream = on_other ? other : own};
    pthread_t stopped;
    pthread_create(&stopped, NULL, be_stopped, &a);
    cr_assert(stopped_in_time());
    uint64_t builds = stats_of(&w).builds;

    for (park.at = 1;; park.at++) {
        lay_out(&w, own);
        sem_post(&park.started);
        cr_assert(stopped_in_time());
        if (park.came_through)
            break;
        struct actor b = {.w = &w, .own = own, .other = other, .status = VPMM_SUCCESS};
        pthread_t free_one;
        pthread_create(&free_one, NULL, go_on, &b);
        bool in_time = stopped_in_time();
        cr_assert(in_time, "a thread stopped at its point %llu stops another one", (unsigned long long)park.at);
        pthread_join(free_one, NULL);
        cr_assert_eq(b.status, VPMM_SUCCESS, "beside a thread stopped at its point %llu: %s",
                     (unsigned long long)park.at, vpmm_status_name(b.status));
        park.came_through = false;
        sem_post(&park.go);
        cr_assert(stopped_in_time());
        cr_assert_eq(a.status, VPMM_SUCCESS, "stopped at its point %llu, then: %s", (unsigned long long)park.at,
                     vpmm_status_name(a.status));
        world_audit(&w);
    }
    cr_expect_gt(park.at, 20, "only %llu points: the library is not built for this test",
                 (unsigned long long)park.at - 1);
    cr_expect_eq(stats_of(&w).builds, builds, "more than tiers 2 and 3 was passed");
    park.over = true;
    sem_post(&park.started);
    pthread_join(stopped, NULL);
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
