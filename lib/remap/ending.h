/*
 * ending.h - the end of an allocation's use: at once behind one fence, or after waiting for several streams.
 *
 * Memory that further streams have used (use.h) is ENDING from its free until at most one of its fences has not passed:
 * the free's own, and one of each further stream. Then it is published behind the one that is left, or behind none. So
 * no stream waits for another, and nothing is kept longer than the slowest stream but one needs it for its own sake.
 *
 *   ending_bytes = sum of bytes of ENDING regions and slices, a part of reusable_bytes and of slab_free_bytes
 *
 * A free pushes what it has (lock-free: freeing memory waits for nobody). Who has the event lock takes it, looks at the
 * fences after each question to the driver, and alone leaves ENDING. What no event can show to have passed (of a
 * private stream, or an orphan: stream.h) passes with the wait for its context, as all such memory does.
 */
#ifndef VPMM_LIB_ENDING_H
#define VPMM_LIB_ENDING_H

#include "remap/arena.h"
#include "space/use.h"

/*
 * Ends the use of the live region at an address, or of a slice there, at this point of a stream, among whose users the
 * caller is: it is published behind a fence, or ENDING. The stream is not marked yet. INVALID_POINTER: none is live
 * there.
 */
vpmm_status ending_free_region(struct arena *, struct space *, CUdeviceptr, struct stream *);
vpmm_status ending_free_slice(struct arena *, struct slice *, CUdeviceptr, struct stream *);

/* Under the event lock: publishes what waits for one stream at most. */
void ending_pass(struct arena *);

/* Whether anything was freed so since the last pass: its fences may have passed before. */
static inline bool ending_came(const struct arena *arena)
{
    return !pile_empty(&arena->ending);
}

/* At the pool's end: the records. What they are of is given back with everything else. */
void ending_drop(struct arena *);

#endif
