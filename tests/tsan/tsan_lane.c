/*
 * The preload's lanes with eight threads at once, in real time; for ThreadSanitizer, and useful without it. There is no
 * GPU in it.
 *
 * Threads go in and out, and look at two numbers that are equal. Now and then one of them shuts the lanes and changes
 * both: they are plain memory, so whoever is inside meanwhile is a race, and may see them differ. In the end one forks
 * while it has them shut, and the child goes in.
 *
 *   VPMM_TEST_OPS   entries in all; 400,000
 *   VPMM_TEST_SEED  of the random numbers
 *
 * Exit status 0: no race, the numbers were equal to all, and each change was counted.
 */
#include "world.h"

#include "../../lib/preload/lane.h"

#include <sched.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

enum { THREADS = 8, SELDOM = 500 };

static struct {
    uint64_t one, other; /* changed with the lanes shut */
    _Atomic(uint64_t) changes;
} shared;

static void change(void)
{
    lane_shut();
    shared.one++;
    sched_yield();
    shared.other++;
    lane_open();
    atomic_fetch_add(&shared.changes, 1);
}

static void look_inside(void)
{
    lane_enter();
    uint64_t one = shared.one;
    if (draw(16) == 0)
        sched_yield();
    if (one != shared.other)
        failed("something was changed beside a thread inside");
    lane_leave();
}

static void work(uint64_t index)
{
    (void)index;
    for (uint64_t i = 0; i < world.amount / THREADS; i++) {
        if (draw(SELDOM) == 0)
            change();
        look_inside();
    }
}

/* A child whose parent was inside and had the lanes shut goes in and out. */
static void fork_in_the_midst(void)
{
    int status = 0;
    lane_count(COUNT_served);
    lane_shut();
    pid_t child = fork();
    if (!child) {
        alarm(20);
        lane_enter();
        lane_leave();
        lane_shut();
        lane_open();
        _exit(0);
    }
    lane_open();
    needs(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void finish(void)
{
    fork_in_the_midst();
    printf("%llu changes\n", (unsigned long long)atomic_load(&shared.changes));
    needs(shared.one == atomic_load(&shared.changes) && shared.one);
}

const struct program program = {
    .variable = "VPMM_TEST_OPS",
    .amount = 400000,
    .threads = THREADS,
    .work = work,
    .finish = finish,
};
