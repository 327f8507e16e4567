/*
 * What driver calls that fail once left wrong in the pool for good, one test a defect. The budget of the cap first: the
 * simulator counts the physical memory that is in use, which the pool's own figures must not fall short of.
 */
#include "pool/pool.h"
#include "remap/turn.h"
#include "support.h"

#include <errno.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

/* --- the cap's budget ----------------------------------------------------------------------------------------------
 */

enum { CAP = 10, HELD_MOST = 16 };

struct stage {
    struct world w;
    CUstream s;
    CUdeviceptr held[HELD_MOST];
    int holds;
};

static void stage_open(struct stage *t, size_t extent_pages)
{
    needs_simulator();
    struct setup setup = setup_default();
    setup.pool.max_mapped = CAP * PAGE;
    setup.pool.extent_size = extent_pages * PAGE;
    *t = (struct stage){.holds = 0};
    world_open(&t->w, &setup);
    t->s = world_stream(&t->w);
}

#define check_budget(t) check_budget_at((t), __LINE__)
static void check_budget_at(struct stage *t, int line)
{
    world_audit_at(&t->w, __FILE__, line);
    vpmm_stats stats = stats_of(&t->w);
    size_t used = vpmm_sim_used_bytes(t->w.sim);
    require(used <= CAP * PAGE, "line %d: the device holds %zu bytes under a cap of %zu", line, used, CAP * PAGE);
    require(used == stats.mapped_bytes + stats.quarantined_bytes,
            "line %d: the device holds %zu bytes, the pool says %llu mapped and %llu quarantined", line, used,
            (unsigned long long)stats.mapped_bytes, (unsigned long long)stats.quarantined_bytes);
}

/* As much as the pool gives, a page at a time. */
static void take_all(struct stage *t)
{
    CUdeviceptr pointer;
    while (t->holds < HELD_MOST && vpmm_malloc(t->w.pool, PAGE, t->s, &pointer) == VPMM_SUCCESS) {
        fill(&t->w, pointer, 1, (uint32_t)t->holds, t->s);
        t->held[t->holds++] = pointer;
        check_budget(t);
    }
}

static void give_all(struct stage *t)
{
    while (t->holds > 0) {
        t->holds--;
        expect_later(&t->w, t->held[t->holds], 1, (uint32_t)t->holds, t->s);
        give(&t->w, t->held[t->holds], t->s);
    }
    world_step(&t->w);
}

static void refuse(struct stage *t, const char *call)
{
    vpmm_sim_fail(t->w.sim, call, 1, CUDA_ERROR_UNKNOWN, true);
}

static void relent(struct stage *t, const char *call)
{
    vpmm_sim_fail(t->w.sim, call, 0, CUDA_SUCCESS, false);
}

/* The driver takes everything again: all of the cap can be had once more. */
static void stage_close(struct stage *t)
{
    world_drain(&t->w);
    check_budget(t);
    cr_expect_eq(stats_of(&t->w).quarantined_bytes, 0, "what the driver has taken back is kept from the cap");
    take_all(t);
    cr_expect_eq(t->holds, CAP, "%d pages of %d can be had", t->holds, (int)CAP);
    give_all(t);
    world_close(&t->w);
}

/* The end of a world whose pool is gone already; how many driver objects that left. */
static int stage_leave(struct stage *t)
{
    world_stream_destroy(&t->w, t->s);
    cr_expect_eq(t->w.driver->cuDevicePrimaryCtxRelease(t->w.device), CUDA_SUCCESS);
    return vpmm_sim_destroy(t->w.sim);
}

/* A growth that fails behind its maps, with the driver refusing to take back what `call` would. */
static void undoing_is_refused(const char *call)
{
    struct stage t;
    stage_open(&t, 0);
    refuse(&t, "cuMemSetAccess");
    refuse(&t, call);
    for (int i = 0; i < 8; i++) {
        CUdeviceptr pointer;
        cr_expect_neq(vpmm_malloc(t.w.pool, 4 * PAGE, t.s, &pointer), VPMM_SUCCESS);
        check_budget(&t);
    }
    relent(&t, "cuMemSetAccess");
    take_all(&t); /* what the cap has left */
    check_budget(&t);
    cr_expect_lt(t.holds, CAP);
    give_all(&t);
    relent(&t, call);
    stage_close(&t);
}

Test(sound_faults, memory_that_undoing_leaves_mapped_stays_under_the_cap)
{
    undoing_is_refused("cuMemUnmap");
}
Test(sound_faults, handles_that_undoing_leaves_unreleased_stay_under_the_cap)
{
    undoing_is_refused("cuMemRelease");
}

/* Everything free is trimmed, with the driver refusing, and asked for again. */
static void trimming_is_refused(const char *call)
{
    struct stage t;
    stage_open(&t, 1);
    take_all(&t);
    give_all(&t);
    world_drain(&t.w);
    refuse(&t, call);
    size_t released = 77;
    (void)vpmm_trim(t.w.pool, 0, &released);
    cr_expect_eq(released, 0, "%zu bytes are said to be given back", released);
    check_budget(&t);
    take_all(&t);
    check_budget(&t);
    give_all(&t);
    relent(&t, call);
    stage_close(&t);
}

Test(sound_faults, memory_that_trimming_leaves_mapped_stays_under_the_cap)
{
    trimming_is_refused("cuMemUnmap");
}
Test(sound_faults, handles_that_trimming_leaves_unreleased_stay_under_the_cap)
{
    trimming_is_refused("cuMemRelease");
}

/* A driver refuses to map a handle that is registered for RDMA now and then, and no other (mapping.h). */
static void a_map_is_refused_once(bool rdma, vpmm_status expected)
{
    needs_simulator();
    struct setup setup = setup_default();
    setup.pool.rdma = rdma;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr p = 0;
    vpmm_sim_fail(w.sim, "cuMemMap", 1, CUDA_ERROR_UNKNOWN, false);
    cr_expect_eq(vpmm_malloc(w.pool, 4 * PAGE, s, &p), expected);
    world_audit(&w);
    if (p)
        give(&w, p, s);
    world_close(&w);
}

Test(sound_faults, a_registered_handle_that_is_not_mapped_at_once_is_mapped_later)
{
    a_map_is_refused_once(true, VPMM_SUCCESS);
}
Test(sound_faults, another_handle_that_is_not_mapped_at_once_fails_the_request)
{
    a_map_is_refused_once(false, VPMM_ERROR_DRIVER);
}

/* The first handle has shown whether they can be registered; later ones are all alike. */
Test(sound_faults, a_refusal_later_on_says_nothing_of_the_handles_property)
{
    needs_simulator();
    struct setup setup = setup_default();
    struct world w;
    CUdeviceptr p;
    setup.pool.rdma = true;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr first = take(&w, 1, s);
    cr_assert(load_relaxed_u32(&w.pool->arena.rdma));
    vpmm_sim_fail(w.sim, "cuMemCreate", 1, CUDA_ERROR_NOT_SUPPORTED, false);
    cr_expect_neq(vpmm_malloc(w.pool, 4 * PAGE, s, &p), VPMM_SUCCESS);
    cr_expect(load_relaxed_u32(&w.pool->arena.rdma), "later handles are of another kind");
    vpmm_sim_fail(w.sim, "cuMemCreate", 0, CUDA_SUCCESS, false);
    give(&w, first, s);
    world_close(&w);
}

/* ---- what is given up is counted ---- */

static void given_up(const char *call, vpmm_stats expected)
{
    struct world w;
    struct setup setup = setup_default();
    setup.pool.reuse = VPMM_REUSE_WAIT_DEVICE;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr p = 0;
    vpmm_sim_fail(w.sim, call, 1, CUDA_ERROR_UNKNOWN, false);
    must_fail(VPMM_ERROR_DRIVER, vpmm_malloc(w.pool, 4 * PAGE, s, &p));
    give(&w, take(&w, 4, s), s);
    vpmm_stats stats = stats_of(&w);
    cr_expect_eq(stats.unwound, 1, "%s: %llu are unwound", call, (unsigned long long)stats.unwound);
    cr_expect_eq(stats.unwound_create, expected.unwound_create, "%s", call);
    cr_expect_eq(stats.unwound_map, expected.unwound_map, "%s", call);
    cr_expect_eq(stats.unwound_access, expected.unwound_access, "%s", call);
    world_audit(&w);
    world_close(&w);
}

Test(sound_faults, a_build_that_is_given_up_is_counted_by_its_step)
{
    needs_simulator();
    given_up("cuMemCreate", (vpmm_stats){.unwound_create = 1});
    given_up("cuMemMap", (vpmm_stats){.unwound_map = 1});
    given_up("cuMemSetAccess", (vpmm_stats){.unwound_access = 1});
}

/* The page that is unmapped where it is now is mapped at its old address as well, so it is not yet the device's. */
Test(sound_faults, memory_with_an_old_mapping_left_stays_under_the_cap)
{
    struct stage t;
    stage_open(&t, 1);
    CUdeviceptr a = take(&t.w, 4, t.s), wall = take(&t.w, 1, t.s), b = take(&t.w, 4, t.s), end = take(&t.w, 1, t.s);
    give(&t.w, a, t.s);
    give(&t.w, b, t.s);
    CUdeviceptr moved = take(&t.w, 8, t.s);
    cr_assert_gt(stats_of(&t.w).pending_unmap_bytes, 0, "nothing was moved");
    give(&t.w, moved, t.s);
    world_step(&t.w);
    vpmm_sim_fail(t.w.sim, "cuMemUnmap", 1, CUDA_ERROR_UNKNOWN, false); /* the first old address, in the trim's pass */
    size_t used = vpmm_sim_used_bytes(t.w.sim), released = 0;
    must_work(vpmm_trim(t.w.pool, 0, &released));
    cr_expect_eq(vpmm_sim_used_bytes(t.w.sim) + released, used, "not all of %zu bytes are given back", released);
    check_budget(&t);
    cr_expect_gt(stats_of(&t.w).pending_unmap_bytes, 0);
    refuse(&t, "cuMemUnmap");
    take_all(&t);
    check_budget(&t);
    give_all(&t);
    give(&t.w, wall, t.s);
    give(&t.w, end, t.s);
    relent(&t, "cuMemUnmap");
    stage_close(&t);
}

/* An answer that speaks of failure, and memory that is there all the same and is not taken back. */
Test(sound_faults, memory_that_a_failed_create_made_stays_under_the_cap)
{
    struct stage t;
    stage_open(&t, 0);
    vpmm_sim_fail_after(t.w.sim, "cuMemCreate", 1, CUDA_ERROR_INVALID_VALUE, true);
    refuse(&t, "cuMemRelease");
    for (int i = 0; i < 8; i++) {
        CUdeviceptr pointer;
        cr_expect_neq(vpmm_malloc(t.w.pool, 4 * PAGE, t.s, &pointer), VPMM_SUCCESS);
        check_budget(&t);
    }
    relent(&t, "cuMemCreate");
    take_all(&t);
    check_budget(&t);
    give_all(&t);
    relent(&t, "cuMemRelease");
    stage_close(&t);
}

/* The driver says no and has done it: the budget comes back when the second try is answered. */
Test(sound_faults, a_release_that_worked_and_said_no_gives_the_budget_back)
{
    struct stage t;
    stage_open(&t, 1);
    take_all(&t);
    give_all(&t);
    world_drain(&t.w);
    vpmm_sim_fail_after(t.w.sim, "cuMemRelease", 1, CUDA_ERROR_UNKNOWN, false);
    must_work(vpmm_trim(t.w.pool, 0, NULL));
    cr_expect_eq(vpmm_sim_used_bytes(t.w.sim), 0);
    cr_expect_eq(stats_of(&t.w).quarantined_bytes, PAGE);
    world_drain(&t.w);
    cr_expect_eq(stats_of(&t.w).quarantined_bytes, 0);
    give(&t.w, take(&t.w, CAP, t.s), t.s);
    must_work(vpmm_pool_destroy(t.w.pool));
    cr_expect_eq(vpmm_sim_misuses(t.w.sim), 1, "the second try names a handle that is gone");
    cr_expect_eq(stage_leave(&t), 0);
}

Test(sound_faults, a_pool_s_end_says_that_handles_were_not_taken_back)
{
    struct stage t;
    stage_open(&t, 1);
    give(&t.w, take(&t.w, 2, t.s), t.s);
    world_drain(&t.w);
    refuse(&t, "cuMemRelease");
    (void)vpmm_trim(t.w.pool, 0, NULL);
    must_fail(VPMM_ERROR_DRIVER, vpmm_pool_destroy(t.w.pool));
    cr_expect(strstr(vpmm_last_error(), "cuMemRelease"), "%s", vpmm_last_error());
    cr_expect_gt(stage_leave(&t), 0);
}

/* --- frees that the driver's pool refuses ---------------------------------------------------------------------------
 */

static void small_open(struct world *w, const vpmm_driver *driver)
{
    needs_simulator();
    struct setup setup = setup_default();
    setup.pool.small = VPMM_SMALL_ASYNC;
    setup.pool.driver = driver;
    world_open(w, &setup);
    (void)world_stream(w);
}

/* The pool's figures of what the driver's pool serves. */
static void small_is(struct world *w, uint64_t bytes)
{
    vpmm_stats stats = stats_of(w);
    cr_expect_eq(stats.async_bytes, bytes, "%llu async bytes", (unsigned long long)stats.async_bytes);
    cr_expect_eq(stats.requested_bytes, bytes, "%llu requested bytes", (unsigned long long)stats.requested_bytes);
}

/* The pool is destroyed without a word, and nothing is left of it; each second try of a free that worked is a misuse.
 */
static void small_close(struct world *w, uint64_t misuses)
{
    must_work(vpmm_pool_destroy(w->pool));
    cr_expect_eq(vpmm_sim_misuses(w->sim), misuses, "%llu misuses", (unsigned long long)vpmm_sim_misuses(w->sim));
    world_stream_destroy(w, w->stream[0]);
    cr_assert_eq(w->driver->cuDevicePrimaryCtxRelease(w->device), CUDA_SUCCESS);
    cr_expect_eq(vpmm_sim_destroy(w->sim), 0, "leaks");
}

Test(sound_faults, a_free_that_worked_and_said_no_does_not_keep_the_pool_busy)
{
    struct world w;
    small_open(&w, NULL);
    CUdeviceptr p = take_bytes(&w, 1000, w.stream[0]);
    vpmm_sim_fail_after(w.sim, "cuMemFreeAsync", 1, CUDA_ERROR_UNKNOWN, false);
    must_fail(VPMM_ERROR_DRIVER, vpmm_free(w.pool, p, w.stream[0]));
    world_step(&w);
    small_close(&w, 1);
}

Test(sound_faults, a_free_that_did_not_work_is_made_up_for_at_the_pool_s_end)
{
    struct world w;
    small_open(&w, NULL);
    CUdeviceptr p = take_bytes(&w, 1000, w.stream[0]);
    vpmm_sim_fail(w.sim, "cuMemFreeAsync", 1, CUDA_ERROR_UNKNOWN, false);
    must_fail(VPMM_ERROR_DRIVER, vpmm_free(w.pool, p, w.stream[0]));
    small_close(&w, 0);
}

Test(sound_faults, a_context_that_was_retained_and_said_no_is_let_go)
{
    needs_simulator();
    struct setup setup = setup_default();
    struct world w;
    world_open_without_pool(&w, &setup);
    setup.pool.driver = w.driver;
    vpmm_sim_fail_after(w.sim, "cuDevicePrimaryCtxRetain", 1, CUDA_ERROR_UNKNOWN, false);
    must_fail(VPMM_ERROR_DRIVER, vpmm_pool_create(&setup.pool, &w.pool));
    world_close(&w); /* nothing leaks */
}

Test(sound_faults, the_end_that_makes_up_for_a_free_leaves_captures_alone)
{
    struct world w;
    CUgraph graph = NULL;
    CUstream captured;
    small_open(&w, NULL);
    cr_assert_eq(w.driver->cuStreamCreate(&captured, CU_STREAM_DEFAULT), CUDA_SUCCESS);
    CUdeviceptr p = take_bytes(&w, 1000, w.stream[0]);
    vpmm_sim_fail(w.sim, "cuMemFreeAsync", 1, CUDA_ERROR_UNKNOWN, false);
    must_fail(VPMM_ERROR_DRIVER, vpmm_free(w.pool, p, w.stream[0]));
    cr_assert_eq(w.driver->cuStreamBeginCapture(captured, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    must_work(vpmm_pool_destroy(w.pool));
    w.pool = NULL;
    cr_expect_eq(w.driver->cuStreamEndCapture(captured, &graph), CUDA_SUCCESS);
    cr_expect_eq(w.driver->cuGraphDestroy(graph), CUDA_SUCCESS);
    cr_assert_eq(w.driver->cuStreamDestroy(captured), CUDA_SUCCESS);
    world_close(&w);
}

/* A device without pages has no event of the pool's that shows when its streams have come so far. */
static void end_beside_work(bool of_another_context)
{
    struct setup setup = setup_default();
    struct world w;
    CUcontext other = NULL;
    CUstream s;
    needs_simulator();
    setup.sim.vmm = false;
    world_open(&w, &setup);
    if (of_another_context)
        cr_assert_eq(w.driver->cuCtxCreate(&other, 0, w.device), CUDA_SUCCESS);
    cr_assert_eq(w.driver->cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    cr_assert_eq(w.driver->cuCtxSetCurrent(w.context), CUDA_SUCCESS);
    CUdeviceptr p = take_bytes(&w, 1000, s);
    cr_assert_eq(w.driver->cuMemsetD8Async(p, 1, 1000, s), CUDA_SUCCESS);
    vpmm_sim_fail(w.sim, "cuMemFreeAsync", 1, CUDA_ERROR_UNKNOWN, false);
    must_fail(VPMM_ERROR_DRIVER, vpmm_free(w.pool, p, s));
    must_work(vpmm_pool_destroy(w.pool));
    w.pool = NULL;
    cr_expect_eq(w.driver->cuStreamQuery(s), CUDA_ERROR_NOT_READY, "the work has been waited for");
    cr_assert_eq(w.driver->cuStreamSynchronize(s), CUDA_SUCCESS);
    cr_assert_eq(w.driver->cuStreamDestroy(s), CUDA_SUCCESS);
    if (other)
        cr_assert_eq(w.driver->cuCtxDestroy(other), CUDA_SUCCESS);
    world_close(&w); /* a free before the work would be a race */
}
Test(sound_faults, a_free_that_the_end_makes_up_for_comes_after_its_stream_s_work)
{
    end_beside_work(false);
}
Test(sound_faults, a_free_that_the_end_makes_up_for_comes_after_the_work_of_a_stream_of_another_context)
{
    end_beside_work(true);
}

Test(sound_faults, a_free_that_was_refused_may_be_tried_again)
{
    for (int worked = 0; worked < 2; worked++) {
        struct world w;
        small_open(&w, NULL);
        CUdeviceptr p = take_bytes(&w, 1000, w.stream[0]);
        for (int i = 0; i < 3; i++) {
            (worked ? vpmm_sim_fail_after : vpmm_sim_fail)(w.sim, "cuMemFreeAsync", 1, CUDA_ERROR_UNKNOWN, false);
            must_fail(VPMM_ERROR_DRIVER, vpmm_free(w.pool, p, w.stream[0]));
            small_is(&w, 1000);
        }
        give(&w, p, w.stream[0]);
        small_is(&w, 0);
        must_fail(VPMM_ERROR_INVALID_POINTER, vpmm_free(w.pool, p, w.stream[0]));
        small_close(&w, worked ? 3 : 0);
    }
}

/* The driver was not asked, so it has refused nothing: the memory is live. */
Test(sound_faults, a_free_that_does_not_come_to_the_driver_changes_nothing)
{
    struct world w;
    small_open(&w, NULL);
    CUdeviceptr p = take_bytes(&w, 1000, w.stream[0]);
    vpmm_sim_fail(w.sim, "cuThreadExchangeStreamCaptureMode", 1, CUDA_ERROR_UNKNOWN, false);
    must_fail(VPMM_ERROR_DRIVER, vpmm_free(w.pool, p, w.stream[0]));
    small_is(&w, 1000);
    must_fail(VPMM_ERROR_BUSY, vpmm_pool_destroy(w.pool));
    give(&w, p, w.stream[0]);
    small_is(&w, 0);
    small_close(&w, 0);
}

Test(sound_faults, a_refused_free_is_settled_when_its_address_is_handed_out_again)
{
    struct world w;
    small_open(&w, NULL);
    CUdeviceptr p = take_bytes(&w, 1000, w.stream[0]);
    vpmm_sim_fail_after(w.sim, "cuMemFreeAsync", 1, CUDA_ERROR_UNKNOWN, false);
    must_fail(VPMM_ERROR_DRIVER, vpmm_free(w.pool, p, w.stream[0]));
    CUdeviceptr q = take_bytes(&w, 900, w.stream[0]);
    cr_assert_eq(p, q, "the driver hands out another address");
    small_is(&w, 900);
    must_fail(VPMM_ERROR_BUSY, vpmm_pool_destroy(w.pool));
    give(&w, q, w.stream[0]);
    small_is(&w, 0);
    small_close(&w, 0);
}

/* What an allocation that worked and said no has left is freed at once, or at the pool's end. */
Test(sound_faults, an_allocation_that_worked_and_said_no_is_taken_back)
{
    struct world w;
    small_open(&w, NULL);
    CUdeviceptr p = 0;
    vpmm_sim_fail_after(w.sim, "cuMemAllocFromPoolAsync", 1, CUDA_ERROR_UNKNOWN, false);
    vpmm_sim_fail(w.sim, "cuMemFreeAsync", 1, CUDA_ERROR_UNKNOWN, false);
    must_fail(VPMM_ERROR_DRIVER, vpmm_malloc(w.pool, 1000, w.stream[0], &p));
    small_is(&w, 0);
    small_close(&w, 0);
}

/* A driver between whose free and its answer another thread is given the address. */
static struct {
    struct world w;
    const vpmm_driver *real;
    bool meddle;
    CUresult answer;
    CUdeviceptr given;
} between;

static void *take_between(void *unused)
{
    (void)unused;
    return vpmm_malloc(between.w.pool, 900, between.w.stream[0], &between.given) == VPMM_SUCCESS ? &between : NULL;
}

static CUresult CUDAAPI free_and_meddle(CUdeviceptr address, CUstream stream)
{
    CUresult result = between.real->cuMemFreeAsync(address, stream);
    if (!between.meddle)
        return result;
    pthread_t thread;
    void *took = NULL;
    between.meddle = false;
    if (pthread_create(&thread, NULL, take_between, NULL) || pthread_join(thread, &took) || !took)
        return CUDA_ERROR_OPERATING_SYSTEM;
    return between.answer;
}

/* A pool over a driver whose free is this one; it copies the table. */
static void open_between(CUresult(CUDAAPI *free_async)(CUdeviceptr, CUstream))
{
    struct setup setup = setup_default();
    setup.pool.small = VPMM_SMALL_ASYNC;
    world_open_without_pool(&between.w, &setup);
    between.real = between.w.driver;
    vpmm_driver table = *between.real;
    table.cuMemFreeAsync = free_async;
    setup.pool.driver = &table;
    must_work(vpmm_pool_create(&setup.pool, &between.w.pool));
}

static void address_goes_on_during_a_free(CUresult answer)
{
    needs_simulator();
    open_between(free_and_meddle);
    CUdeviceptr p = take_bytes(&between.w, 1000, world_stream(&between.w));
    between.meddle = true;
    between.answer = answer;
    must_work(vpmm_free(between.w.pool, p, between.w.stream[0])); /* its address is another's: so it is freed */
    cr_assert_eq(between.given, p, "the driver hands out another address");
    small_is(&between.w, 900);
    must_fail(VPMM_ERROR_BUSY, vpmm_pool_destroy(between.w.pool));
    give(&between.w, between.given, between.w.stream[0]);
    small_is(&between.w, 0);
    small_close(&between.w, 0);
}

static vpmm_status second_free;

static CUresult CUDAAPI free_twice(CUdeviceptr address, CUstream stream)
{
    second_free = vpmm_free(between.w.pool, address, stream);
    return between.real->cuMemFreeAsync(address, stream);
}

/* Who frees what another thread is freeing is told so, and the driver is not. */
Test(sound_faults, a_free_during_the_same_free_is_refused)
{
    needs_simulator();
    open_between(free_twice);
    give(&between.w, take_bytes(&between.w, 1000, world_stream(&between.w)), between.w.stream[0]);
    cr_expect_eq(second_free, VPMM_ERROR_INVALID_POINTER, "%s", vpmm_status_name(second_free));
    small_is(&between.w, 0);
    small_close(&between.w, 0);
}

Test(sound_faults, an_address_that_goes_on_during_its_free_is_counted_once)
{
    address_goes_on_during_a_free(CUDA_SUCCESS);
}
Test(sound_faults, an_address_that_goes_on_during_its_refused_free_is_counted_once)
{
    address_goes_on_during_a_free(CUDA_ERROR_UNKNOWN);
}

/* Several threads meet frees that worked and said no; each leaves such an allocation to whoever gets its address. */
enum { CROWD = 4, CROWD_ROUNDS = 3000 };

struct in_crowd {
    struct world *w;
    CUstream s;
};

static void *crowd(void *argument)
{
    struct in_crowd *c = argument;
    for (int i = 0; i < CROWD_ROUNDS; i++) {
        CUdeviceptr p = 0;
        if (vpmm_malloc(c->w->pool, 500 + (size_t)i % 7 * 100, c->s, &p) != VPMM_SUCCESS)
            return NULL;
        if (i % 16 == 0)
            vpmm_sim_fail_after(c->w->sim, "cuMemFreeAsync", 1, CUDA_ERROR_UNKNOWN, false);
        vpmm_status status = vpmm_free(c->w->pool, p, c->s);
        if (status != VPMM_SUCCESS && status != VPMM_ERROR_DRIVER)
            return NULL;
    }
    return c;
}

Test(sound_faults, refused_frees_of_several_threads_are_settled_once_each, .timeout = 120)
{
    struct world w;
    needs_simulator();
    struct setup setup = setup_default();
    setup.pool.small = VPMM_SMALL_ASYNC;
    setup.sim.stepped = false;
    world_open(&w, &setup);
    pthread_t thread[CROWD];
    struct in_crowd c[CROWD];
    for (int i = 0; i < CROWD; i++) {
        c[i] = (struct in_crowd){&w, world_stream(&w)};
        cr_assert_eq(pthread_create(&thread[i], NULL, crowd, &c[i]), 0);
    }
    for (int i = 0; i < CROWD; i++) {
        void *good = NULL;
        pthread_join(thread[i], &good);
        cr_expect_not_null(good);
    }
    vpmm_sim_fail(w.sim, "cuMemFreeAsync", 0, CUDA_SUCCESS, false);
    must_work(vpmm_pool_destroy(w.pool));
    while (w.streams > 0)
        world_stream_destroy(&w, w.stream[w.streams - 1]);
    cr_assert_eq(w.driver->cuDevicePrimaryCtxRelease(w.device), CUDA_SUCCESS);
    cr_expect_eq(vpmm_sim_destroy(w.sim), 0, "leaks");
}

/* --- which context is current ---------------------------------------------------------------------------------------
 */

enum { CALLS_BEFORE = 3 };

/* Memory freed on one context's default stream, which is busy with it, while `call` fails the nth time from then on. */
static void the_context_is_not_guessed(const char *call, uint64_t nth, size_t cache_bytes, vpmm_small small,
                                       size_t bytes)
{
    needs_simulator();
    struct setup setup = setup_default();
    setup.pool.cache_bytes = cache_bytes;
    setup.pool.small = small;
    struct world w;
    world_open(&w, &setup);
    CUcontext second = NULL;
    cr_assert_eq(w.driver->cuCtxCreate(&second, 0, w.device), CUDA_SUCCESS);
    for (int i = 0; i < CALLS_BEFORE; i++) /* so that caches are there */
        give(&w, take_bytes(&w, bytes, NULL), NULL);
    CUdeviceptr p = take_bytes(&w, bytes, NULL), q = 0;
    fill(&w, p, 1, 1, NULL);
    vpmm_sim_fail(w.sim, call, nth, CUDA_ERROR_UNKNOWN, false);
    clear_words();
    vpmm_status freed = vpmm_free(w.pool, p, NULL);
    require(freed == VPMM_SUCCESS || (freed == VPMM_ERROR_DRIVER && spoke()), "free: %s", vpmm_status_name(freed));
    vpmm_sim_fail(w.sim, call, 0, CUDA_SUCCESS, false);
    cr_assert_eq(w.driver->cuCtxSetCurrent(w.context), CUDA_SUCCESS);
    q = take_bytes(&w, bytes, NULL); /* of the primary context's stream 0 */
    fill(&w, q, 1, 2, NULL);
    cr_assert_eq(w.driver->cuCtxSynchronize(), CUDA_SUCCESS);
    give(&w, q, NULL);
    cr_assert_eq(w.driver->cuCtxSetCurrent(second), CUDA_SUCCESS);
    if (freed != VPMM_SUCCESS)
        give(&w, p, NULL); /* it is live as it was */
    cr_assert_eq(w.driver->cuCtxSynchronize(), CUDA_SUCCESS);
    world_close_with(&w, second);
}

static void no_context_is_guessed(size_t cache_bytes, vpmm_small small, size_t bytes)
{
    static const char *const call[] = {"cuCtxGetDevice", "cuCtxGetCurrent"};
    for (size_t i = 0; i < sizeof call / sizeof call[0]; i++)
        for (uint64_t nth = 1; nth <= 4; nth++)
            the_context_is_not_guessed(call[i], nth, cache_bytes, small, bytes);
}

Test(sound_faults, a_context_that_is_not_known_is_not_taken_for_the_primary_one)
{
    no_context_is_guessed(0, VPMM_SMALL_SLAB, 2 * PAGE);
}
Test(sound_faults, a_context_that_is_not_known_has_no_front_cache)
{
    no_context_is_guessed(64 * PAGE, VPMM_SMALL_SLAB, 2 * PAGE);
}
Test(sound_faults, a_context_that_is_not_known_gets_no_piece)
{
    no_context_is_guessed(64 * PAGE, VPMM_SMALL_SLAB, 1000);
}
Test(sound_faults, a_context_that_is_not_known_does_not_reach_the_driver_s_pool)
{
    no_context_is_guessed(0, VPMM_SMALL_ASYNC, 1000);
}

/* Whose current context is gone can name streams all the same; stream 0 is the primary context's then. */
Test(sound_faults, a_current_context_that_is_destroyed_is_in_no_one_s_way)
{
    needs_simulator();
    struct world w;
    world_open(&w, NULL);
    CUstream s = world_stream(&w);
    CUcontext second = NULL;
    cr_assert_eq(w.driver->cuCtxCreate(&second, 0, w.device), CUDA_SUCCESS);
    cr_assert_eq(w.driver->cuCtxPushCurrent(second), CUDA_SUCCESS);
    cr_assert_eq(w.driver->cuCtxDestroy(second), CUDA_SUCCESS); /* once more on the stack */
    give(&w, take(&w, 2, s), s);
    give(&w, take(&w, 2, NULL), NULL);
    must_work(vpmm_poll(w.pool));
    must_work(vpmm_trim(w.pool, 0, NULL));
    cr_assert_eq(w.driver->cuCtxSetCurrent(w.context), CUDA_SUCCESS);
    world_close(&w);
}

/* The driver has two answers for one that is gone. */
Test(sound_faults, a_current_context_that_is_none_is_in_no_one_s_way)
{
    needs_simulator();
    static const CUresult gone[] = {CUDA_ERROR_CONTEXT_IS_DESTROYED, CUDA_ERROR_INVALID_CONTEXT};
    for (size_t i = 0; i < sizeof gone / sizeof gone[0]; i++) {
        struct world w;
        world_open(&w, NULL);
        CUstream s = world_stream(&w);
        CUcontext second = NULL;
        cr_assert_eq(w.driver->cuCtxCreate(&second, 0, w.device), CUDA_SUCCESS);
        give(&w, take(&w, 2, s), s); /* so that the stream is known */
        vpmm_sim_fail(w.sim, "cuCtxGetDevice", 1, gone[i], true);
        give(&w, take(&w, 4, s), s);
        must_work(vpmm_poll(w.pool));
        vpmm_sim_fail(w.sim, "cuCtxGetDevice", 0, CUDA_SUCCESS, false);
        cr_assert_eq(w.driver->cuCtxSetCurrent(w.context), CUDA_SUCCESS);
        world_close_with(&w, second);
    }
}

/* --- address space that many need at once ---------------------------------------------------------------------------
 */

enum { SETTLERS = 32, PAGES_EACH = 4, CHUNK_PAGES = 16, CHUNKS_NEEDED = SETTLERS * PAGES_EACH / CHUNK_PAGES };

static struct {
    struct world w;
    const vpmm_driver *real;
    pthread_barrier_t start;
    CUdeviceptr given[SETTLERS];
} settlers;

static CUresult CUDAAPI reserve_slowly(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr,
                                       unsigned long long flags)
{
    usleep((useconds_t)(2 * TURN_PATIENCE_NS / 1000)); /* those who wait for the builder's turn come beside it */
    return settlers.real->cuMemAddressReserve(ptr, size, alignment, addr, flags);
}

static void *settle_down(void *argument)
{
    CUdeviceptr *given = argument;
    pthread_barrier_wait(&settlers.start);
    vpmm_status status = vpmm_malloc(settlers.w.pool, PAGES_EACH * PAGE, settlers.w.stream[0], given);
    return status == VPMM_SUCCESS ? NULL : (void *)(uintptr_t)status;
}

/* Each finds the chunks full; one reserves, and what it has reserved is for the others too. */
Test(sound_faults, threads_that_need_address_space_at_once_reserve_no_more_than_they_need, .timeout = 60)
{
    needs_simulator();
    vpmm_driver table;
    pthread_t thread[SETTLERS];
    struct setup setup = setup_default();
    setup.pool.va_size = CHUNK_PAGES * PAGE;
    setup.pool.extent_size = PAGE;
    world_open_without_pool(&settlers.w, &setup);
    settlers.real = settlers.w.driver;
    table = *settlers.real;
    table.cuMemAddressReserve = reserve_slowly;
    setup.pool.driver = &table;
    must_work(vpmm_pool_create(&setup.pool, &settlers.w.pool));
    CUstream s = world_stream(&settlers.w);
    pthread_barrier_init(&settlers.start, NULL, SETTLERS);
    for (int i = 0; i < SETTLERS; i++)
        cr_assert_eq(pthread_create(&thread[i], NULL, settle_down, &settlers.given[i]), 0);
    for (int i = 0; i < SETTLERS; i++) {
        void *status = NULL;
        pthread_join(thread[i], &status);
        cr_expect_null(status, "a malloc answers %s", vpmm_status_name((vpmm_status)(uintptr_t)status));
    }
    uint64_t reserved = world_calls(&settlers.w, "cuMemAddressReserve");
    cr_expect_eq(reserved, CHUNKS_NEEDED, "%llu chunks were reserved", (unsigned long long)reserved);
    world_audit(&settlers.w);
    for (int i = 0; i < SETTLERS; i++)
        if (settlers.given[i] != 0)
            give(&settlers.w, settlers.given[i], s);
    pthread_barrier_destroy(&settlers.start);
    world_close(&settlers.w);
}

/* --- what the process has no more of --------------------------------------------------------------------------------
 */

/* The first key that there is: what a key that was never made would be taken for. A sanitizer may have it. */
enum { FIRST_KEY = 0, KEY_THREADS = 4 };

static bool has_first_key;

__attribute__((constructor)) static void take_first_key(void)
{
    pthread_key_t key;
    has_first_key = pthread_key_create(&key, NULL) == 0 && key == FIRST_KEY;
}

static void use_up_all_keys(void)
{
    pthread_key_t key;
    while (pthread_key_create(&key, NULL) == 0)
        ;
}

struct keyless {
    struct world *w;
    CUstream s;
    bool marks;
};

/* Every other thread has a value of its own under the first key; the others have what they had. None may change. */
static void *use_pool_without_keys(void *argument)
{
    const struct keyless *k = argument;
    unsigned char mark[256], as_it_was[sizeof mark];
    memset(mark, 0x5a, sizeof mark);
    memcpy(as_it_was, mark, sizeof mark);
    void *value = has_first_key && k->marks ? mark : pthread_getspecific(FIRST_KEY);
    if (has_first_key)
        pthread_setspecific(FIRST_KEY, value);
    bool good = true;
    for (int i = 0; i < 20; i++) {
        CUdeviceptr page = 0, piece = 0, never = 0;
        good &= vpmm_malloc(k->w->pool, 2 * PAGE, k->s, &page) == VPMM_SUCCESS;
        good &= vpmm_malloc(k->w->pool, 1000, k->s, &piece) == VPMM_SUCCESS;
        good &= vpmm_malloc(k->w->pool, 1000, CU_STREAM_PER_THREAD, &never) == VPMM_ERROR_HOST_MEMORY;
        good &= strstr(vpmm_last_error(), "CU_STREAM_PER_THREAD") != NULL;
        good &= vpmm_free(k->w->pool, piece, k->s) == VPMM_SUCCESS;
        good &= vpmm_free(k->w->pool, page, k->s) == VPMM_SUCCESS;
    }
    good &= pthread_getspecific(FIRST_KEY) == value && memcmp(mark, as_it_was, sizeof mark) == 0;
    return good ? argument : NULL;
}

Test(sound_faults, a_process_without_keys_has_pools_without_caches)
{
    needs_simulator();
    struct setup setup = setup_default();
    setup.pool.cache_bytes = 64 * PAGE;
    struct world w;
    use_up_all_keys();
    world_open(&w, &setup);
    pthread_t thread[KEY_THREADS];
    struct keyless k[KEY_THREADS];
    for (int i = 0; i < KEY_THREADS; i++) {
        k[i] = (struct keyless){&w, world_stream(&w), i % 2 != 0};
        cr_assert_eq(pthread_create(&thread[i], NULL, use_pool_without_keys, &k[i]), 0);
    }
    for (int i = 0; i < KEY_THREADS; i++) {
        void *good = NULL;
        pthread_join(thread[i], &good);
        cr_expect_not_null(good, "thread %d", i);
    }
    world_audit(&w);
    cr_expect_eq(stats_of(&w).hits_cache, 0);
    world_close(&w);
}

static bool refuse_atfork, refuse_atexit;

int __real_pthread_atfork(void (*)(void), void (*)(void), void (*)(void));
int __wrap_pthread_atfork(void (*before)(void), void (*parent)(void), void (*child)(void));
int __wrap_pthread_atfork(void (*before)(void), void (*parent)(void), void (*child)(void))
{
    return refuse_atfork ? ENOMEM : __real_pthread_atfork(before, parent, child);
}

int __real_atexit(void (*)(void));
int __wrap_atexit(void (*)(void));
int __wrap_atexit(void (*handler)(void))
{
    return refuse_atexit ? -1 : __real_atexit(handler);
}

static void no_pool_is_made(void)
{
    needs_simulator();
    struct setup setup = setup_default();
    struct world w;
    world_open_without_pool(&w, &setup);
    setup.pool.driver = w.driver;
    setup.pool.reaper = true;
    must_fail(VPMM_ERROR_HOST_MEMORY, vpmm_pool_create(&setup.pool, &w.pool));
    cr_expect_null(w.pool);
    world_close(&w);
}

Test(sound_faults, a_pool_that_would_not_be_told_of_a_fork_is_not_made)
{
    refuse_atfork = true;
    no_pool_is_made();
}
Test(sound_faults, a_pool_that_would_not_be_told_of_the_exit_is_not_made)
{
    refuse_atexit = true;
    no_pool_is_made();
}

/* The request that is refused, counted down, 0: none; and whether all that come after it are, too. */
static unsigned host_memory_ends_at;
static bool host_memory_is_over;

static bool host_memory_ends(void)
{
    return host_memory_ends_at && ((host_memory_is_over && host_memory_ends_at == 1) || --host_memory_ends_at == 0);
}

void *__real_mmap(void *, size_t, int, int, int, off_t);
void *__wrap_mmap(void *, size_t, int, int, int, off_t);
void *__wrap_mmap(void *at, size_t bytes, int protection, int flags, int file, off_t offset)
{
    return host_memory_ends() ? MAP_FAILED : __real_mmap(at, bytes, protection, flags, file, offset);
}

void *__real_calloc(size_t, size_t);
void *__wrap_calloc(size_t, size_t);
void *__wrap_calloc(size_t count, size_t size)
{
    return host_memory_ends() ? NULL : __real_calloc(count, size);
}

void *__real_realloc(void *, size_t);
void *__wrap_realloc(void *, size_t);
void *__wrap_realloc(void *at, size_t size)
{
    return host_memory_ends() ? NULL : __real_realloc(at, size);
}

/* What further streams use is written down, or the allocation is as it was. */
Test(sound_faults, a_use_is_noted_or_not_at_all_as_host_memory_ends)
{
    enum { STREAMS = 8 };
    static const size_t kinds[] = {4 * PAGE, 100 << 10, 1000};
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
        struct world w;
        world_open(&w, NULL);
        CUstream s = world_stream(&w);
        CUdeviceptr p = take_bytes(&w, kinds[k], s);
        uint64_t refused = 0;
        for (int i = 0; i < STREAMS; i++) {
            CUstream x = world_stream(&w);
            give(&w, take(&w, 1, x), x); /* the pool has met it */
            host_memory_ends_at = 1;
            vpmm_status status = vpmm_use(w.pool, p, x);
            refused += status == VPMM_ERROR_HOST_MEMORY;
            require(status == VPMM_SUCCESS || status == VPMM_ERROR_HOST_MEMORY, "%s", vpmm_status_name(status));
            host_memory_ends_at = 0;
            must_work(vpmm_use(w.pool, p, x));
            world_audit(&w);
        }
        cr_expect_geq(refused, 2, "the first request for host memory, and one for more");
        give(&w, p, s);
        world_close(&w);
    }
}

/* The at-th request for host memory is refused to a step of decay. True: there was one so late. */
static bool decays_without_host_memory(unsigned at)
{
    struct setup setup = setup_default();
    setup.pool.decay_ms = 0;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    give(&w, take(&w, 10, s), s);
    world_step(&w);
    host_memory_ends_at = at;
    must_work(vpmm_poll(w.pool));
    bool refused = host_memory_ends_at == 0;
    host_memory_ends_at = 0;
    must_work(vpmm_poll(w.pool));
    cr_expect_eq(stats_of(&w).mapped_bytes, 0, "after request %u for host memory", at);
    world_close(&w);
    return refused;
}

/* Such a step is made later, though nothing else happens meanwhile. */
Test(sound_faults, memory_decays_once_there_is_host_memory_again)
{
    unsigned refused = 1;
    while (decays_without_host_memory(refused))
        refused++;
    cr_expect_gt(refused, 2, "a step asks for host memory %u times", refused - 1);
}

/* Each request for host memory in turn is refused while the pool is made. True: there was one so late. */
static bool no_pool_without_host_memory(const struct setup *setup, unsigned at)
{
    struct world w;
    world_open_without_pool(&w, setup);
    vpmm_config config = setup->pool;
    config.driver = w.driver;
    host_memory_ends_at = at;
    vpmm_status status = vpmm_pool_create(&config, &w.pool);
    bool refused = host_memory_ends_at == 0;
    host_memory_ends_at = 0;
    require(refused == (status != VPMM_SUCCESS), "request %u for host memory: %s", at, vpmm_status_name(status));
    require(!refused || w.pool == NULL, "a pool without host memory");
    world_close(&w);
    return refused;
}

Test(sound_faults, a_pool_is_made_whole_or_not_at_all_as_host_memory_ends)
{
    needs_simulator();
    struct setup setup = setup_default();
    setup.pool.cache_bytes = 64 * PAGE;
    setup.pool.initial_pages = 4;
    unsigned refused = 1;
    while (no_pool_without_host_memory(&setup, refused))
        refused++;
    cr_expect_gt(refused, 10, "a pool asks for host memory %u times", refused - 1);
}

/* The at-th request for host memory and all that follow are refused while a trim gives back what lies between live
   pages. True: there was one so late. */
static bool trim_without_host_memory(unsigned at)
{
    enum { PAGES = 600 };
    CUdeviceptr p[PAGES];
    struct setup setup = setup_default();
    setup.pool.extent_size = PAGE;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    for (int i = 0; i < PAGES; i++)
        p[i] = take(&w, 1, s);
    for (int i = 0; i < PAGES; i += 2)
        give(&w, p[i], s);
    world_drain(&w);
    host_memory_ends_at = at;
    host_memory_is_over = true;
    vpmm_status status = vpmm_trim(w.pool, 0, NULL);
    bool refused = host_memory_ends_at == 1;
    host_memory_ends_at = 0;
    vpmm_stats stats = stats_of(&w);
    require(status == VPMM_SUCCESS || (refused && status == VPMM_ERROR_HOST_MEMORY), "%s", vpmm_status_name(status));
    require(status != VPMM_SUCCESS || stats.mapped_bytes == stats.live_bytes,
            "request %u for host memory: success, and %zu bytes are mapped of which %zu live", at,
            (size_t)stats.mapped_bytes, (size_t)stats.live_bytes);
    for (int i = 1; i < PAGES; i += 2)
        give(&w, p[i], s);
    world_close(&w);
    return refused;
}

Test(sound_faults, a_trim_gives_everything_back_or_says_that_host_memory_ended)
{
    needs_simulator();
    unsigned refused = 1;
    while (refused < 20 && trim_without_host_memory(refused))
        refused++;
    cr_expect_gt(refused, 3, "a trim asks for host memory %u times", refused - 1);
}

/* --- drivers that have failed for good --------------------------------------------------------------------------------
 */

/* What a lost device, or a driver that is gone, held leaks. */
static void drop_world(struct world *w)
{
    w->pool = NULL;
    vpmm_sim_destroy(w->sim);
}

/* No mark is outstanding that would tell: a call that was given a stream does, and no retry of an end is asked for. */
Test(sound_faults, a_device_is_lost_at_any_call_that_says_so)
{
    needs_simulator();
    struct world w;
    world_open(&w, NULL);
    CUstream s = world_stream(&w), t = world_stream(&w);
    CUdeviceptr kept = take(&w, 2, s), p;
    vpmm_health health;
    must_work(vpmm_poll(w.pool));
    vpmm_sim_fail(w.sim, "cuStreamGetId", 1, CUDA_ERROR_ILLEGAL_ADDRESS, true);
    must_fail(VPMM_ERROR_DRIVER, vpmm_malloc(w.pool, PAGE, t, &p));
    must_work(vpmm_health_get(w.pool, &health));
    cr_expect(health.lost);
    must_fail(VPMM_ERROR_DRIVER, vpmm_poll(w.pool));
    must_fail(VPMM_ERROR_DRIVER, vpmm_free(w.pool, kept, s));
    must_fail(VPMM_ERROR_DRIVER, vpmm_pool_destroy(w.pool));
    drop_world(&w);
}

/* Of a page that shares a handle with free ones: nothing is unmapped beside it. */
Test(sound_faults, a_driver_that_is_gone_leaves_pieces_that_wait_to_the_pool_s_end)
{
    needs_simulator();
    struct setup setup = setup_default();
    setup.pool.page_size = 512 << 10;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w), t = world_stream(&w);
    CUdeviceptr page = take_bytes(&w, 512 << 10, s), piece = take_bytes(&w, 300, s), other = take_bytes(&w, 100000, t);
    fill(&w, piece, 1, 1, s);
    fill(&w, other, 1, 2, t);
    must_work(vpmm_use(w.pool, piece, t));
    give(&w, page, s);
    give(&w, piece, s);
    give(&w, other, t);
    vpmm_sim_shutdown(w.sim);
    must_work(vpmm_pool_destroy(w.pool));
    drop_world(&w);
}

/* Which nobody can free any more. `is_known`: a call has found out before, else the destruction does. */
static void end_with_live_memory(bool is_known)
{
    needs_simulator();
    struct world w;
    world_open(&w, NULL);
    CUstream s = world_stream(&w);
    CUdeviceptr p = take(&w, 2, s);
    vpmm_sim_shutdown(w.sim);
    if (is_known)
        must_fail(VPMM_ERROR_DRIVER, vpmm_malloc(w.pool, 100 * PAGE, s, &p));
    must_work(vpmm_pool_destroy(w.pool));
    drop_world(&w);
}

Test(sound_faults, a_driver_that_is_gone_keeps_no_pool_for_live_memory)
{
    end_with_live_memory(true);
    end_with_live_memory(false);
}

/* --- words, without what they are kept in ---------------------------------------------------------------------------
 */

enum { THREADS_WITH_WORDS = 64, FAILING_THREADS = 80 };

static const char lost_words[] = "there is no host memory for the words of this thread's failures";

static _Thread_local bool refuse_malloc;

void *__real_malloc(size_t);
void *__wrap_malloc(size_t);
void *__wrap_malloc(size_t bytes)
{
    return refuse_malloc ? NULL : __real_malloc(bytes);
}

/* NULL: the status is as it should be, and the words are these. */
static const char *fail_and_read(const char *words)
{
    if (vpmm_stats_get(NULL, NULL) != VPMM_ERROR_INVALID_VALUE)
        return "the status is another";
    return strstr(vpmm_last_error(), words) ? NULL : "the words are others";
}

static void *fail_without_memory_and_with(void *problem)
{
    refuse_malloc = true;
    const char *without = fail_and_read(lost_words);
    refuse_malloc = false;
    const char *with = fail_and_read("vpmm_stats_get");
    *(const char **)problem = without ? without : with;
    return NULL;
}

Test(sound_faults, a_failure_without_memory_for_its_words_keeps_its_status)
{
    pthread_t thread;
    const char *problem = "it did not run";
    cr_assert_eq(pthread_create(&thread, NULL, fail_without_memory_and_with, &problem), 0);
    pthread_join(thread, NULL);
    cr_assert(problem == NULL, "%s", problem);
}

static void *fail_twice(void *has_words)
{
    *(bool *)has_words = !fail_and_read("vpmm_stats_get") && !fail_and_read("vpmm_stats_get");
    return *(bool *)has_words || !fail_and_read(lost_words) ? has_words : NULL;
}

/* One after the other: the buffers of those that have ended are not known to be free. */
Test(sound_faults, a_process_without_keys_has_words_in_its_first_threads)
{
    use_up_all_keys();
    for (int i = 0; i < FAILING_THREADS; i++) {
        pthread_t thread;
        bool has_words = false;
        cr_assert_eq(pthread_create(&thread, NULL, fail_twice, &has_words), 0);
        void *good = NULL;
        pthread_join(thread, &good);
        cr_assert_not_null(good, "thread %d has neither its words nor those for lost ones", i);
        cr_assert_eq(has_words, i < THREADS_WITH_WORDS, "thread %d", i);
    }
}

/* --- what a refusal says, and how far it goes -----------------------------------------------------------------------
 */

Test(sound_faults, a_point_that_no_event_could_be_made_for_names_the_call)
{
    struct stage t;
    CUdeviceptr p, none = 0;
    stage_open(&t, 1);
    CUstream other = world_stream(&t.w);
    take_all(&t);
    fill(&t.w, t.held[0], 1, 0, t.s);
    refuse(&t, "cuEventCreate");
    give_all(&t);
    must_fail(VPMM_ERROR_DRIVER, vpmm_malloc(t.w.pool, CAP * PAGE, other, &none));
    cr_expect_not_null(strstr(vpmm_last_error(), "cuEventCreate answered 999"), "%s", vpmm_last_error());
    relent(&t, "cuEventCreate");
    p = take(&t.w, CAP, other);
    give(&t.w, p, other);
    world_step(&t.w);
    stage_close(&t);
}

Test(sound_faults, what_a_device_can_do_is_not_guessed_where_it_will_not_say)
{
    needs_simulator();
    struct setup setup = setup_default();
    struct world w;
    world_open_without_pool(&w, &setup);
    for (uint64_t nth = 1; nth <= 4; nth++) {
        vpmm_pool *pool = NULL;
        vpmm_sim_fail(w.sim, "cuDeviceGetAttribute", nth, CUDA_ERROR_UNKNOWN, false);
        setup.pool.driver = w.driver;
        must_fail(VPMM_ERROR_DRIVER, vpmm_pool_create(&setup.pool, &pool));
        cr_expect_not_null(strstr(vpmm_last_error(), "cuDeviceGetAttribute answered 999"), "%s", vpmm_last_error());
    }
    vpmm_sim_fail(w.sim, "cuDeviceGetAttribute", 4, CUDA_ERROR_INVALID_VALUE, false); /* an older driver */
    must_work(vpmm_pool_create(&setup.pool, &w.pool));
    world_close(&w);
}

/* Of a driver that answers nothing but this any more. */
static void end_with(CUresult result, bool live)
{
    static const char *const calls[] = {"cuStreamIsCapturing",
                                        "cuStreamGetId",
                                        "cuEventCreate",
                                        "cuEventRecord",
                                        "cuEventQuery",
                                        "cuEventSynchronize",
                                        "cuMemAlloc",
                                        "cuMemFree",
                                        "cuMemGetInfo",
                                        "cuCtxPushCurrent",
                                        "cuThreadExchangeStreamCaptureMode"};
    struct stage t;
    stage_open(&t, 0);
    CUdeviceptr p = take(&t.w, 2, t.s);
    fill(&t.w, p, 2, 2, t.s);
    for (size_t i = 0; i < sizeof calls / sizeof calls[0] && live; i++)
        vpmm_sim_fail(t.w.sim, calls[i], 1, result, true);
    if (live)
        must_fail(VPMM_ERROR_DRIVER, vpmm_free(t.w.pool, p, t.s));
    else
        refuse(&t, "cuEventRecord"); /* it has no mark that could be asked about */
    if (!live)
        give(&t.w, p, t.s);
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++)
        vpmm_sim_fail(t.w.sim, calls[i], 1, result, true);
    must_fail(VPMM_ERROR_DRIVER, vpmm_pool_destroy(t.w.pool));
    cr_expect_not_null(strstr(vpmm_last_error(), "lost"), "%s", vpmm_last_error());
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++)
        relent(&t, calls[i]);
    cr_expect_gt(stage_leave(&t), 0, "what a lost device holds is given up");
}

Test(sound_faults, a_driver_that_answers_nothing_any_more_keeps_no_pool)
{
    end_with(CUDA_ERROR_UNKNOWN, true);
    end_with(CUDA_ERROR_UNKNOWN, false);
    end_with((CUresult)46, true); /* CUDA_ERROR_DEVICE_UNAVAILABLE */
    end_with((CUresult)46, false);
}

/* The driver answers the next call of the same kind: the pool's memory can still be freed. */
Test(sound_faults, a_call_that_is_refused_once_ends_no_pool_with_live_memory)
{
    static const char *const calls[] = {"cuMemGetInfo", "cuThreadExchangeStreamCaptureMode", "cuCtxPushCurrent"};
    struct stage t;
    stage_open(&t, 0);
    CUdeviceptr p = take(&t.w, 2, t.s);
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        vpmm_sim_fail(t.w.sim, calls[i], 1, CUDA_ERROR_UNKNOWN, false);
        must_fail(VPMM_ERROR_BUSY, vpmm_pool_destroy(t.w.pool));
        relent(&t, calls[i]);
    }
    give(&t.w, p, t.s);
    stage_close(&t);
}

Test(sound_faults, a_handle_that_is_refused_for_another_reason_leaves_those_after_it_exportable)
{
    struct stage t;
    CUmemGenericAllocationHandle handle;
    CUdeviceptr p;
    int fd = -1;
    stage_open(&t, 0);
    vpmm_sim_fail(t.w.sim, "cuMemCreate", 1, CUDA_ERROR_NOT_PERMITTED, true);
    must_fail(VPMM_ERROR_DRIVER, vpmm_malloc(t.w.pool, PAGE, t.s, &p));
    relent(&t, "cuMemCreate");
    p = take(&t.w, 1, t.s);
    cr_assert_eq(t.w.driver->cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)p), CUDA_SUCCESS);
    cr_expect_eq(t.w.driver->cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
                 CUDA_SUCCESS);
    close(fd);
    cr_expect_eq(t.w.driver->cuMemRelease(handle), CUDA_SUCCESS);
    give(&t.w, p, t.s);
    stage_close(&t);
}

/* Two pages in all, of which a thread's caches may hold both. */
static struct setup of_two_pages(void)
{
    struct setup setup = setup_default();
    needs_simulator();
    setup.pool.max_mapped = 2 * PAGE;
    setup.pool.cache_bytes = 8 * PAGE;
    setup.pool.streams = VPMM_STREAMS_TRUSTED;
    return setup;
}

Test(sound_faults, memory_that_could_not_be_waited_for_is_not_called_exhausted)
{
    struct setup setup = of_two_pages();
    struct world w;
    CUdeviceptr none;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    give(&w, take(&w, 2, NULL), NULL); /* into a cache of the legacy stream, on which nobody else may record */
    vpmm_sim_fail(w.sim, "cuMemFree", 1, CUDA_ERROR_UNKNOWN, true);
    must_fail(VPMM_ERROR_DRIVER, vpmm_malloc(w.pool, 2 * PAGE, s, &none));
    cr_expect_not_null(strstr(vpmm_last_error(), "cuMemFree answered 999"), "%s", vpmm_last_error());
    vpmm_sim_fail(w.sim, "cuMemFree", 0, CUDA_SUCCESS, false);
    give(&w, take(&w, 2, s), s);
    world_close(&w);
}

/* The same of a request that is the driver's pool's to serve, for which pages would have been given back. */
Test(sound_faults, pages_that_could_not_be_waited_for_are_not_called_exhausted_by_the_driver_s_pool)
{
    needs_simulator();
    struct setup setup = setup_default();
    struct world w;
    CUdeviceptr kept[3], none;
    setup.sim.memory_bytes = 16 * PAGE;
    setup.pool.small = VPMM_SMALL_ASYNC;
    setup.pool.page_size = 4 * PAGE;
    setup.pool.cache_bytes = 16 * PAGE; /* the legacy stream's, on which nobody else may record */
    setup.pool.streams = VPMM_STREAMS_TRUSTED;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    for (int i = 0; i < 3; i++)
        kept[i] = take_bytes(&w, 4 * PAGE, NULL);
    give(&w, kept[0], NULL);
    vpmm_sim_fail(w.sim, "cuMemFree", 1, CUDA_ERROR_UNKNOWN, true);
    must_fail(VPMM_ERROR_DRIVER, vpmm_malloc(w.pool, 4 * PAGE - 1, s, &none));
    cr_expect_not_null(strstr(vpmm_last_error(), "cuMemFree answered 999"), "%s", vpmm_last_error());
    vpmm_sim_fail(w.sim, "cuMemFree", 0, CUDA_SUCCESS, false);
    kept[0] = take_bytes(&w, 4 * PAGE - 1, s);
    give(&w, kept[0], s);
    for (int i = 1; i < 3; i++)
        give(&w, kept[i], NULL);
    world_close(&w);
}

/* Half a page that another stream has freed, which passes while a wait for the legacy stream's page is refused. */
Test(sound_faults, what_has_passed_serves_where_another_wait_is_refused)
{
    struct setup setup = of_two_pages();
    struct world w;
    setup.pool.reuse = VPMM_REUSE_COMPLETED;
    world_open(&w, &setup);
    CUstream s = world_stream(&w), t = world_stream(&w);
    give(&w, take(&w, 1, NULL), NULL);
    CUdeviceptr kept = take_bytes(&w, PAGE / 2, s), other = take_bytes(&w, PAGE / 2, s);
    keep_busy(&w, t);
    give(&w, other, t);
    vpmm_sim_fail(w.sim, "cuMemFree", 1, CUDA_ERROR_UNKNOWN, true);
    CUdeviceptr again = take_bytes(&w, PAGE / 2, s);
    vpmm_sim_fail(w.sim, "cuMemFree", 0, CUDA_SUCCESS, false);
    give(&w, again, s);
    give(&w, kept, s);
    world_step(&w);
    world_close(&w);
}
