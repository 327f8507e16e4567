/*
 * region.h - free regions: published, merged, found, joined, split, handed out.
 *
 * Every function is lock-free and waits for no other thread; region_await alone waits, for the GPU. A thread that is
 * stopped in one hides from the others at most the regions that it has in its own hands (OWN).
 *
 * Merging. Two adjacent FREE regions of a chunk merge unless they wait for two different streams; the larger fence
 * counts. (Only what has passed with what has passed: on a GPU that lags 64 events behind, held rises from 1.04 to 1.21
 * with one stream, from 1.05 to 1.11 with four.) Idle memory is not made to look busy by it, because a region remembers
 * its spans: runs of it whose fences passed or will pass on their own. Another stream finds the passed ones
 * (region_take_part) before it waits or builds.
 *   sum of the spans' units = the region's units; the region's fence is no earlier than the latest of the spans'
 * Spans are chained by length from the region's first unit; merging leaves them as they are, and a region that has
 * passed is a single one. That two neighbours which are published at the same time do not both miss each other is
 * argued at take_again (region.c).
 */
#ifndef VPMM_LIB_REGION_H
#define VPMM_LIB_REGION_H

#include "space/space.h"

/* A region in the caller's hands: its first word is OWN. */
struct region {
    uint64_t first, units;
    struct fence fence;
    bool has_spans; /* written in its units; not so: it is a single one, with its fence */
};

enum region_source { REGION_NONE, REGION_OWN_STREAM, REGION_COMPLETED, REGION_WAITED };

/* Makes an owned region FREE, merged with its neighbours, and findable by all. Never fails. */
void region_publish(struct space *, struct region);

/* The same of the units from `from` to `to` of a region, which is single. Nothing if there are none. */
void region_publish_part(struct space *, struct region, uint64_t from, uint64_t to);

/* Whether the stream may use a region that was seen at this unit without waiting. By its fence: the claim decides. */
bool region_is_usable(const struct space *, const struct stream *, uint64_t unit);

/* The best fit among what the stream may use without waiting. Ties go to the stream's own. */
enum region_source region_take(struct space *, struct stream *, struct want, bool every_bin, struct region *);

/* A run of adjacent free regions that only their fences keep apart, all usable by the stream without waiting. */
enum region_source region_join(struct space *, struct stream *, uint64_t units, struct region *);

/* The longest run of spans in a region, as it was seen, that have passed; units 0: none. */
void region_longest_part(const struct space *, const struct seen_region *, uint64_t *first, uint64_t *units);

/* Publishes what lies before and after such a run in an owned region, under their latest fences, and keeps the run. */
struct region region_take_out(struct space *, struct region, uint64_t first, uint64_t units);

/* A run of passed spans inside a longer region of another stream that has not passed as a whole. */
bool region_take_part(struct space *, struct stream *, uint64_t units, struct region *);

/*
 * The best fit among what other streams have freed and can be waited for: as the driver says (fence_waitable), or as it
 * seems without a call of it, as is due under a lock (fence_seems_waitable). It is the caller's, who is to wait for its
 * fence by region_await. What lies before the want's place is kept, and what lies behind it is free.
 */
bool region_take_freed_elsewhere(struct space *, const struct stream *, struct want, bool every_bin,
                                 bool (*waitable)(const struct streams *, struct fence), struct region *);

/*
 * A wait for the fence of such a region: of the stream on the device, or of the calling thread, as the setting is
 * (vpmm_reuse). REGION_COMPLETED: it had passed meanwhile. REGION_NONE: it cannot be waited for, and is free again.
 * The thread may stand still in it for as long as the GPU works: others must not wait for it then.
 */
enum region_source region_await(struct space *, struct stream *, struct region);

/* Whether there seems to be such a region. Makes no call of the driver. */
bool region_may_wait(const struct space *, const struct stream *, uint64_t units);

/* Takes a FREE region as it was seen; false: it has changed. */
bool region_claim(struct space *, const struct seen_region *, struct region *);

/* Two adjacent owned regions that one stream may use without waiting, as one behind the later of their fences. */
struct region region_unite(struct space *, struct region left, struct region right);

/* Keeps the first `units` units as a live allocation of `requested` bytes and publishes the rest. */
CUdeviceptr region_hand_out(struct space *, struct region, uint64_t units, uint64_t requested);

/* Publishes the first `units` units of an owned region and keeps the rest. */
struct region region_drop_front(struct space *, struct region, uint64_t units);

/* Keeps the first `units` units of an owned region and publishes the rest. */
struct region region_keep_front(struct space *, struct region, uint64_t units);

/* What a free returns where no live allocation begins. */
vpmm_status region_not_live(CUdeviceptr);

/*
 * A live allocation back into the caller's hands, its fence not yet set; *uses: its uses by further streams (use.h), or
 * NULL. INVALID_POINTER.
 */
vpmm_status region_take_back(struct space *, CUdeviceptr, struct region *, struct uses **uses);

/* Moves the regions behind a stream's passed fences to those that wait for nothing. Under the event lock. */
void region_pass(struct space *, struct stream *);

#endif
