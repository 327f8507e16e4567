#include "segments.h"

#include "statistics.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

namespace vpmm_torch {

using c10::cuda::CUDACachingAllocator::BlockInfo;
using c10::cuda::CUDACachingAllocator::SegmentInfo;
using c10::cuda::CUDACachingAllocator::TraceEntry;

/* In ascending order, none within another. */
static std::vector<vpmm_range> ranges_of(vpmm_pool* pool) {
  std::vector<vpmm_range> told, ranges;
  auto note = [](void* data, const vpmm_range* range) {
    static_cast<std::vector<vpmm_range>*>(data)->push_back(*range);
  };
  vpmm_ranges_visit(pool, note, &told);
  std::sort(told.begin(), told.end(), [](const auto& a, const auto& b) { return a.address < b.address; });
  CUdeviceptr last = 0;
  for (vpmm_range range : told) {
    CUdeviceptr end = range.address + range.bytes;
    range.address = std::max(range.address, last);
    if (range.address >= end)
      continue;
    range.bytes = end - range.address;
    ranges.push_back(range);
    last = end;
  }
  return ranges;
}

/* ---- a snapshot ---- */

/* Of PyTorch's segments for small requests. */
constexpr CUdeviceptr SMALL_SEGMENT_BYTES = 2 << 20;

/* Moves what of a free range adjoins a cut page, in the same two MiB, to that page's range. They ascend. */
static void give_to_cut_page(vpmm_range& lower, vpmm_range& upper) {
  CUdeviceptr border = upper.address;
  if (lower.address + lower.bytes != border || border % SMALL_SEGMENT_BYTES == 0)
    return;
  CUdeviceptr begin = border - border % SMALL_SEGMENT_BYTES;
  if (lower.state == VPMM_RANGE_CUT && upper.state == VPMM_RANGE_FREE)
    border = std::min(begin + SMALL_SEGMENT_BYTES, upper.address + upper.bytes);
  else if (lower.state == VPMM_RANGE_FREE && upper.state == VPMM_RANGE_CUT)
    border = std::max(begin, lower.address);
  upper.bytes = upper.address + upper.bytes - border;
  upper.address = border;
  lower.bytes = border - lower.address;
}

/* Of pages shorter than two MiB: the ranges as pages of two MiB would have them, for small requests. */
static std::vector<vpmm_range> small_segments_in(std::vector<vpmm_range> ranges) {
  for (size_t i = 1; i < ranges.size(); i++)
    give_to_cut_page(ranges[i - 1], ranges[i]);
  ranges.erase(std::remove_if(ranges.begin(), ranges.end(), [](const auto& range) { return range.bytes == 0; }),
               ranges.end());
  return ranges;
}

static SegmentInfo new_segment(int device, MempoolId_t id, size_t address, cudaStream_t stream) {
  SegmentInfo segment;
  segment.device = static_cast<c10::DeviceIndex>(device);
  segment.address = address;
  segment.stream = stream;
  segment.owner_private_pool_id = id;
  segment.is_expandable = true; // its memory is mapped in parts
  return segment;
}

static void add_gap(SegmentInfo& segment, size_t end) {
  BlockInfo gap;
  gap.size = end - (segment.address + segment.total_size);
  segment.total_size += gap.size;
  if (gap.size)
    segment.blocks.push_back(std::move(gap));
}

/* Its block ends with the segment, or before the next one: vpmm's pieces are of 256 bytes. */
static void add_block(SegmentInfo& segment, const Occupant& occupant, size_t end) {
  BlockInfo block;
  block.size = std::min(occupant.allocation.block, end - occupant.address);
  block.requested_size = occupant.allocation.bytes;
  block.allocated = block.active = occupant.lives;
  block.context_when_allocated = occupant.allocation.context;
  add_gap(segment, occupant.address);
  if (!segment.context_when_allocated)
    segment.context_when_allocated = block.context_when_allocated;
  segment.total_size += block.size;
  segment.is_large = segment.is_large || occupant.allocation.block > SMALL_BYTES;
  if (occupant.lives) {
    segment.requested_size += block.requested_size;
    segment.allocated_size += block.size;
    segment.active_size += block.size;
  }
  segment.blocks.push_back(std::move(block));
}

/* A piece that begins in a page that is cut, which ends there, may end in the next. */
static bool goes_on(const Occupant& piece, const vpmm_range& page, const vpmm_range& next, size_t end) {
  return page.state == VPMM_RANGE_CUT && next.state == VPMM_RANGE_CUT && next.address == end &&
         piece.address + piece.allocation.bytes > end;
}

std::vector<SegmentInfo> segments_of(vpmm_pool* pool, int device, MempoolId_t id, std::vector<Occupant> occupants) {
  std::vector<SegmentInfo> segments;
  std::sort(occupants.begin(), occupants.end(),
            [](const Occupant& a, const Occupant& b) { return a.address < b.address; });
  auto next = occupants.begin();
  auto add_before = [&](size_t end) { // those that are in no range
    for (; next != occupants.end() && next->address < end; ++next) {
      segments.push_back(new_segment(device, id, next->address, next->allocation.stream));
      add_block(segments.back(), *next, next->address + next->allocation.block);
    }
  };
  const std::vector<vpmm_range> ranges = small_segments_in(ranges_of(pool));
  for (auto range = ranges.begin(); range != ranges.end(); ++range) {
    add_before(range->address);
    size_t end = range->address + range->bytes;
    bool is_occupied = next != occupants.end() && next->address < end;
    if (range->state == VPMM_RANGE_BUSY && !is_occupied)
      continue;
    SegmentInfo segment = new_segment(device, id, range->address, is_occupied ? next->allocation.stream : nullptr);
    segment.is_large = range->state == VPMM_RANGE_FREE;
    for (; next != occupants.end() && next->address < end; ++next) {
      auto after = std::next(next);
      for (auto more = std::next(range); more != ranges.end() && goes_on(*next, *range, *more, end); ++range, ++more)
        end += more->bytes;
      add_block(segment, *next, after != occupants.end() ? std::min(after->address, end) : end);
    }
    add_gap(segment, end);
    segments.push_back(std::move(segment));
  }
  add_before(SIZE_MAX);
  return segments;
}

static bool adjoins(const SegmentInfo& one, const SegmentInfo& next) {
  return one.device == next.device && one.owner_private_pool_id == next.owner_private_pool_id &&
         one.address + one.total_size == next.address;
}

void join_adjoining(std::vector<SegmentInfo>& segments) {
  std::vector<SegmentInfo> joined;
  for (SegmentInfo& segment : segments) {
    segment.stream = nullptr;
    if (joined.empty() || !adjoins(joined.back(), segment)) {
      joined.push_back(std::move(segment));
      continue;
    }
    SegmentInfo& to = joined.back();
    to.total_size += segment.total_size;
    to.requested_size += segment.requested_size;
    to.allocated_size += segment.allocated_size;
    to.active_size += segment.active_size;
    to.is_large = to.is_large || segment.is_large;
    std::move(segment.blocks.begin(), segment.blocks.end(), std::back_inserter(to.blocks));
  }
  segments = std::move(joined);
}

void note_last_freed(std::vector<SegmentInfo>& segments, const std::vector<TraceEntry>& entries) {
  if (entries.empty())
    return;
  std::map<size_t, BlockInfo*> blocks; // by address
  for (SegmentInfo& segment : segments) {
    size_t address = segment.address;
    for (BlockInfo& block : segment.blocks) {
      blocks.emplace(address, &block);
      address += block.size;
    }
  }
  for (const TraceEntry& entry : entries) {
    auto after = blocks.upper_bound(entry.addr_);
    if (entry.action_ != TraceEntry::FREE_COMPLETED || after == blocks.begin())
      continue;
    auto [address, block] = *std::prev(after);
    if (!block->active && entry.addr_ - address < block->size)
      block->requested_size = entry.size_;
  }
}

/* ---- what is mapped ---- */

/* Of the one, or of the other. */
static Intervals united(Intervals all, const Intervals& more) {
  Intervals out;
  all.insert(all.end(), more.begin(), more.end());
  std::sort(all.begin(), all.end(), [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  for (const Interval& one : all)
    if (!out.empty() && one.begin <= out.back().end)
      out.back().end = std::max(out.back().end, one.end);
    else
      out.push_back(one);
  return out;
}

/* Of the one, and not of the other. */
static Intervals without(const Intervals& all, const Intervals& less) {
  Intervals out;
  auto cut = less.begin();
  for (Interval rest : all) {
    while (cut != less.end() && cut->end <= rest.begin)
      ++cut;
    for (auto it = cut; it != less.end() && it->begin < rest.end && rest.begin < rest.end; ++it) {
      if (rest.begin < it->begin)
        out.push_back({rest.begin, it->begin});
      rest.begin = std::max(rest.begin, it->end);
    }
    if (rest.begin < rest.end)
      out.push_back(rest);
  }
  return out;
}

/* Where a call has a range in its hands it is as it was known. */
static Intervals mapped_now(vpmm_pool* pool, const Intervals& known) {
  Intervals mapped, busy;
  for (const vpmm_range& range : ranges_of(pool))
    (range.state == VPMM_RANGE_BUSY ? busy : mapped).push_back({range.address, range.address + range.bytes});
  return united(united(mapped, {}), without(known, without(known, united(busy, {}))));
}

static void tell_all(bool is_mapped, const Intervals& all, const Mapped::Tell& tell) {
  for (const Interval& one : all)
    tell(is_mapped, one);
}

/* Twice: regions that are joined while they are told of may be missed once. */
void Mapped::look_locked(vpmm_pool* pool, const Tell& tell) {
  Intervals now = mapped_now(pool, known_);
  now = united(now, mapped_now(pool, known_));
  std::swap(now, known_);
  tell_all(false, without(now, known_), tell);
  tell_all(true, without(known_, now), tell);
}

void Mapped::look(vpmm_pool* pool, const Tell& tell) {
  std::lock_guard<std::mutex> guard(lock_);
  look_locked(pool, tell);
}

void Mapped::look_if_changed(vpmm_pool* pool, const Tell& tell) {
  vpmm_stats stats = {};
  std::lock_guard<std::mutex> guard(lock_);
  vpmm_stats_get(pool, &stats);
  uint64_t changes = stats.extents_created + stats.extents_released + stats.extents_remapped + stats.zombies_retired;
  if (changes_ == changes)
    return;
  changes_ = changes;
  look_locked(pool, tell);
}

void Mapped::end(vpmm_pool* pool, const Tell& tell) {
  std::lock_guard<std::mutex> guard(lock_);
  look_locked(pool, tell);
  tell_all(false, known_, tell);
  known_.clear();
}

} // namespace vpmm_torch
