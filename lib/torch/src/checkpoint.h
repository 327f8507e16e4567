/*
 * checkpoint.h - what was live in a private pool at one time, so that it can be live there again: wanted.h says what
 * for.
 *
 * PyTorch keeps a checkpoint with the graph that it was taken after. While it does the addresses are wanted; a pool
 * that ends before takes no notice of its checkpoints.
 */
#ifndef VPMM_TORCH_CHECKPOINT_H
#define VPMM_TORCH_CHECKPOINT_H

#include "frees.h"
#include "pools.h"

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <c10/cuda/CUDACachingAllocator.h>

namespace vpmm_torch {

class Checkpoint final : public c10::cuda::CUDACachingAllocator::AllocatorState {
 public:
  struct Live {
    void* address;
    size_t bytes, block; // as its Allocation has them
  };

  Checkpoint(std::shared_ptr<Pool> pool, Frees& frees) : pool_(std::move(pool)), frees_(frees) {}
  Checkpoint(const Checkpoint&) = delete;
  Checkpoint& operator=(const Checkpoint&) = delete;

  /* What is shelved and wanted by no other is freed at last. */
  ~Checkpoint() override {
    std::shared_ptr<Pool> pool = pool_.lock();
    if (!pool)
      return;
    std::lock_guard<std::mutex> guard(pool->end_lock);
    for (size_t i = 0; i < live_.size(); i++)
      if (auto shelved = pool->wanted.unwant(live_[i].address)) {
        shelved->pool = pool;
        pool->hold();
        frees_.free(live_[i].address, std::move(*shelved));
      }
  }

  /* A live allocation of the pool; its shard is locked, so that no free comes between. */
  void add(Pool& pool, void* address, const Allocation& allocation) {
    live_.push_back({address, allocation.bytes, allocation.block});
    try {
      pool.wanted.want(address, allocation.bytes);
    } catch (...) {
      live_.pop_back();
      throw;
    }
  }

  std::shared_ptr<Pool> pool() const { // NULL: it has ended
    return pool_.lock();
  }

  const std::vector<Live>& live() const {
    return live_;
  }

 private:
  const std::weak_ptr<Pool> pool_;
  Frees& frees_;
  std::vector<Live> live_;
};

} // namespace vpmm_torch

#endif
