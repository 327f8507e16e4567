/*
 * slab.h - slices of one size, cut from regions of subpages.
 *
 *   slice    what a request of up to 64 KiB gets: a size class's bytes. Steps of 256 bytes to 2 KiB, then eight a
 *            doubling: a slice is at most an eighth longer than what was asked for, rounded to 256
 *   slab     a region of subpages (CUT in their space) divided into 2 to 32 slices of one class. Of one stream at once
 *   record   what the host knows of a slab. Records are of a kind, by their number of slices, and are used again for
 *            slabs of the same kind; they are freed with the pool, so a pointer to one, or to a slice in it, stays good
 *   set      of a stream: for each class a tree of its slabs that have free slices (tree.h), the lowest taken first
 *
 * The word of a slab is free:32 | owner:20, the slot of the stream's record | epoch:12, raised with each owner:
 *   (1) bit i of free is set  <=>  slice i's own word is FREE, but while a thread is between the two words; work on the
 *       owner's stream may use it at once
 *   (2) free slices behind other fences are in `deferred`, and get their bit when they have passed
 *   (3) number(slab) >= the fence number, on the owner's stream, of every free slice. It stands beside the epoch that
 *       it is of, and is raised for no other: a thread that comes late from an earlier owner leaves it alone
 *   (4) free is not 0  =>  the slab is in its owner's tree for its class, or someone is about to insert it
 *
 * The word of a slice is state:4 | stream:20 | class:6 | requested:17, and says who may change the slice:
 *   FREE      who clears its bit (exchange of the slab's word)        -> OWN
 *   LIVE      the free that wins the exchange, or a vpmm_use          -> CACHED, OWN; NOTING
 *   CACHED    in a front cache for `stream`: by exchange              -> LIVE by its owner, OWN by who flushes it
 *   OWN       one thread has it; or `deferred`, for `stream`, not 0   -> LIVE, CACHED, FREE, ENDING
 *   USED      LIVE, and used on further streams (use.h), whose uses hang on the slice -> OWN, NOTING, as LIVE
 *   NOTING    a vpmm_use of it is under way                           -> USED, or LIVE again, by this thread
 *   ENDING    freed, and waiting for several streams (ending.h)       -> OWN under the event lock
 * A word that is CACHED for a stream says all that a hit must know, class included, so an exchange that succeeds is
 * right however often the slice has changed hands since its address was put in the slot: no ABA.
 *
 * A slab changes hands
 *   when it is empty:  free becomes 0 and owner 0 in one exchange; the region is published behind (owner, number). One
 *                      that is alone of its stream and class in having a free slice is kept, and dissolved when the
 *                      pool is about to grow
 *   when it has passed: another stream that has no free slice makes itself the owner. It first sets the owner to
 *                      SLAB_CLAIMED, which stops frees by the old stream's order, then looks at `number` (every bit
 *                      that is set by now has raised it before), and takes the slab only if it has passed
 * A word read before such a change does not match after it: the epoch differs, for 4096 changes of one slab in the
 * midst of one operation.
 *
 * Everything is lock-free but slabs_pass, which is under the event lock, and a use beside another one of the same
 * slice, which waits while the word is NOTING. A failed exchange is another thread's progress.
 */
#ifndef VPMM_LIB_SLAB_H
#define VPMM_LIB_SLAB_H

#include "base/tree.h"
#include "space/space.h"

struct region;
struct uses; /* use.h */

enum {
    SLICE_STEP = 256,
    SLICE_MAX = 65536,
    SLICE_CLASSES = 48,
    SLAB_SLICES = 32, /* at most */
    SLAB_KINDS = 5,   /* 32, 16, 8, 4, 2 slices */
    SLABS_MAX = 1 << 21,
};

#define SLAB_CLAIMED STREAM_NONE

enum slice_state { SLICE_FREE, SLICE_LIVE, SLICE_CACHED, SLICE_OWN, SLICE_USED, SLICE_NOTING, SLICE_ENDING };

/*
 * A line each: the slices of a slab may be in caches of several threads, each of which writes its slices' words in
 * every hit. Side by side they made a malloc and a free by sixteen threads on an H200 take 200 ns instead of 45.
 */
struct slice {
    _Alignas(64) _Atomic(uint64_t) word;
    _Atomic(uint64_t) address; /* CUdeviceptr; its slab's base and place */
    struct pile_node node;     /* while it is deferred, as is `number` */
    uint64_t number;           /* of the fence; the stream is in the word */
    struct uses *uses;         /* while it is USED: of who has made it NOTING or OWN */
};

struct slab {
    uint32_t index, slices; /* constant */
    _Atomic(uint64_t) base;
    _Atomic(uint64_t) reciprocal; /* of its class: see slice_size */
    _Atomic(uint32_t) class;
    uint64_t subpage; /* its first; the owner's of the region */
    _Alignas(64) _Atomic(uint64_t) word;
    _Atomic(uint64_t) number; /* epoch:12 | number:52 */
    struct slice slice[];
};

struct slabs {
    struct space *space;     /* of subpages; constant */
    _Atomic(void *) *record; /* struct slab, by index */
    _Atomic(void *) *set;    /* struct slab_set, by the slot of the stream's record, with which it stays */
    _Atomic(uint32_t) records;
    struct tree unused[SLAB_KINDS]; /* records of no slab */
    void *words;                    /* of these trees, */
    size_t word_bytes;
    _Atomic(uint64_t) empty;   /* slabs all of whose slices are free */
    struct pile deferred;      /* slices behind fences of other streams than their slab's; taken under the event lock */
    struct pile_node *waiting; /* under the event lock: those that had not passed at the last look */
};

/* ---- sizes ---- */

/* Of a class: bytes of a slice, and 2^40 / that, rounded up: the product with an offset of up to 2^17 is exact. */
extern const struct slice_size {
    uint32_t bytes, kind;
    uint64_t reciprocal;
} slice_size[SLICE_CLASSES];

static inline unsigned slice_class(size_t bytes)
{
    uint32_t steps = (uint32_t)((bytes - 1) / SLICE_STEP); /* 0 to 255 */
    if (steps < 8)
        return steps;
    unsigned log = 31 - (unsigned)__builtin_clz(steps);
    return (log - 2) * 8 + (steps >> (log - 3)) - 8;
}

static inline unsigned slab_slices(unsigned kind)
{
    return SLAB_SLICES >> kind;
}

/* ---- words ---- */

/* Of a slab's word: who has it, as a record's slot (0: nobody), */
static inline uint32_t slab_owner(uint64_t word)
{
    return (uint32_t)(word >> 32) & (STREAMS_MAX - 1);
}

/* and which slices are free; */
static inline uint32_t slab_free_bits(uint64_t word)
{
    return (uint32_t)word;
}

/* these if all are. */
static inline uint32_t slab_all(const struct slab *slab)
{
    return UINT32_MAX >> (SLAB_SLICES - slab->slices);
}

static inline uint64_t slice_word(enum slice_state state, uint32_t stream, unsigned class, size_t requested)
{
    return (uint64_t)state | (uint64_t)stream << 4 | (uint64_t) class << 24 | (uint64_t)requested << 30;
}

static inline enum slice_state slice_state(uint64_t word)
{
    return (enum slice_state)(word & 15);
}

static inline uint32_t slice_stream(uint64_t word)
{
    return (uint32_t)(word >> 4) & (STREAMS_MAX - 1);
}

static inline unsigned slice_class_of(uint64_t word)
{
    return (unsigned)(word >> 24) & 63;
}

static inline size_t slice_requested(uint64_t word)
{
    return (size_t)(word >> 30);
}

/* ---- finding a slice by its address ---- */

/* The slab that a subpage is of; NULL: none. It may be another's by the time that it is looked at. */
static inline struct slab *slab_of_subpage(const struct space *space, uint64_t subpage)
{
    return load_acquire_ptr(&unit_at(&space->units, subpage)->extent);
}

/*
 * The slice that an address is in, or before which it is, if it is in the slab at all; NULL: it is not. The slab may be
 * becoming another one, at another place and of another class, while it is looked at, if the address is not live: so
 * the slice has the last word (slice_is_live).
 */
static inline struct slice *slab_slice_at(struct slab *slab, CUdeviceptr address)
{
    uint64_t offset = address - load_relaxed_u64(&slab->base);
    uint64_t i = offset * load_relaxed_u64(&slab->reciprocal) >> 40;
    return i < slab->slices ? &slab->slice[i] : NULL;
}

/* Whether the slice is live, and begins there; its word. */
static inline bool slice_is_live(const struct slice *slice, CUdeviceptr address, uint64_t *word)
{
    *word = load_acquire_u64(&slice->word); /* pairs with the malloc's store or exchange: the address is of this word */
    return slice_state(*word) == SLICE_LIVE && load_relaxed_u64(&slice->address) == address;
}

/* ---- slabs ---- */

vpmm_status slabs_init(struct slabs *, struct space *); /* HOST_MEMORY */
void slabs_free(struct slabs *);                        /* before the streams and the space */

/* What a slab of the class is made of: subpages, at an address that all its slices are aligned by. */
struct want slab_want(unsigned class);

/*
 * Divides an owned region of subpages, which work on the stream may use without waiting, into slices: a slab of the
 * stream's. The thread is one of the stream's users. false: there are SLABS_MAX, or no host memory; the region is still
 * the caller's.
 */
bool slab_format(struct slabs *, const struct region *, struct stream *, unsigned class);

/* Takes up to `most` slices of one of the stream's slabs, OWN, into the caller's hands. 0: there is none. */
unsigned slab_take(struct slabs *, struct stream *, unsigned class, unsigned most, struct slice *taken[]);

/* A slice in the caller's hands becomes a live allocation of so many bytes. */
CUdeviceptr slab_hand_out(struct slabs *, struct slice *, unsigned class, size_t bytes);

/*
 * A live slice back into the caller's hands, OWN; *uses: its uses by further streams (use.h), or NULL. false: no live
 * slice begins there.
 */
bool slab_take_back(struct slabs *, struct slice *, CUdeviceptr, struct uses **uses);

/* As region_use, of a slice. INVALID_POINTER, HOST_MEMORY. */
vpmm_status slab_use(struct slabs *, struct slice *, CUdeviceptr, struct stream *);

/* Of a slice in the caller's hands: OWN becomes ENDING, or ENDING OWN. */
void slab_set_ending(struct slice *, bool ending);

/* Makes a slab of another stream, with a free slice and passed, the stream's own. Not every one: looks at a few. */
bool slab_adopt(struct slabs *, struct stream *, unsigned class, bool every_one);

/* Gives a slice back that is in the caller's hands. Never fails. */
void slab_give(struct slabs *, struct slice *, struct fence);

/* Under the event lock: gives back what was deferred and has passed. */
void slabs_pass(struct slabs *);

/* Makes subpages of all slabs that have no slice in use. */
void slabs_dissolve_empty(struct slabs *);

/* Under the event lock. Whether a freed slice waits to have passed: not even the stream that freed it has it then. */
static inline bool slabs_wait(const struct slabs *slabs)
{
    return slabs->waiting;
}

/* Whether slabs_pass has something to look at for the first time. */
static inline bool slabs_deferred(const struct slabs *slabs)
{
    return !pile_empty(&slabs->deferred);
}

static inline bool slabs_empty(const struct slabs *slabs)
{
    return load_relaxed_u64(&slabs->empty) != 0;
}

/*
 * For who has found no slice of the class: whether one is not in use, but cached, behind a fence, or in a thread's
 * hands; or a slab is being made or dissolved. The word of a slice that is not cached is stored. It looks at every slab
 * and takes nothing: what changes may be missed.
 */
bool slabs_any_to_come(const struct slabs *, unsigned class, struct word_seen *);

/* For the audit: whether the owner's tree has it. */
bool slab_is_listed(const struct slabs *, const struct slab *);

#endif
