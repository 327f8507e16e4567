/*
 * What the pool's records cost the host: a pair of a thread and a stream that has been quiet, before its stream is
 * released and after, what a malloc past the cache takes among thousands of such pairs, and pages that were cut for
 * small requests when their memory has moved on.
 *
 * Host memory is what the kernel says the process has resident. Of the sanitizers' builds it would say something else:
 * there the figures are not looked at.
 */
#include "pool/pool.h"
#include "support.h"

#include <pthread.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAIR_THREADS = 16, PAIR_STREAMS = 500, ROUNDS = 4, SMALL = 1000, PAIR_BYTES = 1024 };

/* After so many of its streams a thread has all its bins: each takes one for a page, and one for a slice. */
enum { FIRST_STREAMS = FRONT_BINS + 40 };

static struct {
    struct world w;
    CUstream stream[PAIR_STREAMS];
    pthread_barrier_t turn;
    bool failed;
} shared;

static size_t resident(void)
{
    unsigned long total, pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file == NULL || fscanf(file, "%lu %lu", &total, &pages) != 2)
        pages = 0;
    if (file != NULL)
        fclose(file);
    return pages * (size_t)sysconf(_SC_PAGESIZE);
}

static bool figures_count(void)
{
#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__
    return false;
#else
    return true;
#endif
}

static bool use(CUstream stream, size_t bytes)
{
    CUdeviceptr p;
    return vpmm_malloc(shared.w.pool, bytes, stream, &p) == VPMM_SUCCESS &&
           vpmm_free(shared.w.pool, p, stream) == VPMM_SUCCESS;
}

static bool use_streams(int from, int to)
{
    bool good = true;
    for (int i = from; i < to; i++)
        good = good && use(shared.stream[i], PAGE) && use(shared.stream[i], SMALL);
    return good;
}

/* Each stream's record has all its events then: what is longer than a cache takes at first is marked. */
static bool mark_every_stream(void)
{
    bool good = true;
    for (int i = 0; i < PAIR_STREAMS; i++)
        for (int k = 0; k < 2 * STREAM_MARKS; k++)
            good = good && use(shared.stream[i], 8 * PAGE);
    return good;
}

static bool meet_streams(int round)
{
    if (round == 0)
        return use_streams(0, FIRST_STREAMS);
    return use_streams(round == 1 ? FIRST_STREAMS : 0, PAIR_STREAMS); /* from round 2 on the streams are others */
}

/*
 * In each round one thread after another meets the streams: what the pool and the C library's heaps grow by does not
 * depend on who runs beside whom. Each is alive, and asleep, while the figures are taken.
 */
static void *meet_streams_in_turn(void *number)
{
    if (shared.w.driver->cuCtxSetCurrent(shared.w.context) != CUDA_SUCCESS)
        shared.failed = true;
    for (int round = 0; round < 2 + ROUNDS; round++) {
        for (int turn = 0; turn < PAIR_THREADS; turn++) {
            pthread_barrier_wait(&shared.turn);
            if (turn == (int)(intptr_t)number && !meet_streams(round))
                shared.failed = true;
        }
        pthread_barrier_wait(&shared.turn);
    }
    return NULL;
}

static void make_streams(bool replace)
{
    for (int i = 0; i < PAIR_STREAMS; i++) {
        if (replace) {
            must_work(vpmm_stream_release(shared.w.pool, shared.stream[i]));
            cr_assert_eq(shared.w.driver->cuStreamDestroy(shared.stream[i]), CUDA_SUCCESS);
        }
        cr_assert_eq(shared.w.driver->cuStreamCreate(&shared.stream[i], CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    }
}

static void settle(void)
{
    for (int i = 0; i < 6; i++) { /* caches are found idle, and emptied; records are taken out of use */
        must_work(vpmm_poll(shared.w.pool));
        usleep(11000);
    }
}

/* What is resident once all threads have had their turns of a round. */
static size_t resident_after_a_round(void)
{
    for (int i = 0; i <= PAIR_THREADS; i++)
        pthread_barrier_wait(&shared.turn);
    settle();
    return resident();
}

/* Of streams that are replaced in each round; from the third on records of the rounds before are in use again. */
static void other_streams_cost_little(void)
{
    size_t second = 0, after = 0;
    for (int i = 0; i < ROUNDS; i++) {
        make_streams(true);
        settle();
        after = resident_after_a_round();
        if (i == 1)
            second = after;
    }
    if (figures_count())
        cr_expect_leq(after, second + (size_t)PAIR_THREADS * PAIR_STREAMS * PAIR_BYTES,
                      "%zu bytes after %d rounds of other streams, %zu after two", after, ROUNDS, second);
}

Test(host_memory, a_quiet_pair_costs_a_kilobyte, .timeout = 300)
{
    needs_simulator();
    struct setup setup = setup_default();
    setup.sim.stepped = false;
    setup.sim.detect_races = false;
    setup.pool.cache_bytes = (size_t)1 << 30;
    pthread_t thread[PAIR_THREADS];
    world_open(&shared.w, &setup);
    pthread_barrier_init(&shared.turn, NULL, PAIR_THREADS + 1);
    make_streams(false);
    cr_assert(use_streams(0, PAIR_STREAMS) && mark_every_stream(), "%s",
              vpmm_last_error()); /* the streams' own records are there */
    for (intptr_t i = 0; i < PAIR_THREADS; i++)
        cr_assert_eq(pthread_create(&thread[i], NULL, meet_streams_in_turn, (void *)i), 0);
    size_t before = resident_after_a_round(), with_pairs = resident_after_a_round();
    size_t pairs = (size_t)PAIR_THREADS * (PAIR_STREAMS - FIRST_STREAMS);
    if (figures_count())
        cr_expect_leq(with_pairs, before + pairs * PAIR_BYTES, "%zu bytes a pair", (with_pairs - before) / pairs);
    other_streams_cost_little();
    for (int i = 0; i < PAIR_THREADS; i++)
        pthread_join(thread[i], NULL);
    cr_assert(!shared.failed, "a thread failed");
    for (int i = 0; i < PAIR_STREAMS; i++)
        cr_assert_eq(shared.w.driver->cuStreamDestroy(shared.stream[i]), CUDA_SUCCESS);
    world_close(&shared.w);
}

/* --- cut pages --- */

enum { CUTS = 512, PIECES = 2 * CUTS, DESCRIPTORS = 16384 /* bytes for a page's subpages */ };

/* Half a page each, so that each page is cut, and nothing else is needed for them. */
static void cut_pages_of(struct world *w, CUdeviceptr p[PIECES], CUstream s)
{
    for (int i = 0; i < PIECES; i++)
        p[i] = take_bytes(w, PAGE / 2, s);
}

static void give_those_of(struct world *w, CUdeviceptr p[PIECES], uint64_t page, CUstream s)
{
    for (int i = 0; i < PIECES; i++)
        if (p[i] / PAGE % 2 == page)
            give(w, p[i], s);
}

static struct setup without_races(void)
{
    struct setup setup = setup_default();
    setup.sim.detect_races = false;
    return setup;
}

/* At the same addresses, if they are the lowest. */
static void expect_use_again(struct world *w, CUstream s)
{
    static CUdeviceptr p[PIECES];
    cut_pages_of(w, p, s);
    for (int i = 0; i < PIECES; i++)
        fill(w, p[i], 1, (uint32_t)i, s);
    for (int i = 0; i < PIECES; i++)
        require(expect_later(w, p[i], 1, (uint32_t)i, s), "cuLaunchHostFunc");
    world_step(w);
    cr_expect_eq(w->mismatches, 0);
    world_audit(w);
    give_those_of(w, p, 0, s);
    give_those_of(w, p, 1, s);
}

Test(host_memory, what_was_cut_costs_nothing_once_it_is_given_back)
{
    needs_simulator();
    static CUdeviceptr p[PIECES];
    struct setup setup = without_races();
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    cut_pages_of(&w, p, s);
    size_t with = resident();
    give_those_of(&w, p, 0, s);
    give_those_of(&w, p, 1, s);
    world_drain(&w);
    must_work(vpmm_trim(w.pool, 0, NULL));
    cr_assert_eq(stats_of(&w).mapped_bytes, 0);
    if (figures_count())
        cr_expect_leq(resident() + CUTS * DESCRIPTORS / 10 * 9, with, "%zu KiB before, %zu after", with >> 10,
                      resident() >> 10);
    expect_use_again(&w, s);
    world_close(&w);
}

/* `described`: where the pages lie descriptors stay. */
static void move_what_was_cut(bool described)
{
    needs_simulator();
    static CUdeviceptr p[PIECES];
    struct setup setup = without_races();
    setup.pool.extent_size = PAGE;       /* so that a handle is free as its page is, */
    setup.pool.max_mapped = CUTS * PAGE; /* and has to move */
    struct world w;
    world_open(&w, &setup);
    w.pool->arena.described_pages = described ? CUTS : 0;
    CUstream s = world_stream(&w);
    cut_pages_of(&w, p, s);
    give_those_of(&w, p, 0, s);
    world_drain(&w);
    size_t with = resident();
    CUdeviceptr moved = take(&w, CUTS / 2, s);
    world_drain(&w);
    cr_assert_eq(stats_of(&w).pending_unmap_bytes, 0);
    bool has_gone = resident() + CUTS / 2 * DESCRIPTORS / 10 * 8 <= with;
    if (figures_count())
        cr_expect_eq(has_gone, !described, "%zu KiB before, %zu after", with >> 10, resident() >> 10);
    give_those_of(&w, p, 1, s);
    give(&w, moved, s);
    expect_use_again(&w, s);
    world_close(&w);
}

Test(host_memory, what_was_cut_costs_nothing_once_its_memory_has_moved)
{
    move_what_was_cut(false);
}

Test(host_memory, what_was_cut_stays_described_at_low_addresses)
{
    move_what_was_cut(true);
}

static uint64_t generation_at(const struct world *w, CUdeviceptr address)
{
    return word_generation(peek_u64(&unit_at_address(&w->pool->arena.cut.units, address)->word));
}

/*
 * Who has read a word before the descriptors went, and exchanges it after they came back, must fail. Where generations
 * are too high to go on from, the descriptors stay.
 */
static void generations_go_on(struct world *w, uint64_t above, bool forgets)
{
    CUstream s = world_stream(w);
    CUdeviceptr p = take_bytes(w, PAGE / 2, s), again;
    atomic_fetch_add(&unit_at_address(&w->pool->arena.cut.units, p)->word, above << (64 - UNIT_GENERATION_BITS));
    for (int i = 0; i < 50; i++) {
        give(w, p, s);
        cr_assert_eq(take_bytes(w, PAGE / 2, s), p);
    }
    uint64_t before = generation_at(w, p);
    cr_assert_geq(before, above + 100);
    give(w, p, s);
    world_drain(w);
    must_work(vpmm_trim(w->pool, 0, NULL));
    cr_expect_eq(generation_at(w, p) == 0, forgets, "the descriptor's generation is %llu",
                 (unsigned long long)generation_at(w, p));
    again = take_bytes(w, PAGE / 2, s);
    cr_assert_eq(again, p, "the test shows nothing: another address");
    cr_expect_gt(generation_at(w, p), before, "generation %llu, after %llu", (unsigned long long)generation_at(w, p),
                 (unsigned long long)before);
    give(w, again, s);
}

Test(host_memory, no_word_of_a_subpage_comes_again)
{
    needs_simulator();
    struct setup setup = without_races();
    struct world w;
    world_open(&w, &setup);
    generations_go_on(&w, 0, true);
    generations_go_on(&w, UINT64_C(1) << 30, true);
    generations_go_on(&w, UINT64_C(1) << (UNIT_GENERATION_BITS - 1), false);
    world_close(&w);
}

/* ---- a process that locks its memory ---- */

/* Also of what it will map: the tables are of gigabytes, of which hardly anything is ever touched. */
Test(host_memory, a_pool_of_a_process_that_locks_its_memory_takes_no_more)
{
    struct setup setup = setup_default();
    struct world w;
    needs_simulator();
    setup.pool.cache_bytes = 8 * PAGE;
    world_open_without_pool(&w, &setup);
    setup.pool.driver = w.driver;
    if (!figures_count() || mlockall(MCL_FUTURE) != 0) /* it may not */
        cr_skip_test();
    size_t before = resident();
    must_work(vpmm_pool_create(&setup.pool, &w.pool));
    size_t after = resident();
    cr_assert_eq(munlockall(), 0);
    cr_expect_lt(after - before, (size_t)64 << 20, "%zu bytes", after - before);
    world_close(&w);
}
