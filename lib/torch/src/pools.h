/*
 * pools.h - the vpmm pools of one device: the main one, and one for each id of a MemPool or of a captured graph.
 *
 *   main       serves whatever no other pool is meant for. With `captures`: PyTorch captures streams at any time
 *   private    a vpmm pool with `graph`, which any capture may use: its calls meet no stream. Or one that is lent, and
 *              has none (lender.h)
 *   users      of a private pool, as PyTorch counts them: graphs and MemPools that hold its id. At 0 it is idle: it
 *              ends, and gives its memory back, when nothing of it is live any more and the cache is emptied, or a
 *              request would fail
 *   underway   ids that requests go to now, with the streams that they go from: a capture, or torch.cuda.use_mem_pool.
 *              PyTorch does not say which of the two it is. The thread that began it is the one that begins a capture,
 *              at once, and on the stream that was its current one. So once it asks for memory and that stream does not
 *              capture, it is no capture, or no more: PyTorch does not end what a failed one has begun
 *
 * The lock is over the tables, never over a malloc or a free. While nothing is underway a request takes none.
 *
 * No call of the main pool may name a stream while a thread begins to capture it, or a capture takes it in (vpmm.h),
 * which may be one of another device. So a thread that makes such a call enters first, which is refused while another
 * thread captures, or may be about to, on any device; and what begins waits for those who have entered. Entering writes
 * a place of the thread's own, then reads `underway`; beginning writes `underway`, then reads all places; all
 * sequentially consistent, so one of the two sees the other.
 */
#ifndef VPMM_TORCH_POOLS_H
#define VPMM_TORCH_POOLS_H

#include "allocations.h"
#include "compat.h"
#include "parking.h"
#include "segments.h"
#include "threads.h"
#include "wanted.h"

#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <vpmm/vpmm.h>

namespace vpmm_torch {

using Filter = std::function<bool(cudaStream_t)>;
using Keeper = c10::cuda::CUDACachingAllocator::CUDAAllocator;

struct Pool {
  MempoolId_t id{0, 0};
  vpmm_pool* pool = nullptr;    // NULL: it is lent, and this
  Keeper* keeper = nullptr;     // keeps it (lender.h)
  uint64_t configured_cap = 0;  // bytes; 0: none
  std::atomic<int64_t> live{0}; // allocations of a private one
  std::atomic<int> helping{0};  // requests from outside that may be given memory of it, which is not live yet
  std::atomic<int> leaving{0};  // that further streams used, no more in Allocations and not yet with Frees or shelved
  std::mutex
      end_lock;  // over its end, the frees of a checkpoint that goes, which keeps no pool, and a park's look at them
  int users = 0; // under the lock
  bool use_on_oom = false; // under the lock
  Wanted wanted;           // of a private one, as is the next
  Parking parking;
  Mapped mapped; // while history is recorded

  bool is_private() const {
    return id != MempoolId_t{0, 0};
  }

  bool is_lent() const {
    return keeper;
  }

  /* An allocation keeps a private pool from its end. The main one never ends. */
  void hold() {
    if (is_private())
      live.fetch_add(1, std::memory_order_relaxed);
  }

  void let_go() {
    if (is_private())
      live.fetch_sub(1, std::memory_order_release);
  }

  /* False: it is parked, and does not help out. A park that begins meanwhile sees that it does. */
  bool begin_help() {
    helping.fetch_add(1);
    if (!parking.is_parked())
      return true;
    helping.fetch_sub(1);
    return false;
  }

  void end_help() {
    helping.fetch_sub(1);
  }

  vpmm_stats stats() const; // of one that is lent, none

  /* Of vpmm's own. NULL: there is no memory. Throws what else vpmm says. */
  void* malloc(size_t bytes, cudaStream_t stream) const;

  /*
   * Of a private one without anything live, at which nobody else looks: gives all of it back. False: the device cannot
   * be waited for now, and the pool is as it was.
   */
  bool end();

  ~Pool();
};

/* Pools that help out: they do not end meanwhile, for want of users, and are not parked. */
class HeldPools {
 public:
  HeldPools() = default;
  HeldPools(HeldPools&& other) noexcept : pools_(std::exchange(other.pools_, {})) {}

  HeldPools& operator=(HeldPools&& other) noexcept {
    pools_.swap(other.pools_);
    return *this;
  }

  ~HeldPools() {
    for (const auto& pool : pools_) {
      pool->end_help();
      pool->let_go();
    }
  }

  /* Not one that is parked. */
  void add(const std::shared_ptr<Pool>& pool) {
    pools_.reserve(pools_.size() + 1); // what throws throws before
    if (!pool->begin_help())
      return;
    pool->hold();
    pools_.push_back(pool);
  }

  const std::vector<std::shared_ptr<Pool>>& pools() const {
    return pools_;
  }

 private:
  std::vector<std::shared_ptr<Pool>> pools_;
};

/*
 * Of a device's main pool, or of a private one: vpmm's variables, and what PyTorch's needs make of them. Throws if a
 * variable is wrong, and for VPMM_STREAMS=eager: record_stream means what has been queued when the memory is freed.
 */
vpmm_config configuration(int device, bool is_private);

class Pools {
 public:
  explicit Pools(int device) : device_(device) {
    everywhere_.at(static_cast<size_t>(device)).store(this);
  }

  std::shared_ptr<Pool> main(); // made at the first call; throws if there can be none
  std::shared_ptr<Pool> for_request(cudaStream_t stream);
  std::vector<std::shared_ptr<Pool>> all(); // the main one first
  HeldPools for_shortage();                 // those that may be used before a request fails; parked ones may not

  void add_user(MempoolId_t id);
  void add_lent(MempoolId_t id, Keeper* keeper); // with its first user; throws if there is such a pool
  void remove_user(MempoolId_t id);
  int users(MempoolId_t id);
  std::shared_ptr<Pool> find(MempoolId_t id); // throws if there is none
  Keeper* keeper(MempoolId_t id);             // NULL: it is not lent
  bool has(MempoolId_t id);
  void take_over(MempoolId_t id, Keeper*, int users); // a lent one that its keeper has already
  bool is_underway(MempoolId_t id);
  bool may_any_capture(); // of what is underway
  void set_use_on_oom(MempoolId_t id, bool use);

  /* Another device may use all memory of this one's from now on. Throws. */
  void allow(int peer);

  void begin(MempoolId_t id, Filter filter); // on the thread's current stream
  void end(MempoolId_t id);

  /* Whether the thread may call the main pool with any stream; if so it leaves again. */
  bool enter() {
    entered_[thread_number()].count.fetch_add(1);
    if (!underway_anywhere_.load() || no_other_captures_anywhere())
      return true;
    leave();
    return false;
  }

  void leave() {
    entered_[thread_number()].count.fetch_sub(1);
  }

  /*
   * The same for streams that the thread was not given, of any device: refused while any thread captures. What the
   * calling thread has begun another one may join, or end.
   */
  static bool enter_everywhere();
  static void leave_everywhere();

  /* The pools without users and without anything live, for the caller to end (Pool::end). */
  std::vector<std::shared_ptr<Pool>> take_idle();

  /* One that could not be ended: it is idle as before. */
  void put_back(std::shared_ptr<Pool> idle);

  /* What the main pool has free goes back to the device, if there is a main pool. */
  void trim_main();

 private:
  struct Underway {
    MempoolId_t id;
    Filter filter;
    std::thread::id thread;
    std::shared_ptr<const std::atomic<bool>> thread_lives; // one that has ended begins no capture
    cudaStream_t stream;
    bool seems_to_capture = true; // until the thread asks for memory and does not

    bool may_capture() const {
      return seems_to_capture && thread_lives->load();
    }
  };

  struct alignas(64) Place {
    std::atomic<int> count{0};
  };

  std::shared_ptr<Pool> make(MempoolId_t id);
  const std::shared_ptr<Pool>& known(MempoolId_t id);
  bool is_begun(MempoolId_t id) const; // under the lock
  bool no_other_captures();
  static bool no_other_captures_anywhere();
  void await_entered();
  bool none_captures();
  bool enter_if_none_captures();
  bool add_peer(int peer); // false: it was one
  void remove_peer(int peer);
  void look_at_captures();

  static constexpr size_t DEVICES = 256;                       // PyTorch has 120 at most
  static std::array<std::atomic<Pools*>, DEVICES> everywhere_; // by device, made in order, before any request
  static std::atomic<int> underway_anywhere_;                  // how much is, on all of them

  const int device_;
  std::mutex lock_;
  std::shared_ptr<Pool> main_;
  std::map<MempoolId_t, std::shared_ptr<Pool>> private_;
  std::vector<std::shared_ptr<Pool>> ending_; // that could not be ended: another pool may have the id by now
  std::mutex allow_lock_; // over a change of `peers_`, and what it takes, and while the main pool is made; before lock_
  std::vector<int> peers_; // that have access, or are being given it
  std::vector<Underway> underway_;
  std::array<Place, THREADS + 1> entered_; // by threads' numbers

  /* What each request reads; the first is main_ without a count, at which all threads would meet: it never ends. */
  alignas(64) std::shared_ptr<Pool> uncounted_main_;
  std::atomic<bool> has_main_{false};
  std::atomic<int> underway_count_{0};
};

/*
 * Waits for what streams of other devices do with an allocation, as record_stream has said: vpmm waits for its own. A
 * stream that captures is waited for with all of its device, which leaves the capture as it is; and so is any stream
 * while another thread captures. False: the device has no byte to spare, and they may be at work still.
 */
bool await_other_devices(const Allocation& allocation);

/* What vpmm has said of a call, as an error of Python. */
void check(vpmm_status status, const char* what);

} // namespace vpmm_torch

#endif
