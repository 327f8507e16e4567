/*
 * carry_out.h - from a claim to a free region: the driver calls of a build, without the plan lock.
 *
 *   map      create the new handles, map everything, a cuMemSetAccess for each MAPPINGS_A_CALL of them. A build that
 *            makes new memory looks before each handle that it creates, and before and after each call for access, for
 *            a region that others have freed meanwhile and that serves its request: then it is overtaken, and unwinds
 *   commit   no call left that can fail: extents learn their new place, old addresses become zombies
 *   unwind   on any failure, or where it is overtaken: unmap what was mapped (an unmap that the driver refuses leaves a
 *            zombie, never a hole), release what was created, put the hole back, publish the claimed regions behind a
 *            fence no earlier. The budget comes back with the memory: what the driver has not taken stays quarantined
 *            (zombie.h)
 *
 * Memory of several fences, all usable by the stream, comes out behind the latest of them; memory that the stream was
 * made to wait for comes out behind a new fence of the stream.
 */
#ifndef VPMM_LIB_CARRY_OUT_H
#define VPMM_LIB_CARRY_OUT_H

#include "remap/claim.h"
#include "remap/lookout.h"

/*
 * On success a region is in the caller's hands: what was built, or what the lookout has found in its place. Else
 * nothing is. The claim has only its records left (claim_free). OUT_OF_MEMORY, and where a create was refused
 * *room says how much the device gave; DRIVER. The message is set, but where a wait answers OUT_OF_MEMORY:
 * the request is another thread's (`for_another`), whose stream would have to wait, or what was claimed can no longer
 * be waited for.
 */
vpmm_status carry_out(struct claim *, struct lookout *, bool for_another, struct device_room *, struct region *);

#endif
