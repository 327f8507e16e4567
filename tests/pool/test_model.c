/*
 * Random operations on the pool and on a model of arrays, compared and audited after each.
 *
 * The model knows what is live: address, length, and the word that stands in each page. From that follow what the
 * statistics must say, that no byte has two owners, and, where every page is an extent of its own, that a request
 * fails only if the cap does not leave its pages. The simulator watches that nothing is used too early.
 *
 * VPMM_TEST_OPS   operations in all the tests together; 1,000,000, and 20,000 on a real GPU
 * VPMM_TEST_SEED  replays the run that a failure printed
 */
#include "support.h"

#include <stdio.h>
#include <stdlib.h>

enum { STREAMS = 4, CAPACITY_PAGES = 192, LONGEST = 64, LIVE = 96, VARIANTS = 6 };

struct block {
    CUdeviceptr pointer;
    size_t bytes, pages; /* pages: 0 below one */
    uint32_t stamp;
    int stream;
};

struct model {
    struct world w;
    const char *name;
    uint64_t seed, random, operation;
    bool strict; /* a page moves alone: nothing is ever stuck */
    CUstream stream[STREAMS];
    bool met[STREAMS]; /* the pool has seen it */
    struct block live[LIVE];
    int blocks;
    size_t pages, page_bytes, small_bytes;
    uint64_t mallocs, frees;
    uint32_t next_stamp;
};

#define model_assert(m, condition, ...) model_assert_at((m), (condition), #condition, __LINE__, "" __VA_ARGS__)

static void model_assert_at(struct model *m, bool good, const char *condition, int line, const char *more)
{
    require(good, "%s: operation %llu: line %d: %s %s\n  the pool's last words: %s\n  again: VPMM_TEST_SEED=%llu",
            m->name, (unsigned long long)m->operation, line, condition, more, vpmm_last_error(),
            (unsigned long long)m->seed);
}

static uint64_t draw(struct model *m, uint64_t below)
{
    m->random ^= m->random << 13;
    m->random ^= m->random >> 7;
    m->random ^= m->random << 17;
    return (m->random >> 11) % below;
}

static size_t draw_bytes(struct model *m)
{
    uint64_t kind = draw(m, 16);
    if (kind == 0)
        return 1 + draw(m, PAGE - 1);
    size_t longest = kind < 9 ? 4 : kind < 14 ? 16 : LONGEST;
    size_t bytes = (1 + draw(m, longest)) * PAGE;
    return draw(m, 4) == 0 && bytes > PAGE ? bytes - draw(m, PAGE - 1) : bytes;
}

static void model_has_no_overlap(struct model *m, CUdeviceptr pointer, size_t length)
{
    for (int i = 0; i < m->blocks; i++) {
        const struct block *b = &m->live[i];
        size_t other = b->pages > 0 ? b->pages * PAGE : b->bytes;
        model_assert(m, pointer + length <= b->pointer || b->pointer + other <= pointer, "two owners of one byte");
    }
}

static void do_malloc(struct model *m)
{
    if (m->blocks == LIVE)
        return;
    int s = (int)draw(m, STREAMS);
    size_t bytes = draw_bytes(m);
    size_t pages = bytes < PAGE ? 0 : (bytes + PAGE - 1) / PAGE;
    CUdeviceptr pointer = 0;
    vpmm_status status = vpmm_malloc(m->w.pool, bytes, m->stream[s], &pointer);
    if (status == VPMM_ERROR_OUT_OF_MEMORY) {
        model_assert(m, vpmm_last_error()[0] != 0);
        model_assert(m, !m->strict || pages == 0 || m->pages + pages > CAPACITY_PAGES, "refused, though there is room");
        return;
    }
    model_assert(m, status == VPMM_SUCCESS);
    m->met[s] = true;
    model_assert(m, pointer % (pages > 0 ? PAGE : 256) == 0);
    model_has_no_overlap(m, pointer, pages > 0 ? pages * PAGE : bytes);
    struct block *b = &m->live[m->blocks++];
    *b = (struct block){.pointer = pointer, .bytes = bytes, .pages = pages, .stamp = ++m->next_stamp, .stream = s};
    m->pages += pages;
    *(pages > 0 ? &m->page_bytes : &m->small_bytes) += bytes;
    m->mallocs++;
    if (bytes >= sizeof b->stamp)
        fill(&m->w, pointer, pages > 0 ? pages : 1, b->stamp, m->stream[s]);
}

static void do_free(struct model *m)
{
    if (m->blocks == 0)
        return;
    int which = (int)draw(m, (uint64_t)m->blocks);
    struct block b = m->live[which];
    if (b.bytes >= sizeof b.stamp)
        model_assert(m, expect_later(&m->w, b.pointer, b.pages > 0 ? b.pages : 1, b.stamp, m->stream[b.stream]));
    int s = b.stream;
    if (draw(m, 8) == 0) {
        s = (int)draw(m, STREAMS);
        if (s != b.stream)
            order_after(&m->w, m->stream[s], m->stream[b.stream]);
    }
    vpmm_status status = vpmm_free(m->w.pool, b.pointer, m->stream[s]);
    model_assert(m, status == VPMM_SUCCESS);
    m->met[s] = true;
    m->live[which] = m->live[--m->blocks];
    m->pages -= b.pages;
    *(b.pages > 0 ? &m->page_bytes : &m->small_bytes) -= b.bytes;
    m->frees++;
    if (draw(m, 64) == 0)
        model_assert(m, vpmm_free(m->w.pool, b.pointer, m->stream[s]) == VPMM_ERROR_INVALID_POINTER, "freed twice");
}

/* The stream goes, with its work still queued, and another one, often of the same handle, takes its place. */
static void do_replace_stream(struct model *m)
{
    int s = (int)draw(m, STREAMS);
    if (m->met[s]) {
        vpmm_status status = vpmm_stream_release(m->w.pool, m->stream[s]);
        model_assert(m, status == VPMM_SUCCESS);
    }
    int next = (s + 1) % STREAMS; /* what it allocated is used and freed on another stream from here on */
    order_after(&m->w, m->stream[next], m->stream[s]);
    for (int i = 0; i < m->blocks; i++)
        if (m->live[i].stream == s)
            m->live[i].stream = next;
    world_stream_destroy(&m->w, m->stream[s]);
    m->stream[s] = world_stream(&m->w);
    m->met[s] = false;
}

static void do_trim(struct model *m)
{
    size_t released = SIZE_MAX;
    uint64_t before = stats_of(&m->w).mapped_bytes;
    vpmm_status status = vpmm_trim(m->w.pool, draw(m, CAPACITY_PAGES) * PAGE, &released);
    model_assert(m, status == VPMM_SUCCESS);
    model_assert(m, before - stats_of(&m->w).mapped_bytes == released);
}

static void do_something(struct model *m)
{
    uint64_t what = draw(m, 1000);
    if (what < 390)
        do_malloc(m);
    else if (what < 780)
        do_free(m);
    else if (what < 890)
        world_run(&m->w, m->stream[draw(m, STREAMS)], 1 + draw(m, 12));
    else if (what < 940)
        model_assert(m, vpmm_poll(m->w.pool) == VPMM_SUCCESS);
    else if (what < 985)
        model_assert(m, vpmm_poll(m->w.pool) == VPMM_SUCCESS);
    else if (what < 990)
        do_trim(m);
    else if (what < 994)
        do_replace_stream(m);
    else if (what < 997)
        world_step(&m->w);
    else
        world_drain(&m->w);
}

static void compare(struct model *m)
{
    model_assert(m, vpmm_check(m->w.pool) == VPMM_SUCCESS, "the audit");
    vpmm_stats stats = stats_of(&m->w);
    const char *violation = stats_violation(&stats);
    model_assert_at(m, violation == NULL, "statistics:", __LINE__, violation != NULL ? violation : "");
    model_assert(m, stats.live_bytes == m->pages * PAGE);
    model_assert(m, stats.mallocs == m->mallocs && stats.frees == m->frees);
    model_assert(m, stats.async_bytes == m->small_bytes);
    model_assert(m, stats.requested_bytes == m->page_bytes || stats.requested_bytes == m->page_bytes + m->small_bytes);
    model_assert(m, stats.mapped_bytes <= CAPACITY_PAGES * PAGE, "the cap");
    model_assert(m, m->w.sim == NULL || vpmm_sim_races(m->w.sim) == 0, "a race");
    model_assert(m, m->w.sim == NULL || vpmm_sim_misuses(m->w.sim) == 0, "a misuse");
    model_assert(m, atomic_load(&m->w.mismatches) == 0, "a page lost its word");
}

static uint64_t from_environment(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text != NULL && text[0] != 0 ? strtoull(text, NULL, 0) : otherwise;
}

static void run(const char *name, const struct setup *setup)
{
    static struct model m;
    m.name = name;
    m.seed = from_environment("VPMM_TEST_SEED", 0x9e3779b97f4a7c15);
    m.random = m.seed | 1;
    for (const char *c = name; *c != 0; c++) /* each variant goes its own way */
        m.random = m.random * 31 + (unsigned char)*c;
    m.strict = setup->pool.extent_size == PAGE;
    world_open(&m.w, setup);
    uint64_t operations = from_environment("VPMM_TEST_OPS", m.w.sim != NULL ? 1000000 : 20000) / VARIANTS + 1;
    for (int i = 0; i < STREAMS; i++)
        m.stream[i] = world_stream(&m.w);
    for (m.operation = 1; m.operation <= operations; m.operation++) {
        do_something(&m);
        compare(&m);
    }
    while (m.blocks > 0)
        do_free(&m);
    world_drain(&m.w);
    compare(&m);
    world_close(&m.w);
}

static struct setup model_setup(size_t extent_size, vpmm_reuse reuse, vpmm_streams streams)
{
    struct setup setup = setup_default();
    setup.pool.small = VPMM_SMALL_ASYNC; /* the model rounds to pages; test_slab.c has one of pieces */
    setup.pool.va_size = 256 * PAGE;
    setup.pool.max_mapped = CAPACITY_PAGES * PAGE;
    setup.pool.extent_size = extent_size;
    setup.pool.reuse = reuse;
    setup.pool.streams = streams;
    return setup;
}

/* Six tests: VARIANTS. */
#define MODEL_TEST(name, extent_size, reuse, streams)                                                                  \
    Test(model, name, .timeout = 900)                                                                                  \
    {                                                                                                                  \
        struct setup setup = model_setup(extent_size, reuse, streams);                                                 \
        run(#name, &setup);                                                                                            \
    }

MODEL_TEST(one_page_extents, PAGE, VPMM_REUSE_WAIT_DEVICE, VPMM_STREAMS_CHECKED)
MODEL_TEST(extents_of_the_policy, 0, VPMM_REUSE_WAIT_DEVICE, VPMM_STREAMS_CHECKED)
MODEL_TEST(one_page_extents_reuse_completed, PAGE, VPMM_REUSE_COMPLETED, VPMM_STREAMS_CHECKED)
MODEL_TEST(extents_of_the_policy_reuse_completed, 0, VPMM_REUSE_COMPLETED, VPMM_STREAMS_TRUSTED)
MODEL_TEST(one_page_extents_host_waits, PAGE, VPMM_REUSE_WAIT_HOST, VPMM_STREAMS_CHECKED)
MODEL_TEST(extents_of_the_policy_eager_streams, 0, VPMM_REUSE_WAIT_DEVICE, VPMM_STREAMS_EAGER)
