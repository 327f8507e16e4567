/*
 * Pages smaller than what the driver maps: requests are rounded up to pages, handles are whole multiples of the
 * device's granularity, and neighbours share them.
 */
#include "pool/pool.h"
#include "support.h"

enum { STEP = 8 }; /* pages of a handle, at least */

static const size_t SMALL_PAGE = PAGE / STEP;

static struct setup small_pages(void)
{
    struct setup setup = setup_default();
    setup.pool.page_size = SMALL_PAGE;
    return setup;
}

static size_t mapped_of(struct world *w)
{
    return (size_t)stats_of(w).mapped_bytes;
}

Test(page_size, what_is_mapped_is_what_was_asked_for)
{
    enum { BLOCKS = 8, SMALL_PAGES = 49 }; /* of 12.25 MiB */
    struct setup setup = small_pages();
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr p[BLOCKS];
    for (size_t i = 0; i < BLOCKS; i++) {
        p[i] = take_bytes(&w, SMALL_PAGES * SMALL_PAGE - 100, s);
        cr_expect_eq(p[i] % SMALL_PAGE, 0);
        size_t bytes = (i + 1) * SMALL_PAGES * SMALL_PAGE;
        cr_expect_eq(stats_of(&w).live_bytes, bytes);
        cr_expect_eq(mapped_of(&w), (bytes + PAGE - 1) / PAGE * PAGE);
        world_audit(&w);
    }
    for (size_t i = 0; i < BLOCKS; i++)
        give(&w, p[i], s);
    world_drain(&w);
    must_work(vpmm_trim(w.pool, 0, NULL));
    cr_expect_eq(mapped_of(&w), 0);
    world_close(&w);
}

/* A handle moves as a whole: not while a neighbour of what was freed lives in it. */
Test(page_size, a_handle_that_is_shared_stays_where_it_is)
{
    struct setup setup = small_pages();
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr freed = take_bytes(&w, 5 * SMALL_PAGE, s), kept = take_bytes(&w, 3 * SMALL_PAGE, s);
    cr_assert_eq(mapped_of(&w), PAGE, "they share a handle");
    fill(&w, kept, 1, 7, s);
    give(&w, freed, s);
    CUdeviceptr longer = take_bytes(&w, 2 * PAGE, s);
    cr_expect_eq(stats_of(&w).extents_remapped, 0);
    cr_expect_eq(mapped_of(&w), 3 * PAGE);
    expect_later(&w, kept, 1, 7, s);
    give(&w, kept, s);
    world_drain(&w);
    CUdeviceptr longest = take_bytes(&w, 3 * PAGE, s); /* it moves now */
    cr_expect_geq(stats_of(&w).extents_remapped, 1);
    cr_expect_eq(mapped_of(&w), 5 * PAGE);
    give(&w, longer, s);
    give(&w, longest, s);
    world_close(&w);
}

Test(page_size, the_cap_is_for_whole_handles)
{
    struct setup setup = small_pages();
    setup.pool.max_mapped = 3 * PAGE + PAGE / 2;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr p;
    must_fail(VPMM_ERROR_OUT_OF_MEMORY, vpmm_malloc(w.pool, 3 * PAGE + SMALL_PAGE, s, &p));
    p = take_bytes(&w, 3 * PAGE, s);
    cr_expect_eq(mapped_of(&w), 3 * PAGE);
    give(&w, p, s);
    world_close(&w);
}

Test(page_size, initial_pages_are_rounded_up_to_a_handle)
{
    struct setup setup = small_pages();
    setup.pool.initial_pages = STEP + 3;
    struct world w;
    world_open(&w, &setup);
    cr_expect_eq(mapped_of(&w), 2 * PAGE);
    uint64_t stays = 0;
    must_work(vpmm_pool_get_attribute(w.pool, VPMM_ATTRIBUTE_RELEASE_THRESHOLD, &stays));
    cr_expect_eq(stays, 2 * PAGE);
    world_close(&w);
}

/* Pages that are cut: of one handle several, and whole ones beside them. */
Test(page_size, small_requests_share_a_handle_with_whole_pages)
{
    struct setup setup = small_pages();
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr slice = take_bytes(&w, 1000, s), piece = take_bytes(&w, 100000, s);
    CUdeviceptr whole = take_bytes(&w, 4 * SMALL_PAGE, s);
    cr_expect_eq(mapped_of(&w), PAGE);
    cr_expect_eq(stats_of(&w).slab_bytes, SMALL_PAGE);
    world_audit(&w);
    give(&w, slice, s);
    give(&w, piece, s);
    give(&w, whole, s);
    world_drain(&w);
    must_work(vpmm_trim(w.pool, 0, NULL));
    cr_expect_eq(mapped_of(&w), 0);
    world_close(&w);
}

/* ---- as it comes ---- */

enum { BLOCKS = 48, STREAMS = 3, OPERATIONS = 3000 };

struct chance {
    struct world w;
    uint64_t random;
    CUstream stream[STREAMS];
    struct block {
        CUdeviceptr pointer;
        size_t strides; /* words in it, a PAGE apart */
        uint32_t stamp;
        int stream;
    } block[BLOCKS];
};

static uint64_t draw(struct chance *c, uint64_t below)
{
    c->random ^= c->random << 13;
    c->random ^= c->random >> 7;
    c->random ^= c->random << 17;
    return (c->random >> 11) % below;
}

static void malloc_by_chance(struct chance *c, struct block *block, uint32_t stamp)
{
    size_t longest = draw(c, 3) ? 2 * PAGE : 16 * PAGE, bytes = 4 + draw(c, longest);
    block->stream = (int)draw(c, STREAMS);
    vpmm_status status = vpmm_malloc(c->w.pool, bytes, c->stream[block->stream], &block->pointer);
    require(status == VPMM_SUCCESS || status == VPMM_ERROR_OUT_OF_MEMORY, "%zu bytes: %s", bytes, vpmm_last_error());
    if (status != VPMM_SUCCESS) {
        block->pointer = 0;
        return;
    }
    block->strides = (bytes - 4) / PAGE + 1;
    block->stamp = stamp;
    fill(&c->w, block->pointer, block->strides, stamp, c->stream[block->stream]);
}

static void free_by_chance(struct chance *c, struct block *block)
{
    CUstream s = c->stream[block->stream];
    require(expect_later(&c->w, block->pointer, block->strides, block->stamp, s), "the look is refused");
    give(&c->w, block->pointer, s);
    block->pointer = 0;
}

static void play_by_chance(size_t page_size, size_t extent_size, size_t cache_bytes)
{
    static struct chance c;
    struct setup setup = setup_default();
    setup.pool.page_size = page_size;
    setup.pool.extent_size = extent_size;
    setup.pool.cache_bytes = cache_bytes;
    setup.pool.max_mapped = 96 * PAGE;
    c = (struct chance){.random = 0x9E3779B97F4A7C15 + page_size + extent_size + cache_bytes};
    world_open(&c.w, &setup);
    for (int i = 0; i < STREAMS; i++)
        c.stream[i] = world_stream(&c.w);
    for (uint32_t i = 0; i < OPERATIONS; i++) {
        struct block *block = &c.block[draw(&c, BLOCKS)];
        if (block->pointer)
            free_by_chance(&c, block);
        else
            malloc_by_chance(&c, block, i + 1);
        if (draw(&c, 8) == 0)
            world_step(&c.w);
        if (draw(&c, 64) == 0)
            must_work(vpmm_trim(c.w.pool, draw(&c, 64) * page_size, NULL));
        if (draw(&c, 16) == 0)
            world_audit(&c.w);
        require(mapped_of(&c.w) % PAGE == 0, "%zu bytes are mapped", mapped_of(&c.w));
    }
    for (int i = 0; i < BLOCKS; i++)
        if (c.block[i].pointer)
            free_by_chance(&c, &c.block[i]);
    must_work(vpmm_trim(c.w.pool, 0, NULL)); /* marks what lies in caches */
    world_drain(&c.w);
    must_work(vpmm_trim(c.w.pool, 0, NULL));
    cr_expect_eq(mapped_of(&c.w), 0);
    world_close(&c.w);
}

Test(page_size, any_requests_leave_the_pool_sound, .timeout = 300)
{
    for (size_t page = SMALL_PAGE; page < PAGE; page *= 2) {
        play_by_chance(page, 0, 0);
        play_by_chance(page, PAGE, 0);
        play_by_chance(page, 3 * PAGE, 16 * PAGE);
    }
}
