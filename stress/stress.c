/*
 * vpmm-stress - one command that tries to break the allocator, the driver under it and the memory, and says whether it
 * did. What is what: stress.h.
 */
#define _GNU_SOURCE 1

#include "stress.h"

#include "option.h"

#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <semaphore.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

const char program_name[] = "vpmm-stress";

enum { MOST_DEVICES = 64, STUCK_S = 60, MOST_THREADS = 256, PATHS_SECONDS = 540, RESOURCES_SECONDS = 240 };

static const char help_begin[] =
    "usage: vpmm-stress [OPTION]...\n"
    "\n"
    "Tries to break vpmm, the driver's virtual memory management under it, and the device's memory. Threads allocate "
    "and\n"
    "free by patterns; each allocation is filled on its stream, and checked before it is freed or once another thread\n"
    "has it. Threads are born and die, streams are made and destroyed, memory goes from thread to thread; the pool is\n"
    "trimmed, looked at, its settings changed, and another process takes memory away for moments. Ctrl-C ends it as\n"
    "the end of its time does.\n"
    "\n"
    "  --driver sim|cuda      the simulated GPU (default), which sees races of streams, or a real one\n"
    "  --device N|all         (default 0)\n"
    "  --allocator LIST       vpmm (default), async, which is cuMemAllocAsync, or vpmm,async: vpmm, and then the\n"
    "                         other, if it has passed. On sim async is the simulator's own pool, a plain best fit:\n"
    "                         it holds more and takes other times\n"
    "  --level L              quick: a minute (default), medium: ten minutes, long: an hour\n"
    "  --seconds N            for each allocator, instead of --level\n"
    "  --threads N            (default 4)\n"
    "  --streams N            in all (default twice the threads): one or two for each thread, and the rest used by "
    "all,\n"
    "                         as are the default streams then\n"
    "  --fraction F           of the device's memory that may be mapped (default 0.9; sim: 0.5). The patterns ask for\n"
    "                         so much; a cap it is for vpmm alone: cuMemAllocAsync has none\n"
    "  --seed N               fixes the steps of each thread (default: the time, which is printed)\n"
    "  --pattern LIST         those below, or all (default)\n"
    "  --verify W             full: every word; edges: the first 64 bytes of each page and the last 64 of each "
    "allocation;\n"
    "                         off (default: full on cuda, edges on sim)\n"
    "  --faults               (sim) driver calls, host memory and threads fail at random, in unwinding as well\n"
    "  --health               (cuda) NVML's memory errors, XIDs and throttling before and after\n"
    "  --metrics PORT         serve the pool's metrics over HTTP, for Prometheus; 0: on any free port, which is "
    "printed\n"
    "  --metrics-address A    where (default 127.0.0.1: this machine alone; 0.0.0.0: everywhere)\n"
    "  --json FILE|-          results to FILE or to standard output (the text then goes to standard error)\n"
    "  --plant DEFECT         (for its own test) plants a defect that has to be found: reuse, lost-page, double-map,\n"
    "                         unmapped, count, lost-device on sim; bit on either\n"
    "  --help                 this text\n"
    "\n"
    "Patterns:\n";

static const char help_end[] =
    "\n"
    "vpmm is configured by its VPMM_* environment variables as well. Progress goes to standard error.\n"
    "\n"
    "Exit status: 0 passed; 1 failed: memory did not hold what was written to it, streams raced, or an invariant of "
    "the\n"
    "pool is broken; 2 wrong usage, or a wrong setting; 3 could not run: the driver or the device refused, or the\n"
    "result could not be written; 77 skipped: there is nothing to test here; 124 stuck: nothing went on for a minute.\n"
    "A run of all patterns for nine minutes or more fails, too, if a rare path of the allocator was never taken,\n"
    "which is then named; one of four or more, if the program's own memory or descriptors grew in its second half.\n"
    "With --json a run that is skipped, or cannot be made, has its outcome in FILE as well. SIGINT and SIGTERM end a\n"
    "run within ten seconds: what it has seen is judged, and the result says that it was cut short. The status is\n"
    "the same, but 143 where it would be 0 and SIGTERM came: who sends that, as Kubernetes when it drains a node,\n"
    "has not seen the whole test pass.\n"
    "\n"
    "Example: vpmm-stress --driver cuda --device all --level medium --health --json result.json\n";

/* ---- options ---- */

static void print_help(void)
{
    fputs(help_begin, stdout);
    for (int i = 0; i < PATTERN_COUNT; i++)
        printf("  %-14s %s\n", patterns[i].name, patterns[i].what);
    fputs(help_end, stdout);
}

/* Which of the words it is; -1: told. */
static int take_word(const char *option, const char *text, const char *const *words, int n)
{
    char allowed[256] = "";
    for (int i = 0; i < n; i++) {
        if (strcmp(text, words[i]) == 0)
            return i;
        size_t at = strlen(allowed);
        snprintf(allowed + at, sizeof allowed - at, "%s%s", i ? ", " : "allowed are ", words[i]);
    }
    option_refuse(option, text, allowed);
    return -1;
}

static bool take_pattern(const char *name, uint32_t *set)
{
    uint32_t named = 0;
    for (int i = 0; i < PATTERN_COUNT; i++)
        if (strcmp(name, patterns[i].name) == 0 || strcmp(name, "all") == 0)
            named |= UINT32_C(1) << i;
    *set |= named;
    return named != 0 || option_refuse("pattern", name, "not a pattern: see --help for their names");
}

static bool take_allocator(const char *name, options *o)
{
    static const char *const words[] = {"vpmm", "async"};
    int word = take_word("allocator", name, words, 2);
    o->vpmm |= word == 0;
    o->async |= word == 1;
    return word >= 0;
}

/* Each item of a list, between commas. */
static bool take_list(const char *text, options *o, bool is_patterns)
{
    char copy[512], *rest = copy, *item;
    bool good = strlen(text) < sizeof copy ||
                option_refuse(is_patterns ? "pattern" : "allocator", text, "a list of at most 511 characters");
    snprintf(copy, sizeof copy, "%s", text);
    if (is_patterns)
        o->patterns = 0;
    else
        o->vpmm = o->async = false;
    while (good && (item = strsep(&rest, ",")) != NULL)
        good = is_patterns ? take_pattern(item, &o->patterns) : take_allocator(item, o);
    return good;
}

static bool take_level(const char *text, options *o)
{
    static const char *const words[] = {"quick", "medium", "long"};
    static const double seconds[] = {60, 600, 3600};
    int level = take_word("level", text, words, 3);
    if (level >= 0)
        o->level_seconds = seconds[level];
    return level >= 0;
}

static bool take_seconds(const char *text, options *o)
{
    uint64_t seconds = 0;
    bool good = option_number("seconds", text, 1, UINT64_C(1) << 30, &seconds);
    o->seconds = (double)seconds;
    return good;
}

static bool take_device(const char *text, options *o)
{
    unsigned device = 0;
    o->all_devices = strcmp(text, "all") == 0;
    bool good = o->all_devices || option_count("device", text, 0, MOST_DEVICES - 1, &device);
    o->device = (int)device;
    return good;
}

static bool take_metrics(const char *text, options *o)
{
    unsigned port = 0;
    bool good = metrics_known() && option_count("metrics", text, 0, UINT16_MAX, &port);
    o->metrics_port = (int)port;
    return good;
}

static bool take_verify(const char *text, options *o)
{
    static const char *const words[] = {"full", "edges", "off"};
    int mode = take_word("verify", text, words, 3);
    o->verify = (verify_mode)mode;
    return mode >= 0;
}

static bool take_plant(const char *text, options *o)
{
    int plant = take_word("plant", text, plant_names, PLANTS);
    o->plant = (enum plant)plant;
    return plant >= 0;
}

static bool take_driver(const char *text, options *o)
{
    static const char *const words[] = {"sim", "cuda"};
    int driver = take_word("driver", text, words, 2);
    o->cuda = driver == 1;
    return driver >= 0;
}

static const struct option long_options[] = {
    {"driver", required_argument, NULL, 'd'},
    {"device", required_argument, NULL, 'D'},
    {"allocator", required_argument, NULL, 'a'},
    {"level", required_argument, NULL, 'l'},
    {"seconds", required_argument, NULL, 's'},
    {"threads", required_argument, NULL, 't'},
    {"streams", required_argument, NULL, 'S'},
    {"fraction", required_argument, NULL, 'f'},
    {"seed", required_argument, NULL, 'r'},
    {"pattern", required_argument, NULL, 'p'},
    {"verify", required_argument, NULL, 'v'},
    {"faults", no_argument, NULL, 'F'},
    {"health", no_argument, NULL, 'H'},
    {"metrics", required_argument, NULL, 'm'},
    {"metrics-address", required_argument, NULL, 'A'},
    {"json", required_argument, NULL, 'j'},
    {"plant", required_argument, NULL, 'P'},
    {"help", no_argument, NULL, 'h'},
    {NULL, 0, NULL, 0},
};

static bool take_option(int option, options *o)
{
    switch (option) {
    case 'd':
        return take_driver(optarg, o);
    case 'D':
        return take_device(optarg, o);
    case 'a':
        return take_list(optarg, o, false);
    case 'l':
        return take_level(optarg, o);
    case 's':
        return take_seconds(optarg, o);
    case 't':
        return option_count("threads", optarg, 1, MOST_THREADS, &o->threads);
    case 'S':
        return option_count("streams", optarg, 1, MAX_SHARED_STREAMS, &o->streams);
    case 'f':
        return option_factor("fraction", optarg, 0.01, 1, &o->fraction);
    case 'r':
        return option_number("seed", optarg, 0, UINT64_MAX, &o->seed);
    case 'p':
        return take_list(optarg, o, true);
    case 'v':
        return take_verify(optarg, o);
    case 'F':
        return o->faults = true;
    case 'H':
        return o->health = true;
    case 'm':
        return take_metrics(optarg, o);
    case 'A':
        o->metrics_address = optarg;
        return true;
    case 'j':
        o->json = optarg;
        return true;
    case 'P':
        return take_plant(optarg, o);
    default:
        return false; /* getopt has told it */
    }
}

/* What the options ask for, and would not be done by the run: it would pass without. */
static const char *unmet(const options *o)
{
    if (o->cuda && (o->faults || (o->plant != PLANT_NONE && o->plant != PLANT_BIT)))
        return "--faults, and --plant but for bit, are for --driver sim";
    if (!o->vpmm && (o->faults || o->plant != PLANT_NONE))
        return "--faults and --plant are for --allocator vpmm";
    bool is_seen_in_memory =
        o->plant == PLANT_BIT || o->plant == PLANT_REUSE || o->plant == PLANT_DOUBLE_MAP || o->plant == PLANT_UNMAPPED;
    if (o->verify == VERIFY_OFF && is_seen_in_memory)
        return "--plant bit, reuse, double-map and unmapped are found in the memory, at which --verify off does not "
               "look";
    if (o->streams < o->threads)
        return "--streams: each thread has one or two of its own, so as many as --threads are the least";
    if (!o->cuda && o->health)
        return "--health is for --driver cuda: the simulated GPU has none to read";
    return NULL;
}

/* What has no default of its own follows the rest. */
static bool complete(options *o)
{
    if (o->seconds == 0)
        o->seconds = o->level_seconds;
    if (o->streams == 0)
        o->streams = 2 * o->threads;
    if (o->fraction == 0)
        o->fraction = o->cuda ? 0.9 : 0.5;
    if ((int)o->verify < 0)
        o->verify = o->cuda ? VERIFY_FULL : VERIFY_EDGES;
    if (unmet(o)) {
        fprintf(stderr, "%s: %s\n", program_name, unmet(o));
        return false;
    }
    if (!o->cuda && o->device != 0) {
        fprintf(stderr, "%s: --device %d: the simulated GPU is device 0\n", program_name, o->device);
        return false;
    }
    return true;
}

/* Ends the program after --help and on errors. */
static options parse_options(int argc, char **argv)
{
    options o = {.vpmm = true,
                 .level_seconds = 60,
                 .threads = 4,
                 .patterns = (UINT32_C(1) << PATTERN_COUNT) - 1,
                 .verify = (verify_mode)-1,
                 .seed = (uint64_t)time(NULL),
                 .metrics_port = -1};
    int option;
    bool good = true;
    while (good && (option = getopt_long(argc, argv, "", long_options, NULL)) != -1) {
        if (option == 'h') {
            print_help();
            exit(PASSED);
        }
        good = take_option(option, &o);
    }
    if (good && optind < argc)
        good = option_refuse("", argv[optind], "there are only options");
    if (!good || !complete(&o)) {
        fprintf(stderr, "%s: see %s --help\n", program_name, program_name);
        exit(USAGE);
    }
    return o;
}

/* ---- devices ---- */

static char why_none[256]; /* why there is no run; "": there are runs, or why is told on stderr alone */

/* Told, and kept for the JSON. */
__attribute__((format(printf, 1, 2))) static void tell_why(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(why_none, sizeof why_none, format, arguments);
    va_end(arguments);
    fprintf(stderr, "%s: %s\n", program_name, why_none);
}

static unsigned skip(const char *why)
{
    tell_why("skipped: %s", why);
    fprintf(stderr, "  Install the NVIDIA driver, give the container a GPU, or use --driver sim.\n");
    return 0;
}

/* How many there are; 0: told. */
static unsigned count_devices(const options *o, enum outcome *outcome)
{
    int devices = 0;
    if (!o->cuda)
        return 1;
    *outcome = SKIPPED;
    const vpmm_driver *driver = vpmm_driver_cuda();
    if (!driver)
        return skip(vpmm_last_error());
    CUresult result = driver->cuInit(0);
    if (result == CUDA_ERROR_NO_DEVICE)
        return skip("the driver finds no device");
    if (result != CUDA_SUCCESS || driver->cuDeviceGetCount(&devices) != CUDA_SUCCESS) {
        *outcome = DEVICE_ERROR;
        tell_why("could not run: cuInit: %d. Look at nvidia-smi and dmesg", (int)result);
        return 0;
    }
    if (devices == 0)
        return skip("the driver finds no device");
    if (!o->all_devices && o->device >= devices) {
        *outcome = USAGE;
        tell_why("--device %d: there are %d, from 0 on", o->device, devices);
        return 0;
    }
    return devices < MOST_DEVICES ? (unsigned)devices : MOST_DEVICES;
}

/* ---- the JSON ---- */

static FILE *json; /* NULL: none is asked for */

/* Before all else: a path that cannot be written is told at once, and no earlier result stays there. */
static bool open_json(const options *o)
{
    json = o->json == NULL ? NULL : strcmp(o->json, "-") == 0 ? stdout : fopen(o->json, "w");
    if (o->json != NULL && json == NULL)
        fprintf(stderr, "%s: --json %s: %s\n", program_name, o->json, strerror(errno));
    return o->json == NULL || json != NULL;
}

static bool write_json(const options *o, const run *all, unsigned runs, int outcome, bool cut_short)
{
    if (json == NULL)
        return true;
    report_json(json, o, all, runs, outcome, cut_short, why_none);
    bool good = fflush(json) == 0 && !ferror(json);
    if (json != stdout)
        good = fclose(json) == 0 && good;
    if (!good)
        fprintf(stderr, "%s: --json %s: %s\n", program_name, o->json, strerror(errno));
    return good;
}

/* ---- the time of a run ---- */

static sigset_t ends;
static bool is_terminated; /* by SIGTERM */

static void jolted(int signal)
{
    (void)signal;
}

/* Before the first thread, which inherits what is blocked. */
static void set_signals(void)
{
    struct sigaction jolt = {.sa_handler = jolted}; /* no SA_RESTART: calls are interrupted */
    sigaction(JOLT_SIGNAL, &jolt, NULL);
    sigemptyset(&ends);
    sigaddset(&ends, SIGINT);
    sigaddset(&ends, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &ends, NULL);
}

/* Whether somebody has asked for the end, within so many seconds. */
static bool wait_for_end(double seconds)
{
    struct timespec t = {(time_t)seconds, (long)(fmod(seconds, 1) * 1e9)};
    int signal = sigtimedwait(&ends, NULL, &t);
    is_terminated |= signal == SIGTERM;
    return signal > 0;
}

/* 1, 2, 5, 10, then every 10. */
static double next_report(double seconds)
{
    return seconds < 1 ? 1 : seconds < 2 ? 2 : seconds < 5 ? 5 : seconds < 10 ? 10 : seconds + 10;
}

static bool any_runs(const run *all, unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        if (atomic_load(&all[i].outcome) == PASSED)
            return true;
    return false;
}

static bool any_failed(const run *all, unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        if (atomic_load(&all[i].outcome) == FAILED)
            return true;
    return false;
}

/* Of the program that ends, which cannot wait for its threads: no run's numbers, but which way it has ended. */
static _Noreturn void leave_stuck(const run *all, unsigned n)
{
    int outcome = any_failed(all, n) ? FAILED : STUCK;
    write_json(all[0].options, all, 0, outcome, false);
    fflush(NULL);
    _exit(outcome);
}

/* All that can be said of a program that cannot go on, and its end. What has failed was told. */
static void end_stuck(const run *all, unsigned n, const run *stuck)
{
    fprintf(stderr, "%s: stuck: no thread of device %d has done a step for %d s\n", program_name, stuck->ordinal,
            STUCK_S);
    if (stuck->target.pool)
        vpmm_dump(stuck->target.pool, stderr);
    leave_stuck(all, n);
}

/* What the main thread has seen of the time of a run. */
struct watch {
    double begun, seconds, report_at;
    struct {
        double moved_at;
        uint64_t steps;
    } of[MOST_DEVICES];
};

static bool is_running(const run *r)
{
    return r->begun != 0 && atomic_load(&r->outcome) == PASSED;
}

/* The threads' births, and what the process uses. */
static void tend_all(struct watch *w, run *all, unsigned n)
{
    for (unsigned i = 0; i < n; i++) {
        run_tend(&all[i]);
        resources_look(&all[i].resources, (now_seconds() - w->begun) / w->seconds);
        uint64_t steps = run_count(&all[i], COUNT_steps);
        if (steps != w->of[i].steps || !is_running(&all[i]))
            w->of[i].moved_at = now_seconds();
        w->of[i].steps = steps;
        if (now_seconds() - w->of[i].moved_at > STUCK_S)
            end_stuck(all, n, &all[i]);
    }
}

static void report_all(struct watch *w, run *all, unsigned n)
{
    if (now_seconds() - w->begun < w->report_at)
        return;
    w->report_at = next_report(w->report_at);
    for (unsigned i = 0; i < n; i++)
        if (is_running(&all[i]))
            report_progress(&all[i]);
}

/* Until the time is over, every run has ended, or somebody asks for the end, which is the result. */
static bool tend(run *all, unsigned n, double seconds)
{
    const double now = now_seconds(), tick = 0.01;
    struct watch w = {.begun = now, .seconds = seconds, .report_at = next_report(0)};
    bool asked = false;
    for (unsigned i = 0; i < n; i++)
        w.of[i].moved_at = now;
    while (!asked && any_runs(all, n) && now_seconds() - w.begun < seconds) {
        asked = wait_for_end(tick);
        tend_all(&w, all, n);
        report_all(&w, all, n);
    }
    return asked;
}

struct closing {
    const run *all;
    unsigned n;
    sem_t is_over;
};

/* A thread that makes sure of an end: closing may wait for a device that does not answer. */
static void *watch_closing(void *argument)
{
    struct closing *closing = argument;
    struct timespec end;
    int waited;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += STUCK_S;
    while ((waited = sem_timedwait(&closing->is_over, &end)) != 0 && errno == EINTR)
        ;
    if (waited == 0)
        return NULL;
    fprintf(stderr, "%s: stuck: the end took more than %d s\n", program_name, STUCK_S);
    leave_stuck(closing->all, closing->n);
}

static void close_all(run *all, unsigned n)
{
    struct closing closing = {.all = all, .n = n};
    pthread_t watch;
    sem_init(&closing.is_over, 0, 0);
    bool watched = pthread_create(&watch, NULL, watch_closing, &closing) == 0;
    for (unsigned i = 0; i < n; i++)
        atomic_store(&all[i].stop, true);
    for (unsigned i = 0; i < n; i++)
        run_close(&all[i]);
    sem_post(&closing.is_over);
    if (watched)
        pthread_join(watch, NULL);
    sem_destroy(&closing.is_over);
}

/* Whether the environment has settings of vpmm's. */
static bool is_configured(void)
{
    for (char **variable = environ; *variable; variable++)
        if (strncmp(*variable, "VPMM_", 5) == 0)
            return true;
    return false;
}

/* A long run of everything, with shared streams and no settings, has to have been everywhere. */
static void judge_paths(run *r)
{
    char missed[512];
    if (atomic_load(&r->outcome) != PASSED) /* it has its outcome */
        return;
    bool is_all = r->options->patterns == (UINT32_C(1) << PATTERN_COUNT) - 1 && r->options->verify != VERIFY_OFF;
    if (!is_all || r->options->threads < 2 || r->shareds == 0 || is_configured() || r->seconds < PATHS_SECONDS)
        return;
    report_paths_missed(r, missed, sizeof missed);
    if (missed[0])
        run_end(r, FAILED, "a rare path was never taken: %s", missed);
}

/* The first minutes fill tables and caches. */
static void judge_resources(run *r)
{
    char grown[256];
    if (atomic_load(&r->outcome) != PASSED || r->seconds < RESOURCES_SECONDS)
        return;
    resources_grown(&r->resources, grown, sizeof grown);
    if (grown[0])
        run_end(r, FAILED, "%s", grown);
}

/* One allocator on all devices at the same time. True: somebody asked for the end. */
static bool run_devices(run *all, unsigned n, const options *o, bool is_async, vpmm_exporter *exporter)
{
    for (unsigned i = 0; i < n; i++)
        run_open(&all[i], o, o->all_devices ? (int)i : o->device, is_async, exporter);
    for (unsigned i = 0; i < n; i++)
        run_begin(&all[i]);
    bool asked = tend(all, n, o->seconds);
    close_all(all, n);
    for (unsigned i = 0; i < n; i++)
        if (!asked) {
            judge_paths(&all[i]);
            judge_resources(&all[i]);
        }
    return asked;
}

/* ---- the program ---- */

/* The worst: what failed before what could not run, and that before what passed. */
static int worst_of(const run *all, unsigned n)
{
    int worst = PASSED;
    for (unsigned i = 0; i < n; i++) {
        int outcome = atomic_load(&all[i].outcome);
        if (outcome == FAILED || (outcome != PASSED && worst == PASSED))
            worst = outcome;
    }
    return worst;
}

/* The simulated GPU of a run that has ended badly is left as it is, and its leaks are nobody's. */
static int end(int outcome)
{
    fflush(NULL);
    if (outcome != PASSED)
        _exit(outcome);
    return outcome;
}

/* Before the first run: the result says so, in the place of what an earlier program has left in the file. */
static int end_without_runs(const options *o, int outcome)
{
    return end(write_json(o, NULL, 0, outcome, false) && output_is_whole() ? outcome : DEVICE_ERROR);
}

/* As another process: see squeeze_process. */
static int squeeze(char **argv)
{
    return end(squeeze_process((int)strtol(argv[2], NULL, 10), (size_t)strtoull(argv[3], NULL, 10)));
}

int main(int argc, char **argv)
{
    enum outcome outcome = PASSED;
    if (argc == 4 && strcmp(argv[1], "--squeeze") == 0)
        return squeeze(argv);
    const options o = parse_options(argc, argv);
    set_signals();
    if (!open_json(&o))
        return end(USAGE);
    unsigned found = count_devices(&o, &outcome), devices = o.all_devices ? found : 1, runs = 0;
    vpmm_exporter *exporter = NULL;
    if (found == 0)
        return end_without_runs(&o, outcome);
    if (!metrics_open(o.metrics_port, o.metrics_address, 0, &exporter))
        return end_without_runs(&o, USAGE);
    run *all = calloc((size_t)2 * devices, sizeof *all);
    if (!all) {
        tell_why("no host memory");
        return end_without_runs(&o, DEVICE_ERROR);
    }
    fprintf(stderr, "%s: seed %llu, %u threads, %.0f s\n", program_name, (unsigned long long)o.seed, o.threads,
            o.seconds);
    bool asked = false;
    for (int is_async = 0; is_async < 2 && !asked && worst_of(all, runs) == PASSED; is_async++)
        if (is_async ? o.async : o.vpmm) {
            asked = run_devices(all + runs, devices, &o, is_async, exporter);
            runs += devices;
        }
    int worst = worst_of(all, runs);
    FILE *text = json == stdout ? stderr : stdout;
    for (unsigned i = 0; i < runs; i++)
        report_result(text, &all[i]);
    fprintf(text, "%s: %s%s\n", program_name, outcome_word(worst), asked ? ", cut short" : "");
    int status = worst == PASSED && is_terminated ? TERMINATED : worst;
    bool written = write_json(&o, all, runs, status, asked) && output_is_whole();
    if (!written || !metrics_close(exporter))
        return end(worst != PASSED ? worst : DEVICE_ERROR);
    for (unsigned i = 0; i < runs; i++)
        free(all[i].lanes);
    free(all);
    return end(status);
}
