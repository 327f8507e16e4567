/*
 * questions.c - what the program asks, answered of memory of both: the driver first, and then what it cannot know.
 *
 *   cuMemGetInfo     free is what the driver has free, and what vpmm has: mapped pages without anything live. A program
 *                    that looks how much is left sees what it could have of vpmm's memory. Of the driver's it may be
 *                    less: free pages of a handle that has live ones too are not given back for it
 *   addresses        the driver sees reserved address space and the mapping of a handle; here it is the allocation. Own
 *                    memory is of the default pool, as the program sees it; of cuMemAlloc, in the primary context. All
 *                    else is the driver's answer, and true: whether the memory may be exported, by IPC or as a handle,
 *                    or be registered for RDMA, is as for the handles that it lies in. So is the buffer's id, which
 *                    allocations of one handle share, and a later one at the same address has again
 *   default pool     used and reserved are the sums of both, which for the marks is the most that it can have been.
 *                    What is set there counts for vpmm as well: the release threshold, marks set back, trims, and
 *                    whether a stream may be made to wait for another one (internal dependencies). What else may be
 *                    used again is vpmm's own promise, and no setting's
 */
#include "book.h"
#include "real.h"
#include "served.h"

#include <string.h>

/* In the lanes. */
static bool stats_of(const struct served *served, vpmm_stats *stats)
{
    return served && vpmm_stats_get(served->pool, stats) == VPMM_SUCCESS;
}

CUresult preload_get_info(size_t *free, size_t *total)
{
    CUdevice device;
    vpmm_stats stats;
    const vpmm_driver *driver = vpmm_driver_cuda();
    CUresult result = REAL(get_info, free, total);
    if (result != CUDA_SUCCESS || !driver || driver->cuCtxGetDevice(&device) != CUDA_SUCCESS)
        return result;
    lane_enter();
    if (stats_of(served_on(device), &stats) && stats.mapped_bytes > stats.live_bytes && *free < *total) {
        size_t more = stats.mapped_bytes - stats.live_bytes;
        *free += more < *total - *free ? more : *total - *free;
    }
    lane_leave();
    return result;
}

/* ---- addresses ---- */

CUresult preload_get_address_range(CUdeviceptr *start, size_t *bytes, CUdeviceptr address)
{
    uint64_t begins;
    struct allocation allocation;
    if (!book_find(address, &begins, &allocation))
        return REAL(get_address_range, start, bytes, address);
    if (start)
        *start = begins;
    if (bytes)
        *bytes = allocation.bytes;
    return CUDA_SUCCESS;
}

static void correct(CUpointer_attribute attribute, uint64_t start, struct allocation allocation, void *data)
{
    lane_enter();
    struct served *served = served_on((int)allocation.device);
    CUdeviceptr begins = start;
    size_t bytes = allocation.bytes;
    CUmemoryPool pool = served && !allocation.at_once ? served->standard : NULL;
    CUcontext context = served && allocation.at_once ? served->primary : NULL;
    lane_leave();
    if (attribute == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR)
        memcpy(data, &begins, sizeof begins);
    else if (attribute == CU_POINTER_ATTRIBUTE_RANGE_SIZE)
        memcpy(data, &bytes, sizeof bytes);
    else if (attribute == CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE)
        memcpy(data, &pool, sizeof pool);
    else if (attribute == CU_POINTER_ATTRIBUTE_CONTEXT)
        memcpy(data, &context, sizeof context);
}

CUresult preload_pointer_attribute(void *data, CUpointer_attribute attribute, CUdeviceptr address)
{
    uint64_t start;
    struct allocation allocation;
    CUresult result = REAL(pointer_attribute, data, attribute, address);
    if (result == CUDA_SUCCESS && book_find(address, &start, &allocation))
        correct(attribute, start, allocation, data);
    return result;
}

CUresult preload_pointer_attributes(unsigned int count, CUpointer_attribute *attributes, void **data,
                                    CUdeviceptr address)
{
    uint64_t start;
    struct allocation allocation;
    CUresult result = REAL(pointer_attributes, count, attributes, data, address);
    if (result != CUDA_SUCCESS || !book_find(address, &start, &allocation))
        return result;
    for (unsigned int i = 0; i < count; i++)
        correct(attributes[i], start, allocation, data[i]);
    return result;
}

/* ---- the default pool ---- */

/* As the driver counts: what is used are lengths before rounding; not what was asked for at once. */
static uint64_t used(const struct served *served, const vpmm_stats *stats)
{
    int64_t beyond = lane_beyond(served->device), bytes = (int64_t)stats->requested_bytes - beyond;
    return bytes > 0 ? (uint64_t)bytes : 0; /* other threads' requests change the one and then the other */
}

/* With what is live in a pool of the driver's own, for small requests; what that keeps besides is not said. */
static uint64_t reserved(const vpmm_stats *stats)
{
    return stats->mapped_bytes + stats->quarantined_bytes + stats->async_bytes;
}

static uint64_t greater(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* A mark is not below its level, though vpmm's peaks are inexact, and leave out what is quarantined. */
static uint64_t ours_of(CUmemPool_attribute attribute, const struct served *served, const vpmm_stats *stats)
{
    switch ((int)attribute) {
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
        return reserved(stats);
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
        return greater(stats->peak_mapped_bytes, reserved(stats));
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
        return used(served, stats);
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        return greater(stats->peak_requested_bytes, used(served, stats));
    default:
        return 0;
    }
}

CUresult preload_pool_get_attribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
    vpmm_stats stats;
    cuuint64_t sum;
    CUresult result = REAL(pool_get_attribute, pool, attribute, value);
    if (result != CUDA_SUCCESS)
        return result;
    lane_enter();
    const struct served *served = served_by_standard(pool);
    if (stats_of(served, &stats) && ours_of(attribute, served, &stats)) {
        memcpy(&sum, value, sizeof sum);
        sum += ours_of(attribute, served, &stats);
        memcpy(value, &sum, sizeof sum);
    }
    lane_leave();
    return result;
}

/* In the lanes. A value is of 64 bits where it is a number, and an int where it is a choice. */
static void set_ours(const struct served *served, CUmemPool_attribute attribute, const void *value)
{
    cuuint64_t number = 0;
    if (attribute == CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES) {
        int may_wait;
        memcpy(&may_wait, value, sizeof may_wait);
        served_set_reuse(served, may_wait);
    } else if (attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) {
        memcpy(&number, value, sizeof number);
        served_set_threshold(served, number);
    } else if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH) {
        vpmm_pool_set_attribute(served->pool, VPMM_ATTRIBUTE_PEAK_MAPPED, 0);
    } else if (attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH) {
        vpmm_pool_set_attribute(served->pool, VPMM_ATTRIBUTE_PEAK_REQUESTED, 0);
    }
}

CUresult preload_pool_set_attribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
    CUresult result = REAL(pool_set_attribute, pool, attribute, value);
    if (result != CUDA_SUCCESS)
        return result;
    lane_enter();
    struct served *served = served_by_standard(pool);
    if (served)
        set_ours(served, attribute, value);
    lane_leave();
    return result;
}

/* Nothing is waited for where nothing is to go, as the driver's own waits for nothing. */
static void trim_ours(const struct served *served, size_t keep)
{
    vpmm_stats stats;
    if (vpmm_stats_get(served->pool, &stats) != VPMM_SUCCESS)
        return;
    bool has_small = served->small_async || !stats.reserved_bytes; /* a pool without pages: all requests are small */
    if (stats.mapped_bytes > keep || (!keep && has_small))
        vpmm_trim(served->pool, keep, NULL);
}

/* What the driver's memory leaves to vpmm's of what is to be kept. */
static size_t left_by_theirs(CUmemoryPool pool, size_t keep)
{
    cuuint64_t theirs = 0;
    if (REAL(pool_get_attribute, pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &theirs) != CUDA_SUCCESS)
        return keep;
    return theirs < keep ? keep - (size_t)theirs : 0;
}

CUresult preload_pool_trim(CUmemoryPool pool, size_t keep)
{
    CUresult result = REAL(pool_trim, pool, keep);
    if (result != CUDA_SUCCESS)
        return result;
    lane_enter();
    struct served *served = served_by_standard(pool);
    if (served)
        trim_ours(served, left_by_theirs(pool, keep));
    lane_leave();
    return result;
}
