#include "pools.h"

#include <algorithm>

namespace vpmm_torch {

void check(vpmm_status status, const char* what) {
  TORCH_CHECK(status == VPMM_SUCCESS, "vpmm: ", what, ": ", vpmm_last_error());
}

/* What is live in the main pool when the process ends stays; the driver takes it back. */
Pool::~Pool() {
  if (pool && id != MempoolId_t{0, 0} && vpmm_pool_destroy(pool) != VPMM_SUCCESS)
    TORCH_WARN("vpmm: a private pool could not be given back: ", vpmm_last_error());
}

std::shared_ptr<Pool> Pools::make(MempoolId_t id, std::shared_ptr<CUDAAllocator> allocator) {
  auto made = std::make_shared<Pool>();
  vpmm_config config = vpmm_config_default();
  made->id = id;
  made->allocator = std::move(allocator);
  if (made->allocator)
    return made;
  check(vpmm_config_from_env(&config), "its environment variables");
  config.device = device_;
  config.graph = id != MempoolId_t{0, 0};
  config.captures = !config.graph;
  check(vpmm_pool_create(&config, &made->pool), "a pool");
  return made;
}

std::shared_ptr<Pool> Pools::main() {
  if (!has_main_.load(std::memory_order_acquire)) {
    std::lock_guard<std::mutex> guard(lock_);
    if (!main_)
      main_ = make({0, 0}, nullptr);
    has_main_.store(true, std::memory_order_release); // pairs with the acquire above: main_ never changes again
  }
  return main_;
}

std::shared_ptr<Pool> Pools::for_request(cudaStream_t stream) {
  if (is_underway()) {
    std::lock_guard<std::mutex> guard(lock_);
    for (auto it = underway_.rbegin(); it != underway_.rend(); ++it) // the one that was begun last comes first
      if (it->second(stream))
        return private_.at(it->first);
  }
  return main();
}

std::shared_ptr<Pool> Pools::find(MempoolId_t id) {
  if (id == MempoolId_t{0, 0})
    return main();
  std::lock_guard<std::mutex> guard(lock_);
  auto found = private_.find(id);
  return found == private_.end() ? nullptr : found->second;
}

std::vector<std::shared_ptr<Pool>> Pools::all() {
  std::vector<std::shared_ptr<Pool>> pools;
  std::lock_guard<std::mutex> guard(lock_);
  if (main_)
    pools.push_back(main_);
  for (const auto& [id, pool] : private_)
    pools.push_back(pool);
  return pools;
}

std::vector<std::shared_ptr<Pool>> Pools::for_shortage() {
  std::vector<std::shared_ptr<Pool>> pools;
  std::lock_guard<std::mutex> guard(lock_);
  for (const auto& [id, pool] : private_)
    if (pool->use_on_oom)
      pools.push_back(pool);
  return pools;
}

Pool& Pools::known(MempoolId_t id) {
  auto found = private_.find(id);
  TORCH_CHECK(found != private_.end(), "vpmm: there is no memory pool (", id.first, ", ", id.second, ")");
  return *found->second;
}

void Pools::add_user(MempoolId_t id, std::shared_ptr<CUDAAllocator> allocator) {
  std::lock_guard<std::mutex> guard(lock_);
  auto& pool = private_[id];
  if (!pool) {
    try {
      pool = make(id, std::move(allocator));
    } catch (...) {
      private_.erase(id);
      throw;
    }
  }
  pool->users++;
}

void Pools::remove_user(MempoolId_t id) {
  std::lock_guard<std::mutex> guard(lock_);
  Pool& pool = known(id);
  TORCH_CHECK(pool.users > 0, "vpmm: a memory pool was released more often than it was taken");
  pool.users--;
}

int Pools::users(MempoolId_t id) {
  std::lock_guard<std::mutex> guard(lock_);
  auto found = private_.find(id);
  return found == private_.end() ? 0 : found->second->users;
}

void Pools::set_use_on_oom(MempoolId_t id, bool use) {
  std::lock_guard<std::mutex> guard(lock_);
  known(id).use_on_oom = use;
}

void Pools::begin(MempoolId_t id, Filter filter) {
  add_user(id, nullptr); // PyTorch releases the pool once for this, too
  std::lock_guard<std::mutex> guard(lock_);
  bool is_underway =
      std::any_of(underway_.begin(), underway_.end(), [&](const auto& it) { return it.first == id; });
  if (is_underway)
    known(id).users--;
  TORCH_CHECK(!is_underway, "beginAllocateToPool: already recording to mempool_id");
  underway_.emplace_back(id, std::move(filter));
  underway_count_.fetch_add(1, std::memory_order_release); // pairs with the acquire in is_underway
}

void Pools::end(MempoolId_t id) {
  std::lock_guard<std::mutex> guard(lock_);
  auto found = std::find_if(underway_.begin(), underway_.end(), [&](const auto& it) { return it.first == id; });
  TORCH_CHECK(found != underway_.end(), "endAllocatePool: not currently recording to mempool_id");
  underway_.erase(found);
  underway_count_.fetch_sub(1, std::memory_order_release);
}

void Pools::end_idle() {
  std::vector<std::shared_ptr<Pool>> idle; // they end without the lock: that waits for the device
  {
    std::lock_guard<std::mutex> guard(lock_);
    for (auto it = private_.begin(); it != private_.end();) {
      bool is_idle = it->second->users == 0 && it->second->live.load(std::memory_order_acquire) == 0;
      if (is_idle)
        idle.push_back(std::move(it->second));
      it = is_idle ? private_.erase(it) : std::next(it);
    }
  }
}

} // namespace vpmm_torch
