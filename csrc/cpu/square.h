// square: the sum of the squares of each tile (square_total adds them up), and zero: a tile of zeros.
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

FUSEDACCUM_KERNEL void zero(float* flat, const Tile* tile, int64_t count) {
  for (int64_t t = 0; t < count; ++t) {
    float* x = flat + tile[t].flat_start;
    each_pack(tile[t].count, [&](int64_t i, auto extent) { store(x + i, Vec(0.0f), extent); });
  }
}

}  // namespace fusedaccum::FUSEDACCUM_ISA
