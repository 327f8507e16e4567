/*
 * Small histories of a few threads, each held against a model that does one operation at a time: there is an order of
 * the operations, in which none stands before one that had returned before it began, that the model would have answered
 * likewise (Wing and Gong).
 *
 * The model has `CAP` pages and a set of live blocks.
 *   malloc of n pages at address a    right if no page of it is live; then they are
 *   malloc that is out of memory      right if live + n is more than the cap leaves. The pages of operations that
 *                                     overlap it, which they may have in their hands, count as live as well
 *   free of a                         right if a block is live that begins there; then it is not
 *   free that is refused              right if none is
 * So a malloc that overlaps nothing fails only if the memory is not there, wherever it lies and whoever freed it. One
 * that overlaps others is promised all memory "short of what another thread is handling at that instant": a thread that
 * merges, splits, moves or passes a free region has all of it in its hands for that instant, not just its own pages. So
 * it may fail though the memory is there; but it looks several times, so that this is rare. A history that only this
 * explains is excused, up to one in EXCUSED_IN.
 *
 * Histories are drawn at random, with and without caches, on one and two streams; each runs in schedules that the
 * explorer draws. VPMM_TEST_HISTORY is the number of one, for VPMM_TEST_SCHEDULE. VPMM_TEST_SCHEDULES, _SEED and
 * _SCHEDULE as explore.h says.
 */
#include "explore.h"
#include "support.h"

#include <stdio.h>
#include <stdlib.h>

enum {
    THREADS = 3,
    OPERATIONS = 3,
    BLOCKS = THREADS * OPERATIONS,
    CAP = 5,
    SHARED = 2,
    CHUNK_PAGES = 32,
    EXCUSED_IN = 1000
};

enum kind { MALLOC, FREE_OWN, FREE_SHARED };

struct operation {
    enum kind kind;
    size_t pages;
    int stream, shared;
    /* what has come of it */
    CUdeviceptr at;
    vpmm_status status;
    uint64_t begun, returned;
};

static struct linear {
    struct world w;
    size_t cache_pages;
    int streams;
    CUstream stream[2];
    uint64_t drawn, random;
    struct operation operation[THREADS][OPERATIONS];
    struct operation *all[BLOCKS];
    CUdeviceptr shared[SHARED]; /* live when the threads begin; any may free them */
    uint64_t clock, histories, excused;
    bool excuses; /* the model does: what overlaps has everything in its hands */
} linear;

static uint64_t draw(uint64_t below)
{
    linear.random ^= linear.random << 13;
    linear.random ^= linear.random >> 7;
    linear.random ^= linear.random << 17;
    return (linear.random >> 11) % below;
}

static void draw_history(void)
{
    linear.random = ++linear.drawn * UINT64_C(0x9E3779B97F4A7C15) | 1;
    for (int t = 0; t < THREADS; t++)
        for (int i = 0; i < OPERATIONS; i++) {
            struct operation *o = &linear.operation[t][i];
            uint64_t kind = draw(5);
            *o = (struct operation){.kind = kind < 3   ? MALLOC
                                            : kind < 4 ? FREE_OWN
                                                       : FREE_SHARED,
                                    .pages = 1 + draw(3),
                                    .stream = (int)draw((uint64_t)linear.streams),
                                    .shared = (int)draw(SHARED)};
            linear.all[t * OPERATIONS + i] = o;
        }
}

/* The newest block of the thread's that it has not freed. */
static struct operation *own_block(int thread, int before)
{
    for (int i = before - 1; i >= 0; i--) {
        struct operation *o = &linear.operation[thread][i];
        bool freed = false;
        for (int j = i + 1; j < before; j++)
            freed |= linear.operation[thread][j].kind == FREE_OWN && linear.operation[thread][j].at == o->at;
        if (o->kind == MALLOC && o->at && !freed)
            return o;
    }
    return NULL;
}

static void do_operation(int thread, int i)
{
    struct operation *o = &linear.operation[thread][i];
    const struct operation *own = own_block(thread, i);
    CUstream stream = linear.stream[o->stream];
    o->begun = ++linear.clock;
    if (o->kind == MALLOC) {
        o->status = vpmm_malloc(linear.w.pool, o->pages * PAGE, stream, &o->at);
        explore_check(o->status == VPMM_SUCCESS || o->status == VPMM_ERROR_OUT_OF_MEMORY, "malloc: %s",
                      vpmm_status_name(o->status));
    } else {
        o->at = o->kind == FREE_SHARED ? linear.shared[o->shared] : own ? own->at : 0;
        o->status = o->at ? vpmm_free(linear.w.pool, o->at, stream) : VPMM_SUCCESS;
        explore_check(o->status == VPMM_SUCCESS || o->status == VPMM_ERROR_INVALID_POINTER, "free: %s",
                      vpmm_status_name(o->status));
    }
    o->returned = ++linear.clock;
}

static void act(void *data)
{
    (void)data;
    linear.w.driver->cuCtxSetCurrent(linear.w.context);
    for (int i = 0; i < OPERATIONS; i++)
        do_operation(explore_actor(), i);
}

static void meet(void *data)
{
    (void)data;
    linear.w.driver->cuCtxSetCurrent(linear.w.context);
    for (int s = 0; s < linear.streams; s++)
        give(&linear.w, take(&linear.w, 1, linear.stream[s]), linear.stream[s]);
}

static void open_linear(void *data)
{
    (void)data;
    struct setup setup = setup_default();
    memset(&linear.w, 0, sizeof linear.w);
    setup.sim.memory_bytes = 2 * CHUNK_PAGES * PAGE;
    setup.sim.detect_races = false; /* nothing is written */
    setup.pool.va_size = CHUNK_PAGES * PAGE;
    setup.pool.extent_size = PAGE;
    setup.pool.max_mapped = CAP * PAGE;
    setup.pool.cache_bytes = linear.cache_pages * PAGE;
    world_open(&linear.w, &setup);
    for (int s = 0; s < linear.streams; s++)
        linear.stream[s] = world_stream(&linear.w);
    linear.clock = 0;
    draw_history();
    for (int i = 0; i < SHARED; i++)
        linear.shared[i] = take(&linear.w, 1, linear.stream[0]);
}

/* ---- the model ---- */

struct model {
    struct {
        CUdeviceptr at;
        size_t pages;
    } live[BLOCKS + SHARED];
    int blocks;
    size_t pages;
};

static int find_live(const struct model *m, CUdeviceptr at)
{
    for (int i = 0; i < m->blocks; i++)
        if (m->live[i].at == at)
            return i;
    return -1;
}

static void make_live(struct model *m, CUdeviceptr at, size_t pages)
{
    m->live[m->blocks].at = at;
    m->live[m->blocks++].pages = pages;
    m->pages += pages;
}

static bool is_clear(const struct model *m, CUdeviceptr at, size_t pages)
{
    for (int i = 0; i < m->blocks; i++)
        if (at < m->live[i].at + m->live[i].pages * PAGE && m->live[i].at < at + pages * PAGE)
            return false;
    return true;
}

static bool overlap(const struct operation *a, const struct operation *b)
{
    return a->begun < b->returned && b->begun < a->returned;
}

/* Pages in the hands of the operations that overlap this one, at most: those that they take, and those that they free.
 */
static size_t in_hands(const struct operation *o)
{
    size_t pages = 0;
    for (int i = 0; i < BLOCKS; i++) {
        const struct operation *other = linear.all[i];
        if (other == o || !overlap(o, other))
            continue;
        if (linear.excuses)
            return CAP;
        if (other->kind == MALLOC)
            pages += other->pages;
        for (int j = 0; other->kind == FREE_OWN && j < BLOCKS; j++)
            if (linear.all[j]->kind == MALLOC && linear.all[j]->at == other->at && other->at)
                pages += linear.all[j]->pages;
        pages += other->kind == FREE_SHARED;
    }
    return pages;
}

/* Whether the model answers as the library did; if so it has done the operation. */
static bool answers(struct model *m, const struct operation *o)
{
    if (o->kind == MALLOC && o->status == VPMM_SUCCESS) {
        if (!is_clear(m, o->at, o->pages) || m->pages + o->pages > CAP)
            return false;
        make_live(m, o->at, o->pages);
        return true;
    }
    if (o->kind == MALLOC)
        return m->pages + o->pages + in_hands(o) > CAP;
    if (!o->at)
        return true;
    int i = find_live(m, o->at);
    if (o->status != VPMM_SUCCESS)
        return i < 0;
    if (i < 0)
        return false;
    m->pages -= m->live[i].pages;
    m->live[i] = m->live[--m->blocks];
    return true;
}

/* Which operations are done is a set of bits. There are at most 1,680 orders: a thread's own operations have theirs. */
static bool search(const struct model *m, uint32_t done)
{
    if (done == (1u << BLOCKS) - 1)
        return true;
    uint64_t first_return = UINT64_MAX;
    for (int i = 0; i < BLOCKS; i++)
        if (!(done >> i & 1) && linear.all[i]->returned < first_return)
            first_return = linear.all[i]->returned;
    for (int i = 0; i < BLOCKS; i++) {
        struct model next = *m;
        if (!(done >> i & 1) && linear.all[i]->begun < first_return && answers(&next, linear.all[i]) &&
            search(&next, done | 1u << i))
            return true;
    }
    return false;
}

static const char *describe(void)
{
    static char text[2048];
    size_t used = 0;
    for (int i = 0; i < BLOCKS; i++) {
        const struct operation *o = linear.all[i];
        used += (size_t)snprintf(
            text + used, sizeof text - used, "\n    thread %d, %llu to %llu: %s %zu 0x%llx on %d: %s", i / OPERATIONS,
            (unsigned long long)o->begun, (unsigned long long)o->returned, o->kind == MALLOC ? "malloc" : "free",
            o->kind == MALLOC ? o->pages : 0, (unsigned long long)o->at, o->stream, vpmm_status_name(o->status));
    }
    return text;
}

static void close_linear(void *data)
{
    struct model m = {.blocks = 0};
    (void)data;
    for (int i = 0; i < SHARED; i++)
        make_live(&m, linear.shared[i], 1);
    linear.histories++;
    linear.excuses = false;
    bool right = search(&m, 0);
    linear.excuses = !right;
    linear.excused += !right;
    explore_check(right || search(&m, 0), "history %llu has no order; %s at its end:%s",
                  (unsigned long long)linear.drawn, layout(&linear.w), describe());
    for (int i = 0; i < BLOCKS; i++)
        if (linear.all[i]->kind == MALLOC && linear.all[i]->at)
            (void)vpmm_free(linear.w.pool, linear.all[i]->at, linear.stream[0]);
    for (int i = 0; i < SHARED; i++)
        (void)vpmm_free(linear.w.pool, linear.shared[i], linear.stream[0]);
    explore_check(vpmm_check(linear.w.pool) == VPMM_SUCCESS, "the audit finds: %s", vpmm_last_error());
    world_close(&linear.w);
}

static void explore_histories(const char *name, size_t cache_pages, int streams)
{
    enum { HISTORIES = 1500 };
    needs_simulator();
    linear.cache_pages = cache_pages;
    linear.streams = streams;
    const char *history = getenv("VPMM_TEST_HISTORY");
    linear.drawn = history ? strtoull(history, NULL, 10) - 1 : 0;
    explore(name, &(struct exploration){.open = open_linear,
                                        .close = close_linear,
                                        .settle = fail_once,
                                        .prepare = {meet, meet, meet},
                                        .act = {act, act, act},
                                        .random = HISTORIES});
    fprintf(stderr, "%s: %llu of %llu histories excused\n", name, (unsigned long long)linear.excused,
            (unsigned long long)linear.histories);
    cr_assert(linear.excused * EXCUSED_IN <= linear.histories, "%llu of %llu histories need an excuse",
              (unsigned long long)linear.excused, (unsigned long long)linear.histories);
}

#define LINEAR(name, cache_pages, streams)                                                                             \
    Test(linear, name, .timeout = 600, .fini = explore_report)                                                         \
    {                                                                                                                  \
        explore_histories(#name, cache_pages, streams);                                                                \
    }

LINEAR(one_stream, 0, 1)
LINEAR(two_streams, 0, 2)
LINEAR(one_stream_with_caches, 4, 1)
LINEAR(two_streams_with_caches, 4, 2)
