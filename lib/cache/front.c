#include "cache/front.h"

#include "base/assert.h"
#include "base/clock.h"
#include "base/lock.h"
#include "base/reserve.h"
#include "cache/slices.h"
#include "space/identity.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

_Thread_local struct front_of_pool front_known[FRONT_POOLS];
char front_no_stream;

/* ---- the process's threads and pools ---- */

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* the list of pools */
static struct fronts *pools;
static pthread_key_t exit_key;
static bool ready; /* false: no key is left, or no handlers of fork could be registered; then there are no caches */
static _Atomic(uint64_t) serials; /* of pools and threads */

/* Of a front whose thread has ended, and of one that the reaper looks after meanwhile; threads' serials lie between. */
#define OWNER_NONE   UINT64_C(0)
#define OWNER_REAPER UINT64_MAX

static void empty_known(void)
{
    memset(front_known, 0, sizeof front_known);
}

static void before_fork(void)
{
    lock_take(&lock);
}

static void after_fork_in_parent(void)
{
    pthread_mutex_unlock(&lock);
}

/* The child may not use its parent's pools: it must not find their caches. */
static void after_fork_in_child(void)
{
    pools = NULL;
    empty_known();
    pthread_mutex_unlock(&lock);
}

static void close_cache(struct cache *cache)
{
    struct fronts *fronts = cache->front->fronts;
    store_sc_ptr(&cache->handle, CACHE_CLOSED);
    fetch_add_sc_u32(&fronts->closings, 1);
}

static _Thread_local unsigned char exits; /* so often the thread's end has been told */

static void thread_exits(void *serial)
{
    exits++;
    lock_take(&lock);
    for (struct fronts *fronts = pools; fronts; fronts = fronts->next_pool)
        for (struct front *front = load_acquire_ptr(&fronts->first); front; front = front->next)
            if (load_relaxed_u64(&front->owner) == (uint64_t)(uintptr_t)serial)
                store_sc_u64(&front->owner, OWNER_NONE); /* pairs with those in adopt and detach_ownerless */
    pthread_mutex_unlock(&lock);
    empty_known();
}

static void set_up(void)
{
    /* Those of another copy of the library, whose pool a caller may name by mistake, are others. */
    store_relaxed_u64(&serials, (uint64_t)(uintptr_t)&serials << 16);
    ready = !pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child) &&
            !pthread_key_create(&exit_key, thread_exits);
}

/*
 * 0: no memory for it; or the thread's end has been told as often as it may be, and the thread allocates once more in
 * its last round of destructors of thread-specific data: a front that it took then would stay its own for ever. Of a
 * thread that allocates for the first time in that round nothing tells that it is the last: that front does stay.
 */
static uint64_t thread_serial(void)
{
    uint64_t serial = (uint64_t)(uintptr_t)pthread_getspecific(exit_key);
    if (serial || exits >= PTHREAD_DESTRUCTOR_ITERATIONS - 1)
        return serial;
    serial = fetch_add_relaxed_u64(&serials, 1) + 1;
    return pthread_setspecific(exit_key, (void *)(uintptr_t)serial) ? 0 : serial;
}

bool front_is_own(const struct front *front)
{
    uint64_t owner = peek_u64(&front->owner);
    return owner == OWNER_REAPER || (owner && owner == (uint64_t)(uintptr_t)pthread_getspecific(exit_key));
}

/* ---- a pool's fronts ---- */

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

static size_t noted_bytes(void)
{
    return tree_words(CACHES_MAX) * sizeof(uint64_t);
}

static vpmm_status init_tables(struct fronts *fronts)
{
    fronts->cache = reserve_zeros(CACHES_MAX * sizeof(struct cache));
    fronts->slice_caches = reserve_zeros(CACHES_MAX * sizeof(struct slice_cache));
    fronts->noted_words = reserve_zeros(noted_bytes());
    fronts->of_stream = reserve_zeros(STREAMS_MAX * sizeof(struct stream_caches));
    if (!fronts->cache || !fronts->slice_caches || !fronts->noted_words || !fronts->of_stream ||
        !bins_init(&fronts->bins[CACHED_REGIONS]) || !bins_init(&fronts->bins[CACHED_SLICES]))
        return fail(VPMM_ERROR_HOST_MEMORY, "no address space for the front caches' records");
    tree_init(&fronts->noted_caches, fronts->noted_words, CACHES_MAX);
    return VPMM_SUCCESS;
}

/* The first place in front_known that the fewest spaces of other pools have, under the lock. */
static uint32_t free_place(void)
{
    uint32_t users[FRONT_POOLS] = {0}, place = 0;
    for (const struct fronts *fronts = pools; fronts; fronts = fronts->next_pool)
        users[fronts->place]++;
    for (uint32_t i = 1; i < FRONT_POOLS; i++)
        place = users[i] < users[place] ? i : place;
    return place;
}

/*
 * A serial that has the place as its remainder. (Where serials were given out one by one, to threads too, six threads
 * between two pools made both have the same places, and each malloc in turn of the two missed.)
 */
static uint64_t pool_serial(uint32_t place)
{
    uint64_t last = fetch_add_relaxed_u64(&serials, 2 * FRONT_POOLS);
    return (last / FRONT_POOLS + 1) * FRONT_POOLS + place;
}

static void enlist(struct fronts *fronts)
{
    lock_take(&lock);
    fronts->place = free_place();
    store_relaxed_u64(&fronts->serial, pool_serial(fronts->place));
    fronts->next_pool = pools;
    fronts->link = &pools;
    if (pools)
        pools->link = &fronts->next_pool;
    pools = fronts;
    pthread_mutex_unlock(&lock);
}

vpmm_status fronts_init(struct fronts *fronts, struct space *space, const vpmm_config *config,
                        struct front_limits limits)
{
    fronts->space = space;
    store_relaxed_u64(&fronts->serial, FRONTS_NONE);
    if (!config)
        return VPMM_SUCCESS;
    fronts->last_limit = smaller(smaller(config->cache_bytes, limits.most_bytes), SIZE_MAX / 4); /* see floor */
    fronts->first_limit = smaller(fronts->last_limit, limits.first_bytes);
    fronts->longest = fronts->last_limit / limits.unit_size;
    if (fronts->longest > UNITS_A_CHUNK_MAX)
        fronts->longest = UNITS_A_CHUNK_MAX;
    fronts->span = (fronts->longest - 1) * limits.unit_size;
    fronts->check_ids = config->streams == VPMM_STREAMS_CHECKED;
    if (!fronts->longest || config->streams == VPMM_STREAMS_EAGER)
        return VPMM_SUCCESS;
    pthread_once(&once, set_up);
    if (!ready)
        return VPMM_SUCCESS;
    vpmm_status status = init_tables(fronts);
    if (status != VPMM_SUCCESS)
        return status;
    enlist(fronts);
    return VPMM_SUCCESS;
}

void fronts_disable(struct fronts *fronts)
{
    store_relaxed_u64(&fronts->serial, FRONTS_NONE);
}

static void free_front(struct front *front)
{
    free(front->by_slot);
    free(front);
}

void fronts_free(struct fronts *fronts)
{
    struct front *next;
    lock_take(&lock); /* before the link is read: pools beside this one in the list write it */
    if (fronts->link)
        *fronts->link = fronts->next_pool;
    if (fronts->link && fronts->next_pool)
        fronts->next_pool->link = fronts->link;
    pthread_mutex_unlock(&lock);
    for (struct front *front = load_relaxed_ptr(&fronts->first); front; front = next) {
        next = front->next;
        free_front(front);
    }
    reserve_free(fronts->cache, CACHES_MAX * sizeof(struct cache));
    reserve_free(fronts->slice_caches, CACHES_MAX * sizeof(struct slice_cache));
    reserve_free(fronts->noted_words, noted_bytes());
    reserve_free(fronts->of_stream, STREAMS_MAX * sizeof(struct stream_caches));
    for (enum cached kind = 0; kind < CACHED_KINDS; kind++)
        bins_free(&fronts->bins[kind]);
}

/* What `recent` holds where there is nothing: a cache of no stream, which matches no handle. */
static struct cache no_cache = {.handle = CACHE_CLOSED};

static void forget_recent(struct front *front, const struct cache *cache)
{
    for (int i = 0; i < FRONT_RECENT; i++)
        if (!cache || front->recent[i] == cache)
            front->recent[i] = &no_cache;
}

/* An ended thread's front, with what is in it. */
static struct front *adopt(struct fronts *fronts, uint64_t thread)
{
    for (struct front *front = load_acquire_ptr(&fronts->first); front; front = front->next) {
        uint64_t owner = OWNER_NONE;
        if (load_relaxed_u64(&front->owner) == OWNER_NONE && cas_sc_u64(&front->owner, &owner, thread))
            return front;
    }
    return NULL;
}

static struct front *new_front(struct fronts *fronts, uint64_t thread)
{
    struct front *front = aligned_alloc(_Alignof(struct front), sizeof *front);
    if (!front)
        return NULL;
    memset(front, 0, sizeof *front);
    forget_recent(front, NULL);
    front->fronts = fronts;
    store_relaxed_u64(&front->owner, thread);
    front->tally.live_stat = fronts->space->live_stat;
    front->tally.cached_stat = fronts->space->cached_stat;
    stats_join(fronts->space->stats, &front->tally, fronts->last_limit);
    front_adjust_limit(front);
    void *first = load_relaxed_ptr(&fronts->first);
    do /* lock-free: a failed exchange is another thread's push. Nothing leaves the list, so no pointer comes back */
        front->next = first;
    while (!cas_acq_rel_ptr(&fronts->first, &first, front)); /* pairs with each acquire of `first` */
    return front;
}

/* The front that the thread already has, which another pool's has taken the place of in front_known. */
static struct front *find_own(struct fronts *fronts, uint64_t thread)
{
    struct front *front = load_acquire_ptr(&fronts->first);
    while (front && load_relaxed_u64(&front->owner) != thread)
        front = front->next;
    return front;
}

static struct front *own_front(struct fronts *fronts)
{
    uint64_t serial = load_relaxed_u64(&fronts->serial);
    struct front_of_pool *known = &front_known[serial % FRONT_POOLS];
    if (serial == FRONTS_NONE || known->serial == serial)
        return serial == FRONTS_NONE ? NULL : known->front;
    uint64_t thread = thread_serial();
    struct front *front = thread ? find_own(fronts, thread) : NULL;
    if (thread && !front)
        front = adopt(fronts, thread);
    if (thread && !front)
        front = new_front(fronts, thread);
    if (front) {
        vpmm_assert(front->fronts == fronts && front_is_own(front));
        *known = (struct front_of_pool){serial, front};
        front_look(front); /* see fronts_look, which missed it */
    }
    return front;
}

/* ---- emptying all ---- */

/* What the cache's fronts have of the stream that it is of. */
static struct stream_caches *of_stream(const struct cache *cache)
{
    return &cache->front->fronts->of_stream[cache->slot];
}

static void add_neighbour(struct cache *cache)
{
    _Atomic(void *) *neighbour = of_stream(cache)->neighbour;
    for (int i = 0; i < STREAM_NEIGHBOURS; i++) {
        void *none = NULL;
        if (!load_relaxed_ptr(&neighbour[i]) && cas_acq_rel_ptr(&neighbour[i], &none, cache)) /* steal acquires it */
            return;
    }
}

static void remove_neighbour(struct cache *cache)
{
    _Atomic(void *) *neighbour = of_stream(cache)->neighbour;
    for (int i = 0; i < STREAM_NEIGHBOURS; i++) {
        void *self = cache;
        if (load_relaxed_ptr(&neighbour[i]) == cache)
            cas_acq_rel_ptr(&neighbour[i], &self, NULL); /* nobody reads on from NULL */
    }
}

/* The first cache from this index on that has something noted, or had lately. NULL: none. */
static struct cache *next_noted(const struct fronts *fronts, uint64_t *index)
{
    bool any = fronts->cache && tree_next(&fronts->noted_caches, *index, index);
    return any ? &fronts->cache[*index] : NULL; /* its owner has filled it in before it listed it */
}

/* Off the list before its bits are taken: who notes a bin later finds none noted, and lists the cache again. */
static bool flush_listed(struct fronts *fronts, struct cache *cache, bool mark)
{
    tree_remove(&fronts->noted_caches, cache->index);
    return cache_flush(cache, mark);
}

bool fronts_flush(struct fronts *fronts, const struct stream *stream, bool mark)
{
    struct cache *cache;
    bool any = false;
    for (uint64_t index = 0; (cache = next_noted(fronts, &index)); index++)
        if (!stream || load_sc_ptr(&cache->stream) == stream)
            any |= flush_listed(fronts, cache, mark);
    return any;
}

void fronts_flush_every(struct fronts *fronts)
{
    for (struct front *front = load_acquire_ptr(&fronts->first); front; front = front->next)
        for (struct cache *cache = load_acquire_ptr(&front->caches); cache; cache = cache->next)
            cache_flush_every(cache);
}

void fronts_flush_own(struct fronts *fronts)
{
    const struct front *front = own_front(fronts);
    struct cache *cache;
    for (uint64_t index = 0; front && (cache = next_noted(fronts, &index)); index++)
        if (cache->front == front)
            flush_listed(fronts, cache, true);
}

/*
 * Every bin: another thread may have taken the bits, and been refused entry because the stream is CLOSING. The
 * list is as it is: nobody attaches a cache to such a stream, or detaches one.
 */
void fronts_close(struct fronts *fronts, struct stream *stream)
{
    struct streams *streams = fronts->space->streams;
    struct cache *next;
    if (!fronts->cache)
        return;
    vpmm_assert(peek_u32(&stream->state) == STREAM_CLOSING && peek_u32(&stream->users) > 0);
    lock_take(&streams->lock); /* pairs with that of who has put a cache into the list */
    struct cache *cache = fronts->of_stream[stream->slot].attached;
    fronts->of_stream[stream->slot].attached = NULL;
    pthread_mutex_unlock(&streams->lock);
    for (; cache; cache = next) {
        vpmm_assert(peek_ptr(&cache->stream) == stream);
        next = cache->next_of_stream;
        close_cache(cache);
        cache_empty(cache, stream);
        remove_neighbour(cache);
        store_sc_ptr(&cache->stream, NULL);
    }
}

bool fronts_noted(const struct fronts *fronts)
{
    uint64_t index = 0;
    return next_noted(fronts, &index);
}

/* ---- which stream a cache is of ---- */

static void link_to_stream(struct cache *cache)
{
    struct cache **first = &of_stream(cache)->attached;
    vpmm_assert(lock_is_taken(&cache->front->fronts->space->streams->lock));
    cache->next_of_stream = *first;
    *first = cache;
}

static void unlink_from_stream(const struct cache *cache)
{
    struct cache **link = &of_stream(cache)->attached;
    vpmm_assert(lock_is_taken(&cache->front->fronts->space->streams->lock));
    while (*link != cache) {
        vpmm_assert(*link); /* it is in the list */
        link = &(*link)->next_of_stream;
    }
    *link = cache->next_of_stream;
}

/*
 * Takes a closed cache from its record, which can go to another stream from then on: not before, because a hit that has
 * found the cache open, and is still at it, takes what is cached for the record. Counted in while the cache is emptied.
 * False: the stream is CLOSING, and who releases it looks into the cache: its slots are not another stream's
 * before that has ended.
 */
static bool part_from_stream(struct cache *cache)
{
    struct space *space = cache->front->fronts->space;
    struct stream *stream = load_sc_ptr(&cache->stream);
    if (stream && !stream_enter_cached(stream))
        return false;
    bool released = !stream || load_sc_ptr(&cache->stream) != stream; /* who released it has done what follows */
    if (stream && released)
        stream_end_visit(stream);
    if (!released) {
        cache_empty(cache, stream);
        remove_neighbour(cache);
        lock_take(&space->streams->lock);
        unlink_from_stream(cache);
        pthread_mutex_unlock(&space->streams->lock);
        store_sc_ptr(&cache->stream, NULL); /* before the count: see cache_enter */
        stream_end_visit(stream);
    }
    uint32_t caches = fetch_add_sc_u32(&stream_at(space->streams, cache->slot)->caches[space->level], UINT32_MAX);
    vpmm_assert(caches > 0 && !peek_ptr(&cache->stream)); /* this one was among them until now */
    return true;
}

/* False: not yet. */
static bool detach(struct front *front, struct cache *cache)
{
    vpmm_assert(front_is_own(front) && cache->is_attached && front->by_slot[cache->slot] == cache);
    vpmm_assert(peek_ptr(&cache->handle) == CACHE_CLOSED);
    if (!part_from_stream(cache))
        return false;
    cache_return_bins(cache);
    forget_recent(front, cache);
    front->by_slot[cache->slot] = NULL;
    cache->is_attached = false;
    bell_ring(front->fronts->space->bell); /* the record may be taken out of use now: see streams_pending */
    cache->next_spare = front->spare;
    front->spare = cache;
    return true;
}

/* The front's owner's: lets go of the streams that are gone. */
static void detach_closed(struct front *front)
{
    uint32_t closings = load_sc_u32(&front->fronts->closings);
    bool all = true;
    if (front->closings == closings)
        return;
    for (struct cache *cache = load_relaxed_ptr(&front->caches); cache; cache = cache->next)
        if (cache->is_attached && load_sc_ptr(&cache->handle) == CACHE_CLOSED)
            all &= detach(front, cache);
    if (all)
        front->closings = closings;
}

static struct cache *new_cache(struct front *front)
{
    struct fronts *fronts = front->fronts;
    struct cache *cache = front->spare;
    if (cache) {
        vpmm_assert(!cache->is_attached && cache_is_bare(cache) && !peek_ptr(&cache->stream));
        front->spare = cache->next_spare;
        return cache;
    }
    uint32_t index = fetch_add_relaxed_u32(&fronts->caches, 1);
    if (index >= CACHES_MAX) {
        fetch_sub_relaxed_u32(&fronts->caches, 1);
        return NULL;
    }
    cache = &fronts->cache[index];
    cache->index = index;
    cache->regions.base = fronts->bins[CACHED_REGIONS].base;
    cache->regions.bin = cache->bin;
    store_relaxed_ptr(&cache->handle, CACHE_CLOSED);
    cache->front = front;
    cache->next = load_relaxed_ptr(&front->caches);
    store_release_ptr(&front->caches, cache); /* pairs with each acquire of `caches`; only its owner pushes */
    return cache;
}

static bool reserve_slot(struct front *front, uint32_t slot)
{
    if (slot < front->slots)
        return true;
    uint32_t slots = slot * 2 > 64 ? slot * 2 : 64;
    struct cache **by_slot = realloc(front->by_slot, slots * sizeof(struct cache *));
    if (!by_slot)
        return false;
    memset(by_slot + front->slots, 0, (slots - front->slots) * sizeof(struct cache *));
    front->by_slot = by_slot;
    front->slots = slots;
    return true;
}

/* By which a hit finds the stream's caches: of the legacy stream's two names one, whichever the pool met it by. */
static CUstream handle_of_caches(const struct stream *stream)
{
    return handle_is_legacy(stream->handle) ? NULL : stream->handle;
}

/* The thread is counted among the stream's users, and the stream is active: the record cannot be taken away meanwhile.
 */
static struct cache *attach(struct front *front, struct stream *stream)
{
    struct cache *cache = reserve_slot(front, stream->slot) ? new_cache(front) : NULL;
    if (!cache)
        return NULL;
    vpmm_assert(peek_u32(&stream->users) > 0 && !front->by_slot[stream->slot]);
    fetch_add_sc_u32(&stream->caches[front->fronts->space->level], 1);
    cache->check_id = stream->has_id && front->fronts->check_ids;
    cache->is_default = handle_is_legacy(stream->handle);
    if (cache->is_default)
        cache->context = stream->context;
    else
        cache->id = stream->id;
    cache->is_attached = true;
    cache->slot = stream->slot;
    store_sc_ptr(&cache->stream, stream); /* before anything is noted: see cache_flush */
    store_sc_ptr(&cache->handle, handle_of_caches(stream));
    struct streams *streams = front->fronts->space->streams;
    lock_take(&streams->lock);
    link_to_stream(cache);
    if (load_sc_u32(&stream->state) == STREAM_ORPHAN)
        fetch_add_sc_u32(&streams->orphans, 1); /* its caches may have been closed already, but not this one */
    pthread_mutex_unlock(&streams->lock);
    front->by_slot[stream->slot] = cache;
    add_neighbour(cache);
    return cache;
}

/* Of a per-thread stream only its own thread could mark what others empty, so that is marked as it is freed. */
struct cache *front_cache(struct fronts *fronts, struct stream *stream)
{
    struct front *front = stream->thread ? NULL : own_front(fronts);
    if (!front)
        return NULL;
    detach_closed(front);
    struct cache *cache = stream->slot < front->slots ? front->by_slot[stream->slot] : NULL;
    if (!cache)
        cache = attach(front, stream);
    vpmm_assert(!cache || (cache->front == front && cache->is_attached && cache->slot == stream->slot));
    if (cache)
        *front_recent(front, handle_of_caches(stream)) = cache;
    return cache;
}

/* ---- the reaper's part ---- */

/* A cache that is listed, and has nothing noted, unless it is noted again just now. */
static void unlist(struct fronts *fronts, struct cache *cache)
{
    tree_remove(&fronts->noted_caches, cache->index);
    if (cache_noted(cache))
        tree_insert(&fronts->noted_caches, cache->index);
}

/* Of one listed cache. True: something is cached in it, and was touched since the last look. */
static bool look_at(struct fronts *fronts, struct cache *cache)
{
    bool closed = load_sc_ptr(&cache->handle) == CACHE_CLOSED;
    if (!cache_noted(cache)) {
        unlist(fronts, cache);
        return false;
    }
    if (!closed && !load_relaxed_u32(&cache->idle)) {
        store_relaxed_u32(&cache->idle, 1);
        return true;
    }
    flush_listed(fronts, cache, true);
    return false;
}

/* Of streams whose handle has come back as another stream's. Every cache is looked at, which is seldom due. */
static void close_orphans(struct fronts *fronts)
{
    uint32_t orphans = load_sc_u32(&fronts->space->streams->orphans);
    if (orphans == fronts->orphans)
        return;
    fronts->orphans = orphans;
    for (struct front *front = load_acquire_ptr(&fronts->first); front; front = front->next)
        for (struct cache *cache = load_acquire_ptr(&front->caches); cache; cache = cache->next) {
            struct stream *stream = load_sc_ptr(&cache->stream);
            if (stream && load_sc_u32(&stream->state) == STREAM_ORPHAN && load_sc_ptr(&cache->handle) != CACHE_CLOSED)
                close_cache(cache);
        }
}

/* Closed caches of ended threads have no owner that lets go of their streams. */
static void detach_ownerless(struct front *front)
{
    uint64_t owner = OWNER_NONE;
    if (load_relaxed_u64(&front->owner) != OWNER_NONE || !cas_sc_u64(&front->owner, &owner, OWNER_REAPER))
        return;
    detach_closed(front);
    vpmm_assert(peek_u64(&front->owner) == OWNER_REAPER);
    store_sc_u64(&front->owner, OWNER_NONE); /* pairs with the exchange in adopt */
}

bool fronts_flush_idle(struct fronts *fronts)
{
    uint64_t now = clock_now_ns();
    if (!fronts->cache)
        return false;
    if (now < fronts->next_look_ns)
        return fronts->noted = fronts->noted || fronts_noted(fronts);
    fronts->next_look_ns = now + FRONT_IDLE_US * UINT64_C(1000);
    fronts->noted = false;
    close_orphans(fronts);
    struct cache *cache;
    for (uint64_t index = 0; (cache = next_noted(fronts, &index)); index++)
        fronts->noted |= look_at(fronts, cache);
    for (struct front *front = load_acquire_ptr(&fronts->first); front; front = front->next)
        detach_ownerless(front);
    return fronts->noted;
}

/* ---- the audit's ---- */

/* A cache of the record's stream has it, in one of these bins. */
static bool hold(const struct fronts *fronts, uint32_t record, enum cached kind, uint64_t bins, uint64_t slot)
{
    const struct stream *stream = stream_at(fronts->space->streams, record);
    for (const struct front *front = load_acquire_ptr(&fronts->first); front; front = front->next)
        for (const struct cache *cache = load_acquire_ptr(&front->caches); cache; cache = cache->next)
            if (load_sc_ptr(&cache->stream) == stream && cache_holds(cache, kind, bins, slot))
                return true;
    return false;
}

bool fronts_hold(const struct fronts *fronts, uint64_t unit)
{
    const struct units *units = &fronts->space->units;
    return hold(fronts, load_relaxed_u32(&unit_at(units, unit)->fence_stream), CACHED_REGIONS, UINT64_MAX,
                unit_address(units, unit));
}

bool fronts_hold_slice(const struct fronts *fronts, const struct slice *slice, uint64_t word)
{
    return hold(fronts, slice_stream(word), CACHED_SLICES, UINT64_C(1) << slice_class_of(word),
                (uint64_t)(uintptr_t)slice);
}

/* ---- statistics ---- */

bool fronts_look(const struct fronts *fronts)
{
    uint64_t serial = load_relaxed_u64(&fronts->serial);
    const struct front_of_pool *known = &front_known[serial % FRONT_POOLS];
    if (known->serial != serial)
        return false;
    front_look(known->front);
    return true;
}
