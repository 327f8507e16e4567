/*
 * pytorch.h - as much of PyTorch as the back end links to, over the simulated GPU, so that it runs where there is
 * neither a GPU nor PyTorch's libraries: its headers are enough. pytorch.cpp has the rest.
 */
#ifndef VPMM_TORCH_TESTS_PYTORCH_H
#define VPMM_TORCH_TESTS_PYTORCH_H

#include <c10/cuda/CUDACachingAllocator.h>
#include <vpmm/sim.h>
#include <vpmm/vpmm.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>

#define REQUIRE(condition)                                                                                             \
  do {                                                                                                                 \
    if (!(condition)) {                                                                                                \
      std::fprintf(stderr, "%s, line %d: not so: %s (%s)\n", __FILE__, __LINE__, #condition, vpmm_last_error());       \
      std::abort();                                                                                                    \
    }                                                                                                                  \
  } while (0)

#define DRIVE(call) REQUIRE(simulated.driver->call == CUDA_SUCCESS)

struct simulated_gpu {
  vpmm_sim* sim;
  const vpmm_driver* driver;
  CUcontext context;
};

/* What PYTORCH_CUDA_ALLOC_CONF would say. */
struct torch_settings {
  std::atomic<size_t> roundup_power2_divisions{0};
};

extern simulated_gpu simulated;
extern torch_settings settings;

using Back = c10::cuda::CUDACachingAllocator::CUDAAllocator;

void check_cases(Back&); // cases.cpp

void torch_open();                            // a simulated GPU, and an allocator of PyTorch's that was not used yet
void torch_set_current_stream(CUstream);      // of the calling thread
c10::cuda::CUDAStream torch_stream(CUstream); // as PyTorch has it

#endif
