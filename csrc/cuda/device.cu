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

}  // namespace fusedaccum::cuda
