#define _GNU_SOURCE 1

#include "pairs.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

const char *const pairs_pattern_names[PATTERNS] = {"pair", "window", "handoff"};
const char *const pairs_allocator_names[2] = {"vpmm", "async"};

static const char *streams_name(vpmm_streams streams)
{
    return streams == VPMM_STREAMS_TRUSTED ? "trusted" : streams == VPMM_STREAMS_EAGER ? "eager" : "checked";
}

/* ---- JSON ---- */

/* A number, or null where it is not known. */
static void json_known(FILE *out, const char *key, bool known, const char *format, double value)
{
    fprintf(out, ", \"%s\": ", key);
    if (known)
        fprintf(out, format, value);
    else
        fputs("null", out);
}

static void json_line(FILE *out, const pairs_result *r)
{
    const pairs_options *o = r->of.options;
    fprintf(out,
            "{\"driver\": \"%s\", \"allocator\": \"%s\", \"streams\": \"%s\", \"pattern\": \"%s\", \"bytes\": %zu, "
            "\"threads\": %u, \"streams_known\": %u, \"pairs\": %" PRIu64
            ", \"ns_per_pair\": %.2f, \"pairs_per_second\": %.0f",
            o->cuda ? "cuda" : "sim", pairs_allocator_names[r->of.async], streams_name(o->config.streams),
            pairs_pattern_names[r->of.pattern], r->of.bytes, r->of.threads, o->streams_known, r->pairs, r->ns_per_pair,
            r->pairs_per_second);
    json_known(out, "p99_ns", r->has_p99, "%.0f", r->p99_ns);
    fprintf(out, ", \"driver_calls\": %" PRIu64, r->driver_calls);
    json_known(out, "locks", r->has_locks, "%.0f", (double)r->locks);
    fprintf(out, ", \"peak_mapped_bytes\": %" PRIu64, r->peak_mapped_bytes);
#define TIER(name) fprintf(out, ", \"" #name "\": %" PRIu64, r->tiers.name);
    TIER(hits_cache)
    TIER(hits_neighbour)
    TIER(hits_own_stream)
    TIER(hits_completed)
    TIER(hits_waited)
    TIER(hits_slab)
    TIER(hits_async)
    TIER(builds)
    TIER(marks)
#undef TIER
    fprintf(out, ", \"good\": %s}\n", r->good ? "true" : "false");
}

/* ---- the table ---- */

static void size_text(uint64_t bytes, char text[24])
{
    static const char suffix[] = {0, 'K', 'M', 'G'};
    unsigned power = 0;
    while (power < 3 && bytes != 0 && bytes % 1024 == 0) {
        bytes /= 1024;
        power++;
    }
    snprintf(text, 24, "%" PRIu64 "%.1s", bytes, &suffix[power]);
}

static void table_head(FILE *out)
{
    fprintf(out, "%-8s %7s %7s %-9s %-8s %10s %12s %10s %12s %10s %9s\n", "pattern", "bytes", "threads", "allocator",
            "streams", "ns a pair", "pairs/s", "p99 ns", "calls a pair", "locks", "peak MiB");
}

static void table_row(FILE *out, const pairs_result *r)
{
    char bytes[24], p99[32] = "-", locks[32] = "-";
    size_text(r->of.bytes, bytes);
    if (r->has_p99)
        snprintf(p99, sizeof p99, "%.0f", r->p99_ns);
    if (r->has_locks)
        snprintf(locks, sizeof locks, "%" PRIu64, r->locks);
    fprintf(out, "%-8s %7s %7u %-9s %-8s %10.1f %12.0f %10s %12.3f %10s %9.0f%s\n", pairs_pattern_names[r->of.pattern],
            bytes, r->of.threads, pairs_allocator_names[r->of.async],
            r->of.async ? "-" : streams_name(r->of.options->config.streams), r->ns_per_pair, r->pairs_per_second, p99,
            (double)r->driver_calls / (double)r->pairs, locks, (double)r->peak_mapped_bytes / (1 << 20),
            r->good ? "" : "  FAILED");
    fflush(out);
}

bool report_open(report *rep, const char *json)
{
    *rep = (report){.table = stdout, .path = json};
    if (json != NULL && strcmp(json, "-") == 0) {
        rep->json = stdout;
        rep->table = stderr;
    } else if (json != NULL) {
        rep->json = fopen(json, "w");
        if (rep->json == NULL)
            fprintf(stderr, "vpmm-pairs: --json %s: %s\n", json, strerror(errno));
        return rep->json != NULL;
    }
    return true;
}

void report_result(report *rep, const pairs_result *r)
{
    if (!rep->headed)
        table_head(rep->table);
    rep->headed = true;
    table_row(rep->table, r);
    if (rep->json != NULL) {
        json_line(rep->json, r);
        fflush(rep->json);
    }
}

bool report_close(report *rep)
{
    bool ok = rep->json == NULL || (fflush(rep->json) == 0 && !ferror(rep->json));
    if (rep->json != NULL && rep->json != stdout)
        ok = fclose(rep->json) == 0 && ok;
    if (!ok)
        fprintf(stderr, "vpmm-pairs: --json %s could not be written\n", rep->path);
    return ok;
}
