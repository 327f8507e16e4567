/*
 * process.h - what a library must know of its process: that it was forked, and that it exits.
 *
 * Nothing is registered before the first pool is made, and no pool is made if that fails. exit() runs handlers in
 * reverse order of registration, and ours are registered after cuInit, so reapers have stopped when the driver's own
 * handler runs. In a forked child there is no reaper to stop and no driver to speak to.
 */
#ifndef VPMM_LIB_PROCESS_H
#define VPMM_LIB_PROCESS_H

#include "pool/reaper.h"

/* Counts forks: a pool made in another generation belongs to an ancestor. */
uint32_t process_generation(void);

/* Tells this copy of the library from others that are linked into the same process. */
const void *process_library(void);

/* A pool's reaper, NULL if it has none, that exit() shall stop. */
struct process_entry {
    struct process_entry *next, **link;
    struct reaper *reaper;
    bool stopping; /* exit() is at it */
};

/* Registers what is to be told of forks and of exit(), once a process, after cuInit. HOST_MEMORY. */
vpmm_status process_watch(void);

void process_add(struct process_entry *); /* after process_watch */
/* The reaper, if exit() has not stopped it; waits while it does. */
struct reaper *process_remove(struct process_entry *);

#endif
