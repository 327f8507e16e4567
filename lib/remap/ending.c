#include "remap/ending.h"

#include "base/assert.h"
#include "base/lock.h"

static uint64_t bytes_of(const struct uses *uses)
{
    return uses->slice ? slice_size[slice_class_of(load_relaxed_u64(&uses->slice->word))].bytes
                       : uses->region.units << uses->space->units.unit_shift;
}

/* To be looked at by the next pass. */
static void push(struct arena *arena, struct uses *uses)
{
    stats_add(arena->stats, STAT_ending_bytes, bytes_of(uses));
    pile_push(&arena->ending, &uses->node);
}

/* Of an owned region: behind its fence, and the fences of its uses, if there are any. */
static void end_region(struct arena *arena, struct space *space, struct region region, struct uses *uses)
{
    bool has_uses = uses;
    struct unit *first = unit_at(&space->units, region.first);
    vpmm_assert(word_state(peek_u64(&first->word)) == UNIT_OWN);
    if (has_uses && uses_end(&arena->streams, uses, region.fence)) {
        uses->space = space;
        uses->region = region;
        uses->slice = NULL;
        unit_set(first, UNIT_ENDING, region.units);
        push(arena, uses);
    } else {
        uses_free(&arena->streams, uses);
        region_publish(space, region);
    }
    if (has_uses)
        bell_ring(&arena->bell); /* also for a released stream's record, which these uses may have kept */
}

vpmm_status ending_free_region(struct arena *arena, struct space *space, CUdeviceptr address, struct stream *stream)
{
    struct region region;
    struct uses *uses;
    vpmm_status status = region_take_back(space, address, &region, &uses);
    if (status != VPMM_SUCCESS)
        return status;
    region.fence = fence_take(stream);
    end_region(arena, space, region, uses);
    return VPMM_SUCCESS;
}

/* Of a slice in the caller's hands, as end_region. */
static void end_slice(struct arena *arena, struct slice *slice, struct fence fence, struct uses *uses)
{
    bool has_uses = uses;
    if (has_uses && uses_end(&arena->streams, uses, fence)) {
        uses->slice = slice;
        slab_set_ending(slice, true);
        push(arena, uses);
    } else {
        uses_free(&arena->streams, uses);
        slab_give(&arena->slabs, slice, fence);
    }
    if (has_uses)
        bell_ring(&arena->bell);
}

vpmm_status ending_free_slice(struct arena *arena, struct slice *slice, CUdeviceptr address, struct stream *stream)
{
    struct uses *uses;
    if (!slab_take_back(&arena->slabs, slice, address, &uses))
        return region_not_live(address);
    end_slice(arena, slice, fence_take(stream), uses);
    return VPMM_SUCCESS;
}

/* Behind the fence that is left. */
static void publish(struct arena *arena, struct uses *uses)
{
    struct fence fence = uses->count ? uses->stream[0] : FENCE_PASSED;
    stats_sub(arena->stats, STAT_ending_bytes, bytes_of(uses));
    if (uses->slice) {
        slab_set_ending(uses->slice, false);
        slab_give(&arena->slabs, uses->slice, fence);
    } else {
        struct unit *first = unit_at(&uses->space->units, uses->region.first);
        vpmm_assert(word_state(peek_u64(&first->word)) == UNIT_ENDING);
        unit_set(first, UNIT_OWN, uses->region.units);
        uses->region.fence = fence;
        region_publish(uses->space, uses->region);
    }
    uses_free(&arena->streams, uses);
}

/* Those of a list that still wait are put before `waiting`. */
static struct uses *look(struct arena *arena, struct uses *list, struct uses *waiting)
{
    for (struct uses *uses = list, *next; uses; uses = next) {
        next = uses->next_waiting;
        if (uses_pass(&arena->streams, uses) <= 1) {
            publish(arena, uses);
        } else {
            uses->next_waiting = waiting;
            waiting = uses;
        }
    }
    return waiting;
}

/* What frees have pushed, as a list. */
static struct uses *collect(struct arena *arena)
{
    struct uses *list = NULL;
    for (struct pile_node *node = pile_take(&arena->ending), *next; node; node = next) {
        struct uses *uses = (struct uses *)(void *)node;
        next = node->next;
        uses->next_waiting = list;
        list = uses;
    }
    return list;
}

void ending_pass(struct arena *arena)
{
    vpmm_assert(lock_is_taken(&arena->event_lock));
    struct uses *before = arena->ending_waiting;
    arena->ending_waiting = look(arena, before, look(arena, collect(arena), NULL));
}

static void drop(struct arena *arena, struct uses *list)
{
    for (struct uses *next; list; list = next) {
        next = list->next_waiting;
        uses_free(&arena->streams, list);
    }
}

void ending_drop(struct arena *arena)
{
    drop(arena, collect(arena));
    drop(arena, arena->ending_waiting);
}
