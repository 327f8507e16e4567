/*
 * stress_faults.c - the driver as the pool sees it when it is to fail: each entry of the table in front of the real
 * one. Calls that change what is mapped, or that fences are made of, are refused at random, and then often the next few
 * as well, so that unwinding meets a refusal too. Or a defect is planted that the program has to find.
 */
#include "stress.h"

#include <string.h>

const char *const plant_names[PLANTS] = {"none",     "reuse", "lost-page", "double-map",
                                         "unmapped", "count", "bit",       "lost-device"};

enum {
    SELDOM = 64,    /* of so many calls, one is refused, */
    BURST = 4,      /* and of so many refused ones, one begins a burst, */
    BURST_MOST = 6, /* in which so many calls at most are refused */
    LOST_AFTER_S = 2,
    PLANTED = 16, /* of so many calls that a defect is planted in, one has it */
};

enum entry {
#define ENTRY_OF(name, version, parameters, arguments) ENTRY_##name,
    VPMM_DRIVER_ENTRIES(ENTRY_OF)
#undef ENTRY_OF
};

static const char *const entry_names[] = {
#define NAME_OF(name, version, parameters, arguments) #name,
    VPMM_DRIVER_ENTRIES(NAME_OF)
#undef NAME_OF
};

static struct {
    const vpmm_driver *real;
    vpmm_driver table;
    enum plant plant;
    double lost_at; /* written before it is on */
    atomic_bool on;
    _Atomic(uint64_t) seeds, made[VPMM_DRIVER_CALLS];
} faults;

static uint64_t draw(uint64_t bound)
{
    static _Thread_local uint64_t random;
    if (random == 0)
        random = (atomic_fetch_add(&faults.seeds, 1) + 1) * UINT64_C(0x9E3779B97F4A7C15);
    return random_below(&random, bound);
}

/*
 * What the entry answers when it is refused; CUDA_SUCCESS: it never is. A query of an event is not: what it answers but
 * for CUDA_ERROR_NOT_READY is an error of earlier work, after which nothing works any more.
 */
static CUresult refusal_of(enum entry entry)
{
    switch (entry) {
    case ENTRY_cuMemCreate:
    case ENTRY_cuMemAddressReserve:
    case ENTRY_cuEventCreate:
        return CUDA_ERROR_OUT_OF_MEMORY;
    case ENTRY_cuMemRelease:
    case ENTRY_cuMemMap:
    case ENTRY_cuMemUnmap:
    case ENTRY_cuMemSetAccess:
    case ENTRY_cuEventRecord:
    case ENTRY_cuStreamWaitEvent:
    case ENTRY_cuStreamGetId:
        return CUDA_ERROR_UNKNOWN;
    default:
        return CUDA_SUCCESS;
    }
}

/* A device that has failed for good answers nothing else any more. */
static CUresult lost(enum entry entry)
{
    bool answers = entry == ENTRY_cuGetErrorName || entry == ENTRY_cuGetErrorString;
    return answers || now_seconds() < faults.lost_at ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
}

static _Thread_local bool is_spared; /* nothing is refused to this thread, nor is a defect planted in its calls */

static CUresult refused(enum entry entry)
{
    static _Thread_local unsigned burst;
    CUresult refusal = refusal_of(entry);
    if (is_spared)
        return CUDA_SUCCESS;
    if (!atomic_load_explicit(&faults.on, memory_order_acquire)) /* pairs with faults_set's release: lost_at */
        return CUDA_SUCCESS;
    if (faults.plant == PLANT_LOST)
        return lost(entry);
    if (refusal == CUDA_SUCCESS)
        return CUDA_SUCCESS;
    if (burst == 0 && draw(SELDOM) != 0)
        return CUDA_SUCCESS;
    if (burst != 0)
        burst--;
    else if (draw(BURST) == 0)
        burst = 1 + (unsigned)draw(BURST_MOST);
    atomic_fetch_add_explicit(&faults.made[entry], 1, memory_order_relaxed);
    return refusal;
}

#define REFUSE_AT_RANDOM(name, version, parameters, arguments)                                                         \
    static CUresult CUDAAPI before_##name parameters                                                                   \
    {                                                                                                                  \
        CUresult result = refused(ENTRY_##name);                                                                       \
        unsigned in_pool = host_memory_leave();                                                                        \
        if (result == CUDA_SUCCESS)                                                                                    \
            result = faults.real->name arguments;                                                                      \
        host_memory_return(in_pool);                                                                                   \
        return result;                                                                                                 \
    }
VPMM_DRIVER_ENTRIES(REFUSE_AT_RANDOM)

/* ---- defects ---- */

static bool is_planted(void)
{
    return !is_spared && atomic_load_explicit(&faults.on, memory_order_relaxed) && draw(PLANTED) == 0;
}

/* The fence seems to have passed. */
static CUresult CUDAAPI plant_passed(CUevent event)
{
    CUresult result = faults.real->cuEventQuery(event);
    return result == CUDA_ERROR_NOT_READY && is_planted() ? CUDA_SUCCESS : result;
}

static CUresult CUDAAPI plant_no_wait(CUstream stream, CUevent event, unsigned flags)
{
    return is_planted() ? CUDA_SUCCESS : faults.real->cuStreamWaitEvent(stream, event, flags);
}

static CUresult CUDAAPI plant_no_release(CUmemGenericAllocationHandle handle)
{
    return is_planted() ? CUDA_SUCCESS : faults.real->cuMemRelease(handle);
}

/* The handle that was mapped before, if it is as long, is mapped here as well. */
static CUresult CUDAAPI plant_other_handle(CUdeviceptr at, size_t bytes, size_t offset,
                                           CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    static _Thread_local CUmemGenericAllocationHandle other;
    static _Thread_local size_t other_bytes;
    if (other_bytes == bytes && other != handle && is_planted() &&
        faults.real->cuMemMap(at, bytes, offset, other, flags) == CUDA_SUCCESS)
        return CUDA_SUCCESS;
    other = handle;
    other_bytes = bytes;
    return faults.real->cuMemMap(at, bytes, offset, handle, flags);
}

static CUresult CUDAAPI plant_unmap(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
    CUresult result = faults.real->cuMemSetAccess(at, bytes, access, count);
    if (result == CUDA_SUCCESS && is_planted())
        faults.real->cuMemUnmap(at, bytes);
    return result;
}

/* One more than was asked for. */
static CUresult CUDAAPI plant_create_twice(CUmemGenericAllocationHandle *handle, size_t bytes,
                                           const CUmemAllocationProp *prop, unsigned long long flags)
{
    if (is_planted())
        faults.real->cuMemCreate(handle, bytes, prop, flags);
    return faults.real->cuMemCreate(handle, bytes, prop, flags);
}

static void plant(vpmm_driver *table)
{
    switch (faults.plant) {
    case PLANT_REUSE:
        table->cuEventQuery = plant_passed;
        table->cuStreamWaitEvent = plant_no_wait;
        break;
    case PLANT_LOST_PAGE:
        table->cuMemRelease = plant_no_release;
        break;
    case PLANT_DOUBLE_MAP:
        table->cuMemMap = plant_other_handle;
        break;
    case PLANT_UNMAPPED:
        table->cuMemSetAccess = plant_unmap;
        break;
    case PLANT_COUNT:
        table->cuMemCreate = plant_create_twice;
        break;
    default:
        break;
    }
}

/* ---- the table ---- */

const vpmm_driver *faults_table(const vpmm_driver *real, enum plant which)
{
    faults.real = real;
    faults.plant = which;
    faults.table = *real;
    if (which == PLANT_NONE || which == PLANT_LOST) {
#define PUT_BEFORE(name, version, parameters, arguments)                                                               \
    if (real->name)                                                                                                    \
        faults.table.name = before_##name;
        VPMM_DRIVER_ENTRIES(PUT_BEFORE)
#undef PUT_BEFORE
    }
    plant(&faults.table);
    return &faults.table;
}

void faults_set(bool on)
{
    if (on)
        faults.lost_at = now_seconds() + LOST_AFTER_S;
    atomic_store(&faults.on, on);
}

void faults_spare(bool spared)
{
    is_spared = spared;
}

uint64_t faults_made(const char *call)
{
    uint64_t sum = 0;
    for (int i = 0; i < VPMM_DRIVER_CALLS; i++)
        if (call == NULL || strcmp(call, entry_names[i]) == 0)
            sum += atomic_load_explicit(&faults.made[i], memory_order_relaxed);
    return sum;
}
