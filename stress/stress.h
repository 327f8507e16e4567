/*
 * stress.h - vpmm-stress: tries to break the allocator, the driver's virtual memory management under it, and the memory
 * itself, and says whether it did.
 *
 *   run        one allocator on one device: its pool, its lanes, and those who disturb them, for the time given
 *   lane       the place of one thread. Thread after thread is born in it, each with streams of its own and the next
 *              pattern (stress_patterns.h), and dies after ROUND_STEPS steps. What it has then it frees, or gives
 *   exchange   allocations on their way from one thread to another, each with an event after which it may be used
 *   disturber  a thread that trims the pool, polls it, lowers its cap or changes other settings for a moment, lends
 *              another device access, looks at it (LOOKS), and makes and ends another pool, at random
 *   squeezer   another process that takes device memory away for a moment; on the simulated GPU a thread
 *   outcome    passed, failed, could not run, ...: what the exit status says. The first one that is not PASSED stays,
 *              but that FAILED takes the place of DEVICE_ERROR
 *
 * Each allocation is filled on its stream, and checked before its free and after it was given (stress_memory.h). Most
 * threads collect fills, and checks with their frees, until there are PROBE_BLOCKS of one stream: a launch for each
 * would be what all threads wait for. The seed fixes the steps of each thread; what the threads do to one another is
 * up to the machine.
 *
 * longest    the malloc that took longest, of those that were served and of those that were refused: who is refused has
 *            waited for everything first, who is served has not
 *
 * Who writes what: a lane's numbers are its thread's, and read by the main thread at any time; a lane is reused only
 * after its thread was joined. The run's outcome is set under its lock, by whoever comes first, and once more at most.
 */
#ifndef VPMM_STRESS_STRESS_H
#define VPMM_STRESS_STRESS_H

#include "metrics.h"
#include "random.h"
#include "stress_memory.h"
#include "stress_patterns.h"
#include "target.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <vpmm/observe.h>

enum outcome {
    PASSED = 0,
    FAILED = 1,       /* corruption, or a broken invariant */
    USAGE = 2,        /* or a setting that no pool can be made of */
    DEVICE_ERROR = 3, /* could not run, or not to the end: the driver or the device refused */
    SKIPPED = 77,     /* there is nothing to test here */
    STUCK = 124,
    TERMINATED = 143, /* PASSED as far as it went, when SIGTERM came: the program's alone, no run's */
};

enum plant {
    PLANT_NONE,
    PLANT_REUSE,
    PLANT_LOST_PAGE,
    PLANT_DOUBLE_MAP,
    PLANT_UNMAPPED,
    PLANT_COUNT,
    PLANT_BIT,
    PLANT_LOST,
    PLANTS
};
extern const char *const plant_names[PLANTS];

typedef struct options {
    bool cuda, all_devices, faults, health;
    bool vpmm, async; /* the allocators, in this order */
    int device;
    double seconds, level_seconds, fraction;
    unsigned threads, streams;
    uint64_t seed;
    uint32_t patterns; /* a bit for each */
    verify_mode verify;
    enum plant plant;
    int metrics_port; /* -1: none; 0: any that is free */
    const char *metrics_address;
    const char *json; /* NULL: none; "-": standard output */
} options;

/* ---- numbers ---- */

#define COUNTS(X)                                                                                                      \
    X(mallocs, "allocations made")                                                                                     \
    X(frees, "allocations freed")                                                                                      \
    X(refused, "allocations refused for want of memory")                                                               \
    X(faulted, "allocations, frees and releases that a planned fault refused")                                         \
    X(given, "allocations given to other threads")                                                                     \
    X(taken, "allocations taken from other threads")                                                                   \
    X(crossed, "frees on another stream than the last use")                                                            \
    X(on_default, "allocations made on the default stream of all threads")                                             \
    X(on_own_default, "allocations made on a thread's default stream")                                                 \
    X(used, "frees of what another stream still reads, as vpmm_use was told")                                          \
    X(streams, "streams made")                                                                                         \
    X(threads, "threads born")                                                                                         \
    X(steps, "steps of patterns")

enum count {
#define COUNT_OF(name, what) COUNT_##name,
    COUNTS(COUNT_OF)
#undef COUNT_OF
        COUNT_COUNT
};

/* What the threads' time goes to; the rest is the patterns, the exchange, and waiting to be born. */
#define SPENDS(X)                                                                                                      \
    X(malloc, "mallocs")                                                                                               \
    X(free, "frees")                                                                                                   \
    X(launch, "launches of fills and checks")                                                                          \
    X(wait, "waiting for the GPU")                                                                                     \
    X(stream, "making and ending streams")                                                                             \
    X(order, "recording events and making streams wait for them")

enum spend {
#define SPEND_OF(name, what) SPEND_##name,
    SPENDS(SPEND_OF)
#undef SPEND_OF
        SPEND_COUNT
};

/* Of mallocs: eight buckets a doubling of nanoseconds. */
enum { LATENCY_BUCKETS = 64 * 8 };

typedef struct latency {
    _Atomic(uint64_t) count[LATENCY_BUCKETS];
    _Atomic(uint64_t) longest_ns;
} latency;

enum answer { SERVED, REFUSED, ANSWERS };

/* What a run calls now and then that its threads may have to wait for: a word for programs, and for people. */
#define DISTURBANCES(X)                                                                                                \
    X(trim, "a trim")                                                                                                  \
    X(pool, "another pool")                                                                                            \
    X(access, "a change of access")                                                                                    \
    X(look, "a look")

enum disturbance {
#define DISTURBANCE_OF(name, words) DISTURBANCE_##name,
    DISTURBANCES(DISTURBANCE_OF)
#undef DISTURBANCE_OF
        DISTURBANCE_COUNT
};

extern const char *const disturbance_names[DISTURBANCE_COUNT], *const disturbance_words[DISTURBANCE_COUNT];

/* What a look may be at. */
#define LOOKS(X) X(statistics) X(attributes) X(health) X(ranges) X(allocations) X(calls)

enum look {
#define LOOK_OF(name) LOOK_##name,
    LOOKS(LOOK_OF)
#undef LOOK_OF
        LOOK_COUNT
};

/* But for the time, under its lock; the time may be read by any thread, and grows. */
typedef struct longest {
    _Atomic(uint64_t) ns; /* 0: there was none */
    size_t bytes, cap;    /* cap: the lowest in force while it lasted, */
    bool lowered;         /* and whether that was lower than the run's own */
    const char *pattern;
    unsigned thread; /* its lane's number */
    unsigned beside; /* 1 << disturbance: any device's that was under way meanwhile */
    double at;       /* seconds since the run's beginning when it began */
} longest;

/* What the process itself uses, at its highest in each half of the run's time. */
typedef struct resources {
    struct {
        uint64_t resident_bytes, descriptors, threads;
    } half[2];
    double next_look;
} resources;

/* ---- a run ---- */

struct run;

enum {
    HISTORY = 16384, /* allocations of a lane that are remembered, a power of two */
    ROUND_STEPS = 4096,
    OWN_STREAMS = 2, /* of a thread, at most */
    DEFAULT_STREAMS = 2,
    IN_FLIGHT = 2,
    MAX_SHARED_STREAMS = 1024,
};

struct used {
    block block; /* the generation: the last one written */
    CUstream stream;
};

typedef struct lane {
    struct run *run;
    unsigned index;
    uint64_t born; /* threads so far */
    pthread_t thread;
    bool runs;         /* the main thread's: to be joined */
    atomic_bool ended; /* its thread has nothing more to do */
    probe *probe;
    sequence sequence;
    uint64_t random, number; /* draws that are not the pattern's; allocations so far */
    CUstream own[OWN_STREAMS];
    unsigned owns, current; /* current: of all streams that it may use, its own first */
    CUevent order, behind[IN_FLIGHT];
    uint64_t since_behind, nth_behind;
    struct held {
        block block;
        unsigned stream;
    } held[SEQUENCE_SLOTS];
    struct batch { /* of one stream; what is not queued there yet */
        CUstream stream;
        unsigned n;
        block block[PROBE_BLOCKS];
    } fills, ends; /* to be filled; to be checked and freed */
    unsigned most; /* in a batch, of this thread */
    uint64_t remembered;
    struct used history[HISTORY];
    _Atomic(uint64_t) count[COUNT_COUNT], spent_ns[SPEND_COUNT];
    _Atomic(uint64_t) digest; /* of its first thread's steps; 0: it has not done all of them */
    latency latency;
} lane;

#define JOLT_SIGNAL SIGUSR1 /* has a handler that does nothing */

enum { PARCELS = 256 };

struct parcel {
    block block;
    CUevent ready;
};

typedef struct run {
    const options *options;
    bool is_async;
    int ordinal;
    gpu gpu, seen_by_pool; /* seen_by_pool: the same with the table that the pool calls, which may fail */
    target target;
    char name[128], uuid[41];
    int driver_version; /* as cuDriverGetVersion has it */
    size_t memory_bytes, page_size, cap;
    size_t mapped_unit; /* of what the driver maps: a page, or its granularity if that is more */
    vpmm_config config;
    stress_memory *memory;
    lane *lanes;
    CUstream shared[MAX_SHARED_STREAMS + DEFAULT_STREAMS]; /* where there are any, the default streams are the last */
    unsigned shareds, owns;                                /* owns: of each thread */
    struct exchange {
        pthread_mutex_t lock;
        struct parcel parcel[PARCELS];
        unsigned first, count;
        size_t bytes;
        CUevent spare[PARCELS]; /* events that are no parcel's: the driver makes and ends one at a time */
        unsigned spares;
    } exchange;
    _Atomic(uint64_t) live, peak_live, peak_mapped; /* mapped: of what was seen; the pool's own may be set back */
    _Atomic(uint64_t) trims, polls, caps, settings, accesses, looks, looked[LOOK_COUNT], pools, parks, squeezes;
    _Atomic(uint64_t) beside_park, refused_by_park; /* mallocs of a pool that is parked and woken: served, and not */
    _Atomic(uint64_t) lower_cap, cap_changes;       /* the latest that was set; changes: odd while it may be in force */
    _Atomic(uint64_t) longest_disturbance_ns[DISTURBANCE_COUNT];
    longest longest[ANSWERS];
    pthread_mutex_t longest_lock;
    pthread_t disturber, squeezer;
    bool disturbs, squeezes_here;
    int squeezing_pipe; /* its other end is in the process that squeezes; -1: there is none */
    int squeezing_process;
    vpmm_exporter *exporter; /* NULL: no metrics */
    struct health *health;
    char health_words[512]; /* "": nobody was asked */
    atomic_bool stop;
    _Atomic(int) outcome;
    char message[512];
    pthread_mutex_t message_lock;
    double begun, seconds;
    resources resources;
    /* at the end */
    vpmm_stats stats;
    vpmm_call_counts calls[VPMM_DRIVER_CALLS];
    uint64_t races, misuses, bytes_verified;
    enum { AUDIT_NOT_MADE, AUDIT_PASSED, AUDIT_FAILED } audit; /* the pool's; the driver's allocator has none */
    char finding[1024];
} run;

double now_seconds(void);
uint64_t now_ns(void);

/* The run ends with this outcome, unless it has one that says as much; told on stderr. Any thread. */
__attribute__((format(printf, 3, 4))) void run_end(run *, enum outcome, const char *format, ...);
bool run_cuda_ok(run *, const char *what, CUresult); /* false: it ended the run */
const char *outcome_word(int outcome);

uint64_t run_count(const run *, enum count);
double run_spent(const run *, enum spend); /* a part of all threads' time */
uint64_t run_bytes_verified(const run *);
uint64_t run_mismatches(const run *);
double run_latency_us(const run *, double part); /* the latency that such a part of the mallocs does not exceed */
double run_longest_us(const run *);
uint64_t run_mapped(run *);
void run_note_mapped(run *, uint64_t bytes);

/* ---- stress_run.c ---- */

void run_open(run *, const options *, int ordinal, bool is_async,
              vpmm_exporter *); /* its outcome says whether it can go on */
void run_begin(run *);
void run_tend(run *); /* often: the next thread is born where one has died */
void run_close(run *);

/* ---- stress_lane.c ---- */

bool lane_open(lane *);
void *lane_main(void *lane); /* a thread's life */
void lane_close(lane *);
void exchange_empty(run *);
void run_describe_finding(run *); /* after the last thread has ended */

/* ---- stress_others.c: who disturbs ---- */

void others_begin(run *);
void others_end(run *);
unsigned disturbances_since(uint64_t ns); /* 1 << disturbance: of any device that was under way at some time since */
int squeeze_process(int ordinal, size_t bytes); /* what another process does, until its standard input ends */

/* ---- stress_looks.c ---- */

/* False: it has ended the run. */
bool look_at_pool(run *, enum look);

/* ---- stress_faults.c: a driver table that fails at random, or has a defect planted ---- */

/* The table to be used in place of this one: it fails while `faults` is on. One at a time in a process. */
const vpmm_driver *faults_table(const vpmm_driver *, enum plant);
void faults_set(bool on);
void faults_spare(bool);                /* this thread: nothing is refused, or planted */
uint64_t faults_made(const char *call); /* so far; NULL: of all calls */

/* ---- stress_host_memory.c: the host's memory and threads, which fail at random in calls of the pool's ---- */

void host_memory_set(bool fails);
void host_memory_enter(void);             /* this thread calls the pool; */
void host_memory_enter_creation(void);    /* or makes one, for which it asks for much: refused less often; */
unsigned host_memory_leave(void);         /* it is out of it again, or in the driver; whether it was in, */
void host_memory_return(unsigned was_in); /* which this restores */
uint64_t host_memory_refused(void);       /* requests, so far */
uint64_t host_threads_refused(void);      /* likewise */

/* ---- stress_health.c: what NVML says of a device ---- */

struct health;
struct health *health_open(const char *uuid); /* NULL: there is none to be had; told */
/* In words what has changed since; true: nothing that makes a device suspect. */
bool health_close(struct health *, char *words, size_t length);

/* ---- stress_resources.c ---- */

/* About once a second; part: of the time that is over, 0 to 1. */
void resources_look(resources *, double part);

/* In words what grew in the second half; "": nothing. */
void resources_grown(const resources *, char *words, size_t length);

/* ---- stress_report.c ---- */

void report_progress(run *);
void report_result(FILE *, run *);
/* cut_short: by a signal, before its time. why_none: why there are no runs; "": it is not known, or there are. */
void report_json(FILE *, const options *, const run *, unsigned runs, int outcome, bool cut_short,
                 const char *why_none);

/* The rare paths that a run of all patterns is expected to take, and has not: in words, "" none. */
void report_paths_missed(const run *, char *words, size_t length);

#endif
