/*
 * device.h - one device as the pool drives it: the driver table, the context, and what every call needs around it.
 *
 * Calls go through device_call(), which counts them, keeps the name and result for the error message, and notices a
 * driver that shuts down (`gone`). Only what is asked on a hit, and what is taken back where a failure is reported
 * already, is called directly. A device is lost when a call answers an error that no later call recovers from
 * (is_sticky), when the question about an event is answered by an error that is about the device and not about the call
 * (fence.c), and when the driver does not even say how much memory there is (device_probe). From then on no fence
 * passes, nothing is unmapped, and calls answer DRIVER.
 *
 * Driver calls are made between device_enter and device_leave, which
 *   - make a context of the device current if the thread has none of it (push and pop do not scale over threads, so
 *     they are looked for first and mostly not needed);
 *   - put the thread into relaxed capture mode: an event query in another mode would destroy a graph capture that
 *     another thread has begun in global mode.
 * The pair nests, and costs about 20 ns.
 */
#ifndef VPMM_LIB_DEVICE_H
#define VPMM_LIB_DEVICE_H

#include "base/atomic.h"
#include "base/stats.h"
#include "base/status.h"

#include <vpmm/driver.h>

struct device {
    vpmm_driver driver; /* the caller's table, entries beyond its size NULL; constant */
    int ordinal;
    CUdevice id;
    CUcontext primary; /* retained */
    bool has_vmm, has_pools, can_export, can_rdma;
    size_t granularity, total_bytes;
    char name[128], uuid[41]; /* constant; "" if the driver would not say */
    struct stats *stats;
    _Atomic(uint32_t) lost; /* set once, never cleared */
    _Atomic(uint32_t) gone; /* likewise: the driver shuts down, with everything that it held */
};

struct device_scope {
    CUstreamCaptureMode mode;
    bool pushed, exchanged;
};

/* INVALID_VALUE: the table lacks an entry. NO_DRIVER, NOT_SUPPORTED, DRIVER, OUT_OF_MEMORY: nothing is kept. */
vpmm_status device_open(struct device *, const vpmm_driver *, int ordinal, struct stats *);
vpmm_status device_close(struct device *);

vpmm_status device_enter(struct device *, struct device_scope *); /* DRIVER, OUT_OF_MEMORY: nothing is to be left */
/* The same with one certain context current: for events, which belong to a context, and for stream 0 and its like. */
vpmm_status device_enter_context(struct device *, CUcontext, struct device_scope *);
/*
 * The primary one, as far as the driver lets it: for who cannot turn back, and must still leave others' captures alone.
 */
void device_enter_to_end(struct device *, struct device_scope *);
void device_leave(struct device *, struct device_scope *); /* also of one that is all zeros */

/* The context alone, without the capture mode: *pushed says whether there is one to pop. A refused push leaves none. */
CUresult device_push_context(struct device *, CUcontext, bool *pushed);
void device_pop_context(struct device *);
bool device_context_is_gone(struct device *, CUcontext); /* destroyed by the program, as the primary one never is */

/* Counts a finished call and remembers a failed one for device_failed(); returns the result. */
CUresult device_called(struct device *, enum driver_entry, const char *call, CUresult result);

#define device_call(device, entry, ...)                                                                                \
    device_called((device), ENTRY_##entry, #entry, (device)->driver.entry(__VA_ARGS__))

/* The status and the words for this thread's last failed device_call. `doing` says what it was for. */
vpmm_status device_failed(struct device *, const char *doing);

/* Where a step may fail without a call: whether one of this thread's has failed since it was told to forget. */
void device_forget_failure(void);
bool device_has_failed(void);

/* Whether the driver has failed for good: the device is lost, or the driver shuts down. */
static inline bool device_dead(const struct device *device)
{
    return load_relaxed_u32(&device->lost) || load_relaxed_u32(&device->gone);
}

static inline bool device_lost(const struct device *device)
{
    return load_relaxed_u32(&device->lost) != 0;
}
void device_lose(struct device *);

/* How many bytes of the device's memory nobody has, this process or another, by the driver. */
CUresult device_free_memory(struct device *, size_t *bytes);

/*
 * For who would have to say that something cannot be done now: asks how much memory is free, which no argument can make
 * wrong. If the driver answers that it does not know why not, or that the device is not to be had, and the same when it
 * is asked twice more, the device is lost. The thread's words stay.
 */
void device_probe(struct device *);
vpmm_status device_lost_status(void);

/*
 * The calling thread's current context if it is of this device, else the primary one, also in place of one that is
 * destroyed, or another device's: so vpmm.h says of default streams. DRIVER if the driver would not say which: to guess
 * would take one context's stream 0 for another's, and hand memory from the one to the other with nothing that orders
 * them.
 */
vpmm_status device_current_context(struct device *, CUcontext *);

/* Whether a capture was in the way: the call may work later. */
bool device_result_is_capture(CUresult);

#endif
