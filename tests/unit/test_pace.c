/*
 * How slow the driver is: what many builds say of it, and what one may.
 */
#include <criterion/criterion.h>

#include "remap/pace.h"

static double after(struct pace *pace, unsigned builds, double price_us, uint64_t took_ns)
{
    for (unsigned i = 0; i < builds; i++)
        pace_note(pace, price_us, took_ns);
    return pace_slowness(pace);
}

Test(pace, it_begins_with_the_model_s_prices)
{
    struct pace pace;
    pace_init(&pace);
    cr_expect_eq(pace_slowness(&pace), 1);
}

Test(pace, it_follows_what_builds_take)
{
    struct pace pace;
    pace_init(&pace);
    cr_expect_float_eq(after(&pace, 100, 50, 90000), 1.8, 0.1);
    cr_expect_float_eq(after(&pace, 100, 200, 280000), 1.4, 0.1, "whatever their length is");
    cr_expect_float_eq(after(&pace, 100, 50, 50000), 1, 0.05);
}

Test(pace, a_build_that_stood_still_counts_as_any_other)
{
    struct pace pace;
    pace_init(&pace);
    double before = after(&pace, 100, 50, 75000);
    cr_expect_leq(after(&pace, 1, 50, UINT64_C(20000000)), before * 33 / 32);
    for (unsigned i = 0; i < 100; i++)
        after(&pace, 1, 50, i % 3 ? 75000 : UINT64_C(20000000));
    cr_expect_float_eq(pace_slowness(&pace), 1.5, 0.15, "nor do they if they are a third of all");
}

Test(pace, it_has_bounds)
{
    struct pace pace;
    pace_init(&pace);
    cr_expect_eq(after(&pace, 100, 50, 10000), 1, "a faster driver is as fast as the model's");
    cr_expect_eq(after(&pace, 1000, 50, UINT64_C(900000000)), PACE_MOST);
    cr_expect_lt(after(&pace, 1, 50, 50000), PACE_MOST, "and it comes back from there");
}
