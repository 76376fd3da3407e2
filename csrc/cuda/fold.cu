// fold: add one micro-batch's gradients to their segments, or overwrite segments on their first touch.
#define FUSEDACCUM_ISA cuda
#include "reduce.cuh"

namespace fusedaccum::cuda {
namespace {

constexpr int kWidth = 8;

struct FoldCall {
  float* flat;
  const Tile* tiles;
  double* partials;
  uint8_t* live;
  const float* scale;
  int64_t first_segment;
};

template <class T, bool kFirst, bool kNorm>
struct Fold {
  using Grad = Stream<const T, kWidth>;
  using Flat = Stream<float, kWidth>;
  Grad grad;
  Flat flat;
  float scale;
  typename Grad::Raw g[kUnroll] = {};
  typename Flat::Raw x[kUnroll] = {};
  double squares = 0;

  template <class Extent>
  FUSEDACCUM_DEVICE void load(int u, int64_t i, Extent extent) {
    grad.read(g[u], i, extent);
    if (!kFirst) flat.read(x[u], i, extent);
  }

  // With a scale of 0 the gradient must not be looked at: 0 * inf is not 0.
  FUSEDACCUM_DEVICE float folded(float gradient, float before) const {
    if (kFirst) return scale == 0 ? 0.0f : fold_first(Lane(scale), Lane(gradient)).x;
    return scale == 0 ? before : fold_next(Lane(scale), Lane(gradient), Lane(before)).x;
  }

  template <class Extent>
  FUSEDACCUM_DEVICE void use(int u, int64_t i, Extent extent) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float value = folded(Grad::get(g[u], j), Flat::get(x[u], j));
      Flat::set(x[u], j, value);
      if (kNorm && is_inside(j, extent)) squares += square(value);
    }
    flat.write(x[u], i, extent);
  }
};

template <class T, bool kFirst, bool kNorm>
FUSEDACCUM_DEVICE double fold_tile(const FoldCall& call, const Tile& tile, Entry grad) {
  Fold<T, kFirst, kNorm> work;
  work.grad.p = grad.data<const T>() + tile.start;
  work.flat.p = call.flat + tile.flat_start;
  work.scale = *call.scale;
  each_pack<kWidth>(tile.count, work.grad.aligned(), work);
  return work.squares;
}

template <class T, bool kNorm>
FUSEDACCUM_DEVICE double fold_dtype(const FoldCall& call, const Tile& tile, Entry grad) {
  return grad.first() ? fold_tile<T, true, kNorm>(call, tile, grad) : fold_tile<T, false, kNorm>(call, tile, grad);
}

template <int kBytes, bool kNorm>
__global__ void __launch_bounds__(kThreads)
    fold_kernel(const FoldCall call, const Table<Entry, kBytes> __grid_constant__ grads) {
  const Tile tile = call.tiles[blockIdx.x];
  const Entry grad = grads.at[tile.segment - call.first_segment];
  if (grad.absent()) return;
  if (call.live && tile.start == 0 && threadIdx.x == 0 && *call.scale != 0) call.live[tile.segment] = 1;
  double squares;
  switch (grad.dtype()) {
    case DType::kFloat32:
      squares = fold_dtype<float, kNorm>(call, tile, grad);
      break;
    case DType::kBFloat16:
      squares = fold_dtype<BFloat16, kNorm>(call, tile, grad);
      break;
    default:
      squares = fold_dtype<Float16, kNorm>(call, tile, grad);
  }
  if (kNorm) {
    const double sum = block_sum(squares);
    if (threadIdx.x == 0) call.partials[blockIdx.x] = sum;
  }
}

}  // namespace

void fold(const Device& device, const Buffer& buffer, const Elements* grads, const float* scale, double* partials) {
  const auto wanted = [&](int64_t k) { return grads[k].data != nullptr; };
  const auto fill = [&](int64_t k, Entry* entry) { *entry = Entry::of(grads[k], !touched(buffer, k)); };
  launch_parts<Entry>("fold", device, buffer, 1, wanted, fill, [&](const Part& part, const auto& table) {
    double* partial = partials ? partials + part.first_tile : nullptr;
    const FoldCall call{buffer.flat, buffer.tiles + part.first_tile, partial, buffer.live, scale, part.begin};
    constexpr int kBytes = kSizeOf<decltype(table)>;
    auto* kernel = partials ? fold_kernel<kBytes, true> : fold_kernel<kBytes, false>;
    FUSEDACCUM_LAUNCH(kernel, part.tile_count, kThreads, device.stream, call, table);
  });
}

}  // namespace fusedaccum::cuda
