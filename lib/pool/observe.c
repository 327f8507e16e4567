/*
 * observe.c - what the library says of itself, its version, and a pool: statistics, its address map, its audit, and
 * what an exporter asks.
 */
#include "base/lock.h"
#include "pool/audit.h"
#include "pool/pool.h"
#include "pool/reaper.h"
#include "remap/park.h"

#include <inttypes.h>
#include <string.h>

const char *vpmm_version(void)
{
    return VPMM_VERSION;
}

static vpmm_status check_observer(const struct vpmm_pool *pool, bool has_argument, const char *function,
                                  const char *argument)
{
    vpmm_status status = pool_check_ours(pool, function);
    if (status == VPMM_SUCCESS && !has_argument)
        return fail(VPMM_ERROR_INVALID_VALUE, "%s: the %s is NULL", function, argument);
    return status;
}

/* ---- statistics ---- */

static uint64_t longest_free(const struct arena *arena)
{
    uint64_t longest = hints_longest(&arena->space.passed, &arena->space.units, UNIT_FREE);
    for (uint32_t slot = 1; slot < load_acquire_u32(&arena->streams.slots); slot++) {
        uint64_t pages =
            hints_longest(&stream_at(&arena->streams, slot)->free[SPACE_PAGES], &arena->space.units, UNIT_FREE);
        longest = pages > longest ? pages : longest;
    }
    return longest;
}

vpmm_status vpmm_stats_get(vpmm_pool *pool, vpmm_stats *out)
{
    vpmm_status status = check_observer(pool, out != NULL, "vpmm_stats_get", "output");
    if (status != VPMM_SUCCESS)
        return status;
    stats_note_peaks(&pool->stats);
    stats_read(&pool->stats, out);
    if (pool->paged) {
        out->largest_free_bytes = longest_free(&pool->arena) * pool->config.page_size;
        out->largest_hole_bytes =
            hints_longest(&pool->arena.holes, &pool->arena.space.units, UNIT_HOLE) * pool->config.page_size;
    }
    return VPMM_SUCCESS;
}

vpmm_status vpmm_dump(vpmm_pool *pool, FILE *file)
{
    vpmm_stats stats;
    vpmm_status status = check_observer(pool, file != NULL, "vpmm_dump", "file");
    if (status != VPMM_SUCCESS)
        return status;
    vpmm_stats_get(pool, &stats);
#define DUMP_LINE(name, kind, help) fprintf(file, "%-20s %20" PRIu64 "  %s\n", #name, stats.name, help);
    VPMM_STATS(DUMP_LINE)
#undef DUMP_LINE
    fprintf(file, "regions of %zu-byte pages: [X] live, [-X] reusable, [*X] hole, [~X] pending unmap, [?X] in a call\n",
            pool->config.page_size);
    if (pool->paged)
        dump_regions(&pool->arena, file);
    if (ferror(file))
        return fail(VPMM_ERROR_INVALID_VALUE, "vpmm_dump: the file cannot be written");
    return VPMM_SUCCESS;
}

vpmm_status vpmm_check(vpmm_pool *pool)
{
    vpmm_status status = pool_check_ours(pool, "vpmm_check");
    if (status == VPMM_SUCCESS && pool->generation != process_generation())
        status = pool_check(pool, "vpmm_check");
    if (status != VPMM_SUCCESS)
        return status;
    if (!pool->paged)
        return VPMM_SUCCESS;
    /* The reaper is the pool's own thread: it is kept from making a pass meanwhile. */
    lock_take(&pool->arena.pass_lock);
    status = audit(&pool->arena);
    pthread_mutex_unlock(&pool->arena.pass_lock);
    return status;
}

/* ---- for exporters ---- */

vpmm_status vpmm_observe_begin(vpmm_pool *pool)
{
    vpmm_status status = pool_check_ours(pool, "vpmm_observe_begin");
    if (status == VPMM_SUCCESS)
        fetch_add_relaxed_u64(&pool->observers, 1);
    return status;
}

vpmm_status vpmm_observe_end(vpmm_pool *pool)
{
    vpmm_status status = pool_check_ours(pool, "vpmm_observe_end");
    if (status != VPMM_SUCCESS)
        return status;
    uint64_t observers = load_relaxed_u64(&pool->observers);
    do /* lock-free: a failed exchange is another's begin or end. The number alone counts: one that is back does too */
        if (!observers)
            return fail(VPMM_ERROR_INVALID_VALUE, "vpmm_observe_end: nobody has begun, or all have ended");
    while (!cas_acq_rel_u64(&pool->observers, &observers, observers - 1)); /* pairs with vpmm_pool_destroy's acquire */
    return VPMM_SUCCESS;
}

vpmm_status vpmm_calls_get(vpmm_pool *pool, vpmm_call_counts out[VPMM_DRIVER_CALLS])
{
    vpmm_status status = check_observer(pool, out != NULL, "vpmm_calls_get", "output");
    if (status == VPMM_SUCCESS)
        stats_read_calls(&pool->stats, out);
    return status;
}

vpmm_status vpmm_latency_get(vpmm_pool *pool, vpmm_latency *out)
{
    vpmm_status status = check_observer(pool, out != NULL, "vpmm_latency_get", "output");
    if (status == VPMM_SUCCESS)
        stats_read_latency(&pool->stats, out);
    return status;
}

vpmm_status vpmm_health_get(vpmm_pool *pool, vpmm_health *out)
{
    vpmm_status status = check_observer(pool, out != NULL, "vpmm_health_get", "output");
    if (status != VPMM_SUCCESS)
        return status;
    bool has_thread = pool->paged && pool->config.reaper;
    *out = (vpmm_health){.lost = device_dead(&pool->device),
                         .reaper = has_thread,
                         .reaper_age_ns = pool->paged ? reaper_age_ns(&pool->arena, has_thread) : 0};
    return VPMM_SUCCESS;
}

vpmm_status vpmm_device_get(vpmm_pool *pool, vpmm_device *out)
{
    vpmm_status status = check_observer(pool, out != NULL, "vpmm_device_get", "output");
    if (status != VPMM_SUCCESS)
        return status;
    *out = (vpmm_device){.ordinal = pool->device.ordinal,
                         .memory_bytes = pool->device.total_bytes,
                         .page_size = pool->config.page_size,
                         .max_mapped = (size_t)load_relaxed_u64(&pool->arena.max_mapped)};
    memcpy(out->name, pool->device.name, sizeof out->name);
    memcpy(out->uuid, pool->device.uuid, sizeof out->uuid);
    return VPMM_SUCCESS;
}

/* false: nothing is mapped there. */
static bool is_mapped(enum unit_state state, vpmm_range_state *out)
{
    static const int range[] = {
        [UNIT_LIVE] = VPMM_RANGE_LIVE,
        [UNIT_USED] = VPMM_RANGE_LIVE,
        [UNIT_NOTING] = VPMM_RANGE_LIVE,
        [UNIT_CUT] = VPMM_RANGE_CUT,
        [UNIT_FREE] = VPMM_RANGE_FREE,
        [UNIT_CACHED] = VPMM_RANGE_FREE,
        [UNIT_ENDING] = VPMM_RANGE_FREE,
        [UNIT_OWN] = VPMM_RANGE_BUSY,
        [UNIT_NONE] = -1,
        [UNIT_HOLE] = -1,
        [UNIT_ZOMBIE] = -1,
    };
    *out = (vpmm_range_state)range[state];
    return range[state] >= 0;
}

static void visit_chunk(const struct units *units, uint64_t first, void (*visit)(void *, const vpmm_range *),
                        void *data)
{
    for (uint64_t unit = first, length; unit < first + units->chunk_units; unit += length) {
        uint64_t word = load_acquire_u64(&unit_at(units, unit)->word);
        vpmm_range range = {.address = unit_address(units, unit)};
        length = units_to_next(units, first, unit, word);
        range.bytes = word_units(word) << units->unit_shift;
        if (is_mapped(word_state(word), &range.state))
            visit(data, &range);
    }
}

vpmm_status vpmm_ranges_visit(vpmm_pool *pool, void (*visit)(void *, const vpmm_range *), void *data)
{
    vpmm_status status = check_observer(pool, visit != NULL, "vpmm_ranges_visit", "function");
    if (status != VPMM_SUCCESS)
        return status;
    const struct units *units = &pool->arena.space.units;
    for (uint32_t chunk = 0; pool->paged && !arena_is_parked(&pool->arena) && chunk < load_acquire_u32(&units->chunks);
         chunk++)
        visit_chunk(units, (uint64_t)chunk << units->chunk_shift, visit, data);
    return VPMM_SUCCESS;
}

const vpmm_driver *vpmm_pool_driver(vpmm_pool *pool)
{
    return pool ? &pool->device.driver : NULL;
}
