/*
 * vpmm-fragment - what small requests leave behind: memory held before and after most of them are freed, and what large
 * requests then get of it.
 */
#define _GNU_SOURCE 1

#include "option.h"
#include "target.h"
#include "timing.h"

#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const char program_name[] = "vpmm-fragment";

enum { EXIT_BAD = 1, EXIT_USAGE = 2 };
enum { STREAMS = 2, SETTLING_POLLS = 8 };

#define MIB           ((size_t)1 << 20)
#define GIB           ((size_t)1 << 30)
#define MOST_BYTES    (UINT64_C(1) << 40)
#define SMALLEST      256.0
#define LARGEST       (1.5 * (double)MIB)
#define LARGE_AT_MOST ((uint64_t)1 << 16) /* requests */

static const char help[] =
    "usage: vpmm-fragment [OPTION]...\n"
    "\n"
    "Allocates small requests on two streams (256 bytes to 1.5 MiB, each octave as often as the next), frees most of\n"
    "them in no order, and then asks for large ones. Says how much is held at each point.\n"
    "\n"
    "  --driver sim|cuda  the simulated GPU (default), or the first real one\n"
    "  --bytes N          of small requests in sum (default 4G)\n"
    "  --free F           the part of them that is freed, 0 to 1 (default 0.9)\n"
    "  --large N          of large requests in sum (default 3G)\n"
    "  --each N           of one large request (default 64M)\n"
    "  --seed N           of the random numbers (default 1)\n"
    "  --json FILE|-      one object, to FILE or to standard output (the text then goes to standard error); where a\n"
    "                     step failed, the steps before it and \"good\": false\n"
    "  --help             this text\n"
    "\n"
    "Numbers take K, M or G (powers of 1024). vpmm is configured by its VPMM_* environment variables, but that small\n"
    "requests are cut from pages (VPMM_SMALL=slab), the background work is done between the steps, and no memory\n"
    "decays: VPMM_DECAY_MS, VPMM_RELEASE_THRESHOLD and VPMM_REAPER are ignored, and a line on standard error says so.\n"
    "\n"
    "The text: in use are the live requests, rounded to 256 bytes, and from a page up to pages; held is mapped over\n"
    "in use; slabs are the pages that are cut, pieces what is live in them. The held ratio is peak mapped over peak "
    "in\n"
    "use, over all the steps. Times are wall-clock, on sim the simulator's own.\n"
    "\n"
    "Exit status: 0 every request was served, every audit passed, and all was given back at the end; 1 otherwise,\n"
    "also where no pool can be made; 2 wrong usage or settings.\n";

typedef struct options {
    bool cuda;
    uint64_t bytes, large, each, seed;
    double free;
    const char *json;
} options;

/* ---- the pool and what is live ---- */

typedef struct holding {
    CUdeviceptr address;
    size_t bytes;
    CUstream stream;
} holding;

typedef struct bench {
    const options *options;
    gpu gpu;
    vpmm_pool *pool;
    CUstream stream[STREAMS];
    size_t page_size;
    holding *holdings;
    size_t count, room;
    uint64_t in_use, peak_in_use;
    uint64_t random;
} bench;

/* After one step. */
typedef struct level {
    const char *name;
    uint64_t requests, in_use;
    double ns; /* a malloc or free of this step */
    vpmm_stats stats;
} level;

enum { FILLED, FREED, ASKED, GONE, LEVELS };

/* What is known so far, and where it goes. */
static struct result {
    FILE *json; /* NULL: none is asked for */
    options options;
    level levels[LEVELS];
    int done; /* steps */
} result;

static void give_up(int status);

static void die(const char *what)
{
    fprintf(stderr, "vpmm-fragment: %s: %s\n", what, vpmm_last_error());
    give_up(EXIT_BAD);
}

static void need_told(bool ok) /* false: why is on stderr */
{
    if (!ok)
        give_up(EXIT_BAD);
}

static void need_cuda(const bench *b, const char *what, CUresult result)
{
    need_told(gpu_ok(&b->gpu, what, result));
}

static void need(const char *what, vpmm_status status)
{
    if (status != VPMM_SUCCESS)
        die(what);
}

static uint64_t draw(bench *b)
{
    b->random ^= b->random << 13;
    b->random ^= b->random >> 7;
    b->random ^= b->random << 17;
    return b->random >> 11;
}

static size_t draw_small(bench *b)
{
    double part = (double)draw(b) / (double)(UINT64_C(1) << 53);
    return (size_t)(SMALLEST * pow(LARGEST / SMALLEST, part));
}

static void open_gpu(bench *b, int ordinal)
{
    const options *o = b->options;
    vpmm_sim_config sim = vpmm_sim_config_default();
    sim.stepped = true;
    sim.memory_bytes = 2 * (o->bytes + o->large) + GIB;
    need_told(gpu_open(&b->gpu, &(gpu_options){.sim = o->cuda ? NULL : &sim, .ordinal = ordinal}));
    for (int i = 0; i < STREAMS; i++)
        need_cuda(b, "cuStreamCreate", b->gpu.driver->cuStreamCreate(&b->stream[i], CU_STREAM_NON_BLOCKING));
}

static void open_bench(bench *b, const options *o)
{
    vpmm_config config = vpmm_config_default();
    *b = (bench){.options = o, .random = (o->seed + 1) * 0x9e3779b97f4a7c15};
    if (vpmm_config_from_env(&config) != VPMM_SUCCESS) {
        fprintf(stderr, "vpmm-fragment: %s\n", vpmm_last_error());
        give_up(EXIT_USAGE);
    }
    target_tell_no_decay();
    open_gpu(b, config.device);
    need_told(gpu_page_size(&b->gpu, config.page_size, &b->page_size));
    config.driver = b->gpu.driver;
    config.small = VPMM_SMALL_SLAB;
    config.reaper = false;
    config.decay_ms = VPMM_DECAY_NEVER; /* what is found does not depend on the time that it takes */
    vpmm_status status = vpmm_pool_create(&config, &b->pool);
    if (status == VPMM_ERROR_INVALID_VALUE) {
        fprintf(stderr, "vpmm-fragment: %s\n", vpmm_last_error());
        give_up(EXIT_USAGE);
    }
    need("vpmm_pool_create", status);
}

static bool close_bench(bench *b)
{
    for (int i = 0; i < STREAMS; i++) {
        need("vpmm_stream_release", vpmm_stream_release(b->pool, b->stream[i]));
        need_cuda(b, "cuStreamDestroy", b->gpu.driver->cuStreamDestroy(b->stream[i]));
    }
    need("vpmm_pool_destroy", vpmm_pool_destroy(b->pool));
    free(b->holdings);
    return gpu_close(&b->gpu) == 0;
}

/* What a request needs if nothing but the granularity is rounded to. */
static uint64_t use_of(const bench *b, uint64_t bytes)
{
    uint64_t unit = bytes < b->page_size ? 256 : b->page_size;
    return (bytes + unit - 1) / unit * unit;
}

static void make_room(bench *b)
{
    if (b->count < b->room)
        return;
    b->room = 2 * b->room + 1024;
    b->holdings = realloc(b->holdings, b->room * sizeof *b->holdings);
    if (b->holdings == NULL)
        die("the host has no memory");
}

static void take(bench *b, size_t bytes, CUstream stream)
{
    make_room(b);
    holding *h = &b->holdings[b->count];
    *h = (holding){.bytes = bytes, .stream = stream};
    need("vpmm_malloc", vpmm_malloc(b->pool, bytes, stream, &h->address));
    b->count++;
    b->in_use += use_of(b, bytes);
    b->peak_in_use = b->in_use > b->peak_in_use ? b->in_use : b->peak_in_use;
}

static void give(bench *b, size_t which)
{
    holding h = b->holdings[which];
    need("vpmm_free", vpmm_free(b->pool, h.address, h.stream));
    b->in_use -= use_of(b, h.bytes);
    b->holdings[which] = b->holdings[--b->count];
}

/* What is queued runs, and the background work that is due is done. */
static void settle(bench *b)
{
    for (int i = 0; i < STREAMS; i++)
        need_cuda(b, "cuStreamSynchronize", b->gpu.driver->cuStreamSynchronize(b->stream[i]));
    for (int i = 0; i < SETTLING_POLLS; i++)
        need("vpmm_poll", vpmm_poll(b->pool));
}

/* ---- the steps ---- */

static void note_level(bench *b, const char *name, uint64_t requests, double ns)
{
    level *l = &result.levels[result.done];
    *l = (level){.name = name, .requests = requests, .in_use = b->in_use};
    l->ns = requests == 0 ? 0 : ns / (double)requests;
    need("the audit", vpmm_check(b->pool));
    need("vpmm_stats_get", vpmm_stats_get(b->pool, &l->stats));
    result.done++;
}

static void fill(bench *b)
{
    uint64_t bytes = 0, requests = 0;
    uint64_t begin = now_ns();
    for (; bytes < b->options->bytes; requests++) {
        size_t next = draw_small(b);
        take(b, next, b->stream[draw(b) % STREAMS]);
        bytes += next;
    }
    note_level(b, "filled", requests, (double)(now_ns() - begin));
}

static void free_most(bench *b)
{
    size_t requests = (size_t)((double)b->count * b->options->free);
    uint64_t begin = now_ns();
    for (size_t i = 0; i < requests; i++)
        give(b, draw(b) % b->count);
    double ns = (double)(now_ns() - begin);
    settle(b);
    note_level(b, "freed", requests, ns);
}

static void ask(bench *b)
{
    uint64_t requests = 0;
    uint64_t begin = now_ns();
    for (uint64_t bytes = 0; bytes < b->options->large; bytes += b->options->each, requests++)
        take(b, b->options->each, b->stream[requests % STREAMS]);
    note_level(b, "large", requests, (double)(now_ns() - begin));
}

static void free_the_rest(bench *b)
{
    size_t requests = b->count;
    uint64_t begin = now_ns();
    while (b->count > 0)
        give(b, b->count - 1);
    double ns = (double)(now_ns() - begin);
    for (int i = 0; i < 2; i++) { /* what was in front caches has its end recorded by the first */
        settle(b);
        need("vpmm_trim", vpmm_trim(b->pool, 0, NULL));
    }
    note_level(b, "given back", requests, ns);
}

/* ---- the report ---- */

static double ratio(uint64_t a, uint64_t b)
{
    return b == 0 ? 0 : (double)a / (double)b;
}

static double mib(uint64_t bytes)
{
    return (double)bytes / (double)MIB;
}

typedef struct summary {
    uint64_t peak_mapped_bytes, peak_in_use_bytes, slab_bytes_returned;
    double held_ratio;
    bool good;
} summary;

static summary summarise(const bench *b)
{
    const level *levels = result.levels;
    const vpmm_stats *filled = &levels[FILLED].stats, *freed = &levels[FREED].stats, *gone = &levels[GONE].stats;
    summary s = {.peak_mapped_bytes = gone->peak_mapped_bytes, .peak_in_use_bytes = b->peak_in_use};
    s.slab_bytes_returned = filled->slab_bytes > freed->slab_bytes ? filled->slab_bytes - freed->slab_bytes : 0;
    s.held_ratio = ratio(s.peak_mapped_bytes, s.peak_in_use_bytes);
    s.good = gone->mapped_bytes == 0 && gone->requested_bytes == 0;
    return s;
}

static void print_text(FILE *out, const summary *s)
{
    fprintf(out, "%-10s %9s %12s %12s %7s %12s %12s %14s %9s\n", "step", "requests", "in use MiB", "mapped MiB", "held",
            "slabs MiB", "pieces MiB", "slabs / pieces", "ns each");
    for (int i = 0; i < LEVELS; i++) {
        const level *l = &result.levels[i];
        fprintf(out, "%-10s %9" PRIu64 " %12.1f %12.1f %7.3f %12.1f %12.1f %14.3f %9.0f\n", l->name, l->requests,
                mib(l->in_use), mib(l->stats.mapped_bytes), ratio(l->stats.mapped_bytes, l->in_use),
                mib(l->stats.slab_bytes), mib(l->stats.slab_live_bytes),
                ratio(l->stats.slab_bytes, l->stats.slab_live_bytes), l->ns);
    }
    fprintf(out, "slabs of %.1f MiB were returned to the pool by the frees\n", mib(s->slab_bytes_returned));
    fprintf(out, "held ratio %.4f: peak mapped %.1f MiB over peak in use %.1f MiB%s\n", s->held_ratio,
            mib(s->peak_mapped_bytes), mib(s->peak_in_use_bytes), s->good ? "" : "; not all was given back: FAILED");
}

static void json_level(FILE *out, const level *l)
{
    fprintf(out,
            "    {\"step\": \"%s\", \"requests\": %" PRIu64 ", \"ns_each\": %.1f, \"in_use_bytes\": %" PRIu64
            ", \"mapped_bytes\": %" PRIu64 ", \"held\": %.6f, \"slab_bytes\": %" PRIu64
            ", \"slab_live_bytes\": %" PRIu64 ", \"slab_ratio\": %.6f}",
            l->name, l->requests, l->ns, l->in_use, l->stats.mapped_bytes, ratio(l->stats.mapped_bytes, l->in_use),
            l->stats.slab_bytes, l->stats.slab_live_bytes, ratio(l->stats.slab_bytes, l->stats.slab_live_bytes));
}

static void json_steps(FILE *out)
{
    const options *o = &result.options;
    fprintf(out,
            "{\n  \"driver\": \"%s\", \"bytes\": %" PRIu64 ", \"free\": %.6f, \"large\": %" PRIu64
            ", \"each\": %" PRIu64 ", \"seed\": %" PRIu64 ",\n  \"steps\": [\n",
            o->cuda ? "cuda" : "sim", o->bytes, o->free, o->large, o->each, o->seed);
    for (int i = 0; i < result.done; i++) {
        json_level(out, &result.levels[i]);
        fputs(i + 1 < result.done ? ",\n" : "\n", out);
    }
    fputs("  ],\n", out);
}

static void json_summary(FILE *out, const summary *s)
{
    fprintf(out,
            "  \"slab_bytes_returned\": %" PRIu64 ", \"peak_mapped_bytes\": %" PRIu64
            ", \"peak_in_use_bytes\": %" PRIu64 ", \"held_ratio\": %.6f, \"good\": %s\n}\n",
            s->slab_bytes_returned, s->peak_mapped_bytes, s->peak_in_use_bytes, s->held_ratio,
            s->good ? "true" : "false");
}

static bool json_ok(bool ok)
{
    if (!ok)
        fprintf(stderr, "vpmm-fragment: --json %s: %s\n", result.options.json, strerror(errno));
    return ok;
}

/* Before the first step: a path that cannot be written is told at once, and no earlier result stays there. */
static bool open_json(const options *o)
{
    result.options = *o;
    if (o->json != NULL)
        result.json = strcmp(o->json, "-") == 0 ? stdout : fopen(o->json, "w");
    return json_ok(o->json == NULL || result.json != NULL);
}

static bool save_json(const summary *s) /* NULL: it has ended before the last step */
{
    FILE *out = result.json;
    if (out == NULL)
        return true;
    json_steps(out);
    if (s != NULL)
        json_summary(out, s);
    else
        fputs("  \"good\": false\n}\n", out);
    return json_ok(out == stdout ? fflush(out) == 0 : fclose(out) == 0);
}

/* The pool is left as it is, and its leaks are nobody's. */
static void give_up(int status)
{
    save_json(NULL);
    fflush(NULL);
    _exit(status);
}

/* ---- the command line ---- */

static bool parse_part(const char *option, const char *text, double *out)
{
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end != '\0' || !(value >= 0 && value <= 1))
        return option_refuse(option, text, "a part from 0 to 1 is allowed");
    *out = value;
    return true;
}

static bool parse_driver(const char *text, bool *cuda)
{
    *cuda = strcmp(text, "cuda") == 0;
    return *cuda || strcmp(text, "sim") == 0 || option_refuse("driver", text, "sim and cuda are allowed");
}

static const struct option long_options[] = {
    {"driver", required_argument, NULL, 'd'},
    {"bytes", required_argument, NULL, 'b'},
    {"free", required_argument, NULL, 'f'},
    {"large", required_argument, NULL, 'l'},
    {"each", required_argument, NULL, 'e'},
    {"seed", required_argument, NULL, 's'},
    {"json", required_argument, NULL, 'j'},
    {"help", no_argument, NULL, 'h'},
    {NULL, 0, NULL, 0},
};

static bool take_option(int option, options *o)
{
    switch (option) {
    case 'd':
        return parse_driver(optarg, &o->cuda);
    case 'b':
        return option_number("bytes", optarg, 1, MOST_BYTES, &o->bytes);
    case 'f':
        return parse_part("free", optarg, &o->free);
    case 'l':
        return option_number("large", optarg, 0, MOST_BYTES, &o->large);
    case 'e':
        return option_number("each", optarg, 1, MOST_BYTES, &o->each);
    case 's':
        return option_number("seed", optarg, 0, MOST_BYTES, &o->seed);
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

static bool parse_options(int argc, char **argv, options *o)
{
    int option;
    *o = (options){.bytes = 4 * GIB, .large = 3 * GIB, .each = 64 * MIB, .seed = 1, .free = 0.9};
    while ((option = getopt_long(argc, argv, "", long_options, NULL)) != -1)
        if (!take_option(option, o))
            return false;
    if (optind < argc) {
        fprintf(stderr, "vpmm-fragment: '%s': only options are allowed\n", argv[optind]);
        return false;
    }
    if (o->large / o->each > LARGE_AT_MOST) {
        fprintf(stderr, "vpmm-fragment: --each: at least a %" PRIu64 "th of --large is allowed\n", LARGE_AT_MOST);
        return false;
    }
    return true;
}

int main(int argc, char **argv)
{
    options o;
    bench b;
    if (!parse_options(argc, argv, &o)) {
        fprintf(stderr, "vpmm-fragment: see vpmm-fragment --help\n");
        return EXIT_USAGE;
    }
    if (!open_json(&o))
        return EXIT_USAGE;
    open_bench(&b, &o);
    fill(&b);
    free_most(&b);
    ask(&b);
    free_the_rest(&b);
    summary s = summarise(&b);
    print_text(result.json == stdout ? stderr : stdout, &s);
    s.good = close_bench(&b) && s.good;
    bool ok = save_json(&s);
    return output_is_whole() && ok && s.good ? 0 : EXIT_BAD;
}
