/*
 * kept_pools.h - memory pools that libcuda is not asked to destroy yet, because frees of theirs may be pending.
 *
 * By its documentation cuMemPoolDestroy may be called at any time, and what is pending then is released later. Driver
 * 580.159 does not bear it: where several threads make pools, free to them and destroy them, it crashes within seconds,
 * in cuMemPoolDestroy itself or in a thread of its own, or blocks for ever (H200, 22 November 2026). A pool of which
 * nothing is reserved any more has nothing pending, and with those no crash was seen.
 *
 * So a pool is *kept* when it cannot be trimmed to nothing: it is no longer the program's, and the next creation with
 * equal properties is given it, as new. The driver releases what it reserves when it next sees the frees complete. Each
 * destruction looks at the kept pools again and destroys those that have become empty. Waiting for that instead would
 * have no end: the driver notices completed frees when the program synchronises, which a library cannot do for it
 * beside a capture.
 *
 *   made = in use + kept    so there are about as many kept ones, at most, as were in use at one time; a creation does
 *                           not see those that a destruction is looking at
 *
 * One that the driver answers for no more is forgotten, and so is one whose handle a new pool gets. A reset of the
 * device ends it too, unseen: if the program's own next pool there then has its handle, it is taken for the kept one.
 *
 * Pools that may be shared with other processes are not kept: their handles would show the next owner's memory.
 *
 * Any thread. One mutex guards both lists; no driver call is made under it: who works on a pool has taken its record
 * out.
 */
#ifndef VPMM_LIB_KEPT_POOLS_H
#define VPMM_LIB_KEPT_POOLS_H

#include <vpmm/driver.h>

/* cuMemPoolCreate and cuMemPoolDestroy of the driver whose own entries are in the table, with their results. */
CUresult kept_pools_create(const vpmm_driver *, CUmemoryPool *, const CUmemPoolProps *);
CUresult kept_pools_destroy(const vpmm_driver *, CUmemoryPool);

#endif
