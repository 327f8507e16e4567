/*
 * Pieces: what threads do at the same time, in orders with at most two preemptions, and in random ones
 * (explore.h says how, and how to have more of them or one of them again). play.h says what is looked at after each.
 *
 * Most are of slices of 64 KiB: a slab has two of them, a page sixteen such slabs, and a cache four slices.
 */
#include "play.h"

#include "cache/slices.h"
#include "remap/cut.h"
#include "remap/pass.h"
#include "remap/slab_page.h"

enum { BIG = 64 << 10, A_SLAB = 2, SMALL = 256, SUBPAGES = 100 << 10 };

static struct slabs *slabs(void)
{
    return &inside()->arena.slabs;
}

/* The slab of a slice. */
static struct slab *slab_at_slice(CUdeviceptr at)
{
    uint64_t subpage = 0;
    explore_check(cut_subpage_of(&inside()->arena, at, &subpage), "no slice is there");
    return slab_of_subpage(&inside()->arena.cut, subpage);
}

static void hold(int n, size_t bytes, CUstream stream)
{
    for (int i = 0; i < n; i++)
        play.p[i] = get_bytes(bytes, stream);
}

static void meet_slices(size_t bytes, CUstream stream)
{
    put(get_bytes(bytes, stream), stream);
}

PLAY(get_big)
{
    get_bytes(BIG, play.s);
}
PLAY(get_big_on_t)
{
    get_bytes(BIG, play.t);
}
PLAY(pair_of_big)
{
    meet_slices(BIG, play.s);
}
PLAY(pair_of_big_on_t)
{
    meet_slices(BIG, play.t);
}
PLAY(put_first)
{
    put(play.p[0], play.s);
}
PLAY(put_second)
{
    put(play.p[1], play.s);
}
PLAY(put_first_on_t)
{
    put(play.p[0], play.t);
}
PLAY(get_three_pages_on_t)
{
    get(3, play.t);
}
PLAY(trim)
{
    explore_check(vpmm_trim(play.w.pool, SIZE_MAX, NULL) == VPMM_SUCCESS, "trim: %s", vpmm_last_error());
}
PLAY(poll_twice)
{
    run_stream(play.s);
    run_stream(play.t);
    poll_pool();
    poll_pool();
}
/* A thread's front and stream are met before the race. */
PLAY(hold_one_big)
{
    hold(1, BIG, play.s);
    meet(play.s);
}

/* ---- one stream ---- */

PLAY(open_slab)
{
    open_world();
    meet_slices(BIG, play.s);
}
PLAY(open_half_slab)
{
    open_world();
    hold(1, BIG, play.s);
}
SCHEDULES(pairs_of_the_last_slice)
{
    explore_play("slices: pairs of the last", 0,
                 (struct exploration){.open = open_half_slab, .close = close_plain, .act = {pair_of_big, pair_of_big}});
}
SCHEDULES(pairs_of_the_last_slice_and_the_free_of_the_other)
{
    explore_play("slices: pairs of the last, free", 0,
                 (struct exploration){.open = open_half_slab, .close = close_plain, .act = {pair_of_big, put_first}});
}
SCHEDULES(pairs_of_two_threads_with_caches)
{
    explore_play("slices: pairs, pairs, cached", CACHE_PAGES,
                 (struct exploration){.open = open_plain,
                                      .close = close_plain,
                                      .prepare = {pair_of_big, pair_of_big},
                                      .act = {pair_of_big, pair_of_big}});
}

/* Two slices of one slab, freed at once: one of the two frees finds the slab empty. */
PLAY(open_full_slab)
{
    open_world();
    hold(A_SLAB, BIG, play.s);
    explore_check(slab_at_slice(play.p[0]) == slab_at_slice(play.p[1]), "the slices are not of one slab");
}
SCHEDULES(both_slices_of_a_slab_are_freed)
{
    explore_play("slices: both freed", 0,
                 (struct exploration){.open = open_full_slab, .close = close_plain, .act = {put_first, put_second}});
}

/* ---- double frees ---- */

PLAY(free_first)
{
    play.status[explore_actor()] = vpmm_free(play.w.pool, play.p[0], play.s);
}
PLAY(free_first_on_t)
{
    play.status[explore_actor()] = vpmm_free(play.w.pool, play.p[0], play.t);
}
PLAY(close_freed_once)
{
    disown(play.p[0]);
    explore_check((play.status[0] == VPMM_SUCCESS) + (play.status[1] == VPMM_SUCCESS) == 1, "two frees: %s and %s",
                  vpmm_status_name(play.status[0]), vpmm_status_name(play.status[1]));
    close_world();
}
static void free_twice(const char *name, size_t cache_pages, void (*second)(void *))
{
    explore_play(name, cache_pages,
                 (struct exploration){.open = open_plain,
                                      .close = close_freed_once,
                                      .prepare = {hold_one_big, cache_pages ? pair_of_big_on_t : NULL},
                                      .act = {free_first, second}});
}
SCHEDULES(slice_freed_twice)
{
    free_twice("slices: free, free", 0, free_first);
}
SCHEDULES(slice_freed_twice_with_caches)
{
    free_twice("slices: free, free, cached", CACHE_PAGES, free_first);
}
SCHEDULES(slice_freed_twice_on_two_streams)
{
    free_twice("slices: free, free on another stream", 0, free_first_on_t);
}
SCHEDULES(slice_freed_twice_on_two_streams_with_caches)
{
    free_twice("slices: free, free on another stream, cached", CACHE_PAGES, free_first_on_t);
}

/* ---- frees against flushes ---- */

PLAY(meet_t)
{
    meet(play.t);
}
SCHEDULES(free_of_a_slice_against_a_build)
{
    explore_play("slices: free, build", CACHE_PAGES,
                 (struct exploration){.open = open_plain,
                                      .close = close_plain,
                                      .prepare = {hold_one_big, meet_t},
                                      .act = {put_first, get_three_pages_on_t}});
}
SCHEDULES(free_of_a_slice_against_trim)
{
    explore_play(
        "slices: free, trim", CACHE_PAGES,
        (struct exploration){
            .open = open_plain, .close = close_plain, .prepare = {hold_one_big, meet_t}, .act = {put_first, trim}});
}
PLAY(cache_one_big)
{
    meet_slices(BIG, play.s);
}
SCHEDULES(hit_of_a_slice_against_trim)
{
    explore_play(
        "slices: hit, trim", CACHE_PAGES,
        (struct exploration){
            .open = open_plain, .close = close_plain, .prepare = {cache_one_big, meet_t}, .act = {get_big, trim}});
}
/* Its bin is full: the owner gives the older half back, and moves the others, while they are flushed. */
PLAY(fill_the_bin)
{
    hold(5, BIG, play.s);
    for (int i = 1; i < 5; i++)
        put(play.p[i], play.s);
}
SCHEDULES(full_bin_against_trim)
{
    explore_play(
        "slices: full bin, trim", CACHE_PAGES,
        (struct exploration){
            .open = open_plain, .close = close_plain, .prepare = {fill_the_bin, meet_t}, .act = {put_first, trim}});
}

/* What another thread's cache has given back is used before the pool grows. */
PLAY(fill_a_page)
{
    for (size_t i = 0; i < PAGE / BIG; i++)
        play.p[i % HELD] = get_bytes(BIG, play.s);
    put(play.p[6], play.s);
    put(play.p[7], play.s);
    play.builds = builds_now();
}
PLAY(close_without_a_build)
{
    explore_check(builds_now() == play.builds, "the pool has grown beside free slices");
    close_world();
}
SCHEDULES(malloc_of_a_slice_that_another_thread_has_cached)
{
    explore_play(
        "slices: cached elsewhere", CACHE_PAGES,
        (struct exploration){
            .open = open_plain, .close = close_without_a_build, .prepare = {fill_a_page}, .act = {put_first, get_big}});
}

/*
 * Its slot still has the address when the record is another slab's, of a class of its kind, and cached for the stream.
 * Not by a trim, which waits for what is not run here: who waits lets the others go on.
 */
PLAY(dissolve_and_cache_another_class)
{
    fronts_flush(&inside()->cut_fronts, NULL, true);
    slabs_dissolve_empty(slabs());
    meet_slices(BIG - SUBPAGE_BYTES, play.s);
}
SCHEDULES(hit_against_a_record_that_is_used_again)
{
    explore_play("slices: hit, record used again", CACHE_PAGES,
                 (struct exploration){.open = open_plain,
                                      .close = close_plain,
                                      .prepare = {cache_one_big},
                                      .act = {get_big, dissolve_and_cache_another_class}});
}

/* ---- mallocs against dissolves ---- */

/* The first slab is empty when its slice is freed, and the second one has a slice to spare: one of them goes. */
PLAY(open_two_half_slabs)
{
    open_world();
    hold(2 * A_SLAB, BIG, play.s);
    explore_check(slab_at_slice(play.p[0]) != slab_at_slice(play.p[A_SLAB]), "the slices are of one slab");
    put(play.p[1], play.s);
    put(play.p[A_SLAB + 1], play.s);
}
SCHEDULES(malloc_against_dissolve)
{
    explore_play("slices: malloc, dissolve", 0,
                 (struct exploration){.open = open_two_half_slabs, .close = close_plain, .act = {put_first, get_big}});
}
SCHEDULES(malloc_against_dissolve_and_trim)
{
    explore_play("slices: malloc, dissolve, trim", 0,
                 (struct exploration){
                     .open = open_two_half_slabs, .close = close_plain, .act = {put_first, get_big_on_t, trim}});
}
/* The record is another slab's at once, of a class of its kind. */
PLAY(put_first_and_get_another_class)
{
    put(play.p[0], play.s);
    get_bytes(BIG - SUBPAGE_BYTES, play.s);
}
SCHEDULES(malloc_against_a_record_that_is_used_again)
{
    explore_play("slices: malloc, another class", 0,
                 (struct exploration){.open = open_two_half_slabs,
                                      .close = close_plain,
                                      .act = {put_first_and_get_another_class, pair_of_big}});
}
/*
 * An address that was freed is freed again while its slab's record becomes a slab at another place and of another size:
 * by the old size and the new place it would be the second slice, which begins elsewhere.
 */
PLAY(open_two_sizes)
{
    open_world();
    play.p[0] = get_bytes(BIG / 32, play.s);
    play.p[1] = get_bytes(BIG, play.s);
    explore_check(play.p[1] == play.p[0] + BIG, "the slabs do not adjoin");
    put(play.p[1], play.s);
}
PLAY(free_again)
{
    vpmm_status status = vpmm_free(play.w.pool, play.p[1], play.s);
    explore_check(status == VPMM_ERROR_INVALID_POINTER, "a free of what is not there: %s", vpmm_status_name(status));
}
PLAY(use_the_record_at_another_place)
{
    put(play.p[0], play.s);
    run_stream(play.s);
    trim_now(); /* nothing is pending after it: who waits lets the others go on */
    for (int i = 0; i < A_SLAB; i++)
        get_bytes(BIG - SUBPAGE_BYTES, play.s);
}
SCHEDULES(wrong_free_against_a_record_that_is_used_again)
{
    explore_play("slices: wrong free, record used again", 0,
                 (struct exploration){.open = open_two_sizes,
                                      .close = close_plain,
                                      .act = {free_again, use_the_record_at_another_place}});
}
PLAY(open_two_empty_slabs)
{
    open_two_half_slabs_now();
    put(play.p[0], play.s);
    put(play.p[A_SLAB], play.s);
}
SCHEDULES(malloc_against_trim)
{
    explore_play("slices: malloc, trim", 0,
                 (struct exploration){.open = open_two_empty_slabs, .close = close_plain, .act = {get_big, trim}});
}

/* ---- adoption ---- */

/* One slice is free and done with, the other one is still in use on the old stream. */
PLAY(open_passed_half)
{
    open_full_slab_now();
    put(play.p[1], play.s);
    world_drain(&play.w);
    explore_check(write_later(&play.w, play.p[0], 1, ++play.stamp, play.s), "the write fails");
}
SCHEDULES(adoption_against_a_free_on_the_old_stream)
{
    explore_play(
        "slices: adopt, free", 0,
        (struct exploration){.open = open_passed_half, .close = close_plain, .act = {put_first, get_big_on_t}});
}
PLAY(get_two_big_on_t)
{
    get_bytes(BIG, play.t);
    get_bytes(BIG, play.t);
}
SCHEDULES(adoption_against_a_free_with_two_mallocs)
{
    explore_play(
        "slices: adopt and take both, free", 0,
        (struct exploration){.open = open_passed_half, .close = close_plain, .act = {put_first, get_two_big_on_t}});
}
SCHEDULES(adoption_against_a_malloc_on_the_old_stream)
{
    explore_play(
        "slices: adopt, malloc", 0,
        (struct exploration){.open = open_passed_half, .close = close_plain, .act = {pair_of_big, get_big_on_t}});
}
/* What the new owner frees is behind its own work: the old one, which has seen the slab among its own, leaves it. */
SCHEDULES(adoption_and_a_free_against_a_malloc)
{
    explore_play(
        "slices: adopt and free, malloc", 0,
        (struct exploration){.open = open_passed_half, .close = close_plain, .act = {get_big, pair_of_big_on_t}});
}
SCHEDULES(adoption_there_and_back)
{
    explore_play("slices: adopt, adopt", 0,
                 (struct exploration){
                     .open = open_passed_half, .close = close_plain, .act = {pair_of_big_on_t, get_big, put_first}});
}

/* ---- what is freed on another stream than the slab's ---- */

PLAY(open_to_defer)
{
    open_full_slab_now();
    order_after(&play.w, play.t, play.s);
    run_stream(play.s);
    explore_check(write_later(&play.w, play.p[0], 1, ++play.stamp, play.t), "the write fails");
}
/* All streams are done: after a look nothing is deferred any more, whether anything was pending or not. */
PLAY(close_deferred)
{
    run_stream(play.s);
    run_stream(play.t);
    pass_refresh(&inside()->arena, NULL);
    explore_check(pile_empty(&slabs()->deferred) && !slabs()->waiting, "a slice that has passed is still deferred");
    close_world();
}
/* The first look marks, and the second one sees that it has passed. */
PLAY(poll_run_and_poll)
{
    poll_pool();
    run_stream(play.t);
    poll_pool();
}
SCHEDULES(deferred_slice_that_passes_before_it_is_deferred)
{
    explore_play("slices: deferred late", 0,
                 (struct exploration){
                     .open = open_to_defer, .close = close_deferred, .act = {put_first_on_t, poll_run_and_poll}});
}
SCHEDULES(deferred_slice_against_pass)
{
    explore_play(
        "slices: deferred, pass", 0,
        (struct exploration){.open = open_to_defer, .close = close_deferred, .act = {put_first_on_t, poll_twice}});
}
SCHEDULES(deferred_slice_against_pass_and_malloc)
{
    explore_play("slices: deferred, pass, malloc", 0,
                 (struct exploration){
                     .open = open_to_defer, .close = close_deferred, .act = {put_first_on_t, poll_twice, get_big}});
}
SCHEDULES(deferred_slice_against_malloc_on_its_stream)
{
    explore_play("slices: deferred, adopt", 0,
                 (struct exploration){.open = open_to_defer,
                                      .close = close_deferred,
                                      .act = {put_first_on_t, pair_of_big_on_t, put_second}});
}

/* ---- subpages ---- */

/* Three pages' worth of subpages, of which two are kept. */
PLAY(open_subpages)
{
    open_world();
    hold(3, PAGE - SUBPAGE_BYTES, play.s);
    put(play.p[1], play.s);
    put(play.p[2], play.s);
}
PLAY(get_subpages)
{
    get_bytes(SUBPAGES, play.s);
}
SCHEDULES(pages_given_back_against_malloc_of_subpages)
{
    explore_play("subpages: given back, malloc", 0,
                 (struct exploration){.open = open_subpages, .close = close_plain, .act = {put_first, get_subpages}});
}
SCHEDULES(pages_given_back_twice)
{
    explore_play("subpages: given back, trim", 0,
                 (struct exploration){.open = open_subpages, .close = close_plain, .act = {put_first, trim}});
}

/* ---- streams that go ---- */

PLAY(destroy_released)
{
    release(play.s);
    world_stream_destroy(&play.w, play.s);
}
/* The full cache of a front gives up half of what it has of all its streams, one of which another thread releases. */
PLAY(fill_with_subpages_of_t)
{
    hold(3, PAGE / 5 * 2, play.t);
    meet_slices(BIG, play.s);
    put(play.p[1], play.t);
    put(play.p[2], play.t);
}
SCHEDULES(release_against_a_front_that_is_full)
{
    explore_play("slices: release, halve", 1,
                 (struct exploration){.open = open_plain,
                                      .close = close_plain,
                                      .prepare = {fill_with_subpages_of_t},
                                      .act = {put_first_on_t, destroy_released}});
}
PLAY(hold_one_on_t)
{
    hold(1, BIG, play.s);
    order_after(&play.w, play.t, play.s);
    meet_slices(SMALL, play.t);
}
SCHEDULES(release_against_a_free_and_a_pass)
{
    explore_play("slices: release, free, pass", 0,
                 (struct exploration){.open = open_plain,
                                      .close = close_plain,
                                      .prepare = {hold_one_on_t},
                                      .act = {put_first_on_t, destroy_released, poll_twice}});
}
SCHEDULES(release_against_adoption)
{
    explore_play(
        "slices: release, adopt", 0,
        (struct exploration){.open = open_slab, .close = close_plain, .act = {destroy_released, get_big_on_t}});
}
/* The record of the stream is another stream's while its slabs have free slices. */
PLAY(use_the_record_again)
{
    release(play.s);
    run_stream(play.s);
    poll_pool();
    poll_pool();
    CUstream u = world_stream(&play.w);
    get_bytes(BIG, u);
}
SCHEDULES(record_of_a_stream_used_again_against_adoption)
{
    explore_play(
        "slices: record used again, adopt", 0,
        (struct exploration){.open = open_slab, .close = close_plain, .act = {use_the_record_again, pair_of_big_on_t}});
}

/* ---- the page that slabs are cut from ---- */

/* Free pages, of which the next slab begins one. */
PLAY(open_for_slab_pages)
{
    open_world();
    put(get(4, play.s), play.s);
    meet(play.t);
    world_drain(&play.w);
    inside()->arena.slab_pages_from = 0;
}
PLAY(open_slab_page)
{
    open_for_slab_pages_now();
    hold(1, SMALL, play.s);
    explore_check(slab_page_is_kept(&inside()->arena), "slabs have no page");
}
PLAY(get_two_kinds_on_t)
{
    get_bytes(BIG, play.t);
    get_bytes(BIG / 2, play.t);
}
SCHEDULES(two_begin_a_page_of_slabs)
{
    explore_play(
        "slabs' page: begun, begun", 0,
        (struct exploration){.open = open_for_slab_pages, .close = close_plain, .act = {get_big, get_big_on_t}});
}
SCHEDULES(two_slabs_of_one_page)
{
    explore_play(
        "slabs' page: slab, slab", 0,
        (struct exploration){.open = open_slab_page, .close = close_plain, .act = {get_big, get_two_kinds_on_t}});
}
SCHEDULES(a_slab_of_a_page_against_trim)
{
    explore_play("slabs' page: slab, trim", 0,
                 (struct exploration){.open = open_slab_page, .close = close_plain, .act = {get_big, trim}});
}
SCHEDULES(slabs_of_a_page_and_a_trim)
{
    explore_play(
        "slabs' page: slab, slabs, trim", 0,
        (struct exploration){.open = open_slab_page, .close = close_plain, .act = {get_big, get_two_kinds_on_t, trim}});
}

/* ---- the pool's last page ---- */

PLAY(get_subpages_on_t)
{
    get_bytes(SUBPAGES, play.t);
}
PLAY(open_with_a_free_page)
{
    open_world();
    put(get(1, play.s), play.s);
    run_stream(play.s);
    poll_pool();
}
/* There is room for both, which one has in its hands while the other looks for it. */
SCHEDULES(two_mallocs_from_the_last_page)
{
    play.cap = 1;
    explore_play("subpages, subpages on another stream", 0,
                 (struct exploration){
                     .open = open_with_a_free_page, .close = close_plain, .act = {get_subpages, get_subpages_on_t}});
}
SCHEDULES(slice_and_subpages_from_the_last_page)
{
    play.cap = 1;
    explore_play(
        "subpages, slice on another stream", 0,
        (struct exploration){.open = open_with_a_free_page, .close = close_plain, .act = {get_subpages, get_big_on_t}});
}

/* All that is left is a slab, whose slices both pass through hands, caches and other streams' slabs: one for each. */
PLAY(open_with_two_slices)
{
    open_world();
    get_bytes(PAGE - A_SLAB * BIG, play.s);
    meet_slices(BIG, play.s);
}
SCHEDULES(pairs_of_the_last_slab)
{
    play.cap = 1;
    explore_play("slices: pairs of the last slab, on two streams", 0,
                 (struct exploration){
                     .open = open_with_two_slices, .close = close_plain, .act = {pair_of_big, pair_of_big_on_t}});
}
SCHEDULES(cached_pairs_of_the_last_slab)
{
    play.cap = 1;
    explore_play("slices: cached pairs of the last slab, on two streams", CACHE_PAGES,
                 (struct exploration){.open = open_with_two_slices,
                                      .close = close_plain,
                                      .prepare = {pair_of_big, pair_of_big_on_t},
                                      .act = {pair_of_big, pair_of_big_on_t}});
}
