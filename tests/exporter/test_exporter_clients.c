/*
 * Clients that mean harm, or are broken: a byte a second, half a request, headers without end, ten thousand
 * connections, random bytes, TLS spoken to a plain port. Whatever they do, the pool loses no allocation, another scrape
 * is answered, and the exporter's descriptors and memory stay bounded. And what is ours to parse is fed a million
 * inputs; the build with AddressSanitizer sees what each of them touches.
 *
 *   VPMM_TEST_INPUTS   of the parsers; 1,000,000
 */
#define _GNU_SOURCE
#include "client.h"
#include "support.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/resource.h>

#include <vpmm/exporter.h>

#include "auth.h"
#include "negotiate.h"
#include "pools.h"

enum { ATTACKER = 1, SCRAPER = 2 }; /* 127.0.0.x */

/* An exporter with a pool that a thread allocates from and frees to. */
static struct {
    struct world w;
    vpmm_exporter *exporter;
    uint16_t port;
    pthread_t thread;
    CUstream stream;
    atomic_bool stop;
    atomic_uint_fast64_t mallocs;
    bool failed;
    double descriptors, resident; /* before the attack */
    unsigned cut_off;             /* requests of ours that a busy machine kept beyond the deadline */
} site;

static void *work(void *unused)
{
    (void)unused;
    while (!atomic_load(&site.stop)) {
        CUdeviceptr p;
        if (vpmm_malloc(site.w.pool, PAGE, site.stream, &p) != VPMM_SUCCESS ||
            vpmm_free(site.w.pool, p, site.stream) != VPMM_SUCCESS)
            site.failed = true;
        atomic_fetch_add(&site.mallocs, 1);
        usleep(100);
    }
    return NULL;
}

/* On a busy machine a request may take longer than the deadline of a second, and is cut off: it is tried again. */
enum { TRIES = 20 };

static struct reply scrape_from(unsigned host)
{
    struct reply reply = client_ask_from(host, site.port, "GET", "/metrics", "");
    for (int i = 1; i < TRIES && reply.status == 0; i++) {
        site.cut_off++;
        reply_free(&reply);
        reply = client_ask_from(host, site.port, "GET", "/metrics", "");
    }
    require(reply.status == 200, "a scrape is answered with %d", reply.status);
    return reply;
}

static struct reply scrape(void)
{
    return scrape_from(SCRAPER);
}

static void open_site(void)
{
    vpmm_exporter_config config = vpmm_exporter_config_default();
    struct setup setup = setup_default();
    setup.sim.stepped = false; /* else what the thread queues would take more and more of the host's memory */
    config.port = 0;
    config.limits.deadline_ms = 1000;
    config.limits.requests_per_second = 1000;
    world_open(&site.w, &setup);
    site.stream = world_stream(&site.w);
    must_work(vpmm_exporter_start(&config, &site.exporter));
    must_work(vpmm_exporter_add(site.exporter, site.w.pool, "p"));
    site.port = vpmm_exporter_port(site.exporter);
    struct reply reply = scrape(), again = scrape();
    site.descriptors = sample(again.body, "process_open_fds");
    site.resident = sample(again.body, "process_resident_memory_bytes");
    reply_free(&reply), reply_free(&again);
    require(pthread_create(&site.thread, NULL, work, NULL) == 0, "a thread");
    while (!atomic_load(&site.mallocs) && !site.failed)
        sched_yield();
}

/* `ours`: descriptors that the test itself holds. */
static void check_site(unsigned ours)
{
    struct reply reply = scrape();
    double fds = sample(reply.body, "process_open_fds"), resident = sample(reply.body, "process_resident_memory_bytes");
    require(fds <= site.descriptors + ours + 90, "%g descriptors, %g before, %u of them ours", fds, site.descriptors,
            ours);
#if !defined(__SANITIZE_ADDRESS__) /* which keeps what is freed */
    require(resident < site.resident + (16 << 20), "%g bytes resident, %g before", resident, site.resident);
#else
    (void)resident;
#endif
    reply_free(&reply);
}

static void close_site(void)
{
    check_site(0);
    atomic_store(&site.stop, true);
    pthread_join(site.thread, NULL);
    require(!site.failed && atomic_load(&site.mallocs) > 0, "the pool suffers");
    must_work(vpmm_exporter_stop(site.exporter));
    world_close(&site.w);
}

/* ---- slow and endless ones ---- */

Test(exporter_clients, a_byte_now_and_then_does_not_keep_a_connection)
{
    static const char request[] = "GET /metrics HTTP/1.1\r\nHost: t\r\nX: ";
    open_site();
    uint64_t begin = client_now_ms();
    int fd = client_connect(site.port);
    struct pollfd closed = {.fd = fd, .events = POLLIN};
    for (size_t i = 0; poll(&closed, 1, 100) == 0; i++) {
        client_send(fd, i < sizeof request - 1 ? &request[i] : "x", 1);
        require(client_now_ms() - begin < 30000, "it is still there after 30 s");
    }
    cr_assert_geq(client_now_ms() - begin, 900);
    close(fd);
    struct reply reply = scrape();
    cr_assert_geq(sample(reply.body, "vpmm_exporter_refusals_total{reason=\"deadline\"}"), 1);
    reply_free(&reply);
    close_site();
}

static void no_deadline_was_met(void)
{
    struct reply reply = scrape();
    cr_expect_leq(sample(reply.body, "vpmm_exporter_refusals_total{reason=\"deadline\"}"), site.cut_off);
    reply_free(&reply);
}

/*
 * Asks again and again until the connection ends, which begins at `begin`: whether it was told to come anew before. A
 * machine that stands still keeps it from asking in the second half of the deadline: `stood_still`.
 */
static bool is_told_to_come_anew(uint64_t begin, bool *stood_still)
{
    enum { LONG_MS = 200 };
    static const char request[] = "GET /-/healthy HTTP/1.1\r\nHost: t\r\n\r\n";
    char said[4096];
    bool is_told = false;
    int fd = client_connect(site.port);
    uint64_t asked = begin;
    ssize_t got = 1;
    *stood_still = false;
    for (int i = 0; got > 0; i++) {
        require(i < 200, "it goes on and on");
        bool goes_on = is_told || client_send(fd, request, sizeof request - 1);
        got = goes_on ? recv(fd, said, sizeof said - 1, 0) : 0;
        said[got > 0 ? got : 0] = 0;
        is_told = is_told || strstr(said, "Connection: close");
        usleep(20000);
        *stood_still |= client_now_ms() - asked > LONG_MS;
        asked = client_now_ms();
    }
    close(fd);
    return is_told;
}

/* Until it is told to come anew, and the connection ends: long before its deadline, and not in a request's midst. */
Test(exporter_clients, who_asks_again_and_again_is_told_to_come_anew)
{
    open_site();
    bool is_told = false, stood_still = true;
    uint64_t begin = 0;
    for (int i = 0; i < TRIES && !is_told && stood_still; i++) {
        begin = client_now_ms();
        is_told = is_told_to_come_anew(begin, &stood_still);
        site.cut_off += !is_told && stood_still;
    }
    cr_expect(is_told, "it ended without a word");
    cr_expect_geq(client_now_ms() - begin, 500);
    no_deadline_was_met();
    close_site();
}

Test(exporter_clients, who_is_idle_between_two_requests_is_not_refused)
{
    static const char request[] = "GET /-/healthy HTTP/1.1\r\nHost: t\r\n\r\n";
    char said[4096];
    open_site();
    int fd = -1;
    ssize_t got = 0;
    for (int i = 0; i < TRIES && got <= 0; i++) {
        if (fd >= 0)
            close(fd), site.cut_off++;
        fd = client_connect(site.port);
        got = client_send(fd, request, sizeof request - 1) ? recv(fd, said, sizeof said, 0) : 0;
    }
    require(got > 0, "no answer");
    cr_expect_eq(recv(fd, said, sizeof said, 0), 0, "it has more to say");
    close(fd);
    no_deadline_was_met();
    close_site();
}

Test(exporter_clients, half_a_request_and_nothing_more)
{
    enum { CLIENTS = 30 };
    int fds[CLIENTS];
    open_site();
    for (int i = 0; i < CLIENTS; i++) {
        fds[i] = client_connect(site.port);
        client_send(fds[i], "GET /metrics HTTP/1.1\r\nHost: t\r\n", (size_t)i + 1);
    }
    check_site(CLIENTS);
    for (int i = 0; i < CLIENTS; i++) {
        char bytes[4096];
        ssize_t got;
        struct pollfd closed = {.fd = fds[i], .events = POLLIN};
        cr_assert_eq(poll(&closed, 1, 30000), 1, "client %d is still there", i);
        while ((got = recv(fds[i], bytes, sizeof bytes, 0)) > 0)
            ;
        close(fds[i]);
    }
    close_site();
}

/* Asks for everything and reads nothing. */
Test(exporter_clients, who_does_not_read_is_closed)
{
    open_site();
    int fd = client_connect(site.port), small = 1024;
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
    static const char request[] = "GET /metrics HTTP/1.1\r\nHost: t\r\n\r\n";
    for (int i = 0; i < 500 && client_send(fd, request, sizeof request - 1); i++)
        ;
    usleep(1500000);
    check_site(1);
    char bytes[65536];
    ssize_t got;
    uint64_t end = client_now_ms() + 30000;
    while ((got = recv(fd, bytes, sizeof bytes, 0)) > 0 && client_now_ms() < end)
        ;
    cr_assert_leq(got, 0, "it is still served");
    close(fd);
    close_site();
}

Test(exporter_clients, a_header_of_a_mebibyte)
{
    enum { MEBIBYTE = 1 << 20 };
    open_site();
    char *header = malloc(MEBIBYTE);
    memset(header, 'x', MEBIBYTE);
    for (int many = 0; many < 2; many++) { /* one line, and lines without end */
        for (int i = 0; many && i + 7 < MEBIBYTE; i += 8)
            memcpy(header + i, "X: yyy\r\n", 8);
        int fd = client_connect(site.port);
        client_say(fd, "GET /metrics HTTP/1.1\r\nHost: t\r\nX: ");
        for (int sent = 0; sent < MEBIBYTE && client_send(fd, header + sent, 4096); sent += 4096)
            ;
        struct reply reply = client_read(fd);
        cr_assert(reply.status == 431 || reply.status == 0, "%d", reply.status); /* 0: reset before it was read */
        reply_free(&reply);
        close(fd);
    }
    struct reply reply = {0};
    memset(header, 'x', 20000);
    for (int i = 0; i < TRIES && reply.status == 0; i++) { /* just too long, so that the answer is seen */
        int fd = client_connect(site.port);
        client_say(fd, "GET /metrics HTTP/1.1\r\nHost: t\r\nX: ");
        client_send(fd, header, 20000);
        client_say(fd, "\r\n\r\n");
        reply_free(&reply);
        reply = client_read(fd);
        close(fd);
    }
    cr_assert_eq(reply.status, 431, "%d", reply.status);
    reply_free(&reply);
    free(header);
    close_site();
}

/* ---- many of them ---- */

Test(exporter_clients, ten_thousand_connections)
{
    enum { CONNECTIONS = 10000, HELD = 200, BETWEEN = 1000 };
    static int fds[HELD];
    open_site();
    for (int i = 0; i < HELD; i++)
        fds[i] = -1;
    for (int i = 0; i < CONNECTIONS; i++) {
        int *fd = &fds[i % HELD];
        if (*fd >= 0)
            close(*fd);
        *fd = client_connect_from(ATTACKER, site.port);
        require(*fd >= 0, "connection %d: %s", i, strerror(errno));
        if (i % 3)
            client_say(*fd, "GET /metrics HTTP/1.1\r\n");
        if (i % BETWEEN == 0)
            check_site(HELD);
    }
    /* From the very address of those that hang on, too. */
    struct reply reply = scrape_from(ATTACKER);
    cr_assert_gt(sample(reply.body, "vpmm_exporter_refusals_total{reason=\"crowded\"}"), 1000);
    reply_free(&reply);
    for (int i = 0; i < HELD; i++)
        close(fds[i]);
    close_site();
}

/* One address has its share, and no more, of a full house. */
Test(exporter_clients, an_address_has_its_share)
{
    vpmm_exporter_config config = vpmm_exporter_config_default();
    config.port = 0;
    config.limits.connections = 8;
    config.limits.connections_per_address = 3;
    config.limits.deadline_ms = 600000; /* nobody leaves for another reason */
    vpmm_exporter *exporter;
    int fds[5], others[3];
    must_work(vpmm_exporter_start(&config, &exporter));
    for (int i = 0; i < 3; i++)
        others[i] = client_connect_from(SCRAPER, vpmm_exporter_port(exporter));
    for (int i = 0; i < 5; i++) {
        fds[i] = client_connect_from(ATTACKER, vpmm_exporter_port(exporter));
        usleep(10000);
    }
    for (int i = 0; i < 5; i++) {
        struct pollfd closed = {.fd = fds[i], .events = POLLIN};
        cr_assert_eq(poll(&closed, 1, i < 2 ? CLIENT_PATIENCE_MS : 0), i < 2, "connection %d", i);
        close(fds[i]);
    }
    for (int i = 0; i < 3; i++) {
        struct pollfd closed = {.fd = others[i], .events = POLLIN};
        cr_assert_eq(poll(&closed, 1, 0), 0);
        close(others[i]);
    }
    must_work(vpmm_exporter_stop(exporter));
}

Test(exporter_clients, too_many_requests)
{
    vpmm_exporter_config config = vpmm_exporter_config_default();
    config.port = 0;
    config.limits.requests_per_second = 5;
    vpmm_exporter *exporter;
    int count[2] = {0, 0};
    must_work(vpmm_exporter_start(&config, &exporter));
    uint64_t begin = client_now_ms();
    for (int i = 0; i < 50; i++) {
        struct reply reply = client_ask_from(ATTACKER, vpmm_exporter_port(exporter), "GET", "/metrics", "");
        cr_assert(reply.status == 200 || (reply.status == 429 && strstr(reply.bytes, "Retry-After: 1")));
        count[reply.status == 200]++;
        reply_free(&reply);
    }
    uint64_t took_ms = client_now_ms() - begin; /* 5 at once, and 5 more in each second */
    cr_assert(count[1] >= 5 && (uint64_t)count[1] <= 6 + took_ms / 200, "%d of 50 in %lu ms are served", count[1],
              took_ms);
    struct reply reply = client_ask_from(SCRAPER, vpmm_exporter_port(exporter), "GET", "/metrics", "");
    cr_assert_eq(reply.status, 200, "another address is served");
    cr_assert_eq(sample(reply.body, "vpmm_exporter_refusals_total{reason=\"rate\"}"), count[0]);
    reply_free(&reply);
    usleep(1100000);
    reply = client_ask_from(ATTACKER, vpmm_exporter_port(exporter), "GET", "/metrics", "");
    cr_assert_eq(reply.status, 200, "a second later it is served again");
    reply_free(&reply);
    must_work(vpmm_exporter_stop(exporter));
}

/* ---- random bytes ---- */

static uint64_t seed = 88172645463325252u;

static uint64_t next_random(void)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed;
}

static const char *const seeds[] = {
    "GET /metrics HTTP/1.1\r\nHost: t\r\nAccept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5\r\n\r\n",
    "HEAD / HTTP/1.0\r\n\r\nGET /-/ready HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n",
    "POST /metrics HTTP/1.1\r\nHost: t\r\nContent-Length: 99999999999999999999\r\nExpect: 100-continue\r\n\r\nx",
    "GET /metrics HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n\r\n0\r\n\r\n",
    "GET /%2e%2e/%00%ff HTTP/1.1\r\nHost: t\r\nAuthorization: Basic YTpi\r\n folded: x\r\n\r\n",
    "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a hello of TLS to a port without it",
};

/* A request with some bytes changed, removed, doubled, or random altogether. */
static size_t make_input(char *out, size_t size)
{
    const char *from = seeds[next_random() % (sizeof seeds / sizeof *seeds)];
    size_t count = strlen(from) < size ? strlen(from) : size;
    memcpy(out, from, count);
    for (uint64_t changes = next_random() % 8; changes; changes--) {
        size_t at = next_random() % count, length = next_random() % (count - at) % 16;
        switch (next_random() % 4) {
        case 0:
            out[at] = (char)next_random();
            break;
        case 1:
            memmove(out + at, out + at + length, count - at - length);
            count -= length;
            break;
        case 2:
            for (size_t i = 0; i < length; i++)
                out[at + i] = (char)next_random();
            break;
        default:
            out[at] = "\r\n\t ;,=\"\\/*:"[next_random() % 12];
        }
        count += !count;
    }
    return count;
}

Test(exporter_clients, random_bytes)
{
    enum { CONNECTIONS = 10000, BETWEEN = 1000 };
    char input[512];
    open_site();
    for (int i = 0; i < CONNECTIONS; i++) {
        int fd = client_connect_from(ATTACKER, site.port);
        require(fd >= 0, "connection %d: %s", i, strerror(errno));
        size_t count = make_input(input, sizeof input);
        client_send(fd, input, count / 2);
        client_send(fd, input + count / 2, count - count / 2);
        if (i % 2)
            shutdown(fd, SHUT_WR);
        close(fd);
        if (i % BETWEEN == 0)
            check_site(0);
    }
    usleep(200000);
    close_site();
}

/* The parsers, on headers that are mostly made of what headers are made of, each in memory of its exact size. */
static void parse(const char *input)
{
    struct accept accept = accept_nothing();
    struct accept_coding coding = accept_coding_nothing();
    accept_read(&accept, input);
    accept_coding_read(&coding, input);
    accept_prefers_openmetrics(&accept);
    accept_coding_allows_gzip(&coding);
    require(accept.q[0] <= 1000 && accept.q[1] <= 1000 && coding.gzip <= 1000, "a weight above 1 from '%s'", input);
    if (pools_name_is_good(input))
        require(strlen(input) <= POOL_NAME_BYTES, "a long name is good");
}

Test(exporter_clients, a_million_inputs_of_the_parsers, .timeout = 250)
{
    static const char *const words[] = {"application/openmetrics-text",
                                        "text/plain",
                                        "*/*",
                                        "gzip",
                                        "text/*",
                                        "q",
                                        "version",
                                        "1.0.0",
                                        "0.5",
                                        "1.",
                                        "\"",
                                        "\\",
                                        ";",
                                        ",",
                                        "=",
                                        " ",
                                        "\t",
                                        "\xc3\xa9",
                                        "\xf0\x9f\x98\x80",
                                        "\xed\xa0",
                                        "0.001"};
    const char *given = getenv("VPMM_TEST_INPUTS");
    unsigned long inputs = given ? strtoul(given, NULL, 10) : 1000000;
    for (unsigned long i = 0; i < inputs; i++) {
        char input[320] = "";
        size_t count = 0;
        for (uint64_t parts = next_random() % 12; parts; parts--) {
            const char *word = words[next_random() % (sizeof words / sizeof *words)];
            char any[2] = {(char)(next_random() % 255 + 1), '\0'};
            count += (size_t)sprintf(input + count, "%s", next_random() % 8 ? word : any);
        }
        char *exact = malloc(count + 1);
        memcpy(exact, input, count + 1);
        parse(exact);
        free(exact);
    }
}

/* Credentials are compared whole, whatever they hold. */
Test(exporter_clients, random_credentials)
{
    struct auth auth;
    char user[300], password[600];
    cr_assert(auth_init(&auth, "user", "$5$rounds=1000$salt$0000000000000000000000000000000000000000000",
                        1)); /* of no password */
    for (int i = 0; i < 100000; i++) {
        size_t counts[2] = {next_random() % sizeof user, next_random() % sizeof password};
        for (size_t j = 0; j < counts[0]; j++)
            user[j] = (char)(next_random() | 1);
        for (size_t j = 0; j < counts[1]; j++)
            password[j] = (char)(next_random() | 1);
        user[counts[0] ? counts[0] - 1 : 0] = password[counts[1] ? counts[1] - 1 : 0] = '\0';
        uint64_t second = (uint64_t)(i / 1000) + 1; /* in each, one is hashed */
        require(auth_check(&auth, user, password, false, second * 1000000000) != AUTH_PASSED,
                "random credentials pass");
    }
    auth_free(&auth);
}
