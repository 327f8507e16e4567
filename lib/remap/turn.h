/*
 * turn.h - one builder at a time, first come first served.
 *
 * The driver changes mappings for one thread at a time. Builders that claim free memory and then queue for the driver
 * hold memory all that time which the others, who find none, create once more (measured: of what was created while
 * four threads built at once, half to nine tenths lay in other builders' hands). So a thread that has found no memory
 * in tiers 2 and 3 waits for its turn before it claims any, and what it then sees free is all there is.
 *
 *   place   one thread's, in a queue; the first in the queue has the turn, until it leaves
 *
 * Who has the turn flushes caches, asks which fences have passed, plans, claims, calls the driver and commits. A thread
 * that waits holds no memory; it looks for some whenever any is published (await.h), and leaves its place when it finds
 * some. Decay takes the turn only where nobody has it or waits.
 *
 * To wake a sleeping thread takes as long as a small build (some tens of microseconds, more on a virtual machine), and
 * the queue would stand still meanwhile. So who leaves wakes two: the first, who has the turn now, and the next one, who
 * looks for memory, finds none, and spins for TURN_SPIN_NS before it sleeps again. One thread spins at a time, and none
 * where nobody builds.
 *
 * The turn is an order, no exclusion: all that a build shares with others is claimed by exchange or under the plan lock,
 * so builds may also run side by side. This bounds what a builder that the kernel has preempted costs the others: a
 * thread that has seen the same holder for TURN_PATIENCE_NS builds beside it, and from then on nobody who comes waits
 * for that holder. A build of any size ends sooner than that, but one whose policy waits for the GPU on the host.
 *
 * Progress. The lock guards the queue alone: nobody calls the driver, waits or publishes under it. Neither hits nor
 * tiers 1 to 3 take it; tier 4 tries to, and waits for it only to give back a turn that it had. A queue of places on
 * their threads' stacks: one is reached under the lock alone, and its thread leaves under the lock before it returns,
 * so none is met after its end.
 */
#ifndef VPMM_LIB_TURN_H
#define VPMM_LIB_TURN_H

#include "base/lock.h"
#include "space/await.h"

#define TURN_PATIENCE_NS (20 * UINT64_C(1000000))
#define TURN_SPIN_NS     UINT64_C(100000) /* what a build of one or two handles takes */

struct turn_place {
    struct turn_place *next; /* under the turn's lock */
    unsigned at;             /* where its thread is woken, while it waits (await.h); written under the lock */
    uint32_t seen;           /* the thread's own: what it has read there, */
    uint64_t ended, since;   /* and when the turn last changed hands, as far as it has seen */
};

struct turn {
    struct await *await; /* constant */
    pthread_mutex_t lock;
    struct turn_place *first, *last; /* under the lock. first NULL: nobody has the turn */
    _Atomic(uint32_t) length;        /* of the queue; written under the lock */
    _Atomic(uint64_t) ended;         /* turns; likewise */
    _Atomic(uint64_t) outlasted;     /* what `ended` was, + 1, when a thread last lost its patience; by any thread */
};

void turn_init(struct turn *, struct await *);
void turn_destroy(struct turn *);

/*
 * Enters the queue. True: the caller has the turn at once. False: it waits, for so many pages on the stream of this
 * slot as well, by
 *     do
 *         turn_read; a look for memory, which may end it
 *     while (turn_wait);
 */
bool turn_enter(struct turn *, struct turn_place *, uint64_t pages, uint32_t slot);

/* Before a look for memory: what is published after this ends the next wait. */
void turn_read(const struct turn *, struct turn_place *);

/* True: something was published that the caller may want, it is to look again. False: it goes on, with the turn, or
 * without because the holder does not come to an end. */
bool turn_wait(struct turn *, struct turn_place *);

/* Enters, and waits for nothing but the turn. */
void turn_take(struct turn *, struct turn_place *);

/* Enters if nobody has the turn, and so has it. Waits for nothing: false also while another thread has the lock. */
bool turn_try(struct turn *, struct turn_place *);

/* Ends the caller's turn, or its waiting, and wakes the next two. */
void turn_leave(struct turn *, struct turn_place *);

#endif
