#include "memory.h"

#include "book.h"
#include "real.h"
#include "switch.h"
#include "trace.h"

#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

/*
 * What requests are rounded up to: the driver gives addresses that are multiples of 512 (the texture alignment), and
 * so does vpmm for lengths that are.
 */
#define ROUNDED 512

static bool is_default(CUstream stream)
{
    return !stream || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD;
}

static CUstream default_is_per_thread(CUstream stream)
{
    return stream ? stream : CU_STREAM_PER_THREAD;
}

/*
 * The stream's context; NULL: *why. The driver is asked about a capture before anything else that is given the stream,
 * for other calls may end it.
 */
static CUcontext context_of(const vpmm_driver *driver, CUstream stream, enum count *why)
{
    CUcontext context = NULL;
    CUstreamCaptureStatus status;
    *why = COUNT_left_context;
    if (is_default(stream) && (driver->cuCtxGetCurrent(&context) != CUDA_SUCCESS || !context))
        return NULL;
    CUresult result = driver->cuStreamIsCapturing(stream, &status);
    if (result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT || (result == CUDA_SUCCESS && status))
        *why = COUNT_left_capture;
    if (result != CUDA_SUCCESS || status)
        return NULL;
    if (!is_default(stream) && driver->cuStreamGetCtx(stream, &context) != CUDA_SUCCESS)
        return NULL;
    return context;
}

/* Of live memory, whoever it is of; the current context's where that cannot be said. */
static int device_of_memory(CUdeviceptr memory)
{
    uint64_t start;
    struct allocation allocation;
    int device;
    if (book_find(memory, &start, &allocation))
        return (int)allocation.device;
    if (REAL(pointer_attribute, &device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, memory) == CUDA_SUCCESS)
        return device;
    return memory_device();
}

/* ---- malloc ---- */

static size_t rounded(size_t bytes)
{
    return bytes <= SIZE_MAX - ROUNDED ? (bytes + ROUNDED - 1) / ROUNDED * ROUNDED : bytes;
}

static enum count refusal_of(vpmm_status status)
{
    return status == VPMM_ERROR_OUT_OF_MEMORY ? COUNT_left_no_memory : COUNT_left_refused;
}

static int64_t beyond(struct allocation allocation)
{
    return (int64_t)(rounded(allocation.bytes) - (allocation.at_once ? 0 : allocation.bytes));
}

/* Memory of vpmm's on a stream, in the book. False: *why. */
static bool take(struct served *served, CUdeviceptr *memory, size_t bytes, CUstream stream, bool at_once,
                 enum count *why)
{
    CUdeviceptr start;
    vpmm_status status = vpmm_malloc(served->pool, rounded(bytes), stream, &start);
    *why = refusal_of(status);
    if (status != VPMM_SUCCESS)
        return false;
    struct allocation allocation = {.bytes = bytes, .device = served->device, .at_once = at_once};
    if (!book_add(start, allocation)) {
        vpmm_free(served->pool, start, stream);
        return false;
    }
    lane_add_beyond(served->device, beyond(allocation));
    *memory = start;
    *why = COUNT_served;
    return true;
}

/* What is left for good is left before there is a pool for it. */
static bool may_serve(int device, CUmemoryPool named, enum count *why)
{
    *why = COUNT_left_context;
    if (device < 0)
        return false;
    *why = COUNT_left_pool;
    if (named ? !served_is_standard(device, named) : served_elsewhere(device))
        return false;
    *why = COUNT_left_shared;
    return !served_is_shared(device, SERVED_SHARED_ASYNC);
}

/* In the lanes; `named`: the pool that the request names, or NULL. False: *why. */
static bool serve_async(CUdeviceptr *memory, size_t bytes, CUmemoryPool named, CUstream stream, enum count *why)
{
    const vpmm_driver *driver = vpmm_driver_cuda();
    *why = !driver ? COUNT_left_unserved : COUNT_left_size;
    if (!driver || !memory || !bytes)
        return false;
    CUcontext context = context_of(driver, stream, why);
    int device = served_device_of(context);
    if (!context || !may_serve(device, named, why))
        return false;
    struct served *served = served_of_primary(device, context, why);
    return served && take(served, memory, bytes, stream, false, why);
}

/* False: the driver is asked for it, also where vpmm has no memory: its own pool may keep some. */
static bool alloc_async(CUdeviceptr *memory, size_t bytes, CUmemoryPool named, CUstream stream)
{
    enum count why;
    lane_enter();
    bool served = serve_async(memory, bytes, named, stream, &why);
    lane_leave();
    lane_count(why);
    return served;
}

/* The stream's device, which need not be the current one, whether or not it has a pool. */
static int device_of_stream(CUstream stream)
{
    enum count why;
    const vpmm_driver *driver = vpmm_driver_cuda();
    int device = driver ? served_device_of(context_of(driver, stream, &why)) : -1;
    return device < 0 ? memory_device() : device;
}

/* As the request's end: it is written down, where it is to be (trace.h). */
static CUresult traced_async(CUresult result, const CUdeviceptr *memory, size_t bytes, CUstream stream)
{
    enum count why;
    if (result != CUDA_SUCCESS || !trace_is_on())
        return result;
    const vpmm_driver *driver = vpmm_driver_cuda();
    if (driver && context_of(driver, stream, &why))
        trace_malloc(device_of_memory(*memory), *memory, bytes, stream);
    return result;
}

CUresult preload_alloc_async(CUdeviceptr *memory, size_t bytes, CUstream stream)
{
    CUresult result = CUDA_SUCCESS;
    if (!alloc_async(memory, bytes, NULL, stream))
        result = MEMORY_RETRIED_ON(device_of_stream(stream), REAL(alloc_async, memory, bytes, stream));
    return traced_async(result, memory, bytes, stream);
}

CUresult preload_alloc_async_ptsz(CUdeviceptr *memory, size_t bytes, CUstream stream)
{
    CUresult result = CUDA_SUCCESS;
    CUstream meant = default_is_per_thread(stream);
    if (!alloc_async(memory, bytes, NULL, meant))
        result = MEMORY_RETRIED_ON(device_of_stream(meant), REAL(alloc_async_ptsz, memory, bytes, stream));
    return traced_async(result, memory, bytes, meant);
}

/* ---- free ---- */

static CUresult result_of(vpmm_status status)
{
    switch (status) {
    case VPMM_SUCCESS:
        return CUDA_SUCCESS;
    case VPMM_ERROR_INVALID_VALUE:
    case VPMM_ERROR_INVALID_POINTER:
    case VPMM_ERROR_NOT_SUPPORTED:
        return CUDA_ERROR_INVALID_VALUE;
    case VPMM_ERROR_HOST_MEMORY:
        return CUDA_ERROR_OUT_OF_MEMORY;
    default:
        return CUDA_ERROR_UNKNOWN;
    }
}

/* The event is gone at once: the quiet stream has its point. */
static CUresult order_by_event(const vpmm_driver *driver, CUstream quiet, CUstream stream)
{
    CUevent event;
    CUresult result = driver->cuEventCreate(&event, CU_EVENT_DISABLE_TIMING);
    if (result != CUDA_SUCCESS)
        return result;
    result = driver->cuEventRecord(event, stream);
    if (result == CUDA_SUCCESS)
        result = driver->cuStreamWaitEvent(quiet, event, 0);
    driver->cuEventDestroy(event);
    return result;
}

/* Of a stream of another context, which vpmm does not meet: the quiet stream waits for it. Others may capture. */
static CUresult order_quietly(const vpmm_driver *driver, CUstream quiet, CUcontext context, CUstream stream)
{
    CUcontext ours;
    CUstreamCaptureMode mode = served_relax();
    CUresult result = driver->cuCtxPushCurrent(context);
    if (result == CUDA_SUCCESS) {
        result = order_by_event(driver, quiet, stream);
        driver->cuCtxPopCurrent(&ours);
    }
    served_unrelax(mode);
    return result;
}

/* After a fault of the device each call of the driver has the word for it. */
static CUresult refusal_of_free(vpmm_status status)
{
    size_t free, total;
    CUresult theirs = status == VPMM_ERROR_DRIVER ? REAL(get_info, &free, &total) : CUDA_SUCCESS;
    return theirs != CUDA_SUCCESS ? theirs : result_of(status);
}

/* The memory is out of the book; where vpmm does not take it, it goes back there. */
static CUresult give(struct served *served, CUdeviceptr start, struct allocation allocation, CUstream stream)
{
    vpmm_status status = vpmm_free(served->pool, start, stream);
    if (status == VPMM_SUCCESS) {
        lane_add_beyond(served->device, -beyond(allocation));
        lane_count(COUNT_freed);
        return CUDA_SUCCESS;
    }
    book_add(start, allocation); /* its tables are there */
    return refusal_of_free(status);
}

/* What the quiet stream has waited for is behind what it frees, or every use has ended: so it is every stream's. */
static CUresult give_quietly(struct served *served, CUdeviceptr start, struct allocation allocation)
{
    CUresult result = give(served, start, allocation, served->quiet);
    vpmm_stream_release(served->pool, served->quiet); /* another thread may just have done it */
    return result;
}

/*
 * In the lanes. False: the driver is to answer. It says of own memory on a capturing stream what it says of all memory
 * that is not the graph's. A stream of another context is waited for by the quiet one, so that vpmm does not meet it.
 */
static bool free_async(CUdeviceptr memory, CUstream stream, CUresult *result)
{
    enum count why;
    struct allocation allocation;
    const vpmm_driver *driver = vpmm_driver_cuda();
    CUcontext context = driver ? context_of(driver, stream, &why) : NULL;
    if (!context || !book_take(memory, &allocation))
        return false;
    struct served *served = served_on((int)allocation.device);
    if (!served) {
        *result = CUDA_ERROR_INVALID_VALUE; /* the device was reset beside this call */
    } else if (context == served->primary) {
        *result = give(served, memory, allocation, stream);
    } else {
        *result = order_quietly(driver, served->quiet, context, stream);
        if (*result == CUDA_SUCCESS)
            *result = give_quietly(served, memory, allocation);
        else
            book_add(memory, allocation);
    }
    return true;
}

/* False: the driver is to be asked. */
static bool try_free_async(CUdeviceptr memory, CUstream stream, CUresult *result)
{
    uint64_t start;
    struct allocation allocation;
    bool freed = false;
    if (book_find(memory, &start, &allocation)) {
        lane_enter();
        freed = free_async(memory, stream, result);
        lane_leave();
    }
    if (!freed)
        lane_count(COUNT_drivers_frees);
    return freed;
}

CUresult preload_free_async(CUdeviceptr memory, CUstream stream)
{
    CUresult result;
    struct traced traced = trace_take(memory);
    if (!try_free_async(memory, stream, &result))
        result = REAL(free_async, memory, stream);
    trace_free(memory, traced, stream, result);
    return result;
}

CUresult preload_free_async_ptsz(CUdeviceptr memory, CUstream stream)
{
    CUresult result;
    CUstream meant = default_is_per_thread(stream);
    struct traced traced = trace_take(memory);
    if (!try_free_async(memory, meant, &result))
        result = REAL(free_async_ptsz, memory, stream);
    trace_free(memory, traced, meant, result);
    return result;
}

/* ---- memory at once ---- */

static bool serves_at_once(void)
{
    static _Atomic(int) answer; /* 0: not asked yet */
    int known = atomic_load_explicit(&answer, memory_order_relaxed);
    if (!known) {
        known = switch_is_on("VPMM_PRELOAD_SYNC") ? 1 : -1;
        atomic_store_explicit(&answer, known, memory_order_relaxed);
    }
    return known > 0;
}

static uint64_t clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/*
 * Whether nothing stands before the memory on the quiet stream. No work is ever queued there, but waits for other
 * streams, and vpmm's events, which pass in a few microseconds where no wait stands before them. So they are given that
 * time; the driver's own cuMemAlloc would take more.
 */
static bool quiet_passes(const vpmm_driver *driver, const struct served *served)
{
    enum { PASSES_NS = 30000 };
    CUstreamCaptureMode mode = served_relax();
    CUresult result;
    bool is_last = false; /* it begins after the time has passed, however long the thread stood still */
    uint64_t start = clock_ns();
    while ((result = driver->cuStreamQuery(served->quiet)) == CUDA_ERROR_NOT_READY && !is_last)
        is_last = clock_ns() - start >= PASSES_NS;
    served_unrelax(mode);
    return result == CUDA_SUCCESS;
}

/*
 * The caller has the memory at once: what its former stream still does with it must be over. The driver's cuMemAlloc
 * does not wait for other streams' work either, so it is asked for what would have to be waited for.
 */
static bool take_at_once(const vpmm_driver *driver, struct served *served, CUdeviceptr *memory, size_t bytes,
                         enum count *why)
{
    CUdeviceptr start;
    struct allocation allocation;
    if (!take(served, &start, bytes, served->quiet, true, why))
        return false;
    bool passed = quiet_passes(driver, served);
    *why = passed ? COUNT_served_at_once : COUNT_left_busy;
    if (passed)
        *memory = start;
    else if (book_take(start, &allocation) && vpmm_free(served->pool, start, served->quiet) == VPMM_SUCCESS)
        lane_add_beyond(served->device, -beyond(allocation));
    return passed;
}

/* In the lanes. False: *why. */
static bool serve_at_once(CUdeviceptr *memory, size_t bytes, enum count *why)
{
    CUcontext context = NULL;
    const vpmm_driver *driver = vpmm_driver_cuda();
    *why = !driver ? COUNT_left_unserved : COUNT_left_size;
    if (!driver || !memory || !bytes)
        return false;
    *why = COUNT_left_context;
    if (driver->cuCtxGetCurrent(&context) != CUDA_SUCCESS)
        return false;
    int device = served_device_of(context);
    if (device < 0)
        return false;
    *why = COUNT_left_shared;
    if (served_is_shared(device, SERVED_SHARED_AT_ONCE))
        return false;
    struct served *served = served_of_primary(device, context, why);
    return served && take_at_once(driver, served, memory, bytes, why);
}

CUresult preload_alloc(CUdeviceptr *memory, size_t bytes)
{
    enum count why;
    if (!serves_at_once())
        return MEMORY_RETRIED(REAL(alloc, memory, bytes));
    lane_enter();
    bool served = serve_at_once(memory, bytes, &why);
    lane_leave();
    lane_count(why);
    CUresult result = served ? CUDA_SUCCESS : MEMORY_RETRIED(REAL(alloc, memory, bytes));
    if (result == CUDA_SUCCESS && trace_is_on())
        trace_malloc(device_of_memory(*memory), *memory, bytes, TRACE_NO_STREAM);
    return result;
}

/*
 * On a device that is full: by the byte that is kept, and made again of what it has just given back; one thread at a
 * time. Where that is gone, by one that a trim may leave. cuCtxSynchronize, which ends the captures in the context, is
 * left where there is not a byte to be had.
 */
static CUresult wait_by_block(const vpmm_driver *driver, struct served *served)
{
    pthread_mutex_lock(&served->waiting);
    CUdeviceptr *block = &served->block;
    if (!*block && driver->cuMemAlloc(block, 1) != CUDA_SUCCESS) {
        vpmm_trim(served->pool, 0, NULL);
        if (driver->cuMemAlloc(block, 1) != CUDA_SUCCESS)
            *block = 0;
    }
    CUresult result = *block ? driver->cuMemFree(*block) : driver->cuCtxSynchronize();
    if (result == CUDA_SUCCESS && driver->cuMemAlloc(block, 1) != CUDA_SUCCESS)
        *block = 0;
    pthread_mutex_unlock(&served->waiting);
    return result;
}

/* Waits for the context's work as the driver's cuMemFree does, by one: cuCtxSynchronize would end its captures. */
static CUresult wait_for_work(const vpmm_driver *driver, struct served *served)
{
    CUdeviceptr byte;
    CUcontext left;
    CUresult result = driver->cuCtxPushCurrent(served->primary);
    if (result != CUDA_SUCCESS)
        return result;
    CUstreamCaptureMode mode = served_relax();
    if (driver->cuMemAlloc(&byte, 1) == CUDA_SUCCESS)
        result = driver->cuMemFree(byte);
    else
        result = wait_by_block(driver, served);
    served_unrelax(mode);
    driver->cuCtxPopCurrent(&left);
    return result;
}

/*
 * In the lanes. CUDA waits here for the use of cuMemAlloc's memory, and leaves that of cuMemAllocAsync's to the
 * program. vpmm cannot: the stream that it was allocated on may still have to wait for the memory's former use by
 * another one, which the program knows nothing of.
 */
static bool free_at_once(CUdeviceptr memory, CUresult *result)
{
    struct allocation allocation;
    if (!book_take(memory, &allocation))
        return false;
    struct served *served = served_on((int)allocation.device);
    *result = CUDA_ERROR_INVALID_VALUE;
    if (!served) /* the device was reset beside this call */
        return true;
    *result = wait_for_work(vpmm_driver_cuda(), served);
    if (*result == CUDA_SUCCESS)
        *result = give_quietly(served, memory, allocation);
    else
        book_add(memory, allocation);
    return true;
}

CUresult preload_free(CUdeviceptr memory)
{
    CUresult result;
    struct traced traced = trace_take(memory);
    lane_enter();
    bool freed = free_at_once(memory, &result);
    lane_leave();
    if (!freed)
        result = REAL(free, memory);
    if (!freed && memory)
        lane_count(COUNT_drivers_frees);
    trace_free(memory, traced, TRACE_NO_STREAM, result);
    return result;
}

/* ---- the driver's other memory ---- */

int memory_device(void)
{
    CUdevice device;
    const vpmm_driver *driver = vpmm_driver_cuda();
    return driver && driver->cuCtxGetDevice(&device) == CUDA_SUCCESS ? device : MEMORY_ANY_DEVICE;
}

bool memory_trim(int device)
{
    bool tried = false, trimmed = false;
    lane_enter();
    for (int i = 0; i < BOOK_DEVICES; i++) {
        size_t released = 0;
        struct served *served = device == MEMORY_ANY_DEVICE || device == i ? served_on(i) : NULL;
        if (served && vpmm_trim(served->pool, 0, &released) == VPMM_SUCCESS) {
            tried = true;
            trimmed |= released > 0;
        }
    }
    lane_leave();
    if (trimmed)
        lane_count(COUNT_trims);
    return tried;
}

static int device_of_location(const CUmemAllocationProp *prop)
{
    if (!prop)
        return MEMORY_ANY_DEVICE;
    return prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE ? prop->location.id : MEMORY_OF_THE_HOST;
}

/* The one device that can reach the pool's memory is its own. */
static int device_of_pool(CUmemoryPool pool)
{
    int found = MEMORY_ANY_DEVICE, devices = 0;
    const vpmm_driver *driver = vpmm_driver_cuda();
    if (!driver || driver->cuDeviceGetCount(&devices) != CUDA_SUCCESS)
        return MEMORY_ANY_DEVICE;
    for (int i = 0; i < devices; i++) {
        CUmemLocation location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = i};
        CUmemAccess_flags flags = CU_MEM_ACCESS_FLAGS_PROT_NONE;
        bool reaches =
            REAL(pool_get_access, &flags, pool, &location) == CUDA_SUCCESS && flags != CU_MEM_ACCESS_FLAGS_PROT_NONE;
        if (reaches && found != MEMORY_ANY_DEVICE)
            return MEMORY_ANY_DEVICE;
        found = reaches ? i : found;
    }
    return found;
}

/* Who names the default pool means what cuMemAllocAsync takes where no other pool is set. */
CUresult preload_alloc_from_pool(CUdeviceptr *memory, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    CUresult result = CUDA_SUCCESS;
    if (!pool || !alloc_async(memory, bytes, pool, stream))
        result = MEMORY_RETRIED_ON(device_of_pool(pool), REAL(alloc_from_pool, memory, bytes, pool, stream));
    return traced_async(result, memory, bytes, stream);
}

CUresult preload_alloc_from_pool_ptsz(CUdeviceptr *memory, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    CUresult result = CUDA_SUCCESS;
    CUstream meant = default_is_per_thread(stream);
    if (!pool || !alloc_async(memory, bytes, pool, meant))
        result = MEMORY_RETRIED_ON(device_of_pool(pool), REAL(alloc_from_pool_ptsz, memory, bytes, pool, stream));
    return traced_async(result, memory, bytes, meant);
}

#define RETRY(name, symbol, base, parameters, device, arguments)                                                       \
    CUresult preload_##name parameters                                                                                 \
    {                                                                                                                  \
        return MEMORY_RETRIED_ON(device, REAL(name, UNPACKED arguments));                                              \
    }
#define UNPACKED(...) __VA_ARGS__
PRELOAD_RETRIED(RETRY)
