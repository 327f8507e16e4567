/*
 * PyTorch's CUDAPluggableAllocator over vpmm: what stress/pytorch_server.py loads, and the least that a program needs.
 * The pool is the device's default one, configured by VPMM_* variables. Both functions are called by any thread.
 *
 * PyTorch asks for zero bytes, too, and takes NULL for them. It does not look whether other memory is NULL, so out of
 * memory ends the program at its first use.
 */
#include <stdio.h>
#include <sys/types.h>

#include <vpmm/vpmm.h>

void *vpmm_pytorch_malloc(ssize_t bytes, int device, CUstream stream);
void vpmm_pytorch_free(void *memory, ssize_t bytes, int device, CUstream stream);
uint64_t vpmm_pytorch_peak_held(int device);
uint64_t vpmm_pytorch_peak_in_use(int device);
void vpmm_pytorch_reset_peaks(int device);

static vpmm_pool *pool_of(int device)
{
    vpmm_pool *pool;
    return vpmm_pool_default(device, &pool) == VPMM_SUCCESS ? pool : NULL;
}

static void tell(void)
{
    fprintf(stderr, "vpmm: %s\n", vpmm_last_error());
}

void *vpmm_pytorch_malloc(ssize_t bytes, int device, CUstream stream)
{
    CUdeviceptr memory = 0;
    vpmm_pool *pool = bytes > 0 ? pool_of(device) : NULL;
    if (bytes > 0 && (pool == NULL || vpmm_malloc(pool, (size_t)bytes, stream, &memory) != VPMM_SUCCESS))
        tell();
    return (void *)memory;
}

void vpmm_pytorch_free(void *memory, ssize_t bytes, int device, CUstream stream)
{
    vpmm_pool *pool = bytes > 0 ? pool_of(device) : NULL;
    if (bytes > 0 && (pool == NULL || vpmm_free(pool, (CUdeviceptr)memory, stream) != VPMM_SUCCESS))
        tell();
}

static uint64_t attribute(int device, vpmm_attribute which)
{
    uint64_t bytes = 0;
    vpmm_pool_get_attribute(pool_of(device), which, &bytes);
    return bytes;
}

/* Bytes, each the highest since the pool's creation or the latest reset; 0 where there is no pool. */
uint64_t vpmm_pytorch_peak_held(int device)
{
    return attribute(device, VPMM_ATTRIBUTE_PEAK_MAPPED);
}

uint64_t vpmm_pytorch_peak_in_use(int device)
{
    return attribute(device, VPMM_ATTRIBUTE_PEAK_REQUESTED);
}

void vpmm_pytorch_reset_peaks(int device)
{
    vpmm_pool_set_attribute(pool_of(device), VPMM_ATTRIBUTE_PEAK_MAPPED, 0);
    vpmm_pool_set_attribute(pool_of(device), VPMM_ATTRIBUTE_PEAK_REQUESTED, 0);
}
