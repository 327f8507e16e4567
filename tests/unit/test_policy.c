/*
 * Where memory is placed, and of what: tables of what the policy is shown and what it then says, and what holds of
 * every plan, over random memory.
 *
 * Memory is written as a map, from page 0 on:
 *   3      live pages
 *   *20    a hole
 *   (...)  a free run, of extents that lie wholly in it, 4, and of stuck pages, s2; 1x5 is 1 1 1 1 1
 *   [...]  the same of memory that the request's stream would have to wait for
 * A plan is written with runs and extents numbered from 0, from the left: "up 1: move 0 3..5, create 4 5x2". What the
 * driver makes at least, a step, is 2 MiB, and so is a page, but where a test says how many of them a step has.
 *
 * VPMM_TEST_SEED  of the first random map; a failure prints the map's own
 */
#include <criterion/criterion.h>
#include <ctype.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "remap/policy.h"

enum { CELLS = 16384, MAPS = 6000, LOOKED_AT = 32 };
enum { HOLE = 0, STUCK = 1, FIRST_EXTENT = 2 }; /* what a page belongs to */

static const uint64_t STEP_BYTES = UINT64_C(2) << 20, NO_CAP = UINT64_MAX;

static uint32_t step = 1; /* pages; a test that wants more sets it first */

/* Made where it fails alone: each assertion is a message to the tests' runner, and these are a million. */
#define check(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            cr_assert_fail(__VA_ARGS__);                                                                               \
    } while (0)

/*
 * The map: for each page the extent that it belongs to, and whether it is live. The view is made from that.
 */
struct cell {
    uint32_t extent;
    bool live, waits;
};

struct map {
    struct cell cell[CELLS];
    uint32_t cells, extents;
    struct policy_run run[CELLS];
    struct policy_extent extent[CELLS];
    struct policy_hole hole[CELLS];
    struct policy_view view;
};

static void map_clear(struct map *m)
{
    m->cells = 0;
    m->extents = FIRST_EXTENT;
}

static void map_add(struct map *m, uint32_t pages, struct cell cell)
{
    check(m->cells + pages <= CELLS, "a map has at most %d pages", (int)CELLS);
    for (uint32_t i = 0; i < pages; i++)
        m->cell[m->cells++] = cell;
}

static bool is_free(const struct map *m, uint32_t page)
{
    return page < m->cells && m->cell[page].extent != HOLE && !m->cell[page].live;
}

static bool is_hole(const struct map *m, uint32_t page)
{
    return page < m->cells && m->cell[page].extent == HOLE;
}

static uint32_t end_of_extent(const struct map *m, uint32_t page)
{
    uint32_t end = page;
    while (end < m->cells && m->cell[end].extent == m->cell[page].extent)
        end++;
    return end;
}

static void view_extents(struct map *m, struct policy_run *run, uint32_t index)
{
    uint32_t first = (uint32_t)run->page, last = first + run->pages;
    run->first_extent = (uint32_t)m->view.extents;
    for (uint32_t page = first, end; page < last; page = end) {
        end = end_of_extent(m, page);
        bool whole = end <= last && (page == 0 || m->cell[page - 1].extent != m->cell[page].extent);
        if (whole && m->cell[page].extent != STUCK)
            m->extent[m->view.extents++] = (struct policy_extent){page, end - page, index};
    }
    run->extents = (uint32_t)m->view.extents - run->first_extent;
}

static uint32_t view_run(struct map *m, uint32_t page)
{
    struct policy_run *run = &m->run[m->view.runs];
    *run = (struct policy_run){.page = page, .waits = m->cell[page].waits};
    while (is_free(m, page + run->pages) && m->cell[page + run->pages].waits == run->waits)
        run->pages++;
    while (is_hole(m, page + run->pages + run->hole_after))
        run->hole_after++;
    while (run->hole_before < page && is_hole(m, page - run->hole_before - 1))
        run->hole_before++;
    view_extents(m, run, (uint32_t)m->view.runs++);
    return page + run->pages;
}

static uint32_t view_hole(struct map *m, uint32_t page)
{
    uint32_t end = end_of_extent(m, page);
    m->hole[m->view.holes++] = (struct policy_hole){page, end - page};
    return end;
}

static const struct policy_view *map_view(struct map *m, uint64_t creatable)
{
    m->view = (struct policy_view){.run = m->run,
                                   .extent = m->extent,
                                   .hole = m->hole,
                                   .creatable_pages = creatable,
                                   .longest_handle = UINT32_MAX,
                                   .slowness = 1};
    for (uint32_t i = 0; i < m->cells; i++)
        m->view.mapped_pages += m->cell[i].extent != HOLE;
    for (uint32_t page = 0; page < m->cells;)
        page = is_hole(m, page) ? view_hole(m, page) : is_free(m, page) ? view_run(m, page) : page + 1;
    return &m->view;
}

/* `in`: ( or [, whose run the word is in; ) or ]: it is in none. */
static const char *read_word(struct map *m, const char *text, char in)
{
    bool in_run = in == '(' || in == '[';
    char kind = *text == '*' || *text == 's' ? *text++ : 0, *end;
    uint32_t pages = (uint32_t)strtoul(text, &end, 10), times = 1;
    cr_assert(end != text, "a map goes on with '%s'", text);
    if (*end == 'x')
        times = (uint32_t)strtoul(end + 1, &end, 10);
    for (; times > 0; times--)
        map_add(m, pages,
                (struct cell){.extent = kind == '*'   ? HOLE
                                        : kind == 's' ? STUCK
                                                      : m->extents++,
                              .live = !in_run && kind != '*',
                              .waits = in == '['});
    return end;
}

static const struct policy_view *map_read(struct map *m, const char *text, uint64_t creatable)
{
    char in = ')';
    map_clear(m);
    while (*text) {
        if (isdigit((unsigned char)*text) || *text == '*' || *text == 's') {
            text = read_word(m, text, in);
            continue;
        }
        if (strchr("()[]", *text))
            in = *text;
        text++;
    }
    return map_view(m, creatable);
}

/*
 * A plan as text.
 */
struct words {
    char text[4096];
    size_t length;
};

__attribute__((format(printf, 2, 3))) static void say(struct words *w, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int more = vsnprintf(w->text + w->length, sizeof w->text - w->length, format, arguments);
    va_end(arguments);
    cr_assert(more >= 0 && w->length + (size_t)more < sizeof w->text);
    w->length += (size_t)more;
}

static void say_moves(struct words *w, const struct policy_plan *plan)
{
    say(w, " move");
    for (size_t i = 0, next; i < plan->moves; i = next) {
        for (next = i + 1; next < plan->moves && plan->move[next] == plan->move[next - 1] + 1;)
            next++;
        say(w, " %" PRIu32, plan->move[i]);
        if (next > i + 1)
            say(w, "..%" PRIu32, plan->move[next - 1]);
    }
}

static void say_creates(struct words *w, const struct policy_plan *plan)
{
    say(w, " create");
    for (size_t i = 0, next; i < plan->creates; i = next) {
        for (next = i + 1; next < plan->creates && plan->create[next] == plan->create[i];)
            next++;
        say(w, " %" PRIu32, plan->create[i]);
        if (next > i + 1)
            say(w, "x%zu", next - i);
    }
}

static void say_place(struct words *w, const struct policy_plan *plan)
{
    switch (plan->place) {
    case POLICY_FRESH:
        say(w, "fresh %" PRIu64 ":", plan->page);
        break;
    case POLICY_EXTEND_UP:
        say(w, "up %zu:", plan->run);
        break;
    case POLICY_EXTEND_DOWN:
        say(w, "down %zu:", plan->run);
        break;
    case POLICY_NO_HOLE:
        say(w, "no hole");
        break;
    case POLICY_NO_MEMORY:
        say(w, "no memory");
        break;
    }
}

static struct words words_of(const struct policy_plan *plan)
{
    struct words w = {.length = 0};
    say_place(&w, plan);
    if (plan->place >= POLICY_NO_HOLE)
        return w;
    if (plan->moves)
        say_moves(&w, plan);
    if (plan->moves && plan->creates)
        say(&w, ",");
    if (plan->creates)
        say_creates(&w, plan);
    return w;
}

/*
 * The prices, as the policy's comments state them: microseconds of the driver, between those measured on a
 * line, and beyond the largest on the last line.
 */
struct measured {
    double mib, us;
};

static const struct measured creating[] = {{2, 5.7}, {32, 7.7}, {256, 12}, {1024, 29}, {8192, 114}};
static const struct measured allowing[] = {{2, 18}, {32, 21}, {128, 25}, {256, 31}, {1024, 51}};
static const double mapping = 0.45;

static const double created_step = 20, slow = 900, waiter = 0.2, much_idle = 0.1;

#define MEASURED(of, pages) measured(of, sizeof(of) / sizeof *(of), (double)(pages)*2 / step)

static double measured(const struct measured *of, size_t n, double mib)
{
    size_t left = n - 2;
    while (left > 0 && of[left].mib >= mib)
        left--;
    const struct measured *a = of + left, *b = a + 1;
    return mib < a->mib ? a->us : a->us + (b->us - a->us) * ((mib - a->mib) / (b->mib - a->mib));
}

static double us_to_move(uint32_t pages)
{
    return mapping + MEASURED(allowing, pages);
}

static double us_to_create(uint32_t pages)
{
    return MEASURED(creating, pages) + us_to_move(pages);
}

static uint32_t moved_pages(const struct policy_view *v, const struct policy_plan *plan)
{
    uint32_t pages = 0;
    for (size_t i = 0; i < plan->moves; i++)
        pages += v->extent[plan->move[i]].pages;
    return pages;
}

static uint32_t created_pages(const struct policy_plan *plan)
{
    uint32_t pages = 0;
    for (size_t i = 0; i < plan->creates; i++)
        pages += plan->create[i];
    return pages;
}

static double moving_us(const struct policy_view *v, const struct policy_plan *plan)
{
    double us = 0;
    for (size_t i = 0; i < plan->moves; i++)
        us += us_to_move(v->extent[plan->move[i]].pages);
    return us;
}

/* cost_us: each extent that is mapped, and before that made. */
static double driver_us(const struct policy_view *v, const struct policy_plan *plan)
{
    double us = 0;
    for (size_t i = 0; i < plan->creates; i++)
        us += us_to_create(plan->create[i]);
    return us + moving_us(v, plan);
}

/* ---- tables ---- */

struct row {
    const char *map;
    uint64_t creatable;
    uint32_t pages;
    const char *plan;
};

/* Of the view, but for the map. */
struct builders {
    bool several;
    uint32_t waiters;
    double slowness;
};

static void table(const struct row *row, size_t rows, uint32_t max_extent, struct builders builders)
{
    static struct map m;
    struct policy_plan plan = {0};
    for (size_t i = 0; i < rows; i++) {
        struct policy p;
        policy_init(&p, STEP_BYTES / step, step, max_extent);
        struct policy_view view = *map_read(&m, row[i].map, row[i].creatable);
        view.several_builders = builders.several;
        view.waiters = builders.waiters;
        view.slowness = builders.slowness;
        cr_assert(policy_plan(&p, &view, row[i].pages, &plan));
        struct words w = words_of(&plan);
        cr_expect_str_eq(w.text, row[i].plan, "%" PRIu32 " pages in '%s': %s, not %s", row[i].pages, row[i].map, w.text,
                         row[i].plan);
        policy_destroy(&p);
    }
    policy_plan_free(&plan);
}

#define TABLE_OF(max_extent, builders, ...)                                                                            \
    do {                                                                                                               \
        const struct row rows[] = {__VA_ARGS__};                                                                       \
        table(rows, sizeof rows / sizeof *rows, max_extent, builders);                                                 \
    } while (0)

static const struct builders one_builder = {.slowness = 1}, two_builders = {.several = true, .slowness = 1};

#define TABLE(max_extent, ...) TABLE_OF(max_extent, one_builder, __VA_ARGS__)

Test(policy, a_run_is_extended_where_it_can_be)
{
    TABLE(0,
          /* Rule 1: the missing pages alone are mapped, after the run or before it. */
          {"1 (s4) *20 1", NO_CAP, 10, "up 0: create 6"}, {"1 *20 (s4) 1", NO_CAP, 10, "down 0: create 6"},
          /* After it, if both will do; before it, if that alone will. */
          {"*20 (s4) *20", NO_CAP, 10, "up 0: create 6"}, {"*20 (s4) *5 1", NO_CAP, 10, "down 0: create 6"},
          /* The hole may be filled to its last page, and not be a page too short. */
          {"1 (s4) *6 1", NO_CAP, 10, "up 0: create 6"}, {"1 (s4) *5 1", NO_CAP, 10, "no hole"},
          {"1 *6 (s4) 1", NO_CAP, 10, "down 0: create 6"}, {"1 *5 (s4) *5 1", NO_CAP, 10, "no hole"},
          /* Where no hole beside a run is long enough the place is a fresh one. */
          {"*5 (s4) *5 1 *30", NO_CAP, 10, "fresh 15: create 10"},
          /* Of equals the lower. */
          {"1 (s4) *20 1 (s4) *20 1", NO_CAP, 10, "up 0: create 6"},
          /* The one that misses less, since a page created is dear. */
          {"1 (s4) *20 1 (s5) *20 1", NO_CAP, 10, "up 1: create 5"},
          /* Into room that has too little for the longer extent the other side is better than nothing. */
          {"1 *40 (s10) *5 1 (8) 1", 0, 15, "down 0: move 0"});
}

Test(policy, missing_pages_are_moved_covered_or_created)
{
    TABLE(0,
          /* Rule 2: an extent of just the missing pages. What the extended run has itself stays where it is. */
          {"1 (s4) *20 1 (6) 1", NO_CAP, 10, "up 0: move 0"}, {"1 (s4 3) *20 1 (6) 1", NO_CAP, 13, "up 0: move 1"},
          /* The longest first, in the order of their addresses; of equals the lower. */
          {"1 (s4) *20 1 (2 5 3) 1", NO_CAP, 12, "up 0: move 1..2"},
          {"1 (s4) *20 1 (5) 1 (5) 1", NO_CAP, 9, "up 0: move 0"},
          {"1 (s1) *3000 1 (4 2048 5) 1", 0, 2054, "up 0: move 1..2"},
          /* A longer one covers what is left, as far as there is room for its surplus, and the shortest such. */
          {"1 (s4) *20 1 (6) 1", NO_CAP, 8, "up 0: move 0"}, {"1 (s4) *6 1 (6) 1", NO_CAP, 8, "up 0: move 0"},
          {"1 (s4) *5 1 (6) 1", NO_CAP, 8, "up 0: create 4"}, {"1 (s4) *9 1 (9 6 7) 1", NO_CAP, 8, "up 0: move 1"},
          {"1 (s4) *20 1 (6) 1 (6) 1", NO_CAP, 13, "up 0: move 0..1"},
          /* Also if the run that is extended has a longer one too, which is no candidate (found by this table). */
          {"1 (s15 15) *30 1 (20) 1", 0, 40, "up 0: move 1"},
          /* To a fresh place everything may go. */
          {"1 (s1 5) 1 (6) 1 *300", NO_CAP, 11, "fresh 15: move 0..1"});
}

Test(policy, each_price_counts)
{
    TABLE(
        0,
        /* A page created is worth 20 us, so memory that may move at once does, be it in pages: 55 us for three moves of
             a page, and 25 + 60 for three pages made at once. */
        {"1 (s4) *20 1 (1x3) 1", NO_CAP, 7, "up 0: move 0..2"}, {"1 (s4) *20 1 (2x3) 1", NO_CAP, 10, "up 0: move 0..2"},
        /* A page of surplus has no price beside the driver's time: for one page 370 too many are moved (44.11 against
             44.15), and 371 are not (44.16). Of equals it is the fresh place. */
        {"1 (s4) *400 1 (371) 1", NO_CAP, 5, "fresh 5: move 0"}, {"1 (s4) *400 1 (372) 1", NO_CAP, 5, "up 0: create 1"},
        /* Nor has a stuck page that is put to use: the shorter extent moves, and of equals the lower run stays. */
        {"1 (8) *9 1 (s2 6) *9 1", NO_CAP, 12, "up 0: move 1"}, {"1 (8) *9 1 (s2 8) *9 1", NO_CAP, 12, "up 0: move 1"},
        /* A shorter run is looked at past nine longer ones, beside which the extent that is free has no room. */
        {"1 (s8) *2 1 (s8) *2 1 (s8) *2 1 (s8) *2 1 (s8) *2 1 (s8) *2 1 (s8) *2 1 (s8) *2 1 (s8) *2 1 (s6) *4 1 (4) 1",
         NO_CAP, 10, "up 9: move 0"},
        /* Each of 60 moves of three pages is cheaper than three pages made, however long all of them take. */
        {"1 (s4) *190 1 (3x60) 1", NO_CAP, 184, "up 0: move 0..59"});
}

Test(policy, growth_is_cut_into_equal_pieces)
{
    TABLE(0,
          /* Rule 3: of 40 pages while nothing is stuck, a page more or less. */
          {"*1000", NO_CAP, 40, "fresh 0: create 40"}, {"*1000", NO_CAP, 41, "fresh 0: create 20 21"},
          {"*1000", NO_CAP, 80, "fresh 0: create 40x2"}, {"*1000", NO_CAP, 81, "fresh 0: create 27x3"},
          /* Of 10 when 2 % and more is stuck, and between the two on a line. */
          {"97 (s2) 1 *1000", NO_CAP, 40, "fresh 100: create 10x4"},
          {"90 (s9) 1 *1000", NO_CAP, 40, "fresh 100: create 10x4"},
          {"98 (s1) 1 *1000", NO_CAP, 50, "fresh 100: create 25x2"},
          {"198 (s1) 1 *1000", NO_CAP, 64, "fresh 200: create 32x2"},
          /* Of more pages where so many would take one malloc beyond 900 us. */
          {"97 (s2) 1 *1000", NO_CAP, 310, "fresh 100: create 10x31"},
          {"97 (s2) 1 *1000", NO_CAP, 500, "fresh 100: create 16x10 17x20"},
          /* Growth is not rounded up, and goes as far as the cap leaves pages. */
          {"*1000", 7, 7, "fresh 0: create 7"}, {"*1000", 6, 7, "no memory"});
    TABLE(4, /* None is longer than the largest handle, whatever time that takes. */
          {"*1000", NO_CAP, 4, "fresh 0: create 4"}, {"*1000", NO_CAP, 10, "fresh 0: create 3x2 4"},
          {"*1000", NO_CAP, 400, "fresh 0: create 4x100"});
}

/* Rule 9. */
Test(policy, a_slow_driver_leaves_time_for_fewer_pieces)
{
    TABLE_OF(0, ((struct builders){.slowness = 3}), {"97 (s2) 1 *1000", NO_CAP, 310, "fresh 100: create 34x5 35x4"},
             {"97 (s2) 1 *1000", NO_CAP, 110, "fresh 100: create 10x11"},
             {"97 (s2) 1 *1000", NO_CAP, 120, "fresh 100: create 12x10"});
}

/* Rule 10: each of the first 16 makes the driver's time dearer by a fifth. */
/* Beside so much that is live what is free is next to nothing: see rule 11. */
#define LIVE "10000"

Test(policy, who_waits_pays_for_the_driver_s_time)
{
    TABLE_OF(0, ((struct builders){.slowness = 1, .waiters = 4}),
             {LIVE " (s4) *20 1 (1x3) 1", NO_CAP, 7, "up 0: move 0..2"});
    TABLE_OF(0, ((struct builders){.slowness = 1, .waiters = 5}),
             {LIVE " (s4) *20 1 (1x3) 1", NO_CAP, 7, "up 0: create 3"});
    /* More than 16 count as so many: 4.2 times 37 us against 4.2 times 25 and 100; of eight times each it were less. */
    TABLE_OF(0, ((struct builders){.slowness = 1, .waiters = 60}),
             {LIVE " (s4) *20 1 (2) 1 (3) 1", NO_CAP, 9, "up 0: move 0..1"});
}

/* Rule 11: of a tenth of what is mapped and more none of that counts, of less a part. */
Test(policy, where_much_lies_idle_it_is_moved_whoever_waits)
{
    TABLE_OF(0, ((struct builders){.slowness = 1, .waiters = 16}),
             {"26 (s1) *20 1 (1x3) 1", NO_CAP, 4, "up 0: move 0..2"}, /* 3 of 32 */
             {"29 (s1) *20 1 (1x3) 1", NO_CAP, 4, "up 0: move 0..2"}, /* of 35: 81 us against 96 */
             {"40 (s1) *20 1 (1x3) 1", NO_CAP, 4, "up 0: create 3"});
}

/* What is left of a plan; the words of one that is as it was begin with "all: ". */
static void expect_put_off(struct builders builders, uint32_t max_extent, const char *map, uint32_t pages,
                           const char *rest)
{
    static struct map m;
    struct policy_plan plan = {0};
    struct policy p;
    policy_init(&p, STEP_BYTES / step, step, max_extent);
    struct policy_view view = *map_read(&m, map, NO_CAP);
    view.several_builders = builders.several;
    view.slowness = builders.slowness;
    cr_assert(policy_plan(&p, &view, pages, &plan));
    bool is_put_off = policy_put_growth_off(&p, &view, &plan);
    struct words w = words_of(&plan);
    cr_expect_eq(is_put_off, strncmp(rest, "all: ", 5) != 0, "%" PRIu32 " pages in '%s': %s", pages, map, w.text);
    cr_expect_str_eq(w.text, is_put_off ? rest : rest + 5);
    cr_expect_float_eq(plan.cost_us, driver_us(&view, &plan), 1e-6);
    policy_destroy(&p);
    policy_plan_free(&plan);
}

/* Rule 12: a page takes 18.45 us to move, so 49 of them 904, however slow the driver is. */
Test(policy, what_is_made_after_long_moves_is_put_off)
{
    const struct builders slow_driver = {.several = true, .slowness = 2};
    expect_put_off(two_builders, 0, "1 (s2) *400 1 (1x49) 1", 60, "up 0: move 0..48");
    expect_put_off(two_builders, 0, "1 (s2) *400 1 (1x48) 1", 60, "all: up 0: move 0..47, create 10");
    expect_put_off(slow_driver, 0, "1 (s2) *400 1 (1x49) 1", 60, "up 0: move 0..48");
    expect_put_off(slow_driver, 0, "1 (s2) *400 1 (1x48) 1", 60, "all: up 0: move 0..47, create 10");
    /* Nobody else frees, or nothing is made, or it is the specification's mode. */
    expect_put_off(one_builder, 0, "1 (s2) *400 1 (1x49) 1", 60, "all: up 0: move 0..48, create 9");
    expect_put_off(two_builders, 0, "1 (s2) *400 1 (1x60) 1", 60, "all: up 0: move 0..57");
    expect_put_off(two_builders, 1, "1 (1x2) *400 1 (1x49) 1", 52, "all: up 0: move 2..50, create 1");
}

/* Rule 4: however short the time, a piece has at most 48 pages, or a 64th of the growth. */
Test(policy, no_piece_is_longer_than_can_be_used_again)
{
    TABLE(0, {"*8000", NO_CAP, 1536, "fresh 0: create 48x32"}, {"*8000", NO_CAP, 3072, "fresh 0: create 48x64"},
          {"*8000", NO_CAP, 6144, "fresh 0: create 96x64"});
}

/* Pages of 256 KiB: what is created is a multiple of eight, and as long in bytes as of other pages. */
Test(policy, what_the_driver_makes_is_whole_steps)
{
    step = 8;
    TABLE(0, {"*80", NO_CAP, 3, "fresh 0: create 8"}, {"*80", NO_CAP, 9, "fresh 0: create 16"},
          /* To the end of the hole, and of the cap. */
          {"*8", NO_CAP, 8, "fresh 0: create 8"}, {"*8 8 *16", NO_CAP, 9, "fresh 16: create 16"},
          {"*80", 16, 9, "fresh 0: create 16"}, {"*80", 15, 9, "no memory"},
          /* What is left of a handle is extended from where the handle ends. */
          {"4 (s4) *80", NO_CAP, 10, "up 0: create 8"}, {"*80 (s4) 4", NO_CAP, 12, "down 0: create 8"},
          /* A handle covers what is less than a step. */
          {"4 (s4) *80 8 (8) 8", NO_CAP, 10, "up 0: move 0"},
          /* Handles of 40 steps while nothing is stuck, a step more or less; of 10; and none of more than 48. */
          {"*8000", NO_CAP, 1000, "fresh 0: create 248x3 256"},
          {"784 (s8) 8 *8000", NO_CAP, 320, "fresh 800: create 160x2"},
          {"784 (s16) *8000", NO_CAP, 336, "up 0: create 80x4"}, {"*16000", NO_CAP, 12288, "fresh 0: create 384x32"});
    TABLE(16, {"*800", NO_CAP, 100, "fresh 0: create 8 16x6"});
    /* A limit that is no whole steps is the steps below it, however short the time. */
    TABLE(20, {"*8000", NO_CAP, 960, "fresh 0: create 16x60"});
    /* Each step created is worth 20 us, as where it is a page. */
    TABLE(0, {"8 (s4) *200 8 (8x3) 8", NO_CAP, 28, "up 0: move 0..2"});
}

/* Rule 5: to wait is 40 us dearer, for an extent or a run, and once for all of them; a page created is 20. */
Test(policy, memory_that_must_be_waited_for_is_dearer)
{
    TABLE(0,
          /* 58.5 us against 44.2, and 58.7 against 64.5. */
          {"1 (9) *99 1 [1] 1", NO_CAP, 10, "up 0: create 1"}, {"1 (9) *99 1 [2] 1", NO_CAP, 11, "up 0: move 1"},
          /* 261 us against 290, and one that covers the rest 59 against 85. */
          {"1 (s4) *99 1 [1x12] 1", NO_CAP, 16, "up 0: move 0..11"}, {"1 (9) *99 1 [4] 1", NO_CAP, 12, "up 0: move 1"},
          {"1 (9) *99 1 [3] 1", NO_CAP, 10, "up 0: create 1"}, {"1 (9) *99 1 (1) 1", NO_CAP, 10, "up 0: move 1"},
          /* 125 us against 268, and 105 against 85. */
          {"1 [9] *99 1", NO_CAP, 12, "up 0: create 3"}, {"1 [1] *99 1", NO_CAP, 3, "fresh 2: create 3"},
          {"1 (1) *99 1", NO_CAP, 3, "up 0: create 2"},
          /* Three that are free at once come before one that is longer. */
          {"1 *999 1 [20] 1 (4) 1 (4) 1 (4)", NO_CAP, 12, "fresh 1: move 1..3"},
          {"1 *999 1 [20] 1 (4) 1 (4) 1 (4)", NO_CAP, 13, "fresh 1: move 0"},
          {"1 *999 1 [5] 1 (4) 1 (4) 1 (4)", NO_CAP, 13, "fresh 1: move 1..3, create 1"});
}

Test(policy, a_fresh_place_is_the_lowest_with_ample_room)
{
    TABLE(0,
          /* Rule 6: room for 16 times what is built. */
          {"1 *160 1 *200 1", NO_CAP, 10, "fresh 1: create 10"},
          {"1 *159 1 *200 1", NO_CAP, 10, "fresh 161: create 10"},
          /* And of half of what is mapped. */
          {"400 *201 1 *300 1", NO_CAP, 10, "fresh 400: create 10"},
          {"400 *200 1 *300 1", NO_CAP, 10, "fresh 601: create 10"},
          /* If there is none, the longest, the lowest of equals. */
          {"1 *20 1 *30 1 *30 1", NO_CAP, 10, "fresh 22: create 10"},
          /* What is built counts, with the surplus, not what was asked for. */
          {"1 (12) 1 *191 1 *200 1", NO_CAP, 11, "fresh 206: move 0"},
          {"1 (12) 1 *192 1 *200 1", NO_CAP, 11, "fresh 14: move 0"},
          /* A hole of just the request will do, and one a page too short not. */
          {"1 *10 1", NO_CAP, 10, "fresh 1: create 10"}, {"1 *9 1", NO_CAP, 10, "no hole"});
}

/* Rule 8: three times what is built, with the surplus. */
Test(policy, where_several_build_a_fresh_place_has_room_before_it)
{
    TABLE_OF(0, two_builders, {"1 *160 1 *200 1", NO_CAP, 10, "fresh 31: create 10"},
             {"1 (12) 1 *192 1", NO_CAP, 11, "fresh 50: move 0"},
             /* None in a hole that is only the longest, and none before what is extended. */
             {"1 *20 1 *150 1", NO_CAP, 10, "fresh 22: create 10"}, {"1 (s4) *20 1", NO_CAP, 10, "up 0: create 6"});
}

Test(policy, what_cannot_be_had)
{
    TABLE(0,
          /* Without address space a chunk is reserved, whether there is memory or not. */
          {"", NO_CAP, 1, "no hole"}, {"", 0, 1, "no hole"}, {"1 (5) 1", 0, 4, "no hole"},
          /* With it, what may be created and moved has to suffice, to the page. */
          {"1 (5) 1 *20", 0, 6, "no memory"}, {"1 (5) 1 *20", 1, 6, "fresh 7: move 0, create 1"},
          {"1 (s5) 1 *20", 5, 6, "no memory"}, {"1 (s5) *20", 1, 6, "up 0: create 1"},
          /* Stuck pages do not move, but may be extended. */
          {"1 (s5 3) 1 (s2) *20 1", 1, 6, "up 1: move 0, create 1"}, {"1 (s5 3) 1 (s2) *20 1", 0, 6, "no memory"},
          /* A longer extent for which there is no room is of no use. */
          {"1 (s2) *4 1 (6) 1 *6 1", 0, 6, "fresh 15: move 0"}, {"1 (s2) *4 1 (7) 1 *6 1", 0, 6, "no memory"});
}

Test(policy, the_specification_s_mode)
{
    TABLE(1,
          /* The longest run that a hole can extend, the lowest of equals, after it if that will do, else before. */
          {"1 (1x2) *9 1 (1x3) *9 1", 9, 5, "up 1: move 0..1"}, {"1 (1x2) *9 1 (1x2) *9 1", 9, 4, "up 0: move 2..3"},
          {"*9 (1x2) *9 1", 9, 4, "up 0: create 1x2"}, {"*9 (1x2) *1 1", 9, 4, "down 0: create 1x2"},
          /* A run that no hole can extend is none of them. */
          {"1 (1x3) *1 1 (1x2) *9 1", 9, 5, "up 1: move 0..2"},
          /* Else the shortest hole that will do, the lowest of equals. */
          {"1 *20 1 *12 1 *12 1", 99, 12, "fresh 22: create 1x12"}, {"1 *11 1", 99, 12, "no hole"},
          {"1 (1x3) 1 *9", 9, 5, "fresh 5: move 0..2, create 1x2"},
          /* All free memory moves, lower runs first, and the shortfall is created. */
          {"1 (1x4) *20 1 (1x2) 1 (1x3) 1", 9, 12, "up 0: move 4..8, create 1x3"},
          /* A run of which at least half is needed moves whole, if there is room; else its first pages. */
          {"1 (1x4) *20 1 (1x6) 1", 9, 7, "up 0: move 4..9"}, {"1 (1x4) *20 1 (1x6) 1", 9, 6, "up 0: move 4..5"},
          {"1 (1x4) *5 1 (1x6) 1", 9, 7, "up 0: move 4..6"}, {"1 (1x4) *6 1 (1x6) 1", 9, 7, "up 0: move 4..9"},
          {"1 (1x4) *8 1 (1x2) 1 (1x6) 1", 9, 9, "up 0: move 4..11"},
          {"1 (1x4) *7 1 (1x2) 1 (1x6) 1", 9, 9, "up 0: move 4..8"},
          /* To the page. */
          {"1 (1x4) *20 1 (1x2) 1", 3, 9, "up 0: move 4..5, create 1x3"}, {"1 (1x4) *20 1 (1x2) 1", 2, 9, "no memory"});
}

/* Of more runs than are looked at one serves that is the shortest: it has the most pages that nothing else can use. */
Test(policy, before_giving_up_the_run_with_the_most_stuck_is_looked_at)
{
    struct words map = {.length = 0};
    for (int i = 0; i <= LOOKED_AT + 1; i++)
        say(&map, i == 20 ? "1 (s2) *66 " : "1 (s1 2) *66 ");
    TABLE(0, {map.text, 0, 2 + 66, "up 20: move 0..32"}, {map.text, 0, 2 + 67, "no hole"});
}

/* ---- what holds of every plan ---- */

struct trial {
    struct map map;
    uint64_t seed, random;
    uint32_t pages; /* asked for */
    struct policy_plan plan;
};

/* Drawn one to a statement: in which order the arguments of a call are evaluated is the compiler's affair. */
static uint64_t draw(struct trial *t, uint64_t below)
{
    t->random += UINT64_C(0x9E3779B97F4A7C15);
    uint64_t x = (t->random ^ t->random >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
    return (x ^ x >> 31) % below;
}

static uint64_t first_seed(void)
{
    const char *text = getenv("VPMM_TEST_SEED");
    return text ? strtoull(text, NULL, 10) : 1;
}

#define trial_check(t, condition)                                                                                      \
    check(condition, "VPMM_TEST_SEED=%" PRIu64 ": %" PRIu32 " pages: %s: not so: %s", (t)->seed, (t)->pages,           \
          words_of(&(t)->plan).text, #condition)

/* Extents whose pages are live or free as it comes, and holes. */
static void draw_extent(struct trial *t, uint32_t longest)
{
    uint32_t pages = step * (1 + (uint32_t)draw(t, longest)), extent = t->map.extents++;
    uint32_t kind = (uint32_t)draw(t, 8), live = (uint32_t)draw(t, pages + 1);
    if (kind >= 3)
        live = kind < 5 ? pages : 0; /* all of it, or none */
    map_add(&t->map, live, (struct cell){.extent = extent, .live = true});
    map_add(&t->map, pages - live, (struct cell){.extent = extent});
}

static const struct policy_view *draw_map(struct trial *t, uint32_t longest_extent)
{
    static const uint64_t caps[] = {0, 0, 3, 20, 200, UINT64_MAX};
    uint32_t pieces = 1 + (uint32_t)draw(t, 60), holes = 2 + (uint32_t)draw(t, 12);
    uint32_t longest_hole = 1 + (uint32_t)draw(t, 60);
    map_clear(&t->map);
    for (uint32_t i = 0; i < pieces && t->map.cells < CELLS - 300 * step; i++) {
        if (draw(t, holes))
            draw_extent(t, longest_extent);
        else
            map_add(&t->map, step * (1 + (uint32_t)draw(t, longest_hole)), (struct cell){.extent = HOLE});
    }
    if (draw(t, 4) == 0)
        map_add(&t->map, step * (1 + (uint32_t)draw(t, 200)), (struct cell){.extent = HOLE});
    return map_view(&t->map, caps[draw(t, sizeof caps / sizeof *caps)]);
}

static uint32_t longest_run(const struct policy_view *v)
{
    uint32_t longest = 0;
    for (size_t i = 0; i < v->runs; i++)
        if (v->run[i].pages > longest)
            longest = v->run[i].pages;
    return longest;
}

static bool extends(const struct policy_plan *plan)
{
    return plan->place == POLICY_EXTEND_UP || plan->place == POLICY_EXTEND_DOWN;
}

static bool lies_in_a_hole(const struct policy_view *v, uint64_t page, uint64_t pages)
{
    for (size_t i = 0; i < v->holes; i++)
        if (page >= v->hole[i].page && page + pages <= v->hole[i].page + v->hole[i].pages)
            return true;
    return false;
}

/* What is mapped adjoins the run that it extends, and lies in one hole. */
static void check_target(const struct trial *t)
{
    const struct policy_view *v = &t->map.view;
    const struct policy_plan *plan = &t->plan;
    uint64_t pages = moved_pages(v, plan) + created_pages(plan), page = plan->page;
    trial_check(t, pages > 0);
    trial_check(t, plan->place == POLICY_FRESH || extends(plan));
    if (extends(plan)) {
        trial_check(t, plan->run < v->runs);
        const struct policy_run *run = &v->run[plan->run];
        trial_check(t, plan->place == POLICY_EXTEND_UP || pages <= run->page);
        page = plan->place == POLICY_EXTEND_UP ? run->page + run->pages : run->page - pages;
    }
    trial_check(t, lies_in_a_hole(v, page, pages));
    trial_check(t, page % step == 0 && pages % step == 0);
}

/* Each moved extent is the view's, moved once, and none of those that stay because their run is extended. */
static void check_moves(const struct trial *t)
{
    const struct policy_view *v = &t->map.view;
    const struct policy_plan *plan = &t->plan;
    for (size_t i = 0; i < plan->moves; i++) {
        trial_check(t, plan->move[i] < v->extents);
        trial_check(t, i == 0 || plan->move[i] > plan->move[i - 1]);
        const struct policy_extent *extent = &v->extent[plan->move[i]];
        trial_check(t, !extends(plan) || extent->run != plan->run);
        for (uint32_t j = 0; j < extent->pages; j++)
            trial_check(t, is_free(&t->map, (uint32_t)extent->page + j));
    }
}

/* The created extents, of about equal length and none longer than may be, within the cap. */
static void check_creates(const struct trial *t, uint32_t max_extent)
{
    const struct policy_plan *plan = &t->plan;
    for (size_t i = 0; i < plan->creates; i++) {
        trial_check(t, plan->create[i] > 0 && plan->create[i] <= max_extent && plan->create[i] % step == 0);
        trial_check(t, plan->create[i] <= plan->create[0] + step && plan->create[0] <= plan->create[i] + step);
    }
    trial_check(t, created_pages(plan) <= t->map.view.creatable_pages);
}

/* The request is covered; with a surplus of moved pages at most, since growth is rounded up to a whole step alone. */
static void check_pages(const struct trial *t)
{
    const struct policy_view *v = &t->map.view;
    uint32_t pages = moved_pages(v, &t->plan) + created_pages(&t->plan);
    if (extends(&t->plan))
        pages += v->run[t->plan.run].pages;
    trial_check(t, pages >= t->pages);
    trial_check(t, t->plan.creates == 0 || pages < t->pages + step);
}

static bool close_to(double one, double other)
{
    return fabs(one - other) < 1e-6;
}

static bool is_a_plan(const struct policy_plan *plan)
{
    return plan->place < POLICY_NO_HOLE;
}

static void check_plan(const struct trial *t, uint32_t max_extent)
{
    if (!is_a_plan(&t->plan))
        return;
    check_target(t);
    check_moves(t);
    check_creates(t, max_extent);
    check_pages(t);
    trial_check(t, close_to(t->plan.cost_us, driver_us(&t->map.view, &t->plan)));
}

/* A policy that has seen nothing before, so that the plan depends on the view and on the request alone. */
static void plan_fresh(struct trial *t, const struct policy_view *v, uint32_t max_extent, struct policy_plan *plan)
{
    struct policy p;
    policy_init(&p, STEP_BYTES / step, step, max_extent);
    check(policy_plan(&p, v, t->pages, plan), "no host memory");
    policy_destroy(&p);
}

static void draw_request(struct trial *t)
{
    uint32_t longest = longest_run(&t->map.view), kind = (uint32_t)draw(t, 8);
    t->pages = kind == 0 ? 1 : longest + 1; /* the policy is asked for what no run fits, and does not look at that */
    t->pages += (uint32_t)draw(t, kind == 1 ? 400 : 40);
}

typedef void property(struct trial *);

static void each_trial(property *holds)
{
    static struct trial t;
    memset(&t, 0, sizeof t);
    for (int i = 0; i < MAPS; i++) {
        t.seed = first_seed() + (uint64_t)i;
        t.random = t.seed * UINT64_C(0x2545F4914F6CDD1D);
        holds(&t);
    }
    policy_plan_free(&t.plan);
}

/*
 * What a plan is worth: driver time, and 20 us for a step created. Pieces that grow are priced as if they were all as
 * the longest.
 */
static double growing_us(uint32_t pages, uint32_t pieces)
{
    return pieces ? pieces * us_to_create((pages + pieces - 1) / pieces) : 0;
}

/* Who waits for the driver's time pays for it too, as far as not much lies idle. */
static double priced(const struct trial *t, double us, uint32_t created)
{
    const struct policy_view *v = &t->map.view;
    uint64_t idle = 0;
    for (size_t i = 0; i < v->extents; i++)
        idle += v->extent[i].pages;
    double counts = v->mapped_pages ? fmax(0, 1 - (double)idle / (double)v->mapped_pages / much_idle) : 1;
    return us * (1 + counts * waiter * fmin(v->waiters, 16)) + created_step / step * created;
}

/* The driver's time that one malloc may take, if it is as slow as it is said to be. */
static double time_of_one(const struct trial *t)
{
    return slow / t->map.view.slowness;
}

static uint32_t stuck_of(const struct policy_view *v, size_t run)
{
    uint32_t stuck = v->run[run].pages;
    for (size_t i = 0; i < v->extents; i++)
        stuck -= v->extent[i].run == run ? v->extent[i].pages : 0;
    return stuck;
}

static double price_of_plan(const struct trial *t)
{
    const struct policy_view *v = &t->map.view;
    const struct policy_plan *plan = &t->plan;
    uint32_t created = created_pages(plan);
    return priced(t, moving_us(v, plan) + growing_us(created, (uint32_t)plan->creates), created);
}

/* A place and what it misses, and the extents that could move there, longest first. */
struct offer {
    const struct trial *t;
    uint32_t max_extent;
    int64_t run; /* -1: a fresh place */
    uint32_t missing;
    uint64_t room;
    const struct policy_extent *extent[CELLS];
    size_t extents;
    bool taken[CELLS];
    double cheapest; /* infinite: it cannot be had */
};

static int longest_first(const void *one, const void *other)
{
    const struct policy_extent *a = *(const struct policy_extent *const *)one,
                               *b = *(const struct policy_extent *const *)other;
    return a->pages != b->pages ? (a->pages < b->pages ? 1 : -1) : (a->page > b->page) - (a->page < b->page);
}

static void offer_open(struct offer *o)
{
    const struct policy_view *v = &o->t->map.view;
    o->extents = 0;
    o->cheapest = INFINITY;
    for (size_t i = 0; i < v->extents; i++)
        if (v->extent[i].run != o->run)
            o->extent[o->extents++] = &v->extent[i];
    qsort(o->extent, o->extents, sizeof *o->extent, longest_first);
    memset(o->taken, 0, o->extents * sizeof *o->taken);
}

static double share_stuck(const struct policy_view *v)
{
    uint64_t stuck = 0;
    for (size_t i = 0; i < v->runs; i++)
        stuck += stuck_of(v, i);
    return v->mapped_pages ? (double)stuck / (double)v->mapped_pages : 0;
}

/* Rules 3 and 4: by how much is stuck; fewer than would take longer than is left; as the largest handle says. */
static uint32_t pieces_of(const struct offer *o, uint32_t pages, double us_left)
{
    double share = share_stuck(&o->t->map.view), length = share >= 0.02 ? 10 : 40 - share / 0.02 * 30;
    double most = fmax(1, floor(o->max_extent / step)), longest = fmin(most, fmax(48, floor(pages / 64 / step)));
    length = floor(fmin(length, most)) * step;
    longest *= step;
    uint32_t pieces = (uint32_t)ceil(pages / length), fewest = (uint32_t)ceil(pages / longest);
    while (pieces > fewest && growing_us(pages, pieces) > us_left)
        pieces--;
    return pieces;
}

static void offer_price(struct offer *o, double price)
{
    o->cheapest = fmin(o->cheapest, price);
}

/* Of what is not taken the shortest that covers the rest. */
static const struct policy_extent *cover(const struct offer *o, uint32_t rest)
{
    const struct policy_extent *best = NULL;
    for (size_t i = 0; i < o->extents; i++)
        if (!o->taken[i] && o->extent[i]->pages > rest)
            best = o->extent[i];
    return best;
}

/* The rest is created, or covered by one extent that is longer. */
static void price_ends(struct offer *o, double us, uint32_t rest)
{
    const struct policy_extent *longer = rest ? cover(o, rest) : NULL;
    uint32_t created = (rest + step - 1) / step * step;
    if (created <= o->t->map.view.creatable_pages)
        offer_price(o, priced(o->t, us + growing_us(created, pieces_of(o, created, time_of_one(o->t) - us)), created));
    if (longer && o->missing - rest + longer->pages <= o->room)
        offer_price(o, priced(o->t, us + us_to_move(longer->pages), 0));
}

/* Rule 2: each number of the extents that fit, longest first, with each end. */
static double cheapest_of(struct offer *o)
{
    double us = 0;
    uint32_t rest = o->missing;
    offer_open(o);
    price_ends(o, us, rest);
    for (size_t i = 0; i < o->extents && rest > 0; i++) {
        if (o->extent[i]->pages > rest)
            continue;
        o->taken[i] = true;
        us += us_to_move(o->extent[i]->pages);
        rest -= o->extent[i]->pages;
        price_ends(o, us, rest);
    }
    return o->cheapest;
}

/* Rule 1: after the run or before it. */
static double cheapest_of_run(struct offer *o, size_t index)
{
    const struct policy_run *run = &o->t->map.view.run[index];
    double price = INFINITY;
    o->run = (int64_t)index;
    o->missing = o->t->pages - run->pages;
    o->room = run->hole_after;
    if (o->missing <= o->room)
        price = cheapest_of(o);
    o->room = run->hole_before;
    if (o->missing <= o->room)
        price = fmin(price, cheapest_of(o));
    return price;
}

static uint64_t longest_hole(const struct policy_view *v)
{
    uint64_t longest = 0;
    for (size_t i = 0; i < v->holes; i++)
        if (v->hole[i].pages > longest)
            longest = v->hole[i].pages;
    return longest;
}

/* Of all places; infinite: there is none. */
static double cheapest(const struct trial *t, uint32_t max_extent)
{
    static struct offer o;
    const struct policy_view *v = &t->map.view;
    o.t = t;
    o.max_extent = max_extent;
    o.run = -1;
    o.missing = t->pages;
    o.room = longest_hole(v);
    double price = o.missing <= o.room ? cheapest_of(&o) : INFINITY;
    for (size_t i = 0; i < v->runs; i++)
        if (v->run[i].pages < t->pages)
            price = fmin(price, cheapest_of_run(&o, i));
    return price;
}

static uint32_t draw_longest_extent(struct trial *t)
{
    static const uint32_t longest[] = {1, 2, 4, 10, 60};
    return longest[draw(t, sizeof longest / sizeof *longest)];
}

/* What is said of a request that cannot be had, and that of those that can the plan is the cheapest. */
static void plan_is_sound_and_cheapest(struct trial *t)
{
    uint32_t max_extent = draw(t, 4) ? UINT32_MAX : step * (2 + (uint32_t)draw(t, 20));
    const struct policy_view *v = draw_map(t, draw_longest_extent(t));
    bool by_view = draw(t, 2); /* it is the view's limit, or the policy's */
    if (by_view && max_extent != UINT32_MAX)
        max_extent--; /* 1 is a mode if it is the policy's */
    t->map.view.longest_handle = by_view ? max_extent : UINT32_MAX;
    t->map.view.waiters = draw(t, 2) ? (uint32_t)draw(t, 20) : 0;
    t->map.view.slowness = draw(t, 2) ? 1 + (double)draw(t, 70) / 10 : 1;
    t->map.view.mapped_pages += step * (draw(t, 2) ? draw(t, 10000) : 0); /* beyond what is drawn, and live */
    draw_request(t);
    plan_fresh(t, v, by_view ? UINT32_MAX : max_extent, &t->plan);
    check_plan(t, max_extent);
    if (v->runs > LOOKED_AT)
        return; /* not all of them are looked at */
    double price = cheapest(t, max_extent);
    trial_check(t, is_a_plan(&t->plan) == !isinf(price));
    trial_check(t, t->plan.place != POLICY_NO_HOLE || t->pages > longest_hole(v));
    trial_check(t, t->plan.place != POLICY_NO_MEMORY || t->pages <= longest_hole(v));
    trial_check(t, !is_a_plan(&t->plan) || close_to(price_of_plan(t), price));
}

Test(policy, every_plan_is_sound_and_the_cheapest, .timeout = 120)
{
    each_trial(plan_is_sound_and_cheapest);
}

Test(policy, every_plan_in_steps_is_sound_and_the_cheapest, .timeout = 120)
{
    step = 8;
    each_trial(plan_is_sound_and_cheapest);
}

static uint64_t movable_elsewhere(const struct policy_view *v, int64_t run)
{
    uint64_t pages = 0;
    for (size_t i = 0; i < v->extents; i++)
        pages += v->extent[i].run == run ? 0 : v->extent[i].pages;
    return pages;
}

/* Where whatever moves has room, be it as long as the longest extent too much. */
static bool surely_serves(const struct trial *t, int64_t run, uint64_t missing, uint64_t room)
{
    const struct policy_view *v = &t->map.view;
    uint32_t longest = 0;
    for (size_t i = 0; i < v->extents; i++)
        if (v->extent[i].pages > longest)
            longest = v->extent[i].pages;
    return missing + longest <= room && missing <= movable_elsewhere(v, run) + v->creatable_pages / 2;
}

/*
 * NO_MEMORY: "creatable_pages and what can be moved do not suffice". Of a place with ample room that is so to the page.
 * Where room is short it is not promised: which of many extents fill it best is not searched for.
 */
static void failure_is_true(struct trial *t)
{
    const struct policy_view *v = draw_map(t, draw_longest_extent(t));
    draw_request(t);
    plan_fresh(t, v, 0, &t->plan);
    if (is_a_plan(&t->plan) || v->runs > LOOKED_AT)
        return;
    trial_check(t, !surely_serves(t, -1, t->pages, longest_hole(v)));
    for (size_t i = 0; i < v->runs; i++) {
        const struct policy_run *run = &v->run[i];
        uint64_t missing = t->pages - run->pages;
        if (run->pages < t->pages) {
            trial_check(t, !surely_serves(t, (int64_t)i, missing, run->hole_after));
            trial_check(t, !surely_serves(t, (int64_t)i, missing, run->hole_before));
        }
    }
}

Test(policy, a_request_fails_only_if_it_cannot_be_had, .timeout = 120)
{
    each_trial(failure_is_true);
}

/*
 * A higher cap never makes a request dearer: each end that there was is still there. Not so of more free memory, which
 * policy.h does not promise either: see more_free_memory_may_make_a_plan_dearer.
 */
static void cap_only_helps(struct trial *t)
{
    const struct policy_view *v = draw_map(t, draw_longest_extent(t));
    draw_request(t);
    plan_fresh(t, v, 0, &t->plan);
    if (!is_a_plan(&t->plan))
        return;
    double price = price_of_plan(t);
    t->map.view.creatable_pages = UINT64_MAX;
    plan_fresh(t, v, 0, &t->plan);
    trial_check(t, is_a_plan(&t->plan) && price_of_plan(t) <= price + 1e-6);
}

Test(policy, a_higher_cap_makes_no_plan_dearer, .timeout = 120)
{
    each_trial(cap_only_helps);
}

/* The extents are looked at longest first, so that a longer one is in the way of two that fit exactly. (Beside a 5 it
   costs the same at a fresh place.) */
Test(policy, more_free_memory_may_make_a_plan_dearer)
{
    TABLE(0, {"1 (s4) *20 1 (5x2) 1", 0, 14, "up 0: move 0..1"},
          {"1 (s4) *20 1 (5x2) 1 (9) 1", 0, 14, "fresh 5: move 0 2"});
}

static bool same_plan(const struct policy_plan *a, const struct policy_plan *b)
{
    return strcmp(words_of(a).text, words_of(b).text) == 0 && close_to(a->cost_us, b->cost_us);
}

/* With the same view a policy says the same, whatever arrays it is given. */
static void plan_is_the_same_again(struct trial *t)
{
    uint32_t max_extent = (uint32_t)draw(t, 2);
    const struct policy_view *v = draw_map(t, max_extent == 1 ? 1 : 10);
    struct policy_plan unused = {0};
    draw_request(t);
    plan_fresh(t, v, max_extent, &t->plan);
    plan_fresh(t, v, max_extent, &unused);
    trial_check(t, same_plan(&t->plan, &unused));
    policy_plan_free(&unused);
}

Test(policy, the_same_is_said_again, .timeout = 120)
{
    each_trial(plan_is_the_same_again);
}

/* Those that are long enough, or else the longest. */
static size_t show_holes(const struct policy_view *v, uint64_t pages, struct policy_hole *shown)
{
    size_t n = 0;
    for (size_t i = 0; i < v->holes; i++)
        if (v->hole[i].pages >= pages)
            shown[n++] = v->hole[i];
    for (size_t i = 0; n == 0 && i < v->holes; i++)
        if (v->hole[i].pages == longest_hole(v))
            shown[n++] = v->hole[i];
    return n;
}

static void short_holes_are_not_missed(struct trial *t)
{
    uint32_t max_extent = step == 1 ? (uint32_t)draw(t, 2) : 0;
    struct policy p;
    struct policy_hole shown[CELLS];
    struct policy_plan unused = {0};
    draw_map(t, max_extent == 1 ? 1 : 10);
    t->map.view.several_builders = draw(t, 2);
    draw_request(t);
    plan_fresh(t, &t->map.view, max_extent, &t->plan);
    policy_init(&p, STEP_BYTES / step, step, max_extent);
    struct policy_view some = t->map.view;
    some.holes = show_holes(&some, policy_hole_pages(&p, some.mapped_pages, t->pages), shown);
    some.hole = shown;
    plan_fresh(t, &some, max_extent, &unused);
    trial_check(t, same_plan(&t->plan, &unused));
    policy_plan_free(&unused);
    policy_destroy(&p);
}

/* policy_hole_pages: what the caller leaves out changes no plan. */
Test(policy, holes_too_short_need_not_be_shown, .timeout = 120)
{
    each_trial(short_holes_are_not_missed);
}

Test(policy, holes_too_short_need_not_be_shown_where_handles_are_steps, .timeout = 120)
{
    step = 8;
    each_trial(short_holes_are_not_missed);
}

/* ---- the specification's mode ---- */

static uint64_t all_free(const struct policy_view *v)
{
    uint64_t pages = 0;
    for (size_t i = 0; i < v->runs; i++)
        pages += v->run[i].pages;
    return pages;
}

/* Growth is the shortfall to the page, and memory fails only if all that is free and may be created is too little. */
static void plan_of_pages_is_exact(struct trial *t)
{
    const struct policy_view *v = draw_map(t, 1);
    draw_request(t);
    t->pages += longest_run(v);
    plan_fresh(t, v, 1, &t->plan);
    check_plan(t, 1);
    uint64_t shortfall = t->pages > all_free(v) ? t->pages - all_free(v) : 0;
    trial_check(t, (t->plan.place == POLICY_NO_MEMORY) <= (shortfall > v->creatable_pages));
    trial_check(t, t->plan.place != POLICY_NO_HOLE || t->pages > longest_hole(v));
    if (is_a_plan(&t->plan))
        trial_check(t, created_pages(&t->plan) == shortfall);
}

Test(policy, the_specification_s_mode_is_exact, .timeout = 120)
{
    each_trial(plan_of_pages_is_exact);
}
