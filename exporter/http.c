#define _GNU_SOURCE
#include "http.h"

#include "negotiate.h"

#include <errno.h>
#include <inttypes.h>
#include <microhttpd.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <vpmm/observe.h>

#define PLAIN "text/plain; charset=utf-8"

static uint64_t now_ns(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* NULL: it is none of those that are counted (clients_enter). */
static struct client *client_of(struct MHD_Connection *connection)
{
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    return info ? info->socket_context : NULL;
}

/* ---- answers ---- */

struct header {
    const char *name, *value;
};

static enum MHD_Result queue(struct MHD_Connection *connection, unsigned status, struct MHD_Response *response,
                             const struct header *headers, size_t count)
{
    bool good = response;
    for (size_t i = 0; good && i < count; i++)
        good = MHD_add_response_header(response, headers[i].name, headers[i].value) == MHD_YES;
    const struct client *client = client_of(connection);
    if (good && client && client->is_old)
        good = MHD_add_response_header(response, MHD_HTTP_HEADER_CONNECTION, "close") == MHD_YES;
    enum MHD_Result result = good ? MHD_queue_response(connection, status, response) : MHD_NO;
    if (response)
        MHD_destroy_response(response);
    return result; /* MHD_NO ends the connection, which is all that is left to do without memory */
}

static enum MHD_Result answer(struct MHD_Connection *connection, unsigned status, const char *words)
{
    const struct header headers[] = {{"Content-Type", PLAIN}, {"X-Content-Type-Options", "nosniff"}};
    return queue(connection, status,
                 MHD_create_response_from_buffer(strlen(words), (void *)words, MHD_RESPMEM_MUST_COPY), headers, 2);
}

static enum MHD_Result refuse(struct MHD_Connection *connection, unsigned status, const char *words,
                              struct header header)
{
    const struct header headers[] = {{"Content-Type", PLAIN}, header};
    return queue(connection, status,
                 MHD_create_response_from_buffer(strlen(words), (void *)words, MHD_RESPMEM_PERSISTENT), headers, 2);
}

/* ---- pages ---- */

static enum MHD_Result serve_front(struct http *http, struct MHD_Connection *connection)
{
    static const char page[] =
        "<!DOCTYPE html>\n<html lang=\"en\"><head><title>vpmm</title></head><body><h1>vpmm " VPMM_VERSION "</h1>\n"
        "<p><a href=\"/metrics\">/metrics</a>: the pools' metrics, for Prometheus<br>\n"
        "<a href=\"/-/healthy\">/-/healthy</a>, <a href=\"/-/ready\">/-/ready</a>: for probes</p></body></html>\n";
    static const struct header headers[] = {{"Content-Type", "text/html; charset=utf-8"},
                                            {"X-Content-Type-Options", "nosniff"},
                                            {"Content-Security-Policy", "default-src 'none'"}};
    (void)http;
    return queue(connection, MHD_HTTP_OK,
                 MHD_create_response_from_buffer(sizeof page - 1, (void *)page, MHD_RESPMEM_PERSISTENT), headers, 3);
}

static enum MHD_Result serve_healthy(struct http *http, struct MHD_Connection *connection)
{
    (void)http;
    return answer(connection, MHD_HTTP_OK, "healthy\n");
}

static enum MHD_Result serve_ready(struct http *http, struct MHD_Connection *connection)
{
    char name[POOL_NAME_BYTES + 1], words[256];
    enum pools_trouble trouble = pools_check(http->pools, http->limits.reaper_stall_ms, name);
    if (trouble == POOLS_GOOD)
        return answer(connection, MHD_HTTP_OK, "ready\n");
    if (trouble == POOLS_LOST)
        snprintf(words, sizeof words, "pool %s: the driver has failed for good; the process must be started again\n",
                 name);
    else
        snprintf(words, sizeof words, "pool %s: the reaper has not ended a pass for %u ms\n", name,
                 http->limits.reaper_stall_ms);
    return answer(connection, MHD_HTTP_SERVICE_UNAVAILABLE, words);
}

struct preference {
    struct accept format;
    struct accept_coding coding;
};

static enum MHD_Result read_preference(void *data, enum MHD_ValueKind kind, const char *name, const char *value)
{
    struct preference *preference = data;
    (void)kind;
    if (value && !strcasecmp(name, MHD_HTTP_HEADER_ACCEPT))
        accept_read(&preference->format, value);
    else if (value && !strcasecmp(name, MHD_HTTP_HEADER_ACCEPT_ENCODING))
        accept_coding_read(&preference->coding, value);
    return MHD_YES;
}

static void scrape(struct http *http, bool openmetrics)
{
    struct metrics metrics = {.openmetrics = openmetrics, .pool = http->snapshot};
    http->counters.scrapes++;
    http->counters.cpu_ns = now_ns(CLOCK_THREAD_CPUTIME_ID);
    http->counters.refusals[REFUSAL_deadline] = http->clients.deadlines;
    http->counters.refusals[REFUSAL_crowded] = http->clients.crowded;
    metrics.exporter = http->counters;
    metrics.self = self_read(&http->self);
    metrics.pools = pools_snapshot(http->pools, http->snapshot);
    http->text.bound = METRICS_BYTES + metrics.pools * METRICS_BYTES_A_POOL;
    metrics_write(&metrics, &http->text);
}

static enum MHD_Result serve_metrics(struct http *http, struct MHD_Connection *connection)
{
    struct preference preference = {accept_nothing(), accept_coding_nothing()};
    MHD_get_connection_values(connection, MHD_HEADER_KIND, read_preference, &preference);
    bool openmetrics = accept_prefers_openmetrics(&preference.format);
    scrape(http, openmetrics);
    if (http->text.cut)
        return answer(connection, MHD_HTTP_INTERNAL_SERVER_ERROR, "no host memory for the metrics\n");
    bool gzip = accept_coding_allows_gzip(&preference.coding) && gzip_compress(&http->gzip, &http->text);
    const struct text *text = gzip ? &http->gzip.text : &http->text;
    const struct header headers[] = {{"Content-Type", openmetrics
                                                          ? "application/openmetrics-text; version=1.0.0; charset=utf-8"
                                                          : "text/plain; version=0.0.4; charset=utf-8"},
                                     {"Vary", "Accept, Accept-Encoding"},
                                     {"Cache-Control", "no-store"},
                                     {"Content-Encoding", "gzip"}};
    return queue(connection, MHD_HTTP_OK,
                 MHD_create_response_from_buffer(text->used, text->bytes, MHD_RESPMEM_MUST_COPY), headers,
                 gzip ? 4 : 3);
}

/* ---- requests ---- */

static enum MHD_Result refuse_auth(struct http *http, struct MHD_Connection *connection)
{
    http->counters.refusals[REFUSAL_auth]++;
    return refuse(connection, MHD_HTTP_UNAUTHORIZED, "a user and a password are needed\n",
                  (struct header){"WWW-Authenticate", "Basic realm=\"vpmm\", charset=\"UTF-8\""});
}

static enum auth_answer authenticate(struct http *http, struct MHD_Connection *connection, const struct client *client)
{
    char *password = NULL;
    char *user = MHD_basic_auth_get_username_password(connection, &password);
    bool has_failed = client && clients_has_failed(&http->clients, client);
    enum auth_answer found = auth_check(&http->auth, user, password, has_failed, now_ns(CLOCK_MONOTONIC));
    if (client && password && found != AUTH_TOO_OFTEN)
        clients_note_password(&http->clients, client, found == AUTH_PASSED);
    if (password)
        explicit_bzero(password, strlen(password));
    MHD_free(password);
    MHD_free(user);
    return found;
}

static enum MHD_Result too_many(struct http *http, struct MHD_Connection *connection, enum metrics_refusal reason)
{
    http->counters.refusals[reason]++;
    return refuse(connection, MHD_HTTP_TOO_MANY_REQUESTS, "too many requests\n", (struct header){"Retry-After", "1"});
}

static bool only_reads(const char *method)
{
    return !strcmp(method, MHD_HTTP_METHOD_GET) || !strcmp(method, MHD_HTTP_METHOD_HEAD);
}

/*
 * A request's path. libmicrohttpd hands the target over as it came, but for its query and its percent-encoding: it is
 * the path, or the absolute form, http://host/path (RFC 9112 3.2.2). There the target's host counts and not the Host
 * header's; no page depends on either. Its scheme is the connection's: what is for https is not told without TLS
 * (RFC 9110 7.4). What is in neither form is handed on, and is no page's path.
 */
static const char *path_of(const struct http *http, const char *target)
{
    const char *scheme = http->tls ? "https://" : "http://";
    if (strncasecmp(target, scheme, strlen(scheme)) != 0)
        return target;
    const char *host = target + strlen(scheme), *end = host + strcspn(host, "/@");
    if (end == host || *host == ':') /* no host, an error by RFC 9110 4.2.1 */
        return target;
    return *end ? end : "/"; /* "@..." behind a user, an error by RFC 9110 4.2.4, is no page's path */
}

/* A path ends at its first NUL, which stands for itself in none: %00 makes it that of no page. */
static size_t unescape(void *data, struct MHD_Connection *connection, char *text)
{
    (void)data, (void)connection;
    size_t length = MHD_http_unescape(text);
    if (strlen(text) < length)
        *text = '\0';
    return strlen(text);
}

static enum MHD_Result route(struct http *http, struct MHD_Connection *connection, const char *path, const char *method)
{
    static const struct {
        const char *path;
        enum MHD_Result (*serve)(struct http *, struct MHD_Connection *);
    } pages[] = {
        {"/metrics", serve_metrics}, {"/-/healthy", serve_healthy}, {"/-/ready", serve_ready}, {"/", serve_front}};
    for (size_t i = 0; i < sizeof pages / sizeof *pages; i++) {
        if (strcmp(path, pages[i].path) != 0)
            continue;
        if (only_reads(method))
            return pages[i].serve(http, connection);
        return refuse(connection, MHD_HTTP_METHOD_NOT_ALLOWED, "GET and HEAD are allowed\n",
                      (struct header){"Allow", "GET, HEAD"});
    }
    return answer(connection, MHD_HTTP_NOT_FOUND, "not found: /metrics, /-/healthy, /-/ready and / are here\n");
}

/*
 * Called when a request's headers are there, and again when the request is whole. GET and HEAD are answered then, which
 * leaves the connection open for more; others at once, so that no body is read. A GET with a body ends the connection.
 */
static enum MHD_Result serve(void *data, struct MHD_Connection *connection, const char *target, const char *method,
                             const char *version, const char *upload, size_t *upload_bytes, void **request)
{
    struct http *http = data;
    struct client *client = client_of(connection);
    (void)version, (void)upload;
    http->progress++;
    if (atomic_load_explicit(&http->ends, memory_order_relaxed))
        return MHD_NO; /* a round answers all that have asked, which may take long: vpmm_exporter_stop waits for one */
    if (client && !*request)
        clients_begin(&http->clients, client, now_ns(CLOCK_MONOTONIC));
    if (*upload_bytes)
        return MHD_NO;
    if (!*request && only_reads(method)) {
        *request = http; /* marks that the headers have been seen */
        return MHD_YES;
    }
    if (client && !clients_may_ask(&http->clients, client, now_ns(CLOCK_MONOTONIC)))
        return too_many(http, connection, REFUSAL_rate);
    switch (authenticate(http, connection, client)) {
    case AUTH_PASSED:
        return route(http, connection, path_of(http, target), method);
    case AUTH_TOO_OFTEN:
        return too_many(http, connection, REFUSAL_passwords);
    default:
        return refuse_auth(http, connection);
    }
}

/* Called when a request has been answered, or has ended otherwise. */
static void notice_end(void *data, struct MHD_Connection *connection, void **request,
                       enum MHD_RequestTerminationCode how)
{
    struct client *client = client_of(connection);
    (void)data, (void)request;
    if (client)
        clients_end(client, how == MHD_REQUEST_TERMINATED_COMPLETED_OK);
}

/* ---- connections ---- */

static void notice_connection(void *data, struct MHD_Connection *connection, void **context,
                              enum MHD_ConnectionNotificationCode what)
{
    struct http *http = data;
    http->progress++;
    if (what == MHD_CONNECTION_NOTIFY_STARTED) {
        int socket = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
        const struct sockaddr *from =
            MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CLIENT_ADDRESS)->client_addr;
        *context = clients_enter(&http->clients, socket, from, now_ns(CLOCK_MONOTONIC));
    } else if (*context) {
        clients_leave(*context);
    }
}

/* ---- the thread ---- */

/* Until libmicrohttpd or a client's deadline wants to be looked at again; -1: for ever. */
static int pause_ms(struct http *http)
{
    uint64_t now = now_ns(CLOCK_MONOTONIC), due = clients_sweep(&http->clients, now);
    uint64_t until = due == UINT64_MAX ? UINT64_MAX : (due - now) / 1000000 + 1;
    MHD_UNSIGNED_LONG_LONG theirs;
    if (MHD_get_timeout(http->daemon, &theirs) == MHD_YES && theirs < until)
        until = theirs;
    return until > INT32_MAX ? -1 : (int)until;
}

static int run_round(struct http *http)
{
    pthread_mutex_lock(&http->round);
    MHD_run(http->daemon);
    int pause = pause_ms(http);
    pthread_mutex_unlock(&http->round);
    return pause;
}

/*
 * With no descriptor left for accept(), the listening socket stays readable and libmicrohttpd can do nothing about it;
 * and while a client's TLS handshake waits for its next bytes, it asks to be called again at once. So rounds in which
 * nothing comes to anything, and which did not wait either, are followed by a pause. While other connections are open
 * it does not listen at all then, nor with as many as it may have, and listens again when it is run the next time after
 * one of them has gone, for which it does not ask: so a round that comes to anything is followed by another at once.
 */
static void *run(void *data)
{
    enum { IDLE_ROUNDS = 200, IDLE_PAUSE_MS = 10 };
    struct http *http = data;
    struct pollfd waits[] = {{.fd = http->stop, .events = POLLIN}, {.fd = http->epoll, .events = POLLIN}};
    uint64_t seen = 0;
    prctl(PR_SET_NAME, "vpmm-exporter");
    for (unsigned idle = 0; !waits[0].revents; idle = http->progress == seen ? idle + 1 : 0) {
        seen = http->progress;
        int pause = run_round(http);
        if (http->progress != seen)
            pause = 0;
        if (idle >= IDLE_ROUNDS)
            poll(waits, 1, IDLE_PAUSE_MS);
        else if (poll(waits, 2, pause) == 0 && pause)
            idle = 0;
    }
    return NULL;
}

static bool start_thread(struct http *http)
{
    sigset_t all, before;
    sigfillset(&all); /* the program's signals are for its own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&http->thread, NULL, run, http);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return !error;
}

/* ---- start and stop ---- */

static vpmm_status bind_failed(const struct settings *settings, int error)
{
    if (error == EADDRINUSE)
        return vpmm_error_set(VPMM_ERROR_BUSY,
                              "vpmm_exporter_config.port is %u: another socket listens there on '%s'; a free port is "
                              "allowed, or 0 for any",
                              settings->port, settings->address);
    if (error == EADDRNOTAVAIL || error == EACCES || error == EAFNOSUPPORT || error == EINVAL)
        return vpmm_error_set(
            VPMM_ERROR_NOT_SUPPORTED,
            "vpmm_exporter_config.address is '%s', port %u: %s; an address of this machine is allowed, and "
            "without privileges a port from 1024 up",
            settings->address, settings->port, strerror(error));
    return vpmm_error_set(VPMM_ERROR_HOST_MEMORY, "a socket that listens on '%s', port %u: %s", settings->address,
                          settings->port, strerror(error));
}

static vpmm_status listen_on(struct http *http, const struct settings *settings)
{
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } bound = {0};
    socklen_t bytes = sizeof bound;
    int yes = 1, family = settings->socket_address.ss_family;
    http->listener = socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (http->listener < 0 || setsockopt(http->listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) < 0 ||
        bind(http->listener, (const struct sockaddr *)&settings->socket_address, settings->socket_address_bytes) < 0 ||
        listen(http->listener, SOMAXCONN) < 0 || getsockname(http->listener, &bound.any, &bytes) < 0)
        return bind_failed(settings, errno);
    http->port = ntohs(family == AF_INET6 ? bound.v6.sin6_port : bound.v4.sin_port);
    return VPMM_SUCCESS;
}

/* A client's mistakes are not the program's to print. */
static void log_nothing(void *data, const char *format, va_list arguments)
{
    (void)data, (void)format, (void)arguments;
}

static bool is_same_socket(int socket, const struct stat *before)
{
    struct stat now;
    return fstat(socket, &now) == 0 && now.st_dev == before->st_dev && now.st_ino == before->st_ino;
}

static vpmm_status start_daemon(struct http *http, const struct settings *settings)
{
    bool v6 = settings->socket_address.ss_family == AF_INET6;
    unsigned flags = MHD_USE_EPOLL | MHD_USE_ERROR_LOG | (http->tls ? MHD_USE_TLS : 0) | (v6 ? MHD_USE_IPv6 : 0);
    struct MHD_OptionItem tls_options[] = {
        {MHD_OPTION_HTTPS_MEM_CERT, 0, settings->cert},
        {MHD_OPTION_HTTPS_MEM_KEY, 0, settings->key},
        {MHD_OPTION_HTTPS_PRIORITIES, 0, "SECURE128:-VERS-ALL:+VERS-TLS1.3:+VERS-TLS1.2"},
        {MHD_OPTION_END, 0, NULL}};
    struct stat listener = {0};
    fstat(http->listener, &listener);
    http->daemon = MHD_start_daemon(flags, 0, NULL, NULL, serve, http, MHD_OPTION_EXTERNAL_LOGGER, log_nothing, NULL,
                                    MHD_OPTION_LISTEN_SOCKET, http->listener, MHD_OPTION_CONNECTION_LIMIT,
                                    http->limits.connections + CLIENTS_LEAVING, MHD_OPTION_CONNECTION_MEMORY_LIMIT,
                                    (size_t)http->limits.header_bytes, MHD_OPTION_STRICT_FOR_CLIENT, 1,
                                    MHD_OPTION_UNESCAPE_CALLBACK, unescape, NULL, MHD_OPTION_NOTIFY_CONNECTION,
                                    notice_connection, http, MHD_OPTION_NOTIFY_COMPLETED, notice_end, http,
                                    MHD_OPTION_ARRAY, http->tls ? tls_options : tls_options + 3, MHD_OPTION_END);
    if (!http->daemon && !is_same_socket(http->listener, &listener))
        http->listener = -1; /* libmicrohttpd has closed it in some of its failures, and the number may be another's */
    if (!http->daemon)
        return vpmm_error_set(VPMM_ERROR_HOST_MEMORY, "libmicrohttpd could not be started: no memory or no descriptor");
    http->listener = -1; /* the daemon's from here on */
    http->epoll = MHD_get_daemon_info(http->daemon, MHD_DAEMON_INFO_EPOLL_FD)->epoll_fd;
    return VPMM_SUCCESS;
}

static vpmm_status make_parts(struct http *http, const struct settings *settings)
{
    bool good = clients_init(&http->clients, &http->limits);
    good &= auth_init(&http->auth, settings->auth_user, settings->auth_hash, http->limits.passwords_per_second);
    good &= gzip_init(&http->gzip, METRICS_BYTES + VPMM_EXPORTER_POOLS * METRICS_BYTES_A_POOL);
    http->snapshot = calloc(VPMM_EXPORTER_POOLS, sizeof *http->snapshot);
    http->stop = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    self_open(&http->self);
    if (good && http->snapshot && http->stop >= 0)
        return VPMM_SUCCESS;
    return vpmm_error_set(VPMM_ERROR_HOST_MEMORY, "no host memory or no descriptor for an exporter");
}

static void free_parts(struct http *http)
{
    if (http->daemon)
        MHD_stop_daemon(http->daemon);
    if (http->listener >= 0)
        close(http->listener);
    if (http->stop >= 0)
        close(http->stop);
    self_close(&http->self);
    pthread_mutex_destroy(&http->round);
    free(http->snapshot);
    gzip_free(&http->gzip);
    text_free(&http->text);
    auth_free(&http->auth);
    clients_free(&http->clients);
}

vpmm_status http_start(struct http *http, const struct settings *settings, struct pools *pools)
{
    *http = (struct http){
        .limits = settings->limits, .pools = pools, .tls = settings->cert, .listener = -1, .epoll = -1, .stop = -1};
    pthread_mutex_init(&http->round, NULL);
    vpmm_status status = make_parts(http, settings);
    if (status == VPMM_SUCCESS)
        status = listen_on(http, settings);
    if (status == VPMM_SUCCESS)
        status = start_daemon(http, settings);
    if (status == VPMM_SUCCESS && !start_thread(http))
        status = vpmm_error_set(VPMM_ERROR_HOST_MEMORY, "no thread for an exporter: the process has too many");
    if (status != VPMM_SUCCESS)
        free_parts(http);
    return status;
}

void http_stop(struct http *http)
{
    uint64_t one = 1;
    atomic_store_explicit(&http->ends, true, memory_order_relaxed);
    while (write(http->stop, &one, sizeof one) < 0 && errno == EINTR)
        ;
    pthread_join(http->thread, NULL);
    free_parts(http);
}

void http_close_sockets(const struct http *http)
{
    close(MHD_get_daemon_info(http->daemon, MHD_DAEMON_INFO_LISTEN_FD)->listen_fd);
    close(http->epoll);
    close(http->stop);
    clients_close_sockets(&http->clients);
    self_close((struct self *)&http->self);
}
