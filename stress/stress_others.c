/*
 * stress_others.c - who disturbs a run: calls that nobody waits for, and somebody else who takes device memory away.
 */
#define _GNU_SOURCE 1

#include "stress.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
    PAUSE_LEAST_MS = 20,
    PAUSE_MOST_MS = 250,
    CAP_MS = 30,
    SETTINGS_MS = 30,
    LENT_MS = 30,
    SQUEEZE_MS = 100,
    SQUEEZE_PART = 16,
    DRAWS = 16
};

extern char **environ;

static void pause_ms(uint64_t ms)
{
    nanosleep(&(struct timespec){(time_t)(ms / 1000), (long)(ms % 1000) * 1000000}, NULL);
}

static void count(_Atomic(uint64_t) *number)
{
    atomic_fetch_add_explicit(number, 1, memory_order_relaxed);
}

/* ---- disturbances ---- */

#define NAME_OF(name, words) #name,
const char *const disturbance_names[DISTURBANCE_COUNT] = {DISTURBANCES(NAME_OF)};
#undef NAME_OF

#define WORDS_OF(name, words) words,
const char *const disturbance_words[DISTURBANCE_COUNT] = {DISTURBANCES(WORDS_OF)};
#undef WORDS_OF

/* Of all devices: the driver serves them one at a time. */
static struct {
    _Atomic(uint32_t) under_way;
    _Atomic(uint64_t) ended_ns; /* the latest */
} disturbances[DISTURBANCE_COUNT];

static uint64_t disturbance_begin(enum disturbance which)
{
    atomic_fetch_add(&disturbances[which].under_way, 1);
    return now_ns();
}

static void disturbance_end(run *r, enum disturbance which, uint64_t begun)
{
    uint64_t now = now_ns(), took = now - begun;
    atomic_store(&disturbances[which].ended_ns, now);
    atomic_fetch_sub(&disturbances[which].under_way, 1);
    if (took > atomic_load(&r->longest_disturbance_ns[which]))
        atomic_store(&r->longest_disturbance_ns[which], took);
}

unsigned disturbances_since(uint64_t ns)
{
    unsigned found = 0;
    for (int i = 0; i < DISTURBANCE_COUNT; i++)
        if (atomic_load(&disturbances[i].under_way) > 0 || atomic_load(&disturbances[i].ended_ns) >= ns)
            found |= 1u << i;
    return found;
}

/* ---- calls that nobody waits for ---- */

static void trim(run *r, uint64_t random)
{
    uint64_t keep = random % 2 ? run_mapped(r) / 4 * 3 : 0;
    vpmm_status status = VPMM_SUCCESS;
    count(&r->trims);
    uint64_t begun = disturbance_begin(DISTURBANCE_trim);
    if (r->target.pool == NULL)
        run_cuda_ok(r, "cuMemPoolTrimTo", r->gpu.driver->cuMemPoolTrimTo(r->target.memory_pool, keep));
    else {
        host_memory_enter();
        status = vpmm_trim(r->target.pool, keep, NULL);
        host_memory_leave();
    }
    disturbance_end(r, DISTURBANCE_trim, begun);
    if (status != VPMM_SUCCESS && !r->options->faults)
        run_end(r, DEVICE_ERROR, "vpmm_trim: %s", vpmm_last_error());
}

/* To half of what is mapped: for a moment the pool has to do with what it has, or refuse. */
static void lower_cap(run *r)
{
    if (r->target.pool == NULL)
        return;
    count(&r->caps);
    uint64_t lower = run_mapped(r) / 2 + r->page_size;
    atomic_store(&r->lower_cap, lower);
    atomic_fetch_add(&r->cap_changes, 1);
    vpmm_status low = vpmm_pool_set_attribute(r->target.pool, VPMM_ATTRIBUTE_MAX_MAPPED, lower);
    pause_ms(CAP_MS);
    vpmm_status back = vpmm_pool_set_attribute(r->target.pool, VPMM_ATTRIBUTE_MAX_MAPPED, r->cap);
    atomic_fetch_add(&r->cap_changes, 1);
    if (low != VPMM_SUCCESS || back != VPMM_SUCCESS)
        run_end(r, low == VPMM_ERROR_DRIVER || back == VPMM_ERROR_DRIVER ? DEVICE_ERROR : FAILED,
                "the cap could not be set: %s", vpmm_last_error());
}

/* The rules of reuse and of decay are others for a moment, in calls and passes that are under way, too. */
static void change_settings(run *r, uint64_t random)
{
    enum { N = 3 };
    static const vpmm_attribute which[N] = {VPMM_ATTRIBUTE_REUSE, VPMM_ATTRIBUTE_DECAY_MS,
                                            VPMM_ATTRIBUTE_RELEASE_THRESHOLD};
    if (r->target.pool == NULL)
        return;
    uint64_t former[N] = {0};
    const uint64_t other[N] = {((uint64_t)r->config.reuse + 1 + random % 2) % 3, random / 2 % SETTINGS_MS,
                               run_mapped(r) / 2};
    vpmm_status status = VPMM_SUCCESS;
    count(&r->settings);
    for (int i = 0; i < N && status == VPMM_SUCCESS; i++)
        status = vpmm_pool_get_attribute(r->target.pool, which[i], &former[i]);
    for (int i = 0; i < N && status == VPMM_SUCCESS; i++)
        status = vpmm_pool_set_attribute(r->target.pool, which[i], other[i]);
    pause_ms(SETTINGS_MS);
    for (int i = 0; i < N && status == VPMM_SUCCESS; i++)
        status = vpmm_pool_set_attribute(r->target.pool, which[i], former[i]);
    if (status != VPMM_SUCCESS)
        run_end(r, status == VPMM_ERROR_DRIVER ? DEVICE_ERROR : FAILED, "the settings could not be changed: %s",
                vpmm_last_error());
}

/* A pass by hand, beside those of the pool's thread. */
static void poll_by_hand(run *r)
{
    if (r->target.pool == NULL)
        return;
    count(&r->polls);
    host_memory_enter();
    vpmm_status status = vpmm_poll(r->target.pool);
    host_memory_leave();
    if (status != VPMM_SUCCESS && !r->options->faults)
        run_end(r, DEVICE_ERROR, "vpmm_poll: %s", vpmm_last_error());
}

static void look(run *r, enum look at)
{
    if (r->target.pool == NULL)
        return;
    count(&r->looks);
    uint64_t begun = disturbance_begin(DISTURBANCE_look);
    if (look_at_pool(r, at))
        count(&r->looked[at]);
    disturbance_end(r, DISTURBANCE_look, begun);
}

static vpmm_status change_access(run *r, int device, CUmemAccess_flags flags)
{
    uint64_t begun = disturbance_begin(DISTURBANCE_access);
    vpmm_status status = vpmm_pool_set_access(r->target.pool, device, flags);
    disturbance_end(r, DISTURBANCE_access, begun);
    return status;
}

/*
 * To another device, for a moment: each handle is given other rights while builds map more. On the simulated GPU there
 * is one; where there is none, or none that reaches this one's memory, nothing happens. The driver refuses this thread
 * nothing: a refused cuMemSetAccess is a build's.
 */
static void lend_access(run *r, uint64_t random)
{
    int devices = 1;
    if (r->target.pool == NULL || !run_cuda_ok(r, "cuDeviceGetCount", r->gpu.driver->cuDeviceGetCount(&devices)))
        return;
    int other = (r->ordinal + 1) % devices;
    CUmemAccess_flags flags = random % 2 ? CU_MEM_ACCESS_FLAGS_PROT_READ : CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    if (other == r->ordinal)
        return;
    faults_spare(true);
    vpmm_status lent = change_access(r, other, flags), back = VPMM_SUCCESS;
    if (lent == VPMM_SUCCESS) {
        count(&r->accesses);
        pause_ms(LENT_MS);
        back = change_access(r, other, CU_MEM_ACCESS_FLAGS_PROT_NONE);
    }
    faults_spare(false);
    bool has_no_room = lent == VPMM_ERROR_OUT_OF_MEMORY; /* on the other device */
    if ((lent != VPMM_SUCCESS && lent != VPMM_ERROR_NOT_SUPPORTED && !has_no_room) || back != VPMM_SUCCESS)
        run_end(r, lent == VPMM_ERROR_DRIVER || back == VPMM_ERROR_DRIVER ? DEVICE_ERROR : FAILED,
                "device %d's access could not be changed: %s", other, vpmm_last_error());
}

/* ---- a pool that comes and goes beside the one under test ---- */

enum { POOL_PAGES = 32, POOL_ALLOCATIONS = 24 };

/*
 * With planned faults it is refused host memory, also for the list of contexts that a park waits for, and its thread,
 * and says so. Another may need the device's memory, also the last of it, by which a park and the end of a pool wait
 * for the device: they are BUSY then, and nothing has changed.
 */
static bool may_be_refused(run *r, const char *what, vpmm_status status)
{
    bool is_planned = r->options->faults && status == VPMM_ERROR_HOST_MEMORY;
    if (status != VPMM_SUCCESS && status != VPMM_ERROR_OUT_OF_MEMORY && status != VPMM_ERROR_BUSY && !is_planned)
        run_end(r, status == VPMM_ERROR_DRIVER ? DEVICE_ERROR : FAILED, "another pool: %s: %s", what,
                vpmm_last_error());
    return status == VPMM_SUCCESS;
}

static size_t bytes_of(const run *r, int allocation)
{
    return r->page_size >> allocation % 8;
}

static void allocate_in(run *r, vpmm_pool *pool, CUstream stream, CUdeviceptr *address)
{
    for (int i = 0; i < POOL_ALLOCATIONS; i++) {
        host_memory_enter();
        vpmm_status status = vpmm_malloc(pool, bytes_of(r, i), stream, &address[i]);
        host_memory_leave();
        if (!may_be_refused(r, "vpmm_malloc", status))
            address[i] = 0;
    }
}

/* Every other one. */
static void write_to(run *r, CUstream stream, const CUdeviceptr *address)
{
    for (int i = 1; i < POOL_ALLOCATIONS; i += 2)
        if (address[i])
            run_cuda_ok(r, "cuMemsetD32Async",
                        r->gpu.driver->cuMemsetD32Async(address[i], 0, bytes_of(r, i) / 4, stream));
}

static vpmm_status wake(vpmm_pool *pool)
{
    host_memory_enter();
    vpmm_status status = vpmm_wake(pool);
    host_memory_leave();
    return status;
}

struct beside {
    run *run;
    vpmm_pool *pool;
    CUstream stream;
    pthread_t thread;
    bool begun;
    atomic_bool stop, refused; /* refused: by a park */
};

/* Beside the park and the wake, on the same stream. Nothing is written: the memory may be away. */
static void *allocate_beside(void *argument)
{
    struct beside *b = argument;
    run *r = b->run;
    if (!gpu_enter(&r->gpu))
        run_end(r, DEVICE_ERROR, "a thread could not use the device: see above");
    faults_spare(true);
    for (int i = 0; !atomic_load(&b->stop); i++) {
        CUdeviceptr address = 0;
        host_memory_enter();
        vpmm_status status = vpmm_malloc(b->pool, bytes_of(r, i), b->stream, &address);
        host_memory_leave();
        if (status == VPMM_ERROR_NOT_SUPPORTED) {
            count(&r->refused_by_park);
            atomic_store(&b->refused, true);
            pause_ms(1);
        } else if (may_be_refused(r, "vpmm_malloc beside a park", status)) {
            count(&r->beside_park);
            may_be_refused(r, "vpmm_free beside a park", vpmm_free(b->pool, address, b->stream));
        }
    }
    return NULL;
}

static void begin_beside(struct beside *b)
{
    int error = pthread_create(&b->thread, NULL, allocate_beside, b);
    b->begun = error == 0;
    if (error != 0)
        run_end(b->run, DEVICE_ERROR, "a thread could not be made: %s", strerror(error));
}

static void end_beside(struct beside *b)
{
    atomic_store(&b->stop, true);
    if (b->begun)
        pthread_join(b->thread, NULL);
}

/* Until the thread beside it has been refused, which on a busy host does not run of itself before the wake. */
static void stay_parked(run *r, const struct beside *b)
{
    enum { TRIES = 2000 };
    for (int i = 0; i < TRIES && !atomic_load(&b->refused) && !atomic_load(&r->stop); i++)
        pause_ms(1);
}

/* Gives the pool's memory back for a while, or a moment. True: there is memory at its addresses again. */
static bool park_and_wake(run *r, const struct beside *b)
{
    host_memory_enter();
    vpmm_status status = vpmm_park(b->pool);
    host_memory_leave();
    if (!may_be_refused(r, "vpmm_park", status))
        return true;
    count(&r->parks);
    if (b->begun && atomic_load(&r->parks) % 2)
        stay_parked(r, b);
    while (!may_be_refused(r, "vpmm_wake", wake(b->pool))) { /* others have the memory meanwhile */
        if (atomic_load(&r->stop))
            return false;
        pause_ms(PAUSE_LEAST_MS);
    }
    return true;
}

static void use_pool(run *r, vpmm_pool *pool, CUstream stream, bool parks)
{
    CUdeviceptr address[POOL_ALLOCATIONS] = {0};
    struct beside beside = {.run = r, .pool = pool, .stream = stream};
    if (parks)
        begin_beside(&beside);
    allocate_in(r, pool, stream, address);
    write_to(r, stream, address);
    if (parks && park_and_wake(r, &beside))
        write_to(r, stream, address);
    for (int i = 0; i < POOL_ALLOCATIONS; i++)
        may_be_refused(r, "vpmm_free", vpmm_free(pool, address[i], stream));
    end_beside(&beside);
    if (vpmm_check(pool) != VPMM_SUCCESS) /* nobody else calls it: the lanes' pool is audited at the run's end alone */
        run_end(r, FAILED, "another pool's audit: %s", vpmm_last_error());
}

static void end_pool(run *r, vpmm_pool *pool)
{
    enum { TRIES = 2000 }; /* of PAUSE_LEAST_MS and more: somebody has given memory back by then */
    vpmm_status status = vpmm_pool_destroy(pool);
    for (int i = 0; i < TRIES && status == VPMM_ERROR_BUSY; i++) {
        pause_ms(PAUSE_LEAST_MS);
        status = vpmm_pool_destroy(pool);
    }
    if (status == VPMM_ERROR_BUSY)
        run_end(r, FAILED, "another pool does not end: %s", vpmm_last_error());
    else
        may_be_refused(r, "vpmm_pool_destroy", status);
}

static void make_and_end_pool(run *r, bool graph)
{
    vpmm_config config = r->config;
    vpmm_pool *pool = NULL;
    CUstream stream = NULL;
    config.driver = r->seen_by_pool.driver;
    config.max_mapped = POOL_PAGES * r->mapped_unit;
    config.initial_pages = 0;
    config.reaper = true;
    config.graph = graph;
    if (!run_cuda_ok(r, "cuStreamCreate", r->gpu.driver->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING)))
        return;
    host_memory_enter_creation();
    vpmm_status status = vpmm_pool_create(&config, &pool);
    host_memory_leave();
    if (may_be_refused(r, "vpmm_pool_create", status)) {
        count(&r->pools);
        use_pool(r, pool, stream, graph);
        end_pool(r, pool);
    }
    run_cuda_ok(r, "cuStreamDestroy", r->gpu.driver->cuStreamDestroy(stream));
}

/* The driver refuses this thread nothing: what it refused at the other pool's end would stay on the device. */
static void come_and_go(run *r, bool graph)
{
    if (r->target.pool == NULL)
        return;
    uint64_t begun = disturbance_begin(DISTURBANCE_pool);
    faults_spare(true);
    make_and_end_pool(r, graph);
    faults_spare(false);
    disturbance_end(r, DISTURBANCE_pool, begun);
}

static void *disturb(void *argument)
{
    run *r = argument;
    uint64_t random = r->options->seed ^ UINT64_C(0x5DEECE66D);
    if (!gpu_enter(&r->gpu))
        run_end(r, DEVICE_ERROR, "a thread could not use the device: see above");
    while (!atomic_load(&r->stop)) {
        pause_ms(PAUSE_LEAST_MS + random_below(&random, PAUSE_MOST_MS - PAUSE_LEAST_MS));
        switch (random_below(&random, DRAWS)) {
        case 0:
            trim(r, random_next(&random));
            break;
        case 1:
        case 2:
            lower_cap(r);
            break;
        case 3:
        case 4:
            come_and_go(r, random_below(&random, 2));
            break;
        case 5:
        case 6:
            lend_access(r, random_next(&random));
            break;
        case 7:
            poll_by_hand(r);
            break;
        case 8:
        case 9:
            change_settings(r, random_next(&random));
            break;
        default:
            look(r, (enum look)random_below(&random, LOOK_COUNT));
        }
    }
    return NULL;
}

/* ---- somebody else takes device memory ---- */

/* By a handle that is nowhere mapped: that meets no stream, and no other call waits for it. */
static CUresult squeeze_once(const vpmm_driver *driver, CUdevice device, size_t bytes)
{
    CUmemAllocationProp prop = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device},
    };
    CUmemGenericAllocationHandle handle;
    CUresult result = driver->cuMemCreate(&handle, bytes, &prop, 0);
    pause_ms(SQUEEZE_MS);
    return result == CUDA_SUCCESS ? driver->cuMemRelease(handle) : result;
}

/* All that the cap leaves, and a part of what it does not. */
static size_t squeezed_bytes(const run *r)
{
    return (r->memory_bytes - r->cap + r->cap / SQUEEZE_PART) / r->mapped_unit * r->mapped_unit;
}

static void *squeeze_here(void *argument)
{
    run *r = argument;
    vpmm_sim *sim = r->gpu.sim;
    while (!atomic_load(&r->stop)) {
        CUresult result = squeeze_once(vpmm_sim_driver(sim), r->gpu.device, squeezed_bytes(r));
        if (result == CUDA_SUCCESS)
            count(&r->squeezes);
        else if (result != CUDA_ERROR_OUT_OF_MEMORY)
            run_cuda_ok(r, "the squeezer", result);
        pause_ms(SQUEEZE_MS);
    }
    return NULL;
}

int squeeze_process(int ordinal, size_t bytes)
{
    gpu g;
    char end;
    const gpu_options from = {.ordinal = ordinal};
    signal(SIGINT, SIG_IGN); /* the program that began it says when to stop, by closing the pipe */
    if (!gpu_open(&g, &from) || fcntl(STDIN_FILENO, F_SETFL, O_NONBLOCK) != 0)
        return DEVICE_ERROR;
    while (read(STDIN_FILENO, &end, 1) < 0 && (errno == EAGAIN || errno == EINTR)) {
        squeeze_once(g.driver, g.device, bytes);
        pause_ms(SQUEEZE_MS);
    }
    return gpu_close(&g) == 0 ? PASSED : DEVICE_ERROR;
}

static bool begin_process(run *r)
{
    int end[2];
    char ordinal[16], bytes[32];
    posix_spawn_file_actions_t actions;
    if (pipe2(end, O_CLOEXEC) != 0)
        return false;
    snprintf(ordinal, sizeof ordinal, "%d", r->ordinal);
    snprintf(bytes, sizeof bytes, "%zu", squeezed_bytes(r));
    char *arguments[] = {"vpmm-stress", "--squeeze", ordinal, bytes, NULL};
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, end[0], STDIN_FILENO);
    pid_t pid;
    int error = posix_spawn(&pid, "/proc/self/exe", &actions, NULL, arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    close(end[0]);
    if (error != 0) {
        close(end[1]);
        return false;
    }
    r->squeezing_pipe = end[1];
    r->squeezing_process = pid;
    return true;
}

/* The pipe's end tells it to stop. */
static void end_process(run *r)
{
    int status = 0;
    if (r->squeezing_pipe < 0)
        return;
    close(r->squeezing_pipe);
    r->squeezing_pipe = -1;
    if (waitpid(r->squeezing_process, &status, 0) < 0 || !WIFEXITED(status) || WEXITSTATUS(status) != PASSED)
        fprintf(stderr, "%s: device %d: the process that squeezes the device could not\n", program_name, r->ordinal);
}

/* ---- both ---- */

void others_begin(run *r)
{
    r->disturbs = pthread_create(&r->disturber, NULL, disturb, r) == 0;
    if (r->gpu.sim)
        r->squeezes_here = pthread_create(&r->squeezer, NULL, squeeze_here, r) == 0;
    if (!r->disturbs || (r->gpu.sim ? !r->squeezes_here : !begin_process(r)))
        run_end(r, DEVICE_ERROR, "those who disturb could not be begun: no thread or process is to be had");
}

void others_end(run *r)
{
    if (r->disturbs)
        pthread_join(r->disturber, NULL);
    if (r->squeezes_here)
        pthread_join(r->squeezer, NULL);
    r->disturbs = r->squeezes_here = false;
    end_process(r);
}
