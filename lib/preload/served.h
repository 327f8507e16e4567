/*
 * served.h - the pools: one for each device whose primary context asks for memory.
 *
 * A pool is made for the first request on a primary context, from vpmm's defaults, what the program has said of the
 * device's default pool, and the VPMM_* variables. Two defaults are others here, because the program does not know
 * vpmm: `captures` is on, for it will capture streams that nobody has released, with a gate that sees it coming
 * (captures.h); and `exportable` is off, for what a handle holds may be others' memory as well, and the driver's
 * default pool does not export either. And `streams` is not TRUSTED, for a program destroys streams as they capture,
 * which cannot be released before.
 *
 *   primary   the context. A request is served if its stream's context, or the current one for a default stream, is
 *             one, and names the device's default pool or none
 *   quiet     a stream of ours, non-blocking, which never has work of the program's, but may wait for some. Synchronous
 *             requests are made on it, and frees on streams of other contexts, which it waits for; it is released after
 *             each free, so that the memory goes to every stream
 *   standard  the device's default pool: what the program thinks its memory is of
 *
 * A program's cuDevicePrimaryCtxReset ends the pool with all that is live in it, as it ends the driver's; the next
 * request makes another one. Its last cuDevicePrimaryCtxRelease ends nothing: the pool retains the context, and one
 * more, which the driver would take for the pool's, is refused as where nothing is retained (life.c).
 *
 * Who may do what. A served device is made under a lock, and published by its context; it is ended with the lanes shut.
 * What this header gives is used between lane_enter and lane_leave.
 */
#ifndef VPMM_PRELOAD_SERVED_H
#define VPMM_PRELOAD_SERVED_H

#include "lane.h"

#include <pthread.h>
#include <stdbool.h>

#include <vpmm/vpmm.h>

struct served {
    vpmm_pool *pool;
    int device;
    CUcontext primary;
    CUstream quiet;
    CUmemoryPool standard;   /* NULL where the driver has none */
    pthread_mutex_t waiting; /* over a wait by the block */
    bool small_async;        /* small requests are of a pool of the driver's own (VPMM_SMALL) */
    CUdeviceptr block;       /* a byte of cuMemAlloc's, to wait by where the device is full (memory.c); 0: none */
};

/*
 * The device whose primary context it is, as the program was given it; -1: it is none. No other context is asked about,
 * or made current, for a request: a green one may be current to one thread alone.
 */
int served_device_of(CUcontext);
void served_note_primary(int device, CUcontext);

/* Whose requests a primary context's are, made if need be; NULL: the driver's, and the count says why. */
struct served *served_of_primary(int device, CUcontext, enum count *why);

/* Those that are there, or NULL: by their context, their device, or their default pool. */
struct served *served_find(CUcontext);
struct served *served_on(int device);
struct served *served_by_standard(CUmemoryPool);

/* What the default pool was told a moment ago: the pool has it too, or what that was told since. */
void served_set_threshold(const struct served *, cuuint64_t threshold);
void served_set_reuse(const struct served *, int may_wait);

/* Whether the pool is the device's default one; whether another one serves the device. */
bool served_is_standard(int device, CUmemoryPool);
bool served_elsewhere(int device);

/* The program has set a device's pool, or shares its memory with other devices, in stream order or at once. */
enum { SERVED_SHARED_ASYNC = 1, SERVED_SHARED_AT_ONCE = 2 };
void served_pool_set(int device);
void served_share(int device, int how);
bool served_is_shared(int device, int how);

/*
 * The driver's reset of a device's primary context, and before it the end of the device's pool, with all that is live
 * there. No other pool is made meanwhile. Outside of the lanes.
 */
CUresult served_end(int device, CUresult(CUDAAPI *reset)(CUdevice));

/* Between the two, potentially unsafe calls of this thread harm no capture. Gives the mode before. */
CUstreamCaptureMode served_relax(void);
void served_unrelax(CUstreamCaptureMode);

#endif
