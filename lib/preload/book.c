#include "book.h"

#include <stdatomic.h>
#include <stddef.h>
#include <sys/mman.h>

enum {
    GRAIN_BITS = 8,
    BLOCK_BITS = 21,
    SHELF_BITS = 14, /* of blocks */
    ADDRESS_BITS = 48,
    GRAINS = 1 << (BLOCK_BITS - GRAIN_BITS),
    BLOCKS = 1 << SHELF_BITS,
    SHELVES = 1 << (ADDRESS_BITS - BLOCK_BITS - SHELF_BITS),
};

#define BLOCK_BYTES (UINT64_C(1) << BLOCK_BITS)

/* An entry: a length of 48 bits, a device of 7, and these. */
#define LIVE    (UINT64_C(1) << 63)
#define AT_ONCE (UINT64_C(1) << 62)

struct slots {
    _Atomic(uint64_t) entry[GRAINS]; /* [0] is not used */
};

struct block {
    _Atomic(uint64_t) first, from;
    _Atomic(struct slots *) slots;
};

struct shelf {
    struct block block[BLOCKS];
};

static _Atomic(struct shelf *) shelves[SHELVES];

static uint64_t pack(struct allocation allocation)
{
    return LIVE | (allocation.at_once ? AT_ONCE : 0) | (uint64_t)allocation.device << ADDRESS_BITS | allocation.bytes;
}

static struct allocation unpack(uint64_t entry)
{
    return (struct allocation){
        .bytes = entry & ((UINT64_C(1) << ADDRESS_BITS) - 1),
        .device = entry >> ADDRESS_BITS & (BOOK_DEVICES - 1),
        .at_once = entry & AT_ONCE,
    };
}

/* ---- tables ---- */

static void *map(size_t bytes)
{
    void *table = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return table == MAP_FAILED ? NULL : table;
}

static struct block *find_block(uint64_t address)
{
    uint64_t index = address >> BLOCK_BITS;
    if (index >> SHELF_BITS >= SHELVES)
        return NULL;
    struct shelf *shelf = atomic_load_explicit(&shelves[index >> SHELF_BITS], memory_order_acquire);
    return shelf ? &shelf->block[index & (BLOCKS - 1)] : NULL;
}

/* Of two threads that make a table one keeps its own. */
static struct block *make_block(uint64_t address)
{
    uint64_t index = address >> BLOCK_BITS;
    if (index >> SHELF_BITS >= SHELVES)
        return NULL;
    _Atomic(struct shelf *) *place = &shelves[index >> SHELF_BITS];
    struct shelf *none = NULL;
    if (!atomic_load_explicit(place, memory_order_acquire)) {
        struct shelf *shelf = map(sizeof *shelf);
        if (!shelf)
            return NULL;
        if (!atomic_compare_exchange_strong_explicit(place, &none, shelf, memory_order_acq_rel, memory_order_acquire))
            munmap(shelf, sizeof *shelf);
    }
    return find_block(address);
}

static struct slots *make_slots(struct block *block)
{
    struct slots *slots = atomic_load_explicit(&block->slots, memory_order_acquire), *other = NULL;
    if (slots)
        return slots;
    slots = map(sizeof *slots);
    if (!slots || atomic_compare_exchange_strong_explicit(&block->slots, &other, slots, memory_order_acq_rel,
                                                          memory_order_acquire))
        return slots;
    munmap(slots, sizeof *slots);
    return other;
}

static size_t grain_of(uint64_t address)
{
    return (address & (BLOCK_BYTES - 1)) >> GRAIN_BITS;
}

/* Where the entry stands of what begins at this address; NULL: nothing does that the book holds. */
static _Atomic(uint64_t) *find_entry(uint64_t start)
{
    struct block *block = find_block(start);
    if (!block || start & ((1 << GRAIN_BITS) - 1))
        return NULL;
    if (grain_of(start) == 0)
        return &block->first;
    struct slots *slots = atomic_load_explicit(&block->slots, memory_order_acquire);
    return slots ? &slots->entry[grain_of(start)] : NULL;
}

/* ---- allocations ---- */

/* In each block that the allocation reaches into; every one of them has its shelf. */
static void set_from(uint64_t start, uint64_t bytes)
{
    for (uint64_t at = (start | (BLOCK_BYTES - 1)) + 1; at < start + bytes; at += BLOCK_BYTES)
        atomic_store_explicit(&find_block(at)->from, start, memory_order_relaxed);
}

static bool make_tables(uint64_t start, uint64_t bytes)
{
    struct block *block = make_block(start);
    if (!block || (grain_of(start) && !make_slots(block)))
        return false;
    const uint64_t step = BLOCK_BYTES << SHELF_BITS;
    for (uint64_t at = (start | (step - 1)) + 1; at < start + bytes; at += step)
        if (!make_block(at))
            return false;
    return true;
}

bool book_add(uint64_t start, struct allocation allocation)
{
    const uint64_t limit = UINT64_C(1) << ADDRESS_BITS;
    if (start & ((1 << GRAIN_BITS) - 1) || start >= limit || allocation.bytes > limit - start ||
        allocation.bytes == limit || allocation.device >= BOOK_DEVICES || !make_tables(start, allocation.bytes))
        return false;
    set_from(start, allocation.bytes);
    atomic_store_explicit(find_entry(start), pack(allocation), memory_order_release);
    return true;
}

bool book_take(uint64_t start, struct allocation *allocation)
{
    _Atomic(uint64_t) *place = find_entry(start);
    /* Most addresses that are not ours have no table; the load keeps the others' words unwritten. */
    if (!place || !atomic_load_explicit(place, memory_order_relaxed))
        return false;
    uint64_t entry = atomic_exchange_explicit(place, 0, memory_order_acq_rel);
    if (!entry)
        return false;
    *allocation = unpack(entry);
    return true;
}

static bool holds(const _Atomic(uint64_t) *place, uint64_t start, uint64_t address, struct allocation *allocation)
{
    uint64_t entry = place ? atomic_load_explicit(place, memory_order_acquire) : 0;
    *allocation = unpack(entry);
    return entry && address - start < allocation->bytes;
}

/* The nearest start at the address or before it in its block; the block's own start if there is no other. */
static uint64_t nearest_start(struct block *block, uint64_t address)
{
    struct slots *slots = atomic_load_explicit(&block->slots, memory_order_acquire);
    size_t grain = slots ? grain_of(address) : 0;
    while (grain && !atomic_load_explicit(&slots->entry[grain], memory_order_relaxed))
        grain--;
    return (address & ~(BLOCK_BYTES - 1)) + ((uint64_t)grain << GRAIN_BITS);
}

bool book_find(uint64_t address, uint64_t *start, struct allocation *allocation)
{
    struct block *block = find_block(address);
    if (!block)
        return false;
    *start = nearest_start(block, address);
    if (holds(find_entry(*start), *start, address, allocation))
        return true;
    *start = atomic_load_explicit(&block->from, memory_order_relaxed);
    return *start && holds(find_entry(*start), *start, address, allocation);
}

/* ---- all of them ---- */

typedef void visit(uint64_t start, struct allocation, void *data);

static void visit_entry(const _Atomic(uint64_t) *place, uint64_t start, visit *visit, void *data)
{
    uint64_t entry = atomic_load_explicit(place, memory_order_acquire);
    if (entry)
        visit(start, unpack(entry), data);
}

static void visit_block(struct block *block, uint64_t address, visit *visit, void *data)
{
    struct slots *slots = atomic_load_explicit(&block->slots, memory_order_acquire);
    visit_entry(&block->first, address, visit, data);
    for (uint64_t grain = 1; slots && grain < GRAINS; grain++)
        visit_entry(&slots->entry[grain], address + (grain << GRAIN_BITS), visit, data);
}

void book_each(visit *visit, void *data)
{
    for (uint64_t i = 0; i < SHELVES; i++) {
        struct shelf *shelf = atomic_load_explicit(&shelves[i], memory_order_acquire);
        for (uint64_t j = 0; shelf && j < BLOCKS; j++)
            visit_block(&shelf->block[j], (i << SHELF_BITS | j) << BLOCK_BITS, visit, data);
    }
}
