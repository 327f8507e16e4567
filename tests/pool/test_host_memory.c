/*
 * What the pool's records cost the host: a pair of a thread and a stream that has been quiet, before its stream is
 * released and after, and what a malloc past the cache takes among thousands of such pairs.
 *
 * Host memory is what the kernel says the process has resident. Of the sanitizers' builds it would say something else:
 * there the figures are not looked at.
 */
#include "pool/pool.h"
#include "support.h"

#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

enum { PAIR_THREADS = 16, PAIR_STREAMS = 500, ROUNDS = 4, SMALL = 1000, PAIR_BYTES = 1024 };

/* A thread's stack and what the C library keeps for it; its bins come on top. */
enum { THREAD_BYTES = 128 << 10 };

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

static bool use_every_stream(void)
{
    bool good = true;
    for (int i = 0; i < PAIR_STREAMS; i++)
        good = good && use(shared.stream[i], PAGE) && use(shared.stream[i], SMALL);
    return good;
}

/* Each thread meets every stream, and is alive, and asleep, while the figures are taken. */
static void *meet_every_stream(void *data)
{
    (void)data;
    if (shared.w.driver->cuCtxSetCurrent(shared.w.context) != CUDA_SUCCESS || !use_every_stream())
        shared.failed = true;
    pthread_barrier_wait(&shared.turn);
    for (int i = 0; i < ROUNDS; i++) {
        pthread_barrier_wait(&shared.turn); /* the streams are others now */
        if (!use_every_stream())
            shared.failed = true;
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
    cr_assert(use_every_stream(), "%s", vpmm_last_error()); /* the streams' own records are there */
    size_t before = resident();
    for (int i = 0; i < PAIR_THREADS; i++)
        cr_assert_eq(pthread_create(&thread[i], NULL, meet_every_stream, NULL), 0);
    pthread_barrier_wait(&shared.turn);
    settle();
    size_t with_pairs = resident(), first = 0, pairs = (size_t)PAIR_THREADS * PAIR_STREAMS;
    const size_t a_thread = THREAD_BYTES + 2 * FRONT_BINS * BIN_BYTES;
    if (figures_count())
        cr_expect_leq(with_pairs - before, pairs * PAIR_BYTES + PAIR_THREADS * a_thread, "%zu bytes a pair",
                      (with_pairs - before) / pairs);
    for (int i = 0; i < ROUNDS; i++) {
        make_streams(true);
        settle();
        pthread_barrier_wait(&shared.turn);
        pthread_barrier_wait(&shared.turn);
        settle();
        if (i == 0)
            first = resident(); /* the records of the streams before are in use again from here on */
    }
    size_t after = resident();
    if (figures_count())
        cr_expect_leq(after, first + first / 5, "%zu bytes after %d rounds of other streams, %zu after the first", after,
                      ROUNDS, first);
    for (int i = 0; i < PAIR_THREADS; i++)
        pthread_join(thread[i], NULL);
    cr_assert(!shared.failed, "a thread failed");
    for (int i = 0; i < PAIR_STREAMS; i++)
        cr_assert_eq(shared.w.driver->cuStreamDestroy(shared.stream[i]), CUDA_SUCCESS);
    world_close(&shared.w);
}
