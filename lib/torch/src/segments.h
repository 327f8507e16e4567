/*
 * segments.h - the memory of one vpmm pool as PyTorch's snapshots and its history have it.
 *
 *   segment   a mapped range as vpmm tells of it: an allocation of whole pages, a page that is cut into pieces, or free
 *             pages. Cut pages are one segment where a piece lies in both; free pages that adjoin a cut page in the
 *             same two MiB, the length of PyTorch's own segments for small requests, are of its segment. The stream of
 *             a segment is that of the first allocation in it: free memory is of none. While history is recorded what
 *             adjoins is one segment (join_adjoining)
 *   block     of a segment, which it fills with its neighbours: an allocation's, of the bytes that count
 *             (statistics.h), or what is between two of them: inactive. That is free, or waits to be, or is what
 *             rounding to pieces and pages adds. As PyTorch's own it says how many bytes were asked for of what was
 *             freed there last, as far as recorded history goes back
 *   mapped    address space behind which there is memory. vpmm maps and unmaps within its calls, and by a thread of its
 *             own, and tells nobody: while history is recorded what is mapped is compared with what was, after calls
 *             that changed it. So an entry may come later than what it tells of
 *
 * What vpmm tells beside other threads' calls is of several instants: an allocation that is in no range of those is a
 * segment by itself, and a range that a call has in its hands counts as it was known before.
 */
#ifndef VPMM_TORCH_SEGMENTS_H
#define VPMM_TORCH_SEGMENTS_H

#include "allocations.h"
#include "compat.h"

#include <cstddef>
#include <functional>
#include <mutex>
#include <vector>

#include <vpmm/observe.h>

namespace vpmm_torch {

/* Of a pool, for its segments. */
struct Occupant {
  size_t address;
  Allocation allocation;
  bool lives; // the program has it; not so, it is shelved (wanted.h)
};

/* In ascending order of addresses. */
std::vector<c10::cuda::CUDACachingAllocator::SegmentInfo> segments_of(vpmm_pool* pool, int device, MempoolId_t id,
                                                                      std::vector<Occupant> occupants);

/*
 * For who replays a history, as memory_viz does: what is mapped in one piece is one segment, of no stream, as it is for
 * PyTorch's expandable segments. The segments are ascending, and of vpmm's own pools alone.
 */
void join_adjoining(std::vector<c10::cuda::CUDACachingAllocator::SegmentInfo>& segments);

/* The inactive blocks say what was freed in them last, by these entries, oldest first. The segments are ascending. */
void note_last_freed(std::vector<c10::cuda::CUDACachingAllocator::SegmentInfo>& segments,
                     const std::vector<c10::cuda::CUDACachingAllocator::TraceEntry>& entries);

struct Interval {
  size_t begin, end;
};

using Intervals = std::vector<Interval>; // ascending, none touching the next

class Mapped {
 public:
  /* What is no more mapped since the last call, or is now. */
  using Tell = std::function<void(bool is_mapped, const Interval&)>;

  /* Tells under its lock: entries of several threads are in order. What is no more mapped comes first. */
  void look(vpmm_pool* pool, const Tell& tell);

  /* The same if the pool has mapped or unmapped anything meanwhile. */
  void look_if_changed(vpmm_pool* pool, const Tell& tell);

  /* The pool is about to end: tells that all of it is no more mapped, before another one may have the addresses. */
  void end(vpmm_pool* pool, const Tell& tell);

 private:
  void look_locked(vpmm_pool* pool, const Tell& tell);

  std::mutex lock_; // over a look
  uint64_t changes_ = 0;
  Intervals known_;
};

} // namespace vpmm_torch

#endif
