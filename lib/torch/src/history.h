/*
 * history.h - who watches allocations: recorded history, as torch.cuda.memory._record_memory_history asks for it, and
 * trackers. While nobody watches a malloc and a free look at one flag. An entry also says which region of torch.compile
 * the thread is in, and what the program has set as its metadata. Beside the entries there are annotations, of what
 * record_function names.
 */
#ifndef VPMM_TORCH_HISTORY_H
#define VPMM_TORCH_HISTORY_H

#include "compat.h"

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace vpmm_torch {

using c10::cuda::CUDACachingAllocator::AllocatorTraceTracker;
using c10::cuda::CUDACachingAllocator::CreateContextFn;
using c10::cuda::CUDACachingAllocator::RecordContext;
using c10::cuda::CUDACachingAllocator::TraceEntry;
using Context = std::shared_ptr<c10::GatheredContext>;

class History {
 public:
  bool is_watched() const {
    return watched_.load(std::memory_order_acquire);
  }

  bool is_recording() const {
    return recording_.load(std::memory_order_acquire);
  }

  void record(bool enabled, CreateContextFn context, size_t entries, RecordContext when, bool clear,
              const std::vector<std::string>& skip);
  void attach(AllocatorTraceTracker tracker);

  /* Of the calling thread, the innermost last. */
  static void enter_region(std::string name);
  static void leave_region();

  /* Of the calling thread. */
  static void set_metadata(const std::string& metadata);
  static std::string metadata();

  /* Of the region of a program that begins or ends, while history is recorded. */
  void annotate(int device, const std::vector<std::pair<std::string, std::string>>& said);

  /* Oldest first. */
  std::vector<Annotation> annotations();

  /* The caller's stacks, if they are wanted from that level on. No lock is held meanwhile: it may take Python's. */
  Context context(RecordContext level);

  void add(TraceEntry::Action action, int device, const void* address, size_t bytes, cudaStream_t stream,
           MempoolId_t pool, const Context& context);

  /* That a free was asked for, and that the memory is free: nothing of other threads is between the two. */
  void add_free(int device, const void* address, size_t bytes, cudaStream_t stream, MempoolId_t pool,
                const Context& context);

  /* Oldest first. */
  std::vector<TraceEntry> entries(int device);

 private:
  /* Under the lock, as is the next. */
  void tell_and_keep(TraceEntry entry);

  template <typename One>
  void keep(std::deque<One>& kept, One one) {
    kept.push_back(std::move(one));
    while (kept.size() > most_)
      kept.pop_front();
  }

  std::atomic<bool> watched_{false}, recording_{false};
  std::atomic<CreateContextFn> make_context_{nullptr};
  std::atomic<RecordContext> when_{RecordContext::NEVER};
  std::recursive_mutex lock_; // over trackers, and what they are told: one may allocate itself
  std::mutex kept_lock_;      // of the rest, taken last: who tells of mappings has locks that an allocation takes
  size_t most_ = 0;
  std::set<TraceEntry::Action> skipped_;
  std::map<int, std::deque<TraceEntry>> entries_;
  std::deque<Annotation> annotations_;
  std::vector<AllocatorTraceTracker> trackers_; // under lock_
};

} // namespace vpmm_torch

#endif
