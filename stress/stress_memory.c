#define _GNU_SOURCE 1

#include "stress_memory.h"

#include "stress_kernels.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SAMPLE_WORDS = 16, SPARE_WORDS = 1 << 16, ON_THE_WAY_BYTES = 64 << 20 };

/* What a check writes, and a kernel knows the layout of. */
struct report {
    _Atomic(uint32_t) mismatches;
    uint32_t reserved;
    finding first[FINDINGS];
};

_Static_assert(sizeof(finding) == KERNEL_FINDING_BYTES && (int)FINDINGS == (int)KERNEL_FINDINGS,
               "as the kernel has them");
_Static_assert(offsetof(struct report, first) == KERNEL_FIRST_FINDING, "as the kernel has it");

struct stress_memory {
    gpu *gpu;
    verify_mode mode;
    size_t page_size;
    struct kernels kernels; /* of a real GPU */
};

/* Host memory for samples on their way, on the simulated GPU. */
struct transfer {
    struct transfer *next;
    struct probe *probe;
    block block;
    struct samples {
        size_t rows, width, pitch; /* in words; rows begin a pitch apart */
        size_t tail, tail_width;
    } at;
    size_t room;
    uint32_t word[];
};

struct probe {
    stress_memory *memory;
    struct report *report;      /* pinned */
    _Atomic(uint64_t) bytes;    /* written by its thread */
    _Atomic(size_t) on_the_way; /* bytes of transfers in use */
    pthread_mutex_t lock;       /* of the next */
    struct transfer *spare;
};

/* ---- words ---- */

static uint32_t key_of(uint64_t number, uint32_t generation)
{
    uint64_t key = (number * 64 + generation) * UINT64_C(0x9E3779B97F4A7C15);
    return (uint32_t)(key >> 32);
}

static uint32_t word_of(uint32_t key, uint64_t place)
{
    uint32_t word = (uint32_t)place * KERNEL_STRIDE + key;
    word = (word ^ word >> 15) * KERNEL_FACTOR;
    return word ^ word >> 13;
}

uint32_t memory_word(uint64_t number, uint32_t generation, uint64_t place)
{
    return word_of(key_of(number, generation), place);
}

static struct samples samples_of(const stress_memory *m, size_t bytes)
{
    size_t words = bytes / 4;
    size_t tail = words < SAMPLE_WORDS ? 0 : (words - SAMPLE_WORDS) / 4 * 4; /* as the kernels would have it */
    if (m->mode == VERIFY_FULL || words <= SAMPLE_WORDS)
        return (struct samples){.rows = words != 0, .width = words, .pitch = words};
    return (struct samples){
        .rows = (words - SAMPLE_WORDS) / (m->page_size / 4) + 1,
        .width = SAMPLE_WORDS,
        .pitch = m->page_size / 4,
        .tail = tail,
        .tail_width = words - tail,
    };
}

static size_t words_in(const struct samples *at)
{
    return at->rows * at->width + at->tail_width;
}

unsigned memory_looks(const stress_memory *m, size_t bytes, uint64_t place)
{
    struct samples at = samples_of(m, bytes);
    bool in_row = at.rows != 0 && place / at.pitch < at.rows && place % at.pitch < at.width;
    bool in_tail = place >= at.tail && place < at.tail + at.tail_width;
    return (unsigned)in_row + in_tail;
}

static uint64_t place_of(const struct samples *at, size_t i)
{
    size_t row = i / at->width;
    return row < at->rows ? row * at->pitch + i % at->width : at->tail + (i - at->rows * at->width);
}

/* ---- on a real GPU ---- */

static struct kernel_piece piece_of(const block *b, const struct samples *at)
{
    return (struct kernel_piece){
        .base = b->address,
        .rows = at->rows,
        .pitch = at->pitch,
        .width = at->width,
        .number = b->number,
        .key = key_of(b->number, b->generation),
        .generation = b->generation,
    };
}

/* Of each block its rows, and its tail if it has one. */
static CUresult launch_all(const probe *p, bool check, const block *b, unsigned n, CUstream stream)
{
    struct kernel_piece piece[KERNEL_PIECES];
    unsigned pieces = 0;
    for (unsigned i = 0; i < n; i++) {
        struct samples at = samples_of(p->memory, b[i].bytes);
        if (at.rows != 0)
            piece[pieces++] = piece_of(&b[i], &at);
        if (at.tail_width == 0)
            continue;
        piece[pieces] = piece_of(&b[i], &at);
        piece[pieces].rows = 1;
        piece[pieces].first = at.tail;
        piece[pieces++].width = at.tail_width;
    }
    if (pieces == 0)
        return CUDA_SUCCESS;
    return kernels_launch(&p->memory->kernels, check, piece, pieces, (uint64_t)(uintptr_t)p->report, stream);
}

_Static_assert(2 * (int)PROBE_BLOCKS <= (int)KERNEL_PIECES, "rows and a tail of each");

/* ---- on the simulated one ---- */

static struct transfer *transfer_take(probe *p, size_t words)
{
    pthread_mutex_lock(&p->lock);
    struct transfer *t = p->spare;
    if (t)
        p->spare = t->next;
    pthread_mutex_unlock(&p->lock);
    if (t && t->room >= words)
        return t;
    free(t);
    t = malloc(sizeof *t + words * sizeof *t->word);
    if (t)
        *t = (struct transfer){.probe = p, .room = words};
    return t;
}

static void transfer_give(struct transfer *t)
{
    probe *p = t->probe;
    atomic_fetch_sub_explicit(&p->on_the_way, t->room * sizeof *t->word, memory_order_relaxed);
    if (t->room > SPARE_WORDS) {
        free(t);
        return;
    }
    pthread_mutex_lock(&p->lock);
    t->next = p->spare;
    p->spare = t;
    pthread_mutex_unlock(&p->lock);
}

static void CUDA_CB pass_time(void *late_us)
{
    unsigned us = (unsigned)(uintptr_t)late_us;
    nanosleep(&(struct timespec){us / 1000000, (long)(us % 1000000) * 1000}, NULL);
}

static void CUDA_CB give_back(void *transfer)
{
    transfer_give(transfer);
}

static void note(struct report *report, const finding *f)
{
    uint32_t nth = atomic_fetch_add_explicit(&report->mismatches, 1, memory_order_relaxed);
    if (nth < FINDINGS)
        report->first[nth] = *f;
}

static void CUDA_CB compare(void *transfer)
{
    struct transfer *t = transfer;
    uint32_t key = key_of(t->block.number, t->block.generation);
    for (size_t i = 0; i < words_in(&t->at); i++) {
        uint64_t place = place_of(&t->at, i);
        uint32_t expected = word_of(key, place);
        if (t->word[i] != expected)
            note(t->probe->report, &(finding){t->block.number, place, t->block.generation, expected, t->word[i], 0});
    }
    transfer_give(t);
}

/* The rows, then the tail, one way or the other. */
static CUresult copy(const struct transfer *t, bool from_device, CUstream stream)
{
    const vpmm_driver *driver = t->probe->memory->gpu->driver;
    const struct samples *at = &t->at;
    uint32_t *tail = (uint32_t *)t->word + at->rows * at->width;
    CUdeviceptr device_tail = t->block.address + at->tail * 4;
    CUDA_MEMCPY2D rows = {.WidthInBytes = at->width * 4, .Height = at->rows};
    if (from_device) {
        rows.srcMemoryType = CU_MEMORYTYPE_DEVICE;
        rows.srcDevice = t->block.address;
        rows.srcPitch = at->pitch * 4;
        rows.dstMemoryType = CU_MEMORYTYPE_HOST;
        rows.dstHost = (void *)t->word;
        rows.dstPitch = at->width * 4;
    } else {
        rows.srcMemoryType = CU_MEMORYTYPE_HOST;
        rows.srcHost = t->word;
        rows.srcPitch = at->width * 4;
        rows.dstMemoryType = CU_MEMORYTYPE_DEVICE;
        rows.dstDevice = t->block.address;
        rows.dstPitch = at->pitch * 4;
    }
    CUresult result = driver->cuMemcpy2DAsync(&rows, stream);
    if (result != CUDA_SUCCESS || at->tail_width == 0)
        return result;
    return from_device ? driver->cuMemcpyDtoHAsync(tail, device_tail, at->tail_width * 4, stream)
                       : driver->cuMemcpyHtoDAsync(device_tail, tail, at->tail_width * 4, stream);
}

/* What is on its way is bounded: beyond, the thread waits for the stream. */
static CUresult bound_transfers(const probe *p, CUstream stream)
{
    size_t bytes = atomic_load_explicit(&p->on_the_way, memory_order_relaxed);
    return bytes < ON_THE_WAY_BYTES ? CUDA_SUCCESS : p->memory->gpu->driver->cuStreamSynchronize(stream);
}

static CUresult transfer_one(probe *p, bool check, const block *b, CUstream stream)
{
    struct samples at = samples_of(p->memory, b->bytes);
    CUresult bound = bound_transfers(p, stream);
    if (bound != CUDA_SUCCESS)
        return bound;
    struct transfer *t = at.rows != 0 ? transfer_take(p, words_in(&at)) : NULL;
    if (at.rows == 0)
        return CUDA_SUCCESS;
    if (!t)
        return CUDA_ERROR_OUT_OF_MEMORY;
    atomic_fetch_add_explicit(&p->on_the_way, t->room * sizeof *t->word, memory_order_relaxed);
    t->block = *b;
    t->at = at;
    uint32_t key = key_of(b->number, b->generation);
    for (size_t i = 0; !check && i < words_in(&at); i++)
        t->word[i] = word_of(key, place_of(&at, i));
    CUresult result = copy(t, check, stream);
    if (result == CUDA_SUCCESS)
        result = p->memory->gpu->driver->cuLaunchHostFunc(stream, check ? compare : give_back, t);
    if (result != CUDA_SUCCESS)
        transfer_give(t);
    return result;
}

static CUresult transfer_all(probe *p, bool check, const block *b, unsigned n, CUstream stream)
{
    CUresult result = CUDA_SUCCESS;
    for (unsigned i = 0; i < n && result == CUDA_SUCCESS; i++)
        result = transfer_one(p, check, &b[i], stream);
    return result;
}

/* ---- both ---- */

static CUresult work_on(probe *p, bool check, const block *b, unsigned n, CUstream stream)
{
    if (p->memory->mode == VERIFY_OFF)
        return CUDA_SUCCESS;
    for (unsigned i = 0; i < n && check; i++) {
        struct samples at = samples_of(p->memory, b[i].bytes);
        atomic_fetch_add_explicit(&p->bytes, words_in(&at) * 4, memory_order_relaxed);
    }
    return p->memory->gpu->sim ? transfer_all(p, check, b, n, stream) : launch_all(p, check, b, n, stream);
}

CUresult probe_fill(probe *p, const block *b, unsigned n, CUstream stream)
{
    return work_on(p, false, b, n, stream);
}

CUresult probe_check(probe *p, const block *b, unsigned n, CUstream stream)
{
    return work_on(p, true, b, n, stream);
}

CUresult probe_delay(probe *p, unsigned us, CUstream stream)
{
    if (p->memory->mode == VERIFY_OFF)
        return CUDA_SUCCESS;
    return p->memory->gpu->sim ? p->memory->gpu->driver->cuLaunchHostFunc(stream, pass_time, (void *)(uintptr_t)us)
                               : kernels_wait(&p->memory->kernels, UINT64_C(1000) * us, stream);
}

uint32_t probe_mismatches(const probe *p)
{
    return atomic_load_explicit(&p->report->mismatches, memory_order_relaxed);
}

size_t probe_findings(const probe *p, finding out[FINDINGS])
{
    size_t n = probe_mismatches(p);
    n = n < FINDINGS ? n : FINDINGS;
    memcpy(out, p->report->first, n * sizeof *out);
    return n;
}

uint64_t probe_bytes(const probe *p)
{
    return atomic_load_explicit(&p->bytes, memory_order_relaxed);
}

probe *probe_open(stress_memory *memory)
{
    void *report;
    probe *p = calloc(1, sizeof *p);
    if (!p) {
        fprintf(stderr, "%s: no host memory\n", program_name);
        return NULL;
    }
    if (!gpu_ok(memory->gpu, "cuMemHostAlloc", memory->gpu->driver->cuMemHostAlloc(&report, sizeof *p->report, 0))) {
        free(p);
        return NULL;
    }
    p->memory = memory;
    p->report = memset(report, 0, sizeof *p->report);
    pthread_mutex_init(&p->lock, NULL);
    return p;
}

void probe_close(probe *p)
{
    if (!p)
        return;
    for (struct transfer *t = p->spare, *next; t; t = next) {
        next = t->next;
        free(t);
    }
    p->memory->gpu->driver->cuMemFreeHost(p->report);
    pthread_mutex_destroy(&p->lock);
    free(p);
}

bool memory_open(gpu *g, verify_mode mode, size_t page_size, stress_memory **out)
{
    stress_memory *m = calloc(1, sizeof *m);
    *out = m;
    if (!m) {
        fprintf(stderr, "%s: no host memory\n", program_name);
        return false;
    }
    *m = (stress_memory){.gpu = g, .mode = mode, .page_size = page_size};
    return g->sim || mode == VERIFY_OFF || kernels_open(g, &m->kernels);
}

void memory_close(stress_memory *m)
{
    if (m)
        kernels_close(&m->kernels);
    free(m);
}
