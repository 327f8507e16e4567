/*
 * vpmm/vpmm.h - stream-ordered GPU memory over the CUDA virtual memory management driver API.
 *
 *   vpmm_pool *pool;
 *   vpmm_pool_create(NULL, &pool);                  // defaults, then the VPMM_* environment variables
 *   vpmm_malloc(pool, bytes, stream, &ptr);         // usable at once by work queued on stream
 *   ...queue work on stream...
 *   vpmm_free(pool, ptr, stream);                   // the use ends at this point of stream
 *   vpmm_pool_destroy(pool);
 *
 * Words
 *   page      page_size bytes. A page is wholly free, or wholly used, or cut for small requests, and then it is live
 *   piece     what a request gets of a page that is cut: one below a page, or one of up to seven pages that a whole
 *             number of them would waste more than an eighth of
 *   extent    one physical handle (cuMemCreate): a whole number of pages, and of the device's granularity, mapped whole
 *             or not at all. Several allocations may lie in one
 *   region    a run of pages of reserved address space in one state:
 *               live          handed out by vpmm_malloc, or cut into pieces
 *               reusable      mapped and free
 *               hole          unmapped
 *               pending unmap the old address of extents that were re-mapped elsewhere
 *   fence     a point in a stream. Memory freed on a stream may be used on another once its fence has passed
 *
 * Every byte of reserved address space is in exactly one state, and each physical page is counted once:
 *   reserved = live + reusable + hole + pending_unmap         mapped = live + reusable - parked
 * (parked: what has no physical memory now, though it will have it at the same address: vpmm_park. Mostly 0.)
 *
 * Memory that the pool gives back is quarantined, and not mapped any more, until the driver has taken it: as long as
 * the driver refuses to, or an old address of it is pending unmap. max_mapped is the cap of both:
 *   mapped + quarantined <= max_mapped
 * but where VPMM_ATTRIBUTE_MAX_MAPPED has set it below what there was: then nothing is made before there is less.
 *
 * Threads: every function may be called from any thread. Errors change nothing, except where a function says so;
 * vpmm_last_error() says what was wrong. The library never aborts and prints nothing. After fork a pool made by the
 * parent answers VPMM_ERROR_NOT_SUPPORTED in the child, but to vpmm_stats_get, vpmm_dump, get_attribute,
 * vpmm_pool_driver and the observers (observe.h), which show it as it was. No function may be called from a CUDA host
 * function (CUDA forbids driver calls there). Streams may be of any context of the pool's device; a context other than
 * the primary one must outlive the pools that met its streams, which keep events in it. So must the primary one itself:
 * a pool is destroyed before its device is reset (cudaDeviceReset); after a reset it is lost. A default stream (0,
 * CU_STREAM_LEGACY, CU_STREAM_PER_THREAD) is that of the thread's current context if that is of the pool's device. Else
 * it is that of the device's primary context, also where another device's context is current: work that was given
 * stream 0 there is on another stream than the pool's calls name.
 *
 * Who may call what during what. "During" is from the call of the one until its return. Each pair of functions that is
 * not named is safe at the same time, on one pool and on several.
 *   vpmm_pool_destroy, vpmm_check     during no other call on the pool, vpmm_exporter_add and _remove included, and for
 *                                     check an exporter's scrapes: otherwise the caller's mistake. While an exporter
 *                                     shows the pool destroy answers BUSY
 *   vpmm_poll                         during each other, and the pool's own reaper: one makes the pass, the other
 *                                     answers SUCCESS at once
 *   vpmm_park, vpmm_wake              during each other, mallocs and frees: safe (see vpmm_park). Work that uses the
 *                                     pool's memory on the device: the caller's mistake
 *   vpmm_dump, vpmm_stats_get, the    during anything but destroy and check: each number is right, two of them may be
 *   observers, get_attribute          of different instants
 *   vpmm_free, vpmm_free              of one pointer: one of them answers INVALID_POINTER, unless the address has been
 *                                     handed out in between, which is the caller's mistake
 *   vpmm_use, vpmm_free               of one pointer: the caller's mistake, which one of them may answer with
 *                                     INVALID_POINTER. Two vpmm_use of one pointer: safe
 *   vpmm_malloc, vpmm_free            on one stream, by any number of threads: safe. Their points of the stream are in
 *                                     the order in which the calls return, where one returns before the other begins
 *   vpmm_stream_release               during mallocs, frees and uses on the same stream: safe. Each counts as before
 *                                     the release, which then covers it, or as after: then the pool has met the stream
 *                                     anew, and it needs another release. During another release of the stream: safe
 *   cuStreamDestroy                   during no call that was given the stream; with CHECKED and TRUSTED after a
 *                                     release that no later call with the stream has followed; with EAGER at once after
 *                                     the last call. Otherwise the caller's mistake (see vpmm_streams)
 *   cuStreamBeginCapture, and a wait  during no call that was given the stream; for a blocking stream, also none that
 *   by which a stream joins a capture was given the legacy stream of its context. And as for cuStreamDestroy: after a
 *                                     release that no later call with the stream has followed, or with EAGER, or with
 *                                     `captures` in the configuration, and, where that has a capture_gate, with nobody
 *                                     inside, as for EndCapture then. Otherwise the caller's mistake: another thread
 *                                     may be recording an event on the stream just then, at which the driver crashes
 *                                     (see vpmm_config)
 *   cuStreamBeginCapture ..           calls with the capturing stream answer NOT_SUPPORTED, and so do calls with the
 *   EndCapture                        legacy stream while a blocking stream of its context captures, but for hits (see
 *                                     vpmm_malloc); but not of a pool with `graph`. All others, on other streams and
 *                                     by any thread, the capturing one included, in each of the three modes, are
 *                                     safe: they leave the capture as it is, and no stream joins it by them. That
 *                                     holds for vpmm_pool_create, trim, a request that runs out of memory, and
 *                                     vpmm_pool_destroy as well
 *   a thread's end                    leaves what it has cached to the other threads, and needs no call
 */
#ifndef VPMM_H
#define VPMM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <vpmm/driver.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this header. While the first number is 0, each change of the second may break what was. */
#define VPMM_VERSION_MAJOR          0
#define VPMM_VERSION_MINOR          1
#define VPMM_VERSION_PATCH          0
#define VPMM_VERSION                VPMM_VERSION_TEXT(VPMM_VERSION_MAJOR, VPMM_VERSION_MINOR, VPMM_VERSION_PATCH)
#define VPMM_VERSION_TEXT(x, y, z)  VPMM_VERSION_TEXT_(x, y, z)
#define VPMM_VERSION_TEXT_(x, y, z) #x "." #y "." #z

/* The version of the library that is linked, "0.1.0": a program compares it with VPMM_VERSION. Never NULL. */
const char *vpmm_version(void);

typedef enum vpmm_status {
    VPMM_SUCCESS = 0,
    VPMM_ERROR_INVALID_VALUE,        /* an argument or a setting is wrong; the message says which and what is allowed */
    VPMM_ERROR_INVALID_POINTER,      /* never allocated here, not the start of an allocation, or already freed */
    VPMM_ERROR_OUT_OF_MEMORY,        /* device memory, or the pool's cap, is exhausted after everything was tried */
    VPMM_ERROR_OUT_OF_ADDRESS_SPACE, /* the device's virtual addresses are exhausted */
    VPMM_ERROR_NOT_SUPPORTED,        /* this device, a capturing stream, a parked pool, or the child of a fork */
    VPMM_ERROR_NO_DRIVER,            /* libcuda.so.1 or a device is missing */
    VPMM_ERROR_DRIVER,               /* the driver refused a call; vpmm_last_error() names the call and its CUresult */
    VPMM_ERROR_BUSY,                 /* the pool is destroyed while allocations are live, or cannot be waited for */
    VPMM_ERROR_HOST_MEMORY,          /* the host has no memory for the pool's own records */
} vpmm_status;

/* The enumerator's name, "VPMM_ERROR_DRIVER"; "VPMM_ERROR_UNKNOWN" for a value that is none. Never NULL. */
const char *vpmm_status_name(vpmm_status);

/*
 * This thread's last failure in words; "" before the first; where the host has no memory for them, words that say so.
 * Never NULL; valid until the thread's next call, which may change it also where it succeeds, or the thread's end.
 */
const char *vpmm_last_error(void);

/* Where requests come from that whole pages do not fit. */
typedef enum vpmm_small {
    VPMM_SMALL_SLAB,  /* pieces of the pool's pages; the default. No driver call but for pages */
    VPMM_SMALL_ASYNC, /* those below a page: a CUDA memory pool of the pool's own, a driver call each, of memory that is
                         not in mapped_bytes nor under max_mapped. When the pool is destroyed, what the driver has not
                         seen complete is kept for the next one (vpmm_driver_cuda). The others: whole pages */
} vpmm_small;

/* What a request may do with free memory whose fence, on another stream, has not passed. */
typedef enum vpmm_reuse {
    VPMM_REUSE_WAIT_DEVICE, /* its stream waits for the fence on the device; the host does not. So does a request that
                               would else make the pool grow. The default */
    VPMM_REUSE_COMPLETED,   /* nothing, until the request would fail: streams stay independent */
    VPMM_REUSE_WAIT_HOST,   /* the calling thread waits for the fence of what fits best */
} vpmm_reuse;

/*
 * How a stream handle that the program has destroyed, and CUDA has given to another stream, is noticed. A program that
 * does not call vpmm_stream_release before cuStreamDestroy must choose EAGER: with the others memory freed on the
 * stream may lie in a front cache, and its end is recorded some milliseconds later by another thread, on a handle that
 * is gone, at which the driver crashes, or on the stream that has it now. Whatever the choice, a stream's id is asked
 * only in calls that are given the stream, or through the capture gate.
 */
typedef enum vpmm_streams {
    VPMM_STREAMS_CHECKED, /* the default: the stream's id is compared in every malloc. In a thread that has no context
                             current the driver takes 5 us for it, and a lock over all threads (an H200), where it
                             takes some tens of nanoseconds otherwise: make one current in threads that allocate */
    VPMM_STREAMS_TRUSTED, /* only where a call goes past the front cache */
    VPMM_STREAMS_EAGER,   /* past it always: there are no front caches, every call records its fences before it
                             returns, or leaves them to another call with the stream that is under way, and nothing is
                             done with a handle after the call that was given it. NOT_SUPPORTED at creation where the
                             driver has no cuStreamGetId (before CUDA 12) */
} vpmm_streams;

#define VPMM_DECAY_NEVER UINT64_MAX

/*
 * How an idle pool gives back (release_threshold, decay_ms). A pass, of the pool's thread or of vpmm_poll, gives
 * wholly free extents back whose work has ended, a few at a time and none while a malloc maps, as long as at least
 *
 *   max(release_threshold, bytes live or in front caches, the claim of each peak in live_bytes of the last decay_ms)
 *
 * stay mapped. A peak claims itself for half of decay_ms, and evenly less from then on until decay_ms are over; and
 * beyond itself the same share again of what was mapped beyond the peak when the pool last grew: memory that was free,
 * but behind another stream's work or not in one piece. So a program that comes back to its peak again and again within
 * that half keeps what it needs, and one that has stopped has given everything back to the threshold after decay_ms,
 * and then wakes up no more. What lies in front caches of stream 0 stays until a later call there misses the cache, or
 * vpmm_trim. The next malloc beyond what is left makes memory anew.
 */
/*
 * Captures. What lies freed in a front cache has no recorded end. While a stream is known to the pool, another thread
 * that needs the memory records one (the reaper, a request of another stream, vpmm_trim). To record an event on a
 * stream on which another thread begins or ends a capture at that instant crashes the driver (an H200, driver 580, in
 * the first second), and nothing can be seen beforehand. So a program releases a stream before it captures on it, or
 * chooses EAGER, or sets `captures`: then nobody but calls that are given a stream touches its handle, front caches
 * stay, and memory that lies in them goes to other streams when a later call on its own stream has gone past the cache,
 * or by a wait for the device, before a request fails and in vpmm_trim. Where a pool has met one stream alone, and has
 * a reaper, that is so too of what the stream has freed last: within five milliseconds, of 128 MiB or an eighth of
 * what is mapped at most. It stays the stream's own to use, and does not decay before its next such call.
 *
 * So what streams have freed last stays out of others' reach for as long as nobody calls with them. A server of four
 * workers that takes another stream for each round held 1.06 times what was in use after four rounds, and 1.17 to 1.25
 * after eight, with twice as many streams left behind. A program that can keep its captures waiting says so by a gate:
 * that server then holds 1.05 to 1.06 after eight (PyTorch 2.11, H200s).
 */
/*
 * With `captures`, but not with EAGER: how calls that need memory which a stream has freed may record an event there,
 * whatever stream they are given, or none: vpmm_malloc, vpmm_free, vpmm_trim, vpmm_poll, vpmm_pool_destroy. Each
 * function is called by any thread, by several at a time, and with locks of the pool's taken; never by the pool's own
 * thread, so that an idle pool does not give such memory back. Neither calls the pool, nor waits for who may wait for
 * the pool. Of default streams nobody asks, nor where the driver has no cuStreamGetId. Both functions are set, or
 * neither.
 *
 *   enter                            if (shut) return false; inside++; if (!shut) return true; inside--; return false
 *   leave                            inside--
 *   where the program begins, ends   shut++; while (inside) yield; the driver's call; shut--
 *   or joins a capture
 *
 * with `inside` and `shut` sequentially consistent, is such a gate. Without the first look who waits for those inside
 * would wait for as long as others come.
 */
typedef struct vpmm_capture_gate {
    /* True: until `leave` nobody destroys the stream, or lets it begin, end or join a capture, but waits for `leave`.
       False: just now somebody may; the call does without. */
    bool (*enter)(void *data, CUstream);
    /* By the same thread, a few short driver calls after an `enter` that was true. */
    void (*leave)(void *data, CUstream);
    void *data; /* lives as long as the pool */
} vpmm_capture_gate;

/*
 * Graphs. A pool with `graph` is the pool of a captured graph, or of several that never replay at once (a MemPool of
 * PyTorch). Streams that capture, in each of the three modes, may allocate and free in it, and so may others: it makes
 * no driver call with a stream, and knows one by its handle, a default stream by its context or thread.
 *   - What is freed on a stream is used again on this stream alone, at once, by this capture or a later one. What a
 *     further stream was said to use (vpmm_use) is, once it is freed, nobody's until the pool's end, because nothing is
 *     known to have passed there: order the streams before the free instead.
 *   - Nothing that was handed out is moved, unmapped or given back before the pool's end, free or not: the graph uses
 *     it in each replay. So vpmm_trim, decay and a request that is about to fail take nothing of it. vpmm_park gives
 *     its memory back while no graph runs, and vpmm_wake makes it anew at the same addresses.
 *   - There are no slices: a request of less than 8 KiB takes that much.
 *   - The program frees what is live, also after a capture that has failed, and destroys the pool when the graphs are.
 *     That waits for what vpmm_park waits for, and gives everything back.
 *   - Work outside of captures that uses the pool's memory has ended before its stream is destroyed: the next stream
 *     with the handle is the same one to the pool. vpmm_stream_release does nothing.
 * cache_bytes, small, reuse, streams, reaper, release_threshold, decay_ms, captures and capture_gate mean nothing to
 * such a pool.
 */
typedef struct vpmm_config {
    const vpmm_driver *driver; /* NULL: libcuda */
    int device;                /* CUDA ordinal                                                       VPMM_DEVICE */
    size_t page_size;          /* bytes, a power of two; 0: the device's granularity. From 256 KiB on it may be less:
                                  less is wasted of requests that are no multiple of the granularity, for programs
                                  whose large requests come again and again. Pages above 8 GiB are not cut: small
                                  is async then, and no pool with `graph` has such pages             VPMM_PAGE_SIZE */
    size_t va_size;            /* bytes of one chunk of address space, a multiple of the page and of the granularity,
                                  at most 67108863 pages; no request can be longer; 8 TiB            VPMM_VA_SIZE */
    size_t initial_pages;      /* pages mapped at creation, rounded up to the granularity; 0         VPMM_PAGES */
    size_t extent_size;        /* bytes of the largest handle, a multiple as va_size is; 0: chosen by the policy, at
                                  most a 512th of the cap or of the device's memory; page_size gives one
                                  handle a page, if that is not less than the granularity
                                                                                                     VPMM_EXTENT_SIZE */
    size_t max_mapped;         /* cap on mapped and quarantined bytes, at least a page and the granularity; 0: none
                                                                                                     VPMM_MAX_MAPPED */
    size_t cache_bytes;        /* most that one thread's front cache holds, 4 GiB; 8 MiB of it at first, and again
                                  when the pool has mapped some; twice as much each time that the thread has freed
                                  16384 times since. Of pieces of pages it holds as much besides, at most 64 MiB.
                                  0: none. CU_STREAM_PER_THREAD has none, and no pool has where the process has no
                                  pthread key left: see vpmm_malloc                                VPMM_CACHE_BYTES */
    vpmm_small small;          /*                                                  VPMM_SMALL=slab|async */
    vpmm_reuse reuse;          /*                                                  VPMM_REUSE=device|completed|host */
    vpmm_streams streams;      /*                                                  VPMM_STREAMS=checked|trusted|eager */
    bool reaper;               /* true, the default: a thread of the pool's own; false: the caller calls vpmm_poll
                                                                                                         VPMM_REAPER */
    bool exportable;           /* handles can be exported as POSIX file descriptors, where the device can:
                                  cuMemRetainAllocationHandle gives that of an address, and those of a live allocation
                                  stay the same until its free, or vpmm_park; true                   VPMM_EXPORTABLE */
    bool rdma;                 /* handles can be registered for GPUDirect RDMA, where the device can; false
                                                                                                     VPMM_RDMA */
    size_t release_threshold;  /* bytes that stay mapped however long nothing happens, at least what initial_pages
                                  says; 0                                                    VPMM_RELEASE_THRESHOLD */
    uint64_t decay_ms;         /* memory that is not needed goes back to the device little by little over so many
                                  milliseconds, at most 1000000000; 0: as soon as it is free; VPMM_DECAY_NEVER: only by
                                  vpmm_trim, or before a request fails; 10000               VPMM_DECAY_MS=...|never */
    bool captures;             /* the program captures streams without releasing them first: see above
                                                                                                     VPMM_CAPTURES */
    unsigned max_mapped_percent;    /* max_mapped as a share of the device's memory, 1 to 100; 0: none. Of two caps the
                                       lower one is the pool's. The variable sets one of them, and the other to 0
                                                                                                VPMM_MAX_MAPPED=80% */
    vpmm_capture_gate capture_gate; /* by which the program keeps them waiting: see above. No variable; none */
    bool graph;                     /* the pool of captured graphs: see above. No variable: other pools are not */
} vpmm_config;                      /* more fields may follow: start from vpmm_config_default() */

vpmm_config vpmm_config_default(void);

/*
 * Overrides fields from the environment variables named above; one that is set to nothing counts as not set. Sizes are
 * decimal bytes with an optional K, M, G or T (powers of 1024). INVALID_VALUE: a variable's text is not of its form;
 * the message names the variable, its value and what is allowed, and the configuration is unchanged.
 */
vpmm_status vpmm_config_from_env(vpmm_config *);

typedef struct vpmm_pool vpmm_pool;

/*
 * Creates a pool. NULL configuration: vpmm_config_default() with vpmm_config_from_env(). The pool retains the
 * device's primary context and starts its reaper thread if the configuration says so.
 * INVALID_VALUE: a NULL output or a wrong setting. NO_DRIVER: no libcuda, or no such device. DRIVER, OUT_OF_MEMORY,
 * OUT_OF_ADDRESS_SPACE, HOST_MEMORY: what was made before is given back.
 * A device without virtual memory management is served by its memory pools alone; so is a page_size above the
 * device's memory, up to va_size. NOT_SUPPORTED: a `graph` pool there, a device that has neither, EAGER with a driver
 * before CUDA 12.
 */
vpmm_status vpmm_pool_create(const vpmm_config *, vpmm_pool **);

/*
 * The device's default pool, made from the environment on first use, for all who ask this copy of the library. It is
 * never destroyed: vpmm_trim gives back what is free in it. Errors as for create.
 */
vpmm_status vpmm_pool_default(int device, vpmm_pool **);

/*
 * Waits for the work on freed memory, unmaps, and frees the pool. BUSY: allocations are live, the driver would not
 * wait, or an exporter shows the pool (vpmm_exporter_remove, vpmm_observe_end); nothing is changed, and the pool can be
 * destroyed again. DRIVER, HOST_MEMORY: something could not be taken back, or be waited for once more; the message says
 * what, and the pool is gone all the same: of a lost device whatever is live. NOT_SUPPORTED: the child of a fork, whose
 * pool it is not. INVALID_VALUE: a default pool, which stays as it is; a pool that another copy of the library in this
 * process made, as each function says of it. vpmm_pool_destroy(NULL) is a no-op.
 */
vpmm_status vpmm_pool_destroy(vpmm_pool *);

/*
 * What can be read, and but for what is said changed, while the pool is used; as cuMemPoolSetAttribute has it, and the
 * configuration's field of the same name. All are numbers of 64 bits.
 */
typedef enum vpmm_attribute {
    VPMM_ATTRIBUTE_RELEASE_THRESHOLD, /* bytes; any. What is above it now decays from here on. At first
                                         release_threshold, or what initial_pages mapped if that is more */
    VPMM_ATTRIBUTE_DECAY_MS,          /* milliseconds, at most 1000000000, or VPMM_DECAY_NEVER. For claims of peaks that
                                         have been, too; 0 gives back at the next pass, which begins at once */
    VPMM_ATTRIBUTE_MAX_MAPPED,        /* bytes; 0: no cap. A cap below what is mapped gives nothing back: the pool does
                                         not grow until less is mapped, by decay or vpmm_trim, and requests that what is
                                         mapped cannot serve answer OUT_OF_MEMORY. A malloc under way may still map what
                                         it has planned under the former cap */
    VPMM_ATTRIBUTE_REUSE,             /* a vpmm_reuse, for calls that begin later; one under way may use either */
    VPMM_ATTRIBUTE_PEAK_MAPPED,       /* bytes: peak_mapped_bytes, */
    VPMM_ATTRIBUTE_PEAK_LIVE,         /* peak_live_bytes, */
    VPMM_ATTRIBUTE_PEAK_REQUESTED,    /* and peak_requested_bytes. 0 sets the mark to what is mapped, live or
                                         requested now. Beside other threads' calls it can be as far off as the peak */
} vpmm_attribute;                     /* more may follow */

/*
 * Any thread, while others allocate; no lock and no driver call. One attribute is set at once; of two threads that set
 * the same one the later wins. A pool without pages (see vpmm_pool_create) keeps what is set and has no use for it.
 * INVALID_VALUE: a NULL pool, an unknown attribute, or a value that is not allowed: the message names the attribute,
 * the value and what is allowed, and nothing has changed. NOT_SUPPORTED: the child of a fork. DRIVER: the device is
 * lost.
 */
vpmm_status vpmm_pool_set_attribute(vpmm_pool *, vpmm_attribute, uint64_t value);

/* Works on any pool, as vpmm_stats_get does. INVALID_VALUE: a NULL argument, an unknown attribute. */
vpmm_status vpmm_pool_get_attribute(vpmm_pool *, vpmm_attribute, uint64_t *value);

/*
 * Says what kernels and copies of another device may do with the pool's memory, all of it, what is mapped later too; at
 * first nothing. As cuMemPoolSetAccess. CU_MEM_ACCESS_FLAGS_PROT_NONE, _READ or _READWRITE. It takes effect before the
 * call returns, which makes a driver call for each handle that the pool has (some tens of microseconds each; seconds in
 * all where the pool is large, the devices work and others build meanwhile); and each later mapping gives its rights to
 * every device that has some.
 * Any thread, while others allocate; of two calls at once the later one waits. Streams of the other device are none of
 * the pool's (see vpmm_malloc): their work with memory is ordered before its free by the program, by events.
 * INVALID_VALUE: a NULL pool, its own device, none that there is, other flags. NOT_SUPPORTED: the device cannot reach
 * the pool's memory (cuDeviceCanAccessPeer); VPMM_SMALL_ASYNC, or a device without pages; the child of a fork; 31 other
 * devices have access. DRIVER, OUT_OF_MEMORY: the driver refuses; what had new rights by then has the former ones
 * again, as far as the driver lets it. Rights are not taken from memory that is in use: the program waits before.
 */
vpmm_status vpmm_pool_set_access(vpmm_pool *, int device, CUmemAccess_flags);

/*
 * Allocates at least `bytes` bytes for work queued on `stream` from now on: whole pages, aligned to the page size, or a
 * piece, aligned to 256 bytes and, if `bytes` is a power of two from 256 to a page, to `bytes` (VPMM_SMALL_ASYNC, and
 * all of a pool without pages: to 256 alone). 0, CU_STREAM_LEGACY and CU_STREAM_PER_THREAD are streams too, of the
 * pool's device whichever is current.
 * INVALID_VALUE: zero bytes, a size that overflows when rounded, a NULL pool or output, another device's stream.
 * OUT_OF_MEMORY: the message says how much was asked, mapped, live and reusable. The thread has waited for all that had
 * been freed when nothing else was left to try, and tried again with each bit of it that had passed (but in a pool with
 * `graph`, and in one without pages, where the driver's pool is asked alone). What is freed during that wait is waited
 * for likewise where enough is free by then, or could be made, but no more than three times, and not for what the
 * driver's pool serves. What a default stream freed need not have been waited for where the device has not a byte left
 * to wait by.
 * OUT_OF_ADDRESS_SPACE: of the device, or the request is longer than va_size. DRIVER: the driver refused a call, or the
 * device is lost. NOT_SUPPORTED: the stream captures, the pool is parked, the process is the child of a fork, or the
 * request is the driver's pool's to serve (VPMM_SMALL_ASYNC) and the device has none. HOST_MEMORY: also
 * CU_STREAM_PER_THREAD, where other libraries have taken all pthread keys of the process. The output is written on
 * success only. A capture is looked for where the call goes past the thread's front cache: a hit succeeds on a
 * capturing stream with VPMM_STREAMS_TRUSTED. With CHECKED, each malloc on a stream of which the thread has a front
 * cache fails there and ends the capture, as cuStreamGetId does. Builds with VPMM_DEBUG_CHECKS always look.
 */
vpmm_status vpmm_malloc(vpmm_pool *, size_t bytes, CUstream stream, CUdeviceptr *);

/*
 * Ends the use of an allocation at this point of `stream`, which need not be the stream that it was allocated on:
 * every earlier use elsewhere must be ordered before this point, or said with vpmm_use. Address 0 is a no-op, and
 * SUCCESS where the pool can be used at all.
 * INVALID_POINTER: not the start of a live allocation of this pool, also if it was freed before and not handed out
 * since. Others as for malloc, but for OUT_OF_MEMORY, OUT_OF_ADDRESS_SPACE and a parked pool. A free that hits looks
 * for no capture, whatever the streams setting: what a graph uses is not freed before the graph is gone. A free into
 * the thread's front cache makes no driver call, on a default stream but one to three that ask for the current context;
 * where what has lain there longest makes room for it, it records an event. With VPMM_SMALL_ASYNC DRIVER may also say
 * that the driver refused the free itself: it may be tried again until a malloc has been given the same address, and
 * does not keep the pool busy if it is not.
 */
vpmm_status vpmm_free(vpmm_pool *, CUdeviceptr, CUstream stream);

/*
 * Says that work on `stream`, a further one than the free will name, uses a live allocation too; as record_stream of
 * PyTorch. A later free then ends the use only when what this stream has been given by then has passed as well. Neither
 * stream waits for the other: the memory goes to nobody before all of its streams but one have passed, and is then
 * freed behind that one. An event is recorded in the free, none before. Several streams may be said, each of them as
 * often as one likes; address 0 is a no-op, as for vpmm_free. It may be called before or after the work is queued, and
 * is for the allocation's present life alone. In a pool with `graph` what is freed so stays unused to the pool's end.
 * A release of the stream ends its use at that point: what is queued on it later needs another vpmm_use. With
 * VPMM_STREAMS_EAGER, and on CU_STREAM_PER_THREAD, the use ends with what the stream has been given by the latest
 * vpmm_use, which records it: nobody else may, so it is called when the work is queued. On the legacy stream, and with
 * `captures` where no gate lets it, the free records nothing: the memory waits for the next call with that stream that
 * goes past the front cache, for a gate that does, or for a wait for the device before a request fails and in
 * vpmm_trim. Calls for one allocation may be made at once, and wait for each other for a moment; its free is ordered
 * after them by the program. INVALID_POINTER: as for vpmm_free. NOT_SUPPORTED: the stream captures, or the address is
 * not in the pool's pages where the driver's pool serves requests too (VPMM_SMALL_ASYNC, a device without pages).
 * INVALID_VALUE: a NULL pool, a stream of another device. HOST_MEMORY. DRIVER.
 */
vpmm_status vpmm_use(vpmm_pool *, CUdeviceptr, CUstream stream);

/*
 * Call before cuStreamDestroy (see vpmm_streams): gives the memory freed on the stream to every stream once its work
 * has passed, and returns when the pool no longer needs the handle. It waits for calls that were given the stream and
 * are past their thread's front cache, not for hits, nor for the stream: so the program sees to it that no call with
 * the stream is under way when the stream is destroyed or begins to capture. A stream that the pool has not met since
 * it was created or last released has nothing to be given: SUCCESS. NOT_SUPPORTED: the stream captures. DRIVER: its end
 * cannot be recorded now; HOST_MEMORY, of a per-thread stream: the thread cannot be known. The stream is as it was
 * then. INVALID_VALUE: a NULL pool.
 */
vpmm_status vpmm_stream_release(vpmm_pool *, CUstream);

/*
 * As in cuda.h: where CUDA_API_PER_THREAD_DEFAULT_STREAM is defined before the headers are included (nvcc's
 * --default-stream per-thread does it), stream 0 is the calling thread's default stream here too. Elsewhere it is the
 * legacy stream. For the entries of vpmm_pool_driver, which have CUDA's plain names, it is that everywhere: where the
 * macro is defined give them CU_STREAM_PER_THREAD.
 */
vpmm_status vpmm_malloc_ptsz(vpmm_pool *, size_t bytes, CUstream stream, CUdeviceptr *);
vpmm_status vpmm_free_ptsz(vpmm_pool *, CUdeviceptr, CUstream stream);
vpmm_status vpmm_use_ptsz(vpmm_pool *, CUdeviceptr, CUstream stream);
vpmm_status vpmm_stream_release_ptsz(vpmm_pool *, CUstream);

#ifdef CUDA_API_PER_THREAD_DEFAULT_STREAM
#define vpmm_malloc         vpmm_malloc_ptsz
#define vpmm_free           vpmm_free_ptsz
#define vpmm_use            vpmm_use_ptsz
#define vpmm_stream_release vpmm_stream_release_ptsz
#endif

/*
 * Gives wholly free extents back to the device until at most keep_bytes are mapped, or nothing more can be given. What
 * is in front caches counts as free, and so does a cut page without a live piece. Memory whose fence has not passed
 * stays; with `captures`, and for what a default stream left without a mark, or the driver has refused to mark, the
 * call waits for all work of that context: where the driver does not wait now, what the wait was for stays, and the
 * call goes on. What other threads have in their hands at that moment is waited for too, at most 10 ms for each extent.
 * With keep_bytes 0 the driver's pool of VPMM_SMALL_ASYNC is trimmed too. What was given back stays given back until a
 * malloc has to make memory. `released` (may be NULL): bytes of the extents of this call that the driver has taken
 * back. What it refuses to take is quarantined, tried again later, and in no call's `released`. INVALID_VALUE: a NULL
 * pool. DRIVER, HOST_MEMORY: less was given back. NOT_SUPPORTED: the child of a fork.
 */
vpmm_status vpmm_trim(vpmm_pool *, size_t keep_bytes, size_t *released);

/*
 * For a pool with `graph` whose graphs will not run for a while: gives all its physical memory back to the device (but
 * the byte of the driver's in each context by which it waits), and keeps every address as it is. What was in the memory
 * is lost: the program copies what it needs elsewhere before, and back after vpmm_wake. Waits for the work of the
 * device's primary context, and of those with a default stream that the pool was given; other contexts' work with its
 * memory must have ended. No capture is harmed.
 * From the call on until vpmm_wake has succeeded nothing on the device may use the pool's memory (a graph that is
 * launched faults). Mallocs answer NOT_SUPPORTED; one that begins before the wait is over may still be served, and its
 * memory is parked with the rest. A wake that comes during a park waits for it, and wakes the pool. Frees and uses are
 * as ever. parked_bytes says how much is to come back, mapped_bytes falls by it, and max_mapped has room for it all the
 * while. The pool can be destroyed. A call for a parked pool tries again what the driver has refused, if it has. It
 * waits for mallocs under way, if they map memory. NOT_SUPPORTED: a pool without `graph`. BUSY: the device cannot be
 * waited for now; nothing has changed. DRIVER: the driver would not take all back; the pool is parked all the same, and
 * its contents are lost; or the device is. INVALID_VALUE: a NULL pool.
 */
vpmm_status vpmm_park(vpmm_pool *);

/*
 * Makes the memory of a parked pool anew, each handle as it was and where it was. SUCCESS: mallocs, graphs and all
 * other work may go on; also for a pool that is not parked. OUT_OF_MEMORY: the device has not as much now; DRIVER: it
 * has refused a call. The pool is then parked as before, and can be woken again. Others as for vpmm_park.
 */
vpmm_status vpmm_wake(vpmm_pool *);

/*
 * The statistics, one line each: X(name, kind, help). A gauge is a level, a counter only grows; both of bytes where
 * the name says so. This table makes the struct, the sums over threads, the dump's text and the exporter's metrics.
 *
 *   gauge, counter                a metric of that name
 *   counter_by(label)             a counter that is the sum of its parts: one metric, whose label says which part
 *   part_of(sum, value)           such a part, and the label's value
 *   counter_part_of(sum, value)   a part that is a counter of its own as well
 *
 * The parts of driver_calls and driver_errors are the driver's entries: vpmm_calls_get in vpmm/observe.h.
 * Read without a lock while others allocate, each number is right, but two of them may be of different instants.
 *
 * peak_live_bytes and peak_requested_bytes are since the pool's creation, or since the attribute was last set, and
 * hits of front caches count in them. peak_live_bytes is exact where one thread allocates, and peak_requested_bytes too
 * where no reaper looks meanwhile. Else either may be too high or too low: for each thread by 8 MiB, and by what it
 * allocates or frees in a tenth of a millisecond beside the peak; however fast, by twice cache_bytes and 64 MiB at
 * most, and twice 64 MiB for pieces in peak_requested_bytes. That may be higher still by what rounding adds, where
 * memory is replaced by memory of the same rounded size. A call under way adds its request.
 *
 *   slab_bytes = slab_live_bytes + slab_free_bytes         live_bytes = slab_bytes + pages handed out whole
 */
#define VPMM_STATS(X)                                                                                                  \
    X(reserved_bytes, gauge, "address space reserved")                                                                 \
    X(mapped_bytes, gauge, "physical memory held: live and reusable")                                                  \
    X(live_bytes, gauge, "pages handed out, and pages that are cut")                                                   \
    X(reusable_bytes, gauge, "mapped and free")                                                                        \
    X(hole_bytes, gauge, "address space not mapped")                                                                   \
    X(pending_unmap_bytes, gauge, "old addresses of re-mapped extents, not yet unmapped")                              \
    X(parked_bytes, gauge, "live and reusable memory whose physical memory is given back for now (vpmm_park)")         \
    X(quarantined_bytes, gauge, "physical memory given back and not yet taken by the driver, beside mapped")           \
    X(cached_bytes, gauge, "the part of reusable that is in front caches")                                             \
    X(ending_bytes, gauge, "the part of reusable and slab_free that waits for several streams (vpmm_use)")             \
    X(slab_bytes, gauge, "the part of live that is cut into pieces for small requests")                                \
    X(slab_live_bytes, gauge, "pieces handed out, after rounding")                                                     \
    X(slab_free_bytes, gauge, "the rest of slab_bytes")                                                                \
    X(slab_cached_bytes, gauge, "the part of slab_free that is in front caches")                                       \
    X(requested_bytes, gauge, "live allocations before rounding")                                                      \
    X(async_bytes, gauge, "live requests in the driver's memory pool (VPMM_SMALL=async)")                              \
    X(peak_mapped_bytes, gauge, "highest mapped_bytes")                                                                \
    X(peak_live_bytes, gauge, "highest live_bytes")                                                                    \
    X(peak_requested_bytes, gauge, "highest requested_bytes")                                                          \
    X(largest_free_bytes, gauge, "longest reusable region")                                                            \
    X(largest_hole_bytes, gauge, "longest hole")                                                                       \
    X(mallocs, counter_by(tier), "allocations made")                                                                   \
    X(frees, counter_by(tier), "allocations freed")                                                                    \
    X(hits_cache, part_of(mallocs, cache), "mallocs served by a front cache")                                          \
    X(hits_own_stream, part_of(mallocs, own_stream), "mallocs of pages served by memory freed on the same stream")     \
    X(hits_neighbour, part_of(mallocs, neighbour), "mallocs served by another thread's front cache")                   \
    X(hits_completed, part_of(mallocs, completed), "mallocs of pages served by memory whose fence had passed")         \
    X(hits_waited, part_of(mallocs, waited), "mallocs of pages served by memory that their stream had to wait for")    \
    X(hits_slab, part_of(mallocs, slab), "mallocs served by pieces of pages, past the front caches")                   \
    X(hits_async, part_of(mallocs, async), "mallocs served by the driver's memory pool (VPMM_SMALL=async)")            \
    X(builds, counter_part_of(mallocs, build), "mallocs served by mapping")                                            \
    X(frees_cache, part_of(frees, cache), "frees into a front cache")                                                  \
    X(frees_pages, part_of(frees, pages), "frees of pages, past the front caches")                                     \
    X(frees_slab, part_of(frees, slab), "frees of pieces, past the front caches")                                      \
    X(frees_async, part_of(frees, async), "frees into the driver's memory pool (VPMM_SMALL=async)")                    \
    X(uses, counter, "allocations that a further stream was said to use (vpmm_use)")                                   \
    X(reclaims, counter, "mallocs that had to take everything back before an answer")                                  \
    X(unwound, counter_by(step), "builds that were given up and undone")                                               \
    X(unwound_context, part_of(unwound, context), "the device's context could not be made current")                    \
    X(unwound_create, part_of(unwound, create), "physical memory was not to be had")                                   \
    X(unwound_wait, part_of(unwound, wait), "the memory's stream could not be waited for")                             \
    X(unwound_overtaken, part_of(unwound, overtaken), "others had freed memory that serves the request meanwhile")     \
    X(unwound_map, part_of(unwound, map), "the driver refused a mapping")                                              \
    X(unwound_access, part_of(unwound, access), "the driver refused access to the mapping")                            \
    X(splits, counter, "regions divided in two")                                                                       \
    X(adoptions, counter, "slabs that went from one stream to another")                                                \
    X(extents_created, counter, "physical handles created")                                                            \
    X(extents_released, counter, "physical handles given back")                                                        \
    X(decayed_bytes, counter, "physical memory given back because it was not needed (decay_ms)")                       \
    X(extents_remapped, counter, "physical handles moved to another address")                                          \
    X(pages_created, counter, "pages of physical memory created")                                                      \
    X(zombies_retired, counter, "old addresses unmapped")                                                              \
    X(unmap_failures, counter, "unmaps that the driver refused; the address stays pending")                            \
    X(marks, counter, "fences recorded as events")                                                                     \
    X(out_of_memory, counter, "mallocs refused for want of memory")                                                    \
    X(failures, counter_by(status), "mallocs, frees and uses that answered an error")                                  \
    X(failed_invalid_value, part_of(failures, invalid_value), "of these, VPMM_ERROR_INVALID_VALUE")                    \
    X(failed_invalid_pointer, part_of(failures, invalid_pointer), "VPMM_ERROR_INVALID_POINTER")                        \
    X(failed_out_of_memory, part_of(failures, out_of_memory), "VPMM_ERROR_OUT_OF_MEMORY")                              \
    X(failed_address_space, part_of(failures, out_of_address_space), "VPMM_ERROR_OUT_OF_ADDRESS_SPACE")                \
    X(failed_not_supported, part_of(failures, not_supported), "VPMM_ERROR_NOT_SUPPORTED")                              \
    X(failed_driver, part_of(failures, driver), "VPMM_ERROR_DRIVER")                                                   \
    X(failed_host_memory, part_of(failures, host_memory), "VPMM_ERROR_HOST_MEMORY")                                    \
    X(driver_calls, counter_by(call), "driver calls made")                                                             \
    X(driver_errors, counter_by(call), "driver calls that failed")

typedef struct vpmm_stats {
#define VPMM_STATS_MEMBER(name, kind, help) uint64_t name;
    VPMM_STATS(VPMM_STATS_MEMBER)
#undef VPMM_STATS_MEMBER
} vpmm_stats;

/* Takes no lock and makes no driver call. INVALID_VALUE: a NULL argument. */
vpmm_status vpmm_stats_get(vpmm_pool *, vpmm_stats *);

/*
 * Writes the statistics, a line each, then every region in ascending address order, as [X], where X is how many pages
 * it has: [X] live, [-X] reusable, [*X] hole, [~X] pending unmap; [?X] is in the hands of a call. Live pages that are
 * cut follow, a line for each run of them, in subpages: (X) live, (-X) free, (/X) a slab; then how many slices of each
 * size are free. INVALID_VALUE: a NULL argument, or a file that cannot be written.
 */
vpmm_status vpmm_dump(vpmm_pool *, FILE *);

/*
 * One pass of the reaper by hand: publishes passed fences, unmaps what is due, and gives back what decays. It makes no
 * memory. INVALID_VALUE: a NULL pool. DRIVER: the device is lost, or its context is refused; the next pass tries
 * again, as it does what of a pass the driver refuses (unmap_failures).
 * NOT_SUPPORTED: the child of a fork.
 */
vpmm_status vpmm_poll(vpmm_pool *);

/*
 * Audits every invariant of the pool while no one else calls in. SUCCESS, or INVALID_VALUE with the first violation
 * in vpmm_last_error(). Its cost grows with the pages in use.
 */
vpmm_status vpmm_check(vpmm_pool *);

/* The table the pool calls; the pool's own, valid until it is destroyed. NULL for NULL. */
const vpmm_driver *vpmm_pool_driver(vpmm_pool *);

#ifdef __cplusplus
}
#endif

#endif
