/*
 * mapped_history.h - what is mapped and unmapped, in the recorded history: looked for where memory may have been, as
 * vpmm tells nobody of it (Mapped, in segments.h). An entry is of no stream, as the segments are while history is
 * recorded.
 */
#ifndef VPMM_TORCH_MAPPED_HISTORY_H
#define VPMM_TORCH_MAPPED_HISTORY_H

#include "device.h"
#include "history.h"

#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

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

  /* While it is recorded. */
  void note(Pool& pool, int device, const Context& context) {
    if (!pool.is_lent())
      pool.mapped.look_if_changed(pool.pool, teller(pool, device, context));
  }

  void note_all(Device& device, const Context& context) {
    if (history_.is_recording())
      for (const auto& pool : device.pools.all())
        note(*pool, device.index, context);
  }

  /*
   * Ends the pools without users and without anything live, and with them what is mapped there. Who comes while another
   * thread ends some waits for what they give back. One that cannot end now is tried again by the next call.
   */
  void end_idle(Device& device, const Context& context) {
    std::lock_guard<std::mutex> guard(device.end_lock);
    device.account.note_peak(device.pools.all());
    std::vector<std::shared_ptr<Pool>> idle = device.pools.take_idle();
    for (auto& pool : idle)
      if (!end(device, pool, context))
        device.pools.put_back(std::move(pool));
  }

 private:
  /* Who only looks at all pools has them for a moment, and would end the pool as the last one to let go. */
  static bool is_alone(const std::shared_ptr<Pool>& pool) {
    constexpr auto PATIENCE = std::chrono::seconds(1);
    const auto end = std::chrono::steady_clock::now() + PATIENCE;
    while (pool.use_count() > 1 && std::chrono::steady_clock::now() < end)
      std::this_thread::yield();
    bool is_alone = pool.use_count() == 1;
    std::shared_ptr<Pool>(pool).reset(); // acquires what others did before they let go, which the count does not
    return is_alone;
  }

  bool end(Device& device, const std::shared_ptr<Pool>& pool, const Context& context) {
    bool is_told = history_.is_recording() && !pool->is_lent();
    if (!is_alone(pool))
      return false;
    if (is_told)
      pool->mapped.end(pool->pool, teller(*pool, device.index, context));
    DriverCounts counts = driver_counts({pool});
    bool ended = pool->end();
    if (ended)
      device.account.note_end(counts);
    if (is_told && !ended)
      pool->mapped.look(pool->pool, teller(*pool, device.index, context));
    return ended;
  }

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
