/*
 * What threads do at the same time, in orders with at most two preemptions, and in random ones (explore.h
 * says how, and how to have more of them or one of them again). play.h says what is looked at after each.
 */
#include "play.h"

#include "cache/slices.h"

/* ---- a cache, and others that want what is in it ---- */

PLAY(keep_one_in_cache)
{
    put(get(1, play.s), play.s);
}
PLAY(keep_none_in_cache)
{
    play.p[1] = get(1, play.s);
    play.p[2] = get(1, play.s);
    put(play.p[2], play.s);
    play.p[2] = get(1, play.s);
}
PLAY(get_one)
{
    get(1, play.s);
}
PLAY(get_and_put_one)
{
    put(get(1, play.s), play.s);
}

SCHEDULES(cache_take_against_thief)
{
    explore_play("take, thief", CACHE_PAGES,
                 (struct exploration){.open = open_plain,
                                      .close = close_plain,
                                      .prepare = {keep_none_in_cache, keep_one_in_cache},
                                      .act = {get_one, get_one}});
}
SCHEDULES(cache_pairs_of_two_threads)
{
    explore_play("pairs, pairs", CACHE_PAGES,
                 (struct exploration){.open = open_plain,
                                      .close = close_plain,
                                      .prepare = {keep_none_in_cache, keep_one_in_cache},
                                      .act = {get_and_put_one, get_and_put_one}});
}

PLAY(hold_one)
{
    play.p[0] = get(1, play.s);
    meet(play.s);
}
PLAY(put_held)
{
    put(play.p[0], play.s);
}
PLAY(get_three_on_t)
{
    play.p[3] = get(3, play.t);
}
PLAY(meet_t)
{
    meet(play.t);
}

/* A build empties the caches before it builds. What is freed meanwhile stays findable. */
SCHEDULES(cache_give_against_flush)
{
    explore_play("give, flush", CACHE_PAGES,
                 (struct exploration){.open = open_plain,
                                      .close = close_plain,
                                      .prepare = {hold_one, meet_t},
                                      .act = {put_held, get_three_on_t}});
}

PLAY(get_one_on_t)
{
    get(1, play.t);
}
PLAY(get_the_cap)
{
    play.p[3] = try_get(play.cap, play.t, &play.status[3]);
}
/* Once both are through, nothing stands in the way of it. */
PLAY(close_with_the_cap)
{
    run_stream(play.s);
    if (!play.p[3])
        get(play.cap, play.t);
    close_world();
}

SCHEDULES(cache_give_against_a_malloc_of_all)
{
    play.cap = 2;
    explore_play(
        "give, malloc of all", CACHE_PAGES,
        (struct exploration){
            .open = open_plain, .close = close_with_the_cap, .prepare = {hold_one}, .act = {put_held, get_the_cap}});
}

/* What another thread keeps and needs no wait is used before the pool grows. */
PLAY(leave_it_in_the_cache)
{
    play.p[0] = get(1, play.s);
    put(get(1, play.s), play.s);
    run_stream(play.s);
    play.builds = builds_now();
}
PLAY(close_without_a_build)
{
    explore_check(builds_now() == play.builds, "the pool has grown beside cached memory");
    close_world();
}
SCHEDULES(malloc_of_what_another_thread_has_cached)
{
    explore_play("cached elsewhere", CACHE_PAGES,
                 (struct exploration){.open = open_plain,
                                      .close = close_without_a_build,
                                      .prepare = {leave_it_in_the_cache},
                                      .act = {put_held, get_one_on_t}});
}

/* A bin of more than the cache's slots; the owner moves addresses while they are flushed. */
PLAY(fill_the_cache)
{
    CUdeviceptr p[4];
    for (int i = 0; i < 4; i++)
        p[i] = get(1, play.s);
    play.p[0] = get(1, play.s);
    for (int i = 0; i < 4; i++)
        put(p[i], play.s);
}
SCHEDULES(cache_that_is_full_against_flush)
{
    play.cap = 0;
    explore_play("halve, flush", 4,
                 (struct exploration){.open = open_plain,
                                      .close = close_plain,
                                      .prepare = {fill_the_cache, meet_t},
                                      .act = {put_held, get_three_on_t}});
}
SCHEDULES(cache_that_is_full_against_thief)
{
    explore_play("halve, thief", 4,
                 (struct exploration){.open = open_plain,
                                      .close = close_plain,
                                      .prepare = {keep_none_in_cache, fill_the_cache},
                                      .act = {get_one, put_held}});
}

/* ---- frees ---- */

PLAY(free_on_s)
{
    play.status[explore_actor()] = vpmm_free(play.w.pool, play.p[0], play.s);
}
PLAY(free_on_t)
{
    play.status[explore_actor()] = vpmm_free(play.w.pool, play.p[0], play.t);
}
PLAY(close_freed_once)
{
    disown(play.p[0]);
    for (int i = 0; i < 2; i++)
        explore_check(play.status[i] == VPMM_SUCCESS || play.status[i] == VPMM_ERROR_INVALID_POINTER, "a free: %s",
                      vpmm_status_name(play.status[i]));
    explore_check((play.status[0] == VPMM_SUCCESS) != (play.status[1] == VPMM_SUCCESS),
                  "two frees of one block: %s, %s", vpmm_status_name(play.status[0]), vpmm_status_name(play.status[1]));
    close_world();
}

static void free_twice(const char *name, size_t cache_pages, void (*second)(void *))
{
    explore_play(name, cache_pages,
                 (struct exploration){.open = open_plain,
                                      .close = close_freed_once,
                                      .prepare = {hold_one, cache_pages ? meet_t : NULL},
                                      .act = {free_on_s, second}});
}
SCHEDULES(free_against_free)
{
    free_twice("free, free", 0, free_on_s);
}
SCHEDULES(free_against_free_with_caches)
{
    free_twice("free, free, cached", CACHE_PAGES, free_on_s);
}
SCHEDULES(free_against_free_on_another_stream_with_caches)
{
    free_twice("free, free on another stream, cached", CACHE_PAGES, free_on_t);
}

/* Three blocks between two that stay. */
static void hold_neighbours(int n)
{
    CUdeviceptr all = get((size_t)n + 2, play.s);
    put(all, play.s);
    get(1, play.s);
    for (int i = 0; i < n; i++) {
        play.p[i] = get(1, play.s);
        explore_check(play.p[i] == all + (CUdeviceptr)(i + 1) * PAGE, "the blocks do not adjoin");
    }
    get(1, play.s);
    play.builds = builds_now();
}
PLAY(open_neighbours)
{
    open_world();
    hold_neighbours(3);
}
PLAY(put_own)
{
    put(play.p[explore_actor()], play.s);
}
PLAY(close_merged)
{
    look();
    CUdeviceptr all = get(3, play.s);
    explore_check(all == play.p[0] && builds_now() == play.builds, "three neighbours are not one: %s", layout(&play.w));
    close_world();
}
SCHEDULES(three_neighbouring_frees_merge)
{
    explore_play(
        "three neighbours", 0,
        (struct exploration){.open = open_neighbours, .close = close_merged, .act = {put_own, put_own, put_own}});
}

/* The middle one is free: both sides want it. */
PLAY(open_around)
{
    open_world();
    hold_neighbours(3);
    put(play.p[1], play.s);
}
PLAY(put_first)
{
    put(play.p[0], play.s);
}
PLAY(put_third)
{
    put(play.p[2], play.s);
}
SCHEDULES(two_frees_around_a_free_region)
{
    explore_play("two around one", 0,
                 (struct exploration){.open = open_around, .close = close_merged, .act = {put_first, put_third}});
}

/* Far from each other, but entered into one bin, and marked by one of the two for both. */
PLAY(open_apart)
{
    open_world();
    hold_neighbours(3);
}
PLAY(close_apart)
{
    const struct stream *stream = stream_at(&inside()->arena.streams, 1);
    explore_check(atomic_load(&stream->published) == atomic_load(&stream->recorded), "a free is not behind a mark");
    look();
    get(1, play.s);
    get(1, play.s);
    explore_check(builds_now() == play.builds, "free memory is not found");
    close_world();
}
SCHEDULES(frees_of_one_length_on_one_stream)
{
    explore_play("apart", 0,
                 (struct exploration){.open = open_apart, .close = close_apart, .act = {put_first, put_third}});
}
/* The first of their length: both add a block of hints. */
PLAY(open_apart_in_a_new_bin)
{
    open_world();
    put(get(9, play.s), play.s);
    play.p[0] = get(3, play.s);
    get(1, play.s);
    play.p[2] = get(3, play.s);
    get(1, play.s);
    play.builds = builds_now();
}
PLAY(close_apart_in_a_new_bin)
{
    get(3, play.s);
    get(3, play.s);
    explore_check(builds_now() == play.builds, "free memory is not found");
    close_world();
}
SCHEDULES(frees_of_a_new_length)
{
    explore_play("apart, new bin", 0,
                 (struct exploration){.open = open_apart_in_a_new_bin,
                                      .close = close_apart_in_a_new_bin,
                                      .act = {put_first, put_third}});
}

PLAY(open_apart_with_one)
{
    open_apart_now();
    put(play.p[0], play.s);
}
PLAY(close_with_one)
{
    const struct stream *stream = stream_at(&inside()->arena.streams, 1);
    explore_check(atomic_load(&stream->published) == atomic_load(&stream->recorded), "a free is not behind a mark");
    explore_check(builds_now() == play.builds, "a malloc built beside free memory");
    close_world();
}
SCHEDULES(free_against_malloc_that_empties_the_bin)
{
    explore_play(
        "free, malloc of the last", 0,
        (struct exploration){.open = open_apart_with_one, .close = close_with_one, .act = {put_third, get_one}});
}

/* ---- a pass of the reaper's ---- */

PLAY(poll_twice)
{
    run_stream(play.s);
    poll_pool();
    poll_pool();
}
PLAY(put_first_on_t)
{
    order_after(&play.w, play.t, play.s);
    put(play.p[0], play.t);
}
/* On different streams, neither of which has passed at first: they are one when both have. */
PLAY(close_merged_at_last)
{
    look();
    world_drain(&play.w);
    close_merged(NULL);
}
SCHEDULES(neighbouring_frees_of_two_streams_against_a_pass)
{
    explore_play("two streams' neighbours, pass", 0,
                 (struct exploration){.open = open_around,
                                      .close = close_merged_at_last,
                                      .act = {put_first_on_t, put_third, poll_twice}});
}

PLAY(open_passing)
{
    open_world();
    hold_neighbours(3);
    put(play.p[0], play.s);
    put(play.p[1], play.s);
    keep_busy(&play.w, play.t);
}
SCHEDULES(pass_against_free)
{
    explore_play(
        "pass, free", 0,
        (struct exploration){.open = open_passing, .close = close_merged_at_last, .act = {poll_twice, put_third}});
}
SCHEDULES(pass_against_malloc)
{
    explore_play("pass, malloc", 0,
                 (struct exploration){.open = open_passing, .close = close_plain, .act = {poll_twice, get_one_on_t}});
}
SCHEDULES(pass_against_free_and_malloc)
{
    explore_play(
        "pass, free, malloc", 0,
        (struct exploration){.open = open_passing, .close = close_plain, .act = {poll_twice, put_third, get_one_on_t}});
}

/* Caches are emptied when they were not touched since the last look. */
PLAY(look_twice)
{
    poll_pool();
    explore_later(FRONT_IDLE_US + 1);
    poll_pool();
}
PLAY(open_looked_at)
{
    open_world();
    poll_pool();
    explore_later(FRONT_IDLE_US + 1);
}
SCHEDULES(idle_flush_against_a_pair)
{
    explore_play("idle flush, pair", CACHE_PAGES,
                 (struct exploration){.open = open_looked_at,
                                      .close = close_plain,
                                      .prepare = {keep_one_in_cache, meet_t},
                                      .act = {get_and_put_one, look_twice}});
}
SCHEDULES(idle_flush_against_free)
{
    explore_play(
        "idle flush, free", CACHE_PAGES,
        (struct exploration){
            .open = open_looked_at, .close = close_plain, .prepare = {hold_one}, .act = {put_held, look_twice}});
}

/* ---- splits and builds ---- */

PLAY(open_for_split)
{
    open_world();
    hold_neighbours(3);
    put(play.p[1], play.s);
    put(play.p[2], play.s);
}
SCHEDULES(free_against_malloc_with_split)
{
    explore_play("free, split", 0,
                 (struct exploration){.open = open_for_split, .close = close_plain, .act = {put_first, get_one}});
}
SCHEDULES(two_mallocs_that_split_one_region)
{
    explore_play("split, split", 0,
                 (struct exploration){.open = open_for_split, .close = close_plain, .act = {get_one, get_one}});
}

/* While one has the region in its hands the other finds no free memory, and may make none. */
SCHEDULES(two_mallocs_that_split_one_region_under_the_cap)
{
    play.cap = 5;
    explore_play("split, split under the cap", 0,
                 (struct exploration){.open = open_for_split, .close = close_plain, .act = {get_one, get_one}});
}

/* What the other has in its hands as the trim looks comes back, but for the page that it takes. */
PLAY(open_five_passed)
{
    open_world();
    hold_neighbours(6);
    for (int i = 1; i < 6; i++)
        put(play.p[i], play.s);
    world_drain(&play.w);
}
PLAY(trim_all)
{
    explore_check(vpmm_trim(play.w.pool, 0, NULL) == VPMM_SUCCESS, "trim: %s", vpmm_last_error());
}
PLAY(close_trimmed)
{
    vpmm_stats stats = stats_of(&play.w);
    explore_check(stats.mapped_bytes == stats.live_bytes, "%zu bytes are mapped, of which %zu live",
                  (size_t)stats.mapped_bytes, (size_t)stats.live_bytes);
    close_plain(NULL);
}
SCHEDULES(malloc_with_split_against_trim)
{
    explore_play("split, trim", 0,
                 (struct exploration){.open = open_five_passed, .close = close_trimmed, .act = {get_one, trim_all}});
}

/* A graph's pool waits for no stream, but for this. */
PLAY(open_graph_s_pool_for_split)
{
    play.graph = true;
    open_for_split_now();
}
PLAY(close_graph_s_pool)
{
    look();
    put_all();
    world_close(&play.w);
}
SCHEDULES(two_mallocs_that_split_one_region_of_a_graph_s_pool)
{
    play.cap = 5;
    explore_play("split, split in a graph's pool under the cap", 0,
                 (struct exploration){
                     .open = open_graph_s_pool_for_split, .close = close_graph_s_pool, .act = {get_one, get_one}});
}

/* Under the cap a build moves what is free; what is being freed then is taken, or not, and is there afterwards. */
PLAY(open_scattered)
{
    open_world();
    hold_neighbours(5);
    put(play.p[0], play.s);
    put(play.p[2], play.s);
    put(play.p[4], play.s);
}
PLAY(get_three)
{
    play.p[6] = try_get(3, play.s, &play.status[6]);
}
PLAY(get_two)
{
    play.p[7] = try_get(2, play.s, &play.status[7]);
}
PLAY(put_fourth)
{
    put(play.p[3], play.s);
}
PLAY(close_with_three)
{
    if (!play.p[6])
        get(3, play.s);
    close_world();
}
SCHEDULES(build_against_free)
{
    play.cap = 7;
    explore_play(
        "build, free", 0,
        (struct exploration){.open = open_scattered, .close = close_with_three, .act = {get_three, put_fourth}});
}
/* It lacks a page, and another of what it wanted is taken: it goes on with the rest, and makes these two. */
PLAY(get_four)
{
    get(4, play.s);
}
PLAY(close_with_two_pages_made)
{
    unsigned pages = (unsigned)(stats_of(&play.w).mapped_bytes / PAGE);
    explore_check(pages == 7 + 2, "%u pages are mapped, not seven and two", pages);
    close_world();
}
SCHEDULES(build_against_malloc)
{
    explore_play(
        "build, malloc", 0,
        (struct exploration){.open = open_scattered, .close = close_with_two_pages_made, .act = {get_four, get_one}});
}
PLAY(get_two_on_t)
{
    play.p[7] = try_get(2, play.t, &play.status[7]);
}
SCHEDULES(build_against_build)
{
    play.cap = 10;
    explore_play("build, build", 0,
                 (struct exploration){.open = open_scattered, .close = close_plain, .act = {get_three, get_two}});
}
SCHEDULES(build_against_build_on_another_stream)
{
    play.cap = 10;
    explore_play("build, build on another stream", 0,
                 (struct exploration){.open = open_scattered, .close = close_plain, .act = {get_three, get_two_on_t}});
}
SCHEDULES(build_against_pass)
{
    play.cap = 7;
    explore_play(
        "build, pass", 0,
        (struct exploration){.open = open_scattered, .close = close_with_three, .act = {get_three, poll_twice}});
}

/* ---- streams that go ---- */

PLAY(release_s)
{
    release(play.s);
}
PLAY(pairs_on_t)
{
    play.p[4] = get(1, play.t);
    meet(play.t);
}
/* The release returns with everything behind marks: what is still on the stream is seen to pass. */
PLAY(destroy_released)
{
    release(play.s);
    world_stream_destroy(&play.w, play.s);
}
PLAY(poll_three_times)
{
    for (int i = 0; i < 3; i++) {
        poll_pool();
        run_stream(play.s);
    }
}
PLAY(open_used)
{
    open_world();
    CUdeviceptr p = get(2, play.s);
    keep_busy(&play.w, play.s);
    put(p, play.s);
}
/* What is cached has no mark: the release makes one, and so does a pass, of a stream that is then destroyed. */
PLAY(open_flushed)
{
    open_looked_at(NULL);
    put(get(1, play.s), play.s);
    keep_busy(&play.w, play.s);
}
PLAY(flush_and_poll)
{
    get(3, play.t);
    poll_pool();
    poll_pool();
}
PLAY(put_held_and_destroy)
{
    put(play.p[0], play.s);
    destroy_released_now();
}
SCHEDULES(release_of_a_cache_against_pass)
{
    explore_play("release of a cache, pass", CACHE_PAGES,
                 (struct exploration){.open = open_looked_at,
                                      .close = close_plain,
                                      .prepare = {keep_one_in_cache},
                                      .act = {destroy_released, look_twice}});
}
SCHEDULES(release_of_a_cache_against_flush_and_pass)
{
    explore_play("release of a cache, flush and pass", CACHE_PAGES,
                 (struct exploration){.open = open_flushed,
                                      .close = close_plain,
                                      .prepare = {hold_one},
                                      .act = {put_held_and_destroy, flush_and_poll}});
}
SCHEDULES(release_against_malloc_that_waits)
{
    play.cap = 4;
    explore_play(
        "release, waiting malloc", 0,
        (struct exploration){.open = open_used, .close = close_plain, .act = {destroy_released, get_three_on_t}});
}
SCHEDULES(release_against_pairs_on_another_stream)
{
    explore_play("release, pairs", 0,
                 (struct exploration){.open = open_used, .close = close_plain, .act = {release_s, pairs_on_t}});
}
SCHEDULES(release_against_pass)
{
    explore_play(
        "release, pass", 0,
        (struct exploration){.open = open_used, .close = close_plain, .act = {destroy_released, poll_three_times}});
}
SCHEDULES(release_against_malloc_of_all)
{
    play.cap = 3;
    explore_play(
        "release, malloc of all", 0,
        (struct exploration){.open = open_used, .close = close_with_the_cap, .act = {destroy_released, get_the_cap}});
}
SCHEDULES(release_against_pairs_and_a_pass_with_caches)
{
    explore_play("release, pairs, pass, cached", CACHE_PAGES,
                 (struct exploration){.open = open_plain,
                                      .close = close_plain,
                                      .prepare = {keep_one_in_cache, meet_t},
                                      .act = {destroy_released, pairs_on_t, poll_three_times}});
}

/* The full cache of a front gives up half of what it has of all its streams, one of which another thread releases. */
PLAY(fill_with_t)
{
    CUdeviceptr p[3];
    play.p[0] = get(1, play.t);
    for (int i = 0; i < 3; i++)
        p[i] = get(1, play.t);
    meet(play.s);
    for (int i = 0; i < 3; i++)
        put(p[i], play.t);
}
PLAY(put_held_on_t)
{
    put(play.p[0], play.t);
}
SCHEDULES(release_against_a_front_that_is_full)
{
    explore_play("release, halve", 4,
                 (struct exploration){.open = open_plain,
                                      .close = close_plain,
                                      .prepare = {fill_with_t},
                                      .act = {put_held_on_t, destroy_released}});
}

/* The same, where what stays in the released stream's cache moves to other slots. */
PLAY(fill_with_s)
{
    CUdeviceptr p[3];
    play.p[0] = get(1, play.t);
    meet(play.t);
    for (int i = 0; i < 3; i++)
        p[i] = get(1, play.s);
    for (int i = 0; i < 3; i++)
        put(p[i], play.s);
}
SCHEDULES(release_against_a_front_that_moves_its_slots)
{
    explore_play("release, halve and move", 4,
                 (struct exploration){.open = open_plain,
                                      .close = close_plain,
                                      .prepare = {fill_with_s},
                                      .act = {put_held_on_t, destroy_released}});
}

/* A thread frees on a stream, by a hit of its cache, while another releases the stream. */
PLAY(hold_one_beside_a_cached_one)
{
    play.p[0] = get(1, play.s);
    meet(play.s);
}
PLAY(put_held_on_s)
{
    put(play.p[0], play.s);
}
static uint64_t bytes_in_slots(const struct cache *cache)
{
    static const uint32_t bins[CACHED_KINDS] = {CACHE_BINS, SLICE_CLASSES};
    uint64_t bytes = 0;
    for (enum cached kind = 0; kind < CACHED_KINDS; kind++) {
        const struct bin_set *set = cache_set(cache, kind);
        unsigned shift = kind == CACHED_REGIONS ? cache->front->fronts->space->units.unit_shift : 0;
        for (uint32_t i = 0; set && i < bins[kind]; i++) {
            const struct bin *bin = set_bin(set, i);
            bytes += ((uint64_t)atomic_load(&bin->count) * atomic_load(&bin->length)) << shift;
        }
    }
    return bytes;
}
static void look_at_stock(struct fronts *fronts)
{
    for (struct front *front = atomic_load(&fronts->first); front; front = front->next) {
        uint64_t bytes = 0;
        for (struct cache *cache = atomic_load(&front->caches); cache; cache = cache->next)
            bytes += bytes_in_slots(cache);
        explore_check(front_held(front) == bytes, "a front counts %llu bytes, and %llu are in its slots",
                      (unsigned long long)front_held(front), (unsigned long long)bytes);
    }
}
/* Whatever the order was, a release that follows both covers the free; it is the first or the second. */
PLAY(close_with_a_second_release)
{
    release(play.s);
    look_at_stock(&inside()->fronts);
    look_at_stock(&inside()->cut_fronts);
    world_stream_destroy(&play.w, play.s);
    play.s = world_stream(&play.w);
    put(get(1, play.s), play.s);
    close_world();
}
static void free_against_release(const char *name, vpmm_streams streams, void (*prepare)(void *))
{
    play.streams = streams;
    explore_play(name, CACHE_PAGES,
                 (struct exploration){.open = open_plain,
                                      .close = close_with_a_second_release,
                                      .prepare = {prepare},
                                      .act = {put_held_on_s, release_s}});
}
SCHEDULES(free_that_hits_against_release)
{
    free_against_release("free, release of its stream", VPMM_STREAMS_CHECKED, hold_one_beside_a_cached_one);
}
SCHEDULES(free_that_hits_against_release_of_a_trusted_stream)
{
    free_against_release("free, release of its stream, trusted", VPMM_STREAMS_TRUSTED, hold_one_beside_a_cached_one);
}
/* Its bin is empty, so the free notes it. */
SCHEDULES(free_that_notes_against_release)
{
    free_against_release("first free, release of its stream", VPMM_STREAMS_TRUSTED, hold_one);
}
/* The same of a slice. */
static void flush_everything(void)
{
    fronts_flush(&inside()->fronts, NULL, true);
    fronts_flush(&inside()->cut_fronts, NULL, true);
}
PLAY(hold_one_slice)
{
    play.p[0] = get_bytes(SLICE_MAX, play.s);
    put(get_bytes(SLICE_MAX, play.s), play.s);
    flush_everything();
}
SCHEDULES(free_of_a_slice_against_release)
{
    free_against_release("slice, release of its stream", VPMM_STREAMS_TRUSTED, hold_one_slice);
}
/* A cache that is listed, and empty, is noted while a pass takes it off the list. */
PLAY(hold_one_of_a_listed_empty_cache)
{
    play.p[0] = get(1, play.s);
    meet(play.s);
    flush_everything();
    struct front *front = atomic_load(&inside()->fronts.first);
    for (struct cache *cache = atomic_load(&front->caches); cache; cache = cache->next)
        cache_list_noted(cache);
}
SCHEDULES(free_that_notes_against_a_look)
{
    explore_play("first free, look", CACHE_PAGES,
                 (struct exploration){.open = open_looked_at,
                                      .close = close_plain,
                                      .prepare = {hold_one_of_a_listed_empty_cache},
                                      .act = {put_held_on_s, look_twice}});
}
/* A hit has found its cache open; the stream is released, and its record may not yet be another stream's. */
PLAY(try_get_one_on_s)
{
    play.p[3] = try_get(1, play.s, &play.status[3]);
}
PLAY(release_and_use_the_record_again)
{
    release(play.s);
    run_stream(play.s);
    run_stream(play.t); /* nothing is pending: who waits lets the others go on */
    poll_pool();
    poll_pool();
    CUstream u = world_stream(&play.w);
    put(get(1, u), u);
    put(get(1, u), u);
}
/* The same without a cache: a call has found the record to be its stream's. */
SCHEDULES(malloc_against_release_and_another_stream)
{
    explore_play("malloc, release, another stream", 0,
                 (struct exploration){.open = open_used,
                                      .close = close_plain,
                                      .act = {try_get_one_on_s, release_and_use_the_record_again}});
}
SCHEDULES(hit_against_release_and_another_stream)
{
    play.streams = VPMM_STREAMS_TRUSTED;
    explore_play("hit, release, another stream", CACHE_PAGES,
                 (struct exploration){.open = open_plain,
                                      .close = close_plain,
                                      .prepare = {keep_one_in_cache},
                                      .act = {try_get_one_on_s, release_and_use_the_record_again}});
}
/* A release that the driver refuses, while the owner lets go of the closed cache. */
PLAY(keep_one_and_refuse_records)
{
    put(get(1, play.s), play.s);
    vpmm_sim_fail(play.w.sim, "cuEventRecord", 1, CUDA_ERROR_OUT_OF_MEMORY, true);
}
PLAY(use_another_stream)
{
    vpmm_status status;
    CUdeviceptr p = try_get(1, play.t, &status);
    if (p)
        put(p, play.t);
}
PLAY(release_in_vain)
{
    vpmm_status status = vpmm_stream_release(play.w.pool, play.s);
    explore_check(status == VPMM_ERROR_DRIVER || status == VPMM_SUCCESS, "release: %s", vpmm_last_error());
}
PLAY(close_without_refusals)
{
    vpmm_sim_fail(play.w.sim, "cuEventRecord", 0, CUDA_SUCCESS, false);
    close_world();
}
SCHEDULES(refused_release_against_detach)
{
    play.streams = VPMM_STREAMS_TRUSTED;
    explore_play("refused release, detach", CACHE_PAGES,
                 (struct exploration){.open = open_plain,
                                      .close = close_without_refusals,
                                      .prepare = {keep_one_and_refuse_records},
                                      .act = {use_another_stream, release_in_vain}});
}
/* It makes the cache. */
PLAY(open_with_one)
{
    open_world();
    play.p[0] = get(1, play.s);
}
SCHEDULES(free_that_attaches_against_release)
{
    play.streams = VPMM_STREAMS_TRUSTED;
    explore_play("free that attaches, release", CACHE_PAGES,
                 (struct exploration){
                     .open = open_with_one, .close = close_with_a_second_release, .act = {put_held_on_s, release_s}});
}
SCHEDULES(release_against_release)
{
    explore_play("two releases", CACHE_PAGES,
                 (struct exploration){.open = open_plain,
                                      .close = close_with_a_second_release,
                                      .prepare = {keep_one_in_cache},
                                      .act = {release_s, release_s}});
}

/* What is in the cache of a thread that ends belongs to whoever finds it. */
SCHEDULES(thread_exit_against_flush)
{
    explore_play("exit, flush", CACHE_PAGES,
                 (struct exploration){.open = open_plain,
                                      .close = close_plain,
                                      .prepare = {keep_one_in_cache, meet_t},
                                      .act = {get_and_put_one, get_three_on_t},
                                      .threads_end = true});
}

/* A closed cache is let go of by its owner while another thread empties it, and the record goes to another stream. */
PLAY(close_s)
{
    release(play.s);
    run_stream(play.s);
}
PLAY(go_to_another_stream)
{
    poll_pool();
    put(get(1, play.t), play.t);
    poll_pool();
    CUstream u = world_stream(&play.w);
    put(get(1, u), u);
    get(1, u);
}
PLAY(release_and_go_on)
{
    release(play.s);
    run_stream(play.s);
    go_to_another_stream_now();
}
SCHEDULES(detach_against_flush)
{
    explore_play("detach, flush", CACHE_PAGES,
                 (struct exploration){.open = open_plain,
                                      .close = close_plain,
                                      .prepare = {keep_one_in_cache, close_s},
                                      .act = {go_to_another_stream, get_three_on_t}});
}
SCHEDULES(release_and_detach_against_flush)
{
    explore_play("release and detach, flush", CACHE_PAGES,
                 (struct exploration){.open = open_plain,
                                      .close = close_plain,
                                      .prepare = {keep_one_in_cache, meet_t},
                                      .act = {release_and_go_on, get_three_on_t}});
}
/* The other way about: one thread releases what another has in its cache, and frees on still. */
SCHEDULES(release_against_the_cache_of_another_thread)
{
    explore_play("release, another's cache", CACHE_PAGES,
                 (struct exploration){.open = open_plain,
                                      .close = close_plain,
                                      .prepare = {keep_one_in_cache, meet_t},
                                      .act = {pairs_on_t, release_and_go_on}});
}

/* ---- what is inside, called as the library calls it, for what is too far apart in whole operations ---- */

PLAY(flush_all)
{
    fronts_flush(&inside()->fronts, NULL, true);
}

/*
 * A thread is emptying a cache while its owner lets go of it, the record is retired and becomes another stream's, and
 * that one is filled, released and destroyed. The bits are noted as a free would have left them that came too late.
 */
PLAY(keep_one_and_close)
{
    put(get(1, play.s), play.s);
    release(play.s);
    run_stream(play.s);
    poll_pool();
    struct front *front = atomic_load(&inside()->fronts.first);
    for (struct cache *cache = atomic_load(&front->caches); cache; cache = cache->next) {
        atomic_store(&cache->regions.noted, 2);
        cache_list_noted(cache);
    }
}
PLAY(use_the_record_again)
{
    put(get(2, play.t), play.t);
    poll_pool();
    CUstream u = world_stream(&play.w);
    CUdeviceptr p = get(1, u);
    put(p, u);
    release(u);
    world_stream_destroy(&play.w, u);
}
SCHEDULES(record_used_again_against_flush)
{
    explore_play("record used again, flush", CACHE_PAGES,
                 (struct exploration){.open = open_plain,
                                      .close = close_plain,
                                      .prepare = {keep_one_and_close},
                                      .act = {use_the_record_again, flush_all}});
}

/* What a flush takes a number for was freed before; what is freed later, behind work that is later, is not its. */
PLAY(pass_once)
{
    poll_pool();
    run_stream(play.s);
    poll_pool();
}
PLAY(flush_and_get)
{
    fronts_flush(&inside()->fronts, NULL, false);
    get(1, play.t);
}
SCHEDULES(flush_against_free_and_pass)
{
    explore_play("flush, free, pass", CACHE_PAGES,
                 (struct exploration){.open = open_plain,
                                      .close = close_plain,
                                      .prepare = {hold_one, meet_t},
                                      .act = {get_and_put_one, flush_and_get, pass_once}});
}

/* Two threads that the pool has not met make their fronts, or adopt what another has left. */
PLAY(pair_on_s)
{
    put(get(1, play.s), play.s);
}
PLAY(close_two_fronts)
{
    unsigned fronts = 0, owners = 0;
    for (struct front *front = atomic_load(&inside()->fronts.first); front; front = front->next, fronts++)
        owners += atomic_load(&front->owner) != 0;
    explore_check(fronts == 2 && owners == 2, "%u fronts with %u owners, of two threads", fronts, owners);
    close_world();
}
SCHEDULES(two_new_fronts)
{
    explore_play("new fronts", CACHE_PAGES,
                 (struct exploration){.open = open_plain, .close = close_two_fronts, .act = {pair_on_s, pair_on_s}});
}
PLAY(leave_a_front)
{
    put(get(1, play.s), play.s);
    atomic_store(&((struct front *)atomic_load(&inside()->fronts.first))->owner, 0);
    memset(front_known, 0, sizeof front_known);
}
SCHEDULES(two_threads_and_a_front_that_was_left)
{
    explore_play(
        "adopted front", CACHE_PAGES,
        (struct exploration){
            .open = open_plain, .close = close_two_fronts, .prepare = {leave_a_front}, .act = {pair_on_s, pair_on_s}});
}

/* A stream is destroyed without a word, and its handle is another's, while a pass looks. */
PLAY(open_used_and_lost)
{
    open_used_now();
    world_stream_destroy(&play.w, play.s);
    play.s = world_stream(&play.w);
    keep_busy(&play.w, play.s);
}
PLAY(close_lost)
{
    play.lost = true;
    close_world();
}
PLAY(use_and_destroy)
{
    put(get(1, play.s), play.s);
    world_stream_destroy(&play.w, play.s);
    play.s = world_stream(&play.w);
    put(get(2, play.s), play.s);
}
SCHEDULES(stream_destroyed_without_a_word_against_pass)
{
    play.streams = VPMM_STREAMS_EAGER;
    explore_play("destroyed without a word, pass", 0,
                 (struct exploration){
                     .open = open_used_and_lost, .close = close_lost, .act = {use_and_destroy, poll_three_times}});
}

/* What is cached of such a stream, while a pass closes its cache and the cache's owner comes by. */
PLAY(keep_one_of_a_lost_stream)
{
    vpmm_malloc(play.w.pool, PAGE, play.s, &play.p[0]);
    put(get(1, play.s), play.s);
    world_stream_destroy(&play.w, play.s);
    play.s = world_stream(&play.w);
}
/* Which nothing was written to. */
PLAY(free_by_its_handle)
{
    vpmm_free(play.w.pool, play.p[0], play.s);
}
SCHEDULES(detach_against_a_pass_that_closes)
{
    explore_play("detach, close", CACHE_PAGES,
                 (struct exploration){.open = open_looked_at,
                                      .close = close_lost,
                                      .prepare = {keep_one_of_a_lost_stream, free_by_its_handle},
                                      .act = {use_another_stream, look_twice}});
}

/* Free memory that a thread has looked at is used by another on its stream, and free again. */
PLAY(open_passed)
{
    open_world();
    CUdeviceptr p = get(1, play.s);
    get(1, play.s);
    put(p, play.s);
    world_drain(&play.w);
}
SCHEDULES(malloc_of_what_changes_hands)
{
    explore_play(
        "changes hands", 0,
        (struct exploration){.open = open_passed, .close = close_plain, .act = {get_one_on_t, get_and_put_one}});
}

/* A run of two streams' regions that only their fences keep apart is joined while a pass moves one of them. */
PLAY(open_fenced_neighbours)
{
    open_world();
    hold_neighbours(2);
    keep_busy(&play.w, play.s);
    put(play.p[0], play.s);
    order_after(&play.w, play.t, play.s);
    keep_busy(&play.w, play.t);
    put(play.p[1], play.t);
    run_stream(play.s);
    keep_busy(&play.w, play.s);
    put(get(1, play.s), play.s);
}
PLAY(get_two_of_s)
{
    get(2, play.s);
}
PLAY(run_t_and_poll)
{
    run_stream(play.t);
    poll_pool();
}
SCHEDULES(join_against_pass)
{
    explore_play("join, pass", 0,
                 (struct exploration){
                     .open = open_fenced_neighbours, .close = close_plain, .act = {get_two_of_s, run_t_and_poll}});
}

/* What is freed after a mark's event was recorded does not pass with it. */
PLAY(run_and_put_second)
{
    run_stream(play.s);
    explore_check(write_later(&play.w, play.p[2], 1, ++play.stamp, play.s), "the write fails");
    put(play.p[2], play.s);
}
PLAY(close_marked)
{
    poll_pool();
    get(1, play.t);
    get(1, play.t);
    close_world();
}
SCHEDULES(free_against_mark)
{
    explore_play(
        "free, mark", 0,
        (struct exploration){.open = open_apart, .close = close_marked, .act = {put_first, run_and_put_second}});
}

/* The stream is released while another thread uses it, which makes a new record of it, or was before. */
SCHEDULES(release_against_pair_on_the_same_stream)
{
    explore_play("release, pair on it", 0,
                 (struct exploration){.open = open_used, .close = close_plain, .act = {release_s, get_and_put_one}});
}
