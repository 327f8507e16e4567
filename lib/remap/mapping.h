/*
 * mapping.h - the three driver calls that change mappings, for a run of pages.
 *
 * A handle that is registered for GPUDirect RDMA is refused by cuMemMap with CUDA_ERROR_UNKNOWN now and then while
 * other threads map, unmap or create memory (seen on an H200, driver 580: one map in some hundreds beside a thread that
 * unmaps, and for milliseconds beside three that build; one lock around all such calls of the pool does not help). It
 * is tried again for a while, and `rdma` is off unless asked for.
 */
#ifndef VPMM_LIB_MAPPING_H
#define VPMM_LIB_MAPPING_H

#include "remap/arena.h"

CUresult mapping_map(struct arena *, uint64_t page, const struct extent *);

/* Read and write access for the pool's device. */
CUresult mapping_allow(struct arena *, uint64_t page, uint64_t pages);

CUresult mapping_unmap(struct arena *, uint64_t page, uint64_t pages);

#endif
