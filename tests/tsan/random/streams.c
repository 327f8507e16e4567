/*
 * streams.c - streams that are used for a moment and destroyed, released beside calls, or kept busy.
 */
#include "random.h"

#include <sched.h>
#include <time.h>
#include <unistd.h>

void operation_hold(struct worker *worker)
{
    struct lane *lane = lane_share_any(worker);
    if (!lane)
        return;
    stream_hold(lane->stream, (unsigned)draw(worker, 3000));
    lane_leave(lane);
}

/* Blocks of a stream that nobody else knows: pieces mostly, so that many fit under a tight cap. */
static size_t take_some(struct worker *worker, CUstream stream, CUdeviceptr *out, size_t wanted)
{
    size_t n = 0;
    while (n < wanted && take(one_in(worker, 8) ? PAGE : 256 + draw(worker, 100000), stream, &out[n]))
        n++;
    return n;
}

/* Each takes the place of the one before, and each free has a fence. */
static void use_one_by_one(CUstream stream, size_t wanted)
{
    CUdeviceptr p;
    while (wanted-- > 0 && take(PAGE, stream, &p))
        give(p, stream);
}

/* What is freed last is freed right before the stream's end. */
static void use_for_a_moment(struct worker *worker, CUstream stream, size_t wanted)
{
    if (one_in(worker, 3)) {
        use_one_by_one(stream, wanted);
        return;
    }
    enum { MOST = 160 };
    CUdeviceptr p[MOST];
    size_t n = take_some(worker, stream, p, wanted < MOST ? wanted : MOST);
    if (n && one_in(worker, 2))
        needs(relaxed(payload_write(current.driver, p[n - 1], 1, ++worker->stamps, stream)));
    for (size_t i = 0; i < n; i++)
        give(p[i], stream);
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

static void spin_ns(uint64_t ns)
{
    for (uint64_t end = now_ns() + ns; now_ns() < end;)
        ;
}

static size_t take_equal(CUstream stream, size_t bytes, size_t wanted, CUdeviceptr *out)
{
    size_t n = 0;
    while (n < wanted && take(bytes, stream, &out[n]))
        n++;
    return n;
}

/* The thread's cache is full of the lane's memory when the lane is left. */
static void fill_cache(struct worker *worker, struct lane *lane, size_t bytes)
{
    enum { LEAST = 16, MOST = 60 };
    CUdeviceptr p[MOST];
    size_t n = take_equal(lane->stream, bytes, LEAST + draw(worker, MOST - LEAST), p);
    while (n > 0)
        give(p[--n], lane->stream);
    atomic_fetch_add(&lane->fills, 1);
}

/* Until another thread begins to end the lane's stream, and up to some microseconds more. Not for ever. */
static void await_ending(struct worker *worker, struct lane *lane, unsigned endings)
{
    enum { TRIES = 100, WITHIN_NS = 8000 };
    for (int i = 0; i < TRIES && atomic_load(&lane->endings) == endings; i++)
        sched_yield();
    spin_ns(draw(worker, WITHIN_NS));
}

/* The full cache is looked at for stale slots, and halved; then the pool is left alone for a while. */
static void overfill(struct worker *worker, CUstream stream, CUdeviceptr *p, size_t n)
{
    enum { WITHIN_US = 5, PAUSE_US = 200 };
    while (n > 0) {
        if (one_in(worker, 2))
            jitter_aim(worker, WITHIN_US);
        give(p[--n], stream);
        usleep((useconds_t)draw(worker, PAUSE_US));
    }
}

static bool share_soon(struct lane *lane)
{
    enum { TRIES = 300 };
    for (int i = 0; i < TRIES; i++) {
        if (lane_share(lane))
            return true;
        sched_yield();
    }
    return false;
}

/*
 * The first lane's cache is made before the second's, and so comes after those of all other lanes when the thread's
 * caches are halved: the longest way from the look for caches that were closed to this one.
 */
static void fill_and_overfill(struct worker *worker, struct lane *first, struct lane *second)
{
    enum { MOST = 2 };
    static const size_t sizes[] = {PAGE, PAGE / 2, PAGE / 4, PAGE / 8};
    size_t bytes = sizes[draw(worker, sizeof(sizes) / sizeof(sizes[0]))], n = 0;
    CUdeviceptr p[MOST];
    if (!share_soon(first))
        return;
    unsigned endings = atomic_load(&first->endings);
    fill_cache(worker, first, bytes);
    bool shared = lane_share(second) != NULL;
    if (shared)
        n = take_equal(second->stream, bytes, 1 + draw(worker, MOST), p);
    lane_leave(first);
    if (one_in(worker, 2))
        await_ending(worker, first, endings);
    if (!shared)
        return;
    overfill(worker, second->stream, p, n);
    lane_leave(second);
}

/*
 * One that waits to release the lane has it at the moment in which the others go on with another one, and their caches,
 * full of its memory, are halved.
 */
void operation_overflow(struct worker *worker)
{
    struct lane *victim = &current.lane[LANES - 1];
    if (atomic_load(&victim->fills) < THREADS / 2 || one_in(worker, 8)) {
        fill_and_overfill(worker, victim, &current.lane[draw(worker, LANES - 1)]);
    } else if (lane_await(victim)) {
        if (atomic_load(&victim->fills) > 0) /* no other thread that waited was first */
            lane_renew(worker, victim);
        lane_leave(victim);
    }
    count(COUNT_overflows);
}

/*
 * The handle comes back at once, for the next stream of any thread. A long queue is more than the fences that a record
 * of the pool can have outstanding.
 */
void operation_flash(struct worker *worker)
{
    enum { LONG = 66 };
    unsigned flags;
    CUstream stream = stream_new(worker, &flags), next;
    bool is_long = one_in(worker, 3);
    if (is_long || one_in(worker, 2))
        stream_hold(stream, (unsigned)draw(worker, 4000));
    use_for_a_moment(worker, stream, is_long ? LONG + draw(worker, 80) : 1 + draw(worker, 4));
    stream_end(worker, stream);
    next = stream_new(worker, &flags);
    if (next == stream)
        count(COUNT_handles_back);
    use_for_a_moment(worker, next, draw(worker, 3));
    stream_end(worker, next);
    count(COUNT_flashes);
    if (is_long)
        count(COUNT_long_queues);
}

void operation_renew(struct worker *worker)
{
    struct lane *lane = &current.lane[draw(worker, LANES)];
    if (!lane_await(lane))
        return;
    lane_renew(worker, lane);
    lane_leave(lane);
}

/* Beside other threads' calls with the stream, and other threads' releases of it. */
static void release_beside_calls(struct worker *worker, struct lane *lane)
{
    enum { WITHIN_US = 30 };
    CUdeviceptr p;
    if (one_in(worker, 2) && take(PAGE, lane->stream, &p))
        give(p, lane->stream);
    if (one_in(worker, 2))
        jitter_aim(worker, WITHIN_US);
    vpmm_status status = vpmm_stream_release(current.pool, lane->stream);
    if (status != VPMM_SUCCESS)
        failed("vpmm_stream_release beside calls answered %s: %s", vpmm_status_name(status), vpmm_last_error());
    count(COUNT_releases_beside_calls);
}

/* Then, when nobody calls with it any more, once again, and it ends. */
void operation_release(struct worker *worker)
{
    struct lane *lane = &current.lane[draw(worker, LANES)];
    if (!lane_share(lane))
        return;
    release_beside_calls(worker, lane);
    lane_leave(lane);
    if (one_in(worker, 2) || !lane_await(lane))
        return;
    lane_renew(worker, lane);
    lane_leave(lane);
}
