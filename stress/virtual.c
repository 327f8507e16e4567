/*
 * vpmm-virtual - replays traces by many threads at once in virtual time: what is held, and how long mallocs take, when
 * several build. The same arguments give the same output.
 */
#define _GNU_SOURCE 1

#include "virtual.h"

#include "option.h"
#include "target.h"
#include "trace.h"

#include <getopt.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

const char program_name[] = "vpmm-virtual";

enum { EXIT_BAD = 1, EXIT_USAGE = 2 };
enum { MAX_PASSES = 1000, MAX_THREADS = 256, MAX_TRACES = 64 };
enum { OP_NS = 200, OP_SPREAD_NS = 100 }; /* of the program, between two calls */
#define SIM_MEMORY_BYTES ((size_t)512 << 30)
#define SMALL_UNIT       256 /* a request below a page is rounded to it, whoever serves it */

static const char help[] =
    "usage: vpmm-virtual [OPTION]... TRACE...\n"
    "\n"
    "Replays recorded allocation traces (CSV: op,id,bytes,stream,us) with many threads on one pool of vpmm's, on a\n"
    "simulated GPU, in virtual time: a driver call takes what it takes on an H200, mappings are changed by one thread\n"
    "at a time, and nothing depends on this machine. The same arguments give the same output.\n"
    "\n"
    "  --threads N      N threads, each with streams of its own (default 4). The first replays the first trace, the\n"
    "                   second the second one, and so on, again from the first\n"
    "  --passes N       replay N times on one pool (default 2: the first finds it empty)\n"
    "  --scale F        multiply every size by F (default 1)\n"
    "  --min-bytes N    leave out requests below N bytes, after --scale (default 0)\n"
    "  --pace           follow the traces' times; without it there is next to no time between the calls\n"
    "  --default-stream each trace's first stream is the default stream, one for all threads\n"
    "  --lag US         the GPU is so many microseconds behind the host (default 0)\n"
    "  --stall US       the driver serves others for so long in each 300th call that changes mappings (default 0)\n"
    "  --shift US       each thread begins so much later than the one before (default 0)\n"
    "  --seed N         of the little time between a thread's calls (default 1)\n"
    "  --json FILE|-    one object per pass, in an array, to FILE or to standard output (the table then goes to\n"
    "                   standard error)\n"
    "  --help           this text\n"
    "\n"
    "Numbers take K, M or G (powers of 1024). vpmm is configured by its VPMM_* environment variables.\n"
    "\n"
    "The table: held/dem. is the highest mapped over the highest demand (live requests and those that a malloc is\n"
    "serving), held/use over live requests alone, all since the pool's creation; the percentiles and max are what a\n"
    "malloc takes with all it waits for, own what driver calls took that the longest one made, for other threads too;\n"
    "driver ms is the time of calls that change mappings, in mallocs and in the background. A second line says why\n"
    "memory was made, in shares of it: it was elsewhere in other threads' hands, behind fences, in caches, stuck in\n"
    "partly live handles; and what mapped was at its highest.\n"
    "\n"
    "Exit status: 0 nothing was refused and every audit passed; 1 otherwise; 2 wrong usage or a malformed trace.\n"
    "\n"
    "Example: vpmm-virtual --threads 4 --passes 8 examples/requests.csv\n";

/* ---- the run ---- */

typedef struct player {
    unsigned index;
    const trace *trace;
    pthread_t thread;
    CUstream *streams;
    CUdeviceptr *held; /* by slot; 0: nothing */
    uint64_t *latencies;
    size_t mallocs;
    uint64_t random, longest_ns, longest_own_ns;
    virtual_account account;
    bool creates;             /* in the malloc that it is in, which */
    virtual_census at_create; /* found this when it made its first handle */
} player;

/* Of the program's only run. Under virtual time one thread at a time goes on, so that none of it needs a lock. */
static struct {
    const virtual_options *options;
    gpu gpu;
    vpmm_pool *pool;
    size_t page_size;
    player *players;
    unsigned playing;            /* have not ended the pass */
    int gate, ended;             /* whose addresses are the gates: of a pass's beginning, and of its end */
    bool failed, over, is_async; /* is_async: small requests are the driver's pool's */
    uint64_t in_use, demand, peak_in_use, peak_demand, peak_mapped;
    virtual_census missed, at_peak;
} run;

static uint64_t use_of(uint64_t bytes)
{
    uint64_t unit = bytes < run.page_size ? SMALL_UNIT : run.page_size;
    return (bytes + unit - 1) / unit * unit;
}

static _Thread_local player *self;

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static void blame(uint64_t *bytes, uint64_t there, uint64_t *missed)
{
    uint64_t share = least(*bytes, there);
    *missed += share;
    *bytes -= share;
}

/* A malloc is about to make a handle. */
static void note_create(void)
{
    if (!self->creates)
        self->at_create = virtual_census_take(run.pool);
    self->creates = true;
}

/* A malloc has made so many bytes: why not with what was mapped? What it had in its own hands was in its use. */
static void blame_missing(uint64_t bytes, uint64_t use)
{
    const virtual_census *then = &self->at_create;
    uint64_t own = use > bytes ? use - bytes : 0;
    blame(&bytes, then->hands > own ? then->hands - own : 0, &run.missed.hands);
    blame(&bytes, then->fenced, &run.missed.fenced);
    blame(&bytes, then->cached, &run.missed.cached);
    blame(&bytes, then->stuck, &run.missed.stuck);
    blame(&bytes, then->whole, &run.missed.whole);
    run.missed.live += bytes;
}

static void note_mapped(void)
{
    vpmm_stats stats;
    if (vpmm_stats_get(run.pool, &stats) != VPMM_SUCCESS)
        return;
    uint64_t now = stats.mapped_bytes + stats.async_bytes,
             mapped = now > stats.peak_mapped_bytes ? now : stats.peak_mapped_bytes;
    if (mapped <= run.peak_mapped)
        return;
    run.peak_mapped = mapped;
    run.at_peak = virtual_census_take(run.pool);
}

static void add_demand(uint64_t use)
{
    run.demand += use;
    if (run.demand > run.peak_demand)
        run.peak_demand = run.demand;
}

static void add_use(uint64_t use)
{
    run.in_use += use;
    if (run.in_use > run.peak_in_use)
        run.peak_in_use = run.in_use;
}

static void note_latency(player *p, uint64_t ns, uint64_t own_ns)
{
    p->latencies[p->mallocs++] = ns;
    if (ns <= p->longest_ns)
        return;
    p->longest_ns = ns;
    p->longest_own_ns = own_ns;
}

static bool play_malloc(player *p, const trace_event *e)
{
    uint64_t begin = virtual_now_ns(), own = p->account.ns, created = p->account.created_bytes, use = use_of(e->bytes);
    p->creates = false;
    add_demand(use);
    vpmm_status status = vpmm_malloc(run.pool, e->bytes, p->streams[e->stream], &p->held[e->slot]);
    if (!vpmm_ok("vpmm_malloc", status)) {
        run.demand -= use;
        return false;
    }
    add_use(use);
    note_latency(p, virtual_now_ns() - begin, p->account.ns - own);
    if (p->creates)
        blame_missing(p->account.created_bytes - created, use);
    if (p->creates || run.is_async)
        note_mapped();
    return true;
}

static bool play_free(player *p, uint32_t slot, unsigned stream, uint64_t bytes)
{
    CUdeviceptr address = p->held[slot];
    if (!address)
        return true;
    p->held[slot] = 0;
    run.demand -= use_of(bytes);
    run.in_use -= use_of(bytes);
    return vpmm_ok("vpmm_free", vpmm_free(run.pool, address, p->streams[stream]));
}

static uint64_t draw(player *p, uint64_t below)
{
    p->random ^= p->random << 13;
    p->random ^= p->random >> 7;
    p->random ^= p->random << 17;
    return (p->random >> 11) % below;
}

static bool play_event(player *p, const trace_event *e, uint64_t begin_ns)
{
    virtual_spend_loosely(OP_NS - OP_SPREAD_NS / 2 + draw(p, OP_SPREAD_NS));
    if (run.options->pace)
        virtual_sleep_until(begin_ns + e->us * 1000);
    return e->op == TRACE_MALLOC ? play_malloc(p, e) : play_free(p, e->slot, e->stream, e->bytes);
}

static bool synchronise(const player *p)
{
    bool ok = true;
    for (size_t s = 0; s < p->trace->streams; s++)
        ok = gpu_ok(&run.gpu, "cuStreamSynchronize", run.gpu.driver->cuStreamSynchronize(p->streams[s])) && ok;
    return ok;
}

static bool play_pass(player *p)
{
    const trace *t = p->trace;
    uint64_t begin_ns = virtual_now_ns();
    bool ok = true;
    for (size_t i = 0; ok && !run.failed && i < t->count; i++)
        ok = play_event(p, &t->events[i], begin_ns);
    for (size_t i = 0; i < t->count; i++)
        if (t->events[i].op == TRACE_MALLOC)
            ok = play_free(p, t->events[i].slot, t->events[i].stream, t->events[i].bytes) && ok;
    return synchronise(p) && ok;
}

static void *play(void *data)
{
    player *p = data;
    bool entered = gpu_enter(&run.gpu);
    self = p;
    virtual_driver_account(&p->account);
    for (;;) {
        virtual_wait_at(&run.gate);
        if (run.over)
            return NULL;
        virtual_spend(p->index * run.options->shift_us * 1000);
        if (!entered || !play_pass(p))
            run.failed = true;
        if (--run.playing == 0)
            virtual_open(&run.ended);
    }
}

/* ---- passes ---- */

static int by_value(const void *a, const void *b)
{
    const uint64_t *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}

static double quantile_us(const uint64_t *sorted, size_t n, double q)
{
    if (n == 0)
        return 0;
    size_t i = (size_t)ceil(q * (double)n);
    return (double)sorted[i ? i - 1 : 0] / 1e3;
}

static bool note_percentiles(virtual_result *r)
{
    size_t n = 0;
    uint64_t *all = malloc((size_t)(r->mallocs + 1) * sizeof *all);
    if (all == NULL)
        return false;
    for (unsigned i = 0; i < run.options->threads; i++) {
        const player *p = &run.players[i];
        memcpy(all + n, p->latencies, p->mallocs * sizeof *all);
        n += p->mallocs;
    }
    qsort(all, n, sizeof *all, by_value);
    r->p50_us = quantile_us(all, n, 0.5);
    r->p99_us = quantile_us(all, n, 0.99);
    r->p999_us = quantile_us(all, n, 0.999);
    r->max_us = quantile_us(all, n, 1);
    free(all);
    return true;
}

static void add_account(virtual_account *sum, const virtual_account *a)
{
    sum->calls += a->calls;
    sum->ns += a->ns;
    sum->creates += a->creates;
    sum->created_bytes += a->created_bytes;
    sum->moves += a->moves;
}

static void subtract_account(virtual_account *from, const virtual_account *a)
{
    from->calls -= a->calls;
    from->ns -= a->ns;
    from->creates -= a->creates;
    from->created_bytes -= a->created_bytes;
    from->moves -= a->moves;
}

static void gather_players(virtual_result *r)
{
    uint64_t longest = 0;
    for (unsigned i = 0; i < run.options->threads; i++) {
        const player *p = &run.players[i];
        r->mallocs += p->mallocs;
        add_account(&r->by_malloc, &p->account);
        if (p->longest_ns <= longest)
            continue;
        longest = p->longest_ns;
        r->max_own_us = (double)p->longest_own_ns / 1e3;
    }
}

static void begin_pass(void)
{
    run.missed = (virtual_census){0};
    for (unsigned i = 0; i < run.options->threads; i++) {
        player *p = &run.players[i];
        p->mallocs = 0;
        p->longest_ns = p->longest_own_ns = 0;
        p->account = (virtual_account){0};
    }
    run.playing = run.options->threads;
}

/* All is freed, and no other thread is inside. */
static bool audit(void)
{
    return vpmm_ok("vpmm_poll", vpmm_poll(run.pool)) && vpmm_ok("the audit", vpmm_check(run.pool));
}

static bool run_pass(unsigned pass, virtual_result *r)
{
    vpmm_stats before, after;
    virtual_account background = virtual_driver_background();
    uint64_t begin = virtual_now_ns();
    *r = (virtual_result){.pass = pass};
    begin_pass();
    vpmm_stats_get(run.pool, &before);
    virtual_open(&run.gate);
    virtual_wait_at(&run.ended);
    r->seconds = (double)(virtual_now_ns() - begin) / 1e9;
    r->background = virtual_driver_background();
    subtract_account(&r->background, &background);
    vpmm_stats_get(run.pool, &after);
    r->builds = after.builds - before.builds;
    gather_players(r);
    note_mapped();
    r->peak_in_use = run.peak_in_use;
    r->peak_demand = run.peak_demand;
    r->peak_mapped = run.peak_mapped;
    r->missed = run.missed;
    r->at_peak = run.at_peak;
    r->good = !run.failed && audit();
    return note_percentiles(r) && r->good;
}

/* ---- players come and go ---- */

/* NULL among a player's streams. */
static bool is_default(const trace *t, size_t stream)
{
    return run.options->default_stream && trace_is_first_stream(t, stream);
}

static bool open_player(player *p, unsigned index, const trace *t)
{
    *p = (player){.index = index, .trace = t, .random = run.options->seed * 1000003 + index + 1};
    p->streams = calloc(t->streams, sizeof *p->streams);
    p->held = calloc(t->slots + 1, sizeof *p->held);
    p->latencies = calloc(t->mallocs + 1, sizeof *p->latencies);
    bool ok = p->streams != NULL && p->held != NULL && p->latencies != NULL;
    if (!ok)
        fprintf(stderr, "vpmm-virtual: no host memory for thread %u\n", index);
    for (size_t s = 0; ok && s < t->streams; s++)
        ok = is_default(t, s) ||
             gpu_ok(&run.gpu, "cuStreamCreate", run.gpu.driver->cuStreamCreate(&p->streams[s], CU_STREAM_NON_BLOCKING));
    if (!ok || virtual_start(&p->thread, play, p, virtual_now_ns()))
        return ok;
    fprintf(stderr, "vpmm-virtual: thread %u cannot be started: use fewer --threads, or raise the limit (ulimit -u)\n",
            index);
    return false;
}

/* Also of one that could not be opened, or not wholly. */
static void close_player(player *p)
{
    for (size_t s = 0; p->streams != NULL && s < p->trace->streams; s++) {
        if (p->streams[s] == NULL)
            continue;
        vpmm_stream_release(run.pool, p->streams[s]);
        run.gpu.driver->cuStreamDestroy(p->streams[s]);
    }
    free(p->streams);
    free(p->held);
    free(p->latencies);
}

static bool open_pool(const vpmm_config *settings)
{
    vpmm_config config = *settings;
    config.driver = run.gpu.driver;
    config.device = 0;
    if (!vpmm_ok("vpmm_pool_create", vpmm_pool_create(&config, &run.pool)))
        return false;
    run.is_async = config.small == VPMM_SMALL_ASYNC;
    if (config.reaper)
        virtual_await_thread();
    return gpu_page_size(&run.gpu, config.page_size, &run.page_size);
}

static bool open_gpu(void)
{
    vpmm_sim_config sim = vpmm_sim_config_default();
    sim.memory_bytes = SIM_MEMORY_BYTES;
    sim.stepped = true;
    sim.detect_races = false;
    if (!gpu_open(&run.gpu, &(gpu_options){.sim = &sim}))
        return false;
    virtual_begin();
    run.gpu.driver =
        virtual_driver_open(run.gpu.sim, run.options->lag_us * 1000, run.options->stall_us * 1000, note_create);
    return true;
}

static bool run_passes(virtual_report *report)
{
    bool good = true;
    for (unsigned pass = 1; good && pass <= run.options->passes; pass++) {
        virtual_result result;
        good = run_pass(pass, &result);
        virtual_report_pass(report, &result);
    }
    return good;
}

static unsigned open_players(const trace *traces, unsigned n)
{
    unsigned opened = 0;
    while (opened < run.options->threads && open_player(&run.players[opened], opened, &traces[opened % n]))
        opened++;
    virtual_spend(1000); /* for all to come to the gate */
    return opened;
}

static void close_players(unsigned opened)
{
    run.over = true;
    virtual_end();
    for (unsigned i = 0; i < opened; i++)
        pthread_join(run.players[i].thread, NULL);
    for (unsigned i = 0; i < run.options->threads; i++)
        close_player(&run.players[i]);
}

static bool replay_on_pool(const trace *traces, unsigned n, virtual_report *report)
{
    run.players = calloc(run.options->threads, sizeof *run.players);
    if (run.players == NULL)
        return false;
    unsigned opened = open_players(traces, n);
    bool good = opened == run.options->threads && run_passes(report);
    close_players(opened);
    free(run.players);
    return good;
}

static bool replay(const virtual_options *options, const vpmm_config *settings, const trace *traces, unsigned n,
                   virtual_report *report)
{
    run.options = options;
    bool good = open_gpu() && open_pool(settings) && replay_on_pool(traces, n, report);
    if (virtual_is_on()) /* what was opened in part has threads that wait for their turn */
        virtual_end();
    if (run.pool != NULL)
        good = vpmm_ok("vpmm_pool_destroy", vpmm_pool_destroy(run.pool)) && good;
    virtual_driver_close();
    return gpu_close(&run.gpu) == 0 && good;
}

/* ---- options ---- */

static const struct option long_options[] = {
    {"threads", required_argument, NULL, 't'},
    {"passes", required_argument, NULL, 'p'},
    {"scale", required_argument, NULL, 's'},
    {"lag", required_argument, NULL, 'l'},
    {"min-bytes", required_argument, NULL, 'm'},
    {"stall", required_argument, NULL, 'w'},
    {"shift", required_argument, NULL, 'f'},
    {"seed", required_argument, NULL, 'S'},
    {"json", required_argument, NULL, 'j'},
    {"pace", no_argument, NULL, 'P'},
    {"default-stream", no_argument, NULL, 'D'},
    {"help", no_argument, NULL, 'h'},
    {NULL, 0, NULL, 0},
};

static bool take_option(int option, virtual_options *o)
{
    enum { LONGEST_US = 1000000000 };
    switch (option) {
    case 't':
        return option_count("threads", optarg, 1, MAX_THREADS, &o->threads);
    case 'p':
        return option_count("passes", optarg, 1, MAX_PASSES, &o->passes);
    case 's':
        return option_factor("scale", optarg, 1e-6, 1000, &o->scale);
    case 'l':
        return option_number("lag", optarg, 0, LONGEST_US, &o->lag_us);
    case 'm':
        return option_number("min-bytes", optarg, 0, TRACE_MAX_BYTES, &o->min_bytes);
    case 'w':
        return option_number("stall", optarg, 0, LONGEST_US, &o->stall_us);
    case 'f':
        return option_number("shift", optarg, 0, LONGEST_US, &o->shift_us);
    case 'S':
        return option_number("seed", optarg, 0, UINT32_MAX, &o->seed);
    case 'j':
        o->json = optarg;
        return true;
    case 'P':
        return o->pace = true;
    case 'D':
        return o->default_stream = true;
    default:
        return false; /* getopt has told it */
    }
}

/* Ends the program after --help and on errors. */
static virtual_options parse_options(int argc, char **argv)
{
    virtual_options o = {.passes = 2, .threads = 4, .scale = 1, .seed = 1};
    int option;
    bool ok = true;
    while (ok && (option = getopt_long(argc, argv, "", long_options, NULL)) != -1) {
        if (option == 'h') {
            fputs(help, stdout);
            exit(0);
        }
        ok = take_option(option, &o);
    }
    if (ok && (optind == argc || argc - optind > MAX_TRACES)) {
        fprintf(stderr, "vpmm-virtual: %d traces are named; 1 to %d are allowed\n", argc - optind, MAX_TRACES);
        ok = false;
    }
    if (!ok) {
        fprintf(stderr, "vpmm-virtual: see vpmm-virtual --help\n");
        exit(EXIT_USAGE);
    }
    return o;
}

/* "serving+resnet": the traces' names, without folder and .csv. */
static void join_names(char **paths, int n, char *names, size_t size)
{
    names[0] = '\0';
    for (int i = 0; i < n; i++) {
        const char *slash = strrchr(paths[i], '/'), *name = slash ? slash + 1 : paths[i];
        int length = (int)strcspn(name, ".");
        size_t used = strlen(names);
        snprintf(names + used, size - used, "%s%.*s", i ? "+" : "", length, name);
    }
}

/* Else the driver's own pool would serve every request. */
static bool has_pages(const vpmm_config *settings)
{
    if (settings->page_size <= SIM_MEMORY_BYTES)
        return true;
    fprintf(stderr, "vpmm-virtual: VPMM_PAGE_SIZE is above the simulated device's memory, %llu GiB: less is allowed\n",
            (unsigned long long)(SIM_MEMORY_BYTES >> 30));
    return false;
}

int main(int argc, char **argv)
{
    static trace traces[MAX_TRACES];
    virtual_options o = parse_options(argc, argv);
    unsigned n = (unsigned)(argc - optind), loaded = 0;
    char names[256], error[512];
    virtual_report report;
    vpmm_config settings = vpmm_config_default();
    if (!vpmm_ok("the environment", vpmm_config_from_env(&settings)) || !has_pages(&settings))
        return EXIT_USAGE;
    while (loaded < n &&
           trace_load(argv[optind + (int)loaded], o.scale, o.min_bytes, &traces[loaded], error, sizeof error))
        loaded++;
    if (loaded < n)
        fprintf(stderr, "vpmm-virtual: %s\n", error);
    join_names(argv + optind, (int)n, names, sizeof names);
    if (loaded < n || !virtual_report_open(&report, &o, names))
        return EXIT_USAGE;
    bool good = replay(&o, &settings, traces, n, &report);
    for (unsigned i = 0; i < n; i++)
        trace_release(&traces[i]);
    good = virtual_report_close(&report) && good;
    return output_is_whole() && good ? 0 : EXIT_BAD;
}
