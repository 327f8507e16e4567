/*
 * The ordered set of small integers: what threads do to it at the same time, in orders with at most two
 * preemptions, and in random ones (explore.h says how, and how to have more of them or one of them again).
 *
 * After each schedule: the set has what it should have, searches find it, and when they have come by everything no bit
 * stands above an empty child.
 */
#include "base/tree.h"
#include "explore.h"

#include <criterion/criterion.h>
#include <string.h>

/* Three levels. LEAST and NEIGHBOUR are in one leaf, BESIDE is in the next one, FAR below another bit of the root. */
enum { CAPACITY = 1 << 16, WORDS = 1024 + 32 + 1, LEAST = 3, NEIGHBOUR = 5, BESIDE = 70, FAR = 40000 };

static struct {
    struct tree tree;
    _Atomic(uint64_t) words[WORDS];
    bool removed[EXPLORE_ACTORS]; /* by the actor */
    uint64_t taken[EXPLORE_ACTORS];
} play;

enum { NOTHING = CAPACITY }; /* taken */

/* ---- before and after ---- */

static void open_empty(void *data)
{
    (void)data;
    memset(&play, 0, sizeof play);
    tree_init(&play.tree, play.words, CAPACITY);
    for (int i = 0; i < EXPLORE_ACTORS; i++)
        play.taken[i] = NOTHING;
}

static void open_with_neighbour(void *data)
{
    open_empty(data);
    tree_insert(&play.tree, NEIGHBOUR);
}

static void open_with_beside(void *data)
{
    open_empty(data);
    tree_insert(&play.tree, BESIDE);
}

static void open_with_far(void *data)
{
    open_empty(data);
    tree_insert(&play.tree, FAR);
}

static void open_with_two(void *data)
{
    open_with_neighbour(data);
    tree_insert(&play.tree, FAR);
}

static void open_with_three(void *data)
{
    open_with_two(data);
    tree_insert(&play.tree, BESIDE);
}

static bool has(uint64_t x)
{
    return play.words[x / TREE_LEAF_BITS] >> x % TREE_LEAF_BITS & 1;
}

static unsigned count(void)
{
    unsigned elements = 0;
    for (int leaf = 0; leaf < CAPACITY / TREE_LEAF_BITS; leaf++)
        elements += (unsigned)__builtin_popcountll(play.words[leaf]);
    return elements;
}

/* Every element is found from below, and nothing else is. */
static void look_for_all(void)
{
    unsigned found = 0;
    uint64_t x;
    for (uint64_t from = 0; tree_next(&play.tree, from, &x); from = x + 1) {
        explore_check(has(x), "%llu is found and not in the set", (unsigned long long)x);
        found++;
    }
    explore_check(found == count(), "%u elements are found of %u", found, count());
}

static void look_at_bits(void)
{
    for (unsigned level = 1; level < play.tree.levels; level++)
        for (int child = 0; child < play.tree.level[level] - play.tree.level[level - 1]; child++) {
            uint64_t word = play.tree.level[level - 1][child];
            bool bit = play.tree.level[level][child / TREE_FANOUT] >> child % TREE_FANOUT & 1;
            explore_check(bit == (level > 1 ? (uint32_t)word != 0 : word != 0), "level %u, child %d: its bit is %d",
                          level, child, bit);
        }
}

static void close_with(unsigned elements)
{
    explore_check(count() == elements, "there are %u elements, not %u", count(), elements);
    look_for_all();
    look_at_bits();
}

static void close_with_none(void *data)
{
    (void)data;
    close_with(0);
}

static void close_with_one(void *data)
{
    (void)data;
    close_with(1);
}

static void close_with_three(void *data)
{
    (void)data;
    close_with(3);
}

static void explore_tree(const char *name, struct exploration what)
{
    explore(name, &what);
}

#define SCHEDULES(name) Test(schedules_tree, name, .timeout = 600, .fini = explore_report)

/* ---- what actors do ---- */

/* What the caller has inserted is the least that anyone has, and stays. */
static void insert_and_find(uint64_t x)
{
    uint64_t found = NOTHING;
    tree_insert(&play.tree, x);
    bool any = tree_next(&play.tree, 0, &found);
    explore_check(any && found == x, "%llu is inserted, and %llu is found", (unsigned long long)x,
                  (unsigned long long)found);
}

static void remove_it(uint64_t x)
{
    play.removed[explore_actor()] = tree_remove(&play.tree, x);
}

static void remove_what_is_there(uint64_t x)
{
    explore_check(tree_remove(&play.tree, x), "%llu is not there", (unsigned long long)x);
}

static void take_any(void)
{
    uint64_t x;
    if (tree_take(&play.tree, 0, &x))
        play.taken[explore_actor()] = x;
}

static void insert_least_and_find(void *data)
{
    (void)data;
    insert_and_find(LEAST);
}

static void insert_least(void *data)
{
    (void)data;
    tree_insert(&play.tree, LEAST);
}

static void remove_least(void *data)
{
    (void)data;
    remove_it(LEAST);
}

static void remove_neighbour(void *data)
{
    (void)data;
    remove_it(NEIGHBOUR);
}

static void remove_beside(void *data)
{
    (void)data;
    remove_it(BESIDE);
}

static void take(void *data)
{
    (void)data;
    take_any();
}

/* ---- an insert against what clears the bits above it ---- */

static void close_insert_against_remove(void *data)
{
    (void)data;
    explore_check(play.removed[1], "the remove is told that there was nothing");
    close_with(1);
}

SCHEDULES(insert_against_remove_in_one_leaf)
{
    explore_tree("insert_against_remove_in_one_leaf",
                 (struct exploration){.open = open_with_neighbour,
                                      .act = {insert_least_and_find, remove_neighbour},
                                      .close = close_insert_against_remove});
}

SCHEDULES(insert_against_remove_in_the_next_leaf)
{
    explore_tree("insert_against_remove_in_the_next_leaf",
                 (struct exploration){.open = open_with_beside,
                                      .act = {insert_least_and_find, remove_beside},
                                      .close = close_insert_against_remove});
}

static void insert_and_remove_neighbour(void *data)
{
    (void)data;
    tree_insert(&play.tree, NEIGHBOUR);
    remove_what_is_there(NEIGHBOUR);
}

/* The bit is cleared and set again while the other remove looks. */
SCHEDULES(insert_against_two_removes_in_one_leaf)
{
    explore_tree("insert_against_two_removes_in_one_leaf",
                 (struct exploration){.open = open_with_beside,
                                      .act = {insert_least_and_find, remove_beside, insert_and_remove_neighbour},
                                      .close = close_insert_against_remove});
}

static void close_insert_against_its_remove(void *data)
{
    (void)data;
    close_with(play.removed[1] ? 0 : 1);
}

/* The insert may set its bits when all is over. */
SCHEDULES(insert_against_its_own_remove)
{
    explore_tree("insert_against_its_own_remove",
                 (struct exploration){.open = open_with_neighbour,
                                      .act = {insert_least, remove_least, remove_neighbour},
                                      .close = close_insert_against_its_remove});
}

SCHEDULES(insert_against_the_same_insert_and_a_remove)
{
    explore_tree("insert_against_the_same_insert_and_a_remove",
                 (struct exploration){.open = open_with_neighbour,
                                      .act = {insert_least_and_find, insert_least, remove_neighbour},
                                      .close = close_with_one});
}

/* ---- of several that remove one is told so ---- */

static void close_one_winner(void *data)
{
    (void)data;
    int winners = 0;
    for (int i = 0; i < EXPLORE_ACTORS; i++)
        winners += play.removed[i] + (play.taken[i] == NEIGHBOUR);
    explore_check(winners == 1, "%d have removed one element", winners);
    close_with(0);
}

SCHEDULES(remove_against_remove)
{
    explore_tree("remove_against_remove", (struct exploration){.open = open_with_neighbour,
                                                               .act = {remove_neighbour, remove_neighbour},
                                                               .close = close_one_winner});
}

SCHEDULES(remove_against_two_takes)
{
    explore_tree("remove_against_two_takes", (struct exploration){.open = open_with_neighbour,
                                                                  .act = {remove_neighbour, take, take},
                                                                  .close = close_one_winner});
}

static void close_takes_against_insert(void *data)
{
    (void)data;
    unsigned taken = 0;
    for (int i = 0; i < EXPLORE_ACTORS; i++)
        taken += play.taken[i] != NOTHING;
    explore_check(play.taken[0] == NOTHING || play.taken[0] != play.taken[1], "both have taken %llu",
                  (unsigned long long)play.taken[0]);
    explore_check(taken >= 1, "there was one, and nobody has taken it");
    close_with(2 - taken);
}

SCHEDULES(two_takes_against_insert)
{
    explore_tree("two_takes_against_insert", (struct exploration){.open = open_with_far,
                                                                  .act = {take, take, insert_least},
                                                                  .close = close_takes_against_insert});
}

static void insert_and_take(void *data)
{
    (void)data;
    tree_insert(&play.tree, explore_actor() ? BESIDE : NEIGHBOUR);
    take_any();
    explore_check(play.taken[explore_actor()] != NOTHING, "one is left for each, and none is found");
}

SCHEDULES(pairs_of_insert_and_take)
{
    explore_tree(
        "pairs_of_insert_and_take",
        (struct exploration){.open = open_empty, .act = {insert_and_take, insert_and_take}, .close = close_with_none});
}

/* ---- none is not said of a set that never is empty ---- */

static void look_at_never_empty(void *data)
{
    (void)data;
    uint64_t x;
    explore_check(tree_next(&play.tree, 0, &x), "none, and the set never is empty");
}

static void move_far_to_least(void *data)
{
    (void)data;
    tree_insert(&play.tree, LEAST);
    remove_what_is_there(FAR);
}

/* The search has passed where the element goes before it comes to where it was. */
SCHEDULES(next_against_a_move_downwards)
{
    explore_tree("next_against_a_move_downwards", (struct exploration){.open = open_with_far,
                                                                       .act = {move_far_to_least, look_at_never_empty},
                                                                       .close = close_with_one});
}

static void move_beside_to_least(void *data)
{
    (void)data;
    tree_insert(&play.tree, LEAST);
    remove_what_is_there(BESIDE);
}

SCHEDULES(next_against_a_move_to_the_leaf_before)
{
    explore_tree("next_against_a_move_to_the_leaf_before",
                 (struct exploration){.open = open_with_beside,
                                      .act = {move_beside_to_least, look_at_never_empty},
                                      .close = close_with_one});
}

static void move_far_to_beside(void *data)
{
    (void)data;
    tree_insert(&play.tree, BESIDE);
    remove_what_is_there(FAR);
}

static void look_above_neighbour(void *data)
{
    (void)data;
    uint64_t x;
    explore_check(tree_next(&play.tree, NEIGHBOUR + 1, &x), "none, and there always is one above the neighbour");
}

static void close_with_two(void *data)
{
    (void)data;
    close_with(2);
}

/* The root has the same bits all the time, but for the one that goes. */
SCHEDULES(next_from_above_against_a_move_downwards)
{
    explore_tree("next_from_above_against_a_move_downwards",
                 (struct exploration){.open = open_with_two,
                                      .act = {move_far_to_beside, look_above_neighbour},
                                      .close = close_with_two});
}

/* Each has one of three in its hands at most. It goes to the other half of the set, where it meets none. */
static void take_and_insert(void *data)
{
    uint64_t x = NOTHING;
    (void)data;
    explore_check(tree_take(&play.tree, 0, &x), "none, and the set never is empty");
    if (x < NOTHING)
        tree_insert(&play.tree, x ^ CAPACITY / 2);
}

SCHEDULES(three_of_which_each_thread_moves_one)
{
    explore_tree("three_of_which_each_thread_moves_one", (struct exploration){.open = open_with_three,
                                                                              .act = {take_and_insert, take_and_insert},
                                                                              .close = close_with_three});
}

/* ---- what is above the start ---- */

static void look_for_far(void *data)
{
    (void)data;
    uint64_t x = NOTHING;
    bool any = tree_next(&play.tree, NEIGHBOUR + 1, &x);
    explore_check(any && x == FAR, "%llu is found, not %d", (unsigned long long)x, FAR);
}

/* The bits below the start are others'. */
SCHEDULES(next_past_what_comes_and_goes)
{
    explore_tree("next_past_what_comes_and_goes",
                 (struct exploration){.open = open_with_two,
                                      .act = {look_for_far, insert_least, remove_neighbour},
                                      .close = close_with_two});
}
