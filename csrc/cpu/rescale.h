// rescale: multiply a segment by one factor. emit: write it out times a multiplier, rounded once.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace fusedaccum::FUSEDACCUM_ISA {

FUSEDACCUM_KERNEL void rescale(float* flat, float factor, const Tile* tile, int64_t count) {
  for (int64_t t = 0; t < count; ++t) {
    float* x = flat + tile[t].flat_start;
    each_pack(tile[t].count, [&](int64_t i, auto extent) { store(x + i, load(x + i, extent) * Vec(factor), extent); });
  }
}

FUSEDACCUM_KERNEL void emit(const float* flat, Elements grad, float multiplier, const Tile* tile, int64_t count) {
  for (int64_t t = 0; t < count; ++t) {
    const float* x = flat + tile[t].flat_start;
    const int64_t start = tile[t].start;
    each_pack(tile[t].count,
              [&](int64_t i, auto extent) { store(grad, start + i, load(x + i, extent) * Vec(multiplier), extent); });
  }
}

}  // namespace fusedaccum::FUSEDACCUM_ISA
