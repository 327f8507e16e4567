/*
 * pools.h - the vpmm pools of one device: the main one, and one for each id of a MemPool or of a captured graph.
 *
 *   main       serves whatever no other pool is meant for. With `captures`: PyTorch captures streams at any time
 *   private    a vpmm pool with `graph`, which any capture may use; or, of MemPool(allocator), that allocator
 *   users      of a private pool, as PyTorch counts them: graphs and MemPools that hold its id. At 0 it is idle: it
 *              ends, and gives its memory back, when nothing of it is live any more and the cache is emptied
 *   underway   ids that requests go to now, with the streams that they go from: a capture, or torch.cuda.use_mem_pool
 *
 * The lock is over the tables, never over a malloc or a free. While nothing is underway a request takes none.
 */
#ifndef VPMM_TORCH_POOLS_H
#define VPMM_TORCH_POOLS_H

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include <c10/cuda/CUDACachingAllocator.h>
#include <vpmm/vpmm.h>

namespace vpmm_torch {

using c10::MempoolId_t;
using c10::cuda::CUDACachingAllocator::CUDAAllocator;
using Filter = std::function<bool(cudaStream_t)>;

struct Pool {
  MempoolId_t id{0, 0};
  vpmm_pool* pool = nullptr;                // NULL: of MemPool(allocator)
  std::shared_ptr<CUDAAllocator> allocator; // of MemPool(allocator)
  std::atomic<int64_t> live{0};             // allocations
  int users = 0;                            // under the lock
  bool use_on_oom = false;                  // under the lock

  ~Pool();
};

class Pools {
 public:
  explicit Pools(int device) : device_(device) {}

  std::shared_ptr<Pool> main();                      // made at the first call; throws if there can be none
  std::shared_ptr<Pool> for_request(cudaStream_t stream);
  std::shared_ptr<Pool> find(MempoolId_t id);        // NULL: there is none
  std::vector<std::shared_ptr<Pool>> all();          // the main one first
  std::vector<std::shared_ptr<Pool>> for_shortage(); // those that may be used before a request fails

  void add_user(MempoolId_t id, std::shared_ptr<CUDAAllocator> allocator);
  void remove_user(MempoolId_t id);
  int users(MempoolId_t id);
  void set_use_on_oom(MempoolId_t id, bool use);

  void begin(MempoolId_t id, Filter filter);
  void end(MempoolId_t id);
  bool is_underway() const {
    return underway_count_.load(std::memory_order_acquire) != 0;
  }

  void end_idle(); // the pools without users and without anything live

 private:
  std::shared_ptr<Pool> make(MempoolId_t id, std::shared_ptr<CUDAAllocator> allocator);
  Pool& known(MempoolId_t id);

  const int device_;
  std::mutex lock_;
  std::shared_ptr<Pool> main_;
  std::atomic<bool> has_main_{false};
  std::map<MempoolId_t, std::shared_ptr<Pool>> private_;
  std::vector<std::pair<MempoolId_t, Filter>> underway_;
  std::atomic<int> underway_count_{0};
};

/* What vpmm has said of a call, as an error of Python. */
void check(vpmm_status status, const char* what);

} // namespace vpmm_torch

#endif
