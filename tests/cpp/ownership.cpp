/*
 * vpmm.hpp on the simulated GPU: what is owned is given back once, by whom it should be, and errors are the exceptions
 * that the header names. Exit status 1 and a line for what is not as documented.
 */
#include "need.hpp"

#include <cstring>
#include <type_traits>
#include <vector>

#include <vpmm/sim.h>
#include <vpmm/vpmm.hpp>

static_assert(!std::is_copy_constructible<vpmm::pool>::value && !std::is_copy_constructible<vpmm::buffer>::value,
              "one owner");
static_assert(std::is_nothrow_move_constructible<vpmm::buffer>::value &&
                  std::is_nothrow_move_assignable<vpmm::buffer>::value,
              "vectors move buffers");
static_assert(noexcept(std::declval<vpmm::resource &>().deallocate(nullptr, 0)), "destructors free");
static_assert(noexcept(std::declval<vpmm::resource &>().deallocate(nullptr, 0, 1, nullptr)), "on any stream");

static vpmm_config on(vpmm_sim *sim)
{
    vpmm_config config = vpmm_config_default();
    config.driver = vpmm_sim_driver(sim);
    config.max_mapped = std::size_t(64) << 20;
    return config;
}

/* The status that the call throws, as an error or as std::bad_alloc; VPMM_SUCCESS: it does not. */
template <class Call> static vpmm_status thrown_by(Call call)
{
    try {
        call();
    } catch (const vpmm::out_of_memory &e) {
        need(std::strlen(e.what()) != 0, "out of memory has words");
        return e.status();
    } catch (const vpmm::error &e) {
        need(std::strlen(e.what()) != 0, "an error has words");
        return e.status();
    }
    return VPMM_SUCCESS;
}

static void buffers(vpmm::pool &pool, CUstream stream, CUstream other)
{
    {
        vpmm::buffer a(pool, 1000, stream), b(pool, std::size_t(3) << 20, stream), empty;
        CUdeviceptr first = a.data(), second = b.data();
        need(first != 0 && a.size() == 1000 && a.stream() == stream && empty.empty(), "a buffer knows what it has");
        need(pool.stats().requested_bytes == 1000 + (std::size_t(3) << 20), "both are live");
        a = std::move(b);
        need(a.data() == second && b.empty(), "what is assigned to gives back what it had");
        need(pool.stats().requested_bytes == std::size_t(3) << 20, "that was freed, once");
        std::vector<vpmm::buffer> several;
        several.push_back(std::move(a));
        several.emplace_back(pool, 4096, stream);
        several.back().set_stream(other);
        vpmm::buffer moved(std::move(several.back()));
        need(moved.stream() == other && moved.size() == 4096, "what moves is freed on the stream that was set");
        several.back() = std::move(moved);
        need(several.back().stream() == other && moved.empty(), "also what is assigned");
        need(pool.stats().requested_bytes == (std::size_t(3) << 20) + 4096, "a vector owns them");
        several.front().use(other);
        pool.use(several.front().data(), stream);
        need(pool.stats().uses == 2, "uses by further streams are the pool's to know");
        several.front().reset();
        need(several.front().empty() && pool.stats().requested_bytes == 4096, "reset frees at once");
    }
    need(pool.stats().requested_bytes == 0, "the scope's end frees");
    {
        std::uint64_t failures = pool.stats().failures;
        vpmm::buffer nothing(pool, 0, stream);
        need(nothing.empty() && nothing.size() == 0 && nothing.stream() == stream, "a buffer of nothing is empty");
        need(pool.stats().failures == failures, "and no request");
    }
    vpmm::buffer kept(pool, 100, stream);
    CUdeviceptr address = kept.release();
    need(kept.empty() && pool.stats().requested_bytes == 100, "what is released stays");
    pool.deallocate(address, stream);
}

static void resources(vpmm::pool &pool, CUstream stream, CUstream other, CUstream third)
{
    vpmm::resource on_stream(pool, stream), on_other(pool, other);
    need(on_stream == on_other && on_stream.stream() != on_other.stream(), "one pool: each frees what the other has");
    for (std::size_t alignment = 1; alignment <= std::size_t(2) << 20; alignment *= 2)
        for (std::size_t bytes : {std::size_t(0), std::size_t(1), std::size_t(700), std::size_t(70) << 10,
                                  std::size_t(2) << 20, std::size_t(2400) << 10}) {
            void *memory = on_stream.allocate(bytes, alignment);
            need(memory != nullptr && reinterpret_cast<std::size_t>(memory) % alignment == 0, "it is aligned");
            need(pool.stats().requested_bytes >= (bytes != 0 ? bytes : 1), "and no shorter than was asked for");
            on_stream.deallocate(memory, bytes, alignment);
        }
    void *memory = on_stream.allocate(5000, 256, other);
    on_other.deallocate(memory, 5000, 256);
    need(thrown_by([&] { pool.release_stream(third); }) == VPMM_SUCCESS, "also of a stream that the pool has not met");
    memory = on_stream.allocate(5000, 256);
    on_stream.deallocate(memory, 5000, 256, third);
    need(on_stream.allocate(5000, 256, third) == memory, "it is freed on the stream that is given");
    on_stream.deallocate(memory, 5000, 256, third);
    need(thrown_by([&] { pool.release_stream(third); }) == VPMM_SUCCESS, "which the pool has met");
    need(pool.stats().requested_bytes == 0, "all were freed");
    need(thrown_by([&] { on_stream.allocate(1, 3); }) == VPMM_ERROR_INVALID_VALUE, "3 is no alignment");
    for (int power : {22, 40})
        need(thrown_by([&] { on_stream.allocate(1, std::size_t(1) << power); }) == VPMM_ERROR_NOT_SUPPORTED,
             "nor is more than a page");
    for (std::size_t bytes : {SIZE_MAX, SIZE_MAX - 100, SIZE_MAX / 2, (std::size_t(UINT32_MAX) << 21) + 1})
        for (std::size_t alignment : {256, 4096})
            need(thrown_by([&] { on_stream.allocate(bytes, alignment); }) == VPMM_ERROR_OUT_OF_ADDRESS_SPACE,
                 "what no memory has is a std::bad_alloc");
    need(pool.stats().requested_bytes == 0, "what is refused leaves nothing");
    std::uint64_t failures = pool.stats().failures;
    on_stream.deallocate(reinterpret_cast<void *>(std::size_t(4096)), 1);
    need(pool.stats().failures == failures + 1, "a free that is refused throws nothing, and is counted");
}

static const vpmm_driver *simulated;
static CUdeviceptr kept; /* what refuse_once has kept */

static CUresult refuse_once(CUdeviceptr address, CUstream stream)
{
    if (kept != 0)
        return simulated->cuMemFreeAsync(address, stream);
    kept = address;
    return CUDA_ERROR_INVALID_VALUE;
}

/* The driver's pool aligns to less than what is asked for, and is not always given back what it has. */
static void misaligned(vpmm_sim *sim, CUstream stream)
{
    vpmm_config config = on(sim);
    vpmm_driver driver = *config.driver;
    simulated = config.driver;
    config.small = VPMM_SMALL_ASYNC;
    vpmm::pool pool(config);
    vpmm::resource resource(pool, stream);
    vpmm::buffer first(pool, 512, stream);
    need(thrown_by([&] { resource.allocate(700, 1 << 16); }) == VPMM_ERROR_NOT_SUPPORTED, "more than the pool has");
    need(pool.stats().requested_bytes == 512, "what is not aligned is freed");
    driver.cuMemFreeAsync = refuse_once;
    config.driver = &driver;
    vpmm::pool refused(config);
    vpmm::buffer before(refused, 512, stream);
    need(thrown_by([&] { vpmm::resource(refused, stream).allocate(700, 1 << 16); }) == VPMM_ERROR_NOT_SUPPORTED,
         "the alignment is what is said, also where that free is refused");
    need(kept != 0 && refused.stats().requested_bytes == 512 + (1 << 16), "what is refused stays");
    refused.deallocate(kept, stream);
}

static bool is_bad_alloc(vpmm_status status)
{
    try {
        vpmm::throw_if(status);
    } catch (const vpmm::out_of_memory &e) {
        return e.status() == status;
    } catch (const vpmm::error &) {
    }
    return false;
}

static void errors(vpmm::pool &pool, CUstream stream)
{
    need(is_bad_alloc(VPMM_ERROR_OUT_OF_MEMORY) && is_bad_alloc(VPMM_ERROR_OUT_OF_ADDRESS_SPACE) &&
             is_bad_alloc(VPMM_ERROR_HOST_MEMORY) && !is_bad_alloc(VPMM_ERROR_DRIVER),
         "each want of memory is a std::bad_alloc");
    need(thrown_by([&] { pool.allocate(std::size_t(1) << 30, stream); }) == VPMM_ERROR_OUT_OF_MEMORY, "above the cap");
    bool is_bad_alloc = false;
    try {
        vpmm::buffer(pool, std::size_t(1) << 30, stream);
    } catch (const std::bad_alloc &) {
        is_bad_alloc = true;
    }
    need(is_bad_alloc, "out of memory is a std::bad_alloc");
    need(thrown_by([&] { pool.deallocate(4096, stream); }) == VPMM_ERROR_INVALID_POINTER, "a pointer of nobody's");
    vpmm::buffer live(pool, 1, stream);
    need(thrown_by([&] { pool.close(); }) == VPMM_ERROR_BUSY && pool.get() != nullptr, "a busy pool stays");
}

/* What a pool had that is assigned to has ended: its reaper, and the context that it retained. */
static void assignment(vpmm_sim *sim)
{
    vpmm::pool a(on(sim)), b(on(sim));
    vpmm_pool *second = b.get();
    a = std::move(b);
    need(a.get() == second && b.get() == nullptr, "a pool is assigned");
}

/* What C code has made: owned, or used while somebody else owns it. */
static void pools_of_others(vpmm_sim *sim, CUstream stream)
{
    vpmm_config config = on(sim);
    vpmm_pool *made = nullptr;
    need(vpmm_pool_create(&config, &made) == VPMM_SUCCESS, "a pool is made");
    {
        vpmm::buffer memory(made, 5000, stream);
        vpmm::resource resource(made, stream);
        resource.deallocate(resource.allocate(700), 700);
        need(memory.size() == 5000 && !memory.empty(), "it is used by its pointer");
    }
    vpmm::pool owner = vpmm::pool::adopt(made);
    need(owner.get() == made && owner.stats().requested_bytes == 0, "it has an owner");
    owner.set_attribute(VPMM_ATTRIBUTE_DECAY_MS, 5);
    need(owner.attribute(VPMM_ATTRIBUTE_DECAY_MS) == 5, "its attributes are set and read");
    owner.poll();
}

static void parking(vpmm_sim *sim, CUstream stream)
{
    vpmm_config config = on(sim);
    config.graph = true;
    vpmm::pool pool(config);
    vpmm::buffer live(pool, 1, stream);
    pool.park();
    need(pool.stats().mapped_bytes == 0 && pool.stats().parked_bytes > 0, "a parked pool holds nothing");
    pool.wake();
    need(pool.stats().mapped_bytes > 0 && pool.stats().parked_bytes == 0, "a pool wakes");
}

int main()
{
    vpmm_sim *sim = vpmm_sim_create(nullptr);
    const vpmm_driver *driver = vpmm_sim_driver(sim);
    CUcontext context = nullptr;
    CUstream stream = nullptr, other = nullptr, third = nullptr;
    need(driver->cuInit(0) == CUDA_SUCCESS && driver->cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS &&
             driver->cuCtxSetCurrent(context) == CUDA_SUCCESS &&
             driver->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS &&
             driver->cuStreamCreate(&other, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS &&
             driver->cuStreamCreate(&third, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS,
         "a device");
    if (failed)
        return failed;
    {
        vpmm::pool first(on(sim)), pool(std::move(first));
        need(first.get() == nullptr && pool.get() != nullptr, "a pool moves");
        buffers(pool, stream, other);
        resources(pool, stream, other, third);
        misaligned(sim, stream);
        assignment(sim);
        pools_of_others(sim, stream);
        errors(pool, stream);
        pool.release_stream(other);
        pool.trim();
        need(pool.stats().mapped_bytes == 0, "a trim gives all back");
        pool.release_stream(stream);
        pool.close();
        need(pool.get() == nullptr, "a closed pool is gone");
        vpmm::pool ends_with_its_scope(on(sim));
        need(thrown_by([&] { ends_with_its_scope.set_access(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE); }) ==
                 VPMM_ERROR_INVALID_VALUE,
             "a pool's own device has access");
        need(thrown_by([&] { ends_with_its_scope.park(); }) == VPMM_ERROR_NOT_SUPPORTED, "a graph's pool alone parks");
        parking(sim, stream);
    }
    vpmm_config wrong = on(sim);
    wrong.page_size = 3;
    need(thrown_by([&] { vpmm::pool refused(wrong); }) == VPMM_ERROR_INVALID_VALUE, "a wrong setting");
    driver->cuStreamDestroy(stream);
    driver->cuStreamDestroy(other);
    driver->cuStreamDestroy(third);
    driver->cuDevicePrimaryCtxRelease(0);
    need(vpmm_sim_destroy(sim) == 0, "nothing is left");
    return failed;
}
