// rescale: multiply segments by one factor. emit: write them out times a multiplier, rounded once.
#define FUSEDACCUM_ISA cuda
#include "pack.cuh"

namespace fusedaccum::cuda {
namespace {

constexpr int kWidth = 8;

// out = by * in. Both may be the same memory.
template <class Out>
struct Scale {
  using In = Stream<const float, kWidth>;
  In in;
  Out out;
  float by;
  In::Raw x[kUnroll] = {};

  template <class Extent>
  FUSEDACCUM_DEVICE void load(int u, int64_t i, Extent extent) {
    in.read(x[u], i, extent);
  }

  template <class Extent>
  FUSEDACCUM_DEVICE void use(int u, int64_t i, Extent extent) {
    typename Out::Raw scaled;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) Out::set(scaled, j, In::get(x[u], j) * by);
    out.write(scaled, i, extent);
  }
};

template <class T>
FUSEDACCUM_DEVICE void scale_tile(const float* in, T* out, float by, int64_t count) {
  Scale<Stream<T, kWidth>> work;
  work.in.p = in;
  work.out.p = out;
  work.by = by;
  each_pack<kWidth>(count, work.out.aligned(), work);
}

template <int kBytes>
__global__ void __launch_bounds__(kThreads)
    rescale_kernel(float* flat, const Tile* tiles, const float* factor, int64_t first_segment,
                   const Table<uint8_t, kBytes> __grid_constant__ marks) {
  const Tile tile = tiles[blockIdx.x];
  if (!(marks.at[tile.segment - first_segment] & kTouched)) return;
  scale_tile(flat + tile.flat_start, flat + tile.flat_start, *factor, tile.count);
}

template <int kBytes>
__global__ void __launch_bounds__(kThreads)
    emit_kernel(const float* flat, const Tile* tiles, const uint8_t* live, const float* scalars, int64_t first_segment,
                const Table<Entry, kBytes> __grid_constant__ grads) {
  const Tile tile = tiles[blockIdx.x];
  const Entry grad = grads.at[tile.segment - first_segment];
  if (grad.absent() || scalars[1] != 0 || (live && !live[tile.segment])) return;
  const float* in = flat + tile.flat_start;
  switch (grad.dtype()) {
    case DType::kFloat32:
      return scale_tile(in, grad.data<float>() + tile.start, scalars[0], tile.count);
    case DType::kBFloat16:
      return scale_tile(in, grad.data<BFloat16>() + tile.start, scalars[0], tile.count);
    default:
      return scale_tile(in, grad.data<Float16>() + tile.start, scalars[0], tile.count);
  }
}

}  // namespace

void rescale(const Device& device, const Buffer& buffer, const float* factor) {
  const auto wanted = [&](int64_t k) { return touched(buffer, k); };
  launch_with_marks("rescale", device, buffer, wanted, [&](const Part& part, const auto& marks) {
    auto* kernel = rescale_kernel<kSizeOf<decltype(marks)>>;
    FUSEDACCUM_LAUNCH(kernel, part.tile_count, kThreads, device.stream, buffer.flat, buffer.tiles + part.first_tile,
                      factor, part.begin, marks);
  });
}

void emit(const Device& device, const Buffer& buffer, const float* scalars, const Elements* grads) {
  const auto wanted = [&](int64_t k) { return touched(buffer, k) && grads[k].data != nullptr; };
  const auto fill = [&](int64_t k, Entry* entry) { *entry = wanted(k) ? Entry::of(grads[k]) : Entry{0}; };
  launch_parts<Entry>("emit", device, buffer, 1, wanted, fill, [&](const Part& part, const auto& table) {
    auto* kernel = emit_kernel<kSizeOf<decltype(table)>>;
    FUSEDACCUM_LAUNCH(kernel, part.tile_count, kThreads, device.stream, buffer.flat, buffer.tiles + part.first_tile,
                      buffer.live, scalars, part.begin, table);
  });
}

}  // namespace fusedaccum::cuda
