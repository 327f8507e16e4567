/*
 * zombie.h - old addresses of extents that were mapped elsewhere, and memory that the driver would not take back.
 *
 * Re-mapping leaves the old mapping in place: work that was queued before still uses it. The old address becomes a
 * hole when the fence of the stream that freed it has passed and the driver has unmapped it; not before, and not if
 * the driver refuses, when it stays pending and is tried again in a later pass.
 *
 * Physical memory is the device's again when its last mapping is gone and its handle is released, not when the pool has
 * asked for that. An extent whose place is given up is quarantined until then: not in mapped_bytes any more, and still
 * in what is compared with max_mapped. It leaves with the release that the driver has answered with success, or, after
 * one that it had refused, with CUDA_ERROR_INVALID_VALUE: the refused one had taken effect. So a part of a zombie names
 * the extent of which it has a mapping, or the release, as one of its holders (units.h); the last of them releases the
 * handle, and takes the pages out of quarantine. Who gives an extent up puts them in before that.
 *
 * A zombie is made ahead of the driver calls that need it, so that nothing can fail once memory has moved. Any thread
 * pushes; the holder of the pass lock takes and retires. The driver serialises unmapping with everything else, so a
 * call takes at most ZOMBIE_MAPPINGS_A_CALL mappings, and a builder of the pool is let in after each.
 */
#ifndef VPMM_LIB_ZOMBIE_H
#define VPMM_LIB_ZOMBIE_H

#include "remap/arena.h"

enum { ZOMBIE_MAPPINGS_A_CALL = 4 };

struct zombie_part {
    uint32_t pages;
    struct extent *extent; /* NULL: no physical memory waits for it */
};

struct zombie {
    struct pile_node node; /* first */
    struct zombie *next;
    uint64_t page, pages; /* 0 pages: nothing to unmap, handles alone */
    struct fence fence;
    bool has_pages;           /* at first; for the count of those retired */
    uint32_t parts, unmapped; /* the first of them are unmapped, and may wait for a release */
    struct zombie_part part[];
};

struct zombie *zombie_create(uint32_t parts); /* NULL: no memory. To be filled in */

/* The ith part, as one more holder of the extent. */
void zombie_hold(struct zombie *, uint32_t i, struct extent *);

/* Hands it to the reaper. Its pages, in the caller's hands, become ZOMBIE. */
void zombie_push(struct arena *, struct zombie *);

/*
 * Lets go of the extents of unmapped parts, by the zombie's owner. False: the driver has refused a release, and the
 * next call tries it again.
 */
bool zombie_let_go(struct arena *, struct zombie *);

/*
 * Under the pass lock: unmaps what is due. True: a zombie was retired or advanced. gives_way: not while a thread
 * builds, unless much is pending; a request that is about to fail, and a trim, need what is unmapped sooner than
 * another's build.
 */
bool zombies_retire(struct arena *, bool gives_way);

/* Under the pass lock: whether any zombie is left, whatever it waits for. */
bool zombies_wait(const struct arena *);

/* At the pool's end, everything synchronised and unmapped otherwise: drops the records. */
void zombies_drop(struct arena *);

#endif
