#include "captures.h"

#include "real.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

static _Atomic(unsigned) underway, inside;

static void leave(void *data, CUstream stream)
{
    (void)data, (void)stream;
    atomic_fetch_sub(&inside, 1);
}

/* Who comes meanwhile does not count itself: who begins would wait for as long as others come. */
static bool enter(void *data, CUstream stream)
{
    if (atomic_load(&underway))
        return false;
    atomic_fetch_add(&inside, 1);
    if (!atomic_load(&underway))
        return true;
    leave(data, stream);
    return false;
}

const vpmm_capture_gate captures_gate = {.enter = enter, .leave = leave};

/* ---- beginnings ---- */

static void await_begin(void)
{
    atomic_fetch_add(&underway, 1);
    while (atomic_load(&inside))
        sched_yield();
}

static CUresult begun(CUresult result)
{
    if (result != CUDA_SUCCESS)
        atomic_fetch_sub(&underway, 1);
    return result;
}

CUresult preload_begin_capture(CUstream stream, CUstreamCaptureMode mode)
{
    await_begin();
    return begun(REAL(begin_capture, stream, mode));
}

CUresult preload_begin_capture_ptsz(CUstream stream, CUstreamCaptureMode mode)
{
    await_begin();
    return begun(REAL(begin_capture_ptsz, stream, mode));
}

CUresult preload_begin_capture_v1(CUstream stream)
{
    await_begin();
    return begun(REAL(begin_capture_v1, stream));
}

CUresult preload_begin_capture_v1_ptsz(CUstream stream)
{
    await_begin();
    return begun(REAL(begin_capture_v1_ptsz, stream));
}

CUresult preload_begin_capture_to_graph(CUstream stream, CUgraph graph, const CUgraphNode *nodes, const void *edges,
                                        size_t count, CUstreamCaptureMode mode)
{
    await_begin();
    return begun(REAL(begin_capture_to_graph, stream, graph, nodes, edges, count, mode));
}

CUresult preload_begin_capture_to_graph_ptsz(CUstream stream, CUgraph graph, const CUgraphNode *nodes,
                                             const void *edges, size_t count, CUstreamCaptureMode mode)
{
    await_begin();
    return begun(REAL(begin_capture_to_graph_ptsz, stream, graph, nodes, edges, count, mode));
}

CUresult preload_begin_recapture(CUstream stream, CUstreamCaptureMode mode, CUgraph graph, void *callback, void *data)
{
    await_begin();
    return begun(REAL(begin_recapture, stream, mode, graph, callback, data));
}

CUresult preload_begin_recapture_ptsz(CUstream stream, CUstreamCaptureMode mode, CUgraph graph, void *callback,
                                      void *data)
{
    await_begin();
    return begun(REAL(begin_recapture_ptsz, stream, mode, graph, callback, data));
}

void captures_shut_for_good(void)
{
    await_begin();
}

/* Where no other thread is: those that were inside do not come out. */
static void begin_in_child(void)
{
    atomic_store(&inside, 0);
}

__attribute__((constructor)) static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, begin_in_child);
}

/* ---- ends ---- */

typedef CUresult(CUDAAPI *is_capturing)(CUstream, CUstreamCaptureStatus *);

static bool captures(CUstream stream, is_capturing ask)
{
    CUstreamCaptureStatus status;
    return ask && ask(stream, &status) == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE;
}

/* What began before this library was asked for it is not counted. */
static void uncount(void)
{
    unsigned count = atomic_load(&underway);
    while (count && !atomic_compare_exchange_weak(&underway, &count, count - 1))
        ;
}

/*
 * A refusal may leave the capture as it is, or end it as well. A stream whose capture has ended is not asked again, for
 * another thread may have begun the next one there by now; nor is one that the driver says captured nothing: another
 * thread has ended it, and counts that.
 */
static bool has_ended(CUresult result, CUstream stream, is_capturing ask)
{
    return result == CUDA_SUCCESS || (result != CUDA_ERROR_ILLEGAL_STATE && !captures(stream, ask));
}

static CUresult end_by(CUresult(CUDAAPI *end)(CUstream, CUgraph *), is_capturing ask, CUstream stream, CUgraph *graph)
{
    bool before = captures(stream, ask);
    CUresult result = end ? end(stream, graph) : CUDA_ERROR_NOT_FOUND;
    if (before && has_ended(result, stream, ask))
        uncount();
    return result;
}

CUresult preload_end_capture(CUstream stream, CUgraph *graph)
{
    const struct real *real = real_entries();
    return end_by(real->end_capture, real->is_capturing, stream, graph);
}

CUresult preload_end_capture_ptsz(CUstream stream, CUgraph *graph)
{
    const struct real *real = real_entries();
    return end_by(real->end_capture_ptsz, real->is_capturing_ptsz, stream, graph);
}
