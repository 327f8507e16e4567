/*
 * compat.h - what differs between versions of PyTorch: 2.8 to 2.12 by what their headers say, of which 2.11 was run.
 *
 * What a version lacks is looked for when this is compiled, by name: an argument of 0 prefers the overload that uses
 * it. Functions of PyTorch's interface that only some versions have are in back_end.cpp without `override`.
 */
#ifndef VPMM_TORCH_COMPAT_H
#define VPMM_TORCH_COMPAT_H

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <c10/cuda/CUDAAllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>
#if __has_include(<c10/core/AllocatorConfig.h>)
#include <c10/core/AllocatorConfig.h>
#endif

namespace vpmm_torch {

/* In c10::cuda up to 2.8, then in c10. */
namespace moved {
using namespace c10;
using namespace c10::cuda;
} // namespace moved
using moved::MempoolId_t;

/* ---- settings ---- */

using CudaSettings = c10::cuda::CUDACachingAllocator::CUDAAllocatorConfig;

/* Those of all kinds of devices: from 2.9 on there, from 2.10 on in force, instead of CUDA's own of the same names. */
#if __has_include(<c10/core/AllocatorConfig.h>)
using CommonSettings = c10::CachingAllocator::AcceleratorAllocatorConfig;
#else
struct CommonSettings {};
#endif

/*
 * PyTorch reads them when they are first asked for, and `backend` among them is to be the name of the allocator that is
 * in place then. Throws if a setting is wrong.
 */
inline void read_settings() {
  CudaSettings::instance();
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations" /* CUDA's own are, where they stand for the common ones */
template <typename Cuda, typename>
auto settings_text(int) -> decltype(Cuda::last_allocator_settings()) {
  return Cuda::last_allocator_settings();
}

template <typename, typename Common>
auto settings_text(long) -> decltype(Common::last_allocator_settings()) {
  return Common::last_allocator_settings();
}

template <typename Cuda, typename>
auto power2_divisions(int) -> decltype(Cuda::roundup_power2_divisions()) {
  return Cuda::roundup_power2_divisions();
}

template <typename, typename Common>
auto power2_divisions(long) -> decltype(Common::roundup_power2_divisions()) {
  return Common::roundup_power2_divisions();
}

/* Of the powers of two around so many bytes. */
template <typename Cuda, typename>
auto power2_divisions_of(size_t bytes, int) -> decltype(Cuda::roundup_power2_divisions(bytes)) {
  return Cuda::roundup_power2_divisions(bytes);
}

template <typename, typename Common>
auto power2_divisions_of(size_t bytes, long) -> decltype(Common::roundup_power2_divisions(bytes)) {
  return Common::roundup_power2_divisions(bytes);
}
#pragma GCC diagnostic pop

/* Since 2.10. */
template <typename Cuda>
auto first_memory_fraction(int) -> decltype(Cuda::per_process_memory_fraction()) {
  return Cuda::per_process_memory_fraction();
}

template <typename>
double first_memory_fraction(long) {
  return 1;
}

/* Since 2.9. */
template <typename Cuda>
auto reuses_in_captures(int) -> decltype(Cuda::graph_capture_record_stream_reuse()) {
  return Cuda::graph_capture_record_stream_reuse();
}

template <typename>
bool reuses_in_captures(long) {
  return false;
}

template <typename Info>
auto set_reuses_in_captures(Info& info, bool reuses, int) -> decltype(void(info.graph_capture_record_stream_reuse)) {
  info.graph_capture_record_stream_reuse = reuses;
}

template <typename Info>
void set_reuses_in_captures(Info&, bool, long) {}

/*
 * Since 2.12 a program may say that what would exceed the memory fraction is to be rejected before anything else is
 * tried, and that this is counted and told apart: device, bytes asked for, bytes allocated, bytes of the device.
 */
using RejectionObserver = std::function<void(int64_t, size_t, size_t, size_t)>;

template <typename Cuda>
auto rejects_early(int) -> decltype(Cuda::throw_on_cudamalloc_oom()) {
  return Cuda::throw_on_cudamalloc_oom();
}

template <typename>
bool rejects_early(long) {
  return false;
}

template <typename Stats>
auto set_rejections(Stats& stats, int64_t rejections, int) -> decltype(void(stats.num_oom_rejections)) {
  stats.num_oom_rejections = rejections;
}

template <typename Stats>
void set_rejections(Stats&, int64_t, long) {}

/* ---- allocators ---- */

/* Since 2.10 one tells of its expandable segments, of which vpmm has none. */
template <typename Base, typename = void>
class WithoutExpandableSegments : public Base {};

template <typename Base>
class WithoutExpandableSegments<Base, std::void_t<decltype(&Base::getExpandableSegmentSizes)>> : public Base {
  using Sizes = decltype(std::declval<Base&>().getExpandableSegmentSizes(0));

 public:
  Sizes getExpandableSegmentSizes(c10::DeviceIndex) override {
    return {};
  }
};

/* The allocator of a MemPool(allocator): a plain pointer up to 2.9, then a shared one. */
template <typename>
struct LastParameter;

template <typename Of, typename Device, typename Id, typename Last>
struct LastParameter<void (Of::*)(Device, Id, Last)> {
  using type = Last;
};

using OtherAllocator =
    typename LastParameter<decltype(&c10::cuda::CUDACachingAllocator::CUDAAllocator::createOrIncrefPool)>::type;

/* Since 2.10 the blocks of a MemPool may be whole ones. */
template <typename Allocator>
auto set_no_split(Allocator& allocator, c10::DeviceIndex device, MempoolId_t id, int)
    -> decltype(allocator.setNoSplit(device, id)) {
  allocator.setNoSplit(device, id);
}

template <typename Allocator>
void set_no_split(Allocator&, c10::DeviceIndex, MempoolId_t, long) {}

/* ---- history ---- */

/* Since 2.11 a snapshot may be without traces. */
template <typename Allocator>
auto segments_of_allocator(Allocator& allocator, MempoolId_t id, int)
    -> decltype(allocator.snapshot(id, false).segments) {
  return allocator.snapshot(id, false).segments;
}

template <typename Allocator>
auto segments_of_allocator(Allocator& allocator, MempoolId_t id, long) -> decltype(allocator.snapshot(id).segments) {
  return allocator.snapshot(id).segments;
}

/* What record_function says while history is recorded; in another namespace since 2.10. */
using Annotation = decltype(c10::cuda::CUDACachingAllocator::SnapshotInfo::external_annotations)::value_type;

/* Since 2.10 an entry has what the program said of the time. */
template <typename Entry>
auto set_user_metadata(Entry& entry, const std::string& metadata, int) -> decltype(void(entry.user_metadata_)) {
  entry.user_metadata_ = metadata;
}

template <typename Entry>
void set_user_metadata(Entry&, const std::string&, long) {}

} // namespace vpmm_torch

#endif
