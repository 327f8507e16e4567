#define _GNU_SOURCE 1

#include "virtual.h"

#include <semaphore.h>
#include <stdlib.h>
#include <time.h>

#include "base/schedule.h"

enum {
    ACTORS_MAX = 512,
    LOOSE_NS = 3000, /* how far ahead of others a thread may be where that makes no difference */
    MOMENT_NS = 500, /* from one look to the next of a thread that waits for another one's next step */
};

enum state { READY, WAITS_FOR_LOCK, SLEEPS };

/* A thread. Only who has the baton reads or writes any of them, but for `turn`. */
struct actor {
    uint64_t ns;    /* READY: its clock. SLEEPS: until then, UINT64_MAX: until it is woken */
    uint64_t since; /* SLEEPS: since then */
    enum state state;
    bool gone;
    const void *wakes;     /* what it sleeps for; NULL: nothing wakes it */
    pthread_mutex_t *lock; /* that it waits for */
    sem_t turn;
    void *(*run)(void *);
    void *data;
};

static struct actor actors[ACTORS_MAX];
static unsigned count, waiting_for_locks;
static bool on;
static uint64_t lowest_other;     /* no other thread that is ready or sleeps goes on before this */
static sem_t may_arrive, arrived; /* a thread of the library's own; where nobody else goes on */
static _Thread_local struct actor *self;

static uint64_t host_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static bool is_free(pthread_mutex_t *lock)
{
    if (pthread_mutex_trylock(lock))
        return false;
    pthread_mutex_unlock(lock);
    return true;
}

/* When it can go on, if it is now `now`; UINT64_MAX: not before others have. */
static uint64_t ready_at(const struct actor *actor, uint64_t now)
{
    if (actor->gone)
        return UINT64_MAX;
    if (actor->state != WAITS_FOR_LOCK)
        return actor->ns;
    if (!is_free(actor->lock))
        return UINT64_MAX;
    return actor->ns > now ? actor->ns : now;
}

static struct actor *first_but(const struct actor *but, uint64_t now, uint64_t *at)
{
    struct actor *first = NULL;
    *at = UINT64_MAX;
    for (unsigned i = 0; i < count; i++) {
        uint64_t ready = &actors[i] == but ? UINT64_MAX : ready_at(&actors[i], now);
        if (ready < *at) {
            first = &actors[i];
            *at = ready;
        }
    }
    return first;
}

static void await(sem_t *semaphore)
{
    while (sem_wait(semaphore))
        ;
}

/* The baton goes to another thread, which goes on at that time. The caller comes back when it has it again. */
static void hand_over(struct actor *to, uint64_t at)
{
    waiting_for_locks -= to->state == WAITS_FOR_LOCK;
    to->state = READY;
    to->ns = at;
    first_but(to, at, &lowest_other);
    sem_post(&to->turn);
    await(&self->turn);
}

static void go_on_or_hand_over(uint64_t ahead)
{
    uint64_t at;
    if (!on || (self->ns <= lowest_other + ahead && !waiting_for_locks))
        return;
    struct actor *first = first_but(self, self->ns, &at);
    lowest_other = at;
    if (first && at + ahead < self->ns)
        hand_over(first, at);
}

/* The caller cannot go on of its own: its state says for what it waits. */
static void block(uint64_t now)
{
    uint64_t at, own = ready_at(self, now);
    struct actor *first = first_but(self, now, &at);
    if (first && at <= own) {
        hand_over(first, at);
        return;
    }
    if (own == UINT64_MAX) {
        fprintf(stderr, "vpmm-virtual: every thread waits for another one\n");
        abort();
    }
    waiting_for_locks -= self->state == WAITS_FOR_LOCK;
    self->state = READY;
    self->ns = own;
    lowest_other = at;
}

static struct actor *add_actor(uint64_t ns)
{
    if (count == ACTORS_MAX) {
        fprintf(stderr, "vpmm-virtual: more than %d threads\n", ACTORS_MAX);
        abort();
    }
    struct actor *actor = &actors[count];
    *actor = (struct actor){.ns = ns};
    sem_init(&actor->turn, 0, 0);
    count++;
    if (ns < lowest_other)
        lowest_other = ns;
    return actor;
}

/* A thread of the library's own. */
static void arrive(void)
{
    await(&may_arrive);
    self = add_actor(actors[0].ns);
    sem_post(&arrived);
    await(&self->turn);
}

/* The caller, under virtual time. */
static struct actor *own(void)
{
    if (!self)
        arrive();
    return self;
}

void virtual_begin(void)
{
    sem_init(&may_arrive, 0, 0);
    sem_init(&arrived, 0, 0);
    count = waiting_for_locks = 0;
    lowest_other = UINT64_MAX;
    self = add_actor(0);
    lowest_other = UINT64_MAX;
    on = true;
}

void virtual_await_thread(void)
{
    sem_post(&may_arrive);
    await(&arrived);
}

static void *run_actor(void *data)
{
    self = data;
    await(&self->turn);
    return self->run(self->data);
}

bool virtual_start(pthread_t *thread, void *(*run)(void *), void *data, uint64_t at_ns)
{
    struct actor *actor = add_actor(at_ns);
    actor->run = run;
    actor->data = data;
    if (pthread_create(thread, NULL, run_actor, actor) == 0)
        return true;
    actor->gone = true;
    return false;
}

void virtual_end(void)
{
    on = false;
    for (unsigned i = 0; i < count; i++)
        if (&actors[i] != self)
            sem_post(&actors[i].turn);
}

bool virtual_is_on(void)
{
    return on;
}

uint64_t virtual_now_ns(void)
{
    return own()->ns;
}

void virtual_spend(uint64_t ns)
{
    own()->ns += ns;
    go_on_or_hand_over(0);
}

void virtual_spend_loosely(uint64_t ns)
{
    self->ns += ns;
    go_on_or_hand_over(LOOSE_NS);
}

void virtual_sleep_until(uint64_t ns)
{
    if (ns > self->ns)
        virtual_spend(ns - self->ns);
}

void virtual_wait_at(const void *gate)
{
    vpmm_schedule_sleep(gate, 0);
}

void virtual_open(const void *gate)
{
    vpmm_schedule_wake(gate);
}

/* ---- what the library calls ---- */

void vpmm_schedule_point(const volatile void *at, bool changes)
{
    (void)at, (void)changes;
}

uint64_t vpmm_schedule_clock(void)
{
    return on ? own()->ns : host_ns();
}

void vpmm_schedule_wait(void *lock)
{
    if (!on) {
        sched_yield();
        return;
    }
    if (!lock) {
        virtual_spend(MOMENT_NS);
        return;
    }
    own()->state = WAITS_FOR_LOCK;
    self->lock = lock;
    waiting_for_locks++;
    block(self->ns);
}

static void sleep_on_the_host(uint64_t ns)
{
    enum { LONGEST_NS = 100000 }; /* nobody is woken any more, so that who sleeps looks again */
    const struct timespec time = {.tv_nsec = ns && ns < LONGEST_NS ? (long)ns : LONGEST_NS};
    clock_nanosleep(CLOCK_MONOTONIC, 0, &time, NULL);
}

void vpmm_schedule_sleep(const void *object, uint64_t ns)
{
    if (!on) {
        sleep_on_the_host(ns);
        return;
    }
    uint64_t now = own()->ns;
    self->state = SLEEPS;
    self->since = now;
    self->wakes = object;
    self->ns = ns ? now + ns : UINT64_MAX;
    block(now);
}

void vpmm_schedule_wake(const void *object)
{
    if (!on || !self)
        return;
    for (unsigned i = 0; i < count; i++) {
        struct actor *actor = &actors[i];
        if (actor->state != SLEEPS || actor->wakes != object || actor->gone || actor->ns <= self->ns)
            continue;
        actor->ns = self->ns > actor->since ? self->ns : actor->since;
        if (actor->ns < lowest_other)
            lowest_other = actor->ns;
    }
}
