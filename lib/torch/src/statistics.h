/*
 * statistics.h - what PyTorch counts of the allocations of one device: how many, their bytes, and what was asked for.
 *
 *   requested   bytes as the program asked for them
 *   block       the bytes that count as allocated: PyTorch's unit of 512, of a request that was rounded up as the
 *               program's settings say (roundup_power2_divisions). vpmm may need less, or more
 *   small       blocks of up to 1 MiB: PyTorch's small pool. The others are large. vpmm has no such pools, so what it
 *               holds is not divided in this way
 */
#ifndef VPMM_TORCH_STATISTICS_H
#define VPMM_TORCH_STATISTICS_H

#include "compat.h"
#include "threads.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include <c10/core/CachingDeviceAllocator.h>

namespace vpmm_torch {

constexpr size_t BLOCK_BYTES = 512;
constexpr size_t SMALL_BYTES = 1 << 20; // the most

constexpr auto AGGREGATE = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
constexpr auto SMALL_POOL = static_cast<size_t>(c10::CachingAllocator::StatType::SMALL_POOL);
constexpr auto LARGE_POOL = static_cast<size_t>(c10::CachingAllocator::StatType::LARGE_POOL);

/* The bytes that a request is made for: the same, or up to the next part of the power of two below it. */
inline size_t rounded_up(size_t bytes) {
  size_t parts = power2_divisions_of<CudaSettings, CommonSettings>(bytes, 0);
  if (parts <= 1 || bytes <= BLOCK_BYTES * parts)
    return bytes;
  size_t step = (size_t{1} << (63 - __builtin_clzll(bytes))) / parts;
  return (bytes + step - 1) / step * step;
}

inline size_t block_of(size_t bytes) {
  return (bytes + BLOCK_BYTES - 1) / BLOCK_BYTES * BLOCK_BYTES;
}

/*
 * Each thread counts in a lane of its own, by its number (threads.h): it alone writes there, so that to count needs one
 * fence, and nothing else that processors have to agree about; to count what is freed not even that. Those without a
 * number take turns in one lane.
 *
 *   level   of a lane: what was added there less what was taken; below zero where it frees what others allocate
 *   peak    the highest sum of all lanes' levels that was seen
 *   mark    of each level of a lane. Whoever adds looks at all lanes if its own level is above its mark, and else at none
 *
 *   sum of the marks <= peak and its slack: while no level is above its mark the sum of the levels is not above that
 *
 * A look adds the levels up, raises the peak, and divides what is left up to it among the marks. There is no slack
 * while it is the same thread that looks each time: the peaks of one thread are exact. Where threads take turns at it a
 * thousandth of the peak spares most of the looks while they all grow. By so much a peak may then be short, and by what
 * lasted for an instant while threads changed their levels at once.
 *
 * Adding raises the levels, then reads the marks; a look writes the marks, then reads the levels once more; a fence is
 * between the two on either side: one of the two sees the other, and looks again.
 */
class Statistics {
 public:
  Statistics() = default;
  Statistics(const Statistics&) = delete;
  Statistics& operator=(const Statistics&) = delete;

  void add(size_t requested, size_t block) {
    const Amounts amounts = amounts_of(requested, block);
    if (Lane* lane = lane_of_thread()) {
      add_to(*lane, pool_of(block), amounts);
    } else {
      std::lock_guard<std::mutex> guard(shared_lock_);
      is_shared_.store(true);
      add_to(shared_, pool_of(block), amounts);
    }
  }

  void take(size_t requested, size_t block) {
    const Amounts amounts = amounts_of(requested, block);
    if (Lane* lane = lane_of_thread()) {
      lane->take(pool_of(block), amounts);
    } else {
      std::lock_guard<std::mutex> guard(shared_lock_);
      is_shared_.store(true);
      shared_.take(pool_of(block), amounts);
    }
  }

  int64_t allocated() { // bytes
    return sum_of(AGGREGATE, BLOCK).level();
  }

  /* What is active is what is allocated: vpmm itself looks after memory whose use has not ended. */
  void write(c10::CachingDeviceAllocator::DeviceStats& out) {
    std::lock_guard<std::mutex> guard(lock_);
    for (size_t pool : {AGGREGATE, SMALL_POOL, LARGE_POOL}) {
      out.allocation[pool] = out.active[pool] = stat(pool, COUNT);
      out.allocated_bytes[pool] = out.active_bytes[pool] = stat(pool, BLOCK);
      out.requested_bytes[pool] = stat(pool, REQUESTED);
    }
  }

  void reset_peaks() {
    std::lock_guard<std::mutex> guard(lock_);
    last_ = nullptr;
    each([&](size_t pool, size_t kind) {
      totals_[pool][kind].peak = INT64_MIN;
      look(pool, kind, false);
    });
  }

  void reset_accumulated() {
    std::lock_guard<std::mutex> guard(lock_);
    each([&](size_t pool, size_t kind) { totals_[pool][kind].before = sum_of(pool, kind); });
  }

 private:
  enum Kind : size_t { COUNT, BLOCK, REQUESTED, KINDS };
  static constexpr size_t POOLS = 3;
  static constexpr int64_t SLACK = 1024; // that part of a peak
  using Amounts = std::array<int64_t, KINDS>;

  struct Sum {
    int64_t added = 0, taken = 0;

    int64_t level() const {
      return added - taken;
    }
  };

  /* Of one of c10's StatTypes. `added` and `taken` are written by who has the lane alone. */
  struct Counts {
    std::array<std::atomic<int64_t>, KINDS> added{}, taken{}, mark{};

    void add(const Amounts& amounts) {
#pragma GCC unroll 3
      for (size_t kind = 0; kind < KINDS; kind++)
        count(added[kind], amounts[kind]);
    }

    void take(const Amounts& amounts) {
#pragma GCC unroll 3
      for (size_t kind = 0; kind < KINDS; kind++)
        count(taken[kind], amounts[kind]);
    }

    Sum sum(size_t kind) const {
      return {added[kind].load(std::memory_order_acquire), taken[kind].load(std::memory_order_acquire)};
    }

    bool is_above_mark(size_t kind) const {
      return sum(kind).level() > mark[kind].load(std::memory_order_relaxed);
    }

    bool is_any_above_mark() const {
      return is_above_mark(COUNT) || is_above_mark(BLOCK) || is_above_mark(REQUESTED);
    }

   private:
    static void count(std::atomic<int64_t>& counter, int64_t amount) {
      counter.store(counter.load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
    }
  };

  struct alignas(64) Lane {
    std::array<Counts, POOLS> of;

    /* One that is not has levels and marks of 0. */
    bool is_used() const {
      return of[AGGREGATE].sum(COUNT).added || of[AGGREGATE].sum(COUNT).taken;
    }

    void take(size_t pool, const Amounts& amounts) {
      of[AGGREGATE].take(amounts);
      of[pool].take(amounts);
    }
  };

  struct Total {
    int64_t peak = 0;
    Sum before; // the last reset
  };

  static size_t pool_of(size_t block) {
    return block <= SMALL_BYTES ? SMALL_POOL : LARGE_POOL;
  }

  static Amounts amounts_of(size_t requested, size_t block) {
    return {1, static_cast<int64_t>(block), static_cast<int64_t>(requested)};
  }

  template <typename Visit>
  static void each(Visit visit) {
    for (size_t pool : {AGGREGATE, SMALL_POOL, LARGE_POOL})
      for (size_t kind = 0; kind < KINDS; kind++)
        visit(pool, kind);
  }

  /* NULL: the thread has no number. */
  Lane* lane_of_thread() {
    const size_t number = thread_number();
    return number == NO_NUMBER ? nullptr : &lanes_[number];
  }

  template <typename Visit>
  void each_lane(Visit visit) {
    if (is_shared_.load())
      visit(shared_);
    for (size_t number = 0, above = threads_numbered(); number < above; number++)
      if (lanes_[number].is_used())
        visit(lanes_[number]);
  }

  Sum collect(size_t pool, size_t kind) {
    Sum sum;
    each_lane([&](const Lane& lane) {
      Sum of = lane.of[pool].sum(kind);
      sum.added += of.added;
      sum.taken += of.taken;
    });
    return sum;
  }

  /*
   * Memory that goes from thread to thread while their lanes are read one after the other may be seen twice, or freed
   * and never taken. Counters only grow: what two readings agree on, the one behind the other (acquire), was so between
   * them. If none do, what was added is the earlier reading's and what was taken the later one's: no more than there
   * was.
   */
  Sum sum_of(size_t pool, size_t kind) {
    enum { TRIES = 100 };
    Sum before, now = collect(pool, kind);
    int tries = 0;
    do {
      before = now;
      now = collect(pool, kind);
    } while ((now.added != before.added || now.taken != before.taken) && ++tries < TRIES);
    return {before.added, std::min(now.taken, before.added)};
  }

  void add_to(Lane& lane, size_t pool, const Amounts& amounts) {
    lane.of[AGGREGATE].add(amounts);
    lane.of[pool].add(amounts);
    between_levels_and_marks();
    if (lane.of[AGGREGATE].is_any_above_mark() || lane.of[pool].is_any_above_mark())
      look_from(lane, pool);
  }

  void look_from(const Lane& lane, size_t pool) {
    std::lock_guard<std::mutex> guard(lock_);
    for (size_t kind = 0; kind < KINDS; kind++)
      for (size_t of : {AGGREGATE, pool})
        if (lane.of[of].is_above_mark(kind)) // else another look was quicker
          look(of, kind, last_ && last_ != &lane);
    last_ = &lane;
  }

  /* Under the lock, as is the next. Levels that change meanwhile are looked at again, but not for ever. */
  void look(size_t pool, size_t kind, bool has_slack) {
    enum { TRIES = 4 };
    for (int i = 0; i < TRIES && !set_marks(pool, kind, has_slack); i++)
      ;
  }

  /* False: a level has risen above the mark that it was given. */
  bool set_marks(size_t pool, size_t kind, bool has_slack) {
    struct Seen {
      Lane* lane;
      int64_t level;
    };
    std::array<Seen, THREADS + 1> seen; // as many of them as there are lanes
    int64_t& peak = totals_[pool][kind].peak;
    int64_t sum = 0;
    size_t lanes = 0;
    each_lane([&](Lane& lane) {
      seen[lanes] = {&lane, lane.of[pool].sum(kind).level()};
      sum += seen[lanes++].level;
    });
    if (!lanes)
      return true;
    peak = std::max(peak, sum_of(pool, kind).level());
    const int64_t room = (peak - sum + (has_slack ? peak / SLACK : 0)) / static_cast<int64_t>(lanes);
    for (size_t i = 0; i < lanes; i++)
      seen[i].lane->of[pool].mark[kind].store(seen[i].level + room, std::memory_order_relaxed);
    between_levels_and_marks();
    return std::none_of(seen.begin(), seen.begin() + lanes,
                        [&](const Seen& one) { return one.lane->of[pool].is_above_mark(kind); });
  }

  /* ThreadSanitizer knows no fences, and runs on x86-64, where an exchange is one. */
  static void between_levels_and_marks() {
#ifdef __SANITIZE_THREAD__
    static std::atomic<int> all{0};
    all.exchange(0);
#else
    std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
  }

  c10::CachingAllocator::Stat stat(size_t pool, size_t kind) {
    Total& total = totals_[pool][kind];
    Sum now = sum_of(pool, kind);
    total.peak = std::max(total.peak, now.level());
    c10::CachingAllocator::Stat stat;
    stat.current = now.level();
    stat.peak = total.peak;
    stat.allocated = now.added - total.before.added;
    stat.freed = now.taken - total.before.taken;
    return stat;
  }

  std::array<Lane, THREADS> lanes_{};
  std::mutex shared_lock_; // of who adds or takes in the next; before the other lock
  Lane shared_;
  std::atomic<bool> is_shared_{false}; // whether anything was counted there: set before
  std::mutex lock_;                    // of the rest
  std::array<std::array<Total, KINDS>, POOLS> totals_;
  const Lane* last_ = nullptr; // that looked since the peaks were reset
};

} // namespace vpmm_torch

#endif
