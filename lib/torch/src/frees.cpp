#include "frees.h"

#include "asked.h"
#include "compat.h"
#include "on_device.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <thread>

#include <c10/util/ScopeExit.h>

namespace vpmm_torch {

static CUdeviceptr address_of(void* address) {
  return reinterpret_cast<CUdeviceptr>(address);
}

/* An address that vpmm does not know will never be freed; any other refusal may change. */
static bool is_done(vpmm_status status) {
  if (status == VPMM_ERROR_INVALID_POINTER) {
    TORCH_WARN_ONCE("vpmm: a free: ", vpmm_last_error());
  }
  return status == VPMM_SUCCESS || status == VPMM_ERROR_INVALID_POINTER;
}

/* Behind the stream that it was allocated for, and no other. */
bool Frees::end_use(const Freed& freed) {
  const Pool& pool = *freed.allocation.pool;
  if (!pool.is_lent())
    return is_done(vpmm_free(pool.pool, address_of(freed.address), freed.allocation.stream));
  calls_.fetch_add(1);
  auto has_called = c10::make_scope_exit([&] { calls_.fetch_sub(1); });
  try {
    pool.keeper->raw_delete(freed.address);
  } catch (const std::exception& error) {
    TORCH_WARN("vpmm: a free to a lent pool: ", error.what());
  }
  return true;
}

/* To the main pool. A stream that is no more has no use left. */
bool Frees::say_uses(const Freed& freed) {
  const Allocation& allocation = freed.allocation;
  for (const Use& use : allocation.used) {
    vpmm_status status = vpmm_use(allocation.pool->pool, address_of(freed.address), use.stream);
    if (status != VPMM_SUCCESS && status != VPMM_ERROR_INVALID_VALUE && status != VPMM_ERROR_INVALID_POINTER)
      return false;
  }
  return true;
}

/* False: it captures, or cannot be asked. */
static bool may_record(cudaStream_t stream, bool& captures) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  bool is_known = succeeds(cudaStreamIsCapturing(stream, &status));
  captures = is_known && status != cudaStreamCaptureStatusNone;
  return is_known && !captures;
}

/* False: a stream captures, or there is no event to be had. */
bool Frees::record_events(Freed& freed, Met* met) {
  std::vector<cudaEvent_t> events;
  const Use* capturing = nullptr;
  bool recorded = true;
  events.reserve(freed.allocation.used.size()); // what throws throws before there is an event
  for (const Use& use : freed.allocation.used) {
    OnDevice on(use.device);
    bool captures = false;
    cudaEvent_t event = nullptr;
    recorded = recorded && on.is_on() && may_record(use.stream, captures) &&
               succeeds(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    if (event)
      events.push_back(event);
    recorded = recorded && succeeds(cudaEventRecord(event, use.stream));
    if (captures)
      capturing = &use;
  }
  if (recorded)
    freed.events = std::move(events);
  else
    for (cudaEvent_t event : events)
      cudaEventDestroy(event);
  if (capturing && met)
    met->capturing.push_back(*capturing);
  return recorded;
}

/* By events, on each of the streams, in the order of `used`. One whose event has not passed is slow. */
bool Frees::have_passed(Freed& freed, Met* met) {
  Allocation& allocation = freed.allocation;
  if (allocation.used.empty())
    return true;
  RelaxedMode relaxed;
  if (freed.events.empty() && !record_events(freed, met))
    return false;
  for (size_t i = 0; i < freed.events.size(); i++) {
    cudaError_t answer = cudaEventQuery(freed.events[i]);
    if (succeeds(answer))
      continue;
    if (met && answer == cudaErrorNotReady)
      met->slow.push_back(allocation.used[i]);
    return false;
  }
  for (cudaEvent_t event : freed.events)
    cudaEventDestroy(event);
  freed.events.clear();
  allocation.used.clear();
  return true;
}

static bool is_used_on_another_device(const Allocation& allocation) {
  return std::any_of(allocation.used.begin(), allocation.used.end(),
                     [&](const Use& use) { return use.device != allocation.device; });
}

static bool is_used_by_any(const Allocation& allocation, const std::vector<Use>& streams) {
  return std::any_of(allocation.used.begin(), allocation.used.end(),
                     [&](const Use& use) { return std::find(streams.begin(), streams.end(), use) != streams.end(); });
}

static bool needs_events(const Allocation& allocation) {
  return !allocation.used.empty() && (allocation.pool->is_private() || is_used_on_another_device(allocation));
}

/*
 * What was recorded on a slow stream later than what has not passed there has not passed either. What was recorded
 * before it and stands behind it is asked for when that has passed. What a capturing stream has used waits for the
 * capture's end: each request of the thread that captures walks, with thousands of these there.
 */
bool Frees::is_in_vain(const Freed& freed, const Met& met) {
  return freed.events.empty() ? needs_events(freed.allocation) && is_used_by_any(freed.allocation, met.capturing)
                              : is_used_by_any(freed.allocation, met.slow);
}

/*
 * What meets a stream stands between enter and leave. The keeper of a lent pool is called behind that: it may take
 * Python's lock, which who begins to capture has while it waits for those who have entered.
 */
bool Frees::try_one(Freed& freed, Met* met) {
  const Pool& pool = *freed.allocation.pool;
  if (pool.is_private() && freed.allocation.used.empty())
    return end_use(freed);
  if (met && is_in_vain(freed, *met))
    return false;
  bool elsewhere = is_used_on_another_device(freed.allocation);
  if (!(elsewhere ? Pools::enter_everywhere() : pools_.enter()))
    return false;
  bool done = false;
  {
    auto leave = c10::make_scope_exit([&] { elsewhere ? Pools::leave_everywhere() : pools_.leave(); });
    done = needs_events(freed.allocation) ? have_passed(freed, met) : say_uses(freed);
    if (!pool.is_lent())
      done = done && end_use(freed);
  }
  return done && (!pool.is_lent() || end_use(freed));
}

/* Its memory counts as live until then. Where the host has no memory it is not done yet. */
bool Frees::finish(Freed& freed, Met* met) {
  bool done = false;
  try {
    done = try_one(freed, met);
  } catch (const std::bad_alloc&) {
  }
  if (done)
    freed.allocation.pool->let_go();
  return done;
}

/* Walks that the thread is in, of any device: a keeper tells of what it frees, and who is told may make calls. */
static __thread int walks_underway __attribute__((tls_model("initial-exec"))) = 0;

class Frees::Walk {
 public:
  explicit Walk(Frees& frees) : frees_(frees) {
    walks_underway++;
    frees_.walks_.fetch_add(1); // before it takes any: who then finds none sees that somebody has them
  }
  Walk(const Walk&) = delete;
  Walk& operator=(const Walk&) = delete;

  ~Walk() {
    frees_.walks_.fetch_sub(1);
    walks_underway--;
  }

 private:
  Frees& frees_;
};

/* A new one comes last; those that were in hand come before what was freed meanwhile: in the order of their events. */
void Frees::keep(std::list<Freed> freed, bool is_new) {
  if (freed.empty())
    return;
  std::lock_guard<std::mutex> guard(lock_);
  for (const Freed& one : freed)
    if (one.point.capture)
      joining_.store(true, std::memory_order_relaxed);
  kept_.splice(is_new ? kept_.end() : kept_.begin(), freed);
  later_.store(kept_.size(), std::memory_order_relaxed);
}

/* Of memory of the pool that the capture goes to: other memory is nobody's before the capture has ended. */
void Frees::note_point(Freed& freed) {
  const Allocation& allocation = freed.allocation;
  if (allocation.used.empty() || !pools_.is_underway(allocation.pool->id) || !reuses_in_captures<CudaSettings>(0))
    return;
  std::vector<cudaStream_t> streams{allocation.stream};
  for (const Use& use : allocation.used)
    streams.push_back(use.stream);
  freed.point = CaptureOrder::point(streams);
}

/* The thread need not be the one that began the capture: this meets no stream but the one that it works on. */
void Frees::free_all_joined(const Pool& pool, cudaStream_t stream) {
  Walk walk(*this);
  std::list<Freed> mine;
  bool others = false;
  {
    std::lock_guard<std::mutex> guard(lock_);
    for (auto it = kept_.begin(); it != kept_.end();) {
      auto freed = it++;
      bool is_mine = freed->allocation.pool.get() == &pool && freed->allocation.stream == stream;
      if (freed->point.capture && is_mine)
        mine.splice(mine.end(), kept_, freed);
      else
        others = others || freed->point.capture;
    }
    later_.store(kept_.size(), std::memory_order_relaxed);
    joining_.store(others, std::memory_order_relaxed);
  }
  for (auto it = mine.begin(); it != mine.end();) {
    try {
      if (order_.is_behind(stream, it->point)) {
        it->allocation.used.clear();
        it->point = {};
      }
    } catch (const std::bad_alloc&) {
      order_.forget(); // of the stream's frontier it may know a part
    }
    it = !it->point.capture && finish(*it) ? mine.erase(it) : std::next(it);
  }
  keep(std::move(mine));
}

void Frees::await_events(const Freed& freed) {
  RelaxedMode relaxed;
  for (cudaEvent_t event : freed.events)
    (void)succeeds(cudaEventSynchronize(event));
}

/*
 * Who has some in hand keeps them again, or has freed them; who takes some from now on takes none. By one thread at a
 * time, which walks itself.
 */
std::list<Frees::Freed> Frees::take_all(const Pool& pool) {
  std::list<Freed> mine;
  pauses_.fetch_add(1);
  for (bool is_all = false; !is_all; std::this_thread::yield()) {
    std::lock_guard<std::mutex> guard(lock_);
    is_all = walks_.load() == 1;
    for (auto it = kept_.begin(); it != kept_.end();) {
      auto freed = it++;
      if (freed->allocation.pool.get() == &pool)
        mine.splice(mine.end(), kept_, freed);
    }
    later_.store(kept_.size(), std::memory_order_relaxed);
  }
  pauses_.fetch_sub(1);
  return mine;
}

/* By events, or where there are none by all that the streams of other devices have been given. */
bool Frees::await_each(std::list<Freed> mine) {
  bool have_ended = true;
  for (auto it = mine.begin(); it != mine.end();) {
    waits_.fetch_add(1);
    await_events(*it);
    if (it->events.empty())
      have_ended = await_other_devices(it->allocation) && have_ended;
    waits_.fetch_sub(1);
    it = finish(*it) ? mine.erase(it) : std::next(it);
  }
  keep(std::move(mine));
  return have_ended;
}

bool Frees::await_all(const Pool& pool) {
  if (walks_underway) // it would be waited for by the thread that makes it
    return false;
  std::lock_guard<std::mutex> alone(all_lock_); // else each of two would miss what the other one has taken
  Walk walk(*this);
  return await_each(take_all(pool));
}

/*
 * What other threads have in hand is freed by them, or kept again: that is waited for, though not for long once one
 * that is in a keeper's call is all that is left, as it may wait for a lock that this thread has. False: that was so.
 */
bool Frees::await_walks() {
  constexpr auto PATIENCE = std::chrono::milliseconds(100);
  using Clock = std::chrono::steady_clock;
  for (auto begin = Clock::now(); walks_.load(); std::this_thread::yield())
    if (waits_.load() || !calls_.load()) // one waits for the device, as this thread would, or none for a lock
      begin = Clock::now();
    else if (Clock::now() - begin > PATIENCE) // asked last: this thread may not have run for as long
      return false;
  return true;
}

/* Takes all that is kept. False: other threads may have more in hand. By one that walks itself. */
bool Frees::take_kept(std::list<Freed>& kept) {
  std::lock_guard<std::mutex> guard(lock_);
  kept.swap(kept_);
  later_.store(0, std::memory_order_relaxed);
  return walks_.load() == 1;
}

/* Once more where others, who wait for some too, have taken them between this thread's wait and its look. */
void Frees::await_uses(const Pool* pool) {
  for (bool is_all = false; !is_all;) {
    pauses_.fetch_add(1);
    bool are_back = await_walks();
    Walk walk(*this);
    std::list<Freed> kept, ending;
    is_all = take_kept(kept) || !are_back;
    pauses_.fetch_sub(1);
    try_each(kept);
    for (auto it = kept.begin(); it != kept.end();) {
      auto freed = it++;
      if (!freed->events.empty() && (!pool || freed->allocation.pool.get() == pool))
        ending.splice(ending.end(), kept, freed);
    }
    keep(std::move(kept));
    await_each(std::move(ending));
  }
}

/* Of the main pool, and of nothing that is used elsewhere: as try_one does it, without a record. */
bool Frees::free_at_once(void* address, const Allocation& allocation) {
  if (!pools_.enter())
    return false;
  bool done = is_done(vpmm_free(allocation.pool->pool, address_of(address), allocation.stream));
  pools_.leave();
  return done;
}

void Frees::free(void* address, Allocation&& allocation) {
  bool is_usual = !allocation.pool->is_private() && allocation.used.empty();
  if (is_usual && free_at_once(address, allocation))
    return;
  std::shared_ptr<Pool> pool = allocation.pool;
  if (pool->is_private() && !pool->is_lent() && pool->wanted.shelve(address, allocation)) {
    pool->let_go();
    return;
  }
  Freed freed{address, std::move(allocation), {}, {}};
  if (!is_usual && finish(freed)) // else it was tried just now
    return;
  if (pool->is_private())
    note_point(freed);
  std::list<Freed> one;
  one.push_back(std::move(freed));
  keep(std::move(one), true);
}

void Frees::try_each(std::list<Freed>& kept) {
  Met met;
  for (auto it = kept.begin(); it != kept.end();)
    it = finish(*it, &met) ? kept.erase(it) : std::next(it);
}

/* What waits is looked through only by who may free it. */
void Frees::try_all() {
  if (pauses_.load() || !pools_.enter())
    return;
  pools_.leave();
  Walk walk(*this);
  if (pauses_.load())
    return;
  std::list<Freed> kept;
  take_kept(kept);
  try_each(kept);
  keep(std::move(kept));
}

} // namespace vpmm_torch
