#define _GNU_SOURCE
#include "pool/reaper.h"

#include "base/clock.h"
#include "cache/front.h"
#include "remap/decay.h"
#include "remap/ending.h"
#include "remap/pass.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>

static bool any_noted(const struct arena *arena)
{
    return fronts_noted(arena->space.fronts) || fronts_noted(arena->cut.fronts);
}

/* Whether anything waits for a pass, besides outstanding marks and what lies in front caches. */
static bool any_left(const struct arena *arena)
{
    return streams_unmarked(&arena->streams) || !pile_empty(&arena->zombies) || slabs_deferred(&arena->slabs) ||
           ending_came(arena);
}

uint64_t reaper_age_ns(const struct arena *arena, bool has_thread)
{
    bool sleeps = has_thread ? load_sc_u32(&arena->bell.asleep) != 0
                             : !streams_pending(&arena->streams, NULL) && !any_left(arena);
    if (arena->is_graph || sleeps)
        return 0;
    uint64_t passed = load_relaxed_u64(&arena->passed_at_ns), now = clock_now_ns();
    return now > passed ? now - passed : 0;
}

struct reaper {
    struct arena *arena;
    pthread_t thread;
    _Atomic(uint32_t) stop;
    uint64_t marks;    /* the thread's: marks when the latest pass began, */
    unsigned pause_us; /* and the pause after it; 0: it sleeps until it is called */
    bool is_fixed;     /* the thread's: the pause is slept out */
};

/* Whether there is more to watch than the latest pass has seen. */
static bool is_called(const struct reaper *reaper)
{
    const struct arena *arena = reaper->arena;
    if (load_sc_u32(&reaper->stop) || decay_changed(&arena->decay))
        return true;
    return reaper->pause_us ? stats_sum(arena->stats, STAT_marks) != reaper->marks
                            : streams_pending(&arena->streams, NULL);
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
    fence_sc(); /* before the piles, which are pushed to with no more than a fence after it (queue.c) */
    bool work = is_called(reaper);
    if (!work && (!us || us > REAPER_RETRY_US))
        work = any_left(arena) || any_noted(arena);
    if (!work)
        wakeup_wait(&arena->bell.work, seen, us * 1000);
    store_relaxed_u64(&arena->passed_at_ns, clock_now_ns()); /* its age begins again with its work */
    store_sc_u32(&arena->bell.asleep, 0);
}

/* Until the time is over, or the thread is to end: `asleep` is not said, so nobody else rings. */
static void sleep_out(struct reaper *reaper, uint64_t us)
{
    uint32_t seen = wakeup_read(&reaper->arena->bell.work);
    if (!load_sc_u32(&reaper->stop))
        wakeup_wait(&reaper->arena->bell.work, seen, us * 1000);
}

/* Where the pool has met one stream alone, nobody waits for what passes there. */
static unsigned next_pause(const struct reaper *reaper, bool news)
{
    if (news || !reaper->pause_us)
        return streams_has_one(&reaper->arena->streams) ? REAPER_ALONE_US : REAPER_TICK_US;
    return reaper->pause_us * 2 < REAPER_LONGEST_US ? reaper->pause_us * 2 : REAPER_LONGEST_US;
}

/* Whether marks came since the last time. */
static bool marks_came(struct reaper *reaper)
{
    uint64_t before = reaper->marks;
    reaper->marks = stats_sum(reaper->arena->stats, STAT_marks);
    return reaper->marks != before;
}

/*
 * After a pass that was refused as a whole, as when the program has reset the device: whatever there is to do is still
 * to be done, and would wake the thread at once. (A lost device ends it: see reap.)
 */
static uint64_t plan_after_refusal(struct reaper *reaper, const struct pass_outlook *after)
{
    struct arena *arena = reaper->arena;
    bool is_left = after->zombies || after->decays_us || any_left(arena) || any_noted(arena) ||
                   streams_pending(&arena->streams, NULL);
    reaper->pause_us = 0;
    reaper->is_fixed = is_left;
    return is_left ? REAPER_RETRY_US : 0;
}

/*
 * A pass of the thread's, and how many microseconds later the next; 0: nothing is pending. After the last news the
 * pauses grow to REAPER_CALL_US before it sleeps until it is called, also if nothing is pending: see the header. What
 * is refused, untouched or due to decay is not worth a pause that is slept out.
 */
static uint64_t pass_and_plan(struct reaper *reaper)
{
    struct arena *arena = reaper->arena;
    bool came = marks_came(reaper);
    struct pass_outlook after;
    if (pass_of_reaper(arena, &after) != VPMM_SUCCESS)
        return plan_after_refusal(reaper, &after);
    bool news = after.any || came, pending = streams_pending(&arena->streams, NULL);
    if (news || pending || reaper->pause_us)
        reaper->pause_us = next_pause(reaper, news);
    bool is_fixed = news || (reaper->pause_us && reaper->pause_us < REAPER_CALL_US);
    if (pending || is_fixed) {
        reaper->is_fixed = is_fixed;
        return reaper->pause_us;
    }
    reaper->is_fixed = false;
    reaper->pause_us = 0;
    if (after.zombies || streams_unmarked(&arena->streams))
        return REAPER_RETRY_US;
    return after.cached && (!after.decays_us || after.decays_us > FRONT_IDLE_US) ? FRONT_IDLE_US : after.decays_us;
}

static void *reap(void *data)
{
    struct reaper *reaper = data;
    struct arena *arena = reaper->arena;
    store_relaxed_u64(&arena->streams.reaper, (uint64_t)pthread_self());
    prctl(PR_SET_NAME, "vpmm-reaper");
    prctl(PR_SET_TIMERSLACK, 1000); /* nanoseconds: the default would double the tick */
    while (!load_sc_u32(&reaper->stop)) {
        uint64_t us = pass_and_plan(reaper);
        if (device_lost(arena->device))
            break; /* nothing passes any more */
        if (reaper->is_fixed)
            sleep_out(reaper, us);
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
