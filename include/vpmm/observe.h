/*
 * vpmm/observe.h - what who watches pools asks beside vpmm_stats: driver calls by name, how long mallocs take that go
 * to the driver, whether the reaper works, which device it is, and where memory is mapped. The exporter is made of
 * these.
 *
 * Threads: any, while others allocate. Nothing here takes a lock or makes a driver call, and but for a count in each
 * stream's record, by vpmm_health_get of a pool without a thread, nothing writes to memory that a malloc or free reads.
 * Each number is right, but two of them may be of different instants. All work on a pool whose device is lost.
 * INVALID_VALUE: a NULL argument.
 */
#ifndef VPMM_OBSERVE_H
#define VPMM_OBSERVE_H

#include <vpmm/vpmm.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * One entry of the driver table, as this pool has used it: but for calls that look which context is current, which
 * count only if they fail, and those that clean up after another has failed.
 */
typedef struct vpmm_call_counts {
    const char *call;      /* "cuMemMap"; constant */
    uint64_t made, failed; /* since the pool's creation. CUDA_ERROR_NOT_READY is an answer, not a failure */
} vpmm_call_counts;

#define VPMM_COUNT_ENTRY(name, version, parameters, arguments) +1
enum { VPMM_DRIVER_CALLS = 0 VPMM_DRIVER_ENTRIES(VPMM_COUNT_ENTRY) };
#undef VPMM_COUNT_ENTRY

/* One element for each entry of VPMM_DRIVER_ENTRIES, in its order. */
vpmm_status vpmm_calls_get(vpmm_pool *, vpmm_call_counts out[VPMM_DRIVER_CALLS]);

/*
 * How long mallocs took that found no passed free memory at once, and so asked the driver, waited or built; the time
 * begins where that was found out. A malloc that gets a piece of a page counts if a page was needed for it and none was
 * free. Others are not timed, which costs them nothing. Failures count.
 */
enum { VPMM_LATENCY_BUCKETS = 20 };
typedef struct vpmm_latency {
    uint64_t count[VPMM_LATENCY_BUCKETS]; /* [i]: at most 2^i microseconds, and more than [i - 1]; the last: the rest */
    uint64_t sum_ns;
} vpmm_latency;

vpmm_status vpmm_latency_get(vpmm_pool *, vpmm_latency *);

typedef struct vpmm_health {
    bool lost;              /* the driver has failed for good, or shuts down: no fence passes any more, and calls that
                               need it answer DRIVER */
    bool reaper;            /* the pool has a thread that makes passes; else the program calls vpmm_poll */
    uint64_t reaper_age_ns; /* since the latest pass ended, by that thread or, without it, by hand. 0 while the thread
                               sleeps because nothing is pending, without a thread while nothing is, in a graph's pool,
                               which has nothing to look for, and in a pool that has no pages. Without a thread it
                               counts from that pass also where something is pending since a moment ago alone */
} vpmm_health;

vpmm_status vpmm_health_get(vpmm_pool *, vpmm_health *);

typedef struct vpmm_device {
    int ordinal;
    char name[128];      /* "NVIDIA H200"; "" if the driver would not say */
    char uuid[41];       /* "GPU-01234567-89ab-cdef-0123-456789abcdef", as nvidia-smi writes it; "" likewise */
    size_t memory_bytes; /* of the device */
    size_t page_size;    /* of the pool */
    size_t max_mapped;   /* the pool's cap on mapped and quarantined bytes; 0: none */
} vpmm_device;

vpmm_status vpmm_device_get(vpmm_pool *, vpmm_device *);

/* What a mapped range of a pool's address space is: what vpmm_dump writes as [X] and [-X]. */
typedef enum vpmm_range_state {
    VPMM_RANGE_LIVE, /* one allocation of whole pages */
    VPMM_RANGE_CUT,  /* a page that is cut into pieces, live and free ones; the last may go on in the next page */
    VPMM_RANGE_FREE, /* reusable */
    VPMM_RANGE_BUSY, /* in the hands of a call under way: free, or being mapped or unmapped */
} vpmm_range_state;

typedef struct vpmm_range {
    CUdeviceptr address;
    size_t bytes; /* whole pages */
    vpmm_range_state state;
} vpmm_range;

/*
 * Calls visit, on this thread, for each mapped range, in ascending order within each chunk of address space; `data` is
 * the caller's. Two free ranges may be neighbours. It may call any function of the pool but vpmm_pool_destroy and
 * vpmm_check. Beside other threads' calls each range is as it was at one instant, and two of them may be of different
 * ones: a range that changes meanwhile may be missed, or be there twice. Takes as long as there are regions, holes
 * included. A pool without pages has none, and a parked one (vpmm_park).
 */
vpmm_status vpmm_ranges_visit(vpmm_pool *, void (*visit)(void *data, const vpmm_range *), void *data);

/* A live allocation of the pool's pages, whole ones or pieces of them. */
typedef struct vpmm_allocation {
    CUdeviceptr address;
    size_t requested_bytes; /* as vpmm_malloc was asked for them */
    size_t bytes;           /* that it takes: at least as many */
} vpmm_allocation;

/*
 * Calls visit, on this thread, for each live allocation, in no order: what is still there where vpmm_pool_destroy is
 * BUSY, for example. Beside other threads' calls each is as it was at one instant, and what is allocated or freed
 * meanwhile may be missed; of one whose vpmm_malloc has not returned yet requested_bytes may be what was asked for the
 * last time at this address. visit may call any function of the pool but vpmm_pool_destroy and vpmm_check. Takes as
 * long as there are regions and slices, free ones included. What the driver's pool serves (VPMM_SMALL_ASYNC) is not
 * there.
 */
vpmm_status vpmm_allocations_visit(vpmm_pool *, void (*visit)(void *data, const vpmm_allocation *), void *data);

/*
 * The live allocation that the address is in, as cuMemGetAddressRange says it of cuMemAlloc's memory (of a pool's it
 * says where a physical handle is mapped). Takes longer the further the address is in it: a step for each page, or 8
 * KiB. INVALID_POINTER: it is in none of the pool's pages', or what it is in was freed. INVALID_VALUE: a NULL pool or
 * output.
 */
vpmm_status vpmm_allocation_get(vpmm_pool *, CUdeviceptr, vpmm_allocation *);

/*
 * For who looks at a pool from a thread of its own, as the exporter does between vpmm_exporter_add and _remove: until
 * the end, vpmm_pool_destroy answers BUSY. Each begin has one end. INVALID_VALUE: a NULL pool, a pool that another copy
 * of the library made, an end without a begin.
 */
vpmm_status vpmm_observe_begin(vpmm_pool *);
vpmm_status vpmm_observe_end(vpmm_pool *);

/*
 * Sets the calling thread's vpmm_last_error() and returns the status: for libraries that stand on this one and fail in
 * its manner. The format is printf's; an argument may be vpmm_last_error() itself.
 */
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
vpmm_status
vpmm_error_set(vpmm_status, const char *format, ...);

#ifdef __cplusplus
}
#endif

#endif
