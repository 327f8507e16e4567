/*
 * context.h - the wait for a whole context: the end of what no event can show.
 *
 * What nobody can mark any more (stream.h, "Whose handle") has no end of its own. It is known to have passed when
 * everything has that its context's streams were given: the last resort before a request fails, and vpmm_trim's. Nor
 * has what uses live memory, which vpmm_park waits for.
 *
 *   block    a byte of the driver's memory, whose cuMemFree waits for the context that it was made in. It is hard to
 *            have when it is needed, with the device full: so one is made with a pool whose streams may all leave
 *            memory unmarked, before the pool has memory of its own; where another such stream is first met, or, if
 *            another thread is at the blocks then, after the next wait for its context; and after each wait the next
 *            one. It goes with its context. Where there was no memory for one, it is made before the pool next takes
 *            memory of the device. A pool that fills the device, and then meets its first default stream, has none: it
 *            can be waited for when somebody has given memory back
 *   holder   where a block stands: in a stream's record, whichever stream that is of, or in the registry
 *
 * Holders are under wait_lock, which is held over the driver calls, and taken before the event lock: only others who
 * wait for a context wait for it.
 */
#ifndef VPMM_LIB_CONTEXT_H
#define VPMM_LIB_CONTEXT_H

#include "space/stream.h"

/*
 * Makes sure that there is a block of the context, in the holder if it has to be made. Where there is no memory for it
 * now, it is tried when it is needed.
 */
void context_keep_block(struct streams *, struct wait_holder *, CUcontext);

/* The same, by who waits for nobody: where another thread is at the blocks, the next wait for the context makes one. */
void context_keep_block_if_free(struct streams *, struct wait_holder *, CUcontext);

/* Those that could not be had and can be now, by who is about to take memory of the device. Waits for nobody. */
void context_keep_missing_blocks(struct streams *);

/* At the pool's end: frees all blocks. The first refusal; a block that went with its context is none. */
CUresult context_free_blocks(struct streams *);

/*
 * The last resort: waits for each context with streams on which something has not passed, and publishes what was freed
 * on them before, under the event lock, which it does not have while it waits. Of two threads that wait for a context
 * the later one waits no more if the other's wait was for all of its fences. No capture is harmed. The first failure;
 * the other contexts are waited for all the same.
 */
vpmm_status streams_synchronise(struct streams *, pthread_mutex_t *event_lock);

/*
 * Waits for all that was given to streams, known here or not, of the primary context and of each that a stream was met
 * in, and publishes nothing. A stream that is met meanwhile need not be. No capture is harmed. The first failure ends
 * it. HOST_MEMORY.
 */
vpmm_status streams_wait_for_all(struct streams *);

/* After it, of a pool that ends: whatever was published has passed. Under the event lock; the driver is not asked. */
void streams_complete_all(struct streams *);

#endif
