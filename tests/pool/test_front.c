/*
 * The threads' front caches: what is hit, what is not, and that nothing is lost or handed out too early by them.
 */
#include "base/clock.h"
#include "pool/pool.h"
#include "support.h"

#include <dirent.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/*
 * What the library aligns: fronts, caches, streams' records, pools. Counted, and refused if a test says so. The driver
 * is asked as always.
 */
static atomic_uint_fast64_t aligned_asked, aligned_refused_from = UINT64_MAX, aligned_refused_until;

void *aligned_alloc(size_t alignment, size_t bytes)
{
    uint64_t n = atomic_fetch_add(&aligned_asked, 1);
    void *memory = NULL;
    if (n >= atomic_load(&aligned_refused_from) && n < atomic_load(&aligned_refused_until))
        return NULL;
    return posix_memalign(&memory, alignment, bytes) == 0 ? memory : NULL;
}

enum { CACHE = 32 }; /* pages in a thread's cache; a quarter is the longest that is cached */

static struct setup cached(size_t pages)
{
    struct setup setup = setup_default();
    setup.pool.cache_bytes = pages * PAGE;
    return setup;
}

/* As much as a thread may cache once the pool no longer grows: with so many pages made before. */
static void open_steady(struct world *w, size_t cache_pages, size_t made_pages)
{
    struct setup setup = cached(cache_pages);
    setup.pool.va_size = (size_t)16 << 30;
    world_open(w, &setup);
    world_become_steady(w, made_pages);
}

static void open_cached(struct world *w)
{
    struct setup setup = cached(CACHE);
    world_open(w, &setup);
}

static struct setup with_reaper(size_t pages)
{
    struct setup setup = cached(pages);
    setup.sim.stepped = false;
    setup.pool.reaper = true;
    return setup;
}

static uint64_t hits(struct world *w)
{
    return stats_of(w).hits_cache;
}

static uint64_t cached_pages(struct world *w)
{
    return stats_of(w).cached_bytes / PAGE;
}

static void sleep_ms(long ms)
{
    struct timespec time = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    nanosleep(&time, NULL);
}

/* Each thread does `act` to its end before this returns. */
static void on_a_thread(void *(*act)(void *), void *argument)
{
    pthread_t thread;
    cr_assert_eq(pthread_create(&thread, NULL, act, argument), 0);
    pthread_join(thread, NULL);
}

/* A thread that does one thing after another, as it is told, and lives until it is dismissed. */
struct helper {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t told, done;
    vpmm_status (*act)(struct helper *);
    bool busy, dismissed;
    struct world *w;
    CUstream stream;
    size_t pages;
    CUdeviceptr pointer;
    vpmm_status status;
};

static void *help(void *argument)
{
    struct helper *h = argument;
    (void)h->w->driver->cuCtxSetCurrent(h->w->context);
    pthread_mutex_lock(&h->lock);
    while (!h->dismissed) {
        if (h->busy) {
            h->status = h->act(h);
            h->busy = false;
            pthread_cond_signal(&h->done);
        }
        pthread_cond_wait(&h->told, &h->lock);
    }
    pthread_mutex_unlock(&h->lock);
    return NULL;
}

static void helper_start(struct helper *h, struct world *w)
{
    *h = (struct helper){.w = w};
    pthread_mutex_init(&h->lock, NULL);
    pthread_cond_init(&h->told, NULL);
    pthread_cond_init(&h->done, NULL);
    cr_assert_eq(pthread_create(&h->thread, NULL, help, h), 0);
}

static vpmm_status tell(struct helper *h, vpmm_status (*act)(struct helper *))
{
    pthread_mutex_lock(&h->lock);
    h->act = act;
    h->busy = true;
    pthread_cond_signal(&h->told);
    while (h->busy)
        pthread_cond_wait(&h->done, &h->lock);
    pthread_mutex_unlock(&h->lock);
    return h->status;
}

static void helper_end(struct helper *h)
{
    pthread_mutex_lock(&h->lock);
    h->dismissed = true;
    pthread_cond_signal(&h->told);
    pthread_mutex_unlock(&h->lock);
    pthread_join(h->thread, NULL);
}

static vpmm_status helper_malloc(struct helper *h)
{
    return vpmm_malloc(h->w->pool, h->pages * PAGE, h->stream, &h->pointer);
}

static vpmm_status helper_free(struct helper *h)
{
    return vpmm_free(h->w->pool, h->pointer, h->stream);
}

static CUdeviceptr helper_take(struct helper *h, size_t pages, CUstream stream)
{
    h->pages = pages;
    h->stream = stream;
    must_work(tell(h, helper_malloc));
    return h->pointer;
}

static void helper_give(struct helper *h, CUdeviceptr pointer, CUstream stream)
{
    h->pointer = pointer;
    h->stream = stream;
    must_work(tell(h, helper_free));
}

/* --- hits ----------------------------------------------------------------------------------------------------------
 */

Test(front, a_hit_is_the_newest_of_its_length)
{
    struct world w;
    open_steady(&w, CACHE, 12);
    CUstream s = world_stream(&w);
    CUdeviceptr p[6];
    for (int i = 0; i < 6; i++)
        p[i] = take(&w, 2, s);
    uint64_t before = hits(&w);
    for (int i = 0; i < 6; i++) {
        fill(&w, p[i], 2, (uint32_t)i, s);
        expect_later(&w, p[i], 2, (uint32_t)i, s);
        give(&w, p[i], s);
        cr_expect_eq(cached_pages(&w), 2 * (uint64_t)(i + 1));
        cr_expect_geq(stats_of(&w).reusable_bytes, stats_of(&w).cached_bytes);
        world_audit(&w);
    }
    for (int i = 5; i >= 0; i--) {
        cr_expect_eq(take(&w, 2, s), p[i], "not the newest");
        fill(&w, p[i], 2, 7, s);
        expect_later(&w, p[i], 2, 7, s);
        cr_expect_eq(hits(&w) - before, 6 - (uint64_t)i);
        cr_expect_eq(cached_pages(&w), 2 * (uint64_t)i);
        world_audit(&w);
    }
    for (int i = 0; i < 6; i++)
        give(&w, p[i], s);
    world_close(&w);
}

Test(front, only_the_exact_length_is_a_hit)
{
    struct world w;
    open_cached(&w);
    CUstream s = world_stream(&w);
    give(&w, take(&w, 3, s), s);
    uint64_t before = hits(&w);
    CUdeviceptr p = take(&w, 2, s);
    cr_expect_eq(hits(&w), before);
    world_audit(&w);
    give(&w, p, s);
    p = take(&w, 4, s);
    cr_expect_eq(hits(&w), before);
    give(&w, p, s);
    cr_expect_eq(take_bytes(&w, 4 * PAGE - 1, s), p, "a length is of pages, not of bytes");
    cr_expect_eq(stats_of(&w).requested_bytes, 4 * PAGE - 1);
    cr_expect_eq(hits(&w), before + 1);
    give(&w, p, s);
    world_audit(&w);
    world_close(&w);
}

/* Lengths and counts that no bin has room for, up to the longest; each step audited. */
static void many(size_t lengths, size_t of_each, size_t cache, size_t va_pages)
{
    struct setup setup = cached(cache);
    setup.pool.va_size = va_pages * PAGE;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr *p = calloc(lengths * of_each, sizeof *p);
    cr_assert_not_null(p);
    for (size_t round = 0; round < 3; round++) {
        for (size_t i = 0; i < lengths * of_each; i++)
            p[i] = take(&w, 1 + i / of_each, s);
        for (size_t i = 0; i < lengths * of_each; i++) {
            give(&w, p[i], s);
            require(cached_pages(&w) <= cache, "%llu pages are cached", (unsigned long long)cached_pages(&w));
            if (i % 16 == 0)
                world_audit(&w);
        }
        world_audit(&w);
    }
    cr_expect_gt(hits(&w), 0);
    uint64_t cached_before = cached_pages(&w), hits_before = hits(&w);
    cr_expect_gt(cached_before, 0);
    for (size_t i = lengths * of_each; i-- > 0;) /* the longest first, which leaves the others where they are */
        p[i] = take(&w, 1 + i / of_each, s);
    cr_expect_gt(hits(&w), hits_before);
    world_audit(&w);
    for (size_t i = 0; i < lengths * of_each; i++)
        give(&w, p[i], s);
    free(p);
    world_close(&w);
}

Test(front, more_than_31_of_one_length, .timeout = 60)
{
    many(2, 100, 1024, 512);
}
Test(front, more_than_64_lengths_that_share_bins, .timeout = 60)
{
    many(90, 1, 4096, 8192);
}
Test(front, more_lengths_than_a_small_cache_holds, .timeout = 60)
{
    many(12, 9, 40, 512);
}
Test(front, chunks_of_address_space_beyond_the_first, .timeout = 60)
{
    many(8, 12, 512, 16);
}

/* Two lengths above 32 pages that have the same two bins, and a third: whoever leaves is found by all. */
Test(front, a_length_leaves_its_bin_to_another, .timeout = 60)
{
    struct world w;
    open_steady(&w, 2048, 1024);
    CUstream s = world_stream(&w);
    for (size_t first = 33; first < 100; first += 7) {
        CUdeviceptr p = take(&w, first, s);
        for (size_t second = first + 1; second < first + 70; second++) {
            CUdeviceptr q = take(&w, second, s);
            give(&w, q, s);
            uint64_t before = hits(&w);
            require(take(&w, second, s) == q, "%zu pages are not hit", second);
            require(hits(&w) == before + 1, "%zu pages are not hit", second);
            give(&w, q, s);
        }
        give(&w, p, s);
        world_audit(&w);
    }
    world_close(&w);
}

Test(front, what_is_longer_than_the_limit_is_not_cached)
{
    struct world w;
    open_steady(&w, CACHE, 2 * CACHE + 1);
    CUstream s = world_stream(&w);
    CUdeviceptr p = take(&w, CACHE, s), q = take(&w, CACHE + 1, s);
    give(&w, q, s);
    cr_expect_eq(cached_pages(&w), 0);
    give(&w, p, s);
    cr_expect_eq(cached_pages(&w), CACHE);
    world_audit(&w);
    world_close(&w);
}

/* All are taken, and given one by one: how many pages the cache has then, and had at most. */
static uint64_t fill_cache(struct world *w, CUstream s, CUdeviceptr *p, int pages)
{
    uint64_t most = 0;
    for (int i = 0; i < pages; i++)
        p[i] = take(w, 1, s);
    for (int i = 0; i < pages; i++) {
        give(w, p[i], s);
        most = cached_pages(w) > most ? cached_pages(w) : most;
    }
    return most;
}

/* 8 MiB while the pool takes shape, whatever the setting, and then more bit by bit; new memory begins that anew. */
Test(front, a_cache_is_small_until_the_pool_keeps_its_shape)
{
    enum { FIRST = 4, STEADY = 17000 };
    struct setup setup = cached(4 * FIRST);
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr p[4 * FIRST];
    for (uint64_t limit = FIRST; limit <= 4 * FIRST; limit *= 2) {
        uint64_t most = fill_cache(&w, s, p, 4 * FIRST);
        require(most <= limit && most > limit / 2, "%llu pages are cached", (unsigned long long)most);
        for (int i = 0; i < STEADY; i++)
            give(&w, take(&w, 1, s), s);
    }
    CUdeviceptr longer = take(&w, 3 * FIRST, s);
    give(&w, take(&w, 1, s), s);
    cr_expect_leq(cached_pages(&w), FIRST);
    give(&w, longer, s);
    world_audit(&w);
    world_close(&w);
}

/* Memory that moves changes the pool's shape as new memory does. */
Test(front, a_cache_is_small_again_when_memory_has_moved)
{
    enum { FIRST = 4, BLOCKS = 8 };
    struct setup setup = cached(2 * BLOCKS);
    setup.pool.max_mapped = (2 * BLOCKS + 1) * PAGE;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr p[BLOCKS];
    for (int i = 0; i < BLOCKS; i++) /* of a handle each */
        p[i] = take(&w, 2, s);
    give(&w, take(&w, 1, s), s);
    for (int i = 0; i < BLOCKS; i++)
        give(&w, p[i], s);
    world_become_steady(&w, 0);
    for (int i = 0; i < BLOCKS; i++)
        p[i] = take(&w, 2, s);
    for (int i = 0; i < BLOCKS; i += 2)
        give(&w, p[i], s);
    cr_assert_gt(cached_pages(&w), FIRST);
    must_work(vpmm_trim(w.pool, SIZE_MAX, NULL));
    uint64_t remapped = stats_of(&w).extents_remapped;
    CUdeviceptr moved = take(&w, BLOCKS, s);
    cr_assert_gt(stats_of(&w).extents_remapped, remapped);
    for (int i = 1; i < BLOCKS; i += 2)
        give(&w, p[i], s);
    cr_expect_leq(cached_pages(&w), FIRST);
    give(&w, moved, s);
    world_audit(&w);
    world_close(&w);
}

Test(front, no_thread_caches_more_than_it_may)
{
    struct world w;
    open_cached(&w);
    CUstream s[3] = {world_stream(&w), world_stream(&w), world_stream(&w)};
    CUdeviceptr p[60];
    size_t pages[60];
    uint32_t random = 1;
    for (int round = 0; round < 40; round++) {
        for (int i = 0; i < 60; i++) {
            random = random * 1664525 + 1013904223;
            pages[i] = 1 + (random >> 20) % (CACHE / 4 + 2);
            p[i] = take(&w, pages[i], s[i % 3]);
        }
        for (int i = 0; i < 60; i++) {
            give(&w, p[i], s[i % 3]);
            require(cached_pages(&w) <= CACHE, "%llu pages are cached", (unsigned long long)cached_pages(&w));
        }
        world_audit(&w);
    }
    world_close(&w);
}

/* One page may be all that there is room for. */
Test(front, a_cache_of_one_page_caches_one)
{
    struct setup setup = cached(1);
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w), t = world_stream(&w);
    CUdeviceptr p = take(&w, 1, s), q = take(&w, 1, t);
    give(&w, p, s);
    cr_expect_eq(cached_pages(&w), 1);
    give(&w, q, t);
    cr_expect_eq(cached_pages(&w), 1);
    cr_expect_eq(take(&w, 1, t), q);
    cr_expect_eq(hits(&w), 1);
    give(&w, q, t);
    world_audit(&w);
    world_close(&w);
}

Test(front, more_streams_than_a_thread_finds_at_once, .timeout = 60)
{
    enum { STREAMS = 150 };
    struct world w;
    open_steady(&w, 1024, 2 * STREAMS);
    CUstream s[STREAMS];
    CUdeviceptr p[STREAMS];
    for (int i = 0; i < STREAMS; i++) {
        cr_assert_eq(w.driver->cuStreamCreate(&s[i], CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
        p[i] = take(&w, 1, s[i]);
    }
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < STREAMS; i++)
            give(&w, p[i], s[i]);
        world_audit(&w);
        uint64_t before = hits(&w);
        for (int i = 0; i < STREAMS; i++)
            require(take(&w, 1, s[i]) == p[i], "stream %d gets another's memory", i);
        cr_expect_eq(hits(&w), before + STREAMS);
    }
    for (int i = 0; i < STREAMS; i++) {
        give(&w, p[i], s[i]);
        must_work(vpmm_stream_release(w.pool, s[i]));
        cr_assert_eq(w.driver->cuStreamDestroy(s[i]), CUDA_SUCCESS);
    }
    world_audit(&w);
    world_close(&w);
}

/* --- pointers that are wrong ----------------------------------------------------------------------------------------
 */

Test(front, a_double_free_is_found_while_the_memory_is_cached)
{
    struct world w;
    open_cached(&w);
    CUstream s = world_stream(&w), other = world_stream(&w);
    CUdeviceptr p = take(&w, 3, s), live = take(&w, 3, s);
    give(&w, p, s);
    vpmm_stats before = stats_of(&w);
    const CUdeviceptr wrong[] = {p, p + PAGE,   p + 2 * PAGE,         p + 1, live + PAGE, p - 1, live + 4096, PAGE,
                                 1, UINT64_MAX, ~(CUdeviceptr)0 << 21};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        must_fail(VPMM_ERROR_INVALID_POINTER, vpmm_free(w.pool, wrong[i], s));
        must_fail(VPMM_ERROR_INVALID_POINTER, vpmm_free(w.pool, wrong[i], other));
    }
    vpmm_stats after = stats_of(&w);
    cr_expect_eq(after.frees, before.frees);
    cr_expect_eq(after.cached_bytes, before.cached_bytes);
    cr_expect_eq(after.live_bytes, before.live_bytes);
    cr_expect_eq(after.requested_bytes, before.requested_bytes);
    world_audit(&w);
    cr_expect_eq(take(&w, 3, s), p);
    give(&w, live, s);
    give(&w, p, s);
    world_close(&w);
}

struct double_free {
    struct world *w;
    CUstream stream;
    CUdeviceptr pointer;
    pthread_barrier_t *together;
    int rounds, freed, wrong;
};

static void *free_what_is_there(void *argument)
{
    struct double_free *d = argument;
    (void)d->w->driver->cuCtxSetCurrent(d->w->context);
    for (int i = 0; i < d->rounds; i++) {
        pthread_barrier_wait(d->together);
        vpmm_status status = vpmm_free(d->w->pool, *(volatile CUdeviceptr *)&d->pointer, d->stream);
        d->freed += status == VPMM_SUCCESS;
        d->wrong += status != VPMM_SUCCESS && status != VPMM_ERROR_INVALID_POINTER;
        pthread_barrier_wait(d->together);
    }
    return NULL;
}

static void free_at_once(bool other_stream)
{
    enum { ROUNDS = 3000 };
    struct world w;
    open_cached(&w);
    CUstream s = world_stream(&w), t = other_stream ? world_stream(&w) : s;
    pthread_barrier_t together;
    pthread_barrier_init(&together, NULL, 3);
    struct double_free d[2] = {{.w = &w, .stream = s, .together = &together, .rounds = ROUNDS},
                               {.w = &w, .stream = t, .together = &together, .rounds = ROUNDS}};
    pthread_t thread[2];
    for (int i = 0; i < 2; i++)
        pthread_create(&thread[i], NULL, free_what_is_there, &d[i]);
    int good = 0;
    for (int i = 0; i < ROUNDS; i++) {
        CUdeviceptr p = 0;
        good += vpmm_malloc(w.pool, 2 * PAGE, s, &p) == VPMM_SUCCESS;
        d[0].pointer = d[1].pointer = p;
        pthread_barrier_wait(&together);
        pthread_barrier_wait(&together);
    }
    for (int i = 0; i < 2; i++)
        pthread_join(thread[i], NULL);
    pthread_barrier_destroy(&together);
    cr_expect_eq(good, ROUNDS);
    cr_expect_eq(d[0].freed + d[1].freed, ROUNDS, "%d frees of %d allocations", d[0].freed + d[1].freed, ROUNDS);
    cr_expect_eq(d[0].wrong + d[1].wrong, 0);
    cr_expect_eq(stats_of(&w).live_bytes, 0);
    world_audit(&w);
    world_close(&w);
}

Test(front, of_two_threads_that_free_at_once_one_succeeds, .timeout = 60)
{
    free_at_once(false);
}
Test(front, of_two_threads_that_free_at_once_on_two_streams_one_succeeds, .timeout = 60)
{
    free_at_once(true);
}

/* --- stream order ---------------------------------------------------------------------------------------------------
 */

static void another_stream_asks(vpmm_reuse reuse, bool done)
{
    struct setup setup = cached(CACHE);
    setup.pool.reuse = reuse;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w), other = world_stream(&w);
    CUdeviceptr p = take(&w, 4, s);
    fill(&w, p, 4, 1, s);
    expect_later(&w, p, 4, 1, s);
    give(&w, p, s);
    if (done) {
        must_work(vpmm_trim(w.pool, SIZE_MAX, NULL)); /* which marks it, and gives nothing back */
        world_drain(&w);
    }
    vpmm_stats before = stats_of(&w);
    CUdeviceptr q = take(&w, 4, other);
    vpmm_stats after = stats_of(&w);
    bool may_have = done || reuse != VPMM_REUSE_COMPLETED;
    cr_expect_eq(q == p, may_have);
    cr_expect_eq(after.hits_cache, before.hits_cache, "a hit of another stream's");
    cr_expect_eq(after.hits_completed - before.hits_completed, done);
    cr_expect_eq(after.hits_waited - before.hits_waited, !done && may_have);
    cr_expect_eq(after.builds - before.builds, !may_have);
    fill(&w, q, 4, 2, other);
    expect_later(&w, q, 4, 2, other);
    world_run(&w, other, SIZE_MAX);
    world_step(&w);
    world_audit(&w);
    give(&w, q, other);
    world_close(&w);
}

Test(front, another_stream_waits_for_cached_memory)
{
    another_stream_asks(VPMM_REUSE_WAIT_DEVICE, false);
}
Test(front, another_stream_gets_cached_memory_whose_work_is_done)
{
    another_stream_asks(VPMM_REUSE_WAIT_DEVICE, true);
}
Test(front, an_independent_stream_builds_beside_cached_memory)
{
    another_stream_asks(VPMM_REUSE_COMPLETED, false);
}
Test(front, an_independent_stream_gets_cached_memory_whose_work_is_done)
{
    another_stream_asks(VPMM_REUSE_COMPLETED, true);
}
Test(front, the_host_waits_for_cached_memory)
{
    another_stream_asks(VPMM_REUSE_WAIT_HOST, false);
}

/* Freed on another stream than it was allocated on, now in the cache of that one. */
Test(front, memory_is_cached_for_the_stream_that_it_was_freed_on)
{
    struct world w;
    open_cached(&w);
    CUstream a = world_stream(&w), b = world_stream(&w);
    CUdeviceptr p = take(&w, 4, a);
    fill(&w, p, 4, 1, a);
    order_after(&w, b, a);
    expect_later(&w, p, 4, 1, b);
    give(&w, p, b);
    world_audit(&w);
    cr_expect_eq(take(&w, 4, b), p);
    cr_expect_eq(hits(&w), 1);
    fill(&w, p, 4, 2, b);
    give(&w, p, b);
    CUdeviceptr q = take(&w, 4, a);
    cr_expect_eq(q, p);
    cr_expect_eq(stats_of(&w).hits_waited, 1);
    fill(&w, q, 4, 3, a);
    expect_later(&w, q, 4, 3, a);
    give(&w, q, a);
    world_close(&w);
}

/* --- nothing is stranded --------------------------------------------------------------------------------------------
 */

enum asker { SAME_STREAM, OTHER_STREAM, OTHER_THREAD };

static void all_is_cached(enum asker asker, size_t pages, vpmm_reuse reuse)
{
    struct setup setup = cached(CACHE);
    setup.pool.max_mapped = 16 * PAGE;
    setup.pool.reuse = reuse;
    struct world w;
    world_open(&w, &setup);
    world_become_steady(&w, 16);
    CUstream s = world_stream(&w), other = world_stream(&w);
    struct helper h;
    helper_start(&h, &w);
    CUdeviceptr p[8];
    for (int i = 0; i < 8; i++)
        p[i] = take(&w, 2, s);
    for (int i = 0; i < 8; i++) {
        fill(&w, p[i], 2, (uint32_t)i, s);
        give(&w, p[(i * 3) % 8], s);
    }
    cr_assert_eq(cached_pages(&w), 16);
    CUstream asking = asker == SAME_STREAM ? s : other;
    CUdeviceptr q = asker == OTHER_THREAD ? helper_take(&h, pages, asking) : take(&w, pages, asking);
    fill(&w, q, pages, 9, asking);
    expect_later(&w, q, pages, 9, asking);
    world_audit(&w);
    give(&w, q, asking);
    helper_end(&h);
    world_close(&w);
}

Test(front, cached_memory_serves_another_length_of_its_stream)
{
    all_is_cached(SAME_STREAM, 1, VPMM_REUSE_WAIT_DEVICE);
    all_is_cached(SAME_STREAM, 16, VPMM_REUSE_COMPLETED);
}
Test(front, cached_memory_serves_another_stream_before_it_is_refused)
{
    all_is_cached(OTHER_STREAM, 2, VPMM_REUSE_COMPLETED);
    all_is_cached(OTHER_STREAM, 16, VPMM_REUSE_WAIT_DEVICE);
    all_is_cached(OTHER_STREAM, 13, VPMM_REUSE_WAIT_HOST);
}
Test(front, cached_memory_serves_another_thread_before_it_is_refused)
{
    all_is_cached(OTHER_THREAD, 2, VPMM_REUSE_COMPLETED);
    all_is_cached(OTHER_THREAD, 16, VPMM_REUSE_WAIT_DEVICE);
}

Test(front, trim_gives_cached_memory_back)
{
    struct world w;
    open_cached(&w);
    CUstream s = world_stream(&w);
    struct helper h;
    helper_start(&h, &w);
    give(&w, take(&w, 3, s), s);
    CUdeviceptr theirs = helper_take(&h, 4, s);
    helper_give(&h, theirs, s);
    cr_expect_eq(cached_pages(&w), 4, "%llu", (unsigned long long)cached_pages(&w));
    size_t released = 0;
    must_work(vpmm_trim(w.pool, SIZE_MAX, &released));
    cr_expect_eq(cached_pages(&w), 0);
    cr_expect_eq(released, 0);
    world_drain(&w);
    must_work(vpmm_trim(w.pool, 0, &released));
    cr_expect_eq(stats_of(&w).mapped_bytes, 0);
    cr_expect_geq(released, 4 * PAGE);
    world_audit(&w);
    helper_end(&h);
    world_close(&w);
}

/* The driver's pool for small requests gets what this one has cached. */
Test(front, a_small_request_takes_cached_memory_back)
{
    needs_simulator();
    struct setup setup = cached(32);
    setup.sim.memory_bytes = 32 * PAGE;
    setup.pool.small = VPMM_SMALL_ASYNC;
    struct world w;
    world_open(&w, &setup);
    world_become_steady(&w, 32);
    CUstream s = world_stream(&w);
    CUdeviceptr p[8];
    for (int i = 0; i < 8; i++)
        p[i] = take(&w, 4, s);
    for (int i = 0; i < 8; i++)
        give(&w, p[i], s);
    cr_assert_eq(cached_pages(&w), 32);
    CUdeviceptr small = take_bytes(&w, 1000, s);
    world_audit(&w);
    give(&w, small, s);
    world_close(&w);
}

/*
 * A slot from which a region was stolen may come to name a shorter one, cached by another thread: it is not taken for
 * what the slot's bin says.
 */
Test(front, a_slot_that_names_a_shorter_region_by_now_is_not_taken_for_a_long_one)
{
    struct world w;
    open_cached(&w);
    CUstream s = world_stream(&w);
    struct helper h;
    helper_start(&h, &w);
    CUdeviceptr p = take(&w, 4, s);
    give(&w, p, s);
    cr_assert_eq(helper_take(&h, 4, s), p);
    helper_give(&h, p, s);
    cr_assert_eq(helper_take(&h, 1, s), p);
    CUdeviceptr rest = helper_take(&h, 3, s);
    helper_give(&h, p, s); /* one page now, where this thread's slot still says four */
    CUdeviceptr q = take(&w, 2, s);
    cr_expect_neq(q, p);
    fill(&w, q, 2, 1, s);
    expect_later(&w, q, 2, 1, s);
    world_audit(&w);
    give(&w, q, s);
    helper_give(&h, rest, s);
    helper_end(&h);
    world_close(&w);
}

static vpmm_status take_and_give(struct helper *h)
{
    CUdeviceptr p;
    vpmm_status status = vpmm_malloc(h->w->pool, PAGE, h->stream, &p);
    return status == VPMM_SUCCESS ? vpmm_free(h->w->pool, p, h->stream) : status;
}

/* What a pair asks the driver: of a hit, nothing, or where the build has checks, whether the stream captures. */
static uint64_t calls_of_a_pair(struct world *w, vpmm_pool *pool, CUstream stream)
{
    w->pool = pool;
    uint64_t before = world_calls(w, "cuStreamIsCapturing");
    give(w, take(w, 1, stream), stream);
    return world_calls(w, "cuStreamIsCapturing") - before;
}

/* However many threads come between two pools: a thread that takes from both in turn hits in both. */
Test(front, pools_in_turn_are_hit_whatever_came_between)
{
    needs_simulator();
    enum { BETWEEN = 8 };
    struct setup setup = cached(CACHE);
    struct world w;
    world_open(&w, &setup);
    setup.pool.driver = w.driver;
    CUstream s = world_stream(&w);
    vpmm_pool *first = w.pool;
    for (int i = 0; i < BETWEEN; i++) {
        struct helper h;
        helper_start(&h, &w);
        h.stream = s;
        must_work(tell(&h, take_and_give));
        helper_end(&h);
        vpmm_pool *second;
        must_work(vpmm_pool_create(&setup.pool, &second));
        calls_of_a_pair(&w, second, s);
        calls_of_a_pair(&w, first, s);
        uint64_t hit = calls_of_a_pair(&w, first, s);
        for (int turn = 0; turn < 4; turn++)
            require(calls_of_a_pair(&w, turn % 2 ? first : second, s) == hit, "after %d threads: not a hit", i + 1);
        must_work(vpmm_stream_release(second, s));
        must_work(vpmm_pool_destroy(second));
        w.pool = first;
    }
    world_close(&w);
}

/* A pool for each GPU of a host: a thread finds its front of each without a search, whichever it used before. */
Test(front, as_many_pools_as_a_host_has_gpus_are_hit_in_turn)
{
    needs_simulator();
    enum { POOLS = 8 };
    struct setup setup = cached(CACHE);
    struct world w;
    vpmm_pool *pool[POOLS];
    world_open(&w, &setup);
    setup.pool.driver = w.driver;
    CUstream s = world_stream(&w);
    uint64_t hit = 0;
    pool[0] = w.pool;
    for (int i = 0; i < POOLS; i++) {
        if (i)
            must_work(vpmm_pool_create(&setup.pool, &pool[i]));
        calls_of_a_pair(&w, pool[i], s);
        hit = calls_of_a_pair(&w, pool[i], s);
    }
    for (int i = 0; i < POOLS; i++)
        for (int k = 0; k < i; k++)
            for (int turn = 0; turn < 4; turn++)
                require(calls_of_a_pair(&w, pool[turn % 2 ? i : k], s) == hit, "pools %d and %d: not a hit", k, i);
    for (int i = 1; i < POOLS; i++) {
        must_work(vpmm_stream_release(pool[i], s));
        must_work(vpmm_pool_destroy(pool[i]));
    }
    w.pool = pool[0];
    world_close(&w);
}

/* --- neighbours -----------------------------------------------------------------------------------------------------
 */

Test(front, memory_freed_in_another_thread_is_hit_and_then_its_hints)
{
    enum { PAGES = 4 }; /* what a cache holds at first */
    struct world w;
    open_cached(&w);
    CUstream s = world_stream(&w), other = world_stream(&w);
    struct helper h;
    helper_start(&h, &w);
    CUdeviceptr p[PAGES];
    for (int i = 0; i < PAGES; i++)
        p[i] = take(&w, 1, s);
    for (int i = 0; i < PAGES; i++)
        helper_give(&h, p[i], s);
    cr_expect_eq(cached_pages(&w), PAGES);
    vpmm_stats before = stats_of(&w);
    for (int i = PAGES - 1; i >= 0; i--) {
        CUdeviceptr q = take(&w, 1, s);
        bool known = false;
        for (int k = 0; k < PAGES; k++)
            known |= q == p[k];
        cr_expect(known, "it is not what the other thread freed");
        world_audit(&w);
    }
    vpmm_stats after = stats_of(&w);
    cr_expect_eq(after.hits_neighbour - before.hits_neighbour, 1);
    cr_expect_eq(after.hits_cache - before.hits_cache, PAGES - 1, "its hints are not used");
    cr_expect_eq(after.mallocs - before.mallocs, PAGES);
    cr_expect_eq(after.cached_bytes, 0);
    for (int i = 0; i < PAGES; i++)
        give(&w, p[i], s);
    CUdeviceptr q = helper_take(&h, 1, other); /* the same memory is nobody's without a wait on another stream */
    cr_expect_eq(stats_of(&w).hits_neighbour, after.hits_neighbour);
    helper_give(&h, q, other);
    world_audit(&w);
    helper_end(&h);
    world_close(&w);
}

/* Hints of memory that its freer takes again are passed over, whatever became of it. */
Test(front, hints_that_have_gone_stale_are_passed_over)
{
    struct world w;
    open_cached(&w);
    CUstream s = world_stream(&w), other = world_stream(&w);
    struct helper h;
    helper_start(&h, &w);
    CUdeviceptr p[5];
    for (int round = 0; round < 20; round++) {
        for (int i = 0; i < 5; i++)
            p[i] = helper_take(&h, 2, s);
        for (int i = 0; i < 5; i++)
            helper_give(&h, p[i], s);
        CUdeviceptr stolen = take(&w, 2, s);
        CUdeviceptr theirs[4];
        for (int i = 0; i < 4; i++)
            theirs[i] = helper_take(&h, 2, s);
        if (round % 2 == 0) /* now of another stream */
            order_after(&w, other, s);
        for (int i = 0; i < 4; i++) {
            if (round % 2 == 0)
                helper_give(&h, theirs[i], other);
        }
        CUdeviceptr fresh = take(&w, 2, s);
        for (int i = 0; i < 4; i++)
            require(round % 2 == 0 || fresh != theirs[i], "memory has two owners");
        fill(&w, fresh, 2, 1, s);
        expect_later(&w, fresh, 2, 1, s);
        world_audit(&w);
        give(&w, fresh, s);
        give(&w, stolen, s);
        for (int i = 0; i < 4 && round % 2 != 0; i++)
            helper_give(&h, theirs[i], s);
        world_audit(&w);
    }
    helper_end(&h);
    world_close(&w);
}

/* More threads than a stream knows neighbours of: what they have is found all the same. */
Test(front, twelve_threads_share_a_stream)
{
    enum { THREADS = 12 };
    struct setup setup = cached(CACHE);
    setup.pool.max_mapped = 2 * THREADS * PAGE;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    struct helper h[THREADS];
    CUdeviceptr p[THREADS];
    for (int i = 0; i < THREADS; i++)
        helper_start(&h[i], &w);
    for (int round = 0; round < 5; round++) {
        for (int i = 0; i < THREADS; i++)
            p[i] = helper_take(&h[i], 2, s);
        for (int i = 0; i < THREADS; i++)
            helper_give(&h[i], p[i], s);
        world_audit(&w);
        for (int i = 0; i < THREADS; i++)
            p[i] = take(&w, 2, s);
        for (int i = 0; i < THREADS; i++)
            give(&w, p[i], s);
        world_audit(&w);
    }
    for (int i = 0; i < THREADS; i++)
        helper_end(&h[i]);
    world_close(&w);
}

/* --- threads that end -----------------------------------------------------------------------------------------------
 */

struct short_life {
    struct world *w;
    CUstream stream;
    size_t pages;
    CUdeviceptr pointer;
    vpmm_status status;
};

static void *malloc_free_and_end(void *argument)
{
    struct short_life *l = argument;
    (void)l->w->driver->cuCtxSetCurrent(l->w->context);
    l->status = vpmm_malloc(l->w->pool, l->pages * PAGE, l->stream, &l->pointer);
    if (l->status == VPMM_SUCCESS)
        l->status = vpmm_free(l->w->pool, l->pointer, l->stream);
    return NULL;
}

Test(front, an_ended_thread_leaves_its_memory_to_others)
{
    struct setup setup = cached(CACHE);
    setup.pool.max_mapped = 4 * PAGE;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w), other = world_stream(&w);
    struct short_life l = {.w = &w, .stream = s, .pages = 4};
    on_a_thread(malloc_free_and_end, &l);
    cr_assert_eq(l.status, VPMM_SUCCESS);
    cr_expect_eq(cached_pages(&w), 4);
    world_audit(&w);
    CUdeviceptr p = take(&w, 4, s); /* its front is this thread's now, or its neighbour's */
    cr_expect_eq(p, l.pointer);
    cr_expect_eq(stats_of(&w).hits_cache + stats_of(&w).hits_neighbour, 1);
    give(&w, p, s);
    on_a_thread(malloc_free_and_end, &l);
    cr_assert_eq(l.status, VPMM_SUCCESS);
    p = take(&w, 3, other);
    world_audit(&w);
    give(&w, p, other);
    world_close(&w);
}

Test(front, a_thousand_short_threads_share_a_front, .timeout = 60)
{
    struct world w;
    open_cached(&w);
    CUstream s = world_stream(&w);
    struct short_life l = {.w = &w, .stream = s, .pages = 4};
    for (int i = 0; i < 10; i++)
        on_a_thread(malloc_free_and_end, &l);
    uint64_t before = atomic_load(&aligned_asked);
    for (int i = 0; i < 1000; i++) {
        on_a_thread(malloc_free_and_end, &l);
        require(l.status == VPMM_SUCCESS, "thread %d: %s", i, vpmm_status_name(l.status));
    }
    cr_expect_eq(atomic_load(&aligned_asked), before, "each thread has a front of its own");
    cr_expect_eq(stats_of(&w).mapped_bytes, 4 * PAGE);
    cr_expect_eq(stats_of(&w).mallocs, 1010);
    world_audit(&w);
    world_close(&w);
}

static pthread_key_t late_key;
static _Thread_local int rounds;

static void use_once_more(void *argument)
{
    malloc_free_and_end(argument);
    if (++rounds < PTHREAD_DESTRUCTOR_ITERATIONS)
        pthread_setspecific(late_key, argument);
}

static void *use_to_the_last(void *argument)
{
    pthread_setspecific(late_key, argument);
    return malloc_free_and_end(argument);
}

/* In the last round of destructors nobody tells the library any more that the thread has ended. */
Test(front, threads_that_allocate_in_each_round_of_their_destructors_share_a_front, .timeout = 60)
{
    struct world w;
    open_cached(&w);
    CUstream s = world_stream(&w);
    struct short_life l = {.w = &w, .stream = s, .pages = 4};
    cr_assert_eq(pthread_key_create(&late_key, use_once_more), 0);
    for (int i = 0; i < 10; i++)
        on_a_thread(use_to_the_last, &l);
    uint64_t before = atomic_load(&aligned_asked);
    for (int i = 0; i < 200; i++) {
        on_a_thread(use_to_the_last, &l);
        require(l.status == VPMM_SUCCESS, "thread %d: %s", i, vpmm_status_name(l.status));
    }
    cr_expect_eq(atomic_load(&aligned_asked), before, "each thread has a front of its own");
    world_audit(&w);
    world_close(&w);
}

/* Only its own thread can record on a per-thread stream: what it leaves must not wait for that for ever. */
Test(front, threads_with_a_stream_of_their_own_leave_no_memory_behind, .timeout = 120)
{
    needs_simulator();
    struct setup setup = with_reaper(CACHE);
    struct world w;
    world_open(&w, &setup);
    struct short_life l = {.w = &w, .stream = CU_STREAM_PER_THREAD, .pages = 4};
    for (int i = 0; i < 200; i++) {
        on_a_thread(malloc_free_and_end, &l);
        require(l.status == VPMM_SUCCESS, "thread %d: %s", i, vpmm_status_name(l.status));
        if (i % 50 == 0)
            sleep_ms(50);
    }
    cr_expect_leq(stats_of(&w).mapped_bytes, 100 * PAGE, "%llu pages are mapped for threads that used 4 in turn",
                  (unsigned long long)(stats_of(&w).mapped_bytes / PAGE));
    world_audit(&w);
    world_close(&w);
}

static void *use_own_stream(void *argument)
{
    struct short_life *l = argument;
    struct world *w = l->w;
    (void)w->driver->cuCtxSetCurrent(w->context);
    for (uint32_t i = 0; i < 4; i++) {
        l->status = vpmm_malloc(w->pool, l->pages * PAGE, CU_STREAM_PER_THREAD, &l->pointer);
        if (l->status != VPMM_SUCCESS)
            return NULL;
        write_later(w, l->pointer, l->pages, i, CU_STREAM_PER_THREAD);
        expect_later(w, l->pointer, l->pages, i, CU_STREAM_PER_THREAD);
        l->status = vpmm_free(w->pool, l->pointer, CU_STREAM_PER_THREAD);
    }
    return NULL;
}

/* The next thread adopts the front; the stream under the same name is another one, and must wait. */
Test(front, a_per_thread_stream_is_not_taken_for_the_next_thread_s, .timeout = 60)
{
    struct setup setup = cached(CACHE);
    setup.pool.max_mapped = 24 * PAGE;
    struct world w;
    world_open(&w, &setup);
    struct short_life l = {.w = &w, .pages = 3};
    for (int i = 0; i < 60; i++) {
        on_a_thread(use_own_stream, &l);
        require(l.status == VPMM_SUCCESS, "thread %d: %s", i, vpmm_status_name(l.status));
        if (i % 7 == 0)
            must_work(vpmm_poll(w.pool));
        world_audit(&w);
    }
    cr_assert_eq(w.driver->cuCtxSynchronize(), CUDA_SUCCESS);
    world_drain(&w);
    world_close(&w);
}

/* --- default streams ------------------------------------------------------------------------------------------------
 */

Test(front, a_default_stream_is_hit_in_its_own_context_only)
{
    needs_simulator();
    struct setup setup = cached(CACHE);
    setup.pool.reuse = VPMM_REUSE_COMPLETED;
    struct world w;
    world_open(&w, &setup);
    CUcontext second = NULL;
    cr_assert_eq(w.driver->cuCtxCreate(&second, 0, w.device), CUDA_SUCCESS);
    CUcontext context[2] = {w.context, second};
    const CUstream name[2] = {NULL, CU_STREAM_LEGACY};
    CUdeviceptr p[2];
    for (int i = 0; i < 2; i++) {
        cr_assert_eq(w.driver->cuCtxSetCurrent(context[i]), CUDA_SUCCESS);
        p[i] = take(&w, 4, NULL);
        fill(&w, p[i], 4, 1, NULL);
    }
    for (int round = 0; round < 4; round++)
        for (int i = 0; i < 2; i++) {
            cr_assert_eq(w.driver->cuCtxSetCurrent(context[i]), CUDA_SUCCESS);
            give(&w, p[i], name[round & 1]);
            cr_assert_eq(w.driver->cuCtxSetCurrent(context[!i]), CUDA_SUCCESS);
            CUdeviceptr q = take(&w, 4, name[round >> 1]);
            cr_expect_neq(q, p[i], "memory of the other context's default stream");
            fill(&w, q, 4, 2, NULL);
            cr_assert_eq(w.driver->cuCtxSetCurrent(context[i]), CUDA_SUCCESS);
            p[i] = take(&w, 4, name[round >> 1]);
            fill(&w, p[i], 4, 3, NULL);
            cr_assert_eq(w.driver->cuCtxSetCurrent(context[!i]), CUDA_SUCCESS);
            give(&w, q, NULL);
            world_audit(&w);
        }
    for (int i = 0; i < 2; i++) {
        cr_assert_eq(w.driver->cuCtxSetCurrent(context[i]), CUDA_SUCCESS);
        uint64_t before = hits(&w);
        give(&w, p[i], NULL);
        cr_expect_eq(take(&w, 4, CU_STREAM_LEGACY), p[i]); /* one stream under two names */
        cr_expect_eq(hits(&w), before + 1);
        give(&w, p[i], CU_STREAM_LEGACY);
        cr_assert_eq(w.driver->cuCtxSynchronize(), CUDA_SUCCESS);
    }
    world_audit(&w);
    world_close_with(&w, second);
}

/* --- streams that are released, and handles that come back ----------------------------------------------------------
 */

Test(front, nothing_is_hit_after_a_release)
{
    struct setup setup = cached(CACHE);
    setup.pool.reuse = VPMM_REUSE_COMPLETED;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    struct helper h;
    helper_start(&h, &w);
    for (uint32_t round = 0; round < 30; round++) {
        CUdeviceptr p = take(&w, 4, s), theirs = helper_take(&h, 3, s);
        fill(&w, p, 4, round, s);
        expect_later(&w, p, 4, round, s);
        fill(&w, theirs, 3, round, s);
        give(&w, p, s);
        helper_give(&h, theirs, s);
        must_work(vpmm_stream_release(w.pool, s));
        cr_expect_eq(cached_pages(&w), 0);
        world_audit(&w);
        bool same_stream = round % 3 == 0; /* it may be used again, too */
        if (!same_stream) {
            world_stream_destroy(&w, s);
            s = world_stream(&w);
        }
        uint64_t before = hits(&w);
        CUdeviceptr q = take(&w, 4, s), r = take(&w, 3, s);
        cr_expect_eq(hits(&w), before);
        cr_expect(!same_stream ? q != p && r != theirs : true, "memory of the old stream without a wait");
        fill(&w, q, 4, ~round, s);
        fill(&w, r, 3, ~round, s);
        give(&w, q, s);
        helper_give(&h, r, s);
        world_run(&w, s, round % 4);
        world_audit(&w);
        if (round % 5 == 0)
            world_drain(&w);
    }
    helper_end(&h);
    world_drain(&w);
    world_audit(&w);
    world_close(&w);
}

static void streams_come_and_go(int threads, vpmm_streams streams)
{
    enum { CYCLES = 10000, THREADS = 4 };
    struct setup setup = cached(CACHE);
    setup.sim.stepped = false;
    setup.sim.detect_races = false;
    setup.pool.streams = streams;
    struct world w;
    world_open(&w, &setup);
    struct helper h[THREADS];
    for (int i = 0; i < threads; i++)
        helper_start(&h[i], &w);
    uint64_t asked = 0;
    int cycles = threads ? CYCLES / 5 : CYCLES;
    for (int cycle = 0; cycle < cycles; cycle++) {
        CUstream s = world_stream(&w);
        give(&w, take(&w, 1 + (size_t)cycle % 3, s), s);
        for (int i = 0; i < threads; i++)
            helper_give(&h[i], helper_take(&h[i], 1 + (size_t)i, s), s);
        must_work(vpmm_stream_release(w.pool, s));
        world_stream_destroy(&w, s);
        must_work(vpmm_poll(w.pool));
        if (cycle == 200)
            asked = atomic_load(&aligned_asked);
    }
    uint64_t grown = atomic_load(&aligned_asked) - asked;
    cr_expect_leq(grown, 400, "%llu more records and caches after %d streams", (unsigned long long)grown, cycles);
    cr_expect_leq(stats_of(&w).mapped_bytes, 64 * PAGE);
    world_audit(&w);
    for (int i = 0; i < threads; i++)
        helper_end(&h[i]);
    world_close(&w);
}

Test(front, records_of_ten_thousand_streams_are_used_again, .timeout = 60)
{
    streams_come_and_go(0, VPMM_STREAMS_CHECKED);
}
Test(front, records_that_four_threads_share_are_used_again, .timeout = 60)
{
    streams_come_and_go(4, VPMM_STREAMS_CHECKED);
}
Test(front, records_are_used_again_where_streams_are_trusted, .timeout = 60)
{
    streams_come_and_go(0, VPMM_STREAMS_TRUSTED);
}

/* Threads that have ended leave caches of a stream that is gone without a release, and whose handle is another's. */
Test(front, the_record_of_an_unreleased_stream_is_used_again_when_its_threads_have_ended, .timeout = 60)
{
    enum { THREADS = 4 };
    needs_simulator();
    struct setup setup = cached(CACHE);
    setup.sim.stepped = false;
    struct world w;
    world_open(&w, &setup);
    struct helper h[THREADS];
    CUstream s = world_stream(&w), before = s;
    give(&w, take(&w, 2, s), s); /* so that this thread has caches of its own, and does not adopt a helper's */
    for (int i = 0; i < THREADS; i++) {
        helper_start(&h[i], &w);
        helper_give(&h[i], helper_take(&h[i], 2, s), s);
    }
    for (int i = 0; i < THREADS; i++)
        helper_end(&h[i]);
    world_stream_destroy(&w, s);
    s = world_stream(&w);
    cr_assert_eq(s, before, "the simulator does not hand the handle out again");
    give(&w, take(&w, 2, s), s);
    for (int i = 0; i < 6; i++, sleep_ms(FRONT_IDLE_US / 1000 + 1))
        must_work(vpmm_poll(w.pool));
    must_work(vpmm_trim(w.pool, 0, NULL)); /* what nobody can mark any more has passed then, */
    give(&w, take(&w, 3, s), s);           /* and this thread comes by, and lets go of the stream that is gone */
    must_work(vpmm_poll(w.pool));
    uint32_t records = load_acquire_u32(&w.pool->arena.streams.slots);
    CUstream other = world_stream(&w);
    give(&w, take(&w, 2, other), other);
    cr_expect_eq(load_acquire_u32(&w.pool->arena.streams.slots), records, "the record is not used again");
    world_audit(&w);
    world_close(&w);
}

/* Without a word to the pool: the handle's next stream is told from it by the id, and the memory waits. */
static void a_handle_comes_back(vpmm_reuse reuse, bool free_on_the_new_one)
{
    needs_simulator();
    struct setup setup = cached(CACHE);
    setup.pool.reuse = reuse;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    for (uint32_t round = 0; round < 40; round++) {
        CUdeviceptr p = take(&w, 4, s), kept = take(&w, 2, s);
        fill(&w, p, 4, round, s);
        expect_later(&w, p, 4, round, s);
        give(&w, p, s);
        if (free_on_the_new_one) /* its last use is before the new stream begins */
            cr_assert_eq(w.driver->cuStreamSynchronize(s), CUDA_SUCCESS);
        CUstream before = s;
        world_stream_destroy(&w, s);
        s = world_stream(&w);
        cr_assert_eq(s, before, "the simulator does not hand the handle out again");
        if (free_on_the_new_one) {
            fill(&w, kept, 2, round, s);
            give(&w, kept, s); /* nobody looks at the stream's id here */
            world_audit(&w);
        }
        uint64_t hits_before = hits(&w);
        CUdeviceptr q = take(&w, 4, s), r = take(&w, 2, s);
        cr_expect_eq(hits(&w), hits_before, "a hit of the handle's last stream");
        fill(&w, q, 4, ~round, s);
        fill(&w, r, 2, ~round, s);
        expect_later(&w, q, 4, ~round, s);
        world_run(&w, s, 1 + round % 3);
        if (round % 2 != 0)
            must_work(vpmm_poll(w.pool));
        give(&w, q, s);
        give(&w, r, s);
        if (!free_on_the_new_one) {
            order_after(&w, s, s);
            give(&w, kept, s);
        }
        world_audit(&w);
    }
    world_step(&w);
    world_audit(&w);
    world_close(&w);
}

Test(front, an_unreleased_handle_that_comes_back_is_no_hit)
{
    a_handle_comes_back(VPMM_REUSE_WAIT_DEVICE, false);
}
Test(front, an_unreleased_handle_that_comes_back_is_no_hit_of_independent_streams)
{
    a_handle_comes_back(VPMM_REUSE_COMPLETED, false);
}
Test(front, a_free_on_an_unreleased_handle_that_came_back_hands_nothing_out_too_early)
{
    a_handle_comes_back(VPMM_REUSE_WAIT_DEVICE, true);
    a_handle_comes_back(VPMM_REUSE_COMPLETED, true);
}

/* --- modes ----------------------------------------------------------------------------------------------------------
 */

Test(front, eager_streams_have_no_caches)
{
    struct setup setup = cached(CACHE);
    setup.pool.streams = VPMM_STREAMS_EAGER;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    for (uint64_t i = 0; i < 20; i++) {
        CUdeviceptr p = take(&w, 2, s);
        give(&w, p, s);
        cr_expect_eq(stats_of(&w).marks, i + 1, "a free is not marked");
        cr_expect_eq(cached_pages(&w), 0);
    }
    cr_expect_eq(hits(&w), 0);
    world_audit(&w);
    world_close(&w);
}

static void driver_calls_of_hits(vpmm_streams streams, uint64_t a_malloc)
{
    needs_simulator();
    enum { PAIRS = 1000 };
    struct setup setup = cached(CACHE);
    setup.pool.streams = streams;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr p = take(&w, 2, s);
    give(&w, p, s);
    uint64_t all = vpmm_sim_calls(w.sim, NULL), ids = vpmm_sim_calls(w.sim, "cuStreamGetId");
    uint64_t captures = vpmm_sim_calls(w.sim, "cuStreamIsCapturing"), counted = stats_of(&w).driver_calls;
    for (int i = 0; i < PAIRS; i++) {
        p = take(&w, 2, s);
        give(&w, p, s);
    }
    cr_expect_eq(hits(&w), PAIRS);
    captures = vpmm_sim_calls(w.sim, "cuStreamIsCapturing") - captures; /* a build for debugging asks */
    cr_expect_eq(vpmm_sim_calls(w.sim, "cuStreamGetId") - ids, PAIRS * a_malloc);
    cr_expect_eq(vpmm_sim_calls(w.sim, NULL) - all - captures, PAIRS * a_malloc);
    cr_expect_eq(stats_of(&w).driver_calls - counted, PAIRS * a_malloc);
    world_close(&w);
}

Test(front, a_trusted_hit_makes_no_driver_call)
{
    driver_calls_of_hits(VPMM_STREAMS_TRUSTED, 0);
}
Test(front, a_checked_hit_asks_for_the_stream_s_id_once)
{
    driver_calls_of_hits(VPMM_STREAMS_CHECKED, 1);
}

/* One stream, and whichever name the pool meets first, the other one hits too; pages and pieces. */
static void both_names_hit(CUstream first, CUstream second)
{
    enum { PAIRS = 1000 };
    static const size_t lengths[] = {2 * PAGE, 100 << 10, 1000};
    struct world w;
    open_cached(&w);
    for (size_t k = 0; k < sizeof lengths / sizeof lengths[0]; k++) {
        CUstream name[] = {first, second};
        CUdeviceptr p = take_bytes(&w, lengths[k], first);
        give(&w, p, first);
        for (int i = 0; i < 2; i++) {
            uint64_t hits_before = hits(&w), frees = stats_of(&w).frees_cache, calls = stats_of(&w).driver_calls;
            for (int n = 0; n < PAIRS; n++) {
                require(take_bytes(&w, lengths[k], name[i]) == p, "%zu bytes: another place", lengths[k]);
                give(&w, p, name[i]);
            }
            cr_expect_eq(hits(&w) - hits_before, PAIRS, "%zu bytes, name %d", lengths[k], i);
            cr_expect_eq(stats_of(&w).frees_cache - frees, PAIRS, "%zu bytes, name %d", lengths[k], i);
            cr_expect_eq(stats_of(&w).driver_calls, calls, "%zu bytes, name %d", lengths[k], i);
        }
    }
    must_work(vpmm_stream_release(w.pool, second));
    cr_expect_eq(cached_pages(&w), 0);
    world_audit(&w);
    world_close(&w);
}

Test(front, the_legacy_stream_is_hit_by_both_its_names)
{
    both_names_hit(NULL, CU_STREAM_LEGACY);
    both_names_hit(CU_STREAM_LEGACY, NULL);
}

Test(front, the_calls_of_hits_are_told)
{
    needs_simulator();
    struct world w;
    vpmm_call_counts calls[VPMM_DRIVER_CALLS];
    uint64_t told = 0;
    open_cached(&w);
    CUstream s = world_stream(&w);
    for (int i = 0; i < 20; i++)
        give(&w, take(&w, 1, s), s);
    cr_assert_gt(hits(&w), 10);
    must_work(vpmm_calls_get(w.pool, calls));
    for (int i = 0; i < VPMM_DRIVER_CALLS; i++)
        if (!strcmp(calls[i].call, "cuStreamGetId"))
            told = calls[i].made;
    cr_expect_eq(told, world_calls(&w, "cuStreamGetId"));
    world_close(&w);
}

/* --- pools ----------------------------------------------------------------------------------------------------------
 */

static void pair_in(vpmm_pool *pool, CUstream s, size_t pages)
{
    CUdeviceptr p = 0;
    must_work(vpmm_malloc(pool, pages * PAGE, s, &p));
    must_work(vpmm_free(pool, p, s));
}

Test(front, more_pools_than_a_thread_knows_at_once)
{
    enum { POOLS = 11 };
    struct setup setup = cached(CACHE);
    struct world w;
    world_open(&w, &setup);
    setup.pool.driver = w.driver;
    CUstream s = world_stream(&w);
    vpmm_pool *pool[POOLS];
    for (int i = 0; i < POOLS; i++)
        must_work(vpmm_pool_create(&setup.pool, &pool[i]));
    uint64_t asked = 0;
    for (int round = 0; round < 50; round++) {
        for (int i = 0; i < POOLS; i++)
            pair_in(pool[(i * 7 + round) % POOLS], s, 2);
        if (round == 1)
            asked = atomic_load(&aligned_asked);
    }
    cr_expect_eq(atomic_load(&aligned_asked), asked, "a front is made again where there was one");
    for (int i = 0; i < POOLS; i++) {
        vpmm_stats stats;
        must_work(vpmm_stats_get(pool[i], &stats));
        cr_expect_eq(stats.hits_cache, 49);
        cr_expect_eq(stats.builds, 1);
        must_work(vpmm_check(pool[i]));
        must_work(vpmm_pool_destroy(pool[i]));
    }
    world_close(&w);
}

Test(front, pools_that_come_and_go_are_not_taken_for_each_other, .timeout = 60)
{
    struct setup setup = cached(CACHE);
    struct world w;
    world_open(&w, &setup);
    setup.pool.driver = w.driver;
    CUstream s = world_stream(&w);
    struct helper h;
    helper_start(&h, &w);
    pair_in(w.pool, s, 2);
    for (uint64_t i = 0; i < 200; i++) {
        vpmm_pool *pool = NULL, *kept = w.pool;
        must_work(vpmm_pool_create(&setup.pool, &pool));
        pair_in(pool, s, 2);
        pair_in(pool, s, 2);
        w.pool = pool;
        helper_give(&h, helper_take(&h, 2, s), s);
        cr_expect_eq(hits(&w) + stats_of(&w).hits_neighbour, 2);
        w.pool = kept;
        must_work(vpmm_check(pool));
        if (i % 2 == 0)
            must_work(vpmm_pool_destroy(pool));
        pair_in(w.pool, s, 2);
        cr_expect_eq(hits(&w), i + 1);
        if (i % 2 != 0)
            must_work(vpmm_pool_destroy(pool));
    }
    helper_end(&h);
    world_audit(&w);
    world_close(&w);
}

/* --- at rest --------------------------------------------------------------------------------------------------------
 */

/* How often the pool's own thread went to sleep, and how long it ran. */
static void look_at_reaper(uint64_t *sleeps, double *ran_ms)
{
    DIR *tasks = opendir("/proc/self/task");
    cr_assert_not_null(tasks);
    *sleeps = 0;
    *ran_ms = 0;
    for (struct dirent *entry; (entry = readdir(tasks)) != NULL;) {
        char path[320], line[256] = "";
        unsigned long long number = 0;
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", entry->d_name);
        FILE *file = fopen(path, "r");
        bool is_reaper = file != NULL && fgets(line, sizeof line, file) != NULL && !strcmp(line, "vpmm-reaper\n");
        if (file != NULL)
            fclose(file);
        if (!is_reaper)
            continue;
        snprintf(path, sizeof path, "/proc/self/task/%s/status", entry->d_name);
        file = fopen(path, "r");
        while (file != NULL && fgets(line, sizeof line, file) != NULL)
            if (sscanf(line, "voluntary_ctxt_switches: %llu", &number) == 1)
                *sleeps += number;
        if (file != NULL)
            fclose(file);
        snprintf(path, sizeof path, "/proc/self/task/%s/schedstat", entry->d_name);
        file = fopen(path, "r");
        if (file != NULL && fscanf(file, "%llu", &number) == 1)
            *ran_ms += (double)number / 1e6;
        if (file != NULL)
            fclose(file);
    }
    closedir(tasks);
}

/* Within the time, as it is a loaded machine's: no sooner is anything expected. */
static void expect_rest(struct world *w)
{
    uint64_t sleeps[2], calls[2];
    double ran[2];
    for (int tries = 0;; tries++) {
        look_at_reaper(&sleeps[0], &ran[0]);
        calls[0] = vpmm_sim_calls(w->sim, NULL);
        sleep_ms(150);
        look_at_reaper(&sleeps[1], &ran[1]);
        calls[1] = vpmm_sim_calls(w->sim, NULL);
        bool is_done = !cached_pages(w) && !streams_pending(&w->pool->arena.streams, NULL);
        if (sleeps[0] == sleeps[1] && calls[0] == calls[1] && is_done) /* else it may have had no processor */
            break;
        require(tries < 100,
                "in 150 ms of rest the reaper wakes %llu times and the driver is called %llu times; "
                "%llu pages are cached",
                (unsigned long long)(sleeps[1] - sleeps[0]), (unsigned long long)(calls[1] - calls[0]),
                (unsigned long long)cached_pages(w));
    }
}

Test(front, untouched_caches_are_emptied_and_then_nothing_wakes_up, .timeout = 60)
{
    needs_simulator();
    struct setup setup = with_reaper(CACHE);
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w), other = world_stream(&w);
    CUdeviceptr p = take(&w, 4, s);
    sleep_ms(50); /* the reaper sleeps by then */
    give(&w, p, s);
    expect_rest(&w);
    uint64_t builds = stats_of(&w).builds;
    p = take(&w, 4, other); /* it is everyone's */
    cr_expect_eq(stats_of(&w).hits_completed, 1);
    cr_expect_eq(stats_of(&w).builds, builds);
    give(&w, p, other);
    expect_rest(&w);
    world_close(&w);
}

Test(front, untouched_pieces_leave_the_caches, .timeout = 60)
{
    needs_simulator();
    struct setup setup = with_reaper(CACHE);
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    do /* until it is seen before it has left */
        give(&w, take_bytes(&w, 1000, s), s);
    while (!stats_of(&w).slab_cached_bytes);
    for (int i = 0; i < 2000 && stats_of(&w).slab_cached_bytes; i++)
        sleep_ms(10);
    cr_expect_eq(stats_of(&w).slab_cached_bytes, 0);
    world_close(&w);
}

Test(front, a_cache_in_use_is_not_emptied, .timeout = 60)
{
    needs_simulator();
    struct setup setup = with_reaper(CACHE);
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    pair_in(w.pool, s, 4);
    uint64_t before = hits(&w), pairs = 0, pauses = 0; /* of a loaded machine, in which it is not in use */
    for (; pairs < 200; pairs++) {
        uint64_t begin = clock_now_ns();
        pair_in(w.pool, s, 4);
        sleep_ms(1);
        pauses += clock_now_ns() - begin > FRONT_IDLE_US * UINT64_C(1000) / 2;
    }
    cr_expect_geq(hits(&w) - before + pauses, pairs / 2, "only %llu of %llu are hits",
                  (unsigned long long)(hits(&w) - before), (unsigned long long)pairs);
    world_close(&w);
}

/* A thread that frees now and then keeps nobody busy. */
static void the_reaper_does_not_spin(size_t bytes)
{
    needs_simulator();
    struct setup setup = with_reaper(CACHE);
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    give(&w, take_bytes(&w, bytes, s), s);
    sleep_ms(100);
    uint64_t sleeps;
    double ran[2];
    look_at_reaper(&sleeps, &ran[0]);
    for (int i = 0; i < 60; i++) {
        give(&w, take_bytes(&w, bytes, s), s);
        sleep_ms(11 + i % 13);
    }
    look_at_reaper(&sleeps, &ran[1]);
    cr_expect_lt(ran[1] - ran[0], 150, "the reaper ran for %.0f ms of a second of next to nothing", ran[1] - ran[0]);
    expect_rest(&w);
    world_close(&w);
}

Test(front, the_reaper_does_not_spin_between_its_looks, .timeout = 60)
{
    the_reaper_does_not_spin(4 * PAGE);
}
Test(front, the_reaper_does_not_spin_between_its_looks_at_pieces, .timeout = 60)
{
    the_reaper_does_not_spin(1000);
}

/* Threads that live on hold caches of streams that are gone. */
Test(front, released_streams_leave_the_reaper_at_rest, .timeout = 60)
{
    needs_simulator();
    struct setup setup = with_reaper(CACHE);
    struct world w;
    world_open(&w, &setup);
    struct helper h;
    helper_start(&h, &w);
    for (int i = 0; i < 4; i++) {
        CUstream s = world_stream(&w);
        pair_in(w.pool, s, 3);
        helper_give(&h, helper_take(&h, 2, s), s);
        must_work(vpmm_stream_release(w.pool, s));
        world_stream_destroy(&w, s);
        expect_rest(&w);
    }
    CUstream s = world_stream(&w); /* on which what is left is let go of */
    pair_in(w.pool, s, 3);
    helper_give(&h, helper_take(&h, 2, s), s);
    expect_rest(&w);
    world_audit(&w);
    helper_end(&h);
    world_close(&w);
}

/* --- fork -----------------------------------------------------------------------------------------------------------
 */

static int child_of_fork(struct world *w, CUstream s, CUdeviceptr live)
{
    CUdeviceptr p = 0xdead;
    clear_words();
    if (vpmm_malloc(w->pool, 2 * PAGE, s, &p) != VPMM_ERROR_NOT_SUPPORTED || p != 0xdead || !spoke())
        return 1;
    if (vpmm_malloc(w->pool, 2 * PAGE, NULL, &p) != VPMM_ERROR_NOT_SUPPORTED)
        return 2;
    if (vpmm_free(w->pool, live, s) != VPMM_ERROR_NOT_SUPPORTED)
        return 3;
    if (vpmm_stream_release(w->pool, s) != VPMM_ERROR_NOT_SUPPORTED)
        return 4;
    if (vpmm_trim(w->pool, 0, NULL) != VPMM_ERROR_NOT_SUPPORTED)
        return 5;
    return 0;
}

Test(front, after_fork_the_child_is_refused_what_its_parent_has_cached)
{
    struct world w;
    open_cached(&w);
    CUstream s = world_stream(&w);
    CUdeviceptr live = take(&w, 2, s), p = take(&w, 2, s);
    give(&w, take(&w, 2, NULL), NULL);
    give(&w, p, s);
    cr_assert_gt(cached_pages(&w), 0);
    pid_t pid = fork();
    if (pid == 0) {
        alarm(30);
        _exit(child_of_fork(&w, s, live));
    }
    cr_assert_gt(pid, 0);
    int status = -1;
    cr_assert_eq(waitpid(pid, &status, 0), pid);
    cr_expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "call %d in the child", WEXITSTATUS(status));
    uint64_t before = hits(&w);
    cr_expect_eq(take(&w, 2, s), p, "the parent's cache is gone");
    cr_expect_eq(hits(&w), before + 1);
    give(&w, p, s);
    give(&w, live, s);
    world_audit(&w);
    world_close(&w);
}

/* --- when things fail -----------------------------------------------------------------------------------------------
 */

Test(front, a_lost_device_ends_the_hits)
{
    needs_simulator();
    struct world w;
    open_cached(&w);
    CUstream s = world_stream(&w);
    CUdeviceptr p = take(&w, 2, s), kept = take(&w, 2, s), q = 0xdead;
    give(&w, p, s);
    give(&w, take(&w, CACHE, s), s); /* too long for a cache, so it is marked */
    vpmm_sim_fail(w.sim, "cuEventQuery", 1, CUDA_ERROR_ILLEGAL_ADDRESS, true);
    world_step(&w);
    must_fail(VPMM_ERROR_DRIVER, vpmm_poll(w.pool));
    must_fail(VPMM_ERROR_DRIVER, vpmm_malloc(w.pool, 2 * PAGE, s, &q));
    cr_expect_eq(q, 0xdead);
    must_fail(VPMM_ERROR_DRIVER, vpmm_free(w.pool, kept, s));
    vpmm_sim_fail(w.sim, "cuEventQuery", 0, CUDA_SUCCESS, false);
    must_fail(VPMM_ERROR_DRIVER, vpmm_pool_destroy(w.pool));
    w.pool = NULL;
    world_stream_destroy(&w, s);
    cr_assert_eq(w.driver->cuDevicePrimaryCtxRelease(w.device), CUDA_SUCCESS);
    vpmm_sim_destroy(w.sim); /* what a lost device held leaks */
}

/* No fence is asked about: a pass finds it out at another call, and it is the last pass of a pool's thread. */
/* By their numbers where an old cuda.h has no names: whatever call says so, the pool is lost, and can be destroyed. */
Test(front, each_error_that_ends_the_process_loses_the_device)
{
    needs_simulator();
    static const int errors[] = {214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911};
    for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++) {
        struct world w;
        open_cached(&w);
        CUstream s = world_stream(&w);
        CUdeviceptr q = 0xdead;
        take(&w, 2, s);
        vpmm_sim_fail(w.sim, "cuMemCreate", 1, (CUresult)errors[i], false);
        must_fail(VPMM_ERROR_DRIVER, vpmm_malloc(w.pool, 64 * PAGE, s, &q));
        must_fail(VPMM_ERROR_DRIVER, vpmm_pool_destroy(w.pool)); /* although something is live */
        w.pool = NULL;
        world_stream_destroy(&w, s);
        cr_assert_eq(w.driver->cuDevicePrimaryCtxRelease(w.device), CUDA_SUCCESS);
        vpmm_sim_destroy(w.sim); /* what a lost device held leaks */
    }
}

Test(front, a_device_that_is_lost_as_a_pass_begins_ends_the_hits)
{
    needs_simulator();
    struct world w;
    CUdeviceptr q;
    open_cached(&w);
    CUstream s = world_stream(&w);
    give(&w, take(&w, 2, s), s);
    vpmm_sim_fail(w.sim, "cuThreadExchangeStreamCaptureMode", 1, CUDA_ERROR_ILLEGAL_ADDRESS, false);
    must_fail(VPMM_ERROR_DRIVER, vpmm_poll(w.pool));
    must_fail(VPMM_ERROR_DRIVER, vpmm_malloc(w.pool, 2 * PAGE, s, &q));
    must_fail(VPMM_ERROR_DRIVER, vpmm_pool_destroy(w.pool));
    w.pool = NULL;
    world_stream_destroy(&w, s);
    cr_assert_eq(w.driver->cuDevicePrimaryCtxRelease(w.device), CUDA_SUCCESS);
    vpmm_sim_destroy(w.sim); /* what a lost device held leaks */
}

Test(front, a_lost_device_ends_the_hits_of_pieces)
{
    needs_simulator();
    struct world w;
    CUdeviceptr p;
    open_cached(&w);
    CUstream s = world_stream(&w), t = world_stream(&w);
    CUdeviceptr q = take(&w, 100, t);
    give(&w, take_bytes(&w, 1000, s), s);
    cr_assert_gt(stats_of(&w).slab_cached_bytes, 0);
    give(&w, q, t);
    vpmm_sim_fail(w.sim, "cuEventQuery", 1, CUDA_ERROR_UNKNOWN, true);
    must_fail(VPMM_ERROR_DRIVER, vpmm_poll(w.pool));
    must_fail(VPMM_ERROR_DRIVER, vpmm_malloc(w.pool, 1000, s, &p));
    must_fail(VPMM_ERROR_DRIVER, vpmm_pool_destroy(w.pool));
    world_stream_destroy(&w, s);
    world_stream_destroy(&w, t);
    cr_assert_eq(w.driver->cuDevicePrimaryCtxRelease(w.device), CUDA_SUCCESS);
    vpmm_sim_destroy(w.sim); /* what a lost device held leaks */
}

/* Its streams cannot be released, so they are destroyed before it: their handles are not the driver's any more. */
Test(front, the_end_of_a_lost_pool_asks_for_no_stream)
{
    needs_simulator();
    struct world w;
    open_cached(&w);
    CUstream s = world_stream(&w), t = world_stream(&w);
    CUdeviceptr p = take(&w, 1, t), q = take(&w, 1, s);
    fill(&w, p, 1, 1, t);
    fill(&w, q, 1, 2, s);
    give(&w, p, t);
    must_work(vpmm_stream_release(w.pool, t)); /* which leaves a mark to ask about */
    give(&w, q, s);
    vpmm_sim_fail(w.sim, "cuEventQuery", 1, CUDA_ERROR_ILLEGAL_ADDRESS, false);
    must_fail(VPMM_ERROR_DRIVER, vpmm_poll(w.pool));
    must_fail(VPMM_ERROR_DRIVER, vpmm_stream_release(w.pool, s));
    world_stream_destroy(&w, s);
    world_stream_destroy(&w, t);
    uint64_t before = vpmm_sim_misuses(w.sim);
    must_fail(VPMM_ERROR_DRIVER, vpmm_pool_destroy(w.pool));
    cr_expect_eq(vpmm_sim_misuses(w.sim), before);
    cr_assert_eq(w.driver->cuDevicePrimaryCtxRelease(w.device), CUDA_SUCCESS);
    vpmm_sim_destroy(w.sim); /* what a lost device held leaks */
}

static bool is_documented(vpmm_status status)
{
    return status == VPMM_SUCCESS || status == VPMM_ERROR_DRIVER || status == VPMM_ERROR_OUT_OF_MEMORY ||
           status == VPMM_ERROR_NOT_SUPPORTED;
}

/* Every nth call of one name fails, once or from then on, while caches fill, overflow, are stolen from and emptied. */
static void calls_fail(const char *call, CUresult result, bool from_then_on)
{
    needs_simulator();
    for (uint64_t nth = 1; nth <= 12; nth++) {
        struct setup setup = cached(8);
        setup.pool.max_mapped = 24 * PAGE;
        struct world w;
        world_open(&w, &setup);
        CUstream s[2] = {world_stream(&w), world_stream(&w)};
        CUdeviceptr p[24] = {0};
        for (int i = 0; i < 24; i++)
            must_work(vpmm_malloc(w.pool, PAGE, s[i % 2], &p[i]));
        vpmm_sim_fail(w.sim, call, nth, result, from_then_on);
        for (int round = 0; round < 2; round++)
            for (int i = 0; i < 24; i++) {
                vpmm_status status = p[i] ? vpmm_free(w.pool, p[i], s[i % 2]) : VPMM_SUCCESS;
                require(is_documented(status), "free: %s", vpmm_status_name(status));
                p[i] = status == VPMM_SUCCESS ? 0 : p[i];
                world_audit(&w);
                CUdeviceptr q = 0;
                status = vpmm_malloc(w.pool, (1 + (size_t)i % 2) * PAGE, s[(i + i / 5) % 2], &q);
                require(is_documented(status), "malloc: %s", vpmm_status_name(status));
                if (status == VPMM_SUCCESS && !p[i])
                    p[i] = q;
                else if (status == VPMM_SUCCESS)
                    while (vpmm_free(w.pool, q, s[(i + i / 5) % 2]) != VPMM_SUCCESS)
                        vpmm_sim_fail(w.sim, call, 0, CUDA_SUCCESS, false);
                if (i % 10 == 9)
                    (void)vpmm_trim(w.pool, 0, NULL);
                world_audit(&w);
            }
        vpmm_sim_fail(w.sim, call, 0, CUDA_SUCCESS, false);
        for (int i = 0; i < 24; i++)
            must_work(vpmm_free(w.pool, p[i], s[i % 2]));
        world_audit(&w);
        CUdeviceptr all = take(&w, 24, s[0]); /* nothing was lost */
        give(&w, all, s[0]);
        world_close(&w);
    }
}

Test(front, records_of_events_fail_once_around_a_flush, .timeout = 120)
{
    calls_fail("cuEventRecord", CUDA_ERROR_OUT_OF_MEMORY, false);
}
Test(front, records_of_events_fail_from_some_point_on, .timeout = 120)
{
    calls_fail("cuEventRecord", CUDA_ERROR_UNKNOWN, true);
}
Test(front, ids_of_streams_fail_around_a_flush, .timeout = 120)
{
    calls_fail("cuStreamGetId", CUDA_ERROR_UNKNOWN, false);
    calls_fail("cuStreamGetId", CUDA_ERROR_INVALID_HANDLE, true);
}
Test(front, questions_about_captures_fail_around_a_flush, .timeout = 120)
{
    calls_fail("cuStreamIsCapturing", CUDA_ERROR_UNKNOWN, false);
    calls_fail("cuStreamIsCapturing", CUDA_ERROR_OUT_OF_MEMORY, true);
}

/* A thread with no host memory for its front or caches goes without. */
Test(front, without_host_memory_for_a_cache_the_calls_work)
{
    for (uint64_t failures = 1; failures < 200; failures *= 6) {
        struct world w;
        open_cached(&w);
        CUstream s = world_stream(&w);
        pair_in(w.pool, s, 9);
        uint64_t now = atomic_load(&aligned_asked);
        struct helper h;
        helper_start(&h, &w);
        atomic_store(&aligned_refused_until, now + failures);
        atomic_store(&aligned_refused_from, now);
        for (int i = 0; i < 20; i++) {
            helper_give(&h, helper_take(&h, 2, s), s);
            world_audit(&w);
        }
        cr_expect_gt(atomic_load(&aligned_asked), now, "nothing was refused");
        atomic_store(&aligned_refused_from, UINT64_MAX);
        uint64_t before = hits(&w);
        helper_give(&h, helper_take(&h, 2, s), s);
        helper_give(&h, helper_take(&h, 2, s), s);
        cr_expect_gt(hits(&w), before, "it goes without for ever");
        world_audit(&w);
        helper_end(&h);
        world_close(&w);
    }
}

/* --- statistics -----------------------------------------------------------------------------------------------------
 */

/* Another pool's front may have the place of this one's in what the thread knows. */
static void peak_is_exact(bool other_pools)
{
    enum { POOLS = 8, BLOCKS = 10, LONG = CACHE / 4 + 1 };
    struct setup setup = cached(CACHE);
    setup.pool.initial_pages = 64;
    struct world w;
    world_open(&w, &setup);
    world_become_steady(&w, 0);
    setup.pool.driver = w.driver;
    CUstream s = world_stream(&w);
    vpmm_pool *pool[POOLS] = {NULL};
    for (int i = 0; i < POOLS && other_pools; i++)
        must_work(vpmm_pool_create(&setup.pool, &pool[i]));
    uint64_t live = 0, peak = 0, before = hits(&w);
    CUdeviceptr p[BLOCKS], big[3];
    for (int round = 1; round <= 3; round++) {
        for (int i = 0; i < BLOCKS; i++) {
            p[i] = take(&w, 1, s);
            live++;
            peak = live > peak ? live : peak;
            cr_expect_eq(stats_of(&w).peak_live_bytes, peak * PAGE, "%llu pages, not %llu",
                         (unsigned long long)(stats_of(&w).peak_live_bytes / PAGE), (unsigned long long)peak);
        }
        for (int i = 0; i < BLOCKS; i++) {
            give(&w, p[i], s);
            live--;
        }
        for (int i = 0; i < POOLS && other_pools; i++)
            pair_in(pool[i], s, 1);
        big[round - 1] = take(&w, LONG, s); /* longer than is cached, from what is free */
        live += LONG;
        peak = live > peak ? live : peak;
        cr_expect_eq(stats_of(&w).peak_live_bytes, peak * PAGE);
    }
    cr_expect_gt(hits(&w) - before, BLOCKS);
    for (int i = 0; i < 3; i++)
        give(&w, big[i], s);
    for (int i = 0; i < POOLS && other_pools; i++)
        must_work(vpmm_pool_destroy(pool[i]));
    world_audit(&w);
    world_close(&w);
}

Test(front, the_peak_of_one_thread_is_exact)
{
    peak_is_exact(false);
}
Test(front, the_peak_of_one_thread_is_exact_beside_other_pools)
{
    peak_is_exact(true);
}

static void statistics_are_a_model_s(size_t cache, vpmm_streams streams, uint32_t seed)
{
    enum { SLOTS = 40, OPERATIONS = 3000 };
    struct setup setup = cached(cache);
    setup.pool.streams = streams;
    setup.pool.max_mapped = 400 * PAGE;
    setup.pool.small = VPMM_SMALL_ASYNC; /* every length of a page and more is rounded to pages */
    struct world w;
    world_open(&w, &setup);
    CUstream s[3] = {world_stream(&w), world_stream(&w), NULL};
    struct {
        CUdeviceptr pointer;
        size_t bytes, pages;
        int stream;
    } slot[SLOTS] = {0};
    uint64_t live = 0, requested = 0, mallocs = 0, frees = 0, peak = 0;
    for (int i = 0; i < OPERATIONS; i++) {
        seed = seed * 1664525 + 1013904223;
        int k = (int)((seed >> 8) % SLOTS);
        if (slot[k].pointer) {
            give(&w, slot[k].pointer, s[slot[k].stream]);
            slot[k].pointer = 0;
            live -= slot[k].pages;
            requested -= slot[k].bytes;
            frees++;
        } else {
            slot[k].stream = (int)((seed >> 16) % 3);
            slot[k].bytes = PAGE + (seed >> 10) % (6 * PAGE);
            slot[k].pages = (slot[k].bytes - 1) / PAGE + 1;
            slot[k].pointer = take_bytes(&w, slot[k].bytes, s[slot[k].stream]);
            fill(&w, slot[k].pointer, slot[k].pages, seed, s[slot[k].stream]);
            expect_later(&w, slot[k].pointer, slot[k].pages, seed, s[slot[k].stream]);
            live += slot[k].pages;
            requested += slot[k].bytes;
            mallocs++;
        }
        peak = live > peak ? live : peak;
        vpmm_stats stats = stats_of(&w);
        require(stats.live_bytes == live * PAGE && stats.requested_bytes == requested && stats.mallocs == mallocs &&
                    stats.frees == frees && stats.peak_live_bytes == peak * PAGE,
                "operation %d: live %llu of %llu pages, peak %llu of %llu", i,
                (unsigned long long)(stats.live_bytes / PAGE), (unsigned long long)live,
                (unsigned long long)(stats.peak_live_bytes / PAGE), (unsigned long long)peak);
        if (i % 7 == 0)
            world_audit(&w);
        if (i % 300 == 0)
            must_work(vpmm_trim(w.pool, (seed >> 12) % 300 * PAGE, NULL));
        if (i % 64 == 0)
            world_run(&w, s[i / 64 % 3], SIZE_MAX);
    }
    cr_expect_gt(hits(&w), mallocs / 10);
    for (int k = 0; k < SLOTS; k++)
        if (slot[k].pointer)
            give(&w, slot[k].pointer, s[slot[k].stream]);
    world_step(&w);
    world_audit(&w);
    world_close(&w);
}

Test(front, the_statistics_are_a_model_s, .timeout = 120)
{
    statistics_are_a_model_s(CACHE, VPMM_STREAMS_CHECKED, 1);
    statistics_are_a_model_s(4 * CACHE, VPMM_STREAMS_TRUSTED, 2);
}
