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
 * Who has waited for the turn and has it first builds for those who wait behind it, in their order and once for each,
 * and then for itself. For the driver's calls take two to four times as long when the thread that makes them changes
 * from one build to the next, and nobody is woken in between (an H200: sixteen threads that build in turn take 200 us
 * each, one that builds for sixteen takes 70). Itself last, because memory that it held while it builds for others it
 * could not free for them (in virtual time four threads then held 1.17 times what was in use, for 1.05).
 *
 *   served   the second in the queue, while the first builds for it. What was built is handed over under the lock, and
 *            the place leaves the queue with it. Who is served goes on looking for memory, and may leave or lose its
 *            patience at any time: then what was built stays the builder's, who publishes it
 *
 * The stream of who is served may so be destroyed under the builder. The builder is counted among its users, so that
 * its record stays, and uses its handle for nothing: what the stream would have to wait for is left to the thread
 * itself, which has the turn next, and so is whatever fails.
 *
 * To wake a sleeping thread takes as long as a small build (some tens of microseconds, more on a virtual machine), and
 * the queue would stand still meanwhile. So who leaves wakes two: the first, who has the turn now, and the next, who
 * looks for memory, finds none, and spins for TURN_SPIN_NS before it sleeps again. One thread spins at a time, and none
 * where nobody builds.
 *
 * On a host with no idle core the kernel runs a thread that is woken in place of the one that has woken it, for some
 * milliseconds, and who publishes with the turn wakes others. To put that off until the turn is left was tried: the
 * longest mallocs of sixteen threads on sixteen cores took 7.7 ms for 11.9 and 4.4 for 6.7 (an H200, third pass of
 * llama_serving and llama_two_streams). But who is not woken in time has memory made: eight lagging threads of
 * llama_four_threads and llama_two_streams held 1.30 times what they used for 1.11 in virtual time, where no stream
 * waits for another (VPMM_REUSE=completed).
 *
 * The turn is an order, no exclusion: all that a build shares with others is claimed by exchange or under the plan
 * lock, so builds may also run side by side. This bounds what a builder that the kernel has preempted costs the others:
 * a thread that has seen the same holder for TURN_PATIENCE_NS, and meanwhile no call under way that changes the pool's
 * mappings, builds beside it, and from then on nobody who comes waits for that holder. So it is after TURN_LONGEST_NS
 * whatever is called. A build of any size ends sooner, but one that moves memory for which its thread has to wait on
 * the host first (before a request fails, with VPMM_REUSE=host), that has to stand in line beside who calls the driver
 * for long (driver/burst.h), or whose calls the driver keeps for long. What tier 4 waits for is waited for without the
 * turn.
 *
 * The driver keeps a call for as long as it serves others, it seems of other processes on other devices too: beside
 * tests that made and ended contexts on the second H200 of a host a cuMemAllocAsync took up to 346 ms. Who builds
 * beside a call queues for the driver behind it, and holds memory meanwhile. When patience was 20 ms whatever was
 * called, sixteen threads over llama_four_threads held 2.04 times what was in use there, 1.11 before those tests, and
 * waited for 786 ms. In virtual time, where each 300th call takes 100 ms, they held 2.08 then, and hold 1.15 now; the
 * longest malloc is 0.3 s for 1.4. What does not change a mapping is no such call: address space that is reserved,
 * events.
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
#include "space/region.h"

#define TURN_PATIENCE_NS (20 * UINT64_C(1000000))
#define TURN_LONGEST_NS  UINT64_C(1000000000)
#define TURN_SPIN_NS     UINT64_C(100000)  /* what a build of one or two handles takes */
#define TURN_SERVES_NS   UINT64_C(1000000) /* after which who has the turn serves nobody else */

/* The memory that a thread waits for. */
struct turn_request {
    struct stream *stream; /* the thread is counted in; NULL: it waits for the turn alone */
    uint64_t pages;
    uint32_t longest_handle; /* pages of one that is created for it, at most */
    bool may_be_served;      /* by another thread; needs a stream */
};

/* A region of at least so many pages in the caller's hands, and where it is from (find.h, build.h). */
struct turn_answer {
    struct region region;
    enum region_source source;
};

struct turn_place {
    struct turn_place *next;     /* under the turn's lock, as are the next three */
    struct turn_request request; /* what it waits for; no longer to be served, once it builds itself */
    bool is_served;
    struct turn_answer answer; /* of who is served; the thread's own, once it has seen that it is */
    unsigned at;               /* where its thread is woken, while it waits (await.h); written under the lock */
    uint32_t seen;             /* the thread's own: what it has read there, */
    uint64_t ended, since;     /* when the turn last changed hands, as far as it has seen, */
    uint64_t called, moved;    /* and when a call was under way, or had ended since the look before */
};

struct turn {
    struct await *await; /* constant */
    pthread_mutex_t lock;
    struct turn_place *first, *last; /* under the lock. first NULL: nobody has the turn */
    struct turn_place *served;       /* under the lock: the second, while the first builds for it; else NULL */
    _Atomic(uint32_t) length;        /* of the queue; written under the lock */
    _Atomic(uint64_t) ended;         /* turns; likewise */
    _Atomic(uint64_t) calls, called; /* begun, and ended: of the driver's, that change mappings; by any thread */
    _Atomic(uint64_t) outlasted;     /* what `ended` was, + 1, when a thread last lost its patience; by any thread */
};

void turn_init(struct turn *, struct await *);
void turn_destroy(struct turn *);

/*
 * Enters the queue. True: the caller has the turn at once. False: it waits, for the request as well, by
 *     do
 *         turn_read; a look for memory, which may end it: turn_withdraw
 *     while (turn_wait says TURN_LOOK);
 */
bool turn_enter(struct turn *, struct turn_place *, struct turn_request);

/* Before a look for memory: what is published after this ends the next wait. */
void turn_read(const struct turn *, struct turn_place *);

enum turn_news {
    TURN_LOOK,    /* something was published that the caller may want */
    TURN_SERVED,  /* it has its answer, and has left the queue */
    TURN_COME,    /* it is its turn, */
    TURN_OVERDUE, /* or is not: the holder does not come to an end. It builds beside it, and leaves as if it was */
};

enum turn_news turn_wait(struct turn *, struct turn_place *);

/* Ends the waiting of who has found memory. True: it has its answer as well. */
bool turn_withdraw(struct turn *, struct turn_place *);

/* Enters, and waits for nothing but the turn. */
void turn_take(struct turn *, struct turn_place *);

/* Enters if nobody has the turn, and so has it. Waits for nothing: false also while another thread has the lock. */
bool turn_try(struct turn *, struct turn_place *);

/* Around a call of the driver's that changes the pool's mappings, whoever makes it: the driver may be busy for long. */
static inline void turn_call_begins(struct turn *turn)
{
    fetch_add_relaxed_u64(&turn->calls, 1);
}

static inline void turn_call_ends(struct turn *turn)
{
    fetch_add_relaxed_u64(&turn->called, 1);
}

/* How many wait in the queue behind who has the turn; a hint. */
static inline uint32_t turn_waiters(const struct turn *turn)
{
    uint32_t length = load_relaxed_u32(&turn->length);
    return length ? length - 1 : 0;
}

/*
 * What the next in the queue waits for, for who has the turn: it is served from now on, and the caller counted in with
 * its stream. False: the next one waits for nothing that another may build, nobody waits, or it is not the caller's
 * turn.
 */
bool turn_serve(struct turn *, struct turn_place *, struct turn_request *);

/*
 * The end of that, but for the stream: hands over what was built, and wakes who waits for it; NULL: it is to do it
 * itself. False: nothing was handed over, the answer is still the caller's.
 */
bool turn_answer(struct turn *, struct turn_place *, const struct turn_answer *);

/* Ends the caller's turn, or what it did beside another's, and wakes the next two. */
void turn_leave(struct turn *, struct turn_place *);

#endif
