/*
 * stats.h - counters and levels, striped over threads.
 *
 * A thread adds to its own stripe with relaxed operations; a reader sums the stripes. A stripe may be shared by
 * threads beyond STATS_STRIPES, hence atomic additions. Levels are kept as differences, so that a stripe may be
 * negative (wrapped) while the sum is right.
 *
 *   slab_free = slab - slab_live
 *   reusable = mapped - live             hole = reserved - mapped - pending          (derived, never stored)
 *   frees, failures, driver_calls, driver_errors = the sums of their parts           (likewise)
 *
 * A tally is what one thread's front cache counts. It has one writer, so that its additions need not be atomic, only
 * the loads and stores in them.
 */
#ifndef VPMM_LIB_STATS_H
#define VPMM_LIB_STATS_H

#include "base/atomic.h"

#include <vpmm/observe.h>
#include <vpmm/vpmm.h>

enum { STATS_STRIPES = 64 };

enum stat {
#define STAT_INDEX(name, kind, help) STAT_##name,
    VPMM_STATS(STAT_INDEX)
#undef STAT_INDEX
        STATS_COUNT
};

enum driver_entry {
#define ENTRY_INDEX(name, version, parameters, arguments) ENTRY_##name,
    VPMM_DRIVER_ENTRIES(ENTRY_INDEX)
#undef ENTRY_INDEX
};

struct stats_tally {
    struct stats_tally *next;          /* constant once it has joined, as are the next two */
    enum stat live_stat, cached_stat;  /* the levels that it has parts of */
    _Atomic(uint64_t) hits, frees;     /* mallocs and frees by the front cache, */
    _Atomic(uint64_t) neighbour_hits;  /* and mallocs by other threads' */
    _Atomic(uint64_t) live_bytes;      /* a difference: what these made live, which left cached_bytes */
    _Atomic(uint64_t) requested_bytes; /* a difference */
    _Atomic(uint64_t) driver_calls;    /* of cuStreamGetId */
};

struct stats {
    struct {
        _Alignas(128) _Atomic(uint64_t) value[STATS_COUNT];
        _Atomic(uint64_t) calls[VPMM_DRIVER_CALLS], errors[VPMM_DRIVER_CALLS]; /* of driver entries */
        _Atomic(uint64_t) latency[VPMM_LATENCY_BUCKETS], latency_ns;           /* of mallocs that asked the driver */
    } stripe[STATS_STRIPES];
    _Atomic(void *) tallies;      /* a list that only grows */
    _Atomic(uint64_t) allocating; /* a bit for each stripe whose threads have allocated or freed */
    _Atomic(uint64_t) peak_live, peak_mapped;
    _Atomic(uint64_t) epoch_live; /* as peak_live, since the latest stats_next_epoch */
};

unsigned stats_stripe(void);       /* the calling thread's */
unsigned stats_stripes_used(void); /* stripes that any thread of the process has taken */

static inline void stats_add(struct stats *stats, enum stat which, uint64_t amount)
{
    fetch_add_relaxed_u64(&stats->stripe[stats_stripe()].value[which], amount);
}

static inline void stats_sub(struct stats *stats, enum stat which, uint64_t amount)
{
    fetch_sub_relaxed_u64(&stats->stripe[stats_stripe()].value[which], amount);
}

static inline void stats_count(struct stats *stats, enum stat which)
{
    stats_add(stats, which, 1);
}

uint64_t stats_sum(const struct stats *, enum stat);

/* The same of a level, which is not below zero: see stats_read. */
uint64_t stats_level(const struct stats *, enum stat);

void stats_count_call(struct stats *, enum driver_entry, bool failed);

/* Of a malloc that has asked the driver. */
void stats_note_latency(struct stats *, uint64_t ns);

/* A malloc or free that answers an error. */
void stats_count_failure(struct stats *, vpmm_status);

/* The tally is read from here on, for as long as the statistics are. The calling thread is one that allocates. */
void stats_join(struct stats *, struct stats_tally *);

/* Raises peak_live to the present level: for a tally that is higher than it was. */
void stats_note_peak_live(struct stats *);

/* The most that was live in an epoch (decay.h): in the present one so far; and in the one that ends here, with `now`.
 */
uint64_t stats_epoch_peak(const struct stats *);
uint64_t stats_next_epoch(struct stats *, uint64_t now);

/* Whether the threads of one stripe alone have allocated or freed: then peak_live is exact. */
static inline bool stats_is_alone(const struct stats *stats)
{
    uint64_t allocating = load_relaxed_u64(&stats->allocating);
    return !(allocating & (allocating - 1));
}

/* The marks begin again at the present levels. */
void stats_reset_peak_live(struct stats *);
void stats_reset_peak_mapped(struct stats *);

/* requested_bytes, and live_bytes or another level, of one allocation that begins or ends. */
void stats_begin_live(struct stats *, enum stat live_stat, uint64_t live, uint64_t requested);
void stats_end_live(struct stats *, enum stat live_stat, uint64_t live, uint64_t requested);

/* Raises the peak to the present level. */
void stats_note_peak_mapped(struct stats *);

/* Everything but largest_free_bytes and largest_hole_bytes, which the caller knows. */
void stats_read(const struct stats *, vpmm_stats *out);
void stats_read_calls(const struct stats *, vpmm_call_counts out[VPMM_DRIVER_CALLS]);
void stats_read_latency(const struct stats *, vpmm_latency *out);

#endif
