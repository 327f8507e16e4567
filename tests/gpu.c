#include "gpu.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <vpmm/vpmm.h>

enum {
    HOLDS = 256,        /* until the device is waited for */
    MOST_HELD = 24,     /* streams at a time: with some tens of them cuStreamCreate does not return */
    BEHIND_HOLDS = 512, /* pieces of work that wait: the driver's queues have an end */
    HOST_BYTES = 4 << 20,
    PATIENCE_MS = 200,
};

struct hold {
    CUstream stream;
    bool let_go;
};

static struct {
    const vpmm_driver *driver;
    CUresult(CUDAAPI *wait_value)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
    pthread_mutex_t lock;
    _Atomic uint32_t *word; /* a word a hold, 1 once it is let go; mapped for the device, as is all of host */
    struct hold hold[HOLDS];
    int holds, held, behind;
    unsigned char *host;
    size_t host_used;
} gpu = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* --- the table ------------------------------------------------------------------------------------------------------
 */

enum {
#define GPU_ENTRY(name, version, parameters, arguments) CALL_##name,
    VPMM_DRIVER_ENTRIES(GPU_ENTRY) ENTRIES
#undef GPU_ENTRY
};

static const char *const entry_name[] = {
#define GPU_ENTRY(name, version, parameters, arguments) #name,
    VPMM_DRIVER_ENTRIES(GPU_ENTRY)
#undef GPU_ENTRY
};

static atomic_uint_fast64_t calls[ENTRIES];

static void let_go(int i)
{
    gpu.held -= !gpu.hold[i].let_go;
    gpu.hold[i].let_go = true;
    atomic_store(&gpu.word[i], 1);
}

static void let_all_go(void)
{
    pthread_mutex_lock(&gpu.lock);
    for (int i = 0; i < gpu.holds; i++)
        let_go(i);
    gpu.behind = 0;
    pthread_mutex_unlock(&gpu.lock);
}

static bool makes_the_host_wait(int call)
{
    switch (call) {
    case CALL_cuCtxSynchronize:
    case CALL_cuStreamSynchronize:
    case CALL_cuEventSynchronize:
    case CALL_cuCtxDestroy:
    case CALL_cuDevicePrimaryCtxRelease:
    case CALL_cuMemAlloc:
    case CALL_cuMemFree:
    case CALL_cuMemHostAlloc:
    case CALL_cuMemFreeHost:
    case CALL_cuMemcpyHtoD:
    case CALL_cuMemcpyDtoH:
    case CALL_cuMemcpyHtoDAsync: /* of memory that the driver does not know */
    case CALL_cuMemcpyDtoHAsync:
    case CALL_cuMemsetD8:
        return true;
    default:
        return false;
    }
}

static void note_call(int call)
{
    atomic_fetch_add(&calls[call], 1);
    if (makes_the_host_wait(call))
        let_all_go();
}

#define GPU_ENTRY(name, version, parameters, arguments)                                                                \
    static CUresult CUDAAPI gpu_##name parameters                                                                      \
    {                                                                                                                  \
        note_call(CALL_##name);                                                                                        \
        return gpu.driver->name arguments;                                                                             \
    }
VPMM_DRIVER_ENTRIES(GPU_ENTRY)
#undef GPU_ENTRY

bool gpu_chosen(void)
{
    const char *driver = getenv("VPMM_TEST_DRIVER");
    return driver != NULL && strcmp(driver, "cuda") == 0;
}

const vpmm_driver *gpu_driver(void)
{
    static vpmm_driver table;
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0); /* fewer streams in one queue, where one would hold the other */
    gpu.driver = vpmm_driver_cuda();
    if (gpu.driver == NULL)
        return NULL;
    table.size = sizeof table;
#define GPU_ENTRY(name, version, parameters, arguments) table.name = gpu.driver->name != NULL ? gpu_##name : NULL;
    VPMM_DRIVER_ENTRIES(GPU_ENTRY)
#undef GPU_ENTRY
    return &table;
}

uint64_t gpu_calls(const char *call)
{
    for (int i = 0; i < ENTRIES; i++)
        if (strcmp(entry_name[i], call) == 0)
            return atomic_load(&calls[i]);
    return 0;
}

/* --- holding and letting go -----------------------------------------------------------------------------------------
 */

bool gpu_open(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL); /* never closed, as in the library */
    void *entry = library != NULL ? dlsym(library, "cuStreamWaitValue32_v2") : NULL;
    memcpy(&gpu.wait_value, &entry, sizeof entry);
    void *memory = NULL;
    if (entry == NULL || gpu.driver->cuMemHostAlloc(&memory, HOST_BYTES, CU_MEMHOSTALLOC_PORTABLE) != CUDA_SUCCESS)
        return false;
    memset(memory, 0, HOST_BYTES);
    gpu.word = memory;
    gpu.host = memory;
    gpu.host_used = HOLDS * sizeof gpu.word[0];
    gpu.holds = gpu.held = gpu.behind = 0;
    return true;
}

bool gpu_close(void)
{
    bool good = gpu_run() != SIZE_MAX && gpu.driver->cuMemFreeHost(gpu.host) == CUDA_SUCCESS;
    gpu.host = NULL;
    gpu.word = NULL;
    return good;
}

static CUstream same_stream(CUstream stream)
{
    return stream == NULL ? CU_STREAM_LEGACY : stream;
}

bool gpu_hold(CUstream stream)
{
    stream = same_stream(stream);
    if (gpu.holds == HOLDS)
        if (gpu_run() == SIZE_MAX)
            return false;
    if (gpu.behind == BEHIND_HOLDS || gpu.held == MOST_HELD)
        let_all_go();
    pthread_mutex_lock(&gpu.lock);
    gpu.behind++;
    bool held = false, good = true;
    for (int i = 0; i < gpu.holds && !held; i++)
        held = gpu.hold[i].stream == stream && !gpu.hold[i].let_go;
    if (!held) {
        int i = gpu.holds;
        good = gpu.wait_value(stream, (CUdeviceptr)(uintptr_t)&gpu.word[i], 1, CU_STREAM_WAIT_VALUE_EQ) == CUDA_SUCCESS;
        if (good) {
            gpu.hold[gpu.holds++] = (struct hold){.stream = stream};
            gpu.held++;
        }
    }
    pthread_mutex_unlock(&gpu.lock);
    return good;
}

void gpu_forget(CUstream stream)
{
    pthread_mutex_lock(&gpu.lock);
    for (int i = 0; i < gpu.holds; i++)
        if (gpu.hold[i].stream == stream)
            gpu.hold[i].stream = NULL;
    pthread_mutex_unlock(&gpu.lock);
}

void *gpu_host_memory(size_t bytes)
{
    bytes = (bytes + 63) / 64 * 64;
    if (HOST_BYTES - gpu.host_used < bytes)
        if (gpu_run() == SIZE_MAX || HOST_BYTES - gpu.host_used < bytes)
            return NULL;
    gpu.host_used += bytes;
    return gpu.host + gpu.host_used - bytes;
}

size_t gpu_run(void)
{
    let_all_go();
    if (gpu.driver->cuCtxSynchronize() != CUDA_SUCCESS)
        return SIZE_MAX;
    pthread_mutex_lock(&gpu.lock);
    size_t ended = (size_t)gpu.holds;
    for (int i = 0; i < gpu.holds; i++)
        atomic_store(&gpu.word[i], 0); /* no stream stands at one any more */
    gpu.holds = 0;
    gpu.host_used = HOLDS * sizeof gpu.word[0];
    pthread_mutex_unlock(&gpu.lock);
    return ended;
}

bool gpu_pending(CUstream stream)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED; /* others may capture */
    gpu.driver->cuThreadExchangeStreamCaptureMode(&mode);
    bool pending = gpu.driver->cuStreamQuery(stream) == CUDA_ERROR_NOT_READY;
    gpu.driver->cuThreadExchangeStreamCaptureMode(&mode);
    return pending;
}

bool gpu_run_stream(CUstream stream, bool wait)
{
    bool before = gpu_pending(stream), after = before;
    stream = same_stream(stream);
    pthread_mutex_lock(&gpu.lock);
    for (int i = 0; i < gpu.holds; i++)
        if (gpu.hold[i].stream == stream)
            let_go(i);
    pthread_mutex_unlock(&gpu.lock);
    for (int ms = 0; wait && after && ms < PATIENCE_MS; ms++) {
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        after = gpu_pending(stream);
    }
    return before && !after;
}
