/*
 * stress_report.c - what a run tells: progress, a result for people, and one for programs.
 */
#define _GNU_SOURCE 1

#include "stress.h"

#include "json.h"

#include <inttypes.h>
#include <string.h>

enum { JSON_VERSION = 1 };

static const char *allocator_of(const run *r)
{
    return r->is_async ? "async" : "vpmm";
}

static double ratio(uint64_t part, uint64_t whole)
{
    return whole ? (double)part / (double)whole : 0;
}

static double gib(uint64_t bytes)
{
    return (double)bytes / (double)((uint64_t)1 << 30);
}

static double rate_of(const run *r, double seconds)
{
    return seconds > 0 ? (double)run_count(r, COUNT_mallocs) / seconds : 0;
}

/* ---- progress ---- */

void report_progress(run *r)
{
    double seconds = now_seconds() - r->begun;
    vpmm_stats s = {0};
    if (r->target.pool != NULL)
        vpmm_stats_get(r->target.pool, &s);
    fprintf(stderr,
            "%5.0f s  device %d %s: %.0f mallocs/s, live %.2f GiB, mapped %.2f GiB, worst malloc %.2f ms, verified "
            "%.1f GiB, mismatches %" PRIu64,
            seconds, r->ordinal, allocator_of(r), rate_of(r, seconds), gib(atomic_load(&r->live)), gib(run_mapped(r)),
            run_longest_us(r) / 1e3, gib(run_bytes_verified(r)), run_mismatches(r));
    if (r->target.pool != NULL)
        fprintf(stderr, "; of 1,000 mallocs %.0f hit a cache, %.1f build; refused %" PRIu64,
                1e3 * ratio(s.hits_cache, s.mallocs), 1e3 * ratio(s.builds, s.mallocs), run_count(r, COUNT_refused));
    fputc('\n', stderr);
}

/* ---- rare paths ---- */

/* Each is a path that few calls take, and the number of calls that did. */
#define PATHS(X)                                                                                                       \
    X(taken_from_other_threads_caches, r->stats.hits_neighbour)                                                        \
    X(waited_on_the_device, r->stats.hits_waited)                                                                      \
    X(built, r->stats.builds)                                                                                          \
    X(handles_moved, r->stats.extents_remapped)                                                                        \
    X(old_addresses_unmapped, r->stats.zombies_retired)                                                                \
    X(regions_split, r->stats.splits)                                                                                  \
    X(slabs_adopted, r->stats.adoptions)                                                                               \
    X(handles_given_back, r->stats.extents_released)                                                                   \
    X(everything_taken_back_first, r->stats.reclaims)                                                                  \
    X(refused_for_want_of_memory, r->stats.out_of_memory)                                                              \
    X(address_chunks_added, r->stats.reserved_bytes ? r->stats.reserved_bytes / r->config.va_size - 1 : 0)             \
    X(given_to_other_threads, run_count(r, COUNT_taken))                                                               \
    X(freed_on_another_stream, run_count(r, COUNT_crossed))                                                            \
    X(said_with_vpmm_use, run_count(r, COUNT_used))                                                                    \
    X(on_the_default_stream, run_count(r, COUNT_on_default))                                                           \
    X(on_a_threads_default_stream, run_count(r, COUNT_on_own_default))                                                 \
    X(trims, r->trims)                                                                                                 \
    X(polls, r->polls)                                                                                                 \
    X(caps_lowered, r->caps)                                                                                           \
    X(settings_changed, r->settings)                                                                                   \
    X(statistics_read, r->looked[LOOK_statistics])                                                                     \
    X(attributes_read, r->looked[LOOK_attributes])                                                                     \
    X(health_read, r->looked[LOOK_health])                                                                             \
    X(ranges_visited, r->looked[LOOK_ranges])                                                                          \
    X(allocations_visited, r->looked[LOOK_allocations])                                                                \
    X(calls_read, r->looked[LOOK_calls])                                                                               \
    X(other_pools, r->pools)                                                                                           \
    X(parks, r->parks)                                                                                                 \
    X(served_beside_a_park, r->beside_park)                                                                            \
    X(refused_by_a_park, r->refused_by_park)

/* With planned faults: builds given up at each step that one refused call ends, */
#define UNWINDINGS(X)                                                                                                  \
    X(unwound_create, r->stats.unwound_create)                                                                         \
    X(unwound_map, r->stats.unwound_map)                                                                               \
    X(unwound_access, r->stats.unwound_access)

/* and these calls refused. */
static const char *const refused[] = {"cuMemCreate",   "cuMemMap",          "cuMemSetAccess",
                                      "cuMemUnmap",    "cuMemRelease",      "cuEventCreate",
                                      "cuEventRecord", "cuStreamWaitEvent", "cuStreamGetId"};

static void append(char *words, size_t length, const char *word)
{
    size_t at = strlen(words);
    snprintf(words + at, length - at, "%s%s", at ? ", " : "", word);
}

void report_paths_missed(const run *r, char *words, size_t length)
{
    words[0] = '\0';
    if (r->is_async)
        return;
#define MISSED(name, value)                                                                                            \
    if ((value) == 0)                                                                                                  \
        append(words, length, #name);
    PATHS(MISSED)
    if (!r->options->faults)
        return;
    UNWINDINGS(MISSED)
#undef MISSED
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        if (faults_made(refused[i]) == 0)
            append(words, length, refused[i]);
    if (host_memory_refused() == 0)
        append(words, length, "host_memory");
    if (host_threads_refused() == 0)
        append(words, length, "threads");
}

static const char *const answer_words[ANSWERS] = {"served", "refused"};

/* ---- for people ---- */

static void tell_longest(FILE *out, const run *r)
{
    for (int i = 0; i < ANSWERS; i++) {
        const longest *l = &r->longest[i];
        if (l->ns == 0)
            continue;
        fprintf(out, "  longest malloc %s: %.2f ms, %.2f MiB, by %s in thread %u, at %.1f s", answer_words[i],
                (double)l->ns / 1e6, (double)l->bytes / 1048576.0, l->pattern, l->thread, l->at);
        if (l->lowered)
            fprintf(out, ", under a cap lowered to %.2f GiB", gib(l->cap));
        const char *joint = ", beside ";
        for (int what = 0; what < DISTURBANCE_COUNT; what++)
            if (l->beside >> what & 1) {
                fprintf(out, "%s%s", joint, disturbance_words[what]);
                joint = ", ";
            }
        fputc('\n', out);
    }
}

void report_result(FILE *out, run *r)
{
    int outcome = atomic_load(&r->outcome);
    fprintf(out, "device %d, %s, %s: %s%s%s\n", r->ordinal, r->name, allocator_of(r), outcome_word(outcome),
            r->message[0] ? ": " : "", r->message);
    if (r->finding[0])
        fprintf(out, "  %s.\n", r->finding);
    if (r->seconds == 0)
        return;
    fprintf(out,
            "  %.0f s, %" PRIu64 " mallocs (%.0f a second), %" PRIu64 " refused, %.1f GiB verified, %" PRIu64
            " mismatches\n",
            r->seconds, run_count(r, COUNT_mallocs), rate_of(r, r->seconds), run_count(r, COUNT_refused),
            gib(run_bytes_verified(r)), run_mismatches(r));
    fprintf(out, "  malloc, us: p50 %.1f, p99 %.1f, p99.9 %.1f, longest %.0f\n", run_latency_us(r, 0.5),
            run_latency_us(r, 0.99), run_latency_us(r, 0.999), run_longest_us(r));
    tell_longest(out, r);
    fputs("  the threads' time:", out);
#define SPENT(name, what) fprintf(out, " " what " %.1f %%,", 100 * run_spent(r, SPEND_##name));
    SPENDS(SPENT)
#undef SPENT
    fputs(" and the rest\n", out);
    fprintf(out, "  peak held %.2f GiB, peak in use %.2f GiB: %.3f\n", gib(r->peak_mapped), gib(r->peak_live),
            ratio(r->peak_mapped, r->peak_live));
    fprintf(out,
            "  %" PRIu64 " threads, %" PRIu64 " streams, %" PRIu64 " given to other threads, %" PRIu64
            " freed on another stream, %" PRIu64 " trims, %" PRIu64 " lower caps, %" PRIu64 " other pools%s\n",
            run_count(r, COUNT_threads), run_count(r, COUNT_streams), run_count(r, COUNT_taken),
            run_count(r, COUNT_crossed), r->trims, r->caps, r->pools, r->audit == AUDIT_PASSED ? ", audit passed" : "");
    if (r->options->faults)
        fprintf(out,
                "  refused on purpose: %" PRIu64 " driver calls, host memory %" PRIu64 " times, %" PRIu64
                " threads; and by them %" PRIu64 " of the program's calls\n",
                faults_made(NULL), host_memory_refused(), host_threads_refused(), run_count(r, COUNT_faulted));
    if (r->health_words[0])
        fprintf(out, "  health: %s\n", r->health_words);
}

/* ---- for programs ---- */

static void json_string(FILE *out, const char *key, const char *text)
{
    fprintf(out, "\"%s\": ", key);
    json_write_text(out, text);
}

/* null: nobody knows, or there is none. */
static void json_if(FILE *out, bool is_known, uint64_t number)
{
    if (is_known)
        fprintf(out, "%" PRIu64, number);
    else
        fputs("null", out);
}

static void json_longest(FILE *out, const run *r)
{
    fputs(",\n     \"longest_mallocs\": {", out);
    for (int i = 0; i < ANSWERS; i++) {
        const longest *l = &r->longest[i];
        fprintf(out, "%s\"%s\": ", i ? ", " : "", answer_words[i]);
        if (l->ns == 0) {
            fputs("null", out);
            continue;
        }
        fprintf(out, "{\"us\": %.2f, \"bytes\": %zu, ", (double)l->ns / 1e3, l->bytes);
        json_string(out, "pattern", l->pattern);
        fprintf(out, ", \"thread\": %u, \"at_seconds\": %.3f, \"cap_bytes\": ", l->thread, l->at);
        json_if(out, !r->is_async, l->cap); /* the driver's pool has no cap */
        fprintf(out, ", \"cap_lowered\": %s, \"beside\": [", l->lowered ? "true" : "false");
        const char *joint = "";
        for (int what = 0; what < DISTURBANCE_COUNT; what++)
            if (l->beside >> what & 1) {
                fputs(joint, out);
                json_write_text(out, disturbance_names[what]);
                joint = ", ";
            }
        fputs("]}", out);
    }
    fputc('}', out);
}

static void json_numbers(FILE *out, const run *r)
{
    fputs(",\n     \"operations\": {", out);
#define NUMBER(name, what) fprintf(out, "\"%s\": %" PRIu64 ", ", #name, run_count(r, COUNT_##name));
    COUNTS(NUMBER)
#undef NUMBER
    fprintf(out,
            "\"trims\": %" PRIu64 ", \"caps\": %" PRIu64 ", \"accesses\": %" PRIu64 ", \"looks\": %" PRIu64
            ", \"pools\": %" PRIu64 ", \"parks\": %" PRIu64 ", \"squeezes\": ",
            r->trims, r->caps, r->accesses, r->looks, r->pools, r->parks);
    json_if(out, !r->options->cuda, r->squeezes); /* another process counts its own */
    fputs("}", out);
    fputs(",\n     \"longest_disturbances_us\": {", out);
    for (int what = 0; what < DISTURBANCE_COUNT; what++)
        fprintf(out, "%s\"%s\": %.1f", what ? ", " : "", disturbance_names[what],
                (double)atomic_load(&r->longest_disturbance_ns[what]) / 1e3);
    fputc('}', out);
    fprintf(out,
            ",\n     \"mallocs_per_second\": %.1f, \"bytes_verified\": %" PRIu64 ", \"mismatches\": %" PRIu64
            ", \"races\": %" PRIu64 ", \"misuses\": %" PRIu64,
            rate_of(r, r->seconds), run_bytes_verified(r), run_mismatches(r), r->races, r->misuses);
    fprintf(out, ",\n     \"malloc_us\": {\"p50\": %.2f, \"p99\": %.2f, \"p99_9\": %.2f, \"longest\": %.2f}",
            run_latency_us(r, 0.5), run_latency_us(r, 0.99), run_latency_us(r, 0.999), run_longest_us(r));
    json_longest(out, r);
    fputs(",\n     \"threads_time\": {", out);
    const char *comma = "";
#define SPENT(name, what) fprintf(out, "%s\"%s\": %.4f", comma, #name, run_spent(r, SPEND_##name)), comma = ", ";
    SPENDS(SPENT)
#undef SPENT
    fputc('}', out);
    static const char *const audit[] = {"null", "true", "false"};
    fprintf(out,
            ",\n     \"peak_mapped_bytes\": %" PRIu64 ", \"peak_in_use_bytes\": %" PRIu64 ", \"held\": %.4f"
            ", \"audit\": %s",
            (uint64_t)r->peak_mapped, (uint64_t)r->peak_live, ratio(r->peak_mapped, r->peak_live), audit[r->audit]);
    fputs(",\n     \"sequences\": [", out);
    for (unsigned i = 0; r->lanes && i < r->options->threads; i++)
        fprintf(out, "%s\"%016" PRIx64 "\"", i ? ", " : "", (uint64_t)atomic_load(&r->lanes[i].digest));
    fputc(']', out);
}

/* The highest of each half of the time. */
static void json_resources(FILE *out, const resources *used)
{
    fputs(",\n     \"resources\": [", out);
    for (int i = 0; i < 2; i++)
        fprintf(out, "%s{\"resident_bytes\": %" PRIu64 ", \"descriptors\": %" PRIu64 ", \"threads\": %" PRIu64 "}",
                i ? ", " : "", used->half[i].resident_bytes, used->half[i].descriptors, used->half[i].threads);
    fputc(']', out);
}

static void json_pool(FILE *out, const run *r)
{
    const char *comma = "";
    if (r->is_async)
        return;
    fputs(",\n     \"paths\": {", out);
#define PATH(name, value) fprintf(out, "%s\"" #name "\": %" PRIu64, comma, (uint64_t)(value)), comma = ", ";
    PATHS(PATH)
    UNWINDINGS(PATH)
#undef PATH
    fputs("},\n     \"refused_on_purpose\": {", out);
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        fprintf(out, "\"%s\": %" PRIu64 ", ", refused[i], faults_made(refused[i]));
    fprintf(out, "\"host_memory\": %" PRIu64 ", \"threads\": %" PRIu64, host_memory_refused(), host_threads_refused());
    fputs("},\n     \"stats\": {", out);
    comma = "";
#define STAT(name, kind, help) fprintf(out, "%s\"" #name "\": %" PRIu64, comma, r->stats.name), comma = ", ";
    VPMM_STATS(STAT)
#undef STAT
    fputs("},\n     \"driver_calls\": {", out);
    comma = "";
    for (size_t i = 0; i < VPMM_DRIVER_CALLS; i++)
        if (r->calls[i].made != 0)
            fprintf(out, "%s\"%s\": %" PRIu64, comma, r->calls[i].call, r->calls[i].made), comma = ", ";
    fputc('}', out);
}

static void json_run(FILE *out, const run *r)
{
    int outcome = atomic_load(&r->outcome);
    fprintf(out, "    {\"device\": %d, ", r->ordinal);
    json_string(out, "name", r->name);
    fputs(", ", out);
    json_string(out, "uuid", r->uuid);
    fprintf(out, ", \"memory_bytes\": %zu, \"allocator\": \"%s\", ", r->memory_bytes, allocator_of(r));
    json_string(out, "outcome", outcome_word(outcome));
    fprintf(out, ", \"exit\": %d, ", outcome);
    json_string(out, "message", r->message);
    fputs(", ", out);
    json_string(out, "finding", r->finding);
    fputs(", ", out);
    json_string(out, "health", r->health_words);
    fprintf(out, ", \"seconds\": %.2f", r->seconds);
    json_numbers(out, r);
    json_resources(out, &r->resources);
    json_pool(out, r);
    fputc('}', out);
}

static void json_options(FILE *out, const options *o)
{
    static const char *const verify[] = {"full", "edges", "off"};
    fprintf(out,
            "  \"options\": {\"driver\": \"%s\", \"seconds\": %.1f, \"threads\": %u, \"streams\": %u, \"fraction\": "
            "%.4f, \"seed\": %" PRIu64 ", \"verify\": \"%s\", \"faults\": %s, \"plant\": \"%s\", \"patterns\": [",
            o->cuda ? "cuda" : "sim", o->seconds, o->threads, o->streams, o->fraction, o->seed, verify[o->verify],
            o->faults ? "true" : "false", plant_names[o->plant]);
    const char *comma = "";
    for (unsigned i = 0; i < PATTERN_COUNT; i++)
        if (o->patterns >> i & 1) {
            fprintf(out, "%s\"%s\"", comma, patterns[i].name);
            comma = ", ";
        }
    fputs("]},\n", out);
}

void report_json(FILE *out, const options *o, const run *all, unsigned runs, int outcome, bool cut_short,
                 const char *why_none)
{
    fprintf(out,
            "{\"format\": \"vpmm-stress\", \"version\": %d, \"vpmm\": \"%s\", \"cuda\": %d, \"driver_version\": %d,\n",
            JSON_VERSION, VPMM_VERSION, CUDA_VERSION, all ? all[0].driver_version : 0);
    json_options(out, o);
    fputs("  ", out);
    json_string(out, "outcome", outcome_word(outcome));
    if (why_none[0]) {
        fputs(", ", out);
        json_string(out, "reason", why_none);
    }
    fprintf(out, ", \"exit\": %d, \"cut_short\": %s,\n  \"results\": [\n", outcome, cut_short ? "true" : "false");
    for (unsigned i = 0; i < runs; i++) {
        fputs(i ? ",\n" : "", out);
        json_run(out, &all[i]);
    }
    fputs("\n  ]}\n", out);
}
