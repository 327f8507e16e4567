/*
 * Threads that allocate in bursts on a pool whose memory decays all the time, while others change its attributes, poll,
 * trim and read; for ThreadSanitizer, and useful without it. The simulator's race detector sees what is unmapped too
 * soon.
 *
 *   VPMM_TEST_MS    how long; 1,500
 *   VPMM_TEST_SEED  of the random numbers
 *
 * Exit status 0: no failure, no race, the audit passes and nothing leaks.
 */
#include "world.h"

enum { WORKERS = 3, BURST = 12, LONGEST = 40 };

static atomic_bool stop;

static void burst(CUstream stream)
{
    CUdeviceptr p[BURST];
    for (int i = 0; i < BURST; i++) {
        size_t bytes = draw(2) ? (1 + draw(LONGEST)) * PAGE : 256 + draw(PAGE);
        needs(vpmm_malloc(world.pool, bytes, stream, &p[i]) == VPMM_SUCCESS);
        needs(world.driver->cuMemsetD8Async(p[i], 1, 256, stream) == CUDA_SUCCESS);
    }
    for (int i = 0; i < BURST; i++)
        needs(vpmm_free(world.pool, p[i], stream) == VPMM_SUCCESS);
}

static void allocate(void)
{
    CUstream stream = NULL;
    needs(world.driver->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
    while (!atomic_load(&stop)) {
        burst(stream);
        sleep_us((long)draw(30000));
    }
    needs(vpmm_stream_release(world.pool, stream) == VPMM_SUCCESS);
    needs(world.driver->cuStreamDestroy(stream) == CUDA_SUCCESS);
}

static void change(vpmm_attribute attribute, uint64_t value)
{
    uint64_t read;
    needs(vpmm_pool_set_attribute(world.pool, attribute, value) == VPMM_SUCCESS);
    needs(vpmm_pool_get_attribute(world.pool, attribute, &read) == VPMM_SUCCESS);
}

static void meddle(void)
{
    uint64_t turns = 0;
    while (!atomic_load(&stop)) {
        change(VPMM_ATTRIBUTE_DECAY_MS, draw(4) ? draw(60) : VPMM_DECAY_NEVER);
        change(VPMM_ATTRIBUTE_RELEASE_THRESHOLD, draw(64) * PAGE);
        change(VPMM_ATTRIBUTE_REUSE, draw(3));
        change(VPMM_ATTRIBUTE_MAX_MAPPED, draw(2) * 8000 * PAGE);
        change(VPMM_ATTRIBUTE_PEAK_MAPPED + (vpmm_attribute)draw(3), 0);
        needs(vpmm_poll(world.pool) == VPMM_SUCCESS);
        if (++turns % 16 == 0)
            needs(vpmm_trim(world.pool, draw(32) * PAGE, NULL) == VPMM_SUCCESS);
        sleep_us((long)draw(5000));
    }
}

static void work(uint64_t index)
{
    if (index < WORKERS)
        allocate();
    else
        meddle();
}

static void wait_and_stop(void)
{
    for (uint64_t i = 0; i < world.amount; i++)
        sleep_us(1000);
    atomic_store(&stop, true);
}

static void configure(vpmm_sim_config *sim, vpmm_config *config)
{
    (void)sim;
    config->va_size = (size_t)16 << 30;
    config->decay_ms = 20;
}

static void look(const vpmm_stats *stats)
{
    printf("%llu MiB decayed\n", (unsigned long long)(stats->decayed_bytes >> 20));
    if (stats->decayed_bytes == 0)
        failed("nothing has decayed");
}

const struct program program = {
    .variable = "VPMM_TEST_MS",
    .amount = 1500,
    .threads = WORKERS + 1,
    .configure = configure,
    .work = work,
    .meanwhile = wait_and_stop,
    .look = look,
};
