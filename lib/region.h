/*
 * region.h - free regions: published, merged, found, joined, split, handed out.
 *
 * Every function is lock-free (but hole_*, under the build turn): it waits for no other thread, and a thread stopped
 * anywhere in it hides at most the regions that it has in its own hands (OWN) from the others.
 *
 * Merging. Two adjacent FREE regions of a chunk merge unless they wait for two different streams; the larger fence
 * counts. (Only what has passed with what has passed: on a GPU that lags 64 events behind, held rises from 1.04 to 1.21
 * with one stream, from 1.05 to 1.11 with four.) Idle memory is not made to look busy by it, because a region remembers
 * its pieces: runs of it whose fences passed or will pass on their own. Another stream finds the passed ones
 * (region_take_part) before it waits or builds.
 *   sum of the pieces' pages = the region's pages; the region's fence is the latest of the pieces'
 * Pieces are chained by length from the region's first page; merging leaves them as they are, and a region that has
 * passed is a single one. That two neighbours which are published at the same time do not both miss each other is
 * argued at take_again (region.c).
 */
#ifndef VPMM_LIB_REGION_H
#define VPMM_LIB_REGION_H

#include "arena.h"

/* A region in the caller's hands: its first word is OWN. */
struct region {
    uint64_t page, pages;
    struct fence fence;
    bool has_pieces; /* written in its pages; not so: it is a single one, with its fence */
};

enum region_source { REGION_NONE, REGION_OWN_STREAM, REGION_COMPLETED, REGION_WAITED };

/* Makes an owned region FREE, merged with its neighbours, and findable by all. Never fails. */
void region_publish(struct arena *, struct region);

/* The best fit among what the stream may use without waiting. Ties go to the stream's own. */
enum region_source region_take(struct arena *, struct stream *, uint64_t pages, bool every_bin, struct region *);

/* A run of adjacent free regions that only their fences keep apart, all usable by the stream without waiting. */
enum region_source region_join(struct arena *, struct stream *, uint64_t pages, struct region *);

/* The longest run of pieces in a region, as it was seen, that have passed; pages 0: none. */
void region_longest_part(const struct arena *, const struct found *, uint64_t *page, uint64_t *pages);

/* Publishes what lies before and after such a run in an owned region, under their latest fences, and keeps the run. */
struct region region_take_out(struct arena *, struct region, uint64_t page, uint64_t pages);

/* A run of passed pieces inside a longer region of another stream that has not passed as a whole. */
bool region_take_part(struct arena *, struct stream *, uint64_t pages, struct region *);

/* The best fit among what other streams have freed; the caller waits for its fence. */
bool region_take_waiting(struct arena *, struct stream *, uint64_t pages, bool every_bin, struct region *);

/* Takes a FREE region as it was seen; false: it has changed. */
bool region_claim(struct arena *, const struct found *, struct region *);

/* Two adjacent owned regions that one stream may use without waiting, as one behind the later of their fences. */
struct region region_unite(struct arena *, struct region left, struct region right);

/* Keeps the first `pages` pages as a live allocation of `requested` bytes and publishes the rest. */
CUdeviceptr region_hand_out(struct arena *, struct region, uint64_t pages, uint64_t requested);

/* A live allocation back into the caller's hands, its fence not yet set. INVALID_POINTER. */
vpmm_status region_take_back(struct arena *, CUdeviceptr, struct region *);

/* Moves the regions behind a stream's passed fences to those that wait for nothing. Under `watching`. */
void region_pass(struct arena *, struct stream *);

/* ---- holes, under the build turn ---- */

/* Makes owned (or new) address space a hole, merged with its neighbours. */
void hole_add(struct arena *, uint64_t page, uint64_t pages);

/* Takes [page, page + pages) out of the hole that contains it; the result is OWN. */
void hole_carve(struct arena *, uint64_t hole, uint64_t page, uint64_t pages);

/* Pages of the hole that begins at this page, or that ends before it; 0: none. */
uint64_t hole_from(struct arena *, uint64_t page);
uint64_t hole_until(struct arena *, uint64_t page);

#endif
