/*
 * http.h - the server: one thread that runs libmicrohttpd, and the pages that it serves.
 *
 *   GET, HEAD  /            what there is, for people
 *              /metrics     a scrape
 *              /-/healthy   200: the thread runs
 *              /-/ready     503 while a pool's driver is lost or its reaper has stalled
 *
 * libmicrohttpd is run by our loop (its epoll descriptor, and an event descriptor that ends it), so that the same
 * thread can end connections whose time is over: its own timeout counts inactivity alone, and a byte now and then would
 * keep a connection for ever. epoll, because a process with a GPU has more descriptors than select can tell.
 *
 * Threads: http_start, http_stop: the caller's. Everything else is the thread's from start to stop, but for `ends` and
 * the pools, which have their lock. The thread blocks every signal. A fork takes `round`, and the pools' lock after it:
 * so each socket that there is when the process is copied is a client's, and is known to the child, which closes it.
 */
#ifndef VPMM_EXPORTER_HTTP_H
#define VPMM_EXPORTER_HTTP_H

#include "auth.h"
#include "clients.h"
#include "gzip.h"
#include "metrics.h"
#include "pools.h"
#include "settings.h"

#include <pthread.h>
#include <stdatomic.h>

struct MHD_Daemon;

struct http {
    vpmm_exporter_limits limits; /* constant, like all down to `thread` */
    struct pools *pools;
    uint16_t port;
    bool tls;
    struct MHD_Daemon *daemon;
    int listener, epoll, stop; /* stop: an event descriptor */
    pthread_t thread;
    atomic_bool ends;      /* http_stop's, read by the thread: nobody is answered any more */
    pthread_mutex_t round; /* the thread's while connections may come and go, for which a fork waits */

    struct clients clients;
    struct auth auth;
    struct self self;
    struct snapshot *snapshot; /* VPMM_EXPORTER_POOLS */
    struct text text;
    struct gzip gzip;
    struct metrics_exporter counters;
    uint64_t progress; /* requests, and connections that came or went */
};

/* INVALID_VALUE, BUSY, NOT_SUPPORTED, HOST_MEMORY: nothing is kept. `pools` outlives the server. */
vpmm_status http_start(struct http *, const struct settings *, struct pools *);
void http_stop(struct http *);

/* In the child of a fork: its copies of the server's descriptors. */
void http_close_sockets(const struct http *);

#endif
