/*
 * play.h - what tests of schedules share: a world of one simulated GPU, made for each schedule and taken apart after
 * it, and what actors do in it.
 *
 * After each schedule: the audit, no memory with two owners at any time, no race that the simulator has found, all
 * memory freed and found again as one region under the cap, and nothing left of the pool.
 */
#ifndef VPMM_TESTS_PLAY_H
#define VPMM_TESTS_PLAY_H

#include "explore.h"
#include "pool/pool.h"
#include "support.h"

enum { CAP = 12, OWNED = 32, CHUNK_PAGES = 64, CACHE_PAGES = 16, HELD = 8 };

struct block {
    CUdeviceptr at;
    size_t bytes;
    CUstream stream;
};

extern struct play {
    struct world w;
    size_t cache_pages, cap; /* kept from one schedule to the next, as is `what` */
    size_t extent_pages;     /* of a handle, at most; 0: a page moves alone. Likewise */
    vpmm_reuse reuse;
    vpmm_streams streams;
    bool graph;    /* the pool is a graph's; likewise, as are all to look_at_stream */
    int devices;   /* 0: one */
    bool captures; /* of the configuration, as the next */
    vpmm_capture_gate capture_gate;
    void (*look_at_stream)(CUstream); /* as a call of the library's that is given a stream begins, and as it ends */
    CUstream s, t;
    struct block owned[OWNED]; /* by the actors, as they see it */
    CUdeviceptr p[HELD];
    vpmm_status status[HELD];
    uint64_t builds;
    uint32_t stamp;
    bool lost; /* a stream, destroyed without a release */
    struct exploration what;
} play;

/* ---- what actors do; what fails is noted for explore ---- */

/* Memory is owned, and written to in stream order. 0: the malloc failed. */
CUdeviceptr try_get_bytes(size_t bytes, CUstream, vpmm_status *);
CUdeviceptr get_bytes(size_t bytes, CUstream);
CUdeviceptr try_get(size_t pages, CUstream, vpmm_status *);
CUdeviceptr get(size_t pages, CUstream);
void put(CUdeviceptr, CUstream);
void put_all(void); /* what is owned */

void own(CUdeviceptr, size_t bytes, CUstream); /* it was handed out in another way, */
void disown(CUdeviceptr);                      /* or freed */
void poll_pool(void);
void release(CUstream);
void run_stream(CUstream);
void meet(CUstream); /* the thread's cache of the stream is made before the race: calls after it go the short way */
uint64_t builds_now(void);

/* ---- before and after ---- */

struct vpmm_pool *inside(void);
void open_world(void);
void look(void);
void close_world(void);
void use_context(void); /* the primary one is current on the test's thread alone until an actor says so */

void explore_play(const char *name, size_t cache_pages, struct exploration);

/* As actors' parts: open_world and close_world. */
void open_plain(void *);
void close_plain(void *);

#define SCHEDULES(name) Test(schedules, name, .timeout = 600, .fini = explore_report)

/* A function without an argument, and the same as an actor's part. */
#define PLAY(function)                                                                                                 \
    static void function(void *data);                                                                                  \
    static void function##_now(void);                                                                                  \
    static void function(void *data)                                                                                   \
    {                                                                                                                  \
        (void)data;                                                                                                    \
        if (explore_actor() >= 0)                                                                                      \
            use_context();                                                                                             \
        function##_now();                                                                                              \
    }                                                                                                                  \
    static void function##_now(void)

#endif
