#include "front.h"

#include "slices.h"

/* ---- emptying ---- */

/* Takes the region of a slot out of the cache, if it is still there. */
static bool claim_slot(const struct fronts *fronts, const struct stream *stream, CUdeviceptr slot, uint64_t longer_than,
                       struct region *region)
{
    uint64_t page;
    if (!slot || !page_of_address(&fronts->space->pages, slot, &page))
        return false;
    struct page *first = page_at(&fronts->space->pages, page);
    uint64_t word = load_sc_u64(&first->word); /* after the noted bits: see front.h */
    if (word_state(word) != PAGE_CACHED || word_pages(word) <= longer_than ||
        load_relaxed_u32(&first->fence_stream) != stream->slot || !page_take(first, word))
        return false;
    *region = (struct region){page, word_pages(word), FENCE_PASSED, false};
    stats_sub(fronts->space->stats, fronts->space->cached_stat, region->pages << fronts->space->pages.page_shift);
    return true;
}

/* Publishes what the first `slots` slots of a bin hold, behind one fence. The thread is counted among the stream's
 * users. */
static bool flush_slots(struct fronts *fronts, struct stream *stream, struct cache_bin *bin, uint32_t slots)
{
    struct region region[CACHE_SLOTS];
    unsigned taken = 0;
    for (uint32_t i = 0; i < slots; i++)
        taken += claim_slot(fronts, stream, load_relaxed_u64(&bin->slot[i]), 0, &region[taken]);
    if (!taken)
        return false;
    struct fence fence = fence_take(stream); /* after all of them were freed */
    for (unsigned i = 0; i < taken; i++) {
        region[i].fence = fence;
        region_publish(fronts->space, region[i]);
    }
    return true;
}

static bool flush_bins(struct fronts *fronts, struct stream *stream, struct cache *cache, uint64_t bins)
{
    bool any = false;
    for (; bins; bins &= bins - 1)
        any |= flush_slots(fronts, stream, &cache->bin[__builtin_ctzll(bins)], CACHE_SLOTS);
    return any;
}

/* The stream's last point, unless its handle is no longer to be used. */
static void mark_if_active(struct fronts *fronts, struct stream *stream)
{
    if (load_sc_u32(&stream->state) == STREAM_ACTIVE)
        stream_mark(fronts->space->streams, stream);
}

/*
 * The record of the cache with this thread counted among its users, until stream_leave; NULL: it is attached to none. A
 * record on which a user counts is not used for another stream (retire_record): counted in first, then looked again
 * whether the cache is still attached to it.
 */
static struct stream *enter_stream(struct cache *cache)
{
    struct stream *stream = load_sc_ptr(&cache->stream);
    if (!stream)
        return NULL;
    fetch_add_sc_u32(&stream->users, 1);
    if (load_sc_ptr(&cache->stream) == stream)
        return stream;
    stream_leave(stream);
    return NULL;
}

/* The bits are taken before the stream is looked at: bits of what was cached for a later stream come with that stream.
 */
bool cache_flush(struct cache *cache, bool mark)
{
    struct fronts *fronts = cache->front->fronts;
    if (!cache_noted(cache))
        return false;
    uint64_t bins = load_sc_u64(&cache->noted) ? exchange_sc_u64(&cache->noted, 0) : 0;
    uint64_t slice_bins = slices_take_noted(cache);
    struct stream *stream = enter_stream(cache);
    if (!stream)
        return false;
    bool any = flush_bins(fronts, stream, cache, bins);
    any |= slices_flush(cache, stream, slice_bins);
    if (any && mark)
        mark_if_active(fronts, stream);
    stream_leave(stream);
    return any;
}

bool cache_noted(const struct cache *cache)
{
    return load_sc_u64(&cache->noted) || slices_noted(cache);
}

/* The owner's, other than by a hit: the stock changes with it. */
static void set_count(struct cache *cache, struct cache_bin *bin, uint32_t count)
{
    const struct pages *pages = &cache->front->fronts->space->pages;
    uint64_t before = load_relaxed_u32(&bin->count);
    cache->front->stock += ((count - before) * load_relaxed_u32(&bin->pages)) << pages->page_shift; /* down: it wraps */
    store_relaxed_u32(&bin->count, count);
}

/*
 * Noted or not: another thread may have taken the bits and be about to look. What it claims is in its hands; what it
 * does not find any more is nowhere.
 */
void cache_empty(struct cache *cache, struct stream *stream)
{
    store_sc_u64(&cache->noted, 0);
    flush_bins(cache->front->fronts, stream, cache, UINT64_MAX);
    slices_take_noted(cache);
    slices_flush(cache, stream, UINT64_MAX);
}

/* The owner's. */
void cache_forget(struct cache *cache)
{
    for (int i = 0; i < CACHE_BINS; i++)
        set_count(cache, &cache->bin[i], 0);
    slices_forget(cache);
}

/* ---- taking ---- */

/* The region is not, or no more, in the counts of slots. */
static void count_taken(struct front *front, _Atomic(uint64_t) *hits, uint64_t length, size_t bytes)
{
    uint64_t size = length << front->fronts->space->pages.page_shift;
    add_alone_u64(hits, 1);
    add_alone_u64(&front->tally.requested_bytes, bytes);
    add_alone_u64(&front->tally.live_bytes, size);
    front->stock += size;
    if ((int64_t)(load_relaxed_u64(&front->tally.live_bytes) - front->live_noted) > 0)
        front_note_peak(front);
}

/* Wait-free: each slot is tried once. */
CUdeviceptr cache_take(struct cache *cache, uint64_t length, size_t bytes)
{
    const struct pages *pages = &cache->front->fronts->space->pages;
    struct cache_bin *bin = &cache->bin[cache_bin_of(cache, length)];
    uint32_t count = load_relaxed_u32(&bin->pages) == length ? load_relaxed_u32(&bin->count) : 0;
    if (!count)
        return 0;
    CUdeviceptr address = 0;
    struct page *first;
    bool taken = false;
    while (count && !taken) {
        address = load_relaxed_u64(&bin->slot[--count]);
        first = page_at_address(pages, address);
        taken = cache_exchange(cache, first, length); /* not so: it was stolen */
    }
    set_count(cache, bin, count);
    cache_touch(cache);
    if (!taken)
        return 0;
    store_relaxed_u64(&first->requested, bytes);
    count_taken(cache->front, &cache->front->tally.hits, length, bytes);
    return address;
}

/* A slot may be left from longer ago than its bin's length: what stands there now may be short. */
static bool take_from_bin(struct cache *cache, struct cache_bin *bin, const struct stream *stream, uint64_t longer_than,
                          struct region *region)
{
    const struct fronts *fronts = cache->front->fronts;
    bool taken = false;
    uint32_t count = load_relaxed_u32(&bin->count);
    while (count && !taken)
        taken = claim_slot(fronts, stream, load_relaxed_u64(&bin->slot[--count]), longer_than, region);
    set_count(cache, bin, count);
    return taken;
}

bool cache_take_longer(struct cache *cache, uint64_t length, struct region *region)
{
    struct stream *stream = load_relaxed_ptr(&cache->stream);
    for (;;) { /* each turn empties a bin or ends */
        struct cache_bin *best = NULL;
        for (uint64_t bins = load_relaxed_u64(&cache->noted); bins; bins &= bins - 1) {
            struct cache_bin *bin = &cache->bin[__builtin_ctzll(bins)];
            if (load_relaxed_u32(&bin->count) && load_relaxed_u32(&bin->pages) > length &&
                (!best || load_relaxed_u32(&bin->pages) < load_relaxed_u32(&best->pages)))
                best = bin;
        }
        if (!best)
            return false;
        if (take_from_bin(cache, best, stream, length, region)) {
            region->fence = fence_take(stream);
            return true;
        }
    }
}

/* ---- filling ---- */

/*
 * A front's limit. Small while the pool is taking shape: memory in a cache is not merged with what lies beside it, and
 * is found by a search only when a build has flushed it, so much of it makes a pool that grows hold a few hundredths
 * more. A thread that has freed so many regions since the pool last grew is in a steady state, in which nothing is
 * gained by giving memory back; and what a thread frees on a stream that others use too, they are about to ask for.
 */
enum { STEADY_FREES = 16384 };

void front_adjust_limit(struct front *front, bool shared)
{
    const struct fronts *fronts = front->fronts;
    uint32_t growths = load_relaxed_u32(fronts->space->growths);
    uint64_t frees = load_relaxed_u64(&front->tally.frees) + front->refused;
    if (!front->limit || growths != front->growths) {
        front->growths = growths;
        front->steady_at = frees + STEADY_FREES;
        front->limit = fronts->first_limit;
    }
    if (shared || frees >= front->steady_at)
        front->limit = fronts->last_limit;
}

static bool is_cached_for(const struct cache *cache, CUdeviceptr address, uint64_t pages)
{
    const struct page *first = page_at_address(&cache->front->fronts->space->pages, address);
    return first && word_is(load_acquire_u64(&first->word), PAGE_CACHED, pages) &&
           load_relaxed_u32(&first->fence_stream) == cache->slot;
}

static void note_if_needed(struct cache *cache, const struct cache_bin *bin)
{
    uint64_t bit = UINT64_C(1) << (bin - cache->bin);
    if (load_relaxed_u32(&bin->count) && !(fetch_or_sc_u64(&cache->noted, bit) & bit)) /* after the slots' stores */
        bell_ring(cache->front->fronts->space->bell);
}

/* The descriptors of a bin's newest slots, which other threads' processors have: all at once, not one after another. */
static void prefetch_newest(const struct pages *pages, const struct cache_bin *bin, uint32_t slots)
{
    for (uint32_t i = load_relaxed_u32(&bin->count); i-- && slots; slots--)
        __builtin_prefetch(page_at_address(pages, load_relaxed_u64(&bin->slot[i])), 1);
}

/* Forgets the slots whose regions others have taken. */
static void drop_stale(struct cache *cache, struct cache_bin *bin)
{
    uint32_t pages = load_relaxed_u32(&bin->pages), kept = 0;
    prefetch_newest(&cache->front->fronts->space->pages, bin, CACHE_SLOTS);
    for (uint32_t i = 0; i < load_relaxed_u32(&bin->count); i++) {
        CUdeviceptr address = load_relaxed_u64(&bin->slot[i]);
        if (is_cached_for(cache, address, pages))
            store_relaxed_u64(&bin->slot[kept++], address);
    }
    set_count(cache, bin, kept);
    note_if_needed(cache, bin);
}

/* Publishes the oldest so many of a bin. */
static bool flush_oldest(struct cache *cache, struct cache_bin *bin, uint32_t slots)
{
    uint32_t count = load_relaxed_u32(&bin->count);
    bool any = flush_slots(cache->front->fronts, load_relaxed_ptr(&cache->stream), bin, slots);
    for (uint32_t i = slots; i < count; i++)
        store_relaxed_u64(&bin->slot[i - slots], load_relaxed_u64(&bin->slot[i]));
    set_count(cache, bin, count - slots);
    note_if_needed(cache, bin);
    return any;
}

/* The owner's: with one mark for the batch. The record is the cache's: attached, it is not taken away. */
void cache_mark_own(struct cache *cache)
{
    struct stream *stream = load_relaxed_ptr(&cache->stream);
    fetch_add_sc_u32(&stream->users, 1);
    mark_if_active(cache->front->fronts, stream);
    stream_leave(stream);
}

/* What others have taken is forgotten; or the older half of each bin leaves. True: something was published. */
static bool halve_cache(struct cache *cache, bool only_stale)
{
    bool any = false;
    for (int i = 0; i < CACHE_BINS; i++) {
        struct cache_bin *bin = &cache->bin[i];
        uint32_t count = load_relaxed_u32(&bin->count);
        if (count && only_stale)
            drop_stale(cache, bin);
        else if (count)
            any |= flush_oldest(cache, bin, (count + 1) / 2);
    }
    return (!only_stale && slices_halve(cache)) || any;
}

/*
 * The front is full: what others have taken is forgotten, and if that is not enough the older half of each bin leaves.
 * Counted in: a release of one of its other streams, by another thread, returns with these fences behind marks.
 */
static void halve(struct front *front, bool only_stale)
{
    for (struct cache *cache = load_relaxed_ptr(&front->caches); cache; cache = cache->next) {
        struct stream *stream = load_relaxed_ptr(&cache->stream);
        if (!stream)
            continue;
        fetch_add_sc_u32(&stream->users, 1);
        if (halve_cache(cache, only_stale))
            mark_if_active(front->fronts, stream);
        stream_leave(stream);
    }
}

void front_halve(struct front *front)
{
    halve(front, false);
}

static struct cache_bin *choose_bin(struct cache *cache, uint64_t pages)
{
    struct cache_bin *second = &cache->bin[cache_bin_of(cache, pages)];
    if (load_relaxed_u32(&second->pages) == pages)
        return second;
    struct cache_bin *first = pages <= CACHE_EXACT ? second : &cache->bin[(second - cache->bin) ^ 1];
    struct cache_bin *bin = load_relaxed_u32(&first->count) < load_relaxed_u32(&second->count) ? first : second;
    drop_stale(cache, bin);
    if (flush_oldest(cache, bin, load_relaxed_u32(&bin->count)))
        cache_mark_own(cache);
    store_relaxed_u32(&bin->pages, (uint32_t)pages);
    return bin;
}

/* Room for one more region in the bin of its length, which another length's may have to leave. NULL: it is too long. */
static struct cache_bin *make_room(struct cache *cache, uint64_t length)
{
    enum { KEPT = CACHE_SLOTS * 3 / 4 }; /* of a full bin: so often is a search for what was stolen worth it */
    struct front *front = cache->front;
    const struct stream *stream = load_relaxed_ptr(&cache->stream);
    uint64_t size = length << front->fronts->space->pages.page_shift;
    front_adjust_limit(front, load_relaxed_u32(&stream->caches[front->fronts->space->level]) > 1);
    if (size > front->limit) {
        front->refused++;
        return NULL;
    }
    struct cache_bin *bin = choose_bin(cache, length);
    if (load_relaxed_u32(&bin->count) == CACHE_SLOTS) {
        drop_stale(cache, bin);
        uint32_t count = load_relaxed_u32(&bin->count);
        if (count > KEPT && flush_oldest(cache, bin, count - KEPT))
            cache_mark_own(cache);
    }
    for (bool only_stale = true; front_held(front) + size > front->limit; only_stale = false)
        halve(front, only_stale);
    return bin;
}

/* LIVE to CACHED, of memory that was last free on another stream. */
static bool exchange_foreign(const struct cache *cache, struct page *first, uint64_t word)
{
    if (!page_take(first, word))
        return false;
    page_set_fence(first, (struct fence){cache->slot, 0});
    page_set(first, PAGE_CACHED, word_pages(word));
    return true;
}

static bool exchange_live(const struct cache *cache, struct page *first, uint64_t word)
{
    if (load_relaxed_u32(&first->fence_stream) != cache->slot)
        return exchange_foreign(cache, first, word);
    return cas_sc_u64(&first->word, &word, word_next(word, PAGE_LIVE, PAGE_CACHED));
}

/* The reaper is told that there is something to watch, once until the cache is next emptied. */
void cache_note(struct cache *cache, const struct cache_bin *bin)
{
    fetch_or_sc_u64(&cache->noted, UINT64_C(1) << (bin - cache->bin));
    bell_ring(cache->front->fronts->space->bell);
}

bool cache_give(struct cache *cache, CUdeviceptr address)
{
    struct front *front = cache->front;
    struct page *first = page_at_address(&front->fronts->space->pages, address);
    uint64_t word = first ? load_acquire_u64(&first->word) : 0, length = word_pages(word);
    if (word_state(word) != PAGE_LIVE || length > front->fronts->longest)
        return false;
    struct cache_bin *bin = make_room(cache, length);
    if (!bin)
        return false;
    uint32_t count = load_relaxed_u32(&bin->count);
    uint64_t requested = load_relaxed_u64(&first->requested);
    store_relaxed_u64(&bin->slot[count], address);
    if (!exchange_live(cache, first, word))
        return false;                          /* freed by another thread meanwhile */
    store_relaxed_u32(&bin->count, count + 1); /* as in a hit, the stock is the same */
    cache_touch(cache);
    add_alone_u64(&front->tally.frees, 1);
    add_alone_u64(&front->tally.requested_bytes, 0 - requested);
    add_alone_u64(&front->tally.live_bytes, 0 - (length << front->fronts->space->pages.page_shift));
    note_if_needed(cache, bin);
    return true;
}

/* ---- neighbours ---- */

/* What one cache's bin gives another of the same stream: one region, and hints of some more. */
static CUdeviceptr steal_from(struct cache *cache, const struct cache_bin *theirs, uint64_t pages, size_t bytes)
{
    enum { HINTS = 15 };
    struct front *front = cache->front;
    struct space *space = front->fronts->space;
    struct cache_bin *bin = NULL;
    CUdeviceptr address = 0;
    uint32_t hints = 0;
    prefetch_newest(&space->pages, theirs, HINTS + 1);
    for (uint32_t i = load_relaxed_u32(&theirs->count); i-- && hints < HINTS;) {
        CUdeviceptr theirs_address = load_relaxed_u64(&theirs->slot[i]);
        struct page *first = page_at_address(&space->pages, theirs_address);
        if (address && is_cached_for(cache, theirs_address, pages)) {
            bin = bin ? bin : choose_bin(cache, pages);
            if (load_relaxed_u32(&bin->count) == CACHE_SLOTS)
                break;
            store_relaxed_u64(&bin->slot[load_relaxed_u32(&bin->count)], theirs_address);
            set_count(cache, bin, load_relaxed_u32(&bin->count) + 1);
            hints++;
        } else if (!address && first && cache_exchange(cache, first, pages)) {
            address = theirs_address;
            store_relaxed_u64(&first->requested, bytes);
            count_taken(front, &front->tally.neighbour_hits, pages, bytes);
        }
    }
    return address;
}

CUdeviceptr cache_steal(struct cache *cache, uint64_t pages, size_t bytes)
{
    const struct stream *stream = load_relaxed_ptr(&cache->stream);
    CUdeviceptr address = 0;
    for (int i = 0; i < STREAM_NEIGHBOURS && !address; i++) {
        struct cache *other = load_acquire_ptr(
            &stream->neighbour[cache->front->fronts->space->level][i]); /* pairs with add_neighbour's exchange */
        if (!other || other == cache)
            continue;
        const struct cache_bin *theirs = &other->bin[cache_bin_of(other, pages)];
        if (load_relaxed_u32(&theirs->pages) == pages)
            address = steal_from(cache, theirs, pages, bytes);
    }
    return address;
}

/* Beside other threads that allocate, whose counts are theirs to write, one look in so many is enough: see stats.h. */
void front_note_peak(struct front *front)
{
    enum { PEAK_SAMPLE = 256 };
    struct stats *stats = front->fronts->space->stats;
    front->live_noted = load_relaxed_u64(&front->tally.live_bytes);
    if (stats_is_alone(stats) || front->highs++ % PEAK_SAMPLE == 0)
        stats_note_peak_live(stats);
}
