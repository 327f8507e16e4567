/*
 * vpmm_use: what threads do at the same time with memory that several streams use, in orders with at most two
 * preemptions, and in random ones (explore.h says how, and how to have more of them or one of them again). play.h
 * says what is looked at after each: memory that is handed out too early makes a race that the simulator finds.
 *
 * Each is played with a page, with subpages and with a slice.
 */
#include "play.h"

#include "space/use.h"

static size_t bytes;

/* Allocated on s, and written to by t, which has not done it yet. */
static CUdeviceptr hold_written_by_t(void)
{
    CUdeviceptr p = get_bytes(bytes, play.s);
    order_after(&play.w, play.t, play.s);
    explore_check(write_later(&play.w, p, 1, ++play.stamp, play.t), "the write fails");
    return p;
}

static void use(CUdeviceptr p, CUstream stream)
{
    vpmm_status status = vpmm_use(play.w.pool, p, stream);
    explore_check(status == VPMM_SUCCESS, "use: %s: %s", vpmm_status_name(status), vpmm_last_error());
}

/* Everybody would be glad of the memory. */
static void get_some_on(CUstream stream)
{
    vpmm_status status;
    play.p[2 + explore_actor()] = try_get_bytes(bytes, stream, &status);
}

PLAY(open_held)
{
    open_world();
    play.p[0] = hold_written_by_t();
}
PLAY(open_used)
{
    open_held_now();
    use(play.p[0], play.t);
}
PLAY(use_by_t)
{
    use(play.p[0], play.t);
}
PLAY(use_by_t_and_put)
{
    use(play.p[0], play.t);
    put(play.p[0], play.s);
}
PLAY(use_by_a_third)
{
    use(play.p[0], play.w.stream[2]);
}
PLAY(put_used)
{
    put(play.p[0], play.s);
}
PLAY(put_used_and_get)
{
    put(play.p[0], play.s);
    get_some_on(play.s);
}
PLAY(poll_and_get)
{
    poll_pool();
    get_some_on(play.s);
}
PLAY(step_and_poll)
{
    for (int i = 0; i < 2; i++) {
        run_stream(play.s);
        poll_pool();
        run_stream(play.t);
        poll_pool();
    }
}
PLAY(release_t)
{
    release(play.t);
}
PLAY(release_s)
{
    release(play.s);
}
PLAY(destroy_t)
{
    release_t_now();
    world_stream_destroy(&play.w, play.t);
}
PLAY(close_with_nothing_ending)
{
    vpmm_stats stats;
    world_drain(&play.w);
    world_drain(&play.w);
    must_work(vpmm_stats_get(play.w.pool, &stats));
    explore_check(stats.ending_bytes == 0, "%llu bytes never end", (unsigned long long)stats.ending_bytes);
    for (uint32_t slot = 1; slot < load_acquire_u32(&inside()->arena.streams.slots); slot++)
        explore_check(load_sc_u32(&stream_at(&inside()->arena.streams, slot)->uses) < 2,
                      "a record is kept for uses that are over");
    close_world();
}
/* Who had not been freed by an actor is freed here, and is nobody's before each of its streams has passed. */
PLAY(close_after_the_free)
{
    put(play.p[0], play.s);
    get_some_on(play.s);
    close_with_nothing_ending_now();
}

/* With a page, with subpages, with a slice. */
#define SCHEDULES_OF_EACH(name, words, caches, ...)                                                                    \
    SCHEDULES(name##_of_a_page)                                                                                        \
    {                                                                                                                  \
        bytes = PAGE;                                                                                                  \
        explore_play(words ", a page", caches, (struct exploration){__VA_ARGS__});                                     \
    }                                                                                                                  \
    SCHEDULES(name##_of_subpages)                                                                                      \
    {                                                                                                                  \
        bytes = 100 << 10;                                                                                             \
        explore_play(words ", subpages", caches, (struct exploration){__VA_ARGS__});                                   \
    }                                                                                                                  \
    SCHEDULES(name##_of_a_slice)                                                                                       \
    {                                                                                                                  \
        bytes = 256;                                                                                                   \
        explore_play(words ", a slice", caches, (struct exploration){__VA_ARGS__});                                    \
    }

/* ---- vpmm_use ---- */

PLAY(open_held_with_a_third)
{
    open_held_now();
    CUstream third = world_stream(&play.w);
    order_after(&play.w, third, play.t);
    explore_check(write_later(&play.w, play.p[0], 1, ++play.stamp, third), "the write fails");
}
SCHEDULES_OF_EACH(two_uses_of_one_allocation, "use, use", 0, .open = open_held_with_a_third,
                  .close = close_after_the_free, .act = {use_by_t, use_by_a_third})
SCHEDULES_OF_EACH(a_use_against_a_release_of_its_stream, "use and free, release", 0, .open = open_held,
                  .close = close_with_nothing_ending, .act = {use_by_t_and_put, release_t, poll_and_get})

/* What is said once more is said of what the stream has been given since: a write, whose mark may be its last work. */
PLAY(open_used_before)
{
    open_world();
    play.p[0] = get_bytes(bytes, play.s);
    order_after(&play.w, play.t, play.s);
    play.p[1] = get_bytes(bytes, play.t);
    use(play.p[0], play.t);
    world_stream(&play.w);
}
PLAY(write_and_use_once_more)
{
    put(play.p[1], play.t); /* which marks what t was given so far */
    explore_check(write_later(&play.w, play.p[0], 1, ++play.stamp, play.t), "the write fails");
    use(play.p[0], play.t);
}
PLAY(close_before_the_last_work_of_t)
{
    CUstream third = play.w.stream[2];
    vpmm_status status;
    size_t pending = vpmm_sim_pending(play.w.sim, play.t);
    put(play.p[0], play.s);
    run_stream(play.s);
    if (pending)
        vpmm_sim_step(play.w.sim, play.t, pending - 1);
    poll_pool();
    poll_pool();
    play.p[2] = try_get_bytes(bytes, third, &status);
    run_stream(third);
    close_with_nothing_ending_now();
}
SCHEDULES_OF_EACH(a_second_use_against_a_release_of_its_stream, "free, write, use again; release", 0,
                  .open = open_used_before, .close = close_before_the_last_work_of_t,
                  .act = {write_and_use_once_more, release_t})

/* The caller's mistake, which one of the two is told of, or neither; the pool is as it was. */
PLAY(use_too_late)
{
    play.status[0] = vpmm_use(play.w.pool, play.p[0], play.t);
}
PLAY(put_too_soon)
{
    play.status[1] = vpmm_free(play.w.pool, play.p[0], play.s);
}
PLAY(open_for_a_mistake)
{
    open_world();
    play.p[0] = get_bytes(bytes, play.s);
    meet(play.t);
}
PLAY(close_the_mistake)
{
    if (play.status[1] != VPMM_SUCCESS)
        put(play.p[0], play.s);
    disown(play.p[0]);
    close_with_nothing_ending_now();
}
SCHEDULES_OF_EACH(a_use_against_the_free_of_its_allocation, "use, free", CACHE_PAGES, .open = open_for_a_mistake,
                  .close = close_the_mistake, .prepare = {fail_once, fail_once}, .act = {use_too_late, put_too_soon})

/* An error changes nothing, for the owner of the allocation that the wrong address lies in either. */
PLAY(use_of_an_inner_address)
{
    play.status[0] = vpmm_use(play.w.pool, play.p[0] + 128, play.t);
    explore_check(play.status[0] == VPMM_ERROR_INVALID_POINTER, "use of an inner address: %s",
                  vpmm_status_name(play.status[0]));
}
SCHEDULES_OF_EACH(a_use_of_an_inner_address_against_the_free, "wrong use, free", CACHE_PAGES,
                  .open = open_for_a_mistake, .close = close_with_nothing_ending, .prepare = {fail_once, fail_once},
                  .act = {use_of_an_inner_address, put_used})

/* ---- the free ---- */

SCHEDULES_OF_EACH(the_end_of_a_use_against_passes, "free, pass, malloc", 0, .open = open_used,
                  .close = close_with_nothing_ending, .act = {put_used_and_get, step_and_poll, poll_and_get})

/* A malloc finds what has ended, also where the pass that saw both streams pass came before the memory was there. */
PLAY(run_both_and_poll)
{
    poll_pool(); /* records what the free has not recorded yet */
    run_stream(play.s);
    run_stream(play.t);
    poll_pool();
}
PLAY(close_without_a_build)
{
    run_stream(play.s);
    run_stream(play.t);
    play.builds = builds_now();
    get_bytes(bytes, play.s);
    explore_check(builds_now() == play.builds, "memory is built where some has ended");
    close_with_nothing_ending_now();
}
SCHEDULES_OF_EACH(the_end_of_a_use_against_the_pass_that_sees_it, "free, pass", 0, .open = open_used,
                  .close = close_without_a_build, .act = {put_used, run_both_and_poll})

SCHEDULES_OF_EACH(the_end_of_a_use_against_the_end_of_its_stream, "free, release, malloc", 0, .open = open_used,
                  .close = close_with_nothing_ending, .act = {put_used, destroy_t, poll_and_get})

/* A stream that is destroyed without a word, and whose handle comes back: its use has ended with the word about it. */
PLAY(open_eager_used)
{
    play.streams = VPMM_STREAMS_EAGER;
    open_used_now();
}
PLAY(destroy_t_and_go_on_with_its_handle)
{
    world_stream_destroy(&play.w, play.t);
    play.t = world_stream(&play.w);
    put(get(1, play.t), play.t);
}
PLAY(close_eager)
{
    play.streams = VPMM_STREAMS_CHECKED;
    close_with_nothing_ending_now();
}
SCHEDULES_OF_EACH(the_end_of_a_use_against_a_handle_that_comes_back, "eager: free, destroy, pass", 0,
                  .open = open_eager_used, .close = close_eager,
                  .act = {put_used, destroy_t_and_go_on_with_its_handle, poll_and_get})

/* Each call has recorded its fence before it returns, or another has that covers it: nobody else may do it later. */
PLAY(open_eager_of_three)
{
    play.streams = VPMM_STREAMS_EAGER;
    open_world();
    for (int i = 0; i < 3; i++)
        play.p[i] = get_bytes(bytes, play.s);
    meet(play.t); /* its record is made before the race, which is about its marks */
}
PLAY(use_the_first)
{
    use(play.p[0], play.t);
}
PLAY(use_the_second)
{
    use(play.p[1], play.t);
}
PLAY(use_the_last)
{
    use(play.p[2], play.t);
}
PLAY(close_eager_of_three)
{
    for (int i = 0; i < 3; i++)
        put(play.p[i], play.s);
    close_eager_now();
}
SCHEDULES_OF_EACH(eager_uses_by_three_threads, "eager: use, use, use", 0, .open = open_eager_of_three,
                  .close = close_eager_of_three, .act = {use_the_first, use_the_second, use_the_last})

/* Each free is of memory that the other's stream uses, and both streams are released: nobody waits in a circle. */
PLAY(open_crossed)
{
    open_used_now();
    play.p[1] = get_bytes(bytes, play.t);
    use(play.p[1], play.s);
}
PLAY(put_the_other_on_t)
{
    put(play.p[1], play.t);
}
SCHEDULES_OF_EACH(two_ends_against_two_releases, "free, free, release, release", 0, .open = open_crossed,
                  .close = close_with_nothing_ending, .act = {put_used, put_the_other_on_t, release_s, release_t})
