/*
 * use.h - uses of a live allocation by further streams than the one that frees it (vpmm_use).
 *
 *   use     a stream, by its record's slot, whose work uses the allocation. Until the allocation is freed it has no
 *           number: what counts is all that the stream has been given by then. But where nobody can record on the
 *           stream later (stream_is_brief) it is a fence at once, which the same call marks: what counts is what the
 *           stream has been given by the latest vpmm_use
 *   uses    those of one allocation. They hang on a region's first descriptor (`where`), or on a slice, whose word says
 *           USED instead of LIVE: a free that expects LIVE, as a hit does, goes the long way
 *   end     the free turns each use into a fence, of the stream that it names. The memory is nobody's before all of
 *           these and the free's own have passed but for one, which it then waits for as any other (ending.h)
 *
 *   LIVE, USED -> NOTING -> USED     by exchange, and the thread that won it stores USED, or what was before if it
 *                                    fails. It alone reads and writes the uses meanwhile. Another vpmm_use of the
 *                                    allocation waits for it; a free does not, since the program must order it after
 *                                    both
 *   USED -> OWN                      by the free that wins the exchange: the uses are its own
 *
 * A use without a number counts in its stream's record (`uses`, stream.h), which is not used again for another stream
 * before the use has been turned into a fence: by the free, or by a vpmm_use that needs room, once the stream has been
 * released. So its slot names one stream for as long as it is there.
 *
 * vpmm_stream_release ends the uses of its stream with a fence at the release: nobody marks the stream later. It closes
 * the record's count, and if there was any use it takes the fence, before it makes the record RELEASING; a vpmm_use
 * that finds the count closed takes one itself, before it leaves and so before the release marks. A free that finds the
 * record CLOSING or RELEASED therefore finds the fence in `published`, and waits for nobody.
 */
#ifndef VPMM_LIB_USE_H
#define VPMM_LIB_USE_H

#include "space/region.h"

struct slice; /* slab.h */

struct uses {
    struct pile_node node;     /* first; while it ends: ending.h */
    struct uses *next_waiting; /* the same */
    struct space *space;       /* what was freed, while it ends: a region of this space, */
    struct region region;
    struct slice *slice;      /* or a slice; NULL: it is a region */
    uint32_t count, capacity; /* one place more is there, for the free's own fence */
    struct fence stream[];    /* number 0: it has none before the free */
};

/*
 * Adds a stream, among whose users the caller is, to the uses that hang at *place, in the caller's hands, unless it is
 * one of them; they are of an allocation of the space. HOST_MEMORY: what they wait for is the same.
 */
vpmm_status uses_add(struct space *, struct uses **place, struct stream *);

/*
 * By the free, which is behind `fence` of its own stream: all uses become fences, with an event for each where the
 * stream lets another thread record one. False: they have passed, and `fence` is all that the memory waits for. True:
 * what has not passed is left, with `fence` among it.
 */
bool uses_end(struct streams *, struct uses *, struct fence fence);

/* After that: drops what has passed. How many fences are left. */
uint32_t uses_pass(const struct streams *, struct uses *);

/* NULL is a no-op. What they count in streams' records is given up. */
void uses_free(struct streams *, struct uses *);

/* Adds a stream to the uses of the live region at an address. INVALID_POINTER, HOST_MEMORY. */
vpmm_status region_use(struct space *, CUdeviceptr, struct stream *);

#endif
