/*
 * vpmm_pool_set_access: what another device may do with memory that is there, that is made or moved later, and that
 * wakes; what is refused, and what a call that fails leaves.
 *
 * Two simulated devices, the pool on the first; the work that uses its memory is the second one's.
 */
#include "support.h"

#include "base/clock.h"
#include "pool/pool.h"

#include <pthread.h>
#include <stdatomic.h>

#define READWRITE CU_MEM_ACCESS_FLAGS_PROT_READWRITE

enum { PAGES = 4, PEER = 1 };

struct peers {
    struct world w;
    CUstream s;
    CUcontext context; /* of the second device, */
    CUstream peer;     /* and a stream there */
};

static struct setup two_devices(void)
{
    struct setup setup = setup_default();
    setup.sim.devices = 2;
    return setup;
}

static void open_peers_of(struct peers *p, const struct setup *setup)
{
    needs_simulator();
    world_open(&p->w, setup);
    p->s = world_stream(&p->w);
    cr_assert_eq(p->w.driver->cuDevicePrimaryCtxRetain(&p->context, PEER), CUDA_SUCCESS);
    cr_assert_eq(p->w.driver->cuCtxSetCurrent(p->context), CUDA_SUCCESS);
    cr_assert_eq(p->w.driver->cuStreamCreate(&p->peer, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    cr_assert_eq(p->w.driver->cuCtxSetCurrent(p->w.context), CUDA_SUCCESS);
}

static void open_peers(struct peers *p)
{
    struct setup setup = two_devices();
    open_peers_of(p, &setup);
}

static void close_peers(struct peers *p)
{
    cr_assert_eq(p->w.driver->cuStreamDestroy(p->peer), CUDA_SUCCESS);
    cr_assert_eq(p->w.driver->cuDevicePrimaryCtxRelease(PEER), CUDA_SUCCESS);
    world_close(&p->w);
}

/* The other device writes to each page, behind what the first one's stream was given, and is waited for. */
static void write_by_peer(struct peers *p, CUdeviceptr memory, size_t pages)
{
    world_step(&p->w);
    cr_assert_eq(p->w.driver->cuStreamSynchronize(p->s), CUDA_SUCCESS);
    cr_assert_eq(p->w.driver->cuCtxSetCurrent(p->context), CUDA_SUCCESS);
    for (size_t i = 0; i < pages; i++)
        cr_assert_eq(p->w.driver->cuMemsetD32Async(memory + i * PAGE, 5, 1, p->peer), CUDA_SUCCESS);
    p->w.driver->cuStreamSynchronize(p->peer);
    cr_assert_eq(p->w.driver->cuCtxSetCurrent(p->w.context), CUDA_SUCCESS);
}

/* Such an access ends the device for good, and the pool with what is live in it. */
static void expect_no_access(struct peers *p, CUdeviceptr memory)
{
    uint64_t before = vpmm_sim_misuses(p->w.sim);
    write_by_peer(p, memory, 1);
    cr_expect_eq(vpmm_sim_misuses(p->w.sim), before + 1, "the other device has access");
    device_lose(&p->w.pool->device);
    must_fail(VPMM_ERROR_DRIVER, vpmm_pool_destroy(p->w.pool));
    (void)vpmm_sim_destroy(p->w.sim);
}

/* ---- what is given ---- */

Test(access, memory_that_is_there_and_that_comes_later)
{
    struct peers p;
    open_peers(&p);
    CUdeviceptr there = take(&p.w, PAGES, p.s), piece = take_bytes(&p.w, 1000, p.s);
    must_work(vpmm_pool_set_access(p.w.pool, PEER, READWRITE));
    must_work(vpmm_pool_set_access(p.w.pool, PEER, READWRITE));
    CUdeviceptr later = take(&p.w, 8 * PAGES, p.s);
    write_by_peer(&p, there, PAGES);
    write_by_peer(&p, piece, 1);
    write_by_peer(&p, later, 8 * PAGES);
    give(&p.w, there, p.s);
    give(&p.w, piece, p.s);
    give(&p.w, later, p.s);
    close_peers(&p);
}

Test(access, memory_that_moves)
{
    struct setup setup = two_devices();
    setup.pool.max_mapped = 8 * PAGE;
    setup.pool.extent_size = PAGE;
    struct peers p;
    CUdeviceptr four[4];
    open_peers_of(&p, &setup);
    must_work(vpmm_pool_set_access(p.w.pool, PEER, READWRITE));
    for (int i = 0; i < 4; i++)
        four[i] = take(&p.w, 2, p.s);
    give(&p.w, four[0], p.s);
    give(&p.w, four[2], p.s);
    CUdeviceptr moved = take(&p.w, 4, p.s);
    cr_expect_gt(stats_of(&p.w).extents_remapped, 0);
    write_by_peer(&p, moved, 4);
    give(&p.w, moved, p.s);
    give(&p.w, four[1], p.s);
    give(&p.w, four[3], p.s);
    close_peers(&p);
}

Test(access, memory_that_wakes)
{
    struct setup setup = two_devices();
    setup.pool.graph = true;
    struct peers p;
    open_peers_of(&p, &setup);
    CUdeviceptr memory = take(&p.w, PAGES, p.s);
    must_work(vpmm_park(p.w.pool));
    must_work(vpmm_pool_set_access(p.w.pool, PEER, READWRITE));
    must_work(vpmm_wake(p.w.pool));
    write_by_peer(&p, memory, PAGES);
    give(&p.w, memory, p.s);
    close_peers(&p);
}

Test(access, nothing_at_first)
{
    struct peers p;
    open_peers(&p);
    expect_no_access(&p, take(&p.w, PAGES, p.s));
}

Test(access, what_is_taken_away)
{
    struct peers p;
    open_peers(&p);
    CUdeviceptr memory = take(&p.w, PAGES, p.s);
    must_work(vpmm_pool_set_access(p.w.pool, PEER, READWRITE));
    write_by_peer(&p, memory, PAGES);
    must_work(vpmm_pool_set_access(p.w.pool, PEER, CU_MEM_ACCESS_FLAGS_PROT_NONE));
    expect_no_access(&p, memory);
}

Test(access, what_is_taken_away_is_not_given_to_later_memory)
{
    struct peers p;
    open_peers(&p);
    must_work(vpmm_pool_set_access(p.w.pool, PEER, READWRITE));
    must_work(vpmm_pool_set_access(p.w.pool, PEER, CU_MEM_ACCESS_FLAGS_PROT_NONE));
    expect_no_access(&p, take(&p.w, PAGES, p.s));
}

Test(access, of_two_others_one_keeps_it)
{
    struct setup setup = two_devices();
    setup.sim.devices = 3;
    struct peers p;
    open_peers_of(&p, &setup);
    must_work(vpmm_pool_set_access(p.w.pool, 2, READWRITE));
    must_work(vpmm_pool_set_access(p.w.pool, PEER, READWRITE));
    must_work(vpmm_pool_set_access(p.w.pool, 2, CU_MEM_ACCESS_FLAGS_PROT_NONE));
    CUdeviceptr memory = take(&p.w, PAGES, p.s);
    write_by_peer(&p, memory, PAGES);
    give(&p.w, memory, p.s);
    close_peers(&p);
}

Test(access, reading_alone)
{
    struct peers p;
    open_peers(&p);
    must_work(vpmm_pool_set_access(p.w.pool, PEER, CU_MEM_ACCESS_FLAGS_PROT_READ));
    expect_no_access(&p, take(&p.w, PAGES, p.s));
}

/* ---- beside those who build ---- */

static void *give_access(void *peers)
{
    struct peers *p = peers;
    must_work(vpmm_pool_set_access(p->w.pool, PEER, READWRITE));
    return NULL;
}

/*
 * Whether it waits while this thread has the turn: not so also if this thread stood still until it lost its patience.
 */
static bool a_change_waits(struct peers *p)
{
    struct turn *turn = &p->w.pool->arena.turn;
    uint64_t before = vpmm_sim_calls(p->w.sim, "cuMemSetAccess");
    struct turn_place place;
    pthread_t thread;
    bool waits = false;
    turn_take(turn, &place);
    cr_assert_eq(pthread_create(&thread, NULL, give_access, p), 0);
    while (!waits && vpmm_sim_calls(p->w.sim, "cuMemSetAccess") == before)
        waits = turn_waiters(turn) > 0;
    turn_leave(turn, &place);
    pthread_join(thread, NULL);
    return waits;
}

/* Else it would take the driver from one extent to the next, and who builds would wait for all of them. */
Test(access, a_change_takes_turns, .timeout = 60)
{
    struct peers p;
    open_peers(&p);
    CUdeviceptr memory = take(&p.w, PAGES, p.s);
    bool waits = a_change_waits(&p);
    for (int i = 0; i < 100 && !waits; i++) {
        must_work(vpmm_pool_set_access(p.w.pool, PEER, CU_MEM_ACCESS_FLAGS_PROT_NONE));
        waits = a_change_waits(&p);
    }
    cr_expect(waits, "a change does not wait for its turn");
    write_by_peer(&p, memory, PAGES);
    give(&p.w, memory, p.s);
    close_peers(&p);
}

/* ---- beside a build ---- */

static struct {
    const vpmm_driver *driver;
    struct access *access;
    atomic_bool ends;
    unsigned times; /* that the build was overtaken in a call of its own */
} toggled;

static _Thread_local bool builds;

/* Who builds goes on when the rights are others; for the first time they are certain to be, later within a while. */
static CUresult allow_overtaken(CUdeviceptr memory, size_t bytes, const CUmemAccessDesc *rights, size_t count)
{
    enum { LOOKS = 50, FIRST_LOOKS = 20000, ENOUGH = 10 };
    uint32_t version = access_read(toggled.access).version;
    CUresult allowed = toggled.driver->cuMemSetAccess(memory, bytes, rights, count);
    if (!builds || toggled.times == ENOUGH)
        return allowed;
    bool is_overtaken = false;
    for (int i = 0, looks = toggled.times ? LOOKS : FIRST_LOOKS; i < looks && !is_overtaken; i++) {
        clock_sleep_us(1000);
        is_overtaken = access_read(toggled.access).version != version;
    }
    toggled.times += is_overtaken;
    return allowed;
}

static void *toggle(void *peers)
{
    struct peers *p = peers;
    while (!atomic_load(&toggled.ends)) {
        must_work(vpmm_pool_set_access(p->w.pool, PEER, READWRITE));
        must_work(vpmm_pool_set_access(p->w.pool, PEER, CU_MEM_ACCESS_FLAGS_PROT_NONE));
    }
    return NULL;
}

/* The pool is empty, so that a change is made at once. */
Test(access, a_build_is_overtaken_once, .timeout = 60)
{
    struct peers p;
    pthread_t thread;
    open_peers(&p);
    toggled.driver = p.w.driver;
    toggled.access = &p.w.pool->arena.access;
    p.w.pool->device.driver.cuMemSetAccess = allow_overtaken;
    cr_assert_eq(pthread_create(&thread, NULL, toggle, &p), 0);
    builds = true;
    CUdeviceptr memory = take(&p.w, 1, p.s);
    builds = false;
    atomic_store(&toggled.ends, true);
    pthread_join(thread, NULL);
    cr_expect_eq(toggled.times, 1, "a build was overtaken %u times", toggled.times);
    must_work(vpmm_pool_set_access(p.w.pool, PEER, READWRITE));
    write_by_peer(&p, memory, 1);
    give(&p.w, memory, p.s);
    close_peers(&p);
}

/* ---- what is refused ---- */

Test(access, wrong_arguments)
{
    struct peers p;
    open_peers(&p);
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_pool_set_access(NULL, PEER, READWRITE));
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_pool_set_access(p.w.pool, 0, READWRITE));
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_pool_set_access(p.w.pool, 2, READWRITE));
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_pool_set_access(p.w.pool, -1, READWRITE));
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_pool_set_access(p.w.pool, PEER, (CUmemAccess_flags)2));
    close_peers(&p);
}

Test(access, devices_that_are_no_peers)
{
    struct setup setup = two_devices();
    setup.sim.peers = false;
    struct peers p;
    open_peers_of(&p, &setup);
    must_fail(VPMM_ERROR_NOT_SUPPORTED, vpmm_pool_set_access(p.w.pool, PEER, READWRITE));
    give(&p.w, take(&p.w, PAGES, p.s), p.s);
    close_peers(&p);
}

static CUresult CUDAAPI count_many(int *count)
{
    *count = ACCESS_DEVICES + 2;
    return CUDA_SUCCESS;
}

static CUresult CUDAAPI by_ordinal(CUdevice *device, int ordinal)
{
    *device = ordinal;
    return CUDA_SUCCESS;
}

static CUresult CUDAAPI all_are_peers(int *can, CUdevice device, CUdevice peer)
{
    *can = device != peer;
    return CUDA_SUCCESS;
}

/* The simulator has fewer. Nothing is mapped, so the driver is not asked for the rights. */
Test(access, no_more_devices_have_access_than_there_is_room_for)
{
    needs_simulator();
    struct setup setup = setup_default();
    struct world w;
    world_open_without_pool(&w, &setup);
    vpmm_driver table = *w.driver;
    table.cuDeviceGetCount = count_many;
    table.cuDeviceGet = by_ordinal;
    table.cuDeviceCanAccessPeer = all_are_peers;
    setup.pool.driver = &table;
    must_work(vpmm_pool_create(&setup.pool, &w.pool));
    for (int device = 1; device < ACCESS_DEVICES; device++)
        must_work(vpmm_pool_set_access(w.pool, device, CU_MEM_ACCESS_FLAGS_PROT_READ));
    must_fail(VPMM_ERROR_NOT_SUPPORTED, vpmm_pool_set_access(w.pool, ACCESS_DEVICES, CU_MEM_ACCESS_FLAGS_PROT_READ));
    must_work(vpmm_pool_set_access(w.pool, ACCESS_DEVICES, CU_MEM_ACCESS_FLAGS_PROT_NONE));
    must_work(vpmm_pool_set_access(w.pool, 5, CU_MEM_ACCESS_FLAGS_PROT_NONE));
    must_work(vpmm_pool_set_access(w.pool, ACCESS_DEVICES, CU_MEM_ACCESS_FLAGS_PROT_READ));
    world_close(&w);
}

/* What is refused midway, and then cannot be taken back, is not as the pool's list says: the next call sees to it. */
Test(access, a_change_that_cannot_be_taken_back_is_made_by_the_next)
{
    needs_simulator();
    struct setup setup = two_devices();
    setup.pool.extent_size = PAGE;
    struct peers p;
    open_peers_of(&p, &setup);
    CUdeviceptr one = take(&p.w, 1, p.s), two = take(&p.w, 1, p.s);
    vpmm_sim_fail(p.w.sim, "cuMemSetAccess", 2, CUDA_ERROR_OUT_OF_MEMORY, true);
    must_fail(VPMM_ERROR_OUT_OF_MEMORY, vpmm_pool_set_access(p.w.pool, PEER, READWRITE));
    vpmm_sim_fail(p.w.sim, "cuMemSetAccess", 0, CUDA_SUCCESS, false);
    cr_assert(vpmm_sim_access(p.w.sim, PEER, one) || vpmm_sim_access(p.w.sim, PEER, two));
    must_work(vpmm_pool_set_access(p.w.pool, PEER, CU_MEM_ACCESS_FLAGS_PROT_NONE));
    cr_expect_eq(vpmm_sim_access(p.w.sim, PEER, one), CU_MEM_ACCESS_FLAGS_PROT_NONE);
    cr_expect_eq(vpmm_sim_access(p.w.sim, PEER, two), CU_MEM_ACCESS_FLAGS_PROT_NONE);
    give(&p.w, one, p.s);
    give(&p.w, two, p.s);
    close_peers(&p);
}

static const vpmm_driver *below;

/* One way alone. */
static CUresult CUDAAPI the_second_reaches_the_first(int *can, CUdevice device, CUdevice peer)
{
    CUresult result = below->cuDeviceCanAccessPeer(can, device, peer);
    *can = *can && device == PEER;
    return result;
}

static CUresult CUDAAPI the_first_reaches_the_second(int *can, CUdevice device, CUdevice peer)
{
    CUresult result = below->cuDeviceCanAccessPeer(can, device, peer);
    *can = *can && device != PEER;
    return result;
}

/* It is the other device that is to reach the pool's memory. */
Test(access, devices_that_are_peers_one_way)
{
    needs_simulator();
    for (int reached = 0; reached < 2; reached++) {
        struct setup setup = two_devices();
        struct world w;
        vpmm_driver table;
        world_open_without_pool(&w, &setup);
        below = w.driver;
        table = *below;
        table.cuDeviceCanAccessPeer = reached ? the_second_reaches_the_first : the_first_reaches_the_second;
        setup.pool.driver = &table;
        must_work(vpmm_pool_create(&setup.pool, &w.pool));
        if (reached)
            must_work(vpmm_pool_set_access(w.pool, PEER, READWRITE));
        else
            must_fail(VPMM_ERROR_NOT_SUPPORTED, vpmm_pool_set_access(w.pool, PEER, READWRITE));
        world_close(&w);
    }
}

Test(access, pools_with_memory_of_the_driver_s_own)
{
    struct setup setup = two_devices();
    setup.pool.small = VPMM_SMALL_ASYNC;
    struct peers p;
    open_peers_of(&p, &setup);
    must_fail(VPMM_ERROR_NOT_SUPPORTED, vpmm_pool_set_access(p.w.pool, PEER, READWRITE));
    close_peers(&p);
}

/* ---- what fails ---- */

/* Each of the calls in turn: the rights are as before, in memory that is there and in what comes later. */
static void a_refusal_changes_nothing(bool had, bool after)
{
    for (uint64_t nth = 1; nth <= 3; nth++) {
        struct peers p;
        open_peers(&p);
        if (had)
            must_work(vpmm_pool_set_access(p.w.pool, PEER, READWRITE));
        CUdeviceptr memory[3];
        for (int i = 0; i < 3; i++)
            memory[i] = take(&p.w, PAGES, p.s);
        (after ? vpmm_sim_fail_after : vpmm_sim_fail)(p.w.sim, "cuMemSetAccess", nth, CUDA_ERROR_UNKNOWN, false);
        must_fail(VPMM_ERROR_DRIVER,
                  vpmm_pool_set_access(p.w.pool, PEER, had ? CU_MEM_ACCESS_FLAGS_PROT_NONE : READWRITE));
        world_audit(&p.w);
        CUdeviceptr later = take(&p.w, PAGES, p.s);
        if (!had) {
            expect_no_access(&p, nth == 1 ? memory[0] : nth == 2 ? memory[1] : later);
            continue;
        }
        for (int i = 0; i < 3; i++) {
            write_by_peer(&p, memory[i], PAGES);
            give(&p.w, memory[i], p.s);
        }
        write_by_peer(&p, later, PAGES);
        give(&p.w, later, p.s);
        close_peers(&p);
    }
}

Test(access, a_refusal_gives_nothing)
{
    a_refusal_changes_nothing(false, false);
}
Test(access, a_refusal_that_took_effect_gives_nothing)
{
    a_refusal_changes_nothing(false, true);
}
Test(access, a_refusal_takes_nothing_away)
{
    a_refusal_changes_nothing(true, false);
}
Test(access, a_refusal_that_took_effect_takes_nothing_away)
{
    a_refusal_changes_nothing(true, true);
}

Test(access, the_driver_does_not_say_whether_they_are_peers)
{
    struct peers p;
    open_peers(&p);
    vpmm_sim_fail(p.w.sim, "cuDeviceCanAccessPeer", 1, CUDA_ERROR_UNKNOWN, false);
    must_fail(VPMM_ERROR_DRIVER, vpmm_pool_set_access(p.w.pool, PEER, READWRITE));
    must_work(vpmm_pool_set_access(p.w.pool, PEER, READWRITE));
    close_peers(&p);
}
