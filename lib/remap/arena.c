#include "remap/arena.h"

#include "base/assert.h"
#include "base/clock.h"
#include "base/lock.h"
#include "base/reserve.h"
#include "driver/burst.h"
#include "remap/cut.h"
#include "remap/ending.h"
#include "remap/mapping.h"
#include "remap/pass.h"
#include "remap/settle.h"
#include "remap/view.h"
#include "remap/zombie.h"
#include "space/context.h"

#include <stdlib.h>

static void init_space(struct arena *arena, struct space *space, enum space_level level)
{
    static const enum stat live[] = {STAT_live_bytes, STAT_slab_live_bytes};
    static const enum stat cached[] = {STAT_cached_bytes, STAT_slab_cached_bytes};
    space->stats = arena->stats;
    space->streams = &arena->streams;
    space->bell = &arena->bell;
    space->rebuilds = &arena->rebuilds;
    space->reuse = &arena->reuse;
    space->level = level;
    space->live_stat = live[level];
    space->cached_stat = cached[level];
}

static vpmm_status init_cut(struct arena *arena, const vpmm_config *config)
{
    init_space(arena, &arena->cut, SPACE_SUBPAGES);
    vpmm_status status = cut_init(arena, config);
    return status == VPMM_SUCCESS ? slabs_init(&arena->slabs, &arena->cut) : status;
}

void arena_set_up(struct arena *arena, const vpmm_config *config, size_t granularity)
{
    store_relaxed_u32(&arena->reuse, (uint32_t)config->reuse);
    store_relaxed_u64(&arena->max_mapped, config->max_mapped);
    decay_init(&arena->decay, config, granularity);
}

void arena_quarantine(struct arena *arena, uint64_t pages)
{
    arena->quarantined_pages += pages;
    stats_add(arena->stats, STAT_quarantined_bytes, pages << arena->space.units.unit_shift);
}

vpmm_status arena_init(struct arena *arena, struct device *device, struct stats *stats, const vpmm_config *config)
{
    size_t step = config->page_size < device->granularity ? device->granularity / config->page_size : 1;
    size_t extent_pages = config->extent_size / config->page_size;
    arena->device = device;
    arena->stats = stats;
    arena->is_graph = config->graph;
    store_relaxed_u32(&arena->exportable, config->exportable && device->can_export);
    store_relaxed_u32(&arena->rdma, config->rdma && device->can_rdma);
    access_init(&arena->access, device->ordinal);
    turn_init(&arena->turn, &arena->space.await);
    pthread_mutex_init(&arena->reserve_lock, NULL);
    pthread_mutex_init(&arena->plan_lock, NULL);
    pthread_mutex_init(&arena->event_lock, NULL);
    pthread_mutex_init(&arena->park_lock, NULL);
    pthread_mutex_init(&arena->pass_lock, NULL);
    store_relaxed_u64(&arena->passed_at_ns, clock_now_ns());
    pile_init(&arena->zombies);
    pile_init(&arena->ending);
    wakeup_init(&arena->bell.work);
    arena->has_reaper = config->reaper;
    policy_init(&arena->policy, config->page_size, (uint32_t)step,
                extent_pages > UINT32_MAX ? UINT32_MAX : (uint32_t)extent_pages);
    pace_init(&arena->pace);
    arena->view = calloc(1, sizeof *arena->view);
    arena->plan = calloc(1, sizeof *arena->plan);
    arena->note = reserve_zeros(STREAMS_MAX * sizeof *arena->note);
    if (!arena->view || !arena->plan || !arena->note)
        return fail(VPMM_ERROR_HOST_MEMORY, "no host memory for a pool's records");
    init_space(arena, &arena->space, SPACE_PAGES);
    vpmm_status status = space_init(&arena->space, config->page_size, config->va_size);
    if (status == VPMM_SUCCESS)
        status = streams_init(&arena->streams, device, config);
    if (status == VPMM_SUCCESS && arena->streams.privacy != STREAM_OPEN && !arena->streams.is_eager)
        context_keep_block(&arena->streams, &arena->streams.wait, device->primary); /* before the pool has memory */
    return status == VPMM_SUCCESS && config->small == VPMM_SMALL_SLAB ? init_cut(arena, config) : status;
}

/*
 * Of every mapped region its extents, and of used ones the uses; of a lost device's pool also those of live memory. An
 * extent may span several regions.
 */
static void free_records(struct arena *arena, uint64_t page, uint64_t end)
{
    struct units *units = &arena->space.units;
    uint64_t freed_until = page;
    for (uint64_t next; page < end; page = next) {
        uint64_t word = load_relaxed_u64(&unit_at(units, page)->word);
        next = page + word_units(word);
        enum unit_state state = word_state(word);
        bool mapped = state != UNIT_NONE && state != UNIT_HOLE && state != UNIT_ZOMBIE;
        if (state == UNIT_USED)
            uses_free(&arena->streams, unit_uses(unit_at(units, page)));
        else if (state == UNIT_CUT)
            cut_free_uses(arena, page, word_units(word));
        for (uint64_t at = page > freed_until ? page : freed_until; mapped && at < next; at = freed_until) {
            struct extent *extent = unit_extent(unit_at(units, at));
            freed_until = at + extent->pages;
            if (extent_let_go(extent))
                free(extent);
        }
    }
}

void arena_free(struct arena *arena)
{
    for (uint32_t chunk = 0; chunk < load_acquire_u32(&arena->space.units.chunks); chunk++) {
        uint64_t first = (uint64_t)chunk << arena->space.units.chunk_shift;
        free_records(arena, first, first + arena->space.units.chunk_units);
    }
    ending_drop(arena);
    zombies_drop(arena);
    slabs_free(&arena->slabs);
    streams_free(&arena->streams);
    policy_destroy(&arena->policy);
    if (arena->plan)
        policy_plan_free(arena->plan);
    if (arena->view)
        view_free(arena->view);
    free(arena->plan);
    free(arena->view);
    reserve_free(arena->note, STREAMS_MAX * sizeof *arena->note);
    space_free(&arena->cut);
    space_free(&arena->space);
    access_destroy(&arena->access);
    turn_destroy(&arena->turn);
    pthread_mutex_destroy(&arena->reserve_lock);
    pthread_mutex_destroy(&arena->plan_lock);
    pthread_mutex_destroy(&arena->event_lock);
    pthread_mutex_destroy(&arena->pass_lock);
    pthread_mutex_destroy(&arena->park_lock);
}

/* ---- giving everything back ---- */

/* Keeps the first failure's words: later ones often follow from it. */
struct giving_back {
    struct arena *arena;
    vpmm_status status;
    char words[256];
    struct burst burst;
};

static void note_failure(struct giving_back *back, CUresult result, const char *doing)
{
    if (result == CUDA_SUCCESS || back->status != VPMM_SUCCESS)
        return;
    back->status = device_failed(back->arena->device, doing);
    snprintf(back->words, sizeof back->words, "%s", vpmm_last_error());
}

static struct extent *extent_of(const struct arena *arena, uint64_t page)
{
    return unit_extent(unit_at(&arena->space.units, page));
}

/* In parts, between which others get the driver. Of a parked pool nothing is mapped, which the driver does not mind. */
static void unmap_span(struct giving_back *back, uint64_t page, uint64_t end)
{
    struct arena *arena = back->arena;
    while (page < end) {
        uint64_t first = page;
        for (int i = 0; i < MAPPINGS_A_CALL && page < end; i++)
            page += extent_of(arena, page)->pages;
        vpmm_assert(page <= end);
        note_failure(back, mapping_unmap(arena, first, page - first), "unmapping free memory");
        burst_breathe(&back->burst);
    }
}

static void release_span(struct giving_back *back, uint64_t page, uint64_t end)
{
    struct arena *arena = back->arena;
    while (page < end) {
        struct extent *extent = extent_of(arena, page);
        page += extent->pages;
        if (extent->memory != EXTENT_PARKED)
            note_failure(back, mapping_release(arena, extent), "releasing free memory");
        burst_breathe(&back->burst);
    }
}

/* Free regions that adjoin may share an extent, which can only be unmapped whole: they go together. */
static void give_back_chunk(struct giving_back *back, uint32_t chunk)
{
    struct arena *arena = back->arena;
    uint64_t first = (uint64_t)chunk << arena->space.units.chunk_shift, end = first + arena->space.units.chunk_units;
    uint64_t span = first, pages;
    for (uint64_t page = first; page < end; page += pages) {
        uint64_t word = load_acquire_u64(&unit_at(&arena->space.units, page)->word);
        pages = word_units(word);
        bool is_free = word_state(word) == UNIT_FREE;
        uint64_t until = is_free ? page + pages : page;
        if (is_free && until < end)
            continue;
        if (until > span) {
            unmap_span(back, span, until);
            release_span(back, span, until);
        }
        span = page + pages;
    }
}

static void free_chunk(struct giving_back *back, uint32_t chunk)
{
    struct arena *arena = back->arena;
    note_failure(back,
                 device_call(arena->device, cuMemAddressFree, arena->space.units.chunk[chunk].base,
                             (size_t)arena->space.units.chunk_units << arena->space.units.unit_shift),
                 "giving address space back");
}

/*
 * Who ends a graph's pool has waited for all that uses it. That wait completed no fence, for the pool might have
 * stayed. Now that it goes they are completed here: a second wait might fail, for want of the byte that it needs. So
 * pages of which several streams have freed pieces are whole, even if the driver lets no later pass begin.
 */
static void complete_all(struct arena *arena)
{
    lock_take(&arena->event_lock);
    streams_complete_all(&arena->streams);
    pass_regions(arena, true);
    pthread_mutex_unlock(&arena->event_lock);
}

static void give_back_chunks(struct giving_back *back)
{
    struct arena *arena = back->arena;
    bool lost = device_lost(arena->device);
    if (arena->is_graph && !lost)
        complete_all(arena);
    back->status = lost ? device_lost_status() : settle(arena);
    snprintf(back->words, sizeof back->words, "%s", vpmm_last_error());
    cut_flush(arena); /* what a lost device kept from passing stays cut, and is given up with the rest */
    if (device_dead(arena->device))
        return;
    burst_begin(&back->burst);
    for (uint32_t chunk = 0; chunk < load_acquire_u32(&arena->space.units.chunks) && !device_dead(arena->device);
         chunk++) {
        give_back_chunk(back, chunk);
        free_chunk(back, chunk);
    }
    burst_end(&back->burst);
}

vpmm_status arena_give_back(struct arena *arena)
{
    struct giving_back back = {.arena = arena, .status = VPMM_SUCCESS};
    if (load_acquire_u32(&arena->space.units.chunks)) /* else it has got nothing, and may not even have been begun */
        give_back_chunks(&back);
    if (!device_lost(arena->device))
        note_failure(&back, context_free_blocks(&arena->streams), "giving back a block to wait for the device by");
    if (back.status == VPMM_SUCCESS && zombies_wait(arena))
        return fail(VPMM_ERROR_DRIVER, "cuMemRelease was refused to the last for %zu bytes of memory given back before",
                    (size_t)arena->quarantined_pages << arena->space.units.unit_shift);
    return back.status == VPMM_SUCCESS ? VPMM_SUCCESS : fail(back.status, "%s", back.words);
}
