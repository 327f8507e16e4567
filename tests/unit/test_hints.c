/*
 * The set of regions by length: what it takes does not grow with how often it is used.
 */
#include <criterion/criterion.h>
#include <stdint.h>
#include <stdlib.h>

#include "space/hints.h"

enum { HINTS = 6000, ROUNDS = 200 };

enum order { OLDEST_FIRST, NEWEST_FIRST, SHUFFLED };

struct set {
    struct hint_arena arena;
    struct hints *hints;
    struct unit *page;
    uint64_t block_bytes;
};

static void set_open(struct set *set)
{
    cr_assert(hint_arena_init(&set->arena, (size_t)1 << 30));
    set->hints = calloc(1, sizeof *set->hints);
    set->page = calloc(HINTS, sizeof *set->page);
    cr_assert(set->hints != NULL && set->page != NULL);
    cr_assert(hints_enter(set->hints, &set->arena, &set->page[0], 0, 1));
    set->block_bytes = load_relaxed_u64(&set->arena.used); /* the first hint's is the first block */
    hints_remove(&set->page[0]);
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
