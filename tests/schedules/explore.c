#define _GNU_SOURCE
#include "explore.h"

#include "base/schedule.h"

#include <criterion/criterion.h>
#include <math.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { NOBODY = -1, STEPS_MAX = 500000, STALLS_MAX = 2000, RANDOM_SHARE = 4 };

/* ---- the allocator ---- */

enum { ARENA_BYTES = 24 << 20, ARENAS = EXPLORE_ACTORS + 1, HEADER = 64 };

static struct arena {
    char *base;
    size_t used;
} arenas[ARENAS];

static struct {
    bool on;
    long live; /* allocations of this schedule not yet freed */
    char *table;
    size_t tables; /* bytes of address space given to mmap */
} memory;

static _Thread_local int self = NOBODY;

void *__real_malloc(size_t);
void *__real_calloc(size_t, size_t);
void *__real_realloc(void *, size_t);
void *__real_aligned_alloc(size_t, size_t);
void __real_free(void *);
void *__real_mmap(void *, size_t, int, int, int, off_t);
void *__wrap_malloc(size_t);
void *__wrap_calloc(size_t, size_t);
void *__wrap_realloc(void *, size_t);
void *__wrap_aligned_alloc(size_t, size_t);
void __wrap_free(void *);
void *__wrap_mmap(void *, size_t, int, int, int, off_t);

static bool is_ours(const void *p)
{
    const char *at = p;
    return arenas[0].base && at >= arenas[0].base && at < arenas[0].base + (size_t)ARENA_BYTES * ARENAS;
}

/* From the front; the size stands before it. */
static void *take_memory(size_t alignment, size_t size)
{
    struct arena *arena = &arenas[self + 1];
    size_t at = (arena->used + HEADER + alignment - 1) & ~(alignment - 1);
    if (at + size > ARENA_BYTES)
        return NULL;
    arena->used = at + size;
    memory.live++;
    memcpy(arena->base + at - sizeof size, &size, sizeof size);
    return arena->base + at;
}

static size_t size_of(const void *p)
{
    size_t size;
    memcpy(&size, (const char *)p - sizeof size, sizeof size);
    return size;
}

void *__wrap_malloc(size_t size)
{
    return memory.on ? take_memory(HEADER, size) : __real_malloc(size);
}

void *__wrap_aligned_alloc(size_t alignment, size_t size)
{
    return memory.on ? take_memory(alignment > HEADER ? alignment : HEADER, size)
                     : __real_aligned_alloc(alignment, size);
}

void *__wrap_calloc(size_t n, size_t size)
{
    if (!memory.on)
        return __real_calloc(n, size);
    void *p = take_memory(HEADER, n * size);
    return p ? memset(p, 0, n * size) : NULL;
}

void __wrap_free(void *p)
{
    enum { FREED = 0xdd };
    if (!is_ours(p)) {
        __real_free(p);
        return;
    }
    memory.live--;
    memset(p, FREED, size_of(p));
}

void *__wrap_realloc(void *p, size_t size)
{
    if (p ? !is_ours(p) : !memory.on)
        return __real_realloc(p, size);
    void *moved = take_memory(HEADER, size);
    if (moved && p) {
        memcpy(moved, p, size_of(p) < size ? size_of(p) : size);
        __wrap_free(p);
    }
    return moved;
}

/* The library's own tables, one behind the other; everything else as it comes. */
void *__wrap_mmap(void *at, size_t size, int protection, int flags, int file, off_t offset)
{
    if (memory.on && !at && file == -1) {
        at = memory.table + memory.tables;
        memory.tables += (size + 4095) & ~(size_t)4095;
        flags |= MAP_FIXED_NOREPLACE;
    }
    return __real_mmap(at, size, protection, flags, file, offset);
}

static void memory_begin(void)
{
    memory.table = (char *)0x200000000000; /* an address that no one else is likely to have */
    memory.tables = 0;
    memory.live = 0;
    for (int i = 0; i < ARENAS; i++) {
        if (!arenas[i].base)
            arenas[i].base = i ? arenas[i - 1].base + ARENA_BYTES
                               : __real_mmap(NULL, (size_t)ARENA_BYTES * ARENAS, PROT_READ | PROT_WRITE,
                                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        arenas[i].used = 0;
    }
    memory.on = true;
}

/* ---- which addresses are shared ---- */

enum { PLACES = 1 << 16 };

static struct place {
    uint64_t at; /* 0: none */
    uint32_t run;
    uint8_t readers, writers; /* actors, in this run */
    bool shared, learned;     /* decided at; to be, from the next search on */
} places[PLACES];

static struct place *place_of(uint64_t at)
{
    uint64_t i = at * UINT64_C(0x9E3779B97F4A7C15) >> 48;
    while (places[i].at && places[i].at != at)
        i = (i + 1) % PLACES;
    places[i].at = at;
    return &places[i];
}

/* ---- a run ---- */

struct decision {
    uint64_t step;
    int8_t usual, chosen; /* actors */
    uint8_t able, tried;  /* actors */
    uint8_t preemptions;  /* before it */
    bool is_free;         /* another choice than the usual one is none */
};

enum mode { DEPTH_FIRST, RANDOM, REPLAY };

static struct run {
    enum mode mode;
    uint32_t number;
    uint64_t step, clock, random, stalls;
    uint64_t seldom;                     /* one decision in so many is against who could go on */
    unsigned bound, preemptions, length; /* of the decisions, */
    unsigned fixed;                      /* so many of which are given */
    struct decision decision[STEPS_MAX]; /* beyond that nothing is decided */
    uint64_t looked_at, of, phase;       /* of the places where an actor may be preempted; and with which it begins */
    bool racing, closing, failed, learned, found;
    char words[1024];
    const char *replayed;
    int actors;
    const struct exploration *what;
} run;

struct actor {
    pthread_t thread;
    sem_t go;
    bool done, waits;
    pthread_mutex_t *lock; /* that it waits for; NULL: for any change */
    uint64_t seen;         /* changes, when it began to */
};

static struct actor actors[EXPLORE_ACTORS];
static sem_t over; /* the test's thread goes on */
static uint64_t changes;
static void (*task[EXPLORE_ACTORS])(void *);
static pthread_key_t end_key;

int explore_actor(void)
{
    return self;
}

void explore_later(uint64_t us)
{
    run.clock += us * 1000;
}

uint64_t explore_step(void)
{
    return run.step;
}

uint64_t vpmm_schedule_clock(void)
{
    return run.clock;
}

void explore_fail(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    if (!run.failed)
        vsnprintf(run.words, sizeof run.words, format, arguments);
    va_end(arguments);
    run.failed = true;
}

/* Its lock is free, or something has changed. Only who has the baton asks, so nobody takes it meanwhile. */
static bool is_able(const struct actor *actor)
{
    if (actor->done)
        return false;
    if (!actor->waits)
        return true;
    if (!actor->lock)
        return changes != actor->seen;
    if (pthread_mutex_trylock(actor->lock))
        return false;
    pthread_mutex_unlock(actor->lock);
    return true;
}

static uint8_t able_actors(void)
{
    uint8_t able = 0;
    for (int i = 0; i < run.actors; i++)
        able |= (uint8_t)(is_able(&actors[i]) << i);
    return able;
}

static int next_after(int from, uint8_t able)
{
    for (int i = 1; i <= run.actors; i++)
        if (able >> ((from + i) % run.actors) & 1)
            return (from + i) % run.actors;
    return NOBODY;
}

static uint64_t draw(uint64_t below)
{
    run.random ^= run.random << 13;
    run.random ^= run.random >> 7;
    run.random ^= run.random << 17;
    return (run.random >> 11) % below;
}

/* "12:1 40:0": the actor at this step; NOBODY: nothing is said. */
static int replayed_at(uint64_t step)
{
    for (const char *p = run.replayed; p && *p;) {
        char *end;
        uint64_t at = strtoull(p, &end, 10);
        int actor = *end == ':' ? (int)strtol(end + 1, &end, 10) : NOBODY;
        if (at == step)
            return actor;
        p = *end ? end + 1 : end;
    }
    return NOBODY;
}

static int choose_random(int from, uint8_t able, bool can_go_on)
{
    int others = __builtin_popcount(able & ~(can_go_on ? 1u << from : 0u));
    if (!others || (can_go_on && draw(run.seldom)))
        return can_go_on ? from : next_after(from, able);
    int chosen = from;
    for (uint64_t skip = draw((uint64_t)others) + 1; skip; skip--)
        do
            chosen = (chosen + 1) % run.actors;
        while (!(able >> chosen & 1) || (can_go_on && chosen == from));
    return chosen;
}

/*
 * Who goes on. `from` has the baton, and can go on if it is among the able. Another choice is a preemption then, and
 * where it only looks again and again for what others do: or a search would let two that wait take turns for ever.
 */
static int decide(int from, uint8_t able)
{
    bool can_go_on = from != NOBODY && able >> from & 1;
    bool looks = from != NOBODY && actors[from].waits && !actors[from].lock;
    int usual = can_go_on ? from : next_after(from, able);
    if (run.mode == REPLAY) {
        int said = replayed_at(run.step);
        return said != NOBODY && able >> said & 1 ? said : usual;
    }
    if (!(able & (able - 1)) || run.length == STEPS_MAX)
        return usual;
    struct decision *d = &run.decision[run.length];
    if (run.mode == DEPTH_FIRST && run.length < run.fixed) {
        if (d->step != run.step || d->able != able)
            explore_fail("the schedule is not what it was before: step %llu, not %llu", (unsigned long long)run.step,
                         (unsigned long long)d->step);
    } else {
        int chosen = run.mode == RANDOM ? choose_random(from, able, can_go_on) : usual;
        *d = (struct decision){.step = run.step,
                               .usual = (int8_t)usual,
                               .chosen = (int8_t)chosen,
                               .able = able,
                               .tried = (uint8_t)(1 << chosen),
                               .preemptions = (uint8_t)run.preemptions,
                               .is_free = !can_go_on && !looks};
    }
    run.length++;
    run.preemptions += !d->is_free && d->chosen != d->usual;
    return able >> d->chosen & 1 ? d->chosen : usual;
}

static void hand_over(int from, int to)
{
    if (to == from)
        return;
    actors[to].waits = false;
    sem_post(&actors[to].go);
    if (from != NOBODY && !actors[from].done)
        while (sem_wait(&actors[from].go))
            ;
}

/* Nothing can be done for this process's actors any more: the test's thread says so. */
static void give_up(const char *words)
{
    explore_fail("%s", words);
    run.racing = false;
    sem_post(&over);
    for (;;)
        pause();
}

/* Everyone waits, and for nothing that has changed: time goes on, and they look again. */
static uint8_t stall(void)
{
    uint8_t able = 0;
    for (int i = 0; i < run.actors; i++)
        if (!actors[i].done && !actors[i].lock)
            able |= (uint8_t)(1 << i);
    if (!able || ++run.stalls > STALLS_MAX)
        give_up(able ? "the actors wait for one another" : "deadlock");
    return able;
}

static bool is_shared(uint64_t at, bool changes_it)
{
    struct place *place = place_of(at);
    if (place->run != run.number)
        *place = (struct place){at, run.number, 0, 0, place->shared, place->learned};
    *(changes_it ? &place->writers : &place->readers) |= (uint8_t)(1 << self);
    uint8_t all = place->readers | place->writers;
    if (place->writers && all & (all - 1) && !place->learned)
        place->learned = run.learned = true;
    return place->shared;
}

void vpmm_schedule_point(const volatile void *address, bool changes_it)
{
    if (self == NOBODY || !run.racing)
        return;
    uint64_t at = (uint64_t)(uintptr_t)address;
    if (!at || (at >= run.what->ignored[0] && at < run.what->ignored[1]))
        return;
    run.step++;
    if (run.step > STEPS_MAX)
        give_up("an actor does not come to an end");
    bool decided = is_shared(at, changes_it) || run.mode == REPLAY;
    for (int i = 0; i < run.actors && !decided; i++)
        decided = i != self && actors[i].waits && is_able(&actors[i]);
    if (decided)
        hand_over(self, decide(self, able_actors()));
    changes += changes_it;
}

void vpmm_schedule_wait(void *lock)
{
    enum { MOMENT_NS = 5000 };
    run.clock += MOMENT_NS;
    if (self == NOBODY || !run.racing)
        return;
    run.step++;
    actors[self].waits = true;
    actors[self].lock = lock;
    actors[self].seen = changes;
    uint8_t able = able_actors();
    if (!able)
        able = stall();
    int to = decide(self, able);
    if (to == self)
        actors[self].waits = false;
    hand_over(self, to);
}

/* A sleep takes its time. Who waits for a signal may wait however long: what ends it is that another actor goes on. */
void vpmm_schedule_sleep(const void *object, uint64_t ns)
{
    if (!object)
        run.clock += ns;
    vpmm_schedule_wait(NULL);
}

void vpmm_schedule_wake(const void *object)
{
    (void)object;
}

/* ---- the actors' threads ---- */

static void has_finished(void)
{
    actors[self].done = true;
    if (!run.racing) {
        sem_post(&over);
        return;
    }
    run.step++;
    changes++;
    uint8_t able = able_actors(), left = 0;
    for (int i = 0; i < run.actors; i++)
        left |= (uint8_t)(!actors[i].done << i);
    if (!able && left)
        able = stall();
    if (left) {
        hand_over(NOBODY, decide(self, able));
    } else {
        run.racing = false;
        sem_post(&over);
    }
}

static void await_turn(void)
{
    while (sem_wait(&actors[self].go))
        ;
}

/* A key's destructor: in the third round, when those of the library have long run. */
static void thread_ends(void *rounds)
{
    if ((uintptr_t)rounds < 3)
        pthread_setspecific(end_key, (void *)((uintptr_t)rounds + 1));
    else
        has_finished();
}

static void *be_actor(void *number)
{
    self = (int)(intptr_t)number;
    for (;;) {
        await_turn();
        void (*now)(void *) = task[self];
        now(run.what->data);
        if (run.what->threads_end && run.racing) {
            pthread_setspecific(end_key, (void *)1);
            return NULL;
        }
        has_finished();
    }
}

static void start_threads(void)
{
    for (int i = 0; i < run.actors; i++) {
        sem_init(&actors[i].go, 0, 0);
        pthread_create(&actors[i].thread, NULL, be_actor, (void *)(intptr_t)i);
    }
}

static void join_threads(void)
{
    for (int i = 0; i < run.actors; i++)
        pthread_join(actors[i].thread, NULL);
}

static void await_over(void)
{
    while (sem_wait(&over))
        ;
}

static void let_act(int actor, void (*what)(void *))
{
    task[actor] = what;
    sem_post(&actors[actor].go);
    await_over();
}

/* One after the other. */
static void prepare(const struct exploration *what)
{
    for (int i = 0; i < run.actors; i++)
        if (what->prepare[i])
            let_act(i, what->prepare[i]);
}

static void settle_threads(const struct exploration *what)
{
    if (!what->settle)
        return;
    what->settle(what->data);
    for (int i = 0; i < run.actors && !what->threads_end; i++)
        let_act(i, what->settle);
}

static void race(const struct exploration *what)
{
    for (int i = 0; i < run.actors; i++) {
        actors[i].done = actors[i].waits = false;
        task[i] = what->act[i];
    }
    run.racing = true;
    int first = decide(NOBODY, able_actors());
    sem_post(&actors[first].go);
    await_over();
    run.racing = false;
}

static void run_once(struct exploration *what)
{
    run.number++;
    run.step = run.stalls = 0;
    run.length = run.preemptions = 0;
    run.failed = false;
    run.clock = UINT64_C(1000000000);
    changes = 0;
    memory_begin();
    if (what->threads_end)
        start_threads();
    what->open(what->data);
    prepare(what);
    race(what);
    if (what->threads_end && !run.failed)
        join_threads();
    run.closing = true;
    if (!run.failed)
        what->close(what->data);
    run.closing = false;
    memory.on = false;
    explore_check(memory.live == 0, "%ld allocations of host memory are not freed", memory.live);
}

/* ---- all runs ---- */

static const char *describe(void)
{
    static char text[120000]; /* as long as a variable of the environment may be */
    size_t used = 0;
    if (run.mode == REPLAY)
        return run.replayed;
    text[0] = 0;
    for (unsigned i = 0; i < run.length && used < sizeof text - 32; i++) {
        const struct decision *d = &run.decision[i];
        if (d->chosen != d->usual)
            used += (size_t)snprintf(text + used, sizeof text - used, "%s%llu:%d", used ? " " : "",
                                     (unsigned long long)d->step, d->chosen);
    }
    return text;
}

static void run_or_fail(const char *name, struct exploration *what)
{
    run_once(what);
    if (run.failed && what->fails) {
        run.found = true;
        return;
    }
    if (run.failed) /* not in the assertion's words, of which Criterion keeps 1,000 characters */
        fprintf(stderr, "%s: again: VPMM_TEST_SCHEDULE='%s'\n", name, describe());
    cr_assert(!run.failed, "%s: %s", name, run.words);
}

static bool may_preempt_at(uint64_t place)
{
    return (place * run.looked_at + run.phase) % run.of < run.looked_at;
}

/*
 * A search that will not end looks at preemptions at some places alone, from the first to the last of a schedule: depth
 * first it comes to the last ones first, and to no others. By the schedule that was run last, and as if preemptions
 * changed nothing in where others may be, so many places can be looked at in so many schedules.
 */
static void choose_places(uint64_t schedules, uint64_t seed)
{
    uint64_t preemptions = 0, free = 1;
    for (uint64_t i = 0; i < run.length; i++)
        *(run.decision[i].is_free ? &free : &preemptions) += (uint64_t)__builtin_popcount(run.decision[i].able) - 1;
    uint64_t all = run.bound > 1 ? preemptions * preemptions / 2 : preemptions, most = schedules / free;
    if (run.bound > 1)
        most = (uint64_t)sqrt(2 * (double)most);
    run.of = all > schedules ? preemptions : 1;
    run.looked_at = all > schedules ? most : 1;
    run.phase = seed % run.of;
}

/* The next schedule in depth-first order. False: there is none. */
static bool advance(void)
{
    while (run.length) {
        struct decision *d = &run.decision[run.length - 1];
        bool looked_at = d->is_free || may_preempt_at(run.length - 1);
        unsigned cost = d->preemptions + !d->is_free;
        for (int i = 0; i < run.actors && looked_at && cost <= run.bound; i++)
            if (d->able >> i & 1 && !(d->tried >> i & 1)) {
                d->chosen = (int8_t)i;
                d->tried |= (uint8_t)(1 << i);
                run.fixed = run.length;
                return true;
            }
        run.length--;
    }
    return false;
}

static void adopt_learned(void)
{
    for (int i = 0; i < PLACES; i++)
        places[i].shared |= places[i].learned;
    run.learned = false;
}

/* How many schedules that were; *all: every one with so many preemptions. */
static uint64_t search(const char *name, struct exploration *what, unsigned bound, uint64_t most, uint64_t seed,
                       bool *all)
{
    uint64_t done = 0;
    run.mode = DEPTH_FIRST;
    run.bound = bound;
    do { /* again from the beginning when an address was found to be shared */
        adopt_learned();
        run.fixed = 0;
        run_or_fail(name, what);
        choose_places(most - ++done, seed);
        while (done < most && !run.found && advance()) {
            run_or_fail(name, what);
            done++;
        }
        *all = done < most && run.of == 1;
    } while (run.learned && done < most && !run.found);
    return done;
}

/* What it learns of is decided at from the next one on. */
static uint64_t wander(const char *name, struct exploration *what, uint64_t count, uint64_t seed)
{
    enum { RANGE = 6 };
    run.mode = RANDOM;
    uint64_t done = 0;
    for (; done < count && !run.found; done++) {
        if (run.learned)
            adopt_learned();
        run.random = (seed + done) * UINT64_C(0x9E3779B97F4A7C15) | 1;
        run.seldom = 2u << draw(RANGE);
        run_or_fail(name, what);
    }
    return done;
}

static uint64_t number_from(const char *variable, uint64_t otherwise)
{
    const char *value = getenv(variable);
    return value && *value ? strtoull(value, NULL, 10) : otherwise;
}

static unsigned count_shared(void)
{
    unsigned count = 0;
    for (int i = 0; i < PLACES; i++)
        count += places[i].shared;
    return count;
}

static double seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* What a thread does once in its life, it has done then. */
static void warm_up(const char *name, struct exploration *what)
{
    run.mode = REPLAY;
    run.replayed = "";
    run_or_fail(name, what);
}

static void search_all(const char *name, struct exploration *what)
{
    enum { USUAL = 2500, SEED = 1 };
    uint64_t most = number_from("VPMM_TEST_SCHEDULES", USUAL), seed = number_from("VPMM_TEST_SEED", SEED);
    uint64_t wandering = what->random ? what->random : most / RANDOM_SHARE, done[EXPLORE_PREEMPTIONS + 1] = {0};
    if (what->random)
        wandering = wandering * most / USUAL;
    warm_up(name, what);
    double begin = seconds_now();
    bool all = true;
    most = most ? most : UINT64_MAX / 2;
    wandering = wander(name, what, wandering, seed); /* first: what it learns of is no reason to begin a search again */
    for (unsigned bound = 1; bound <= EXPLORE_PREEMPTIONS && all && !what->random && !run.found; bound++) {
        uint64_t left = 2 * most - done[1];
        done[bound] = search(name, what, bound, bound > 1 && left > most ? most : left, seed, &all);
    }
    double seconds = seconds_now() - begin;
    uint64_t sum = done[1] + done[2] + wandering;
    const char *end = !done[1] ? "" : all ? " (all)" : " (not all)"; /* of the last search */
    fprintf(stderr,
            "%s: %llu schedules of 1 preemption%s, %llu of 2%s, %llu random from seed %llu; %u places, %.0f/s\n", name,
            (unsigned long long)done[1], done[2] ? "" : end, (unsigned long long)done[2], done[2] ? end : "",
            (unsigned long long)wandering, (unsigned long long)seed, count_shared(), (double)sum / seconds);
}

void explore_report(void)
{
    if (run.closing)
        fprintf(stderr, "failed at the end of a schedule; again: VPMM_TEST_SCHEDULE='%s'\n", describe());
}

/* What was found fails where its description is run. */
static void fail_again(const char *name, struct exploration *what)
{
    cr_assert(run.found, "%s: no schedule fails", name);
    run.replayed = describe();
    run.mode = REPLAY;
    run_once(what);
    cr_assert(run.failed, "%s: it does not fail again: '%s'", name, run.replayed);
}

void explore(const char *name, struct exploration *what)
{
    sem_init(&over, 0, 0);
    pthread_key_create(&end_key, thread_ends);
    run.what = what;
    for (run.actors = 0; run.actors < EXPLORE_ACTORS && what->act[run.actors]; run.actors++)
        ;
    if (!what->threads_end)
        start_threads();
    settle_threads(what);
    run.replayed = getenv("VPMM_TEST_SCHEDULE");
    if (run.replayed) {
        run.mode = REPLAY;
        run_or_fail(name, what);
    } else {
        search_all(name, what);
        if (what->fails)
            fail_again(name, what);
    }
}
