/*
 * give_back.h - memory that nobody needs goes back to the device: a wholly free extent, unmapped and released.
 *
 *   choose   under the plan lock: of the wholly free extents that have passed, the longest that is not more than what
 *            is to go, which is most memory for each call; else, if more may go, the shortest
 *   claim    its run by exchange, also under the plan lock. What lies around the extent is published again at once
 *   remove   without the plan lock: unmapped, out of the budget into quarantine, released by its last holder. Where the
 *            driver refuses, a zombie goes on trying (zombie.h), and the pages are no hole before
 */
#ifndef VPMM_LIB_GIVE_BACK_H
#define VPMM_LIB_GIVE_BACK_H

#include "remap/arena.h"

/*
 * Wholly free extents, at most so many, until at most keep_pages are mapped. Under the pass lock; it waits for the turn
 * before each extent, and at the end, for 10 ms at most, for what others have in their hands (hands.h). HOST_MEMORY.
 */
vpmm_status give_back_down_to(struct arena *, uint64_t keep_pages, uint64_t most, uint64_t *released_pages);

/*
 * One of them that leaves at least keep_pages mapped, the longest; *is_given false: there is none. HOST_MEMORY: it is
 * not known. Under the pass lock.
 */
vpmm_status give_back_one(struct arena *, uint64_t keep_pages, uint32_t *released_pages, bool *is_given);

#endif
