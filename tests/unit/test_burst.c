/*
 * Long runs of driver calls: one thread's burst at a time, in the order of asking; builds that stand in line beside who
 * calls for long, and not else; and who keeps the others waiting is passed by.
 *
 * That a thread has asked cannot be seen from outside: it is given some milliseconds for it. What a busy machine can
 * spoil so is tried again, and a try that took so long that others may have lost their patience does not count.
 */
#define _GNU_SOURCE 1

#include "driver/burst.h"

#include "base/clock.h"

#include <criterion/criterion.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

enum { TRIES = 20, MOST_TRIES = 200, ASKING_US = 5000 };

static void spend(const struct burst *burst)
{
    while (!burst_is_over(burst))
        clock_spin_ns(BURST_NS / 10);
}

/* ---- a thread that asks once ---- */

struct asker {
    bool builds; /* else it calls for long */
    bool joined; /* a build: it had to ask */
    uint64_t waited_ns;
    atomic_bool asks, has_it, may_end;
    pthread_t thread;
};

static void *ask_once(void *argument)
{
    struct asker *asker = argument;
    struct burst burst = {0};
    atomic_store(&asker->asks, true);
    if (asker->builds)
        asker->waited_ns = burst_give_way(&burst);
    else
        burst_begin(&burst);
    asker->joined = burst.end_ns != 0;
    atomic_store(&asker->has_it, true);
    while (!atomic_load(&asker->may_end))
        clock_yield();
    burst_end(&burst);
    return NULL;
}

static void start(struct asker *asker, bool builds)
{
    *asker = (struct asker){.builds = builds};
    cr_assert_eq(pthread_create(&asker->thread, NULL, ask_once, asker), 0);
    while (!atomic_load(&asker->asks))
        clock_yield();
    clock_sleep_us(ASKING_US);
}

static void finish(struct asker *asker)
{
    atomic_store(&asker->may_end, true);
    pthread_join(asker->thread, NULL);
}

/* ---- the line ---- */

/* Of the tries that take so long at most. */
static void expect_mostly(bool (*happens)(bool), bool builds, uint64_t most_ms)
{
    const uint64_t end = clock_now_ns() + UINT64_C(8000000000);
    int times = 0, tries = 0;
    for (int i = 0; i < MOST_TRIES && tries < TRIES && clock_now_ns() < end; i++) {
        uint64_t since = clock_now_ns();
        bool does = happens(builds), counts = clock_now_ns() - since < most_ms * 1000000;
        tries += counts;
        times += counts && does;
    }
    cr_expect_gt(times, tries / 2, "%d of %d", times, tries);
}

enum { THREADS = 3, BURSTS = 5 };

static atomic_int inside;
static atomic_bool met;

static void note_meeting(const struct burst *burst)
{
    if (atomic_fetch_add(&inside, 1))
        atomic_store(&met, true);
    spend(burst);
    atomic_fetch_sub(&inside, 1);
}

static void *burst_after_burst(void *unused)
{
    struct burst burst = {0};
    (void)unused;
    burst_begin(&burst);
    for (int i = 0; i < BURSTS; i++) {
        note_meeting(&burst);
        burst_breathe(&burst);
    }
    burst_end(&burst);
    return NULL;
}

/* Two meet where a thread stands still in its burst for longer than others are patient. */
static bool is_one_at_a_time(bool unused)
{
    pthread_t thread[THREADS];
    (void)unused;
    atomic_store(&met, false);
    for (int i = 0; i < THREADS; i++)
        cr_assert_eq(pthread_create(&thread[i], NULL, burst_after_burst, NULL), 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(thread[i], NULL);
    return !atomic_load(&met);
}

Test(burst, one_at_a_time, .timeout = 60)
{
    expect_mostly(is_one_at_a_time, false, 30);
}

/* Whether who waits comes first when a burst's time is over, and not before. */
static bool is_let_in_between(bool builds)
{
    struct burst burst = {0};
    struct asker asker;
    burst_begin(&burst);
    start(&asker, builds);
    atomic_store(&asker.may_end, true);
    bool too_early = atomic_load(&asker.has_it);
    spend(&burst);
    burst_breathe(&burst);
    bool is_let_in = atomic_load(&asker.has_it);
    burst_end(&burst);
    pthread_join(asker.thread, NULL);
    return is_let_in && !too_early && (!builds || (asker.joined && asker.waited_ns));
}

Test(burst, first_come_first_served, .timeout = 60)
{
    expect_mostly(is_let_in_between, false, 20);
}

Test(burst, builds_are_let_in, .timeout = 60)
{
    expect_mostly(is_let_in_between, true, 20);
}

/* Whether one goes on whose time is not over. */
static bool keeps_its_time(bool builds)
{
    struct burst burst = {0};
    struct asker asker;
    burst_begin(&burst);
    burst.end_ns += 1000 * BURST_NS;
    start(&asker, builds);
    atomic_store(&asker.may_end, true);
    burst_breathe(&burst);
    bool keeps = !atomic_load(&asker.has_it);
    burst_end(&burst);
    pthread_join(asker.thread, NULL);
    return keeps;
}

Test(burst, nobody_is_let_in_before_its_time_is_over, .timeout = 60)
{
    expect_mostly(keeps_its_time, false, 20);
    expect_mostly(keeps_its_time, true, 20);
}

/* ---- builds ---- */

Test(burst, builds_alone_are_not_in_the_line)
{
    struct burst burst = {0}, other = {0};
    cr_expect_eq(burst_give_way(&burst), 0);
    cr_expect_eq(burst.end_ns, 0, "a build joins the line for nobody");
    burst_begin(&other);
    burst_end(&other);
    cr_expect_eq(burst_give_way(&burst), 0);
    cr_expect_eq(burst.end_ns, 0, "a thread counts as one that calls for long after its end");
    burst_end(&burst);
}

/* Of a thread that calls for long, too: between two of its bursts it has something else to wait for. */
Test(burst, builds_are_in_the_line_during_its_pauses)
{
    struct burst burst = {0}, build = {0};
    burst_begin(&burst);
    burst_pause(&burst);
    burst_give_way(&build);
    cr_expect_neq(build.end_ns, 0);
    burst_end(&build);
    burst_begin(&burst);
    burst_end(&burst);
    cr_expect_eq(burst_give_way(&build), 0);
    cr_expect_eq(build.end_ns, 0, "it counts once for each of its bursts");
}

/* ---- who keeps the others waiting ---- */

/* It has ended its burst, then: what it does later ends nobody else's. */
static bool is_passed_by(bool builds)
{
    struct burst burst = {0};
    struct asker second, third;
    burst_begin(&burst);
    uint64_t since = clock_now_ns();
    start(&second, builds);
    while (!atomic_load(&second.has_it))
        clock_yield();
    bool waited = clock_now_ns() - since >= BURST_PATIENCE_NS;
    burst_end(&burst);
    start(&third, false);
    bool in_turn = !atomic_load(&third.has_it);
    finish(&second);
    finish(&third);
    return waited && in_turn;
}

Test(burst, who_stands_still_is_passed_by, .timeout = 60)
{
    expect_mostly(is_passed_by, false, 45);
    expect_mostly(is_passed_by, true, 45);
}

/* Who asks late in a long burst has all its patience. */
static bool is_patient_from_its_asking(bool builds)
{
    struct burst burst = {0};
    struct asker asker;
    burst_begin(&burst);
    clock_sleep_us(BURST_PATIENCE_NS * 3 / 2 / 1000);
    start(&asker, builds);
    bool waits = !atomic_load(&asker.has_it);
    burst_end(&burst);
    finish(&asker);
    return waits;
}

Test(burst, patience_begins_with_asking, .timeout = 60)
{
    expect_mostly(is_patient_from_its_asking, true, 50);
}

static atomic_bool is_held, is_released;

static void hold_still(int signal)
{
    (void)signal;
    atomic_store(&is_held, true);
    while (!atomic_load(&is_released))
        clock_sleep_us(ASKING_US);
}

/* Who waits for its burst and does not look as it comes is passed by, too, and goes on when it looks. */
Test(burst, who_looks_late_goes_on, .timeout = 60)
{
    const struct sigaction action = {.sa_handler = hold_still};
    struct burst burst = {0};
    struct asker late, next;
    cr_assert_eq(sigaction(SIGUSR1, &action, NULL), 0);
    burst_begin(&burst);
    start(&late, false);
    cr_assert_eq(pthread_kill(late.thread, SIGUSR1), 0);
    while (!atomic_load(&is_held))
        clock_yield();
    start(&next, false);
    burst_end(&burst);
    while (!atomic_load(&next.has_it))
        clock_yield();
    atomic_store(&is_released, true);
    while (!atomic_load(&late.has_it))
        clock_yield();
    finish(&late);
    finish(&next);
}

/* ---- forks ---- */

/* The threads that have a burst, or wait, are none of the child's. */
static bool is_alone_in_a_child(bool unused)
{
    struct burst burst = {0}, build = {0};
    int status = -1;
    (void)unused;
    burst_begin(&burst);
    pid_t child = fork();
    if (child == 0) {
        bool counts = burst_give_way(&build) != 0;
        uint64_t since = clock_now_ns();
        burst_begin(&build);
        _exit(counts || clock_now_ns() - since >= BURST_PATIENCE_NS);
    }
    waitpid(child, &status, 0);
    burst_end(&burst);
    return status == 0;
}

Test(burst, a_child_of_a_fork_waits_for_nobody, .timeout = 60)
{
    expect_mostly(is_alone_in_a_child, false, 60);
}
