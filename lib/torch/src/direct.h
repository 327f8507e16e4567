/*
 * direct.h - memory of CUDA's own, for a program that does without its allocator for a while, or a tool that wants to
 * see each allocation. Its addresses are noted, so that they can be freed when the allocator is in use again.
 */
#ifndef VPMM_TORCH_DIRECT_H
#define VPMM_TORCH_DIRECT_H

#include <mutex>
#include <unordered_set>

#include <c10/cuda/CUDAException.h>
#include <cuda_runtime_api.h>

namespace vpmm_torch {

class Direct {
 public:
  /* On the current device. Throws CUDA's error, also while a stream captures. */
  void* malloc(size_t bytes) {
    void* address = nullptr;
    C10_CUDA_CHECK(cudaMalloc(&address, bytes));
    std::lock_guard<std::mutex> guard(lock_);
    live_.insert(address);
    return address;
  }

  /* False: it is no such memory. Throws CUDA's error. */
  bool free(void* address) {
    {
      std::lock_guard<std::mutex> guard(lock_);
      if (!live_.erase(address))
        return false;
    }
    C10_CUDA_CHECK(cudaFree(address));
    return true;
  }

 private:
  std::mutex lock_;
  std::unordered_set<void*> live_;
};

} // namespace vpmm_torch

#endif
