/* quickstart [--sim]: allocate, use and free memory on a stream, on the GPU or on the simulated one. */
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include <vpmm/sim.h>
#include <vpmm/vpmm.h>

static int fail(void)
{
    fprintf(stderr, "quickstart: %s\n", vpmm_last_error());
    return 1;
}

int main(int argc, char **argv)
{
    vpmm_config config = vpmm_config_default();
    vpmm_pool *pool;
    vpmm_sim *sim = NULL;
    if (vpmm_config_from_env(&config) != VPMM_SUCCESS) /* VPMM_*, as a pool without a configuration has them */
        return fail();
    if (argc > 1 && strcmp(argv[1], "--sim") == 0) { /* else libcuda */
        sim = vpmm_sim_create(NULL);
        if (!sim)
            return fail();
        config.driver = vpmm_sim_driver(sim);
    }
    vpmm_status status = vpmm_pool_create(&config, &pool);
    if (status == VPMM_ERROR_NO_DRIVER && !sim)
        fprintf(stderr, "Without a GPU, run it with --sim.\n");
    if (status != VPMM_SUCCESS)
        return fail();

    /* The driver's own calls, under their own names: here, a stream in the device's primary context. */
    const vpmm_driver *cu = vpmm_pool_driver(pool);
    CUdevice device;
    CUcontext context;
    CUstream stream;
    CUdeviceptr memory;
    int first = 0;
    cu->cuDeviceGet(&device, config.device);
    cu->cuDevicePrimaryCtxRetain(&context, device);
    cu->cuCtxSetCurrent(context);
    cu->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);

    if (vpmm_malloc(pool, 64 << 20, stream, &memory) != VPMM_SUCCESS) /* usable by the stream's work at once */
        return fail();
    cu->cuMemsetD32Async(memory, 42, (64 << 20) / 4, stream);
    cu->cuMemcpyDtoHAsync(&first, memory, sizeof first, stream);
    if (vpmm_free(pool, memory, stream) != VPMM_SUCCESS) /* ends its use at this point of the stream */
        return fail();
    cu->cuStreamSynchronize(stream);
    printf("the memory held %d\n", first);

    vpmm_stream_release(pool, stream); /* before cuStreamDestroy */
    cu->cuStreamDestroy(stream);
    cu->cuDevicePrimaryCtxRelease(device); /* the pool keeps it until its own end, with which `cu` is gone */
    if (vpmm_pool_destroy(pool) != VPMM_SUCCESS)
        return fail();

    /* What the simulated GPU has seen done wrong, each of which it has named on stderr. */
    bool wrong = sim && (vpmm_sim_races(sim) || vpmm_sim_misuses(sim));
    if (sim && vpmm_sim_destroy(sim) != 0) /* leaked driver objects */
        wrong = true;
    return first == 42 && !wrong ? 0 : 1;
}
