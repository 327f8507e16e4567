/*
 * Requests that are about to fail beside one another, in orders with at most two preemptions, and in random ones: what
 * one of them has done for itself serves the other, or is left to it (remap/make_way.h).
 */
#include "play.h"

/*
 * Twice [1][-3][*1][-2][1], which is all that the cap is for: what is stuck before a hole can grow by two when the
 * handle behind it is out of the way, which fits in no other hole.
 */
enum { STUCK = 3, WHOLE = 2, PARTS = 2, ALL = PARTS * (1 + STUCK + WHOLE + 1), SERVED = STUCK + 2 };

/* Of a handle's pages, all but the first. */
static CUdeviceptr get_beside_a_live_page(void)
{
    put(get(1 + STUCK, play.s), play.s);
    get(1, play.s);
    return get(STUCK, play.s);
}

PLAY(open_with_handles_in_the_way)
{
    CUdeviceptr stuck[PARTS], hole[PARTS], whole[PARTS];
    open_world();
    must_work(vpmm_pool_set_attribute(play.w.pool, VPMM_ATTRIBUTE_MAX_MAPPED, (ALL + PARTS) * PAGE));
    for (int i = 0; i < PARTS; i++) {
        stuck[i] = get_beside_a_live_page();
        hole[i] = get(1, play.s);
        whole[i] = get(WHOLE, play.s);
        get(1, play.s);
    }
    for (int i = 0; i < PARTS; i++)
        put(hole[i], play.s);
    world_drain(&play.w);
    must_work(vpmm_trim(play.w.pool, 0, NULL));
    must_work(vpmm_pool_set_attribute(play.w.pool, VPMM_ATTRIBUTE_MAX_MAPPED, ALL * PAGE));
    for (int i = 0; i < PARTS; i++) {
        put(stuck[i], play.s);
        put(whole[i], play.s);
    }
    world_drain(&play.w);
    cr_assert_str_eq(layout(&play.w), "[1][-3][*1][-2][1][1][-3][*1][-2][1]");
}

PLAY(get_what_is_in_the_way)
{
    get(SERVED, play.s);
}

PLAY(trim)
{
    must_work(vpmm_trim(play.w.pool, 0, NULL));
}
PLAY(take_and_free)
{
    put(get(WHOLE, play.t), play.t);
}

static void beside(const char *name, void (*other)(void *), void (*third)(void *))
{
    play.cap = ALL;
    play.extent_pages = 1 + STUCK;
    explore_play(name, 0,
                 (struct exploration){.open = open_with_handles_in_the_way,
                                      .close = close_plain,
                                      .act = {get_what_is_in_the_way, other, third}});
    play.cap = play.extent_pages = 0;
}

/* The second finds the handles gone that would have made way for it, and moves of the first's in its own. */
SCHEDULES(two_for_which_way_is_made)
{
    beside("way is made for two", get_what_is_in_the_way, NULL);
}
SCHEDULES(way_is_made_beside_a_trim)
{
    beside("way is made, trim", trim, NULL);
}
/* A handle that comes and goes leaves the others. */
SCHEDULES(way_is_made_beside_a_malloc_and_a_free)
{
    beside("way is made, malloc, free", take_and_free, NULL);
}
SCHEDULES(way_is_made_beside_a_malloc_a_free_and_a_trim)
{
    beside("way is made, malloc, free, trim", take_and_free, trim);
}
