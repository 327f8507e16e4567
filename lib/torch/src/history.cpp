#include "history.h"

#include <c10/util/Exception.h>

namespace vpmm_torch {

/* What a thread says of its entries. Its thread_local tensors may be freed after this has gone. */
struct Said {
  std::vector<std::string> regions;
  std::string metadata;
};

static thread_local Said* said_by_thread = nullptr; // has no destructor: it can be read to the thread's end

struct EndsSaid {
  ~EndsSaid() {
    delete said_by_thread;
    said_by_thread = nullptr;
  }
};

static Said& said() {
  static thread_local EndsSaid ends;
  (void)ends;
  if (!said_by_thread)
    said_by_thread = new Said;
  return *said_by_thread;
}

void History::enter_region(std::string name) {
  said().regions.push_back(std::move(name));
}

void History::leave_region() {
  if (said_by_thread && !said_by_thread->regions.empty())
    said_by_thread->regions.pop_back();
}

void History::set_metadata(const std::string& metadata) {
  said().metadata = metadata;
}

std::string History::metadata() {
  return said_by_thread ? said_by_thread->metadata : std::string();
}

/* PyTorch has this itself since 2.11. */
static TraceEntry::Action action_of(const std::string& name) {
  static const std::map<std::string, TraceEntry::Action> actions = {
      {"alloc", TraceEntry::ALLOC},
      {"free_requested", TraceEntry::FREE_REQUESTED},
      {"free_completed", TraceEntry::FREE_COMPLETED},
      {"segment_alloc", TraceEntry::SEGMENT_ALLOC},
      {"segment_free", TraceEntry::SEGMENT_FREE},
      {"segment_map", TraceEntry::SEGMENT_MAP},
      {"segment_unmap", TraceEntry::SEGMENT_UNMAP},
      {"snapshot", TraceEntry::SNAPSHOT},
      {"oom", TraceEntry::OOM},
  };
  auto found = actions.find(name);
  TORCH_CHECK(found != actions.end(), "Unknown TraceEntry action: ", name);
  return found->second;
}

void History::record(bool enabled, CreateContextFn context, size_t entries, RecordContext when, bool clear,
                     const std::vector<std::string>& skip) {
  std::lock_guard<std::recursive_mutex> guard(lock_);
  std::lock_guard<std::mutex> kept_guard(kept_lock_);
  skipped_.clear();
  for (const std::string& action : skip)
    skipped_.insert(action_of(action));
  if (clear || !enabled) {
    entries_.clear();
    annotations_.clear();
  }
  most_ = entries ? entries : 1;
  make_context_.store(enabled ? context : nullptr);
  when_.store(enabled ? when : RecordContext::NEVER);
  recording_.store(enabled, std::memory_order_release);
  watched_.store(enabled || !trackers_.empty(), std::memory_order_release);
}

void History::annotate(int device, const std::vector<std::pair<std::string, std::string>>& said) {
  Annotation annotation(static_cast<c10::DeviceIndex>(device), c10::getApproximateTime());
  for (const auto& [name, value] : said)
    annotation.recordUserMetadata(name, value);
  std::lock_guard<std::mutex> guard(kept_lock_);
  keep(annotations_, std::move(annotation));
}

std::vector<Annotation> History::annotations() {
  std::lock_guard<std::mutex> guard(kept_lock_);
  return {annotations_.begin(), annotations_.end()};
}

void History::attach(AllocatorTraceTracker tracker) {
  std::lock_guard<std::recursive_mutex> guard(lock_);
  trackers_.push_back(std::move(tracker));
  watched_.store(true, std::memory_order_release);
}

Context History::context(RecordContext level) {
  CreateContextFn make = make_context_.load();
  return make && when_.load() >= level ? make() : nullptr;
}

static bool is_mapping(TraceEntry::Action action) {
  return action == TraceEntry::SEGMENT_MAP || action == TraceEntry::SEGMENT_UNMAP;
}

void History::tell_and_keep(TraceEntry entry) {
  set_user_metadata(entry, metadata(), 0);
  if (!is_mapping(entry.action_)) // told late, and only while history is recorded: nothing to register memory by
    for (const AllocatorTraceTracker& tracker : trackers_)
      tracker(entry);
  std::lock_guard<std::mutex> guard(kept_lock_);
  if (is_recording() && !skipped_.count(entry.action_))
    keep(entries_[entry.device_], std::move(entry));
}

static TraceEntry entry_of(TraceEntry::Action action, int device, const void* address, size_t bytes,
                           cudaStream_t stream, MempoolId_t pool, const Context& context) {
  return {action,
          static_cast<c10::DeviceIndex>(device),
          reinterpret_cast<size_t>(address),
          bytes,
          stream,
          pool,
          c10::getApproximateTime(),
          context,
          said_by_thread && !said_by_thread->regions.empty() ? said_by_thread->regions.back() : "N/A"};
}

void History::add(TraceEntry::Action action, int device, const void* address, size_t bytes, cudaStream_t stream,
                  MempoolId_t pool, const Context& context) {
  Context kept = when_.load() >= RecordContext::ALLOC ? context : nullptr;
  TraceEntry entry = entry_of(action, device, address, bytes, stream, pool, kept);
  std::unique_lock<std::recursive_mutex> guard(lock_, std::defer_lock);
  if (!is_mapping(action))
    guard.lock();
  tell_and_keep(std::move(entry));
}

void History::add_free(int device, const void* address, size_t bytes, cudaStream_t stream, MempoolId_t pool,
                       const Context& context) {
  Context kept = when_.load() >= RecordContext::ALLOC ? context : nullptr;
  TraceEntry asked = entry_of(TraceEntry::FREE_REQUESTED, device, address, bytes, stream, pool, kept);
  TraceEntry free = entry_of(TraceEntry::FREE_COMPLETED, device, address, bytes, stream, pool, kept);
  std::lock_guard<std::recursive_mutex> guard(lock_);
  tell_and_keep(std::move(asked));
  tell_and_keep(std::move(free));
}

std::vector<TraceEntry> History::entries(int device) {
  std::lock_guard<std::mutex> guard(kept_lock_);
  auto found = entries_.find(device);
  if (found == entries_.end())
    return {};
  return {found->second.begin(), found->second.end()};
}

} // namespace vpmm_torch
