/*
 * frees.h - ends the use of allocations, at once where that may be, else later.
 *
 *   at once   the usual case: vpmm_free behind the stream of the allocation, and before it a vpmm_use for each further
 *             stream that record_stream has named while it captured
 *   waiting   what may not be said to the main pool now: another thread captures or is about to (Pools::enter), or the
 *             stream captures. It is tried again by each request of a thread that may, and by endAllocateToPool. While
 *             another thread may be about to capture nobody but that thread may: a torch.cuda.use_mem_pool of a thread
 *             that asks for nothing in it keeps the others' frees, even if a request fails for it
 *   ending    memory of a private pool that further streams used: vpmm would keep it to the pool's end, because nothing
 *             passes there. Memory of a lent pool that they used (lender.h): its keeper looks whether uses have passed
 *             only in requests to its own pools, and not while one is being recorded to, which is always so for ours.
 *             And memory that streams of another device used, which vpmm does not know. An event on each of these
 *             streams is recorded at the free; it is freed when all have passed
 *   joining   the same where they all capture, and the program wants such memory back within the capture
 *             (graph_capture_record_stream_reuse): where they are in the capture is noted at the free. A request of the
 *             stream of the allocation looks whether that stream has come behind it (capture.h); then it is freed. If
 *             the capture ends before, it is as all else that waits
 *
 * An allocation that is waiting or ending counts as live in its pool, which so does not end before it.
 */
#ifndef VPMM_TORCH_FREES_H
#define VPMM_TORCH_FREES_H

#include "allocations.h"
#include "capture.h"
#include "pools.h"

#include <atomic>
#include <list>
#include <mutex>
#include <vector>

namespace vpmm_torch {

class Frees {
 public:
  explicit Frees(Pools& pools) : pools_(pools) {}

  void free(void* address, Allocation&& allocation);

  /* What waits and may be said by now, if there is anything. Never throws. */
  void try_again() {
    if (later_.load(std::memory_order_relaxed))
      try_all();
  }

  /* Before a request of the stream to a private pool: frees what is joining, and may be used by it. Never throws. */
  void free_joined(const Pool& pool, cudaStream_t stream) {
    if (joining_.load(std::memory_order_relaxed))
      free_all_joined(pool, stream);
  }

  /*
   * Frees what waits and may be said by now, and waits on the host for what of the pool's memory is ending; before
   * that, for whatever other threads have in hand. NULL: for all memory, before a request fails or the main pool's
   * cache is emptied, since what one pool has free may go to another. Never throws.
   */
  void await_uses(const Pool* pool);

  /*
   * Before the pool's memory is unmapped: waits for what streams of other devices do with what was freed, also where no
   * event could be recorded, or another thread has it in hand. False: it cannot be waited for now. Without Python's
   * lock, as other threads may wait for that. Never throws.
   */
  bool await_all(const Pool& pool);

  /* A capture or another use of a pool has ended. */
  void end() {
    order_.forget();
    try_again();
  }

 private:
  struct Freed {
    void* address;
    Allocation allocation;
    std::vector<cudaEvent_t> events; // once it is ending
    CapturePoint point;              // while it is joining
  };

  /* Frees that a thread has taken out of what is kept, for a while. */
  class Walk;

  /* Streams that one walk has met, and need not ask about again: */
  struct Met {
    std::vector<Use> slow;      // something on it has not passed
    std::vector<Use> capturing; // no event can be recorded on it
  };

  bool free_at_once(void* address, const Allocation& allocation);
  bool finish(Freed& freed, Met* met = nullptr);
  bool try_one(Freed& freed, Met* met);
  bool is_in_vain(const Freed& freed, const Met& met);
  bool end_use(const Freed& freed);
  bool say_uses(const Freed& freed);
  bool have_passed(Freed& freed, Met* met);
  bool record_events(Freed& freed, Met* met);
  void try_each(std::list<Freed>& kept);
  void try_all();
  void note_point(Freed& freed);
  void free_all_joined(const Pool& pool, cudaStream_t stream);
  void keep(std::list<Freed> freed, bool is_new = false);
  std::list<Freed> take_all(const Pool& pool);
  bool take_kept(std::list<Freed>& kept);
  bool await_walks();
  void await_events(const Freed& freed);
  bool await_each(std::list<Freed> mine);

  Pools& pools_;
  std::atomic<size_t> later_{0};     // how many are kept
  std::atomic<bool> joining_{false}; // whether one of them may be joining
  std::mutex lock_;
  std::list<Freed> kept_;      // waiting, ending and joining
  std::atomic<int> walks_{0};  // how many threads have some of them in hand
  std::atomic<int> waits_{0};  // how many of these wait for a device, and for no lock
  std::atomic<int> calls_{0};  // how many threads are in a keeper's call, and may wait for a lock
  std::atomic<int> pauses_{0}; // threads that would see all: nobody else takes some to try them meanwhile
  std::mutex all_lock_;        // over such a thread's wait; before lock_
  CaptureOrder order_;
};

} // namespace vpmm_torch

#endif
