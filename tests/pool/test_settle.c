/*
 * What a malloc waits for before it fails: for what was freed before, whichever stream of it is first, and for nothing
 * that cannot serve it any more; and what the others do meanwhile.
 */
#define _GNU_SOURCE 1

#include "pool/pool.h"
#include "support.h"

#include "base/clock.h"
#include "remap/hands.h"

#include <pthread.h>

enum { LOOK_US = 50 };

/* A busy machine may need seconds for what is done meanwhile. */
#define LONGEST_NS (30 * UINT64_C(1000000000))

/* ---- work that ends when the test says so ---- */

struct gate {
    atomic_bool reached, open, forced; /* forced: nobody opened it for LONGEST_NS, since the test waits for its work */
};

static void wait_at(void *argument)
{
    struct gate *gate = argument;
    uint64_t end = clock_now_ns() + LONGEST_NS;
    atomic_store(&gate->reached, true);
    while (!atomic_load(&gate->open) && clock_now_ns() < end)
        clock_sleep_us(LOOK_US);
    atomic_store(&gate->forced, !atomic_load(&gate->open));
}

/* Returns when the stream has come to it. */
static void hold(struct world *w, CUstream stream, struct gate *gate)
{
    *gate = (struct gate){false};
    require(w->driver->cuLaunchHostFunc(stream, wait_at, gate) == CUDA_SUCCESS, "cuLaunchHostFunc");
    while (!atomic_load(&gate->reached))
        clock_sleep_us(LOOK_US);
}

static void note(void *done)
{
    atomic_store((atomic_bool *)done, true);
}

/* On a GPU that stands still: work that says when it is done. */
static void work_noted(struct world *w, CUstream stream, atomic_bool *done)
{
    atomic_store(done, false);
    require(w->driver->cuLaunchHostFunc(stream, note, done) == CUDA_SUCCESS, "cuLaunchHostFunc");
}

/*
 * ---- a pool at its cap, with memory that it has given back and that the driver does not take before a stream has come
 * to a point: for that no stream can wait on the device.
 */

enum { CAP = 6 };

struct stage {
    struct world w;
    CUstream last, a, idle, asks; /* in the order of their slots */
    CUdeviceptr page[CAP], more[CAP];
    int mores;
};

static struct setup running(void)
{
    struct setup setup = setup_default();
    setup.sim.stepped = false;
    setup.pool.reaper = true;
    return setup;
}

static struct setup caching(void)
{
    struct setup setup = running();
    setup.pool.cache_bytes = 64 * PAGE;
    return setup;
}

static void stage_open(struct stage *t, struct setup setup)
{
    needs_simulator();
    setup.pool.max_mapped = CAP * PAGE;
    setup.pool.extent_size = PAGE;
    setup.pool.decay_ms = VPMM_DECAY_NEVER;
    world_open(&t->w, &setup);
    t->last = world_stream(&t->w);
    t->a = world_stream(&t->w);
    t->idle = world_stream(&t->w);
    t->asks = world_stream(&t->w);
    t->mores = 0;
    CUstream stream[] = {t->last, t->a, t->idle, t->asks};
    for (int i = 0; i < CAP; i++)
        t->page[i] = take(&t->w, 1, stream[i % 4]);
}

/*
 * Of three neighbours the stream frees the first and the last, and joins them elsewhere, behind all that it has been
 * given; that is given back, and some of it still has its old address.
 */
static void quarantine(struct stage *t, CUdeviceptr three[3], CUstream stream)
{
    uint64_t before = stats_of(&t->w).quarantined_bytes;
    give(&t->w, three[0], stream);
    give(&t->w, three[2], stream);
    give(&t->w, take(&t->w, 2, stream), t->idle);
    for (int i = 0; stats_of(&t->w).quarantined_bytes == before; i++) {
        require(i < 1000, "the driver takes it at once: %s", layout(&t->w));
        must_work(vpmm_poll(t->w.pool));
        must_work(vpmm_trim(t->w.pool, 0, NULL));
        world_run(&t->w, t->idle, SIZE_MAX);
        clock_sleep_us(LOOK_US); /* a GPU that runs does what idle was given */
    }
}

/* Until nothing can be made any more. */
static void fill_up(struct stage *t)
{
    vpmm_stats s = stats_of(&t->w);
    while (s.mapped_bytes + s.quarantined_bytes < CAP * PAGE) {
        t->more[t->mores++] = take(&t->w, 1, t->asks);
        s = stats_of(&t->w);
    }
    cr_assert_eq(s.reusable_bytes, 0);
    cr_assert_geq(s.quarantined_bytes, PAGE);
}

static void free_kept(struct stage *t)
{
    for (int i = 0; i < t->mores; i++)
        give(&t->w, t->more[i], t->asks);
    give(&t->w, t->page[1], t->asks);
    give(&t->w, t->page[4], t->asks);
}

static void stage_close(struct stage *t)
{
    world_drain(&t->w);
    world_audit(&t->w);
    world_close(&t->w);
}

/* ---- threads that ask ---- */

/* Returns when so many have come to tier 6, and some time after that. */
static void start_and_wait(struct malloc_thread *asker, struct world *w, CUstream stream, size_t pages,
                           uint64_t reclaims)
{
    malloc_thread_start(asker, w, stream, pages);
    while (stats_of(w).reclaims < reclaims && !atomic_load(&asker->done))
        clock_sleep_us(LOOK_US);
    clock_sleep_us(20000);
}

/* Returns when a thread waits for an event on the host. */
static void await_waiter(const struct world *w)
{
    const struct streams *streams = &w->pool->arena.streams;
    for (bool waits = false; !waits; clock_sleep_us(LOOK_US))
        for (uint32_t slot = 1; slot < load_acquire_u32(&streams->slots); slot++)
            waits = waits || load_sc_u32(&stream_at(streams, slot)->waiters);
}

/* ---- whichever is first ---- */

Test(settle, who_is_served_by_short_work_does_not_wait_for_long_work, .timeout = 60)
{
    struct stage t;
    struct gate long_work, short_work;
    stage_open(&t, running());
    hold(&t.w, t.last, &long_work);
    hold(&t.w, t.a, &short_work);
    quarantine(&t, &t.page[0], t.last);
    quarantine(&t, &t.page[3], t.a);
    fill_up(&t);
    struct malloc_thread asker;
    start_and_wait(&asker, &t.w, t.asks, 1, 1);
    cr_expect(!atomic_load(&asker.done), "it was served before it had to wait");
    atomic_store(&short_work.open, true);
    pthread_join(asker.thread, NULL);
    cr_expect_eq(asker.status, VPMM_SUCCESS);
    cr_expect(!atomic_load(&long_work.forced), "the request waited for work that it does not need");
    cr_expect(world_pending(&t.w, t.last));
    atomic_store(&long_work.open, true);
    give(&t.w, asker.pointer, t.asks);
    free_kept(&t);
    stage_close(&t);
}

/* The same where the pool has no thread, and the GPU stands still while nobody waits for it. */
Test(settle, without_a_thread_the_stream_with_the_fewest_fences_is_waited_for_first)
{
    struct stage t;
    atomic_bool done, done_last;
    stage_open(&t, setup_default());
    work_noted(&t.w, t.last, &done_last);
    work_noted(&t.w, t.a, &done);
    for (int i = 0; i < 8; i++) {
        give(&t.w, t.page[1], t.last);
        t.page[1] = take(&t.w, 1, t.last);
    }
    quarantine(&t, &t.page[0], t.last);
    quarantine(&t, &t.page[3], t.a);
    fill_up(&t);
    CUdeviceptr p = take(&t.w, 1, t.asks);
    cr_expect(atomic_load(&done), "it was served before it had to wait");
    cr_expect(!atomic_load(&done_last), "the request waited for work that it does not need");
    give(&t.w, p, t.asks);
    free_kept(&t);
    stage_close(&t);
}

/* No further than to the mark that it needs, either. */
Test(settle, without_a_thread_a_stream_is_waited_for_mark_by_mark)
{
    struct stage t;
    atomic_bool first, second;
    stage_open(&t, setup_default());
    work_noted(&t.w, t.a, &first);
    quarantine(&t, &t.page[3], t.a);
    work_noted(&t.w, t.a, &second);
    quarantine(&t, &t.page[0], t.a);
    fill_up(&t);
    CUdeviceptr p = take(&t.w, 1, t.asks);
    cr_expect(atomic_load(&first), "it was served before it had to wait");
    cr_expect(!atomic_load(&second), "the request waited for all that the stream was given");
    give(&t.w, p, t.asks);
    free_kept(&t);
    stage_close(&t);
}

/* All that was freed before counts as one wait, however often something of it passes. */
Test(settle, without_a_thread_what_is_behind_many_marks_is_waited_for)
{
    enum { MARKS = 8 };
    struct stage t;
    stage_open(&t, setup_default());
    for (int i = 0; i < MARKS; i++) {
        keep_busy(&t.w, t.a);
        give(&t.w, t.page[1], t.a);
        t.page[1] = take(&t.w, 1, t.a);
    }
    quarantine(&t, &t.page[3], t.a);
    fill_up(&t);
    CUdeviceptr p = take(&t.w, 1, t.asks);
    give(&t.w, p, t.asks);
    give(&t.w, t.page[0], t.asks);
    give(&t.w, t.page[2], t.asks);
    free_kept(&t);
    stage_close(&t);
}

/* ---- no more than what was freed before, and no less ---- */

/* Together with what is left it is less than the request needs. */
Test(settle, what_is_freed_meanwhile_is_not_waited_for, .timeout = 60)
{
    struct stage t;
    struct gate early, late;
    struct malloc_thread asker;
    stage_open(&t, running());
    hold(&t.w, t.a, &early);
    quarantine(&t, &t.page[3], t.a);
    fill_up(&t);
    malloc_thread_start(&asker, &t.w, t.asks, CAP);
    await_waiter(&t.w); /* by then it knows what it waits for */
    hold(&t.w, t.last, &late);
    give(&t.w, t.page[0], t.last);
    cr_expect(!atomic_load(&asker.done), "it did not wait for what was freed before");
    atomic_store(&early.open, true);
    pthread_join(asker.thread, NULL);
    cr_expect(!atomic_load(&late.forced), "it waited for what was freed meanwhile");
    cr_expect_eq(asker.status, VPMM_ERROR_OUT_OF_MEMORY);
    atomic_store(&late.open, true);
    give(&t.w, t.page[2], t.asks);
    free_kept(&t);
    stage_close(&t);
}

/* Work that ends first, and work behind which something is freed while the asker waits for the first. */
struct meanwhile {
    struct gate early, late;
    struct malloc_thread asker;
};

static void hold_both(struct stage *t, struct meanwhile *m)
{
    hold(&t->w, t->a, &m->early);
    hold(&t->w, t->last, &m->late);
    quarantine(t, &t->page[3], t->a);
    fill_up(t);
}

/* Returns when it knows what it waits for. */
static void ask(struct stage *t, struct meanwhile *m, size_t pages)
{
    malloc_thread_start(&m->asker, &t->w, t->asks, pages);
    await_waiter(&t->w);
}

static void expect_to_wait_for_both(struct stage *t, struct meanwhile *m)
{
    atomic_store(&m->early.open, true);
    clock_sleep_us(50000);
    cr_expect(!atomic_load(&m->asker.done), "it ended while there was more to come");
    atomic_store(&m->late.open, true);
    pthread_join(m->asker.thread, NULL);
    cr_expect_eq(m->asker.status, VPMM_SUCCESS);
    cr_expect(!atomic_load(&m->early.forced) && !atomic_load(&m->late.forced));
    if (m->asker.status == VPMM_SUCCESS)
        give(&t->w, m->asker.pointer, t->asks);
}

/* Together with what was freed before it is enough. The asker wants all but what stays live, here and below. */
Test(settle, what_is_freed_meanwhile_is_waited_for_where_it_may_suffice, .timeout = 60)
{
    struct stage t;
    struct meanwhile m;
    stage_open(&t, running());
    hold_both(&t, &m);
    ask(&t, &m, CAP - 2 - (size_t)t.mores);
    quarantine(&t, &t.page[0], t.last);
    expect_to_wait_for_both(&t, &m);
    free_kept(&t);
    stage_close(&t);
}

/* A page that is cut is free when its slices are, here behind work of another stream than the slab's. */
Test(settle, slices_that_are_freed_meanwhile_are_waited_for_where_they_may_suffice, .timeout = 60)
{
    struct stage t;
    struct meanwhile m;
    CUdeviceptr slice;
    stage_open(&t, running());
    give(&t.w, t.page[2], t.idle);
    must_work(vpmm_malloc(t.w.pool, 1000, t.idle, &slice));
    hold_both(&t, &m);
    ask(&t, &m, CAP - 3 - (size_t)t.mores);
    give(&t.w, slice, t.last);
    expect_to_wait_for_both(&t, &m);
    give(&t.w, t.page[0], t.asks);
    free_kept(&t);
    stage_close(&t);
}

static void expect_to_wait_for_the_first_alone(struct stage *t, struct meanwhile *m)
{
    atomic_store(&m->early.open, true);
    pthread_join(m->asker.thread, NULL);
    cr_expect(world_pending(&t->w, t->last), "it waited for what is not enough");
    cr_expect_eq(m->asker.status, VPMM_ERROR_OUT_OF_MEMORY);
    atomic_store(&m->late.open, true);
}

/* The device has so many pages. The cap is in pages, 0: none. The asker wants so many more than may be had. */
enum { DEVICE = CAP + 2 };

static void wait_on_the_device(size_t cap, size_t more, bool says, void (*expect)(struct stage *, struct meanwhile *))
{
    struct stage t;
    struct meanwhile m;
    struct setup setup = running();
    setup.sim.memory_bytes = DEVICE * PAGE;
    stage_open(&t, setup);
    hold_both(&t, &m);
    must_work(vpmm_pool_set_attribute(t.w.pool, VPMM_ATTRIBUTE_MAX_MAPPED, cap * PAGE));
    if (!says)
        vpmm_sim_fail(t.w.sim, "cuMemGetInfo", 1, CUDA_ERROR_NOT_SUPPORTED, true);
    ask(&t, &m, DEVICE - 2 - (size_t)t.mores + more);
    quarantine(&t, &t.page[0], t.last);
    expect(&t, &m);
    free_kept(&t);
    stage_close(&t);
}

/* Without a cap it is the device that has no more, and what it has counts. */
Test(settle, what_is_freed_meanwhile_is_waited_for_where_the_device_has_the_rest, .timeout = 60)
{
    wait_on_the_device(0, 0, true, expect_to_wait_for_both);
}

/* A cap above what the device has is no reason to wait, */
Test(settle, what_is_freed_meanwhile_is_not_waited_for_where_the_device_has_too_little, .timeout = 60)
{
    wait_on_the_device(DEVICE + 8, 1, true, expect_to_wait_for_the_first_alone);
}

/* but where the device does not say what it has. */
Test(settle, what_is_freed_meanwhile_is_waited_for_where_the_device_does_not_say_what_it_has, .timeout = 60)
{
    wait_on_the_device(DEVICE + 8, 0, false, expect_to_wait_for_both);
}

/* ---- not for ever ---- */

enum { HANDLE = 4, HANDLES = 6, MOST_WAITS = 100 };

static struct {
    const vpmm_driver *simulated;
    struct world *w;
    CUstream stream;
    CUdeviceptr page;
    unsigned waits;
} busy;

/* As another thread, which takes the page and frees it behind work, whenever some of that has been waited for. */
static void use_and_free(void)
{
    busy.page = take(busy.w, 1, busy.stream);
    keep_busy(busy.w, busy.stream);
    give(busy.w, busy.page, busy.stream);
}

static CUresult CUDAAPI synchronize_beside_frees(CUevent event)
{
    CUresult result = busy.simulated->cuEventSynchronize(event);
    if (++busy.waits < MOST_WAITS)
        use_and_free();
    return result;
}

/* Three pages of each handle are free, and no four beside one another: whatever is freed does not serve four. */
Test(settle, what_is_freed_all_the_time_is_not_waited_for_for_ever)
{
    static vpmm_driver driver;
    struct world w;
    CUdeviceptr first[HANDLES], rest[HANDLES], none;
    struct setup setup = setup_default();
    needs_simulator();
    setup.pool.extent_size = HANDLE * PAGE;
    setup.pool.max_mapped = HANDLES * HANDLE * PAGE;
    world_open_without_pool(&w, &setup);
    busy.simulated = w.driver;
    busy.w = &w;
    busy.waits = 0;
    driver = *w.driver;
    driver.cuEventSynchronize = synchronize_beside_frees;
    setup.pool.driver = &driver;
    must_work(vpmm_pool_create(&setup.pool, &w.pool));
    CUstream s = world_stream(&w);
    busy.stream = world_stream(&w);
    for (int i = 0; i < HANDLES; i++) {
        give(&w, take(&w, HANDLE, s), s);
        first[i] = take(&w, 1, s);
        rest[i] = take(&w, HANDLE - 1, s);
    }
    for (int i = 0; i < HANDLES; i++)
        give(&w, rest[i], s);
    use_and_free();
    must_fail(VPMM_ERROR_OUT_OF_MEMORY, vpmm_malloc(w.pool, HANDLE * PAGE, s, &none));
    cr_expect_gt(busy.waits, 0, "it waited for nothing");
    cr_expect_lt(busy.waits, MOST_WAITS, "it waits as long as others free");
    for (int i = 0; i < HANDLES; i++)
        give(&w, first[i], s);
    world_drain(&w);
    world_close(&w);
}

Test(settle, all_that_was_freed_before_is_waited_for, .timeout = 60)
{
    struct stage t;
    struct gate gate[2];
    struct malloc_thread asker;
    stage_open(&t, running());
    hold(&t.w, t.last, &gate[0]);
    hold(&t.w, t.a, &gate[1]);
    quarantine(&t, &t.page[0], t.last);
    quarantine(&t, &t.page[3], t.a);
    uint64_t pages = stats_of(&t.w).quarantined_bytes / PAGE;
    fill_up(&t);
    start_and_wait(&asker, &t.w, t.asks, pages, 1);
    atomic_store(&gate[1].open, true);
    clock_sleep_us(20000);
    cr_expect(!atomic_load(&asker.done), "it ended while there was more to come");
    atomic_store(&gate[0].open, true);
    pthread_join(asker.thread, NULL);
    cr_expect_eq(asker.status, VPMM_SUCCESS);
    give(&t.w, asker.pointer, t.asks);
    free_kept(&t);
    stage_close(&t);
}

/* ---- what lies ready, while others wait ---- */

struct releaser {
    struct world *w;
    CUstream stream;
    CUdeviceptr page[2]; /* freed on it before; 0: none */
    atomic_bool freed;
};

static void *free_and_release(void *data)
{
    struct releaser *releaser = data;
    give(releaser->w, take(releaser->w, 1, releaser->stream), releaser->stream); /* it has a cache */
    for (int i = 0; i < 2 && releaser->page[i]; i++)
        give(releaser->w, releaser->page[i], releaser->stream);
    atomic_store(&releaser->freed, true);
    must_work(vpmm_stream_release(releaser->w->pool, releaser->stream));
    return NULL;
}

/* The release waits for a malloc on its stream, which waits for other work: what lies in its caches is anybody's. */
Test(settle, caches_of_a_stream_that_is_being_released_serve_others, .timeout = 60)
{
    struct stage t;
    struct gate gate;
    struct malloc_thread asker[2];
    pthread_t thread;
    struct setup setup = running();
    setup.pool.cache_bytes = 64 * PAGE;
    stage_open(&t, setup);
    give(&t.w, t.page[2], t.idle);
    world_drain(&t.w);
    hold(&t.w, t.last, &gate);
    give(&t.w, t.page[0], t.last);
    start_and_wait(&asker[0], &t.w, t.a, CAP, 1);
    cr_assert(!atomic_load(&asker[0].done), "it did not wait");
    struct releaser releaser = {&t.w, t.a, {t.page[1], t.page[5]}, false};
    cr_assert_eq(pthread_create(&thread, NULL, free_and_release, &releaser), 0);
    while (!atomic_load(&releaser.freed))
        clock_sleep_us(LOOK_US);
    clock_sleep_us(20000);
    CUdeviceptr served[3];
    for (int i = 0; i < 3; i++)
        served[i] = take(&t.w, 1, t.asks);
    cr_expect(!atomic_load(&gate.forced), "it waited for what it did not need");
    atomic_store(&gate.open, true);
    pthread_join(asker[0].thread, NULL);
    pthread_join(thread, NULL);
    for (int i = 0; i < 3; i++)
        give(&t.w, served[i], t.asks);
    for (int i = 3; i < 5; i++)
        give(&t.w, t.page[i], t.asks);
    stage_close(&t);
}

/* ---- a release, and who visits its stream's caches ---- */

static struct stream *record_of(struct world *w, CUstream handle)
{
    struct streams *streams = &w->pool->arena.streams;
    for (uint32_t slot = 1; slot < load_acquire_u32(&streams->slots); slot++)
        if (stream_at(streams, slot)->handle == handle &&
            load_sc_u32(&stream_at(streams, slot)->state) == STREAM_ACTIVE)
            return stream_at(streams, slot);
    require(false, "the pool has not met the stream");
    return NULL;
}

static void await_state(const struct stream *stream, enum stream_state state)
{
    uint64_t end = clock_now_ns() + LONGEST_NS;
    while (load_sc_u32(&stream->state) != state && clock_now_ns() < end)
        clock_sleep_us(LOOK_US);
    cr_assert_eq(load_sc_u32(&stream->state), state);
}

/*
 * A release of t->a that has come as far as it can beside a visitor, which the caller ends; two pages are in its hands.
 */
static struct stream *open_and_release(struct stage *t, struct releaser *releaser, pthread_t *thread)
{
    stage_open(t, caching());
    struct stream *stream = record_of(&t->w, t->a);
    *releaser = (struct releaser){&t->w, t->a, {t->page[1], t->page[5]}, false};
    stream_visit(stream);
    give(&t->w, t->page[4], t->last); /* a page for the releaser to take */
    world_drain(&t->w);
    cr_assert_eq(pthread_create(thread, NULL, free_and_release, releaser), 0);
    await_state(stream, STREAM_CLOSING); /* and not: it waits for visitors while they still come */
    return stream;
}

static void free_others_and_close(struct stage *t)
{
    static const int others[] = {0, 2, 3};
    for (int i = 0; i < 3; i++)
        give(&t->w, t->page[others[i]], t->asks);
    stage_close(t);
}

Test(settle, a_release_is_not_kept_by_visitors, .timeout = 60)
{
    struct stage t;
    struct releaser releaser;
    pthread_t thread;
    struct stream *stream = open_and_release(&t, &releaser, &thread);
    cr_expect(!stream_enter_cached(stream));
    stream_end_visit(stream);
    pthread_join(thread, NULL);
    free_others_and_close(&t);
}

/* However long it takes: a request that finds nothing else does not fail before it has ended. */
static void wait_for_a_release(unsigned us)
{
    struct stage t;
    struct releaser releaser;
    struct malloc_thread asker;
    pthread_t thread;
    struct stream *stream = open_and_release(&t, &releaser, &thread);
    malloc_thread_start(&asker, &t.w, t.asks, 3);
    while (stats_of(&t.w).reclaims == 0 && !atomic_load(&asker.done))
        clock_sleep_us(LOOK_US);
    clock_sleep_us(us);
    stream_end_visit(stream);
    pthread_join(asker.thread, NULL);
    pthread_join(thread, NULL);
    cr_expect_eq(asker.status, VPMM_SUCCESS, "%u us: %s", us, vpmm_status_name(asker.status));
    if (asker.status == VPMM_SUCCESS)
        give(&t.w, asker.pointer, t.asks);
    free_others_and_close(&t);
}

Test(settle, what_a_release_has_in_its_hands_is_waited_for, .timeout = 60)
{
    wait_for_a_release(1000);
    wait_for_a_release(100000);
}

/* A thread that gets no processor for 10 ms has not seen what came back meanwhile. */
Test(settle, what_was_in_hands_at_the_last_look_is_looked_for_once_more)
{
    struct setup setup = setup_default();
    struct world w;
    struct hands some = {.until_ns = 1}, none = {.until_ns = 1, .had_none = true};
    world_open(&w, &setup);
    cr_expect(hands_try_again(&w.pool->arena, HANDS_PAGES, &some));
    cr_expect(!hands_try_again(&w.pool->arena, HANDS_PAGES, &some));
    cr_expect(!hands_try_again(&w.pool->arena, HANDS_PAGES, &none));
    world_close(&w);
}

/* Who asks for the page that has been freed of the six. */
static void expect_served(struct stage *t, struct malloc_thread *asker)
{
    pthread_join(asker->thread, NULL);
    cr_assert_eq(asker->status, VPMM_SUCCESS, "%s", vpmm_status_name(asker->status));
    give(&t->w, asker->pointer, t->asks);
    give(&t->w, t->page[4], t->a);
    give(&t->w, t->page[5], t->a);
    free_others_and_close(t);
}

/* A thread that gets no processor, for longer than requests look for what changes hands, has a page in its hands. */
Test(settle, what_is_in_hands_that_are_held_up_is_waited_for, .timeout = 60)
{
    struct stage t;
    struct region region;
    struct malloc_thread asker;
    stage_open(&t, running());
    struct space *space = &t.w.pool->arena.space;
    give(&t.w, t.page[1], t.a);
    world_drain(&t.w);
    struct stream *stream = record_of(&t.w, t.a);
    stream_visit(stream);
    while (region_take(space, stream, (struct want){1, 1}, true, &region) == REGION_NONE)
        clock_sleep_us(LOOK_US); /* the pool's thread may have it in its hands: it has just passed */
    stream_end_visit(stream);
    start_and_wait(&asker, &t.w, t.asks, 1, 1);
    clock_sleep_us(20000);
    cr_expect(!atomic_load(&asker.done), "%s", vpmm_status_name(asker.status));
    region_publish(space, region);
    expect_served(&t, &asker);
}

/* Where memory comes and goes all the time, and none is left, a request fails soon. */
Test(settle, what_changes_hands_keeps_no_request_that_fails)
{
    struct setup setup = setup_default();
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr page = take(&w, 1, s);
    struct unit *first = unit_at_address(&w.pool->arena.space.units, page);
    unsigned tries = 0;
    struct hands hands = {0};
    uint64_t live = load_relaxed_u64(&first->word), began = clock_now_ns();
    do {
        clock_sleep_us(3000);         /* a try takes longer than who is held up has a region */
        unit_set(first, UNIT_OWN, 1); /* but it is in other hands at each look */
    } while (hands_try_again(&w.pool->arena, HANDS_PAGES, &hands) && ++tries < 20);
    cr_expect_lt(tries, 20); /* four in 10 ms, some seventy in the second that who is held up is waited for */
    cr_expect_geq(clock_now_ns() - began, 10000000);
    store_relaxed_u64(&first->word, live);
    give(&w, page, s);
    world_close(&w);
}

/* As who is about to empty all caches, and gets no processor before it does. */
static void take_noted_bits(const struct fronts *fronts)
{
    for (uint32_t i = 0; i < load_relaxed_u32(&fronts->caches); i++)
        exchange_sc_u64(&fronts->cache[i].regions.noted, 0);
}

Test(settle, what_another_is_about_to_empty_serves_a_request, .timeout = 60)
{
    struct stage t;
    struct malloc_thread asker;
    stage_open(&t, caching());
    give(&t.w, t.page[1], t.a);
    take_noted_bits(t.w.pool->arena.space.fronts);
    malloc_thread_start(&asker, &t.w, t.asks, 1);
    expect_served(&t, &asker);
}

/* The same of the subpages of a page: for one as long as they are, and for the page. */
Test(settle, subpages_that_another_is_about_to_empty_serve_a_request, .timeout = 60)
{
    enum { PIECES = 4 };
    struct stage t;
    struct malloc_thread asker;
    CUdeviceptr piece[PIECES], other;
    stage_open(&t, caching());
    give(&t.w, t.page[1], t.a);
    for (int i = 0; i < PIECES; i++)
        must_work(vpmm_malloc(t.w.pool, PAGE / PIECES, t.a, &piece[i]));
    must_work(vpmm_free(t.w.pool, piece[0], t.a));
    take_noted_bits(t.w.pool->arena.cut.fronts);
    must_work(vpmm_malloc(t.w.pool, PAGE / PIECES, t.asks, &other));
    must_work(vpmm_free(t.w.pool, other, t.asks));
    for (int i = 1; i < PIECES; i++)
        must_work(vpmm_free(t.w.pool, piece[i], t.a));
    take_noted_bits(t.w.pool->arena.cut.fronts);
    malloc_thread_start(&asker, &t.w, t.asks, 1);
    expect_served(&t, &asker);
}

static struct gate at_create;
static const vpmm_driver *creating;
static atomic_bool creates_slowly;

static CUresult CUDAAPI create_when_let_go(CUmemGenericAllocationHandle *handle, size_t size,
                                           const CUmemAllocationProp *prop, unsigned long long flags)
{
    if (atomic_exchange(&creates_slowly, false))
        wait_at(&at_create);
    return creating->cuMemCreate(handle, size, prop, flags);
}

/*
 * Old addresses whose work has ended keep memory quarantined; a pass leaves them to who builds, but not one that is
 * needed.
 */
Test(settle, a_trim_beside_a_build_gives_back_what_has_passed, .timeout = 60)
{
    static vpmm_driver driver;
    enum { PIECES = 8, MOST = 20 };
    struct setup setup = setup_default();
    struct world w;
    struct malloc_thread builder;
    CUdeviceptr piece[PIECES];
    size_t released = 0;
    needs_simulator();
    setup.pool.extent_size = PAGE;
    setup.pool.max_mapped = MOST * PAGE;
    setup.pool.decay_ms = VPMM_DECAY_NEVER;
    world_open_without_pool(&w, &setup);
    creating = w.driver;
    driver = *w.driver;
    driver.cuMemCreate = create_when_let_go;
    setup.pool.driver = &driver;
    must_work(vpmm_pool_create(&setup.pool, &w.pool));
    CUstream s = world_stream(&w), other = world_stream(&w);
    for (int i = 0; i < PIECES; i++)
        piece[i] = take(&w, 2, s);
    for (int i = 0; i < PIECES; i += 2)
        give(&w, piece[i], s);
    CUdeviceptr moved = take(&w, PIECES, s);
    cr_assert_geq(stats_of(&w).pending_unmap_bytes, PIECES * PAGE);
    at_create = (struct gate){false};
    atomic_store(&creates_slowly, true);
    malloc_thread_start(&builder, &w, other, 1);
    while (!atomic_load(&at_create.reached))
        clock_sleep_us(LOOK_US);
    give(&w, moved, s);
    world_step(&w);
    must_work(vpmm_trim(w.pool, 0, &released));
    cr_expect_eq(released, PIECES * PAGE);
    CUdeviceptr more = take(&w, MOST / 2, s);
    cr_expect(!atomic_load(&at_create.forced), "it waited for another's build");
    atomic_store(&at_create.open, true);
    pthread_join(builder.thread, NULL);
    give(&w, builder.pointer, other);
    give(&w, more, s);
    for (int i = 1; i < PIECES; i += 2)
        give(&w, piece[i], s);
    world_close(&w);
}

/*
 * What a default stream left without a mark a trim waits for. By that wait old addresses are due, too: while they are
 * mapped the driver has the memory, which is then in nobody's use.
 */
Test(settle, a_trim_takes_back_what_old_addresses_have_kept_until_its_wait)
{
    struct setup setup = setup_default();
    setup.pool.cache_bytes = 64 * PAGE;
    setup.pool.extent_size = PAGE;
    struct world w;
    world_open(&w, &setup);
    world_become_steady(&w, 8);
    size_t released = 0;
    CUdeviceptr p[8];
    for (int i = 0; i < 8; i++)
        p[i] = take(&w, 1, NULL);
    keep_busy(&w, NULL);
    for (int i = 0; i < 8; i += 2)
        give(&w, p[i], NULL);
    CUdeviceptr moved = take(&w, 4, NULL);
    cr_assert_gt(stats_of(&w).pending_unmap_bytes, 0);
    give(&w, moved, NULL);
    for (int i = 1; i < 8; i += 2)
        give(&w, p[i], NULL);
    uint64_t mapped = stats_of(&w).mapped_bytes;
    must_work(vpmm_trim(w.pool, 0, &released));
    cr_expect_eq(released, mapped, "%zu of %llu", released, (unsigned long long)mapped);
    cr_expect_eq(stats_of(&w).quarantined_bytes, 0, "%llu", (unsigned long long)stats_of(&w).quarantined_bytes);
    world_close(&w);
}

/* The bound is of bytes that nobody has here: they are said to be pending. */
Test(settle, old_addresses_wait_for_a_build_until_there_are_16_gib_of_them)
{
    enum { PIECES = 8 };
    const uint64_t below = UINT64_C(15) << 30, rest = UINT64_C(1) << 30;
    struct setup setup = setup_default();
    struct world w;
    CUdeviceptr piece[PIECES];
    setup.pool.extent_size = PAGE;
    setup.pool.max_mapped = 2 * PIECES * PAGE;
    setup.pool.reaper = false;
    setup.pool.decay_ms = VPMM_DECAY_NEVER;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    for (int i = 0; i < PIECES; i++)
        piece[i] = take(&w, 2, s);
    for (int i = 0; i < PIECES; i += 2)
        give(&w, piece[i], s);
    CUdeviceptr moved = take(&w, PIECES, s);
    uint64_t pending = stats_of(&w).pending_unmap_bytes;
    cr_assert_geq(pending, PIECES * PAGE);
    world_step(&w);
    atomic_fetch_add(&w.pool->arena.builders, 1);
    stats_add(&w.pool->stats, STAT_pending_unmap_bytes, below);
    must_work(vpmm_poll(w.pool));
    cr_expect_eq(stats_of(&w).pending_unmap_bytes, below + pending);
    stats_add(&w.pool->stats, STAT_pending_unmap_bytes, rest);
    must_work(vpmm_poll(w.pool));
    cr_expect_lt(stats_of(&w).pending_unmap_bytes, below + rest + pending);
    stats_sub(&w.pool->stats, STAT_pending_unmap_bytes, below + rest);
    atomic_fetch_sub(&w.pool->arena.builders, 1);
    give(&w, moved, s);
    for (int i = 1; i < PIECES; i += 2)
        give(&w, piece[i], s);
    world_close(&w);
}

/* ---- by context: two who ask, and one beside them, who makes passes as the pool's thread does ---- */

Test(settle, a_wait_for_a_context_keeps_nobody_waiting, .timeout = 60)
{
    struct stage t;
    struct gate gate;
    struct malloc_thread asker[2];
    struct setup setup = running();
    setup.pool.reaper = false;
    setup.pool.captures = true; /* what lies in caches can be marked by nobody else */
    setup.pool.cache_bytes = 64 * PAGE;
    stage_open(&t, setup);
    hold(&t.w, t.idle, &gate);
    give(&t.w, t.page[1], t.a);
    uint64_t waits = world_calls(&t.w, "cuMemFree");
    start_and_wait(&asker[0], &t.w, t.asks, 1, 1);
    must_work(vpmm_poll(t.w.pool));
    start_and_wait(&asker[1], &t.w, t.last, 1, 2);
    must_work(vpmm_poll(t.w.pool));
    cr_expect(!atomic_load(&asker[0].done) && !atomic_load(&asker[1].done), "they did not wait");
    cr_expect(!atomic_load(&gate.forced), "another thread waited with them");
    atomic_store(&gate.open, true);
    for (int i = 0; i < 2; i++)
        pthread_join(asker[i].thread, NULL);
    cr_expect_eq((asker[0].status == VPMM_SUCCESS) + (asker[1].status == VPMM_SUCCESS), 1, "there is a page for one");
    cr_expect_eq(world_calls(&t.w, "cuMemFree") - waits, 1, "both waited for the context");
    for (int i = 0; i < 2; i++)
        if (asker[i].status == VPMM_SUCCESS)
            give(&t.w, asker[i].pointer, asker[i].stream);
    for (int i = 0; i < CAP; i++)
        if (i != 1)
            give(&t.w, t.page[i], t.last);
    stage_close(&t);
}

/* ---- beside a thread that gives memory back ---- */

static const vpmm_driver *simulated;
static struct gate at_unmap;
static atomic_bool parks;

static CUresult CUDAAPI unmap_when_let_go(CUdeviceptr address, size_t bytes)
{
    if (atomic_exchange(&parks, false))
        wait_at(&at_unmap);
    return simulated->cuMemUnmap(address, bytes);
}

static void *trim(void *argument)
{
    struct world *w = argument;
    w->driver->cuCtxSetCurrent(w->context);
    vpmm_trim(w->pool, 0, NULL);
    return NULL;
}

/* It has the pass lock all the time. What it is about to give back is not needed. */
Test(settle, who_is_served_does_not_wait_for_a_trim, .timeout = 60)
{
    static vpmm_driver driver;
    struct setup setup = setup_default();
    struct world w;
    pthread_t thread;
    needs_simulator();
    setup.pool.reuse = VPMM_REUSE_COMPLETED; /* the wait on the device is left to tier 6 */
    setup.pool.extent_size = PAGE;
    setup.pool.max_mapped = 3 * PAGE;
    world_open_without_pool(&w, &setup);
    simulated = w.driver;
    driver = *w.driver;
    driver.cuMemUnmap = unmap_when_let_go;
    setup.pool.driver = &driver;
    must_work(vpmm_pool_create(&setup.pool, &w.pool));
    CUstream a = world_stream(&w), asks = world_stream(&w);
    CUdeviceptr p = take(&w, 2, a), q = take(&w, 1, a);
    give(&w, q, a);
    world_drain(&w);
    keep_busy(&w, a);
    give(&w, p, a);
    at_unmap = (struct gate){false};
    atomic_store(&parks, true);
    cr_assert_eq(pthread_create(&thread, NULL, trim, &w), 0);
    while (!atomic_load(&at_unmap.reached))
        clock_sleep_us(LOOK_US);
    p = take(&w, 2, asks);
    cr_expect_eq(stats_of(&w).reclaims, 1, "it was served before it had to wait");
    atomic_store(&at_unmap.open, true);
    pthread_join(thread, NULL);
    cr_expect(!atomic_load(&at_unmap.forced), "the request waited for the trim");
    give(&w, p, asks);
    world_drain(&w);
    world_audit(&w);
    world_close(&w);
}

/* ---- what others do with streams beside a thread that waits on the host ---- */

/* The header's promise: a release waits for calls that were given the stream, and not for the stream. */
Test(settle, a_release_does_not_wait_for_work_that_others_wait_for, .timeout = 60)
{
    struct setup setup = running();
    struct world w;
    struct gate gate;
    struct malloc_thread asker;
    needs_simulator();
    setup.pool.reuse = VPMM_REUSE_WAIT_HOST;
    world_open(&w, &setup);
    CUstream freed = world_stream(&w), asks = world_stream(&w);
    CUdeviceptr p = take(&w, 4, freed);
    hold(&w, freed, &gate);
    give(&w, p, freed);
    malloc_thread_start(&asker, &w, asks, 4);
    await_waiter(&w);
    must_work(vpmm_stream_release(w.pool, freed));
    cr_expect(!atomic_load(&asker.done) && !atomic_load(&gate.forced), "the release waited for the stream");
    must_work(vpmm_poll(w.pool)); /* which would take the record out of use */
    atomic_store(&gate.open, true);
    pthread_join(asker.thread, NULL);
    cr_expect_eq(asker.status, VPMM_SUCCESS);
    give(&w, asker.pointer, asks);
    world_close(&w);
}

Test(settle, a_stream_is_met_beside_a_wait_for_its_context, .timeout = 60)
{
    struct setup setup = running();
    struct world w;
    struct gate gate;
    pthread_t thread;
    CUdeviceptr r;
    needs_simulator();
    setup.pool.captures = true;
    setup.pool.cache_bytes = 64 * PAGE;
    world_open(&w, &setup);
    CUstream cached = world_stream(&w), met = world_stream(&w), first = world_stream(&w);
    CUdeviceptr p = take(&w, 4, cached), q = take(&w, 1, met);
    must_work(vpmm_free(w.pool, q, met));
    must_work(vpmm_stream_release(w.pool, met)); /* so that there is memory for anybody */
    give(&w, p, cached);
    hold(&w, cached, &gate);
    cr_assert_eq(pthread_create(&thread, NULL, trim, &w), 0);
    pthread_mutex_t *lock = &w.pool->arena.streams.wait_lock;
    while (pthread_mutex_trylock(lock) == 0) {
        pthread_mutex_unlock(lock);
        clock_sleep_us(LOOK_US);
    }
    must_work(vpmm_malloc(w.pool, PAGE, first, &r));
    cr_expect(!atomic_load(&gate.forced), "a stream's first malloc waited for the device");
    atomic_store(&gate.open, true);
    pthread_join(thread, NULL);
    give(&w, r, first);
    world_close(&w);
}
