/*
 * The page that slabs alone are cut from (lib/remap/slab_page.h): what lies in it, when there is none, and what becomes
 * of its rest.
 */
#include "pool/pool.h"
#include "support.h"

#include "base/clock.h"

#include <pthread.h>
#include <stdatomic.h>

#define KIB ((size_t)1 << 10)

/* Free pages, of which one becomes the slabs' from the first slab on. */
static void open_slabs(struct world *w, struct setup *setup, size_t free_pages)
{
    needs_simulator();
    world_open(w, setup);
    w->pool->arena.slab_pages_from = 0;
    CUstream s = world_stream(w);
    give(w, take(w, free_pages, s), s);
    world_drain(w);
}

static uint64_t rest_of(const struct world *w)
{
    return atomic_load(&w->pool->arena.slab_page);
}

static CUdeviceptr page_of(CUdeviceptr pointer)
{
    return pointer - pointer % PAGE;
}

enum { PIECES = 40, SLICES = 3 };

struct mixture {
    CUdeviceptr piece[PIECES], slice[PIECES][SLICES];
};

/* Small and larger pieces in turn. The small ones' slabs fit in one page. */
static void take_mixture(struct world *w, struct mixture *m, CUstream s)
{
    for (size_t i = 0; i < PIECES; i++) {
        for (size_t j = 0; j < SLICES; j++)
            m->slice[i][j] = take_bytes(w, (1 + (i * SLICES + j) % 8) * 256, s);
        m->piece[i] = take_bytes(w, 200 * KIB + i * 10 * KIB, s);
    }
}

static void give_pieces(struct world *w, const struct mixture *m, CUstream s)
{
    for (size_t i = 0; i < PIECES; i++)
        give(w, m->piece[i], s);
}

static void give_slices(struct world *w, const struct mixture *m, CUstream s)
{
    for (size_t i = 0; i < PIECES; i++)
        for (size_t j = 0; j < SLICES; j++)
            give(w, m->slice[i][j], s);
}

/* When the larger pieces are freed, what is left of the small ones holds no page but their own. */
Test(slab_page, slabs_lie_beside_no_larger_piece, .timeout = 60)
{
    struct world w;
    struct setup setup = setup_default();
    struct mixture m;
    setup.pool.extent_size = PAGE;
    open_slabs(&w, &setup, 16);
    CUstream s = world_stream(&w);
    take_mixture(&w, &m, s);
    for (size_t i = 0; i < PIECES; i++)
        for (size_t k = 0; k < PIECES; k++)
            for (size_t j = 0; j < SLICES; j++)
                require(page_of(m.piece[i]) != page_of(m.slice[k][j]), "slice %zu, %zu lies in the page of piece %zu",
                        k, j, i);
    world_audit(&w);
    give_pieces(&w, &m, s);
    world_drain(&w);
    must_work(vpmm_trim(w.pool, 0, NULL));
    cr_expect_eq(stats_of(&w).mapped_bytes, PAGE);
    world_audit(&w);
    give_slices(&w, &m, s);
    world_close(&w);
}

/* A pool with few pages that are cut has none: a page more would be much. */
Test(slab_page, few_small_requests_have_no_page_of_their_own, .timeout = 60)
{
    struct world w;
    struct setup setup = setup_default();
    open_slabs(&w, &setup, 16);
    w.pool->arena.slab_pages_from = 2;
    CUstream s = world_stream(&w);
    CUdeviceptr slice = take_bytes(&w, 1000, s), piece = take_bytes(&w, 200 * KIB, s);
    cr_expect_eq(rest_of(&w), 0);
    cr_expect_eq(page_of(slice), page_of(piece));
    give(&w, slice, s);
    give(&w, piece, s);
    world_close(&w);
}

/* Where cut pages have many free subpages, these serve. */
Test(slab_page, free_subpages_come_first, .timeout = 60)
{
    struct world w;
    struct setup setup = setup_default();
    open_slabs(&w, &setup, 16);
    CUstream s = world_stream(&w);
    CUdeviceptr first = take_bytes(&w, 500 * KIB, s), wall = take_bytes(&w, 500 * KIB, s);
    give(&w, first, s);
    CUdeviceptr slice = take_bytes(&w, 1000, s);
    cr_expect_eq(rest_of(&w), 0);
    cr_expect_eq(page_of(slice), page_of(wall));
    give(&w, slice, s);
    give(&w, wall, s);
    world_close(&w);
}

/* The rest may be anybody's: what a stream alone may use is not kept. */
Test(slab_page, a_page_that_has_not_passed_is_no_rest, .timeout = 60)
{
    struct world w;
    struct setup setup = setup_default();
    setup.pool.reuse = VPMM_REUSE_COMPLETED;
    open_slabs(&w, &setup, 1);
    CUstream s = world_stream(&w), t = world_stream(&w);
    must_work(vpmm_trim(w.pool, 0, NULL));
    CUdeviceptr page = take(&w, 1, s);
    keep_busy(&w, s);
    give(&w, page, s);
    CUdeviceptr slice = take_bytes(&w, 1000, s);
    cr_expect_eq(page_of(slice), page, "the free page was not used");
    cr_expect_eq(rest_of(&w), 0);
    CUdeviceptr other = take_bytes(&w, 5000, t);
    cr_expect_neq(page_of(other), page, "another stream has memory that is in use");
    give(&w, slice, s);
    give(&w, other, t);
    world_close(&w);
}

/* It would be gone with each page that the pool grows by. */
Test(slab_page, the_rest_outlasts_growth_and_no_trim, .timeout = 60)
{
    struct world w;
    struct setup setup = setup_default();
    open_slabs(&w, &setup, 4);
    CUstream s = world_stream(&w);
    CUdeviceptr slice = take_bytes(&w, 1000, s);
    give(&w, take_bytes(&w, 5000, s), s); /* an empty slab, which growth takes */
    uint64_t rest = rest_of(&w);
    cr_assert_neq(rest, 0);
    CUdeviceptr grown = take(&w, 64, s);
    cr_expect_eq(rest_of(&w), rest, "growth takes the rest");
    world_audit(&w);
    must_work(vpmm_trim(w.pool, 0, NULL));
    cr_expect_eq(rest_of(&w), 0, "a trim leaves the rest");
    world_audit(&w);
    give(&w, grown, s);
    give(&w, slice, s);
    world_close(&w);
}

/* Before a request fails, too: of a pool that is full all but the rest of a page. */
Test(slab_page, the_rest_serves_before_a_request_fails, .timeout = 60)
{
    enum { ALL = 4 };
    struct world w;
    struct setup setup = setup_default();
    setup.pool.max_mapped = ALL * PAGE;
    open_slabs(&w, &setup, ALL);
    CUstream s = world_stream(&w);
    CUdeviceptr slice = take_bytes(&w, 1000, s), most = take(&w, ALL - 1, s);
    cr_assert_neq(rest_of(&w), 0);
    CUdeviceptr piece = take_bytes(&w, 1000 * KIB, s);
    cr_expect_eq(page_of(piece), page_of(slice));
    cr_expect_eq(rest_of(&w), 0);
    give(&w, piece, s);
    give(&w, most, s);
    give(&w, slice, s);
    world_close(&w);
}

/* An epoch without a malloc ends it, and the page with it. */
Test(slab_page, the_rest_of_an_idle_pool_decays, .timeout = 60)
{
    struct world w;
    struct setup setup = setup_default();
    setup.pool.decay_ms = 50;
    open_slabs(&w, &setup, 4);
    CUstream s = world_stream(&w);
    CUdeviceptr slice = take_bytes(&w, 1000, s);
    cr_assert_neq(rest_of(&w), 0);
    for (int i = 0; i < 4000 && rest_of(&w); i++) {
        must_work(vpmm_poll(w.pool));
        clock_sleep_us(1000);
    }
    cr_expect_eq(rest_of(&w), 0);
    world_audit(&w);
    give(&w, slice, s);
    world_step(&w);
    for (int i = 0; i < 4000 && stats_of(&w).mapped_bytes; i++) {
        must_work(vpmm_poll(w.pool));
        clock_sleep_us(1000);
    }
    cr_expect_eq(stats_of(&w).mapped_bytes, 0);
    world_close(&w);
}

/* ---- many threads ---- */

enum { THREADS = 4, ROUNDS = 20, EACH = 300 };

struct slicer {
    struct world *w;
    CUstream stream;
    pthread_t thread;
    uint64_t random, rests; /* how often the page's rest was another one than before */
    bool failed;
};

static _Atomic(bool) all_done;

static size_t draw(struct slicer *t, size_t below)
{
    t->random ^= t->random << 13;
    t->random ^= t->random >> 7;
    t->random ^= t->random << 17;
    return (size_t)(t->random >> 11) % below;
}

static void *take_slices(void *argument)
{
    struct slicer *t = argument;
    CUdeviceptr slice[EACH];
    t->w->driver->cuCtxSetCurrent(t->w->context);
    for (int round = 0; round < ROUNDS && !t->failed; round++) {
        size_t n = 0;
        for (; n < EACH && !t->failed; n++) {
            uint64_t before = rest_of(t->w);
            t->failed = vpmm_malloc(t->w->pool, 40 * KIB + draw(t, 24 * KIB), t->stream, &slice[n]) != VPMM_SUCCESS;
            t->rests += rest_of(t->w) != before;
        }
        for (; n > 0; n--)
            t->failed |= vpmm_free(t->w->pool, slice[n - 1], t->stream) != VPMM_SUCCESS;
    }
    return NULL;
}

static void *trim_all_the_time(void *argument)
{
    struct slicer *t = argument;
    t->w->driver->cuCtxSetCurrent(t->w->context);
    while (!atomic_load(&all_done) && !t->failed) {
        world_step(t->w); /* so that pages pass */
        t->failed = vpmm_trim(t->w->pool, 64 * PAGE, NULL) != VPMM_SUCCESS;
        clock_sleep_us(500);
    }
    return NULL;
}

Test(slab_page, threads_take_from_one_page_beside_trims, .timeout = 300)
{
    struct world w;
    struct setup setup = setup_default();
    struct slicer slicer[THREADS], trimmer = {.w = &w};
    uint64_t rests = 0;
    open_slabs(&w, &setup, 256);
    atomic_store(&all_done, false);
    for (int i = 0; i < THREADS; i++) {
        slicer[i] = (struct slicer){.w = &w, .stream = world_stream(&w), .random = (uint64_t)i + 1};
        cr_assert_eq(pthread_create(&slicer[i].thread, NULL, take_slices, &slicer[i]), 0);
    }
    cr_assert_eq(pthread_create(&trimmer.thread, NULL, trim_all_the_time, &trimmer), 0);
    for (int i = 0; i < THREADS; i++) {
        pthread_join(slicer[i].thread, NULL);
        cr_expect(!slicer[i].failed, "a call of thread %d has failed", i);
        rests += slicer[i].rests;
    }
    atomic_store(&all_done, true);
    pthread_join(trimmer.thread, NULL);
    cr_expect(!trimmer.failed, "a trim has failed");
    cr_expect_gt(rests, 10, "the rest has changed %llu times", (unsigned long long)rests);
    world_drain(&w);
    world_audit(&w);
    world_close(&w);
}
