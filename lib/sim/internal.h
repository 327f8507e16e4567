/*
 * internal.h - the nouns of the simulated GPU, and how its files fit together.
 *
 *   call.c      the table: trampolines of each slot, and what is done around every call (count, price, faults)
 *   cost.c      what a call costs on an H200
 *   object.c    handles: numbers that are looked up, never followed, so that a stale one is caught and named
 *   device.c    initialisation, devices, error names
 *   context.c   contexts, and each thread's stack of them
 *   address.c   reservations, the page table, mappings
 *   physical.c  pages of devices, and handles over them
 *   stream.c    lanes, their queues, running them, waiting
 *   event.c     events
 *   work.c      copies, memsets, host functions
 *   capture.c   stream capture
 *   pool.c      plain memory, host memory, memory pools
 *   race.c      clocks and the race detector
 *   sim.c       creation, destruction, the public questions
 *
 * Addresses. A device address is a number: reserving hands out a range of numbers and costs nothing, however long.
 * A page table of the simulator's own leads from a page of addresses to a mapping, from that to its handle, and from
 * that to pages of one memfd a device, which is mapped once, as a whole. Only copies and memsets touch device memory,
 * and all go through here, so that two addresses of a handle are the same bytes although the kernel has a single
 * mapping: no limit of 65,530, no mmap on any path, and 8 TiB reservations under ThreadSanitizer.
 *
 * Streams. A *stream* is a handle, a *lane* the queue behind it. Destroying a stream orphans its lane, which runs dry
 * on its own, while the handle is given to the next stream. Operations of a lane are numbered 1, 2, ...; `done` is the
 * last that has run. An event is (lane, number): it has happened if and only if number <= lane's done.
 *
 * Locking. One mutex a simulator. A call holds it from sim_enter to sim_leave but for: the moving of bytes, host
 * functions, and waits for a condition. Everything below is guarded by it unless the field says otherwise.
 */
#ifndef VPMM_SIM_INTERNAL_H
#define VPMM_SIM_INTERNAL_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* memfd_create, fallocate, dladdr: every file of the simulator includes this one first */
#endif

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <vpmm/sim.h>

enum {
    SIM_SLOTS = 16,
    SIM_MAX_DEVICES = 16,
    SIM_CONTEXT_DEPTH = 32,
    SIM_PAGE_SHIFT = 21,
    SIM_STREAM_LIMIT = 1 << 16,
    SIM_LEAF_BITS = 13, /* a leaf of the page table serves 16 GiB of addresses */
    SIM_LEAF_ENTRIES = 1 << SIM_LEAF_BITS,
    SIM_LEAVES = 1 << (47 - SIM_PAGE_SHIFT - SIM_LEAF_BITS),
};
#define SIM_PAGE ((size_t)1 << SIM_PAGE_SHIFT)

/* Reservations come from [1 TiB, 1 TiB + va_bytes); plain memory and pools have their addresses below that. */
#define SIM_PLAIN_BASE ((CUdeviceptr)8 << 30)
#define SIM_VA_BASE    ((CUdeviceptr)1 << 40)
#define SIM_VA_LIMIT   ((size_t)126 << 40)

/* One number for each entry of the table. */
enum sim_entry {
#define SIM_ENTRY(name, version, parameters, arguments) SIM_##name,
    VPMM_DRIVER_ENTRIES(SIM_ENTRY)
#undef SIM_ENTRY
        SIM_ENTRIES
};

/* The entries, under CUDA's signatures: the simulator is sim_self(). Called with the lock held, but for light ones. */
#define SIM_DECLARE(name, version, parameters, arguments) CUresult sim_##name parameters;
VPMM_DRIVER_ENTRIES(SIM_DECLARE)
#undef SIM_DECLARE

/* ---- objects ---- */

enum sim_kind { SIM_STREAM = 1, SIM_EVENT, SIM_CONTEXT, SIM_HANDLE, SIM_POOL, SIM_GRAPH, SIM_KINDS };

struct sim_cell {
    void *object; /* NULL: free */
    uint32_t next_free;
    uint16_t generation; /* of the object, or of the next one */
};

struct sim_table {
    struct sim_cell *cells;
    uint32_t count, capacity, free_head; /* free_head: index + 1 of the cell freed last */
};

/* ---- physical memory ---- */

struct sim_site;

/* One op's use of a part of a physical page; see race.c. */
struct sim_access {
    struct sim_site *site;
    uint64_t mapping; /* serial of the mapping it went through; 0: unmapped since, and found in order */
    uint32_t lo, hi;  /* bytes of the page */
    bool write;
};

struct sim_shadow {
    struct sim_access *uses;
    uint32_t count, capacity;
};

struct sim_context;

struct sim_device {
    int fd;
    char *bytes;                             /* the memfd, all of it */
    uint32_t pages, pages_used, pages_fresh; /* pages from pages_fresh up were never handed out */
    uint32_t *free_pages;                    /* a stack of the ones that came back */
    uint32_t free_count;
    uint8_t *touched;          /* page may hold something else than zeroes */
    struct sim_shadow *shadow; /* by page */
    struct sim_context *primary;
    CUmemoryPool default_pool;
};

/* Physical memory. Lives while the program holds references or a mapping shows it. */
struct sim_handle {
    uint64_t handle; /* 0: of plain memory or a pool, not the program's */
    int device;
    bool exportable; /* as a file descriptor */
    uint32_t page_count;
    uint32_t references, mappings;
    uint32_t pages[];
};

/* ---- addresses ---- */

enum sim_owner { SIM_OWNER_PROGRAM, SIM_OWNER_PLAIN, SIM_OWNER_POOL };

struct sim_mapping {
    CUdeviceptr base;
    size_t size;
    struct sim_handle *handle;
    uint64_t serial;                    /* never used again */
    uint64_t since[SIM_MAX_DEVICES][2]; /* host time at which a device may read, write: work queued before must not */
    void *owned_by;                     /* a pool's block; of plain memory the context that it was allocated in */
    struct sim_mapping *next_plain;     /* of the context's */
    enum sim_owner owner;
    uint8_t access[SIM_MAX_DEVICES]; /* CUmemAccess_flags of each device */
};

struct sim_reservation {
    CUdeviceptr base;
    size_t size;
    uint32_t mappings;
    bool internal;
};

/* ---- clocks ---- */

/* What someone knows of the lanes: t[lane] is the last operation known to have run. Shared, copied when written. */
struct sim_clock {
    uint32_t references, count;
    uint64_t t[];
};

/* Who made an access: shared by the shadow entries of one operation. */
struct sim_site {
    uint32_t references;
    uint32_t lane;
    uint64_t number;
    enum sim_entry entry;
    const void *caller;
    CUstream stream;
    CUdeviceptr address;
    size_t bytes;
    const struct sim_site *reported; /* the site of the last race report against this one: one report a pair */
};

/* ---- streams ---- */

/* A point in a lane whose clock someone may want: an event's latest record, a stream-ordered free. */
struct sim_record {
    uint32_t references;
    uint32_t lane;
    uint64_t number;
    struct sim_clock *clock; /* the lane's when the point was passed */
    bool joined;             /* stands for points of other lanes as well; all have been passed */
    uint64_t capture;        /* recorded inside this capture: it is no point in time */
};

struct sim_dependency {
    uint32_t lane;
    uint64_t number;
    struct sim_record *record; /* NULL: the whole lane up to number, as legacy streams wait */
};

enum sim_op_kind { SIM_OP_MARK, SIM_OP_MEMSET, SIM_OP_COPY, SIM_OP_HOST, SIM_OP_GIVE_UP };

/* One end of a copy, or the target of a memset: rows of bytes in the host's memory or in the device's. */
struct sim_rows {
    char *host; /* NULL: device */
    CUdeviceptr device;
    size_t pitch;
};

struct sim_op {
    struct sim_op *next;
    enum sim_op_kind kind;
    uint64_t number;
    struct sim_site *site;
    struct sim_record *record; /* completed by this op, or NULL */
    struct sim_clock *clock;   /* what the host knew when it queued the op */
    uint64_t host_time;
    struct sim_dependency *dependencies;
    uint32_t dependency_count;
    struct sim_dependency one; /* where one is all there is */
    struct sim_rows to, from;
    size_t width, height; /* bytes, rows */
    uint32_t value;
    int value_bytes;
    CUhostFn function;
    void *data;   /* of the function */
    void *staged; /* copy of pageable host memory, freed with the op */
};

struct sim_capture;

/* A host wait for a point of a lane, on the stack of who waits: what the lane knew there. */
struct sim_waiter {
    struct sim_waiter *next;
    uint64_t number;
    struct sim_clock *clock;
};

struct sim_lane {
    struct sim_waiter *waiters;
    uint32_t id;
    struct sim_context *context; /* NULL: destroyed */
    CUcontext home;              /* its context, also after its end */
    int device;                  /* of the context */
    CUstream handle;             /* as the program knew it, also after its end */
    uint64_t stream_id;
    unsigned flags;
    uint64_t thread; /* of the per-thread stream of that thread; else 0 */
    bool legacy, orphan, running, worker;
    struct sim_op *head, *tail;
    size_t queued;
    uint64_t numbered, done;
    struct sim_clock *clock;
    struct sim_capture *capture;
    uint64_t captured;                /* nodes that it has added to a capture, ever */
    struct sim_clock *captured_clock; /* and of the others' those that its next node comes after */
    struct sim_lane *next_in_context;
    pthread_cond_t work, progress; /* something was queued; done has grown */
};

struct sim_context {
    CUcontext handle;
    int device;
    bool primary, alive;
    unsigned flags, retained;
    struct sim_lane *lanes; /* its streams, legacy and per-thread ones included, while they live */
    struct sim_lane *legacy;
    struct sim_mapping *plain; /* a list of what cuMemAlloc gave, which ends with the context */
};

struct sim_event {
    CUevent handle;
    struct sim_context *context;
    struct sim_record *last;
};

struct sim_graph {
    CUgraph handle;
    size_t nodes;
};

struct sim_capture {
    uint64_t id;
    struct sim_lane *origin;
    uint64_t thread;
    CUstreamCaptureMode mode;
    bool lost;
    size_t nodes;
    struct sim_capture *next;
};

/* What streams and capture tell without the lock, so that calls that scale on a GPU scale here. By handle index. */
struct sim_glance {
    _Atomic uint64_t stream_id; /* 0: no such stream */
    _Atomic int capture;        /* CUstreamCaptureStatus */
};

/* ---- the simulator ---- */

struct sim_fault {
    uint64_t countdown; /* 0: no rule; 1: the next call */
    CUresult result;
    bool after, from_then_on;
};

struct sim_host_block {
    char *base;
    size_t size;
};

struct sim_pool;
struct sim_chunk;

struct vpmm_sim {
    int slot;            /* constant */
    uint64_t generation; /* constant: tells this simulator from an earlier one in its slot */
    vpmm_sim_config config;
    vpmm_driver driver;
    pthread_mutex_t lock;

    _Atomic bool initialised, shut_down;
    _Atomic int sticky; /* CUresult that every later call gets */
    _Atomic uint64_t calls[SIM_ENTRIES];
    _Atomic uint64_t charged_ps;
    _Atomic uint64_t misuses;
    _Atomic uint32_t rules; /* faults armed */
    struct sim_fault faults[SIM_ENTRIES];
    _Atomic(struct sim_thread *) threads; /* that have called, in a list that only grows */

    struct sim_table tables[SIM_KINDS];
    struct sim_glance *glances;

    struct sim_device devices[SIM_MAX_DEVICES];

    struct sim_reservation *reservations; /* by address */
    size_t reservation_count, reservation_capacity;
    size_t reserved_bytes; /* of the program's */
    struct sim_mapping **leaves[SIM_LEAVES];
    uint64_t mapping_serial;

    struct sim_lane **lanes; /* by id */
    uint32_t lane_count, lane_capacity;
    uint64_t stream_ids;
    uint32_t workers; /* threads of lanes */
    bool stopping;
    pthread_cond_t worker_gone;

    struct sim_capture *captures;
    uint64_t capture_ids;

    struct sim_clock *host_clock;
    uint64_t host_time; /* of the host's own acts that later work relies on */
    uint64_t races;

    struct sim_pool *pools;
    struct sim_chunk **chunks; /* live allocations of pools, hashed by address */
    size_t chunk_count, chunk_buckets;
    struct sim_host_block *host_blocks;
    size_t host_block_count, host_block_capacity;
};

/* ---- call.c ---- */

/* One call under way in this thread, or one host function. */
struct sim_frame {
    vpmm_sim *sim;
    struct sim_frame *outer;
    const void *caller;
    enum sim_entry entry;
    bool in_host_function;
    bool locked, light;
    bool fail_after;
    CUresult after;
};

/* What a thread has with a simulator. Only its thread reads it, but for the first two; it goes with the simulator. */
struct sim_thread {
    struct sim_thread *next; /* constant, as is the next */
    uint64_t id;             /* of the thread, never used again */
    uint64_t charged_ps;
    CUstreamCaptureMode mode;
    int depth;
    CUcontext contexts[SIM_CONTEXT_DEPTH];
};

vpmm_sim *sim_self(void);
struct sim_frame *sim_frame(void);
struct sim_thread *sim_thread(vpmm_sim *sim); /* the calling thread's; NULL: no memory; no call gets past that */
const char *sim_entry_name(enum sim_entry entry);
bool sim_slot_take(vpmm_sim *sim);
void sim_slot_leave(vpmm_sim *sim);

/* Around a host function: what the thread calls of this simulator meanwhile is misuse. */
void sim_host_enter(struct sim_frame *frame, vpmm_sim *sim);
void sim_host_leave(const struct sim_frame *frame);

/* Takes the lock if this call, a light one, does not have it yet. */
void sim_lock_frame(void);

/* Says and counts a use of something that is not there; returns the result given. */
__attribute__((format(printf, 3, 4))) CUresult sim_misuse(vpmm_sim *sim, CUresult result, const char *format, ...);

/* ---- cost.c ---- */

double sim_price(enum sim_entry entry);
double sim_price_create(size_t bytes);
double sim_price_access(size_t bytes);
double sim_price_unmap(size_t bytes);
double sim_price_release(size_t bytes);
double sim_price_plain_alloc(size_t bytes);
double sim_price_plain_free(size_t bytes);
double sim_price_pool_growth(size_t bytes);
void sim_charge(vpmm_sim *sim, double microseconds);

/* ---- object.c ---- */

uint64_t sim_object_add(vpmm_sim *sim, enum sim_kind kind, void *object);  /* 0: no memory, or too many */
void *sim_object_find(vpmm_sim *sim, enum sim_kind kind, uint64_t handle); /* NULL: counted as misuse, and said */
void *sim_object_peek(vpmm_sim *sim, enum sim_kind kind, uint64_t handle); /* NULL: silently */
void sim_object_remove(vpmm_sim *sim, enum sim_kind kind, uint64_t handle);
void *sim_object_next(vpmm_sim *sim, enum sim_kind kind, uint32_t *cursor);
uint32_t sim_object_index(uint64_t handle);
uint64_t sim_stream_handle(vpmm_sim *sim, uint32_t index); /* streams have no generation */

/* ---- context.c ---- */

CUresult sim_current(vpmm_sim *sim, struct sim_context **context);
struct sim_context *sim_context_of_step(vpmm_sim *sim);
bool sim_device_valid(vpmm_sim *sim, CUdevice device);

/* ---- physical.c ---- */

CUresult sim_device_open(struct sim_device *device, size_t bytes);
void sim_device_close(struct sim_device *device);
CUresult sim_handle_make(vpmm_sim *sim, int device, size_t bytes, struct sim_handle **out);
void sim_handle_drop(vpmm_sim *sim, struct sim_handle *handle); /* frees it if nothing holds it any more */
size_t sim_handle_bytes(const struct sim_handle *handle);

/* ---- address.c ---- */

struct sim_mapping *sim_mapping_at(vpmm_sim *sim, CUdeviceptr address);
struct sim_mapping *sim_map(vpmm_sim *sim, CUdeviceptr base, struct sim_handle *handle);
void sim_unmap(vpmm_sim *sim, struct sim_mapping *mapping);

/* Device memory at an address of its own, for plain memory and pools. */
CUresult sim_internal_alloc(vpmm_sim *sim, int device, size_t bytes, enum sim_owner owner, struct sim_mapping **out);
void sim_internal_free(vpmm_sim *sim, struct sim_mapping *mapping);
void sim_plain_end(vpmm_sim *sim, struct sim_context *context); /* frees what cuMemAlloc gave there */

/* ---- stream.c ---- */

CUresult sim_lane_of(vpmm_sim *sim, CUstream stream, struct sim_lane **lane);
void sim_lane_close(vpmm_sim *sim, struct sim_lane *lane);
struct sim_op *sim_op_new(enum sim_op_kind kind);
void sim_op_depend(struct sim_op *op, struct sim_record *record);
void sim_op_free(struct sim_op *op);
CUresult sim_submit(vpmm_sim *sim, struct sim_lane *lane, struct sim_op *op); /* the op is consumed whatever happens */
void sim_await(vpmm_sim *sim, uint32_t lane, uint64_t number);
void sim_wait(vpmm_sim *sim, uint32_t lane, uint64_t number); /* and the host has seen it */
CUresult sim_waited(vpmm_sim *sim);                           /* what a host wait then answers */
void sim_host_learns(vpmm_sim *sim, struct sim_clock *clock, uint32_t lane, uint64_t number);
void sim_drain_context(vpmm_sim *sim, struct sim_context *context);
void sim_drain_device(vpmm_sim *sim, int device);
void sim_stop_lanes(vpmm_sim *sim);
void sim_free_lanes(vpmm_sim *sim);
struct sim_record *sim_record_new(void);
struct sim_record *sim_record_hold(struct sim_record *record);
void sim_record_drop(struct sim_record *record);
bool sim_record_passed(vpmm_sim *sim, const struct sim_record *record);

/* ---- event.c ---- */

void sim_event_free(vpmm_sim *sim, struct sim_event *event);

/* ---- work.c ---- */

/* Moves the bytes of an op; the lock is held on entry and on return, and not while bytes move. */
void sim_op_run(vpmm_sim *sim, struct sim_lane *lane, struct sim_op *op);

/* ---- capture.c ---- */

/*
 * CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, and every capture that forbids it lost, if this thread may not make an unsafe
 * call now.
 */
CUresult sim_unsafe(vpmm_sim *sim);
/* The same, and the capture lost, if the lane captures: so cuStreamGetId and cuStreamGetFlags (an H200, driver 580). */
CUresult sim_looked_into(vpmm_sim *sim, struct sim_lane *lane);
CUresult sim_unsafe_on(vpmm_sim *sim, struct sim_lane *lane); /* the same for a query of or wait for the lane */
CUresult sim_capture_context(vpmm_sim *sim, struct sim_context *context); /* cuCtxSynchronize: in every mode */
CUresult sim_capture_submit(vpmm_sim *sim, struct sim_lane *lane, const struct sim_op *op, bool *captured);
CUresult sim_capture_wait(vpmm_sim *sim, struct sim_lane *lane, struct sim_record *record, bool *captured);
void sim_capture_forget(vpmm_sim *sim, struct sim_lane *lane);
/* CUDA_ERROR_CAPTURED_EVENT if it was recorded in a capture. */
CUresult sim_captured_event(vpmm_sim *sim, const struct sim_record *record);
void sim_captures_free(vpmm_sim *sim);

/* ---- race.c ---- */

struct sim_clock *sim_clock_hold(struct sim_clock *clock);
void sim_clock_drop(struct sim_clock *clock);
bool sim_clock_knows(const struct sim_clock *clock, uint32_t lane, uint64_t number);
void sim_clock_join(struct sim_clock **into, struct sim_clock *other);
void sim_clock_learn(struct sim_clock **into, uint32_t lane, uint64_t number);
struct sim_site *sim_site_new(CUstream stream, CUdeviceptr address, size_t bytes);
void sim_site_drop(struct sim_site *site);
void sim_race_access(vpmm_sim *sim, const struct sim_lane *lane, struct sim_shadow *page, struct sim_access use);
void sim_race_early(vpmm_sim *sim, const struct sim_op *op, const struct sim_mapping *mapping, int device, bool write);
void sim_race_unmap(vpmm_sim *sim, const struct sim_mapping *mapping);
void sim_race_revoke(vpmm_sim *sim, const struct sim_mapping *mapping, int device, CUmemAccess_flags left);
void sim_shadow_clear(struct sim_shadow *page);

/* ---- pool.c ---- */

void sim_pools_settle(vpmm_sim *sim); /* after a host wait: gives back what exceeds the release thresholds */
void sim_pools_free(vpmm_sim *sim);
bool sim_pool_live(vpmm_sim *sim, CUdeviceptr at, size_t bytes); /* or no pool's */
bool sim_host_pinned(vpmm_sim *sim, const void *p, size_t bytes);

/* What was not given back: each named by `leak`, which counts. */
typedef void sim_leak(void *count, const char *what, uint64_t which, size_t bytes);
void sim_pools_leaks(vpmm_sim *sim, sim_leak *leak, void *count);

#endif
