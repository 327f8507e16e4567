/*
 * hands.h - memory in other threads' hands: a region that one of them has taken is free but for what it needs of it,
 * and comes back in a moment; as does what lies in the caches of a stream that one of them is releasing.
 *
 * Who has found nothing, and is about to give up, tries again
 *
 *     while (hands_try_again(arena, units, &hands))
 *
 * until there was none in these units before the last try, and there is none after it, or 10 ms are over. Then it tries
 * once more if there was some at the last look, or when the releases that are at a stream's caches by then have ended.
 * A look goes over all regions: 3 to 6 ms for 50,000 of subpages. One at slices finds those behind fences, too: no
 * request waits for a slice's fence otherwise. What is taken and comes back during the last try alone is missed, unless
 * the caller has noticed and says so: had_none = false.
 *
 * In a container with few processors a thread may have none for 100 ms, with a region in its hands. So the 10 ms begin
 * anew while a region is held up, that is the same one, seen by its word (units.h), is in the same hands for 2 ms. That
 * is for at most 1 s in all (a piece waits so for pages, and then for subpages and slices), and not if it is_brief.
 * Where threads take and give memory all the time, and there is none to spare, each has it for less than 2 ms, and the
 * request fails after 10. Of slices their own words are looked at, which say less: one that has been in several hands,
 * or is behind a fence, looks as one that has been in the same, and is waited for as such.
 */
#ifndef VPMM_LIB_HANDS_H
#define VPMM_LIB_HANDS_H

#include "remap/arena.h"

struct hands {      /* zero-filled, but for what is the caller's: no look yet */
    bool is_brief;  /* the caller's: what is held up is waited for no longer than other hands */
    unsigned class; /* the caller's: of the slice that it wants, if it does */
    uint64_t until_ns;
    uint64_t at_most_ns;
    struct word_seen seen; /* of what is in another thread's hands, by the last looks */
    uint64_t seen_ns;      /* when it was seen first */
    bool had_none;         /* before the last try */
    bool is_over;          /* the last try is made */
};

enum hands_units {
    HANDS_PAGES,
    HANDS_SUBPAGES, /* and pages, which may be about to be cut */
    HANDS_SLICES,   /* and these: a slab may be made of them */
};

/*
 * Any thread, counted in with no stream but its call's own, without a lock: it sleeps for 100 us where there is some,
 * or for 1 to 10 ms while that is held up.
 */
bool hands_try_again(const struct arena *, enum hands_units, struct hands *);

#endif
