#include "remap/decay.h"

#include "base/clock.h"
#include "remap/cut.h"
#include "remap/give_back.h"

/* What is mapped at the beginning are whole multiples of the granularity. */
void decay_init(struct decay *decay, const vpmm_config *config, size_t granularity)
{
    uint64_t pages = (uint64_t)config->initial_pages * config->page_size;
    uint64_t initial = (pages + granularity - 1) / granularity * granularity;
    store_relaxed_u64(&decay->release_threshold,
                      config->release_threshold > initial ? config->release_threshold : initial);
    store_relaxed_u64(&decay->ms, config->decay_ms);
}

/* ---- settings ---- */

static void change(struct arena *arena, _Atomic(uint64_t) *setting, uint64_t value)
{
    store_relaxed_u64(setting, value);
    fetch_add_sc_u32(&arena->decay.changes, 1); /* pairs with decay_changed */
    bell_ring(&arena->bell);
}

void decay_set_release_threshold(struct arena *arena, uint64_t bytes)
{
    change(arena, &arena->decay.release_threshold, bytes);
}

void decay_set_ms(struct arena *arena, uint64_t ms)
{
    change(arena, &arena->decay.ms, ms);
}

bool decay_changed(const struct decay *decay)
{
    return load_sc_u32(&decay->changes) != load_relaxed_u32(&decay->changes_seen);
}

/* ---- what stays ---- */

static uint64_t greater(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static uint64_t use_now(const struct arena *arena)
{
    return stats_level(arena->stats, STAT_live_bytes) + stats_level(arena->stats, STAT_cached_bytes);
}

static uint64_t floor_of(const struct arena *arena, uint64_t use)
{
    return greater(load_relaxed_u64(&arena->decay.release_threshold), use);
}

static uint64_t claim(uint64_t peak, uint64_t age_ns, uint64_t decay_ns)
{
    uint64_t left_ns = age_ns < decay_ns ? decay_ns - age_ns : 0;
    return left_ns < decay_ns / 2 ? (uint64_t)((double)peak * 2 * (double)left_ns / (double)decay_ns) : peak;
}

static uint64_t peaks_of(const struct arena *arena, uint64_t ms, uint64_t now)
{
    const struct decay *decay = &arena->decay;
    uint64_t peaks = stats_epoch_peak(arena->stats);
    for (unsigned i = 0; i < DECAY_EPOCHS; i++)
        if (decay->epoch[i].end_ns)
            peaks = greater(peaks, claim(decay->epoch[i].peak, now - decay->epoch[i].end_ns, ms * 1000000));
    return peaks;
}

static uint64_t margin_beyond(const struct decay *decay, uint64_t peaks)
{
    return decay->margin ? (uint64_t)((double)decay->margin * ((double)peaks / (double)decay->margin_of)) : 0;
}

static uint64_t target_of(const struct arena *arena, uint64_t use, uint64_t ms, uint64_t now)
{
    uint64_t peaks = ms ? peaks_of(arena, ms, now) : 0;
    return greater(floor_of(arena, use), peaks + margin_beyond(&arena->decay, peaks));
}

/* ---- growth ---- */

void decay_note_growth(struct arena *arena, uint64_t pages)
{
    unsigned shift = arena->space.units.unit_shift;
    uint64_t mapped = stats_level(arena->stats, STAT_mapped_bytes) >> shift;
    store_relaxed_u64(&arena->decay.growth, mapped << 32 | (uint32_t)((use_now(arena) >> shift) + pages));
}

static void measure_margin(struct arena *arena, uint64_t ms, uint64_t now)
{
    struct decay *decay = &arena->decay;
    uint64_t growth = exchange_relaxed_u64(&decay->growth, 0);
    if (!growth)
        return;
    unsigned shift = arena->space.units.unit_shift;
    uint64_t mapped = growth >> 32 << shift;
    decay->margin_of = greater(peaks_of(arena, ms, now), (growth & UINT32_MAX) << shift);
    decay->margin = mapped > decay->margin_of ? mapped - decay->margin_of : 0;
}

/* ---- epochs ---- */

static uint64_t epoch_ns(uint64_t ms)
{
    return greater(ms / DECAY_EPOCHS, DECAY_EPOCH_LEAST_MS) * 1000000;
}

static void give_up_spares(struct arena *arena)
{
    if (stats_level(arena->stats, STAT_mapped_bytes) > load_relaxed_u64(&arena->decay.release_threshold) &&
        cut_has_spares(arena))
        cut_flush(arena);
}

/* One that ended while the reaper slept ends now: its peak was the last one to be noted. */
static void end_epoch(struct arena *arena, uint64_t now)
{
    struct decay *decay = &arena->decay;
    uint64_t mallocs = stats_sum(arena->stats, STAT_mallocs);
    decay->newest = (decay->newest + 1) % DECAY_EPOCHS;
    decay->epoch[decay->newest].peak = stats_next_epoch(arena->stats, use_now(arena));
    decay->epoch[decay->newest].end_ns = now;
    if (mallocs == decay->mallocs)
        give_up_spares(arena);
    decay->mallocs = mallocs;
}

/* ---- a step ---- */

/*
 * False: nothing more can go, or not now (*later): who builds has the turn and goes first, or the host has no memory.
 */
static bool release_at_turn(struct arena *arena, uint64_t keep_pages, uint32_t *pages, bool *later)
{
    struct turn_place place;
    bool is_given = false;
    *later = !turn_try(&arena->turn, &place);
    if (*later)
        return false;
    *later = give_back_one(arena, keep_pages, pages, &is_given) != VPMM_SUCCESS;
    turn_leave(&arena->turn, &place);
    return is_given;
}

static unsigned give_back(struct arena *arena, uint64_t target, bool *later)
{
    unsigned shift = arena->space.units.unit_shift, n = 0;
    uint64_t keep_pages = (target >> shift) + (target & ((UINT64_C(1) << shift) - 1) ? 1 : 0);
    uint32_t pages;
    for (; n < DECAY_EXTENTS && release_at_turn(arena, keep_pages, &pages, later); n++)
        stats_add(arena->stats, STAT_decayed_bytes, (uint64_t)pages << shift);
    return n;
}

/* Whether the last try has shown that nothing more can go, and nothing has changed since. */
static bool is_in_vain(const struct arena *arena)
{
    return arena->decay.in_vain && load_sc_u64(&arena->space.publications) == arena->decay.publications;
}

/*
 * What is mapped beyond the target. True: something of it was given back.
 *
 * Memory leaves `use` before it is published. `publications` is read before `use`, so that what still counts as used
 * here is published after that number, and no try that this use made vain is taken for the last.
 */
static bool approach(struct arena *arena, uint64_t ms, uint64_t now)
{
    struct decay *decay = &arena->decay;
    uint64_t publications = load_sc_u64(&arena->space.publications);
    uint64_t use = use_now(arena), target = target_of(arena, use, ms, now);
    if (stats_level(arena->stats, STAT_mapped_bytes) <= target || is_in_vain(arena))
        return false;
    bool later;
    unsigned n = give_back(arena, target, &later);
    decay->in_vain = !n && !later && target == floor_of(arena, use);
    decay->publications = publications;
    if (n == DECAY_EXTENTS)
        decay->look_ns = now;
    else if (later)
        decay->look_ns = now + DECAY_AGAIN_US * UINT64_C(1000);
    return n > 0;
}

static bool is_due(const struct decay *decay, uint64_t ms, uint64_t now)
{
    return ms != VPMM_DECAY_NEVER && (!ms || now >= decay->look_ns);
}

bool decay_step(struct arena *arena, bool passed)
{
    struct decay *decay = &arena->decay;
    uint64_t now = clock_now_ns();
    uint32_t changes = load_sc_u32(&decay->changes);
    if (passed)
        decay->in_vain = false;
    if (changes != load_relaxed_u32(&decay->changes_seen)) {
        store_relaxed_u32(&decay->changes_seen, changes);
        decay->in_vain = false;
        decay->epoch_end_ns = decay->look_ns = now;
    }
    uint64_t ms = load_relaxed_u64(&decay->ms);
    if (!is_due(decay, ms, now))
        return false;
    if (now >= decay->epoch_end_ns) {
        end_epoch(arena, now);
        decay->epoch_end_ns = now + epoch_ns(ms);
    }
    decay->look_ns = decay->epoch_end_ns;
    measure_margin(arena, ms, now);
    return approach(arena, ms, now);
}

uint64_t decay_wait_us(const struct arena *arena)
{
    const struct decay *decay = &arena->decay;
    uint64_t ms = load_relaxed_u64(&decay->ms), now = clock_now_ns();
    uint64_t mapped = stats_level(arena->stats, STAT_mapped_bytes);
    if (ms == VPMM_DECAY_NEVER || mapped <= load_relaxed_u64(&decay->release_threshold))
        return 0;
    bool excess = mapped > use_now(arena) && !is_in_vain(arena);
    if (!excess && !cut_has_spares(arena))
        return 0;
    return now + DECAY_AGAIN_US * UINT64_C(1000) < decay->look_ns ? (decay->look_ns - now) / 1000 + 1 : DECAY_AGAIN_US;
}
