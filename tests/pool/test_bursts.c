/*
 * A pool that calls the driver for long lets builds in, of any pool, and its own builds wait for their place beside one
 * that does (driver/burst.h). The clock goes on when the test says so: nothing depends on how busy the machine is.
 */
#define _GNU_SOURCE 1

#include "driver/burst.h"
#include "pool/pool.h"
#include "support.h"

#include "base/clock.h"
#include "still_clock.h"

enum { HANDLES = 40, HANDLES_A_CALL = 16, PEER = 1, CALLS_A_BURST = 4, BURSTS = HANDLES / CALLS_A_BURST };

/* ---- another pool that builds all the time ---- */

static atomic_bool builds, stop;
static atomic_uint bursts, rounds;

static void *build_on(void *unused)
{
    (void)unused;
    while (!atomic_load(&stop)) {
        struct burst burst = {0};
        burst_give_way(&burst);
        if (burst.end_ns)
            atomic_fetch_add(&bursts, 1);
        burst_end(&burst);
        atomic_fetch_add(&rounds, 1);
        clock_yield();
    }
    return NULL;
}

static pthread_t builder;

static void builds_begin(void)
{
    atomic_store(&stop, false);
    atomic_store(&builds, true);
    cr_assert_eq(pthread_create(&builder, NULL, build_on, NULL), 0);
}

static void builds_end(void)
{
    atomic_store(&builds, false);
    atomic_store(&stop, true);
    pthread_join(builder, NULL);
}

/* Until it stands in line, or has asked since and has not. */
static void await_builder(void)
{
    unsigned before = atomic_load(&rounds);
    while (atomic_load(&builds) && !atomic_load(&still.waiting) && atomic_load(&rounds) - before < 2)
        clock_sleep_us(STILL_LOOK_US);
}

/* ---- a driver that is slow, and sees who was let in between two of its calls ---- */

static const vpmm_driver *simulated;
static unsigned seen, let_in;
static size_t widest; /* call, in bytes */

static void take_time(size_t bytes)
{
    unsigned now = atomic_load(&bursts);
    let_in += now != seen;
    seen = now;
    widest = bytes > widest ? bytes : widest;
    await_builder();
    still_pass(BURST_NS / CALLS_A_BURST);
}

static CUresult CUDAAPI allow_slowly(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
    take_time(bytes);
    return simulated->cuMemSetAccess(address, bytes, access, count);
}

static CUresult CUDAAPI unmap_slowly(CUdeviceptr address, size_t bytes)
{
    take_time(bytes);
    return simulated->cuMemUnmap(address, bytes);
}

static CUresult CUDAAPI release_slowly(CUmemGenericAllocationHandle handle)
{
    take_time(0);
    return simulated->cuMemRelease(handle);
}

/* ---- a pool of HANDLES handles of a page each ---- */

struct full {
    struct world w;
    CUstream s;
    CUdeviceptr memory[HANDLES];
};

static void open_full(struct full *full, struct setup setup)
{
    needs_simulator();
    setup.sim.devices = 2;
    setup.pool.extent_size = PAGE;
    world_open(&full->w, &setup);
    full->s = world_stream(&full->w);
    for (int i = 0; i < HANDLES; i++)
        full->memory[i] = take(&full->w, 1, full->s);
    simulated = full->w.driver;
    builds_begin();
}

static void empty(struct full *full)
{
    for (int i = 0; i < HANDLES; i++)
        give(&full->w, full->memory[i], full->s);
}

static void close_full(struct full *full)
{
    builds_end();
    empty(full);
    world_close(&full->w);
}

/* Between each two bursts; and afterwards nobody calls for long. */
static void expect_let_in(void)
{
    struct burst burst = {0};
    cr_expect_geq(let_in, BURSTS - 1, "builds were let in %u times", let_in);
    atomic_store(&still.hurries, true);
    burst_give_way(&burst);
    cr_expect_eq(burst.end_ns, 0, "it still counts as who calls for long");
}

Test(bursts, a_change_of_rights_lets_builds_in, .timeout = 60)
{
    struct full full;
    open_full(&full, setup_default());
    full.w.pool->device.driver.cuMemSetAccess = allow_slowly;
    must_work(vpmm_pool_set_access(full.w.pool, PEER, CU_MEM_ACCESS_FLAGS_PROT_READWRITE));
    expect_let_in();
    close_full(&full);
}

Test(bursts, a_park_lets_builds_in, .timeout = 60)
{
    struct setup setup = setup_default();
    struct full full;
    setup.pool.graph = true;
    open_full(&full, setup);
    full.w.pool->device.driver.cuMemUnmap = unmap_slowly;
    must_work(vpmm_park(full.w.pool));
    must_work(vpmm_wake(full.w.pool));
    expect_let_in();
    close_full(&full);
}

/* The mappings go in a few calls, the handles one by one. */
Test(bursts, the_end_of_a_pool_lets_builds_in, .timeout = 60)
{
    struct full full;
    open_full(&full, setup_default());
    empty(&full);
    full.w.pool->device.driver.cuMemUnmap = unmap_slowly;
    full.w.pool->device.driver.cuMemRelease = release_slowly;
    world_close(&full.w);
    builds_end();
    expect_let_in();
    cr_expect_leq(widest, HANDLES_A_CALL * PAGE, "nobody is let in during a call");
}

/* ---- its own builds ---- */

/* The driver takes as long for each handle, and who waits for it may have it after any of these calls. */
Test(bursts, a_build_of_many_handles_makes_several_calls)
{
    struct setup setup = setup_default();
    struct world w;
    needs_simulator();
    setup.pool.extent_size = PAGE;
    world_open(&w, &setup);
    simulated = w.driver;
    w.pool->device.driver.cuMemSetAccess = allow_slowly;
    CUstream s = world_stream(&w);
    CUdeviceptr memory = take(&w, HANDLES, s);
    cr_expect_eq(widest, HANDLES_A_CALL * PAGE);
    fill(&w, memory, HANDLES, 1, s);
    give(&w, memory, s);
    world_close(&w);
}

Test(bursts, builds_wait_for_their_place, .timeout = 60)
{
    struct setup setup = setup_default();
    struct burst burst = {0};
    struct malloc_thread asker;
    struct world w;
    needs_simulator();
    world_open(&w, &setup);
    burst_begin(&burst);
    malloc_thread_start(&asker, &w, world_stream(&w), 4);
    while (!atomic_load(&still.waiting) && !atomic_load(&asker.done))
        clock_sleep_us(STILL_LOOK_US);
    cr_expect(!atomic_load(&asker.done), "a build does not wait");
    burst_end(&burst);
    pthread_join(asker.thread, NULL);
    cr_assert_eq(asker.status, VPMM_SUCCESS);
    unsigned waits = atomic_load(&still.waits);
    atomic_store(&still.hurries, true);
    burst_begin(&burst);
    burst_end(&burst);
    cr_expect_eq(atomic_load(&still.waits), waits, "a build does not leave the line");
    give(&w, asker.pointer, asker.stream);
    world_close(&w);
}
