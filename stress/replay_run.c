#define _GNU_SOURCE 1

#include "replay.h"

#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "timing.h"
#include "verify.h"

#define IDLE_POLL_US     2.0    /* a poll charged less found nothing to do: looking at one event costs 1.3 */
#define SPIN_NS          100000 /* the last stretch before an event's time is spun, since sleeping overshoots */
#define PROGRESS_EVENTS  2048
#define SIM_MEMORY_BYTES ((size_t)128 << 30)
#define SMALL_UNIT       256 /* a request below a page is rounded to it, whoever serves it */
#define SAMPLE_EVERY     64  /* mallocs of a thread, between two looks at what is held */

/* What a player holds of a slot. address 0: nothing, or an allocation that was refused. */
typedef struct holding {
    CUdeviceptr address;
    uint64_t bytes;
    uint32_t pattern;
    uint16_t stream;
} holding;

/* What one player did in one pass. */
typedef struct tally {
    uint64_t events, frees, refused;
    size_t mallocs, small_mallocs; /* latencies that are there */
    double malloc_us, driver_us_malloc, driver_us_malloc_max, driver_us_free, driver_us_background;
    double small_us, driver_us_small;
} tally;

/* Shared by the players of a trace. */
typedef struct run {
    const replay_options *options;
    const trace *trace;
    gpu gpu;
    target target;
    size_t page_size;
    char name[64];
    unsigned pass;
    pthread_barrier_t gate; /* players and the main thread, before and after each pass */
    atomic_bool failed;
    atomic_bool told_refusal;
    atomic_uint_fast64_t in_use, demand; /* bytes now; demand has what mallocs are serving, too */
    atomic_uint_fast64_t peak_in_use, peak_demand, peak_mapped; /* since the pool's creation */
    atomic_uint_fast64_t peak_slab, peak_slab_live;             /* of this pass */
} run;

typedef struct player {
    run *run;
    unsigned index;
    pthread_t thread;
    CUstream *streams;
    CUevent *events; /* with --verify: one a stream, to order a free after its fill on another stream */
    holding *holdings;
    double *latencies;       /* us, of this pass's mallocs, */
    double *small_latencies; /* and of those below a page alone */
    verifier *verifier;
    lag_window lag;
    double clock_us; /* --pace on the simulator: the host and the reaper, in the trace's time */
    uint64_t start_ns;
    tally tally;
} player;

static void raise_to(atomic_uint_fast64_t *peak, uint64_t value)
{
    uint_fast64_t seen = atomic_load_explicit(peak, memory_order_relaxed);
    while (seen < value &&
           !atomic_compare_exchange_weak_explicit(peak, &seen, value, memory_order_relaxed, memory_order_relaxed))
        ;
}

static bool is_small(const run *r, uint64_t bytes)
{
    return bytes < r->page_size;
}

/* What a request needs if it is rounded to no more than it must be: below a page to 256 bytes, from there to pages. */
static uint64_t use_of(const run *r, uint64_t bytes)
{
    uint64_t unit = is_small(r, bytes) ? SMALL_UNIT : r->page_size;
    return (bytes + unit - 1) / unit * unit;
}

/* One event. */

/*
 * Seldom: the pool's walk over its free regions after each malloc was a third of the time of sixteen threads, and held
 * up their builds. The highest mapped needs none of it, the pool and the driver keep that themselves; but with
 * VPMM_SMALL=async, where the two are added, and for slabs, what lies between two samples is not seen.
 */
static bool sample_held(run *r)
{
    target_level level;
    bool ok = target_held(&r->target, &level);
    raise_to(&r->peak_mapped, level.mapped);
    raise_to(&r->peak_slab, level.slab);
    raise_to(&r->peak_slab_live, level.slab_live);
    return ok;
}

static void count_small(player *p, double us, double charged_us)
{
    tally *t = &p->tally;
    p->small_latencies[t->small_mallocs++] = us;
    t->small_us += us;
    t->driver_us_small += charged_us;
}

static void count_malloc(player *p, uint64_t bytes, double us, double charged_us)
{
    tally *t = &p->tally;
    p->latencies[t->mallocs++] = us;
    t->malloc_us += us;
    t->driver_us_malloc += charged_us;
    t->driver_us_malloc_max = fmax(t->driver_us_malloc_max, charged_us);
    p->clock_us += charged_us;
    if (is_small(p->run, bytes))
        count_small(p, us, charged_us);
}

static void rise(atomic_uint_fast64_t *sum, atomic_uint_fast64_t *peak, uint64_t by)
{
    raise_to(peak, atomic_fetch_add_explicit(sum, by, memory_order_relaxed) + by);
}

static void fall(atomic_uint_fast64_t *sum, uint64_t by)
{
    atomic_fetch_sub_explicit(sum, by, memory_order_relaxed);
}

static void refuse_malloc(player *p, const trace_event *e)
{
    p->tally.refused++;
    fall(&p->run->demand, use_of(p->run, e->bytes));
    if (!atomic_exchange(&p->run->told_refusal, true))
        fprintf(stderr, "vpmm-replay: %s: out of memory for %" PRIu64 " bytes, further refusals are only counted: %s\n",
                p->run->name, e->bytes, p->run->target.pool != NULL ? vpmm_last_error() : "cuMemAllocFromPoolAsync");
}

static bool fill(player *p, const trace_event *e, holding *h)
{
    verify_block block = {.address = h->address, .bytes = e->bytes, .tag = e->slot};
    if (p->verifier == NULL)
        return true;
    CUresult result = verifier_fill(p->verifier, &block, p->streams[e->stream]);
    h->pattern = block.pattern;
    return gpu_ok(&p->run->gpu, "filling an allocation", result);
}

static bool play_malloc(player *p, const trace_event *e)
{
    run *r = p->run;
    holding *h = &p->holdings[e->slot];
    CUdeviceptr address = 0;
    rise(&r->demand, &r->peak_demand, use_of(r, e->bytes));
    double charged_us = gpu_charged_us(&r->gpu);
    uint64_t start = now_ns();
    target_status status = target_malloc(&r->target, e->bytes, p->streams[e->stream], &address);
    uint64_t end = now_ns();
    charged_us = gpu_charged_us(&r->gpu) - charged_us;
    if (status == TARGET_FAILED)
        return false;
    count_malloc(p, e->bytes, (double)(end - start) / 1e3, charged_us);
    bool ok = p->tally.mallocs % SAMPLE_EVERY != 0 || sample_held(r);
    if (status == TARGET_REFUSED) {
        refuse_malloc(p, e);
        return ok;
    }
    *h = (holding){.address = address, .bytes = e->bytes, .stream = e->stream};
    rise(&r->in_use, &r->peak_in_use, use_of(r, e->bytes));
    return fill(p, e, h) && ok;
}

/* Orders `stream` after what was queued on `before` until now. */
static bool order_streams(player *p, unsigned before, unsigned stream)
{
    const gpu *g = &p->run->gpu;
    if (before == stream)
        return true;
    return gpu_ok(g, "cuEventRecord", g->driver->cuEventRecord(p->events[before], p->streams[before])) &&
           gpu_ok(g, "cuStreamWaitEvent", g->driver->cuStreamWaitEvent(p->streams[stream], p->events[before], 0));
}

static bool check(player *p, uint32_t slot, const holding *h, unsigned stream)
{
    verify_block block = {.address = h->address, .bytes = h->bytes, .pattern = h->pattern, .tag = slot};
    if (p->verifier == NULL)
        return true;
    return order_streams(p, h->stream, stream) &&
           gpu_ok(&p->run->gpu, "checking an allocation", verifier_check(p->verifier, &block, p->streams[stream]));
}

static bool free_slot(player *p, uint32_t slot, unsigned stream)
{
    run *r = p->run;
    holding h = p->holdings[slot];
    if (h.address == 0)
        return true;
    p->holdings[slot].address = 0;
    bool ok = check(p, slot, &h, stream);
    /* Before the free: from then on another thread may have the memory, and it would count twice. */
    fall(&r->in_use, use_of(r, h.bytes));
    fall(&r->demand, use_of(r, h.bytes));
    double charged_us = gpu_charged_us(&r->gpu);
    ok = target_free(&r->target, h.address, p->streams[stream]) && ok;
    charged_us = gpu_charged_us(&r->gpu) - charged_us;
    p->tally.driver_us_free += charged_us;
    p->clock_us += charged_us;
    p->tally.frees++;
    return ok;
}

/* Time. */

static bool poll_reaper(player *p, double *charged_us)
{
    double before = gpu_charged_us(&p->run->gpu);
    bool ok = target_poll(&p->run->target);
    *charged_us = gpu_charged_us(&p->run->gpu) - before;
    p->tally.driver_us_background += *charged_us;
    return ok;
}

/* The simulator's clock moves on to `us`. The reaper has the time until then, or until it twice finds nothing to do. */
static bool pace_reaper(player *p, double us)
{
    unsigned idle = 0;
    while (p->clock_us + 1 <= us && idle < 2) {
        double charged_us;
        if (!poll_reaper(p, &charged_us))
            return false;
        p->clock_us += charged_us;
        idle = charged_us < IDLE_POLL_US ? idle + 1 : 0;
    }
    p->clock_us = fmax(p->clock_us, us);
    return sample_held(p->run);
}

static void wait_until(uint64_t ns)
{
    uint64_t now = now_ns();
    if (now + SPIN_NS < ns) {
        uint64_t wake = ns - SPIN_NS;
        struct timespec t = {.tv_sec = (time_t)(wake / 1000000000u), .tv_nsec = (long)(wake % 1000000000u)};
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL);
    }
    while (now_ns() < ns)
        ;
}

static bool before_event(player *p, const trace_event *e)
{
    if (!p->run->options->pace)
        return true;
    if (p->run->gpu.sim != NULL)
        return pace_reaper(p, (double)e->us);
    wait_until(p->start_ns + e->us * 1000);
    return true;
}

static bool after_event(player *p)
{
    double charged_us;
    lag_advance(&p->lag, p->streams);
    return p->run->options->pace || p->run->gpu.sim == NULL || poll_reaper(p, &charged_us);
}

static bool play_event(player *p, const trace_event *e)
{
    bool ok = before_event(p, e);
    if (ok)
        ok = e->op == TRACE_MALLOC ? play_malloc(p, e) : free_slot(p, e->slot, e->stream);
    p->tally.events++;
    return ok && after_event(p);
}

/* One pass of one player. */

static bool synchronise(player *p)
{
    const gpu *g = &p->run->gpu;
    bool ok = true;
    for (size_t s = 0; s < p->run->trace->streams; s++)
        ok = gpu_ok(g, "cuStreamSynchronize", g->driver->cuStreamSynchronize(p->streams[s])) && ok;
    return ok;
}

static bool free_rest(player *p)
{
    bool ok = true;
    for (size_t slot = 0; slot < p->run->trace->slots; slot++)
        ok = free_slot(p, (uint32_t)slot, p->holdings[slot].stream) && ok;
    return ok;
}

static void show_progress(const player *p, size_t event)
{
    if (p->index == 0 && event % PROGRESS_EVENTS == 0)
        progress_show(p->run->name, p->run->pass, (double)event / (double)p->run->trace->count);
}

static void play_pass(player *p)
{
    run *r = p->run;
    bool ok = true;
    p->tally = (tally){0};
    p->clock_us = 0;
    p->start_ns = now_ns();
    for (size_t i = 0; ok && i < r->trace->count && !atomic_load_explicit(&r->failed, memory_order_relaxed); i++) {
        show_progress(p, i);
        ok = play_event(p, &r->trace->events[i]);
    }
    ok = free_rest(p) && ok;
    ok = synchronise(p) && ok;
    if (!ok)
        atomic_store(&r->failed, true);
}

/* Players come and go. */

/* NULL in each player's streams. */
static bool is_default(const run *r, size_t stream)
{
    return r->options->default_stream && trace_is_first_stream(r->trace, stream);
}

static bool open_streams(player *p)
{
    const gpu *g = &p->run->gpu;
    size_t n = p->run->trace->streams;
    bool ok = true;
    for (size_t s = 0; ok && s < n; s++) {
        ok = is_default(p->run, s) ||
             gpu_ok(g, "cuStreamCreate", g->driver->cuStreamCreate(&p->streams[s], CU_STREAM_NON_BLOCKING));
        if (ok && p->run->options->verify)
            ok = gpu_ok(g, "cuEventCreate", g->driver->cuEventCreate(&p->events[s], CU_EVENT_DISABLE_TIMING));
    }
    return ok;
}

static bool player_allocate(player *p)
{
    const run *r = p->run;
    size_t streams = r->trace->streams;
    p->streams = calloc(streams, sizeof *p->streams);
    p->events = calloc(streams, sizeof *p->events);
    p->holdings = calloc(r->trace->slots + 1, sizeof *p->holdings);
    p->latencies = calloc(r->trace->mallocs + 1, sizeof *p->latencies);
    p->small_latencies = calloc(r->trace->mallocs + 1, sizeof *p->small_latencies);
    if (r->options->verify)
        p->verifier = verifier_create(r->gpu.driver, r->page_size, r->options->cuda, r->name);
    return p->streams != NULL && p->events != NULL && p->holdings != NULL && p->latencies != NULL &&
           p->small_latencies != NULL && (p->verifier != NULL || !r->options->verify) &&
           lag_open(&p->lag, r->gpu.sim, r->options->lag, streams);
}

static bool player_open(player *p)
{
    if (!player_allocate(p)) {
        fprintf(stderr, "vpmm-replay: the host has no memory to replay %s\n", p->run->name);
        return false;
    }
    return open_streams(p);
}

static bool close_stream(player *p, size_t s)
{
    const gpu *g = &p->run->gpu;
    bool ok = true;
    if (p->streams[s] != NULL) {
        ok = target_release_stream(&p->run->target, p->streams[s]);
        ok = gpu_ok(g, "cuStreamDestroy", g->driver->cuStreamDestroy(p->streams[s])) && ok;
    }
    if (p->events[s] != NULL)
        ok = gpu_ok(g, "cuEventDestroy", g->driver->cuEventDestroy(p->events[s])) && ok;
    return ok;
}

static bool player_close(player *p)
{
    bool ok = true;
    if (p->streams != NULL && p->events != NULL)
        for (size_t s = 0; s < p->run->trace->streams; s++)
            ok = close_stream(p, s) && ok;
    verifier_destroy(p->verifier);
    lag_close(&p->lag);
    free(p->streams);
    free(p->events);
    free(p->holdings);
    free(p->latencies);
    free(p->small_latencies);
    return ok;
}

static void *player_main(void *argument)
{
    player *p = argument;
    run *r = p->run;
    if (!gpu_enter(&r->gpu))
        atomic_store(&r->failed, true);
    for (unsigned pass = 0; pass < r->options->passes; pass++) {
        pthread_barrier_wait(&r->gate);
        if (!atomic_load(&r->failed))
            play_pass(p);
        pthread_barrier_wait(&r->gate);
    }
    return NULL;
}

/* A pass, seen from the main thread. */

/* The smallest value that at least the share q of the sorted values does not exceed. */
static double quantile(const double *sorted, size_t n, double q)
{
    if (n == 0)
        return 0;
    size_t rank = (size_t)ceil(q * (double)n);
    return sorted[rank == 0 ? 0 : rank - 1];
}

enum latency_kind { LATENCIES_OF_ALL, LATENCIES_OF_SMALL };

/* Those of all the players, `count` of them; the caller frees them. NULL: told on stderr. */
static double *sorted_latencies(const player *players, unsigned n, enum latency_kind kind, size_t count)
{
    double *all = malloc((count + 1) * sizeof *all);
    size_t copied = 0;
    if (all == NULL) {
        fprintf(stderr, "vpmm-replay: the host has no memory to sort %zu latencies\n", count);
        return NULL;
    }
    for (unsigned i = 0; i < n; i++) {
        const player *p = &players[i];
        size_t own = kind == LATENCIES_OF_SMALL ? p->tally.small_mallocs : p->tally.mallocs;
        memcpy(all + copied, kind == LATENCIES_OF_SMALL ? p->small_latencies : p->latencies, own * sizeof *all);
        copied += own;
    }
    qsort(all, count, sizeof *all, compare_doubles);
    return all;
}

static bool merge_small_latencies(const player *players, unsigned n, pass_result *out)
{
    size_t count = out->small_mallocs;
    double *small = sorted_latencies(players, n, LATENCIES_OF_SMALL, count);
    if (small == NULL)
        return false;
    out->small_malloc_ns_p50 = 1e3 * quantile(small, count, 0.5);
    free(small);
    return true;
}

static bool merge_latencies(const player *players, unsigned n, pass_result *out)
{
    size_t count = out->mallocs;
    double *all = sorted_latencies(players, n, LATENCIES_OF_ALL, count);
    if (all == NULL)
        return false;
    out->malloc_p50_us = quantile(all, count, 0.5);
    out->malloc_p99_us = quantile(all, count, 0.99);
    out->malloc_p999_us = quantile(all, count, 0.999);
    out->malloc_max_us = quantile(all, count, 1);
    free(all);
    return true;
}

static bool merge_tallies(const player *players, unsigned n, pass_result *out)
{
    double small_us = 0;
    for (unsigned i = 0; i < n; i++) {
        const tally *t = &players[i].tally;
        out->events += t->events;
        out->mallocs += t->mallocs;
        out->frees += t->frees;
        out->refused += t->refused;
        out->malloc_ms += t->malloc_us / 1e3;
        out->driver_us_malloc += t->driver_us_malloc;
        out->driver_us_malloc_max = fmax(out->driver_us_malloc_max, t->driver_us_malloc_max);
        out->driver_us_free += t->driver_us_free;
        out->driver_us_background += t->driver_us_background;
        out->small_mallocs += t->small_mallocs;
        out->driver_us_small += t->driver_us_small;
        small_us += t->small_us;
    }
    out->small_malloc_ns_mean = out->small_mallocs == 0 ? 0 : 1e3 * small_us / (double)out->small_mallocs;
    return merge_latencies(players, n, out) && merge_small_latencies(players, n, out);
}

typedef struct faults {
    uint64_t races, misuses, mismatches;
} faults;

static faults faults_so_far(const run *r, const player *players)
{
    faults f = {0};
    if (r->gpu.sim != NULL) {
        f.races = vpmm_sim_races(r->gpu.sim);
        f.misuses = vpmm_sim_misuses(r->gpu.sim);
    }
    for (unsigned i = 0; i < r->options->threads; i++)
        if (players[i].verifier != NULL)
            f.mismatches += verifier_mismatches(players[i].verifier);
    return f;
}

/* Everything was freed: the pool is to be consistent, and empty. */
static bool audit(run *r, pass_result *result)
{
    bool ok = (r->gpu.sim == NULL || target_poll(&r->target)) && target_audit(&r->target);
    ok = target_stats(&r->target, &result->after) && ok;
    if (result->after.requested_bytes != 0) {
        fprintf(stderr, "vpmm-replay: %s: all is freed, but the pool counts %" PRIu64 " bytes as requested\n", r->name,
                result->after.requested_bytes);
        ok = false;
    }
    return ok;
}

static bool run_pass(run *r, player *players, pass_result *out)
{
    faults before = faults_so_far(r, players);
    bool ok = target_stats(&r->target, &out->before);
    out->pass = ++r->pass;
    atomic_store(&r->peak_slab, 0);
    atomic_store(&r->peak_slab_live, 0);
    ok = sample_held(r) && ok;
    uint64_t start = now_ns();
    pthread_barrier_wait(&r->gate);
    pthread_barrier_wait(&r->gate);
    out->wall_ms = (double)(now_ns() - start) / 1e6;
    if (atomic_load(&r->failed))
        return false;
    out->audit = audit(r, out);
    faults after = faults_so_far(r, players);
    out->races = after.races - before.races;
    out->misuses = after.misuses - before.misuses;
    out->mismatches = after.mismatches - before.mismatches;
    uint64_t highest = 0;
    ok = target_peak_mapped(&r->target, &highest) && ok;
    raise_to(&r->peak_mapped, highest);
    out->peak_mapped_bytes = atomic_load(&r->peak_mapped);
    out->peak_in_use_bytes = atomic_load(&r->peak_in_use);
    out->peak_demand_bytes = atomic_load(&r->peak_demand);
    out->peak_slab_bytes = atomic_load(&r->peak_slab);
    out->peak_slab_live_bytes = atomic_load(&r->peak_slab_live);
    return merge_tallies(players, r->options->threads, out) && ok;
}

/* A failed pass lets the players run through the remaining gates, doing nothing. */
static bool run_passes(run *r, player *players, pass_result *results, unsigned *done)
{
    bool ok = true;
    for (unsigned pass = 0; pass < r->options->passes; pass++) {
        if (ok) {
            ok = run_pass(r, players, &results[pass]);
        } else {
            pthread_barrier_wait(&r->gate);
            pthread_barrier_wait(&r->gate);
        }
        if (ok)
            ++*done;
        else
            atomic_store(&r->failed, true);
    }
    return ok;
}

static bool run_players(run *r, player *players, pass_result *results, unsigned *done)
{
    unsigned n = r->options->threads;
    if (pthread_barrier_init(&r->gate, NULL, n + 1) != 0) {
        fprintf(stderr, "vpmm-replay: no barrier for %u threads\n", n);
        return false;
    }
    for (unsigned i = 0; i < n; i++) {
        if (pthread_create(&players[i].thread, NULL, player_main, &players[i]) != 0) {
            fprintf(stderr, "vpmm-replay: cannot start thread %u of %u; pass a smaller --threads\n", i + 1, n);
            exit(1); /* the threads before it wait for it and could not be stopped */
        }
    }
    bool ok = run_passes(r, players, results, done);
    for (unsigned i = 0; i < n; i++)
        pthread_join(players[i].thread, NULL);
    pthread_barrier_destroy(&r->gate);
    return ok;
}

static bool with_players(run *r, pass_result *results, unsigned *done)
{
    unsigned n = r->options->threads;
    player *players = calloc(n, sizeof *players);
    if (players == NULL) {
        fprintf(stderr, "vpmm-replay: the host has no memory for %u threads\n", n);
        return false;
    }
    bool ok = true;
    for (unsigned i = 0; i < n; i++) {
        players[i].run = r;
        players[i].index = i;
        ok = ok && player_open(&players[i]);
    }
    ok = ok && run_players(r, players, results, done);
    progress_clear();
    for (unsigned i = 0; i < n; i++)
        ok = player_close(&players[i]) && ok;
    free(players);
    return ok;
}

static bool open_gpu(run *r, int ordinal)
{
    vpmm_sim_config sim = vpmm_sim_config_default();
    sim.memory_bytes = SIM_MEMORY_BYTES;
    sim.stepped = true;
    return gpu_open(&r->gpu, &(gpu_options){.sim = r->options->cuda ? NULL : &sim, .ordinal = ordinal});
}

static bool open_target(run *r)
{
    vpmm_config config = vpmm_config_default();
    if (!vpmm_ok("the environment", vpmm_config_from_env(&config)) || !open_gpu(r, config.device) ||
        !gpu_page_size(&r->gpu, config.page_size, &r->page_size))
        return false;
    config.reaper = r->options->cuda;
    if (!r->options->cuda)
        config.decay_ms = VPMM_DECAY_NEVER; /* the simulator's time is not the clock's, by which memory decays */
    return target_open(&r->target, &r->gpu, r->options->async ? NULL : &config);
}

static void name_trace(const char *path, char *name, size_t size)
{
    const char *base = strrchr(path, '/');
    base = base == NULL ? path : base + 1;
    size_t length = strlen(base);
    if (length > 4 && strcmp(base + length - 4, ".csv") == 0)
        length -= 4;
    snprintf(name, size, "%.*s", (int)(length < size ? length : size - 1), base);
}

bool replay_trace(const replay_options *options, const trace *t, const char *path, pass_result *results, unsigned *done)
{
    run r = {.options = options, .trace = t};
    *done = 0;
    name_trace(path, r.name, sizeof r.name);
    bool ok = open_target(&r) && with_players(&r, results, done);
    unsigned leaks = target_close(&r.target);
    leaks += gpu_close(&r.gpu);
    for (unsigned i = 0; i < *done; i++) {
        results[i].path = path;
        memcpy(results[i].trace, r.name, sizeof r.name);
        results[i].leaks = leaks;
    }
    return ok && leaks == 0;
}
