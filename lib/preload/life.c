/*
 * life.c - what the program does with devices, contexts, streams and pools that vpmm must know of.
 */
#include "book.h"
#include "captures.h"
#include "real.h"
#include "served.h"

#include <stdatomic.h>

/* ---- pools, and who may use their memory ---- */

CUresult preload_device_set_pool(CUdevice device, CUmemoryPool pool)
{
    served_pool_set(device); /* before it counts */
    return REAL(device_set_pool, device, pool);
}

CUresult preload_set_pool(CUmemLocation *location, CUmemAllocationType type, CUmemoryPool pool)
{
    if (location && location->type == CU_MEM_LOCATION_TYPE_DEVICE)
        served_pool_set(location->id);
    return REAL(set_pool, location, type, pool);
}

/* Which device a pool is the default one of; -1: none. A pool of ours need not be there yet. */
static int device_of_standard(const vpmm_driver *driver, CUmemoryPool pool)
{
    int count = 0;
    CUdevice device;
    CUmemoryPool standard;
    if (driver->cuDeviceGetCount(&count) != CUDA_SUCCESS)
        return -1;
    for (int i = 0; i < count; i++)
        if (driver->cuDeviceGet(&device, i) == CUDA_SUCCESS &&
            driver->cuDeviceGetDefaultMemPool(&standard, device) == CUDA_SUCCESS && standard == pool)
            return device;
    return -1;
}

CUresult preload_pool_set_access(CUmemoryPool pool, const CUmemAccessDesc *access, size_t count)
{
    CUresult result = REAL(pool_set_access, pool, access, count);
    const vpmm_driver *driver = vpmm_driver_cuda();
    int device = result == CUDA_SUCCESS && driver ? device_of_standard(driver, pool) : -1;
    for (size_t i = 0; device >= 0 && i < count; i++)
        if (access[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE &&
            (access[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE || access[i].location.id != device))
            served_share(device, SERVED_SHARED_ASYNC);
    return result;
}

CUresult preload_enable_peer(CUcontext peer, unsigned int flags)
{
    CUdevice device;
    CUcontext left;
    CUresult result = REAL(enable_peer, peer, flags);
    const vpmm_driver *driver = vpmm_driver_cuda();
    if (result != CUDA_SUCCESS || !driver || driver->cuCtxPushCurrent(peer) != CUDA_SUCCESS)
        return result;
    if (driver->cuCtxGetDevice(&device) == CUDA_SUCCESS)
        served_share(device, SERVED_SHARED_AT_ONCE);
    driver->cuCtxPopCurrent(&left);
    return result;
}

/* ---- ends ---- */

/* vpmm has nothing of that stream, or of no stream any more. */
static bool has_gone(CUresult result)
{
    return result == CUDA_ERROR_INVALID_HANDLE || result == CUDA_ERROR_DEINITIALIZED ||
           result == CUDA_ERROR_CONTEXT_IS_DESTROYED || result == CUDA_ERROR_INVALID_CONTEXT;
}

/*
 * vpmm uses the handle no more. A stream that captures cannot be released, or the driver may refuse it: nobody comes in
 * any more then (captures.h), so that vpmm touches a stream only in calls that are given it, and knows by its id that a
 * later stream with the handle is another one.
 */
static void forget(CUstream stream)
{
    CUcontext context;
    CUstreamCaptureStatus status;
    const vpmm_driver *driver = vpmm_driver_cuda();
    if (!stream || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD || !driver)
        return;
    CUresult result = driver->cuStreamIsCapturing(stream, &status);
    if (result == CUDA_SUCCESS && !status)
        result = driver->cuStreamGetCtx(stream, &context);
    if (has_gone(result))
        return;
    if (result != CUDA_SUCCESS || status) { /* it may only have joined the capture, whose end is the end of the count */
        captures_shut_for_good();
        return;
    }
    lane_enter();
    struct served *served = served_find(context);
    vpmm_status released = served ? vpmm_stream_release(served->pool, stream) : VPMM_SUCCESS;
    lane_leave();
    if (released != VPMM_SUCCESS)
        captures_shut_for_good();
}

CUresult preload_stream_destroy(CUstream stream)
{
    forget(stream);
    return REAL(stream_destroy, stream);
}

CUresult preload_stream_destroy_v1(CUstream stream)
{
    forget(stream);
    return REAL(stream_destroy_v1, stream);
}

/* How often the program has retained a device's primary context and not released it. */
static _Atomic(int) retained[BOOK_DEVICES];

CUresult preload_primary_retain(CUcontext *context, CUdevice device)
{
    CUresult result = REAL(primary_retain, context, device);
    if (result == CUDA_SUCCESS && device >= 0 && device < BOOK_DEVICES) {
        served_note_primary(device, *context);
        atomic_fetch_add(&retained[device], 1);
    }
    return result;
}

/* False: the program retains it no more, and what is retained is the pool's. */
static bool may_release(CUdevice device)
{
    if (device < 0 || device >= BOOK_DEVICES)
        return true;
    int count = atomic_load(&retained[device]);
    while (count > 0 && !atomic_compare_exchange_weak(&retained[device], &count, count - 1))
        ;
    lane_enter();
    bool may = count > 0 || !served_on(device);
    lane_leave();
    return may;
}

CUresult preload_primary_release(CUdevice device)
{
    return may_release(device) ? REAL(primary_release, device) : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult preload_primary_release_v1(CUdevice device)
{
    return may_release(device) ? REAL(primary_release_v1, device) : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult preload_device_reset(CUdevice device)
{
    CUresult(CUDAAPI * reset)(CUdevice) = real_entries()->device_reset;
    return reset ? served_end(device, reset) : CUDA_ERROR_NOT_FOUND;
}

CUresult preload_device_reset_v1(CUdevice device)
{
    CUresult(CUDAAPI * reset)(CUdevice) = real_entries()->device_reset_v1;
    return reset ? served_end(device, reset) : CUDA_ERROR_NOT_FOUND;
}
