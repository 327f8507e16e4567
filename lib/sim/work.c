/*
 * work.c - work on memory, and host functions: queueing it, and doing it when its lane comes to it.
 *
 * Doing it: under the lock the operation's rows are translated to pieces of host memory, page by page, which is where
 * rights are checked and where the race detector looks; then the lock is let go and the bytes move. So bytes that two
 * streams move at once really move at once, and ThreadSanitizer sees what the race detector should have seen.
 *
 * Copies from pageable host memory take the bytes along when they are queued, as the driver stages them. Copies to
 * host memory write when they run, whether it is pinned or not: keep the target until then.
 */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

/* ---- translation ---- */

struct piece {
    char *at;
    size_t bytes;
};

struct pieces {
    struct piece *list;
    size_t count, capacity;
};

static bool add_piece(struct pieces *pieces, char *at, size_t bytes)
{
    struct piece *last = pieces->count ? &pieces->list[pieces->count - 1] : NULL;
    if (last && last->at + last->bytes == at) {
        last->bytes += bytes;
        return true;
    }
    if (pieces->count == pieces->capacity) {
        size_t capacity = pieces->capacity ? 2 * pieces->capacity : 16;
        struct piece *list = realloc(pieces->list, capacity * sizeof *list);
        if (!list)
            return false;
        pieces->list = list;
        pieces->capacity = capacity;
    }
    pieces->list[pieces->count++] = (struct piece){at, bytes};
    return true;
}

static CUresult illegal(vpmm_sim *sim, const struct sim_lane *lane, const struct sim_op *op, CUdeviceptr at, bool write,
                        const char *why)
{
    sim_misuse(sim, CUDA_SUCCESS, "%s of %zu bytes at 0x%llx on stream %p: %s at 0x%llx, which is %s",
               sim_entry_name(op->site->entry), op->site->bytes, (unsigned long long)op->site->address,
               (void *)lane->handle, write ? "a write" : "a read", (unsigned long long)at, why);
    atomic_store(&sim->sticky, CUDA_ERROR_ILLEGAL_ADDRESS);
    return CUDA_ERROR_ILLEGAL_ADDRESS;
}

/* Translates bytes that lie in one page. */
static CUresult translate(vpmm_sim *sim, struct sim_lane *lane, struct sim_op *op, CUdeviceptr at, size_t bytes,
                          bool write, struct pieces *pieces)
{
    const struct sim_mapping *mapping = sim_mapping_at(sim, at);
    if (!mapping)
        return illegal(sim, lane, op, at, write, "not mapped");
    uint8_t needed = write ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ;
    if (mapping->access[lane->device] < needed)
        return illegal(sim, lane, op, at, write, "mapped, but the device has no right to do that");
    const struct sim_handle *handle = mapping->handle;
    struct sim_device *device = &sim->devices[handle->device];
    uint32_t page = handle->pages[(at - mapping->base) >> SIM_PAGE_SHIFT];
    uint32_t lo = (uint32_t)(at & (SIM_PAGE - 1));
    if (sim->config.detect_races) {
        struct sim_access use = {op->site, mapping->serial, lo, lo + (uint32_t)bytes, write};
        sim_race_early(sim, op, mapping, lane->device, write);
        sim_race_access(sim, lane, &device->shadow[page], use);
    }
    if (op->kind == SIM_OP_GIVE_UP)
        return CUDA_SUCCESS;
    device->touched[page] |= write;
    return add_piece(pieces, device->bytes + page * SIM_PAGE + lo, bytes) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult translate_rows(vpmm_sim *sim, struct sim_lane *lane, struct sim_op *op, const struct sim_rows *rows,
                               bool write, struct pieces *pieces)
{
    CUresult result = CUDA_SUCCESS;
    for (size_t row = 0; row < op->height && result == CUDA_SUCCESS; row++) {
        if (rows->host) {
            result =
                add_piece(pieces, rows->host + row * rows->pitch, op->width) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
            continue;
        }
        CUdeviceptr at = rows->device + row * rows->pitch, end = at + op->width;
        while (at < end && result == CUDA_SUCCESS) {
            size_t in_page = SIM_PAGE - (at & (SIM_PAGE - 1));
            size_t bytes = end - at < in_page ? end - at : in_page;
            result = translate(sim, lane, op, at, bytes, write, pieces);
            at += bytes;
        }
    }
    return result;
}

/* ---- moving bytes ---- */

static void fill(const struct piece *piece, uint32_t value, int value_bytes)
{
    bool uniform = value_bytes == 1 || value == (value & 0xff) * 0x01010101U;
    if (uniform) {
        memset(piece->at, (int)(value & 0xff), piece->bytes);
        return;
    }
    for (size_t i = 0; i < piece->bytes; i += sizeof value) /* rows and pages are multiples of it */
        memcpy(piece->at + i, &value, sizeof value);
}

static void move(const struct pieces *to, const struct pieces *from)
{
    size_t t = 0, f = 0, t_done = 0, f_done = 0;
    while (t < to->count && f < from->count) {
        size_t t_left = to->list[t].bytes - t_done, f_left = from->list[f].bytes - f_done;
        size_t bytes = t_left < f_left ? t_left : f_left;
        memmove(to->list[t].at + t_done, from->list[f].at + f_done, bytes);
        t_done += bytes;
        f_done += bytes;
        if (t_done == to->list[t].bytes)
            t++, t_done = 0;
        if (f_done == from->list[f].bytes)
            f++, f_done = 0;
    }
}

static void run_on_memory(vpmm_sim *sim, struct sim_lane *lane, struct sim_op *op)
{
    struct pieces to = {0}, from = {0};
    CUresult result = CUDA_SUCCESS;
    if (op->kind == SIM_OP_COPY)
        result = translate_rows(sim, lane, op, &op->from, false, &from);
    if (result == CUDA_SUCCESS)
        result = translate_rows(sim, lane, op, &op->to, true, &to);
    if (result == CUDA_SUCCESS && to.count) {
        pthread_mutex_unlock(&sim->lock);
        if (op->kind == SIM_OP_COPY)
            move(&to, &from);
        else
            for (size_t i = 0; i < to.count; i++)
                fill(&to.list[i], op->value, op->value_bytes);
        pthread_mutex_lock(&sim->lock);
    }
    free(to.list);
    free(from.list);
}

static void run_host_function(vpmm_sim *sim, struct sim_op *op)
{
    struct sim_frame frame;
    pthread_mutex_unlock(&sim->lock);
    sim_host_enter(&frame, sim);
    op->function(op->data);
    sim_host_leave(&frame);
    pthread_mutex_lock(&sim->lock);
}

void sim_op_run(vpmm_sim *sim, struct sim_lane *lane, struct sim_op *op)
{
    if (op->kind == SIM_OP_HOST)
        run_host_function(sim, op);
    else if (op->kind != SIM_OP_MARK)
        run_on_memory(sim, lane, op);
}

/* ---- queueing ---- */

/* Work on memory needs a current context, whichever stream it is for. */
static CUresult lane_for_work(vpmm_sim *sim, CUstream stream, struct sim_lane **lane)
{
    struct sim_context *context;
    CUresult result = sim_current(sim, &context);
    return result == CUDA_SUCCESS ? sim_lane_of(sim, stream, lane) : result;
}

static bool is_within(const struct sim_op *op, const struct sim_rows *rows)
{
    size_t bytes;
    return !__builtin_mul_overflow(op->height - 1, rows->pitch, &bytes) &&
           !__builtin_add_overflow(bytes, op->width, &bytes) && bytes <= SIM_VA_LIMIT;
}

/* What the driver says when it is given the work: of a range that wraps, and of a pool's memory that is not live. */
static CUresult rows_valid(vpmm_sim *sim, const struct sim_op *op, const struct sim_rows *rows)
{
    if (rows->host || op->kind == SIM_OP_GIVE_UP)
        return CUDA_SUCCESS;
    if (!is_within(op, rows))
        return sim_misuse(sim, CUDA_ERROR_INVALID_VALUE, "%s of %zu times %zu bytes at 0x%llx: there is no such range",
                          sim_entry_name(sim_frame()->entry), op->height, op->width, (unsigned long long)rows->device);
    for (size_t row = 0; row < op->height; row++)
        if (!sim_pool_live(sim, rows->device + row * rows->pitch, op->width))
            return sim_misuse(sim, CUDA_ERROR_INVALID_VALUE,
                              "%s of %zu bytes at 0x%llx: not in one live allocation of a pool",
                              sim_entry_name(sim_frame()->entry), op->width, (unsigned long long)rows->device);
    return CUDA_SUCCESS;
}

static CUresult submit_on_memory(vpmm_sim *sim, struct sim_lane *lane, struct sim_op *op, CUdeviceptr address)
{
    op->site = sim_site_new(lane->handle, address, op->width * op->height);
    CUresult result = op->site ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS)
        result = rows_valid(sim, op, &op->to);
    if (result == CUDA_SUCCESS && op->kind == SIM_OP_COPY)
        result = rows_valid(sim, op, &op->from);
    if (result == CUDA_SUCCESS)
        return sim_submit(sim, lane, op);
    sim_op_free(op);
    return result;
}

struct fill_request {
    CUdeviceptr to;
    size_t pitch, width, height; /* width in bytes */
    uint32_t value;
    int value_bytes;
};

static CUresult submit_fill(const struct fill_request *request, CUstream stream)
{
    vpmm_sim *sim = sim_self();
    struct sim_lane *lane;
    CUresult result = lane_for_work(sim, stream, &lane);
    if (result != CUDA_SUCCESS || request->width == 0 || request->height == 0)
        return result;
    size_t unit = (size_t)request->value_bytes;
    bool aligned = request->to % unit == 0 && request->pitch % unit == 0;
    if (!aligned || (request->height > 1 && request->pitch < request->width))
        return CUDA_ERROR_INVALID_VALUE;
    struct sim_op *op = sim_op_new(SIM_OP_MEMSET);
    if (!op)
        return CUDA_ERROR_OUT_OF_MEMORY;
    op->to = (struct sim_rows){NULL, request->to, request->pitch};
    op->width = request->width;
    op->height = request->height;
    op->value = request->value;
    op->value_bytes = request->value_bytes;
    return submit_on_memory(sim, lane, op, request->to);
}

/* The driver stages what the program could change before the copy runs. */
static bool stage(vpmm_sim *sim, struct sim_op *op)
{
    size_t bytes = (op->height - 1) * op->from.pitch + op->width;
    if (!op->from.host || sim_host_pinned(sim, op->from.host, bytes))
        return true;
    op->staged = malloc(op->width * op->height);
    if (!op->staged)
        return false;
    for (size_t row = 0; row < op->height; row++)
        memcpy((char *)op->staged + row * op->width, op->from.host + row * op->from.pitch, op->width);
    op->from.host = op->staged;
    op->from.pitch = op->width;
    return true;
}

struct copy_request {
    struct sim_rows to, from;
    size_t width, height;
};

static CUresult submit_copy(const struct copy_request *request, CUstream stream, bool wait)
{
    vpmm_sim *sim = sim_self();
    struct sim_lane *lane;
    CUresult result = lane_for_work(sim, stream, &lane);
    if (result == CUDA_SUCCESS && wait)
        result = sim_unsafe_on(sim, lane);
    if (result != CUDA_SUCCESS || request->width == 0 || request->height == 0)
        return result;
    if ((!request->to.host && !request->to.device) || (!request->from.host && !request->from.device))
        return CUDA_ERROR_INVALID_VALUE;
    struct sim_op *op = sim_op_new(SIM_OP_COPY);
    if (!op)
        return CUDA_ERROR_OUT_OF_MEMORY;
    op->to = request->to;
    op->from = request->from;
    op->width = request->width;
    op->height = request->height;
    if (!stage(sim, op)) {
        sim_op_free(op);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    result = submit_on_memory(sim, lane, op, request->to.host ? request->from.device : request->to.device);
    if (result != CUDA_SUCCESS || !wait)
        return result;
    sim_wait(sim, lane->id, lane->numbered);
    return sim_waited(sim);
}

/* ---- the entries ---- */

CUresult sim_cuMemcpyHtoD(CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount)
{
    const struct copy_request request = {{NULL, dstDevice, 0}, {(char *)srcHost, 0, 0}, ByteCount, 1};
    return submit_copy(&request, CU_STREAM_LEGACY, true);
}

CUresult sim_cuMemcpyDtoH(void *dstHost, CUdeviceptr srcDevice, size_t ByteCount)
{
    const struct copy_request request = {{dstHost, 0, 0}, {NULL, srcDevice, 0}, ByteCount, 1};
    return submit_copy(&request, CU_STREAM_LEGACY, true);
}

CUresult sim_cuMemcpyHtoDAsync(CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount, CUstream hStream)
{
    const struct copy_request request = {{NULL, dstDevice, 0}, {(char *)srcHost, 0, 0}, ByteCount, 1};
    return submit_copy(&request, hStream, false);
}

CUresult sim_cuMemcpyDtoHAsync(void *dstHost, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream)
{
    const struct copy_request request = {{dstHost, 0, 0}, {NULL, srcDevice, 0}, ByteCount, 1};
    return submit_copy(&request, hStream, false);
}

CUresult sim_cuMemcpyDtoDAsync(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream)
{
    const struct copy_request request = {{NULL, dstDevice, 0}, {NULL, srcDevice, 0}, ByteCount, 1};
    return submit_copy(&request, hStream, false);
}

/* One side of a 2D copy; false: a kind of memory that there is none of here. */
static bool side(CUmemorytype type, void *host, CUdeviceptr device, size_t pitch, size_t offset, struct sim_rows *rows)
{
    *rows = (struct sim_rows){NULL, 0, pitch};
    if (type == CU_MEMORYTYPE_HOST)
        rows->host = (char *)host + offset;
    else if (type == CU_MEMORYTYPE_DEVICE)
        rows->device = device + offset;
    return type == CU_MEMORYTYPE_HOST || type == CU_MEMORYTYPE_DEVICE;
}

CUresult sim_cuMemcpy2DAsync(const CUDA_MEMCPY2D *c, CUstream hStream)
{
    struct copy_request request;
    if (!c)
        return CUDA_ERROR_INVALID_VALUE;
    request.width = c->WidthInBytes;
    request.height = c->Height;
    size_t to_pitch = c->dstPitch ? c->dstPitch : c->WidthInBytes;
    size_t from_pitch = c->srcPitch ? c->srcPitch : c->WidthInBytes;
    size_t to_offset = c->dstY * to_pitch + c->dstXInBytes, from_offset = c->srcY * from_pitch + c->srcXInBytes;
    if (!side(c->dstMemoryType, c->dstHost, c->dstDevice, to_pitch, to_offset, &request.to) ||
        !side(c->srcMemoryType, (void *)c->srcHost, c->srcDevice, from_pitch, from_offset, &request.from))
        return CUDA_ERROR_NOT_SUPPORTED;
    if (to_pitch < c->WidthInBytes + c->dstXInBytes || from_pitch < c->WidthInBytes + c->srcXInBytes)
        return CUDA_ERROR_INVALID_VALUE;
    return submit_copy(&request, hStream, false);
}

/* Without "Async", but the host does not wait: memsets of device memory never do. */
CUresult sim_cuMemsetD8(CUdeviceptr dstDevice, unsigned char uc, size_t N)
{
    const struct fill_request request = {dstDevice, 0, N, 1, uc, 1};
    return submit_fill(&request, CU_STREAM_LEGACY);
}

CUresult sim_cuMemsetD8Async(CUdeviceptr dstDevice, unsigned char uc, size_t N, CUstream hStream)
{
    const struct fill_request request = {dstDevice, 0, N, 1, uc, 1};
    return submit_fill(&request, hStream);
}

/* Of words; more than there can be if that is too much to count. */
static size_t bytes_of(size_t words)
{
    return words <= SIZE_MAX / sizeof(uint32_t) ? words * sizeof(uint32_t) : SIZE_MAX - (sizeof(uint32_t) - 1);
}

CUresult sim_cuMemsetD32Async(CUdeviceptr dstDevice, unsigned int ui, size_t N, CUstream hStream)
{
    const struct fill_request request = {dstDevice, 0, bytes_of(N), 1, ui, sizeof ui};
    return submit_fill(&request, hStream);
}

CUresult sim_cuMemsetD2D32Async(CUdeviceptr dstDevice, size_t dstPitch, unsigned int ui, size_t Width, size_t Height,
                                CUstream hStream)
{
    const struct fill_request request = {dstDevice, dstPitch, bytes_of(Width), Height, ui, sizeof ui};
    return submit_fill(&request, hStream);
}

CUresult sim_cuLaunchHostFunc(CUstream hStream, CUhostFn fn, void *userData)
{
    vpmm_sim *sim = sim_self();
    struct sim_lane *lane;
    CUresult result = sim_lane_of(sim, hStream, &lane);
    if (result != CUDA_SUCCESS)
        return result;
    if (!fn)
        return CUDA_ERROR_INVALID_VALUE;
    struct sim_op *op = sim_op_new(SIM_OP_HOST);
    if (!op)
        return CUDA_ERROR_OUT_OF_MEMORY;
    op->function = fn;
    op->data = userData;
    return sim_submit(sim, lane, op);
}
