/*
 * asked.h - what is only asked of the CUDA runtime: a refusal is no error of the program's, whose next look for one, as
 * PyTorch has it after each kernel's launch, is to find none.
 */
#ifndef VPMM_TORCH_ASKED_H
#define VPMM_TORCH_ASKED_H

#include <cuda_runtime_api.h>

namespace vpmm_torch {

inline bool succeeds(cudaError_t answer) {
  if (answer != cudaSuccess)
    (void)cudaGetLastError();
  return answer == cudaSuccess;
}

} // namespace vpmm_torch

#endif
