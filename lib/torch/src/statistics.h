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

#include <atomic>
#include <cstddef>
#include <cstdint>

#include <c10/core/AllocatorConfig.h>
#include <c10/core/CachingDeviceAllocator.h>

namespace vpmm_torch {

constexpr size_t BLOCK_BYTES = c10::CachingAllocator::kMinBlockSize;
constexpr size_t SMALL_BYTES = c10::CachingAllocator::kSmallSize; // the most

constexpr auto AGGREGATE = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
constexpr auto SMALL_POOL = static_cast<size_t>(c10::CachingAllocator::StatType::SMALL_POOL);
constexpr auto LARGE_POOL = static_cast<size_t>(c10::CachingAllocator::StatType::LARGE_POOL);

/* The bytes that a request is made for: the same, or up to the next part of the power of two below it. */
inline size_t rounded_up(size_t bytes) {
  size_t parts = c10::CachingAllocator::AcceleratorAllocatorConfig::roundup_power2_divisions(bytes);
  if (parts <= 1 || bytes <= BLOCK_BYTES * parts)
    return bytes;
  size_t step = (size_t{1} << (63 - __builtin_clzll(bytes))) / parts;
  return (bytes + step - 1) / step * step;
}

inline size_t block_of(size_t bytes) {
  return (bytes + BLOCK_BYTES - 1) / BLOCK_BYTES * BLOCK_BYTES;
}

/*
 * A level, how high it was, and what was added and taken in sum. One addition a change: the level is what was added
 * less what was taken. Where threads change it at once its peak may miss what lasted for an instant.
 */
class Level {
 public:
  void add(size_t amount) {
    int64_t now = added_.fetch_add(static_cast<int64_t>(amount), std::memory_order_relaxed) +
                  static_cast<int64_t>(amount) - taken_.load(std::memory_order_relaxed);
    int64_t peak = peak_.load(std::memory_order_relaxed);
    while (now > peak && !peak_.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
    }
  }

  void take(size_t amount) {
    taken_.fetch_add(static_cast<int64_t>(amount), std::memory_order_relaxed);
  }

  int64_t now() const {
    return added_.load(std::memory_order_relaxed) - taken_.load(std::memory_order_relaxed);
  }

  void reset_peak() {
    peak_.store(now(), std::memory_order_relaxed);
  }

  void reset_accumulated() {
    added_before_.store(added_.load(std::memory_order_relaxed), std::memory_order_relaxed);
    taken_before_.store(taken_.load(std::memory_order_relaxed), std::memory_order_relaxed);
  }

  c10::CachingAllocator::Stat stat() const {
    c10::CachingAllocator::Stat stat;
    stat.current = now();
    stat.peak = peak_.load(std::memory_order_relaxed);
    stat.allocated = added_.load(std::memory_order_relaxed) - added_before_.load(std::memory_order_relaxed);
    stat.freed = taken_.load(std::memory_order_relaxed) - taken_before_.load(std::memory_order_relaxed);
    return stat;
  }

 private:
  std::atomic<int64_t> added_{0}, taken_{0}, peak_{0};
  std::atomic<int64_t> added_before_{0}, taken_before_{0}; // the last reset
};

class Statistics {
 public:
  void add(size_t requested, size_t block) {
    for (Levels* levels : {&of_[AGGREGATE], &of_[pool_of(block)]}) {
      levels->count.add(1);
      levels->block.add(block);
      levels->requested.add(requested);
    }
  }

  void take(size_t requested, size_t block) {
    for (Levels* levels : {&of_[AGGREGATE], &of_[pool_of(block)]}) {
      levels->count.take(1);
      levels->block.take(block);
      levels->requested.take(requested);
    }
  }

  int64_t allocated() const { // bytes
    return of_[AGGREGATE].block.now();
  }

  /* What is active is what is allocated: vpmm itself looks after memory whose use has not ended. */
  void write(c10::CachingDeviceAllocator::DeviceStats& out) const {
    for (size_t pool : {AGGREGATE, SMALL_POOL, LARGE_POOL}) {
      out.allocation[pool] = out.active[pool] = of_[pool].count.stat();
      out.allocated_bytes[pool] = out.active_bytes[pool] = of_[pool].block.stat();
      out.requested_bytes[pool] = of_[pool].requested.stat();
    }
  }

  void reset_peaks() {
    each(&Level::reset_peak);
  }

  void reset_accumulated() {
    each(&Level::reset_accumulated);
  }

 private:
  struct alignas(64) Levels {
    Level count, block, requested;
  };

  static size_t pool_of(size_t block) {
    return block <= SMALL_BYTES ? SMALL_POOL : LARGE_POOL;
  }

  void each(void (Level::*change)()) {
    for (Levels& levels : of_)
      for (Level* level : {&levels.count, &levels.block, &levels.requested})
        (level->*change)();
  }

  Levels of_[3]; // by c10's StatType
};

} // namespace vpmm_torch

#endif
