/*
 * pools.h - the pools that are shown, and what a scrape takes from them.
 *
 * A scrape copies the numbers of all pools at once, under the list's lock, and writes them out afterwards: a pool is
 * used for microseconds at a time, and its removal waits no longer. The lock is the exporter's own; no thread that
 * allocates ever sees it.
 *
 * Threads: `lock` guards every place; a snapshot belongs to the exporter's thread, which alone takes it.
 */
#ifndef VPMM_EXPORTER_POOLS_H
#define VPMM_EXPORTER_POOLS_H

#include <pthread.h>
#include <stdbool.h>

#include <vpmm/exporter.h>
#include <vpmm/observe.h>

enum { POOL_NAME_BYTES = 128 };

struct snapshot {
    char name[POOL_NAME_BYTES + 1];
    vpmm_device device;
    vpmm_stats stats;
    vpmm_call_counts calls[VPMM_DRIVER_CALLS];
    vpmm_latency latency;
    vpmm_health health;
};

struct shown_pool {
    vpmm_pool *pool; /* NULL: the place is free */
    char name[POOL_NAME_BYTES + 1];
    int ordinal; /* of its device */
};

struct pools {
    pthread_mutex_t lock;
    struct shown_pool shown[VPMM_EXPORTER_POOLS]; /* in order of addition, without gaps */
    unsigned count;
};

void pools_init(struct pools *);
void pools_free(struct pools *);

/* INVALID_VALUE: see vpmm_exporter_add and vpmm_exporter_remove. */
vpmm_status pools_add(struct pools *, vpmm_pool *, const char *name);
vpmm_status pools_remove(struct pools *, vpmm_pool *);

/* How many there were. */
unsigned pools_snapshot(struct pools *, struct snapshot out[VPMM_EXPORTER_POOLS]);

/* A pool whose driver has failed for good, or whose reaper has not ended a pass for so long. */
enum pools_trouble { POOLS_GOOD, POOLS_LOST, POOLS_STALLED };
enum pools_trouble pools_check(struct pools *, unsigned stall_ms, char name[POOL_NAME_BYTES + 1]);

/* Valid UTF-8 of 1 to POOL_NAME_BYTES bytes. */
bool pools_name_is_good(const char *name);

#endif
