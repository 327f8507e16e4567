/*
 * The preload's book of live allocations with eight threads at once, in real time; for ThreadSanitizer, and useful
 * without it. There is no GPU in it.
 *
 * Address space of 64 blocks is dealt out in cells, whose lengths are as different as requests are: from 256 bytes to
 * more than a block, across blocks. A thread that takes a free cell, by an exchange as vpmm would hand memory over,
 * adds an allocation there, of any length that fits, looks for it by addresses at random in it, and takes it out again.
 * Beside that everybody asks for addresses anywhere: what is answered must hold the address. In some cells two threads
 * take the same allocation at once, as two frees of one address would.
 *
 *   VPMM_TEST_OPS   allocations in all; 400,000
 *   VPMM_TEST_SEED  of the random numbers
 *
 * Exit status 0: no race, each allocation is found while it is there, and by nobody afterwards, and of two that take it
 * one does.
 */
#include "world.h"

#include "../../lib/preload/book.h"

#include <sched.h>
#include <stdatomic.h>

enum { THREADS = 8, CELLS = 1024, DUELS = 2 /* cells */, ROUNDS = 20000 };

#define BLOCK (UINT64_C(2) << 20)
#define BASE  (UINT64_C(0x7ff800000000) - 3 * BLOCK) /* on both sides of a shelf's edge */

static struct {
    uint64_t edge[CELLS + 1]; /* constant */
    unsigned cells;
    _Atomic(int) taken[CELLS];
    _Atomic(int) stolen[CELLS]; /* by the other one */
} shared;

/* Mostly small ones; each tenth or so is of up to three blocks, and begins anywhere. */
static void begin(void)
{
    static const uint64_t lengths[] = {256, 512, 256, 4096, 8192, 65536, 256, 2560, 3 * BLOCK / 2, 768};
    uint64_t at = BASE;
    for (unsigned i = 0; i < CELLS && at < BASE + 64 * BLOCK; i++) {
        shared.edge[i] = at;
        at += lengths[i % 10];
        shared.cells = i + 1;
    }
    shared.edge[shared.cells] = at;
}

static void ask_anywhere(void)
{
    uint64_t start, address = BASE + draw(shared.edge[shared.cells] - BASE);
    struct allocation allocation;
    if (book_find(address, &start, &allocation) &&
        (address < start || address - start >= allocation.bytes || allocation.device != start / 256 % BOOK_DEVICES))
        failed("an allocation is found that does not hold the address, or is another one's");
}

static void check(uint64_t start, struct allocation made)
{
    uint64_t found;
    struct allocation allocation;
    if (!book_find(start + draw(made.bytes), &found, &allocation) || found != start || allocation.bytes != made.bytes ||
        allocation.at_once != made.at_once)
        failed("an allocation is not found as it was made");
    if (book_find(start + made.bytes, &found, &allocation) && found == start)
        failed("an allocation is found behind its end");
}

static void use_cell(unsigned cell)
{
    uint64_t start = shared.edge[cell], room = shared.edge[cell + 1] - start;
    struct allocation made = {.bytes = draw(room) + 1, .device = start / 256 % BOOK_DEVICES, .at_once = draw(2)};
    struct allocation allocation;
    if (book_take(start, &allocation))
        failed("an allocation is there before it is made");
    if (!book_add(start, made))
        failed("an allocation cannot be added");
    check(start, made);
    if (room > 256 && book_take(start + 256, &allocation))
        failed("an allocation is taken by an address behind it");
    if (!book_take(start, &allocation) || allocation.bytes != made.bytes || book_take(start, &allocation))
        failed("an allocation is not taken once");
}

/* What is not taken here was taken by another thread, which says so a little later. */
static void duel(unsigned cell)
{
    struct allocation allocation = {.bytes = 100, .device = shared.edge[cell] / 256 % BOOK_DEVICES};
    for (int i = 0; i < ROUNDS; i++) {
        if (atomic_load(&shared.stolen[cell]))
            failed("an allocation was taken twice");
        if (!book_add(shared.edge[cell], allocation))
            failed("an allocation cannot be added");
        if (!book_take(shared.edge[cell], &allocation))
            while (!atomic_exchange(&shared.stolen[cell], 0))
                sched_yield();
    }
}

static void steal(unsigned cell)
{
    struct allocation allocation;
    for (int i = 0; i < ROUNDS; i++)
        if (book_take(shared.edge[cell], &allocation))
            atomic_store(&shared.stolen[cell], 1);
}

static void work(uint64_t index)
{
    (void)index;
    for (uint64_t i = 0; i < world.amount / THREADS; i++) {
        unsigned cell = DUELS + (unsigned)draw(shared.cells - DUELS);
        if (draw(1000) == 0)
            cell = (unsigned)draw(DUELS);
        if (atomic_exchange(&shared.taken[cell], 1) == 0) {
            if (cell < DUELS)
                duel(cell);
            else
                use_cell(cell);
            atomic_store(&shared.taken[cell], 0);
        } else if (cell < DUELS) {
            steal(cell);
        }
        ask_anywhere();
    }
}

static void is_left(uint64_t start, struct allocation allocation, void *data)
{
    (void)start, (void)allocation, (void)data;
    failed("an allocation is left");
}

static void finish(void)
{
    book_each(is_left, NULL);
    if (book_add(UINT64_C(1) << 48, (struct allocation){.bytes = 1}) ||
        book_add(BASE + 1, (struct allocation){.bytes = 1}))
        failed("what the book cannot hold is added");
    for (unsigned cell = 0; cell < shared.cells; cell++)
        if (atomic_load(&shared.stolen[cell]))
            failed("an allocation was taken twice");
}

const struct program program = {
    .variable = "VPMM_TEST_OPS",
    .amount = 400000,
    .threads = THREADS,
    .begin = begin,
    .work = work,
    .finish = finish,
};
