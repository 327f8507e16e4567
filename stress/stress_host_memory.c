/*
 * stress_host_memory.c - the host's memory and threads as the pool sees them when they are to fail: with planned
 * faults, the C library's functions refuse now and then what a call of the pool's asks them for: the creation of a
 * pool, a malloc, a free, the release of a stream or a trim; the pool's own thread is spared. What the program and the
 * simulated GPU ask for they have: a thread says when it is in a call of the pool's, and the driver's table
 * (stress_faults.c) that it has left it for a while.
 *
 * The program is linked with --wrap for each function that stands here.
 */
#include "stress.h"

#include <errno.h>
#include <sys/mman.h>

enum { SELDOM = 32, SELDOM_IN_CREATION = 512, SELDOM_THREADS = 4 }; /* of so many requests, one is refused */

static atomic_bool may_fail;
static _Thread_local unsigned in_pool; /* 0: it is not; else of so many requests for memory one is refused */
static _Atomic(uint64_t) refusals, threads_refused, seeds;

void host_memory_set(bool fails)
{
    atomic_store(&may_fail, fails);
}

void host_memory_enter(void)
{
    in_pool = SELDOM;
}

void host_memory_enter_creation(void)
{
    in_pool = SELDOM_IN_CREATION;
}

unsigned host_memory_leave(void)
{
    unsigned was_in = in_pool;
    in_pool = 0;
    return was_in;
}

void host_memory_return(unsigned was_in)
{
    in_pool = was_in;
}

uint64_t host_memory_refused(void)
{
    return atomic_load(&refusals);
}

uint64_t host_threads_refused(void)
{
    return atomic_load(&threads_refused);
}

/* One of so many requests. */
static bool is_chosen(uint64_t seldom, _Atomic(uint64_t) *count)
{
    static _Thread_local uint64_t random;
    if (!in_pool || !atomic_load_explicit(&may_fail, memory_order_relaxed))
        return false;
    if (random == 0)
        random = (atomic_fetch_add(&seeds, 1) + 1) * UINT64_C(0x9E3779B97F4A7C15);
    if (random_below(&random, seldom) != 0)
        return false;
    atomic_fetch_add_explicit(count, 1, memory_order_relaxed);
    return true;
}

static bool is_refused(void)
{
    bool refused = is_chosen(in_pool, &refusals);
    if (refused)
        errno = ENOMEM;
    return refused;
}

/* ---- the C library's functions, as the linker names them ---- */

void *__real_malloc(size_t);
void *__real_calloc(size_t, size_t);
void *__real_realloc(void *, size_t);
void *__real_aligned_alloc(size_t, size_t);
void *__real_mmap(void *, size_t, int, int, int, off_t);

void *__wrap_malloc(size_t);
void *__wrap_malloc(size_t size)
{
    return is_refused() ? NULL : __real_malloc(size);
}

void *__wrap_calloc(size_t, size_t);
void *__wrap_calloc(size_t count, size_t size)
{
    return is_refused() ? NULL : __real_calloc(count, size);
}

void *__wrap_realloc(void *, size_t);
void *__wrap_realloc(void *at, size_t size)
{
    return is_refused() ? NULL : __real_realloc(at, size);
}

void *__wrap_aligned_alloc(size_t, size_t);
void *__wrap_aligned_alloc(size_t alignment, size_t size)
{
    return is_refused() ? NULL : __real_aligned_alloc(alignment, size);
}

void *__wrap_mmap(void *, size_t, int, int, int, off_t);
void *__wrap_mmap(void *at, size_t bytes, int protection, int flags, int file, off_t offset)
{
    return is_refused() ? MAP_FAILED : __real_mmap(at, bytes, protection, flags, file, offset);
}

int __real_pthread_create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);

int __wrap_pthread_create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*begin)(void *), void *argument)
{
    return is_chosen(SELDOM_THREADS, &threads_refused) ? EAGAIN
                                                       : __real_pthread_create(thread, attributes, begin, argument);
}
