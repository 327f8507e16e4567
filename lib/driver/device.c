#include "driver/device.h"

#include <stdio.h>
#include <string.h>

/* This thread's last failed call, for the message. */
static _Thread_local struct {
    const char *call;
    CUresult result;
} last_failure;

/* Of the device's work: no later call of the process answers anything else (cuda.h), whichever context it is in. */
static bool is_sticky(CUresult result)
{
    enum { CONTAINED = 226, TENSOR_MEMORY_LEAK = 721, MPS_CLIENT_TERMINATED = 810 }; /* 11.8's cuda.h has no names */
    switch ((int)result) {
    case CONTAINED:
    case TENSOR_MEMORY_LEAK:
    case MPS_CLIENT_TERMINATED:
    case CUDA_ERROR_EXTERNAL_DEVICE:
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_NVLINK_UNCORRECTABLE:
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED:
        return true;
    default:
        return false;
    }
}

CUresult device_called(struct device *device, enum driver_entry entry, const char *call, CUresult result)
{
    bool failed = result != CUDA_SUCCESS && result != CUDA_ERROR_NOT_READY;
    stats_count_call(device->stats, entry, failed);
    if (failed) {
        if (result == CUDA_ERROR_DEINITIALIZED)
            store_relaxed_u32(&device->gone, 1);
        if (is_sticky(result))
            device_lose(device);
        last_failure.call = call;
        last_failure.result = result;
    }
    return result;
}

static const char *result_name(const struct device *device, CUresult result)
{
    const char *name = NULL;
    if (device->driver.cuGetErrorName)
        device->driver.cuGetErrorName(result, &name);
    return name ? name : "unknown CUresult";
}

vpmm_status device_failed(struct device *device, const char *doing)
{
    CUresult result = last_failure.result;
    vpmm_status status = result == CUDA_ERROR_OUT_OF_MEMORY ? VPMM_ERROR_OUT_OF_MEMORY : VPMM_ERROR_DRIVER;
    return fail(status, "%s answered %d (%s) while %s", last_failure.call, (int)result, result_name(device, result),
                doing);
}

void device_forget_failure(void)
{
    last_failure.call = NULL;
}

bool device_has_failed(void)
{
    return last_failure.call;
}

bool device_result_is_capture(CUresult result)
{
    return result >= 900 && result < 910;
}

void device_lose(struct device *device)
{
    store_relaxed_u32(&device->lost, 1);
}

vpmm_status device_lost_status(void)
{
    return fail(VPMM_ERROR_DRIVER, "the device is lost: an earlier driver call answered an error that no later call "
                                   "can recover from; destroy the pool and start again in a new process");
}

static bool copy_table(vpmm_driver *to, const vpmm_driver *from, const char **missing)
{
    memset(to, 0, sizeof *to);
    memcpy(to, from, from->size < sizeof *to ? from->size : sizeof *to);
    to->size = sizeof *to;
    *missing = NULL;
#define ENTRY_REQUIRED(name, version, parameters, arguments)                                                           \
    if (!to->name && (version) < 12000 && !*missing)                                                                   \
        *missing = #name;
    VPMM_DRIVER_ENTRIES(ENTRY_REQUIRED)
#undef ENTRY_REQUIRED
    return !*missing;
}

/* What this driver does not know, which it says with INVALID_VALUE, is a feature that it does not have. */
static vpmm_status find_feature(struct device *device, CUdevice_attribute which, bool *has)
{
    int value = 0;
    CUresult result = device_call(device, cuDeviceGetAttribute, &value, which, device->id);
    *has = result == CUDA_SUCCESS && value;
    return result == CUDA_SUCCESS || result == CUDA_ERROR_INVALID_VALUE
               ? VPMM_SUCCESS
               : device_failed(device, "asking what the device can do");
}

static vpmm_status find_features(struct device *device)
{
    const struct {
        CUdevice_attribute which;
        bool *has;
    } feature[] = {
        {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, &device->has_vmm},
        {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, &device->has_pools},
        {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, &device->can_export},
        {CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, &device->can_rdma},
    };
    vpmm_status status = VPMM_SUCCESS;
    for (size_t i = 0; i < sizeof feature / sizeof feature[0] && status == VPMM_SUCCESS; i++)
        status = find_feature(device, feature[i].which, feature[i].has);
    return status;
}

static vpmm_status find_device(struct device *device)
{
    int count = 0;
    if (device_call(device, cuInit, 0) != CUDA_SUCCESS || device_call(device, cuDeviceGetCount, &count) != CUDA_SUCCESS)
        return fail(VPMM_ERROR_NO_DRIVER, "%s answered %d (%s): no CUDA device can be used here", last_failure.call,
                    (int)last_failure.result, result_name(device, last_failure.result));
    if (device->ordinal < 0 || device->ordinal >= count)
        return fail(VPMM_ERROR_NO_DRIVER, "device %d does not exist: the driver shows %d device%s, numbered from 0",
                    device->ordinal, count, count == 1 ? "" : "s");
    if (device_call(device, cuDeviceGet, &device->id, device->ordinal) != CUDA_SUCCESS ||
        device_call(device, cuDeviceTotalMem, &device->total_bytes, device->id) != CUDA_SUCCESS)
        return device_failed(device, "looking at the device");
    vpmm_status status = find_features(device);
    if (status != VPMM_SUCCESS)
        return status;
    if (!device->has_vmm && !device->has_pools)
        return fail(VPMM_ERROR_NOT_SUPPORTED, "device %d has neither virtual memory management nor memory pools",
                    device->ordinal);
    return VPMM_SUCCESS;
}

/* For who watches; nothing of the pool's depends on it, and a driver that would not say is no failure. */
static void find_identity(struct device *device)
{
    CUuuid uuid;
    const unsigned char *b = (const unsigned char *)uuid.bytes;
    if (device_call(device, cuDeviceGetName, device->name, (int)sizeof device->name - 1, device->id) != CUDA_SUCCESS)
        device->name[0] = '\0';
    if (device_call(device, cuDeviceGetUuid, &uuid, device->id) == CUDA_SUCCESS)
        snprintf(device->uuid, sizeof device->uuid,
                 "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0], b[1], b[2], b[3],
                 b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
}

static vpmm_status find_granularity(struct device *device)
{
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device->ordinal}};
    device->granularity = (size_t)2 << 20;
    if (device->has_vmm && device_call(device, cuMemGetAllocationGranularity, &device->granularity, &prop,
                                       CU_MEM_ALLOC_GRANULARITY_RECOMMENDED) != CUDA_SUCCESS)
        return device_failed(device, "asking for the granularity of mappings");
    return VPMM_SUCCESS;
}

vpmm_status device_open(struct device *device, const vpmm_driver *table, int ordinal, struct stats *stats)
{
    const char *missing;
    *device = (struct device){.ordinal = ordinal, .stats = stats};
    if (!copy_table(&device->driver, table, &missing))
        return fail(VPMM_ERROR_INVALID_VALUE,
                    "the driver table has no %s: every entry but those newer than CUDA 11.8 "
                    "must be there",
                    missing);
    vpmm_status status = find_device(device);
    if (status == VPMM_SUCCESS)
        find_identity(device);
    if (status == VPMM_SUCCESS)
        status = find_granularity(device);
    if (status == VPMM_SUCCESS &&
        device_call(device, cuDevicePrimaryCtxRetain, &device->primary, device->id) != CUDA_SUCCESS) {
        if (device->primary) /* it was retained, whatever the driver said */
            device->driver.cuDevicePrimaryCtxRelease(device->id);
        status = device_failed(device, "retaining the primary context");
    }
    return status;
}

vpmm_status device_close(struct device *device)
{
    if (device_call(device, cuDevicePrimaryCtxRelease, device->id) != CUDA_SUCCESS)
        return device_failed(device, "releasing the primary context");
    return VPMM_SUCCESS;
}

/* As device_call, of calls that are counted only when they fail: hits make them. */
static vpmm_status ask_failed(struct device *device, enum driver_entry entry, const char *call, CUresult result)
{
    device_called(device, entry, call, result);
    fail(VPMM_ERROR_DRIVER, "%s answered %d (%s) while looking for the thread's current context", call, (int)result,
         result_name(device, result));
    return VPMM_ERROR_DRIVER;
}

vpmm_status device_current_context(struct device *device, CUcontext *context)
{
    CUcontext current = NULL;
    CUdevice id = device->id;
    CUresult result = device->driver.cuCtxGetCurrent(&current);
    if (result != CUDA_SUCCESS)
        return ask_failed(device, ENTRY_cuCtxGetCurrent, "cuCtxGetCurrent", result);
    if (current && current != device->primary)
        result = device->driver.cuCtxGetDevice(&id);
    bool destroyed = result == CUDA_ERROR_CONTEXT_IS_DESTROYED || result == CUDA_ERROR_INVALID_CONTEXT;
    if (result != CUDA_SUCCESS && !destroyed)
        return ask_failed(device, ENTRY_cuCtxGetDevice, "cuCtxGetDevice", result);
    *context = current && !destroyed && id == device->id ? current : device->primary;
    return VPMM_SUCCESS;
}

vpmm_status device_enter(struct device *device, struct device_scope *scope)
{
    CUcontext context;
    vpmm_status status = device_current_context(device, &context);
    return status == VPMM_SUCCESS ? device_enter_context(device, context, scope) : status;
}

static bool is_current(struct device *device, CUcontext context)
{
    CUcontext current = NULL;
    return device->driver.cuCtxGetCurrent(&current) == CUDA_SUCCESS && current == context;
}

/* A push that took effect and failed would leave the thread one context deeper at each try. */
static CUresult push(struct device *device, CUcontext context)
{
    CUcontext before = NULL;
    bool is_known = device->driver.cuCtxGetCurrent(&before) == CUDA_SUCCESS;
    CUresult result = device_call(device, cuCtxPushCurrent, context);
    if (result != CUDA_SUCCESS && is_known && before != context && is_current(device, context))
        device_pop_context(device);
    return result;
}

CUresult device_push_context(struct device *device, CUcontext context, bool *pushed)
{
    *pushed = false;
    if (is_current(device, context))
        return CUDA_SUCCESS;
    CUresult result = push(device, context);
    *pushed = result == CUDA_SUCCESS;
    return result;
}

bool device_context_is_gone(struct device *device, CUcontext context)
{
    if (context == device->primary)
        return false;
    CUresult result = push(device, context);
    if (result == CUDA_SUCCESS)
        device_pop_context(device);
    return result == CUDA_ERROR_CONTEXT_IS_DESTROYED || result == CUDA_ERROR_INVALID_CONTEXT;
}

void device_pop_context(struct device *device)
{
    CUcontext ours;
    device_call(device, cuCtxPopCurrent, &ours);
}

static CUresult relax(struct device *device, struct device_scope *scope)
{
    scope->mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    CUresult result = device_call(device, cuThreadExchangeStreamCaptureMode, &scope->mode);
    scope->exchanged = result == CUDA_SUCCESS || scope->mode != CU_STREAM_CAPTURE_MODE_RELAXED; /* it was, then */
    return result;
}

vpmm_status device_enter_context(struct device *device, CUcontext context, struct device_scope *scope)
{
    *scope = (struct device_scope){0};
    if (device_push_context(device, context, &scope->pushed) != CUDA_SUCCESS)
        return device_failed(device, "making a context of the device current");
    if (relax(device, scope) == CUDA_SUCCESS)
        return VPMM_SUCCESS;
    vpmm_status status = device_failed(device, "leaving stream captures of other threads alone");
    device_leave(device, scope);
    return status;
}

CUresult device_free_memory(struct device *device, size_t *bytes)
{
    struct device_scope scope = {0};
    size_t total;
    CUresult result = device_push_context(device, device->primary, &scope.pushed);
    if (result == CUDA_SUCCESS)
        result = relax(device, &scope);
    if (result == CUDA_SUCCESS)
        result = device_call(device, cuMemGetInfo, bytes, &total);
    device_leave(device, &scope);
    return result;
}

/* Whether the driver says how much memory is free, or why not. */
static bool answers(struct device *device)
{
    size_t unused;
    CUresult result = device_free_memory(device, &unused);
    return result != CUDA_ERROR_UNKNOWN && result != CUDA_ERROR_DEVICE_UNAVAILABLE;
}

void device_probe(struct device *device)
{
    enum { TRIES = 3 }; /* it may refuse a call, and not the next one of the same kind */
    for (int i = 0; i < TRIES; i++)
        if (answers(device))
            return;
    device_lose(device);
}

void device_enter_to_end(struct device *device, struct device_scope *scope)
{
    if (device_enter_context(device, device->primary, scope) != VPMM_SUCCESS)
        relax(device, scope);
}

/*
 * What was put in place is taken back. The driver refuses neither call but while it is shutting down, when no one can
 * observe what stays behind.
 */
void device_leave(struct device *device, struct device_scope *scope)
{
    if (scope->exchanged)
        device_call(device, cuThreadExchangeStreamCaptureMode, &scope->mode);
    if (scope->pushed)
        device_pop_context(device);
    *scope = (struct device_scope){0};
}
