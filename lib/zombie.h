/*
 * zombie.h - old addresses of extents that were mapped elsewhere, and handles that the driver would not take back.
 *
 * Re-mapping leaves the old mapping in place: work that was queued before still uses it. The old address becomes a
 * hole when the fence of the stream that freed it has passed and the driver has unmapped it; not before, and not if
 * the driver refuses, when it stays pending and is tried again in a later pass.
 *
 * A zombie is made ahead of the driver calls that need it, so that nothing can fail once memory has moved. Any thread
 * pushes; the holder of the reaper's turn takes and retires. The driver serialises unmapping with everything else,
 * so a call takes at most ZOMBIE_MAPPINGS_A_CALL mappings: others wait for no more than that.
 */
#ifndef VPMM_LIB_ZOMBIE_H
#define VPMM_LIB_ZOMBIE_H

#include "arena.h"
#include "region.h"

enum { ZOMBIE_MAPPINGS_A_CALL = 4 };

struct zombie {
    struct pile_node node; /* first */
    struct zombie *next;
    uint64_t page, pages;
    struct fence fence;
    CUmemGenericAllocationHandle handle; /* released after the unmap, if it has one; pages 0: nothing to unmap */
    bool has_handle, next_try_is_last;   /* a handle refused twice is given up: it may have been taken the first time */
    bool has_pages;                      /* at first; for the count of those retired */
    uint32_t first, mappings;            /* of `length`, those not yet unmapped */
    uint32_t length[];                   /* pages of each mapping, in address order */
};

struct zombie *zombie_create(uint32_t mappings); /* NULL: no memory. To be filled in */

/* Hands it to the reaper. Its pages, in the caller's hands, become ZOMBIE. */
void zombie_push(struct arena *, struct zombie *);

/* Under the reaper's turn: unmaps what is due. True: a zombie was retired or advanced. */
bool zombies_retire(struct arena *);

/* At the pool's end, everything synchronised and unmapped otherwise: drops the records. */
void zombies_drop(struct arena *);

#endif
