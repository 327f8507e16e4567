/*
 * mapping.h - the driver calls that make and release a handle, and those that change mappings, for a run of pages.
 *
 * A handle that is registered for GPUDirect RDMA is refused by cuMemMap with CUDA_ERROR_UNKNOWN now and then while
 * other threads map, unmap or create memory (seen on an H200, driver 580: one map in some hundreds beside a thread that
 * unmaps, and for milliseconds beside three that build; one lock around all such calls of the pool does not help). It
 * is tried again for a while, and `rdma` is off unless asked for.
 */
#ifndef VPMM_LIB_MAPPING_H
#define VPMM_LIB_MAPPING_H

#include "remap/arena.h"

/* At most in one call, where others wait for the driver: it looks at who waits between two calls (driver/burst.h). */
enum { MAPPINGS_A_CALL = 16 };

/* Makes the extent's handle. One that comes with a failure was made, whatever the driver said. */
CUresult mapping_create(struct arena *, struct extent *);

CUresult mapping_map(struct arena *, uint64_t page, const struct extent *);

/* The rights of the list. */
CUresult mapping_allow(struct arena *, uint64_t page, uint64_t pages, const struct access_list *);

CUresult mapping_unmap(struct arena *, uint64_t page, uint64_t pages);

/*
 * Gives the extent's handle back. Where the driver has refused before and now says that there is no such handle
 * (CUDA_ERROR_INVALID_VALUE), the refused call had taken effect: that is success.
 */
CUresult mapping_release(struct arena *, struct extent *);

#endif
