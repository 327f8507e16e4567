/*
 * vpmm/memory_resource.hpp - a pool as a memory resource of the CUDA C++ core libraries (CCCL), and so of RMM, whose
 * device_async_resource_ref takes one:
 *
 *   vpmm::pool pool;
 *   vpmm::memory_resource resource(pool);
 *   rmm::device_buffer scores(bytes, stream, resource);
 *
 * It meets cuda::mr::async_resource_with<..., cuda::mr::device_accessible> of CCCL up to 3.0, and of later versions
 * cuda::mr::resource_with, whose functions take the stream first. CCCL's headers are on the include path: CUDA 13 has
 * them in include/cccl of the toolkit, earlier versions beside cuda.h. CCCL up to 3.0 declares the concept only with
 * LIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE, which is defined here; include this header before CCCL's, or define
 * it for the whole program, as RMM does. Tried with CCCL 2.2 to 3.6, and with the headers of RMM 25.06 to 26.08.
 */
#ifndef VPMM_MEMORY_RESOURCE_HPP
#define VPMM_MEMORY_RESOURCE_HPP

#if !__has_include(<cuda/memory_resource>)
#error                                                                                                                 \
    "vpmm/memory_resource.hpp stands on the CUDA C++ core libraries (CCCL), and <cuda/memory_resource> is not found. \
Add their folder to the include path: -isystem <CUDA Toolkit>/include/cccl of CUDA 13, <CUDA Toolkit>/include before it."
#else

#ifndef LIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE
#define LIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE
#endif

#include <cuda/memory_resource>
#include <cuda/stream_ref>
#include <vpmm/vpmm.hpp>

namespace vpmm
{

#ifdef CUDA_API_PER_THREAD_DEFAULT_STREAM
inline namespace per_thread_default_stream /* see vpmm.hpp */
{
#endif

/*
 * Any thread may call. The pool outlives it; copies are equal, and so are those of one pool.
 *
 * Memory that was allocated on a stream is usable at once by work queued there; by work elsewhere, once that is ordered
 * behind the stream, as the concept has it. What was allocated without a stream is usable everywhere: the calling
 * thread waits until the resource's own stream has come so far.
 *
 * To allocate throws what vpmm::resource throws. To deallocate throws nothing, because destructors do it: what the pool
 * refuses stays allocated, vpmm_last_error() says why, and the pool's statistics count a failure.
 */
class memory_resource
{
  public:
    static constexpr std::size_t default_alignment = resource::default_alignment;

    /* `stream`: for what is allocated without one. `driver`: whose streams they are; NULL: as the pool's. */
    explicit memory_resource(pool &of, CUstream stream = nullptr, const vpmm_driver *driver = nullptr)
        : memory_resource(of.get(), stream, driver)
    {
    }

    explicit memory_resource(vpmm_pool *of, CUstream stream = nullptr, const vpmm_driver *driver = nullptr)
        : resource_(of, stream), driver_(driver != nullptr ? driver : vpmm_pool_driver(of))
    {
        vpmm_device device;
        throw_if(vpmm_device_get(of, &device));
        ordinal_ = device.ordinal;
    }

    void *allocate_async(std::size_t bytes, std::size_t alignment, ::cuda::stream_ref stream)
    {
        return resource_.allocate(bytes, alignment, stream.get());
    }

    void deallocate_async(void *address, std::size_t bytes, std::size_t alignment, ::cuda::stream_ref stream) noexcept
    {
        free_on(stream.get(), address, bytes, alignment);
    }

    void *allocate(::cuda::stream_ref stream, std::size_t bytes, std::size_t alignment = default_alignment)
    {
        return resource_.allocate(bytes, alignment, stream.get());
    }

    void deallocate(::cuda::stream_ref stream, void *address, std::size_t bytes,
                    std::size_t alignment = default_alignment) noexcept
    {
        free_on(stream.get(), address, bytes, alignment);
    }

    /* Also throws error, VPMM_ERROR_DRIVER, if the stream cannot be waited for. */
    void *allocate_sync(std::size_t bytes, std::size_t alignment = default_alignment)
    {
        void *address = resource_.allocate(bytes, alignment);
        CUresult result = wait();
        if (result == CUDA_SUCCESS)
            return address;
        deallocate_sync(address, bytes, alignment);
        throw error(VPMM_ERROR_DRIVER, "cuStreamSynchronize answered " + std::to_string(static_cast<int>(result)) +
                                           " where memory was to be usable on all streams");
    }

    /* The work that uses it has ended, or is before the resource's stream. */
    void deallocate_sync(void *address, std::size_t bytes, std::size_t alignment = default_alignment) noexcept
    {
        free_on(resource_.stream(), address, bytes, alignment);
    }

    void *allocate(std::size_t bytes, std::size_t alignment = default_alignment)
    {
        return allocate_sync(bytes, alignment);
    }

    void deallocate(void *address, std::size_t bytes, std::size_t alignment = default_alignment) noexcept
    {
        deallocate_sync(address, bytes, alignment);
    }

    friend bool operator==(const memory_resource &a, const memory_resource &b) noexcept
    {
        return a.resource_ == b.resource_;
    }

    friend bool operator!=(const memory_resource &a, const memory_resource &b) noexcept
    {
        return a.resource_ != b.resource_;
    }

    friend void get_property(const memory_resource &, ::cuda::mr::device_accessible) noexcept {}

  private:
    CUresult wait() const
    {
        CUdevice own = 0, current = 0;
        bool is_own = driver_->cuDeviceGet(&own, ordinal_) == CUDA_SUCCESS &&
                      driver_->cuCtxGetDevice(&current) == CUDA_SUCCESS && current == own;
        return is_own ? wait_here() : wait_in_context();
    }

    /* Of a thread that has none, or another device's: in the device's primary one, which is the pool's. */
    CUresult wait_in_context() const
    {
        CUdevice device = 0;
        CUcontext context = nullptr;
        CUresult result = driver_->cuDeviceGet(&device, ordinal_);
        if (result == CUDA_SUCCESS)
            result = driver_->cuDevicePrimaryCtxRetain(&context, device);
        if (result != CUDA_SUCCESS)
            return result;
        result = driver_->cuCtxPushCurrent(context);
        if (result == CUDA_SUCCESS) {
            result = wait_here();
            driver_->cuCtxPopCurrent(&context);
        }
        driver_->cuDevicePrimaryCtxRelease(device);
        return result;
    }

    /* In relaxed mode: beside another thread's capture the driver else refuses, and ends the capture. */
    CUresult wait_here() const
    {
        CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
        driver_->cuThreadExchangeStreamCaptureMode(&mode);
        CUresult result = driver_->cuStreamSynchronize(stream_to_wait_for());
        driver_->cuThreadExchangeStreamCaptureMode(&mode);
        return result;
    }

    /* As the driver's table knows it. */
    CUstream stream_to_wait_for() const noexcept
    {
#ifdef CUDA_API_PER_THREAD_DEFAULT_STREAM
        return resource_.stream() != nullptr ? resource_.stream() : CU_STREAM_PER_THREAD;
#else
        return resource_.stream();
#endif
    }

    void free_on(CUstream stream, void *address, std::size_t bytes, std::size_t alignment) noexcept
    {
        resource_.deallocate(address, bytes, alignment, stream);
    }

    resource resource_;
    const vpmm_driver *driver_;
    int ordinal_ = 0;
};

#ifdef CUDA_API_PER_THREAD_DEFAULT_STREAM
} // namespace per_thread_default_stream
#endif

} // namespace vpmm

#endif
#endif
