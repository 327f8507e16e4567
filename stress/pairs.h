/*
 * pairs.h - vpmm-pairs's parts.
 *
 *   pairs.c         options, and one case after the other
 *   pairs_run.c     a case: its threads, its passes, its figures
 *   pairs_report.c  the table and the JSON
 *   target.c        what is measured, as in the other programs
 */
#ifndef VPMM_STRESS_PAIRS_H
#define VPMM_STRESS_PAIRS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <vpmm/exporter.h>
#include <vpmm/vpmm.h>

#include "target.h"

enum { PAIRS_LIST = 16, PAIRS_WINDOW = 64, PAIRS_LONGEST = 4 /* of a window's lengths, in --bytes */ };

typedef enum pairs_pattern { PATTERN_PAIR, PATTERN_WINDOW, PATTERN_HANDOFF, PATTERNS } pairs_pattern;

extern const char *const pairs_pattern_names[PATTERNS];
extern const char *const pairs_allocator_names[2]; /* [async] */

typedef struct pairs_list {
    size_t n;
    uint64_t value[PAIRS_LIST];
} pairs_list;

typedef struct pairs_options {
    bool cuda;
    bool no_p99;
    uint64_t pairs; /* of each thread or couple; 0: what takes a quarter of a second */
    unsigned streams_known;
    pairs_list allocators, patterns, bytes, threads;
    const char *json;   /* NULL: none; "-": standard output */
    int metrics_port;   /* -1: no metrics; 0: any free port */
    vpmm_config config; /* from the environment */
} pairs_options;

/* One line of the table. */
typedef struct pairs_case {
    const pairs_options *options;
    vpmm_exporter *exporter; /* NULL: no metrics */
    bool async;
    pairs_pattern pattern;
    size_t bytes;
    unsigned threads;
} pairs_case;

/* What a case came to. */
typedef struct pairs_result {
    pairs_case of;
    uint64_t pairs; /* in the timed loop, of all threads */
    double ns_per_pair, pairs_per_second;
    bool has_p99, has_locks;
    double p99_ns;
    uint64_t driver_calls, locks, peak_mapped_bytes;
    vpmm_stats tiers; /* counters: differences over the timed loop */
    bool good;        /* the audit passed, and everything could be given back */
} pairs_result;

/* False: told on stderr, and there is no result. */
bool pairs_run(gpu *, const pairs_case *, pairs_result *);

/* Report: a table, and JSON with an object a line. */
typedef struct report {
    FILE *json; /* NULL: none */
    FILE *table;
    const char *path;
    bool headed;
} report;

bool report_open(report *, const char *json);
void report_result(report *, const pairs_result *);
bool report_close(report *); /* false: the JSON could not be written */

#endif
