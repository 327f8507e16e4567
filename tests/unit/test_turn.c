/*
 * The queue of builders, and the places of threads that wait for memory, by themselves.
 *
 * A thread of these tests that has lost its patience (the machine may be slow) waits on, so that an order does not
 * depend on time; what the patience does has tests of its own, in which time is written into the place.
 */
#include <criterion/criterion.h>
#include <pthread.h>
#include <stdatomic.h>

#include "base/clock.h"
#include "remap/turn.h"

enum { MANY = AWAIT_PLACES + 6, SLOT = 7, PAGES = 4 };

static struct builders {
    struct await await;
    struct turn turn;
    struct stream stream; /* of all that wait for memory, each of which is counted in */
    atomic_uint come;     /* of those who had the turn, in this order: */
    unsigned order[MANY];
} all;

static void open_queue(void)
{
    memset(&all, 0, sizeof all);
    await_init(&all.await);
    turn_init(&all.turn, &all.await);
    all.stream.slot = SLOT;
    atomic_init(&all.stream.users, MANY);
}

/* Nobody is left in the queue or has a place. */
static void close_queue(void)
{
    cr_expect(all.turn.first == NULL && all.turn.last == NULL && atomic_load(&all.turn.length) == 0);
    cr_expect_eq(atomic_load(&all.await.waiting), 0);
    for (unsigned i = 0; i < AWAIT_PLACES; i++)
        cr_expect_eq(atomic_load(&all.await.place[i].want), 0, "place %u is taken", i);
    cr_expect_eq(atomic_load(&all.stream.users), MANY);
    turn_destroy(&all.turn);
}

static bool has_turn(const struct turn_place *place)
{
    pthread_mutex_lock(&all.turn.lock);
    bool has = all.turn.first == place;
    pthread_mutex_unlock(&all.turn.lock);
    return has;
}

static void *build(void *number)
{
    struct turn_place place;
    turn_take(&all.turn, &place);
    while (!has_turn(&place)) {
        place.since = clock_now_ns();
        turn_read(&all.turn, &place);
        if (turn_wait(&all.turn, &place) == TURN_OVERDUE)
            clock_sleep_us(50); /* nobody waits for this holder any more: without a pause seventy would only look */
    }
    all.order[atomic_fetch_add(&all.come, 1)] = (unsigned)(uintptr_t)number;
    turn_leave(&all.turn, &place);
    return NULL;
}

/* Each thread is in the queue before the next one is made. */
static void start_builders(pthread_t *thread, unsigned n)
{
    unsigned before = atomic_load(&all.turn.length);
    for (unsigned i = 0; i < n; i++) {
        cr_assert_eq(pthread_create(&thread[i], NULL, build, (void *)(uintptr_t)i), 0);
        while (atomic_load(&all.turn.length) < before + i + 1)
            clock_sleep_us(50);
    }
}

static void first_come_first_served(unsigned n)
{
    pthread_t thread[MANY];
    struct turn_place mine;
    open_queue();
    cr_assert(turn_try(&all.turn, &mine));
    start_builders(thread, n);
    cr_expect_eq(atomic_load(&all.come), 0, "one has gone before the first has left");
    turn_leave(&all.turn, &mine);
    for (unsigned i = 0; i < n; i++)
        pthread_join(thread[i], NULL);
    for (unsigned i = 0; i < n; i++)
        cr_assert_eq(all.order[i], i, "as number %u comes thread %u", i, all.order[i]);
    cr_expect_eq(atomic_load(&all.turn.ended), n + 1);
    close_queue();
}

Test(turn, first_come_first_served, .timeout = 60)
{
    first_come_first_served(5);
}
/* Those without a place are woken by nobody, and look by themselves. */
Test(turn, more_threads_than_places, .timeout = 60)
{
    first_come_first_served(MANY);
}

/* It looks for the whole time, and ends as soon as it is woken. */
Test(turn, who_spins_sees_that_it_is_woken)
{
    const uint64_t long_ns = UINT64_C(10000000000);
    open_queue();
    unsigned at = await_enter(&all.await, PAGES, SLOT);
    uint32_t seen = await_read(&all.await, at);
    uint64_t begin = clock_now_ns();
    cr_expect_not(await_spin(&all.await, at, seen, TURN_SPIN_NS));
    cr_expect_geq(clock_now_ns() - begin, TURN_SPIN_NS);
    await_wake(&all.await, at);
    begin = clock_now_ns();
    cr_expect(await_spin(&all.await, at, seen, long_ns));
    cr_expect_lt(clock_now_ns() - begin, long_ns);
    cr_expect_not(await_spin(&all.await, AWAIT_NO_PLACE, 0, long_ns));
    await_leave(&all.await, at);
    close_queue();
}

Test(turn, a_try_succeeds_where_nobody_has_it)
{
    struct turn_place mine, other;
    open_queue();
    cr_expect(turn_try(&all.turn, &mine));
    cr_expect(!turn_try(&all.turn, &other));
    turn_leave(&all.turn, &mine);
    cr_expect(turn_try(&all.turn, &other));
    turn_leave(&all.turn, &other);
    close_queue();
}

/* Places of one thread, as so many threads would have them. */
static void enter_all(struct turn_place *place, unsigned n)
{
    const struct turn_request wanted = {&all.stream, PAGES, UINT32_MAX, true};
    for (unsigned i = 0; i < n; i++)
        cr_assert_eq(turn_enter(&all.turn, &place[i], wanted), i == 0);
}

/* Who leaves without having had the turn hands none on, and the others keep their order. */
static void one_that_waits_leaves(unsigned which)
{
    enum { PLACES = 4 };
    struct turn_place place[PLACES], late;
    open_queue();
    enter_all(place, PLACES);
    turn_leave(&all.turn, &place[which]);
    cr_expect_eq(atomic_load(&all.turn.ended), 0, "a turn has ended that nobody had");
    cr_expect(has_turn(&place[0]));
    cr_expect(!turn_enter(&all.turn, &late, (struct turn_request){.pages = PAGES}));
    for (unsigned i = 0; i < PLACES; i++) {
        if (i == which)
            continue;
        cr_expect(has_turn(&place[i]), "it is not the turn of %u", i);
        turn_leave(&all.turn, &place[i]);
    }
    cr_expect(has_turn(&late));
    turn_leave(&all.turn, &late);
    close_queue();
}

Test(turn, one_in_the_middle_leaves)
{
    one_that_waits_leaves(2);
}
Test(turn, the_last_one_leaves)
{
    one_that_waits_leaves(3);
}

/* And the one after it, which is awake when its turn comes; the others would look for memory in vain. */
Test(turn, who_leaves_wakes_the_next_two)
{
    enum { HOLDER, NEXT, AFTER_NEXT, LAST, PLACES };
    struct turn_place place[PLACES];
    open_queue();
    enter_all(place, PLACES);
    for (int i = NEXT; i < PLACES; i++)
        turn_read(&all.turn, &place[i]);
    turn_leave(&all.turn, &place[HOLDER]);
    for (int i = NEXT; i < PLACES; i++)
        cr_expect_eq(await_read(&all.await, place[i].at) != place[i].seen, i != LAST, "place %d", i);
    cr_expect_eq(turn_wait(&all.turn, &place[NEXT]), TURN_COME, "it has the turn, and is to wait");
    for (int i = NEXT; i < PLACES; i++)
        turn_leave(&all.turn, &place[i]);
    close_queue();
}

/* ---- patience ---- */

static void *take_and_leave(void *had_turn)
{
    struct turn_place place;
    turn_take(&all.turn, &place);
    *(bool *)had_turn = has_turn(&place);
    turn_leave(&all.turn, &place);
    return NULL;
}

Test(turn, who_has_waited_too_long_goes_beside, .timeout = 60)
{
    struct turn_place mine;
    pthread_t thread;
    bool had_turn = true;
    open_queue();
    cr_assert(turn_try(&all.turn, &mine));
    uint64_t begin = clock_now_ns();
    pthread_create(&thread, NULL, take_and_leave, &had_turn);
    pthread_join(thread, NULL);
    cr_expect_geq(clock_now_ns() - begin, TURN_PATIENCE_NS);
    cr_expect(!had_turn && has_turn(&mine));
    turn_leave(&all.turn, &mine);
    close_queue();
}

/* The last that was seen of the driver is twice as long ago as anybody waits beside that. */
static void wait_for_the_driver(struct turn_place *place)
{
    place->moved = clock_now_ns() - 2 * TURN_PATIENCE_NS;
    turn_read(&all.turn, place);
    await_wake(&all.await, place->at); /* it need not sleep here */
}

/* Twice as long ago as anybody waits for one holder. */
static void wait_long(struct turn_place *place)
{
    place->since = clock_now_ns() - 2 * TURN_LONGEST_NS;
    wait_for_the_driver(place);
}

/* A thread that does not run for as long as the patience lasts finds it at its end: then this is tried again. */
static bool holds_undisturbed(bool (*attempt)(void))
{
    enum { TRIES = 100 };
    for (int i = 0; i < TRIES; i++) {
        uint64_t begin = clock_now_ns();
        if (attempt())
            return true;
        if (clock_now_ns() - begin < TURN_PATIENCE_NS)
            return false;
    }
    return false;
}

static bool publication_ends_the_wait(void)
{
    struct turn_place place[2];
    open_queue();
    enter_all(place, 2);
    turn_read(&all.turn, &place[1]);
    await_published(&all.await, PAGES, FENCE_PASSED);
    bool looks = turn_wait(&all.turn, &place[1]) == TURN_LOOK;
    cr_expect(!has_turn(&place[1]));
    turn_leave(&all.turn, &place[1]);
    turn_leave(&all.turn, &place[0]);
    close_queue();
    return looks;
}

/* Something is published: the wait ends, without the turn. */
Test(turn, a_publication_ends_the_wait)
{
    cr_expect(holds_undisturbed(publication_ends_the_wait), "the wait does not end before the patience does");
}

static bool waits_for_the_next_turn(void)
{
    struct turn_place place[3];
    open_queue();
    enter_all(place, 3);
    wait_long(&place[2]);
    cr_expect_eq(turn_wait(&all.turn, &place[2]), TURN_OVERDUE, "the patience does not end");
    wait_long(&place[2]);
    turn_leave(&all.turn, &place[0]);
    bool waits = turn_wait(&all.turn, &place[2]) == TURN_LOOK;
    turn_leave(&all.turn, &place[1]);
    turn_leave(&all.turn, &place[2]);
    close_queue();
    return waits;
}

Test(turn, the_patience_begins_again_with_each_turn)
{
    cr_expect(holds_undisturbed(waits_for_the_next_turn), "the patience does not begin again");
}

/* While the driver is called, and once more when a call has ended. */
static bool who_sees_calls_waits(void)
{
    struct turn_place place[2];
    open_queue();
    enter_all(place, 2);
    turn_call_begins(&all.turn);
    wait_for_the_driver(&place[1]);
    bool waits = turn_wait(&all.turn, &place[1]) == TURN_LOOK;
    turn_call_ends(&all.turn);
    wait_for_the_driver(&place[1]);
    waits &= turn_wait(&all.turn, &place[1]) == TURN_LOOK;
    wait_for_the_driver(&place[1]);
    cr_expect_eq(turn_wait(&all.turn, &place[1]), TURN_OVERDUE, "a call that has ended is waited for");
    turn_leave(&all.turn, &place[1]);
    turn_leave(&all.turn, &place[0]);
    close_queue();
    return waits;
}

Test(turn, a_holder_is_waited_for_while_the_driver_is_called)
{
    cr_expect(holds_undisturbed(who_sees_calls_waits), "a call of the driver's is not waited for");
}

Test(turn, no_call_is_waited_for_for_ever)
{
    struct turn_place place[2];
    open_queue();
    enter_all(place, 2);
    turn_call_begins(&all.turn);
    wait_long(&place[1]);
    cr_expect_eq(turn_wait(&all.turn, &place[1]), TURN_OVERDUE, "the patience does not end");
    turn_leave(&all.turn, &place[1]);
    turn_leave(&all.turn, &place[0]);
    close_queue();
}

/* What one has found out, the next one knows, until that holder has left. */
static bool who_comes_late_waits(void)
{
    struct turn_place place[3], late;
    open_queue();
    enter_all(place, 3);
    wait_long(&place[1]);
    cr_expect_eq(turn_wait(&all.turn, &place[1]), TURN_OVERDUE);
    turn_read(&all.turn, &place[2]);
    await_wake(&all.await, place[2].at); /* it need not sleep here */
    cr_expect_eq(turn_wait(&all.turn, &place[2]), TURN_OVERDUE, "it waits for the same holder");
    turn_leave(&all.turn, &place[0]);
    cr_expect(!turn_enter(&all.turn, &late, (struct turn_request){.pages = PAGES}));
    turn_read(&all.turn, &late);
    await_wake(&all.await, late.at);
    bool waits = turn_wait(&all.turn, &late) == TURN_LOOK;
    for (int i = 1; i < 3; i++)
        turn_leave(&all.turn, &place[i]);
    turn_leave(&all.turn, &late);
    close_queue();
    return waits;
}

Test(turn, nobody_waits_for_one_that_was_waited_for_too_long)
{
    cr_expect(holds_undisturbed(who_comes_late_waits), "it does not wait for the next holder");
}

/* ---- who is served ---- */

/* Who has the turn, and builds for the next one. */
static void serve_the_next(struct turn_place *place, unsigned n)
{
    struct turn_request request;
    open_queue();
    enter_all(place, n);
    cr_assert(turn_serve(&all.turn, &place[0], &request));
    cr_expect(request.stream == &all.stream && request.pages == PAGES && request.longest_handle == UINT32_MAX);
    cr_expect_eq(atomic_load(&all.stream.users), MANY + 1);
    stream_leave(&all.stream);
}

static const struct turn_answer built = {.region = {.first = 17, .units = PAGES}, .source = REGION_NONE};

Test(turn, who_is_served_is_woken_with_its_answer_and_leaves_the_queue)
{
    struct turn_place place[3];
    struct turn_request request;
    serve_the_next(place, 3);
    turn_read(&all.turn, &place[1]);
    cr_expect(turn_answer(&all.turn, &place[0], &built));
    cr_expect_neq(await_read(&all.await, place[1].at), place[1].seen, "it is not woken");
    cr_expect_eq(turn_wait(&all.turn, &place[1]), TURN_SERVED);
    cr_expect_eq(place[1].answer.region.first, 17);
    cr_expect_eq(atomic_load(&all.turn.ended), 0, "a turn has ended that nobody had");
    cr_assert(turn_serve(&all.turn, &place[0], &request), "the next one is not served");
    cr_expect(turn_answer(&all.turn, &place[0], &built));
    turn_leave(&all.turn, &place[0]);
    cr_expect_eq(turn_wait(&all.turn, &place[2]), TURN_SERVED);
    stream_leave(&all.stream);
    close_queue();
}

Test(turn, what_cannot_be_built_for_it_it_builds_itself)
{
    struct turn_place place[2];
    serve_the_next(place, 2);
    turn_read(&all.turn, &place[1]);
    cr_expect(!turn_answer(&all.turn, &place[0], NULL));
    turn_leave(&all.turn, &place[0]);
    cr_expect_eq(turn_wait(&all.turn, &place[1]), TURN_COME);
    turn_leave(&all.turn, &place[1]);
    close_queue();
}

/* It finds memory itself: before it is answered, or after. */
Test(turn, who_leaves_while_it_is_served_is_answered_no_more)
{
    struct turn_place place[2];
    serve_the_next(place, 2);
    cr_expect(!turn_withdraw(&all.turn, &place[1]));
    cr_expect(!turn_answer(&all.turn, &place[0], &built), "the answer has gone to nobody");
    turn_leave(&all.turn, &place[0]);
    close_queue();
}
Test(turn, who_was_answered_leaves_with_the_answer)
{
    struct turn_place place[2];
    serve_the_next(place, 2);
    cr_expect(turn_answer(&all.turn, &place[0], &built));
    turn_leave(&all.turn, &place[0]);
    cr_expect(turn_withdraw(&all.turn, &place[1]));
    cr_expect_eq(place[1].answer.region.first, 17);
    close_queue();
}

/* A builder that is stopped while it serves: who is served builds itself. */
static bool who_is_served_goes_beside(void)
{
    struct turn_place place[3];
    struct turn_request request;
    serve_the_next(place, 3);
    wait_long(&place[1]);
    cr_expect_eq(turn_wait(&all.turn, &place[1]), TURN_OVERDUE);
    bool answered = turn_answer(&all.turn, &place[0], &built);
    cr_expect(!turn_serve(&all.turn, &place[0], &request), "who builds itself is served");
    for (int i = 0; i < 3; i++)
        turn_leave(&all.turn, &place[i]);
    close_queue();
    return answered;
}
Test(turn, who_is_served_waits_no_longer_than_others)
{
    cr_expect(!who_is_served_goes_beside());
}

/* Neither who waits for the turn alone, nor another's next. */
Test(turn, nobody_else_is_served)
{
    struct turn_place place[3], late;
    struct turn_request request;
    open_queue();
    enter_all(place, 3);
    cr_expect(!turn_enter(&all.turn, &late, (struct turn_request){.pages = PAGES}));
    cr_expect(!turn_serve(&all.turn, &place[1], &request), "it is not its turn");
    turn_leave(&all.turn, &place[0]);
    turn_leave(&all.turn, &place[1]);
    cr_expect(!turn_serve(&all.turn, &place[2], &request), "nobody else may build for the next one");
    turn_leave(&all.turn, &place[2]);
    cr_expect(!turn_serve(&all.turn, &late, &request), "nobody is next");
    turn_leave(&all.turn, &late);
    close_queue();
}

/* ---- who is woken by what ---- */

static bool wakes(uint64_t pages, struct fence fence, unsigned place)
{
    uint32_t before = await_read(&all.await, place);
    await_published(&all.await, pages, fence);
    return await_read(&all.await, place) != before;
}

Test(await, what_may_serve_wakes)
{
    open_queue();
    unsigned place = await_enter(&all.await, PAGES, SLOT);
    cr_expect(wakes(PAGES, FENCE_PASSED, place));
    cr_expect(wakes(PAGES + 1, FENCE_PASSED, place));
    cr_expect(wakes(PAGES, (struct fence){SLOT, 3}, place));
    cr_expect(!wakes(PAGES - 1, FENCE_PASSED, place), "too short");
    cr_expect(!wakes(PAGES, (struct fence){SLOT + 1, 3}, place), "another stream's");
    await_leave(&all.await, place);
    cr_expect(!wakes(PAGES, FENCE_PASSED, place), "nobody waits there");
    close_queue();
}

/* Who waits for the turn alone has a place and wants nothing. */
Test(await, no_memory_wakes_who_waits_for_the_turn_alone, .timeout = 60)
{
    pthread_t thread;
    struct turn_place mine;
    open_queue();
    cr_assert(turn_try(&all.turn, &mine));
    start_builders(&thread, 1);
    while (!atomic_load(&all.await.waiting))
        clock_sleep_us(50);
    cr_expect(!wakes(UINT32_MAX - 1, FENCE_PASSED, 0));
    turn_leave(&all.turn, &mine);
    pthread_join(thread, NULL);
    close_queue();
}

Test(await, places_run_out_and_come_back)
{
    open_queue();
    for (unsigned i = 0; i < AWAIT_PLACES; i++)
        cr_assert_eq(await_enter(&all.await, PAGES, SLOT), i);
    cr_expect_eq(await_enter(&all.await, PAGES, SLOT), AWAIT_NO_PLACE);
    cr_expect_eq(atomic_load(&all.await.waiting), AWAIT_PLACES);
    await_leave(&all.await, AWAIT_NO_PLACE); /* as the thread without a place does everything, */
    await_wake(&all.await, AWAIT_NO_PLACE);
    await_sleep(&all.await, AWAIT_NO_PLACE, await_read(&all.await, AWAIT_NO_PLACE), TURN_PATIENCE_NS);
    await_leave(&all.await, 5);
    cr_expect_eq(await_enter(&all.await, PAGES, SLOT), 5);
    for (unsigned i = 0; i < AWAIT_PLACES; i++)
        await_leave(&all.await, i);
    close_queue();
}
