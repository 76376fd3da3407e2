// What a torch with CUDA gives to fusedaccum._cuda, for linking it beside a torch without: never called there.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdlib>

extern "C" {

AOTITorchError aoti_torch_create_cuda_guard(int32_t, CUDAGuardHandle*) { std::abort(); }
AOTITorchError aoti_torch_delete_cuda_guard(CUDAGuardHandle) { std::abort(); }
AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void**) { std::abort(); }

}  // extern "C"
