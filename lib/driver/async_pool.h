/*
 * async_pool.h - requests that the driver's own memory pool serves: those below a page with VPMM_SMALL_ASYNC, and all
 * of them where the pool has no pages: on a device without virtual memory management, or with pages above its memory.
 *
 * A CUDA memory pool of the pool's own (the device's default pool is the program's), which keeps what it has until it
 * is trimmed. Each allocation has a record, so that wrong frees are found and the bytes are known; records are in
 * maps by address, each behind a lock.
 *
 * A record's states, which change under its map's lock alone
 *   live       from the malloc that got the address
 *   freeing    a free has it, and calls the driver. Other frees of the address find no allocation
 *   refused    the driver has refused its free, which may have taken effect all the same: it may be freed again, when
 *              "not an allocation" is the answer that says so. It is not counted among what keeps a pool busy
 *   replaced   out of the map: the driver has handed the address out again while the record was freeing
 *
 *   live, refused -> freeing   by a free, which is then the only one that may end the record
 *   freeing -> gone            by that free, when the driver has freed it, or the record was replaced
 *   freeing -> refused         by that free, when the driver has refused
 *   freeing -> live            by that free, when the driver could not be called
 *   freeing -> replaced        by a malloc that was given the address: so the free has taken effect, whatever is said
 *   live, refused -> gone      by a malloc that was given the address: so it was freed
 *
 * Who ends a record takes it out of count and bytes, and frees its own memory. So that is done once, whoever meets
 * whom.
 *
 * A free of a refused record must not meet an allocation that was given the address and is not yet in the map: it would
 * free that. `handing` is held shared from the driver's handing out an address until its record is in the map, and
 * alone over a free that is tried again. No other lock is held over a driver call.
 */
#ifndef VPMM_LIB_ASYNC_POOL_H
#define VPMM_LIB_ASYNC_POOL_H

#include "base/queue.h"
#include "driver/device.h"

#include <pthread.h>

enum { ASYNC_MAPS = 64 };

struct async_pool {
    struct device *device;
    CUmemoryPool pool;
    struct {
        pthread_mutex_t lock;
        struct object_map *records; /* struct async_record */
    } map[ASYNC_MAPS];
    pthread_rwlock_t handing;
    _Atomic(uint64_t) count; /* records that were not refused */
};

vpmm_status async_pool_init(struct async_pool *, struct device *);
/* No allocation is live, but on a lost device. What was refused is freed again; DRIVER if that, too, is refused. */
vpmm_status async_pool_destroy(struct async_pool *);

/* Errors as for vpmm_malloc; OUT_OF_MEMORY leaves the caller to make room and try again. */
vpmm_status async_pool_malloc(struct async_pool *, size_t bytes, CUstream, CUdeviceptr *);

/* INVALID_POINTER if the address is not a live or refused one of these, and then only. */
vpmm_status async_pool_free(struct async_pool *, CUdeviceptr, CUstream);

/* Gives back what no allocation uses and whose frees the driver has seen complete. */
void async_pool_trim(struct async_pool *);

#endif
