// sgd: stochastic gradient descent on every touched segment.
#define FUSEDACCUM_ISA cuda
#include "update.cuh"

namespace fusedaccum::cuda {
namespace {

enum { kParam, kMomentumBuffer, kMaster };

template <class Param, class Momentum, class Master, bool kZero>
struct Sgd {
  using Flat = Stream<float, kStepWidth>;
  const SgdFactors& factors;
  Flat flat;
  Param param;
  Momentum buffer;
  Master master;
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
#pragma unroll
    for (int j = 0; j < kStepWidth; ++j) {
      SgdState<Lane> s;
      s.p = Lane(Master::kPresent ? Master::get(w[u], j) : Param::get(p[u], j));
      s.b = Lane(Momentum::get(b[u], j));
      sgd(factors, Momentum::kPresent, Lane(Flat::get(g[u], j)), s);
      Param::set(p[u], j, s.p.x);
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
  Entry param, buffer, master;
};

template <bool kZero, class Param, class Momentum, class Master>
FUSEDACCUM_DEVICE void sgd_tile(const SgdTile& t, Param param, Momentum buffer, Master master) {
  Sgd<Param, Momentum, Master, kZero> work{t.factors, {t.flat}, param, buffer, master};
  each_pack<kStepWidth>(t.tile.count, param.aligned() && buffer.aligned() && master.aligned(), work);
}

template <bool kZero>
FUSEDACCUM_DEVICE void sgd_tile_by_dtype(const SgdTile& t) {
  using None = NoStream<kStepWidth>;
  using Any = AnyStream<kStepWidth>;
  using Single = Stream<float, kStepWidth>;
  using Low = Stream<BFloat16, kStepWidth>;
  const int64_t start = t.tile.start;
  const bool no_buffer = t.buffer.absent(), no_master = t.master.absent();
  const auto single = [&](Entry e) { return Single{e.data<float>() + start}; };
  const auto low = [&](Entry e) { return Low{e.data<BFloat16>() + start}; };
  const bool single_buffer = !no_buffer && t.buffer.dtype() == DType::kFloat32;

  if (t.param.dtype() == DType::kFloat32 && no_master) {
    if (no_buffer) return sgd_tile<kZero>(t, single(t.param), None{}, None{});
    if (single_buffer) return sgd_tile<kZero>(t, single(t.param), single(t.buffer), None{});
  }
  if (t.param.dtype() == DType::kBFloat16 && single_buffer && !no_master)
    return sgd_tile<kZero>(t, low(t.param), single(t.buffer), single(t.master));
  if (t.param.dtype() == DType::kBFloat16 && !no_buffer && t.buffer.dtype() == DType::kBFloat16 && no_master)
    return sgd_tile<kZero>(t, low(t.param), low(t.buffer), None{});

  // Any other mixture of dtypes.
  const Any param{t.param, start}, buffer{t.buffer, start}, master{t.master, start};
  if (no_buffer)
    return no_master ? sgd_tile<kZero>(t, param, None{}, None{}) : sgd_tile<kZero>(t, param, None{}, master);
  no_master ? sgd_tile<kZero>(t, param, buffer, None{}) : sgd_tile<kZero>(t, param, buffer, master);
}

template <int kBytes, bool kZero>
__global__ void __launch_bounds__(kThreads)
    sgd_kernel(const StepCall call, const __grid_constant__ Table<Entry, kBytes> table) {
  const Tile tile = call.tiles[blockIdx.x];
  const Entries<kBytes> entry{table, call, tile.segment};
  if (entry[kParam].absent()) return;
  float* flat = call.flat + tile.flat_start;
  const Update& update = call.update;
  if (update.scalars[1] != 0) {
    if (kZero) zero_tile(flat, tile.count);
    return;
  }
  const SgdFactors& factors = shared_factors<SgdFactors>([&] {
    const double* row = update.hyper + update.groups[tile.segment] * kSgdColumns;
    return sgd_factors(row, update.steps[tile.segment], update.scalars[0]);
  });
  const Entry buffer = factors.momentum != 0 ? entry[kMomentumBuffer] : Entry{0};
  sgd_tile_by_dtype<kZero>({tile, flat, factors, entry[kParam], buffer, entry[kMaster]});
}

}  // namespace

void sgd(const Device& device, const Buffer& buffer, const Update& update, const Elements* const lists[3]) {
  const Elements* const all[] = {lists[0], lists[1], lists[2]};
  launch_steps(device, buffer, update, all, [&](const Part& part, const StepCall& call, const auto& table) {
    constexpr int kBytes = kSizeOf<decltype(table)>;
    auto* kernel = update.zero ? sgd_kernel<kBytes, true> : sgd_kernel<kBytes, false>;
    FUSEDACCUM_LAUNCH(kernel, part.tile_count, kThreads, device.stream, call, table);
    check_launch("sgd");
  });
}

}  // namespace fusedaccum::cuda
