#include "space/context.h"

#include "base/lock.h"
#include "space/fence.h"

#include <stdlib.h>

/* ---- blocks to wait by ---- */

/* Under wait_lock. */
static bool has_wait_block(const struct streams *streams, CUcontext context)
{
    for (uint32_t slot = 1; slot < load_acquire_u32(&streams->slots); slot++) {
        const struct stream *stream = stream_at(streams, slot);
        if (stream->wait_block && stream->wait_context == context)
            return true;
    }
    return false;
}

void context_keep_block(struct streams *streams, struct stream *holder, CUcontext context)
{
    struct device_scope scope;
    lock_take(&streams->wait_lock);
    if (!holder->wait_block && !has_wait_block(streams, context) &&
        device_enter_context(streams->device, context, &scope) == VPMM_SUCCESS) {
        device_call(streams->device, cuMemAlloc, &holder->wait_block, 1);
        holder->wait_context = context;
        device_leave(streams->device, &scope);
    }
    pthread_mutex_unlock(&streams->wait_lock);
}

void context_free_block(struct streams *streams, struct stream *holder)
{
    if (holder->wait_block)
        device_call(streams->device, cuMemFree, holder->wait_block);
}

/* ---- the wait ---- */

struct snapshot {
    CUcontext context; /* NULL: nothing of the slot is waited for */
    uint64_t published;
};

/*
 * Waits for everything that the context's streams were given. cuMemFree does (an H200 waits 50 ms for a kernel of 50
 * ms, of a stream that is destroyed as well), and leaves captures alone in relaxed mode; cuCtxSynchronize would destroy
 * each capture in the context, whatever the mode.
 */
static vpmm_status wait_for_context(struct streams *streams, struct stream *holder, CUcontext context)
{
    CUdeviceptr *block = &holder->wait_block;
    bool kept = *block != 0;
    CUresult result = kept ? device_call(streams->device, cuMemFree, *block) : CUDA_SUCCESS;
    if (kept && holder->wait_refused && result == CUDA_ERROR_INVALID_VALUE) /* it was taken though the driver said no */
        kept = false;
    if (!kept) {
        *block = 0;
        holder->wait_context = context;
        /* If there is a block it was made, whatever the driver said. */
        if (device_call(streams->device, cuMemAlloc, block, 1) != CUDA_SUCCESS && !*block)
            return device_failed(streams->device, "making a block to wait for the device by");
        result = device_call(streams->device, cuMemFree, *block);
    }
    holder->wait_refused = result != CUDA_SUCCESS;
    if (holder->wait_refused) /* the block is tried again another time */
        return device_failed(streams->device, "waiting for the device before giving up");
    *block = 0;
    return VPMM_SUCCESS;
}

/* The record that has a block of the context, the only one whose end the block's freeing waits for; else `stream`. */
static struct stream *holder_of(struct streams *streams, uint32_t slots, struct stream *stream)
{
    struct stream *empty = stream;
    for (uint32_t slot = 1; slot < slots; slot++) {
        struct stream *other = stream_at(streams, slot);
        if (other->wait_block && other->wait_context == stream->context)
            return other;
        if (!other->wait_block && empty->wait_block)
            empty = other;
    }
    return empty;
}

/* Waits for one context and completes what was published on its streams before. With a context went its work. */
static vpmm_status synchronise_context(struct streams *streams, struct snapshot *snapshot, uint32_t slots,
                                       struct stream *one)
{
    struct device_scope scope;
    CUcontext context = one->context;
    bool gone = device_context_is_gone(streams->device, one->context);
    vpmm_status status = gone ? VPMM_SUCCESS : device_enter_context(streams->device, context, &scope);
    if (status == VPMM_SUCCESS && !gone) {
        lock_take(&streams->wait_lock);
        struct stream *holder = holder_of(streams, slots, one);
        bool kept = holder->wait_block;
        status = wait_for_context(streams, holder, context);
        pthread_mutex_unlock(&streams->wait_lock);
        if (kept)
            context_keep_block(streams, holder, context); /* for the next time */
        device_leave(streams->device, &scope);
    }
    for (uint32_t slot = 1; slot < slots; slot++)
        if (snapshot[slot].context == context) {
            if (status == VPMM_SUCCESS)
                fences_complete_until(stream_at(streams, slot), snapshot[slot].published);
            snapshot[slot].context = NULL;
        }
    return status;
}

vpmm_status streams_synchronise(struct streams *streams)
{
    uint32_t slots = load_acquire_u32(&streams->slots);
    struct snapshot *snapshot = calloc(slots, sizeof *snapshot);
    vpmm_status status = VPMM_SUCCESS;
    if (!snapshot)
        return fail(VPMM_ERROR_HOST_MEMORY, "no host memory for a list of streams");
    for (uint32_t slot = 1; slot < slots; slot++) {
        struct stream *stream = stream_at(streams, slot);
        snapshot[slot].published = load_sc_u64(&stream->published);
        if (snapshot[slot].published > load_relaxed_u64(&stream->completed))
            snapshot[slot].context = stream->context;
    }
    for (uint32_t slot = 1; slot < slots; slot++)
        if (snapshot[slot].context) {
            vpmm_status one = synchronise_context(streams, snapshot, slots, stream_at(streams, slot));
            status = status == VPMM_SUCCESS ? one : status;
        }
    free(snapshot);
    return status;
}
