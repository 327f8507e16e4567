/*
 * front.h - per-thread front caches: what makes a malloc and a free of the same thread meet nobody else.
 *
 *   front     what one thread has of one pool: a cache for each stream that it uses, and its counts
 *   cache     freed regions of one stream, in bins by exact length, to be handed out again on the same stream. What is
 *             in it has no fence yet: its stream's order alone makes it safe, and only for the same stream
 *   bin       slots with addresses, used as a stack
 *   noted     of a cache: a bit for each bin that may have something to empty
 *
 * A slot is a hint and the page's descriptor decides: a page is cached for a stream if and only if its word is CACHED
 * and its fence_stream is the stream's record. A hit is one exchange of that word. An address may therefore stand in
 * slots of several threads, and in slots that it has left; whoever exchanges the word has the region.
 *   (1) every CACHED region stands in a slot of a cache of its stream: its freer fills the slot before it exchanges
 *       the word, and overwrites a slot only when it has seen its page not CACHED for this stream
 *   (2) the bin of such a slot is noted, but for the moment in which its freer is about to note it
 *   (3) cached bytes = bytes of CACHED regions, when no one is inside a call
 *
 * Who may do what
 *   take, give     the front's thread: no lock, no driver call but that for the stream's id or context, no write to a
 *                  line that others write but the page's descriptor. Wait-free: at most a bin's slots are tried
 *   steal          another thread with the same stream: by exchange of CACHED words, found by reading slots
 *   flush          any thread: takes a cache's regions by exchange, and publishes them behind one fence
 *   attach, detach the front's thread: which stream a cache is of. A record that has caches attached is not used again
 *                  for another stream (stream.h), so fence_stream names one stream as long as there is memory behind it
 *
 * Fronts and caches are freed with their pool; until then they are type-stable, and a thief that holds on to a cache
 * which has gone to another stream finds descriptors that do not match.
 *
 * ABA: the word's generation (pages.h). A hit reads the word, then fence_stream, then exchanges the word as it was
 * read; fence_stream is written only in state OWN, so it was the region's at the exchange.
 *
 * Releasing. A release makes the record RELEASING and waits until nobody else is counted in (stream.h); whoever moves
 * addresses between slots, or takes regions out behind a fence, is counted in. Then it closes the stream's caches and
 * empties every bin. A hit is not counted: a take does no harm, and a give that the emptying has not met finds its bin
 * not noted, and then its cache closed, and is undone (cache_note). So nothing is left in a cache of a released stream,
 * and none is attached to it later.
 *
 * Emptying against filling. A flusher takes the noted bits (exchange), then reads words; a freer makes its word CACHED,
 * then reads the noted bits, and notes its bin again if it is not noted; all sequentially consistent: one of the two
 * sees the other, and no region is left in a cache that looks empty. The slot is stored before the word's exchange,
 * which orders it on x86-64 and aarch64 although it is a plain store; the flusher has a fence between the bits and the
 * slots. Who moves addresses between slots notes the bin again likewise.
 *
 * How much is live. A hit adds to its front's tally, or takes from it, and compares twice (stats.h): a malloc with the
 * tally's marks, above which front_look is due; a free with the front's floor, below which it is not a hit.
 *   (4) floor = max(stock - limit, told of live_bytes - slack)
 * Where live_bytes is at the first the front is full; where at the second alone, cache_give_told tells and tries again,
 * and nothing else is decided otherwise than above the floor: when a front tells depends on the time.
 *
 * A thread that ends leaves its front to the next thread, and what is in it to takers: the reaper flushes what has not
 * been touched for FRONT_IDLE_US. Its end is known by a pthread key. In a process that had none left when its first
 * pool with caches was made, pools have no caches, for good.
 */
#ifndef VPMM_LIB_FRONT_H
#define VPMM_LIB_FRONT_H

#include "base/tree.h"
#include "cache/bins.h"
#include "space/region.h"

enum {
    CACHE_BINS = 64,
    CACHE_EXACT = 32, /* lengths up to it have bins of their own */
    CACHE_SLOTS = 63,
    FRONT_RECENT = 64, /* caches found by handle without a search */
    FRONT_POOLS = 8,   /* spaces of pools, two a pool, that a thread finds its front of without a search */
    FRONT_IDLE_US = 10000,
    CACHES_MAX = 1 << 20, /* of a space's fronts */
    STREAM_NEIGHBOURS = 8,
};

/* Where a slot was, or is to be, is the owner's alone; what stands in it is read by all. */
struct cache_bin {
    _Alignas(128) _Atomic(uint32_t) pages; /* the length; 0: none yet */
    _Atomic(uint32_t) count;               /* slots in use, from the first on */
    _Atomic(uint64_t) slot[CACHE_SLOTS];   /* CUdeviceptr */
};

_Static_assert(sizeof(struct cache_bin) == BIN_BYTES, "a bin of regions is a bin");

/* What a pair of a thread and a stream costs while it is quiet: this, and as much for pieces (slices.h). */
struct cache {
    _Alignas(64) _Atomic(void *) handle; /* CUstream; CACHE_CLOSED: not to be filled any more */
    _Atomic(void *) stream;              /* the record that it is attached to; NULL: none, or it was released */
    unsigned long long id;               /* the stream's; the owner's copy, as are the next three */
    bool check_id;                       /* in every take */
    bool is_default;        /* a default stream: which one its handle names depends on the current context */
    bool is_attached;       /* the owner's: it is in by_slot */
    uint32_t slot;          /* the record's */
    _Atomic(uint32_t) idle; /* set by the reaper, cleared by every take and give */
    uint32_t index;         /* among the fronts' caches; constant, as are front, bins and next */
    _Atomic(uint64_t) noted;
    _Atomic(void *) slices; /* struct slice_cache (slices.h), of a front of granules; NULL: none yet */
    struct front *front;
    unsigned char *bins;          /* the store's base */
    struct cache *next;           /* of the front's */
    struct cache *next_spare;     /* the owner's: of those attached to nothing */
    struct cache *next_of_stream; /* under the registry's lock: of those attached to one record */
    uint32_t own_bins;            /* the owner's: how many are not EMPTY_BIN */
    _Atomic(uint16_t) bin[CACHE_BINS];
};

_Static_assert(sizeof(struct cache) == 256, "two caches and one of slices are less than 1 KiB");

extern char front_no_stream; /* an address that is no stream's handle */
#define CACHE_CLOSED ((void *)&front_no_stream)

struct front {
    _Alignas(128) struct cache *recent[FRONT_RECENT]; /* by handle; never NULL */
    struct stats_tally tally;
    uint64_t floor;              /* of the tally's live_bytes; as a number with a sign */
    uint64_t stock;              /* bytes: see front_held */
    uint64_t limit;              /* bytes: the pool's first limit, or its last one while the pool does not grow */
    uint32_t growths;            /* the pool's, when the limit was last reset, */
    uint64_t refused;            /* frees of what was too long for the limit */
    uint64_t steady_at;          /* frees, with those, at which the limit may rise */
    struct fronts *fronts;       /* constant */
    struct cache **by_slot;      /* the attached caches, by their records' slots */
    uint32_t slots;              /* of by_slot */
    uint32_t closings;           /* of the pool's, up to which closed caches were detached */
    struct cache *spare;         /* attached to nothing */
    struct bin_stock bins;       /* of regions, */
    struct bin_stock slice_bins; /* and of slices */
    struct cache *reclaimed;     /* the cache whose bins were last taken back for others */
    _Atomic(uint64_t) owner;     /* the thread's number; 0: its thread has ended */
    _Atomic(void *) caches;      /* list of caches, which only grows */
    struct front *next;          /* of the pool's, constant */
};

/* What a space's fronts have of a stream, by its record's slot. */
struct stream_caches {
    _Atomic(void *) neighbour[STREAM_NEIGHBOURS]; /* some of the attached caches, for threads that look for memory */
    struct cache *attached; /* all of them, a list: under the registry's lock, or alone while the record is RELEASING */
};

/* A pool's. */
struct fronts {
    _Atomic(uint64_t)
        serial;       /* of the pool, never used again; FRONTS_NONE: no caches, or no more: the device is lost */
    uint64_t longest; /* pages of a region that is cached, */
    size_t span;      /* and its bytes beyond the first page */
    uint64_t first_limit, last_limit; /* bytes in one front */
    bool check_ids;                   /* of streams that have one */
    struct space *space;              /* constant, as is the next: */
    struct slabs *slabs;              /* those of the space; NULL: it is one of pages */
    struct fronts *next_pool, **link; /* of all pools with caches, under their lock */
    struct bins bins, slice_bins;
    struct cache *cache;        /* CACHES_MAX of them, reserved; constant, as are the next three */
    void *slice_caches;         /* struct slice_cache, one for each of them */
    void *noted_words;          /* of noted_caches */
    struct stream_caches *of_stream;
    _Atomic(uint32_t) caches;   /* so many are in use */
    struct tree noted_caches;   /* a cache that has a bin noted is there, or is about to be */
    uint32_t orphans;           /* of the streams, up to which caches of gone streams were closed; the reaper's */
    _Atomic(void *) first;      /* list of fronts, which only grows */
    _Atomic(uint32_t) closings; /* caches closed by other threads than their own, so far */
    uint64_t next_look_ns;      /* for idle caches; under the pass lock, as is noted */
    bool noted;                 /* something was cached at the last look */
};

#define FRONTS_NONE UINT64_MAX

/* The calling thread's fronts, by the serials of their pools. */
extern _Thread_local struct front_of_pool {
    uint64_t serial;
    struct front *front;
} front_known[FRONT_POOLS] __attribute__((tls_model("initial-exec")));

/* What a front holds at first, and at most, in regions of pages of this size. NULL configuration: there are no caches.
 */
struct front_limits {
    size_t page_size, first_bytes, most_bytes;
};
vpmm_status fronts_init(struct fronts *, struct space *, const vpmm_config *, struct front_limits); /* HOST_MEMORY */
void fronts_free(struct fronts *); /* no other thread is inside the pool */

/* The cache of the calling thread for the stream, made if need be; NULL: there are none, or no host memory. */
struct cache *front_cache(struct fronts *, struct stream *);

/*
 * A region of this length from the cache, handed out, or else from another thread's cache for the stream: then the
 * addresses of some more go into this cache's slots, as hints. As for a hit, the thread need not be counted among the
 * stream's users: to take does no harm beside a release. 0: none.
 */
CUdeviceptr cache_take_or_steal(struct cache *, uint64_t length, size_t bytes);

/*
 * A longer region than this, the shortest that there is, out of the cache: better than to publish everything for it. It
 * is in the caller's hands, behind a new fence of the cache's stream.
 */
bool cache_take_longer(struct cache *, uint64_t length, struct region *);

/* Frees into the cache. False: it is not a live region of a length that is cached; nothing was changed. */
bool cache_give(struct cache *, CUdeviceptr);

/* From here on every call goes the long way, where it is told that the device is lost. */
void fronts_disable(struct fronts *);

/*
 * Publishes what all threads have cached for the stream, or for every stream if it is NULL; `mark`: with an event each.
 * True: there was something.
 */
bool fronts_flush(struct fronts *, const struct stream *, bool mark);

/* The same of what the calling thread has cached, for all its streams, with marks. */
void fronts_flush_own(struct fronts *);

/*
 * By who releases the stream, and is alone counted in: as fronts_flush, unmarked, of every bin; its caches are not
 * filled again. The record is theirs until their owners let go of them.
 */
void fronts_close(struct fronts *, struct stream *);

/*
 * Under the pass lock. Publishes, with marks, what no thread has touched since the last look, which was
 * FRONT_IDLE_US ago, and what is in caches of streams that are gone. True: something is cached, so look again after
 * FRONT_IDLE_US.
 */
bool fronts_flush_idle(struct fronts *);

/* Whether anything may be cached. */
bool fronts_noted(const struct fronts *);

/* After a malloc that went past the caches: front_look of the calling thread's front. False: it is not at hand. */
bool fronts_look(const struct fronts *);

/* Whether a CACHED region fulfils invariants (1) and (2) of a pool at rest. */
bool fronts_hold(const struct fronts *, uint64_t page);

struct slice;

/* The same of a slice that is cached, by its word. */
bool fronts_hold_slice(const struct fronts *, const struct slice *, uint64_t word);

/* ---- between front.c, of threads and streams, and cache.c, of what is in one cache ---- */

/* Publishes what is in the noted bins; `mark`: with an event. Any thread. True: there was something. */
bool cache_flush(struct cache *, bool mark);

/* The same, unmarked, of every bin, by a thread that is counted among the stream's users. */
void cache_empty(struct cache *, struct stream *);

/* Of an emptied cache, by its owner: no slot counts any more. */
void cache_forget(struct cache *);

/* The front of the cache, whose stream the call was given, is full: the older half of each bin leaves. */
void cache_halve_all(struct cache *);

/* Whether another thread may find something to empty. */
bool cache_noted(const struct cache *);

/* After a bin was noted where none was: fronts_flush finds the cache. */
void cache_list_noted(struct cache *);

/* The owner's: takes all bins back from a cache that it has emptied. */
void cache_return_bins(struct cache *);

/*
 * A bin for the cache; EMPTY_BIN: there is none. A front that has FRONT_BINS empties another of its caches
 * for it. `stock` and `store` are those of regions, or of slices.
 */
uint32_t cache_find_bin(struct cache *, struct bins *store, struct bin_stock *stock);

/* The floor, after a change of what it is made of. */
void front_set_floor(struct front *);

/* Before what takes so many bytes, and was asked for as so many, is freed into the front, which is not full. */
void front_tell_of_free(struct front *, uint64_t bytes, uint64_t requested);

/* For assertions: the front is the calling thread's, or the reaper looks after it. */
bool front_is_own(const struct front *);

/* Sets a new front's limit, and then as the pool has grown or not. `shared`: for a stream that other threads use too.
 */
void front_adjust_limit(struct front *, bool shared);

/* ---- the hit, both ways ---- */

/* Of a default stream: which one its handle names depends on the current context. False also if that is not known. */
bool cache_is_current(const struct cache *);

/* Due after a malloc that has brought the tally above a mark. */
void front_look(struct front *);

/*
 * The free that was no hit again, where the one thing in its way was that the front had to tell. False: that was not
 * so, or not all; nothing was changed.
 */
bool cache_give_told(struct cache *, CUdeviceptr);

/*
 * Due after a free into a bin that is not noted, of the address that was freed. False: the cache has been closed, the
 * stream is released or being released, and the address is live again, to be freed the long way.
 */
bool cache_note(struct cache *, uint32_t bin, CUdeviceptr);

static inline struct cache **front_recent(struct front *front, CUstream handle)
{
    return &front->recent[(uint64_t)(uintptr_t)handle * UINT64_C(0x9E3779B97F4A7C15) >> 58];
}

_Static_assert(FRONT_RECENT == 1 << (64 - 58), "front_recent's shift");

static inline struct cache_bin *cache_bin_at(const struct cache *cache, uint32_t index)
{
    return bin_at(cache->bins, load_relaxed_u16(&cache->bin[index]));
}

/* Short lengths have a bin each; of the others two bins may hold one: its own, and the one beside it. */
static inline uint32_t cache_bin_of(const struct cache *cache, uint64_t length)
{
    if (length <= CACHE_EXACT)
        return (uint32_t)length - 1;
    uint32_t index = CACHE_EXACT + (((uint32_t)length * 0x9E3779B1u) >> 27);
    return load_relaxed_u32(&cache_bin_at(cache, index)->pages) == length ? index : index ^ 1;
}

_Static_assert(CACHE_BINS - CACHE_EXACT == 1 << (32 - 27), "cache_bin_of's shift");

/*
 * Bytes in slots, some of which may have been taken: never less than what is cached. A hit moves as much between this
 * and the tally's live_bytes as it makes live, or ends, so only what happens otherwise changes their sum, the stock.
 */
static inline uint64_t front_held(const struct front *front)
{
    return front->stock - load_relaxed_u64(&front->tally.live_bytes);
}

/* Whether a free of so many bytes leaves the front within its limit, and the tally no lower than was told of it. */
static inline bool front_has_room(const struct front *front, uint64_t bytes)
{
    return (int64_t)(load_relaxed_u64(&front->tally.live_bytes) - bytes) >= (int64_t)front->floor;
}

/* Whether a word is that of a region of this length that is cached. */
static inline bool word_is(uint64_t word, enum page_state state, uint64_t pages)
{
    return ((word ^ ((uint64_t)state | pages << PAGE_STATE_BITS)) &
            ((UINT64_C(1) << (PAGE_STATE_BITS + PAGE_COUNT_BITS)) - 1)) == 0;
}

/* CACHED to LIVE, if it is of this length and of the cache's stream. */
static inline bool cache_exchange(const struct cache *cache, struct page *page, uint64_t length)
{
    uint64_t word = load_acquire_u64(&page->word);
    return word_is(word, PAGE_CACHED, length) && load_relaxed_u32(&page->fence_stream) == cache->slot &&
           cas_sc_u64(&page->word, &word, word_next(word, PAGE_CACHED, PAGE_LIVE));
}

static inline void cache_touch(struct cache *cache)
{
    if (load_relaxed_u32(&cache->idle))
        store_relaxed_u32(&cache->idle, 0);
}

/* A malloc; `hits`: of the tally's, that of its kind. True: front_look is due. */
static inline bool front_count_malloc(struct front *front, _Atomic(uint64_t) *hits, uint64_t live, uint64_t requested)
{
    struct stats_tally *tally = &front->tally;
    add_alone_u64(hits, 1);
    live = advance_alone_u64(&tally->live_bytes, live);
    requested = advance_alone_u64(&tally->requested_bytes, requested);
    return above_relaxed_u64(live, &tally->mark[PEAK_LIVE]) ||
           above_relaxed_u64(requested, &tally->mark[PEAK_REQUESTED]);
}

/* A free. */
static inline void front_count_free(struct front *front, uint64_t live, uint64_t requested)
{
    add_alone_u64(&front->tally.frees, 1);
    add_alone_u64(&front->tally.requested_bytes, 0 - requested);
    add_alone_u64(&front->tally.live_bytes, 0 - live);
}

/* A free that is undone. */
static inline void front_uncount_free(struct front *front, uint64_t live, uint64_t requested)
{
    add_alone_u64(&front->tally.frees, UINT64_MAX);
    add_alone_u64(&front->tally.requested_bytes, requested);
    add_alone_u64(&front->tally.live_bytes, live);
}

/*
 * The two below are the hit: what cache_take_or_steal and cache_give do when nothing is in the way, with no call in
 * them, so that the public functions need no stack. `pages`: the pool's table, whose place they know.
 */

/* The newest of the length. True: handed out; *look: front_look is due. */
static inline __attribute__((always_inline)) bool cache_take_newest(struct cache *cache, const struct pages *pages,
                                                                    uint64_t length, size_t bytes, CUdeviceptr *out,
                                                                    bool *look)
{
    struct cache_bin *bin = cache_bin_at(cache, cache_bin_of(cache, length));
    uint32_t count = load_relaxed_u32(&bin->count);
    if (load_relaxed_u32(&bin->pages) != length || !count)
        return false;
    CUdeviceptr address = load_relaxed_u64(&bin->slot[count - 1]);
    struct page *first;
    if (!page_in_first_chunk(pages, address, &first) || !cache_exchange(cache, first, length))
        return false;
    store_relaxed_u32(&bin->count, count - 1);
    cache_touch(cache);
    store_relaxed_u64(&first->requested, bytes);
    *out = address;
    *look = front_count_malloc(cache->front, &cache->front->tally.hits, length << pages->page_shift, bytes);
    return true;
}

/*
 * True: freed; *unnoted: the bin, if cache_note is due for it, else CACHE_BINS. `first` and `word`: the address's page,
 * and its word as it was read: LIVE.
 */
static inline __attribute__((always_inline)) bool cache_give_newest(struct cache *cache, const struct pages *pages,
                                                                    CUdeviceptr address, struct page *first,
                                                                    uint64_t word, uint32_t *unnoted)
{
    struct front *front = cache->front;
    uint64_t length = word_pages(word), bytes = length << pages->page_shift;
    uint32_t index = cache_bin_of(cache, length);
    struct cache_bin *bin = cache_bin_at(cache, index);
    uint32_t count = load_relaxed_u32(&bin->count);
    uint64_t requested = load_relaxed_u64(&first->requested);
    if (load_relaxed_u32(&bin->pages) != length || count == CACHE_SLOTS || !front_has_room(front, bytes) ||
        load_relaxed_u32(&first->fence_stream) != cache->slot)
        return false;
    store_relaxed_u64(&bin->slot[count], address);
    if (!cas_sc_u64(&first->word, &word, word_next(word, PAGE_LIVE, PAGE_CACHED)))
        return false; /* freed by another thread meanwhile */
    store_relaxed_u32(&bin->count, count + 1);
    cache_touch(cache);
    front_count_free(front, bytes, requested);
    *unnoted = !(load_sc_u64(&cache->noted) >> index & 1) ? index : CACHE_BINS;
    return true;
}

/* The calling thread's cache for a handle that it has used before. False: look the stream up. */
static inline bool front_lookup(const struct fronts *fronts, CUstream handle, struct cache **cache)
{
    uint64_t serial = load_relaxed_u64(&fronts->serial);
    const struct front_of_pool *known = &front_known[serial % FRONT_POOLS];
    if (known->serial != serial)
        return false;
    *cache = *front_recent(known->front, handle);
    return load_relaxed_ptr(&(*cache)->handle) == handle;
}

#endif
