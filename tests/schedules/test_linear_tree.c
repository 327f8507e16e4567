/*
 * Small histories of a few threads on the ordered set, each held against a plain set that does one operation at a time:
 * there is an order of the operations, in which none stands before one that had returned before it began, that the
 * plain set would have answered likewise (Wing and Gong).
 *
 *   insert          always right
 *   remove          right if it is told whether the element is there
 *   take of x       right if x is there, and not below where the search began: any such element does
 *   none            of take or next: right if no such element is there
 *   next is x       in the order: always right. Beside it: x was inserted before the search returned, and it was not
 *                   removed before the search began; nothing between `from` and x was in the set during the whole
 * search
 *
 * Histories are drawn at random; each runs in a schedule that the explorer draws. VPMM_TEST_HISTORY is the number of
 * one, for VPMM_TEST_SCHEDULE. VPMM_TEST_SCHEDULES, _SEED and _SCHEDULE as explore.h says.
 */
#include "base/tree.h"
#include "explore.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { THREADS = 3, OPERATIONS = 4, ALL = THREADS * OPERATIONS, CAPACITY = 1 << 16, WORDS = 1024 + 32 + 1 };

/* Of each pair one is in the other's leaf, or one in the next leaf, or below another bit of the root. */
static const uint64_t element[] = {1, 2, 65, 2050, 2051, 5000};

enum { ELEMENTS = sizeof element / sizeof *element };

enum kind { INSERT, REMOVE, TAKE, NEXT };

struct operation {
    enum kind kind;
    int e;     /* the element's number; of take and next: where the search begins; afterwards, */
    int found; /* which it has taken or met; ELEMENTS: none */
    bool told; /* of remove */
    uint64_t begun, returned;
};

static struct {
    struct tree tree;
    _Atomic(uint64_t) words[WORDS];
    uint64_t drawn, random, clock;
    unsigned initial; /* elements, as bits */
    struct operation operation[ALL];
    uint64_t nones, removes;
} linear;

static uint64_t draw(uint64_t below)
{
    linear.random ^= linear.random << 13;
    linear.random ^= linear.random >> 7;
    linear.random ^= linear.random << 17;
    return (linear.random >> 11) % below;
}

static enum kind draw_kind(void)
{
    uint64_t kind = draw(8);
    return kind < 3 ? INSERT : kind < 5 ? REMOVE : kind < 7 ? TAKE : NEXT;
}

static void draw_history(void)
{
    linear.random = ++linear.drawn * UINT64_C(0x9E3779B97F4A7C15) | 1;
    uint64_t elements = 2 + draw(ELEMENTS - 1); /* the fewer they are the more they meet */
    int first = (int)draw(ELEMENTS - elements + 1);
    linear.initial = 0;
    for (int i = 0; i < ALL; i++) {
        enum kind kind = draw_kind();
        int e = first + (int)draw(elements);
        if ((kind == TAKE || kind == NEXT) && draw(3))
            e = 0;
        linear.operation[i] = (struct operation){.kind = kind, .e = e, .found = ELEMENTS};
    }
    for (uint64_t i = draw(3); i > 0; i--)
        linear.initial |= 1u << (first + (int)draw(elements));
}

static void open_linear(void *data)
{
    (void)data;
    memset(linear.words, 0, sizeof linear.words);
    tree_init(&linear.tree, linear.words, CAPACITY);
    draw_history();
    linear.clock = 0;
    for (int e = 0; e < ELEMENTS; e++)
        if (linear.initial >> e & 1)
            tree_insert(&linear.tree, element[e]);
}

static int number_of(uint64_t x)
{
    for (int e = 0; e < ELEMENTS; e++)
        if (element[e] == x)
            return e;
    explore_fail("%llu is found, and nobody has inserted it", (unsigned long long)x);
    return ELEMENTS;
}

static void do_operation(struct operation *o)
{
    uint64_t x;
    o->begun = ++linear.clock;
    switch (o->kind) {
    case INSERT:
        tree_insert(&linear.tree, element[o->e]);
        break;
    case REMOVE:
        o->told = tree_remove(&linear.tree, element[o->e]);
        break;
    case TAKE:
        o->found = tree_take(&linear.tree, element[o->e], &x) ? number_of(x) : ELEMENTS;
        break;
    case NEXT:
        o->found = tree_next(&linear.tree, element[o->e], &x) ? number_of(x) : ELEMENTS;
        break;
    }
    o->returned = ++linear.clock;
}

static void act(void *data)
{
    (void)data;
    for (int i = 0; i < OPERATIONS; i++)
        do_operation(&linear.operation[explore_actor() * OPERATIONS + i]);
}

/* ---- the plain set ---- */

/* Whether the set answers as the tree did; if so it has done the operation. */
static bool answers(unsigned *set, const struct operation *o)
{
    bool none = o->found == ELEMENTS;
    switch (o->kind) {
    case INSERT:
        *set |= 1u << o->e;
        return true;
    case REMOVE:
        if (o->told != (*set >> o->e & 1))
            return false;
        *set &= ~(1u << o->e);
        return true;
    case TAKE:
        if (none)
            return !(*set >> o->e);
        if (o->found < o->e || !(*set >> o->found & 1))
            return false;
        *set &= ~(1u << o->found);
        return true;
    case NEXT:
        return none ? !(*set >> o->e) : o->found >= o->e;
    }
    return false;
}

/* Which operations are done is a set of bits; of a thread those before `at` are. What has been looked at in vain is
   not looked at again. */
struct search {
    bool vain[(OPERATIONS + 1) * (OPERATIONS + 1) * (OPERATIONS + 1)][1 << ELEMENTS];
};

static bool find_order(struct search *search, unsigned set, const int at[THREADS], unsigned end)
{
    int key = (at[0] * (OPERATIONS + 1) + at[1]) * (OPERATIONS + 1) + at[2];
    uint64_t first_return = UINT64_MAX;
    bool all = true;
    if (search->vain[key][set])
        return false;
    for (int t = 0; t < THREADS; t++)
        if (at[t] < OPERATIONS) {
            all = false;
            if (linear.operation[t * OPERATIONS + at[t]].returned < first_return)
                first_return = linear.operation[t * OPERATIONS + at[t]].returned;
        }
    if (all)
        return set == end;
    for (int t = 0; t < THREADS; t++) {
        const struct operation *o = &linear.operation[t * OPERATIONS + at[t]];
        unsigned next = set;
        int then[THREADS] = {at[0], at[1], at[2]};
        then[t]++;
        if (at[t] < OPERATIONS && o->begun < first_return && answers(&next, o) && find_order(search, next, then, end))
            return true;
    }
    search->vain[key][set] = true;
    return false;
}

/* ---- what next has promised beside the order ---- */

static bool removes(const struct operation *o, int e)
{
    return (o->kind == REMOVE && o->told && o->e == e) || (o->kind == TAKE && o->found == e);
}

/* It was inserted before the search began, and no remove can have come between that insert and the search's end. */
static bool was_there_throughout(int e, const struct operation *next)
{
    for (int i = -1; i < ALL; i++) {
        uint64_t since = i < 0 ? 0 : linear.operation[i].begun;
        bool inserts = i < 0 ? linear.initial >> e & 1
                             : linear.operation[i].kind == INSERT && linear.operation[i].e == e &&
                                   linear.operation[i].returned < next->begun;
        bool stays = true;
        for (int j = 0; j < ALL; j++)
            stays &= !removes(&linear.operation[j], e) || linear.operation[j].returned < since ||
                     linear.operation[j].begun > next->returned;
        if (inserts && stays)
            return true;
    }
    return false;
}

/* It was inserted before the search ended, and not all inserts can have come before a remove that ended before the
   search began. */
static bool may_have_been_there(int e, const struct operation *next)
{
    bool inserted = linear.initial >> e & 1;
    uint64_t removed = 0;
    for (int i = 0; i < ALL; i++)
        if (removes(&linear.operation[i], e) && linear.operation[i].returned < next->begun &&
            linear.operation[i].begun > removed)
            removed = linear.operation[i].begun;
    inserted &= !removed;
    for (int i = 0; i < ALL; i++)
        inserted |= linear.operation[i].kind == INSERT && linear.operation[i].e == e &&
                    linear.operation[i].begun < next->returned && linear.operation[i].returned > removed;
    return inserted;
}

static bool keeps_its_promise(const struct operation *next)
{
    for (int e = next->e; e < next->found; e++)
        if (was_there_throughout(e, next))
            return false;
    return next->found == ELEMENTS || may_have_been_there(next->found, next);
}

/* ---- histories ---- */

static const char *describe(void)
{
    static const char *const names[] = {"insert", "remove", "take", "next"};
    static char text[2048];
    size_t used = (size_t)snprintf(text, sizeof text, " at first 0x%x", linear.initial);
    for (int i = 0; i < ALL; i++) {
        const struct operation *o = &linear.operation[i];
        used +=
            (size_t)snprintf(text + used, sizeof text - used, "\n    thread %d, %llu to %llu: %s %d: ", i / OPERATIONS,
                             (unsigned long long)o->begun, (unsigned long long)o->returned, names[o->kind], o->e);
        if (o->kind == REMOVE)
            used += (size_t)snprintf(text + used, sizeof text - used, "%s", o->told ? "it was there" : "it was not");
        else if (o->kind != INSERT)
            used += (size_t)snprintf(text + used, sizeof text - used, o->found == ELEMENTS ? "none" : "%d", o->found);
    }
    return text;
}

/* What is left, by searches: as the last operation of all. */
static unsigned what_is_left(void)
{
    unsigned set = 0;
    uint64_t x;
    for (uint64_t from = 0; tree_next(&linear.tree, from, &x); from = x + 1)
        set |= 1u << number_of(x);
    return set;
}

static void close_linear(void *data)
{
    static struct search search;
    (void)data;
    memset(&search, 0, sizeof search);
    explore_check(find_order(&search, linear.initial, (const int[THREADS]){0}, what_is_left()),
                  "history %llu has no order;%s", (unsigned long long)linear.drawn, describe());
    for (int i = 0; i < ALL; i++) {
        const struct operation *o = &linear.operation[i];
        explore_check(o->kind != NEXT || keeps_its_promise(o), "history %llu, thread %d, %llu to %llu: a wrong next;%s",
                      (unsigned long long)linear.drawn, i / OPERATIONS, (unsigned long long)o->begun,
                      (unsigned long long)o->returned, describe());
        linear.nones += (o->kind == NEXT || o->kind == TAKE) && o->found == ELEMENTS;
        linear.removes += o->kind == REMOVE && o->told;
    }
}

Test(linear_tree, histories, .timeout = 600, .fini = explore_report)
{
    enum { HISTORIES = 30000 };
    const char *history = getenv("VPMM_TEST_HISTORY");
    linear.drawn = history ? strtoull(history, NULL, 10) - 1 : 0;
    explore("histories", &(struct exploration){
                             .open = open_linear, .close = close_linear, .act = {act, act, act}, .random = HISTORIES});
    fprintf(stderr, "histories: %llu answers of none, %llu elements removed\n", (unsigned long long)linear.nones,
            (unsigned long long)linear.removes);
}
