#include "metrics.h"

#include <stddef.h>
#include <string.h>

/* What is written, where to, and {device="0",pool="name" of each pool, which every sample of it repeats. */
struct writer {
    const struct metrics *metrics;
    struct text *text;
    struct text labels;
    size_t labels_of[VPMM_EXPORTER_POOLS + 1]; /* where each begins; the last: where all end */
};

/* ---- families and samples ---- */

enum type { GAUGE, COUNTER, HISTOGRAM, INFO };

/* `name` is without a counter's _total and an info metric's _info. `by`: the label that tells its samples apart. */
static void family(const struct writer *w, const char *name, enum type type, const char *help, const char *by)
{
    static const char *const type_name[] = {"gauge", "counter", "histogram", "info"};
    static const char *const suffix[] = {"", "_total", "", "_info"};
    bool openmetrics = w->metrics->openmetrics;
    const char *end = openmetrics ? "" : suffix[type]; /* OpenMetrics names the family, 0.0.4 the sample */
    text_string(w->text, "# HELP ");
    text_string(w->text, name);
    text_string(w->text, end);
    text_string(w->text, " ");
    text_string(w->text, help);
    if (by) {
        text_string(w->text, ", by ");
        text_string(w->text, by);
    }
    text_string(w->text, "\n# TYPE ");
    text_string(w->text, name);
    text_string(w->text, end);
    text_string(w->text, " ");
    text_string(w->text, type == INFO && !openmetrics ? "gauge" : type_name[type]);
    text_string(w->text, "\n");
}

static void label(struct text *text, const char *name, const char *value)
{
    text_string(text, name);
    text_string(text, "=\"");
    text_label(text, value);
    text_string(text, "\"");
}

static void pool_labels(const struct writer *w, unsigned pool)
{
    text_append(w->text, w->labels.bytes + w->labels_of[pool], w->labels_of[pool + 1] - w->labels_of[pool]);
}

/* A sample's name and labels, up to its number. `by` NULL: no label but the pool's. */
static void sample_of(const struct writer *w, const char *name, const char *suffix, unsigned pool, const char *by,
                      const char *value)
{
    text_string(w->text, name);
    text_string(w->text, suffix);
    pool_labels(w, pool);
    if (by) {
        text_string(w->text, ",");
        label(w->text, by, value);
    }
    text_string(w->text, "} ");
}

static void number(const struct writer *w, uint64_t value)
{
    text_u64(w->text, value);
    text_string(w->text, "\n");
}

static void seconds(const struct writer *w, uint64_t ns)
{
    text_seconds(w->text, ns);
    text_string(w->text, "\n");
}

static void make_labels(struct writer *w)
{
    for (unsigned i = 0; i < w->metrics->pools; i++) {
        w->labels_of[i] = w->labels.used;
        text_string(&w->labels, "{device=\"");
        text_u64(&w->labels, (uint64_t)w->metrics->pool[i].device.ordinal);
        text_string(&w->labels, "\",");
        label(&w->labels, "pool", w->metrics->pool[i].name);
    }
    w->labels_of[w->metrics->pools] = w->labels.used;
}

/* ---- the table of statistics ---- */

enum kind { KIND_GAUGE, KIND_COUNTER, KIND_SUM, KIND_PART, KIND_COUNTER_PART };

struct row {
    const char *name, *metric, *help;
    size_t offset; /* in vpmm_stats */
    enum kind kind;
    const char *label;       /* of a sum */
    const char *sum, *value; /* of a part */
};

#define ROW_gauge                       KIND_GAUGE, NULL, NULL, NULL
#define ROW_counter                     KIND_COUNTER, NULL, NULL, NULL
#define ROW_counter_by(label)           KIND_SUM, #label, NULL, NULL
#define ROW_part_of(sum, value)         KIND_PART, NULL, #sum, #value
#define ROW_counter_part_of(sum, value) KIND_COUNTER_PART, NULL, #sum, #value
#define ROW(name, kind, help)           {#name, "vpmm_" #name, help, offsetof(vpmm_stats, name), ROW_##kind},

static const struct row rows[] = {VPMM_STATS(ROW)};
enum { ROWS = sizeof rows / sizeof *rows };

static uint64_t value_of(const struct row *row, const struct snapshot *pool)
{
    uint64_t value;
    memcpy(&value, (const char *)&pool->stats + row->offset, sizeof value);
    return value;
}

static void write_plain(const struct writer *w, const struct row *row)
{
    bool gauge = row->kind == KIND_GAUGE;
    family(w, row->metric, gauge ? GAUGE : COUNTER, row->help, NULL);
    for (unsigned i = 0; i < w->metrics->pools; i++) {
        sample_of(w, row->metric, gauge ? "" : "_total", i, NULL, NULL);
        number(w, value_of(row, &w->metrics->pool[i]));
    }
}

/* false: the sum has no parts in the table. */
static bool write_parts(const struct writer *w, const struct row *sum)
{
    bool any = false;
    for (const struct row *part = rows; part < rows + ROWS; part++) {
        if (!part->sum || strcmp(part->sum, sum->name) != 0)
            continue;
        any = true;
        for (unsigned i = 0; i < w->metrics->pools; i++) {
            sample_of(w, sum->metric, "_total", i, sum->label, part->value);
            number(w, value_of(part, &w->metrics->pool[i]));
        }
    }
    return any;
}

/* The parts of driver_calls and driver_errors are the driver's entries. */
static void write_calls(const struct writer *w, const struct row *sum)
{
    bool errors = !strcmp(sum->name, "driver_errors");
    for (unsigned i = 0; i < w->metrics->pools; i++)
        for (unsigned entry = 0; entry < VPMM_DRIVER_CALLS; entry++) {
            const vpmm_call_counts *counts = &w->metrics->pool[i].calls[entry];
            sample_of(w, sum->metric, "_total", i, sum->label, counts->call);
            number(w, errors ? counts->failed : counts->made);
        }
}

static void write_stats(const struct writer *w)
{
    for (const struct row *row = rows; row < rows + ROWS; row++) {
        if (row->kind == KIND_SUM) {
            family(w, row->metric, COUNTER, row->help, row->label);
            if (!write_parts(w, row))
                write_calls(w, row);
        } else if (row->kind != KIND_PART) {
            write_plain(w, row);
        }
    }
}

/* ---- what else a pool says ---- */

static void write_histogram(const struct writer *w, const char *name, unsigned pool)
{
    const vpmm_latency *latency = &w->metrics->pool[pool].latency;
    uint64_t count = 0;
    for (unsigned i = 0; i < VPMM_LATENCY_BUCKETS; i++) {
        count += latency->count[i];
        text_string(w->text, name);
        text_string(w->text, "_bucket");
        pool_labels(w, pool);
        text_string(w->text, ",le=\"");
        if (i == VPMM_LATENCY_BUCKETS - 1)
            text_string(w->text, "+Inf");
        else
            text_seconds(w->text, (uint64_t)1000 << i);
        text_string(w->text, "\"} ");
        number(w, count);
    }
    sample_of(w, name, "_sum", pool, NULL, NULL);
    seconds(w, latency->sum_ns);
    sample_of(w, name, "_count", pool, NULL, NULL);
    number(w, count);
}

static void write_latency(const struct writer *w)
{
    static const char name[] = "vpmm_malloc_duration_seconds";
    family(w, name, HISTOGRAM,
           "time of mallocs that needed pages, found no passed free memory at once and so asked the driver, waited or "
           "built; others are not timed",
           NULL);
    for (unsigned i = 0; i < w->metrics->pools; i++)
        write_histogram(w, name, i);
}

static void write_reaper_age(const struct writer *w)
{
    static const char name[] = "vpmm_reaper_age_seconds";
    family(w, name, GAUGE, "since the latest pass of the reaper or of vpmm_poll; 0 while nothing is pending", NULL);
    for (unsigned i = 0; i < w->metrics->pools; i++) {
        sample_of(w, name, "", i, NULL, NULL);
        seconds(w, w->metrics->pool[i].health.reaper_age_ns);
    }
}

enum setting { SETTING_LOST, SETTING_MEMORY, SETTING_PAGE, SETTING_CAP, SETTINGS };

static uint64_t setting_of(const struct snapshot *pool, enum setting setting)
{
    switch (setting) {
    case SETTING_LOST:
        return pool->health.lost;
    case SETTING_MEMORY:
        return pool->device.memory_bytes;
    case SETTING_PAGE:
        return pool->device.page_size;
    default:
        return pool->device.max_mapped;
    }
}

static void write_settings(const struct writer *w)
{
    static const char *const name[SETTINGS] = {"vpmm_driver_lost", "vpmm_device_memory_bytes", "vpmm_page_bytes",
                                               "vpmm_max_mapped_bytes"};
    static const char *const help[SETTINGS] = {
        "1: the driver has failed for good, every call that needs it answers VPMM_ERROR_DRIVER",
        "memory of the pool's device",
        "the pool's page",
        "the pool's cap on mapped and quarantined bytes; 0: none",
    };
    for (enum setting setting = 0; setting < SETTINGS; setting++) {
        family(w, name[setting], GAUGE, help[setting], NULL);
        for (unsigned i = 0; i < w->metrics->pools; i++) {
            sample_of(w, name[setting], "", i, NULL, NULL);
            number(w, setting_of(&w->metrics->pool[i], setting));
        }
    }
}

/* A device is told once, however many pools it has. */
static bool is_told(const struct metrics *metrics, unsigned pool)
{
    const vpmm_device *device = &metrics->pool[pool].device;
    for (unsigned i = 0; i < pool; i++)
        if (metrics->pool[i].device.ordinal == device->ordinal && !strcmp(metrics->pool[i].device.uuid, device->uuid) &&
            !strcmp(metrics->pool[i].device.name, device->name))
            return true;
    return false;
}

static void write_devices(const struct writer *w)
{
    family(w, "vpmm_device", INFO, "the devices that pools are on", NULL);
    for (unsigned i = 0; i < w->metrics->pools; i++) {
        const vpmm_device *device = &w->metrics->pool[i].device;
        if (is_told(w->metrics, i))
            continue;
        text_string(w->text, "vpmm_device_info{device=\"");
        text_u64(w->text, (uint64_t)device->ordinal);
        text_string(w->text, "\",");
        label(w->text, "name", device->name);
        text_string(w->text, ",");
        label(w->text, "uuid", device->uuid);
        text_string(w->text, "} 1\n");
    }
}

/* ---- the process and the exporter ---- */

static void write_build(const struct writer *w)
{
    family(w, "vpmm_build", INFO, "the version of vpmm, and the CUDA_VERSION of the cuda.h that it was built with",
           NULL);
    text_string(w->text, "vpmm_build_info{version=\"" VPMM_VERSION "\",cuda=\"");
    text_u64(w->text, CUDA_VERSION);
    text_string(w->text, "\"} 1\n");
}

static void one(const struct writer *w, const char *name, enum type type, const char *help)
{
    family(w, name, type, help, NULL);
    text_string(w->text, name);
    text_string(w->text, type == COUNTER ? "_total " : " ");
}

static void write_self(const struct writer *w)
{
    const struct self_usage *self = &w->metrics->self;
    one(w, "process_cpu_seconds", COUNTER, "user and system time of the process");
    seconds(w, self->cpu_ns);
    one(w, "process_resident_memory_bytes", GAUGE, "resident memory of the process");
    number(w, self->resident_bytes);
    one(w, "process_virtual_memory_bytes", GAUGE, "virtual memory of the process");
    number(w, self->virtual_bytes);
    one(w, "process_open_fds", GAUGE, "open file descriptors of the process");
    number(w, self->open_fds);
    one(w, "process_max_fds", GAUGE, "the limit of open file descriptors");
    number(w, self->max_fds);
    one(w, "process_start_time_seconds", GAUGE, "start of the process since the epoch");
    seconds(w, self->start_ns);
}

static void write_exporter(const struct writer *w)
{
#define REASON(reason) #reason,
    static const char *const reason[] = {METRICS_REFUSALS(REASON)};
#undef REASON
    const struct metrics_exporter *exporter = &w->metrics->exporter;
    one(w, "vpmm_exporter_scrapes", COUNTER, "scrapes begun, this one included");
    number(w, exporter->scrapes);
    one(w, "vpmm_exporter_cpu_seconds", COUNTER, "time of the exporter's thread");
    seconds(w, exporter->cpu_ns);
    family(w, "vpmm_exporter_refusals", COUNTER, "connections ended and requests refused", "reason");
    for (unsigned i = 0; i < REFUSALS; i++) {
        text_string(w->text, "vpmm_exporter_refusals_total{");
        label(w->text, "reason", reason[i]);
        text_string(w->text, "} ");
        number(w, exporter->refusals[i]);
    }
}

void metrics_write(const struct metrics *metrics, struct text *text)
{
    struct writer w = {.metrics = metrics, .text = text, .labels = {.bound = METRICS_BYTES}};
    text_clear(text);
    make_labels(&w);
    write_stats(&w);
    write_latency(&w);
    write_reaper_age(&w);
    write_settings(&w);
    write_devices(&w);
    write_build(&w);
    write_self(&w);
    write_exporter(&w);
    if (metrics->openmetrics)
        text_string(text, "# EOF\n");
    text->cut |= w.labels.cut;
    text_free(&w.labels);
}
