/*
 * The specification's walk-through: +10, +1, -10, +4, +11 pages on one stream, from a pool of 11 + X pages, one
 * handle a page. What the fifth step does depends on X alone.
 */
#include "support.h"

struct walk {
    size_t x;
    const char *after[5];     /* the layout after each step, all fences passed */
    const char *last_waiting; /* after the fifth, the device having done nothing yet */
    uint64_t created;         /* pages, in all */
};

static const struct walk enough_pages = {
    .x = 12,
    .after = {"[10][-13]", "[10][1][-12]", "[-10][1][-12]", "[4][-6][1][-12]", "[4][-6][1][11][-1]"},
    .last_waiting = "[4][-6][1][11][-1]",
    .created = 23,
};
static const struct walk one_region_moves = {
    .x = 7,
    .after = {"[10][-8]", "[10][1][-7]", "[-10][1][-7]", "[-10][1][4][-3]", "[*10][1][4][11][-2]"},
    .last_waiting = "[~10][1][4][11][-2]",
    .created = 18,
};
static const struct walk one_page_is_missing = {
    .x = 4,
    .after = {"[10][-5]", "[10][1][-4]", "[-10][1][-4]", "[-10][1][4]", "[*10][1][4][11]"},
    .last_waiting = "[~10][1][4][11]",
    .created = 16,
};
static const struct walk all_is_gathered = {
    .x = 2,
    .after = {"[10][-3]", "[10][1][-2]", "[-10][1][-2]", "[4][-6][1][-2]", "[4][*6][1][11]"},
    .last_waiting = "[4][~6][1][11]",
    .created = 16,
};

enum passing { FENCES_PASS, FENCES_WAIT };

/* The hole that the first region left begins the chunk, and is not told from one that was there before. */
static void compare_layout(struct world *w, const char *expected, int step)
{
    if (strncmp(expected, "[*", 2) == 0)
        expected = strchr(expected, ']') + 1;
    cr_assert_str_eq(layout(w), expected, "step %d leaves %s, not %s", step, layout(w), expected);
}

static void after_step(struct world *w, const struct walk *walk, int step, enum passing passing)
{
    if (passing == FENCES_PASS)
        world_drain(w);
    else
        must_work(vpmm_poll(w->pool)); /* which leaves alone what waits */
    bool waiting = step == 5 && passing == FENCES_WAIT;
    compare_layout(w, waiting ? walk->last_waiting : walk->after[step - 1], step);
    world_audit(w);
}

static void walk_through(const struct walk *walk, enum passing passing)
{
    struct setup setup = setup_default();
    setup.pool.extent_size = PAGE;
    setup.pool.initial_pages = 11 + walk->x;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);

    CUdeviceptr ten = take(&w, 10, s);
    fill(&w, ten, 10, 0x10101010, s);
    after_step(&w, walk, 1, passing);

    CUdeviceptr one = take(&w, 1, s);
    fill(&w, one, 1, 0x01010101, s);
    after_step(&w, walk, 2, passing);

    expect_later(&w, ten, 10, 0x10101010, s);
    give(&w, ten, s);
    after_step(&w, walk, 3, passing);

    CUdeviceptr four = take(&w, 4, s);
    fill(&w, four, 4, 0x04040404, s);
    after_step(&w, walk, 4, passing);

    CUdeviceptr eleven = take(&w, 11, s);
    fill(&w, eleven, 11, 0x11111111, s);
    after_step(&w, walk, 5, passing);

    cr_expect_eq(stats_of(&w).pages_created, walk->created);
    cr_expect_eq(stats_of(&w).mapped_bytes, walk->created * PAGE, "held is what was created, each page once");
    cr_expect_eq(stats_of(&w).live_bytes, 16 * PAGE);

    expect_later(&w, one, 1, 0x01010101, s);
    expect_later(&w, four, 4, 0x04040404, s);
    expect_later(&w, eleven, 11, 0x11111111, s);
    give(&w, one, s);
    give(&w, four, s);
    give(&w, eleven, s);
    world_drain(&w);
    cr_expect_eq(stats_of(&w).pending_unmap_bytes, 0);
    cr_expect_eq(stats_of(&w).reusable_bytes, walk->created * PAGE);
    world_audit(&w);
    world_close(&w);
}

Test(walkthrough, case_a_with_fences_passed)
{
    walk_through(&enough_pages, FENCES_PASS);
}
Test(walkthrough, case_a_with_fences_waiting)
{
    walk_through(&enough_pages, FENCES_WAIT);
}
Test(walkthrough, case_b_with_fences_passed)
{
    walk_through(&one_region_moves, FENCES_PASS);
}
Test(walkthrough, case_b_with_fences_waiting)
{
    walk_through(&one_region_moves, FENCES_WAIT);
}
Test(walkthrough, case_c_with_fences_passed)
{
    walk_through(&one_page_is_missing, FENCES_PASS);
}
Test(walkthrough, case_c_with_fences_waiting)
{
    walk_through(&one_page_is_missing, FENCES_WAIT);
}
Test(walkthrough, case_d_with_fences_passed)
{
    walk_through(&all_is_gathered, FENCES_PASS);
}
Test(walkthrough, case_d_with_fences_waiting)
{
    walk_through(&all_is_gathered, FENCES_WAIT);
}

/* Nobody else could wait for the second free: the pool has a thread, so it is not marked at once. */
Test(walkthrough, what_a_default_stream_freed_moves_before_the_pool_grows)
{
    struct setup setup = setup_default();
    setup.pool.extent_size = PAGE;
    setup.pool.reaper = true;
    struct world w;
    world_open(&w, &setup);

    CUdeviceptr freed[2], kept[2];
    for (int i = 0; i < 2; i++) {
        freed[i] = take(&w, 8, NULL);
        kept[i] = take(&w, 1, NULL);
    }
    for (int i = 0; i < 2; i++)
        give(&w, freed[i], NULL);
    CUdeviceptr twenty = take(&w, 20, NULL);
    cr_expect_eq(stats_of(&w).pages_created, 18 + 4, "%llu pages were made",
                 (unsigned long long)stats_of(&w).pages_created);

    give(&w, twenty, NULL);
    for (int i = 0; i < 2; i++)
        give(&w, kept[i], NULL);
    world_close(&w);
}

Test(walkthrough, moved_pages_are_not_copied)
{
    struct setup setup = setup_default();
    setup.pool.extent_size = PAGE;
    setup.pool.initial_pages = 15;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr ten = take(&w, 10, s), one = take(&w, 1, s);
    fill(&w, ten, 10, 0xabcdef01, s);
    give(&w, ten, s);
    CUdeviceptr four = take(&w, 4, s);
    CUdeviceptr eleven = take(&w, 11, s); /* ten pages that kept their bytes, and a new one */
    size_t kept = 0;
    uint32_t words[11] = {0};
    for (size_t i = 0; i < 11; i++)
        cr_assert(w.driver->cuMemcpyDtoHAsync(&words[i], eleven + i * PAGE, sizeof words[i], s) == CUDA_SUCCESS,
                  "cuMemcpyDtoHAsync");
    world_step(&w);
    for (size_t i = 0; i < 11; i++)
        kept += words[i] == 0xabcdef01;
    cr_expect_eq(kept, 10);
    give(&w, one, s);
    give(&w, four, s);
    give(&w, eleven, s);
    world_close(&w);
}

/* What is free reaches from the middle of one handle to the middle of the next but one: that between them moves. */
Test(walkthrough, handles_that_are_in_use_in_part_stay)
{
    enum { HANDLE = 4, HANDLES = 3, ENDS = HANDLE / 2, BETWEEN = HANDLES * HANDLE - 2 * ENDS, WANTED = 3 * HANDLE };
    struct setup setup = setup_default();
    setup.pool.extent_size = HANDLE * PAGE;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    give(&w, take(&w, HANDLES * HANDLE, s), s);
    CUdeviceptr before = take(&w, ENDS, s), between = take(&w, BETWEEN, s), after = take(&w, ENDS, s);
    cr_assert(between == before + ENDS * PAGE && after == between + BETWEEN * PAGE, "%s", layout(&w));
    fill(&w, before, ENDS, 0x0b0b0b0b, s);
    fill(&w, after, ENDS, 0x0a0a0a0a, s);
    give(&w, between, s);
    CUdeviceptr p = take(&w, WANTED, s);
    fill(&w, p, WANTED, 0x0d0d0d0d, s);
    cr_expect_eq(stats_of(&w).extents_remapped, 1);
    cr_expect_eq(stats_of(&w).pages_created, HANDLES * HANDLE + WANTED - HANDLE);
    expect_later(&w, before, ENDS, 0x0b0b0b0b, s);
    expect_later(&w, after, ENDS, 0x0a0a0a0a, s);
    expect_later(&w, p, WANTED, 0x0d0d0d0d, s);
    give(&w, before, s);
    give(&w, after, s);
    give(&w, p, s);
    world_drain(&w);
    world_audit(&w);
    world_close(&w);
}

/* Of a run the two long handles move, and the short one between them stays, free. */
Test(walkthrough, what_lies_between_handles_that_move_is_free)
{
    enum { LONG = 16, SHORT = 4 };
    static const size_t pages[] = {LONG, SHORT, LONG, 1, LONG, 1};
    enum { PIECES = sizeof pages / sizeof *pages };
    struct setup setup = setup_default();
    setup.pool.extent_size = LONG * PAGE;
    struct world w;
    CUdeviceptr piece[PIECES];
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    for (int i = 0; i < PIECES; i++)
        piece[i] = take(&w, pages[i], s);
    for (int i = 0; i < PIECES; i++)
        if (pages[i] > 1)
            give(&w, piece[i], s);
    uint64_t created = stats_of(&w).pages_created;
    CUdeviceptr p = take(&w, 3 * LONG, s), q = take(&w, SHORT, s);
    cr_expect_eq(stats_of(&w).extents_remapped, 3);
    cr_expect_eq(q, piece[1]);
    cr_expect_eq(stats_of(&w).pages_created, created);
    give(&w, p, s);
    give(&w, q, s);
    for (int i = 0; i < PIECES; i++)
        if (pages[i] == 1)
            give(&w, piece[i], s);
    world_drain(&w);
    world_audit(&w);
    world_close(&w);
}
