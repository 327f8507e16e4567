/*
 * arena_life.h - how a pool's shared state begins and ends.
 */
#ifndef VPMM_LIB_ARENA_LIFE_H
#define VPMM_LIB_ARENA_LIFE_H

#include "remap/arena.h"

/* HOST_MEMORY. What was made is given back by arena_free, also after a failure. The arena is zero-filled before. */
/* What vpmm_pool_set_attribute changes later, also of a pool that has no arena besides. */
void arena_set_up(struct arena *, const vpmm_config *);

vpmm_status arena_init(struct arena *, struct device *, struct stats *, const vpmm_config *);

/*
 * With no allocation live and no other thread inside: waits for what was freed, then gives every mapping, handle and
 * address range back. DRIVER: the first refusal; everything else was tried all the same. A lost device is asked for
 * nothing: what it holds is given up.
 */
vpmm_status arena_give_back(struct arena *);

/* The host's records. */
void arena_free(struct arena *);

#endif
