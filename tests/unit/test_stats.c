/*
 * Peaks, by one thread that plays two: what a look knows of the other's part, also where that is read at another
 * instant than its own. And what a reading adds up. lib/base/stats.h has the words.
 */
#include <criterion/criterion.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

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

/* Stripes have slacks as tallies have. */
Test(stats, what_a_stripe_has_not_told_is_in_the_peak)
{
    stats_begin_live(&stats, STAT_live_bytes, 3 * MIB, 3 * MIB);
    stats_note_peaks(&stats);
    cr_expect_eq(peak(PEAK_LIVE), 3 * MIB);
    cr_expect_eq(peak(PEAK_REQUESTED), 3 * MIB);
}

/* It has grown while the part told often. */
Test(stats, a_slack_shrinks_when_little_is_told)
{
    static const uint64_t nothing[PEAKS];
    uint64_t high = 0;
    join(&own);
    for (int i = 0; i < 1000 && high <= SLACK_LEAST; i++) { /* a thread that is kept from running tells too late */
        stats_tell(&stats, &own, nothing);
        high = atomic_load(&own.part.slack);
    }
    cr_assert_gt(high, SLACK_LEAST);
    nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    stats_tell(&stats, &own, nothing);
    cr_expect_lt(atomic_load(&own.part.slack), high);
}

/* Both peaks of a stripe have one slack: it may not shrink below what one of them has untold. */
Test(stats, what_tells_of_one_peak_tells_of_both)
{
    struct stats_part *part = &stats.stripe[stats_stripe()].part; /* it told long ago */
    atomic_store(&part->slack, 32 * MIB);
    stats_begin_live(&stats, STAT_live_bytes, 24 * MIB, 0);
    cr_assert_eq(told(PEAK_LIVE), 0);
    stats_begin_live(&stats, STAT_live_bytes, 0, 40 * MIB);
    cr_assert_lt(atomic_load(&part->slack), 24 * MIB);
    cr_expect_eq(told(PEAK_LIVE), 24 * MIB);
    stats_note_peaks(&stats);
    cr_expect_eq(peak(PEAK_LIVE), 24 * MIB);
    cr_expect_eq(peak(PEAK_REQUESTED), 40 * MIB);
}

/* Who reads may be sooner than who notes the peak. */
Test(stats, what_is_mapped_is_in_the_peak_that_is_read)
{
    vpmm_stats read;
    stats_add(&stats, STAT_mapped_bytes, 5);
    stats_read(&stats, &read);
    cr_expect_eq(read.peak_mapped_bytes, 5);
}

/* Though nothing has noted it. */
Test(stats, an_epoch_ends_with_what_is_live_now)
{
    cr_expect_eq(stats_next_epoch(&stats, 7), 7);
}

Test(stats, each_failure_is_in_the_sum)
{
    for (int status = VPMM_ERROR_INVALID_VALUE; status <= VPMM_ERROR_HOST_MEMORY; status++) {
        vpmm_stats before, after;
        stats_read(&stats, &before);
        stats_count_failure(&stats, (vpmm_status)status);
        stats_read(&stats, &after);
        cr_expect_eq(after.failures - before.failures, 1, "%s", vpmm_status_name((vpmm_status)status));
    }
}

/* What has been a thread's own is no later thread's, however many there are: it adds without a locked instruction. */
Test(stats, no_later_thread_has_an_own_stripe)
{
    unsigned taken[STATS_STRIPES] = {0};
    for (int i = 0; i < 5 * STATS_STRIPES; i++)
        taken[stats_take_stripe()]++;
    for (unsigned i = 0; i < STATS_OWN_STRIPES; i++)
        cr_expect_leq(taken[i], 1);
    for (unsigned i = STATS_OWN_STRIPES; i < STATS_STRIPES; i++)
        cr_expect_gt(taken[i], 1);
}
