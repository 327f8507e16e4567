#include "shortage.h"

#include <algorithm>
#include <cstdio>
#include <thread>

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

namespace vpmm_torch {

void Shortage::attach(OutOfMemoryObserver observer) {
  std::lock_guard<std::mutex> guard(observers_lock_);
  observers_.push_back(std::move(observer));
}

void Shortage::attach_to_rejections(RejectionObserver observer) {
  std::lock_guard<std::mutex> guard(observers_lock_);
  rejection_observers_.push_back(std::move(observer));
}

/* ---- what is tried ---- */

/* What may throw only if the device is lost, where nothing can be thrown. */
template <typename Call>
static void quietly(Call call) {
  try {
    call();
  } catch (const std::exception& error) {
    TORCH_WARN("vpmm: ", error.what());
  }
}

void Shortage::call_back() {
  for (const auto& name : c10::FreeCudaMemoryCallbacksRegistry()->Keys())
    c10::FreeCudaMemoryCallbacksRegistry()->Create(name)->Execute();
}

/* Where another thread's shortage keeps the pool from growing for a while. */
void Shortage::await_helped() {
  std::lock_guard<std::mutex> guard(help_lock_);
}

/* Of what the pool holds by now, without growing. Not of one that requests of its own go to: they may grow it. */
void* Shortage::malloc_of_held(Device& device, Pool& pool, const Request& request) {
  std::lock_guard<std::mutex> guard(help_lock_);
  uint64_t held = std::max<uint64_t>(pool.stats().mapped_bytes, 1);
  if (device.pools.is_underway(pool.id) ||
      vpmm_pool_set_attribute(pool.pool, VPMM_ATTRIBUTE_MAX_MAPPED, held) != VPMM_SUCCESS)
    return nullptr;
  auto restore = c10::make_scope_exit([&] { quietly([&] { limits_.set_cap(device, pool); }); });
  try {
    return pool.malloc(request.length, request.stream);
  } catch (const c10::Error&) { // which is not what the request fails for
    return nullptr;
  }
}

/* The same of a pool that is lent: under a memory fraction of 0 its keeper asks the other allocator for none. */
void* Shortage::malloc_of_lent_held(Device& device, const Pool& pool, const Request& request) {
  auto thread = std::this_thread::get_id();
  std::lock_guard<std::mutex> guard(help_lock_);
  if (device.pools.is_underway(pool.id))
    return nullptr;
  void* address = nullptr;
  double fraction = pool.keeper->getMemoryFraction(device.index);
  pool.keeper->setMemoryFraction(0, device.index);
  auto restore =
      c10::make_scope_exit([&] { quietly([&] { pool.keeper->setMemoryFraction(fraction, device.index); }); });
  pool.keeper->beginAllocateToPool(device.index, pool.id,
                                   [=](cudaStream_t) { return std::this_thread::get_id() == thread; });
  auto end = c10::make_scope_exit([&] {
    quietly([&] {
      pool.keeper->endAllocateToPool(device.index, pool.id);
      pool.keeper->releasePool(device.index, pool.id); // as a user, which the begin made of this call
    });
  });
  try {
    address = pool.keeper->raw_alloc_with_stream(request.length, request.stream);
  } catch (const c10::OutOfMemoryError&) { // it has no such memory free
  }
  return address;
}

/*
 * What the keeper has free is in no pool of vpmm's. It is not asked while anybody captures: the calls by which it gives
 * memory back might end the capture. One that begins once it was asked is not seen.
 */
void Shortage::make_room(Device& device) {
  device.frees.await_uses(nullptr);
  mapped_.end_idle(device, nullptr);
  Keeper* keeper = lender_.keeper_if_used();
  if (!keeper || !Pools::enter_everywhere())
    return;
  Pools::leave_everywhere(); // who begins to capture would wait
  quietly([&] { keeper->emptyCache({0, 0}); });
}

void* Shortage::malloc(Device& device, std::shared_ptr<Pool>& pool, const Request& request, HeldPools& helpers) {
  device.retries.fetch_add(1, std::memory_order_relaxed);
  call_back();
  make_room(device);
  if (pool->is_private()) {
    device.frees.free_joined(*pool, request.stream); // which another thread may have had in hand before
    await_helped();
    device.pools.trim_main(); // private ones give nothing before their end
  }
  if (Limits::are_set(device))
    limits_.set_cap(device, *pool); // of which the main pool leaves more now
  void* address = pool->malloc(request.length, request.stream);
  if (address || pool->is_private())
    return address;
  const std::string why = vpmm_last_error(); // of the pool that was asked, not of one that could not help out
  helpers = device.pools.for_shortage();
  for (const auto& other : helpers.pools()) {
    address = other->is_lent() ? malloc_of_lent_held(device, *other, request) : malloc_of_held(device, *other, request);
    if (address) {
      pool = other;
      return address;
    }
  }
  helpers = HeldPools(); // they may be parked by who is told of the shortage
  vpmm_error_set(VPMM_ERROR_OUT_OF_MEMORY, "%s", why.c_str());
  return nullptr;
}

/*
 * By its keeper. It is asked once more: another thread may have set its memory fraction to 0 for a while
 * (malloc_of_lent_held), and it does not know what of its memory waits for further streams.
 */
void* Shortage::malloc_of_lent(Device& device, const Pool& pool, const Request& request) {
  try {
    return pool.keeper->raw_alloc_with_stream(request.bytes, request.stream);
  } catch (const c10::OutOfMemoryError&) {
    make_room(device);
    device.pools.trim_main();
  }
  try {
    std::lock_guard<std::mutex> guard(help_lock_);
    return pool.keeper->raw_alloc_with_stream(request.bytes, request.stream);
  } catch (const c10::OutOfMemoryError&) {
    tell(device, pool, request);
    throw;
  }
}

/* ---- who is told ---- */

/* All who count requests that fail, or look at what there is then. */
void Shortage::tell(Device& device, const Pool& pool, const Request& request) {
  auto [free, total] = memory_of(device.index);
  device.shortages.fetch_add(1, std::memory_order_relaxed);
  if (history_.is_watched())
    history_.add(TraceEntry::OOM, device.index, reinterpret_cast<void*>(free), request.bytes, request.stream, pool.id,
                 request.context);
  if (c10::memoryProfilingEnabled() && !pool.is_lent()) // the keeper has
    c10::reportOutOfMemoryToProfiler(static_cast<int64_t>(request.bytes), device.allocated(), limits_.reserved(device),
                                     c10::Device(c10::DeviceType::CUDA, device.index));
  for (const auto& observer : copy_of(observers_)) // last: they may take Python's lock, allocate, and throw
    observer(device.index, request.bytes, Limits::allowed_of(device, total), free);
}

static std::string size_text(size_t bytes) {
  char text[32];
  if (bytes <= 1024)
    std::snprintf(text, sizeof text, "%zu bytes", bytes);
  else if (bytes <= 1048576)
    std::snprintf(text, sizeof text, "%.2f KiB", static_cast<double>(bytes) / 1024);
  else if (bytes <= 1073741824)
    std::snprintf(text, sizeof text, "%.2f MiB", static_cast<double>(bytes) / 1048576);
  else
    std::snprintf(text, sizeof text, "%.2f GiB", static_cast<double>(bytes) / 1073741824);
  return text;
}

void Shortage::refuse(Device& device, const Pool& pool, const Request& request, bool is_rejected) {
  std::string why = vpmm_last_error();
  auto [free, total] = memory_of(device.index);
  if (pool.is_private() && request.length > total) // its address space is as long: vpmm says to raise that
    why = "the request is longer than the device's memory";
  size_t allocated = device.allocated(), held = limits_.reserved(device), allowed = Limits::allowed_of(device, total);
  tell(device, pool, request);
  if (is_rejected) {
    device.rejections.fetch_add(1, std::memory_order_relaxed);
    for (const auto& observer : copy_of(rejection_observers_))
      observer(device.index, request.bytes, allocated, total);
  }
  C10_THROW_ERROR(OutOfMemoryError,
                  c10::str("CUDA out of memory. Tried to allocate ", size_text(request.bytes), ". GPU ",
                           static_cast<int>(device.index), " has a total capacity of ", size_text(total), " of which ",
                           size_text(free), " is free. ", allowed < total ? size_text(allowed) + " allowed; " : "",
                           "Of the allocated memory ", size_text(allocated), " is allocated by PyTorch, and ",
                           size_text(held > allocated ? held - allocated : 0),
                           " is reserved by PyTorch but unallocated. vpmm: ", why));
}

} // namespace vpmm_torch
