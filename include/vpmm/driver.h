/*
 * vpmm/driver.h - the driver table: every CUDA driver entry point that the library, its examples, tests and stress
 * programs call, under the name that NVIDIA's documentation gives it (but for the kernels of vpmm-stress, and for
 * libvpmm_preload.so, which look up more themselves).
 *
 * A table is all that the pool knows of a GPU. vpmm_driver_cuda() fills one from libcuda.so.1, vpmm_sim_driver()
 * (vpmm/sim.h) answers from a simulated GPU, and a program may pass a table of its own: copy one of these and
 * replace the entries to watch, slow down or fail.
 *
 * Rules of the table
 *   size    the caller's sizeof(vpmm_driver). An entry that lies beyond it counts as NULL, so that a program built
 *           against an older header still runs: what comes after the first release is added at the end, to the group
 *           "newer than". Until then an entry is added where it belongs.
 *   NULL    an entry may be NULL only in the group "newer than"; vpmm_pool_create names the missing entry otherwise.
 *   types   are the function types of the ABI version that stands beside each name in the list (the version in which
 *           CUDA introduced that signature), whatever version of cuda.h is installed: cuGetProcAddress refuses a
 *           version above the driver's own, and cuda.h's own declarations change between releases.
 *   threads entries are called from any thread. Only what the documentation requires to be current is made current.
 *   life    the table and what it points to outlive every pool that was given it.
 */
#ifndef VPMM_DRIVER_H
#define VPMM_DRIVER_H

#include <cuda.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* X(name, ABI version, (parameters), (arguments)) */
#define VPMM_DRIVER_ENTRIES(X) \
    /* initialisation and errors */                                                                                    \
    X(cuInit, 2000, (unsigned int Flags), (Flags))                                                                     \
    X(cuDriverGetVersion, 2020, (int *driverVersion), (driverVersion))                                                 \
    X(cuGetErrorName, 6000, (CUresult error, const char **pStr), (error, pStr))                                        \
    X(cuGetErrorString, 6000, (CUresult error, const char **pStr), (error, pStr))                                      \
    /* devices */                                                                                                      \
    X(cuDeviceGetCount, 2000, (int *count), (count))                                                                   \
    X(cuDeviceGet, 2000, (CUdevice *device, int ordinal), (device, ordinal))                                           \
    X(cuDeviceGetName, 2000, (char *name, int len, CUdevice dev), (name, len, dev))                                    \
    X(cuDeviceGetUuid, 9020, (CUuuid *uuid, CUdevice dev), (uuid, dev))                                                \
    X(cuDeviceGetAttribute, 2000, (int *pi, CUdevice_attribute attrib, CUdevice dev), (pi, attrib, dev))               \
    X(cuDeviceTotalMem, 3020, (size_t *bytes, CUdevice dev), (bytes, dev))                                             \
    X(cuDeviceCanAccessPeer, 4000, (int *canAccessPeer, CUdevice dev, CUdevice peerDev),                               \
      (canAccessPeer, dev, peerDev))                                                                                   \
    /* contexts */                                                                                                     \
    X(cuDevicePrimaryCtxRetain, 7000, (CUcontext *pctx, CUdevice dev), (pctx, dev))                                    \
    X(cuDevicePrimaryCtxRelease, 11000, (CUdevice dev), (dev))                                                         \
    X(cuCtxCreate, 3020, (CUcontext *pctx, unsigned int flags, CUdevice dev), (pctx, flags, dev))                      \
    X(cuCtxDestroy, 4000, (CUcontext ctx), (ctx))                                                                      \
    X(cuCtxGetCurrent, 4000, (CUcontext *pctx), (pctx))                                                                \
    X(cuCtxSetCurrent, 4000, (CUcontext ctx), (ctx))                                                                   \
    X(cuCtxPushCurrent, 4000, (CUcontext ctx), (ctx))                                                                  \
    X(cuCtxPopCurrent, 4000, (CUcontext *pctx), (pctx))                                                                \
    X(cuCtxGetDevice, 2000, (CUdevice *device), (device))                                                              \
    X(cuCtxSynchronize, 2000, (void), ())                                                                              \
    /* virtual memory management */                                                                                    \
    X(cuMemGetAllocationGranularity, 10020,                                                                            \
      (size_t *granularity, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags option),                 \
      (granularity, prop, option))                                                                                     \
    X(cuMemAddressReserve, 10020,                                                                                      \
      (CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr, unsigned long long flags),                   \
      (ptr, size, alignment, addr, flags))                                                                             \
    X(cuMemAddressFree, 10020, (CUdeviceptr ptr, size_t size), (ptr, size))                                            \
    X(cuMemCreate, 10020,                                                                                              \
      (CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop, unsigned long long flags),  \
      (handle, size, prop, flags))                                                                                     \
    X(cuMemRelease, 10020, (CUmemGenericAllocationHandle handle), (handle))                                            \
    X(cuMemMap, 10020,                                                                                                 \
      (CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags),    \
      (ptr, size, offset, handle, flags))                                                                              \
    X(cuMemUnmap, 10020, (CUdeviceptr ptr, size_t size), (ptr, size))                                                  \
    X(cuMemSetAccess, 10020,                                                                                           \
      (CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count),                                       \
      (ptr, size, desc, count))                                                                                        \
    X(cuMemRetainAllocationHandle, 11000, (CUmemGenericAllocationHandle *handle, void *addr), (handle, addr))          \
    X(cuMemGetAddressRange, 3020, (CUdeviceptr *pbase, size_t *psize, CUdeviceptr dptr), (pbase, psize, dptr))         \
    X(cuMemExportToShareableHandle, 10020,                                                                             \
      (void *shareableHandle, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType handleType,               \
       unsigned long long flags),                                                                                      \
      (shareableHandle, handle, handleType, flags))                                                                    \
    X(cuMemImportFromShareableHandle, 10020,                                                                           \
      (CUmemGenericAllocationHandle *handle, void *osHandle, CUmemAllocationHandleType shHandleType),                  \
      (handle, osHandle, shHandleType))                                                                                \
    /* plain memory and memory pools */                                                                                \
    X(cuMemGetInfo, 3020, (size_t *free, size_t *total), (free, total))                                                \
    X(cuMemAlloc, 3020, (CUdeviceptr *dptr, size_t bytesize), (dptr, bytesize))                                        \
    X(cuMemFree, 3020, (CUdeviceptr dptr), (dptr))                                                                     \
    X(cuMemHostAlloc, 2020, (void **pp, size_t bytesize, unsigned int Flags), (pp, bytesize, Flags))                   \
    X(cuMemFreeHost, 2000, (void *p), (p))                                                                             \
    X(cuDeviceGetDefaultMemPool, 11020, (CUmemoryPool *pool_out, CUdevice dev), (pool_out, dev))                       \
    X(cuMemPoolCreate, 11020, (CUmemoryPool *pool, const CUmemPoolProps *poolProps), (pool, poolProps))                \
    X(cuMemPoolDestroy, 11020, (CUmemoryPool pool), (pool))                                                            \
    X(cuMemPoolTrimTo, 11020, (CUmemoryPool pool, size_t minBytesToKeep), (pool, minBytesToKeep))                      \
    X(cuMemPoolSetAttribute, 11020, (CUmemoryPool pool, CUmemPool_attribute attr, void *value), (pool, attr, value))   \
    X(cuMemPoolGetAttribute, 11020, (CUmemoryPool pool, CUmemPool_attribute attr, void *value), (pool, attr, value))   \
    X(cuMemAllocAsync, 11020, (CUdeviceptr *dptr, size_t bytesize, CUstream hStream), (dptr, bytesize, hStream))       \
    X(cuMemAllocFromPoolAsync, 11020,                                                                                  \
      (CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream),                                       \
      (dptr, bytesize, pool, hStream))                                                                                 \
    X(cuMemFreeAsync, 11020, (CUdeviceptr dptr, CUstream hStream), (dptr, hStream))                                    \
    /* streams and capture */                                                                                          \
    X(cuStreamCreate, 2000, (CUstream *phStream, unsigned int Flags), (phStream, Flags))                               \
    X(cuStreamDestroy, 4000, (CUstream hStream), (hStream))                                                            \
    X(cuStreamSynchronize, 2000, (CUstream hStream), (hStream))                                                        \
    X(cuStreamQuery, 2000, (CUstream hStream), (hStream))                                                              \
    X(cuStreamWaitEvent, 3020, (CUstream hStream, CUevent hEvent, unsigned int Flags), (hStream, hEvent, Flags))       \
    X(cuStreamGetCtx, 9020, (CUstream hStream, CUcontext *pctx), (hStream, pctx))                                      \
    X(cuStreamGetFlags, 5050, (CUstream hStream, unsigned int *flags), (hStream, flags))                               \
    X(cuStreamIsCapturing, 10000, (CUstream hStream, CUstreamCaptureStatus *captureStatus), (hStream, captureStatus))  \
    X(cuStreamBeginCapture, 10010, (CUstream hStream, CUstreamCaptureMode mode), (hStream, mode))                      \
    X(cuStreamEndCapture, 10000, (CUstream hStream, CUgraph *phGraph), (hStream, phGraph))                             \
    X(cuThreadExchangeStreamCaptureMode, 10010, (CUstreamCaptureMode *mode), (mode))                                   \
    X(cuGraphDestroy, 10000, (CUgraph hGraph), (hGraph))                                                               \
    X(cuLaunchHostFunc, 10000, (CUstream hStream, CUhostFn fn, void *userData), (hStream, fn, userData))               \
    /* events */                                                                                                       \
    X(cuEventCreate, 2000, (CUevent *phEvent, unsigned int Flags), (phEvent, Flags))                                   \
    X(cuEventDestroy, 4000, (CUevent hEvent), (hEvent))                                                                \
    X(cuEventRecord, 2000, (CUevent hEvent, CUstream hStream), (hEvent, hStream))                                      \
    X(cuEventQuery, 2000, (CUevent hEvent), (hEvent))                                                                  \
    X(cuEventSynchronize, 2000, (CUevent hEvent), (hEvent))                                                            \
    /* work on memory */                                                                                               \
    X(cuMemcpyHtoD, 3020,                                                                                              \
      (CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount),                                                  \
      (dstDevice, srcHost, ByteCount))                                                                                 \
    X(cuMemcpyDtoH, 3020, (void *dstHost, CUdeviceptr srcDevice, size_t ByteCount), (dstHost, srcDevice, ByteCount))   \
    X(cuMemcpyHtoDAsync, 3020,                                                                                         \
      (CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount, CUstream hStream),                                \
      (dstDevice, srcHost, ByteCount, hStream))                                                                        \
    X(cuMemcpyDtoHAsync, 3020,                                                                                         \
      (void *dstHost, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream),                                      \
      (dstHost, srcDevice, ByteCount, hStream))                                                                        \
    X(cuMemcpyDtoDAsync, 3020,                                                                                         \
      (CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream),                              \
      (dstDevice, srcDevice, ByteCount, hStream))                                                                      \
    X(cuMemcpy2DAsync, 3020, (const CUDA_MEMCPY2D *pCopy, CUstream hStream), (pCopy, hStream))                         \
    X(cuMemsetD8, 3020, (CUdeviceptr dstDevice, unsigned char uc, size_t N), (dstDevice, uc, N))                       \
    X(cuMemsetD8Async, 3020,                                                                                           \
      (CUdeviceptr dstDevice, unsigned char uc, size_t N, CUstream hStream),                                           \
      (dstDevice, uc, N, hStream))                                                                                     \
    X(cuMemsetD32Async, 3020,                                                                                          \
      (CUdeviceptr dstDevice, unsigned int ui, size_t N, CUstream hStream),                                            \
      (dstDevice, ui, N, hStream))                                                                                     \
    X(cuMemsetD2D32Async, 3020,                                                                                        \
      (CUdeviceptr dstDevice, size_t dstPitch, unsigned int ui, size_t Width, size_t Height, CUstream hStream),        \
      (dstDevice, dstPitch, ui, Width, Height, hStream))                                                               \
    /* newer than CUDA 11.8: NULL where the driver lacks them */                                                       \
    X(cuStreamGetId, 12000, (CUstream hStream, unsigned long long *streamId), (hStream, streamId))

typedef struct vpmm_driver {
    size_t size; /* sizeof(vpmm_driver) where the table was made */
#define VPMM_DRIVER_MEMBER(name, version, parameters, arguments) CUresult(CUDAAPI *name) parameters;
    VPMM_DRIVER_ENTRIES(VPMM_DRIVER_MEMBER)
#undef VPMM_DRIVER_MEMBER
} vpmm_driver;

/*
 * The table of the CUDA driver on this machine: libcuda.so.1, found with dlopen on the first call and never closed.
 * NULL where there is none, with vpmm_last_error() saying what was tried. Any thread; makes no CUDA call.
 *
 * Its entries are the driver's own, but for two: cuMemPoolDestroy keeps a pool with memory that is still reserved, and
 * cuMemPoolCreate hands it out again, because a driver was seen to crash over such a destruction (580.159).
 */
const vpmm_driver *vpmm_driver_cuda(void);

#ifdef __cplusplus
}
#endif

#endif
