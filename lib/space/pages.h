/*
 * pages.h - the page table: one descriptor for every page of reserved address space.
 *
 *   chunk    one cuMemAddressReserve of va_size bytes, and a table of descriptors for it. Chunks are added, never
 *            removed before the pool's end
 *   page     its global number: chunk << shift | index in the chunk. A chunk has fewer pages than 1 << shift, so that
 *            the last page of one and the first of the next are not neighbours by number, as they are none in fact
 *   region   a run of pages of one chunk; its first page's word says its state and length
 *
 * States and who may change them:
 *   NONE     inside a region, or reserved and never used
 *   LIVE     handed out            -> OWN by the free that wins the exchange
 *   FREE     mapped, reusable      -> OWN by any thread that wins the exchange (malloc, a merging free, build, reaper)
 *   CACHED   in a front cache      -> LIVE by its owner, OWN by a thief, by exchange
 *   OWN      one thread has it: the only one that may write any of the region's descriptors
 *   CUT      handed out in parts   -> OWN by who has all of its parts (cut.h, slab.h)
 *   HOLE     unmapped              changed only by who has the plan lock
 *   ZOMBIE   to be unmapped         changed only by who has the pass lock
 *
 *   sum of pages over LIVE, CUT, FREE, CACHED, OWN, HOLE, ZOMBIE regions = pages of the chunk, when no one is inside a
 * call
 *
 * The word is state:4 | pages:26 | generation:34, and every transition raises the generation. An exchange of the
 * whole word therefore fails if the region changed hands in between, however often (ABA needs 2^33 transitions of one
 * page within one operation; it would be 2^34 if cut_forget did not raise generations), and what was read of a FREE
 * region's other fields before a successful exchange was true at the exchange: those fields are written only in state
 * OWN.
 *
 * Fields other than the word are written by the owner and read by others as hints, so they are atomics with relaxed
 * order; the word's release (every store of FREE, LIVE, CACHED) and acquire (every load that leads to an exchange)
 * order them.
 *
 * Descriptors are 64 bytes, one cache line: 8-byte words of adjacent pages cost 116 ns a pair in false sharing where
 * 64-byte ones cost 26. A table is reserved address space without commitment; only what is used is touched.
 */
#ifndef VPMM_LIB_PAGES_H
#define VPMM_LIB_PAGES_H

#include "base/atomic.h"
#include "base/status.h"

#include <cuda.h>

enum page_state { PAGE_NONE, PAGE_LIVE, PAGE_FREE, PAGE_CACHED, PAGE_OWN, PAGE_HOLE, PAGE_ZOMBIE, PAGE_CUT };

enum { PAGE_STATE_BITS = 4, PAGE_COUNT_BITS = 26, PAGE_GENERATION_BITS = 34, PAGES_MAX_CHUNKS = 1024 };
#define PAGES_A_CHUNK_MAX ((UINT64_C(1) << PAGE_COUNT_BITS) - 1)

/* A point in a stream: `stream` is the slot of its record, 0 for memory that waits for nothing. */
struct fence {
    uint32_t stream;
    uint64_t number;
};

#define FENCE_PASSED ((struct fence){0, 0})

/*
 * A physical handle and where it is mapped. Written by the owner of the pages that it is mapped at. Its memory is held
 * until its last mapping is gone and its handle is released: old addresses count as holders beside its present place,
 * and who lets go of it last releases the handle (zombie.h).
 */
struct extent {
    _Atomic(uint64_t) page;
    uint32_t pages;
    CUmemGenericAllocationHandle handle;
    _Atomic(uint32_t) holders;
    bool release_refused; /* the last holder's */
};

/* Whether it was the last holder's to let go, which may be asked again. */
static inline bool extent_let_go(struct extent *extent)
{
    return !load_acquire_u32(&extent->holders) || fetch_add_acq_rel_u32(&extent->holders, UINT32_MAX) == 1;
}

struct page {
    _Alignas(64) _Atomic(uint64_t) word;
    _Atomic(uint64_t) fence_number;
    _Atomic(uint32_t) fence_stream;
    _Atomic(uint32_t) back;      /* on a region's last page: its length when it was last published; a hint */
    _Atomic(uint64_t) where;     /* on a hinted region's first page: its hint (hints.h), the owner's */
    _Atomic(uint64_t) requested; /* on a LIVE region's first page: bytes asked for */
    _Atomic(void *) extent;      /* struct extent: of every mapped page */
    _Atomic(uint32_t) span_pages, span_stream; /* on the first page of a span of a FREE region: see region.h */
    _Atomic(uint64_t) span_number;
};

_Static_assert(sizeof(struct page) == 64, "a page descriptor is a cache line");

struct chunk {
    CUdeviceptr base;
    struct page *page;
};

struct pages {
    size_t page_size;
    unsigned page_shift;  /* page_size = 1 << page_shift */
    unsigned chunk_shift; /* of a global page number */
    uint64_t chunk_pages;
    unsigned max_chunks;
    _Atomic(uint32_t) chunks; /* stored with release after the chunk is filled in; every reader's load is an acquire,
                                 but that the first is there before anything else of the pool */
    struct chunk chunk[PAGES_MAX_CHUNKS];
};

void pages_init(struct pages *, size_t page_size, size_t va_size);
void pages_free(struct pages *); /* the tables; the reservations are the caller's */

/* A table for one more chunk, every word NONE. OUT_OF_ADDRESS_SPACE: no pool has more chunks. HOST_MEMORY. */
vpmm_status pages_table_new(const struct pages *, void **table);
void pages_table_free(const struct pages *, void *table); /* NULL is a no-op */

/* Adds a chunk at a reserved address range, with its table; its first page. One thread at a time. */
uint64_t pages_add_chunk(struct pages *, CUdeviceptr base, void *table);

static inline uint64_t word_make(enum page_state state, uint64_t pages, uint64_t previous)
{
    return (uint64_t)state | pages << PAGE_STATE_BITS |
           ((previous >> (PAGE_STATE_BITS + PAGE_COUNT_BITS)) + 1) << (PAGE_STATE_BITS + PAGE_COUNT_BITS);
}

/* The same of a word whose state is known: one addition. The generation is on top and wraps. */
static inline uint64_t word_next(uint64_t word, enum page_state from, enum page_state to)
{
    return word + (UINT64_C(1) << (PAGE_STATE_BITS + PAGE_COUNT_BITS)) + (uint64_t)to - (uint64_t)from;
}

static inline enum page_state word_state(uint64_t word)
{
    return (enum page_state)(word & ((1u << PAGE_STATE_BITS) - 1));
}

static inline uint64_t word_pages(uint64_t word)
{
    return word >> PAGE_STATE_BITS & ((UINT64_C(1) << PAGE_COUNT_BITS) - 1);
}

static inline uint64_t word_generation(uint64_t word)
{
    return word >> (PAGE_STATE_BITS + PAGE_COUNT_BITS);
}

/* The word as it would be later on. */
static inline uint64_t word_of_generation(uint64_t word, uint64_t generation)
{
    return word + ((generation - word_generation(word)) << (PAGE_STATE_BITS + PAGE_COUNT_BITS));
}

static inline uint64_t page_index(const struct pages *pages, uint64_t page)
{
    return page & ((UINT64_C(1) << pages->chunk_shift) - 1);
}

static inline struct page *page_at(const struct pages *pages, uint64_t page)
{
    return &pages->chunk[page >> pages->chunk_shift].page[page_index(pages, page)];
}

static inline CUdeviceptr page_address(const struct pages *pages, uint64_t page)
{
    return pages->chunk[page >> pages->chunk_shift].base + (page_index(pages, page) << pages->page_shift);
}

/* Pages of the chunk from this one on, itself included: no region reaches further. */
static inline uint64_t pages_to_chunk_end(const struct pages *pages, uint64_t page)
{
    return pages->chunk_pages - page_index(pages, page);
}

/* The page that holds this address. false: not in any chunk. */
bool page_around(const struct pages *, CUdeviceptr, uint64_t *page);

/* The page at exactly this address. false: not in any chunk, or not a page's first byte. */
bool page_of_address(const struct pages *, CUdeviceptr, uint64_t *page);

/* Its descriptor; NULL likewise. */
struct page *page_at_address(const struct pages *, CUdeviceptr);

/*
 * The same in the first chunk alone, the only one of most pools, which is there before anything else of the pool.
 * Rotated, an offset that is no page's has its low bits at the top, and is out of range like one beyond the end.
 */
static inline bool page_in_first_chunk(const struct pages *pages, CUdeviceptr address, struct page **page)
{
    uint64_t offset = address - pages->chunk[0].base;
    uint64_t index = offset >> pages->page_shift | offset << (-pages->page_shift & 63);
    if (index >= pages->chunk_pages)
        return false;
    *page = &pages->chunk[0].page[index];
    return true;
}

static inline struct fence page_fence(const struct page *page)
{
    return (struct fence){load_relaxed_u32(&page->fence_stream), load_relaxed_u64(&page->fence_number)};
}

static inline void page_set_fence(struct page *page, struct fence fence)
{
    store_relaxed_u32(&page->fence_stream, fence.stream);
    store_relaxed_u64(&page->fence_number, fence.number);
}

static inline struct extent *page_extent(const struct page *page)
{
    return load_relaxed_ptr(&page->extent);
}

/*
 * The owner's change of its region's first word. Pairs with the acquire load of whoever finds the region next. The
 * order is sequentially consistent for FREE, where two neighbours that are published at once must not both miss
 * each other (region.c), and for CACHED, where a cache and who empties it must not (front.h).
 */
static inline uint64_t page_set(struct page *page, enum page_state state, uint64_t count)
{
    uint64_t word = word_make(state, count, load_relaxed_u64(&page->word));
    if (state == PAGE_FREE || state == PAGE_CACHED)
        store_sc_u64(&page->word, word);
    else
        store_release_u64(&page->word, word);
    return word;
}

/* Takes a region whose word was read (with acquire): true if it was still so, and is now OWN. */
static inline bool page_take(struct page *page, uint64_t word)
{
    return cas_sc_u64(&page->word, &word, word_make(PAGE_OWN, word_pages(word), word));
}

#endif
