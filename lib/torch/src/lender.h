/*
 * lender.h - MemPools over another allocator: torch.cuda.MemPool(allocator), whose memory a library needs to have come
 * from itself, as NCCL does.
 *
 * vpmm makes its own memory and cannot divide another's. So PyTorch's caching allocator, whose place was taken, keeps
 * these pools: it asks the other allocator for segments, and divides, keeps and gives them back as it does without
 * vpmm.
 *
 *   keeper   PyTorch's caching allocator. It is made ready by the first such pool. Who follows allocations is told by it
 *            of these pools' segments, which a library registers with its own, and by vpmm_torch of all else
 *   lent     a pool that it keeps. Its Pool (pools.h) has no vpmm pool; its allocations are in Allocations as all
 *            others are, so that a free by address finds the keeper
 */
#ifndef VPMM_TORCH_LENDER_H
#define VPMM_TORCH_LENDER_H

#include "history.h"
#include "pools.h"

#include <atomic>
#include <exception>
#include <mutex>
#include <utility>
#include <vector>

namespace vpmm_torch {

class Lender {
 public:
  /* The allocator whose place vpmm takes. Before any other call. */
  void set(Keeper* keeper) {
    keeper_ = keeper;
    was_used_ = keeper->initialized();
  }

  /*
   * Of a pool that was made before vpmm took its place, as it counts them: graphs, and a MemPool. 0: it has no such,
   * where PyTorch's own allocator throws.
   */
  int users(c10::DeviceIndex device, MempoolId_t id) const {
    if (!was_used_)
      return 0;
    try {
      return keeper_->getPoolUseCount(device, id);
    } catch (const std::exception&) { // of an assertion
      return 0;
    }
  }

  /* For the first pool, and each other one. */
  Keeper* keeper(int devices) {
    std::lock_guard<std::mutex> guard(lock_);
    if (ready_.load(std::memory_order_relaxed))
      return keeper_;
    keeper_->init(devices);
    for (const AllocatorTraceTracker& tracker : trackers_)
      keeper_->attachAllocatorTraceTracker(of_segments(tracker));
    ready_.store(true, std::memory_order_release);
    return keeper_;
  }

  /* Is to be told of segments, of pools to come too. */
  void attach(const AllocatorTraceTracker& tracker) {
    std::lock_guard<std::mutex> guard(lock_);
    trackers_.push_back(tracker);
    if (ready_.load(std::memory_order_relaxed))
      keeper_->attachAllocatorTraceTracker(of_segments(tracker));
  }

  /* NULL: there has been no such pool. */
  Keeper* keeper_if_used() const {
    return ready_.load(std::memory_order_acquire) ? keeper_ : nullptr; // pairs with the release above
  }

 private:
  static AllocatorTraceTracker of_segments(AllocatorTraceTracker tracker) {
    return [tracker = std::move(tracker)](const TraceEntry& entry) {
      auto action = entry.action_;
      if (action == TraceEntry::SEGMENT_ALLOC || action == TraceEntry::SEGMENT_FREE ||
          action == TraceEntry::SEGMENT_MAP || action == TraceEntry::SEGMENT_UNMAP)
        tracker(entry);
    };
  }

  Keeper* keeper_ = nullptr; // constant once vpmm is enabled, as is the next
  bool was_used_ = false;    // it was initialised before that, and may have pools
  std::mutex lock_;          // of the rest; whether it is ready is read without it too
  std::vector<AllocatorTraceTracker> trackers_;
  std::atomic<bool> ready_{false};
};

} // namespace vpmm_torch

#endif
