#include "wanted.h"

namespace vpmm_torch {

void Wanted::want(void* address, size_t bytes) {
  std::lock_guard<std::mutex> guard(lock_);
  blocks_.try_emplace(address, Block{bytes, 0, std::nullopt}).first->second.checkpoints++;
}

std::optional<Allocation> Wanted::unwant(void* address) {
  std::lock_guard<std::mutex> guard(lock_);
  auto found = blocks_.find(address);
  if (found == blocks_.end() || --found->second.checkpoints > 0)
    return std::nullopt;
  std::optional<Allocation> shelved = std::move(found->second.shelved);
  blocks_.erase(found);
  return shelved;
}

bool Wanted::shelve(void* address, Allocation& allocation) {
  std::lock_guard<std::mutex> guard(lock_);
  auto found = blocks_.find(address);
  if (found == blocks_.end())
    return false;
  found->second.shelved = std::move(allocation);
  found->second.shelved->pool = nullptr;
  return true;
}

/* What further streams may still use waits for the checkpoint's end. */
void* Wanted::reuse(size_t bytes, cudaStream_t stream) {
  std::optional<Allocation> former; // goes without the lock: it may have stacks of Python's
  std::lock_guard<std::mutex> guard(lock_);
  auto best = blocks_.end();
  for (auto it = blocks_.begin(); it != blocks_.end(); ++it) {
    const Block& block = it->second;
    bool fits = block.shelved && block.shelved->stream == stream && block.shelved->used.empty() &&
                bytes <= block.capacity && bytes >= block.capacity / 2;
    if (fits && (best == blocks_.end() || block.capacity < best->second.capacity))
      best = it;
  }
  if (best == blocks_.end())
    return nullptr;
  former.swap(best->second.shelved);
  return best->first;
}

std::optional<Allocation> Wanted::unshelve(void* address) {
  std::lock_guard<std::mutex> guard(lock_);
  auto found = blocks_.find(address);
  return found == blocks_.end() ? std::nullopt : std::exchange(found->second.shelved, std::nullopt);
}

std::vector<std::pair<void*, Allocation>> Wanted::shelved() {
  std::vector<std::pair<void*, Allocation>> shelved;
  std::lock_guard<std::mutex> guard(lock_);
  for (const auto& [address, block] : blocks_)
    if (block.shelved)
      shelved.emplace_back(address, *block.shelved);
  return shelved;
}

} // namespace vpmm_torch
