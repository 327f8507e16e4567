#include "driver/kept_pools.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

struct record {
    CUmemoryPool pool;
    CUmemPoolProps props;
    struct record *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct record *in_use, *kept; /* under the lock */

static void put(struct record **list, struct record *record)
{
    pthread_mutex_lock(&lock);
    record->next = *list;
    *list = record;
    pthread_mutex_unlock(&lock);
}

/* The first of the list that has the pool, or that was made with these properties. NULL: none. */
static struct record *take(struct record **list, CUmemoryPool pool, const CUmemPoolProps *props)
{
    pthread_mutex_lock(&lock);
    struct record **at = list;
    while (*at && (props ? memcmp(&(*at)->props, props, sizeof *props) != 0 : (*at)->pool != pool))
        at = &(*at)->next;
    struct record *found = *at;
    if (found)
        *at = found->next;
    pthread_mutex_unlock(&lock);
    return found;
}

static struct record *take_all(struct record **list)
{
    pthread_mutex_lock(&lock);
    struct record *all = *list;
    *list = NULL;
    pthread_mutex_unlock(&lock);
    return all;
}

static CUresult create_recorded(const vpmm_driver *driver, CUmemoryPool *pool, const CUmemPoolProps *props)
{
    struct record *record = malloc(sizeof *record);
    if (!record)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = driver->cuMemPoolCreate(pool, props);
    if (result != CUDA_SUCCESS) {
        free(record);
        return result;
    }
    free(take(&kept, *pool, NULL)); /* one of that handle is no more: the driver gives it to another pool */
    *record = (struct record){.pool = *pool, .props = *props};
    put(&in_use, record);
    return CUDA_SUCCESS;
}

/* What the driver answers for, and how much. False: it would not say. */
static bool reserved_bytes(const vpmm_driver *driver, CUmemoryPool pool, cuuint64_t *bytes)
{
    return driver->cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, bytes) == CUDA_SUCCESS;
}

CUresult kept_pools_create(const vpmm_driver *driver, CUmemoryPool *pool, const CUmemPoolProps *props)
{
    cuuint64_t reserved;
    struct record *record;
    if (!pool || !props || props->handleTypes != CU_MEM_HANDLE_TYPE_NONE)
        return driver->cuMemPoolCreate(pool, props);
    while ((record = take(&kept, NULL, props)) && !reserved_bytes(driver, record->pool, &reserved))
        free(record); /* the driver knows it no more, as after a reset of the device */
    if (!record)
        return create_recorded(driver, pool, props);
    *pool = record->pool;
    put(&in_use, record);
    return CUDA_SUCCESS;
}

/* As a new pool has them, so that the driver gives back what it reserves, and the next owner finds nothing set. */
static void reset_attributes(const vpmm_driver *driver, CUmemoryPool pool)
{
    static const CUmemPool_attribute reuse[] = {CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES,
                                                CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC,
                                                CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES};
    static const CUmemPool_attribute zero[] = {CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH,
                                               CU_MEMPOOL_ATTR_USED_MEM_HIGH};
    cuuint64_t none = 0;
    int yes = 1;
    for (size_t i = 0; i < sizeof zero / sizeof zero[0]; i++)
        driver->cuMemPoolSetAttribute(pool, zero[i], &none);
    for (size_t i = 0; i < sizeof reuse / sizeof reuse[0]; i++)
        driver->cuMemPoolSetAttribute(pool, reuse[i], &yes);
}

/* False, too, where the driver would not say. */
static bool is_empty(const vpmm_driver *driver, CUmemoryPool pool)
{
    cuuint64_t reserved;
    driver->cuMemPoolTrimTo(pool, 0);
    return reserved_bytes(driver, pool, &reserved) && reserved == 0;
}

/* The record is the caller's alone, and goes with the pool. What the driver will not destroy goes to `refused`. */
static CUresult destroy_or_keep(const vpmm_driver *driver, struct record *record, struct record **refused)
{
    if (!is_empty(driver, record->pool)) {
        reset_attributes(driver, record->pool);
        put(&kept, record);
        return CUDA_SUCCESS;
    }
    CUresult result = driver->cuMemPoolDestroy(record->pool);
    if (result == CUDA_SUCCESS)
        free(record);
    else
        put(refused, record);
    return result;
}

static void look_at_kept(const vpmm_driver *driver)
{
    struct record *next;
    for (struct record *record = take_all(&kept); record; record = next) {
        next = record->next;
        destroy_or_keep(driver, record, &kept);
    }
}

CUresult kept_pools_destroy(const vpmm_driver *driver, CUmemoryPool pool)
{
    struct record *record = take(&in_use, pool, NULL);
    if (!record)
        return driver->cuMemPoolDestroy(pool);
    look_at_kept(driver);
    return destroy_or_keep(driver, record, &in_use);
}
