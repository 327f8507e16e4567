#include "base/stats.h"

static _Atomic(uint32_t) threads_seen;
static _Thread_local unsigned own_stripe; /* 1 + index; 0: not taken yet */

unsigned stats_stripe(void)
{
    if (!own_stripe)
        own_stripe = fetch_add_relaxed_u32(&threads_seen, 1) % STATS_STRIPES + 1;
    return own_stripe - 1;
}

unsigned stats_stripes_used(void)
{
    uint32_t seen = load_relaxed_u32(&threads_seen);
    return seen < STATS_STRIPES ? seen : STATS_STRIPES;
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
    for (unsigned i = 0, n = stats_stripes_used(); i < n; i++)
        sum += load_relaxed_u64(&stats->stripe[i].value[which]);
    return sum;
}

void stats_count_call(struct stats *stats, enum driver_entry entry, bool failed)
{
    unsigned own = stats_stripe();
    fetch_add_relaxed_u64(&stats->stripe[own].calls[entry], 1);
    if (failed)
        fetch_add_relaxed_u64(&stats->stripe[own].errors[entry], 1);
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
    fetch_add_relaxed_u64(&stats->stripe[own].latency[latency_bucket(ns)], 1);
    fetch_add_relaxed_u64(&stats->stripe[own].latency_ns, ns);
}

void stats_count_failure(struct stats *stats, vpmm_status status)
{
    static const enum stat counter[] = {
        [VPMM_ERROR_INVALID_VALUE] = STAT_failed_invalid_value,
        [VPMM_ERROR_INVALID_POINTER] = STAT_failed_invalid_pointer,
        [VPMM_ERROR_OUT_OF_MEMORY] = STAT_failed_out_of_memory,
        [VPMM_ERROR_OUT_OF_ADDRESS_SPACE] = STAT_failed_address_space,
        [VPMM_ERROR_NOT_SUPPORTED] = STAT_failed_not_supported,
        [VPMM_ERROR_NO_DRIVER] = STAT_failed_driver, /* only creation answers NO_DRIVER and only destruction BUSY */
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

static uint64_t difference(uint64_t a, uint64_t b)
{
    return a > b ? a - b : 0;
}

/* Of the stripes that allocate alone: others' levels are 0. */
static uint64_t live_now(const struct stats *stats, uint64_t allocating)
{
    uint64_t sum = 0;
    for (const struct stats_tally *tally = load_acquire_ptr(&stats->tallies); tally; tally = tally->next)
        if (tally->live_stat == STAT_live_bytes)
            sum += load_relaxed_u64(&tally->live_bytes);
    for (; allocating; allocating &= allocating - 1)
        sum += load_relaxed_u64(&stats->stripe[__builtin_ctzll(allocating)].value[STAT_live_bytes]);
    return level(sum);
}

/* This thread's stripe has a level of its own from here on. */
static uint64_t join_allocating(struct stats *stats)
{
    uint64_t own = UINT64_C(1) << stats_stripe(), all = load_relaxed_u64(&stats->allocating);
    return all & own ? all : fetch_or_sc_u64(&stats->allocating, own) | own;
}

void stats_join(struct stats *stats, struct stats_tally *tally)
{
    void *first = load_relaxed_ptr(&stats->tallies);
    do /* lock-free: a failed exchange is another thread's join. Nothing ever leaves, so no pointer comes back */
        tally->next = first;
    while (!cas_acq_rel_ptr(&stats->tallies, &first, tally)); /* pairs with the acquire in add_tallies */
    join_allocating(stats);
}

static void raise_peaks(struct stats *stats, uint64_t live)
{
    raise_relaxed_u64(&stats->peak_live, live);
    raise_relaxed_u64(&stats->epoch_live, live);
}

void stats_note_peak_live(struct stats *stats)
{
    raise_peaks(stats, live_now(stats, load_relaxed_u64(&stats->allocating)));
}

uint64_t stats_epoch_peak(const struct stats *stats)
{
    return load_relaxed_u64(&stats->epoch_live);
}

uint64_t stats_next_epoch(struct stats *stats, uint64_t now)
{
    return greater(exchange_acq_rel_u64(&stats->epoch_live, now), now);
}

/*
 * The peak is exact where one thread allocates. Where several do, looking at each other's stripes in every malloc would
 * cost more than the malloc, and each looks once in PEAK_SAMPLE times.
 */
void stats_begin_live(struct stats *stats, enum stat live_stat, uint64_t live, uint64_t requested)
{
    enum { PEAK_SAMPLE = 16 };
    uint64_t allocating = join_allocating(stats);
    stats_add(stats, live_stat, live);
    stats_add(stats, STAT_requested_bytes, requested);
    if (live_stat != STAT_live_bytes)
        return;
    if (stats_is_alone(stats) ||
        load_relaxed_u64(&stats->stripe[stats_stripe()].value[STAT_mallocs]) % PEAK_SAMPLE == 0)
        raise_peaks(stats, live_now(stats, allocating));
}

void stats_end_live(struct stats *stats, enum stat live_stat, uint64_t live, uint64_t requested)
{
    join_allocating(stats);
    stats_sub(stats, live_stat, live);
    stats_sub(stats, STAT_requested_bytes, requested);
}

void stats_note_peak_mapped(struct stats *stats)
{
    raise_relaxed_u64(&stats->peak_mapped, stats_level(stats, STAT_mapped_bytes));
}

void stats_reset_peak_live(struct stats *stats)
{
    store_relaxed_u64(&stats->peak_live, stats_level(stats, STAT_live_bytes));
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
    for (unsigned s = 0, n = stats_stripes_used(); s < n; s++)
        for (unsigned i = 0; i < VPMM_DRIVER_CALLS; i++) {
            out[i].made += load_relaxed_u64(&stats->stripe[s].calls[i]);
            out[i].failed += load_relaxed_u64(&stats->stripe[s].errors[i]);
        }
}

void stats_read_latency(const struct stats *stats, vpmm_latency *out)
{
    *out = (vpmm_latency){0};
    for (unsigned s = 0, n = stats_stripes_used(); s < n; s++) {
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

void stats_read(const struct stats *stats, vpmm_stats *out)
{
    uint64_t sum[STATS_COUNT] = {0};
    add_tallies(stats, sum);
    for (unsigned i = 0, n = stats_stripes_used(); i < n; i++)
        for (unsigned which = 0; which < STATS_COUNT; which++)
            sum[which] += load_relaxed_u64(&stats->stripe[i].value[which]);
#define STATS_SUM(name, kind, help) out->name = level(sum[STAT_##name]);
    VPMM_STATS(STATS_SUM)
#undef STATS_SUM
    out->frees = out->frees_cache + out->frees_pages + out->frees_slab + out->frees_small;
    out->failures = out->failed_invalid_value + out->failed_invalid_pointer + out->failed_out_of_memory +
                    out->failed_address_space + out->failed_not_supported + out->failed_driver +
                    out->failed_host_memory;
    sum_calls(stats, out);
    out->slab_free_bytes = difference(out->slab_bytes, out->slab_live_bytes);
    out->reusable_bytes = difference(out->mapped_bytes, out->live_bytes);
    out->hole_bytes = difference(out->reserved_bytes, out->mapped_bytes + out->pending_unmap_bytes);
    /* What is there now has been there, whether or not a sample was taken of it. */
    out->peak_live_bytes = greater(load_relaxed_u64(&stats->peak_live), out->live_bytes);
    out->peak_mapped_bytes = greater(load_relaxed_u64(&stats->peak_mapped), out->mapped_bytes);
}
