#include "pools.h"

#include <stdio.h>
#include <string.h>

void pools_init(struct pools *pools)
{
    pthread_mutex_init(&pools->lock, NULL);
}

void pools_free(struct pools *pools)
{
    for (unsigned i = 0; i < pools->count; i++)
        vpmm_observe_end(pools->shown[i].pool);
    pthread_mutex_destroy(&pools->lock);
}

/* ---- names ---- */

/* The bytes of the character at `at`: RFC 3629's table of well-formed sequences. 0: it is none. */
static unsigned utf8_length(const unsigned char *at)
{
    static const struct {
        unsigned char first, last, second_low, second_high, length;
    } forms[] = {
        {0x01, 0x7f, 0, 0, 1},       {0xc2, 0xdf, 0x80, 0xbf, 2}, {0xe0, 0xe0, 0xa0, 0xbf, 3},
        {0xe1, 0xec, 0x80, 0xbf, 3}, {0xed, 0xed, 0x80, 0x9f, 3}, {0xee, 0xef, 0x80, 0xbf, 3},
        {0xf0, 0xf0, 0x90, 0xbf, 4}, {0xf1, 0xf3, 0x80, 0xbf, 4}, {0xf4, 0xf4, 0x80, 0x8f, 4},
    };
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        if (at[0] < forms[i].first || at[0] > forms[i].last)
            continue;
        if (forms[i].length > 1 && (at[1] < forms[i].second_low || at[1] > forms[i].second_high))
            return 0;
        for (unsigned j = 2; j < forms[i].length; j++)
            if (at[j] < 0x80 || at[j] > 0xbf)
                return 0;
        return forms[i].length;
    }
    return 0;
}

bool pools_name_is_good(const char *name)
{
    if (!name[0] || strnlen(name, POOL_NAME_BYTES + 1) > POOL_NAME_BYTES)
        return false;
    unsigned length = 1;
    for (const unsigned char *at = (const unsigned char *)name; *at && length; at += length)
        length = utf8_length(at);
    return length;
}

/* ---- the list ---- */

static int find(const struct pools *pools, const vpmm_pool *pool)
{
    for (unsigned i = 0; i < pools->count; i++)
        if (pools->shown[i].pool == pool)
            return (int)i;
    return -1;
}

static bool is_taken(const struct pools *pools, int ordinal, const char *name)
{
    for (unsigned i = 0; i < pools->count; i++)
        if (pools->shown[i].ordinal == ordinal && !strcmp(pools->shown[i].name, name))
            return true;
    return false;
}

static vpmm_status add_locked(struct pools *pools, const struct shown_pool *pool)
{
    int there = find(pools, pool->pool);
    if (there >= 0)
        return vpmm_error_set(VPMM_ERROR_INVALID_VALUE, "vpmm_exporter_add: '%s': the pool is here already, as '%s'",
                              pool->name, pools->shown[there].name);
    if (is_taken(pools, pool->ordinal, pool->name))
        return vpmm_error_set(VPMM_ERROR_INVALID_VALUE,
                              "vpmm_exporter_add: name '%s': a pool on device %d has it; each name is allowed once a "
                              "device",
                              pool->name, pool->ordinal);
    if (pools->count == VPMM_EXPORTER_POOLS)
        return vpmm_error_set(VPMM_ERROR_INVALID_VALUE,
                              "vpmm_exporter_add: '%s' would be pool %d; at most %d are allowed", pool->name,
                              VPMM_EXPORTER_POOLS + 1, VPMM_EXPORTER_POOLS);
    vpmm_status status = vpmm_observe_begin(pool->pool);
    if (status == VPMM_SUCCESS)
        pools->shown[pools->count++] = *pool;
    return status;
}

vpmm_status pools_add(struct pools *pools, vpmm_pool *pool, const char *name)
{
    struct shown_pool shown = {.pool = pool};
    vpmm_device device;
    if (!pool || !name)
        return vpmm_error_set(VPMM_ERROR_INVALID_VALUE, "vpmm_exporter_add: the %s is NULL", pool ? "name" : "pool");
    if (!pools_name_is_good(name))
        return vpmm_error_set(VPMM_ERROR_INVALID_VALUE,
                              "vpmm_exporter_add: name '%.128s': 1 to %d bytes of valid UTF-8 are allowed", name,
                              POOL_NAME_BYTES);
    snprintf(shown.name, sizeof shown.name, "%s", name);
    vpmm_status status = vpmm_device_get(pool, &device);
    if (status != VPMM_SUCCESS)
        return status;
    shown.ordinal = device.ordinal;
    pthread_mutex_lock(&pools->lock);
    status = add_locked(pools, &shown);
    pthread_mutex_unlock(&pools->lock);
    return status;
}

vpmm_status pools_remove(struct pools *pools, vpmm_pool *pool)
{
    pthread_mutex_lock(&pools->lock);
    int at = pool ? find(pools, pool) : -1;
    if (at >= 0) {
        pools->count--;
        vpmm_observe_end(pool);
        memmove(&pools->shown[at], &pools->shown[at + 1], (pools->count - (unsigned)at) * sizeof *pools->shown);
    }
    pthread_mutex_unlock(&pools->lock);
    return at >= 0 ? VPMM_SUCCESS
                   : vpmm_error_set(VPMM_ERROR_INVALID_VALUE, "vpmm_exporter_remove: the pool is %s",
                                    pool ? "not here: it was never added, or is removed already" : "NULL");
}

/* ---- what a scrape takes ---- */

static void take(const struct shown_pool *pool, struct snapshot *out)
{
    memcpy(out->name, pool->name, sizeof out->name);
    vpmm_device_get(pool->pool, &out->device); /* its cap may have changed */
    vpmm_stats_get(pool->pool, &out->stats);
    vpmm_calls_get(pool->pool, out->calls);
    vpmm_latency_get(pool->pool, &out->latency);
    vpmm_health_get(pool->pool, &out->health);
}

unsigned pools_snapshot(struct pools *pools, struct snapshot out[VPMM_EXPORTER_POOLS])
{
    pthread_mutex_lock(&pools->lock);
    unsigned count = pools->count;
    for (unsigned i = 0; i < count; i++)
        take(&pools->shown[i], &out[i]);
    pthread_mutex_unlock(&pools->lock);
    return count;
}

static enum pools_trouble trouble(vpmm_pool *pool, unsigned stall_ms)
{
    vpmm_health health;
    vpmm_health_get(pool, &health);
    if (health.lost)
        return POOLS_LOST;
    return health.reaper && health.reaper_age_ns / 1000000 >= stall_ms ? POOLS_STALLED : POOLS_GOOD;
}

enum pools_trouble pools_check(struct pools *pools, unsigned stall_ms, char name[POOL_NAME_BYTES + 1])
{
    enum pools_trouble found = POOLS_GOOD;
    pthread_mutex_lock(&pools->lock);
    for (unsigned i = 0; i < pools->count && found == POOLS_GOOD; i++) {
        found = trouble(pools->shown[i].pool, stall_ms);
        memcpy(name, pools->shown[i].name, sizeof pools->shown[i].name);
    }
    pthread_mutex_unlock(&pools->lock);
    return found;
}
