#include "virtual.h"

#include <inttypes.h>
#include <string.h>

static double over(uint64_t a, uint64_t b)
{
    return b ? (double)a / (double)b : 0;
}

static double mib(uint64_t bytes)
{
    return (double)bytes / (1 << 20);
}

/* ---- JSON: names of traces are file names, everything else is a number ---- */

static void json_census(FILE *out, const char *key, const virtual_census *c)
{
    fprintf(out,
            ",\n  \"%s\": {\"live\": %" PRIu64 ", \"hands\": %" PRIu64 ", \"cached\": %" PRIu64 ", \"fenced\": %" PRIu64
            ", \"stuck\": %" PRIu64 ", \"whole\": %" PRIu64 "}",
            key, c->live, c->hands, c->cached, c->fenced, c->stuck, c->whole);
}

static void json_account(FILE *out, const char *key, const virtual_account *a)
{
    fprintf(out,
            ",\n  \"%s\": {\"calls\": %" PRIu64 ", \"us\": %.3f, \"creates\": %" PRIu64 ", \"created_bytes\": %" PRIu64
            ", \"maps\": %" PRIu64 "}",
            key, a->calls, (double)a->ns / 1e3, a->creates, a->created_bytes, a->moves);
}

static void json_pass(virtual_report *report, const virtual_result *r)
{
    FILE *out = report->json;
    fprintf(out, "%s\n {\n  \"pass\": %u,\n  \"good\": %s", report->first ? "" : ",", r->pass,
            r->good ? "true" : "false");
    fprintf(out, ",\n  \"held_demand\": %.6f,\n  \"held_in_use\": %.6f", over(r->peak_mapped, r->peak_demand),
            over(r->peak_mapped, r->peak_in_use));
    fprintf(out,
            ",\n  \"peak_mapped_bytes\": %" PRIu64 ",\n  \"peak_demand_bytes\": %" PRIu64
            ",\n  \"peak_in_use_bytes\": %" PRIu64,
            r->peak_mapped, r->peak_demand, r->peak_in_use);
    fprintf(out, ",\n  \"mallocs\": %" PRIu64 ",\n  \"builds\": %" PRIu64 ",\n  \"seconds\": %.9f", r->mallocs,
            r->builds, r->seconds);
    fprintf(out,
            ",\n  \"malloc_p50_us\": %.3f,\n  \"malloc_p99_us\": %.3f,\n  \"malloc_p999_us\": %.3f"
            ",\n  \"malloc_max_us\": %.3f,\n  \"malloc_max_own_us\": %.3f",
            r->p50_us, r->p99_us, r->p999_us, r->max_us, r->max_own_us);
    json_account(out, "malloc_calls", &r->by_malloc);
    json_account(out, "background_calls", &r->background);
    json_census(out, "missed", &r->missed);
    json_census(out, "at_peak", &r->at_peak);
    fprintf(out, "\n }");
    report->first = false;
}

/* ---- the table ---- */

static void table_shares(FILE *out, const char *what, const virtual_census *c, const char *live)
{
    uint64_t sum = c->live + c->hands + c->cached + c->fenced + c->stuck + c->whole;
    fprintf(out, "     %s %.0f MiB: %s %.0f %%, in hands %.0f, fenced %.0f, cached %.0f, stuck %.0f, free %.0f\n", what,
            mib(sum), live, 100 * over(c->live, sum), 100 * over(c->hands, sum), 100 * over(c->fenced, sum),
            100 * over(c->cached, sum), 100 * over(c->stuck, sum), 100 * over(c->whole, sum));
}

static void table_pass(FILE *out, const virtual_result *r)
{
    fprintf(out, "%4u  %9.3f %8.3f  %8.0f  %8" PRIu64 " %7" PRIu64 "  %7.1f %7.1f %8.1f %9.1f %8.1f  %8.2f %8.2f%s\n",
            r->pass, over(r->peak_mapped, r->peak_demand), over(r->peak_mapped, r->peak_in_use), mib(r->peak_mapped),
            r->mallocs, r->builds, r->p50_us, r->p99_us, r->p999_us, r->max_us, r->max_own_us,
            (double)r->by_malloc.ns / 1e6, (double)r->background.ns / 1e6, r->good ? "" : "  FAILED");
    table_shares(out, "made    ", &r->missed, "missing");
    table_shares(out, "at most ", &r->at_peak, "live");
}

bool virtual_report_open(virtual_report *report, const virtual_options *o, const char *traces)
{
    bool to_stdout = o->json != NULL && strcmp(o->json, "-") == 0;
    *report = (virtual_report){.options = o, .table = to_stdout ? stderr : stdout, .first = true};
    if (o->json != NULL)
        report->json = to_stdout ? stdout : fopen(o->json, "w");
    if (o->json != NULL && report->json == NULL) {
        fprintf(stderr, "vpmm-virtual: --json '%s' cannot be written\n", o->json);
        return false;
    }
    if (report->json)
        fprintf(report->json, "[");
    fprintf(report->table,
            "%s, %u threads, scale %g, %s%s, GPU %" PRIu64 " us behind, stall %" PRIu64 " us, shift %" PRIu64 " us\n",
            traces, o->threads, o->scale, o->pace ? "paced" : "dense",
            o->default_stream ? ", on the default stream" : "", o->lag_us, o->stall_us, o->shift_us);
    fprintf(report->table,
            "pass  held/dem. held/use mapped MiB  mallocs  builds  p50 us     p99    p99.9       max      "
            "own  driver ms  background\n");
    return true;
}

void virtual_report_pass(virtual_report *report, const virtual_result *r)
{
    table_pass(report->table, r);
    if (report->json)
        json_pass(report, r);
}

bool virtual_report_close(virtual_report *report)
{
    bool ok = true;
    if (report->json) {
        fprintf(report->json, "\n]\n");
        ok = fflush(report->json) == 0 && !ferror(report->json);
        if (report->json != stdout)
            ok = fclose(report->json) == 0 && ok;
    }
    if (!ok)
        fprintf(stderr, "vpmm-virtual: the JSON could not be written\n");
    return ok;
}
