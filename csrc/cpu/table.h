// The table of this translation unit's kernels.
#pragma once

#include "adam.h"
#include "fold.h"
#include "kernels.h"
#include "rescale.h"
#include "sgd.h"
#include "square.h"

namespace fusedaccum::FUSEDACCUM_ISA {

inline constexpr Kernels table(const char* isa) {
  return {isa, fold, all_finite, square, rescale, emit, adam, sgd, zero, fence};
}

}  // namespace fusedaccum::FUSEDACCUM_ISA
