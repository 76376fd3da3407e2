// The importable module `fusedaccum._C`. Importing it registers the operators (ops.cpp); what it holds itself is not a
// tensor operation.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "cpu/isa.h"
#include "tiles.h"

namespace {

std::string compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#elif defined(__GNUC__)
  return "gcc " __VERSION__;
#else
  return "unknown";
#endif
}

pybind11::dict build_info() {
  pybind11::dict info;
  info["compiler"] = compiler();
  info["isa"] = fusedaccum::kernels().isa;
  info["isas_built"] = fusedaccum::isas_built();
  info["cuda"] = FUSEDACCUM_CUDA_STATUS;
  info["torch_target"] =
      std::to_string(TORCH_TARGET_VERSION >> 56) + "." + std::to_string(TORCH_TARGET_VERSION >> 48 & 255);
  info["tile"] = fusedaccum::kTile;
  info["align"] = fusedaccum::kAlign;
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The C++ operators of fusedaccum, registered as torch.ops.fusedaccum.* when this module is imported.";
  m.attr("CUDA_STATUS") = FUSEDACCUM_CUDA_STATUS;
  m.def("build_info", &build_info,
        "How the operators were built, and the instruction set that they run on. Raises RuntimeError where the\n"
        "environment variable FUSEDACCUM_ISA names one that is unknown or that this processor lacks.");
}
