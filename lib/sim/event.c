/*
 * event.c - events. An event is what its last record says: a lane and a number, and what the lane knew there. Waiting
 * takes that record along, so that a later record of the same event changes nothing for those that wait already.
 */
#include "internal.h"

#include <stdlib.h>

static CUresult find_event(vpmm_sim *sim, CUevent handle, struct sim_event **event)
{
    *event = sim_object_find(sim, SIM_EVENT, (uint64_t)(uintptr_t)handle);
    return *event ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

void sim_event_free(vpmm_sim *sim, struct sim_event *event)
{
    sim_object_remove(sim, SIM_EVENT, (uint64_t)(uintptr_t)event->handle);
    sim_record_drop(event->last);
    free(event);
}

CUresult sim_cuEventCreate(CUevent *phEvent, unsigned int Flags)
{
    const unsigned known = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
    vpmm_sim *sim = sim_self();
    struct sim_context *context;
    CUresult result = sim_current(sim, &context);
    if (result != CUDA_SUCCESS)
        return result;
    if (!phEvent || Flags & ~known)
        return CUDA_ERROR_INVALID_VALUE;
    struct sim_event *event = calloc(1, sizeof *event);
    if (!event)
        return CUDA_ERROR_OUT_OF_MEMORY;
    event->context = context;
    event->handle = (CUevent)(uintptr_t)sim_object_add(sim, SIM_EVENT, event);
    if (!event->handle) {
        free(event);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *phEvent = event->handle;
    return CUDA_SUCCESS;
}

CUresult sim_cuEventDestroy(CUevent hEvent)
{
    vpmm_sim *sim = sim_self();
    struct sim_event *event;
    CUresult result = find_event(sim, hEvent, &event);
    if (result == CUDA_SUCCESS)
        sim_event_free(sim, event);
    return result;
}

CUresult sim_cuEventRecord(CUevent hEvent, CUstream hStream)
{
    vpmm_sim *sim = sim_self();
    struct sim_event *event;
    struct sim_lane *lane;
    CUresult result = find_event(sim, hEvent, &event);
    if (result == CUDA_SUCCESS)
        result = sim_lane_of(sim, hStream, &lane);
    if (result != CUDA_SUCCESS)
        return result;
    if (event->context != lane->context)
        return CUDA_ERROR_INVALID_HANDLE;
    struct sim_record *record = sim_record_new();
    struct sim_op *op = record ? sim_op_new(SIM_OP_MARK) : NULL;
    if (!op) {
        sim_record_drop(record);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    record->capture = lane->capture ? lane->capture->id : 0;
    op->record = sim_record_hold(record);
    result = sim_submit(sim, lane, op);
    if (result != CUDA_SUCCESS) {
        sim_record_drop(record);
        return result;
    }
    sim_record_drop(event->last);
    event->last = record;
    return CUDA_SUCCESS;
}

/* What a query and a wait refuse alike. */
static CUresult may_ask(vpmm_sim *sim, CUevent handle, struct sim_event **event)
{
    CUresult result = find_event(sim, handle, event);
    if (result == CUDA_SUCCESS)
        result = sim_unsafe(sim);
    if (result == CUDA_SUCCESS)
        result = sim_captured_event(sim, (*event)->last);
    return result;
}

CUresult sim_cuEventQuery(CUevent hEvent)
{
    vpmm_sim *sim = sim_self();
    struct sim_event *event;
    CUresult result = may_ask(sim, hEvent, &event);
    if (result != CUDA_SUCCESS)
        return result;
    struct sim_record *record = event->last;
    if (!sim_record_passed(sim, record))
        return CUDA_ERROR_NOT_READY;
    if (record)
        sim_host_learns(sim, record->clock, record->lane, record->number);
    return CUDA_SUCCESS;
}

CUresult sim_cuEventSynchronize(CUevent hEvent)
{
    vpmm_sim *sim = sim_self();
    struct sim_event *event;
    CUresult result = may_ask(sim, hEvent, &event);
    if (result != CUDA_SUCCESS || !event->last)
        return result;
    struct sim_record *record = sim_record_hold(event->last); /* the wait lets go of the lock */
    sim_await(sim, record->lane, record->number);
    sim_host_learns(sim, record->clock, record->lane, record->number);
    sim_record_drop(record);
    return sim_waited(sim);
}

CUresult sim_cuStreamWaitEvent(CUstream hStream, CUevent hEvent, unsigned int Flags)
{
    vpmm_sim *sim = sim_self();
    struct sim_event *event;
    struct sim_lane *lane;
    bool captured = false;
    CUresult result = sim_lane_of(sim, hStream, &lane);
    if (result == CUDA_SUCCESS)
        result = find_event(sim, hEvent, &event);
    if (result == CUDA_SUCCESS && Flags > 1)
        result = CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS || !event->last)
        return result;
    result = sim_capture_wait(sim, lane, event->last, &captured);
    if (result != CUDA_SUCCESS || captured)
        return result;
    struct sim_op *op = sim_op_new(SIM_OP_MARK);
    if (!op)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (event->last->lane != lane->id)
        sim_op_depend(op, event->last);
    return sim_submit(sim, lane, op);
}
