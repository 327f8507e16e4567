/*
 * Threads that build at the same time, with one of them standing still inside a call of the driver: what the others do
 * meanwhile. What the queue does by itself is in unit/test_turn.c.
 */
#define _GNU_SOURCE 1

#include "pool/find.h"
#include "pool/pool.h"
#include "random.h"
#include "remap/hole.h"
#include "remap/mapping.h"
#include "support.h"

#include "base/clock.h"

#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/resource.h>

enum { LOOK_US = 50, WAITERS = 3 };

/* ---- a clock that can be made slow ---- */

/* How much later CLOCK_MONOTONIC says that a nanosecond has gone by: no patience ends before the test is ended. */
enum { SLOWLY = 4000 };

static _Atomic(uint64_t) slow_since; /* in ns; 0: it is not slow */

int __real_clock_gettime(clockid_t clock, struct timespec *now);
int __wrap_clock_gettime(clockid_t clock, struct timespec *now);

int __wrap_clock_gettime(clockid_t clock, struct timespec *now)
{
    int status = __real_clock_gettime(clock, now);
    uint64_t since = clock == CLOCK_MONOTONIC ? atomic_load(&slow_since) : 0;
    if (since) {
        uint64_t ns = (uint64_t)now->tv_sec * 1000000000 + (uint64_t)now->tv_nsec;
        ns = since + (ns - since) / SLOWLY;
        *now = (struct timespec){.tv_sec = (time_t)(ns / 1000000000), .tv_nsec = (long)(ns % 1000000000)};
    }
    return status;
}

/* From now on nobody loses patience, however long the test's threads stand still on a busy machine. */
static void slow_clock(void)
{
    atomic_store(&slow_since, clock_now_ns());
}

static void end_slow_clock(void)
{
    atomic_store(&slow_since, 0);
}

/* ---- a driver in which a thread can be made to stand still ---- */

enum { AT_CREATE, AT_ALLOW, AT_UNMAP, AT_SYNCHRONIZE, AT_WITHDRAW, CALLS };

static const vpmm_driver *simulated;
static atomic_bool parks[CALLS];       /* the next such call is not begun before it is let go */
static atomic_bool parked[CALLS];      /* a thread stands there */
static atomic_uint creating;           /* handles asked for */
static atomic_uint allowing;           /* calls for access */
static atomic_int calls_left;          /* that map or create; at 0 the next is refused. Below 0: none is */
static atomic_bool keeps_mappings;     /* it unmaps nothing */
static atomic_uint strange_waits;      /* of a stream, by another thread than that which allocates on it */
static atomic_int refused_waits;       /* so many, of streams or on the host, from the next on */
static atomic_uint asking;             /* questions of a thread that allocates, whether a mark has passed */
static atomic_bool refuses_marks;      /* it records nothing */
static atomic_int records_left;        /* that a plan allocates; at 0 the next is refused. Below 0: none is */
static _Thread_local bool is_spoiled;  /* the calling thread's plans are, */
static atomic_bool spoils_who_goes_on; /* as from now on those of the thread that stands in a call */
static unsigned calls_under_lock;      /* that such a thread makes for a mark with the plan lock, */
static const struct world *planned_in; /* in this world; NULL: not counted */

static void park_at(int call)
{
    if (!atomic_exchange(&parks[call], false))
        return;
    atomic_store(&parked[call], true);
    while (atomic_load(&parked[call]))
        clock_sleep_us(LOOK_US);
    if (atomic_exchange(&spoils_who_goes_on, false))
        is_spoiled = true;
}

static bool is_refused(void)
{
    return atomic_load(&calls_left) >= 0 && atomic_fetch_sub(&calls_left, 1) == 0;
}

static CUresult CUDAAPI create_when_let_go(CUmemGenericAllocationHandle *handle, size_t bytes,
                                           const CUmemAllocationProp *prop, unsigned long long flags)
{
    park_at(AT_CREATE);
    atomic_fetch_add(&creating, 1);
    return is_refused() ? CUDA_ERROR_OUT_OF_MEMORY : simulated->cuMemCreate(handle, bytes, prop, flags);
}

static CUresult CUDAAPI map_or_not(CUdeviceptr p, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                                   unsigned long long flags)
{
    return is_refused() ? CUDA_ERROR_UNKNOWN : simulated->cuMemMap(p, bytes, offset, handle, flags);
}

static CUresult CUDAAPI allow_or_not(CUdeviceptr p, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
    park_at(AT_ALLOW);
    atomic_fetch_add(&allowing, 1);
    return is_refused() ? CUDA_ERROR_UNKNOWN : simulated->cuMemSetAccess(p, bytes, access, count);
}

static CUresult CUDAAPI unmap_or_not(CUdeviceptr p, size_t bytes)
{
    park_at(AT_UNMAP);
    return atomic_load(&keeps_mappings) ? CUDA_ERROR_UNKNOWN : simulated->cuMemUnmap(p, bytes);
}

static bool is_wait_refused(void)
{
    return atomic_fetch_sub(&refused_waits, 1) > 0;
}

static CUresult CUDAAPI wait_by_its_thread(CUstream stream, CUevent event, unsigned flags)
{
    if (malloc_thread_stream() && stream != malloc_thread_stream())
        atomic_fetch_add(&strange_waits, 1);
    return is_wait_refused() ? CUDA_ERROR_UNKNOWN : simulated->cuStreamWaitEvent(stream, event, flags);
}

static CUresult CUDAAPI query_and_count(CUevent event)
{
    if (malloc_thread_stream())
        atomic_fetch_add(&asking, 1);
    return simulated->cuEventQuery(event);
}

static void note_lock(void)
{
    pthread_mutex_t *lock = planned_in && is_spoiled ? &planned_in->pool->arena.plan_lock : NULL;
    if (!lock)
        return;
    if (pthread_mutex_trylock(lock) == 0)
        pthread_mutex_unlock(lock);
    else
        calls_under_lock++;
}

static CUresult CUDAAPI look_for_a_capture(CUstream stream, CUstreamCaptureStatus *status)
{
    note_lock();
    return simulated->cuStreamIsCapturing(stream, status);
}

static CUresult CUDAAPI record_or_not(CUevent event, CUstream stream)
{
    note_lock();
    return atomic_load(&refuses_marks) ? CUDA_ERROR_UNKNOWN : simulated->cuEventRecord(event, stream);
}

static CUresult CUDAAPI synchronize_when_let_go(CUevent event)
{
    park_at(AT_SYNCHRONIZE);
    return is_wait_refused() ? CUDA_ERROR_UNKNOWN : simulated->cuEventSynchronize(event);
}

bool __real_turn_withdraw(struct turn *turn, struct turn_place *place);
bool __wrap_turn_withdraw(struct turn *turn, struct turn_place *place);

/* No call of the driver's: the library's own, of who has found memory while it waited. */
bool __wrap_turn_withdraw(struct turn *turn, struct turn_place *place)
{
    park_at(AT_WITHDRAW);
    return __real_turn_withdraw(turn, place);
}

static void open_builders(struct world *w, struct setup *setup)
{
    static vpmm_driver driver;
    needs_simulator();
    for (int i = 0; i < CALLS; i++) {
        atomic_store(&parks[i], false);
        atomic_store(&parked[i], false);
    }
    atomic_store(&calls_left, -1);
    atomic_store(&strange_waits, 0);
    atomic_store(&keeps_mappings, false);
    atomic_store(&refused_waits, 0);
    atomic_store(&refuses_marks, false);
    atomic_store(&spoils_who_goes_on, false);
    atomic_store(&records_left, -1);
    planned_in = NULL;
    calls_under_lock = 0;
    end_slow_clock();
    world_open_without_pool(w, setup);
    simulated = w->driver;
    driver = *w->driver;
    driver.cuMemCreate = create_when_let_go;
    driver.cuEventQuery = query_and_count;
    driver.cuEventSynchronize = synchronize_when_let_go;
    driver.cuMemMap = map_or_not;
    driver.cuMemSetAccess = allow_or_not;
    driver.cuMemUnmap = unmap_or_not;
    driver.cuStreamWaitEvent = wait_by_its_thread;
    driver.cuStreamIsCapturing = look_for_a_capture;
    driver.cuEventRecord = record_or_not;
    setup->pool.driver = &driver;
    must_work(vpmm_pool_create(&setup->pool, &w->pool));
}

/* With handles of a page each, and a stream. */
static CUstream open_pages(struct world *w, struct setup *setup)
{
    setup->pool.extent_size = PAGE;
    open_builders(w, setup);
    return world_stream(w);
}

/* ---- threads ---- */

/* It has the turn, and keeps it until it is let go. */
static void start_and_park_at(int call, struct malloc_thread *b, struct world *w, CUstream stream, size_t pages)
{
    atomic_store(&parks[call], true);
    malloc_thread_start(b, w, stream, pages);
    while (!atomic_load(&parked[call]))
        clock_sleep_us(LOOK_US);
}

static void start_and_park(struct malloc_thread *b, struct world *w, CUstream stream, size_t pages)
{
    start_and_park_at(AT_CREATE, b, w, stream, pages);
}

static void let_go(int call)
{
    atomic_store(&parked[call], false);
}

/* Who stands in such a call goes on, and whoever makes the next one stands still in that. */
static void stand_still_in_the_next(int call)
{
    atomic_store(&parks[call], true);
    let_go(call);
    while (!atomic_load(&parked[call]))
        clock_sleep_us(LOOK_US);
}

static void end(struct malloc_thread *b)
{
    pthread_join(b->thread, NULL);
    require(b->status == VPMM_SUCCESS, "a thread's malloc: %s", vpmm_status_name(b->status));
    give(b->w, b->pointer, b->stream);
}

static struct turn *turn_of(const struct world *w)
{
    return &w->pool->arena.turn;
}

static void wait_for_waiters(struct world *w, unsigned n)
{
    while (atomic_load(&w->pool->arena.space.await.waiting) < n)
        clock_sleep_us(LOOK_US);
}

static void expect_nobody_waits(struct world *w)
{
    cr_expect(turn_of(w)->first == NULL && atomic_load(&turn_of(w)->length) == 0, "the turn was not given back");
    cr_expect_eq(atomic_load(&w->pool->arena.space.await.waiting), 0, "a place was not left");
    cr_expect_eq(atomic_load(&w->pool->arena.builders), 0, "a builder is still counted in");
    const struct streams *streams = &w->pool->arena.streams;
    for (uint32_t slot = 1; slot < atomic_load(&streams->slots); slot++)
        cr_expect_eq(atomic_load(&stream_at(streams, slot)->users), 0, "somebody is counted in with stream %u", slot);
}

static void close_builders(struct world *w)
{
    expect_nobody_waits(w);
    world_drain(w);
    world_audit(w);
    world_close(w);
}

/* ---- what is published serves who waits ---- */

/* Each in the queue takes what another thread frees, while the builder stands still: nothing is created for them. */
Test(builders, who_waits_takes_what_is_published, .timeout = 60)
{
    struct world w;
    struct setup setup = setup_default();
    open_builders(&w, &setup);
    CUstream s = world_stream(&w);
    struct malloc_thread first, waiter[WAITERS];
    CUdeviceptr held[WAITERS], wall[WAITERS];
    for (int i = 0; i < WAITERS; i++) {
        held[i] = take(&w, 4, s);
        wall[i] = take(&w, 1, s);
    }
    slow_clock();
    start_and_park(&first, &w, s, 2);
    uint64_t mapped = stats_of(&w).mapped_bytes;
    for (unsigned i = 0; i < WAITERS; i++) {
        malloc_thread_start(&waiter[i], &w, s, 4);
        wait_for_waiters(&w, i + 1);
    }
    struct await *await = &w.pool->arena.space.await;
    uint32_t seen[WAITERS];
    for (unsigned i = 0; i < WAITERS; i++)
        seen[i] = await_read(await, i);
    for (int i = 0; i < WAITERS; i++)
        give(&w, held[i], s);
    for (unsigned i = 0; i < WAITERS; i++)
        cr_expect_neq(await_read(await, i), seen[i], "who waits at place %u was not woken", i);
    for (int i = 0; i < WAITERS; i++)
        while (!atomic_load(&waiter[i].done))
            clock_sleep_us(LOOK_US);
    cr_expect_eq(stats_of(&w).mapped_bytes, mapped, "memory was created beside free memory");
    cr_expect(atomic_load(&parked[AT_CREATE]) && !atomic_load(&first.done));
    let_go(AT_CREATE);
    end(&first);
    for (int i = 0; i < WAITERS; i++) {
        end(&waiter[i]);
        give(&w, wall[i], s);
    }
    close_builders(&w);
}

/* What is free once the builder is done serves the next: it builds nothing. */
Test(builders, who_waits_is_served_by_what_the_first_frees, .timeout = 60)
{
    struct world w;
    struct setup setup = setup_default();
    open_builders(&w, &setup);
    CUstream s = world_stream(&w);
    struct malloc_thread first, second;
    CUdeviceptr held = take(&w, 6, s);
    slow_clock();
    start_and_park(&first, &w, s, 8);
    malloc_thread_start(&second, &w, s, 6);
    wait_for_waiters(&w, 1);
    give(&w, held, s);
    let_go(AT_CREATE);
    uint64_t created = atomic_load(&creating);
    pthread_join(second.thread, NULL);
    cr_expect_eq(second.status, VPMM_SUCCESS);
    end(&first);
    cr_expect_leq(atomic_load(&creating) - created, 1, "the second has created memory too");
    give(&w, second.pointer, s);
    close_builders(&w);
}

/* Memory behind another stream's fence is taken, with a wait, while a builder stands still. */
Test(builders, tier_4_does_not_wait_for_one_that_stands_still, .timeout = 60)
{
    enum { ROUNDS = 100 };
    struct world w;
    struct setup setup = setup_default();
    setup.pool.reuse = VPMM_REUSE_WAIT_DEVICE;
    open_builders(&w, &setup);
    CUstream s = world_stream(&w), t = world_stream(&w);
    struct malloc_thread first;
    CUdeviceptr p = take(&w, 2, t);
    start_and_park(&first, &w, world_stream(&w), 5);
    slow_clock();
    uint64_t begin = clock_now_ns(), waited = stats_of(&w).hits_waited;
    for (int i = 0; i < ROUNDS; i++) {
        CUstream from = i % 2 ? s : t, to = i % 2 ? t : s;
        keep_busy(&w, from);
        give(&w, p, from);
        p = take(&w, 2, to);
    }
    uint64_t took = clock_now_ns() - begin;
    cr_expect_eq(stats_of(&w).hits_waited - waited, ROUNDS);
    cr_expect_lt(took, TURN_PATIENCE_NS, "somebody has lost patience with who stands still");
    give(&w, p, ROUNDS % 2 ? s : t);
    let_go(AT_CREATE);
    end(&first);
    close_builders(&w);
}

/* A thread that waits on the host for memory of tier 4 does not build: it is not in the queue, where the others would
 * wait for it. */
Test(builders, who_waits_on_the_host_for_memory_is_not_in_the_queue, .timeout = 60)
{
    struct world w;
    struct setup setup = setup_default();
    setup.pool.reuse = VPMM_REUSE_WAIT_HOST;
    open_builders(&w, &setup);
    CUstream s = world_stream(&w), t = world_stream(&w);
    struct malloc_thread first, waiter;
    CUdeviceptr p = take(&w, 4, t);
    slow_clock();
    start_and_park(&first, &w, s, 5);
    keep_busy(&w, t);
    give(&w, p, t);
    atomic_store(&parks[AT_SYNCHRONIZE], true);
    malloc_thread_start(&waiter, &w, s, 2);
    while (!atomic_load(&parked[AT_SYNCHRONIZE]))
        clock_sleep_us(LOOK_US);
    cr_expect_eq(atomic_load(&turn_of(&w)->length), 1, "%u are in the queue", atomic_load(&turn_of(&w)->length));
    uint64_t builds = stats_of(&w).builds;
    give(&w, take(&w, 2, t), t);
    cr_expect_eq(stats_of(&w).builds, builds, "it holds more than it waits for");
    let_go(AT_CREATE);
    pthread_join(first.thread, NULL);
    cr_expect(turn_of(&w)->first == NULL, "the turn is a thread's that waits for the GPU");
    let_go(AT_SYNCHRONIZE);
    end(&waiter);
    cr_expect_eq(first.status, VPMM_SUCCESS);
    give(&w, first.pointer, s);
    close_builders(&w);
}

/* What it does not need of the memory that it waits for is free meanwhile, and so is the turn in which it was found. */
Test(builders, who_waits_on_the_host_holds_no_more_than_it_asked_for, .timeout = 60)
{
    enum { ALL = 16 };
    struct world w;
    struct setup setup = setup_default();
    setup.pool.reuse = VPMM_REUSE_WAIT_HOST;
    setup.pool.max_mapped = ALL * PAGE;
    open_builders(&w, &setup);
    CUstream s = world_stream(&w), t = world_stream(&w);
    struct malloc_thread waiter;
    CUdeviceptr p = take(&w, ALL, t);
    keep_busy(&w, t);
    give(&w, p, t);
    atomic_store(&parks[AT_SYNCHRONIZE], true);
    malloc_thread_start(&waiter, &w, s, 2);
    while (!atomic_load(&parked[AT_SYNCHRONIZE]))
        clock_sleep_us(LOOK_US);
    cr_expect(turn_of(&w)->first == NULL, "the turn is a thread's that waits for the GPU");
    vpmm_status status = vpmm_malloc(w.pool, 4 * PAGE, t, &p);
    let_go(AT_SYNCHRONIZE);
    cr_assert_eq(status, VPMM_SUCCESS, "%s, beside a thread that waits for 2 pages of %u", vpmm_status_name(status),
                 (unsigned)ALL);
    end(&waiter);
    give(&w, p, t);
    close_builders(&w);
}

/* ---- what is freed serves who builds ---- */

/* One thread asks for memory that is to be created, and stands still in a call, while so many pages are freed. */
struct overtaking {
    size_t pages, freed;
    int call;                  /* in which it stands still */
    bool on_another, lag;      /* they are freed on another stream, whose work goes on */
    vpmm_reuse reuse;          /* 0: as by default */
    size_t mapped;             /* pages thereafter, where `pages` + 1 were mapped before, */
    unsigned created, allowed; /* handles that were made, and calls for access */
    uint64_t waited;           /* mallocs that were served by a wait */
    unsigned asked;            /* how often it then asked what has passed */
};

static void overtake(struct overtaking *o)
{
    struct world w;
    struct setup setup = setup_default();
    struct malloc_thread b;
    setup.sim.stepped = o->lag; /* else work is done at once */
    if (o->reuse)
        setup.pool.reuse = o->reuse;
    CUstream s = open_pages(&w, &setup), t = o->on_another ? world_stream(&w) : s;
    CUdeviceptr p = take(&w, o->freed, t), q = take(&w, o->pages + 1 - o->freed, s);
    unsigned created = atomic_load(&creating), allowed = atomic_load(&allowing);
    uint64_t builds = stats_of(&w).builds;
    start_and_park_at(o->call, &b, &w, s, o->pages);
    if (o->lag)
        keep_busy(&w, t);
    give(&w, p, t);
    atomic_store(&asking, 0);
    let_go(o->call);
    end(&b);
    o->asked = atomic_load(&asking);
    o->created = atomic_load(&creating) - created;
    o->allowed = atomic_load(&allowing) - allowed;
    o->mapped = stats_of(&w).mapped_bytes / PAGE;
    o->waited = stats_of(&w).hits_waited;
    cr_expect_eq(stats_of(&w).unwound_overtaken, o->mapped == o->pages + 1);
    cr_expect_eq(stats_of(&w).builds - builds, o->mapped > o->pages + 1, "what was found counts as built");
    give(&w, q, s);
    close_builders(&w);
}

Test(builders, who_creates_takes_what_is_freed_meanwhile, .timeout = 60)
{
    struct overtaking all = {.pages = 16, .freed = 16, .call = AT_CREATE};
    struct overtaking less = {.pages = 16, .freed = 15, .call = AT_CREATE};
    overtake(&all);
    cr_expect_eq(all.mapped, 17, "%zu pages, where 16 of 17 were free", all.mapped);
    cr_expect(all.created == 1 && all.allowed == 0, "it went on when there was what serves");
    overtake(&less);
    cr_expect_eq(less.mapped, 33, "%zu pages, where 15 of 17 were free and 16 asked for", less.mapped);
}

/* A pool that needs what its builds make grows, though each is overtaken. */
Test(builders, builds_are_overtaken_eight_times_in_turn, .timeout = 60)
{
    enum { PAGES = 16, TIMES = 8 };
    struct world w;
    struct setup setup = setup_default();
    struct malloc_thread b;
    CUstream s = open_pages(&w, &setup);
    CUdeviceptr p = take(&w, PAGES, s);
    for (int i = 0; i <= TIMES; i++) {
        start_and_park(&b, &w, s, PAGES);
        give(&w, p, s);
        let_go(AT_CREATE);
        pthread_join(b.thread, NULL);
        cr_assert_eq(b.status, VPMM_SUCCESS);
        p = b.pointer;
        cr_expect_eq(stats_of(&w).mapped_bytes / PAGE, i < TIMES ? PAGES : 2 * PAGES);
    }
    CUdeviceptr q = take(&w, PAGES, s);
    start_and_park(&b, &w, s, PAGES);
    give(&w, p, s);
    let_go(AT_CREATE);
    end(&b);
    cr_expect_eq(stats_of(&w).unwound_overtaken, TIMES + 1, "it has grown, and so may be overtaken again");
    give(&w, q, s);
    close_builders(&w);
}

/* Between two calls for access, and after the last. */
Test(builders, who_maps_takes_what_is_freed_meanwhile, .timeout = 60)
{
    struct overtaking two = {.pages = 32, .freed = 32, .call = AT_ALLOW};
    struct overtaking one = {.pages = 16, .freed = 16, .call = AT_ALLOW};
    overtake(&two);
    cr_expect(two.mapped == 33 && two.allowed == 1, "%zu pages, %u calls", two.mapped, two.allowed);
    overtake(&one);
    cr_expect(one.mapped == 17 && one.allowed == 1, "%zu pages, %u calls", one.mapped, one.allowed);
}

/* ---- what is made after long moves is put off ---- */

enum { MOVED = 60, MISSING = 40, LONG_MOVES = 49 }; /* of a page each, to move so many takes 0.9 ms (rule 12) */
enum { CALLS_A_PART = (MOVED + MAPPINGS_A_CALL - 1) / MAPPINGS_A_CALL };

/* Pages that are free, handles of a page each, and between them as many that are not. */
struct scattered {
    struct world w;
    struct setup setup;
    bool lags; /* what is free is behind work on its stream */
    CUstream s;
    CUdeviceptr free[MOVED], held[MOVED];
};

static void open_scattered_as_set(struct scattered *sc)
{
    open_builders(&sc->w, &sc->setup);
    sc->s = world_stream(&sc->w);
    for (int i = 0; i < MOVED; i++) {
        sc->free[i] = take(&sc->w, 1, sc->s);
        sc->held[i] = take(&sc->w, 1, sc->s);
    }
    if (sc->lags)
        keep_busy(&sc->w, sc->s);
    for (int i = 0; i < MOVED; i++)
        give(&sc->w, sc->free[i], sc->s);
    must_work(vpmm_trim(sc->w.pool, UINT64_MAX, NULL)); /* out of the caches */
    atomic_store(&sc->w.pool->arena.several_builders, 1);
}

/* What is freed is seen at once. */
static void open_scattered(struct scattered *sc)
{
    sc->setup = setup_default();
    sc->setup.pool.cache_bytes = 0;
    sc->lags = false;
    open_scattered_as_set(sc);
}

static void free_held_on(struct scattered *sc, CUstream stream, int from, int to)
{
    for (int i = from; i < to; i++)
        give(&sc->w, sc->held[i], stream);
}

static void free_held(struct scattered *sc)
{
    free_held_on(sc, sc->s, 0, MOVED);
}

/* A thread asks for more than is free, moves that first, and stands still while it does. */
static void start_to_move(struct scattered *sc, struct malloc_thread *b)
{
    start_and_park_at(AT_ALLOW, b, &sc->w, sc->s, MOVED + MISSING);
}

/* Others free more than is missing meanwhile: that is moved too, and nothing is made. */
Test(builders, what_is_freed_while_much_is_moved_is_moved_as_well, .timeout = 60)
{
    static struct scattered sc;
    struct malloc_thread b;
    open_scattered(&sc);
    uint64_t mapped = stats_of(&sc.w).mapped_bytes, builds = stats_of(&sc.w).builds;
    start_to_move(&sc, &b);
    free_held(&sc);
    let_go(AT_ALLOW);
    end(&b);
    cr_expect_eq(stats_of(&sc.w).mapped_bytes, mapped, "%llu pages were made beside %d that others had freed",
                 (unsigned long long)(stats_of(&sc.w).mapped_bytes - mapped) / PAGE, MOVED);
    cr_expect_eq(stats_of(&sc.w).builds - builds, 1);
    close_builders(&sc.w);
}

/* Nobody frees any: the rest is made, and only that. */
Test(builders, what_is_missing_still_is_made, .timeout = 60)
{
    static struct scattered sc;
    struct malloc_thread b;
    open_scattered(&sc);
    uint64_t mapped = stats_of(&sc.w).mapped_bytes;
    start_to_move(&sc, &b);
    let_go(AT_ALLOW);
    end(&b);
    cr_expect_eq(stats_of(&sc.w).mapped_bytes - mapped, MISSING * PAGE);
    free_held(&sc);
    close_builders(&sc.w);
}

/* What is free is made into one block, which is in use, and what was held is free in its place. */
static CUdeviceptr take_what_is_scattered(struct scattered *sc)
{
    CUdeviceptr whole = take(&sc->w, MOVED + MISSING, sc->s);
    free_held(sc);
    must_work(vpmm_trim(sc->w.pool, UINT64_MAX, NULL)); /* out of the caches */
    return whole;
}

/* What serves as it is comes before the rest: what was moved is free again, in one piece. */
Test(builders, what_serves_as_it_is_ends_a_build_in_parts, .timeout = 60)
{
    static struct scattered sc;
    struct malloc_thread b;
    open_scattered(&sc);
    CUdeviceptr whole = take_what_is_scattered(&sc);
    uint64_t mapped = stats_of(&sc.w).mapped_bytes, builds = stats_of(&sc.w).builds;
    start_to_move(&sc, &b);
    give(&sc.w, whole, sc.s);
    let_go(AT_ALLOW);
    pthread_join(b.thread, NULL);
    cr_assert_eq(b.status, VPMM_SUCCESS);
    cr_expect_eq(b.pointer, whole);
    cr_expect_eq(stats_of(&sc.w).builds, builds);
    cr_expect_eq(stats_of(&sc.w).mapped_bytes, mapped);
    uint64_t longest = stats_of(&sc.w).largest_free_bytes;
    cr_expect_geq(longest, LONG_MOVES * PAGE, "what was moved lies in pieces of at most %llu pages",
                  (unsigned long long)longest / PAGE);
    give(&sc.w, b.pointer, sc.s);
    close_builders(&sc.w);
}

/* What is freed right before what was moved serves with it: it is a hit, and nothing else moves. */
Test(builders, what_is_freed_beside_the_first_part_serves_with_it, .timeout = 60)
{
    static struct scattered sc;
    struct malloc_thread b;
    open_scattered(&sc);
    CUdeviceptr whole = take_what_is_scattered(&sc);
    uint64_t mapped = stats_of(&sc.w).mapped_bytes, builds = stats_of(&sc.w).builds;
    uint64_t moved = stats_of(&sc.w).extents_remapped;
    start_and_park_at(AT_ALLOW, &b, &sc.w, sc.s, 2 * MOVED + MISSING);
    give(&sc.w, whole, sc.s);
    let_go(AT_ALLOW);
    pthread_join(b.thread, NULL);
    cr_assert_eq(b.status, VPMM_SUCCESS);
    cr_expect_eq(b.pointer, whole);
    cr_expect_eq(stats_of(&sc.w).builds, builds);
    cr_expect_eq(stats_of(&sc.w).mapped_bytes, mapped);
    cr_expect_eq(stats_of(&sc.w).extents_remapped - moved, MOVED);
    give(&sc.w, b.pointer, sc.s);
    close_builders(&sc.w);
}

/* The second part is the rest, whatever it moves: it creates before it maps. */
Test(builders, growth_is_put_off_once, .timeout = 60)
{
    static struct scattered sc;
    struct malloc_thread b;
    open_scattered(&sc);
    unsigned created = atomic_load(&creating);
    start_and_park_at(AT_ALLOW, &b, &sc.w, sc.s, 2 * MOVED + MISSING);
    free_held(&sc);
    for (int i = 0; i < CALLS_A_PART; i++) {
        cr_expect_eq(atomic_load(&creating), created, "it creates before the first part is done");
        stand_still_in_the_next(AT_ALLOW);
    }
    cr_expect_gt(atomic_load(&creating), created, "it puts off what it makes once more");
    let_go(AT_ALLOW);
    end(&b);
    close_builders(&sc.w);
}

static bool note_hole(const struct seen_region *found, void *data)
{
    struct seen_region *holes = data;
    while (holes->units)
        holes++;
    *holes = *found;
    return true;
}

/* Others take all address space meanwhile: what was moved is free again, once, and moves on into a new chunk. */
Test(builders, what_was_moved_moves_on_where_no_hole_is_left, .timeout = 60)
{
    static struct scattered sc;
    struct malloc_thread b;
    struct seen_region holes[64] = {{0}};
    open_scattered(&sc);
    struct arena *arena = &sc.w.pool->arena;
    uint64_t mapped = stats_of(&sc.w).mapped_bytes;
    start_to_move(&sc, &b);
    lock_take(&arena->plan_lock);
    hints_each(&arena->holes, &arena->space.units, UNIT_HOLE, note_hole, holes);
    for (int i = 0; holes[i].units; i++)
        hole_carve(arena, holes[i].first, holes[i].first, holes[i].units);
    pthread_mutex_unlock(&arena->plan_lock);
    let_go(AT_ALLOW);
    pthread_join(b.thread, NULL);
    cr_expect_eq(b.status, VPMM_SUCCESS);
    cr_expect_eq(stats_of(&sc.w).mapped_bytes - mapped, MISSING * PAGE);
    lock_take(&arena->plan_lock);
    for (int i = 0; holes[i].units; i++)
        hole_add(arena, holes[i].first, holes[i].units);
    pthread_mutex_unlock(&arena->plan_lock);
    give(&sc.w, b.pointer, sc.s);
    free_held(&sc);
    close_builders(&sc.w);
}

/* The call is refused, and where `unmaps` is not set, so is each unmap in what comes of that. False: none was left. */
static bool refuse_in_parts(int call, bool unmaps)
{
    static struct scattered sc;
    CUdeviceptr p = 0;
    open_scattered(&sc);
    uint64_t mapped = stats_of(&sc.w).mapped_bytes;
    atomic_store(&keeps_mappings, !unmaps);
    atomic_store(&calls_left, call);
    vpmm_status status = vpmm_malloc(sc.w.pool, (MOVED + MISSING) * PAGE, sc.s, &p);
    bool was_refused = atomic_load(&calls_left) < 0;
    atomic_store(&calls_left, -1);
    atomic_store(&keeps_mappings, false);
    require(status == VPMM_SUCCESS || (was_refused && status == VPMM_ERROR_DRIVER), "call %d refused: %s", call,
            vpmm_status_name(status));
    if (status != VPMM_SUCCESS) /* and nothing is in the way of the next */
        p = take(&sc.w, MOVED + MISSING, sc.s);
    cr_expect_eq(stats_of(&sc.w).mapped_bytes - mapped, MISSING * PAGE, "call %d", call);
    world_audit(&sc.w);
    give(&sc.w, p, sc.s);
    free_held(&sc);
    close_builders(&sc.w);
    return was_refused;
}

/* Each call that maps, gives access or creates is refused in turn: nothing is lost, and the request is served. */
Test(builders, each_call_of_a_build_in_parts_may_be_refused, .timeout = 60)
{
    int calls = 0;
    while (refuse_in_parts(calls, true) && refuse_in_parts(calls, false))
        calls++;
    cr_expect_geq(calls, MOVED + 2, "%d calls were refused", calls);
}

/* What was moved is everybody's, in one piece. */
static void expect_the_part_is_free(struct scattered *sc)
{
    expect_nobody_waits(&sc->w);
    cr_expect_geq(stats_of(&sc->w).largest_free_bytes, LONG_MOVES * PAGE);
    world_audit(&sc->w);
}

/*
 * A cap that leaves just what is missing, and a request that moves what is free first. Another thread has what the cap
 * leaves before the rest is planned. Behind work what is free is moved in the last tier alone, and so is what is freed.
 */
struct capped {
    struct scattered sc;
    CUstream t, behind; /* the other thread's, and one with work that is not done */
    CUdeviceptr rest;
    struct malloc_thread b;
};

static void use_up_the_cap(struct capped *c, bool lags)
{
    c->sc.setup = setup_default();
    c->sc.setup.pool.va_size = (size_t)4 << 30; /* so that there is room beside what was moved */
    c->sc.setup.pool.max_mapped = (2 * MOVED + MISSING) * PAGE;
    c->sc.setup.pool.reuse = VPMM_REUSE_COMPLETED;
    c->sc.lags = lags;
    open_scattered_as_set(&c->sc);
    c->t = world_stream(&c->sc.w);
    c->behind = world_stream(&c->sc.w);
    start_and_park_at(AT_ALLOW, &c->b, &c->sc.w, lags ? c->t : c->sc.s, MOVED + MISSING);
    cr_expect_eq(stats_of(&c->sc.w).reclaims, lags, "it has moved in another tier");
    c->rest = take(&c->sc.w, MISSING, c->t);
    cr_expect_eq(stats_of(&c->sc.w).mapped_bytes, c->sc.setup.pool.max_mapped);
    keep_busy(&c->sc.w, c->behind);
}

static void end_capped(struct capped *c, vpmm_status status)
{
    let_go(AT_ALLOW);
    pthread_join(c->b.thread, NULL);
    cr_assert_eq(c->b.status, status, "%s", vpmm_status_name(c->b.status));
    cr_expect_eq(stats_of(&c->sc.w).reclaims, 1);
    cr_expect_eq(stats_of(&c->sc.w).mapped_bytes, c->sc.setup.pool.max_mapped);
}

static void close_capped(struct capped *c)
{
    give(&c->sc.w, c->b.pointer, c->sc.s);
    close_builders(&c->sc.w);
}

/* The others keep it: the request fails, once, and is served when there is enough. */
static void fail_where_the_cap_is_used_up(bool lags)
{
    static struct capped c;
    use_up_the_cap(&c, lags);
    end_capped(&c, VPMM_ERROR_OUT_OF_MEMORY);
    expect_the_part_is_free(&c.sc);
    free_held(&c.sc);
    c.b.pointer = take(&c.sc.w, MOVED + MISSING, c.sc.s);
    cr_expect_eq(stats_of(&c.sc.w).mapped_bytes, c.sc.setup.pool.max_mapped);
    give(&c.sc.w, c.rest, c.t);
    close_capped(&c);
}

Test(builders, what_was_moved_is_free_where_others_use_up_the_cap, .timeout = 60)
{
    fail_where_the_cap_is_used_up(false);
}
Test(builders, what_the_last_tier_has_moved_is_free_where_others_use_up_the_cap, .timeout = 60)
{
    fail_where_the_cap_is_used_up(true);
}

/* The second plan has none for the rest, and the last tier moves what others have freed behind their work. */
static void move_where_the_cap_is_used_up(bool lags)
{
    static struct capped c;
    use_up_the_cap(&c, lags);
    free_held_on(&c.sc, c.behind, 0, MOVED);
    end_capped(&c, VPMM_SUCCESS);
    cr_expect_eq(stats_of(&c.sc.w).extents_remapped, MOVED + MISSING, "what was moved has moved again");
    give(&c.sc.w, c.rest, c.t);
    close_capped(&c);
}

Test(builders, the_last_tier_goes_on_where_others_use_up_the_cap, .timeout = 60)
{
    move_where_the_cap_is_used_up(false);
}
Test(builders, the_last_tier_plans_its_second_part_without_the_cap, .timeout = 60)
{
    move_where_the_cap_is_used_up(true);
}

/* The rights change while it maps, so it gives them again, and is overtaken between two calls: nothing is placed. */
Test(builders, who_gives_rights_again_takes_what_is_freed_meanwhile, .timeout = 60)
{
    enum { PAGES = 32, PEER = 1 };
    struct world w;
    struct setup setup = setup_default();
    struct malloc_thread b;
    setup.sim.devices = 2;
    CUstream s = open_pages(&w, &setup);
    CUdeviceptr p = take(&w, PAGES, s);
    start_and_park_at(AT_ALLOW, &b, &w, s, PAGES);
    must_work(vpmm_pool_set_access(w.pool, PEER, CU_MEM_ACCESS_FLAGS_PROT_READWRITE));
    stand_still_in_the_next(AT_ALLOW); /* the last call of those that give the old rights, */
    stand_still_in_the_next(AT_ALLOW); /* and the first that gives the new ones */
    give(&w, p, s);
    let_go(AT_ALLOW);
    pthread_join(b.thread, NULL);
    cr_assert_eq(b.status, VPMM_SUCCESS);
    cr_expect(stats_of(&w).unwound_overtaken == 1 && stats_of(&w).mapped_bytes == PAGES * PAGE);
    give(&w, b.pointer, s);
    close_builders(&w);
}

/* What the driver does not unmap then is not lost, and no concern of the request's. */
Test(builders, what_is_overtaken_is_unmapped_when_the_driver_lets_it, .timeout = 60)
{
    enum { PAGES = 16 };
    struct world w;
    struct setup setup = setup_default();
    struct malloc_thread b;
    CUstream s = open_pages(&w, &setup);
    CUdeviceptr p = take(&w, PAGES, s);
    start_and_park_at(AT_ALLOW, &b, &w, s, PAGES);
    give(&w, p, s);
    atomic_store(&keeps_mappings, true);
    let_go(AT_ALLOW);
    end(&b);
    cr_expect_eq(stats_of(&w).quarantined_bytes, PAGES * PAGE);
    world_audit(&w);
    atomic_store(&keeps_mappings, false);
    world_drain(&w);
    cr_expect_eq(stats_of(&w).quarantined_bytes, 0);
    close_builders(&w);
}

/* Where nothing may be waited for the driver is asked whether what was freed there has passed. */
Test(builders, who_creates_takes_what_has_passed_of_another_stream_s, .timeout = 60)
{
    struct overtaking passed = {
        .pages = 16, .freed = 16, .call = AT_CREATE, .on_another = true, .reuse = VPMM_REUSE_COMPLETED};
    struct overtaking behind = passed;
    behind.lag = true;
    overtake(&passed);
    cr_expect_eq(passed.mapped, 17, "%zu pages, where 16 of 17 were free", passed.mapped);
    overtake(&behind);
    cr_expect_eq(behind.mapped, 33, "%zu pages, where 16 of 17 were still in use", behind.mapped);
}

/* But not for less than half of what it makes. */
Test(builders, who_creates_asks_what_has_passed_when_much_was_freed, .timeout = 60)
{
    struct overtaking less = {
        .pages = 16, .freed = 7, .call = AT_CREATE, .on_another = true, .reuse = VPMM_REUSE_COMPLETED};
    struct overtaking half = less;
    half.freed = 8;
    overtake(&less);
    cr_expect_eq(less.asked, 0, "%u questions, where 7 pages were freed and 16 are made", less.asked);
    overtake(&half);
    cr_expect_gt(half.asked, 0, "no question, where 8 pages were freed and 16 are made");
}

Test(builders, who_creates_waits_for_what_another_stream_frees, .timeout = 60)
{
    struct overtaking device = {
        .pages = 16, .freed = 16, .call = AT_CREATE, .on_another = true, .lag = true, .reuse = VPMM_REUSE_WAIT_DEVICE};
    overtake(&device);
    cr_expect_eq(device.mapped, 17, "%zu pages, where 16 of 17 could be waited for", device.mapped);
    cr_expect_eq(device.waited, 1, "it did not wait");
}

/* It is undone before its thread waits: nothing of it is in hand meanwhile but what it waits for, nor is the turn. */
Test(builders, who_waits_on_the_host_for_what_is_freed_has_undone_its_build, .timeout = 60)
{
    enum { PAGES = 16 };
    struct world w;
    struct setup setup = setup_default();
    struct malloc_thread b;
    setup.pool.reuse = VPMM_REUSE_WAIT_HOST;
    CUstream s = open_pages(&w, &setup), t = world_stream(&w);
    CUdeviceptr p = take(&w, PAGES, t);
    start_and_park_at(AT_ALLOW, &b, &w, s, PAGES);
    keep_busy(&w, t);
    give(&w, p, t);
    atomic_store(&parks[AT_SYNCHRONIZE], true);
    let_go(AT_ALLOW);
    while (!atomic_load(&parked[AT_SYNCHRONIZE]))
        clock_sleep_us(LOOK_US);
    vpmm_stats now = stats_of(&w);
    cr_expect(now.unwound_overtaken == 1 && now.mapped_bytes == PAGES * PAGE && now.quarantined_bytes == 0);
    cr_expect(turn_of(&w)->first == NULL, "the turn is a thread's that waits for the GPU");
    let_go(AT_SYNCHRONIZE);
    end(&b);
    close_builders(&w);
}

/* When no wait is made, the next plan moves it. */
Test(builders, what_is_freed_and_cannot_be_waited_for_is_free_again, .timeout = 60)
{
    enum { PAGES = 16 };
    struct world w;
    struct setup setup = setup_default();
    struct malloc_thread b;
    setup.pool.reuse = VPMM_REUSE_WAIT_DEVICE;
    CUstream s = open_pages(&w, &setup), t = world_stream(&w);
    CUdeviceptr p = take(&w, PAGES, t);
    start_and_park(&b, &w, s, PAGES);
    keep_busy(&w, t);
    give(&w, p, t);
    atomic_store(&refused_waits, TIER_4_TRIES);
    let_go(AT_CREATE);
    pthread_join(b.thread, NULL);
    cr_assert_eq(b.status, VPMM_SUCCESS);
    cr_expect(stats_of(&w).unwound_overtaken == 1 && stats_of(&w).hits_waited == 0);
    cr_expect(stats_of(&w).extents_remapped == PAGES && stats_of(&w).mapped_bytes == PAGES * PAGE);
    give(&w, b.pointer, s);
    close_builders(&w);
}

/* A wait that is refused once, for a moment, makes the pool no larger. */
static void wait_when_one_is_refused(vpmm_reuse reuse, size_t bytes)
{
    struct world w;
    struct setup setup = setup_default();
    setup.pool.reuse = reuse;
    setup.pool.cache_bytes = 0;
    CUstream s = open_pages(&w, &setup), t = world_stream(&w);
    CUdeviceptr p = take_bytes(&w, bytes, t), wall = take_bytes(&w, PAGE / 16, t); /* a page stays cut */
    uint64_t mapped = stats_of(&w).mapped_bytes;
    keep_busy(&w, t);
    give(&w, p, t);
    atomic_store(&refused_waits, 1);
    CUdeviceptr q = take_bytes(&w, bytes, s);
    cr_expect(atomic_load(&refused_waits) < 0, "it has not waited");
    cr_expect_eq(stats_of(&w).mapped_bytes, mapped, "more was made beside %zu bytes", bytes);
    cr_expect_eq(stats_of(&w).extents_remapped, 0);
    give(&w, q, s);
    give(&w, wall, t);
    close_builders(&w);
}

Test(builders, a_refused_wait_is_asked_for_again, .timeout = 60)
{
    static const size_t bytes[] = {PAGE / 4 * 3, 2 * PAGE}; /* of a page that is cut, the rest does not do */
    for (int i = 0; i < 2; i++) {
        wait_when_one_is_refused(VPMM_REUSE_WAIT_DEVICE, bytes[i]);
        wait_when_one_is_refused(VPMM_REUSE_WAIT_HOST, bytes[i]);
    }
}

/* All waits are refused, tier 4's and those of the build that then moves the memory. */
static void fail_when_all_are_refused(size_t bytes)
{
    struct world w;
    struct setup setup = setup_default();
    setup.pool.reuse = VPMM_REUSE_WAIT_DEVICE;
    setup.pool.cache_bytes = 0;
    CUstream s = open_pages(&w, &setup), t = world_stream(&w);
    CUdeviceptr p = take_bytes(&w, bytes, t), q;
    uint64_t mapped = stats_of(&w).mapped_bytes;
    keep_busy(&w, t);
    give(&w, p, t);
    atomic_store(&refused_waits, INT_MAX);
    vpmm_status status = vpmm_malloc(w.pool, bytes, s, &q);
    cr_expect(status == VPMM_ERROR_DRIVER && strstr(vpmm_last_error(), "cuStreamWaitEvent"), "%s: %s",
              vpmm_status_name(status), vpmm_last_error());
    atomic_store(&refused_waits, 0);
    give(&w, take_bytes(&w, bytes, s), s);
    cr_expect_eq(stats_of(&w).mapped_bytes, mapped);
    close_builders(&w);
}

Test(builders, where_no_wait_is_made_a_malloc_ends, .timeout = 60)
{
    fail_when_all_are_refused(PAGE / 4 * 3);
    fail_when_all_are_refused(2 * PAGE);
}

/* ---- what another thread takes spoils plans ---- */

enum wish { NOTHING, TAKE, GIVE, END };

/*
 * It has pages whenever a plan is about to be claimed, and none when the next is made. Where it finds none it stands in
 * line for some, and the plan is claimed.
 */
static struct spoiler {
    struct world *w;
    CUstream stream;
    pthread_t thread;
    _Atomic(enum wish) wish;
    size_t pages; /* that it takes */
    CUdeviceptr held;
    unsigned times, lines; /* that it takes them, and that it stands in line for them */
    uint64_t others;       /* free regions that it then finds too short, the first time */
} spoiler;

static void *spoil(void *unused)
{
    enum wish wish;
    while ((wish = atomic_load(&spoiler.wish)) != END) {
        if (wish == TAKE && !spoiler.held && ++spoiler.times)
            spoiler.held = take(spoiler.w, spoiler.pages, spoiler.stream);
        else if (wish == GIVE && spoiler.held) {
            give(spoiler.w, spoiler.held, spoiler.stream);
            spoiler.held = 0;
        }
        atomic_compare_exchange_strong(&spoiler.wish, &wish, NOTHING); /* there may be another one by now */
        clock_yield();
    }
    return unused;
}

static uint64_t free_regions(const struct world *w)
{
    const struct arena *arena = &w->pool->arena;
    uint64_t regions = hints_count(&arena->space.passed);
    for (uint32_t slot = 1; slot < atomic_load(&arena->streams.slots); slot++)
        regions += hints_count(&stream_at(&arena->streams, slot)->free[SPACE_PAGES]);
    return regions;
}

static void make_spoiler(enum wish wish)
{
    if (!is_spoiled)
        return;
    atomic_store(&spoiler.wish, wish);
    bool in_line = false;
    while (atomic_load(&spoiler.wish) == wish && !in_line) {
        clock_yield();
        in_line = atomic_load(&spoiler.w->pool->arena.space.await.waiting);
    }
    if (in_line && wish == TAKE && !spoiler.lines++)
        spoiler.others = free_regions(spoiler.w);
}

static void start_spoiler(struct world *w, CUstream stream, size_t pages)
{
    spoiler = (struct spoiler){.w = w, .stream = stream, .pages = pages};
    cr_assert_eq(pthread_create(&spoiler.thread, NULL, spoil, NULL), 0);
    is_spoiled = true;
}

/* Of the thread that stands still, and goes on later. */
static void start_spoiler_of_another(struct world *w, CUstream stream)
{
    start_spoiler(w, stream, 1);
    is_spoiled = false;
    atomic_store(&spoils_who_goes_on, true);
}

static void end_spoiler(void)
{
    is_spoiled = false;
    atomic_store(&spoiler.wish, GIVE);
    while (atomic_load(&spoiler.wish) == GIVE)
        clock_yield();
    atomic_store(&spoiler.wish, END);
    pthread_join(spoiler.thread, NULL);
}

void *__real_calloc(size_t, size_t);
void *__wrap_calloc(size_t, size_t);
void *__real_realloc(void *, size_t);
void *__wrap_realloc(void *, size_t);
void __real_free(void *);
void __wrap_free(void *);

static _Thread_local struct freed { /* by another thread, when the calling one allocates the next record */
    struct world *w;
    CUdeviceptr page;
    CUstream stream;
} freed_next;

static void *free_it(void *freed)
{
    const struct freed *f = freed;
    give(f->w, f->page, f->stream);
    atomic_store(&refuses_marks, false);
    return NULL;
}

static void free_beside(void)
{
    pthread_t thread;
    struct freed now = freed_next;
    freed_next.page = 0;
    if (now.page && pthread_create(&thread, NULL, free_it, &now) == 0)
        pthread_join(thread, NULL);
}

static _Thread_local struct arena *watched; /* by the calling thread; NULL: none */
static uint64_t longest_seen; /* pages free in it, when records are allocated after something has moved; 1: none */

static void watch(void)
{
    if (!watched || !stats_sum(watched->stats, STAT_extents_remapped))
        return;
    uint64_t longest = hints_longest(&watched->space.passed, &watched->space.units, UNIT_FREE);
    for (uint32_t slot = 1; slot < atomic_load(&watched->streams.slots); slot++) {
        uint64_t more =
            hints_longest(&stream_at(&watched->streams, slot)->free[SPACE_PAGES], &watched->space.units, UNIT_FREE);
        longest = more > longest ? more : longest;
    }
    longest_seen = longest + 1 > longest_seen ? longest + 1 : longest_seen;
}

static struct arena *_Atomic short_of_records; /* where the next may be refused */

/* The simulator's are not under the plan lock. */
static bool is_record_refused(void)
{
    return atomic_load(&records_left) >= 0 && malloc_thread_stream() &&
           lock_is_taken(&atomic_load(&short_of_records)->plan_lock) && atomic_fetch_sub(&records_left, 1) == 0;
}

void *__wrap_realloc(void *p, size_t size)
{
    return is_record_refused() ? NULL : __real_realloc(p, size);
}

/* A plan's records are allocated before its memory is claimed, */
void *__wrap_calloc(size_t n, size_t size)
{
    free_beside();
    watch();
    make_spoiler(TAKE);
    return is_record_refused() ? NULL : __real_calloc(n, size);
}

/* and freed before the next plan is made. */
void __wrap_free(void *p)
{
    make_spoiler(GIVE);
    __real_free(p);
}

/* Six free pages are to be moved, of which one is in other hands whenever a plan is claimed: nobody has it at last. */
Test(builders, what_the_last_plan_is_made_of_is_in_hand, .timeout = 60)
{
    enum { FREE = 6, TRIES = 2 };
    struct world w;
    struct setup setup = setup_default();
    CUdeviceptr page[FREE], wall[FREE];
    CUstream s = open_pages(&w, &setup);
    for (int i = 0; i < FREE; i++) {
        page[i] = take(&w, 1, s);
        wall[i] = take(&w, 1, s);
    }
    for (int i = 0; i < FREE; i++)
        give(&w, page[i], s);
    start_spoiler(&w, s, 1);
    CUdeviceptr p = take(&w, FREE, s);
    end_spoiler();
    cr_expect(spoiler.times == TRIES + 1 && spoiler.lines > 0, "%u plans were to be spoiled, %u not", spoiler.times,
              spoiler.lines);
    cr_expect_eq(stats_of(&w).extents_remapped, FREE);
    cr_expect_eq(stats_of(&w).mapped_bytes / PAGE, 2 * FREE + 1, "more was made than a page for who stood in line");
    give(&w, p, s);
    for (int i = 0; i < FREE; i++)
        give(&w, wall[i], s);
    close_builders(&w);
}

/* Nobody else could take what the first part has made, while the rest is planned. */
Test(builders, what_the_first_part_has_made_is_in_hand, .timeout = 60)
{
    static struct scattered sc;
    open_scattered(&sc);
    watched = &sc.w.pool->arena;
    longest_seen = 0;
    CUdeviceptr p = take(&sc.w, MOVED + MISSING, sc.s);
    watched = NULL;
    cr_expect_lt(longest_seen, MOVED, "%llu pages were free", (unsigned long long)longest_seen);
    cr_expect_gt(longest_seen, 0, "the rest was planned before the first part was done");
    give(&sc.w, p, sc.s);
    free_held(&sc);
    close_builders(&sc.w);
}

/* Others have a page of what the rest is moved from whenever it is claimed. At last all is in hand, as the part is. */
Test(builders, the_rest_is_planned_with_the_part_and_what_is_kept, .timeout = 60)
{
    enum { TRIES = 2 };
    static struct scattered sc;
    struct malloc_thread b;
    open_scattered(&sc);
    uint64_t mapped = stats_of(&sc.w).mapped_bytes;
    start_to_move(&sc, &b);
    free_held_on(&sc, sc.s, 0, MISSING);
    start_spoiler_of_another(&sc.w, sc.s);
    let_go(AT_ALLOW);
    pthread_join(b.thread, NULL);
    end_spoiler();
    cr_assert_eq(b.status, VPMM_SUCCESS);
    cr_expect(spoiler.times == TRIES + 1 && spoiler.lines > 0, "%u plans were to be spoiled, %u not", spoiler.times,
              spoiler.lines);
    cr_expect_eq(stats_of(&sc.w).extents_remapped, MOVED + MISSING, "the part was not extended");
    cr_expect_eq(stats_of(&sc.w).mapped_bytes - mapped, PAGE, "more was made than a page for who stood in line");
    give(&sc.w, b.pointer, sc.s);
    free_held_on(&sc, sc.s, MISSING, MOVED);
    close_builders(&sc.w);
}

/* So many pages are freed between the parts; then a record of the plan of the rest is refused. False: none was left. */
static bool refuse_record(int record, int freed, bool spoils)
{
    static struct scattered sc;
    struct malloc_thread b;
    open_scattered(&sc);
    uint64_t mapped = stats_of(&sc.w).mapped_bytes;
    atomic_store(&short_of_records, &sc.w.pool->arena);
    start_to_move(&sc, &b);
    free_held_on(&sc, sc.s, 0, freed);
    if (spoils)
        start_spoiler_of_another(&sc.w, sc.s);
    atomic_store(&records_left, record);
    let_go(AT_ALLOW);
    pthread_join(b.thread, NULL);
    if (spoils)
        end_spoiler();
    bool was_refused = atomic_exchange(&records_left, -1) < 0;
    require(b.status == (was_refused ? VPMM_ERROR_HOST_MEMORY : VPMM_SUCCESS), "record %d: %s", record,
            vpmm_status_name(b.status));
    if (was_refused) { /* and nothing is in the way of the next */
        expect_the_part_is_free(&sc);
        b.pointer = take(&sc.w, MOVED + MISSING, sc.s);
    }
    size_t made = (size_t)(MISSING - freed + (spoils && !was_refused)); /* a page for who stood in line */
    cr_expect_eq(stats_of(&sc.w).mapped_bytes - mapped, made * PAGE, "record %d", record);
    give(&sc.w, b.pointer, sc.s);
    free_held_on(&sc, sc.s, freed, MOVED);
    close_builders(&sc.w);
    return was_refused;
}

/* Some of the rest is moved, and some made. */
Test(builders, each_record_of_the_rest_may_be_refused, .timeout = 60)
{
    enum { FREED = MISSING / 2 };
    int records = 0;
    while (refuse_record(records, FREED, false))
        records++;
    cr_expect_geq(records, FREED + 5, "%d were refused, where each page that moves has one", records);
}

/* So it is while what is kept becomes more, since plans are spoiled. */
Test(builders, each_record_may_be_refused_while_the_rest_is_planned_again, .timeout = 60)
{
    enum { PLANS = 3 };
    int records = 0;
    while (refuse_record(records, MISSING, true))
        records++;
    cr_expect_geq(records, PLANS * MISSING, "%d were refused", records);
}

/* Others have the rest: twice what is asked for is in hand. */
Test(builders, what_the_last_plan_does_not_need_is_free, .timeout = 60)
{
    enum { FREE = 32, WANTED = 4, TRIES = 2 };
    struct world w;
    struct setup setup = setup_default();
    CUdeviceptr piece[FREE], wall[FREE];
    CUstream s = open_pages(&w, &setup);
    for (int i = 0; i < FREE; i++) {
        piece[i] = take(&w, i < FREE / 2 ? 2 : 1, s);
        wall[i] = take(&w, 1, s);
    }
    uint64_t mapped = stats_of(&w).mapped_bytes;
    for (int i = 0; i < FREE; i++)
        give(&w, piece[i], s);
    start_spoiler(&w, s, 2); /* as long as those of which a plan is made first */
    CUdeviceptr p = take(&w, WANTED, s);
    end_spoiler();
    cr_expect(spoiler.times == TRIES + 1 && spoiler.lines == 0, "%u plans were to be spoiled, %u not", spoiler.times,
              spoiler.lines);
    cr_expect_eq(stats_of(&w).mapped_bytes, mapped, "a page was made beside those that are free");
    give(&w, p, s);
    for (int i = 0; i < FREE; i++)
        give(&w, wall[i], s);
    close_builders(&w);
}

/* Free pieces of handles that are in use are met before whole handles, and cannot move. */
Test(builders, what_the_last_plan_is_made_of_can_move, .timeout = 60)
{
    enum { HANDLE = 16, BROKEN = 12, WHOLE = 4, WANTED = 3 * HANDLE + 8 };
    struct world w;
    struct setup setup = setup_default();
    CUdeviceptr broken[BROKEN], whole[WHOLE], rest[BROKEN], wall[WHOLE];
    setup.pool.extent_size = HANDLE * PAGE;
    setup.pool.cache_bytes = 0;
    open_builders(&w, &setup);
    CUstream s = world_stream(&w);
    for (int i = 0; i < BROKEN; i++) {
        give(&w, take(&w, HANDLE, s), s);
        rest[i] = take(&w, 1, s);
        broken[i] = take(&w, HANDLE - 1, s);
    }
    for (int i = 0; i < WHOLE; i++) {
        whole[i] = take(&w, HANDLE, s);
        wall[i] = take(&w, 1, s);
    }
    for (int i = 0; i < BROKEN; i++)
        give(&w, broken[i], s);
    for (int i = 0; i < WHOLE; i++)
        give(&w, whole[i], s);
    uint64_t mapped = stats_of(&w).mapped_bytes, moved = stats_of(&w).extents_remapped;
    start_spoiler(&w, s, HANDLE);
    CUdeviceptr p = take(&w, WANTED, s);
    end_spoiler();
    cr_expect(spoiler.times > 2 && spoiler.lines > 0, "%u plans were to be spoiled", spoiler.times);
    cr_expect_geq(spoiler.others, BROKEN - 1, "%llu pieces were left to others, where a plan has kept one to extend it",
                  (unsigned long long)spoiler.others);
    cr_expect_eq(stats_of(&w).extents_remapped - moved, WHOLE);
    cr_expect_leq(stats_of(&w).mapped_bytes - mapped, HANDLE * PAGE, "%llu more",
                  (unsigned long long)(stats_of(&w).mapped_bytes - mapped) / PAGE);
    give(&w, p, s);
    for (int i = 0; i < BROKEN; i++)
        give(&w, rest[i], s);
    for (int i = 0; i < WHOLE; i++)
        give(&w, wall[i], s);
    close_builders(&w);
}

/* What is freed after the plan has seen what is free, and before it is claimed, is found as well. */
Test(builders, who_creates_takes_what_was_freed_behind_its_plan, .timeout = 60)
{
    enum { PAGES = 16 };
    struct world w;
    struct setup setup = setup_default();
    CUstream s = open_pages(&w, &setup);
    CUdeviceptr p = take(&w, PAGES, s), wall = take(&w, 1, s);
    freed_next = (struct freed){&w, p, s};
    CUdeviceptr q = take(&w, PAGES, s);
    cr_expect_eq(freed_next.page, 0);
    cr_expect_eq(stats_of(&w).mapped_bytes / PAGE, PAGES + 1);
    give(&w, q, s);
    give(&w, wall, s);
    close_builders(&w);
}

/* Plans are spoiled, and another stream frees what serves, behind its work, before it is looked for again. */
static void spoil_and_free_elsewhere(bool is_marked)
{
    enum { FREE = 4 };
    struct world w;
    struct setup setup = setup_default();
    CUdeviceptr page[FREE], wall[FREE];
    setup.pool.reuse = VPMM_REUSE_WAIT_DEVICE;
    CUstream s = open_pages(&w, &setup), t = world_stream(&w);
    CUdeviceptr p = take(&w, FREE, t), behind = take(&w, 1, t);
    for (int i = 0; i < FREE; i++) {
        page[i] = take(&w, 1, s);
        wall[i] = take(&w, 1, s);
    }
    for (int i = 0; i < FREE; i++)
        give(&w, page[i], s);
    keep_busy(&w, t);
    start_spoiler(&w, s, 1);
    planned_in = &w;
    atomic_store(&refuses_marks, !is_marked);
    freed_next = (struct freed){&w, p, t};
    p = take(&w, FREE, s);
    end_spoiler();
    cr_expect(spoiler.times > 0 && freed_next.page == 0, "no plan was spoiled");
    cr_expect(stats_of(&w).hits_waited == 1 && stats_of(&w).mapped_bytes / PAGE == 3 * FREE + 1);
    cr_expect(stats_of(&w).unwound_overtaken == 0 && stats_of(&w).extents_remapped == 0);
    give(&w, p, s);
    give(&w, behind, t);
    for (int i = 0; i < FREE; i++)
        give(&w, wall[i], s);
    close_builders(&w);
}

Test(builders, who_plans_again_waits_for_what_another_stream_has_freed, .timeout = 60)
{
    spoil_and_free_elsewhere(true);
}

/* Nor does anybody ask the driver about a mark while others wait for the plan lock. */
Test(builders, who_plans_looks_at_what_others_free_without_the_driver, .timeout = 60)
{
    spoil_and_free_elsewhere(false);
    cr_expect_eq(calls_under_lock, 0, "the driver was called %u times under the plan lock", calls_under_lock);
}

/* What was found may be more than is asked for: others have the rest before the build is undone. */
Test(builders, who_is_overtaken_holds_no_more_than_it_asked_for, .timeout = 60)
{
    enum { FREED = 64, WANTED = 2 };
    struct world w;
    struct setup setup = setup_default();
    struct malloc_thread b;
    CUstream s = open_pages(&w, &setup);
    CUdeviceptr p = take(&w, FREED, s);
    start_and_park_at(AT_ALLOW, &b, &w, s, WANTED);
    give(&w, p, s);
    atomic_store(&parks[AT_UNMAP], true);
    let_go(AT_ALLOW);
    while (!atomic_load(&parked[AT_UNMAP]))
        clock_sleep_us(LOOK_US);
    CUdeviceptr rest = take(&w, FREED - WANTED, s);
    cr_expect_eq(stats_of(&w).mapped_bytes / PAGE, FREED, "new memory, while free memory is in a builder's hands");
    let_go(AT_UNMAP);
    end(&b);
    give(&w, rest, s);
    close_builders(&w);
}

/* ---- patience ---- */

/* A builder that does not come to an end is waited for, and not for ever: malloc, and giving memory back. */
Test(builders, the_others_build_beside_one_that_stands_still, .timeout = 60)
{
    struct world w;
    struct setup setup = setup_default();
    open_builders(&w, &setup);
    CUstream s = world_stream(&w);
    struct malloc_thread first;
    start_and_park(&first, &w, s, 3);
    uint64_t begin = clock_now_ns();
    CUdeviceptr p = take(&w, 2, s);
    cr_expect_geq(clock_now_ns() - begin, TURN_LONGEST_NS, "the call that it is in was not waited for");
    give(&w, p, s);
    world_drain(&w);
    must_work(vpmm_trim(w.pool, 0, NULL));
    cr_expect(atomic_load(&parked[AT_CREATE]) && !atomic_load(&first.done));
    let_go(AT_CREATE);
    end(&first);
    close_builders(&w);
}

/* How often this thread has slept: unlike time, it does not tell of a busy machine. */
static long sleeps(void)
{
    struct rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_nvcsw;
}

/* The same builder is waited for once, and once more for what it has in its hands, not for each extent. */
Test(builders, trim_waits_once_for_one_that_stands_still, .timeout = 60)
{
    enum { EXTENTS = 400 };
    struct world w;
    struct setup setup = setup_default();
    CUstream s = open_pages(&w, &setup);
    struct malloc_thread first;
    CUdeviceptr p = take(&w, EXTENTS, s);
    start_and_park(&first, &w, s, 3);
    give(&w, p, s);
    world_drain(&w);
    uint64_t begin = clock_now_ns(), released = stats_of(&w).extents_released;
    long slept = sleeps();
    must_work(vpmm_trim(w.pool, 0, NULL));
    cr_expect_geq(clock_now_ns() - begin, TURN_PATIENCE_NS, "nobody was waited for");
    slept = sleeps() - slept;
    released = stats_of(&w).extents_released - released;
    cr_expect_geq(released, EXTENTS / 4);
    cr_expect_lt(slept, (long)released / 2, "it slept %ld times over %llu extents", slept,
                 (unsigned long long)released);
    let_go(AT_CREATE);
    end(&first);
    close_builders(&w);
}

/* Idle memory is given back when nobody builds, and not beside a build. */
Test(builders, idle_memory_stays_while_one_builds, .timeout = 60)
{
    struct world w;
    struct setup setup = setup_default();
    setup.pool.decay_ms = 0;
    open_builders(&w, &setup);
    CUstream s = world_stream(&w);
    struct malloc_thread first;
    CUdeviceptr p = take(&w, 40, s);
    start_and_park(&first, &w, s, 3);
    give(&w, p, s);
    world_step(&w);
    for (int i = 0; i < 10; i++)
        must_work(vpmm_poll(w.pool));
    cr_expect_eq(stats_of(&w).decayed_bytes, 0, "memory was given back beside a malloc that builds");
    let_go(AT_CREATE);
    end(&first);
    world_drain(&w);
    cr_expect_geq(stats_of(&w).decayed_bytes, 40 * PAGE);
    close_builders(&w);
}

/* ---- who has the turn builds for those who wait ---- */

/* One thread stands still with the turn, and the others wait behind it in this order, each for `more` than the last. */
struct line {
    struct world w;
    struct malloc_thread first, waiter[WAITERS];
};

static void form_line_behind(size_t first, struct line *l, const CUstream stream[WAITERS], size_t pages, size_t more)
{
    slow_clock();
    start_and_park(&l->first, &l->w, world_stream(&l->w), first);
    for (unsigned i = 0; i < WAITERS; i++) {
        malloc_thread_start(&l->waiter[i], &l->w, stream[i], pages + i * more);
        wait_for_waiters(&l->w, i + 1);
    }
}

static void form_line(struct line *l, const CUstream stream[WAITERS], size_t pages, size_t more)
{
    form_line_behind(2, l, stream, pages, more);
}

static void open_line(struct line *l, struct setup *setup, CUstream stream[WAITERS])
{
    open_builders(&l->w, setup);
    for (int i = 0; i < WAITERS; i++)
        stream[i] = world_stream(&l->w);
}

static void end_line(struct line *l)
{
    end(&l->first);
    for (int i = 0; i < WAITERS; i++)
        end(&l->waiter[i]);
}

/* In the first call that creates after the first thread, for another if it may be served. */
static void stand_still_while_it_serves(void)
{
    stand_still_in_the_next(AT_CREATE);
}

static void expect_served(const struct malloc_thread *waiter)
{
    struct turn *turn = turn_of(waiter->w);
    pthread_mutex_lock(&turn->lock);
    struct turn_request request = turn->served ? turn->served->request : (struct turn_request){0};
    pthread_mutex_unlock(&turn->lock);
    cr_assert(request.stream, "nobody is served");
    cr_expect(request.pages == waiter->pages && request.stream->handle == waiter->stream);
}

/* The next one has the turn, and builds for who waits after it, and then for itself. */
Test(builders, who_has_the_turn_builds_for_the_next_one, .timeout = 60)
{
    static struct line l;
    struct setup setup = setup_default();
    CUstream stream[WAITERS];
    open_line(&l, &setup, stream);
    form_line(&l, stream, 3, 1);
    uint64_t builds = stats_of(&l.w).builds;
    stand_still_while_it_serves();
    expect_served(&l.waiter[1]);
    cr_expect_not(atomic_load(&l.waiter[0].done), "it builds for itself first");
    let_go(AT_CREATE);
    end_line(&l);
    cr_expect_eq(stats_of(&l.w).builds - builds, WAITERS + 1);
    close_builders(&l.w);
}

/* More than 256 MiB. */
Test(builders, what_takes_long_each_builds_itself, .timeout = 60)
{
    static struct line l;
    struct setup setup = setup_default();
    CUstream stream[WAITERS];
    open_line(&l, &setup, stream);
    form_line(&l, stream, ((size_t)256 << 20) / PAGE + 1, 0);
    stand_still_while_it_serves();
    cr_expect(!turn_of(&l.w)->served, "it builds for another");
    let_go(AT_CREATE);
    end_line(&l);
    close_builders(&l.w);
}

/* Two wait in line, and the first of them stands still in such a call while it builds for the second. */
static void serve_the_second_at(int call, struct world *w, struct malloc_thread waiter[2], const CUstream stream[2],
                                const size_t pages[2])
{
    struct turn_place mine;
    slow_clock();
    turn_take(turn_of(w), &mine);
    for (unsigned i = 0; i < 2; i++) {
        malloc_thread_start(&waiter[i], w, stream[i], pages[i]);
        wait_for_waiters(w, i + 1);
    }
    atomic_store(&parks[call], true);
    turn_leave(turn_of(w), &mine);
    while (!atomic_load(&parked[call]))
        clock_sleep_us(LOOK_US);
    expect_served(&waiter[1]);
}

/* Though one thread builds for both: see ends.h. */
Test(builders, two_that_ask_are_several_builders, .timeout = 60)
{
    static struct line l;
    struct setup setup = setup_default();
    CUstream stream[WAITERS];
    open_line(&l, &setup, stream);
    serve_the_second_at(AT_CREATE, &l.w, l.waiter, stream, (const size_t[]){3, 4});
    cr_expect_eq(atomic_load(&l.w.pool->arena.several_builders), 1);
    let_go(AT_CREATE);
    for (int i = 0; i < 2; i++)
        end(&l.waiter[i]);
    close_builders(&l.w);
}

/* What is scattered is moved for the second of two in line, and who builds for it stands still meanwhile. */
static void serve_what_is_scattered(struct scattered *sc, struct malloc_thread waiter[2])
{
    const CUstream stream[2] = {sc->s, sc->s};
    serve_the_second_at(AT_ALLOW, &sc->w, waiter, stream, (const size_t[]){2, MOVED + MISSING});
}

/* What others free meanwhile is moved for it too, by the same thread. */
Test(builders, the_rest_for_another_is_planned_anew, .timeout = 60)
{
    static struct scattered sc;
    struct malloc_thread waiter[2];
    open_scattered(&sc);
    uint64_t mapped = stats_of(&sc.w).mapped_bytes, builds = stats_of(&sc.w).builds;
    serve_what_is_scattered(&sc, waiter);
    free_held(&sc);
    for (int i = 0; i < CALLS_A_PART; i++)
        stand_still_in_the_next(AT_ALLOW);
    cr_expect_eq(stats_of(&sc.w).extents_remapped, MOVED, "it is not at the second part");
    expect_served(&waiter[1]);
    cr_expect_not(atomic_load(&waiter[0].done), "it has built for itself first");
    let_go(AT_ALLOW);
    for (int i = 0; i < 2; i++)
        end(&waiter[i]);
    cr_expect_eq(stats_of(&sc.w).mapped_bytes, mapped, "more was made beside what others had freed");
    cr_expect_eq(stats_of(&sc.w).builds - builds, 2);
    close_builders(&sc.w);
}

/* The rest would have to be waited for: it is left to its thread, and so is what was moved. */
Test(builders, the_rest_that_another_would_wait_for_is_left_to_it, .timeout = 60)
{
    static struct scattered sc;
    struct malloc_thread waiter[2];
    sc.setup = setup_default();
    sc.setup.pool.reuse = VPMM_REUSE_WAIT_DEVICE;
    open_scattered_as_set(&sc);
    CUstream behind = world_stream(&sc.w);
    uint64_t mapped = stats_of(&sc.w).mapped_bytes;
    serve_what_is_scattered(&sc, waiter);
    keep_busy(&sc.w, behind);
    free_held_on(&sc, behind, 0, MOVED);
    let_go(AT_ALLOW);
    for (int i = 0; i < 2; i++)
        end(&waiter[i]);
    cr_expect_eq(stats_of(&sc.w).mapped_bytes, mapped, "more was made beside what could be waited for");
    cr_expect_eq(atomic_load(&strange_waits), 0, "a thread has made another one's stream wait");
    cr_expect_eq(stats_of(&sc.w).unwound_wait, 0, "what it would have to wait for was claimed for it");
    close_builders(&sc.w);
}

/* A record of the rest is refused: who builds for another has not failed, and who is served moves it all by itself. */
Test(builders, where_the_rest_for_another_fails_it_tries_itself, .timeout = 60)
{
    static struct scattered sc;
    struct malloc_thread waiter[2];
    open_scattered(&sc);
    uint64_t mapped = stats_of(&sc.w).mapped_bytes;
    serve_what_is_scattered(&sc, waiter);
    free_held(&sc);
    atomic_store(&short_of_records, &sc.w.pool->arena);
    atomic_store(&records_left, 0);
    let_go(AT_ALLOW);
    for (int i = 0; i < 2; i++)
        end(&waiter[i]);
    cr_expect_lt(atomic_load(&records_left), 0, "none was refused");
    cr_expect_eq(stats_of(&sc.w).mapped_bytes, mapped);
    close_builders(&sc.w);
}

/* It finds memory itself between the parts. Both parts of what was built for it are everybody's, as the audit sees. */
Test(builders, who_is_served_in_parts_may_find_memory_itself, .timeout = 60)
{
    static struct scattered sc;
    struct malloc_thread waiter[2];
    open_scattered(&sc);
    CUdeviceptr whole = take_what_is_scattered(&sc);
    serve_what_is_scattered(&sc, waiter);
    give(&sc.w, whole, sc.s);
    while (!atomic_load(&waiter[1].done))
        clock_sleep_us(LOOK_US);
    cr_expect_eq(waiter[1].pointer, whole);
    let_go(AT_ALLOW);
    pthread_join(waiter[0].thread, NULL);
    cr_assert_eq(waiter[0].status, VPMM_SUCCESS);
    cr_expect_geq(stats_of(&sc.w).largest_free_bytes, (MOVED + MISSING - waiter[0].pages) * PAGE);
    world_audit(&sc.w);
    give(&sc.w, waiter[0].pointer, waiter[0].stream);
    end(&waiter[1]);
    close_builders(&sc.w);
}

/* A waiter is being served, and what it asks for is in use on its stream beside a wall. */
static void serve_beside_what_is_held(struct line *l, CUstream *s, CUdeviceptr *held, CUdeviceptr *wall)
{
    struct setup setup = setup_default();
    CUstream stream[WAITERS];
    open_line(l, &setup, stream);
    *s = stream[2] = stream[1];
    *held = take(&l->w, 5, *s);
    *wall = take(&l->w, 1, *s);
    form_line(l, stream, 4, 1);
    stand_still_while_it_serves();
    expect_served(&l->waiter[1]);
}

/* It goes with memory that comes free meanwhile. What was built for it is everybody's, as the audit sees. */
Test(builders, who_is_served_may_find_memory_itself, .timeout = 60)
{
    static struct line l;
    CUstream s;
    CUdeviceptr held, wall;
    serve_beside_what_is_held(&l, &s, &held, &wall);
    give(&l.w, held, s);
    while (!atomic_load(&l.waiter[1].done))
        clock_sleep_us(LOOK_US);
    cr_expect_eq(l.waiter[1].pointer, held);
    let_go(AT_CREATE);
    end_line(&l);
    give(&l.w, wall, s);
    close_builders(&l.w);
}

/* The same, but its answer comes before it withdraws: it has both, and the audit sees one that nobody has. */
Test(builders, who_has_found_memory_gives_back_what_was_built_for_it, .timeout = 60)
{
    static struct line l;
    CUstream s;
    CUdeviceptr held, wall;
    serve_beside_what_is_held(&l, &s, &held, &wall);
    atomic_store(&parks[AT_WITHDRAW], true);
    give(&l.w, held, s);
    while (!atomic_load(&parked[AT_WITHDRAW]))
        clock_sleep_us(LOOK_US);
    let_go(AT_CREATE);
    end(&l.first);
    end(&l.waiter[0]); /* which has handed over by now */
    end(&l.waiter[2]);
    cr_expect_not(atomic_load(&l.waiter[1].done));
    let_go(AT_WITHDRAW);
    pthread_join(l.waiter[1].thread, NULL);
    cr_expect_eq(l.waiter[1].pointer, held);
    give(&l.w, held, s);
    give(&l.w, wall, s);
    close_builders(&l.w);
}

/* Of two regions that are freed meanwhile who is served takes one itself, and its builder finds the other for it. */
Test(builders, who_builds_for_another_takes_what_is_freed_meanwhile, .timeout = 60)
{
    static struct line l;
    struct setup setup = setup_default();
    CUstream stream[WAITERS];
    CUdeviceptr held[2], wall[2];
    open_line(&l, &setup, stream);
    for (int i = 0; i < 2; i++) {
        held[i] = take(&l.w, 5, stream[1]);
        wall[i] = take(&l.w, 1, stream[1]);
    }
    form_line(&l, stream, 4, 1);
    stand_still_while_it_serves();
    expect_served(&l.waiter[1]);
    for (int i = 0; i < 2; i++)
        give(&l.w, held[i], stream[1]);
    while (!atomic_load(&l.waiter[1].done))
        clock_sleep_us(LOOK_US);
    let_go(AT_CREATE);
    end_line(&l);
    cr_expect_eq(stats_of(&l.w).unwound_overtaken, 1);
    for (int i = 0; i < 2; i++)
        give(&l.w, wall[i], stream[1]);
    close_builders(&l.w);
}

/* Who is served by a thread that stands still builds beside it, as soon as others would. */
Test(builders, who_is_served_by_one_that_stands_still_builds_itself, .timeout = 60)
{
    static struct line l;
    struct setup setup = setup_default();
    CUstream stream[WAITERS];
    open_line(&l, &setup, stream);
    form_line(&l, stream, 3, 1);
    stand_still_while_it_serves();
    expect_served(&l.waiter[1]);
    end_slow_clock();
    while (!atomic_load(&l.waiter[1].done))
        clock_sleep_us(LOOK_US);
    cr_expect(atomic_load(&parked[AT_CREATE]) && !atomic_load(&l.waiter[0].done));
    let_go(AT_CREATE);
    end_line(&l);
    close_builders(&l.w);
}

/* Each call fails in turn. A thread fails that builds for itself; who is served then does that, too, and has memory. */
Test(builders, what_fails_for_another_it_tries_itself, .timeout = 60)
{
    enum { MOST = 100 };
    static struct line l;
    int point = 0, failed_at_once = 0;
    for (bool all = false; !all && point < MOST; point++) {
        struct setup setup = setup_default();
        CUstream stream[WAITERS];
        open_line(&l, &setup, stream);
        form_line(&l, stream, 3, 1);
        stand_still_while_it_serves();
        atomic_store(&calls_left, point);
        let_go(AT_CREATE);
        int failed = 0;
        pthread_join(l.first.thread, NULL);
        for (int i = 0; i < WAITERS; i++) {
            pthread_join(l.waiter[i].thread, NULL);
            failed += l.waiter[i].status != VPMM_SUCCESS;
            if (l.waiter[i].status == VPMM_SUCCESS)
                give(&l.w, l.waiter[i].pointer, l.waiter[i].stream);
        }
        cr_expect_leq(failed, 1);
        failed_at_once += failed;
        all = atomic_exchange(&calls_left, -1) > 0;
        give(&l.w, l.first.pointer, l.first.stream);
        close_builders(&l.w);
    }
    cr_expect(point > 9 && point < MOST, "%d calls were refused in turn", point);
    cr_expect_lt(failed_at_once, point / 2, "of %d requests with a failure %d have failed", point, failed_at_once);
}

/*
 * What a stream would have to wait for is left to its thread: its handle may be gone before another has used it. Pieces
 * are freed behind work that has not run, while requests wait in line that they would serve.
 */
static void line_for_what_is_fenced(size_t each, size_t pages)
{
    static struct line l;
    struct setup setup = setup_default();
    CUstream stream[WAITERS];
    setup.pool.reuse = VPMM_REUSE_WAIT_DEVICE;
    open_line(&l, &setup, stream);
    CUstream s = world_stream(&l.w);
    CUdeviceptr piece[2 * WAITERS], wall[2 * WAITERS];
    for (int i = 0; i < 2 * WAITERS; i++) {
        piece[i] = take(&l.w, each, s);
        wall[i] = take(&l.w, 1, s);
    }
    form_line_behind(each + 1, &l, stream, pages, 0);
    keep_busy(&l.w, s);
    for (int i = 0; i < 2 * WAITERS; i++)
        give(&l.w, piece[i], s);
    uint64_t mapped = stats_of(&l.w).mapped_bytes;
    let_go(AT_CREATE);
    end_line(&l);
    cr_expect_eq(stats_of(&l.w).mapped_bytes, mapped + (each + 1) * PAGE,
                 "the pool has grown beside what could be waited for");
    cr_expect_eq(atomic_load(&strange_waits), 0, "a thread has made another one's stream wait");
    for (int i = 0; i < 2 * WAITERS; i++)
        give(&l.w, wall[i], s);
    close_builders(&l.w);
}

/* Each is made of two, or is one, which would be dearer than new memory if it were a matter of price. */
Test(builders, nobody_makes_another_s_stream_wait, .timeout = 60)
{
    line_for_what_is_fenced(16, 30);
}
Test(builders, nobody_makes_another_s_stream_wait_for_one_piece, .timeout = 60)
{
    line_for_what_is_fenced(1, 1);
}

/* ---- before the pool grows ---- */

/* Two pieces of memory that a stream has freed behind work that has not run; what a request, of it or of another, then
   makes the pool grow by. */
static uint64_t growth_beside_fenced(vpmm_reuse reuse, size_t each, bool by_owner, size_t asked)
{
    struct setup setup = setup_default();
    struct world w;
    setup.pool.reuse = reuse;
    world_open(&w, &setup);
    CUstream s = world_stream(&w), t = world_stream(&w);
    CUdeviceptr piece[2], wall[2];
    for (int i = 0; i < 2; i++) {
        piece[i] = take(&w, each, s);
        wall[i] = take(&w, 1, t);
    }
    keep_busy(&w, s);
    for (int i = 0; i < 2; i++)
        give(&w, piece[i], s);
    uint64_t before = stats_of(&w).mapped_bytes;
    CUdeviceptr all = take(&w, asked, by_owner ? s : t);
    uint64_t grown = stats_of(&w).mapped_bytes - before;
    world_audit(&w);
    give(&w, all, by_owner ? s : t);
    for (int i = 0; i < 2; i++)
        give(&w, wall[i], t);
    world_close(&w);
    return grown / PAGE;
}

Test(builders, memory_of_other_streams_is_used_before_the_pool_grows, .timeout = 60)
{
    needs_simulator();
    cr_expect_eq(growth_beside_fenced(VPMM_REUSE_WAIT_DEVICE, 16, false, 32), 0);
    cr_expect_eq(growth_beside_fenced(VPMM_REUSE_COMPLETED, 16, false, 32), 32);
}

Test(builders, what_the_stream_has_freed_itself_is_moved_whatever_it_may_wait_for, .timeout = 60)
{
    needs_simulator();
    cr_expect_eq(growth_beside_fenced(VPMM_REUSE_COMPLETED, 16, true, 32), 0);
}

/* A wait is worth 40 us, and a page created 20: two extents of a page cost 117 us, and two pages made 65. */
Test(builders, little_memory_of_other_streams_is_not_waited_for, .timeout = 60)
{
    needs_simulator();
    cr_expect_eq(growth_beside_fenced(VPMM_REUSE_WAIT_DEVICE, 1, false, 2), 2);
}

/* What is left of memory that was waited for on two streams is used on no third before both have passed. */
Test(builders, what_is_left_is_behind_all_that_was_waited_for, .timeout = 60)
{
    needs_simulator();
    struct setup setup = setup_default();
    struct world w;
    setup.pool.reuse = VPMM_REUSE_WAIT_DEVICE;
    world_open(&w, &setup);
    CUstream quick = world_stream(&w), slow = world_stream(&w), asks = world_stream(&w), third = world_stream(&w);
    CUdeviceptr low = take(&w, 8, quick), wall = take(&w, 1, asks), high = take(&w, 24, slow), end = take(&w, 1, asks);
    for (int i = 0; i < 4; i++) /* so that its fences have the higher numbers */
        give(&w, take(&w, 1, quick), quick);
    fill(&w, low, 8, 1, quick);
    fill(&w, high, 24, 2, slow);
    give(&w, low, quick);
    give(&w, high, slow);
    uint64_t mapped = stats_of(&w).mapped_bytes;
    CUdeviceptr most = take(&w, 28, asks);
    cr_expect_eq(stats_of(&w).mapped_bytes, mapped, "both move");
    world_run(&w, quick, SIZE_MAX);
    must_work(vpmm_poll(w.pool));
    CUdeviceptr rest = take(&w, 4, third);
    cr_expect_eq(stats_of(&w).mapped_bytes, mapped);
    fill(&w, rest, 4, 3, third);
    cr_expect_eq(world_run(&w, third, SIZE_MAX), 0, "the slow stream still uses it");
    expect_later(&w, rest, 4, 3, third);
    give(&w, rest, third);
    give(&w, most, asks);
    give(&w, wall, asks);
    give(&w, end, asks);
    world_close(&w);
}

/* ---- many, and ends ---- */

static void *take_and_give(void *argument)
{
    struct malloc_thread *b = argument;
    malloc_thread_run(b);
    if (b->status == VPMM_SUCCESS)
        b->status = vpmm_free(b->w->pool, b->pointer, b->stream);
    return NULL;
}

/* More than there are places, all behind one that stands still. */
Test(builders, seventy_at_once, .timeout = 60)
{
    enum { MANY = AWAIT_PLACES + 6, STREAMS = 8 };
    struct world w;
    struct setup setup = setup_default();
    open_builders(&w, &setup);
    struct malloc_thread first, other[MANY];
    CUstream s[STREAMS];
    for (int i = 0; i < STREAMS; i++)
        s[i] = world_stream(&w);
    slow_clock();
    start_and_park(&first, &w, s[0], 3);
    for (unsigned i = 0; i < MANY; i++) {
        other[i] = (struct malloc_thread){.w = &w, .stream = s[i % STREAMS], .pages = 1 + i % 5};
        cr_assert_eq(pthread_create(&other[i].thread, NULL, take_and_give, &other[i]), 0);
    }
    while (atomic_load(&turn_of(&w)->length) < MANY + 1)
        clock_sleep_us(LOOK_US);
    wait_for_waiters(&w, AWAIT_PLACES);
    let_go(AT_CREATE);
    for (unsigned i = 0; i < MANY; i++) {
        pthread_join(other[i].thread, NULL);
        cr_expect_eq(other[i].status, VPMM_SUCCESS, "thread %u: %s", i, vpmm_status_name(other[i].status));
    }
    end(&first);
    close_builders(&w);
}

static void *release_stream(void *argument)
{
    struct malloc_thread *b = argument;
    b->status = vpmm_stream_release(b->w->pool, b->stream);
    return NULL;
}

/* A stream is released while a malloc on it waits for its turn: that one comes first, and then the stream is gone. */
Test(builders, a_stream_is_released_while_one_waits_on_it, .timeout = 60)
{
    struct world w;
    struct setup setup = setup_default();
    open_builders(&w, &setup);
    CUstream s = world_stream(&w), t = world_stream(&w);
    struct malloc_thread first, waiter, releaser = {.w = &w, .stream = t};
    give(&w, take(&w, 1, t), t);
    slow_clock();
    start_and_park(&first, &w, s, 3);
    malloc_thread_start(&waiter, &w, t, 4);
    wait_for_waiters(&w, 1);
    pthread_create(&releaser.thread, NULL, release_stream, &releaser);
    for (int i = 0; i < 20; i++)
        clock_sleep_us(LOOK_US);
    end_slow_clock();
    let_go(AT_CREATE);
    pthread_join(releaser.thread, NULL);
    cr_expect_eq(releaser.status, VPMM_SUCCESS);
    end(&waiter);
    end(&first);
    close_builders(&w);
}

/* A request that fails gives the turn back each time that it had it. */
Test(builders, a_malloc_that_finds_no_memory_leaves, .timeout = 60)
{
    struct world w;
    struct setup setup = setup_default();
    setup.pool.max_mapped = 8 * PAGE;
    open_builders(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr p = 0, q = take(&w, 4, s);
    must_fail(VPMM_ERROR_OUT_OF_MEMORY, vpmm_malloc(w.pool, 6 * PAGE, s, &p));
    expect_nobody_waits(&w);
    must_fail(VPMM_ERROR_OUT_OF_ADDRESS_SPACE, vpmm_malloc(w.pool, 2 * setup.pool.va_size, s, &p));
    expect_nobody_waits(&w);
    give(&w, q, s);
    close_builders(&w);
}

/* ---- how long handles are ---- */

/*
 * A small device, and requests of many lengths in turn that fill nine tenths of it: with handles of any length some
 * are refused, for what is free lies beside live blocks in handles that they share.
 */
Test(builders, a_small_device_is_filled_to_nine_tenths)
{
    needs_simulator();
    enum { PAGES = 1024, LONGEST = 32, FULL = PAGES / 10 * 9, REQUESTS = 4000 };
    struct setup setup = setup_default();
    struct world w;
    static struct {
        CUdeviceptr at;
        size_t pages;
    } block[FULL];
    uint64_t state = 1;
    size_t blocks = 0, live = 0;
    int refused = 0;
    setup.sim.memory_bytes = PAGES * PAGE;
    setup.pool.va_size = 64 * PAGES * PAGE;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    for (int i = 0; i < REQUESTS; i++) {
        size_t pages = 1 + random_below(&state, LONGEST);
        while (live + pages > FULL) {
            size_t n = random_below(&state, blocks--);
            give(&w, block[n].at, s);
            live -= block[n].pages;
            block[n] = block[blocks];
        }
        CUdeviceptr p;
        cr_assert_eq(w.driver->cuStreamSynchronize(s), CUDA_SUCCESS);
        if (vpmm_malloc(w.pool, pages * PAGE, s, &p) != VPMM_SUCCESS) {
            refused++;
            continue;
        }
        block[blocks].at = p;
        block[blocks++].pages = pages;
        live += pages;
    }
    cr_expect_eq(refused, 0, "%d of %d requests are refused", refused, REQUESTS);
    while (blocks)
        give(&w, block[--blocks].at, s);
    world_close(&w);
}
