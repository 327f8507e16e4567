/*
 * client.h - an HTTP client in small, for tests of the exporter: what is sent is what the test wrote, byte by byte.
 */
#ifndef VPMM_TESTS_CLIENT_H
#define VPMM_TESTS_CLIENT_H

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { REPLY_BYTES = 4 << 20, CLIENT_PATIENCE_MS = 60000 }; /* also where a machine stands still for seconds */

static inline uint64_t client_now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* Processor time of this process, the server's thread included. */
static inline double client_process_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/*
 * From 127.0.0.<host>, so that a test can be several addresses. -1: refused. The port is chosen by connect, which may
 * take one of a connection that has ended: bind looks for one that no connection had in the last minute, and for
 * milliseconds where many had one.
 */
static inline int client_connect_from(unsigned host, uint16_t port)
{
    struct sockaddr_in from = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(0x7f000000 + host)};
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), yes = 1;
    if (fd >= 0 && setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &yes, sizeof yes) == 0 &&
        bind(fd, (struct sockaddr *)&from, sizeof from) == 0 && connect(fd, (struct sockaddr *)&to, sizeof to) == 0)
        return fd;
    if (fd >= 0)
        close(fd);
    return -1;
}

static inline int client_connect(uint16_t port)
{
    return client_connect_from(1, port);
}

static inline bool client_send(int fd, const void *bytes, size_t count)
{
    return send(fd, bytes, count, MSG_NOSIGNAL) == (ssize_t)count;
}

static inline bool client_say(int fd, const char *text)
{
    return client_send(fd, text, strlen(text));
}

struct reply {
    int status;  /* 0: none */
    char *bytes; /* head and body; freed by reply_free */
    const char *body;
    size_t count, body_count;
};

static inline void reply_free(struct reply *reply)
{
    free(reply->bytes);
    *reply = (struct reply){0};
}

/* Until the other end closes, or patience ends. */
static inline struct reply client_read(int fd)
{
    struct reply reply = {.bytes = calloc(1, REPLY_BYTES + 1)};
    uint64_t end = client_now_ms() + CLIENT_PATIENCE_MS;
    struct pollfd wait = {.fd = fd, .events = POLLIN};
    while (reply.count < REPLY_BYTES && client_now_ms() < end && poll(&wait, 1, CLIENT_PATIENCE_MS) > 0) {
        ssize_t got = recv(fd, reply.bytes + reply.count, REPLY_BYTES - reply.count, 0);
        if (got <= 0)
            break;
        reply.count += (size_t)got;
    }
    char *blank = strstr(reply.bytes, "\r\n\r\n");
    if (blank && sscanf(reply.bytes, "HTTP/1.1 %d", &reply.status) == 1) {
        reply.body = blank + 4;
        reply.body_count = reply.count - (size_t)(reply.body - reply.bytes);
    }
    return reply;
}

/* `headers`: more of them, each with its CRLF. */
static inline struct reply client_ask_from(unsigned host, uint16_t port, const char *method, const char *path,
                                           const char *headers)
{
    char request[2048];
    struct reply none = {0};
    int fd = client_connect_from(host, port);
    int count = snprintf(request, sizeof request, "%s %s HTTP/1.1\r\nHost: test\r\nConnection: close\r\n%s\r\n", method,
                         path, headers);
    if (fd < 0)
        return none;
    client_send(fd, request, (size_t)count);
    struct reply reply = client_read(fd);
    close(fd);
    return reply;
}

static inline struct reply client_get(uint16_t port, const char *path, const char *headers)
{
    return client_ask_from(1, port, "GET", path, headers);
}

/* The number of the series, written as it stands in the text; -1: it is not there. */
static inline double sample(const char *text, const char *series)
{
    size_t length = strlen(series);
    for (const char *line = text; line; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (!strncmp(line, series, length) && line[length] == ' ')
            return strtod(line + length, NULL);
    }
    return -1;
}

#endif
