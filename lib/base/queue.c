#define _GNU_SOURCE
#include "base/queue.h"

#include "base/clock.h"
#include "base/schedule.h"

#include <ck_ec.h>
#include <ck_hs.h>
#include <ck_pr.h>
#include <ck_ring.h>
#include <ck_stack.h>
#include <errno.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined CK_MD_TSO && !defined __x86_64__ && !defined __i386__
#error "ck_md.h is that of another architecture: its fences would be empty. Pass -DCK_INCLUDE_DIR=<the target's>"
#endif

/* Before what ck stores it has barriers between stores alone, and ck_hs has none before an object: so here is one. */
#ifdef VPMM_TSAN
void __tsan_acquire(void *);
void __tsan_release(void *);
static void handed_over(const void *by)
{
    ck_pr_fence_release(); /* nothing on x86-64 */
    __tsan_release((void *)by);
}
static void received(const void *from)
{
    __tsan_acquire((void *)from);
}
#else
static void handed_over(const void *by)
{
    ck_pr_fence_release(); /* nothing on x86-64 */
    (void)by;
}
static void received(const void *from)
{
    (void)from;
}
#endif

/* ---- object_map ---- */

/* Readers may still walk a table that the map has outgrown, so old tables live as long as the map. */
struct old_table {
    struct old_table *next;
};

struct object_map {
    ck_hs_t set;
    struct old_table *old;
    unsigned removals;
};

/* The map whose writer this thread is: ck's allocator has no context. */
static _Thread_local struct object_map *writing;

static void *table_malloc(size_t size)
{
    struct old_table *block = malloc(sizeof(struct old_table) + size);
    return block ? block + 1 : NULL;
}

static void table_free(void *table, size_t size, bool readers_may_look)
{
    (void)size;
    if (!table)
        return;
    struct old_table *block = (struct old_table *)table - 1;
    if (!readers_may_look || !writing) {
        free(block);
        return;
    }
    block->next = writing->old;
    writing->old = block;
}

static struct ck_malloc table_allocator = {.malloc = table_malloc, .free = table_free};

static unsigned long key_hash(const void *object, unsigned long seed)
{
    const struct object_key *key = object;
    uint64_t h = (key->a ^ seed) * UINT64_C(0x9e3779b97f4a7c15);
    h ^= h >> 29;
    h = (h + key->b) * UINT64_C(0xbf58476d1ce4e5b9);
    return h ^ (h >> 32);
}

static bool key_equal(const void *one, const void *other)
{
    const struct object_key *a = one, *b = other;
    return a->a == b->a && a->b == b->b;
}

struct object_map *object_map_create(void)
{
    struct object_map *map = calloc(1, sizeof *map);
    if (map && !ck_hs_init(&map->set, CK_HS_MODE_OBJECT | CK_HS_MODE_SPMC | CK_HS_MODE_DELETE, key_hash, key_equal,
                           &table_allocator, 64, 0x5bd1e995)) {
        free(map);
        map = NULL;
    }
    return map;
}

void object_map_destroy(struct object_map *map)
{
    if (!map)
        return;
    ck_hs_destroy(&map->set);
    while (map->old) {
        struct old_table *next = map->old->next;
        free(map->old);
        map->old = next;
    }
    free(map);
}

void *object_map_get(struct object_map *map, struct object_key key)
{
    vpmm_schedule_point(map, false);
    void *object = ck_hs_get(&map->set, CK_HS_HASH(&map->set, key_hash, &key), &key);
    received(map);
    return object;
}

bool object_map_put(struct object_map *map, void *object)
{
    vpmm_schedule_point(map, true);
    handed_over(map);
    writing = map;
    bool done = ck_hs_put_unique(&map->set, CK_HS_HASH(&map->set, key_hash, object), object);
    writing = NULL;
    return done;
}

void object_map_remove(struct object_map *map, struct object_key key)
{
    enum { REMOVALS_A_CLEANING = 256 }; /* removals leave tombstones, which lengthen every later search */
    vpmm_schedule_point(map, true);
    writing = map;
    ck_hs_remove(&map->set, CK_HS_HASH(&map->set, key_hash, &key), &key);
    if (++map->removals % REMOVALS_A_CLEANING == 0)
        ck_hs_gc(&map->set, 0, 0);
    writing = NULL;
}

void object_map_each(struct object_map *map, void (*visit)(void *, void *), void *data)
{
    ck_hs_iterator_t position = CK_HS_ITERATOR_INITIALIZER;
    void *object;
    received(map);
    while (ck_hs_next(&map->set, &position, &object))
        visit(object, data);
}

/* ---- pile ---- */

_Static_assert(sizeof(struct pile) >= sizeof(struct ck_stack), "a pile holds a ck_stack");
_Static_assert(sizeof(struct pile_node) == sizeof(struct ck_stack_entry), "a pile node is a ck_stack entry");

static struct ck_stack *stack_of(const struct pile *pile)
{
    return (struct ck_stack *)(void *)pile;
}

void pile_init(struct pile *pile)
{
    ck_stack_init(stack_of(pile));
}

void pile_push(struct pile *pile, struct pile_node *node)
{
    vpmm_schedule_point(pile, true);
    handed_over(pile);
    ck_stack_push_upmc(stack_of(pile), (struct ck_stack_entry *)(void *)node);
    ck_pr_fence_atomic_load(); /* before bell_ring's load: see sleep_until_work. Nothing on x86-64 */
}

struct pile_node *pile_take(struct pile *pile)
{
    vpmm_schedule_point(pile, true);
    struct pile_node *all = (struct pile_node *)(void *)ck_stack_batch_pop_upmc(stack_of(pile));
    received(pile);
    return all;
}

bool pile_empty(const struct pile *pile)
{
    vpmm_schedule_point(pile, false);
    return ck_pr_load_ptr(&stack_of(pile)->head) == NULL;
}

/* ---- ring ---- */

struct ring {
    ck_ring_t ring;
    ck_ring_buffer_t slot[RING_CAPACITY];
};

struct ring *ring_create(void)
{
    struct ring *ring = calloc(1, sizeof *ring);
    if (ring)
        ck_ring_init(&ring->ring, RING_CAPACITY);
    return ring;
}

void ring_destroy(struct ring *ring)
{
    free(ring);
}

bool ring_put(struct ring *ring, void *value)
{
    vpmm_schedule_point(ring, true);
    handed_over(ring);
    return ck_ring_enqueue_spsc(&ring->ring, ring->slot, value);
}

void *ring_get(struct ring *ring)
{
    void *value = NULL;
    vpmm_schedule_point(ring, true);
    if (!ck_ring_dequeue_spsc(&ring->ring, ring->slot, &value))
        return NULL;
    received(ring);
    return value;
}

/* ---- wakeup ---- */

static int ec_gettime(const struct ck_ec_ops *ops, struct timespec *now)
{
    (void)ops;
    return clock_gettime(CLOCK_MONOTONIC, now);
}

static void ec_wait32(const struct ck_ec_wait_state *state, const uint32_t *address, uint32_t expected,
                      const struct timespec *deadline)
{
    (void)state;
    syscall(SYS_futex, address, FUTEX_WAIT_BITSET_PRIVATE, expected, deadline, NULL, FUTEX_BITSET_MATCH_ANY);
}

static void ec_wake32(const struct ck_ec_ops *ops, const uint32_t *address)
{
    (void)ops;
    syscall(SYS_futex, address, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

/* The first sleep is as long as may be: every change of the count is signalled, so nothing is gained by waking up. */
static const struct ck_ec_ops ec_ops = {.gettime = ec_gettime,
                                        .wait32 = ec_wait32,
                                        .wake32 = ec_wake32,
                                        .busy_loop_iter = 1,
                                        .initial_wait_ns = 1000 * 1000 * 1000};
static const struct ck_ec_mode ec_mode = {.ops = &ec_ops, .single_producer = false};

_Static_assert(sizeof(struct wakeup) >= sizeof(struct ck_ec32), "a wakeup holds a ck_ec32");

static struct ck_ec32 *count_of(struct wakeup *wakeup)
{
    return (struct ck_ec32 *)(void *)wakeup;
}

void wakeup_init(struct wakeup *wakeup)
{
    ck_ec32_init(count_of(wakeup), 0);
}

uint32_t wakeup_read(struct wakeup *wakeup)
{
    uint32_t seen = ck_ec32_value(count_of(wakeup));
    received(wakeup);
    return seen;
}

void wakeup_signal(struct wakeup *wakeup)
{
    handed_over(wakeup);
    ck_ec32_inc(count_of(wakeup), &ec_mode);
#ifdef VPMM_SCHEDULE_POINTS
    vpmm_schedule_wake(wakeup);
#endif
}

#ifdef VPMM_SCHEDULE_POINTS
void wakeup_wait(struct wakeup *wakeup, uint32_t seen, uint64_t timeout_ns)
{
    if (ck_ec32_value(count_of(wakeup)) == seen)
        vpmm_schedule_sleep(wakeup, timeout_ns);
}

/* A thread that goes on alone would look in vain. */
bool wakeup_spin(struct wakeup *wakeup, uint32_t seen, uint64_t timeout_ns)
{
    (void)timeout_ns;
    return wakeup_read(wakeup) != seen;
}
#else
bool wakeup_spin(struct wakeup *wakeup, uint32_t seen, uint64_t timeout_ns)
{
    enum { LOOKS = 16 }; /* between two readings of the clock, so that the signal is seen at once */
    uint64_t end = clock_now_ns() + timeout_ns;
    for (unsigned i = 1; wakeup_read(wakeup) == seen; i++) {
        if (i % LOOKS == 0 && clock_now_ns() >= end)
            return false;
        ck_pr_stall();
    }
    return true;
}

void wakeup_wait(struct wakeup *wakeup, uint32_t seen, uint64_t timeout_ns)
{
    /* The first sleep is not cut short by the deadline: it must not be longer. */
    struct ck_ec_ops ops = ec_ops;
    const struct ck_ec_mode mode = {.ops = &ops, .single_producer = false};
    struct timespec deadline;
    if (timeout_ns && timeout_ns < ops.initial_wait_ns)
        ops.initial_wait_ns = (uint32_t)timeout_ns;
    if (timeout_ns) {
        clock_gettime(CLOCK_MONOTONIC, &deadline);
        timeout_ns += (uint64_t)deadline.tv_nsec;
        deadline.tv_sec += (time_t)(timeout_ns / 1000000000);
        deadline.tv_nsec = (long)(timeout_ns % 1000000000);
    }
    ck_ec32_wait(count_of(wakeup), &mode, seen, timeout_ns ? &deadline : NULL);
    received(wakeup);
}
#endif
