/*
 * A device's default pool, which is one for all who ask: over a libcuda.so.1 on the simulated GPU, where there is no
 * other.
 */
#include "support.h"

#include <dlfcn.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <vpmm/observe.h>

/* The library asks for it by its name, and gets the one that is loaded. */
static void *load_driver(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver)
        driver = dlopen(VPMM_FAKE_CUDA, RTLD_NOW);
    if (!driver)
        cr_skip_test("there is no libcuda.so.1, and " VPMM_FAKE_CUDA " is not built");
    return driver;
}

static void *ask(void *pool)
{
    must_work(vpmm_pool_default(0, pool));
    return NULL;
}

Test(default_pool, threads_that_ask_at_once_get_one)
{
    enum { THREADS = 8 };
    pthread_t thread[THREADS];
    vpmm_pool *pool[THREADS];
    load_driver();
    for (int i = 0; i < THREADS; i++)
        cr_assert_eq(pthread_create(&thread[i], NULL, ask, &pool[i]), 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(thread[i], NULL);
    for (int i = 0; i < THREADS; i++)
        cr_expect_eq(pool[i], pool[0]);
}

Test(default_pool, it_is_not_destroyed)
{
    vpmm_pool *pool, *again;
    CUdeviceptr memory;
    load_driver();
    must_work(vpmm_pool_default(0, &pool));
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_pool_destroy(pool));
    must_work(vpmm_pool_default(0, &again));
    cr_expect_eq(again, pool);
    must_work(vpmm_malloc(pool, 1 << 20, NULL, &memory));
    must_work(vpmm_free(pool, memory, NULL));
    must_work(vpmm_trim(pool, 0, NULL));
}

Test(default_pool, each_device_has_its_own)
{
    vpmm_pool *pool[2];
    vpmm_device device;
    needs_simulator();
    setenv("FAKE_DEVICES", "2", 1);
    load_driver();
    for (int i = 0; i < 2; i++) {
        must_work(vpmm_pool_default(i, &pool[i]));
        must_work(vpmm_device_get(pool[i], &device));
        cr_expect_eq(device.ordinal, i);
    }
    cr_expect_neq(pool[0], pool[1]);
}

Test(default_pool, a_wrong_environment_is_said)
{
    vpmm_pool *pool;
    load_driver();
    setenv("VPMM_PAGE_SIZE", "odd", 1);
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_pool_default(0, &pool));
    unsetenv("VPMM_PAGE_SIZE");
    must_work(vpmm_pool_default(0, &pool)); /* nothing is left of the refusal */
}

/* Of the libcuda.so.1 over the simulated GPU: calls of this name wait until NULL is said; and whether one does. */
static struct {
    void (*hold)(const char *call);
    bool (*holds)(void);
} fake;

static void find_holds(void *driver)
{
    void *hold = dlsym(driver, "fake_hold"), *holds = dlsym(driver, "fake_holds");
    if (!hold || !holds)
        cr_skip_test("no thread can be stopped in a real driver");
    memcpy(&fake.hold, &hold, sizeof hold);
    memcpy(&fake.holds, &holds, sizeof holds);
}

/* In the child of a fork beside the thread that makes it, which is in the driver, and which the child has not. */
static int ask_in_child(void)
{
    vpmm_pool *pool;
    alarm(30);
    clear_words();
    return vpmm_pool_default(0, &pool) == VPMM_ERROR_NOT_SUPPORTED && spoke() ? 0 : 1;
}

Test(default_pool, a_child_is_answered, .timeout = 60)
{
    pthread_t maker;
    vpmm_pool *pool, *again;
    int status = -1;
    find_holds(load_driver());
    fake.hold("cuDevicePrimaryCtxRetain");
    cr_assert_eq(pthread_create(&maker, NULL, ask, &pool), 0);
    while (!fake.holds())
        usleep(100);
    pid_t child = fork();
    if (!child) /* no assertion there: Criterion would take the message for a stranger's */
        _exit(ask_in_child());
    pid_t waited = waitpid(child, &status, 0);
    fake.hold(NULL);
    pthread_join(maker, NULL);
    cr_assert_gt(child, 0);
    cr_assert_eq(waited, child);
    cr_expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child ends with status %#x", (unsigned)status);
    must_work(vpmm_pool_default(0, &again)); /* the parent goes on */
    cr_expect_eq(again, pool);
}
