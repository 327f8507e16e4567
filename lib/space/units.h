/*
 * units.h - the table of a space: one descriptor for every unit of reserved address space.
 *
 *   unit     what a space counts in: a page, or a subpage of pages that are cut (space.h)
 *   chunk    one cuMemAddressReserve of va_size bytes, and a table of descriptors for it. Chunks are added, never
 *            removed before the pool's end
 *   number   of a unit, in all chunks: chunk << shift | index in the chunk. A chunk has fewer units than 1 << shift, so
 *            that the last unit of one and the first of the next are not neighbours by number, as they are none in fact
 *   region   a run of units of one chunk; its first unit's word says its state and length
 *
 * States and who may change them:
 *   NONE     inside a region, or reserved and never used
 *   LIVE     handed out            -> OWN by the free that wins the exchange; NOTING by a vpmm_use that does
 *   USED     LIVE, and used on further streams (use.h)      -> OWN, NOTING, as LIVE
 *   NOTING   LIVE or USED; one vpmm_use writes down a stream -> USED, or LIVE again, by this thread
 *   ENDING   freed, and waiting for several streams          changed only under the event lock (ending.h)
 *   FREE     mapped, reusable      -> OWN by any thread that wins the exchange (malloc, a merging free, build, reaper)
 *   CACHED   in a front cache      -> LIVE by its owner, OWN by a thief, by exchange
 *   OWN      one thread has it: the only one that may write any of the region's descriptors
 *   CUT      handed out in parts   -> OWN by who has all of its parts (cut.h, slab.h)
 *   HOLE     unmapped              changed only by who has the plan lock
 *   ZOMBIE   to be unmapped         changed only by who has the pass lock
 *
 *   sum of units over LIVE, USED, CUT, FREE, CACHED, ENDING, OWN, HOLE, ZOMBIE regions = units of the chunk, when no
 * one is inside a call
 *
 * The word is state:4 | units:26 | generation:34, and every transition raises the generation. An exchange of the
 * whole word therefore fails if the region changed hands in between, however often (ABA needs 2^33 transitions of one
 * unit within one operation; it would be 2^34 if cut_forget did not raise generations), and what was read of a FREE
 * region's other fields before a successful exchange was true at the exchange: those fields are written only in state
 * OWN.
 *
 * Fields other than the word are written by the owner and read by others as hints, so they are atomics with relaxed
 * order; the word's release (every store of FREE, LIVE, USED, CACHED, ENDING) and acquire (every load that leads to an
 * exchange) order them.
 *
 * Descriptors are 64 bytes, one cache line: 8-byte words of adjacent units cost 116 ns a pair in false sharing where
 * 64-byte ones cost 26. A table is reserved address space without commitment; only what is used is touched.
 */
#ifndef VPMM_LIB_UNITS_H
#define VPMM_LIB_UNITS_H

#include "base/atomic.h"
#include "base/status.h"

#include <cuda.h>

enum unit_state {
    UNIT_NONE,
    UNIT_LIVE,
    UNIT_FREE,
    UNIT_CACHED,
    UNIT_OWN,
    UNIT_HOLE,
    UNIT_ZOMBIE,
    UNIT_CUT,
    UNIT_USED,
    UNIT_NOTING,
    UNIT_ENDING,
};

enum { UNIT_STATE_BITS = 4, UNIT_COUNT_BITS = 26, UNIT_GENERATION_BITS = 34, UNITS_MAX_CHUNKS = 1024 };
#define UNITS_A_CHUNK_MAX ((UINT64_C(1) << UNIT_COUNT_BITS) - 1) /* pages: no region of pages is longer */

/* A point in a stream: `stream` is the slot of its record, 0 for memory that waits for nothing. */
struct fence {
    uint32_t stream;
    uint64_t number;
};

#define FENCE_PASSED ((struct fence){0, 0})

/* What an extent has where it is. Others than the first are in a parked pool alone: see park.h. */
enum extent_memory {
    EXTENT_MAPPED, /* a handle, mapped, with access */
    EXTENT_UNSURE, /* a handle, which may be mapped, or released already: the driver has refused a step */
    EXTENT_PARKED, /* neither a handle nor a mapping */
};

/*
 * A physical handle and where it is mapped. Written by the owner of the pages that it is mapped at, and in a graph's
 * pool by who parks or wakes it, under the pass lock, while nobody builds. Its memory is held until its last mapping is
 * gone and its handle is released: old addresses count as holders beside its present place, and who lets go of it last
 * releases the handle (zombie.h).
 */
struct extent {
    _Atomic(uint64_t) page;
    uint32_t pages;
    CUmemGenericAllocationHandle handle;
    _Atomic(uint32_t) holders;
    bool release_refused;      /* the last holder's, or of who parks */
    enum extent_memory memory; /* under the pass lock once the pool is parked; else EXTENT_MAPPED */
};

/*
 * Gives one holder's share up: what it did with the extent is before what the last one does. True: it was the last, and
 * the caller releases the handle; so for each later call too.
 */
static inline bool extent_let_go(struct extent *extent)
{
    return !load_acquire_u32(&extent->holders) || fetch_add_acq_rel_u32(&extent->holders, UINT32_MAX) == 1;
}

struct unit {
    _Alignas(64) _Atomic(uint64_t) word;
    _Atomic(uint64_t) fence_number;
    _Atomic(uint32_t) fence_stream;
    _Atomic(uint32_t) back;  /* on a region's last unit: its length when it was last published; a hint */
    _Atomic(uint64_t) where; /* on a hinted region's first unit its hint, on a USED one's its struct uses; the owner's,
                                    and of who has it NOTING */
    _Atomic(uint64_t) requested; /* on a LIVE region's first unit: bytes asked for */
    _Atomic(void *) extent;      /* struct extent, of every mapped page; struct slab, of every subpage of a slab */
    _Atomic(uint32_t) span_units, span_stream; /* on the first unit of a span of a FREE region: see region.h */
    _Atomic(uint64_t) span_number;
};

_Static_assert(sizeof(struct unit) == 64, "a unit's descriptor is a cache line");

struct uses; /* use.h */

struct chunk {
    CUdeviceptr base;
    struct unit *unit;
};

struct units {
    size_t unit_size;     /* bytes */
    unsigned unit_shift;  /* unit_size = 1 << unit_shift */
    unsigned chunk_shift; /* of a unit's number, */
    uint64_t index_mask;  /* whose lower bits are the index in the chunk */
    uint64_t chunk_units;
    unsigned max_chunks;
    _Atomic(uint32_t) chunks; /* stored with release after the chunk is filled in; every reader's load is an acquire,
                                 but that the first is there before anything else of the pool */
    struct chunk chunk[UNITS_MAX_CHUNKS];
};

void units_init(struct units *, size_t unit_size, size_t va_size);
void units_free(struct units *); /* the tables; the reservations are the caller's */

/* A table for one more chunk, every word NONE. OUT_OF_ADDRESS_SPACE: no pool has more chunks. HOST_MEMORY. */
vpmm_status units_table_new(const struct units *, void **table);
void units_table_free(const struct units *, void *table); /* NULL is a no-op */

/* Adds a chunk at a reserved address range, with its table; its first unit. One thread at a time. */
uint64_t units_add_chunk(struct units *, CUdeviceptr base, void *table);

static inline uint64_t word_make(enum unit_state state, uint64_t units, uint64_t previous)
{
    return (uint64_t)state | units << UNIT_STATE_BITS |
           ((previous >> (UNIT_STATE_BITS + UNIT_COUNT_BITS)) + 1) << (UNIT_STATE_BITS + UNIT_COUNT_BITS);
}

/* The same of a word whose state is known: one addition. The generation is on top and wraps. */
static inline uint64_t word_next(uint64_t word, enum unit_state from, enum unit_state to)
{
    return word + (UINT64_C(1) << (UNIT_STATE_BITS + UNIT_COUNT_BITS)) + (uint64_t)to - (uint64_t)from;
}

static inline enum unit_state word_state(uint64_t word)
{
    return (enum unit_state)(word & ((1u << UNIT_STATE_BITS) - 1));
}

static inline uint64_t word_units(uint64_t word)
{
    return word >> UNIT_STATE_BITS & ((UINT64_C(1) << UNIT_COUNT_BITS) - 1);
}

static inline uint64_t word_generation(uint64_t word)
{
    return word >> (UNIT_STATE_BITS + UNIT_COUNT_BITS);
}

/* The word as it would be later on. */
static inline uint64_t word_of_generation(uint64_t word, uint64_t generation)
{
    return word + ((generation - word_generation(word)) << (UNIT_STATE_BITS + UNIT_COUNT_BITS));
}

static inline uint64_t unit_index(const struct units *units, uint64_t unit)
{
    return unit & units->index_mask;
}

static inline struct unit *unit_at(const struct units *units, uint64_t unit)
{
    return &units->chunk[unit >> units->chunk_shift].unit[unit_index(units, unit)];
}

static inline CUdeviceptr unit_address(const struct units *units, uint64_t unit)
{
    return units->chunk[unit >> units->chunk_shift].base + (unit_index(units, unit) << units->unit_shift);
}

/* Units of the chunk from this one on, itself included: no region reaches further. */
static inline uint64_t units_to_chunk_end(const struct units *units, uint64_t unit)
{
    return units->chunk_units - unit_index(units, unit);
}

/* The unit that holds this address. false: not in any chunk. */
bool unit_around(const struct units *, CUdeviceptr, uint64_t *unit);

/* The unit at exactly this address, in any chunk. false: not in any, or not a unit's first byte. */
bool unit_in_any_chunk(const struct units *, CUdeviceptr, uint64_t *unit);

/*
 * Whether it is so of one of the regions that begin at these units, of one chunk; or of all chunks. A look from region
 * to region, which takes nothing: what changes meanwhile, and what comes after it, may be missed.
 */
typedef bool unit_question(uint64_t unit, uint64_t word, const void *data);
bool units_any(const struct units *, uint64_t first, uint64_t units_at_most, unit_question *, const void *data);
bool units_any_of_chunks(const struct units *, unit_question *, const void *data);

/*
 * A word as a look saw it. Of a region it is the first unit's, and another one as soon as its state or its length has
 * changed; of a slice (slab.h) it has no generation, and may be the same again.
 */
struct word_seen {
    const _Atomic(uint64_t) *at; /* NULL: none */
    uint64_t word;
};

static inline bool word_is_as_seen(const struct word_seen *seen)
{
    return seen->at && load_acquire_u64(seen->at) == seen->word;
}

/* What unit_is_owned has found is stored in `seen`. */
struct owned_look {
    const struct units *units;
    struct word_seen *seen;
};

unit_question unit_is_owned; /* in a thread's hands; of a struct owned_look */

/*
 * How far it is from a unit with this word, where a region began when a look from `first` on came by, to the next
 * region. If the unit is part of a longer region by now, which began before it, that one's end is found from `first`
 * on: the rest of a hole may be millions of units.
 */
uint64_t units_to_next(const struct units *, uint64_t first, uint64_t unit, uint64_t word);

/*
 * The same in the first chunk alone, the only one of most pools, which is there before anything else of the pool.
 * Rotated, an offset that is no unit's has its low bits at the top, and is out of range like one beyond the end.
 */
static inline bool unit_in_first_chunk(const struct units *units, CUdeviceptr address, struct unit **unit)
{
    uint64_t offset = address - units->chunk[0].base;
    uint64_t index = offset >> units->unit_shift | offset << (-units->unit_shift & 63);
    if (index >= units->chunk_units)
        return false;
    *unit = &units->chunk[0].unit[index];
    return true;
}

/* The unit at exactly this address. false: there is none. */
static inline bool unit_of_address(const struct units *units, CUdeviceptr address, uint64_t *unit)
{
    struct unit *first;
    if (!unit_in_first_chunk(units, address, &first))
        return unit_in_any_chunk(units, address, unit);
    *unit = (uint64_t)(first - units->chunk[0].unit);
    return true;
}

/* Its descriptor; NULL: there is none. */
static inline struct unit *unit_at_address(const struct units *units, CUdeviceptr address)
{
    struct unit *first;
    uint64_t unit;
    if (unit_in_first_chunk(units, address, &first))
        return first;
    return unit_in_any_chunk(units, address, &unit) ? unit_at(units, unit) : NULL;
}

static inline struct fence unit_fence(const struct unit *unit)
{
    return (struct fence){load_relaxed_u32(&unit->fence_stream), load_relaxed_u64(&unit->fence_number)};
}

static inline void unit_set_fence(struct unit *unit, struct fence fence)
{
    store_relaxed_u32(&unit->fence_stream, fence.stream);
    store_relaxed_u64(&unit->fence_number, fence.number);
}

/* Of a USED region's first unit, by who has made it NOTING or OWN. */
static inline struct uses *unit_uses(const struct unit *unit)
{
    return (struct uses *)(uintptr_t)load_relaxed_u64(&unit->where);
}

static inline struct extent *unit_extent(const struct unit *unit)
{
    return load_relaxed_ptr(&unit->extent);
}

/*
 * The owner's change of its region's first word. Pairs with the acquire load of whoever finds the region next. The
 * order is sequentially consistent for FREE, where two neighbours that are published at once must not both miss
 * each other (region.c), and for CACHED, where a cache and who empties it must not (front.h).
 */
static inline uint64_t unit_set(struct unit *unit, enum unit_state state, uint64_t count)
{
    uint64_t word = word_make(state, count, load_relaxed_u64(&unit->word));
    if (state == UNIT_FREE || state == UNIT_CACHED)
        store_sc_u64(&unit->word, word);
    else
        store_release_u64(&unit->word, word);
    return word;
}

/* Takes a region whose word was read (with acquire): true if it was still so, and is now OWN. */
static inline bool unit_take(struct unit *unit, uint64_t word)
{
    return cas_sc_u64(&unit->word, &word, word_make(UNIT_OWN, word_units(word), word));
}

#endif
