/*
 * replay.h - vpmm-replay's parts.
 *
 *   replay.c         options, and one trace after the other
 *   replay_run.c     a trace's passes, by one thread or several
 *   replay_lag.c     the simulated GPU's distance behind the host
 *   replay_report.c  the table and the JSON
 *   target.c         what is measured, as in the other programs
 */
#ifndef VPMM_STRESS_REPLAY_H
#define VPMM_STRESS_REPLAY_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <vpmm/sim.h>
#include <vpmm/vpmm.h>

#include "target.h"
#include "trace.h"

typedef struct replay_options {
    bool cuda;
    bool async;
    bool pace;
    bool default_stream;
    bool verify;
    size_t lag;
    unsigned passes;
    unsigned threads;
    uint64_t min_bytes;
    double scale;
    const char *json; /* NULL: none; "-": standard output */
} replay_options;

/*
 * Lag: after each event, lag_advance runs what was queued `events` or more events ago on the simulator's stepped
 * streams. A stream's pending operations are its newest, so that counts of operations an event are enough. What a
 * host wait has run meanwhile is gone from the oldest of them.
 */

typedef struct lag_window {
    vpmm_sim *sim;
    size_t events; /* the distance */
    size_t streams;
    size_t position;
    uint32_t *added; /* [events][streams]: operations that an event queued and that have not run */
    size_t *held;    /* [streams]: their sum over the window */
    size_t *pending; /* [streams]: operations pending after the last step */
} lag_window;

bool lag_open(lag_window *, vpmm_sim *, size_t events, size_t streams);
void lag_advance(lag_window *, const CUstream *streams);
void lag_close(lag_window *);

/* Results. */

typedef struct pass_result {
    const char *path;
    char trace[64]; /* the file's name without directory and .csv */
    unsigned pass;  /* from 1 */
    uint64_t events, mallocs, frees, refused;
    uint64_t peak_mapped_bytes, peak_in_use_bytes, peak_demand_bytes; /* since the pool's creation */
    uint64_t peak_slab_bytes, peak_slab_live_bytes; /* of what was seen after some mallocs and polls */
    double wall_ms, malloc_ms;
    double malloc_p50_us, malloc_p99_us, malloc_p999_us, malloc_max_us;
    double driver_us_malloc, driver_us_malloc_max, driver_us_free, driver_us_background;
    uint64_t small_mallocs; /* of less than a page; in the numbers above, too */
    double small_malloc_ns_mean, small_malloc_ns_p50, driver_us_small;
    vpmm_stats before, after;
    uint64_t races, mismatches, misuses;
    bool audit;
    unsigned leaks; /* of the trace, found at its end; in every pass's result */
} pass_result;

bool pass_good(const pass_result *);

/* Replays the trace's passes into results[options->passes]. False: told on stderr; *done results are there. */
bool replay_trace(const replay_options *, const trace *, const char *path, pass_result *results, unsigned *done);

/* Report: an open JSON array, and a table. */

typedef struct report {
    const replay_options *options;
    FILE *json; /* NULL: none */
    FILE *table;
    bool first;
} report;

bool report_open(report *, const replay_options *);
void report_pass(report *, const pass_result *);
/* False: the JSON could not be written. */
bool report_close(report *);

/* "llama \r 40 %" on stderr, where that is a terminal. */
void progress_show(const char *name, unsigned pass, double done);
void progress_clear(void);

#endif
