/*
 * vpmm_park and vpmm_wake beside mallocs, frees and passes, in orders with at most two preemptions, and in
 * random ones (explore.h says how, and how to have more of them or one of them again).
 *
 * After each: the audit while the pool is parked, if it is; then everything that was handed out is written to and read,
 * which the simulator calls a misuse where nothing is mapped. Actors do not write: between a park and a wake it would
 * be the program's mistake.
 */
#include "play.h"

static size_t bytes;

/* Into p[actor]; a parked pool refuses. */
static void malloc_some(size_t size)
{
    int actor = explore_actor();
    vpmm_status *status = &play.status[actor];
    *status = vpmm_malloc(play.w.pool, size, play.s, &play.p[actor]);
    explore_check(*status == VPMM_SUCCESS || *status == VPMM_ERROR_NOT_SUPPORTED, "malloc: %s: %s",
                  vpmm_status_name(*status), vpmm_last_error());
}

static void free_block(CUdeviceptr *at)
{
    vpmm_status status = vpmm_free(play.w.pool, *at, play.s);
    explore_check(status == VPMM_SUCCESS, "free: %s: %s", vpmm_status_name(status), vpmm_last_error());
    *at = 0;
}

static void park_pool(void)
{
    vpmm_status status = vpmm_park(play.w.pool);
    explore_check(status == VPMM_SUCCESS, "park: %s: %s", vpmm_status_name(status), vpmm_last_error());
}

static void wake_pool(void)
{
    vpmm_status status = vpmm_wake(play.w.pool);
    explore_check(status == VPMM_SUCCESS, "wake: %s: %s", vpmm_status_name(status), vpmm_last_error());
}

/* A page that is live, and what one malloc of so many bytes finds. */
PLAY(open_with_free_memory)
{
    play.graph = true;
    open_world();
    play.p[HELD - 1] = take(&play.w, 1, play.s);
    give(&play.w, take_bytes(&play.w, bytes, play.s), play.s);
}
PLAY(malloc_what_is_free)
{
    malloc_some(bytes);
}
PLAY(malloc_and_free)
{
    malloc_some(bytes);
    if (play.p[explore_actor()])
        free_block(&play.p[explore_actor()]);
}
PLAY(malloc_what_is_new)
{
    malloc_some(4 * PAGE);
}
PLAY(free_held)
{
    free_block(&play.p[HELD - 1]);
}
PLAY(poll_twice)
{
    poll_pool();
    poll_pool();
}
PLAY(park_once)
{
    park_pool();
}
PLAY(wake_once)
{
    wake_pool();
}
PLAY(park_and_wake)
{
    park_pool();
    wake_pool();
}
PLAY(close_parked_or_awake)
{
    vpmm_stats stats;
    look();
    must_work(vpmm_stats_get(play.w.pool, &stats));
    explore_check(!stats.parked_bytes || !stats.mapped_bytes, "it is parked in part");
    wake_pool();
    for (int i = 0; i < HELD; i++) {
        if (!play.p[i])
            continue;
        write_later(&play.w, play.p[i], 1, ++play.stamp, play.s);
        expect_later(&play.w, play.p[i], 1, play.stamp, play.s);
    }
    world_step(&play.w);
    for (int i = 0; i < HELD; i++)
        if (play.p[i])
            free_block(&play.p[i]);
    look();
    world_close(&play.w);
}
PLAY(open_parked)
{
    open_with_free_memory_now();
    park_pool();
}

/* With pages, with subpages. */
#define SCHEDULES_OF_BOTH(name, words, ...)                                                                            \
    SCHEDULES(name##_of_pages)                                                                                         \
    {                                                                                                                  \
        bytes = 2 * PAGE;                                                                                              \
        explore_play(words ", pages", 0, (struct exploration){__VA_ARGS__});                                           \
    }                                                                                                                  \
    SCHEDULES(name##_of_subpages)                                                                                      \
    {                                                                                                                  \
        bytes = 100 << 10;                                                                                             \
        explore_play(words ", subpages", 0, (struct exploration){__VA_ARGS__});                                        \
    }

SCHEDULES_OF_BOTH(park_against_a_hit, "park, hit", .open = open_with_free_memory, .close = close_parked_or_awake,
                  .act = {malloc_what_is_free, park_once})
SCHEDULES_OF_BOTH(park_and_wake_against_pairs, "park and wake, malloc and free", .open = open_with_free_memory,
                  .close = close_parked_or_awake, .act = {malloc_and_free, park_and_wake, malloc_and_free})
SCHEDULES_OF_BOTH(wake_against_a_malloc, "wake, malloc", .open = open_parked, .close = close_parked_or_awake,
                  .act = {malloc_what_is_free, wake_once})
SCHEDULES_OF_BOTH(park_against_a_free, "park, free", .open = open_with_free_memory, .close = close_parked_or_awake,
                  .act = {free_held, park_and_wake})

SCHEDULES(park_against_a_build)
{
    bytes = PAGE;
    explore_play("park, build", 0,
                 (struct exploration){.open = open_with_free_memory,
                                      .close = close_parked_or_awake,
                                      .act = {malloc_what_is_new, park_once}});
}
SCHEDULES(park_and_wake_against_a_build)
{
    bytes = PAGE;
    explore_play("park and wake, build", 0,
                 (struct exploration){.open = open_with_free_memory,
                                      .close = close_parked_or_awake,
                                      .act = {malloc_what_is_new, park_and_wake}});
}
SCHEDULES(parks_against_wakes)
{
    bytes = 2 * PAGE;
    explore_play("park, wake, park", 0,
                 (struct exploration){.open = open_with_free_memory,
                                      .close = close_parked_or_awake,
                                      .act = {park_once, wake_once, park_and_wake}});
}
SCHEDULES(park_against_passes)
{
    bytes = 2 * PAGE;
    explore_play("park and wake, passes", 0,
                 (struct exploration){.open = open_with_free_memory,
                                      .close = close_parked_or_awake,
                                      .act = {poll_twice, park_and_wake}});
}
