// fold: add micro-batches' gradients to their segments, or overwrite segments on their first touch.
#define FUSEDACCUM_ISA cuda
#include "sum.cuh"

namespace fusedaccum::cuda {
namespace {

constexpr int kWidth = kSumWidth;

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
  work.scale = call.scale[grad.batch()];
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
  if (call.live && tile.start == 0 && threadIdx.x == 0 && call.scale[grad.batch()] != 0) call.live[tile.segment] = 1;
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

// Takes sums to the flat buffer.
template <bool kNorm>
struct Stored {
  static constexpr int kMostBytes = 16;
  Stream<float, kWidth> flat;
  double squares = 0;

  template <class Raw, class Extent>
  FUSEDACCUM_DEVICE void take(const Raw& raw, int64_t i, Extent extent) {
    if (kNorm) add_squares(squares, raw, extent);
    flat.write(raw, i, extent);
  }
};

// Where a segment has more than one gradient. Four blocks a multiprocessor: 64 registers.
template <int kBytes, bool kNorm>
__global__ void __launch_bounds__(kThreads, 4) fold_several_kernel(const FoldCall call, const Gradients several,
                                                                   const Table<Entry, kBytes> __grid_constant__ table) {
  const Tile tile = call.tiles[blockIdx.x];
  const OfSegment<kBytes> grads{table, several, tile.segment};
  if (grads[0].absent()) return;
  if (call.live && tile.start == 0 && threadIdx.x == 0)
    for (int j = 0; j < grads.count(); ++j)
      if (grads.scale(j) != 0) call.live[tile.segment] = 1;
  float* flat = call.flat + tile.flat_start;
  Stored<kNorm> sums{{flat}};
  sum_tile(grads, tile, flat, sums);
  if (kNorm) {
    const double sum = block_sum(sums.squares);
    if (threadIdx.x == 0) call.partials[blockIdx.x] = sum;
  }
}

void fold_run(const Device& device, const Buffer& buffer, const Run& run, double* partials) {
  const int most = run.most();
  if (most == 0) return;
  const auto wanted = [&](int64_t k) { return run.count_of(k) > 0; };
  const auto fill = [&](int64_t k, Entry* entries) { run.fill(k, buffer.marks[k], most, entries); };
  const float* scale = run.batches.scale + run.begin;
  launch_parts<Entry>("fold", device, buffer, most, wanted, fill, [&](const Part& part, const auto& table) {
    double* partial = partials ? partials + part.first_tile : nullptr;
    const FoldCall call{buffer.flat, buffer.tiles + part.first_tile, partial, buffer.live, scale, part.begin};
    constexpr int kBytes = kSizeOf<decltype(table)>;
    if (most == 1) {
      auto* kernel = partials ? fold_kernel<kBytes, true> : fold_kernel<kBytes, false>;
      FUSEDACCUM_LAUNCH(kernel, part.tile_count, kThreads, device.stream, call, table);
    } else {
      const Gradients several{scale, part.begin, most, 0, most};
      auto* kernel = partials ? fold_several_kernel<kBytes, true> : fold_several_kernel<kBytes, false>;
      FUSEDACCUM_LAUNCH(kernel, part.tile_count, kThreads, device.stream, call, several, table);
    }
  });
}

}  // namespace

void fold(const Device& device, const Buffer& buffer, const Batches& grads, double* partials) {
  for (int64_t begin = 0; begin < grads.count; begin += kMostBatches)
    fold_run(device, buffer, Run{grads, begin, std::min(grads.count, begin + kMostBatches)}, partials);
}

}  // namespace fusedaccum::cuda
