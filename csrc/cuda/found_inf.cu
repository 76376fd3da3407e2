// found_inf: whether any gradient holds an infinity or a NaN. Gradients are read, and nothing else.
#define FUSEDACCUM_ISA cuda
#include "pack.cuh"

namespace fusedaccum::cuda {
namespace {

constexpr int kWidth = 8;

// A sum of x * 0 is 0 where every x is finite, and not a number otherwise.
template <class T>
struct Look {
  using Grad = Stream<const T, kWidth>;
  Grad grad;
  typename Grad::Raw g[kUnroll] = {};
  float sum = 0;

  template <class Extent>
  FUSEDACCUM_DEVICE void load(int u, int64_t i, Extent extent) {
    grad.read(g[u], i, extent);
  }

  template <class Extent>
  FUSEDACCUM_DEVICE void use(int u, int64_t, Extent extent) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j)
      if (is_inside(j, extent)) sum = ::fmaf(Grad::get(g[u], j), 0.0f, sum);
  }
};

template <class T>
FUSEDACCUM_DEVICE bool is_finite(Entry grad, const Tile& tile) {
  Look<T> work;
  work.grad.p = grad.data<const T>() + tile.start;
  each_pack<kWidth>(tile.count, work.grad.aligned(), work);
  return work.sum == 0;
}

template <int kBytes>
__global__ void __launch_bounds__(kThreads) found_inf_kernel(const Tile* tiles, int64_t first_segment, float* found_inf,
                                                             const Table<Entry, kBytes> __grid_constant__ grads) {
  const Tile tile = tiles[blockIdx.x];
  const Entry grad = grads.at[tile.segment - first_segment];
  if (grad.absent()) return;
  bool finite;
  switch (grad.dtype()) {
    case DType::kFloat32:
      finite = is_finite<float>(grad, tile);
      break;
    case DType::kBFloat16:
      finite = is_finite<BFloat16>(grad, tile);
      break;
    default:
      finite = is_finite<Float16>(grad, tile);
  }
  constexpr unsigned kOne = 0x3f800000;  // the bits of 1.0f
  if (!finite) atomicOr(reinterpret_cast<unsigned*>(found_inf), kOne);
}

__global__ void clear_kernel(float* found_inf) { *found_inf = 0.0f; }

}  // namespace

void found_inf(const Device& device, const Buffer& buffer, const Elements* grads, float* found_inf) {
  FUSEDACCUM_LAUNCH(clear_kernel, 1, 1, device.stream, found_inf);
  check_launch("found_inf");
  const auto wanted = [&](int64_t k) { return grads[k].data != nullptr; };
  const auto fill = [&](int64_t k, Entry* entry) { *entry = Entry::of(grads[k]); };
  launch_parts<Entry>("found_inf", device, buffer, 1, wanted, fill, [&](const Part& part, const auto& table) {
    auto* kernel = found_inf_kernel<kSizeOf<decltype(table)>>;
    FUSEDACCUM_LAUNCH(kernel, part.tile_count, kThreads, device.stream, buffer.tiles + part.first_tile, part.begin,
                      found_inf, table);
  });
}

}  // namespace fusedaccum::cuda
