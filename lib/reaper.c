#define _GNU_SOURCE
#include "reaper.h"

#include "build.h"
#include "clock.h"
#include "cut.h"
#include "front.h"
#include "lock.h"
#include "region.h"
#include "zombie.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>

/* ---- a pass ---- */

static void pass_regions(struct arena *arena)
{
    for (uint32_t slot = 1, n = load_acquire_u32(&arena->streams.slots); slot < n; slot++) {
        struct stream *stream = stream_at(&arena->streams, slot);
        uint64_t completed = load_sc_u64(&stream->completed);
        if (completed == stream->moved_until)
            continue; /* what is published behind it later sees that it has passed: see region_publish */
        stream->moved_until = completed;
        region_pass(&arena->space, stream);
        if (arena->cut.page_granules)
            region_pass(&arena->cut, stream);
    }
    slabs_pass(&arena->slabs);
}

static double work_ahead(struct arena *arena, double budget_us)
{
    double spent = 0, step;
    while (spent < budget_us && !device_lost(arena->device) && !load_relaxed_u32(&arena->builders)) {
        if (build_ahead(arena, budget_us - spent, &step) != VPMM_SUCCESS || step <= 0)
            break; /* a failure ahead of need fails nobody: the request itself will say so */
        spent += step;
    }
    return spent;
}

static bool any_noted(const struct arena *arena)
{
    return fronts_noted(arena->space.fronts) || fronts_noted(arena->cut.fronts);
}

/* Under `watching`. */
static bool publish_passed(struct arena *arena)
{
    bool any = streams_complete(&arena->streams);
    if (device_lost(arena->device)) {
        fronts_disable(arena->space.fronts);
        fronts_disable(arena->cut.fronts);
    }
    pass_regions(arena);
    return any;
}

/* Under the reaper's turn. True: something was done, and more may follow from it. */
static bool pass(struct arena *arena, unsigned budget_us)
{
    fronts_flush_idle(arena->space.fronts);
    fronts_flush_idle(arena->cut.fronts);
    cut_tidy(arena);
    lock_take(&arena->watching);
    bool any = publish_passed(arena);
    pthread_mutex_unlock(&arena->watching);
    any |= zombies_retire(arena);
    return work_ahead(arena, budget_us) > 0 || any;
}

static vpmm_status locked_pass(struct arena *arena, unsigned budget_us, bool *any)
{
    struct device_scope scope;
    vpmm_status status = device_lost(arena->device) ? device_lost_status() : device_enter(arena->device, &scope);
    if (status != VPMM_SUCCESS)
        return status;
    *any = pass(arena, budget_us);
    device_leave(arena->device, &scope);
    store_relaxed_u64(&arena->passed_at_ns, clock_now_ns());
    return device_lost(arena->device) ? device_lost_status() : VPMM_SUCCESS;
}

uint64_t reaper_age_ns(const struct arena *arena)
{
    if (load_sc_u32(&arena->bell.asleep))
        return 0;
    uint64_t passed = load_relaxed_u64(&arena->passed_at_ns), now = clock_now_ns();
    return now > passed ? now - passed : 0;
}

vpmm_status reaper_pass(struct arena *arena, unsigned budget_us)
{
    bool any;
    if (!lock_try(&arena->reaping))
        return VPMM_SUCCESS;
    vpmm_status status = locked_pass(arena, budget_us, &any);
    pthread_mutex_unlock(&arena->reaping);
    return status;
}

enum {
    REFRESH_PATIENCE_NS = 200000, /* for who has `watching`: it asks the driver a few questions */
    REFRESH_ROUNDS = 4,           /* of looks at marks that may be about to pass, */
    REFRESH_PAUSE_NS = 5000,      /* and the time between them: what an idle device takes */
};

static bool try_watching(struct arena *arena)
{
    uint64_t end = clock_now_ns() + REFRESH_PATIENCE_NS;
    while (!lock_try(&arena->watching)) {
        if (clock_now_ns() > end)
            return false;
        clock_yield();
    }
    return true;
}

void reaper_refresh(struct arena *arena)
{
    struct device_scope scope;
    bool pending = streams_pending(&arena->streams) || streams_unmarked(&arena->streams) ||
                   slabs_deferred(&arena->slabs); /* what has passed before it was deferred */
    if (!pending || !try_watching(arena))
        return;
    if (!device_lost(arena->device) && device_enter(arena->device, &scope) == VPMM_SUCCESS) {
        publish_passed(arena);
        for (int i = 1; i < REFRESH_ROUNDS && streams_pending(&arena->streams); i++) {
            clock_spin_ns(REFRESH_PAUSE_NS);
            publish_passed(arena);
        }
        device_leave(arena->device, &scope);
    }
    pthread_mutex_unlock(&arena->watching);
}

vpmm_status reaper_pass_now(struct arena *arena)
{
    bool any;
    lock_take(&arena->reaping);
    vpmm_status status = locked_pass(arena, 0, &any);
    pthread_mutex_unlock(&arena->reaping);
    return status;
}

static vpmm_status synchronise(struct arena *arena)
{
    struct device_scope scope;
    vpmm_status status = device_enter(arena->device, &scope);
    if (status != VPMM_SUCCESS)
        return status;
    lock_take(&arena->watching);
    status = streams_synchronise(&arena->streams);
    pass_regions(arena);
    pthread_mutex_unlock(&arena->watching);
    device_leave(arena->device, &scope);
    return status;
}

static bool all_passed(const struct arena *arena)
{
    for (uint32_t slot = 1; slot < load_acquire_u32(&arena->streams.slots); slot++) {
        const struct stream *stream = stream_at(&arena->streams, slot);
        if (load_sc_u64(&stream->published) > load_acquire_u64(&stream->completed))
            return false;
    }
    return true;
}

vpmm_status reaper_settle(struct arena *arena)
{
    fronts_flush(arena->space.fronts, NULL, true);
    fronts_flush(arena->cut.fronts, NULL, true);
    for (uint32_t slot = 1; slot < load_acquire_u32(&arena->streams.slots); slot++) {
        struct stream *stream = stream_at(&arena->streams, slot);
        if (exchange_acq_rel_u32(&stream->freed_small, 0)) /* the driver's pool lets go of what it has seen complete */
            stream_new_point(&arena->streams, stream);
        struct fence last = {slot, load_sc_u64(&stream->published)};
        if (fence_waitable(&arena->streams, last))
            stream_wait_host(&arena->streams, last); /* if the driver refuses, the device is asked below */
    }
    vpmm_status status = reaper_pass_now(arena);
    if (status == VPMM_SUCCESS && !all_passed(arena))
        status = synchronise(arena);
    if (status == VPMM_SUCCESS)
        status = reaper_pass_now(arena);
    return status;
}

/* ---- the thread ---- */

struct reaper {
    struct arena *arena;
    pthread_t thread;
    _Atomic(uint32_t) stop;
    uint64_t built, quiet_since; /* the thread's: requests that had to build, and when that number last moved */
};

/*
 * Until there is work, or for so many microseconds; 0: for ever. One more look after saying that it sleeps: see
 * bell_ring. What it would sleep over for a time only is looked for if it is to sleep for ever.
 */
static void sleep_until_work(struct reaper *reaper, uint64_t us)
{
    struct arena *arena = reaper->arena;
    uint32_t seen = wakeup_read(&arena->bell.work);
    store_sc_u32(&arena->bell.asleep, 1);
    bool work = streams_pending(&arena->streams) || load_sc_u32(&reaper->stop);
    if (!work && !us)
        work = streams_unmarked(&arena->streams) || !pile_empty(&arena->zombies) || any_noted(arena) ||
               slabs_deferred(&arena->slabs);
    if (!work)
        wakeup_wait(&arena->bell.work, seen, us * 1000);
    store_relaxed_u64(&arena->passed_at_ns, clock_now_ns()); /* its age begins again with its work */
    store_sc_u32(&arena->bell.asleep, 0);
}

/*
 * Work ahead is for quiet times: while requests are building, what the policy would do ahead is being done by them, and
 * would only stand in their way in the driver.
 */
static bool is_quiet(struct reaper *reaper)
{
    uint64_t built = stats_sum(reaper->arena->stats, STAT_builds), now = clock_now_ns() / 1000;
    if (built != reaper->built) {
        reaper->built = built;
        reaper->quiet_since = now;
        return false;
    }
    return now - reaper->quiet_since >= REAPER_QUIET_US;
}

/* A pass of the thread's, and how many microseconds later the next; 0: nothing is pending. */
static unsigned pass_and_plan(struct reaper *reaper)
{
    enum { BUDGET_US = 200 }; /* of work ahead in a pass: what a request may have to wait for behind it */
    struct arena *arena = reaper->arena;
    bool any = false, quiet = is_quiet(reaper);
    lock_take(&arena->reaping);
    locked_pass(arena, quiet ? BUDGET_US : 0, &any);
    bool refused = arena->waiting != NULL, cached = arena->space.fronts->noted || arena->cut.fronts->noted;
    pthread_mutex_unlock(&arena->reaping);
    if (any || streams_pending(&arena->streams))
        return REAPER_TICK_US;
    if (!quiet)
        return REAPER_QUIET_US;
    if (refused || streams_unmarked(&arena->streams))
        return REAPER_RETRY_US;
    return cached ? FRONT_IDLE_US : 0;
}

static void *reap(void *data)
{
    struct reaper *reaper = data;
    struct arena *arena = reaper->arena;
    prctl(PR_SET_NAME, "vpmm-reaper");
    prctl(PR_SET_TIMERSLACK, 1000); /* nanoseconds: the default would double the tick */
    while (!load_sc_u32(&reaper->stop)) {
        unsigned us = pass_and_plan(reaper);
        if (device_lost(arena->device))
            break; /* nothing passes any more */
        if (us == REAPER_TICK_US)
            clock_sleep_us(us);
        else
            sleep_until_work(reaper, us);
    }
    return NULL;
}

vpmm_status reaper_start(struct arena *arena, struct reaper **out)
{
    struct reaper *reaper = calloc(1, sizeof *reaper);
    sigset_t all, before;
    if (!reaper)
        return fail(VPMM_ERROR_HOST_MEMORY, "no host memory for the reaper");
    reaper->arena = arena;
    sigfillset(&all); /* the program's signals are for its own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&reaper->thread, NULL, reap, reaper);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) {
        free(reaper);
        return fail(VPMM_ERROR_HOST_MEMORY,
                    "pthread_create answered %d for the reaper: the process has too many threads", error);
    }
    *out = reaper;
    return VPMM_SUCCESS;
}

void reaper_stop(struct reaper *reaper)
{
    if (!reaper)
        return;
    store_sc_u32(&reaper->stop, 1);
    wakeup_signal(&reaper->arena->bell.work);
    pthread_join(reaper->thread, NULL);
    free(reaper);
}
