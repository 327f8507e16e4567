/*
 * compat.h - what differs between versions of PyTorch: 2.10 to 2.12 by what their headers say, of which 2.11 was run.
 *
 * What a version lacks is looked for when this is compiled, by name: an argument of 0 prefers the overload that uses it.
 * Functions of PyTorch's interface that only some versions have are in back_end.cpp without `override`.
 */
#ifndef VPMM_TORCH_COMPAT_H
#define VPMM_TORCH_COMPAT_H

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include <c10/cuda/CUDACachingAllocator.h>

namespace vpmm_torch {

/* Since 2.11 a snapshot may be without traces. */
template <typename Allocator>
auto segments_of_allocator(Allocator& allocator, c10::MempoolId_t id, int)
    -> decltype(allocator.snapshot(id, false).segments) {
  return allocator.snapshot(id, false).segments;
}

template <typename Allocator>
auto segments_of_allocator(Allocator& allocator, c10::MempoolId_t id, long)
    -> decltype(allocator.snapshot(id).segments) {
  return allocator.snapshot(id).segments;
}

/*
 * Since 2.12 a program may say that what would exceed the memory fraction is to be rejected before anything else is
 * tried, and that this is counted and told apart: device, bytes asked for, bytes allocated, bytes of the device.
 */
using RejectionObserver = std::function<void(int64_t, size_t, size_t, size_t)>;

template <typename Config>
auto rejects_early(int) -> decltype(Config::throw_on_cudamalloc_oom()) {
  return Config::throw_on_cudamalloc_oom();
}

template <typename Config>
bool rejects_early(long) {
  return false;
}

template <typename Stats>
auto set_rejections(Stats& stats, int64_t rejections, int) -> decltype(void(stats.num_oom_rejections)) {
  stats.num_oom_rejections = rejections;
}

template <typename Stats>
void set_rejections(Stats&, int64_t, long) {}

} // namespace vpmm_torch

#endif
