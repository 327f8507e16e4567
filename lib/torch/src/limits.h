/*
 * limits.h - the memory fraction, torch.cuda.set_per_process_memory_fraction: what of a device's memory may be held.
 *
 *   reserved   what the device's pools hold, those that are lent too
 *   most       bytes that the fraction allows; 0: all; NOT_ASKED: of how many is not known yet
 *   cap        of a pool: most - what the device's other pools hold by now, and no more than VPMM_MAX_MAPPED says. It is
 *              set before each request, as the others grow and give back meanwhile. Of threads that ask at once each may
 *              have what is left. What lent pools grow by is not refused: they have no cap
 */
#ifndef VPMM_TORCH_LIMITS_H
#define VPMM_TORCH_LIMITS_H

#include "device.h"
#include "lender.h"

#include <cstddef>
#include <utility>

namespace vpmm_torch {

/* Bytes that are free on the device, and all. */
std::pair<size_t, size_t> memory_of(int device);

class Limits {
 public:
  explicit Limits(const Lender& lender) : lender_(lender) {}

  /* Of a device that nobody has asked for anything. To ask how much there is would make its context. */
  static void begin(Device& device, double fraction) {
    device.fraction.store(fraction);
    device.most.store(fraction == 1 ? 0 : NOT_ASKED);
  }

  void set(Device& device, double fraction);

  static bool are_set(const Device& device) {
    return device.most.load(std::memory_order_relaxed);
  }

  /* Of a device that has so much memory. */
  static size_t allowed_of(const Device& device, size_t total) {
    uint64_t most = device.most.load();
    return most && most != NOT_ASKED ? static_cast<size_t>(most) : total;
  }

  /*
   * Whether the fraction leaves less than that, and such a request is refused before anything is tried: see compat.h.
   */
  bool reject_early(Device& device, size_t length) const {
    return are_set(device) && rejects_early<CudaSettings>(0) && reserved(device) + length > device.most.load();
  }

  void set_cap(Device& device, Pool& pool);

  /* What the device's pools hold, but for one of them. */
  size_t reserved(Device& device, const Pool* but = nullptr) const;

 private:
  static constexpr uint64_t NOT_ASKED = UINT64_MAX;

  static uint64_t most_of(int device, double fraction);
  static void ask(Device& device);

  const Lender& lender_;
};

} // namespace vpmm_torch

#endif
