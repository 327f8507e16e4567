/*
 * allocations.c - what is live, one by one: for who looks for a leak, or has an address and asks whose it is.
 *
 * A look takes no lock and stops nobody. What it says of an allocation is of one life of it, for its word is read
 * before and after the rest, and each malloc and free of that memory changes it; but for the bytes that a region was
 * asked for, which a hit writes after the word: while its malloc is under way they may be those of the life before.
 */
#include "cache/slab.h"
#include "pool/pool.h"
#include "remap/cut.h"

static bool is_live(enum unit_state state)
{
    return state == UNIT_LIVE || state == UNIT_USED || state == UNIT_NOTING;
}

/* Of a unit: the live region that begins there. False: none does. */
static bool read_region(const struct units *units, uint64_t unit, vpmm_allocation *out)
{
    const struct unit *first = unit_at(units, unit);
    /* Lock-free: a word that differs is another thread's malloc or free of this memory. Its generation is why the same
       word is the same life. */
    for (;;) {
        uint64_t word = load_acquire_u64(&first->word); /* pairs with region_hand_out's release */
        if (!is_live(word_state(word)))
            return false;
        *out = (vpmm_allocation){.address = unit_address(units, unit),
                                 .requested_bytes = (size_t)load_acquire_u64(&first->requested),
                                 .bytes = (size_t)(word_units(word) << units->unit_shift)};
        if (load_relaxed_u64(&first->word) == word) /* after it, for that was an acquire */
            return true;
    }
}

static bool is_slice_live(uint64_t word)
{
    enum slice_state state = slice_state(word);
    return state == SLICE_LIVE || state == SLICE_USED || state == SLICE_NOTING;
}

/*
 * Of a slice, if it is live. A slice's word has no generation: the address is read before and after, so the one that is
 * said is that of a life with this word, and two lives with one word and one address are told apart by nobody.
 */
static bool read_slice(const struct slice *slice, vpmm_allocation *out)
{
    for (;;) {                                          /* lock-free, likewise */
        uint64_t word = load_acquire_u64(&slice->word); /* pairs as in slice_is_live */
        if (!is_slice_live(word))
            return false;
        *out = (vpmm_allocation){.address = (CUdeviceptr)load_acquire_u64(&slice->address),
                                 .requested_bytes = slice_requested(word),
                                 .bytes = slice_size[slice_class_of(word)].bytes};
        if (load_relaxed_u64(&slice->word) == word) /* likewise */
            return true;
    }
}

/* ---- all of them ---- */

struct look {
    void (*visit)(void *, const vpmm_allocation *);
    void *data;
};

static void visit_regions(const struct space *space, uint64_t first, uint64_t end, const struct look *look)
{
    vpmm_allocation allocation;
    for (uint64_t unit = first; unit < end;
         unit += space_to_next(space, first, unit, load_acquire_u64(&unit_at(&space->units, unit)->word)))
        if (read_region(&space->units, unit, &allocation))
            look->visit(look->data, &allocation);
}

static void visit_cut(const struct arena *arena, uint32_t chunk, const struct look *look)
{
    struct cut_run run = {.chunk = chunk};
    while (cut_next_run(arena, &run))
        visit_regions(&arena->cut, run.subpage, run.end, look);
}

static void visit_slices(const struct slabs *slabs, const struct look *look)
{
    vpmm_allocation allocation;
    for (uint32_t i = 0, n = load_acquire_u32(&slabs->records); i < n && i < SLABS_MAX; i++) {
        const struct slab *slab = load_acquire_ptr(&slabs->record[i]); /* NULL: it is being made */
        for (uint32_t k = 0; slab && k < slab->slices; k++)
            if (read_slice(&slab->slice[k], &allocation))
                look->visit(look->data, &allocation);
    }
}

vpmm_status vpmm_allocations_visit(vpmm_pool *pool, void (*visit)(void *, const vpmm_allocation *), void *data)
{
    vpmm_status status = pool_check_ours(pool, "vpmm_allocations_visit");
    if (status != VPMM_SUCCESS)
        return status;
    if (!visit)
        return fail(VPMM_ERROR_INVALID_VALUE, "vpmm_allocations_visit: the function is NULL");
    const struct arena *arena = &pool->arena;
    const struct units *pages = &arena->space.units;
    const struct look look = {visit, data};
    for (uint32_t chunk = 0; pool->paged && chunk < load_acquire_u32(&pages->chunks); chunk++) {
        uint64_t first = (uint64_t)chunk << pages->chunk_shift;
        visit_regions(&arena->space, first, first + pages->chunk_units, &look);
    }
    for (uint32_t chunk = 0; arena->cut_below && chunk < load_acquire_u32(&arena->cut.units.chunks); chunk++)
        visit_cut(arena, chunk, &look);
    if (arena->cut_below)
        visit_slices(&arena->slabs, &look);
    return VPMM_SUCCESS;
}

/* ---- one of them ---- */

/* The live region that a unit is in. */
static bool find_region(const struct units *units, uint64_t unit, vpmm_allocation *out)
{
    while (unit_index(units, unit) && !word_units(load_acquire_u64(&unit_at(units, unit)->word)))
        unit--;
    return read_region(units, unit, out);
}

static bool find(const struct arena *arena, CUdeviceptr address, vpmm_allocation *out)
{
    uint64_t unit;
    if (arena->cut_below && cut_subpage_of(arena, address, &unit)) {
        struct slab *slab = slab_of_subpage(&arena->cut, unit);
        const struct slice *slice = slab ? slab_slice_at(slab, address) : NULL;
        return slab ? slice && read_slice(slice, out) : find_region(&arena->cut.units, unit, out);
    }
    /* Without an extent nothing is mapped there, and what is before it may be millions of pages of a hole. */
    return unit_around(&arena->space.units, address, &unit) &&
           load_acquire_ptr(&unit_at(&arena->space.units, unit)->extent) && find_region(&arena->space.units, unit, out);
}

vpmm_status vpmm_allocation_get(vpmm_pool *pool, CUdeviceptr address, vpmm_allocation *out)
{
    vpmm_allocation found;
    vpmm_status status = pool_check_ours(pool, "vpmm_allocation_get");
    if (status != VPMM_SUCCESS)
        return status;
    if (!out)
        return fail(VPMM_ERROR_INVALID_VALUE, "vpmm_allocation_get: the output is NULL");
    if (!pool->paged || !find(&pool->arena, address, &found) || address - found.address >= found.bytes)
        return fail(VPMM_ERROR_INVALID_POINTER, "0x%llx is in no live allocation of this pool's pages",
                    (unsigned long long)address);
    *out = found;
    return VPMM_SUCCESS;
}
