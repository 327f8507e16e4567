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

/* Another stream's capture in PyTorch's usual mode would forbid the thread to ask for events, and be lost by it. */
class RelaxedMode {
 public:
  RelaxedMode() : has_(succeeds(cudaThreadExchangeStreamCaptureMode(&mode_))) {}
  RelaxedMode(const RelaxedMode&) = delete;
  RelaxedMode& operator=(const RelaxedMode&) = delete;

  ~RelaxedMode() {
    if (has_)
      cudaThreadExchangeStreamCaptureMode(&mode_);
  }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
  const bool has_;
};

} // namespace vpmm_torch

#endif
