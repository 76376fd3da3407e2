// adam: Adam and AdamW on one segment. Every stream is read once and written once, in its own dtype.
#pragma once

#include "../rules.h"
#include "kernels.h"
#include "random.h"
#include "vec.h"

namespace fusedaccum::FUSEDACCUM_ISA {

FUSEDACCUM_KERNEL void adam(const AdamRun& run_in, const Tile* tile, int64_t count) {
  const AdamRun run = run_in;  // a copy that no store can alias: the factors stay in registers
  const Elements master{run.master, DType::kFloat32};
  const Elements source = run.master ? master : run.param;
  for (int64_t t = 0; t < count; ++t) {
    float* flat = run.flat + tile[t].flat_start;
    const int64_t start = tile[t].start;
    RandomBits random;
    if (run.rounding.stochastic) random.fill(run.rounding.noise, tile[t]);
    each_pack(tile[t].count, [&](int64_t i, auto extent) {
      const int64_t j = start + i;
      AdamState<Vec> s;
      s.p = load(source, j, extent);
      s.m = load(run.exp_avg, j, extent);
      s.v = load(run.exp_avg_sq, j, extent);
      if (run.factors.amsgrad) s.v_max = load(run.max_exp_avg_sq, j, extent);
      adam(run.factors, load(flat + i, extent), s);
      store(run.param, j, run.rounding.stochastic ? random.round(s.p, i) : s.p, extent);
      store(run.exp_avg, j, s.m, extent);
      store(run.exp_avg_sq, j, s.v, extent);
      if (run.factors.amsgrad) store(run.max_exp_avg_sq, j, s.v_max, extent);
      if (run.master) store(master, j, s.p, extent);
      if (run.zero) store(flat + i, Vec(0.0f), extent);
    });
  }
}

}  // namespace fusedaccum::FUSEDACCUM_ISA
