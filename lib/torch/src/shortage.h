/*
 * shortage.h - a request for which a pool has found no memory: what is tried before it fails, and who is told if it
 * does.
 *
 *   tried      what PyTorch has registered for it lets memory go; what waits or is ending (frees.h) is freed; idle
 *              pools end, and the keeper of lent ones gives back what it has free of such; the main pool gives what is
 *              free to a private one; the pool is asked once more; then the pools that may help out (use_on_oom) with
 *              what they hold
 *   helping    a pool that is not to grow for it: its cap, or its keeper's memory fraction, is another one meanwhile,
 *              under the lock. Requests of its own that fail meanwhile wait for that, and try again
 *   told       the history, observers, the profiler, and the program by torch.OutOfMemoryError with PyTorch's text
 */
#ifndef VPMM_TORCH_SHORTAGE_H
#define VPMM_TORCH_SHORTAGE_H

#include "device.h"
#include "history.h"
#include "lender.h"
#include "limits.h"
#include "mapped_history.h"

#include <memory>
#include <mutex>
#include <vector>

namespace vpmm_torch {

using OutOfMemoryObserver = c10::cuda::CUDACachingAllocator::OutOfMemoryObserver;

struct Request {
  size_t bytes;  // as the program asked for them, and
  size_t length; // what it is made for: see rounded_up
  cudaStream_t stream;
  const Context& context;
};

class Shortage {
 public:
  Shortage(Limits& limits, History& history, MappedHistory& mapped, const Lender& lender)
      : limits_(limits), history_(history), mapped_(mapped), lender_(lender) {}

  void attach(OutOfMemoryObserver observer);
  void attach_to_rejections(RejectionObserver observer);

  /* Who was registered with PyTorch to free memory when it is short: what other processes are done with, above all. */
  static void call_back();

  /* Frees what waits or is ending, ends idle pools, and empties the cache of who keeps lent ones. Never throws. */
  void make_room(Device& device);

  /* NULL: there is no memory. The pool is another one if that has helped out, which ends no sooner than `helpers`. */
  void* malloc(Device& device, std::shared_ptr<Pool>& pool, const Request& request, HeldPools& helpers);

  /* Of a lent pool, also where there is no shortage. Throws if there is no memory. */
  void* malloc_of_lent(Device& device, const Pool& pool, const Request& request);

  /* What is not to meet a pool that helps out: a lent one's keeper records to it meanwhile. */
  template <typename Call>
  void while_nobody_is_helped(Call call) {
    std::lock_guard<std::mutex> guard(help_lock_);
    call();
  }

  [[noreturn]] void refuse(Device& device, const Pool& pool, const Request& request, bool is_rejected);

 private:
  void await_helped();
  void* malloc_of_held(Device& device, Pool& pool, const Request& request);
  void* malloc_of_lent_held(Device& device, const Pool& pool, const Request& request);
  void tell(Device& device, const Pool& pool, const Request& request);

  template <typename Observers>
  Observers copy_of(const Observers& observers) {
    std::lock_guard<std::mutex> guard(observers_lock_);
    return observers;
  }

  Limits& limits_;
  History& history_;
  MappedHistory& mapped_;
  const Lender& lender_;
  std::mutex help_lock_;
  std::mutex observers_lock_; // of the next two
  std::vector<OutOfMemoryObserver> observers_;
  std::vector<RejectionObserver> rejection_observers_;
};

} // namespace vpmm_torch

#endif
