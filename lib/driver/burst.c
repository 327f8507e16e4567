#include "driver/burst.h"

#include "base/assert.h"
#include "base/atomic.h"
#include "base/clock.h"
#include "base/lock.h"

static _Alignas(64) _Atomic(uint32_t) builds;

/* First come, first served: a mutex goes to whoever asks again first, as the driver's does. */
static struct {
    pthread_mutex_t lock; /* of the rest */
    pthread_cond_t next_one;
    uint64_t taken, served; /* tickets; equal: no burst is under way */
} queue = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0};

/* ---- builds ---- */

void burst_build_begins(void)
{
    fetch_add_relaxed_u32(&builds, 1);
}

void burst_build_ends(void)
{
    vpmm_assert(peek_u32(&builds) > 0);
    fetch_add_relaxed_u32(&builds, UINT32_MAX);
}

/* ---- forks ---- */

/* Of the parent's threads the child has none. */
static void after_fork_in_child(void)
{
    pthread_mutex_init(&queue.lock, NULL);
    pthread_cond_init(&queue.next_one, NULL);
    queue.served = queue.taken;
    store_relaxed_u32(&builds, 0);
}

/* Without memory for the handler a child of a fork during a burst waits for ever in its first one. */
static void follow_forks(void)
{
    pthread_atfork(NULL, NULL, after_fork_in_child);
}

/* ---- bursts ---- */

void burst_begin(struct burst *burst)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    vpmm_assert(!burst->end_ns);
    pthread_once(&once, follow_forks);
    lock_take(&queue.lock);
    for (uint64_t ticket = queue.taken++; queue.served != ticket;)
        pthread_cond_wait(&queue.next_one, &queue.lock);
    pthread_mutex_unlock(&queue.lock);
    burst_restart(burst);
}

void burst_restart(struct burst *burst)
{
    burst->begun_ns = clock_now_ns();
    burst->end_ns = burst->begun_ns + BURST_NS;
}

bool burst_is_over(const struct burst *burst)
{
    return burst->end_ns && clock_now_ns() >= burst->end_ns;
}

/* One call may have taken much longer than a burst should. */
static void pause_for_builds(const struct burst *burst)
{
    uint64_t took = clock_now_ns() - burst->begun_ns;
    if (took >= BURST_NS && load_relaxed_u32(&builds))
        clock_sleep_us((long)(took / 1000));
}

void burst_end(struct burst *burst)
{
    if (!burst->end_ns)
        return;
    pause_for_builds(burst);
    burst->end_ns = 0;
    lock_take(&queue.lock);
    vpmm_assert(queue.served < queue.taken);
    queue.served++;
    pthread_cond_broadcast(&queue.next_one);
    pthread_mutex_unlock(&queue.lock);
}
