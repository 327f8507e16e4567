/*
 * arena.h - the shared state of a pool's pages, and the order in which its parts may be touched.
 *
 *   space      pages: regions, the hints of free ones, the caches             lock-free (space.h)
 *   cut        the same of subpages                                           lock-free (cut.h)
 *   slabs      of slices, among the subpages                                  lock-free (slab.h)
 *   streams    records of streams and of their fences                         lock-free (stream.h)
 *   holes      hints of HOLE regions                                          under the plan lock
 *   policy     where to build and of what                                     under the plan lock
 *   pace       how slow the driver is, for the policy                         lock-free (pace.h)
 *   zombies    old addresses, pushed by builders, taken by the reaper         lock-free (queue.h)
 *   ending     freed memory, pushed by frees, taken by passes                 lock-free, and the event lock (ending.h)
 *   access     which devices may use the memory                               under a lock of its own (access.h)
 *   parked     whether a graph's pool is without its memory                   under the plan lock, read acquire
 *              (park.h)
 *
 * The plan lock is a lock over planning and bookkeeping alone: no driver call is made and nothing is waited for
 * while it is held. What a plan claims (FREE regions by exchange, holes by carving) belongs to its builder, who calls
 * the driver after giving the lock up.
 *
 * The turn is an order among builders, and those who give memory back or change rights: one at a time, first come first
 * served, a builder from before its flush and plan until it has committed (turn.h). It is no lock: builds are right
 * without it, and who has waited for one holder too long goes on beside it.
 *
 * The reserve lock is held over cuMemAddressReserve (about a microsecond) and the adding of the chunk: of the threads
 * that find no hole for their request at the same time one reserves, and the others wait for that and look again. It is
 * taken before the plan lock, never inside it, and only by who needs a chunk: no other build meets it.
 *
 * The pass lock is held by whoever makes a pass (the pool's thread, vpmm_poll, reclaim), gives memory back (trim),
 * parks or wakes the pool, or changes its access: one at a time unmaps zombies and releases extents. Whoever has it may
 * wait for the turn, and for a burst (driver/burst.h); nobody who has either takes it. The event lock is held by
 * whoever asks the driver about events: a pass, or a malloc that is about to build. It is held over no wait for the
 * GPU: a pass would wait with it, and whoever waits for a pass. No malloc or free of tiers 1 to 3 takes the plan, the
 * pass or the event lock.
 */
#ifndef VPMM_LIB_ARENA_H
#define VPMM_LIB_ARENA_H

#include "cache/slab.h"
#include "driver/async_pool.h"
#include "driver/device.h"
#include "remap/access.h"
#include "remap/decay.h"
#include "remap/pace.h"
#include "remap/policy.h"
#include "remap/turn.h"
#include "space/space.h"

#include <pthread.h>

struct view;
struct zombie;

/* What passes keep of a stream, by the slot of its record. */
struct pass_note {
    uint64_t moved_until;          /* under the event lock: the regions behind fences up to here wait for nothing now */
    _Atomic(uint32_t) freed_async; /* memory of the driver's own pool, with no fence of ours, since the last settling */
};

/* What the device gave before it refused a create: no more is asked of it, until it has been given something back. */
struct device_room {
    uint64_t pages;    /* UINT64_MAX: it has refused nothing */
    uint64_t releases; /* the arena's, once what it gave is given back */
};

#define DEVICE_ROOM_UNKNOWN ((struct device_room){.pages = UINT64_MAX})

struct arena {
    struct device *device;
    struct stats *stats;
    _Atomic(uint32_t) reuse;            /* a vpmm_reuse; any thread may change it, relaxed, as the next */
    _Atomic(uint64_t) max_mapped;       /* bytes; 0: no cap */
    bool has_reaper;                    /* constant, as is the next: the pool has a thread of its own */
    bool is_graph;                      /* what was handed out is neither moved nor unmapped (vpmm_config) */
    _Atomic(uint32_t) parked;           /* its memory is given back, its addresses are not (park.h) */
    _Atomic(uint32_t) exportable, rdma; /* cleared if the device refuses the first handle for it */

    struct space space;       /* of pages */
    struct space cut;         /* of subpages (cut.h), */
    struct slabs slabs;       /* and the slabs among them (slab.h) */
    size_t cut_below;         /* bytes: smaller requests may be cut from pages, if a page fits them badly; 0: none, */
    size_t cut_mask;          /* and not if these bits are all clear: whole pages. Both constant, as is the next */
    struct async_pool *async; /* the driver's own pool, for small requests: it takes from the same device */
    struct streams streams;

    struct access access; /* which devices may use the memory */
    struct turn turn;     /* of those who build, give memory back to the device, or change rights */
    pthread_mutex_t reserve_lock;
    pthread_mutex_t plan_lock;
    struct hints holes;
    struct policy policy;
    struct pace pace;
    struct view *view;          /* under the plan lock: scratch of the plan that is being made */
    struct policy_plan *plan;   /* likewise */
    uint64_t budgeted_pages;    /* mapped, and promised to builds under way; under the plan lock, as is the next: */
    uint64_t quarantined_pages; /* given back, and not yet taken by the driver: the cap is for both (zombie.h) */
    pthread_t builder;          /* the thread that was the first to build, if one did; likewise */
    bool has_builder;
    _Atomic(uint32_t) several_builders; /* another one has since: set once, under the plan lock; read relaxed, a hint */

    struct pile zombies;
    _Atomic(uint64_t) releases;    /* handles that the driver has taken back */
    _Atomic(uint64_t) built_pages; /* mapped by builds since the last of these: */
    _Atomic(uint32_t) rebuilds;    /* of 1/64 of the pool: no cache is in a steady state after one (front.h) */
    _Atomic(uint32_t) builders;    /* threads between a claim and the end of their build (build.c) */
    _Atomic(uint32_t) overtaken;   /* builds that were, since one last made new memory (lookout.c); a hint */
    struct bell bell;              /* the reaper's */

    pthread_mutex_t park_lock;  /* a park or a wake, the wait for the device included; before the pass lock */
    pthread_mutex_t event_lock; /* asking about events, publishing completed; after the pass lock if both are taken */
    pthread_mutex_t pass_lock;
    struct zombie *waiting; /* under the pass lock: zombies not yet unmapped */
    struct decay decay;
    struct pass_note *note;         /* of streams; reserved, constant */
    _Atomic(uint64_t) slab_page;    /* the rest of the page that slabs are cut from (slab_page.h); */
    uint64_t slab_pages_from;       /* cut pages from which on there is one; constant, but for tests, */
    uint64_t described_pages;       /* as is this: see cut_forget_moved */
    struct pile ending;             /* freed memory that waits for several streams (ending.h), */
    struct uses *ending_waiting;    /* and what a pass has seen of it; under the event lock */
    _Atomic(uint64_t) passed_at_ns; /* when the latest pass ended, or the reaper woke up; at first, the beginning */
};

/* What vpmm_pool_set_attribute changes later. A pool without pages keeps its attributes here too, and nothing else. */
void arena_set_up(struct arena *, const vpmm_config *, size_t granularity);

/* HOST_MEMORY. What was made is given back by arena_free, also after a failure. The arena is zero-filled before. */
vpmm_status arena_init(struct arena *, struct device *, struct stats *, const vpmm_config *);

/*
 * With no allocation live and no other thread inside: waits for what was freed, then gives every mapping, handle and
 * address range back. DRIVER: the first refusal; everything else was tried all the same. A lost device is asked for
 * nothing: what it holds is given up.
 */
vpmm_status arena_give_back(struct arena *);

/* So many pages are out of the budget, and not yet back with the device. Under the plan lock. */
void arena_quarantine(struct arena *, uint64_t pages);

/* The host's records. */
void arena_free(struct arena *);

#endif
