/*
 * burst.h - long runs of driver calls, and the builds of the whole process that want the driver meanwhile.
 *
 * The driver maps, unmaps and grants access for one caller at a time, whichever its device, and its lock goes to whoever
 * asks again first. A change of the rights of two pools at once, on two H200s, kept a malloc of each waiting for 1.0 s,
 * though each change gave its own pool's builders their turns (remap/turn.h): while the one left the driver alone the
 * other had it.
 *
 *   build   of any pool: a thread that has claimed what it maps, until that is placed
 *   burst   so many calls as BURST_NS takes, one of them beyond it, by one thread of the process at a time, first come,
 *           first served. If there is a build at its end a pause as long follows, which still is the burst's: no other
 *           begins meanwhile
 *
 * So builds have the driver for half of the time, however many pools there are whose rights are changed, which are
 * parked or woken. Who gives memory back, or unmaps it, has no bursts. Who is in a burst may wait for a turn, and nobody
 * who has a turn for a burst: other bursts can wait, builds should not.
 */
#ifndef VPMM_LIB_BURST_H
#define VPMM_LIB_BURST_H

#include <stdbool.h>
#include <stdint.h>

#define BURST_NS UINT64_C(1000000)

struct burst {
    uint64_t begun_ns, end_ns; /* the end 0: none is under way */
};

void burst_begin(struct burst *);   /* waits for another thread's */
void burst_restart(struct burst *); /* its time begins again: it was spent on a wait */
void burst_end(struct burst *);     /* one that has not begun too */
bool burst_is_over(const struct burst *);

/* A build begins, and ends. Any thread. */
void burst_build_begins(void);
void burst_build_ends(void);

#endif
