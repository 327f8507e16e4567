/*
 * blocks.c - allocations in slots that all threads share: whoever finds one there frees it, mostly not the thread that
 * made it, often on another stream, and also after the end of its own.
 */
#include "random.h"

/* One in three is of 256 bytes to 4 MiB, each octave as often as the next; the others are whole pages. */
size_t draw_bytes(struct worker *worker)
{
    enum { LONGEST = 16 };
    if (draw(worker, 3) != 0)
        return (1 + draw(worker, one_in(worker, 8) ? LONGEST : 3)) * PAGE;
    size_t octave = (size_t)256 << draw(worker, 14);
    return octave + draw(worker, octave);
}

bool take(size_t bytes, CUstream stream, CUdeviceptr *out)
{
    vpmm_status status = vpmm_malloc(current.pool, bytes, stream, out);
    if (status == VPMM_SUCCESS) {
        atomic_fetch_add(&current.mallocs, 1);
        count(COUNT_mallocs);
    } else if (status == VPMM_ERROR_OUT_OF_MEMORY) {
        count(COUNT_refusals);
    } else {
        failed("vpmm_malloc of %zu bytes answered %s: %s", bytes, vpmm_status_name(status), vpmm_last_error());
    }
    return status == VPMM_SUCCESS;
}

void give(CUdeviceptr pointer, CUstream stream)
{
    vpmm_must(vpmm_free(current.pool, pointer, stream));
    atomic_fetch_add(&current.frees, 1);
    count(COUNT_frees);
}

static void stamp(struct worker *worker, struct block *b, CUstream stream)
{
    b->stamp = ++worker->stamps;
    needs(relaxed(payload_write(current.driver, b->pointer, b->words, b->stamp, stream)));
}

static void expect_stamp(const struct block *b, CUstream stream)
{
    if (b->stamp != 0)
        needs(relaxed(payload_expect(current.driver, b->pointer, b->words, b->stamp, stream, &current.mismatches)));
}

struct block *block_new(struct worker *worker, struct lane *lane)
{
    enum { ONE_STAMP_IN = 3 };
    struct block *b = calloc(1, sizeof *b);
    size_t bytes = draw_bytes(worker);
    if (!b || !take(bytes, lane->stream, &b->pointer)) {
        free(b);
        return NULL;
    }
    b->words = bytes % PAGE == 0 ? bytes / PAGE : 1;
    b->lane = lane;
    b->generation = lane->generation;
    if (one_in(worker, ONE_STAMP_IN))
        stamp(worker, b, lane->stream);
    return b;
}

/* Makes `on` wait for what the block's own stream has done so far. The caller has both lanes. */
static void order(struct worker *worker, const struct block *b, const struct lane *on)
{
    CUevent event = worker->event;
    if (b->generation == b->lane->generation) {
        cuda_must(current.driver->cuEventRecord(event, b->lane->stream));
        count(COUNT_crossings);
    } else {
        event = b->lane->end[b->generation];
        count(COUNT_inherited);
    }
    cuda_must(current.driver->cuStreamWaitEvent(on->stream, event, 0));
}

/*
 * Says that the block's own stream, which looks at the block first, still uses it: no stream waits for another. Before
 * the free the stream may be released, and end. False: the block is the driver's own, or the stream has ended.
 */
static bool use(const struct block *b)
{
    if (b->generation != b->lane->generation)
        return false;
    expect_stamp(b, b->lane->stream);
    vpmm_status status = vpmm_use(current.pool, b->pointer, b->lane->stream);
    if (status == VPMM_ERROR_NOT_SUPPORTED && current.config.small == VPMM_SMALL_ASYNC)
        return false;
    needs_success(status, "vpmm_use");
    count(COUNT_uses);
    return status == VPMM_SUCCESS;
}

bool block_end(struct worker *worker, struct block *b, struct lane *on)
{
    bool both = b->lane != on, used = false;
    if (both && !lane_share(b->lane))
        return false;
    if (both && one_in(worker, 2))
        used = use(b);
    if (!used && (both || b->generation != on->generation))
        order(worker, b, on);
    if (both)
        lane_leave(b->lane);
    if (!used)
        expect_stamp(b, on->stream);
    give(b->pointer, on->stream);
    free(b);
    return true;
}

static struct block *exchange(_Atomic(struct block *) *slot, struct block *b)
{
    return atomic_exchange_explicit(slot, b, memory_order_acq_rel);
}

/* Back into any slot that is empty. There are fewer blocks than slots, so one is found in the end. */
static void put_back(struct worker *worker, struct block *b)
{
    while (b)
        b = exchange(&current.slot[draw(worker, SLOTS)], b);
}

/* Mostly on its own lane: that is what fills front caches. */
static struct lane *lane_for(struct worker *worker, const struct block *b)
{
    struct lane *own = one_in(worker, 6) ? NULL : lane_share(b->lane);
    return own ? own : lane_share_any(worker);
}

static void end_somewhere(struct worker *worker, struct block *b)
{
    struct lane *lane = lane_for(worker, b);
    bool ended = lane && block_end(worker, b, lane);
    if (lane)
        lane_leave(lane);
    if (!ended)
        put_back(worker, b);
}

void operation_exchange(struct worker *worker)
{
    _Atomic(struct block *) *slot = &current.slot[draw(worker, SLOTS)];
    struct block *b = exchange(slot, NULL);
    struct lane *lane = b ? NULL : lane_share_any(worker);
    if (lane) {
        b = exchange(slot, block_new(worker, lane));
        lane_leave(lane);
    }
    if (b)
        end_somewhere(worker, b);
}

/* Every thread has ended: no lane is anyone's. */
void blocks_end(struct worker *worker)
{
    for (int i = 0; i < SLOTS; i++) {
        struct block *b = exchange(&current.slot[i], NULL);
        struct lane *on = &current.lane[draw(worker, LANES)];
        if (b)
            needs(block_end(worker, b, on));
    }
}
