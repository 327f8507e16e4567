#include "zombie.h"

#include "hole.h"
#include "lock.h"
#include "mapping.h"

#include <stdlib.h>

struct zombie *zombie_create(uint32_t mappings)
{
    struct zombie *zombie = calloc(1, sizeof *zombie + mappings * sizeof zombie->length[0]);
    if (zombie)
        zombie->mappings = mappings;
    return zombie;
}

void zombie_push(struct arena *arena, struct zombie *zombie)
{
    zombie->has_pages = zombie->pages != 0;
    if (zombie->has_pages) {
        for (uint64_t page = zombie->page; page < zombie->page + zombie->pages; page++)
            store_relaxed_ptr(&page_at(&arena->space.pages, page)->extent, NULL);
        stats_add(arena->stats, STAT_pending_unmap_bytes, zombie->pages << arena->space.pages.page_shift);
        page_set(page_at(&arena->space.pages, zombie->page), PAGE_ZOMBIE, zombie->pages);
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

/* What is left of a zombie keeps its pages ZOMBIE; what was unmapped becomes a hole. */
static void advance(struct arena *arena, struct zombie *zombie, uint32_t mappings, uint64_t pages)
{
    struct page *first = page_at(&arena->space.pages, zombie->page);
    uint64_t unmapped = zombie->page;
    zombie->first += mappings;
    zombie->mappings -= mappings;
    zombie->page += pages;
    zombie->pages -= pages;
    lock_take(&arena->turn);
    if (zombie->pages)
        page_set(page_at(&arena->space.pages, zombie->page), PAGE_ZOMBIE, zombie->pages);
    page_set(first, PAGE_NONE, 0);
    hole_add(arena, unmapped, pages);
    pthread_mutex_unlock(&arena->turn);
    stats_sub(arena->stats, STAT_pending_unmap_bytes, pages << arena->space.pages.page_shift);
}

/* One call's worth. False: the driver refused, or nothing is left to unmap. */
static bool unmap_some(struct arena *arena, struct zombie *zombie)
{
    uint64_t pages = 0;
    uint32_t mappings = 0;
    for (; mappings < zombie->mappings && mappings < ZOMBIE_MAPPINGS_A_CALL; mappings++)
        pages += zombie->length[zombie->first + mappings];
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
 * for ever, though: old addresses hold page tables.
 */
static bool give_way(const struct arena *arena)
{
    return load_relaxed_u32(&arena->builders) &&
           stats_sum(arena->stats, STAT_pending_unmap_bytes) < stats_sum(arena->stats, STAT_mapped_bytes);
}

/* True: nothing of it is left. */
static bool retire(struct arena *arena, struct zombie *zombie, bool *any)
{
    if (!fence_passed(&arena->streams, zombie->fence))
        return false;
    while (!give_way(arena) && unmap_some(arena, zombie))
        *any = true;
    if (zombie->mappings)
        return false;
    if (zombie->has_handle && device_call(arena->device, cuMemRelease, zombie->handle) != CUDA_SUCCESS &&
        !zombie->next_try_is_last) {
        zombie->next_try_is_last = true;
        return false;
    }
    return true;
}

bool zombies_retire(struct arena *arena)
{
    bool any = false;
    collect(arena);
    for (struct zombie **link = &arena->waiting; *link && !device_lost(arena->device);) {
        struct zombie *zombie = *link;
        if (!retire(arena, zombie, &any)) {
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

void zombies_drop(struct arena *arena)
{
    collect(arena);
    while (arena->waiting) {
        struct zombie *next = arena->waiting->next;
        free(arena->waiting);
        arena->waiting = next;
    }
}
