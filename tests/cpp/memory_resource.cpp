/*
 * memory_resource.hpp on the simulated GPU: CCCL takes it for a resource of device memory, and calls it through a
 * reference, as RMM does; what is allocated is the pool's, and is given back. Exit status 1 and a line for what is not
 * as documented.
 */
#include <vpmm/memory_resource.hpp>

#include "need.hpp"

#include <thread>
#include <type_traits>

#include <vpmm/sim.h>

static_assert(noexcept(std::declval<vpmm::memory_resource &>().deallocate(nullptr, 0)), "destructors free");

#if CCCL_MAJOR_VERSION < 3 || (CCCL_MAJOR_VERSION == 3 && CCCL_MINOR_VERSION == 0)
static_assert(::cuda::mr::async_resource_with<vpmm::memory_resource, ::cuda::mr::device_accessible>,
              "it meets the concept");
static_assert(!::cuda::mr::async_resource_with<vpmm::memory_resource, ::cuda::mr::host_accessible>,
              "the host does not see its memory");

static void by_reference(vpmm::memory_resource &resource, const vpmm::pool &pool, CUstream stream)
{
    ::cuda::mr::async_resource_ref<::cuda::mr::device_accessible> ref(resource), other(resource);
    void *p = ref.allocate_async(1000, 256, stream), *q = ref.allocate(1 << 20, 64);
    need(p && q && pool.stats().requested_bytes == 1000 + (1 << 20), "what CCCL allocates is the pool's");
    need(ref == other, "references to one resource are equal");
    ref.deallocate_async(p, 1000, 256, stream);
    other.deallocate(q, 1 << 20, 64);
    need(pool.stats().requested_bytes == 0, "what CCCL frees is free");
}
#else
static_assert(::cuda::mr::resource_with<vpmm::memory_resource, ::cuda::mr::device_accessible>, "it meets the concept");

static_assert(!::cuda::mr::resource_with<vpmm::memory_resource, ::cuda::mr::host_accessible>,
              "the host does not see its memory");

static void by_reference(vpmm::memory_resource &resource, const vpmm::pool &pool, CUstream stream)
{
    ::cuda::mr::resource_ref<::cuda::mr::device_accessible> ref(resource), other(resource);
    void *p = ref.allocate(::cuda::stream_ref(stream), 1000, 256), *q = ref.allocate_sync(1 << 20, 64);
    need(p && q && pool.stats().requested_bytes == 1000 + (1 << 20), "what CCCL allocates is the pool's");
    need(ref == other, "references to one resource are equal");
    ref.deallocate(::cuda::stream_ref(stream), p, 1000, 256);
    other.deallocate_sync(q, 1 << 20, 64);
    need(pool.stats().requested_bytes == 0, "what CCCL frees is free");
}
#endif

/* Without a reference: the stream first, as later versions of CCCL call it. */
static void stream_first(vpmm::memory_resource &resource, const vpmm::pool &pool, CUstream stream)
{
    void *p = resource.allocate(::cuda::stream_ref(stream), 5000), *q = resource.allocate_sync(5000, 4096);
    need(p && reinterpret_cast<std::size_t>(q) % 4096 == 0, "an alignment is had");
    need(pool.stats().requested_bytes >= 10000, "both are live");
    resource.deallocate(::cuda::stream_ref(stream), p, 5000);
    resource.deallocate_sync(q, 5000, 4096);
    need(pool.stats().requested_bytes == 0, "both are free");
}

static void refusals(vpmm::memory_resource &resource, const vpmm::pool &pool, CUstream stream)
{
    bool thrown = false;
    try {
        resource.allocate(::cuda::stream_ref(stream), std::size_t(1) << 40);
    } catch (const std::bad_alloc &) {
        thrown = true;
    }
    need(thrown, "what is refused for want of memory is a std::bad_alloc");
    vpmm_stats before = pool.stats();
    resource.deallocate(reinterpret_cast<void *>(std::size_t(4096)), 1);
    need(pool.stats().failures == before.failures + 1, "a free that is refused throws nothing, and is counted");
}

/* Freed on the stream that is given, where the next request on that stream finds it. */
static void frees_where_it_is_told(vpmm::pool &pool, CUstream own, CUstream given, const vpmm_driver *driver)
{
    vpmm::memory_resource resource(pool, own, driver);
    ::cuda::stream_ref there(given);
    void *memory = resource.allocate(5000);
    resource.deallocate(there, memory, 5000);
    need(resource.allocate(there, 5000) == memory, "it is freed on the stream that is given");
    resource.deallocate(there, memory, 5000);
    pool.release_stream(given);
}

/* Also where the wait is refused. */
static void leaves_nothing_behind(vpmm::pool &pool, CUstream stream, vpmm_sim *sim)
{
    vpmm::memory_resource resource(pool, stream);
    vpmm_status status = VPMM_SUCCESS;
    vpmm_sim_fail(sim, "cuStreamSynchronize", 1, CUDA_ERROR_UNKNOWN, false);
    try {
        resource.allocate(100);
    } catch (const vpmm::error &error) {
        status = error.status();
    }
    need(status == VPMM_ERROR_DRIVER, "a wait that is refused is an error");
    need(pool.stats().requested_bytes == 0, "what could not be waited for is free");
    resource.deallocate(resource.allocate(100), 100);
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    vpmm_sim_driver(sim)->cuThreadExchangeStreamCaptureMode(&mode);
    need(mode == CU_STREAM_CAPTURE_MODE_GLOBAL, "the thread's mode of captures is as before");
}

/* Memory allocated without a stream is usable on all: the thread has waited for what the stream had to do. */
static void waits(vpmm::pool &pool, CUstream stream, const vpmm_driver *driver)
{
    vpmm::memory_resource resource(pool, stream, driver);
    CUdeviceptr busy = static_cast<CUdeviceptr>(reinterpret_cast<std::size_t>(resource.allocate(1 << 20)));
    driver->cuMemsetD32Async(busy, 7, 1 << 18, stream);
    void *p = resource.allocate(100);
    need(driver->cuStreamQuery(stream) == CUDA_SUCCESS, "an allocation without a stream waits for the resource's");
    resource.deallocate(p, 100);
    resource.deallocate(reinterpret_cast<void *>(static_cast<std::size_t>(busy)), 1 << 20);
}

/* Without a context of its own, for a stream of the program's and for the default ones. */
static void any_thread(vpmm::pool &pool, CUstream stream, const vpmm_driver *driver)
{
    for (CUstream of : {stream, CUstream(nullptr), CU_STREAM_LEGACY, CU_STREAM_PER_THREAD})
        std::thread([&] {
            CUcontext context = nullptr;
            try {
                vpmm::memory_resource resource(pool, of); /* the driver is the pool's */
                resource.deallocate(resource.allocate(100), 100);
            } catch (const vpmm::error &error) {
                need(false, error.what());
            }
            driver->cuCtxGetCurrent(&context);
            need(context == nullptr, "the thread's context is as before");
        }).join();
}

/*
 * Where another device's context is current, stream 0 is still that of the pool's device. The work is there until
 * somebody waits for it, because streams advance in steps.
 */
static void waits_beside_another_device()
{
    vpmm_sim_config machine = vpmm_sim_config_default();
    machine.devices = 2;
    machine.stepped = true;
    vpmm_sim *sim = vpmm_sim_create(&machine);
    const vpmm_driver *driver = vpmm_sim_driver(sim);
    vpmm_config config = vpmm_config_default();
    CUcontext own = nullptr, other = nullptr, current = nullptr;
    config.driver = driver;
    need(driver->cuInit(0) == CUDA_SUCCESS && driver->cuDevicePrimaryCtxRetain(&own, 0) == CUDA_SUCCESS &&
             driver->cuDevicePrimaryCtxRetain(&other, 1) == CUDA_SUCCESS &&
             driver->cuCtxSetCurrent(own) == CUDA_SUCCESS,
         "two devices");
    {
        vpmm::pool pool(config);
        vpmm::memory_resource resource(pool);
        vpmm::buffer busy(pool, 1 << 20, nullptr);
        driver->cuMemsetD32Async(busy.data(), 7, 1 << 18, nullptr);
        need(vpmm_sim_pending(sim, nullptr) != 0, "the stream has work");
        driver->cuCtxSetCurrent(other);
        void *p = resource.allocate(100);
        driver->cuCtxGetCurrent(&current);
        need(current == other, "the thread's context is as before");
        driver->cuCtxSetCurrent(own);
        need(vpmm_sim_pending(sim, nullptr) == 0, "the wait is for the stream of the pool's device");
        resource.deallocate(p, 100);
    }
    driver->cuDevicePrimaryCtxRelease(0);
    driver->cuDevicePrimaryCtxRelease(1);
    need(vpmm_sim_destroy(sim) == 0, "nothing leaks of two devices");
}

/* Another thread's capture goes on. */
static void waits_beside_a_capture(vpmm::pool &pool, CUcontext context, CUstream stream, CUstream other,
                                   const vpmm_driver *driver)
{
    vpmm::memory_resource resource(pool, other, driver);
    CUgraph graph = nullptr;
    driver->cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    std::thread([&] {
        driver->cuCtxSetCurrent(context);
        resource.deallocate(resource.allocate(100), 100);
    }).join();
    need(driver->cuStreamEndCapture(stream, &graph) == CUDA_SUCCESS, "the capture goes on");
    driver->cuGraphDestroy(graph);
}

int main()
{
    vpmm_sim_config machine = vpmm_sim_config_default();
    vpmm_sim *sim = vpmm_sim_create(&machine);
    vpmm_config config = vpmm_config_default();
    CUcontext context;
    CUstream stream, other, third;
    need(sim != nullptr, "the simulated GPU can be made");
    if (failed)
        return failed;
    const vpmm_driver *driver = vpmm_sim_driver(sim);
    config.driver = driver;
    config.max_mapped = std::size_t(64) << 20;
    driver->cuInit(0);
    driver->cuDevicePrimaryCtxRetain(&context, 0);
    driver->cuCtxSetCurrent(context);
    driver->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
    driver->cuStreamCreate(&other, CU_STREAM_NON_BLOCKING);
    driver->cuStreamCreate(&third, CU_STREAM_NON_BLOCKING);
    {
        vpmm::pool pool(config), second(config);
        vpmm::memory_resource resource(pool, other, driver), copy = resource, elsewhere(second, other, driver);
        need(resource == copy && resource != elsewhere, "resources of one pool are equal");
        by_reference(resource, pool, stream);
        stream_first(resource, pool, stream);
        refusals(resource, pool, stream);
        waits(pool, stream, driver);
        frees_where_it_is_told(pool, other, third, driver);
        leaves_nothing_behind(pool, other, sim);
        any_thread(pool, stream, driver);
        pool.release_stream(stream); /* before it captures */
        waits_beside_a_capture(pool, context, stream, other, driver);
    }
    driver->cuStreamDestroy(stream);
    driver->cuStreamDestroy(other);
    driver->cuStreamDestroy(third);
    driver->cuDevicePrimaryCtxRelease(0);
    need(vpmm_sim_destroy(sim) == 0, "nothing leaks");
    waits_beside_another_device();
    return failed;
}
