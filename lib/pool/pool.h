/*
 * pool.h - what a pool is made of.
 *
 *   pool.c        its beginning and end, and what gives memory back by hand: vpmm_stream_release, vpmm_trim, vpmm_park,
 *                 vpmm_poll
 *   hit.c         vpmm_malloc and vpmm_free as far as the thread's own cache serves them
 *   slow.c        the same past the cache: arguments checked, tiers in their order
 *   find.c        memory that is free already
 *   tiers.c       pages: from memory that is free to memory that is built, and what is done before a request fails; of
 *                 an arena, as is the next
 *   piece.c       parts of pages
 *   attribute.c   what a program changes while the pool runs
 *   observe.c     statistics, and what an exporter asks;   audit.c   every invariant, and the map
 *   reaper.c      the pool's own thread;   process.c   forks, and the process's exit
 *   config.c      settings, from fields and the environment;   default_pool.c   a device's default pool, never
 *                 destroyed
 */
#ifndef VPMM_LIB_POOL_H
#define VPMM_LIB_POOL_H

#include "cache/front.h"
#include "driver/async_pool.h"
#include "pool/process.h"
#include "remap/arena.h"

struct vpmm_pool {
    vpmm_config config; /* with page_size filled in */
    struct device device;
    struct stats stats;
    struct fronts fronts;     /* caches of pages, */
    struct fronts cut_fronts; /* and of parts of pages */
    struct arena arena;
    struct async_pool async;
    bool paged;          /* false: no page could serve any request, or the device has no virtual memory management */
    bool opened;         /* the device's context is retained */
    bool is_default;     /* set before others are given it */
    const void *library; /* the copy of it that made the pool */
    uint32_t generation;
    _Atomic(uint64_t) observers; /* vpmm_observe_begin without an end */
    struct process_entry process;
};

/* What a look at a pool begins with. INVALID_VALUE: NULL, or a pool of another copy of the library. */
vpmm_status pool_check_ours(const struct vpmm_pool *, const char *function);

/* What every other call looks at first: likewise, NOT_SUPPORTED after a fork, DRIVER if the device is lost. */
vpmm_status pool_check(const struct vpmm_pool *, const char *function);

#endif
