#define _GNU_SOURCE 1

#include "virtual.h"

#include <stdlib.h>
#include <string.h>

enum entry {
#define ENTRY(name, version, parameters, arguments) ENTRY_##name,
    VPMM_DRIVER_ENTRIES(ENTRY)
#undef ENTRY
};

enum kind {
    PLAIN,
    MAPS,         /* served one at a time */
    QUEUES,       /* puts something on a stream */
    WAITS,        /* for a stream, an event, */
    WAITS_FOR_ALL /* or the whole device */
};

static const uint8_t kinds[] = {
    [ENTRY_cuMemAddressReserve] = MAPS,
    [ENTRY_cuMemAddressFree] = MAPS,
    [ENTRY_cuMemCreate] = MAPS,
    [ENTRY_cuMemRelease] = MAPS,
    [ENTRY_cuMemMap] = MAPS,
    [ENTRY_cuMemUnmap] = MAPS,
    [ENTRY_cuMemSetAccess] = MAPS,
    [ENTRY_cuMemGetInfo] = MAPS,
    [ENTRY_cuMemAlloc] = MAPS,
    [ENTRY_cuMemFree] = WAITS_FOR_ALL,
    [ENTRY_cuEventRecord] = QUEUES,
    [ENTRY_cuStreamWaitEvent] = QUEUES,
    [ENTRY_cuStreamSynchronize] = WAITS,
    [ENTRY_cuEventSynchronize] = WAITS,
    [ENTRY_cuCtxSynchronize] = WAITS_FOR_ALL,
    [ENTRY_cuStreamGetId] = PLAIN,
};

/* What was queued on a stream and has not been seen to run: up to its `until`th operation at that time. */
struct queued {
    uint64_t at_ns, until;
    CUstream stream;
};

/* Streams by handle, and events by handle: when the last thing that was queued there will have run. */
struct place {
    uintptr_t handle; /* 0: none */
    uint64_t numbered, last_ns;
};

enum { PLACES_SHIFT = 18, PLACES = 1 << PLACES_SHIFT, QUEUE_START = 1024 }; /* 256 threads of 256 streams, and events */

/* Other processes have the driver meanwhile. */
enum { MAPS_A_STALL = 300 };

static struct {
    vpmm_sim *sim;
    const vpmm_driver *real;
    vpmm_driver table;
    uint64_t lag_ns, stall_ns;
    uint64_t maps;    /* calls that change mappings */
    uint64_t free_ns; /* when the driver's lock is free */
    uint64_t all_ns;  /* when everything that is queued will have run */
    void (*creates)(void);
    virtual_account background;
    struct place streams[PLACES], events[PLACES];
    struct queued *queue; /* a ring, in the order of time */
    size_t first, count, capacity;
} d;

static _Thread_local virtual_account *account;

/* ---- the GPU ---- */

static struct place *place_of(struct place *places, const void *handle)
{
    uintptr_t key = (uintptr_t)handle + 1;
    size_t i = (size_t)((uint64_t)key * UINT64_C(0x9E3779B97F4A7C15) >> (64 - PLACES_SHIFT));
    while (places[i].handle && places[i].handle != key)
        i = (i + 1) % PLACES;
    places[i].handle = key;
    return &places[i];
}

static void push(struct queued q)
{
    if (d.count == d.capacity) {
        size_t capacity = d.capacity ? 2 * d.capacity : QUEUE_START;
        struct queued *queue = malloc(capacity * sizeof *queue);
        if (!queue)
            abort();
        for (size_t i = 0; i < d.count; i++)
            queue[i] = d.queue[(d.first + i) % d.capacity];
        free(d.queue);
        d.queue = queue;
        d.capacity = capacity;
        d.first = 0;
    }
    d.queue[(d.first + d.count++) % d.capacity] = q;
}

/* As far as the GPU has come by that time. Events that others wait for were queued before, and so have run before. */
static void run_gpu(uint64_t now)
{
    while (d.count && d.queue[d.first].at_ns <= now) {
        const struct queued *q = &d.queue[d.first];
        uint64_t done = place_of(d.streams, q->stream)->numbered - vpmm_sim_pending(d.sim, q->stream);
        if (done < q->until)
            vpmm_sim_step(d.sim, q->stream, q->until - done);
        d.first = (d.first + 1) % d.capacity;
        d.count--;
    }
}

static void note_queued(CUstream stream, size_t pending_before, CUevent event)
{
    struct place *place = place_of(d.streams, stream);
    size_t added = vpmm_sim_pending(d.sim, stream) - pending_before;
    uint64_t at = virtual_now_ns() + d.lag_ns;
    place->numbered += added;
    place->last_ns = at;
    if (event)
        place_of(d.events, event)->last_ns = at;
    if (at > d.all_ns)
        d.all_ns = at;
    if (added)
        push((struct queued){at, place->numbered, stream});
    run_gpu(virtual_now_ns());
}

/* ---- around each call ---- */

struct call {
    enum entry entry;
    CUstream stream; /* of QUEUES and WAITS */
    CUevent event;
    size_t bytes; /* of a cuMemCreate */
    size_t pending;
    double charged_us;
};

static void note_call(const struct call *call, uint64_t ns)
{
    virtual_account *a = account ? account : &d.background;
    a->calls++;
    a->ns += ns;
    if (call->entry == ENTRY_cuMemCreate) {
        a->creates++;
        a->created_bytes += call->bytes;
    }
    a->moves += call->entry == ENTRY_cuMemMap;
}

/* Who has come before goes first; a wait takes until the GPU has come so far. After the end of virtual time threads
 * come at once, and who waits for the GPU makes it run. */
static void before(struct call *call)
{
    if (!virtual_is_on())
        return;
    unsigned kind = call->entry < sizeof kinds ? kinds[call->entry] : PLAIN;
    if (call->stream == CU_STREAM_LEGACY) /* its other name */
        call->stream = NULL;
    if (kind == MAPS)
        virtual_spend(0);
    if (kind == WAITS)
        virtual_sleep_until(call->event ? place_of(d.events, call->event)->last_ns
                                        : place_of(d.streams, call->stream)->last_ns);
    if (kind == WAITS_FOR_ALL)
        virtual_sleep_until(d.all_ns);
    run_gpu(virtual_now_ns());
    if (kind == QUEUES)
        call->pending = vpmm_sim_pending(d.sim, call->stream);
    if (call->entry == ENTRY_cuMemCreate && account && d.creates)
        d.creates();
    call->charged_us = vpmm_sim_thread_charged_us(d.sim);
}

static void after(const struct call *call)
{
    if (!virtual_is_on())
        return;
    unsigned kind = call->entry < sizeof kinds ? kinds[call->entry] : PLAIN;
    uint64_t ns = (uint64_t)((vpmm_sim_thread_charged_us(d.sim) - call->charged_us) * 1e3 + 0.5),
             now = virtual_now_ns();
    if (kind == QUEUES)
        note_queued(call->stream, call->pending, call->entry == ENTRY_cuEventRecord ? call->event : NULL);
    if (kind != MAPS) {
        virtual_spend_loosely(ns);
        return;
    }
    note_call(call, ns);
    if (++d.maps % MAPS_A_STALL == 0)
        ns += d.stall_ns;
    d.free_ns = (d.free_ns > now ? d.free_ns : now) + ns;
    virtual_spend(d.free_ns - now);
}

/* What more than the entry must be known of a call is said by the last arguments. */
#define TIMED_CALL(function, of_entry, name, parameters, arguments, ...)                                               \
    static CUresult CUDAAPI function parameters                                                                        \
    {                                                                                                                  \
        struct call call = {.entry = of_entry, __VA_ARGS__};                                                           \
        before(&call);                                                                                                 \
        CUresult result = d.real->name arguments;                                                                      \
        after(&call);                                                                                                  \
        return result;                                                                                                 \
    }

#define TIMED(name, version, parameters, arguments)                                                                    \
    TIMED_CALL(timed_##name, ENTRY_##name, name, parameters, arguments, .bytes = 0)
VPMM_DRIVER_ENTRIES(TIMED)
#undef TIMED

TIMED_CALL(create, ENTRY_cuMemCreate, cuMemCreate,
           (CUmemGenericAllocationHandle * handle, size_t size, const CUmemAllocationProp *prop,
            unsigned long long flags),
           (handle, size, prop, flags), .bytes = size)
TIMED_CALL(record, ENTRY_cuEventRecord, cuEventRecord, (CUevent event, CUstream stream), (event, stream),
           .event = event, .stream = stream)
TIMED_CALL(wait_event, ENTRY_cuStreamWaitEvent, cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned int flags),
           (stream, event, flags), .event = event, .stream = stream)
TIMED_CALL(synchronize_stream, ENTRY_cuStreamSynchronize, cuStreamSynchronize, (CUstream stream), (stream),
           .stream = stream)
TIMED_CALL(synchronize_event, ENTRY_cuEventSynchronize, cuEventSynchronize, (CUevent event), (event), .event = event)

const vpmm_driver *virtual_driver_open(vpmm_sim *sim, uint64_t lag_ns, uint64_t stall_ns, void (*creates)(void))
{
    memset(&d, 0, sizeof d);
    d.sim = sim;
    d.real = vpmm_sim_driver(sim);
    d.lag_ns = lag_ns;
    d.stall_ns = stall_ns;
    d.creates = creates;
    d.table = (vpmm_driver){.size = sizeof d.table,
#define ROW(name, version, parameters, arguments) .name = timed_##name,
                            VPMM_DRIVER_ENTRIES(ROW)
#undef ROW
    };
    d.table.cuMemCreate = create;
    d.table.cuEventRecord = record;
    d.table.cuStreamWaitEvent = wait_event;
    d.table.cuStreamSynchronize = synchronize_stream;
    d.table.cuEventSynchronize = synchronize_event;
    return &d.table;
}

void virtual_driver_close(void)
{
    free(d.queue);
    d.queue = NULL;
    d.count = d.capacity = 0;
}

void virtual_driver_account(virtual_account *a)
{
    account = a;
}

virtual_account virtual_driver_background(void)
{
    return d.background;
}
