/*
 * entries.h - libvpmm_preload.so: vpmm under a program that does not know it, by LD_PRELOAD.
 *
 * A program's requests reach the driver through its entries, whoever makes them: the runtime, linked in or not, opens
 * libcuda.so.1 and asks it for each entry. So the library takes the place of the entries below, and of no others:
 *
 *   linked      it exports them under the driver's names, and the loader finds it before libcuda
 *   dlsym       is interposed (dlsym.c): where the real one answers the driver's own entry, ours is answered
 *   asked for   cuGetProcAddress is among the entries: the same, by the name that was asked for (lookup.c). Which
 *               version of an entry, and whether the one for per-thread default streams, the driver has decided by then
 *
 * vpmm and this library call the driver itself: they look its entries up by the real dlsym (real.h), so neither ever
 * meets an entry of ours. libcuda is linked with -Bsymbolic, and does not either.
 *
 *   own      memory that vpmm has handed out here. The book knows it (book.h), and every entry that is given an address
 *            asks there first
 *   left     a request that goes to the driver: vpmm does not serve it here (served.h), or could not for another reason
 *            than a want of memory. So are frees of what is not own: the driver's memory finds its way back
 *
 * What is not served, and why
 *   captures             the driver makes a node of the graph. A free of own memory on a capturing stream goes to it as
 *                        well: it does not know the address, and says CUDA_ERROR_INVALID_VALUE, as it says of its own
 *                        memory from outside of the graph; the capture goes on (seen with driver 580.159). That one
 *                        begins and ends is noted (captures.h)
 *   pools                a device whose current pool is not its default one, and requests that name another than that
 *   other contexts       vpmm would keep events in them, which must not outlive them: only primary ones are served
 *   shared memory        once the default pool is made accessible from other devices, or, of synchronous requests, peer
 *                        access is enabled: vpmm's memory is accessible from its own device alone
 *   legacy IPC           own memory has no handle for it, as memory of the driver's pools has none: the driver says so
 *
 * Nothing is done before the first request but that handlers of forks are registered (captures.c, lane.c, served.c),
 * and one for the exit when the program looks at a driver (real.c): no thread, no look for a driver. A process without
 * CUDA pays for a longer list of libraries at its start, and two comparisons in dlsym.
 */
#ifndef VPMM_PRELOAD_ENTRIES_H
#define VPMM_PRELOAD_ENTRIES_H

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>

/* X(our name, the symbol, the name in cuGetProcAddress, (parameters)) */
#define PRELOAD_ANSWERED(X)                                                                                            \
    X(get_proc_address, "cuGetProcAddress", "cuGetProcAddress",                                                        \
      (const char *symbol, void **function, int version, cuuint64_t flags))                                            \
    X(get_proc_address_v2, "cuGetProcAddress_v2", "cuGetProcAddress",                                                  \
      (const char *symbol, void **function, int version, cuuint64_t flags, void *status))                              \
    /* memory in stream order */                                                                                       \
    X(alloc_async, "cuMemAllocAsync", "cuMemAllocAsync", (CUdeviceptr * memory, size_t bytes, CUstream stream))        \
    X(alloc_async_ptsz, "cuMemAllocAsync_ptsz", "cuMemAllocAsync",                                                     \
      (CUdeviceptr * memory, size_t bytes, CUstream stream))                                                           \
    X(free_async, "cuMemFreeAsync", "cuMemFreeAsync", (CUdeviceptr memory, CUstream stream))                           \
    X(free_async_ptsz, "cuMemFreeAsync_ptsz", "cuMemFreeAsync", (CUdeviceptr memory, CUstream stream))                 \
    X(alloc_from_pool, "cuMemAllocFromPoolAsync", "cuMemAllocFromPoolAsync",                                           \
      (CUdeviceptr * memory, size_t bytes, CUmemoryPool pool, CUstream stream))                                        \
    X(alloc_from_pool_ptsz, "cuMemAllocFromPoolAsync_ptsz", "cuMemAllocFromPoolAsync",                                 \
      (CUdeviceptr * memory, size_t bytes, CUmemoryPool pool, CUstream stream))                                        \
    /* memory at once */                                                                                               \
    X(alloc, "cuMemAlloc_v2", "cuMemAlloc", (CUdeviceptr * memory, size_t bytes))                                      \
    X(free, "cuMemFree_v2", "cuMemFree", (CUdeviceptr memory))                                                         \
    /* questions */                                                                                                    \
    X(get_info, "cuMemGetInfo_v2", "cuMemGetInfo", (size_t * free, size_t * total))                                    \
    X(get_address_range, "cuMemGetAddressRange_v2", "cuMemGetAddressRange",                                            \
      (CUdeviceptr * start, size_t * bytes, CUdeviceptr address))                                                      \
    X(pointer_attribute, "cuPointerGetAttribute", "cuPointerGetAttribute",                                             \
      (void *data, CUpointer_attribute attribute, CUdeviceptr address))                                                \
    X(pointer_attributes, "cuPointerGetAttributes", "cuPointerGetAttributes",                                          \
      (unsigned int count, CUpointer_attribute *attributes, void **data, CUdeviceptr address))                         \
    /* pools */                                                                                                        \
    X(pool_get_attribute, "cuMemPoolGetAttribute", "cuMemPoolGetAttribute",                                            \
      (CUmemoryPool pool, CUmemPool_attribute attribute, void *value))                                                 \
    X(pool_set_attribute, "cuMemPoolSetAttribute", "cuMemPoolSetAttribute",                                            \
      (CUmemoryPool pool, CUmemPool_attribute attribute, void *value))                                                 \
    X(pool_trim, "cuMemPoolTrimTo", "cuMemPoolTrimTo", (CUmemoryPool pool, size_t keep))                               \
    X(pool_set_access, "cuMemPoolSetAccess", "cuMemPoolSetAccess",                                                     \
      (CUmemoryPool pool, const CUmemAccessDesc *access, size_t count))                                                \
    X(device_set_pool, "cuDeviceSetMemPool", "cuDeviceSetMemPool", (CUdevice device, CUmemoryPool pool))               \
    X(set_pool, "cuMemSetMemPool", "cuMemSetMemPool",                                                                  \
      (CUmemLocation * location, CUmemAllocationType type, CUmemoryPool pool))                                         \
    /* captures (captures.h) */                                                                                        \
    X(begin_capture_v1, "cuStreamBeginCapture", "cuStreamBeginCapture", (CUstream stream))                             \
    X(begin_capture_v1_ptsz, "cuStreamBeginCapture_ptsz", "cuStreamBeginCapture", (CUstream stream))                   \
    X(begin_capture, "cuStreamBeginCapture_v2", "cuStreamBeginCapture", (CUstream stream, CUstreamCaptureMode mode))   \
    X(begin_capture_ptsz, "cuStreamBeginCapture_v2_ptsz", "cuStreamBeginCapture",                                      \
      (CUstream stream, CUstreamCaptureMode mode))                                                                     \
    X(begin_capture_to_graph, "cuStreamBeginCaptureToGraph", "cuStreamBeginCaptureToGraph",                            \
      (CUstream stream, CUgraph graph, const CUgraphNode *nodes, const void *edges, size_t count,                      \
       CUstreamCaptureMode mode))                                                                                      \
    X(begin_capture_to_graph_ptsz, "cuStreamBeginCaptureToGraph_ptsz", "cuStreamBeginCaptureToGraph",                  \
      (CUstream stream, CUgraph graph, const CUgraphNode *nodes, const void *edges, size_t count,                      \
       CUstreamCaptureMode mode))                                                                                      \
    X(begin_recapture, "cuStreamBeginRecaptureToGraph", "cuStreamBeginRecaptureToGraph",                               \
      (CUstream stream, CUstreamCaptureMode mode, CUgraph graph, void *callback, void *data))                          \
    X(begin_recapture_ptsz, "cuStreamBeginRecaptureToGraph_ptsz", "cuStreamBeginRecaptureToGraph",                     \
      (CUstream stream, CUstreamCaptureMode mode, CUgraph graph, void *callback, void *data))                          \
    X(end_capture, "cuStreamEndCapture", "cuStreamEndCapture", (CUstream stream, CUgraph * graph))                     \
    X(end_capture_ptsz, "cuStreamEndCapture_ptsz", "cuStreamEndCapture", (CUstream stream, CUgraph * graph))           \
    /* what ends, and what begins to be shared */                                                                      \
    X(enable_peer, "cuCtxEnablePeerAccess", "cuCtxEnablePeerAccess", (CUcontext peer, unsigned int flags))             \
    X(primary_retain, "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRetain", (CUcontext * context, CUdevice device))  \
    X(primary_release_v1, "cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxRelease", (CUdevice device))                 \
    X(primary_release, "cuDevicePrimaryCtxRelease_v2", "cuDevicePrimaryCtxRelease", (CUdevice device))                 \
    X(stream_destroy_v1, "cuStreamDestroy", "cuStreamDestroy", (CUstream stream))                                      \
    X(stream_destroy, "cuStreamDestroy_v2", "cuStreamDestroy", (CUstream stream))                                      \
    X(device_reset_v1, "cuDevicePrimaryCtxReset", "cuDevicePrimaryCtxReset", (CUdevice device))                        \
    X(device_reset, "cuDevicePrimaryCtxReset_v2", "cuDevicePrimaryCtxReset", (CUdevice device))

/*
 * The driver's other memory: tried once more without what vpmm keeps free, as the driver gives back what its own pools
 * keep. X(our name, the symbol, the name in cuGetProcAddress, (parameters), the device (memory.h), (arguments))
 */
#define PRELOAD_RETRIED(X)                                                                                             \
    X(alloc_pitch, "cuMemAllocPitch_v2", "cuMemAllocPitch",                                                            \
      (CUdeviceptr * memory, size_t * pitch, size_t width, size_t height, unsigned int element), memory_device(),      \
      (memory, pitch, width, height, element))                                                                         \
    X(create, "cuMemCreate", "cuMemCreate",                                                                            \
      (CUmemGenericAllocationHandle * handle, size_t bytes, const CUmemAllocationProp *prop,                           \
       unsigned long long flags),                                                                                      \
      device_of_location(prop), (handle, bytes, prop, flags))                                                          \
    X(array_create, "cuArrayCreate_v2", "cuArrayCreate", (CUarray * array, const CUDA_ARRAY_DESCRIPTOR *descriptor),   \
      memory_device(), (array, descriptor))                                                                            \
    X(array_3d_create, "cuArray3DCreate_v2", "cuArray3DCreate",                                                        \
      (CUarray * array, const CUDA_ARRAY3D_DESCRIPTOR *descriptor), memory_device(), (array, descriptor))              \
    X(mipmap_create, "cuMipmappedArrayCreate", "cuMipmappedArrayCreate",                                               \
      (CUmipmappedArray * array, const CUDA_ARRAY3D_DESCRIPTOR *descriptor, unsigned int levels), memory_device(),     \
      (array, descriptor, levels))

/* What is only called. */
#define PRELOAD_CALLED(X)                                                                                              \
    X(device_get_pool, "cuDeviceGetMemPool", "", (CUmemoryPool * pool, CUdevice device))                               \
    X(pool_get_access, "cuMemPoolGetAccess", "",                                                                       \
      (CUmemAccess_flags * flags, CUmemoryPool pool, CUmemLocation * location))                                        \
    X(primary_state, "cuDevicePrimaryCtxGetState", "", (CUdevice device, unsigned int *flags, int *active))            \
    X(is_capturing, "cuStreamIsCapturing", "", (CUstream stream, CUstreamCaptureStatus * status))                      \
    X(is_capturing_ptsz, "cuStreamIsCapturing_ptsz", "", (CUstream stream, CUstreamCaptureStatus * status))

/* Ours: preload_<name>, which the loader knows by the driver's symbol, whatever cuda.h renames. */
#define PRELOAD_DECLARE(name, symbol, base, parameters, ...)                                                           \
    CUresult CUDAAPI preload_##name parameters __asm__(symbol) __attribute__((visibility("default")));
PRELOAD_ANSWERED(PRELOAD_DECLARE)
PRELOAD_RETRIED(PRELOAD_DECLARE)
#undef PRELOAD_DECLARE

#endif
