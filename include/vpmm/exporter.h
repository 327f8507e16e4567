/*
 * vpmm/exporter.h - the metrics of one or several pools over HTTP, for Prometheus and what reads its formats.
 *
 *   vpmm_exporter *exporter;
 *   vpmm_exporter_config config = vpmm_exporter_config_default();
 *   vpmm_exporter_start(&config, &exporter);                  // serves http://127.0.0.1:9435/metrics from here on
 *   vpmm_exporter_add(exporter, pool, "weights");             // {pool="weights"}
 *   ...
 *   vpmm_exporter_remove(exporter, pool);                     // before vpmm_pool_destroy
 *   vpmm_exporter_stop(exporter);
 *
 * Served: /metrics (text 0.0.4, or OpenMetrics 1.0.0 where the Accept header prefers it; gzip where Accept-Encoding
 * allows it), /-/healthy (200 while the exporter runs), /-/ready (503 while a pool's reaper has stalled or its driver
 * has failed for good), and a short page at /. GET and HEAD alone. Where a password is
 * asked for, it is for all of them.
 *
 * A library of its own: libvpmm_exporter.a, which stands on libvpmm.a, libmicrohttpd, GnuTLS, zlib and libcrypt.
 *
 * Threads: every function may be called from any thread at any time, but for vpmm_exporter_stop, during which no other
 * call on the same exporter may run. One thread serves, with every signal blocked; it takes no lock of a pool, makes no
 * CUDA call and allocates within fixed bounds. Errors change nothing, and vpmm_last_error() names field, value and what
 * is allowed. Nothing is printed. After fork the child holds no socket of the parent's exporters, which answer
 * VPMM_ERROR_NOT_SUPPORTED there; it may start its own. A fork waits until the thread has answered all who have asked
 * by then: one request of each connection, and so up to passwords_per_second hashes of auth_hash's method, or twice as
 * many where a second of the clock ends meanwhile.
 */
#ifndef VPMM_EXPORTER_H
#define VPMM_EXPORTER_H

#include <stdint.h>

#include <vpmm/vpmm.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What clients may take. */
typedef struct vpmm_exporter_limits {
    unsigned connections;             /* open at once; 64 (4 to 4096). A new one beyond closes the oldest */
    unsigned connections_per_address; /* the same of one client address (of IPv6 a /64); 32 (1 to connections) */
    unsigned deadline_ms;             /* a connection's whole life, whatever it does; 10000 (100 to 600000) */
    unsigned header_bytes;            /* of memory for a request: its head, some 60 for each field and query argument,
                                         and the answer's head; 16384 (4096 to 1048576). Beyond: 431, 414, or nothing */
    unsigned requests_per_second;     /* of one address, and as many at once; 50 (1 to 100000). Beyond: 429 */
    unsigned passwords_per_second;    /* not seen before that are checked in a second of the clock, of all clients, and
                                         no more than half of the time; 4 (1 to 1000). Beyond: 429. The last is for
                                         who has not just failed */
    unsigned reaper_stall_ms;         /* reaper's age from which a pool is not ready; 10000 (1000 to 3600000) */
} vpmm_exporter_limits;

typedef struct vpmm_exporter_config {
    const char *address; /* numeric, IPv4 or IPv6, of the interface; "127.0.0.1" */
    uint16_t port;       /* 9435; 0: any free one */

    /* Both or neither: files in PEM, or the PEM text itself. TLS 1.2 and 1.3 alone are spoken then. Files are read
       once, at the start: after a renewal the exporter is stopped and started. */
    const char *tls_cert, *tls_key;

    /* Both or neither: basic authentication, by a user of at most 127 bytes without a colon and a password, together of
       at most 500 bytes. The hash is crypt(5)'s: yescrypt, scrypt, bcrypt, SHA-512 or SHA-256 (mkpasswd -m yescrypt).
       Without TLS, which would show the password to the network, allowed on loopback alone. */
    const char *auth_user, *auth_hash;

    vpmm_exporter_limits limits;
} vpmm_exporter_config; /* more fields may follow: start from vpmm_exporter_config_default() */

vpmm_exporter_config vpmm_exporter_config_default(void);

typedef struct vpmm_exporter vpmm_exporter;

/*
 * Serves from here on; no pool yet. NULL configuration: the defaults. The configuration is copied.
 * INVALID_VALUE: a NULL output or a wrong field. BUSY: the port is in use. NOT_SUPPORTED: the address is not this
 * machine's, or the port needs a privilege. HOST_MEMORY: no memory, thread or descriptor.
 */
vpmm_status vpmm_exporter_start(const vpmm_exporter_config *, vpmm_exporter **);

/*
 * Shows the pool with the label pool="name": 1 to 128 bytes of UTF-8, which no other pool on that device has here.
 * The pool must be removed before it is destroyed: vpmm_pool_destroy answers BUSY until then, or until the exporter has
 * stopped. INVALID_VALUE: NULL, a wrong name, a pool that is here already, one that another copy of the library made,
 * or more than VPMM_EXPORTER_POOLS.
 */
enum { VPMM_EXPORTER_POOLS = 64 };
vpmm_status vpmm_exporter_add(vpmm_exporter *, vpmm_pool *, const char *name);

/* Returns when no scrape uses the pool, and none will. INVALID_VALUE: the pool is not here. */
vpmm_status vpmm_exporter_remove(vpmm_exporter *, vpmm_pool *);

/* The port that it serves on. 0 for NULL. */
uint16_t vpmm_exporter_port(const vpmm_exporter *);

/*
 * Closes every connection, ends the thread and frees the exporter, within 100 ms, or as long as a hash of auth_hash's
 * method takes: who has asked and is not being answered yet gets no answer. vpmm_exporter_stop(NULL) is a no-op.
 */
vpmm_status vpmm_exporter_stop(vpmm_exporter *);

#ifdef __cplusplus
}
#endif

#endif
