/*
 * mapped_history.h - what is mapped and unmapped, in the recorded history: looked for where memory may have been, as
 * vpmm tells nobody of it (Mapped, in segments.h). An entry is of no stream, as the segments are while history is recorded.
 */
#ifndef VPMM_TORCH_MAPPED_HISTORY_H
#define VPMM_TORCH_MAPPED_HISTORY_H

#include "device.h"
#include "history.h"

namespace vpmm_torch {

class MappedHistory {
 public:
  explicit MappedHistory(History& history) : history_(history) {}

  /* What is mapped by now is no event: the recording begins. */
  void begin(Device& device) {
    for (const auto& pool : device.pools.all())
      if (!pool->is_lent())
        pool->mapped.look(pool->pool, [](bool, const Interval&) {});
  }

  void note(Pool& pool, int device, const Context& context) {
    if (history_.is_recording() && !pool.is_lent())
      pool.mapped.look_if_changed(pool.pool, teller(pool, device, context));
  }

  void note_all(Device& device, const Context& context) {
    if (history_.is_recording())
      for (const auto& pool : device.pools.all())
        note(*pool, device.index, context);
  }

  /* Ends the pools without users and without anything live, and with them what is mapped there. */
  void end_idle(Device& device, const Context& context) {
    for (const auto& pool : device.pools.take_idle())
      if (history_.is_recording() && !pool->is_lent())
        pool->mapped.end(pool->pool, teller(*pool, device.index, context));
  }

 private:
  Mapped::Tell teller(const Pool& pool, int device, const Context& context) {
    return [this, device, id = pool.id, &context](bool is_mapped, const Interval& one) {
      history_.add(is_mapped ? TraceEntry::SEGMENT_MAP : TraceEntry::SEGMENT_UNMAP, device,
                   reinterpret_cast<void*>(one.begin), one.end - one.begin, nullptr, id, context);
    };
  }

  History& history_;
};

} // namespace vpmm_torch

#endif
