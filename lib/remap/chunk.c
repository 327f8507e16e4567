#include "remap/chunk.h"

#include "base/lock.h"
#include "remap/cut.h"
#include "remap/hole.h"

/* Under the plan lock. The subpages of a chunk are numbered as its pages are, so both get it or neither. */
static vpmm_status add_chunk(struct arena *arena, CUdeviceptr base)
{
    void *pages = NULL, *subpages = NULL;
    vpmm_status status = units_table_new(&arena->space.units, &pages);
    if (status == VPMM_SUCCESS && cut_takes_chunk(arena))
        status = units_table_new(&arena->cut.units, &subpages);
    if (status != VPMM_SUCCESS) {
        units_table_free(&arena->space.units, pages);
        return status;
    }
    if (subpages)
        units_add_chunk(&arena->cut.units, base, subpages);
    hole_add(arena, units_add_chunk(&arena->space.units, base, pages), arena->space.units.chunk_units);
    return VPMM_SUCCESS;
}

static vpmm_status reserve_failed(const struct arena *arena, size_t bytes)
{
    vpmm_status status = device_failed(arena->device, "reserving address space");
    if (status != VPMM_ERROR_OUT_OF_MEMORY)
        return status;
    return fail(VPMM_ERROR_OUT_OF_ADDRESS_SPACE,
                "cuMemAddressReserve refused another %zu bytes: the device's "
                "addresses are exhausted, or VPMM_VA_SIZE is too large",
                bytes);
}

/* Under the reserve lock. */
static vpmm_status reserve_one(struct arena *arena)
{
    CUdeviceptr base = 0;
    size_t bytes = (size_t)arena->space.units.chunk_units << arena->space.units.unit_shift;
    size_t alignment = arena->space.units.unit_size * arena->policy.step;
    vpmm_status status = VPMM_SUCCESS;
    if (device_call(arena->device, cuMemAddressReserve, &base, bytes, alignment, 0, 0) != CUDA_SUCCESS) {
        status = reserve_failed(arena, bytes);
    } else {
        lock_take(&arena->plan_lock);
        status = add_chunk(arena, base);
        if (status == VPMM_SUCCESS)
            stats_add(arena->stats, STAT_reserved_bytes, bytes);
        pthread_mutex_unlock(&arena->plan_lock);
    }
    if (status != VPMM_SUCCESS && base)
        arena->device->driver.cuMemAddressFree(base, bytes);
    return status;
}

vpmm_status chunk_reserve(struct arena *arena, uint32_t seen)
{
    struct device_scope scope;
    vpmm_status status = device_enter(arena->device, &scope);
    if (status != VPMM_SUCCESS)
        return status;
    lock_take(&arena->reserve_lock);
    if (load_acquire_u32(&arena->space.units.chunks) == seen)
        status = reserve_one(arena);
    pthread_mutex_unlock(&arena->reserve_lock);
    device_leave(arena->device, &scope);
    return status;
}
