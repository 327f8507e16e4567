/*
 * The front caches with four threads at once, in real time and with the reaper at work; for ThreadSanitizer, and useful
 * without it.
 *
 * Caches are small, so that they overflow all the time. Blocks lie in slots that all threads share, so that mostly
 * another thread frees a block than the one that allocated it, on the block's stream (which fills a neighbour's cache,
 * to be stolen from) or, ordered after it, on another one. A few lengths are asked for again and again, some now and
 * then, some are longer than is cached. Each thread has a stream of its own that it releases, destroys and makes again,
 * and trims and polls now and then. Some blocks carry a stamp, written on their stream and looked at before the free.
 *
 *   VPMM_TEST_OPS   mallocs and frees in all; 1,000,000
 *   VPMM_TEST_SEED  of the random numbers
 *
 * Exit status 0: no failure, no race, no lost stamp, the caches were hit, stolen from and emptied, the statistics are
 * what the threads counted, the audit passes and nothing leaks.
 */
#include "world.h"

enum {
    THREADS = 4,
    SHARED = 3,           /* streams that all threads use */
    STREAMS = SHARED + 1, /* and one of the thread's own */
    SLOTS = 64,
    CACHE = 24, /* pages in a thread's cache */
    ONE_STAMP_IN = 64,
    STREAM_LIFE = 4000, /* operations of a thread between two streams of its own */
};

struct block {
    CUdeviceptr pointer;
    size_t pages;
    uint32_t stamp; /* 0: none */
    int stream;     /* of the shared ones; SHARED: the thread's own, and then only that thread has the block */
};

static struct {
    _Atomic(struct block *) slot[SLOTS];
    atomic_uint_fast64_t refusals, mallocs, frees;
} shared;

struct worker {
    uint64_t mallocs, frees;
    CUstream own;
    struct block *kept; /* on the thread's own stream */
};

static CUstream stream_of(const struct worker *worker, int stream)
{
    return stream == SHARED ? worker->own : world.stream[stream];
}

/* Mostly one of three lengths; else any, up to what is too long for a cache. */
static size_t choose_pages(void)
{
    static const size_t usual[] = {1, 1, 2, 3};
    return draw(32) ? usual[draw(4)] : 1 + draw(CACHE / 4 + 2);
}

static struct block *make_block(struct worker *worker, int stream)
{
    struct block *b = calloc(1, sizeof *b);
    if (b == NULL)
        return NULL;
    b->stream = stream;
    b->pages = choose_pages();
    vpmm_status status = vpmm_malloc(world.pool, b->pages * PAGE, stream_of(worker, stream), &b->pointer);
    if (status != VPMM_SUCCESS) {
        if (status == VPMM_ERROR_OUT_OF_MEMORY)
            atomic_fetch_add(&shared.refusals, 1);
        else
            failed("vpmm_malloc");
        free(b);
        return NULL;
    }
    worker->mallocs++;
    if (draw(ONE_STAMP_IN) == 0)
        b->stamp = write_stamp(b->pointer, b->pages, stream_of(worker, stream));
    return b;
}

static void end_block(struct worker *worker, struct block *b)
{
    CUstream stream = stream_of(worker, b->stream);
    if (b->stamp != 0)
        expect_stamp(b->pointer, b->pages, b->stamp, stream);
    if (draw(32) == 0) {
        CUstream other = stream_of(worker, (int)draw(worker->own != NULL ? STREAMS : SHARED));
        order_streams(stream, other);
        stream = other;
    }
    if (vpmm_free(world.pool, b->pointer, stream) != VPMM_SUCCESS)
        failed("vpmm_free");
    else
        worker->frees++;
    free(b);
}

static void new_stream(struct worker *worker)
{
    needs(world.driver->cuStreamCreate(&worker->own, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
}

static void end_stream(struct worker *worker)
{
    if (worker->kept != NULL)
        end_block(worker, worker->kept);
    worker->kept = NULL;
    CUdeviceptr p = 0; /* so that the pool has met it */
    if (vpmm_malloc(world.pool, PAGE, worker->own, &p) == VPMM_SUCCESS) {
        worker->mallocs++;
        if (vpmm_free(world.pool, p, worker->own) == VPMM_SUCCESS)
            worker->frees++;
        else
            failed("vpmm_free on a stream that ends");
        if (vpmm_stream_release(world.pool, worker->own) != VPMM_SUCCESS)
            failed("vpmm_stream_release");
    } else {
        (void)vpmm_stream_release(world.pool, worker->own); /* refused */
    }
    if (world.driver->cuStreamDestroy(worker->own) != CUDA_SUCCESS)
        failed("cuStreamDestroy");
    worker->own = NULL;
}

static void use_own_stream(struct worker *worker)
{
    if (worker->kept != NULL)
        end_block(worker, worker->kept);
    worker->kept = make_block(worker, SHARED);
}

static void use_shared_streams(struct worker *worker)
{
    _Atomic(struct block *) *slot = &shared.slot[draw(SLOTS)];
    struct block *b = atomic_exchange_explicit(slot, NULL, memory_order_acq_rel);
    if (b == NULL) {
        struct block *fresh = make_block(worker, (int)draw(SHARED));
        b = atomic_exchange_explicit(slot, fresh, memory_order_acq_rel);
    }
    if (b != NULL)
        end_block(worker, b);
}

static void one_operation(struct worker *worker, uint64_t i)
{
    if (draw(8) == 0)
        use_own_stream(worker);
    else
        use_shared_streams(worker);
    if (i % STREAM_LIFE == STREAM_LIFE - 1) {
        end_stream(worker);
        new_stream(worker);
    }
    if (draw(20000) == 0 && vpmm_trim(world.pool, draw(128) * PAGE, NULL) != VPMM_SUCCESS)
        failed("vpmm_trim");
    if (draw(5000) == 0 && vpmm_poll(world.pool) != VPMM_SUCCESS)
        failed("vpmm_poll");
    vpmm_stats stats;
    if (draw(5000) == 0 && vpmm_stats_get(world.pool, &stats) != VPMM_SUCCESS)
        failed("vpmm_stats_get");
}

static void work(uint64_t index)
{
    struct worker worker = {0};
    (void)index;
    new_stream(&worker);
    for (uint64_t i = 0; worker.mallocs + worker.frees < world.amount / THREADS && i < world.amount; i++)
        one_operation(&worker, i);
    end_stream(&worker);
    atomic_fetch_add(&shared.mallocs, worker.mallocs);
    atomic_fetch_add(&shared.frees, worker.frees);
}

static void configure(vpmm_sim_config *sim, vpmm_config *config)
{
    sim->memory_bytes = 256 * PAGE;
    config->va_size = 512 * PAGE;
    config->small = VPMM_SMALL_ASYNC;
    config->cache_bytes = CACHE * PAGE;
}

static void finish(void)
{
    struct worker last = {0};
    for (int i = 0; i < SLOTS; i++) {
        struct block *b = atomic_load(&shared.slot[i]);
        if (b != NULL)
            end_block(&last, b);
    }
    atomic_fetch_add(&shared.frees, last.frees);
}

static void tell(const vpmm_stats *stats)
{
    printf("mallocs %llu, of which cached %llu, neighbour's %llu, own %llu, completed %llu, waited %llu, built %llu; "
           "reclaims %llu, refused %llu, marks %llu, cached at the end %llu pages\n",
           (unsigned long long)stats->mallocs, (unsigned long long)stats->hits_cache,
           (unsigned long long)stats->hits_neighbour, (unsigned long long)stats->hits_own_stream,
           (unsigned long long)stats->hits_completed, (unsigned long long)stats->hits_waited,
           (unsigned long long)stats->builds, (unsigned long long)stats->reclaims,
           (unsigned long long)atomic_load(&shared.refusals), (unsigned long long)stats->marks,
           (unsigned long long)(stats->cached_bytes / PAGE));
}

static void look(const vpmm_stats *stats)
{
    tell(stats);
    if (stats->live_bytes != 0)
        failed("something is live at the end");
    if (stats->mallocs != atomic_load(&shared.mallocs) || stats->frees != atomic_load(&shared.frees))
        failed("the statistics are not what the threads counted");
    if (stats->mallocs != stats->hits_cache + stats->hits_neighbour + stats->hits_own_stream + stats->hits_completed +
                              stats->hits_waited + stats->builds)
        failed("the mallocs are not the sum of the tiers");
    if (stats->cached_bytes > (THREADS + 1) * CACHE * PAGE)
        failed("more is cached than may be");
    if (stats->hits_cache < stats->mallocs / 10 || stats->hits_neighbour == 0 || stats->builds == 0)
        failed("the caches are hardly used: what is tested is not what is meant to be");
}

const struct program program = {
    .variable = "VPMM_TEST_OPS",
    .amount = 1000000,
    .threads = THREADS,
    .streams = SHARED,
    .configure = configure,
    .work = work,
    .finish = finish,
    .look = look,
};
