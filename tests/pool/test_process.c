/*
 * The process around the pool: fork, exit with the reaper at work, teardown in any order, a driver that shuts down.
 *
 * What ends a process runs in one of its own: this program started again with VPMM_TEST_CHILD set, so that Criterion's
 * own exit handlers and threads have no part in it.
 */
#include "gpu.h"
#include "support.h"

#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <vpmm/observe.h>

static int thread_count(void)
{
    DIR *tasks = opendir("/proc/self/task");
    if (tasks == NULL)
        return -1;
    int count = 0;
    for (struct dirent *entry; (entry = readdir(tasks)) != NULL;)
        count += entry->d_name[0] != '.';
    closedir(tasks);
    return count;
}

/* Who has joined a thread may still see it for a while. */
static bool comes_down_to(int threads)
{
    for (int i = 0; i < 20000 && thread_count() > threads; i++)
        usleep(1000);
    return thread_count() <= threads;
}

/* --- what runs in a process of its own; the exit status is 0 or the line that failed --------------------------------
 */

#define child_needs(condition)                                                                                         \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            child_failed(__LINE__, #condition);                                                                        \
    } while (0)

static void child_failed(int line, const char *condition)
{
    fprintf(stderr, "line %d: %s: %s\n", line, condition, vpmm_last_error());
    _exit(1);
}

struct child_world {
    vpmm_sim *sim; /* NULL: a real GPU */
    const vpmm_driver *driver;
    vpmm_pool *pool;
    CUcontext context;
    CUstream s;
};

static struct child_world child_world(bool stepped, bool reaper)
{
    struct child_world w = {0};
    struct setup setup = setup_default();
    setup.sim.stepped = stepped;
    setup.pool.reaper = reaper;
    if (!gpu_chosen()) {
        w.sim = vpmm_sim_create(&setup.sim);
        child_needs(w.sim != NULL);
    }
    w.driver = setup.pool.driver = w.sim != NULL ? vpmm_sim_driver(w.sim) : vpmm_driver_cuda();
    child_needs(w.driver != NULL);
    child_needs(w.driver->cuInit(0) == CUDA_SUCCESS);
    child_needs(w.driver->cuDevicePrimaryCtxRetain(&w.context, 0) == CUDA_SUCCESS);
    child_needs(w.driver->cuCtxSetCurrent(w.context) == CUDA_SUCCESS);
    child_needs(vpmm_pool_create(&setup.pool, &w.pool) == VPMM_SUCCESS);
    child_needs(w.driver->cuStreamCreate(&w.s, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
    return w;
}

/* Leaves the reaper something to do: waiting memory, and old addresses. */
static void give_the_reaper_work(struct child_world *w)
{
    CUdeviceptr p[32], q = 0;
    for (int i = 0; i < 32; i++)
        child_needs(vpmm_malloc(w->pool, 2 * PAGE, w->s, &p[i]) == VPMM_SUCCESS);
    for (int i = 0; i < 32; i += 2) {
        child_needs(w->driver->cuMemsetD8Async(p[i], 1, 2 * PAGE, w->s) == CUDA_SUCCESS);
        child_needs(vpmm_free(w->pool, p[i], w->s) == VPMM_SUCCESS);
    }
    child_needs(vpmm_malloc(w->pool, 16 * PAGE, w->s, &q) == VPMM_SUCCESS);
    child_needs(vpmm_free(w->pool, q, w->s) == VPMM_SUCCESS);
}

static void exit_with_the_reaper_at_work(void)
{
    struct child_world w = child_world(false, true);
    give_the_reaper_work(&w);
    exit(0);
}

static void *exit_from_here(void *argument)
{
    struct child_world *w = argument;
    child_needs(w->driver->cuCtxSetCurrent(w->context) == CUDA_SUCCESS);
    give_the_reaper_work(w);
    exit(0);
}

static void exit_from_another_thread(void)
{
    struct child_world w = child_world(false, true);
    pthread_t thread;
    pthread_create(&thread, NULL, exit_from_here, &w);
    for (;;) {
        CUdeviceptr p = 0;
        if (vpmm_malloc(w.pool, PAGE, w.s, &p) == VPMM_SUCCESS)
            (void)vpmm_free(w.pool, p, w.s);
    }
}

/* A child has none of its parent's threads. Who waits for one there is let go by the C library, and not by others. */
static int joins_left = -1; /* -1: any number */

int __real_pthread_join(pthread_t thread, void **result);
int __wrap_pthread_join(pthread_t thread, void **result);

int __wrap_pthread_join(pthread_t thread, void **result)
{
    child_needs(joins_left);
    joins_left -= joins_left > 0;
    return __real_pthread_join(thread, result);
}

static void exit_after_fork(void)
{
    struct child_world w = child_world(false, true);
    give_the_reaper_work(&w);
    pid_t pid = fork();
    child_needs(pid >= 0);
    if (pid == 0) {
        joins_left = 0;
        exit(0); /* the parent's reaper is not here, and must not be waited for */
    }
    int status = -1;
    child_needs(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    give_the_reaper_work(&w);
    exit(0);
}

/* The child's own reaper is stopped, and the parent's is not waited for. */
static void exit_after_fork_with_a_pool(void)
{
    struct child_world w = child_world(false, true);
    give_the_reaper_work(&w);
    pid_t pid = fork();
    child_needs(pid >= 0);
    if (pid == 0) {
        struct child_world own = child_world(false, true);
        give_the_reaper_work(&own);
        joins_left = 1;
        exit(0);
    }
    int status = -1;
    child_needs(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    exit(0);
}

static void the_driver_shuts_down_first(void)
{
    struct child_world w = child_world(true, false);
    CUdeviceptr p = 0, small = 0, more = 0;
    child_needs(vpmm_malloc(w.pool, 4 * PAGE, w.s, &p) == VPMM_SUCCESS);
    child_needs(vpmm_malloc(w.pool, 100, w.s, &small) == VPMM_SUCCESS);
    give_the_reaper_work(&w);
    vpmm_sim_shutdown(w.sim);
    (void)vpmm_free(w.pool, p, w.s); /* each may fail, in words that are not printed */
    (void)vpmm_free(w.pool, small, w.s);
    child_needs(vpmm_malloc(w.pool, 100 * PAGE, w.s, &more) != VPMM_SUCCESS);
    (void)vpmm_poll(w.pool);
    (void)vpmm_trim(w.pool, 0, NULL);
    (void)vpmm_pool_destroy(w.pool);
    exit(0);
}

static void the_driver_shuts_down_under_the_reaper(void)
{
    struct child_world w = child_world(false, true);
    give_the_reaper_work(&w);
    vpmm_sim_shutdown(w.sim);
    CUdeviceptr p = 0;
    for (int i = 0; i < 100; i++)
        if (vpmm_malloc(w.pool, PAGE, w.s, &p) == VPMM_SUCCESS)
            (void)vpmm_free(w.pool, p, w.s);
    exit(0);
}

static void no_thread_before_one_is_asked_for(void)
{
    child_needs(thread_count() == 1);
    struct child_world quiet = child_world(true, false);
    child_needs(thread_count() == 1);
    give_the_reaper_work(&quiet);
    child_needs(thread_count() == 1);
    struct child_world busy = child_world(true, true);
    child_needs(thread_count() == 2);
    child_needs(vpmm_pool_destroy(busy.pool) == VPMM_ERROR_BUSY || comes_down_to(1));
    exit(0);
}

/* The signals that the thread blocks, if it is the reaper, which has begun when it has its name. */
static bool is_reaper(const char *task, unsigned long long *blocked)
{
    char path[300], line[256], name[32] = "";
    snprintf(path, sizeof path, "/proc/self/task/%s/status", task);
    FILE *status = fopen(path, "r");
    bool has_mask = false;
    while (status && !has_mask && fgets(line, sizeof line, status)) {
        (void)sscanf(line, "Name: %31s", name);
        has_mask = sscanf(line, "SigBlk: %llx", blocked) == 1;
    }
    if (status)
        fclose(status);
    return has_mask && strcmp(name, "vpmm-reaper") == 0;
}

static unsigned long long blocked_by_reaper(void)
{
    for (;;) { /* the test's time is limited */
        unsigned long long blocked = 0;
        bool found = false;
        DIR *tasks = opendir("/proc/self/task");
        child_needs(tasks != NULL);
        for (struct dirent *entry; !found && (entry = readdir(tasks)) != NULL;)
            found = is_reaper(entry->d_name, &blocked);
        closedir(tasks);
        if (found)
            return blocked;
        usleep(1000);
    }
}

/* One that the program's own threads block waits for them, for the reaper blocks all. Sent, it would be taken late. */
static void signals_are_the_program_s(void)
{
    sigset_t now;
    struct child_world w = child_world(true, true);
    give_the_reaper_work(&w);
    child_needs(!pthread_sigmask(SIG_SETMASK, NULL, &now) && !sigismember(&now, SIGUSR1) &&
                !sigismember(&now, SIGTERM));
    unsigned long long blocked = blocked_by_reaper();
    child_needs((blocked >> (SIGUSR1 - 1) & 1) && (blocked >> (SIGTERM - 1) & 1));
    _exit(0);
}

static const struct {
    const char *name;
    void (*run)(void);
} children[] = {
    {"exit_with_the_reaper_at_work", exit_with_the_reaper_at_work},
    {"exit_from_another_thread", exit_from_another_thread},
    {"exit_after_fork", exit_after_fork},
    {"exit_after_fork_with_a_pool", exit_after_fork_with_a_pool},
    {"the_driver_shuts_down_first", the_driver_shuts_down_first},
    {"the_driver_shuts_down_under_the_reaper", the_driver_shuts_down_under_the_reaper},
    {"no_thread_before_one_is_asked_for", no_thread_before_one_is_asked_for},
    {"signals_are_the_program_s", signals_are_the_program_s},
};

__attribute__((constructor)) static void become_the_child(void)
{
    const char *wanted = getenv("VPMM_TEST_CHILD");
    for (size_t i = 0; wanted != NULL && i < sizeof children / sizeof children[0]; i++)
        if (strcmp(children[i].name, wanted) == 0)
            children[i].run();
}

/* A pool that is alive at exit is no leak, but LeakSanitizer does not look into its page tables. */
static void expect_no_leak_report(void)
{
    char options[4096];
    const char *given = getenv("ASAN_OPTIONS");
    snprintf(options, sizeof options, "%s%sdetect_leaks=0", given != NULL ? given : "", given != NULL ? ":" : "");
    setenv("ASAN_OPTIONS", options, 1);
}

/* Ends well, within the test's time limit, and says nothing. */
static void child_ends_well(const char *name)
{
    int output[2];
    cr_assert_eq(pipe(output), 0);
    pid_t pid = fork();
    if (pid == 0) { /* no assertion here: Criterion would take the message for one of a stranger's */
        setenv("VPMM_TEST_CHILD", name, 1);
        expect_no_leak_report();
        unsetenv("BXFI_MAP"); /* by which Criterion's library would take the child for one of its workers */
        dup2(output[1], STDOUT_FILENO);
        dup2(output[1], STDERR_FILENO);
        alarm(30);
        execl("/proc/self/exe", name, (char *)NULL);
        _exit(127);
    }
    cr_assert_gt(pid, 0);
    close(output[1]);
    char said[4096];
    size_t length = 0;
    for (ssize_t n; (n = read(output[0], said + length, sizeof said - 1 - length)) > 0;)
        length += (size_t)n;
    said[length] = 0;
    close(output[0]);
    int status = -1;
    cr_assert_eq(waitpid(pid, &status, 0), pid);
    cr_expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%s ends with status %#x", name, (unsigned)status);
    cr_expect_eq(length, 0, "%s says: %s", name, said);
}

static int times(void)
{
    return gpu_chosen() ? 3 : 20; /* a real driver takes its time to start */
}

Test(process, exit_with_the_reaper_at_work)
{
    for (int i = 0; i < times(); i++)
        child_ends_well("exit_with_the_reaper_at_work");
}
Test(process, exit_from_another_thread)
{
    for (int i = 0; i < times(); i++)
        child_ends_well("exit_from_another_thread");
}
Test(process, exit_after_fork)
{
    for (int i = 0; i < times(); i++)
        child_ends_well("exit_after_fork");
}
Test(process, exit_after_fork_with_a_pool)
{
    needs_simulator();
    child_ends_well("exit_after_fork_with_a_pool");
}
Test(process, the_driver_shuts_down_first)
{
    needs_simulator();
    child_ends_well("the_driver_shuts_down_first");
}
Test(process, the_driver_shuts_down_under_the_reaper)
{
    needs_simulator();
    for (int i = 0; i < times(); i++)
        child_ends_well("the_driver_shuts_down_under_the_reaper");
}
Test(process, signals_are_the_program_s)
{
    needs_simulator(); /* a real driver has threads of its own */
    child_ends_well("signals_are_the_program_s");
}
Test(process, no_thread_before_one_is_asked_for)
{
    needs_simulator();
    child_ends_well("no_thread_before_one_is_asked_for");
}

/* --- fork -----------------------------------------------------------------------------------------------------------
 */

/* For the fork's sake, which the words say: a call may have another reason too. */
static bool refused_with_words(vpmm_status status)
{
    bool good = status == VPMM_ERROR_NOT_SUPPORTED && strstr(vpmm_last_error(), "forked");
    clear_words();
    return good;
}

static void count_range(void *count, const vpmm_range *range)
{
    *(int *)count += range->state == VPMM_RANGE_LIVE;
}

static void count_allocation(void *count, const vpmm_allocation *allocation)
{
    *(int *)count += allocation->bytes == 2 * PAGE;
}

/* What only looks: 0, or the number of the first that did not show `kept`, two pages, as all that lives. */
static int looks_of(vpmm_pool *pool, CUdeviceptr kept)
{
    static vpmm_call_counts calls[VPMM_DRIVER_CALLS];
    vpmm_stats stats;
    vpmm_latency latency;
    vpmm_health health;
    vpmm_device device;
    vpmm_allocation allocation;
    uint64_t value;
    int ranges = 0, allocations = 0;
    FILE *nowhere = fopen("/dev/null", "w");
    if (vpmm_stats_get(pool, &stats) != VPMM_SUCCESS || stats.requested_bytes != 2 * PAGE)
        return 20;
    if (!nowhere || vpmm_dump(pool, nowhere) != VPMM_SUCCESS)
        return 21;
    fclose(nowhere);
    if (vpmm_pool_get_attribute(pool, VPMM_ATTRIBUTE_PEAK_MAPPED, &value) != VPMM_SUCCESS || !value)
        return 22;
    if (!vpmm_pool_driver(pool))
        return 23;
    if (vpmm_calls_get(pool, calls) != VPMM_SUCCESS || vpmm_latency_get(pool, &latency) != VPMM_SUCCESS)
        return 24;
    if (vpmm_health_get(pool, &health) != VPMM_SUCCESS || health.lost)
        return 25;
    if (vpmm_device_get(pool, &device) != VPMM_SUCCESS || device.page_size != PAGE)
        return 26;
    if (vpmm_ranges_visit(pool, count_range, &ranges) != VPMM_SUCCESS || ranges != 1)
        return 27;
    if (vpmm_allocations_visit(pool, count_allocation, &allocations) != VPMM_SUCCESS || allocations != 1)
        return 28;
    if (vpmm_allocation_get(pool, kept + PAGE, &allocation) != VPMM_SUCCESS || allocation.address != kept)
        return 29;
    if (vpmm_observe_begin(pool) != VPMM_SUCCESS || vpmm_observe_end(pool) != VPMM_SUCCESS)
        return 30;
    return 0;
}

/* In the child: the number of the first call that did not answer as it should. */
static int child_of_fork(vpmm_pool *pool, CUdeviceptr kept, CUstream s)
{
    CUdeviceptr p = 0xdead;
    clear_words();
    if (!refused_with_words(vpmm_malloc(pool, PAGE, s, &p)) || p != 0xdead)
        return 1;
    if (!refused_with_words(vpmm_malloc(pool, 100, s, &p)))
        return 2;
    if (!refused_with_words(vpmm_free(pool, kept, s)))
        return 3;
    if (!refused_with_words(vpmm_stream_release(pool, s)))
        return 4;
    if (!refused_with_words(vpmm_trim(pool, 0, NULL)))
        return 5;
    if (!refused_with_words(vpmm_poll(pool)))
        return 6;
    if (!refused_with_words(vpmm_pool_destroy(pool)))
        return 7;
    if (!refused_with_words(vpmm_use(pool, kept, s)))
        return 8;
    if (!refused_with_words(vpmm_pool_set_attribute(pool, VPMM_ATTRIBUTE_DECAY_MS, 0)))
        return 9;
    if (!refused_with_words(vpmm_pool_set_access(pool, 1, CU_MEM_ACCESS_FLAGS_PROT_READ)))
        return 10;
    if (!refused_with_words(vpmm_park(pool)))
        return 11;
    if (!refused_with_words(vpmm_wake(pool)))
        return 12;
    if (!refused_with_words(vpmm_check(pool)))
        return 13;
    return looks_of(pool, kept);
}

static void fork_beside_a_pool(bool reaper)
{
    struct setup setup = setup_default();
    setup.sim.stepped = !reaper;
    setup.pool.reaper = reaper;
    struct world w;
    world_open(&w, &setup);
    CUstream s = world_stream(&w);
    give(&w, take(&w, 4, s), s);
    CUdeviceptr kept = take(&w, 2, s);
    fill(&w, kept, 2, 0xf0f0, s);
    pid_t pid = fork();
    if (pid == 0) {
        alarm(30);
        _exit(child_of_fork(w.pool, kept, s));
    }
    cr_assert_gt(pid, 0);
    int status = -1;
    cr_assert_eq(waitpid(pid, &status, 0), pid);
    cr_expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "call %d in the child", WEXITSTATUS(status));
    give(&w, take(&w, 20, s), s); /* the parent goes on */
    expect_later(&w, kept, 2, 0xf0f0, s);
    give(&w, kept, s);
    cr_assert_eq(w.driver->cuStreamSynchronize(s), CUDA_SUCCESS);
    world_close(&w);
}

Test(process, fork_with_a_quiet_pool)
{
    fork_beside_a_pool(false);
}
Test(process, fork_with_the_reaper_at_work)
{
    fork_beside_a_pool(true);
}

/* The parent's other thread is stopped in the driver, with the pool's locks as they are then. */
static struct {
    CUresult(CUDAAPI *query)(CUevent);
    atomic_bool inside, go_on;
} stopped;

static CUresult CUDAAPI query_that_stops(CUevent event)
{
    atomic_store(&stopped.inside, true);
    while (!atomic_load(&stopped.go_on))
        usleep(100);
    return stopped.query(event);
}

static void *poll_once(void *pool)
{
    return vpmm_poll(pool) == VPMM_SUCCESS ? pool : NULL;
}

Test(process, the_audit_answers_in_a_child_whose_parent_was_polling, .timeout = 60)
{
    struct setup setup = setup_default();
    struct world w;
    world_open_without_pool(&w, &setup);
    vpmm_driver table = *w.driver;
    stopped.query = table.cuEventQuery;
    table.cuEventQuery = query_that_stops;
    setup.pool.driver = &table;
    must_work(vpmm_pool_create(&setup.pool, &w.pool));
    CUstream s = world_stream(&w);
    give(&w, take(&w, 4, s), s);
    pthread_t poller;
    cr_assert_eq(pthread_create(&poller, NULL, poll_once, w.pool), 0);
    while (!atomic_load(&stopped.inside))
        usleep(100);
    pid_t pid = fork();
    if (pid == 0) {
        alarm(30);
        clear_words();
        _exit(refused_with_words(vpmm_check(w.pool)) ? 0 : 1);
    }
    void *polled = NULL;
    int status = -1;
    pid_t waited = waitpid(pid, &status, 0);
    atomic_store(&stopped.go_on, true);
    cr_assert_eq(pthread_join(poller, &polled), 0);
    cr_assert_gt(pid, 0);
    cr_assert_eq(waited, pid);
    cr_expect_not_null(polled);
    cr_expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child ends with status %#x", (unsigned)status);
    world_audit(&w);
    world_close(&w);
}

/* A pass has the locks of passes and of events, and is in the driver. */
struct stopped_pass {
    struct world w;
    vpmm_driver table;
    CUstream s;
    CUdeviceptr kept;
    pthread_t poller;
};

static void stop_a_pass(struct stopped_pass *pass)
{
    struct setup setup = setup_default();
    world_open_without_pool(&pass->w, &setup);
    pass->table = *pass->w.driver;
    stopped.query = pass->table.cuEventQuery;
    pass->table.cuEventQuery = query_that_stops;
    atomic_store(&stopped.inside, false);
    atomic_store(&stopped.go_on, false);
    setup.pool.driver = &pass->table;
    must_work(vpmm_pool_create(&setup.pool, &pass->w.pool));
    pass->s = world_stream(&pass->w);
    pass->kept = take(&pass->w, 2, pass->s);
    give(&pass->w, take(&pass->w, 4, pass->s), pass->s);
    cr_assert_eq(pthread_create(&pass->poller, NULL, poll_once, pass->w.pool), 0);
    while (!atomic_load(&stopped.inside))
        usleep(100);
}

static void end_the_pass(struct stopped_pass *pass)
{
    void *polled = NULL;
    atomic_store(&stopped.go_on, true);
    cr_assert_eq(pthread_join(pass->poller, &polled), 0);
    cr_expect_not_null(polled);
    give(&pass->w, pass->kept, pass->s);
    world_drain(&pass->w);
    world_audit(&pass->w);
    world_close(&pass->w);
}

/* If they waited, this test would not end: nobody lets the pass go on before. */
Test(process, who_looks_does_not_wait_for_a_pass, .timeout = 60)
{
    static struct stopped_pass pass;
    needs_simulator();
    stop_a_pass(&pass);
    cr_expect_eq(looks_of(pass.w.pool, pass.kept), 0);
    must_work(vpmm_pool_set_attribute(pass.w.pool, VPMM_ATTRIBUTE_MAX_MAPPED, 0));
    must_work(vpmm_pool_set_attribute(pass.w.pool, VPMM_ATTRIBUTE_DECAY_MS, VPMM_DECAY_NEVER));
    must_work(vpmm_pool_set_attribute(pass.w.pool, VPMM_ATTRIBUTE_PEAK_LIVE, 0));
    end_the_pass(&pass);
}
Test(process, a_poll_beside_another_answers_at_once, .timeout = 60)
{
    static struct stopped_pass pass;
    needs_simulator();
    stop_a_pass(&pass);
    must_work(vpmm_poll(pass.w.pool));
    cr_expect(!atomic_load(&stopped.go_on));
    end_the_pass(&pass);
}

Test(process, a_pool_that_is_looked_at_stays_until_each_has_ended)
{
    struct world w;
    world_open(&w, NULL);
    must_work(vpmm_observe_begin(w.pool));
    must_work(vpmm_observe_begin(w.pool));
    must_fail(VPMM_ERROR_BUSY, vpmm_pool_destroy(w.pool));
    must_work(vpmm_observe_end(w.pool));
    must_fail(VPMM_ERROR_BUSY, vpmm_pool_destroy(w.pool));
    CUstream s = world_stream(&w);
    give(&w, take(&w, 2, s), s); /* nothing was changed */
    must_work(vpmm_observe_end(w.pool));
    must_fail(VPMM_ERROR_INVALID_VALUE, vpmm_observe_end(w.pool));
    world_audit(&w);
    world_close(&w);
}

/* --- pools that come and go -----------------------------------------------------------------------------------------
 */

Test(process, two_hundred_pools_with_a_reaper, .timeout = 60)
{
    struct setup setup = setup_default();
    struct world w;
    world_open_without_pool(&w, &setup);
    setup.pool.driver = w.driver;
    setup.pool.reaper = true;
    CUstream s = world_stream(&w);
    int threads = 0;
    for (int i = 0; i < 200; i++) {
        must_work(vpmm_pool_create(&setup.pool, &w.pool));
        CUdeviceptr p = take(&w, 4, s), q = take(&w, 2, s), small = take_bytes(&w, 500, s);
        keep_busy(&w, s);
        give(&w, p, s);
        give(&w, small, s);
        give(&w, q, s);
        must_work(vpmm_pool_destroy(w.pool));
        w.pool = NULL;
        if (i == 0) /* by now the driver has its own; the first reaper may be seen still */
            threads = thread_count();
    }
    cr_expect(comes_down_to(threads), "the reapers stay behind: %d threads, not %d", thread_count(), threads);
    world_close(&w);
}

Test(process, two_pools_of_one_device)
{
    struct world w;
    world_open(&w, NULL);
    struct setup setup = setup_default();
    setup.pool.driver = w.driver;
    vpmm_pool *first = w.pool, *second = NULL;
    must_work(vpmm_pool_create(&setup.pool, &second));
    CUstream s = world_stream(&w);
    CUdeviceptr p = take(&w, 4, s), q = 0;
    must_work(vpmm_malloc(second, 4 * PAGE, s, &q));
    fill(&w, p, 4, 1, s);
    fill(&w, q, 4, 2, s);
    expect_later(&w, p, 4, 1, s);
    give(&w, p, s);
    must_work(vpmm_pool_destroy(first)); /* the second does not notice */
    w.pool = second;
    expect_later(&w, q, 4, 2, s);
    give(&w, q, s);
    world_audit(&w);
    world_close(&w);
}

static void teardown(bool stream_first, bool release)
{
    struct world w;
    world_open(&w, NULL);
    CUstream s = world_stream(&w);
    CUdeviceptr p = take(&w, 4, s);
    fill(&w, p, 4, 1, s);
    give(&w, p, s);
    if (release)
        must_work(vpmm_stream_release(w.pool, s));
    if (stream_first)
        world_stream_destroy(&w, s);
    must_work(vpmm_pool_destroy(w.pool));
    w.pool = NULL;
    world_close(&w);
}

Test(process, teardown_pool_then_stream)
{
    teardown(false, false);
}
Test(process, teardown_stream_then_pool)
{
    teardown(true, true);
}
Test(process, teardown_stream_without_a_word_then_pool)
{
    teardown(true, false);
}

Test(process, teardown_of_a_pool_that_was_never_used)
{
    struct world w;
    world_open(&w, NULL);
    world_audit(&w);
    world_close(&w);
}

Test(process, the_default_pool_is_one)
{
    vpmm_pool *first = NULL, *second = NULL;
    clear_words();
    vpmm_status status = vpmm_pool_default(0, &first);
    if (status == VPMM_SUCCESS) {
        must_work(vpmm_pool_default(0, &second));
        cr_expect_eq(first, second);
    } else { /* no GPU here */
        cr_expect_eq(status, VPMM_ERROR_NO_DRIVER, "%s", vpmm_status_name(status));
        cr_expect(spoke());
        cr_expect_null(first);
    }
    must_fail(VPMM_ERROR_NO_DRIVER, vpmm_pool_default(4711, &second));
}
