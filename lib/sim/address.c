/*
 * address.c - reserved ranges and what is mapped into them.
 *
 * Reservations are an array by address. The page table has two levels: a leaf for each 16 GiB of addresses that ever
 * had a mapping, with a pointer for each page. Finding a mapping is two loads; a sweep over an empty range goes by
 * leaves, so that unmapping 8 TiB of nothing is quick.
 */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

#define LEAF_BYTES ((CUdeviceptr)SIM_LEAF_ENTRIES << SIM_PAGE_SHIFT)

/* ---- the page table ---- */

struct sim_mapping *sim_mapping_at(vpmm_sim *sim, CUdeviceptr address)
{
    size_t page = (size_t)(address >> SIM_PAGE_SHIFT);
    size_t leaf = page >> SIM_LEAF_BITS;
    if (leaf >= SIM_LEAVES || !sim->leaves[leaf])
        return NULL;
    return sim->leaves[leaf][page & (SIM_LEAF_ENTRIES - 1)];
}

static struct sim_mapping **entry_of(vpmm_sim *sim, CUdeviceptr address)
{
    size_t page = (size_t)(address >> SIM_PAGE_SHIFT);
    struct sim_mapping ***leaf = &sim->leaves[page >> SIM_LEAF_BITS];
    if (!*leaf)
        *leaf = calloc(SIM_LEAF_ENTRIES, sizeof **leaf);
    return *leaf ? &(*leaf)[page & (SIM_LEAF_ENTRIES - 1)] : NULL;
}

/* The first mapping that has a page in [from, to), or NULL. */
static struct sim_mapping *first_mapping(vpmm_sim *sim, CUdeviceptr from, CUdeviceptr to)
{
    while (from < to) {
        if (!sim->leaves[from / LEAF_BYTES]) {
            from = (from / LEAF_BYTES + 1) * LEAF_BYTES;
            continue;
        }
        struct sim_mapping *mapping = sim_mapping_at(sim, from);
        if (mapping)
            return mapping;
        from += SIM_PAGE;
    }
    return NULL;
}

/* Leaves that lie wholly in a range that is given back. */
static void drop_leaves(vpmm_sim *sim, CUdeviceptr from, CUdeviceptr to)
{
    for (size_t leaf = (from + LEAF_BYTES - 1) / LEAF_BYTES; (leaf + 1) * LEAF_BYTES <= to; leaf++) {
        free(sim->leaves[leaf]);
        sim->leaves[leaf] = NULL;
    }
}

/* ---- reservations ---- */

/* The index of the first reservation that ends after the address. */
static size_t reservation_after(vpmm_sim *sim, CUdeviceptr address)
{
    size_t low = 0, high = sim->reservation_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        const struct sim_reservation *r = &sim->reservations[middle];
        if (r->base + r->size <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The reservation that holds the whole range, or NULL. */
static struct sim_reservation *reservation_of(vpmm_sim *sim, CUdeviceptr base, size_t size)
{
    size_t at = reservation_after(sim, base);
    if (at == sim->reservation_count)
        return NULL;
    struct sim_reservation *r = &sim->reservations[at];
    return base >= r->base && size <= r->size && base - r->base <= r->size - size ? r : NULL;
}

/* First fit in [from, to). 0: no room. */
static CUdeviceptr find_gap(vpmm_sim *sim, CUdeviceptr from, CUdeviceptr to, size_t size, size_t alignment)
{
    for (size_t at = reservation_after(sim, from);; at++) {
        CUdeviceptr base = (from + alignment - 1) & ~(CUdeviceptr)(alignment - 1);
        CUdeviceptr end = at < sim->reservation_count ? sim->reservations[at].base : to;
        if (base >= to || size > to - base)
            return 0;
        if (base + size <= end)
            return base;
        if (at == sim->reservation_count)
            return 0;
        from = sim->reservations[at].base + sim->reservations[at].size;
    }
}

static bool insert_reservation(vpmm_sim *sim, struct sim_reservation made)
{
    if (sim->reservation_count == sim->reservation_capacity) {
        size_t capacity = sim->reservation_capacity ? 2 * sim->reservation_capacity : 16;
        struct sim_reservation *grown = realloc(sim->reservations, capacity * sizeof *grown);
        if (!grown)
            return false;
        sim->reservations = grown;
        sim->reservation_capacity = capacity;
    }
    size_t at = reservation_after(sim, made.base);
    struct sim_reservation *r = &sim->reservations[at];
    memmove(r + 1, r, (sim->reservation_count - at) * sizeof *r);
    *r = made;
    sim->reservation_count++;
    return true;
}

static CUresult sim_reserve(vpmm_sim *sim, size_t size, size_t alignment, CUdeviceptr wish, bool internal,
                            CUdeviceptr *base)
{
    CUdeviceptr from = internal ? SIM_PLAIN_BASE : SIM_VA_BASE;
    CUdeviceptr to = internal ? SIM_VA_BASE : SIM_VA_BASE + sim->config.va_bytes;
    bool fits = wish >= from && wish < to && size <= to - wish;
    CUdeviceptr found = fits ? find_gap(sim, wish, to, size, alignment) : 0;
    if (found == 0 || found != wish)
        found = find_gap(sim, from, to, size, alignment);
    if (found == 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (!insert_reservation(sim, (struct sim_reservation){.base = found, .size = size, .internal = internal}))
        return CUDA_ERROR_OUT_OF_MEMORY;
    sim->reserved_bytes += internal ? 0 : size;
    *base = found;
    return CUDA_SUCCESS;
}

static void sim_unreserve(vpmm_sim *sim, CUdeviceptr base)
{
    size_t at = reservation_after(sim, base);
    struct sim_reservation *r = &sim->reservations[at];
    sim->reserved_bytes -= r->internal ? 0 : r->size;
    drop_leaves(sim, r->base, r->base + r->size);
    memmove(r, r + 1, (sim->reservation_count - at - 1) * sizeof *r);
    sim->reservation_count--;
}

/* ---- mappings ---- */

static void set_entries(vpmm_sim *sim, const struct sim_mapping *where, struct sim_mapping *what)
{
    for (CUdeviceptr at = where->base; at < where->base + where->size; at += SIM_PAGE)
        *entry_of(sim, at) = what;
}

/* The leaves of the range exist and it is free. */
static bool can_map(vpmm_sim *sim, CUdeviceptr base, size_t size)
{
    for (CUdeviceptr at = base; at < base + size; at += SIM_PAGE) {
        struct sim_mapping **entry = entry_of(sim, at);
        if (!entry || *entry)
            return false;
    }
    return true;
}

struct sim_mapping *sim_map(vpmm_sim *sim, CUdeviceptr base, struct sim_handle *handle)
{
    size_t size = sim_handle_bytes(handle);
    struct sim_reservation *reservation = reservation_of(sim, base, size);
    if (!reservation || !can_map(sim, base, size))
        return NULL;
    struct sim_mapping *mapping = calloc(1, sizeof *mapping);
    if (!mapping)
        return NULL;
    mapping->base = base;
    mapping->size = size;
    mapping->handle = handle;
    mapping->serial = ++sim->mapping_serial;
    set_entries(sim, mapping, mapping);
    handle->mappings++;
    reservation->mappings++;
    return mapping;
}

void sim_unmap(vpmm_sim *sim, struct sim_mapping *mapping)
{
    struct sim_handle *handle = mapping->handle;
    set_entries(sim, mapping, NULL);
    reservation_of(sim, mapping->base, mapping->size)->mappings--;
    handle->mappings--;
    free(mapping);
    sim_handle_drop(sim, handle);
}

CUresult sim_internal_alloc(vpmm_sim *sim, int device, size_t bytes, enum sim_owner owner, struct sim_mapping **out)
{
    struct sim_handle *handle;
    CUdeviceptr base;
    CUresult result = sim_handle_make(sim, device, bytes, &handle);
    if (result != CUDA_SUCCESS)
        return result;
    result = sim_reserve(sim, bytes, SIM_PAGE, 0, true, &base);
    if (result != CUDA_SUCCESS)
        goto drop_handle;
    *out = sim_map(sim, base, handle);
    if (!*out)
        goto unreserve;
    (*out)->owner = owner;
    (*out)->access[device] = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return CUDA_SUCCESS;
unreserve:
    sim_unreserve(sim, base);
    result = CUDA_ERROR_OUT_OF_MEMORY;
drop_handle:
    sim_handle_drop(sim, handle);
    return result;
}

void sim_internal_free(vpmm_sim *sim, struct sim_mapping *mapping)
{
    CUdeviceptr base = mapping->base;
    sim_unmap(sim, mapping);
    sim_unreserve(sim, base);
}

/* ---- the entries ---- */

CUresult sim_cuMemAddressReserve(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr,
                                 unsigned long long flags)
{
    vpmm_sim *sim = sim_self();
    if (!sim->config.vmm)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (!ptr || flags || size == 0 || size % SIM_PAGE || (alignment & (alignment - 1)))
        return CUDA_ERROR_INVALID_VALUE;
    return sim_reserve(sim, size, alignment < SIM_PAGE ? SIM_PAGE : alignment, addr, false, ptr);
}

CUresult sim_cuMemAddressFree(CUdeviceptr ptr, size_t size)
{
    vpmm_sim *sim = sim_self();
    if (!sim->config.vmm)
        return CUDA_ERROR_NOT_SUPPORTED;
    struct sim_reservation *r = reservation_of(sim, ptr, size);
    if (!r || r->internal || r->base != ptr || r->size != size || r->mappings)
        return CUDA_ERROR_INVALID_VALUE;
    sim_unreserve(sim, ptr);
    return CUDA_SUCCESS;
}

static bool program_range(vpmm_sim *sim, CUdeviceptr ptr, size_t size)
{
    if (size == 0 || size % SIM_PAGE || ptr % SIM_PAGE)
        return false;
    struct sim_reservation *r = reservation_of(sim, ptr, size);
    return r && !r->internal;
}

/* A mapping is unmapped whole or not at all; nothing is done if one sticks out of the range. */
CUresult sim_cuMemUnmap(CUdeviceptr ptr, size_t size)
{
    vpmm_sim *sim = sim_self();
    CUdeviceptr end = ptr + size;
    struct sim_mapping *mapping;
    if (!sim->config.vmm)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (!program_range(sim, ptr, size))
        return CUDA_ERROR_INVALID_VALUE;
    for (CUdeviceptr at = ptr; (mapping = first_mapping(sim, at, end)); at = mapping->base + mapping->size)
        if (mapping->base < ptr || mapping->base + mapping->size > end)
            return CUDA_ERROR_INVALID_VALUE;
    while ((mapping = first_mapping(sim, ptr, end))) {
        ptr = mapping->base + mapping->size;
        sim_charge(sim, sim_price_unmap(mapping->size));
        sim_race_unmap(sim, mapping);
        sim_unmap(sim, mapping);
    }
    return CUDA_SUCCESS;
}

static bool wholly_mapped(vpmm_sim *sim, CUdeviceptr ptr, CUdeviceptr end)
{
    while (ptr < end) {
        struct sim_mapping *mapping = sim_mapping_at(sim, ptr);
        if (!mapping || mapping->base != ptr || mapping->size > end - ptr)
            return false;
        ptr += mapping->size;
    }
    return true;
}

static bool access_valid(vpmm_sim *sim, const CUmemAccessDesc *desc, const struct sim_mapping *mapping)
{
    return desc->location.type == CU_MEM_LOCATION_TYPE_DEVICE && sim_device_valid(sim, desc->location.id) &&
           (sim->config.peers || desc->location.id == mapping->handle->device) &&
           (desc->flags == CU_MEM_ACCESS_FLAGS_PROT_NONE || desc->flags == CU_MEM_ACCESS_FLAGS_PROT_READ ||
            desc->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
}

/* Asking again for a right that is there already takes nothing away. */
static void set_access(vpmm_sim *sim, struct sim_mapping *mapping, int device, CUmemAccess_flags flags)
{
    uint8_t *now = &mapping->access[device];
    if (flags < *now)
        sim_race_revoke(sim, mapping, device, flags);
    for (uint8_t right = *now + 1; right <= flags; right++)
        if (right != 2)
            mapping->since[device][right == CU_MEM_ACCESS_FLAGS_PROT_READWRITE] = sim->host_time;
    *now = (uint8_t)flags;
}

/* Of each mapping of the range: they may be of several devices. */
static bool all_access_valid(vpmm_sim *sim, CUdeviceptr ptr, CUdeviceptr end, const CUmemAccessDesc *desc, size_t count)
{
    while (ptr < end) {
        const struct sim_mapping *mapping = sim_mapping_at(sim, ptr);
        for (size_t i = 0; i < count; i++)
            if (!access_valid(sim, &desc[i], mapping))
                return false;
        ptr += mapping->size;
    }
    return true;
}

CUresult sim_cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count)
{
    vpmm_sim *sim = sim_self();
    if (!sim->config.vmm)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (!desc || count == 0 || !program_range(sim, ptr, size) || !wholly_mapped(sim, ptr, ptr + size) ||
        !all_access_valid(sim, ptr, ptr + size, desc, count))
        return CUDA_ERROR_INVALID_VALUE;
    sim->host_time++;
    for (CUdeviceptr at = ptr; at < ptr + size;) {
        struct sim_mapping *mapping = sim_mapping_at(sim, at);
        sim_charge(sim, sim_price_access(mapping->size));
        for (size_t i = 0; i < count; i++)
            set_access(sim, mapping, desc[i].location.id, desc[i].flags);
        at += mapping->size;
    }
    return CUDA_SUCCESS;
}

CUmemAccess_flags vpmm_sim_access(vpmm_sim *sim, int device, CUdeviceptr address)
{
    pthread_mutex_lock(&sim->lock);
    const struct sim_mapping *mapping = sim_mapping_at(sim, address);
    bool has_any = mapping && sim_device_valid(sim, device);
    CUmemAccess_flags flags = has_any ? mapping->access[device] : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    pthread_mutex_unlock(&sim->lock);
    return flags;
}
