/*
 * mapping.h - the three driver calls that change mappings.
 *
 * A handle that is registered for GPUDirect RDMA is refused by cuMemMap with CUDA_ERROR_UNKNOWN while another thread
 * unmaps memory or sets access to it (seen on an H200, driver 580: one map in some hundreds beside a thread that
 * unmaps, nearly all beside three that build). A pool with such handles therefore makes these calls one at a time, each
 * under the arena's `mapping` lock. That costs little: the driver serves them one at a time as well. No malloc or free
 * waits for the lock but one that builds. Another pool's calls can still be in the way; a refused map is tried again.
 */
#ifndef VPMM_LIB_MAPPING_H
#define VPMM_LIB_MAPPING_H

#include "arena.h"

CUresult mapping_map(struct arena *, uint64_t page, const struct extent *);

/* Read and write access for the pool's device. */
CUresult mapping_allow(struct arena *, uint64_t page, uint64_t pages);

CUresult mapping_unmap(struct arena *, uint64_t page, uint64_t pages);

#endif
