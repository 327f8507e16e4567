/*
 * vpmm-regions - what a malloc and free pair costs in tiers 2 and 3 with many free regions.
 *
 * For 16, 256, 2,048 and 16,384 free regions, each one or two pages long and kept from merging by a live page: batches
 * of mallocs, then of frees, timed apart from the draining between them; the median of the rounds. Tier 2 is the memory
 * that a stream has freed itself and no other may use yet, tier 3 what another stream freed and is done with. The last
 * column is the cost over that with 16 regions; that it stays below 2 is the aim.
 */
#include <errno.h>
#include <getopt.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "option.h"
#include "target.h"
#include "timing.h"

const char program_name[] = "vpmm-regions";

#define PAGE ((size_t)2 << 20)

enum { BATCH = 8, WARM_UP = 8 };
static const size_t counts[] = {16, 256, 2048, 16384};
enum { COUNTS = sizeof counts / sizeof counts[0] };

struct bench {
    gpu gpu;
    vpmm_pool *pool;
    CUstream freeing, asking;
    CUdeviceptr *wall; /* the live page after each region */
    size_t regions;
};

struct result {
    size_t regions;
    int tier;
    double ns, factor;
};

static void die(const char *what)
{
    fprintf(stderr, "vpmm-regions: %s: %s\n", what, vpmm_last_error());
    exit(1);
}

static CUdeviceptr take(struct bench *b, size_t pages, CUstream stream)
{
    CUdeviceptr p = 0;
    if (vpmm_malloc(b->pool, pages * PAGE, stream, &p) != VPMM_SUCCESS)
        die("vpmm_malloc");
    return p;
}

static void give(struct bench *b, CUdeviceptr p, CUstream stream)
{
    if (vpmm_free(b->pool, p, stream) != VPMM_SUCCESS)
        die("vpmm_free");
}

static void drain(struct bench *b)
{
    for (int i = 0; i < 4; i++) {
        vpmm_sim_step(b->gpu.sim, b->freeing, SIZE_MAX);
        vpmm_sim_step(b->gpu.sim, b->asking, SIZE_MAX);
        if (vpmm_poll(b->pool) != VPMM_SUCCESS)
            die("vpmm_poll");
    }
}

static void open_gpu(struct bench *b, size_t pages)
{
    vpmm_sim_config sim = vpmm_sim_config_default();
    sim.stepped = true;
    sim.memory_bytes = (pages + 64) * PAGE;
    if (!gpu_open(&b->gpu, &(gpu_options){.sim = &sim}) ||
        !gpu_ok(&b->gpu, "cuStreamCreate", b->gpu.driver->cuStreamCreate(&b->freeing, CU_STREAM_NON_BLOCKING)) ||
        !gpu_ok(&b->gpu, "cuStreamCreate", b->gpu.driver->cuStreamCreate(&b->asking, CU_STREAM_NON_BLOCKING)))
        exit(1);
}

static void open_bench(struct bench *b, size_t regions)
{
    size_t pages = 3 * regions;
    b->regions = regions;
    open_gpu(b, pages);
    vpmm_config config = vpmm_config_default();
    config.driver = b->gpu.driver;
    config.page_size = PAGE;
    config.initial_pages = pages;
    config.reaper = false;
    config.decay_ms = VPMM_DECAY_NEVER; /* what is found does not depend on the time that it takes */
    config.cache_bytes = 0;
    config.small = VPMM_SMALL_ASYNC;
    if (vpmm_pool_create(&config, &b->pool) != VPMM_SUCCESS)
        die("vpmm_pool_create");
}

/* Regions freed on `freeing`, each between two live pages. Allocated in turn, they lie in turn. */
static void lay_out(struct bench *b)
{
    CUdeviceptr *region = malloc(b->regions * sizeof *region);
    b->wall = malloc(b->regions * sizeof *b->wall);
    if (region == NULL || b->wall == NULL)
        die("no memory");
    for (size_t i = 0; i < b->regions; i++) {
        region[i] = take(b, 1 + i % 2, b->freeing);
        b->wall[i] = take(b, 1, b->freeing);
    }
    for (size_t i = 0; i < b->regions; i++)
        give(b, region[i], b->freeing);
    free(region);
}

static void close_bench(struct bench *b)
{
    for (size_t i = 0; i < b->regions; i++)
        give(b, b->wall[i], b->freeing);
    free(b->wall);
    if (vpmm_pool_destroy(b->pool) != VPMM_SUCCESS)
        die("vpmm_pool_destroy");
    b->gpu.driver->cuStreamDestroy(b->freeing);
    b->gpu.driver->cuStreamDestroy(b->asking);
    if (vpmm_sim_races(b->gpu.sim) != 0 || gpu_close(&b->gpu) != 0)
        die("the simulator");
}

/* Nanoseconds a pair. Tier 2: on the stream that freed. Tier 3: on the other, once the fences have passed. */
static double one_round(struct bench *b, int tier)
{
    CUstream stream = tier == 2 ? b->freeing : b->asking;
    CUdeviceptr p[BATCH];
    uint64_t begin = now_ns();
    for (size_t i = 0; i < BATCH; i++)
        p[i] = take(b, 1 + i % 2, stream);
    for (size_t i = 0; i < BATCH; i++)
        give(b, p[i], stream);
    uint64_t end = now_ns();
    if (tier == 3)
        drain(b);
    return (end - begin) / BATCH;
}

static double measure(size_t regions, int tier, size_t rounds)
{
    struct bench b;
    double *ns = malloc(rounds * sizeof *ns);
    if (ns == NULL)
        die("no memory");
    open_bench(&b, regions);
    lay_out(&b);
    if (tier == 3)
        drain(&b);
    for (int i = 0; i < WARM_UP; i++)
        (void)one_round(&b, tier);
    vpmm_stats before, after;
    if (vpmm_stats_get(b.pool, &before) != VPMM_SUCCESS)
        die("vpmm_stats_get");
    for (size_t i = 0; i < rounds; i++)
        ns[i] = one_round(&b, tier);
    (void)vpmm_stats_get(b.pool, &after);
    uint64_t hits =
        tier == 2 ? after.hits_own_stream - before.hits_own_stream : after.hits_completed - before.hits_completed;
    if (hits != rounds * BATCH) {
        fprintf(stderr, "vpmm-regions: only %llu of %zu mallocs were of tier %d\n", (unsigned long long)hits,
                rounds * BATCH, tier);
        exit(1);
    }
    qsort(ns, rounds, sizeof *ns, compare_doubles);
    double median = ns[rounds / 2];
    free(ns);
    close_bench(&b);
    return median;
}

static void print_json(FILE *out, const struct result *results, size_t n)
{
    fprintf(out, "[\n");
    for (size_t i = 0; i < n; i++)
        fprintf(out, "  {\"tier\": %d, \"regions\": %zu, \"pair_ns\": %.1f, \"factor\": %.3f}%s\n", results[i].tier,
                results[i].regions, results[i].ns, results[i].factor, i + 1 < n ? "," : "");
    fprintf(out, "]\n");
}

static void print_text(const struct result *results, size_t n)
{
    printf("tier  regions  ns a pair  factor\n");
    for (size_t i = 0; i < n; i++)
        printf("%4d  %7zu  %9.1f  %6.2f\n", results[i].tier, results[i].regions, results[i].ns, results[i].factor);
}

static const char help[] =
    "usage: vpmm-regions [OPTION]...\n"
    "\n"
    "What a malloc and free pair costs with 16 to 16,384 free regions, on the simulated GPU: in memory that a stream\n"
    "has freed itself (tier 2), and in what another one has freed and is done with (tier 3).\n"
    "\n"
    "  --rounds N     the median of so many (default 20000)\n"
    "  --json FILE|-  an array to FILE or to standard output, in place of the table\n"
    "  --help         this text\n"
    "\n"
    "The factor is the cost over that with 16 regions: below 2 is the aim.\n"
    "Exit status: 0 measured, 1 the output could not be written, 2 wrong usage.\n";

struct options {
    const char *json; /* NULL: a table */
    uint64_t rounds;
};

static bool take_option(int option, struct options *o)
{
    switch (option) {
    case 'r':
        return option_number("rounds", optarg, 1, 1000000000, &o->rounds);
    case 'j':
        o->json = optarg;
        return true;
    case 'h':
        fputs(help, stdout);
        exit(0);
    default: /* getopt_long has told */
        return false;
    }
}

static bool parse_options(int argc, char **argv, struct options *o)
{
    static const struct option names[] = {{"rounds", required_argument, NULL, 'r'},
                                          {"json", required_argument, NULL, 'j'},
                                          {"help", no_argument, NULL, 'h'},
                                          {NULL, 0, NULL, 0}};
    int option;
    *o = (struct options){.rounds = 20000};
    while ((option = getopt_long(argc, argv, "", names, NULL)) != -1)
        if (!take_option(option, o))
            return false;
    if (optind == argc)
        return true;
    fprintf(stderr, "vpmm-regions: '%s': only options are allowed\n", argv[optind]);
    return false;
}

/* False: it could not be written, which is said. */
static bool print(const char *json, const struct result *results, size_t n)
{
    if (!json || strcmp(json, "-") == 0) {
        if (json)
            print_json(stdout, results, n);
        else
            print_text(results, n);
        return output_is_whole();
    }
    FILE *out = fopen(json, "w");
    if (out)
        print_json(out, results, n);
    bool is_written = out && !ferror(out);
    if (out && fclose(out) != 0)
        is_written = false;
    if (!is_written)
        fprintf(stderr, "vpmm-regions: %s: %s\n", json, strerror(errno));
    return is_written;
}

int main(int argc, char **argv)
{
    struct options o;
    struct result results[2 * COUNTS];
    size_t n = 0;
    if (!parse_options(argc, argv, &o)) {
        fprintf(stderr, "vpmm-regions: see vpmm-regions --help\n");
        return 2;
    }
    for (int tier = 2; tier <= 3; tier++)
        for (size_t i = 0; i < COUNTS; i++, n++) {
            results[n] = (struct result){.regions = counts[i], .tier = tier, .ns = measure(counts[i], tier, o.rounds)};
            results[n].factor = results[n].ns / results[n - i].ns;
        }
    return print(o.json, results, n) ? 0 : 1;
}
