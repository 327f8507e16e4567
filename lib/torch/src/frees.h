/*
 * frees.h - ends the use of allocations, at once where that may be, else later.
 *
 *   at once   the usual case: vpmm_free behind the stream of the allocation, and before it a vpmm_use for each further
 *             stream that record_stream has named while it captured
 *   waiting   what may not be said to the main pool now: another thread captures or is about to (Pools::enter), or the
 *             stream captures. It is tried again by each request of a thread that may, and by endAllocateToPool. While
 *             another thread's pool is underway nobody but that thread may: a long torch.cuda.use_mem_pool of a thread
 *             that asks for nothing keeps the others' frees, even if a request fails for it
 *   ending    memory of a private pool that further streams used: vpmm would keep it to the pool's end, because nothing
 *             passes there. An event on each of these streams is recorded at the free; it is freed when all have passed
 *
 *   lent      memory of a pool that is lent (lender.h): its keeper ends the use
 *
 * An allocation that is waiting or ending counts as live in its pool, which so does not end before it.
 */
#ifndef VPMM_TORCH_FREES_H
#define VPMM_TORCH_FREES_H

#include "allocations.h"
#include "pools.h"

#include <atomic>
#include <list>
#include <mutex>
#include <vector>

namespace vpmm_torch {

class Frees {
 public:
  explicit Frees(Pools& pools) : pools_(pools) {}

  void free(void* address, Allocation allocation);

  /* What waits and may be said by now, if there is anything. Never throws. */
  void try_again() {
    if (later_.load(std::memory_order_relaxed))
      try_all();
  }

 private:
  struct Freed {
    void* address;
    Allocation allocation;
    std::vector<cudaEvent_t> events; // once it is ending
  };

  bool try_one(Freed& freed);
  bool try_main(Freed& freed);
  bool try_private(Freed& freed);
  bool record_events(Freed& freed);
  void try_all();
  void keep(std::list<Freed> freed);

  Pools& pools_;
  std::mutex lock_;
  std::list<Freed> kept_;        // waiting and ending
  std::atomic<size_t> later_{0}; // how many
};

} // namespace vpmm_torch

#endif
