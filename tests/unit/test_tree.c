/*
 * The ordered set of small integers, by one thread: held against an array, and what it touches.
 */
#define _GNU_SOURCE
#include <criterion/criterion.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/tree.h"

/* Made where it fails alone: each assertion is a message to the tests' runner, and these are a million. */
#define check(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            cr_assert_fail(__VA_ARGS__);                                                                               \
    } while (0)

static const uint64_t capacities[] = {1, 63, 64, 65, 2048, 2049, 70000, UINT64_C(1) << 21};

enum { CAPACITIES = sizeof capacities / sizeof *capacities, ROUNDS = 20000 };

struct set {
    struct tree tree;
    _Atomic(uint64_t) *words;
    unsigned char *in; /* the model: in[x], whether x is in the set */
    uint64_t capacity, random;
};

static void set_open(struct set *set, uint64_t capacity)
{
    set->words = calloc(tree_words(capacity), sizeof *set->words);
    set->in = calloc(capacity, 1);
    cr_assert(set->words != NULL && set->in != NULL);
    set->capacity = capacity;
    set->random = capacity | 1;
    tree_init(&set->tree, set->words, capacity);
}

static void set_close(struct set *set)
{
    free(set->words);
    free(set->in);
}

static uint64_t draw(struct set *set, uint64_t below)
{
    set->random ^= set->random << 13;
    set->random ^= set->random >> 7;
    set->random ^= set->random << 17;
    return (set->random >> 11) % below;
}

/* Mostly around one of a few places, the ends among them, so that elements meet in their words. */
static uint64_t draw_element(struct set *set)
{
    uint64_t places[] = {0, set->capacity / 3, set->capacity - 1};
    uint64_t x = places[draw(set, 3)] + draw(set, 200);
    return draw(set, 4) ? x % set->capacity : draw(set, set->capacity);
}

static uint64_t model_next(const struct set *set, uint64_t from)
{
    while (from < set->capacity && !set->in[from])
        from++;
    return from;
}

static void look_for(const struct set *set, uint64_t from)
{
    uint64_t expected = model_next(set, from), x = UINT64_MAX;
    bool any = tree_next(&set->tree, from, &x);
    check(any == (expected < set->capacity), "from %llu of %llu", (unsigned long long)from,
          (unsigned long long)set->capacity);
    check(!any || x == expected, "from %llu of %llu: %llu, not %llu", (unsigned long long)from,
          (unsigned long long)set->capacity, (unsigned long long)x, (unsigned long long)expected);
}

/* With nobody inside a call a bit is set if and only if its child has something: what is cleared is cleared at once. */
static void look_at_bits(const struct set *set)
{
    const struct tree *tree = &set->tree;
    for (unsigned level = 1; level < tree->levels; level++) {
        uint64_t children = (uint64_t)(tree->level[level] - tree->level[level - 1]);
        for (uint64_t child = 0; child < children; child++) {
            uint64_t word = tree->level[level - 1][child];
            bool bit = tree->level[level][child / TREE_FANOUT] >> child % TREE_FANOUT & 1;
            check(bit == (level > 1 ? (uint32_t)word != 0 : word != 0), "level %u, child %llu", level,
                  (unsigned long long)child);
        }
    }
}

static void change(struct set *set, uint64_t x, bool more)
{
    if (more) {
        tree_insert(&set->tree, x);
        set->in[x] = 1;
        return;
    }
    check(tree_remove(&set->tree, x) == set->in[x], "remove of %llu", (unsigned long long)x);
    set->in[x] = 0;
}

static void take_one(struct set *set, uint64_t from)
{
    uint64_t expected = model_next(set, from), x = UINT64_MAX;
    check(tree_take(&set->tree, from, &x) == (expected < set->capacity), "take from %llu", (unsigned long long)from);
    if (expected < set->capacity) {
        check(x == expected, "%llu is taken", (unsigned long long)x);
        set->in[x] = 0;
    }
}

/* By turns more are inserted than removed, and more removed than inserted. */
static void operate(struct set *set)
{
    for (int i = 0; i < ROUNDS; i++) {
        uint64_t growing = i / 500 % 2, kind = draw(set, 16), x = draw_element(set);
        if (kind < 10)
            change(set, x, draw(set, 4) < 1 + 2 * growing);
        else if (kind < 12)
            take_one(set, x);
        else
            look_for(set, x);
    }
}

static void take_all(struct set *set)
{
    uint64_t x, last = 0;
    while (tree_take(&set->tree, last, &x)) {
        check(x >= last && set->in[x], "%llu", (unsigned long long)x);
        set->in[x] = 0;
        last = x;
    }
    cr_assert_eq(model_next(set, 0), set->capacity);
}

Test(tree, random_operations_against_a_model)
{
    for (int i = 0; i < CAPACITIES; i++) {
        struct set set;
        set_open(&set, capacities[i]);
        operate(&set);
        look_at_bits(&set);
        take_all(&set);
        look_at_bits(&set);
        look_for(&set, 0);
        set_close(&set);
    }
}

Test(tree, every_element_alone)
{
    for (int i = 0; capacities[i] <= 70000; i++) {
        struct set set;
        set_open(&set, capacities[i]);
        for (uint64_t x = 0; x < set.capacity; x++) {
            uint64_t found = UINT64_MAX;
            tree_insert(&set.tree, x);
            check(tree_next(&set.tree, 0, &found) && found == x, "%llu", (unsigned long long)x);
            check(tree_next(&set.tree, x, &found) && found == x, "%llu", (unsigned long long)x);
            check(!tree_next(&set.tree, x + 1, &found), "%llu", (unsigned long long)x);
            check(tree_remove(&set.tree, x) && !tree_remove(&set.tree, x), "%llu", (unsigned long long)x);
            check(!tree_next(&set.tree, 0, &found), "%llu", (unsigned long long)x);
        }
        set_close(&set);
    }
}

Test(tree, all_elements_at_once)
{
    struct set set;
    set_open(&set, 2049);
    for (uint64_t x = 0; x < set.capacity; x++)
        change(&set, x, true);
    for (uint64_t x = 0; x <= set.capacity; x++)
        look_for(&set, x);
    for (uint64_t x = 0; x < set.capacity; x += 2) /* another insert of what is there changes nothing */
        change(&set, x, true);
    look_at_bits(&set);
    take_all(&set);
    set_close(&set);
}

Test(tree, edges)
{
    struct set set;
    uint64_t x;
    for (int i = 0; i < CAPACITIES; i++) {
        set_open(&set, capacities[i]);
        cr_assert(!tree_next(&set.tree, 0, &x) && !tree_take(&set.tree, 0, &x));
        cr_assert(!tree_remove(&set.tree, set.capacity - 1));
        tree_insert(&set.tree, set.capacity - 1);
        cr_assert(tree_next(&set.tree, 0, &x) && x == set.capacity - 1);
        cr_assert(!tree_next(&set.tree, set.capacity, &x));
        cr_assert(!tree_next(&set.tree, UINT64_C(1) << 40, &x));
        cr_assert(!tree_next(&set.tree, UINT64_MAX, &x) && !tree_take(&set.tree, UINT64_MAX, &x));
        cr_assert(tree_take(&set.tree, set.capacity - 1, &x) && x == set.capacity - 1);
        cr_assert(!tree_take(&set.tree, 0, &x));
        set_close(&set);
    }
}

static uint64_t divided_up(uint64_t n, uint64_t by)
{
    return (n + by - 1) / by;
}

Test(tree, words)
{
    cr_assert_eq(tree_words(1), 2);
    cr_assert_eq(tree_words(64), 2);
    cr_assert_eq(tree_words(65), 3);
    cr_assert_eq(tree_words(2048), 33);
    cr_assert_eq(tree_words(2049), 33 + 2 + 1);
    for (uint64_t capacity = 1; capacity <= UINT64_C(1) << 31; capacity += 1 + capacity / 7) {
        struct tree tree;
        tree_init(&tree, NULL, capacity);
        cr_assert(tree.levels >= 2 && tree.levels <= TREE_MAX_LEVELS && tree.capacity == capacity);
        uint64_t leaves = divided_up(capacity, TREE_LEAF_BITS);
        cr_assert_geq(tree_words(capacity), leaves + 1);
        cr_assert_leq(tree_words(capacity), divided_up(leaves * 32, 31) + TREE_MAX_LEVELS);
    }
    struct tree largest;
    tree_init(&largest, NULL, UINT64_C(1) << 31);
    cr_assert_eq(largest.levels, TREE_MAX_LEVELS);
}

/* Of the largest tree's pages only those are there that have words above one element: all others would end the test. */
Test(tree, touches_only_the_words_above_an_element)
{
    uint64_t capacity = UINT64_C(1) << 31, elements[] = {0, 12345678, UINT64_C(1) << 30, capacity - 1};
    size_t page = (size_t)sysconf(_SC_PAGESIZE), bytes = tree_words(capacity) * sizeof(uint64_t);
    for (int i = 0; i < 4; i++) {
        struct tree tree;
        uint64_t x = elements[i], found;
        char *base = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        cr_assert(base != MAP_FAILED);
        tree_init(&tree, (_Atomic(uint64_t) *)(void *)base, capacity);
        for (unsigned level = 0; level < tree.levels; level++) {
            size_t word = (size_t)(tree.level[level] - tree.level[0]) + (size_t)(x / TREE_LEAF_BITS >> 5 * level);
            cr_assert(!mprotect(base + word * sizeof(uint64_t) / page * page, page, PROT_READ | PROT_WRITE));
        }
        cr_assert(!tree_next(&tree, 0, &found));
        tree_insert(&tree, x);
        cr_assert(tree_next(&tree, 0, &found) && found == x);
        cr_assert(!tree_next(&tree, x + 1, &found));
        cr_assert(tree_take(&tree, 0, &found) && found == x);
        cr_assert(!tree_next(&tree, 0, &found));
        munmap(base, bytes);
    }
}
