/*
 * driver_counts.h - what a device's pools have had of the driver, those that have ended too.
 */
#ifndef VPMM_TORCH_DRIVER_COUNTS_H
#define VPMM_TORCH_DRIVER_COUNTS_H

#include "pools.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace vpmm_torch {

struct DriverCounts {
  int64_t handles = 0, handles_released = 0, bytes = 0, bytes_released = 0, waits = 0;
  int64_t peak_bytes = 0; // the sum of the highest that each pool has had mapped

  /* But for the peak. */
  void add(const DriverCounts& more) {
    handles += more.handles;
    handles_released += more.handles_released;
    bytes += more.bytes;
    bytes_released += more.bytes_released;
    waits += more.waits;
  }
};

inline DriverCounts driver_counts(const std::vector<std::shared_ptr<Pool>>& pools) {
  DriverCounts counts;
  for (const auto& pool : pools) {
    vpmm_stats stats = pool->stats();
    vpmm_device on = {};
    if (!pool->is_lent())
      check(vpmm_device_get(pool->pool, &on), "a pool's page size");
    auto bytes = static_cast<int64_t>(stats.pages_created * on.page_size);
    counts.handles += static_cast<int64_t>(stats.extents_created);
    counts.handles_released += static_cast<int64_t>(stats.extents_released);
    counts.bytes += bytes;
    counts.bytes_released += bytes - static_cast<int64_t>(stats.mapped_bytes);
    counts.waits += static_cast<int64_t>(stats.reclaims);
    counts.peak_bytes += static_cast<int64_t>(stats.peak_mapped_bytes);
  }
  return counts;
}

/*
 * `before` is what had been counted when the accumulated statistics were last reset. The peak is the highest of the
 * sums of the pools' own, so at least what all had mapped at once. Any thread; who reads as a pool ends may miss its
 * counts for a moment.
 */
class DriverAccount {
 public:
  DriverCounts now(const std::vector<std::shared_ptr<Pool>>& pools) {
    DriverCounts counts = driver_counts(pools);
    std::lock_guard<std::mutex> guard(lock_);
    counts.add(ended_);
    counts.peak_bytes = std::max(counts.peak_bytes, ended_.peak_bytes);
    return counts;
  }

  /* Before some of them end. */
  void note_peak(const std::vector<std::shared_ptr<Pool>>& pools) {
    int64_t peak = driver_counts(pools).peak_bytes;
    std::lock_guard<std::mutex> guard(lock_);
    ended_.peak_bytes = std::max(ended_.peak_bytes, peak);
  }

  /* What it had counted has been given back with it. */
  void note_end(DriverCounts its) {
    its.handles_released = its.handles;
    its.bytes_released = its.bytes;
    std::lock_guard<std::mutex> guard(lock_);
    ended_.add(its);
  }

  DriverCounts before() {
    std::lock_guard<std::mutex> guard(lock_);
    return before_;
  }

  void reset_accumulated(const DriverCounts& now) {
    std::lock_guard<std::mutex> guard(lock_);
    before_ = now;
  }

  void reset_peak() {
    std::lock_guard<std::mutex> guard(lock_);
    ended_.peak_bytes = 0;
  }

 private:
  std::mutex lock_;
  DriverCounts ended_, before_; // of pools that are no more: their sums, and the highest sum of peaks
};

/* Of a count, what came since it was `before`. */
inline int64_t since(int64_t now, int64_t before) {
  return std::max<int64_t>(now - before, 0);
}

} // namespace vpmm_torch

#endif
