/*
 * slow.h - a malloc or free that is no hit, and vpmm_use: the arguments are checked, the thread is counted among the
 * stream's users, and a malloc's tiers are tried in their order (tiers.h, piece.h, driver/async_pool.h).
 *
 * hit.c calls these in tail position when the thread's own cache cannot serve the call at once.
 */
#ifndef VPMM_LIB_SLOW_H
#define VPMM_LIB_SLOW_H

#include "pool/pool.h"

/*
 * vpmm_malloc, vpmm_free and vpmm_use, whatever the arguments are. A failure is counted, and said in words. A malloc
 * or free on CU_STREAM_LEGACY begins anew on stream 0, by which the thread's caches of it are found.
 */
vpmm_status slow_malloc(struct vpmm_pool *, size_t bytes, CUstream, CUdeviceptr *);
vpmm_status slow_free(struct vpmm_pool *, CUdeviceptr, CUstream);
vpmm_status slow_use(struct vpmm_pool *, CUdeviceptr, CUstream);

/*
 * vpmm_malloc and vpmm_free past the thread's cache, which could not serve them at once. A malloc, and a free on a
 * default stream, have just seen that the handle is still that of the cache's stream, where that is looked at.
 */
vpmm_status slow_malloc_past(struct vpmm_pool *, size_t bytes, CUstream, CUdeviceptr *, struct cache *);
vpmm_status slow_free_past(struct vpmm_pool *, CUdeviceptr, CUstream, struct cache *);

/* Pages from the thread's own cache, or from another thread's cache for the same stream (tiers 1 and 1b). */
bool slow_malloc_cached(struct vpmm_pool *, size_t bytes, struct cache *, CUdeviceptr *);

#endif
