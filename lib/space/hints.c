#include "space/hints.h"

#include "base/assert.h"
#include "base/reserve.h"

/*
 * A block is 512 bytes and aligned to them, so that a slot's number fits below its address in `where`. `used` says
 * which slots are taken; slot[i] is unit + 1 once filled in.
 */
struct hint_block {
    _Alignas(512) _Atomic(uint64_t) used;
    _Atomic(void *) next;
    struct hints *owner;
    struct hint_bin *bin;
    _Atomic(uint32_t) slot[HINT_SLOTS];
};

_Static_assert(sizeof(struct hint_block) == 512, "a block's address leaves nine bits for a slot");

#define ALL_SLOTS ((UINT64_C(1) << HINT_SLOTS) - 1)

enum { HINTS_COMPARED_IN_A_BIN = 64 };

bool hint_arena_init(struct hint_arena *arena, size_t bytes)
{
    *arena = (struct hint_arena){.base = reserve_zeros(bytes), .bytes = bytes};
    return arena->base;
}

void hint_arena_free(struct hint_arena *arena)
{
    reserve_free(arena->base, arena->bytes);
}

static unsigned bin_of(uint64_t units)
{
    if (units <= HINT_EXACT_BINS)
        return (unsigned)units - 1;
    unsigned log = 63 - (unsigned)__builtin_clzll(units); /* 6 or more */
    unsigned eighth = (unsigned)(units >> (log - 3)) & (HINT_BINS_A_DOUBLING - 1);
    return HINT_EXACT_BINS + (log - 6) * HINT_BINS_A_DOUBLING + eighth;
}

/* ---- the bits of bins that are not empty ---- */

static void set_bit(struct hints *hints, unsigned bin)
{
    uint64_t bit = UINT64_C(1) << bin % 64;
    if (!(load_sc_u64(&hints->bits[bin / 64]) & bit))
        fetch_or_sc_u64(&hints->bits[bin / 64], bit);
}

/*
 * The count was raised before the bit is looked at (set_bit) and the bit is cleared before the count is looked at
 * again: in the one order of these four sequentially consistent steps, either the insertion sees the bit cleared and
 * sets it, or this sees the count and sets it back.
 */
static void clear_bit_if_empty(struct hints *hints, unsigned bin)
{
    uint64_t bit = UINT64_C(1) << bin % 64;
    fetch_and_sc_u64(&hints->bits[bin / 64], ~bit);
    if (load_sc_u32(&hints->count[bin]))
        fetch_or_sc_u64(&hints->bits[bin / 64], bit);
}

/* ---- blocks ---- */

static struct hint_block *next_block(const struct hint_block *block)
{
    return load_acquire_ptr(&block->next);
}

static struct hint_block *block_new(struct hints *hints, struct hint_bin *bin, struct hint_arena *arena)
{
    uint64_t at = fetch_add_relaxed_u64(&arena->used, sizeof(struct hint_block));
    if (at + sizeof(struct hint_block) > arena->bytes) {
        fetch_sub_relaxed_u64(&arena->used, sizeof(struct hint_block));
        return NULL;
    }
    struct hint_block *block = (struct hint_block *)(void *)(arena->base + at);
    block->owner = hints;
    block->bin = bin;
    return block;
}

/*
 * Takes a clear slot. Lock-free: a failed exchange means that another thread took or cleared one. Pairs with the
 * clearing in hints_remove, so that what is entered comes after the 0 that was stored there.
 */
static int take_slot(struct hint_block *block)
{
    uint64_t used = load_relaxed_u64(&block->used);
    while (used != ALL_SLOTS) {
        int slot = __builtin_ctzll(~used);
        if (cas_acq_rel_u64(&block->used, &used, used | UINT64_C(1) << slot))
            return slot;
    }
    return -1;
}

/* A slot in some block, from the one where room was last seen on, once around. */
static struct hint_block *walk_for_room(struct hint_bin *bin, int *slot)
{
    struct hint_block *start = load_acquire_ptr(&bin->room);
    for (struct hint_block *block = start; block; block = next_block(block))
        if ((*slot = take_slot(block)) >= 0)
            return block;
    for (struct hint_block *block = load_acquire_ptr(&bin->first); block && block != start; block = next_block(block))
        if ((*slot = take_slot(block)) >= 0)
            return block;
    return NULL;
}

/* In front, where readers find it by `first`. Lock-free: a failed exchange means that another thread added one. */
static struct hint_block *add_block(struct hints *hints, struct hint_bin *bin, struct hint_arena *arena, int *slot)
{
    struct hint_block *fresh = block_new(hints, bin, arena);
    if (!fresh)
        return NULL;
    *slot = take_slot(fresh);
    void *first = load_acquire_ptr(&bin->first);
    do
        store_relaxed_ptr(&fresh->next, first);
    while (!cas_acq_rel_ptr(&bin->first, &first, fresh)); /* pairs with the acquire of every walk */
    fetch_add_relaxed_u64(&bin->blocks, 1);
    return fresh;
}

static struct hint_block *find_room(struct hints *hints, struct hint_bin *bin, struct hint_arena *arena, int *slot)
{
    struct hint_block *room = load_acquire_ptr(&bin->room), *block;
    if (room && (*slot = take_slot(room)) >= 0)
        return room;
    uint64_t count = load_relaxed_u32(&hints->count[bin - hints->bin]);
    bool half_full = count * 2 >= load_relaxed_u64(&bin->blocks) * HINT_SLOTS;
    block = half_full ? add_block(hints, bin, arena, slot) : walk_for_room(bin, slot);
    if (!block)
        block = half_full ? walk_for_room(bin, slot) : add_block(hints, bin, arena, slot);
    if (block)
        store_release_ptr(&bin->room, block); /* pairs with those that read it: the block may be new to them */
    return block;
}

bool hints_enter(struct hints *hints, struct hint_arena *arena, struct unit *descriptor, uint64_t unit, uint64_t units)
{
    unsigned number = bin_of(units);
    vpmm_assert(units > 0 && number < HINT_BINS);
    struct hint_bin *bin = &hints->bin[number];
    int slot = -1;
    struct hint_block *block = find_room(hints, bin, arena, &slot);
    if (!block) {
        store_relaxed_u64(&descriptor->where, 0);
        return false;
    }
    store_relaxed_u64(&descriptor->where, (uint64_t)(uintptr_t)block | (unsigned)slot);
    store_release_u32(&block->slot[slot], (uint32_t)unit + 1); /* the count, below, is sequentially consistent */
    if (load_relaxed_ptr(&bin->full) != block)
        store_release_ptr(&bin->full, block); /* as in find_room, and read in best_of_bin */
    fetch_add_sc_u32(&hints->count[number], 1);
    set_bit(hints, number);
    return true;
}

void hints_remove(struct unit *descriptor)
{
    uint64_t where = load_relaxed_u64(&descriptor->where);
    if (!where)
        return;
    struct hint_block *block = (struct hint_block *)(uintptr_t)(where & ~UINT64_C(511));
    unsigned slot = where & 511;
    struct hint_bin *bin = block->bin;
    vpmm_assert(slot < HINT_SLOTS && peek_u32(&block->slot[slot]) && peek_u64(&block->used) >> slot & 1);
    store_relaxed_u64(&descriptor->where, 0);
    store_release_u32(&block->slot[slot], 0); /* before the bit, with which the slot is another's */
    fetch_and_sc_u64(&block->used, ~(UINT64_C(1) << slot));
    if (load_relaxed_ptr(&bin->room) != block)
        store_release_ptr(&bin->room, block); /* as in find_room */
    unsigned number = (unsigned)(bin - block->owner->bin);
    if (fetch_add_sc_u32(&block->owner->count[number], UINT32_MAX) == 1)
        clear_bit_if_empty(block->owner, number);
}

/* ---- searching ---- */

static bool look(const struct units *units, const struct hint_block *block, int slot, enum unit_state state,
                 struct seen_region *found)
{
    uint32_t entry = load_sc_u32(&block->slot[slot]);
    if (!entry)
        return false;
    found->first = entry - 1;
    found->word = load_sc_u64(&unit_at(units, found->first)->word);
    found->units = word_units(found->word);
    return word_state(found->word) == state;
}

/* Walks from the block that lately got an entry to the chain's end, then from its beginning to there. */
static const struct hint_block *walk_next(const struct hint_bin *bin, const struct hint_block *start,
                                          const struct hint_block *block, bool *wrapped)
{
    const struct hint_block *next = next_block(block);
    if (!next && !*wrapped) {
        *wrapped = true;
        next = load_acquire_ptr(&bin->first);
    }
    return *wrapped && next == start ? NULL : next;
}

static bool fits(struct want want, const struct seen_region *found)
{
    return want_place(want, found->first) + want.units <= found->first + found->units;
}

/* The shortest fitting region of the first `most` of a bin; in an exact bin, the first. */
static bool best_of_bin(struct hint_bin *bin, const struct units *units, enum unit_state state, struct want want,
                        bool exact, int most, struct seen_region *best)
{
    const struct hint_block *start = load_acquire_ptr(&bin->full);
    bool wrapped = false, any = false;
    int compared = 0;
    for (const struct hint_block *block = start; block; block = walk_next(bin, start, block, &wrapped)) {
        for (uint64_t used = load_relaxed_u64(&block->used); used; used &= used - 1) {
            struct seen_region found;
            if (!look(units, block, __builtin_ctzll(used), state, &found))
                continue;
            if (!fits(want, &found)) {
                if (++compared == most)
                    return any;
                continue;
            }
            if (!any || found.units < best->units) {
                *best = found;
                any = true;
            }
            if (exact || best->units == want.units || ++compared == most) {
                if (block != start)
                    store_release_ptr(&bin->full, (void *)block); /* as in hints_enter: the next search begins here */
                return true;
            }
        }
    }
    return any;
}

/* The first bin from this one on whose bit is set; HINT_BINS: none. */
static unsigned next_noted_bin(const struct hints *hints, unsigned bin)
{
    while (bin < HINT_BINS) {
        uint64_t bits = load_sc_u64(&hints->bits[bin / 64]) >> bin % 64;
        if (bits)
            return bin + (unsigned)__builtin_ctzll(bits);
        bin = (bin | 63) + 1;
    }
    return HINT_BINS;
}

bool hints_best(const struct hints *set, const struct units *units, enum unit_state state, struct want want,
                bool every_bin, struct seen_region *best)
{
    struct hints *hints = (struct hints *)set; /* searches keep where they found something */
    int most = every_bin ? INT32_MAX : HINTS_COMPARED_IN_A_BIN;
    for (unsigned bin = bin_of(want.units); bin < HINT_BINS; bin++) {
        if (!every_bin && (bin = next_noted_bin(hints, bin)) == HINT_BINS)
            return false;
        if (load_relaxed_u32(&hints->count[bin]) &&
            best_of_bin(&hints->bin[bin], units, state, want, bin < HINT_EXACT_BINS, most, best))
            return true;
    }
    return false;
}

/* The descriptors of a block's hints are read from memory side by side, not one after another. */
static void prefetch_units(const struct units *units, const struct hint_block *block)
{
    for (uint64_t used = peek_u64(&block->used); used; used &= used - 1) {
        uint32_t entry = peek_u32(&block->slot[__builtin_ctzll(used)]);
        if (entry)
            __builtin_prefetch(unit_at(units, entry - 1));
    }
}

static bool each_of_bin(const struct hint_bin *bin, const struct units *table, enum unit_state state, uint64_t units,
                        bool (*visit)(const struct seen_region *, void *), void *data)
{
    for (const struct hint_block *block = load_acquire_ptr(&bin->first); block; block = next_block(block)) {
        prefetch_units(table, block);
        for (uint64_t used = load_relaxed_u64(&block->used); used; used &= used - 1) {
            struct seen_region found;
            if (look(table, block, __builtin_ctzll(used), state, &found) && found.units >= units &&
                !visit(&found, data))
                return false;
        }
    }
    return true;
}

void hints_each(const struct hints *hints, const struct units *table, enum unit_state state,
                bool (*visit)(const struct seen_region *, void *), void *data)
{
    for (unsigned bin = 0; bin < HINT_BINS; bin++)
        if (load_sc_u32(&hints->count[bin]) && !each_of_bin(&hints->bin[bin], table, state, 1, visit, data))
            return;
}

/*
 * What other threads have written last lies in their caches. So all bins with hints, then their first blocks, then the
 * descriptors of what is hinted there are asked for side by side, before they are looked at one after another. What is
 * read for it is a guess: peeks.
 */
static void prefetch_from(const struct hints *hints, const struct units *table, unsigned first)
{
    enum { WORDS = sizeof hints->bits / sizeof hints->bits[0] };
    const struct hint_bin *noted[HINT_BINS];
    unsigned n = 0;
    for (unsigned word = first / 64; word < WORDS; word++)
        for (uint64_t bits = peek_u64(&hints->bits[word]); bits; bits &= bits - 1) {
            unsigned bin = word * 64 + (unsigned)__builtin_ctzll(bits);
            if (bin >= first)
                noted[n++] = &hints->bin[bin];
        }
    for (unsigned i = 0; i < n; i++)
        __builtin_prefetch(noted[i]);
    for (unsigned i = 0; i < n; i++)
        __builtin_prefetch(peek_ptr(&noted[i]->first));
    for (unsigned i = 0; i < n; i++) {
        const struct hint_block *block = peek_ptr(&noted[i]->first);
        if (block)
            prefetch_units(table, block);
    }
}

void hints_each_from(const struct hints *hints, const struct units *table, enum unit_state state, uint64_t units,
                     bool (*visit)(const struct seen_region *, void *), void *data)
{
    prefetch_from(hints, table, bin_of(units));
    for (unsigned bin = bin_of(units); (bin = next_noted_bin(hints, bin)) < HINT_BINS; bin++)
        if (!each_of_bin(&hints->bin[bin], table, state, units, visit, data))
            return;
}

uint64_t hints_count(const struct hints *hints)
{
    uint64_t count = 0;
    for (unsigned bin = 0; bin < HINT_BINS; bin++)
        count += load_relaxed_u32(&hints->count[bin]);
    return count;
}

bool hints_holds(const struct hints *hints, const struct unit *descriptor, uint64_t unit)
{
    uint64_t where = load_relaxed_u64(&descriptor->where);
    const struct hint_block *block = (const struct hint_block *)(uintptr_t)(where & ~UINT64_C(511));
    return where && block->owner == hints && load_relaxed_u32(&block->slot[where & 511]) == (uint32_t)unit + 1 &&
           block->bin == &hints->bin[bin_of(word_units(load_relaxed_u64(&descriptor->word)))];
}

uint64_t hints_longest(const struct hints *hints, const struct units *units, enum unit_state state)
{
    for (unsigned bin = HINT_BINS; bin-- > 0;) {
        uint64_t longest = 0;
        const struct hint_block *block = load_acquire_ptr(&hints->bin[bin].first);
        for (; block && load_relaxed_u32(&hints->count[bin]); block = next_block(block))
            for (uint64_t used = load_relaxed_u64(&block->used); used; used &= used - 1) {
                struct seen_region found;
                if (look(units, block, __builtin_ctzll(used), state, &found) && found.units > longest)
                    longest = found.units;
            }
        if (longest)
            return longest;
    }
    return 0;
}
