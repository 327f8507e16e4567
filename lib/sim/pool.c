/*
 * pool.c - plain device memory, pinned host memory, and the driver's own stream-ordered pools.
 *
 * A pool takes blocks of 32 MiB from the device (a larger one where a request is larger, a smaller one where the
 * device is nearly full) and cuts them into chunks of whole 512 bytes. A chunk that was freed carries the point of its
 * free: the same stream may have it again at once, another one when that point has passed, and its first operation
 * then comes after it. Blocks go back when a host wait, or a trim, finds more reserved than the threshold allows.
 */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

#define BLOCK_BYTES ((size_t)32 << 20)
#define GRAIN       ((size_t)512)

struct block;

/* Chunks of a block are a list by address without gaps; the free ones of a pool are a list of their own. */
struct sim_chunk {
    struct sim_chunk *before, *after;
    struct sim_chunk *free_before, *free_after;
    struct sim_chunk *bucket_next;
    struct block *block;
    CUdeviceptr at;
    size_t bytes;
    struct sim_record *freed; /* NULL: nothing to wait for */
    bool live;
};

struct block {
    struct block *next;
    struct sim_pool *pool;
    struct sim_mapping *mapping;
    struct sim_chunk *first;
    size_t live;
};

struct sim_pool {
    struct sim_pool *next;
    CUmemoryPool handle;
    int device;
    bool is_default, destroyed;
    int reuse[3]; /* by attribute; kept, but reuse does what all three allow */
    uint64_t threshold, reserved, reserved_high, used, used_high;
    struct block *blocks;
    struct sim_chunk *free_chunks;
};

static size_t round_up(size_t bytes, size_t to)
{
    return (bytes + to - 1) / to * to;
}

/* ---- live chunks by address ---- */

static struct sim_chunk **bucket_of(vpmm_sim *sim, CUdeviceptr at)
{
    return &sim->chunks[(at / GRAIN * 0x9E3779B97F4A7C15ULL >> 20) & (sim->chunk_buckets - 1)];
}

static bool more_buckets(vpmm_sim *sim)
{
    size_t old_count = sim->chunk_buckets;
    struct sim_chunk **old = sim->chunks;
    struct sim_chunk **buckets = calloc(old_count ? 2 * old_count : 256, sizeof(*buckets));
    if (!buckets)
        return false;
    sim->chunks = buckets;
    sim->chunk_buckets = old_count ? 2 * old_count : 256;
    for (size_t i = 0; i < old_count; i++)
        for (struct sim_chunk *chunk = old[i], *next; chunk; chunk = next) {
            next = chunk->bucket_next;
            chunk->bucket_next = *bucket_of(sim, chunk->at);
            *bucket_of(sim, chunk->at) = chunk;
        }
    free(old);
    return true;
}

static void remember(vpmm_sim *sim, struct sim_chunk *chunk)
{
    chunk->bucket_next = *bucket_of(sim, chunk->at);
    *bucket_of(sim, chunk->at) = chunk;
    sim->chunk_count++;
}

static void forget(vpmm_sim *sim, struct sim_chunk *chunk)
{
    struct sim_chunk **at = bucket_of(sim, chunk->at);
    while (*at != chunk)
        at = &(*at)->bucket_next;
    *at = chunk->bucket_next;
    sim->chunk_count--;
}

static struct sim_chunk *live_chunk(vpmm_sim *sim, CUdeviceptr at)
{
    struct sim_chunk *chunk = sim->chunk_buckets ? *bucket_of(sim, at) : NULL;
    while (chunk && chunk->at != at)
        chunk = chunk->bucket_next;
    return chunk;
}

/* ---- free chunks ---- */

static void list_free(struct sim_chunk *chunk)
{
    struct sim_pool *pool = chunk->block->pool;
    chunk->free_before = NULL;
    chunk->free_after = pool->free_chunks;
    if (pool->free_chunks)
        pool->free_chunks->free_before = chunk;
    pool->free_chunks = chunk;
}

static void unlist_free(struct sim_chunk *chunk)
{
    if (chunk->free_before)
        chunk->free_before->free_after = chunk->free_after;
    else
        chunk->block->pool->free_chunks = chunk->free_after;
    if (chunk->free_after)
        chunk->free_after->free_before = chunk->free_before;
}

/* a and b have both passed; the result is a point that stands for both. NULL: no memory for it. */
static struct sim_record *later_of_both(struct sim_record *a, struct sim_record *b)
{
    struct sim_record *both = sim_record_new();
    if (!both)
        return NULL;
    both->joined = true;
    both->lane = a->lane;
    both->number = a->number;
    both->clock = sim_clock_hold(a->clock);
    sim_clock_join(&both->clock, b->clock);
    sim_clock_learn(&both->clock, a->lane, a->number);
    sim_clock_learn(&both->clock, b->lane, b->number);
    return both;
}

/* The chunk's free point comes to stand for both; false where that would make either wait longer than it must. */
static bool join_points(vpmm_sim *sim, struct sim_chunk *into, struct sim_chunk *from)
{
    struct sim_record *a = into->freed, *b = from->freed, *both;
    if (a == b)
        return true;
    if (a && b && a->lane == b->lane && !a->joined && !b->joined)
        both = sim_record_hold(a->number > b->number ? a : b);
    else if (!sim_record_passed(sim, a) || !sim_record_passed(sim, b))
        return false;
    else
        both = a && b ? later_of_both(a, b) : sim_record_hold(a ? a : b);
    if (!both)
        return false;
    sim_record_drop(a);
    into->freed = both;
    return true;
}

/* The chunk swallows the next one, if both are free. */
static bool merge_after(vpmm_sim *sim, struct sim_chunk *chunk)
{
    struct sim_chunk *after = chunk->after;
    if (!after || after->live || !join_points(sim, chunk, after))
        return false;
    chunk->bytes += after->bytes;
    chunk->after = after->after;
    if (chunk->after)
        chunk->after->before = chunk;
    unlist_free(after);
    sim_record_drop(after->freed);
    free(after);
    return true;
}

static void merge_all(vpmm_sim *sim, struct sim_pool *pool)
{
    for (struct block *block = pool->blocks; block; block = block->next)
        for (struct sim_chunk *chunk = block->first; chunk;)
            if (chunk->live || !merge_after(sim, chunk))
                chunk = chunk->after;
}

/* The lane may have the chunk without waiting for anyone. */
static bool usable(vpmm_sim *sim, const struct sim_chunk *chunk, const struct sim_lane *lane)
{
    return !chunk->freed || chunk->freed->lane == lane->id || sim_record_passed(sim, chunk->freed);
}

static struct sim_chunk *best_fit(vpmm_sim *sim, struct sim_pool *pool, size_t bytes, const struct sim_lane *lane)
{
    struct sim_chunk *best = NULL;
    for (struct sim_chunk *chunk = pool->free_chunks; chunk; chunk = chunk->free_after)
        if (chunk->bytes >= bytes && (!best || chunk->bytes < best->bytes) && usable(sim, chunk, lane)) {
            best = chunk;
            if (best->bytes == bytes)
                break;
        }
    return best;
}

/* ---- blocks ---- */

static bool block_idle(vpmm_sim *sim, const struct block *block)
{
    for (const struct sim_chunk *chunk = block->live ? NULL : block->first; chunk; chunk = chunk->after)
        if (!sim_record_passed(sim, chunk->freed))
            return false;
    return block->live == 0;
}

static void release_block(vpmm_sim *sim, struct block **at)
{
    struct block *block = *at;
    *at = block->next;
    for (struct sim_chunk *chunk = block->first, *after; chunk; chunk = after) {
        after = chunk->after;
        if (chunk->live)
            forget(sim, chunk);
        else
            unlist_free(chunk);
        sim_record_drop(chunk->freed);
        free(chunk);
    }
    block->pool->reserved -= block->mapping->size;
    sim_internal_free(sim, block->mapping);
    free(block);
}

static void release_down_to(vpmm_sim *sim, struct sim_pool *pool, uint64_t keep)
{
    for (struct block **at = &pool->blocks; *at && pool->reserved > keep;)
        if (block_idle(sim, *at))
            release_block(sim, at);
        else
            at = &(*at)->next;
}

static CUresult new_block(vpmm_sim *sim, struct sim_pool *pool, size_t bytes)
{
    struct block *block = calloc(1, sizeof *block);
    struct sim_chunk *chunk = calloc(1, sizeof *chunk);
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    if (!block || !chunk)
        goto fail;
    result = sim_internal_alloc(sim, pool->device, bytes, SIM_OWNER_POOL, &block->mapping);
    if (result != CUDA_SUCCESS)
        goto fail;
    sim_charge(sim, sim_price_pool_growth(bytes));
    block->mapping->owned_by = block;
    block->pool = pool;
    block->first = chunk;
    block->next = pool->blocks;
    pool->blocks = block;
    chunk->block = block;
    chunk->at = block->mapping->base;
    chunk->bytes = bytes;
    list_free(chunk);
    pool->reserved += bytes;
    if (pool->reserved > pool->reserved_high)
        pool->reserved_high = pool->reserved;
    return CUDA_SUCCESS;
fail:
    free(block);
    free(chunk);
    return result;
}

/* A block for the request: of the usual size, else of what it needs, else after giving back what is idle. */
static CUresult grow(vpmm_sim *sim, struct sim_pool *pool, size_t bytes)
{
    size_t need = round_up(bytes, SIM_PAGE);
    CUresult result = new_block(sim, pool, need > BLOCK_BYTES ? need : BLOCK_BYTES);
    if (result != CUDA_SUCCESS && need < BLOCK_BYTES)
        result = new_block(sim, pool, need);
    if (result == CUDA_SUCCESS)
        return result;
    release_down_to(sim, pool, 0);
    return new_block(sim, pool, need);
}

/* ---- pools ---- */

static struct sim_pool *pool_open(vpmm_sim *sim, int device, bool is_default)
{
    struct sim_pool *pool = calloc(1, sizeof *pool);
    if (!pool)
        return NULL;
    *pool = (struct sim_pool){.device = device, .is_default = is_default, .reuse = {1, 1, 1}};
    pool->handle = (CUmemoryPool)(uintptr_t)sim_object_add(sim, SIM_POOL, pool);
    if (!pool->handle) {
        free(pool);
        return NULL;
    }
    pool->next = sim->pools;
    sim->pools = pool;
    return pool;
}

static void pool_close(vpmm_sim *sim, struct sim_pool **at)
{
    struct sim_pool *pool = *at;
    *at = pool->next;
    while (pool->blocks)
        release_block(sim, &pool->blocks);
    free(pool);
}

void sim_pools_settle(vpmm_sim *sim)
{
    for (struct sim_pool **at = &sim->pools; *at;) {
        struct sim_pool *pool = *at;
        release_down_to(sim, pool, pool->destroyed ? 0 : pool->threshold);
        if (pool->destroyed && !pool->blocks)
            pool_close(sim, at);
        else
            at = &pool->next;
    }
}

void sim_pools_free(vpmm_sim *sim)
{
    while (sim->pools)
        pool_close(sim, &sim->pools);
    free(sim->chunks);
    for (size_t i = 0; i < sim->host_block_count; i++)
        free(sim->host_blocks[i].base);
    free(sim->host_blocks);
}

void sim_pools_leaks(vpmm_sim *sim, sim_leak *leak, void *count)
{
    for (size_t i = 0; i < sim->chunk_buckets; i++)
        for (struct sim_chunk *chunk = sim->chunks[i]; chunk; chunk = chunk->bucket_next)
            leak(count, "pool allocation", chunk->at, chunk->bytes);
    for (struct sim_pool *pool = sim->pools; pool; pool = pool->next)
        if (!pool->is_default && !pool->destroyed)
            leak(count, "memory pool", (uint64_t)(uintptr_t)pool->handle, pool->reserved);
    for (size_t i = 0; i < sim->host_block_count; i++)
        leak(count, "host allocation", (uint64_t)(uintptr_t)sim->host_blocks[i].base, sim->host_blocks[i].size);
}

static CUresult find_pool(vpmm_sim *sim, CUmemoryPool handle, struct sim_pool **pool)
{
    *pool = sim_object_find(sim, SIM_POOL, (uint64_t)(uintptr_t)handle);
    return *pool ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult default_pool(vpmm_sim *sim, int device, struct sim_pool **pool)
{
    CUmemoryPool *handle = &sim->devices[device].default_pool;
    if (*handle)
        return find_pool(sim, *handle, pool);
    *pool = pool_open(sim, device, true);
    if (!*pool)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *handle = (*pool)->handle;
    return CUDA_SUCCESS;
}

CUresult sim_cuDeviceGetDefaultMemPool(CUmemoryPool *pool_out, CUdevice dev)
{
    vpmm_sim *sim = sim_self();
    struct sim_pool *pool;
    if (!pool_out)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim_device_valid(sim, dev))
        return CUDA_ERROR_INVALID_DEVICE;
    CUresult result = default_pool(sim, dev, &pool);
    if (result == CUDA_SUCCESS)
        *pool_out = pool->handle;
    return result;
}

CUresult sim_cuMemPoolCreate(CUmemoryPool *handle, const CUmemPoolProps *poolProps)
{
    vpmm_sim *sim = sim_self();
    if (!handle || !poolProps || poolProps->allocType != CU_MEM_ALLOCATION_TYPE_PINNED ||
        poolProps->location.type != CU_MEM_LOCATION_TYPE_DEVICE || !sim_device_valid(sim, poolProps->location.id))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sim_unsafe(sim);
    if (result != CUDA_SUCCESS)
        return result;
    struct sim_pool *pool = pool_open(sim, poolProps->location.id, false);
    if (!pool)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *handle = pool->handle;
    return CUDA_SUCCESS;
}

/* The memory goes when its last allocation has been freed and that free has passed. */
CUresult sim_cuMemPoolDestroy(CUmemoryPool handle)
{
    vpmm_sim *sim = sim_self();
    struct sim_pool *pool;
    CUresult result = find_pool(sim, handle, &pool);
    if (result != CUDA_SUCCESS)
        return result;
    if (pool->is_default)
        return CUDA_ERROR_INVALID_VALUE;
    sim_object_remove(sim, SIM_POOL, (uint64_t)(uintptr_t)handle);
    pool->destroyed = true;
    sim_pools_settle(sim);
    return CUDA_SUCCESS;
}

CUresult sim_cuMemPoolTrimTo(CUmemoryPool handle, size_t minBytesToKeep)
{
    vpmm_sim *sim = sim_self();
    struct sim_pool *pool;
    CUresult result = find_pool(sim, handle, &pool);
    if (result == CUDA_SUCCESS)
        result = sim_unsafe(sim);
    if (result == CUDA_SUCCESS)
        release_down_to(sim, pool, minBytesToKeep);
    return result;
}

/* The high-water marks can only be set to 0, which means: to what they are now. */
static CUresult reset_high(uint64_t *high, uint64_t now, const void *value)
{
    if (*(const cuuint64_t *)value != 0)
        return CUDA_ERROR_INVALID_VALUE;
    *high = now;
    return CUDA_SUCCESS;
}

CUresult sim_cuMemPoolSetAttribute(CUmemoryPool handle, CUmemPool_attribute attr, void *value)
{
    struct sim_pool *pool;
    CUresult result = find_pool(sim_self(), handle, &pool);
    if (result != CUDA_SUCCESS || !value)
        return CUDA_ERROR_INVALID_VALUE;
    switch (attr) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
        pool->reuse[attr - CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES] = *(const int *)value;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        pool->threshold = *(const cuuint64_t *)value;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
        return reset_high(&pool->reserved_high, pool->reserved, value);
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        return reset_high(&pool->used_high, pool->used, value);
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult sim_cuMemPoolGetAttribute(CUmemoryPool handle, CUmemPool_attribute attr, void *value)
{
    struct sim_pool *pool;
    CUresult result = find_pool(sim_self(), handle, &pool);
    if (result != CUDA_SUCCESS || !value)
        return CUDA_ERROR_INVALID_VALUE;
    switch (attr) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
        *(int *)value = pool->reuse[attr - CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES];
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        *(cuuint64_t *)value = pool->threshold;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
        *(cuuint64_t *)value = pool->reserved;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
        *(cuuint64_t *)value = pool->reserved_high;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
        *(cuuint64_t *)value = pool->used;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        *(cuuint64_t *)value = pool->used_high;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

/* ---- allocation and free ---- */

/*
 * To the race detector a free is a write of all of the chunk. An allocation is no access: it only brings the order of
 * the chunk's free point along, so that a use that does not come after it is found to race with the earlier owner's.
 */
static struct sim_op *giving_up(const struct sim_lane *lane, const struct sim_chunk *chunk)
{
    struct sim_op *op = sim_op_new(SIM_OP_GIVE_UP);
    if (!op)
        return NULL;
    op->to = (struct sim_rows){NULL, chunk->at, 0};
    op->width = chunk->bytes;
    op->height = 1;
    op->site = sim_site_new(lane->handle, chunk->at, chunk->bytes);
    if (op->site)
        return op;
    free(op);
    return NULL;
}

static CUresult take_over(vpmm_sim *sim, struct sim_lane *lane, struct sim_chunk *chunk)
{
    struct sim_op *op = sim_op_new(SIM_OP_MARK);
    if (!op)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (chunk->freed) /* on the same lane as well: a joined point knows more than its lane */
        sim_op_depend(op, chunk->freed);
    return sim_submit(sim, lane, op);
}

/* The rest of the chunk stays free, under the same free point. */
static void split(struct sim_chunk *chunk, size_t bytes)
{
    struct sim_chunk *rest = chunk->bytes > bytes ? calloc(1, sizeof *rest) : NULL;
    if (!rest)
        return;
    *rest = (struct sim_chunk){.before = chunk,
                               .after = chunk->after,
                               .block = chunk->block,
                               .at = chunk->at + bytes,
                               .bytes = chunk->bytes - bytes,
                               .freed = sim_record_hold(chunk->freed)};
    if (rest->after)
        rest->after->before = rest;
    chunk->after = rest;
    chunk->bytes = bytes;
    list_free(rest);
}

static void count_used(struct sim_pool *pool, size_t bytes)
{
    pool->used += bytes;
    if (pool->used > pool->used_high)
        pool->used_high = pool->used;
}

static CUresult find_chunk(vpmm_sim *sim, struct sim_pool *pool, size_t bytes, struct sim_lane *lane,
                           struct sim_chunk **chunk)
{
    *chunk = best_fit(sim, pool, bytes, lane);
    if (*chunk)
        return CUDA_SUCCESS;
    merge_all(sim, pool);
    *chunk = best_fit(sim, pool, bytes, lane);
    if (*chunk)
        return CUDA_SUCCESS;
    CUresult result = grow(sim, pool, bytes);
    *chunk = result == CUDA_SUCCESS ? best_fit(sim, pool, bytes, lane) : NULL;
    return result;
}

static CUresult pool_alloc(vpmm_sim *sim, struct sim_pool *pool, size_t bytes, struct sim_lane *lane, CUdeviceptr *out)
{
    struct sim_chunk *chunk;
    if (!out || bytes == 0 || bytes > SIM_VA_LIMIT)
        return CUDA_ERROR_INVALID_VALUE;
    if (lane->capture) /* would be a node of the graph's */
        return CUDA_ERROR_NOT_SUPPORTED;
    bytes = round_up(bytes, GRAIN);
    CUresult result = sim_unsafe(sim);
    if (result == CUDA_SUCCESS && sim->chunk_count >= sim->chunk_buckets && !more_buckets(sim))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS)
        result = find_chunk(sim, pool, bytes, lane, &chunk);
    if (result != CUDA_SUCCESS)
        return result;
    split(chunk, bytes);
    unlist_free(chunk);
    chunk->live = true;
    result = take_over(sim, lane, chunk);
    if (result != CUDA_SUCCESS) {
        chunk->live = false;
        list_free(chunk);
        return result;
    }
    sim_record_drop(chunk->freed);
    chunk->freed = NULL;
    chunk->block->live++;
    remember(sim, chunk);
    count_used(pool, chunk->bytes);
    *out = chunk->at;
    return CUDA_SUCCESS;
}

/* The chunk is free from the record on; NULL: from now. */
static void give_back(vpmm_sim *sim, struct sim_chunk *chunk, struct sim_record *freed)
{
    forget(sim, chunk);
    chunk->live = false;
    chunk->freed = freed;
    chunk->block->live--;
    chunk->block->pool->used -= chunk->bytes;
    list_free(chunk);
    merge_after(sim, chunk);
    if (chunk->before && !chunk->before->live)
        merge_after(sim, chunk->before);
}

static CUresult pool_free(vpmm_sim *sim, CUdeviceptr at, struct sim_lane *lane)
{
    struct sim_chunk *chunk = live_chunk(sim, at);
    if (!chunk)
        return sim_misuse(sim, CUDA_ERROR_INVALID_VALUE, "%s: 0x%llx is no live allocation of a pool",
                          sim_entry_name(sim_frame()->entry), (unsigned long long)at);
    if (lane->capture)
        return CUDA_ERROR_INVALID_VALUE;
    struct sim_record *freed = sim_record_new();
    struct sim_op *op = freed ? giving_up(lane, chunk) : NULL;
    if (!op) {
        sim_record_drop(freed);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    op->record = sim_record_hold(freed);
    CUresult result = sim_submit(sim, lane, op);
    if (result != CUDA_SUCCESS) {
        sim_record_drop(freed);
        return result;
    }
    give_back(sim, chunk, freed);
    return CUDA_SUCCESS;
}

/* The calls take a context's default pool, or one that is named. */
static CUresult lane_for_pool(vpmm_sim *sim, CUstream stream, struct sim_lane **lane)
{
    struct sim_context *context;
    CUresult result = sim_current(sim, &context);
    return result == CUDA_SUCCESS ? sim_lane_of(sim, stream, lane) : result;
}

CUresult sim_cuMemAllocAsync(CUdeviceptr *dptr, size_t bytesize, CUstream hStream)
{
    vpmm_sim *sim = sim_self();
    struct sim_lane *lane;
    struct sim_pool *pool;
    CUresult result = lane_for_pool(sim, hStream, &lane);
    if (result == CUDA_SUCCESS)
        result = default_pool(sim, lane->device, &pool);
    return result == CUDA_SUCCESS ? pool_alloc(sim, pool, bytesize, lane, dptr) : result;
}

CUresult sim_cuMemAllocFromPoolAsync(CUdeviceptr *dptr, size_t bytesize, CUmemoryPool handle, CUstream hStream)
{
    vpmm_sim *sim = sim_self();
    struct sim_lane *lane;
    struct sim_pool *pool;
    CUresult result = lane_for_pool(sim, hStream, &lane);
    if (result == CUDA_SUCCESS)
        result = find_pool(sim, handle, &pool);
    return result == CUDA_SUCCESS ? pool_alloc(sim, pool, bytesize, lane, dptr) : result;
}

CUresult sim_cuMemFreeAsync(CUdeviceptr dptr, CUstream hStream)
{
    vpmm_sim *sim = sim_self();
    struct sim_lane *lane;
    CUresult result = lane_for_pool(sim, hStream, &lane);
    return result == CUDA_SUCCESS ? pool_free(sim, dptr, lane) : result;
}

/* ---- plain device memory ---- */

CUresult sim_cuMemAlloc(CUdeviceptr *dptr, size_t bytesize)
{
    vpmm_sim *sim = sim_self();
    struct sim_context *context;
    struct sim_mapping *mapping;
    sim_charge(sim, sim_price_plain_alloc(bytesize));
    CUresult result = sim_current(sim, &context);
    if (result != CUDA_SUCCESS)
        return result;
    if (!dptr || bytesize == 0 || bytesize > SIM_VA_LIMIT)
        return CUDA_ERROR_INVALID_VALUE;
    result = sim_unsafe(sim);
    if (result == CUDA_SUCCESS)
        result = sim_internal_alloc(sim, context->device, round_up(bytesize, SIM_PAGE), SIM_OWNER_PLAIN, &mapping);
    if (result != CUDA_SUCCESS)
        return result;
    mapping->owned_by = context;
    mapping->next_plain = context->plain;
    context->plain = mapping;
    *dptr = mapping->base;
    return CUDA_SUCCESS;
}

static void free_plain(vpmm_sim *sim, struct sim_mapping *mapping)
{
    struct sim_mapping **link = &((struct sim_context *)mapping->owned_by)->plain;
    while (*link != mapping)
        link = &(*link)->next_plain;
    *link = mapping->next_plain;
    sim_internal_free(sim, mapping);
}

void sim_plain_end(vpmm_sim *sim, struct sim_context *context)
{
    while (context->plain)
        free_plain(sim, context->plain);
}

static struct sim_mapping *plain_at(vpmm_sim *sim, CUdeviceptr at)
{
    struct sim_mapping *mapping = sim_mapping_at(sim, at);
    return mapping && mapping->base == at && mapping->owner == SIM_OWNER_PLAIN ? mapping : NULL;
}

/* This wait makes cuMemFree dear: of plain memory for its context, of a pool's memory for the device. */
static void wait_for_users(vpmm_sim *sim, CUdeviceptr at)
{
    struct sim_mapping *mapping = plain_at(sim, at);
    struct sim_chunk *chunk = live_chunk(sim, at);
    if (mapping)
        sim_drain_context(sim, mapping->owned_by);
    else if (chunk)
        sim_drain_device(sim, chunk->block->pool->device);
}

/* Waits, and looks then, for the wait lets others in. */
CUresult sim_cuMemFree(CUdeviceptr dptr)
{
    vpmm_sim *sim = sim_self();
    struct sim_context *context;
    CUresult result = sim_current(sim, &context);
    if (result == CUDA_SUCCESS)
        result = sim_unsafe(sim);
    if (result != CUDA_SUCCESS || dptr == 0)
        return result;
    wait_for_users(sim, dptr);
    struct sim_mapping *mapping = plain_at(sim, dptr);
    struct sim_chunk *chunk = live_chunk(sim, dptr);
    if (!mapping && !chunk)
        return sim_misuse(sim, CUDA_ERROR_INVALID_VALUE, "cuMemFree: 0x%llx is no live allocation",
                          (unsigned long long)dptr);
    sim_charge(sim, sim_price_plain_free(mapping ? mapping->size : chunk->bytes));
    if (mapping)
        free_plain(sim, mapping);
    else
        give_back(sim, chunk, NULL);
    return sim_waited(sim);
}

bool sim_pool_live(vpmm_sim *sim, CUdeviceptr at, size_t bytes)
{
    const struct sim_mapping *mapping = sim_mapping_at(sim, at);
    if (!mapping || mapping->owner != SIM_OWNER_POOL)
        return true;
    const struct sim_chunk *chunk = ((struct block *)mapping->owned_by)->first;
    while (chunk && chunk->at + chunk->bytes <= at)
        chunk = chunk->after;
    return chunk && chunk->live && at + bytes <= chunk->at + chunk->bytes;
}

/* ---- host memory ---- */

static struct sim_host_block *host_block_at(vpmm_sim *sim, const void *p)
{
    for (size_t i = 0; i < sim->host_block_count; i++) {
        struct sim_host_block *block = &sim->host_blocks[i];
        if ((const char *)p >= block->base && (const char *)p < block->base + block->size)
            return block;
    }
    return NULL;
}

bool sim_host_pinned(vpmm_sim *sim, const void *p, size_t bytes)
{
    struct sim_host_block *block = host_block_at(sim, p);
    return block && bytes <= (size_t)(block->base + block->size - (const char *)p);
}

CUresult sim_cuMemHostAlloc(void **pp, size_t bytesize, unsigned int Flags)
{
    enum { ALIGNMENT = 4096, KNOWN_FLAGS = 7 };
    vpmm_sim *sim = sim_self();
    struct sim_context *context;
    CUresult result = sim_current(sim, &context);
    if (result == CUDA_SUCCESS)
        result = sim_unsafe(sim);
    if (result != CUDA_SUCCESS)
        return result;
    if (!pp || bytesize == 0 || Flags & ~(unsigned)KNOWN_FLAGS)
        return CUDA_ERROR_INVALID_VALUE;
    if (sim->host_block_count == sim->host_block_capacity) {
        size_t capacity = sim->host_block_capacity ? 2 * sim->host_block_capacity : 16;
        struct sim_host_block *blocks = realloc(sim->host_blocks, capacity * sizeof *blocks);
        if (!blocks)
            return CUDA_ERROR_OUT_OF_MEMORY;
        sim->host_blocks = blocks;
        sim->host_block_capacity = capacity;
    }
    if (posix_memalign(pp, ALIGNMENT, bytesize) != 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    sim->host_blocks[sim->host_block_count++] = (struct sim_host_block){*pp, bytesize};
    return CUDA_SUCCESS;
}

/* Copies that are under way may still use it, on any device. */
CUresult sim_cuMemFreeHost(void *p)
{
    vpmm_sim *sim = sim_self();
    struct sim_context *context;
    CUresult result = sim_current(sim, &context);
    if (result == CUDA_SUCCESS)
        result = sim_unsafe(sim);
    if (result != CUDA_SUCCESS)
        return result;
    for (int device = 0; device < sim->config.devices; device++)
        sim_drain_device(sim, device);
    struct sim_host_block *block = host_block_at(sim, p);
    if (!block || block->base != p)
        return sim_misuse(sim, CUDA_ERROR_INVALID_VALUE, "cuMemFreeHost: %p is no live allocation", p);
    *block = sim->host_blocks[--sim->host_block_count];
    free(p);
    return CUDA_SUCCESS;
}
