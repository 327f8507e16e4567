/*
 * make_way.h - the last that is done before a request fails: free handles go back to the device where they are in the
 * way of new ones.
 *
 * What is left of a handle beside live memory serves a request if enough is mapped next to it. There may be a free
 * handle, which the policy would move to a free place if there were one, but which keeps its place mapped until then:
 *
 *   [live][-3][-32][live]    and 3 more that the device has: no 38 pages. When the 32 have gone back: [live][38]
 *
 *   stuck   as in policy.h: pages of a free run whose handle is partly live
 *   gap     adjacent pages that are a hole, or will be one when each wholly free handle has gone back
 */
#ifndef VPMM_LIB_MAKE_WAY_H
#define VPMM_LIB_MAKE_WAY_H

#include "remap/arena.h"

/*
 * For a request of so many pages, which has failed. Gives the wholly free handles back that wait for nothing, if it
 * fits then, by what the device has room for and the cap leaves; else none. True: it may fit now, *room is what the
 * device has. They go in vain where the device has less than it says, or another process is quicker.
 *
 * It waits for the pass lock, and the turn, as a trim does. So of several such requests each sees what the one before
 * it has left, and what it says that the device has is not what a build is about to give back. No more handles go than
 * it has seen: what others free meanwhile would keep it at that for ever.
 */
bool make_way(struct arena *, uint64_t pages, struct device_room *room);

#endif
