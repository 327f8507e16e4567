#include "cache/front.h"

#include "base/assert.h"
#include "cache/slices.h"

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
    vpmm_assert(slots <= CACHE_SLOTS && peek_u32(&stream->users) > 0);
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
    fence_sc(); /* after the store of the noted bits, before the slots: see "Emptying against filling", front.h */
    for (; bins; bins &= bins - 1)
        any |= flush_slots(fronts, stream, cache_bin_at(cache, (uint32_t)__builtin_ctzll(bins)), CACHE_SLOTS);
    return any;
}

/*
 * The record of the cache with this thread counted among its users, until stream_leave; NULL: it is attached to none,
 * or its stream is being released. A record on which a user counts is not used for another stream (retire_record):
 * counted in first, then looked again whether the cache is still attached to it.
 */
static struct stream *enter_stream(struct cache *cache)
{
    struct stream *stream = load_sc_ptr(&cache->stream);
    if (!stream || !stream_enter_cached(stream))
        return NULL;
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
        stream_mark_by_other(fronts->space->streams, stream);
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
    vpmm_assert(front_is_own(cache->front) && before <= CACHE_SLOTS && count <= CACHE_SLOTS);
    cache->front->stock += ((count - before) * load_relaxed_u32(&bin->pages)) << pages->page_shift; /* down: it wraps */
    front_set_floor(cache->front);
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
    for (uint32_t i = 0; i < CACHE_BINS && cache->own_bins; i++)
        if (load_relaxed_u16(&cache->bin[i]) != EMPTY_BIN)
            set_count(cache, cache_bin_at(cache, i), 0);
    slices_forget(cache);
}

/* ---- bins ---- */

void cache_return_bins(struct cache *cache)
{
    struct front *front = cache->front;
    cache_forget(cache);
    for (uint32_t i = 0; i < CACHE_BINS && cache->own_bins; i++) {
        uint32_t bin = load_relaxed_u16(&cache->bin[i]);
        if (bin == EMPTY_BIN)
            continue;
        vpmm_assert(!peek_u32(&((struct cache_bin *)bin_at(cache->bins, bin))->count));
        store_relaxed_u16(&cache->bin[i], EMPTY_BIN);
        bins_keep(&front->fronts->bins, &front->bins, bin);
        cache->own_bins--;
    }
    vpmm_assert(!cache->own_bins); /* the directory has named as many as are counted */
    slices_return_bins(cache);
}

static bool has_bins(const struct cache *cache)
{
    return cache->own_bins || slices_own_bins(cache);
}

/* Published, so that nothing stands in the bins that another cache is to have. False: its stream is being released. */
static bool take_bins_back(struct cache *cache)
{
    struct stream *stream = load_relaxed_ptr(&cache->stream);
    if (!stream || !has_bins(cache) || !stream_enter_cached(stream))
        return false;
    cache_empty(cache, stream);
    stream_mark_by_other(cache->front->fronts->space->streams, stream);
    stream_leave(stream);
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

uint32_t cache_find_bin(struct cache *cache, struct bins *store, struct bin_stock *stock)
{
    uint32_t bin = spare_or_new(store, stock);
    if (bin == EMPTY_BIN && reclaim_idle(cache))
        bin = bins_reuse(store, stock);
    if (bin == EMPTY_BIN) {
        reclaim_next(cache);
        bin = bins_reuse(store, stock);
    }
    return bin;
}

/* The bin of a place in the directory, empty and of the length, made if there is none. NULL: there is no memory. */
static struct cache_bin *ready_bin(struct cache *cache, uint32_t index, uint64_t pages)
{
    if (load_relaxed_u16(&cache->bin[index]) == EMPTY_BIN) {
        uint32_t fresh = cache_find_bin(cache, &cache->front->fronts->bins, &cache->front->bins);
        if (fresh == EMPTY_BIN)
            return NULL;
        store_relaxed_u32(&((struct cache_bin *)bin_at(cache->bins, fresh))->count, 0);
        store_relaxed_u16(&cache->bin[index], (uint16_t)fresh);
        cache->own_bins++;
    }
    struct cache_bin *bin = cache_bin_at(cache, index);
    vpmm_assert(!peek_u32(&bin->count)); /* what stands in it would be of the other length */
    store_relaxed_u32(&bin->pages, (uint32_t)pages);
    return bin;
}

/* ---- taking ---- */

/* The region is not, or no more, in the counts of slots. */
static void count_taken(struct front *front, _Atomic(uint64_t) *hits, uint64_t length, size_t bytes)
{
    uint64_t size = length << front->fronts->space->pages.page_shift;
    front->stock += size;
    front_set_floor(front);
    if (front_count_malloc(front, hits, size, bytes))
        front_look(front);
}

/* Wait-free: each slot is tried once. */
static CUdeviceptr take(struct cache *cache, uint64_t length, size_t bytes)
{
    const struct pages *pages = &cache->front->fronts->space->pages;
    struct cache_bin *bin = cache_bin_at(cache, cache_bin_of(cache, length));
    uint32_t count = load_relaxed_u32(&bin->pages) == length ? load_relaxed_u32(&bin->count) : 0;
    if (!count)
        return 0;
    CUdeviceptr address = 0;
    struct page *first;
    bool taken = false;
    while (count && !taken) {
        address = load_relaxed_u64(&bin->slot[--count]);
        first = page_at_address(pages, address);
        vpmm_assert(first);                           /* a slot that counts was filled with a region's address */
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
    vpmm_assert(stream && stream->slot == cache->slot && peek_u32(&stream->users) > 0);
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
            struct cache_bin *bin = cache_bin_at(cache, (uint32_t)__builtin_ctzll(bins));
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

static uint64_t bytes_in_bins(const struct cache *cache)
{
    uint64_t pages = 0;
    for (uint32_t i = 0; i < CACHE_BINS; i++) {
        const struct cache_bin *bin = bin_at(cache->bins, peek_u16(&cache->bin[i]));
        pages += (uint64_t)peek_u32(&bin->count) * peek_u32(&bin->pages);
    }
    return (pages << cache->front->fronts->space->pages.page_shift) + slices_bytes(cache);
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
 * is found by a search only when a build has flushed it, so much of it makes a pool that grows hold a few hundredths
 * more. A thread that has freed so many regions since the pool last grew is in a steady state, in which nothing is
 * gained by giving memory back; and what a thread frees on a stream that others use too, they are about to ask for.
 */
enum { STEADY_FREES = 16384 };

void front_adjust_limit(struct front *front, bool shared)
{
    const struct fronts *fronts = front->fronts;
    vpmm_assert(front_is_own(front));
    vpmm_assert_walk(stock_is_right(front));
    uint32_t growths = load_relaxed_u32(fronts->space->growths);
    uint64_t frees = load_relaxed_u64(&front->tally.frees) + front->refused;
    if (!front->limit || growths != front->growths) {
        front->growths = growths;
        front->steady_at = frees + STEADY_FREES;
        front->limit = fronts->first_limit;
    }
    if (shared || frees >= front->steady_at)
        front->limit = fronts->last_limit;
    front_set_floor(front);
}

static bool is_cached_for(const struct cache *cache, CUdeviceptr address, uint64_t pages)
{
    const struct page *first = page_at_address(&cache->front->fronts->space->pages, address);
    return first && word_is(load_acquire_u64(&first->word), PAGE_CACHED, pages) &&
           load_relaxed_u32(&first->fence_stream) == cache->slot;
}

void cache_list_noted(struct cache *cache)
{
    tree_insert(&cache->front->fronts->noted_caches, cache->index);
    bell_ring(cache->front->fronts->space->bell);
}

/* After the slots' stores. The reaper is told once until the cache is next emptied. */
static void note(struct cache *cache, uint32_t index)
{
    vpmm_assert(index < CACHE_BINS && peek_u16(&cache->bin[index]) != EMPTY_BIN);
    if (!fetch_or_sc_u64(&cache->noted, UINT64_C(1) << index))
        cache_list_noted(cache);
}

static void note_if_needed(struct cache *cache, uint32_t index)
{
    if (load_relaxed_u32(&cache_bin_at(cache, index)->count))
        note(cache, index);
}

/* The descriptors of a bin's newest slots, which other threads' processors have: all at once, not one after another. */
static void prefetch_newest(const struct pages *pages, const struct cache_bin *bin, uint32_t slots)
{
    for (uint32_t i = load_relaxed_u32(&bin->count); i-- && slots; slots--)
        __builtin_prefetch(page_at_address(pages, load_relaxed_u64(&bin->slot[i])), 1);
}

/* Forgets the slots whose regions others have taken. */
static void drop_stale(struct cache *cache, uint32_t index)
{
    struct cache_bin *bin = cache_bin_at(cache, index);
    uint32_t pages = load_relaxed_u32(&bin->pages), kept = 0;
    prefetch_newest(&cache->front->fronts->space->pages, bin, CACHE_SLOTS);
    for (uint32_t i = 0; i < load_relaxed_u32(&bin->count); i++) {
        CUdeviceptr address = load_relaxed_u64(&bin->slot[i]);
        if (is_cached_for(cache, address, pages))
            store_relaxed_u64(&bin->slot[kept++], address);
    }
    set_count(cache, bin, kept);
    note_if_needed(cache, index);
}

/* Publishes the oldest so many of a bin. */
static bool flush_oldest(struct cache *cache, uint32_t index, uint32_t slots)
{
    struct cache_bin *bin = cache_bin_at(cache, index);
    uint32_t count = load_relaxed_u32(&bin->count);
    vpmm_assert(slots <= count);
    bool any = flush_slots(cache->front->fronts, load_relaxed_ptr(&cache->stream), bin, slots);
    for (uint32_t i = slots; i < count; i++)
        store_relaxed_u64(&bin->slot[i - slots], load_relaxed_u64(&bin->slot[i]));
    set_count(cache, bin, count - slots);
    note_if_needed(cache, index);
    return any;
}

/* What others have taken is forgotten; or the older half of each bin leaves. True: something was published. */
static bool halve_cache(struct cache *cache, bool only_stale)
{
    bool any = false;
    for (uint32_t i = 0; i < CACHE_BINS; i++) {
        uint32_t count = load_relaxed_u32(&cache_bin_at(cache, i)->count);
        if (count && only_stale)
            drop_stale(cache, i);
        else if (count)
            any |= flush_oldest(cache, i, (count + 1) / 2);
    }
    return (!only_stale && slices_halve(cache)) || any;
}

/* `given`: the one whose stream the call was given. */
static void halve(struct cache *given, bool only_stale)
{
    struct front *front = given->front;
    for (struct cache *cache = load_relaxed_ptr(&front->caches); cache; cache = cache->next) {
        struct stream *stream = has_bins(cache) ? enter_stream(cache) : NULL;
        if (!stream)
            continue;
        bool any = halve_cache(cache, only_stale);
        if (any && cache == given)
            stream_mark(front->fronts->space->streams, stream);
        else if (any)
            stream_mark_by_other(front->fronts->space->streams, stream);
        stream_leave(stream);
    }
}

void cache_halve_all(struct cache *given)
{
    halve(given, false);
}

/* A bin for the length, which another length's may have to leave. *any: something was published. CACHE_BINS: none. */
static uint32_t choose_bin(struct cache *cache, uint64_t pages, bool *any)
{
    uint32_t second = cache_bin_of(cache, pages), first = pages <= CACHE_EXACT ? second : second ^ 1;
    if (load_relaxed_u32(&cache_bin_at(cache, second)->pages) == pages)
        return second;
    bool is_first =
        load_relaxed_u32(&cache_bin_at(cache, first)->count) < load_relaxed_u32(&cache_bin_at(cache, second)->count);
    uint32_t index = is_first ? first : second;
    if (load_relaxed_u16(&cache->bin[index]) != EMPTY_BIN) {
        drop_stale(cache, index);
        *any |= flush_oldest(cache, index, load_relaxed_u32(&cache_bin_at(cache, index)->count));
    }
    return ready_bin(cache, index, pages) ? index : CACHE_BINS;
}

/* A bin for the length, with room for one more. CACHE_BINS: none. */
static uint32_t make_slot(struct cache *cache, uint64_t length, bool *any)
{
    enum { KEPT = CACHE_SLOTS * 3 / 4 }; /* of a full bin: so often is a search for what was stolen worth it */
    uint32_t index = choose_bin(cache, length, any);
    if (index == CACHE_BINS || load_relaxed_u32(&cache_bin_at(cache, index)->count) < CACHE_SLOTS)
        return index;
    drop_stale(cache, index);
    uint32_t count = load_relaxed_u32(&cache_bin_at(cache, index)->count);
    if (count > KEPT)
        *any |= flush_oldest(cache, index, count - KEPT);
    return index;
}

/* The bin of the length, if it is there and has room; no address moves for it. CACHE_BINS: not so. */
static uint32_t bin_with_room(struct cache *cache, uint64_t length)
{
    uint32_t index = cache_bin_of(cache, length);
    const struct cache_bin *bin = cache_bin_at(cache, index);
    bool has_room = load_relaxed_u32(&bin->pages) == length && load_relaxed_u32(&bin->count) < CACHE_SLOTS;
    return has_room ? index : CACHE_BINS;
}

/* The same, by moving what there is; marked once for the batch. CACHE_BINS: the stream is being released, or no memory.
 */
static uint32_t rearrange(struct cache *cache, uint64_t length)
{
    struct stream *stream = enter_stream(cache);
    bool any = false;
    if (!stream)
        return CACHE_BINS;
    uint32_t index = make_slot(cache, length, &any);
    if (any)
        stream_mark(cache->front->fronts->space->streams, stream);
    stream_leave(stream);
    return index;
}

/*
 * Room for one more region in the bin of its length. CACHE_BINS: it is too long, the stream is being released, or there
 * is no memory. When the front is full, what others have taken is forgotten, and if that is not enough the older half
 * of each bin leaves.
 */
static uint32_t make_room(struct cache *cache, uint64_t length)
{
    struct front *front = cache->front;
    const struct stream *stream = load_relaxed_ptr(&cache->stream);
    uint64_t size = length << front->fronts->space->pages.page_shift;
    if (!stream)
        return CACHE_BINS;
    front_adjust_limit(front, load_relaxed_u32(&stream->caches[front->fronts->space->level]) > 1);
    if (size > front->limit) {
        front->refused++;
        return CACHE_BINS;
    }
    uint32_t index = bin_with_room(cache, length);
    if (index == CACHE_BINS)
        index = rearrange(cache, length);
    if (index != CACHE_BINS && front_held(front) + size > front->limit)
        halve(cache, true);
    if (index != CACHE_BINS && front_held(front) + size > front->limit)
        halve(cache, false);
    return front_held(front) + size <= front->limit ? index : CACHE_BINS;
}

/* LIVE to CACHED, of memory that was last free on another stream. */
static bool exchange_foreign(const struct cache *cache, struct page *first, uint64_t word)
{
    if (!page_take(first, word))
        return false;
    page_set_fence(first, (struct fence){cache->slot, 0});
    vpmm_assert(word_state(peek_u64(&first->word)) == PAGE_OWN && word_pages(word) <= cache->front->fronts->longest);
    page_set(first, PAGE_CACHED, word_pages(word));
    return true;
}

static bool exchange_live(const struct cache *cache, struct page *first, uint64_t word)
{
    if (load_relaxed_u32(&first->fence_stream) != cache->slot)
        return exchange_foreign(cache, first, word);
    return cas_sc_u64(&first->word, &word, word_next(word, PAGE_LIVE, PAGE_CACHED));
}

/* CACHED to LIVE again, of the newest slot. False: another thread has taken it out of the cache. */
static bool undo_give(struct cache *cache, uint32_t index, CUdeviceptr address)
{
    struct front *front = cache->front;
    struct cache_bin *bin = cache_bin_at(cache, index);
    uint64_t length = load_relaxed_u32(&bin->pages);
    struct page *first = page_at_address(&front->fronts->space->pages, address);
    vpmm_assert(first && peek_u32(&bin->count) && peek_u64(&bin->slot[peek_u32(&bin->count) - 1]) == address);
    if (!cache_exchange(cache, first, length))
        return false;
    store_relaxed_u32(&bin->count, load_relaxed_u32(&bin->count) - 1);
    front_uncount_free(front, length << front->fronts->space->pages.page_shift, load_relaxed_u64(&first->requested));
    return true;
}

/*
 * The handle is looked at after the region was made CACHED, and the releasing thread looks into the cache after it has
 * closed it (all sequentially consistent): either it finds the region, or this thread finds the cache closed. The
 * reaper is told that there is something to watch, once until the cache is next emptied.
 */
bool cache_note(struct cache *cache, uint32_t index, CUdeviceptr address)
{
    if (load_sc_ptr(&cache->handle) == CACHE_CLOSED)
        return !undo_give(cache, index, address);
    note(cache, index);
    return true;
}

bool cache_give_told(struct cache *cache, CUdeviceptr address)
{
    struct front *front = cache->front;
    const struct pages *pages = &front->fronts->space->pages;
    struct page *first = page_at_address(pages, address);
    uint64_t word = first ? load_acquire_u64(&first->word) : 0, size = word_pages(word) << pages->page_shift;
    uint32_t unnoted;
    if (word_state(word) != PAGE_LIVE || front_has_room(front, size) || front_held(front) + size > front->limit)
        return false;
    front_tell_of_free(front, size, load_relaxed_u64(&first->requested));
    return cache_give_newest(cache, pages, address, first, word, &unnoted) &&
           (unnoted == CACHE_BINS || cache_note(cache, unnoted, address));
}

bool cache_give(struct cache *cache, CUdeviceptr address)
{
    struct front *front = cache->front;
    struct page *first = page_at_address(&front->fronts->space->pages, address);
    uint64_t word = first ? load_acquire_u64(&first->word) : 0, length = word_pages(word);
    if (word_state(word) != PAGE_LIVE || length > front->fronts->longest)
        return false;
    uint32_t index = make_room(cache, length);
    if (index == CACHE_BINS)
        return false;
    struct cache_bin *bin = cache_bin_at(cache, index);
    uint32_t count = load_relaxed_u32(&bin->count);
    uint64_t requested = load_relaxed_u64(&first->requested);
    vpmm_assert(count < CACHE_SLOTS && peek_u32(&bin->pages) == length);
    store_relaxed_u64(&bin->slot[count], address);
    if (!exchange_live(cache, first, word))
        return false;                          /* freed by another thread meanwhile */
    store_relaxed_u32(&bin->count, count + 1); /* as in a hit, the stock is the same */
    cache_touch(cache);
    front_count_free(front, length << front->fronts->space->pages.page_shift, requested);
    if (!front_has_room(front, 0))
        front_tell_of_free(front, 0, 0);
    return load_sc_u64(&cache->noted) >> index & 1 || cache_note(cache, index, address);
}

/* ---- neighbours ---- */

/* What one cache's bin gives another of the same stream: one region, and hints of some more. */
static CUdeviceptr steal_from(struct cache *cache, const struct cache_bin *theirs, uint64_t pages, size_t bytes)
{
    enum { HINTS = 15 };
    struct front *front = cache->front;
    struct space *space = front->fronts->space;
    CUdeviceptr address = 0;
    uint32_t hints = 0;
    prefetch_newest(&space->pages, theirs, HINTS + 1);
    for (uint32_t i = load_relaxed_u32(&theirs->count); i-- && hints < HINTS;) {
        CUdeviceptr theirs_address = load_relaxed_u64(&theirs->slot[i]);
        struct page *first = page_at_address(&space->pages, theirs_address);
        if (address && is_cached_for(cache, theirs_address, pages)) {
            uint32_t index = bin_with_room(cache, pages);
            if (index == CACHE_BINS)
                index = rearrange(cache, pages);
            if (index == CACHE_BINS)
                break;
            struct cache_bin *bin = cache_bin_at(cache, index);
            vpmm_assert(peek_u32(&bin->count) < CACHE_SLOTS && peek_u32(&bin->pages) == pages);
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

static CUdeviceptr steal(struct cache *cache, uint64_t pages, size_t bytes)
{
    const _Atomic(void *) *neighbour = cache->front->fronts->of_stream[cache->slot].neighbour;
    CUdeviceptr address = 0;
    for (int i = 0; i < STREAM_NEIGHBOURS && !address && load_relaxed_ptr(&cache->stream); i++) {
        struct cache *other = load_acquire_ptr(&neighbour[i]); /* pairs with add_neighbour's exchange */
        if (!other || other == cache)
            continue;
        const struct cache_bin *theirs = cache_bin_at(other, cache_bin_of(other, pages));
        if (load_relaxed_u32(&theirs->pages) == pages)
            address = steal_from(cache, theirs, pages, bytes);
    }
    return address;
}

CUdeviceptr cache_take_or_steal(struct cache *cache, uint64_t length, size_t bytes)
{
    if (length > cache->front->fronts->longest)
        return 0;
    CUdeviceptr address = take(cache, length, bytes);
    return address ? address : steal(cache, length, bytes);
}

/* ---- how much is live ---- */

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
