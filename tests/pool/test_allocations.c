/*
 * vpmm_allocations_visit and vpmm_allocation_get: what is live, one by one, whichever way it was cut; and nothing else.
 */
#include "support.h"

#include <vpmm/observe.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/resource.h>

enum { MOST = 4096 };

struct found {
    vpmm_allocation allocation[MOST];
    size_t count;
};

static void note(void *data, const vpmm_allocation *allocation)
{
    struct found *found = data;
    require(found->count < MOST, "there are more than %d", MOST);
    found->allocation[found->count++] = *allocation;
}

static int by_address(const void *a, const void *b)
{
    const vpmm_allocation *left = a, *right = b;
    return left->address < right->address ? -1 : left->address > right->address;
}

/* In order; none is twice, or within another, and in sum they are what the statistics say. */
static const struct found *visit(struct world *w)
{
    static struct found found;
    uint64_t requested = 0;
    found.count = 0;
    must_work(vpmm_allocations_visit(w->pool, note, &found));
    qsort(found.allocation, found.count, sizeof found.allocation[0], by_address);
    for (size_t i = 0; i < found.count; i++) {
        const vpmm_allocation *this = &found.allocation[i];
        requested += this->requested_bytes;
        cr_expect_leq(this->requested_bytes, this->bytes);
        if (i > 0)
            cr_expect_geq(this->address, this[-1].address + this[-1].bytes);
    }
    cr_expect_eq(requested, stats_of(w).requested_bytes);
    return &found;
}

/* It is found by each of its addresses, and not by those beside it unless another one is there. */
static void expect_one(struct world *w, CUdeviceptr address, size_t requested)
{
    vpmm_allocation at, in;
    must_work(vpmm_allocation_get(w->pool, address, &at));
    cr_expect_eq(at.address, address);
    cr_expect_eq(at.requested_bytes, requested);
    for (size_t offset = at.bytes; offset > 0; offset /= 2) {
        must_work(vpmm_allocation_get(w->pool, address + offset - 1, &in));
        cr_expect_eq(in.address, address, "%zu bytes in it is %llx", offset - 1, (unsigned long long)in.address);
        cr_expect_eq(in.bytes, at.bytes);
    }
    if (vpmm_allocation_get(w->pool, address + at.bytes, &in) == VPMM_SUCCESS)
        cr_expect_eq(in.address, address + at.bytes);
}

/* Slices, subpages, some pages that a whole number of them fits badly, and pages. */
static const size_t sizes[] = {1,       256,      1000, 5000,         60000,    100000,
                               1500000, PAGE - 1, PAGE, 2 * PAGE + 1, 3 * PAGE, 20 * PAGE};
enum { SIZES = sizeof sizes / sizeof sizes[0], EACH = 5 };

static void of_all_sizes(size_t cache_bytes)
{
    struct setup setup = setup_default();
    struct world w;
    CUdeviceptr p[SIZES][EACH];
    vpmm_allocation none;
    setup.pool.cache_bytes = cache_bytes;
    world_open(&w, &setup);
    CUstream s = world_stream(&w), t = world_stream(&w);
    cr_expect_eq(visit(&w)->count, 0);
    for (int k = 0; k < EACH; k++)
        for (size_t i = 0; i < SIZES; i++)
            p[i][k] = take_bytes(&w, sizes[i], s);
    cr_expect_eq(visit(&w)->count, SIZES * EACH);
    for (size_t i = 0; i < SIZES; i++) {
        must_work(vpmm_use(w.pool, p[i][1], t)); /* which is live as well */
        for (int k = 0; k < EACH; k++)
            expect_one(&w, p[i][k], sizes[i]);
    }
    for (size_t i = 0; i < SIZES; i++) { /* into a cache, and to all; and behind another stream's work */
        give(&w, p[i][0], s);
        give(&w, p[i][1], s);
        must_fail(VPMM_ERROR_INVALID_POINTER, vpmm_allocation_get(w.pool, p[i][0], &none));
        must_fail(VPMM_ERROR_INVALID_POINTER, vpmm_allocation_get(w.pool, p[i][1], &none));
    }
    cr_expect_eq(visit(&w)->count, SIZES * (EACH - 2));
    for (size_t i = 0; i < SIZES; i++)
        for (int k = 2; k < EACH; k++)
            give(&w, p[i][k], s);
    cr_expect_eq(visit(&w)->count, 0);
    world_drain(&w);
    world_close(&w);
}

Test(allocations, each_that_is_live_is_one)
{
    of_all_sizes(0);
}

Test(allocations, what_is_cached_is_none)
{
    of_all_sizes(64 * PAGE);
}

Test(allocations, of_a_graph_s_pool)
{
    needs_simulator();
    struct setup setup = setup_default();
    struct world w;
    setup.pool.graph = true;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr small = take_bytes(&w, 100, s), large = take_bytes(&w, 3 * PAGE, s);
    cr_expect_eq(visit(&w)->count, 2);
    expect_one(&w, small, 100);
    expect_one(&w, large, 3 * PAGE);
    must_work(vpmm_park(w.pool)); /* their memory goes, and they stay */
    cr_expect_eq(visit(&w)->count, 2);
    expect_one(&w, large, 3 * PAGE);
    must_work(vpmm_wake(w.pool));
    give(&w, small, s);
    give(&w, large, s);
    cr_expect_eq(visit(&w)->count, 0);
    world_close(&w);
}

static void free_it(void *data, const vpmm_allocation *allocation)
{
    struct looker {
        struct world *w;
        CUstream stream;
    } *looker = data;
    give(looker->w, allocation->address, looker->stream);
}

/* As a program does that gives up a session's memory. */
Test(allocations, a_look_may_free_what_it_is_shown)
{
    struct world w;
    world_open(&w, NULL);
    struct {
        struct world *w;
        CUstream stream;
    } looker = {&w, world_stream(&w)};
    for (size_t i = 0; i < SIZES; i++)
        take_bytes(&w, sizes[i], looker.stream);
    must_work(vpmm_allocations_visit(w.pool, free_it, &looker));
    cr_expect_eq(visit(&w)->count, 0);
    world_drain(&w);
    world_close(&w);
}

/* ---- beside others ---- */

struct churner {
    struct world *w;
    CUstream stream;
    atomic_bool ends;
};

static void *churn(void *data)
{
    struct churner *churner = data;
    (void)churner->w->driver->cuCtxSetCurrent(churner->w->context);
    for (unsigned i = 0; !atomic_load(&churner->ends); i++) {
        CUdeviceptr p;
        require(vpmm_malloc(churner->w->pool, sizes[i % SIZES], churner->stream, &p) == VPMM_SUCCESS, "%s",
                vpmm_last_error());
        require(vpmm_free(churner->w->pool, p, churner->stream) == VPMM_SUCCESS, "%s", vpmm_last_error());
    }
    return NULL;
}

struct counts {
    CUdeviceptr kept;
    int seen, wrong;
};

static void look(void *data, const vpmm_allocation *allocation)
{
    struct counts *counts = data;
    bool is_a_size = false;
    for (size_t i = 0; i < SIZES; i++)
        is_a_size |= allocation->requested_bytes == sizes[i];
    counts->wrong += !is_a_size || allocation->bytes < allocation->requested_bytes;
    counts->seen += allocation->address == counts->kept;
}

Test(allocations, beside_threads_that_allocate_each_is_of_one_life, .timeout = 60)
{
    enum { THREADS = 3, LOOKS = 300 };
    needs_simulator();
    struct setup setup = setup_default();
    struct world w;
    pthread_t thread[THREADS];
    struct churner churner[THREADS];
    setup.sim.stepped = false;
    setup.pool.reaper = true;
    setup.pool.cache_bytes = 64 * PAGE;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    struct counts counts = {.kept = take_bytes(&w, sizes[3], s)};
    for (int i = 0; i < THREADS; i++) {
        churner[i] = (struct churner){&w, world_stream(&w), false};
        cr_assert_eq(pthread_create(&thread[i], NULL, churn, &churner[i]), 0);
    }
    for (int i = 0; i < LOOKS; i++) {
        vpmm_allocation at;
        must_work(vpmm_allocations_visit(w.pool, look, &counts));
        must_work(vpmm_allocation_get(w.pool, counts.kept + 7, &at));
        cr_expect_eq(at.address, counts.kept);
    }
    cr_expect_eq(counts.seen, LOOKS);
    cr_expect_eq(counts.wrong, 0);
    for (int i = 0; i < THREADS; i++) {
        atomic_store(&churner[i].ends, true);
        pthread_join(thread[i], NULL);
    }
    give(&w, counts.kept, s);
    world_drain(&w);
    world_close(&w);
}

static long faults(void)
{
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return used.ru_minflt;
}

Test(allocations, wrong_arguments)
{
    struct world w;
    vpmm_allocation none;
    struct found found = {.count = 0};
    struct setup setup = setup_default();
    setup.pool.va_size = (size_t)8 << 40;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr p = take(&w, 1, s);
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_allocations_visit(NULL, note, &found));
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_allocations_visit(w.pool, NULL, NULL));
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_allocation_get(NULL, p, &none));
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_allocation_get(w.pool, p, NULL));
    must_fail(VPMM_ERROR_INVALID_POINTER, vpmm_allocation_get(w.pool, 0, &none));
    must_fail(VPMM_ERROR_INVALID_POINTER, vpmm_allocation_get(w.pool, 12345, &none));
    long before = faults();
    for (size_t hole = (size_t)1 << 30; hole < setup.pool.va_size; hole *= 2) /* whose descriptors nobody touches */
        must_fail(VPMM_ERROR_INVALID_POINTER, vpmm_allocation_get(w.pool, p + hole, &none));
    cr_expect_lt(faults() - before, 1000);
    give(&w, p, s);
    world_close(&w);
}
