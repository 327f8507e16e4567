/*
 * cases.cpp - what PyTorch expects of its allocator, one case after the other, by one thread: before random.cpp's
 * threads begin. Each leaves nothing behind.
 */
#include "pytorch.h"

#include <string>
#include <utility>
#include <vector>

static const size_t SMALL = 1, LARGE = 2; // c10's StatType

static void refuses(Back& back) {
  std::string why;
  try {
    back.allocate(size_t{1} << 50);
  } catch (const c10::OutOfMemoryError& error) {
    why = error.what();
  }
  REQUIRE(why.find("CUDA out of memory. Tried to allocate 1048576.00 GiB. GPU 0 has a total capacity of") == 0);
  REQUIRE(back.allocate(0).get() == nullptr);
}

/* In steps of 512 bytes, those of up to 1 MiB as small. */
static void counts_blocks(Back& back) {
  const std::pair<size_t, size_t> cases[] = {{1, 512}, {512, 512}, {513, 1024}, {1 << 20, 1 << 20},
                                             {(1 << 20) + 1, (1 << 20) + 512}, {3 << 20, 3 << 20}};
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

/* ---- graph_capture_record_stream_reuse ---- */

/* A capture on the first of some streams, which all of its requests name. */
struct Capture {
  Back& back;
  std::vector<CUstream> stream;
  const c10::MempoolId_t id{7, 1};

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

static void reuses_what_has_joined(Back& back, bool reuse) {
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
  {
    Capture capture(back, 2, true);
    c10::DataPtr used = capture.allocate(0);
    capture.use(used, 1);
    used.clear();
    capture.wait(0, 1);
  }
  REQUIRE(back.getPoolUseCount(0, {7, 1}) == 0 && back.getDeviceStats(0).reserved_bytes[0].current == 0);
}

void check_cases(Back& back) {
  refuses(back);
  counts_blocks(back);
  rounds_up_as_the_settings_say(back);
  may_be_disabled(back);
  reuses_what_has_joined(back, true);
  reuses_what_has_joined(back, false);
  waits_for_all_to_join(back);
  sees_that_a_frontier_was_set_anew(back);
  ends_with_the_capture(back);
  back.emptyCache({0, 0});
}
