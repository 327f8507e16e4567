#include "streams.h"

#include <array>
#include <atomic>
#include <cstdint>

namespace vpmm_torch {

__thread cudaStream_t latest_stream = nullptr;

/* 32 streams for each device and priority are what PyTorch has. What finds no place in the table is not known. */
constexpr size_t PLACES = 8192;

static std::array<std::atomic<cudaStream_t>, PLACES> noted;

static size_t place_of(cudaStream_t stream, size_t further) {
  constexpr uint64_t SPREADS = 0x9e3779b97f4a7c15;
  return ((reinterpret_cast<uintptr_t>(stream) * SPREADS >> 32) + further) % PLACES;
}

/* A place is written once: each of the two loops ends, by whoever's progress. */
void note_pytorchs(cudaStream_t stream) {
  for (size_t further = 0; further < PLACES; further++) {
    cudaStream_t there = nullptr;
    if (noted[place_of(stream, further)].compare_exchange_strong(there, stream) || there == stream)
      return;
  }
}

bool is_pytorchs(cudaStream_t stream) {
  for (size_t further = 0; further < PLACES; further++) {
    cudaStream_t there = noted[place_of(stream, further)].load();
    if (there == stream || !there)
      return there != nullptr;
  }
  return false;
}

} // namespace vpmm_torch
