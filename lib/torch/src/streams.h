/*
 * streams.h - which streams are PyTorch's own: those of its pools, which it never destroys.
 *
 * A stream that the program has made (torch.cuda.ExternalStream) it may destroy after any call that was given it, so
 * that nobody else may touch its handle. Streams of the pools last, and calls with other streams may record on them
 * too.
 */
#ifndef VPMM_TORCH_STREAMS_H
#define VPMM_TORCH_STREAMS_H

#include <c10/cuda/CUDAStream.h>

namespace vpmm_torch {

extern __thread cudaStream_t latest_stream __attribute__((visibility("hidden"), tls_model("initial-exec")));

void note_pytorchs(cudaStream_t stream);

/* Its handle. By each request and each use: another stream than the thread's latest is looked at. Lock-free. */
inline cudaStream_t note_stream(const c10::cuda::CUDAStream& stream) {
  const cudaStream_t handle = stream.stream();
  if (handle != latest_stream) {
    latest_stream = handle;
    constexpr c10::StreamId OF_A_POOL = 1; // the bit in which its numbers differ from the default's and from addresses
    if (stream.id() & OF_A_POOL)
      note_pytorchs(handle);
  }
  return handle;
}

/* Whether it was noted. False for more streams than a program has: see streams.cpp. Lock-free. */
bool is_pytorchs(cudaStream_t stream);

} // namespace vpmm_torch

#endif
