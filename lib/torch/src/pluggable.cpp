/*
 * pluggable.cpp - the two functions of a torch.cuda.memory.CUDAPluggableAllocator, for programs that give it to one
 * MemPool and leave the rest to PyTorch: memory of a pool for each device, which is made by the first request and ends
 * with the process.
 */
#include "pools.h"

#include <array>
#include <atomic>
#include <mutex>

#include <c10/util/Exception.h>
#include <vpmm/vpmm.h>

namespace {

constexpr int DEVICES = 128;

std::mutex lock;
std::array<std::atomic<vpmm_pool*>, DEVICES> pools; // each is set once, under the lock

/* As a main pool of the back end: a stream that it has met may be captured later. */
vpmm_pool* make(int device) {
  vpmm_config config = vpmm_torch::configuration(device, false);
  vpmm_pool* pool = nullptr;
  TORCH_CHECK(vpmm_pool_create(&config, &pool) == VPMM_SUCCESS, "vpmm: a pool of device ", device, ": ",
              vpmm_last_error());
  return pool;
}

vpmm_pool* pool_of(int device) {
  TORCH_CHECK(0 <= device && device < DEVICES, "vpmm: device ", device, ": at most ", DEVICES, " are known");
  std::atomic<vpmm_pool*>& pool = pools[static_cast<size_t>(device)];
  if (vpmm_pool* made = pool.load(std::memory_order_acquire)) // pairs with the release below
    return made;
  std::lock_guard<std::mutex> guard(lock);
  if (!pool.load(std::memory_order_relaxed))
    pool.store(make(device), std::memory_order_release);
  return pool.load(std::memory_order_relaxed);
}

} // namespace

/* NULL: there is no memory, which PyTorch tells as an error of its own. */
extern "C" __attribute__((visibility("default"))) void* vpmm_torch_malloc(size_t bytes, int device, CUstream stream) {
  CUdeviceptr address = 0;
  vpmm_status status = vpmm_malloc(pool_of(device), bytes, stream, &address);
  TORCH_CHECK(status == VPMM_SUCCESS || status == VPMM_ERROR_OUT_OF_MEMORY || status == VPMM_ERROR_OUT_OF_ADDRESS_SPACE,
              "vpmm: an allocation: ", vpmm_last_error());
  return reinterpret_cast<void*>(address);
}

/* Behind that stream. */
extern "C" __attribute__((visibility("default"))) void vpmm_torch_free(void* address, size_t, int device,
                                                                       CUstream stream) {
  vpmm_status status = vpmm_free(pool_of(device), reinterpret_cast<CUdeviceptr>(address), stream);
  TORCH_CHECK(status == VPMM_SUCCESS, "vpmm: a free: ", vpmm_last_error());
}
