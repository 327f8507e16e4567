/*
 * Long runs of driver calls: one thread's burst at a time, in the order of asking; builds that stand in line beside who
 * calls for long, and not else; and who keeps the others waiting is passed by.
 *
 * The clock goes on when the test says so, and it is seen that a thread waits: nothing here depends on how busy the
 * machine is. Where a thread must not go on it is given a moment in which it could.
 */
#define _GNU_SOURCE 1

#include "driver/burst.h"

#include "base/clock.h"
#include "still_clock.h"

#include <criterion/criterion.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LOOK_US = STILL_LOOK_US, MOMENT_US = 5000 };

/* So that the burst is over, and just so. */
static void spend(const struct burst *burst)
{
    uint64_t now = clock_now_ns();
    if (now < burst->end_ns)
        still_pass(burst->end_ns - now);
}

/* ---- a thread that asks once ---- */

struct asker {
    bool builds; /* else it calls for long */
    bool joined; /* a build: it had to ask */
    uint64_t waited_ns;
    atomic_bool has_it, may_end;
    pthread_t thread;
};

static void *ask_once(void *argument)
{
    struct asker *asker = argument;
    struct burst burst = {0};
    if (asker->builds)
        asker->waited_ns = burst_give_way(&burst);
    else
        burst_begin(&burst);
    asker->joined = burst.end_ns != 0;
    atomic_store(&asker->has_it, true);
    while (!atomic_load(&asker->may_end))
        clock_sleep_us(LOOK_US);
    burst_end(&burst);
    return NULL;
}

/* Returns when it waits, or has its burst. */
static void start(struct asker *asker, bool builds)
{
    unsigned before = atomic_load(&still.waits);
    *asker = (struct asker){.builds = builds};
    cr_assert_eq(pthread_create(&asker->thread, NULL, ask_once, asker), 0);
    while (atomic_load(&still.waits) == before && !atomic_load(&asker->has_it))
        clock_sleep_us(LOOK_US);
}

static void await(const atomic_bool *it)
{
    while (!atomic_load(it))
        clock_sleep_us(LOOK_US);
}

/* It has a moment in which to begin. */
static bool waits_still(const struct asker *asker)
{
    clock_sleep_us(MOMENT_US);
    return !atomic_load(&asker->has_it);
}

static void finish(struct asker *asker)
{
    atomic_store(&asker->may_end, true);
    pthread_join(asker->thread, NULL);
}

/* ---- the line ---- */

enum { THREADS = 3, BURSTS = 5 };

static atomic_int inside;
static atomic_bool met;

static void note_meeting(const struct burst *burst)
{
    if (atomic_fetch_add(&inside, 1))
        atomic_store(&met, true);
    clock_sleep_us(MOMENT_US); /* for the others, who could come */
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

/* Of their bursts' time alone, nobody waits so long that patience ends. */
Test(burst, one_at_a_time, .timeout = 60)
{
    pthread_t thread[THREADS];
    _Static_assert(THREADS * BURST_NS < BURST_PATIENCE_NS, "patience ends");
    for (int i = 0; i < THREADS; i++)
        cr_assert_eq(pthread_create(&thread[i], NULL, burst_after_burst, NULL), 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(thread[i], NULL);
    cr_expect(!atomic_load(&met));
}

/* Who waits comes first when a burst's time is over, and not before. */
static void is_let_in_between(bool builds)
{
    struct burst burst = {0};
    struct asker asker;
    burst_begin(&burst);
    start(&asker, builds);
    atomic_store(&asker.may_end, true);
    cr_expect(waits_still(&asker), "it comes too early");
    spend(&burst);
    burst_breathe(&burst);
    cr_expect(atomic_load(&asker.has_it), "it is not let in");
    burst_end(&burst);
    pthread_join(asker.thread, NULL);
    cr_expect(!builds || (asker.joined && asker.waited_ns == BURST_NS));
}

Test(burst, first_come_first_served, .timeout = 60)
{
    is_let_in_between(false);
}

Test(burst, builds_are_let_in, .timeout = 60)
{
    is_let_in_between(true);
}

/* Whose time is not over goes on. */
static void keeps_its_time(bool builds)
{
    struct burst burst = {0};
    struct asker asker;
    burst_begin(&burst);
    start(&asker, builds);
    atomic_store(&asker.may_end, true);
    still_pass(BURST_NS - 1);
    burst_breathe(&burst);
    cr_expect(waits_still(&asker));
    burst_end(&burst);
    pthread_join(asker.thread, NULL);
}

Test(burst, nobody_is_let_in_before_its_time_is_over, .timeout = 60)
{
    keeps_its_time(false);
    keeps_its_time(true);
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
static void is_passed_by(bool builds)
{
    struct burst burst = {0};
    struct asker second, third;
    burst_begin(&burst);
    start(&second, builds);
    still_pass(BURST_PATIENCE_NS - 1);
    cr_expect(waits_still(&second), "its patience ends too early");
    still_pass(1);
    await(&second.has_it);
    burst_end(&burst);
    start(&third, false);
    cr_expect(waits_still(&third));
    finish(&second);
    finish(&third);
}

Test(burst, who_stands_still_is_passed_by, .timeout = 60)
{
    is_passed_by(false);
    is_passed_by(true);
}

/* Who asks late in a long burst has all its patience. */
Test(burst, patience_begins_with_asking, .timeout = 60)
{
    struct burst burst = {0};
    struct asker asker;
    burst_begin(&burst);
    still_pass(BURST_PATIENCE_NS * 3 / 2);
    start(&asker, true);
    still_pass(BURST_PATIENCE_NS - 1);
    cr_expect(waits_still(&asker));
    burst_end(&burst);
    finish(&asker);
}

static atomic_bool is_held, is_released;

static void hold_still(int signal)
{
    (void)signal;
    atomic_store(&is_held, true);
    while (!atomic_load(&is_released))
        clock_sleep_us(LOOK_US);
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
    await(&is_held);
    start(&next, false);
    burst_end(&burst);
    still_pass(BURST_PATIENCE_NS);
    await(&next.has_it);
    atomic_store(&is_released, true);
    await(&late.has_it);
    finish(&late);
    finish(&next);
}

/* ---- forks ---- */

/* The threads that have a burst, or wait, are none of the child's. */
Test(burst, a_child_of_a_fork_waits_for_nobody, .timeout = 60)
{
    struct burst burst = {0}, build = {0};
    int status = -1;
    burst_begin(&burst);
    pid_t child = fork();
    if (child == 0) {
        atomic_store(&still.hurries, true);
        bool counts = burst_give_way(&build) != 0 || build.end_ns;
        burst_begin(&build);
        _exit(counts || atomic_load(&still.waits));
    }
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_expect_eq(status, 0);
    burst_end(&burst);
}
