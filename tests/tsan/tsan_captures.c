/*
 * The preload's gate with eight threads at once, in real time; for ThreadSanitizer, and useful without it. There is no
 * GPU in it: the driver's entries are counters.
 *
 * Half of the threads come in, where they are let, and look at two numbers that are equal. The others begin and end
 * captures, and change both as they begin: the numbers are plain memory, so whoever is inside meanwhile is a race, and
 * may see them differ. Some beginnings are refused, and some ends. When all have ended the gate is open again.
 *
 *   VPMM_TEST_OPS   entries and captures in all; 200,000
 *   VPMM_TEST_SEED  of the random numbers
 *
 * Exit status 0: no race, the numbers were equal to all who came in, some did, and each capture was counted.
 */
#include "world.h"

#include "../../lib/preload/captures.h"
#include "../../lib/preload/real.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

enum { THREADS = 8, PAUSE = 16 };

static struct {
    pthread_mutex_t changing; /* beginnings beside each other */
    uint64_t one, other;
    atomic_int capturing; /* streams: of one thread each */
    _Atomic(uint64_t) visits;
} shared = {.changing = PTHREAD_MUTEX_INITIALIZER};

static _Thread_local bool own_captures, is_refused;

/* ---- the driver ---- */

static CUresult CUDAAPI begin(CUstream stream, CUstreamCaptureMode mode)
{
    (void)stream, (void)mode;
    pthread_mutex_lock(&shared.changing);
    shared.one++;
    sched_yield();
    shared.other++;
    pthread_mutex_unlock(&shared.changing);
    if (is_refused)
        return CUDA_ERROR_INVALID_VALUE;
    own_captures = true;
    atomic_fetch_add(&shared.capturing, 1);
    return CUDA_SUCCESS;
}

static CUresult CUDAAPI end(CUstream stream, CUgraph *graph)
{
    (void)stream, (void)graph;
    if (is_refused)
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    own_captures = false;
    atomic_fetch_sub(&shared.capturing, 1);
    return CUDA_SUCCESS;
}

static CUresult CUDAAPI is_capturing(CUstream stream, CUstreamCaptureStatus *status)
{
    (void)stream;
    *status = own_captures ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

const struct real *real_entries(void)
{
    static const struct real real = {.begin_capture = begin, .end_capture = end, .is_capturing = is_capturing};
    return &real;
}

/* ---- the threads ---- */

static bool comes_in(void)
{
    enum { TRIES = 64 };
    for (int i = 0; i < TRIES; i++) {
        if (captures_gate.enter(captures_gate.data, NULL))
            return true;
        sched_yield();
    }
    return false;
}

static void visit(void)
{
    if (!comes_in())
        return;
    uint64_t one = shared.one;
    if (draw(PAUSE) == 0)
        sched_yield();
    if (one != shared.other || atomic_load(&shared.capturing))
        failed("something began, or was under way, beside a thread inside");
    atomic_fetch_add(&shared.visits, 1);
    captures_gate.leave(captures_gate.data, NULL);
}

static void capture(void)
{
    CUgraph graph;
    is_refused = draw(4) == 0;
    bool begun = preload_begin_capture(NULL, CU_STREAM_CAPTURE_MODE_RELAXED) == CUDA_SUCCESS;
    is_refused = draw(4) == 0;
    if (begun && preload_end_capture(NULL, &graph) != CUDA_SUCCESS) {
        is_refused = false;
        preload_end_capture(NULL, &graph);
    }
    for (uint64_t pauses = draw(PAUSE); pauses; pauses--)
        sched_yield();
}

static void work(uint64_t index)
{
    for (uint64_t i = 0; i < world.amount / THREADS; i++)
        if (index % 2)
            visit();
        else
            capture();
}

static void finish(void)
{
    uint64_t visits = atomic_load(&shared.visits);
    printf("%llu visits beside %llu beginnings\n", (unsigned long long)visits, (unsigned long long)shared.one);
    needs(visits && shared.one == shared.other);
    visit();
    needs(atomic_load(&shared.visits) == visits + 1);
}

const struct program program = {
    .variable = "VPMM_TEST_OPS",
    .amount = 200000,
    .threads = THREADS,
    .work = work,
    .finish = finish,
};
