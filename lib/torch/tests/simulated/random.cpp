/*
 * random.cpp - threads that allocate, free, say further streams, capture, use private pools and go back to checkpoints
 * of them, each in no order, on the simulated GPU. Its race detector says whether memory went to somebody before its
 * work had ended; in the end nothing may live, and nothing be held.
 */
#include "pytorch.h"

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

extern "C" const char* vpmm_torch_park(uint64_t first, uint64_t second, bool keep);
extern "C" const char* vpmm_torch_wake(uint64_t first, uint64_t second);

using CheckpointState = c10::cuda::CUDACachingAllocator::AllocatorState;

struct Held {
  c10::DataPtr memory;
  size_t bytes;
  CUstream stream;
  void* address;
};

struct CapturedUse {
  size_t bytes;
  cudaGraphNode_t node;
};

struct Worker {
  Back& back;
  std::mt19937_64 random;
  CUstream stream[2];
  std::vector<Held> held;
  std::vector<std::shared_ptr<CheckpointState>> checkpoints; // whose pools may have ended
  std::multimap<uintptr_t, CapturedUse> captured;            // by address: of the capture under way
};

static std::mutex pile_lock;
static std::vector<Held> pile; // of all workers: who takes something from it frees it

static bool is_short; // LEFT_MIB says how much of the device is left

static std::atomic<uint64_t> pool_ids{1}, graphs, pools, parks, trees, uses, refused;

static uint64_t draw(Worker& w, uint64_t below) {
  return w.random() % below;
}

static void write(const Held& held, CUstream stream) {
  capture_work(stream, reinterpret_cast<CUdeviceptr>(held.address), held.bytes);
}

/* What the capture has done to the memory before is before all that the stream will do. */
static void note_captured_use(Worker& w, const Held& held, CUstream stream, bool is_new) {
  auto begin = reinterpret_cast<uintptr_t>(held.address);
  for (const auto& [address, use] : w.captured)
    if (is_new && address < begin + held.bytes && begin < address + use.bytes)
      REQUIRE(capture_is_behind(stream, use.node));
  write(held, stream);
  w.captured.emplace(begin, CapturedUse{held.bytes, capture_last(stream)});
}

static void use(Worker& w, const Held& held, CUstream stream, bool is_new) {
  if (captures(stream))
    note_captured_use(w, held, stream, is_new);
  else
    write(held, stream);
}

static Held allocate(Worker& w, size_t bytes, CUstream stream) {
  torch_set_current_stream(stream);
  Held held{w.back.allocate(bytes), bytes, stream, nullptr};
  held.address = held.memory.get();
  use(w, held, stream, true);
  return held;
}

static void drop_one(Worker& w, std::vector<Held>& of) {
  if (!of.empty())
    of.erase(of.begin() + static_cast<std::ptrdiff_t>(draw(w, of.size())));
}

/* False: there is no memory, and something goes in its place. */
static bool allocate_into(Worker& w, std::vector<Held>& to, size_t bytes, CUstream stream) {
  try {
    to.push_back(allocate(w, bytes, stream));
    return true;
  } catch (const c10::OutOfMemoryError&) {
    refused++;
    drop_one(w, to);
    drop_one(w, w.held);
    return false;
  }
}

/* On the worker's other stream, behind its own; record_stream is all that tells of it. */
static void use_on_other(Worker& w, const Held& held) {
  CUstream other = held.stream == w.stream[0] ? w.stream[1] : w.stream[0];
  capture_wait(other, held.stream);
  use(w, held, other, false);
  w.back.recordStream(held.memory, torch_stream(other));
  uses++;
}

/* One goes onto the pile, or another thread's comes from it and is freed here, while its stream may begin a capture. */
static void exchange(Worker& w) {
  std::vector<Held> taken; // goes without the lock
  std::lock_guard<std::mutex> guard(pile_lock);
  std::vector<Held>& from = pile.size() < 8 ? w.held : pile;
  std::vector<Held>& to = pile.size() < 8 ? pile : taken;
  if (from.empty())
    return;
  std::swap(from[draw(w, from.size())], from.back());
  to.push_back(std::move(from.back()));
  from.pop_back();
}

/* Memory of the pool is taken, used and freed, and some from outside is freed meanwhile. What is left of it. */
static std::vector<Held> work_in_pool(Worker& w, bool is_capture) {
  std::vector<Held> inner;
  for (int i = 0; i < 20; i++) {
    size_t bytes = 4 + draw(w, draw(w, 2) ? 3 << 20 : 20000);
    if (!allocate_into(w, inner, bytes, w.stream[is_capture && !captures(w.stream[1]) ? 0 : draw(w, 2)]))
      continue;
    if (draw(w, 3) == 0)
      use_on_other(w, inner.back());
    if (is_capture && captures(w.stream[1]) && draw(w, 3) == 0)
      capture_wait(w.stream[0], w.stream[1]);
    if (draw(w, 2))
      drop_one(w, inner);
    if (draw(w, 3) == 0)
      drop_one(w, w.held);
  }
  return inner;
}

static void capture(Worker& w) {
  const MempoolId_t id{0, pool_ids++};
  set_reuse_in_captures(draw(w, 3) != 0);
  torch_set_current_stream(w.stream[0]); // the one that will capture, as PyTorch sees to
  w.back.beginAllocateToPool(0, id, [&](cudaStream_t stream) {
    auto is = [=](CUstream own) { return own == reinterpret_cast<CUstream>(stream) && captures(own); };
    return is(w.stream[0]) || is(w.stream[1]);
  });
  capture_begin(w.stream[0], static_cast<CUstreamCaptureMode>(draw(w, 3)));
  std::vector<Held> inner = work_in_pool(w, true);
  if (captures(w.stream[1]))
    capture_wait(w.stream[0], w.stream[1]);
  capture_end(w.stream[0]);
  w.captured.clear();
  w.back.endAllocateToPool(0, id);
  for (Held& held : inner) {
    write(held, held.stream);
    if (draw(w, 2))
      w.held.push_back(std::move(held)); // its pool is released before it
  }
  w.back.releasePool(0, id);
  graphs++;
}

/* Others capture meanwhile. What lives is used again afterwards; some of it goes before. */
static void park_and_wake(Worker& w, const MempoolId_t& id, std::vector<Held>& inner) {
  REQUIRE(!vpmm_torch_park(id.first, id.second, false));
  for (uint64_t drops = draw(w, 4); drops > 0; drops--)
    drop_one(w, inner);
  REQUIRE(!vpmm_torch_wake(id.first, id.second));
  for (const Held& held : inner)
    write(held, held.stream);
  parks++;
}

/* As torch.cuda.use_mem_pool: what the thread allocates. */
static void use_pool(Worker& w) {
  const MempoolId_t id{0, pool_ids++};
  const std::thread::id thread = std::this_thread::get_id();
  w.back.createOrIncrefPool(0, id);
  w.back.beginAllocateToPool(0, id, [=](cudaStream_t) { return std::this_thread::get_id() == thread; });
  std::vector<Held> inner = work_in_pool(w, false);
  w.back.endAllocateToPool(0, id);
  if (!is_short && draw(w, 2)) // what is parked needs memory to wake
    park_and_wake(w, id, inner);
  w.back.releasePool(0, id);
  w.back.releasePool(0, id);
  pools++;
}

/* In a pool that the thread uses, as a graph that is recorded does: what is left is the program's. */
static std::vector<Held> record(Worker& w, const MempoolId_t& id, std::vector<Held> held) {
  const std::thread::id thread = std::this_thread::get_id();
  w.back.beginAllocateToPool(0, id, [=](cudaStream_t) { return std::this_thread::get_id() == thread; });
  for (int i = 0; i < 15; i++) {
    if (!allocate_into(w, held, 4 + draw(w, draw(w, 2) ? 3 << 20 : 20000), w.stream[draw(w, 2)]))
      continue;
    if (draw(w, 4) == 0)
      use_on_other(w, held.back());
    if (draw(w, 2))
      drop_one(w, held);
  }
  w.back.endAllocateToPool(0, id);
  w.back.releasePool(0, id);
  return held;
}

/* The pool as the checkpoint has it; what was live is nobody's, as PyTorch sees to. */
static std::vector<Held> go_back(Worker& w, const MempoolId_t& id, const std::vector<Held>& then, std::vector<Held> now,
                                 std::shared_ptr<CheckpointState> checkpoint) {
  auto delta = w.back.setCheckpointPoolState(0, std::move(checkpoint));
  std::unordered_set<void*> addresses;
  std::vector<Held> again;
  REQUIRE(delta.ptrs_freed.size() == now.size() && delta.dataptrs_allocd.size() == then.size());
  for (Held& held : now)
    held.memory.release_context();
  for (c10::DataPtr& memory : delta.dataptrs_allocd)
    for (const Held& held : then)
      if (held.address == memory.get()) {
        size_t bytes = 0;
        REQUIRE(w.back.getBaseAllocation(held.address, &bytes) == held.address && bytes == held.bytes);
        addresses.insert(held.address);
        write(held, held.stream);
        again.push_back({std::move(memory), held.bytes, held.stream, held.address});
        break;
      }
  REQUIRE(addresses.size() == then.size() && w.back.checkPoolLiveAllocations(0, id, addresses));
  return again;
}

/* Others may capture meanwhile. */
static void wait_for_streams(Worker& w) {
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  DRIVE(cuThreadExchangeStreamCaptureMode(&mode));
  for (CUstream stream : w.stream)
    DRIVE(cuStreamSynchronize(stream));
  DRIVE(cuThreadExchangeStreamCaptureMode(&mode));
}

/* As torch.compile's graph trees: children of a graph are recorded one after the other, each beside what it left. */
static void use_tree(Worker& w) {
  const MempoolId_t id{0, pool_ids++};
  std::vector<Held> left, then;
  w.back.createOrIncrefPool(0, id);
  left = record(w, id, {});
  auto checkpoint = w.back.getCheckpointState(0, id);
  for (const Held& held : left)
    then.push_back({{}, held.bytes, held.stream, held.address});
  for (uint64_t children = 1 + draw(w, 3); children > 0; children--) {
    left = record(w, id, std::move(left));
    wait_for_streams(w);
    auto deeper = w.back.getCheckpointState(0, id);
    left = go_back(w, id, then, std::move(left), checkpoint);
  }
  w.checkpoints.push_back(std::move(checkpoint));
  if (w.checkpoints.size() > draw(w, 5))
    w.checkpoints.clear();
  left.clear();
  w.back.releasePool(0, id);
  trees++;
}

static void look(Worker& w) {
  size_t largest = 0;
  (void)w.back.getDeviceStats(0);
  (void)w.back.snapshot();
  w.back.cacheInfo(0, &largest);
}

static void step(Worker& w) {
  size_t bytes = 4 + draw(w, draw(w, 4) ? 100000 : 20 << 20);
  try {
    w.held.push_back(allocate(w, bytes, w.stream[draw(w, 2)]));
  } catch (const c10::OutOfMemoryError&) {
    refused++;
    w.held.clear();
    return;
  }
  if (draw(w, 5) == 0)
    use_on_other(w, w.held.back());
  while (w.held.size() > 30)
    drop_one(w, w.held);
  if (draw(w, 3) == 0)
    exchange(w);
  if (draw(w, 80) == 0)
    capture(w);
  if (draw(w, 150) == 0)
    use_pool(w);
  if (draw(w, 100) == 0)
    use_tree(w);
  if (draw(w, 200) == 0)
    w.back.emptyCache({0, 0});
  if (draw(w, 100) == 0)
    look(w);
}

static void work(uint64_t seed, int steps) {
  Worker w{*c10::cuda::CUDACachingAllocator::get(), std::mt19937_64(seed), {}, {}, {}, {}};
  DRIVE(cuCtxSetCurrent(simulated.context));
  for (CUstream& stream : w.stream) {
    DRIVE(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    torch_own_stream(stream);
  }
  for (int i = 0; i < steps; i++)
    step(w);
}

/* What VPMM_TORCH_METRICS serves; "" if it serves nothing. */
static std::string scrape() {
  std::string out, where = std::getenv("VPMM_TORCH_METRICS");
  std::string command = "curl -s --max-time 10 http://" + where + "/metrics";
  char part[4096];
  FILE* from = popen(command.c_str(), "r");
  REQUIRE(from);
  while (size_t length = std::fread(part, 1, sizeof part, from))
    out.append(part, length);
  pclose(from);
  return out;
}

/* Beside all that goes on, while pools come and go. */
static void scrape_until(const std::atomic<bool>& over) {
  bool has_private = false;
  while (!over) {
    std::string metrics = scrape();
    REQUIRE(metrics.find("vpmm_mapped_bytes{") != std::string::npos);
    REQUIRE(metrics.find("pool=\"pytorch\"") != std::string::npos);
    has_private = has_private || metrics.find("pool=\"pytorch (") != std::string::npos;
    std::this_thread::sleep_for(std::chrono::milliseconds(30)); // one client has 50 answers a second
  }
  std::printf("metrics were scraped, of private pools too: %s\n", has_private ? "yes" : "no");
}

/* Nothing is told to be mapped twice, or unmapped where it was not, and in the end nothing is mapped. */
static void check_history(Back& back) {
  using c10::cuda::CUDACachingAllocator::TraceEntry;
  std::map<size_t, size_t> mapped; // begin, end
  size_t entries = 0;
  const auto snapshot = back.snapshot();
  for (const TraceEntry& entry : snapshot.device_traces.at(0)) {
    size_t begin = entry.addr_, end = entry.addr_ + entry.size_;
    if (entry.action_ != TraceEntry::SEGMENT_MAP && entry.action_ != TraceEntry::SEGMENT_UNMAP)
      continue;
    entries++;
    auto after = mapped.lower_bound(begin);
    auto before = after == mapped.begin() ? mapped.end() : std::prev(after);
    if (entry.action_ == TraceEntry::SEGMENT_MAP) {
      REQUIRE((after == mapped.end() || after->first >= end) && (before == mapped.end() || before->second <= begin));
      if (before != mapped.end() && before->second == begin)
        begin = before->first;
      if (after != mapped.end() && after->first == end)
        end = after->second;
      mapped.erase(mapped.lower_bound(begin), mapped.lower_bound(end));
      mapped[begin] = end;
      continue;
    }
    auto whole = after != mapped.end() && after->first == begin ? after : before;
    REQUIRE(whole != mapped.end() && whole->first <= begin && end <= whole->second);
    size_t rest = whole->first, rest_end = whole->second;
    mapped.erase(whole);
    if (rest < begin)
      mapped[rest] = begin;
    if (end < rest_end)
      mapped[end] = rest_end;
  }
  REQUIRE(mapped.empty());
  std::printf("%zu times something was mapped or unmapped\n", entries);
}

void run_threads(Back& back, int threads, int steps, uint64_t seed) {
  if (seed % 2)
    record_history(back, 10000000);
  CUdeviceptr rest = 0;
  if (const char* left = std::getenv("LEFT_MIB")) {
    is_short = true;
    DRIVE(cuMemAlloc(&rest, vpmm_sim_config_default().memory_bytes - (std::strtoull(left, nullptr, 0) << 20)));
  }
  std::atomic<bool> over{false};
  std::thread scraper;
  if (const char* where = std::getenv("VPMM_TORCH_METRICS"); where && *where)
    scraper = std::thread(scrape_until, std::cref(over));
  std::vector<std::thread> running;
  for (int i = 0; i < threads; i++)
    running.emplace_back(work, seed * 1000 + static_cast<uint64_t>(i), steps);
  for (std::thread& thread : running)
    thread.join();
  over = true;
  if (scraper.joinable())
    scraper.join();
  DRIVE(cuCtxSynchronize()); // not by a thread that ends, which would break the capture of another
  pile.clear();
  back.allocate(4).clear(); // what was to be freed later is now
  back.emptyCache({0, 0});
  if (seed % 2)
    check_history(back);
  if (is_short)
    DRIVE(cuMemFree(rest));
  auto stats = back.getDeviceStats(0);
  std::printf(
      "captures %llu, pools %llu, parked %llu, trees %llu, uses %llu, refused %llu; races %llu, misuses %llu, "
      "live %lld, held %lld\n",
      (unsigned long long)graphs, (unsigned long long)pools, (unsigned long long)parks, (unsigned long long)trees,
      (unsigned long long)uses, (unsigned long long)refused, (unsigned long long)vpmm_sim_races(simulated.sim),
      (unsigned long long)vpmm_sim_misuses(simulated.sim), (long long)stats.allocation[0].current,
      (long long)stats.reserved_bytes[0].current);
  REQUIRE(!is_short || refused > 0);
  REQUIRE(vpmm_sim_races(simulated.sim) == 0 && vpmm_sim_misuses(simulated.sim) == 0);
  REQUIRE(stats.allocation[0].current == 0 && stats.allocated_bytes[0].current == 0);
  REQUIRE(stats.reserved_bytes[0].current == 0);
}
