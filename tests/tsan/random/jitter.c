/*
 * jitter.c - threads that stop where it is least convenient.
 *
 * The pool gets a copy of the driver's table in which a call now and then takes a while to return: what lies between
 * two driver calls of the pool, such as asking whether a stream captures and recording on it, is then long enough for
 * the other threads to do something. Beside that, a signal stops one thread of the round after the other wherever it
 * is, in the library or in the simulator, for a moment. Where a moment matters a thread aims one at itself.
 */
#define _GNU_SOURCE
#include "random.h"

#include <sched.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

enum { JOLT_SIGNAL = SIGUSR1, JOLTED_MOST = 64, JOLT_PAUSE_US = 150, DAWDLE_US = 100 };

static vpmm_driver real;
static vpmm_driver dawdling;

static _Thread_local uint64_t own_random;
static _Atomic(const char *) refused = "none";

const char *jitter_refused(void)
{
    return atomic_load(&refused);
}

/* Seeded by the thread's stack: what is random here need not come again. */
static uint64_t own_draw(uint64_t below)
{
    if (!own_random)
        own_random = (uintptr_t)&own_random * UINT64_C(0x9e3779b97f4a7c15) | 1;
    own_random ^= own_random << 13;
    own_random ^= own_random >> 7;
    own_random ^= own_random << 17;
    return (own_random >> 11) % below;
}

static void sleep_us(uint64_t us)
{
    nanosleep(&(struct timespec){.tv_nsec = (long)us * 1000}, NULL);
}

static CUresult dawdle(const char *call, CUresult result)
{
    if (result >= CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED && result <= CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD)
        atomic_store(&refused, call);
    uint64_t chance = own_draw(256);
    if (chance >= 8)
        return result;
    count(COUNT_dawdles);
    if (chance == 0)
        sleep_us(1 + own_draw(DAWDLE_US));
    else
        sched_yield();
    return result;
}

#define DAWDLE_ENTRY(name, version, parameters, arguments)                                                             \
    static CUresult CUDAAPI dawdle_##name parameters                                                                   \
    {                                                                                                                  \
        return dawdle(#name, real.name arguments);                                                                     \
    }
VPMM_DRIVER_ENTRIES(DAWDLE_ENTRY)
#undef DAWDLE_ENTRY

const vpmm_driver *jitter_table(const vpmm_driver *driver)
{
    real = dawdling = *driver;
#define DAWDLE_SET(name, version, parameters, arguments)                                                               \
    if (real.name)                                                                                                     \
        dawdling.name = dawdle_##name;
    VPMM_DRIVER_ENTRIES(DAWDLE_SET)
#undef DAWDLE_SET
    return &dawdling;
}

/* ---- signals ---- */

static struct {
    pthread_mutex_t lock;
    pthread_t thread[JOLTED_MOST], jolter;
    size_t threads;
    bool runs;
    atomic_bool stop;
} jolts = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void jolted(int signal)
{
    (void)signal;
    sleep_us(1 + own_draw(200));
}

/* Under the lock, which a thread that ends takes first: the thread is there. */
static void jolt_one(void)
{
    pthread_mutex_lock(&jolts.lock);
    if (jolts.threads) {
        pthread_kill(jolts.thread[own_draw(jolts.threads)], JOLT_SIGNAL);
        count(COUNT_jolts);
    }
    pthread_mutex_unlock(&jolts.lock);
}

static void *jolt(void *unused)
{
    (void)unused;
    while (!atomic_load(&jolts.stop)) {
        sleep_us(1 + own_draw(JOLT_PAUSE_US));
        jolt_one();
    }
    return NULL;
}

void jitter_begin(void)
{
    struct sigaction action = {.sa_handler = jolted, .sa_flags = SA_RESTART};
    sigaction(JOLT_SIGNAL, &action, NULL);
    atomic_store(&jolts.stop, false);
    jolts.runs = pthread_create(&jolts.jolter, NULL, jolt, NULL) == 0;
}

void jitter_end(void)
{
    atomic_store(&jolts.stop, true);
    if (jolts.runs)
        pthread_join(jolts.jolter, NULL);
    jolts.runs = false;
}

/* ---- of the thread's own ---- */

static _Thread_local timer_t own_timer;
static _Thread_local bool has_timer;

static void make_timer(void)
{
    struct sigevent event = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = JOLT_SIGNAL};
    event._sigev_un._tid = gettid();
    has_timer = timer_create(CLOCK_MONOTONIC, &event, &own_timer) == 0;
}

void jitter_aim(struct worker *worker, unsigned within_us)
{
    struct itimerspec in = {.it_value = {.tv_nsec = (long)(1 + draw(worker, within_us * 1000))}};
    if (has_timer)
        timer_settime(own_timer, 0, &in, NULL);
}

void jitter_join(void)
{
    if (jolts.runs)
        make_timer();
    pthread_mutex_lock(&jolts.lock);
    if (jolts.threads < JOLTED_MOST)
        jolts.thread[jolts.threads++] = pthread_self();
    pthread_mutex_unlock(&jolts.lock);
}

void jitter_leave(void)
{
    if (has_timer)
        timer_delete(own_timer);
    has_timer = false;
    pthread_mutex_lock(&jolts.lock);
    for (size_t i = 0; i < jolts.threads; i++)
        if (pthread_equal(jolts.thread[i], pthread_self()))
            jolts.thread[i--] = jolts.thread[--jolts.threads];
    pthread_mutex_unlock(&jolts.lock);
}
