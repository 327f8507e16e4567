#include "stress_patterns.h"

#include "random.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#define KiB ((size_t)1 << 10)
#define MiB ((size_t)1 << 20)

/* ---- what patterns are made of ---- */

static uint64_t draw(sequence *q, uint64_t bound)
{
    return random_below(&q->random, bound);
}

/* Each doubling is as likely as the next. */
static size_t draw_size(sequence *q, size_t least, size_t most)
{
    double unit = (double)(random_next(&q->random) >> 11) / 9007199254740992.0; /* 2^53 */
    return most <= least ? least : (size_t)((double)least * exp(unit * log((double)most / (double)least)));
}

/* A size for this place, the same each time: as the layers of a model have theirs. */
static size_t size_of_place(const sequence *q, uint64_t place, size_t least, size_t most)
{
    sequence fixed = {.random = (uint64_t)(unsigned char)q->pattern->name[0] << 32 | place};
    return draw_size(&fixed, least, most);
}

/* At most a part of the budget. */
static size_t share(const sequence *q, size_t bytes, size_t part)
{
    size_t most = q->budget / part;
    return bytes < most ? bytes : most;
}

static size_t rounded(size_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

static void forget(sequence *q, unsigned slot)
{
    q->live -= rounded(q->bytes[slot]);
    q->bytes[slot] = 0;
}

static void free_slot(sequence *q, step *s, unsigned slot)
{
    *s = (step){STEP_FREE, slot, 0};
    forget(q, slot);
}

static void give_slot(sequence *q, step *s, unsigned slot)
{
    *s = (step){STEP_GIVE, slot, 0};
    forget(q, slot);
}

/* Some slot that is in use, going round. There is one. */
static void free_any(sequence *q, step *s)
{
    while (q->bytes[q->cursor] == 0)
        q->cursor = (q->cursor + 1) % SEQUENCE_SLOTS;
    free_slot(q, s, q->cursor);
}

/* False: the step frees what is in the way, a slot's tenant or, over budget, anything; the pattern comes again. */
static bool put(sequence *q, step *s, unsigned slot, size_t bytes)
{
    bytes = share(q, bytes, 2);
    bytes = bytes != 0 ? bytes : 1;
    if (q->bytes[slot] != 0) {
        free_slot(q, s, slot);
        return false;
    }
    if (q->live + rounded(bytes) > q->budget) {
        free_any(q, s);
        return false;
    }
    *s = (step){STEP_MALLOC, slot, bytes};
    q->bytes[slot] = bytes;
    q->live += rounded(bytes);
    return true;
}

/* A free of the slot if it is in use, else a malloc into it. */
static void turn_over(sequence *q, step *s, unsigned slot, size_t bytes)
{
    if (q->bytes[slot] != 0)
        free_slot(q, s, slot);
    else
        put(q, s, slot, bytes);
}

static void take(step *s)
{
    *s = (step){STEP_TAKE, 0, 0};
}

/* The turn is over once its malloc was made. */
static void put_and_turn(sequence *q, step *s, unsigned slot, size_t bytes)
{
    q->turn += put(q, s, slot, bytes);
}

/* Frees the slot if it is in use; else the turn passes with whatever the next one does. */
static bool free_and_turn(sequence *q, step *s, unsigned slot)
{
    q->turn++;
    if (q->bytes[slot] == 0)
        return false;
    free_slot(q, s, slot);
    return true;
}

/* ---- programs ---- */

/*
 * A request is twelve layers: an activation and a small block for each, freed in the layer; and a block of keys and
 * values that stays until sixty-four requests later.
 */
static void serving(sequence *q, step *s)
{
    enum { LAYERS = 12, KEPT = 64, FIRST_KEPT = 16, IN_A_LAYER = 4, IN_A_REQUEST = LAYERS * IN_A_LAYER + 1 };
    uint64_t request = q->turn / IN_A_REQUEST, at = q->turn % IN_A_REQUEST;
    bool done = false;
    if (at == IN_A_REQUEST - 1) {
        put_and_turn(q, s, FIRST_KEPT + (unsigned)(request % KEPT), draw_size(q, 256 * KiB, share(q, 32 * MiB, 80)));
        return;
    }
    switch (at % IN_A_LAYER) {
    case 0:
        put_and_turn(q, s, 0, draw_size(q, 512 * KiB, share(q, 96 * MiB, 12)));
        return;
    case 1:
        put_and_turn(q, s, 1, draw_size(q, 512, 512 * KiB));
        return;
    default:
        done = free_and_turn(q, s, (unsigned)(at % IN_A_LAYER) - 2);
    }
    if (!done)
        serving(q, s);
}

/* Forward allocates layer by layer, backward frees in reverse, with a gradient in passing. The sizes come again. */
static void training(sequence *q, step *s)
{
    enum { LAYERS = 48, GRADIENT = LAYERS, BACKWARD = 3 * LAYERS };
    uint64_t at = q->turn % (LAYERS + BACKWARD);
    unsigned layer = at < LAYERS ? (unsigned)at : (unsigned)(LAYERS - 1 - (at - LAYERS) / 3);
    size_t size = size_of_place(q, layer, 128 * KiB, share(q, 128 * MiB, 24));
    if (at < LAYERS || (at - LAYERS) % 3 == 0)
        put_and_turn(q, s, at < LAYERS ? layer : GRADIENT, at < LAYERS ? size : size / 2 + 1);
    else if (!free_and_turn(q, s, (at - LAYERS) % 3 == 1 ? layer : GRADIENT))
        training(q, s);
}

static void mixed(sequence *q, step *s)
{
    turn_over(q, s, (unsigned)draw(q, 384), draw_size(q, 256, share(q, 256 * MiB, 24)));
}

/* Many that are small, nine tenths of them freed at random, large ones beside the rest; then all is freed. */
static void fragment(sequence *q, step *s)
{
    enum { SMALL = 1024, LARGE = 12, ROUND = SMALL + SMALL + LARGE };
    uint64_t at = q->turn % ROUND;
    if (at < SMALL) {
        put_and_turn(q, s, (unsigned)at, draw_size(q, 512, share(q, 3 * MiB / 2, SMALL)));
    } else if (at < SMALL + SMALL) {
        if (draw(q, 10) == 0)
            q->turn++;
        else if (free_and_turn(q, s, (unsigned)at - SMALL))
            return;
        fragment(q, s);
    } else {
        put_and_turn(q, s, (unsigned)(at - SMALL), share(q, 512 * MiB, LARGE + 4));
    }
}

/* One thread allocates, another frees. */
static void handoff(sequence *q, step *s)
{
    if (q->bytes[0] != 0)
        give_slot(q, s, 0);
    else if (q->turn++ % 2 == 1)
        take(s);
    else
        put(q, s, 0, draw_size(q, 1 * KiB, share(q, 32 * MiB, 64)));
}

/* All of the budget in one size, then all of it in another: what was freed in one shape is needed in the next. */
static void thrash(sequence *q, step *s)
{
    static const size_t pages[] = {1, 3, 7, 16, 41, 2, 90};
    size_t size = share(q, pages[q->phase % (sizeof pages / sizeof *pages)] * 2 * MiB, 8);
    if (q->live + size <= q->budget && q->turn < SEQUENCE_SLOTS) {
        put_and_turn(q, s, (unsigned)q->turn, size);
        return;
    }
    q->turn = SEQUENCE_SLOTS; /* freeing */
    if (q->live == 0) {
        q->turn = 0;
        q->phase++;
        thrash(q, s);
    } else {
        free_any(q, s);
    }
}

/* ---- what allocators are measured by ---- */

/* Larson and Krishnan, Memory Allocation for Long-Running Server Applications, 1998: slots that threads inherit. */
static void larson(sequence *q, step *s)
{
    unsigned slot = (unsigned)draw(q, 256);
    if (draw(q, 16) == 0)
        take(s);
    else if (q->bytes[slot] != 0 && draw(q, 16) == 0)
        give_slot(q, s, slot);
    else
        turn_over(q, s, slot, draw_size(q, 1 * KiB, 2 * MiB));
}

/* xmalloc-test: batches that one thread allocates and another frees. */
static void xmalloc(sequence *q, step *s)
{
    enum { BATCH = 32 };
    uint64_t at = q->turn % (BATCH + BATCH + BATCH);
    if (at < BATCH) {
        put_and_turn(q, s, (unsigned)at, draw_size(q, 512, 1 * MiB));
        return;
    }
    q->turn++;
    if (at < BATCH + BATCH && q->bytes[at - BATCH] != 0)
        give_slot(q, s, (unsigned)(at - BATCH));
    else
        take(s);
}

/* mimalloc's mstress: mostly small, some kept for long, some exchanged with other threads. */
static void mstress(sequence *q, step *s)
{
    enum { PASSING = 512, KEPT = 512 };
    uint64_t kind = draw(q, 100);
    size_t size = kind < 90   ? draw_size(q, 256, 64 * KiB)
                  : kind < 99 ? draw_size(q, 64 * KiB, 4 * MiB)
                              : draw_size(q, 4 * MiB, share(q, 64 * MiB, 32));
    unsigned passing = (unsigned)draw(q, PASSING);
    uint64_t what = draw(q, 10);
    if (what == 0)
        turn_over(q, s, PASSING + (unsigned)draw(q, KEPT), size);
    else if (what == 1 && q->bytes[passing] != 0)
        give_slot(q, s, passing);
    else if (what == 2)
        take(s);
    else
        turn_over(q, s, passing, size);
}

/* rpmalloc's benchmark: sizes even over a range; every second of a batch is freed before the next, some elsewhere. */
static void rptest(sequence *q, step *s)
{
    enum { BATCH = 64 };
    uint64_t at = q->turn % (BATCH + BATCH);
    if (at < BATCH) {
        put_and_turn(q, s, (unsigned)at, 16 * KiB + draw(q, share(q, 8 * MiB, 128)));
        return;
    }
    q->turn++;
    unsigned slot = (unsigned)(at - BATCH);
    if (slot % 2 == 0 && q->bytes[slot] != 0) {
        if (draw(q, 4) == 0)
            give_slot(q, s, slot);
        else
            free_slot(q, s, slot);
    } else {
        take(s);
    }
}

/* SmartHeap's sh6bench: rising sizes; the newer half is freed last in, first out, the rest first in, first out. */
static void sh6(sequence *q, step *s)
{
    enum { SIZES = 48 };
    uint64_t at = q->turn % (SIZES + SIZES);
    unsigned freed = (unsigned)(at - SIZES);
    if (at < SIZES)
        put_and_turn(q, s, (unsigned)at, share(q, (size_t)(256 * pow(1.25, (double)at)), 8));
    else if (!free_and_turn(q, s, freed < SIZES / 2 ? SIZES - 1 - freed : freed - SIZES / 2))
        sh6(q, s);
}

/* SmartHeap's sh8bench: the same of lives of any length. */
static void sh8(sequence *q, step *s)
{
    unsigned slot = (unsigned)(draw(q, 2) == 0 ? draw(q, 200) : draw(q, 20));
    turn_over(q, s, slot, share(q, (size_t)(256 * pow(1.25, (double)draw(q, 44))), 8));
}

/* glibc's bench-malloc-thread: sizes by an inverse power law, in a working set of a thousand. */
static void glibc_thread(sequence *q, step *s)
{
    double unit = (double)(1 + draw(q, 1 << 20)) / (1 << 20);
    double least = pow(256, -0.5), most = pow((double)(16 * MiB), -0.5);
    turn_over(q, s, (unsigned)draw(q, 1024), (size_t)pow(most + unit * (least - most), -2));
}

/* A key-value cache that is full: one entry goes for each that comes. */
static void kv(sequence *q, step *s)
{
    enum { ENTRIES = 256 };
    size_t mean = q->budget / ENTRIES, size = mean * 3 / 4 + draw(q, mean / 2 + 1);
    if (q->turn < ENTRIES)
        put_and_turn(q, s, (unsigned)q->turn, size);
    else
        turn_over(q, s, (unsigned)draw(q, ENTRIES), size);
}

/* RMM's random_allocations: allocate or free, at even odds, with sizes even over a range. */
static void random_allocations(sequence *q, step *s)
{
    unsigned slot = (unsigned)draw(q, SEQUENCE_SLOTS);
    if (draw(q, 2) == 0 && q->live != 0)
        free_any(q, s);
    else
        put(q, s, slot, 1 + draw(q, share(q, 64 * MiB, 32)));
}

/* RMM's multi_stream_allocations: each allocation on the next stream. */
static void multi_stream(sequence *q, step *s)
{
    uint64_t at = q->turn++;
    if (at % 2 == 0)
        *s = (step){STEP_STREAM, 0, 0};
    else
        turn_over(q, s, (unsigned)(at / 2 % 8), draw_size(q, 4 * KiB, share(q, 16 * MiB, 32)));
}

const pattern patterns[PATTERN_COUNT] = {
    {"serving", "requests of a language model: activations that pass, keys and values that stay", serving},
    {"training", "forward and backward through layers whose sizes come again", training},
    {"mixed", "sizes of 256 bytes to 256 MiB, lives of any length", mixed},
    {"fragment", "small ones, most of them freed, then large ones beside the rest", fragment},
    {"handoff", "allocated by one thread, freed by another", handoff},
    {"thrash", "all memory in one size, then all of it in another", thrash},
    {"larson", "a server's slots, which threads inherit", larson},
    {"xmalloc", "batches that another thread frees", xmalloc},
    {"mstress", "mimalloc's: mostly small, kept, passed on", mstress},
    {"rptest", "rpmalloc's: every second of a batch freed, some elsewhere", rptest},
    {"sh6", "SmartHeap's: rising sizes, freed from both ends", sh6},
    {"sh8", "SmartHeap's: the same with lives of any length", sh8},
    {"glibc-thread", "glibc's: an inverse power law", glibc_thread},
    {"kv", "a full cache: one goes for each that comes", kv},
    {"random", "RMM's random_allocations", random_allocations},
    {"multi-stream", "RMM's multi_stream_allocations: each on the next stream", multi_stream},
};

/* ---- sequences ---- */

void sequence_begin(sequence *q, const pattern *pattern, uint64_t seed, size_t budget)
{
    memset(q, 0, sizeof *q);
    q->pattern = pattern;
    q->random = seed;
    q->budget = budget;
}

step sequence_next(sequence *q)
{
    step s = {STEP_TAKE, 0, 0};
    q->pattern->next(q, &s);
    uint64_t mixed_in = q->digest ^ ((uint64_t)s.kind | (uint64_t)s.slot << 3 | (uint64_t)s.bytes << 16);
    q->digest = random_next(&mixed_in);
    return s;
}
