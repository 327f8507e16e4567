#include "pool/config.h"

#include "base/status.h"
#include "remap/decay.h"
#include "space/units.h"

#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)
#define GIB ((size_t)1 << 30)
#define TIB ((size_t)1 << 40)

/* --- the settings ----------------------------------------------------------------------------------------------- */

enum kind {
    KIND_DEVICE, /* int, an ordinal */
    KIND_COUNT,  /* size_t, a plain number */
    KIND_SIZE,   /* size_t, bytes with a unit */
    KIND_CAP,    /* the same, or a share: max_mapped or max_mapped_percent */
    KIND_WORD,   /* an enumeration, by word */
    KIND_SWITCH, /* bool, by word */
    KIND_DECAY,  /* uint64_t, milliseconds or never */
};

struct word {
    const char *text;
    int value;
};

struct setting {
    const char *variable;
    const char *field;
    enum kind kind;
    size_t offset;
    const char *allowed;
    const struct word *words; /* ends with a NULL text */
};

static const struct word small_words[] = {{"slab", VPMM_SMALL_SLAB}, {"async", VPMM_SMALL_ASYNC}, {NULL, 0}};
static const struct word reuse_words[] = {
    {"device", VPMM_REUSE_WAIT_DEVICE}, {"completed", VPMM_REUSE_COMPLETED}, {"host", VPMM_REUSE_WAIT_HOST}, {NULL, 0}};
static const struct word streams_words[] = {
    {"checked", VPMM_STREAMS_CHECKED}, {"trusted", VPMM_STREAMS_TRUSTED}, {"eager", VPMM_STREAMS_EAGER}, {NULL, 0}};
static const struct word switch_words[] = {{"1", true},    {"0", false},   {"on", true},
                                           {"off", false}, {"true", true}, {"false", false},
                                           {"yes", true},  {"no", false},  {NULL, 0}};

#define ALLOWED_DEVICE "a device ordinal, 0 to 2147483647"
#define ALLOWED_COUNT  "a decimal number"
#define ALLOWED_SIZE   "decimal bytes, or a decimal number followed by K, M, G or T, below 16777216T"
#define ALLOWED_CAP    "decimal bytes, or a decimal number followed by K, M, G or T, below 16777216T, or 1% to 100%"
#define ALLOWED_SWITCH "1, on, true, yes, 0, off, false or no"
#define ALLOWED_DECAY  "milliseconds, a decimal number up to 1000000000, or never"

enum setting_index {
    SETTING_DEVICE,
    SETTING_PAGE_SIZE,
    SETTING_VA_SIZE,
    SETTING_INITIAL_PAGES,
    SETTING_EXTENT_SIZE,
    SETTING_MAX_MAPPED,
    SETTING_CACHE_BYTES,
    SETTING_SMALL,
    SETTING_REUSE,
    SETTING_STREAMS,
    SETTING_REAPER,
    SETTING_EXPORTABLE,
    SETTING_RDMA,
    SETTING_RELEASE_THRESHOLD,
    SETTING_CAPTURES,
    SETTING_DECAY_MS,
    SETTINGS,
};

#define SETTING(name, kind_, variable_, allowed_, words_)                                                              \
    {                                                                                                                  \
        .variable = (variable_), .field = #name, .kind = (kind_), .offset = offsetof(vpmm_config, name),               \
        .allowed = (allowed_), .words = (words_)                                                                       \
    }
static const struct setting settings[SETTINGS] = {
    [SETTING_DEVICE] = SETTING(device, KIND_DEVICE, "VPMM_DEVICE", ALLOWED_DEVICE, NULL),
    [SETTING_PAGE_SIZE] = SETTING(page_size, KIND_SIZE, "VPMM_PAGE_SIZE", ALLOWED_SIZE, NULL),
    [SETTING_VA_SIZE] = SETTING(va_size, KIND_SIZE, "VPMM_VA_SIZE", ALLOWED_SIZE, NULL),
    [SETTING_INITIAL_PAGES] = SETTING(initial_pages, KIND_COUNT, "VPMM_PAGES", ALLOWED_COUNT, NULL),
    [SETTING_EXTENT_SIZE] = SETTING(extent_size, KIND_SIZE, "VPMM_EXTENT_SIZE", ALLOWED_SIZE, NULL),
    [SETTING_MAX_MAPPED] = SETTING(max_mapped, KIND_CAP, "VPMM_MAX_MAPPED", ALLOWED_CAP, NULL),
    [SETTING_CACHE_BYTES] = SETTING(cache_bytes, KIND_SIZE, "VPMM_CACHE_BYTES", ALLOWED_SIZE, NULL),
    [SETTING_SMALL] = SETTING(small, KIND_WORD, "VPMM_SMALL", "slab or async", small_words),
    [SETTING_REUSE] = SETTING(reuse, KIND_WORD, "VPMM_REUSE", "device, completed or host", reuse_words),
    [SETTING_STREAMS] = SETTING(streams, KIND_WORD, "VPMM_STREAMS", "checked, trusted or eager", streams_words),
    [SETTING_REAPER] = SETTING(reaper, KIND_SWITCH, "VPMM_REAPER", ALLOWED_SWITCH, switch_words),
    [SETTING_EXPORTABLE] = SETTING(exportable, KIND_SWITCH, "VPMM_EXPORTABLE", ALLOWED_SWITCH, switch_words),
    [SETTING_RDMA] = SETTING(rdma, KIND_SWITCH, "VPMM_RDMA", ALLOWED_SWITCH, switch_words),
    [SETTING_RELEASE_THRESHOLD] = SETTING(release_threshold, KIND_SIZE, "VPMM_RELEASE_THRESHOLD", ALLOWED_SIZE, NULL),
    [SETTING_CAPTURES] = SETTING(captures, KIND_SWITCH, "VPMM_CAPTURES", ALLOWED_SWITCH, switch_words),
    [SETTING_DECAY_MS] = SETTING(decay_ms, KIND_DECAY, "VPMM_DECAY_MS", ALLOWED_DECAY, NULL),
};

vpmm_config vpmm_config_default(void)
{
    return (vpmm_config){
        .va_size = 8 * TIB,
        .cache_bytes = 4 * GIB,
        .small = VPMM_SMALL_SLAB,
        .reuse = VPMM_REUSE_WAIT_DEVICE,
        .streams = VPMM_STREAMS_CHECKED,
        .reaper = true,
        .exportable = true,
        .rdma = false, /* see mapping.h */
        .release_threshold = 0,
        .decay_ms = 10000,
        .captures = false,
    };
}

/* --- from text -------------------------------------------------------------------------------------------------- */

/* Digits alone, at least one, at most UINT64_MAX. The first character after them, or NULL. */
static const char *parse_digits(const char *text, uint64_t *value)
{
    const char *c = text;
    uint64_t sum = 0;
    for (; *c >= '0' && *c <= '9'; c++) {
        unsigned digit = (unsigned)(*c - '0');
        if (sum > (UINT64_MAX - digit) / 10)
            return NULL;
        sum = sum * 10 + digit;
    }
    *value = sum;
    return c == text ? NULL : c;
}

static bool parse_number(const char *text, uint64_t max, uint64_t *value)
{
    const char *end = parse_digits(text, value);
    return end && *end == '\0' && *value <= max;
}

/* 0 for a letter that is no unit. */
static size_t unit_of(char letter)
{
    switch (letter) {
    case 'K':
        return KIB;
    case 'M':
        return MIB;
    case 'G':
        return GIB;
    case 'T':
        return TIB;
    default:
        return 0;
    }
}

static bool parse_size(const char *text, uint64_t *value)
{
    const char *end = parse_digits(text, value);
    if (!end)
        return false;
    if (*end == '\0')
        return *value <= SIZE_MAX;
    size_t unit = unit_of(*end);
    if (unit == 0 || end[1] != '\0' || *value > SIZE_MAX / unit)
        return false;
    *value *= unit;
    return true;
}

static bool parse_cap(const char *text, vpmm_config *config)
{
    uint64_t value = 0;
    const char *end = parse_digits(text, &value);
    bool is_share = end && strcmp(end, "%") == 0;
    if (is_share ? value < 1 || value > 100 : !parse_size(text, &value))
        return false;
    config->max_mapped = is_share ? 0 : (size_t)value;
    config->max_mapped_percent = is_share ? (unsigned)value : 0;
    return true;
}

static bool parse_word(const struct word *words, const char *text, int *value)
{
    for (; words->text; words++) {
        if (strcmp(words->text, text) == 0) {
            *value = words->value;
            return true;
        }
    }
    return false;
}

static bool parse_decay(const char *text, uint64_t *value)
{
    if (strcmp(text, "never") != 0)
        return parse_number(text, DECAY_MS_MAX, value);
    *value = VPMM_DECAY_NEVER;
    return true;
}

static bool parse(const struct setting *setting, const char *text, vpmm_config *config)
{
    void *field = (char *)config + setting->offset;
    uint64_t number = 0;
    int word = 0;
    switch (setting->kind) {
    case KIND_DEVICE:
        if (!parse_number(text, INT_MAX, &number))
            return false;
        *(int *)field = (int)number;
        return true;
    case KIND_COUNT:
        if (!parse_number(text, SIZE_MAX, &number))
            return false;
        *(size_t *)field = (size_t)number;
        return true;
    case KIND_SIZE:
        if (!parse_size(text, &number))
            return false;
        *(size_t *)field = (size_t)number;
        return true;
    case KIND_CAP:
        return parse_cap(text, config);
    case KIND_WORD:
        if (!parse_word(setting->words, text, &word))
            return false;
        memcpy(field, &word, sizeof(word)); /* each enumeration is as wide as an int: see the assertions below */
        return true;
    case KIND_SWITCH:
        if (!parse_word(setting->words, text, &word))
            return false;
        *(bool *)field = word != 0;
        return true;
    case KIND_DECAY:
        return parse_decay(text, field);
    }
    return false;
}

_Static_assert(sizeof(vpmm_small) == sizeof(int), "parse() writes an int");
_Static_assert(sizeof(vpmm_reuse) == sizeof(int), "parse() writes an int");
_Static_assert(sizeof(vpmm_streams) == sizeof(int), "parse() writes an int");

vpmm_status vpmm_config_from_env(vpmm_config *config)
{
    if (!config)
        return fail(VPMM_ERROR_INVALID_VALUE, "vpmm_config_from_env: config is NULL");
    vpmm_config result = *config;
    for (size_t i = 0; i < SETTINGS; i++) {
        const char *text = getenv(settings[i].variable);
        if (text && *text && !parse(&settings[i], text, &result))
            return fail(VPMM_ERROR_INVALID_VALUE, "%s is \"%.100s\"; allowed: %s", settings[i].variable, text,
                        settings[i].allowed);
    }
    *config = result;
    return VPMM_SUCCESS;
}

/* --- the check of the whole ------------------------------------------------------------------------------------- */

__attribute__((format(printf, 3, 4))) static vpmm_status refuse(enum setting_index index, size_t value,
                                                                const char *allowed, ...)
{
    char words[200];
    va_list arguments;
    va_start(arguments, allowed);
    vsnprintf(words, sizeof(words), allowed, arguments);
    va_end(arguments);
    return fail(VPMM_ERROR_INVALID_VALUE, "%s (%s) is %zu; allowed: %s", settings[index].field,
                settings[index].variable, value, words);
}

static vpmm_status check_page_size(size_t page, size_t granularity)
{
    size_t least = granularity < CONFIG_LEAST_PAGE ? granularity : CONFIG_LEAST_PAGE;
    bool power_of_two = page != 0 && (page & (page - 1)) == 0;
    if (power_of_two && page >= least)
        return VPMM_SUCCESS;
    return refuse(SETTING_PAGE_SIZE, page,
                  "a power of two, at least %zu (the device's granularity is %zu), or 0 for the granularity", least,
                  granularity);
}

size_t config_mapped_unit(size_t page, size_t granularity)
{
    return page > granularity ? page : granularity;
}

static vpmm_status check_va_size(const vpmm_config *config, size_t page, size_t granularity)
{
    size_t pages = config->va_size / page, unit = config_mapped_unit(page, granularity);
    if (config->va_size % unit == 0 && pages >= 1 && pages <= UNITS_A_CHUNK_MAX)
        return VPMM_SUCCESS;
    return refuse(SETTING_VA_SIZE, config->va_size, "a multiple of %zu, of 1 to %llu pages of %zu", unit,
                  (unsigned long long)UNITS_A_CHUNK_MAX, page);
}

/* After check_va_size: va_size bounds the product, which so cannot overflow. */
static vpmm_status check_initial_pages(const vpmm_config *config, size_t page, size_t granularity)
{
    size_t most = config->va_size / page, unit = config_mapped_unit(page, granularity);
    const char *bound = "va_size";
    size_t bound_bytes = config->va_size;
    size_t within_cap = config->max_mapped / unit * (unit / page);
    if (config->max_mapped != 0 && within_cap < most) {
        most = within_cap;
        bound = "max_mapped";
        bound_bytes = config->max_mapped;
    }
    if (config->initial_pages <= most)
        return VPMM_SUCCESS;
    return refuse(SETTING_INITIAL_PAGES, config->initial_pages, "at most %zu: pages of %zu bytes within %s, %zu", most,
                  page, bound, bound_bytes);
}

/* Below a page, or the granularity, nothing can be mapped: a unit was forgotten. */
static vpmm_status check_max_mapped(const vpmm_config *config, size_t page, size_t granularity)
{
    size_t least = config_mapped_unit(page, granularity);
    if (!config->max_mapped || config->max_mapped >= least)
        return VPMM_SUCCESS;
    return refuse(SETTING_MAX_MAPPED, config->max_mapped,
                  "0 for no cap, or bytes, at least a page and the granularity, %zu", least);
}

static vpmm_status check_share(const vpmm_config *config)
{
    if (config->max_mapped_percent <= 100)
        return VPMM_SUCCESS;
    return fail(VPMM_ERROR_INVALID_VALUE, "max_mapped_percent (%s) is %u; allowed: 0 for no cap, or 1 to 100",
                settings[SETTING_MAX_MAPPED].variable, config->max_mapped_percent);
}

void config_cap_by_share(vpmm_config *config, size_t device_bytes)
{
    size_t share = (size_t)((double)device_bytes * config->max_mapped_percent / 100);
    if (config->max_mapped_percent && (!config->max_mapped || share < config->max_mapped))
        config->max_mapped = share;
}

static vpmm_status check_extent_size(const vpmm_config *config, size_t page, size_t granularity)
{
    size_t unit = config_mapped_unit(page, granularity);
    if (config->extent_size % unit == 0)
        return VPMM_SUCCESS;
    return refuse(SETTING_EXTENT_SIZE, config->extent_size, "0, or a multiple of %zu", unit);
}

static vpmm_status check_word(enum setting_index index, int value)
{
    const struct setting *setting = &settings[index];
    for (const struct word *word = setting->words; word->text; word++) {
        if (word->value == value)
            return VPMM_SUCCESS;
    }
    return fail(VPMM_ERROR_INVALID_VALUE, "%s (%s) is %d; allowed: %s", setting->field, setting->variable, value,
                setting->allowed);
}

static vpmm_status check_words(const vpmm_config *config)
{
    vpmm_status status = check_word(SETTING_SMALL, (int)config->small);
    if (!status)
        status = check_word(SETTING_REUSE, (int)config->reuse);
    if (!status)
        status = check_word(SETTING_STREAMS, (int)config->streams);
    return status;
}

static vpmm_status check_decay(const vpmm_config *config)
{
    if (config->decay_ms <= DECAY_MS_MAX || config->decay_ms == VPMM_DECAY_NEVER)
        return VPMM_SUCCESS;
    return refuse(SETTING_DECAY_MS, config->decay_ms, "0 to %llu, or VPMM_DECAY_NEVER (%s=never)",
                  (unsigned long long)DECAY_MS_MAX, settings[SETTING_DECAY_MS].variable);
}

static vpmm_status check_capture_gate(const vpmm_config *config)
{
    const vpmm_capture_gate *gate = &config->capture_gate;
    if (!gate->enter == !gate->leave)
        return VPMM_SUCCESS;
    return fail(VPMM_ERROR_INVALID_VALUE, "capture_gate has no `%s`; allowed: both functions, or neither",
                gate->enter ? "leave" : "enter");
}

vpmm_status config_check(const vpmm_config *config, size_t granularity)
{
    size_t page = config->page_size ? config->page_size : granularity;
    vpmm_status status = check_page_size(page, granularity);
    if (!status)
        status = check_va_size(config, page, granularity);
    if (!status)
        status = check_share(config);
    if (!status)
        status = check_max_mapped(config, page, granularity);
    if (!status)
        status = check_initial_pages(config, page, granularity);
    if (!status)
        status = check_extent_size(config, page, granularity);
    if (!status)
        status = check_words(config);
    if (!status)
        status = check_decay(config);
    if (!status)
        status = check_capture_gate(config);
    return status;
}
