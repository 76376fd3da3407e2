// square: the sum of the squares of each tile (square_total adds them up). all_finite: a look at a gradient. zero: a
// tile of zeros.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace fusedaccum::FUSEDACCUM_ISA {

FUSEDACCUM_KERNEL void square(const float* flat, double* partial, const Tile* tile, int64_t count) {
  for (int64_t t = 0; t < count; ++t) {
    const float* x = flat + tile[t].flat_start;
    Squares squares;
    each_pack(tile[t].count, [&](int64_t i, auto extent) { squares.add(load(x + i, extent), extent); });
    partial[t] = squares.total();
  }
}

// Whether every element is finite: a sum of x * 0 is 0 then, and not a number otherwise.
FUSEDACCUM_KERNEL bool all_finite(Elements grad, const Tile* tile, int64_t count) {
  bool finite = true;
  for (int64_t t = 0; finite && t < count; ++t) {
    const int64_t start = tile[t].start;
    Vec sum(0.0f);
    each_pack(tile[t].count, [&](int64_t i, auto extent) { sum = fma(load(grad, start + i, extent), Vec(0.0f), sum); });
    float lanes[kLanes];
    store(lanes, sum, Full());
    for (float lane : lanes) finite = finite && lane == 0.0f;
  }
  return finite;
}

FUSEDACCUM_KERNEL void zero(float* flat, const Tile* tile, int64_t count) {
  for (int64_t t = 0; t < count; ++t) {
    float* x = flat + tile[t].flat_start;
    each_pack(tile[t].count, [&](int64_t i, auto extent) { store(x + i, Vec(0.0f), extent); });
  }
}

}  // namespace fusedaccum::FUSEDACCUM_ISA
