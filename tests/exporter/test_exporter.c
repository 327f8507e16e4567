/*
 * The exporter as its users meet it: started in one call, scraped in both formats, with pools that come and go, a fork,
 * a full descriptor table, a port in use, wrong settings, passwords and TLS. Clients that mean harm are in
 * test_exporter_clients.c.
 */
#define _GNU_SOURCE
#include "client.h"
#include "support.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <zlib.h>

#include <vpmm/exporter.h>
#include <vpmm/observe.h>

static vpmm_exporter_config quiet_config(void)
{
    vpmm_exporter_config config = vpmm_exporter_config_default();
    config.port = 0;
    config.limits.requests_per_second = 100000;
    config.limits.deadline_ms = 600000; /* a request may take long on a busy machine */
    return config;
}

static vpmm_exporter *start(const vpmm_exporter_config *config)
{
    vpmm_exporter_config quiet = quiet_config();
    vpmm_exporter *exporter = NULL;
    must_work(vpmm_exporter_start(config ? config : &quiet, &exporter));
    return exporter;
}

/* The metrics as text; the test frees it. */
static char *scrape(vpmm_exporter *exporter)
{
    struct reply reply = client_get(vpmm_exporter_port(exporter), "/metrics", "");
    require(reply.status == 200, "a scrape gives %d", reply.status);
    char *text = strdup(reply.body);
    reply_free(&reply);
    return text;
}

static int status_of(vpmm_exporter *exporter, const char *path)
{
    struct reply reply = client_get(vpmm_exporter_port(exporter), path, "");
    int status = reply.status;
    reply_free(&reply);
    return status;
}

/* A number of the pool "p" on device 0, by its metric's name. */
static double of_p(const char *text, const char *metric)
{
    char series[160];
    snprintf(series, sizeof series, "%s{device=\"0\",pool=\"p\"}", metric);
    return sample(text, series);
}

static double part_of_p(const char *text, const char *metric, const char *label, const char *value)
{
    char series[160];
    snprintf(series, sizeof series, "%s{device=\"0\",pool=\"p\",%s=\"%s\"}", metric, label, value);
    return sample(text, series);
}

/* Over every value of the label, whichever there are. */
static double sum_of_p(const char *text, const char *metric, const char *label)
{
    char series[160];
    double sum = 0;
    snprintf(series, sizeof series, "\n%s{device=\"0\",pool=\"p\",%s=\"", metric, label);
    for (const char *at = text; (at = strstr(at, series)) != NULL;) {
        at = strchr(at + 1, '}');
        require(at != NULL, "a sample without an end");
        sum += strtod(at + 1, NULL);
    }
    return sum;
}

/* ---- what is served ---- */

Test(exporter, starts_in_one_call_and_serves_what_the_pool_says)
{
    struct world w;
    world_open(&w, NULL);
    CUstream s = world_stream(&w);
    CUdeviceptr live = take(&w, 5, s);
    give(&w, take(&w, 3, s), s);
    vpmm_exporter *exporter = start(NULL);
    must_work(vpmm_exporter_add(exporter, w.pool, "p"));
    char *text = scrape(exporter);
    vpmm_stats stats = stats_of(&w);

/* Each row of the table is a metric of its kind; parts are looked at below. */
#define IS_gauge(name)                 require(of_p(text, "vpmm_" #name) == (double)stats.name, #name);
#define IS_counter(name)               require(of_p(text, "vpmm_" #name "_total") == (double)stats.name, #name);
#define IS_counter_by(label)           IGNORE
#define IS_part_of(sum, value)         IGNORE
#define IS_counter_part_of(sum, value) IS_counter
#define IGNORE(name)
#define LOOK(name, kind, help) IS_##kind(name)
    VPMM_STATS(LOOK)
    free(text);
    must_work(vpmm_exporter_remove(exporter, w.pool));
    must_work(vpmm_exporter_stop(exporter));
    give(&w, live, s);
    world_close(&w);
}

/* Every number of a pool's own, however many there are. */
Test(exporter, each_pool_says_what_it_has_itself)
{
    struct world idle, w;
    world_open(&idle, NULL);
    world_open(&w, NULL);
    CUstream s = world_stream(&w);
    CUdeviceptr live = take(&w, 5, s);
    give(&w, take(&w, 3, s), s);
    vpmm_exporter *exporter = start(NULL);
    must_work(vpmm_exporter_add(exporter, idle.pool, "o"));
    must_work(vpmm_exporter_add(exporter, w.pool, "p"));
    must_work(vpmm_pool_set_attribute(w.pool, VPMM_ATTRIBUTE_MAX_MAPPED, 64 * PAGE));
    char *text = scrape(exporter);
    vpmm_stats stats = stats_of(&w);
    vpmm_latency latency;
    must_work(vpmm_latency_get(w.pool, &latency));
    VPMM_STATS(LOOK)
#define SUM_gauge(name)
#define SUM_counter(name)
#define SUM_counter_by(label)           SUM_BY(#label) SUM_OF
#define SUM_BY(label)                   by = label;
#define SUM_OF(name)                    require(sum_of_p(text, "vpmm_" #name "_total", by) == (double)stats.name, #name);
#define SUM_part_of(sum, value)         IGNORE
#define SUM_counter_part_of(sum, value) IGNORE
#define ADD(name, kind, help)           SUM_##kind(name)
    const char *by;
    VPMM_STATS(ADD)
    cr_expect_eq(of_p(text, "vpmm_max_mapped_bytes"), (double)(64 * PAGE));
    cr_expect_gt(latency.sum_ns, 0);
    cr_expect_float_eq(of_p(text, "vpmm_malloc_duration_seconds_sum"), (double)latency.sum_ns / 1e9, 1e-12);
    free(text);
    must_work(vpmm_exporter_stop(exporter));
    give(&w, live, s);
    world_close(&w);
    world_close(&idle);
}

Test(exporter, a_cap_that_changes)
{
    struct world w;
    world_open(&w, NULL);
    vpmm_exporter *exporter = start(NULL);
    must_work(vpmm_exporter_add(exporter, w.pool, "p"));
    must_work(vpmm_pool_set_attribute(w.pool, VPMM_ATTRIBUTE_MAX_MAPPED, 64 * PAGE));
    char *text = scrape(exporter);
    cr_assert_eq(of_p(text, "vpmm_max_mapped_bytes"), (double)(64 * PAGE));
    free(text);
    must_work(vpmm_exporter_remove(exporter, w.pool));
    must_work(vpmm_exporter_stop(exporter));
    world_close(&w);
}

Test(exporter, the_identities_hold_at_rest)
{
    struct world w;
    world_open(&w, NULL);
    CUstream s = world_stream(&w);
    CUdeviceptr live = take(&w, 6, s), freed = take(&w, 3, s), between = take(&w, 2, s);
    give(&w, freed, s);
    world_step(&w);
    CUdeviceptr moved = take(&w, 40, s); /* the three are moved there, and leave an old address */
    vpmm_exporter *exporter = start(NULL);
    must_work(vpmm_exporter_add(exporter, w.pool, "p"));
    char *text = scrape(exporter);
    double mapped = of_p(text, "vpmm_mapped_bytes"), hole = of_p(text, "vpmm_hole_bytes");
    double pending = of_p(text, "vpmm_pending_unmap_bytes");
    cr_assert_gt(of_p(text, "vpmm_live_bytes"), 0);
    cr_assert_eq(mapped, of_p(text, "vpmm_live_bytes") + of_p(text, "vpmm_reusable_bytes"));
    cr_assert_eq(of_p(text, "vpmm_reserved_bytes"), mapped + hole + pending);
    free(text);
    must_work(vpmm_exporter_stop(exporter));
    give(&w, live, s);
    give(&w, between, s);
    give(&w, moved, s);
    world_close(&w);
}

Test(exporter, parts_sum_to_what_they_are_parts_of)
{
    struct world w;
    world_open(&w, NULL);
    CUstream s = world_stream(&w);
    for (int i = 0; i < 20; i++)
        give(&w, take_bytes(&w, i % 3 ? (size_t)(i % 5 + 1) << 21 : 1000, s), s);
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_malloc(w.pool, 0, s, &(CUdeviceptr){0}));
    must_fail(VPMM_ERROR_INVALID_POINTER, vpmm_free(w.pool, 12345, s));
    vpmm_exporter *exporter = start(NULL);
    must_work(vpmm_exporter_add(exporter, w.pool, "p"));
    char *text = scrape(exporter);
    vpmm_stats stats = stats_of(&w);
    double mallocs = sum_of_p(text, "vpmm_mallocs_total", "tier"), frees = sum_of_p(text, "vpmm_frees_total", "tier");
    double calls = 0;
    for (const char *const *tier =
             (const char *const[]){"cache", "own_stream", "neighbour", "completed", "waited", "async", "build", NULL};
         *tier; tier++)
        require(part_of_p(text, "vpmm_mallocs_total", "tier", *tier) >= 0, "mallocs of %s", *tier);
    for (const char *const *tier = (const char *const[]){"cache", "pages", "async", NULL}; *tier; tier++)
        require(part_of_p(text, "vpmm_frees_total", "tier", *tier) >= 0, "frees of %s", *tier);
#define ADD_CALLS(name, version, parameters, arguments)                                                                \
    calls += part_of_p(text, "vpmm_driver_calls_total", "call", #name);                                                \
    require(part_of_p(text, "vpmm_driver_errors_total", "call", #name) >= 0, #name);
    VPMM_DRIVER_ENTRIES(ADD_CALLS)
    cr_assert_eq(mallocs, stats.mallocs);
    cr_assert_eq(mallocs, 20);
    cr_assert_eq(frees, stats.frees);
    cr_assert_eq(frees, 20);
    cr_assert_eq(calls, stats.driver_calls);
    cr_assert_eq(part_of_p(text, "vpmm_failures_total", "status", "invalid_value"), 1);
    cr_assert_eq(part_of_p(text, "vpmm_failures_total", "status", "invalid_pointer"), 1);
    cr_assert_eq(stats.failures, 2);
    free(text);
    must_work(vpmm_exporter_stop(exporter));
    world_close(&w);
}

Test(exporter, front_caches_are_a_tier_of_both)
{
    struct world w;
    struct setup setup = setup_default();
    setup.pool.cache_bytes = (size_t)64 << 20;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    for (int i = 0; i < 20; i++)
        give(&w, take(&w, 2, s), s);
    vpmm_stats stats = stats_of(&w);
    cr_assert_eq(stats.mallocs, 20);
    cr_assert_eq(stats.frees, 20);
    vpmm_exporter *exporter = start(NULL);
    must_work(vpmm_exporter_add(exporter, w.pool, "p"));
    char *text = scrape(exporter);
    cr_assert_geq(part_of_p(text, "vpmm_mallocs_total", "tier", "cache"), 15);
    cr_assert_geq(part_of_p(text, "vpmm_frees_total", "tier", "cache"), 15);
    cr_assert_eq(part_of_p(text, "vpmm_frees_total", "tier", "cache") +
                     part_of_p(text, "vpmm_frees_total", "tier", "pages"),
                 20);
    free(text);
    must_work(vpmm_exporter_stop(exporter));
    must_work(vpmm_stream_release(w.pool, s));
    world_close(&w);
}

Test(exporter, mallocs_that_ask_the_driver_are_timed)
{
    struct world w;
    world_open(&w, NULL);
    CUstream s = world_stream(&w);
    vpmm_latency latency;
    give(&w, take(&w, 4, s), s);
    give(&w, take(&w, 4, s), s); /* a hit: not timed */
    must_work(vpmm_latency_get(w.pool, &latency));
    uint64_t count = 0;
    for (int i = 0; i < VPMM_LATENCY_BUCKETS; i++)
        count += latency.count[i];
    cr_assert_eq(count, 1);
    cr_assert_gt(latency.sum_ns, 0);
    vpmm_exporter *exporter = start(NULL);
    must_work(vpmm_exporter_add(exporter, w.pool, "p"));
    char *text = scrape(exporter);
    cr_assert_eq(of_p(text, "vpmm_malloc_duration_seconds_count"), 1);
    cr_assert_eq(part_of_p(text, "vpmm_malloc_duration_seconds_bucket", "le", "+Inf"), 1);
    for (int i = 0; i < VPMM_LATENCY_BUCKETS - 1; i++) { /* of up to 2^i us each: see observe.h */
        char bound[32];
        snprintf(bound, sizeof bound, "%.6f", (double)(1 << i) / 1e6);
        cr_assert_geq(part_of_p(text, "vpmm_malloc_duration_seconds_bucket", "le", bound), 0, "%s", bound);
    }
    cr_assert_float_eq(of_p(text, "vpmm_malloc_duration_seconds_sum"), (double)latency.sum_ns / 1e9, 1e-12);
    free(text);
    must_work(vpmm_exporter_stop(exporter));
    world_close(&w);
}

Test(exporter, driver_errors_are_told_by_call)
{
    needs_simulator();
    struct world w;
    world_open(&w, NULL);
    CUdeviceptr p;
    CUstream s = world_stream(&w);
    vpmm_call_counts counts[VPMM_DRIVER_CALLS];
    vpmm_sim_fail(w.sim, "cuMemCreate", 1, CUDA_ERROR_UNKNOWN, true);
    must_fail(VPMM_ERROR_DRIVER, vpmm_malloc(w.pool, PAGE, s, &p));
    vpmm_sim_fail(w.sim, "cuMemCreate", 0, CUDA_SUCCESS, false);
    must_work(vpmm_calls_get(w.pool, counts));
    vpmm_stats stats = stats_of(&w);
    for (int i = 0; i < VPMM_DRIVER_CALLS; i++)
        require(!counts[i].failed ||
                    (!strcmp(counts[i].call, "cuMemCreate") && counts[i].failed == stats.driver_errors),
                "%s", counts[i].call);
    cr_assert_gt(stats.driver_errors, 0);
    cr_assert_eq(stats.failed_driver, 1);
    vpmm_exporter *exporter = start(NULL);
    must_work(vpmm_exporter_add(exporter, w.pool, "p"));
    char *text = scrape(exporter);
    cr_assert_eq(part_of_p(text, "vpmm_driver_errors_total", "call", "cuMemCreate"), stats.driver_errors);
    cr_assert_eq(sum_of_p(text, "vpmm_driver_errors_total", "call"), stats.driver_errors);
    cr_assert_gt(sum_of_p(text, "vpmm_driver_calls_total", "call"), stats.driver_errors);
    free(text);
    must_work(vpmm_exporter_stop(exporter));
    world_close(&w);
}

static double questions_of_capture(const char *text, const char *pool)
{
    char series[160];
    snprintf(series, sizeof series, "vpmm_driver_calls_total{device=\"0\",pool=\"%s\",call=\"cuStreamIsCapturing\"}",
             pool);
    return sample(text, series);
}

/* Two of the alerts know a graph's pool by this, and are silent: whatever it is asked for, it asks no stream. */
Test(exporter, a_graphs_pool_asks_no_stream_whether_it_captures_and_others_do)
{
    struct world w, graph;
    struct setup setup = setup_default();
    setup.pool.graph = true;
    world_open(&graph, &setup);
    setup = setup_default();
    setup.pool.cache_bytes = (size_t)64 << 20;
    world_open(&w, &setup);
    CUstream of_graph = world_stream(&graph), further = world_stream(&graph);
    CUstream streams[] = {of_graph, CU_STREAM_LEGACY, CU_STREAM_PER_THREAD};
    for (size_t i = 0; i < sizeof streams / sizeof *streams; i++) {
        give(&graph, take(&graph, 2, streams[i]), streams[i]);
        give(&graph, take_bytes(&graph, 1000, streams[i]), streams[i]);
    }
    CUdeviceptr used = take(&graph, 2, of_graph);
    must_work(vpmm_use(graph.pool, used, further));
    give(&graph, used, of_graph);
    must_work(vpmm_poll(graph.pool));
    must_work(vpmm_trim(graph.pool, 0, NULL));
    must_work(vpmm_stream_release(graph.pool, of_graph));
    must_work(vpmm_park(graph.pool));
    must_work(vpmm_wake(graph.pool));
    give(&w, take(&w, 2, CU_STREAM_LEGACY), CU_STREAM_LEGACY);
    vpmm_exporter *exporter = start(NULL);
    must_work(vpmm_exporter_add(exporter, graph.pool, "graph"));
    must_work(vpmm_exporter_add(exporter, w.pool, "p"));
    char *text = scrape(exporter);
    cr_expect_eq(questions_of_capture(text, "graph"), 0);
    cr_expect_gt(questions_of_capture(text, "p"), 0);
    free(text);
    must_work(vpmm_exporter_stop(exporter));
    world_close(&w);
    world_close(&graph);
}

Test(exporter, the_device_is_named_once)
{
    needs_simulator();
    struct world w;
    vpmm_pool *other;
    vpmm_device device;
    world_open(&w, NULL);
    struct setup setup = setup_default();
    setup.pool.driver = w.driver;
    must_work(vpmm_pool_create(&setup.pool, &other));
    must_work(vpmm_device_get(w.pool, &device));
    cr_assert_str_eq(device.name, "vpmm simulated GPU");
    cr_assert_eq(strlen(device.uuid), 40);
    vpmm_exporter *exporter = start(NULL);
    must_work(vpmm_exporter_add(exporter, w.pool, "p"));
    must_work(vpmm_exporter_add(exporter, other, "q"));
    while (clock() < CLOCKS_PER_SEC / 4) /* this thread's time, and none of the exporter's */
        ;
    char *text = scrape(exporter), *at = strstr(text, "vpmm_device_info{");
    cr_assert(at && !strstr(at + 1, "vpmm_device_info{"));
    cr_assert(strstr(at, device.uuid) && strstr(at, device.name));
    cr_assert(strstr(text, "vpmm_build_info{version=\""));
    cr_assert_gt(sample(text, "process_resident_memory_bytes"), 1e5);
    cr_assert_gt(sample(text, "process_cpu_seconds_total"), 0);
    cr_assert_lt(sample(text, "vpmm_exporter_cpu_seconds_total"), sample(text, "process_cpu_seconds_total") / 2);
    cr_assert_gt(sample(text, "process_open_fds"), 3);
    cr_assert_float_eq(sample(text, "process_start_time_seconds"), (double)time(NULL), 600);
    free(text);
    must_work(vpmm_exporter_stop(exporter));
    must_work(vpmm_pool_destroy(other));
    world_close(&w);
}

/* Families are contiguous, with one HELP and one TYPE each before their samples; no series is there twice. */
Test(exporter, the_text_keeps_the_rules_of_its_format)
{
    struct world w;
    world_open(&w, NULL);
    vpmm_exporter *exporter = start(NULL);
    must_work(vpmm_exporter_add(exporter, w.pool, "quote \" backslash \\ line\nfeed \xc3\xa9"));
    char *text = scrape(exporter), *seen = calloc(1, strlen(text) + 2), *line, *rest = text;
    char type[128] = "";
    cr_assert_eq(text[strlen(text) - 1], '\n');
    cr_assert(strstr(text, "pool=\"quote \\\" backslash \\\\ line\\nfeed \xc3\xa9\""));
    while ((line = strsep(&rest, "\n")) && *line) {
        char key[512] = "\n";
        if (!strncmp(line, "# TYPE ", 7))
            sscanf(line + 7, "%127s", type);
        size_t length = line[0] == '#' ? strcspn(line + 7, " ") + 8 : strcspn(line, " ");
        if (line[0] != '#') {
            char *end = strrchr(line, ' ');
            length = (size_t)(end - line) + 1;
            require(!strncmp(line, type, strlen(type)), "%s is not under its TYPE", line);
        }
        strncat(key, line, length);
        require(!strstr(seen, key), "%s is there twice", line);
        strcat(seen, key);
    }
    free(seen);
    free(text);
    must_work(vpmm_exporter_stop(exporter));
    world_close(&w);
}

Test(exporter, openmetrics_and_gzip_are_served_to_who_prefers_them)
{
    struct world w;
    world_open(&w, NULL);
    vpmm_exporter *exporter = start(NULL);
    uint16_t port = vpmm_exporter_port(exporter);
    must_work(vpmm_exporter_add(exporter, w.pool, "p"));
    struct reply plain = client_get(port, "/metrics", "");
    cr_assert(strstr(plain.bytes, "Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"));
    cr_assert(strstr(plain.body, "# TYPE vpmm_builds_total counter\n"));
    cr_assert(strstr(plain.bytes, "Vary: Accept, Accept-Encoding\r\n"));
    struct reply open = client_get(
        port, "/metrics", "Accept: application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5\r\n");
    cr_assert(strstr(open.bytes, "Content-Type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\n"));
    cr_assert(strstr(open.body, "# TYPE vpmm_builds counter\n"));
    cr_assert(strstr(open.body, "# TYPE vpmm_build info\n"));
    cr_assert_str_eq(open.body + open.body_count - 6, "# EOF\n");
    struct reply packed = client_get(port, "/metrics", "Accept-Encoding: br, gzip;q=0.5\r\n");
    cr_assert(strstr(packed.bytes, "Content-Encoding: gzip\r\n"));
    cr_assert_lt(packed.body_count, plain.body_count / 4);
    z_stream stream = {.next_in = (Bytef *)packed.body, .avail_in = (uInt)packed.body_count};
    char *text = calloc(1, REPLY_BYTES);
    stream.next_out = (Bytef *)text;
    stream.avail_out = REPLY_BYTES - 1;
    cr_assert_eq(inflateInit2(&stream, MAX_WBITS + 16), Z_OK);
    cr_assert_eq(inflate(&stream, Z_FINISH), Z_STREAM_END);
    inflateEnd(&stream);
    cr_assert_eq(of_p(text, "vpmm_reserved_bytes"), stats_of(&w).reserved_bytes);
    free(text);
    reply_free(&plain), reply_free(&open), reply_free(&packed);
    must_work(vpmm_exporter_stop(exporter));
    world_close(&w);
}

Test(exporter, other_paths_and_methods)
{
    vpmm_exporter *exporter = start(NULL);
    uint16_t port = vpmm_exporter_port(exporter);
    cr_assert_eq(status_of(exporter, "/"), 200);
    cr_assert_eq(status_of(exporter, "/-/healthy"), 200);
    cr_assert_eq(status_of(exporter, "/-/ready"), 200);
    cr_assert_eq(status_of(exporter, "/metrics?name=x"), 200);
    cr_assert_eq(status_of(exporter, "/metric"), 404);
    cr_assert_eq(status_of(exporter, "/../metrics"), 404);
    cr_assert_eq(status_of(exporter, "/%6Detrics"), 200);
    cr_assert_eq(status_of(exporter, "/metrics%00"), 404);
    cr_assert_eq(status_of(exporter, "/%00metrics"), 404);
    struct reply reply = client_ask_from(1, port, "HEAD", "/metrics", "");
    cr_assert_eq(reply.status, 200);
    cr_assert_eq(reply.body_count, 0);
    cr_assert(strstr(reply.bytes, "Content-Length: ") && !strstr(reply.bytes, "Content-Length: 0"));
    reply_free(&reply);
    for (const char *const *method = (const char *const[]){"POST", "PUT", "DELETE", "OPTIONS", "PATCH", "BREW", NULL};
         *method; method++) {
        reply = client_ask_from(1, port, *method, "/metrics", "Content-Length: 3\r\n");
        require(reply.status == 405 && strstr(reply.bytes, "Allow: GET, HEAD\r\n"), "%s gives %d", *method,
                reply.status);
        reply_free(&reply);
    }
    must_work(vpmm_exporter_stop(exporter));
}

/* The connection ends before anything is done for it. */
Test(exporter, a_get_with_a_body)
{
    vpmm_exporter *exporter = start(NULL);
    char *before = scrape(exporter);
    struct reply reply = client_get(vpmm_exporter_port(exporter), "/metrics", "Content-Length: 3\r\n\r\nabc");
    char *after = scrape(exporter);
    cr_assert_eq(reply.status, 0, "%d", reply.status);
    cr_assert_eq(sample(after, "vpmm_exporter_scrapes_total"), sample(before, "vpmm_exporter_scrapes_total") + 1);
    reply_free(&reply);
    free(before), free(after);
    must_work(vpmm_exporter_stop(exporter));
}

/* RFC 9112 3.2: a server takes the absolute form as well as the path; of the other two forms it has no page. */
Test(exporter, the_absolute_form_names_the_same_pages)
{
    static const struct {
        const char *method, *target;
        int status;
    } cases[] = {{"GET", "http://test/metrics", 200},
                 {"HEAD", "http://test/metrics", 200},
                 {"POST", "http://test/metrics", 405},
                 {"GET", "http://test/metrics?name=x", 200},
                 {"GET", "http://test/", 200},
                 {"GET", "http://test", 200},
                 {"GET", "http://test?name=x/y", 200},
                 {"GET", "HTTP://test/-/healthy", 200},
                 {"GET", "http://test:9464/-/ready", 200},
                 {"GET", "http://[::1]:9464/metrics", 200},
                 {"GET", "http://not.the.host.header/metrics", 200},
                 {"GET", "http://test/metric", 404},
                 {"GET", "http://test//metrics", 404},
                 {"GET", "http://test/http://test/metrics", 404},
                 {"GET", "https://test/metrics", 404}, /* the connection has no TLS */
                 {"GET", "ftp://test/metrics", 404},
                 {"GET", "http:/metrics", 404},
                 {"GET", "http://", 404}, /* and two more without a host */
                 {"GET", "http:///metrics", 404},
                 {"GET", "http://:9464/metrics", 404},
                 {"GET", "http://user@test/metrics", 404},
                 {"GET", "http://user:password@test", 404},
                 {"GET", "//test/metrics", 404},
                 {"OPTIONS", "*", 404},
                 {"CONNECT", "test:9464", 404}};
    vpmm_exporter *exporter = start(NULL);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct reply reply = client_ask_from(1, vpmm_exporter_port(exporter), cases[i].method, cases[i].target, "");
        require(reply.status == cases[i].status, "%s %s gives %d", cases[i].method, cases[i].target, reply.status);
        reply_free(&reply);
    }
    must_work(vpmm_exporter_stop(exporter));
}

Test(exporter, a_connection_serves_many_requests)
{
    vpmm_exporter *exporter = start(NULL);
    static const char two[] = "GET /-/healthy HTTP/1.1\r\nHost: t\r\n\r\n"
                              "GET /-/ready HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n";
    int fd = client_connect(vpmm_exporter_port(exporter));
    cr_assert(client_send(fd, two, sizeof two - 1));
    struct reply reply = client_read(fd);
    cr_assert(strstr(reply.bytes, "healthy\n") && strstr(reply.bytes, "ready\n"), "%s", reply.bytes);
    close(fd);
    reply_free(&reply);
    must_work(vpmm_exporter_stop(exporter));
}

/* ---- health ---- */

Test(exporter, a_lost_driver_is_not_ready)
{
    needs_simulator();
    struct world w, good;
    world_open(&good, NULL);
    world_open(&w, NULL);
    CUstream s = world_stream(&w);
    vpmm_exporter *exporter = start(NULL);
    must_work(vpmm_exporter_add(exporter, w.pool, "p"));
    must_work(vpmm_exporter_add(exporter, good.pool, "q"));
    give(&w, take(&w, 2, s), s);
    vpmm_sim_fail(w.sim, "cuEventQuery", 1, CUDA_ERROR_ILLEGAL_ADDRESS, true);
    must_fail(VPMM_ERROR_DRIVER, vpmm_poll(w.pool));
    struct reply reply = client_get(vpmm_exporter_port(exporter), "/-/ready", "");
    cr_assert_eq(reply.status, 503);
    cr_assert(strstr(reply.body, "pool p: the driver"), "%s", reply.body);
    reply_free(&reply);
    cr_assert_eq(status_of(exporter, "/-/healthy"), 200);
    char *text = scrape(exporter);
    cr_assert_eq(of_p(text, "vpmm_driver_lost"), 1);
    free(text);
    must_work(vpmm_exporter_remove(exporter, w.pool));
    cr_assert_eq(status_of(exporter, "/-/ready"), 200);
    text = scrape(exporter);
    cr_assert_geq(sample(text, "vpmm_driver_lost{device=\"0\",pool=\"q\"}"), 0, "the other one is gone too");
    free(text);
    must_work(vpmm_exporter_stop(exporter));
    world_close(&good);
    vpmm_pool_destroy(w.pool); /* and the simulator's leaks are those of a lost device */
    w.driver->cuStreamDestroy(s);
    vpmm_sim_destroy(w.sim);
}

static atomic_bool query_hangs, is_queried;
static const vpmm_driver *below;

static CUresult CUDAAPI hanging_query(CUevent event)
{
    atomic_store(&is_queried, true);
    for (int ms = 0; ms < CLIENT_PATIENCE_MS && atomic_load(&query_hangs); ms++) /* not for ever, if the test fails */
        usleep(1000);
    return below->cuEventQuery(event);
}

/* Until it is this, or patience ends: what it is then. */
static int becomes(int status, vpmm_exporter *exporter)
{
    uint64_t end = client_now_ms() + CLIENT_PATIENCE_MS;
    int is = status_of(exporter, "/-/ready");
    while (is != status && client_now_ms() < end) {
        usleep(10000);
        is = status_of(exporter, "/-/ready");
    }
    return is;
}

/* Its thread has begun, and has nothing to do. */
static void await_sleep_of(vpmm_pool *pool)
{
    vpmm_health health;
    uint64_t end = client_now_ms() + CLIENT_PATIENCE_MS;
    do {
        usleep(1000);
        must_work(vpmm_health_get(pool, &health));
    } while (health.reaper_age_ns && client_now_ms() < end);
}

/* A pool whose reaper does not come back from the driver, and one whose reaper sleeps because nothing is to be done. */
Test(exporter, a_stalled_reaper_is_not_ready_and_a_sleeping_one_is)
{
    needs_simulator();
    vpmm_sim *sim = vpmm_sim_create(NULL);
    vpmm_driver table = *vpmm_sim_driver(sim);
    vpmm_config config = vpmm_config_default();
    vpmm_exporter_config exporter_config = quiet_config();
    vpmm_pool *pool;
    vpmm_health health;
    CUdeviceptr p;
    CUstream s;
    below = vpmm_sim_driver(sim);
    table.cuEventQuery = hanging_query;
    config.driver = &table;
    config.cache_bytes = 0; /* what is freed waits for its fence, and not in a cache */
    must_work(vpmm_pool_create(&config, &pool));
    exporter_config.limits.reaper_stall_ms = 1000;
    vpmm_exporter *exporter = start(&exporter_config);
    struct world idle;
    world_open(&idle, NULL);
    must_work(vpmm_exporter_add(exporter, idle.pool, "o")); /* whose age is another's */
    must_work(vpmm_exporter_add(exporter, pool, "p"));
    await_sleep_of(pool);
    usleep(1300000);
    must_work(vpmm_health_get(pool, &health));
    cr_assert(health.reaper && !health.lost);
    cr_assert_eq(health.reaper_age_ns, 0, "it sleeps, and looks %lu ns old", health.reaper_age_ns);
    cr_assert_eq(status_of(exporter, "/-/ready"), 200);
    atomic_store(&is_queried, false);
    atomic_store(&query_hangs, true);
    CUcontext context;
    CUdevice device;
    cr_assert_eq(table.cuDeviceGet(&device, 0), CUDA_SUCCESS);
    cr_assert_eq(table.cuDevicePrimaryCtxRetain(&context, device), CUDA_SUCCESS);
    cr_assert_eq(table.cuCtxSetCurrent(context), CUDA_SUCCESS);
    cr_assert_eq(table.cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    must_work(vpmm_malloc(pool, PAGE, s, &p));
    uint64_t hangs_since_ms = client_now_ms();
    must_work(vpmm_free(pool, p, s));
    for (uint64_t end = client_now_ms() + CLIENT_PATIENCE_MS; !atomic_load(&is_queried) && client_now_ms() < end;)
        usleep(1000);
    int status = status_of(exporter, "/-/ready");
    cr_assert(status == 200 || client_now_ms() - hangs_since_ms > 900, "%d, after much less than a second", status);
    becomes(503, exporter);
    struct reply reply = client_get(vpmm_exporter_port(exporter), "/-/ready", "");
    cr_assert_eq(reply.status, 503);
    cr_assert_gt(client_now_ms() - hangs_since_ms, 900);
    cr_assert(strstr(reply.body, "pool p: the reaper"), "%s", reply.body);
    reply_free(&reply);
    char *text = scrape(exporter);
    cr_assert_gt(of_p(text, "vpmm_reaper_age_seconds"), 1);
    free(text);
    atomic_store(&query_hangs, false);
    cr_assert_eq(becomes(200, exporter), 200);
    must_work(vpmm_exporter_stop(exporter));
    world_close(&idle);
    must_work(vpmm_stream_release(pool, s));
    table.cuStreamDestroy(s);
    must_work(vpmm_pool_destroy(pool));
    table.cuDevicePrimaryCtxRelease(device);
    cr_assert_eq(vpmm_sim_destroy(sim), 0);
}

/* Nobody looks for it but vpmm_poll: that nobody has is no trouble. */
Test(exporter, a_pool_without_a_reaper_does_not_stall)
{
    needs_simulator();
    struct world w;
    vpmm_exporter_config config = quiet_config();
    vpmm_health health;
    world_open(&w, NULL);
    CUstream s = world_stream(&w);
    config.limits.reaper_stall_ms = 1000;
    vpmm_exporter *exporter = start(&config);
    must_work(vpmm_exporter_add(exporter, w.pool, "p"));
    give(&w, take(&w, 2, s), s);
    usleep(1100000);
    must_work(vpmm_health_get(w.pool, &health));
    cr_assert(!health.reaper);
    cr_assert_eq(status_of(exporter, "/-/ready"), 200, "%lu ms old", health.reaper_age_ns / 1000000);
    must_work(vpmm_exporter_stop(exporter));
    world_close(&w);
}

/* ---- pools that come and go ---- */

static atomic_bool enough;

static void *scrape_for_ever(void *data)
{
    vpmm_exporter *exporter = data;
    uintptr_t bad = 0;
    while (!atomic_load(&enough)) {
        struct reply reply = client_get(vpmm_exporter_port(exporter), "/metrics", "");
        bad += reply.status != 200;
        reply_free(&reply);
    }
    return (void *)bad;
}

Test(exporter, pools_come_and_go_under_scrapes)
{
    needs_simulator();
    vpmm_sim *sim = vpmm_sim_create(NULL);
    vpmm_config config = vpmm_config_default();
    vpmm_exporter *exporter = start(NULL);
    pthread_t thread;
    void *bad;
    config.driver = vpmm_sim_driver(sim);
    config.va_size = (size_t)1 << 30;
    atomic_store(&enough, false);
    require(pthread_create(&thread, NULL, scrape_for_ever, exporter) == 0, "a thread");
    for (int i = 0; i < 100; i++) {
        vpmm_pool *pool;
        must_work(vpmm_pool_create(&config, &pool));
        must_work(vpmm_exporter_add(exporter, pool, "p"));
        usleep(1000);
        must_work(vpmm_exporter_remove(exporter, pool));
        must_work(vpmm_pool_destroy(pool));
    }
    atomic_store(&enough, true);
    pthread_join(thread, &bad);
    cr_assert_null(bad, "%zu scrapes failed", (size_t)bad);
    must_work(vpmm_exporter_stop(exporter));
    cr_assert_eq(vpmm_sim_destroy(sim), 0);
}

Test(exporter, names_and_pools_are_checked)
{
    struct world w;
    world_open(&w, NULL);
    vpmm_exporter *exporter = start(NULL);
    char longest[130];
    memset(longest, 'x', sizeof longest);
    longest[129] = '\0';
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_exporter_add(NULL, w.pool, "p"));
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_exporter_add(exporter, NULL, "p"));
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_exporter_add(exporter, w.pool, NULL));
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_exporter_add(exporter, w.pool, ""));
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_exporter_add(exporter, w.pool, longest));
    for (const char *const *name = (const char *const[]){"\x80", "\xc0\x80", "\xed\xa0\x80", "\xf5\x80\x80\x80",
                                                         "a\xff", "\xe2\x82", "\xf0\x80\x80\x80", NULL};
         *name; name++)
        must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_exporter_add(exporter, w.pool, *name));
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_exporter_remove(exporter, w.pool));
    longest[128] = '\0';
    must_work(vpmm_exporter_add(exporter, w.pool, longest));
    must_fail(VPMM_ERROR_BUSY, vpmm_pool_destroy(w.pool));
    cr_expect_not_null(strstr(vpmm_last_error(), "vpmm_exporter_remove"), "%s", vpmm_last_error());
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_exporter_add(exporter, w.pool, "again"));
    must_work(vpmm_exporter_remove(exporter, w.pool));
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_exporter_remove(exporter, w.pool));
    must_work(vpmm_exporter_add(exporter, w.pool, "\xf0\x9f\x98\x80 \xe2\x82\xac"));
    must_work(vpmm_exporter_stop(exporter)); /* after which the pool can be destroyed */
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_observe_end(w.pool));
    must_work(vpmm_exporter_stop(NULL));
    cr_assert_eq(vpmm_exporter_port(NULL), 0);
    world_close(&w);
}

Test(exporter, no_more_pools_than_there_is_room_for)
{
    struct setup setup = setup_default();
    struct world w;
    vpmm_pool *pool[VPMM_EXPORTER_POOLS + 1];
    vpmm_exporter *exporter = start(NULL);
    world_open_without_pool(&w, &setup);
    setup.pool.driver = w.driver;
    for (int i = 0; i <= VPMM_EXPORTER_POOLS; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        must_work(vpmm_pool_create(&setup.pool, &pool[i]));
        if (i < VPMM_EXPORTER_POOLS)
            must_work(vpmm_exporter_add(exporter, pool[i], name));
        else
            must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_exporter_add(exporter, pool[i], name));
    }
    must_work(vpmm_exporter_stop(exporter));
    for (int i = 0; i <= VPMM_EXPORTER_POOLS; i++)
        must_work(vpmm_pool_destroy(pool[i]));
    world_close(&w);
}

/* The same name may be a pool's on each device. */
Test(exporter, a_name_is_one_devices)
{
    needs_simulator();
    vpmm_sim_config sim_config = vpmm_sim_config_default();
    sim_config.devices = 2;
    vpmm_sim *sim = vpmm_sim_create(&sim_config);
    vpmm_config config = vpmm_config_default();
    vpmm_exporter *exporter = start(NULL);
    vpmm_pool *pool[3];
    config.driver = vpmm_sim_driver(sim);
    for (int i = 0; i < 3; i++) {
        config.device = i % 2;
        must_work(vpmm_pool_create(&config, &pool[i]));
    }
    must_work(vpmm_exporter_add(exporter, pool[0], "p"));
    must_work(vpmm_exporter_add(exporter, pool[1], "p"));
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_exporter_add(exporter, pool[2], "p"));
    char *text = scrape(exporter);
    cr_assert_geq(sample(text, "vpmm_mapped_bytes{device=\"1\",pool=\"p\"}"), 0);
    cr_assert_geq(of_p(text, "vpmm_mapped_bytes"), 0);
    free(text);
    must_work(vpmm_exporter_stop(exporter));
    for (int i = 0; i < 3; i++)
        must_work(vpmm_pool_destroy(pool[i]));
    cr_assert_eq(vpmm_sim_destroy(sim), 0);
}

/* ---- the process ---- */

static void do_nothing(int signal)
{
    (void)signal;
}

/*
 * A signal of the process's goes to a thread of the program, whose mask is as it was, or waits for one that takes it.
 */
Test(exporter, signals_are_not_for_the_exporter)
{
    sigset_t usr1, now, waiting;
    sigemptyset(&usr1);
    sigaddset(&usr1, SIGUSR1);
    signal(SIGUSR1, do_nothing);
    vpmm_exporter *exporter = start(NULL);
    require(pthread_sigmask(SIG_BLOCK, &usr1, &now) == 0, "a mask");
    cr_expect_not(sigismember(&now, SIGUSR1) || sigismember(&now, SIGTERM), "its start leaves signals blocked");
    kill(getpid(), SIGUSR1);
    usleep(50000);
    cr_assert_eq(status_of(exporter, "/-/healthy"), 200);
    cr_assert(sigpending(&waiting) == 0 && sigismember(&waiting, SIGUSR1) == 1, "the exporter's thread has taken it");
    must_work(vpmm_exporter_stop(exporter));
}

static uint64_t stop_with_clients_ms(void)
{
    enum { CLIENTS = 20 };
    vpmm_exporter *exporter = start(NULL);
    int fds[CLIENTS];
    for (int i = 0; i < CLIENTS; i++) {
        fds[i] = client_connect(vpmm_exporter_port(exporter));
        client_send(fds[i], "GET /metrics HTTP/1.1\r\nHost:", (size_t)(i + 1));
    }
    usleep(50000);
    uint64_t before = client_now_ms();
    must_work(vpmm_exporter_stop(exporter));
    uint64_t took = client_now_ms() - before;
    for (int i = 0; i < CLIENTS; i++)
        close(fds[i]);
    return took;
}

/* A busy machine may stand still meanwhile, but not each time. */
Test(exporter, stops_within_100_ms_with_clients_hanging_on)
{
    enum { TRIES = 20 };
    uint64_t took = stop_with_clients_ms();
    for (int i = 1; i < TRIES && took >= 100; i++)
        took = stop_with_clients_ms();
    fprintf(stderr, "stopping with 20 clients: %lu ms\n", took);
    cr_assert_lt(took, 100, "stopping took %lu ms", took);
}

Test(exporter, a_port_in_use_is_an_error)
{
    vpmm_exporter *first = start(NULL), *second = NULL;
    vpmm_exporter_config config = quiet_config();
    config.port = vpmm_exporter_port(first);
    must_fail(VPMM_ERROR_BUSY, vpmm_exporter_start(&config, &second));
    cr_assert(strstr(vpmm_last_error(), "port") && strstr(vpmm_last_error(), "127.0.0.1"));
    cr_assert_null(second);
    must_work(vpmm_exporter_stop(first));
    must_work(vpmm_exporter_start(&config, &second)); /* at once: connections that linger are in nobody's way */
    must_work(vpmm_exporter_stop(second));
}

Test(exporter, works_with_thousands_of_descriptors)
{
    struct rlimit limit = {4096, 4096};
    require(setrlimit(RLIMIT_NOFILE, &limit) == 0, "4,096 descriptors are allowed");
    while (dup(0) < 2000)
        ;
    vpmm_exporter *exporter = start(NULL);
    cr_assert_eq(status_of(exporter, "/metrics"), 200);
    char *text = scrape(exporter);
    cr_assert_gt(sample(text, "process_open_fds"), 1990);
    cr_assert_eq(sample(text, "process_max_fds"), 4096);
    free(text);
    must_work(vpmm_exporter_stop(exporter));
}

/* Fills the descriptor table: the highest descriptor. */
static int fill_descriptors(void)
{
    int last = -1;
    for (int fd; (fd = dup(0)) >= 0; last = fd)
        ;
    return last;
}

static void connect_to(int client, uint16_t port)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    require(connect(client, (struct sockaddr *)&to, sizeof to) == 0, "the kernel accepts for it");
}

/* The status; 0: the connection was closed without one. */
static int answer_to(int client)
{
    client_say(client, "GET /-/ready HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n");
    struct reply reply = client_read(client);
    int status = reply.status;
    reply_free(&reply);
    close(client);
    return status;
}

/* In which nothing can be accepted: the exporter waits, without burning the processor, and goes on afterwards. */
Test(exporter, outlives_a_full_descriptor_table)
{
    struct rlimit limit = {256, 256};
    require(setrlimit(RLIMIT_NOFILE, &limit) == 0, "256 descriptors are allowed");
    vpmm_exporter *exporter = start(NULL);
    int client = socket(AF_INET, SOCK_STREAM, 0), last = fill_descriptors();
    connect_to(client, vpmm_exporter_port(exporter));
    double before = client_process_s();
    uint64_t begin = client_now_ms();
    usleep(500000);
    double used = client_process_s() - before, slept = (double)(client_now_ms() - begin) / 1000;
    cr_assert_lt(used, slept / 5, "%g s of %g s were burnt", used, slept);
    for (int i = 0; i < 8; i++)
        close(last - i);
    int status = answer_to(client);
    cr_assert_eq(status, 200, "after it: %d", status);
    must_work(vpmm_exporter_stop(exporter));
}

/*
 * Full while others are connected it does not listen; when they have gone it does again, though nothing else happens.
 */
Test(exporter, listens_again_when_those_who_filled_the_descriptor_table_have_gone, .timeout = 600)
{
    enum { IDLE = 20, FREE = 8, TRIES = 20 };
    struct rlimit limit = {256, 256};
    require(setrlimit(RLIMIT_NOFILE, &limit) == 0, "256 descriptors are allowed");
    vpmm_exporter_config config = quiet_config();
    config.limits.deadline_ms = 300;
    vpmm_exporter *exporter = start(&config);
    int idle[IDLE], client = socket(AF_INET, SOCK_STREAM, 0);
    for (int i = 0; i < IDLE; i++)
        idle[i] = socket(AF_INET, SOCK_STREAM, 0);
    int last = fill_descriptors();
    for (int i = 0; i < FREE; i++)
        close(last - i);
    for (int i = 0; i < IDLE; i++)
        connect_to(idle[i], vpmm_exporter_port(exporter));
    usleep(100000);
    connect_to(client, vpmm_exporter_port(exporter));
    uint64_t begin = client_now_ms();
    int status = answer_to(client);
    for (int i = 1; i < TRIES && !status && client_now_ms() - begin < CLIENT_PATIENCE_MS; i++) {
        client = socket(AF_INET, SOCK_STREAM, 0); /* a busy machine kept it beyond its deadline, too */
        connect_to(client, vpmm_exporter_port(exporter));
        status = answer_to(client);
    }
    cr_assert_eq(status, 200, "after it: %d", status);
    must_work(vpmm_exporter_stop(exporter));
}

/* Whether the process has a socket of the port: one that listens, or one end of a connection to it. */
static bool has_socket_of(uint16_t port)
{
    for (int fd = 0; fd < 1024; fd++) {
        struct sockaddr_in address = {0};
        socklen_t bytes = sizeof address;
        if (getsockname(fd, (struct sockaddr *)&address, &bytes) == 0 && address.sin_family == AF_INET &&
            ntohs(address.sin_port) == port)
            return true;
    }
    return false;
}

static int child(vpmm_exporter *exporter, vpmm_pool *pool)
{
    vpmm_exporter *own;
    vpmm_exporter_config config = quiet_config();
    if (has_socket_of(vpmm_exporter_port(exporter)))
        return 5;
    if (vpmm_exporter_add(exporter, pool, "child") != VPMM_ERROR_NOT_SUPPORTED ||
        vpmm_exporter_remove(exporter, pool) != VPMM_ERROR_NOT_SUPPORTED ||
        vpmm_exporter_stop(exporter) != VPMM_ERROR_NOT_SUPPORTED)
        return 1;
    if (vpmm_exporter_start(&config, &own) != VPMM_SUCCESS)
        return 2;
    struct reply reply = client_get(vpmm_exporter_port(own), "/-/ready", "");
    if (reply.status != 200 || vpmm_exporter_stop(own) != VPMM_SUCCESS)
        return 3;
    reply_free(&reply);
    pause(); /* until it is killed: what it holds, it holds */
    return 4;
}

Test(exporter, survives_fork_and_the_child_holds_nothing_of_it)
{
    struct world w;
    world_open(&w, NULL);
    vpmm_exporter *exporter = start(NULL);
    must_work(vpmm_exporter_add(exporter, w.pool, "p"));
    int open = client_connect(vpmm_exporter_port(exporter));
    client_send(open, "GET", 3);
    usleep(20000);
    require(has_socket_of(vpmm_exporter_port(exporter)), "its own sockets are not seen");
    pid_t pid = fork();
    int status = 0;
    if (!pid)
        _exit(child(exporter, w.pool));
    usleep(300000);
    cr_assert_eq(waitpid(pid, &status, WNOHANG), 0, "the child has failed: %d", WEXITSTATUS(status));
    cr_assert_eq(status_of(exporter, "/metrics"), 200);
    vpmm_exporter_config config = quiet_config();
    config.port = vpmm_exporter_port(exporter);
    must_work(vpmm_exporter_stop(exporter));
    char byte;
    cr_assert_eq(recv(open, &byte, 1, 0), 0, "the connection is the parent's alone, and closed");
    close(open);
    must_work(vpmm_exporter_start(&config, &exporter));
    must_work(vpmm_exporter_stop(exporter));
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    world_close(&w);
}

static int descriptors(void)
{
    int count = 0;
    DIR *directory = opendir("/proc/self/fd");
    while (directory && readdir(directory))
        count++;
    if (directory)
        closedir(directory);
    return count;
}

/* Neither sockets nor what it waits by. */
Test(exporter, a_child_has_none_of_its_descriptors)
{
    int before = descriptors(), status = -1;
    vpmm_exporter *exporter = start(NULL);
    cr_assert_gt(descriptors(), before);
    pid_t pid = fork();
    if (pid == 0)
        _exit(descriptors() != before);
    cr_assert_eq(waitpid(pid, &status, 0), pid);
    cr_expect_eq(status, 0, "the child has some");
    must_work(vpmm_exporter_stop(exporter));
}

static atomic_bool connected_enough;

static void *connect_for_ever(void *port)
{
    while (!atomic_load(&connected_enough))
        close(client_connect(*(const uint16_t *)port));
    return NULL;
}

/* Also of a client that is just being accepted, or closed. */
Test(exporter, forks_while_clients_come_and_go)
{
    enum { FORKS = 300 };
    vpmm_exporter *exporter = start(NULL);
    uint16_t port = vpmm_exporter_port(exporter);
    pthread_t thread;
    int holding = 0;
    require(pthread_create(&thread, NULL, connect_for_ever, &port) == 0, "a thread");
    for (int i = 0; i < FORKS; i++) {
        int status = 0;
        pid_t pid = fork();
        if (!pid)
            _exit(has_socket_of(port));
        require(waitpid(pid, &status, 0) == pid, "a child");
        holding += status != 0;
    }
    atomic_store(&connected_enough, true);
    pthread_join(thread, NULL);
    cr_assert_eq(holding, 0, "%d of %d children hold a client's socket", holding, FORKS);
    must_work(vpmm_exporter_stop(exporter));
}

#if defined(__SANITIZE_ADDRESS__)
enum { SCRAPE_US = 10000 };
#else
enum { SCRAPE_US = 1000 };
#endif

Test(exporter, a_scrape_of_four_pools_takes_less_than_a_millisecond)
{
    needs_simulator();
    vpmm_sim *sim = vpmm_sim_create(NULL);
    vpmm_config config = vpmm_config_default();
    vpmm_exporter *exporter = start(NULL);
    vpmm_pool *pools[4];
    config.driver = vpmm_sim_driver(sim);
    config.reaper = false; /* which would make calls of its own */
    for (int i = 0; i < 4; i++) {
        must_work(vpmm_pool_create(&config, &pools[i]));
        must_work(vpmm_exporter_add(exporter, pools[i], (const char[]){(char)('a' + i), '\0'}));
    }
    uint64_t calls = vpmm_sim_calls(sim, NULL);
    enum { ROUNDS = 10, SCRAPES = 10 };
    double us[2] = {1e9, 1e9}; /* the least of the rounds: what else runs on the core takes time of it, too */
    for (int round = 0; round < 2 * ROUNDS; round++) {
        const bool packed = round >= ROUNDS;
        char *text = scrape(exporter);
        double before = sample(text, "vpmm_exporter_cpu_seconds_total");
        free(text);
        for (int i = 0; i < SCRAPES; i++) {
            struct reply reply =
                client_get(vpmm_exporter_port(exporter), "/metrics", packed ? "Accept-Encoding: gzip\r\n" : "");
            reply_free(&reply);
        }
        text = scrape(exporter);
        double each = (sample(text, "vpmm_exporter_cpu_seconds_total") - before) * 1e6 / (SCRAPES + 1);
        us[packed] = each < us[packed] ? each : us[packed];
        free(text);
    }
    fprintf(stderr, "a scrape of 4 pools: %.0f us of CPU, with gzip %.0f\n", us[0], us[1]);
    cr_assert_lt(us[0], SCRAPE_US);
    cr_assert_lt(us[1], SCRAPE_US);
    cr_assert_eq(vpmm_sim_calls(sim, NULL), calls, "a scrape calls the driver");
    for (int i = 0; i < 4; i++) {
        must_work(vpmm_exporter_remove(exporter, pools[i]));
        must_work(vpmm_pool_destroy(pools[i]));
    }
    must_work(vpmm_exporter_stop(exporter));
    cr_assert_eq(vpmm_sim_destroy(sim), 0);
}
