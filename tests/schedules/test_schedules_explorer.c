/* The explorer itself (explore.h): it finds what is there to find, however late, and what it says of it is so. */
#include "explore.h"

#include "base/atomic.h"

#include <criterion/criterion.h>
#include <stdlib.h>

/* How many schedules are looked at is part of what these tests test, whatever the others of a run look at. */
static void look_at_the_usual_number(void)
{
    unsetenv("VPMM_TEST_SCHEDULES");
}

#define EXPLORER(name) Test(schedules_explorer, name, .timeout = 120, .init = look_at_the_usual_number)

enum { BEFORE = 5000, BETWEEN = 8 }; /* more places than are tried, and a few where it happens */

static _Atomic(uint64_t) sum, other;

static void open_at_zero(void *data)
{
    (void)data;
    store_relaxed_u64(&sum, 0);
    store_relaxed_u64(&other, 0);
}

static void pass(int steps)
{
    for (int i = 0; i < steps; i++)
        fetch_add_relaxed_u64(&other, 1);
}

/* A preemption between the load and the store loses the other actor's addition. */
static void add(void *data)
{
    (void)data;
    pass(BEFORE);
    uint64_t was = load_relaxed_u64(&sum);
    pass(BETWEEN);
    store_relaxed_u64(&sum, was + 1);
}

static void close_with_both(void *data)
{
    (void)data;
    explore_check(load_relaxed_u64(&sum) == 2, "an addition is lost");
}

EXPLORER(what_is_lost_late_is_found_and_found_again)
{
    explore("a lost addition",
            &(struct exploration){.open = open_at_zero, .close = close_with_both, .act = {add, add}, .fails = true});
}

/* ---- early in a schedule of more places than are tried ---- */

enum { INSIDE_FROM = 2000, INSIDE_FOR = 8, THEN = 8000, MEANWHILE = 1000 };

static _Atomic(uint64_t) inside, seen;

static void open_outside(void *data)
{
    open_at_zero(data);
    store_relaxed_u64(&inside, 0);
    store_relaxed_u64(&seen, 0);
}

static void be_inside_early(void *data)
{
    (void)data;
    pass(INSIDE_FROM);
    store_relaxed_u64(&inside, 1);
    pass(INSIDE_FOR);
    store_relaxed_u64(&inside, 0);
    pass(THEN);
}

/* One preemption does it: a random schedule goes elsewhere within so many steps. */
static void look_twice(void *data)
{
    (void)data;
    uint64_t was = load_relaxed_u64(&inside);
    pass(MEANWHILE);
    if (was && load_relaxed_u64(&inside))
        store_relaxed_u64(&seen, 1);
}

static void close_unseen(void *data)
{
    (void)data;
    explore_check(!load_relaxed_u64(&seen), "it was inside at both looks");
}

EXPLORER(a_search_that_does_not_end_looks_at_early_places_too)
{
    explore("inside early",
            &(struct exploration){
                .open = open_outside, .close = close_unseen, .act = {be_inside_early, look_twice}, .fails = true});
}
