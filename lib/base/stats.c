#include "base/stats.h"

#include "base/clock.h"

_Static_assert(STATS_STRIPES <= 64, "`allocating` has a bit for each stripe");

static _Atomic(uint64_t) threads_seen; /* never comes round: the first ones' stripes stay theirs alone */
_Thread_local unsigned stats_own_stripe;

unsigned stats_take_stripe(void)
{
    enum { SHARED = STATS_STRIPES - STATS_OWN_STRIPES };
    uint64_t before = fetch_add_relaxed_u64(&threads_seen, 1);
    bool is_own = before < STATS_OWN_STRIPES;
    unsigned stripe = (unsigned)(is_own ? before : STATS_OWN_STRIPES + (before - STATS_OWN_STRIPES) % SHARED);
    stats_own_stripe = stripe + 1;
    return stripe;
}

/* Stripes that any thread of the process has taken. */
static unsigned stripes_used(void)
{
    uint64_t seen = load_relaxed_u64(&threads_seen);
    return seen < STATS_STRIPES ? (unsigned)seen : STATS_STRIPES;
}

/* All of it at once: the line that its thread writes is asked for once. */
static void add_tally(uint64_t sum[STATS_COUNT], const struct stats_tally *tally)
{
    uint64_t hits = load_relaxed_u64(&tally->hits), neighbour_hits = load_relaxed_u64(&tally->neighbour_hits);
    uint64_t live = load_relaxed_u64(&tally->live_bytes);
    sum[STAT_mallocs] += hits + neighbour_hits;
    sum[STAT_hits_cache] += hits;
    sum[STAT_hits_neighbour] += neighbour_hits;
    sum[STAT_frees_cache] += load_relaxed_u64(&tally->frees);
    sum[tally->live_stat] += live;
    sum[tally->cached_stat] -= live;
    sum[STAT_requested_bytes] += load_relaxed_u64(&tally->requested_bytes);
}

static void add_tallies(const struct stats *stats, uint64_t sum[STATS_COUNT])
{
    for (const struct stats_tally *tally = load_acquire_ptr(&stats->tallies); tally; tally = tally->next)
        add_tally(sum, tally);
}

uint64_t stats_sum(const struct stats *stats, enum stat which)
{
    uint64_t of_tallies[STATS_COUNT] = {0};
    add_tallies(stats, of_tallies);
    uint64_t sum = of_tallies[which];
    for (unsigned i = 0, n = stripes_used(); i < n; i++)
        sum += load_relaxed_u64(&stats->stripe[i].value[which]);
    return sum;
}

/* The smallest i with us <= 2^i, microseconds rounded up; the last bucket takes the rest. */
static unsigned latency_bucket(uint64_t ns)
{
    uint64_t us = (ns + 999) / 1000;
    unsigned bucket = us > 1 ? 64 - (unsigned)__builtin_clzll(us - 1) : 0;
    return bucket < VPMM_LATENCY_BUCKETS ? bucket : VPMM_LATENCY_BUCKETS - 1;
}

void stats_note_latency(struct stats *stats, uint64_t ns)
{
    unsigned own = stats_stripe();
    stripe_add(own, &stats->stripe[own].latency[latency_bucket(ns)], 1);
    stripe_add(own, &stats->stripe[own].latency_ns, ns);
}

void stats_count_failure(struct stats *stats, vpmm_status status)
{
    static const enum stat counter[] = {
        [VPMM_ERROR_INVALID_VALUE] = STAT_failed_invalid_value,
        [VPMM_ERROR_INVALID_POINTER] = STAT_failed_invalid_pointer,
        [VPMM_ERROR_OUT_OF_MEMORY] = STAT_failed_out_of_memory,
        [VPMM_ERROR_OUT_OF_ADDRESS_SPACE] = STAT_failed_address_space,
        [VPMM_ERROR_NOT_SUPPORTED] = STAT_failed_not_supported,
        [VPMM_ERROR_NO_DRIVER] = STAT_failed_driver, /* not counted here: of a creation */
        [VPMM_ERROR_DRIVER] = STAT_failed_driver,
        [VPMM_ERROR_BUSY] = STAT_failed_driver,
        [VPMM_ERROR_HOST_MEMORY] = STAT_failed_host_memory,
    };
    stats_count(stats, counter[status]);
}

/* A sum read while others add may lack one thread's part of a pair of changes; a level below zero is such a tear. */
static uint64_t level(uint64_t sum)
{
    return (int64_t)sum < 0 ? 0 : sum;
}

uint64_t stats_level(const struct stats *stats, enum stat which)
{
    return level(stats_sum(stats, which));
}

static uint64_t greater(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static uint64_t smaller(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static uint64_t difference(uint64_t a, uint64_t b)
{
    return a > b ? a - b : 0;
}

/* This thread's stripe has a level of its own from here on. */
static void join_allocating(struct stats *stats)
{
    uint64_t own = UINT64_C(1) << stats_stripe();
    if (!(load_relaxed_u64(&stats->allocating) & own))
        fetch_or_sc_u64(&stats->allocating, own);
}

/* ---- peaks ---- */

static const enum stat stat_of[PEAKS] = {[PEAK_LIVE] = STAT_live_bytes, [PEAK_REQUESTED] = STAT_requested_bytes};

/* Whether what the tally has is a part of the level. */
static bool has_part(const struct stats_tally *tally, enum peak which)
{
    return which == PEAK_REQUESTED || tally->live_stat == STAT_live_bytes;
}

static uint64_t bytes_of(const struct stats_tally *tally, enum peak which)
{
    return load_relaxed_u64(which == PEAK_LIVE ? &tally->live_bytes : &tally->requested_bytes);
}

/* Of the stripes that allocate alone: others' levels are 0. */
static uint64_t level_now(const struct stats *stats, enum peak which)
{
    uint64_t sum = 0, allocating = load_relaxed_u64(&stats->allocating);
    for (const struct stats_tally *tally = load_acquire_ptr(&stats->tallies); tally; tally = tally->next)
        if (has_part(tally, which))
            sum += bytes_of(tally, which);
    for (; allocating; allocating &= allocating - 1)
        sum += load_relaxed_u64(&stats->stripe[__builtin_ctzll(allocating)].value[stat_of[which]]);
    return level(sum);
}

static uint64_t slack_of_stripe(const struct stats_part *part)
{
    return greater(load_relaxed_u64(&part->slack), SLACK_LEAST);
}

static uint64_t slack_of_all(const struct stats *stats)
{
    uint64_t sum = 0;
    for (const struct stats_tally *tally = load_acquire_ptr(&stats->tallies); tally; tally = tally->next)
        sum += load_relaxed_u64(&tally->part.slack);
    for (uint64_t left = load_relaxed_u64(&stats->allocating); left; left &= left - 1)
        sum += slack_of_stripe(&stats->stripe[__builtin_ctzll(left)].part);
    return sum;
}

/* The present level; the parts are of different instants, and what has been told says how far that can mislead. */
static uint64_t checked_level(const struct stats *stats, enum peak which)
{
    uint64_t now = level_now(stats, which);
    return smaller(now, level(load_relaxed_u64(&stats->shared[which].told) + slack_of_all(stats)));
}

static void raise_peak(struct stats *stats, enum peak which, uint64_t seen)
{
    raise_relaxed_u64(&stats->shared[which].peak, seen);
    if (which == PEAK_LIVE)
        raise_relaxed_u64(&stats->epoch_live, seen);
}

void stats_note_peaks(struct stats *stats)
{
    for (enum peak which = 0; which < PEAKS; which++)
        raise_peak(stats, which, checked_level(stats, which));
}

static bool exceeds(uint64_t untold, uint64_t slack)
{
    return untold + slack > 2 * slack; /* on either side of 0 */
}

/* Of a part that is about to tell. */
static void adapt(struct stats_part *part, uint64_t bytes, uint64_t most)
{
    enum { SELDOM = 64 };
    uint64_t now = clock_now_ns(), since = now - load_relaxed_u64(&part->told_at_ns);
    if (since < TELL_NS)
        bytes = smaller(bytes * 2, most);
    else if (since > SELDOM * TELL_NS && bytes > SLACK_LEAST)
        bytes = greater(bytes / 2, SLACK_LEAST);
    store_relaxed_u64(&part->slack, bytes);
    store_relaxed_u64(&part->told_at_ns, now);
}

/* What the calling thread counts past its front caches, if it has the stripe alone. */
static uint64_t own_untold(const struct stats *stats, enum peak which)
{
    return load_relaxed_u64(&stats->stripe[stats_stripe()].untold[which]);
}

static uint64_t within(uint64_t difference, uint64_t most)
{
    return !exceeds(difference, most) ? difference : (int64_t)difference < 0 ? 0 - most : most;
}

/* Whether a look of the part is to add all parts up. */
static bool is_due(struct stats_part *part)
{
    uint64_t now = clock_now_ns();
    if (now - load_relaxed_u64(&part->summed_at_ns) < SUM_NS)
        return false;
    store_relaxed_u64(&part->summed_at_ns, now);
    return true;
}

/* `own`: what the part's thread has untold. `sums`: all parts are added up. */
static uint64_t seen_by(const struct stats *stats, struct stats_part *part, enum peak which, uint64_t own, bool sums)
{
    uint64_t known = load_relaxed_u64(&stats->shared[which].told) + own;
    if (stats_is_alone(stats))
        return level_now(stats, which);
    if (sums)
        store_relaxed_u64(&part->others[which], within(level_now(stats, which) - known, slack_of_all(stats)));
    return level(known + load_relaxed_u64(&part->others[which]));
}

/*
 * Of the room below the peak that one thread's tallies share, what this one may have. What another may still rise to
 * its mark is taken off, which is at most an equal share: its mark is lowered to that. So they never rise above the
 * peak together with no look.
 */
static uint64_t room_beside_others(struct stats *stats, const struct stats_tally *own, enum peak which, uint64_t room)
{
    uint64_t parts = 0, share;
    struct stats_tally *tally;
    for (tally = load_acquire_ptr(&stats->tallies); tally; tally = tally->next)
        parts += has_part(tally, which);
    share = room / parts; /* one of them is the caller's */
    for (tally = load_acquire_ptr(&stats->tallies); tally; tally = tally->next) {
        uint64_t bytes = bytes_of(tally, which), rise = level(load_relaxed_u64(&tally->mark[which]) - bytes);
        if (tally == own || !has_part(tally, which))
            continue;
        if (rise > share)
            store_relaxed_u64(&tally->mark[which], bytes + share);
        room -= smaller(rise, share);
    }
    return room;
}

/* What is untold is within the slack, or belongs to a free that follows. */
static void look(struct stats *stats, struct stats_tally *tally, enum peak which, bool sums)
{
    uint64_t bytes = bytes_of(tally, which), untold = bytes - tally->told[which];
    uint64_t slack = load_relaxed_u64(&tally->part.slack), room = exceeds(untold, slack) ? 0 : slack - untold;
    if (has_part(tally, which)) {
        uint64_t seen = seen_by(stats, &tally->part, which, own_untold(stats, which) + untold, sums);
        raise_peak(stats, which, seen);
        uint64_t below = difference(load_relaxed_u64(&stats->shared[which].peak), seen);
        below = stats_is_alone(stats) ? room_beside_others(stats, tally, which, below) : greater(below, LEAST_RISE);
        room = smaller(room, below);
    }
    store_relaxed_u64(&tally->mark[which], bytes + room);
}

static void tell(struct stats *stats, struct stats_tally *tally, const uint64_t freed[PEAKS])
{
    adapt(&tally->part, load_relaxed_u64(&tally->part.slack), tally->slack_most);
    for (enum peak which = 0; which < PEAKS; which++) {
        uint64_t bytes = bytes_of(tally, which) - freed[which];
        if (has_part(tally, which))
            fetch_add_relaxed_u64(&stats->shared[which].told, bytes - tally->told[which]);
        tally->told[which] = bytes;
    }
}

static void look_at_all(struct stats *stats, struct stats_tally *tally)
{
    bool sums = !stats_is_alone(stats) && is_due(&tally->part);
    for (enum peak which = 0; which < PEAKS; which++)
        look(stats, tally, which, sums);
}

void stats_look(struct stats *stats, struct stats_tally *tally)
{
    uint64_t slack = load_relaxed_u64(&tally->part.slack);
    if (exceeds(bytes_of(tally, PEAK_LIVE) - tally->told[PEAK_LIVE], slack) ||
        exceeds(bytes_of(tally, PEAK_REQUESTED) - tally->told[PEAK_REQUESTED], slack))
        tell(stats, tally, (uint64_t[PEAKS]){0});
    look_at_all(stats, tally);
}

void stats_look_past_tallies(struct stats *stats)
{
    struct stats_part *part = &stats->stripe[stats_stripe()].part;
    bool sums = !stats_is_alone(stats) && is_due(part);
    for (enum peak which = 0; which < PEAKS; which++)
        raise_peak(stats, which, seen_by(stats, part, which, own_untold(stats, which), sums));
}

void stats_tell(struct stats *stats, struct stats_tally *tally, const uint64_t freed[PEAKS])
{
    tell(stats, tally, freed);
    look_at_all(stats, tally);
}

void stats_join(struct stats *stats, struct stats_tally *tally, uint64_t most)
{
    tally->slack_most = most;
    store_relaxed_u64(&tally->part.slack, smaller(SLACK_LEAST, most));
    void *first = load_relaxed_ptr(&stats->tallies);
    do /* lock-free: a failed exchange is another thread's join. Nothing ever leaves, so no pointer comes back */
        tally->next = first;
    while (!cas_acq_rel_ptr(&stats->tallies, &first, tally)); /* pairs with the acquire in add_tallies */
    join_allocating(stats);
}

uint64_t stats_epoch_peak(const struct stats *stats)
{
    return load_relaxed_u64(&stats->epoch_live);
}

uint64_t stats_next_epoch(struct stats *stats, uint64_t now)
{
    return greater(exchange_relaxed_u64(&stats->epoch_live, now), now);
}

/*
 * What the thread's stripe has more of a level, or less. Another thread of the stripe may tell of it first. Both peaks
 * are told of, because the one slack that they have may be less from then on than what the other one has untold.
 */
static void change(struct stats *stats, enum peak which, uint64_t bytes)
{
    unsigned own = stats_stripe();
    _Atomic(uint64_t) *untold = stats->stripe[own].untold;
    struct stats_part *part = &stats->stripe[own].part;
    uint64_t now = own < STATS_OWN_STRIPES ? advance_alone_u64(&untold[which], bytes)
                                           : fetch_add_relaxed_u64(&untold[which], bytes) + bytes;
    uint64_t most = slack_of_stripe(part);
    if (!exceeds(now, most))
        return;
    adapt(part, most, SLACK_OF_STRIPE);
    for (enum peak each = 0; each < PEAKS; each++)
        fetch_add_relaxed_u64(&stats->shared[each].told, exchange_relaxed_u64(&untold[each], 0));
}

void stats_begin_live(struct stats *stats, enum stat live_stat, uint64_t live, uint64_t requested)
{
    join_allocating(stats);
    stats_add(stats, live_stat, live);
    stats_add(stats, STAT_requested_bytes, requested);
    if (live_stat == STAT_live_bytes)
        change(stats, PEAK_LIVE, live);
    if (requested)
        change(stats, PEAK_REQUESTED, requested);
}

void stats_end_live(struct stats *stats, enum stat live_stat, uint64_t live, uint64_t requested)
{
    join_allocating(stats);
    stats_sub(stats, live_stat, live);
    stats_sub(stats, STAT_requested_bytes, requested);
    if (live_stat == STAT_live_bytes)
        change(stats, PEAK_LIVE, 0 - live);
    if (requested)
        change(stats, PEAK_REQUESTED, 0 - requested);
}

void stats_note_peak_mapped(struct stats *stats)
{
    raise_relaxed_u64(&stats->peak_mapped, stats_level(stats, STAT_mapped_bytes));
}

/* Beside other threads' calls either may be seen first: what vpmm.h says of these attributes allows for it. */
void stats_reset_peak(struct stats *stats, enum peak which)
{
    store_relaxed_u64(&stats->shared[which].peak, checked_level(stats, which));
    for (struct stats_tally *tally = load_acquire_ptr(&stats->tallies); tally; tally = tally->next)
        store_relaxed_u64(&tally->mark[which], bytes_of(tally, which));
}

void stats_reset_peak_mapped(struct stats *stats)
{
    store_relaxed_u64(&stats->peak_mapped, stats_level(stats, STAT_mapped_bytes));
}

void stats_read_calls(const struct stats *stats, vpmm_call_counts out[VPMM_DRIVER_CALLS])
{
    static const char *const name[] = {
#define ENTRY_NAME(name, version, parameters, arguments) #name,
        VPMM_DRIVER_ENTRIES(ENTRY_NAME)
#undef ENTRY_NAME
    };
    for (unsigned i = 0; i < VPMM_DRIVER_CALLS; i++)
        out[i] = (vpmm_call_counts){.call = name[i]};
    for (const struct stats_tally *tally = load_acquire_ptr(&stats->tallies); tally; tally = tally->next)
        out[ENTRY_cuStreamGetId].made += load_relaxed_u64(&tally->driver_calls);
    for (unsigned s = 0, n = stripes_used(); s < n; s++)
        for (unsigned i = 0; i < VPMM_DRIVER_CALLS; i++) {
            out[i].made += load_relaxed_u64(&stats->stripe[s].calls[i]);
            out[i].failed += load_relaxed_u64(&stats->stripe[s].errors[i]);
        }
}

void stats_read_latency(const struct stats *stats, vpmm_latency *out)
{
    *out = (vpmm_latency){0};
    for (unsigned s = 0, n = stripes_used(); s < n; s++) {
        for (unsigned i = 0; i < VPMM_LATENCY_BUCKETS; i++)
            out->count[i] += load_relaxed_u64(&stats->stripe[s].latency[i]);
        out->sum_ns += load_relaxed_u64(&stats->stripe[s].latency_ns);
    }
}

static void sum_calls(const struct stats *stats, vpmm_stats *out)
{
    vpmm_call_counts counts[VPMM_DRIVER_CALLS];
    stats_read_calls(stats, counts);
    for (unsigned i = 0; i < VPMM_DRIVER_CALLS; i++) {
        out->driver_calls += counts[i].made;
        out->driver_errors += counts[i].failed;
    }
}

/* Of each counter that has parts, as the table says, what these make in sum. */
static vpmm_stats sums_of_parts(const vpmm_stats *stats)
{
    vpmm_stats of_parts = {0};
#define ADD_gauge                       (void)
#define ADD_counter                     (void)
#define ADD_counter_by(label)           (void)
#define ADD_part_of(sum, value)         of_parts.sum +=
#define ADD_counter_part_of(sum, value) of_parts.sum +=
#define ADD(name, kind, help)           ADD_##kind(stats->name);
    VPMM_STATS(ADD)
#undef ADD
#undef ADD_counter_part_of
#undef ADD_part_of
#undef ADD_counter_by
#undef ADD_counter
#undef ADD_gauge
    return of_parts;
}

void stats_read(const struct stats *stats, vpmm_stats *out)
{
    uint64_t sum[STATS_COUNT] = {0};
    add_tallies(stats, sum);
    for (unsigned i = 0, n = stripes_used(); i < n; i++)
        for (unsigned which = 0; which < STATS_COUNT; which++)
            sum[which] += load_relaxed_u64(&stats->stripe[i].value[which]);
#define STATS_SUM(name, kind, help) out->name = level(sum[STAT_##name]);
    VPMM_STATS(STATS_SUM)
#undef STATS_SUM
    vpmm_stats of_parts = sums_of_parts(out);
    out->frees = of_parts.frees;
    out->failures = of_parts.failures;
    out->unwound = of_parts.unwound;
    sum_calls(stats, out);
    out->slab_free_bytes = difference(out->slab_bytes, out->slab_live_bytes);
    uint64_t placed = out->mapped_bytes + out->parked_bytes;
    out->reusable_bytes = difference(placed, out->live_bytes);
    out->hole_bytes = difference(out->reserved_bytes, placed + out->pending_unmap_bytes);
    /* What is there now has been there, whether or not anyone has looked. */
    out->peak_live_bytes = greater(load_relaxed_u64(&stats->shared[PEAK_LIVE].peak), out->live_bytes);
    out->peak_requested_bytes = greater(load_relaxed_u64(&stats->shared[PEAK_REQUESTED].peak), out->requested_bytes);
    out->peak_mapped_bytes = greater(load_relaxed_u64(&stats->peak_mapped), out->mapped_bytes);
}
