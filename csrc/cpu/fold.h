// fold: add one micro-batch's gradient to its segment, or overwrite the segment with it on the first touch.
#pragma once

#include "../rules.h"
#include "kernels.h"
#include "square.h"
#include "vec.h"

namespace fusedaccum::FUSEDACCUM_ISA {

template <class T, bool kFirst, bool kNorm, bool kStream>
FUSEDACCUM_KERNEL void fold_tile(const FoldRun& run, const Tile& tile, double* partial) {
  float* flat = run.flat + tile.flat_start;
  const T* grad = static_cast<const T*>(run.grad.data) + tile.start;
  const Vec scale(run.scale);
  Squares squares;
  each_pack(tile.count, [&](int64_t i, auto extent) {
    const Vec g = load(grad + i, extent);
    const Vec x = kFirst ? fold_first(scale, g) : fold_next(scale, g, load(flat + i, extent));
    if (kStream) {
      stream(flat + i, x, extent);
    } else {
      store(flat + i, x, extent);
    }
    if (kNorm) squares.add(x, extent);
  });
  if (kNorm) *partial = squares.total();
}

template <class T, bool kNorm>
static void fold_run(const FoldRun& run, const Tile* tile, int64_t count) {
  auto* one_tile = !run.first   ? fold_tile<T, false, kNorm, false>
                   : run.stream ? fold_tile<T, true, kNorm, true>
                                : fold_tile<T, true, kNorm, false>;
  for (int64_t t = 0; t < count; ++t) one_tile(run, tile[t], kNorm ? run.partial + t : nullptr);
}

// With a scale of 0 the gradient must not be looked at: 0 * inf is not 0.
static void fold_nothing(const FoldRun& run, const Tile* tile, int64_t count) {
  if (run.first) zero(run.flat, tile, count);
  if (run.partial) square(run.flat, run.partial, tile, count);
}

template <class T>
static void fold_dtype(const FoldRun& run, const Tile* tile, int64_t count) {
  run.partial ? fold_run<T, true>(run, tile, count) : fold_run<T, false>(run, tile, count);
}

static void fold(const FoldRun& run, const Tile* tile, int64_t count) {
  if (run.scale == 0) return fold_nothing(run, tile, count);
  switch (run.grad.dtype) {
    case DType::kFloat32:
      return fold_dtype<float>(run, tile, count);
    case DType::kBFloat16:
      return fold_dtype<BFloat16>(run, tile, count);
    case DType::kFloat16:
      return fold_dtype<Float16>(run, tile, count);
  }
}

}  // namespace fusedaccum::FUSEDACCUM_ISA
