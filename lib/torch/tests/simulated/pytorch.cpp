#include "pytorch.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <ostream>
#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

#include <pthread.h>

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;
namespace caching = c10::cuda::CUDACachingAllocator;

simulated_gpu simulated;
torch_settings settings;
const char* what_runs;
static thread_local CUstream current;

/* Streams of PyTorch's pools, whose ids are odd; others' are their handles. */
constexpr intptr_t OF_A_POOL = 1;
static struct {
  std::mutex lock;
  std::set<CUstream> handles;
} own_streams;

/* ---- the driver under vpmm: see the linker's option --wrap ---- */

extern "C" vpmm_status __real_vpmm_pool_create(const vpmm_config*, vpmm_pool**);

extern "C" vpmm_status __wrap_vpmm_pool_create(const vpmm_config* config, vpmm_pool** pool) {
  vpmm_config changed = *config;
  changed.driver = simulated.driver;
  return __real_vpmm_pool_create(&changed, pool);
}

/* ---- locks: likewise ---- */

static thread_local const std::function<void()>* before_locks;

void torch_before_locks(const std::function<void()>* call) {
  before_locks = call;
}

extern "C" int __real_pthread_mutex_lock(pthread_mutex_t*);

/* The call's own locks are as ever. */
extern "C" int __wrap_pthread_mutex_lock(pthread_mutex_t* lock) {
  if (const auto* call = std::exchange(before_locks, nullptr)) {
    (*call)();
    before_locks = call;
  }
  return __real_pthread_mutex_lock(lock);
}

/* ---- the CUDA runtime ---- */

template <typename To, typename From>
static To as(From from) {
  return reinterpret_cast<To>(from);
}

static cudaError_t answer(CUresult result) {
  return static_cast<cudaError_t>(result);
}

extern "C" {
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return answer(simulated.driver->cuEventCreate(as<CUevent*>(event), flags));
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return answer(simulated.driver->cuEventDestroy(as<CUevent>(event)));
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return answer(simulated.driver->cuEventSynchronize(as<CUevent>(event)));
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  return answer(simulated.driver->cuEventQuery(as<CUevent>(event)));
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return answer(simulated.driver->cuEventRecord(as<CUevent>(event), as<CUstream>(stream)));
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return answer(simulated.driver->cuStreamSynchronize(as<CUstream>(stream)));
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return answer(simulated.driver->cuStreamIsCapturing(as<CUstream>(stream), as<CUstreamCaptureStatus*>(status)));
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return answer(simulated.driver->cuThreadExchangeStreamCaptureMode(as<CUstreamCaptureMode*>(mode)));
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = vpmm_sim_config_default().memory_bytes;
  *free = *total - vpmm_sim_used_bytes(simulated.sim);
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  return answer(simulated.driver->cuMemAlloc(as<CUdeviceptr*>(memory), bytes));
}

cudaError_t cudaFree(void* memory) {
  return answer(simulated.driver->cuMemFree(as<CUdeviceptr>(memory)));
}

cudaError_t cudaSetDevice(int device) {
  return answer(simulated.driver->cuCtxSetCurrent(device ? simulated.peer_context : simulated.context));
}

cudaError_t cudaGetDevice(int* device) {
  CUcontext context = nullptr;
  CUresult result = simulated.driver->cuCtxGetCurrent(&context);
  *device = context && context == simulated.peer_context;
  return answer(result);
}

cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) {
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  return cudaSuccess;
}

/* No test copies. */
cudaError_t cudaMemcpy(void*, const void*, size_t, cudaMemcpyKind) {
  abort();
}

cudaError_t cudaMemcpyAsync(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t) {
  abort();
}

cudaError_t cudaMemcpyPeerAsync(void*, int, const void*, int, size_t, cudaStream_t) {
  abort();
}
}

cudaError_t c10::cuda::GetDevice(DeviceIndex* device) {
  int index = 0;
  cudaError_t answer = cudaGetDevice(&index);
  *device = static_cast<DeviceIndex>(index);
  return answer;
}

cudaError_t c10::cuda::MaybeSetDevice(DeviceIndex device) {
  return cudaSetDevice(device);
}

/* ---- captured graphs ---- */

struct Node {
  std::vector<Node*> dependencies;
};

struct Captured {
  unsigned long long id = 0;
  std::vector<Node*> frontier;
};

static std::mutex graph_lock;                                                  // of the rest
static std::map<CUstream, Captured> captured;                                  // streams that capture now
static std::map<unsigned long long, std::vector<std::unique_ptr<Node>>> nodes; // of each capture under way
static unsigned long long capture_ids;

/* Whether one of them is it, or depends on it. */
static bool depend_on(std::vector<Node*> next, const Node* node) {
  std::set<Node*> seen;
  while (!next.empty()) {
    Node* one = next.back();
    next.pop_back();
    if (one == node)
      return true;
    if (seen.insert(one).second)
      next.insert(next.end(), one->dependencies.begin(), one->dependencies.end());
  }
  return false;
}

void capture_begin(CUstream stream, CUstreamCaptureMode mode) {
  DRIVE(cuStreamBeginCapture(stream, mode));
  std::lock_guard<std::mutex> guard(graph_lock);
  captured[stream] = {++capture_ids, {}};
}

void capture_end(CUstream stream) {
  CUgraph graph = nullptr;
  DRIVE(cuStreamEndCapture(stream, &graph));
  DRIVE(cuGraphDestroy(graph));
  std::lock_guard<std::mutex> guard(graph_lock);
  unsigned long long id = captured.at(stream).id;
  for (auto it = captured.begin(); it != captured.end();)
    it = it->second.id == id ? captured.erase(it) : std::next(it);
  nodes.erase(id);
}

bool captures(CUstream stream) {
  std::lock_guard<std::mutex> guard(graph_lock);
  return captured.count(stream);
}

void capture_work(CUstream stream, CUdeviceptr address, size_t bytes) {
  DRIVE(cuMemsetD32Async(address, 1, bytes / 4, stream));
  std::lock_guard<std::mutex> guard(graph_lock);
  auto found = captured.find(stream);
  if (found == captured.end())
    return;
  auto& made = nodes[found->second.id];
  made.push_back(std::make_unique<Node>(Node{found->second.frontier}));
  found->second.frontier = {made.back().get()};
}

void capture_wait(CUstream stream, CUstream on) {
  CUevent event;
  DRIVE(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  DRIVE(cuEventRecord(event, on));
  DRIVE(cuStreamWaitEvent(stream, event, 0));
  DRIVE(cuEventDestroy(event));
  std::lock_guard<std::mutex> guard(graph_lock);
  auto found = captured.find(on);
  if (found == captured.end())
    return;
  Captured& waits = captured[stream];
  waits.id = found->second.id;
  for (Node* node : found->second.frontier)
    if (std::find(waits.frontier.begin(), waits.frontier.end(), node) == waits.frontier.end())
      waits.frontier.push_back(node);
}

void capture_set_frontier(CUstream stream, cudaGraphNode_t node) {
  std::lock_guard<std::mutex> guard(graph_lock);
  captured.at(stream).frontier = {as<Node*>(node)};
}

cudaGraphNode_t capture_last(CUstream stream) {
  std::lock_guard<std::mutex> guard(graph_lock);
  const std::vector<Node*>& frontier = captured.at(stream).frontier;
  return frontier.empty() ? nullptr : as<cudaGraphNode_t>(frontier.back());
}

bool capture_is_behind(CUstream stream, cudaGraphNode_t node) {
  std::lock_guard<std::mutex> guard(graph_lock);
  return depend_on(captured.at(stream).frontier, as<Node*>(node));
}

extern "C" {
/* The nodes that are given stay as they are until the thread's next question. */
static cudaError_t get_capture_info(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                    const cudaGraphNode_t** frontier, size_t* count) {
  static thread_local std::vector<Node*> answer;
  std::lock_guard<std::mutex> guard(graph_lock);
  auto found = captured.find(as<CUstream>(stream));
  *status = found == captured.end() ? cudaStreamCaptureStatusNone : cudaStreamCaptureStatusActive;
  if (found == captured.end())
    return cudaSuccess;
  answer = found->second.frontier;
  *id = found->second.id;
  *frontier = reinterpret_cast<const cudaGraphNode_t*>(answer.data());
  *count = answer.size();
  return cudaSuccess;
}

static cudaError_t get_dependencies(cudaGraphNode_t node, cudaGraphNode_t* out, size_t* count) {
  std::lock_guard<std::mutex> guard(graph_lock);
  const std::vector<Node*>& dependencies = as<Node*>(node)->dependencies;
  for (size_t i = 0; out && i < *count && i < dependencies.size(); i++)
    out[i] = as<cudaGraphNode_t>(dependencies[i]);
  *count = dependencies.size();
  return cudaSuccess;
}

#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t*, const cudaGraphNode_t** frontier, const cudaGraphEdgeData**,
                                     size_t* count) {
  return get_capture_info(stream, status, id, frontier, count);
}

cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t* out, cudaGraphEdgeData*,
                                         size_t* count) {
  return get_dependencies(node, out, count);
}
#else
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                        cudaGraph_t*, const cudaGraphNode_t** frontier, size_t* count) {
  return get_capture_info(stream, status, id, frontier, count);
}

cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t* out, size_t* count) {
  return get_dependencies(node, out, count);
}
#endif
}

/* ---- c10 ---- */

namespace c10 {

void detail::deleteNothing(void*) {}

Error::Error(SourceLocation, std::string message)
    : msg_(std::move(message)), what_without_backtrace_(msg_), caller_(nullptr) {}

const char* Error::what() const noexcept {
  return msg_.c_str();
}

Warning::Warning(std::variant<UserWarning, DeprecationWarning> type, const SourceLocation& location,
                 std::string message, bool verbatim)
    : type_(type), source_location_(location), msg_(std::move(message)), verbatim_(verbatim) {}

Warning::Warning(std::variant<UserWarning, DeprecationWarning> type, SourceLocation location, const char* message,
                 bool verbatim)
    : type_(type), source_location_(location), msg_(message), verbatim_(verbatim) {}

/* Nothing that happens here is to be warned of. */
void warn(const Warning& warning) {
  std::fprintf(stderr, "warning: %s\n", warning.msg().c_str());
  std::abort();
}

const std::string& Warning::msg() const {
  return msg_;
}

namespace WarningUtils {
bool get_warnAlways() noexcept(true) {
  return true;
}
} // namespace WarningUtils

bool Allocator::is_simple_data_ptr(const DataPtr&) const {
  return true;
}

std::string demangle(const char* name) {
  return name;
}

C10_DEFINE_REGISTRY(FreeCudaMemoryCallbacksRegistry, FreeMemoryCallback)

void SetAllocator(DeviceType, Allocator*, uint8_t) {}

static std::atomic<bool> is_profiled{false};
static std::vector<int64_t> profiled_shortages; // of one thread

bool memoryProfilingEnabled() {
  return is_profiled;
}

void reportMemoryUsageToProfiler(void*, int64_t, size_t, size_t, Device) {}

void reportOutOfMemoryToProfiler(int64_t bytes, size_t, size_t, Device) {
  profiled_shortages.push_back(bytes);
}

std::ostream& operator<<(std::ostream& out, DeviceType) {
  return out << "cuda";
}

ApproximateClockToUnixTimeConverter::ApproximateClockToUnixTimeConverter() {}

std::function<time_t(approx_time_t)> ApproximateClockToUnixTimeConverter::makeConverter() {
  return [](approx_time_t) { return getTime(); };
}

#if __has_include(<c10/core/AllocatorConfig.h>) /* since 2.9, as DeviceAllocator */
DeviceAllocator::DeviceAllocator() = default;
DeviceAllocator::~DeviceAllocator() = default;

/* The settings are the test's, not an environment variable's. */
namespace CachingAllocator {
AcceleratorAllocatorConfig::AcceleratorAllocatorConfig() = default;

AcceleratorAllocatorConfig& AcceleratorAllocatorConfig::instance() {
  static AcceleratorAllocatorConfig made;
  return made;
}

size_t AcceleratorAllocatorConfig::roundup_power2_divisions(size_t) {
  return settings.roundup_power2_divisions;
}
} // namespace CachingAllocator
#endif

std::optional<std::string> utils::get_env(const char*) noexcept {
  return std::nullopt;
}

namespace detail {
void torchCheckFail(const char*, const char*, uint32_t, const char* message) {
  throw std::runtime_error(message);
}

void torchCheckFail(const char*, const char*, uint32_t, const std::string& message) {
  throw std::runtime_error(message);
}

void torchInternalAssertFail(const char*, const char*, uint32_t, const char* condition, const std::string&) {
  throw std::runtime_error(condition);
}
} // namespace detail

namespace impl {
std::array<std::atomic<const DeviceGuardImplInterface*>, static_cast<size_t>(DeviceType::COMPILE_TIME_MAX_DEVICE_TYPES)>
    device_guard_impl_registry;

std::atomic<const PyInterpreter*> GPUTrace::gpuTraceState;
bool GPUTrace::haveState = false;
} // namespace impl

namespace cuda {
cudaStream_t CUDAStream::stream() const {
  return as<cudaStream_t>(static_cast<intptr_t>(id()) & ~OF_A_POOL);
}

CUDAStream getCurrentCUDAStream(DeviceIndex) {
  return torch_stream(current);
}

DeviceIndex device_count() noexcept {
  return 1;
}

DeviceIndex current_device() {
  return 0;
}

void c10_cuda_check_implementation(const int32_t error, const char*, const char*, const uint32_t, const bool) {
  if (error != cudaSuccess)
    throw std::runtime_error("the CUDA runtime refuses");
}

/* Knows one setting. */
static bool says_reuse(const std::optional<std::string>& text) {
  return text == "graph_capture_record_stream_reuse:True";
}

#if SETTINGS_ARE_CUDAS
caching::CUDAAllocatorConfig::CUDAAllocatorConfig() = default;

size_t caching::CUDAAllocatorConfig::roundup_power2_divisions(size_t) {
  return settings.roundup_power2_divisions;
}

void caching::CUDAAllocatorConfig::parseArgs(const std::optional<std::string>& text) {
  m_graph_capture_record_stream_reuse = says_reuse(text);
}
#else
void caching::CUDAAllocatorConfig::parseArgs(const std::string& text) {
  m_graph_capture_record_stream_reuse = says_reuse(text);
}
#endif

std::atomic<caching::CUDAAllocator*> caching::allocator;
} // namespace cuda
} // namespace c10

/* ---- one device, and the allocator that there is before vpmm's ---- */

struct OneDevice : c10::impl::DeviceGuardImplInterface {
  const Device device{DeviceType::CUDA, 0};

  DeviceType type() const override {
    return DeviceType::CUDA;
  }
  Device exchangeDevice(Device) const override {
    return device;
  }
  Device getDevice() const override {
    return device;
  }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override {
    return torch_stream(current);
  }
  Stream exchangeStream(Stream) const override {
    return torch_stream(current);
  }
  DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
};

static int64_t former_holds;

void torch_former_holds(int64_t bytes) {
  former_holds = bytes;
}

static std::map<MempoolId_t, int> former_pools; // users
static double former_fraction = 1;
static bool former_records;

void torch_former_has(MempoolId_t id) {
  former_pools[id]++;
}

void torch_former_allows(double fraction) {
  former_fraction = fraction;
}

void torch_former_records(bool records) {
  former_records = records;
}

/* PyTorch's own, initialised. It keeps what is freed, by lengths, as a pool's memory: its cache. */
struct Former : vpmm_torch::WithoutExpandableSegments<caching::CUDAAllocator> {
  using MempoolId = MempoolId_t;

  bool initialized() override {
    return true;
  }
  std::string name() override {
    return "native";
  }
  bool isEnabled() const override {
    return true;
  }
  c10::DataPtr allocate(size_t) override {
    abort();
  }
  void copy_data(void*, const void*, size_t) const override {
    abort();
  }
  void* raw_alloc(size_t) override {
    abort();
  }
  void* raw_alloc_with_stream(size_t bytes, cudaStream_t) override {
    std::lock_guard<std::mutex> guard(lock);
    auto found = cached.find(bytes);
    CUdeviceptr memory = 0;
    if (found != cached.end()) {
      memory = found->second;
      cached.erase(found);
    } else if (simulated.driver->cuMemAlloc(&memory, bytes) != CUDA_SUCCESS)
      C10_THROW_ERROR(OutOfMemoryError, "the allocator that was there before has no memory");
    live[memory] = bytes;
    return as<void*>(memory);
  }
  void raw_delete(void* memory) override {
    std::lock_guard<std::mutex> guard(lock);
    auto found = live.find(as<CUdeviceptr>(memory));
    cached.emplace(found->second, found->first);
    live.erase(found);
  }
  void init(int) override {}
  double getMemoryFraction(DeviceIndex) override {
    return former_fraction;
  }
  bool isHistoryEnabled() override {
    return former_records;
  }
  void setMemoryFraction(double, DeviceIndex) override {
    abort();
  }
  void enable(bool) override {
    abort();
  }
  void emptyCache(MempoolId) override {
    std::lock_guard<std::mutex> guard(lock);
    for (auto [bytes, memory] : cached)
      DRIVE(cuMemFree(memory));
    cached.clear();
  }
  void cacheInfo(DeviceIndex, size_t*) override {
    abort();
  }
  void* getBaseAllocation(void*, size_t*) override {
    abort();
  }
  void recordStream(const c10::DataPtr&, c10::cuda::CUDAStream) override {
    abort();
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats{};
    std::lock_guard<std::mutex> guard(lock);
    stats.reserved_bytes[0].current = former_holds;
    for (auto [memory, bytes] : live)
      stats.reserved_bytes[0].current += static_cast<int64_t>(bytes);
    for (auto [bytes, memory] : cached)
      stats.reserved_bytes[0].current += static_cast<int64_t>(bytes);
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex) override {}
  void beginAllocateToPool(DeviceIndex, MempoolId id, std::function<bool(cudaStream_t)>) override {
    former_pools.at(id)++;
  }
  void endAllocateToPool(DeviceIndex, MempoolId) override {}
  void releasePool(DeviceIndex, MempoolId id) override {
    if (--former_pools.at(id) == 0)
      former_pools.erase(id);
  }
  int getPoolUseCount(DeviceIndex, MempoolId id) override {
    auto found = former_pools.find(id);
    TORCH_INTERNAL_ASSERT(found != former_pools.end()); // as PyTorch's own
    return found->second;
  }
  caching::ShareableHandle shareIpcHandle(void*) override {
    abort();
  }
  std::shared_ptr<void> getIpcDevPtr(std::string) override {
    abort();
  }
  void attachOutOfMemoryObserver(caching::OutOfMemoryObserver) override {
    abort();
  }
  void attachAllocatorTraceTracker(caching::AllocatorTraceTracker) override {}
  void enablePeerAccess(DeviceIndex, DeviceIndex) override {}
  cudaError_t memcpyAsync(void*, int, const void*, int, size_t, cudaStream_t, bool) override {
    abort();
  }
  std::shared_ptr<caching::AllocatorState> getCheckpointState(DeviceIndex, MempoolId) override {
    abort();
  }
  caching::CheckpointDelta setCheckpointPoolState(DeviceIndex, std::shared_ptr<caching::AllocatorState>) override {
    abort();
  }

#pragma GCC diagnostic push
#ifdef __clang__
#pragma GCC diagnostic ignored "-Winconsistent-missing-override"
#endif
  /* Of two of the same name each version of PyTorch has one. */
  caching::SnapshotInfo snapshot(MempoolId, bool) {
    return {};
  }
  caching::SnapshotInfo snapshot(MempoolId) {
    return {};
  }
  void recordHistory(bool, caching::CreateContextFn, size_t, caching::RecordContext, bool,
                     const std::vector<std::string>&) {
    abort();
  }
  void recordHistory(bool, caching::CreateContextFn, size_t, caching::RecordContext, bool) {
    abort();
  }

  /* Since 2.12. */
  void attachOomRejectionObserver(vpmm_torch::RejectionObserver) {
    abort();
  }
#pragma GCC diagnostic pop

  std::mutex lock;                           // of the rest
  std::map<CUdeviceptr, size_t> live;        // bytes of each
  std::multimap<size_t, CUdeviceptr> cached; // by bytes
};

/* Since 2.10 some kinds of entries may be left out: here none. */
template <typename Allocator>
static auto record(Allocator& back, caching::CreateContextFn context, size_t entries, caching::RecordContext when, int)
    -> decltype(back.recordHistory(true, context, entries, when, true, {})) {
  back.recordHistory(entries != 0, context, entries, when, true, {});
}

template <typename Allocator>
static auto record(Allocator& back, caching::CreateContextFn context, size_t entries, caching::RecordContext when, long)
    -> decltype(back.recordHistory(true, context, entries, when, true)) {
  back.recordHistory(entries != 0, context, entries, when, true);
}

void record_history(Back& back, size_t entries) {
  record(back, nullptr, entries, caching::RecordContext::NEVER, 0);
}

static std::shared_ptr<c10::GatheredContext> new_context() {
  return std::make_shared<c10::GatheredContext>();
}

void record_contexts(Back& back, caching::RecordContext when) {
  record(back, new_context, 1000, when, 0);
}

bool set_reuse_in_captures(bool reuse) {
  caching::CUDAAllocatorConfig::instance().parseArgs(reuse ? "graph_capture_record_stream_reuse:True"
                                                           : "graph_capture_record_stream_reuse:False");
  return !reuse || vpmm_torch::reuses_in_captures<caching::CUDAAllocatorConfig>(0);
}

void torch_set_current_stream(CUstream stream) {
  current = stream;
}

CUstream torch_current_stream() {
  return current;
}

void torch_profile(bool is_on) {
  c10::is_profiled = is_on;
}

std::vector<int64_t> torch_profiled_shortages() {
  return c10::profiled_shortages;
}

void torch_own_stream(CUstream stream) {
  std::lock_guard<std::mutex> guard(own_streams.lock);
  own_streams.handles.insert(stream);
}

static bool is_own(CUstream stream) {
  std::lock_guard<std::mutex> guard(own_streams.lock);
  return own_streams.handles.count(stream) > 0;
}

c10::cuda::CUDAStream torch_stream(CUstream stream, int device) {
  using c10::cuda::CUDAStream;
  Device of(DeviceType::CUDA, static_cast<DeviceIndex>(device));
  intptr_t id = as<intptr_t>(stream) | (is_own(stream) ? OF_A_POOL : 0);
  Stream unchecked(Stream::UNSAFE, of, id);
  return CUDAStream(CUDAStream::UNCHECKED, unchecked);
}

void torch_open() {
  static OneDevice device;
  static Former former;
  CUdevice ordinal;
  vpmm_sim_config config = vpmm_sim_config_default();
  config.devices = 2; // PyTorch knows of the first alone
  simulated.sim = vpmm_sim_create(&config);
  simulated.driver = vpmm_sim_driver(simulated.sim);
  if (simulated.driver->cuInit(0) != CUDA_SUCCESS || simulated.driver->cuDeviceGet(&ordinal, 0) != CUDA_SUCCESS ||
      simulated.driver->cuDevicePrimaryCtxRetain(&simulated.context, ordinal) != CUDA_SUCCESS ||
      simulated.driver->cuDevicePrimaryCtxRetain(&simulated.peer_context, 1) != CUDA_SUCCESS)
    abort();
  c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&device);
  caching::allocator.store(&former);
}
