/*
 * hints.h - a set of regions by length, to be found and not to be believed.
 *
 * The table of units is the truth about a region; a hint says where to look. Whoever makes a region FREE enters its
 * hint first, so that a FREE region is hinted (but where the arena of hints is exhausted); whoever takes it removes the
 * hint after. In between, a search meets hints of regions that are no longer free, and passes over them.
 *
 *   bin     regions of one length (up to 64 units), or of an eighth of a doubling beyond
 *   block   up to 60 hints of one bin; a chain of blocks a bin. Blocks never leave their bin before the set is freed,
 *           so a reader may follow `next` at any time: no ABA, nothing is reclaimed under it
 *   where   what the owner keeps of its hint, to remove it without a search: block address | slot
 *
 *   count(bin) >= hints entered in the bin and not yet removed
 *   count(bin) > 0  =>  bit(bin) is set, or an enter or a remove is about to set it
 *
 * enter, remove and search are lock-free against one another, any number of threads. Insertion begins where room was
 * last seen. It adds a block only when half of all slots of the bin are taken, or a walk found no room; otherwise it
 * walks on, past full blocks, of which there are then fewer than of others. Blocks come from an arena that is reserved
 * ahead: freeing memory needs no memory.
 *
 *   blocks(bin) <= 1 + the peak of count(bin) / 30 + threads that enter at once
 *
 * Blocks stay with their bins (and are not recycled through a stack): every walk is safe by construction.
 */
#ifndef VPMM_LIB_HINTS_H
#define VPMM_LIB_HINTS_H

#include "space/units.h"

enum { HINT_EXACT_BINS = 64, HINT_BINS_A_DOUBLING = 8, HINT_BINS = 240, HINT_SLOTS = 60 };

struct hint_block;

/* Where blocks come from: a reserved range, taken from the front by an atomic addition. */
struct hint_arena {
    unsigned char *base;
    size_t bytes;
    _Atomic(uint64_t) used;
};

struct hint_bin {
    _Atomic(void *) first; /* struct hint_block */
    _Atomic(void *) room;  /* a block that lately had a clear slot; a hint */
    _Atomic(void *) full;  /* a block that lately got an entry; a hint */
    _Atomic(uint64_t) blocks;
};

/* The counts lie together, because who looks at all regions reads all of them, of each stream. */
struct hints {
    _Atomic(uint64_t) bits[(HINT_BINS + 63) / 64]; /* bins that are not empty */
    _Atomic(uint32_t) count[HINT_BINS];
    struct hint_bin bin[HINT_BINS];
};

/* A region that a search found: FREE, or HOLE, when its word was read. */
struct seen_region {
    uint64_t first, units, word;
};

bool hint_arena_init(struct hint_arena *, size_t bytes); /* false: no address space */
void hint_arena_free(struct hint_arena *);

/* Enters a region that the caller owns. false: the arena is exhausted, nothing is entered and `where` is 0. */
bool hints_enter(struct hints *, struct hint_arena *, struct unit *, uint64_t unit, uint64_t units);

/* Removes the hint of a region that the caller owns. */
void hints_remove(struct unit *);

/* What is looked for: so many units from a unit on whose number is a multiple of `align`, a power of two. */
struct want {
    uint64_t units, align;
};

/* The first unit of a region at which it fits, or would. */
static inline uint64_t want_place(struct want want, uint64_t unit)
{
    return (unit + want.align - 1) & ~(want.align - 1);
}

/*
 * The shortest region that the want fits into and in state `state` among those seen: exact up to 64 units; beyond,
 * the shortest of the first 64 of its bin. `every_bin` ignores the bits and looks at the whole bin: for a last look
 * before giving up, which a bit that is just being cleared must not spoil. false: none.
 */
bool hints_best(const struct hints *, const struct units *, enum unit_state state, struct want, bool every_bin,
                struct seen_region *best);

/* Calls visit for each region in state `state`, until it answers false. A region may be missed or met twice if it
   changes meanwhile; one that does not is met. */
void hints_each(const struct hints *, const struct units *, enum unit_state state,
                bool (*visit)(const struct seen_region *, void *), void *data);

/*
 * The same, for regions of at least so many units, and by the bits: while another thread takes the last region of a bin
 * and a third enters one, that one may be missed. It costs who looks at many streams four words each, for 240.
 */
void hints_each_from(const struct hints *, const struct units *, enum unit_state state, uint64_t units,
                     bool (*visit)(const struct seen_region *, void *), void *data);

/* For who is about to visit all regions, of each bin or by the bits: they are read from memory meanwhile, which other
   threads write. */
static inline void hints_prefetch(const struct hints *hints, bool every_bin)
{
    const char *counts = (const char *)hints->count;
    __builtin_prefetch(hints->bits);
    for (size_t byte = 0; every_bin && byte < sizeof hints->count; byte += 64)
        __builtin_prefetch(counts + byte);
}

uint64_t hints_count(const struct hints *);
bool hints_holds(const struct hints *, const struct unit *, uint64_t unit);          /* for the audit */
uint64_t hints_longest(const struct hints *, const struct units *, enum unit_state); /* units; 0: none */

#endif
