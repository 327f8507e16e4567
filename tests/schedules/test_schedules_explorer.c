/* The explorer itself (explore.h): it finds what is there to find, however late, and what it says of it is so. */
#include "explore.h"

#include "base/atomic.h"

#include <criterion/criterion.h>

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

Test(schedules_explorer, what_is_lost_late_is_found_and_found_again, .timeout = 60)
{
    explore("a lost addition",
            &(struct exploration){.open = open_at_zero, .close = close_with_both, .act = {add, add}, .fails = true});
}
