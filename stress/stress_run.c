/*
 * stress_run.c - a run from its beginning to its end: what it opens, its threads, what it is judged by.
 */
#define _GNU_SOURCE 1

#include "stress.h"

#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SIM_MEMORY_BYTES ((size_t)16 << 30)

uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return UINT64_C(1000000000) * (uint64_t)t.tv_sec + (uint64_t)t.tv_nsec;
}

double now_seconds(void)
{
    return (double)now_ns() / 1e9;
}

const char *outcome_word(int outcome)
{
    switch (outcome) {
    case PASSED:
    case TERMINATED:
        return "passed";
    case FAILED:
        return "failed";
    case SKIPPED:
        return "skipped";
    case STUCK:
        return "stuck";
    default:
        return "could not run";
    }
}

/* Told at once, for nobody knows whether the end is reached. What failed says more than what could not run. */
void run_end(run *r, enum outcome outcome, const char *format, ...)
{
    va_list arguments;
    pthread_mutex_lock(&r->message_lock);
    int before = atomic_load(&r->outcome);
    if (before == PASSED || (outcome == FAILED && before == DEVICE_ERROR)) {
        va_start(arguments, format);
        vsnprintf(r->message, sizeof r->message, format, arguments);
        va_end(arguments);
        atomic_store(&r->outcome, (int)outcome);
        fprintf(stderr, "%s: device %d: %s: %s\n", program_name, r->ordinal, outcome_word(outcome), r->message);
    }
    pthread_mutex_unlock(&r->message_lock);
    atomic_store(&r->stop, true);
}

bool run_cuda_ok(run *r, const char *what, CUresult result)
{
    const char *name = NULL;
    if (result == CUDA_SUCCESS)
        return true;
    if (r->gpu.driver->cuGetErrorName(result, &name) != CUDA_SUCCESS || name == NULL)
        name = "an unknown error";
    /* An access without a mapping is what an allocator's mistake looks like from here. */
    run_end(r, result == CUDA_ERROR_ILLEGAL_ADDRESS ? FAILED : DEVICE_ERROR, "%s: %s (%d)", what, name, (int)result);
    return false;
}

/* ---- numbers ---- */

uint64_t run_count(const run *r, enum count which)
{
    uint64_t sum = 0;
    for (unsigned i = 0; r->lanes && i < r->options->threads; i++)
        sum += atomic_load_explicit(&r->lanes[i].count[which], memory_order_relaxed);
    return sum;
}

double run_spent(const run *r, enum spend which)
{
    uint64_t ns = 0;
    for (unsigned i = 0; r->lanes && i < r->options->threads; i++)
        ns += atomic_load_explicit(&r->lanes[i].spent_ns[which], memory_order_relaxed);
    return r->seconds > 0 ? (double)ns / 1e9 / r->seconds / r->options->threads : 0;
}

uint64_t run_bytes_verified(const run *r)
{
    uint64_t sum = r->bytes_verified;
    for (unsigned i = 0; r->lanes && i < r->options->threads; i++)
        if (r->lanes[i].probe)
            sum += probe_bytes(r->lanes[i].probe);
    return sum;
}

uint64_t run_mismatches(const run *r)
{
    uint64_t sum = 0;
    for (unsigned i = 0; r->lanes && i < r->options->threads; i++)
        if (r->lanes[i].probe)
            sum += probe_mismatches(r->lanes[i].probe);
    return sum;
}

static double bucket_ends_us(unsigned bucket)
{
    return bucket < 8 ? (bucket + 1) / 1e3 : ldexp(9 + bucket % 8, (int)(bucket / 8) - 1) / 1e3;
}

static uint64_t in_bucket(const run *r, unsigned bucket)
{
    uint64_t sum = 0;
    for (unsigned i = 0; r->lanes && i < r->options->threads; i++)
        sum += atomic_load_explicit(&r->lanes[i].latency.count[bucket], memory_order_relaxed);
    return sum;
}

double run_latency_us(const run *r, double part)
{
    uint64_t all = 0, sum = 0;
    for (unsigned bucket = 0; bucket < LATENCY_BUCKETS; bucket++)
        all += in_bucket(r, bucket);
    for (unsigned bucket = 0; bucket < LATENCY_BUCKETS; bucket++) {
        sum += in_bucket(r, bucket);
        if (all != 0 && (double)sum >= part * (double)all)
            return fmin(bucket_ends_us(bucket), run_longest_us(r));
    }
    return 0;
}

double run_longest_us(const run *r)
{
    uint64_t longest = 0;
    for (unsigned i = 0; r->lanes && i < r->options->threads; i++) {
        uint64_t ns = atomic_load_explicit(&r->lanes[i].latency.longest_ns, memory_order_relaxed);
        longest = ns > longest ? ns : longest;
    }
    return (double)longest / 1e3;
}

uint64_t run_mapped(run *r)
{
    target_level level = {0};
    target_held(&r->target, &level);
    return level.mapped;
}

void run_note_mapped(run *r, uint64_t bytes)
{
    uint64_t peak = atomic_load(&r->peak_mapped);
    while (bytes > peak && !atomic_compare_exchange_weak(&r->peak_mapped, &peak, bytes))
        ;
}

/* ---- opening ---- */

static bool open_gpu(run *r)
{
    const options *o = r->options;
    vpmm_sim_config sim = vpmm_sim_config_default();
    sim.memory_bytes = SIM_MEMORY_BYTES;
    sim.devices = 2; /* one to be lent access */
    const gpu_options from = {.sim = o->cuda ? NULL : &sim, .ordinal = r->ordinal};
    if (gpu_open(&r->gpu, &from))
        return true;
    run_end(r, DEVICE_ERROR, "device %d could not be opened: see above, and nvidia-smi", r->ordinal);
    return false;
}

static void describe_device(run *r)
{
    const vpmm_driver *driver = r->gpu.driver;
    CUuuid id;
    driver->cuDeviceGetName(r->name, sizeof r->name, r->gpu.device);
    driver->cuDeviceTotalMem(&r->memory_bytes, r->gpu.device);
    driver->cuDriverGetVersion(&r->driver_version);
    if (driver->cuDeviceGetUuid(&id, r->gpu.device) != CUDA_SUCCESS)
        return;
    strcpy(r->uuid, "GPU-");
    for (size_t i = 0, at = 4; i < sizeof id.bytes; i++) {
        const char *dash = i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "";
        at += (size_t)snprintf(r->uuid + at, sizeof r->uuid - at, "%s%02x", dash, (unsigned char)id.bytes[i]);
    }
}

/* The part of all memory; so much has to be free now. */
static bool choose_cap(run *r)
{
    size_t free_bytes = 0, total = 0;
    if (!run_cuda_ok(r, "cuMemGetInfo", r->gpu.driver->cuMemGetInfo(&free_bytes, &total)))
        return false;
    if (!gpu_page_size(&r->gpu, r->config.page_size, &r->page_size) || !gpu_page_size(&r->gpu, 0, &r->mapped_unit)) {
        run_end(r, DEVICE_ERROR, "the device does not say how large a page is: see above");
        return false;
    }
    r->cap = (size_t)((double)total * r->options->fraction);
    if (r->cap > free_bytes)
        run_end(r, DEVICE_ERROR,
                "--fraction %.2f is %zu MiB, and %zu of the device's %zu MiB are free: end what uses it, or use less",
                r->options->fraction, r->cap >> 20, free_bytes >> 20, total >> 20);
    size_t share = (size_t)((double)total * r->config.max_mapped_percent / 100);
    if (share != 0 && share < r->cap)
        r->cap = share;
    r->config.max_mapped_percent = 0; /* the run knows the cap, and changes it */
    if (r->config.max_mapped != 0 && r->config.max_mapped < r->cap)
        r->cap = r->config.max_mapped;
    if (r->mapped_unit < r->page_size)
        r->mapped_unit = r->page_size;
    r->cap = r->cap / r->mapped_unit * r->mapped_unit;
    if (r->cap == 0) /* to the pool that means no cap */
        run_end(r, USAGE,
                "VPMM_MAX_MAPPED, or --fraction of the device, is less than the %zu MiB that are mapped at once",
                r->mapped_unit >> 20);
    return atomic_load(&r->outcome) == PASSED;
}

/* The environment's settings come first: what the run depends on follows them, or is not theirs. */
static bool configure(run *r)
{
    r->config = vpmm_config_default();
    r->config.va_size = 0;
    if (vpmm_config_from_env(&r->config) != VPMM_SUCCESS) {
        run_end(r, USAGE, "%s", vpmm_last_error());
        return false;
    }
    r->config.device = r->ordinal;
    return true;
}

/* Address space in chunks of the cap, so that a pool that keeps old addresses for a while needs several. */
static bool open_target(run *r)
{
    const options *o = r->options;
    r->config.max_mapped = r->cap;
    if (r->config.va_size == 0)
        r->config.va_size = r->cap;
    r->seen_by_pool = r->gpu;
    if (o->faults || o->plant != PLANT_NONE)
        r->seen_by_pool.driver = faults_table(r->gpu.driver, o->plant);
    bool good = target_open(&r->target, &r->seen_by_pool, r->is_async ? NULL : &r->config);
    if (!good)
        run_end(r, r->target.made == VPMM_ERROR_INVALID_VALUE ? USAGE : DEVICE_ERROR,
                "the allocator could not be made: see above");
    else if (r->target.pool != NULL && !metrics_add(r->exporter, r->target.pool, "stress"))
        run_end(r, DEVICE_ERROR, "the metrics cannot be served: see above");
    return atomic_load(&r->outcome) == PASSED;
}

static bool open_streams(run *r)
{
    const options *o = r->options;
    r->owns = o->streams >= 4 * o->threads ? OWN_STREAMS : 1;
    unsigned shared = o->streams > r->owns * o->threads ? o->streams - r->owns * o->threads : 0;
    for (r->shareds = 0; r->shareds < shared && r->shareds < MAX_SHARED_STREAMS; r->shareds++)
        if (!run_cuda_ok(r, "cuStreamCreate",
                         r->gpu.driver->cuStreamCreate(&r->shared[r->shareds], CU_STREAM_NON_BLOCKING)))
            return false;
    if (r->shareds > 0) {
        r->shared[r->shareds++] = NULL;
        r->shared[r->shareds++] = CU_STREAM_PER_THREAD;
    }
    return true;
}

static bool open_lanes(run *r)
{
    r->lanes = calloc(r->options->threads, sizeof *r->lanes);
    if (!r->lanes) {
        run_end(r, DEVICE_ERROR, "no host memory for %u threads", r->options->threads);
        return false;
    }
    for (unsigned i = 0; i < r->options->threads; i++) {
        r->lanes[i].run = r;
        r->lanes[i].index = i;
        if (!lane_open(&r->lanes[i])) {
            run_end(r, DEVICE_ERROR, "a thread's memory could not be made: see above");
            return false;
        }
    }
    return true;
}

void run_open(run *r, const options *o, int ordinal, bool is_async, vpmm_exporter *exporter)
{
    memset(r, 0, sizeof *r);
    r->options = o;
    r->ordinal = ordinal;
    r->is_async = is_async;
    r->exporter = exporter;
    r->squeezing_pipe = -1;
    pthread_mutex_init(&r->message_lock, NULL);
    pthread_mutex_init(&r->longest_lock, NULL);
    pthread_mutex_init(&r->exchange.lock, NULL);
    if (!open_gpu(r))
        return;
    describe_device(r);
    if (!configure(r) || !choose_cap(r) || !open_target(r) || !open_streams(r))
        return;
    if (!memory_open(&r->gpu, o->verify, r->page_size, &r->memory)) {
        run_end(r, DEVICE_ERROR, "the checks could not be prepared: see above");
        return;
    }
    if (o->verify != VERIFY_OFF && !memory_try(&r->gpu, r->memory, r->page_size)) {
        run_end(r, DEVICE_ERROR, "the checks do not work: see above");
        return;
    }
    if (o->health && !(r->health = health_open(r->uuid))) {
        run_end(r, DEVICE_ERROR, "--health: NVML cannot be asked: see above");
        return;
    }
    open_lanes(r);
}

/* ---- threads ---- */

static void bear(run *r, lane *l)
{
    atomic_store(&l->ended, false);
    int error = pthread_create(&l->thread, NULL, lane_main, l);
    l->runs = error == 0;
    if (error != 0)
        run_end(r, DEVICE_ERROR, "a thread could not be made: %s", strerror(error));
}

void run_begin(run *r)
{
    if (atomic_load(&r->outcome) != PASSED)
        return;
    r->begun = now_seconds();
    faults_set(r->options->faults || r->options->plant != PLANT_NONE);
    host_memory_set(r->options->faults &&
                    r->options->plant == PLANT_NONE); /* a planted defect's table does not leave */
    for (unsigned i = 0; i < r->options->threads; i++)
        bear(r, &r->lanes[i]);
    others_begin(r);
}

static void look_at_simulator(run *r)
{
    if (!r->gpu.sim)
        return;
    r->races = vpmm_sim_races(r->gpu.sim);
    r->misuses = vpmm_sim_misuses(r->gpu.sim);
    if (r->races || r->misuses)
        run_end(r, FAILED, "the simulated GPU saw %llu races and %llu misuses: see above", (unsigned long long)r->races,
                (unsigned long long)r->misuses);
}

/* A signal in the midst of whatever the thread does: a call that it interrupts has to go on. */
static void jolt(const run *r)
{
    static uint64_t random;
    const lane *l = &r->lanes[random_below(&random, r->options->threads)];
    if (l->runs)
        pthread_kill(l->thread, JOLT_SIGNAL);
}

/* With VPMM_SMALL=async what the driver's pool has live counts as held, and the pool keeps no peak of the sum. */
static void look_at_mapped(run *r)
{
    if (r->config.small == VPMM_SMALL_ASYNC && r->target.pool != NULL)
        run_note_mapped(r, run_mapped(r));
}

void run_tend(run *r)
{
    look_at_simulator(r);
    look_at_mapped(r);
    if (r->lanes)
        jolt(r);
    for (unsigned i = 0; r->lanes && i < r->options->threads; i++) {
        lane *l = &r->lanes[i];
        if (!l->runs || !atomic_load_explicit(&l->ended, memory_order_acquire)) /* pairs with lane_main's release */
            continue;
        pthread_join(l->thread, NULL);
        l->runs = false;
        if (!atomic_load(&r->stop))
            bear(r, l);
    }
}

static void join_all(run *r)
{
    for (unsigned i = 0; r->lanes && i < r->options->threads; i++)
        if (r->lanes[i].runs) {
            pthread_join(r->lanes[i].thread, NULL);
            r->lanes[i].runs = false;
        }
}

/* ---- the end ---- */

/* After everything was freed: the reaper may be giving something back, and changes one number after the other. */
enum { LOOKS = 100, LOOK_NS = 10000000 };

static uint64_t look_at_live(run *r)
{
    target_stats(&r->target, &r->stats);
    return r->stats.live_bytes - r->stats.slab_bytes + r->stats.slab_live_bytes;
}

static void read_target(run *r)
{
    uint64_t highest = 0;
    if (!target_peak_mapped(&r->target, &highest))
        run_end(r, FAILED, "the statistics could not be read");
    run_note_mapped(r, highest);
    if (r->target.pool == NULL)
        return;
    uint64_t live = look_at_live(r);
    for (int i = 1; i < LOOKS && live != 0; i++) {
        nanosleep(&(struct timespec){0, LOOK_NS}, NULL);
        live = look_at_live(r);
    }
    vpmm_calls_get(r->target.pool, r->calls);
    if (live != 0 || r->stats.requested_bytes != 0)
        run_end(r, FAILED, "everything was freed, and the pool counts %llu bytes live, %llu requested",
                (unsigned long long)live, (unsigned long long)r->stats.requested_bytes);
}

/*
 * What the pool says that it holds, beside what the device has handed out. With `captures`, and with default streams,
 * that may be the block more that a wait for a context is made by, which the pool does not count.
 */
static void compare_with_device(run *r)
{
    const size_t block = r->config.captures || r->shareds > 0 ? (size_t)2 << 20 : 0;
    size_t used = 0, counted = 1;
    if (!r->gpu.sim || r->target.pool == NULL || r->config.small != VPMM_SMALL_SLAB)
        return;
    for (int i = 0; i < LOOKS && used != counted && used != counted + block; i++) {
        nanosleep(&(struct timespec){0, LOOK_NS}, NULL);
        target_stats(&r->target, &r->stats);
        used = vpmm_sim_used_bytes(r->gpu.sim);
        counted = r->stats.mapped_bytes + r->stats.quarantined_bytes;
    }
    if (used != counted && used != counted + block)
        run_end(r, FAILED, "the pool counts %zu bytes of physical memory, and the device has handed out %zu", counted,
                used);
}

static void close_target(run *r)
{
    if (r->target.pool != NULL || r->target.memory_pool != NULL) {
        if (r->target.pool != NULL && !metrics_remove(r->exporter, r->target.pool))
            run_end(r, FAILED, "the metrics: see above");
        if (r->target.pool != NULL)
            vpmm_pool_set_attribute(r->target.pool, VPMM_ATTRIBUTE_DECAY_MS, VPMM_DECAY_NEVER);
        target_poll(&r->target);
        read_target(r);
        bool audited = target_audit(&r->target);
        if (!r->is_async)
            r->audit = audited ? AUDIT_PASSED : AUDIT_FAILED;
        if (!audited)
            run_end(r, FAILED, "the pool's audit: %s", vpmm_last_error());
        compare_with_device(r);
        if (target_close(&r->target) != 0)
            run_end(r, FAILED, "the allocator could not be ended: see above");
    }
}

static void close_gpu(run *r)
{
    if (!r->gpu.driver)
        return;
    look_at_simulator(r);
    if (gpu_close(&r->gpu) != 0)
        run_end(r, FAILED, "the device was not left as it was found: see above");
}

/* A driver that refuses because of an access to memory that is not there says what the allocator has done. */
static void judge_refusal(run *r)
{
    int refusal = DEVICE_ERROR;
    if (r->gpu.driver && r->gpu.driver->cuCtxSynchronize() == CUDA_ERROR_ILLEGAL_ADDRESS)
        atomic_compare_exchange_strong(&r->outcome, &refusal, FAILED);
}

/* A run in which nothing could be had has tested nothing. */
static void judge_work(run *r)
{
    uint64_t made = run_count(r, COUNT_mallocs), refused = run_count(r, COUNT_refused);
    uint64_t planned = faults_made(NULL) + host_memory_refused() + host_threads_refused();
    if (r->options->faults && run_count(r, COUNT_faulted) > planned)
        run_end(r, FAILED, "%llu calls failed, and %llu were refused on purpose",
                (unsigned long long)run_count(r, COUNT_faulted), (unsigned long long)planned);
    if (refused > made)
        run_end(r, FAILED, "%llu mallocs were refused, and %llu were not", (unsigned long long)refused,
                (unsigned long long)made);
}

/* Whatever the driver refuses, the pool's end comes; what it leaves is nobody's. Allocations live: it says BUSY. */
static void end_refused_pool(run *r)
{
    if (r->target.pool == NULL || !metrics_remove(r->exporter, r->target.pool))
        return;
    vpmm_status status = vpmm_pool_destroy(r->target.pool);
    if (status != VPMM_SUCCESS && status != VPMM_ERROR_BUSY && status != VPMM_ERROR_DRIVER)
        run_end(r, FAILED, "vpmm_pool_destroy: %s", vpmm_last_error());
    if (status != VPMM_ERROR_BUSY)
        r->target.pool = NULL;
}

static void close_shared(run *r, CUstream stream)
{
    bool is_default = stream == NULL || stream == CU_STREAM_PER_THREAD;
    if (!target_release_stream(&r->target, stream))
        run_end(r, FAILED, "vpmm_stream_release: see above");
    else if (!is_default)
        run_cuda_ok(r, "cuStreamDestroy", r->gpu.driver->cuStreamDestroy(stream));
}

/* Of a run that has not passed: the pool's own numbers, which wait for nothing. */
static void note_target(run *r)
{
    uint64_t highest = 0;
    if (r->target.pool == NULL)
        return;
    target_stats(&r->target, &r->stats);
    if (target_peak_mapped(&r->target, &highest))
        run_note_mapped(r, highest);
    vpmm_calls_get(r->target.pool, r->calls);
}

/*
 * Where the run has failed its streams may be in any state, and everything is left to the process's end; where it could
 * not go on, the pool's end is tried.
 */
void run_close(run *r)
{
    atomic_store(&r->stop, true);
    if (r->gpu.context != NULL) /* another run's may be current */
        gpu_enter(&r->gpu);
    others_end(r);
    join_all(r);
    if (r->options->plant != PLANT_LOST)
        faults_set(false);
    host_memory_set(false);
    r->seconds = r->begun != 0 ? now_seconds() - r->begun : 0;
    if (atomic_load(&r->outcome) == PASSED)
        exchange_empty(r);
    if (run_mismatches(r) != 0)
        run_end(r, FAILED, "memory does not hold what was written to it");
    run_describe_finding(r);
    judge_refusal(r);
    judge_work(r);
    if (r->health && !health_close(r->health, r->health_words, sizeof r->health_words))
        run_end(r, FAILED, "the device's health: %s", r->health_words);
    if (atomic_load(&r->outcome) != PASSED)
        note_target(r);
    if (atomic_load(&r->outcome) == DEVICE_ERROR)
        end_refused_pool(r);
    if (atomic_load(&r->outcome) != PASSED)
        return;
    for (unsigned i = 0; i < r->shareds; i++)
        close_shared(r, r->shared[i]);
    if (atomic_load(&r->outcome) == PASSED)
        close_target(r);
    if (atomic_load(&r->outcome) != PASSED)
        return; /* a pool that is still there works on */
    uint64_t verified = run_bytes_verified(r);
    for (unsigned i = 0; i < r->options->threads; i++)
        lane_close(&r->lanes[i]);
    r->bytes_verified = verified; /* the probes had counted it, and no mismatch */
    memory_close(r->memory);
    close_gpu(r);
}
