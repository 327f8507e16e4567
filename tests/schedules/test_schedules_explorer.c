/* The explorer itself (explore.h): it finds what is there to find, however late, and what it says of it is so. */
#include "explore.h"

#include "base/atomic.h"

#include <criterion/criterion.h>

enum { BEFORE = 5000 };

static _Atomic(uint64_t) sum, other;

static void open_at_zero(void *data)
{
    (void)data;
    store_relaxed_u64(&sum, 0);
    store_relaxed_u64(&other, 0);
}

/* A preemption between the last load and the store loses an addition. */
static void add(void *data)
{
    (void)data;
    for (int i = 0; i < BEFORE; i++)
        fetch_add_relaxed_u64(&other, 1);
    store_relaxed_u64(&sum, load_relaxed_u64(&sum) + 1);
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
