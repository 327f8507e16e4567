/*
 * front.h - per-thread front caches: what makes a malloc and a free of the same thread meet nobody else.
 *
 *   front     what one thread has of one space of a pool: a cache for each stream that it uses, and its counts
 *   cache     what was freed on one stream, in bins by exact length, to be handed out again on the same stream. What is
 *             in it has no fence yet: its stream's order alone makes it safe, and only for the same stream
 *   kind      of what is cached: regions (regions.h), and of the space of subpages slices too (slices.h). A kind says
 *             how one thing of it is claimed, published, and taken back; the rest is written once, for all (cache.c)
 *   noted     of a cache's set of bins: a bit for each bin that may have something to empty
 *
 * A slot is a hint and the thing's own word decides, here of a region: it is cached for a stream if and only if its
 * word is CACHED and its fence_stream is the stream's record. A hit is one exchange of that word. So an address may
 * stand in slots of several threads, and in slots that it has left; whoever exchanges the word has the region.
 *   (1) every CACHED region stands in a slot of a cache of its stream: its freer fills the slot before it exchanges
 *       the word, and overwrites a slot only when it has seen its unit not CACHED for this stream
 *   (2) the bin of such a slot is noted, but while its freer is about to note it, and while a flusher that has
 *       taken the bits is at its bin
 *   (3) cached bytes = bytes of CACHED regions, when no one is inside a call
 *
 * Who may do what
 *   take, give     the front's thread: no lock, no driver call but that for the stream's id or context, no write to a
 *                  line that others write but the unit's descriptor. Wait-free: at most a bin's slots are tried. Only
 *                  a give to a full bin or cache does more: it flushes what has lain there longest
 *   steal          another thread with the same stream: by exchange of CACHED words, found by reading slots
 *   flush          any thread: takes a cache's regions by exchange, and publishes them behind one fence
 *   attach, detach the front's thread: which stream a cache is of. Detach also by a pass, of a front whose thread has
 *                  ended. A record that has caches attached is not used again for another stream (stream.h), so
 *                  fence_stream names one stream as long as there is memory behind it
 *
 * Fronts and caches are freed with their pool; until then they are type-stable, and a thief that holds on to a cache
 * which has gone to another stream finds descriptors that do not match.
 *
 * ABA: the word's generation (units.h). A hit reads the word, then fence_stream, then exchanges the word as it was
 * read; fence_stream is written only in state OWN, so it was the region's at the exchange.
 *
 * Releasing. A release makes the record CLOSING and waits until nobody else is counted in (stream.h); whoever moves
 * addresses between slots, or takes regions out behind a fence, is counted in. Then it closes the stream's caches and
 * empties every bin. A hit is not counted: a take does no harm, and a give that the emptying has not met finds its bin
 * not noted, and then its cache closed, and is undone (cache_note). So nothing is left in a cache of a released stream,
 * and none is attached to it later.
 *
 * Emptying against filling. A flusher takes the noted bits (exchange), then reads words; a freer makes its word CACHED,
 * then reads the noted bits, and notes its bin again if it is not noted; all sequentially consistent: one of the two
 * sees the other, and no region is left in a cache that looks empty. The slot is stored before the word's exchange,
 * which orders it on x86-64 and aarch64 although it is a plain store; the flusher has a fence between the bits and the
 * slots. Who moves addresses between slots notes the bin again as well.
 *
 * How much is live. A hit adds to its front's tally, or takes from it, and compares twice (stats.h): a malloc with the
 * tally's marks, above which front_look is due; a free with the front's floor, below which it is not a hit.
 *   (4) floor = max(stock - limit, told of live_bytes - slack)
 * Where live_bytes is at the first the front is full; where at the second alone, regions_give_told tells and tries
 * again, and nothing else is decided otherwise than above the floor: when a front tells depends on the time.
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
    CACHE_BINS = 64,   /* of regions */
    FRONT_RECENT = 64, /* caches found by handle without a search */
    /*
     * Spaces of pools, two a pool, that a thread finds its front of without a search: of eight GPUs' pools no two share
     * a place. More would take more of the thread-local storage that is left for libraries loaded late.
     */
    FRONT_POOLS = 16,
    FRONT_IDLE_US = 10000,
    CACHES_MAX = 1 << 20, /* of a space's fronts */
    STREAM_NEIGHBOURS = 8,
};

enum cached { CACHED_REGIONS, CACHED_SLICES, CACHED_KINDS };

/*
 * What a pair of a thread and a stream costs while it is quiet: this for pages, as much for subpages, 128 B for slices.
 */
struct cache {
    _Alignas(64) _Atomic(void *) handle; /* CUstream, of the legacy one 0; CACHE_CLOSED: not to be filled any more */
    _Atomic(void *) stream;              /* the record that it is attached to; NULL: none, or it was released */
    union {                              /* the owner's copies of the stream's, as are the next three: */
        unsigned long long id;           /* its id, */
        CUcontext context;               /* or of a default stream, which has none, its context */
    };
    bool check_id;          /* in every take */
    bool is_default;        /* a default stream: which one its handle names depends on the current context */
    bool is_attached;       /* the owner's: it is in by_slot */
    uint32_t slot;          /* the record's */
    _Atomic(uint32_t) idle; /* set by the reaper, cleared by every take and give */
    uint32_t index;         /* among the fronts' caches; constant, as are front and next */
    struct bin_set regions;
    _Atomic(void *) slices; /* struct slice_cache (slices.h), of a front of subpages; NULL: none yet */
    struct front *front;
    struct cache *next;                /* of the front's */
    struct cache *next_spare;          /* the owner's: of those attached to nothing */
    struct cache *next_of_stream;      /* under the registry's lock: of those attached to one record */
    _Atomic(uint16_t) bin[CACHE_BINS]; /* of regions */
};

_Static_assert(sizeof(struct cache) == 256, "two caches and one of slices are less than 1 KiB");

extern char front_no_stream; /* an address that is no stream's handle */
#define CACHE_CLOSED ((void *)&front_no_stream)

struct front {
    _Alignas(128) struct cache *recent[FRONT_RECENT]; /* by handle; never NULL */
    struct stats_tally tally;
    uint64_t floor;         /* of the tally's live_bytes; as a number with a sign */
    uint64_t stock;         /* bytes: see front_held */
    uint64_t limit;         /* bytes: from the pool's first limit to its last one, while the pool keeps its shape */
    uint32_t rebuilds;      /* the pool's, when the limit was last reset, */
    uint64_t refused;       /* frees of what was too long for the limit */
    uint64_t steady_at;     /* frees, with those, at which the limit doubles */
    struct fronts *fronts;  /* constant */
    struct cache **by_slot; /* the attached caches, by their records' slots */
    uint32_t slots;         /* of by_slot */
    uint32_t closings;      /* of the pool's, up to which closed caches were detached */
    struct cache *spare;    /* attached to nothing */
    struct bin_stock bins[CACHED_KINDS];
    struct cache *reclaimed; /* the cache whose bins were last taken back for others */
    _Atomic(uint64_t) owner; /* the thread's number; 0: its thread has ended */
    _Atomic(void *) caches;  /* list of caches, which only grows */
    struct front *next;      /* of the space's, constant */
};

/* What a space's fronts have of a stream, by its record's slot. */
struct stream_caches {
    _Atomic(void *) neighbour[STREAM_NEIGHBOURS]; /* some of the attached caches, for threads that look for memory */
    struct cache *attached; /* all of them, a list: under the registry's lock, or alone while the record is CLOSING */
};

/* A space's. */
struct fronts {
    /* Of the pool, never used again; FRONTS_NONE: no caches, or no more: the device is lost. */
    _Atomic(uint64_t) serial;
    uint64_t longest;                 /* units of a region that is cached, */
    size_t span;                      /* and its bytes beyond the first unit */
    uint64_t first_limit, last_limit; /* bytes in one front */
    bool check_ids;                   /* of streams that have one */
    struct space *space;              /* constant, as is the next: */
    struct slabs *slabs;              /* those of the space; NULL: it is one of pages */
    struct fronts *next_pool, **link; /* of all pools with caches, under their lock */
    uint32_t place;                   /* in front_known; constant: it outlasts the serial */
    struct bins bins[CACHED_KINDS];
    struct cache *cache; /* CACHES_MAX of them, reserved; constant, as are the next three */
    void *slice_caches;  /* struct slice_cache, one for each of them */
    void *noted_words;   /* of noted_caches */
    struct stream_caches *of_stream;
    _Atomic(uint32_t) caches; /* so many are in use */
    struct tree noted_caches; /* a cache that has a bin noted is there, or is about to be */
    uint32_t orphans;         /* of the streams, up to which caches of gone streams were closed; under the pass lock */
    _Atomic(void *) first;    /* list of fronts, which only grows */
    _Atomic(uint32_t) closings; /* caches closed by other threads than their own, so far */
    uint64_t next_look_ns;      /* for idle caches; under the pass lock, as is noted */
    bool noted;                 /* something was cached at the last look */
};

#define FRONTS_NONE UINT64_MAX

/* The calling thread's fronts, each at its pool's place: the remainder of the serial. */
extern _Thread_local struct front_of_pool {
    uint64_t serial;
    struct front *front;
} front_known[FRONT_POOLS] __attribute__((tls_model("initial-exec")));

/* What a front holds at first, and at most, in regions of units of this size. NULL configuration: there are no caches.
 */
struct front_limits {
    size_t unit_size, first_bytes, most_bytes;
};
vpmm_status fronts_init(struct fronts *, struct space *, const vpmm_config *, struct front_limits); /* HOST_MEMORY */
void fronts_free(struct fronts *); /* no other thread is inside the pool */

/* The cache of the calling thread for the stream, made if need be; NULL: there are none, or no host memory. */
struct cache *front_cache(struct fronts *, struct stream *);

/* From here on every call goes the long way, where it is told that the device is lost. */
void fronts_disable(struct fronts *);

/*
 * Publishes what all threads have cached for the stream, or for every stream if it is NULL; `mark`: with an event each.
 * True: there was something.
 */
bool fronts_flush(struct fronts *, const struct stream *, bool mark);

/*
 * The same, marked, of what any thread has cached, noted or not: what another one that has taken the noted bits, and
 * gets no processor, would keep from who is about to fail. It looks at each bin of each cache.
 */
void fronts_flush_every(struct fronts *);

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

/* Whether what is CACHED fulfils invariants (1) and (2) of a pool at rest: a region, or a slice by its word. */
bool fronts_hold(const struct fronts *, uint64_t unit);

struct slice;
bool fronts_hold_slice(const struct fronts *, const struct slice *, uint64_t word);

/* ---- what is in one cache, whatever its kind: cache.c ---- */

/* What is different of a kind. A slot has a region's address, or a slice's. */
struct cached_kind {
    uint32_t bins; /* of a set */

    /* Of a fresh bin, whose place in the directory is this. */
    void (*begin)(struct bin *, uint32_t index);

    /* Takes what a slot of the bin names out of the cache, into the caller's hands, if it is still there. */
    bool (*claim)(const struct cache *, const struct stream *, uint32_t index, uint64_t slot);

    /* Gives what was claimed to all, behind a fence. Never fails. */
    void (*publish)(const struct cache *, uint64_t slot, struct fence);

    /* A free into the cache that is undone: live again, of so many bytes asked for. False: it is not there any more. */
    bool (*undo)(const struct cache *, uint32_t index, uint64_t slot, uint64_t *requested);
};

/* The cache's bins of a kind; NULL: none yet. */
static inline struct bin_set *cache_set(const struct cache *cache, enum cached kind)
{
    /* The slices' set is the first member; the acquire pairs with the release in slices_of. */
    return kind == CACHED_REGIONS ? (struct bin_set *)&cache->regions : load_acquire_ptr(&cache->slices);
}

/* Publishes what is in the noted bins; `mark`: with an event. Any thread. True: there was something. */
bool cache_flush(struct cache *, bool mark);

/* The same of every bin, noted or not, with an event. */
void cache_flush_every(struct cache *);

/* The same, unmarked, of every bin, by a thread that is counted among the stream's users. */
void cache_empty(struct cache *, struct stream *);

/* Whether another thread may find something to empty. */
bool cache_noted(const struct cache *);

/* After a bin was noted where none was: fronts_flush finds the cache. */
void cache_list_noted(struct cache *);

/* For the audit: whether one of these bins, which are noted, has it. */
bool cache_holds(const struct cache *, enum cached, uint64_t bins, uint64_t slot);

/* The record of the cache with this thread as a visitor, until stream_end_visit; NULL: it has none any more. */
struct stream *cache_enter(struct cache *);

/*
 * As stream_enter, by the cache's own thread, which has just seen that the handle is still that of the cache's stream,
 * and need not look for its record. NULL: that is not in use any more, or not for long: stream_enter.
 */
struct stream *cache_enter_again(struct cache *);

/* Those below are the owner's. */

/* Takes all bins back from a cache that was emptied. */
void cache_return_bins(struct cache *);

/* Whether all of them are returned. */
bool cache_is_bare(const struct cache *);

/*
 * The bin of a place in the directory, made if there is none: a front that has FRONT_BINS empties another of its caches
 * for it. NULL: there is no memory.
 */
struct bin *cache_make_bin(struct cache *, enum cached, uint32_t index);

/* So many slots of the bin count, other than by a hit: the stock changes with it. */
void cache_set_count(struct cache *, enum cached, struct bin *, uint32_t count);

/* A bin's slots are filled: others may empty it. The reaper is told once until the cache is next emptied. */
void cache_note_filled(struct cache *, enum cached, uint32_t index);

/* Publishes the oldest so many of a bin. True: there was something. */
bool cache_flush_oldest(struct cache *, enum cached, uint32_t index, uint32_t slots);

/* The front is full: the slots of regions that other threads have taken are forgotten. */
void cache_drop_stale_all(struct front *);

/* The front of this cache, whose stream the call was given, is full: the older half of each of its bins leaves. */
void cache_halve_all(struct cache *);

/* The floor, after a change of what it is made of. */
void front_set_floor(struct front *);

/* Before what takes so many bytes, and was asked for as so many, is freed into the front, which is not full. */
void front_tell_of_free(struct front *, uint64_t bytes, uint64_t requested);

/* For assertions: the front is the calling thread's, or the reaper looks after it. */
bool front_is_own(const struct front *);

/* Sets a new front's limit, and then as the pool has kept its shape or not. */
void front_adjust_limit(struct front *);

/* ---- the hit, both ways ---- */

/* Due after a malloc that has brought the tally above a mark. */
void front_look(struct front *);

/*
 * Due after a free into a bin that is not noted. False: the cache has been closed, the stream is released or being
 * released, and what was freed is live again, to be freed the long way.
 */
bool cache_note(struct cache *, enum cached, uint32_t index);

static inline struct cache **front_recent(struct front *front, CUstream handle)
{
    return &front->recent[(uint64_t)(uintptr_t)handle * UINT64_C(0x9E3779B97F4A7C15) >> 58];
}

_Static_assert(FRONT_RECENT == 1 << (64 - 58), "front_recent's shift");

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
