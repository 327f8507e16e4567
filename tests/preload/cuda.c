/*
 * cuda.c - a libcuda.so.1 over the simulated GPU, for programs that know nothing of either.
 *
 * It exports the entries of the simulator's table, those of later ABI versions and for per-thread default streams under
 * their symbols, and cuGetProcAddress. What the simulator does not have and the preload asks for is here in small: what
 * lies at an address, a device's current pool, the end of a primary context. It calls no dlsym.
 *
 *   FAKE_MEMORY    bytes of each device; 1 GiB
 *   FAKE_DEVICES   1
 *   FAKE_STEPPED   1: streams stand still until somebody waits for them. Events on a stream that has nothing else to do
 *                  pass as on a GPU, in a moment: once the stream has been asked
 *
 * The functions fake_... are for the test's program.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <vpmm/sim.h>

enum { DEVICES = 8, PLAIN = 256, STREAMS = 64, POOLS = 64 };

static vpmm_sim *sim;
static vpmm_driver table;             /* the simulator's, but for what is counted here */
static CUmemoryPool current[DEVICES]; /* NULL: the default one */
static int retained[DEVICES];
static struct plain {
    CUdeviceptr at;
    size_t bytes;
} plains[PLAIN]; /* of cuMemAlloc */
static struct noted {
    CUstream stream;
    uint64_t records; /* that the driver has made on it */
    size_t events;    /* queued on it, and nothing before them; of a stream that never has work, as vpmm's own */
} noted[STREAMS];
static struct {
    CUmemoryPool pool;
    int device;
} pools[POOLS]; /* that were made, in order; the last has what is more than these */
static unsigned pool_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static uint64_t setting(const char *name, uint64_t otherwise)
{
    const char *value = getenv(name);
    return value ? strtoull(value, NULL, 10) : otherwise;
}

static _Atomic(const char *) held; /* calls of this name wait: */
static atomic_bool is_held;        /* the first of them, and the others go on */

static void wait_if_held(const char *call)
{
    const char *name = atomic_load(&held);
    if (!name || strcmp(name, call) != 0 || atomic_exchange(&is_held, true))
        return;
    while (atomic_load(&held))
        usleep(100);
}

static CUresult CUDAAPI count_retain(CUcontext *context, CUdevice device)
{
    wait_if_held("cuDevicePrimaryCtxRetain");
    CUresult result = vpmm_sim_driver(sim)->cuDevicePrimaryCtxRetain(context, device);
    pthread_mutex_lock(&lock);
    retained[device] += result == CUDA_SUCCESS;
    pthread_mutex_unlock(&lock);
    return result;
}

static CUresult CUDAAPI count_release(CUdevice device)
{
    CUresult result = vpmm_sim_driver(sim)->cuDevicePrimaryCtxRelease(device);
    pthread_mutex_lock(&lock);
    retained[device] -= result == CUDA_SUCCESS;
    pthread_mutex_unlock(&lock);
    return result;
}

static CUresult CUDAAPI note_alloc(CUdeviceptr *memory, size_t bytes)
{
    CUresult result = vpmm_sim_driver(sim)->cuMemAlloc(memory, bytes);
    pthread_mutex_lock(&lock);
    for (int i = 0; result == CUDA_SUCCESS && i < PLAIN; i++)
        if (!plains[i].at) {
            plains[i] = (struct plain){*memory, bytes};
            break;
        }
    pthread_mutex_unlock(&lock);
    return result;
}

static CUresult CUDAAPI note_free(CUdeviceptr memory)
{
    pthread_mutex_lock(&lock);
    for (int i = 0; i < PLAIN; i++)
        if (plains[i].at == memory)
            plains[i].at = 0;
    pthread_mutex_unlock(&lock);
    return vpmm_sim_driver(sim)->cuMemFree(memory);
}

static CUresult CUDAAPI note_pool(CUmemoryPool *pool, const CUmemPoolProps *props)
{
    CUresult result = vpmm_sim_driver(sim)->cuMemPoolCreate(pool, props);
    pthread_mutex_lock(&lock);
    if (result == CUDA_SUCCESS) {
        pools[pool_count].pool = *pool;
        pools[pool_count].device = props->location.id;
        pool_count += pool_count < POOLS - 1;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

/* Under the lock. The last has what is more than these. */
static struct noted *noted_of(CUstream stream)
{
    int i = 0;
    while (i < STREAMS - 1 && noted[i].stream && noted[i].stream != stream)
        i++;
    noted[i].stream = stream;
    return &noted[i];
}

static void note_record(CUstream stream, CUresult result)
{
    if (result == CUDA_SUCCESS)
        noted_of(stream)->records++;
}

static CUresult CUDAAPI record_when_let(CUevent event, CUstream stream)
{
    wait_if_held("cuEventRecord");
    CUresult result = vpmm_sim_driver(sim)->cuEventRecord(event, stream);
    pthread_mutex_lock(&lock);
    note_record(stream, result);
    pthread_mutex_unlock(&lock);
    return result;
}

static CUresult CUDAAPI create_when_let(CUstream *stream, unsigned int flags)
{
    wait_if_held("cuStreamCreate");
    return vpmm_sim_driver(sim)->cuStreamCreate(stream, flags);
}

static CUresult CUDAAPI answer_when_let(CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
    CUresult result = vpmm_sim_driver(sim)->cuMemPoolGetAttribute(pool, attribute, value);
    wait_if_held("cuMemPoolGetAttribute");
    return result;
}

static CUresult CUDAAPI record_stepped(CUevent event, CUstream stream)
{
    pthread_mutex_lock(&lock);
    struct noted *of = noted_of(stream);
    size_t pending = vpmm_sim_pending(sim, stream);
    CUresult result = vpmm_sim_driver(sim)->cuEventRecord(event, stream);
    note_record(stream, result);
    if (pending <= of->events)
        of->events = pending + 1;
    pthread_mutex_unlock(&lock);
    return result;
}

static CUresult CUDAAPI pass_when_asked(CUstream stream)
{
    pthread_mutex_lock(&lock);
    struct noted *of = noted_of(stream);
    CUresult result = vpmm_sim_driver(sim)->cuStreamQuery(stream);
    vpmm_sim_step(sim, stream, of->events);
    of->events = 0;
    pthread_mutex_unlock(&lock);
    return result;
}

static void start(void)
{
    vpmm_sim_config config = vpmm_sim_config_default();
    config.memory_bytes = setting("FAKE_MEMORY", UINT64_C(1) << 30);
    config.devices = (int)setting("FAKE_DEVICES", 1);
    config.stepped = setting("FAKE_STEPPED", 0);
    sim = vpmm_sim_create(&config);
    if (!sim)
        abort();
    table = *vpmm_sim_driver(sim);
    table.cuDevicePrimaryCtxRetain = count_retain;
    table.cuDevicePrimaryCtxRelease = count_release;
    table.cuMemAlloc = note_alloc;
    table.cuMemFree = note_free;
    table.cuMemPoolCreate = note_pool;
    table.cuMemPoolGetAttribute = answer_when_let;
    table.cuStreamCreate = create_when_let;
    table.cuEventRecord = record_when_let;
    if (config.stepped) {
        table.cuEventRecord = record_stepped;
        table.cuStreamQuery = pass_when_asked;
    }
}

static const vpmm_driver *driver(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, start);
    return &table;
}

#define EXPORTED(symbol)                  __asm__(symbol) __attribute__((visibility("default")))
#define DECLARE(name, symbol, parameters) CUresult CUDAAPI fake_##name parameters EXPORTED(symbol);

/* ---- the simulator's, under the names that the documentation gives them ---- */

#define SIMULATED(name, version, parameters, arguments)                                                                \
    CUresult CUDAAPI fake_sim_##name parameters EXPORTED(#name);                                                       \
    CUresult CUDAAPI fake_sim_##name parameters                                                                        \
    {                                                                                                                  \
        return driver()->name arguments;                                                                               \
    }
VPMM_DRIVER_ENTRIES(SIMULATED)

/* ---- later ABI versions, and what is more than the simulator's ---- */

DECLARE(alloc, "cuMemAlloc_v2", (CUdeviceptr * memory, size_t bytes))
CUresult fake_alloc(CUdeviceptr *memory, size_t bytes)
{
    return driver()->cuMemAlloc(memory, bytes);
}

DECLARE(free, "cuMemFree_v2", (CUdeviceptr memory))
CUresult fake_free(CUdeviceptr memory)
{
    return driver()->cuMemFree(memory);
}

DECLARE(get_info, "cuMemGetInfo_v2", (size_t * free, size_t *total))
CUresult fake_get_info(size_t *free, size_t *total)
{
    return driver()->cuMemGetInfo(free, total);
}

DECLARE(stream_destroy, "cuStreamDestroy_v2", (CUstream stream))
CUresult fake_stream_destroy(CUstream stream)
{
    return driver()->cuStreamDestroy(stream);
}

DECLARE(begin_capture, "cuStreamBeginCapture_v2", (CUstream stream, CUstreamCaptureMode mode))
CUresult fake_begin_capture(CUstream stream, CUstreamCaptureMode mode)
{
    return driver()->cuStreamBeginCapture(stream, mode);
}

DECLARE(begin_recapture, "cuStreamBeginRecaptureToGraph",
        (CUstream stream, CUstreamCaptureMode mode, CUgraph graph, void *callback, void *data))
CUresult fake_begin_recapture(CUstream stream, CUstreamCaptureMode mode, CUgraph graph, void *callback, void *data)
{
    (void)graph, (void)callback, (void)data;
    return driver()->cuStreamBeginCapture(stream, mode);
}

static CUstream per_thread(CUstream stream)
{
    return stream ? stream : CU_STREAM_PER_THREAD;
}

DECLARE(alloc_async_ptsz, "cuMemAllocAsync_ptsz", (CUdeviceptr * memory, size_t bytes, CUstream stream))
CUresult fake_alloc_async_ptsz(CUdeviceptr *memory, size_t bytes, CUstream stream)
{
    return driver()->cuMemAllocAsync(memory, bytes, per_thread(stream));
}

DECLARE(free_async_ptsz, "cuMemFreeAsync_ptsz", (CUdeviceptr memory, CUstream stream))
CUresult fake_free_async_ptsz(CUdeviceptr memory, CUstream stream)
{
    return driver()->cuMemFreeAsync(memory, per_thread(stream));
}

DECLARE(alloc_from_pool_async_ptsz, "cuMemAllocFromPoolAsync_ptsz",
        (CUdeviceptr * memory, size_t bytes, CUmemoryPool pool, CUstream stream))
CUresult fake_alloc_from_pool_async_ptsz(CUdeviceptr *memory, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    return driver()->cuMemAllocFromPoolAsync(memory, bytes, pool, per_thread(stream));
}

/* ---- contexts ---- */

/*
 * A reset leaves the count of retains as it is, of a context that is no more. Later ones are added to it, and the next
 * context lives until as many are released as both (an H200, driver 580).
 */
static int retained_before[DEVICES];

DECLARE(release, "cuDevicePrimaryCtxRelease_v2", (CUdevice device))
CUresult fake_release(CUdevice device)
{
    pthread_mutex_lock(&lock);
    bool is_of_former = retained_before[device] > 0;
    retained_before[device] -= is_of_former;
    pthread_mutex_unlock(&lock);
    return is_of_former ? CUDA_SUCCESS : driver()->cuDevicePrimaryCtxRelease(device);
}

DECLARE(primary_state, "cuDevicePrimaryCtxGetState", (CUdevice device, unsigned int *flags, int *active))
CUresult fake_primary_state(CUdevice device, unsigned int *flags, int *active)
{
    pthread_mutex_lock(&lock);
    *flags = 0;
    *active = retained[device] > 0;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

DECLARE(reset, "cuDevicePrimaryCtxReset_v2", (CUdevice device))
CUresult fake_reset(CUdevice device)
{
    int count = 0;
    while (driver()->cuDevicePrimaryCtxRelease(device) == CUDA_SUCCESS)
        count++;
    pthread_mutex_lock(&lock);
    retained_before[device] += count;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

DECLARE(enable_peer, "cuCtxEnablePeerAccess", (CUcontext peer, unsigned int flags))
CUresult fake_enable_peer(CUcontext peer, unsigned int flags)
{
    (void)peer, (void)flags;
    return CUDA_SUCCESS;
}

/* ---- a device's pool ---- */

DECLARE(set_device_pool, "cuDeviceSetMemPool", (CUdevice device, CUmemoryPool pool))
CUresult fake_set_device_pool(CUdevice device, CUmemoryPool pool)
{
    current[device] = pool;
    return CUDA_SUCCESS;
}

DECLARE(set_pool, "cuMemSetMemPool", (CUmemLocation * location, CUmemAllocationType type, CUmemoryPool pool))
CUresult fake_set_pool(CUmemLocation *location, CUmemAllocationType type, CUmemoryPool pool)
{
    (void)type;
    return fake_set_device_pool(location->id, pool);
}

DECLARE(get_device_pool, "cuDeviceGetMemPool", (CUmemoryPool * pool, CUdevice device))
CUresult fake_get_device_pool(CUmemoryPool *pool, CUdevice device)
{
    *pool = current[device];
    return *pool ? CUDA_SUCCESS : driver()->cuDeviceGetDefaultMemPool(pool, device);
}

DECLARE(pool_set_access, "cuMemPoolSetAccess", (CUmemoryPool pool, const CUmemAccessDesc *access, size_t count))
CUresult fake_pool_set_access(CUmemoryPool pool, const CUmemAccessDesc *access, size_t count)
{
    return pool && access && count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Of what was made with cuMemPoolCreate: its own device's alone. */
DECLARE(pool_get_access, "cuMemPoolGetAccess", (CUmemAccess_flags * flags, CUmemoryPool pool, CUmemLocation *location))
CUresult fake_pool_get_access(CUmemAccess_flags *flags, CUmemoryPool pool, CUmemLocation *location)
{
    int count = 0;
    if (driver()->cuDeviceGetCount(&count) != CUDA_SUCCESS || location->id >= count)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = CU_MEM_ACCESS_FLAGS_PROT_NONE;
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < pool_count; i++)
        if (pools[i].pool == pool && pools[i].device == location->id)
            *flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

/* ---- addresses: cuMemAlloc's, and else the page of a mapping, as the driver sees no allocation there ---- */

static struct plain lying_at(CUdeviceptr address)
{
    const CUdeviceptr page = 2 << 20;
    struct plain found = {address / page * page, page};
    pthread_mutex_lock(&lock);
    for (int i = 0; i < PLAIN; i++)
        if (plains[i].at && address - plains[i].at < plains[i].bytes)
            found = plains[i];
    pthread_mutex_unlock(&lock);
    return found;
}

DECLARE(get_address_range, "cuMemGetAddressRange_v2", (CUdeviceptr * start, size_t *bytes, CUdeviceptr address))
CUresult fake_get_address_range(CUdeviceptr *start, size_t *bytes, CUdeviceptr address)
{
    struct plain found = lying_at(address);
    if (start)
        *start = found.at;
    if (bytes)
        *bytes = found.bytes;
    return CUDA_SUCCESS;
}

DECLARE(pointer_attribute, "cuPointerGetAttribute", (void *data, CUpointer_attribute attribute, CUdeviceptr address))
CUresult fake_pointer_attribute(void *data, CUpointer_attribute attribute, CUdeviceptr address)
{
    struct plain found = lying_at(address);
    const unsigned int type = CU_MEMORYTYPE_DEVICE;
    const void *nothing = NULL;
    switch ((int)attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        memcpy(data, &type, sizeof type);
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        memcpy(data, &found.at, sizeof found.at);
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        memcpy(data, &found.bytes, sizeof found.bytes);
        break;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        memcpy(data, &nothing, sizeof nothing);
        break;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

DECLARE(pointer_attributes, "cuPointerGetAttributes",
        (unsigned int count, CUpointer_attribute *attributes, void **data, CUdeviceptr address))
CUresult fake_pointer_attributes(unsigned int count, CUpointer_attribute *attributes, void **data, CUdeviceptr address)
{
    for (unsigned int i = 0; i < count; i++)
        fake_pointer_attribute(data[i], attributes[i], address);
    return CUDA_SUCCESS;
}

/* ---- by name ---- */

DECLARE(get_proc_address, "cuGetProcAddress", (const char *name, void **function, int version, cuuint64_t flags))
DECLARE(get_proc_address_v2, "cuGetProcAddress_v2",
        (const char *name, void **function, int version, cuuint64_t flags, void *status))

/* The first row with the name, the flag and a version not above the one asked for counts; later versions come first. */
static const struct row {
    const char *name;
    int version;
    bool per_thread;
    void *function;
} rows[] = {
#define ROW(name, version, function)                                                                                   \
    {                                                                                                                  \
        name, version, false, (void *)(function)                                                                       \
    }
    ROW("cuMemAlloc", 3020, fake_alloc),
    ROW("cuMemFree", 3020, fake_free),
    ROW("cuMemGetInfo", 3020, fake_get_info),
    ROW("cuStreamDestroy", 4000, fake_stream_destroy),
    ROW("cuStreamBeginCapture", 10010, fake_begin_capture),
    ROW("cuStreamBeginRecaptureToGraph", 13030, fake_begin_recapture),
    {"cuMemAllocAsync", 11020, true, (void *)fake_alloc_async_ptsz},
    {"cuMemFreeAsync", 11020, true, (void *)fake_free_async_ptsz},
    {"cuMemAllocFromPoolAsync", 11020, true, (void *)fake_alloc_from_pool_async_ptsz},
    ROW("cuDevicePrimaryCtxRelease", 11000, fake_release),
    ROW("cuDevicePrimaryCtxGetState", 7000, fake_primary_state),
    ROW("cuDevicePrimaryCtxReset", 11000, fake_reset),
    ROW("cuCtxEnablePeerAccess", 4000, fake_enable_peer),
    ROW("cuDeviceSetMemPool", 11020, fake_set_device_pool),
    ROW("cuMemSetMemPool", 13000, fake_set_pool),
    ROW("cuDeviceGetMemPool", 11020, fake_get_device_pool),
    ROW("cuMemPoolSetAccess", 11020, fake_pool_set_access),
    ROW("cuMemGetAddressRange", 3020, fake_get_address_range),
    ROW("cuPointerGetAttribute", 4000, fake_pointer_attribute),
    ROW("cuPointerGetAttributes", 7000, fake_pointer_attributes),
    ROW("cuGetProcAddress", 12000, fake_get_proc_address_v2),
    ROW("cuGetProcAddress", 11030, fake_get_proc_address),
#define SIMULATED_ROW(name, version, parameters, arguments) ROW(#name, version, fake_sim_##name),
    VPMM_DRIVER_ENTRIES(SIMULATED_ROW)};

CUresult fake_get_proc_address(const char *name, void **function, int version, cuuint64_t flags)
{
    *function = NULL;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
        if (strcmp(rows[i].name, name) == 0 && rows[i].version <= version &&
            (!rows[i].per_thread || flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM)) {
            *function = rows[i].function;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_NOT_FOUND;
}

CUresult fake_get_proc_address_v2(const char *name, void **function, int version, cuuint64_t flags, void *status)
{
    CUresult result = fake_get_proc_address(name, function, version, flags);
    int found = result == CUDA_SUCCESS ? 0 : 1; /* CU_GET_PROC_ADDRESS_SUCCESS, SYMBOL_NOT_FOUND */
    if (status)
        memcpy(status, &found, sizeof found);
    return CUDA_SUCCESS;
}

/* ---- for the test's program ---- */

#define CONTROL __attribute__((visibility("default")))

CONTROL uint64_t fake_calls(const char *call);
uint64_t fake_calls(const char *call)
{
    driver();
    return vpmm_sim_calls(sim, call);
}

CONTROL uint64_t fake_records_but(CUstream stream);
uint64_t fake_records_but(CUstream stream)
{
    uint64_t records = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < STREAMS; i++)
        records += noted[i].stream == stream ? 0 : noted[i].records;
    pthread_mutex_unlock(&lock);
    return records;
}

CONTROL uint64_t fake_pending(CUstream stream);
uint64_t fake_pending(CUstream stream)
{
    return vpmm_sim_pending(sim, stream);
}

CONTROL uint64_t fake_races(void);
uint64_t fake_races(void)
{
    return vpmm_sim_races(sim);
}

CONTROL uint64_t fake_misuses(void);
uint64_t fake_misuses(void)
{
    return vpmm_sim_misuses(sim);
}

CONTROL void fake_fail(const char *call, uint64_t nth, CUresult result);
void fake_fail(const char *call, uint64_t nth, CUresult result)
{
    driver();
    vpmm_sim_fail(sim, call, nth, result, true);
}

CONTROL void fake_fail_once(const char *call, uint64_t nth, CUresult result);
void fake_fail_once(const char *call, uint64_t nth, CUresult result)
{
    driver();
    vpmm_sim_fail(sim, call, nth, result, false);
}

CONTROL void fake_hold(const char *call);
void fake_hold(const char *call)
{
    if (call)
        atomic_store(&is_held, false);
    atomic_store(&held, call);
}

CONTROL bool fake_holds(void);
bool fake_holds(void)
{
    return atomic_load(&is_held);
}
