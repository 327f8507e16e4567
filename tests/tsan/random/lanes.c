/*
 * lanes.c - streams that threads share, and what a program has to do before it ends one.
 */
#define _GNU_SOURCE
#include "random.h"

#include <sched.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* Neighbouring seeds have nothing in common: two rounds of splitmix64. */
uint64_t random_from(uint64_t seed)
{
    for (int i = 0; i < 2; i++) {
        seed = (seed ^ seed >> 30) * UINT64_C(0xbf58476d1ce4e5b9) + UINT64_C(0x9e3779b97f4a7c15);
        seed = (seed ^ seed >> 27) * UINT64_C(0x94d049bb133111eb);
    }
    return seed | 1;
}

uint64_t draw(struct worker *worker, uint64_t below)
{
    worker->random ^= worker->random << 13;
    worker->random ^= worker->random >> 7;
    worker->random ^= worker->random << 17;
    return (worker->random >> 11) % below;
}

void linger(struct worker *worker, unsigned most_us)
{
    uint64_t how = draw(worker, 3);
    if (how == 1)
        sched_yield();
    if (how == 2)
        usleep((useconds_t)draw(worker, most_us + 1));
}

int relaxed_end(int result)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    current.driver->cuThreadExchangeStreamCaptureMode(&mode);
    return result;
}

/* ---- holds ---- */

struct hold {
    atomic_uint *open; /* NULL: only the time counts */
    unsigned us;
};

static void CUDA_CB hold_back(void *argument)
{
    enum { STEP_US = 50 };
    struct hold *hold = argument;
    for (unsigned us = 0; us < hold->us && (!hold->open || !atomic_load(hold->open)); us += STEP_US)
        usleep(STEP_US);
    free(hold);
}

static void launch_hold(CUstream stream, struct hold hold)
{
    struct hold *copy = malloc(sizeof *copy);
    if (!copy)
        return;
    *copy = hold;
    count(COUNT_holds);
    cuda_must(current.driver->cuLaunchHostFunc(stream, hold_back, copy));
}

void stream_hold(CUstream stream, unsigned us)
{
    launch_hold(stream, (struct hold){NULL, us < HOLD_LIMIT_US ? us : HOLD_LIMIT_US});
}

void stream_hold_until(CUstream stream, atomic_uint *open)
{
    launch_hold(stream, (struct hold){open, HOLD_LIMIT_US});
}

/* ---- streams ---- */

CUstream stream_new(struct worker *worker, unsigned *flags)
{
    CUstream stream = NULL;
    *flags = one_in(worker, 2) ? CU_STREAM_NON_BLOCKING : CU_STREAM_DEFAULT;
    cuda_must(current.driver->cuStreamCreate(&stream, *flags));
    return stream;
}

static void release(struct worker *worker, CUstream stream)
{
    jitter_aim(worker, one_in(worker, 2) ? 6 : 40); /* what a release takes, without and with fences to record */
    vpmm_status status = vpmm_stream_release(current.pool, stream);
    if (status != VPMM_SUCCESS)
        failed("vpmm_stream_release answered %s: %s", vpmm_status_name(status), vpmm_last_error());
    count(COUNT_releases);
    linger(worker, 20);
}

/* Where other threads may record events on it, the pool is to forget the stream before the capture. */
void stream_leave_alone(struct worker *worker, CUstream stream)
{
    if (!current.config.captures && current.config.streams != VPMM_STREAMS_EAGER)
        release(worker, stream);
}

void stream_end(struct worker *worker, CUstream stream)
{
    if (current.config.streams != VPMM_STREAMS_EAGER || one_in(worker, 16))
        release(worker, stream);
    cuda_must(current.driver->cuStreamDestroy(stream));
}

/* ---- lanes ---- */

struct lane *lane_share(struct lane *lane)
{
    return pthread_rwlock_tryrdlock(&lane->lock) == 0 ? lane : NULL;
}

struct lane *lane_share_any(struct worker *worker)
{
    enum { TRIES = 4 };
    struct lane *lane = NULL;
    for (int i = 0; i < TRIES && !lane; i++)
        lane = lane_share(&current.lane[draw(worker, LANES)]);
    return lane;
}

struct lane *lane_own(struct lane *lane)
{
    return pthread_rwlock_trywrlock(&lane->lock) == 0 ? lane : NULL;
}

/* At once when they have left it, if that is soon. */
struct lane *lane_await(struct lane *lane)
{
    enum { TRIES = 1000 };
    for (int i = 0; i < TRIES; i++)
        if (lane_own(lane))
            return lane;
    return pthread_rwlock_wrlock(&lane->lock) == 0 ? lane : NULL;
}

void lane_leave(struct lane *lane)
{
    pthread_rwlock_unlock(&lane->lock);
}

/* Blocks made on the stream outlive it: what they did there is before this point. */
static void note_end(struct lane *lane)
{
    CUevent *end = &lane->end[lane->generation];
    cuda_must(current.driver->cuEventCreate(end, CU_EVENT_DISABLE_TIMING));
    cuda_must(current.driver->cuEventRecord(*end, lane->stream));
    lane->generation++;
}

void lane_renew(struct worker *worker, struct lane *lane)
{
    if (lane == &current.lane[LEGACY] || lane->generation == LANE_LIVES - 1)
        return;
    note_end(lane);
    atomic_fetch_add(&lane->endings, 1);
    stream_end(worker, lane->stream);
    count(COUNT_ends);
    atomic_store(&lane->fills, 0);
    CUstream before = lane->stream;
    lane->stream = stream_new(worker, &lane->flags);
    if (lane->stream == before)
        count(COUNT_handles_back);
}

/* Who waits to end a stream comes before who would call with it: threads only ever try to. */
bool lanes_open(void)
{
    struct worker chooser = {.random = random_from(current.seed)};
    pthread_rwlockattr_t fair;
    pthread_rwlockattr_init(&fair);
    pthread_rwlockattr_setkind_np(&fair, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    memset(current.lane, 0, sizeof current.lane);
    for (int i = 0; i < LANES; i++) {
        pthread_rwlock_init(&current.lane[i].lock, &fair);
        if (i != LEGACY)
            current.lane[i].stream = stream_new(&chooser, &current.lane[i].flags);
    }
    pthread_rwlockattr_destroy(&fair);
    return failures() == 0;
}

static void close_lane(struct worker *worker, struct lane *lane)
{
    cuda_must(current.driver->cuStreamSynchronize(lane->stream));
    if (lane->stream)
        stream_end(worker, lane->stream);
    else
        release(worker, lane->stream);
    for (uint32_t i = 0; i < lane->generation; i++)
        cuda_must(current.driver->cuEventDestroy(lane->end[i]));
    pthread_rwlock_destroy(&lane->lock);
}

void lanes_close(struct worker *worker)
{
    for (int i = 0; i < LANES; i++)
        close_lane(worker, &current.lane[i]);
}
