/*
 * trace.h - recorded allocation traces: `op,id,bytes,stream,us`, one event a line.
 *
 *   op      a: allocate, f: free
 *   id      a number of the recorder's; a free names the allocation by it. An id may come again after its free
 *   bytes   of the request, not zero. A free states the same number, or nothing
 *   stream  0 .. TRACE_MAX_STREAMS - 1
 *   us      microseconds since the recording began; never goes backwards
 *
 * The first line may be the header "op,id,bytes,stream,us". Everything else is refused with file, line and reason:
 * a trace that is read wrongly measures something else. What is still live at the end is the replayer's to free.
 *
 * Ids are replaced by slots: the n-th allocation of the file has slot n - 1, so that a replayer needs an array only.
 */
#ifndef VPMM_STRESS_TRACE_H
#define VPMM_STRESS_TRACE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define TRACE_MAX_STREAMS 256u
#define TRACE_MAX_BYTES   (UINT64_C(1) << 48) /* 256 TiB: more than a GPU can address */
#define TRACE_MAX_SLOTS   UINT32_MAX

typedef enum trace_op { TRACE_MALLOC, TRACE_FREE } trace_op;

typedef struct trace_event {
    uint64_t bytes; /* of a free: those of its allocation */
    uint64_t us;
    uint32_t slot;
    uint16_t stream;
    uint8_t op; /* trace_op */
} trace_event;

typedef struct trace {
    trace_event *events;
    size_t count;
    size_t mallocs; /* events that allocate */
    size_t slots;   /* every slot is below */
    size_t streams; /* every stream number is below */
    size_t first;   /* the stream of the first request that was read */
} trace;

/* False: nothing is in *out, and error says "FILE:LINE: reason". */
bool trace_read(const char *path, trace *out, char *error, size_t error_size);

/* The same from an open stream; name stands for the file in messages. */
bool trace_parse(FILE *in, const char *name, trace *out, char *error, size_t error_size);

/* Multiplies every request by factor; at least one byte stays. */
void trace_scale(trace *, double factor);

/* Drops the requests below bytes, and their frees. */
void trace_drop_below(trace *, uint64_t bytes);

/* trace_read, trace_scale and trace_drop_below, one after the other. False, too, if no request is left. */
bool trace_load(const char *path, double factor, uint64_t least_bytes, trace *out, char *error, size_t error_size);

/* Whether it is the stream of the first request in the file: of a program on the default stream most often that. */
bool trace_is_first_stream(const trace *, size_t stream);

void trace_release(trace *);

#endif
