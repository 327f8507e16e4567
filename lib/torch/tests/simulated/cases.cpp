/*
 * cases.cpp - what PyTorch expects of its allocator, in cases that a thread runs one after the other, in any order, or
 * one alone. Each begins with the same state, and leaves nothing behind: see begin_case and end_case.
 */
#include "pytorch.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <iterator>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <unistd.h>

extern "C" const char* vpmm_torch_park(uint64_t first, uint64_t second, bool keep);
extern "C" const char* vpmm_torch_wake(uint64_t first, uint64_t second);

static const size_t SMALL = 1, LARGE = 2; // c10's StatType

static bool says(const char* refusal, const char* part) {
  return refusal && std::string(refusal).find(part) != std::string::npos;
}

static std::string refusal_of(Back& back, size_t bytes) {
  std::string why;
  try {
    back.allocate(bytes);
  } catch (const c10::OutOfMemoryError& error) {
    why = error.what();
  }
  return why;
}

static void refuses(Back& back) {
  std::string why = refusal_of(back, size_t{1} << 50);
  REQUIRE(why.find("CUDA out of memory. Tried to allocate 1048576.00 GiB. GPU 0 has a total capacity of") == 0);
  REQUIRE(back.allocate(0).get() == nullptr);
}

/* In steps of 512 bytes, those of up to 1 MiB as small. */
static void counts_blocks(Back& back) {
  const std::pair<size_t, size_t> cases[] = {
      {1, 512}, {512, 512}, {513, 1024}, {1 << 20, 1 << 20}, {(1 << 20) + 1, (1 << 20) + 512}, {3 << 20, 3 << 20}};
  back.resetAccumulatedStats(0);
  int64_t requested = 0, block = 0;
  for (auto [bytes, expected] : cases) {
    c10::DataPtr memory = back.allocate(bytes);
    auto stats = back.getDeviceStats(0);
    size_t pool = expected <= 1 << 20 ? SMALL : LARGE;
    for (size_t i : {size_t{0}, pool}) {
      REQUIRE(stats.requested_bytes[i].current == static_cast<int64_t>(bytes));
      REQUIRE(stats.allocated_bytes[i].current == static_cast<int64_t>(expected));
      REQUIRE(stats.active_bytes[i].current == static_cast<int64_t>(expected));
      REQUIRE(stats.allocation[i].current == 1 && stats.active[i].current == 1);
    }
    REQUIRE(stats.allocation[SMALL + LARGE - pool].current == 0);
    requested += static_cast<int64_t>(bytes);
    block += static_cast<int64_t>(expected);
  }
  auto stats = back.getDeviceStats(0);
  REQUIRE(stats.allocated_bytes[0].current == 0 && stats.allocated_bytes[0].allocated == block);
  REQUIRE(stats.allocated_bytes[0].freed == block && stats.requested_bytes[0].allocated == requested);
  REQUIRE(stats.allocation[0].allocated == 6 && stats.allocation[SMALL].allocated == 4);
  back.resetPeakStats(0);
  back.resetAccumulatedStats(0);
  stats = back.getDeviceStats(0);
  REQUIRE(stats.allocated_bytes[0].peak == 0 && stats.allocated_bytes[0].allocated == 0);
  REQUIRE(stats.allocated_bytes[0].freed == 0);
}

/* What the driver gave and was given back, since the last reset. */
static void counts_what_the_driver_gave(Back& back) {
  back.emptyCache({0, 0});
  back.resetAccumulatedStats(0);
  auto stats = back.getDeviceStats(0);
  REQUIRE(!stats.num_device_alloc && !stats.num_device_free && !stats.reserved_bytes[0].allocated);
  back.allocate(64 << 20).clear();
  stats = back.getDeviceStats(0);
  auto bytes = stats.reserved_bytes[0].current;
  REQUIRE(bytes >= 64 << 20 && stats.reserved_bytes[0].allocated == bytes && !stats.reserved_bytes[0].freed);
  REQUIRE(stats.segment[0].allocated > 0 && stats.segment[0].allocated == stats.num_device_alloc);
  back.emptyCache({0, 0});
  stats = back.getDeviceStats(0);
  REQUIRE(!stats.reserved_bytes[0].current && stats.reserved_bytes[0].freed == bytes);
  REQUIRE(stats.segment[0].freed == stats.segment[0].allocated && !stats.segment[0].current);
  back.resetAccumulatedStats(0);
  stats = back.getDeviceStats(0);
  REQUIRE(!stats.num_device_alloc && !stats.num_device_free && !stats.reserved_bytes[0].freed);
}

/* roundup_power2_divisions: to the next part of the power of two below. */
static void rounds_up_as_the_settings_say(Back& back) {
  const size_t MIB = 1 << 20;
  const struct {
    size_t parts, bytes, block;
  } cases[] = {{4, 84 * MIB, 96 * MIB}, {8, 84 * MIB, 88 * MIB}, {2, 400 * MIB, 512 * MIB}, {1, 84 * MIB, 84 * MIB},
               {4, 64 * MIB, 64 * MIB}, {4, 1000, 1024},         {4, 2048, 2048},           {4, 2049, 2560}};
  for (auto [parts, bytes, block] : cases) {
    settings.roundup_power2_divisions = parts;
    c10::DataPtr memory = back.allocate(bytes);
    settings.roundup_power2_divisions = 0;
    auto stats = back.getDeviceStats(0);
    REQUIRE(stats.requested_bytes[0].current == static_cast<int64_t>(bytes));
    REQUIRE(stats.allocated_bytes[0].current == static_cast<int64_t>(block));
    REQUIRE(stats.reserved_bytes[0].current >= static_cast<int64_t>(block));
    memory.clear();
    REQUIRE(back.getDeviceStats(0).allocated_bytes[0].current == 0);
  }
}

/* As torch.cuda.use_mem_pool. */
struct InPool {
  Back& back;
  const MempoolId_t id;

  InPool(Back& back, MempoolId_t id) : back(back), id(id) {
    back.beginAllocateToPool(0, id, [](cudaStream_t) { return true; });
  }

  ~InPool() {
    back.endAllocateToPool(0, id);
    back.releasePool(0, id);
  }
};

static bool refused(Back& back, size_t bytes) {
  try {
    back.allocate(bytes).clear();
  } catch (const c10::OutOfMemoryError&) {
    return true;
  }
  return false;
}

/* Of what all pools hold together. */
static void keeps_to_the_memory_fraction(Back& back) {
  const MempoolId_t id{7, 5};
  const double MIB = 1 << 20, total = static_cast<double>(vpmm_sim_config_default().memory_bytes);
  back.emptyCache({0, 0});
  back.setMemoryFraction(80 * MIB / total, 0);
  back.createOrIncrefPool(0, id);
  c10::DataPtr in_pool, in_main;
  {
    InPool in(back, id);
    in_pool = back.allocate(40 << 20);
    REQUIRE(refused(back, 44 << 20));
  }
  in_main = back.allocate(36 << 20);
  REQUIRE(refused(back, 8 << 20));
  in_pool.clear();
  REQUIRE(refused(back, 8 << 20)); // it is the pool's
  back.releasePool(0, id);
  back.emptyCache({0, 0});
  REQUIRE(!refused(back, 40 << 20));
  back.setMemoryFraction(1, 0);
  REQUIRE(!refused(back, 100 << 20));
  in_main.clear();
}

/* While it is disabled memory is CUDA's own, which is freed as such afterwards too. */
static void may_be_disabled(Back& back) {
  back.resetAccumulatedStats(0);
  back.enable(false);
  REQUIRE(!back.isEnabled());
  uint64_t before = vpmm_sim_used_bytes(simulated.sim);
  void* memory = back.raw_alloc(4 << 20);
  c10::DataPtr other = back.allocate(4 << 20);
  REQUIRE(back.getDeviceStats(0).requested_bytes[0].allocated == 0);
  REQUIRE(vpmm_sim_used_bytes(simulated.sim) >= before + (8 << 20));
  back.raw_delete(memory);
  back.enable(true);
  other.clear();
  REQUIRE(vpmm_sim_used_bytes(simulated.sim) == before);
  memory = back.raw_alloc(4 << 20);
  REQUIRE(back.isEnabled() && back.getDeviceStats(0).requested_bytes[0].allocated == 4 << 20);
  back.raw_delete(memory);
  std::string why;
  try {
    back.raw_delete(memory);
  } catch (const std::exception& error) {
    why = error.what();
  }
  REQUIRE(why.find("invalid device pointer") == 0);
}

/* Each has what the others leave, while they grow. */
static void asks_by_threads_under_a_memory_fraction(Back& back) {
  std::atomic<int> refused{0};
  std::vector<std::thread> threads;
  back.setMemoryFraction(0.9, 0);
  for (int i = 0; i < 4; i++)
    threads.emplace_back([&, i] {
      DRIVE(cuCtxSetCurrent(simulated.context));
      std::vector<c10::DataPtr> held(16);
      for (int step = 0; step < 2000; step++)
        try {
          held[static_cast<size_t>(step % 16)] = back.allocate(static_cast<size_t>(1 + (step * 7 + i) % 23) << 20);
        } catch (const c10::OutOfMemoryError&) {
          refused++;
        }
    });
  for (std::thread& thread : threads)
    thread.join();
  REQUIRE(refused == 0);
  back.setMemoryFraction(1, 0);
  back.emptyCache({0, 0});
  REQUIRE(back.getDeviceStats(0).reserved_bytes[0].current == 0);
}

/* ---- private pools ---- */

/* By a thread that then empties the cache: what is reserved after it. */
static int64_t reserved_when_another_has_freed(Back& back, c10::DataPtr& memory) {
  std::thread other([&] {
    DRIVE(cuCtxSetCurrent(simulated.context));
    memory.clear();
    back.emptyCache({0, 0});
  });
  other.join();
  return back.getDeviceStats(0).reserved_bytes[0].current;
}

/* PyTorch does not end what a failed capture has begun: others free all the same, once the thread goes on. */
static void frees_after_a_capture_that_failed(Back& back) {
  const MempoolId_t id{7, 13};
  const int64_t BYTES = 8 << 20;
  c10::DataPtr piece = back.allocate(1000), first = back.allocate(BYTES), second = back.allocate(BYTES);
  const int64_t all = back.getDeviceStats(0).reserved_bytes[0].current;
  back.beginAllocateToPool(0, id, [](cudaStream_t) { return false; });
  REQUIRE(reserved_when_another_has_freed(back, first) == all); // a capture may be about to begin
  back.allocate(1000).clear();                                  // beside the piece
  REQUIRE(reserved_when_another_has_freed(back, second) == all - 2 * BYTES);
  piece.clear();
  back.endAllocateToPool(0, id);
  back.releasePool(0, id);
  back.emptyCache({0, 0});
}

/* A thread that has ended captures nothing any more: what others free is used again. */
static void frees_after_a_thread_that_was_to_capture(Back& back) {
  const size_t BYTES = 64 << 20;
  const MempoolId_t id{7, 12};
  back.emptyCache({0, 0});
  std::thread([&] { back.beginAllocateToPool(0, id, [](cudaStream_t) { return false; }); }).join();
  back.allocate(BYTES).clear();
  back.allocate(BYTES).clear();
  REQUIRE(back.getDeviceStats(0).reserved_bytes[0].current == static_cast<int64_t>(BYTES));
  back.endAllocateToPool(0, id);
  back.releasePool(0, id);
}

/* What is free elsewhere is given back before a request fails. */
static void takes_what_other_pools_leave(Back& back) {
  const MempoolId_t id{7, 14};
  const size_t most = vpmm_sim_config_default().memory_bytes / 4 * 3;
  back.allocate(most).clear();
  back.createOrIncrefPool(0, id);
  {
    InPool in(back, id);
    back.allocate(most).clear();
  }
  back.releasePool(0, id);
  back.allocate(most).clear();
  back.emptyCache({0, 0});
  REQUIRE(back.getDeviceStats(0).reserved_bytes[0].current == 0);
}

/* In each version of PyTorch. */
template <typename Allocator>
static auto use_on_oom(Allocator& back, MempoolId_t id, int) -> decltype(back.setUseOnOOM(0, id, true)) {
  back.setUseOnOOM(0, id, true);
}

template <typename Allocator>
static auto use_on_oom(Allocator& back, MempoolId_t id, long) -> decltype(back.setUseOnOOM(0, id)) {
  back.setUseOnOOM(0, id);
}

/* Of the pool that was asked, whoever could not help out; and nothing is to be raised that has no effect. */
static void says_why_the_pool_has_no_memory(Back& back) {
  const MempoolId_t id{7, 15};
  const size_t more = size_t{32} << 30; // than there is
  const std::string reason = "vpmm: 34359738368 bytes were asked for: mapped 0, live 0";
  REQUIRE(refusal_of(back, more).find(reason) != std::string::npos);
  back.createOrIncrefPool(0, id);
  {
    InPool in(back, id);
    back.allocate(1 << 20).clear();
    REQUIRE(refusal_of(back, more).find("vpmm: the request is longer than the device's memory") != std::string::npos);
  }
  use_on_oom(back, id, 0);
  REQUIRE(refusal_of(back, more).find(reason) != std::string::npos);
  back.releasePool(0, id);
  back.emptyCache({0, 0});
}

/* Who observes may throw, and others have been told by then. */
static void tells_the_profiler_before_observers(Back& back) {
  auto counts = std::make_shared<bool>(true);
  back.attachOutOfMemoryObserver([is_on = std::weak_ptr<bool>(counts)](int64_t, size_t, size_t, size_t) {
    if (!is_on.expired())
      throw std::runtime_error("an observer");
  });
  const size_t more = size_t{1} << 50;
  bool has_thrown = false;
  torch_profile(true);
  try {
    back.allocate(more);
  } catch (const std::runtime_error&) {
    has_thrown = true;
  }
  torch_profile(false);
  REQUIRE(has_thrown && torch_profiled_shortages() == std::vector<int64_t>{static_cast<int64_t>(more)});
}

/* Which is the program's mistake. It lasts while requests go to it, and no longer. */
static void keeps_a_pool_that_is_released_too_often(Back& back) {
  const MempoolId_t id{7, 34};
  back.createOrIncrefPool(0, id);
  back.beginAllocateToPool(0, id, [](cudaStream_t) { return true; });
  back.releasePool(0, id);
  back.releasePool(0, id);
  back.emptyCache({0, 0});
  back.allocate(1000).clear();
  back.endAllocateToPool(0, id);
  back.emptyCache({0, 0});
  std::string why;
  try {
    back.releasePool(0, id);
  } catch (const std::exception& error) {
    why = error.what();
  }
  REQUIRE(says(why.c_str(), "there is no memory pool (7, 34)"));
}

/* ---- shortages, and what others capture meanwhile ---- */

/* Work of a stream that does not end before it is told to. */
struct Gate {
  std::atomic<bool> is_open{false};

  void stand_before(CUstream stream) {
    DRIVE(cuLaunchHostFunc(stream, wait, this));
  }

 private:
  static void CUDA_CB wait(void* gate) {
    while (!static_cast<Gate*>(gate)->is_open)
      usleep(1000);
  }
};

/*
 * Memory that a further stream still uses is waited for before a request fails: of a MemPool, and of the main pool
 * where the stream is another device's.
 */
static void waits_for_further_streams(Back& back, bool is_private) {
  const MempoolId_t id{7, 20};
  const size_t most = vpmm_sim_config_default().memory_bytes / 4 * 3;
  back.emptyCache({0, 0});
  back.createOrIncrefPool(0, id);
  Gate gate;
  CUstream side = nullptr;
  CUcontext context;
  DRIVE(cuCtxPushCurrent(is_private ? simulated.context : simulated.peer_context));
  DRIVE(cuStreamCreate(&side, CU_STREAM_NON_BLOCKING));
  gate.stand_before(side);
  DRIVE(cuCtxPopCurrent(&context));
  {
    std::optional<InPool> in;
    if (is_private)
      in.emplace(back, id);
    c10::DataPtr used = back.allocate(most);
    back.recordStream(used, torch_stream(side, is_private ? 0 : 1));
    used.clear();
    std::thread opener([&] {
      usleep(20000);
      gate.is_open = true;
    });
    back.allocate(most).clear();
    opener.join();
  }
  DRIVE(cuStreamDestroy(side));
  back.releasePool(0, id);
  back.emptyCache({0, 0});
}

/* A stream of the second device, that works with `used`, which is freed. */
static CUstream leave_to_a_peer(Back& back, Gate& gate, c10::DataPtr used) {
  CUstream stream = nullptr;
  CUcontext context;
  DRIVE(cuCtxPushCurrent(simulated.peer_context));
  DRIVE(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  DRIVE(cuCtxPopCurrent(&context));
  gate.stand_before(stream);
  back.recordStream(used, torch_stream(stream, 1));
  return stream;
}

static std::thread opens_soon(Gate& gate) {
  return std::thread([&] {
    usleep(40000);
    gate.is_open = true;
  });
}

/* Empties the cache in another thread, which by now waits for what was freed, or for this one. */
static std::thread empties_the_cache(Back& back) {
  const uint64_t waits = vpmm_sim_calls(simulated.sim, "cuEventSynchronize");
  std::thread emptier([&] {
    DRIVE(cuCtxSetCurrent(simulated.context));
    back.emptyCache({0, 0});
  });
  for (int i = 0; i < 20 && vpmm_sim_calls(simulated.sim, "cuEventSynchronize") == waits; i++)
    usleep(1000);
  return emptier;
}

static std::function<void()> when_short; // what the next threads that are short of memory call

struct WhenShort : c10::FreeMemoryCallback {
  bool Execute() override {
    if (when_short)
      when_short();
    return true;
  }
};

namespace c10 {
REGISTER_FREE_MEMORY_CALLBACK("when short", WhenShort);
}

/*
 * Another thread takes the frees that a request waits for, before each of the locks that it takes meanwhile: between a
 * wait for who has them in hand and a look of its own, too.
 */
static void waits_for_who_takes_the_frees(Back& back) {
  enum { LOCKS = 40 };
  const size_t most = vpmm_sim_config_default().memory_bytes / 4 * 3;
  for (int lock = 0; lock < LOCKS; lock++) {
    Gate gate;
    CUstream side = leave_to_a_peer(back, gate, back.allocate(most));
    std::thread emptier, opener;
    int locks = 0;
    const std::function<void()> take_at_lock = [&] {
      if (locks++ == lock)
        emptier = empties_the_cache(back);
    };
    when_short = [&] {
      opener = opens_soon(gate);
      torch_before_locks(&take_at_lock);
    };
    back.allocate(most).clear();
    torch_before_locks(nullptr);
    when_short = nullptr;
    opener.join();
    if (emptier.joinable())
      emptier.join();
    DRIVE(cuStreamDestroy(side));
    back.emptyCache({0, 0});
  }
}

/* A MemPool of the allocator that was there before; another thread has its memory in hand, as it empties the cache. */
static void waits_for_a_lent_pool_s_memory(Back& back) {
  const MempoolId_t id{7, 35};
  const size_t most = vpmm_sim_config_default().memory_bytes / 4 * 3;
  Gate gate;
  torch_former_has(id);
  std::optional<InPool> in(std::in_place, back, id);
  CUstream side = leave_to_a_peer(back, gate, back.allocate(most));
  std::thread emptier = empties_the_cache(back), opener = opens_soon(gate);
  back.allocate(most).clear();
  emptier.join();
  opener.join();
  in.reset();
  back.releasePool(0, id);
  DRIVE(cuStreamDestroy(side));
  back.emptyCache({0, 0});
}

/* What the main pool's memory waits for comes also to a request of a MemPool. */
static void waits_for_the_main_pool_s_further_streams(Back& back) {
  const MempoolId_t id{7, 37};
  const size_t most = vpmm_sim_config_default().memory_bytes / 4 * 3;
  Gate gate;
  back.createOrIncrefPool(0, id);
  CUstream side = leave_to_a_peer(back, gate, back.allocate(most));
  std::thread opener = opens_soon(gate);
  {
    InPool in(back, id);
    back.allocate(most).clear();
  }
  opener.join();
  back.releasePool(0, id);
  DRIVE(cuStreamDestroy(side));
  back.emptyCache({0, 0});
}

/* Two threads empty the cache: it is empty to both. */
static void empties_beside_who_empties(Back& back) {
  Gate gate;
  back.emptyCache({0, 0});
  CUstream side = leave_to_a_peer(back, gate, back.allocate(64 << 20));
  std::thread emptier = empties_the_cache(back), opener = opens_soon(gate);
  back.emptyCache({0, 0});
  REQUIRE(back.getDeviceStats(0).reserved_bytes[0].current == 0);
  emptier.join();
  opener.join();
  DRIVE(cuStreamDestroy(side));
}

/* What the keeper of lent pools has free is given back before a request fails, once they have gone. */
static void takes_what_lent_pools_leave(Back& back) {
  const MempoolId_t id{7, 36};
  const size_t most = vpmm_sim_config_default().memory_bytes / 4 * 3;
  torch_former_has(id);
  {
    InPool in(back, id);
    back.allocate(most).clear();
  }
  back.releasePool(0, id);
  back.allocate(most).clear();
  back.emptyCache({0, 0});
}

static void leave_idle(Back& back, MempoolId_t id, size_t bytes) {
  back.createOrIncrefPool(0, id);
  {
    InPool in(back, id);
    back.allocate(bytes).clear();
  }
  back.releasePool(0, id);
}

/* A pool without users goes as the cache is emptied, also where a further stream still uses what was freed in it. */
static void empties_what_further_streams_use(Back& back) {
  const MempoolId_t id{7, 31};
  back.emptyCache({0, 0});
  Gate gate;
  CUstream side = nullptr;
  DRIVE(cuStreamCreate(&side, CU_STREAM_NON_BLOCKING));
  back.createOrIncrefPool(0, id);
  {
    InPool in(back, id);
    c10::DataPtr used = back.allocate(64 << 20);
    gate.stand_before(side);
    back.recordStream(used, torch_stream(side));
  }
  back.releasePool(0, id);
  std::thread opener([&] {
    usleep(20000);
    gate.is_open = true;
  });
  back.emptyCache(id);
  REQUIRE(!back.getDeviceStats(0).reserved_bytes[0].current);
  opener.join();
  DRIVE(cuStreamDestroy(side));
}

/* What pools have had counts when they are gone, and the highest peak stays until it is reset. */
static void counts_pools_that_have_ended(Back& back) {
  const int64_t MIB = 1 << 20;
  back.emptyCache({0, 0});
  back.resetPeakStats(0);
  back.resetAccumulatedStats(0);
  leave_idle(back, {7, 32}, 256 * MIB);
  back.emptyCache({0, 0});
  auto stats = back.getDeviceStats(0);
  REQUIRE(!stats.reserved_bytes[0].current && stats.reserved_bytes[0].peak >= 256 * MIB);
  REQUIRE(stats.reserved_bytes[0].allocated >= 256 * MIB);
  REQUIRE(stats.reserved_bytes[0].freed == stats.reserved_bytes[0].allocated);
  REQUIRE(stats.num_device_alloc && stats.num_device_free == stats.num_device_alloc);
  back.resetAccumulatedStats(0);
  back.resetPeakStats(0);
  back.allocate(64 * MIB).clear();
  stats = back.getDeviceStats(0);
  REQUIRE(stats.reserved_bytes[0].peak >= 64 * MIB && stats.reserved_bytes[0].peak < 256 * MIB);
  REQUIRE(stats.reserved_bytes[0].allocated >= 64 * MIB && stats.num_device_alloc && !stats.num_device_free);
  back.emptyCache({0, 0});
}

/* Which is the program's error, and no want of memory. */
static void refuses_another_device_s_stream(Back& back) {
  CUstream stream = nullptr;
  CUcontext context;
  bool is_said = false, is_shortage = false;
  DRIVE(cuCtxPushCurrent(simulated.peer_context));
  DRIVE(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  DRIVE(cuCtxPopCurrent(&context));
  auto shortages = back.getDeviceStats(0).num_ooms;
  try {
    back.raw_alloc_with_stream(1000, reinterpret_cast<cudaStream_t>(stream));
  } catch (const c10::OutOfMemoryError&) {
    is_shortage = true;
  } catch (const std::exception&) {
    is_said = true;
  }
  REQUIRE(is_said && !is_shortage && back.getDeviceStats(0).num_ooms == shortages);
  DRIVE(cuStreamDestroy(stream));
}

/* What an idle pool gives back comes also to who finds that another thread is ending it. */
static void waits_for_a_pool_that_ends(Back& back) {
  const size_t most = vpmm_sim_config_default().memory_bytes / 4 * 3;
  Gate gate;
  CUstream stream = nullptr;
  DRIVE(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  back.emptyCache({0, 0});
  leave_idle(back, {7, 30}, most);
  gate.stand_before(stream);
  std::thread ender([&] {
    DRIVE(cuCtxSetCurrent(simulated.context));
    back.emptyCache({0, 0});
  });
  usleep(50000);
  std::thread opener([&] {
    usleep(50000);
    gate.is_open = true;
  });
  back.allocate(most).clear();
  ender.join();
  opener.join();
  DRIVE(cuStreamDestroy(stream));
  back.emptyCache({0, 0});
}

/* A thread that only looks has each pool for a moment: it ends none, and keeps none from its end. */
static void ends_pools_beside_who_looks(Back& back) {
  const size_t most = vpmm_sim_config_default().memory_bytes / 4 * 3;
  std::atomic<bool> over{false};
  back.emptyCache({0, 0});
  std::thread looker([&] {
    while (!over)
      back.getDeviceStats(0);
  });
  for (uint64_t i = 0; i < 30; i++) {
    leave_idle(back, {7, 100 + i}, most);
    back.allocate(most).clear();
    back.emptyCache({0, 0});
  }
  over = true;
  looker.join();
}

/* The device cannot be waited for as the pool is to end: it ends the next time. */
static void ends_a_pool_that_could_not_end(Back& back) {
  const size_t most = vpmm_sim_config_default().memory_bytes / 4 * 3;
  back.emptyCache({0, 0});
  leave_idle(back, {7, 31}, most);
  vpmm_sim_fail(simulated.sim, "cuMemFree", 1, CUDA_ERROR_UNKNOWN, false);
  back.emptyCache({0, 0});
  vpmm_sim_fail(simulated.sim, "cuMemFree", 0, CUDA_SUCCESS, false);
  REQUIRE(back.getDeviceStats(0).reserved_bytes[0].current >= static_cast<int64_t>(most));
  back.allocate(most).clear();
  back.emptyCache({0, 0});
  REQUIRE(back.getDeviceStats(0).reserved_bytes[0].current == 0);
}

/* What the main pool has free, and the device still works with, is waited for too. */
static void waits_for_the_main_pool_s_work(Back& back) {
  const MempoolId_t id{7, 32};
  const size_t most = vpmm_sim_config_default().memory_bytes / 4 * 3;
  Gate gate;
  CUstream stream = nullptr;
  DRIVE(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  back.emptyCache({0, 0});
  back.createOrIncrefPool(0, id);
  torch_set_current_stream(stream);
  c10::DataPtr used = back.allocate(most);
  gate.stand_before(stream);
  used.clear();
  torch_set_current_stream(nullptr);
  std::thread opener([&] {
    usleep(20000);
    gate.is_open = true;
  });
  {
    InPool in(back, id);
    back.allocate(most).clear();
  }
  opener.join();
  DRIVE(cuStreamDestroy(stream));
  back.releasePool(0, id);
  back.emptyCache({0, 0});
}

/* Another thread captures meanwhile, in PyTorch's usual mode: its capture is not lost. */
template <typename Do>
static void beside_a_capture(Back& back, Do what) {
  const MempoolId_t id{7, 21};
  std::atomic<int> stage{0};
  std::thread other([&] {
    CUstream stream = nullptr;
    DRIVE(cuCtxSetCurrent(simulated.context));
    DRIVE(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    torch_set_current_stream(stream);
    back.beginAllocateToPool(0, id, [=](cudaStream_t asking) { return asking == stream; });
    capture_begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    stage = 1;
    while (stage < 2)
      usleep(100);
    capture_end(stream); // fails the test if it is lost
    back.endAllocateToPool(0, id);
    back.releasePool(0, id);
    DRIVE(cuStreamDestroy(stream));
  });
  while (stage < 1)
    usleep(100);
  what();
  stage = 2;
  other.join();
}

static void leaves_captures_of_others_alone(Back& back) {
  const MempoolId_t id{7, 22};
  c10::DataPtr shared = back.allocate(5 << 20), inner;
  std::shared_ptr<void> import = back.getIpcDevPtr(back.shareIpcHandle(shared.get()).handle);
  beside_a_capture(back, [&] { import.reset(); });
  back.createOrIncrefPool(0, id);
  {
    InPool in(back, id);
    inner = back.allocate(5 << 20);
  }
  REQUIRE(!vpmm_torch_park(7, 22, true));
  beside_a_capture(back, [&] { REQUIRE(!vpmm_torch_wake(7, 22)); });
  beside_a_capture(back, [&] { back.emptyCache({0, 0}); }); // pinned memory of the host goes
  REQUIRE(vpmm_sim_calls(simulated.sim, "cuMemHostAlloc") == vpmm_sim_calls(simulated.sim, "cuMemFreeHost"));
  inner.clear();
  shared.clear();
  back.releasePool(0, id);
  back.emptyCache({0, 0});
}

/* What may not be freed before another's capture has ended is not looked through by each request. */
static void asks_seldom_for_what_waits(Back& back) {
  enum { MANY = 40000 };
  const auto most = std::chrono::seconds(8); // of 0.02; to look through all each time takes half a minute
  beside_a_capture(back, [&] {
    auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < MANY; i++)
      back.allocate(1000).clear();
    REQUIRE(std::chrono::steady_clock::now() - begin < most);
  });
  back.allocate(1000).clear();
  REQUIRE(back.getDeviceStats(0).allocation[0].current == 0);
  back.emptyCache({0, 0});
}

/* A tensor that lives to the thread's end, longer than what the thread has said of its entries. */
static void records_frees_at_a_thread_s_end(Back& back) {
  record_history(back, 100);
  std::thread([&] {
    DRIVE(cuCtxSetCurrent(simulated.context));
    static thread_local c10::DataPtr held;
    held.clear(); // it is made before the history's own
    std::string region(100, 'r');
    back.pushCompileContext(region);
    held = back.allocate(1000);
  }).join();
  REQUIRE(back.getDeviceStats(0).allocation[0].current == 0);
  record_history(back, 0);
}

/* What is mapped is told late: nobody can register memory by it. */
static void tells_trackers_of_no_mappings(Back& back) {
  std::atomic<int> told{0}, mappings{0};
  auto counts = std::make_shared<bool>(true);
  back.attachAllocatorTraceTracker([&, is_on = std::weak_ptr<bool>(counts)](const auto& entry) {
    if (is_on.expired())
      return;
    using Entry = std::decay_t<decltype(entry)>;
    told++;
    mappings += entry.action_ == Entry::SEGMENT_MAP || entry.action_ == Entry::SEGMENT_UNMAP;
  });
  record_history(back, 100);
  back.allocate(50 << 20).clear();
  back.emptyCache({0, 0});
  record_history(back, 0);
  REQUIRE(told == 3 && mappings == 0);
}

using c10::cuda::CUDACachingAllocator::TraceEntry;

/* As PyTorch's lock lets it. */
static void trackers_may_allocate(Back& back) {
  bool is_inside = false;
  int told = 0;
  auto counts = std::make_shared<bool>(true);
  back.attachAllocatorTraceTracker([&, is_on = std::weak_ptr<bool>(counts)](const auto&) {
    if (is_on.expired() || is_inside)
      return;
    is_inside = true;
    back.allocate(1000).clear();
    is_inside = false;
    told++;
  });
  back.allocate(5000).clear();
  REQUIRE(told == 3);
}

/* One that throws, at what begins or at what ends, leaves nothing behind. */
static void trackers_may_throw(Back& back) {
  auto counts = std::make_shared<bool>(true);
  auto at = std::make_shared<TraceEntry::Action>(TraceEntry::ALLOC);
  back.attachAllocatorTraceTracker([at, is_on = std::weak_ptr<bool>(counts)](const TraceEntry& entry) {
    if (!is_on.expired() && entry.action_ == *at)
      throw std::runtime_error("a tracker");
  });
  for (auto action : {TraceEntry::ALLOC, TraceEntry::FREE_REQUESTED, TraceEntry::FREE_COMPLETED}) {
    *at = action;
    bool has_thrown = false;
    try {
      back.raw_delete(back.raw_alloc(3 << 20));
    } catch (const std::runtime_error&) {
      has_thrown = true;
    }
    REQUIRE(has_thrown);
  }
  counts.reset();
  back.emptyCache({0, 0});
  const auto stats = back.getDeviceStats(0);
  REQUIRE(stats.allocated_bytes[0].current == 0 && stats.reserved_bytes[0].current == 0);
}

/* ---- snapshots and history ---- */

using c10::cuda::CUDACachingAllocator::RecordContext;
using c10::cuda::CUDACachingAllocator::SegmentInfo;

/* Each segment is its blocks, one after the other; in sum they are what is allocated and what is mapped. */
static std::vector<SegmentInfo> segments_of(Back& back, MempoolId_t id = {0, 0}) {
  std::vector<SegmentInfo> segments = vpmm_torch::segments_of_allocator(back, id, 0);
  size_t total = 0, allocated = 0, end = 0;
  for (const SegmentInfo& segment : segments) {
    size_t size = 0, active = 0;
    for (const auto& block : segment.blocks) {
      REQUIRE(block.size && block.allocated == block.active);
      size += block.size;
      active += block.active ? block.size : 0;
    }
    REQUIRE(size == segment.total_size && active == segment.active_size && active == segment.allocated_size);
    REQUIRE(segment.address >= end && segment.is_expandable);
    end = segment.address + segment.total_size;
    total += segment.total_size;
    allocated += segment.allocated_size;
  }
  auto stats = back.getDeviceStats(0);
  bool is_all = id == MempoolId_t{0, 0};
  REQUIRE(!is_all || (total == static_cast<size_t>(stats.reserved_bytes[0].current) &&
                      allocated == static_cast<size_t>(stats.allocated_bytes[0].current)));
  return segments;
}

static void shows_what_lives_and_what_is_free(Back& back) {
  back.emptyCache({0, 0});
  REQUIRE(segments_of(back).empty());
  c10::DataPtr small = back.allocate(1000), large = back.allocate(8 << 20), other = back.allocate(4 << 20);
  void* address = large.get();
  std::vector<SegmentInfo> segments = segments_of(back);
  REQUIRE(segments.size() == 3);
  bool found_small = false, found_large = false;
  for (const SegmentInfo& segment : segments) {
    const auto& block = segment.blocks.front();
    found_small = found_small || (segment.address == reinterpret_cast<size_t>(small.get()) && !segment.is_large &&
                                  block.size == 1024 && block.requested_size == 1000 && segment.blocks.size() == 2);
    found_large = found_large || (segment.address == reinterpret_cast<size_t>(address) && segment.is_large &&
                                  block.size == 8 << 20 && segment.blocks.size() == 1);
  }
  REQUIRE(found_small && found_large);
  large.clear();
  segments = segments_of(back);
  REQUIRE(segments.size() == 3);
  for (const SegmentInfo& segment : segments)
    REQUIRE((segment.address == reinterpret_cast<size_t>(address)) == (segment.active_size == 0));
  small.clear();
  other.clear();
  back.emptyCache({0, 0});
  REQUIRE(segments_of(back).empty());
}

/* A page that is cut is a segment, and several are one where a piece lies in two. */
static void shows_pages_that_are_cut(Back& back) {
  std::vector<c10::DataPtr> pieces;
  for (int i = 0; i < 4; i++)
    pieces.push_back(back.allocate(1 << 20));
  std::vector<SegmentInfo> segments = segments_of(back);
  REQUIRE(segments.size() == 2 && segments[0].total_size == 2 << 20 && segments[1].total_size == 2 << 20);
  pieces.clear();
  back.emptyCache({0, 0});
  for (int i = 0; i < 3; i++)
    pieces.push_back(back.allocate(1200 << 10));
  size_t blocks = 0;
  for (const SegmentInfo& segment : segments_of(back))
    for (const auto& block : segment.blocks)
      blocks += block.active && block.size == 1200 << 10;
  REQUIRE(blocks == 3);
  pieces.clear();
  back.emptyCache({0, 0});
}

/* Of small pages: what is free beside a page that is cut, in the same two MiB, is of its segment, as in PyTorch's. */
static void shows_small_segments_of_two_mib(Back& back) {
  const MempoolId_t id{7, 41};
  setenv("VPMM_PAGE_SIZE", "256K", 1);
  back.createOrIncrefPool(0, id);
  c10::DataPtr small, large, more;
  {
    InPool in(back, id);
    small = back.allocate(16);
  }
  setenv("VPMM_PAGE_SIZE", "2M", 1); // as for the other cases
  std::vector<SegmentInfo> segments = segments_of(back, id);
  REQUIRE(segments.size() == 1 && segments[0].total_size == 2 << 20 && segments[0].allocated_size == 512);
  REQUIRE(!segments[0].is_large && segments[0].blocks.size() == 2);
  {
    InPool in(back, id);
    large = back.allocate(3 << 20);
    more = back.allocate(16);
  }
  size_t active = 0;
  for (const SegmentInfo& segment : segments_of(back, id)) {
    active += segment.active_size;
    bool has_large = segment.address == reinterpret_cast<size_t>(large.get());
    REQUIRE(has_large == (segment.active_size == 3 << 20));
    REQUIRE(!has_large || (segment.total_size == 3 << 20 && segment.blocks.size() == 1));
  }
  REQUIRE(active == (3 << 20) + 2 * 512);
  small.clear();
  large.clear();
  more.clear();
  back.releasePool(0, id);
  back.emptyCache({0, 0});
  REQUIRE(segments_of(back).empty());
}

/* What a private pool keeps is there when nothing of it lives, and what another stream has freed beside what lives. */
static void shows_the_free_memory_of_private_pools(Back& back) {
  const MempoolId_t one{7, 2}, other{7, 3};
  CUstream stream;
  DRIVE(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  back.createOrIncrefPool(0, one);
  back.createOrIncrefPool(0, other);
  {
    InPool in(back, one);
    back.allocate(16).clear();
  }
  back.emptyCache({0, 0});
  REQUIRE(segments_of(back, one).size() == 1 && segments_of(back, one)[0].active_size == 0);
  c10::DataPtr kept;
  {
    InPool in(back, other);
    kept = back.allocate(40960000);
    torch_set_current_stream(stream);
    back.allocate(40960000).clear();
    torch_set_current_stream(nullptr);
  }
  std::vector<SegmentInfo> segments = segments_of(back, other);
  REQUIRE(segments.size() == 2 && segments[0].owner_private_pool_id == other);
  REQUIRE(segments[0].active_size + segments[1].active_size == 40960000);
  REQUIRE(segments_of(back).size() == 3);
  kept.clear();
  back.releasePool(0, one);
  back.releasePool(0, other);
  back.emptyCache({0, 0});
  REQUIRE(segments_of(back).empty());
  DRIVE(cuStreamDestroy(stream));
}

/* But for what it says of snapshots: this takes one. */
static std::vector<TraceEntry> history_of(Back& back) {
  std::vector<TraceEntry> history = back.snapshot().device_traces.at(0);
  auto is_snapshot = [](const TraceEntry& entry) { return entry.action_ == TraceEntry::SNAPSHOT; };
  history.erase(std::remove_if(history.begin(), history.end(), is_snapshot), history.end());
  return history;
}

/* As far as history is recorded, what is inactive says what was freed in it last, and what lives what it is. */
static void shows_what_was_freed_last(Back& back) {
  c10::DataPtr kept = back.allocate(1000);
  record_history(back, 1000);
  for (size_t bytes : {5000, 7000})
    back.allocate(bytes).clear();
  auto freed_last = [&] {
    std::vector<SegmentInfo> segments = back.snapshot().segments;
    REQUIRE(segments.size() == 1 && segments[0].blocks.size() >= 2);
    size_t last = 0, lives = 0;
    for (const auto& block : segments[0].blocks)
      if (block.active)
        lives += block.requested_size;
      else
        last = std::max(last, block.requested_size);
    REQUIRE(lives == segments[0].requested_size);
    return last;
  };
  REQUIRE(freed_last() == 7000);
  back.allocate(9000).clear();
  REQUIRE(freed_last() == 9000);
  c10::DataPtr again = back.allocate(8900); // where the last one was
  (void)freed_last();
  again.clear();
  record_history(back, 0);
  REQUIRE(freed_last() == 0);
  kept.clear();
  back.emptyCache({0, 0});
}

/* The clock of this test says of each moment that it is now. */
static void times_are_microseconds(Back& back) {
  record_history(back, 10);
  back.allocate(1000).clear();
  back.recordAnnotation({{"name", "this"}});
  const auto before = c10::getTime() / 1000;
  const auto said = back.snapshot();
  const auto after = c10::getTime() / 1000;
  REQUIRE(!said.device_traces.at(0).empty() && !said.external_annotations.empty());
  for (const TraceEntry& entry : said.device_traces.at(0))
    REQUIRE(before <= entry.time_.t_ && entry.time_.t_ <= after);
  for (const auto& annotation : said.external_annotations)
    REQUIRE(before <= annotation.time_.t_ && annotation.time_.t_ <= after);
  record_history(back, 0);
  back.emptyCache({0, 0});
}

static void keeps_annotations_while_it_records(Back& back) {
  back.recordAnnotation({{"name", "before"}});
  record_history(back, 2);
  for (const char* name : {"first", "second", "third"})
    back.recordAnnotation({{"name", name}});
  auto said = back.snapshot().external_annotations;
  REQUIRE(said.size() == 2 && said[0].metadata_.at("name") == "second" && said[1].metadata_.at("name") == "third");
  record_history(back, 0);
  REQUIRE(back.snapshot().external_annotations.empty());
}

/* A later snapshot's history says how much was live at this one. */
static void records_snapshots(Back& back) {
  c10::DataPtr memory = back.allocate(1000);
  record_history(back, 10);
  REQUIRE(back.snapshot().device_traces.at(0).empty());
  std::vector<TraceEntry> history = back.snapshot().device_traces.at(0);
  REQUIRE(history.size() == 1 && history[0].action_ == TraceEntry::SNAPSHOT && history[0].size_ == 1024);
  record_history(back, 0);
  memory.clear();
  back.emptyCache({0, 0});
}

/* A free has the stack that it is given, else its allocation's. */
static void frees_have_contexts(Back& back) {
  for (auto when : {RecordContext::ALLOC, RecordContext::ALL}) {
    record_contexts(back, when);
    back.allocate(1000).clear();
    std::vector<TraceEntry> history = history_of(back);
    REQUIRE(history.size() >= 3);
    for (auto entry = history.end() - 3; entry != history.end(); ++entry)
      REQUIRE(entry->context_);
    REQUIRE((history.end()[-1].context_ == history.end()[-3].context_) == (when == RecordContext::ALLOC));
    record_history(back, 0);
    back.emptyCache({0, 0});
  }
}

/* As memory_viz does it: back from what is mapped in the end, all of one stream. */
static void replay_backwards(const std::vector<SegmentInfo>& segments, const std::vector<TraceEntry>& history,
                             size_t mapped_before) {
  std::map<size_t, size_t> mapped; // where each begins, and ends
  auto add = [&](size_t begin, size_t end) {
    auto next = mapped.lower_bound(begin);
    if (next != mapped.end() && next->first == end) {
      end = next->second;
      next = mapped.erase(next);
    }
    if (next != mapped.begin() && std::prev(next)->second == begin)
      std::prev(next)->second = end;
    else
      mapped.emplace(begin, end);
  };
  for (const SegmentInfo& segment : segments) {
    REQUIRE(!segment.stream && (mapped.empty() || mapped.rbegin()->second < segment.address));
    mapped.emplace(segment.address, segment.address + segment.total_size);
  }
  for (auto entry = history.rbegin(); entry != history.rend(); ++entry) {
    size_t begin = entry->addr_, end = begin + entry->size_;
    if (entry->action_ == TraceEntry::SEGMENT_UNMAP)
      add(begin, end);
    if (entry->action_ != TraceEntry::SEGMENT_MAP)
      continue;
    auto in = mapped.upper_bound(begin);
    REQUIRE(!entry->stream_ && in != mapped.begin() && std::prev(in)->second >= end);
    auto [first, last] = *--in;
    mapped.erase(in);
    if (first < begin)
      mapped.emplace(first, begin);
    if (end < last)
      mapped.emplace(end, last);
  }
  size_t left = 0;
  for (auto [begin, end] : mapped)
    left += end - begin;
  REQUIRE(left == mapped_before);
}

static void can_be_replayed_backwards(Back& back) {
  CUstream stream;
  DRIVE(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  c10::DataPtr earlier = back.allocate(6 << 20);
  record_history(back, 1000);
  std::vector<c10::DataPtr> kept;
  for (size_t pages : {12, 3, 7, 1, 20, 5}) {
    torch_set_current_stream(pages % 2 ? stream : nullptr);
    kept.push_back(back.allocate(pages << 21));
    back.allocate((pages << 21) + 5000).clear();
    kept.push_back(back.allocate(pages * 1000));
  }
  torch_set_current_stream(nullptr);
  kept.erase(kept.begin() + 3, kept.begin() + 6);
  back.emptyCache({0, 0});
  auto said = back.snapshot();
  replay_backwards(said.segments, said.device_traces.at(0), 6 << 20);
  kept.clear();
  earlier.clear();
  back.emptyCache({0, 0});
  record_history(back, 0);
  DRIVE(cuStreamDestroy(stream));
}

/* What is mapped and unmapped while history is recorded, and no more than that. */
static void records_what_is_mapped(Back& back) {
  const MempoolId_t id{7, 4};
  c10::DataPtr earlier = back.allocate(6 << 20);
  record_history(back, 1000);
  REQUIRE(history_of(back).empty());
  c10::DataPtr memory = back.allocate(8 << 20);
  std::vector<TraceEntry> history = history_of(back);
  REQUIRE(history.size() == 2 && history[0].action_ == TraceEntry::SEGMENT_MAP && history[0].size_ == 8 << 20);
  REQUIRE(history[1].action_ == TraceEntry::ALLOC && history[1].addr_ == history[0].addr_);
  memory.clear();
  back.allocate(8 << 20).clear(); // of what is mapped by now
  REQUIRE(history_of(back).size() == 2 + 2 + 3);
  back.emptyCache({0, 0});
  history = history_of(back);
  REQUIRE(history.size() == 2 + 2 + 3 + 1 && history.back().action_ == TraceEntry::SEGMENT_UNMAP);
  REQUIRE(history.back().addr_ == history[0].addr_ && history.back().size_ == 8 << 20);
  earlier.clear();
  back.createOrIncrefPool(0, id);
  {
    InPool in(back, id);
    back.allocate(4 << 20).clear();
  }
  back.releasePool(0, id);
  back.emptyCache({0, 0});
  size_t mapped = 6 << 20;
  history = history_of(back);
  for (const TraceEntry& entry : history)
    mapped += entry.action_ == TraceEntry::SEGMENT_MAP     ? entry.size_
              : entry.action_ == TraceEntry::SEGMENT_UNMAP ? -entry.size_
                                                           : 0;
  REQUIRE(mapped == 0 && history_of(back).back().mempool_ == id);
  record_history(back, 0);
}

/* ---- graph_capture_record_stream_reuse ---- */

/* A capture on the first of some streams, which all of its requests name. */
struct Capture {
  Back& back;
  std::vector<CUstream> stream;
  const MempoolId_t id{7, 1};

  Capture(Back& back, size_t streams, bool reuse) : back(back), stream(streams) {
    for (CUstream& one : stream)
      DRIVE(cuStreamCreate(&one, CU_STREAM_NON_BLOCKING));
    set_reuse_in_captures(reuse);
    back.beginAllocateToPool(0, id, [](cudaStream_t) { return true; });
    capture_begin(stream[0], CU_STREAM_CAPTURE_MODE_GLOBAL);
  }

  ~Capture() {
    capture_end(stream[0]);
    back.endAllocateToPool(0, id);
    back.releasePool(0, id);
    set_reuse_in_captures(false);
    torch_set_current_stream(nullptr);
    for (CUstream one : stream) {
      DRIVE(cuStreamSynchronize(one));
      DRIVE(cuStreamDestroy(one));
    }
    back.emptyCache({0, 0});
  }

  c10::DataPtr allocate(size_t on) {
    torch_set_current_stream(stream[on]);
    c10::DataPtr memory = back.allocate(32);
    work(memory, on);
    return memory;
  }

  void work(const c10::DataPtr& memory, size_t on) {
    capture_work(stream[on], reinterpret_cast<CUdeviceptr>(memory.get()), 32);
  }

  void wait(size_t waits, size_t on) {
    capture_wait(stream[waits], stream[on]);
  }

  /* On a further stream, which record_stream tells of. */
  void use(const c10::DataPtr& memory, size_t on) {
    wait(on, 0);
    work(memory, on);
    back.recordStream(memory, torch_stream(stream[on]));
  }
};

static bool reuses_in_captures() {
  return vpmm_torch::reuses_in_captures<c10::cuda::CUDACachingAllocator::CUDAAllocatorConfig>(0);
}

/* Whether this PyTorch has the setting. */
static bool has_reuse_in_captures() {
  bool has = set_reuse_in_captures(true);
  set_reuse_in_captures(false);
  return has;
}

static void reuses_what_has_joined(Back& back, bool reuse) {
  if (reuse && !has_reuse_in_captures())
    return;
  Capture capture(back, 2, reuse);
  c10::DataPtr sink = capture.allocate(0), used = capture.allocate(0);
  void* address = used.get();
  capture.use(used, 1);
  used.clear();
  c10::DataPtr before = capture.allocate(0);
  capture.wait(0, 1);
  capture.work(sink, 0);
  c10::DataPtr after = capture.allocate(0);
  REQUIRE(before.get() != address && (after.get() == address) == reuse);
}

/* Each of three further streams has to have joined, some by way of another. */
static void waits_for_all_to_join(Back& back) {
  if (!has_reuse_in_captures())
    return;
  Capture capture(back, 4, true);
  c10::DataPtr sink = capture.allocate(0), used = capture.allocate(0);
  void* address = used.get();
  for (size_t on : {1, 2, 3})
    capture.use(used, on);
  used.clear();
  capture.wait(0, 1);
  c10::DataPtr first = capture.allocate(0);
  capture.wait(2, 3);
  c10::DataPtr second = capture.allocate(0), elsewhere = capture.allocate(2);
  capture.wait(0, 2);
  c10::DataPtr third = capture.allocate(0);
  REQUIRE(first.get() != address && second.get() != address && elsewhere.get() != address);
  REQUIRE(third.get() == address);
}

/* What is known of a stream's graph is forgotten where its frontier no longer depends on it. */
static void sees_that_a_frontier_was_set_anew(Back& back) {
  if (!has_reuse_in_captures())
    return;
  Capture capture(back, 2, true);
  c10::DataPtr one = capture.allocate(0), other = capture.allocate(0);
  void *address = one.get(), *other_address = other.get();
  cudaGraphNode_t earlier = capture_last(capture.stream[0]);
  capture.use(one, 1);
  capture.use(other, 1);
  capture.wait(0, 1);
  one.clear();
  c10::DataPtr again = back.allocate(32); // of no work: the frontier is as it was
  REQUIRE(again.get() == address);
  other.clear();
  capture_set_frontier(capture.stream[0], earlier);
  c10::DataPtr last = capture.allocate(0);
  REQUIRE(last.get() != other_address);
  capture.wait(0, 1);
}

/* A capture that ends before they have joined keeps it no longer than their work. */
static void ends_with_the_capture(Back& back) {
  if (!has_reuse_in_captures())
    return;
  {
    Capture capture(back, 2, true);
    c10::DataPtr used = capture.allocate(0);
    capture.use(used, 1);
    used.clear();
    capture.wait(0, 1);
  }
  REQUIRE(back.getPoolUseCount(0, {7, 1}) == 0 && back.getDeviceStats(0).reserved_bytes[0].current == 0);
}

/* What the capturing streams have used is kept to the capture's end, and is asked about by few questions meanwhile. */
static void asks_little_within_a_capture(Back& back) {
  enum { MANY = 100 };
  Capture capture(back, 2, true);
  for (int i = 0; i < MANY; i++) {
    c10::DataPtr used = capture.allocate(0);
    capture.use(used, 1);
  }
  uint64_t asked = vpmm_sim_calls(simulated.sim, "cuStreamIsCapturing");
  for (int i = 0; i < MANY; i++)
    capture.allocate(0).clear();
  REQUIRE(vpmm_sim_calls(simulated.sim, "cuStreamIsCapturing") - asked < 10 * MANY); // of each: MANY * MANY
  capture.wait(0, 1);
}

/* ---- several devices ---- */

/*
 * A stream of the second device, which the test's thread works with while there is one, and which may use the first's
 * memory.
 */
struct PeerStream {
  CUstream stream = nullptr;

  explicit PeerStream(Back& back) {
    back.enablePeerAccess(1, 0);
    DRIVE(cuCtxPushCurrent(simulated.peer_context));
    DRIVE(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  }

  ~PeerStream() {
    CUcontext context;
    DRIVE(cuStreamSynchronize(stream));
    DRIVE(cuStreamDestroy(stream));
    DRIVE(cuCtxPopCurrent(&context));
  }

  void write(const void* memory) const {
    DRIVE(cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(memory), 1, 100, stream));
  }
};

/* Of pools that there are, and of those that come later. */
static void lets_a_peer_in(Back& back) {
  const MempoolId_t before{7, 10}, after{7, 11};
  back.createOrIncrefPool(0, before);
  c10::DataPtr in_main = back.allocate(5 << 20), in_before, in_after;
  std::shared_ptr<void> import = back.getIpcDevPtr(back.shareIpcHandle(in_main.get()).handle);
  {
    InPool in(back, before);
    in_before = back.allocate(5 << 20);
  }
  back.enablePeerAccess(1, 0);
  back.enablePeerAccess(1, 0);
  back.createOrIncrefPool(0, after);
  {
    InPool in(back, after);
    in_after = back.allocate(5 << 20);
  }
  std::shared_ptr<void> later = back.getIpcDevPtr(back.shareIpcHandle(in_after.get()).handle);
  for (const c10::DataPtr* memory : {&in_main, &in_before, &in_after})
    PeerStream(back).write(memory->get());
  PeerStream(back).write(import.get());
  PeerStream(back).write(later.get());
  REQUIRE(vpmm_sim_misuses(simulated.sim) == 0);
  for (c10::DataPtr* memory : {&in_main, &in_before, &in_after})
    memory->clear();
  back.releasePool(0, before);
  back.releasePool(0, after);
}

/* The memory is nobody's before the other device is done with it, and then it is free. */
static void waits_for_a_peer_s_stream(Back& back) {
  const size_t BYTES = 5 << 20;
  back.emptyCache({0, 0});
  c10::DataPtr used = back.allocate(BYTES);
  {
    PeerStream peer(back);
    peer.write(used.get());
    back.recordStream(used, torch_stream(peer.stream, 1));
    DRIVE(cuCtxPushCurrent(simulated.context));
    used.clear();
    for (int i = 0; i < 4; i++) { // a race, if it is the same memory
      c10::DataPtr other = back.allocate(BYTES);
      capture_work(nullptr, reinterpret_cast<CUdeviceptr>(other.get()), 100);
    }
    CUcontext context;
    DRIVE(cuCtxPopCurrent(&context));
  }
  back.emptyCache({0, 0});
  back.emptyCache({0, 0});
  REQUIRE(vpmm_sim_races(simulated.sim) == 0 && back.getDeviceStats(0).reserved_bytes[0].current == 0);
}

/* The cache is empty when what such a stream still used has been waited for, and is asked about by few questions. */
static void empties_what_a_peer_s_stream_uses(Back& back) {
  enum { MANY = 100 };
  Gate gate;
  PeerStream peer(back);
  gate.stand_before(peer.stream);
  DRIVE(cuCtxPushCurrent(simulated.context));
  for (int i = 0; i < MANY; i++) {
    c10::DataPtr used = back.allocate(5 << 20);
    back.recordStream(used, torch_stream(peer.stream, 1));
  }
  uint64_t asked = vpmm_sim_calls(simulated.sim, "cuEventQuery");
  for (int i = 0; i < MANY; i++)
    back.allocate(1000).clear();
  REQUIRE(vpmm_sim_calls(simulated.sim, "cuEventQuery") - asked <
          10 * MANY); // of those that wait each time: MANY * MANY
  std::thread opener([&] {
    usleep(20000);
    gate.is_open = true;
  });
  back.emptyCache({0, 0});
  REQUIRE(gate.is_open && !back.getDeviceStats(0).reserved_bytes[0].current);
  opener.join();
  CUcontext context;
  DRIVE(cuCtxPopCurrent(&context));
}

/* ---- sharing with other processes, of which this one plays both ---- */

static size_t open_files() {
  auto files = std::filesystem::directory_iterator("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(files), end(files)));
}

/* In a while: the thread at the door hangs up when it comes to it, also after what was before `files` were counted. */
static bool open_files_come_down_to(size_t files) {
  for (int i = 0; i < 1000 && open_files() > files; i++)
    usleep(5000);
  return open_files() <= files;
}

static CUdeviceptr inside(const std::shared_ptr<void>& import, ptrdiff_t offset) {
  return reinterpret_cast<CUdeviceptr>(import.get()) + static_cast<CUdeviceptr>(offset);
}

static unsigned char byte_at(CUdeviceptr address) {
  unsigned char byte = 0;
  DRIVE(cuMemcpyDtoH(&byte, address, 1));
  return byte;
}

/* Of a piece of a page, of a page, and of so many handles that one message does not carry them all. */
static void shares(Back& back, size_t bytes, bool is_private) {
  const MempoolId_t id{7, 12};
  back.emptyCache({0, 0});
  size_t used = vpmm_sim_used_bytes(simulated.sim);
  back.createOrIncrefPool(0, id);
  std::optional<InPool> in;
  if (is_private)
    in.emplace(back, id);
  c10::DataPtr before = back.allocate(300), memory = back.allocate(bytes);
  in.reset();
  const auto own = reinterpret_cast<CUdeviceptr>(memory.get());
  auto shared = back.shareIpcHandle(memory.get());
  size_t files = open_files();
  REQUIRE(back.shareIpcHandle(memory.get()).handle == shared.handle);
  std::shared_ptr<void> import = back.getIpcDevPtr(shared.handle);
  REQUIRE(open_files_come_down_to(files) && import.get() != memory.get());
  for (size_t byte : {size_t{0}, bytes - 1}) {
    DRIVE(cuMemsetD8(own + byte, 41, 1));
    REQUIRE(byte_at(inside(import, shared.offset) + byte) == 41);
    DRIVE(cuMemsetD8(inside(import, shared.offset) + byte, 42, 1));
    REQUIRE(byte_at(own + byte) == 42);
  }
  REQUIRE(back.getIpcDevPtr(shared.handle) == import); // one, while anybody has it
  memory.clear();
  REQUIRE(open_files() < files);
  REQUIRE(byte_at(inside(import, shared.offset)) == 42);
  uint64_t ranges = vpmm_sim_calls(simulated.sim, "cuMemAddressFree");
  import.reset();
  REQUIRE(vpmm_sim_calls(simulated.sim, "cuMemAddressFree") == ranges + 1);
  before.clear();
  back.releasePool(0, id);
  back.emptyCache({0, 0});
  REQUIRE(vpmm_sim_used_bytes(simulated.sim) == used);
}

static constexpr size_t PIECE = 500, PAGES = size_t{6} << 20, MANY_HANDLES = size_t{7} << 30;

static void shares_of_the_main_pool(Back& back, size_t bytes) {
  shares(back, bytes, false);
}

static void shares_of_a_private_pool(Back& back, size_t bytes) {
  shares(back, bytes, true);
}

/* What was sent to other processes, until they are done with it, which a callback of PyTorch's finds out. */
static c10::DataPtr in_limbo;

struct Limbo : c10::FreeMemoryCallback {
  bool Execute() override {
    in_limbo.clear();
    return true;
  }
};

namespace c10 {
REGISTER_FREE_MEMORY_CALLBACK("limbo", Limbo);
}

/* While anything is shared, a request looks for it now and then. */
static void collects_what_others_are_done_with(Back& back) {
  const int pause_us = 11000;
  in_limbo = back.allocate(300);
  usleep(pause_us);
  back.allocate(300).clear();
  REQUIRE(in_limbo);
  back.shareIpcHandle(in_limbo.get());
  back.allocate(300).clear();
  REQUIRE(!in_limbo);
}

static std::string refusal_to_import(Back& back, const std::string& handle) {
  try {
    back.getIpcDevPtr(handle);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "none";
}

static void refuses_what_is_no_more_shared(Back& back) {
  c10::DataPtr memory = back.allocate(6 << 20);
  std::string handle = back.shareIpcHandle(memory.get()).handle, cut = handle.substr(0, handle.size() - 1);
  REQUIRE(says(refusal_to_import(back, cut).c_str(), "was cut or changed"));
  for (const char* call : {"cuMemAddressReserve", "cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"}) {
    size_t files = open_files();
    vpmm_sim_fail(simulated.sim, call, 1, CUDA_ERROR_UNKNOWN, false);
    REQUIRE(says(refusal_to_import(back, handle).c_str(), call) && open_files_come_down_to(files));
  }
  REQUIRE(refusal_to_import(back, handle) == "none");
  memory.clear();
  REQUIRE(says(refusal_to_import(back, handle).c_str(), "has ended"));
  std::string elsewhere = handle;
  elsewhere[13]++; // its door is another's, or nobody's
  REQUIRE(refusal_to_import(back, elsewhere) != "none");
}

/* Where there is no memory left to wait by. */
static void lets_go_of_imports_on_a_full_device(Back& back) {
  c10::DataPtr memory = back.allocate(5 << 20);
  std::shared_ptr<void> import = back.getIpcDevPtr(back.shareIpcHandle(memory.get()).handle);
  CUdeviceptr rest = 0;
  DRIVE(cuMemAlloc(&rest, vpmm_sim_config_default().memory_bytes - vpmm_sim_used_bytes(simulated.sim)));
  uint64_t unmapped = vpmm_sim_calls(simulated.sim, "cuMemUnmap");
  beside_a_capture(back, [&] { import.reset(); }); // which goes on
  REQUIRE(vpmm_sim_calls(simulated.sim, "cuMemUnmap") > unmapped);
  DRIVE(cuMemFree(rest));
  memory.clear();
  back.emptyCache({0, 0});
}

static void shares_nothing_that_the_driver_refuses(Back& back) {
  c10::DataPtr memory = back.allocate(6 << 20);
  for (const char* call : {"cuMemGetAddressRange", "cuMemRetainAllocationHandle", "cuMemExportToShareableHandle"}) {
    size_t files = open_files();
    std::string why;
    vpmm_sim_fail(simulated.sim, call, 1, CUDA_ERROR_UNKNOWN, false);
    try {
      back.shareIpcHandle(memory.get());
    } catch (const std::exception& error) {
      why = error.what();
    }
    REQUIRE(says(why.c_str(), call) && open_files_come_down_to(files));
  }
}

/* A handle is exported once, whatever pieces of it are shared, and as long as one of them lives. */
static void shares_a_handle_by_one_file(Back& back) {
  std::vector<c10::DataPtr> pieces;
  std::set<std::string> handles;
  for (int i = 0; i < 100; i++)
    pieces.push_back(back.allocate(400));
  size_t files = open_files();
  for (const c10::DataPtr& piece : pieces)
    handles.insert(back.shareIpcHandle(piece.get()).handle);
  REQUIRE(handles.size() == pieces.size() && open_files() <= files + 1);
  std::string last = back.shareIpcHandle(pieces.back().get()).handle;
  pieces.erase(pieces.begin(), pieces.end() - 1);
  REQUIRE(refusal_to_import(back, last) == "none");
  std::string gone = *handles.begin() == last ? *handles.rbegin() : *handles.begin();
  REQUIRE(says(refusal_to_import(back, gone).c_str(), "has ended"));
  pieces.clear();
  REQUIRE(open_files_come_down_to(files));
}

/* Both are given the same, and nothing is left of what the slower one has made. */
static void shares_once_by_two_threads(Back& back) {
  size_t files = open_files();
  for (int i = 0; i < 200; i++) {
    c10::DataPtr memory = back.allocate(40 << 20);
    std::string handle[2];
    std::atomic<int> ready{0};
    auto share = [&](std::string& out) {
      DRIVE(cuCtxSetCurrent(simulated.context));
      for (ready++; ready < 2;) {
      }
      out = back.shareIpcHandle(memory.get()).handle;
    };
    std::thread other(share, std::ref(handle[1]));
    share(handle[0]);
    other.join();
    REQUIRE(handle[0] == handle[1] && !handle[0].empty());
  }
  REQUIRE(open_files_come_down_to(files));
}

/* ---- parking ---- */

/* Two tensors, of pages and of a piece, with bytes of their own. */
struct ParkedPool {
  static constexpr size_t BYTES[2] = {6 << 20, 100 << 10};
  Back& back;
  const MempoolId_t id{7, 6};
  c10::DataPtr memory[2];

  explicit ParkedPool(Back& back) : back(back) {
    back.emptyCache({0, 0});
    back.createOrIncrefPool(0, id);
    InPool in(back, id);
    for (int i = 0; i < 2; i++) {
      memory[i] = back.allocate(BYTES[i]);
      DRIVE(cuMemsetD8(at(i), static_cast<unsigned char>(40 + i), BYTES[i]));
    }
  }

  ~ParkedPool() {
    for (c10::DataPtr& one : memory)
      one.clear();
    back.releasePool(0, id);
    back.emptyCache({0, 0});
    REQUIRE(back.getPoolUseCount(0, id) == 0 && reserved() == 0);
  }

  CUdeviceptr at(int i) const {
    return reinterpret_cast<CUdeviceptr>(memory[i].get());
  }

  int64_t reserved() const {
    return back.getDeviceStats(0).reserved_bytes[0].current;
  }

  bool holds(int i) const {
    std::vector<unsigned char> bytes(BYTES[i]);
    DRIVE(cuMemcpyDtoH(bytes.data(), at(i), bytes.size()));
    return bytes == std::vector<unsigned char>(BYTES[i], static_cast<unsigned char>(40 + i));
  }

  bool is_refused(size_t bytes = 1) const {
    InPool in(back, id);
    try {
      back.allocate(bytes).clear();
    } catch (const std::exception& error) {
      return says(error.what(), "is parked");
    }
    return false;
  }
};

static void parks_and_wakes(Back& back, bool keep) {
  ParkedPool pool(back);
  auto before = back.getDeviceStats(0);
  REQUIRE(!vpmm_torch_park(7, 6, keep) && !vpmm_torch_park(7, 6, keep));
  auto parked = back.getDeviceStats(0);
  REQUIRE(parked.reserved_bytes[0].current == 0);
  REQUIRE(parked.allocated_bytes[0].current == before.allocated_bytes[0].current);
  REQUIRE(back.snapshot(pool.id).segments.size() == 2); // what lives, and nothing that is free
  REQUIRE(pool.is_refused());
  REQUIRE(!vpmm_torch_wake(7, 6) && !vpmm_torch_wake(7, 6));
  REQUIRE(pool.reserved() == before.reserved_bytes[0].current);
  REQUIRE(!keep || (pool.holds(0) && pool.holds(1)));
  REQUIRE(!pool.is_refused());
}

/* A wait for the context would end a capture that another thread has begun just before. */
static void keeps_without_a_wait_for_the_context(Back& back) {
  ParkedPool pool(back);
  auto waits = [] { return vpmm_sim_calls(simulated.sim, "cuCtxSynchronize"); };
  uint64_t before = waits();
  REQUIRE(!vpmm_torch_park(7, 6, true) && waits() == before);
  REQUIRE(!vpmm_torch_wake(7, 6));
}

/* Until the cache is emptied, which leaves alone what is kept. */
static void pins_the_hosts_memory_once(Back& back) {
  ParkedPool pool(back);
  auto pinned = [] { return vpmm_sim_calls(simulated.sim, "cuMemHostAlloc"); };
  auto freed = [] { return vpmm_sim_calls(simulated.sim, "cuMemFreeHost"); };
  uint64_t before = pinned(), before_freed = freed();
  for (int i = 0; i < 2; i++) {
    REQUIRE(!vpmm_torch_park(7, 6, true));
    back.emptyCache({0, 0});
    REQUIRE(!vpmm_torch_wake(7, 6) && pool.holds(0) && pool.holds(1));
  }
  REQUIRE(pinned() == before + 1 && freed() == before_freed);
  back.emptyCache(pool.id);
  REQUIRE(freed() == before_freed + 1);
  REQUIRE(!vpmm_torch_park(7, 6, true));
  REQUIRE(!vpmm_torch_wake(7, 6) && pool.holds(0) && pool.holds(1) && pinned() == before + 2);
}

/* By other handles, which are what is shared from then on. */
static void shares_what_is_awake_again(Back& back) {
  ParkedPool pool(back);
  auto shared = back.shareIpcHandle(pool.memory[0].get());
  vpmm_sim_fail(simulated.sim, "cuMemFree", 1, CUDA_ERROR_UNKNOWN, false);
  REQUIRE(vpmm_torch_park(7, 6, false)); // the device cannot be waited for: all is as it was
  REQUIRE(refusal_to_import(back, shared.handle) == "none");
  REQUIRE(!vpmm_torch_park(7, 6, true));
  std::string why;
  try {
    back.shareIpcHandle(pool.memory[0].get());
  } catch (const std::exception& error) {
    why = error.what();
  }
  REQUIRE(says(why.c_str(), "is parked") && says(refusal_to_import(back, shared.handle).c_str(), "has ended"));
  REQUIRE(!vpmm_torch_wake(7, 6));
  auto again = back.shareIpcHandle(pool.memory[0].get());
  REQUIRE(again.handle != shared.handle);
  REQUIRE(byte_at(inside(back.getIpcDevPtr(again.handle), again.offset)) == 40);
}

static void wakes_what_was_freed_in_part(Back& back) {
  ParkedPool pool(back);
  REQUIRE(!vpmm_torch_park(7, 6, true));
  pool.memory[0].clear();
  REQUIRE(!vpmm_torch_wake(7, 6) && pool.holds(1));
}

enum class Memory { LIVE, FREED, SHELVED };

/* Streams of a device that PyTorch has let in use it until their work has ended, whatever the memory is by then. */
static void parks_behind_another_device_s_stream(Back& back, Memory memory) {
  ParkedPool pool(back);
  auto checkpoint = memory == Memory::SHELVED ? back.getCheckpointState(0, pool.id) : nullptr;
  DRIVE(cuCtxSynchronize()); // what was written there comes before
  Gate gate;
  PeerStream peer(back);
  gate.stand_before(peer.stream);
  peer.write(pool.memory[0].get());
  back.recordStream(pool.memory[0], torch_stream(peer.stream, 1));
  DRIVE(cuCtxPushCurrent(simulated.context));
  if (memory != Memory::LIVE)
    pool.memory[0].clear();
  std::thread opener([&] {
    usleep(20000);
    gate.is_open = true;
  });
  REQUIRE(!vpmm_torch_park(7, 6, false));
  REQUIRE(gate.is_open && vpmm_sim_races(simulated.sim) == 0);
  opener.join();
  REQUIRE(!vpmm_torch_wake(7, 6));
  checkpoint.reset(); // while there is the stream, as the next
  pool.memory[0].clear();
  CUcontext context;
  DRIVE(cuCtxPopCurrent(&context));
}

/* A pool with what a checkpoint may ask back ends likewise. */
static void ends_behind_another_device_s_stream(Back& back) {
  const MempoolId_t id{7, 33};
  back.createOrIncrefPool(0, id);
  Gate gate;
  PeerStream peer(back);
  DRIVE(cuCtxPushCurrent(simulated.context));
  std::shared_ptr<c10::cuda::CUDACachingAllocator::AllocatorState> checkpoint; // kept to the pool's end
  {
    InPool in(back, id);
    c10::DataPtr used = back.allocate(64 << 20);
    checkpoint = back.getCheckpointState(0, id);
    DRIVE(cuCtxSynchronize());
    gate.stand_before(peer.stream);
    back.recordStream(used, torch_stream(peer.stream, 1));
  }
  std::thread opener([&] {
    usleep(20000);
    gate.is_open = true;
  });
  back.releasePool(0, id);
  back.emptyCache({0, 0});
  REQUIRE(gate.is_open && !back.getDeviceStats(0).reserved_bytes[0].current);
  opener.join();
  CUcontext context;
  DRIVE(cuCtxPopCurrent(&context));
}

/* A capture of that stream by another thread is none of the pool's. */
static void parks_beside_another_device_s_capture(Back& back) {
  ParkedPool pool(back);
  DRIVE(cuCtxSynchronize());
  Gate gate;
  PeerStream peer(back);
  gate.stand_before(peer.stream);
  peer.write(pool.memory[0].get());
  back.recordStream(pool.memory[0], torch_stream(peer.stream, 1));
  std::atomic<bool> captures{false}, parked{false};
  std::thread capturer([&] {
    CUgraph graph = nullptr;
    DRIVE(cuCtxSetCurrent(simulated.peer_context));
    DRIVE(cuStreamBeginCapture(peer.stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    captures = true;
    while (!parked)
      usleep(1000);
    DRIVE(cuStreamEndCapture(peer.stream, &graph));
    DRIVE(cuGraphDestroy(graph));
  });
  while (!captures)
    usleep(1000);
  DRIVE(cuCtxPushCurrent(simulated.context));
  std::thread opener([&] {
    usleep(20000);
    gate.is_open = true;
  });
  REQUIRE(!vpmm_torch_park(7, 6, false));
  REQUIRE(gate.is_open);
  opener.join();
  parked = true;
  capturer.join();
  REQUIRE(!vpmm_torch_wake(7, 6));
  pool.memory[0].clear();
  CUcontext context;
  DRIVE(cuCtxPopCurrent(&context));
}

/* Another thread's, of a stream of its own, of this device as PyTorch captures, or of the peer as a program does. */
class OtherCapture {
 public:
  OtherCapture(Back& back, bool is_peers) : thread_([this, &back, is_peers] { capture(back, is_peers); }) {
    while (!has_begun_)
      usleep(500);
  }

  ~OtherCapture() {
    is_over_ = true;
    thread_.join();
  }

 private:
  void capture(Back& back, bool is_peers) {
    CUstream stream = nullptr;
    CUgraph graph = nullptr;
    DRIVE(cuCtxSetCurrent(is_peers ? simulated.peer_context : simulated.context));
    DRIVE(cuStreamCreate(&stream,
                         is_peers ? CU_STREAM_DEFAULT : CU_STREAM_NON_BLOCKING)); // the default stream waits for it
    std::optional<InPool> in;
    if (!is_peers)
      in.emplace(back, MempoolId_t{7, 41});
    DRIVE(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    has_begun_ = true;
    while (!is_over_)
      usleep(500);
    DRIVE(cuStreamEndCapture(stream, &graph));
    DRIVE(cuGraphDestroy(graph));
    in.reset();
    DRIVE(cuStreamDestroy(stream));
  }

  std::atomic<bool> has_begun_{false}, is_over_{false};
  std::thread thread_;
};

/* A pool whose memory a peer's stream uses behind a gate, which opens in a while. */
struct UsedByPeer {
  ParkedPool pool;
  Gate gate;
  PeerStream peer;
  std::thread opener;

  UsedByPeer(Back& back, bool by_default_stream) : pool(back), peer(back) {
    CUstream stream = by_default_stream ? nullptr : peer.stream;
    DRIVE(cuCtxPushCurrent(simulated.context));
    DRIVE(cuCtxSynchronize());
    DRIVE(cuCtxPopCurrent(&context));
    gate.stand_before(stream);
    DRIVE(cuMemsetD8Async(pool.at(0), 1, 100, stream));
    back.recordStream(pool.memory[0], torch_stream(stream, 1));
    DRIVE(cuCtxPushCurrent(simulated.context));
  }

  void park() {
    opener = std::thread([&] {
      usleep(20000);
      gate.is_open = true;
    });
    REQUIRE(!vpmm_torch_park(7, 6, false));
    REQUIRE(gate.is_open && vpmm_sim_races(simulated.sim) == 0);
  }

  ~UsedByPeer() {
    opener.join();
    REQUIRE(!vpmm_torch_wake(7, 6));
    pool.memory[0].clear();
    DRIVE(cuCtxPopCurrent(&context));
  }

 private:
  CUcontext context;
};

/* No event can be recorded at the free, as another thread captures. */
static void parks_what_was_freed_beside_a_capture(Back& back) {
  UsedByPeer used(back, false);
  OtherCapture other(back, false);
  used.pool.memory[0].clear();
  used.park();
}

/* The default stream cannot be asked whether it captures while a stream does that it waits for. */
static void parks_beside_a_capture_that_the_default_stream_waits_for(Back& back) {
  UsedByPeer used(back, true);
  OtherCapture other(back, true);
  used.park();
}

/* Another thread has what waits in hand at most times. */
static void parks_beside_who_looks_through_the_frees(Back& back) {
  UsedByPeer used(back, false);
  used.pool.memory[0].clear();
  std::atomic<bool> is_over{false};
  std::thread walker([&] {
    DRIVE(cuCtxSetCurrent(simulated.context));
    while (!is_over)
      back.allocate(1000).clear();
  });
  used.park();
  is_over = true;
  walker.join();
}

/* Another thread has what waits in hand, as it empties the cache. */
static void parks_beside_who_has_the_frees(Back& back) {
  UsedByPeer used(back, false);
  used.pool.memory[0].clear();
  std::thread emptier([&] {
    DRIVE(cuCtxSetCurrent(simulated.context));
    back.emptyCache({0, 0});
  });
  usleep(20000);
  used.park();
  emptier.join();
}

/* Two threads park it while a third has a free of the main pool in hand: both wait for the peer. */
static void parks_by_two_threads(Back& back) {
  UsedByPeer used(back, false);
  Gate other_gate;
  PeerStream other_peer(back);
  other_gate.stand_before(other_peer.stream);
  DRIVE(cuCtxPushCurrent(simulated.context));
  {
    c10::DataPtr in_main = back.allocate(5 << 20);
    back.recordStream(in_main, torch_stream(other_peer.stream, 1));
  }
  auto on_device = [&](auto call) {
    return std::thread([call] {
      DRIVE(cuCtxSetCurrent(simulated.context));
      call();
    });
  };
  std::thread emptier = on_device([&] { back.emptyCache({0, 0}); });
  usleep(20000);
  used.pool.memory[0].clear();
  std::atomic<int> early{0};
  auto park = [&] {
    REQUIRE(!vpmm_torch_park(7, 6, false));
    early += !used.gate.is_open;
  };
  std::thread one = on_device(park), other = on_device(park);
  usleep(20000);
  used.opener = std::thread([&] {
    other_gate.is_open = true;
    usleep(50000);
    used.gate.is_open = true;
  });
  for (std::thread* thread : {&emptier, &one, &other})
    thread->join();
  REQUIRE(early == 0 && vpmm_sim_races(simulated.sim) == 0);
  CUcontext context;
  DRIVE(cuCtxPopCurrent(&context));
}

/* Another thread is about to free: it tells of that first. */
static void parks_beside_a_free(Back& back) {
  UsedByPeer used(back, false);
  std::atomic<bool> is_freeing{false}, is_parked{false};
  auto counts = std::make_shared<bool>(true);
  back.attachAllocatorTraceTracker([&, is_on = std::weak_ptr<bool>(counts)](const TraceEntry& entry) {
    if (is_on.expired() || entry.action_ != TraceEntry::FREE_REQUESTED)
      return;
    is_freeing = true;
    while (!used.gate.is_open && !is_parked)
      usleep(1000);
  });
  std::thread freer([&] {
    DRIVE(cuCtxSetCurrent(simulated.context));
    used.pool.memory[0].clear();
  });
  while (!is_freeing)
    usleep(1000);
  used.park();
  is_parked = true;
  freer.join();
}

/* What is freed and still in use is waited for before a wake fails, as before a request does. */
static void wakes_behind_another_device_s_stream(Back& back) {
  ParkedPool pool(back);
  REQUIRE(!vpmm_torch_park(7, 6, true));
  Gate gate;
  PeerStream peer(back);
  gate.stand_before(peer.stream);
  DRIVE(cuCtxPushCurrent(simulated.context));
  const size_t most = vpmm_sim_config_default().memory_bytes - vpmm_sim_used_bytes(simulated.sim);
  {
    c10::DataPtr used = back.allocate(most - (6 << 20)); // there is too little besides
    back.recordStream(used, torch_stream(peer.stream, 1));
  }
  std::thread opener([&] {
    usleep(20000);
    gate.is_open = true;
  });
  REQUIRE(!vpmm_torch_wake(7, 6));
  REQUIRE(pool.holds(0) && pool.holds(1));
  opener.join();
  CUcontext context;
  DRIVE(cuCtxPopCurrent(&context));
}

/* What one thread waits for as it empties the cache another one's request waits for, too. */
static void asks_beside_who_empties_the_cache(Back& back) {
  const size_t most = vpmm_sim_config_default().memory_bytes / 4 * 3;
  back.emptyCache({0, 0});
  Gate gate;
  PeerStream peer(back);
  gate.stand_before(peer.stream);
  DRIVE(cuCtxPushCurrent(simulated.context));
  {
    c10::DataPtr used = back.allocate(most);
    back.recordStream(used, torch_stream(peer.stream, 1));
  }
  std::thread opener([&] {
    usleep(300000); // more than a request's patience with those that have frees in hand
    gate.is_open = true;
  });
  std::thread emptier([&] {
    DRIVE(cuCtxSetCurrent(simulated.context));
    back.emptyCache({0, 0});
  });
  usleep(20000);
  back.allocate(most).clear();
  emptier.join();
  opener.join();
  back.emptyCache({0, 0});
  CUcontext context;
  DRIVE(cuCtxPopCurrent(&context));
}

/* With what is kept, which goes with it. */
static void ends_while_parked(Back& back) {
  ParkedPool pool(back);
  REQUIRE(!vpmm_torch_park(7, 6, true));
}

static void parks_no_other_pools(Back& back) {
  REQUIRE(says(vpmm_torch_park(7, 99, false), "there is no memory pool (7, 99)"));
  REQUIRE(says(vpmm_torch_wake(0, 0), "there is no memory pool (0, 0)"));
  ParkedPool pool(back);
  InPool in(back, pool.id);
  REQUIRE(says(vpmm_torch_park(7, 6, true), "use_mem_pool"));
}

/* What it has given to a request from outside is not the park's to take. */
static void parks_no_pool_that_helps_out(Back& back) {
  const size_t most = vpmm_sim_config_default().memory_bytes / 4 * 3;
  ParkedPool pool(back);
  {
    InPool in(back, pool.id);
    back.allocate(most).clear();
  }
  use_on_oom(back, pool.id, 0);
  c10::DataPtr helped = back.allocate(most);
  for (bool keep : {false, true})
    REQUIRE(says(vpmm_torch_park(7, 6, keep), "helps out (use_on_oom)"));
  capture_work(nullptr, reinterpret_cast<CUdeviceptr>(helped.get()), 100);
  helped.clear();
  REQUIRE(!vpmm_torch_park(7, 6, true) && !vpmm_torch_wake(7, 6));
  REQUIRE(pool.holds(0) && pool.holds(1));
}

/* By who observes the shortage, for one. */
static void parks_a_pool_that_could_not_help_out(Back& back) {
  const size_t more = size_t{32} << 30; // than there is
  ParkedPool pool(back);
  use_on_oom(back, pool.id, 0);
  auto counts = std::make_shared<int>(0);
  back.attachOutOfMemoryObserver([parks = std::weak_ptr<int>(counts)](int64_t, size_t, size_t, size_t) {
    if (auto parked = parks.lock())
      *parked += !vpmm_torch_park(7, 6, true);
  });
  refusal_of(back, more);
  REQUIRE(*counts == 1);
  REQUIRE(!vpmm_torch_wake(7, 6) && pool.holds(0) && pool.holds(1));
}

/* A checkpoint's addresses are given to nobody, and not back to it. */
static void keeps_what_is_shelved(Back& back) {
  ParkedPool pool(back);
  void* address = pool.memory[0].get();
  auto checkpoint = back.getCheckpointState(0, pool.id);
  pool.memory[0].clear();
  REQUIRE(!vpmm_torch_park(7, 6, false));
  REQUIRE(pool.is_refused(ParkedPool::BYTES[0]));
  std::string why;
  try {
    back.setCheckpointPoolState(0, checkpoint);
  } catch (const std::exception& error) {
    why = error.what();
  }
  REQUIRE(says(why.c_str(), "is parked"));
  REQUIRE(!vpmm_torch_wake(7, 6));
  InPool in(back, pool.id);
  REQUIRE(back.allocate(ParkedPool::BYTES[0]).get() == address);
}

/* The main pool's free memory goes first. */
static void wakes_where_memory_is_short(Back& back) {
  ParkedPool pool(back);
  REQUIRE(!vpmm_torch_park(7, 6, true));
  size_t left = vpmm_sim_config_default().memory_bytes - vpmm_sim_used_bytes(simulated.sim) - (16 << 20);
  c10::DataPtr most = back.allocate(left);
  most.clear();
  CUdeviceptr others = 0;
  DRIVE(cuMemAlloc(&others, 14 << 20));
  REQUIRE(!vpmm_torch_wake(7, 6) && pool.holds(0));
  REQUIRE(!vpmm_torch_park(7, 6, true));
  most = back.allocate(left);
  REQUIRE(says(vpmm_torch_wake(7, 6), "CUDA out of memory. vpmm: "));
  REQUIRE(pool.is_refused());
  most.clear();
  REQUIRE(!vpmm_torch_wake(7, 6) && pool.holds(0) && pool.holds(1));
  DRIVE(cuMemFree(others));
}

/* A pool that nobody needs any more gives its memory to who wakes. */
static void wakes_beside_an_idle_pool(Back& back) {
  const MempoolId_t id{7, 23}, idle{7, 24};
  const size_t memory = vpmm_sim_config_default().memory_bytes;
  c10::DataPtr inner;
  back.emptyCache({0, 0});
  back.createOrIncrefPool(0, id);
  {
    InPool in(back, id);
    inner = back.allocate(memory / 8 * 3);
  }
  REQUIRE(!vpmm_torch_park(7, 23, false));
  back.createOrIncrefPool(0, idle);
  {
    InPool in(back, idle);
    back.allocate(memory / 4 * 3).clear();
  }
  back.releasePool(0, idle);
  REQUIRE(!vpmm_torch_wake(7, 23));
  inner.clear();
  back.releasePool(0, id);
  back.emptyCache({0, 0});
}

/* ---- all of them ---- */

struct Case {
  const char* name;
  void (*run)(Back&);
};

#define CASE(name) \
  { #name, name }
#define CASE_OF(name, value)                                 \
  {                                                          \
#name ":" #value, [](Back & back) { name(back, value); } \
  }

static const Case CASES[] = {
    CASE(refuses),
    CASE(counts_blocks),
    CASE(counts_what_the_driver_gave),
    CASE(rounds_up_as_the_settings_say),
    CASE(keeps_to_the_memory_fraction),
    CASE(asks_by_threads_under_a_memory_fraction),
    CASE(may_be_disabled),
    CASE(frees_after_a_capture_that_failed),
    CASE(frees_after_a_thread_that_was_to_capture),
    CASE(takes_what_other_pools_leave),
    CASE(says_why_the_pool_has_no_memory),
    CASE(tells_the_profiler_before_observers),
    CASE(keeps_a_pool_that_is_released_too_often),
    CASE_OF(waits_for_further_streams, false),
    CASE_OF(waits_for_further_streams, true),
    CASE(waits_for_who_takes_the_frees),
    CASE(waits_for_a_lent_pool_s_memory),
    CASE(waits_for_the_main_pool_s_further_streams),
    CASE(empties_beside_who_empties),
    CASE(takes_what_lent_pools_leave),
    CASE(empties_what_further_streams_use),
    CASE(counts_pools_that_have_ended),
    CASE(refuses_another_device_s_stream),
    CASE(waits_for_a_pool_that_ends),
    CASE(ends_pools_beside_who_looks),
    CASE(ends_a_pool_that_could_not_end),
    CASE(waits_for_the_main_pool_s_work),
    CASE(leaves_captures_of_others_alone),
    CASE(asks_seldom_for_what_waits),
    CASE(records_frees_at_a_thread_s_end),
    CASE(tells_trackers_of_no_mappings),
    CASE(trackers_may_allocate),
    CASE(trackers_may_throw),
    CASE(shows_what_lives_and_what_is_free),
    CASE(shows_pages_that_are_cut),
    CASE(shows_small_segments_of_two_mib),
    CASE(shows_the_free_memory_of_private_pools),
    CASE(shows_what_was_freed_last),
    CASE(times_are_microseconds),
    CASE(keeps_annotations_while_it_records),
    CASE(records_what_is_mapped),
    CASE(records_snapshots),
    CASE(frees_have_contexts),
    CASE(can_be_replayed_backwards),
    CASE_OF(reuses_what_has_joined, false),
    CASE_OF(reuses_what_has_joined, true),
    CASE(waits_for_all_to_join),
    CASE(sees_that_a_frontier_was_set_anew),
    CASE(ends_with_the_capture),
    CASE(asks_little_within_a_capture),
    CASE_OF(shares_of_the_main_pool, PIECE),
    CASE_OF(shares_of_a_private_pool, PIECE),
    CASE_OF(shares_of_the_main_pool, PAGES),
    CASE_OF(shares_of_a_private_pool, PAGES),
    CASE_OF(shares_of_the_main_pool, MANY_HANDLES),
    CASE_OF(shares_of_a_private_pool, MANY_HANDLES),
    CASE(collects_what_others_are_done_with),
    CASE(refuses_what_is_no_more_shared),
    CASE(lets_go_of_imports_on_a_full_device),
    CASE(shares_nothing_that_the_driver_refuses),
    CASE(shares_a_handle_by_one_file),
    CASE(shares_once_by_two_threads),
    CASE(lets_a_peer_in),
    CASE(waits_for_a_peer_s_stream),
    CASE(empties_what_a_peer_s_stream_uses),
    CASE_OF(parks_and_wakes, false),
    CASE_OF(parks_and_wakes, true),
    CASE(keeps_without_a_wait_for_the_context),
    CASE(pins_the_hosts_memory_once),
    CASE(shares_what_is_awake_again),
    CASE(wakes_what_was_freed_in_part),
    CASE_OF(parks_behind_another_device_s_stream, Memory::LIVE),
    CASE_OF(parks_behind_another_device_s_stream, Memory::FREED),
    CASE_OF(parks_behind_another_device_s_stream, Memory::SHELVED),
    CASE(ends_behind_another_device_s_stream),
    CASE(parks_beside_another_device_s_capture),
    CASE(parks_what_was_freed_beside_a_capture),
    CASE(parks_beside_a_capture_that_the_default_stream_waits_for),
    CASE(parks_beside_who_looks_through_the_frees),
    CASE(parks_beside_who_has_the_frees),
    CASE(parks_by_two_threads),
    CASE(parks_beside_a_free),
    CASE(wakes_behind_another_device_s_stream),
    CASE(asks_beside_who_empties_the_cache),
    CASE(ends_while_parked),
    CASE(keeps_what_is_shelved),
    CASE(parks_no_other_pools),
    CASE(parks_no_pool_that_helps_out),
    CASE(parks_a_pool_that_could_not_help_out),
    CASE(wakes_where_memory_is_short),
    CASE(wakes_beside_an_idle_pool),
};

#undef CASE
#undef CASE_OF

/* The same for each, whichever came before it: what first calls make is there, and the rest is as end_case wants it. */
static void begin_case(Back& back) {
  c10::DataPtr first = back.allocate(4); // by which there is a main pool, and the thread has its number
  back.shareIpcHandle(first.get());      // the process has a door, which is an open file
  first.clear();
  back.emptyCache({0, 0});
  back.resetAccumulatedStats(0);
  back.resetPeakStats(0);
}

/* What a case must not leave to the next. Only access of the second device stays: it cannot be taken back. */
static void end_case(Back& back, size_t used_before) {
  CUcontext context = nullptr;
  DRIVE(cuCtxGetCurrent(&context));
  REQUIRE(context == simulated.context && !torch_current_stream());
  REQUIRE(!settings.roundup_power2_divisions && !reuses_in_captures());
  REQUIRE(back.isEnabled() && !back.isHistoryEnabled() && back.getMemoryFraction(0) == 1);
  back.emptyCache({0, 0});
  auto stats = back.getDeviceStats(0);
  REQUIRE(stats.allocation[0].current == 0 && stats.allocated_bytes[0].current == 0);
  REQUIRE(stats.reserved_bytes[0].current == 0 && vpmm_sim_used_bytes(simulated.sim) == used_before);
  REQUIRE(vpmm_sim_calls(simulated.sim, "cuMemHostAlloc") == vpmm_sim_calls(simulated.sim, "cuMemFreeHost"));
  REQUIRE(vpmm_sim_races(simulated.sim) == 0 && vpmm_sim_misuses(simulated.sim) == 0);
}

static void run_case(Back& back, const Case& one) {
  what_runs = one.name;
  begin_case(back);
  size_t used = vpmm_sim_used_bytes(simulated.sim);
  one.run(back);
  end_case(back, used);
  what_runs = nullptr;
}

void list_cases() {
  for (const Case& one : CASES)
    std::printf("%s\n", one.name);
}

static const Case& case_of(const std::string& name) {
  auto found = std::find_if(std::begin(CASES), std::end(CASES), [&](const Case& one) { return one.name == name; });
  if (found == std::end(CASES)) {
    std::fprintf(stderr, "there is no case %s, of\n", name.c_str());
    list_cases();
    std::exit(2);
  }
  return *found;
}

void run_cases(Back& back, const std::vector<std::string>& names) {
  if (names.empty())
    for (const Case& one : CASES)
      run_case(back, one);
  for (const std::string& name : names)
    run_case(back, case_of(name));
}

void run_shuffled_cases(Back& back, uint64_t seed) {
  std::vector<Case> cases(std::begin(CASES), std::end(CASES));
  std::shuffle(cases.begin(), cases.end(), std::mt19937_64(seed));
  for (const Case& one : cases)
    run_case(back, one);
}
