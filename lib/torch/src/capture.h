/*
 * capture.h - what a capture under way has put in order: whether all that a stream will do in it comes after what other
 * streams have done.
 *
 *   frontier   of a stream that captures: the nodes of the graph that its next node will depend on
 *   point      the frontiers of several streams at one moment of one capture. Work on them up to there is these nodes
 *              and what they depend on
 *   behind     a stream is behind a point if its frontier depends on each node of it. So then is all that it will do in
 *              this capture, in each replay too
 *
 * Nodes are asked from CUDA, and only of a capture that is under way: a point has names of nodes, which it looks at no
 * more. A frontier that depends on all of the one before depends on all that this depended on, so each node is asked
 * once for a stream and a capture, unless the program sets the stream's dependencies itself.
 */
#ifndef VPMM_TORCH_CAPTURE_H
#define VPMM_TORCH_CAPTURE_H

#include <cstddef>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <cuda_runtime_api.h>

namespace vpmm_torch {

struct CapturePoint {
  unsigned long long capture = 0; // its id; 0: of none
  std::vector<cudaGraphNode_t> nodes;
};

class CaptureOrder {
 public:
  /* Where the streams are now; of no capture if not all of them are in one. */
  static CapturePoint point(const std::vector<cudaStream_t>& streams);

  /* False also if the stream is in another capture, or in none. */
  bool is_behind(cudaStream_t stream, const CapturePoint& point);

  /* What is known of captures: after the end of one. */
  void forget();

 private:
  struct Known {
    unsigned long long capture = 0;
    std::vector<cudaGraphNode_t> frontier;
    std::unordered_set<cudaGraphNode_t> before; // the frontier, and all that it depends on
  };

  static bool move_on(Known& known, const std::vector<cudaGraphNode_t>& frontier);

  std::mutex lock_;
  std::unordered_map<cudaStream_t, Known> known_;
};

} // namespace vpmm_torch

#endif
