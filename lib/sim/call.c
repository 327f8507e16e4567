/*
 * call.c - the table of each simulator, and what is done around every call.
 *
 * CUDA's signatures have no room for "which simulator", so there are SIM_SLOTS sets of trampolines, made by macro; a
 * trampoline knows its slot, the slot its simulator. Around the entry itself every call is, in this order: counted and
 * charged; refused after shutdown and inside host functions; failed by a rule that says "before"; refused before
 * cuInit; answered with the sticky error; made; failed by a rule that says "after".
 *
 * Light calls take no lock, as they take none in the driver: what they read is the thread's own or atomic. While a
 * fault rule is armed they take it like all others.
 */
#include "internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum trait {
    PURE = 1,    /* answers in any state */
    LIGHT = 2,   /* takes the lock only if it finds that it needs it */
    EARLY = 4,   /* answers before cuInit */
    SURVIVE = 8, /* answers after a sticky error */
};

static const uint8_t traits[SIM_ENTRIES] = {
    [SIM_cuGetErrorName] = PURE | LIGHT | EARLY | SURVIVE,
    [SIM_cuGetErrorString] = PURE | LIGHT | EARLY | SURVIVE,
    [SIM_cuDriverGetVersion] = LIGHT | EARLY | SURVIVE,
    [SIM_cuInit] = EARLY | SURVIVE,
    [SIM_cuDeviceGetCount] = SURVIVE,
    [SIM_cuDeviceGet] = SURVIVE,
    [SIM_cuDeviceGetName] = SURVIVE,
    [SIM_cuDeviceGetUuid] = SURVIVE,
    [SIM_cuDeviceGetAttribute] = SURVIVE,
    [SIM_cuDeviceTotalMem] = SURVIVE,
    [SIM_cuDeviceCanAccessPeer] = SURVIVE,
    [SIM_cuCtxGetCurrent] = LIGHT | SURVIVE,
    [SIM_cuCtxSetCurrent] = SURVIVE,
    [SIM_cuCtxPushCurrent] = SURVIVE,
    [SIM_cuCtxPopCurrent] = SURVIVE,
    [SIM_cuThreadExchangeStreamCaptureMode] = LIGHT | SURVIVE,
    [SIM_cuStreamIsCapturing] = LIGHT,
    [SIM_cuStreamGetId] = LIGHT,
};

static const char *const names[SIM_ENTRIES] = {
#define SIM_NAME(name, version, parameters, arguments) #name,
    VPMM_DRIVER_ENTRIES(SIM_NAME)
#undef SIM_NAME
};

static _Atomic(vpmm_sim *) slots[SIM_SLOTS];
static _Atomic uint64_t generations, threads;

/* A library that contains the simulator may be loaded late, where there is little thread-local storage: pointers. */
static _Thread_local struct sim_frame *current_frame;
static _Thread_local uint64_t own_id; /* 0: this thread has met no simulator */
static _Thread_local struct {
    uint64_t generation;
    struct sim_thread *thread;
} last_met; /* the simulator that this thread used last, and the record there */

const char *sim_entry_name(enum sim_entry entry)
{
    return names[entry];
}

vpmm_sim *sim_self(void)
{
    return current_frame->sim;
}

struct sim_frame *sim_frame(void)
{
    return current_frame;
}

static struct sim_thread *find_thread(vpmm_sim *sim)
{
    struct sim_thread *thread = atomic_load(&sim->threads);
    while (thread && thread->id != own_id)
        thread = thread->next;
    return thread;
}

static struct sim_thread *add_thread(vpmm_sim *sim)
{
    struct sim_thread *thread = calloc(1, sizeof *thread);
    if (!thread)
        return NULL;
    thread->id = own_id;
    thread->mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    thread->next = atomic_load(&sim->threads);
    while (!atomic_compare_exchange_weak(&sim->threads, &thread->next, thread))
        ;
    return thread;
}

/* A thread that has no number yet is in no list, however long. */
static struct sim_thread *meet(vpmm_sim *sim)
{
    struct sim_thread *thread = own_id ? find_thread(sim) : NULL;
    if (!own_id)
        own_id = atomic_fetch_add(&threads, 1) + 1;
    if (!thread)
        thread = add_thread(sim);
    if (thread) {
        last_met.generation = sim->generation;
        last_met.thread = thread;
    }
    return thread;
}

struct sim_thread *sim_thread(vpmm_sim *sim)
{
    return last_met.generation == sim->generation ? last_met.thread : meet(sim);
}

void sim_host_enter(struct sim_frame *frame, vpmm_sim *sim)
{
    *frame = (struct sim_frame){.sim = sim, .outer = current_frame, .in_host_function = true};
    current_frame = frame;
}

void sim_host_leave(const struct sim_frame *frame)
{
    current_frame = frame->outer;
}

/* Whether this call is made in a host function of its simulator's. */
static bool in_host_function(const struct sim_frame *call)
{
    const struct sim_frame *frame = call->outer;
    while (frame && !(frame->in_host_function && frame->sim == call->sim))
        frame = frame->outer;
    return frame;
}

void sim_lock_frame(void)
{
    if (!current_frame->locked)
        pthread_mutex_lock(&current_frame->sim->lock);
    current_frame->locked = true;
}

CUresult sim_misuse(vpmm_sim *sim, CUresult result, const char *format, ...)
{
    enum { SAID_AT_MOST = 50 };
    if (atomic_fetch_add(&sim->misuses, 1) >= SAID_AT_MOST)
        return result;
    char words[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(words, sizeof words, format, arguments);
    va_end(arguments);
    fprintf(stderr, "vpmm sim: misuse: %s\n", words);
    return result;
}

/* Counts down the entry's rule. True: this call is to fail, and frame says how. */
static bool fault_strikes(vpmm_sim *sim, struct sim_frame *frame)
{
    struct sim_fault *fault = &sim->faults[frame->entry];
    if (fault->countdown == 0 || (fault->countdown > 1 && --fault->countdown >= 1))
        return false;
    frame->after = fault->result;
    frame->fail_after = fault->after;
    if (!fault->from_then_on) {
        fault->countdown = 0;
        atomic_fetch_sub(&sim->rules, 1);
    }
    return true;
}

/* Success: the entry may be made. */
static CUresult sim_admit(vpmm_sim *sim, struct sim_frame *frame)
{
    unsigned trait = traits[frame->entry];
    if (frame->locked && fault_strikes(sim, frame) && !frame->fail_after)
        return frame->after;
    if (!atomic_load(&sim->initialised) && !(trait & EARLY))
        return CUDA_ERROR_NOT_INITIALIZED;
    CUresult sticky = (CUresult)atomic_load(&sim->sticky);
    return trait & SURVIVE ? CUDA_SUCCESS : sticky;
}

static CUresult sim_enter(struct sim_frame *frame, int slot, enum sim_entry entry, const void *caller)
{
    vpmm_sim *sim = atomic_load_explicit(&slots[slot], memory_order_acquire);
    *frame = (struct sim_frame){.sim = sim, .outer = current_frame, .caller = caller, .entry = entry};
    current_frame = frame;
    if (!sim)
        return CUDA_ERROR_DEINITIALIZED;
    unsigned trait = traits[entry];
    atomic_fetch_add_explicit(&sim->calls[entry], 1, memory_order_relaxed);
    if (!sim_thread(sim))
        return CUDA_ERROR_OUT_OF_MEMORY;
    sim_charge(sim, sim_price(entry));
    if (atomic_load(&sim->shut_down) && !(trait & PURE))
        return CUDA_ERROR_DEINITIALIZED;
    if (in_host_function(frame) && !(trait & PURE))
        return sim_misuse(sim, CUDA_ERROR_NOT_PERMITTED, "%s is called from a host function", names[entry]);
    frame->light = trait & LIGHT && atomic_load_explicit(&sim->rules, memory_order_acquire) == 0;
    if (!frame->light)
        sim_lock_frame();
    return sim_admit(sim, frame);
}

static CUresult sim_leave(struct sim_frame *frame, CUresult result)
{
    if (frame->locked)
        pthread_mutex_unlock(&frame->sim->lock);
    current_frame = frame->outer;
    return frame->fail_after ? frame->after : result;
}

/* ---- trampolines ---- */

/*
 * A name may be a macro of cuda.h's (cuMemAlloc is cuMemAlloc_v2), so it is pasted where it stands, in the macro that
 * the list is given; hence a macro for each slot.
 */
#define SIM_TRAMPOLINE(slot, trampoline, entry, target, parameters, arguments)                                         \
    static CUresult CUDAAPI trampoline parameters                                                                      \
    {                                                                                                                  \
        struct sim_frame frame;                                                                                        \
        CUresult result = sim_enter(&frame, slot, entry, __builtin_return_address(0));                                 \
        if (result == CUDA_SUCCESS)                                                                                    \
            result = target arguments;                                                                                 \
        return sim_leave(&frame, result);                                                                              \
    }

#define SIM_SLOT_0(name, v, p, a)  SIM_TRAMPOLINE(0, slot_0_##name, SIM_##name, sim_##name, p, a)
#define SIM_SLOT_1(name, v, p, a)  SIM_TRAMPOLINE(1, slot_1_##name, SIM_##name, sim_##name, p, a)
#define SIM_SLOT_2(name, v, p, a)  SIM_TRAMPOLINE(2, slot_2_##name, SIM_##name, sim_##name, p, a)
#define SIM_SLOT_3(name, v, p, a)  SIM_TRAMPOLINE(3, slot_3_##name, SIM_##name, sim_##name, p, a)
#define SIM_SLOT_4(name, v, p, a)  SIM_TRAMPOLINE(4, slot_4_##name, SIM_##name, sim_##name, p, a)
#define SIM_SLOT_5(name, v, p, a)  SIM_TRAMPOLINE(5, slot_5_##name, SIM_##name, sim_##name, p, a)
#define SIM_SLOT_6(name, v, p, a)  SIM_TRAMPOLINE(6, slot_6_##name, SIM_##name, sim_##name, p, a)
#define SIM_SLOT_7(name, v, p, a)  SIM_TRAMPOLINE(7, slot_7_##name, SIM_##name, sim_##name, p, a)
#define SIM_SLOT_8(name, v, p, a)  SIM_TRAMPOLINE(8, slot_8_##name, SIM_##name, sim_##name, p, a)
#define SIM_SLOT_9(name, v, p, a)  SIM_TRAMPOLINE(9, slot_9_##name, SIM_##name, sim_##name, p, a)
#define SIM_SLOT_10(name, v, p, a) SIM_TRAMPOLINE(10, slot_10_##name, SIM_##name, sim_##name, p, a)
#define SIM_SLOT_11(name, v, p, a) SIM_TRAMPOLINE(11, slot_11_##name, SIM_##name, sim_##name, p, a)
#define SIM_SLOT_12(name, v, p, a) SIM_TRAMPOLINE(12, slot_12_##name, SIM_##name, sim_##name, p, a)
#define SIM_SLOT_13(name, v, p, a) SIM_TRAMPOLINE(13, slot_13_##name, SIM_##name, sim_##name, p, a)
#define SIM_SLOT_14(name, v, p, a) SIM_TRAMPOLINE(14, slot_14_##name, SIM_##name, sim_##name, p, a)
#define SIM_SLOT_15(name, v, p, a) SIM_TRAMPOLINE(15, slot_15_##name, SIM_##name, sim_##name, p, a)
VPMM_DRIVER_ENTRIES(SIM_SLOT_0)
VPMM_DRIVER_ENTRIES(SIM_SLOT_1)
VPMM_DRIVER_ENTRIES(SIM_SLOT_2)
VPMM_DRIVER_ENTRIES(SIM_SLOT_3)
VPMM_DRIVER_ENTRIES(SIM_SLOT_4)
VPMM_DRIVER_ENTRIES(SIM_SLOT_5)
VPMM_DRIVER_ENTRIES(SIM_SLOT_6)
VPMM_DRIVER_ENTRIES(SIM_SLOT_7)
VPMM_DRIVER_ENTRIES(SIM_SLOT_8)
VPMM_DRIVER_ENTRIES(SIM_SLOT_9)
VPMM_DRIVER_ENTRIES(SIM_SLOT_10)
VPMM_DRIVER_ENTRIES(SIM_SLOT_11)
VPMM_DRIVER_ENTRIES(SIM_SLOT_12)
VPMM_DRIVER_ENTRIES(SIM_SLOT_13)
VPMM_DRIVER_ENTRIES(SIM_SLOT_14)
VPMM_DRIVER_ENTRIES(SIM_SLOT_15)

#define SIM_ROW_0(name, v, p, a)  .name = slot_0_##name,
#define SIM_ROW_1(name, v, p, a)  .name = slot_1_##name,
#define SIM_ROW_2(name, v, p, a)  .name = slot_2_##name,
#define SIM_ROW_3(name, v, p, a)  .name = slot_3_##name,
#define SIM_ROW_4(name, v, p, a)  .name = slot_4_##name,
#define SIM_ROW_5(name, v, p, a)  .name = slot_5_##name,
#define SIM_ROW_6(name, v, p, a)  .name = slot_6_##name,
#define SIM_ROW_7(name, v, p, a)  .name = slot_7_##name,
#define SIM_ROW_8(name, v, p, a)  .name = slot_8_##name,
#define SIM_ROW_9(name, v, p, a)  .name = slot_9_##name,
#define SIM_ROW_10(name, v, p, a) .name = slot_10_##name,
#define SIM_ROW_11(name, v, p, a) .name = slot_11_##name,
#define SIM_ROW_12(name, v, p, a) .name = slot_12_##name,
#define SIM_ROW_13(name, v, p, a) .name = slot_13_##name,
#define SIM_ROW_14(name, v, p, a) .name = slot_14_##name,
#define SIM_ROW_15(name, v, p, a) .name = slot_15_##name,

static const vpmm_driver tables[SIM_SLOTS] = {
    {.size = sizeof(vpmm_driver), VPMM_DRIVER_ENTRIES(SIM_ROW_0)},
    {.size = sizeof(vpmm_driver), VPMM_DRIVER_ENTRIES(SIM_ROW_1)},
    {.size = sizeof(vpmm_driver), VPMM_DRIVER_ENTRIES(SIM_ROW_2)},
    {.size = sizeof(vpmm_driver), VPMM_DRIVER_ENTRIES(SIM_ROW_3)},
    {.size = sizeof(vpmm_driver), VPMM_DRIVER_ENTRIES(SIM_ROW_4)},
    {.size = sizeof(vpmm_driver), VPMM_DRIVER_ENTRIES(SIM_ROW_5)},
    {.size = sizeof(vpmm_driver), VPMM_DRIVER_ENTRIES(SIM_ROW_6)},
    {.size = sizeof(vpmm_driver), VPMM_DRIVER_ENTRIES(SIM_ROW_7)},
    {.size = sizeof(vpmm_driver), VPMM_DRIVER_ENTRIES(SIM_ROW_8)},
    {.size = sizeof(vpmm_driver), VPMM_DRIVER_ENTRIES(SIM_ROW_9)},
    {.size = sizeof(vpmm_driver), VPMM_DRIVER_ENTRIES(SIM_ROW_10)},
    {.size = sizeof(vpmm_driver), VPMM_DRIVER_ENTRIES(SIM_ROW_11)},
    {.size = sizeof(vpmm_driver), VPMM_DRIVER_ENTRIES(SIM_ROW_12)},
    {.size = sizeof(vpmm_driver), VPMM_DRIVER_ENTRIES(SIM_ROW_13)},
    {.size = sizeof(vpmm_driver), VPMM_DRIVER_ENTRIES(SIM_ROW_14)},
    {.size = sizeof(vpmm_driver), VPMM_DRIVER_ENTRIES(SIM_ROW_15)},
};

/* ---- slots ---- */

bool sim_slot_take(vpmm_sim *sim)
{
    sim->generation = atomic_fetch_add(&generations, 1) + 1;
    for (int slot = 0; slot < SIM_SLOTS; slot++) {
        vpmm_sim *none = NULL;
        sim->slot = slot;
        sim->driver = tables[slot];
        if (atomic_compare_exchange_strong(&slots[slot], &none, sim))
            return true;
    }
    return false;
}

void sim_slot_leave(vpmm_sim *sim)
{
    atomic_store_explicit(&slots[sim->slot], NULL, memory_order_release);
}

/* ---- counts, faults, shutdown ---- */

static int entry_named(vpmm_sim *sim, const char *asker, const char *name)
{
    for (int entry = 0; entry < SIM_ENTRIES; entry++)
        if (strcmp(names[entry], name) == 0)
            return entry;
    sim_misuse(sim, CUDA_SUCCESS, "%s: the driver table has no entry named \"%s\"", asker, name);
    return -1;
}

static void set_fault(vpmm_sim *sim, const char *asker, const char *call, struct sim_fault fault)
{
    int entry = entry_named(sim, asker, call);
    if (entry < 0)
        return;
    pthread_mutex_lock(&sim->lock);
    if (sim->faults[entry].countdown)
        atomic_fetch_sub(&sim->rules, 1);
    if (fault.countdown)
        atomic_fetch_add(&sim->rules, 1);
    sim->faults[entry] = fault;
    pthread_mutex_unlock(&sim->lock);
}

void vpmm_sim_fail(vpmm_sim *sim, const char *call, uint64_t nth, CUresult result, bool from_then_on)
{
    set_fault(sim, __func__, call, (struct sim_fault){nth, result, false, from_then_on});
}

void vpmm_sim_fail_after(vpmm_sim *sim, const char *call, uint64_t nth, CUresult result, bool from_then_on)
{
    set_fault(sim, __func__, call, (struct sim_fault){nth, result, true, from_then_on});
}

void vpmm_sim_shutdown(vpmm_sim *sim)
{
    atomic_store(&sim->shut_down, true);
}

uint64_t vpmm_sim_calls(vpmm_sim *sim, const char *call)
{
    if (call) {
        int entry = entry_named(sim, __func__, call);
        return entry < 0 ? 0 : atomic_load(&sim->calls[entry]);
    }
    uint64_t sum = 0;
    for (int entry = 0; entry < SIM_ENTRIES; entry++)
        sum += atomic_load(&sim->calls[entry]);
    return sum;
}

uint64_t vpmm_sim_misuses(vpmm_sim *sim)
{
    return atomic_load(&sim->misuses);
}
