#include "clients.h"

#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

bool clients_init(struct clients *clients, const vpmm_exporter_limits *limits)
{
    *clients = (struct clients){.limits = limits, .places = limits->connections + CLIENTS_LEAVING};
    clients->client = calloc(clients->places, sizeof *clients->client);
    for (unsigned i = 0; clients->client && i < clients->places; i++)
        clients->client[i].socket = -1;
    return clients->client;
}

void clients_free(struct clients *clients)
{
    free(clients->client);
}

/* ---- addresses ---- */

static struct address address_of(const struct sockaddr *from)
{
    struct address address = {0};
    if (from->sa_family == AF_INET6) {
        const struct in6_addr *in6 = &((const struct sockaddr_in6 *)from)->sin6_addr;
        if (IN6_IS_ADDR_V4MAPPED(in6)) {
            memcpy(address.bytes, in6->s6_addr + 12, 4);
        } else {
            memcpy(address.bytes, in6->s6_addr, 8);
            address.is_v6 = true;
        }
    } else if (from->sa_family == AF_INET) {
        memcpy(address.bytes, &((const struct sockaddr_in *)from)->sin_addr, 4);
    }
    return address;
}

static bool is_same(const struct address *one, const struct address *other)
{
    return one->is_v6 == other->is_v6 && !memcmp(one->bytes, other->bytes, sizeof one->bytes);
}

/* ---- connections ---- */

static void shut_down(struct client *client)
{
    client->leaving = true;
    shutdown(client->socket, SHUT_RDWR);
}

/* While more than `most` are there, of the address or (NULL) of all, the oldest leaves. */
static void make_way(struct clients *clients, const struct address *address, unsigned most)
{
    for (;;) {
        struct client *oldest = NULL;
        unsigned count = 0;
        for (struct client *c = clients->client; c < clients->client + clients->places; c++) {
            if (c->socket < 0 || c->leaving || (address && !is_same(&c->address, address)))
                continue;
            count++;
            if (!oldest || c->since_ns < oldest->since_ns)
                oldest = c;
        }
        if (count <= most)
            return;
        shut_down(oldest);
        clients->crowded++;
    }
}

struct client *clients_enter(struct clients *clients, int socket, const struct sockaddr *from, uint64_t now_ns)
{
    struct client *client = clients->client, *end = client + clients->places;
    while (client < end && client->socket >= 0)
        client++;
    if (client == end)
        return NULL;
    *client = (struct client){.socket = socket, .address = address_of(from), .since_ns = now_ns};
    make_way(clients, &client->address, clients->limits->connections_per_address);
    make_way(clients, NULL, clients->limits->connections);
    return client;
}

static uint64_t deadline_ns(const struct clients *clients)
{
    return (uint64_t)clients->limits->deadline_ms * 1000000;
}

void clients_begin(const struct clients *clients, struct client *client, uint64_t now_ns)
{
    client->is_idle = false;
    client->is_old = now_ns - client->since_ns >= deadline_ns(clients) / 2;
}

void clients_end(struct client *client, bool was_answered)
{
    client->is_idle = was_answered;
}

void clients_leave(struct client *client)
{
    client->socket = -1;
}

uint64_t clients_sweep(struct clients *clients, uint64_t now_ns)
{
    uint64_t next = UINT64_MAX;
    for (struct client *c = clients->client; c < clients->client + clients->places; c++) {
        uint64_t due = c->since_ns + deadline_ns(clients);
        if (c->socket < 0 || c->leaving)
            continue;
        if (due <= now_ns) {
            shut_down(c);
            clients->deadlines += !c->is_idle;
        } else if (due < next) {
            next = due;
        }
    }
    return next;
}

void clients_close_sockets(const struct clients *clients)
{
    for (unsigned i = 0; i < clients->places; i++)
        if (clients->client[i].socket >= 0)
            close(clients->client[i].socket);
}

/* ---- requests ---- */

static struct bucket *bucket_of(struct clients *clients, const struct address *address)
{
    struct bucket *silent = clients->bucket;
    for (struct bucket *b = clients->bucket; b < clients->bucket + CLIENT_BUCKETS; b++) {
        if (b->at_ns && is_same(&b->address, address))
            return b;
        if (b->at_ns < silent->at_ns)
            silent = b;
    }
    *silent = (struct bucket){.address = *address};
    return silent;
}

bool clients_may_ask(struct clients *clients, const struct client *client, uint64_t now_ns)
{
    uint64_t full = (uint64_t)clients->limits->requests_per_second * 1000;
    struct bucket *bucket = bucket_of(clients, &client->address);
    uint64_t passed_ms = (now_ns - bucket->at_ns) / 1000000;
    if (!bucket->at_ns || passed_ms >= 1000)
        bucket->millis = full;
    else
        bucket->millis += passed_ms * clients->limits->requests_per_second;
    if (bucket->millis > full)
        bucket->millis = full;
    /* What is less than a millisecond is counted with the next request. */
    bucket->at_ns = !bucket->at_ns || passed_ms >= 1000 ? now_ns : bucket->at_ns + passed_ms * 1000000;
    if (bucket->millis < 1000)
        return false;
    bucket->millis -= 1000;
    return true;
}

void clients_note_password(struct clients *clients, const struct client *client, bool is_good)
{
    bucket_of(clients, &client->address)->has_failed = !is_good;
}

bool clients_has_failed(struct clients *clients, const struct client *client)
{
    return bucket_of(clients, &client->address)->has_failed;
}
