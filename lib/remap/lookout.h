/*
 * lookout.h - what a builder looks out for: a region that others have freed, and that serves its request as it is.
 *
 * Before each plan, and then, where the plan makes new memory, while it is carried out: what is found then serves in
 * place of what is made, and the build is overtaken. Tier 2 or 3 is looked for, and tier 4 where the request may wait;
 * what has not passed is yet to be waited for (REGION_WAITED), by region_await and without the turn.
 *
 * A lookout is its thread's. What it has found is in the thread's hands.
 */
#ifndef VPMM_LIB_LOOKOUT_H
#define VPMM_LIB_LOOKOUT_H

#include "remap/arena.h"
#include "space/region.h"

struct lookout {
    struct arena *arena;
    struct stream *stream; /* NULL: for nobody yet, and nothing is found */
    uint64_t wanted;       /* pages that the request is for */
    bool may_wait;         /* tier 4 serves it too */
    uint64_t published;    /* regions of the pool so far, when one that fits was last looked for */
    uint64_t made;         /* pages of new memory; 0: none, and nothing is looked for meanwhile */
    uint64_t idle_pages;   /* of the pool: mapped and not live, at lookout_begin or when much had been freed since */
    uint64_t asked_ns;     /* the time that it has asked the driver what has passed */
    struct region found;   /* it serves in place of what is made; units 0: none */
    enum region_source source;
};

/* A region that fits, in the caller's hands, and where it is from; REGION_NONE: there is none. Calls no driver. */
enum region_source lookout_take(const struct lookout *, struct region *);

/* What is carried out from here on makes so many pages of new memory. */
void lookout_begin(struct lookout *, uint64_t made);

/* Whether it has found something, now or before. May ask the driver what has passed: not under a lock. */
bool lookout_sees(struct lookout *);

#endif
