/*
 * Which end of a free region a request takes, by one builder and by several.
 *
 * The memory is handles side by side, live but for one region: from the first handle without its front pages to the
 * last one without its back pages.
 */
#include "pool/pool.h"
#include "support.h"

enum { HANDLES = 3 };

struct row {
    size_t handle[HANDLES]; /* pages; 0: there are no more */
    size_t front, back;     /* pages of the first and of the last that are live */
    size_t asked, at;       /* pages, and of the region the page where the request then lies */
};

/* Another thread builds. */
static void build_elsewhere(struct world *w, struct malloc_thread *other, size_t pages)
{
    malloc_thread_start(other, w, world_stream(w), pages);
    pthread_join(other->thread, NULL);
    require(other->status == VPMM_SUCCESS, "a thread's malloc: %s", vpmm_status_name(other->status));
}

struct parts {
    CUdeviceptr front, back; /* 0: there is none */
};

/* Frees a live handle, which lies between live ones, and takes it again in two parts. */
static struct parts divide(struct world *w, CUdeviceptr handle, size_t front, size_t back, CUstream s)
{
    struct parts parts = {0, 0};
    give(w, handle, s);
    if (front)
        parts.front = take(w, front, s);
    if (back)
        parts.back = take(w, back, s);
    return parts;
}

static void give_if(struct world *w, CUdeviceptr p, CUstream s)
{
    if (p)
        give(w, p, s);
}

/* Where it lies in the region. */
static size_t page_of_request(struct world *w, const struct row *row, const CUdeviceptr *handle, size_t handles,
                              CUstream s)
{
    size_t last = handles - 1;
    struct parts last_parts = divide(w, handle[last], row->handle[last] - row->back, row->back, s);
    struct parts first_parts = divide(w, handle[0], row->front, row->handle[0] - row->front, s);
    give(w, first_parts.back, s);
    give(w, last_parts.front, s);
    for (size_t i = 1; i < last; i++)
        give(w, handle[i], s);
    CUdeviceptr p = take(w, row->asked, s);
    give(w, p, s);
    give_if(w, first_parts.front, s);
    give_if(w, last_parts.back, s);
    return (p - first_parts.back) / PAGE;
}

static void expect_row(const struct row *row, bool several, size_t want)
{
    struct world w;
    struct malloc_thread other;
    CUdeviceptr handle[HANDLES];
    size_t n = 0;
    world_open(&w, NULL);
    CUstream s = world_stream(&w);
    for (; n < HANDLES && row->handle[n]; n++)
        handle[n] = take(&w, row->handle[n], s);
    if (several)
        build_elsewhere(&w, &other, 1);
    size_t at = page_of_request(&w, row, handle, n, s);
    cr_expect_eq(at, want, "%zu pages of handles of %zu %zu %zu, of which %zu and %zu are live, lie at %zu, not %zu",
                 row->asked, row->handle[0], row->handle[1], row->handle[2], row->front, row->back, at, want);
    world_audit(&w);
    if (several)
        give(&w, other.pointer, other.stream);
    world_close(&w);
}

static const struct row ROWS[] = {
    /* The back, where that breaks fewer: what lies there is a part already, or a whole handle. */
    {{8, 4}, 0, 2, 2, 8},
    {{3, 8, 3}, 0, 1, 2, 11},
    {{6, 3}, 0, 0, 3, 6},
    {{3, 6}, 0, 0, 4, 5},
    {{5, 2, 4}, 0, 0, 6, 5},
    {{5, 3, 4}, 0, 2, 5, 5},
    /* The front, where that does, */
    {{4, 8}, 2, 0, 2, 0},
    {{6, 3}, 0, 0, 4, 0},
    {{4, 2, 5}, 0, 0, 6, 0},
    /* and of equals. */
    {{8, 4}, 0, 2, 8, 0},
    {{4, 8}, 2, 0, 8, 0},
    {{4, 8, 4}, 2, 2, 2, 0},
    {{6, 6}, 0, 0, 6, 0},
    {{6, 6}, 0, 0, 7, 0},
};

Test(ends, where_several_build_the_end_that_breaks_fewer_handles, .timeout = 60)
{
    for (size_t i = 0; i < sizeof ROWS / sizeof *ROWS; i++)
        expect_row(&ROWS[i], true, ROWS[i].at);
}

Test(ends, where_one_builds_the_front, .timeout = 60)
{
    for (size_t i = 0; i < sizeof ROWS / sizeof *ROWS; i++)
        expect_row(&ROWS[i], false, 0);
}

/* Between two parts of one handle there is nothing to choose. */
Test(ends, of_a_part_of_one_handle_the_front)
{
    struct world w;
    struct malloc_thread other;
    world_open(&w, NULL);
    CUstream s = world_stream(&w);
    CUdeviceptr handle = take(&w, 10, s);
    build_elsewhere(&w, &other, 1);
    give(&w, handle, s);
    CUdeviceptr front = take(&w, 2, s), middle = take(&w, 6, s), back = take(&w, 2, s);
    give(&w, middle, s);
    CUdeviceptr p = take(&w, 2, s);
    cr_expect(front == handle && p == middle);
    give(&w, p, s);
    give(&w, front, s);
    give(&w, back, s);
    give(&w, other.pointer, other.stream);
    world_close(&w);
}

/* Who makes the pool is often another thread than all who ask of it. */
Test(ends, several_build_when_a_second_thread_builds_for_a_request)
{
    struct world w;
    struct setup setup = setup_default();
    struct malloc_thread other;
    setup.pool.initial_pages = 1;
    world_open(&w, &setup);
    atomic_uint *several = &w.pool->arena.several_builders;
    build_elsewhere(&w, &other, 2);
    cr_expect_eq(atomic_load(several), 0, "who made the pool counts");
    give(&w, other.pointer, other.stream);
    world_drain(&w);
    CUstream s = world_stream(&w);
    CUdeviceptr p = take(&w, 2, s);
    cr_expect_eq(atomic_load(several), 0, "who finds free memory counts");
    CUdeviceptr q = take(&w, 1, s);
    cr_expect_eq(atomic_load(several), 1, "a second builder does not count");
    give(&w, p, s);
    give(&w, q, s);
    world_close(&w);
}

Test(ends, a_thread_that_builds_again_is_one_builder)
{
    struct world w;
    world_open(&w, NULL);
    CUstream s = world_stream(&w);
    CUdeviceptr p = take(&w, 1, s), q = take(&w, 1, s);
    cr_expect_eq(atomic_load(&w.pool->arena.several_builders), 0);
    give(&w, p, s);
    give(&w, q, s);
    world_close(&w);
}

/* What lies in a fresh place can then be extended downwards. */
Test(ends, where_several_build_a_fresh_place_leaves_room_before_it)
{
    struct world w;
    struct malloc_thread other;
    world_open(&w, NULL);
    CUstream s = world_stream(&w);
    CUdeviceptr p = take(&w, 4, s), q = take(&w, 4, s);
    cr_expect_eq(q, p + 4 * PAGE);
    build_elsewhere(&w, &other, 2);
    cr_expect_eq(other.pointer, q + (4 + 3 * 2) * PAGE, "at page %lld", (long long)((other.pointer - p) / PAGE));
    give(&w, p, s);
    give(&w, q, s);
    give(&w, other.pointer, other.stream);
    world_close(&w);
}
