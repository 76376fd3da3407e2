// fold: add the gradients of some micro-batches to their segment, or overwrite the segment with their sum on the first
// touch.
#pragma once

#include "../rules.h"
#include "kernels.h"
#include "sum.h"
#include "vec.h"

namespace fusedaccum::FUSEDACCUM_ISA {

// Gradients that are added in a loop made for their number and dtype. Longer lists, and mixtures, take TileSum's.
constexpr int kMostAtOnce = 4;

// Bytes that are asked for ahead. Several streams of float32, and four of bfloat16, are 4 to 7 % faster with it, the
// others as fast (Zen 4, from memory, one thread); 1,024 and more cost a fifth.
constexpr int kAhead = 256;

enum class Store { kPlain, kStream };

template <Store kStore, class Extent>
FUSEDACCUM_INLINE void put(float* p, Vec x, Extent extent) {
  if (kStore == Store::kStream) {
    stream(p, x, extent);
  } else {
    store(p, x, extent);
  }
}

inline void fetch(const void* p) { __builtin_prefetch(static_cast<const char*>(p) + kAhead); }

// kCount gradients of dtype T.
template <class T, int kCount, bool kFirst, bool kNorm, Store kStore>
FUSEDACCUM_KERNEL void fold_some(const FoldRun& run, const Tile& tile, double* partial) {
  float* flat = run.flat + tile.flat_start;
  const T* grads[kCount];
  float scales[kCount];
  for (int j = 0; j < kCount; ++j) {
    grads[j] = static_cast<const T*>(run.sum.sources[j].grad.data) + tile.start;
    scales[j] = run.sum.sources[j].scale;
  }
  Squares squares;
  each_pack(tile.count, [&](int64_t i, auto extent) {
#pragma GCC unroll 4
    for (int j = 0; j < kCount; ++j) fetch(grads[j] + i);
    if (!kFirst) fetch(flat + i);
    Vec x = load(grads[0] + i, extent);
    x = kFirst ? fold_first(Vec(scales[0]), x) : fold_next(Vec(scales[0]), x, load(flat + i, extent));
#pragma GCC unroll 4
    for (int j = 1; j < kCount; ++j) x = fold_next(Vec(scales[j]), load(grads[j] + i, extent), x);
    put<kStore>(flat + i, x, extent);
    if (kNorm) squares.add(x, extent);
  });
  if (kNorm) *partial = squares.total();
}

// Whatever is to be added.
template <bool kNorm, Store kStore>
FUSEDACCUM_KERNEL void fold_any(const FoldRun& run, const Tile& tile, double* partial) {
  float* flat = run.flat + tile.flat_start;
  const TileSum sum(run.sum, flat, tile);
  Squares squares;
  each_pack(tile.count, [&](int64_t i, auto extent) {
    const Vec x = sum.at(i, extent);
    put<kStore>(flat + i, x, extent);
    if (kNorm) squares.add(x, extent);
  });
  if (kNorm) *partial = squares.total();
}

using FoldTile = void (*)(const FoldRun&, const Tile&, double*);

template <class T, int kCount>
static FoldTile some(bool first, bool norm, bool stream) {
  if (!first)
    return norm ? fold_some<T, kCount, false, true, Store::kPlain> : fold_some<T, kCount, false, false, Store::kPlain>;
  if (stream)
    return norm ? fold_some<T, kCount, true, true, Store::kStream> : fold_some<T, kCount, true, false, Store::kStream>;
  return norm ? fold_some<T, kCount, true, true, Store::kPlain> : fold_some<T, kCount, true, false, Store::kPlain>;
}

template <class T>
static FoldTile some(int count, bool first, bool norm, bool stream) {
  switch (count) {
    case 1:
      return some<T, 1>(first, norm, stream);
    case 2:
      return some<T, 2>(first, norm, stream);
    case 3:
      return some<T, 3>(first, norm, stream);
    default:
      return some<T, kMostAtOnce>(first, norm, stream);
  }
}

static FoldTile any(bool norm, bool stream) {
  if (stream) return norm ? fold_any<true, Store::kStream> : fold_any<false, Store::kStream>;
  return norm ? fold_any<true, Store::kPlain> : fold_any<false, Store::kPlain>;
}

static bool are_usual(const Sum& sum) {
  for (int32_t j = 1; j < sum.count; ++j)
    if (sum.sources[j].grad.dtype != sum.sources[0].grad.dtype) return false;
  return sum.count > 0 && sum.count <= kMostAtOnce && sum.start != Start::kZero;
}

static FoldTile choose(const Sum& sum, bool norm, bool stream) {
  const bool first = sum.start != Start::kFlat;
  if (!are_usual(sum)) return any(norm, first && stream);
  switch (sum.sources[0].grad.dtype) {
    case DType::kFloat32:
      return some<float>(sum.count, first, norm, stream);
    case DType::kBFloat16:
      return some<BFloat16>(sum.count, first, norm, stream);
    default:
      return some<Float16>(sum.count, first, norm, stream);
  }
}

static void fold(const FoldRun& run, const Tile* tile, int64_t count) {
  if (run.sum.count == 0 && run.sum.start == Start::kFlat && run.partial == nullptr) return;  // nothing is added
  const FoldTile one_tile = choose(run.sum, run.partial != nullptr, run.stream);
  for (int64_t t = 0; t < count; ++t) one_tile(run, tile[t], run.partial ? run.partial + t : nullptr);
}

}  // namespace fusedaccum::FUSEDACCUM_ISA
