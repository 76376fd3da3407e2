// The importable module `fusedaccum._cuda`. Importing it registers the operators for CUDA tensors (ops.cpp).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "kernels.h"

PYBIND11_MODULE(_cuda, m) {
  m.def("runs_on", &fusedaccum::cuda::runs_on, "Whether the kernels were compiled for the device of this index.");
  m.doc() = "The CUDA operators of fusedaccum, registered as torch.ops.fusedaccum.* when this module is imported.";
  m.def(
      "build_info",
      [] {
        pybind11::dict info;
        info["toolkit"] = std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION / 10 % 100);
        info["architectures"] = fusedaccum::cuda::architectures();
        return info;
      },
      "CUDA toolkit and GPU architectures that the kernels were compiled with and for.");
}
