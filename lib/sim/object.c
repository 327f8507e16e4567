/*
 * object.c - handles of streams, events, contexts, physical memory, pools and graphs.
 *
 *   bits 47..44 kind | 43..28 generation | 27..24 slot of the simulator | 23..4 index | 3..0 zero
 *
 * A handle is looked up, never followed, so a stale one is found out. All but streams get a new generation when an
 * index is used again; a stream's handle comes back as it was, with the very next stream, as the driver does it.
 */
#include "internal.h"

#include <stdlib.h>

enum { INDEX_BITS = 20, FIRST_CAPACITY = 64 };

static const char *const kind_names[SIM_KINDS] = {
    [SIM_STREAM] = "stream",          [SIM_EVENT] = "event", [SIM_CONTEXT] = "context",
    [SIM_HANDLE] = "physical handle", [SIM_POOL] = "pool",   [SIM_GRAPH] = "graph",
};

static uint64_t handle_of(vpmm_sim *sim, enum sim_kind kind, uint32_t index, uint16_t generation)
{
    return (uint64_t)kind << 44 | (uint64_t)generation << 28 | (uint64_t)sim->slot << 24 | (uint64_t)index << 4;
}

uint32_t sim_object_index(uint64_t handle)
{
    return (uint32_t)(handle >> 4) & ((1U << INDEX_BITS) - 1);
}

uint64_t sim_stream_handle(vpmm_sim *sim, uint32_t index)
{
    return handle_of(sim, SIM_STREAM, index, 0);
}

static bool grow(struct sim_table *table, uint32_t limit)
{
    uint32_t capacity = table->capacity ? table->capacity * 2 : FIRST_CAPACITY;
    if (capacity > limit)
        return false;
    struct sim_cell *cells = realloc(table->cells, capacity * sizeof *cells);
    if (!cells)
        return false;
    table->cells = cells;
    table->capacity = capacity;
    return true;
}

static bool take_cell(struct sim_table *table, enum sim_kind kind, uint32_t *index)
{
    if (table->free_head) {
        *index = table->free_head - 1;
        table->free_head = table->cells[*index].next_free;
        return true;
    }
    uint32_t limit = kind == SIM_STREAM ? SIM_STREAM_LIMIT : 1U << INDEX_BITS;
    if (table->count == table->capacity && !grow(table, limit))
        return false;
    *index = table->count++;
    table->cells[*index] = (struct sim_cell){0};
    return true;
}

uint64_t sim_object_add(vpmm_sim *sim, enum sim_kind kind, void *object)
{
    struct sim_table *table = &sim->tables[kind];
    uint32_t index;
    if (!take_cell(table, kind, &index))
        return 0;
    table->cells[index].object = object;
    return handle_of(sim, kind, index, table->cells[index].generation);
}

void *sim_object_peek(vpmm_sim *sim, enum sim_kind kind, uint64_t handle)
{
    struct sim_table *table = &sim->tables[kind];
    uint32_t index = sim_object_index(handle);
    if (index >= table->count || handle != handle_of(sim, kind, index, table->cells[index].generation))
        return NULL;
    return table->cells[index].object;
}

/* A handle of this simulator's that has been given out and has ended. */
static bool was_object(vpmm_sim *sim, enum sim_kind kind, uint64_t handle)
{
    struct sim_table *table = &sim->tables[kind];
    uint32_t index = sim_object_index(handle);
    uint16_t generation = (uint16_t)(handle >> 28);
    return index < table->count && handle == handle_of(sim, kind, index, generation) &&
           generation <= table->cells[index].generation;
}

void *sim_object_find(vpmm_sim *sim, enum sim_kind kind, uint64_t handle)
{
    void *object = sim_object_peek(sim, kind, handle);
    if (!object)
        sim_misuse(sim, CUDA_SUCCESS, "%s: %s 0x%llx %s", sim_entry_name(sim_frame()->entry), kind_names[kind],
                   (unsigned long long)handle,
                   was_object(sim, kind, handle) ? "was destroyed" : "is none of this simulator's");
    return object;
}

void sim_object_remove(vpmm_sim *sim, enum sim_kind kind, uint64_t handle)
{
    struct sim_table *table = &sim->tables[kind];
    uint32_t index = sim_object_index(handle);
    struct sim_cell *cell = &table->cells[index];
    cell->object = NULL;
    if (kind != SIM_STREAM)
        cell->generation++;
    cell->next_free = table->free_head;
    table->free_head = index + 1;
}

/* The next object from *cursor on, which starts at 0; NULL at the end. */
void *sim_object_next(vpmm_sim *sim, enum sim_kind kind, uint32_t *cursor)
{
    struct sim_table *table = &sim->tables[kind];
    while (*cursor < table->count) {
        void *object = table->cells[(*cursor)++].object;
        if (object)
            return object;
    }
    return NULL;
}
