/*
 * Builders that take turns, and what serves those who wait, in orders with at most two preemptions, and in
 * random ones. Who sleeps in such a schedule looks again as soon as another actor goes on: that nobody sleeps too long
 * is shown by the models in relacy/ and by unit/test_turn.c.
 */
#include "play.h"

#include "base/clock.h"

static struct turn *turn(void)
{
    return &inside()->arena.turn;
}

static uint64_t pages_mapped(void)
{
    return stats_of(&play.w).mapped_bytes / PAGE;
}

PLAY(close_with_nobody_waiting)
{
    explore_check(!turn()->first && !turn()->last && !atomic_load(&turn()->length), "the turn was not given back");
    explore_check(!atomic_load(&inside()->arena.space.await.waiting), "a place was not left");
    close_world();
}

PLAY(get_two)
{
    get(2, play.s);
}
PLAY(get_two_on_t)
{
    get(2, play.t);
}
PLAY(get_three)
{
    get(3, play.s);
}
PLAY(meet_both)
{
    meet(play.s);
    meet(play.t);
}

/* ---- builders alone ---- */

/* Each takes or makes what it needs, and no more. */
PLAY(close_with_no_more_than_was_needed)
{
    explore_check(pages_mapped() <= 7, "%llu pages are mapped for 7", (unsigned long long)pages_mapped());
    close_with_nobody_waiting_now();
}
SCHEDULES(three_builders)
{
    explore_play("three builders", 0,
                 (struct exploration){.open = open_plain,
                                      .close = close_with_no_more_than_was_needed,
                                      .prepare = {meet_both},
                                      .act = {get_two, get_two_on_t, get_three}});
}

/* The last one finds no memory, or the one before it: who fails leaves the queue, each time. */
PLAY(try_get_two)
{
    play.p[explore_actor()] = try_get(2, play.s, &play.status[explore_actor()]);
}
PLAY(close_with_one_that_failed)
{
    unsigned failed = 0;
    for (int i = 0; i < 3; i++)
        failed += play.status[i] == VPMM_ERROR_OUT_OF_MEMORY;
    explore_check(failed == 1, "%u of three fail where there is room for two", failed);
    close_with_nobody_waiting_now();
}
SCHEDULES(three_builders_and_room_for_two)
{
    play.cap = 4;
    explore_play("room for two", 0,
                 (struct exploration){.open = open_plain,
                                      .close = close_with_one_that_failed,
                                      .act = {try_get_two, try_get_two, try_get_two}});
    play.cap = 0;
}

/* ---- a builder, and what serves it ---- */

PLAY(open_with_three)
{
    open_world();
    play.p[0] = get(3, play.s);
    get(1, play.s);
    play.builds = builds_now();
}
PLAY(put_three)
{
    put(play.p[0], play.s);
}
SCHEDULES(build_against_a_free_that_serves_it)
{
    explore_play("build, free, build", 0,
                 (struct exploration){.open = open_with_three,
                                      .close = close_with_nobody_waiting,
                                      .act = {get_three, put_three, get_two_on_t}});
}

/* The turn is an actor's that does not give it up before the waiter is served: by what another one frees. */
static struct turn_place held;
static bool is_served;

PLAY(take_the_turn)
{
    is_served = false;
    turn_take(turn(), &held);
}
PLAY(leave_when_it_is_served)
{
    while (!is_served)
        clock_yield();
    turn_leave(turn(), &held);
}
PLAY(get_three_and_say_so)
{
    get(3, play.s);
    is_served = true;
}
PLAY(close_without_a_build)
{
    explore_check(builds_now() == play.builds, "memory was created beside a turn that was not given up");
    close_with_nobody_waiting_now();
}
SCHEDULES(who_waits_is_served_by_a_free)
{
    explore_play("waits, free", 0,
                 (struct exploration){.open = open_with_three,
                                      .close = close_without_a_build,
                                      .prepare = {take_the_turn},
                                      .act = {leave_when_it_is_served, get_three_and_say_so, put_three}});
}

/* The same memory becomes free while the turn is given up: whatever comes first, if it was free before the turn had
 * changed hands, nothing is built. */
static uint64_t left_at, freed_at;

PLAY(leave_at_once)
{
    left_at = explore_step();
    turn_leave(turn(), &held);
}
PLAY(put_three_and_say_when)
{
    put(play.p[0], play.s);
    freed_at = explore_step();
}
PLAY(close_without_a_needless_build)
{
    explore_check(builds_now() == play.builds || freed_at > left_at, "what was free by then was built once more");
    close_with_nobody_waiting_now();
}
SCHEDULES(who_waits_is_served_while_the_turn_is_given_up)
{
    explore_play("waits, leave, free", 0,
                 (struct exploration){.open = open_with_three,
                                      .close = close_without_a_needless_build,
                                      .prepare = {take_the_turn},
                                      .act = {leave_at_once, get_three, put_three_and_say_when}});
}

/* Two wait, and there is memory for one. */
SCHEDULES(two_wait_and_one_is_served)
{
    explore_play("two wait, leave, free", 0,
                 (struct exploration){.open = open_with_three,
                                      .close = close_with_nobody_waiting,
                                      .prepare = {take_the_turn},
                                      .act = {leave_at_once, get_three, put_three, get_three}});
}

/* ---- who has the turn builds for who waits ---- */

/* Two wait for a turn that is given up: the first of them builds for the other, which may find memory itself, or be
 * done with its stream as soon as it has its answer. */
SCHEDULES(one_of_two_that_wait_is_served)
{
    explore_play("leave, build, build", 0,
                 (struct exploration){.open = open_with_three,
                                      .close = close_with_nobody_waiting,
                                      .prepare = {take_the_turn},
                                      .act = {leave_at_once, get_two_on_t, get_three}});
}
PLAY(get_two_on_t_and_release_it)
{
    CUdeviceptr p = get(2, play.t);
    put(p, play.t);
    release(play.t);
}
SCHEDULES(who_is_served_releases_its_stream)
{
    explore_play("leave, build, build and release", 0,
                 (struct exploration){.open = open_with_three,
                                      .close = close_with_nobody_waiting,
                                      .prepare = {take_the_turn},
                                      .act = {leave_at_once, get_three, get_two_on_t_and_release_it}});
}

/* ---- a builder, and those who give back or make a pass ---- */

PLAY(open_with_three_free)
{
    open_world();
    CUdeviceptr p = get(3, play.s);
    get(1, play.s);
    put(p, play.s);
    world_drain(&play.w);
}
PLAY(trim_all)
{
    vpmm_status status = vpmm_trim(play.w.pool, 0, NULL);
    explore_check(status == VPMM_SUCCESS, "trim: %s: %s", vpmm_status_name(status), vpmm_last_error());
}
SCHEDULES(builds_against_trim)
{
    explore_play("build, trim, build", 0,
                 (struct exploration){.open = open_with_three_free,
                                      .close = close_with_nobody_waiting,
                                      .act = {get_three, trim_all, get_two_on_t}});
}

PLAY(make_a_pass)
{
    vpmm_status status = vpmm_poll(play.w.pool);
    explore_check(status == VPMM_SUCCESS, "poll: %s: %s", vpmm_status_name(status), vpmm_last_error());
}
/* What was freed in between is not yet known to have passed. */
PLAY(open_with_gaps)
{
    open_world();
    for (int i = 0; i < 4; i++) {
        play.p[i] = get(1 + (size_t)i % 2, play.s);
        get(1, play.s);
    }
    put(play.p[1], play.s);
    put(play.p[3], play.s);
    world_drain(&play.w);
}
SCHEDULES(builds_against_a_pass)
{
    explore_play("build, pass, build", 0,
                 (struct exploration){.open = open_with_gaps,
                                      .close = close_with_nobody_waiting,
                                      .act = {get_three, make_a_pass, get_two_on_t}});
}

/* ---- a build in two parts ---- */

/*
 * Three handles that are free and can move, and three pages between them that are not. A handle is so long, by the cost
 * model, that to move one takes long enough for growth to be put off, as where several build.
 */
PLAY(open_with_scattered_pages)
{
    open_world();
    for (int i = 0; i < 3; i++) {
        play.p[i] = get(1, play.s);
        play.p[3 + i] = get(1, play.s);
    }
    for (int i = 0; i < 3; i++)
        put(play.p[i], play.s);
    world_drain(&play.w);
    inside()->arena.policy.page_mib = 1e5;
    atomic_store(&inside()->arena.several_builders, 1);
}
PLAY(get_five)
{
    get(5, play.s);
}
PLAY(put_two_that_were_held)
{
    put(play.p[3], play.s);
    put(play.p[4], play.s);
}
static void explore_parts(const char *name, void (*third)(void *))
{
    play.extent_pages = 2; /* else it is the specification's mode */
    explore_play(name, 0,
                 (struct exploration){.open = open_with_scattered_pages,
                                      .close = close_with_nobody_waiting,
                                      .act = {get_five, put_two_that_were_held, third}});
    play.extent_pages = 0;
}
SCHEDULES(a_build_in_parts_against_frees)
{
    explore_parts("in parts, free, build", get_two_on_t);
}
SCHEDULES(a_build_in_parts_against_trim)
{
    explore_parts("in parts, free, trim", trim_all);
}
