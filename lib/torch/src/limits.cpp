#include "limits.h"

#include "on_device.h"

#include <algorithm>

#include <c10/cuda/CUDAException.h>

namespace vpmm_torch {

std::pair<size_t, size_t> memory_of(int device) {
  OnDevice on(device);
  size_t free = 0, total = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return {free, total};
}

uint64_t Limits::most_of(int device, double fraction) {
  auto most = static_cast<uint64_t>(fraction * static_cast<double>(memory_of(device).second));
  return fraction == 1 ? 0 : std::max<uint64_t>(most, 1);
}

void Limits::set(Device& device, double fraction) {
  device.pools.main(); // first: it may be refused
  uint64_t most = most_of(device.index, fraction);
  device.fraction.store(fraction);
  device.most.store(most);
  for (const auto& pool : device.pools.all())
    set_cap(device, *pool);
}

/* Of a fraction that PyTorch's settings say, when the device is there to be asked. What is set meanwhile stays. */
void Limits::ask(Device& device) {
  uint64_t not_asked = NOT_ASKED, most = most_of(device.index, device.fraction.load());
  device.most.compare_exchange_strong(not_asked, most);
}

void Limits::set_cap(Device& device, Pool& pool) {
  if (pool.is_lent())
    return;
  if (device.most.load() == NOT_ASKED)
    ask(device);
  uint64_t most = device.most.load(), cap = pool.configured_cap;
  if (most) {
    uint64_t others = reserved(device, &pool);
    uint64_t left = most > others ? most - others : 1; // 0 is no cap
    cap = cap ? std::min(cap, left) : left;
  }
  check(vpmm_pool_set_attribute(pool.pool, VPMM_ATTRIBUTE_MAX_MAPPED, cap), "the memory fraction");
  if (device.most.load() != most)
    set_cap(device, pool); // another thread has changed it meanwhile, and this cap may have come after its own
}

size_t Limits::reserved(Device& device, const Pool* but) const {
  Keeper* keeper = lender_.keeper_if_used();
  size_t bytes = 0;
  if (keeper)
    bytes += static_cast<size_t>(keeper->getDeviceStats(device.index).reserved_bytes[AGGREGATE].current);
  for (const auto& pool : device.pools.all())
    if (pool.get() != but)
      bytes += pool->stats().mapped_bytes;
  return bytes;
}

} // namespace vpmm_torch
