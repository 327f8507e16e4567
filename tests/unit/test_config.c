#include <criterion/criterion.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include <vpmm/vpmm.h>

#include "pool/config.h"
#include "space/units.h"

#define MIB         ((size_t)1 << 20)
#define GIB         ((size_t)1 << 30)
#define TIB         ((size_t)1 << 40)
#define GRANULARITY (2 * MIB)

static const char *const variables[] = {
    "VPMM_DEVICE",      "VPMM_PAGE_SIZE",         "VPMM_VA_SIZE",     "VPMM_PAGES",
    "VPMM_EXTENT_SIZE", "VPMM_MAX_MAPPED",        "VPMM_CACHE_BYTES", "VPMM_SMALL",
    "VPMM_REUSE",       "VPMM_STREAMS",           "VPMM_REAPER",      "VPMM_EXPORTABLE",
    "VPMM_RDMA",        "VPMM_RELEASE_THRESHOLD", "VPMM_DECAY_MS",    "VPMM_CAPTURES"};
#define VARIABLES (sizeof(variables) / sizeof(variables[0]))

static void clear_environment(void)
{
    for (size_t i = 0; i < VARIABLES; i++)
        unsetenv(variables[i]);
}

TestSuite(config, .init = clear_environment);

/* Field by field: padding is nobody's. */
static bool same(const vpmm_config *a, const vpmm_config *b)
{
    return a->driver == b->driver && a->device == b->device && a->page_size == b->page_size &&
           a->va_size == b->va_size && a->initial_pages == b->initial_pages && a->extent_size == b->extent_size &&
           a->max_mapped == b->max_mapped && a->max_mapped_percent == b->max_mapped_percent &&
           a->cache_bytes == b->cache_bytes && a->small == b->small && a->reuse == b->reuse &&
           a->streams == b->streams && a->reaper == b->reaper && a->exportable == b->exportable && a->rdma == b->rdma &&
           a->release_threshold == b->release_threshold && a->decay_ms == b->decay_ms && a->captures == b->captures &&
           a->graph == b->graph;
}

/* The configuration that one variable makes of the defaults. */
static vpmm_config with(const char *variable, const char *value)
{
    vpmm_config config = vpmm_config_default();
    setenv(variable, value, 1);
    vpmm_status status = vpmm_config_from_env(&config);
    cr_assert_eq(status, VPMM_SUCCESS, "%s=%s: %s", variable, value, vpmm_last_error());
    unsetenv(variable);
    return config;
}

/* One variable's value is refused: the message has its name, its value and what is allowed; nothing has changed. */
static void refuses(const char *variable, const char *value, const char *allowed)
{
    vpmm_config config = vpmm_config_default();
    vpmm_config before = config;
    char quoted[300];
    snprintf(quoted, sizeof(quoted), "\"%.100s\"", value);
    setenv(variable, value, 1);
    vpmm_status status = vpmm_config_from_env(&config);
    unsetenv(variable);
    cr_assert_eq(status, VPMM_ERROR_INVALID_VALUE, "%s=%s is accepted", variable, value);
    cr_expect(strstr(vpmm_last_error(), variable), "no name in: %s", vpmm_last_error());
    cr_expect(strstr(vpmm_last_error(), quoted), "no value in: %s", vpmm_last_error());
    cr_expect(strstr(vpmm_last_error(), allowed), "no \"%s\" in: %s", allowed, vpmm_last_error());
    cr_expect(same(&config, &before), "%s=%s changed the configuration", variable, value);
}

Test(config, defaults)
{
    vpmm_config config = vpmm_config_default();
    cr_assert_null(config.driver);
    cr_assert_eq(config.device, 0);
    cr_assert_eq(config.page_size, 0);
    cr_assert_eq(config.va_size, 8 * TIB);
    cr_assert_eq(config.initial_pages, 0);
    cr_assert_eq(config.extent_size, 0);
    cr_assert_eq(config.max_mapped, 0);
    cr_assert_eq(config.max_mapped_percent, 0);
    cr_assert_eq(config.small, VPMM_SMALL_SLAB);
    cr_assert_eq(config.reuse, VPMM_REUSE_WAIT_DEVICE);
    cr_assert_eq(config.streams, VPMM_STREAMS_CHECKED);
    cr_assert(config.reaper && config.exportable && !config.rdma);
    cr_assert_eq(config.release_threshold, 0);
    cr_assert_eq(config.decay_ms, 10000);
    cr_assert(!config.captures);
    cr_assert(!config.graph);
    cr_assert_eq(config_check(&config, GRANULARITY), VPMM_SUCCESS, "%s", vpmm_last_error());
}

Test(config, an_empty_environment_changes_nothing)
{
    vpmm_config config = vpmm_config_default();
    config.page_size = 4 * MIB;
    config.reaper = false;
    vpmm_config before = config;
    cr_assert_eq(vpmm_config_from_env(&config), VPMM_SUCCESS);
    cr_assert(same(&config, &before));
    for (size_t i = 0; i < VARIABLES; i++)
        setenv(variables[i], "", 1); /* as a compose file passes on what nobody has set */
    cr_assert_eq(vpmm_config_from_env(&config), VPMM_SUCCESS, "%s", vpmm_last_error());
    cr_assert(same(&config, &before));
}

Test(config, null_is_refused)
{
    cr_assert_eq(vpmm_config_from_env(NULL), VPMM_ERROR_INVALID_VALUE);
    cr_assert(strlen(vpmm_last_error()) > 0);
}

Test(config, every_variable_sets_its_field)
{
    cr_assert_eq(with("VPMM_DEVICE", "3").device, 3);
    cr_assert_eq(with("VPMM_PAGE_SIZE", "4M").page_size, 4 * MIB);
    cr_assert_eq(with("VPMM_VA_SIZE", "2T").va_size, 2 * TIB);
    cr_assert_eq(with("VPMM_PAGES", "77").initial_pages, 77);
    cr_assert_eq(with("VPMM_EXTENT_SIZE", "32M").extent_size, 32 * MIB);
    cr_assert_eq(with("VPMM_MAX_MAPPED", "70G").max_mapped, 70 * GIB);
    cr_assert_eq(with("VPMM_CACHE_BYTES", "64M").cache_bytes, 64 * MIB);
    cr_assert_eq(with("VPMM_SMALL", "slab").small, VPMM_SMALL_SLAB);
    cr_assert_eq(with("VPMM_SMALL", "async").small, VPMM_SMALL_ASYNC);
    cr_assert_eq(with("VPMM_REUSE", "device").reuse, VPMM_REUSE_WAIT_DEVICE);
    cr_assert_eq(with("VPMM_REUSE", "completed").reuse, VPMM_REUSE_COMPLETED);
    cr_assert_eq(with("VPMM_REUSE", "host").reuse, VPMM_REUSE_WAIT_HOST);
    cr_assert_eq(with("VPMM_STREAMS", "checked").streams, VPMM_STREAMS_CHECKED);
    cr_assert_eq(with("VPMM_STREAMS", "trusted").streams, VPMM_STREAMS_TRUSTED);
    cr_assert_eq(with("VPMM_STREAMS", "eager").streams, VPMM_STREAMS_EAGER);
    cr_assert_not(with("VPMM_REAPER", "0").reaper);
    cr_assert_not(with("VPMM_EXPORTABLE", "off").exportable);
    cr_assert(with("VPMM_RDMA", "yes").rdma);
    cr_assert(with("VPMM_CAPTURES", "on").captures);
    cr_assert_eq(with("VPMM_RELEASE_THRESHOLD", "3G").release_threshold, 3 * GIB);
    cr_assert_eq(with("VPMM_DECAY_MS", "1234").decay_ms, 1234);
    cr_assert_eq(with("VPMM_DECAY_MS", "0").decay_ms, 0);
    cr_assert_eq(with("VPMM_DECAY_MS", "1000000000").decay_ms, 1000000000);
    cr_assert_eq(with("VPMM_DECAY_MS", "never").decay_ms, VPMM_DECAY_NEVER);
}

Test(config, a_variable_sets_nothing_but_its_field)
{
    vpmm_config expected = vpmm_config_default();
    expected.extent_size = 32 * MIB;
    vpmm_config config = with("VPMM_EXTENT_SIZE", "32M");
    cr_assert(same(&config, &expected));
}

Test(config, sizes_take_units)
{
    cr_assert_eq(with("VPMM_MAX_MAPPED", "0").max_mapped, 0);
    cr_assert_eq(with("VPMM_MAX_MAPPED", "12345").max_mapped, 12345);
    cr_assert_eq(with("VPMM_MAX_MAPPED", "3K").max_mapped, 3 * 1024);
    cr_assert_eq(with("VPMM_MAX_MAPPED", "3M").max_mapped, 3 * MIB);
    cr_assert_eq(with("VPMM_MAX_MAPPED", "3G").max_mapped, 3 * GIB);
    cr_assert_eq(with("VPMM_MAX_MAPPED", "3T").max_mapped, 3 * TIB);
    cr_assert_eq(with("VPMM_MAX_MAPPED", "007").max_mapped, 7);
    cr_assert_eq(with("VPMM_MAX_MAPPED", "18446744073709551615").max_mapped, SIZE_MAX);
    cr_assert_eq(with("VPMM_MAX_MAPPED", "16777215T").max_mapped, 16777215 * TIB);
}

Test(config, the_cap_may_be_a_share_of_the_device)
{
    cr_assert_eq(with("VPMM_MAX_MAPPED", "80%").max_mapped_percent, 80);
    cr_assert_eq(with("VPMM_MAX_MAPPED", "1%").max_mapped_percent, 1);
    cr_assert_eq(with("VPMM_MAX_MAPPED", "100%").max_mapped_percent, 100);
    static const char *const bad[] = {
        "0%", "101%", "%", "-1%", "80 %", "80%%", "8.5%", "80M%", "18446744073709551617%"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        refuses("VPMM_MAX_MAPPED", bad[i], "1% to 100%");
    refuses("VPMM_EXTENT_SIZE", "80%", "K, M, G or T");
}

Test(config, the_variable_sets_one_cap_and_no_other)
{
    vpmm_config config = vpmm_config_default();
    config.max_mapped = GIB;
    setenv("VPMM_MAX_MAPPED", "80%", 1);
    cr_assert_eq(vpmm_config_from_env(&config), VPMM_SUCCESS);
    cr_expect_eq(config.max_mapped, 0);
    cr_expect_eq(config.max_mapped_percent, 80);
    setenv("VPMM_MAX_MAPPED", "2G", 1);
    cr_assert_eq(vpmm_config_from_env(&config), VPMM_SUCCESS);
    cr_expect_eq(config.max_mapped, 2 * GIB);
    cr_expect_eq(config.max_mapped_percent, 0);
}

Test(config, switches_take_eight_words)
{
    static const char *const on[] = {"1", "on", "true", "yes"};
    static const char *const off[] = {"0", "off", "false", "no"};
    for (size_t i = 0; i < 4; i++) {
        cr_assert(with("VPMM_REAPER", on[i]).reaper, "%s", on[i]);
        cr_assert_not(with("VPMM_REAPER", off[i]).reaper, "%s", off[i]);
    }
}

Test(config, bad_sizes_are_refused)
{
    static const char *const sizes[] = {"VPMM_PAGE_SIZE",  "VPMM_VA_SIZE",     "VPMM_EXTENT_SIZE",
                                        "VPMM_MAX_MAPPED", "VPMM_CACHE_BYTES", "VPMM_RELEASE_THRESHOLD"};
    static const char *const bad[] = {
        " ",
        "-1",
        "+1",
        " 1",
        "1 ",
        "M",
        "2m",
        "2MB",
        "2MiB",
        "1.5G",
        "0x100",
        "1e9",
        "2M2M",
        "2,000",
        "2 M",
        "2P",
        "two",
        "1\n",
        "NaN",
        "18446744073709551616" /* 2^64 */,
        "16777216T" /* 2^64 */,
        "18446744073709551615K",
        "99999999999999999999999999999999",
    };
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        for (size_t j = 0; j < sizeof(bad) / sizeof(bad[0]); j++)
            refuses(sizes[i], bad[j], "K, M, G or T");
    }
}

Test(config, bad_counts_are_refused)
{
    static const char *const bad[] = {" ", "-1", "+1", "1 ", " 1", "1K", "0x1", "1.0", "many", "18446744073709551616"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        refuses("VPMM_PAGES", bad[i], "a decimal number");
}

Test(config, bad_times_are_refused)
{
    static const char *const bad[] = {
        " ", "-1", "+1", "1 ", " 1", "1K", "10ms", "Never", "never ", "1000000001", "18446744073709551615"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        refuses("VPMM_DECAY_MS", bad[i], "up to 1000000000, or never");
}

Test(config, bad_devices_are_refused)
{
    static const char *const bad[] = {"-1", "+0", "0 ", "first", "1K", "2147483648", "18446744073709551616"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        refuses("VPMM_DEVICE", bad[i], "ordinal");
    cr_assert_eq(with("VPMM_DEVICE", "2147483647").device, INT_MAX);
}

Test(config, unknown_words_are_refused)
{
    static const char *const bad[] = {" ", "1x", "SLAB", "asynch", "Device", "devic", "checked ", "0", "yes!"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        refuses("VPMM_SMALL", bad[i], "slab or async");
        refuses("VPMM_REUSE", bad[i], "device, completed or host");
        refuses("VPMM_STREAMS", bad[i], "checked, trusted or eager");
    }
}

Test(config, unknown_switches_are_refused)
{
    static const char *const bad[] = {" ", "2", "-1", "01", "ON", "enable", "on ", "tru"};
    static const char *const switches[] = {"VPMM_REAPER", "VPMM_EXPORTABLE", "VPMM_RDMA"};
    for (size_t i = 0; i < sizeof(switches) / sizeof(switches[0]); i++) {
        for (size_t j = 0; j < sizeof(bad) / sizeof(bad[0]); j++)
            refuses(switches[i], bad[j], "on");
    }
}

Test(config, one_bad_value_takes_back_the_good_ones)
{
    setenv("VPMM_PAGE_SIZE", "4M", 1);
    setenv("VPMM_REAPER", "0", 1);
    refuses("VPMM_RDMA", "perhaps", "off");
    refuses("VPMM_DEVICE", "perhaps", "ordinal");
}

Test(config, a_long_value_is_cut_and_the_message_stays_whole)
{
    char text[4000];
    memset(text, 'x', sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    refuses("VPMM_MAX_MAPPED", text, "K, M, G or T");
}

/* --- the check of the whole --- */

static void check_refuses(const vpmm_config *config, vpmm_status expected, const char *field, const char *variable,
                          const char *value)
{
    vpmm_status status = config_check(config, GRANULARITY);
    cr_assert_eq(status, expected, "%s for %s = %s", vpmm_status_name(status), field, value);
    cr_expect(strstr(vpmm_last_error(), field), "no field in: %s", vpmm_last_error());
    cr_expect(strstr(vpmm_last_error(), variable), "no variable in: %s", vpmm_last_error());
    cr_expect(strstr(vpmm_last_error(), value), "no value in: %s", vpmm_last_error());
    cr_expect(strstr(vpmm_last_error(), "allowed: "), "nothing allowed in: %s", vpmm_last_error());
}

static void check_accepts(const vpmm_config *config)
{
    cr_assert_eq(config_check(config, GRANULARITY), VPMM_SUCCESS, "%s", vpmm_last_error());
}

Test(check, page_size)
{
    vpmm_config config = vpmm_config_default();
    for (config.page_size = CONFIG_LEAST_PAGE; config.page_size <= TIB; config.page_size *= 2)
        check_accepts(&config);
    config.page_size = 3 * GRANULARITY;
    check_refuses(&config, VPMM_ERROR_INVALID_VALUE, "page_size", "VPMM_PAGE_SIZE", "6291456");
    config.page_size = CONFIG_LEAST_PAGE / 2;
    check_refuses(&config, VPMM_ERROR_INVALID_VALUE, "page_size", "VPMM_PAGE_SIZE", "131072");
    config.va_size = TIB;
    cr_expect_eq(config_check(&config, CONFIG_LEAST_PAGE / 2), VPMM_SUCCESS, "a device's granularity: %s",
                 vpmm_last_error());
    config.page_size = 3 * GRANULARITY / 4;
    check_refuses(&config, VPMM_ERROR_INVALID_VALUE, "page_size", "VPMM_PAGE_SIZE", "1572864");
    config.page_size = 1;
    check_refuses(&config, VPMM_ERROR_INVALID_VALUE, "page_size", "VPMM_PAGE_SIZE", " 1;");
    config.page_size = SIZE_MAX;
    check_refuses(&config, VPMM_ERROR_INVALID_VALUE, "page_size", "VPMM_PAGE_SIZE", "18446744073709551615");
}

Test(check, va_size)
{
    vpmm_config config = vpmm_config_default();
    config.va_size = GRANULARITY;
    check_accepts(&config);
    config.va_size = UNITS_A_CHUNK_MAX * GRANULARITY;
    check_accepts(&config);
    config.va_size = (UNITS_A_CHUNK_MAX + 1) * GRANULARITY;
    check_refuses(&config, VPMM_ERROR_INVALID_VALUE, "va_size", "VPMM_VA_SIZE", "140737488355328");
    config.va_size = 0;
    check_refuses(&config, VPMM_ERROR_INVALID_VALUE, "va_size", "VPMM_VA_SIZE", " 0;");
    config.va_size = 8 * TIB + MIB;
    check_refuses(&config, VPMM_ERROR_INVALID_VALUE, "va_size", "VPMM_VA_SIZE", "8796094070784");
    config.va_size = GIB;
    config.page_size = 2 * GIB;
    check_refuses(&config, VPMM_ERROR_INVALID_VALUE, "va_size", "VPMM_VA_SIZE", "1073741824");
    config.page_size = GRANULARITY / 4;
    config.va_size = GIB + GRANULARITY;
    check_accepts(&config);
    config.va_size = GIB + GRANULARITY / 2; /* of pages, and not of what the driver maps */
    check_refuses(&config, VPMM_ERROR_INVALID_VALUE, "va_size", "VPMM_VA_SIZE", "1074790400");
}

Test(check, initial_pages)
{
    vpmm_config config = vpmm_config_default();
    config.va_size = GIB;
    config.initial_pages = 512;
    check_accepts(&config);
    config.initial_pages = 513;
    check_refuses(&config, VPMM_ERROR_INVALID_VALUE, "initial_pages", "VPMM_PAGES", "513");
    config.initial_pages = SIZE_MAX / GRANULARITY + 2; /* times the page size: wraps to one page */
    check_refuses(&config, VPMM_ERROR_INVALID_VALUE, "initial_pages", "VPMM_PAGES", "8796093022209");
    config.max_mapped = 100 * GRANULARITY + 1;
    config.initial_pages = 100;
    check_accepts(&config);
    config.initial_pages = 101;
    check_refuses(&config, VPMM_ERROR_INVALID_VALUE, "initial_pages", "VPMM_PAGES", "101");
    cr_assert(strstr(vpmm_last_error(), "max_mapped"), "%s", vpmm_last_error());
    config.page_size = GRANULARITY / 4;
    config.max_mapped = 10 * GRANULARITY + GRANULARITY / 2; /* the half is nothing that the driver makes */
    config.initial_pages = 40;
    check_accepts(&config);
    config.initial_pages = 41;
    check_refuses(&config, VPMM_ERROR_INVALID_VALUE, "initial_pages", "VPMM_PAGES", "41");
}

Test(check, max_mapped)
{
    vpmm_config config = vpmm_config_default();
    config.max_mapped = GRANULARITY;
    check_accepts(&config);
    config.max_mapped = 40; /* gigabytes were meant */
    check_refuses(&config, VPMM_ERROR_INVALID_VALUE, "max_mapped", "VPMM_MAX_MAPPED", "40");
    config.page_size = 2 * GRANULARITY;
    config.max_mapped = 3 * GRANULARITY / 2; /* less than a page */
    check_refuses(&config, VPMM_ERROR_INVALID_VALUE, "max_mapped", "VPMM_MAX_MAPPED", "at least a page");
    config.max_mapped = 2 * GRANULARITY;
    check_accepts(&config);
    config.page_size = GRANULARITY / 4;
    config.max_mapped = GRANULARITY / 2; /* pages, but less than a handle */
    check_refuses(&config, VPMM_ERROR_INVALID_VALUE, "max_mapped", "VPMM_MAX_MAPPED", "1048576");
}

Test(check, max_mapped_percent)
{
    vpmm_config config = vpmm_config_default();
    config.max_mapped_percent = 100;
    check_accepts(&config);
    config.max_mapped_percent = 101;
    check_refuses(&config, VPMM_ERROR_INVALID_VALUE, "max_mapped_percent", "VPMM_MAX_MAPPED", "101");
}

static size_t lower_cap(size_t bytes, unsigned percent)
{
    vpmm_config config = vpmm_config_default();
    config.max_mapped = bytes;
    config.max_mapped_percent = percent;
    config_cap_by_share(&config, 200 * GIB);
    return config.max_mapped;
}

Test(check, of_two_caps_the_lower_one_holds)
{
    cr_expect_eq(lower_cap(0, 0), 0);
    cr_expect_eq(lower_cap(GIB, 0), GIB);
    cr_expect_eq(lower_cap(0, 50), 100 * GIB);
    cr_expect_eq(lower_cap(0, 100), 200 * GIB);
    cr_expect_eq(lower_cap(101 * GIB, 50), 100 * GIB);
    cr_expect_eq(lower_cap(99 * GIB, 50), 99 * GIB);
}

Test(check, extent_size)
{
    vpmm_config config = vpmm_config_default();
    config.extent_size = GRANULARITY;
    check_accepts(&config);
    config.extent_size = 3 * GRANULARITY;
    check_accepts(&config);
    config.extent_size = 3 * MIB;
    check_refuses(&config, VPMM_ERROR_INVALID_VALUE, "extent_size", "VPMM_EXTENT_SIZE", "3145728");
    config.page_size = 2 * GRANULARITY;
    config.extent_size = GRANULARITY;
    check_refuses(&config, VPMM_ERROR_INVALID_VALUE, "extent_size", "VPMM_EXTENT_SIZE", "2097152");
    config.page_size = GRANULARITY / 4;
    check_accepts(&config);
    config.extent_size = GRANULARITY / 2;
    check_refuses(&config, VPMM_ERROR_INVALID_VALUE, "extent_size", "VPMM_EXTENT_SIZE", "1048576");
}

Test(check, words)
{
    vpmm_config config = vpmm_config_default();
    config.reuse = (vpmm_reuse)3;
    check_refuses(&config, VPMM_ERROR_INVALID_VALUE, "reuse", "VPMM_REUSE", " 3;");
    config = vpmm_config_default();
    config.streams = (vpmm_streams)17;
    check_refuses(&config, VPMM_ERROR_INVALID_VALUE, "streams", "VPMM_STREAMS", "17");
    config = vpmm_config_default();
    config.small = (vpmm_small)2;
    check_refuses(&config, VPMM_ERROR_INVALID_VALUE, "small", "VPMM_SMALL", " 2;");
}

Test(check, decay_ms)
{
    vpmm_config config = vpmm_config_default();
    for (config.decay_ms = 0; config.decay_ms < 1000000000; config.decay_ms = config.decay_ms * 10 + 10)
        check_accepts(&config);
    config.decay_ms = 1000000000;
    check_accepts(&config);
    config.decay_ms = VPMM_DECAY_NEVER;
    check_accepts(&config);
    config.decay_ms = 1000000001;
    check_refuses(&config, VPMM_ERROR_INVALID_VALUE, "decay_ms", "VPMM_DECAY_MS", "1000000001");
    config.decay_ms = VPMM_DECAY_NEVER - 1;
    check_refuses(&config, VPMM_ERROR_INVALID_VALUE, "decay_ms", "VPMM_DECAY_MS", "VPMM_DECAY_NEVER");
}

Test(check, other_granularities)
{
    vpmm_config config = vpmm_config_default();
    cr_assert_eq(config_check(&config, 64 * 1024), VPMM_ERROR_INVALID_VALUE, "2^27 pages of 64 KiB are too many");
    config.va_size = TIB;
    cr_assert_eq(config_check(&config, 64 * 1024), VPMM_SUCCESS);
    config.page_size = GRANULARITY;
    cr_assert_eq(config_check(&config, 32 * MIB), VPMM_SUCCESS);
    config.page_size = CONFIG_LEAST_PAGE / 2;
    cr_assert_eq(config_check(&config, 32 * MIB), VPMM_ERROR_INVALID_VALUE);
    cr_assert(strstr(vpmm_last_error(), "33554432"), "%s", vpmm_last_error());
}
