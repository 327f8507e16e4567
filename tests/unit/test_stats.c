/*
 * Peaks, by one thread that plays two: what a look knows of the other's part, also where that is read at another
 * instant than its own. lib/base/stats.h has the words.
 */
#include <criterion/criterion.h>
#include <stdatomic.h>
#include <stdint.h>

#include "base/stats.h"

#define MIB ((uint64_t)1 << 20)
#define GIB ((uint64_t)1 << 30)

/* Of two tallies and two stripes, at first. */
static const uint64_t slacks = UINT64_C(4) * SLACK_LEAST;

static struct stats stats;
static struct stats_tally own, other;

static void join(struct stats_tally *tally)
{
    tally->live_stat = STAT_live_bytes;
    tally->cached_stat = STAT_cached_bytes;
    stats_join(&stats, tally, GIB);
}

/* `threads`: as many stripes have allocated. */
static void begin(unsigned threads)
{
    join(&own);
    join(&other);
    atomic_store(&stats.allocating, (UINT64_C(1) << threads) - 1);
}

static void set(struct stats_tally *tally, uint64_t bytes)
{
    atomic_store(&tally->live_bytes, bytes);
    atomic_store(&tally->requested_bytes, bytes);
}

static uint64_t peak(enum peak which)
{
    return atomic_load(&stats.shared[which].peak);
}

static uint64_t told(enum peak which)
{
    return atomic_load(&stats.shared[which].told);
}

Test(stats, a_look_knows_what_others_have_not_told)
{
    begin(2);
    set(&other, 3 * MIB);
    set(&own, 2 * MIB);
    stats_look(&stats, &own);
    cr_expect_eq(told(PEAK_LIVE), 0);
    cr_expect_eq(peak(PEAK_LIVE), 5 * MIB);
    cr_expect_eq(peak(PEAK_REQUESTED), 5 * MIB);
}

/* Ten gigabytes have gone from thread to thread: one's rise is read, and the other's fall is not. */
Test(stats, a_look_holds_others_to_their_slacks)
{
    begin(2);
    set(&other, 10 * GIB);
    stats_look(&stats, &own);
    cr_expect_leq(peak(PEAK_LIVE), slacks);
    cr_expect_gt(peak(PEAK_LIVE), 0);
}

Test(stats, a_sum_of_all_is_held_to_what_was_told)
{
    begin(2);
    set(&other, 10 * GIB);
    stats_note_peaks(&stats);
    cr_expect_leq(peak(PEAK_LIVE), slacks);
    cr_expect_gt(peak(PEAK_LIVE), 0);
}

/* Nobody changes what the one thread reads. */
Test(stats, one_thread_alone_adds_up_exactly)
{
    begin(1);
    set(&other, 10 * GIB);
    set(&own, 1);
    stats_look(&stats, &own);
    cr_expect_eq(peak(PEAK_LIVE), 10 * GIB + 1);
}

/* What is told before a free is what is there after it; the peak is what was there before. */
Test(stats, what_is_about_to_be_freed_is_not_told)
{
    const uint64_t freed[PEAKS] = {8 * MIB, 7 * MIB};
    begin(2);
    set(&own, 9 * MIB);
    stats_tell(&stats, &own, freed);
    cr_expect_eq(told(PEAK_LIVE), MIB);
    cr_expect_eq(told(PEAK_REQUESTED), 2 * MIB);
    cr_expect_eq(peak(PEAK_LIVE), 9 * MIB);
    stats_tell(&stats, &own, freed); /* it was told already */
    cr_expect_eq(told(PEAK_LIVE), MIB);
}
