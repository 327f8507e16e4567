/*
 * wanted.h - the addresses of a private pool that a checkpoint may ask back.
 *
 * torch.compile's graph trees record many graphs into one pool. Before they record a second child of a graph they have
 * those allocations made live again, at their addresses, that were live when that graph had been recorded: a
 * checkpoint.
 *
 *   wanted   an address in a checkpoint that is kept; `checkpoints` counts them
 *   shelved  wanted, and freed: vpmm has not been told, so it gives the address to nobody
 *   block    what vpmm has handed out at the address, `capacity` bytes that are known of
 *
 *   a wanted address is either live (in Allocations) or shelved
 *
 * A shelved block serves a later request for the same stream, whole, if that is of at least half its capacity: what a
 * backward graph asks for is often what its forward graph has kept, and it frees the one before it asks for the other.
 * It may be smaller meanwhile, never longer, so the checkpoint's allocation fits again when it comes back.
 *
 * Under a lock of its own, which is held over no call of another module. Who holds a shard of Allocations may take it.
 */
#ifndef VPMM_TORCH_WANTED_H
#define VPMM_TORCH_WANTED_H

#include "allocations.h"

#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace vpmm_torch {

/* Shelved allocations name no pool: they are kept by it. */
class Wanted {
 public:
  /* Of a live allocation. */
  void want(void* address, size_t bytes);

  /* The allocation if it was shelved and is wanted no more: the caller frees it. */
  std::optional<Allocation> unwant(void* address);

  /* Instead of a free. False: nobody wants the address, and the allocation is as it was. */
  bool shelve(void* address, Allocation& allocation);

  /* A shelved block for a request: NULL if none fits. It is the caller's. */
  void* reuse(size_t bytes, cudaStream_t stream);

  /* A shelved block, to be live again; none: it is not shelved. */
  std::optional<Allocation> unshelve(void* address);

  /* Each address and allocation that is shelved, as it is now. */
  std::vector<std::pair<void*, Allocation>> shelved();

 private:
  struct Block {
    size_t capacity;
    int checkpoints;
    std::optional<Allocation> shelved;
  };

  std::mutex lock_;
  std::unordered_map<void*, Block> blocks_;
};

} // namespace vpmm_torch

#endif
