/*
 * The capture gate: calls with other streams, and with none, that mark a stream from inside, against a capture that
 * begins and ends there, against the stream's release, and against its own calls, in orders with at most two
 * preemptions, and in random ones (explore.h says how, and how to have more of them or one of them again).
 *
 * The program's gate is the one that vpmm.h has in steps. Whenever the library touches s with the driver, its call was
 * given s or is inside, no capture begins or ends there, and s is there.
 */
#include "play.h"

#include "base/clock.h"

static struct {
    _Atomic(uint32_t) inside, shut;
    uint64_t entered;
    bool changes; /* the driver is at the beginning or the end of a capture on s */
    bool is_gone; /* s */
    bool given[EXPLORE_ACTORS], has_entered[EXPLORE_ACTORS];
    char place; /* of schedule points */
} gate;

static uint64_t entered_at_all;

/* ---- the program's gate ---- */

static bool enter(void *data, CUstream stream)
{
    (void)data;
    explore_check(stream != play.s || !gate.is_gone, "the gate of a stream that is gone");
    fetch_add_sc_u32(&gate.inside, 1);
    if (load_sc_u32(&gate.shut)) {
        fetch_add_sc_u32(&gate.inside, UINT32_MAX);
        return false;
    }
    gate.entered++;
    if (explore_actor() >= 0)
        gate.has_entered[explore_actor()] = true;
    return true;
}

static void leave(void *data, CUstream stream)
{
    (void)data, (void)stream;
    if (explore_actor() >= 0)
        gate.has_entered[explore_actor()] = false;
    fetch_add_sc_u32(&gate.inside, UINT32_MAX);
}

static void shut(void)
{
    fetch_add_sc_u32(&gate.shut, 1);
    while (load_sc_u32(&gate.inside))
        clock_yield();
}

static void open_again(void)
{
    fetch_add_sc_u32(&gate.shut, UINT32_MAX);
}

/* ---- the driver's calls ---- */

/* The library's with a stream, as it begins and as it ends. */
static void look_at(CUstream stream)
{
    int actor = explore_actor();
    if (stream != play.s || actor < 0)
        return;
    vpmm_schedule_point(&gate.place, true);
    explore_check(gate.given[actor] || gate.has_entered[actor], "s is touched from outside");
    explore_check(!gate.changes, "s is touched as a capture begins or ends");
    explore_check(!gate.is_gone, "s is touched when it is gone");
}

static CUgraph change(bool begins)
{
    CUgraph graph = NULL;
    shut();
    gate.changes = true;
    vpmm_schedule_point(&gate.place, true);
    CUresult result = begins ? play.w.driver->cuStreamBeginCapture(play.s, CU_STREAM_CAPTURE_MODE_GLOBAL)
                             : play.w.driver->cuStreamEndCapture(play.s, &graph);
    vpmm_schedule_point(&gate.place, true);
    gate.changes = false;
    open_again();
    explore_check(result == CUDA_SUCCESS, "the capture is lost");
    return graph;
}

/* ---- what actors do ---- */

static void open_gated(void)
{
    memset(&gate, 0, sizeof gate);
    play.captures = true;
    play.capture_gate = (vpmm_capture_gate){enter, leave, NULL};
    play.look_at_stream = look_at;
    open_world();
}

/* In caches of s and of t lies what nobody has marked. */
PLAY(open_left_behind)
{
    open_gated();
    CUdeviceptr a = get(2, play.s), b = get(2, play.t);
    put(a, play.s);
    put(b, play.t);
    gate.entered = 0;
}
PLAY(get_long)
{
    get(5, play.t);
}
PLAY(poll_twice)
{
    poll_pool();
    poll_pool();
}
PLAY(capture)
{
    change(true);
    vpmm_schedule_point(&gate.place, true);
    CUgraph graph = change(false);
    if (graph)
        play.w.driver->cuGraphDestroy(graph);
}
PLAY(release_and_destroy)
{
    gate.given[explore_actor()] = true;
    release(play.s);
    gate.given[explore_actor()] = false;
    vpmm_schedule_point(&gate.place, true);
    gate.is_gone = true;
    world_stream_destroy(&play.w, play.s);
}
PLAY(close_gated)
{
    entered_at_all += gate.entered;
    explore_check(!load_sc_u32(&gate.inside), "somebody is in the gate");
    close_world();
}

SCHEDULES(a_capture_against_a_request)
{
    explore_play("capture, malloc", CACHE_PAGES,
                 (struct exploration){.open = open_left_behind, .close = close_gated, .act = {get_long, capture}});
    cr_expect_gt(entered_at_all, 0);
}
SCHEDULES(a_capture_against_a_request_and_passes)
{
    explore_play(
        "capture, malloc, poll", CACHE_PAGES,
        (struct exploration){.open = open_left_behind, .close = close_gated, .act = {get_long, capture, poll_twice}});
    cr_expect_gt(entered_at_all, 0);
}
SCHEDULES(a_release_against_a_request)
{
    explore_play(
        "release, malloc", CACHE_PAGES,
        (struct exploration){.open = open_left_behind, .close = close_gated, .act = {get_long, release_and_destroy}});
    cr_expect_gt(entered_at_all, 0);
}

/* ---- a stream's own calls leave nothing unmarked ---- */

static int marks; /* that are outstanding, of STREAM_MARKS places */

PLAY(open_marked)
{
    open_gated();
    for (int i = 0; i < marks; i++)
        put(get(1, play.s), play.s);
    play.p[0] = get(1, play.s);
    play.p[1] = get(1, play.s);
    put(get(1, play.t), play.t);
    put(play.p[1], play.s);
}
PLAY(put_one)
{
    gate.given[explore_actor()] = true;
    put(play.p[0], play.s);
    gate.given[explore_actor()] = false;
}
PLAY(close_marked)
{
    const struct streams *streams = &inside()->arena.streams;
    for (uint32_t slot = 1; slot < atomic_load(&streams->slots); slot++) {
        const struct stream *stream = stream_at(streams, slot);
        explore_check(stream->handle != play.s || atomic_load(&stream->recorded) == atomic_load(&stream->published),
                      "of s %llu are published, %llu marked", (unsigned long long)atomic_load(&stream->published),
                      (unsigned long long)atomic_load(&stream->recorded));
    }
    close_gated_now();
}

static void free_beside_request(const char *name, int outstanding)
{
    marks = outstanding;
    explore_play(name, 0, (struct exploration){.open = open_marked, .close = close_marked, .act = {get_long, put_one}});
    cr_expect_gt(entered_at_all, 0);
}

SCHEDULES(a_free_against_a_request_in_the_gate)
{
    free_beside_request("free, malloc", 3);
}
SCHEDULES(a_free_against_a_request_in_the_gate_with_every_place_taken)
{
    free_beside_request("free, malloc, places taken", STREAM_MARKS + 6);
}
