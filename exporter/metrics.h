/*
 * metrics.h - the numbers of a scrape as text: Prometheus's text format 0.0.4, or OpenMetrics 1.0.0.
 *
 *   family   one name with its HELP and TYPE, once, and all of its samples behind them
 *   sample   a name, labels, a number. Those of a pool begin with {device="0",pool="name"
 *
 * The families of pools are made of VPMM_STATS, row by row: what its kind column says (see vpmm.h) is a family's type,
 * and whether it has a label. The rest comes from vpmm/observe.h and from the process. Every label's values are known
 * beforehand but for the pools' names, so that every series is there from the first scrape, as 0, and their number is
 * bounded: about 240 a pool.
 *
 * Threads: the exporter's alone.
 */
#ifndef VPMM_EXPORTER_METRICS_H
#define VPMM_EXPORTER_METRICS_H

#include "pools.h"
#include "self.h"
#include "text.h"

enum { METRICS_BYTES_A_POOL = 128 << 10, METRICS_BYTES = 64 << 10 }; /* bounds of a scrape's text */

/* Why a client was not served; each a value of vpmm_exporter_refusals_total's label "reason". */
#define METRICS_REFUSALS(X)                                                                                            \
    X(deadline)  /* the connection's time was over */                                                                  \
    X(crowded)   /* it was the oldest, and another came */                                                             \
    X(rate)      /* too many requests */                                                                               \
    X(auth)      /* no credentials, or wrong ones */                                                                   \
    X(passwords) /* too many of them to be checked, or no host memory to check one */

enum metrics_refusal {
#define METRICS_REFUSAL(reason) REFUSAL_##reason,
    METRICS_REFUSALS(METRICS_REFUSAL)
#undef METRICS_REFUSAL
        REFUSALS
};

struct metrics_exporter {
    uint64_t scrapes, cpu_ns, refusals[REFUSALS];
};

struct metrics {
    bool openmetrics;
    const struct snapshot *pool;
    unsigned pools;
    struct self_usage self;
    struct metrics_exporter exporter;
};

/* Replaces the text. */
void metrics_write(const struct metrics *, struct text *);

#endif
