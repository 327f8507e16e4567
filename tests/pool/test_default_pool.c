/*
 * A device's default pool, which is one for all who ask: over a libcuda.so.1 on the simulated GPU, where there is no other.
 */
#include "support.h"

#include <dlfcn.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <vpmm/observe.h>

/* The library asks for it by its name, and gets the one that is loaded. */
static void load_driver(void)
{
    if (!dlopen("libcuda.so.1", RTLD_NOW) && !dlopen(VPMM_FAKE_CUDA, RTLD_NOW))
        cr_skip_test("there is no libcuda.so.1, and " VPMM_FAKE_CUDA " is not built");
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

/* In the child of a fork beside the thread that makes it: whichever the answer, it does not wait for that thread. */
static void ask_in_child(void)
{
    vpmm_pool *pool;
    alarm(30);
    vpmm_pool_default(0, &pool);
    _exit(0);
}

static atomic_bool asks;

static void *ask_for_it(void *pool)
{
    atomic_store(&asks, true);
    vpmm_pool_default(0, pool);
    return NULL;
}

static void fork_beside_maker(int turns)
{
    pthread_t thread;
    vpmm_pool *pool;
    int status = 0;
    pthread_create(&thread, NULL, ask_for_it, &pool);
    while (!atomic_load(&asks))
        ;
    usleep(50 + 20 * turns);
    pid_t child = fork();
    if (!child)
        ask_in_child();
    waitpid(child, &status, 0);
    _exit(!WIFEXITED(status));
}

Test(default_pool, a_child_is_answered, .timeout = 60)
{
    load_driver();
    for (int i = 0; i < 30; i++) {
        int status = 0;
        pid_t child = fork();
        if (!child) /* no assertion there: Criterion would take the message for a stranger's */
            fork_beside_maker(i);
        cr_assert_eq(waitpid(child, &status, 0), child);
        cr_expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "try %d: no answer", i);
    }
}
