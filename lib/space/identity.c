#include "space/identity.h"

#include <limits.h>
#include <pthread.h>
#include <stdlib.h>

/* ---- threads, for per-thread streams ---- */

struct thread {
    _Atomic(uint32_t) references;
    _Atomic(uint32_t) exited;
};

static pthread_key_t thread_key;
static bool has_thread_key; /* false: other libraries have taken all keys, and no per-thread stream can be known */
static pthread_once_t thread_key_once = PTHREAD_ONCE_INIT;

void thread_ref(struct thread *thread)
{
    if (thread)
        fetch_add_relaxed_u32(&thread->references, 1);
}

/* Each release pairs with the acquire of the one that finds the last reference. */
void thread_unref(struct thread *thread)
{
    if (thread && fetch_add_acq_rel_u32(&thread->references, UINT32_MAX) == 1)
        free(thread);
}

bool thread_has_exited(const struct thread *thread)
{
    return load_acquire_u32(&thread->exited);
}

static void thread_exits(void *data)
{
    struct thread *thread = data;
    store_release_u32(&thread->exited, 1); /* pairs with the reaper's acquire in thread_has_exited */
    thread_unref(thread);
}

static void make_thread_key(void)
{
    has_thread_key = pthread_key_create(&thread_key, thread_exits) == 0;
}

/* The calling thread, NULL: no memory, or no key. The record that keeps it takes a reference. */
static struct thread *thread_self(void)
{
    pthread_once(&thread_key_once, make_thread_key);
    struct thread *self = has_thread_key ? pthread_getspecific(thread_key) : NULL;
    if (self || !has_thread_key)
        return self;
    self = calloc(1, sizeof *self);
    if (!self)
        return NULL;
    store_relaxed_u32(&self->references, 1);
    if (pthread_setspecific(thread_key, self)) {
        free(self);
        return NULL;
    }
    return self;
}

/* ---- handles ---- */

static vpmm_status no_thread(void)
{
    if (has_thread_key)
        return fail(VPMM_ERROR_HOST_MEMORY, "no host memory for this thread's record");
    return fail(
        VPMM_ERROR_HOST_MEMORY,
        "CU_STREAM_PER_THREAD needs a pthread key, by which a thread's end is known, and when the process first "
        "asked for one its %d keys were all taken: use another stream",
        PTHREAD_KEYS_MAX);
}

/* Which record is the stream's; for default streams, by context and thread. */
static vpmm_status find_key(struct device *device, CUstream handle, struct identity *identity)
{
    *identity = (struct identity){.key = {(uint64_t)(uintptr_t)handle, 0}};
    if (!handle_is_legacy(handle) && handle != CU_STREAM_PER_THREAD)
        return VPMM_SUCCESS;
    vpmm_status status = device_current_context(device, &identity->context);
    if (status != VPMM_SUCCESS)
        return status;
    if (handle_is_legacy(handle)) {
        identity->key = (struct object_key){(uint64_t)(uintptr_t)identity->context, 1};
    } else {
        identity->thread = thread_self();
        if (!identity->thread)
            return no_thread();
        identity->key =
            (struct object_key){(uint64_t)(uintptr_t)identity->context, (uint64_t)(uintptr_t)identity->thread};
    }
    return VPMM_SUCCESS;
}

/*
 * A default stream is asked in its own context, which identify has chosen; any other by its handle alone. In whatever
 * capture mode: no capture is harmed by the question.
 */
static CUresult ask_capture(struct device *device, CUstream handle, CUcontext context, CUstreamCaptureStatus *capture)
{
    bool pushed = false;
    if (context && device_push_context(device, context, &pushed) != CUDA_SUCCESS)
        return CUDA_ERROR_INVALID_CONTEXT;
    CUresult result = device_call(device, cuStreamIsCapturing, handle, capture);
    if (pushed)
        device_pop_context(device);
    return result;
}

vpmm_status identity_refuse_capture(struct device *device, CUstream handle, CUcontext context)
{
    CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult result = ask_capture(device, handle, context, &capture);
    if (result != CUDA_SUCCESS && !device_result_is_capture(result))
        return device_failed(device, "asking whether the stream captures");
    if (result != CUDA_SUCCESS || capture != CU_STREAM_CAPTURE_STATUS_NONE)
        return fail(
            VPMM_ERROR_NOT_SUPPORTED,
            "the stream is being captured into a graph: allocate, free and release it outside of the capture, or "
            "in a pool that is the graph's (vpmm_config.graph)");
    return VPMM_SUCCESS;
}

/*
 * What a hit needs to know, in this order: cuStreamGetId of a capturing stream returns an error, and destroys the
 * capture (seen on an H200, driver 580).
 */
vpmm_status identify(struct device *device, CUstream handle, bool by_name, struct identity *identity)
{
    vpmm_status status = find_key(device, handle, identity);
    if (by_name)
        return status;
    if (status == VPMM_SUCCESS)
        status = identity_refuse_capture(device, handle, identity->context);
    if (status != VPMM_SUCCESS || identity->context || !device->driver.cuStreamGetId)
        return status;
    if (device_call(device, cuStreamGetId, handle, &identity->id) != CUDA_SUCCESS)
        return device_failed(device, "looking at the stream");
    identity->has_id = true;
    return VPMM_SUCCESS;
}

static vpmm_status check_device(struct device *device, CUcontext context)
{
    CUdevice id = -1;
    bool pushed;
    if (device_push_context(device, context, &pushed) != CUDA_SUCCESS)
        return device_failed(device, "looking at the stream's context");
    CUresult result = device_call(device, cuCtxGetDevice, &id);
    if (pushed)
        device_pop_context(device);
    if (result != CUDA_SUCCESS)
        return device_failed(device, "looking at the stream's device");
    if (id != device->id)
        return fail(VPMM_ERROR_INVALID_VALUE, "the stream belongs to device %d and the pool to device %d", (int)id,
                    (int)device->id);
    return VPMM_SUCCESS;
}

vpmm_status identity_find_context(struct device *device, CUstream handle, const struct identity *identity,
                                  CUcontext *context)
{
    *context = identity->context;
    if (*context)
        return VPMM_SUCCESS;
    if (device_call(device, cuStreamGetCtx, handle, context) != CUDA_SUCCESS)
        return device_failed(device, "looking for the stream's context");
    return check_device(device, *context);
}

vpmm_status identity_check(struct device *device, CUstream handle)
{
    struct identity identity;
    CUcontext context;
    vpmm_status status = find_key(device, handle, &identity);
    if (status == VPMM_SUCCESS)
        status = identity_refuse_capture(device, handle, identity.context);
    return status == VPMM_SUCCESS ? identity_find_context(device, handle, &identity, &context) : status;
}
