/*
 * trace.h - what the program asks for, written down for vpmm-replay, where VPMM_PRELOAD_TRACE=PREFIX says so.
 *
 * A file for each process and device, PREFIX.PID.DEVICE.csv, of lines `op,id,bytes,stream,us` (stress/README.md): each
 * request that was given memory, by vpmm or by the driver, and the free of that memory. It is made with its first line.
 *
 *   requests   cuMemAllocAsync and cuMemAllocFromPoolAsync, but on capturing streams, where they are nodes of a graph;
 *              with VPMM_PRELOAD_SYNC=on those of cuMemAlloc as well, on stream 0
 *   id         of an allocation, never used again: its free may be written after the next request for its address
 *   stream     streams are numbered as they are first met, from 1 on, and again from 1 after 255, as many as a trace
 *              can name. A default stream is one like any, and each thread's own another
 *   us         since the first line of the process
 *
 * One lock guards everything. Nobody calls the driver or vpmm under it, but files are written. What cannot be written
 * any more, as the disk is full or the host has no memory, ends the file, whose lines stay good; the line that
 * VPMM_PRELOAD_VERBOSE prints says why. Lines are written at the exit at the latest, and those of more than a second
 * ago with the next one. The child of a fork begins files of its own.
 */
#ifndef VPMM_PRELOAD_TRACE_H
#define VPMM_PRELOAD_TRACE_H

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The stream of memory that is asked for and freed in no stream's order. */
#define TRACE_NO_STREAM ((CUstream) ~(uintptr_t)0)

bool trace_is_on(void);

/* The request has been given this memory. */
void trace_malloc(int device, CUdeviceptr, size_t bytes, CUstream);

/* What was written of an allocation; `device` -1: nothing, for its request was not. */
struct traced {
    uint64_t id, bytes;
    int device;
};

/* Before a free: from then on the address may be another request's. */
struct traced trace_take(CUdeviceptr);

/* After it: the free is written, if it was successful. Else the allocation is still there. */
void trace_free(CUdeviceptr, struct traced, CUstream, CUresult);

#endif
