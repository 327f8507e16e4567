/*
 * back_end.cpp - PyTorch's allocator of device memory, over vpmm.
 *
 *   malloc   for the current device and stream, from the pool that is meant for it (pools.h)
 *   free     behind the stream that the memory was allocated for, whichever is current: what PyTorch's own allocator
 *            promises. Other streams that used it were said with record_stream, which is vpmm_use. frees.h says when it
 *            is made later
 *
 * A process has one, made by enable and never destroyed: tensors may outlive the interpreter. It is locked nowhere over
 * a malloc or a free; each of its parts has a lock of its own for its tables.
 */
#include "allocations.h"
#include "asked.h"
#include "checkpoint.h"
#include "compat.h"
#include "device.h"
#include "direct.h"
#include "exports.h"
#include "history.h"
#include "imports.h"
#include "lender.h"
#include "limits.h"
#include "mapped_history.h"
#include "on_device.h"
#include "segments.h"
#include "shortage.h"
#include "streams.h"

#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <iterator>
#include <map>
#include <thread>
#include <tuple>

namespace vpmm_torch {

using c10::DataPtr;
using c10::DeviceIndex;
using c10::CachingDeviceAllocator::DeviceStats;
using c10::cuda::CUDAStream;
namespace back_end = c10::cuda::CUDACachingAllocator;
using back_end::SegmentInfo;

constexpr size_t EXBIBYTE = size_t{1} << 60;

/* Whether this thread was seen with a context current, or was given one. */
static __thread bool thread_has_looked __attribute__((tls_model("initial-exec"))) = false;

/* Frees that the thread is in of what further streams used: who is told of one may make calls of its own. */
static __thread int frees_underway __attribute__((tls_model("initial-exec"))) = 0;

class BackEnd final : public WithoutExpandableSegments<back_end::CUDAAllocator> {
 public:
  /* ---- allocating ---- */

  DataPtr allocate(size_t bytes) override {
    DeviceIndex device = c10::cuda::current_device();
    void* address = obtain_for_current(device, bytes);
    return {address, address, &delete_at, c10::Device(c10::DeviceType::CUDA, device)};
  }

  void* raw_alloc(size_t bytes) override {
    return obtain_for_current(c10::cuda::current_device(), bytes);
  }

  void* raw_alloc_with_stream(size_t bytes, cudaStream_t stream) override {
    return bytes ? obtain(c10::cuda::current_device(), bytes, stream) : nullptr;
  }

  void raw_delete(void* address) override {
    if (address)
      free(address);
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &delete_at;
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    C10_CUDA_CHECK(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToDevice));
  }

  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, size_t bytes, cudaStream_t stream,
                          bool may_reach) override {
    if (to_device == from_device || may_reach)
      return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
    return cudaMemcpyPeerAsync(to, to_device, from, from_device, bytes, stream);
  }

  using CUDAAllocator::recordStream;

  void recordStream(const DataPtr& memory, CUDAStream stream) override {
    Allocation allocation;
    if (!memory.get() || memory.get_deleter() != &delete_at || !allocations_.find(memory.get(), allocation))
      return;
    const Use use{note_stream(stream), stream.device_index()};
    if (use == Use{allocation.stream, allocation.device})
      return;
    if (!use_now(memory.get(), allocation, use))
      allocations_.note_use(memory.get(), use);
  }

  /* ---- as a whole ---- */

  void take_the_place_of(CUDAAllocator* former) {
    lender_.set(former);
  }

  void init(int count) override {
    std::lock_guard<std::mutex> guard(init_lock_);
    double fraction = first_memory_fraction<CudaSettings>(0);
    for (int i = static_cast<int>(devices_.size()); i < count; i++) {
      devices_.push_back(std::make_unique<Device>(i));
      Limits::begin(*devices_.back(), fraction);
    }
    initialized_.store(true, std::memory_order_release);
  }

  bool initialized() override {
    return initialized_.load(std::memory_order_acquire);
  }

  void enable(bool on) override {
    enabled_.store(on, std::memory_order_relaxed);
  }

  bool isEnabled() const override {
    return enabled_.load(std::memory_order_relaxed);
  }

  std::string name() override {
    return "vpmm";
  }

  void emptyCache(MempoolId_t id = {0, 0}) override {
    Context context = history_.is_recording() ? history_.context(RecordContext::ALL) : nullptr;
    for (size_t i = 0; i < devices_.size(); i++) {
      Device& device = *devices_[i];
      device.frees.try_again();
      for (const auto& pool : device.pools.all()) {
        if (!is_meant(id, *pool))
          continue;
        if (!pool->is_private() || !device.pools.users(pool->id))
          device.frees.await_uses(pool->is_private() ? pool.get() : nullptr); // of all, or of one that is gone
        if (!pool->is_lent()) {
          vpmm_trim(pool->pool, 0, nullptr); // what stays is in use, or its work has not ended
          pool->parking.empty_cache();
        }
      }
      mapped_history_.note_all(device, context);
      mapped_history_.end_idle(device, context);
    }
    if (Keeper* keeper = lender_.keeper_if_used())
      keeper->emptyCache(id);
  }

  /* What the allocator before it had. No device is asked for anything: see Limits::begin. */
  void go_on_with(double fraction, DeviceIndex device) {
    Limits::begin(at(device), fraction);
  }

  double getMemoryFraction(DeviceIndex device) override {
    return at(device).fraction.load();
  }

  void setMemoryFraction(double fraction, DeviceIndex device) override {
    TORCH_CHECK(0 <= fraction && fraction <= 1, "invalid fraction:", fraction, ". Please set within [0, 1].");
    limits_.set(at(device), fraction);
  }

  /* Free memory of any shape can be re-mapped to serve one request. */
  void cacheInfo(DeviceIndex device, size_t* largest) override {
    vpmm_stats stats = at(device).pools.main()->stats();
    *largest = std::max(*largest, memory_of(device).first + static_cast<size_t>(stats.reusable_bytes));
  }

  void* getBaseAllocation(void* address, size_t* bytes) override {
    Allocation allocation;
    TORCH_CHECK(allocations_.find(address, allocation), "invalid device pointer: ", address);
    if (bytes)
      *bytes = allocation.bytes;
    return address;
  }

  /* ---- statistics ---- */

  DeviceStats getDeviceStats(DeviceIndex index) override {
    Device& device = at(index);
    DeviceStats out;
    DriverCounts now = device.account.now(device.pools.all()), before = device.account.before();
    int64_t mapped = now.bytes - now.bytes_released;
    device.statistics.write(out);
    set_rejections(out, device.rejections.load(), 0);
    out.num_device_alloc = since(now.handles, before.handles);
    out.num_device_free = since(now.handles_released, before.handles_released);
    out.num_sync_all_streams = since(now.waits, before.waits);
    out.reserved_bytes[AGGREGATE] = {mapped, std::max(mapped, now.peak_bytes), since(now.bytes, before.bytes),
                                     since(now.bytes_released, before.bytes_released)};
    int64_t handles = now.handles - now.handles_released;
    out.segment[AGGREGATE] = {handles, handles, out.num_device_alloc, out.num_device_free};
    out.num_alloc_retries = device.retries.load();
    out.num_ooms = device.shortages.load();
    out.max_split_size = -1; // none
    if (Keeper* keeper = lender_.keeper_if_used())
      add_lent(out, keeper->getDeviceStats(index));
    return out;
  }

  void resetAccumulatedStats(DeviceIndex index) override {
    Device& device = at(index);
    DriverCounts now = device.account.now(device.pools.all());
    device.statistics.reset_accumulated();
    device.retries.store(0);
    device.shortages.store(0);
    device.rejections.store(0);
    device.account.reset_accumulated(now);
    if (Keeper* keeper = lender_.keeper_if_used())
      keeper->resetAccumulatedStats(index);
  }

  void resetPeakStats(DeviceIndex index) override {
    Device& device = at(index);
    device.statistics.reset_peaks();
    device.account.reset_peak();
    for (const auto& pool : device.pools.all())
      if (!pool->is_lent())
        vpmm_pool_set_attribute(pool->pool, VPMM_ATTRIBUTE_PEAK_MAPPED, 0);
    if (Keeper* keeper = lender_.keeper_if_used())
      keeper->resetPeakStats(index);
  }

#pragma GCC diagnostic push
#ifdef __clang__
#pragma GCC diagnostic ignored "-Winconsistent-missing-override"
#endif
  /* Those of lent pools are segments of the keeper's. Without `include_traces` up to PyTorch 2.10. */
  back_end::SnapshotInfo snapshot(MempoolId_t id, bool include_traces) {
    back_end::SnapshotInfo out;
    std::map<const Pool*, std::vector<Occupant>> occupants;
    allocations_.each([&](void* address, const Allocation& allocation) {
      if (is_meant(id, *allocation.pool))
        occupants[allocation.pool.get()].push_back({reinterpret_cast<size_t>(address), allocation, true});
    });
    for (size_t i = 0; i < devices_.size(); i++)
      for (const auto& pool : devices_[i]->pools.all())
        if (!pool->is_lent() && is_meant(id, *pool))
          add_segments(out, *pool, static_cast<int>(i), std::move(occupants[pool.get()]));
    sort(out.segments);
    if (history_.is_recording())
      join_adjoining(out.segments);
    if (Keeper* keeper = lender_.keeper_if_used()) {
      std::vector<SegmentInfo> lent = segments_of_allocator(*keeper, id, 0);
      std::move(lent.begin(), lent.end(), std::back_inserter(out.segments));
      sort(out.segments);
    }
    for (const auto& device : devices_)
      mapped_history_.note_all(*device, nullptr);
    auto to_unix_us = [to_ns = clock_.makeConverter()](auto time) { return to_ns(time) / 1000; };
    for (size_t i = 0; i < devices_.size(); i++) {
      out.device_traces.emplace_back();
      if (include_traces)
        out.device_traces.back() = history_.entries(static_cast<int>(i));
      note_last_freed(out.segments, out.device_traces.back());
      for (TraceEntry& entry : out.device_traces.back())
        entry.time_.t_ = to_unix_us(entry.time_.approx_t_);
      note_snapshot(out.segments, static_cast<int>(i), id); // for the next one
    }
    out.external_annotations = history_.annotations();
    for (Annotation& annotation : out.external_annotations)
      annotation.time_.t_ = to_unix_us(annotation.time_.approx_t_);
    out.config_metadata = configuration();
    return out;
  }

  back_end::SnapshotInfo snapshot(MempoolId_t id) {
    return snapshot(id, true);
  }

  /* Without `skip` up to PyTorch 2.9. */
  void recordHistory(bool enabled, CreateContextFn context, size_t entries, RecordContext when, bool clear,
                     const std::vector<std::string>& skip) {
    bool begins = enabled && !history_.is_recording();
    for (const auto& device : devices_)
      if (begins)
        mapped_history_.begin(*device);
    history_.record(enabled, context, entries, when, clear, skip);
  }

  void recordHistory(bool enabled, CreateContextFn context, size_t entries, RecordContext when, bool clear) {
    recordHistory(enabled, context, entries, when, clear, {});
  }

  /* Since PyTorch 2.10, as the next one. */
  void setUserMetadata(const std::string& metadata) {
    history_.set_metadata(metadata);
  }

  std::string getUserMetadata() {
    return history_.metadata();
  }

  /* Without `use` up to PyTorch 2.9: it is to be used. */
  void setUseOnOOM(DeviceIndex device, MempoolId_t id, bool use) {
    pools_with(device, id).set_use_on_oom(id, use);
  }

  void setUseOnOOM(DeviceIndex device, MempoolId_t id) {
    setUseOnOOM(device, id, true);
  }

  /* Memory of vpmm's own needs no word: that of an allocation is no other's while it lives. */
  void setNoSplit(DeviceIndex device, MempoolId_t id) {
    if (Keeper* keeper = pools_with(device, id).keeper(id))
      set_no_split(*keeper, device, id, 0);
  }

  /* Since PyTorch 2.12, as the next one. */
  void attachOomRejectionObserver(RejectionObserver observer) {
    shortage_.attach_to_rejections(std::move(observer));
  }

  /* The stacks of a live allocation, while they are kept; NULL. */
  Context getContextForPointer(const void* address) {
    Allocation allocation;
    return allocations_.find(address, allocation) ? allocation.context : nullptr;
  }
#pragma GCC diagnostic pop

  bool isHistoryEnabled() override {
    return history_.is_recording();
  }

  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& said) override {
    if (history_.is_recording())
      history_.annotate(c10::cuda::current_device(), said);
  }

  void pushCompileContext(std::string& region) override {
    History::enter_region(region);
  }

  void popCompileContext() override {
    History::leave_region();
  }

  void attachAllocatorTraceTracker(AllocatorTraceTracker tracker) override {
    lender_.attach(tracker);
    history_.attach(std::move(tracker));
  }

  void attachOutOfMemoryObserver(back_end::OutOfMemoryObserver observer) override {
    shortage_.attach(std::move(observer));
  }

  /* ---- private pools ---- */

  void beginAllocateToPool(DeviceIndex device, MempoolId_t id, Filter filter) override {
    Pools& pools = pools_with(device, id);
    pools.begin(id, filter);
    auto undo = c10::make_scope_exit([&] {
      pools.end(id);
      pools.remove_user(id);
    });
    if (Keeper* keeper = pools.keeper(id))
      shortage_.while_nobody_is_helped([&] { keeper->beginAllocateToPool(device, id, std::move(filter)); });
    undo.release();
  }

  void endAllocateToPool(DeviceIndex device, MempoolId_t id) override {
    if (Keeper* keeper = at(device).pools.keeper(id))
      keeper->endAllocateToPool(device, id);
    at(device).pools.end(id);
    at(device).frees.end();
  }

  void releasePool(DeviceIndex device, MempoolId_t id) override {
    Pools& pools = pools_with(device, id);
    if (Keeper* keeper = pools.keeper(id))
      keeper->releasePool(device, id);
    pools.remove_user(id);
  }

  int getPoolUseCount(DeviceIndex device, MempoolId_t id) override {
    return pools_with(device, id).users(id);
  }

  void createOrIncrefPool(DeviceIndex device, MempoolId_t id, OtherAllocator allocator = nullptr) override {
    Pools& pools = pools_with(device, id);
    Keeper* keeper = pools.keeper(id);
    bool is_new = allocator && !keeper;
    if (is_new)
      keeper = lender_.keeper(static_cast<int>(devices_.size()));
    if (keeper) // first: it may refuse
      keeper->createOrIncrefPool(device, id, std::move(allocator));
    auto undo = c10::make_scope_exit([&] {
      if (keeper)
        keeper->releasePool(device, id);
    });
    if (is_new)
      pools.add_lent(id, keeper);
    else
      pools.add_user(id);
    undo.release();
  }

  bool checkPoolLiveAllocations(DeviceIndex device, MempoolId_t id,
                                const std::unordered_set<void*>& expected) override {
    size_t found = 0, live = 0;
    (void)at(device).pools.find(id); // or throws
    allocations_.each([&](void* address, const Allocation& allocation) {
      bool is_of_pool = allocation.device == device && allocation.pool->id == id;
      live += is_of_pool;
      found += is_of_pool && expected.count(address);
    });
    return live == expected.size() && found == live;
  }

  std::shared_ptr<back_end::AllocatorState> getCheckpointState(DeviceIndex index, MempoolId_t id) override {
    Device& device = at(index);
    std::shared_ptr<Pool> pool = device.pools.find(id);
    TORCH_CHECK_NOT_IMPLEMENTED(!pool->is_lent(), "vpmm: a checkpoint of a MemPool(allocator)");
    auto checkpoint = std::make_shared<Checkpoint>(pool, device.frees);
    allocations_.each([&](void* address, const Allocation& allocation) {
      if (allocation.pool == pool)
        checkpoint->add(*pool, address, allocation);
    });
    return checkpoint;
  }

  /* No other thread allocates from the pool meanwhile. Both lists are whole: what stays is freed and allocated. */
  back_end::CheckpointDelta setCheckpointPoolState(DeviceIndex index,
                                                   std::shared_ptr<back_end::AllocatorState> state) override {
    auto checkpoint = std::dynamic_pointer_cast<Checkpoint>(state);
    std::shared_ptr<Pool> pool = checkpoint ? checkpoint->pool() : nullptr;
    TORCH_CHECK(pool, "vpmm: the memory pool of this checkpoint has ended");
    check_is_awake(*pool);
    back_end::CheckpointDelta delta;
    std::vector<void*> live;
    allocations_.each([&](void* address, const Allocation& allocation) {
      if (allocation.pool == pool)
        live.push_back(address);
    });
    for (void* address : live)
      if (try_free(address)) // not so: another thread has, meanwhile
        delta.ptrs_freed.push_back(address);
    for (const Checkpoint::Live& live : checkpoint->live())
      delta.dataptrs_allocd.push_back(allocate_again(index, pool, live));
    return delta;
  }

  /* ---- several devices ---- */

  /*
   * `device` may use the memory of `owner`: PyTorch asks for it before the first copy between two that are peers. For
   * memory of CUDA's own (direct.h) it is the runtime's to allow.
   */
  void enablePeerAccess(DeviceIndex device, DeviceIndex owner) override {
    at(owner).pools.allow(device);
    imports_.allow(device, owner);
    {
      OnDevice on(device);
      if (on.is_on())
        (void)succeeds(cudaDeviceEnablePeerAccess(owner, 0)); // not so: it was allowed before
    }
    if (Keeper* keeper = lender_.keeper_if_used())
      keeper->enablePeerAccess(device, owner);
  }

  /* ---- parking, which PyTorch does not know ---- */

  /* On each device that has a pool of the id. */
  void park(MempoolId_t id, bool keep) {
    each_private(id, [&](Device& device, Pool& pool) {
      TORCH_CHECK(
          !keep || !device.pools.may_any_capture(),
          "vpmm: what a memory pool holds is not kept while a graph is captured, or as use_mem_pool begins: the "
          "wait for the device would end the capture");
      TORCH_CHECK(await_uses_elsewhere(device, pool),
                  "vpmm: what another device does with a memory pool cannot be "
                  "waited for now, so nothing has changed");
      auto end = c10::make_scope_exit([&] { // also where the driver would not take all back
        if (pool.parking.is_parked())
          end_exports(pool);
      });
      pool.parking.park(pool.pool, keep, [&] { return contents_of(pool); });
    });
  }

  void wake(MempoolId_t id) {
    each_private(id, [&](Device& device, Pool& pool) {
      pool.hold(); // it may be idle itself
      auto let_go = c10::make_scope_exit([&] { pool.let_go(); });
      pool.parking.wake(pool.pool, [&] {
        shortage_.make_room(device);
        for (const auto& other : device.pools.all())
          if (!other->is_lent())
            vpmm_trim(other->pool, 0, nullptr);
      });
    });
  }

  /* ---- sharing with other processes ---- */

  back_end::ShareableHandle shareIpcHandle(void* address) override {
    Allocation allocation;
    TORCH_CHECK(allocations_.find(address, allocation), "invalid device pointer: ", address);
    if (allocation.pool->keeper)
      return allocation.pool->keeper->shareIpcHandle(address);
    check_is_awake(*allocation.pool);
    OnDevice on(allocation.device);
    Export shared = exports_.share(*vpmm_pool_driver(allocation.pool->pool), address, allocation.bytes);
    return {static_cast<ptrdiff_t>(shared.offset), shared.description};
  }

  /* What a process without vpmm shares is opened by PyTorch's own allocator. */
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
    if (!Imports::is_description(handle))
      return lender_.keeper(static_cast<int>(devices_.size()))->getIpcDevPtr(std::move(handle));
    int device = c10::cuda::current_device();
    return imports_.open(*vpmm_pool_driver(at(device).pools.main()->pool), device, handle);
  }

 private:
  static void delete_at(void* address);

  /* A MemPool that was made before vpmm took the place stays with PyTorch's own allocator, as a lent one. */
  Pools& pools_with(DeviceIndex device, MempoolId_t id) {
    Pools& pools = at(device).pools;
    int users = pools.has(id) ? 0 : lender_.users(device, id);
    if (users > 0)
      pools.take_over(id, lender_.keeper(static_cast<int>(devices_.size())), users);
    return pools;
  }

  static void add_lent(DeviceStats& out, const DeviceStats& lent) {
    auto add = [](c10::CachingAllocator::Stat& to, const c10::CachingAllocator::Stat& more) {
      to.current += more.current;
      to.peak += more.peak;
      to.allocated += more.allocated;
      to.freed += more.freed;
    };
    add(out.reserved_bytes[AGGREGATE], lent.reserved_bytes[AGGREGATE]);
    add(out.segment[AGGREGATE], lent.segment[AGGREGATE]);
    out.num_device_alloc += lent.num_device_alloc;
    out.num_device_free += lent.num_device_free;
  }

  /* NULL: the device has none of the id. Holds no other pool, so that idle ones can end meanwhile. */
  static std::shared_ptr<Pool> private_of(Device& device, MempoolId_t id) {
    for (const auto& pool : device.pools.all())
      if (pool->is_private() && pool->id == id)
        return pool;
    return nullptr;
  }

  template <typename Visit>
  void each_private(MempoolId_t id, Visit visit) {
    bool found = false;
    for (const auto& device : devices_) {
      std::shared_ptr<Pool> pool = private_of(*device, id);
      if (!pool)
        continue;
      TORCH_CHECK(!pool->is_lent(), "vpmm: a MemPool(allocator) is not parked: its memory is the allocator's");
      OnDevice on(device->index);
      TORCH_CHECK(on.is_on(), "vpmm: device ", device->index, " cannot be made current");
      visit(*device, *pool);
      found = true;
    }
    TORCH_CHECK(found, "vpmm: there is no memory pool (", id.first, ", ", id.second, ")");
  }

  /* What streams of others do with the pool's memory, live, shelved or freed. False: it cannot be waited for now. */
  bool await_uses_elsewhere(Device& device, Pool& pool) {
    if (frees_underway) // it may be of this pool, and would be waited for by the thread that makes it
      return false;
    std::vector<Allocation> used;
    allocations_.each([&](void*, const Allocation& allocation) {
      if (allocation.pool.get() == &pool && !allocation.used.empty())
        used.push_back(allocation);
    });
    while (pool.leaving.load()) // who frees tells of it first, and may wait for Python's lock
      std::this_thread::yield();
    {
      std::lock_guard<std::mutex> guard(pool.end_lock); // a checkpoint that goes has freed all of its own, or none yet
      for (auto& [address, allocation] : pool.wanted.shelved())
        used.push_back(std::move(allocation));
    }
    for (const Allocation& allocation : used)
      if (!await_other_devices(allocation))
        return false;
    return device.frees.await_all(pool);
  }

  /* What is live of it, as it is parked. Throws if that serves a request from outside, whose memory is not to go. */
  std::vector<Content> contents_of(const Pool& pool) {
    std::vector<Content> live;
    bool helps = pool.helping.load(); // first: what was being given is live by the next
    allocations_.each([&](void* address, const Allocation& allocation) {
      if (allocation.pool.get() != &pool)
        return;
      helps = helps || allocation.is_help;
      live.push_back({address, allocation.bytes});
    });
    TORCH_CHECK(!helps, "vpmm: memory pool (", pool.id.first, ", ", pool.id.second,
                ") helps out (use_on_oom): it can be parked once what it has given is freed, and no request is short");
    return live;
  }

  /* Other handles will be behind what lives. */
  void end_exports(const Pool& pool) {
    allocations_.each([&](void* address, const Allocation& allocation) {
      if (allocation.pool.get() == &pool)
        exports_.end(address);
    });
  }

  static void check_is_awake(const Pool& pool) {
    TORCH_CHECK(!pool.parking.is_parked(), "vpmm: memory pool (", pool.id.first, ", ", pool.id.second,
                ") is parked: vpmm_torch.wake it first");
  }

  /* {0, 0}: all are. */
  static bool is_meant(MempoolId_t id, const Pool& pool) {
    return id == MempoolId_t{0, 0} || pool.id == id;
  }

  /* Those of each device together. */
  static void sort(std::vector<SegmentInfo>& segments) {
    std::sort(segments.begin(), segments.end(), [](const SegmentInfo& a, const SegmentInfo& b) {
      return std::tie(a.device, a.address) < std::tie(b.device, b.address);
    });
  }

  void note_snapshot(const std::vector<SegmentInfo>& segments, int index, MempoolId_t id) {
    size_t active = 0;
    for (const SegmentInfo& segment : segments)
      active += segment.device == index ? segment.active_size : 0;
    if (history_.is_watched())
      history_.add(TraceEntry::SNAPSHOT, index, nullptr, active, nullptr, id, nullptr);
  }

  static void add_segments(back_end::SnapshotInfo& out, Pool& pool, int device, std::vector<Occupant> occupants) {
    for (auto& [address, allocation] : pool.wanted.shelved())
      occupants.push_back({reinterpret_cast<size_t>(address), std::move(allocation), false});
    std::vector<SegmentInfo> segments = segments_of(pool.pool, device, pool.id, std::move(occupants));
    std::move(segments.begin(), segments.end(), std::back_inserter(out.segments));
  }

  /* Of PyTorch's settings those that mean something here. */
  static back_end::AllocatorConfigInfo configuration() {
    back_end::AllocatorConfigInfo out = {};
    std::string settings = settings_text<CudaSettings, CommonSettings>(0);
    out.last_allocator_settings = settings.empty() ? "backend:vpmm" : "backend:vpmm," + settings;
    out.max_split_size = SIZE_MAX; // as PyTorch says it where there is none
    out.roundup_power2_divisions = power2_divisions<CudaSettings, CommonSettings>(0);
    set_reuses_in_captures(out, reuses_in_captures<CudaSettings>(0), 0);
    return out;
  }

  Device& at(int device) {
    TORCH_CHECK(0 <= device && device < static_cast<int>(devices_.size()), "Allocator not initialized for device ",
                device, ": did you call init?");
    return *devices_[static_cast<size_t>(device)];
  }

  /*
   * For a thread that asks for memory before it does anything else with the device, and so has no context current.
   * The driver then takes 5 us, and a lock over all threads, to say which stream a handle is: a malloc and a free took
   * 6 us without a context and 0.8 with one, and 53 us by sixteen threads (an H200).
   */
  static void make_context_current(const Pool& pool, int device) {
    if (thread_has_looked)
      return;
    CUcontext context = nullptr;
    vpmm_pool_driver(pool.pool)->cuCtxGetCurrent(&context);
    if (!context)
      C10_CUDA_CHECK(cudaSetDevice(device));
    thread_has_looked = true;
  }

  /* As PyTorch reads such a variable. */
  static bool is_switched_on(const char* variable) {
    const char* value = std::getenv(variable);
    return value && std::string(value) == "1";
  }

  /* Of the device that is current, and its current stream. The runtime takes a lock over all threads to say which. */
  void* obtain_for_current(DeviceIndex device, size_t bytes) {
    return bytes ? obtain(device, bytes, note_stream(c10::cuda::getCurrentCUDAStream(device))) : nullptr;
  }

  /* From CUDA itself while that is asked for: torch.cuda.caching_allocator_enable(False), and a variable for tools. */
  void* obtain(int device, size_t bytes, cudaStream_t stream) {
    static const bool never = is_switched_on("PYTORCH_NO_CUDA_MEMORY_CACHING"); // at the first request, as PyTorch
    if (!never && isEnabled())
      return malloc(device, bytes, stream);
    void* address = direct_.malloc(bytes);
    tell_tracer(address, true);
    return address;
  }

  /*
   * CUDA's sanitizer of PyTorch, and whatever else watches what the GPU is given; of lent pools their keeper tells it.
   * It may take Python's lock.
   */
  static void tell_tracer(const void* address, bool is_begun) {
    const c10::impl::PyInterpreter* tracer = c10::impl::GPUTrace::get_trace();
    if (C10_LIKELY(!tracer))
      return;
    if (is_begun)
      (*tracer)->trace_gpu_memory_allocation(c10::kCUDA, reinterpret_cast<uintptr_t>(address));
    else
      (*tracer)->trace_gpu_memory_deallocation(c10::kCUDA, reinterpret_cast<uintptr_t>(address));
  }

  /*
   * What was sent to other processes and is not used here any more is live until they say that they are done with it.
   * PyTorch's own allocator looks for that before it asks the device for memory.
   */
  void collect_shared() {
    constexpr auto PAUSE = std::chrono::milliseconds(10);
    using Clock = std::chrono::steady_clock;
    if (C10_LIKELY(!exports_.are_any()))
      return;
    Clock::rep now = Clock::now().time_since_epoch().count(), next = next_collection_.load(std::memory_order_relaxed);
    if (now >= next &&
        next_collection_.compare_exchange_strong(next, now + Clock::duration(PAUSE).count(), std::memory_order_relaxed))
      Shortage::call_back();
  }

  /* Python may be asked for a stack, so that comes first: it may fail. */
  void* malloc(int index, size_t bytes, cudaStream_t stream) {
    Device& device = at(index);
    TORCH_CHECK_WITH(OutOfMemoryError, bytes < EXBIBYTE, "CUDA out of memory. Tried to allocate more than 1EB memory.");
    Context context = history_.is_watched() ? history_.context(RecordContext::STATE) : nullptr;
    collect_shared();
    device.frees.try_again();
    std::shared_ptr<Pool> pool = device.pools.for_request(stream);
    HeldPools helpers; // until the allocation holds its pool itself, and is live
    const Pool* asked = pool.get();
    const Request request{bytes, rounded_up(bytes), stream, context};
    void* address = nullptr;
    if (Limits::are_set(device))
      limits_.set_cap(device, *pool);
    if (pool->is_lent())
      address = shortage_.malloc_of_lent(device, *pool, request);
    else if (pool->is_private()) {
      check_is_awake(*pool);
      device.frees.free_joined(*pool, stream);
      address = pool->wanted.reuse(request.length, stream);
    }
    if (!address) {
      make_context_current(*pool, index);
      address = pool->malloc(request.length, stream);
    }
    bool is_rejected = !address && limits_.reject_early(device, request.length);
    if (!address && !is_rejected)
      address = shortage_.malloc(device, pool, request, helpers);
    if (!address)
      shortage_.refuse(device, *pool, request, is_rejected);
    bool is_lent = pool->is_lent(), is_help = pool.get() != asked;
    begin(device, address, {bytes, block_of(request.length), index, is_help, stream, std::move(pool), context, {}});
    if (!is_lent)
      tell_tracer(address, true);
    return address;
  }

  /* The allocation's life; if it cannot be noted it ends at once. */
  void begin(Device& device, void* address, const Allocation& allocation) {
    allocation.pool->hold();
    try {
      if (history_.is_recording())
        mapped_history_.note(*allocation.pool, allocation.device, allocation.context);
      allocations_.add(address, allocation);
    } catch (...) {
      device.frees.free(address, Allocation(allocation));
      throw;
    }
    device.statistics.add(allocation.bytes, allocation.block);
    try {
      tell_of_begin(device, address, allocation);
    } catch (...) { // who watches has thrown, and nobody gets the address
      end_untold(address);
      throw;
    }
  }

  void tell_of_begin(Device& device, void* address, const Allocation& allocation) {
    if (history_.is_watched())
      history_.add(TraceEntry::ALLOC, allocation.device, address, allocation.bytes, allocation.stream,
                   allocation.pool->id, allocation.context);
    if (!allocation.pool->is_lent()) // else its keeper has told
      tell_profiler(device, address, static_cast<int64_t>(allocation.block));
  }

  void end_untold(void* address) {
    Allocation allocation;
    if (!allocations_.take(address, allocation))
      return;
    Device& device = at(allocation.device);
    device.statistics.take(allocation.bytes, allocation.block);
    device.frees.free(address, std::move(allocation));
  }

  /* torch.profiler, where the calling thread is profiled with profile_memory. */
  void tell_profiler(Device& device, void* address, int64_t bytes) {
    if (c10::memoryProfilingEnabled())
      c10::reportMemoryUsageToProfiler(address, bytes, device.allocated(), limits_.reserved(device),
                                       c10::Device(c10::DeviceType::CUDA, device.index));
  }

  /* Of a checkpoint: at its address. */
  DataPtr allocate_again(DeviceIndex index, const std::shared_ptr<Pool>& pool, const Checkpoint::Live& live) {
    void* address = live.address;
    std::optional<Allocation> shelved = pool->wanted.unshelve(address);
    TORCH_CHECK(shelved, "vpmm: ", address,
                " of a checkpoint is in use: another thread allocates from its memory pool");
    shelved->pool = pool;
    shelved->bytes = live.bytes;
    shelved->block = live.block;
    begin(at(index), address, *shelved);
    tell_tracer(address, true); // as of a new one: the program's tensor of it is
    return {address, address, &delete_at, c10::Device(c10::DeviceType::CUDA, index)};
  }

  /* ---- using and freeing ---- */

  /* False: vpmm may not be told now, or has no use for it, as for what happens on other devices. */
  bool use_now(const void* address, const Allocation& allocation, const Use& use) {
    Device& device = at(allocation.device);
    if (use.device != allocation.device || allocation.pool->is_private() || !device.pools.enter())
      return false;
    vpmm_status status = vpmm_use(allocation.pool->pool, reinterpret_cast<CUdeviceptr>(address), use.stream);
    device.pools.leave();
    if (status != VPMM_ERROR_NOT_SUPPORTED) // the stream captures
      check(status, "record_stream");
    return status == VPMM_SUCCESS;
  }

  void free(void* address) {
    if (try_free(address))
      return;
    TORCH_CHECK(direct_.free(address), "invalid device pointer: ", address);
    tell_tracer(address, false);
  }

  /* False: it is no live allocation. */
  bool try_free(void* address) {
    Allocation allocation;
    std::shared_ptr<Pool> left;
    auto note = [&](const Allocation& taken) {
      if (!taken.used.empty()) {
        left = taken.pool;
        left->leaving.fetch_add(1);
        frees_underway++;
      }
    };
    if (!allocations_.take(address, allocation, note))
      return false;
    auto has_left = c10::make_scope_exit([&] {
      if (!left)
        return;
      frees_underway--;
      left->leaving.fetch_sub(1);
    });
    exports_.end(address);
    Device& device = at(allocation.device);
    device.statistics.take(allocation.bytes, allocation.block);
    try {
      tell_of_end(device, address, allocation); // before anybody is given the memory again
    } catch (...) {                             // who watches has thrown, and it is freed all the same
      device.frees.free(address, std::move(allocation));
      throw;
    }
    device.frees.free(address, std::move(allocation));
    return true;
  }

  void tell_of_end(Device& device, void* address, const Allocation& allocation) {
    if (!allocation.pool->is_lent()) { // else its keeper tells
      tell_tracer(address, false);
      tell_profiler(device, address, -static_cast<int64_t>(allocation.block));
    }
    if (history_.is_watched()) {
      Context context = history_.context(RecordContext::ALL);
      history_.add_free(allocation.device, address, allocation.bytes, allocation.stream, allocation.pool->id,
                        context ? context : allocation.context);
    }
  }

  Allocations allocations_;
  Direct direct_;
  Exports exports_;
  Imports imports_;
  std::atomic<std::chrono::steady_clock::rep> next_collection_{0};

  /* What each request and each free reads. */
  alignas(64) std::atomic<bool> enabled_{true};
  std::vector<std::unique_ptr<Device>> devices_; // grows in init alone, before the first allocation
  History history_;                              // its first

  MappedHistory mapped_history_{history_};
  Lender lender_;
  Limits limits_{lender_};
  Shortage shortage_{limits_, history_, mapped_history_, lender_};
  std::mutex init_lock_;
  std::atomic<bool> initialized_{false};
  c10::ApproximateClockToUnixTimeConverter clock_;
};

static BackEnd& the_back_end() {
  static auto* made = new BackEnd; // never destroyed: see above
  return *made;
}

void BackEnd::delete_at(void* address) {
  the_back_end().raw_delete(address);
}

} // namespace vpmm_torch

/* ---- what Python calls ---- */

/* The call's refusal, which is the thread's until its next call of this kind; NULL: it was not refused. */
template <typename Call>
static const char* refusal_of(Call call) {
  static thread_local std::string why;
  try {
    call();
    return nullptr;
  } catch (const c10::Error& error) {
    why = error.what_without_backtrace();
  } catch (const std::exception& error) {
    why = error.what();
  }
  return why.c_str();
}

using PyTorchs = c10::cuda::CUDACachingAllocator::CUDAAllocator;

/* PyTorch's allocator, which has been initialised, as torch.cuda.set_device does it. */
static bool holds_nothing(PyTorchs& former, int devices) {
  bool nothing = true;
  for (int i = 0; i < devices && nothing; i++)
    nothing = former.getDeviceStats(static_cast<c10::DeviceIndex>(i)).reserved_bytes[0].current == 0; // in sum
  return nothing;
}

static void go_on_from(PyTorchs& former, vpmm_torch::BackEnd& ours, int devices) {
  ours.init(devices);
  ours.enable(former.isEnabled());
  for (int i = 0; i < devices; i++) {
    const auto device = static_cast<c10::DeviceIndex>(i);
    ours.go_on_with(former.getMemoryFraction(device), device);
  }
}

static void take_the_place() {
  static std::mutex lock; // two threads may enable it at once: the second one's former would be ours
  std::lock_guard<std::mutex> guard(lock);
  auto& current = c10::cuda::CUDACachingAllocator::allocator;
  auto& ours = vpmm_torch::the_back_end();
  if (current.load() == &ours)
    return;
  PyTorchs& former = *current.load();
  const int devices = former.initialized() ? c10::cuda::device_count() : 0;
  TORCH_CHECK(!devices || former.name() == "native", "PyTorch's allocator is ", former.name(),
              " by now, whose place vpmm does not take: enable vpmm before it is initialised");
  TORCH_CHECK(holds_nothing(former, devices),
              "PyTorch holds CUDA memory already: enable vpmm before the first CUDA tensor");
  TORCH_CHECK(!devices || !former.isHistoryEnabled(),
              "PyTorch's allocator records its history, which vpmm could not go on with: enable vpmm before "
              "_record_memory_history");
  vpmm_torch::read_settings();
  ours.take_the_place_of(&former);
  if (devices)
    go_on_from(former, ours, devices);
  current.store(&ours);
  c10::SetAllocator(c10::DeviceType::CUDA, &ours);
}

/* Takes the place of PyTorch's allocator. NULL, or why it could not; called once or again. */
extern "C" __attribute__((visibility("default"))) const char* vpmm_torch_enable(void) {
  return refusal_of(take_the_place);
}

/* See parking.h. An id as PyTorch has it: of a MemPool, or of a graph's pool. */
extern "C" __attribute__((visibility("default"))) const char* vpmm_torch_park(uint64_t first, uint64_t second,
                                                                              bool keep) {
  return refusal_of([=] { vpmm_torch::the_back_end().park({first, second}, keep); });
}

extern "C" __attribute__((visibility("default"))) const char* vpmm_torch_wake(uint64_t first, uint64_t second) {
  return refusal_of([=] { vpmm_torch::the_back_end().wake({first, second}); });
}
