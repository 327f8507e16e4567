/*
 * allocations.h - what the back end knows of each live allocation: PyTorch frees by address alone.
 *
 * Addresses are spread over shards, each with a lock of its own that is held for one look: threads meet only where two
 * work on one shard at the same moment. Small allocations that lie side by side, which mostly are one thread's, are in
 * one shard: the fewer there are that a thread works on, the more of them its processor has at hand. An entry is put in
 * before the address is handed out and taken out by its free, so it belongs to the address's present life.
 */
#ifndef VPMM_TORCH_ALLOCATIONS_H
#define VPMM_TORCH_ALLOCATIONS_H

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/flat_hash_map.h>
#include <cuda_runtime_api.h>

namespace vpmm_torch {

struct Pool;

/* By a stream of any device. */
struct Use {
  cudaStream_t stream;
  int device;

  bool operator==(const Use& other) const { // a default stream's handle is the same on each device
    return stream == other.stream && device == other.device;
  }
};

struct Allocation {
  size_t bytes; // as the program asked for them
  size_t block; // what counts as allocated: see statistics.h
  int device;
  bool is_help;        // of a private pool, for a request from outside: see shortage.h
  cudaStream_t stream; // the one it was allocated for, and is freed behind
  std::shared_ptr<Pool> pool;
  std::shared_ptr<c10::GatheredContext> context; // while history keeps the stacks of live allocations
  std::vector<Use> used;                         // by further streams that vpmm has not been told of: see frees.h
};

class Allocations {
 public:
  void add(void* address, const Allocation& allocation) {
    Shard& shard = shard_of(address);
    std::lock_guard<std::mutex> guard(shard.lock);
    shard.live.emplace(address, allocation);
  }

  /* False: it is no live allocation. */
  bool find(const void* address, Allocation& out) {
    Shard& shard = shard_of(address);
    std::lock_guard<std::mutex> guard(shard.lock);
    auto found = shard.live.find(const_cast<void*>(address));
    if (found == shard.live.end())
      return false;
    out = found->second;
    return true;
  }

  /* Once for each stream. */
  void note_use(const void* address, Use use) {
    Shard& shard = shard_of(address);
    std::lock_guard<std::mutex> guard(shard.lock);
    auto found = shard.live.find(const_cast<void*>(address));
    if (found == shard.live.end())
      return;
    std::vector<Use>& used = found->second.used;
    if (std::find(used.begin(), used.end(), use) == used.end())
      used.push_back(use);
  }

  bool take(void* address, Allocation& out) {
    return take(address, out, [](const Allocation&) {});
  }

  /* `note` is called before others find that it is gone; it allocates and frees nothing. */
  template <typename Note>
  bool take(void* address, Allocation& out, Note note) {
    Shard& shard = shard_of(address);
    std::lock_guard<std::mutex> guard(shard.lock);
    auto found = shard.live.find(address);
    if (found == shard.live.end())
      return false;
    out = std::move(found->second);
    shard.live.erase(found);
    note(out);
    return true;
  }

  /* Each as it was when its shard was looked at; visit allocates and frees nothing. */
  template <typename Visit>
  void each(Visit visit) {
    for (Shard& shard : shards_) {
      std::lock_guard<std::mutex> guard(shard.lock);
      for (const auto& [address, allocation] : shard.live)
        visit(address, allocation);
    }
  }

 private:
  /* So many that sixteen threads, with a place each, seldom meet: two of them do in 11 of 100 cases. */
  static constexpr unsigned SHARD_BITS = 10, PLACE_BITS = 15; // a few of vpmm's smallest slabs, of 8 KiB and more
  static constexpr size_t SHARDS = size_t{1} << SHARD_BITS;

  static size_t shard_number(const void* address) {
    auto place = reinterpret_cast<uintptr_t>(address) >> PLACE_BITS;
    return place * UINT64_C(0xD6E8FEB86659FD93) >> (64 - SHARD_BITS); // not the factor of the tables' own hash
  }

  struct AddressHash {
    size_t operator()(const void* address) const {
      return reinterpret_cast<uintptr_t>(address) >> 8; // vpmm aligns to 256 bytes
    }
  };

  /*
   * PyTorch's own table, which has its entries side by side: no memory is asked for with each. What a look needs of it
   * and of the lock is within a line of the processor's, in this order.
   */
  struct alignas(64) Shard {
    ska::flat_hash_map<void*, Allocation, AddressHash> live;
    std::mutex lock;
  };

  Shard& shard_of(const void* address) {
    return shards_[shard_number(address)];
  }

  std::array<Shard, SHARDS> shards_;
};

} // namespace vpmm_torch

#endif
