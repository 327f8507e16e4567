/*
 * verify.h - device memory filled and checked in stream order, so that an allocator that hands out memory too early,
 * or twice, is seen at the bytes.
 *
 * fill queues a pattern of the allocation's own on a stream. check queues, on a stream that is ordered after the fill,
 * copies of samples to host memory and a host function that compares them: nothing waits on the host.
 *
 *   samples  the first 64 bytes of each page and the last 64 bytes of the allocation (less where it is shorter; in
 *            words of four bytes, so that up to three odd bytes at the end are not looked at)
 *   fill     the samples alone, or, `whole`, every word of the allocation. Sparse filling is for the simulated GPU,
 *            where pages of the host that are not touched cost nothing
 *
 * The samples' host memory is pinned, recycled and bounded: a check that would pass VERIFY_STAGING_BYTES first waits
 * for its stream.
 *
 * Threads: one verifier, one calling thread. The comparisons run wherever the driver runs host functions.
 */
#ifndef VPMM_STRESS_VERIFY_H
#define VPMM_STRESS_VERIFY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <vpmm/driver.h>

#define VERIFY_STAGING_BYTES ((size_t)256 << 20)

typedef struct verifier verifier;

typedef struct verify_block {
    CUdeviceptr address;
    size_t bytes;
    uint32_t pattern; /* set by verifier_fill */
    uint32_t tag;     /* the caller's, for messages */
} verify_block;

/* name stands before messages and must outlive the verifier. NULL: no host memory. */
verifier *verifier_create(const vpmm_driver *, size_t page_size, bool whole, const char *name);

CUresult verifier_fill(verifier *, verify_block *, CUstream);
CUresult verifier_check(verifier *, const verify_block *, CUstream);

/* Allocations that did not hold their pattern, among the checks that have run. The first few are told on stderr. */
uint64_t verifier_mismatches(verifier *);

/* Every stream that was used is synchronised before. NULL is a no-op. */
void verifier_destroy(verifier *);

#endif
