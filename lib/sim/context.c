/*
 * context.c - contexts, and each thread's stack of current ones.
 *
 * A context's handle keeps its meaning: the primary one's is the same after release and retain, and while nobody
 * retains it, it is as good as destroyed. Ending a context waits for its work and takes its streams and events along.
 */
#include "internal.h"

#include <stdlib.h>

CUresult sim_current(vpmm_sim *sim, struct sim_context **context)
{
    struct sim_thread *thread = sim_thread(sim);
    CUcontext top = thread && thread->depth ? thread->contexts[thread->depth - 1] : NULL;
    if (!top)
        return CUDA_ERROR_INVALID_CONTEXT;
    *context = sim_object_peek(sim, SIM_CONTEXT, (uint64_t)(uintptr_t)top);
    return *context && (*context)->alive ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

/* For vpmm_sim_step of a default stream: the current context, else any primary one. */
struct sim_context *sim_context_of_step(vpmm_sim *sim)
{
    struct sim_context *context = NULL;
    if (sim_current(sim, &context) == CUDA_SUCCESS)
        return context;
    return sim->devices[0].primary;
}

static CUresult find_context(vpmm_sim *sim, CUcontext handle, struct sim_context **context)
{
    *context = sim_object_find(sim, SIM_CONTEXT, (uint64_t)(uintptr_t)handle);
    if (!*context)
        return CUDA_ERROR_INVALID_CONTEXT;
    return (*context)->alive ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

static struct sim_context *context_open(vpmm_sim *sim, int device, unsigned flags, bool primary)
{
    struct sim_context *context = calloc(1, sizeof *context);
    if (!context)
        return NULL;
    *context = (struct sim_context){.device = device, .primary = primary, .alive = true, .flags = flags};
    context->handle = (CUcontext)(uintptr_t)sim_object_add(sim, SIM_CONTEXT, context);
    if (!context->handle)
        free(context), context = NULL;
    return context;
}

static void end_events(vpmm_sim *sim, struct sim_context *context)
{
    uint32_t cursor = 0;
    struct sim_event *event;
    while ((event = sim_object_next(sim, SIM_EVENT, &cursor)))
        if (event->context == context)
            sim_event_free(sim, event);
}

static void sim_context_end(vpmm_sim *sim, struct sim_context *context)
{
    sim_drain_context(sim, context);
    while (context->lanes)
        sim_lane_close(sim, context->lanes);
    context->legacy = NULL;
    end_events(sim, context);
    context->alive = false;
}

CUresult sim_cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev)
{
    vpmm_sim *sim = sim_self();
    if (!pctx)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_valid(sim, dev))
        return CUDA_ERROR_INVALID_DEVICE;
    struct sim_context **primary = &sim->devices[dev].primary;
    if (!*primary)
        *primary = context_open(sim, dev, 0, true);
    if (!*primary)
        return CUDA_ERROR_OUT_OF_MEMORY;
    (*primary)->alive = true;
    (*primary)->retained++;
    *pctx = (*primary)->handle;
    return CUDA_SUCCESS;
}

CUresult sim_cuDevicePrimaryCtxRelease(CUdevice dev)
{
    vpmm_sim *sim = sim_self();
    if (!sim_device_valid(sim, dev))
        return CUDA_ERROR_INVALID_DEVICE;
    struct sim_context *primary = sim->devices[dev].primary;
    if (!primary || primary->retained == 0)
        return sim_misuse(sim, CUDA_ERROR_INVALID_CONTEXT, "the primary context is released, but nobody retains it");
    if (primary->retained == 1) /* lets others in, who may retain it */
        sim_drain_context(sim, primary);
    if (--primary->retained == 0) {
        sim_context_end(sim, primary);
        sim_plain_end(sim, primary);
    }
    return CUDA_SUCCESS;
}

/* As the ABI of version 3020 does it, the new context is current afterwards. */
CUresult sim_cuCtxCreate(CUcontext *pctx, unsigned int flags, CUdevice dev)
{
    vpmm_sim *sim = sim_self();
    struct sim_thread *thread = sim_thread(sim);
    if (!pctx)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_valid(sim, dev))
        return CUDA_ERROR_INVALID_DEVICE;
    if (thread->depth == SIM_CONTEXT_DEPTH)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct sim_context *context = context_open(sim, dev, flags, false);
    if (!context)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *pctx = thread->contexts[thread->depth++] = context->handle;
    return CUDA_SUCCESS;
}

CUresult sim_cuCtxDestroy(CUcontext ctx)
{
    vpmm_sim *sim = sim_self();
    struct sim_thread *thread = sim_thread(sim);
    struct sim_context *context;
    CUresult result = find_context(sim, ctx, &context);
    if (result != CUDA_SUCCESS)
        return result;
    if (context->primary)
        return CUDA_ERROR_INVALID_CONTEXT;
    sim_context_end(sim, context);
    sim_plain_end(sim, context);
    sim_object_remove(sim, SIM_CONTEXT, (uint64_t)(uintptr_t)ctx);
    free(context);
    if (thread->depth && thread->contexts[thread->depth - 1] == ctx)
        thread->depth--;
    return CUDA_SUCCESS;
}

CUresult sim_cuCtxGetCurrent(CUcontext *pctx)
{
    struct sim_thread *thread = sim_thread(sim_self());
    if (!pctx)
        return CUDA_ERROR_INVALID_VALUE;
    *pctx = thread->depth ? thread->contexts[thread->depth - 1] : NULL;
    return CUDA_SUCCESS;
}

CUresult sim_cuCtxPushCurrent(CUcontext ctx)
{
    vpmm_sim *sim = sim_self();
    struct sim_thread *thread = sim_thread(sim);
    struct sim_context *context;
    CUresult result = find_context(sim, ctx, &context);
    if (result != CUDA_SUCCESS)
        return result;
    if (thread->depth == SIM_CONTEXT_DEPTH)
        return CUDA_ERROR_OUT_OF_MEMORY;
    thread->contexts[thread->depth++] = ctx;
    return CUDA_SUCCESS;
}

CUresult sim_cuCtxPopCurrent(CUcontext *pctx)
{
    struct sim_thread *thread = sim_thread(sim_self());
    if (thread->depth == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    thread->depth--;
    if (pctx)
        *pctx = thread->contexts[thread->depth];
    return CUDA_SUCCESS;
}

/* NULL pops, another context replaces the top. */
CUresult sim_cuCtxSetCurrent(CUcontext ctx)
{
    vpmm_sim *sim = sim_self();
    struct sim_thread *thread = sim_thread(sim);
    struct sim_context *context;
    if (!ctx) {
        thread->depth -= thread->depth > 0;
        return CUDA_SUCCESS;
    }
    CUresult result = find_context(sim, ctx, &context);
    if (result != CUDA_SUCCESS)
        return result;
    thread->depth += thread->depth == 0;
    thread->contexts[thread->depth - 1] = ctx;
    return CUDA_SUCCESS;
}

CUresult sim_cuCtxGetDevice(CUdevice *device)
{
    struct sim_context *context;
    CUresult result = sim_current(sim_self(), &context);
    if (result != CUDA_SUCCESS)
        return result;
    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    *device = context->device;
    return CUDA_SUCCESS;
}

CUresult sim_cuCtxSynchronize(void)
{
    vpmm_sim *sim = sim_self();
    struct sim_context *context;
    CUresult result = sim_current(sim, &context);
    if (result == CUDA_SUCCESS)
        result = sim_capture_context(sim, context);
    if (result != CUDA_SUCCESS)
        return result;
    sim_drain_context(sim, context);
    return sim_waited(sim);
}
