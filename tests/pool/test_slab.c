/*
 * Pieces: requests that are cut from pages, those below a page and those above one that would waste more than an
 * eighth of their pages.
 *
 *   piece     what such a request gets: its bytes, rounded up by at most an eighth, to 256 bytes at least
 *   slab      pages cut into pieces. They are live to the pool, whether their pieces are or not
 *
 *   slab_bytes = slab_live_bytes + slab_free_bytes         live_bytes = slab_bytes + pages handed out whole
 *
 * VPMM_TEST_OPS   operations of the model in all its variants; 16,000
 * VPMM_TEST_SEED  replays the run that a failure printed
 */
#include "pool/pool.h"
#include "support.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define KIB   ((size_t)1 << 10)
#define MIB   ((size_t)1 << 20)
#define SLICE ((size_t)256)

/* --- sizes and chance --------------------------------------------------------------------------------------------- */

static uint64_t draw(uint64_t *random, uint64_t below)
{
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    return (*random >> 11) % below;
}

/* `from` and `to` are powers of two; each octave between them comes as often as the next. */
static size_t draw_bytes(uint64_t *random, size_t from, size_t to)
{
    int octaves = __builtin_ctzll(to) - __builtin_ctzll(from);
    size_t octave = from << draw(random, (uint64_t)octaves);
    return octave + draw(random, octave);
}

static size_t slices(size_t bytes)
{
    return (bytes + SLICE - 1) / SLICE * SLICE;
}

static size_t whole_pages(size_t bytes)
{
    return (bytes + PAGE - 1) / PAGE * PAGE;
}

static bool power_of_two(size_t bytes)
{
    return bytes != 0 && (bytes & (bytes - 1)) == 0;
}

static uint64_t from_environment(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text != NULL && text[0] != 0 ? strtoull(text, NULL, 0) : otherwise;
}

/* --- a piece, and what it may look like --------------------------------------------------------------------------- */

struct piece {
    CUdeviceptr pointer;
    size_t bytes, held; /* held: after rounding */
    bool cut;           /* false: it has pages of its own */
    uint8_t stamp;      /* of each byte */
    int stream;
};

static const char *alignment_violation(const struct piece *p)
{
    size_t to_256 = slices(p->bytes);
    if (p->pointer % SLICE != 0)
        return "not aligned to 256 bytes";
    if (p->cut && p->held <= PAGE && power_of_two(p->held) && p->pointer % p->held != 0)
        return "rounded to a power of two, and not aligned to it";
    if (to_256 <= PAGE && power_of_two(to_256) && p->pointer % to_256 != 0)
        return "of a power of two, and not aligned to it";
    if (!p->cut && p->pointer % PAGE != 0)
        return "of whole pages, and not aligned to one";
    return NULL;
}

static const char *rounding_violation(const struct piece *p)
{
    size_t to_256 = slices(p->bytes);
    if (p->held < p->bytes)
        return "less than was asked for";
    if (p->cut && p->held - to_256 > to_256 / 8)
        return "more than an eighth larger than was asked for";
    if (!p->cut && p->held - p->bytes > p->held / 8)
        return "pages of its own, more than an eighth of which are wasted";
    return NULL;
}

static uint64_t paged_bytes(const vpmm_stats *s)
{
    return s->live_bytes - s->slab_bytes;
}

/* What one malloc changed says where its memory is from. */
static void classify(struct piece *p, const vpmm_stats *before, const vpmm_stats *after)
{
    p->cut = after->slab_live_bytes != before->slab_live_bytes;
    p->held = p->cut ? after->slab_live_bytes - before->slab_live_bytes : whole_pages(p->bytes);
    uint64_t paged = paged_bytes(after) - paged_bytes(before);
    require(paged == (p->cut ? 0 : p->held), "%zu bytes, and the pages handed out whole grow by %llu", p->bytes,
            (unsigned long long)paged);
}

static void check_piece(const struct piece *p)
{
    const char *violation = alignment_violation(p);
    if (violation == NULL)
        violation = rounding_violation(p);
    require(violation == NULL, "%zu bytes at 0x%llx, held %zu: %s", p->bytes, (unsigned long long)p->pointer, p->held,
            violation);
}

static const char *slab_violation(const vpmm_stats *s)
{
    if (s->slab_bytes != s->slab_live_bytes + s->slab_free_bytes)
        return "slab is not slab_live + slab_free";
    if (s->slab_bytes > s->live_bytes)
        return "more is cut than is live";
    if (s->slab_cached_bytes > s->slab_free_bytes)
        return "more pieces are cached than are free";
    if (s->requested_bytes > s->slab_live_bytes + paged_bytes(s))
        return "more is requested than is handed out";
    if (s->async_bytes != 0)
        return "the driver's pool is used";
    return NULL;
}

/* world_audit, and what the statistics of slabs must say. */
static void audit(struct world *w)
{
    world_audit(w);
    vpmm_stats stats = stats_of(w);
    const char *violation = slab_violation(&stats);
    require(violation == NULL, "%s", violation);
}

static struct setup slab_setup(void)
{
    struct setup setup = setup_default();
    setup.pool.small = VPMM_SMALL_SLAB;
    return setup;
}

/* --- pieces on a shelf -------------------------------------------------------------------------------------------- */

enum { LOOKS_QUEUED = 8 };

struct shelf {
    struct world w;
    CUstream stream[4];
    int streams;
    uint64_t random;
    unsigned looks; /* on a real GPU: at pieces that were given back */
    struct piece *piece;
    size_t count, room;
    uint8_t next_stamp;
};

static void shelf_open(struct shelf *s, const struct setup *setup, int streams, size_t room)
{
    memset(s, 0, sizeof *s);
    world_open(&s->w, setup);
    for (s->streams = 0; s->streams < streams; s->streams++)
        s->stream[s->streams] = world_stream(&s->w);
    s->random = 0x9e3779b97f4a7c15;
    s->room = room;
    s->piece = calloc(room, sizeof *s->piece);
    require(s->piece != NULL, "no host memory");
}

static void write_piece(struct shelf *s, struct piece *p)
{
    p->stamp = ++s->next_stamp;
    CUresult result = s->w.driver->cuMemsetD8Async(p->pointer, p->stamp, p->bytes, s->stream[p->stream]);
    require(result == CUDA_SUCCESS, "cuMemsetD8Async: %d", result);
}

/* Queues a look at its first and last words. */
static void expect_piece(struct shelf *s, const struct piece *p, CUstream stream)
{
    uint32_t word = p->stamp * UINT32_C(0x01010101);
    if (p->bytes < sizeof word)
        return;
    require(expect_later(&s->w, p->pointer, 1, word, stream), "a look at the first word");
    require(expect_later(&s->w, p->pointer + p->bytes - sizeof word, 1, word, stream), "a look at the last word");
}

/* Puts one more on the shelf, written. NULL: out of memory. */
static struct piece *shelf_try(struct shelf *s, size_t bytes, int stream)
{
    require(s->count < s->room, "the shelf is full");
    struct piece *p = &s->piece[s->count];
    vpmm_stats before = stats_of(&s->w);
    *p = (struct piece){.bytes = bytes, .stream = stream};
    vpmm_status status = vpmm_malloc(s->w.pool, bytes, s->stream[stream], &p->pointer);
    if (status == VPMM_ERROR_OUT_OF_MEMORY)
        return NULL;
    require(status == VPMM_SUCCESS, "%zu bytes: %s: %s", bytes, vpmm_status_name(status), vpmm_last_error());
    vpmm_stats after = stats_of(&s->w);
    classify(p, &before, &after);
    check_piece(p);
    write_piece(s, p);
    s->count++;
    return p;
}

static struct piece *shelf_take(struct shelf *s, size_t bytes, int stream)
{
    struct piece *p = shelf_try(s, bytes, stream);
    require(p != NULL, "%zu bytes: %s", bytes, vpmm_last_error());
    return p;
}

/* On another stream than its own it is used once more there, after all that its own has been given. */
static void shelf_give_on(struct shelf *s, size_t which, int stream)
{
    struct piece p = s->piece[which];
    expect_piece(s, &p, s->stream[p.stream]);
    if (stream != p.stream) {
        order_after(&s->w, s->stream[stream], s->stream[p.stream]);
        p.stream = stream;
        write_piece(s, &p);
        expect_piece(s, &p, s->stream[stream]);
    }
    give(&s->w, p.pointer, s->stream[stream]);
    s->piece[which] = s->piece[--s->count];
    if (s->w.sim == NULL && ++s->looks % LOOKS_QUEUED == 0)
        world_step(&s->w); /* a real stream that is held takes so much work and then keeps its caller waiting */
}

static void shelf_give(struct shelf *s, size_t which)
{
    shelf_give_on(s, which, s->piece[which].stream);
}

/* Down to `left` of them, whichever chance leaves. */
static void shelf_give_all_but(struct shelf *s, size_t left)
{
    while (s->count > left)
        shelf_give(s, draw(&s->random, s->count));
}

/* Everything is free and every stream is done: the pool can give all of it back, and does. */
static void nothing_is_kept(struct world *w)
{
    world_drain(w);
    audit(w);
    vpmm_stats stats = stats_of(w);
    cr_assert_eq(stats.slab_live_bytes, 0);
    cr_assert_eq(stats.requested_bytes, 0);
    must_work(vpmm_trim(w->pool, 0, NULL)); /* what is in front caches has its end recorded now */
    world_drain(w);
    must_work(vpmm_trim(w->pool, 0, NULL));
    stats = stats_of(w);
    cr_assert_eq(stats.mapped_bytes, 0, "%llu bytes stay mapped, %llu of them in slabs",
                 (unsigned long long)stats.mapped_bytes, (unsigned long long)stats.slab_bytes);
    audit(w);
}

static void shelf_close(struct shelf *s)
{
    shelf_give_all_but(s, 0);
    nothing_is_kept(&s->w);
    world_close(&s->w);
    free(s->piece);
}

/* --- random operations on the pool and on a model ----------------------------------------------------------------- */

enum { VARIANTS = 6, LIVE = 128, CAPACITY_PAGES = 128, STREAMS = 4 };

struct model {
    struct shelf s;
    const char *name;
    uint64_t seed, operation, mallocs, frees, refused;
};

#define model_assert(m, condition) model_assert_at((m), (condition), #condition, __LINE__)

static void model_assert_at(struct model *m, bool good, const char *condition, int line)
{
    require(good, "%s: operation %llu: line %d: %s\n  the pool's last words: %s\n  again: VPMM_TEST_SEED=%llu", m->name,
            (unsigned long long)m->operation, line, condition, vpmm_last_error(), (unsigned long long)m->seed);
}

static uint64_t chance(struct model *m, uint64_t below)
{
    return draw(&m->s.random, below);
}

static bool overlap(const struct piece *a, const struct piece *b)
{
    return a->pointer < b->pointer + b->held && b->pointer < a->pointer + a->held;
}

/* A third each: lengths that come again and again, so that their pieces are used again; powers of two; any. */
static size_t model_bytes(struct model *m)
{
    static const size_t often[] = {100, 5000, 70000, 600000, 2 * MIB + 1};
    uint64_t kind = chance(m, 3);
    if (kind == 0)
        return often[chance(m, sizeof often / sizeof often[0])];
    return kind == 1 ? (size_t)1 << chance(m, 24) : draw_bytes(&m->s.random, 1, 8 * MIB);
}

static void do_malloc(struct model *m)
{
    if (m->s.count == LIVE)
        return;
    size_t bytes = model_bytes(m);
    const struct piece *p = shelf_try(&m->s, bytes, (int)chance(m, STREAMS));
    if (p == NULL) {
        m->refused++;
        return;
    }
    m->mallocs++;
    for (const struct piece *other = m->s.piece; other < p; other++)
        model_assert(m, !overlap(other, p));
}

static void do_bad_free(struct model *m, CUdeviceptr pointer)
{
    clear_words();
    vpmm_status status = vpmm_free(m->s.w.pool, pointer, m->s.stream[chance(m, STREAMS)]);
    model_assert(m, status == VPMM_ERROR_INVALID_POINTER && spoke());
}

static void do_free(struct model *m)
{
    if (m->s.count == 0)
        return;
    size_t which = chance(m, m->s.count);
    struct piece p = m->s.piece[which];
    if (p.held > SLICE && chance(m, 16) == 0)
        do_bad_free(m, p.pointer + SLICE * (1 + chance(m, p.held / SLICE - 1)));
    shelf_give_on(&m->s, which, chance(m, 6) == 0 ? (int)chance(m, STREAMS) : p.stream);
    m->frees++;
    if (chance(m, 16) == 0)
        do_bad_free(m, p.pointer);
}

static void do_trim(struct model *m)
{
    size_t released = SIZE_MAX;
    uint64_t before = stats_of(&m->s.w).mapped_bytes;
    must_work(vpmm_trim(m->s.w.pool, chance(m, CAPACITY_PAGES) * PAGE, &released));
    model_assert(m, before - stats_of(&m->s.w).mapped_bytes == released);
}

static void do_something(struct model *m)
{
    struct world *w = &m->s.w;
    uint64_t what = chance(m, 1000);
    if (what < 420)
        do_malloc(m);
    else if (what < 810)
        do_free(m);
    else if (what < 920)
        world_run(w, m->s.stream[chance(m, STREAMS)], 1 + chance(m, 12));
    else if (what < 950)
        must_work(vpmm_poll(w->pool));
    else if (what < 985)
        must_work(vpmm_poll(w->pool));
    else if (what < 993)
        do_trim(m);
    else if (what < 997)
        world_step(w);
    else
        world_drain(w);
}

static void compare(struct model *m)
{
    uint64_t cut = 0, paged = 0, requested = 0;
    for (size_t i = 0; i < m->s.count; i++) {
        const struct piece *p = &m->s.piece[i];
        *(p->cut ? &cut : &paged) += p->held;
        requested += p->bytes;
    }
    audit(&m->s.w);
    vpmm_stats stats = stats_of(&m->s.w);
    model_assert(m, stats.slab_live_bytes == cut);
    model_assert(m, paged_bytes(&stats) == paged);
    model_assert(m, stats.requested_bytes == requested);
    model_assert(m, stats.mallocs == m->mallocs && stats.frees == m->frees);
    model_assert(m, stats.mapped_bytes <= CAPACITY_PAGES * PAGE);
    model_assert(m, atomic_load(&m->s.w.mismatches) == 0);
}

static void run(const char *name, const struct setup *setup)
{
    static struct model m;
    memset(&m, 0, sizeof m);
    m.name = name;
    m.seed = from_environment("VPMM_TEST_SEED", 0x9e3779b97f4a7c15);
    uint64_t operations = from_environment("VPMM_TEST_OPS", 16000) / VARIANTS + 1;
    shelf_open(&m.s, setup, STREAMS, LIVE);
    m.s.random = m.seed | 1;
    for (const char *c = name; *c != 0; c++) /* each variant goes its own way */
        m.s.random = m.s.random * 31 + (unsigned char)*c;
    for (m.operation = 1; m.operation <= operations; m.operation++) {
        do_something(&m);
        compare(&m);
    }
    model_assert(&m, m.refused <= m.mallocs / 10);
    shelf_close(&m.s);
}

static struct setup model_setup(size_t extent_size, size_t cache_bytes, vpmm_reuse reuse, vpmm_streams streams)
{
    struct setup setup = slab_setup();
    setup.pool.va_size = 512 * PAGE;
    setup.pool.max_mapped = CAPACITY_PAGES * PAGE;
    setup.pool.extent_size = extent_size;
    setup.pool.cache_bytes = cache_bytes;
    setup.pool.reuse = reuse;
    setup.pool.streams = streams;
    return setup;
}

/* Six tests: VARIANTS. */
#define MODEL_TEST(name, extent_size, cache_bytes, reuse, streams)                                                     \
    Test(slab, name, .timeout = 300)                                                                                   \
    {                                                                                                                  \
        struct setup setup = model_setup(extent_size, cache_bytes, reuse, streams);                                    \
        run(#name, &setup);                                                                                            \
    }

MODEL_TEST(model_with_caches, 0, 64 * MIB, VPMM_REUSE_WAIT_DEVICE, VPMM_STREAMS_CHECKED)
MODEL_TEST(model_with_caches_of_a_megabyte, PAGE, MIB, VPMM_REUSE_COMPLETED, VPMM_STREAMS_TRUSTED)
MODEL_TEST(model_without_caches, 0, 0, VPMM_REUSE_WAIT_DEVICE, VPMM_STREAMS_CHECKED)
MODEL_TEST(model_without_caches_reuse_completed, PAGE, 0, VPMM_REUSE_COMPLETED, VPMM_STREAMS_CHECKED)
MODEL_TEST(model_host_waits, 0, 64 * MIB, VPMM_REUSE_WAIT_HOST, VPMM_STREAMS_CHECKED)
MODEL_TEST(model_eager_streams, 0, 64 * MIB, VPMM_REUSE_WAIT_DEVICE, VPMM_STREAMS_EAGER)

/* --- sizes and addresses ------------------------------------------------------------------------------------------ */

/* Each multiple of 256 up to 16 KiB and its neighbours, then wider and wider steps. */
Test(slab, no_size_is_rounded_by_more_than_an_eighth)
{
    struct setup setup = slab_setup();
    struct shelf s;
    shelf_open(&s, &setup, 1, 1);
    size_t last_held = 0;
    for (size_t bytes = SLICE; bytes <= 8 * MIB; bytes += bytes < 16 * KIB ? SLICE : bytes / 61 / SLICE * SLICE)
        for (size_t around = bytes - 1; around <= bytes + 1; around++) {
            const struct piece *p = shelf_take(&s, around, 0);
            require(p->held >= last_held || !p->cut, "%zu bytes are held in %zu, fewer in %zu", around, p->held,
                    last_held);
            last_held = p->cut ? p->held : last_held;
            shelf_give(&s, 0);
        }
    shelf_close(&s);
}

Test(slab, powers_of_two_are_aligned_to_themselves)
{
    struct setup setup = slab_setup();
    struct shelf s;
    shelf_open(&s, &setup, 2, 4096);
    for (int round = 0; round < 24; round++) {
        for (size_t bytes = SLICE; bytes <= PAGE; bytes *= 2) {
            const struct piece *p = shelf_take(&s, bytes, round % 2);
            require(p->pointer % bytes == 0, "%zu bytes at 0x%llx", bytes, (unsigned long long)p->pointer);
        }
        shelf_give_all_but(&s, s.count / 2);
        audit(&s.w);
    }
    shelf_close(&s);
}

Test(slab, powers_of_two_are_aligned_to_themselves_beside_odd_sizes)
{
    struct setup setup = slab_setup();
    struct shelf s;
    shelf_open(&s, &setup, 2, 4096);
    for (int round = 0; round < 24; round++) {
        for (size_t bytes = SLICE; bytes <= PAGE; bytes *= 2) {
            shelf_take(&s, draw_bytes(&s.random, SLICE, 4 * MIB), 0);
            shelf_take(&s, bytes + 1, 1);
            const struct piece *p = shelf_take(&s, bytes, round % 2);
            require(p->pointer % bytes == 0, "%zu bytes at 0x%llx", bytes, (unsigned long long)p->pointer);
            shelf_take(&s, bytes - 1, 0);
        }
        shelf_give_all_but(&s, s.count / 3);
        audit(&s.w);
    }
    shelf_close(&s);
}

/* Rounded to pages, the eight that are a byte too long would have 4 MiB each, and the others 2. */
Test(slab, a_byte_above_a_page_does_not_cost_a_page)
{
    enum { EACH = 8 };
    struct setup setup = slab_setup();
    setup.pool.extent_size = PAGE;
    struct shelf s;
    shelf_open(&s, &setup, 1, 2 * EACH);
    for (int i = 0; i < EACH; i++) {
        shelf_take(&s, PAGE + 1, 0);
        shelf_take(&s, 19 * PAGE / 20, 0);
    }
    vpmm_stats stats = stats_of(&s.w);
    size_t rounded = EACH * (2 * PAGE + PAGE);
    cr_expect_leq(stats.mapped_bytes, rounded - rounded / 8, "%llu bytes are mapped, %zu if all were rounded to pages",
                  (unsigned long long)stats.mapped_bytes, rounded);
    audit(&s.w);
    shelf_close(&s);
}

/* Each a little more than half a page: two to a page do not fit, but one after another across pages do. */
Test(slab, pieces_lie_across_pages)
{
    enum { EACH = 32 };
    struct setup setup = slab_setup();
    setup.pool.initial_pages = 2 * EACH;
    struct shelf s;
    shelf_open(&s, &setup, 1, EACH);
    for (int i = 0; i < EACH; i++)
        shelf_take(&s, PAGE / 2 + PAGE / 16, 0);
    vpmm_stats stats = stats_of(&s.w);
    cr_expect_leq(stats.slab_bytes, stats.slab_live_bytes + 2 * PAGE, "%llu bytes are cut for %llu",
                  (unsigned long long)stats.slab_bytes, (unsigned long long)stats.slab_live_bytes);
    audit(&s.w);
    shelf_close(&s);
}

/* The last page of a chunk has none after it. */
Test(slab, pieces_end_with_their_chunk)
{
    enum { PAGES = 4, CHUNKS = 3 };
    struct setup setup = slab_setup();
    setup.pool.va_size = PAGES * PAGE;
    struct shelf s;
    shelf_open(&s, &setup, 1, 2 * PAGES * CHUNKS);
    for (int i = 0; i < PAGES * CHUNKS; i++) {
        shelf_take(&s, PAGE / 2 + PAGE / 16, 0);
        audit(&s.w);
    }
    vpmm_stats stats = stats_of(&s.w);
    cr_expect_gt(stats.reserved_bytes, (uint64_t)PAGES * PAGE, "one chunk had room for all");
    shelf_close(&s);
}

/* --- frees that are none ------------------------------------------------------------------------------------------ */

/* Of two snapshots, that every level and the counts of mallocs and frees are the same: NULL, or which is not. */
static const char *difference(const vpmm_stats *a, const vpmm_stats *b)
{
#define SAME_gauge(name)                 (a->name == b->name)
#define SAME_counter(name)               true
#define SAME_counter_by(label)           SAME_counter
#define SAME_part_of(sum, label)         SAME_counter
#define SAME_counter_part_of(sum, label) SAME_counter
#define COMPARE(name, kind, help)                                                                                      \
    if (!SAME_##kind(name))                                                                                            \
        return #name;
    VPMM_STATS(COMPARE)
#undef COMPARE
    return a->mallocs != b->mallocs ? "mallocs" : a->frees != b->frees ? "frees" : NULL;
}

static void refused_free(struct world *w, CUdeviceptr pointer, CUstream stream)
{
    vpmm_stats before = stats_of(w);
    must_fail(VPMM_ERROR_INVALID_POINTER, vpmm_free(w->pool, pointer, stream));
    vpmm_stats after = stats_of(w);
    const char *changed = difference(&before, &after);
    require(changed == NULL, "a refused free of 0x%llx changes %s", (unsigned long long)pointer, changed);
}

static void freed_twice(size_t bytes, size_t cache_bytes)
{
    struct setup setup = slab_setup();
    setup.pool.cache_bytes = cache_bytes;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w), other = world_stream(&w);
    CUdeviceptr kept = take_bytes(&w, bytes, s), p = take_bytes(&w, bytes, s);
    keep_busy(&w, s);
    give(&w, p, s);
    refused_free(&w, p, s);
    refused_free(&w, p, other);
    audit(&w);
    world_drain(&w);
    refused_free(&w, p, s);
    must_work(vpmm_trim(w.pool, 0, NULL));
    refused_free(&w, p, s);
    give(&w, kept, s);
    refused_free(&w, kept, s);
    refused_free(&w, p, s);
    nothing_is_kept(&w);
    refused_free(&w, kept, s);
    world_close(&w);
}

Test(slab, a_piece_is_freed_once)
{
    static const size_t sizes[] = {1, 256, 1000, 4096, 5000, 65536, 100000, 1000000, 3 * MIB / 2, 2 * MIB + 1};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        freed_twice(sizes[i], 0);
        freed_twice(sizes[i], 64 * MIB);
    }
}

/* A piece's middle: each slice of it, and what lies beside the slices' beginnings. */
static void refused_inside(struct world *w, CUdeviceptr p, size_t bytes, CUstream s)
{
    static const size_t beside[] = {1, 8, 128, 255};
    for (size_t at = 0; at < slices(bytes); at += SLICE) {
        if (at != 0)
            refused_free(w, p + at, s);
        for (size_t i = 0; i < sizeof beside / sizeof beside[0]; i++)
            refused_free(w, p + at + beside[i], s);
    }
}

static void only_the_start_is_freed(size_t cache_bytes)
{
    static const size_t sizes[] = {1, 256, 257, 1000, 4096, 20000, 96 * KIB};
    enum { SIZES = sizeof sizes / sizeof sizes[0] };
    struct setup setup = slab_setup();
    setup.pool.cache_bytes = cache_bytes;
    struct shelf s;
    shelf_open(&s, &setup, 1, SIZES);
    for (int i = 0; i < SIZES; i++)
        shelf_take(&s, sizes[i], 0);
    for (int i = 0; i < SIZES; i++)
        refused_inside(&s.w, s.piece[i].pointer, sizes[i], s.stream[0]);
    audit(&s.w);
    shelf_close(&s);
}

Test(slab, only_the_start_of_a_piece_is_freed)
{
    only_the_start_is_freed(0);
    only_the_start_is_freed(64 * MIB);
}

/* Every slice of the page that this address is in, but those that begin something live. */
static void sweep_page(struct shelf *s, CUdeviceptr address)
{
    CUdeviceptr page = address / PAGE * PAGE;
    for (CUdeviceptr at = page; at < page + PAGE; at += SLICE) {
        bool live = false;
        for (size_t i = 0; i < s->count; i++)
            live |= s->piece[i].pointer == at;
        if (!live)
            refused_free(&s->w, at, s->stream[0]);
    }
}

Test(slab, what_was_never_allocated_in_a_cut_page_is_not_freed)
{
    static const size_t sizes[] = {256, 300, 4096, 10000, 65536, 300000, MIB};
    struct setup setup = slab_setup();
    struct shelf s;
    shelf_open(&s, &setup, 1, 64);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        shelf_take(&s, sizes[i], 0);
        sweep_page(&s, s.piece[s.count - 1].pointer);
    }
    audit(&s.w);
    shelf_close(&s);
}

/* The same where most of the page's pieces were live before, some of them in the front cache now. */
Test(slab, what_was_freed_in_a_cut_page_is_not_freed)
{
    struct setup setup = slab_setup();
    setup.pool.cache_bytes = 64 * MIB;
    struct shelf s;
    shelf_open(&s, &setup, 1, 1000);
    for (int i = 0; i < 1000; i++)
        shelf_take(&s, 256 + 256 * (size_t)(i % 5), 0);
    shelf_give_all_but(&s, 10);
    sweep_page(&s, s.piece[0].pointer);
    audit(&s.w);
    shelf_close(&s);
}

Test(slab, a_piece_of_another_pool_is_not_freed)
{
    struct setup setup = slab_setup();
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    setup.pool.driver = w.driver;
    vpmm_pool *second = NULL;
    must_work(vpmm_pool_create(&setup.pool, &second));
    CUdeviceptr p = take_bytes(&w, 1000, s), q = 0;
    must_work(vpmm_malloc(second, 1000, s, &q));
    must_fail(VPMM_ERROR_INVALID_POINTER, vpmm_free(second, p, s));
    refused_free(&w, q, s);
    must_work(vpmm_free(second, q, s));
    must_work(vpmm_pool_destroy(second));
    give(&w, p, s);
    nothing_is_kept(&w);
    world_close(&w);
}

/* --- stream order ------------------------------------------------------------------------------------------------- */

/* Allocated on the first stream, used and freed on the second, which is not done, and asked for on the third. */
static void freed_elsewhere(size_t bytes, vpmm_reuse reuse, size_t cache_bytes)
{
    enum { PIECES = 40 };
    struct setup setup = slab_setup();
    setup.pool.reuse = reuse;
    setup.pool.cache_bytes = cache_bytes;
    struct shelf s;
    shelf_open(&s, &setup, 3, 2 * PIECES);
    CUdeviceptr freed[PIECES];
    for (int i = 0; i < PIECES; i++)
        freed[i] = shelf_take(&s, bytes, 0)->pointer;
    for (int i = 0; i < PIECES; i++) {
        shelf_give_on(&s, 0, 1);
    }
    for (int i = 0; i < PIECES; i++) {
        CUdeviceptr p = shelf_take(&s, bytes, 2)->pointer;
        for (int k = 0; k < PIECES && reuse == VPMM_REUSE_COMPLETED; k++)
            require(p != freed[k], "%zu bytes are handed out while another stream uses them", bytes);
    }
    vpmm_sim_step(s.w.sim, s.stream[2], SIZE_MAX); /* as far as it does not wait for the others */
    audit(&s.w);
    world_drain(&s.w);
    audit(&s.w);
    shelf_close(&s);
}

static void freed_elsewhere_of_each_size(vpmm_reuse reuse, size_t cache_bytes)
{
    static const size_t sizes[] = {100, 5000, 65536, MIB, 2 * MIB + 1};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        freed_elsewhere(sizes[i], reuse, cache_bytes);
}

Test(slab, a_piece_freed_elsewhere_is_waited_for)
{
    needs_simulator();
    freed_elsewhere_of_each_size(VPMM_REUSE_WAIT_DEVICE, 0);
    freed_elsewhere_of_each_size(VPMM_REUSE_WAIT_DEVICE, 64 * MIB);
}

Test(slab, a_piece_freed_elsewhere_is_left_alone_until_it_is_done)
{
    needs_simulator();
    freed_elsewhere_of_each_size(VPMM_REUSE_COMPLETED, 0);
    freed_elsewhere_of_each_size(VPMM_REUSE_COMPLETED, 64 * MIB);
}

/* Once the stream is done its pieces are everybody's: another stream needs no more memory for as many. */
Test(slab, what_one_stream_is_done_with_another_takes)
{
    enum { PIECES = 2000 };
    struct setup setup = slab_setup();
    setup.pool.reuse = VPMM_REUSE_COMPLETED;
    setup.pool.cache_bytes = 0;
    struct shelf s;
    shelf_open(&s, &setup, 2, PIECES);
    for (int i = 0; i < PIECES; i++)
        shelf_take(&s, 10000, 0);
    uint64_t mapped = stats_of(&s.w).mapped_bytes;
    shelf_give_all_but(&s, 0);
    world_drain(&s.w);
    for (int i = 0; i < PIECES; i++)
        shelf_take(&s, 10000, 1);
    cr_expect_leq(stats_of(&s.w).mapped_bytes, mapped + 2 * PAGE);
    audit(&s.w);
    shelf_close(&s);
}

/* The slab's pages go to a large request of another stream, whose work must come after that on the pieces. */
Test(slab, an_emptied_slab_waits_for_the_work_on_its_pieces)
{
    needs_simulator();
    enum { PIECES = 64 };
    struct setup setup = slab_setup();
    setup.pool.extent_size = PAGE;
    setup.pool.max_mapped = 16 * PAGE;
    struct shelf s;
    shelf_open(&s, &setup, 2, PIECES);
    for (int i = 0; i < PIECES; i++)
        shelf_take(&s, 200 * KIB, 0);
    shelf_give_all_but(&s, 0);
    CUdeviceptr large = take(&s.w, 14, s.stream[1]);
    fill(&s.w, large, 14, 14, s.stream[1]);
    expect_later(&s.w, large, 14, 14, s.stream[1]);
    vpmm_sim_step(s.w.sim, s.stream[1], SIZE_MAX);
    world_step(&s.w);
    audit(&s.w);
    give(&s.w, large, s.stream[1]);
    shelf_close(&s);
}

/* --- many, and what is left of many ------------------------------------------------------------------------------- */

static double now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e9 * (double)t.tv_sec + (double)t.tv_nsec;
}

/* Nanoseconds a malloc. */
static double take_slices(struct world *w, CUdeviceptr *p, size_t n, CUstream s)
{
    double begin = now_ns();
    for (size_t i = 0; i < n; i++)
        p[i] = take_bytes(w, SLICE, s);
    return (now_ns() - begin) / (double)n;
}

Test(slab, a_million_slices, .timeout = 300)
{
    const size_t part = 100000, all = 10 * part;
    struct setup setup = slab_setup();
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr *p = malloc(all * sizeof *p);
    require(p != NULL, "no host memory");
    double first = take_slices(&w, p, part, s), last = first;
    for (size_t i = part; i < all; i += part)
        last = take_slices(&w, p + i, part, s);
    printf("a million slices: %.0f ns a malloc of the first %zu, %.0f of the last\n", first, part, last);
    vpmm_stats stats = stats_of(&w);
    cr_expect_eq(stats.slab_live_bytes, all * SLICE);
    cr_expect_eq(stats.requested_bytes, all * SLICE);
    audit(&w);
    for (size_t i = 0; i < all; i++)
        give(&w, p[(i * 7919) % all], s); /* a prime: each once, in no order */
    free(p);
    nothing_is_kept(&w);
    world_close(&w);
}

static int compare_addresses(const void *a, const void *b)
{
    CUdeviceptr x = *(const CUdeviceptr *)a, y = *(const CUdeviceptr *)b;
    return (x > y) - (x < y);
}

/* Bytes of the pages in which something of the shelf lies: what is cut cannot be less. */
static size_t touched_bytes(const struct shelf *s)
{
    size_t n = 0, touched = 0;
    CUdeviceptr *page = malloc((5 * s->count + 1) * sizeof *page);
    require(page != NULL, "no host memory");
    for (size_t i = 0; i < s->count; i++)
        for (CUdeviceptr at = s->piece[i].pointer / PAGE; at * PAGE < s->piece[i].pointer + s->piece[i].held; at++)
            page[n++] = at;
    qsort(page, n, sizeof *page, compare_addresses);
    for (size_t i = 0; i < n; i++)
        touched += i == 0 || page[i] != page[i - 1] ? PAGE : 0;
    free(page);
    return touched;
}

static size_t take_mixed(struct shelf *s, size_t bytes)
{
    size_t sum = 0;
    while (sum < bytes)
        sum += shelf_take(s, draw_bytes(&s->random, SLICE, PAGE), (int)draw(&s->random, 2))->bytes;
    return sum;
}

/* All that the cap leaves beside the slabs, but `slack`, in large requests. */
static void take_the_rest(struct shelf *s, size_t cap, size_t slack)
{
    vpmm_stats stats = stats_of(&s->w);
    require(stats.slab_bytes + slack < cap, "%llu bytes are cut", (unsigned long long)stats.slab_bytes);
    size_t room = cap - stats.slab_bytes - slack;
    for (size_t taken = 0; taken + 8 * PAGE <= room; taken += 8 * PAGE)
        shelf_take(s, 8 * PAGE, 0);
}

Test(slab, emptied_slabs_serve_large_requests, .timeout = 120)
{
    needs_simulator();
    const size_t cap = 448 * PAGE; /* there may be a page begun for each size and stream */
    struct setup setup = slab_setup();
    setup.pool.max_mapped = cap;
    struct shelf s;
    shelf_open(&s, &setup, 2, 1 << 17);
    take_mixed(&s, 256 * MIB);
    audit(&s.w);
    uint64_t full = stats_of(&s.w).slab_bytes;
    shelf_give_all_but(&s, s.count / 10);
    must_work(vpmm_trim(s.w.pool, cap, NULL)); /* what caches hold, and no page */
    world_drain(&s.w);
    audit(&s.w);
    vpmm_stats stats = stats_of(&s.w);
    size_t touched = touched_bytes(&s);
    printf("fragments: %.1f MiB cut, and after nine tenths were freed %.1f, where %.1f are live in pages of %.1f\n",
           (double)full / MIB, (double)stats.slab_bytes / MIB, (double)stats.slab_live_bytes / MIB,
           (double)touched / MIB);
    cr_expect_leq(stats.slab_bytes, touched + touched / 4 + 16 * PAGE, "emptied slabs are kept");
    shelf_take(&s, 32 * PAGE, 0);
    cr_expect_eq(stats_of(&s.w).mapped_bytes, stats.mapped_bytes, "the pool grows beside emptied pages");
    take_the_rest(&s, cap - 32 * PAGE, 16 * PAGE);
    audit(&s.w);
    shelf_close(&s);
}

/* So that it can move by itself when it is empty, also what is made beyond the page that is wanted. */
Test(slab, a_page_that_is_cut_is_a_handle)
{
    needs_simulator();
    struct setup setup = slab_setup();
    setup.sim.memory_bytes = (size_t)16 << 30; /* of which other handles may have 16 pages */
    struct shelf s;
    shelf_open(&s, &setup, 1, 1 << 15);
    take_mixed(&s, 128 * MIB);
    vpmm_stats stats = stats_of(&s.w);
    cr_expect_gt(stats.pages_created * PAGE, stats.slab_bytes, "no page was made beyond what was wanted");
    cr_expect_eq(stats.extents_created, stats.pages_created);
    shelf_close(&s);
}

/* --- the statistics, and the pool's end --------------------------------------------------------------------------- */

Test(slab, pieces_are_counted)
{
    struct setup setup = slab_setup();
    setup.pool.cache_bytes = 0;
    struct shelf s;
    shelf_open(&s, &setup, 1, 64);
    for (int i = 0; i < 20; i++)
        shelf_take(&s, 1000, 0);
    shelf_take(&s, 3 * PAGE, 0);
    vpmm_stats stats = stats_of(&s.w);
    cr_expect_eq(stats.requested_bytes, 20 * 1000 + 3 * PAGE);
    cr_expect_geq(stats.slab_live_bytes, 20 * 1024);
    cr_expect_geq(stats.slab_bytes, PAGE);
    cr_expect_eq(stats.live_bytes, stats.slab_bytes + 3 * PAGE);
    cr_expect_gt(stats.hits_slab, 0);
    cr_expect_eq(stats.hits_async, 0);
    cr_expect_eq(world_calls(&s.w, "cuMemAllocFromPoolAsync"), 0);
    shelf_give_all_but(&s, 0);
    stats = stats_of(&s.w);
    cr_expect_eq(stats.frees_slab, 20);
    cr_expect_eq(stats.frees_async, 0);
    cr_expect_eq(stats.requested_bytes, 0);
    audit(&s.w);
    shelf_close(&s);
}

Test(slab, cached_pieces_are_counted)
{
    struct setup setup = slab_setup();
    setup.pool.cache_bytes = 64 * MIB;
    struct shelf s;
    shelf_open(&s, &setup, 1, 64);
    for (int i = 0; i < 40; i++) {
        shelf_take(&s, 1000, 0);
        shelf_give(&s, 0);
    }
    vpmm_stats stats = stats_of(&s.w);
    cr_expect_gt(stats.slab_cached_bytes, 0);
    cr_expect_geq(stats.hits_cache, 30);
    cr_expect_geq(stats.frees_cache, 30);
    audit(&s.w);
    shelf_close(&s);
}

/* A default stream is whichever the current context has: so it is asked for at each hit, and nothing else is. */
static void default_streams_are_hit(size_t bytes)
{
    struct setup setup = slab_setup();
    setup.pool.cache_bytes = 64 * MIB;
    setup.pool.reuse = VPMM_REUSE_COMPLETED;
    struct world w;
    world_open(&w, &setup);
    CUcontext second = NULL;
    cr_assert_eq(w.driver->cuCtxCreate(&second, 0, w.device), CUDA_SUCCESS);
    CUcontext context[2] = {w.context, second};
    CUdeviceptr p[2];
    for (int i = 0; i < 2; i++) {
        cr_assert_eq(w.driver->cuCtxSetCurrent(context[i]), CUDA_SUCCESS);
        for (int warm = 0; warm < 3; warm++) {
            p[i] = take_bytes(&w, bytes, NULL);
            give(&w, p[i], NULL);
        }
        vpmm_stats before = stats_of(&w);
        for (int round = 0; round < 10; round++) {
            cr_expect_eq(take_bytes(&w, bytes, NULL), p[i]);
            give(&w, p[i], NULL);
        }
        vpmm_stats after = stats_of(&w);
        cr_expect_eq(after.hits_cache, before.hits_cache + 10);
        cr_expect_eq(after.frees_cache, before.frees_cache + 10);
        cr_expect_eq(after.driver_calls, before.driver_calls, "a hit asks for no more than the context");
    }
    const CUstream name[2] = {NULL, CU_STREAM_LEGACY};
    for (int round = 0; round < 8; round++) { /* the one handle names another stream in each context */
        CUstream freed_on = name[round >> 1 & 1];
        cr_assert_eq(w.driver->cuCtxSetCurrent(context[round & 1]), CUDA_SUCCESS);
        CUdeviceptr own = take_bytes(&w, bytes, NULL);
        cr_assert_eq(w.driver->cuCtxSetCurrent(context[!(round & 1)]), CUDA_SUCCESS);
        give(&w, take_bytes(&w, bytes, freed_on), freed_on); /* the handle's latest cache is this context's */
        cr_assert_eq(w.driver->cuCtxSetCurrent(context[round & 1]), CUDA_SUCCESS);
        give(&w, own, freed_on);
        cr_assert_eq(w.driver->cuCtxSetCurrent(context[!(round & 1)]), CUDA_SUCCESS);
        CUdeviceptr other = take_bytes(&w, bytes, name[round >> 2]);
        cr_expect_neq(other, own, "memory of the other context's default stream");
        give(&w, other, NULL);
        audit(&w);
    }
    for (int i = 0; i < 2; i++) {
        cr_assert_eq(w.driver->cuCtxSetCurrent(context[i]), CUDA_SUCCESS);
        cr_assert_eq(w.driver->cuCtxSynchronize(), CUDA_SUCCESS);
    }
    world_close_with(&w, second);
}

Test(slab, slices_on_a_default_stream_are_hit_in_its_own_context_only)
{
    needs_simulator();
    default_streams_are_hit(1000);
}

Test(slab, subpages_on_a_default_stream_are_hit_in_its_own_context_only)
{
    needs_simulator();
    default_streams_are_hit(200 * KIB);
}

Test(slab, destroy_refuses_one_live_slice)
{
    struct setup setup = slab_setup();
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr p = take_bytes(&w, SLICE, s);
    must_fail(VPMM_ERROR_BUSY, vpmm_pool_destroy(w.pool));
    audit(&w);
    give(&w, p, s);
    world_close(&w);
}

/* Whatever the pool keeps of slabs that are empty is no reason to refuse; nor is work that is queued. */
static void destroyed_with_empty_slabs(size_t cache_bytes)
{
    struct setup setup = slab_setup();
    setup.pool.cache_bytes = cache_bytes;
    struct shelf s;
    shelf_open(&s, &setup, 2, 512);
    for (int i = 0; i < 500; i++)
        shelf_take(&s, draw_bytes(&s.random, SLICE, 4 * MIB), i % 2);
    shelf_give_all_but(&s, 0);
    audit(&s.w);
    world_close(&s.w);
    free(s.piece);
}

Test(slab, destroy_takes_empty_slabs_back)
{
    destroyed_with_empty_slabs(0);
    destroyed_with_empty_slabs(64 * MIB);
}

/* The stream's end: its pieces are everybody's, and the handle is no longer needed. */
Test(slab, a_released_stream_leaves_its_pieces)
{
    struct setup setup = slab_setup();
    setup.pool.cache_bytes = 64 * MIB;
    struct shelf s;
    shelf_open(&s, &setup, 1, 1000);
    for (int round = 0; round < 8; round++) {
        CUstream passing = world_stream(&s.w);
        s.stream[0] = passing;
        for (int i = 0; i < 100; i++)
            shelf_take(&s, draw_bytes(&s.random, SLICE, MIB), 0);
        shelf_give_all_but(&s, 0);
        must_work(vpmm_stream_release(s.w.pool, passing));
        world_stream_destroy(&s.w, passing);
        audit(&s.w);
    }
    shelf_close(&s);
}

/* --- memory runs out, and the driver refuses ---------------------------------------------------------------------- */

/* The most pages that one request can have of an empty pool. */
static size_t largest_request(struct world *w, size_t most, CUstream s)
{
    CUdeviceptr p = 0;
    size_t pages = most;
    while (pages > 0 && vpmm_malloc(w->pool, pages * PAGE, s, &p) != VPMM_SUCCESS)
        pages--;
    require(pages > 0, "no request is served: %s", vpmm_last_error());
    give(w, p, s);
    world_drain(w);
    must_work(vpmm_trim(w->pool, 0, NULL));
    return pages;
}

static void fill_with_pieces(struct shelf *s)
{
    while (shelf_try(s, draw_bytes(&s->random, SLICE, MIB / 2), (int)draw(&s->random, 2)) != NULL)
        if (s->count % 64 == 0)
            world_step(&s->w);
    require(vpmm_last_error()[0] != 0, "out of memory without a word");
}

static void pieces_fill_the_device(size_t cache_bytes, bool drained)
{
    enum { DEVICE_PAGES = 512 };
    struct setup setup = slab_setup();
    setup.sim.memory_bytes = DEVICE_PAGES * PAGE;
    setup.pool.cache_bytes = cache_bytes;
    struct shelf s;
    shelf_open(&s, &setup, 2, 1 << 17);
    size_t pages = largest_request(&s.w, DEVICE_PAGES, s.stream[0]);
    fill_with_pieces(&s);
    audit(&s.w);
    vpmm_stats stats = stats_of(&s.w);
    cr_expect_geq(stats.requested_bytes, pages * PAGE / 3 * 2, "refused with %llu bytes live, of %zu",
                  (unsigned long long)stats.requested_bytes, pages * PAGE);
    shelf_give_all_but(&s, 0);
    if (drained)
        world_drain(&s.w);
    shelf_take(&s, pages * PAGE, 0); /* all of them */
    audit(&s.w);
    shelf_close(&s);
}

Test(slab, pieces_fill_the_device_and_give_way, .timeout = 300)
{
    needs_simulator();
    pieces_fill_the_device(0, true);
    pieces_fill_the_device(64 * MIB, true);
}

Test(slab, pieces_whose_work_is_queued_give_way, .timeout = 300)
{
    needs_simulator();
    pieces_fill_the_device(0, false);
    pieces_fill_the_device(64 * MIB, false);
}

/* Small requests are served where large free regions hold all of the memory. */
Test(slab, free_pages_give_way_to_pieces)
{
    needs_simulator();
    struct setup setup = slab_setup();
    setup.sim.memory_bytes = 64 * PAGE;
    struct shelf s;
    shelf_open(&s, &setup, 2, 64);
    give(&s.w, take(&s.w, 60, s.stream[0]), s.stream[0]);
    for (int i = 0; i < 50; i++)
        shelf_take(&s, PAGE / 2 + 1, 1);
    audit(&s.w);
    shelf_close(&s);
}

/* Refused once, a call may be made again in another way; from then on, there is none. The pool gets over both. */
static void small_request_meets_a_fault(const char *call, CUresult code, bool from_then_on)
{
    struct setup setup = slab_setup();
    struct shelf s;
    shelf_open(&s, &setup, 1, 8);
    vpmm_stats before = stats_of(&s.w);
    CUdeviceptr p = 0xdead;
    vpmm_sim_fail(s.w.sim, call, 1, code, from_then_on);
    clear_words();
    vpmm_status status = vpmm_malloc(s.w.pool, 1000, s.stream[0], &p);
    bool served = status == VPMM_SUCCESS;
    vpmm_sim_fail(s.w.sim, call, 0, CUDA_SUCCESS, false);
    require(!served || !from_then_on, "%s gives %d, and a small request is served", call, (int)code);
    require(served || (spoke() && p == 0xdead), "an error without words, or with an output");
    audit(&s.w);
    vpmm_stats after = stats_of(&s.w);
    cr_expect_eq(after.requested_bytes, before.requested_bytes + (served ? 1000 : 0));
    cr_expect_eq(after.slab_live_bytes != before.slab_live_bytes, served);
    cr_expect_eq(after.mallocs, before.mallocs + served);
    if (served)
        give(&s.w, p, s.stream[0]);
    shelf_take(&s, 1000, 0);
    shelf_take(&s, 1000000, 0);
    audit(&s.w);
    shelf_close(&s);
}

Test(slab, a_refused_call_costs_one_request)
{
    static const char *const calls[] = {"cuMemCreate", "cuMemMap", "cuMemSetAccess"};
    static const CUresult codes[] = {CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_INVALID_VALUE};
    needs_simulator();
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++)
        for (size_t k = 0; k < sizeof codes / sizeof codes[0]; k++) {
            small_request_meets_a_fault(calls[i], codes[k], false);
            small_request_meets_a_fault(calls[i], codes[k], true);
        }
}

/* --- what is free is used before the pool grows, and before a request fails ----------------------------------------
 */

/* One page, full of slices of 64 KiB of the first stream's. */
static void shelf_open_full(struct shelf *s, int streams, size_t cache_bytes)
{
    struct setup setup = slab_setup();
    setup.pool.max_mapped = PAGE;
    setup.pool.cache_bytes = cache_bytes;
    shelf_open(s, &setup, streams, 64);
    while (s->count < PAGE / (64 * KIB))
        shelf_take(s, 64 * KIB, 0);
    require(stats_of(&s->w).slab_free_bytes == 0, "the page is not full");
}

/* The same of pieces of any length, where no stream waits for another; and the page may be one of more. */
static void shelf_open_filled(struct shelf *s, size_t bytes, size_t cache_bytes)
{
    struct setup setup = slab_setup();
    setup.pool.reuse = VPMM_REUSE_COMPLETED;
    setup.pool.cache_bytes = cache_bytes;
    shelf_open(s, &setup, 2, 512);
    while (s->count == 0 || stats_of(&s->w).slab_free_bytes != 0)
        shelf_take(s, bytes, 0);
}

/* A page full of slices of the first stream's. The second one wants another when one of them is free, and done with. */
Test(slab, slices_that_have_passed_are_taken_before_a_page_is_made)
{
    needs_simulator();
    struct shelf s;
    shelf_open_filled(&s, 8 * KIB, 0);
    uint64_t bytes = stats_of(&s.w).slab_bytes;
    shelf_give(&s, 3);
    vpmm_sim_step(s.w.sim, s.stream[0], SIZE_MAX);
    shelf_take(&s, 8 * KIB, 1);
    cr_expect_eq(stats_of(&s.w).slab_bytes, bytes);
    audit(&s.w);
    shelf_close(&s);
}

static CUresult(CUDAAPI *query_event)(CUevent);
static struct world *asked_world;
static CUstream asked_about;

/* The stream goes on right after the first question. */
static CUresult CUDAAPI query_and_run(CUevent event)
{
    CUresult result = query_event(event);
    vpmm_sim_step(asked_world->sim, asked_about, SIZE_MAX);
    return result;
}

/* A slice of another stream's slab is not even for the stream that has freed it before it has passed. */
Test(slab, a_slice_that_is_about_to_pass_is_waited_for)
{
    needs_simulator();
    struct shelf s;
    shelf_open_filled(&s, 8 * KIB, 0);
    uint64_t bytes = stats_of(&s.w).slab_bytes;
    shelf_give_on(&s, 3, 1);
    vpmm_sim_step(s.w.sim, s.stream[0], SIZE_MAX);
    asked_world = &s.w;
    asked_about = s.stream[1];
    query_event = s.w.pool->device.driver.cuEventQuery;
    s.w.pool->device.driver.cuEventQuery = query_and_run;
    shelf_take(&s, 8 * KIB, 1);
    s.w.pool->device.driver.cuEventQuery = query_event;
    cr_expect_eq(stats_of(&s.w).slab_bytes, bytes);
    audit(&s.w);
    shelf_close(&s);
}

/*
 * A page full of pieces, of which the thread has neighbours in its cache; and another stream has not passed. What
 * leaves the cache is marked, and that mark alone is asked about.
 */
Test(slab, what_the_caches_hold_is_found_without_asking_others)
{
    needs_simulator();
    struct shelf s;
    shelf_open_filled(&s, 128 * KIB, 8 * PAGE);
    CUdeviceptr long_one = take(&s.w, 64, s.stream[1]);
    keep_busy(&s.w, s.stream[1]);
    give(&s.w, long_one, s.stream[1]);
    while (s.count > 12)
        shelf_give(&s, s.count - 1);
    uint64_t questions = vpmm_sim_calls(s.w.sim, "cuEventQuery");
    shelf_take(&s, 256 * KIB, 0);
    cr_expect_leq(vpmm_sim_calls(s.w.sim, "cuEventQuery"), questions + 1);
    audit(&s.w);
    world_step(&s.w);
    shelf_close(&s);
}

/* Another stream's slab has a slice that its work is not done with: there is nothing else to wait for. */
Test(slab, a_slice_of_another_stream_is_waited_for_before_a_request_fails)
{
    needs_simulator();
    struct shelf s;
    shelf_open_full(&s, 2, 0);
    keep_busy(&s.w, s.stream[0]);
    shelf_give(&s, 3);
    shelf_take(&s, 64 * KIB, 1);
    audit(&s.w);
    must_fail(VPMM_ERROR_OUT_OF_MEMORY, vpmm_malloc(s.w.pool, 64 * KIB, s.stream[1], &(CUdeviceptr){0}));
    cr_expect_eq(stats_of(&s.w).out_of_memory, 1);
    shelf_close(&s);
}

/* The stream's own slab, and what is deferred for another stream's work. */
Test(slab, a_deferred_slice_is_waited_for_before_a_request_fails)
{
    needs_simulator();
    struct shelf s;
    shelf_open_full(&s, 2, 0);
    keep_busy(&s.w, s.stream[1]);
    shelf_give_on(&s, 3, 1);
    shelf_take(&s, 64 * KIB, 0);
    audit(&s.w);
    shelf_close(&s);
}

/* What is as long as what is wanted, and lies where it may begin, is waited for on the device: the host goes on. */
Test(slab, an_aligned_region_that_just_fits_is_waited_for)
{
    needs_simulator();
    struct setup setup = slab_setup();
    setup.pool.max_mapped = PAGE;
    setup.pool.cache_bytes = 0;
    struct shelf s;
    shelf_open(&s, &setup, 2, 64);
    while (s.count < PAGE / (128 * KIB))
        shelf_take(&s, 128 * KIB, 0);
    world_step(&s.w);
    keep_busy(&s.w, s.stream[0]);
    shelf_give(&s, 3);
    shelf_take(&s, 128 * KIB, 1);
    cr_expect(world_pending(&s.w, s.stream[0]), "the host has waited for the stream");
    audit(&s.w);
    shelf_close(&s);
}

enum { SHARER_PAIRS = 200000 };

struct sharer {
    struct world *w;
    CUstream stream;
    pthread_t thread;
    size_t refused;
};

static void *share_the_last(void *argument)
{
    struct sharer *sharer = argument;
    CUdeviceptr p;
    for (int i = 0; i < SHARER_PAIRS; i++)
        if (vpmm_malloc(sharer->w->pool, 32 * KIB, sharer->stream, &p) != VPMM_SUCCESS)
            sharer->refused++;
        else
            vpmm_free(sharer->w->pool, p, sharer->stream);
    return NULL;
}

/*
 * As many slices are left as there are threads, each of which has one at a time. A request that a busy machine keeps
 * from all of them for 10 ms may fail; where slices in other hands are missed some four of 1,000 do.
 */
Test(slab, threads_share_the_last_slices, .timeout = 300)
{
    enum { THREADS = 4 };
    needs_simulator();
    struct setup setup = slab_setup();
    setup.sim.stepped = false;
    setup.pool.max_mapped = PAGE;
    setup.pool.cache_bytes = 0;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr wall = take_bytes(&w, PAGE - THREADS * 32 * KIB, s);
    struct sharer sharer[THREADS];
    for (int i = 0; i < THREADS; i++)
        sharer[i] = (struct sharer){.w = &w, .stream = world_stream(&w)};
    for (int i = 0; i < THREADS; i++)
        cr_assert_eq(pthread_create(&sharer[i].thread, NULL, share_the_last, &sharer[i]), 0);
    size_t refused = 0;
    for (int i = 0; i < THREADS; i++) {
        pthread_join(sharer[i].thread, NULL);
        refused += sharer[i].refused;
    }
    cr_expect_lt(refused, THREADS * SHARER_PAIRS / 10000, "%zu requests have failed", refused);
    give(&w, wall, s);
    world_close(&w);
}

/* A slab becomes empty when there is no more to be had. */
Test(slab, subpages_of_an_emptied_slab_are_taken_before_a_request_fails)
{
    needs_simulator();
    struct shelf s;
    shelf_open_full(&s, 2, 0);
    keep_busy(&s.w, s.stream[0]);
    shelf_give(&s, 1);
    shelf_give(&s, 0);
    shelf_take(&s, 100 * KIB, 1);
    audit(&s.w);
    shelf_close(&s);
}

/* The page that slabs of slices leave is another stream's after the work on them. */
Test(slab, an_emptied_slab_of_slices_waits_for_the_work_on_them)
{
    needs_simulator();
    struct shelf s;
    shelf_open_full(&s, 2, 0);
    shelf_give_all_but(&s, 0);
    CUdeviceptr page = take(&s.w, 1, s.stream[1]);
    fill(&s.w, page, 1, 7, s.stream[1]);
    expect_later(&s.w, page, 1, 7, s.stream[1]);
    vpmm_sim_step(s.w.sim, s.stream[1], SIZE_MAX);
    world_step(&s.w);
    audit(&s.w);
    give(&s.w, page, s.stream[1]);
    shelf_close(&s);
}

/* A slab of memory that its stream was made to wait for has not passed for a third one, whatever is free in it. */
Test(slab, a_slab_of_memory_that_is_waited_for_is_not_adopted)
{
    needs_simulator();
    struct setup setup = slab_setup();
    setup.pool.cache_bytes = 0;
    struct shelf s;
    shelf_open(&s, &setup, 3, 64);
    shelf_take(&s, PAGE - 8 * KIB, 0);
    shelf_give(&s, 0);
    shelf_take(&s, 64 * KIB, 1);
    shelf_take(&s, 64 * KIB, 2);
    vpmm_sim_step(s.w.sim, s.stream[2], SIZE_MAX);
    vpmm_sim_step(s.w.sim, s.stream[1], SIZE_MAX);
    world_step(&s.w);
    audit(&s.w);
    shelf_close(&s);
}

/* A slab whose slices have passed becomes another stream's, and is counted then. */
Test(slab, a_slab_that_is_adopted_is_counted)
{
    struct setup setup = slab_setup();
    setup.pool.cache_bytes = 0;
    setup.pool.reuse = VPMM_REUSE_COMPLETED;
    struct world w;
    world_open(&w, &setup);
    CUstream one = world_stream(&w), other = world_stream(&w);
    CUdeviceptr kept = take_bytes(&w, 1000, one);
    give(&w, take_bytes(&w, 1000, one), one);
    world_drain(&w);
    cr_expect_eq(stats_of(&w).adoptions, 0);
    CUdeviceptr p = take_bytes(&w, 1000, other);
    cr_expect_eq(stats_of(&w).adoptions, 1);
    give(&w, p, other);
    give(&w, kept, one);
    world_close(&w);
}

/* Neither a page of free subpages nor an empty slab stands beside a page that is built. */
static void page_after_a_piece(size_t bytes)
{
    struct setup setup = slab_setup();
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    give(&w, take_bytes(&w, bytes, s), s);
    world_drain(&w);
    CUdeviceptr page = take(&w, 1, s);
    cr_expect_eq(stats_of(&w).mapped_bytes, PAGE, "after %zu bytes the pool grows", bytes);
    audit(&w);
    give(&w, page, s);
    world_close(&w);
}

Test(slab, free_subpages_are_pages_before_the_pool_grows)
{
    page_after_a_piece(100 * KIB);
    page_after_a_piece(1000);
}

struct other_thread {
    struct world *w;
    CUstream stream;
    CUdeviceptr p[PAGE / (8 * 1024)];
    size_t kept;
};

/* Takes a page of slices, and leaves every eighth in its cache. */
static void *leave_some_in_the_cache(void *data)
{
    struct other_thread *t = data;
    t->w->driver->cuCtxSetCurrent(t->w->context);
    for (size_t i = 0; i < PAGE / (8 * KIB); i++)
        if (vpmm_malloc(t->w->pool, 8 * KIB, t->stream, &t->p[i]) != VPMM_SUCCESS)
            return t;
    for (size_t i = 0; i < PAGE / (8 * KIB); i++)
        if (i % 8 != 0)
            t->p[t->kept++] = t->p[i];
        else if (vpmm_free(t->w->pool, t->p[i], t->stream) != VPMM_SUCCESS)
            return t;
    return NULL;
}

Test(slab, slices_cached_by_another_thread_are_taken_before_the_pool_grows)
{
    struct setup setup = slab_setup();
    setup.pool.cache_bytes = 64 * MIB;
    struct world w;
    world_open(&w, &setup);
    struct other_thread other = {.w = &w, .stream = world_stream(&w)};
    give(&w, take_bytes(&w, 8 * KIB, other.stream), other.stream); /* this thread has a front of its own */
    must_work(vpmm_trim(w.pool, 0, NULL));
    pthread_t thread;
    void *failed;
    pthread_create(&thread, NULL, leave_some_in_the_cache, &other);
    pthread_join(thread, &failed);
    require(failed == NULL, "the other thread fails");
    CUdeviceptr p[16];
    for (int i = 0; i < 16; i++)
        p[i] = take_bytes(&w, 8 * KIB, other.stream);
    cr_expect_eq(stats_of(&w).mapped_bytes, PAGE);
    audit(&w);
    for (int i = 0; i < 16; i++)
        give(&w, p[i], other.stream);
    for (size_t i = 0; i < other.kept; i++)
        give(&w, other.p[i], other.stream);
    world_close(&w);
}

/*
 * --- behind what can be cut: the first TiB of a chunk, which is made two pages here ---------------------------------
 */

static uint64_t units_that_can_be_cut;

static CUstream open_where_two_pages_can_be_cut(struct world *w)
{
    struct setup setup = slab_setup();
    setup.pool.cache_bytes = 0; /* from which pages would be taken, wherever they are */
    world_open(w, &setup);
    CUstream s = world_stream(w);
    give(w, take(w, 4, s), s); /* the chunk is there */
    world_step(w);
    must_work(vpmm_trim(w->pool, 0, NULL));
    cr_assert_eq(stats_of(w).mapped_bytes, 0);
    struct space *cut = &w->pool->arena.cut;
    units_that_can_be_cut = cut->units.chunk_units;
    cut->units.chunk_units = 2 * cut->page_subpages;
    return s;
}

static void close_where_two_pages_can_be_cut(struct world *w)
{
    world_step(w);
    must_work(vpmm_trim(w->pool, 0, NULL));
    w->pool->arena.cut.units.chunk_units = units_that_can_be_cut; /* by which its table is given back */
    world_close(w);
}

/* A small request is given the pages whole. */
Test(slab, behind_what_can_be_cut_small_requests_get_pages)
{
    struct world w;
    CUstream s = open_where_two_pages_can_be_cut(&w);
    CUdeviceptr before = take(&w, 2, s);
    static const size_t bytes[] = {1000, 200 * KIB, 1100 * KIB, 2500 * KIB, 5000};
    enum { SMALL = sizeof bytes / sizeof bytes[0] };
    CUdeviceptr small[SMALL];
    uint64_t pages = 2;
    for (size_t i = 0; i < SMALL; i++) {
        small[i] = take_bytes(&w, bytes[i], s);
        pages += (bytes[i] + PAGE - 1) / PAGE;
        cr_expect_eq(stats_of(&w).live_bytes, pages * PAGE);
        fill(&w, small[i], 1, (uint32_t)i, s);
        audit(&w);
    }
    for (size_t i = 0; i < SMALL; i++) {
        expect_later(&w, small[i], 1, (uint32_t)i, s);
        give(&w, small[i], s);
    }
    give(&w, before, s);
    close_where_two_pages_can_be_cut(&w);
}

/* Subpages at the end are not extended by pages that cannot be cut. */
Test(slab, behind_what_can_be_cut_no_page_extends_subpages)
{
    struct world w;
    CUstream s = open_where_two_pages_can_be_cut(&w);
    CUdeviceptr piece = take_bytes(&w, PAGE / 2, s);
    cr_assert_eq(stats_of(&w).slab_bytes, PAGE);
    CUdeviceptr pages = take(&w, 2, s);
    cr_assert_eq(pages, piece + PAGE);
    give(&w, pages, s);
    CUdeviceptr longer = take_bytes(&w, 2 * PAGE + PAGE / 2, s);
    cr_expect_eq(stats_of(&w).slab_bytes, PAGE);
    audit(&w);
    give(&w, longer, s);
    give(&w, piece, s);
    close_where_two_pages_can_be_cut(&w);
}
