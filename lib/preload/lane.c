#include "lane.h"

#include "book.h"
#include "switch.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { LANES = 64, LINE = 64, OPEN_US = 1000 };

static struct lane {
    _Alignas(LINE) _Atomic(uint32_t) inside;
    _Atomic(uint64_t) counts[COUNT_COUNT];
    _Atomic(int64_t) beyond[BOOK_DEVICES];
} lanes[LANES];

static atomic_bool shut;
static pthread_mutex_t shutting = PTHREAD_MUTEX_INITIALIZER;

static struct lane *own_lane(void)
{
    static _Atomic(unsigned) threads;
    static _Thread_local struct lane *lane __attribute__((tls_model("initial-exec")));
    if (!lane)
        lane = &lanes[atomic_fetch_add_explicit(&threads, 1, memory_order_relaxed) % LANES];
    return lane;
}

/* ---- who is inside ---- */

void lane_enter(void)
{
    struct lane *lane = own_lane();
    atomic_fetch_add(&lane->inside, 1);
    while (atomic_load(&shut)) {
        atomic_fetch_sub(&lane->inside, 1);
        pthread_mutex_lock(&shutting);
        pthread_mutex_unlock(&shutting);
        atomic_fetch_add(&lane->inside, 1);
    }
}

void lane_leave(void)
{
    atomic_fetch_sub_explicit(&own_lane()->inside, 1, memory_order_release);
}

static bool is_anybody_inside(void)
{
    for (size_t i = 0; i < LANES; i++)
        if (atomic_load(&lanes[i].inside))
            return true;
    return false;
}

static bool becomes_empty(void)
{
    enum { LOOKS = 1000 };
    for (int i = 0; i < LOOKS; i++) {
        if (!is_anybody_inside())
            return true;
        sched_yield();
    }
    return false;
}

void lane_shut(void)
{
    pthread_mutex_lock(&shutting);
    atomic_store(&shut, true);
    while (!becomes_empty()) {
        lane_open();
        usleep(OPEN_US);
        pthread_mutex_lock(&shutting);
        atomic_store(&shut, true);
    }
}

void lane_open(void)
{
    atomic_store(&shut, false);
    pthread_mutex_unlock(&shutting);
}

/* ---- what pools count ---- */

void lane_add_beyond(int device, int64_t bytes)
{
    if (bytes)
        atomic_fetch_add_explicit(&own_lane()->beyond[device], bytes, memory_order_relaxed);
}

int64_t lane_beyond(int device)
{
    int64_t all = 0;
    for (size_t i = 0; i < LANES; i++)
        all += atomic_load_explicit(&lanes[i].beyond[device], memory_order_relaxed);
    return all;
}

void lane_clear_beyond(int device)
{
    for (size_t i = 0; i < LANES; i++)
        atomic_store_explicit(&lanes[i].beyond[device], 0, memory_order_relaxed);
}

/* ---- the line at the exit ---- */

static const char *const words[] = {
#define WORDS(name, words) words,
    COUNTS(WORDS)
#undef WORDS
};

static pthread_mutex_t explaining = PTHREAD_MUTEX_INITIALIZER;
static char explanation[400];
static atomic_bool is_prepared; /* the line is asked for, */
static atomic_bool is_parents;  /* by the parent of this process */

static uint64_t sum(enum count count)
{
    uint64_t all = 0;
    for (size_t i = 0; i < LANES; i++)
        all += atomic_load_explicit(&lanes[i].counts[count], memory_order_relaxed);
    return all;
}

static bool is_any_counted(void)
{
    for (int i = 0; i < COUNT_COUNT; i++)
        if (sum(i))
            return true;
    return false;
}

static void say(void)
{
    uint64_t left = 0;
    if (atomic_load(&is_parents) && !is_any_counted()) /* the child of a fork, which has asked for nothing */
        return;
    for (int i = COUNT_left_capture; i <= COUNT_left_unserved; i++)
        left += sum(i);
    char line[1200];
    int length = snprintf(line, sizeof line, "vpmm: served %llu %s, %llu %s, %llu %s; left to the driver %llu",
                          (unsigned long long)sum(COUNT_served), words[COUNT_served],
                          (unsigned long long)sum(COUNT_served_at_once), words[COUNT_served_at_once],
                          (unsigned long long)sum(COUNT_freed), words[COUNT_freed], (unsigned long long)left);
    for (int i = COUNT_trims; i < COUNT_COUNT; i++)
        if (sum(i))
            length += snprintf(line + length, sizeof line - length, ", %llu %s", (unsigned long long)sum(i), words[i]);
    pthread_mutex_lock(&explaining);
    if (explanation[0])
        snprintf(line + length, sizeof line - length, " (%s)", explanation);
    pthread_mutex_unlock(&explaining);
    dprintf(STDERR_FILENO, "%s\n", line);
}

/* After fork: no thread that was inside, or shut the lanes, is in the child; and the counts are the parent's. */
static void begin_in_child(void)
{
    for (size_t i = 0; i < LANES; i++) {
        atomic_store(&lanes[i].inside, 0);
        for (int count = 0; count < COUNT_COUNT; count++)
            atomic_store_explicit(&lanes[i].counts[count], 0, memory_order_relaxed);
    }
    atomic_store(&is_parents, atomic_load(&is_prepared));
    atomic_store(&shut, false);
    pthread_mutex_init(&shutting, NULL);
    pthread_mutex_init(&explaining, NULL);
}

__attribute__((constructor)) static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, begin_in_child);
}

static void prepare(void)
{
    if (!switch_is_on("VPMM_PRELOAD_VERBOSE"))
        return;
    atomic_store(&is_prepared, true);
    atexit(say);
}

void lane_prepare(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, prepare);
}

void lane_count(enum count count)
{
    lane_prepare();
    atomic_fetch_add_explicit(&own_lane()->counts[count], 1, memory_order_relaxed);
}

void lane_explain(const char *reason)
{
    pthread_mutex_lock(&explaining);
    if (!explanation[0])
        snprintf(explanation, sizeof explanation, "%s", reason);
    pthread_mutex_unlock(&explaining);
}
