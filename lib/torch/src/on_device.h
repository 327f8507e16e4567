/*
 * on_device.h - a device made current for a while: streams and events belong to one, and so does what is made next.
 */
#ifndef VPMM_TORCH_ON_DEVICE_H
#define VPMM_TORCH_ON_DEVICE_H

#include <cuda_runtime_api.h>

namespace vpmm_torch {

class OnDevice {
 public:
  explicit OnDevice(int device)
      : knows_former_(cudaGetDevice(&former_) == cudaSuccess), is_on_(cudaSetDevice(device) == cudaSuccess) {}
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  ~OnDevice() {
    if (knows_former_)
      cudaSetDevice(former_);
  }

  bool is_on() const {
    return is_on_;
  }

 private:
  int former_ = 0;
  const bool knows_former_, is_on_;
};

} // namespace vpmm_torch

#endif
