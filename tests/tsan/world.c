#include "world.h"

#include <pthread.h>
#include <time.h>

struct world world;

static struct {
    uint64_t seed;
    vpmm_sim *sim; /* NULL: a program without configure */
    CUcontext context;
    atomic_uint_fast64_t mismatches, failures;
} own;

/* Nothing that threads share, so that the frame orders nothing between them. */
static _Thread_local struct {
    uint64_t random;
    CUevent event; /* for order_streams */
} mine;

/* ---- for any thread ---- */

void failed(const char *what)
{
    if (atomic_fetch_add(&own.failures, 1) < 20)
        fprintf(stderr, "%s: %s\n", what, vpmm_last_error());
}

uint64_t draw(uint64_t below)
{
    mine.random ^= mine.random << 13;
    mine.random ^= mine.random >> 7;
    mine.random ^= mine.random << 17;
    return (mine.random >> 11) % below;
}

void sleep_us(long us)
{
    const struct timespec time = {.tv_nsec = us * 1000};
    nanosleep(&time, NULL);
}

uint32_t write_stamp(CUdeviceptr pointer, size_t pages, CUstream stream)
{
    uint32_t stamp = 1 + (uint32_t)draw(UINT32_MAX);
    needs(payload_write(world.driver, pointer, pages, stamp, stream));
    return stamp;
}

void expect_stamp(CUdeviceptr pointer, size_t pages, uint32_t stamp, CUstream stream)
{
    needs(payload_expect(world.driver, pointer, pages, stamp, stream, &own.mismatches));
}

void order_streams(CUstream earlier, CUstream later)
{
    needs(world.driver->cuEventRecord(mine.event, earlier) == CUDA_SUCCESS);
    needs(world.driver->cuStreamWaitEvent(later, mine.event, 0) == CUDA_SUCCESS);
}

/* ---- threads ---- */

/* Odd, since a state of 0 would stay 0. */
static bool begin_thread(uint64_t index)
{
    mine.random = (own.seed + index) * UINT64_C(0x9e3779b97f4a7c15) | 1;
    return own.sim == NULL || (world.driver->cuCtxSetCurrent(own.context) == CUDA_SUCCESS &&
                               world.driver->cuEventCreate(&mine.event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS);
}

static void end_thread(void)
{
    if (own.sim != NULL)
        needs(world.driver->cuEventDestroy(mine.event) == CUDA_SUCCESS);
}

static void *run_thread(void *index)
{
    if (!begin_thread(*(const uint64_t *)index)) {
        failed("the thread's beginning");
        return NULL;
    }
    program.work(*(const uint64_t *)index);
    end_thread();
    return NULL;
}

static void run_threads(void)
{
    pthread_t thread[WORLD_THREADS] = {0};
    uint64_t index[WORLD_THREADS], all = program.threads;
    if (program.life != 0)
        all += world.amount / program.life;
    for (uint64_t i = 0; i < all; i++) { /* the oldest is waited for before the next one begins */
        size_t k = i % program.threads;
        if (i >= program.threads)
            pthread_join(thread[k], NULL);
        index[k] = i;
        if (pthread_create(&thread[k], NULL, run_thread, &index[k]) != 0) {
            fprintf(stderr, "no thread\n");
            exit(1);
        }
    }
    if (program.meanwhile != NULL)
        program.meanwhile();
    for (unsigned k = 0; k < program.threads; k++)
        pthread_join(thread[k], NULL);
}

/* ---- the simulator and the pool ---- */

/* Streams are made in the context that begin_thread makes current. */
static bool open_driver(void)
{
    const vpmm_driver *driver = world.driver;
    if (driver->cuInit(0) != CUDA_SUCCESS || driver->cuDevicePrimaryCtxRetain(&own.context, 0) != CUDA_SUCCESS ||
        !begin_thread(program.threads))
        return false;
    for (unsigned i = 0; i < program.streams; i++)
        if (driver->cuStreamCreate(&world.stream[i], CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS)
            return false;
    return true;
}

static bool open_world(void)
{
    if (program.configure == NULL)
        return begin_thread(program.threads);
    vpmm_sim_config sim = vpmm_sim_config_default();
    vpmm_config config = vpmm_config_default();
    config.page_size = PAGE;
    program.configure(&sim, &config);
    own.sim = vpmm_sim_create(&sim);
    if (own.sim == NULL)
        return false;
    world.driver = vpmm_sim_driver(own.sim);
    config.driver = program.drive ? program.drive(world.driver) : world.driver;
    return open_driver() && vpmm_pool_create(&config, &world.pool) == VPMM_SUCCESS;
}

static void close_pool(void)
{
    vpmm_stats stats = {0};
    needs(vpmm_check(world.pool) == VPMM_SUCCESS);
    needs(vpmm_stats_get(world.pool, &stats) == VPMM_SUCCESS);
    if (stats.requested_bytes != 0 || stats.mallocs != stats.frees)
        failed("something is live at the end");
    if (program.look != NULL)
        program.look(&stats);
    needs(vpmm_pool_destroy(world.pool) == VPMM_SUCCESS);
}

static void close_world(void)
{
    if (own.sim == NULL)
        return;
    close_pool();
    for (unsigned i = 0; i < program.streams; i++)
        needs(world.driver->cuStreamDestroy(world.stream[i]) == CUDA_SUCCESS);
    end_thread();
    needs(world.driver->cuDevicePrimaryCtxRelease(0) == CUDA_SUCCESS);
    if (atomic_load(&own.mismatches) != 0)
        failed("stamps are lost");
    if (vpmm_sim_races(own.sim) != 0)
        failed("races on the device");
    if (vpmm_sim_misuses(own.sim) != 0)
        failed("the driver was misused");
    if (vpmm_sim_destroy(own.sim) != 0)
        failed("leaks");
}

static uint64_t number_of(const char *variable, uint64_t otherwise)
{
    const char *text = getenv(variable);
    return text != NULL ? strtoull(text, NULL, 0) : otherwise;
}

int main(void)
{
    world.amount = number_of(program.variable, program.amount);
    own.seed = number_of("VPMM_TEST_SEED", 1);
    if (!open_world())
        failed("cannot begin");
    else if (program.begin != NULL)
        program.begin();
    if (atomic_load(&own.failures) != 0)
        return 1;
    run_threads();
    if (program.finish != NULL)
        program.finish();
    close_world();
    uint64_t failures = atomic_load(&own.failures);
    printf("%s=%llu VPMM_TEST_SEED=%llu: %llu failures\n", program.variable, (unsigned long long)world.amount,
           (unsigned long long)own.seed, (unsigned long long)failures);
    return failures != 0;
}
