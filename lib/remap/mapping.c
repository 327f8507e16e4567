#include "remap/mapping.h"

#include "base/clock.h"

/* What the driver answers to a call that changes mappings. Those who wait for a builder see it under way (turn.h). */
#define CALL(arena, function, ...)                                                                                     \
    (turn_call_begins(&(arena)->turn), call_has_ended(arena, device_call((arena)->device, function, __VA_ARGS__)))

static CUresult call_has_ended(struct arena *arena, CUresult result)
{
    turn_call_ends(&arena->turn);
    return result;
}

static size_t bytes_of(const struct arena *arena, uint64_t pages)
{
    return (size_t)pages << arena->space.units.unit_shift;
}

static CUmemAllocationProp properties(const struct arena *arena, bool exportable, bool rdma)
{
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = arena->device->ordinal}};
    if (exportable)
        prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    if (rdma)
        prop.allocFlags.gpuDirectRDMACapable = 1;
    return prop;
}

static bool refuses_property(CUresult result)
{
    return result == CUDA_ERROR_NOT_SUPPORTED || result == CUDA_ERROR_NOT_PERMITTED ||
           result == CUDA_ERROR_INVALID_VALUE || result == CUDA_ERROR_INVALID_DEVICE;
}

static CUresult try_create(struct arena *arena, struct extent *extent, bool exportable, bool rdma)
{
    CUmemAllocationProp prop = properties(arena, exportable, rdma);
    return CALL(arena, cuMemCreate, &extent->handle, bytes_of(arena, extent->pages), &prop, 0);
}

/*
 * A device may claim a property of handles by its attributes and refuse it all the same (in some virtual machines). The
 * first handle shows it; later ones are all alike. What is given up is what it was made without, so a refusal of
 * another kind changes nothing; of two first ones at once each finds out by itself.
 */
CUresult mapping_create(struct arena *arena, struct extent *extent)
{
    bool first = !stats_sum(arena->stats, STAT_extents_created);
    bool exportable = load_relaxed_u32(&arena->exportable), rdma = load_relaxed_u32(&arena->rdma);
    CUresult result = try_create(arena, extent, exportable, rdma);
    if (first && rdma && !extent->handle && refuses_property(result))
        result = try_create(arena, extent, exportable, rdma = false);
    if (first && exportable && !extent->handle && refuses_property(result))
        result = try_create(arena, extent, exportable = false, rdma = false);
    if (result == CUDA_SUCCESS && !exportable)
        store_relaxed_u32(&arena->exportable, 0);
    if (result == CUDA_SUCCESS && !rdma)
        store_relaxed_u32(&arena->rdma, 0);
    return result;
}

CUresult mapping_map(struct arena *arena, uint64_t page, const struct extent *extent)
{
    enum { TRIES = 4000, PAUSE_NS = 5000 };
    CUresult result = CUDA_ERROR_UNKNOWN;
    for (int i = 0; result == CUDA_ERROR_UNKNOWN && i < (load_relaxed_u32(&arena->rdma) ? TRIES : 1); i++) {
        if (i)
            clock_spin_ns(PAUSE_NS);
        result = CALL(arena, cuMemMap, unit_address(&arena->space.units, page), bytes_of(arena, extent->pages), 0,
                      extent->handle, 0);
    }
    return result;
}

CUresult mapping_allow(struct arena *arena, uint64_t page, uint64_t pages, const struct access_list *list)
{
    return CALL(arena, cuMemSetAccess, unit_address(&arena->space.units, page), bytes_of(arena, pages), list->device,
                list->devices);
}

CUresult mapping_unmap(struct arena *arena, uint64_t page, uint64_t pages)
{
    return CALL(arena, cuMemUnmap, unit_address(&arena->space.units, page), bytes_of(arena, pages));
}

CUresult mapping_release(struct arena *arena, struct extent *extent)
{
    CUresult result = CALL(arena, cuMemRelease, extent->handle);
    if (result == CUDA_ERROR_INVALID_VALUE && extent->release_refused)
        result = CUDA_SUCCESS;
    extent->release_refused = result != CUDA_SUCCESS;
    return result;
}
