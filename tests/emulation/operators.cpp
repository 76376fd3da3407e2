// What csrc/cuda/ops.cpp needs where there is no GPU: operators of another name to be registered under, for CPU
// tensors, and a device that is always current and has one stream. The build renames torch's functions to these.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include "schema.h"

extern "C" {

AOTITorchError emulated_create_cuda_guard(int32_t, CUDAGuardHandle* guard) {
  *guard = nullptr;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError emulated_delete_cuda_guard(CUDAGuardHandle) { return AOTI_TORCH_SUCCESS; }

AOTITorchError emulated_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return AOTI_TORCH_SUCCESS;
}

}  // extern "C"

STABLE_TORCH_LIBRARY(fusedaccum_emulated, m) {
  for (const char* schema : fusedaccum::kSchemas) m.def(schema);
}
