/*
 * pytorch.h - as much of PyTorch as the back end links to, over the simulated GPU, so that it runs where there is
 * neither a GPU nor PyTorch's libraries: its headers are enough. pytorch.cpp has the rest.
 */
#ifndef VPMM_TORCH_TESTS_PYTORCH_H
#define VPMM_TORCH_TESTS_PYTORCH_H

#include "../../src/compat.h"

#include <vpmm/sim.h>
#include <vpmm/vpmm.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

using vpmm_torch::MempoolId_t;

#define REQUIRE(condition)                                                                                          \
  do {                                                                                                              \
    if (!(condition)) {                                                                                             \
      std::fprintf(stderr, "%s%s%s, line %d: not so: %s (%s)\n", what_runs ? what_runs : "", what_runs ? ": " : "", \
                   __FILE__, __LINE__, #condition, vpmm_last_error());                                              \
      std::abort();                                                                                                 \
    }                                                                                                               \
  } while (0)

#define DRIVE(call) REQUIRE(simulated.driver->call == CUDA_SUCCESS)

struct simulated_gpu {
  vpmm_sim* sim;
  const vpmm_driver* driver;
  CUcontext context;
  CUcontext peer_context; // of a second device, which PyTorch does not know
};

/* What PYTORCH_CUDA_ALLOC_CONF would say. */
struct torch_settings {
  std::atomic<size_t> roundup_power2_divisions{0};
};

extern simulated_gpu simulated;
extern const char* what_runs; // the case under way; NULL: none
extern torch_settings settings;

using Back = c10::cuda::CUDACachingAllocator::CUDAAllocator;

void list_cases();                                            // cases.cpp, as the next two
void run_cases(Back&, const std::vector<std::string>& names); // none: all
void run_shuffled_cases(Back&, uint64_t seed);
void check_counts();                                            // counts.cpp
void run_threads(Back&, int threads, int steps, uint64_t seed); // random.cpp

void record_history(Back&, size_t);                                          // of so many entries; 0: no more
void record_contexts(Back&, c10::cuda::CUDACachingAllocator::RecordContext); // a new one each time
bool set_reuse_in_captures(bool); // graph_capture_record_stream_reuse. False: PyTorch has no such setting

/*
 * Captures, with the graph that they make: the simulated GPU counts captured work and drops it. Each of these makes the
 * driver's call, and none by any other way is in the graph. A capture's streams are the caller's, joined at its end.
 */
void capture_begin(CUstream, CUstreamCaptureMode);
void capture_end(CUstream);
bool captures(CUstream);
void capture_work(CUstream, CUdeviceptr, size_t bytes); // a write, also where nothing is captured
void capture_wait(CUstream, CUstream on);               // likewise
void capture_set_frontier(CUstream, cudaGraphNode_t);   // as cudaStreamUpdateCaptureDependencies does
cudaGraphNode_t capture_last(CUstream);                 // node; NULL: it has none
bool capture_is_behind(CUstream, cudaGraphNode_t);      // whether the stream's next work comes after the node

void torch_open();                       // a simulated GPU, and an allocator of PyTorch's that was not used yet
void torch_set_current_stream(CUstream); // of the calling thread, as the next
CUstream torch_current_stream();
c10::cuda::CUDAStream torch_stream(CUstream, int device = 0); // as PyTorch has it
void torch_profile(bool);                                     // with profile_memory
std::vector<int64_t> torch_profiled_shortages();              // bytes of each that the profiler was told
void torch_before_locks(const std::function<void()>*);        // of the calling thread, each; NULL: nothing
void torch_own_stream(CUstream);                              // it is of one of PyTorch's pools, and lasts
void torch_former_holds(int64_t bytes);                       // the allocator whose place is taken; as the next
void torch_former_has(MempoolId_t);                           // a MemPool of its own, with one more user
void torch_former_allows(double fraction);
void torch_former_records(bool);

#endif
