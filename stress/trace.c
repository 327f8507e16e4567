#define _GNU_SOURCE 1

#include "trace.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

enum { FIELDS = 5 };

static const char header[] = "op,id,bytes,stream,us";
static const char *const field_names[FIELDS] = {"op", "id", "bytes", "stream", "us"};

/* ids: id -> its latest allocation, by open addressing; capacity a power of two, at most half of it in use. */

typedef struct id_entry {
    uint64_t id;
    uint64_t bytes;
    uint64_t line; /* of the allocation, or of its free; 0: the entry is empty */
    uint32_t slot;
    bool live;
} id_entry;

typedef struct id_map {
    id_entry *entries;
    size_t capacity;
    size_t used;
} id_map;

static size_t id_hash(uint64_t id)
{
    id *= UINT64_C(0x9e3779b97f4a7c15);
    return (size_t)(id >> 32 ^ id);
}

/* The entry of id, or the empty one where it belongs. */
static id_entry *id_probe(const id_map *map, uint64_t id)
{
    size_t at = id_hash(id) & (map->capacity - 1);
    while (map->entries[at].line != 0 && map->entries[at].id != id)
        at = (at + 1) & (map->capacity - 1);
    return &map->entries[at];
}

static bool id_grow(id_map *map)
{
    id_map bigger = {.capacity = map->capacity == 0 ? 1024 : map->capacity * 2, .used = map->used};
    bigger.entries = calloc(bigger.capacity, sizeof *bigger.entries);
    if (bigger.entries == NULL)
        return false;
    for (size_t i = 0; i < map->capacity; i++)
        if (map->entries[i].line != 0)
            *id_probe(&bigger, map->entries[i].id) = map->entries[i];
    free(map->entries);
    *map = bigger;
    return true;
}

/* Room for one more entry. */
static bool id_reserve(id_map *map)
{
    return map->used < map->capacity / 2 || id_grow(map);
}

/* The reader. */

typedef struct reader {
    const char *name;
    uint64_t line;
    uint64_t last_us;
    id_map ids;
    trace *out;
    size_t capacity; /* of out->events */
    char *error;
    size_t error_size;
} reader;

__attribute__((format(printf, 2, 3))) static bool refuse(reader *r, const char *format, ...)
{
    va_list arguments;
    int n = snprintf(r->error, r->error_size, "%s:%" PRIu64 ": ", r->name, r->line);
    if (n < 0 || (size_t)n >= r->error_size)
        return false;
    va_start(arguments, format);
    vsnprintf(r->error + n, r->error_size - (size_t)n, format, arguments);
    va_end(arguments);
    return false;
}

/* Digits only: strtoull would take blanks, signs and hexadecimal. */
static bool parse_number(reader *r, int field, const char *text, uint64_t max, uint64_t *out)
{
    uint64_t value = 0;
    if (*text == '\0')
        return refuse(r, "%s is missing", field_names[field]);
    for (const char *c = text; *c != '\0'; c++) {
        if (*c < '0' || *c > '9')
            return refuse(r, "%s '%.40s' is not a decimal number", field_names[field], text);
        unsigned digit = (unsigned)(*c - '0');
        if (value > (max - digit) / 10)
            return refuse(r, "%s '%.40s' is too large: at most %" PRIu64 " is allowed", field_names[field], text, max);
        value = value * 10 + digit;
    }
    *out = value;
    return true;
}

/* Cuts a line at its commas, in place. */
static bool split_fields(reader *r, char *line, char *fields[FIELDS])
{
    int n = 0;
    for (char *rest = line; rest != NULL; n++) {
        char *field = strsep(&rest, ",");
        if (n < FIELDS)
            fields[n] = field;
    }
    if (n != FIELDS)
        return refuse(r, "%d fields instead of %d (%s)", n, FIELDS, header);
    return true;
}

static bool append_event(reader *r, trace_event event)
{
    trace *t = r->out;
    if (t->count == r->capacity) {
        size_t capacity = r->capacity == 0 ? 4096 : r->capacity * 2;
        trace_event *events = realloc(t->events, capacity * sizeof *events);
        if (events == NULL)
            return refuse(r, "the host has no memory for more events");
        t->events = events;
        r->capacity = capacity;
    }
    t->events[t->count++] = event;
    if (event.stream >= t->streams)
        t->streams = event.stream + 1u;
    return true;
}

static bool take_malloc(reader *r, uint64_t id, trace_event event)
{
    if (event.bytes == 0)
        return refuse(r, "an allocation of zero bytes");
    if (!id_reserve(&r->ids))
        return refuse(r, "the host has no memory for more ids");
    id_entry *entry = id_probe(&r->ids, id);
    if (entry->line != 0 && entry->live)
        return refuse(r, "id %" PRIu64 " is allocated twice: it is live since line %" PRIu64, id, entry->line);
    if (r->out->slots == TRACE_MAX_SLOTS)
        return refuse(r, "more than %" PRIu32 " allocations", TRACE_MAX_SLOTS);
    r->ids.used += entry->line == 0;
    event.slot = (uint32_t)r->out->slots++;
    r->out->mallocs++;
    *entry = (id_entry){.id = id, .bytes = event.bytes, .line = r->line, .slot = event.slot, .live = true};
    return append_event(r, event);
}

static bool take_free(reader *r, uint64_t id, bool states_bytes, trace_event event)
{
    id_entry *entry = r->ids.used == 0 ? NULL : id_probe(&r->ids, id);
    if (entry == NULL || entry->line == 0)
        return refuse(r, "free of id %" PRIu64 ", which was never allocated", id);
    if (!entry->live)
        return refuse(r, "free of id %" PRIu64 ", which was freed in line %" PRIu64, id, entry->line);
    if (states_bytes && event.bytes != entry->bytes)
        return refuse(r, "free of id %" PRIu64 " states %" PRIu64 " bytes; line %" PRIu64 " allocated %" PRIu64, id,
                      event.bytes, entry->line, entry->bytes);
    entry->live = false;
    entry->line = r->line;
    event.bytes = entry->bytes;
    event.slot = entry->slot;
    return append_event(r, event);
}

static bool parse_op(reader *r, const char *text, uint8_t *op)
{
    if (strcmp(text, "a") != 0 && strcmp(text, "f") != 0)
        return refuse(r, "op '%.40s' is unknown: 'a' (allocate) and 'f' (free) are allowed", text);
    *op = *text == 'a' ? TRACE_MALLOC : TRACE_FREE;
    return true;
}

static bool parse_event(reader *r, char *line)
{
    char *fields[FIELDS];
    trace_event event = {0};
    uint64_t id, stream;
    if (!split_fields(r, line, fields) || !parse_op(r, fields[0], &event.op) ||
        !parse_number(r, 1, fields[1], UINT64_MAX, &id))
        return false;
    bool states_bytes = event.op == TRACE_MALLOC || *fields[2] != '\0';
    if (states_bytes && !parse_number(r, 2, fields[2], TRACE_MAX_BYTES, &event.bytes))
        return false;
    if (!parse_number(r, 3, fields[3], TRACE_MAX_STREAMS - 1, &stream) ||
        !parse_number(r, 4, fields[4], UINT64_MAX / 1000 - 1, &event.us))
        return false;
    if (event.us < r->last_us)
        return refuse(r, "time goes backwards, from %" PRIu64 " to %" PRIu64 " us", r->last_us, event.us);
    r->last_us = event.us;
    event.stream = (uint16_t)stream;
    return event.op == TRACE_MALLOC ? take_malloc(r, id, event) : take_free(r, id, states_bytes, event);
}

/* line: length bytes as getline gave them. */
static bool take_line(reader *r, char *line, size_t length)
{
    if (memchr(line, '\0', length) != NULL)
        return refuse(r, "a NUL byte: this is no text file");
    line[strcspn(line, "\n")] = '\0';
    length = strlen(line);
    if (length > 0 && line[length - 1] == '\r')
        line[--length] = '\0';
    if (length == 0)
        return refuse(r, "an empty line");
    if (r->line == 1 && strcmp(line, header) == 0)
        return true;
    return parse_event(r, line);
}

static bool read_lines(reader *r, FILE *in)
{
    char *line = NULL;
    size_t size = 0;
    ssize_t length;
    bool ok = true;
    errno = 0;
    while (ok && (length = getline(&line, &size, in)) >= 0) {
        r->line++;
        ok = take_line(r, line, (size_t)length);
    }
    if (ok && !feof(in))
        ok = refuse(r, "cannot be read further: %s", strerror(errno));
    if (ok && r->out->count == 0) {
        r->line++;
        ok = refuse(r, "the file ends before its first event");
    }
    free(line);
    return ok;
}

bool trace_parse(FILE *in, const char *name, trace *out, char *error, size_t error_size)
{
    reader r = {.name = name, .out = out, .error = error, .error_size = error_size};
    *out = (trace){0};
    bool ok = read_lines(&r, in);
    free(r.ids.entries);
    if (ok)
        out->first = out->events[0].stream;
    else
        trace_release(out);
    return ok;
}

bool trace_read(const char *path, trace *out, char *error, size_t error_size)
{
    FILE *in = fopen(path, "r");
    *out = (trace){0};
    if (in == NULL) {
        snprintf(error, error_size, "%s: %s", path, strerror(errno));
        return false;
    }
    bool ok = trace_parse(in, path, out, error, error_size);
    fclose(in);
    return ok;
}

void trace_scale(trace *t, double factor)
{
    if (factor == 1.0)
        return;
    for (size_t i = 0; i < t->count; i++) {
        double bytes = (double)t->events[i].bytes * factor;
        t->events[i].bytes = bytes < 1 ? 1 : (uint64_t)bytes;
    }
}

void trace_drop_below(trace *t, uint64_t bytes)
{
    size_t kept = 0;
    t->mallocs = 0;
    for (size_t i = 0; i < t->count; i++) {
        if (t->events[i].bytes < bytes)
            continue;
        t->mallocs += t->events[i].op == TRACE_MALLOC;
        t->events[kept++] = t->events[i];
    }
    t->count = kept;
}

bool trace_load(const char *path, double factor, uint64_t least_bytes, trace *out, char *error, size_t error_size)
{
    if (!trace_read(path, out, error, error_size))
        return false;
    trace_scale(out, factor);
    trace_drop_below(out, least_bytes);
    if (out->mallocs)
        return true;
    snprintf(error, error_size, "%s: no request has %" PRIu64 " bytes or more (--min-bytes)", path, least_bytes);
    trace_release(out);
    return false;
}

bool trace_is_first_stream(const trace *t, size_t stream)
{
    return t->first == stream;
}

void trace_release(trace *t)
{
    free(t->events);
    *t = (trace){0};
}
