#include "base/assert.h"
#include "cache/front.h"
#include "cache/regions.h"
#include "cache/slices.h"

static const struct cached_kind *const kinds[CACHED_KINDS] = {&cached_regions, &cached_slices};

/* What so many things of a length take: regions are as many units long, slices bytes. */
static uint64_t bytes_of(const struct cache *cache, enum cached kind, uint64_t count, uint64_t length)
{
    return (count * length) << (kind == CACHED_REGIONS ? cache->front->fronts->space->units.unit_shift : 0);
}

/* ---- emptying ---- */

/* Publishes what the first `slots` slots of a bin hold, behind one fence. The thread is counted among the stream's
 * users. */
static bool flush_slots(const struct cache *cache, struct stream *stream, enum cached kind, uint32_t index,
                        uint32_t slots)
{
    const struct bin_set *set = cache_set(cache, kind);
    uint32_t number = load_relaxed_u16(&set->bin[index]);
    const struct bin *bin = bin_at(set->base, number);
    uint64_t claimed[BIN_SLOTS];
    unsigned n = 0;
    vpmm_assert(slots <= BIN_SLOTS && peek_u32(&stream->users) > 0);
    for (uint32_t i = 0; i < slots && number != EMPTY_BIN; i++) { /* which is all zeros */
        claimed[n] = load_acquire_u64(&bin->slot[i]); /* pairs with the release of who filled it with a slice */
        n += claimed[n] && kinds[kind]->claim(cache, stream, index, claimed[n]);
    }
    if (!n)
        return false;
    struct fence fence = fence_take(stream); /* after all of them were freed */
    for (unsigned i = 0; i < n; i++)
        kinds[kind]->publish(cache, claimed[i], fence);
    return true;
}

/* The noted bins, and no longer noted. */
static uint64_t take_noted(const struct cache *cache, enum cached kind)
{
    struct bin_set *set = cache_set(cache, kind);
    return set && load_sc_u64(&set->noted) ? exchange_sc_u64(&set->noted, 0) : 0;
}

static bool flush_bins(const struct cache *cache, struct stream *stream, enum cached kind, uint64_t bins)
{
    bool any = false;
    fence_sc(); /* after the store of the noted bits, before the slots: see "Emptying against filling", front.h */
    for (; bins; bins &= bins - 1)
        any |= flush_slots(cache, stream, kind, (uint32_t)__builtin_ctzll(bins), BIN_SLOTS);
    return any;
}

/*
 * A record on which a user counts is not used for another stream (retire_record): counted in first, then looked again
 * whether the cache is still attached to it.
 */
struct stream *cache_enter(struct cache *cache)
{
    struct stream *stream = load_sc_ptr(&cache->stream);
    if (!stream || !stream_enter_cached(stream))
        return NULL;
    if (load_sc_ptr(&cache->stream) == stream)
        return stream;
    stream_end_visit(stream);
    return NULL;
}

/*
 * Of an orphan (stream.h) the handle is not the stream's any more: of a default one, whose context is gone, and another
 * one is at its address.
 */
struct stream *cache_enter_again(struct cache *cache)
{
    struct stream *stream = load_sc_ptr(&cache->stream);
    if (!stream)
        return NULL;
    stream_count_in(stream); /* before the state is read: see enter_known */
    if (load_sc_u32(&stream->state) == STREAM_ACTIVE && load_sc_ptr(&cache->stream) == stream)
        return stream;
    stream_leave(stream);
    return NULL;
}

static bool flush(struct cache *cache, const uint64_t bins[CACHED_KINDS], bool mark)
{
    struct stream *stream = cache_enter(cache);
    bool any = false;
    if (!stream)
        return false;
    for (enum cached kind = 0; kind < CACHED_KINDS; kind++)
        any |= flush_bins(cache, stream, kind, bins[kind]);
    if (any && mark)
        stream_mark_by_other(cache->front->fronts->space->streams, stream);
    stream_end_visit(stream);
    return any;
}

/* The bits are taken before the stream is looked at: bits of what was cached for a later stream come with that stream.
 */
bool cache_flush(struct cache *cache, bool mark)
{
    uint64_t bins[CACHED_KINDS];
    if (!cache_noted(cache))
        return false;
    for (enum cached kind = 0; kind < CACHED_KINDS; kind++)
        bins[kind] = take_noted(cache, kind);
    return flush(cache, bins, mark);
}

/* Of a kind that this cache may have. */
static uint64_t every_bin(const struct cache *cache, enum cached kind)
{
    return cache_set(cache, kind) ? UINT64_MAX >> (64 - kinds[kind]->bins) : 0;
}

void cache_flush_every(struct cache *cache)
{
    uint64_t bins[CACHED_KINDS];
    for (enum cached kind = 0; kind < CACHED_KINDS; kind++)
        bins[kind] = every_bin(cache, kind);
    flush(cache, bins, true);
}

bool cache_noted(const struct cache *cache)
{
    const struct bin_set *slices = cache_set(cache, CACHED_SLICES);
    return load_sc_u64(&cache->regions.noted) || (slices && load_sc_u64(&slices->noted));
}

/*
 * Noted or not: another thread may have taken the bits and be about to look. What it claims is in its hands; what it
 * does not find any more is nowhere.
 */
void cache_empty(struct cache *cache, struct stream *stream)
{
    for (enum cached kind = 0; kind < CACHED_KINDS; kind++) {
        take_noted(cache, kind);
        flush_bins(cache, stream, kind, every_bin(cache, kind));
    }
}

bool cache_holds(const struct cache *cache, enum cached kind, uint64_t bins, uint64_t slot)
{
    const struct bin_set *set = cache_set(cache, kind);
    for (bins &= set ? load_sc_u64(&set->noted) : 0; bins; bins &= bins - 1) {
        const struct bin *bin = set_bin(set, (uint32_t)__builtin_ctzll(bins));
        for (uint32_t i = 0; i < load_relaxed_u16(&bin->count); i++)
            if (load_relaxed_u64(&bin->slot[i]) == slot)
                return true;
    }
    return false;
}

/* ---- the owner's: bins ---- */

void cache_set_count(struct cache *cache, enum cached kind, struct bin *bin, uint32_t count)
{
    uint64_t before = load_relaxed_u16(&bin->count), length = load_relaxed_u32(&bin->length);
    vpmm_assert(front_is_own(cache->front) && before <= BIN_SLOTS && count <= BIN_SLOTS);
    cache->front->stock += bytes_of(cache, kind, count - before, length); /* down: it wraps */
    front_set_floor(cache->front);
    store_relaxed_u16(&bin->count, (uint16_t)count);
}

bool cache_is_bare(const struct cache *cache)
{
    const struct bin_set *slices = cache_set(cache, CACHED_SLICES);
    return !cache->regions.own && (!slices || !slices->own);
}

static void return_bins_of(struct cache *cache, enum cached kind)
{
    struct bin_set *set = cache_set(cache, kind);
    for (; set && set->own; set->own &= set->own - 1) {
        uint32_t i = (uint32_t)__builtin_ctzll(set->own), number = load_relaxed_u16(&set->bin[i]);
        vpmm_assert(number != EMPTY_BIN);
        cache_set_count(cache, kind, set_bin(set, i), 0);
        store_relaxed_u16(&set->bin[i], EMPTY_BIN);
        bins_keep(&cache->front->fronts->bins[kind], &cache->front->bins[kind], number);
    }
}

void cache_return_bins(struct cache *cache)
{
    for (enum cached kind = 0; kind < CACHED_KINDS; kind++)
        return_bins_of(cache, kind);
}

/* Published, so that nothing stands in the bins that another cache is to have. False: its stream is CLOSING. */
static bool take_bins_back(struct cache *cache)
{
    struct stream *stream = load_relaxed_ptr(&cache->stream);
    if (!stream || cache_is_bare(cache) || !stream_enter_cached(stream))
        return false;
    cache_empty(cache, stream);
    stream_mark_by_other(cache->front->fronts->space->streams, stream);
    stream_end_visit(stream);
    cache_return_bins(cache);
    return true;
}

/* The caches that nobody has touched since the reaper's last look give their bins. True: there was one. */
static bool reclaim_idle(struct cache *for_whom)
{
    bool any = false;
    for (struct cache *cache = load_relaxed_ptr(&for_whom->front->caches); cache; cache = cache->next)
        if (cache != for_whom && load_relaxed_u32(&cache->idle))
            any |= take_bins_back(cache);
    return any;
}

/* The next one, around, gives its bins. */
static void reclaim_next(struct cache *for_whom)
{
    struct front *front = for_whom->front;
    struct cache *first = load_relaxed_ptr(&front->caches);
    struct cache *start = front->reclaimed ? front->reclaimed : first, *cache = start;
    do
        cache = cache->next ? cache->next : first;
    while ((cache == for_whom || !take_bins_back(cache)) && cache != start);
    front->reclaimed = cache;
}

static uint32_t spare_or_new(struct bins *store, struct bin_stock *stock)
{
    uint32_t bin = bins_reuse(store, stock);
    if (bin == EMPTY_BIN && stock->taken < FRONT_BINS)
        stock->taken += (bin = bins_new(store)) != EMPTY_BIN;
    vpmm_assert(stock->taken <= FRONT_BINS && (bin == EMPTY_BIN || stock->taken > 0));
    return bin;
}

static uint32_t find_bin(struct cache *cache, enum cached kind)
{
    struct bins *store = &cache->front->fronts->bins[kind];
    struct bin_stock *stock = &cache->front->bins[kind];
    uint32_t bin = spare_or_new(store, stock);
    if (bin == EMPTY_BIN && reclaim_idle(cache))
        bin = bins_reuse(store, stock);
    if (bin == EMPTY_BIN) {
        reclaim_next(cache);
        bin = bins_reuse(store, stock);
    }
    return bin;
}

struct bin *cache_make_bin(struct cache *cache, enum cached kind, uint32_t index)
{
    struct bin_set *set = cache_set(cache, kind);
    if (load_relaxed_u16(&set->bin[index]) != EMPTY_BIN)
        return set_bin(set, index);
    uint32_t fresh = find_bin(cache, kind);
    if (fresh == EMPTY_BIN)
        return NULL;
    struct bin *bin = bin_at(set->base, fresh);
    store_relaxed_u16(&bin->count, 0);
    kinds[kind]->begin(bin, index);
    store_relaxed_u16(&set->bin[index], (uint16_t)fresh);
    set->own |= UINT64_C(1) << index;
    return bin;
}

/* ---- the owner's: noting ---- */

void cache_list_noted(struct cache *cache)
{
    tree_insert(&cache->front->fronts->noted_caches, cache->index);
    bell_ring(cache->front->fronts->space->bell);
}

/* After the slots' and the words' stores. */
void cache_note_filled(struct cache *cache, enum cached kind, uint32_t index)
{
    struct bin_set *set = cache_set(cache, kind);
    vpmm_assert(index < kinds[kind]->bins && peek_u16(&set->bin[index]) != EMPTY_BIN);
    if (!fetch_or_sc_u64(&set->noted, UINT64_C(1) << index))
        cache_list_noted(cache);
}

/* CACHED to LIVE again, of the newest slot. False: another thread has taken it out of the cache. */
static bool undo_give(struct cache *cache, enum cached kind, uint32_t index)
{
    const struct bin_set *set = cache_set(cache, kind);
    struct bin *bin = set_bin(set, index);
    uint64_t requested, bytes = bytes_of(cache, kind, 1, load_relaxed_u32(&bin->length));
    vpmm_assert(peek_u16(&bin->count) > 0);
    uint32_t count = load_relaxed_u16(&bin->count) - 1u;
    if (!kinds[kind]->undo(cache, index, load_relaxed_u64(&bin->slot[count]), &requested))
        return false;
    store_relaxed_u16(&bin->count, (uint16_t)count);
    front_uncount_free(cache->front, bytes, requested);
    return true;
}

/*
 * The handle is looked at after the word was made CACHED, and the releasing thread looks into the cache after it has
 * closed it (all sequentially consistent): either it finds what was freed, or this thread finds the cache closed.
 */
bool cache_note(struct cache *cache, enum cached kind, uint32_t index)
{
    if (load_sc_ptr(&cache->handle) == CACHE_CLOSED)
        return !undo_give(cache, kind, index);
    cache_note_filled(cache, kind, index);
    return true;
}

/* ---- the owner's: making room ---- */

/* Who moves addresses between slots notes the bin again. */
bool cache_flush_oldest(struct cache *cache, enum cached kind, uint32_t index, uint32_t slots)
{
    struct bin *bin = set_bin(cache_set(cache, kind), index);
    uint32_t count = load_relaxed_u16(&bin->count);
    vpmm_assert(slots <= count);
    bool any = flush_slots(cache, load_relaxed_ptr(&cache->stream), kind, index, slots);
    for (uint32_t i = slots; i < count; i++)
        store_release_u64(&bin->slot[i - slots], load_relaxed_u64(&bin->slot[i])); /* pairs as in slices_give_newest */
    cache_set_count(cache, kind, bin, count - slots);
    if (count > slots)
        cache_note_filled(cache, kind, index);
    return any;
}

/* The older half of each bin leaves. True: something was published. */
static bool halve(struct cache *cache, enum cached kind)
{
    const struct bin_set *set = cache_set(cache, kind);
    bool any = false;
    for (uint64_t bins = set ? set->own : 0; bins; bins &= bins - 1) {
        uint32_t i = (uint32_t)__builtin_ctzll(bins), count = load_relaxed_u16(&set_bin(set, i)->count);
        if (count)
            any |= cache_flush_oldest(cache, kind, i, (count + 1) / 2);
    }
    return any;
}

/* The record, with the thread counted in, of a cache that has bins; NULL: there is nothing to be done in it. */
static struct stream *enter_filled(struct cache *cache)
{
    return cache_is_bare(cache) ? NULL : cache_enter(cache);
}

void cache_drop_stale_all(struct front *front)
{
    for (struct cache *cache = load_relaxed_ptr(&front->caches); cache; cache = cache->next) {
        struct stream *stream = enter_filled(cache);
        for (uint64_t bins = stream ? cache->regions.own : 0; bins; bins &= bins - 1) {
            uint32_t i = (uint32_t)__builtin_ctzll(bins);
            if (load_relaxed_u16(&set_bin(&cache->regions, i)->count))
                regions_drop_stale(cache, i);
        }
        if (stream)
            stream_end_visit(stream);
    }
}

void cache_halve_all(struct cache *given)
{
    struct streams *streams = given->front->fronts->space->streams;
    for (struct cache *cache = load_relaxed_ptr(&given->front->caches); cache; cache = cache->next) {
        struct stream *stream = enter_filled(cache);
        bool any = false;
        if (!stream)
            continue;
        for (enum cached kind = 0; kind < CACHED_KINDS; kind++)
            any |= halve(cache, kind);
        if (any && cache == given)
            stream_mark(streams, stream);
        else if (any)
            stream_mark_by_other(streams, stream);
        stream_end_visit(stream);
    }
}

/* ---- how much a front may hold ---- */

/* Of one cache's slots that count. */
static uint64_t bytes_in_bins(const struct cache *cache)
{
    uint64_t bytes = 0;
    for (enum cached kind = 0; kind < CACHED_KINDS; kind++) {
        const struct bin_set *set = cache_set(cache, kind);
        for (uint32_t i = 0; set && i < kinds[kind]->bins; i++) {
            const struct bin *bin = bin_at(set->base, peek_u16(&set->bin[i]));
            bytes += bytes_of(cache, kind, peek_u16(&bin->count), peek_u32(&bin->length));
        }
    }
    return bytes;
}

/* For assertions, by the front's thread: what front_held says is what its bins have. */
static bool stock_is_right(const struct front *front)
{
    uint64_t bytes = 0;
    for (const struct cache *cache = peek_ptr(&front->caches); cache; cache = cache->next)
        bytes += bytes_in_bins(cache);
    return bytes == front->stock - peek_u64(&front->tally.live_bytes);
}

/*
 * A front's limit. Small while the pool is taking shape: memory in a cache is not merged with what lies beside it, and
 * is found by a search only when a build has flushed it, so much of it makes a pool hold a few hundredths more (with
 * 64 MiB, and moves no matter, 6.1 % above what is in use by one thread after four passes, for 4.5: policy.py, nine
 * scales). Each time that the thread has freed so much and no part of the pool was mapped, it doubles: for a thread in
 * a steady state nothing is gained by giving memory back. (Where the first time brought it to the last limit, and a
 * stream that several threads use brought it there at once, a training with PyTorch held 1.06 times what it used, for
 * 1.03 now, and a server's generation 1.16 with three threads, for 1.11: both allocate tens of thousands of times
 * between two that grow.)
 */
enum { STEADY_FREES = 16384 };

void front_adjust_limit(struct front *front)
{
    const struct fronts *fronts = front->fronts;
    vpmm_assert(front_is_own(front));
    vpmm_assert_walk(stock_is_right(front));
    uint32_t rebuilds = load_relaxed_u32(fronts->space->rebuilds);
    uint64_t frees = load_relaxed_u64(&front->tally.frees) + front->refused;
    if (!front->limit || rebuilds != front->rebuilds) {
        front->rebuilds = rebuilds;
        front->steady_at = frees + STEADY_FREES;
        front->limit = fronts->first_limit;
    }
    for (; frees >= front->steady_at && front->limit < fronts->last_limit; front->steady_at += STEADY_FREES)
        front->limit = front->limit < fronts->last_limit / 2 ? 2 * front->limit : fronts->last_limit;
    front_set_floor(front);
}

void front_set_floor(struct front *front)
{
    uint64_t full = front->stock - front->limit;
    uint64_t least = front->tally.told[PEAK_LIVE] - load_relaxed_u64(&front->tally.part.slack);
    front->floor = (int64_t)full > (int64_t)least ? full : least;
}

void front_look(struct front *front)
{
    stats_look(front->fronts->space->stats, &front->tally);
    front_set_floor(front);
}

void front_tell_of_free(struct front *front, uint64_t bytes, uint64_t requested)
{
    stats_tell(front->fronts->space->stats, &front->tally, (uint64_t[PEAKS]){bytes, requested});
    front_set_floor(front);
}
