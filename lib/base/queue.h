/*
 * queue.h - Concurrency Kit's structures, as this library uses them. queue.c alone includes ck.
 *
 *   object_map   objects found by a 128-bit key. Any number of readers, lock-free; one writer at a time (the caller's
 *                lock). A removed object may still be seen by a reader that looked it up before: objects are
 *                type-stable, or their readers are excluded otherwise.            (ck_hs, single producer mode)
 *   pile         nodes pushed by any thread, taken all at once by one. Push is lock-free, take wait-free. ABA cannot
 *                bite: nothing is ever popped singly, so no next pointer is read before it is owned. (ck_stack, upmc)
 *   ring         pointers from one producer to one consumer at a time, wait-free; holds RING_CAPACITY - 1. (ck_ring)
 *   wakeup       an event count: a waiter reads it, looks for work, and sleeps only if it has not moved since; a
 *                signal after a publication therefore cannot be missed.                       (ck_ec)
 *
 * ck works by inline assembly, which ThreadSanitizer cannot see: this file is built without it and tells it of every
 * hand-over itself. Each function's hand-over: what a put, push, enqueue or signal published happens before the get,
 * take, dequeue or return from sleep that saw it.
 */
#ifndef VPMM_LIB_QUEUE_H
#define VPMM_LIB_QUEUE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct object_key {
    uint64_t a, b;
};

struct object_map; /* objects begin with their struct object_key, constant while they are in the map */

struct object_map *object_map_create(void); /* NULL: no memory */
void object_map_destroy(struct object_map *);
void *object_map_get(struct object_map *, struct object_key); /* NULL: not there */
bool object_map_put(struct object_map *, void *object);       /* false: no memory. The key is not yet in the map */
void object_map_remove(struct object_map *, struct object_key);
void object_map_each(struct object_map *, void (*visit)(void *object, void *data), void *data); /* as a writer */

struct pile_node {
    struct pile_node *next;
};

struct pile {
    void *head[2];
};

void pile_init(struct pile *);
void pile_push(struct pile *, struct pile_node *);
struct pile_node *pile_take(struct pile *); /* newest first; NULL: empty */
bool pile_empty(const struct pile *);

enum { RING_CAPACITY = 128 };

struct ring; /* about 1.3 KiB */

struct ring *ring_create(void); /* NULL: no memory */
void ring_destroy(struct ring *);
bool ring_put(struct ring *, void *); /* false: full */
void *ring_get(struct ring *);        /* NULL: empty */

struct wakeup {
    uint32_t count[2];
};

void wakeup_init(struct wakeup *);
uint32_t wakeup_read(struct wakeup *);
void wakeup_signal(struct wakeup *);
/* Sleeps until a signal that came after `seen` was read, or for at most timeout_ns (0: for ever). */
void wakeup_wait(struct wakeup *, uint32_t seen, uint64_t timeout_ns);
/* Looks again and again for a signal that came after `seen` was read, for at most timeout_ns. False: there was none. */
bool wakeup_spin(struct wakeup *, uint32_t seen, uint64_t timeout_ns);

#endif
