/*
 * payload.h - a word a page, written and looked at in stream order: what tells that an allocation kept its bytes.
 *
 * For programs with and without Criterion, on any thread. The driver's table is all that is needed.
 */
#ifndef VPMM_TESTS_PAYLOAD_H
#define VPMM_TESTS_PAYLOAD_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <vpmm/driver.h>

#define PAGE ((size_t)2 << 20)

struct payload_expectation {
    atomic_uint_fast64_t *mismatches;
    size_t words;
    uint32_t value;
    bool freed; /* by payload_compare */
    uint32_t found[];
};

/* Queues the writing of `value` into the first word of each page. */
static inline bool payload_write(const vpmm_driver *driver, CUdeviceptr pointer, size_t pages, uint32_t value,
                                 CUstream stream)
{
    return driver->cuMemsetD2D32Async(pointer, PAGE, value, 1, pages, stream) == CUDA_SUCCESS;
}

static inline void CUDA_CB payload_compare(void *argument)
{
    struct payload_expectation *e = argument;
    for (size_t i = 0; i < e->words; i++)
        if (e->found[i] != e->value)
            atomic_fetch_add(e->mismatches, 1);
    if (e->freed)
        free(e);
}

static inline size_t payload_expectation_bytes(size_t pages)
{
    return sizeof(struct payload_expectation) + pages * sizeof(uint32_t);
}

/*
 * Queues a look at those words, which counts what is not `value`. e->freed is set; the memory at `e` is used until
 * then. A real device makes the host wait if it does not know that memory.
 */
static inline bool payload_expect_in(const vpmm_driver *driver, struct payload_expectation *e, CUdeviceptr pointer,
                                     size_t pages, uint32_t value, CUstream stream, atomic_uint_fast64_t *mismatches)
{
    e->mismatches = mismatches;
    e->words = pages;
    e->value = value;
    CUDA_MEMCPY2D copy = {
        .srcMemoryType = CU_MEMORYTYPE_DEVICE,
        .srcDevice = pointer,
        .srcPitch = PAGE,
        .dstMemoryType = CU_MEMORYTYPE_HOST,
        .dstHost = e->found,
        .dstPitch = sizeof e->found[0],
        .WidthInBytes = sizeof e->found[0],
        .Height = pages,
    };
    return driver->cuMemcpy2DAsync(&copy, stream) == CUDA_SUCCESS &&
           driver->cuLaunchHostFunc(stream, payload_compare, e) == CUDA_SUCCESS;
}

/* The same, in memory that malloc gives. */
static inline bool payload_expect(const vpmm_driver *driver, CUdeviceptr pointer, size_t pages, uint32_t value,
                                  CUstream stream, atomic_uint_fast64_t *mismatches)
{
    struct payload_expectation *e = malloc(payload_expectation_bytes(pages));
    if (e == NULL)
        return false;
    e->freed = true;
    return payload_expect_in(driver, e, pointer, pages, value, stream, mismatches);
}

#endif
