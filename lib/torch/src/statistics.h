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
 * Each thread counts in a lane of its own, so that threads do not meet over a malloc and a free.
 *
 *   level   of a lane: what was added there less what was taken; below zero where it frees what others allocate
 *   peak    the highest sum of all lanes' levels that was seen
 *   mark    of each level of a lane. Whoever adds looks at all lanes if its own level is above its mark, and else at none
 *
 *   sum of the marks <= peak and its slack: while no level is above its mark the sum of the levels is not above that
 *
 * A look adds the levels up, raises the peak, and divides what is left up to it among the marks. There is no slack while
 * it is the same thread that looks each time: the peaks of one thread are exact. Where threads take turns at it a
 * thousandth of the peak spares most of the looks while they all grow. By so much a peak may then be short, and by what
 * lasted for an instant while threads changed their levels at once.
 *
 * Adding raises the level, then reads the mark; a look writes the mark, then reads the level once more; all sequentially
 * consistent: one of the two sees the other, and looks again.
 */
class Statistics {
 public:
  void add(size_t requested, size_t block) {
    Lane& lane = lane_of_thread();
    const size_t pool = pool_of(block);
    const std::array<size_t, KINDS> amounts{1, block, requested};
    for (size_t kind = 0; kind < KINDS; kind++) {
      lane.added[pool][kind].fetch_add(static_cast<int64_t>(amounts[kind]));
      for (size_t of : {AGGREGATE, pool})
        if (lane.is_above_mark(of, kind))
          look_from(lane, of, kind);
    }
  }

  void take(size_t requested, size_t block) {
    Lane& lane = lane_of_thread();
    const size_t pool = pool_of(block);
    const std::array<size_t, KINDS> amounts{1, block, requested};
    for (size_t kind = 0; kind < KINDS; kind++)
      lane.taken[pool][kind].fetch_add(static_cast<int64_t>(amounts[kind]), std::memory_order_relaxed);
  }

  int64_t allocated() const { // bytes
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
  static constexpr size_t POOLS = 3, LANES = 64;
  static constexpr int64_t SLACK = 1024; // that part of a peak

  struct Sum {
    int64_t added = 0, taken = 0;

    int64_t level() const {
      return added - taken;
    }
  };

  using Counters = std::array<std::array<std::atomic<int64_t>, KINDS>, POOLS>; // by c10's StatType

  /* AGGREGATE is the sum of the two others; nothing but marks is kept of it. */
  struct alignas(64) Lane {
    Counters added{}, taken{}, mark{};

    Sum sum(size_t pool, size_t kind) const {
      if (pool != AGGREGATE)
        return {added[pool][kind].load(), taken[pool][kind].load()};
      Sum small = sum(SMALL_POOL, kind), large = sum(LARGE_POOL, kind);
      return {small.added + large.added, small.taken + large.taken};
    }

    bool is_above_mark(size_t pool, size_t kind) const {
      return sum(pool, kind).level() > mark[pool][kind].load();
    }
  };

  struct Total {
    int64_t peak = 0;
    Sum before; // the last reset
  };

  static size_t pool_of(size_t block) {
    return block <= SMALL_BYTES ? SMALL_POOL : LARGE_POOL;
  }

  template <typename Visit>
  static void each(Visit visit) {
    for (size_t pool : {AGGREGATE, SMALL_POOL, LARGE_POOL})
      for (size_t kind = 0; kind < KINDS; kind++)
        visit(pool, kind);
  }

  /* Threads that have counted anything; the 65th shares the lane of the first. */
  static std::atomic<size_t>& threads() {
    static std::atomic<size_t> count{0};
    return count;
  }

  static size_t lanes_in_use() {
    return std::min(threads().load(), LANES);
  }

  Lane& lane_of_thread() {
    thread_local const size_t number = threads().fetch_add(1);
    return lanes_[number % LANES];
  }

  Sum sum_of(size_t pool, size_t kind) const {
    Sum sum;
    for (size_t i = 0, lanes = lanes_in_use(); i < lanes; i++) {
      Sum of = lanes_[i].sum(pool, kind);
      sum.added += of.added;
      sum.taken += of.taken;
    }
    return sum;
  }

  void look_from(const Lane& lane, size_t pool, size_t kind) {
    std::lock_guard<std::mutex> guard(lock_);
    if (lane.is_above_mark(pool, kind)) // another look was quicker
      look(pool, kind, last_ != &lane);
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
    std::array<int64_t, LANES> levels;
    const size_t lanes = lanes_in_use();
    int64_t& peak = totals_[pool][kind].peak;
    int64_t sum = 0;
    for (size_t i = 0; i < lanes; i++)
      sum += levels[i] = lanes_[i].sum(pool, kind).level();
    peak = std::max(peak, sum);
    const int64_t room = (peak - sum + (has_slack ? peak / SLACK : 0)) / static_cast<int64_t>(lanes ? lanes : 1);
    bool is_kept = true;
    for (size_t i = 0; i < lanes; i++) {
      lanes_[i].mark[pool][kind].store(levels[i] + room);
      is_kept = is_kept && !lanes_[i].is_above_mark(pool, kind);
    }
    return is_kept;
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

  std::array<Lane, LANES> lanes_;
  std::mutex lock_; // of the rest
  std::array<std::array<Total, KINDS>, POOLS> totals_;
  const Lane* last_ = nullptr; // that looked
};

} // namespace vpmm_torch

#endif
