/*
 * Parts of the exporter, and of what it reads, by themselves: how numbers are written, a text is cut and packed, a
 * latency or a descriptor is counted, clients are told apart and make way, and an address is known to be the machine's
 * own.
 */
#define _GNU_SOURCE
#include "support.h"

#include "../../exporter/metrics.h" /* there is another one of the name */
#include "base/stats.h"
#include "clients.h"
#include "gzip.h"
#include "pools.h"
#include "self.h"
#include "settings.h"

#include <dirent.h>
#include <netinet/in.h>
#include <unistd.h>

/* A bucket holds what is at most its bound, and more than the one before. */
Test(exporter_parts, bounds_of_the_latency_buckets)
{
    static struct stats stats;
    static const struct {
        uint64_t ns;
        int bucket;
    } cases[] = {{0, 0},
                 {1000, 0},
                 {1001, 1},
                 {2000, 1},
                 {2001, 2},
                 {4000, 2},
                 {4001, 3},
                 {262144000, 18},
                 {262144001, VPMM_LATENCY_BUCKETS - 1},
                 {524288001, VPMM_LATENCY_BUCKETS - 1}, /* the first past the buckets, if there were more */
                 {UINT64_MAX / 2, VPMM_LATENCY_BUCKETS - 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        vpmm_latency latency[2];
        stats_read_latency(&stats, &latency[0]);
        stats_note_latency(&stats, cases[i].ns);
        stats_read_latency(&stats, &latency[1]);
        for (int j = 0; j < VPMM_LATENCY_BUCKETS; j++)
            require(latency[1].count[j] - latency[0].count[j] == (j == cases[i].bucket), "%lu ns, bucket %d",
                    cases[i].ns, j);
        require(latency[1].sum_ns - latency[0].sum_ns == cases[i].ns, "%lu ns", cases[i].ns);
    }
}

/* Whatever the locale's decimal point is. */
Test(exporter_parts, numbers_of_seconds)
{
    static const struct {
        uint64_t ns;
        const char *text;
    } cases[] = {{0, "0"},
                 {1, "0.000000001"},
                 {1000, "0.000001"},
                 {2500000000, "2.5"},
                 {10000000000, "10"},
                 {100000000, "0.1"},
                 {UINT64_MAX, "18446744073.709551615"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct text text = {.bound = 100};
        text_seconds(&text, cases[i].ns);
        text_append(&text, "", 1);
        require(!text.cut && !strcmp(text.bytes, cases[i].text), "%s, not %s", text.bytes, cases[i].text);
        text_free(&text);
    }
}

Test(exporter_parts, a_text_is_cut_at_its_bound_and_stays_so)
{
    struct text text = {.bound = 10};
    text_string(&text, "0123456789");
    cr_assert(!text.cut);
    text_string(&text, "x");
    cr_assert(text.cut);
    text_append(&text, "", 0);
    text_string(&text, "");
    cr_assert(text.cut);
    cr_assert_eq(text.used, 10);
    text_clear(&text);
    text_string(&text, "short");
    cr_assert(!text.cut);
    text_free(&text);
}

/* Whether what was packed becomes the text again. */
static bool unpacks_to(const struct gzip *gzip, const struct text *text)
{
    char bytes[256];
    z_stream stream = {.next_in = (Bytef *)gzip->text.bytes,
                       .avail_in = (uInt)gzip->text.used,
                       .next_out = (Bytef *)bytes,
                       .avail_out = sizeof bytes};
    require(inflateInit2(&stream, MAX_WBITS + 16) == Z_OK, "zlib");
    bool is_whole = inflate(&stream, Z_FINISH) == Z_STREAM_END;
    inflateEnd(&stream);
    return is_whole && stream.total_out == text->used && !memcmp(bytes, text->bytes, text->used);
}

Test(exporter_parts, each_scrape_is_packed_by_itself)
{
    struct gzip gzip;
    struct text text = {.bound = 256};
    require(gzip_init(&gzip, 256), "zlib");
    for (int i = 0; i < 3; i++) {
        text_u64(&text, UINT64_C(1234567890123456789) * (unsigned)i);
        require(gzip_compress(&gzip, &text), "scrape %d", i);
        require(unpacks_to(&gzip, &text), "scrape %d", i);
    }
    gzip_free(&gzip);
    text_free(&text);
}

Test(exporter_parts, what_is_too_long_is_not_packed)
{
    struct gzip gzip;
    struct text text = {.bound = 256};
    require(gzip_init(&gzip, 24), "zlib"); /* its head and its end take 18 bytes */
    text_string(&text, "0123456789abcdefghijklmnopqrstuvwxyz");
    cr_expect(!gzip_compress(&gzip, &text));
    text_clear(&text);
    text_string(&text, "x");
    cr_expect(gzip_compress(&gzip, &text), "the next one suffers");
    gzip_free(&gzip);
    text_free(&text);
}

/* ---- clients ---- */

enum { MS = 1000000 };

static struct sockaddr_in v4(uint32_t address)
{
    return (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(address)};
}

static struct sockaddr_in6 v6(const uint8_t (*bytes)[16])
{
    struct sockaddr_in6 address = {.sin6_family = AF_INET6};
    memcpy(address.sin6_addr.s6_addr, bytes, sizeof *bytes);
    return address;
}

static struct clients clients_within(vpmm_exporter_limits *limits)
{
    struct clients clients;
    *limits = vpmm_exporter_config_default().limits;
    require(clients_init(&clients, limits), "host memory");
    return clients;
}

/* A client of its own socket, which leave() closes. */
static struct client *enter(struct clients *clients, const void *from, uint64_t now_ns)
{
    int socket_of_it = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct client *client = clients_enter(clients, socket_of_it, from, now_ns);
    require(socket_of_it >= 0 && client, "a place for a client");
    return client;
}

static void leave(struct client *client)
{
    close(client->socket);
    clients_leave(client);
}

Test(exporter_parts, a_full_house_makes_way_for_a_newer_client)
{
    enum { CLIENTS = 6, MOST = 4 };
    vpmm_exporter_limits limits;
    struct clients clients = clients_within(&limits);
    struct client *client[CLIENTS];
    limits.connections = MOST;
    for (unsigned i = 0; i < CLIENTS; i++) {
        struct sockaddr_in from = v4(0x7f000001 + i);
        client[i] = enter(&clients, &from, (i + 1) * MS);
    }
    for (unsigned i = 0; i < CLIENTS; i++)
        cr_expect_eq(client[i]->leaving, i < CLIENTS - MOST, "client %u", i);
    cr_expect_eq(clients.crowded, CLIENTS - MOST);
    for (unsigned i = 0; i < CLIENTS; i++)
        leave(client[i]);
    clients_free(&clients);
}

/* A refusal is what ends a client in the midst of a request, its first one or a later one. */
Test(exporter_parts, a_deadline_in_a_later_request_is_a_refusal)
{
    vpmm_exporter_limits limits;
    struct clients clients = clients_within(&limits);
    struct sockaddr_in from = v4(0x7f000001);
    const uint64_t late = (uint64_t)(limits.deadline_ms + 1) * MS;
    for (int asks_again = 0; asks_again < 2; asks_again++) {
        struct client *client = enter(&clients, &from, 1);
        clients_begin(&clients, client, MS);
        clients_end(client, true);
        if (asks_again)
            clients_begin(&clients, client, 2 * MS);
        cr_expect_eq(clients_sweep(&clients, 2 * MS), 1 + (uint64_t)limits.deadline_ms * MS);
        cr_expect_eq(clients_sweep(&clients, late), UINT64_MAX);
        cr_expect_eq(clients.deadlines, (uint64_t)asks_again);
        leave(client);
    }
    clients_free(&clients);
}

/* How many of `most` requests at once are served. */
static unsigned served_at_once(struct clients *clients, const struct client *client, unsigned most, uint64_t now_ns)
{
    unsigned served = 0;
    while (served < most && clients_may_ask(clients, client, now_ns))
        served++;
    return served;
}

/*
 * A second's worth at most, however long an address has been silent, and all of what comes to it however often it asks.
 */
Test(exporter_parts, an_address_may_ask_at_its_rate)
{
    vpmm_exporter_limits limits;
    struct clients clients = clients_within(&limits);
    struct sockaddr_in from = v4(0x7f000001), other = v4(0x7f000002);
    limits.requests_per_second = 50;
    struct client *client = enter(&clients, &from, MS);
    cr_expect_eq(served_at_once(&clients, client, 100, MS), 50);
    cr_expect_eq(served_at_once(&clients, client, 100, 901 * MS), 45);
    cr_expect(clients_may_ask(&clients, client, 1001 * MS));
    cr_expect_eq(served_at_once(&clients, client, 100, UINT64_C(1901) * MS), 49, "the rest of five, and 45");
    cr_expect_eq(served_at_once(&clients, client, 100, UINT64_C(9000) * MS), 50);
    cr_expect_eq(served_at_once(&clients, client, 1, UINT64_C(9900) * MS), 1);
    cr_expect_eq(served_at_once(&clients, client, 100, UINT64_C(10800) * MS), 50, "the rim of a second's worth");
    unsigned served = 0;
    for (unsigned i = 1; i <= 1250; i++) /* every 0.8 ms for a second */
        served += clients_may_ask(&clients, client, UINT64_C(10800) * MS + i * UINT64_C(800000));
    cr_expect(served >= 49 && served <= 50, "%u in a second", served);
    struct client *newer = enter(&clients, &other, UINT64_C(11800) * MS);
    cr_expect_eq(served_at_once(&clients, newer, 100, UINT64_C(11800) * MS), 50, "another address");
    leave(client), leave(newer);
    clients_free(&clients);
}

/* IPv4 whole, however it is written, and IPv6 by its first eight bytes. */
Test(exporter_parts, clients_are_told_apart_by_their_addresses)
{
    static const uint8_t one_mapped[16] = {[10] = 0xff, 0xff, 127, 0, 0, 1},
                         two_mapped[16] = {[10] = 0xff, 0xff, 127, 0, 0, 2}, host[16] = {0x20, 1, [7] = 7, [15] = 1},
                         neighbour[16] = {0x20, 1, [7] = 7, [8] = 9, [15] = 2},
                         stranger[16] = {0x20, 1, [7] = 8, [15] = 1}, as_v4[16] = {127, 0, 0, 1};
    struct sockaddr_in one = v4(0x7f000001), two = v4(0x7f000002);
    struct sockaddr_in6 from[] = {v6(&one_mapped), v6(&two_mapped), v6(&host),
                                  v6(&neighbour),  v6(&stranger),   v6(&as_v4)};
    const struct {
        const void *one, *other;
        bool are_same;
    } cases[] = {{&one, &from[0], true},      {&two, &from[1], true},     {&one, &two, false},
                 {&from[0], &from[1], false}, {&from[2], &from[3], true}, {&from[2], &from[4], false},
                 {&one, &from[5], false}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        vpmm_exporter_limits limits;
        struct clients clients = clients_within(&limits);
        limits.requests_per_second = 1;
        struct client *client = enter(&clients, cases[i].one, MS), *other = enter(&clients, cases[i].other, MS);
        cr_expect(clients_may_ask(&clients, client, MS));
        cr_expect_eq(clients_may_ask(&clients, other, MS), !cases[i].are_same, "case %zu", i);
        leave(client), leave(other);
        clients_free(&clients);
    }
}

/* ---- settings ---- */

/* A password may be asked for without TLS where it does not leave the machine. */
Test(exporter_parts, loopback_however_it_is_written)
{
    static const struct {
        const char *address;
        vpmm_status status;
    } cases[] = {{"127.0.0.1", VPMM_SUCCESS},
                 {"127.3.2.1", VPMM_SUCCESS},
                 {"::1", VPMM_SUCCESS},
                 {"::ffff:127.0.0.1", VPMM_SUCCESS},
                 {"::ffff:10.0.0.1", VPMM_ERROR_INVALID_VALUE},
                 {"::ffff:0.0.0.0", VPMM_ERROR_INVALID_VALUE},
                 {"10.0.0.1", VPMM_ERROR_INVALID_VALUE},
                 {"fe80::1", VPMM_ERROR_INVALID_VALUE}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct settings settings;
        vpmm_exporter_config config = vpmm_exporter_config_default();
        config.address = cases[i].address;
        config.auth_user = "scraper";
        config.auth_hash = "$5$rounds=1000$salt$0000000000000000000000000000000000000000000"; /* of no password */
        vpmm_status status = settings_read(&settings, &config);
        cr_expect_eq(status, cases[i].status, "%s: %s", cases[i].address, vpmm_status_name(status));
        if (status == VPMM_SUCCESS)
            settings_free(&settings);
    }
}

/* ---- what is told ---- */

Test(exporter_parts, names_are_utf_8_to_the_last_byte)
{
    cr_expect(pools_name_is_good("\xe2\x82\xac"));
    cr_expect_not(pools_name_is_good("\xe2\x82\xff"));
    cr_expect_not(pools_name_is_good("\xe2\x82\xc0"));
    cr_expect_not(pools_name_is_good("\xf0\x9f\x92\xff"));
}

Test(exporter_parts, what_is_resident_is_a_part_of_what_is_virtual)
{
    struct self self;
    self_open(&self);
    struct self_usage usage = self_read(&self);
    self_close(&self);
    cr_expect_gt(usage.resident_bytes, 0);
    cr_expect_lt(usage.resident_bytes, usage.virtual_bytes);
}

/* By a kernel that does not say the number: the directory that lists the same descriptors is of no size in any. */
Test(exporter_parts, descriptors_that_have_to_be_counted)
{
    enum { MOST = 4096 }; /* no descriptor here has such a number */
    struct self self;
    uint64_t open_fds = 0;
    DIR *directory = opendir("/proc/self/fdinfo");
    cr_assert(directory);
    self_open(&self);
    int fds = self.fds;
    self.fds = dirfd(directory);
    for (int fd = 0; fd < MOST; fd++)
        open_fds += dup2(fd, fd) == fd;
    for (int i = 0; i < 2; i++) /* the second time it begins at the front again */
        cr_expect_eq(self_read(&self).open_fds, open_fds);
    self.fds = fds;
    self_close(&self);
    closedir(directory);
}

/* By two drivers; of one driver each is told once. */
Test(exporter_parts, devices_of_one_number_are_told_apart)
{
    static struct snapshot pool[3] = {{.name = "a", .device = {.name = "one", .uuid = "u"}},
                                      {.name = "b", .device = {.name = "one", .uuid = "v"}},
                                      {.name = "c", .device = {.name = "one", .uuid = "u"}}};
    struct metrics metrics = {.pool = pool, .pools = 3};
    struct text text = {.bound = METRICS_BYTES + 3 * METRICS_BYTES_A_POOL};
    for (int i = 0; i < 3; i++)
        for (int j = 0; j < VPMM_DRIVER_CALLS; j++)
            pool[i].calls[j].call = "call";
    metrics_write(&metrics, &text);
    text_append(&text, "", 1);
    unsigned told = 0;
    for (const char *at = text.bytes; (at = strstr(at, "\nvpmm_device_info{")); at++)
        told++;
    cr_expect_eq(told, 2);
    text_free(&text);
}
