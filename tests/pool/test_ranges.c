/*
 * vpmm_ranges_visit: what is mapped where. Each mapped byte is in one range, and the ranges say what vpmm_stats counts.
 */
#include "support.h"

#include <vpmm/observe.h>

#include <sys/resource.h>
#include <time.h>

enum { RANGES = 64 };

struct found {
    size_t count;
    vpmm_range range[RANGES];
};

static void note(void *data, const vpmm_range *range)
{
    struct found *found = data;
    cr_assert_lt(found->count, RANGES);
    found->range[found->count++] = *range;
}

static uint64_t bytes_in(const struct found *found, vpmm_range_state state)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < found->count; i++)
        bytes += found->range[i].state == state ? found->range[i].bytes : 0;
    return bytes;
}

/* In order, none within another, and in sum what the statistics say. */
static struct found visit(struct world *w)
{
    struct found found = {0};
    vpmm_stats stats = stats_of(w);
    cr_assert_eq(vpmm_ranges_visit(w->pool, note, &found), VPMM_SUCCESS);
    for (size_t i = 1; i < found.count; i++)
        cr_expect_geq(found.range[i].address, found.range[i - 1].address + found.range[i - 1].bytes);
    cr_expect_eq(bytes_in(&found, VPMM_RANGE_LIVE) + bytes_in(&found, VPMM_RANGE_CUT), stats.live_bytes);
    cr_expect_eq(bytes_in(&found, VPMM_RANGE_CUT), stats.slab_bytes);
    cr_expect_eq(bytes_in(&found, VPMM_RANGE_FREE), stats.reusable_bytes);
    cr_expect_eq(bytes_in(&found, VPMM_RANGE_BUSY), 0);
    return found;
}

static void expect(const struct found *found, size_t i, CUdeviceptr address, size_t bytes, vpmm_range_state state)
{
    cr_assert_lt(i, found->count);
    cr_expect_eq(found->range[i].address, address);
    cr_expect_eq(found->range[i].bytes, bytes);
    cr_expect_eq(found->range[i].state, state);
}

Test(ranges, each_allocation_of_pages_is_one)
{
    struct world w;
    world_open(&w, NULL);
    CUstream s = world_stream(&w);
    cr_expect_eq(visit(&w).count, 0);
    CUdeviceptr a = take(&w, 3, s), b = take(&w, 2, s);
    struct found found = visit(&w);
    cr_assert_eq(found.count, 2);
    expect(&found, a < b ? 0 : 1, a, 3 * PAGE, VPMM_RANGE_LIVE);
    expect(&found, a < b ? 1 : 0, b, 2 * PAGE, VPMM_RANGE_LIVE);
    give(&w, a, s);
    found = visit(&w);
    expect(&found, a < b ? 0 : 1, a, 3 * PAGE, VPMM_RANGE_FREE);
    give(&w, b, s);
    world_drain(&w);
    cr_assert_eq(vpmm_trim(w.pool, 0, NULL), VPMM_SUCCESS);
    cr_expect_eq(visit(&w).count, 0);
    world_close(&w);
}

Test(ranges, what_is_said_to_be_used_elsewhere_is_live_until_it_is_freed)
{
    struct world w;
    world_open(&w, NULL);
    CUstream s = world_stream(&w), t = world_stream(&w);
    CUdeviceptr p = take(&w, 2, s);
    fill(&w, p, 2, 7, t);
    cr_assert_eq(vpmm_use(w.pool, p, t), VPMM_SUCCESS);
    struct found found = visit(&w);
    expect(&found, 0, p, 2 * PAGE, VPMM_RANGE_LIVE);
    give(&w, p, s);
    found = visit(&w);
    expect(&found, 0, p, 2 * PAGE, VPMM_RANGE_FREE);
    world_close(&w);
}

/* Pieces of 100 KiB, of which no whole number is a page: some lie in two. */
Test(ranges, each_page_that_is_cut_is_one)
{
    enum { PIECES = 40 };
    struct world w;
    world_open(&w, NULL);
    CUstream s = world_stream(&w);
    CUdeviceptr piece[PIECES], small = take_bytes(&w, 300, s);
    for (int i = 0; i < PIECES; i++)
        piece[i] = take_bytes(&w, 100 << 10, s);
    struct found found = visit(&w);
    cr_expect_geq(found.count, 2);
    for (size_t i = 0; i < found.count; i++)
        expect(&found, i, found.range[i].address, PAGE, VPMM_RANGE_CUT);
    for (int i = 0; i < PIECES; i++)
        give(&w, piece[i], s);
    visit(&w);
    give(&w, small, s);
    visit(&w);
    world_close(&w);
}

/* Nothing of it is unmapped before its end, and what one stream has freed lies beside what another has. */
Test(ranges, of_a_graph_s_pool)
{
    struct setup setup = setup_default();
    setup.pool.graph = true;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w), t = world_stream(&w);
    CUdeviceptr a = take(&w, 4, s), b = take(&w, 4, t);
    give(&w, b, t);
    cr_assert_eq(vpmm_trim(w.pool, 0, NULL), VPMM_SUCCESS);
    struct found found = visit(&w);
    cr_assert_eq(found.count, 2);
    expect(&found, a < b ? 0 : 1, a, 4 * PAGE, VPMM_RANGE_LIVE);
    expect(&found, a < b ? 1 : 0, b, 4 * PAGE, VPMM_RANGE_FREE);
    give(&w, a, s);
    world_close(&w);
}

/* A look may ask the pool for memory. */
struct looker {
    struct world *w;
    CUstream stream;
    size_t looks;
};

static void allocate_meanwhile(void *data, const vpmm_range *range)
{
    struct looker *looker = data;
    cr_expect_gt(range->bytes, 0);
    if (looker->looks++ == 0)
        give(looker->w, take(looker->w, 1, looker->stream), looker->stream);
}

Test(ranges, a_look_may_call_the_pool)
{
    struct world w;
    world_open(&w, NULL);
    struct looker looker = {.w = &w, .stream = world_stream(&w)};
    CUdeviceptr p = take(&w, 1, looker.stream);
    cr_assert_eq(vpmm_ranges_visit(w.pool, allocate_meanwhile, &looker), VPMM_SUCCESS);
    cr_expect_geq(looker.looks, 1);
    give(&w, p, looker.stream);
    world_close(&w);
}

static long faults(void)
{
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return used.ru_minflt;
}

static void trim_where_it_is_free(void *pool, const vpmm_range *range)
{
    if (range->state == VPMM_RANGE_FREE)
        must_work(vpmm_trim(pool, 0, NULL));
}

/* What was mapped becomes part of the hole before it, whose descriptors nobody has touched: there are millions. */
Test(ranges, a_hole_that_grows_under_a_look_is_passed_at_once)
{
    needs_simulator();
    struct setup setup = setup_default();
    struct world w;
    setup.pool.va_size = (size_t)8 << 40;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr kept = take(&w, 1, s);
    give(&w, take(&w, 1, s), s);
    world_drain(&w);
    long before = faults();
    must_work(vpmm_ranges_visit(w.pool, trim_where_it_is_free, w.pool));
    cr_expect_lt(faults() - before, 5000);
    cr_expect_eq(stats_of(&w).reusable_bytes, 0);
    give(&w, kept, s);
    world_close(&w);
}

static double cpu_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

struct joiner {
    struct world *w;
    CUstream stream;
    CUdeviceptr base, *page; /* by its place from the base; 0: free */
    long pages;
};

static void free_what_follows(void *data, const vpmm_range *range)
{
    struct joiner *joiner = data;
    long next = (long)((range->address + range->bytes - joiner->base) / PAGE);
    if (range->state == VPMM_RANGE_FREE && next < joiner->pages && next % 4 == 1 && joiner->page[next]) {
        give(joiner->w, joiner->page[next], joiner->stream);
        joiner->page[next] = 0;
    }
}

/*
 * Of free, live, free, live each second live page is freed as the look comes by: it stands within a region of three
 * pages time and again. Far less than a second; were the way to that region's end walked from the chunk's beginning,
 * many.
 */
Test(ranges, regions_that_join_under_a_look_cost_it_no_walk_from_the_beginning)
{
    needs_simulator();
    enum { PAGES = 80000 };
    static CUdeviceptr taken[PAGES], page[PAGES];
    struct setup setup = setup_default();
    struct world w;
    setup.sim.memory_bytes = (PAGES + 1000) * PAGE;
    setup.pool.initial_pages = PAGES;
    setup.pool.va_size = 2 * PAGES * PAGE;
    setup.pool.cache_bytes = 0;
    world_open(&w, &setup);
    struct joiner joiner = {&w, world_stream(&w), UINT64_MAX, page, PAGES};
    for (int i = 0; i < PAGES; i++) {
        taken[i] = take(&w, 1, joiner.stream);
        joiner.base = taken[i] < joiner.base ? taken[i] : joiner.base;
    }
    for (int i = 0; i < PAGES; i++)
        page[(taken[i] - joiner.base) / PAGE] = taken[i];
    for (int i = 0; i < PAGES; i += 2)
        give(&w, page[i], joiner.stream);
    double before = cpu_seconds();
    must_work(vpmm_ranges_visit(w.pool, free_what_follows, &joiner));
    cr_expect_lt(cpu_seconds() - before, 0.5);
    for (int i = 1; i < PAGES; i += 2)
        if (page[i])
            give(&w, page[i], joiner.stream);
    world_drain(&w);
    world_close(&w);
}

/* What a front cache has is free, as vpmm_stats counts it. */
Test(ranges, what_is_cached_is_free)
{
    struct setup setup = setup_default();
    setup.pool.cache_bytes = 64 * PAGE;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    for (int i = 0; i < 3; i++)
        give(&w, take(&w, 2, s), s);
    cr_expect_eq(stats_of(&w).cached_bytes, 2 * PAGE);
    struct found found = visit(&w);
    cr_assert_eq(found.count, 1);
    cr_expect_eq(found.range[0].state, VPMM_RANGE_FREE);
    world_close(&w);
}

Test(ranges, wrong_arguments)
{
    struct world w;
    world_open(&w, NULL);
    cr_expect_eq(vpmm_ranges_visit(NULL, note, NULL), VPMM_ERROR_INVALID_VALUE);
    cr_expect_str_eq(vpmm_last_error(), "vpmm_ranges_visit: the pool is NULL");
    cr_expect_eq(vpmm_ranges_visit(w.pool, NULL, NULL), VPMM_ERROR_INVALID_VALUE);
    cr_expect_str_eq(vpmm_last_error(), "vpmm_ranges_visit: the function is NULL");
    world_close(&w);
}
