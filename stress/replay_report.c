#define _GNU_SOURCE 1

#include "replay.h"

#include "json.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>
#include <unistd.h>

static double held_over(const pass_result *r, uint64_t peak_bytes)
{
    return peak_bytes == 0 ? 0 : (double)r->peak_mapped_bytes / (double)peak_bytes;
}

bool pass_good(const pass_result *r)
{
    return r->races == 0 && r->mismatches == 0 && r->misuses == 0 && r->refused == 0 && r->audit && r->leaks == 0;
}

/* JSON. Every member but the first of an object begins with a comma. */

static void json_text(FILE *out, const char *key, const char *value)
{
    fprintf(out, ",\n  \"%s\": ", key);
    json_write_text(out, value);
}

static void json_u64(FILE *out, const char *key, uint64_t value)
{
    fprintf(out, ",\n  \"%s\": %" PRIu64, key, value);
}

static void json_real(FILE *out, const char *key, double value)
{
    fprintf(out, ",\n  \"%s\": %.6f", key, isfinite(value) ? value : 0);
}

static void json_bool(FILE *out, const char *key, bool value)
{
    fprintf(out, ",\n  \"%s\": %s", key, value ? "true" : "false");
}

static void json_settings(FILE *out, const replay_options *o, const pass_result *r)
{
    fprintf(out, "\n {\n  \"pass\": %u", r->pass);
    json_text(out, "trace", r->trace);
    json_text(out, "file", r->path);
    json_text(out, "allocator", o->async ? "async" : "vpmm");
    json_text(out, "driver", o->cuda ? "cuda" : "sim");
    json_u64(out, "lag", o->cuda ? 0 : o->lag);
    json_u64(out, "threads", o->threads);
    json_real(out, "scale", o->scale);
    json_u64(out, "min_bytes", o->min_bytes);
    json_bool(out, "paced", o->pace);
    json_bool(out, "default_stream", o->default_stream);
    json_bool(out, "verified", o->verify);
}

static void json_measurements(FILE *out, const pass_result *r)
{
    json_u64(out, "events", r->events);
    json_u64(out, "mallocs", r->mallocs);
    json_u64(out, "frees", r->frees);
    json_u64(out, "peak_mapped_bytes", r->peak_mapped_bytes);
    json_u64(out, "peak_in_use_bytes", r->peak_in_use_bytes);
    json_u64(out, "peak_demand_bytes", r->peak_demand_bytes);
    json_real(out, "held_demand", held_over(r, r->peak_demand_bytes));
    json_real(out, "held_in_use", held_over(r, r->peak_in_use_bytes));
    json_real(out, "wall_ms", r->wall_ms);
    json_real(out, "malloc_ms", r->malloc_ms);
    json_real(out, "malloc_p50_us", r->malloc_p50_us);
    json_real(out, "malloc_p99_us", r->malloc_p99_us);
    json_real(out, "malloc_p999_us", r->malloc_p999_us);
    json_real(out, "malloc_max_us", r->malloc_max_us);
    json_real(out, "driver_us_malloc", r->driver_us_malloc);
    json_real(out, "driver_us_malloc_max", r->driver_us_malloc_max);
    json_real(out, "driver_us_free", r->driver_us_free);
    json_real(out, "driver_us_background", r->driver_us_background);
    json_u64(out, "small_mallocs", r->small_mallocs);
    json_real(out, "small_malloc_ns_mean", r->small_malloc_ns_mean);
    json_real(out, "small_malloc_ns_p50", r->small_malloc_ns_p50);
    json_real(out, "driver_us_small", r->driver_us_small);
    json_u64(out, "peak_slab_bytes", r->peak_slab_bytes);
    json_u64(out, "peak_slab_live_bytes", r->peak_slab_live_bytes);
}

static void json_counters(FILE *out, const pass_result *r)
{
#define DIFFERENCE(name) json_u64(out, #name, r->after.name - r->before.name);
    DIFFERENCE(extents_created)
    DIFFERENCE(extents_released)
    DIFFERENCE(extents_remapped)
    DIFFERENCE(pages_created)
    DIFFERENCE(zombies_retired)
    DIFFERENCE(builds)
    DIFFERENCE(reclaims)
    DIFFERENCE(hits_cache)
    DIFFERENCE(hits_own_stream)
    DIFFERENCE(hits_neighbour)
    DIFFERENCE(hits_completed)
    DIFFERENCE(hits_waited)
    DIFFERENCE(hits_slab)
    DIFFERENCE(hits_async)
    DIFFERENCE(marks)
    DIFFERENCE(driver_calls)
#undef DIFFERENCE
}

static void json_verdict(FILE *out, const pass_result *r)
{
    json_u64(out, "races", r->races);
    json_u64(out, "mismatches", r->mismatches);
    json_u64(out, "misuses", r->misuses);
    json_u64(out, "refused", r->refused);
    json_u64(out, "leaks", r->leaks);
    json_bool(out, "audit", r->audit);
    fprintf(out, "\n }");
}

/* The table. */

static void table_head(FILE *out)
{
    fprintf(out, "%-20s %4s %9s %8s %10s %9s %9s %9s %9s %10s %8s %7s %6s %10s\n", "trace", "pass", "held/dem.",
            "held/use", "malloc ms", "p50 us", "p99 us", "p99.9 us", "max us", "driver ms", "created", "moved", "races",
            "mismatches");
}

static void table_row(FILE *out, const pass_result *r)
{
    fprintf(out,
            "%-20s %4u %9.4f %8.4f %10.3f %9.2f %9.2f %9.2f %9.2f %10.3f %8" PRIu64 " %7" PRIu64 " %6" PRIu64
            " %10" PRIu64 "%s\n",
            r->trace, r->pass, held_over(r, r->peak_demand_bytes), held_over(r, r->peak_in_use_bytes), r->malloc_ms,
            r->malloc_p50_us, r->malloc_p99_us, r->malloc_p999_us, r->malloc_max_us, r->driver_us_malloc / 1e3,
            r->after.extents_created - r->before.extents_created,
            r->after.extents_remapped - r->before.extents_remapped, r->races, r->mismatches,
            pass_good(r) ? "" : "  FAILED");
    fflush(out);
}

/* The mallocs of less than a page, which are in the row with all the others. */
static void table_small(FILE *out, const pass_result *r)
{
    if (r->small_mallocs != 0)
        fprintf(out, "  below a page: %" PRIu64 " mallocs of %.0f ns, %.0f in the median; driver ms %.3f\n",
                r->small_mallocs, r->small_malloc_ns_mean, r->small_malloc_ns_p50, r->driver_us_small / 1e3);
}

/* What the row's columns do not show. */
static void table_faults(FILE *out, const pass_result *r)
{
    if (!r->audit)
        fprintf(out, "  the audit failed\n");
    if (r->misuses != 0)
        fprintf(out, "  %" PRIu64 " uses of destroyed objects or unmapped memory\n", r->misuses);
    if (r->refused != 0)
        fprintf(out, "  %" PRIu64 " allocations were refused\n", r->refused);
    if (r->leaks != 0)
        fprintf(out, "  %u driver objects leaked\n", r->leaks);
}

bool report_open(report *rep, const replay_options *options)
{
    *rep = (report){.options = options, .table = stdout, .first = true};
    if (options->json != NULL && strcmp(options->json, "-") == 0) {
        rep->json = stdout;
        rep->table = stderr;
    } else if (options->json != NULL) {
        rep->json = fopen(options->json, "w");
        if (rep->json == NULL) {
            fprintf(stderr, "vpmm-replay: --json %s: %s\n", options->json, strerror(errno));
            return false;
        }
    }
    if (rep->json != NULL)
        fputc('[', rep->json);
    return true;
}

void report_pass(report *rep, const pass_result *r)
{
    if (rep->first)
        table_head(rep->table);
    table_row(rep->table, r);
    table_small(rep->table, r);
    table_faults(rep->table, r);
    if (rep->json != NULL) {
        fputs(rep->first ? "" : ",", rep->json);
        json_settings(rep->json, rep->options, r);
        json_measurements(rep->json, r);
        json_counters(rep->json, r);
        json_verdict(rep->json, r);
        fflush(rep->json);
    }
    rep->first = false;
}

bool report_close(report *rep)
{
    bool ok = true;
    if (rep->json != NULL) {
        fputs("\n]\n", rep->json);
        ok = fflush(rep->json) == 0 && !ferror(rep->json);
        if (rep->json != stdout)
            ok = fclose(rep->json) == 0 && ok;
    }
    if (!ok)
        fprintf(stderr, "vpmm-replay: --json %s could not be written\n", rep->options->json);
    return ok;
}

static bool shown;

void progress_show(const char *name, unsigned pass, double done)
{
    if (!isatty(STDERR_FILENO))
        return;
    fprintf(stderr, "\r\033[K%s, pass %u: %.0f %%", name, pass, done * 100);
    shown = true;
}

void progress_clear(void)
{
    if (shown)
        fprintf(stderr, "\r\033[K");
    shown = false;
}
