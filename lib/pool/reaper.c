#define _GNU_SOURCE
#include "pool/reaper.h"

#include "remap/build.h"
#include "base/clock.h"
#include "remap/cut.h"
#include "remap/decay.h"
#include "cache/front.h"
#include "base/lock.h"
#include "space/region.h"
#include "remap/zombie.h"

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

/* What a pass does beside what is due for everybody's sake. */
struct spare_time {
    bool decays;
    unsigned ahead_us;
};

/* Under the reaper's turn. True: something was done, and more may follow from it. */
static bool pass(struct arena *arena, struct spare_time time)
{
    fronts_flush_idle(arena->space.fronts);
    fronts_flush_idle(arena->cut.fronts);
    cut_tidy(arena);
    lock_take(&arena->watching);
    bool any = publish_passed(arena);
    pthread_mutex_unlock(&arena->watching);
    any |= zombies_retire(arena);
    if (time.decays && !device_lost(arena->device))
        any |= decay_step(arena, any);
    return work_ahead(arena, time.ahead_us) > 0 || any;
}

static vpmm_status locked_pass(struct arena *arena, struct spare_time time, bool *any)
{
    struct device_scope scope;
    vpmm_status status = device_lost(arena->device) ? device_lost_status() : device_enter(arena->device, &scope);
    if (status != VPMM_SUCCESS)
        return status;
    *any = pass(arena, time);
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
    vpmm_status status = locked_pass(arena, (struct spare_time){true, budget_us}, &any);
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
    vpmm_status status = locked_pass(arena, (struct spare_time){false, 0}, &any);
    pthread_mutex_unlock(&arena->reaping);
    return status;
}

vpmm_status reaper_release(struct arena *arena, uint64_t keep_pages, uint64_t *released_pages)
{
    lock_take(&arena->reaping);
    vpmm_status status = build_release(arena, keep_pages, released_pages);
    pthread_mutex_unlock(&arena->reaping);
    return status;
}

vpmm_status reaper_wait_for_contexts(struct arena *arena)
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

/* Stream by stream; if the driver refuses, or a stream is private, its context is waited for later. */
static void wait_for_streams(struct arena *arena)
{
    for (uint32_t slot = 1; slot < load_acquire_u32(&arena->streams.slots); slot++) {
        struct stream *stream = stream_at(&arena->streams, slot);
        if (exchange_acq_rel_u32(&stream->freed_small, 0)) /* the driver's pool lets go of what it has seen complete */
            stream_new_point(&arena->streams, stream);
        struct fence last = {slot, load_sc_u64(&stream->published)};
        if (fence_waitable(&arena->streams, last))
            stream_wait_host(&arena->streams, last);
    }
}

/*
 * Two rounds: while every place for a mark is taken the rest is waited for by an event of its own, which tells this
 * thread alone; the marks that have passed then make room for one that covers it.
 */
vpmm_status reaper_settle(struct arena *arena)
{
    enum { ROUNDS = 2 };
    vpmm_status status = VPMM_SUCCESS;
    fronts_flush(arena->space.fronts, NULL, true);
    fronts_flush(arena->cut.fronts, NULL, true);
    for (int i = 0; i < ROUNDS && status == VPMM_SUCCESS && (i == 0 || !all_passed(arena)); i++) {
        wait_for_streams(arena);
        status = reaper_pass_now(arena);
    }
    if (status == VPMM_SUCCESS && !all_passed(arena))
        status = reaper_wait_for_contexts(arena);
    if (status == VPMM_SUCCESS)
        status = reaper_pass_now(arena);
    return status;
}

/* ---- the thread ---- */

struct reaper {
    struct arena *arena;
    pthread_t thread;
    _Atomic(uint32_t) stop;
    uint64_t built, quiet_since; /* the thread's: requests that had to build, and when that number last moved, */
    uint64_t marks;              /* marks when the latest pass began, */
    unsigned pause_us;           /* and the pause after it, if marks are outstanding; 0: none are */
};

/* Whether there is more to watch than the latest pass has seen. */
static bool is_called(const struct reaper *reaper)
{
    const struct arena *arena = reaper->arena;
    if (load_sc_u32(&reaper->stop) || decay_changed(&arena->decay))
        return true;
    return reaper->pause_us ? stats_sum(arena->stats, STAT_marks) != reaper->marks : streams_pending(&arena->streams);
}

/*
 * Until there is work, or for so many microseconds; 0: for ever. One more look after saying that it sleeps: see
 * bell_ring. What it would sleep over for a short time only is looked for if it is to sleep for long.
 */
static void sleep_until_work(struct reaper *reaper, uint64_t us)
{
    struct arena *arena = reaper->arena;
    uint32_t seen = wakeup_read(&arena->bell.work);
    store_sc_u32(&arena->bell.asleep, 1);
    bool work = is_called(reaper);
    if (!work && (!us || us > REAPER_RETRY_US))
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

/* While marks are outstanding. */
static unsigned next_pause(const struct reaper *reaper, bool news)
{
    if (news || !reaper->pause_us)
        return REAPER_TICK_US;
    return reaper->pause_us * 2 < REAPER_LONGEST_US ? reaper->pause_us * 2 : REAPER_LONGEST_US;
}

/* Whether marks came since the last time. */
static bool marks_came(struct reaper *reaper)
{
    uint64_t before = reaper->marks;
    reaper->marks = stats_sum(reaper->arena->stats, STAT_marks);
    return reaper->marks != before;
}

/* A pass of the thread's, and how many microseconds later the next; 0: nothing is pending. */
static uint64_t pass_and_plan(struct reaper *reaper)
{
    enum { BUDGET_US = 200 }; /* of work ahead in a pass: what a request may have to wait for behind it */
    struct arena *arena = reaper->arena;
    bool any = false, quiet = is_quiet(reaper), came = marks_came(reaper);
    lock_take(&arena->reaping);
    locked_pass(arena, (struct spare_time){true, quiet ? BUDGET_US : 0}, &any);
    uint64_t decays_us = decay_wait_us(arena);
    bool refused = arena->waiting != NULL, cached = arena->space.fronts->noted || arena->cut.fronts->noted;
    pthread_mutex_unlock(&arena->reaping);
    bool pending = streams_pending(&arena->streams);
    reaper->pause_us = pending ? next_pause(reaper, any || came) : 0;
    if (any || pending)
        return any ? REAPER_TICK_US : reaper->pause_us;
    if (!quiet)
        return REAPER_QUIET_US;
    if (refused || streams_unmarked(&arena->streams))
        return REAPER_RETRY_US;
    return cached && (!decays_us || decays_us > FRONT_IDLE_US) ? FRONT_IDLE_US : decays_us;
}

static void *reap(void *data)
{
    struct reaper *reaper = data;
    struct arena *arena = reaper->arena;
    prctl(PR_SET_NAME, "vpmm-reaper");
    prctl(PR_SET_TIMERSLACK, 1000); /* nanoseconds: the default would double the tick */
    while (!load_sc_u32(&reaper->stop)) {
        uint64_t us = pass_and_plan(reaper);
        if (device_lost(arena->device))
            break; /* nothing passes any more */
        if (us && us < REAPER_CALL_US)
            clock_sleep_us((long)us);
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
