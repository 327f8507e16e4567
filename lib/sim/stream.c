/*
 * stream.c - streams, the lanes behind them, and waiting.
 *
 * With threads, a lane that has work has a worker, which leaves after a while without work. An operation without bytes
 * to move (an event, a wait that is over) on an idle lane is done on the spot: the GPU would have, before the caller
 * looked again. Stepped, nothing runs but by vpmm_sim_step and by host waits, which run exactly what they wait for,
 * each lane in its order.
 *
 * The legacy stream: its work waits for all that blocking streams of the context have queued before, and theirs for
 * its. Both become dependencies when the work is queued, like those on events.
 */
#include "internal.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>

/* ---- records ---- */

struct sim_record *sim_record_new(void)
{
    struct sim_record *record = calloc(1, sizeof *record);
    if (record)
        record->references = 1;
    return record;
}

struct sim_record *sim_record_hold(struct sim_record *record)
{
    if (record)
        record->references++;
    return record;
}

void sim_record_drop(struct sim_record *record)
{
    if (!record || --record->references)
        return;
    sim_clock_drop(record->clock);
    free(record);
}

bool sim_record_passed(vpmm_sim *sim, const struct sim_record *record)
{
    return !record || record->capture || sim->lanes[record->lane]->done >= record->number;
}

/* ---- operations ---- */

struct sim_op *sim_op_new(enum sim_op_kind kind)
{
    struct sim_op *op = calloc(1, sizeof *op);
    if (op)
        op->kind = kind;
    return op;
}

void sim_op_depend(struct sim_op *op, struct sim_record *record)
{
    op->one = (struct sim_dependency){record->lane, record->number, sim_record_hold(record)};
    op->dependencies = &op->one;
    op->dependency_count = 1;
}

void sim_op_free(struct sim_op *op)
{
    for (uint32_t i = 0; i < op->dependency_count; i++)
        sim_record_drop(op->dependencies[i].record);
    if (op->dependencies != &op->one)
        free(op->dependencies);
    sim_record_drop(op->record);
    sim_clock_drop(op->clock);
    sim_site_drop(op->site);
    free(op->staged);
    free(op);
}

static bool blocking(const struct sim_lane *lane)
{
    return !(lane->flags & CU_STREAM_NON_BLOCKING);
}

/* Adds a dependency on all that the lane has queued so far. */
static bool depend_on_lane(struct sim_op *op, const struct sim_lane *on)
{
    struct sim_dependency added = {on->id, on->numbered, NULL};
    if (op->dependency_count == 0) {
        op->one = added;
        op->dependencies = &op->one;
        op->dependency_count = 1;
        return true;
    }
    struct sim_dependency *old = op->dependencies == &op->one ? NULL : op->dependencies;
    struct sim_dependency *grown = realloc(old, (op->dependency_count + 1) * sizeof *grown);
    if (!grown)
        return false;
    if (!old)
        grown[0] = op->one;
    grown[op->dependency_count++] = added;
    op->dependencies = grown;
    return true;
}

static bool worth_a_dependency(vpmm_sim *sim, const struct sim_lane *lane, const struct sim_lane *on)
{
    if (on->numbered == 0 || on == lane)
        return false;
    return on->done < on->numbered || (sim->config.detect_races && !sim_clock_knows(lane->clock, on->id, on->numbered));
}

static bool depend_on_legacy(vpmm_sim *sim, struct sim_lane *lane, struct sim_op *op)
{
    if (!blocking(lane) || !lane->context)
        return true;
    if (!lane->legacy) {
        struct sim_lane *legacy = lane->context->legacy;
        return !legacy || !worth_a_dependency(sim, lane, legacy) || depend_on_lane(op, legacy);
    }
    for (uint32_t i = 0; i < sim->lane_count; i++) {
        struct sim_lane *other = sim->lanes[i];
        if (other->home == lane->home && blocking(other) && worth_a_dependency(sim, lane, other))
            if (!depend_on_lane(op, other))
                return false;
    }
    return true;
}

/* ---- running ---- */

/* The first dependency of the lane's next operation that is not met; NULL: it can run. */
static const struct sim_dependency *blocked_by(vpmm_sim *sim, const struct sim_lane *lane)
{
    const struct sim_op *op = lane->head;
    for (uint32_t i = 0; i < op->dependency_count; i++)
        if (sim->lanes[op->dependencies[i].lane]->done < op->dependencies[i].number)
            return &op->dependencies[i];
    return NULL;
}

static void learn(vpmm_sim *sim, struct sim_lane *lane, struct sim_op *op)
{
    sim_clock_join(&lane->clock, op->clock);
    for (uint32_t i = 0; i < op->dependency_count; i++) {
        const struct sim_dependency *d = &op->dependencies[i];
        sim_clock_join(&lane->clock, d->record ? d->record->clock : sim->lanes[d->lane]->clock);
        sim_clock_learn(&lane->clock, d->lane, d->number);
    }
}

/* Runs the lane's next operation, which is not blocked and which nobody else is running. */
static void run_next(vpmm_sim *sim, struct sim_lane *lane)
{
    struct sim_op *op = lane->head;
    lane->running = true;
    if (sim->config.detect_races)
        learn(sim, lane, op);
    if (atomic_load(&sim->sticky) == CUDA_SUCCESS)
        sim_op_run(sim, lane, op);
    if (op->record)
        op->record->clock = sim_clock_hold(lane->clock);
    for (struct sim_waiter *waiter = lane->waiters; waiter; waiter = waiter->next)
        if (waiter->number == op->number)
            waiter->clock = sim_clock_hold(lane->clock);
    lane->head = op->next;
    if (!lane->head)
        lane->tail = NULL;
    lane->queued--;
    lane->done = op->number;
    lane->running = false;
    pthread_cond_broadcast(&lane->progress);
    sim_op_free(op);
}

struct worker {
    vpmm_sim *sim;
    struct sim_lane *lane;
};

/* False: nothing came for a while. */
static bool await_work(vpmm_sim *sim, struct sim_lane *lane)
{
    enum { PATIENCE_NS = 100 * 1000 * 1000, SECOND_NS = 1000 * 1000 * 1000 };
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += PATIENCE_NS;
    until.tv_sec += until.tv_nsec / SECOND_NS;
    until.tv_nsec %= SECOND_NS;
    while (!lane->head && !sim->stopping)
        if (pthread_cond_timedwait(&lane->work, &sim->lock, &until) == ETIMEDOUT)
            return lane->head != NULL;
    return true;
}

static void *work(void *argument)
{
    struct worker worker = *(struct worker *)argument;
    vpmm_sim *sim = worker.sim;
    struct sim_lane *lane = worker.lane;
    free(argument);
    pthread_mutex_lock(&sim->lock);
    while (!sim->stopping && (lane->head || await_work(sim, lane))) {
        if (!lane->head)
            continue;
        const struct sim_dependency *blocker = blocked_by(sim, lane);
        if (blocker)
            pthread_cond_wait(&sim->lanes[blocker->lane]->progress, &sim->lock);
        else
            run_next(sim, lane);
    }
    lane->worker = false;
    sim->workers--;
    pthread_cond_broadcast(&sim->worker_gone);
    pthread_mutex_unlock(&sim->lock);
    return NULL;
}

/* Signals are the program's: its threads take them, not ours. */
static bool start_worker(vpmm_sim *sim, struct sim_lane *lane)
{
    pthread_t thread;
    pthread_attr_t attributes;
    sigset_t all, before;
    struct worker *worker = malloc(sizeof *worker);
    if (!worker)
        return false;
    *worker = (struct worker){sim, lane};
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool started = pthread_create(&thread, &attributes, work, worker) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (!started)
        free(worker);
    lane->worker = started;
    sim->workers += started;
    return started;
}

/* Work was queued on a lane of its own thread. Where there can be no thread, the caller runs it. */
static void set_going(vpmm_sim *sim, struct sim_lane *lane)
{
    struct sim_op *op = lane->head;
    bool momentary = op->kind == SIM_OP_MARK || op->kind == SIM_OP_GIVE_UP;
    if (op == lane->tail && momentary && !lane->running && !blocked_by(sim, lane))
        run_next(sim, lane);
    else if (lane->worker)
        pthread_cond_signal(&lane->work);
    else if (!start_worker(sim, lane))
        while (lane->head && !lane->running && !blocked_by(sim, lane))
            run_next(sim, lane);
}

CUresult sim_submit(vpmm_sim *sim, struct sim_lane *lane, struct sim_op *op)
{
    bool captured = false;
    CUresult result = sim_capture_submit(sim, lane, op, &captured);
    if (result == CUDA_SUCCESS && !captured && !depend_on_legacy(sim, lane, op))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    if (result != CUDA_SUCCESS || captured) {
        sim_op_free(op);
        return result;
    }
    op->number = ++lane->numbered;
    op->clock = sim_clock_hold(sim->host_clock);
    op->host_time = sim->host_time;
    if (op->site)
        op->site->lane = lane->id, op->site->number = op->number;
    if (op->record)
        op->record->lane = lane->id, op->record->number = op->number;
    if (lane->tail)
        lane->tail->next = op;
    else
        lane->head = op;
    lane->tail = op;
    lane->queued++;
    if (!sim->config.stepped)
        set_going(sim, lane);
    return CUDA_SUCCESS;
}

/* ---- waiting ---- */

void sim_host_learns(vpmm_sim *sim, struct sim_clock *clock, uint32_t lane, uint64_t number)
{
    if (!sim->config.detect_races)
        return;
    sim_clock_join(&sim->host_clock, clock);
    sim_clock_learn(&sim->host_clock, lane, number);
}

/* Stepped, the waiter runs what it waits for. Recursion goes from lane to lane, never twice into one. */
void sim_await(vpmm_sim *sim, uint32_t id, uint64_t number)
{
    struct sim_lane *lane = sim->lanes[id];
    while (lane->done < number && !sim->stopping) {
        if (!sim->config.stepped || lane->running) {
            pthread_cond_wait(&lane->progress, &sim->lock);
            continue;
        }
        const struct sim_dependency *blocker = blocked_by(sim, lane);
        if (blocker)
            sim_await(sim, blocker->lane, blocker->number);
        else
            run_next(sim, lane);
    }
}

void sim_wait(vpmm_sim *sim, uint32_t lane, uint64_t number)
{
    struct sim_lane *on = sim->lanes[lane];
    if (on->done >= number) { /* of the last one: who waits for a lane waits for all that it has */
        sim_host_learns(sim, on->clock, lane, number);
        return;
    }
    struct sim_waiter waiter = {.next = on->waiters, .number = number};
    on->waiters = &waiter;
    sim_await(sim, lane, number);
    struct sim_waiter **at = &on->waiters;
    while (*at != &waiter)
        at = &(*at)->next;
    *at = waiter.next;
    sim_host_learns(sim, waiter.clock, lane, number);
    sim_clock_drop(waiter.clock);
}

CUresult sim_waited(vpmm_sim *sim)
{
    sim_pools_settle(sim);
    return (CUresult)atomic_load(&sim->sticky);
}

/* Orphans included: the context's work is all that was ever queued in it. */
void sim_drain_context(vpmm_sim *sim, struct sim_context *context)
{
    for (uint32_t i = 0; i < sim->lane_count; i++)
        if (sim->lanes[i]->home == context->handle)
            sim_wait(sim, i, sim->lanes[i]->numbered);
}

void sim_drain_device(vpmm_sim *sim, int device)
{
    for (uint32_t i = 0; i < sim->lane_count; i++)
        if (sim->lanes[i]->device == device)
            sim_wait(sim, i, sim->lanes[i]->numbered);
}

/* ---- lanes ---- */

/*
 * An orphan that has run dry may serve another stream once the host has seen all that it did: whatever the new stream
 * does comes after that, so one number line for both tells no lie.
 */
static struct sim_lane *reusable_lane(vpmm_sim *sim)
{
    for (uint32_t i = 0; i < sim->lane_count; i++) {
        struct sim_lane *lane = sim->lanes[i];
        if (lane->orphan && !lane->head && !lane->running &&
            (!sim->config.detect_races || sim_clock_knows(sim->host_clock, i, lane->numbered)))
            return lane;
    }
    return NULL;
}

static struct sim_lane *new_lane(vpmm_sim *sim)
{
    if (sim->lane_count == sim->lane_capacity) {
        uint32_t capacity = sim->lane_capacity ? 2 * sim->lane_capacity : 16;
        struct sim_lane **lanes = realloc(sim->lanes, capacity * sizeof(*lanes));
        if (!lanes)
            return NULL;
        sim->lanes = lanes;
        sim->lane_capacity = capacity;
    }
    struct sim_lane *lane = calloc(1, sizeof *lane);
    if (!lane)
        return NULL;
    pthread_cond_init(&lane->work, NULL);
    pthread_cond_init(&lane->progress, NULL);
    lane->id = sim->lane_count;
    sim->lanes[sim->lane_count++] = lane;
    return lane;
}

static struct sim_lane *sim_lane_open(vpmm_sim *sim, struct sim_context *context)
{
    struct sim_lane *lane = reusable_lane(sim);
    if (!lane)
        lane = new_lane(sim);
    if (!lane)
        return NULL;
    sim_clock_drop(lane->clock);
    lane->clock = sim_clock_hold(sim->host_clock);
    lane->context = context;
    lane->home = context->handle;
    lane->device = context->device;
    lane->handle = NULL;
    lane->flags = 0;
    lane->thread = 0;
    lane->legacy = lane->orphan = false;
    lane->capture = NULL;
    lane->stream_id = ++sim->stream_ids;
    lane->next_in_context = context->lanes;
    context->lanes = lane;
    return lane;
}

void sim_lane_close(vpmm_sim *sim, struct sim_lane *lane)
{
    struct sim_lane **at = &lane->context->lanes;
    while (*at != lane)
        at = &(*at)->next_in_context;
    *at = lane->next_in_context;
    sim_capture_forget(sim, lane);
    lane->context = NULL;
    lane->orphan = true;
    if (lane->legacy || lane->thread)
        return;
    uint64_t handle = (uint64_t)(uintptr_t)lane->handle;
    atomic_store(&sim->glances[sim_object_index(handle)].stream_id, 0);
    atomic_store(&sim->glances[sim_object_index(handle)].capture, CU_STREAM_CAPTURE_STATUS_NONE);
    sim_object_remove(sim, SIM_STREAM, handle);
}

static CUresult legacy_lane(vpmm_sim *sim, struct sim_context *context, struct sim_lane **lane)
{
    if (!context->legacy)
        context->legacy = sim_lane_open(sim, context);
    if (!context->legacy)
        return CUDA_ERROR_OUT_OF_MEMORY;
    context->legacy->legacy = true;
    context->legacy->handle = CU_STREAM_LEGACY;
    *lane = context->legacy;
    return CUDA_SUCCESS;
}

static CUresult thread_lane(vpmm_sim *sim, struct sim_context *context, struct sim_lane **out)
{
    uint64_t thread = sim_thread(sim)->id;
    for (struct sim_lane *lane = context->lanes; lane; lane = lane->next_in_context)
        if (lane->thread == thread) {
            *out = lane;
            return CUDA_SUCCESS;
        }
    *out = sim_lane_open(sim, context);
    if (!*out)
        return CUDA_ERROR_OUT_OF_MEMORY;
    (*out)->thread = thread;
    (*out)->handle = CU_STREAM_PER_THREAD;
    return CUDA_SUCCESS;
}

static bool is_default(CUstream stream)
{
    return !stream || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD;
}

static CUresult default_lane(vpmm_sim *sim, struct sim_context *context, CUstream stream, struct sim_lane **lane)
{
    return stream == CU_STREAM_PER_THREAD ? thread_lane(sim, context, lane) : legacy_lane(sim, context, lane);
}

/* Only the default streams need a current context; the others bring theirs. */
CUresult sim_lane_of(vpmm_sim *sim, CUstream stream, struct sim_lane **lane)
{
    struct sim_context *context;
    if (!is_default(stream)) {
        *lane = sim_object_find(sim, SIM_STREAM, (uint64_t)(uintptr_t)stream);
        return *lane ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
    }
    CUresult result = sim_current(sim, &context);
    return result == CUDA_SUCCESS ? default_lane(sim, context, stream, lane) : result;
}

void sim_stop_lanes(vpmm_sim *sim)
{
    sim->stopping = true;
    for (uint32_t i = 0; i < sim->lane_count; i++) {
        pthread_cond_broadcast(&sim->lanes[i]->work);
        pthread_cond_broadcast(&sim->lanes[i]->progress);
    }
    while (sim->workers)
        pthread_cond_wait(&sim->worker_gone, &sim->lock);
}

void sim_free_lanes(vpmm_sim *sim)
{
    for (uint32_t i = 0; i < sim->lane_count; i++) {
        struct sim_lane *lane = sim->lanes[i];
        for (struct sim_op *op = lane->head, *next; op; op = next) {
            next = op->next;
            sim_op_free(op);
        }
        sim_clock_drop(lane->clock);
        sim_clock_drop(lane->captured_clock);
        pthread_cond_destroy(&lane->work);
        pthread_cond_destroy(&lane->progress);
        free(lane);
    }
    free(sim->lanes);
}

/* ---- the entries ---- */

CUresult sim_cuStreamCreate(CUstream *phStream, unsigned int Flags)
{
    vpmm_sim *sim = sim_self();
    struct sim_context *context;
    CUresult result = sim_current(sim, &context);
    if (result != CUDA_SUCCESS)
        return result;
    if (!phStream || Flags & ~(unsigned)CU_STREAM_NON_BLOCKING)
        return CUDA_ERROR_INVALID_VALUE;
    struct sim_lane *lane = sim_lane_open(sim, context);
    if (!lane)
        return CUDA_ERROR_OUT_OF_MEMORY;
    uint64_t handle = sim_object_add(sim, SIM_STREAM, lane);
    if (!handle) {
        lane->thread = UINT64_MAX; /* it has no handle to give back */
        sim_lane_close(sim, lane);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    lane->flags = Flags;
    *phStream = lane->handle = (CUstream)(uintptr_t)handle;
    atomic_store(&sim->glances[sim_object_index(handle)].stream_id, lane->stream_id);
    return CUDA_SUCCESS;
}

CUresult sim_cuStreamDestroy(CUstream hStream)
{
    vpmm_sim *sim = sim_self();
    struct sim_lane *lane;
    if (is_default(hStream))
        return CUDA_ERROR_INVALID_HANDLE;
    CUresult result = sim_lane_of(sim, hStream, &lane);
    if (result == CUDA_SUCCESS)
        sim_lane_close(sim, lane);
    return result;
}

/* The legacy stream has no work of its own to wait for, but it stands behind all blocking streams. */
static CUresult mark_legacy(vpmm_sim *sim, struct sim_lane *lane)
{
    struct sim_op *op = sim_op_new(SIM_OP_MARK);
    return op ? sim_submit(sim, lane, op) : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult sim_cuStreamSynchronize(CUstream hStream)
{
    vpmm_sim *sim = sim_self();
    struct sim_lane *lane;
    CUresult result = sim_lane_of(sim, hStream, &lane);
    if (result == CUDA_SUCCESS)
        result = sim_unsafe_on(sim, lane);
    if (result == CUDA_SUCCESS && lane->legacy)
        result = mark_legacy(sim, lane);
    if (result != CUDA_SUCCESS)
        return result;
    sim_wait(sim, lane->id, lane->numbered);
    return sim_waited(sim);
}

static bool lane_idle(vpmm_sim *sim, const struct sim_lane *lane)
{
    if (lane->done < lane->numbered)
        return false;
    for (uint32_t i = 0; lane->legacy && i < sim->lane_count; i++) {
        const struct sim_lane *other = sim->lanes[i];
        if (other->home == lane->home && blocking(other) && other->done < other->numbered)
            return false;
    }
    return true;
}

CUresult sim_cuStreamQuery(CUstream hStream)
{
    vpmm_sim *sim = sim_self();
    struct sim_lane *lane;
    CUresult result = sim_lane_of(sim, hStream, &lane);
    if (result == CUDA_SUCCESS)
        result = sim_unsafe_on(sim, lane);
    if (result != CUDA_SUCCESS)
        return result;
    if (!lane_idle(sim, lane))
        return CUDA_ERROR_NOT_READY;
    for (uint32_t i = 0; lane->legacy && i < sim->lane_count; i++)
        if (sim->lanes[i]->home == lane->home && blocking(sim->lanes[i]))
            sim_wait(sim, i, sim->lanes[i]->numbered);
    sim_wait(sim, lane->id, lane->numbered);
    return CUDA_SUCCESS;
}

CUresult sim_cuStreamGetCtx(CUstream hStream, CUcontext *pctx)
{
    struct sim_lane *lane;
    if (!pctx)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sim_lane_of(sim_self(), hStream, &lane);
    if (result == CUDA_SUCCESS)
        *pctx = lane->home;
    return result;
}

CUresult sim_cuStreamGetFlags(CUstream hStream, unsigned int *flags)
{
    struct sim_lane *lane;
    if (!flags)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sim_lane_of(sim_self(), hStream, &lane);
    if (result == CUDA_SUCCESS)
        result = sim_looked_into(sim_self(), lane);
    if (result == CUDA_SUCCESS)
        *flags = lane->flags;
    return result;
}

/* Without the lock where the stream is one of the program's and does not capture. */
CUresult sim_cuStreamGetId(CUstream hStream, unsigned long long *streamId)
{
    vpmm_sim *sim = sim_self();
    uint64_t handle = (uint64_t)(uintptr_t)hStream;
    struct sim_lane *lane;
    if (!streamId)
        return CUDA_ERROR_INVALID_VALUE;
    struct sim_glance *glance = &sim->glances[sim_object_index(handle) % SIM_STREAM_LIMIT];
    uint64_t id = atomic_load_explicit(&glance->stream_id, memory_order_acquire);
    bool captures = atomic_load_explicit(&glance->capture, memory_order_acquire) != CU_STREAM_CAPTURE_STATUS_NONE;
    if (id && !captures && handle == sim_stream_handle(sim, sim_object_index(handle))) {
        *streamId = id;
        return CUDA_SUCCESS;
    }
    sim_lock_frame();
    CUresult result = sim_lane_of(sim, hStream, &lane);
    if (result == CUDA_SUCCESS)
        result = sim_looked_into(sim, lane);
    if (result == CUDA_SUCCESS)
        *streamId = lane->stream_id;
    return result;
}

/* ---- stepping ---- */

/* A handle whose stream was destroyed still names the oldest lane that it left behind with work. */
static struct sim_lane *orphan_of(vpmm_sim *sim, CUstream stream)
{
    struct sim_lane *oldest = NULL;
    for (uint32_t i = 0; i < sim->lane_count; i++) {
        struct sim_lane *lane = sim->lanes[i];
        if (lane->orphan && lane->handle == stream && lane->head && (!oldest || lane->stream_id < oldest->stream_id))
            oldest = lane;
    }
    return oldest;
}

static struct sim_lane *lane_to_step(vpmm_sim *sim, CUstream stream)
{
    struct sim_context *context = sim_context_of_step(sim);
    struct sim_lane *lane = NULL;
    if (is_default(stream))
        return context && context->alive && default_lane(sim, context, stream, &lane) == CUDA_SUCCESS ? lane : NULL;
    lane = sim_object_peek(sim, SIM_STREAM, (uint64_t)(uintptr_t)stream);
    return lane ? lane : orphan_of(sim, stream);
}

static bool can_step(vpmm_sim *sim, const struct sim_lane *lane)
{
    return lane && lane->head && !lane->running && !blocked_by(sim, lane);
}

/* Stepping the default stream also moves the work of destroyed streams, which no handle may name any more. */
static struct sim_lane *orphan_to_step(vpmm_sim *sim)
{
    for (uint32_t i = 0; i < sim->lane_count; i++)
        if (sim->lanes[i]->orphan && can_step(sim, sim->lanes[i]))
            return sim->lanes[i];
    return NULL;
}

size_t vpmm_sim_step(vpmm_sim *sim, CUstream stream, size_t n)
{
    size_t ran = 0;
    pthread_mutex_lock(&sim->lock);
    while (ran < n && sim->config.stepped) {
        struct sim_lane *lane = lane_to_step(sim, stream);
        if (!can_step(sim, lane) && (!stream || stream == CU_STREAM_LEGACY))
            lane = orphan_to_step(sim);
        if (!can_step(sim, lane))
            break;
        run_next(sim, lane);
        ran++;
    }
    pthread_mutex_unlock(&sim->lock);
    return ran;
}

size_t vpmm_sim_pending(vpmm_sim *sim, CUstream stream)
{
    pthread_mutex_lock(&sim->lock);
    struct sim_lane *lane = lane_to_step(sim, stream);
    size_t queued = lane ? lane->queued : 0;
    pthread_mutex_unlock(&sim->lock);
    return queued;
}
