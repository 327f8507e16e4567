/*
 * vpmm/vpmm.hpp - vpmm.h for C++17: what is owned ends with its scope, and errors are exceptions. Nothing else: each
 * function here is a call or two of vpmm.h, whose rules hold, those of threads and of stream order above all.
 *
 *   vpmm::pool pool;                                    // defaults, then the VPMM_* environment variables
 *   vpmm::buffer scores(pool, bytes, stream);           // usable at once by work queued on stream
 *   ...queue work on stream with scores.data()...
 *                                                       // freed at this point of stream, as scores goes out of scope
 *
 *   pool       owns a vpmm_pool
 *   buffer     owns an allocation, and knows the stream that it will be freed on
 *   resource   a pool and a stream as allocators take them: allocate and deallocate, with or without another stream
 *
 * A moved-from pool or buffer owns nothing, and may be destroyed or assigned to.
 */
#ifndef VPMM_HPP
#define VPMM_HPP

#include <cstddef>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include <vpmm/observe.h>
#include <vpmm/vpmm.h>

namespace vpmm
{

/* Where stream 0 is each thread's own these are other classes than elsewhere, since they call other functions. */
#ifdef CUDA_API_PER_THREAD_DEFAULT_STREAM
inline namespace per_thread_default_stream
{
#endif

/* What a vpmm_status other than VPMM_SUCCESS becomes; what() is vpmm_last_error(). */
class error : public std::runtime_error
{
  public:
    error(vpmm_status status, const std::string &words) : std::runtime_error(words), status_(status) {}

    vpmm_status status() const noexcept
    {
        return status_;
    }

  private:
    vpmm_status status_;
};

/* VPMM_ERROR_OUT_OF_MEMORY, _OUT_OF_ADDRESS_SPACE and _HOST_MEMORY: what programs catch as std::bad_alloc. */
class out_of_memory : public std::bad_alloc
{
  public:
    out_of_memory(vpmm_status status, const std::string &words) : error_(status, words) {}

    vpmm_status status() const noexcept
    {
        return error_.status();
    }

    const char *what() const noexcept override
    {
        return error_.what();
    }

  private:
    error error_;
};

/* Throws what the status says of the calling thread's last call; VPMM_SUCCESS: nothing. */
inline void throw_if(vpmm_status status)
{
    if (status == VPMM_SUCCESS)
        return;
    if (status == VPMM_ERROR_OUT_OF_MEMORY || status == VPMM_ERROR_OUT_OF_ADDRESS_SPACE ||
        status == VPMM_ERROR_HOST_MEMORY)
        throw out_of_memory(status, vpmm_last_error());
    throw error(status, vpmm_last_error());
}

/* Any thread may call on one pool at the same time, but for close, release, moves and the destructor. */
class pool
{
  public:
    /* vpmm_pool_create with the defaults and the environment, or with these settings alone. */
    pool() : pool(nullptr) {}

    explicit pool(const vpmm_config &config) : pool(&config) {}

    pool(pool &&other) noexcept : pool_(std::exchange(other.pool_, nullptr)) {}

    pool &operator=(pool &&other) noexcept
    {
        if (this != &other) {
            destroy();
            pool_ = std::exchange(other.pool_, nullptr);
        }
        return *this;
    }

    /* As vpmm_pool_destroy, whose status is lost: a pool with live allocations stays, with all that is in it. */
    ~pool()
    {
        destroy();
    }

    /* vpmm_pool_destroy, which throws: DRIVER or HOST_MEMORY, and the pool is gone; else it is still owned. */
    void close()
    {
        vpmm_status status = vpmm_pool_destroy(pool_);
        if (status == VPMM_SUCCESS || status == VPMM_ERROR_DRIVER || status == VPMM_ERROR_HOST_MEMORY)
            pool_ = nullptr;
        throw_if(status);
    }

    vpmm_pool *get() const noexcept
    {
        return pool_;
    }

    /* Owns from now on what was made elsewhere. Not a default pool (vpmm_pool_default), which nobody owns. */
    static pool adopt(vpmm_pool *owned) noexcept
    {
        pool adopted(owned, nothing_is_made());
        return adopted;
    }

    /* The caller's from now on. */
    vpmm_pool *release() noexcept
    {
        return std::exchange(pool_, nullptr);
    }

    CUdeviceptr allocate(std::size_t bytes, CUstream stream)
    {
        CUdeviceptr address = 0;
        throw_if(vpmm_malloc(pool_, bytes, stream, &address));
        return address;
    }

    void deallocate(CUdeviceptr address, CUstream stream)
    {
        throw_if(vpmm_free(pool_, address, stream));
    }

    /* vpmm_use: work on the stream uses a live allocation too. */
    void use(CUdeviceptr address, CUstream stream)
    {
        throw_if(vpmm_use(pool_, address, stream));
    }

    /* vpmm_stream_release: before cuStreamDestroy. */
    void release_stream(CUstream stream)
    {
        throw_if(vpmm_stream_release(pool_, stream));
    }

    /* Bytes of extents that the driver has taken back. */
    std::size_t trim(std::size_t keep_bytes = 0)
    {
        std::size_t released = 0;
        throw_if(vpmm_trim(pool_, keep_bytes, &released));
        return released;
    }

    /* vpmm_poll: what the pool's thread does, if it has none. */
    void poll()
    {
        throw_if(vpmm_poll(pool_));
    }

    std::uint64_t attribute(vpmm_attribute which) const
    {
        std::uint64_t value = 0;
        throw_if(vpmm_pool_get_attribute(pool_, which, &value));
        return value;
    }

    void set_attribute(vpmm_attribute which, std::uint64_t value)
    {
        throw_if(vpmm_pool_set_attribute(pool_, which, value));
    }

    /* vpmm_pool_set_access: of a device other than the pool's. */
    void set_access(int device, CUmemAccess_flags flags)
    {
        throw_if(vpmm_pool_set_access(pool_, device, flags));
    }

    /* vpmm_park, of a pool with `graph`: its memory is the device's until it wakes, its addresses stay. */
    void park()
    {
        throw_if(vpmm_park(pool_));
    }

    void wake()
    {
        throw_if(vpmm_wake(pool_));
    }

    vpmm_stats stats() const
    {
        vpmm_stats stats;
        throw_if(vpmm_stats_get(pool_, &stats));
        return stats;
    }

  private:
    struct nothing_is_made {
    };

    pool(vpmm_pool *owned, nothing_is_made /* but owned */) noexcept : pool_(owned) {}

    explicit pool(const vpmm_config *config)
    {
        throw_if(vpmm_pool_create(config, &pool_));
    }

    void destroy() noexcept
    {
        static_cast<void>(vpmm_pool_destroy(std::exchange(pool_, nullptr)));
    }

    vpmm_pool *pool_ = nullptr;
};

/* An allocation; of zero bytes: none. Its pool and its stream outlive it. One thread at a time. */
class buffer
{
  public:
    buffer() noexcept = default;

    buffer(pool &from, std::size_t bytes, CUstream stream) : buffer(from.get(), bytes, stream) {}

    /* Of a pool that is not a vpmm::pool, as vpmm_pool_default's. */
    buffer(vpmm_pool *from, std::size_t bytes, CUstream stream) : pool_(from), bytes_(bytes), stream_(stream)
    {
        if (bytes != 0)
            throw_if(vpmm_malloc(pool_, bytes, stream, &address_));
    }

    buffer(buffer &&other) noexcept
    {
        swap(other);
    }

    buffer &operator=(buffer &&other) noexcept
    {
        buffer taken(std::move(other));
        swap(taken);
        return *this;
    }

    /* Frees on the stream. A status other than VPMM_SUCCESS is lost here: reset says it. */
    ~buffer()
    {
        if (address_ != 0)
            static_cast<void>(vpmm_free(pool_, address_, stream_));
    }

    /* Frees now, at this point of the stream, and throws what that says; the allocation is then still owned. */
    void reset()
    {
        if (address_ != 0)
            throw_if(vpmm_free(pool_, address_, stream_));
        address_ = 0;
        bytes_ = 0;
    }

    CUdeviceptr data() const noexcept
    {
        return address_;
    }

    std::size_t size() const noexcept
    {
        return bytes_;
    }

    bool empty() const noexcept
    {
        return address_ == 0;
    }

    CUstream stream() const noexcept
    {
        return stream_;
    }

    /* It is freed on this stream, before whose point of the free every earlier use is ordered by the caller. */
    void set_stream(CUstream stream) noexcept
    {
        stream_ = stream;
    }

    /* vpmm_use: work on this stream uses it too, and its end counts as well as the free's. */
    void use(CUstream stream)
    {
        if (address_ != 0)
            throw_if(vpmm_use(pool_, address_, stream));
    }

    /* The caller's from now on, to be freed with vpmm_free. */
    CUdeviceptr release() noexcept
    {
        bytes_ = 0;
        return std::exchange(address_, 0);
    }

    void swap(buffer &other) noexcept
    {
        std::swap(pool_, other.pool_);
        std::swap(address_, other.address_);
        std::swap(bytes_, other.bytes_);
        std::swap(stream_, other.stream_);
    }

  private:
    vpmm_pool *pool_ = nullptr;
    CUdeviceptr address_ = 0;
    std::size_t bytes_ = 0;
    CUstream stream_ = nullptr;
};

/*
 * A pool and a stream with the functions of std::pmr::memory_resource, and of resources that take a stream in each
 * call. It is no std::pmr::memory_resource, whose memory the host may touch. The pool outlives it; copies are equal.
 */
class resource
{
  public:
    /* What vpmm_malloc promises of any request. More costs memory: see allocate. */
    static constexpr std::size_t default_alignment = 256;

    explicit resource(pool &of, CUstream stream = nullptr) : resource(of.get(), stream) {}

    explicit resource(vpmm_pool *of, CUstream stream = nullptr) : pool_(of), stream_(stream)
    {
        vpmm_device device;
        throw_if(vpmm_device_get(pool_, &device));
        page_bytes_ = device.page_size;
    }

    /* On the resource's stream. */
    void *allocate(std::size_t bytes, std::size_t alignment = default_alignment)
    {
        return allocate(bytes, alignment, stream_);
    }

    /*
     * An alignment is a power of two up to the pool's page; beyond default_alignment the request is rounded up to a
     * power of two, or to whole pages, which have it. Throws error otherwise: VPMM_ERROR_INVALID_VALUE, or
     * VPMM_ERROR_NOT_SUPPORTED for more than a page, and for more than 256 bytes with VPMM_SMALL_ASYNC. A size that
     * overflows when it is rounded is VPMM_ERROR_OUT_OF_ADDRESS_SPACE here, as any is that no memory can have.
     */
    void *allocate(std::size_t bytes, std::size_t alignment, CUstream stream)
    {
        if (alignment == 0 || (alignment & (alignment - 1)) != 0)
            throw error(VPMM_ERROR_INVALID_VALUE, words_of(alignment, "is no power of two"));
        if (alignment > page_bytes_)
            throw error(VPMM_ERROR_NOT_SUPPORTED,
                        words_of(alignment, "is more than a page of this pool, " + std::to_string(page_bytes_)));
        CUdeviceptr address = 0;
        std::size_t length = request(bytes, alignment);
        vpmm_status status = vpmm_malloc(pool_, length, stream, &address);
        bool overflows = length / page_bytes_ >= UINT32_MAX || length > SIZE_MAX - page_bytes_;
        throw_if(status == VPMM_ERROR_INVALID_VALUE && overflows ? VPMM_ERROR_OUT_OF_ADDRESS_SPACE : status);
        if (address % alignment != 0) {
            static_cast<void>(vpmm_free(pool_, address, stream)); /* what follows says more */
            throw error(VPMM_ERROR_NOT_SUPPORTED, words_of(alignment, "is more than this pool has"));
        }
        return reinterpret_cast<void *>(static_cast<std::size_t>(address));
    }

    /*
     * To deallocate throws nothing, because destructors do it: what the pool refuses stays allocated, vpmm_last_error()
     * says why, and the pool's statistics count a failure. pool::deallocate throws.
     */
    void deallocate(void *address, std::size_t bytes, std::size_t alignment = default_alignment) noexcept
    {
        deallocate(address, bytes, alignment, stream_);
    }

    void deallocate(void *address, std::size_t bytes, std::size_t alignment, CUstream stream) noexcept
    {
        static_cast<void>(bytes), static_cast<void>(alignment); /* the pool knows them */
        CUdeviceptr memory = static_cast<CUdeviceptr>(reinterpret_cast<std::size_t>(address));
        static_cast<void>(vpmm_free(pool_, memory, stream));
    }

    CUstream stream() const noexcept
    {
        return stream_;
    }

    /* Whether what one has allocated the other can free. */
    bool is_equal(const resource &other) const noexcept
    {
        return pool_ == other.pool_;
    }

  private:
    static std::string words_of(std::size_t alignment, const std::string &what)
    {
        return "an alignment of " + std::to_string(alignment) + " bytes " + what;
    }

    /* Zero bytes are an allocation here, as they are in C++. */
    std::size_t request(std::size_t bytes, std::size_t alignment) const noexcept
    {
        std::size_t power = alignment;
        if (alignment <= default_alignment)
            return bytes != 0 ? bytes : 1;
        while (power < bytes && power < page_bytes_)
            power *= 2;
        bool is_pages = bytes > page_bytes_ && bytes <= SIZE_MAX - page_bytes_; /* else too long in any case */
        return bytes <= power ? power : is_pages ? (bytes + page_bytes_ - 1) / page_bytes_ * page_bytes_ : bytes;
    }

    vpmm_pool *pool_;
    CUstream stream_;
    std::size_t page_bytes_ = 0;
};

inline bool operator==(const resource &a, const resource &b) noexcept
{
    return a.is_equal(b);
}

inline bool operator!=(const resource &a, const resource &b) noexcept
{
    return !a.is_equal(b);
}

#ifdef CUDA_API_PER_THREAD_DEFAULT_STREAM
} // namespace per_thread_default_stream
#endif

} // namespace vpmm

#endif
