/*
 * driver_counts.h - what pools have had of the driver since they began. A pool that has ended takes its counts along.
 */
#ifndef VPMM_TORCH_DRIVER_COUNTS_H
#define VPMM_TORCH_DRIVER_COUNTS_H

#include "pools.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

namespace vpmm_torch {

struct DriverCounts {
  int64_t handles = 0, handles_released = 0, bytes = 0, bytes_released = 0, waits = 0;
  int64_t peak_bytes = 0; // the sum of the highest that each pool has had mapped
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

/* Of a count, what came since it was `before`. */
inline int64_t since(int64_t now, int64_t before) {
  return std::max<int64_t>(now - before, 0);
}

} // namespace vpmm_torch

#endif
