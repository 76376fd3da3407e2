// sgd: stochastic gradient descent on one segment, with and without a momentum buffer.
#pragma once

#include "../rules.h"
#include "kernels.h"
#include "random.h"
#include "vec.h"

namespace fusedaccum::FUSEDACCUM_ISA {

FUSEDACCUM_KERNEL void sgd(const SgdRun& run_in, const Tile* tile, int64_t count) {
  const SgdRun run = run_in;  // a copy that no store can alias: the factors stay in registers
  const Elements master{run.master, DType::kFloat32};
  const Elements source = run.master ? master : run.param;
  const bool with_momentum = run.momentum_buffer.data != nullptr;
  for (int64_t t = 0; t < count; ++t) {
    float* flat = run.flat + tile[t].flat_start;
    const int64_t start = tile[t].start;
    RandomBits random;
    if (run.rounding.stochastic) random.fill(run.rounding.noise, tile[t]);
    each_pack(tile[t].count, [&](int64_t i, auto extent) {
      const int64_t j = start + i;
      SgdState<Vec> s;
      s.p = load(source, j, extent);
      s.b = with_momentum && !run.factors.first ? load(run.momentum_buffer, j, extent) : Vec(0.0f);
      sgd(run.factors, with_momentum, load(flat + i, extent), s);
      store(run.param, j, run.rounding.stochastic ? random.round(s.p, i) : s.p, extent);
      if (with_momentum) store(run.momentum_buffer, j, s.b, extent);
      if (run.master) store(master, j, s.p, extent);
      if (run.zero) store(flat + i, Vec(0.0f), extent);
    });
  }
}

}  // namespace fusedaccum::FUSEDACCUM_ISA
