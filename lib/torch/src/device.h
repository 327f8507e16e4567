/*
 * device.h - what there is for each device: its pools, what its allocations count, and how much it may hold.
 */
#ifndef VPMM_TORCH_DEVICE_H
#define VPMM_TORCH_DEVICE_H

#include "driver_counts.h"
#include "frees.h"
#include "pools.h"
#include "statistics.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>

namespace vpmm_torch {

struct Device {
  explicit Device(int number) : index(static_cast<c10::DeviceIndex>(number)), pools(number) {}

  const c10::DeviceIndex index;
  Pools pools;
  /* Bytes that the fraction allows (limits.h). Each request reads this, and what comes first in frees. */
  std::atomic<uint64_t> most{0};
  Frees frees{pools};
  Statistics statistics;
  std::atomic<int64_t> retries{0}, shortages{0}, rejections{0};
  std::mutex end_lock; // over the end of its idle pools
  DriverAccount account;
  std::atomic<double> fraction{1};

  /* As PyTorch counts it: below zero for an instant where one thread frees what another one allocates. */
  size_t allocated() {
    return static_cast<size_t>(std::max<int64_t>(statistics.allocated(), 0));
  }
};

} // namespace vpmm_torch

#endif
