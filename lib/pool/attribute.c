/*
 * attribute.c - what of a pool can be read and changed while it is used: vpmm_pool_set_attribute, _get_attribute, and
 * _set_access.
 *
 * Each attribute is one atomic number, which calls read without a lock whenever they need it. access.h has the rights
 * of other devices.
 */
#include "pool/pool.h"
#include "remap/access.h"
#include "remap/decay.h"

#include <inttypes.h>

#define EACH(X)                                                                                                        \
    X(RELEASE_THRESHOLD)                                                                                               \
    X(DECAY_MS)                                                                                                        \
    X(MAX_MAPPED)                                                                                                      \
    X(REUSE)                                                                                                           \
    X(PEAK_MAPPED)                                                                                                     \
    X(PEAK_LIVE)                                                                                                       \
    X(PEAK_REQUESTED)

static const char *name_of(vpmm_attribute attribute)
{
    switch (attribute) {
#define NAME(attribute)                                                                                                \
    case VPMM_ATTRIBUTE_##attribute:                                                                                   \
        return "VPMM_ATTRIBUTE_" #attribute;
        EACH(NAME)
#undef NAME
    }
    return NULL;
}

static vpmm_status unknown(const char *function, vpmm_attribute attribute)
{
#define LIST(attribute) " VPMM_ATTRIBUTE_" #attribute
    return fail(VPMM_ERROR_INVALID_VALUE, "%s: the attribute is %d; allowed:" EACH(LIST), function, (int)attribute);
#undef LIST
}

/* ---- setting ---- */

/* NULL: the value is allowed. */
static const char *what_is_allowed(vpmm_attribute attribute, uint64_t value)
{
    switch (attribute) {
    case VPMM_ATTRIBUTE_RELEASE_THRESHOLD:
    case VPMM_ATTRIBUTE_MAX_MAPPED:
        return NULL;
    case VPMM_ATTRIBUTE_DECAY_MS:
        return value <= DECAY_MS_MAX || value == VPMM_DECAY_NEVER ? NULL : "0 to 1000000000, or VPMM_DECAY_NEVER";
    case VPMM_ATTRIBUTE_REUSE:
        return value <= VPMM_REUSE_WAIT_HOST
                   ? NULL
                   : "VPMM_REUSE_WAIT_DEVICE (0), VPMM_REUSE_COMPLETED (1) or VPMM_REUSE_WAIT_HOST (2)";
    default:
        return value ? "0, which makes the mark what it marks is now" : NULL;
    }
}

static void set(struct vpmm_pool *pool, vpmm_attribute attribute, uint64_t value)
{
    switch (attribute) {
    case VPMM_ATTRIBUTE_RELEASE_THRESHOLD:
        decay_set_release_threshold(&pool->arena, value);
        break;
    case VPMM_ATTRIBUTE_DECAY_MS:
        decay_set_ms(&pool->arena, value);
        break;
    case VPMM_ATTRIBUTE_MAX_MAPPED:
        store_relaxed_u64(&pool->arena.max_mapped, value);
        break;
    case VPMM_ATTRIBUTE_REUSE:
        store_relaxed_u32(&pool->arena.reuse, (uint32_t)value);
        break;
    case VPMM_ATTRIBUTE_PEAK_MAPPED:
        stats_reset_peak_mapped(&pool->stats);
        break;
    case VPMM_ATTRIBUTE_PEAK_LIVE:
        stats_reset_peak(&pool->stats, PEAK_LIVE);
        break;
    case VPMM_ATTRIBUTE_PEAK_REQUESTED:
        stats_reset_peak(&pool->stats, PEAK_REQUESTED);
        break;
    }
}

vpmm_status vpmm_pool_set_attribute(vpmm_pool *pool, vpmm_attribute attribute, uint64_t value)
{
    static const char function[] = "vpmm_pool_set_attribute";
    vpmm_status status = pool_check(pool, function);
    if (status != VPMM_SUCCESS)
        return status;
    if (!name_of(attribute))
        return unknown(function, attribute);
    const char *allowed = what_is_allowed(attribute, value);
    if (allowed)
        return fail(VPMM_ERROR_INVALID_VALUE, "%s: %s is set to %" PRIu64 "; allowed: %s", function, name_of(attribute),
                    value, allowed);
    set(pool, attribute, value);
    return VPMM_SUCCESS;
}

/* ---- reading ---- */

static uint64_t peak_of(struct vpmm_pool *pool, vpmm_attribute attribute)
{
    vpmm_stats stats;
    stats_note_peaks(&pool->stats);
    stats_read(&pool->stats, &stats);
    return attribute == VPMM_ATTRIBUTE_PEAK_MAPPED ? stats.peak_mapped_bytes
           : attribute == VPMM_ATTRIBUTE_PEAK_LIVE ? stats.peak_live_bytes
                                                   : stats.peak_requested_bytes;
}

static uint64_t get(struct vpmm_pool *pool, vpmm_attribute attribute)
{
    switch (attribute) {
    case VPMM_ATTRIBUTE_RELEASE_THRESHOLD:
        return load_relaxed_u64(&pool->arena.decay.release_threshold);
    case VPMM_ATTRIBUTE_DECAY_MS:
        return load_relaxed_u64(&pool->arena.decay.ms);
    case VPMM_ATTRIBUTE_MAX_MAPPED:
        return load_relaxed_u64(&pool->arena.max_mapped);
    case VPMM_ATTRIBUTE_REUSE:
        return load_relaxed_u32(&pool->arena.reuse);
    default:
        return peak_of(pool, attribute);
    }
}

vpmm_status vpmm_pool_get_attribute(vpmm_pool *pool, vpmm_attribute attribute, uint64_t *value)
{
    static const char function[] = "vpmm_pool_get_attribute";
    vpmm_status status = pool_check_ours(pool, function);
    if (status != VPMM_SUCCESS)
        return status;
    if (!value)
        return fail(VPMM_ERROR_INVALID_VALUE, "%s: the output is NULL", function);
    if (!name_of(attribute))
        return unknown(function, attribute);
    *value = get(pool, attribute);
    return VPMM_SUCCESS;
}

/* ---- the rights of other devices ---- */

static vpmm_status check_peer(struct vpmm_pool *pool, int device)
{
    int devices = 0, can = 0;
    CUdevice peer;
    if (device_call(&pool->device, cuDeviceGetCount, &devices) != CUDA_SUCCESS)
        return device_failed(&pool->device, "counting the devices");
    if (device < 0 || device >= devices || device == pool->config.device)
        return fail(VPMM_ERROR_INVALID_VALUE,
                    "vpmm_pool_set_access: device %d; allowed: another one than the pool's, %d, below %d", device,
                    pool->config.device, devices);
    if (device_call(&pool->device, cuDeviceGet, &peer, device) != CUDA_SUCCESS ||
        device_call(&pool->device, cuDeviceCanAccessPeer, &can, peer, pool->device.id) != CUDA_SUCCESS)
        return device_failed(&pool->device, "looking whether a device can have access to the pool's");
    return can ? VPMM_SUCCESS
               : fail(VPMM_ERROR_NOT_SUPPORTED,
                      "device %d cannot reach the memory of device %d (cuDeviceCanAccessPeer)", device,
                      pool->config.device);
}

static vpmm_status check_access(struct vpmm_pool *pool, int device, CUmemAccess_flags flags)
{
    static const char function[] = "vpmm_pool_set_access";
    vpmm_status status = pool_check(pool, function);
    if (status != VPMM_SUCCESS)
        return status;
    if (flags != CU_MEM_ACCESS_FLAGS_PROT_NONE && flags != CU_MEM_ACCESS_FLAGS_PROT_READ &&
        flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
        return fail(VPMM_ERROR_INVALID_VALUE,
                    "%s: the flags are %d; allowed: CU_MEM_ACCESS_FLAGS_PROT_NONE (0), _READ (1) or _READWRITE (3)",
                    function, (int)flags);
    if (!pool->paged || pool->config.small == VPMM_SMALL_ASYNC)
        return fail(VPMM_ERROR_NOT_SUPPORTED,
                    "%s: some of the pool's memory is the driver's own pool's (VPMM_SMALL=async, or a device without "
                    "pages), whose rights are not changed",
                    function);
    return check_peer(pool, device);
}

vpmm_status vpmm_pool_set_access(vpmm_pool *pool, int device, CUmemAccess_flags flags)
{
    struct device_scope scope;
    vpmm_status status = check_access(pool, device, flags);
    if (status == VPMM_SUCCESS)
        status = device_enter(&pool->device, &scope);
    if (status != VPMM_SUCCESS)
        return status;
    status = access_set(&pool->arena, device, flags);
    device_leave(&pool->device, &scope);
    return status;
}
