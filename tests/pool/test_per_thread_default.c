/*
 * Stream 0 under CUDA_API_PER_THREAD_DEFAULT_STREAM is another stream in each thread: the header maps it, as cuda.h
 * does. This file alone is compiled so.
 */
#define CUDA_API_PER_THREAD_DEFAULT_STREAM
#include "support.h"

#include <pthread.h>

static struct {
    struct world w;
    CUdeviceptr theirs;
    bool good;
} shared;

/* Frees what its own work, which is queued and held, still uses. */
static void *free_on_stream_0(void *data)
{
    struct world *w = data;
    bool good = w->driver->cuCtxSetCurrent(w->context) == CUDA_SUCCESS &&
                vpmm_malloc(w->pool, 4 * PAGE, 0, &shared.theirs) == VPMM_SUCCESS &&
                write_later(w, shared.theirs, 4, 1, CU_STREAM_PER_THREAD) &&
                expect_later(w, shared.theirs, 4, 1, CU_STREAM_PER_THREAD);
    shared.good = good && vpmm_free(w->pool, shared.theirs, 0) == VPMM_SUCCESS;
    return NULL;
}

Test(per_thread_default, memory_of_one_thread_s_stream_0_is_not_another_s)
{
    needs_simulator();
    struct setup setup = setup_default();
    setup.pool.reuse = VPMM_REUSE_COMPLETED;
    setup.pool.cache_bytes = 16 * PAGE;
    pthread_t thread;
    struct world *w = &shared.w;
    world_open(w, &setup);
    cr_assert_eq(pthread_create(&thread, NULL, free_on_stream_0, w), 0);
    pthread_join(thread, NULL);
    cr_assert(shared.good, "the other thread: %s", vpmm_last_error());
    CUdeviceptr p = 0;
    must_work(vpmm_malloc(w->pool, 4 * PAGE, 0, &p));
    cr_expect_neq(p, shared.theirs, "memory is handed over that nothing orders");
    cr_assert(write_later(w, p, 4, 2, CU_STREAM_PER_THREAD));
    must_work(vpmm_free(w->pool, p, 0));
    must_work(vpmm_stream_release(w->pool, 0));
    world_drain(w);
    world_close(w);
}

Test(per_thread_default, the_legacy_stream_keeps_its_name)
{
    needs_simulator();
    struct world w;
    world_open(&w, NULL);
    CUdeviceptr p = 0;
    must_work(vpmm_malloc(w.pool, PAGE, CU_STREAM_LEGACY, &p));
    must_work(vpmm_free(w.pool, p, CU_STREAM_LEGACY));
    must_work(vpmm_stream_release(w.pool, CU_STREAM_LEGACY));
    must_work(vpmm_stream_release(w.pool, 0)); /* the thread's own: never met */
    world_close(&w);
}
