#include "small.h"

#include "lock.h"

#include <stdlib.h>

struct small_record {
    struct object_key key; /* a: address */
    size_t bytes;
    bool freeing; /* under the map's lock */
    bool refused; /* whose free has it: the driver refused an earlier one */
};

static struct object_key key_of(CUdeviceptr address)
{
    return (struct object_key){address, 0};
}

static unsigned map_of(CUdeviceptr address)
{
    return (unsigned)(address >> 9 ^ address >> 15) % SMALL_MAPS;
}

static vpmm_status make_pool(struct small *small)
{
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                            .handleTypes = CU_MEM_HANDLE_TYPE_NONE,
                            .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = small->device->ordinal}};
    cuuint64_t keep_all = UINT64_MAX;
    if (device_call(small->device, cuMemPoolCreate, &small->pool, &props) != CUDA_SUCCESS) {
        if (small->pool) /* it was made, whatever the driver said */
            small->device->driver.cuMemPoolDestroy(small->pool);
        small->pool = NULL;
        return device_failed(small->device, "creating the memory pool for small requests");
    }
    if (device_call(small->device, cuMemPoolSetAttribute, small->pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep_all) !=
        CUDA_SUCCESS)
        return device_failed(small->device, "setting up the memory pool for small requests");
    return VPMM_SUCCESS;
}

vpmm_status small_init(struct small *small, struct device *device)
{
    small->device = device;
    for (int i = 0; i < SMALL_MAPS; i++) {
        pthread_mutex_init(&small->map[i].lock, NULL);
        small->map[i].live = object_map_create();
        if (!small->map[i].live)
            return fail(VPMM_ERROR_HOST_MEMORY, "no host memory for the records of small allocations");
    }
    return make_pool(small);
}

static void free_record(void *record, void *data)
{
    (void)data;
    free(record);
}

vpmm_status small_destroy(struct small *small)
{
    vpmm_status status = VPMM_SUCCESS;
    if (!small->device)
        return status;
    if (small->pool && device_call(small->device, cuMemPoolDestroy, small->pool) != CUDA_SUCCESS)
        status = device_failed(small->device, "destroying the memory pool for small requests");
    for (int i = 0; i < SMALL_MAPS; i++) {
        if (small->map[i].live) /* what is still live, on a lost device */
            object_map_each(small->map[i].live, free_record, NULL);
        object_map_destroy(small->map[i].live);
        pthread_mutex_destroy(&small->map[i].lock);
    }
    return status;
}

/* The record takes the place of one that is being freed at the same address. */
static bool record_add(struct small *small, struct small_record *record)
{
    unsigned i = map_of(record->key.a);
    lock_take(&small->map[i].lock);
    if (object_map_get(small->map[i].live, record->key))
        object_map_remove(small->map[i].live, record->key);
    bool added = object_map_put(small->map[i].live, record);
    pthread_mutex_unlock(&small->map[i].lock);
    return added;
}

vpmm_status small_malloc(struct small *small, size_t bytes, CUstream stream, CUdeviceptr *out)
{
    struct device *device = small->device;
    struct device_scope scope;
    CUdeviceptr address = 0;
    struct small_record *record = calloc(1, sizeof *record);
    vpmm_status status = record ? device_enter(device, &scope)
                                : fail(VPMM_ERROR_HOST_MEMORY, "no host memory for the record of an allocation");
    if (status != VPMM_SUCCESS) {
        free(record);
        return status;
    }
    if (device_call(device, cuMemAllocFromPoolAsync, &address, bytes, small->pool, stream) != CUDA_SUCCESS) {
        status = device_failed(device, "allocating from the memory pool for small requests");
    } else {
        record->key = key_of(address);
        record->bytes = bytes;
        if (!record_add(small, record))
            status = fail(VPMM_ERROR_HOST_MEMORY, "no host memory for the table of small allocations");
    }
    if (status == VPMM_SUCCESS) {
        fetch_add_relaxed_u64(&small->count, 1);
        stats_add(device->stats, STAT_async_bytes, bytes);
        stats_add(device->stats, STAT_requested_bytes, bytes);
        *out = address;
    } else {
        if (address) /* allocated, whatever went wrong then */
            device->driver.cuMemFreeAsync(address, stream);
        free(record);
    }
    device_leave(device, &scope);
    return status;
}

/* Claims the record for this free. NULL: not live. */
static struct small_record *begin_free(struct small *small, CUdeviceptr address)
{
    unsigned i = map_of(address);
    lock_take(&small->map[i].lock);
    struct small_record *record = object_map_get(small->map[i].live, key_of(address));
    if (record && record->freeing)
        record = NULL;
    if (record)
        record->freeing = true;
    pthread_mutex_unlock(&small->map[i].lock);
    return record;
}

static void end_free(struct small *small, struct small_record *record, bool freed)
{
    unsigned i = map_of(record->key.a);
    lock_take(&small->map[i].lock);
    if (!freed)
        record->freeing = false;
    else if (object_map_get(small->map[i].live, record->key) == record)
        object_map_remove(small->map[i].live, record->key);
    pthread_mutex_unlock(&small->map[i].lock);
}

vpmm_status small_free(struct small *small, CUdeviceptr address, CUstream stream)
{
    struct device *device = small->device;
    struct device_scope scope;
    struct small_record *record = begin_free(small, address);
    if (!record)
        return fail(VPMM_ERROR_INVALID_POINTER, "0x%llx is not the start of a live allocation of this pool",
                    (unsigned long long)address);
    vpmm_status status = device_enter(device, &scope);
    if (status == VPMM_SUCCESS) {
        CUresult result = device_call(device, cuMemFreeAsync, address, stream);
        /* After a refusal, "not an allocation" says that the refused call had taken effect. */
        if (result != CUDA_SUCCESS && !(record->refused && result == CUDA_ERROR_INVALID_VALUE)) {
            status = device_failed(device, "freeing to the memory pool for small requests");
            record->refused = true;
        }
        device_leave(device, &scope);
    }
    if (status == VPMM_SUCCESS) {
        fetch_sub_relaxed_u64(&small->count, 1);
        stats_sub(device->stats, STAT_async_bytes, record->bytes);
        stats_sub(device->stats, STAT_requested_bytes, record->bytes);
    }
    end_free(small, record, status == VPMM_SUCCESS);
    if (status == VPMM_SUCCESS)
        free(record);
    return status;
}

void small_trim(struct small *small)
{
    struct device_scope scope;
    if (!small->pool || device_enter(small->device, &scope) != VPMM_SUCCESS)
        return;
    device_call(small->device, cuMemPoolTrimTo, small->pool, 0); /* a refusal leaves things as they are */
    device_leave(small->device, &scope);
}
