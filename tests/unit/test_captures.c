/*
 * The preload's gate, by one thread: what another one would see at each yield of a thread that begins a capture, and
 * before it counts itself or a capture. Several threads are tsan_captures's.
 */
#include <criterion/criterion.h>

#include <sched.h>
#include <stdatomic.h>

static void before_count(void);

/* The source itself, since nothing else comes between two of its atomic operations. */
#undef atomic_fetch_add
#define atomic_fetch_add(at, count) (before_count(), atomic_fetch_add_explicit(at, count, memory_order_seq_cst))
#include "../../lib/preload/captures.c"

static struct {
    bool is_inside;      /* one who has come in before the capture began */
    int lets_in, yields; /* who comes while the capture waits, and how often it has looked */
    bool begins;         /* before the next count */
    bool is_begun;
} seen;

static void before_count(void)
{
    if (!seen.begins)
        return;
    seen.begins = false;
    cr_assert_eq(preload_begin_capture(NULL, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
}

/* ---- the driver, and the system ---- */

static CUresult CUDAAPI begin(CUstream stream, CUstreamCaptureMode mode)
{
    (void)stream, (void)mode;
    cr_expect_not(seen.is_inside, "the capture begins beside a thread inside");
    seen.is_begun = true;
    return CUDA_SUCCESS;
}

static CUresult CUDAAPI end(CUstream stream, CUgraph *graph)
{
    (void)stream, (void)graph;
    seen.is_begun = false;
    return CUDA_SUCCESS;
}

static CUresult CUDAAPI say_status(CUstream stream, CUstreamCaptureStatus *status)
{
    (void)stream;
    *status = seen.is_begun ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

const struct real *real_entries(void)
{
    static const struct real real = {.begin_capture = begin, .end_capture = end, .is_capturing = say_status};
    return &real;
}

static bool comes_in(void)
{
    return captures_gate.enter(captures_gate.data, NULL);
}

static void goes_out(void)
{
    captures_gate.leave(captures_gate.data, NULL);
}

int __real_sched_yield(void);
int __wrap_sched_yield(void);

/* While the capture waits another thread comes, and then who was inside goes out. */
int __wrap_sched_yield(void)
{
    if (!seen.is_inside)
        return __real_sched_yield();
    seen.yields++;
    if (comes_in()) {
        seen.lets_in++;
        goes_out();
    }
    seen.is_inside = false;
    goes_out();
    return 0;
}

/* ---- a capture that waits for who is inside ---- */

/* Else it would wait for as long as others come, or begin beside one of them. */
Test(captures, nobody_comes_in_while_a_capture_waits_to_begin, .timeout = 20)
{
    CUgraph graph;
    seen.is_inside = comes_in();
    cr_assert(seen.is_inside);
    cr_assert_eq(preload_begin_capture(NULL, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    cr_expect_eq(seen.yields, 1, "it waited %d times for one who was inside", seen.yields);
    cr_expect_eq(seen.lets_in, 0, "another came in meanwhile");
    cr_expect_not(comes_in(), "somebody comes in beside a capture");
    cr_assert_eq(preload_end_capture(NULL, &graph), CUDA_SUCCESS);
    cr_expect(comes_in(), "nobody comes in after a capture");
    goes_out();
}

/* ---- a capture that begins as another thread comes in ---- */

Test(captures, who_has_looked_and_not_counted_itself_stays_outside, .timeout = 20)
{
    CUgraph graph;
    seen.begins = true;
    cr_expect_not(comes_in(), "it came in beside a capture that began meanwhile");
    cr_assert(seen.is_begun);
    cr_assert_eq(preload_end_capture(NULL, &graph), CUDA_SUCCESS);
    cr_expect(comes_in(), "nobody comes in after a capture");
    goes_out();
}
