/*
 * captures.c - stream captures beside everything else. Nobody of the program disturbs one: no thread calls with the
 * stream, and while a blocking stream captures none uses the legacy stream. So each has to end well.
 *
 * In some rounds there is a gate, in which calls with other streams record on one that is about to capture: it begins
 * and ends its capture when they are out.
 */
#include "random.h"

static pthread_rwlock_t gate = PTHREAD_RWLOCK_INITIALIZER;

static bool gate_enter(void *data, CUstream stream)
{
    (void)data, (void)stream;
    bool entered = pthread_rwlock_tryrdlock(&gate) == 0;
    if (entered)
        count(COUNT_gates);
    return entered;
}

static void gate_leave(void *data, CUstream stream)
{
    (void)data, (void)stream;
    pthread_rwlock_unlock(&gate);
}

const vpmm_capture_gate capture_gate = {.enter = gate_enter, .leave = gate_leave};

static void count_capture(CUstreamCaptureMode mode, unsigned flags)
{
    static const enum count counts[] = {
        [CU_STREAM_CAPTURE_MODE_GLOBAL] = COUNT_captures_global,
        [CU_STREAM_CAPTURE_MODE_THREAD_LOCAL] = COUNT_captures_thread_local,
        [CU_STREAM_CAPTURE_MODE_RELAXED] = COUNT_captures_relaxed,
    };
    count(counts[mode]);
    if (!(flags & CU_STREAM_NON_BLOCKING))
        count(COUNT_captures_blocking);
}

static void end_capture(CUstream stream, const char *beside)
{
    CUgraph graph = NULL;
    pthread_rwlock_wrlock(&gate);
    CUresult result = current.driver->cuStreamEndCapture(stream, &graph);
    pthread_rwlock_unlock(&gate);
    if (result != CUDA_SUCCESS)
        failed("a capture that nobody disturbed, beside %s, ended with %d; the pool's call that a capture refused last "
               "is %s",
               beside, (int)result, jitter_refused());
    else
        cuda_must(current.driver->cuGraphDestroy(graph));
}

/* In any mode: which calls are forbidden meanwhile, and to whom, is the pool's problem. */
static void begin_capture(struct worker *worker, CUstream stream, unsigned flags)
{
    stream_leave_alone(worker, stream);
    CUstreamCaptureMode mode = (CUstreamCaptureMode)draw(worker, 3);
    pthread_rwlock_wrlock(&gate);
    cuda_must(current.driver->cuStreamBeginCapture(stream, mode));
    pthread_rwlock_unlock(&gate);
    count_capture(mode, flags);
}

static void go_on_elsewhere(struct worker *worker)
{
    enum { PAUSE_US = 1500 };
    for (uint64_t n = draw(worker, 6); n > 0; n--)
        operation_exchange(worker);
    linger(worker, PAUSE_US);
    if (one_in(worker, 4))
        operation_poll(worker);
}

/* ---- the pool of a graph ---- */

enum { GRAPH_BLOCKS = 6, GRAPH_PAGES = 24 };

struct graph {
    vpmm_pool *pool; /* NULL: there is none */
    CUdeviceptr live[GRAPH_BLOCKS];
    size_t count;
};

/* Made beside the capture that it is for, or before it. */
static struct graph graph_new(void)
{
    struct graph graph = {.pool = NULL};
    vpmm_config config = current.config;
    config.graph = true;
    config.max_mapped = GRAPH_PAGES * PAGE;
    vpmm_must(vpmm_pool_create(&config, &graph.pool));
    count(COUNT_graphs);
    return graph;
}

static void graph_free_one(struct worker *worker, struct graph *graph, CUstream stream)
{
    CUdeviceptr *block = &graph->live[draw(worker, graph->count)];
    if (one_in(worker, 4))
        vpmm_must(vpmm_use(graph->pool, *block, stream));
    vpmm_must(vpmm_free(graph->pool, *block, stream));
    *block = graph->live[--graph->count];
}

/* What a capturing stream allocates, works on and frees. */
static void graph_work(struct worker *worker, struct graph *graph, CUstream stream)
{
    for (uint64_t n = draw(worker, 20); n > 0; n--) {
        if (graph->count == GRAPH_BLOCKS || (graph->count && one_in(worker, 2))) {
            graph_free_one(worker, graph, stream);
        } else if (take_from(graph->pool, draw_bytes(worker), stream, &graph->live[graph->count])) {
            needs(payload_write(current.driver, graph->live[graph->count], 1, 1, stream));
            graph->count++;
        }
    }
}

/* The stream no longer captures. */
static void graph_end(struct worker *worker, struct graph *graph, CUstream stream)
{
    while (graph->count)
        vpmm_must(vpmm_free(graph->pool, graph->live[--graph->count], stream));
    vpmm_must(vpmm_check(graph->pool));
    pool_end_second(worker, graph->pool);
}

/* ---- captures ---- */

/* Memory of the stream lies freed in caches, and one block of it is in use, when the capture begins. */
static void capture_on(struct worker *worker, CUstream stream, unsigned flags)
{
    CUdeviceptr used = 0, p[4];
    size_t n = 0, wanted = draw(worker, 5);
    bool has = take(PAGE, stream, &used);
    while (n < wanted && take(draw_bytes(worker), stream, &p[n]))
        n++;
    while (n > 0)
        give(p[--n], stream);
    linger(worker, 20);
    begin_capture(worker, stream, flags);
    if (has)
        needs(payload_write(current.driver, used, 1, 1, stream));
    struct graph graph = {.pool = NULL};
    if (one_in(worker, 3))
        graph = graph_new();
    if (graph.pool)
        graph_work(worker, &graph, stream);
    go_on_elsewhere(worker);
    end_capture(stream, "other threads' calls");
    if (graph.pool)
        graph_end(worker, &graph, stream);
    if (has)
        give(used, stream);
}

/* While a blocking stream captures the legacy stream is this thread's. */
static void capture_beside_legacy(struct worker *worker, CUstream stream, unsigned flags)
{
    bool blocks = !(flags & CU_STREAM_NON_BLOCKING);
    struct lane *legacy = blocks ? lane_own(&current.lane[LEGACY]) : NULL;
    if (blocks && !legacy)
        return;
    capture_on(worker, stream, flags);
    if (legacy)
        lane_leave(legacy);
}

void operation_capture(struct worker *worker)
{
    struct lane *lane = &current.lane[draw(worker, LANES)];
    if (lane != &current.lane[LEGACY]) {
        if (!lane_own(lane))
            return;
        capture_beside_legacy(worker, lane->stream, lane->flags);
        lane_leave(lane);
        return;
    }
    unsigned flags;
    CUstream own = stream_new(worker, &flags);
    capture_beside_legacy(worker, own, flags);
    stream_end(worker, own);
}

/* The pool is not told of the stream's end: it ends first. */
void pool_end_beside_capture(struct worker *worker)
{
    unsigned flags;
    CUdeviceptr p;
    CUstream stream = stream_new(worker, &flags);
    if (one_in(worker, 2) && take(PAGE, stream, &p))
        give(p, stream);
    begin_capture(worker, stream, flags);
    vpmm_must(vpmm_pool_destroy(current.pool));
    end_capture(stream, "the pool's end");
    cuda_must(current.driver->cuStreamDestroy(stream));
}
