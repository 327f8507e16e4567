#define _GNU_SOURCE
#include "space/pages.h"

#include "base/reserve.h"

#include <sys/mman.h>

void pages_init(struct pages *pages, size_t page_size, size_t va_size)
{
    pages->page_size = page_size;
    pages->page_shift = (unsigned)__builtin_ctzll(page_size);
    pages->chunk_pages = va_size >> pages->page_shift;
    pages->chunk_shift = 64 - (unsigned)__builtin_clzll(pages->chunk_pages); /* room for one more: see pages.h */
    /* Hints keep page numbers in 32 bits, of which 0 means none. */
    uint64_t fits = (UINT64_C(1) << (32 - pages->chunk_shift)) - 1;
    pages->max_chunks = fits < PAGES_MAX_CHUNKS ? (unsigned)fits : PAGES_MAX_CHUNKS;
    store_relaxed_u32(&pages->chunks, 0);
}

static size_t table_bytes(const struct pages *pages)
{
    return pages->chunk_pages * sizeof(struct page);
}

void pages_free(struct pages *pages)
{
    for (uint32_t i = 0; i < load_relaxed_u32(&pages->chunks); i++)
        reserve_free(pages->chunk[i].page, table_bytes(pages));
}

vpmm_status pages_table_new(const struct pages *pages, void **out)
{
    uint32_t n = load_relaxed_u32(&pages->chunks);
    if (n == pages->max_chunks)
        return fail(VPMM_ERROR_OUT_OF_ADDRESS_SPACE,
                    "%u chunks of %zu bytes are reserved, and no pool holds more; "
                    "raise VPMM_VA_SIZE",
                    n, (size_t)pages->chunk_pages << pages->page_shift);
    void *table = reserve_zeros(table_bytes(pages));
    if (!table)
        return fail(VPMM_ERROR_HOST_MEMORY, "mmap of %zu bytes of page descriptors failed: lower VPMM_VA_SIZE",
                    table_bytes(pages));
    madvise(table, table_bytes(pages), MADV_NOHUGEPAGE); /* sparse by nature: a huge page would be mostly empty */
    *out = table;
    return VPMM_SUCCESS;
}

void pages_table_free(const struct pages *pages, void *table)
{
    reserve_free(table, table_bytes(pages));
}

uint64_t pages_add_chunk(struct pages *pages, CUdeviceptr base, void *table)
{
    uint32_t n = load_relaxed_u32(&pages->chunks);
    pages->chunk[n] = (struct chunk){.base = base, .page = table};
    store_release_u32(&pages->chunks, n + 1); /* pairs with page_around's acquire */
    return (uint64_t)n << pages->chunk_shift;
}

bool page_around(const struct pages *pages, CUdeviceptr address, uint64_t *page)
{
    for (uint32_t i = 0, n = load_acquire_u32(&pages->chunks); i < n; i++) {
        CUdeviceptr offset = address - pages->chunk[i].base;
        if (offset >> pages->page_shift < pages->chunk_pages && address >= pages->chunk[i].base) {
            *page = (uint64_t)i << pages->chunk_shift | offset >> pages->page_shift;
            return true;
        }
    }
    return false;
}

bool page_of_address(const struct pages *pages, CUdeviceptr address, uint64_t *page)
{
    return page_around(pages, address, page) && page_address(pages, *page) == address;
}

struct page *page_at_address(const struct pages *pages, CUdeviceptr address)
{
    uint64_t page;
    return page_of_address(pages, address, &page) ? page_at(pages, page) : NULL;
}
