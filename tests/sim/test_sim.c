/*
 * test_sim.c - the simulated GPU: that it answers as the driver does on an H200, and that its own tools (capacity,
 * stepping, faults, race detector, cost account, leak list) tell the truth. Other tests stand on it.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <vpmm/sim.h>
#include <vpmm/vpmm.h>

#define MIB  ((size_t)1 << 20)
#define PAGE (2 * MIB)
#define TIB  ((size_t)1 << 40)

#define OK(call) cr_assert_eq((call), CUDA_SUCCESS, "%s", #call)
#define IS(result, call)                                                                                               \
    do {                                                                                                               \
        CUresult got = (call);                                                                                         \
        cr_assert_eq(got, (result), "%s gave %d, not %s", #call, (int)got, #result);                                   \
    } while (0)

static vpmm_sim *sim;
static const vpmm_driver *d;
static CUcontext context;

static vpmm_sim_config small_config(bool stepped)
{
    vpmm_sim_config config = vpmm_sim_config_default();
    config.memory_bytes = 256 * MIB;
    config.stepped = stepped;
    return config;
}

static void open_with(const vpmm_sim_config *config)
{
    sim = vpmm_sim_create(config);
    cr_assert(sim != NULL, "%s", vpmm_last_error());
    d = vpmm_sim_driver(sim);
    OK(d->cuInit(0));
    OK(d->cuDevicePrimaryCtxRetain(&context, 0));
    OK(d->cuCtxSetCurrent(context));
}

static void open_sim(bool stepped)
{
    vpmm_sim_config config = small_config(stepped);
    open_with(&config);
}

static void close_with(int leaks)
{
    OK(d->cuDevicePrimaryCtxRelease(0));
    cr_assert_eq(vpmm_sim_destroy(sim), leaks);
}

static void close_clean(void)
{
    cr_assert_eq(vpmm_sim_races(sim), 0);
    cr_assert_eq(vpmm_sim_misuses(sim), 0);
    close_with(0);
}

static CUmemAllocationProp prop_of(int device)
{
    CUmemAllocationProp prop;
    memset(&prop, 0, sizeof prop);
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id = device;
    return prop;
}

static CUmemGenericAllocationHandle create(size_t bytes)
{
    CUmemAllocationProp prop = prop_of(0);
    CUmemGenericAllocationHandle handle = 0;
    OK(d->cuMemCreate(&handle, bytes, &prop, 0));
    return handle;
}

static CUdeviceptr reserve(size_t bytes)
{
    CUdeviceptr at = 0;
    OK(d->cuMemAddressReserve(&at, bytes, 0, 0, 0));
    return at;
}

static CUresult give_right(CUdeviceptr at, size_t bytes, int device, CUmemAccess_flags right)
{
    CUmemAccessDesc desc;
    memset(&desc, 0, sizeof desc);
    desc.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    desc.location.id = device;
    desc.flags = right;
    return d->cuMemSetAccess(at, bytes, &desc, 1);
}

static CUresult give_access(CUdeviceptr at, size_t bytes)
{
    return give_right(at, bytes, 0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
}

/* A mapped, accessible range over a handle of its own. */
struct memory {
    CUdeviceptr at;
    size_t bytes;
    CUmemGenericAllocationHandle handle;
};

static struct memory make(size_t bytes)
{
    struct memory m = {reserve(bytes), bytes, create(bytes)};
    OK(d->cuMemMap(m.at, bytes, 0, m.handle, 0));
    OK(give_access(m.at, bytes));
    return m;
}

static void unmake(struct memory m)
{
    OK(d->cuMemUnmap(m.at, m.bytes));
    OK(d->cuMemRelease(m.handle));
    OK(d->cuMemAddressFree(m.at, m.bytes));
}

static CUstream new_stream(void)
{
    CUstream stream;
    OK(d->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    return stream;
}

static CUevent new_event(void)
{
    CUevent event;
    OK(d->cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    return event;
}

static uint32_t word_at(CUdeviceptr at)
{
    uint32_t word = 0;
    OK(d->cuMemcpyDtoH(&word, at, sizeof word));
    return word;
}

static CUstreamCaptureMode exchange(CUstreamCaptureMode mode)
{
    OK(d->cuThreadExchangeStreamCaptureMode(&mode));
    return mode;
}

/* ---- table, devices, contexts ---- */

Test(sim, every_entry_is_there)
{
    open_sim(false);
#define PRESENT(name, version, parameters, arguments) cr_assert(d->name != NULL, "%s", #name);
    VPMM_DRIVER_ENTRIES(PRESENT)
#undef PRESENT
    cr_assert_eq(d->size, sizeof(vpmm_driver));
    close_clean();
}

Test(sim, nothing_works_before_init)
{
    vpmm_sim_config config = small_config(false);
    int count;
    sim = vpmm_sim_create(&config);
    d = vpmm_sim_driver(sim);
    IS(CUDA_ERROR_NOT_INITIALIZED, d->cuDeviceGetCount(&count));
    IS(CUDA_ERROR_NOT_INITIALIZED, d->cuCtxGetCurrent(&context));
    OK(d->cuDriverGetVersion(&count));
    cr_assert_eq(count, 13000);
    OK(d->cuInit(0));
    OK(d->cuDeviceGetCount(&count));
    cr_assert_eq(count, 1);
    cr_assert_eq(vpmm_sim_destroy(sim), 0);
}

Test(sim, devices_describe_themselves)
{
    vpmm_sim_config config = small_config(false);
    config.devices = 3;
    open_with(&config);
    CUdevice device;
    CUuuid a, b;
    char name[64];
    int value;
    size_t bytes;
    OK(d->cuDeviceGet(&device, 2));
    IS(CUDA_ERROR_INVALID_DEVICE, d->cuDeviceGet(&device, 3));
    OK(d->cuDeviceGetName(name, sizeof name, 2));
    cr_assert_str_eq(name, "vpmm simulated GPU");
    OK(d->cuDeviceGetUuid(&a, 0));
    OK(d->cuDeviceGetUuid(&b, 1));
    cr_assert_neq(memcmp(&a, &b, sizeof a), 0);
    OK(d->cuDeviceTotalMem(&bytes, 1));
    cr_assert_eq(bytes, 256 * MIB);
    OK(d->cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 0));
    cr_assert_eq(value, 1);
    OK(d->cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 0));
    cr_assert_eq(value, 1);
    close_clean();
}

Test(sim, without_vmm_its_calls_are_refused)
{
    vpmm_sim_config config = small_config(false);
    config.vmm = false;
    open_with(&config);
    CUmemAllocationProp prop = prop_of(0);
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at;
    int value;
    OK(d->cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 0));
    cr_assert_eq(value, 0);
    IS(CUDA_ERROR_NOT_SUPPORTED, d->cuMemAddressReserve(&at, PAGE, 0, 0, 0));
    IS(CUDA_ERROR_NOT_SUPPORTED, d->cuMemCreate(&handle, PAGE, &prop, 0));
    OK(d->cuMemAlloc(&at, 100));
    OK(d->cuMemFree(at));
    close_clean();
}

Test(sim, contexts_are_a_stack_per_thread)
{
    open_sim(false);
    CUcontext own, current;
    CUdevice device;
    CUstream stream;
    OK(d->cuCtxCreate(&own, 0, 0));
    OK(d->cuCtxGetCurrent(&current));
    cr_assert_eq(current, own);
    OK(d->cuCtxPopCurrent(&current));
    cr_assert_eq(current, own);
    OK(d->cuCtxGetCurrent(&current));
    cr_assert_eq(current, context);
    OK(d->cuCtxPushCurrent(own));
    OK(d->cuCtxGetDevice(&device));
    OK(d->cuCtxSetCurrent(context));
    OK(d->cuCtxGetCurrent(&current));
    cr_assert_eq(current, context);
    OK(d->cuCtxSetCurrent(NULL));
    OK(d->cuCtxSetCurrent(NULL));
    IS(CUDA_ERROR_INVALID_CONTEXT, d->cuCtxGetDevice(&device));
    IS(CUDA_ERROR_INVALID_CONTEXT, d->cuStreamCreate(&stream, 0));
    IS(CUDA_ERROR_INVALID_CONTEXT, d->cuStreamSynchronize(NULL));
    IS(CUDA_ERROR_INVALID_CONTEXT, d->cuCtxPopCurrent(&current));
    struct memory m = make(PAGE); /* needs none */
    unmake(m);
    OK(d->cuCtxDestroy(own));
    close_clean();
}

Test(sim, a_destroyed_context_is_told_apart)
{
    open_sim(false);
    CUcontext own, popped;
    CUstream stream;
    CUevent event;
    OK(d->cuCtxCreate(&own, 0, 0));
    OK(d->cuStreamCreate(&stream, 0)); /* goes with its context: no leak */
    event = new_event();
    OK(d->cuCtxPushCurrent(own)); /* stays below the one that goes */
    OK(d->cuCtxDestroy(own));
    IS(CUDA_ERROR_CONTEXT_IS_DESTROYED, d->cuStreamCreate(&stream, 0));
    IS(CUDA_ERROR_INVALID_HANDLE, d->cuEventQuery(event));
    IS(CUDA_ERROR_INVALID_CONTEXT, d->cuCtxPushCurrent(own));
    cr_assert_eq(vpmm_sim_misuses(sim), 2);
    OK(d->cuCtxPopCurrent(&popped));
    close_with(0);
}

/* ---- addresses and physical memory ---- */

Test(sim, two_addresses_of_a_handle_are_the_same_bytes)
{
    open_sim(false);
    CUmemGenericAllocationHandle handle = create(3 * PAGE);
    CUdeviceptr at = reserve(8 * TIB);
    CUdeviceptr second = at + 5 * TIB + PAGE; /* aligned to 2 MiB, not to its size */
    OK(d->cuMemMap(at, 3 * PAGE, 0, handle, 0));
    OK(d->cuMemMap(second, 3 * PAGE, 0, handle, 0));
    OK(give_access(at, 3 * PAGE));
    OK(give_access(second, 3 * PAGE));
    uint32_t data[1024];
    for (uint32_t i = 0; i < 1024; i++)
        data[i] = i * 7;
    OK(d->cuMemcpyHtoD(at + PAGE - 100, data, sizeof data)); /* across pages */
    cr_assert_eq(word_at(second + PAGE - 100 + 4 * 1000), 7000);
    OK(d->cuMemUnmap(at, 3 * PAGE));
    cr_assert_eq(word_at(second + PAGE - 100 + 4 * 999), 6993);
    OK(d->cuMemUnmap(second, 3 * PAGE));
    OK(d->cuMemRelease(handle));
    OK(d->cuMemAddressFree(at, 8 * TIB));
    close_clean();
}

Test(sim, address_space_is_large_and_bounded)
{
    open_sim(false);
    CUdeviceptr chunk[16];
    IS(CUDA_ERROR_OUT_OF_MEMORY, d->cuMemAddressReserve(&chunk[0], (size_t)1 << 47, 0, 0, 0));
    for (int i = 0; i < 15; i++)
        chunk[i] = reserve(8 * TIB);
    IS(CUDA_ERROR_OUT_OF_MEMORY, d->cuMemAddressReserve(&chunk[15], PAGE, 0, 0, 0));
    OK(d->cuMemAddressFree(chunk[7], 8 * TIB));
    OK(d->cuMemAddressReserve(&chunk[7], 8 * TIB - PAGE, 0, 0, 0));
    OK(d->cuMemAddressFree(chunk[7], 8 * TIB - PAGE));
    CUdeviceptr wish = chunk[7] + 64 * PAGE;
    OK(d->cuMemAddressReserve(&chunk[7], PAGE, 0, wish, 0));
    cr_assert_eq(chunk[7], wish);
    OK(d->cuMemAddressFree(chunk[7], PAGE));
    OK(d->cuMemAddressReserve(&chunk[7], PAGE, (size_t)1 << 30, 0, 0));
    cr_assert_eq(chunk[7] % ((size_t)1 << 30), 0);
    OK(d->cuMemAddressFree(chunk[7], PAGE));
    for (int i = 0; i < 15; i++)
        if (i != 7)
            OK(d->cuMemAddressFree(chunk[i], 8 * TIB));
    close_clean();
}

Test(sim, what_the_driver_refuses)
{
    open_sim(false);
    CUmemAllocationProp prop = prop_of(0);
    CUmemGenericAllocationHandle h = create(4 * PAGE), one = create(PAGE), bad;
    CUdeviceptr at = reserve(16 * PAGE), out;
    size_t granularity;
    OK(d->cuMemGetAllocationGranularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    cr_assert_eq(granularity, PAGE);
    IS(CUDA_ERROR_INVALID_VALUE, d->cuMemCreate(&bad, PAGE + 1, &prop, 0));
    IS(CUDA_ERROR_INVALID_VALUE, d->cuMemCreate(&bad, 0, &prop, 0));
    prop.location.id = 1;
    IS(CUDA_ERROR_INVALID_DEVICE, d->cuMemCreate(&bad, PAGE, &prop, 0));
    IS(CUDA_ERROR_INVALID_VALUE, d->cuMemAddressReserve(&out, PAGE / 2, 0, 0, 0));
    IS(CUDA_ERROR_INVALID_VALUE, d->cuMemAddressReserve(&out, PAGE, 3 * PAGE, 0, 0));

    IS(CUDA_ERROR_NOT_SUPPORTED, d->cuMemMap(at, 2 * PAGE, 2 * PAGE, h, 0));      /* an offset */
    IS(CUDA_ERROR_NOT_SUPPORTED, d->cuMemMap(at, 2 * PAGE, 0, h, 0));             /* a part */
    IS(CUDA_ERROR_INVALID_VALUE, d->cuMemMap(at + 13 * PAGE, 4 * PAGE, 0, h, 0)); /* leaves the reservation */
    OK(d->cuMemMap(at, 4 * PAGE, 0, h, 0));
    IS(CUDA_ERROR_INVALID_VALUE, d->cuMemMap(at + 3 * PAGE, PAGE, 0, one, 0)); /* double */
    IS(CUDA_ERROR_INVALID_VALUE, give_access(at, 5 * PAGE));                   /* a hole at the end */
    OK(d->cuMemMap(at + 5 * PAGE, PAGE, 0, one, 0));
    IS(CUDA_ERROR_INVALID_VALUE, give_access(at, 6 * PAGE)); /* a hole inside */
    IS(CUDA_ERROR_INVALID_VALUE, d->cuMemUnmap(at, 2 * PAGE));
    IS(CUDA_ERROR_INVALID_VALUE, d->cuMemUnmap(at + PAGE, 5 * PAGE));
    IS(CUDA_ERROR_INVALID_VALUE, d->cuMemAddressFree(at, 16 * PAGE)); /* while mapped */
    OK(d->cuMemUnmap(at, 16 * PAGE));                                 /* several whole ones, and holes */
    OK(d->cuMemUnmap(at, 16 * PAGE));                                 /* nothing */
    IS(CUDA_ERROR_INVALID_VALUE, d->cuMemAddressFree(at, 8 * PAGE));
    OK(d->cuMemAddressFree(at, 16 * PAGE));
    OK(d->cuMemRelease(h));
    OK(d->cuMemRelease(one));
    cr_assert_eq(vpmm_sim_misuses(sim), 0);
    IS(CUDA_ERROR_INVALID_VALUE, d->cuMemRelease(one));
    cr_assert_eq(vpmm_sim_misuses(sim), 1);
    close_with(0);
}

Test(sim, capacity_comes_back_with_the_last_mapping)
{
    open_sim(false);
    CUmemAllocationProp prop = prop_of(0);
    CUmemGenericAllocationHandle all = create(256 * MIB), more, again;
    CUdeviceptr at = reserve(256 * MIB);
    size_t free_bytes, total;
    IS(CUDA_ERROR_OUT_OF_MEMORY, d->cuMemCreate(&more, PAGE, &prop, 0));
    OK(d->cuMemMap(at, 256 * MIB, 0, all, 0));
    OK(d->cuMemRelease(all));
    OK(give_access(at, 256 * MIB)); /* the mapping holds the memory */
    cr_assert_eq(vpmm_sim_used_bytes(sim), 256 * MIB);
    IS(CUDA_ERROR_OUT_OF_MEMORY, d->cuMemCreate(&more, PAGE, &prop, 0));
    OK(d->cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)(at + PAGE)));
    cr_assert_eq(again, all);
    OK(d->cuMemUnmap(at, 256 * MIB));
    IS(CUDA_ERROR_OUT_OF_MEMORY, d->cuMemCreate(&more, PAGE, &prop, 0));
    OK(d->cuMemRelease(again));
    cr_assert_eq(vpmm_sim_used_bytes(sim), 0);
    OK(d->cuMemGetInfo(&free_bytes, &total));
    cr_assert_eq(free_bytes, 256 * MIB);
    OK(d->cuMemAddressFree(at, 256 * MIB));
    close_clean();
}

Test(sim, an_exported_handle_is_the_same_memory)
{
    open_sim(false);
    CUmemAllocationProp prop = prop_of(0);
    CUmemGenericAllocationHandle plain = create(PAGE), handle, imported;
    const CUmemAllocationHandleType type = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    CUdeviceptr at = reserve(8 * PAGE), base;
    size_t bytes;
    int fd = -1;
    prop.requestedHandleTypes = type;
    OK(d->cuMemCreate(&handle, 2 * PAGE, &prop, 0));
    IS(CUDA_ERROR_NOT_SUPPORTED, d->cuMemExportToShareableHandle(&fd, plain, type, 0));
    IS(CUDA_ERROR_INVALID_VALUE, d->cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_NONE, 0));
    OK(d->cuMemExportToShareableHandle(&fd, handle, type, 0));
    OK(d->cuMemMap(at + PAGE, 2 * PAGE, 0, handle, 0));
    OK(d->cuMemRelease(handle)); /* the mapping holds it */
    OK(d->cuMemImportFromShareableHandle(&imported, (void *)(intptr_t)fd, type));
    OK(d->cuMemMap(at + 4 * PAGE, 2 * PAGE, 0, imported, 0));
    OK(give_access(at + PAGE, 2 * PAGE));
    OK(give_access(at + 4 * PAGE, 2 * PAGE));
    OK(d->cuMemsetD8(at + 2 * PAGE, 0xAB, 8));
    cr_assert_eq(word_at(at + 5 * PAGE), 0xABABABAB);
    OK(d->cuMemGetAddressRange(&base, &bytes, at + 2 * PAGE + 5));
    cr_assert(base == at + PAGE && bytes == 2 * PAGE);
    IS(CUDA_ERROR_NOT_FOUND, d->cuMemGetAddressRange(&base, &bytes, at));
    OK(d->cuMemUnmap(at, 8 * PAGE));
    OK(d->cuMemRelease(imported));
    OK(d->cuMemRelease(plain));
    OK(d->cuMemAddressFree(at, 8 * PAGE));
    cr_assert_eq(vpmm_sim_used_bytes(sim), 0);
    cr_assert_eq(vpmm_sim_misuses(sim), 0);
    IS(CUDA_ERROR_INVALID_VALUE, d->cuMemImportFromShareableHandle(&imported, (void *)(intptr_t)fd, type));
    cr_assert_eq(vpmm_sim_misuses(sim), 1); /* the file does not keep the memory here */
    close(fd);
    close_with(0);
}

Test(sim, freed_memory_is_not_found_again)
{
    open_sim(false);
    struct memory m = make(PAGE);
    OK(d->cuMemsetD8(m.at, 0xAB, PAGE));
    OK(d->cuCtxSynchronize());
    unmake(m);
    m = make(PAGE);
    cr_assert_eq(word_at(m.at), 0);
    unmake(m);
    close_clean();
}

Test(sim, many_small_mappings_are_no_trouble)
{
    enum { COUNT = 70000 }; /* more than the kernel has mappings for a process */
    vpmm_sim_config config = small_config(true);
    config.memory_bytes = (size_t)COUNT * PAGE;
    open_with(&config);
    CUmemGenericAllocationHandle *handles = malloc(COUNT * sizeof *handles);
    CUdeviceptr at = reserve((size_t)COUNT * 2 * PAGE);
    CUstream stream = new_stream();
    for (size_t i = 0; i < COUNT; i++) {
        handles[i] = create(PAGE);
        OK(d->cuMemMap(at + 2 * i * PAGE, PAGE, 0, handles[i], 0));
        OK(give_access(at + 2 * i * PAGE, PAGE));
    }
    for (size_t i = 0; i < COUNT; i += 7000)
        OK(d->cuMemsetD32Async(at + 2 * i * PAGE, (unsigned)i, 1, stream));
    OK(d->cuStreamSynchronize(stream));
    cr_assert_eq(word_at(at + 2 * (size_t)63000 * PAGE), 63000);
    OK(d->cuMemUnmap(at, (size_t)COUNT * 2 * PAGE));
    for (size_t i = 0; i < COUNT; i++)
        OK(d->cuMemRelease(handles[i]));
    OK(d->cuMemAddressFree(at, (size_t)COUNT * 2 * PAGE));
    OK(d->cuStreamDestroy(stream));
    free(handles);
    close_clean();
}

/* ---- illegal accesses ---- */

static void access_is_illegal(CUdeviceptr at)
{
    CUstream stream = new_stream();
    CUmemGenericAllocationHandle handle;
    CUmemAllocationProp prop = prop_of(0);
    OK(d->cuMemsetD8Async(at, 1, 1, stream));
    IS(CUDA_ERROR_ILLEGAL_ADDRESS, d->cuStreamSynchronize(stream));
    IS(CUDA_ERROR_ILLEGAL_ADDRESS, d->cuMemCreate(&handle, PAGE, &prop, 0));
    cr_assert_eq(vpmm_sim_misuses(sim), 1);
}

Test(sim, access_without_rights_is_sticky)
{
    open_sim(false);
    CUmemGenericAllocationHandle handle = create(PAGE);
    CUdeviceptr at = reserve(PAGE);
    OK(d->cuMemMap(at, PAGE, 0, handle, 0));
    access_is_illegal(at);
    cr_assert_eq(vpmm_sim_destroy(sim), 5); /* reservation, mapping, handle, stream, context */
}

Test(sim, access_after_unmap_is_sticky)
{
    open_sim(true);
    struct memory m = make(PAGE);
    OK(d->cuMemUnmap(m.at, PAGE));
    access_is_illegal(m.at);
    cr_assert_geq(vpmm_sim_destroy(sim), 3);
}

Test(sim, another_devices_memory_needs_rights_too)
{
    vpmm_sim_config config = small_config(false);
    config.devices = 2;
    open_with(&config);
    struct memory m = make(PAGE); /* of device 0, for device 0 */
    CUcontext other;
    OK(d->cuDevicePrimaryCtxRetain(&other, 1));
    OK(d->cuCtxPushCurrent(other));
    access_is_illegal(m.at);
    cr_assert_geq(vpmm_sim_destroy(sim), 3);
}

/* ---- streams and events ---- */

Test(sim, stepped_streams_run_only_by_hand)
{
    open_sim(true);
    struct memory m = make(PAGE);
    CUstream a = new_stream(), b = new_stream();
    CUevent event = new_event();
    IS(CUDA_SUCCESS, d->cuEventQuery(event)); /* never recorded */
    OK(d->cuMemsetD32Async(m.at, 11, 4, a));
    OK(d->cuEventRecord(event, a));
    OK(d->cuStreamWaitEvent(b, event, 0));
    OK(d->cuMemcpyDtoDAsync(m.at + 64, m.at, 16, b));
    cr_assert_eq(vpmm_sim_pending(sim, a), 2);
    cr_assert_eq(vpmm_sim_step(sim, b, 10), 0); /* waits for a */
    IS(CUDA_ERROR_NOT_READY, d->cuStreamQuery(a));
    IS(CUDA_ERROR_NOT_READY, d->cuEventQuery(event));
    cr_assert_eq(vpmm_sim_step(sim, a, 1), 1);
    IS(CUDA_ERROR_NOT_READY, d->cuEventQuery(event));
    cr_assert_eq(vpmm_sim_step(sim, a, 10), 1);
    OK(d->cuEventQuery(event));
    cr_assert_eq(vpmm_sim_step(sim, b, 1), 1);
    IS(CUDA_ERROR_NOT_READY, d->cuStreamQuery(b));
    cr_assert_eq(vpmm_sim_step(sim, b, 10), 1);
    OK(d->cuStreamQuery(b));
    cr_assert_eq(word_at(m.at + 64), 11);
    OK(d->cuEventDestroy(event));
    OK(d->cuStreamDestroy(a));
    OK(d->cuStreamDestroy(b));
    unmake(m);
    close_clean();
}

Test(sim, a_host_wait_runs_what_it_waits_for)
{
    open_sim(true);
    struct memory m = make(PAGE);
    CUstream a = new_stream(), b = new_stream();
    CUevent first = new_event(), second = new_event();
    OK(d->cuMemsetD32Async(m.at, 1, 1, a));
    OK(d->cuEventRecord(first, a));
    OK(d->cuMemsetD32Async(m.at + PAGE / 2, 2, 1, a)); /* not waited for */
    OK(d->cuStreamWaitEvent(b, first, 0));
    OK(d->cuEventRecord(second, b));
    OK(d->cuEventRecord(first, b)); /* later: changes nothing for the wait above */
    OK(d->cuEventSynchronize(second));
    cr_assert_eq(vpmm_sim_pending(sim, a), 1);
    cr_assert_eq(vpmm_sim_pending(sim, b), 1);
    OK(d->cuCtxSynchronize());
    cr_assert_eq(vpmm_sim_pending(sim, a) + vpmm_sim_pending(sim, b), 0);
    OK(d->cuEventDestroy(first));
    OK(d->cuEventDestroy(second));
    OK(d->cuStreamDestroy(a));
    OK(d->cuStreamDestroy(b));
    unmake(m);
    close_clean();
}

struct gate {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool open;
    int passed;
};

static void CUDA_CB pass_gate(void *argument)
{
    struct gate *gate = argument;
    pthread_mutex_lock(&gate->lock);
    while (!gate->open)
        pthread_cond_wait(&gate->changed, &gate->lock);
    gate->passed++;
    pthread_mutex_unlock(&gate->lock);
}

static void open_gate(struct gate *gate)
{
    pthread_mutex_lock(&gate->lock);
    gate->open = true;
    pthread_cond_broadcast(&gate->changed);
    pthread_mutex_unlock(&gate->lock);
}

#define GATE                                                                                                           \
    {                                                                                                                  \
        PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false, 0                                                  \
    }

Test(sim, threaded_streams_run_by_themselves)
{
    open_sim(false);
    struct gate gate = GATE;
    struct memory m = make(PAGE);
    CUstream a = new_stream(), b = new_stream();
    CUevent event = new_event();
    OK(d->cuLaunchHostFunc(a, pass_gate, &gate));
    OK(d->cuMemsetD32Async(m.at, 5, 1, a));
    OK(d->cuEventRecord(event, a));
    OK(d->cuStreamWaitEvent(b, event, 0));
    OK(d->cuMemsetD32Async(m.at, 6, 1, b));
    IS(CUDA_ERROR_NOT_READY, d->cuStreamQuery(b));
    IS(CUDA_ERROR_NOT_READY, d->cuEventQuery(event));
    open_gate(&gate);
    OK(d->cuStreamSynchronize(b));
    cr_assert_eq(word_at(m.at), 6);
    OK(d->cuEventSynchronize(event));
    cr_assert_eq(gate.passed, 1);
    OK(d->cuEventDestroy(event));
    OK(d->cuStreamDestroy(a));
    OK(d->cuStreamDestroy(b));
    unmake(m);
    close_clean();
}

Test(sim, a_destroyed_streams_handle_comes_back_at_once)
{
    open_sim(false);
    struct gate gate = GATE;
    CUstream a = new_stream(), b;
    unsigned long long id_a, id_b;
    OK(d->cuStreamGetId(a, &id_a));
    OK(d->cuLaunchHostFunc(a, pass_gate, &gate));
    OK(d->cuStreamDestroy(a)); /* busy */
    b = new_stream();
    cr_assert_eq(a, b);
    OK(d->cuStreamGetId(b, &id_b));
    cr_assert_neq(id_a, id_b);
    OK(d->cuStreamQuery(b)); /* its own work, not its predecessor's */
    cr_assert_eq(gate.passed, 0);
    open_gate(&gate);
    OK(d->cuCtxSynchronize());
    cr_assert_eq(gate.passed, 1);
    OK(d->cuStreamDestroy(b));
    close_clean();
}

Test(sim, a_destroyed_streams_work_can_be_stepped)
{
    open_sim(true);
    struct memory m = make(PAGE);
    CUstream a = new_stream();
    OK(d->cuMemsetD32Async(m.at, 9, 1, a));
    OK(d->cuStreamDestroy(a));
    cr_assert_eq(vpmm_sim_pending(sim, a), 1);
    cr_assert_eq(vpmm_sim_step(sim, a, 5), 1);
    a = new_stream();
    OK(d->cuMemsetD32Async(m.at + 4, 10, 1, a));
    OK(d->cuStreamDestroy(a));
    cr_assert_eq(new_stream(), a); /* no handle names it any more */
    cr_assert_eq(vpmm_sim_step(sim, a, 5), 0);
    cr_assert_eq(vpmm_sim_step(sim, NULL, 5), 1);
    OK(d->cuStreamDestroy(a));
    OK(d->cuCtxSynchronize());
    cr_assert_eq(word_at(m.at), 9);
    cr_assert_eq(word_at(m.at + 4), 10);
    unmake(m);
    close_clean();
}

Test(sim, stale_handles_are_named)
{
    open_sim(false);
    CUstream stream = new_stream();
    CUevent event = new_event(), other;
    unsigned long long id;
    CUstreamCaptureStatus status;
    OK(d->cuStreamDestroy(stream));
    OK(d->cuEventDestroy(event));
    IS(CUDA_ERROR_INVALID_HANDLE, d->cuStreamQuery(stream));
    IS(CUDA_ERROR_INVALID_HANDLE, d->cuStreamGetId(stream, &id));
    IS(CUDA_ERROR_INVALID_HANDLE, d->cuStreamIsCapturing(stream, &status));
    IS(CUDA_ERROR_INVALID_HANDLE, d->cuStreamDestroy(stream));
    IS(CUDA_ERROR_INVALID_HANDLE, d->cuEventQuery(event));
    other = new_event();
    cr_assert_neq(event, other);
    IS(CUDA_ERROR_INVALID_HANDLE, d->cuEventRecord(event, NULL));
    cr_assert_eq(vpmm_sim_misuses(sim), 6);
    OK(d->cuEventDestroy(other));
    close_with(0);
}

Test(sim, events_belong_to_a_context)
{
    open_sim(false);
    CUevent event = new_event();
    CUcontext other;
    CUstream stream;
    OK(d->cuCtxCreate(&other, 0, 0));
    stream = new_stream();
    IS(CUDA_ERROR_INVALID_HANDLE, d->cuEventRecord(event, stream));
    OK(d->cuStreamWaitEvent(stream, event, 0));
    CUcontext of_stream;
    OK(d->cuStreamGetCtx(stream, &of_stream));
    cr_assert_eq(of_stream, other);
    OK(d->cuStreamDestroy(stream));
    OK(d->cuCtxDestroy(other));
    OK(d->cuEventDestroy(event));
    close_clean();
}

Test(sim, the_legacy_stream_waits_for_blocking_streams_only)
{
    open_sim(true);
    struct memory m = make(PAGE);
    CUstream blocking, free_one = new_stream();
    OK(d->cuStreamCreate(&blocking, CU_STREAM_DEFAULT));
    OK(d->cuMemsetD32Async(m.at, 1, 1, blocking));
    OK(d->cuMemsetD32Async(m.at, 2, 1, NULL));
    OK(d->cuMemsetD32Async(m.at, 3, 1, blocking));
    OK(d->cuMemsetD32Async(m.at + PAGE / 2, 4, 1, free_one));
    cr_assert_eq(vpmm_sim_step(sim, NULL, 9), 0);
    cr_assert_eq(vpmm_sim_step(sim, blocking, 9), 1);
    cr_assert_eq(vpmm_sim_step(sim, CU_STREAM_LEGACY, 9), 1);
    cr_assert_eq(vpmm_sim_step(sim, blocking, 9), 1);
    OK(d->cuStreamSynchronize(NULL));
    cr_assert_eq(vpmm_sim_pending(sim, free_one), 1);
    cr_assert_eq(word_at(m.at), 3);
    OK(d->cuStreamSynchronize(free_one));
    OK(d->cuStreamDestroy(blocking));
    OK(d->cuStreamDestroy(free_one));
    unmake(m);
    close_clean();
}

static void *id_of_thread_stream(void *argument)
{
    unsigned long long *id = argument;
    d->cuCtxSetCurrent(context);
    d->cuStreamGetId(CU_STREAM_PER_THREAD, id);
    return NULL;
}

Test(sim, per_thread_streams_differ_by_thread)
{
    open_sim(false);
    unsigned long long here, again, there = 0, legacy;
    pthread_t thread;
    OK(d->cuStreamGetId(CU_STREAM_PER_THREAD, &here));
    OK(d->cuStreamGetId(CU_STREAM_PER_THREAD, &again));
    OK(d->cuStreamGetId(NULL, &legacy));
    pthread_create(&thread, NULL, id_of_thread_stream, &there);
    pthread_join(thread, NULL);
    cr_assert_eq(here, again);
    cr_assert(there && there != here && legacy != here && legacy != there);
    close_clean();
}

static CUresult from_host_function;

static void CUDA_CB call_the_driver(void *argument)
{
    (void)argument;
    from_host_function = d->cuStreamQuery(NULL);
}

Test(sim, host_functions_may_not_call_the_driver)
{
    open_sim(true);
    CUstream stream = new_stream();
    OK(d->cuLaunchHostFunc(stream, call_the_driver, NULL));
    OK(d->cuStreamSynchronize(stream));
    cr_assert_eq(from_host_function, CUDA_ERROR_NOT_PERMITTED);
    cr_assert_eq(vpmm_sim_misuses(sim), 1);
    OK(d->cuStreamDestroy(stream));
    close_with(0);
}

Test(sim, copies_and_memsets_move_what_they_say)
{
    open_sim(false);
    struct memory m = make(2 * PAGE);
    CUstream stream = new_stream();
    uint32_t *host;
    OK(d->cuMemHostAlloc((void **)&host, 4096, 0));
    OK(d->cuMemsetD8Async(m.at, 0x11, 2 * PAGE, stream));
    OK(d->cuMemsetD2D32Async(m.at, PAGE, 0xDEADBEEF, 2, 2, stream)); /* one line in each page */
    OK(d->cuMemcpyDtoHAsync(host, m.at + PAGE, 12, stream));
    OK(d->cuStreamSynchronize(stream));
    cr_assert_eq(host[0], 0xDEADBEEF);
    cr_assert_eq(host[1], 0xDEADBEEF);
    cr_assert_eq(host[2], 0x11111111);
    IS(CUDA_ERROR_INVALID_VALUE, d->cuMemsetD32Async(m.at + 2, 1, 1, stream));

    uint32_t rows[3][4] = {{1, 2, 3, 4}, {5, 6, 7, 8}, {9, 10, 11, 12}};
    CUDA_MEMCPY2D copy;
    memset(&copy, 0, sizeof copy);
    copy.srcMemoryType = CU_MEMORYTYPE_HOST;
    copy.srcHost = rows;
    copy.srcPitch = sizeof rows[0];
    copy.srcXInBytes = 4;
    copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    copy.dstDevice = m.at;
    copy.dstPitch = 64;
    copy.dstY = 1;
    copy.WidthInBytes = 8;
    copy.Height = 3;
    OK(d->cuMemcpy2DAsync(&copy, stream));
    memset(rows, 0, sizeof rows); /* pageable memory was staged */
    OK(d->cuStreamSynchronize(stream));
    cr_assert_eq(word_at(m.at + 64), 2);
    cr_assert_eq(word_at(m.at + 64 + 4), 3);
    cr_assert_eq(word_at(m.at + 192 + 4), 11);
    OK(d->cuMemFreeHost(host));
    OK(d->cuStreamDestroy(stream));
    unmake(m);
    close_clean();
}

/* ---- capture ---- */

enum unsafe { QUERY, SYNCHRONISE, ALLOC_ASYNC, TRIM, ALLOC, CONTEXT, UNSAFE_CALLS };

struct stranger {
    enum unsafe call;
    CUstreamCaptureMode mode;
    CUevent event;
    CUstream stream;
    CUmemoryPool pool;
    CUresult result;
};

static CUresult make_unsafe_call(struct stranger *s)
{
    CUdeviceptr at;
    switch (s->call) {
    case QUERY:
        return d->cuEventQuery(s->event);
    case SYNCHRONISE:
        return d->cuStreamSynchronize(s->stream);
    case TRIM:
        return d->cuMemPoolTrimTo(s->pool, 0);
    case CONTEXT:
        return d->cuCtxSynchronize();
    case ALLOC: {
        CUresult result = d->cuMemAlloc(&at, 1);
        return result == CUDA_SUCCESS ? d->cuMemFree(at) : result;
    }
    default: {
        CUresult result = d->cuMemAllocFromPoolAsync(&at, 1, s->pool, s->stream);
        return result == CUDA_SUCCESS ? d->cuMemFreeAsync(at, s->stream) : result;
    }
    }
}

static void *be_stranger(void *argument)
{
    struct stranger *s = argument;
    CUstreamCaptureMode mode = s->mode;
    d->cuCtxSetCurrent(context);
    d->cuThreadExchangeStreamCaptureMode(&mode);
    s->result = make_unsafe_call(s);
    return NULL;
}

/* A thread in one mode makes the call while this one captures in another. True: refused, and the capture was lost. */
static bool capture_is_lost(struct stranger *s, CUstreamCaptureMode capture_mode)
{
    CUstream capturing = new_stream();
    CUstreamCaptureStatus status;
    CUgraph graph;
    pthread_t thread;
    OK(d->cuStreamBeginCapture(capturing, capture_mode));
    OK(d->cuStreamIsCapturing(capturing, &status));
    cr_assert_eq(status, CU_STREAM_CAPTURE_STATUS_ACTIVE);
    pthread_create(&thread, NULL, be_stranger, s);
    pthread_join(thread, NULL);
    bool refused = s->result == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    cr_assert(refused || s->result == CUDA_SUCCESS, "call %d gave %d", (int)s->call, (int)s->result);
    OK(d->cuStreamIsCapturing(capturing, &status));
    cr_assert_eq(status, refused ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE);
    IS(refused ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS, d->cuStreamEndCapture(capturing, &graph));
    cr_assert_eq(graph == NULL, refused);
    if (!refused)
        OK(d->cuGraphDestroy(graph));
    OK(d->cuStreamDestroy(capturing));
    return refused;
}

Test(sim, other_threads_captures_forbid_what_the_modes_say)
{
    open_sim(false);
    CUmemPoolProps props;
    struct stranger s = {.event = new_event(), .stream = new_stream()};
    memset(&props, 0, sizeof props);
    props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    props.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    OK(d->cuMemPoolCreate(&s.pool, &props));
    for (int call = 0; call < UNSAFE_CALLS; call++)
        for (int mine = CU_STREAM_CAPTURE_MODE_GLOBAL; mine <= CU_STREAM_CAPTURE_MODE_RELAXED; mine++)
            for (int theirs = CU_STREAM_CAPTURE_MODE_GLOBAL; theirs <= CU_STREAM_CAPTURE_MODE_RELAXED; theirs++) {
                s.call = (enum unsafe)call;
                s.mode = (CUstreamCaptureMode)theirs;
                bool expected = call == CONTEXT ||
                                (mine == CU_STREAM_CAPTURE_MODE_GLOBAL && theirs == CU_STREAM_CAPTURE_MODE_GLOBAL);
                cr_assert_eq(capture_is_lost(&s, (CUstreamCaptureMode)mine), expected, "call %d, modes %d and %d", call,
                             mine, theirs);
            }
    OK(d->cuMemPoolDestroy(s.pool));
    OK(d->cuEventDestroy(s.event));
    OK(d->cuStreamDestroy(s.stream));
    close_clean();
}

Test(sim, harmless_calls_leave_a_capture_alone)
{
    open_sim(false);
    CUstream capturing = new_stream(), other = new_stream();
    CUgraph graph;
    unsigned long long id;
    CUstreamCaptureStatus status;
    OK(d->cuStreamBeginCapture(capturing, CU_STREAM_CAPTURE_MODE_GLOBAL));
    CUevent event = new_event();
    OK(d->cuEventRecord(event, other));
    OK(d->cuStreamWaitEvent(other, event, 0));
    struct memory m = make(PAGE);
    unmake(m);
    OK(d->cuStreamGetId(other, &id));
    OK(d->cuStreamIsCapturing(capturing, &status));
    OK(d->cuStreamEndCapture(capturing, &graph));
    OK(d->cuGraphDestroy(graph));
    OK(d->cuEventDestroy(event));
    OK(d->cuStreamDestroy(capturing));
    OK(d->cuStreamDestroy(other));
    close_clean();
}

Test(sim, looking_into_a_capturing_stream_loses_the_capture)
{
    open_sim(false);
    CUstream capturing = new_stream();
    CUgraph graph = NULL;
    CUstreamCaptureMode relaxed = CU_STREAM_CAPTURE_MODE_RELAXED;
    unsigned long long id;
    unsigned int flags;
    OK(d->cuThreadExchangeStreamCaptureMode(&relaxed));
    OK(d->cuStreamBeginCapture(capturing, CU_STREAM_CAPTURE_MODE_RELAXED));
    IS(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, d->cuStreamGetId(capturing, &id));
    IS(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, d->cuStreamEndCapture(capturing, &graph));
    OK(d->cuStreamBeginCapture(capturing, CU_STREAM_CAPTURE_MODE_RELAXED));
    IS(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, d->cuStreamGetFlags(capturing, &flags));
    IS(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, d->cuStreamEndCapture(capturing, &graph));
    OK(d->cuStreamDestroy(capturing));
    close_clean();
}

Test(sim, a_threads_own_capture)
{
    open_sim(false);
    struct memory m = make(PAGE);
    CUstream capturing = new_stream(), joining = new_stream(), other = new_stream();
    CUevent inside = new_event(), outside = new_event();
    CUgraph graph;
    OK(d->cuEventRecord(outside, other));

    OK(d->cuStreamBeginCapture(capturing, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    IS(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, d->cuEventQuery(outside));
    IS(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, d->cuMemsetD8Async(m.at, 1, 1, capturing));
    IS(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, d->cuStreamEndCapture(capturing, &graph));

    CUstreamCaptureMode before = exchange(CU_STREAM_CAPTURE_MODE_RELAXED);
    cr_assert_eq(before, CU_STREAM_CAPTURE_MODE_GLOBAL);
    OK(d->cuStreamBeginCapture(capturing, CU_STREAM_CAPTURE_MODE_GLOBAL));
    OK(d->cuEventQuery(outside));
    OK(d->cuMemsetD8Async(m.at, 1, PAGE, capturing)); /* not run: the graph is never launched */
    OK(d->cuEventRecord(inside, capturing));
    OK(d->cuStreamWaitEvent(joining, inside, 0));
    OK(d->cuMemsetD8Async(m.at, 1, PAGE, joining));
    OK(d->cuEventRecord(inside, joining));
    OK(d->cuStreamWaitEvent(capturing, inside, 0));
    OK(d->cuStreamEndCapture(capturing, &graph));
    OK(d->cuGraphDestroy(graph));
    IS(CUDA_ERROR_CAPTURED_EVENT, d->cuEventQuery(inside));
    OK(d->cuStreamQuery(joining));
    cr_assert_eq(word_at(m.at), 0);

    OK(d->cuStreamBeginCapture(capturing, CU_STREAM_CAPTURE_MODE_GLOBAL));
    IS(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, d->cuStreamWaitEvent(capturing, outside, 0));
    IS(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, d->cuStreamEndCapture(capturing, &graph));
    OK(d->cuStreamBeginCapture(capturing, CU_STREAM_CAPTURE_MODE_GLOBAL));
    IS(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, d->cuStreamSynchronize(capturing)); /* in every mode */
    IS(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, d->cuStreamEndCapture(capturing, &graph));
    IS(CUDA_ERROR_ILLEGAL_STATE, d->cuStreamEndCapture(capturing, &graph));

    exchange(before);
    OK(d->cuEventDestroy(inside));
    OK(d->cuEventDestroy(outside));
    OK(d->cuStreamDestroy(capturing));
    OK(d->cuStreamDestroy(joining));
    OK(d->cuStreamDestroy(other));
    unmake(m);
    close_clean();
}

Test(sim, the_legacy_stream_and_a_blocking_capture)
{
    open_sim(false);
    struct memory m = make(PAGE);
    CUstream capturing;
    CUstreamCaptureStatus status;
    CUgraph graph;
    OK(d->cuStreamCreate(&capturing, CU_STREAM_DEFAULT));
    IS(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, d->cuStreamBeginCapture(NULL, CU_STREAM_CAPTURE_MODE_RELAXED));
    OK(d->cuStreamBeginCapture(capturing, CU_STREAM_CAPTURE_MODE_RELAXED));
    IS(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, d->cuStreamIsCapturing(NULL, &status));
    IS(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, d->cuMemsetD8(m.at, 1, 1));
    IS(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, d->cuStreamEndCapture(capturing, &graph));
    OK(d->cuStreamDestroy(capturing));
    unmake(m);
    close_clean();
}

Test(sim, what_joins_a_capture_joins_its_origin_again)
{
    open_sim(false);
    struct memory m = make(PAGE);
    CUstream capturing = new_stream(), joining = new_stream();
    CUevent event = new_event();
    enum { UNJOINED, IDLE, JOINED, ENDS };
    for (int end = UNJOINED; end < ENDS; end++) {
        CUgraph graph = NULL;
        OK(d->cuStreamBeginCapture(capturing, CU_STREAM_CAPTURE_MODE_RELAXED));
        OK(d->cuEventRecord(event, capturing));
        OK(d->cuStreamWaitEvent(joining, event, 0));
        if (end != IDLE)
            OK(d->cuMemsetD8Async(m.at, 1, 1, joining));
        if (end == JOINED) {
            OK(d->cuEventRecord(event, joining));
            OK(d->cuStreamWaitEvent(capturing, event, 0));
        }
        if (end == UNJOINED)
            IS(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, d->cuStreamEndCapture(capturing, &graph));
        else
            OK(d->cuStreamEndCapture(capturing, &graph));
        if (graph)
            OK(d->cuGraphDestroy(graph));
    }
    OK(d->cuEventDestroy(event));
    OK(d->cuStreamDestroy(capturing));
    OK(d->cuStreamDestroy(joining));
    unmake(m);
    close_clean();
}

/* Whichever stream of a capture is a blocking one. */
Test(sim, the_legacy_stream_and_a_blocking_stream_that_joins_a_capture)
{
    open_sim(false);
    CUstream capturing = new_stream(), joining;
    CUevent inside = new_event(), event = new_event();
    CUstreamCaptureStatus status;
    CUgraph graph;
    OK(d->cuStreamCreate(&joining, CU_STREAM_DEFAULT));
    OK(d->cuStreamBeginCapture(capturing, CU_STREAM_CAPTURE_MODE_RELAXED));
    OK(d->cuEventRecord(inside, capturing));
    OK(d->cuStreamWaitEvent(joining, inside, 0));
    IS(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, d->cuStreamIsCapturing(NULL, &status));
    IS(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, d->cuEventRecord(event, NULL));
    IS(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, d->cuStreamEndCapture(capturing, &graph));
    OK(d->cuEventDestroy(inside));
    OK(d->cuEventDestroy(event));
    OK(d->cuStreamDestroy(capturing));
    OK(d->cuStreamDestroy(joining));
    close_clean();
}

/* ---- pools ---- */

static uint64_t pool_value(CUmemoryPool pool, CUmemPool_attribute attribute)
{
    cuuint64_t value = 0;
    OK(d->cuMemPoolGetAttribute(pool, attribute, &value));
    return value;
}

Test(sim, pools_are_stream_ordered)
{
    open_sim(true);
    CUmemoryPool pool;
    CUstream a = new_stream(), b = new_stream();
    CUdeviceptr first, same, other, later;
    cuuint64_t keep = UINT64_MAX;
    OK(d->cuDeviceGetDefaultMemPool(&pool, 0));
    OK(d->cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep));
    OK(d->cuMemAllocAsync(&first, 1000, a));
    cr_assert_eq(pool_value(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT), 1024);
    cr_assert_eq(pool_value(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), 32 * MIB);
    cr_assert_eq(vpmm_sim_used_bytes(sim), 32 * MIB);
    OK(d->cuMemsetD8Async(first, 1, 1000, a));
    OK(d->cuMemFreeAsync(first, a));
    OK(d->cuMemAllocAsync(&other, 1000, b)); /* not passed on a: elsewhere */
    cr_assert_neq(other, first);
    OK(d->cuMemAllocAsync(&same, 1000, a));
    cr_assert_eq(same, first);
    OK(d->cuMemFreeAsync(same, a));
    cr_assert_gt(vpmm_sim_step(sim, a, 10), 0);
    OK(d->cuMemAllocAsync(&later, 1000, b)); /* passed: reused, and ordered after it */
    cr_assert_eq(later, first);
    OK(d->cuMemsetD8Async(later, 2, 1000, b));
    OK(d->cuMemFreeAsync(later, b));
    OK(d->cuMemFreeAsync(other, b));
    OK(d->cuCtxSynchronize());
    cr_assert_eq(pool_value(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), 32 * MIB);
    OK(d->cuMemPoolTrimTo(pool, 0));
    cr_assert_eq(pool_value(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), 0);
    cr_assert_eq(pool_value(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH), 32 * MIB);
    IS(CUDA_ERROR_INVALID_VALUE, d->cuMemPoolDestroy(pool));
    cr_assert_eq(vpmm_sim_misuses(sim), 0);
    IS(CUDA_ERROR_INVALID_VALUE, d->cuMemFreeAsync(later, b));
    cr_assert_eq(vpmm_sim_misuses(sim), 1);
    OK(d->cuStreamDestroy(a));
    OK(d->cuStreamDestroy(b));
    cr_assert_eq(vpmm_sim_races(sim), 0);
    close_with(0);
}

Test(sim, a_destroyed_pool_lives_until_its_last_free)
{
    open_sim(false);
    CUmemoryPool pool;
    CUmemPoolProps props;
    CUdeviceptr at, big;
    memset(&props, 0, sizeof props);
    props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    props.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    OK(d->cuMemPoolCreate(&pool, &props));
    OK(d->cuMemAllocFromPoolAsync(&at, 100, pool, NULL));
    IS(CUDA_ERROR_OUT_OF_MEMORY, d->cuMemAllocFromPoolAsync(&big, 256 * MIB, pool, NULL));
    OK(d->cuMemAllocFromPoolAsync(&big, 224 * MIB, pool, NULL));
    OK(d->cuMemFreeAsync(big, NULL));
    OK(d->cuMemPoolDestroy(pool));
    OK(d->cuMemFreeAsync(at, NULL));
    OK(d->cuStreamSynchronize(NULL));
    cr_assert_eq(vpmm_sim_used_bytes(sim), 0);
    close_clean();
}

Test(sim, a_free_is_a_use_and_an_allocation_is_none)
{
    open_sim(true);
    CUstream a = new_stream(), b = new_stream();
    CUdeviceptr unused, used;
    OK(d->cuMemAllocAsync(&unused, 1000, a));
    OK(d->cuMemAllocAsync(&used, 1000, a));
    OK(d->cuMemsetD8Async(used, 1, 1000, a));
    OK(d->cuMemFreeAsync(unused, b));
    vpmm_sim_step(sim, a, 9);
    vpmm_sim_step(sim, b, 9);
    cr_assert_eq(vpmm_sim_races(sim), 0);
    OK(d->cuMemFreeAsync(used, b)); /* while a may still write */
    vpmm_sim_step(sim, b, 9);
    cr_assert_eq(vpmm_sim_races(sim), 1);
    OK(d->cuCtxSynchronize());
    OK(d->cuStreamDestroy(a));
    OK(d->cuStreamDestroy(b));
    close_with(0);
}

/* Whatever a pool hands out is ordered after its last use, on whatever stream, with no wait of the host's. */
Test(sim, reuse_by_a_pool_is_never_a_race)
{
    enum { LIVE = 256, ROUNDS = 40000 };
    open_sim(true);
    CUmemoryPool pool;
    CUstream streams[3] = {new_stream(), new_stream(), new_stream()};
    CUdeviceptr live[LIVE] = {0};
    size_t bytes[LIVE] = {0};
    uint64_t random = 12345;
    OK(d->cuDeviceGetDefaultMemPool(&pool, 0));
    for (int round = 0; round < ROUNDS; round++) {
        random = random * 6364136223846793005ULL + 1442695040888963407ULL;
        size_t k = random >> 40 & (LIVE - 1);
        CUstream stream = streams[k % 3];
        if (live[k]) {
            OK(d->cuMemsetD8Async(live[k], (unsigned char)k, bytes[k], stream));
            OK(d->cuMemFreeAsync(live[k], stream));
            live[k] = 0;
        } else {
            bytes[k] = 1 + (random >> 20) % 400000;
            OK(d->cuMemAllocAsync(&live[k], bytes[k], stream));
            OK(d->cuMemsetD8Async(live[k], (unsigned char)k, 512 < bytes[k] ? 512 : bytes[k], stream));
        }
        for (int i = 0; i < 3; i++) /* mostly idle, now and then far behind */
            vpmm_sim_step(sim, streams[i], random >> 60 & 3 ? SIZE_MAX : random >> 62);
    }
    for (int k = 0; k < LIVE; k++)
        if (live[k])
            OK(d->cuMemFreeAsync(live[k], streams[k % 3]));
    OK(d->cuCtxSynchronize());
    cr_assert_eq(pool_value(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT), 0);
    cr_assert_eq(pool_value(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), 0);
    for (int i = 0; i < 3; i++)
        OK(d->cuStreamDestroy(streams[i]));
    close_clean();
}

Test(sim, plain_memory_is_freed_after_the_device_is_idle)
{
    open_sim(true);
    CUdeviceptr at;
    CUstream stream = new_stream();
    OK(d->cuMemAlloc(&at, 100));
    OK(d->cuMemsetD8Async(at, 1, 100, stream));
    OK(d->cuMemFree(at));
    cr_assert_eq(vpmm_sim_pending(sim, stream), 0);
    cr_assert_eq(vpmm_sim_used_bytes(sim), 0);
    OK(d->cuStreamDestroy(stream));
    close_clean();
}

/* ---- races ---- */

Test(sim, unordered_writes_are_a_race)
{
    open_sim(true);
    struct memory m = make(PAGE);
    CUstream a = new_stream(), b = new_stream();
    OK(d->cuMemsetD8Async(m.at, 1, 100, a));
    OK(d->cuMemsetD8Async(m.at + 50, 2, 100, b));
    OK(d->cuStreamSynchronize(a));
    OK(d->cuStreamSynchronize(b));
    cr_assert_eq(vpmm_sim_races(sim), 1);
    OK(d->cuStreamDestroy(a));
    OK(d->cuStreamDestroy(b));
    unmake(m);
    cr_assert_eq(vpmm_sim_races(sim), 1);
    close_with(0);
}

Test(sim, reads_race_with_writes_but_not_with_reads)
{
    open_sim(true);
    struct memory m = make(PAGE), to = make(PAGE);
    CUstream s[3] = {new_stream(), new_stream(), new_stream()};
    OK(d->cuMemcpyDtoDAsync(to.at, m.at, 64, s[0]));
    OK(d->cuMemcpyDtoDAsync(to.at + 64, m.at, 64, s[1]));
    vpmm_sim_step(sim, s[0], 9);
    vpmm_sim_step(sim, s[1], 9);
    cr_assert_eq(vpmm_sim_races(sim), 0);
    OK(d->cuStreamQuery(s[0])); /* the host knows of one reader only */
    OK(d->cuMemsetD8Async(m.at, 2, PAGE, s[2]));
    vpmm_sim_step(sim, s[2], 9);
    cr_assert_eq(vpmm_sim_races(sim), 1);
    for (int i = 0; i < 3; i++) {
        OK(d->cuStreamSynchronize(s[i]));
        OK(d->cuStreamDestroy(s[i]));
    }
    unmake(m);
    unmake(to);
    close_with(0);
}

Test(sim, neighbours_in_a_page_do_not_race)
{
    open_sim(true);
    struct memory m = make(PAGE);
    CUstream a = new_stream(), b = new_stream();
    for (size_t i = 0; i < 200; i++) {
        OK(d->cuMemsetD8Async(m.at + 1024 * i, 1, 512, a));
        OK(d->cuMemsetD8Async(m.at + 1024 * i + 512, 2, 512, b));
    }
    OK(d->cuStreamSynchronize(a));
    OK(d->cuStreamSynchronize(b));
    OK(d->cuStreamDestroy(a));
    OK(d->cuStreamDestroy(b));
    unmake(m);
    close_clean();
}

/* Rows of one operation lie in a page with another's between them. */
Test(sim, columns_of_a_page_do_not_race)
{
    enum { PITCH = 1024, ROWS = 64 };
    open_sim(true);
    struct memory m = make(PAGE);
    CUstream a = new_stream(), b = new_stream();
    OK(d->cuMemsetD2D32Async(m.at, PITCH, 1, PITCH / 8, ROWS, a));
    OK(d->cuMemsetD2D32Async(m.at + PITCH / 2, PITCH, 2, PITCH / 8, ROWS, b));
    OK(d->cuStreamSynchronize(a));
    OK(d->cuStreamSynchronize(b));
    OK(d->cuStreamDestroy(a));
    OK(d->cuStreamDestroy(b));
    unmake(m);
    close_clean();
}

/* However many uses a page has, and although the host has seen all but the last by then. */
Test(sim, a_use_that_queued_work_can_race_with_is_not_forgotten)
{
    open_sim(true);
    struct memory m = make(PAGE);
    CUstream a = new_stream(), b = new_stream();
    CUevent event = new_event();
    for (uint64_t others = 0; others < 140; others++) {
        OK(d->cuMemsetD8Async(m.at, 1, 256, a));
        OK(d->cuMemsetD8Async(m.at, 2, 256, b));
        for (uint64_t i = 1; i <= others; i++)
            OK(d->cuMemsetD8Async(m.at + 256 * i, 1, 256, a));
        OK(d->cuEventRecord(event, a));
        vpmm_sim_step(sim, a, SIZE_MAX);
        OK(d->cuEventQuery(event));
        OK(d->cuMemsetD8Async(m.at + PAGE / 2, 1, 256, a));
        vpmm_sim_step(sim, a, SIZE_MAX);
        OK(d->cuStreamSynchronize(b));
        cr_assert_eq(vpmm_sim_races(sim), others + 1, "%d other uses", (int)others);
        OK(d->cuStreamSynchronize(a));
        unmake(m); /* the next page has no uses */
        m = make(PAGE);
    }
    OK(d->cuEventDestroy(event));
    OK(d->cuStreamDestroy(a));
    OK(d->cuStreamDestroy(b));
    unmake(m);
    close_with(0);
}

Test(sim, every_promised_order_is_known)
{
    open_sim(true);
    struct memory m = make(4 * PAGE);
    CUstream a = new_stream(), b = new_stream(), blocking;
    CUevent event = new_event();
    OK(d->cuStreamCreate(&blocking, CU_STREAM_DEFAULT));
    OK(d->cuMemsetD8Async(m.at, 1, 4 * PAGE, a));
    OK(d->cuEventRecord(event, a));
    OK(d->cuStreamWaitEvent(b, event, 0)); /* record .. wait */
    OK(d->cuMemsetD8Async(m.at, 2, 4 * PAGE, b));
    OK(d->cuStreamSynchronize(b)); /* wait .. host, and with it what b knew of a */
    OK(d->cuMemsetD8Async(m.at, 3, 4 * PAGE, blocking));
    OK(d->cuMemsetD8(m.at, 4, 4 * PAGE)); /* blocking .. legacy */
    OK(d->cuMemsetD8Async(m.at, 5, 4 * PAGE, blocking));
    OK(d->cuEventRecord(event, blocking));
    cr_assert_eq(vpmm_sim_step(sim, NULL, 1), 0);
    vpmm_sim_step(sim, blocking, 1);
    vpmm_sim_step(sim, NULL, 1);
    vpmm_sim_step(sim, blocking, 9);
    OK(d->cuEventQuery(event)); /* query .. host */
    OK(d->cuMemsetD8Async(m.at, 6, 4 * PAGE, a));
    OK(d->cuStreamDestroy(a));
    OK(d->cuCtxSynchronize()); /* orphans too */
    unmake(m);
    OK(d->cuEventDestroy(event));
    OK(d->cuStreamDestroy(b));
    OK(d->cuStreamDestroy(blocking));
    close_clean();
}

Test(sim, a_successor_under_the_same_handle_is_another_stream)
{
    open_sim(true);
    struct memory m = make(PAGE);
    CUstream a = new_stream();
    OK(d->cuMemsetD8Async(m.at, 1, 1, a));
    vpmm_sim_step(sim, a, 1);
    OK(d->cuStreamDestroy(a));
    CUstream b = new_stream();
    cr_assert_eq(a, b);
    OK(d->cuMemsetD8Async(m.at, 2, 1, b));
    OK(d->cuStreamSynchronize(b));
    cr_assert_eq(vpmm_sim_races(sim), 1);
    OK(d->cuCtxSynchronize());
    OK(d->cuStreamDestroy(b));
    unmake(m);
    close_with(0);
}

Test(sim, an_unmap_needs_the_host_to_know)
{
    open_sim(true);
    CUmemGenericAllocationHandle handle = create(PAGE);
    CUdeviceptr old = reserve(2 * PAGE), now = old + PAGE;
    CUstream a = new_stream(), b = new_stream();
    CUevent event = new_event();
    OK(d->cuMemMap(old, PAGE, 0, handle, 0));
    OK(give_access(old, PAGE));
    OK(d->cuMemsetD8Async(old, 1, PAGE, a));
    OK(d->cuEventRecord(event, a));
    vpmm_sim_step(sim, a, 9);
    OK(d->cuMemMap(now, PAGE, 0, handle, 0)); /* moved, as a pool would: b waits for a */
    OK(give_access(now, PAGE));
    OK(d->cuStreamWaitEvent(b, event, 0));
    OK(d->cuMemsetD8Async(now, 2, PAGE, b));
    vpmm_sim_step(sim, b, 9);
    OK(d->cuEventQuery(event));
    OK(d->cuMemUnmap(old, PAGE)); /* b's use of the new address does not matter */
    cr_assert_eq(vpmm_sim_races(sim), 0);
    OK(d->cuMemUnmap(now, PAGE)); /* here it does */
    cr_assert_eq(vpmm_sim_races(sim), 1);
    OK(d->cuMemRelease(handle));
    OK(d->cuMemAddressFree(old, 2 * PAGE));
    OK(d->cuEventDestroy(event));
    OK(d->cuStreamDestroy(a));
    OK(d->cuStreamDestroy(b));
    close_with(0);
}

Test(sim, work_queued_before_its_memory_was_mapped_is_a_race)
{
    open_sim(true);
    struct memory m = make(PAGE);
    CUstream a = new_stream();
    OK(d->cuMemsetD8Async(m.at, 1, 1, a));
    OK(d->cuMemUnmap(m.at, PAGE));
    OK(d->cuMemMap(m.at, PAGE, 0, m.handle, 0));
    OK(give_access(m.at, PAGE));
    OK(d->cuStreamSynchronize(a));
    cr_assert_eq(vpmm_sim_races(sim), 1);
    OK(d->cuStreamDestroy(a));
    unmake(m);
    close_with(0);
}

/* Pages of two devices side by side, which are no peers: no device may use both. */
Test(sim, rights_are_looked_at_for_each_mapping)
{
    vpmm_sim_config config = small_config(true);
    config.devices = 2;
    config.peers = false;
    open_with(&config);
    CUmemAllocationProp second = prop_of(1);
    CUmemGenericAllocationHandle own = create(PAGE), other;
    CUdeviceptr at = reserve(2 * PAGE);
    OK(d->cuMemCreate(&other, PAGE, &second, 0));
    OK(d->cuMemMap(at, PAGE, 0, own, 0));
    OK(d->cuMemMap(at + PAGE, PAGE, 0, other, 0));
    IS(CUDA_ERROR_INVALID_VALUE, give_access(at, 2 * PAGE));
    cr_expect_eq(vpmm_sim_access(sim, 0, at), CU_MEM_ACCESS_FLAGS_PROT_NONE);
    OK(give_access(at, PAGE));
    cr_expect_eq(vpmm_sim_access(sim, 0, at), CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    cr_expect_eq(vpmm_sim_access(sim, 17, at), CU_MEM_ACCESS_FLAGS_PROT_NONE, "there is no such device");
    OK(d->cuMemUnmap(at, 2 * PAGE));
    OK(d->cuMemRelease(own));
    OK(d->cuMemRelease(other));
    OK(d->cuMemAddressFree(at, 2 * PAGE));
    close_clean();
}

/* A page of which the device has a right when work is queued, and another before it runs. */
static uint64_t races_of_rights(CUmemAccess_flags queued_with, CUmemAccess_flags run_with)
{
    open_sim(true);
    struct memory m = make(PAGE);
    CUstream a = new_stream();
    OK(give_right(m.at, PAGE, 0, queued_with));
    OK(d->cuMemsetD8Async(m.at, 1, 1, a));
    OK(give_right(m.at, PAGE, 0, run_with));
    OK(d->cuStreamSynchronize(a));
    uint64_t races = vpmm_sim_races(sim);
    OK(d->cuStreamDestroy(a));
    unmake(m);
    close_with(0);
    return races;
}

Test(sim, work_queued_before_its_right_was_given_is_a_race)
{
    cr_expect_eq(races_of_rights(CU_MEM_ACCESS_FLAGS_PROT_NONE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE), 1);
    cr_expect_eq(races_of_rights(CU_MEM_ACCESS_FLAGS_PROT_READ, CU_MEM_ACCESS_FLAGS_PROT_READWRITE), 1);
    cr_expect_eq(races_of_rights(CU_MEM_ACCESS_FLAGS_PROT_READWRITE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE), 0);
}

/* One device's right is not another's. */
Test(sim, work_queued_before_its_device_has_a_right_is_a_race)
{
    vpmm_sim_config config = small_config(true);
    config.devices = 2;
    open_with(&config);
    struct memory m = make(PAGE);
    CUcontext second;
    OK(d->cuDevicePrimaryCtxRetain(&second, 1));
    OK(d->cuCtxPushCurrent(second));
    CUstream a = new_stream();
    OK(d->cuMemsetD8Async(m.at, 1, 1, a));
    OK(give_right(m.at, PAGE, 1, CU_MEM_ACCESS_FLAGS_PROT_READWRITE));
    OK(d->cuStreamSynchronize(a));
    cr_expect_eq(vpmm_sim_races(sim), 1);
    OK(d->cuStreamDestroy(a));
    unmake(m);
    OK(d->cuDevicePrimaryCtxRelease(1));
    OK(d->cuCtxSetCurrent(context));
    close_with(0);
}

/* It ran, and nobody knows. */
Test(sim, a_right_is_taken_away_after_its_last_use)
{
    open_sim(true);
    struct memory m = make(PAGE), n = make(PAGE);
    CUstream a = new_stream();
    OK(d->cuMemcpyDtoDAsync(n.at, m.at, PAGE, a));
    vpmm_sim_step(sim, a, SIZE_MAX);
    OK(give_right(m.at, PAGE, 0, CU_MEM_ACCESS_FLAGS_PROT_READ)); /* it was only read */
    cr_expect_eq(vpmm_sim_races(sim), 0);
    OK(give_right(n.at, PAGE, 0, CU_MEM_ACCESS_FLAGS_PROT_READ));
    cr_expect_eq(vpmm_sim_races(sim), 1);
    OK(d->cuStreamSynchronize(a));
    OK(give_right(m.at, PAGE, 0, CU_MEM_ACCESS_FLAGS_PROT_NONE));
    cr_expect_eq(vpmm_sim_races(sim), 1);
    OK(d->cuStreamDestroy(a));
    unmake(m);
    unmake(n);
    close_with(0);
}

static atomic_bool let_go;

static void CUDA_CB stay(void *entered)
{
    atomic_store((atomic_bool *)entered, true);
    while (!atomic_load(&let_go))
        usleep(100);
}

static void *wait_for(void *stream)
{
    OK(d->cuCtxSetCurrent(context));
    OK(d->cuStreamSynchronize(stream));
    return NULL;
}

/* Whether there is a race with what b did after the wait for a had begun, which a was told to wait for meanwhile. */
static bool race_with_what_came_later(CUstream a, CUstream b, CUevent event)
{
    struct memory m = make(PAGE);
    atomic_bool entered = false;
    uint64_t races = vpmm_sim_races(sim);
    pthread_t waiter;
    atomic_store(&let_go, false);
    OK(d->cuLaunchHostFunc(a, stay, &entered));
    while (!atomic_load(&entered))
        usleep(100);
    cr_assert_eq(pthread_create(&waiter, NULL, wait_for, a), 0);
    usleep(100000); /* it waits by now; if not, there is no race */
    OK(d->cuMemsetD8Async(m.at, 1, PAGE, b));
    OK(d->cuEventRecord(event, b));
    OK(d->cuStreamWaitEvent(a, event, 0));
    while (vpmm_sim_pending(sim, b)) /* who asks so learns nothing of it */
        usleep(100);
    atomic_store(&let_go, true);
    pthread_join(waiter, NULL);
    unmake(m);
    return vpmm_sim_races(sim) > races;
}

/* Who waits knows what the stream did up to there, and nothing that it was told to wait for meanwhile. */
Test(sim, a_wait_covers_what_was_queued_before_it)
{
    enum { TRIES = 50 }; /* on a busy machine a thread may be late */
    open_sim(false);
    CUstream a = new_stream(), b = new_stream();
    CUevent event = new_event();
    bool races = false;
    for (int i = 0; i < TRIES && !races; i++)
        races = race_with_what_came_later(a, b, event);
    cr_expect(races);
    OK(d->cuEventDestroy(event));
    OK(d->cuStreamDestroy(a));
    OK(d->cuStreamDestroy(b));
    close_with(0);
}

Test(sim, ranges_that_wrap_are_refused)
{
    open_sim(true);
    struct memory m = make(PAGE);
    CUstream a = new_stream();
    IS(CUDA_ERROR_INVALID_VALUE, d->cuMemsetD8Async(m.at, 1, (size_t)-4096, a));
    IS(CUDA_ERROR_INVALID_VALUE, d->cuMemsetD32Async(m.at, 1, (size_t)1 << 62, a));
    IS(CUDA_ERROR_INVALID_VALUE, d->cuMemsetD2D32Async(m.at, PAGE, 1, 1, (size_t)1 << 60, a));
    IS(CUDA_ERROR_INVALID_VALUE, d->cuMemcpyDtoDAsync(m.at, m.at, (size_t)-PAGE, a));
    cr_expect_eq(vpmm_sim_misuses(sim), 4);
    OK(d->cuStreamDestroy(a));
    unmake(m);
    close_with(0);
}

Test(sim, what_a_pool_has_back_is_not_used)
{
    open_sim(true);
    CUstream a = new_stream();
    CUdeviceptr p;
    OK(d->cuMemAllocAsync(&p, 4096, a));
    OK(d->cuMemsetD8Async(p, 1, 4096, a));
    IS(CUDA_ERROR_INVALID_VALUE, d->cuMemsetD8Async(p, 1, PAGE / 2, a)); /* beyond its end */
    OK(d->cuMemFreeAsync(p, a));
    IS(CUDA_ERROR_INVALID_VALUE, d->cuMemsetD8Async(p, 1, 4096, a));
    cr_expect_eq(vpmm_sim_misuses(sim), 2);
    OK(d->cuStreamSynchronize(a));
    OK(d->cuStreamDestroy(a));
    close_with(0);
}

/* Also what the program has not freed, as a context's end takes it. */
Test(sim, the_last_release_of_a_primary_context_ends_its_memory)
{
    open_sim(true);
    CUdeviceptr p;
    OK(d->cuMemAlloc(&p, PAGE));
    OK(d->cuDevicePrimaryCtxRelease(0));
    cr_expect_eq(vpmm_sim_used_bytes(sim), 0);
    OK(d->cuDevicePrimaryCtxRetain(&context, 0));
    OK(d->cuCtxSetCurrent(context));
    IS(CUDA_ERROR_INVALID_VALUE, d->cuMemFree(p));
    close_with(0);
}

Test(sim, races_can_be_left_unlooked_for)
{
    vpmm_sim_config config = small_config(true);
    config.detect_races = false;
    open_with(&config);
    struct memory m = make(PAGE);
    CUstream a = new_stream(), b = new_stream();
    OK(d->cuMemsetD8Async(m.at, 1, 100, a));
    OK(d->cuMemsetD8Async(m.at, 2, 100, b));
    OK(d->cuCtxSynchronize());
    OK(d->cuStreamDestroy(a));
    OK(d->cuStreamDestroy(b));
    unmake(m);
    close_clean();
}

/* ---- faults, shutdown, cost, leaks, slots ---- */

Test(sim, faults_before_and_after)
{
    open_sim(false);
    CUmemAllocationProp prop = prop_of(0);
    CUmemGenericAllocationHandle handle = 0, kept;
    vpmm_sim_fail(sim, "cuMemCreate", 2, CUDA_ERROR_OUT_OF_MEMORY, false);
    kept = create(PAGE);
    IS(CUDA_ERROR_OUT_OF_MEMORY, d->cuMemCreate(&handle, PAGE, &prop, 0));
    cr_assert_eq(vpmm_sim_used_bytes(sim), PAGE);
    OK(d->cuMemRelease(create(PAGE)));

    vpmm_sim_fail_after(sim, "cuMemCreate", 1, CUDA_ERROR_UNKNOWN, false);
    IS(CUDA_ERROR_UNKNOWN, d->cuMemCreate(&handle, PAGE, &prop, 0));
    cr_assert_eq(vpmm_sim_used_bytes(sim), 2 * PAGE); /* it took effect */
    OK(d->cuMemRelease(handle));

    vpmm_sim_fail(sim, "cuMemRelease", 2, CUDA_ERROR_LAUNCH_FAILED, true);
    OK(d->cuMemRelease(kept));
    kept = create(PAGE);
    for (int i = 0; i < 3; i++)
        IS(CUDA_ERROR_LAUNCH_FAILED, d->cuMemRelease(kept));
    vpmm_sim_fail(sim, "cuMemRelease", 0, CUDA_SUCCESS, false);
    OK(d->cuMemRelease(kept));

    CUcontext current; /* a call that takes no lock otherwise */
    vpmm_sim_fail(sim, "cuCtxGetCurrent", 1, CUDA_ERROR_UNKNOWN, false);
    IS(CUDA_ERROR_UNKNOWN, d->cuCtxGetCurrent(&current));
    OK(d->cuCtxGetCurrent(&current));
    cr_assert_eq(vpmm_sim_misuses(sim), 0);
    vpmm_sim_fail(sim, "cuMemCreat", 1, CUDA_ERROR_UNKNOWN, false);
    cr_assert_eq(vpmm_sim_misuses(sim), 1);
    close_with(0);
}

Test(sim, after_shutdown_nothing_answers)
{
    open_sim(false);
    CUevent event = new_event();
    const char *name;
    vpmm_sim_shutdown(sim);
    IS(CUDA_ERROR_DEINITIALIZED, d->cuEventQuery(event));
    IS(CUDA_ERROR_DEINITIALIZED, d->cuEventDestroy(event));
    IS(CUDA_ERROR_DEINITIALIZED, d->cuInit(0));
    OK(d->cuGetErrorName(CUDA_ERROR_DEINITIALIZED, &name));
    cr_assert_str_eq(name, "CUDA_ERROR_DEINITIALIZED");
    cr_assert_eq(vpmm_sim_destroy(sim), 2); /* the event, the retained context */
}

static void *charge_elsewhere(void *argument)
{
    CUcontext current;
    d->cuCtxGetCurrent(&current);
    *(double *)argument = vpmm_sim_thread_charged_us(sim);
    return NULL;
}

static bool near(double a, double b)
{
    return fabs(a - b) < 1e-6;
}

Test(sim, the_account_is_h200s_price_list)
{
    open_sim(false);
    CUevent event = new_event();
    CUstream stream = new_stream();
    double start = vpmm_sim_charged_us(sim), elsewhere = 0;
    cr_assert(near(start, vpmm_sim_thread_charged_us(sim)));
    struct memory m = make(32 * MIB);
    cr_assert(near(vpmm_sim_charged_us(sim) - start, 1 + 7.7 + 0.45 + 21));
    start = vpmm_sim_charged_us(sim);
    unmake(m);
    double unmap = 12.5 + (14.7 - 12.5) * 30 / 126;
    cr_assert(near(vpmm_sim_charged_us(sim) - start, unmap + 23 + 0.1));
    start = vpmm_sim_charged_us(sim);
    CUdeviceptr at = reserve(4 * PAGE);
    CUmemGenericAllocationHandle h[4];
    for (int i = 0; i < 4; i++) {
        h[i] = create(PAGE);
        OK(d->cuMemMap(at + (size_t)i * PAGE, PAGE, 0, h[i], 0));
    }
    OK(give_access(at, 4 * PAGE)); /* a range call saves nothing */
    cr_assert(near(vpmm_sim_charged_us(sim) - start, 1 + 4 * (5.7 + 0.45 + 18)));
    OK(d->cuMemUnmap(at, 4 * PAGE));
    for (int i = 0; i < 4; i++)
        OK(d->cuMemRelease(h[i]));
    OK(d->cuMemAddressFree(at, 4 * PAGE));
    start = vpmm_sim_charged_us(sim);
    OK(d->cuEventRecord(event, stream));
    OK(d->cuEventQuery(event));
    cr_assert(near(vpmm_sim_charged_us(sim) - start, 0.14 + 1.26));
    double mine = vpmm_sim_thread_charged_us(sim);
    pthread_t thread;
    pthread_create(&thread, NULL, charge_elsewhere, &elsewhere);
    pthread_join(thread, NULL);
    cr_assert(near(elsewhere, 0.007));
    cr_assert(near(vpmm_sim_thread_charged_us(sim), mine));
    cr_assert(near(vpmm_sim_charged_us(sim), mine + 0.007));
    cr_assert_eq(vpmm_sim_calls(sim, "cuMemCreate"), 5);
    uint64_t all = vpmm_sim_calls(sim, NULL);
    OK(d->cuEventDestroy(event));
    OK(d->cuStreamDestroy(stream));
    cr_assert_eq(vpmm_sim_calls(sim, NULL), all + 2);
    close_clean();
}

Test(sim, leaks_are_counted)
{
    open_sim(false);
    CUdeviceptr plain, pooled;
    void *host;
    CUgraph graph;
    CUstream stream = new_stream(), capturing = new_stream();
    new_event();
    struct memory m = make(PAGE); /* a reservation, a handle, a mapping */
    OK(d->cuMemAlloc(&plain, 1));
    OK(d->cuMemAllocAsync(&pooled, 1, stream));
    OK(d->cuMemHostAlloc(&host, 1, 0));
    OK(d->cuStreamBeginCapture(capturing, CU_STREAM_CAPTURE_MODE_RELAXED));
    OK(d->cuStreamEndCapture(capturing, &graph));
    OK(d->cuStreamDestroy(capturing));
    (void)m;
    cr_assert_eq(vpmm_sim_destroy(sim), 3 + 1 + 1 + 1 + 1 + 1 + 1 + 1);
}

Test(sim, sixteen_simulators_at_once)
{
    vpmm_sim *sims[17];
    CUstream streams[16];
    vpmm_sim_config config = small_config(false);
    for (int i = 0; i < 16; i++) {
        CUcontext own;
        sims[i] = vpmm_sim_create(&config);
        cr_assert(sims[i] != NULL);
        const vpmm_driver *t = vpmm_sim_driver(sims[i]);
        OK(t->cuInit(0));
        OK(t->cuDevicePrimaryCtxRetain(&own, 0));
        OK(t->cuCtxSetCurrent(own));
        OK(t->cuStreamCreate(&streams[i], 0));
    }
    cr_assert(vpmm_sim_create(&config) == NULL);
    cr_assert(strstr(vpmm_last_error(), "16") != NULL, "%s", vpmm_last_error());
    IS(CUDA_ERROR_INVALID_HANDLE, vpmm_sim_driver(sims[3])->cuStreamQuery(streams[4])); /* another's */
    cr_assert_eq(vpmm_sim_misuses(sims[3]), 1);
    cr_assert_eq(vpmm_sim_misuses(sims[4]), 0);
    cr_assert_eq(vpmm_sim_calls(sims[4], "cuStreamQuery"), 0);
    cr_assert_eq(vpmm_sim_destroy(sims[5]), 2);
    sims[5] = vpmm_sim_create(NULL);
    cr_assert(sims[5] != NULL);
    CUcontext none;
    OK(vpmm_sim_driver(sims[5])->cuInit(0));
    OK(vpmm_sim_driver(sims[5])->cuCtxGetCurrent(&none));
    cr_assert(none == NULL); /* nothing of the slot's earlier owner */
    for (int i = 0; i < 16; i++)
        vpmm_sim_destroy(sims[i]);
}

Test(sim, bad_settings_are_said)
{
    vpmm_sim_config config = vpmm_sim_config_default();
    config.memory_bytes = 0;
    cr_assert(vpmm_sim_create(&config) == NULL);
    cr_assert(strstr(vpmm_last_error(), "memory_bytes") != NULL);
    config = vpmm_sim_config_default();
    config.devices = 0;
    cr_assert(vpmm_sim_create(&config) == NULL);
    cr_assert(strstr(vpmm_last_error(), "devices") != NULL);
}

/* ---- under load ---- */

enum { LOAD_THREADS = 4, LOAD_ROUNDS = 200 };

static _Atomic int wrong;

static void *load(void *argument)
{
    uint32_t me = (uint32_t)(uintptr_t)argument;
    CUstream s, t;
    CUevent event;
    bool good = d->cuCtxSetCurrent(context) == CUDA_SUCCESS && d->cuStreamCreate(&s, 1) == CUDA_SUCCESS &&
                d->cuStreamCreate(&t, 1) == CUDA_SUCCESS && d->cuEventCreate(&event, 0) == CUDA_SUCCESS;
    for (uint32_t round = 0; round < LOAD_ROUNDS && good; round++) {
        CUmemAllocationProp prop = prop_of(0);
        CUmemGenericAllocationHandle handle;
        CUdeviceptr at, pooled;
        uint32_t value = me << 16 | round, seen = 0;
        good = d->cuMemAddressReserve(&at, PAGE, 0, 0, 0) == CUDA_SUCCESS &&
               d->cuMemCreate(&handle, PAGE, &prop, 0) == CUDA_SUCCESS &&
               d->cuMemMap(at, PAGE, 0, handle, 0) == CUDA_SUCCESS && give_access(at, PAGE) == CUDA_SUCCESS &&
               d->cuMemAllocAsync(&pooled, 4096, s) == CUDA_SUCCESS &&
               d->cuMemsetD32Async(at, value, 64, s) == CUDA_SUCCESS &&
               d->cuMemcpyDtoDAsync(pooled, at, 64, s) == CUDA_SUCCESS && d->cuEventRecord(event, s) == CUDA_SUCCESS &&
               d->cuStreamWaitEvent(t, event, 0) == CUDA_SUCCESS &&
               d->cuMemcpyDtoHAsync(&seen, pooled, 4, t) == CUDA_SUCCESS &&
               d->cuMemFreeAsync(pooled, t) == CUDA_SUCCESS && d->cuStreamSynchronize(t) == CUDA_SUCCESS &&
               seen == value && d->cuMemUnmap(at, PAGE) == CUDA_SUCCESS && d->cuMemRelease(handle) == CUDA_SUCCESS &&
               d->cuMemAddressFree(at, PAGE) == CUDA_SUCCESS;
        if (round % 16 == 0)
            good = good && d->cuStreamDestroy(s) == CUDA_SUCCESS && d->cuStreamCreate(&s, 1) == CUDA_SUCCESS;
    }
    good = good && d->cuStreamDestroy(s) == CUDA_SUCCESS && d->cuStreamDestroy(t) == CUDA_SUCCESS &&
           d->cuEventDestroy(event) == CUDA_SUCCESS;
    wrong += !good;
    return NULL;
}

Test(sim, threads_at_once)
{
    open_sim(false);
    pthread_t threads[LOAD_THREADS];
    for (uintptr_t i = 0; i < LOAD_THREADS; i++)
        pthread_create(&threads[i], NULL, load, (void *)(i + 1));
    for (int i = 0; i < LOAD_THREADS; i++)
        pthread_join(threads[i], NULL);
    cr_assert_eq(wrong, 0);
    OK(d->cuCtxSynchronize());
    close_clean();
}
