/*
 * Two threads that hand pieces to each other, over a simulator in real time, with front caches and the reaper at work;
 * for ThreadSanitizer, and useful without it.
 *
 * Each allocates 256 bytes to 4 MiB on its own stream, stamps them, and lays them where the other finds them; that one
 * looks at the stamp and frees on its own stream, ordered after the first by an event. One in four is freed by who
 * allocated it, so that both threads' caches have something to give.
 *
 *   VPMM_TEST_OPS   mallocs in all; 200,000
 *   VPMM_TEST_SEED  of the random numbers
 *
 * Exit status 0: no failure, no race, no lost stamp, the audit passes and nothing leaks.
 */
#include "world.h"

#include <vpmm/observe.h>

enum { THREADS = 2, SLOTS = 64 };

struct piece {
    CUdeviceptr pointer;
    uint32_t stamp;
    CUstream stream; /* that it was written on */
};

static _Atomic(struct piece *) slots[THREADS][SLOTS]; /* for that thread to take */

static struct piece *make_piece(uint64_t index)
{
    struct piece *p = calloc(1, sizeof *p);
    size_t octave = (size_t)256 << draw(14);
    if (p == NULL)
        return NULL;
    p->stream = world.stream[index];
    if (vpmm_malloc(world.pool, octave + draw(octave), p->stream, &p->pointer) != VPMM_SUCCESS) {
        failed("vpmm_malloc");
        free(p);
        return NULL;
    }
    p->stamp = write_stamp(p->pointer, 1, p->stream);
    return p;
}

/* On the worker's own stream, after all that the piece's has been given. */
static void end_piece(uint64_t index, struct piece *p)
{
    CUstream own = world.stream[index];
    if (p->stream != own)
        order_streams(p->stream, own);
    expect_stamp(p->pointer, 1, p->stamp, own);
    if (vpmm_free(world.pool, p->pointer, own) != VPMM_SUCCESS)
        failed("vpmm_free");
    free(p);
}

static void take_what_lies_there(uint64_t index, uint64_t slot)
{
    struct piece *p = atomic_exchange_explicit(&slots[index][slot], NULL, memory_order_acq_rel);
    if (p != NULL)
        end_piece(index, p);
}

static void look(void *unused, const vpmm_allocation *allocation)
{
    (void)unused;
    if (allocation->bytes < allocation->requested_bytes)
        failed("an allocation of less than was asked for");
}

static void one_operation(uint64_t index)
{
    uint64_t to = draw(4) == 0 ? index : 1 - index;
    struct piece *fresh = make_piece(index);
    struct piece *old = atomic_exchange_explicit(&slots[to][draw(SLOTS)], fresh, memory_order_acq_rel);
    if (old != NULL)
        end_piece(index, old);
    take_what_lies_there(index, draw(SLOTS));
    if (draw(20000) == 0 && vpmm_trim(world.pool, 0, NULL) != VPMM_SUCCESS)
        failed("vpmm_trim");
    vpmm_stats stats;
    if (draw(5000) == 0 && vpmm_stats_get(world.pool, &stats) != VPMM_SUCCESS)
        failed("vpmm_stats_get");
    if (draw(20000) == 0 && vpmm_allocations_visit(world.pool, look, NULL) != VPMM_SUCCESS)
        failed("vpmm_allocations_visit");
}

static void work(uint64_t index)
{
    for (uint64_t i = 0; i < world.amount / THREADS; i++)
        one_operation(index);
}

static void configure(vpmm_sim_config *sim, vpmm_config *config)
{
    sim->memory_bytes = 1024 * PAGE;
    config->va_size = 2048 * PAGE;
}

/* What still lies in the slots is freed by who was to find it. */
static void finish(void)
{
    for (uint64_t index = 0; index < THREADS; index++) {
        for (uint64_t slot = 0; slot < SLOTS; slot++)
            take_what_lies_there(index, slot);
    }
    for (int i = 0; i < THREADS; i++)
        needs(vpmm_stream_release(world.pool, world.stream[i]) == VPMM_SUCCESS);
}

const struct program program = {
    .variable = "VPMM_TEST_OPS",
    .amount = 200000,
    .threads = THREADS,
    .streams = THREADS,
    .configure = configure,
    .work = work,
    .finish = finish,
};
