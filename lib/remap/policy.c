#include "remap/policy.h"

#include "base/radix.h"

#include <stdlib.h>
#include <string.h>

/*
 * The rules, in the order in which they matter. A page of theirs is a step (policy.h), where pages are smaller. In
 * brackets is what comes of it without the rule, as
 *     stress/policy.py BUILD_DIR TRACE... --rows 1,4
 * prints it: held above in use after the fourth pass, and driver time of all mallocs in the first, of one thread dense
 * | of four threads with a GPU that lags. With all rules 5.4 %, 11.3 ms | 5.4 %, 53.0 ms; of four threads dense 6.1 %:
 * so it was before rules 9 and 10, and before caches were smaller (cache.c); now 4.6 %, 10.7 ms | 5.6 %, 49.7 ms, and
 * 6.0 %. Taken on 24 November 2026 with four traces that are not in this repository: llama_serving,
 * llama_two_streams, llama_four_threads, resnet_train (stress/README.md says what they are). 1 % more or less with four
 * threads says little: what is planned once has a bearing on all that follows.
 *
 * 1. A miss extends a free run into the hole beside it, where it can: only the missing pages are mapped.
 *    [a fresh place always: 5.5 %, 18.4 ms | 6.4 %, 79.3 ms]
 * 2. The missing pages are extents that move, longest first, a last longer one covering the rest, or new memory: every
 *    such end is priced, and a page created is dearer than one that moves alone. So is each candidate for the place;
 *    the cheapest wins.
 *    [a page created costs its driver time alone: 15.4 %, 10.5 ms | 15.4 %, 38.9 ms; it is worth 8 us, less than a
 *    move: 5.3 %, 11.0 ms | 5.3 %, 48.2 ms, dense 9.1 %, and rule 7 is in vain]
 * 3. New memory is created in equal handles: of 40 pages while nothing is stuck in partly free extents, of 10 when 2 %
 *    is; in fewer where a malloc would take longer than 0.9 ms.
 *    [always 40: 8.4 %, 5.6 ms | 11.0 %, 29.0 ms; always 10: 4.9 %, 15.1 ms | 4.5 %, 67.7 ms]
 * 4. But no handle is longer than 48 pages, or a 64th of the growth, however long the malloc takes: what is left of a
 *    long one is stuck beside whatever lives in it. A 64th: a giant request moves in as many handles.
 *    [no bound: 6.4 %, 11.0 ms | 8.2 %, 52.8 ms, dense 9.1 %; a 32nd: the longest malloc 0.84 ms for 0.95, and of one
 *    thread dense 8.4 % after the eighth pass for 7.5 %, of llama_four_threads 15 % for 12 %]
 * 5. Memory behind another stream's fence is planned with before the pool grows, where the stream may wait for it. A
 *    plan that waits is dearer by 40 us, for the stream that waits, of however many extents it is: they wait at once.
 *    [never: 5.4 %, 11.3 ms | 17.2 %, 40.7 ms; no dearer: 5.4 %, 11.3 ms | 5.2 %, 56.1 ms]
 *    It was 40 us for each extent: on 27 November 6.2 %, 48.4 ms for 6.8 %, 51.3 ms. But what lay in short handles was
 *    idle for good then. On an H200 two streams in turn, the one with 1,024 blocks of 2 MiB of which every sixteenth
 *    stays and the other with 29 of 64 MiB, both 50 ms behind, held 1.91 times what was in use for 1.00, and four such
 *    pairs 1.62 for 1.04, in 0.87 s for 1.78 (cuMemAllocAsync 1.91 and 1.91, 0.26 s). Four workers of a PyTorch server
 *    with VPMM_REUSE=device made 165, 172 and 221 tokens a second for 174, 182 and 226, eight 192 for 188.
 * 6. A fresh place is in the lowest hole with ample room, at its front or near it: one arena that grows at its top,
 *    and comes back to low addresses once they are empty. Growth is rounded up to steps alone.
 *    [the lowest hole that will do: 5.4 %, 11.3 ms | 5.4 %, 53.9 ms, dense 7.0 %]
 * 7. Memory that is to be cut for small requests is created in handles of a page (the view says so), since its pages
 *    become free one by one.
 *    [handles as of any growth: 5.3 %, 11.1 ms | 5.2 %, 49.0 ms; but vpmm-fragment's large requests find nothing of
 *    the emptied pages that could move, and it holds 1.76 for 1.33]
 * 8. Where several threads build a fresh place leaves room before it, so that what lies there can be extended
 *    downwards; and a request takes that end of a free region which leaves fewer handles broken (ends.h).
 *    [no room: 5.4 %, 11.3 ms | 5.5 %, 57.9 ms, dense 5.8 %; the front always: 5.4 %, 11.3 ms | 6.0 %, 53.8 ms, dense
 *    7.6 %; both with one thread too: 4.9 %, 13.4 ms, and the longest malloc 1.5 ms for 0.95]
 * 9. The time that a malloc may take is the driver's own, which the cost model only guesses: what builds take of late
 *    over what they should have taken shortens it (pace.h). In virtual time they take what they should.
 * 10. Who builds while others wait keeps them all waiting: with each of them, up to 16, driver time is dearer by a
 *    fifth beside memory.
 *    [no dearer: sixteen threads dense 7.3 %, 111.8 ms for 7.9 %, 106.2 ms; four 6.2 %, 41.4 ms for 7.0 %, 41.6 ms]
 *    On an H200, where a call takes longer the more threads wait, 3,000 handles moved for 6,100 by sixteen threads over
 *    llama_two_streams (both rules; the mean of two runs).
 * 11. Where much of what is mapped lies idle and could move, 10's price counts for less, and for nothing from a tenth
 *    on: or what lies in short handles, dearer to move then than as much new memory, is idle for good while the pool
 *    grows beside it. Threads that free 1,024 blocks of 2 MiB each, and then take 32 of 64 MiB, held 1.00, 1.96 and
 *    1.94 times what was in use (1, 4 and 16 of them), with this rule 1.00, 1.00 and 1.01, and four took 156 ms for
 *    103. [without it, held of four threads dense 6.6 %, the worst trace 21 %, for 6.0 and 13 %; sixteen 8.6 and 31 %
 *    for 8.1 and 24 %; of four with a GPU that lags 6.4 % for 6.2 %]
 *    On an H200 four such threads held 1.05 for 1.97, in 2.7 s of mallocs for 2.5, and sixteen 1.00 for 1.32, in 13.4
 *    for 15.0.
 * 12. Where several build, what a plan makes after it has moved handles for 0.9 ms and more, by the cost model, is put
 *    off: when they are moved, the rest is planned anew. A request of 7 GiB moves for 5 ms, in which the others free
 *    more than is missing.
 *    [never: llama_four_threads by four threads, dense, eight seeds, held 9.8 % after the fourth pass, 11.8 % after
 *    the first, for 8.1 and 8.0 %; the longest malloc 4.8 and 5.5 ms, for 4.2 and 6.9, since more is moved, and the
 *    second plan has its time for growth anew]
 *    On an H200 sixteen threads held 1.11 for 1.14 over llama_four_threads and 1.06 for 1.08 over llama_two_streams
 *    (means of four runs each in turn), and four threads 1.11 both times (of eight). That was with a limit that was
 *    lower where the driver was slow: llama_two_streams and llama_serving by four threads then built 16 and 10 times
 *    in a fourth pass for 7 and 4, and held no less, so the limit is the model's.
 *
 * On an H200 the room costs time in a first pass and saves memory: without it llama_two_streams by sixteen threads held
 * 1.11 for 1.07 and took 10.7 s for 12.6, by four 1.07 for 1.05 and 0.62 s for 0.65; resnet_train by four 1.01 for 1.00
 * and 0.26 s for 0.37. A PyTorch server with four workers held 1.09 and 1.11 without rule 8, and with it 1.07 and 1.08,
 * at the same number of tokens a second.
 *
 * Driver time beyond 0.9 ms once counted three times: it bought a longest malloc of 3.1 ms instead of 3.9, on average,
 * with four threads and a GPU that lags, and nothing elsewhere. Prices of a surplus page and of a stuck page that is
 * put to use had no gain either, nor had work ahead of need by the reaper: extents joined to the longest run, growth,
 * long extents made anew as short ones. Nor had lengths from 64 pages on in steps of a 32nd: what is saved in handles
 * is spent on rounding. In the first study, which cannot be run from this tree, these had none: handles of the sizes
 * lately asked for or lately live; handles that grow geometrically; filling a hole between two free runs; steering by
 * held instead of by stuck.
 *
 * Growth in fewer handles while others wait (SLOW_US over 1 + waiters / 4) bought time with memory: sixteen threads
 * dense 74 ms for 108 and a longest malloc of 4.0 ms for 6.8 in the first pass, and 11.3 % for 7.7 % after the fourth;
 * with a GPU that lags 112 ms for 163, 5.6 ms for 8.0, and 8.8 % for 5.5 %.
 */
static const double HANDLE_MOST = 40;  /* pages of a handle while nothing is stuck, */
static const double HANDLE_LEAST = 10; /* and when this share of mapped is: */
static const double STUCK_HIGH = 0.02;

static const double CREATED_STEP_US = 20; /* what a step created is worth, beside its driver time */

static const double SLOW_US = 900;     /* driver time of one malloc; beyond it growth is in fewer handles, or put off */
static const double WAITER_COST = 0.2; /* what each who waits to build adds to the price of driver time */

static const double WAIT_US = 40; /* what a plan is dearer by for which the stream must wait */

static const double IDLE_HIGH = 0.1; /* where this share of mapped could move, who waits counts for nothing */

static const double FRESH_TIMES = 16;  /* ample room: so many times what is built, more than 1 + ROOM_TIMES, */
static const double FRESH_SHARE = 0.5; /* and this share of what is mapped */

enum { WAITERS_MOST = 16 }; /* so many of them count: more was not tried */
enum { ROOM_TIMES = 3 };    /* room before a fresh place, where several build: so many times what is built */

enum { HANDLE_LONGEST = 48 }; /* pages of a handle, however short the time for it, */
enum { GROWTH_HANDLES = 64 }; /* or this part of the growth */
enum { CANDIDATES = 32 };     /* runs that are looked at for extension, the longest; 16, or all of them, do as well */

/*
 * The cost model: the driver's prices on an H200 (lib/sim/cost.c), linear between the measured sizes.
 */
struct price {
    double mib, us;
};

static const struct price CREATE[] = {{2, 5.7}, {32, 7.7}, {256, 12}, {1024, 29}, {8192, 114}};
static const struct price ACCESS[] = {{2, 18}, {32, 21}, {128, 25}, {256, 31}, {1024, 51}};
static const double MAP_US = 0.45;

#define PRICE(table, mib) price(table, sizeof(table) / sizeof *(table), mib)

static double price(const struct price *table, size_t n, double mib)
{
    size_t i = 1;
    if (mib <= table[0].mib)
        return table[0].us;
    while (i < n - 1 && mib > table[i].mib)
        i++;
    const struct price *a = &table[i - 1], *b = &table[i];
    return a->us + (mib - a->mib) * (b->us - a->us) / (b->mib - a->mib);
}

static double move_us(const struct policy *p, uint32_t pages)
{
    return MAP_US + PRICE(ACCESS, pages * p->page_mib);
}

static double create_us(const struct policy *p, uint32_t pages)
{
    return PRICE(CREATE, pages * p->page_mib) + move_us(p, pages);
}

void policy_init(struct policy *p, uint64_t page_size_bytes, uint32_t step_pages, uint32_t max_extent_pages)
{
    memset(p, 0, sizeof *p);
    p->page_mib = (double)page_size_bytes / (1 << 20);
    p->step = step_pages;
    p->max_extent = max_extent_pages ? max_extent_pages : UINT32_MAX;
    p->handle_pages = HANDLE_MOST * p->step;
}

void policy_destroy(struct policy *p)
{
    free(p->by_size);
    p->by_size = NULL;
    p->by_size_capacity = 0;
}

void policy_plan_free(struct policy_plan *plan)
{
    free(plan->move);
    free(plan->create);
    memset(plan, 0, sizeof *plan);
}

/*
 * Plans under construction.
 */
static void clear(struct policy_plan *plan)
{
    plan->place = POLICY_NO_MEMORY;
    plan->run = 0;
    plan->page = 0;
    plan->moves = plan->creates = 0;
    plan->cost_us = 0;
}

static bool reserve(uint32_t **array, size_t *capacity, size_t n)
{
    if (n <= *capacity)
        return true;
    size_t more = n < 32 ? 64 : 2 * n;
    uint32_t *grown = realloc(*array, more * sizeof **array);
    if (!grown)
        return false;
    *array = grown;
    *capacity = more;
    return true;
}

static bool add_move(struct policy_plan *plan, size_t extent)
{
    if (!reserve(&plan->move, &plan->move_capacity, plan->moves + 1))
        return false;
    plan->move[plan->moves++] = (uint32_t)extent;
    return true;
}

static bool add_create(struct policy_plan *plan, uint32_t pages)
{
    if (!reserve(&plan->create, &plan->create_capacity, plan->creates + 1))
        return false;
    plan->create[plan->creates++] = pages;
    return true;
}

/* `n` new extents of equal length, a step more or less, of so many pages in sum. */
static bool add_creates(const struct policy *p, struct policy_plan *plan, uint32_t pages, uint32_t n)
{
    for (uint32_t steps = pages / p->step; n > 0; n--) {
        if (!add_create(plan, steps / n * p->step))
            return false;
        steps -= steps / n;
    }
    return true;
}

static int ascending(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static uint64_t whole_steps(const struct policy *p, uint64_t pages)
{
    return (pages + p->step - 1) / p->step * p->step;
}

/*
 * What a view says.
 */
static uint64_t free_pages(const struct policy_view *v)
{
    uint64_t pages = 0;
    for (size_t i = 0; i < v->runs; i++)
        pages += v->run[i].pages;
    return pages;
}

static uint64_t movable_pages(const struct policy_view *v)
{
    uint64_t pages = 0;
    for (size_t i = 0; i < v->extents; i++)
        pages += v->extent[i].pages;
    return pages;
}

static uint32_t stuck_pages(const struct policy_view *v, const struct policy_run *r)
{
    uint32_t stuck = r->pages;
    for (uint32_t i = 0; i < r->extents; i++)
        stuck -= v->extent[r->first_extent + i].pages;
    return stuck;
}

static double stuck_share(const struct policy_view *v)
{
    if (v->mapped_pages == 0)
        return 0;
    return (double)(free_pages(v) - movable_pages(v)) / (double)v->mapped_pages;
}

/* The shortest hole of at least that many pages, the lowest of equals; view.holes: none. */
static size_t shortest_hole(const struct policy_view *v, uint64_t pages)
{
    size_t best = v->holes;
    for (size_t i = 0; i < v->holes; i++)
        if (v->hole[i].pages >= pages && (best == v->holes || v->hole[i].pages < v->hole[best].pages))
            best = i;
    return best;
}

static size_t longest_hole(const struct policy_view *v)
{
    size_t best = 0;
    for (size_t i = 1; i < v->holes; i++)
        if (v->hole[i].pages > v->hole[best].pages)
            best = i;
    return best;
}

static uint64_t longest_hole_pages(const struct policy_view *v)
{
    return v->holes ? v->hole[longest_hole(v)].pages : 0;
}

/*
 * The specification's mode: every extent is one page, so all free memory moves, and growth is exactly the shortfall.
 */
static size_t longest_extendable(const struct policy_view *v, uint32_t pages)
{
    size_t best = v->runs;
    for (size_t i = 0; i < v->runs; i++) {
        const struct policy_run *r = &v->run[i];
        if (r->pages >= pages || (r->hole_after < pages - r->pages && r->hole_before < pages - r->pages))
            continue;
        if (best == v->runs || r->pages > v->run[best].pages)
            best = i;
    }
    return best;
}

/* Runs in ascending order; one of which at least half is needed moves whole, if there is room for the surplus. */
static bool harvest_pages(const struct policy *p, struct policy_plan *plan, const struct policy_view *v,
                          uint64_t missing, uint64_t room)
{
    bool extends = plan->place != POLICY_FRESH;
    for (size_t i = 0; i < v->runs && missing > 0; i++) {
        const struct policy_run *r = &v->run[i];
        if (extends && i == plan->run)
            continue;
        uint64_t take = r->extents;
        if (take > missing && (2 * missing < take || take > room))
            take = missing;
        for (uint64_t k = 0; k < take; k++)
            if (!add_move(plan, r->first_extent + k))
                return false;
        room -= take;
        missing -= take < missing ? take : missing;
    }
    if (missing > v->creatable_pages) {
        plan->place = POLICY_NO_MEMORY;
        return true;
    }
    return add_creates(p, plan, (uint32_t)missing, (uint32_t)missing);
}

static bool plan_pages(const struct policy *p, const struct policy_view *v, uint32_t pages, struct policy_plan *plan)
{
    size_t run = longest_extendable(v, pages);
    if (run < v->runs) {
        const struct policy_run *r = &v->run[run];
        uint32_t missing = pages - r->pages;
        plan->run = run;
        plan->place = r->hole_after >= missing ? POLICY_EXTEND_UP : POLICY_EXTEND_DOWN;
        return harvest_pages(p, plan, v, missing, r->hole_after >= missing ? r->hole_after : r->hole_before);
    }
    size_t hole = shortest_hole(v, pages);
    if (hole == v->holes) {
        plan->place = POLICY_NO_HOLE;
        return true;
    }
    plan->place = POLICY_FRESH;
    plan->page = v->hole[hole].page;
    return harvest_pages(p, plan, v, pages, v->hole[hole].pages);
}

/*
 * Extents, those worth most first, of equals the lower page.
 */

/* The longest are, of which one that must be waited for counts a third. */
static uint32_t worth_pages(const struct policy_view *v, size_t extent)
{
    uint32_t pages = v->extent[extent].pages;
    return v->run[v->extent[extent].run].waits ? (pages + 2) / 3 : pages;
}

static bool sort_by_size(struct policy *p, const struct policy_view *v)
{
    size_t n = v->extents;
    if (n == 0)
        return true; /* there may be no array yet */
    if (2 * n > p->by_size_capacity) {
        uint64_t *grown = realloc(p->by_size, 4 * n * sizeof *grown);
        if (!grown)
            return false;
        p->by_size = grown;
        p->by_size_capacity = 4 * n;
    }
    for (size_t i = 0; i < n; i++)
        p->by_size[i] = radix_key(UINT32_MAX - worth_pages(v, i), (uint32_t)i);
    radix_sort(p->by_size, p->by_size + n, n);
    return true;
}

static uint32_t sorted(const struct policy *p, size_t i)
{
    return radix_number(p->by_size[i]);
}

/*
 * Growth is created in equal handles: small ones while much memory is stuck, large ones while little is, but never into
 * more than there is time for.
 */
static double interpolate(double at_none, double at_high, double share, double high)
{
    return share >= high ? at_high : at_none + (at_high - at_none) * share / high;
}

/* Rule 11. */
static void steer_patience(struct policy *p, const struct policy_view *v)
{
    double idle = v->mapped_pages ? (double)movable_pages(v) / (double)v->mapped_pages : 0;
    p->patience = interpolate(1, 0, idle, IDLE_HIGH);
}

static void steer_handles(struct policy *p, const struct policy_view *v)
{
    p->handle_pages = interpolate(HANDLE_MOST, HANDLE_LEAST, stuck_share(v), STUCK_HIGH) * p->step;
}

/* By whatever sets a limit to a handle. */
static uint32_t longest_allowed(const struct policy *p, const struct policy_view *v)
{
    uint32_t longest = p->max_extent < v->longest_handle ? p->max_extent : v->longest_handle;
    return longest > p->step ? longest / p->step * p->step : p->step;
}

static uint32_t handles_of(const struct policy *p, const struct policy_view *v, uint32_t pages)
{
    double handle = p->handle_pages;
    if (handle > longest_allowed(p, v))
        handle = longest_allowed(p, v);
    uint32_t whole = (uint32_t)handle / p->step * p->step;
    return pages / whole + (pages % whole != 0);
}

static double growth_us(const struct policy *p, uint32_t pages, uint32_t handles)
{
    return handles ? handles * create_us(p, (pages + handles - 1) / handles) : 0;
}

/* Of growth by so many pages. A long handle is seldom wholly free again, and what is left of it is stuck. */
static uint32_t longest_handle(const struct policy *p, const struct policy_view *v, uint32_t pages)
{
    uint32_t longest = pages / GROWTH_HANDLES / p->step;
    longest = (longest > HANDLE_LONGEST ? longest : HANDLE_LONGEST) * p->step;
    return longest < longest_allowed(p, v) ? longest : longest_allowed(p, v);
}

/* Fewer and larger ones where the time left does not suffice, as far as the cap on extents allows. */
static uint32_t handles_within(const struct policy *p, const struct policy_view *v, uint32_t pages, double us)
{
    uint32_t handles = handles_of(p, v, pages);
    uint32_t longest = longest_handle(p, v, pages);
    uint32_t fewest = pages ? (pages - 1) / longest + 1 : 0;
    double most = us / create_us(p, p->step); /* of the cheapest */
    if (handles > most)
        handles = most > fewest ? (uint32_t)most : fewest;
    while (handles > fewest && growth_us(p, pages, handles) > us)
        handles--;
    return handles;
}

/*
 * A filling: how the missing pages of one candidate come together. The extents that fit, those worth most first, up to
 * by_size index `stop`; then one longer extent (`cover`) or growth for the rest.
 */
struct filling {
    bool possible;
    double us;  /* driver time */
    bool waits; /* for other streams */
    size_t stop;
    uint32_t cover; /* UINT32_MAX: none */
    uint32_t grow;
    uint32_t handles; /* of what grows */
    uint64_t pages;   /* in sum */
};

static bool waits(const struct policy_view *v, uint32_t extent)
{
    return v->run[v->extent[extent].run].waits;
}

/* Others wait out the driver's calls of this malloc, and so they pay for them too. */
static double price_of(const struct policy *p, const struct policy_view *v, const struct filling *f)
{
    uint32_t waiters = v->waiters < WAITERS_MOST ? v->waiters : WAITERS_MOST;
    return f->us * (1 + p->patience * WAITER_COST * waiters) + (f->waits ? WAIT_US : 0) +
           CREATED_STEP_US / p->step * f->grow;
}

/* Driver time for one malloc, by the cost model. */
static double slow_us(const struct policy_view *v)
{
    return SLOW_US / v->slowness;
}

enum { NO_RUN = -1 };

static void consider(const struct policy *p, const struct policy_view *v, struct filling *best, struct filling f,
                     uint64_t room)
{
    if (f.pages > room || (best->possible && price_of(p, v, &f) >= price_of(p, v, best)))
        return;
    f.possible = true;
    *best = f;
}

/* Ends the filling `f`, which still misses `rest` pages, in each way there is. */
static void finish(const struct policy *p, const struct policy_view *v, struct filling f, uint32_t rest,
                   uint32_t longer, uint64_t room, struct filling *best)
{
    struct filling g = f;
    g.cover = UINT32_MAX;
    g.grow = (uint32_t)whole_steps(p, rest);
    g.handles = handles_within(p, v, g.grow, slow_us(v) - f.us);
    g.us += growth_us(p, g.grow, g.handles);
    g.pages += g.grow;
    if (g.grow <= v->creatable_pages)
        consider(p, v, best, g, room);
    if (rest == 0 || longer == UINT32_MAX)
        return;
    uint32_t pages = v->extent[longer].pages;
    f.cover = longer;
    f.us += move_us(p, pages);
    f.waits = f.waits || waits(v, longer);
    f.pages += pages;
    consider(p, v, best, f, room);
}

/* Whether the next of the sorted extents after the ith that may move is longer than that, too. */
static bool next_is_longer(const struct policy *p, const struct policy_view *v, size_t i, int64_t run, uint32_t pages)
{
    for (i++; i < v->extents; i++)
        if (v->extent[sorted(p, i)].run != run)
            return v->extent[sorted(p, i)].pages > pages;
    return false;
}

static struct filling fill(const struct policy *p, const struct policy_view *v, uint32_t missing, int64_t run,
                           uint64_t room)
{
    struct filling best = {0}, f = {.waits = run != NO_RUN && v->run[run].waits};
    uint32_t longer = UINT32_MAX;
    finish(p, v, f, missing, longer, room, &best);
    for (size_t i = 0; i < v->extents && missing > 0; i++) {
        uint32_t e = sorted(p, i), pages = v->extent[e].pages;
        if (v->extent[e].run == run)
            continue;
        f.stop = i + 1;
        if (pages > missing) {
            longer = e;
            /* Only the last of the longer ones is worth pricing. */
            if (next_is_longer(p, v, i, run, missing))
                continue;
        } else {
            f.us += move_us(p, pages);
            f.waits = f.waits || waits(v, e);
            f.pages += pages;
            missing -= pages;
        }
        finish(p, v, f, missing, longer, room, &best);
    }
    return best;
}

static bool add_filling(const struct policy *p, const struct policy_view *v, const struct filling *f, uint32_t missing,
                        int64_t run, struct policy_plan *plan)
{
    for (size_t i = 0; i < f->stop; i++) {
        uint32_t e = sorted(p, i), pages = v->extent[e].pages;
        if (v->extent[e].run == run || pages > missing)
            continue;
        missing -= pages;
        if (!add_move(plan, e))
            return false;
    }
    if (f->cover != UINT32_MAX && !add_move(plan, f->cover))
        return false;
    if (plan->moves > 1)
        qsort(plan->move, plan->moves, sizeof *plan->move, ascending);
    return add_creates(p, plan, f->grow, f->handles);
}

/*
 * The candidates: a fresh place, and each of the longest shorter runs that a hole adjoins.
 */
struct candidate {
    enum policy_place place;
    int64_t run;
    uint32_t missing;
    uint64_t room;
    struct filling filling;
};

static void try_candidate(const struct policy *p, const struct policy_view *v, struct candidate c,
                          struct candidate *best)
{
    c.filling = fill(p, v, c.missing, c.run, c.room);
    if (c.filling.possible && (!best->filling.possible || price_of(p, v, &c.filling) < price_of(p, v, &best->filling)))
        *best = c;
}

static bool extendable(const struct policy_run *r, uint32_t pages)
{
    return r->pages < pages && (r->hole_after >= pages - r->pages || r->hole_before >= pages - r->pages);
}

/* After the run, and before it if there is more room for a longer extent. */
static void try_run(const struct policy *p, const struct policy_view *v, size_t run, uint32_t pages,
                    struct candidate *best)
{
    const struct policy_run *r = &v->run[run];
    struct candidate up = {.place = POLICY_EXTEND_UP, .run = (int64_t)run, .missing = pages - r->pages};
    struct candidate down = up;
    up.room = r->hole_after;
    down.room = r->hole_before;
    down.place = POLICY_EXTEND_DOWN;
    if (up.room >= up.missing)
        try_candidate(p, v, up, best);
    if (down.room >= down.missing && down.room > up.room)
        try_candidate(p, v, down, best);
}

/* The longest extendable runs, in no order; how many. */
static size_t choose_runs(const struct policy_view *v, uint32_t pages, size_t chosen[CANDIDATES])
{
    size_t n = 0;
    for (size_t i = 0; i < v->runs; i++) {
        if (!extendable(&v->run[i], pages))
            continue;
        if (n < CANDIDATES) {
            chosen[n++] = i;
            continue;
        }
        size_t shortest = 0;
        for (size_t k = 1; k < n; k++)
            if (v->run[chosen[k]].pages < v->run[chosen[shortest]].pages)
                shortest = k;
        if (v->run[i].pages > v->run[chosen[shortest]].pages)
            chosen[shortest] = i;
    }
    return n;
}

/* Before giving up: the run with the most pages that nothing else can use. */
static void try_most_stuck(const struct policy *p, const struct policy_view *v, uint32_t pages, struct candidate *best)
{
    size_t most = v->runs;
    for (size_t i = 0; i < v->runs; i++)
        if (extendable(&v->run[i], pages) &&
            (most == v->runs || stuck_pages(v, &v->run[i]) > stuck_pages(v, &v->run[most])))
            most = i;
    if (most < v->runs)
        try_run(p, v, most, pages, best);
}

static uint64_t ample_pages(uint64_t mapped_pages, uint64_t pages)
{
    uint64_t ample = (uint64_t)(FRESH_TIMES * (double)pages), share = (uint64_t)(FRESH_SHARE * (double)mapped_pages);
    return ample > share ? ample : share;
}

uint64_t policy_hole_pages(const struct policy *p, uint64_t mapped_pages, uint32_t pages)
{
    return p->max_extent == 1 ? pages : ample_pages(mapped_pages, pages);
}

/* In the lowest hole with ample room, at its front or near it: used memory stays together and can be extended. */
static uint64_t fresh_page(const struct policy_view *v, uint64_t pages)
{
    uint64_t ample = ample_pages(v->mapped_pages, pages);
    for (size_t i = 0; i < v->holes; i++)
        if (v->hole[i].pages >= ample)
            return v->hole[i].page + (v->several_builders ? ROOM_TIMES * pages : 0);
    return v->hole[longest_hole(v)].page;
}

static bool plan_extents(struct policy *p, const struct policy_view *v, uint32_t pages, struct policy_plan *plan)
{
    size_t chosen[CANDIDATES];
    struct candidate best = {0}, fresh = {.place = POLICY_FRESH, .run = NO_RUN, .missing = pages};
    if (!sort_by_size(p, v))
        return false;
    steer_handles(p, v);
    steer_patience(p, v);
    fresh.room = longest_hole_pages(v);
    if (fresh.room >= pages)
        try_candidate(p, v, fresh, &best); /* first, so that of equals it wins: by 0.001 in held */
    size_t n = choose_runs(v, pages, chosen);
    for (size_t i = 0; i < n; i++)
        try_run(p, v, chosen[i], pages, &best);
    if (!best.filling.possible)
        try_most_stuck(p, v, pages, &best);
    if (!best.filling.possible) {
        plan->place = fresh.room < pages ? POLICY_NO_HOLE : POLICY_NO_MEMORY;
        return true;
    }
    plan->place = best.place;
    if (best.place == POLICY_FRESH)
        plan->page = fresh_page(v, best.filling.pages);
    else
        plan->run = (size_t)best.run;
    return add_filling(p, v, &best.filling, best.missing, best.run, plan);
}

static double moves_us(const struct policy *p, const struct policy_view *v, const struct policy_plan *plan)
{
    double us = 0;
    for (size_t i = 0; i < plan->moves; i++)
        us += move_us(p, v->extent[plan->move[i]].pages);
    return us;
}

static double driver_us(const struct policy *p, const struct policy_view *v, const struct policy_plan *plan)
{
    double us = moves_us(p, v, plan);
    for (size_t i = 0; i < plan->creates; i++)
        us += create_us(p, plan->create[i]);
    return us;
}

bool policy_plan(struct policy *p, const struct policy_view *v, uint32_t pages, struct policy_plan *plan)
{
    clear(plan);
    bool done = p->max_extent == 1 ? plan_pages(p, v, pages, plan) : plan_extents(p, v, pages, plan);
    plan->cost_us = driver_us(p, v, plan);
    return done;
}

bool policy_put_growth_off(const struct policy *p, const struct policy_view *v, struct policy_plan *plan)
{
    bool may_be_put_off = v->several_builders && plan->creates && p->max_extent != 1;
    if (!may_be_put_off || moves_us(p, v, plan) < SLOW_US)
        return false;
    plan->creates = 0;
    plan->cost_us = moves_us(p, v, plan);
    return true;
}
