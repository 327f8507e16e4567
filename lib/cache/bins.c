#include "cache/bins.h"

#include "base/assert.h"
#include "base/reserve.h"

#define STORE_BYTES ((size_t)BINS_MAX * BIN_BYTES)

bool bins_init(struct bins *bins)
{
    bins->base = reserve_zeros(STORE_BYTES);
    if (!bins->base)
        return false;
    store_relaxed_u32(&bins->used, EMPTY_BIN + 1);
    return true;
}

void bins_free(struct bins *bins)
{
    reserve_free(bins->base, STORE_BYTES);
}

uint32_t bins_new(struct bins *bins)
{
    if (load_relaxed_u32(&bins->used) >= BINS_MAX)
        return EMPTY_BIN;
    uint32_t bin = fetch_add_relaxed_u32(&bins->used, 1);
    return bin < BINS_MAX ? bin : EMPTY_BIN;
}

static _Atomic(uint32_t) *link_of(const struct bins *bins, uint32_t bin)
{
    vpmm_assert(bin != EMPTY_BIN && bin < peek_u32(&bins->used)); /* one that bins_new has given */
    return &bin_at(bins->base, bin)->length;
}

/* For assertions. */
static bool is_spare(const struct bins *bins, const struct bin_stock *stock, uint32_t bin)
{
    uint32_t spare = stock->spare;
    while (spare != EMPTY_BIN && spare != bin)
        spare = peek_u32(link_of(bins, spare));
    return spare != EMPTY_BIN;
}

void bins_keep(const struct bins *bins, struct bin_stock *stock, uint32_t bin)
{
    vpmm_assert_walk(!is_spare(bins, stock, bin)); /* else two caches would have it */
    store_relaxed_u32(link_of(bins, bin), stock->spare);
    stock->spare = bin;
}

uint32_t bins_reuse(const struct bins *bins, struct bin_stock *stock)
{
    uint32_t bin = stock->spare;
    if (bin != EMPTY_BIN)
        stock->spare = load_relaxed_u32(link_of(bins, bin));
    return bin;
}
