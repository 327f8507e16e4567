/*
 * A pool that is left alone: what stays given back, how often the driver is asked while nothing happens, and what an
 * idle pool gives to the device.
 */
#include "base/clock.h"
#include "gpu.h"
#include "pool/pool.h"
#include "pool/reaper.h"
#include "support.h"

#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <time.h>

#include <vpmm/observe.h>

#define MIB ((uint64_t)1 << 20)
#define GIB ((uint64_t)1 << 30)

/* ---- a clock of the test's own ---- */

/* In ns; 0: time is the machine's. Else it goes on by sleeps, and by a little whenever somebody looks at it. */
static _Atomic(uint64_t) own_time;

int __real_clock_gettime(clockid_t clock, struct timespec *now);
int __wrap_clock_gettime(clockid_t clock, struct timespec *now);

int __wrap_clock_gettime(clockid_t clock, struct timespec *now)
{
    enum { LOOK_NS = 100 };
    if (clock != CLOCK_MONOTONIC || !atomic_load(&own_time))
        return __real_clock_gettime(clock, now);
    uint64_t ns = atomic_fetch_add(&own_time, LOOK_NS);
    *now = (struct timespec){.tv_sec = (time_t)(ns / 1000000000), .tv_nsec = (long)(ns % 1000000000)};
    return 0;
}

/* From here on nothing depends on how busy the machine is: for pools that do nothing by themselves. */
static void own_clock(void)
{
    if (!gpu_chosen() && !atomic_load(&own_time))
        atomic_store(&own_time, clock_now_ns());
}

static void sleep_us(long us)
{
    const struct timespec time = {.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000};
    if (atomic_load(&own_time))
        atomic_fetch_add(&own_time, (uint64_t)us * 1000);
    else
        nanosleep(&time, NULL);
}

static void sleep_ms(long ms)
{
    sleep_us(ms * 1000);
}

static double now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

static uint64_t mapped(struct world *w)
{
    return stats_of(w).mapped_bytes;
}

/* --- a trim stays --- */

enum { LONG_PAGES = 200, LONGS = 5 };

/* A pool that has learned what is asked of it, with nothing live. */
static void use_and_free(struct world *w, CUstream s)
{
    CUdeviceptr p[LONGS];
    for (int i = 0; i < LONGS; i++)
        p[i] = take(w, LONG_PAGES, s);
    for (int i = 0; i < LONGS; i++)
        give(w, p[i], s);
    world_drain(w);
}

static void poll_often(struct world *w)
{
    for (int i = 0; i < 200; i++)
        must_work(vpmm_poll(w->pool));
}

static void a_trim_stays(size_t keep_pages)
{
    struct setup setup = setup_default();
    setup.pool.va_size = 8 * GIB;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    use_and_free(&w, s);
    must_work(vpmm_trim(w.pool, keep_pages * PAGE, NULL));
    uint64_t left = mapped(&w);
    cr_expect_leq(left, keep_pages * PAGE);
    poll_often(&w);
    cr_expect_leq(mapped(&w), left, "a trim left %llu MiB, and passes made %llu of it",
                  (unsigned long long)(left / MIB), (unsigned long long)(mapped(&w) / MIB));
    world_audit(&w);
    world_close(&w);
}

Test(idle, a_trim_to_nothing_stays)
{
    a_trim_stays(0);
}

Test(idle, a_trim_to_something_stays)
{
    a_trim_stays(64);
}

/* What was needed before the trim is not made again. */
Test(idle, after_a_trim_a_malloc_makes_no_more_than_is_needed_now)
{
    struct setup setup = setup_default();
    setup.pool.va_size = 8 * GIB;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    use_and_free(&w, s);
    must_work(vpmm_trim(w.pool, 0, NULL));
    CUdeviceptr p = take(&w, 8, s);
    uint64_t made = mapped(&w);
    poll_often(&w);
    cr_expect_leq(mapped(&w), made + made / 50, "%llu MiB became %llu", (unsigned long long)(made / MIB),
                  (unsigned long long)(mapped(&w) / MIB));
    give(&w, p, s);
    world_close(&w);
}

static uint64_t reaper_sleeps(void)
{
    uint64_t sleeps = 0;
    DIR *tasks = opendir("/proc/self/task");
    for (struct dirent *entry; tasks && (entry = readdir(tasks)) != NULL;) {
        char path[320], line[256] = "";
        unsigned long long number = 0;
        bool is_reaper = false;
        snprintf(path, sizeof path, "/proc/self/task/%s/status", entry->d_name);
        FILE *file = fopen(path, "r");
        while (file && fgets(line, sizeof line, file)) {
            is_reaper |= !strcmp(line, "Name:\tvpmm-reaper\n");
            if (is_reaper && sscanf(line, "voluntary_ctxt_switches: %llu", &number) == 1)
                sleeps += number;
        }
        if (file)
            fclose(file);
    }
    closedir(tasks);
    return sleeps;
}

/* --- a fence that takes long --- */

/* What depends on when threads run is tried so often, and what is to come is waited for so long: machines are busy. */
enum { TRIES = 20, PATIENCE_MS = 15000 };

static struct setup with_reaper(void)
{
    struct setup setup = setup_default();
    setup.pool.reaper = true;
    return setup;
}

/* Memory of a stream whose work has not ended, and marked. */
static CUstream hold_back(struct world *w)
{
    CUstream s = world_stream(w);
    CUdeviceptr p = take(w, 4, s);
    keep_busy(w, s);
    give(w, p, s);
    return s;
}

Test(idle, a_fence_that_takes_long_is_seldom_asked_about, .timeout = 60)
{
    needs_simulator();
    struct setup setup = with_reaper();
    struct world w;
    world_open(&w, &setup);
    hold_back(&w);
    sleep_ms(100);
    double begin = now_ms();
    uint64_t before = vpmm_sim_calls(w.sim, NULL);
    sleep_ms(1000);
    uint64_t calls = vpmm_sim_calls(w.sim, NULL) - before;
    double ms = now_ms() - begin; /* more, on a loaded machine */
    cr_expect_leq((double)calls, 2 * ms, "%llu driver calls in %.0f ms of one outstanding fence",
                  (unsigned long long)calls, ms);
    world_step(&w);
    world_close(&w);
}

static uint64_t completed_of(const struct world *w, uint32_t slot)
{
    const struct streams *streams = &w->pool->arena.streams;
    return slot < load_acquire_u32(&streams->slots) ? load_sc_u64(&stream_at(streams, slot)->completed) : 0;
}

/* Everything that was freed is seen to have passed. */
static bool completed(const struct world *w)
{
    const struct streams *streams = &w->pool->arena.streams;
    for (uint32_t slot = 1; slot < load_acquire_u32(&streams->slots); slot++) {
        const struct stream *stream = stream_at(streams, slot);
        if (load_sc_u64(&stream->completed) < load_sc_u64(&stream->published))
            return false;
    }
    return true;
}

/* Within the time that a loaded machine takes. */
static double until_completed_ms(struct world *w)
{
    double begin = now_ms();
    while (!completed(w) && now_ms() < begin + PATIENCE_MS)
        sleep_us(50);
    return now_ms() - begin;
}

/*
 * What the reaper means to do, which does not depend on how busy the machine is: how long it asks to sleep, and what
 * it knows when it does. A pass is what lies between two sleeps.
 */
static struct {
    struct world *_Atomic world;         /* of this one; NULL: of none */
    atomic_bool held;                    /* a fence is pending, and its work does not run */
    _Atomic(uint64_t) run;               /* slot << 32 | fence: what has run; 0: nothing */
    atomic_uint long_pauses, late;       /* with a fence held; passes that have not seen what had run before them */
    _Atomic(uint64_t) longest, shortest; /* ns: of the sleeps with a fence held, and of any */
    atomic_bool stretches, stretched;    /* the next long pause lasts until it is ended; it has begun */
} sleeps = {.world = NULL};

static bool is_seen(const struct world *w, uint64_t run)
{
    return !run || completed_of(w, (uint32_t)(run >> 32)) >= (run & UINT32_MAX);
}

static void raise(_Atomic(uint64_t) *highest, uint64_t to)
{
    if (to > atomic_load(highest))
        atomic_store(highest, to);
}

void __real_wakeup_wait(struct wakeup *wakeup, uint32_t seen, uint64_t ns);
void __wrap_wakeup_wait(struct wakeup *wakeup, uint32_t seen, uint64_t ns);

/* By one thread, but for what the test sets. */
static void note_sleep(const struct world *w, uint64_t ns, bool was_held, uint64_t had_run)
{
    uint64_t length = ns ? ns : UINT64_MAX;
    if (was_held && atomic_load(&sleeps.held)) {
        raise(&sleeps.longest, length);
        atomic_fetch_add(&sleeps.long_pauses, length >= REAPER_LONGEST_US * UINT64_C(1000));
    }
    atomic_fetch_add(&sleeps.late, !is_seen(w, had_run));
    if (length < atomic_load(&sleeps.shortest))
        atomic_store(&sleeps.shortest, length);
}

void __wrap_wakeup_wait(struct wakeup *wakeup, uint32_t seen, uint64_t ns)
{
    static bool was_held;    /* when the pass began, */
    static uint64_t had_run; /* and this had */
    const struct world *w = atomic_load(&sleeps.world);
    if (!w || wakeup != &w->pool->arena.bell.work) {
        __real_wakeup_wait(wakeup, seen, ns);
        return;
    }
    note_sleep(w, ns, was_held, had_run);
    bool may_end = load_sc_u32(&w->pool->arena.bell.asleep); /* before its time is over */
    if (may_end && ns >= REAPER_LONGEST_US * UINT64_C(1000) && atomic_exchange(&sleeps.stretches, false)) {
        atomic_store(&sleeps.stretched, true);
        ns = 0;
    }
    __real_wakeup_wait(wakeup, seen, ns);
    was_held = atomic_load(&sleeps.held);
    had_run = atomic_load(&sleeps.run);
}

/* Until the counter is beyond that, or for as long as a loaded machine may take. */
static bool comes(const atomic_uint *counter, unsigned beyond)
{
    for (double end = now_ms() + PATIENCE_MS; atomic_load(counter) <= beyond && now_ms() < end;)
        sleep_us(50);
    return atomic_load(counter) > beyond;
}

Test(idle, a_fence_is_seen_to_pass_within_the_longest_pause, .timeout = 60)
{
    needs_simulator();
    struct setup setup = with_reaper();
    struct world w;
    world_open(&w, &setup);
    atomic_store(&sleeps.world, &w);
    for (uint32_t i = 0; i < 10; i++) { /* with streams of their own */
        CUstream s = hold_back(&w);
        uint32_t slot = 1 + i;
        atomic_store(&sleeps.held, true);
        cr_assert(comes(&sleeps.long_pauses, atomic_load(&sleeps.long_pauses)), "its pauses do not grow");
        atomic_store(&sleeps.held, false);
        world_run(&w, s, SIZE_MAX);
        atomic_store(&sleeps.run,
                     (uint64_t)slot << 32 | load_sc_u64(&stream_at(&w.pool->arena.streams, slot)->published));
        cr_assert_lt(until_completed_ms(&w), PATIENCE_MS, "it is never seen to have passed");
    }
    cr_expect_leq(atomic_load(&sleeps.longest), REAPER_LONGEST_US * UINT64_C(1000));
    cr_expect_eq(atomic_load(&sleeps.late), 0, "a pass has not seen what had passed before it");
    atomic_store(&sleeps.world, NULL);
    world_close(&w);
}

/* What is freed while the reaper pauses because of another stream is seen as soon as ever: a mark ends the pause. */
Test(idle, new_marks_end_the_pause, .timeout = 60)
{
    enum { NEW_FENCES = 20 };
    needs_simulator();
    struct setup setup = with_reaper();
    setup.pool.reuse = VPMM_REUSE_COMPLETED; /* else the new stream would wait for the held one */
    struct world w;
    world_open(&w, &setup);
    CUstream held = hold_back(&w), s = world_stream(&w);
    atomic_store(&sleeps.world, &w);
    for (int i = 0; i < NEW_FENCES; i++) {
        atomic_store(&sleeps.stretched, false);
        atomic_store(&sleeps.stretches, true);
        double end = now_ms() + PATIENCE_MS;
        while (!atomic_load(&sleeps.stretched) && now_ms() < end)
            sleep_us(50);
        cr_assert(atomic_load(&sleeps.stretched), "its pauses do not grow");
        atomic_store(&sleeps.shortest, UINT64_MAX);
        uint64_t before = completed_of(&w, 2);
        give(&w, take(&w, 2, s), s);
        world_run(&w, s, SIZE_MAX);
        while ((completed_of(&w, 2) == before || atomic_load(&sleeps.shortest) > REAPER_CALL_US * UINT64_C(1000)) &&
               now_ms() < end)
            sleep_us(50);
        cr_assert_neq(completed_of(&w, 2), before, "the pause goes on");
        cr_assert_leq(atomic_load(&sleeps.shortest), REAPER_CALL_US * UINT64_C(1000), "the next ones are as long");
    }
    atomic_store(&sleeps.world, NULL);
    world_run(&w, held, SIZE_MAX);
    world_close(&w);
}

static uint64_t age_ns(struct world *w)
{
    vpmm_health health;
    must_work(vpmm_health_get(w->pool, &health));
    return health.reaper_age_ns;
}

/* What says how long ago the latest pass was (observe.h) says it of one by hand too, while anything is pending. */
Test(idle, a_poll_is_the_latest_pass)
{
    needs_simulator();
    struct setup setup = setup_default();
    struct world w;
    setup.pool.cache_bytes = 0; /* what is freed waits for its fence */
    world_open(&w, &setup);
    sleep_ms(30);
    cr_expect_eq(age_ns(&w), 0, "with nothing to look for");
    CUstream held = hold_back(&w);
    cr_expect_geq(age_ns(&w), 30000000, "with a fence to look for");
    uint64_t before = clock_now_ns();
    must_work(vpmm_poll(w.pool));
    cr_expect_leq(age_ns(&w), clock_now_ns() - before);
    world_run(&w, held, SIZE_MAX);
    must_work(vpmm_poll(w.pool));
    cr_expect_eq(age_ns(&w), 0, "with nothing left to look for");
    world_close(&w);
}

/*
 * Where the GPU keeps up with the program each mark has passed by the reaper's next look, and nothing is pending. A
 * program that goes on does not wake it each time: here 200 times, a tenth of a millisecond apart.
 */
static void go_on(bool is_alone)
{
    struct setup setup = with_reaper();
    setup.pool.captures = true; /* each call marks what it has freed, or, alone, many do */
    setup.pool.cache_bytes = 0;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w), other = world_stream(&w);
    if (!is_alone)
        give(&w, take(&w, 2, other), other);
    uint32_t rings = UINT32_MAX, pauses = 0; /* of a loaded machine, in which the reaper comes to rest */
    for (int i = 0; i < TRIES && rings > 50 + pauses; i++) {
        uint32_t before = wakeup_read(&w.pool->arena.bell.work);
        pauses = 0;
        for (int j = 0; j < 200; j++) {
            double begin = now_ms();
            give(&w, take(&w, 2, s), s);
            world_step(&w);
            sleep_us(100);
            pauses += now_ms() - begin > REAPER_CALL_US / 2000.0;
        }
        rings = wakeup_read(&w.pool->arena.bell.work) - before;
    }
    cr_expect_leq(rings, 50 + pauses, "200 frees have rung for the reaper %u times", rings);
    world_close(&w);
}

Test(idle, a_program_that_goes_on_seldom_rings, .timeout = 60)
{
    needs_simulator();
    go_on(false);
}
Test(idle, a_program_of_one_stream_seldom_rings, .timeout = 60)
{
    needs_simulator();
    go_on(true);
}

/* ---- the marks of a stream that is alone ---- */

enum { FREES = 100, LONG_FREES = 8, FREED_ALONE = MARK_ALONE_BYTES / 2 / PAGE };

static struct setup alone(bool captures)
{
    struct setup setup = with_reaper();
    setup.pool.captures = captures; /* then nobody else marks */
    setup.pool.cache_bytes = 0;
    return setup;
}

/* Marks of so many frees, one right after the other. */
static uint64_t marks_of(struct world *w, CUstream s, int frees, size_t pages)
{
    uint64_t before = stats_of(w).marks;
    for (int i = 0; i < frees; i++)
        give(w, take(w, pages, s), s);
    return stats_of(w).marks - before;
}

/* The least of some tries: on a loaded machine what follows at once may be late. */
static uint64_t fewest_marks(struct world *w, CUstream s)
{
    uint64_t fewest = UINT64_MAX;
    for (int i = 0; i < 5; i++) {
        uint64_t marks = marks_of(w, s, FREES, 1);
        fewest = marks < fewest ? marks : fewest;
    }
    return fewest;
}

Test(idle, marks_of_one_stream_wait, .timeout = 60)
{
    needs_simulator();
    struct setup setup = alone(true);
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    cr_expect_lt(fewest_marks(&w, s), FREES / 2);
    cr_expect_geq(marks_of(&w, s, LONG_FREES, FREED_ALONE), LONG_FREES / 2 - 1, "much stays unmarked");
    for (int i = 0; i < 10; i++) {
        sleep_us(MARK_ALONE_NS / 1000);
        cr_expect_geq(marks_of(&w, s, 1, 1), 1, "it stays unmarked for long");
    }
    CUstream other = world_stream(&w);
    give(&w, take(&w, 1, other), other);
    cr_expect_geq(marks_of(&w, s, FREES, 1), FREES, "another stream has to wait");
    world_close(&w);
}

/* What is left of free memory that a malloc takes a part of is freed once, also while its stream stands still. */
Test(idle, marks_of_one_stream_wait_beside_much_that_is_free, .timeout = 60)
{
    needs_simulator();
    enum { FREE = 2 * MARK_ALONE_BYTES / PAGE };
    struct setup setup = alone(true);
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr much = take(&w, FREE, s);
    cr_assert_eq(w.driver->cuMemsetD32Async(much, 1, 1, s), CUDA_SUCCESS);
    give(&w, much, s);
    cr_expect_lt(fewest_marks(&w, s), FREES / 2);
    world_close(&w);
}

Test(idle, marks_do_not_wait_where_the_stream_may_go, .timeout = 60)
{
    needs_simulator();
    for (int eager = 0; eager < 2; eager++) {
        struct setup setup = alone(false);
        struct world w;
        setup.pool.streams = eager ? VPMM_STREAMS_EAGER : setup.pool.streams;
        world_open(&w, &setup);
        CUstream s = eager ? world_stream(&w) : CU_STREAM_PER_THREAD;
        pthread_mutex_lock(&w.pool->arena.pass_lock); /* the reaper marks none of them */
        cr_expect_geq(marks_of(&w, s, FREES, 1), FREES, "%s", eager ? "eager" : "per thread");
        pthread_mutex_unlock(&w.pool->arena.pass_lock);
        world_close(&w);
    }
}

Test(idle, marks_do_not_wait_where_no_reaper_looks)
{
    needs_simulator();
    struct setup setup = alone(true);
    struct world w;
    setup.pool.reaper = false;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    cr_expect_geq(marks_of(&w, s, FREES, 1), FREES);
    world_close(&w);
}

/* Nor does a trim leave anything that has ended because nobody has marked it yet. */
Test(idle, a_trim_takes_what_is_not_marked, .timeout = 60)
{
    needs_simulator();
    for (int reaper = 0; reaper < 2; reaper++)
        for (int i = 0; i < 10; i++) {
            struct setup setup = alone(false);
            struct world w;
            setup.sim.stepped = false;
            setup.pool.reaper = reaper;
            setup.pool.cache_bytes = reaper ? 0 : setup_default().pool.cache_bytes;
            world_open(&w, &setup);
            CUstream s = world_stream(&w);
            CUdeviceptr p = take(&w, 8, s), q = take(&w, 8, s);
            give(&w, p, s);
            give(&w, q, s);
            cr_assert_eq(w.driver->cuStreamSynchronize(s), CUDA_SUCCESS);
            must_work(vpmm_trim(w.pool, 0, NULL));
            cr_expect_eq(stats_of(&w).mapped_bytes, 0, "with%s a reaper", reaper ? "" : "out");
            world_close(&w);
        }
}

static void CUDA_CB sleep_a_while(void *unused)
{
    (void)unused;
    sleep_us(50000);
}

/* With `captures` a trim waits, whether one stream was met or several, which leave what they free without marks. */
Test(idle, a_trim_waits_where_nobody_may_mark, .timeout = 60)
{
    needs_simulator();
    for (int streams = 1; streams <= 2; streams++) {
        struct setup setup = alone(true);
        struct world w;
        setup.sim.stepped = false;
        world_open(&w, &setup);
        CUstream s = world_stream(&w), other = world_stream(&w);
        if (streams == 2)
            give(&w, take(&w, 1, other), other);
        CUdeviceptr p = take(&w, 8, s);
        cr_assert_eq(w.driver->cuLaunchHostFunc(s, sleep_a_while, NULL), CUDA_SUCCESS);
        give(&w, p, s);
        must_work(vpmm_trim(w.pool, 0, NULL));
        cr_expect_eq(stats_of(&w).mapped_bytes, 0, "%d streams", streams);
        world_close(&w);
    }
}

static const vpmm_driver *below;
static atomic_bool holds_a_record, is_recording, may_record;

static CUresult CUDAAPI record_when_let_go(CUevent event, CUstream stream)
{
    if (atomic_exchange(&holds_a_record, false)) {
        atomic_store(&is_recording, true);
        while (!atomic_load(&may_record))
            sleep_us(100);
    }
    return below->cuEventRecord(event, stream);
}

struct freeing {
    struct world *w;
    CUdeviceptr pointer;
    CUstream stream;
    vpmm_status status;
};

static void *free_there(void *data)
{
    struct freeing *freeing = data;
    freeing->w->driver->cuCtxSetCurrent(freeing->w->context);
    freeing->status = vpmm_free(freeing->w->pool, freeing->pointer, freeing->stream);
    return NULL;
}

/* It marks what it has published in a moment. No other stream's work is waited for meanwhile. */
Test(idle, a_trim_does_not_wait_beside_a_free_that_is_about_to_mark, .timeout = 60)
{
    needs_simulator();
    struct setup setup = setup_default();
    vpmm_driver table;
    struct world w;
    pthread_t thread;
    setup.pool.streams = VPMM_STREAMS_EAGER;
    world_open_without_pool(&w, &setup);
    below = w.driver;
    table = *w.driver;
    table.cuEventRecord = record_when_let_go;
    setup.pool.driver = &table;
    must_work(vpmm_pool_create(&setup.pool, &w.pool));
    CUstream s = world_stream(&w), busy = world_stream(&w);
    struct freeing freeing = {.w = &w, .pointer = take(&w, 4, s), .stream = s};
    keep_busy(&w, busy);
    atomic_store(&holds_a_record, true);
    pthread_create(&thread, NULL, free_there, &freeing);
    while (!atomic_load(&is_recording))
        sleep_us(100);
    must_work(vpmm_trim(w.pool, 0, NULL));
    cr_expect(world_pending(&w, busy), "it has waited for the context");
    atomic_store(&may_record, true);
    pthread_join(thread, NULL);
    cr_expect_eq(freeing.status, VPMM_SUCCESS);
    world_close(&w);
}

/* Where others than its calls may mark, nothing stays unmarked, although the program does nothing more. */
Test(idle, marks_that_waited_are_the_reapers, .timeout = 60)
{
    needs_simulator();
    struct setup setup = alone(false);
    struct world w;
    setup.sim.stepped = false;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    for (int i = 0; i < 10; i++) {
        marks_of(&w, s, 5, 1);
        cr_assert_lt(until_completed_ms(&w), PATIENCE_MS, "it is never seen to have passed");
    }
    world_close(&w);
}

/* How often the reaper wakes, in 10 ms, while the program does nothing but hits. */
static double wakes_beside_hits(struct world *w, CUstream s)
{
    uint64_t before = reaper_sleeps();
    double begin = now_ms();
    for (int i = 0; i < 100; i++) {
        give(w, take(w, 2, s), s);
        sleep_ms(2);
    }
    return (double)(reaper_sleeps() - before) / (now_ms() - begin) * 10;
}

/*
 * It looks after the cache every 10 ms, and once each time. A thread that stands still for so long finds its cache
 * emptied, which is news.
 */
Test(idle, hits_wake_the_reaper_seldom, .timeout = 60)
{
    needs_simulator();
    struct setup setup = with_reaper();
    setup.pool.cache_bytes = 8 * PAGE;
    setup.sim.stepped = false;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w), other = world_stream(&w); /* beside which pauses begin short */
    give(&w, take(&w, 2, other), other);
    give(&w, take(&w, 2, s), s);
    double wakes = 2;
    for (int i = 0; i < TRIES && wakes > 1.5; i++)
        wakes = wakes_beside_hits(&w, s);
    cr_expect_leq(wakes, 1.5, "the reaper wakes %.1f times in 10 ms", wakes);
    world_close(&w);
}

/* A malloc that is about to build asks for itself. */
Test(idle, a_malloc_does_not_wait_for_the_pause, .timeout = 60)
{
    needs_simulator();
    struct setup setup = with_reaper();
    setup.pool.reuse = VPMM_REUSE_COMPLETED;
    struct world w;
    world_open(&w, &setup);
    CUstream other = world_stream(&w);
    for (int i = 0; i < 10; i++) {
        CUstream s = hold_back(&w);
        sleep_ms(20);
        uint64_t builds = stats_of(&w).builds;
        pthread_mutex_lock(&w.pool->arena.pass_lock); /* the reaper pauses, and does not ask just now */
        world_run(&w, s, SIZE_MAX);
        CUdeviceptr p = take(&w, 4, other);
        pthread_mutex_unlock(&w.pool->arena.pass_lock);
        cr_expect_eq(stats_of(&w).builds, builds, "it builds, although the memory's work has ended");
        give(&w, p, other);
        world_step(&w);
        must_work(vpmm_trim(w.pool, 0, NULL));
    }
    world_close(&w);
}

/* --- decay --- */

enum { DECAY_MS = 400 };

/* Eight times 64 MiB and more, which nobody needs any more. */
enum { BLOCKS = 8, BLOCK_PAGES = 32, USED_PAGES = BLOCKS * BLOCK_PAGES };

static struct setup with_decay(uint64_t ms, bool reaper)
{
    struct setup setup = setup_default();
    setup.pool.decay_ms = ms;
    setup.pool.reaper = reaper;
    if (!reaper)
        own_clock();
    return setup;
}

static void take_blocks(struct world *w, CUdeviceptr p[BLOCKS], CUstream s)
{
    for (int i = 0; i < BLOCKS; i++)
        p[i] = take(w, BLOCK_PAGES, s);
}

static void give_blocks(struct world *w, const CUdeviceptr p[BLOCKS], CUstream s)
{
    for (int i = 0; i < BLOCKS; i++)
        give(w, p[i], s);
    world_run(w, s, SIZE_MAX);
}

static void need_once(struct world *w, CUstream s)
{
    CUdeviceptr p[BLOCKS];
    take_blocks(w, p, s);
    give_blocks(w, p, s);
}

/* Passes by hand, for pools without a reaper of their own. */
static void wait_polling(struct world *w, double ms)
{
    for (double end = now_ms() + ms; now_ms() < end; sleep_ms(1))
        must_work(vpmm_poll(w->pool));
}

/*
 * Within the time, as it is a loaded machine's. The GPU goes on meanwhile: the thread that frees leaves the mark to the
 * reaper if that is just marking the same stream, and then the event is recorded after the free has returned.
 */
static void wait_for_mapped(struct world *w, uint64_t most)
{
    for (double end = now_ms() + PATIENCE_MS; mapped(w) > most && now_ms() < end; sleep_ms(1))
        world_step(w);
}

/* The reaper comes to rest, within the time that a loaded machine takes. The GPU goes on: see wait_for_mapped. */
static void expect_rest(struct world *w)
{
    uint64_t sleeps = 0, calls = 1, sleeps_before = 1, calls_before = 0;
    for (int i = 0; i < 30 && (sleeps != sleeps_before || calls != calls_before); i++) {
        world_step(w);
        sleeps_before = reaper_sleeps();
        calls_before = vpmm_sim_calls(w->sim, NULL);
        sleep_ms(150);
        sleeps = reaper_sleeps();
        calls = vpmm_sim_calls(w->sim, NULL);
    }
    cr_expect_eq(sleeps, sleeps_before, "in 150 ms of rest the reaper wakes %llu times",
                 (unsigned long long)(sleeps - sleeps_before));
    cr_expect_eq(calls, calls_before, "at rest the driver is called %llu times",
                 (unsigned long long)(calls - calls_before));
}

Test(idle, an_idle_pool_gives_everything_back_and_then_sleeps, .timeout = 60)
{
    needs_simulator();
    struct setup setup = with_decay(DECAY_MS, true);
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    double before = now_ms(); /* and not after the last use: a thread that then stood still would see too little */
    need_once(&w, s);
    uint64_t begin = mapped(&w);
    wait_for_mapped(&w, 0);
    double waited = now_ms() - before;
    cr_expect_eq(mapped(&w), 0, "%llu of %llu MiB stay mapped", (unsigned long long)(mapped(&w) / MIB),
                 (unsigned long long)(begin / MIB));
    cr_expect_geq(waited, DECAY_MS / 2.0, "all of it is gone after %.0f ms", waited);
    expect_rest(&w);
    cr_expect_geq(stats_of(&w).decayed_bytes, begin);
    cr_expect_eq(mapped(&w), 0);
    world_audit(&w);
    world_close(&w);
}

/* Passes of a pool without a reaper are as good, and what is left is never less than what is due to stay. */
Test(idle, memory_decays_little_by_little, .timeout = 60)
{
    struct setup setup = with_decay(DECAY_MS, false);
    setup.pool.extent_size = PAGE;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    must_work(vpmm_poll(w.pool));
    double begin = now_ms();
    need_once(&w, s);
    uint64_t peak = mapped(&w), steps = 0, last = peak, half = 0;
    cr_expect_eq(peak, USED_PAGES * PAGE);
    while (mapped(&w) > 0 && now_ms() < begin + 20 * DECAY_MS) {
        must_work(vpmm_poll(w.pool));
        uint64_t now = mapped(&w);
        double share = (now_ms() - begin) / DECAY_MS;
        require((double)now >= (double)peak * fmin(1, 2 * (1 - share)) - 1,
                "after %.2f of the time only %llu of %llu MiB are left", share, (unsigned long long)(now / MIB),
                (unsigned long long)(peak / MIB));
        half = share < 0.9 ? now : half;
        require(last - now <= 4 * PAGE, "one pass gives %llu MiB back", (unsigned long long)((last - now) / MIB));
        steps += now != last;
        last = now;
        sleep_us(200);
    }
    cr_expect_eq(mapped(&w), 0);
    cr_expect_geq(steps, USED_PAGES / 4);
    cr_expect_lt(half, peak / 2, "after nine tenths of the time %llu of %llu MiB are left",
                 (unsigned long long)(half / MIB), (unsigned long long)(peak / MIB));
    cr_expect_eq(stats_of(&w).decayed_bytes, peak);
    world_audit(&w);
    world_close(&w);
}

Test(idle, a_threshold_stays, .timeout = 60)
{
    struct setup setup = with_decay(DECAY_MS / 4, false);
    setup.pool.extent_size = 4 * PAGE;
    setup.pool.release_threshold = 50 * PAGE + 1;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    need_once(&w, s);
    for (int i = 0; i < 10 && mapped(&w) >= (51 + 4) * PAGE; i++) /* a GPU that others use takes its time */
        wait_polling(&w, DECAY_MS);
    cr_expect_lt(mapped(&w), (51 + 4) * PAGE);
    wait_polling(&w, DECAY_MS);
    cr_expect_geq(mapped(&w), 51 * PAGE);
    world_close(&w);
}

/* Handles of one page: what stays is the threshold, up to the page. */
Test(idle, a_threshold_within_a_page_keeps_that_page)
{
    struct setup setup = with_decay(0, false);
    struct world w;
    CUdeviceptr p[4];
    setup.pool.release_threshold = 2 * PAGE + 1;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    for (int i = 0; i < 4; i++)
        p[i] = take(&w, 1, s);
    for (int i = 0; i < 4; i++)
        give(&w, p[i], s);
    for (int i = 0; i < 2; i++)
        world_drain(&w);
    cr_expect_eq(mapped(&w), 3 * PAGE, "%llu pages", (unsigned long long)(mapped(&w) / PAGE));
    world_close(&w);
}

/* An extent that is longer than what may go stays, and nobody tries again and again. */
Test(idle, a_threshold_within_an_extent_stays_and_lets_the_reaper_sleep, .timeout = 60)
{
    needs_simulator();
    struct setup setup = with_decay(40, true);
    setup.pool.release_threshold = PAGE;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    need_once(&w, s);
    uint64_t begin = mapped(&w);
    wait_for_mapped(&w, begin - 1);
    sleep_ms(200);
    expect_rest(&w);
    cr_expect_gt(mapped(&w), PAGE, "the test shows nothing");
    cr_expect_lt(mapped(&w), begin);
    world_close(&w);
}

/* Nor does memory beside live one in its extent. */
Test(idle, live_memory_keeps_its_extent_and_lets_the_reaper_sleep, .timeout = 60)
{
    needs_simulator();
    struct setup setup = with_decay(40, true);
    setup.pool.reuse = VPMM_REUSE_COMPLETED;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    give(&w, take(&w, 64, s), s);
    CUdeviceptr p = take(&w, 3, s);
    fill(&w, p, 3, 9, s);
    world_step(&w);
    sleep_ms(200);
    expect_rest(&w);
    cr_expect_gt(mapped(&w), 3 * PAGE, "the test shows nothing");
    expect_later(&w, p, 3, 9, s);
    give(&w, p, s);
    world_step(&w);
    wait_for_mapped(&w, 0);
    cr_expect_eq(mapped(&w), 0);
    world_close(&w);
}

Test(idle, what_is_mapped_at_the_beginning_stays, .timeout = 60)
{
    struct setup setup = with_decay(DECAY_MS / 4, false);
    setup.pool.initial_pages = 40;
    struct world w;
    world_open(&w, &setup);
    wait_polling(&w, DECAY_MS);
    cr_expect_eq(mapped(&w), 40 * PAGE);
    must_work(vpmm_trim(w.pool, 0, NULL));
    cr_expect_eq(mapped(&w), 0);
    world_close(&w);
}

Test(idle, without_decay_everything_stays, .timeout = 60)
{
    struct setup setup = with_decay(VPMM_DECAY_NEVER, false);
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    need_once(&w, s);
    uint64_t begin = mapped(&w);
    wait_polling(&w, 300);
    cr_expect_geq(mapped(&w), begin);
    cr_expect_eq(stats_of(&w).decayed_bytes, 0);
    world_close(&w);
}

/* The reaper tries it again, though it has nothing else to do. */
/* The driver takes back no handle, and has been asked to by a trim. */
static void open_refused(struct world *w)
{
    struct setup setup = with_decay(VPMM_DECAY_NEVER, true);
    setup.sim.stepped = false;
    world_open(w, &setup);
    CUstream s = world_stream(w);
    give(w, take(w, 4, s), s);
    cr_assert_eq(w->driver->cuStreamSynchronize(s), CUDA_SUCCESS);
    vpmm_sim_fail(w->sim, "cuMemRelease", 1, CUDA_ERROR_UNKNOWN, true);
    (void)vpmm_trim(w->pool, 0, NULL);
    cr_assert_gt(stats_of(w).quarantined_bytes, 0);
}

/* From here on it does. */
static void expect_given_back(struct world *w)
{
    vpmm_sim_fail(w->sim, "cuMemRelease", 0, CUDA_SUCCESS, false);
    for (int i = 0; i < 2000 && stats_of(w).quarantined_bytes; i++)
        sleep_ms(10);
    cr_expect_eq(stats_of(w).quarantined_bytes, 0);
    world_close(w);
}

Test(idle, what_was_refused_for_a_while_is_given_back, .timeout = 60)
{
    needs_simulator();
    struct world w;
    open_refused(&w);
    sleep_ms(200);
    expect_given_back(&w);
}

/* As once the program has reset the device: what lies in a cache is still to be looked after. */
Test(idle, passes_that_are_refused_are_not_made_one_after_another, .timeout = 60)
{
    enum { MS = 300 };
    needs_simulator();
    struct setup setup = setup_default();
    setup.pool.reaper = true;
    setup.pool.cache_bytes = 8 * PAGE;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    vpmm_sim_fail(w.sim, "cuCtxPushCurrent", 1, CUDA_ERROR_INVALID_CONTEXT, true);
    CUdeviceptr p = 0;
    cr_assert_eq(w.driver->cuCtxSetCurrent(w.context), CUDA_SUCCESS);
    must_work(vpmm_malloc(w.pool, PAGE, s, &p));
    give(&w, p, s);
    sleep_ms(20);
    double begin = now_ms();
    uint64_t calls = world_calls(&w, "cuCtxPushCurrent");
    sleep_ms(MS);
    calls = world_calls(&w, "cuCtxPushCurrent") - calls;
    double most = 2 * (now_ms() - begin) * 1000 / REAPER_RETRY_US;
    vpmm_sim_fail(w.sim, "cuCtxPushCurrent", 0, CUDA_SUCCESS, false);
    cr_expect_gt(calls, 0, "nothing is left to look after");
    cr_expect_lt((double)calls, most);
    world_close(&w);
}

/* A pass that is refused as a whole does not end the tries of what one before it, the thread's own, was refused. */
Test(idle, what_was_refused_is_given_back_though_a_pass_is_refused, .timeout = 60)
{
    needs_simulator();
    struct world w;
    open_refused(&w);
    uint64_t tries = world_calls(&w, "cuMemRelease");
    while (world_calls(&w, "cuMemRelease") == tries)
        sleep_ms(1);
    vpmm_sim_fail(w.sim, "cuCtxPushCurrent", 1, CUDA_ERROR_UNKNOWN, true);
    sleep_ms(100);
    vpmm_sim_fail(w.sim, "cuCtxPushCurrent", 0, CUDA_SUCCESS, false);
    expect_given_back(&w);
}

Test(idle, with_decay_of_no_time_what_is_free_goes_at_once, .timeout = 60)
{
    struct setup setup = with_decay(0, false);
    setup.pool.extent_size = PAGE;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr p = take(&w, 10, s), q = take(&w, 10, s);
    fill(&w, q, 10, 77, s);
    give(&w, p, s);
    world_step(&w);
    for (int i = 0; i < 4; i++)
        must_work(vpmm_poll(w.pool));
    cr_expect_eq(mapped(&w), 10 * PAGE, "what is live, and no more, stays: %llu pages",
                 (unsigned long long)(mapped(&w) / PAGE));
    expect_later(&w, q, 10, 77, s);
    world_step(&w);
    give(&w, q, s);
    world_close(&w);
}

Test(idle, memory_behind_a_fence_does_not_decay, .timeout = 60)
{
    struct setup setup = with_decay(20, false);
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr p = take(&w, 16, s);
    keep_busy(&w, s);
    give(&w, p, s);
    uint64_t begin = mapped(&w);
    wait_polling(&w, 200);
    cr_expect_geq(mapped(&w), 16 * PAGE, "of %llu pages", (unsigned long long)(begin / PAGE));
    world_step(&w);
    wait_polling(&w, 200);
    cr_expect_eq(mapped(&w), 0);
    world_close(&w);
}

/* What lay in its cache is behind a fence that nobody marks, and joins what is behind marks that pass. */
Test(idle, what_a_default_stream_has_marked_decays_beside_its_cache, .timeout = 60)
{
    enum { PAGES = 100, CACHED = 8 };
    struct setup setup = with_decay(20, false);
    setup.pool.cache_bytes = CACHED * PAGE;
    struct world w;
    CUdeviceptr p[PAGES];
    world_open(&w, &setup);
    for (int i = 0; i < PAGES; i++)
        p[i] = take(&w, 1, NULL);
    keep_busy(&w, NULL);
    for (int i = 0; i < PAGES; i++)
        give(&w, p[i], NULL);
    wait_polling(&w, 100); /* what is idle leaves the cache meanwhile */
    cr_expect_eq(stats_of(&w).cached_bytes, 0);
    cr_expect_geq(mapped(&w), PAGES * PAGE);
    world_step(&w);
    for (int i = 0; i < 100 && mapped(&w) > 2 * CACHED * PAGE; i++) /* a GPU that is busy with others takes longer */
        wait_polling(&w, 200);
    cr_expect_leq(mapped(&w), 2 * CACHED * PAGE);
    world_close(&w);
}

/* The same with the reaper, which sleeps while nothing passes. */
Test(idle, memory_decays_once_its_fence_has_passed, .timeout = 60)
{
    needs_simulator();
    struct setup setup = with_decay(20, true);
    struct world w;
    world_open(&w, &setup);
    CUstream s = hold_back(&w);
    sleep_ms(200);
    cr_expect_geq(mapped(&w), 4 * PAGE);
    world_run(&w, s, SIZE_MAX);
    wait_for_mapped(&w, 0);
    cr_expect_eq(mapped(&w), 0);
    expect_rest(&w);
    world_close(&w);
}

/* Who comes back to a peak well within the time makes no memory anew. */
Test(idle, a_peak_that_comes_back_is_kept, .timeout = 60)
{
    struct setup setup = with_decay(100 * DECAY_MS, false);
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    need_once(&w, s);
    uint64_t begin = stats_of(&w).pages_created;
    for (int i = 0; i < 5; i++) {
        wait_polling(&w, 20);
        need_once(&w, s);
    }
    cr_expect_leq(stats_of(&w).pages_created, begin + begin / 50);
    world_close(&w);
}

/* Two streams need as much in turn, the second while the GPU still works on what the first has freed. */
static void need_by_turns(struct world *w, CUstream first, CUstream second)
{
    CUdeviceptr p[BLOCKS];
    take_blocks(w, p, first);
    keep_busy(w, first);
    for (int i = 0; i < BLOCKS; i++)
        give(w, p[i], first);
    need_once(w, second);
    world_run(w, first, SIZE_MAX);
}

static void expect_margin(struct world *w, CUstream first, CUstream second)
{
    need_by_turns(w, first, second);
    uint64_t begin = mapped(w), made = stats_of(w).pages_created;
    cr_expect_geq(begin, 2 * USED_PAGES * PAGE, "the second stream did not need memory of its own");
    for (int i = 0; i < 5; i++) {
        wait_polling(w, DECAY_MS / 4.0);
        need_by_turns(w, first, second);
    }
    cr_expect_eq(stats_of(w).pages_created, made, "%llu pages went and were made anew",
                 (unsigned long long)(stats_of(w).pages_created - made));
    cr_expect_eq(mapped(w), begin);
}

/* What is mapped beyond a peak was needed for it: it is kept as long as the peak comes back, and goes with it. */
Test(idle, what_a_peak_needs_beyond_itself_is_kept, .timeout = 60)
{
    needs_simulator();
    struct setup setup = with_decay(4 * DECAY_MS, false);
    setup.pool.reuse = VPMM_REUSE_COMPLETED;
    struct world w;
    world_open(&w, &setup);
    expect_margin(&w, world_stream(&w), world_stream(&w));
    double begin = now_ms();
    while (mapped(&w) && now_ms() < begin + 40 * DECAY_MS)
        wait_polling(&w, 10);
    cr_expect_eq(mapped(&w), 0);
    world_audit(&w);
    world_close(&w);
}

/* And no more of it than the share that a lower peak has. */
Test(idle, of_what_a_peak_needs_beyond_itself_a_lower_one_keeps_its_share, .timeout = 60)
{
    needs_simulator();
    struct setup setup = with_decay(2 * DECAY_MS, false);
    setup.pool.reuse = VPMM_REUSE_COMPLETED;
    setup.pool.extent_size = PAGE;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    need_by_turns(&w, s, world_stream(&w));
    for (double begin = now_ms(); now_ms() < begin + 5 * DECAY_MS;) {
        CUdeviceptr p = take(&w, USED_PAGES / 4, s);
        wait_polling(&w, 10);
        give(&w, p, s);
        world_run(&w, s, SIZE_MAX);
    }
    uint64_t used = USED_PAGES / 4 * PAGE;
    cr_expect_leq(mapped(&w), 2 * used + used / 4, "%llu MiB", (unsigned long long)(mapped(&w) / MIB));
    cr_expect_geq(mapped(&w), 2 * used - used / 4, "%llu MiB", (unsigned long long)(mapped(&w) / MIB));
    world_close(&w);
}

/* Nor does a step take anything while a malloc builds. */
Test(idle, decay_gives_way_to_builds, .timeout = 60)
{
    struct setup setup = with_decay(0, false);
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    need_once(&w, s);
    struct turn_place place;
    turn_take(&w.pool->arena.turn, &place);
    wait_polling(&w, 50);
    cr_expect_geq(mapped(&w), USED_PAGES * PAGE);
    turn_leave(&w.pool->arena.turn, &place);
    for (int i = 0; i < 40 && mapped(&w); i++)
        wait_polling(&w, 50);
    cr_expect_eq(mapped(&w), 0);
    world_close(&w);
}

/* Front caches in use keep what they hold; untouched ones are emptied, and then it decays. */
Test(idle, caches_in_use_are_left_alone, .timeout = 60)
{
    needs_simulator();
    struct setup setup = with_decay(20, true);
    setup.pool.cache_bytes = 256 * MIB;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    give(&w, take(&w, 4, s), s);
    uint64_t released = stats_of(&w).extents_released, misses = 0;
    uint64_t pauses = 0; /* of a loaded machine, in which the cache is not in use */
    for (int i = 0; i < 300; i++) {
        uint64_t hits = stats_of(&w).hits_cache;
        double begin = now_ms();
        give(&w, take(&w, 4, s), s);
        misses += stats_of(&w).hits_cache == hits;
        sleep_ms(1);
        pauses += now_ms() - begin > FRONT_IDLE_US / 2000.0;
    }
    cr_expect_leq(misses, 30 + pauses, "%llu of 300 mallocs are no hits", (unsigned long long)misses);
    cr_expect_leq(stats_of(&w).extents_released - released, 30 + pauses);
    wait_for_mapped(&w, 0);
    cr_expect_eq(mapped(&w), 0);
    expect_rest(&w);
    world_close(&w);
}

/* What is kept for small requests goes too when nothing is asked for any more. */
static void small_requests_decay(bool reaper)
{
    enum { PIECES = 2000 };
    static CUdeviceptr p[PIECES];
    struct setup setup = with_decay(50, reaper);
    setup.pool.cache_bytes = 64 * MIB;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    for (int i = 0; i < PIECES; i++)
        p[i] = take_bytes(&w, (size_t)256 << i % 11, s);
    cr_expect_gt(mapped(&w), 0);
    for (int i = 0; i < PIECES; i++)
        give(&w, p[i], s);
    for (double end = now_ms() + PATIENCE_MS; now_ms() < end && mapped(&w) > 0; sleep_ms(1)) {
        world_step(&w);
        if (!reaper)
            must_work(vpmm_poll(w.pool));
    }
    cr_expect_eq(mapped(&w), 0, "%llu pages stay", (unsigned long long)(mapped(&w) / PAGE));
    if (reaper)
        expect_rest(&w);
    world_audit(&w);
    world_close(&w);
}

Test(idle, small_requests_leave_nothing_behind, .timeout = 60)
{
    small_requests_decay(false);
}

Test(idle, small_requests_leave_nothing_behind_the_reaper, .timeout = 60)
{
    needs_simulator();
    small_requests_decay(true);
}

/*
 * The step that ends the epoch gives the slab's page up, which was in use until then: the rest of its extent is not
 * more than what is mapped beyond that use, the whole extent is. The pause is longer than the decay, so that nothing
 * but the use is left of the target.
 */
Test(idle, what_a_step_gives_up_is_not_in_use_for_it, .timeout = 60)
{
    struct setup setup = with_decay(20, false);
    setup.pool.extent_size = 4 * PAGE;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    give(&w, take(&w, 4, s), s);
    CUdeviceptr slice = take_bytes(&w, 1000, s);
    must_work(vpmm_poll(w.pool));
    cr_assert_eq(mapped(&w), 4 * PAGE);
    give(&w, slice, s);
    for (int i = 0; i < 10; i++) {
        world_step(&w);
        sleep_ms(40);
        must_work(vpmm_poll(w.pool));
    }
    cr_expect_eq(mapped(&w), 0, "%llu pages stay", (unsigned long long)(mapped(&w) / PAGE));
    world_close(&w);
}

/* What decay gave back no pass makes again. */
Test(idle, what_decayed_stays_given_back, .timeout = 60)
{
    struct setup setup = with_decay(40, false);
    setup.pool.va_size = 8 * GIB;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr kept = take(&w, 3, s);
    use_and_free(&w, s);
    wait_polling(&w, 400);
    uint64_t left = mapped(&w), created = stats_of(&w).pages_created;
    poll_often(&w);
    cr_expect_leq(mapped(&w), left);
    cr_expect_eq(stats_of(&w).pages_created, created);
    give(&w, kept, s);
    world_close(&w);
}

/* --- attributes --- */

static uint64_t attribute(struct world *w, vpmm_attribute which)
{
    uint64_t value = 12345;
    must_work(vpmm_pool_get_attribute(w->pool, which, &value));
    return value;
}

Test(attributes, begin_as_the_configuration_says)
{
    struct setup setup = with_decay(777, false);
    setup.pool.release_threshold = 5 * PAGE;
    setup.pool.max_mapped = 100 * PAGE;
    setup.pool.reuse = VPMM_REUSE_WAIT_HOST;
    struct world w;
    world_open(&w, &setup);
    cr_expect_eq(attribute(&w, VPMM_ATTRIBUTE_RELEASE_THRESHOLD), 5 * PAGE);
    cr_expect_eq(attribute(&w, VPMM_ATTRIBUTE_DECAY_MS), 777);
    cr_expect_eq(attribute(&w, VPMM_ATTRIBUTE_MAX_MAPPED), 100 * PAGE);
    cr_expect_eq(attribute(&w, VPMM_ATTRIBUTE_REUSE), VPMM_REUSE_WAIT_HOST);
    cr_expect_eq(attribute(&w, VPMM_ATTRIBUTE_PEAK_MAPPED), 0);
    cr_expect_eq(attribute(&w, VPMM_ATTRIBUTE_PEAK_LIVE), 0);
    cr_expect_eq(attribute(&w, VPMM_ATTRIBUTE_PEAK_REQUESTED), 0);
    world_close(&w);
}

Test(attributes, what_is_set_is_read)
{
    static const struct {
        vpmm_attribute attribute;
        uint64_t value;
    } good[] = {{VPMM_ATTRIBUTE_RELEASE_THRESHOLD, 0},
                {VPMM_ATTRIBUTE_RELEASE_THRESHOLD, UINT64_MAX},
                {VPMM_ATTRIBUTE_DECAY_MS, 0},
                {VPMM_ATTRIBUTE_DECAY_MS, 1000000000},
                {VPMM_ATTRIBUTE_DECAY_MS, VPMM_DECAY_NEVER},
                {VPMM_ATTRIBUTE_MAX_MAPPED, 1},
                {VPMM_ATTRIBUTE_MAX_MAPPED, UINT64_MAX},
                {VPMM_ATTRIBUTE_MAX_MAPPED, 0},
                {VPMM_ATTRIBUTE_REUSE, VPMM_REUSE_COMPLETED},
                {VPMM_ATTRIBUTE_REUSE, VPMM_REUSE_WAIT_HOST},
                {VPMM_ATTRIBUTE_REUSE, VPMM_REUSE_WAIT_DEVICE},
                {VPMM_ATTRIBUTE_PEAK_MAPPED, 0},
                {VPMM_ATTRIBUTE_PEAK_LIVE, 0},
                {VPMM_ATTRIBUTE_PEAK_REQUESTED, 0}};
    struct world w;
    world_open(&w, NULL);
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        must_work(vpmm_pool_set_attribute(w.pool, good[i].attribute, good[i].value));
        cr_expect_eq(attribute(&w, good[i].attribute), good[i].value, "attribute %d", (int)good[i].attribute);
    }
    world_close(&w);
}

/* Refused in words that name the attribute, the value and what is allowed; nothing has changed. */
static void refused(struct world *w, vpmm_attribute which, uint64_t value, const char *name, const char *words,
                    const char *allowed)
{
    uint64_t before = attribute(w, which);
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_pool_set_attribute(w->pool, which, value));
    cr_expect(strstr(vpmm_last_error(), name), "no %s in: %s", name, vpmm_last_error());
    cr_expect(strstr(vpmm_last_error(), words), "no %s in: %s", words, vpmm_last_error());
    cr_expect(strstr(vpmm_last_error(), allowed), "no \"%s\" in: %s", allowed, vpmm_last_error());
    cr_expect_eq(attribute(w, which), before);
}

Test(attributes, wrong_ones_are_refused)
{
    struct world w;
    uint64_t value = 7;
    world_open(&w, NULL);
    refused(&w, VPMM_ATTRIBUTE_DECAY_MS, 1000000001, "DECAY_MS", " 1000000001;", "VPMM_DECAY_NEVER");
    refused(&w, VPMM_ATTRIBUTE_DECAY_MS, VPMM_DECAY_NEVER - 1, "DECAY_MS", " 18446744073709551614;", "0 to 1000000000");
    refused(&w, VPMM_ATTRIBUTE_REUSE, 3, "REUSE", " 3;", "VPMM_REUSE_WAIT_HOST (2)");
    refused(&w, VPMM_ATTRIBUTE_REUSE, (uint64_t)1 << 32, "REUSE", " 4294967296;", "VPMM_REUSE_COMPLETED (1)");
    refused(&w, VPMM_ATTRIBUTE_PEAK_MAPPED, 1, "PEAK_MAPPED", " 1;", "0");
    refused(&w, VPMM_ATTRIBUTE_PEAK_LIVE, UINT64_MAX, "PEAK_LIVE", " 18446744073709551615;", "0");
    refused(&w, VPMM_ATTRIBUTE_PEAK_REQUESTED, 1, "PEAK_REQUESTED", " 1;", "0");
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_pool_set_attribute(w.pool, (vpmm_attribute)7, 0));
    cr_expect(strstr(vpmm_last_error(), " 7;") && strstr(vpmm_last_error(), "VPMM_ATTRIBUTE_PEAK_REQUESTED"), "%s",
              vpmm_last_error());
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_pool_get_attribute(w.pool, (vpmm_attribute)-1, &value));
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_pool_set_attribute(NULL, VPMM_ATTRIBUTE_REUSE, 0));
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_pool_get_attribute(NULL, VPMM_ATTRIBUTE_REUSE, &value));
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_pool_get_attribute(w.pool, VPMM_ATTRIBUTE_REUSE, NULL));
    cr_expect_eq(value, 7, "the output is written on failure");
    world_close(&w);
}

/* A reaper that sleeps for good, or for hours, hears of it. */
static void settings_wake_the_reaper(uint64_t decay_ms, vpmm_attribute which, uint64_t value)
{
    struct setup setup = with_decay(decay_ms, true);
    setup.pool.release_threshold = UINT64_MAX;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    need_once(&w, s);
    if (which != VPMM_ATTRIBUTE_RELEASE_THRESHOLD)
        must_work(vpmm_pool_set_attribute(w.pool, VPMM_ATTRIBUTE_RELEASE_THRESHOLD, 0));
    expect_rest(&w);
    cr_expect_geq(mapped(&w), USED_PAGES * PAGE);
    must_work(vpmm_pool_set_attribute(w.pool, which, value));
    wait_for_mapped(&w, 0);
    cr_expect_eq(mapped(&w), 0);
    expect_rest(&w);
    world_close(&w);
}

Test(attributes, a_lower_threshold_lets_go_at_once, .timeout = 60)
{
    needs_simulator();
    settings_wake_the_reaper(20, VPMM_ATTRIBUTE_RELEASE_THRESHOLD, 0);
}

/* The extents were too long for what was above the old one. */
Test(attributes, a_lower_threshold_counts_though_the_last_try_was_in_vain)
{
    struct setup setup = with_decay(0, false);
    struct world w;
    setup.pool.extent_size = 20 * PAGE;
    setup.pool.release_threshold = 30 * PAGE;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr p = take(&w, 20, s), q = take(&w, 20, s);
    give(&w, p, s);
    world_drain(&w);
    cr_assert_eq(mapped(&w), 40 * PAGE);
    must_work(vpmm_pool_set_attribute(w.pool, VPMM_ATTRIBUTE_RELEASE_THRESHOLD, 20 * PAGE));
    must_work(vpmm_poll(w.pool));
    cr_expect_eq(mapped(&w), 20 * PAGE);
    give(&w, q, s);
    world_close(&w);
}

Test(attributes, a_shorter_decay_lets_go_at_once, .timeout = 60)
{
    needs_simulator();
    settings_wake_the_reaper(1000000000, VPMM_ATTRIBUTE_DECAY_MS, 0);
    settings_wake_the_reaper(1000000000, VPMM_ATTRIBUTE_DECAY_MS, 50);
    settings_wake_the_reaper(VPMM_DECAY_NEVER, VPMM_ATTRIBUTE_DECAY_MS, 50);
}

Test(attributes, a_cap_below_what_is_mapped_stops_growth)
{
    struct world w;
    world_open(&w, NULL);
    CUstream s = world_stream(&w);
    CUdeviceptr p[4], q = 0;
    for (int i = 0; i < 4; i++)
        p[i] = take(&w, 32, s);
    uint64_t held = mapped(&w);
    must_work(vpmm_pool_set_attribute(w.pool, VPMM_ATTRIBUTE_MAX_MAPPED, 64 * PAGE));
    cr_expect_eq(mapped(&w), held);
    must_fail(VPMM_ERROR_OUT_OF_MEMORY, vpmm_malloc(w.pool, 64 * PAGE, s, &q));
    cr_expect(strstr(vpmm_last_error(), "cap 134217728"), "%s", vpmm_last_error());
    give(&w, p[0], s);
    p[0] = take(&w, 32, s); /* what is mapped is used on */
    for (int i = 0; i < 4; i++)
        give(&w, p[i], s);
    world_drain(&w);
    must_work(vpmm_trim(w.pool, 0, NULL));
    p[0] = take(&w, 64, s);
    cr_expect_eq(mapped(&w), 64 * PAGE);
    must_fail(VPMM_ERROR_OUT_OF_MEMORY, vpmm_malloc(w.pool, PAGE, s, &q));
    must_work(vpmm_pool_set_attribute(w.pool, VPMM_ATTRIBUTE_MAX_MAPPED, 0));
    give(&w, take(&w, 64, s), s);
    give(&w, p[0], s);
    world_audit(&w);
    world_close(&w);
}

Test(attributes, reuse_changes_for_the_calls_that_follow)
{
    struct world w;
    world_open(&w, NULL);
    CUstream s = world_stream(&w), other = world_stream(&w);
    must_work(vpmm_pool_set_attribute(w.pool, VPMM_ATTRIBUTE_REUSE, VPMM_REUSE_COMPLETED));
    CUdeviceptr p = take(&w, 4, s);
    keep_busy(&w, s);
    give(&w, p, s);
    uint64_t waited = stats_of(&w).hits_waited;
    CUdeviceptr q = take(&w, 4, other);
    cr_expect_eq(stats_of(&w).hits_waited, waited);
    must_work(vpmm_pool_set_attribute(w.pool, VPMM_ATTRIBUTE_REUSE, VPMM_REUSE_WAIT_DEVICE));
    CUdeviceptr r = take(&w, 4, other);
    cr_expect_eq(stats_of(&w).hits_waited, waited + 1);
    give(&w, q, other);
    give(&w, r, other);
    world_step(&w);
    world_close(&w);
}

/* Peaks after a reset are exact with one thread, in front caches too. */
static void peaks_begin_again(size_t cache_bytes)
{
    struct setup setup = setup_default();
    setup.pool.cache_bytes = cache_bytes;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr kept = take(&w, 3, s);
    for (int i = 0; i < 2; i++) { /* once by building, then by hits */
        CUdeviceptr p = take(&w, 20, s), q = take(&w, 10, s);
        give(&w, q, s);
        give(&w, p, s);
    }
    cr_expect_eq(attribute(&w, VPMM_ATTRIBUTE_PEAK_LIVE), 33 * PAGE);
    must_work(vpmm_pool_set_attribute(w.pool, VPMM_ATTRIBUTE_PEAK_LIVE, 0));
    cr_expect_eq(attribute(&w, VPMM_ATTRIBUTE_PEAK_LIVE), 3 * PAGE);
    give(&w, take(&w, 10, s), s);
    cr_expect_eq(attribute(&w, VPMM_ATTRIBUTE_PEAK_LIVE), 13 * PAGE);
    give(&w, take(&w, 20, s), s);
    cr_expect_eq(stats_of(&w).peak_live_bytes, 23 * PAGE);
    give(&w, kept, s);
    world_drain(&w);
    uint64_t peak = attribute(&w, VPMM_ATTRIBUTE_PEAK_MAPPED);
    cr_expect_geq(peak, 33 * PAGE);
    for (int i = 0; i < 2; i++, world_drain(&w)) /* what was cached is first marked */
        must_work(vpmm_trim(w.pool, 0, NULL));
    cr_expect_eq(mapped(&w), 0);
    cr_expect_eq(attribute(&w, VPMM_ATTRIBUTE_PEAK_MAPPED), peak);
    must_work(vpmm_pool_set_attribute(w.pool, VPMM_ATTRIBUTE_PEAK_MAPPED, 0));
    cr_expect_eq(attribute(&w, VPMM_ATTRIBUTE_PEAK_MAPPED), 0);
    give(&w, take(&w, 10, s), s);
    cr_expect_geq(attribute(&w, VPMM_ATTRIBUTE_PEAK_MAPPED), 10 * PAGE);
    world_close(&w);
}

Test(attributes, peaks_begin_again)
{
    peaks_begin_again(0);
}

Test(attributes, peaks_of_front_caches_begin_again)
{
    peaks_begin_again(256 * MIB);
}

/* One that serves all requests from the driver's pool. */
Test(attributes, a_pool_without_pages_keeps_them)
{
    needs_simulator();
    struct setup setup = setup_default();
    setup.sim.vmm = false;
    setup.pool.reaper = true;
    struct world w;
    world_open(&w, &setup);
    for (vpmm_attribute which = VPMM_ATTRIBUTE_RELEASE_THRESHOLD; which <= VPMM_ATTRIBUTE_PEAK_REQUESTED; which++) {
        must_work(vpmm_pool_set_attribute(w.pool, which, 0));
        cr_expect_eq(attribute(&w, which), 0);
    }
    world_close(&w);
}
