/*
 * Bad arguments and the ends of things: the documented status, words that help, and nothing changed.
 */
#include "pool/pool.h"
#include "support.h"

#include "remap/pass.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include <vpmm/observe.h>

/* A pool with one live block, so that there is something to break. */
struct stage {
    struct world w;
    CUstream s;
    CUdeviceptr kept;
    vpmm_stats before;
};

static void stage_open(struct stage *stage, const struct setup *setup)
{
    world_open(&stage->w, setup);
    stage->s = world_stream(&stage->w);
    give(&stage->w, take(&stage->w, 3, stage->s), stage->s);
    stage->kept = take(&stage->w, 2, stage->s);
    fill(&stage->w, stage->kept, 2, 0xc0ffee, stage->s);
    stage->before = stats_of(&stage->w);
}

static void nothing_changed(struct stage *stage)
{
    world_audit(&stage->w);
    vpmm_stats now = stats_of(&stage->w);
    cr_expect_eq(now.live_bytes, stage->before.live_bytes);
    cr_expect_eq(now.mapped_bytes, stage->before.mapped_bytes);
    cr_expect_eq(now.reserved_bytes, stage->before.reserved_bytes);
    cr_expect_eq(now.pending_unmap_bytes, stage->before.pending_unmap_bytes);
    cr_expect_eq(now.mallocs, stage->before.mallocs);
    cr_expect_eq(now.frees, stage->before.frees);
}

static void stage_close(struct stage *stage)
{
    nothing_changed(stage);
    expect_later(&stage->w, stage->kept, 2, 0xc0ffee, stage->s);
    give(&stage->w, stage->kept, stage->s);
    world_close(&stage->w);
}

/* --- arguments ------------------------------------------------------------------------------------------------------
 */

Test(limits, zero_bytes)
{
    struct stage t;
    stage_open(&t, NULL);
    CUdeviceptr p = 0xdead;
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_malloc(t.w.pool, 0, t.s, &p));
    cr_expect_eq(p, 0xdead, "the output is written on failure");
    stage_close(&t);
}

Test(limits, sizes_that_overflow)
{
    struct stage t;
    stage_open(&t, NULL);
    CUdeviceptr p = 0xdead;
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_malloc(t.w.pool, SIZE_MAX, t.s, &p));
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_malloc(t.w.pool, SIZE_MAX - PAGE + 2, t.s, &p));
    for (int bit = 45; bit < 64; bit++) {
        vpmm_status status = vpmm_malloc(t.w.pool, (size_t)1 << bit, t.s, &p);
        cr_expect(status != VPMM_SUCCESS && status != VPMM_ERROR_DRIVER, "2^%d bytes: %s", bit,
                  vpmm_status_name(status));
    }
    cr_expect_eq(p, 0xdead, "the output is written on failure");
    stage_close(&t);
}

Test(limits, null_arguments)
{
    struct stage t;
    stage_open(&t, NULL);
    CUdeviceptr p = 0;
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_malloc(NULL, PAGE, t.s, &p));
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_malloc(t.w.pool, PAGE, t.s, NULL));
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_free(NULL, t.kept, t.s));
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_stream_release(NULL, t.s));
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_trim(NULL, 0, NULL));
    size_t released = 1;
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_trim(NULL, 0, &released));
    cr_expect_eq(released, 0);
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_dump(NULL, stdout));
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_dump(t.w.pool, NULL));
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_poll(NULL));
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_check(NULL));
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_pool_create(NULL, NULL));
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_pool_default(0, NULL));
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_config_from_env(NULL));
    vpmm_stats stats;
    cr_expect_eq(vpmm_stats_get(NULL, &stats), VPMM_ERROR_INVALID_VALUE);
    cr_expect_eq(vpmm_stats_get(t.w.pool, NULL), VPMM_ERROR_INVALID_VALUE);
    cr_expect_null(vpmm_pool_driver(NULL));
    must_work(vpmm_pool_destroy(NULL));
    must_work(vpmm_free(t.w.pool, 0, t.s));
    must_work(vpmm_trim(t.w.pool, SIZE_MAX, NULL));
    stage_close(&t);
}

Test(limits, status_names_and_words)
{
    cr_expect_str_eq(vpmm_last_error(), "");
    cr_expect_str_eq(vpmm_status_name(VPMM_SUCCESS), "VPMM_SUCCESS");
    cr_expect_str_eq(vpmm_status_name(VPMM_ERROR_HOST_MEMORY), "VPMM_ERROR_HOST_MEMORY");
    cr_expect_str_eq(vpmm_status_name((vpmm_status)12345), "VPMM_ERROR_UNKNOWN");
}

Test(limits, pointers_that_are_none)
{
    struct stage t;
    stage_open(&t, NULL);
    CUdeviceptr other = t.kept - 2 * PAGE;
    int on_stack = 0;
    const CUdeviceptr wrong[] = {1,
                                 0x1234,
                                 PAGE,
                                 t.kept + 1,
                                 t.kept + 256,
                                 t.kept + PAGE,
                                 t.kept + 2 * PAGE,
                                 other,
                                 (CUdeviceptr)(uintptr_t)&on_stack,
                                 (CUdeviceptr)-1,
                                 (CUdeviceptr)-1 & ~(CUdeviceptr)(PAGE - 1),
                                 (CUdeviceptr)1 << 63};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        must_fail(VPMM_ERROR_INVALID_POINTER, vpmm_free(t.w.pool, wrong[i], t.s));
    stage_close(&t);
}

Test(limits, a_pointer_of_another_pool)
{
    struct stage t;
    stage_open(&t, NULL);
    struct setup setup = setup_default();
    setup.pool.driver = t.w.driver;
    vpmm_pool *second = NULL;
    must_work(vpmm_pool_create(&setup.pool, &second));
    must_fail(VPMM_ERROR_INVALID_POINTER, vpmm_free(second, t.kept, t.s));
    CUdeviceptr small = take_bytes(&t.w, 100, t.s);
    must_fail(VPMM_ERROR_INVALID_POINTER, vpmm_free(second, small, t.s));
    give(&t.w, small, t.s);
    must_work(vpmm_pool_destroy(second));
    t.before = stats_of(&t.w);
    stage_close(&t);
}

Test(limits, double_free)
{
    struct stage t;
    stage_open(&t, NULL);
    CUdeviceptr p = take(&t.w, 5, t.s), q = take_bytes(&t.w, 777, t.s);
    give(&t.w, p, t.s);
    must_fail(VPMM_ERROR_INVALID_POINTER, vpmm_free(t.w.pool, p, t.s));
    world_drain(&t.w);
    must_fail(VPMM_ERROR_INVALID_POINTER, vpmm_free(t.w.pool, p, t.s));
    must_work(vpmm_trim(t.w.pool, 0, NULL));
    must_fail(VPMM_ERROR_INVALID_POINTER, vpmm_free(t.w.pool, p, t.s));
    give(&t.w, q, t.s);
    must_fail(VPMM_ERROR_INVALID_POINTER, vpmm_free(t.w.pool, q, t.s));
    t.before = stats_of(&t.w);
    stage_close(&t);
}

/* Two threads free the same pointers at once, a round a pointer. */
struct rivals {
    struct world *w;
    CUstream s;
    CUdeviceptr pointer;
    pthread_barrier_t start, end;
    atomic_int freed, refused;
};

enum { ROUNDS = 2000 };

static void *free_in_rivalry(void *argument)
{
    struct rivals *r = argument;
    for (int i = 0; i < ROUNDS; i++) {
        pthread_barrier_wait(&r->start);
        vpmm_status status = vpmm_free(r->w->pool, r->pointer, r->s);
        if (status == VPMM_SUCCESS)
            atomic_fetch_add(&r->freed, 1);
        else if (status == VPMM_ERROR_INVALID_POINTER && vpmm_last_error()[0] != 0)
            atomic_fetch_add(&r->refused, 1);
        pthread_barrier_wait(&r->end);
    }
    return NULL;
}

static void one_of_two_frees_wins(size_t bytes)
{
    struct stage t;
    stage_open(&t, NULL);
    struct rivals r = {.w = &t.w, .s = t.s};
    pthread_barrier_init(&r.start, NULL, 3);
    pthread_barrier_init(&r.end, NULL, 3);
    pthread_t thread[2];
    for (int i = 0; i < 2; i++)
        pthread_create(&thread[i], NULL, free_in_rivalry, &r);
    for (int i = 0; i < ROUNDS; i++) {
        vpmm_status status = vpmm_malloc(t.w.pool, bytes, t.s, &r.pointer);
        bool good = status == VPMM_SUCCESS;
        pthread_barrier_wait(&r.start);
        pthread_barrier_wait(&r.end);
        cr_assert(good, "malloc: %s", vpmm_status_name(status));
        cr_assert_eq(atomic_load(&r.freed), i + 1, "round %d: freed %d times", i, atomic_load(&r.freed));
        cr_assert_eq(atomic_load(&r.refused), i + 1);
        if (i % 64 == 0)
            world_step(&t.w);
    }
    for (int i = 0; i < 2; i++)
        pthread_join(thread[i], NULL);
    world_drain(&t.w);
    t.before = stats_of(&t.w);
    stage_close(&t);
}

Test(limits, double_free_from_two_threads, .timeout = 60)
{
    one_of_two_frees_wins(3 * PAGE);
}
Test(limits, double_free_of_a_small_block_from_two_threads, .timeout = 60)
{
    one_of_two_frees_wins(1000);
}

Test(limits, release_of_an_unknown_stream)
{
    struct stage t;
    stage_open(&t, NULL);
    CUstream never_met = world_stream(&t.w);
    must_work(vpmm_stream_release(t.w.pool, never_met));
    stage_close(&t);
}

Test(limits, release_of_a_stream_twice)
{
    struct stage t;
    stage_open(&t, NULL);
    CUstream s = world_stream(&t.w);
    CUdeviceptr p = take(&t.w, 2, s);
    give(&t.w, p, s);
    must_work(vpmm_stream_release(t.w.pool, s));
    must_work(vpmm_stream_release(t.w.pool, s));
    world_drain(&t.w);
    t.before = stats_of(&t.w);
    stage_close(&t);
}

/* --- configuration --------------------------------------------------------------------------------------------------
 */

static void refused_setting(struct setup *setup, vpmm_status want, const char *word)
{
    struct world w;
    struct setup plain = setup_default();
    plain.sim = setup->sim;
    world_open_without_pool(&w, &plain);
    if (setup->pool.driver == NULL)
        setup->pool.driver = w.driver;
    vpmm_pool *pool = (vpmm_pool *)1;
    must_fail(want, vpmm_pool_create(&setup->pool, &pool));
    cr_expect(strstr(vpmm_last_error(), word) != NULL, "no '%s' in: %s", word, vpmm_last_error());
    cr_expect_eq(pool, (vpmm_pool *)1, "the output is written on failure");
    setup->pool.driver = NULL;
    world_close(&w);
}

Test(limits, settings_that_are_refused)
{
    struct setup setup = setup_default();
    setup.pool.page_size = 3 * PAGE;
    refused_setting(&setup, VPMM_ERROR_INVALID_VALUE, "6291456"); /* the value that it had */
    setup.pool.page_size = 4096;
    refused_setting(&setup, VPMM_ERROR_INVALID_VALUE, "2097152"); /* what is allowed */
    setup = setup_default();
    setup.pool.va_size = 5 * PAGE + 1;
    refused_setting(&setup, VPMM_ERROR_INVALID_VALUE, "va_size");
    setup = setup_default();
    setup.pool.initial_pages = SIZE_MAX / 2;
    refused_setting(&setup, VPMM_ERROR_INVALID_VALUE, "initial_pages");
    setup = setup_default();
    setup.pool.extent_size = PAGE + 1;
    refused_setting(&setup, VPMM_ERROR_INVALID_VALUE, "extent_size");
    setup = setup_default();
    setup.pool.small = (vpmm_small)17;
    refused_setting(&setup, VPMM_ERROR_INVALID_VALUE, "small");
    setup = setup_default();
    setup.pool.reuse = (vpmm_reuse)17;
    refused_setting(&setup, VPMM_ERROR_INVALID_VALUE, "reuse");
    setup = setup_default();
    setup.pool.streams = (vpmm_streams)17;
    refused_setting(&setup, VPMM_ERROR_INVALID_VALUE, "streams");
}

Test(limits, a_device_that_does_not_exist)
{
    struct setup setup = setup_default();
    setup.pool.device = 7;
    refused_setting(&setup, VPMM_ERROR_NO_DRIVER, "7");
    setup.pool.device = -1;
    struct world w;
    struct setup plain = setup_default();
    world_open_without_pool(&w, &plain);
    setup.pool.driver = w.driver;
    vpmm_pool *pool = NULL;
    clear_words();
    vpmm_status status = vpmm_pool_create(&setup.pool, &pool);
    cr_expect(status == VPMM_ERROR_NO_DRIVER || status == VPMM_ERROR_INVALID_VALUE, "%s", vpmm_status_name(status));
    cr_expect(spoke());
    world_close(&w);
}

Test(limits, a_table_with_an_entry_missing)
{
    struct world w;
    struct setup setup = setup_default();
    world_open_without_pool(&w, &setup);
    vpmm_driver table = *w.driver;
    table.cuMemMap = NULL;
    setup.pool.driver = &table;
    vpmm_pool *pool = NULL;
    clear_words();
    cr_expect_neq(vpmm_pool_create(&setup.pool, &pool), VPMM_SUCCESS);
    cr_expect(strstr(vpmm_last_error(), "cuMemMap") != NULL, "%s", vpmm_last_error());
    world_close(&w);
}

Test(limits, an_older_table_without_the_newest_entry)
{
    struct world w;
    struct setup setup = setup_default();
    world_open_without_pool(&w, &setup);
    vpmm_driver table = *w.driver;
    table.cuStreamGetId = NULL;
    table.size = offsetof(vpmm_driver, cuStreamGetId);
    setup.pool.driver = &table;
    must_work(vpmm_pool_create(&setup.pool, &w.pool));
    CUstream s = world_stream(&w);
    give(&w, take(&w, 3, s), s);
    world_audit(&w);
    world_close(&w);
}

Test(limits, bad_words_in_the_environment)
{
    static const struct {
        const char *variable, *value;
    } bad[] = {{"VPMM_PAGE_SIZE", "2Q"},    {"VPMM_PAGE_SIZE", "-2M"},   {"VPMM_VA_SIZE", "99999999T"},
               {"VPMM_PAGES", "ten"},       {"VPMM_EXTENT_SIZE", "1 M"}, {"VPMM_MAX_MAPPED", "0x10"},
               {"VPMM_CACHE_BYTES", "1MM"}, {"VPMM_SMALL", "tiny"},      {"VPMM_REUSE", "DEVICE "},
               {"VPMM_STREAMS", "maybe"}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        setenv(bad[i].variable, bad[i].value, 1);
        vpmm_config config = vpmm_config_default(), before = config;
        must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_config_from_env(&config));
        cr_expect(strstr(vpmm_last_error(), bad[i].variable) != NULL, "%s", vpmm_last_error());
        cr_expect(strstr(vpmm_last_error(), bad[i].value) != NULL, "%s", vpmm_last_error());
        cr_expect(memcmp(&config, &before, sizeof config) == 0, "the configuration is changed by a bad %s",
                  bad[i].variable);
        unsetenv(bad[i].variable);
    }
}

Test(limits, good_words_in_the_environment)
{
    setenv("VPMM_PAGE_SIZE", "4M", 1);
    setenv("VPMM_VA_SIZE", "1T", 1);
    setenv("VPMM_PAGES", "12", 1);
    setenv("VPMM_EXTENT_SIZE", "33554432", 1);
    setenv("VPMM_MAX_MAPPED", "3G", 1);
    setenv("VPMM_CACHE_BYTES", "64K", 1);
    setenv("VPMM_SMALL", "async", 1);
    setenv("VPMM_REUSE", "host", 1);
    setenv("VPMM_STREAMS", "eager", 1);
    vpmm_config c = vpmm_config_default();
    must_work(vpmm_config_from_env(&c));
    cr_expect_eq(c.page_size, (size_t)4 << 20);
    cr_expect_eq(c.va_size, (size_t)1 << 40);
    cr_expect_eq(c.initial_pages, 12);
    cr_expect_eq(c.extent_size, (size_t)32 << 20);
    cr_expect_eq(c.max_mapped, (size_t)3 << 30);
    cr_expect_eq(c.cache_bytes, 65536);
    cr_expect_eq(c.small, VPMM_SMALL_ASYNC);
    cr_expect_eq(c.reuse, VPMM_REUSE_WAIT_HOST);
    cr_expect_eq(c.streams, VPMM_STREAMS_EAGER);
}

/* --- devices without virtual memory, and pages above every request --------------------------------------------------
 */

static void served_by_the_driver_s_pool(const struct setup *setup)
{
    struct world w;
    world_open(&w, setup);
    CUstream s = world_stream(&w);
    CUdeviceptr p = take_bytes(&w, 10 * PAGE, s), q = take_bytes(&w, 100, s);
    fill(&w, p, 10, 10, s);
    expect_later(&w, p, 10, 10, s);
    cr_expect_eq(world_calls(&w, "cuMemMap"), 0);
    cr_expect_eq(stats_of(&w).hits_async, 2);
    cr_expect_geq(stats_of(&w).async_bytes, 10 * PAGE + 100);
    cr_expect_eq(stats_of(&w).mapped_bytes, 0);
    world_audit(&w);
    must_fail(VPMM_ERROR_BUSY, vpmm_pool_destroy(w.pool));
    give(&w, p, s);
    must_fail(VPMM_ERROR_INVALID_POINTER, vpmm_free(w.pool, p, s));
    give(&w, q, s);
    CUdeviceptr too_much = 0;
    size_t memory = 0;
    cr_assert_eq(w.driver->cuDeviceTotalMem(&memory, w.device), CUDA_SUCCESS);
    must_fail(VPMM_ERROR_OUT_OF_MEMORY, vpmm_malloc(w.pool, 2 * memory, s, &too_much));
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_malloc(w.pool, 0, s, &too_much));
    must_work(vpmm_trim(w.pool, 0, NULL));
    world_drain(&w);
    world_audit(&w);
    world_close(&w);
}

Test(limits, a_device_without_virtual_memory)
{
    struct setup setup = setup_default();
    setup.sim.vmm = false;
    served_by_the_driver_s_pool(&setup);
}

Test(limits, a_device_without_virtual_memory_serves_no_capture)
{
    needs_simulator();
    struct setup setup = setup_default();
    setup.sim.vmm = false;
    struct world w;
    CUgraph graph = NULL;
    CUdeviceptr q = 0;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr p = take_bytes(&w, 1000, s);
    cr_assert_eq(w.driver->cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    must_fail(VPMM_ERROR_NOT_SUPPORTED, vpmm_malloc(w.pool, 1000, s, &q));
    must_fail(VPMM_ERROR_NOT_SUPPORTED, vpmm_free(w.pool, p, s));
    must_fail(VPMM_ERROR_BUSY, vpmm_pool_destroy(w.pool));
    cr_assert_eq(w.driver->cuStreamEndCapture(s, &graph), CUDA_SUCCESS, "the capture is lost");
    cr_assert_eq(w.driver->cuGraphDestroy(graph), CUDA_SUCCESS);
    give(&w, p, s);
    world_close(&w);
}

Test(limits, a_page_above_every_request)
{
    struct setup setup = setup_default();
    setup.pool.page_size = (size_t)1 << 40;
    setup.pool.va_size = (size_t)1 << 40;
    served_by_the_driver_s_pool(&setup);
}

Test(limits, a_page_of_many_subpages)
{
    struct setup setup = setup_default();
    setup.pool.page_size = 8 * PAGE;
    setup.pool.small = VPMM_SMALL_ASYNC; /* pages are not cut */
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr p = take_bytes(&w, 8 * PAGE + 1, s), q = take_bytes(&w, 8 * PAGE, s), r = take_bytes(&w, 7 * PAGE, s);
    cr_expect_eq(stats_of(&w).live_bytes, 24 * PAGE);
    fill(&w, p, 16, 1, s);
    fill(&w, q, 8, 2, s);
    fill(&w, r, 7, 3, s);
    expect_later(&w, p, 16, 1, s);
    expect_later(&w, q, 8, 2, s);
    expect_later(&w, r, 7, 3, s);
    world_audit(&w);
    give(&w, p, s);
    give(&w, q, s);
    give(&w, r, s);
    world_close(&w);
}

/* Also what has been freed on streams that have not come so far. */
Test(limits, the_longest_free_region_is_any_stream_s)
{
    struct setup setup = setup_default();
    struct world w;
    setup.pool.cache_bytes = 0; /* what is cached is in no free region */
    world_open(&w, &setup);
    CUstream s = world_stream(&w), t = world_stream(&w);
    CUdeviceptr a = take(&w, 5, s), b = take(&w, 1, s), c = take(&w, 3, t);
    keep_busy(&w, s);
    keep_busy(&w, t);
    give(&w, c, t);
    cr_expect_eq(stats_of(&w).largest_free_bytes, 3 * PAGE);
    give(&w, a, s);
    cr_expect_eq(stats_of(&w).largest_free_bytes, 5 * PAGE);
    give(&w, b, s);
    world_close(&w);
}

static const vpmm_driver *below;

static CUresult CUDAAPI has_no_pools(int *value, CUdevice_attribute attribute, CUdevice device)
{
    CUresult result = below->cuDeviceGetAttribute(value, attribute, device);
    if (attribute == CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)
        *value = 0;
    return result;
}

/* With VPMM_SMALL=async, what lies in no page of the pool's could be the driver's pool's alone, which is not there. */
Test(limits, pointers_of_nobody_on_a_device_without_memory_pools)
{
    needs_simulator();
    struct world w;
    vpmm_driver table;
    CUdeviceptr small = 0;
    struct setup setup = setup_default();
    setup.pool.small = VPMM_SMALL_ASYNC;
    world_open_without_pool(&w, &setup);
    below = w.driver;
    table = *below;
    table.cuDeviceGetAttribute = has_no_pools;
    setup.pool.driver = &table;
    must_work(vpmm_pool_create(&setup.pool, &w.pool));
    CUstream s = world_stream(&w);
    CUdeviceptr p = take(&w, 1, s);
    must_fail(VPMM_ERROR_NOT_SUPPORTED, vpmm_malloc(w.pool, 1000, s, &small));
    must_fail(VPMM_ERROR_INVALID_POINTER, vpmm_free(w.pool, 0x1234, s));
    must_fail(VPMM_ERROR_INVALID_POINTER, vpmm_use(w.pool, 0x1234, s));
    give(&w, p, s);
    world_close(&w);
}

/* As nvidia-smi writes it. */
Test(limits, the_identity_of_a_device)
{
    struct world w;
    CUuuid uuid;
    char digits[2 * sizeof uuid.bytes + 1], told[sizeof digits] = "";
    vpmm_device device;
    world_open(&w, NULL);
    cr_assert_eq(w.driver->cuDeviceGetUuid(&uuid, w.device), CUDA_SUCCESS);
    for (size_t i = 0; i < sizeof uuid.bytes; i++)
        snprintf(digits + 2 * i, 3, "%02x", (unsigned)(unsigned char)uuid.bytes[i]);
    must_work(vpmm_device_get(w.pool, &device));
    size_t count = 0;
    for (const char *c = device.uuid + strlen("GPU-"); *c; c++)
        if (*c != '-' && count < sizeof told - 1)
            told[count++] = *c;
    cr_expect_str_eq(told, digits, "%s", device.uuid);
    world_close(&w);
}

/* --- the ends of memory and of addresses ----------------------------------------------------------------------------
 */

Test(limits, destroy_with_live_memory)
{
    struct stage t;
    stage_open(&t, NULL);
    must_fail(VPMM_ERROR_BUSY, vpmm_pool_destroy(t.w.pool));
    nothing_changed(&t);
    CUdeviceptr p = take(&t.w, 40, t.s); /* and it goes on working */
    fill(&t.w, p, 40, 40, t.s);
    give(&t.w, p, t.s);
    world_drain(&t.w);
    t.before = stats_of(&t.w);
    stage_close(&t);
}

static void destroy_says(struct world *w, const char *word)
{
    must_fail(VPMM_ERROR_DRIVER, vpmm_pool_destroy(w->pool));
    w->pool = NULL;
    cr_expect(strstr(vpmm_last_error(), word) != NULL, "%s", vpmm_last_error());
}

/* Of several refusals the first has the words. */
Test(limits, the_first_failure_of_an_end_is_said)
{
    needs_simulator();
    struct world w;
    world_open(&w, NULL);
    CUstream s = world_stream(&w);
    give(&w, take(&w, 4, s), s);
    world_drain(&w);
    vpmm_sim_fail_after(w.sim, "cuMemUnmap", 1, CUDA_ERROR_UNKNOWN, false);
    vpmm_sim_fail_after(w.sim, "cuMemAddressFree", 1, CUDA_ERROR_UNKNOWN, false);
    destroy_says(&w, "cuMemUnmap");
    world_close(&w);
}

Test(limits, the_first_failure_of_an_end_is_said_whatever_follows)
{
    needs_simulator();
    struct world w;
    world_open(&w, NULL);
    vpmm_sim_fail_after(w.sim, "cuMemAddressFree", 1, CUDA_ERROR_UNKNOWN, false);
    vpmm_sim_fail_after(w.sim, "cuDevicePrimaryCtxRelease", 1, CUDA_ERROR_UNKNOWN, false);
    destroy_says(&w, "cuMemAddressFree");
    world_close(&w);
}

/* And not those of what was undone after it. */
Test(limits, the_first_failure_of_a_creation_is_said)
{
    needs_simulator();
    struct setup setup = setup_default();
    struct world w;
    setup.pool.initial_pages = 4;
    world_open_without_pool(&w, &setup);
    setup.pool.driver = w.driver;
    vpmm_sim_fail(w.sim, "cuMemCreate", 1, CUDA_ERROR_UNKNOWN, true);
    vpmm_sim_fail_after(w.sim, "cuMemAddressFree", 1, CUDA_ERROR_UNKNOWN, false);
    must_fail(VPMM_ERROR_DRIVER, vpmm_pool_create(&setup.pool, &w.pool));
    cr_expect(strstr(vpmm_last_error(), "cuMemCreate") != NULL, "%s", vpmm_last_error());
    w.pool = NULL;
    world_close(&w);
}

static void out_of_memory_and_back(const struct setup *setup, size_t capacity_pages)
{
    struct stage t;
    stage_open(&t, setup);
    CUdeviceptr p[512], more = 0xdead;
    size_t n = 0;
    vpmm_status status;
    while ((status = vpmm_malloc(t.w.pool, 4 * PAGE, t.s, &p[n])) == VPMM_SUCCESS)
        cr_assert_lt(++n, 512);
    cr_assert_eq(status, VPMM_ERROR_OUT_OF_MEMORY, "%s", vpmm_status_name(status));
    cr_expect_geq(4 * n + 2, capacity_pages - 4, "refused with %zu of %zu pages in use", 4 * n + 2, capacity_pages);
    t.before = stats_of(&t.w);
    must_fail(VPMM_ERROR_OUT_OF_MEMORY, vpmm_malloc(t.w.pool, 5 * PAGE, t.s, &more));
    cr_expect_eq(more, 0xdead);
    char digits[32];
    snprintf(digits, sizeof digits, "%zu", 5 * PAGE);
    cr_expect(strpbrk(vpmm_last_error(), "0123456789") != NULL, "no numbers in: %s", vpmm_last_error());
    cr_expect(strstr(vpmm_last_error(), digits) != NULL, "not what was asked for in: %s", vpmm_last_error());
    nothing_changed(&t);
    cr_expect_geq(stats_of(&t.w).out_of_memory, 2);

    for (size_t i = 0; i < n; i += 2) { /* every other one: what is free is scattered, and must be gathered */
        fill(&t.w, p[i], 4, 4, t.s);
        give(&t.w, p[i], t.s);
    }
    size_t scattered = (n + 1) / 2 * 4;
    if (setup->pool.extent_size == PAGE) {
        CUdeviceptr large = take(&t.w, scattered, t.s);
        fill(&t.w, large, scattered, 7, t.s);
        expect_later(&t.w, large, scattered, 7, t.s);
        give(&t.w, large, t.s);
    }
    for (size_t i = 1; i < n; i += 2)
        give(&t.w, p[i], t.s);
    world_drain(&t.w);
    t.before = stats_of(&t.w);
    stage_close(&t);
}

Test(limits, out_of_device_memory_and_back)
{
    struct setup setup = setup_default();
    setup.sim.memory_bytes = 100 * PAGE;
    out_of_memory_and_back(&setup, 100);
}

Test(limits, out_of_device_memory_and_back_with_one_page_extents)
{
    struct setup setup = setup_default();
    setup.sim.memory_bytes = 100 * PAGE;
    setup.pool.extent_size = PAGE;
    out_of_memory_and_back(&setup, 100);
}

Test(limits, the_cap_on_mapped_memory)
{
    struct setup setup = setup_default();
    setup.pool.max_mapped = 60 * PAGE;
    setup.pool.extent_size = PAGE;
    out_of_memory_and_back(&setup, 60);
}

Test(limits, a_cap_that_is_a_share_of_the_device)
{
    enum { PAGES = 100, PERCENT = 37 };
    struct setup setup = setup_default();
    struct world w;
    uint64_t cap = 0;
    setup.sim.memory_bytes = PAGES * PAGE;
    setup.pool.max_mapped_percent = PERCENT;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr most = take(&w, PERCENT, s), more = 0;
    must_fail(VPMM_ERROR_OUT_OF_MEMORY, vpmm_malloc(w.pool, PAGE, s, &more));
    must_work(vpmm_pool_get_attribute(w.pool, VPMM_ATTRIBUTE_MAX_MAPPED, &cap));
    cr_expect_eq(cap, PERCENT * PAGE);
    give(&w, most, s);
    world_close(&w);
}

Test(limits, initial_pages_above_the_device_s_memory)
{
    struct setup setup = setup_default();
    setup.sim.memory_bytes = 64 * PAGE;
    setup.pool.initial_pages = 100;
    refused_setting(&setup, VPMM_ERROR_OUT_OF_MEMORY, "VPMM_PAGES");
}

/* ---- a request fails when nothing can be had for it, and not before ---- */

static CUmemGenericAllocationHandle others_handle(struct world *w, size_t pages)
{
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = w->device}};
    CUmemGenericAllocationHandle handle;
    cr_assert_eq(w->driver->cuMemCreate(&handle, pages * PAGE, &prop, 0), CUDA_SUCCESS);
    return handle;
}

static size_t free_pages(struct world *w)
{
    size_t bytes, total;
    cr_assert_eq(w->driver->cuMemGetInfo(&bytes, &total), CUDA_SUCCESS);
    return bytes / PAGE;
}

enum { STUCK = 3, HOLE = 16, WHOLE = 32, IN_THE_WAY = 1 + STUCK + WHOLE + 1 };

/*
 * [1][-3][*16][-32][1], of so many pages each: what is stuck before the hole can grow when the handles behind it are
 * out of the way. The first block, and the last.
 */
static void put_handles_in_the_way(struct world *w, CUdeviceptr block[2], CUstream s)
{
    CUdeviceptr hole, whole;
    block[0] = take(w, 1 + STUCK, s);
    hole = take(w, HOLE, s);
    whole = take(w, WHOLE, s);
    block[1] = take(w, 1, s);
    give(w, hole, s);
    world_drain(w);
    must_work(vpmm_trim(w->pool, 0, NULL));
    give(w, block[0], s);
    cr_assert_eq(take(w, 1, s), block[0]);
    give(w, whole, s);
    world_drain(w);
}

Test(limits, handles_in_the_way_go_back_where_that_serves_the_request)
{
    enum { LEFT = 3, MOST = STUCK + WHOLE + LEFT };
    needs_simulator();
    struct setup setup = setup_default();
    struct world w;
    CUdeviceptr block[2], q;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    put_handles_in_the_way(&w, block, s);
    cr_assert_str_eq(layout(&w), "[1][-3][*16][-32][1]");
    CUmemGenericAllocationHandle handle = others_handle(&w, free_pages(&w) - LEFT);

    uint64_t released = stats_of(&w).extents_released;
    must_fail(VPMM_ERROR_OUT_OF_MEMORY, vpmm_malloc(w.pool, (MOST + 1) * PAGE, s, &q));
    cr_expect_eq(stats_of(&w).extents_released, released, "handles went back in vain");
    cr_expect_str_eq(layout(&w), "[1][-3][*16][-32][1]");
    CUdeviceptr p = take(&w, MOST, s);
    cr_expect_eq(p, block[0] + PAGE);
    fill(&w, p, MOST, 1, s);
    expect_later(&w, p, MOST, 1, s);
    give(&w, p, s);
    give(&w, block[0], s);
    give(&w, block[1], s);
    cr_expect_eq(w.driver->cuMemRelease(handle), CUDA_SUCCESS);
    world_close(&w);
}

/* The cap is lowered to so many bytes, and for so many there is no place then. What is free serves as before. */
static void a_cap_leaves_what_is_in_the_way(size_t page_size, size_t cap, size_t bytes)
{
    needs_simulator();
    struct setup setup = setup_default();
    struct world w;
    CUdeviceptr block[2], q;
    setup.pool.page_size = page_size;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    put_handles_in_the_way(&w, block, s);
    must_work(vpmm_pool_set_attribute(w.pool, VPMM_ATTRIBUTE_MAX_MAPPED, cap));
    uint64_t released = stats_of(&w).extents_released;
    must_fail(VPMM_ERROR_OUT_OF_MEMORY, vpmm_malloc(w.pool, bytes, s, &q));
    cr_expect_eq(stats_of(&w).extents_released, released, "handles went back in vain");
    q = take(&w, WHOLE, s);
    give(&w, q, s);
    give(&w, block[0], s);
    give(&w, block[1], s);
    world_close(&w);
}

Test(limits, a_lowered_cap_leaves_the_handles_in_the_way)
{
    a_cap_leaves_what_is_in_the_way(PAGE, 8 * PAGE, (STUCK + WHOLE) * PAGE);
    a_cap_leaves_what_is_in_the_way(PAGE, (IN_THE_WAY - 1) * PAGE, (STUCK + WHOLE) * PAGE);
}

/* Half a step more, of which no handle is made. */
Test(limits, a_cap_within_a_step_leaves_the_handles_in_the_way)
{
    a_cap_leaves_what_is_in_the_way(PAGE / 8, IN_THE_WAY * PAGE + PAGE / 2, (STUCK + WHOLE) * PAGE + PAGE / 2);
}

/* ---- what others do while handles in the way go back ---- */

enum { FREED = 4 };

static struct beside {
    const vpmm_driver *simulated;
    struct world *w;
    CUstream stream;
    CUdeviceptr freed[FREED]; /* when the device is asked what it has, or at unmaps one after another; 0: none */
    bool ends_a_build;        /* when the device is asked: it gives back what it has made, if anybody may build then */
    bool frees_at_unmaps;
} beside;

/* As another thread, which has no lock. */
static void free_beside(CUdeviceptr *block)
{
    if (!*block)
        return;
    give(beside.w, *block, beside.stream);
    *block = 0;
    world_step(beside.w);
    pass_refresh(&beside.w->pool->arena, NULL);
}

/* All that the device has is in the hands of a build, which has the turn unless the caller has it. */
static CUresult CUDAAPI tell_beside_a_build(size_t *bytes, size_t *total)
{
    CUresult result = beside.simulated->cuMemGetInfo(bytes, total);
    struct arena *arena = &beside.w->pool->arena;
    struct turn_place place;
    if (beside.ends_a_build) {
        beside.ends_a_build = false;
        atomic_fetch_add(&arena->releases, 1);
        if (turn_try(&arena->turn, &place)) {
            turn_leave(&arena->turn, &place);
            *bytes = 0;
        }
    }
    if (!beside.frees_at_unmaps)
        free_beside(&beside.freed[0]);
    return result;
}

static CUresult CUDAAPI unmap_beside_frees(CUdeviceptr at, size_t bytes)
{
    CUresult result = beside.simulated->cuMemUnmap(at, bytes);
    for (int i = 0; beside.frees_at_unmaps && i < FREED; i++)
        if (beside.freed[i]) {
            free_beside(&beside.freed[i]);
            break;
        }
    return result;
}

/* Two handles in the way of BESIDE_MOST pages, and blocks of so many pages for others to free. */
enum { HANDLES = 2, BESIDE_LEFT = 3, BESIDE_MOST = STUCK + WHOLE + BESIDE_LEFT };

static CUmemGenericAllocationHandle open_beside(struct world *w, CUdeviceptr block[2], CUdeviceptr freed[FREED],
                                                size_t pages)
{
    static vpmm_driver driver;
    needs_simulator();
    struct setup setup = setup_default();
    world_open_without_pool(w, &setup);
    beside = (struct beside){.simulated = w->driver, .w = w};
    driver = *w->driver;
    driver.cuMemGetInfo = tell_beside_a_build;
    driver.cuMemUnmap = unmap_beside_frees;
    setup.pool.driver = &driver;
    must_work(vpmm_pool_create(&setup.pool, &w->pool));
    beside.stream = world_stream(w);
    for (int i = 0; i < FREED; i++)
        freed[i] = take(w, pages, beside.stream);
    put_handles_in_the_way(w, block, beside.stream);
    cr_assert_eq(stats_of(w).reusable_bytes, (STUCK + WHOLE) * PAGE);
    return others_handle(w, free_pages(w) - BESIDE_LEFT);
}

static void close_beside(struct world *w, CUdeviceptr block[2], CUmemGenericAllocationHandle others)
{
    for (int i = 0; i < 2; i++)
        give(w, block[i], beside.stream);
    cr_expect_eq(w->driver->cuMemRelease(others), CUDA_SUCCESS);
    world_drain(w);
    world_audit(w);
    world_close(w);
}

/* What a build gives back makes unknown what the device has; and what it has made is not the device's before. */
static void a_build_ends_beside_it(size_t pages, vpmm_status expected, uint64_t handles)
{
    struct world w;
    CUdeviceptr block[2], live[FREED], p = 0;
    CUmemGenericAllocationHandle others = open_beside(&w, block, live, WHOLE + 1);
    uint64_t released = stats_of(&w).extents_released;
    beside.ends_a_build = true;
    cr_expect_eq(vpmm_malloc(w.pool, pages * PAGE, beside.stream, &p), expected, "%zu: %s", pages, vpmm_last_error());
    cr_expect(!beside.ends_a_build);
    cr_expect_eq(stats_of(&w).extents_released - released, handles);
    if (p)
        give(&w, p, beside.stream);
    for (int i = 0; i < FREED; i++)
        give(&w, live[i], beside.stream);
    close_beside(&w, block, others);
}

Test(limits, handles_stay_where_a_build_beside_gives_something_back)
{
    a_build_ends_beside_it(BESIDE_MOST + 1, VPMM_ERROR_OUT_OF_MEMORY, 0);
}

Test(limits, handles_go_back_by_what_the_device_has_when_nobody_builds)
{
    a_build_ends_beside_it(BESIDE_MOST, VPMM_SUCCESS, HANDLES);
}

/* Then none needs to go. */
Test(limits, handles_stay_where_another_has_freed_enough_meanwhile)
{
    struct world w;
    CUdeviceptr block[2];
    CUmemGenericAllocationHandle others = open_beside(&w, block, beside.freed, BESIDE_MOST);
    CUdeviceptr live[FREED], enough;
    memcpy(live, beside.freed, sizeof live);
    enough = live[0];
    uint64_t released = stats_of(&w).extents_released;
    CUdeviceptr p = take(&w, BESIDE_MOST, beside.stream);
    cr_expect_eq(p, enough);
    cr_expect_eq(stats_of(&w).extents_released, released, "handles went back in vain");
    give(&w, p, beside.stream);
    for (int i = 1; i < FREED; i++)
        give(&w, live[i], beside.stream);
    close_beside(&w, block, others);
}

/* Where others free all the time it would never end, and they would have to make anew what they need. */
Test(limits, what_others_free_while_handles_go_back_stays)
{
    struct world w;
    CUdeviceptr block[2];
    CUmemGenericAllocationHandle others = open_beside(&w, block, beside.freed, 8);
    beside.frees_at_unmaps = true;
    uint64_t released = stats_of(&w).extents_released;
    CUdeviceptr p = take(&w, BESIDE_MOST, beside.stream);
    cr_expect_eq(stats_of(&w).extents_released, released + HANDLES, "what was not in the way went back, too");
    beside.frees_at_unmaps = false;
    give(&w, p, beside.stream);
    for (int i = 0; i < FREED; i++)
        if (beside.freed[i])
            give(&w, beside.freed[i], beside.stream);
    close_beside(&w, block, others);
}

/* Blocks of many lengths come and go on a device that others have filled but for this pool's part. */
static void a_shortage_stays_one(uint32_t seed, bool pieces)
{
    enum { BLOCKS = 400, STEPS = 1500, OTHERS = 7168 };
    static CUdeviceptr at[BLOCKS];
    struct setup setup = setup_default();
    struct world w;
    setup.sim.stepped = setup.sim.detect_races = false;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUmemGenericAllocationHandle handle = others_handle(&w, OTHERS + seed * 37 % 300);
    int shortages = 0;
    for (int i = 0; i < STEPS; i++) {
        seed = seed * 1664525 + 1013904223;
        int k = (int)(seed >> 8) % BLOCKS;
        if (at[k]) {
            give(&w, at[k], s);
            at[k] = 0;
            continue;
        }
        seed = seed * 1664525 + 1013904223;
        size_t bytes = (1 + (seed >> 8) % (seed >> 28 ? 40 : 200)) * PAGE;
        if (pieces && seed >> 31)
            bytes = (1 + (seed >> 8) % 2000) << 10;
        vpmm_status status = vpmm_malloc(w.pool, bytes, s, &at[k]);
        require(status == VPMM_SUCCESS || status == VPMM_ERROR_OUT_OF_MEMORY, "%s", vpmm_last_error());
        if (status == VPMM_SUCCESS)
            continue;
        shortages++;
        must_work(vpmm_trim(w.pool, 0, NULL));
        require(vpmm_malloc(w.pool, bytes, s, &at[k]) == VPMM_ERROR_OUT_OF_MEMORY,
                "step %d: %zu bytes were refused, and are there after a trim", i, bytes);
        at[k] = 0;
    }
    cr_expect_gt(shortages, 100);
    for (int k = 0; k < BLOCKS; k++) {
        if (at[k])
            give(&w, at[k], s);
        at[k] = 0;
    }
    cr_expect_eq(w.driver->cuMemRelease(handle), CUDA_SUCCESS);
    world_audit(&w);
    world_close(&w);
}

Test(limits, what_is_refused_is_refused_after_a_trim, .timeout = 120)
{
    needs_simulator();
    for (uint32_t seed = 1; seed <= 12; seed++)
        a_shortage_stays_one(seed, seed % 2);
}

/*
 * (320)(-192)[-1][1] of pages of 256 subpages, and at first the free ones begin with a slab without a slice: so the
 * subpages and the page behind them serve 447 when everything has been taken back, and not before.
 */
Test(limits, a_piece_fits_in_what_is_taken_back_and_the_page_behind_it)
{
    enum { SUBPAGE = 8 << 10, LONG = 320, WANTED = 447 };
    struct setup setup = setup_default();
    struct world w;
    setup.pool.extent_size = PAGE;
    setup.pool.max_mapped = 4 * PAGE;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr cut = take_bytes(&w, (size_t)LONG * SUBPAGE, s), behind = take(&w, 1, s), last = take(&w, 1, s);
    CUdeviceptr slice = take_bytes(&w, 1000, s);
    cr_assert_eq(slice, cut + (size_t)LONG * SUBPAGE);
    give(&w, slice, s);
    give(&w, behind, s);
    world_drain(&w);
    CUdeviceptr p = take_bytes(&w, (size_t)WANTED * SUBPAGE, s);
    cr_expect_eq(p, slice);
    give(&w, p, s);
    give(&w, cut, s);
    give(&w, last, s);
    world_close(&w);
}

static bool blames_others(void)
{
    return strstr(vpmm_last_error(), "others hold the rest") != NULL;
}

/* Others are said to hold what is missing where neither the pool's cap nor its own memory is in the way. */
Test(limits, a_shortage_blames_others_for_what_they_hold)
{
    needs_simulator();
    struct setup setup = setup_default();
    struct world w;
    vpmm_pool *other;
    CUdeviceptr q;
    setup.sim.memory_bytes = 64 * PAGE;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr p = take(&w, 50, s);
    vpmm_config capped = setup.pool, async = setup.pool;
    capped.driver = async.driver = w.driver;
    capped.max_mapped = 32 * PAGE;
    must_work(vpmm_pool_create(&capped, &other));
    must_fail(VPMM_ERROR_OUT_OF_MEMORY, vpmm_malloc(other, 20 * PAGE, s, &q));
    cr_expect(blames_others() && strstr(vpmm_last_error(), "where 29360128 are free:"), "%s", vpmm_last_error());
    vpmm_sim_fail(w.sim, "cuMemGetInfo", 1, CUDA_ERROR_INVALID_VALUE, true);
    must_fail(VPMM_ERROR_OUT_OF_MEMORY, vpmm_malloc(other, 20 * PAGE, s, &q));
    vpmm_sim_fail(w.sim, "cuMemGetInfo", 0, CUDA_SUCCESS, false);
    cr_expect(blames_others() && !strstr(vpmm_last_error(), "are free"), "%s", vpmm_last_error());
    must_fail(VPMM_ERROR_OUT_OF_MEMORY, vpmm_malloc(other, 33 * PAGE, s, &q));
    cr_expect(!blames_others(), "%s", vpmm_last_error());
    must_work(vpmm_pool_set_attribute(other, VPMM_ATTRIBUTE_MAX_MAPPED, 2 * PAGE - 1));
    must_fail(VPMM_ERROR_OUT_OF_MEMORY, vpmm_malloc(other, 2 * PAGE - 1, s, &q)); /* of which two pages are mapped */
    cr_expect(!blames_others(), "%s", vpmm_last_error());
    must_work(vpmm_pool_destroy(other));
    give(&w, p, s);
    world_drain(&w);
    must_work(vpmm_trim(w.pool, 0, NULL));
    async.small = VPMM_SMALL_ASYNC;
    async.page_size = 32 * PAGE;
    must_work(vpmm_pool_create(&async, &other));
    must_work(vpmm_malloc(other, 31 * PAGE, s, &p)); /* less than a page: of the driver's pool */
    must_fail(VPMM_ERROR_OUT_OF_MEMORY, vpmm_malloc(other, 64 * PAGE, s, &q));
    cr_expect(!blames_others(), "%s", vpmm_last_error());
    must_work(vpmm_free(other, p, s));
    must_work(vpmm_pool_destroy(other));
    world_close(&w);
}

/* What is counted of a page that is cut has 20 bits, in subpages. */
Test(limits, pages_that_are_too_long_are_not_cut)
{
    needs_simulator();
    struct setup setup = setup_default();
    struct world w;
    setup.sim.memory_bytes = (size_t)64 << 30;
    setup.pool.va_size = (size_t)1 << 40;
    setup.pool.page_size = (size_t)16 << 30;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr p = take_bytes(&w, 1000, s), pages = take_bytes(&w, (size_t)17 << 30, s);
    vpmm_stats stats = stats_of(&w);
    cr_expect_eq(stats.slab_bytes, 0);
    cr_expect_eq(stats.hits_async, 1);
    cr_expect_eq(stats.live_bytes, (size_t)32 << 30);
    give(&w, p, s);
    give(&w, pages, s);
    must_fail(VPMM_ERROR_NOT_SUPPORTED, vpmm_pool_set_access(w.pool, 0, CU_MEM_ACCESS_FLAGS_PROT_READ));
    world_close(&w);
    setup.pool.graph = true; /* from the driver's pool nothing is had for a capture */
    refused_setting(&setup, VPMM_ERROR_NOT_SUPPORTED, "not of this size");
}

/*
 * Where streams do not wait for one another before a request fails, all of it is created. That refused, the ten pages
 * that the stream can wait for do, with as many as the device gave, and the host waits for nothing.
 */
Test(limits, all_that_a_full_device_gave_is_built_with)
{
    enum { SINGLES = 20 };
    struct setup setup = setup_default();
    setup.sim.memory_bytes = 32 * PAGE;
    setup.pool.extent_size = 4 * PAGE;
    setup.pool.reuse = VPMM_REUSE_COMPLETED;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w), t = world_stream(&w);
    CUdeviceptr p[SINGLES];
    for (int i = 0; i < SINGLES; i++)
        p[i] = take(&w, 1, s);
    keep_busy(&w, s);
    for (int i = 0; i < SINGLES; i += 2)
        give(&w, p[i], s);
    CUdeviceptr q = take(&w, 18, t); /* the device has 12 */
    cr_expect(world_pending(&w, s), "the host has waited");
    cr_expect_eq(stats_of(&w).unwound_create, 1);
    fill(&w, q, 18, 2, t);
    expect_later(&w, q, 18, 2, t);
    world_audit(&w);
    give(&w, q, t);
    for (int i = 1; i < SINGLES; i += 2)
        give(&w, p[i], s);
    world_close(&w);
}

/* Whether streams may wait on the device or not: the device is asked at once, and at last. */
Test(limits, a_full_device_is_asked_twice)
{
    static const vpmm_reuse settings[] = {VPMM_REUSE_COMPLETED, VPMM_REUSE_WAIT_DEVICE};
    for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++) {
        struct setup setup = setup_default();
        setup.sim.memory_bytes = 32 * PAGE;
        setup.pool.reuse = settings[i];
        struct world w;
        world_open(&w, &setup);
        CUstream s = world_stream(&w);
        CUdeviceptr p = take(&w, 20, s), q;
        must_fail(VPMM_ERROR_OUT_OF_MEMORY, vpmm_malloc(w.pool, 18 * PAGE, s, &q));
        cr_expect_eq(stats_of(&w).unwound_create, 2);
        give(&w, p, s);
        world_close(&w);
    }
}

/*
 * Eight handles have moved, and then been given back at their new place; the device has them when their old addresses
 * are unmapped, which it is before the work of another stream has ended.
 */
Test(limits, what_a_full_device_is_given_back_is_asked_for_before_others_work_is_waited_for)
{
    enum { SINGLES = 16, MOVED = 8 };
    struct setup setup = setup_default();
    setup.sim.memory_bytes = 32 * PAGE;
    setup.pool.extent_size = PAGE;
    setup.pool.reuse = VPMM_REUSE_COMPLETED;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w), t = world_stream(&w), busy = world_stream(&w);
    CUdeviceptr p[SINGLES];
    size_t released;
    for (int i = 0; i < SINGLES; i++)
        p[i] = take(&w, 1, s);
    CUdeviceptr rest = take(&w, 12, t), at_work = take(&w, 4, busy);
    keep_busy(&w, s);
    keep_busy(&w, busy);
    give(&w, at_work, busy);
    for (int i = 0; i < SINGLES; i += 2)
        give(&w, p[i], s);
    CUdeviceptr moved = take(&w, MOVED, s);
    give(&w, moved, t); /* which has not used it */
    world_run(&w, t, SIZE_MAX);
    must_work(vpmm_trim(w.pool, 24 * PAGE, &released));
    cr_assert_eq(stats_of(&w).quarantined_bytes, MOVED * PAGE);
    world_run(&w, s, SIZE_MAX);
    CUdeviceptr q = take(&w, MOVED, t);
    cr_expect(world_pending(&w, busy), "the host has waited");
    cr_expect_eq(stats_of(&w).unwound_create, 1);
    give(&w, q, t);
    give(&w, rest, t);
    for (int i = 1; i < SINGLES; i += 2)
        give(&w, p[i], s);
    world_close(&w);
}

Test(limits, memory_that_waits_is_used_before_a_request_fails)
{
    struct setup setup = setup_default();
    setup.sim.memory_bytes = 32 * PAGE;
    setup.pool.extent_size = PAGE;
    setup.pool.reuse = VPMM_REUSE_COMPLETED;
    struct world w;
    world_open(&w, &setup);
    CUstream busy = world_stream(&w), asking = world_stream(&w);
    CUdeviceptr p = take(&w, 30, busy);
    fill(&w, p, 30, 1, busy);
    give(&w, p, busy);
    CUdeviceptr q = take(&w, 31, asking);
    fill(&w, q, 31, 2, asking);
    expect_later(&w, q, 31, 2, asking);
    world_audit(&w);
    give(&w, q, asking);
    world_close(&w);
}

static void open_small(struct world *w, bool captures)
{
    struct setup setup = setup_default();
    setup.sim.memory_bytes = 64 * PAGE;
    setup.pool.small = VPMM_SMALL_ASYNC;
    setup.pool.captures = captures;
    world_open(w, &setup);
}

Test(limits, a_small_request_waits_for_pages_that_are_at_work)
{
    needs_simulator();
    struct world w;
    open_small(&w, false);
    CUstream s = world_stream(&w);
    CUdeviceptr p = take(&w, 62, s), small[16];
    fill(&w, p, 62, 1, s);
    give(&w, p, s);
    for (int i = 0; i < 16; i++)
        small[i] = take_bytes(&w, PAGE / 2, s);
    for (int i = 0; i < 16; i++)
        give(&w, small[i], s);
    world_close(&w);
}

/* The same the other way round. */
static void pages_wait_for_small_memory(bool captures)
{
    needs_simulator();
    struct world w;
    CUdeviceptr p[100];
    open_small(&w, captures);
    CUstream s = world_stream(&w), t = world_stream(&w);
    for (int i = 0; i < 100; i++)
        p[i] = take_bytes(&w, PAGE / 2, s);
    fill(&w, p[99], 1, 1, s);
    keep_busy(&w, s);
    for (int i = 0; i < 100; i++)
        give(&w, p[i], s);
    give(&w, take(&w, 40, t), t);
    world_close(&w);
}

Test(limits, pages_wait_for_small_memory_that_is_at_work)
{
    pages_wait_for_small_memory(false);
}
Test(limits, pages_wait_for_small_memory_of_streams_that_may_capture)
{
    pages_wait_for_small_memory(true);
}

/* A call that fails leaves the thread's mode as it was, though the driver has changed it and said that it has not. */
Test(limits, a_mode_of_captures_that_was_taken_is_given_back)
{
    needs_simulator();
    struct stage stage;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    stage_open(&stage, NULL);
    cr_assert_eq(stage.w.driver->cuThreadExchangeStreamCaptureMode(&mode), CUDA_SUCCESS);
    vpmm_sim_fail_after(stage.w.sim, "cuThreadExchangeStreamCaptureMode", 1, CUDA_ERROR_UNKNOWN, false);
    must_fail(VPMM_ERROR_DRIVER, vpmm_poll(stage.w.pool));
    cr_assert_eq(stage.w.driver->cuThreadExchangeStreamCaptureMode(&mode), CUDA_SUCCESS);
    cr_expect_eq(mode, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    give(&stage.w, stage.kept, stage.s);
    world_close(&stage.w);
}

/* Its end cannot be seen by an event, and its context is not the one of the stream that asks. */
Test(limits, memory_of_a_lost_stream_of_another_context_is_waited_for)
{
    needs_simulator();
    struct setup setup = setup_default();
    setup.pool.max_mapped = 8 * PAGE;
    struct world w;
    world_open(&w, &setup);
    CUstream asking = world_stream(&w);
    CUcontext second = NULL;
    cr_assert_eq(w.driver->cuCtxCreate(&second, 0, w.device), CUDA_SUCCESS);
    CUstream lost = world_stream(&w);
    CUdeviceptr p = take(&w, 8, lost);
    fill(&w, p, 8, 1, lost);
    vpmm_sim_fail(w.sim, "cuEventRecord", 1, CUDA_ERROR_OUT_OF_MEMORY, false);
    give(&w, p, lost);
    world_stream_destroy(&w, lost);
    CUstream next = world_stream(&w);
    cr_assert_eq(next, lost, "the simulator does not hand the handle out again");
    cr_assert_eq(w.driver->cuCtxSetCurrent(w.context), CUDA_SUCCESS);
    must_fail(VPMM_ERROR_INVALID_POINTER, vpmm_free(w.pool, 0x1000, next)); /* the pool meets the new stream */
    CUdeviceptr q = take(&w, 8, asking);
    cr_expect_eq(q, p);
    fill(&w, q, 8, 2, asking);
    expect_later(&w, q, 8, 2, asking);
    world_run(&w, asking, SIZE_MAX);
    world_step(&w);
    world_audit(&w);
    give(&w, q, asking);
    must_work(vpmm_pool_destroy(w.pool));
    w.pool = NULL;
    world_stream_destroy(&w, next);
    cr_assert_eq(w.driver->cuCtxDestroy(second), CUDA_SUCCESS);
    world_close(&w);
}

Test(limits, several_chunks)
{
    struct setup setup = setup_default();
    setup.pool.va_size = 32 * PAGE;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr p[8], rest[8];
    for (size_t i = 0; i < 8; i++) {
        p[i] = take(&w, 20, s);
        fill(&w, p[i], 20, (uint32_t)i, s);
    }
    for (size_t i = 0; i < 8; i++)
        rest[i] = take(&w, 12, s);
    world_audit(&w);
    cr_expect_eq(stats_of(&w).reserved_bytes, 8 * 32 * PAGE);
    for (size_t i = 0; i < 8; i++) {
        expect_later(&w, p[i], 20, (uint32_t)i, s);
        give(&w, p[i], s);
        give(&w, rest[i], s);
    }
    world_drain(&w);
    world_audit(&w);
    must_work(vpmm_trim(w.pool, 0, NULL)); /* holes do not grow together where chunks meet */
    world_audit(&w);
    world_close(&w);
}

Test(limits, a_request_longer_than_a_chunk)
{
    struct setup setup = setup_default();
    setup.pool.va_size = 32 * PAGE;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr p = 0;
    clear_words();
    vpmm_status status = vpmm_malloc(w.pool, 50 * PAGE, s, &p);
    if (status == VPMM_SUCCESS) {
        fill(&w, p, 50, 50, s);
        expect_later(&w, p, 50, 50, s);
        give(&w, p, s);
    } else {
        cr_expect(status == VPMM_ERROR_OUT_OF_ADDRESS_SPACE || status == VPMM_ERROR_INVALID_VALUE, "%s",
                  vpmm_status_name(status));
        cr_expect(spoke());
    }
    world_audit(&w);
    world_close(&w);
}

Test(limits, out_of_addresses_and_back)
{
    struct setup setup = setup_default();
    setup.pool.va_size = 64 * PAGE;
    setup.sim.va_bytes = 4 * 64 * PAGE;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr p[8], more = 0xdead;
    size_t n = 0;
    vpmm_status status;
    while ((status = vpmm_malloc(w.pool, 64 * PAGE, s, &p[n])) == VPMM_SUCCESS) {
        fill(&w, p[n], 64, (uint32_t)n, s);
        cr_assert_lt(++n, 8);
    }
    cr_expect_eq(status, VPMM_ERROR_OUT_OF_ADDRESS_SPACE, "%s", vpmm_status_name(status));
    cr_expect_eq(n, 4);
    must_fail(VPMM_ERROR_OUT_OF_ADDRESS_SPACE, vpmm_malloc(w.pool, 64 * PAGE, s, &more));
    cr_expect_eq(more, 0xdead);
    world_audit(&w);
    for (size_t i = 0; i < n; i++) {
        expect_later(&w, p[i], 64, (uint32_t)i, s);
        give(&w, p[i], s);
    }
    world_drain(&w);
    for (size_t i = 0; i < n; i++)
        p[i] = take(&w, 64, s);
    for (size_t i = 0; i < n; i++)
        give(&w, p[i], s);
    world_audit(&w);
    world_close(&w);
}

/* --- trim and dump --------------------------------------------------------------------------------------------------
 */

Test(limits, trim_keeps_what_it_is_told_to_keep)
{
    struct setup setup = setup_default();
    setup.pool.extent_size = PAGE;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    CUdeviceptr kept = take(&w, 4, s);
    give(&w, take(&w, 40, s), s);
    world_drain(&w);
    uint64_t mapped = stats_of(&w).mapped_bytes;
    size_t released = 0;
    must_work(vpmm_trim(w.pool, 20 * PAGE, &released));
    cr_expect_eq(released, mapped - 20 * PAGE);
    cr_expect_eq(stats_of(&w).mapped_bytes, 20 * PAGE);
    must_work(vpmm_trim(w.pool, 0, &released));
    cr_expect_eq(released, 16 * PAGE);
    cr_expect_eq(stats_of(&w).mapped_bytes, 4 * PAGE, "live memory stays");
    must_work(vpmm_trim(w.pool, 0, &released));
    cr_expect_eq(released, 0);
    world_audit(&w);
    if (w.sim != NULL)
        cr_expect_eq(vpmm_sim_used_bytes(w.sim), 4 * PAGE);
    give(&w, kept, s);
    world_close(&w);
}

/* Though it is not whole pages. */
Test(limits, trim_keeps_no_more_than_it_is_told_to_keep)
{
    struct setup setup = setup_default();
    struct world w;
    CUdeviceptr p[4];
    setup.pool.cache_bytes = 0; /* what leaves a cache in the trim is marked then, and has not passed */
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    for (int i = 0; i < 4; i++)
        p[i] = take(&w, 1, s);
    for (int i = 0; i < 4; i++)
        give(&w, p[i], s);
    world_drain(&w);
    must_work(vpmm_trim(w.pool, 3 * PAGE - 1, NULL));
    cr_expect_leq(stats_of(&w).mapped_bytes, 3 * PAGE - 1);
    world_close(&w);
}

/* Only a trim to nothing is of what the driver's pool holds too. */
Test(limits, trim_that_keeps_something_leaves_the_driver_s_pool)
{
    needs_simulator();
    struct setup setup = setup_default();
    struct world w;
    setup.pool.small = VPMM_SMALL_ASYNC;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    give(&w, take_bytes(&w, 1000, s), s);
    world_drain(&w);
    world_audit(&w); /* what the driver's pool serves is among the frees too */
    uint64_t before = world_calls(&w, "cuMemPoolTrimTo");
    must_work(vpmm_trim(w.pool, PAGE, NULL));
    cr_expect_eq(world_calls(&w, "cuMemPoolTrimTo"), before);
    must_work(vpmm_trim(w.pool, 0, NULL));
    cr_expect_gt(world_calls(&w, "cuMemPoolTrimTo"), before);
    world_close(&w);
}

Test(limits, trim_leaves_memory_whose_fence_has_not_passed)
{
    struct world w;
    world_open(&w, NULL);
    CUstream s = world_stream(&w);
    CUdeviceptr p = take(&w, 8, s);
    fill(&w, p, 8, 8, s);
    give(&w, p, s);
    size_t released = SIZE_MAX;
    must_work(vpmm_trim(w.pool, 0, &released));
    cr_expect_eq(released, 0);
    cr_expect_geq(stats_of(&w).reusable_bytes, 8 * PAGE);
    world_audit(&w);
    world_close(&w);
}

Test(limits, the_dump_names_every_statistic_and_every_byte)
{
    struct stage t;
    stage_open(&t, NULL);
    char *text = NULL;
    size_t length = 0;
    FILE *out = open_memstream(&text, &length);
    must_work(vpmm_dump(t.w.pool, out));
    fclose(out);
#define NAMED(name, kind, help) cr_expect(strstr(text, #name) != NULL, "%s is not in the dump", #name);
    VPMM_STATS(NAMED)
#undef NAMED
    free(text);
    uint64_t pages = 0;
    for (const char *p = layout_whole(&t.w); *p != 0; p++)
        if (*p >= '0' && *p <= '9')
            pages += strtoull(p, (char **)&p, 10);
    cr_expect_eq(pages * PAGE, t.before.reserved_bytes);
    stage_close(&t);
}

/* Pages that are cut come with some more for the next requests; where there is no room for these, without. */
Test(limits, a_small_request_does_not_fail_for_its_surplus)
{
    enum { PIECE = 1 << 20, PIECES = 64 };
    struct world w;
    world_open(&w, NULL);
    CUstream s = world_stream(&w);
    CUdeviceptr piece[PIECES + 2], page[PIECES];
    int pages = 0;
    for (int i = 0; i < PIECES; i++)
        piece[i] = take_bytes(&w, PIECE, s);
    while (stats_of(&w).reusable_bytes && pages < PIECES)
        page[pages++] = take(&w, 1, s);
    must_work(vpmm_pool_set_attribute(w.pool, VPMM_ATTRIBUTE_MAX_MAPPED, stats_of(&w).mapped_bytes + PAGE));
    for (int i = 0; i < 2; i++)
        piece[PIECES + i] = take_bytes(&w, PIECE, s);
    for (int i = 0; i < PIECES + 2; i++)
        give(&w, piece[i], s);
    while (pages)
        give(&w, page[--pages], s);
    world_close(&w);
}

Test(limits, the_largest_hole_is_in_bytes)
{
    struct world w;
    world_open(&w, NULL);
    CUstream s = world_stream(&w);
    CUdeviceptr p = take(&w, 1, s);
    cr_expect_gt(stats_of(&w).hole_bytes, 0);
    cr_expect_eq(stats_of(&w).largest_hole_bytes, stats_of(&w).hole_bytes, "there is one, behind the page");
    give(&w, p, s);
    world_close(&w);
}

Test(limits, a_dump_that_is_not_written_is_told)
{
    struct world w;
    world_open(&w, NULL);
    FILE *full = fopen("/dev/full", "w");
    cr_assert(full);
    setvbuf(full, NULL, _IONBF, 0);
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_dump(w.pool, full));
    fclose(full);
    world_close(&w);
}

Test(limits, a_pool_without_pages_has_no_reaper)
{
    struct setup setup = setup_default();
    setup.sim.vmm = false;
    setup.pool.reaper = true;
    struct world w;
    vpmm_health health;
    world_open(&w, &setup);
    must_work(vpmm_health_get(w.pool, &health));
    cr_expect_not(health.reaper);
    world_close(&w);
}

/* However much is cut, the request that makes more of it makes eight handles beyond its own, no more. */
Test(limits, the_surplus_of_small_requests_is_bounded)
{
    enum { PIECE = 1 << 20, PIECES = 600, MOST = 8 };
    static CUdeviceptr piece[PIECES];
    struct world w;
    uint64_t most = 0;
    world_open(&w, NULL);
    CUstream s = world_stream(&w);
    for (int i = 0; i < PIECES; i++) {
        uint64_t before = stats_of(&w).mapped_bytes;
        piece[i] = take_bytes(&w, PIECE, s);
        uint64_t grown = stats_of(&w).mapped_bytes - before;
        most = grown > most ? grown : most;
    }
    cr_expect_eq(most, (1 + MOST) * PAGE, "%lu pages at once", most / PAGE);
    for (int i = 0; i < PIECES; i++)
        give(&w, piece[i], s);
    world_close(&w);
}
