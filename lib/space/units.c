#define _GNU_SOURCE
#include "space/units.h"

#include "base/reserve.h"

#include <sys/mman.h>

void units_init(struct units *units, size_t unit_size, size_t va_size)
{
    units->unit_size = unit_size;
    units->unit_shift = (unsigned)__builtin_ctzll(unit_size);
    units->chunk_units = va_size >> units->unit_shift;
    units->chunk_shift = 64 - (unsigned)__builtin_clzll(units->chunk_units); /* room for one more: see units.h */
    units->index_mask = (UINT64_C(1) << units->chunk_shift) - 1;
    /* Hints keep unit numbers in 32 bits, of which 0 means none. */
    uint64_t fits = (UINT64_C(1) << (32 - units->chunk_shift)) - 1;
    units->max_chunks = fits < UNITS_MAX_CHUNKS ? (unsigned)fits : UNITS_MAX_CHUNKS;
    store_relaxed_u32(&units->chunks, 0);
}

static size_t table_bytes(const struct units *units)
{
    return units->chunk_units * sizeof(struct unit);
}

void units_free(struct units *units)
{
    for (uint32_t i = 0; i < load_relaxed_u32(&units->chunks); i++)
        reserve_free(units->chunk[i].unit, table_bytes(units));
}

vpmm_status units_table_new(const struct units *units, void **out)
{
    uint32_t n = load_relaxed_u32(&units->chunks);
    if (n == units->max_chunks)
        return fail(VPMM_ERROR_OUT_OF_ADDRESS_SPACE,
                    "%u chunks of %zu bytes are reserved, and no pool holds more; "
                    "raise VPMM_VA_SIZE",
                    n, (size_t)units->chunk_units << units->unit_shift);
    void *table = reserve_zeros(table_bytes(units));
    if (!table)
        return fail(VPMM_ERROR_HOST_MEMORY, "mmap of %zu bytes of page descriptors failed: lower VPMM_VA_SIZE",
                    table_bytes(units));
    madvise(table, table_bytes(units), MADV_NOHUGEPAGE); /* sparse by nature: a huge page would be mostly empty */
    *out = table;
    return VPMM_SUCCESS;
}

void units_table_free(const struct units *units, void *table)
{
    reserve_free(table, table_bytes(units));
}

uint64_t units_add_chunk(struct units *units, CUdeviceptr base, void *table)
{
    uint32_t n = load_relaxed_u32(&units->chunks);
    units->chunk[n] = (struct chunk){.base = base, .unit = table};
    store_release_u32(&units->chunks, n + 1); /* pairs with unit_around's acquire */
    return (uint64_t)n << units->chunk_shift;
}

bool unit_around(const struct units *units, CUdeviceptr address, uint64_t *unit)
{
    for (uint32_t i = 0, n = load_acquire_u32(&units->chunks); i < n; i++) {
        CUdeviceptr offset = address - units->chunk[i].base;
        if (offset >> units->unit_shift < units->chunk_units && address >= units->chunk[i].base) {
            *unit = (uint64_t)i << units->chunk_shift | offset >> units->unit_shift;
            return true;
        }
    }
    return false;
}

bool unit_in_any_chunk(const struct units *units, CUdeviceptr address, uint64_t *unit)
{
    return unit_around(units, address, unit) && unit_address(units, *unit) == address;
}

uint64_t units_to_next(const struct units *units, uint64_t first, uint64_t unit, uint64_t word)
{
    if (word_units(word))
        return word_units(word);
    enum { ALONE = 1024 }; /* a walk from `first` is dearer than these, and a region joined meanwhile is short mostly */
    uint64_t end = first, left = units_to_chunk_end(units, unit), alone = 1;
    while (alone < left && alone < ALONE && !word_units(load_acquire_u64(&unit_at(units, unit + alone)->word)))
        alone++;
    if (alone < ALONE)
        return alone;
    while (end <= unit) {
        uint64_t length = word_units(load_acquire_u64(&unit_at(units, end)->word));
        end += length ? length : 1;
    }
    return end - unit;
}

/*
 * Where a region was seen that is part of a longer one by now, that one's other units are met one by one, and after
 * MOST of them the look is over.
 */
bool units_any(const struct units *units, uint64_t first, uint64_t units_at_most, unit_question *is_so,
               const void *data)
{
    enum { MOST = 1024 };
    unsigned alone = 0;
    bool any = false;
    for (uint64_t unit = first, n; unit < first + units_at_most && !any && alone <= MOST; unit += n) {
        uint64_t word = load_acquire_u64(&unit_at(units, unit)->word);
        n = word_units(word) ? word_units(word) : 1;
        alone = word_units(word) ? 0 : alone + 1;
        any = is_so(unit, word, data);
    }
    return any;
}

bool units_any_of_chunks(const struct units *units, unit_question *is_so, const void *data)
{
    bool any = false;
    uint32_t chunks = load_acquire_u32(&units->chunks); /* pairs with units_add_chunk's release */
    for (uint32_t chunk = 0; chunk < chunks && !any; chunk++)
        any = units_any(units, (uint64_t)chunk << units->chunk_shift, units->chunk_units, is_so, data);
    return any;
}

bool unit_is_owned(uint64_t unit, uint64_t word, const void *data)
{
    const struct owned_look *look = data;
    if (word_state(word) != UNIT_OWN)
        return false;
    *look->seen = (struct word_seen){&unit_at(look->units, unit)->word, word};
    return true;
}
