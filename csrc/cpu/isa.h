// Which instruction set the kernels run on: the widest that the processor has, or the one FUSEDACCUM_ISA names.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace fusedaccum {

// Chosen at the first call. Throws std::runtime_error where FUSEDACCUM_ISA names one that is unknown or cannot run
// here.
const Kernels& kernels();

// Names of the instruction sets that this binary holds, widest first.
std::vector<std::string> isas_built();

}  // namespace fusedaccum
