#include "capture.h"

#include "asked.h"

namespace vpmm_torch {

namespace {

/* Of one stream, now. The nodes are the runtime's own, and good until the stream's next. */
struct Frontier {
  unsigned long long capture = 0; // 0: it does not capture, or its capture is lost
  const cudaGraphNode_t* nodes = nullptr;
  size_t count = 0;
};

Frontier frontier_of(cudaStream_t stream) {
  Frontier found;
  unsigned long long capture = 0;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
#if CUDART_VERSION >= 13000
  cudaError_t error = cudaStreamGetCaptureInfo(stream, &status, &capture, nullptr, &found.nodes, nullptr, &found.count);
#else
  cudaError_t error = cudaStreamGetCaptureInfo_v2(stream, &status, &capture, nullptr, &found.nodes, &found.count);
#endif
  if (succeeds(error) && status == cudaStreamCaptureStatusActive)
    found.capture = capture;
  return found;
}

cudaError_t ask_dependencies(cudaGraphNode_t node, cudaGraphNode_t* nodes, size_t* count) {
#if CUDART_VERSION >= 13000
  return cudaGraphNodeGetDependencies(node, nodes, nullptr, count);
#else
  return cudaGraphNodeGetDependencies(node, nodes, count);
#endif
}

bool dependencies_of(cudaGraphNode_t node, std::vector<cudaGraphNode_t>& out) {
  size_t count = 0;
  bool known = succeeds(ask_dependencies(node, nullptr, &count));
  out.resize(known ? count : 0);
  return known && (out.empty() || succeeds(ask_dependencies(node, out.data(), &count)));
}

} // namespace

CapturePoint CaptureOrder::point(const std::vector<cudaStream_t>& streams) {
  CapturePoint point;
  for (cudaStream_t stream : streams) {
    Frontier frontier = frontier_of(stream);
    if (!frontier.capture || (point.capture && point.capture != frontier.capture))
      return {};
    point.capture = frontier.capture;
    point.nodes.insert(point.nodes.end(), frontier.nodes, frontier.nodes + frontier.count);
  }
  return point;
}

/* False: CUDA would not say, or it does not depend on all of the frontier before. */
bool CaptureOrder::move_on(Known& known, const std::vector<cudaGraphNode_t>& frontier) {
  std::unordered_set<cudaGraphNode_t> met; // what was known and is depended on
  std::vector<cudaGraphNode_t> next = frontier, dependencies;
  while (!next.empty()) {
    cudaGraphNode_t node = next.back();
    next.pop_back();
    if (!known.before.insert(node).second) {
      met.insert(node);
      continue;
    }
    if (!dependencies_of(node, dependencies))
      return false;
    next.insert(next.end(), dependencies.begin(), dependencies.end());
  }
  for (cudaGraphNode_t node : known.frontier)
    if (!met.count(node))
      return false;
  known.frontier = frontier;
  return true;
}

bool CaptureOrder::is_behind(cudaStream_t stream, const CapturePoint& point) {
  Frontier now = frontier_of(stream);
  if (!point.capture || now.capture != point.capture)
    return false;
  std::vector<cudaGraphNode_t> frontier(now.nodes, now.nodes + now.count);
  std::lock_guard<std::mutex> guard(lock_);
  Known& known = known_[stream];
  if (known.capture != now.capture || !move_on(known, frontier)) {
    known = {now.capture, {}, {}};
    if (!move_on(known, frontier)) {
      known_.erase(stream);
      return false;
    }
  }
  for (cudaGraphNode_t node : point.nodes)
    if (!known.before.count(node))
      return false;
  return true;
}

void CaptureOrder::forget() {
  std::lock_guard<std::mutex> guard(lock_);
  known_.clear();
}

} // namespace vpmm_torch
