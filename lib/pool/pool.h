/*
 * pool.h - what a pool is made of.
 *
 *   pool_life.c   its beginning and end
 *   tiers.c       pages: from memory that is free to memory that is built, and what is done before a request fails
 *   small.c       requests for the driver's own pool;   piece.c  for parts of pages
 *   pool.c        the public functions: arguments checked, tiers in their order, errors in words
 */
#ifndef VPMM_LIB_POOL_H
#define VPMM_LIB_POOL_H

#include "cache/front.h"
#include "driver/async_pool.h"
#include "pool/process.h"
#include "remap/arena.h"

struct vpmm_pool {
    vpmm_config config; /* with page_size filled in */
    size_t cut_below;   /* bytes: smaller requests may be cut from pages, if a page fits them badly; 0: none, */
    size_t cut_mask;    /* and not if these bits are all clear: whole pages */
    struct device device;
    struct stats stats;
    struct fronts fronts;     /* caches of pages, */
    struct fronts cut_fronts; /* and of parts of pages */
    struct arena arena;
    struct async_pool async;
    bool paged;  /* false: no page could serve any request, or the device has no virtual memory management */
    bool opened; /* the device's context is retained */
    uint32_t generation;
    struct process_entry process;
};

/* What every call looks at first. INVALID_VALUE, NOT_SUPPORTED after a fork, DRIVER if the device is lost. */
vpmm_status pool_check(const struct vpmm_pool *, const char *function);

#endif
