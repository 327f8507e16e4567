/*
 * vpmm-replay - replays recorded allocation traces on vpmm, or on cuMemAllocAsync, and measures what they cost.
 */
#define _GNU_SOURCE 1

#include "replay.h"
#include "option.h"

#include <getopt.h>
#include <stdlib.h>
#include <string.h>

const char program_name[] = "vpmm-replay";

enum { EXIT_BAD = 1, EXIT_USAGE = 2 };
enum { MAX_LAG = 1000000, MAX_PASSES = 1000, MAX_THREADS = 256 };

static const char help[] =
    "usage: vpmm-replay [OPTION]... TRACE...\n"
    "\n"
    "Replays recorded allocation traces (CSV: op,id,bytes,stream,us) and measures memory held and time taken.\n"
    "\n"
    "  --driver sim|cuda       the simulated GPU (default; 128 GiB, streams stepped), or the first real one\n"
    "  --allocator vpmm|async  vpmm (default), or cuMemAllocAsync on a pool that keeps what it has (on sim the\n"
    "                          simulator's own pool, a plain best fit: it holds more and takes other times)\n"
    "  --passes N              replay each trace N times on one pool (default 2: the first finds it empty, the second\n"
    "                          warm)\n"
    "  --threads N             N threads replay a copy each at once, on one pool, with streams of their own (default "
    "1)\n"
    "  --default-stream        the trace's first stream is the default stream, one for all threads\n"
    "  --min-bytes N           leave out requests below N bytes, after --scale (default 0)\n"
    "  --scale F               multiply every size by F (default 1)\n"
    "  --lag N                 sim: the GPU is N trace events behind the host (default 0: queued work has always run)\n"
    "  --pace                  follow the trace's times. sim: a simulated clock does, and vpmm's background work gets\n"
    "                          the time between the calls, charged at the driver's prices (one thread only). No\n"
    "                          memory decays in the pauses (see below), and what else vpmm does after a time of its\n"
    "                          own follows the machine's clock: vpmm-virtual --threads 1 --pace has a clock for both.\n"
    "                          cuda: the program waits.\n"
    "                          Without it the replay is dense: background work gets no time, and does only what is\n"
    "                          due\n"
    "  --verify                fill each allocation on its stream, and check it in stream order before its free: the\n"
    "                          first 64 bytes of each page, and the last 64. cuda: all of it is filled; sim: what is\n"
    "                          checked, so that traces of 40 GiB fit in the host's memory\n"
    "  --json FILE|-           one object per trace and pass, in an array, to FILE or to standard output (the table\n"
    "                          then goes to standard error)\n"
    "  --help                  this text\n"
    "\n"
    "Numbers take K, M or G (powers of 1024). vpmm is configured by its VPMM_* environment variables, but that\n"
    "on sim no memory decays and the background work is done between the calls: VPMM_DECAY_MS, VPMM_RELEASE_THRESHOLD\n"
    "and VPMM_REAPER are ignored there, and a line on standard error says so. vpmm-virtual follows them.\n"
    "\n"
    "The table: held/dem. is the highest mapped over the highest demand, held/use over the highest in use, all since\n"
    "the pool's creation: in use are live requests, those below a page rounded up to 256 bytes, others to pages; in\n"
    "demand are those that a malloc is serving, too. (With VPMM_SMALL=async the driver's pool counts as mapped with\n"
    "what is live in it; the two together are seen at every 64th malloc.) malloc ms and the percentiles are\n"
    "wall-clock time, on sim the simulator's own; driver ms is what malloc's driver calls would have cost on an H200\n"
    "(sim; 0 on cuda); created and moved count physical handles.\n"
    "Where a trace has requests below a page, their mallocs have a line of their own besides.\n"
    "\n"
    "Exit status: 0 no race, no mismatch, no refused request, no leak, and every audit passed; 1 otherwise; 2 wrong\n"
    "usage or a malformed trace.\n"
    "\n"
    "Example: vpmm-replay --verify --lag 64 --min-bytes 2M examples/requests.csv\n";

static bool parse_lag(const char *option, const char *text, size_t *out)
{
    uint64_t value;
    if (!option_number(option, text, 0, MAX_LAG, &value))
        return false;
    *out = (size_t)value;
    return true;
}

/* Sets *second if the word is the second one. */
static bool parse_choice(const char *option, const char *text, const char *first_word, const char *second_word,
                         bool *second)
{
    char allowed[64];
    *second = strcmp(text, second_word) == 0;
    if (*second || strcmp(text, first_word) == 0)
        return true;
    snprintf(allowed, sizeof allowed, "%s and %s are allowed", first_word, second_word);
    return option_refuse(option, text, allowed);
}

static const struct option long_options[] = {
    {"driver", required_argument, NULL, 'd'},
    {"allocator", required_argument, NULL, 'a'},
    {"lag", required_argument, NULL, 'l'},
    {"passes", required_argument, NULL, 'p'},
    {"threads", required_argument, NULL, 't'},
    {"min-bytes", required_argument, NULL, 'm'},
    {"scale", required_argument, NULL, 's'},
    {"pace", no_argument, NULL, 'P'},
    {"verify", no_argument, NULL, 'v'},
    {"default-stream", no_argument, NULL, 'D'},
    {"json", required_argument, NULL, 'j'},
    {"help", no_argument, NULL, 'h'},
    {NULL, 0, NULL, 0},
};

static bool take_option(int option, replay_options *o)
{
    switch (option) {
    case 'd':
        return parse_choice("driver", optarg, "sim", "cuda", &o->cuda);
    case 'a':
        return parse_choice("allocator", optarg, "vpmm", "async", &o->async);
    case 'l':
        return parse_lag("lag", optarg, &o->lag);
    case 'p':
        return option_count("passes", optarg, 1, MAX_PASSES, &o->passes);
    case 't':
        return option_count("threads", optarg, 1, MAX_THREADS, &o->threads);
    case 'm':
        return option_number("min-bytes", optarg, 0, TRACE_MAX_BYTES, &o->min_bytes);
    case 's':
        return option_factor("scale", optarg, 1e-6, 1000, &o->scale);
    case 'P':
        o->pace = true;
        return true;
    case 'D':
        o->default_stream = true;
        return true;
    case 'v':
        o->verify = true;
        return true;
    case 'j':
        o->json = optarg;
        return true;
    default:
        return false; /* getopt has told it */
    }
}

static bool check_options(const replay_options *o, int traces)
{
    if (o->pace && o->threads > 1 && !o->cuda)
        fprintf(stderr,
                "vpmm-replay: --pace on the simulator has one clock, for one thread: leave out --threads %u, "
                "or --pace\n",
                o->threads);
    else if (traces == 0)
        fprintf(stderr, "vpmm-replay: no TRACE is named\n");
    else
        return true;
    return false;
}

/* Ends the program after --help and on errors. */
static replay_options parse_options(int argc, char **argv)
{
    replay_options o = {.passes = 2, .threads = 1, .scale = 1};
    int option;
    bool ok = true;
    while (ok && (option = getopt_long(argc, argv, "", long_options, NULL)) != -1) {
        if (option == 'h') {
            fputs(help, stdout);
            exit(0);
        }
        ok = take_option(option, &o);
    }
    if (!ok || !check_options(&o, argc - optind)) {
        fprintf(stderr, "vpmm-replay: see vpmm-replay --help\n");
        exit(EXIT_USAGE);
    }
    return o;
}

static bool replay_one(const replay_options *o, const char *path, const trace *t, report *rep)
{
    unsigned done;
    pass_result *results = calloc(o->passes, sizeof *results);
    if (results == NULL) {
        fprintf(stderr, "vpmm-replay: the host has no memory for the results\n");
        return false;
    }
    bool good = replay_trace(o, t, path, results, &done);
    for (unsigned i = 0; i < done; i++) {
        report_pass(rep, &results[i]);
        good = good && pass_good(&results[i]);
    }
    free(results);
    return good;
}

/* All are read before the first is replayed, so that a malformed one costs no waiting. NULL: told on stderr. */
static trace *load_traces(const replay_options *o, char **paths, int n)
{
    char error[512];
    trace *traces = calloc((size_t)n, sizeof *traces);
    if (traces == NULL)
        fprintf(stderr, "vpmm-replay: the host has no memory for the traces\n");
    for (int i = 0; traces != NULL && i < n; i++) {
        if (trace_load(paths[i], o->scale, o->min_bytes, &traces[i], error, sizeof error))
            continue;
        fprintf(stderr, "vpmm-replay: %s\n", error);
        while (i-- > 0)
            trace_release(&traces[i]);
        free(traces);
        return NULL;
    }
    return traces;
}

static bool replay_all(const replay_options *o, char **paths, trace *traces, int n, report *rep)
{
    bool good = true;
    for (int i = 0; i < n; i++) {
        good = replay_one(o, paths[i], &traces[i], rep) && good;
        trace_release(&traces[i]);
    }
    free(traces);
    return good;
}

int main(int argc, char **argv)
{
    replay_options o = parse_options(argc, argv);
    char **paths = argv + optind;
    vpmm_config config = vpmm_config_default();
    report rep;
    if (vpmm_config_from_env(&config) != VPMM_SUCCESS) {
        fprintf(stderr, "vpmm-replay: %s\n", vpmm_last_error());
        return EXIT_USAGE;
    }
    if (!o.cuda && !o.async)
        target_tell_no_decay();
    trace *traces = load_traces(&o, paths, argc - optind);
    if (traces == NULL || !report_open(&rep, &o))
        return EXIT_USAGE;
    bool good = replay_all(&o, paths, traces, argc - optind, &rep);
    good = report_close(&rep) && good;
    return output_is_whole() && good ? 0 : EXIT_BAD;
}
