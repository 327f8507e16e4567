/*
 * self.h - what a process says of itself: the metrics named process_* that every exporter has.
 *
 * /proc/self/statm and /proc/self/fd are opened once, so that a process that has no descriptor left can still be seen.
 * Threads: the exporter's alone after self_open.
 */
#ifndef VPMM_EXPORTER_SELF_H
#define VPMM_EXPORTER_SELF_H

#include <stdbool.h>
#include <stdint.h>

struct self {
    int statm, fds;    /* descriptors; -1: not to be had */
    uint64_t start_ns; /* since the epoch */
};

struct self_usage {
    uint64_t cpu_ns, resident_bytes, virtual_bytes, open_fds, max_fds, start_ns;
};

void self_open(struct self *);
void self_close(struct self *);

/* What cannot be read is 0. */
struct self_usage self_read(const struct self *);

#endif
