/*
 * await.h - threads that wait for free memory.
 *
 *   place   what one waiting thread wants, and the event count that it sleeps on
 *   want    units << 32 | slot of its stream; 0: nobody has the place
 *
 * Who publishes memory wakes those whose want it may serve: as many units, behind a fence of their own stream or none.
 * No publication is missed. Who waits enters its want, reads its event count, and then looks for memory; who publishes
 * makes the region FREE, and then looks at the wants; all sequentially consistent, so one of the two sees the other.
 * A thread for which there is no place is woken by nobody, and sleeps for short times.
 *
 * What serves a want without being published so wakes nobody: a span that has passed inside another stream's region,
 * what only a wait makes usable, a region that the search misses while another thread empties its bin (hints.h). Who
 * sleeps finds these when it has the turn and looks thoroughly.
 *
 * Lock-free: entering claims a free place by exchange, publishing only reads wants. A place that has changed hands
 * meanwhile costs its new owner a look in vain, no more; so ABA does no harm.
 */
#ifndef VPMM_LIB_AWAIT_H
#define VPMM_LIB_AWAIT_H

#include "base/atomic.h"
#include "base/queue.h"
#include "space/units.h"

enum { AWAIT_PLACES = 64, AWAIT_NO_PLACE = AWAIT_PLACES };

struct await_place {
    _Alignas(64) _Atomic(uint64_t) want;
    struct wakeup news; /* something that it wanted was published, or what else it waits for has come */
};

struct await {
    _Alignas(64) _Atomic(uint32_t) waiting; /* threads that have a place */
    struct await_place place[AWAIT_PLACES];
};

void await_init(struct await *);

/* A place for so many units on the stream of this slot; AWAIT_NO_PLACE: all are taken. */
unsigned await_enter(struct await *, uint64_t units, uint32_t slot);
void await_leave(struct await *, unsigned place);

/* To be read before the look for memory after which the thread sleeps. */
uint32_t await_read(struct await *, unsigned place);

/* Until the place is woken after that read, or for so long. */
void await_sleep(struct await *, unsigned place, uint32_t seen, uint64_t ns);

/* True: it was woken after that read, within so long. Does not sleep, and returns at once for who has no place. */
bool await_spin(struct await *, unsigned place, uint32_t seen, uint64_t ns);

/* Wakes the place's thread, for another reason than a publication. AWAIT_NO_PLACE: nobody. */
void await_wake(struct await *, unsigned place);

/* For await_published alone. */
void await_wake_wanting(struct await *, uint64_t units, struct fence);

/* A region of so many units is FREE, behind that fence. */
static inline void await_published(struct await *await, uint64_t units, struct fence fence)
{
    if (load_sc_u32(&await->waiting))
        await_wake_wanting(await, units, fence);
}

#endif
