#include "pool/pool.h"

#include "base/lock.h"
#include "pool/config.h"
#include "pool/piece.h"
#include "pool/reaper.h"
#include "pool/tiers.h"
#include "remap/build.h"
#include "remap/cut.h"
#include "remap/park.h"
#include "remap/pass.h"
#include "remap/settle.h"
#include "space/context.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* Where the library is built with per-thread default streams, this is still the function of this name. */
#undef vpmm_stream_release

/* ---- what every call looks at first ---- */

vpmm_status pool_check_ours(const struct vpmm_pool *pool, const char *function)
{
    if (!pool)
        return fail(VPMM_ERROR_INVALID_VALUE, "%s: the pool is NULL", function);
    if (pool->library != process_library())
        return fail(VPMM_ERROR_INVALID_VALUE,
                    "%s: another copy of the library in this process made the pool, and its functions alone know it: "
                    "link one copy, or call those",
                    function);
    return VPMM_SUCCESS;
}

vpmm_status pool_check(const struct vpmm_pool *pool, const char *function)
{
    vpmm_status status = pool_check_ours(pool, function);
    if (status != VPMM_SUCCESS)
        return status;
    if (pool->generation != process_generation())
        return fail(VPMM_ERROR_NOT_SUPPORTED,
                    "%s: the pool was made before this process was forked; CUDA cannot be "
                    "used in the child: make a pool after fork and exec",
                    function);
    if (device_lost(&pool->device))
        return device_lost_status();
    return VPMM_SUCCESS;
}

/* ---- creation ---- */

static vpmm_status read_config(const vpmm_config *given, vpmm_config *config)
{
    *config = given ? *given : vpmm_config_default();
    if (!given) {
        vpmm_status status = vpmm_config_from_env(config);
        if (status != VPMM_SUCCESS)
            return status;
    }
    if (!config->driver)
        config->driver = vpmm_driver_cuda();
    return config->driver ? VPMM_SUCCESS : VPMM_ERROR_NO_DRIVER;
}

/* What the pool of a graph does not have (vpmm_config). */
static void set_for_graph(vpmm_config *config)
{
    config->cache_bytes = 0;
    config->small = VPMM_SMALL_SLAB;
    config->reuse = VPMM_REUSE_COMPLETED;
    config->streams = VPMM_STREAMS_TRUSTED;
    config->reaper = false;
    config->release_threshold = 0;
    config->decay_ms = VPMM_DECAY_NEVER;
}

static vpmm_status open_device(struct vpmm_pool *pool)
{
    vpmm_config *config = &pool->config;
    if (config->graph)
        set_for_graph(config);
    vpmm_status status = device_open(&pool->device, config->driver, config->device, &pool->stats);
    if (status != VPMM_SUCCESS)
        return status;
    pool->opened = true;
    config_cap_by_share(config, pool->device.total_bytes);
    status = config_check(config, pool->device.granularity);
    if (status == VPMM_SUCCESS && config->streams == VPMM_STREAMS_EAGER && !pool->device.driver.cuStreamGetId)
        status =
            fail(VPMM_ERROR_NOT_SUPPORTED,
                 "VPMM_STREAMS=eager needs cuStreamGetId, which this driver does not have (CUDA 12.0 and later do): "
                 "a destroyed stream's handle could not be told from that of the next one");
    if (!config->page_size)
        config->page_size = pool->device.granularity;
    bool can_cut = config->page_size <= PIECE_PAGE_MAX;
    if (!can_cut)
        config->small = VPMM_SMALL_ASYNC;
    pool->paged = pool->device.has_vmm && config->page_size <= pool->device.total_bytes && (can_cut || !config->graph);
    if (status == VPMM_SUCCESS && config->graph && !pool->paged)
        status = fail(VPMM_ERROR_NOT_SUPPORTED, "the pool of a graph is one of pages, which this device does not have, "
                                                "or not of this size");
    return status;
}

/*
 * What a front holds while the pool is taking shape, and once it has. Pieces that fill more than this much are of
 * several pages, which are as good free as cached.
 */
static vpmm_status init_fronts(struct vpmm_pool *pool)
{
    const vpmm_config *config = pool->paged ? &pool->config : NULL;
    const size_t FIRST_BYTES = (size_t)8 << 20, PIECES_BYTES = (size_t)64 << 20;
    const struct front_limits pages = {pool->config.page_size, FIRST_BYTES, SIZE_MAX};
    const struct front_limits pieces = {SUBPAGE_BYTES, FIRST_BYTES, PIECES_BYTES};
    bool cuts = pool->paged && config->small == VPMM_SMALL_SLAB;
    vpmm_status status = fronts_init(&pool->fronts, &pool->arena.space, config, pages);
    if (status == VPMM_SUCCESS)
        status = fronts_init(&pool->cut_fronts, &pool->arena.cut, cuts ? config : NULL, pieces);
    pool->cut_fronts.slabs = &pool->arena.slabs;
    pool->arena.space.fronts = &pool->fronts;
    pool->arena.cut.fronts = &pool->cut_fronts;
    pool->arena.cut_mask = cuts ? pool->config.page_size - 1 : 0;
    pool->arena.cut_below = cuts ? PIECE_MAX_PAGES * pool->config.page_size : 0;
    return status;
}

/* In relaxed capture mode: cuMemPoolCreate would destroy a capture that another thread has begun in global mode. */
static vpmm_status init_async(struct vpmm_pool *pool)
{
    struct device_scope scope;
    vpmm_status status = device_enter(&pool->device, &scope);
    if (status != VPMM_SUCCESS)
        return status;
    status = async_pool_init(&pool->async, &pool->device);
    device_leave(&pool->device, &scope);
    return status;
}

static vpmm_status build_first(struct vpmm_pool *pool)
{
    vpmm_status status = build_initial(&pool->arena, pool->config.initial_pages);
    return status == VPMM_SUCCESS || !pool->config.initial_pages
               ? status
               : fail(status, "initial_pages (VPMM_PAGES), %zu pages of %zu bytes, cannot be mapped: %s",
                      pool->config.initial_pages, pool->config.page_size, vpmm_last_error());
}

static vpmm_status fill_pool(struct vpmm_pool *pool)
{
    vpmm_status status = VPMM_SUCCESS;
    if (pool->device.has_pools)
        status = init_async(pool);
    if (status == VPMM_SUCCESS)
        status = init_fronts(pool);
    arena_set_up(&pool->arena, &pool->config, pool->device.granularity);
    pool->arena.async = &pool->async;
    if (status == VPMM_SUCCESS && pool->paged)
        status = arena_init(&pool->arena, &pool->device, &pool->stats, &pool->config);
    if (status == VPMM_SUCCESS && pool->paged)
        status = build_first(pool);
    if (status == VPMM_SUCCESS && pool->paged && pool->config.reaper)
        status = reaper_start(&pool->arena, &pool->process.reaper);
    return status;
}

/* Gives back whatever has been made so far, and frees the pool. The first failure's words stay. */
static vpmm_status close_pool(struct vpmm_pool *pool)
{
    vpmm_status status = VPMM_SUCCESS, later;
    char words[256] = "";
    struct device_scope scope = {0};
    if (pool->opened)
        device_enter_to_end(&pool->device, &scope);
    if (pool->paged && pool->arena.device)
        status = arena_give_back(&pool->arena);
    if (status != VPMM_SUCCESS)
        snprintf(words, sizeof words, "%s", vpmm_last_error());
    fronts_free(&pool->fronts);
    fronts_free(&pool->cut_fronts);
    if (pool->arena.device)
        arena_free(&pool->arena);
    later = async_pool_destroy(&pool->async);
    if (status == VPMM_SUCCESS && later != VPMM_SUCCESS) {
        status = later;
        snprintf(words, sizeof words, "%s", vpmm_last_error());
    }
    device_leave(&pool->device, &scope); /* nothing, where nothing was opened */
    later = pool->opened ? device_close(&pool->device) : VPMM_SUCCESS;
    if (status != VPMM_SUCCESS)
        fail(status, "%s", words);
    bool silent = load_relaxed_u32(&pool->device.gone);
    free(pool);
    return silent ? VPMM_SUCCESS : status != VPMM_SUCCESS ? status : later;
}

vpmm_status vpmm_pool_create(const vpmm_config *given, vpmm_pool **out)
{
    if (!out)
        return fail(VPMM_ERROR_INVALID_VALUE, "vpmm_pool_create: the output is NULL");
    vpmm_config config;
    vpmm_status status = read_config(given, &config);
    if (status != VPMM_SUCCESS)
        return status;
    struct vpmm_pool *pool = aligned_alloc(128, (sizeof *pool + 127) / 128 * 128);
    if (!pool)
        return fail(VPMM_ERROR_HOST_MEMORY, "no host memory for a pool of %zu bytes", sizeof *pool);
    memset(pool, 0, sizeof *pool);
    pool->config = config;
    status = open_device(pool);
    if (status == VPMM_SUCCESS)
        status = process_watch();
    if (status == VPMM_SUCCESS)
        status = fill_pool(pool);
    if (status != VPMM_SUCCESS) {
        char words[256];
        snprintf(words, sizeof words, "%s", vpmm_last_error());
        close_pool(pool);
        return fail(status, "%s", words);
    }
    process_add(&pool->process);
    pool->generation = process_generation();
    pool->library = process_library();
    *out = pool;
    return VPMM_SUCCESS;
}

/* ---- destruction ---- */

/*
 * Cut pages are live for as long as they are kept, whether or not any piece of them is. A pass of the reaper's may give
 * some back, which are then neither: with the pass lock it is seen in all three sums, or in none.
 */
static uint64_t live_bytes(struct vpmm_pool *pool)
{
    if (pool->paged)
        lock_take(&pool->arena.pass_lock);
    uint64_t live = stats_sum(&pool->stats, STAT_live_bytes) - stats_sum(&pool->stats, STAT_slab_bytes) +
                    stats_sum(&pool->stats, STAT_slab_live_bytes);
    if (pool->paged)
        pthread_mutex_unlock(&pool->arena.pass_lock);
    return live;
}

/*
 * Nothing is unmapped that the device may still use: where it cannot be waited for, the pool stays as it is. A graph
 * uses its memory in each replay, on whatever stream, so its pool waits for more than what was freed; and nothing is
 * known to have passed by that, for the graph may be replayed again if the pool stays.
 */
static vpmm_status wait_for_all(struct vpmm_pool *pool)
{
    vpmm_status status = !pool->paged         ? VPMM_SUCCESS
                         : pool->config.graph ? streams_wait_for_all(&pool->arena.streams)
                                              : settle(&pool->arena);
    if (status == VPMM_SUCCESS || device_dead(&pool->device))
        return VPMM_SUCCESS;
    return fail(
        VPMM_ERROR_BUSY,
        "the work on freed memory cannot be waited for now, so nothing is unmapped; destroy the pool again, and if "
        "the device has not a byte left give back what is free (vpmm_trim), and release its streams "
        "(vpmm_stream_release), first: %s",
        vpmm_last_error());
}

/* BUSY: something is live, or cannot be waited for. */
static vpmm_status wait_until_idle(struct vpmm_pool *pool)
{
    uint64_t live = live_bytes(pool), of_driver_s = load_relaxed_u64(&pool->async.count);
    char also[64] = "";
    if (!live && !of_driver_s)
        return wait_for_all(pool);
    if (of_driver_s)
        snprintf(also, sizeof also, ", and %" PRIu64 " allocations of the driver's pool", of_driver_s);
    return fail(VPMM_ERROR_BUSY,
                "the pool has %" PRIu64
                " bytes live%s: free them first; vpmm_allocations_visit shows what its pages have",
                live, also);
}

vpmm_status vpmm_pool_destroy(vpmm_pool *pool)
{
    if (!pool)
        return VPMM_SUCCESS;
    vpmm_status status = pool_check(pool, "vpmm_pool_destroy");
    if (status == VPMM_ERROR_NOT_SUPPORTED || status == VPMM_ERROR_INVALID_VALUE)
        return status;
    if (pool->is_default)
        return fail(VPMM_ERROR_INVALID_VALUE,
                    "vpmm_pool_destroy: this is device %d's default pool, which others may have too: "
                    "vpmm_trim gives back what is free in it",
                    pool->device.ordinal);
    if (load_acquire_u64(&pool->observers)) /* pairs with the release in vpmm_observe_end */
        return fail(VPMM_ERROR_BUSY,
                    "an observer has the pool: vpmm_exporter_remove, or vpmm_observe_end, comes first");
    vpmm_status busy = device_dead(&pool->device) ? VPMM_SUCCESS : wait_until_idle(pool);
    if (busy != VPMM_SUCCESS)
        device_probe(&pool->device); /* where the driver answers nothing any more, nothing could be freed either */
    if (busy != VPMM_SUCCESS && !device_dead(&pool->device))
        return busy;
    bool lost = device_lost(&pool->device);
    if (lost)
        status = device_lost_status();
    reaper_stop(process_remove(&pool->process));
    vpmm_status closed = close_pool(pool);
    return lost ? status : without_shortage(closed);
}

/* ---- giving back ---- */

static void close_caches(struct stream *stream, void *data)
{
    struct vpmm_pool *pool = data;
    fronts_close(&pool->fronts, stream);
    fronts_close(&pool->cut_fronts, stream);
}

vpmm_status vpmm_stream_release(vpmm_pool *pool, CUstream handle)
{
    vpmm_status status = pool_check(pool, "vpmm_stream_release");
    if (status != VPMM_SUCCESS || !pool->paged || pool->config.graph)
        return status;
    status = stream_release(&pool->arena.streams, handle, close_caches, pool);
    bell_ring(&pool->arena.bell); /* also if it failed: what others left unmarked meanwhile is the reaper's */
    return without_shortage(status);
}

vpmm_status vpmm_stream_release_ptsz(vpmm_pool *pool, CUstream handle)
{
    return vpmm_stream_release(pool, handle ? handle : CU_STREAM_PER_THREAD);
}

vpmm_status vpmm_trim(vpmm_pool *pool, size_t keep_bytes, size_t *released)
{
    uint64_t pages = 0;
    struct device_scope scope;
    vpmm_status status = pool_check(pool, "vpmm_trim");
    if (released)
        *released = 0;
    if (status == VPMM_SUCCESS)
        status = device_enter(&pool->device, &scope);
    if (status != VPMM_SUCCESS)
        return without_shortage(status);
    if (pool->paged && !pool->config.graph) {
        tiers_flush(&pool->arena);
        pass_refresh(&pool->arena, NULL); /* marks what has none yet, which on an idle device passes in microseconds */
        status = pass_now(&pool->arena);
        if (status == VPMM_SUCCESS && streams_unmarkable(&pool->arena.streams)) {
            pass_wait_for_contexts(&pool->arena); /* what cannot be waited for now stays */
            status = pass_now(&pool->arena);      /* old addresses that waited for the same keep the device's memory */
        } else if (status == VPMM_SUCCESS && pool->config.captures)
            settle(&pool->arena); /* likewise: it waits whether or not a stream has left anything unmarked */
        cut_flush(&pool->arena);  /* slabs of which the last slices have passed now */
        if (status == VPMM_SUCCESS)
            status = pass_release(&pool->arena, keep_bytes / pool->config.page_size, &pages);
    }
    if (status == VPMM_SUCCESS && !keep_bytes)
        async_pool_trim(&pool->async);
    device_leave(&pool->device, &scope);
    if (released)
        *released = (size_t)pages * pool->config.page_size;
    return without_shortage(status);
}

/* ---- parking ---- */

static vpmm_status enter_to_park(vpmm_pool *pool, const char *function, struct device_scope *scope)
{
    vpmm_status status = pool_check(pool, function);
    if (status == VPMM_SUCCESS && !pool->config.graph)
        status = fail(VPMM_ERROR_NOT_SUPPORTED,
                      "%s: only a pool with `graph` in its configuration keeps each address "
                      "in its place, and can be parked",
                      function);
    return status == VPMM_SUCCESS ? without_shortage(device_enter(&pool->device, scope)) : status;
}

vpmm_status vpmm_park(vpmm_pool *pool)
{
    struct device_scope scope;
    vpmm_status status = enter_to_park(pool, "vpmm_park", &scope);
    if (status == VPMM_ERROR_DRIVER && !device_lost(&pool->device))
        return park_cannot_begin(); /* of DRIVER the caller takes it that the pool is parked */
    if (status != VPMM_SUCCESS)
        return status;
    status = park(&pool->arena);
    device_leave(&pool->device, &scope);
    return without_shortage(status);
}

vpmm_status vpmm_wake(vpmm_pool *pool)
{
    struct device_scope scope;
    vpmm_status status = enter_to_park(pool, "vpmm_wake", &scope);
    if (status != VPMM_SUCCESS)
        return status;
    status = park_wake(&pool->arena);
    device_leave(&pool->device, &scope);
    return status;
}

vpmm_status vpmm_poll(vpmm_pool *pool)
{
    vpmm_status status = pool_check(pool, "vpmm_poll");
    if (status != VPMM_SUCCESS || !pool->paged)
        return status;
    return without_shortage(pass_try(&pool->arena));
}
