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
#include "base/tree.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { MOVERS = 3, THREADS = MOVERS + 1, TOKENS = MOVERS + 1, CAPACITY = 70000, CLOSE = 64 };

static struct {
    struct tree tree;
    struct {
        uint64_t at, moves;
    } token[TOKENS]; /* of x: x % TOKENS; whoever has taken it out of the set may write */
    uint64_t operations, seed;
    _Atomic(uint64_t) failures;
} shared;

struct worker {
    pthread_t thread;
    uint64_t random, moves;
};

static void fail(const char *what)
{
    if (atomic_fetch_add(&shared.failures, 1) < 20)
        fprintf(stderr, "%s\n", what);
}

static uint64_t draw(struct worker *worker, uint64_t below)
{
    worker->random ^= worker->random << 13;
    worker->random ^= worker->random >> 7;
    worker->random ^= worker->random << 17;
    return (worker->random >> 11) % below;
}

/* Mostly in one of a few leaves, the first and the last of their words; else anywhere. */
static uint64_t draw_place(struct worker *worker, uint64_t token)
{
    static const uint64_t near[] = {0, 0, 64, 1984, 2048, 67584};
    uint64_t x = draw(worker, 16) ? near[draw(worker, 6)] + draw(worker, CLOSE) : draw(worker, CAPACITY - TOKENS);
    return x / TOKENS * TOKENS + token;
}

static void move_one(struct worker *worker)
{
    uint64_t x;
    if (draw(worker, 4)) {
        if (!tree_take(&shared.tree, 0, &x)) {
            fail("take answers none");
            return;
        }
    } else {
        x = draw_place(worker, draw(worker, TOKENS));
        if (!tree_remove(&shared.tree, x))
            return;
    }
    uint64_t token = x % TOKENS;
    if (shared.token[token].at != x)
        fail("a token is not where it was inserted");
    x = draw_place(worker, token);
    shared.token[token].at = x;
    shared.token[token].moves++;
    worker->moves++;
    tree_insert(&shared.tree, x);
}

static void *move(void *data)
{
    struct worker *worker = data;
    for (uint64_t i = 0; i < shared.operations / THREADS; i++)
        move_one(worker);
    return NULL;
}

static void *look(void *data)
{
    uint64_t x;
    (void)data;
    for (uint64_t i = 0; i < shared.operations / THREADS; i++)
        if (!tree_next(&shared.tree, 0, &x))
            fail("next answers none");
    return NULL;
}

static uint64_t number_from(const char *variable, uint64_t otherwise)
{
    const char *value = getenv(variable);
    return value && *value ? strtoull(value, NULL, 10) : otherwise;
}

static void look_at_end(const struct worker *workers)
{
    uint64_t x, found = 0, moves = 0, moved = 0;
    for (uint64_t from = 0; tree_next(&shared.tree, from, &x); from = x + 1) {
        if (shared.token[x % TOKENS].at != x)
            fail("an element is left that is no token's");
        found++;
    }
    for (int i = 0; i < TOKENS; i++)
        moves += shared.token[i].moves;
    for (int i = 0; i < MOVERS; i++)
        moved += workers[i].moves;
    if (found != TOKENS || moves != moved)
        fail("tokens are lost");
    while (tree_take(&shared.tree, 0, &x))
        ;
    if (load_relaxed_u64(&shared.tree.level[shared.tree.levels - 1][0]) & UINT32_MAX)
        fail("the root has bits, and the set is empty");
    fprintf(stderr, "tsan_tree: %llu moves, %llu failures\n", (unsigned long long)moved,
            (unsigned long long)atomic_load(&shared.failures));
}

int main(void)
{
    static struct worker workers[THREADS];
    _Atomic(uint64_t) *words = calloc(tree_words(CAPACITY), sizeof *words);
    if (!words)
        return 1;
    shared.operations = number_from("VPMM_TEST_OPS", 4000000);
    shared.seed = number_from("VPMM_TEST_SEED", 1);
    tree_init(&shared.tree, words, CAPACITY);
    for (uint64_t i = 0; i < TOKENS; i++) {
        shared.token[i].at = i;
        tree_insert(&shared.tree, i);
    }
    for (int i = 0; i < THREADS; i++) {
        workers[i].random = (shared.seed + (uint64_t)i) * UINT64_C(0x9E3779B97F4A7C15) | 1;
        if (pthread_create(&workers[i].thread, NULL, i < MOVERS ? move : look, &workers[i]))
            return 1;
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(workers[i].thread, NULL);
    look_at_end(workers);
    free(words);
    return atomic_load(&shared.failures) ? 1 : 0;
}
