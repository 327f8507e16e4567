/*
 * metrics.h - the pools' metrics over HTTP, as vpmm's exporter serves them, where the environment asks for it.
 *
 *   VPMM_TORCH_METRICS   [ADDRESS:]PORT, the address numeric, IPv6 in brackets; 127.0.0.1 if there is none
 *
 * It is asked when the first pool is made, and the exporter serves until the process ends: pool="pytorch" is the main
 * one of a device, pool="pytorch (0, 3)" the private one of that id. At most VPMM_EXPORTER_POOLS at once are shown;
 * those that are made beyond are not. A port that is in use, as where several processes were given the same one, is
 * worth a warning and no more: a program is not to end because it cannot be watched.
 */
#ifndef VPMM_TORCH_METRICS_H
#define VPMM_TORCH_METRICS_H

#include "compat.h"

#include <vpmm/vpmm.h>

namespace vpmm_torch {

/* Starts the exporter, the first time, if it is asked for. Throws if the variable says something else. */
void metrics_begin();

/* After metrics_begin. A pool is removed before it is destroyed, by the thread that destroys it. */
void metrics_add(vpmm_pool* pool, MempoolId_t id);
void metrics_remove(vpmm_pool* pool);

} // namespace vpmm_torch

#endif
