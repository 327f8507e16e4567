#include "trace.h"

#include "book.h"
#include "lane.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <search.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { BUFFER = 1 << 16, LINE_AT_MOST = 100, STREAMS = 256 };

static const uint64_t OLD_US = 1000000;

struct file {
    int fd; /* -1: it has ended */
    uint64_t ids;
    uint64_t written_us;
    off_t whole; /* bytes of whole lines that are written */
    unsigned streams;
    void *numbers; /* a tree of struct number */
    size_t used;
    char lines[BUFFER];
};

struct number {
    CUstream stream;
    const void *thread; /* of a thread's own default stream; else NULL */
    unsigned number;
};

struct live {
    CUdeviceptr address;
    struct traced traced;
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const char *prefix; /* NULL: nothing is written */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct file *files[BOOK_DEVICES]; /* under the lock, as is the rest */
static void *allocations;                /* a tree of struct live */
static uint64_t began_us;
static bool is_exiting;

/* ---- files, under the lock ---- */

/* Lines that were not all written are cut off. */
static void end_file(struct file *file, const char *why)
{
    char reason[300];
    bool is_whole = file->fd < 0 || ftruncate(file->fd, file->whole) == 0;
    snprintf(reason, sizeof reason, "VPMM_PRELOAD_TRACE=%s: %s%s", prefix, why,
             is_whole ? "" : "; the last line may not be whole");
    lane_explain(reason);
    if (file->fd >= 0)
        close(file->fd);
    file->fd = -1;
    file->used = 0;
}

static void write_lines(struct file *file, uint64_t now_us)
{
    size_t done = 0;
    while (file->fd >= 0 && done < file->used) {
        ssize_t n = write(file->fd, file->lines + done, file->used - done);
        if (n >= 0)
            done += (size_t)n;
        else if (errno != EINTR)
            end_file(file, strerror(errno));
    }
    file->whole += (off_t)done;
    file->used = 0;
    file->written_us = now_us;
}

static uint64_t clock_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

/* Whole lines are written together, so a file has a part of one only where the process was killed as it wrote. */
static void add_line(struct file *file, char op, const struct traced *traced, unsigned stream)
{
    uint64_t now_us = clock_us();
    if (!began_us)
        began_us = now_us;
    file->used +=
        (size_t)snprintf(file->lines + file->used, LINE_AT_MOST, "%c,%" PRIu64 ",%" PRIu64 ",%u,%" PRIu64 "\n", op,
                         traced->id, traced->bytes, stream, now_us - began_us);
    if (file->used > BUFFER - LINE_AT_MOST || is_exiting || now_us - file->written_us > OLD_US)
        write_lines(file, now_us);
}

static void open_file(struct file *file, int device)
{
    char path[4096];
    int length = snprintf(path, sizeof path, "%s.%ld.%d.csv", prefix, (long)getpid(), device);
    file->fd = length < (int)sizeof path ? open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666) : -1;
    if (file->fd < 0)
        end_file(file, length < (int)sizeof path ? strerror(errno) : "too long");
    file->used = (size_t)snprintf(file->lines, LINE_AT_MOST, "op,id,bytes,stream,us\n");
    file->written_us = clock_us();
}

/* NULL: none, or it has ended. */
static struct file *file_of(int device)
{
    if (device < 0 || device >= BOOK_DEVICES)
        return NULL;
    if (!files[device]) {
        files[device] = calloc(1, sizeof *files[device]);
        if (files[device])
            open_file(files[device], device);
    }
    return files[device] && files[device]->fd >= 0 ? files[device] : NULL;
}

/* ---- numbers of streams, and what is live, under the lock ---- */

static int order(uintptr_t a, uintptr_t b)
{
    return a < b ? -1 : a > b;
}

static int by_stream(const void *one, const void *other)
{
    const struct number *a = one, *b = other;
    int streams = order((uintptr_t)a->stream, (uintptr_t)b->stream);
    return streams ? streams : order((uintptr_t)a->thread, (uintptr_t)b->thread);
}

static int by_address(const void *one, const void *other)
{
    const struct live *a = one, *b = other;
    return order(a->address, b->address);
}

/* The entry of the tree that is equal to `sought`, which is copied there if there is none. NULL: no memory. */
static void *entry(void **tree, const void *sought, size_t size, int (*compare)(const void *, const void *))
{
    void *const *found = tfind(sought, tree, compare);
    if (found)
        return *found;
    void *added = malloc(size);
    if (!added)
        return NULL;
    memcpy(added, sought, size);
    if (tsearch(added, tree, compare))
        return added;
    free(added);
    return NULL;
}

/* Legacy and per-thread default streams have each two handles. */
static CUstream one_handle(CUstream stream)
{
    return stream == CU_STREAM_LEGACY ? NULL : stream;
}

static bool number_of(struct file *file, CUstream stream, unsigned *number)
{
    static _Thread_local char own __attribute__((tls_model("initial-exec")));
    struct number sought = {one_handle(stream), stream == CU_STREAM_PER_THREAD ? &own : NULL, 0};
    *number = 0;
    if (stream == TRACE_NO_STREAM)
        return true;
    struct number *found = entry(&file->numbers, &sought, sizeof sought, by_stream);
    if (found && !found->number)
        found->number = file->streams++ % (STREAMS - 1) + 1;
    *number = found ? found->number : 0;
    return found;
}

static void write_down(struct file *file, char op, const struct traced *traced, CUstream stream)
{
    unsigned number;
    if (number_of(file, stream, &number))
        add_line(file, op, traced, number);
    else
        end_file(file, "the host has no memory");
}

/* ---- processes ---- */

static void write_all(void)
{
    pthread_mutex_lock(&lock);
    is_exiting = true; /* who frees still later writes at once */
    for (int i = 0; i < BOOK_DEVICES; i++)
        if (files[i])
            write_lines(files[i], clock_us());
    pthread_mutex_unlock(&lock);
}

static void hold(void)
{
    pthread_mutex_lock(&lock);
}

static void let_go(void)
{
    pthread_mutex_unlock(&lock);
}

/* The lines are the parent's, and so is what was written of the memory. */
static void begin_in_child(void)
{
    for (int i = 0; i < BOOK_DEVICES; i++) {
        if (files[i] && files[i]->fd >= 0)
            close(files[i]->fd);
        files[i] = NULL;
    }
    allocations = NULL;
    began_us = 0;
    pthread_mutex_unlock(&lock);
}

static void prepare(void)
{
    const char *said = getenv("VPMM_PRELOAD_TRACE");
    if (!said || !*said)
        return;
    prefix = strdup(said); /* the program may change its environment */
    lane_prepare();        /* whose line says what the last write was refused for */
    atexit(write_all);
    pthread_atfork(hold, let_go, begin_in_child);
}

/* ---- what others call ---- */

bool trace_is_on(void)
{
    pthread_once(&once, prepare);
    return prefix;
}

/* One that is there has ended unseen: its device was reset, or a graph has freed it. */
static void note(int device, CUdeviceptr address, size_t bytes, CUstream stream)
{
    struct file *file = file_of(device);
    struct live sought = {address, {.device = -1}};
    struct live *live = file ? entry(&allocations, &sought, sizeof sought, by_address) : NULL;
    if (file && !live)
        end_file(file, "the host has no memory");
    if (!live)
        return;
    struct file *before = file_of(live->traced.device);
    if (before)
        write_down(before, 'f', &live->traced, stream);
    live->traced = (struct traced){file->ids++, bytes, device};
    if (file->fd >= 0)
        write_down(file, 'a', &live->traced, stream);
}

void trace_malloc(int device, CUdeviceptr address, size_t bytes, CUstream stream)
{
    pthread_mutex_lock(&lock);
    note(device, address, bytes, stream);
    pthread_mutex_unlock(&lock);
}

struct traced trace_take(CUdeviceptr address)
{
    struct traced traced = {.device = -1};
    struct live sought = {.address = address};
    if (!trace_is_on())
        return traced;
    pthread_mutex_lock(&lock);
    void *const *found = tfind(&sought, &allocations, by_address);
    struct live *live = found ? *found : NULL;
    if (live) {
        traced = live->traced;
        tdelete(live, &allocations, by_address);
        free(live);
    }
    pthread_mutex_unlock(&lock);
    return traced;
}

void trace_free(CUdeviceptr address, struct traced traced, CUstream stream, CUresult result)
{
    struct live again = {address, traced};
    if (traced.device < 0)
        return;
    pthread_mutex_lock(&lock);
    struct file *file = file_of(traced.device);
    if (file && result == CUDA_SUCCESS)
        write_down(file, 'f', &traced, stream);
    else if (file && !entry(&allocations, &again, sizeof again, by_address))
        end_file(file, "the host has no memory");
    pthread_mutex_unlock(&lock);
}
