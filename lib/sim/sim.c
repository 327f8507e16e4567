/*
 * sim.c - making a simulator, and taking it apart with a list of what its program left behind.
 */
#include "internal.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vpmm/observe.h>

vpmm_sim_config vpmm_sim_config_default(void)
{
    return (vpmm_sim_config){
        .memory_bytes = (size_t)16 << 30,
        .stepped = false,
        .detect_races = true,
        .devices = 1,
        .vmm = true,
        .peers = true,
        .va_bytes = (size_t)120 << 40,
    };
}

/* False with vpmm_last_error set. */
static bool config_valid(const vpmm_sim_config *config)
{
    const size_t most_memory = (size_t)512 << 30; /* the addresses of plain memory end at 1 TiB */
    if (config->memory_bytes < SIM_PAGE || config->memory_bytes > most_memory)
        vpmm_error_set(VPMM_ERROR_INVALID_VALUE, "vpmm_sim_create: memory_bytes is %zu; allowed are 2 MiB to 512 GiB",
                       config->memory_bytes);
    else if (config->devices < 1 || config->devices > SIM_MAX_DEVICES)
        vpmm_error_set(VPMM_ERROR_INVALID_VALUE, "vpmm_sim_create: devices is %d; allowed are 1 to %d", config->devices,
                       SIM_MAX_DEVICES);
    else if (config->va_bytes < SIM_PAGE || config->va_bytes > SIM_VA_LIMIT)
        vpmm_error_set(VPMM_ERROR_INVALID_VALUE, "vpmm_sim_create: va_bytes is %zu; allowed are 2 MiB to 126 TiB",
                       config->va_bytes);
    else
        return true;
    return false;
}

static void free_tables(vpmm_sim *sim)
{
    for (int kind = 1; kind < SIM_KINDS; kind++) {
        struct sim_table *table = &sim->tables[kind];
        for (uint32_t i = 0; i < table->count; i++)
            if (kind == SIM_CONTEXT || kind == SIM_GRAPH)
                free(table->cells[i].object);
        free(table->cells);
    }
}

static void free_events(vpmm_sim *sim)
{
    uint32_t cursor = 0;
    struct sim_event *event;
    while ((event = sim_object_next(sim, SIM_EVENT, &cursor)))
        sim_event_free(sim, event);
}

/* The program's references go first, so that a handle ends with its last mapping, or here if it has none. */
static void free_memory(vpmm_sim *sim)
{
    uint32_t cursor = 0;
    struct sim_handle *handle;
    while ((handle = sim_object_next(sim, SIM_HANDLE, &cursor))) {
        handle->references = 0;
        sim_handle_drop(sim, handle);
    }
    for (size_t leaf = 0; leaf < SIM_LEAVES; leaf++) {
        for (size_t i = 0; sim->leaves[leaf] && i < SIM_LEAF_ENTRIES; i++)
            if (sim->leaves[leaf][i])
                sim_unmap(sim, sim->leaves[leaf][i]);
        free(sim->leaves[leaf]);
        sim->leaves[leaf] = NULL;
    }
    free(sim->reservations);
}

static void free_threads(vpmm_sim *sim)
{
    struct sim_thread *next;
    for (struct sim_thread *thread = atomic_load(&sim->threads); thread; thread = next) {
        next = thread->next;
        free(thread);
    }
}

static void dismantle(vpmm_sim *sim)
{
    sim_captures_free(sim);
    sim_free_lanes(sim);
    free_events(sim);
    sim_pools_free(sim);
    free_memory(sim);
    free_tables(sim);
    sim_clock_drop(sim->host_clock);
    free(sim->glances);
    free_threads(sim);
    for (int device = 0; device < sim->config.devices; device++)
        sim_device_close(&sim->devices[device]);
    pthread_cond_destroy(&sim->worker_gone);
    pthread_mutex_destroy(&sim->lock);
    free(sim);
}

vpmm_sim *vpmm_sim_create(const vpmm_sim_config *given)
{
    vpmm_sim_config config = given ? *given : vpmm_sim_config_default();
    if (!config_valid(&config))
        return NULL;
    vpmm_sim *sim = calloc(1, sizeof *sim);
    struct sim_glance *glances = calloc(SIM_STREAM_LIMIT, sizeof *glances);
    if (!sim || !glances) {
        free(sim);
        free(glances);
        vpmm_error_set(VPMM_ERROR_HOST_MEMORY, "vpmm_sim_create: no host memory for the simulator");
        return NULL;
    }
    sim->config = config;
    sim->glances = glances;
    pthread_mutex_init(&sim->lock, NULL);
    pthread_cond_init(&sim->worker_gone, NULL);
    for (int device = 0; device < SIM_MAX_DEVICES; device++)
        sim->devices[device].fd = -1;
    for (int device = 0; device < config.devices; device++)
        if (sim_device_open(&sim->devices[device], config.memory_bytes) != CUDA_SUCCESS) {
            vpmm_error_set(VPMM_ERROR_HOST_MEMORY, "vpmm_sim_create: %zu bytes of simulated memory cannot be had: %s",
                           config.memory_bytes, strerror(errno));
            dismantle(sim);
            return NULL;
        }
    if (!sim_slot_take(sim)) {
        vpmm_error_set(VPMM_ERROR_INVALID_VALUE,
                       "vpmm_sim_create: %d simulators live already, and no more are possible", SIM_SLOTS);
        dismantle(sim);
        return NULL;
    }
    return sim;
}

const vpmm_driver *vpmm_sim_driver(vpmm_sim *sim)
{
    static const vpmm_driver none = {0}; /* of which no pool can be made: not NULL, which is libcuda */
    return sim ? &sim->driver : &none;
}

uint64_t vpmm_sim_races(vpmm_sim *sim)
{
    pthread_mutex_lock(&sim->lock);
    uint64_t races = sim->races;
    pthread_mutex_unlock(&sim->lock);
    return races;
}

/* ---- leaks ---- */

static void leak(void *count, const char *what, uint64_t which, size_t bytes)
{
    enum { SAID_AT_MOST = 50 };
    int *leaks = count;
    if (++*leaks > SAID_AT_MOST)
        return;
    fprintf(stderr, "vpmm sim: leak: %s 0x%llx", what, (unsigned long long)which);
    if (bytes)
        fprintf(stderr, ", %zu bytes", bytes);
    fprintf(stderr, "\n");
}

static void leaked_objects(vpmm_sim *sim, int *leaks)
{
    uint32_t cursor = 0;
    struct sim_graph *graph;
    struct sim_event *event;
    struct sim_lane *lane;
    struct sim_handle *handle;
    while ((graph = sim_object_next(sim, SIM_GRAPH, &cursor)))
        leak(leaks, "graph", (uint64_t)(uintptr_t)graph->handle, 0);
    for (cursor = 0; (event = sim_object_next(sim, SIM_EVENT, &cursor));)
        leak(leaks, "event", (uint64_t)(uintptr_t)event->handle, 0);
    for (cursor = 0; (lane = sim_object_next(sim, SIM_STREAM, &cursor));)
        leak(leaks, "stream", (uint64_t)(uintptr_t)lane->handle, 0);
    for (cursor = 0; (handle = sim_object_next(sim, SIM_HANDLE, &cursor));)
        if (handle->references)
            leak(leaks, "physical handle", handle->handle, sim_handle_bytes(handle));
}

static void leaked_contexts(vpmm_sim *sim, int *leaks)
{
    uint32_t cursor = 0;
    struct sim_context *context;
    while ((context = sim_object_next(sim, SIM_CONTEXT, &cursor)))
        if (context->alive)
            leak(leaks, context->primary ? "retained primary context" : "context", (uint64_t)(uintptr_t)context->handle,
                 0);
}

static void leaked_addresses(vpmm_sim *sim, int *leaks)
{
    for (size_t leaf = 0; leaf < SIM_LEAVES; leaf++)
        for (size_t i = 0; sim->leaves[leaf] && i < SIM_LEAF_ENTRIES; i++) {
            const struct sim_mapping *mapping = sim->leaves[leaf][i];
            CUdeviceptr here = ((CUdeviceptr)leaf << SIM_LEAF_BITS | i) << SIM_PAGE_SHIFT;
            if (mapping && mapping->base == here && mapping->owner != SIM_OWNER_POOL)
                leak(leaks, mapping->owner == SIM_OWNER_PLAIN ? "cuMemAlloc allocation" : "mapping", here,
                     mapping->size);
        }
    for (size_t i = 0; i < sim->reservation_count; i++)
        if (!sim->reservations[i].internal)
            leak(leaks, "address reservation", sim->reservations[i].base, sim->reservations[i].size);
}

int vpmm_sim_destroy(vpmm_sim *sim)
{
    int leaks = 0;
    if (!sim)
        return 0;
    sim_slot_leave(sim);
    pthread_mutex_lock(&sim->lock);
    sim_stop_lanes(sim);
    leaked_objects(sim, &leaks);
    sim_pools_leaks(sim, leak, &leaks);
    leaked_contexts(sim, &leaks);
    leaked_addresses(sim, &leaks);
    pthread_mutex_unlock(&sim->lock);
    dismantle(sim);
    return leaks;
}
