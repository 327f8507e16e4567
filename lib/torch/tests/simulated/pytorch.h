/*
 * pytorch.h - as much of PyTorch as the back end links to, over the simulated GPU, so that it runs where there is
 * neither a GPU nor PyTorch's libraries: its headers are enough. pytorch.cpp has the rest.
 */
#ifndef VPMM_TORCH_TESTS_PYTORCH_H
#define VPMM_TORCH_TESTS_PYTORCH_H

#include <c10/cuda/CUDACachingAllocator.h>
#include <vpmm/sim.h>
#include <vpmm/vpmm.h>

struct simulated_gpu {
  vpmm_sim* sim;
  const vpmm_driver* driver;
  CUcontext context;
};

extern simulated_gpu simulated;

void torch_open();                            // a simulated GPU, and an allocator of PyTorch's that was not used yet
void torch_set_current_stream(CUstream);      // of the calling thread
c10::cuda::CUDAStream torch_stream(CUstream); // as PyTorch has it

#endif
