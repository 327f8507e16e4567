/*
 * small.h - requests that the driver's own memory pool serves: those below a page with VPMM_SMALL_ASYNC, and all of
 * them where the pool has no pages: on a device without virtual memory management, or with pages above its memory.
 *
 * A CUDA memory pool of the pool's own (the device's default pool is the program's), which keeps what it has until it
 * is trimmed. Each allocation has a record, so that wrong frees are found and the bytes are known; records are in
 * maps by address, each behind a lock that is never held over a driver call.
 *
 * free goes live -> freeing -> driver call -> gone: if the call fails the allocation is live again; if the driver has
 * meanwhile given the address to another malloc, the new record has taken the old one's place.
 */
#ifndef VPMM_LIB_SMALL_H
#define VPMM_LIB_SMALL_H

#include "device.h"
#include "queue.h"

#include <pthread.h>

enum { SMALL_MAPS = 64 };

struct small {
    struct device *device;
    CUmemoryPool pool;
    struct {
        pthread_mutex_t lock;
        struct object_map *live; /* struct small_record */
    } map[SMALL_MAPS];
    _Atomic(uint64_t) count; /* records */
};

vpmm_status small_init(struct small *, struct device *);
vpmm_status small_destroy(struct small *); /* no allocation is live */

/* Errors as for vpmm_malloc; OUT_OF_MEMORY leaves the caller to make room and try again. */
vpmm_status small_malloc(struct small *, size_t bytes, CUstream, CUdeviceptr *);

/* INVALID_POINTER if the address is not a live one of these, and then only. */
vpmm_status small_free(struct small *, CUdeviceptr, CUstream);

/* Gives back what no allocation uses and whose frees the driver has seen complete. */
void small_trim(struct small *);

#endif
