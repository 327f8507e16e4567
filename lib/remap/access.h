/*
 * access.h - which devices may use the pool's memory: its own, and peers that the program has named
 * (vpmm_pool_set_access).
 *
 *   list     the devices and their rights, the pool's own first; `version` is another one after each change
 *   placed   of an extent: its pages name it. Before that it is its builder's
 *
 *   (1) each placed extent has the rights of the list, or of the one before it while a change is under way, or where
 *       the driver has refused a change and then to take it back: then the pool is in doubt, and each later change is
 *       made
 *
 * A change publishes the new list, then gives its rights to each placed extent. A build gives the rights of the list
 * that it has read to what it has mapped, and places it only if the list is still that one, under the lock; else it
 * gives the new rights first, and takes those away that the new list has no more. So what is placed after the list was
 * published has its rights, and what was placed before is found by the change.
 *
 * A build that a change has overtaken in this way holds the list: the next change waits before it publishes, so that no
 * build gives rights more than twice, however often the program changes them. It holds the list over its driver calls;
 * who waits for it is another change alone, with the passes behind that.
 *
 * Each device more is as much again for each mapping: on a host with two H100s SetAccess took 46 to 54 us for the own
 * device, 87 to 95 for both, in one call or two, and an unmap 25 to 29 and 50 to 57, of 2 MiB as of 32.
 *
 * The lock is held over the reading of the list and the placing of a build's extents, and over no driver call. A change
 * is made under the pass lock: no other change, no park, and nothing that is mapped is unmapped meanwhile, old
 * addresses included. So an extent that a build moves meanwhile has a mapping at the address where it was found.
 *
 * A change is made in bursts (driver/burst.h), each in a turn of its own (turn.h): the driver's lock goes to whoever
 * asks again first. Without turns a change of thousands of extents kept those who build waiting for up to 1.2 s (two
 * H200s). Beside threads that build all the time a change takes longer for that, and no pass is made meanwhile.
 */
#ifndef VPMM_LIB_ACCESS_H
#define VPMM_LIB_ACCESS_H

#include "base/queue.h"
#include "base/status.h"

#include <pthread.h>

#include <vpmm/driver.h>

struct arena;

enum { ACCESS_DEVICES = 32 };

struct access_list {
    uint32_t version, devices;
    CUmemAccessDesc device[ACCESS_DEVICES];
};

struct access {
    pthread_mutex_t lock;
    struct access_list list; /* under the lock, as is the next */
    uint32_t holders;        /* builds for which the list stays as it is */
    struct wakeup let_go;    /* by the last of them */
    bool in_doubt;           /* a change could not be taken back: see (1); under the pass lock */
};

void access_init(struct access *, int ordinal);
void access_destroy(struct access *);

struct access_list access_read(struct access *);

/* What takes the rights of one list away that another has not: none is in `taken` where there is none such. */
void access_taken(const struct access_list *given, const struct access_list *now, struct access_list *taken);

/* Takes the lock if the list is of this version still. Who has placed its extents calls access_placed. */
bool access_may_place(struct access *, uint32_t version);
void access_placed(struct access *);

/* No change is published in between. For who may not place its extents, and waits for no lock but this module's. */
void access_hold(struct access *);
void access_let_go(struct access *);

/*
 * Changes the rights of a device other than the pool's. NOT_SUPPORTED: the list is full. DRIVER, OUT_OF_MEMORY: the
 * driver refuses it for some extent, and the list is as before; what has the new rights loses them, if the driver lets
 * it.
 */
vpmm_status access_set(struct arena *, int ordinal, CUmemAccess_flags);

#endif
