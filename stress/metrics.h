/*
 * metrics.h - the metrics of a program's pools over HTTP, where the exporter is built in. A NULL exporter is well: no
 * metrics are wanted. False: told on stderr.
 */
#ifndef VPMM_STRESS_METRICS_H
#define VPMM_STRESS_METRICS_H

#include <stdbool.h>

#include <vpmm/exporter.h>

bool metrics_known(void); /* is it built in? If not, it is told what to install */

/* port: below 0, none; 0, any that is free. The port is printed on stderr. address NULL, or requests 0: the default. */
bool metrics_open(int port, const char *address, unsigned requests_per_second, vpmm_exporter **);
bool metrics_add(vpmm_exporter *, vpmm_pool *, const char *name);
bool metrics_remove(vpmm_exporter *, vpmm_pool *);
bool metrics_close(vpmm_exporter *);

#endif
