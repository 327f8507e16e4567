/*
 * stats.h - counters and levels, striped over threads.
 *
 * A thread adds to its stripe with relaxed operations; a reader sums the stripes. The process's first STATS_OWN_STRIPES
 * threads each have one for good, so that their additions need not be atomic, only the loads and stores in them (a
 * malloc and a free past the front cache make a dozen). Later threads share the others. Levels are kept as differences,
 * so that a stripe may be negative (wrapped) while the sum is right.
 *
 *   slab_free = slab - slab_live
 *   reusable = mapped + parked - live    hole = reserved - mapped - parked - pending (derived, never stored)
 *   frees, unwound, failures, driver_calls, driver_errors = the sums of their parts  (likewise)
 *
 * A tally is what one thread's front cache counts. It has one writer, so that its additions need not be atomic, only
 * the loads and stores in them.
 *
 * Peaks, of live_bytes and of requested_bytes. To add up all threads' counts whenever one of them is at a new height
 * would cost more than a hit, and a sum that is read while others count is of no instant. So there is one more number
 * of each level, which all share: what has been told. Its changes are in one order, so it has a highest value.
 *
 *   part      a tally, or a stripe: what one thread counts of the level
 *   untold    of a part: what it is above what it has told, or below. |untold| <= its slack, but within a call
 *   level     = told + the sum of untold over all parts                               (1), at every instant
 *   others    of a part: the untold of all others, as it was when its thread last added all parts up; |others| <= the
 *             sum of their slacks then
 *   seen      = told + others + the untold of the thread that looks                   (2)
 *   peak      = the highest `seen` of any look
 *
 * By (1) and (2) `seen` and the level differ by the others' untold, now and then; and who tells looks as well. Hence
 *
 *   |peak - the highest level| <= twice the sum of all parts' slacks                  (3)
 *
 * whatever is handed from thread to thread: the tally of one then rises, and that of the other falls, without end, but
 * each tells of it. A thread that has ended leaves its tally, with what is untold in it, to the next one. The call that
 * a thread is in adds its request to its slack. Where one thread allocates a look adds all parts up, and its tallies,
 * of pages and of pieces, share the room below the peak: what they may rise to their marks is together no more. So both
 * peaks are exact. Only rising is looked at in requested_bytes: where several threads allocate, and what is live is
 * replaced by what is as long and was asked for as less, the peak may be higher than (3) by what rounding adds to that.
 *
 *   slack of a tally  <= the limit of its front cache (cache_bytes)                   (4)
 *   slack of a stripe <= SLACK_OF_STRIPE
 *
 * A look adds all parts up if SUM_NS have passed since the part's last one did. What stands still for so long does not
 * make the peak wrong, however much of it is untold.
 *
 * A slack is SLACK_LEAST at first. It doubles when less than TELL_NS have passed since its part last told, and halves
 * when many times that have: a thread writes to what all share about once in TELL_NS at most, and what it allocates and
 * frees again in a few TELL_NS is what a peak can miss of it. The limit is for those that do nothing else.
 *
 * A hit only compares: what it makes of a tally with the tally's marks, above which a look is due. mark = told + slack,
 * or less: where `seen` was to be above the peak. Where several threads allocate it is at least LEAST_RISE above the
 * tally, as far as the slack goes: one that hands memory over is at a new height in each malloc. A free compares with a
 * floor, below which it has to tell (front.h).
 *
 * Who reads the statistics, and each pass, adds all parts up and raises the peak to that; at most to told + all slacks,
 * for a sum that is read while memory is handed from thread to thread may be far above any level that there was.
 */
#ifndef VPMM_LIB_STATS_H
#define VPMM_LIB_STATS_H

#include "base/atomic.h"

#include <vpmm/observe.h>
#include <vpmm/vpmm.h>

enum { STATS_STRIPES = 64, STATS_OWN_STRIPES = 16 };

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

enum peak { PEAK_LIVE, PEAK_REQUESTED, PEAKS };

enum {
    SLACK_LEAST = 4 << 20,
    SLACK_OF_STRIPE = 64 << 20,
    TELL_NS = 16000,
    SUM_NS = 100000,
    LEAST_RISE = 1 << 20,
};

struct stats_part {
    _Atomic(uint64_t) slack; /* of a stripe 0 at first: SLACK_LEAST */
    _Atomic(uint64_t) told_at_ns;
    _Atomic(uint64_t) others[PEAKS]; /* what all other parts had untold, */
    _Atomic(uint64_t) summed_at_ns;  /* then */
};

struct stats_tally {
    struct stats_tally *next;         /* constant once it has joined, as are the next two */
    enum stat live_stat, cached_stat; /* the levels that it has parts of */
    _Atomic(uint64_t) mark[PEAKS]; /* written by its thread, also in looks of its other one, and by stats_reset_peak */
    uint64_t told[PEAKS];          /* its thread's, as is the next. Of live_bytes whichever level they are of */
    uint64_t slack_most;
    struct stats_part part;
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
        _Atomic(uint64_t) untold[PEAKS];
        struct stats_part part;
    } stripe[STATS_STRIPES];
    struct {
        _Alignas(128) _Atomic(uint64_t) told;
        _Atomic(uint64_t) peak;
    } shared[PEAKS];
    _Alignas(128) _Atomic(void *) tallies; /* a list that only grows */
    _Atomic(uint64_t) allocating;          /* a bit for each stripe whose threads have allocated or freed */
    _Atomic(uint64_t) epoch_live;          /* as the peak of live, since the latest stats_next_epoch */
    _Atomic(uint64_t) peak_mapped;
};

/* The calling thread's, 1 + its number; 0: not taken yet. */
extern _Thread_local unsigned stats_own_stripe __attribute__((tls_model("initial-exec")));

unsigned stats_take_stripe(void);

static inline unsigned stats_stripe(void)
{
    return stats_own_stripe ? stats_own_stripe - 1 : stats_take_stripe();
}

/* To a number of the calling thread's stripe, which is the `own`th. */
static inline void stripe_add(unsigned own, _Atomic(uint64_t) *number, uint64_t amount)
{
    if (own < STATS_OWN_STRIPES)
        add_alone_u64(number, amount);
    else
        fetch_add_relaxed_u64(number, amount);
}

static inline void stats_add(struct stats *stats, enum stat which, uint64_t amount)
{
    unsigned own = stats_stripe();
    stripe_add(own, &stats->stripe[own].value[which], amount);
}

static inline void stats_sub(struct stats *stats, enum stat which, uint64_t amount)
{
    stats_add(stats, which, 0 - amount);
}

static inline void stats_count(struct stats *stats, enum stat which)
{
    stats_add(stats, which, 1);
}

uint64_t stats_sum(const struct stats *, enum stat);

/* The same of a level: a sum that the reading tears to below zero is 0. */
uint64_t stats_level(const struct stats *, enum stat);

static inline void stats_count_call(struct stats *stats, enum driver_entry entry, bool failed)
{
    unsigned own = stats_stripe();
    stripe_add(own, &stats->stripe[own].calls[entry], 1);
    if (failed)
        stripe_add(own, &stats->stripe[own].errors[entry], 1);
}

/* Of a malloc that has asked the driver. */
void stats_note_latency(struct stats *, uint64_t ns);

/* A malloc or free that answers an error. */
void stats_count_failure(struct stats *, vpmm_status);

/*
 * The tally is read from here on, for as long as the statistics are. The calling thread is one that allocates. `most`:
 * the limit of its slack.
 */
void stats_join(struct stats *, struct stats_tally *, uint64_t most);

/*
 * By the tally's thread, also after a malloc that went past its cache: looks for a new peak, tells if too much is
 * untold, and sets the marks.
 */
void stats_look(struct stats *, struct stats_tally *);

/* The same by a thread that has no tally. */
void stats_look_past_tallies(struct stats *);

/* The same, before so many bytes of each level are freed: tells of it in any case. */
void stats_tell(struct stats *, struct stats_tally *, const uint64_t freed[PEAKS]);

/* Raises the peaks of live and requested to the present levels, all parts added up. Any thread. */
void stats_note_peaks(struct stats *);

/* The most that was live in an epoch (decay.h): in the present one so far; and in the one that ends here, with `now`.
 */
uint64_t stats_epoch_peak(const struct stats *);
uint64_t stats_next_epoch(struct stats *, uint64_t now);

/* Whether the threads of one stripe alone have allocated or freed: all parts are added up in each look. */
static inline bool stats_is_alone(const struct stats *stats)
{
    uint64_t allocating = load_relaxed_u64(&stats->allocating);
    return !(allocating & (allocating - 1));
}

/* The marks begin again at the present levels. */
void stats_reset_peak(struct stats *, enum peak);
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
