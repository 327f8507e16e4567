#include "remap/slab_page.h"

#include "base/assert.h"

/* A rest is first:44 | subpages:20. */
enum { LENGTH_BITS = 20 };

static uint64_t word_of(const struct region *rest)
{
    vpmm_assert(rest->units > 0 && rest->units >> LENGTH_BITS == 0);
    return rest->first << LENGTH_BITS | rest->units;
}

static struct region rest_of(uint64_t word)
{
    return (struct region){word >> LENGTH_BITS, word & ((UINT64_C(1) << LENGTH_BITS) - 1), FENCE_PASSED, false};
}

static struct unit *first_of(const struct arena *arena, const struct region *rest)
{
    return unit_at(&arena->cut.units, rest->first);
}

/* For assertions, of a rest in the caller's hands. */
static bool is_whole(const struct arena *arena, const struct region *rest)
{
    uint64_t word = peek_u64(&first_of(arena, rest)->word);
    return word_state(word) == UNIT_OWN && word_units(word) == rest->units;
}

static struct region split_off(struct arena *arena, struct region region, uint64_t units)
{
    struct region rest = {region.first + units, region.units - units, FENCE_PASSED, false};
    stats_count(arena->stats, STAT_splits);
    unit_set(first_of(arena, &rest), UNIT_OWN, rest.units);
    return rest;
}

bool slab_page_take(struct arena *arena, struct want want, struct region *region)
{
    uint64_t word = load_sc_u64(&arena->slab_page);
    struct region rest = rest_of(word);
    uint64_t place = want_place(want, rest.first);
    if (word == SLAB_PAGE_BUSY || place + want.units > rest.first + rest.units ||
        !cas_sc_u64(&arena->slab_page, &word, SLAB_PAGE_BUSY)) /* pairs with the stores of a rest */
        return false;
    vpmm_assert(is_whole(arena, &rest));
    if (place > rest.first)
        rest = region_drop_front(&arena->cut, rest, place - rest.first);
    *region = (struct region){place, want.units, FENCE_PASSED, false};
    if (rest.units > want.units) {
        rest = split_off(arena, rest, want.units);
        word = word_of(&rest);
    } else {
        word = 0;
    }
    vpmm_assert(load_sc_u64(&arena->slab_page) == SLAB_PAGE_BUSY);
    store_sc_u64(&arena->slab_page, word);
    return true;
}

bool slab_page_is_due(const struct arena *arena)
{
    enum { FREE_SHARE = 16 }; /* the part of cut pages that is free subpages, at most */
    uint64_t cut = stats_sum(arena->stats, STAT_slab_bytes), live = stats_sum(arena->stats, STAT_slab_live_bytes);
    return cut >= arena->slab_pages_from * arena->space.units.unit_size && cut <= live + cut / FREE_SHARE &&
           load_sc_u64(&arena->slab_page) != SLAB_PAGE_BUSY;
}

/* As the rest, in place of the one before. */
static void keep(struct arena *arena, struct region rest)
{
    uint64_t before = load_sc_u64(&arena->slab_page);
    if (before == SLAB_PAGE_BUSY || !cas_sc_u64(&arena->slab_page, &before, word_of(&rest)))
        region_publish(&arena->cut, rest);
    else if (before)
        region_publish(&arena->cut, rest_of(before));
}

struct region slab_page_begin(struct arena *arena, struct region region, uint64_t units)
{
    if (!fence_passed(&arena->streams, region.fence))
        return region_keep_front(&arena->cut, region, units);
    keep(arena, split_off(arena, region, units));
    return (struct region){region.first, units, FENCE_PASSED, false};
}

void slab_page_give_up(struct arena *arena)
{
    uint64_t word = load_sc_u64(&arena->slab_page);
    if (word && word != SLAB_PAGE_BUSY && cas_sc_u64(&arena->slab_page, &word, 0))
        region_publish(&arena->cut, rest_of(word));
}

bool slab_page_is_rest(const struct arena *arena, uint64_t subpage, uint64_t subpages)
{
    struct region rest = rest_of(load_sc_u64(&arena->slab_page));
    return rest.first == subpage && rest.units == subpages;
}
