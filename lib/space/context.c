#include "space/context.h"

#include "base/lock.h"
#include "space/fence.h"

#include <stdlib.h>

/* ---- blocks to wait by ---- */

/* The registry's, and then each record's. */
static struct wait_holder *holder_at(struct streams *streams, uint32_t slot)
{
    return slot ? &stream_at(streams, slot)->wait : &streams->wait;
}

/* Under wait_lock. */
static bool has_block(struct streams *streams, CUcontext context)
{
    for (uint32_t slot = 0; slot < load_acquire_u32(&streams->slots); slot++) {
        const struct wait_holder *holder = holder_at(streams, slot);
        if (holder->block && holder->context == context)
            return true;
    }
    return false;
}

/*
 * Under wait_lock, in the context. If there is a block it was made, whatever the driver says. Another one of the same
 * address is no more: the driver had refused to free it and freed it all the same, or it went with its context.
 */
static CUresult make_block(struct streams *streams, struct wait_holder *holder, CUcontext context)
{
    holder->context = context;
    holder->is_refused = false;
    CUresult result = device_call(streams->device, cuMemAlloc, &holder->block, 1);
    for (uint32_t slot = 0; holder->block && slot < load_acquire_u32(&streams->slots); slot++) {
        struct wait_holder *other = holder_at(streams, slot);
        if (other != holder && other->block == holder->block) {
            other->block = 0;
            other->is_refused = false;
        }
    }
    return result;
}

/* Under wait_lock. The one that is meant for the context's, which could not be had yet. NULL: none is. */
static struct wait_holder *holder_for(struct streams *streams, CUcontext context)
{
    for (uint32_t slot = 0; slot < load_acquire_u32(&streams->slots); slot++) {
        struct wait_holder *holder = holder_at(streams, slot);
        if (holder->is_kept && holder->context == context)
            return holder;
    }
    return NULL;
}

/* Under wait_lock. One that keeps none, from this one on; NULL: there is none. */
static struct wait_holder *empty_holder(struct streams *streams, struct wait_holder *first)
{
    struct wait_holder *holder = first;
    for (uint32_t slot = 0; holder && (holder->is_kept || holder->block); slot++)
        holder = slot < load_acquire_u32(&streams->slots) ? holder_at(streams, slot) : NULL;
    return holder;
}

/* Under wait_lock. */
static void keep_block(struct streams *streams, struct wait_holder *holder, CUcontext context)
{
    struct device_scope scope;
    struct wait_holder *meant = holder_for(streams, context);
    holder = meant ? meant : empty_holder(streams, holder); /* the given one may keep another context's */
    if (holder && !has_block(streams, context)) {
        holder->context = context;
        holder->is_kept = true;
        if (device_enter_context(streams->device, context, &scope) == VPMM_SUCCESS) {
            make_block(streams, holder, context);
            device_leave(streams->device, &scope);
        }
        if (!holder->block)
            store_relaxed_u32(&streams->lacks_block, 1);
    }
}

void context_keep_block(struct streams *streams, struct wait_holder *holder, CUcontext context)
{
    lock_take(&streams->wait_lock);
    keep_block(streams, holder, context);
    pthread_mutex_unlock(&streams->wait_lock);
}

void context_keep_block_if_free(struct streams *streams, struct wait_holder *holder, CUcontext context)
{
    if (!lock_try(&streams->wait_lock)) {
        store_relaxed_ptr(&streams->wants_block, context);
        return;
    }
    keep_block(streams, holder, context);
    pthread_mutex_unlock(&streams->wait_lock);
}

void context_keep_missing_blocks(struct streams *streams)
{
    if (!load_relaxed_u32(&streams->lacks_block) || !lock_try(&streams->wait_lock))
        return;
    store_relaxed_u32(&streams->lacks_block, 0);
    for (uint32_t slot = 0; slot < load_acquire_u32(&streams->slots); slot++) {
        struct wait_holder *holder = holder_at(streams, slot);
        if (holder->is_kept && !holder->block && !device_context_is_gone(streams->device, holder->context))
            keep_block(streams, holder, holder->context);
    }
    pthread_mutex_unlock(&streams->wait_lock);
}

/* Under wait_lock. Whether a stream of the context was met while the lock was taken. */
static bool wants_block(struct streams *streams, CUcontext context)
{
    if (load_relaxed_ptr(&streams->wants_block) != context)
        return false;
    store_relaxed_ptr(&streams->wants_block, NULL);
    return true;
}

/* Under wait_lock. The context is no more, and its blocks with it: another may have its handle, or their addresses. */
static void forget_context(struct streams *streams, CUcontext context)
{
    for (uint32_t slot = 0; slot < load_acquire_u32(&streams->slots); slot++)
        if (holder_at(streams, slot)->context == context)
            *holder_at(streams, slot) = (struct wait_holder){0};
}

/*
 * Frees the holder's block, which waits for its context. Refused, it is tried again another time: if the driver calls
 * it no allocation then, it was taken though the driver had said no.
 */
static CUresult free_block(struct streams *streams, struct wait_holder *holder)
{
    CUresult result = device_call(streams->device, cuMemFree, holder->block);
    bool was_taken = holder->is_refused && result == CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS || was_taken)
        holder->block = 0;
    holder->is_refused = holder->block != 0;
    return result;
}

CUresult context_free_blocks(struct streams *streams)
{
    CUresult first = CUDA_SUCCESS;
    for (uint32_t slot = 0; slot < load_acquire_u32(&streams->slots); slot++) {
        struct wait_holder *holder = holder_at(streams, slot);
        if (!holder->block || device_context_is_gone(streams->device, holder->context))
            continue;
        CUresult result = free_block(streams, holder);
        if (holder->block) /* once more: the driver may have taken it */
            result = free_block(streams, holder);
        first = first == CUDA_SUCCESS && holder->block ? result : first;
    }
    return first;
}

/* ---- the wait ---- */

struct snapshot {
    CUcontext context; /* NULL: nothing of the slot is waited for */
    uint64_t published;
};

struct waiting {
    struct streams *streams;
    pthread_mutex_t *event_lock;
    struct snapshot *snapshot; /* by slot */
    uint32_t slots;
};

/*
 * Waits for everything that the context's streams were given. cuMemFree does (an H200 waits 50 ms for a kernel of 50
 * ms, of a stream that is destroyed as well), and leaves captures alone in relaxed mode; cuCtxSynchronize would destroy
 * each capture in the context, whatever the mode.
 */
static vpmm_status wait_for_context(struct streams *streams, struct wait_holder *holder, CUcontext context)
{
    bool is_sure = holder->block && !holder->is_refused; /* else its address may be another's, of another context */
    CUresult result = holder->block ? free_block(streams, holder) : CUDA_SUCCESS;
    if (!is_sure && !holder->block) {
        if (make_block(streams, holder, context) != CUDA_SUCCESS && !holder->block)
            return device_failed(streams->device, "making a block to wait for the device by");
        result = free_block(streams, holder);
    }
    if (result != CUDA_SUCCESS)
        return device_failed(streams->device, "waiting for the device before giving up");
    return VPMM_SUCCESS;
}

/*
 * Under wait_lock. Among those of the slots below `slots` the holder of a block of the context, the only one whose end
 * the block's freeing waits for, or of one that is to be kept; else one that keeps none, which `spare` does not either.
 */
static struct wait_holder *holder_of(struct streams *streams, uint32_t slots, CUcontext context,
                                     struct wait_holder *spare)
{
    struct wait_holder *best = spare;
    for (uint32_t slot = 0; slot < slots; slot++) {
        struct wait_holder *holder = holder_at(streams, slot);
        if (holder->block && holder->context == context)
            return holder;
        if ((holder->is_kept && holder->context == context) || (best == spare && !holder->is_kept && !holder->block))
            best = holder;
    }
    return best;
}

/*
 * Under wait_lock, in the context. *kept: the holder that is to have the next block, if it has none for another
 * context; NULL: there is to be none.
 */
static vpmm_status wait_by_block(struct streams *streams, uint32_t slots, CUcontext context, struct wait_holder **kept)
{
    struct wait_holder spare = {0}, *holder = holder_of(streams, slots, context, &spare);
    *kept = holder->is_kept ? holder : wants_block(streams, context) ? &streams->wait : NULL;
    vpmm_status status = wait_for_context(streams, holder, context);
    if (spare.block) /* it was refused, and stands nowhere: a last try */
        free_block(streams, &spare);
    return status;
}

/* Whether another thread's wait has shown that all of the context's has passed. */
static bool has_passed(const struct waiting *waiting, CUcontext context)
{
    for (uint32_t slot = 1; slot < waiting->slots; slot++)
        if (waiting->snapshot[slot].context == context &&
            !fence_passed(waiting->streams, (struct fence){slot, waiting->snapshot[slot].published}))
            return false;
    return true;
}

static void complete(struct waiting *waiting, CUcontext context)
{
    lock_take(waiting->event_lock);
    for (uint32_t slot = 1; slot < waiting->slots; slot++)
        if (waiting->snapshot[slot].context == context)
            fences_complete_until(stream_at(waiting->streams, slot), waiting->snapshot[slot].published);
    pthread_mutex_unlock(waiting->event_lock);
}

/*
 * Waits for one context. With a context went its work. `waiting`: not if another thread's wait has shown what it is
 * for; and completes what was published on the context's streams before. NULL: for all, and nothing is completed.
 */
static vpmm_status wait_in_context(struct streams *streams, uint32_t slots, CUcontext context, struct waiting *waiting)
{
    struct device_scope scope;
    bool gone = device_context_is_gone(streams->device, context);
    struct wait_holder *kept = NULL;
    vpmm_status status = gone ? VPMM_SUCCESS : device_enter_context(streams->device, context, &scope);
    if (status != VPMM_SUCCESS)
        return status;
    lock_take(&streams->wait_lock);
    if (gone)
        forget_context(streams, context);
    else if (!waiting || !has_passed(waiting, context))
        status = wait_by_block(streams, slots, context, &kept);
    if (waiting && status == VPMM_SUCCESS)
        complete(waiting, context); /* before the next one looks whether it has to wait */
    pthread_mutex_unlock(&streams->wait_lock);
    if (kept)
        context_keep_block(streams, kept, context); /* for the next time */
    if (!gone)
        device_leave(streams->device, &scope);
    return status;
}

/* By their contexts as they are now: a record may be another stream's when the wait is over, and its fences go on. */
static void take_snapshot(struct waiting *waiting)
{
    lock_take(waiting->event_lock);
    for (uint32_t slot = 1; slot < waiting->slots; slot++) {
        const struct stream *stream = stream_at(waiting->streams, slot);
        waiting->snapshot[slot].published = load_sc_u64(&stream->published);
        if (waiting->snapshot[slot].published > load_relaxed_u64(&stream->completed))
            waiting->snapshot[slot].context = stream->context;
    }
    pthread_mutex_unlock(waiting->event_lock);
}

vpmm_status streams_synchronise(struct streams *streams, pthread_mutex_t *event_lock)
{
    struct waiting waiting = {streams, event_lock, .slots = load_acquire_u32(&streams->slots)};
    vpmm_status status = VPMM_SUCCESS;
    waiting.snapshot = calloc(waiting.slots, sizeof *waiting.snapshot);
    if (!waiting.snapshot)
        return fail(VPMM_ERROR_HOST_MEMORY, "no host memory for a list of streams");
    take_snapshot(&waiting);
    for (uint32_t slot = 1; slot < waiting.slots; slot++) {
        CUcontext context = waiting.snapshot[slot].context;
        vpmm_status one = context ? wait_in_context(streams, waiting.slots, context, &waiting) : VPMM_SUCCESS;
        status = status == VPMM_SUCCESS ? one : status;
        for (uint32_t other = slot; context && other < waiting.slots; other++)
            if (waiting.snapshot[other].context == context)
                waiting.snapshot[other].context = NULL;
    }
    free(waiting.snapshot);
    return status;
}

/*
 * The primary context, whose streams may use the memory of other contexts' default streams, and each that a stream was
 * met in, once. Its length is `slots` at most, of which one is no stream's. NULL: no host memory.
 */
static CUcontext *contexts_met(struct streams *streams, uint32_t slots, uint32_t *contexts)
{
    CUcontext *list = calloc(slots, sizeof(CUcontext));
    *contexts = 0;
    if (list)
        list[(*contexts)++] = streams->device->primary;
    lock_take(&streams->lock); /* under which a record becomes a stream's */
    for (uint32_t slot = 1; list && slot < slots; slot++) {
        CUcontext context = stream_at(streams, slot)->context;
        uint32_t known = 0;
        while (known < *contexts && list[known] != context)
            known++;
        if (context && known == *contexts)
            list[(*contexts)++] = context;
    }
    pthread_mutex_unlock(&streams->lock);
    return list;
}

vpmm_status streams_wait_for_all(struct streams *streams)
{
    uint32_t slots = load_acquire_u32(&streams->slots), contexts;
    CUcontext *context = contexts_met(streams, slots, &contexts);
    if (!context)
        return fail(VPMM_ERROR_HOST_MEMORY, "no host memory for a list of contexts");
    vpmm_status status = VPMM_SUCCESS;
    for (uint32_t i = 0; i < contexts && status == VPMM_SUCCESS; i++)
        status = wait_in_context(streams, slots, context[i], NULL);
    free(context);
    return status;
}

void streams_complete_all(struct streams *streams)
{
    for (uint32_t slot = 1; slot < load_acquire_u32(&streams->slots); slot++) {
        struct stream *stream = stream_at(streams, slot);
        fences_complete_until(stream, load_sc_u64(&stream->published));
    }
}
