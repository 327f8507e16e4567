/*
 * pluggable.cpp - the two functions of a torch.cuda.memory.CUDAPluggableAllocator: memory of the device's default pool
 * (vpmm_pool_default), for programs that give it to one MemPool and leave the rest to PyTorch.
 */
#include <c10/util/Exception.h>
#include <vpmm/vpmm.h>

namespace {

vpmm_pool* pool_of(int device) {
  vpmm_pool* pool = nullptr;
  TORCH_CHECK(vpmm_pool_default(device, &pool) == VPMM_SUCCESS, "vpmm: the default pool of device ", device, ": ",
              vpmm_last_error());
  return pool;
}

} // namespace

/* NULL: there is no memory, which PyTorch tells as an error of its own. */
extern "C" __attribute__((visibility("default"))) void* vpmm_torch_malloc(size_t bytes, int device, CUstream stream) {
  CUdeviceptr address = 0;
  vpmm_status status = vpmm_malloc(pool_of(device), bytes, stream, &address);
  TORCH_CHECK(status == VPMM_SUCCESS || status == VPMM_ERROR_OUT_OF_MEMORY || status == VPMM_ERROR_OUT_OF_ADDRESS_SPACE,
              "vpmm: an allocation: ", vpmm_last_error());
  return reinterpret_cast<void*>(address);
}

/* Behind that stream. */
extern "C" __attribute__((visibility("default"))) void vpmm_torch_free(void* address, size_t, int device,
                                                                       CUstream stream) {
  vpmm_status status = vpmm_free(pool_of(device), reinterpret_cast<CUdeviceptr>(address), stream);
  TORCH_CHECK(status == VPMM_SUCCESS, "vpmm: a free: ", vpmm_last_error());
}
