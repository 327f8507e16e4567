#include "policy.h"

#include "atomic.h"

#include <stdlib.h>
#include <string.h>

/*
 * Parameters.
 */
static const double CREATED_PAGE_US = 5; /* price of growing by a page */
static const double SURPLUS_PAGE_US = 5; /* price of moving a page more than is needed */
static const double STUCK_PAGE_US = 2;   /* worth of putting a stuck page to use */
static const double PIECE_FIRST = 32;    /* pages of the handles that growth is cut into: at first, */
static const double PIECE_MIN = 20;      /* at least, */
static const double PIECE_MAX = 48;      /* at most, */
static const double PIECES_MAX = 16;     /* and no more pieces than that in one malloc */
static const double STUCK_SHARE = 0.01;  /* more of mapped stuck than this: pieces shrink; less: they grow */
static const double PIECE_STEP = 1.1;
static const double GROWTH_SHARE = 0.0025; /* growth is at least this share of what is mapped */
static const double ROOM_BEFORE = 2048;    /* pages left free before a fresh place, */
static const double ROOM_BEFORE_TIMES = 8; /* or this many times the request; */
static const double ROOM_AFTER = 4096;     /* and after it */
static const double ROOM_AFTER_TIMES = 16;
enum { CANDIDATES = 32 }; /* runs looked at for extension, the longest */

/*
 * The cost model: h200.md's driver prices, linear between the measured sizes.
 */
struct price {
    double mib, us;
};

static const struct price CREATE[] = {{2, 5.7}, {32, 7.7}, {256, 12}, {1024, 29}, {8192, 114}};
static const struct price ACCESS[] = {{2, 18}, {32, 21}, {128, 25}, {256, 31}, {1024, 51}};
static const double MAP_US = 0.45;

enum { PRICES = 5 }; /* in each table */

static double price(const struct price *table, double mib)
{
    size_t i = 1;
    if (mib <= table[0].mib)
        return table[0].us;
    while (i < PRICES - 1 && mib > table[i].mib)
        i++;
    const struct price *a = &table[i - 1], *b = &table[i];
    return a->us + (mib - a->mib) * (b->us - a->us) / (b->mib - a->mib);
}

static double move_us(const struct policy *p, uint32_t pages)
{
    return MAP_US + price(ACCESS, pages * p->page_mib);
}

static double create_us(const struct policy *p, uint32_t pages)
{
    return price(CREATE, pages * p->page_mib) + move_us(p, pages);
}

void policy_init(struct policy *p, uint64_t page_size_bytes, uint32_t max_extent_pages)
{
    memset(p, 0, sizeof *p);
    p->page_mib = (double)page_size_bytes / (1 << 20);
    p->max_extent = max_extent_pages ? max_extent_pages : UINT32_MAX;
    p->piece_pages = PIECE_FIRST;
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

static unsigned bin_of(uint32_t pages)
{
    if (pages <= 64)
        return pages - 1;
    unsigned log2 = 31 - (unsigned)__builtin_clz(pages);
    unsigned bin = 64 + (log2 - 6) * 8 + ((pages >> (log2 - 3)) & 7);
    return bin < POLICY_BINS ? bin : POLICY_BINS - 1;
}

void policy_note(struct policy *p, uint32_t pages)
{
    fetch_add_relaxed_u32(&p->asked[bin_of(pages)], 1);
}

/*
 * Plans under construction.
 */
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

static int ascending(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
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

/*
 * The specification's mode: every extent is one page, so all free memory moves, and growth is exactly the shortfall.
 */
static size_t longest_extendable(const struct policy_view *v, uint32_t pages)
{
    size_t best = v->runs;
    for (size_t i = 0; i < v->runs; i++) {
        const struct policy_run *r = &v->run[i];
        uint32_t missing = pages - r->pages;
        if ((r->hole_after >= missing || r->hole_before >= missing) &&
            (best == v->runs || r->pages > v->run[best].pages))
            best = i;
    }
    return best;
}

/* Runs in ascending order; one of which at least half is needed moves whole, if there is room for the surplus. */
static bool harvest_pages(struct policy_plan *plan, const struct policy_view *v, uint64_t missing, uint64_t room)
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
    for (; missing > 0; missing--)
        if (!add_create(plan, 1))
            return false;
    return true;
}

static bool plan_pages(const struct policy_view *v, uint32_t pages, struct policy_plan *plan)
{
    size_t run = longest_extendable(v, pages);
    if (run < v->runs) {
        const struct policy_run *r = &v->run[run];
        uint32_t missing = pages - r->pages;
        plan->run = run;
        plan->place = r->hole_after >= missing ? POLICY_EXTEND_UP : POLICY_EXTEND_DOWN;
        return harvest_pages(plan, v, missing, r->hole_after >= missing ? r->hole_after : r->hole_before);
    }
    size_t hole = shortest_hole(v, pages);
    if (hole == v->holes) {
        plan->place = POLICY_NO_HOLE;
        return true;
    }
    plan->place = POLICY_FRESH;
    plan->page = v->hole[hole].page;
    return harvest_pages(plan, v, pages, v->hole[hole].pages);
}

/*
 * Extents, longest first: a radix sort on (pages, then the lower page), 11 bits a turn.
 */
enum { RADIX_BITS = 11, RADIX = 1 << RADIX_BITS };

static bool sort_by_size(struct policy *p, const struct policy_view *v)
{
    size_t n = v->extents;
    if (2 * n > p->by_size_capacity) {
        uint64_t *grown = realloc(p->by_size, 4 * n * sizeof *grown);
        if (!grown)
            return false;
        p->by_size = grown;
        p->by_size_capacity = 4 * n;
    }
    uint64_t *from = p->by_size, *to = p->by_size + n;
    uint32_t longest = 0;
    for (size_t i = 0; i < n; i++) {
        from[i] = (uint64_t)v->extent[i].pages << 32 | i;
        if (v->extent[i].pages > longest)
            longest = v->extent[i].pages;
    }
    for (unsigned shift = 0; shift < 32 && longest >> shift; shift += RADIX_BITS) {
        size_t start[RADIX + 1] = {0};
        for (size_t i = 0; i < n; i++)
            start[RADIX - 1 - (from[i] >> (32 + shift) & (RADIX - 1)) + 1]++;
        for (size_t d = 0; d < RADIX; d++)
            start[d + 1] += start[d];
        for (size_t i = 0; i < n; i++)
            to[start[RADIX - 1 - (from[i] >> (32 + shift) & (RADIX - 1))]++] = from[i];
        uint64_t *swap = from;
        from = to;
        to = swap;
    }
    if (from != p->by_size)
        memcpy(p->by_size, from, n * sizeof *from);
    return true;
}

static uint32_t sorted(const struct policy *p, size_t i)
{
    return (uint32_t)p->by_size[i];
}

/*
 * Growth is cut into equal pieces.
 */
static uint32_t pieces_of(const struct policy *p, uint32_t pages)
{
    double piece = p->piece_pages;
    if (pages / PIECES_MAX > piece)
        piece = pages / PIECES_MAX;
    if (piece > p->max_extent)
        piece = p->max_extent;
    uint32_t whole = piece < 1 ? 1 : (uint32_t)piece;
    return pages / whole + (pages % whole != 0);
}

static double growth_us(const struct policy *p, uint32_t pages)
{
    uint32_t n = pieces_of(p, pages);
    return n ? n * create_us(p, (pages + n - 1) / n) : 0;
}

static bool add_growth(const struct policy *p, struct policy_plan *plan, uint32_t pages)
{
    for (uint32_t left = pieces_of(p, pages); left > 0; left--) {
        uint32_t piece = pages / left;
        if (!add_create(plan, piece))
            return false;
        pages -= piece;
    }
    return true;
}

/*
 * A filling: how the missing pages of one candidate come together. The extents that fit, longest first, up to by_size
 * index `stop`; then one longer extent (`cover`) or growth for the rest.
 */
struct filling {
    bool possible;
    double us;    /* driver time */
    double price; /* with what its pages are worth */
    size_t stop;
    uint32_t cover; /* UINT32_MAX: none */
    uint32_t grow;
    uint64_t pages; /* in sum */
};

enum { NO_RUN = -1 };

static void consider(struct filling *best, const struct filling *f, uint64_t room)
{
    if (f->pages <= room && (!best->possible || f->price < best->price)) {
        *best = *f;
        best->possible = true;
    }
}

/* Ends the filling `f`, which still misses `rest` pages, in each way there is. */
static void finish(const struct policy *p, const struct policy_view *v, struct filling f, uint32_t rest, uint32_t longer,
                   uint64_t room, struct filling *best)
{
    struct filling g = f;
    g.cover = UINT32_MAX;
    g.grow = rest;
    if (rest > 0) {
        g.us += growth_us(p, rest);
        g.price += growth_us(p, rest) + CREATED_PAGE_US * rest;
        g.pages += rest;
    }
    if (rest <= v->creatable_pages)
        consider(best, &g, room);
    if (rest == 0 || longer == UINT32_MAX)
        return;
    uint32_t pages = v->extent[longer].pages;
    g = f;
    g.cover = longer;
    g.grow = 0;
    g.us += move_us(p, pages);
    g.price += move_us(p, pages) + SURPLUS_PAGE_US * (pages - rest);
    g.pages += pages;
    consider(best, &g, room);
}

static struct filling fill(const struct policy *p, const struct policy_view *v, uint32_t missing, int64_t run,
                           uint64_t room)
{
    struct filling best = {0}, f = {0};
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
            if (i + 1 < v->extents && v->extent[sorted(p, i + 1)].pages > missing)
                continue;
        } else {
            f.us += move_us(p, pages);
            f.price += move_us(p, pages);
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
    qsort(plan->move, plan->moves, sizeof *plan->move, ascending);
    return add_growth(p, plan, f->grow);
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
    double price;
};

static uint64_t stuck_pages(const struct policy_view *v, const struct policy_run *r)
{
    uint64_t stuck = r->pages;
    for (uint32_t i = 0; i < r->extents; i++)
        stuck -= v->extent[r->first_extent + i].pages;
    return stuck;
}

static void try_candidate(const struct policy *p, const struct policy_view *v, struct candidate c, double worth,
                          struct candidate *best)
{
    c.filling = fill(p, v, c.missing, c.run, c.room);
    c.price = c.filling.price - worth;
    if (c.filling.possible && (!best->filling.possible || c.price < best->price))
        *best = c;
}

static void try_run(const struct policy *p, const struct policy_view *v, size_t run, uint32_t pages,
                    struct candidate *best)
{
    const struct policy_run *r = &v->run[run];
    struct candidate c = {.run = (int64_t)run, .missing = pages - r->pages};
    double worth = STUCK_PAGE_US * (double)stuck_pages(v, r);
    c.place = POLICY_EXTEND_UP;
    c.room = r->hole_after;
    if (c.room >= c.missing)
        try_candidate(p, v, c, worth, best);
    else if (r->hole_before >= c.missing) {
        c.place = POLICY_EXTEND_DOWN;
        c.room = r->hole_before;
        try_candidate(p, v, c, worth, best);
    }
}

/* The longest extendable runs shorter than `pages`, in no order; how many. */
static size_t choose_runs(const struct policy_view *v, uint32_t pages, size_t chosen[CANDIDATES])
{
    size_t n = 0;
    for (size_t i = 0; i < v->runs; i++) {
        const struct policy_run *r = &v->run[i];
        if (r->pages >= pages || (r->hole_after < pages - r->pages && r->hole_before < pages - r->pages))
            continue;
        if (n < CANDIDATES) {
            chosen[n++] = i;
            continue;
        }
        size_t shortest = 0;
        for (size_t k = 1; k < n; k++)
            if (v->run[chosen[k]].pages < v->run[chosen[shortest]].pages)
                shortest = k;
        if (r->pages > v->run[chosen[shortest]].pages)
            chosen[shortest] = i;
    }
    return n;
}

/* A fresh place has room before and after it, so that what is built there can be extended later. */
static uint64_t fresh_page(const struct policy_view *v, uint64_t pages)
{
    double before = ROOM_BEFORE_TIMES * (double)pages, after = ROOM_AFTER_TIMES * (double)pages;
    if (before < ROOM_BEFORE)
        before = ROOM_BEFORE;
    if (after < ROOM_AFTER)
        after = ROOM_AFTER;
    uint64_t room = (uint64_t)(before + after) + pages;
    for (size_t i = 0; i < v->holes; i++)
        if (v->hole[i].pages >= room)
            return v->hole[i].page + (uint64_t)before;
    size_t i = longest_hole(v);
    return v->hole[i].page + (v->hole[i].pages - pages) / 3;
}

/* Pieces shrink while much memory is stuck in partly free extents, and grow while little is. */
static void steer_pieces(struct policy *p, const struct policy_view *v)
{
    uint64_t stuck = 0;
    for (size_t i = 0; i < v->runs; i++)
        stuck += stuck_pages(v, &v->run[i]);
    if (v->mapped_pages == 0)
        return;
    if ((double)stuck > STUCK_SHARE * (double)v->mapped_pages)
        p->piece_pages /= PIECE_STEP;
    else
        p->piece_pages *= PIECE_STEP;
    if (p->piece_pages < PIECE_MIN)
        p->piece_pages = PIECE_MIN;
    if (p->piece_pages > PIECE_MAX)
        p->piece_pages = PIECE_MAX;
}

/* Very small growth is rounded up, so that a handle is worth its price. */
static void round_growth(const struct policy_view *v, struct candidate *c)
{
    struct filling *f = &c->filling;
    uint64_t least = (uint64_t)(GROWTH_SHARE * (double)v->mapped_pages);
    if (f->grow == 0 || f->grow >= least || least > v->creatable_pages)
        return;
    if (f->pages + (least - f->grow) > c->room)
        return;
    f->pages += least - f->grow;
    f->grow = (uint32_t)least;
}

static bool plan_extents(struct policy *p, const struct policy_view *v, uint32_t pages, struct policy_plan *plan)
{
    size_t chosen[CANDIDATES];
    struct candidate best = {0}, fresh = {.place = POLICY_FRESH, .run = NO_RUN, .missing = pages};
    if (!sort_by_size(p, v))
        return false;
    steer_pieces(p, v);
    if (v->holes)
        fresh.room = v->hole[longest_hole(v)].pages;
    if (fresh.room >= pages)
        try_candidate(p, v, fresh, 0, &best);
    size_t n = choose_runs(v, pages, chosen);
    for (size_t i = 0; i < n; i++)
        try_run(p, v, chosen[i], pages, &best);
    if (!best.filling.possible) {
        plan->place = fresh.room < pages ? POLICY_NO_HOLE : POLICY_NO_MEMORY;
        return true;
    }
    round_growth(v, &best);
    plan->place = best.place;
    plan->run = best.run == NO_RUN ? 0 : (size_t)best.run;
    plan->page = best.place == POLICY_FRESH ? fresh_page(v, best.filling.pages) : 0;
    return add_filling(p, v, &best.filling, best.missing, best.run, plan);
}

static double driver_us(const struct policy *p, const struct policy_view *v, const struct policy_plan *plan)
{
    double us = 0;
    for (size_t i = 0; i < plan->moves; i++)
        us += move_us(p, v->extent[plan->move[i]].pages);
    for (size_t i = 0; i < plan->creates; i++)
        us += create_us(p, plan->create[i]);
    return us;
}

bool policy_plan(struct policy *p, const struct policy_view *v, uint32_t pages, struct policy_plan *plan)
{
    plan->moves = plan->creates = 0;
    plan->run = 0;
    plan->page = 0;
    bool done = p->max_extent == 1 ? plan_pages(v, pages, plan) : plan_extents(p, v, pages, plan);
    plan->cost_us = driver_us(p, v, plan);
    return done;
}

bool policy_plan_ahead(struct policy *p, const struct policy_view *v, double budget_us, struct policy_plan *plan,
                       uint32_t *pages)
{
    (void)p;
    (void)v;
    (void)budget_us;
    plan->moves = plan->creates = 0;
    plan->place = POLICY_NOTHING;
    plan->cost_us = 0;
    *pages = 0;
    return true;
}
