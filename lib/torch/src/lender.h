/*
 * lender.h - MemPools over another allocator: torch.cuda.MemPool(allocator), whose memory a library needs to have come
 * from itself, as NCCL does.
 *
 * vpmm makes its own memory and cannot divide another's. So PyTorch's caching allocator, whose place was taken, keeps
 * these pools: it asks the other allocator for segments, and divides, keeps and gives them back as it does without
 * vpmm.
 *
 *   keeper   PyTorch's caching allocator. It is made ready by the first such pool
 *   lent     a pool that it keeps. Its Pool (pools.h) has no vpmm pool; its allocations are in Allocations as all
 *            others are, so that a free by address finds the keeper
 */
#ifndef VPMM_TORCH_LENDER_H
#define VPMM_TORCH_LENDER_H

#include "pools.h"

#include <atomic>
#include <mutex>

namespace vpmm_torch {

class Lender {
 public:
  /* The allocator whose place vpmm takes. Before any other call. */
  void set(Keeper* keeper) {
    keeper_ = keeper;
  }

  /* For the first pool, and each other one. */
  Keeper* keeper(int devices) {
    std::lock_guard<std::mutex> guard(lock_);
    if (!ready_.load(std::memory_order_relaxed))
      keeper_->init(devices);
    ready_.store(true, std::memory_order_release);
    return keeper_;
  }

  /* NULL: there has been no such pool. */
  Keeper* keeper_if_used() const {
    return ready_.load(std::memory_order_acquire) ? keeper_ : nullptr; // pairs with the release above
  }

 private:
  Keeper* keeper_ = nullptr; // constant once vpmm is enabled
  std::mutex lock_;
  std::atomic<bool> ready_{false};
};

} // namespace vpmm_torch

#endif
