/*
 * vpmm-pairs - what a malloc and a free cost together, with vpmm or cuMemAllocAsync, for one thread and for many.
 */
#define _GNU_SOURCE 1

#include "pairs.h"
#include "metrics.h"
#include "option.h"
#include "size.h"

#include <getopt.h>
#include <stdlib.h>
#include <string.h>

const char program_name[] = "vpmm-pairs";

enum {
    EXIT_BAD = 1,
    EXIT_USAGE = 2,
    REQUESTS_PER_SECOND = 100000, /* the most that is allowed: whoever measures what scrapes do is not limited */
};

#define MAX_BYTES         (UINT64_C(1) << 40)
#define MAX_PAIRS         UINT64_C(10000000000)
#define MAX_THREADS       1024
#define MAX_STREAMS_KNOWN 100000

static const char help[] =
    "usage: vpmm-pairs [OPTION]...\n"
    "\n"
    "Measures what a malloc and a free cost together. Each thread has a non-blocking stream of its own; no work is\n"
    "queued on the GPU. Each option marked * takes a list, 2M,64M; all of the list's cases are run, each on a new "
    "pool.\n"
    "\n"
    "  --driver sim|cuda        the simulated GPU (default), whose own time is then in the figures, or a real one\n"
    "  --allocator vpmm|async * vpmm (default), or cuMemAllocFromPoolAsync and cuMemFreeAsync, on a pool that keeps\n"
    "                           what it has (on sim the simulator's own, a plain best fit: it holds more and takes\n"
    "                           other times)\n"
    "  --bytes N *              a request's length (default 2M)\n"
    "  --threads N *            (default 1)\n"
    "  --pattern P *            pair     malloc, then free, in a loop (default)\n"
    "                           window   64 allocations of 1 to 4 times --bytes in flight in each thread; a pair is "
    "the\n"
    "                                    free of one and the malloc of another, drawn beforehand, the same in each "
    "run\n"
    "                           handoff  half of the threads allocate, the other half free: in couples, each with one\n"
    "                                    stream, over a ring of 64 pointers. Pairs are counted by the consumer.\n"
    "                                    --threads must be even\n"
    "  --pairs N                pairs of each thread, or couple (default: as many as take a quarter of a second)\n"
    "  --streams-known N        further streams that the pool knows, each met by one malloc and free before (default "
    "0)\n"
    "  --no-p99                 leave out the second pass, which samples single pairs: for profilers\n"
    "  --json FILE|-            one object a line and case, to FILE or to standard output (the table then goes to\n"
    "                           standard error)\n"
    "  --metrics-port N         serve the metrics of the pool of the case that runs, pool=\"pairs\", on 127.0.0.1, "
    "port "
    "N;\n"
    "                           0: on any free port. The port is printed on standard error. Of vpmm's pools alone; a\n"
    "                           client may ask 100,000 times a second. stress/scrapes.py measures what that changes\n"
    "  --help                   this text\n"
    "\n"
    "Numbers take K, M or G (powers of 1024). vpmm is configured by its VPMM_* environment variables.\n"
    "\n"
    "ns a pair: wall-clock time x threads / pairs, what a thread waits for one pair. In handoff both threads of a "
    "couple\n"
    "count, and so does waiting for one another. p99: of single pairs, in a pass of its own, the clock's cost\n"
    "subtracted; in handoff the malloc's time plus the free's, without the way between them. Calls a pair: driver\n"
    "calls, the reaper's included. Peak: the highest mapped, and with VPMM_SMALL=async at least what is live between\n"
    "the passes, which is of window alone. Locks: taken by these threads in the timed loop, in all; - unless the\n"
    "library was built with VPMM_DEBUG_CHECKS.\n"
    "\n"
    "Exit status: 0 every pool passed its audit and gave everything back; 1 otherwise; 2 wrong usage.\n"
    "\n"
    "Example: vpmm-pairs --allocator vpmm,async --bytes 2M,64M --threads 1,4\n";

/* ---- words and numbers ---- */

struct range {
    uint64_t min, max;
    const char *const *words; /* NULL: a number; else words[min] to words[max] */
};

static bool parse_word(const char *text, const struct range *range, uint64_t *out)
{
    for (uint64_t i = range->min; i <= range->max; i++)
        if (strcmp(text, range->words[i]) == 0) {
            *out = i;
            return true;
        }
    return false;
}

static bool not_allowed(const char *option, const char *text, const struct range *range)
{
    char allowed[256] = "";
    if (range->words == NULL)
        size_describe(allowed, sizeof allowed, range->min, range->max);
    for (uint64_t i = range->min; range->words != NULL && i <= range->max; i++)
        snprintf(allowed + strlen(allowed), sizeof allowed - strlen(allowed), "%s%s%s", i == range->min ? "" : ", ",
                 range->words[i], i == range->max ? " are allowed" : "");
    return option_refuse(option, text, allowed);
}

static bool parse_one(const char *option, const char *text, struct range range, uint64_t *out)
{
    bool ok = range.words == NULL ? size_parse(text, range.min, range.max, out) : parse_word(text, &range, out);
    return ok || not_allowed(option, text, &range);
}

/* Between commas. */
static bool parse_list(const char *option, const char *text, struct range range, pairs_list *list)
{
    char item[64], allowed[64];
    list->n = 0;
    for (const char *rest = text;; rest++) {
        size_t length = strcspn(rest, ",");
        if (length >= sizeof item || list->n == PAIRS_LIST) {
            snprintf(allowed, sizeof allowed, "a list of at most %d short items is allowed", PAIRS_LIST);
            return option_refuse(option, text, allowed);
        }
        memcpy(item, rest, length);
        item[length] = '\0';
        if (!parse_one(option, item, range, &list->value[list->n++]))
            return false;
        rest += length;
        if (*rest == '\0')
            return true;
    }
}

/* ---- options ---- */

static bool take_metrics_port(const char *text, int *port)
{
    uint64_t number = 0;
    if (!metrics_known())
        return false;
    bool ok = parse_one("metrics-port", text, (struct range){0, UINT16_MAX, NULL}, &number);
    *port = (int)number;
    return ok;
}

static const struct option long_options[] = {
    {"driver", required_argument, NULL, 'd'},
    {"allocator", required_argument, NULL, 'a'},
    {"bytes", required_argument, NULL, 'b'},
    {"threads", required_argument, NULL, 't'},
    {"pairs", required_argument, NULL, 'n'},
    {"pattern", required_argument, NULL, 'p'},
    {"streams-known", required_argument, NULL, 's'},
    {"no-p99", no_argument, NULL, 'N'},
    {"json", required_argument, NULL, 'j'},
    {"metrics-port", required_argument, NULL, 'm'},
    {"help", no_argument, NULL, 'h'},
    {NULL, 0, NULL, 0},
};

static bool take_option(int option, pairs_options *o)
{
    static const char *const drivers[] = {"sim", "cuda"};
    uint64_t number = 0;
    bool ok;
    switch (option) {
    case 'd':
        ok = parse_one("driver", optarg, (struct range){0, 1, drivers}, &number);
        o->cuda = number == 1;
        return ok;
    case 'a':
        return parse_list("allocator", optarg, (struct range){0, 1, pairs_allocator_names}, &o->allocators);
    case 'b':
        return parse_list("bytes", optarg, (struct range){1, MAX_BYTES, NULL}, &o->bytes);
    case 't':
        return parse_list("threads", optarg, (struct range){1, MAX_THREADS, NULL}, &o->threads);
    case 'n':
        return parse_one("pairs", optarg, (struct range){1, MAX_PAIRS, NULL}, &o->pairs);
    case 'p':
        return parse_list("pattern", optarg, (struct range){0, PATTERNS - 1, pairs_pattern_names}, &o->patterns);
    case 's':
        ok = parse_one("streams-known", optarg, (struct range){0, MAX_STREAMS_KNOWN, NULL}, &number);
        o->streams_known = (unsigned)number;
        return ok;
    case 'N':
        o->no_p99 = true;
        return true;
    case 'j':
        o->json = optarg;
        return true;
    case 'm':
        return take_metrics_port(optarg, &o->metrics_port);
    default:
        return false; /* getopt has told it */
    }
}

static bool check_options(const pairs_options *o, int argc, char **argv)
{
    bool handoff = false;
    for (size_t i = 0; i < o->patterns.n; i++)
        handoff |= o->patterns.value[i] == PATTERN_HANDOFF;
    for (size_t i = 0; handoff && i < o->threads.n; i++)
        if (o->threads.value[i] % 2 != 0) {
            fprintf(stderr,
                    "vpmm-pairs: --threads %llu: --pattern handoff needs an even number, its threads are in "
                    "couples\n",
                    (unsigned long long)o->threads.value[i]);
            return false;
        }
    if (optind < argc)
        fprintf(stderr, "vpmm-pairs: '%s': there are only options\n", argv[optind]);
    return optind == argc;
}

/* Ends the program after --help and on errors. */
static pairs_options parse_options(int argc, char **argv)
{
    pairs_options o = {.allocators = {1, {0}},
                       .patterns = {1, {PATTERN_PAIR}},
                       .bytes = {1, {2 << 20}},
                       .threads = {1, {1}},
                       .metrics_port = -1};
    int option;
    bool ok = true;
    while (ok && (option = getopt_long(argc, argv, "", long_options, NULL)) != -1) {
        if (option == 'h') {
            fputs(help, stdout);
            exit(0);
        }
        ok = take_option(option, &o);
    }
    if (!ok || !check_options(&o, argc, argv)) {
        fprintf(stderr, "vpmm-pairs: see vpmm-pairs --help\n");
        exit(EXIT_USAGE);
    }
    return o;
}

/* ---- the GPU ---- */

static uint64_t largest(const pairs_list *list)
{
    uint64_t most = 0;
    for (size_t i = 0; i < list->n; i++)
        most = list->value[i] > most ? list->value[i] : most;
    return most;
}

/* What the largest case can have in flight, half as much again, and a little: valgrind has no room for 128 GiB. */
static size_t simulated_bytes(const pairs_options *o)
{
    uint64_t in_flight = largest(&o->threads) * largest(&o->bytes) * PAIRS_WINDOW;
    if (largest(&o->patterns) != PATTERN_PAIR)
        in_flight *= PAIRS_LONGEST;
    return in_flight / 2 * 3 + ((size_t)2 << 30);
}

/*
 * The simulator's streams run by themselves: what is freed passes as on an idle GPU. Nothing here touches the memory,
 * so there is no race to find, and the looking for one would be charged to each pair.
 */
static bool open_gpu(gpu *g, const pairs_options *o)
{
    vpmm_sim_config sim = vpmm_sim_config_default();
    sim.memory_bytes = simulated_bytes(o);
    sim.detect_races = false;
    return gpu_open(g, &(gpu_options){.sim = o->cuda ? NULL : &sim,
                                      .advice = "use fewer --threads or --bytes",
                                      .ordinal = o->config.device});
}

static bool close_gpu(gpu *g)
{
    bool good = g->sim == NULL || vpmm_sim_misuses(g->sim) == 0; /* which it names on stderr */
    return gpu_close(g) == 0 && good;
}

/* ---- cases ---- */

static bool run_case(gpu *g, const pairs_case *c, report *rep)
{
    pairs_result result;
    if (!pairs_run(g, c, &result)) {
        fprintf(stderr, "vpmm-pairs: no result for --pattern %s --bytes %zu --threads %u --allocator %s\n",
                pairs_pattern_names[c->pattern], c->bytes, c->threads, pairs_allocator_names[c->async]);
        return false;
    }
    report_result(rep, &result);
    return result.good;
}

/* The allocators stand below each other. */
static bool run_cases(gpu *g, const pairs_options *o, vpmm_exporter *exporter, report *rep)
{
    size_t cases = o->patterns.n * o->bytes.n * o->threads.n * o->allocators.n;
    bool good = true;
    for (size_t i = 0; i < cases; i++) {
        size_t rest = i;
        pairs_case c = {.options = o, .exporter = exporter};
        c.async = o->allocators.value[rest % o->allocators.n] == 1;
        rest /= o->allocators.n;
        c.threads = (unsigned)o->threads.value[rest % o->threads.n];
        rest /= o->threads.n;
        c.bytes = (size_t)o->bytes.value[rest % o->bytes.n];
        c.pattern = (pairs_pattern)o->patterns.value[rest / o->bytes.n];
        good = run_case(g, &c, rep) && good;
    }
    return good;
}

int main(int argc, char **argv)
{
    pairs_options o = parse_options(argc, argv);
    vpmm_exporter *exporter;
    report rep;
    gpu g;
    o.config = vpmm_config_default();
    if (vpmm_config_from_env(&o.config) != VPMM_SUCCESS) {
        fprintf(stderr, "vpmm-pairs: %s\n", vpmm_last_error());
        return EXIT_USAGE;
    }
    if (!metrics_open(o.metrics_port, NULL, REQUESTS_PER_SECOND, &exporter))
        return EXIT_USAGE;
    if (!report_open(&rep, o.json)) {
        metrics_close(exporter);
        return EXIT_USAGE;
    }
    bool good = open_gpu(&g, &o) && run_cases(&g, &o, exporter, &rep);
    good = close_gpu(&g) && good;
    good = metrics_close(exporter) && good;
    good = report_close(&rep) && good;
    return output_is_whole() && good ? 0 : EXIT_BAD;
}
