/*
 * The ordered set of small integers with four threads at once, in real time; for ThreadSanitizer, and useful without
 * it.
 *
 * Three threads move four tokens: each takes one out of the set, or removes one by name, and inserts it at another of
 * its places, of which most are few and close together. So one token at least is in the set at any time: a search that
 * answers none is wrong, and a fourth thread does nothing but search. What a token carries is plain memory, handed over
 * by the set alone.
 *
 *   VPMM_TEST_OPS   moves and searches in all; 4,000,000
 *   VPMM_TEST_SEED  of the random numbers
 *
 * Exit status 0: no race, no wrong none, no token in two hands, all of them there in the end, and no bit left above an
 * empty child when a search has come by.
 */
#include "world.h"

#include "base/tree.h"

enum { MOVERS = 3, THREADS = MOVERS + 1, TOKENS = MOVERS + 1, CAPACITY = 70000, CLOSE = 64 };

static struct {
    struct tree tree;
    struct {
        uint64_t at, moves;
    } token[TOKENS]; /* of x: x % TOKENS; whoever has taken it out of the set may write */
    _Atomic(uint64_t) *words;
    _Atomic(uint64_t) moved;
} shared;

/* Mostly in one of a few leaves, the first and the last of their words; else anywhere. */
static uint64_t draw_place(uint64_t token)
{
    static const uint64_t near[] = {0, 0, 64, 1984, 2048, 67584};
    uint64_t x = draw(16) ? near[draw(6)] + draw(CLOSE) : draw(CAPACITY - TOKENS);
    return x / TOKENS * TOKENS + token;
}

/* Whether a token was moved. */
static bool move_one(void)
{
    uint64_t x;
    if (draw(4)) {
        if (!tree_take(&shared.tree, 0, &x)) {
            failed("take answers none");
            return false;
        }
    } else {
        x = draw_place(draw(TOKENS));
        if (!tree_remove(&shared.tree, x))
            return false;
    }
    uint64_t token = x % TOKENS;
    if (shared.token[token].at != x)
        failed("a token is not where it was inserted");
    x = draw_place(token);
    shared.token[token].at = x;
    shared.token[token].moves++;
    tree_insert(&shared.tree, x);
    return true;
}

static void look_for_one(void)
{
    uint64_t x;
    if (!tree_next(&shared.tree, 0, &x))
        failed("next answers none");
}

static void work(uint64_t index)
{
    uint64_t moved = 0;
    for (uint64_t i = 0; i < world.amount / THREADS; i++) {
        if (index < MOVERS)
            moved += move_one();
        else
            look_for_one();
    }
    atomic_fetch_add(&shared.moved, moved);
}

static void begin(void)
{
    shared.words = calloc(tree_words(CAPACITY), sizeof *shared.words);
    if (shared.words == NULL) {
        failed("no memory");
        return;
    }
    tree_init(&shared.tree, shared.words, CAPACITY);
    for (uint64_t i = 0; i < TOKENS; i++) {
        shared.token[i].at = i;
        tree_insert(&shared.tree, i);
    }
}

static void look_at_tokens(void)
{
    uint64_t x, found = 0, moves = 0, moved = atomic_load(&shared.moved);
    for (uint64_t from = 0; tree_next(&shared.tree, from, &x); from = x + 1) {
        if (shared.token[x % TOKENS].at != x)
            failed("an element is left that is no token's");
        found++;
    }
    for (int i = 0; i < TOKENS; i++)
        moves += shared.token[i].moves;
    if (found != TOKENS || moves != moved)
        failed("tokens are lost");
    printf("%llu moves\n", (unsigned long long)moved);
}

static void finish(void)
{
    uint64_t x;
    look_at_tokens();
    while (tree_take(&shared.tree, 0, &x))
        ;
    if (load_relaxed_u64(&shared.tree.level[shared.tree.levels - 1][0]) & UINT32_MAX)
        failed("the root has bits, and the set is empty");
    free(shared.words);
}

const struct program program = {
    .variable = "VPMM_TEST_OPS",
    .amount = 4000000,
    .threads = THREADS,
    .work = work,
    .begin = begin,
    .finish = finish,
};
