/*
 * support.h - what the tests share: a world of one simulated GPU, one pool on it, and the streams made in it.
 *
 * Unless a test asks for something else the GPU stands still until it is stepped, the pool has no thread of its own,
 * and a chunk is 1 GiB: what happens, and in which order, is in the test's hand.
 *
 *   struct world w;
 *   world_open(&w, NULL);
 *   CUstream s = world_stream(&w);
 *   CUdeviceptr p = take(&w, 4, s);      // four pages, or the test fails
 *   fill(&w, p, 4, 7, s);                // a word a page, in stream order
 *   expect_later(&w, p, 4, 7, s);        // looked at when the stream gets there
 *   give(&w, p, s);
 *   world_close(&w);                     // nothing raced, nothing was misread, nothing leaks
 *
 * With VPMM_TEST_DRIVER=cuda the world is device 0 of this machine. What the tests queue is held there until it is
 * stepped (gpu.h), so most tests mean the same; those that need faults, findings, or a device of a kind of its own are
 * skipped.
 *
 * Assertions are Criterion's, which may only fail on a test's main thread; what runs on others returns what it found.
 */
#ifndef VPMM_TESTS_SUPPORT_H
#define VPMM_TESTS_SUPPORT_H

#include <criterion/criterion.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <vpmm/sim.h>
#include <vpmm/vpmm.h>

#include "payload.h"

enum { WORLD_STREAMS = 64 };

struct setup {
    vpmm_sim_config sim;
    vpmm_config pool;
};

struct world {
    vpmm_sim *sim; /* NULL: a real GPU */
    const vpmm_driver *driver;
    vpmm_pool *pool;
    CUcontext context; /* the primary one of the pool's device */
    CUdevice device;
    CUstream stream[WORLD_STREAMS];
    int streams;
    bool stepped;
    atomic_uint_fast64_t mismatches; /* words that expect_later found changed */
};

/* A stepped simulator, no reaper, no decay, 2 MiB pages, chunks of 1 GiB, no front cache. */
struct setup setup_default(void);

/* Skips the test on a real GPU. */
void needs_simulator(void);

/* NULL: setup_default(). A setup that a real GPU does not have skips the test there. The device's primary context is
 * current for the calling thread afterwards. */
void world_open(struct world *, const struct setup *);

/* The same without the pool, for tests that make it themselves; world_close takes one that they leave in w->pool. */
void world_open_without_pool(struct world *, const struct setup *);

/*
 * Destroys the pool, the streams and the simulator, and fails the test on a race, a misuse, a leak or a changed word.
 * Also where the mode of the calling thread's captures is not the one that a thread begins with.
 */
void world_close(struct world *);

/* The same, and between the pool and the rest a context that the test has made, whose streams the pool was given. */
void world_close_with(struct world *, CUcontext);

/* A non-blocking stream that world_step and world_close look after. */
CUstream world_stream(struct world *);

/* Destroys a stream of the world's and forgets it. */
void world_stream_destroy(struct world *, CUstream);

/* Runs everything that is queued on the world's streams, the legacy one included. How many operations that was. */
size_t world_step(struct world *);

/*
 * Runs at most n operations of one stream, as far as they do not wait for another stream, and says how many. A real
 * GPU is not told where to stop; with n SIZE_MAX it is waited for, and 1 is the answer if that was the end of its work.
 */
size_t world_run(struct world *, CUstream, size_t n);

/* The stream has work that is not done. */
bool world_pending(struct world *, CUstream);

/* Calls made so far of the named entry of the world's driver. */
uint64_t world_calls(struct world *, const char *call);

/* world_step and the reaper's due work, again and again until nothing changes any more. */
void world_drain(struct world *);

/*
 * From here on the calling thread's caches hold as much as they may, until the pool maps memory again: so many pages
 * are mapped for what the test will ask for. 0: none.
 */
void world_become_steady(struct world *, size_t pages);

/* The audit, the identities of the statistics, and the simulator's own findings. */
#define world_audit(w) world_audit_at((w), __FILE__, __LINE__)
void world_audit_at(struct world *, const char *file, int line);

/* Fails unless reserved = live + reusable + hole + pending and the other identities hold. NULL if they do. */
const char *stats_violation(const vpmm_stats *);

vpmm_stats stats_of(struct world *);

/* Allocates or frees, or fails the test with the pool's own words. */
#define take(w, pages, stream)       take_at((w), (pages)*PAGE, (stream), __FILE__, __LINE__)
#define take_bytes(w, bytes, stream) take_at((w), (bytes), (stream), __FILE__, __LINE__)
#define give(w, pointer, stream)     give_at((w), (pointer), (stream), __FILE__, __LINE__)
CUdeviceptr take_at(struct world *, size_t bytes, CUstream, const char *file, int line);
void give_at(struct world *, CUdeviceptr, CUstream, const char *file, int line);

/* Writes `value` into the first word of each page, in stream order. */
void fill(struct world *, CUdeviceptr, size_t pages, uint32_t value, CUstream);

/* The same on any thread. False: the driver refused. */
bool write_later(struct world *, CUdeviceptr, size_t pages, uint32_t value, CUstream);

/* Queues a look at those words; what is not `value` is counted in w->mismatches. False: the driver refused. */
bool expect_later(struct world *, CUdeviceptr, size_t pages, uint32_t value, CUstream);

/* Queues work on the stream that is not done before the stream is stepped. */
void keep_busy(struct world *, CUstream);

/* `later` does nothing from here on before `earlier` has done what is queued on it now. */
void order_after(struct world *, CUstream later, CUstream earlier);

/* A thread that asks for pages. What it was answered is there when it is done. */
struct malloc_thread {
    struct world *w;
    CUstream stream;
    size_t pages;
    pthread_t thread;
    CUdeviceptr pointer;
    vpmm_status status;
    atomic_bool done;
};

/* The test joins the thread. The other is what it does. */
void malloc_thread_start(struct malloc_thread *, struct world *, CUstream, size_t pages);
void *malloc_thread_run(void *malloc_thread);

/* Of the calling thread, if it is one of these; else NULL. */
CUstream malloc_thread_stream(void);

/*
 * The region map of vpmm_dump, "[4][-6][1][11]", without the holes at both ends; layout_whole keeps those. The text
 * is the calling thread's until its next call.
 */
const char *layout(struct world *);
const char *layout_whole(struct world *);

/* An assertion that costs nothing while it holds: Criterion sends a message for each of its own. */
#define require(condition, ...)                                                                                        \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            cr_assert(false, __VA_ARGS__);                                                                             \
    } while (0)

/* The call fails with this status, and says something that it had not said before. */
#define must_fail(want, call)                                                                                          \
    do {                                                                                                               \
        clear_words();                                                                                                 \
        vpmm_status must_fail_status = (call);                                                                         \
        require(must_fail_status == (want), "%s gives %s, not %s: %s", #call, vpmm_status_name(must_fail_status),      \
                vpmm_status_name(want), vpmm_last_error());                                                            \
        require(spoke(), "%s fails without a word of its own", #call);                                                 \
    } while (0)

#define must_work(call)                                                                                                \
    do {                                                                                                               \
        vpmm_status must_work_status = (call);                                                                         \
        require(must_work_status == VPMM_SUCCESS, "%s gives %s: %s", #call, vpmm_status_name(must_work_status),        \
                vpmm_last_error());                                                                                    \
    } while (0)

/* The same, and it leaves the thread without a current context, and its captures in the mode that it began with. */
#define must_leave_the_thread(w, call)                                                                                 \
    do {                                                                                                               \
        must_work(call);                                                                                               \
        expect_bare_thread((w), #call);                                                                                \
    } while (0)
void expect_bare_thread(struct world *, const char *call);

/* Replaces vpmm_last_error()'s words by known ones; spoke() tells whether a call has said something since. */
void clear_words(void);
bool spoke(void);

/* A thread's first failure leaves a buffer for its words, which is the thread's, and not one schedule's (explore.h). */
void fail_once(void *unused);

#endif
