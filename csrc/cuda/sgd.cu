// sgd: stochastic gradient descent on every touched segment.
#define FUSEDACCUM_ISA cuda
#include "update.cuh"

namespace fusedaccum::cuda {
namespace {

enum { kParam, kMomentumBuffer, kMaster };

template <class Param, class Momentum, class Master, class Rounding, bool kZero>
struct Sgd {
  using Flat = Stream<float, kStepWidth>;
  const SgdFactors& factors;
  Flat flat;
  Param param;
  Momentum buffer;
  Master master;
  Rounding rounding;
  typename Flat::Raw g[kUnroll] = {};
  typename Param::Raw p[kUnroll] = {};
  typename Momentum::Raw b[kUnroll] = {};
  typename Master::Raw w[kUnroll] = {};

  template <class Extent>
  FUSEDACCUM_DEVICE void load(int u, int64_t i, Extent extent) {
    flat.read(g[u], i, extent);
    if (!Master::kPresent) param.read(p[u], i, extent);
    buffer.read(b[u], i, extent);
    master.read(w[u], i, extent);
  }

  template <class Extent>
  FUSEDACCUM_DEVICE void use(int u, int64_t i, Extent extent) {
    const auto bits = rounding.bits(i);
#pragma unroll
    for (int j = 0; j < kStepWidth; ++j) {
      SgdState<Lane> s;
      s.p = Lane(Master::kPresent ? Master::get(w[u], j) : Param::get(p[u], j));
      s.b = Lane(Momentum::get(b[u], j));
      sgd(factors, Momentum::kPresent, Lane(Flat::get(g[u], j)), s);
      Param::set(p[u], j, rounding.round(s.p.x, bits, j));
      Momentum::set(b[u], j, s.b.x);
      Master::set(w[u], j, s.p.x);
    }
    param.write(p[u], i, extent);
    buffer.write(b[u], i, extent);
    master.write(w[u], i, extent);
    if (kZero) flat.write(typename Flat::Raw{}, i, extent);
  }
};

struct SgdTile {
  const Tile& tile;
  float* flat;
  const SgdFactors& factors;
  const Noise& noise;
  Entry param, buffer, master;
};

template <bool kZero, bool kRandom, class Param, class Momentum, class Master>
FUSEDACCUM_DEVICE void sgd_tile(const SgdTile& t, Param param, Momentum buffer, Master master) {
  const auto rounding = rounding_of<kRandom>(t.noise, t.tile, param, master);
  Sgd<Param, Momentum, Master, std::decay_t<decltype(rounding)>, kZero> work{t.factors, {t.flat}, param,
                                                                             buffer,    master,   rounding};
  each_pack<kStepWidth>(t.tile.count, param.aligned() && buffer.aligned() && master.aligned(), work);
}

template <bool kZero, bool kRandom, class P, class Momentum>
FUSEDACCUM_DEVICE void sgd_tile_of(const SgdTile& t, Momentum buffer) {
  const auto param = stream_of<P>(t.param, t.tile);
  if (std::is_same_v<P, float> || t.master.absent()) return sgd_tile<kZero, kRandom>(t, param, buffer, None{});
  sgd_tile<kZero, kRandom>(t, param, buffer, stream_of<float>(t.master, t.tile));
}

// Any mixture of dtypes.
template <bool kZero, bool kRandom>
FUSEDACCUM_DEVICE void sgd_tile_of_any_kind(const SgdTile& t) {
  using Any = AnyStream<kStepWidth>;
  const Any param{t.param, t.tile.start}, buffer{t.buffer, t.tile.start}, master{t.master, t.tile.start};
  if (t.buffer.absent())
    return t.master.absent() ? sgd_tile<kZero, kRandom>(t, param, None{}, None{})
                             : sgd_tile<kZero, kRandom>(t, param, None{}, master);
  t.master.absent() ? sgd_tile<kZero, kRandom>(t, param, buffer, None{})
                    : sgd_tile<kZero, kRandom>(t, param, buffer, master);
}

// A buffer in the parameter's dtype or in float32, and a master only where the parameter is not float32.
template <bool kZero, bool kRandom, class P>
FUSEDACCUM_DEVICE void sgd_tile_by_buffer(const SgdTile& t) {
  if (std::is_same_v<P, float> && !t.master.absent()) return sgd_tile_of_any_kind<kZero, kRandom>(t);
  if (t.buffer.absent()) return sgd_tile_of<kZero, kRandom, P>(t, None{});
  if (t.buffer.dtype() == DType::kFloat32) return sgd_tile_of<kZero, kRandom, P>(t, stream_of<float>(t.buffer, t.tile));
  if (!std::is_same_v<P, float> && t.buffer.dtype() == t.param.dtype())
    return sgd_tile_of<kZero, kRandom, P>(t, stream_of<P>(t.buffer, t.tile));
  sgd_tile_of_any_kind<kZero, kRandom>(t);
}

template <bool kZero, bool kRandom>
FUSEDACCUM_DEVICE void sgd_tile_by_dtype(const SgdTile& t) {
  switch (t.param.dtype()) {
    case DType::kFloat32:
      return sgd_tile_by_buffer<kZero, kRandom, float>(t);
    case DType::kBFloat16:
      return sgd_tile_by_buffer<kZero, kRandom, BFloat16>(t);
    default:
      return sgd_tile_by_buffer<kZero, kRandom, Float16>(t);
  }
}

template <int kBytes, bool kZero, bool kRandom>
__global__ void __launch_bounds__(kThreads)
    sgd_kernel(const StepCall call, const Table<Entry, kBytes> __grid_constant__ table) {
  const Tile tile = call.tiles[blockIdx.x];
  const Entries<kBytes> entry{table, call, tile.segment};
  if (!is_updated<kZero>(call, tile, entry[kParam])) return;
  float* flat = call.flat + tile.flat_start;
  const Update& update = call.update;
  const auto& common = shared_by_threads<kRandom, SgdFactors>(update, tile, [&] {
    const double* row = update.hyper + update.groups[tile.segment] * kSgdColumns;
    return sgd_factors(row, update.steps[tile.segment], update.scalars[0]);
  });
  const Entry buffer = common.factors.momentum != 0 ? entry[kMomentumBuffer] : Entry{0};
  sgd_tile_by_dtype<kZero, kRandom>({tile, flat, common.factors, common.noise, entry[kParam], buffer, entry[kMaster]});
}

template <int kBytes>
auto* choose_kernel(bool zero, bool random) {
  if (random) return zero ? sgd_kernel<kBytes, true, true> : sgd_kernel<kBytes, false, true>;
  return zero ? sgd_kernel<kBytes, true, false> : sgd_kernel<kBytes, false, false>;
}

}  // namespace

void sgd(const Device& device, const Buffer& buffer, const Update& update, const Elements* const lists[3]) {
  const Elements* const all[] = {lists[0], lists[1], lists[2]};
  launch_steps("sgd", device, buffer, update, all, [&](const Part& part, const StepCall& call, const auto& table) {
    auto* kernel = choose_kernel<kSizeOf<decltype(table)>>(update.zero, update.random != nullptr);
    FUSEDACCUM_LAUNCH(kernel, part.tile_count, kThreads, device.stream, call, table);
  });
}

}  // namespace fusedaccum::cuda
