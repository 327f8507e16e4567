#include "driver/async_pool.h"

#include "base/lock.h"

#include <stdlib.h>

enum record_state { RECORD_LIVE, RECORD_FREEING, RECORD_REFUSED, RECORD_REPLACED };

struct async_record {
    struct object_key key; /* a: address */
    size_t bytes;
    enum record_state state;
    bool refused; /* at any time: no longer counted, and what the driver does not know was freed */
    CUevent end;  /* the point of its stream where its free was last refused; NULL: none. Of who frees it */
};

static struct object_key key_of(CUdeviceptr address)
{
    return (struct object_key){address, 0};
}

static unsigned map_of(CUdeviceptr address)
{
    return (unsigned)(address >> 9 ^ address >> 15) % ASYNC_MAPS;
}

static vpmm_status make_pool(struct async_pool *async)
{
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                            .handleTypes = CU_MEM_HANDLE_TYPE_NONE,
                            .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = async->device->ordinal}};
    cuuint64_t keep_all = UINT64_MAX;
    if (device_call(async->device, cuMemPoolCreate, &async->pool, &props) != CUDA_SUCCESS) {
        if (async->pool) /* it was made, whatever the driver said */
            async->device->driver.cuMemPoolDestroy(async->pool);
        async->pool = NULL;
        return device_failed(async->device, "creating the memory pool for small requests");
    }
    if (device_call(async->device, cuMemPoolSetAttribute, async->pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep_all) !=
        CUDA_SUCCESS)
        return device_failed(async->device, "setting up the memory pool for small requests");
    return VPMM_SUCCESS;
}

/* A free that is tried again comes before mallocs, of which there may always be one. */
static void init_handing(struct async_pool *async)
{
    pthread_rwlockattr_t attributes;
    pthread_rwlockattr_init(&attributes);
    pthread_rwlockattr_setkind_np(&attributes, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    pthread_rwlock_init(&async->handing, &attributes);
    pthread_rwlockattr_destroy(&attributes);
}

vpmm_status async_pool_init(struct async_pool *async, struct device *device)
{
    async->device = device;
    init_handing(async);
    for (int i = 0; i < ASYNC_MAPS; i++) {
        pthread_mutex_init(&async->map[i].lock, NULL);
        async->map[i].records = object_map_create();
        if (!async->map[i].records)
            return fail(VPMM_ERROR_HOST_MEMORY, "no host memory for the records of small allocations");
    }
    return make_pool(async);
}

/* ---- records ---- */

/*
 * An event of what the stream has been given by now, made in the stream's own context. NULL: there is none to be had.
 */
static CUevent point_of(struct device *device, CUstream stream)
{
    struct device_scope scope;
    CUcontext context;
    CUevent event = NULL;
    if (device_call(device, cuStreamGetCtx, stream, &context) != CUDA_SUCCESS ||
        device_enter_context(device, context, &scope) != VPMM_SUCCESS)
        return NULL;
    if (device_call(device, cuEventCreate, &event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS ||
        device_call(device, cuEventRecord, event, stream) != CUDA_SUCCESS) {
        if (event)
            device_call(device, cuEventDestroy, event);
        event = NULL;
    }
    device_leave(device, &scope);
    return event;
}

/* The last free of all, which is on another stream, comes after this point (free_at_last). */
static void note_refusal(struct async_pool *async, struct async_record *record, CUstream stream)
{
    CUevent before = record->end;
    record->end = point_of(async->device, stream);
    if (before)
        device_call(async->device, cuEventDestroy, before);
}

static void record_free(struct async_pool *async, struct async_record *record)
{
    if (record->end && !device_dead(async->device))
        device_call(async->device, cuEventDestroy, record->end);
    free(record);
}

/* Its end, by who has taken it out of the map or was replaced. */
static void record_end(struct async_pool *async, struct async_record *record)
{
    if (!record->refused)
        fetch_sub_relaxed_u64(&async->count, 1);
    stats_end_live(async->device->stats, STAT_async_bytes, record->bytes, record->bytes);
    record_free(async, record);
}

/*
 * Of a record that has its address, under its map's lock: the driver has handed the address out again. The record, for
 * the caller to end without the lock; NULL: its free ends it.
 */
static struct async_record *replace(struct object_map *records, struct async_record *old)
{
    object_map_remove(records, old->key);
    if (old->state != RECORD_FREEING)
        return old;
    old->state = RECORD_REPLACED;
    return NULL;
}

/* Counted before it is found. False: no host memory. */
static bool record_add(struct async_pool *async, struct async_record *record)
{
    unsigned i = map_of(record->key.a);
    struct object_map *records = async->map[i].records;
    lock_take(&async->map[i].lock);
    struct async_record *old = object_map_get(records, record->key);
    if (old)
        old = replace(records, old);
    if (!record->refused)
        fetch_add_relaxed_u64(&async->count, 1);
    stats_begin_live(async->device->stats, STAT_async_bytes, record->bytes, record->bytes);
    bool added = object_map_put(records, record);
    pthread_mutex_unlock(&async->map[i].lock);
    if (old)
        record_end(async, old);
    return added;
}

/* Claims the record for this free. NULL: not an allocation. */
static struct async_record *begin_free(struct async_pool *async, CUdeviceptr address)
{
    unsigned i = map_of(address);
    lock_take(&async->map[i].lock);
    struct async_record *record = object_map_get(async->map[i].records, key_of(address));
    if (record && record->state == RECORD_FREEING)
        record = NULL;
    if (record)
        record->state = RECORD_FREEING;
    pthread_mutex_unlock(&async->map[i].lock);
    return record;
}

static bool is_replaced(struct async_pool *async, const struct async_record *record)
{
    unsigned i = map_of(record->key.a);
    lock_take(&async->map[i].lock);
    bool replaced = record->state == RECORD_REPLACED;
    pthread_mutex_unlock(&async->map[i].lock);
    return replaced;
}

/* True: the record is gone, which it also is if it was replaced meanwhile. */
static bool end_free(struct async_pool *async, struct async_record *record, bool freed, bool refused)
{
    unsigned i = map_of(record->key.a);
    lock_take(&async->map[i].lock);
    bool replaced = record->state == RECORD_REPLACED;
    if (!replaced && freed)
        object_map_remove(async->map[i].records, record->key);
    if (!replaced && !freed) {
        if (refused && !record->refused)
            fetch_sub_relaxed_u64(&async->count, 1);
        record->refused |= refused;
        record->state = record->refused ? RECORD_REFUSED : RECORD_LIVE;
    }
    pthread_mutex_unlock(&async->map[i].lock);
    if (replaced || freed)
        record_end(async, record);
    return replaced || freed;
}

/* ---- malloc ---- */

/* Allocated, whatever went wrong then. What the driver does not take back now it is asked for again at the end. */
static void undo_malloc(struct async_pool *async, struct async_record *record, CUstream stream)
{
    record->bytes = 0;
    record->state = RECORD_REFUSED;
    record->refused = true;
    bool freed = device_call(async->device, cuMemFreeAsync, (CUdeviceptr)record->key.a, stream) == CUDA_SUCCESS;
    if (!freed)
        note_refusal(async, record, stream);
    if (freed || !record_add(async, record))
        record_free(async, record);
}

/* The driver's call, and the record that becomes known with its answer. The record is taken over. */
static vpmm_status allocate(struct async_pool *async, struct async_record *record, CUstream stream, CUdeviceptr *out)
{
    struct device *device = async->device;
    CUdeviceptr address = 0;
    CUresult result = device_call(device, cuMemAllocFromPoolAsync, &address, record->bytes, async->pool, stream);
    vpmm_status status = VPMM_SUCCESS;
    record->key = key_of(address);
    if (result != CUDA_SUCCESS) {
        status = device_failed(device, "allocating from the memory pool for small requests");
        if (address)
            undo_malloc(async, record, stream);
        else
            free(record);
    } else if (!record_add(async, record)) {
        status = fail(VPMM_ERROR_HOST_MEMORY, "no host memory for the table of small allocations");
        device_call(device, cuMemFreeAsync, address, stream); /* with no memory for what a refusal would leave */
        record_end(async, record);
    } else {
        *out = address;
    }
    return status;
}

vpmm_status async_pool_malloc(struct async_pool *async, size_t bytes, CUstream stream, CUdeviceptr *out)
{
    struct device_scope scope;
    struct async_record *record = calloc(1, sizeof *record);
    if (!record)
        return fail(VPMM_ERROR_HOST_MEMORY, "no host memory for the record of an allocation");
    vpmm_status status = device_enter(async->device, &scope);
    if (status != VPMM_SUCCESS) {
        free(record);
        return status;
    }
    record->bytes = bytes;
    lock_count();
    pthread_rwlock_rdlock(&async->handing);
    status = allocate(async, record, stream, out);
    pthread_rwlock_unlock(&async->handing);
    device_leave(async->device, &scope);
    return status;
}

/* ---- free ---- */

/* After a refusal, "not an allocation" says that the refused call had taken effect. */
static bool free_again(struct async_pool *async, const struct async_record *record, CUstream stream)
{
    lock_count();
    pthread_rwlock_wrlock(&async->handing);
    CUresult result = CUDA_SUCCESS;
    if (!is_replaced(async, record))
        result = device_call(async->device, cuMemFreeAsync, (CUdeviceptr)record->key.a, stream);
    pthread_rwlock_unlock(&async->handing);
    return result == CUDA_SUCCESS || result == CUDA_ERROR_INVALID_VALUE;
}

vpmm_status async_pool_free(struct async_pool *async, CUdeviceptr address, CUstream stream)
{
    struct device *device = async->device;
    struct device_scope scope;
    struct async_record *record = begin_free(async, address);
    if (!record)
        return fail(VPMM_ERROR_INVALID_POINTER, "0x%llx is not the start of a live allocation of this pool",
                    (unsigned long long)address);
    vpmm_status status = device_enter(device, &scope);
    if (status != VPMM_SUCCESS)
        return end_free(async, record, false, false) ? VPMM_SUCCESS : status;
    bool freed = record->refused ? free_again(async, record, stream)
                                 : device_call(device, cuMemFreeAsync, address, stream) == CUDA_SUCCESS;
    if (!freed) {
        status = device_failed(device, "freeing to the memory pool for small requests"); /* before other calls fail */
        note_refusal(async, record, stream);
    }
    freed = end_free(async, record, freed, true);
    device_leave(device, &scope);
    return freed ? VPMM_SUCCESS : status;
}

void async_pool_trim(struct async_pool *async)
{
    struct device_scope scope;
    if (!async->pool || device_enter(async->device, &scope) != VPMM_SUCCESS)
        return;
    device_call(async->device, cuMemPoolTrimTo, async->pool, 0); /* a refusal leaves things as they are */
    device_leave(async->device, &scope);
}

/* ---- the end ---- */

struct closing {
    struct async_pool *async;
    vpmm_status status;
    CUstream stream; /* for what was refused; NULL: nothing was so far */
};

/* On a stream of its own: a call on the legacy one ends every capture on a blocking stream of the context. */
static CUresult free_at_last(struct closing *closing, const struct async_record *record)
{
    struct device *device = closing->async->device;
    CUresult result = CUDA_SUCCESS;
    if (!closing->stream)
        result = device_call(device, cuStreamCreate, &closing->stream, CU_STREAM_NON_BLOCKING);
    if (result == CUDA_SUCCESS && record->end)
        result = device_call(device, cuStreamWaitEvent, closing->stream, record->end, 0);
    return result == CUDA_SUCCESS ? device_call(device, cuMemFreeAsync, (CUdeviceptr)record->key.a, closing->stream)
                                  : result;
}

/* What is still live, on a lost device, and what was refused: nobody frees that again. */
static void end_record(void *object, void *data)
{
    struct closing *closing = data;
    struct async_record *record = object;
    struct device *device = closing->async->device;
    if (record->refused && !device_dead(device)) {
        CUresult result = free_at_last(closing, record);
        if (result != CUDA_SUCCESS && result != CUDA_ERROR_INVALID_VALUE)
            closing->status = device_failed(device, "freeing what was refused to the memory pool for small requests");
    }
    record_free(closing->async, record);
}

vpmm_status async_pool_destroy(struct async_pool *async)
{
    struct closing closing = {async, VPMM_SUCCESS, NULL};
    if (!async->device)
        return closing.status;
    for (int i = 0; i < ASYNC_MAPS; i++) {
        if (async->map[i].records)
            object_map_each(async->map[i].records, end_record, &closing);
        object_map_destroy(async->map[i].records);
        pthread_mutex_destroy(&async->map[i].lock);
    }
    pthread_rwlock_destroy(&async->handing);
    if (closing.stream)
        device_call(async->device, cuStreamDestroy, closing.stream);
    if (async->pool && device_call(async->device, cuMemPoolDestroy, async->pool) != CUDA_SUCCESS)
        closing.status = device_failed(async->device, "destroying the memory pool for small requests");
    return closing.status;
}
