/*
 * The set of regions by length: what it takes does not grow with how often it is used, and who looks from a length on
 * meets what is as long, and nothing else.
 */
#include <criterion/criterion.h>
#include <limits.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "space/hints.h"

enum { HINTS = 6000, ROUNDS = 200 };

enum order { OLDEST_FIRST, NEWEST_FIRST, SHUFFLED };

struct set {
    struct hint_arena arena;
    struct hints *hints;
    struct unit *page;
    uint64_t block_bytes;
};

static void set_open_in(struct set *set, size_t arena_bytes)
{
    cr_assert(hint_arena_init(&set->arena, arena_bytes));
    set->hints = calloc(1, sizeof *set->hints);
    set->page = calloc(HINTS, sizeof *set->page);
    cr_assert(set->hints != NULL && set->page != NULL);
    cr_assert(hints_enter(set->hints, &set->arena, &set->page[0], 0, 1));
    set->block_bytes = load_relaxed_u64(&set->arena.used); /* the first hint's is the first block */
    hints_remove(&set->page[0]);
}

static void set_open(struct set *set)
{
    set_open_in(set, (size_t)1 << 30);
}

static void set_close(struct set *set)
{
    hint_arena_free(&set->arena);
    free(set->hints);
    free(set->page);
}

static void shuffle(uint32_t *order, uint32_t *seed)
{
    for (uint32_t i = HINTS - 1; i > 0; i--) {
        *seed = *seed * 1664525 + 1013904223;
        uint32_t k = (*seed >> 8) % (i + 1), kept = order[i];
        order[i] = order[k];
        order[k] = kept;
    }
}

/* blocks(bin) <= 1 + the peak of count(bin) / 30, as hints.h has it: for one bin, which the arena has alone. */
static void enter_and_remove(enum order how)
{
    struct set set;
    set_open(&set);
    uint32_t order[HINTS], seed = 1;
    for (uint32_t i = 0; i < HINTS; i++)
        order[i] = how == NEWEST_FIRST ? HINTS - 1 - i : i;
    for (int round = 0; round < ROUNDS; round++) {
        bool entered = true;
        for (uint32_t i = 0; i < HINTS; i++)
            entered = hints_enter(set.hints, &set.arena, &set.page[i], i, 1) && entered;
        cr_assert(entered, "round %d: the arena is exhausted", round);
        cr_assert_eq(hints_count(set.hints), HINTS);
        uint64_t blocks = load_relaxed_u64(&set.arena.used) / set.block_bytes;
        cr_assert_leq(blocks, 1 + HINTS / 30, "round %d: %llu blocks", round, (unsigned long long)blocks);
        if (how == SHUFFLED)
            shuffle(order, &seed);
        for (uint32_t i = 0; i < HINTS; i++)
            hints_remove(&set.page[order[i]]);
        cr_assert_eq(hints_count(set.hints), 0);
    }
    set_close(&set);
}

Test(hints, blocks_are_used_again_oldest_first)
{
    enter_and_remove(OLDEST_FIRST);
}
Test(hints, blocks_are_used_again_newest_first)
{
    enter_and_remove(NEWEST_FIRST);
}
Test(hints, blocks_are_used_again_in_any_order)
{
    enter_and_remove(SHUFFLED);
}

/* An arena that is used up leaves the slots that there are. */
Test(hints, the_last_clear_slot_is_found)
{
    enum { SLOTS = 2 * HINT_SLOTS };
    struct set large, set;
    set_open(&large);
    set_open_in(&set, 2 * large.block_bytes);
    for (uint32_t i = 0; i < SLOTS; i++)
        cr_assert(hints_enter(set.hints, &set.arena, &set.page[i], i, 1));
    cr_assert_not(hints_enter(set.hints, &set.arena, &set.page[SLOTS], SLOTS, 1));
    hints_remove(&set.page[0]);
    hints_remove(&set.page[SLOTS - 1]);
    cr_expect(hints_enter(set.hints, &set.arena, &set.page[0], 0, 1));
    cr_expect(hints_enter(set.hints, &set.arena, &set.page[SLOTS], SLOTS, 1), "there is a slot left");
    set_close(&set);
    set_close(&large);
}

/* ---- looks ---- */

static const uint64_t lengths[] = {1, 2, 31, 32, 32, 63, 64, 65, 71, 68, 72, 128, 129, 1000, 1000, 4000, 50000};

enum { LENGTHS = sizeof lengths / sizeof lengths[0] };

/* A table in which regions of these lengths lie one after another. */
struct regions {
    struct set set;
    struct units units;
    uint64_t first[LENGTHS];
    bool is_free[LENGTHS];
    unsigned met[LENGTHS];
    unsigned visits, most; /* after so many the visitor has seen enough */
};

static void regions_open(struct regions *r)
{
    void *table = NULL;
    memset(r, 0, sizeof *r);
    set_open(&r->set);
    units_init(&r->units, (size_t)1 << 20, (size_t)1 << 40);
    cr_assert_eq(units_table_new(&r->units, &table), VPMM_SUCCESS);
    uint64_t unit = units_add_chunk(&r->units, (CUdeviceptr)1 << 40, table);
    for (int i = 0; i < LENGTHS; unit += lengths[i++]) {
        r->first[i] = unit;
        r->is_free[i] = true;
        unit_set(unit_at(&r->units, unit), UNIT_FREE, lengths[i]);
        cr_assert(hints_enter(r->set.hints, &r->set.arena, unit_at(&r->units, unit), unit, lengths[i]));
    }
}

static void regions_close(struct regions *r)
{
    units_free(&r->units);
    set_close(&r->set);
}

static void take(struct regions *r, int i)
{
    unit_set(unit_at(&r->units, r->first[i]), UNIT_OWN, lengths[i]);
    hints_remove(unit_at(&r->units, r->first[i]));
    r->is_free[i] = false;
}

static bool meet(const struct seen_region *found, void *data)
{
    struct regions *r = data;
    for (int i = 0; i < LENGTHS; i++)
        if (r->first[i] == found->first && lengths[i] == found->units)
            r->met[i]++;
    return ++r->visits < r->most;
}

static void expect_from(struct regions *r, uint64_t units)
{
    memset(r->met, 0, sizeof r->met);
    r->visits = 0;
    r->most = UINT_MAX;
    hints_each_from(r->set.hints, &r->units, UNIT_FREE, units, meet, r);
    for (int i = 0; i < LENGTHS; i++)
        cr_expect_eq(r->met[i], r->is_free[i] && lengths[i] >= units, "from %llu on, a region of %llu is met %u times",
                     (unsigned long long)units, (unsigned long long)lengths[i], r->met[i]);
}

static void expect_from_each_length(struct regions *r)
{
    for (int i = 0; i < LENGTHS; i++) {
        expect_from(r, lengths[i]);
        expect_from(r, lengths[i] + 1);
    }
}

Test(hints, a_look_from_a_length_on_meets_what_is_as_long)
{
    struct regions r;
    regions_open(&r);
    expect_from_each_length(&r);
    for (int i = 0; i < LENGTHS; i += 2) /* with bins that are empty in between */
        take(&r, i);
    expect_from_each_length(&r);
    regions_close(&r);
}

Test(hints, a_look_ends_when_it_has_seen_enough)
{
    struct regions r;
    regions_open(&r);
    r.most = 3;
    hints_each_from(r.set.hints, &r.units, UNIT_FREE, 32, meet, &r);
    cr_expect_eq(r.visits, 3);
    regions_close(&r);
}

/* 65, 71 and 68 units are of one bin, in this order. */
Test(hints, of_a_bin_the_shortest_that_is_as_long_is_found)
{
    struct regions r;
    struct seen_region found;
    regions_open(&r);
    cr_assert(hints_best(r.set.hints, &r.units, UNIT_FREE, (struct want){66, 1}, false, &found));
    cr_expect_eq(found.units, 68);
    regions_close(&r);
}

Test(hints, of_a_bin_the_longest_is_told)
{
    struct regions r;
    regions_open(&r);
    for (int i = 0; i < LENGTHS; i++)
        if (lengths[i] > 71)
            take(&r, i);
    cr_expect_eq(hints_longest(r.set.hints, &r.units, UNIT_FREE), 71);
    regions_close(&r);
}
