#include "parking.h"

#include "asked.h"
#include "pools.h"

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <utility>

namespace vpmm_torch {

static void check_call(CUresult result, const char* call) {
  TORCH_CHECK(result == CUDA_SUCCESS, "vpmm: what a memory pool holds could not be copied: ", call, " answers ",
              static_cast<int>(result));
}

/* copy(of one allocation, where it is in the host's memory, stream). Waits until all are done. */
template <typename Copy>
static void copy_all(const vpmm_driver& driver, const std::vector<Content>& contents, void* memory, Copy copy) {
  RelaxedMode relaxed; // as all here that waits, or that pins memory: another thread's capture would be lost by it
  CUstream stream = nullptr;
  auto* at = static_cast<char*>(memory);
  check_call(driver.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  auto destroy = c10::make_scope_exit([&] { driver.cuStreamDestroy(stream); });
  for (const Content& one : contents) {
    copy(one, at, stream);
    at += one.bytes;
  }
  check_call(driver.cuStreamSynchronize(stream), "cuStreamSynchronize");
}

void HostCopy::allocate(size_t bytes) {
  if (bytes <= capacity_)
    return;
  free_memory();
  RelaxedMode relaxed;
  check_call(driver_->cuCtxGetCurrent(&context_), "cuCtxGetCurrent");
  check_call(driver_->cuMemHostAlloc(&memory_, bytes, 0), "cuMemHostAlloc");
  capacity_ = bytes;
}

void HostCopy::free_memory() {
  forget();
  if (!memory_)
    return;
  RelaxedMode relaxed;
  driver_->cuCtxPushCurrent(context_);
  driver_->cuMemFreeHost(memory_);
  driver_->cuCtxPopCurrent(&context_);
  memory_ = nullptr;
  capacity_ = 0;
}

/* By memory that is freed, which spares a capture that has begun meanwhile, unless the device has not a byte left. */
static void await_device(const vpmm_driver& driver) {
  RelaxedMode relaxed;
  CUdeviceptr byte = 0;
  if (driver.cuMemAlloc(&byte, 1) == CUDA_SUCCESS)
    check_call(driver.cuMemFree(byte), "cuMemFree");
  else
    check_call(driver.cuCtxSynchronize(), "cuCtxSynchronize");
}

void HostCopy::take(vpmm_pool* pool, std::vector<Content> contents) {
  size_t bytes = 0;
  for (const Content& one : contents)
    bytes += one.bytes;
  forget();
  if (!bytes)
    return;
  driver_ = vpmm_pool_driver(pool);
  await_device(*driver_);
  allocate(bytes);
  copy_all(*driver_, contents, memory_, [this](const Content& one, void* at, CUstream stream) {
    check_call(driver_->cuMemcpyDtoHAsync(at, reinterpret_cast<CUdeviceptr>(one.address), one.bytes, stream),
               "cuMemcpyDtoHAsync");
  });
  contents_ = std::move(contents);
}

void HostCopy::put_back() {
  if (contents_.empty())
    return;
  copy_all(*driver_, contents_, memory_, [this](const Content& one, const void* at, CUstream stream) {
    check_call(driver_->cuMemcpyHtoDAsync(reinterpret_cast<CUdeviceptr>(one.address), at, one.bytes, stream),
               "cuMemcpyHtoDAsync");
  });
  forget();
}

void Parking::park(vpmm_pool* pool, bool keep, const std::function<std::vector<Content>()>& live) {
  std::lock_guard<std::mutex> guard(lock_);
  bool is_new = !parked_.exchange(true);
  auto undo = c10::make_scope_exit([&] { parked_.store(false); });
  std::vector<Content> contents = is_new ? live() : std::vector<Content>();
  if (is_new && keep)
    kept_.take(pool, std::move(contents));
  vpmm_status status = vpmm_park(pool);
  if (!is_new || status != VPMM_ERROR_BUSY) // else nothing is changed
    undo.release();
  else
    kept_.forget();
  check(status, "parking a memory pool");
}

void Parking::wake(vpmm_pool* pool, const std::function<void()>& make_room) {
  std::lock_guard<std::mutex> guard(lock_);
  if (!parked_.load())
    return;
  vpmm_status status = vpmm_wake(pool);
  if (status == VPMM_ERROR_OUT_OF_MEMORY) {
    make_room();
    status = vpmm_wake(pool);
  }
  TORCH_CHECK_WITH(OutOfMemoryError, status != VPMM_ERROR_OUT_OF_MEMORY,
                   "CUDA out of memory. vpmm: ", vpmm_last_error());
  check(status, "waking a memory pool");
  kept_.put_back();
  parked_.store(false, std::memory_order_release);
}

void Parking::empty_cache() {
  std::unique_lock<std::mutex> guard(lock_, std::try_to_lock);
  if (guard && !parked_.load())
    kept_.free_memory();
}

} // namespace vpmm_torch
