/*
 * on_device.h - a device made current for a while: streams and events belong to one, and so does what is made next.
 *
 * The former one is made current as PyTorch does it, which makes no context on a device that has none: in a process for
 * each GPU, none of which is to have one on the first.
 */
#ifndef VPMM_TORCH_ON_DEVICE_H
#define VPMM_TORCH_ON_DEVICE_H

#include <exception>

#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>

namespace vpmm_torch {

class OnDevice {
 public:
  explicit OnDevice(int device)
      : knows_former_(c10::cuda::GetDevice(&former_) == cudaSuccess), is_on_(cudaSetDevice(device) == cudaSuccess) {}
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  ~OnDevice() {
    try { // PyTorch throws where the driver is gone already, as at the process's end
      if (knows_former_)
        (void)c10::cuda::MaybeSetDevice(former_);
    } catch (const std::exception&) {
    }
  }

  bool is_on() const {
    return is_on_;
  }

 private:
  c10::DeviceIndex former_ = 0;
  const bool knows_former_, is_on_;
};

} // namespace vpmm_torch

#endif
