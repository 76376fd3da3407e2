// adam: Adam and AdamW on every touched segment. Every stream is read once and written once, in its own dtype.
#define FUSEDACCUM_ISA cuda
#include "update.cuh"

namespace fusedaccum::cuda {
namespace {

enum { kParam, kExpAvg, kExpAvgSq, kMaxExpAvgSq, kMaster };

template <class Param, class Moment, class Max, class Master, class Rounding, bool kZero>
struct Adam {
  using Flat = Stream<float, kStepWidth>;
  const AdamFactors& factors;
  Flat flat;
  Param param;
  Moment exp_avg, exp_avg_sq;
  Max max_exp_avg_sq;
  Master master;
  Rounding rounding;
  typename Flat::Raw g[kUnroll] = {};
  typename Param::Raw p[kUnroll] = {};
  typename Moment::Raw m[kUnroll] = {}, v[kUnroll] = {};
  typename Max::Raw v_max[kUnroll] = {};
  typename Master::Raw w[kUnroll] = {};

  template <class Extent>
  FUSEDACCUM_DEVICE void load(int u, int64_t i, Extent extent) {
    flat.read(g[u], i, extent);
    if (!Master::kPresent) param.read(p[u], i, extent);
    exp_avg.read(m[u], i, extent);
    exp_avg_sq.read(v[u], i, extent);
    max_exp_avg_sq.read(v_max[u], i, extent);
    master.read(w[u], i, extent);
  }

  template <class Extent>
  FUSEDACCUM_DEVICE void use(int u, int64_t i, Extent extent) {
    const auto bits = rounding.bits(i);
#pragma unroll
    for (int j = 0; j < kStepWidth; ++j) update(u, j, bits);
    param.write(p[u], i, extent);
    exp_avg.write(m[u], i, extent);
    exp_avg_sq.write(v[u], i, extent);
    max_exp_avg_sq.write(v_max[u], i, extent);
    master.write(w[u], i, extent);
    if (kZero) flat.write(typename Flat::Raw{}, i, extent);
  }

  FUSEDACCUM_DEVICE void update(int u, int j, const typename Rounding::Bits& bits) {
    AdamState<Lane> s;
    s.p = Lane(Master::kPresent ? Master::get(w[u], j) : Param::get(p[u], j));
    s.m = Lane(Moment::get(m[u], j));
    s.v = Lane(Moment::get(v[u], j));
    s.v_max = Lane(Max::get(v_max[u], j));
    adam(factors, Lane(Flat::get(g[u], j)), s);
    Param::set(p[u], j, rounding.round(s.p.x, bits, j));
    Moment::set(m[u], j, s.m.x);
    Moment::set(v[u], j, s.v.x);
    Max::set(v_max[u], j, s.v_max.x);
    Master::set(w[u], j, s.p.x);
  }
};

// The mixtures of dtypes with code of their own, in one kernel; kAny is every other one, and has a kernel that is
// slower.
enum class Mix { kAny, kSingle, kSingleLow, kBFloat16Single, kBFloat16, kFloat16Single, kFloat16 };

struct Kinds {
  Entry param, exp_avg, exp_avg_sq, max_exp_avg_sq, master;

  FUSEDACCUM_HD bool is(DType p, DType moment) const {
    return param.dtype() == p && exp_avg.dtype() == moment && exp_avg_sq.dtype() == moment;
  }
  FUSEDACCUM_HD Mix mix() const {
    constexpr DType f32 = DType::kFloat32, bf16 = DType::kBFloat16, f16 = DType::kFloat16;
    if (!max_exp_avg_sq.absent()) return Mix::kAny;
    if (is(bf16, f32)) return Mix::kBFloat16Single;
    if (is(bf16, bf16)) return Mix::kBFloat16;
    if (is(f16, f32)) return Mix::kFloat16Single;
    if (!master.absent()) return Mix::kAny;
    if (is(f32, f32)) return Mix::kSingle;
    if (is(f32, bf16)) return Mix::kSingleLow;
    return is(f16, f16) ? Mix::kFloat16 : Mix::kAny;
  }
};

struct AdamTile : Kinds {
  const Tile& tile;
  float* flat;
  const AdamFactors& factors;
  const Noise& noise;
};

template <bool kZero, bool kRandom, class Param, class Moment, class Max, class Master>
FUSEDACCUM_DEVICE void adam_tile(const AdamTile& t, Param param, Moment exp_avg, Moment exp_avg_sq, Max max_exp_avg_sq,
                                 Master master) {
  const auto rounding = rounding_of<kRandom>(t.noise, t.tile, param, master);
  Adam<Param, Moment, Max, Master, std::decay_t<decltype(rounding)>, kZero> work{
      t.factors, {t.flat}, param, exp_avg, exp_avg_sq, max_exp_avg_sq, master, rounding};
  const bool aligned = param.aligned() && exp_avg.aligned() && exp_avg_sq.aligned() && max_exp_avg_sq.aligned();
  each_pack<kStepWidth>(t.tile.count, aligned && master.aligned(), work);
}

template <bool kZero, bool kRandom, class P, class M, class Master>
FUSEDACCUM_DEVICE void adam_tile_of(const AdamTile& t, Master master) {
  adam_tile<kZero, kRandom>(t, stream_of<P>(t.param, t.tile), stream_of<M>(t.exp_avg, t.tile),
                            stream_of<M>(t.exp_avg_sq, t.tile), None{}, master);
}

template <bool kZero, bool kRandom, class P, class M>
FUSEDACCUM_DEVICE void adam_tile_with_or_without_master(const AdamTile& t) {
  t.master.absent() ? adam_tile_of<kZero, kRandom, P, M>(t, None{})
                    : adam_tile_of<kZero, kRandom, P, M>(t, stream_of<float>(t.master, t.tile));
}

// Any mixture of dtypes, with or without v_max and master.
template <bool kZero, bool kRandom>
FUSEDACCUM_DEVICE void adam_tile_of_any_kind(const AdamTile& t) {
  const auto any = [&](Entry entry) { return AnyStream<kStepWidth>{entry, t.tile.start}; };
  const auto param = any(t.param), exp_avg = any(t.exp_avg), exp_avg_sq = any(t.exp_avg_sq);
  const auto max_exp_avg_sq = any(t.max_exp_avg_sq), master = any(t.master);
  t.master.absent() ? adam_tile<kZero, kRandom>(t, param, exp_avg, exp_avg_sq, max_exp_avg_sq, None{})
                    : adam_tile<kZero, kRandom>(t, param, exp_avg, exp_avg_sq, max_exp_avg_sq, master);
}

template <bool kZero, bool kRandom, bool kAny>
FUSEDACCUM_DEVICE void adam_tile_by_dtype(const AdamTile& t) {
  switch (t.mix()) {
    case Mix::kSingle:
      return adam_tile_of<kZero, kRandom, float, float>(t, None{});
    case Mix::kSingleLow:
      return adam_tile_of<kZero, kRandom, float, BFloat16>(t, None{});
    case Mix::kBFloat16Single:
      return adam_tile_with_or_without_master<kZero, kRandom, BFloat16, float>(t);
    case Mix::kBFloat16:
      return adam_tile_with_or_without_master<kZero, kRandom, BFloat16, BFloat16>(t);
    case Mix::kFloat16Single:
      return adam_tile_with_or_without_master<kZero, kRandom, Float16, float>(t);
    case Mix::kFloat16:
      return adam_tile_of<kZero, kRandom, Float16, Float16>(t, None{});
    default:
      if constexpr (kAny) adam_tile_of_any_kind<kZero, kRandom>(t);
  }
}

// Three blocks a multiprocessor hold more loads in flight than it takes to fill its share of the bandwidth.
template <int kBytes, bool kZero, bool kRandom, bool kAny>
__global__ void __launch_bounds__(kThreads, kAny ? 2 : 3)
    adam_kernel(const StepCall call, const Table<Entry, kBytes> __grid_constant__ table) {
  const Tile tile = call.tiles[blockIdx.x];
  const Entries<kBytes> entry{table, call, tile.segment};
  if (!is_updated<kZero>(call, tile, entry[kParam])) return;
  float* flat = call.flat + tile.flat_start;
  const Update& update = call.update;
  const auto& common = shared_by_threads<kRandom, AdamFactors>(update, tile, [&] {
    const double* row = update.hyper + update.groups[tile.segment] * kAdamColumns;
    AdamFactors made = adam_factors(row, update.steps[tile.segment], update.scalars[0]);
    made.amsgrad = made.amsgrad && !entry[kMaxExpAvgSq].absent();
    return made;
  });
  // Without amsgrad v_max is neither read nor written, though there may be one from before.
  const Entry v_max = common.factors.amsgrad ? entry[kMaxExpAvgSq] : Entry{0};
  adam_tile_by_dtype<kZero, kRandom, kAny>({{entry[kParam], entry[kExpAvg], entry[kExpAvgSq], v_max, entry[kMaster]},
                                            tile,
                                            flat,
                                            common.factors,
                                            common.noise});
}

template <int kBytes, bool kRandom>
auto* choose_kernel(bool zero, bool any) {
  if (any) return zero ? adam_kernel<kBytes, true, kRandom, true> : adam_kernel<kBytes, false, kRandom, true>;
  return zero ? adam_kernel<kBytes, true, kRandom, false> : adam_kernel<kBytes, false, kRandom, false>;
}

}  // namespace

void adam(const Device& device, const Buffer& buffer, const Update& update, const Elements* const lists[5]) {
  const Elements* const all[] = {lists[0], lists[1], lists[2], lists[3], lists[4]};
  launch_steps("adam", device, buffer, update, all, [&](const Part& part, const StepCall& call, const auto& table) {
    bool any = false;
    for (int64_t k = part.begin; k < part.end; ++k) {
      const auto of = [&](int list) { return Entry::of(lists[list][k]); };
      any |= touched(buffer, k) &&
             Kinds{of(kParam), of(kExpAvg), of(kExpAvgSq), of(kMaxExpAvgSq), of(kMaster)}.mix() == Mix::kAny;
    }
    constexpr int kBytes = kSizeOf<decltype(table)>;
    auto* kernel =
        update.random ? choose_kernel<kBytes, true>(update.zero, any) : choose_kernel<kBytes, false>(update.zero, any);
    FUSEDACCUM_LAUNCH(kernel, part.tile_count, kThreads, device.stream, call, table);
  });
}

}  // namespace fusedaccum::cuda
