/*
 * device.c - initialisation, what the devices say of themselves, and the names of errors.
 */
#include "internal.h"

#include <stdio.h>
#include <string.h>

#define ERRORS(X)                                                                                                      \
    X(CUDA_SUCCESS, "no error")                                                                                        \
    X(CUDA_ERROR_INVALID_VALUE, "invalid argument")                                                                    \
    X(CUDA_ERROR_OUT_OF_MEMORY, "out of memory")                                                                       \
    X(CUDA_ERROR_NOT_INITIALIZED, "initialization error")                                                              \
    X(CUDA_ERROR_DEINITIALIZED, "driver shutting down")                                                                \
    X(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected")                                                      \
    X(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal")                                                             \
    X(CUDA_ERROR_INVALID_CONTEXT, "invalid device context")                                                            \
    X(CUDA_ERROR_MAP_FAILED, "mapping of buffer object failed")                                                        \
    X(CUDA_ERROR_UNMAP_FAILED, "unmapping of buffer object failed")                                                    \
    X(CUDA_ERROR_ALREADY_MAPPED, "resource already mapped")                                                            \
    X(CUDA_ERROR_NOT_MAPPED, "resource not mapped")                                                                    \
    X(CUDA_ERROR_ECC_UNCORRECTABLE, "uncorrectable ECC error encountered")                                             \
    X(CUDA_ERROR_OPERATING_SYSTEM, "OS call failed or operation not supported on this OS")                             \
    X(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle")                                                            \
    X(CUDA_ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state")                              \
    X(CUDA_ERROR_NOT_FOUND, "named symbol not found")                                                                  \
    X(CUDA_ERROR_NOT_READY, "device not ready")                                                                        \
    X(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered")                                          \
    X(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "too many resources requested for launch")                                   \
    X(CUDA_ERROR_LAUNCH_TIMEOUT, "the launch timed out and was terminated")                                            \
    X(CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE, "cannot set while device is active in this process")                          \
    X(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed")                                                         \
    X(CUDA_ERROR_ASSERT, "device-side assert triggered")                                                               \
    X(CUDA_ERROR_MISALIGNED_ADDRESS, "misaligned address")                                                             \
    X(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure")                                                          \
    X(CUDA_ERROR_NOT_PERMITTED, "operation not permitted")                                                             \
    X(CUDA_ERROR_NOT_SUPPORTED, "operation not supported")                                                             \
    X(CUDA_ERROR_SYSTEM_NOT_READY, "system not yet initialized")                                                       \
    X(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing")                       \
    X(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "operation failed due to a previous error during capture")                \
    X(CUDA_ERROR_STREAM_CAPTURE_MERGE, "operation would result in a merge of separate capture sequences")              \
    X(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "capture was not ended in the same stream as it began")                     \
    X(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "capturing stream has unjoined work")                                        \
    X(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "dependency created on uncaptured work in another stream")                  \
    X(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "operation would make the legacy stream depend on a capturing stream")       \
    X(CUDA_ERROR_CAPTURED_EVENT, "operation not permitted on an event last recorded in a capturing stream")            \
    X(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "attempt to terminate a capture sequence from another thread")           \
    X(CUDA_ERROR_TIMEOUT, "wait operation timed out")                                                                  \
    X(CUDA_ERROR_EXTERNAL_DEVICE, "async operation returned an error in an external device")                           \
    X(CUDA_ERROR_UNKNOWN, "unknown error")

static const struct {
    CUresult result;
    const char *name, *words;
} errors[] = {
#define ERROR_ROW(result, words) {result, #result, words},
    ERRORS(ERROR_ROW)
#undef ERROR_ROW
};

static CUresult find_error(CUresult error, size_t *at)
{
    for (*at = 0; *at < sizeof errors / sizeof *errors; ++*at)
        if (errors[*at].result == error)
            return CUDA_SUCCESS;
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult sim_cuGetErrorName(CUresult error, const char **pStr)
{
    size_t at;
    if (!pStr)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = find_error(error, &at);
    *pStr = result == CUDA_SUCCESS ? errors[at].name : NULL;
    return result;
}

CUresult sim_cuGetErrorString(CUresult error, const char **pStr)
{
    size_t at;
    if (!pStr)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = find_error(error, &at);
    *pStr = result == CUDA_SUCCESS ? errors[at].words : NULL;
    return result;
}

CUresult sim_cuInit(unsigned int Flags)
{
    if (Flags)
        return CUDA_ERROR_INVALID_VALUE;
    atomic_store(&sim_self()->initialised, true);
    return CUDA_SUCCESS;
}

CUresult sim_cuDriverGetVersion(int *driverVersion)
{
    if (!driverVersion)
        return CUDA_ERROR_INVALID_VALUE;
    *driverVersion = 13000;
    return CUDA_SUCCESS;
}

bool sim_device_valid(vpmm_sim *sim, CUdevice device)
{
    return device >= 0 && device < sim->config.devices;
}

CUresult sim_cuDeviceGetCount(int *count)
{
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    *count = sim_self()->config.devices;
    return CUDA_SUCCESS;
}

CUresult sim_cuDeviceGet(CUdevice *device, int ordinal)
{
    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_valid(sim_self(), ordinal))
        return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult sim_cuDeviceGetName(char *name, int len, CUdevice dev)
{
    if (!name || len <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_valid(sim_self(), dev))
        return CUDA_ERROR_INVALID_DEVICE;
    snprintf(name, (size_t)len, "vpmm simulated GPU");
    return CUDA_SUCCESS;
}

CUresult sim_cuDeviceGetUuid(CUuuid *uuid, CUdevice dev)
{
    if (!uuid)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_valid(sim_self(), dev))
        return CUDA_ERROR_INVALID_DEVICE;
    memcpy(uuid->bytes, "vpmm-simulated-", 15);
    uuid->bytes[15] = (char)dev;
    return CUDA_SUCCESS;
}

CUresult sim_cuDeviceCanAccessPeer(int *canAccessPeer, CUdevice dev, CUdevice peerDev)
{
    vpmm_sim *sim = sim_self();
    if (!canAccessPeer)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_valid(sim, dev) || !sim_device_valid(sim, peerDev))
        return CUDA_ERROR_INVALID_DEVICE;
    *canAccessPeer = dev != peerDev && sim->config.peers;
    return CUDA_SUCCESS;
}

CUresult sim_cuDeviceTotalMem(size_t *bytes, CUdevice dev)
{
    vpmm_sim *sim = sim_self();
    if (!bytes)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_valid(sim, dev))
        return CUDA_ERROR_INVALID_DEVICE;
    *bytes = sim->devices[dev].pages * SIM_PAGE;
    return CUDA_SUCCESS;
}

/* Numbers stand where CUDA 11.8's header has no name yet. */
static int attribute(vpmm_sim *sim, int which)
{
    enum { FABRIC = 128, HOST_NUMA_VMM = 141 };
    switch (which) {
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GENERIC_COMPRESSION_SUPPORTED:
    case FABRIC:
        return sim->config.vmm;
    case HOST_NUMA_VMM: /* the H200 has it; this one does not pretend */
        return 0;
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED:
        return 1;
    case CU_DEVICE_ATTRIBUTE_MAX_PITCH:
        return INT32_MAX;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        return 9;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        return 0;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        return 132;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
        return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        return 1024;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
        return 3;
    default:
        return 0;
    }
}

CUresult sim_cuDeviceGetAttribute(int *pi, CUdevice_attribute attrib, CUdevice dev)
{
    enum { HIGHEST = 200 }; /* well above what any header of today knows */
    vpmm_sim *sim = sim_self();
    if (!pi || (int)attrib <= 0 || (int)attrib > HIGHEST)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_valid(sim, dev))
        return CUDA_ERROR_INVALID_DEVICE;
    *pi = attribute(sim, (int)attrib);
    return CUDA_SUCCESS;
}
