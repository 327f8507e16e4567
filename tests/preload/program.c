/*
 * program.c - a program that knows the driver alone. tests/preload/checks.sh runs it under libvpmm_preload.so.
 *
 *   program WAY CASE
 *
 *   linked    by the linker (the build that is linked with libcuda)
 *   dlsym     dlopen, and dlsym of each entry
 *   asked     dlopen, and dlsym of cuGetProcAddress_v2 alone, as CUDA's runtime does
 *   asked_v1  the same by the first cuGetProcAddress
 *   threads   as asked, for per-thread default streams
 *
 * Exit status 0: all that the case expects was so.
 */
#define _GNU_SOURCE
#include <cuda.h>

#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* X(member, symbol, name, ABI version, (parameters)) */
#define ENTRIES(X)                                                                                                     \
    X(init, "cuInit", "cuInit", 2000, (unsigned int))                                                                  \
    X(retain, "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRetain", 7000, (CUcontext *, CUdevice))                   \
    X(release, "cuDevicePrimaryCtxRelease_v2", "cuDevicePrimaryCtxRelease", 11000, (CUdevice))                         \
    X(reset, "cuDevicePrimaryCtxReset_v2", "cuDevicePrimaryCtxReset", 11000, (CUdevice))                               \
    X(set_current, "cuCtxSetCurrent", "cuCtxSetCurrent", 4000, (CUcontext))                                            \
    X(current, "cuCtxGetCurrent", "cuCtxGetCurrent", 4000, (CUcontext *))                                              \
    X(push, "cuCtxPushCurrent", "cuCtxPushCurrent", 4000, (CUcontext))                                                 \
    X(pop, "cuCtxPopCurrent", "cuCtxPopCurrent", 4000, (CUcontext *))                                                  \
    X(exchange, "cuThreadExchangeStreamCaptureMode", "cuThreadExchangeStreamCaptureMode", 10010,                       \
      (CUstreamCaptureMode *))                                                                                         \
    X(synchronize, "cuCtxSynchronize", "cuCtxSynchronize", 2000, (void))                                               \
    X(context_create, "cuCtxCreate", "cuCtxCreate", 3020, (CUcontext *, unsigned int, CUdevice))                       \
    X(stream_create, "cuStreamCreate", "cuStreamCreate", 2000, (CUstream *, unsigned int))                             \
    X(stream_destroy, "cuStreamDestroy_v2", "cuStreamDestroy", 4000, (CUstream))                                       \
    X(stream_wait, "cuStreamSynchronize", "cuStreamSynchronize", 2000, (CUstream))                                     \
    X(capture, "cuStreamBeginCapture_v2", "cuStreamBeginCapture", 10010, (CUstream, CUstreamCaptureMode))              \
    X(capture_end, "cuStreamEndCapture", "cuStreamEndCapture", 10000, (CUstream, CUgraph *))                           \
    X(recapture, "cuStreamBeginRecaptureToGraph", "cuStreamBeginRecaptureToGraph", 13030,                              \
      (CUstream, CUstreamCaptureMode, CUgraph, void *, void *))                                                        \
    X(event_create, "cuEventCreate", "cuEventCreate", 2000, (CUevent *, unsigned int))                                 \
    X(event_record, "cuEventRecord", "cuEventRecord", 2000, (CUevent, CUstream))                                       \
    X(event_destroy, "cuEventDestroy", "cuEventDestroy", 4000, (CUevent))                                              \
    X(stream_wait_event, "cuStreamWaitEvent", "cuStreamWaitEvent", 3020, (CUstream, CUevent, unsigned int))            \
    X(graph_destroy, "cuGraphDestroy", "cuGraphDestroy", 10000, (CUgraph))                                             \
    X(fill, "cuMemsetD8Async", "cuMemsetD8Async", 3020, (CUdeviceptr, unsigned char, size_t, CUstream))                \
    X(read, "cuMemcpyDtoHAsync", "cuMemcpyDtoHAsync", 3020, (void *, CUdeviceptr, size_t, CUstream))                   \
    X(launch, "cuLaunchHostFunc", "cuLaunchHostFunc", 10000, (CUstream, CUhostFn, void *))                             \
    X(alloc_async, "cuMemAllocAsync", "cuMemAllocAsync", 11020, (CUdeviceptr *, size_t, CUstream))                     \
    X(free_async, "cuMemFreeAsync", "cuMemFreeAsync", 11020, (CUdeviceptr, CUstream))                                  \
    X(alloc, "cuMemAlloc_v2", "cuMemAlloc", 3020, (CUdeviceptr *, size_t))                                             \
    X(free, "cuMemFree_v2", "cuMemFree", 3020, (CUdeviceptr))                                                          \
    X(info, "cuMemGetInfo_v2", "cuMemGetInfo", 3020, (size_t *, size_t *))                                             \
    X(range, "cuMemGetAddressRange_v2", "cuMemGetAddressRange", 3020, (CUdeviceptr *, size_t *, CUdeviceptr))          \
    X(attribute, "cuPointerGetAttribute", "cuPointerGetAttribute", 4000, (void *, CUpointer_attribute, CUdeviceptr))   \
    X(attributes, "cuPointerGetAttributes", "cuPointerGetAttributes", 7000,                                            \
      (unsigned int, CUpointer_attribute *, void **, CUdeviceptr))                                                     \
    X(default_pool, "cuDeviceGetDefaultMemPool", "cuDeviceGetDefaultMemPool", 11020, (CUmemoryPool *, CUdevice))       \
    X(pool_create, "cuMemPoolCreate", "cuMemPoolCreate", 11020, (CUmemoryPool *, const CUmemPoolProps *))              \
    X(pool_get, "cuMemPoolGetAttribute", "cuMemPoolGetAttribute", 11020, (CUmemoryPool, CUmemPool_attribute, void *))  \
    X(pool_set, "cuMemPoolSetAttribute", "cuMemPoolSetAttribute", 11020, (CUmemoryPool, CUmemPool_attribute, void *))  \
    X(pool_trim, "cuMemPoolTrimTo", "cuMemPoolTrimTo", 11020, (CUmemoryPool, size_t))                                  \
    X(pool_access, "cuMemPoolSetAccess", "cuMemPoolSetAccess", 11020, (CUmemoryPool, const CUmemAccessDesc *, size_t)) \
    X(device_pool, "cuDeviceSetMemPool", "cuDeviceSetMemPool", 11020, (CUdevice, CUmemoryPool))                        \
    X(alloc_pool, "cuMemAllocFromPoolAsync", "cuMemAllocFromPoolAsync", 11020,                                         \
      (CUdeviceptr *, size_t, CUmemoryPool, CUstream))                                                                 \
    X(create, "cuMemCreate", "cuMemCreate", 10020,                                                                     \
      (CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long))                       \
    X(stream_destroy_v1, "cuStreamDestroy", "cuStreamDestroy", 4000, (CUstream))                                       \
    X(set_pool, "cuMemSetMemPool", "cuMemSetMemPool", 13000, (CUmemLocation *, CUmemAllocationType, CUmemoryPool))     \
    X(enable_peer, "cuCtxEnablePeerAccess", "cuCtxEnablePeerAccess", 4000, (CUcontext, unsigned int))

static struct {
#define MEMBER(member, symbol, name, version, parameters) CUresult(CUDAAPI *member) parameters;
    ENTRIES(MEMBER)
} cu;

/* The fake driver's own. */
static struct {
    uint64_t (*calls)(const char *);
    uint64_t (*records_but)(CUstream); /* events recorded on other streams than this */
    uint64_t (*pending)(CUstream);
    uint64_t (*races)(void);
    uint64_t (*misuses)(void);
    void (*fail)(const char *, uint64_t nth, CUresult); /* from the nth call on; 0: no more */
    void (*fail_once)(const char *, uint64_t nth, CUresult);
    void (*hold)(const char *); /* the next call of this name waits in the driver; NULL: it goes on */
    bool (*holds)(void);        /* it waits */
} fake;

enum { ALARM_S = 100 }; /* for who would hang, on a busy machine under ThreadSanitizer: less than checks.sh waits */

static const char *way;
static int failures;
static CUcontext context;
static CUstream stream;

#define EXPECT(condition)                                                                                              \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            printf("%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                                             \
            __atomic_fetch_add(&failures, 1, __ATOMIC_RELAXED);                                                        \
        }                                                                                                              \
    } while (0)
#define OK(call) EXPECT((call) == CUDA_SUCCESS)

/* ---- the ways ---- */

static void set_function(void *function_pointer, void *symbol)
{
    memcpy(function_pointer, &symbol, sizeof(symbol));
}

#ifdef LINKED
#define LINK(member, symbol, name, version, parameters) CUresult CUDAAPI linked_##member parameters __asm__(symbol);
ENTRIES(LINK)
#endif

static void *ask(void *library, const char *name, int version)
{
    void *function = NULL;
    if (strcmp(way, "asked_v1") == 0) {
        CUresult (*get)(const char *, void **, int, cuuint64_t);
        set_function(&get, dlsym(library, "cuGetProcAddress"));
        OK(get(name, &function, version, CU_GET_PROC_ADDRESS_LEGACY_STREAM));
        return function;
    }
    CUresult (*get)(const char *, void **, int, cuuint64_t, void *);
    set_function(&get, dlsym(library, "cuGetProcAddress_v2"));
    const cuuint64_t flags =
        strcmp(way, "threads") == 0 ? CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM : CU_GET_PROC_ADDRESS_LEGACY_STREAM;
    OK(get("cuGetProcAddress", &function, 12000, 0, NULL)); /* as the runtime does once more */
    set_function(&get, function);
    OK(get(name, &function, version, flags, NULL));
    return function;
}

static void *find(void *library, const char *symbol, const char *name, int version)
{
    void *function = strcmp(way, "dlsym") == 0 ? dlsym(library, symbol) : ask(library, name, version);
    if (!function) {
        printf("%s is not found\n", symbol);
        exit(1);
    }
    return function;
}

static void find_entries(void *library)
{
#ifdef LINKED
    (void)find, (void)library;
#define SET(member, symbol, name, version, parameters) cu.member = linked_##member;
#else
#define SET(member, symbol, name, version, parameters) set_function(&cu.member, find(library, symbol, name, version));
#endif
    ENTRIES(SET)
}

static void begin(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        printf("%s\n", dlerror());
        exit(1);
    }
    find_entries(library);
    set_function(&fake.calls, dlsym(library, "fake_calls"));
    set_function(&fake.records_but, dlsym(library, "fake_records_but"));
    set_function(&fake.pending, dlsym(library, "fake_pending"));
    set_function(&fake.races, dlsym(library, "fake_races"));
    set_function(&fake.misuses, dlsym(library, "fake_misuses"));
    set_function(&fake.fail, dlsym(library, "fake_fail"));
    set_function(&fake.fail_once, dlsym(library, "fake_fail_once"));
    set_function(&fake.hold, dlsym(library, "fake_hold"));
    set_function(&fake.holds, dlsym(library, "fake_holds"));
    OK(cu.init(0));
    OK(cu.retain(&context, 0));
    OK(cu.set_current(context));
    OK(cu.stream_create(&stream, CU_STREAM_DEFAULT));
}

/* ---- what cases share ---- */

/* Memory of vpmm's: the driver has made no allocation for it. */
static CUdeviceptr served(size_t bytes, CUstream on)
{
    CUdeviceptr memory = 0;
    uint64_t before = fake.calls("cuMemAllocAsync");
    OK(cu.alloc_async(&memory, bytes, on));
    EXPECT(fake.calls("cuMemAllocAsync") == before);
    EXPECT(memory && memory % 512 == 0);
    return memory;
}

/* One that goes to the driver. */
static CUresult left(CUdeviceptr *memory, size_t bytes, CUstream on)
{
    uint64_t before = fake.calls("cuMemAllocAsync");
    CUresult result = cu.alloc_async(memory, bytes, on);
    EXPECT(fake.calls("cuMemAllocAsync") == before + 1);
    return result;
}

static bool holds(CUdeviceptr memory, size_t bytes, unsigned char value, CUstream on)
{
    unsigned char *host = malloc(bytes);
    bool good = host && cu.read(host, memory, bytes, on) == CUDA_SUCCESS && cu.stream_wait(on) == CUDA_SUCCESS;
    good = good && host[0] == value && memcmp(host, host + 1, bytes - 1) == 0; /* in one call, for ThreadSanitizer */
    free(host);
    return good;
}

static bool is_range(CUdeviceptr address, CUdeviceptr start, size_t bytes)
{
    CUdeviceptr from = 0;
    size_t length = 0;
    return cu.range(&from, &length, address) == CUDA_SUCCESS && from == start && length == bytes;
}

static CUmemoryPool own_pool(void)
{
    CUmemoryPool pool = NULL;
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                            .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
    OK(cu.pool_create(&pool, &props));
    return pool;
}

/* Memory of the default pool that the driver has given out: on a stream of another context. */
static CUdeviceptr theirs_of_standard(size_t bytes, CUstream *there)
{
    static CUcontext other;
    CUmemoryPool standard;
    CUdeviceptr memory = 0;
    OK(cu.default_pool(&standard, 0));
    OK(cu.context_create(&other, 0, 0)); /* and current */
    OK(cu.stream_create(there, CU_STREAM_NON_BLOCKING));
    OK(cu.alloc_pool(&memory, bytes, standard, *there));
    EXPECT(fake.calls("cuMemAllocFromPoolAsync") > 0);
    OK(cu.set_current(context));
    return memory;
}

/* ---- the cases ---- */

static void case_serve(void)
{
    static const size_t sizes[] = {1, 256, 1000, 4096, 100000, 2 << 20, (5 << 20) + 1, 64 << 20};
    enum { SIZES = sizeof(sizes) / sizeof(sizes[0]) };
    CUdeviceptr memory[SIZES];
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < SIZES; i++) {
            memory[i] = served(sizes[i], stream);
            OK(cu.fill(memory[i], (unsigned char)(i + round), sizes[i], stream));
        }
        for (int i = 0; i < SIZES; i++) {
            EXPECT(holds(memory[i], sizes[i], (unsigned char)(i + round), stream));
            OK(cu.free_async(memory[i], stream));
        }
    }
    EXPECT(cu.free_async(memory[0], stream) != CUDA_SUCCESS); /* once more */
    EXPECT(fake.calls("cuMemFreeAsync") == 1);
    EXPECT(fake.calls("cuMemCreate") > 0);
    CUdeviceptr none;
    EXPECT(left(&none, 0, stream) == CUDA_ERROR_INVALID_VALUE); /* as the driver says */
    CUcontext now = NULL;
    OK(cu.pop(&now)); /* the thread's contexts are as they were */
    EXPECT(now == context);
    OK(cu.current(&now));
    EXPECT(!now);
    OK(cu.push(context));
}

static void case_drivers(void)
{
    CUdeviceptr memory, plain, own = served(1000, stream);
    OK(cu.alloc_pool(&memory, 1000, own_pool(), stream));
    OK(cu.alloc(&plain, 5000));
    EXPECT(is_range(plain + 4999, plain, 5000));
    EXPECT(is_range(own + 999, own, 1000));
    OK(cu.free_async(memory, stream));
    OK(cu.free(plain));
    OK(cu.free(own)); /* which is vpmm's */
    EXPECT(fake.calls("cuMemFreeAsync") == 1);
    OK(cu.free(0));
    EXPECT(cu.free(0x7000) != CUDA_SUCCESS);
}

static void case_capture(void)
{
    CUgraph graph;
    CUdeviceptr memory, own = served(1000, stream);
    OK(cu.capture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    EXPECT(left(&memory, 1000, stream) == CUDA_ERROR_NOT_SUPPORTED); /* the simulator makes no nodes */
    EXPECT(cu.free_async(own, stream) == CUDA_ERROR_INVALID_VALUE);
    OK(cu.capture_end(stream, &graph)); /* the capture has gone on */
    OK(cu.graph_destroy(graph));
    EXPECT(is_range(own, own, 1000));
    OK(cu.free_async(own, stream));
    own = served(1000, stream);
    OK(cu.free_async(own, stream));
}

/* Beside a capture of another thread, and in the thread that captures, on other streams. */
static void case_beside_capture(void)
{
    CUgraph graph;
    CUcontext second;
    CUstream other, there;
    CUdeviceptr before = served(3 << 20, stream), own = served(1000, stream);
    OK(cu.context_create(&second, 0, 0)); /* and current */
    OK(cu.stream_create(&there, CU_STREAM_NON_BLOCKING));
    OK(cu.set_current(context));
    OK(cu.stream_create(&other, CU_STREAM_NON_BLOCKING));
    for (int i = 0; i < 8; i++)
        OK(cu.free_async(served(1 << 20, stream), stream));
    uint64_t marks = fake.calls("cuEventRecord");
    usleep(200000); /* nobody else comes near the stream, on which a capture may begin */
    EXPECT(fake.calls("cuEventRecord") == marks);
    OK(cu.capture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    CUdeviceptr memory = served(8 << 20, other);
    OK(cu.free_async(before, other));
    OK(cu.free_async(memory, other));
    OK(cu.stream_destroy(other));
    OK(cu.free_async(own, there)); /* waits for that stream alone */
    OK(cu.capture_end(stream, &graph));
    OK(cu.stream_destroy(there));
    OK(cu.graph_destroy(graph));
}

/* Whether a request for one stream, longer than all that is free, records on others, for what is in their caches. */
static bool records_on_others(CUstream on)
{
    static size_t bytes;
    uint64_t marks = fake.records_but(on);
    CUdeviceptr memory = served(bytes += 16 << 20, on);
    bool recorded = fake.records_but(on) > marks;
    OK(cu.free_async(memory, on));
    return recorded;
}

/* What a stream has freed last another gets, but while anything captures, or has ended as nobody ends a capture. */
static void case_left_behind(void)
{
    CUgraph graph;
    CUstream others[8], third;
    OK(cu.stream_create(&third, CU_STREAM_NON_BLOCKING));
    for (int i = 0; i < 8; i++)
        OK(cu.stream_create(&others[i], CU_STREAM_NON_BLOCKING));
    for (int i = 0; i < 6; i++) {
        OK(cu.free_async(served(3 << 20, stream), stream));
        if (i == 1 || i == 4)
            OK(cu.capture(third, CU_STREAM_CAPTURE_MODE_RELAXED));
        if (i == 1)
            EXPECT(cu.capture_end(others[7], &graph) != CUDA_SUCCESS); /* it captures nothing, and ends nothing */
        EXPECT(records_on_others(others[i]) == (i == 0 || i == 2 || i == 3));
        if (i == 1)
            OK(cu.capture_end(third, &graph));
        if (i == 1)
            OK(cu.graph_destroy(graph));
        if (i == 4)
            cu.stream_destroy(third);
    }
}

/* Where the user says that captures are not seen. */
static void case_left_alone(void)
{
    CUstream other;
    OK(cu.stream_create(&other, CU_STREAM_NON_BLOCKING));
    OK(cu.free_async(served(3 << 20, stream), stream));
    EXPECT(!records_on_others(other));
}

/* By CUDA 13.3's entry too, whose capture ends as any other does. */
static void case_recaptured(void)
{
    CUgraph graph, another;
    CUstream first, second, others[3];
    OK(cu.stream_create(&first, CU_STREAM_NON_BLOCKING));
    OK(cu.stream_create(&second, CU_STREAM_NON_BLOCKING));
    for (int i = 0; i < 3; i++)
        OK(cu.stream_create(&others[i], CU_STREAM_NON_BLOCKING));
    OK(cu.capture(first, CU_STREAM_CAPTURE_MODE_RELAXED));
    OK(cu.capture_end(first, &graph));
    OK(cu.capture(first, CU_STREAM_CAPTURE_MODE_RELAXED));
    OK(cu.recapture(second, CU_STREAM_CAPTURE_MODE_RELAXED, graph, NULL, NULL));
    for (int ended = 0; ended < 3; ended++) {
        OK(cu.free_async(served(3 << 20, stream), stream));
        EXPECT(records_on_others(others[ended]) == (ended == 2));
        if (ended == 0)
            OK(cu.capture_end(second, &graph));
        if (ended == 1)
            OK(cu.capture_end(first, &another));
    }
    OK(cu.graph_destroy(graph));
    OK(cu.graph_destroy(another));
}

/* A stream that has joined a capture goes before the capture ends. Nobody has its handle then. */
static void case_joined(void)
{
    CUgraph graph;
    CUevent fork, join;
    CUstream first, joined, other;
    OK(cu.stream_create(&first, CU_STREAM_NON_BLOCKING));
    OK(cu.stream_create(&joined, CU_STREAM_NON_BLOCKING));
    OK(cu.stream_create(&other, CU_STREAM_NON_BLOCKING));
    OK(cu.event_create(&fork, CU_EVENT_DISABLE_TIMING));
    OK(cu.event_create(&join, CU_EVENT_DISABLE_TIMING));
    OK(cu.free_async(served(3 << 20, joined), joined));
    OK(cu.capture(first, CU_STREAM_CAPTURE_MODE_RELAXED));
    OK(cu.event_record(fork, first));
    OK(cu.stream_wait_event(joined, fork, 0));
    OK(cu.event_record(join, joined));
    OK(cu.stream_wait_event(first, join, 0));
    cu.stream_destroy(joined);
    if (cu.capture_end(first, &graph) == CUDA_SUCCESS) /* the simulator says that it is lost */
        OK(cu.graph_destroy(graph));
    uint64_t before = fake.misuses();
    EXPECT(!records_on_others(other));
    EXPECT(fake.misuses() == before);
    OK(cu.event_destroy(fork));
    OK(cu.event_destroy(join));
}

/* A stream goes while the driver refuses this call: vpmm has not let go of it, and records on no stream any more. */
static void destroy_refused(const char *call, CUresult result)
{
    CUstream brief, other;
    OK(cu.stream_create(&brief, CU_STREAM_NON_BLOCKING));
    OK(cu.stream_create(&other, CU_STREAM_NON_BLOCKING));
    OK(cu.free_async(served(3 << 20, brief), brief));
    fake.fail(call, 1, result);
    OK(cu.stream_destroy(brief));
    fake.fail(call, 0, CUDA_SUCCESS);
    EXPECT(!records_on_others(other));
}

static void case_unreleased(void)
{
    destroy_refused("cuEventRecord", CUDA_ERROR_OUT_OF_MEMORY);
}

static void case_unreleased_unasked(void)
{
    destroy_refused("cuStreamGetCtx", CUDA_ERROR_UNKNOWN);
}

/* A device whose requests are all left has no pool. */
static void case_opened_first(void)
{
    CUmemoryPool standard;
    CUdeviceptr memory;
    CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 1},
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    OK(cu.default_pool(&standard, 0));
    OK(cu.pool_access(standard, &access, 1));
    OK(left(&memory, 1000, stream));
    OK(cu.free_async(memory, stream));
    EXPECT(fake.calls("cuMemAddressReserve") == 0);
}

/* Small requests that vpmm takes of a pool of the driver's are reserved and trimmed like all else. */
static void case_small_async(void)
{
    enum { MANY = 64, BYTES = 1 << 20 };
    CUmemoryPool standard;
    CUdeviceptr memory[MANY];
    uint64_t used = 0, reserved = 0;
    size_t free = 0, total;
    OK(cu.default_pool(&standard, 0));
    for (int i = 0; i < MANY; i++)
        memory[i] = served(BYTES, stream);
    OK(cu.pool_get(standard, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used));
    OK(cu.pool_get(standard, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved));
    EXPECT(used == (uint64_t)MANY * BYTES && reserved >= used);
    for (int i = 0; i < MANY; i++)
        OK(cu.free_async(memory[i], stream));
    OK(cu.stream_wait(stream));
    OK(cu.pool_trim(standard, 0));
    OK(cu.info(&free, &total));
    EXPECT(total - free < (size_t)MANY * BYTES / 2); /* of what is waited by, a block or two */
}

static void case_pools(void)
{
    CUmemoryPool standard, pool;
    CUdeviceptr memory, own = served(1000, stream);
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                            .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
    OK(cu.default_pool(&standard, 0));
    OK(cu.pool_create(&pool, &props));
    OK(cu.device_pool(0, pool));
    OK(left(&memory, 1000, stream));
    OK(cu.free_async(own, stream)); /* still vpmm's */
    EXPECT(fake.calls("cuMemFreeAsync") == 0);
    OK(cu.free_async(memory, stream));
    EXPECT(fake.calls("cuMemFreeAsync") == 1);
    uint64_t before = fake.calls("cuMemAllocFromPoolAsync");
    OK(cu.alloc_pool(&memory, 1000, standard, stream)); /* which is vpmm's, whatever is the device's */
    EXPECT(fake.calls("cuMemAllocFromPoolAsync") == before);
    OK(cu.free_async(memory, stream));
    OK(cu.alloc_pool(&memory, 1000, pool, stream));
    EXPECT(fake.calls("cuMemAllocFromPoolAsync") == before + 1);
    OK(cu.free_async(memory, stream));
    OK(cu.device_pool(0, standard));
    OK(cu.free_async(served(1000, stream), stream));
}

/* By CUDA 13's entry. */
static void case_pool_of_location(void)
{
    CUmemoryPool pool;
    CUdeviceptr memory;
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                            .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
    OK(cu.free_async(served(1000, stream), stream));
    OK(cu.pool_create(&pool, &props));
    OK(cu.set_pool(&props.location, CU_MEM_ALLOCATION_TYPE_PINNED, pool));
    OK(left(&memory, 1000, stream));
    OK(cu.free_async(memory, stream));
}

static void case_shared(void)
{
    CUmemoryPool standard, own;
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                            .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
    CUdeviceptr memory;
    CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0},
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    OK(cu.default_pool(&standard, 0));
    OK(cu.pool_access(standard, &access, 1)); /* of its own device: nothing new */
    OK(cu.free_async(served(1000, stream), stream));
    access = (CUmemAccessDesc){.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 1}}; /* no right at all */
    OK(cu.pool_access(standard, &access, 1));
    OK(cu.free_async(served(1000, stream), stream));
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    OK(cu.pool_create(&own, &props));
    OK(cu.pool_access(own, &access, 1)); /* of another pool */
    OK(cu.free_async(served(1000, stream), stream));
    EXPECT(cu.pool_access(standard, NULL, 1) == CUDA_ERROR_INVALID_VALUE); /* which gives no right */
    OK(cu.free_async(served(1000, stream), stream));
    OK(cu.pool_access(standard, &access, 1));
    OK(left(&memory, 1000, stream));
    OK(cu.free_async(memory, stream));
}

static atomic_bool goes_on;

static void CUDA_CB wait_on_host(void *unused)
{
    (void)unused;
    while (!atomic_load(&goes_on))
        usleep(1000);
}

static void case_context(void)
{
    CUcontext other;
    CUstream there;
    CUdeviceptr memory, own = served(1000, stream);
    OK(cu.context_create(&other, 0, 0)); /* and current */
    OK(cu.stream_create(&there, CU_STREAM_DEFAULT));
    uint64_t retained = fake.calls("cuDevicePrimaryCtxRetain") - fake.calls("cuDevicePrimaryCtxRelease");
    OK(left(&memory, 1000, there));
    EXPECT(fake.calls("cuDevicePrimaryCtxRetain") - fake.calls("cuDevicePrimaryCtxRelease") == retained);
    OK(cu.fill(own, 1, 1000, there));
    fake.fail("cuStreamWaitEvent", 1, CUDA_ERROR_UNKNOWN);
    EXPECT(cu.free_async(own, there) == CUDA_ERROR_UNKNOWN);
    fake.fail("cuStreamWaitEvent", 0, CUDA_SUCCESS);
    EXPECT(is_range(own, own, 1000)); /* it is live as it was */
    OK(cu.launch(there, wait_on_host, NULL));
    uint64_t events = fake.calls("cuEventCreate") - fake.calls("cuEventDestroy");
    OK(cu.free_async(own, there)); /* does not wait for the work, which goes on after it */
    EXPECT(fake.calls("cuEventCreate") - fake.calls("cuEventDestroy") <= events + 1); /* a mark's stays */
    EXPECT(!atomic_load(&goes_on));
    atomic_store(&goes_on, true);
    CUcontext now = NULL;
    OK(cu.pop(&now)); /* the thread's contexts are as they were */
    EXPECT(now == other);
    OK(cu.current(&now));
    EXPECT(now == context);
    OK(cu.push(other));
    OK(cu.free_async(memory, there));
    EXPECT(fake.calls("cuMemFreeAsync") == 1);
    OK(cu.stream_destroy(there));
    OK(cu.set_current(context));
    OK(cu.free_async(served(1000, stream), stream));
}

static void case_questions(void)
{
    const size_t bytes = 3 * (2 << 20) + 17;
    CUmemoryPool standard, pool = NULL;
    CUdeviceptr large = served(bytes, stream), small = served(1000, stream), other = served(1000, stream), start = 0;
    size_t length = 0, free = 0, total = 0, later = 0;
    unsigned int type = 0;
    OK(cu.default_pool(&standard, 0));
    EXPECT(is_range(large, large, bytes));
    EXPECT(is_range(large + 2500000, large, bytes));
    EXPECT(is_range(large + bytes - 1, large, bytes));
    EXPECT(!is_range(large + bytes, large, bytes));
    EXPECT(is_range(small + 999, small, 1000));
    EXPECT(is_range(other, other, 1000));
    OK(cu.attribute(&start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, large + 5000000));
    OK(cu.attribute(&length, CU_POINTER_ATTRIBUTE_RANGE_SIZE, large + 5000000));
    EXPECT(start == large && length == bytes);
    CUpointer_attribute asked[] = {CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                   CU_POINTER_ATTRIBUTE_RANGE_START_ADDR};
    void *data[] = {&pool, &type, &start};
    OK(cu.attributes(3, asked, data, small + 1));
    EXPECT(pool == standard && type == CU_MEMORYTYPE_DEVICE && start == small);
    CUcontext of = context;
    OK(cu.attribute(&of, CU_POINTER_ATTRIBUTE_CONTEXT, small));
    EXPECT(!of); /* a pool's memory has none */

    uint64_t used = 0, reserved = 0, high = 1 << 30;
    OK(cu.pool_get(standard, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used));
    OK(cu.pool_get(standard, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved));
    EXPECT(used == bytes + 2000 && used <= reserved && reserved <= 64 << 20);
    OK(cu.free_async(large, stream));
    large = served(32 << 20, stream);
    OK(cu.info(&free, &total));
    OK(cu.free_async(large, stream));
    OK(cu.stream_wait(stream));
    OK(cu.info(&later, &total));
    EXPECT(later >= free + (32 << 20) && later <= total); /* vpmm keeps it, and would give it back */
    OK(cu.pool_get(standard, CU_MEMPOOL_ATTR_USED_MEM_HIGH, &high));
    EXPECT(high >= used);
    high = 0;
    OK(cu.pool_set(standard, CU_MEMPOOL_ATTR_USED_MEM_HIGH, &high));
    OK(cu.pool_get(standard, CU_MEMPOOL_ATTR_USED_MEM_HIGH, &high));
    EXPECT(high < used);
    OK(cu.pool_trim(standard, 0));
    OK(cu.pool_get(standard, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &later));
    EXPECT(later < reserved);
    reserved = later;
    OK(cu.pool_get(standard, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, &later));
    EXPECT(later > reserved);
    high = 0;
    OK(cu.pool_set(standard, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, &high));
    OK(cu.pool_get(standard, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, &high));
    EXPECT(high < later);
    OK(cu.free_async(small, stream));
    OK(cu.free_async(other, stream));
    EXPECT(!is_range(small, small, 1000));
}

/* What was said of the default pool before there was one of vpmm's. */
static void case_threshold(void)
{
    CUmemoryPool standard;
    uint64_t all = UINT64_MAX, reserved = 0;
    OK(cu.default_pool(&standard, 0));
    OK(cu.pool_set(standard, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &all));
    OK(cu.free_async(served(32 << 20, stream), stream));
    OK(cu.stream_wait(stream));
    usleep(300000); /* VPMM_DECAY_MS is 50 */
    OK(cu.pool_get(standard, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved));
    EXPECT(reserved >= 32 << 20);
    all = 0;
    OK(cu.pool_set(standard, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &all));
    for (int i = 0; i < 600 && reserved >= 32 << 20; i++) {
        usleep(50000); /* without a request, which could lie in that memory and hold it */
        OK(cu.pool_get(standard, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved));
    }
    EXPECT(reserved < 32 << 20);
}

/* Whether a stream may be made to wait for another one: said before there was a pool of vpmm's, and after. */
static void case_dependencies(void)
{
    CUstream other;
    CUmemoryPool standard;
    int may_wait = 0;
    OK(cu.stream_create(&other, CU_STREAM_NON_BLOCKING));
    OK(cu.default_pool(&standard, 0));
    for (int round = 0; round < 3; round++) { /* not so, so, and not so */
        may_wait = round == 1;
        OK(cu.pool_set(standard, CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES, &may_wait));
        CUdeviceptr memory = served(64 << 20, stream);
        OK(cu.fill(memory, 1, 64 << 20, stream));
        OK(cu.free_async(memory, stream));
        uint64_t waits = fake.calls("cuStreamWaitEvent");
        memory = served(64 << 20, other);
        EXPECT((fake.calls("cuStreamWaitEvent") > waits) == may_wait);
        OK(cu.free_async(memory, other));
        OK(cu.stream_wait(stream));
        OK(cu.stream_wait(other));
        OK(cu.pool_trim(standard, 0));
    }
    OK(cu.stream_destroy(other));
}

static void (*constructor_calls)(void);

/* Called by constructor.c, while the loader's lock is held. */
void in_constructor(void);
void in_constructor(void)
{
    constructor_calls();
}

static atomic_bool is_in_constructor;

/* Another thread's first request waits for the lock meanwhile. */
static void request_late(void)
{
    atomic_store(&is_in_constructor, true);
    usleep(200000);
    OK(cu.set_current(context));
    OK(cu.free_async(served(1000, stream), stream));
}

static void *open_constructor(void *data)
{
    (void)data;
    EXPECT(dlopen("libvpmm_constructor.so", RTLD_NOW));
    return NULL;
}

static void case_constructor(void)
{
    pthread_t thread;
    constructor_calls = request_late;
    EXPECT(pthread_create(&thread, NULL, open_constructor, NULL) == 0);
    while (!atomic_load(&is_in_constructor))
        usleep(1000);
    OK(cu.free_async(served(1000, stream), stream));
    pthread_join(thread, NULL);
}

static void *request_once(void *unused)
{
    (void)unused;
    OK(cu.set_current(context));
    OK(cu.free_async(served(1000, stream), stream));
    return NULL;
}

static void request_by_a_thread(void)
{
    pthread_t thread;
    EXPECT(pthread_create(&thread, NULL, request_once, NULL) == 0);
    pthread_join(thread, NULL);
}

/* The first request is made by a thread for which a constructor waits, and with it the loader. */
static void case_constructor_thread(void)
{
#ifdef LINKED
    request_by_a_thread(); /* nobody has asked for the entries before */
#endif
    constructor_calls = request_by_a_thread;
    open_constructor(NULL);
}

static pthread_barrier_t together;
static atomic_int refusals;

static void *ask_together(void *unused)
{
    CUdeviceptr memory;
    (void)unused;
    OK(cu.set_current(context));
    pthread_barrier_wait(&together);
    CUresult result = cu.alloc(&memory, 20 << 20);
    pthread_barrier_wait(&together);
    if (result == CUDA_SUCCESS)
        OK(cu.free(memory));
    else
        atomic_fetch_add(&refusals, 1);
    return NULL;
}

/* Two requests for what vpmm keeps: one of them finds that the other one's trim has left nothing to its own. */
static void case_race_for_memory(void)
{
    pthread_t threads[2];
    pthread_barrier_init(&together, NULL, 2);
    for (int i = 0; i < 100; i++) {
        OK(cu.free_async(served(56 << 20, stream), stream)); /* of 64 MiB */
        OK(cu.stream_wait(stream));
        for (int k = 0; k < 2; k++)
            EXPECT(pthread_create(&threads[k], NULL, ask_together, NULL) == 0);
        for (int k = 0; k < 2; k++)
            pthread_join(threads[k], NULL);
    }
    EXPECT(atomic_load(&refusals) == 0);
}

/* ---- work that waits for this process ---- */

static CUcontext second_context;
static CUstream second_stream, idle_stream;
static CUdeviceptr on_second;

static void open_second(void)
{
    OK(cu.retain(&second_context, 1));
    OK(cu.set_current(second_context));
    OK(cu.stream_create(&second_stream, CU_STREAM_NON_BLOCKING));
    OK(cu.stream_create(&idle_stream, CU_STREAM_NON_BLOCKING));
    on_second = served(1000, second_stream);
    OK(cu.launch(second_stream, wait_on_host, NULL));
}

static void close_second(void)
{
    OK(cu.set_current(second_context));
    OK(cu.stream_wait(second_stream));
    OK(cu.stream_destroy(second_stream));
    OK(cu.stream_destroy(idle_stream));
}

/* What the driver's pool keeps the program can have, though vpmm cannot. */
static void case_kept(void)
{
    enum { BYTES = 40 << 20 };
    cuuint64_t all = UINT64_MAX;
    CUmemoryPool standard;
    CUdeviceptr memory;
    OK(cu.free_async(served(1000, stream), stream));
    OK(cu.default_pool(&standard, 0));
    OK(cu.pool_set(standard, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &all));
    CUstream there;
    memory = theirs_of_standard(BYTES, &there);
    OK(cu.free_async(memory, there));
    OK(cu.stream_wait(there));
    OK(cu.stream_destroy(there));
    OK(cu.alloc_async(&memory, BYTES, stream));
    OK(cu.fill(memory, 1, BYTES, stream));
    OK(cu.free_async(memory, stream));
}

/* A request for one device waits for no other's work. */
static void case_other_device(void)
{
    CUdeviceptr memory;
    CUmemoryPool pool;
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                            .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
    OK(cu.free_async(served(1000, stream), stream));
    OK(cu.pool_create(&pool, &props));
    open_second();
    OK(cu.free_async(on_second, second_stream));
    OK(cu.set_current(context));
    alarm(ALARM_S);
    EXPECT(cu.alloc(&memory, (size_t)1 << 40) == CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT(cu.alloc_pool(&memory, (size_t)1 << 40, pool, stream) == CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT(!atomic_load(&goes_on));
    atomic_store(&goes_on, true);
    close_second();
    OK(cu.set_current(context));
}

static void *free_on_second(void *unused)
{
    (void)unused;
    OK(cu.set_current(second_context));
    OK(cu.free(on_second));
    return NULL;
}

static void *reset_first(void *unused)
{
    (void)unused;
    OK(cu.set_current(context));
    OK(cu.reset(0));
    return NULL;
}

/* A free that waits for the work of one device, beside a reset of another, and a request that lets the work go on. */
static void case_reset_beside(void)
{
    pthread_t freeing, resetting;
    OK(cu.free_async(served(1000, stream), stream));
    OK(cu.stream_destroy(stream));
    open_second();
    EXPECT(pthread_create(&freeing, NULL, free_on_second, NULL) == 0);
    usleep(100000);
    EXPECT(pthread_create(&resetting, NULL, reset_first, NULL) == 0);
    usleep(100000);
    CUdeviceptr memory = served(1000, idle_stream);
    atomic_store(&goes_on, true);
    pthread_join(freeing, NULL);
    pthread_join(resetting, NULL);
    OK(cu.free_async(memory, idle_stream));
    OK(cu.stream_wait(idle_stream));
    close_second();
    OK(cu.retain(&context, 0));
    OK(cu.set_current(context));
    OK(cu.stream_create(&stream, CU_STREAM_DEFAULT));
}

/* Also where VPMM_STREAMS says that it does not happen: a stream ends in a capture, and another one has its handle. */
static void case_destroyed_in_capture(void)
{
    CUstream brief, next;
    OK(cu.stream_create(&brief, CU_STREAM_NON_BLOCKING));
    CUdeviceptr memory = served(3 << 20, brief);
    OK(cu.launch(brief, wait_on_host, NULL));
    OK(cu.fill(memory, 1, 3 << 20, brief));
    OK(cu.free_async(memory, brief));
    OK(cu.capture(brief, CU_STREAM_CAPTURE_MODE_RELAXED));
    cu.stream_destroy(brief);
    OK(cu.stream_create(&next, CU_STREAM_NON_BLOCKING));
    EXPECT(next == brief);
    CUdeviceptr other = served(3 << 20, next);
    OK(cu.fill(other, 2, 3 << 20, next));
    OK(cu.stream_wait(next));
    atomic_store(&goes_on, true);
    OK(cu.free_async(other, next));
    OK(cu.stream_destroy(next));
}

/*
 * The same where frees find the caches of the stream that is gone: to make room there an event of what it has freed
 * would be recorded on the later stream, which has its handle, and passes at once.
 */
static void case_destroyed_and_followed(void)
{
    enum { BRIEFLY = 4, BLOCKS = 16, BYTES = 2 << 20 };
    CUstream brief, next, third;
    CUdeviceptr memory[BRIEFLY], others[BLOCKS], again[BLOCKS];
    OK(cu.stream_create(&third, CU_STREAM_NON_BLOCKING));
    OK(cu.stream_create(&brief, CU_STREAM_NON_BLOCKING));
    for (int i = 0; i < BLOCKS; i++)
        others[i] = served(BYTES, stream);
    OK(cu.stream_wait(stream));
    for (int i = 0; i < BRIEFLY; i++)
        memory[i] = served(BYTES, brief);
    OK(cu.launch(brief, wait_on_host, NULL));
    for (int i = 0; i < BRIEFLY; i++) {
        OK(cu.fill(memory[i], 1, BYTES, brief));
        OK(cu.free_async(memory[i], brief));
    }
    OK(cu.capture(brief, CU_STREAM_CAPTURE_MODE_RELAXED));
    cu.stream_destroy(brief);
    OK(cu.stream_create(&next, CU_STREAM_NON_BLOCKING));
    EXPECT(next == brief);
    for (int i = 0; i < BLOCKS; i++)
        OK(cu.free_async(others[i], next));
    OK(cu.stream_wait(next));
    usleep(100000); /* the pool's thread looks for what has passed */
    for (int i = 0; i < BLOCKS; i++) {
        again[i] = served(BYTES, third);
        OK(cu.fill(again[i], 2, BYTES, third));
    }
    OK(cu.stream_wait(third));
    atomic_store(&goes_on, true);
    for (int i = 0; i < BLOCKS; i++) {
        EXPECT(holds(again[i], BYTES, 2, third));
        OK(cu.free_async(again[i], third));
    }
    OK(cu.stream_destroy(next));
    OK(cu.stream_destroy(third));
}

/* As a program does it that does not know how often the context was retained. */
static void case_released_wholly(void)
{
    for (int round = 0; round < 3; round++) {
        CUdeviceptr memory = served(3 << 20, stream);
        int releases = 0;
        CUcontext refused;
        fake.fail("cuDevicePrimaryCtxRetain", 1, CUDA_ERROR_OUT_OF_MEMORY); /* which retains nothing */
        EXPECT(cu.retain(&refused, 0) == CUDA_ERROR_OUT_OF_MEMORY);
        fake.fail("cuDevicePrimaryCtxRetain", 0, CUDA_SUCCESS);
        OK(cu.fill(memory, 1, 3 << 20, stream));
        OK(cu.stream_wait(stream));
        OK(cu.free_async(memory, stream));
        OK(cu.stream_destroy(stream));
        while (cu.release(0) == CUDA_SUCCESS)
            releases++;
        EXPECT(releases == 1);
        OK(cu.retain(&context, 0));
        OK(cu.set_current(context));
        OK(cu.stream_create(&stream, CU_STREAM_DEFAULT));
    }
}

/* Releases of what was retained before a reset are not the pool's either. */
static void case_released_after_reset(void)
{
    int releases = 0;
    OK(cu.free_async(served(3 << 20, stream), stream));
    OK(cu.stream_destroy(stream));
    OK(cu.reset(0));
    for (int round = 0; round < 2; round++) {
        OK(cu.retain(&context, 0));
        OK(cu.set_current(context));
        OK(cu.stream_create(&stream, CU_STREAM_DEFAULT));
        CUdeviceptr memory = served(3 << 20, stream);
        OK(cu.fill(memory, 1, 3 << 20, stream));
        OK(cu.stream_wait(stream));
        OK(cu.free_async(memory, stream));
        if (round)
            break;
        OK(cu.stream_destroy(stream));
        while (cu.release(0) == CUDA_SUCCESS)
            releases++;
        EXPECT(releases == 2);
    }
}

/* A device's pool is made beside a capture, which goes on, as it does beside frees that wait for work. */
static void case_first_beside_capture(void)
{
    CUgraph graph = NULL;
    CUstream captured;
    CUdeviceptr memory;
    OK(cu.stream_create(&captured, CU_STREAM_NON_BLOCKING));
    OK(cu.capture(captured, CU_STREAM_CAPTURE_MODE_GLOBAL));
    CUdeviceptr own = served(3 << 20, stream);
    OK(cu.capture_end(captured, &graph));
    OK(cu.graph_destroy(graph));
    OK(cu.alloc(&memory, 3000)); /* at once: so that the next one finds a pool with memory */
    OK(cu.free(memory));
    OK(cu.capture(captured, CU_STREAM_CAPTURE_MODE_GLOBAL));
    OK(cu.alloc(&memory, 3000));
    OK(cu.free(own));
    OK(cu.free(memory));
    OK(cu.capture_end(captured, &graph));
    OK(cu.graph_destroy(graph));
    OK(cu.stream_destroy(captured));
}

/* A context of the program's own, on a device whose primary one is not active: it is not made so. */
static void case_inactive(void)
{
    CUcontext own;
    CUstream there;
    CUdeviceptr memory;
    OK(cu.stream_destroy(stream));
    OK(cu.release(0));
    OK(cu.context_create(&own, 0, 0)); /* and current */
    OK(cu.stream_create(&there, CU_STREAM_NON_BLOCKING));
    uint64_t retains = fake.calls("cuDevicePrimaryCtxRetain");
    OK(left(&memory, 1000, there));
    EXPECT(fake.calls("cuDevicePrimaryCtxRetain") == retains);
    OK(cu.free_async(memory, there));
    OK(cu.stream_destroy(there));
    OK(cu.retain(&context, 0));
    OK(cu.set_current(context));
    OK(cu.stream_create(&stream, CU_STREAM_DEFAULT));
}

static uint64_t reserved_by_both(void)
{
    uint64_t reserved = 0;
    CUmemoryPool standard;
    OK(cu.default_pool(&standard, 0));
    OK(cu.pool_get(standard, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved));
    return reserved;
}

/* cuMemCreate finds no memory: of this device, what vpmm keeps goes; of the host, nothing. */
static void case_created(void)
{
    enum { HOST = 2 }; /* CU_MEM_LOCATION_TYPE_HOST, which CUDA 11.8 does not name */
    CUmemGenericAllocationHandle handle;
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = (CUmemLocationType)HOST}};
    OK(cu.free_async(served(32 << 20, stream), stream));
    OK(cu.stream_wait(stream));
    for (int of_device = 0; of_device < 2; of_device++) {
        fake.fail("cuMemCreate", 1, CUDA_ERROR_OUT_OF_MEMORY);
        EXPECT(cu.create(&handle, 2 << 20, &prop, 0) == CUDA_ERROR_OUT_OF_MEMORY);
        fake.fail("cuMemCreate", 0, CUDA_SUCCESS);
        EXPECT((reserved_by_both() >= 32 << 20) == !of_device);
        prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    }
}

/* Of a threshold that the program has not set the environment's stays. */
static void case_given_threshold(void)
{
    OK(cu.free_async(served(32 << 20, stream), stream));
    OK(cu.stream_wait(stream));
    usleep(300000); /* VPMM_DECAY_MS is 50 */
    EXPECT(reserved_by_both() >= 32 << 20);
}

/* What cudaFree has waited for is every stream's, also where nobody touches another's stream. */
static void case_freed_for_all(void)
{
    CUdeviceptr own = served(8 << 20, stream);
    OK(cu.free(own));
    uint64_t created = fake.calls("cuMemCreate");
    CUdeviceptr again = served(8 << 20, stream);
    EXPECT(fake.calls("cuMemCreate") == created);
    OK(cu.free_async(again, stream));
}

/* What the driver would not take back is reserved. */
static void case_unreleased_memory(void)
{
    CUmemoryPool standard;
    OK(cu.default_pool(&standard, 0));
    OK(cu.free_async(served(32 << 20, stream), stream));
    OK(cu.stream_wait(stream));
    fake.fail("cuMemRelease", 1, CUDA_ERROR_UNKNOWN);
    OK(cu.pool_trim(standard, 0));
    EXPECT(reserved_by_both() >= 32 << 20);
    fake.fail("cuMemRelease", 0, CUDA_SUCCESS);
}

/* Peer access is for memory at once: requests in stream order are vpmm's as before. */
static void case_peers(void)
{
    CUdeviceptr memory;
    OK(cu.alloc(&memory, 3000));
    EXPECT(fake.calls("cuMemCreate") > 0); /* vpmm's */
    OK(cu.free(memory));
    OK(cu.enable_peer(context, 0));
    uint64_t plain = fake.calls("cuMemAlloc");
    OK(cu.alloc(&memory, 3000));
    EXPECT(fake.calls("cuMemAlloc") == plain + 1); /* the driver's */
    OK(cu.free(memory));
    OK(cu.free_async(served(1000, stream), stream));
}

/* What another device's stream lacks that device gives back, whichever is current. */
static void case_stream_of_another(void)
{
    CUmemoryPool pool;
    CUdeviceptr memory;
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                            .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 1}};
    size_t before, free, total;
    OK(cu.free_async(served(1000, stream), stream));
    OK(cu.retain(&second_context, 1));
    OK(cu.set_current(second_context));
    OK(cu.stream_create(&second_stream, CU_STREAM_NON_BLOCKING));
    OK(cu.alloc(&memory, 40 << 20));
    OK(cu.info(&before, &total));
    OK(cu.set_current(context));
    OK(cu.free_async(served(16 << 20, stream), stream));
    OK(cu.set_current(second_context));
    OK(cu.info(&free, &total));
    EXPECT(free == before); /* of its own device */
    OK(cu.free(memory));
    OK(cu.free_async(served(40 << 20, second_stream), second_stream));
    OK(cu.stream_wait(second_stream));
    OK(cu.pool_create(&pool, &props));
    OK(cu.device_pool(1, pool));
    OK(cu.set_current(context));
    OK(cu.alloc_async(&memory, 40 << 20, second_stream)); /* of 64 MiB, of which vpmm keeps 40 */
    OK(cu.free_async(memory, second_stream));
    memory = served(1000, stream);
    OK(cu.launch(stream, wait_on_host, NULL));
    OK(cu.free_async(memory, stream));
    alarm(ALARM_S);
    EXPECT(cu.alloc_async(&memory, (size_t)1 << 40, second_stream) !=
           CUDA_SUCCESS); /* the other device is left alone */
    EXPECT(!atomic_load(&goes_on));
    atomic_store(&goes_on, true);
    OK(cu.set_current(second_context));
    OK(cu.stream_wait(second_stream));
    OK(cu.stream_destroy(second_stream));
    OK(cu.set_current(context));
}

/* A device without a pool of vpmm's, since its default pool is another one, finds no memory: no other gives its own. */
static void case_stream_of_unserved(void)
{
    CUmemoryPool pool, standard;
    CUdeviceptr memory;
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                            .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 1}};
    uint64_t before = 0, after = 0;
    OK(cu.free_async(served(1000, stream), stream));
    OK(cu.stream_wait(stream));
    OK(cu.default_pool(&standard, 0));
    OK(cu.pool_get(standard, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &before));
    OK(cu.pool_create(&pool, &props));
    OK(cu.device_pool(1, pool));
    OK(cu.retain(&second_context, 1));
    OK(cu.set_current(second_context));
    OK(cu.stream_create(&second_stream, CU_STREAM_NON_BLOCKING));
    OK(cu.set_current(context));
    EXPECT(cu.alloc_async(&memory, (size_t)1 << 40, second_stream) == CUDA_ERROR_OUT_OF_MEMORY);
    OK(cu.pool_get(standard, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &after));
    EXPECT(before > 0 && after == before);
    OK(cu.stream_destroy(second_stream));
}

static void case_memory(void)
{
    enum { MOST = 64 };
    CUdeviceptr memory[MOST], plain;
    int count = 0;
    CUresult result = CUDA_SUCCESS;
    while (count < MOST && result == CUDA_SUCCESS) { /* of 64 MiB */
        result = cu.alloc_async(&memory[count], 6 << 20, stream);
        count += result == CUDA_SUCCESS;
    }
    EXPECT(result == CUDA_ERROR_OUT_OF_MEMORY && count >= 8 && count <= 10);
    for (int i = 0; i < count; i++)
        OK(cu.free_async(memory[i], stream));
    OK(cu.stream_wait(stream));
    OK(cu.alloc(&plain, 50 << 20)); /* vpmm gives back what it keeps */
    OK(cu.free(plain));
    OK(cu.free_async(served(40 << 20, stream), stream));
    OK(cu.stream_wait(stream));
    OK(cu.alloc_pool(&plain, 40 << 20, own_pool(), stream));
    OK(cu.free_async(plain, stream));
}

/* A trim keeps of both pools together what it is told to. */
static void case_trimmed(void)
{
    CUmemoryPool standard;
    CUdeviceptr theirs;
    uint64_t reserved = 0;
    OK(cu.default_pool(&standard, 0));
    OK(cu.free_async(served(64 << 20, stream), stream));
    CUstream there;
    theirs = theirs_of_standard(16 << 20, &there);
    OK(cu.stream_wait(stream));
    OK(cu.pool_trim(standard, 48 << 20)); /* the driver has 32 of it */
    OK(cu.pool_get(standard, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved));
    EXPECT(reserved == 48 << 20);
    OK(cu.free_async(theirs, there));
    OK(cu.stream_destroy(there));
}

/* cudaFree waits for the context's work, and leaves captures as they are: also where the device has not a byte left. */
static void case_full(void)
{
    enum { MOST = 64 };
    CUdeviceptr kept = served(4 << 20, stream), memory[MOST];
    CUgraph graph = NULL;
    CUstream captured;
    OK(cu.stream_create(&captured, CU_STREAM_NON_BLOCKING));
    for (int freed = 0; freed < 2; freed++) { /* then vpmm has it all */
        int count = 0;
        while (count < MOST && cu.alloc_async(&memory[count], 2 << 20, stream) == CUDA_SUCCESS)
            count++;
        for (int i = 0; i < count && freed; i++)
            OK(cu.free_async(memory[i], stream));
        OK(cu.stream_wait(stream));
        OK(cu.capture(captured, CU_STREAM_CAPTURE_MODE_RELAXED));
        if (!freed)
            fake.fail_once("cuMemAlloc", 2, CUDA_ERROR_OUT_OF_MEMORY); /* others have the byte that was waited by */
        OK(cu.free(kept));
        OK(cu.capture_end(captured, &graph));
        EXPECT(graph);
        for (int i = 0; i < count && !freed; i++)
            OK(cu.free_async(memory[i], stream));
        kept = freed ? 0 : served(4 << 20, stream);
    }
    OK(cu.stream_destroy(captured));
}

/* Where vpmm cannot serve for another reason, the driver does. */
static void case_refused(void)
{
    CUdeviceptr memory;
    OK(left(&memory, 1000, stream));
    OK(cu.free_async(memory, stream));
    OK(left(&memory, 1000, stream));
    OK(cu.free_async(memory, stream));
}

static void case_failing(void)
{
    CUdeviceptr memory, own = served(1000, stream);
    fake.fail("cuMemMap", 1, CUDA_ERROR_UNKNOWN);
    OK(left(&memory, 32 << 20, stream));
    OK(cu.free_async(memory, stream));
    fake.fail("cuMemMap", 0, CUDA_SUCCESS);
    OK(cu.free_async(served(32 << 20, stream), stream));
    CUstream fresh;
    OK(cu.stream_create(&fresh, CU_STREAM_NON_BLOCKING));
    fake.fail("cuStreamGetId", 1, CUDA_ERROR_UNKNOWN);
    EXPECT(cu.free_async(own, fresh) == CUDA_ERROR_UNKNOWN);
    fake.fail("cuStreamGetId", 0, CUDA_SUCCESS);
    EXPECT(is_range(own, own, 1000)); /* it is live as it was */
    OK(cu.free_async(own, stream));
    OK(cu.stream_destroy(fresh));
}

/* A device that has no memory for vpmm's first stream is asked again. */
static void case_short(void)
{
    CUdeviceptr memory;
    fake.fail("cuStreamCreate", 1, CUDA_ERROR_OUT_OF_MEMORY);
    OK(left(&memory, 1000, stream));
    OK(cu.free_async(memory, stream));
    fake.fail("cuStreamCreate", 0, CUDA_SUCCESS);
    OK(cu.free_async(served(1000, stream), stream));
}

static void case_reset(void)
{
    for (int round = 0; round < 3; round++) {
        CUdeviceptr live = served(3 << 20, stream), freed = served(1 << 20, stream);
        OK(cu.fill(live, 1, 3 << 20, stream));
        OK(cu.free_async(freed, stream));
        OK(cu.stream_destroy(stream));
        OK(cu.free_async(served(1 << 20, NULL),
                         NULL)); /* it is waited for by cuMemFree, by which a byte is freed, too */
        fake.fail_once(round ? "cuMemFree" : "cuStreamGetId", 1 + (uint64_t)round, CUDA_ERROR_UNKNOWN);
        OK(cu.reset(0));
        EXPECT(!is_range(live, live, 3 << 20));
        OK(cu.retain(&context, 0));
        OK(cu.set_current(context));
        OK(cu.stream_create(&stream, CU_STREAM_DEFAULT));
        EXPECT(cu.free_async(live, stream) != CUDA_SUCCESS);
    }
    size_t free, total;
    OK(cu.reset(0));
    for (int round = 0; round < 4; round++)
        OK(cu.release(0)); /* what it has retained, which a reset does not count */
    EXPECT(cu.release(0) != CUDA_SUCCESS);
    OK(cu.retain(&context, 0));
    OK(cu.set_current(context));
    OK(cu.info(&free, &total));
    EXPECT(free == total); /* nothing is left of the pools */
    OK(cu.stream_create(&stream, CU_STREAM_DEFAULT));
}

static void case_streams(void)
{
    for (int i = 0; i < 200; i++) {
        CUstream brief;
        OK(cu.stream_create(&brief, i & 1 ? CU_STREAM_NON_BLOCKING : CU_STREAM_DEFAULT));
        CUdeviceptr memory = served(i % 3 ? 1000 : 3 << 20, brief);
        OK(cu.fill(memory, 1, 1000, brief));
        OK(cu.free_async(memory, brief));
        OK(i & 2 ? cu.stream_destroy(brief) : cu.stream_destroy_v1(brief));
    }
    OK(cu.free_async(served(3 << 20, stream), stream));
    uint64_t reserved = 0;
    CUmemoryPool standard;
    OK(cu.default_pool(&standard, 0));
    OK(cu.pool_get(standard, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved));
    EXPECT(reserved <= 64 << 20); /* each had what the ones before it had freed */
}

/* Stream 0 of an entry for per-thread default streams is no stream that waits for the legacy one's captures. */
static void case_default_stream(void)
{
    CUgraph graph;
    CUdeviceptr memory;
    OK(cu.free_async(served(1000, NULL), NULL));
    OK(cu.capture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    if (strcmp(way, "threads") == 0) {
        OK(cu.free_async(served(1000, NULL), NULL));
        OK(cu.capture_end(stream, &graph));
        OK(cu.graph_destroy(graph));
    } else {
        EXPECT(cu.alloc_async(&memory, 1000, NULL) == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
        cu.capture_end(stream, &graph);
    }
}

enum { THREADS = 8, ROUNDS = 400 };

static void *work(void *data)
{
    unsigned seed = (unsigned)(uintptr_t)data + 1;
    CUdeviceptr live[16] = {0};
    size_t length[16] = {0};
    CUstream own;
    OK(cu.set_current(context));
    OK(cu.stream_create(&own, CU_STREAM_NON_BLOCKING));
    for (int i = 0; i < ROUNDS; i++) {
        int k = rand_r(&seed) % 16;
        if (live[k]) {
            EXPECT(is_range(live[k] + length[k] / 2, live[k], length[k]));
            if (rand_r(&seed) % 32)
                OK(cu.free_async(live[k], own));
            else {
                OK(cu.stream_wait(own));
                OK(cu.free(live[k]));
            }
        }
        length[k] = rand_r(&seed) % 8 ? rand_r(&seed) % 5000 + 1 : rand_r(&seed) % (6 << 20) + 1;
        OK(cu.alloc_async(&live[k], length[k], own));
        OK(cu.fill(live[k], (unsigned char)k, length[k] < 4096 ? length[k] : 4096, own));
    }
    for (int k = 0; k < 16; k++)
        if (live[k]) {
            EXPECT(holds(live[k], length[k] < 4096 ? length[k] : 4096, (unsigned char)k, own));
            OK(cu.free_async(live[k], own));
        }
    OK(cu.stream_destroy(own));
    return NULL;
}

static void case_threads(void)
{
    pthread_t threads[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++)
        EXPECT(pthread_create(&threads[i], NULL, work, (void *)i) == 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    EXPECT(fake.calls("cuMemAllocAsync") == 0 && fake.calls("cuMemFreeAsync") == 0);
}

/* With VPMM_PRELOAD_SYNC, on streams that stand still. */
static void case_at_once(void)
{
    CUdeviceptr memory, own, plain;
    CUmemoryPool pool = (CUmemoryPool)1, standard;
    CUcontext of = NULL;
    OK(cu.default_pool(&standard, 0));
    OK(cu.alloc(&memory, 3000));
    usleep(30000); /* after which vpmm marks what it has on its own stream */
    OK(cu.alloc(&plain, 3000));
    EXPECT(is_range(memory + 2999, memory, 3000) && memory % 512 == 0);
    uint64_t used = 1;
    OK(cu.pool_get(standard, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used));
    EXPECT(used == 0); /* it is not the pool's, as the program sees it */
    OK(cu.attribute(&pool, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, memory));
    OK(cu.attribute(&of, CU_POINTER_ATTRIBUTE_CONTEXT, memory));
    EXPECT(!pool && of == context);
    OK(cu.free_async(served(3000, stream), stream)); /* lies in a cache */
    OK(cu.fill(memory, 1, 3000, stream));
    EXPECT(fake.pending(stream) == 1);
    OK(cu.pool_trim(standard, SIZE_MAX)); /* nothing is to go */
    EXPECT(fake.pending(stream) == 1);
    OK(cu.free(memory)); /* waits for the stream */
    EXPECT(fake.pending(stream) == 0);
    own = served(3000, stream);
    OK(cu.fill(own, 1, 3000, stream));
    OK(cu.free(own));
    EXPECT(fake.pending(stream) == 0);
    OK(cu.free_async(plain, stream));
    OK(cu.alloc(&memory, 64 << 20));
    OK(cu.free_async(memory, stream));
    EXPECT(fake.calls("cuMemFreeAsync") == 0);
    own = served(64 << 20, stream);
    OK(cu.fill(own, 1, 64 << 20, stream));
    OK(cu.free_async(own, stream));
    uint64_t pending = fake.pending(stream);
    OK(cu.alloc(&memory, 64 << 20)); /* waits for no stream's work */
    EXPECT(pending && fake.pending(stream) >= pending);
    OK(cu.free(memory));
    OK(cu.alloc(&memory, 3000));
    fake.fail("cuMemFree", 1, CUDA_ERROR_UNKNOWN);
    EXPECT(cu.free(memory) == CUDA_ERROR_UNKNOWN);
    fake.fail("cuMemFree", 0, CUDA_SUCCESS);
    EXPECT(is_range(memory, memory, 3000)); /* it is live as it was */
    OK(cu.free(memory));
    own = served(3000, stream);
    OK(cu.pool_get(standard, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used));
    EXPECT(used == 3000); /* what was left to the driver is not subtracted */
    OK(cu.free_async(own, stream));
    EXPECT(cu.alloc(&memory, 0) == CUDA_ERROR_INVALID_VALUE);
    OK(cu.alloc(&memory, 3000));
    OK(cu.stream_destroy(stream));
    OK(cu.reset(0)); /* ends it, and what was counted of it */
    OK(cu.retain(&context, 0));
    OK(cu.set_current(context));
    OK(cu.stream_create(&stream, CU_STREAM_DEFAULT));
    OK(cu.default_pool(&standard, 0));
    own = served(1000, stream);
    OK(cu.pool_get(standard, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used));
    EXPECT(used == 1000);
    OK(cu.free_async(own, stream));
}

/*
 * Memory that another stream still uses is handed out behind a wait, and freed by cuMemFree unused: the work that it
 * was not handed to may not be overtaken.
 */
static void case_unused(void)
{
    CUstream other, third;
    OK(cu.stream_create(&other, CU_STREAM_NON_BLOCKING));
    OK(cu.stream_create(&third, CU_STREAM_NON_BLOCKING));
    for (int i = 0; i < 4; i++) { /* of 64 MiB, so that the same is wanted each time */
        CUdeviceptr memory = served(40 << 20, stream);
        OK(cu.fill(memory, 1, 40 << 20, stream));
        OK(cu.free_async(memory, stream));
        OK(cu.free(served(40 << 20, other)));
        memory = served(40 << 20, third);
        OK(cu.fill(memory, 2, 40 << 20, third));
        EXPECT(holds(memory, 40 << 20, 2, third));
        OK(cu.free_async(memory, third));
        OK(cu.stream_wait(third));
    }
    OK(cu.stream_destroy(other));
    OK(cu.stream_destroy(third));
}

static void case_fork(void)
{
    int status;
    CUdeviceptr own = served(1000, stream);
    pid_t child = fork();
    if (child == 0) {
        CUdeviceptr memory;
        alarm(ALARM_S);
        cu.alloc_async(&memory, 1000, stream); /* whatever it answers */
        cu.reset(0);
        _exit(0);
    }
    EXPECT(waitpid(child, &status, 0) == child);
    if (status != 0)
        fprintf(stderr, "the child ended with %#x\n", (unsigned)status);
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    OK(cu.free_async(own, stream));
    OK(cu.free_async(served(4 << 20, stream), stream));
}

static void *ask_for_more(void *on)
{
    EXPECT(records_on_others(on));
    return NULL;
}

/* While another thread records on a stream that its request is not for. In the child it does not. */
static void case_fork_beside(void)
{
    int status;
    CUstream other;
    pthread_t thread;
    OK(cu.stream_create(&other, CU_STREAM_NON_BLOCKING));
    OK(cu.free_async(served(3 << 20, stream), stream));
    fake.hold("cuEventRecord");
    EXPECT(pthread_create(&thread, NULL, ask_for_more, other) == 0);
    while (!fake.holds())
        usleep(1000);
    pid_t child = fork();
    if (child == 0) {
        alarm(ALARM_S);
        cu.capture(other, CU_STREAM_CAPTURE_MODE_RELAXED); /* whatever it answers */
        _exit(0);
    }
    EXPECT(waitpid(child, &status, 0) == child);
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    fake.hold(NULL);
    EXPECT(pthread_join(thread, NULL) == 0);
    OK(cu.stream_destroy(other));
}

static void *ask_first(void *memory)
{
    OK(cu.set_current(context));
    *(CUdeviceptr *)memory = served(1000, stream);
    return NULL;
}

/* Another thread asks for memory for the first time, and waits in this call. */
static pthread_t begin_to_serve(const char *call, CUdeviceptr *memory)
{
    pthread_t thread;
    fake.hold(call);
    EXPECT(pthread_create(&thread, NULL, ask_first, memory) == 0);
    while (!fake.holds())
        usleep(1000);
    return thread;
}

/* While another thread makes the pool: the child's own request is answered, whatever it is. */
static void case_fork_beside_first(void)
{
    int status;
    CUdeviceptr memory;
    pthread_t thread = begin_to_serve("cuStreamCreate", &memory);
    pid_t child = fork();
    if (child == 0) {
        fake.hold(NULL);
        alarm(ALARM_S);
        cu.alloc_async(&memory, 1000, stream);
        _exit(0);
    }
    EXPECT(waitpid(child, &status, 0) == child && status == 0);
    fake.hold(NULL);
    EXPECT(pthread_join(thread, NULL) == 0);
    OK(cu.free_async(memory, stream));
}

/* What is said of the default pool while another thread makes ours is said to ours. */
static void case_threshold_beside_first(void)
{
    CUmemoryPool pool;
    CUdeviceptr memory;
    uint64_t keep = UINT64_C(1) << 30, nothing = 0, reserved = 1;
    OK(cu.default_pool(&pool, 0));
    OK(cu.pool_set(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep));
    pthread_t thread = begin_to_serve("cuMemPoolGetAttribute", &memory);
    OK(cu.pool_set(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &nothing));
    fake.hold(NULL);
    EXPECT(pthread_join(thread, NULL) == 0);
    OK(cu.free_async(memory, stream));
    OK(cu.stream_wait(stream));
    for (int tries = 0; tries < 600 && reserved; tries++) {
        usleep(50000);
        OK(cu.pool_get(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved));
    }
    EXPECT(!reserved);
}

/* A reset waits for the pool that another thread makes, and ends it. */
static void *reset_when_asked(void *is_over)
{
    OK(cu.set_current(context));
    OK(cu.reset(0));
    atomic_store((atomic_bool *)is_over, true);
    return NULL;
}

static void case_reset_beside_first(void)
{
    atomic_bool is_over = false;
    pthread_t resetting, thread;
    CUdeviceptr memory;
    OK(cu.stream_destroy(stream));
    stream = NULL;
    thread = begin_to_serve("cuStreamCreate", &memory);
    EXPECT(pthread_create(&resetting, NULL, reset_when_asked, &is_over) == 0);
    usleep(200000);
    EXPECT(!atomic_load(&is_over));
    fake.hold(NULL);
    EXPECT(pthread_join(thread, NULL) == 0 && pthread_join(resetting, NULL) == 0);
    OK(cu.retain(&context, 0));
    OK(cu.set_current(context));
    memory = served(1000, NULL);
    OK(cu.free_async(memory, NULL));
    OK(cu.stream_create(&stream, CU_STREAM_DEFAULT));
}

/* ---- a reset beside a free that waits for work which goes on only after it ---- */

static void *free_at_once(void *memory)
{
    OK(cu.set_current(context));
    OK(cu.free(*(CUdeviceptr *)memory));
    return NULL;
}

static pthread_t wait_in_free(CUhostFn work, CUdeviceptr *memory)
{
    pthread_t thread;
    *memory = served(1000, stream);
    OK(cu.launch(stream, work, NULL));
    EXPECT(pthread_create(&thread, NULL, free_at_once, memory) == 0);
    usleep(300000);
    return thread;
}

/* Of a device without a pool of vpmm's: it waits for no other device's work, as without vpmm. */
static void case_reset_unserved(void)
{
    CUdeviceptr memory;
    CUcontext other;
    OK(cu.retain(&other, 1));
    pthread_t thread = wait_in_free(wait_on_host, &memory);
    alarm(ALARM_S);
    OK(cu.reset(1));
    atomic_store(&goes_on, true);
    EXPECT(pthread_join(thread, NULL) == 0);
}

static void *serve_and_go_on(void *unused)
{
    (void)unused;
    usleep(300000);
    OK(cu.set_current(context));
    OK(cu.free_async(served(1000, stream), stream));
    atomic_store(&goes_on, true);
    return NULL;
}

/* The reset waits for its device's work, which goes on after the first request of another device. */
static void case_reset_unserved_beside_first(void)
{
    pthread_t thread;
    OK(cu.retain(&second_context, 1));
    OK(cu.set_current(second_context));
    OK(cu.stream_create(&second_stream, CU_STREAM_NON_BLOCKING));
    OK(cu.launch(second_stream, wait_on_host, NULL));
    EXPECT(pthread_create(&thread, NULL, serve_and_go_on, NULL) == 0);
    alarm(ALARM_S);
    OK(cu.reset(1));
    EXPECT(pthread_join(thread, NULL) == 0 && atomic_load(&goes_on));
    OK(cu.set_current(context));
}

static void CUDA_CB reset_on_host(void *unused)
{
    wait_on_host(unused);
    cu.reset(0);
}

/* The driver refuses it, and all stays as it is. */
static void case_reset_on_host(void)
{
    CUdeviceptr memory;
    pthread_t thread = wait_in_free(reset_on_host, &memory);
    alarm(ALARM_S);
    atomic_store(&goes_on, true);
    EXPECT(pthread_join(thread, NULL) == 0);
    OK(cu.free_async(served(1000, stream), stream));
}

/* Asks for synchronous memory alone, which vpmm does not serve, and frees none. */
static void case_unserved(void)
{
    CUdeviceptr memory;
    OK(cu.alloc(&memory, 1000));
}

/* A child that ends as programs do. */
static void case_child(void)
{
    int status;
    OK(cu.free_async(served(1000, stream), stream));
    pid_t child = fork();
    if (child == 0)
        exit(0);
    EXPECT(waitpid(child, &status, 0) == child && status == 0);
}

static void *free_on_own_default_stream(void *memory)
{
    OK(cu.set_current(context));
    OK(cu.free_async((CUdeviceptr)(uintptr_t)memory, CU_STREAM_PER_THREAD));
    return NULL;
}

/* What checks.sh finds in the trace: each line that is expected there is named here by its fields. */
static void case_traced(void)
{
    CUstream other;
    CUgraph graph;
    pthread_t thread;
    CUdeviceptr memory, plain, own = served(1000, stream), second; /* a,0,1000,1 */
    OK(cu.stream_create(&other, CU_STREAM_NON_BLOCKING));
    memory = served(3 << 20, other); /* a,1,3145728,2 */
    OK(cu.free_async(own, other));   /* f,0,1000,2 */
    EXPECT(cu.free_async(own, other) != CUDA_SUCCESS);
    OK(cu.capture(other, CU_STREAM_CAPTURE_MODE_RELAXED));
    EXPECT(left(&own, 1000, other) == CUDA_ERROR_NOT_SUPPORTED);
    EXPECT(cu.free_async(memory, other) != CUDA_SUCCESS);
    OK(cu.capture_end(other, &graph));
    OK(cu.graph_destroy(graph));
    OK(cu.free_async(memory, stream));                    /* f,1,3145728,1 */
    OK(cu.alloc_pool(&memory, 5000, own_pool(), stream)); /* a,2,5000,1 */
    OK(cu.free(memory));                                  /* f,2,5000,0 */
    OK(cu.alloc(&plain, 5000));
    OK(cu.free(plain));
    own = served(2 << 20, CU_STREAM_PER_THREAD); /* a,3,2097152,3 */
    second = served(2 << 20, NULL);              /* a,4,2097152,4; 3 in the way `threads` */
    EXPECT(pthread_create(&thread, NULL, free_on_own_default_stream, (void *)(uintptr_t)own) == 0);
    pthread_join(thread, NULL);                         /* f,3,2097152,5; 4 */
    OK(cu.free_async(second, CU_STREAM_LEGACY));        /* f,4,2097152,4; 5 */
    OK(cu.free_async(served(2 << 20, stream), stream)); /* a,5,2097152,1 and f,5,2097152,1 */
    EXPECT(cu.alloc_async(&memory, (size_t)1 << 47, stream) != CUDA_SUCCESS);
    served(700, stream); /* a,6,700,1, to the end */
}

/* Whatever dlsym is asked by, it is the same entry; what the driver does not have stays missing. */
static void case_names(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW), *self = dlopen(NULL, RTLD_NOW);
    void *ours = dlsym(RTLD_DEFAULT, "cuMemAllocAsync"), *other = dlopen("libvpmm_next_last.so", RTLD_NOW);
    EXPECT(ours && dlsym(library, "cuMemAllocAsync") == ours);
    EXPECT(other && dlsym(other, "cuMemAllocAsync") && dlsym(other, "cuMemAllocAsync") != ours); /* another's */
    EXPECT(dlsym(RTLD_NEXT, "cuMemAllocAsync") == ours);
    EXPECT(dlsym(self, "cuMemAllocAsync") == ours);
    EXPECT(dlsym(library, "cuMemAlloc") != dlsym(library, "cuMemAlloc_v2"));
    EXPECT(!dlsym(library, "cuArrayCreate_v2")); /* this driver does not have it */
    EXPECT(dlerror() != NULL);
    EXPECT(dlsym(library, "cuInit") && !dlsym(library, "no_such_entry"));
}

static int threads_of_process(void)
{
    int count = 0;
    DIR *tasks = opendir("/proc/self/task");
    while (tasks && readdir(tasks))
        count++;
    if (tasks)
        closedir(tasks);
    return count - 2;
}

/* Without a driver: nothing is opened, no thread runs, dlsym works. */
static int without_cuda(void)
{
    char line[512];
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps && fgets(line, sizeof line, maps))
        EXPECT(!strstr(line, "libcuda.so"));
    if (maps)
        fclose(maps);
    EXPECT(threads_of_process() == 1);
    EXPECT(dlsym(RTLD_DEFAULT, "getpid") && !dlsym(RTLD_DEFAULT, "cuInit"));
    CUdeviceptr memory;
    CUresult (*alloc_async)(CUdeviceptr *, size_t, CUstream);
    set_function(&alloc_async, dlsym(RTLD_DEFAULT, "cuMemAllocAsync"));
    EXPECT(alloc_async && alloc_async(&memory, 1000, NULL) != CUDA_SUCCESS); /* with a driver, and without one */
    return failures != 0;
}

static const struct {
    const char *name;
    void (*run)(void);
    bool does_wrong; /* on purpose, which the simulated driver counts */
} cases[] = {
    {"serve", case_serve, true},
    {"drivers", case_drivers, true},
    {"capture", case_capture, true},
    {"beside_capture", case_beside_capture, false},
    {"left_behind", case_left_behind, false},
    {"left_alone", case_left_alone, false},
    {"recaptured", case_recaptured, false},
    {"joined", case_joined, true},
    {"unreleased_unasked", case_unreleased_unasked, false},
    {"opened_first", case_opened_first, false},
    {"small_async", case_small_async, false},
    {"unreleased", case_unreleased, false},
    {"pools", case_pools, false},
    {"pool_of_location", case_pool_of_location, false},
    {"shared", case_shared, false},
    {"context", case_context, false},
    {"questions", case_questions, false},
    {"threshold", case_threshold, false},
    {"dependencies", case_dependencies, false},
    {"constructor", case_constructor, false},
    {"constructor_thread", case_constructor_thread, false},
    {"first_beside_capture", case_first_beside_capture, false},
    {"inactive", case_inactive, false},
    {"created", case_created, true},
    {"given_threshold", case_given_threshold, false},
    {"freed_for_all", case_freed_for_all, false},
    {"unreleased_memory", case_unreleased_memory, false},
    {"peers", case_peers, false},
    {"stream_of_another", case_stream_of_another, false},
    {"stream_of_unserved", case_stream_of_unserved, false},
    {"memory", case_memory, false},
    {"full", case_full, false},
    {"trimmed", case_trimmed, false},
    {"race_for_memory", case_race_for_memory, false},
    {"kept", case_kept, false},
    {"other_device", case_other_device, true},
    {"reset_beside", case_reset_beside, true},
    {"destroyed_in_capture", case_destroyed_in_capture, true},
    {"destroyed_and_followed", case_destroyed_and_followed, true},
    {"released_wholly", case_released_wholly, false},
    {"released_after_reset", case_released_after_reset, true},
    {"refused", case_refused, false},
    {"failing", case_failing, false},
    {"short", case_short, false},
    {"reset", case_reset, true},
    {"streams", case_streams, false},
    {"default_stream", case_default_stream, false},
    {"threads", case_threads, false},
    {"at_once", case_at_once, true},
    {"unused", case_unused, false},
    {"fork", case_fork, true},
    {"fork_beside", case_fork_beside, true},
    {"fork_beside_first", case_fork_beside_first, true},
    {"threshold_beside_first", case_threshold_beside_first, true},
    {"reset_beside_first", case_reset_beside_first, true},
    {"reset_unserved", case_reset_unserved, true},
    {"reset_unserved_beside_first", case_reset_unserved_beside_first, true},
    {"reset_on_host", case_reset_on_host, true},
    {"unserved", case_unserved, false},
    {"child", case_child, true},
    {"traced", case_traced, true},
    {"names", case_names, false},
};

int main(int count, char **arguments)
{
    if (count != 3)
        return 2;
    if (strcmp(arguments[2], "without_cuda") == 0)
        return without_cuda();
    way = arguments[1];
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        if (strcmp(cases[i].name, arguments[2]) == 0) {
            begin();
            cases[i].run();
            CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
            OK(cu.exchange(&mode));
            EXPECT(mode == CU_STREAM_CAPTURE_MODE_GLOBAL); /* as the thread had it */
            OK(cu.stream_destroy(stream));
            OK(cu.synchronize());
            EXPECT(fake.races() == 0);
            EXPECT(cases[i].does_wrong || fake.misuses() == 0);
            return failures != 0;
        }
    return 2;
}
