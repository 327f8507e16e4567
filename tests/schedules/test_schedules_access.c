/*
 * vpmm_pool_set_access beside builds that make memory and move it, and beside passes that unmap and give back, in
 * orders with at most two preemptions, and in random ones (explore.h says how, and how to have more of them or one of
 * them again).
 *
 * After each the other device has the rights of the pool's list to all memory that is live, and no others; it writes
 * there, if it may: the simulator calls it a misuse where a mapping lacks the right, or has it too late.
 */
#include "play.h"

#include "pool/tiers.h"
#include "remap/build.h"
#include "space/fence.h"

enum { PEER = 1 };

static CUcontext peer_context;
static CUstream peer_stream;

static void set_rights(CUmemAccess_flags flags)
{
    vpmm_status status = vpmm_pool_set_access(play.w.pool, PEER, flags);
    explore_check(status == VPMM_SUCCESS, "set_access: %s: %s", vpmm_status_name(status), vpmm_last_error());
}

/* Two pages of which every other one is free, which a build of two moves. */
PLAY(open_two_devices)
{
    play.devices = 2;
    open_world();
    cr_assert_eq(play.w.driver->cuDevicePrimaryCtxRetain(&peer_context, PEER), CUDA_SUCCESS);
    cr_assert_eq(play.w.driver->cuCtxSetCurrent(peer_context), CUDA_SUCCESS);
    cr_assert_eq(play.w.driver->cuStreamCreate(&peer_stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    use_context();
    for (int i = 0; i < 4; i++)
        play.p[i] = get(1, play.s);
}
PLAY(open_scattered)
{
    open_two_devices_now();
    put(play.p[0], play.s);
    put(play.p[2], play.s);
    world_drain(&play.w);
}
PLAY(open_with_rights)
{
    open_scattered_now();
    set_rights(CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
}
PLAY(get_two)
{
    play.p[4 + explore_actor()] = get(2, play.s);
}

/*
 * As a request that has lost its patience with who has the turn: it builds beside the change, which the others wait
 * for.
 */
PLAY(build_two_beside)
{
    struct arena *arena = &inside()->arena;
    struct build_limits limits = {.reach = VIEW_USABLE, .room = DEVICE_ROOM_UNKNOWN, .longest_handle = UINT32_MAX};
    struct stream *stream;
    struct region region;
    enum region_source source;
    must_work(stream_enter(&arena->streams, play.s, &stream));
    vpmm_status status = build_region(arena, stream, 2, &limits, &region, &source);
    explore_check(status == VPMM_SUCCESS, "build: %s: %s", vpmm_status_name(status), vpmm_last_error());
    stats_count(arena->stats, STAT_mallocs);
    tiers_count(arena, source);
    play.p[4 + explore_actor()] = region_hand_out(&arena->space, region, 2, 2 * PAGE);
    stream_finish(&arena->streams, stream);
    own(play.p[4 + explore_actor()], 2 * PAGE, play.s);
}
PLAY(give_rights)
{
    set_rights(CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
}
PLAY(take_rights)
{
    set_rights(CU_MEM_ACCESS_FLAGS_PROT_NONE);
}
PLAY(trim_and_poll)
{
    must_work(vpmm_trim(play.w.pool, 0, NULL));
    poll_pool();
}
PLAY(close_with_peer)
{
    world_step(&play.w);
    cr_assert_eq(play.w.driver->cuStreamSynchronize(play.s), CUDA_SUCCESS);
    struct access_list list = inside()->arena.access.list;
    CUmemAccess_flags flags = list.devices > 1 ? list.device[1].flags : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    cr_assert_eq(play.w.driver->cuCtxSetCurrent(peer_context), CUDA_SUCCESS);
    for (int i = 0; i < OWNED; i++)
        for (size_t at = 0; play.owned[i].at && at < play.owned[i].bytes; at += PAGE)
            explore_check(vpmm_sim_access(play.w.sim, PEER, play.owned[i].at + at) == flags,
                          "the other device's rights are not the list's");
    for (int i = 0; list.devices > 1 && i < OWNED; i++)
        for (size_t at = 0; play.owned[i].at && at < play.owned[i].bytes; at += PAGE)
            cr_assert_eq(play.w.driver->cuMemsetD32Async(play.owned[i].at + at, 5, 1, peer_stream), CUDA_SUCCESS);
    play.w.driver->cuStreamSynchronize(peer_stream);
    explore_check(!vpmm_sim_misuses(play.w.sim), "the other device lacks a right");
    cr_assert_eq(play.w.driver->cuStreamDestroy(peer_stream), CUDA_SUCCESS);
    cr_assert_eq(play.w.driver->cuDevicePrimaryCtxRelease(PEER), CUDA_SUCCESS);
    use_context();
    close_world();
}

SCHEDULES(rights_against_growth)
{
    explore_play(
        "rights, growth", 0,
        (struct exploration){.open = open_two_devices, .close = close_with_peer, .act = {get_two, give_rights}});
}
SCHEDULES(rights_against_moves)
{
    explore_play("rights, moves", 0,
                 (struct exploration){.open = open_scattered, .close = close_with_peer, .act = {get_two, give_rights}});
}
SCHEDULES(rights_against_growth_beside)
{
    explore_play("rights, growth beside", 0,
                 (struct exploration){
                     .open = open_two_devices, .close = close_with_peer, .act = {build_two_beside, give_rights}});
}
SCHEDULES(rights_against_moves_beside)
{
    explore_play(
        "rights, moves beside", 0,
        (struct exploration){.open = open_scattered, .close = close_with_peer, .act = {build_two_beside, give_rights}});
}
SCHEDULES(rights_against_two_builds)
{
    explore_play(
        "rights, two builds", 0,
        (struct exploration){.open = open_scattered, .close = close_with_peer, .act = {get_two, give_rights, get_two}});
}
SCHEDULES(rights_against_a_trim)
{
    explore_play(
        "rights, trim", 0,
        (struct exploration){.open = open_scattered, .close = close_with_peer, .act = {trim_and_poll, give_rights}});
}
SCHEDULES(rights_given_and_taken_beside)
{
    explore_play("rights given, taken, build beside", 0,
                 (struct exploration){.open = open_with_rights,
                                      .close = close_with_peer,
                                      .act = {take_rights, give_rights, build_two_beside}});
}
SCHEDULES(rights_given_and_taken)
{
    explore_play("rights given, taken, build", 0,
                 (struct exploration){
                     .open = open_with_rights, .close = close_with_peer, .act = {take_rights, give_rights, get_two}});
}
