/*
 * park.h - a graph's pool without its physical memory: every handle given back, every address as it was.
 *
 *   parked   of a pool: from the beginning of a park until a wake has succeeded. No malloc is served meanwhile
 *   memory   of an extent (units.h). Extents of a pool that is not parked are MAPPED. To park makes them PARKED, or,
 *            where the driver refuses, UNSURE; to wake makes them MAPPED, or, where it refuses once, all of them what a
 *            park makes of them
 *
 *   mapped + parked = live + reusable         mapped: bytes of MAPPED and UNSURE extents; parked: of the others
 *
 * Regions, their states and their fences are not touched: mallocs, frees and passes before, meanwhile and after it mean
 * the same. That an extent stays where it is, is what makes the pool a graph's (vpmm_config); no other kind is parked.
 * Its pages stay in the budget as well (arena.h), so that a cap has room for them when they wake.
 *
 * Who may do what
 *   park, wake    one at a time, under the park lock, which is held over the wait for the GPU as well: so a wake that
 *                 comes meanwhile wakes the pool. The pass lock, which keeps passes from zombies, is held over the
 *                 driver's calls alone
 *   builds        none. `parked` is set under the plan lock, under which a build looks at it before it claims and
 *                 counts itself in (`builders`); who parks then waits until those counted in have committed or unwound
 *   a malloc      looks at `parked` when it begins. One that began before it was set is served with free memory, as if
 *                 it had returned before; its memory is parked with the rest
 *   frees, uses   whenever: they change regions alone. So the extents are found by their pages (extents.h), not by
 *                 regions, whose bounds change meanwhile
 *
 * A wake publishes what it did by clearing `parked` (release), which the malloc's look pairs with.
 */
#ifndef VPMM_LIB_PARK_H
#define VPMM_LIB_PARK_H

#include "remap/arena.h"

/*
 * Waits for the device, then gives the memory of every extent back; of a parked pool, what the driver has refused to
 * take before. BUSY: the device cannot be waited for, and nothing has changed. DRIVER: it has refused a call, and the
 * pool is parked with some memory mapped still.
 */
vpmm_status park(struct arena *);

/* Makes all of it anew. OUT_OF_MEMORY, DRIVER: the pool is parked as before. */
vpmm_status park_wake(struct arena *);

/* Whether the pool is parked. Pairs with the release of a wake. */
static inline bool arena_is_parked(const struct arena *arena)
{
    return load_acquire_u32(&arena->parked) != 0;
}

/* BUSY, with the words of the thread's last failure: what comes before the first step has failed. */
vpmm_status park_cannot_begin(void);

/* NOT_SUPPORTED, with the words for a malloc of a parked pool. */
vpmm_status parked_status(void);

#endif
