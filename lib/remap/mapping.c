#include "remap/mapping.h"

#include "base/clock.h"

static size_t bytes_of(const struct arena *arena, uint64_t pages)
{
    return (size_t)pages << arena->space.units.unit_shift;
}

CUresult mapping_map(struct arena *arena, uint64_t page, const struct extent *extent)
{
    enum { TRIES = 4000, PAUSE_NS = 5000 };
    CUresult result = CUDA_ERROR_UNKNOWN;
    for (int i = 0; result == CUDA_ERROR_UNKNOWN && i < (load_relaxed_u32(&arena->rdma) ? TRIES : 1); i++) {
        if (i)
            clock_spin_ns(PAUSE_NS);
        result = device_call(arena->device, cuMemMap, unit_address(&arena->space.units, page),
                             bytes_of(arena, extent->pages), 0, extent->handle, 0);
    }
    return result;
}

CUresult mapping_allow(struct arena *arena, uint64_t page, uint64_t pages)
{
    CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = arena->device->ordinal},
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    return device_call(arena->device, cuMemSetAccess, unit_address(&arena->space.units, page), bytes_of(arena, pages),
                       &access, 1);
}

CUresult mapping_unmap(struct arena *arena, uint64_t page, uint64_t pages)
{
    return device_call(arena->device, cuMemUnmap, unit_address(&arena->space.units, page), bytes_of(arena, pages));
}
