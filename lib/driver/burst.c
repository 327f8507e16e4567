#include "driver/burst.h"

#include "base/assert.h"
#include "base/atomic.h"
#include "base/clock.h"
#include "base/lock.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Alignas(64) _Atomic(uint32_t) builds;

void burst_build_begins(void)
{
    fetch_add_relaxed_u32(&builds, 1);
}

void burst_build_ends(void)
{
    vpmm_assert(peek_u32(&builds) > 0);
    fetch_add_relaxed_u32(&builds, UINT32_MAX);
}

void burst_begin(struct burst *burst)
{
    vpmm_assert(!burst->end_ns);
    lock_take(&lock);
    burst_restart(burst);
}

void burst_restart(struct burst *burst)
{
    vpmm_assert(lock_is_taken(&lock));
    burst->end_ns = clock_now_ns() + BURST_NS;
}

bool burst_is_over(const struct burst *burst)
{
    return burst->end_ns && clock_now_ns() >= burst->end_ns;
}

void burst_end(struct burst *burst)
{
    if (!burst->end_ns)
        return;
    if (burst_is_over(burst) && load_relaxed_u32(&builds))
        clock_sleep_us((long)(BURST_NS / 1000));
    burst->end_ns = 0;
    pthread_mutex_unlock(&lock);
}
