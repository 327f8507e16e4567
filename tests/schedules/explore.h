/*
 * explore.h - runs what a few threads do in every order that matters, one after another.
 *
 * The library under such a test is built with VPMM_SCHEDULE_POINTS (lib/base/schedule.h). Each actor is a thread of its
 * own, so that its thread-local state is; exactly one has the baton, and before each atomic operation of the library's
 * the explorer decides who has it next. A thread that finds a lock taken, or waits for another one, gives it away.
 *
 *   schedule     all the decisions of one run, from a world that is made for it to a world that is taken apart. It is
 *                written "12:1 40:0": at step 12 actor 1 goes on, at step 40 actor 0. Where nothing is written the same
 *                actor goes on; if it cannot, the next one that can
 *   step         one schedule point of any actor
 *   preemption   a decision against an actor that could have gone on, or against the next one in turn while an actor
 *                only looks again and again for what another one does
 *
 * First random schedules; then every one with one preemption, then with two, depth first; at most so many. Where these
 * would not suffice, the preemptions are at some places of a schedule alone, which lie as far apart from its beginning
 * to its end; another seed takes others. What a scenario's line of output calls "(not all)" was not finished so.
 *
 * Before an operation on what no other actor looks at, or that nobody changes, another order shows nothing new: there
 * nothing is decided. Which addresses are shared is learned as schedules run. A random one decides at what those before
 * it have learned of, and a search that has learned of one begins again when it ends; random ones come first, so that
 * this is seldom. For what is learned to hold, the allocator is replaced: an actor's nth allocation has the same
 * address in every schedule. What is freed is overwritten and not given out again in the same schedule, and all must be
 * freed at its end.
 *
 * An exploration sees each operation at once and in one order for all: what is weaker than sequentially consistent is
 * not seen here, but in tests/relacy.
 *
 *   VPMM_TEST_SCHEDULES   n, in place of 2,500: at most n schedules with two preemptions, and 2 n with one or two, also
 *                         of a search that begins again; n / 4 random ones. 0: no bound, and none at random
 *   VPMM_TEST_SEED        of the random ones, and of the places
 *   VPMM_TEST_SCHEDULE    runs this one alone, for the one test that --filter names. A failure prints it to standard
 *                         error: Criterion would cut it
 */
#ifndef VPMM_TESTS_EXPLORE_H
#define VPMM_TESTS_EXPLORE_H

#include <stdbool.h>
#include <stdint.h>

enum { EXPLORE_ACTORS = 4, EXPLORE_PREEMPTIONS = 2 };

struct exploration {
    void (*open)(void *data); /* before each schedule, on the test's thread */
    /* On the actor's thread, one actor after the other, and then all at once. `prepare` may be NULL. */
    void (*prepare[EXPLORE_ACTORS])(void *data);
    void (*act[EXPLORE_ACTORS])(void *data); /* as many as there are actors */
    void (*close)(void *data);               /* on the test's thread: looks at what has come of it */
    /* Before the first schedule, on the test's thread and each actor's that outlives a schedule. May be NULL. */
    void (*settle)(void *data);
    void *data;
    bool fails;          /* some schedule does, and again where what is printed of it is run: to try the explorer */
    bool threads_end;    /* the actors' threads are made for each schedule, and end as the last that they do */
    unsigned random;     /* this many random schedules and no others; 0: as above */
    uint64_t ignored[2]; /* addresses from .. to which are not worth an order */
};

/* Fails the test on the first schedule in which anything has failed. */
void explore(const char *name, struct exploration *);

/* A test's .fini: the schedule, if an assertion has ended the test in `close`. */
void explore_report(void);

/* From anywhere in a schedule. The first failure's words are kept; the schedule goes on. */
__attribute__((format(printf, 1, 2))) void explore_fail(const char *format, ...);

#define explore_check(condition, ...)                                                                                  \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            explore_fail(__VA_ARGS__);                                                                                 \
    } while (0)

/* Of the calling thread's: the actor's number; -1: none. And the time that the library sees goes on. */
int explore_actor(void);
void explore_later(uint64_t us);

/* Steps so far in this schedule: an order of what happens. */
uint64_t explore_step(void);

#endif
