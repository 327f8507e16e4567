#include "driver/burst.h"

#include "base/assert.h"
#include "base/atomic.h"
#include "base/clock.h"
#include "base/lock.h"
#include "base/queue.h"

static _Alignas(64) _Atomic(uint32_t) long_ones; /* threads that call for long; a hint for builds */

static struct {
    pthread_mutex_t lock;
    _Atomic(uint64_t) taken, served; /* written under the lock */
    uint64_t since_ns;               /* under the lock: when `served` grew last, or the first came */
    struct wakeup moved;             /* signalled after it has grown and others wait */
} line = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* ---- forks ---- */

/* Of the parent's threads the child has none. */
static void after_fork_in_child(void)
{
    pthread_mutex_init(&line.lock, NULL);
    store_relaxed_u64(&line.served, load_relaxed_u64(&line.taken));
    wakeup_init(&line.moved);
    store_relaxed_u32(&long_ones, 0);
}

/* Without memory for the handler a child that was forked during a burst has all patiences to wait out, or the lock. */
static void follow_forks(void)
{
    wakeup_init(&line.moved);
    pthread_atfork(NULL, NULL, after_fork_in_child);
}

/* Before all else. */
static void prepare(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, follow_forks);
}

/* ---- the line, under its lock ---- */

static void pass_on(void)
{
    vpmm_assert(load_relaxed_u64(&line.served) < load_relaxed_u64(&line.taken));
    store_relaxed_u64(&line.served, load_relaxed_u64(&line.served) + 1);
    line.since_ns = clock_now_ns();
}

/* True: the burst has come at once. */
static bool ask(struct burst *burst)
{
    burst->number = load_relaxed_u64(&line.taken);
    store_relaxed_u64(&line.taken, burst->number + 1);
    bool come = load_relaxed_u64(&line.served) == burst->number;
    if (come)
        line.since_ns = clock_now_ns();
    return come;
}

/* Also of one that was passed by. */
static bool has_come(const struct burst *burst)
{
    return load_relaxed_u64(&line.served) >= burst->number;
}

/* How long it still waits for whoever has the burst: from when it asked, or the line has moved since. */
static uint64_t patience_left(uint64_t asked_ns)
{
    uint64_t since = asked_ns > line.since_ns ? asked_ns : line.since_ns, waited = clock_now_ns() - since;
    return waited < BURST_PATIENCE_NS ? BURST_PATIENCE_NS - waited : 0;
}

/* True: others wait. False also for one that was passed by: it has ended already. */
static bool leave(const struct burst *burst)
{
    bool has_it = load_relaxed_u64(&line.served) == burst->number;
    if (has_it)
        pass_on();
    return has_it && load_relaxed_u64(&line.served) < load_relaxed_u64(&line.taken);
}

/* ---- one burst ---- */

struct look {
    bool come, passed_by; /* passed_by: another, which had kept it waiting for too long */
    uint64_t left_ns;
};

/* Under the lock. Every waiter may pass the holder by, not the next in line alone, which may itself stand still. */
static struct look look(const struct burst *burst, uint64_t asked_ns)
{
    struct look look = {.come = has_come(burst), .left_ns = patience_left(asked_ns)};
    if (look.come || look.left_ns)
        return look;
    pass_on();
    return (struct look){.come = has_come(burst), .passed_by = true, .left_ns = BURST_PATIENCE_NS};
}

static void wait_for(const struct burst *burst)
{
    uint64_t asked = clock_now_ns();
    struct look found;
    do {
        uint32_t seen = wakeup_read(&line.moved);
        lock_take(&line.lock);
        found = look(burst, asked);
        pthread_mutex_unlock(&line.lock);
        if (found.passed_by)
            wakeup_signal(&line.moved);
        else if (!found.come)
            wakeup_wait(&line.moved, seen, found.left_ns);
    } while (!found.come);
}

static void begin(struct burst *burst)
{
    vpmm_assert(!burst->end_ns);
    lock_take(&line.lock);
    bool come = ask(burst);
    pthread_mutex_unlock(&line.lock);
    if (!come)
        wait_for(burst);
    burst->end_ns = clock_now_ns() + BURST_NS;
}

static void end(struct burst *burst)
{
    burst->end_ns = 0;
    lock_take(&line.lock);
    bool wakes = leave(burst);
    pthread_mutex_unlock(&line.lock);
    if (wakes)
        wakeup_signal(&line.moved);
}

/* Nobody waits, and nobody has passed it by. A hint. */
static bool is_alone(const struct burst *burst)
{
    return load_relaxed_u64(&line.served) == burst->number && load_relaxed_u64(&line.taken) == burst->number + 1;
}

/* ---- of who calls for long ---- */

void burst_begin(struct burst *burst)
{
    prepare();
    if (!burst->is_long)
        fetch_add_relaxed_u32(&long_ones, 1);
    burst->is_long = true;
    begin(burst);
}

void burst_breathe(struct burst *burst)
{
    uint64_t now = clock_now_ns();
    if (now < burst->end_ns)
        return;
    if (is_alone(burst)) {
        burst->end_ns = now + BURST_NS;
        return;
    }
    end(burst);
    begin(burst);
}

bool burst_is_over(const struct burst *burst)
{
    return burst->end_ns && clock_now_ns() >= burst->end_ns;
}

void burst_pause(struct burst *burst)
{
    vpmm_assert(burst->is_long && burst->end_ns);
    end(burst);
}

/* ---- of builds ---- */

uint64_t burst_give_way(struct burst *burst)
{
    if (!burst->end_ns && !load_relaxed_u32(&long_ones))
        return 0;
    uint64_t asked = clock_now_ns();
    prepare();
    if (burst->end_ns)
        burst_breathe(burst);
    else
        begin(burst);
    return clock_now_ns() - asked;
}

/* ---- of both ---- */

void burst_end(struct burst *burst)
{
    if (burst->end_ns)
        end(burst);
    if (burst->is_long)
        fetch_add_relaxed_u32(&long_ones, UINT32_MAX);
    burst->is_long = false;
}
