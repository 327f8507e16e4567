/*
 * tiers.h - pages for a request: what is free, what is made, and what is done before the request fails.
 *
 *   2 own stream, 3 completed, 4 waited   memory that is free already (pool/find.h)
 *   5 build                               memory made where there is none: extended, moved, created (remap/build.h)
 *   6 reclaim                             everything is taken back, and 2 to 5 are tried again
 */
#ifndef VPMM_LIB_TIERS_H
#define VPMM_LIB_TIERS_H

#include "pool/find.h"
#include "remap/arena.h"

/*
 * Tiers 2 to 6: a region of at least `pages` pages, or if there is no memory for that of at least `enough`, in the
 * caller's hands; the source is REGION_NONE for what was built. A handle that is created for it has at most
 * longest_handle pages; UINT32_MAX: the policy says. Errors as for vpmm_malloc; what there is when the request fails
 * with OUT_OF_MEMORY is the caller's to say.
 */
vpmm_status tiers_take_pages(struct arena *, uint64_t pages, uint64_t enough, uint32_t longest_handle, struct stream *,
                             struct region *, enum region_source *);

/* Whether the setting lets requests wait for what other streams have freed, before they would fail. */
bool tiers_policy_waits(const struct arena *);

/* Counts the malloc that was served so. */
void tiers_count(struct arena *, enum region_source);

/* Gives memory back to the device, for a request to the driver's own pool. */
void tiers_release_pages(struct arena *);

/* Publishes, with an event for each stream, what all caches hold, and makes pages of what is cut and free. */
void tiers_flush(struct arena *);

/* How a wait for freed memory ended, in words too. */
struct tiers_wait {
    vpmm_status status;
    char words[256];
};

/* At once after the wait: its words are vpmm_last_error()'s. */
void tiers_note_wait(struct tiers_wait *, vpmm_status);

/*
 * What a request answers that ended so after the wait: a shortage says that the wait was made, so where the driver
 * refused it that is the answer. A wait that itself had no memory left is a shortage like any.
 */
vpmm_status tiers_after_wait(const struct tiers_wait *, vpmm_status);

#endif
