#include "remap/zombie.h"

#include "base/assert.h"
#include "base/lock.h"
#include "remap/cut.h"
#include "remap/hole.h"
#include "remap/mapping.h"

#include <stdlib.h>

struct zombie *zombie_create(uint32_t parts)
{
    struct zombie *zombie = calloc(1, sizeof *zombie + parts * sizeof zombie->part[0]);
    if (zombie)
        zombie->parts = parts;
    return zombie;
}

void zombie_hold(struct zombie *zombie, uint32_t i, struct extent *extent)
{
    vpmm_assert(i < zombie->parts && !zombie->part[i].extent && peek_u32(&extent->holders) > 0);
    zombie->part[i] = (struct zombie_part){extent->pages, extent};
    fetch_add_relaxed_u32(&extent->holders, 1); /* the caller is a holder itself */
}

void zombie_push(struct arena *arena, struct zombie *zombie)
{
    zombie->has_pages = zombie->pages != 0;
    vpmm_assert(!zombie->has_pages ||
                word_state(peek_u64(&unit_at(&arena->space.units, zombie->page)->word)) == UNIT_OWN);
    if (zombie->has_pages) {
        for (uint64_t page = zombie->page; page < zombie->page + zombie->pages; page++)
            store_relaxed_ptr(&unit_at(&arena->space.units, page)->extent, NULL);
        stats_add(arena->stats, STAT_pending_unmap_bytes, zombie->pages << arena->space.units.unit_shift);
        unit_set(unit_at(&arena->space.units, zombie->page), UNIT_ZOMBIE, zombie->pages);
    }
    pile_push(&arena->zombies, &zombie->node);
    bell_ring(&arena->bell);
}

/* Takes what builders have pushed, oldest first. */
static void collect(struct arena *arena)
{
    struct pile_node *node = pile_take(&arena->zombies);
    while (node) {
        struct zombie *zombie = (struct zombie *)(void *)node;
        node = node->next;
        zombie->next = arena->waiting;
        arena->waiting = zombie;
    }
}

/* The last holder's. False: refused. */
static bool release(struct arena *arena, struct extent *extent)
{
    if (mapping_release(arena, extent) != CUDA_SUCCESS)
        return false;
    lock_take(&arena->plan_lock);
    vpmm_assert(!peek_u32(&extent->holders) && arena->quarantined_pages >= extent->pages);
    arena->quarantined_pages -= extent->pages;
    pthread_mutex_unlock(&arena->plan_lock);
    stats_sub(arena->stats, STAT_quarantined_bytes, (uint64_t)extent->pages << arena->space.units.unit_shift);
    fetch_add_relaxed_u64(&arena->releases, 1);
    free(extent);
    return true;
}

bool zombie_let_go(struct arena *arena, struct zombie *zombie)
{
    bool all = true;
    for (uint32_t i = 0; i < zombie->unmapped; i++) {
        struct extent *extent = zombie->part[i].extent;
        if (extent && (!extent_let_go(extent) || release(arena, extent)))
            zombie->part[i].extent = NULL;
        all &= !zombie->part[i].extent;
    }
    return all;
}

/* What is left of a zombie keeps its pages ZOMBIE; what was unmapped becomes a hole. */
static void advance(struct arena *arena, struct zombie *zombie, uint32_t mappings, uint64_t pages)
{
    struct unit *first = unit_at(&arena->space.units, zombie->page);
    uint64_t unmapped = zombie->page;
    vpmm_assert(lock_is_taken(&arena->pass_lock) && zombie->unmapped + mappings <= zombie->parts);
    vpmm_assert(pages <= zombie->pages && word_state(peek_u64(&first->word)) == UNIT_ZOMBIE);
    cut_forget_moved(arena, unmapped, pages);
    zombie->unmapped += mappings;
    zombie->page += pages;
    zombie->pages -= pages;
    lock_take(&arena->plan_lock);
    if (zombie->pages)
        unit_set(unit_at(&arena->space.units, zombie->page), UNIT_ZOMBIE, zombie->pages);
    unit_set(first, UNIT_NONE, 0);
    hole_add(arena, unmapped, pages);
    pthread_mutex_unlock(&arena->plan_lock);
    stats_sub(arena->stats, STAT_pending_unmap_bytes, pages << arena->space.units.unit_shift);
}

/* One call's worth. False: the driver refused, or nothing is left to unmap. */
static bool unmap_some(struct arena *arena, struct zombie *zombie)
{
    uint64_t pages = 0;
    uint32_t mappings = 0;
    for (; mappings < zombie->parts - zombie->unmapped && mappings < ZOMBIE_MAPPINGS_A_CALL; mappings++)
        pages += zombie->part[zombie->unmapped + mappings].pages;
    if (!mappings)
        return false;
    if (mapping_unmap(arena, zombie->page, pages) != CUDA_SUCCESS) {
        stats_count(arena->stats, STAT_unmap_failures);
        return false;
    }
    advance(arena, zombie, mappings, pages);
    return true;
}

/*
 * The driver serves one call at a time: while a thread is building, the request that it builds for comes first. Not
 * for ever, though: old addresses hold page tables, 4.5 KiB for each 512 MiB of them.
 */
static bool give_way(const struct arena *arena)
{
    const uint64_t least = UINT64_C(16) << 30;
    uint64_t mapped = stats_sum(arena->stats, STAT_mapped_bytes);
    return load_relaxed_u32(&arena->builders) &&
           stats_sum(arena->stats, STAT_pending_unmap_bytes) < (mapped > least ? mapped : least);
}

/* True: nothing of it is left. */
static bool retire(struct arena *arena, struct zombie *zombie, bool gives_way, bool *any)
{
    if (!fence_passed(&arena->streams, zombie->fence))
        return false;
    while (!(gives_way && give_way(arena)) && unmap_some(arena, zombie))
        *any = true;
    return zombie_let_go(arena, zombie) && zombie->unmapped == zombie->parts;
}

bool zombies_retire(struct arena *arena, bool gives_way)
{
    bool any = false;
    collect(arena);
    for (struct zombie **link = &arena->waiting; *link && !device_lost(arena->device);) {
        struct zombie *zombie = *link;
        if (!retire(arena, zombie, gives_way, &any)) {
            link = &zombie->next;
            continue;
        }
        if (zombie->has_pages)
            stats_count(arena->stats, STAT_zombies_retired);
        *link = zombie->next;
        free(zombie);
    }
    return any;
}

bool zombies_wait(const struct arena *arena)
{
    return arena->waiting || !pile_empty(&arena->zombies);
}

void zombies_drop(struct arena *arena)
{
    collect(arena);
    while (arena->waiting) {
        struct zombie *next = arena->waiting->next;
        for (uint32_t i = 0; i < arena->waiting->parts; i++)
            if (arena->waiting->part[i].extent && extent_let_go(arena->waiting->part[i].extent))
                free(arena->waiting->part[i].extent);
        free(arena->waiting);
        arena->waiting = next;
    }
}
