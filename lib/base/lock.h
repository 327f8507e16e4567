/*
 * lock.h - the locks that a malloc or free may meet are taken through here, so that a debug build can count them.
 *
 * Tier 1 takes none, and tiers 2 and 3 none that others wait for (lib/README.md). A build with VPMM_DEBUG_CHECKS
 * counts, in each thread for itself, every lock that the thread has taken, try-locks included where they were won;
 * vpmm-pairs shows the difference over its timed loop. The reaper is a thread of its own, so what it takes is not in
 * the figures of the threads that allocate. Other builds count nothing and pay nothing.
 */
#ifndef VPMM_LIB_LOCK_H
#define VPMM_LIB_LOCK_H

#include "base/assert.h"
#include "base/schedule.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#ifdef VPMM_DEBUG_CHECKS
/* Locks that the calling thread has taken in the library since it began. For this project's own programs. */
uint64_t vpmm_debug_locks(void);
void lock_count(void);
#else
static inline void lock_count(void) {}
#endif

static inline void lock_take(pthread_mutex_t *lock)
{
    lock_count();
#ifdef VPMM_SCHEDULE_POINTS
    vpmm_schedule_point(lock, true);
    while (pthread_mutex_trylock(lock))
        vpmm_schedule_wait(lock);
#else
    pthread_mutex_lock(lock);
#endif
}

/* True: the caller has it. */
static inline bool lock_try(pthread_mutex_t *lock)
{
    vpmm_schedule_point(lock, true);
    if (pthread_mutex_trylock(lock))
        return false;
    lock_count();
    return true;
}

/* For assertions: whether some thread has the lock. That it is this one, no portable mutex tells. */
static inline bool lock_is_taken(pthread_mutex_t *lock)
{
    if (pthread_mutex_trylock(lock))
        return true;
    pthread_mutex_unlock(lock);
    return false;
}

#endif
