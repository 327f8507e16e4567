/*
 * physical.c - the pages of each device, and the handles that hold them.
 *
 * A handle takes any pages that are free: as on a GPU, physical memory does not fragment. Pages come off a stack, or
 * fresh from the end, so neighbours in a handle are mostly neighbours in the memfd too. A page that was written is
 * punched out of the file when it is freed: it costs nothing again, and the next owner finds zeroes, not old data that
 * happens to be right.
 *
 * A handle that is exported is a file with its name in it, for this process alone. Unlike the driver's, such a file
 * does not keep the memory: it is imported while a handle or a mapping of the exporter's does.
 */
#include "internal.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

/* Never the place of a standard stream that the program was started without: what it writes there would come here. */
static int make_memory(const char *name)
{
    int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd < 0 || fd > STDERR_FILENO)
        return fd;
    int further = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    close(fd);
    return further;
}

CUresult sim_device_open(struct sim_device *device, size_t bytes)
{
    size_t pages = bytes / SIM_PAGE;
    *device = (struct sim_device){.fd = make_memory("vpmm simulated GPU"), .bytes = MAP_FAILED};
    device->pages = (uint32_t)pages;
    device->free_pages = malloc(pages * sizeof *device->free_pages);
    device->touched = calloc(pages, sizeof *device->touched);
    device->shadow = calloc(pages, sizeof *device->shadow);
    if (!device->free_pages || !device->touched || !device->shadow)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (device->fd < 0 || ftruncate(device->fd, (off_t)(pages * SIM_PAGE)) != 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    device->bytes = mmap(NULL, pages * SIM_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, device->fd, 0);
    return device->bytes == MAP_FAILED ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
}

void sim_device_close(struct sim_device *device)
{
    if (device->shadow)
        for (uint32_t page = 0; page < device->pages; page++) {
            sim_shadow_clear(&device->shadow[page]);
            free(device->shadow[page].uses);
        }
    if (device->bytes && device->bytes != MAP_FAILED)
        munmap(device->bytes, device->pages * SIM_PAGE);
    if (device->fd >= 0)
        close(device->fd);
    free(device->free_pages);
    free(device->touched);
    free(device->shadow);
}

size_t sim_handle_bytes(const struct sim_handle *handle)
{
    return handle->page_count * SIM_PAGE;
}

static void take_pages(struct sim_device *device, struct sim_handle *handle)
{
    for (uint32_t i = 0; i < handle->page_count; i++)
        handle->pages[i] = device->free_count ? device->free_pages[--device->free_count] : device->pages_fresh++;
    device->pages_used += handle->page_count;
}

/* Pushed in reverse, so that the next handle finds them in order. */
static void give_pages(struct sim_device *device, const struct sim_handle *handle)
{
    for (uint32_t i = handle->page_count; i-- > 0;) {
        uint32_t page = handle->pages[i];
        if (device->touched[page])
            fallocate(device->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)(page * SIM_PAGE), SIM_PAGE);
        device->touched[page] = 0;
        sim_shadow_clear(&device->shadow[page]);
        device->free_pages[device->free_count++] = page;
    }
    device->pages_used -= handle->page_count;
}

CUresult sim_handle_make(vpmm_sim *sim, int device, size_t bytes, struct sim_handle **out)
{
    struct sim_device *d = &sim->devices[device];
    size_t pages = bytes / SIM_PAGE;
    if (pages > d->pages - d->pages_used)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct sim_handle *handle = calloc(1, sizeof *handle + pages * sizeof *handle->pages);
    if (!handle)
        return CUDA_ERROR_OUT_OF_MEMORY;
    handle->device = device;
    handle->page_count = (uint32_t)pages;
    take_pages(d, handle);
    *out = handle;
    return CUDA_SUCCESS;
}

void sim_handle_drop(vpmm_sim *sim, struct sim_handle *handle)
{
    if (handle->references || handle->mappings)
        return;
    if (handle->handle)
        sim_object_remove(sim, SIM_HANDLE, handle->handle);
    give_pages(&sim->devices[handle->device], handle);
    free(handle);
}

static CUresult check_properties(vpmm_sim *sim, const CUmemAllocationProp *prop)
{
    const int known_types = 1 | 8; /* a POSIX descriptor, fabric; not Windows' */
    if (!sim->config.vmm)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (!prop || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED)
        return CUDA_ERROR_INVALID_VALUE;
    if ((int)prop->requestedHandleTypes & ~known_types || prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return CUDA_ERROR_NOT_SUPPORTED;
    return sim_device_valid(sim, prop->location.id) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult sim_cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
                                           CUmemAllocationGranularity_flags option)
{
    if (!granularity || (option != CU_MEM_ALLOC_GRANULARITY_MINIMUM && option != CU_MEM_ALLOC_GRANULARITY_RECOMMENDED))
        return CUDA_ERROR_INVALID_VALUE;
    *granularity = SIM_PAGE;
    return check_properties(sim_self(), prop);
}

CUresult sim_cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                         unsigned long long flags)
{
    vpmm_sim *sim = sim_self();
    struct sim_handle *made;
    sim_charge(sim, sim_price_create(size));
    CUresult result = check_properties(sim, prop);
    if (result != CUDA_SUCCESS)
        return result;
    if (!handle || flags || size == 0 || size % SIM_PAGE)
        return CUDA_ERROR_INVALID_VALUE;
    result = sim_handle_make(sim, prop->location.id, size, &made);
    if (result != CUDA_SUCCESS)
        return result;
    made->handle = sim_object_add(sim, SIM_HANDLE, made);
    if (!made->handle) {
        sim_handle_drop(sim, made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    made->references = 1;
    made->exportable = (int)prop->requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    *handle = made->handle;
    return CUDA_SUCCESS;
}

/* Mapped memory outlives the program's last reference, but is no longer the program's to name. */
static struct sim_handle *find_handle(vpmm_sim *sim, CUmemGenericAllocationHandle name)
{
    struct sim_handle *handle = sim_object_find(sim, SIM_HANDLE, name);
    if (handle && handle->references == 0) {
        sim_misuse(sim, CUDA_SUCCESS, "%s: physical handle 0x%llx was released", sim_entry_name(sim_frame()->entry),
                   (unsigned long long)name);
        return NULL;
    }
    return handle;
}

CUresult sim_cuMemRelease(CUmemGenericAllocationHandle name)
{
    vpmm_sim *sim = sim_self();
    if (!sim->config.vmm)
        return CUDA_ERROR_NOT_SUPPORTED;
    struct sim_handle *handle = find_handle(sim, name);
    if (!handle)
        return CUDA_ERROR_INVALID_VALUE;
    sim_charge(sim, sim_price_release(sim_handle_bytes(handle)));
    handle->references--;
    sim_handle_drop(sim, handle);
    return CUDA_SUCCESS;
}

CUresult sim_cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle name,
                      unsigned long long flags)
{
    vpmm_sim *sim = sim_self();
    if (!sim->config.vmm || offset)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (flags || size == 0 || ptr % SIM_PAGE)
        return CUDA_ERROR_INVALID_VALUE;
    struct sim_handle *handle = find_handle(sim, name);
    if (!handle || size > sim_handle_bytes(handle))
        return CUDA_ERROR_INVALID_VALUE;
    if (size != sim_handle_bytes(handle))
        return CUDA_ERROR_NOT_SUPPORTED;
    return sim_map(sim, ptr, handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult sim_cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *addr)
{
    vpmm_sim *sim = sim_self();
    if (!sim->config.vmm)
        return CUDA_ERROR_NOT_SUPPORTED;
    struct sim_mapping *mapping = sim_mapping_at(sim, (CUdeviceptr)(uintptr_t)addr);
    if (!handle || !mapping || mapping->owner != SIM_OWNER_PROGRAM)
        return CUDA_ERROR_INVALID_VALUE;
    mapping->handle->references++;
    *handle = mapping->handle->handle;
    return CUDA_SUCCESS;
}

/* Of plain memory and memory pools nobody asks. */
CUresult sim_cuMemGetAddressRange(CUdeviceptr *pbase, size_t *psize, CUdeviceptr dptr)
{
    vpmm_sim *sim = sim_self();
    struct sim_mapping *mapping = sim_mapping_at(sim, dptr);
    if (!mapping)
        return CUDA_ERROR_NOT_FOUND;
    if (mapping->owner != SIM_OWNER_PROGRAM)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (pbase)
        *pbase = mapping->base;
    if (psize)
        *psize = mapping->size;
    return CUDA_SUCCESS;
}

/* What is in the file of an exported handle. */
struct exported {
    const vpmm_sim *sim;
    pid_t process;
    uint64_t handle;
};

CUresult sim_cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle name,
                                          CUmemAllocationHandleType type, unsigned long long flags)
{
    vpmm_sim *sim = sim_self();
    struct sim_handle *handle = find_handle(sim, name);
    struct exported exported = {sim, getpid(), name};
    if (!shareable || flags || !handle || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_INVALID_VALUE;
    if (!handle->exportable)
        return CUDA_ERROR_NOT_SUPPORTED;
    int fd = make_memory("vpmm simulated handle");
    if (fd < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    if (pwrite(fd, &exported, sizeof exported, 0) != sizeof exported) {
        close(fd);
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    *(int *)shareable = fd;
    return CUDA_SUCCESS;
}

CUresult sim_cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable,
                                            CUmemAllocationHandleType type)
{
    vpmm_sim *sim = sim_self();
    struct exported exported;
    if (!handle || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_INVALID_VALUE;
    if (pread((int)(intptr_t)shareable, &exported, sizeof exported, 0) != sizeof exported || exported.sim != sim ||
        exported.process != getpid())
        return CUDA_ERROR_INVALID_VALUE;
    struct sim_handle *found = sim_object_find(sim, SIM_HANDLE, exported.handle);
    if (!found)
        return CUDA_ERROR_INVALID_VALUE;
    found->references++;
    *handle = found->handle;
    return CUDA_SUCCESS;
}

CUresult sim_cuMemGetInfo(size_t *free_bytes, size_t *total)
{
    vpmm_sim *sim = sim_self();
    struct sim_context *context;
    CUresult result = sim_current(sim, &context);
    if (result != CUDA_SUCCESS)
        return result;
    if (!free_bytes || !total)
        return CUDA_ERROR_INVALID_VALUE;
    const struct sim_device *device = &sim->devices[context->device];
    *free_bytes = (device->pages - device->pages_used) * SIM_PAGE;
    *total = device->pages * SIM_PAGE;
    return CUDA_SUCCESS;
}

size_t vpmm_sim_used_bytes(vpmm_sim *sim)
{
    pthread_mutex_lock(&sim->lock);
    size_t bytes = sim->devices[0].pages_used * SIM_PAGE;
    pthread_mutex_unlock(&sim->lock);
    return bytes;
}
