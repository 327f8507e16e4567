#include <criterion/criterion.h>
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include <vpmm/vpmm.h>

#include "base/status.h"

static bool machine_has_libcuda(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    return library != NULL; /* never closed, as in the library */
}

Test(driver_cuda, without_libcuda_null_and_words)
{
    if (machine_has_libcuda())
        cr_skip_test("this machine has libcuda.so.1");
    cr_assert_null(vpmm_driver_cuda());
    cr_assert(strstr(vpmm_last_error(), "libcuda.so.1"), "%s", vpmm_last_error());
}

Test(driver_cuda, the_second_call_says_the_same)
{
    if (machine_has_libcuda())
        cr_skip_test("this machine has libcuda.so.1");
    char first[512];
    cr_assert_null(vpmm_driver_cuda());
    snprintf(first, sizeof(first), "%s", vpmm_last_error());
    fail(VPMM_ERROR_BUSY, "something else");
    cr_assert_null(vpmm_driver_cuda());
    cr_assert_str_eq(vpmm_last_error(), first);
}

struct seen {
    const vpmm_driver *driver;
    char words[512];
};

static void *ask(void *argument)
{
    struct seen *seen = argument;
    seen->driver = vpmm_driver_cuda();
    snprintf(seen->words, sizeof(seen->words), "%s", vpmm_last_error());
    return NULL;
}

Test(driver_cuda, every_thread_is_told_the_same)
{
    enum { THREADS = 8 };
    pthread_t thread[THREADS];
    static struct seen seen[THREADS];
    for (int i = 0; i < THREADS; i++)
        cr_assert_eq(pthread_create(&thread[i], NULL, ask, &seen[i]), 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(thread[i], NULL);
    for (int i = 0; i < THREADS; i++) {
        cr_assert_eq(seen[i].driver, seen[0].driver);
        cr_assert_str_eq(seen[i].words, seen[0].words);
        cr_assert((seen[i].driver == NULL) == (seen[i].words[0] != '\0'));
    }
}

Test(driver_cuda, with_libcuda_every_required_entry_is_there)
{
    const vpmm_driver *driver = vpmm_driver_cuda();
    if (!driver)
        cr_skip_test("no libcuda");
    cr_assert_eq(driver->size, sizeof(vpmm_driver));
#define CHECK_ENTRY(name, version, parameters, arguments)                                                              \
    cr_assert(driver->name || (version) > 11080, "%s is NULL", #name);
    VPMM_DRIVER_ENTRIES(CHECK_ENTRY)
#undef CHECK_ENTRY
    int version = 0;
    cr_assert_eq(driver->cuDriverGetVersion(&version), CUDA_SUCCESS);
    cr_assert_geq(version, 11080);
}

Test(status, names_and_words)
{
    cr_assert_str_eq(vpmm_status_name(VPMM_SUCCESS), "VPMM_SUCCESS");
    cr_assert_str_eq(vpmm_status_name(VPMM_ERROR_HOST_MEMORY), "VPMM_ERROR_HOST_MEMORY");
    cr_assert_str_eq(vpmm_status_name((vpmm_status)99), "VPMM_ERROR_UNKNOWN");
    cr_assert_str_eq(vpmm_last_error(), "");
    cr_assert_eq(fail(VPMM_ERROR_BUSY, "%d of %s", 3, "them"), VPMM_ERROR_BUSY);
    cr_assert_str_eq(vpmm_last_error(), "3 of them");
    fail(VPMM_ERROR_BUSY, "while destroying: %s", vpmm_last_error());
    cr_assert_str_eq(vpmm_last_error(), "while destroying: 3 of them");
}

Test(status, long_words_are_cut)
{
    char text[2000];
    memset(text, 'x', sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    fail(VPMM_ERROR_DRIVER, "%s", text);
    cr_assert_eq(strlen(vpmm_last_error()), 511);
}

static void *read_words_and_fail(void *argument)
{
    snprintf(argument, 512, "%s", vpmm_last_error());
    fail(VPMM_ERROR_BUSY, "its own");
    return NULL;
}

Test(status, words_are_the_threads_own)
{
    char words[512] = "untouched";
    pthread_t thread;
    fail(VPMM_ERROR_BUSY, "mine");
    const char *mine = vpmm_last_error(); /* until this thread's next call, whatever others do */
    cr_assert_eq(pthread_create(&thread, NULL, read_words_and_fail, words), 0);
    pthread_join(thread, NULL);
    cr_assert_str_eq(words, "");
    cr_assert_str_eq(mine, "mine");
    cr_assert_str_eq(vpmm_last_error(), "mine");
}
