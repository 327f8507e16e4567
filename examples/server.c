/*
 * vpmm-server: a multi-threaded inference server in small.
 *
 * Each worker has a stream and serves one request after the other; a request is a stretch of a recorded trace: the
 * allocations and frees that a serving program made. All workers share one pool.
 *
 *   malloc    on the worker's stream; the memory is filled there, as a kernel would
 *   free      of seven in eight: checked and freed on the same stream, with nothing waiting on the host
 *             of the eighth: handed to the next worker, with an event. That worker makes its own stream wait for the
 *             event, checks the memory there, and frees it there: another thread, another stream
 *
 * At the end: the statistics, the map of regions, and exit status 0 only if every byte looked at was right, nothing
 * raced (which the simulated GPU can tell), the pool's audit passed, and nothing leaked.
 *
 * With --metrics-port the pool's metrics are served over HTTP all the while: see open_metrics.
 */
#define _GNU_SOURCE 1

#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifdef VPMM_SERVER_METRICS
#include <vpmm/exporter.h>
#endif
#include <vpmm/sim.h>
#include <vpmm/vpmm.h>

#include "trace.h"
#include "verify.h"

/* The recorded trace: in the source tree, and where it is installed. */
#ifndef VPMM_REQUESTS_CSV
#define VPMM_REQUESTS_CSV       "examples/requests.csv"
#define VPMM_REQUESTS_INSTALLED "/usr/local/share/vpmm/requests.csv"
#endif

enum {
    EVENTS_A_REQUEST = 64,
    HAND_OVER = 8,    /* of so many frees, one goes to the next worker */
    QUEUE_SLOTS = 64, /* a power of two */
    IN_FLIGHT = 2,    /* requests of a worker that the GPU may be behind */
    MAX_WORKERS = 256,
    EXIT_BAD = 1,
    EXIT_USAGE = 2,
};

#define SIM_MEMORY_BYTES ((size_t)128 << 30)

typedef struct options {
    bool cuda;
    unsigned workers;
    double seconds;
    const char *trace;
    const char *json; /* NULL: none; "-": standard output */
    int metrics_port; /* -1: no metrics; 0: any free port */
    const char *metrics_address;
} options;

/* Memory handed over: usable once `ready` has passed. */
typedef struct parcel {
    verify_block block;
    CUevent ready;
} parcel;

/* Parcels for a worker; any worker puts, its own takes. */
typedef struct queue {
    pthread_mutex_t lock;
    parcel slots[QUEUE_SLOTS];
    unsigned put, taken;
} queue;

struct server;

typedef struct worker {
    struct server *server;
    unsigned index;
    char name[32];
    pthread_t thread;
    CUstream stream;
    CUevent done[IN_FLIGHT]; /* the ends of the latest requests */
    verifier *verifier;
    verify_block *blocks; /* by the trace's slot; address 0: none */
    queue inbox;
    uint64_t requests, mallocs, frees, handed_over, bytes;
} worker;

typedef struct server {
    const options *options;
    trace trace;
    vpmm_sim *sim; /* NULL on cuda */
    const vpmm_driver *driver;
    CUdevice device;
    CUcontext context;
    vpmm_pool *pool;
#ifdef VPMM_SERVER_METRICS
    vpmm_exporter *exporter; /* NULL: no metrics */
#endif
    size_t page_size;
    worker *workers;
    unsigned opened;         /* workers whose parts are there */
    pthread_barrier_t quiet; /* workers: nobody hands anything over any more */
    atomic_bool stop;
    atomic_bool failed;
    double seconds; /* served */
    FILE *out;      /* for people */
} server;

/* Errors: what happened, and what to do about it. */

__attribute__((format(printf, 3, 4))) static bool fail(server *s, const char *advice, const char *format, ...)
{
    va_list arguments;
    flockfile(stderr);
    fputs("vpmm-server: ", stderr);
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, "\n  %s\n", advice);
    funlockfile(stderr);
    if (s != NULL) {
        atomic_store(&s->failed, true);
        atomic_store(&s->stop, true);
    }
    return false;
}

static bool cuda_ok(server *s, const char *what, CUresult result)
{
    const char *name = NULL;
    if (result == CUDA_SUCCESS)
        return true;
    if (s->driver->cuGetErrorName(result, &name) != CUDA_SUCCESS || name == NULL)
        name = "an unknown error";
    return fail(s, "If the GPU is new to this program or in use by others, look at nvidia-smi; or use --driver sim.",
                "%s: %s (%d)", what, name, (int)result);
}

static const char *advice_for(vpmm_status status)
{
    switch (status) {
    case VPMM_ERROR_OUT_OF_MEMORY:
        return "Use fewer --workers, a smaller --trace, or a larger VPMM_MAX_MAPPED.";
    case VPMM_ERROR_NO_DRIVER:
        return "Install the NVIDIA driver, or use --driver sim, which needs none.";
    case VPMM_ERROR_INVALID_VALUE:
        return "Correct the setting; unset the VPMM_* environment variables for the defaults.";
    case VPMM_ERROR_OUT_OF_ADDRESS_SPACE:
        return "Choose a VPMM_VA_SIZE that a request fits in and the device has addresses for, or none.";
    case VPMM_ERROR_HOST_MEMORY:
        return "Free host memory, or raise the process's limits (ulimit -v).";
    default:
        return "Please report this, with the output of vpmm-replay --verify on the same trace.";
    }
}

static bool vpmm_ok(server *s, const char *what, vpmm_status status)
{
    return status == VPMM_SUCCESS ||
           fail(s, advice_for(status), "%s: %s: %s", what, vpmm_status_name(status), vpmm_last_error());
}

/* A parcel from one worker to another. */

static bool queue_put(queue *q, const parcel *p)
{
    pthread_mutex_lock(&q->lock);
    bool room = q->put - q->taken < QUEUE_SLOTS;
    if (room)
        q->slots[q->put++ % QUEUE_SLOTS] = *p;
    pthread_mutex_unlock(&q->lock);
    return room;
}

static bool queue_take(queue *q, parcel *p)
{
    pthread_mutex_lock(&q->lock);
    bool any = q->put != q->taken;
    if (any)
        *p = q->slots[q->taken++ % QUEUE_SLOTS];
    pthread_mutex_unlock(&q->lock);
    return any;
}

/* A worker's day. */

static bool allocate(worker *w, const trace_event *e)
{
    server *s = w->server;
    verify_block block = {.bytes = e->bytes, .tag = e->slot};
    if (!vpmm_ok(s, "vpmm_malloc", vpmm_malloc(s->pool, e->bytes, w->stream, &block.address)))
        return false;
    w->mallocs++;
    w->bytes += e->bytes;
    bool ok = cuda_ok(s, "filling an allocation", verifier_fill(w->verifier, &block, w->stream));
    w->blocks[e->slot] = block;
    return ok;
}

static bool check_and_free(worker *w, const verify_block *block)
{
    server *s = w->server;
    bool ok = cuda_ok(s, "checking an allocation", verifier_check(w->verifier, block, w->stream));
    w->frees++;
    return vpmm_ok(s, "vpmm_free", vpmm_free(s->pool, block->address, w->stream)) && ok;
}

/* Gives the block to the next worker. False: it stays here (the other's queue is full, or there is no event). */
static bool hand_over(worker *w, const verify_block *block)
{
    server *s = w->server;
    parcel p = {.block = *block};
    worker *next = &s->workers[(w->index + 1) % s->options->workers];
    if (next == w || s->driver->cuEventCreate(&p.ready, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS)
        return false;
    if (s->driver->cuEventRecord(p.ready, w->stream) == CUDA_SUCCESS && queue_put(&next->inbox, &p)) {
        w->handed_over++;
        return true;
    }
    s->driver->cuEventDestroy(p.ready);
    return false;
}

static bool empty_inbox(worker *w)
{
    server *s = w->server;
    bool ok = true;
    parcel p;
    while (queue_take(&w->inbox, &p)) {
        ok = cuda_ok(s, "cuStreamWaitEvent", s->driver->cuStreamWaitEvent(w->stream, p.ready, 0)) && ok;
        ok = cuda_ok(s, "cuEventDestroy", s->driver->cuEventDestroy(p.ready)) && ok;
        ok = check_and_free(w, &p.block) && ok;
    }
    return ok;
}

static bool release(worker *w, uint32_t slot)
{
    verify_block block = w->blocks[slot];
    if (block.address == 0)
        return true;
    w->blocks[slot].address = 0;
    return (slot % HAND_OVER == 0 && hand_over(w, &block)) || check_and_free(w, &block);
}

/* Waits for the answer to the request before the last, and marks the end of this one. */
static bool finish_request(worker *w)
{
    server *s = w->server;
    CUevent done = w->done[w->requests++ % IN_FLIGHT];
    return cuda_ok(s, "cuEventSynchronize", s->driver->cuEventSynchronize(done)) &&
           cuda_ok(s, "cuEventRecord", s->driver->cuEventRecord(done, w->stream));
}

/* Events [first, last) of the trace, and what others have handed over meanwhile. */
static bool serve_request(worker *w, size_t first, size_t last)
{
    const trace_event *events = w->server->trace.events;
    bool ok = true;
    for (size_t i = first; ok && i < last; i++)
        ok = events[i].op == TRACE_MALLOC ? allocate(w, &events[i]) : release(w, events[i].slot);
    return empty_inbox(w) && ok && finish_request(w);
}

static void serve(worker *w)
{
    server *s = w->server;
    size_t at = 0;
    bool ok = true;
    while (ok && !atomic_load_explicit(&s->stop, memory_order_relaxed)) {
        size_t end = at + EVENTS_A_REQUEST < s->trace.count ? at + EVENTS_A_REQUEST : s->trace.count;
        ok = serve_request(w, at, end);
        at = end == s->trace.count ? 0 : end;
        if (at == 0) /* what the trace leaves live, before its ids come again */
            for (size_t slot = 0; ok && slot < s->trace.slots; slot++)
                ok = release(w, (uint32_t)slot);
    }
    for (size_t slot = 0; slot < s->trace.slots; slot++)
        release(w, (uint32_t)slot);
}

static void *worker_main(void *argument)
{
    worker *w = argument;
    server *s = w->server;
    if (cuda_ok(s, "cuCtxSetCurrent", s->driver->cuCtxSetCurrent(s->context)))
        serve(w);
    pthread_barrier_wait(&s->quiet);
    empty_inbox(w);
    cuda_ok(s, "cuStreamSynchronize", s->driver->cuStreamSynchronize(w->stream));
    return NULL;
}

/* Opening and closing, in the order of what stands on what. */

static bool open_driver(server *s)
{
    if (s->options->cuda) {
        s->driver = vpmm_driver_cuda();
        return s->driver != NULL ||
               fail(s, "Install the NVIDIA driver, or use --driver sim, which needs none.", "%s", vpmm_last_error());
    }
    vpmm_sim_config config = vpmm_sim_config_default();
    config.memory_bytes = SIM_MEMORY_BYTES;
    s->sim = vpmm_sim_create(&config);
    if (s->sim == NULL)
        return fail(s, "Free host memory, or raise the process's limits (ulimit -v).", "the simulated GPU: %s",
                    vpmm_last_error());
    s->driver = vpmm_sim_driver(s->sim);
    return true;
}

static bool open_context(server *s, int ordinal)
{
    const vpmm_driver *d = s->driver;
    return cuda_ok(s, "cuInit", d->cuInit(0)) && cuda_ok(s, "cuDeviceGet", d->cuDeviceGet(&s->device, ordinal)) &&
           cuda_ok(s, "cuDevicePrimaryCtxRetain", d->cuDevicePrimaryCtxRetain(&s->context, s->device)) &&
           cuda_ok(s, "cuCtxSetCurrent", d->cuCtxSetCurrent(s->context));
}

static bool open_pool(server *s, vpmm_config *config)
{
    CUmemAllocationProp prop = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = s->device},
    };
    s->page_size = config->page_size;
    if (s->page_size == 0 &&
        !cuda_ok(s, "cuMemGetAllocationGranularity",
                 s->driver->cuMemGetAllocationGranularity(&s->page_size, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM)))
        return false;
    config->driver = s->driver;
    return vpmm_ok(s, "vpmm_pool_create", vpmm_pool_create(config, &s->pool));
}

/*
 * All that a server needs for its metrics: two calls at the start, one at the end, which also does if there are none.
 */
#ifdef VPMM_SERVER_METRICS
static bool open_metrics(server *s)
{
    vpmm_exporter_config config = vpmm_exporter_config_default();
    if (s->options->metrics_port < 0)
        return true;
    config.port = (uint16_t)s->options->metrics_port;
    config.address = s->options->metrics_address;
    vpmm_status status = vpmm_exporter_start(&config, &s->exporter);
    if (status == VPMM_ERROR_INVALID_VALUE || status == VPMM_ERROR_BUSY || status == VPMM_ERROR_NOT_SUPPORTED)
        return fail(s, "Choose another --metrics-port (0: any that is free) or --metrics-address.",
                    "the metrics: %s: %s", vpmm_status_name(status), vpmm_last_error());
    if (!vpmm_ok(s, "the metrics", status) ||
        !vpmm_ok(s, "the metrics", vpmm_exporter_add(s->exporter, s->pool, "server")))
        return false;
    fprintf(s->out, "metrics: port %u of %s, /metrics\n", vpmm_exporter_port(s->exporter), config.address);
    return fflush(s->out) == 0 ||
           fail(NULL, "Give standard output a place.", "standard output cannot be written: %s", strerror(errno));
}

static void close_metrics(server *s)
{
    vpmm_ok(s, "the metrics", vpmm_exporter_stop(s->exporter));
    s->exporter = NULL;
}
#else
static bool open_metrics(server *s)
{
    return s->options->metrics_port < 0 ||
           fail(s, "Install libmicrohttpd-dev, libgnutls28-dev, zlib1g-dev and libcrypt-dev, and build again.",
                "--metrics-port: this program was built without the exporter");
}

static void close_metrics(server *s)
{
    (void)s;
}
#endif

static bool open_worker(server *s, unsigned index)
{
    worker *w = &s->workers[index];
    w->server = s;
    w->index = index;
    snprintf(w->name, sizeof w->name, "worker %u", index);
    pthread_mutex_init(&w->inbox.lock, NULL);
    s->opened++;
    w->verifier = verifier_create(s->driver, s->page_size, s->options->cuda, w->name);
    w->blocks = calloc(s->trace.slots, sizeof *w->blocks);
    if (w->verifier == NULL || w->blocks == NULL)
        return fail(s, "Use fewer --workers, or free host memory.", "the host has no memory for worker %u", index);
    bool ok = cuda_ok(s, "cuStreamCreate", s->driver->cuStreamCreate(&w->stream, CU_STREAM_NON_BLOCKING));
    for (unsigned i = 0; ok && i < IN_FLIGHT; i++)
        ok = cuda_ok(s, "cuEventCreate", s->driver->cuEventCreate(&w->done[i], CU_EVENT_DISABLE_TIMING));
    return ok;
}

static bool open_workers(server *s)
{
    bool ok = true;
    s->workers = calloc(s->options->workers, sizeof *s->workers);
    if (s->workers == NULL)
        return fail(s, "Use fewer --workers.", "the host has no memory for %u workers", s->options->workers);
    for (unsigned i = 0; ok && i < s->options->workers; i++)
        ok = open_worker(s, i);
    return ok;
}

/* What the user has named: the trace, and settings in the environment. */
static bool read_settings(server *s, const options *o, vpmm_config *config)
{
    char error[512];
    *config = vpmm_config_default();
    s->options = o;
    s->out = o->json != NULL && strcmp(o->json, "-") == 0 ? stderr : stdout;
    if (!trace_read(o->trace, &s->trace, error, sizeof error))
        return fail(s,
                    "Name a trace (op,id,bytes,stream,us) with --trace; requests.csv comes with vpmm, in examples and, "
                    "installed, in share/vpmm.",
                    "%s", error);
    return vpmm_ok(s, "the environment", vpmm_config_from_env(config));
}

static bool server_open(server *s, vpmm_config *config)
{
    return open_driver(s) && open_context(s, config->device) && open_pool(s, config) && open_metrics(s) &&
           open_workers(s);
}

static void close_worker(server *s, worker *w)
{
    if (w->stream != NULL) {
        vpmm_ok(s, "vpmm_stream_release", vpmm_stream_release(s->pool, w->stream));
        cuda_ok(s, "cuStreamDestroy", s->driver->cuStreamDestroy(w->stream));
    }
    for (unsigned i = 0; i < IN_FLIGHT; i++)
        if (w->done[i] != NULL)
            cuda_ok(s, "cuEventDestroy", s->driver->cuEventDestroy(w->done[i]));
    verifier_destroy(w->verifier);
    free(w->blocks);
    pthread_mutex_destroy(&w->inbox.lock);
}

/* The number of driver objects that were left behind, and one more if the driver was misused, to the very end. */
static int server_close(server *s)
{
    int leaks = 0;
    for (unsigned i = 0; i < s->opened; i++)
        close_worker(s, &s->workers[i]);
    close_metrics(s);
    if (s->pool != NULL)
        vpmm_ok(s, "vpmm_pool_destroy", vpmm_pool_destroy(s->pool));
    if (s->context != NULL)
        cuda_ok(s, "cuDevicePrimaryCtxRelease", s->driver->cuDevicePrimaryCtxRelease(s->device));
    if (s->sim != NULL) { /* which has named each of them */
        leaks = vpmm_sim_misuses(s->sim) != 0;
        leaks += vpmm_sim_destroy(s->sim);
    }
    free(s->workers);
    trace_release(&s->trace);
    return leaks;
}

/* Serving, until the time is up, a signal comes, or something fails. */

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* In every thread of the process: only wait_for_end takes them, and what comes after the first is ignored. */
static void block_signals(sigset_t *set)
{
    sigemptyset(set);
    sigaddset(set, SIGINT);
    sigaddset(set, SIGTERM);
    pthread_sigmask(SIG_BLOCK, set, NULL);
}

static void wait_for_end(server *s, const sigset_t *signals)
{
    double end = now() + s->options->seconds;
    const struct timespec tick = {.tv_nsec = 50 * 1000 * 1000};
    while (now() < end && !atomic_load(&s->stop)) {
        int sig = sigtimedwait(signals, NULL, &tick);
        if (sig > 0) {
            fprintf(stderr, "vpmm-server: %s: stopping\n", strsignal(sig));
            break;
        }
    }
    atomic_store(&s->stop, true);
}

static bool start_workers(server *s)
{
    unsigned n = s->options->workers;
    if (pthread_barrier_init(&s->quiet, NULL, n) != 0)
        return fail(s, "Use fewer --workers.", "no barrier for %u workers", n);
    for (unsigned i = 0; i < n; i++) {
        worker *w = &s->workers[i];
        int error = pthread_create(&w->thread, NULL, worker_main, w);
        if (error != 0) {
            fail(NULL, "Use fewer --workers, or raise the limit of threads (ulimit -u).", "cannot start worker %u: %s",
                 i, strerror(error));
            exit(EXIT_BAD); /* the others would wait for it at the end */
        }
    }
    return true;
}

static bool run_workers(server *s, const sigset_t *signals)
{
    double start = now();
    if (!start_workers(s))
        return false;
    wait_for_end(s, signals);
    for (unsigned i = 0; i < s->options->workers; i++)
        pthread_join(s->workers[i].thread, NULL);
    s->seconds = now() - start;
    pthread_barrier_destroy(&s->quiet);
    return !atomic_load(&s->failed);
}

/* The account. */

typedef struct account {
    uint64_t requests, mallocs, frees, handed_over, bytes, mismatches, races, misuses, live;
    bool audit;
    int leaks;
    vpmm_stats stats;
} account;

static account take_account(server *s)
{
    account a = {0};
    for (unsigned i = 0; i < s->opened; i++) {
        const worker *w = &s->workers[i];
        a.requests += w->requests;
        a.mallocs += w->mallocs;
        a.frees += w->frees;
        a.handed_over += w->handed_over;
        a.bytes += w->bytes;
        a.mismatches += verifier_mismatches(w->verifier);
    }
    if (s->sim != NULL) {
        a.races = vpmm_sim_races(s->sim);
        a.misuses = vpmm_sim_misuses(s->sim);
    }
    a.audit = vpmm_ok(s, "the audit", vpmm_check(s->pool));
    vpmm_stats_get(s->pool, &a.stats);
    a.live = a.stats.requested_bytes;
    return a;
}

static bool account_good(const server *s, const account *a)
{
    return !atomic_load(&s->failed) && a->audit && a->mismatches == 0 && a->races == 0 && a->misuses == 0 &&
           a->live == 0 && a->leaks == 0;
}

static void print_account(server *s, const account *a)
{
    fprintf(s->out,
            "%u workers served %" PRIu64 " requests in %.1f s: %" PRIu64 " mallocs of %.1f GiB in sum, %" PRIu64
            " frees, %" PRIu64 " of them by another worker\n",
            s->options->workers, a->requests, s->seconds, a->mallocs, (double)a->bytes / 1073741824.0, a->frees,
            a->handed_over);
    fprintf(s->out, "%" PRIu64 " mismatches, %" PRIu64 " races, %" PRIu64 " misuses, %" PRIu64 " bytes left live\n\n",
            a->mismatches, a->races, a->misuses, a->live);
    vpmm_dump(s->pool, s->out); /* if that cannot be written, all of the account cannot: see main */
}

static void write_json(const server *s, const account *a, FILE *out)
{
    fprintf(out, "{\n  \"driver\": \"%s\",\n  \"workers\": %u,\n  \"seconds\": %.3f", s->options->cuda ? "cuda" : "sim",
            s->options->workers, s->seconds);
#define MEMBER(name) fprintf(out, ",\n  \"%s\": %" PRIu64, #name, a->name);
    MEMBER(requests)
    MEMBER(handed_over)
    MEMBER(bytes)
    MEMBER(mismatches)
    MEMBER(races)
    MEMBER(misuses)
#undef MEMBER
#define MEMBER(name, kind, help) fprintf(out, ",\n  \"%s\": %" PRIu64, #name, a->stats.name);
    VPMM_STATS(MEMBER)
#undef MEMBER
    fprintf(out, ",\n  \"leaks\": %d,\n  \"audit\": %s,\n  \"good\": %s\n}\n", a->leaks, a->audit ? "true" : "false",
            account_good(s, a) ? "true" : "false");
}

static bool save_json(const server *s, const account *a)
{
    const char *path = s->options->json;
    if (path == NULL)
        return true;
    FILE *out = strcmp(path, "-") == 0 ? stdout : fopen(path, "w");
    bool ok = out != NULL;
    if (ok)
        write_json(s, a, out);
    if (ok && out == stdout)
        ok = fflush(out) == 0;
    else if (ok)
        ok = fclose(out) == 0;
    return ok || fail(NULL, "Name a file that can be written, or - for standard output.", "--json %s: %s", path,
                      strerror(errno));
}

/* The program. */

static const char help[] =
    "usage: vpmm-server [OPTION]...\n"
    "\n"
    "A multi-threaded inference server in small: workers with a stream each serve requests whose allocations come "
    "from\n"
    "a recorded trace. Every allocation is filled and checked on its stream; one in eight is freed by another worker.\n"
    "\n"
    "  --driver sim|cuda  the simulated GPU (default), or the first real one\n"
    "  --workers N        1 to 256 (default 4)\n"
    "  --seconds S        how long to serve (default 5); SIGINT and SIGTERM end it earlier\n"
    "  --trace FILE       op,id,bytes,stream,us, one event a line (default " VPMM_REQUESTS_CSV ", or\n"
    "                     where that is missing " VPMM_REQUESTS_INSTALLED ")\n"
    "  --json FILE|-      the account as one JSON object, too; with -, the rest goes to standard error\n"
    "  --metrics-port N   serve the pool's metrics over HTTP, for Prometheus; 0: on any free port, which is printed\n"
    "  --metrics-address A  where (default 127.0.0.1: this machine alone; 0.0.0.0: everywhere)\n"
    "  --help             this text\n"
    "\n"
    "vpmm is configured by its VPMM_* environment variables. Prints the pool's statistics and its map of regions,\n"
    "[X] live, [-X] reusable, [*X] hole, [~X] pending unmap, in pages.\n"
    "\n"
    "Exit status: 0 no mismatch, no race, no leak, and the audit passed; 1 otherwise, also where\n"
    "no pool or exporter can be made of the settings; 2 wrong usage or settings, or no such trace.\n";

static bool usage_error(const char *option, const char *value, const char *allowed)
{
    return fail(NULL, "See vpmm-server --help.", "--%s '%s': %s", option, value, allowed);
}

static bool parse_workers(const char *text, unsigned *out)
{
    char *end;
    unsigned long value = strtoul(text, &end, 10);
    if (*text < '0' || *text > '9' || *end != '\0' || value < 1 || value > MAX_WORKERS)
        return usage_error("workers", text, "a number from 1 to 256 is allowed");
    *out = (unsigned)value;
    return true;
}

static bool parse_seconds(const char *text, double *out)
{
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end != '\0' || !(value > 0 && value <= 1e9))
        return usage_error("seconds", text, "a number above 0, at most 1000000000, is allowed");
    *out = value;
    return true;
}

static bool parse_port(const char *text, int *out)
{
    char *end;
    unsigned long value = strtoul(text, &end, 10);
    if (*text < '0' || *text > '9' || *end != '\0' || value > UINT16_MAX)
        return usage_error("metrics-port", text, "a number from 0 to 65535 is allowed");
    *out = (int)value;
    return true;
}

static bool parse_driver(const char *text, bool *cuda)
{
    *cuda = strcmp(text, "cuda") == 0;
    return *cuda || strcmp(text, "sim") == 0 || usage_error("driver", text, "sim and cuda are allowed");
}

static bool take_option(int option, options *o)
{
    switch (option) {
    case 'd':
        return parse_driver(optarg, &o->cuda);
    case 'w':
        return parse_workers(optarg, &o->workers);
    case 's':
        return parse_seconds(optarg, &o->seconds);
    case 't':
        o->trace = optarg;
        return true;
    case 'j':
        o->json = optarg;
        return true;
    case 'm':
        return parse_port(optarg, &o->metrics_port);
    case 'a':
        o->metrics_address = optarg;
        return true;
    case 'h':
        fputs(help, stdout);
        exit(0);
    default: /* getopt has told which */
        fputs("vpmm-server: see vpmm-server --help\n", stderr);
        return false;
    }
}

static bool parse_options(int argc, char **argv, options *o)
{
    static const struct option long_options[] = {
        {"driver", required_argument, NULL, 'd'},
        {"workers", required_argument, NULL, 'w'},
        {"seconds", required_argument, NULL, 's'},
        {"trace", required_argument, NULL, 't'},
        {"json", required_argument, NULL, 'j'},
        {"metrics-port", required_argument, NULL, 'm'},
        {"metrics-address", required_argument, NULL, 'a'},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    int option;
    while ((option = getopt_long(argc, argv, "", long_options, NULL)) != -1)
        if (!take_option(option, o))
            return false;
    if (optind < argc)
        return fail(NULL, "See vpmm-server --help; a trace is named with --trace.", "'%s' is not an option",
                    argv[optind]);
    return true;
}

int main(int argc, char **argv)
{
    options o = {.workers = 4,
                 .seconds = 5,
                 .trace = access(VPMM_REQUESTS_CSV, R_OK) == 0 ? VPMM_REQUESTS_CSV : VPMM_REQUESTS_INSTALLED,
                 .metrics_port = -1,
                 .metrics_address = "127.0.0.1"};
    server s = {0};
    account a = {0};
    sigset_t signals;
    vpmm_config config;
    if (!parse_options(argc, argv, &o))
        return EXIT_USAGE;
    if (!read_settings(&s, &o, &config)) {
        trace_release(&s.trace);
        return EXIT_USAGE;
    }
    block_signals(&signals);
    bool opened = server_open(&s, &config);
    if (opened) {
        run_workers(&s, &signals);
        close_metrics(&s); /* before the audit, which no scrape may meet */
        a = take_account(&s);
        print_account(&s, &a);
    }
    a.leaks = server_close(&s);
    if (!opened)
        return EXIT_BAD;
    bool good = account_good(&s, &a);
    fprintf(s.out, "\n%s\n", good ? "all good" : "FAILED: see the messages above");
    if (fflush(s.out) != 0 || ferror(s.out))
        good = fail(NULL, "Give standard output a place.", "the account cannot be written: %s", strerror(errno));
    return save_json(&s, &a) && good ? 0 : EXIT_BAD;
}
