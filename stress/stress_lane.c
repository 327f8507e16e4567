/*
 * stress_lane.c - a thread's life: it makes streams, does the steps of its pattern, and gives everything back.
 */
#define _GNU_SOURCE 1

#include "stress.h"

#include <stdlib.h>
#include <string.h>

enum {
    CROSS = 8,           /* of so many frees, one is on another stream than the last use */
    USE = 16,            /* of so many, one is of what another stream still reads */
    RENEW = 512,         /* of so many steps, one destroys a stream and makes another */
    LATE = 64,           /* of so many fills, one begins late, */
    LATE_MOST_US = 300,  /* by up to so much */
    BEHIND_STEPS = 64,   /* a stream may be IN_FLIGHT times so many mallocs behind the thread */
    RELEASE = 2,         /* of so many threads, one releases its default stream before it ends */
    INHERITED = 4,       /* of so many allocations that a dying thread has, it gives one away */
    FLIP = 500,          /* PLANT_BIT: of so many fills, one */
    REWRITE = 4,         /* of so many that are taken, one is written anew */
    LARGE_PART = 128,    /* what is such a part of a thread's budget, or more, is freed at once */
    SINGLY = 4,          /* of so many threads, one has batches of one: its next malloc finds what it has just freed */
    FREE_TRIES = 100000, /* while planned faults refuse */
};

static void bump(lane *l, enum count which)
{
    uint64_t now = atomic_load_explicit(&l->count[which], memory_order_relaxed);
    atomic_store_explicit(&l->count[which], now + 1, memory_order_relaxed);
}

/* The nanoseconds since `begin`. */
static uint64_t spend(lane *l, enum spend which, uint64_t begin)
{
    uint64_t ns = now_ns() - begin, spent = atomic_load_explicit(&l->spent_ns[which], memory_order_relaxed);
    atomic_store_explicit(&l->spent_ns[which], spent + ns, memory_order_relaxed);
    return ns;
}

static bool goes_on(const lane *l)
{
    return atomic_load_explicit(&l->run->outcome, memory_order_relaxed) == PASSED;
}

static uint64_t draw(lane *l, uint64_t bound)
{
    return random_below(&l->random, bound);
}

static const vpmm_driver *driver_of(const lane *l)
{
    return l->run->gpu.driver;
}

static bool ok(lane *l, const char *what, CUresult result)
{
    return run_cuda_ok(l->run, what, result);
}

/* ---- streams ---- */

static CUstream stream_at(const lane *l, unsigned index)
{
    return index < l->owns ? l->own[index] : l->run->shared[index - l->owns];
}

static unsigned streams_of(const lane *l)
{
    return l->owns + l->run->shareds;
}

static bool record(lane *l, CUevent event, CUstream stream)
{
    uint64_t begin = now_ns();
    CUresult result = driver_of(l)->cuEventRecord(event, stream);
    spend(l, SPEND_order, begin);
    return ok(l, "cuEventRecord", result);
}

static bool wait_on_device(lane *l, CUstream stream, CUevent event)
{
    uint64_t begin = now_ns();
    CUresult result = driver_of(l)->cuStreamWaitEvent(stream, event, 0);
    spend(l, SPEND_order, begin);
    return ok(l, "cuStreamWaitEvent", result);
}

/* What is queued on `to` from now on comes after what is queued on `from`. */
static bool order(lane *l, CUstream from, CUstream to)
{
    return from == to || (record(l, l->order, from) && wait_on_device(l, to, l->order));
}

static bool make_stream(lane *l, CUstream *stream)
{
    uint64_t begin = now_ns();
    CUresult result = driver_of(l)->cuStreamCreate(stream, CU_STREAM_NON_BLOCKING);
    spend(l, SPEND_stream, begin);
    bump(l, COUNT_streams);
    return ok(l, "cuStreamCreate", result);
}

/* A planned fault may refuse a release as often as it likes; the stream is as it was. */
static bool release_stream(lane *l, CUstream stream)
{
    run *r = l->run;
    for (unsigned tries = 0; r->target.pool != NULL && tries < FREE_TRIES; tries++) {
        host_memory_enter();
        vpmm_status status = vpmm_stream_release(r->target.pool, stream);
        host_memory_leave();
        if (status == VPMM_SUCCESS)
            return true;
        if (!r->options->faults || (status != VPMM_ERROR_DRIVER && status != VPMM_ERROR_HOST_MEMORY)) {
            run_end(r, status == VPMM_ERROR_DRIVER ? DEVICE_ERROR : FAILED, "vpmm_stream_release: %s",
                    vpmm_last_error());
            return false;
        }
        bump(l, COUNT_faulted);
    }
    if (r->target.pool != NULL)
        run_end(r, FAILED, "vpmm_stream_release was refused %d times: %s", FREE_TRIES, vpmm_last_error());
    return r->target.pool == NULL;
}

static bool destroy_stream(lane *l, CUstream *stream)
{
    CUstream gone = *stream;
    uint64_t begin = now_ns();
    *stream = NULL;
    bool good =
        gone == NULL || (release_stream(l, gone) && ok(l, "cuStreamDestroy", driver_of(l)->cuStreamDestroy(gone)));
    spend(l, SPEND_stream, begin);
    return good;
}

static bool wait_for_stream(lane *l, CUstream stream)
{
    uint64_t begin = now_ns();
    CUresult result = driver_of(l)->cuStreamSynchronize(stream);
    spend(l, SPEND_wait, begin);
    return ok(l, "cuStreamSynchronize", result);
}

static bool wait_for_event(lane *l, CUevent event)
{
    uint64_t begin = now_ns();
    CUresult result = driver_of(l)->cuEventSynchronize(event);
    spend(l, SPEND_wait, begin);
    return ok(l, "cuEventSynchronize", result);
}

/* The thread waits until its stream is no more than IN_FLIGHT times BEHIND_STEPS mallocs behind. */
static bool keep_up(lane *l)
{
    if (++l->since_behind < BEHIND_STEPS)
        return true;
    l->since_behind = 0;
    CUevent event = l->behind[l->nth_behind++ % IN_FLIGHT];
    return (l->nth_behind <= IN_FLIGHT || wait_for_event(l, event)) && record(l, event, stream_at(l, l->current));
}

/* ---- numbers ---- */

static unsigned bucket_of(uint64_t ns)
{
    if (ns < 8)
        return (unsigned)ns;
    unsigned log = 63 - (unsigned)__builtin_clzll(ns);
    return (log - 2) * 8 + (unsigned)(ns >> (log - 3) & 7);
}

static void note_latency(latency *latency, uint64_t ns)
{
    _Atomic(uint64_t) *count = &latency->count[bucket_of(ns)];
    atomic_store_explicit(count, atomic_load_explicit(count, memory_order_relaxed) + 1, memory_order_relaxed);
    if (ns > atomic_load_explicit(&latency->longest_ns, memory_order_relaxed))
        atomic_store_explicit(&latency->longest_ns, ns, memory_order_relaxed);
}

/* Rarely the longest so far: the lock is seldom taken. */
static void note_longest(lane *l, enum answer answer, uint64_t ns, size_t bytes, uint64_t begin, uint64_t changes)
{
    run *r = l->run;
    longest *longest = &r->longest[answer];
    bool lowered = changes % 2 != 0 || atomic_load(&r->cap_changes) != changes;
    if (ns <= atomic_load_explicit(&longest->ns, memory_order_relaxed))
        return;
    pthread_mutex_lock(&r->longest_lock);
    if (ns > atomic_load(&longest->ns)) {
        longest->bytes = bytes;
        longest->cap = lowered ? atomic_load(&r->lower_cap) : r->cap;
        longest->lowered = lowered;
        longest->pattern = l->sequence.pattern->name;
        longest->thread = l->index;
        longest->beside = disturbances_since(begin);
        longest->at = (double)begin / 1e9 - r->begun;
        atomic_store(&longest->ns, ns);
    }
    pthread_mutex_unlock(&r->longest_lock);
}

static size_t rounded(const run *r, size_t bytes)
{
    size_t unit = bytes < r->page_size ? 256 : r->page_size;
    return (bytes + unit - 1) / unit * unit;
}

static void note_live(run *r, size_t bytes)
{
    uint64_t live = atomic_fetch_add_explicit(&r->live, bytes, memory_order_relaxed) + bytes;
    uint64_t peak = atomic_load_explicit(&r->peak_live, memory_order_relaxed);
    while (live > peak && !atomic_compare_exchange_weak_explicit(&r->peak_live, &peak, live, memory_order_relaxed,
                                                                 memory_order_relaxed))
        ;
}

static void remember(lane *l, const block *b, CUstream stream)
{
    l->history[l->remembered++ % HISTORY] = (struct used){*b, stream};
}

/* ---- memory ---- */

/* False: there is none, which may be, or the run has ended. */
static bool allocate(lane *l, size_t bytes, CUstream stream, CUdeviceptr *address)
{
    run *r = l->run;
    vpmm_status status = VPMM_SUCCESS;
    CUresult result = CUDA_SUCCESS;
    uint64_t changes = atomic_load_explicit(&r->cap_changes, memory_order_relaxed), begin = now_ns();
    if (r->target.pool != NULL) {
        host_memory_enter();
        status = vpmm_malloc(r->target.pool, bytes, stream, address);
        host_memory_leave();
    } else {
        result = r->gpu.driver->cuMemAllocFromPoolAsync(address, bytes, r->target.memory_pool, stream);
    }
    uint64_t ns = spend(l, SPEND_malloc, begin);
    note_latency(&l->latency, ns);
    if (status == VPMM_SUCCESS && result == CUDA_SUCCESS) {
        note_longest(l, SERVED, ns, bytes, begin, changes);
        if (*address == 0 || *address % 256 != 0)
            run_end(r, FAILED, "a malloc of %zu bytes gave the address 0x%llx", bytes, (unsigned long long)*address);
        bump(l, COUNT_mallocs);
        if (stream == NULL || stream == CU_STREAM_PER_THREAD)
            bump(l, stream == NULL ? COUNT_on_default : COUNT_on_own_default);
        note_live(r, rounded(r, bytes));
        return true;
    }
    if (status == VPMM_ERROR_OUT_OF_MEMORY || result == CUDA_ERROR_OUT_OF_MEMORY) {
        note_longest(l, REFUSED, ns, bytes, begin, changes);
        bump(l, COUNT_refused);
    } else if (r->options->faults && (status == VPMM_ERROR_DRIVER || status == VPMM_ERROR_HOST_MEMORY))
        bump(l, COUNT_faulted);
    else if (status == VPMM_ERROR_DRIVER)
        run_end(r, DEVICE_ERROR, "vpmm_malloc: %s", vpmm_last_error());
    else if (status != VPMM_SUCCESS)
        run_end(r, FAILED, "vpmm_malloc: %s", vpmm_last_error());
    else
        ok(l, "cuMemAllocFromPoolAsync", result);
    return false;
}

/* vpmm_free or vpmm_use. A planned fault may refuse it as often as it likes; the allocation is as it was. */
static vpmm_status call_of_block(lane *l, vpmm_status (*call)(vpmm_pool *, CUdeviceptr, CUstream), const block *b,
                                 CUstream stream)
{
    run *r = l->run;
    vpmm_status status = VPMM_SUCCESS;
    for (unsigned tries = 0; tries < FREE_TRIES; tries++) {
        host_memory_enter();
        status = call(r->target.pool, b->address, stream);
        host_memory_leave();
        if (!r->options->faults || (status != VPMM_ERROR_DRIVER && status != VPMM_ERROR_HOST_MEMORY))
            break;
        bump(l, COUNT_faulted);
    }
    return status;
}

static bool is_success(lane *l, const char *name, const block *b, vpmm_status status)
{
    if (status != VPMM_SUCCESS)
        run_end(l->run, status == VPMM_ERROR_DRIVER ? DEVICE_ERROR : FAILED, "%s of 0x%llx, %zu bytes: %s", name,
                (unsigned long long)b->address, b->bytes, vpmm_last_error());
    return status == VPMM_SUCCESS;
}

static bool give_back(lane *l, const block *b, CUstream stream)
{
    run *r = l->run;
    if (r->target.pool == NULL)
        return ok(l, "cuMemFreeAsync", r->gpu.driver->cuMemFreeAsync(b->address, stream));
    return is_success(l, "vpmm_free", b, call_of_block(l, vpmm_free, b, stream));
}

/* For the program's own test: as if a bit of the memory did not hold. */
static bool flip_bit(lane *l, const block *b, CUstream stream)
{
    uint32_t word = memory_word(b->number, b->generation, 0) ^ 1U << draw(l, 32);
    return ok(l, "cuMemsetD32Async", driver_of(l)->cuMemsetD32Async(b->address, word, 1, stream));
}

/* ---- batches: several fills, or ends, in one launch ---- */

static bool flush_fills(lane *l)
{
    struct batch *f = &l->fills;
    unsigned n = f->n;
    bool good = true;
    if (n == 0)
        return true;
    uint64_t begin = now_ns();
    f->n = 0;
    if (draw(l, LATE) == 0)
        good = ok(l, "the delay", probe_delay(l->probe, (unsigned)draw(l, LATE_MOST_US), f->stream));
    good = good && ok(l, "the fill", probe_fill(l->probe, f->block, n, f->stream));
    spend(l, SPEND_launch, begin);
    for (unsigned i = 0; i < n && good && l->run->options->plant == PLANT_BIT; i++)
        good = f->block[i].bytes < 4 || draw(l, FLIP) != 0 || flip_bit(l, &f->block[i], f->stream);
    return good;
}

static bool check(lane *l, const block *b, unsigned n, CUstream stream)
{
    uint64_t begin = now_ns();
    CUresult result = probe_check(l->probe, b, n, stream);
    spend(l, SPEND_launch, begin);
    return ok(l, "the check", result);
}

/* Checked, then freed. What is not filled yet comes before. */
static bool flush_ends(lane *l)
{
    struct batch *e = &l->ends;
    unsigned n = e->n;
    if (n == 0)
        return true;
    e->n = 0;
    bool good = flush_fills(l) && check(l, e->block, n, e->stream);
    uint64_t begin = now_ns();
    for (unsigned i = 0; i < n && good; i++) {
        atomic_fetch_sub_explicit(&l->run->live, rounded(l->run, e->block[i].bytes), memory_order_relaxed);
        bump(l, COUNT_frees);
        good = give_back(l, &e->block[i], e->stream);
    }
    spend(l, SPEND_free, begin);
    return good;
}

static bool flush(lane *l)
{
    return flush_fills(l) && flush_ends(l);
}

static bool fill(lane *l, const block *b, CUstream stream)
{
    struct batch *f = &l->fills;
    remember(l, b, stream);
    if (f->n != 0 && f->stream != stream && !flush_fills(l))
        return false;
    f->stream = stream;
    f->block[f->n++] = *b;
    return f->n < l->most || flush_fills(l);
}

/* Later, with others; but what is large at once, or the thread would hold more than its share. */
static bool end_block(lane *l, const block *b, CUstream stream)
{
    struct batch *e = &l->ends;
    if (e->n != 0 && e->stream != stream && !flush_ends(l))
        return false;
    e->stream = stream;
    e->block[e->n++] = *b;
    return (e->n < l->most && b->bytes < l->sequence.budget / LARGE_PART) || flush_ends(l);
}

/* One of its own goes, and what was used on it is used on its heir. */
static bool renew_stream(lane *l)
{
    CUstream *place = &l->own[draw(l, l->owns)], old = *place;
    if (!flush(l) || !make_stream(l, place))
        return false;
    return order(l, old, *place) && destroy_stream(l, &old);
}

/* ---- the exchange ---- */

/* False: it has no room. */
static bool exchange_put(run *r, const struct parcel *p)
{
    struct exchange *e = &r->exchange;
    pthread_mutex_lock(&e->lock);
    bool fits = e->count < PARCELS && e->bytes + p->block.bytes <= r->cap / 16;
    if (fits) {
        e->parcel[(e->first + e->count++) % PARCELS] = *p;
        e->bytes += p->block.bytes;
    }
    pthread_mutex_unlock(&e->lock);
    return fits;
}

static bool exchange_get(run *r, struct parcel *p)
{
    struct exchange *e = &r->exchange;
    pthread_mutex_lock(&e->lock);
    bool any = e->count != 0;
    if (any) {
        *p = e->parcel[e->first];
        e->first = (e->first + 1) % PARCELS;
        e->count--;
        e->bytes -= p->block.bytes;
    }
    pthread_mutex_unlock(&e->lock);
    return any;
}

/* An event for a parcel: a spare one, or a new one. */
static bool take_event(lane *l, CUevent *event)
{
    struct exchange *e = &l->run->exchange;
    pthread_mutex_lock(&e->lock);
    bool any = e->spares != 0;
    if (any)
        *event = e->spare[--e->spares];
    pthread_mutex_unlock(&e->lock);
    return any || ok(l, "cuEventCreate", driver_of(l)->cuEventCreate(event, CU_EVENT_DISABLE_TIMING));
}

/* A wait that was queued for it keeps what it needs. */
static bool return_event(lane *l, CUevent event)
{
    struct exchange *e = &l->run->exchange;
    pthread_mutex_lock(&e->lock);
    bool fits = e->spares < PARCELS;
    if (fits)
        e->spare[e->spares++] = event;
    pthread_mutex_unlock(&e->lock);
    return fits || ok(l, "cuEventDestroy", driver_of(l)->cuEventDestroy(event));
}

/* ---- steps ---- */

static bool do_malloc(lane *l, unsigned slot, size_t bytes)
{
    struct held *held = &l->held[slot];
    unsigned at = l->current;
    CUdeviceptr address;
    if (!allocate(l, bytes, stream_at(l, at), &address))
        return goes_on(l);
    held->stream = at;
    held->block = (block){
        .address = address,
        .bytes = bytes,
        .number = ((uint64_t)l->index << 48) + ++l->number,
    };
    return fill(l, &held->block, stream_at(l, at));
}

static CUstream any_stream(lane *l)
{
    return stream_at(l, (unsigned)draw(l, streams_of(l)));
}

/*
 * Another stream checks it as well. The one that the free names does not wait for that: vpmm_use says so. It has to
 * where the memory is of the driver's pool.
 */
static bool use_elsewhere(lane *l, const block *b, CUstream last)
{
    CUstream other = any_stream(l);
    if (l->run->target.pool == NULL || other == last)
        return true;
    if (!flush_fills(l) || !order(l, last, other) || !check(l, b, 1, other))
        return false;
    vpmm_status status = call_of_block(l, vpmm_use, b, other);
    if (status == VPMM_ERROR_NOT_SUPPORTED)
        return order(l, other, last);
    if (!is_success(l, "vpmm_use", b, status))
        return false;
    bump(l, COUNT_used);
    return true;
}

/* The free names another stream, which waits for the last use. */
static bool cross(lane *l, CUstream last, CUstream *stream)
{
    *stream = any_stream(l);
    if (*stream == last)
        return true;
    bump(l, COUNT_crossed);
    return flush_fills(l) && order(l, last, *stream);
}

static bool do_free(lane *l, unsigned slot)
{
    struct held *held = &l->held[slot];
    if (held->block.address == 0)
        return true; /* the malloc was refused */
    CUstream last = stream_at(l, held->stream), stream = last;
    block b = held->block;
    held->block.address = 0;
    return (draw(l, USE) != 0 || use_elsewhere(l, &b, last)) && (draw(l, CROSS) != 0 || cross(l, last, &stream)) &&
           end_block(l, &b, stream);
}

static bool do_give(lane *l, unsigned slot)
{
    struct held *held = &l->held[slot];
    if (held->block.address == 0)
        return true;
    struct parcel p = {.block = held->block};
    if (!flush_fills(l) || !take_event(l, &p.ready) || !record(l, p.ready, stream_at(l, held->stream)))
        return false;
    if (!exchange_put(l->run, &p))
        return return_event(l, p.ready) && do_free(l, slot);
    held->block.address = 0;
    bump(l, COUNT_given);
    return true;
}

/* What another thread gave is checked here, sometimes written anew, and freed. */
static bool do_take(lane *l)
{
    struct parcel p;
    if (!exchange_get(l->run, &p))
        return true;
    CUstream stream = stream_at(l, l->current);
    bump(l, COUNT_taken);
    bool good = wait_on_device(l, stream, p.ready) && return_event(l, p.ready);
    if (good && draw(l, REWRITE) == 0) {
        good = check(l, &p.block, 1, stream);
        p.block.generation++;
        good = good && fill(l, &p.block, stream);
    }
    return good && end_block(l, &p.block, stream);
}

static bool do_step(lane *l, const step *s)
{
    bump(l, COUNT_steps);
    if (draw(l, RENEW) == 0 && !renew_stream(l))
        return false;
    switch (s->kind) {
    case STEP_MALLOC:
        return do_malloc(l, s->slot, s->bytes) && keep_up(l);
    case STEP_FREE:
        return do_free(l, s->slot);
    case STEP_GIVE:
        return do_give(l, s->slot);
    case STEP_TAKE:
        return do_take(l) && keep_up(l);
    case STEP_STREAM:
        l->current = (l->current + 1) % streams_of(l);
        return true;
    }
    return false;
}

/* ---- a life ---- */

static bool be_born(lane *l)
{
    run *r = l->run;
    bool good = ok(l, "cuCtxSetCurrent", driver_of(l)->cuCtxSetCurrent(r->gpu.context));
    l->owns = r->owns;
    l->current = 0;
    l->most = draw(l, SINGLY) == 0 ? 1 : PROBE_BLOCKS;
    l->since_behind = l->nth_behind = 0;
    for (unsigned i = 0; good && i < l->owns; i++)
        good = make_stream(l, &l->own[i]);
    const vpmm_driver *driver = driver_of(l);
    good = good && ok(l, "cuEventCreate", driver->cuEventCreate(&l->order, CU_EVENT_DISABLE_TIMING));
    for (unsigned i = 0; good && i < IN_FLIGHT; i++)
        good = ok(l, "cuEventCreate", driver->cuEventCreate(&l->behind[i], CU_EVENT_DISABLE_TIMING));
    return good;
}

static void die(lane *l, bool good)
{
    for (unsigned slot = 0; slot < SEQUENCE_SLOTS && good; slot++)
        good = draw(l, INHERITED) == 0 ? do_give(l, slot) : do_free(l, slot);
    good = good && flush(l);
    for (unsigned i = 0; i < l->owns && good; i++)
        good = wait_for_stream(l, l->own[i]) && destroy_stream(l, &l->own[i]);
    for (unsigned i = 0; i < l->run->shareds && good; i++) /* its checks are over when it is gone */
        good = wait_for_stream(l, l->run->shared[i]);
    if (good && l->run->shareds > 0 && draw(l, RELEASE) == 0)
        release_stream(l, CU_STREAM_PER_THREAD);
    if (l->order)
        driver_of(l)->cuEventDestroy(l->order);
    for (unsigned i = 0; i < IN_FLIGHT; i++)
        if (l->behind[i])
            driver_of(l)->cuEventDestroy(l->behind[i]);
    l->order = NULL;
    memset(l->behind, 0, sizeof l->behind);
}

/* Patterns in turn, begun at another one in each lane. */
static const pattern *next_pattern(const lane *l)
{
    uint32_t allowed = l->run->options->patterns;
    uint64_t nth = (l->index + l->born) % (unsigned)__builtin_popcount(allowed);
    while (nth-- > 0)
        allowed &= allowed - 1;
    return &patterns[__builtin_ctz(allowed)];
}

static void begin_sequence(lane *l)
{
    const run *r = l->run;
    uint64_t seed = r->options->seed ^ ((uint64_t)l->index << 32 | l->born) * UINT64_C(0xD1342543DE82EF95);
    size_t budget = r->cap / 100 * 85 / r->options->threads;
    sequence_begin(&l->sequence, next_pattern(l), random_next(&seed), budget);
    l->random = random_next(&seed);
}

void *lane_main(void *argument)
{
    lane *l = argument;
    run *r = l->run;
    begin_sequence(l);
    l->born++;
    bump(l, COUNT_threads);
    bool good = be_born(l);
    unsigned i = 0;
    for (; good && i < ROUND_STEPS && !atomic_load_explicit(&r->stop, memory_order_relaxed); i++) {
        step s = sequence_next(&l->sequence);
        good = do_step(l, &s);
        if (good && i % BEHIND_STEPS == 0 && probe_mismatches(l->probe) != 0)
            run_end(r, FAILED, "memory does not hold what was written to it");
    }
    if (l->born == 1 && i == ROUND_STEPS)
        atomic_store_explicit(&l->digest, l->sequence.digest, memory_order_relaxed);
    die(l, good);
    atomic_store_explicit(&l->ended, true, memory_order_release); /* pairs with the acquire in run_tend */
    return NULL;
}

bool lane_open(lane *l)
{
    l->probe = probe_open(l->run->memory);
    return l->probe != NULL;
}

void lane_close(lane *l)
{
    probe_close(l->probe);
    l->probe = NULL;
}

/* By the main thread, after the last lane's. */
void exchange_empty(run *r)
{
    struct parcel p;
    lane *l = &r->lanes[0];
    bool good = be_born(l);
    while (good && exchange_get(r, &p))
        good = wait_on_device(l, l->own[0], p.ready) && return_event(l, p.ready) && end_block(l, &p.block, l->own[0]);
    while (good && r->exchange.spares != 0)
        good = ok(l, "cuEventDestroy", driver_of(l)->cuEventDestroy(r->exchange.spare[--r->exchange.spares]));
    die(l, good);
}

/* ---- what was found ---- */

/* The newest fill of all that are remembered that fits: one of this number, or else that wrote such a word there. */
static const struct used *find_fill(const run *r, bool by_number, uint64_t number, CUdeviceptr address, uint32_t word)
{
    for (unsigned i = 0; i < r->options->threads; i++) {
        const lane *l = &r->lanes[i];
        uint64_t known = l->remembered < HISTORY ? l->remembered : HISTORY;
        for (uint64_t k = 0; k < known; k++) {
            const struct used *u = &l->history[(l->remembered - 1 - k) % HISTORY];
            bool is_there = address >= u->block.address && address - u->block.address < u->block.bytes;
            uint64_t place = (address - u->block.address) / 4;
            if (by_number ? u->block.number == number
                          : is_there && memory_word(u->block.number, u->block.generation, place) == word)
                return u;
        }
    }
    return NULL;
}

static void name_block(char *words, size_t length, uint64_t number)
{
    snprintf(words, length, "allocation %llu of thread %llu", (unsigned long long)(number & ((UINT64_C(1) << 48) - 1)),
             (unsigned long long)(number >> 48));
}

static void describe(run *r, const finding *f)
{
    char name[64], writer[64];
    name_block(name, sizeof name, f->number);
    const struct used *u = find_fill(r, true, f->number, 0, 0), *w = NULL;
    CUdeviceptr address = u ? u->block.address + f->place * 4 : 0;
    size_t n = (size_t)snprintf(
        r->finding, sizeof r->finding,
        "%s, %zu bytes at 0x%llx, stream %p: at 0x%llx, byte %llu of it, there should be %08x and is %08x; the bits "
        "that differ: %08x. ",
        name, u ? u->block.bytes : 0, u ? (unsigned long long)u->block.address : 0, u ? (void *)u->stream : NULL,
        (unsigned long long)address, (unsigned long long)f->place * 4, f->expected, f->found, f->expected ^ f->found);
    if (u)
        w = find_fill(r, false, 0, address, f->found);
    if (w) {
        name_block(writer, sizeof writer, w->block.number);
        snprintf(r->finding + n, sizeof r->finding - n,
                 "That is what %s, %zu bytes at 0x%llx, stream %p, wrote as its generation %u", writer, w->block.bytes,
                 (unsigned long long)w->block.address, (void *)w->stream, w->block.generation);
    } else {
        snprintf(r->finding + n, sizeof r->finding - n, "No allocation that is remembered wrote that here%s",
                 __builtin_popcount(f->expected ^ f->found) == 1 ? ": a single bit, as of a fault in the memory" : "");
    }
}

void run_describe_finding(run *r)
{
    finding f[FINDINGS];
    for (unsigned i = 0; r->finding[0] == '\0' && r->lanes && i < r->options->threads; i++)
        if (r->lanes[i].probe && probe_findings(r->lanes[i].probe, f) != 0)
            describe(r, &f[0]);
}
