/*
 * parking.h - a private pool whose memory is the device's for a while (vpmm_park), and what its tensors hold meanwhile.
 *
 *   parked   from the beginning of a park until a wake has succeeded. Nothing is allocated of the pool meanwhile; frees
 *            are as ever. Work that uses its tensors is the program's mistake, and so is the replay of a graph
 *   kept     what the live allocations held, copied to pinned memory of the host before the park and back after the
 *            wake, if that is asked for; else it is lost. What is freed meanwhile is nobody's by then, and is
 *            written to as the rest. The host's memory stays with the pool for its next park, until the cache is
 *            emptied: to pin 1 GiB takes 0.4 s and to let it go 0.1, and the copy 0.02 (an H100)
 *
 * The lock is held over a park or a wake: one at a time of a pool. Whoever asks for memory reads `parked` alone.
 */
#ifndef VPMM_TORCH_PARKING_H
#define VPMM_TORCH_PARKING_H

#include <atomic>
#include <cstddef>
#include <functional>
#include <mutex>
#include <vector>

#include <vpmm/vpmm.h>

namespace vpmm_torch {

struct Content {
  void* address;
  size_t bytes;
};

/*
 * Memory of several allocations, one behind the other in the host's. The device that has it is current in each call but
 * free_memory.
 */
class HostCopy {
 public:
  /* Waits for the device first, which would end a capture. Throws, and has nothing then. */
  void take(vpmm_pool* pool, std::vector<Content> contents);

  /* Has nothing then, but the host's memory. Throws, and has it all still. */
  void put_back();

  void forget() {
    contents_.clear();
  }

  /* Of the host. What it has is lost. */
  void free_memory();

 private:
  void allocate(size_t bytes);

  const vpmm_driver* driver_ = nullptr; // the pool's
  CUcontext context_ = nullptr;         // the host's memory is pinned for
  void* memory_ = nullptr;
  size_t capacity_ = 0; // bytes
  std::vector<Content> contents_;
};

class Parking {
 public:
  bool is_parked() const {
    return parked_.load(); // a park writes this, then looks who is helped out: see Pool::begin_help
  }

  /*
   * Of a parked pool: what the driver has refused to take before; the contents are those of the first time. `live` is
   * what is live, asked for once nothing is allocated any more; if it throws, the pool is not parked. Throws.
   */
  void park(vpmm_pool* pool, bool keep, const std::function<std::vector<Content>()>& live);

  /* `make_room` is called if the device has too little memory, once. Throws, and the pool is parked as before. */
  void wake(vpmm_pool* pool, const std::function<void()>& make_room);

  /* The host's memory, unless something is kept in it, or a park or a wake is under way. */
  void empty_cache();

  /* Before the pool ends. */
  void end() {
    kept_.free_memory();
  }

 private:
  std::mutex lock_;
  std::atomic<bool> parked_{false};
  HostCopy kept_;
};

} // namespace vpmm_torch

#endif
