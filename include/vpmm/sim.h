/*
 * vpmm/sim.h - a simulated GPU behind the driver table, for machines without one: tests, CI, and first looks.
 *
 * It is never chosen silently: a program makes one and passes its table in vpmm_config.driver. It answers as the
 * driver of an H200 was seen to answer, keeps real bytes (a physical handle is a piece of a memfd, and addresses are
 * translated to it in software, so that two addresses of a handle are the same memory), and finds accesses that nothing
 * orders.
 *
 * Time. Streams run their work in order: on threads of their own, or, with `stepped`, only when vpmm_sim_step or a
 * host wait (cuStreamSynchronize, cuEventSynchronize, cuCtxSynchronize, cuMemFree, a synchronous copy...) runs it.
 *
 * Races. Streams and the host carry vector clocks. The host is one clock in call order; device work enters it only by
 * a query or wait that returned CUDA_SUCCESS. Two accesses to one physical page, one of them a write, that nothing
 * orders are a race; so is an unmap (a write) that is not ordered after the mapping's last use. Each is reported on
 * stderr with both call sites, and counted.
 *
 * Cost. Every call is charged the time that it took on an H200, to the thread that made it; 0.1 us where none was
 * measured.
 *
 * Memory pools. cuMemAllocFromPoolAsync is served by a plain best fit of the simulator's own, which never moves memory
 * as the driver's does: it holds more and takes other times, so that beside it an allocator looks better than it is.
 * What the driver's pool does is measured on a GPU.
 *
 * Faults. A call of a kind can be made to fail: before it takes effect, or after.
 *
 * Threads: everything here may be called from any thread. Several simulators may live at once.
 */
#ifndef VPMM_SIM_H
#define VPMM_SIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <vpmm/driver.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct vpmm_sim vpmm_sim;

typedef struct vpmm_sim_config {
    size_t memory_bytes; /* of the device, 2 MiB to 512 GiB; 16 GiB. Pages that are never touched cost nothing */
    bool stepped;        /* streams advance only by vpmm_sim_step; false: on threads of their own */
    bool detect_races;   /* true */
    int devices;         /* how many devices the driver shows, at most 16, each with memory_bytes; 1 */
    bool vmm;            /* the devices have virtual memory management; true */
    bool peers;          /* each device can access the others' memory; true */
    size_t va_bytes;     /* address space that can be reserved in all, 2 MiB to 126 TiB; 120 TiB */
} vpmm_sim_config;       /* more fields may follow: start from vpmm_sim_config_default() */

vpmm_sim_config vpmm_sim_config_default(void);

/* NULL configuration: the defaults. NULL result: vpmm_last_error() says why. */
vpmm_sim *vpmm_sim_create(const vpmm_sim_config *);

/* The simulator's table; valid until it is destroyed. Of NULL: one of which no pool can be made (INVALID_VALUE). */
const vpmm_driver *vpmm_sim_driver(vpmm_sim *);

/*
 * Runs at most n queued operations of a stream, as far as they do not wait for another stream. How many it ran. A
 * destroyed stream's handle still runs what it left; so does the default stream, for all of them.
 */
size_t vpmm_sim_step(vpmm_sim *, CUstream, size_t n);

/* Operations queued on a stream and not yet run. */
size_t vpmm_sim_pending(vpmm_sim *, CUstream);

/*
 * Makes the nth call from now (1 is the next) of the named entry fail with `result` before it takes effect, and, with
 * from_then_on, every later one too. nth 0 takes it back. One rule a call name; a new one replaces it.
 */
void vpmm_sim_fail(vpmm_sim *, const char *call, uint64_t nth, CUresult result, bool from_then_on);

/* The same, but the call takes effect and reports failure all the same. */
void vpmm_sim_fail_after(vpmm_sim *, const char *call, uint64_t nth, CUresult result, bool from_then_on);

/* From now on every call answers CUDA_ERROR_DEINITIALIZED, as the driver does while the process exits. */
void vpmm_sim_shutdown(vpmm_sim *);

/* Calls made so far of the named entry; NULL: of every entry. */
uint64_t vpmm_sim_calls(vpmm_sim *, const char *call);

/* What the calls would have cost, in microseconds: by all threads, and by the calling thread. */
double vpmm_sim_charged_us(vpmm_sim *);
double vpmm_sim_thread_charged_us(vpmm_sim *);

/* Physical memory in use on device 0, in bytes: handles not yet freed, and memory of the pools and of cuMemAlloc. */
size_t vpmm_sim_used_bytes(vpmm_sim *);

/* Accesses that nothing ordered, so far. */
uint64_t vpmm_sim_races(vpmm_sim *);

/* Uses of destroyed objects and device accesses without a mapping or access rights, so far; each named on stderr. */
uint64_t vpmm_sim_misuses(vpmm_sim *);

/* What a device may do with the memory at an address, as cuMemGetAccess says; PROT_NONE also where none is mapped. */
CUmemAccess_flags vpmm_sim_access(vpmm_sim *, int device, CUdeviceptr);

/* Stops the streams and frees everything. The number of leaked driver objects, each named on stderr. */
int vpmm_sim_destroy(vpmm_sim *);

#ifdef __cplusplus
}
#endif

#endif
