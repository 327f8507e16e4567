#include "pools.h"

#include "asked.h"
#include "limits.h"
#include "metrics.h"
#include "on_device.h"
#include "streams.h"

#include <algorithm>

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/ScopeExit.h>

namespace vpmm_torch {

/*
 * A kernel that has failed makes each call in its context fail from then on: PyTorch has an exception of its own for
 * that. Where no context is current, to ask would make one.
 */
static void throw_if_device_failed() {
  RelaxedMode relaxed;
  CUcontext context = nullptr;
  const vpmm_driver* driver = vpmm_driver_cuda();
  size_t free = 0, total = 0;
  if (driver && driver->cuCtxGetCurrent(&context) == CUDA_SUCCESS && context)
    C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
}

void check(vpmm_status status, const char* what) {
  if (status == VPMM_SUCCESS)
    return;
  const std::string words = vpmm_last_error();
  if (status == VPMM_ERROR_DRIVER)
    throw_if_device_failed();
  TORCH_CHECK(false, "vpmm: ", what, ": ", words);
}

/* Frees wait for the context, and spare captures in it. */
static bool await_context() {
  void* byte = nullptr;
  return succeeds(cudaMalloc(&byte, 1)) && succeeds(cudaFree(byte));
}

/*
 * By an event: a stream that begins to capture would lose its capture by a wait for it. False: it may be at work still.
 */
static bool await_stream(cudaStream_t stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cudaEvent_t event = nullptr;
  if (!Pools::enter_everywhere())
    return false;
  bool recorded = succeeds(cudaStreamIsCapturing(stream, &capture)) && capture == cudaStreamCaptureStatusNone &&
                  succeeds(cudaEventCreateWithFlags(&event, cudaEventDisableTiming)) &&
                  succeeds(cudaEventRecord(event, stream));
  Pools::leave_everywhere();
  bool has_ended = recorded && succeeds(cudaEventSynchronize(event));
  if (event)
    cudaEventDestroy(event);
  return has_ended;
}

/*
 * A stream that cannot be asked, as the default one beside a capture of a stream that waits for it, may be at work too;
 * and so may one that captures. Where there is no device, as at the process's end, nothing is.
 */
static bool await_elsewhere(const Use& use) {
  OnDevice on(use.device);
  RelaxedMode relaxed;
  return !on.is_on() || await_stream(use.stream) || await_context();
}

bool await_other_devices(const Allocation& allocation) {
  return std::all_of(allocation.used.begin(), allocation.used.end(),
                     [&](const Use& use) { return use.device == allocation.device || await_elsewhere(use); });
}

vpmm_stats Pool::stats() const {
  vpmm_stats stats = {};
  if (!is_lent())
    vpmm_stats_get(pool, &stats);
  return stats;
}

void* Pool::malloc(size_t bytes, cudaStream_t stream) const {
  CUdeviceptr address = 0;
  vpmm_status status = vpmm_malloc(pool, bytes, stream, &address);
  constexpr size_t TEBIBYTE = size_t{1} << 40;
  bool is_too_long = status == VPMM_ERROR_INVALID_VALUE && bytes > TEBIBYTE; // for any device; else it is the stream
  if (status != VPMM_ERROR_OUT_OF_MEMORY && status != VPMM_ERROR_OUT_OF_ADDRESS_SPACE && !is_too_long)
    check(status, "an allocation");
  return reinterpret_cast<void*>(address);
}

bool Pool::end() {
  std::lock_guard<std::mutex> guard(end_lock);
  if (!pool)
    return true;
  if (live.load(std::memory_order_acquire)) // a checkpoint has freed meanwhile, and it is not done yet
    return false;
  for (const auto& [address, allocation] : wanted.shelved()) {
    if (!await_other_devices(allocation))
      return false;
    if (wanted.unshelve(address))
      vpmm_free(pool, reinterpret_cast<CUdeviceptr>(address), allocation.stream);
  }
  parking.end();
  metrics_remove(pool);
  vpmm_status status = vpmm_pool_destroy(pool);
  if (status == VPMM_ERROR_BUSY) {
    metrics_add(pool, id);
    return false;
  }
  if (status != VPMM_SUCCESS) { // it is gone all the same
    TORCH_WARN("vpmm: a private pool could not be given back wholly: ", vpmm_last_error());
  }
  pool = nullptr;
  return true;
}

/* What is live in the main pool when the process ends stays; the driver takes it back. */
Pool::~Pool() {
  if (pool && !is_private()) {
    metrics_remove(pool);
  } else if (!end()) {
    TORCH_WARN("vpmm: a private pool could not be given back: ", vpmm_last_error());
  }
}

/*
 * Address space for a private pool: as much as the device has memory, and not the terabytes of a main one, of which
 * there are enough for some ten pools.
 */
static size_t private_va_size(int device, size_t most) {
  constexpr size_t STEP = size_t{1} << 30;
  const size_t total = memory_of(device).second; // of the pool's device, which need not be current
  return std::min(most, (total + STEP - 1) / STEP * STEP);
}

/*
 * What a thread's front cache holds, unless VPMM_CACHE_BYTES says otherwise. What lies in a cache is not joined with
 * what lies beside it before a request needs it: with 64 MiB a server with 1 and 4 workers held 1.09 and 1.10 times
 * what was in use, with 8 MiB 1.06 and 1.05, with none 1.05 and 1.05, at the same number of tokens a second
 * (stress/README.md).
 */
constexpr size_t CACHE_BYTES = size_t{8} << 20;

/*
 * Bytes of a page, unless VPMM_PAGE_SIZE says otherwise, of a device whose granularity is larger. Training asks for the
 * same large tensors in each step, few of which are whole multiples of 2 MiB (stress/README.md, "Small pages").
 */
constexpr size_t PAGE_BYTES = size_t{256} << 10;

/*
 * What VPMM_REUSE says, else: no stream waits for another. PyTorch promises that its allocator brings no order between
 * streams, and a program may rely on it: a stream that waits for a flag, or for what another process sends, is set free
 * by one that allocates meanwhile. (Where a request would fail else, it does wait.) A server with 1, 4 and 8 workers
 * holds as much, and serves more (stress/README.md).
 */
constexpr vpmm_reuse REUSE = VPMM_REUSE_COMPLETED;

vpmm_config configuration(int device, bool is_private) {
  vpmm_config config = vpmm_config_default();
  config.cache_bytes = CACHE_BYTES;
  config.page_size = PAGE_BYTES;
  config.reuse = REUSE;
  check(vpmm_config_from_env(&config), "its environment variables");
  TORCH_CHECK(config.streams != VPMM_STREAMS_EAGER, "vpmm: VPMM_STREAMS=eager is not for PyTorch: checked or trusted");
  config.device = device;
  config.small = VPMM_SMALL_SLAB;
  config.reaper = true;
  config.captures = !is_private;
  config.graph = is_private;
  if (is_private) {
    config.initial_pages = config.max_mapped = config.max_mapped_percent = 0; // those are the main pool's
    config.va_size = private_va_size(device, config.va_size);
  }
  return config;
}

static void give_access(const Pool& pool, int peer) {
  check(vpmm_pool_set_access(pool.pool, peer, CU_MEM_ACCESS_FLAGS_PROT_READWRITE), "access for another device");
}

/*
 * The main pool's gate, for streams that last: of another, which the program may destroy, nobody else touches the
 * handle.
 */
static bool enter_gate(void*, CUstream stream) {
  return is_pytorchs(stream) && Pools::enter_everywhere();
}

static void leave_gate(void*, CUstream) {
  Pools::leave_everywhere();
}

/* Whether the program says that it captures streams otherwise than by PyTorch, which no gate sees. */
static bool captures_itself() {
  vpmm_config said = vpmm_config_default();
  return vpmm_config_from_env(&said) == VPMM_SUCCESS && said.captures;
}

/* Under one of the two locks: `peers_` changes under both. */
std::shared_ptr<Pool> Pools::make(MempoolId_t id) {
  auto made = std::make_shared<Pool>();
  made->id = id;
  vpmm_config config = configuration(device_, made->is_private());
  if (!made->is_private() && !captures_itself())
    config.capture_gate = {enter_gate, leave_gate, nullptr};
  metrics_begin();
  check(vpmm_pool_create(&config, &made->pool), "a pool");
  check(vpmm_pool_get_attribute(made->pool, VPMM_ATTRIBUTE_MAX_MAPPED, &made->configured_cap), "its cap");
  metrics_add(made->pool, id);
  for (int peer : peers_)
    give_access(*made, peer);
  return made;
}

bool Pools::add_peer(int peer) {
  std::lock_guard<std::mutex> guard(lock_);
  bool is_new = std::find(peers_.begin(), peers_.end(), peer) == peers_.end();
  if (is_new)
    peers_.push_back(peer);
  return is_new;
}

void Pools::remove_peer(int peer) {
  std::lock_guard<std::mutex> guard(lock_);
  peers_.erase(std::find(peers_.begin(), peers_.end(), peer));
}

/*
 * A driver call for each handle that there is: not under the tables' lock. Pools that are made meanwhile give it too.
 */
void Pools::allow(int peer) {
  std::lock_guard<std::mutex> guard(allow_lock_); // who comes second waits until it is so
  if (!add_peer(peer))
    return;
  auto undo = c10::make_scope_exit([&] { remove_peer(peer); });
  for (const auto& pool : all())
    if (!pool->is_lent())
      give_access(*pool, peer);
  undo.release();
}

std::shared_ptr<Pool> Pools::main() {
  if (!has_main_.load(std::memory_order_acquire)) {
    // Not under the tables' lock: the pool's gate takes that below locks of the pool's own.
    std::lock_guard<std::mutex> make_guard(allow_lock_);
    if (!main_) {
      std::shared_ptr<Pool> made = make({0, 0});
      std::lock_guard<std::mutex> guard(lock_);
      main_ = std::move(made);
      uncounted_main_ = {std::shared_ptr<Pool>(), main_.get()};
      has_main_.store(true, std::memory_order_release); // pairs with the acquire above: it never changes again
    }
  }
  return uncounted_main_;
}

/* Whether it does, or cannot be asked, as the default stream while another one captures. */
static bool seems_to_capture(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return !succeeds(cudaStreamIsCapturing(stream, &status)) || status != cudaStreamCaptureStatusNone;
}

/* The thread asks for memory: under the lock. */
void Pools::look_at_captures() {
  for (Underway& it : underway_)
    if (it.may_capture() && it.thread == std::this_thread::get_id())
      it.seems_to_capture = seems_to_capture(it.stream);
}

std::shared_ptr<Pool> Pools::for_request(cudaStream_t stream) {
  if (underway_count_.load()) {
    std::lock_guard<std::mutex> guard(lock_);
    look_at_captures();
    for (auto it = underway_.rbegin(); it != underway_.rend(); ++it) // the one that was begun last comes first
      if (it->filter(stream))
        return private_.at(it->id); // no pool ends while its id is underway
  }
  return main();
}

std::vector<std::shared_ptr<Pool>> Pools::all() {
  std::vector<std::shared_ptr<Pool>> pools;
  std::lock_guard<std::mutex> guard(lock_);
  if (main_)
    pools.push_back(main_);
  for (const auto& [id, pool] : private_)
    pools.push_back(pool);
  pools.insert(pools.end(), ending_.begin(), ending_.end());
  return pools;
}

void Pools::trim_main() {
  if (has_main_.load(std::memory_order_acquire))
    vpmm_trim(uncounted_main_->pool, 0, nullptr);
}

HeldPools Pools::for_shortage() {
  HeldPools pools;
  std::lock_guard<std::mutex> guard(lock_);
  for (const auto& [id, pool] : private_)
    if (pool->use_on_oom)
      pools.add(pool);
  return pools;
}

const std::shared_ptr<Pool>& Pools::known(MempoolId_t id) {
  auto found = private_.find(id);
  TORCH_CHECK(found != private_.end(), "vpmm: there is no memory pool (", id.first, ", ", id.second, ")");
  return found->second;
}

void Pools::add_user(MempoolId_t id) {
  std::lock_guard<std::mutex> guard(lock_);
  auto found = private_.find(id);
  if (found == private_.end())
    found = private_.emplace(id, make(id)).first;
  found->second->users++;
}

static std::shared_ptr<Pool> lent_pool(MempoolId_t id, Keeper* keeper, int users) {
  auto lent = std::make_shared<Pool>();
  lent->id = id;
  lent->keeper = keeper;
  lent->users = users;
  return lent;
}

void Pools::take_over(MempoolId_t id, Keeper* keeper, int users) {
  std::lock_guard<std::mutex> guard(lock_);
  private_.emplace(id, lent_pool(id, keeper, users)); // unless another thread has just done it
}

void Pools::add_lent(MempoolId_t id, Keeper* keeper) {
  std::lock_guard<std::mutex> guard(lock_);
  bool is_new = private_.emplace(id, lent_pool(id, keeper, 1)).second;
  TORCH_CHECK(is_new, "vpmm: memory pool (", id.first, ", ", id.second, ") was made without another allocator");
}

Keeper* Pools::keeper(MempoolId_t id) {
  std::lock_guard<std::mutex> guard(lock_);
  auto found = private_.find(id);
  return found == private_.end() ? nullptr : found->second->keeper;
}

bool Pools::has(MempoolId_t id) {
  std::lock_guard<std::mutex> guard(lock_);
  return private_.count(id);
}

void Pools::remove_user(MempoolId_t id) {
  std::lock_guard<std::mutex> guard(lock_);
  const std::shared_ptr<Pool>& pool = known(id);
  TORCH_CHECK(pool->users > 0, "vpmm: a memory pool was released more often than it was taken");
  pool->users--;
}

int Pools::users(MempoolId_t id) {
  std::lock_guard<std::mutex> guard(lock_);
  auto found = private_.find(id);
  return found == private_.end() ? 0 : found->second->users;
}

std::shared_ptr<Pool> Pools::find(MempoolId_t id) {
  std::lock_guard<std::mutex> guard(lock_);
  return known(id);
}

void Pools::set_use_on_oom(MempoolId_t id, bool use) {
  std::lock_guard<std::mutex> guard(lock_);
  known(id)->use_on_oom = use;
}

void Pools::begin(MempoolId_t id, Filter filter) {
  add_user(id); // PyTorch releases the pool once for this, too
  {
    std::lock_guard<std::mutex> guard(lock_);
    bool is_again = is_begun(id);
    if (is_again)
      known(id)->users--;
    TORCH_CHECK(!is_again, "beginAllocateToPool: already recording to mempool_id");
    underway_.push_back({id, std::move(filter), std::this_thread::get_id(), this_thread_lives(),
                         c10::cuda::getCurrentCUDAStream(device_).stream()});
    underway_count_.fetch_add(1);
    underway_anywhere_.fetch_add(1);
  }
  for (size_t i = 0; Pools* pools = everywhere_[i].load(); i++)
    pools->await_entered();
}

void Pools::await_entered() {
  for (Place& place : entered_)
    while (place.count.load())
      std::this_thread::yield(); // a free is under way, which waits for nothing of this thread's
}

void Pools::end(MempoolId_t id) {
  std::lock_guard<std::mutex> guard(lock_);
  auto found = std::find_if(underway_.begin(), underway_.end(), [&](const auto& it) { return it.id == id; });
  TORCH_CHECK(found != underway_.end(), "endAllocatePool: not currently recording to mempool_id");
  underway_.erase(found);
  underway_count_.fetch_sub(1);
  underway_anywhere_.fetch_sub(1);
}

bool Pools::is_begun(MempoolId_t id) const {
  return std::any_of(underway_.begin(), underway_.end(), [&](const auto& it) { return it.id == id; });
}

bool Pools::is_underway(MempoolId_t id) {
  std::lock_guard<std::mutex> guard(lock_);
  return is_begun(id);
}

bool Pools::no_other_captures() {
  std::lock_guard<std::mutex> guard(lock_);
  return std::all_of(underway_.begin(), underway_.end(),
                     [](const auto& it) { return !it.may_capture() || it.thread == std::this_thread::get_id(); });
}

bool Pools::no_other_captures_anywhere() {
  for (size_t i = 0; Pools* pools = everywhere_[i].load(); i++)
    if (!pools->no_other_captures())
      return false;
  return true;
}

/* Of a thread that has ended a capture may go on; another one may end it. */
bool Pools::none_captures() {
  std::lock_guard<std::mutex> guard(lock_);
  return std::none_of(underway_.begin(), underway_.end(), [](const auto& it) {
    return it.seems_to_capture && (it.thread_lives->load() || seems_to_capture(it.stream));
  });
}

bool Pools::enter_if_none_captures() {
  entered_[thread_number()].count.fetch_add(1);
  if (!underway_count_.load() || none_captures())
    return true;
  leave();
  return false;
}

std::array<std::atomic<Pools*>, Pools::DEVICES> Pools::everywhere_;
std::atomic<int> Pools::underway_anywhere_{0};

void Pools::leave_everywhere() {
  for (size_t i = 0; Pools* pools = everywhere_[i].load(); i++)
    pools->leave();
}

bool Pools::enter_everywhere() {
  for (size_t i = 0; Pools* pools = everywhere_[i].load(); i++)
    if (!pools->enter_if_none_captures()) {
      while (i > 0)
        everywhere_[--i].load()->leave();
      return false;
    }
  return true;
}

bool Pools::may_any_capture() {
  std::lock_guard<std::mutex> guard(lock_);
  return std::any_of(underway_.begin(), underway_.end(), [](const auto& it) { return it.may_capture(); });
}

std::vector<std::shared_ptr<Pool>> Pools::take_idle() {
  std::lock_guard<std::mutex> guard(lock_);
  std::vector<std::shared_ptr<Pool>> idle = std::move(ending_);
  ending_.clear();
  for (auto it = private_.begin(); it != private_.end();) {
    bool is_idle = it->second->users == 0 && it->second->live.load(std::memory_order_acquire) == 0 &&
                   !is_begun(it->first); // not so: it was released too often
    if (is_idle)
      idle.push_back(std::move(it->second));
    it = is_idle ? private_.erase(it) : std::next(it);
  }
  return idle;
}

void Pools::put_back(std::shared_ptr<Pool> idle) {
  std::lock_guard<std::mutex> guard(lock_);
  ending_.push_back(std::move(idle));
}

} // namespace vpmm_torch
