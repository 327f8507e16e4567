#define _GNU_SOURCE 1

#include "verify.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

enum {
    SAMPLE_BYTES = 64,
    SAMPLE_WORDS = SAMPLE_BYTES / 4,
    SMALLEST_BIN = 12, /* staging memory comes in powers of two, from 4 KiB */
    BINS = 64 - SMALLEST_BIN,
    TOLD = 4, /* mismatches that a verifier tells of in words */
};

/* Where an allocation is looked at: `rows` samples of `width` words, a page apart, and `tail_width` words at `tail`. */
typedef struct samples {
    size_t rows;
    size_t width;
    size_t tail;
    size_t tail_width;
} samples;

/* A check under way, or, on the free list, staging memory to use again. */
typedef struct check_job {
    struct check_job *next; /* on the free list */
    verifier *owner;
    uint32_t *staging;
    unsigned bin;
    samples at;
    verify_block block;
} check_job;

struct verifier {
    const vpmm_driver *driver;
    const char *name;
    size_t page_size;
    bool whole;
    atomic_uint_fast64_t mismatches;
    pthread_mutex_t lock; /* for what follows: host functions give jobs back */
    check_job *free[BINS];
    size_t busy_bytes;
};

static size_t bin_bytes(unsigned bin)
{
    return (size_t)1 << (bin + SMALLEST_BIN);
}

static unsigned bin_of(size_t bytes)
{
    unsigned bin = 0;
    while (bin_bytes(bin) < bytes)
        bin++;
    return bin;
}

/* Different for 2^32 allocations in a row, and never like its neighbour's. */
static uint32_t next_pattern(void)
{
    static _Atomic(uint32_t) count;
    return (atomic_fetch_add_explicit(&count, 1, memory_order_relaxed) + 1) * UINT32_C(0x9e3779b1);
}

static samples samples_of(const verifier *v, size_t bytes)
{
    samples at = {0};
    size_t words = bytes / 4;
    if (words < SAMPLE_WORDS) {
        at.rows = words == 0 ? 0 : 1;
        at.width = words;
        return at;
    }
    at.rows = (bytes - SAMPLE_BYTES) / v->page_size + 1;
    at.width = SAMPLE_WORDS;
    at.tail = words * 4 - SAMPLE_BYTES;
    at.tail_width = SAMPLE_WORDS;
    return at;
}

static size_t staging_bytes(const samples *at)
{
    return (at->rows * at->width + at->tail_width) * 4;
}

verifier *verifier_create(const vpmm_driver *driver, size_t page_size, bool whole, const char *name)
{
    verifier *v = calloc(1, sizeof *v);
    if (v == NULL)
        return NULL;
    v->driver = driver;
    v->name = name;
    v->page_size = page_size;
    v->whole = whole;
    atomic_init(&v->mismatches, 0);
    pthread_mutex_init(&v->lock, NULL);
    return v;
}

CUresult verifier_fill(verifier *v, verify_block *block, CUstream stream)
{
    samples at = samples_of(v, block->bytes);
    block->pattern = next_pattern();
    if (at.rows == 0)
        return CUDA_SUCCESS;
    if (v->whole)
        return v->driver->cuMemsetD32Async(block->address, block->pattern, block->bytes / 4, stream);
    CUresult result =
        v->driver->cuMemsetD2D32Async(block->address, v->page_size, block->pattern, at.width, at.rows, stream);
    if (result == CUDA_SUCCESS && at.tail_width != 0)
        result = v->driver->cuMemsetD32Async(block->address + at.tail, block->pattern, at.tail_width, stream);
    return result;
}

/* Jobs and their staging memory. */

static check_job *job_pop(verifier *v, unsigned bin)
{
    pthread_mutex_lock(&v->lock);
    check_job *job = v->free[bin];
    if (job != NULL)
        v->free[bin] = job->next;
    v->busy_bytes += bin_bytes(bin);
    pthread_mutex_unlock(&v->lock);
    return job;
}

static void job_push(check_job *job)
{
    verifier *v = job->owner;
    pthread_mutex_lock(&v->lock);
    job->next = v->free[job->bin];
    v->free[job->bin] = job;
    v->busy_bytes -= bin_bytes(job->bin);
    pthread_mutex_unlock(&v->lock);
}

static bool staging_full(verifier *v, unsigned bin)
{
    pthread_mutex_lock(&v->lock);
    bool full = v->busy_bytes + bin_bytes(bin) > VERIFY_STAGING_BYTES;
    pthread_mutex_unlock(&v->lock);
    return full;
}

static CUresult job_create(verifier *v, unsigned bin, check_job **out)
{
    check_job *job = calloc(1, sizeof *job);
    if (job == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    job->owner = v;
    job->bin = bin;
    void *staging;
    CUresult result = v->driver->cuMemHostAlloc(&staging, bin_bytes(bin), 0);
    if (result != CUDA_SUCCESS) {
        free(job);
        return result;
    }
    job->staging = staging;
    *out = job;
    return CUDA_SUCCESS;
}

static CUresult job_take(verifier *v, size_t bytes, CUstream stream, check_job **out)
{
    unsigned bin = bin_of(bytes);
    CUresult result = CUDA_SUCCESS;
    if (staging_full(v, bin))
        result = v->driver->cuStreamSynchronize(stream);
    if (result != CUDA_SUCCESS)
        return result;
    *out = job_pop(v, bin);
    if (*out != NULL)
        return CUDA_SUCCESS;
    result = job_create(v, bin, out);
    if (result != CUDA_SUCCESS) {
        pthread_mutex_lock(&v->lock);
        v->busy_bytes -= bin_bytes(bin);
        pthread_mutex_unlock(&v->lock);
    }
    return result;
}

/* Comparison. */

static void tell(const check_job *job, size_t word, uint64_t nth)
{
    const samples *at = &job->at;
    size_t row = at->width == 0 ? 0 : word / at->width;
    size_t offset = row < at->rows ? row * job->owner->page_size + word % at->width * 4
                                   : at->tail + (word - at->rows * at->width) * 4;
    fprintf(stderr,
            "%s: mismatch in allocation %" PRIu32 " (%zu bytes at 0x%llx): offset %zu holds %08" PRIx32
            ", not %08" PRIx32 "%s\n",
            job->owner->name, job->block.tag, job->block.bytes, (unsigned long long)job->block.address, offset,
            job->staging[word], job->block.pattern, nth + 1 == TOLD ? "; further ones are only counted" : "");
}

static void CUDA_CB compare(void *argument)
{
    check_job *job = argument;
    size_t words = staging_bytes(&job->at) / 4;
    size_t i = 0;
    while (i < words && job->staging[i] == job->block.pattern)
        i++;
    if (i < words) {
        uint64_t nth = atomic_fetch_add_explicit(&job->owner->mismatches, 1, memory_order_relaxed);
        if (nth < TOLD)
            tell(job, i, nth);
    }
    job_push(job);
}

static CUresult copy_samples(const verifier *v, const check_job *job, CUstream stream)
{
    const samples *at = &job->at;
    CUDA_MEMCPY2D copy = {
        .srcMemoryType = CU_MEMORYTYPE_DEVICE,
        .srcDevice = job->block.address,
        .srcPitch = v->page_size,
        .dstMemoryType = CU_MEMORYTYPE_HOST,
        .dstHost = job->staging,
        .dstPitch = at->width * 4,
        .WidthInBytes = at->width * 4,
        .Height = at->rows,
    };
    CUresult result = v->driver->cuMemcpy2DAsync(&copy, stream);
    if (result == CUDA_SUCCESS && at->tail_width != 0)
        result = v->driver->cuMemcpyDtoHAsync(job->staging + at->rows * at->width, job->block.address + at->tail,
                                              at->tail_width * 4, stream);
    return result;
}

CUresult verifier_check(verifier *v, const verify_block *block, CUstream stream)
{
    samples at = samples_of(v, block->bytes);
    check_job *job;
    if (at.rows == 0)
        return CUDA_SUCCESS;
    CUresult result = job_take(v, staging_bytes(&at), stream, &job);
    if (result != CUDA_SUCCESS)
        return result;
    job->at = at;
    job->block = *block;
    result = copy_samples(v, job, stream);
    if (result == CUDA_SUCCESS)
        result = v->driver->cuLaunchHostFunc(stream, compare, job);
    if (result != CUDA_SUCCESS)
        job_push(job); /* a copy into it may still be under way, but the caller gives up here */
    return result;
}

uint64_t verifier_mismatches(verifier *v)
{
    return atomic_load_explicit(&v->mismatches, memory_order_relaxed);
}

void verifier_destroy(verifier *v)
{
    if (v == NULL)
        return;
    for (unsigned bin = 0; bin < BINS; bin++) {
        while (v->free[bin] != NULL) {
            check_job *job = v->free[bin];
            v->free[bin] = job->next;
            v->driver->cuMemFreeHost(job->staging);
            free(job);
        }
    }
    pthread_mutex_destroy(&v->lock);
    free(v);
}
