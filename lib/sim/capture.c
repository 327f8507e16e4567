/*
 * capture.c - stream capture: which calls it forbids to whom, and what makes it lost.
 *
 * A call that may synchronise behind the scenes is "unsafe". It is forbidden to a thread by a capture
 *
 *   the thread's mode       that the thread began itself        that another thread began
 *   global (the default)    unless begun relaxed                if begun global
 *   thread-local            unless begun relaxed                never
 *   relaxed                 never                               never
 *
 * and the forbidding capture is then lost: 900 to the caller, 901 to whoever ends the capture. What necessarily
 * conflicts, such as waiting for a capturing stream or for the whole context, is forbidden in every mode. There is no
 * graph to launch: captured work is counted and dropped.
 */
#include "internal.h"

#include <stdlib.h>

static void set_status(vpmm_sim *sim, const struct sim_lane *lane, CUstreamCaptureStatus status)
{
    if (!lane->legacy && !lane->thread)
        atomic_store(&sim->glances[sim_object_index((uint64_t)(uintptr_t)lane->handle)].capture, status);
}

static CUstreamCaptureStatus status_of(const struct sim_lane *lane)
{
    if (!lane->capture)
        return CU_STREAM_CAPTURE_STATUS_NONE;
    return lane->capture->lost ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

/* The lanes that take part, one after the other. */
static struct sim_lane *next_member(vpmm_sim *sim, const struct sim_capture *capture, uint32_t *cursor)
{
    while (*cursor < sim->lane_count) {
        struct sim_lane *lane = sim->lanes[(*cursor)++];
        if (lane->capture == capture)
            return lane;
    }
    return NULL;
}

static void lose(vpmm_sim *sim, struct sim_capture *capture)
{
    uint32_t cursor = 0;
    struct sim_lane *lane;
    capture->lost = true;
    while ((lane = next_member(sim, capture, &cursor)))
        set_status(sim, lane, CU_STREAM_CAPTURE_STATUS_INVALIDATED);
}

static void end_capture(vpmm_sim *sim, struct sim_capture *capture)
{
    uint32_t cursor = 0;
    struct sim_lane *lane;
    while ((lane = next_member(sim, capture, &cursor))) {
        lane->capture = NULL;
        set_status(sim, lane, CU_STREAM_CAPTURE_STATUS_NONE);
    }
    struct sim_capture **at = &sim->captures;
    while (*at != capture)
        at = &(*at)->next;
    *at = capture->next;
    free(capture);
}

void sim_captures_free(vpmm_sim *sim)
{
    while (sim->captures)
        end_capture(sim, sim->captures);
}

static bool forbids(const struct sim_capture *capture, const struct sim_thread *thread)
{
    if (thread->mode == CU_STREAM_CAPTURE_MODE_RELAXED)
        return false;
    if (capture->thread == thread->id)
        return capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
    return thread->mode == CU_STREAM_CAPTURE_MODE_GLOBAL && capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
}

CUresult sim_unsafe(vpmm_sim *sim)
{
    CUresult result = CUDA_SUCCESS;
    for (struct sim_capture *capture = sim->captures; capture; capture = capture->next)
        if (forbids(capture, sim_thread(sim))) {
            lose(sim, capture);
            result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    return result;
}

/* Whether a stream of the context takes part, that has none of these flags. */
static bool takes_part(vpmm_sim *sim, const struct sim_capture *capture, const struct sim_context *context,
                       unsigned without)
{
    uint32_t cursor = 0;
    const struct sim_lane *lane;
    while ((lane = next_member(sim, capture, &cursor)))
        if (lane->context == context && !(lane->flags & without))
            return true;
    return false;
}

/* The legacy stream would have to wait for a capturing stream. */
static CUresult implicit(vpmm_sim *sim, const struct sim_lane *lane, bool spare)
{
    CUresult result = CUDA_SUCCESS;
    for (struct sim_capture *capture = sim->captures; lane->legacy && capture; capture = capture->next)
        if (takes_part(sim, capture, lane->context, CU_STREAM_NON_BLOCKING)) {
            if (!spare)
                lose(sim, capture);
            result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
    return result;
}

CUresult sim_looked_into(vpmm_sim *sim, struct sim_lane *lane)
{
    if (!lane->capture)
        return CUDA_SUCCESS;
    lose(sim, lane->capture);
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult sim_unsafe_on(vpmm_sim *sim, struct sim_lane *lane)
{
    CUresult result = sim_looked_into(sim, lane);
    if (result == CUDA_SUCCESS)
        result = implicit(sim, lane, false);
    return result == CUDA_SUCCESS ? sim_unsafe(sim) : result;
}

CUresult sim_capture_context(vpmm_sim *sim, struct sim_context *context)
{
    CUresult result = CUDA_SUCCESS;
    for (struct sim_capture *capture = sim->captures; capture; capture = capture->next)
        if (takes_part(sim, capture, context, 0)) {
            lose(sim, capture);
            result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    return result;
}

CUresult sim_capture_submit(vpmm_sim *sim, struct sim_lane *lane, const struct sim_op *op, bool *captured)
{
    if (!lane->capture)
        return implicit(sim, lane, false);
    if (lane->capture->lost)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (op->kind != SIM_OP_MARK) {
        lane->capture->nodes++;
        lane->captured++;
    }
    if (op->record) { /* nobody runs it, and so nobody gives it a clock */
        op->record->clock = sim_clock_hold(lane->captured_clock);
        sim_clock_learn(&op->record->clock, lane->id, lane->captured);
    }
    *captured = true;
    return CUDA_SUCCESS;
}

static struct sim_capture *capture_with(vpmm_sim *sim, uint64_t id)
{
    struct sim_capture *capture = sim->captures;
    while (capture && capture->id != id)
        capture = capture->next;
    return capture;
}

CUresult sim_captured_event(vpmm_sim *sim, const struct sim_record *record)
{
    if (!record || !record->capture)
        return CUDA_SUCCESS;
    struct sim_capture *capture = capture_with(sim, record->capture);
    if (capture)
        lose(sim, capture);
    return CUDA_ERROR_CAPTURED_EVENT;
}

/* A wait for work outside the capture cannot be part of a graph. */
static CUresult isolated(vpmm_sim *sim, struct sim_lane *lane)
{
    if (!lane->capture)
        return CUDA_SUCCESS;
    if (lane->capture->lost)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    lose(sim, lane->capture);
    return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
}

/* A stream that waits for captured work joins the capture. */
CUresult sim_capture_wait(vpmm_sim *sim, struct sim_lane *lane, struct sim_record *record, bool *captured)
{
    if (!record->capture)
        return isolated(sim, lane);
    struct sim_capture *capture = capture_with(sim, record->capture);
    if (!capture)
        return CUDA_ERROR_CAPTURED_EVENT;
    if (lane->legacy) {
        lose(sim, capture);
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    if (lane->capture && lane->capture != capture) {
        lose(sim, capture);
        lose(sim, lane->capture);
        return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    }
    if (!lane->capture) /* what it added to earlier captures needs no joining */
        sim_clock_learn(&capture->origin->captured_clock, lane->id, lane->captured);
    lane->capture = capture;
    sim_clock_join(&lane->captured_clock, record->clock);
    set_status(sim, lane, status_of(lane));
    *captured = true;
    return capture->lost ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
}

void sim_capture_forget(vpmm_sim *sim, struct sim_lane *lane)
{
    struct sim_capture *capture = lane->capture;
    if (!capture)
        return;
    lose(sim, capture);
    lane->capture = NULL;
    if (capture->origin == lane)
        end_capture(sim, capture);
}

/* ---- the entries ---- */

CUresult sim_cuStreamBeginCapture(CUstream hStream, CUstreamCaptureMode mode)
{
    vpmm_sim *sim = sim_self();
    struct sim_lane *lane;
    CUresult result = sim_lane_of(sim, hStream, &lane);
    if (result != CUDA_SUCCESS)
        return result;
    if ((int)mode < CU_STREAM_CAPTURE_MODE_GLOBAL || (int)mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    if (lane->legacy)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (lane->capture)
        return CUDA_ERROR_ILLEGAL_STATE;
    struct sim_capture *capture = calloc(1, sizeof *capture);
    if (!capture)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *capture = (struct sim_capture){
        .id = ++sim->capture_ids, .origin = lane, .thread = sim_thread(sim)->id, .mode = mode, .next = sim->captures};
    sim->captures = lane->capture = capture;
    set_status(sim, lane, CU_STREAM_CAPTURE_STATUS_ACTIVE);
    return CUDA_SUCCESS;
}

static CUresult new_graph(vpmm_sim *sim, size_t nodes, CUgraph *out)
{
    struct sim_graph *graph = calloc(1, sizeof *graph);
    if (!graph)
        return CUDA_ERROR_OUT_OF_MEMORY;
    graph->nodes = nodes;
    graph->handle = (CUgraph)(uintptr_t)sim_object_add(sim, SIM_GRAPH, graph);
    if (!graph->handle) {
        free(graph);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = graph->handle;
    return CUDA_SUCCESS;
}

/* What other streams have added comes before what the origin would add next. */
static bool is_joined(vpmm_sim *sim, const struct sim_capture *capture)
{
    uint32_t cursor = 0;
    const struct sim_lane *lane, *origin = capture->origin;
    while ((lane = next_member(sim, capture, &cursor)))
        if (lane != origin && !sim_clock_knows(origin->captured_clock, lane->id, lane->captured))
            return false;
    return true;
}

CUresult sim_cuStreamEndCapture(CUstream hStream, CUgraph *phGraph)
{
    vpmm_sim *sim = sim_self();
    struct sim_lane *lane;
    CUresult result = sim_lane_of(sim, hStream, &lane);
    if (result != CUDA_SUCCESS)
        return result;
    if (!phGraph)
        return CUDA_ERROR_INVALID_VALUE;
    struct sim_capture *capture = lane->capture;
    if (!capture)
        return CUDA_ERROR_ILLEGAL_STATE;
    *phGraph = NULL;
    if (capture->origin != lane)
        return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    if (capture->thread != sim_thread(sim)->id && capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    if (capture->lost)
        result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    else if (!is_joined(sim, capture))
        result = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    else
        result = new_graph(sim, capture->nodes, phGraph);
    end_capture(sim, capture);
    return result;
}

CUresult sim_cuGraphDestroy(CUgraph hGraph)
{
    vpmm_sim *sim = sim_self();
    struct sim_graph *graph = sim_object_find(sim, SIM_GRAPH, (uint64_t)(uintptr_t)hGraph);
    if (!graph)
        return CUDA_ERROR_INVALID_VALUE;
    sim_object_remove(sim, SIM_GRAPH, (uint64_t)(uintptr_t)hGraph);
    free(graph);
    return CUDA_SUCCESS;
}

/* Without the lock where the stream is one of the program's. */
CUresult sim_cuStreamIsCapturing(CUstream hStream, CUstreamCaptureStatus *captureStatus)
{
    vpmm_sim *sim = sim_self();
    uint64_t handle = (uint64_t)(uintptr_t)hStream;
    struct sim_glance *glance = &sim->glances[sim_object_index(handle) % SIM_STREAM_LIMIT];
    struct sim_lane *lane;
    if (!captureStatus)
        return CUDA_ERROR_INVALID_VALUE;
    if (atomic_load_explicit(&glance->stream_id, memory_order_acquire) &&
        handle == sim_stream_handle(sim, sim_object_index(handle))) {
        *captureStatus = (CUstreamCaptureStatus)atomic_load(&glance->capture);
        return CUDA_SUCCESS;
    }
    sim_lock_frame();
    CUresult result = sim_lane_of(sim, hStream, &lane);
    if (result == CUDA_SUCCESS)
        result = implicit(sim, lane, true);
    if (result == CUDA_SUCCESS)
        *captureStatus = status_of(lane);
    return result;
}

CUresult sim_cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    struct sim_thread *thread = sim_thread(sim_self());
    if (!mode || (int)*mode < CU_STREAM_CAPTURE_MODE_GLOBAL || (int)*mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    CUstreamCaptureMode before = thread->mode;
    thread->mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}
