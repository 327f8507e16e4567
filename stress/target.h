/*
 * target.h - what the programs measure: an allocator, on a GPU.
 *
 *   gpu      a driver, the simulated GPU's or the real one's, and the primary context of one of its devices, retained
 *            from gpu_open to gpu_close. The simulator is the gpu's own and ends with it
 *   target   an allocator on a gpu that outlives it: a pool of vpmm's, or one of the driver's for cuMemAllocAsync that
 *            keeps what it has. Its own from target_open to target_close; streams and allocations are the program's
 *
 * Errors: what fails is told on stderr, after the program's name, and the result is false. Only a malloc refused for
 * want of memory is left to the program, which may expect it. What an open that failed has made, its close takes; a
 * close goes on where something fails, and returns how much did, leaks included.
 *
 * Threads: one opens and closes; calls come from any in which gpu_enter was called.
 */
#ifndef VPMM_STRESS_TARGET_H
#define VPMM_STRESS_TARGET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <vpmm/sim.h>
#include <vpmm/vpmm.h>

extern const char program_name[]; /* of each program, in its main file */

bool vpmm_ok(const char *what, vpmm_status); /* false: told */

/* ---- the GPU ---- */

typedef struct gpu {
    vpmm_sim *sim; /* NULL: a real one */
    const vpmm_driver *driver;
    CUdevice device;
    CUcontext context;
} gpu;

typedef struct gpu_options {
    const vpmm_sim_config *sim; /* NULL: a real one */
    const char *advice;         /* follows the words of a simulator that cannot be made; NULL: none */
    int ordinal;
} gpu_options;

bool gpu_open(gpu *, const gpu_options *); /* and enters */
unsigned gpu_close(gpu *);
bool gpu_enter(const gpu *);
bool gpu_ok(const gpu *, const char *what, CUresult); /* false: told */

/* The pages of a pool with this vpmm_config.page_size, of which 0 is the device's smallest. */
bool gpu_page_size(const gpu *, size_t configured, size_t *bytes);

/* Driver time of this thread so far, by the simulator's account; 0 on a real GPU. */
double gpu_charged_us(const gpu *);

/* ---- the allocator ---- */

typedef struct target {
    gpu *gpu;
    vpmm_pool *pool;          /* NULL: cuMemAllocAsync */
    CUmemoryPool memory_pool; /* of cuMemAllocAsync */
    vpmm_status made;         /* what vpmm_pool_create has answered; INVALID_VALUE: a setting is wrong */
} target;

typedef enum target_status { TARGET_OK, TARGET_REFUSED /* out of memory */, TARGET_FAILED } target_status;

/* For a program that sets these itself: on stderr, which settings of the environment for decay it ignores. */
void target_tell_no_decay(void);

/* config NULL: cuMemAllocAsync; its driver is the gpu's, whatever it says. */
bool target_open(target *, gpu *, const vpmm_config *config);
unsigned target_close(target *);

/* Calls of vpmm's, which cuMemAllocAsync knows nothing of: there they do nothing, and are well. */
bool target_release_stream(target *, CUstream); /* one that nothing was allocated on is well, too */
bool target_poll(target *);
bool target_audit(target *);
bool target_stats(target *, vpmm_stats *); /* of cuMemAllocAsync: zeros */

/* Physical memory held now. The driver's pool beside vpmm's pages (VPMM_SMALL=async) counts with what is live in it. */
typedef struct target_level {
    uint64_t mapped, slab, slab_live; /* slabs: vpmm's alone */
} target_level;
bool target_held(target *, target_level *);
bool target_peak_mapped(target *, uint64_t *bytes);

/* What was refused, on stderr: in the thread that it was refused to, before its next call. */
void target_tell_refused(const target *);

/* The rest of a malloc or free that went wrong, so that a timed loop holds no more than the call and a test. */
target_status target_malloc_failed(const target *, vpmm_status, CUresult);
bool target_free_failed(const target *, vpmm_status, CUresult);

static inline target_status target_malloc(target *t, size_t bytes, CUstream stream, CUdeviceptr *out)
{
    vpmm_status status = VPMM_SUCCESS;
    CUresult result = CUDA_SUCCESS;
    if (t->pool != NULL)
        status = vpmm_malloc(t->pool, bytes, stream, out);
    else
        result = t->gpu->driver->cuMemAllocFromPoolAsync(out, bytes, t->memory_pool, stream);
    return status == VPMM_SUCCESS && result == CUDA_SUCCESS ? TARGET_OK : target_malloc_failed(t, status, result);
}

static inline bool target_free(target *t, CUdeviceptr address, CUstream stream)
{
    vpmm_status status = VPMM_SUCCESS;
    CUresult result = CUDA_SUCCESS;
    if (t->pool != NULL)
        status = vpmm_free(t->pool, address, stream);
    else
        result = t->gpu->driver->cuMemFreeAsync(address, stream);
    return (status == VPMM_SUCCESS && result == CUDA_SUCCESS) || target_free_failed(t, status, result);
}

#endif
