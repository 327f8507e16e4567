/*
 * clients.h - who is connected, for how long, and how often each address asks.
 *
 *   client    an open connection: its socket, its address, and when it must end, whatever it does
 *   address   of a client: IPv4 whole, IPv6 by its /64, which is what one customer of a network is given
 *   bucket    of an address: the requests that it may still make, filled at the limit's rate up to a second's worth,
 *             and whether its latest password was wrong
 *
 * Whoever connects is let in, and the oldest connection (of the address, if it has its share) is shut down for it: who
 * hangs on loses, who asks at once is answered. A socket is shut down here and closed by the HTTP library, which then
 * takes the client out. Invariant: clients that are not leaving <= limits.connections, and of one address <=
 * limits.connections_per_address.
 *
 * Threads: the exporter's alone; the sockets are also read in the child of a fork, which closes its copies.
 */
#ifndef VPMM_EXPORTER_CLIENTS_H
#define VPMM_EXPORTER_CLIENTS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

#include <vpmm/exporter.h>

enum {
    CLIENT_BUCKETS = 256, /* addresses that are remembered; the one that was silent longest is forgotten */
    CLIENTS_LEAVING = 16, /* places for connections that are shut down and not yet closed */
};

struct address {
    uint8_t bytes[8];
    bool is_v6;
};

struct client {
    int socket; /* -1: the place is free */
    bool leaving;
    bool is_idle; /* its latest request was answered, and the headers of no other have come since */
    bool is_old;  /* half of its time is over: the answer tells it to come anew, so that it is not cut off as it asks */
    struct address address;
    uint64_t since_ns;
};

struct bucket {
    struct address address;
    uint64_t at_ns;  /* 0: the place is free. Of the latest request */
    uint64_t millis; /* thousandths of requests that may be made, at that time */
    bool has_failed; /* the latest password was wrong */
};

struct clients {
    const vpmm_exporter_limits *limits;
    struct client *client;
    unsigned places;
    uint64_t deadlines, crowded; /* connections that were ended for their age in the midst of a request, or without
                                    one, and for a newer one */
    struct bucket bucket[CLIENT_BUCKETS];
};

bool clients_init(struct clients *, const vpmm_exporter_limits *);
void clients_free(struct clients *);

/* NULL: no place, which the HTTP library's own limit keeps from happening; the connection has only the limits of that.
 */
struct client *clients_enter(struct clients *, int socket, const struct sockaddr *, uint64_t now_ns);

/* A request of the client's begins, or ends. */
void clients_begin(const struct clients *, struct client *, uint64_t now_ns);
void clients_end(struct client *, bool was_answered);
void clients_leave(struct client *);

/* Shuts down what is older than the deadline. When the next one is due; UINT64_MAX: no one is there. */
uint64_t clients_sweep(struct clients *, uint64_t now_ns);

/* One more request of the client's address; false: too many. */
bool clients_may_ask(struct clients *, const struct client *, uint64_t now_ns);

/* Of the client's address: what is to be said of its latest password, and what was. */
void clients_note_password(struct clients *, const struct client *, bool is_good);
bool clients_has_failed(struct clients *, const struct client *);

/* In the child of a fork. */
void clients_close_sockets(const struct clients *);

#endif
