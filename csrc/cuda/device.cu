// What these kernels were compiled for, and what the current device and its driver can take.
#define FUSEDACCUM_ISA cuda
#include "kernels.h"

namespace fusedaccum::cuda {

bool takes_wide_arguments() {
  int driver = 0, device = 0, major = 0;
  cudaDriverGetVersion(&driver);
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  return driver >= 12010 && major >= 7;
}

std::vector<int> architectures() {
#if defined(__CUDA_ARCH_LIST__)
  return {__CUDA_ARCH_LIST__};
#else
  return {};
#endif
}

// Only nvcc's build asks for it; the tests' emulation has no device to ask.
#if defined(__CUDACC__)

namespace {
__global__ void probe_kernel() {}
}  // namespace

bool runs_on(int device) {
  int current = 0;
  cudaGetDevice(&current);
  cudaSetDevice(device);
  cudaFuncAttributes attributes;
  const bool found = cudaFuncGetAttributes(&attributes, probe_kernel) == cudaSuccess;
  cudaGetLastError();  // it is answered, and must not show in a later launch
  cudaSetDevice(current);
  return found;
}

#endif

}  // namespace fusedaccum::cuda
