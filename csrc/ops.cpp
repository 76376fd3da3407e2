// The operators, for tensors on the CPU: check everything, collect addresses, divide the tiles among threads, and hand
// them to the kernels.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>

#include "call.h"
#include "cpu/isa.h"
#include "cpu/work.h"
#include "rules.h"
#include "schema.h"

namespace fusedaccum {
namespace {

// Non-temporal stores write past the caches. Below this many elements (32 MB) what is written may still be in a cache
// when it is read again.
constexpr int64_t kStreamFrom = int64_t(8) << 20;

struct CpuCall : Call {
  Work work;

  CpuCall(const char* op, const Tensor& flat, const Tensor& marks, const OptionalTensor& live, const Tensor& segments,
          const Tensor& tiles)
      : Call(op, flat, marks, live, segments, tiles, aoti_torch_device_type_cpu()) {}

  bool counts(int64_t k) const { return touched(k) && (live == nullptr || live[k]); }

  void add(int64_t k) {
    plan.check_tiles(check, tiles, k);
    work.add(k, plan.first_tile[k], numel(k));
  }

  // How segment k's parameter is rounded. random: as `check_random` returns it.
  Rounding rounding(const int64_t* random, int64_t k, const Elements& param, const Elements& master) const {
    if (random == nullptr || param.dtype != DType::kBFloat16 || master.data != nullptr) return {};
    return {true, {uint64_t(random[0]), uint32_t(random[2 + k]), uint32_t(random[1])}};
  }

  void add_touched() {
    for (int64_t k = 0; k < plan.count; ++k)
      if (touched(k)) add(k);
  }

  void add_counting() {
    for (int64_t k = 0; k < plan.count; ++k)
      if (counts(k)) add(k);
  }
};

void fold(Tensor flat, Tensor partials, Tensor marks, const OptionalTensor& live, Tensor segments, Tensor tiles,
          const OptionalTensors& grads, Tensor scale, bool norm) {
  CpuCall call("fold", flat, marks, live, segments, tiles);
  call.check_fold(partials, tiles, scale);
  const std::vector<Elements> sources = call.gradients(grads);
  for (int64_t k = 0; k < call.plan.count; ++k)
    if (grads[k]) call.add(k);

  const Kernels& cpu = kernels();
  const float factor = *data<float>(scale);
  double* partial = norm ? data<double>(partials) : nullptr;
  const bool stream = call.work.total() >= kStreamFrom && reinterpret_cast<uintptr_t>(call.flat) % 64 == 0;
  call.work.parallel(
      [&](int64_t k, int64_t tile, int64_t count) {
        cpu.fold({call.flat, sources[k], partial ? partial + tile : nullptr, factor, !call.touched(k), stream},
                 call.tiles + tile, count);
      },
      cpu.fence);
  call.mark_folded(grads, norm);
  for (int64_t k = 0; call.live && factor != 0 && k < call.plan.count; ++k)
    if (grads[k] && call.numel(k) > 0) call.live[k] = 1;
}

void found_inf(Tensor flat, Tensor marks, Tensor segments, Tensor tiles, const OptionalTensors& grads,
               Tensor found_inf) {
  CpuCall call("found_inf", flat, marks, std::nullopt, segments, tiles);
  call.check.one("found_inf", found_inf, ScalarType::Float, {1});
  const std::vector<Elements> sources = call.gradients(grads);
  for (int64_t k = 0; k < call.plan.count; ++k)
    if (grads[k]) call.add(k);

  const Kernels& cpu = kernels();
  std::atomic<bool> found = false;
  call.work.parallel([&](int64_t k, int64_t tile, int64_t count) {
    if (!found && !cpu.all_finite(sources[k], call.tiles + tile, count)) found = true;
  });
  *data<float>(found_inf) = found ? 1.0f : 0.0f;
}

void square_total(Tensor flat, Tensor partials, Tensor marks, Tensor segments, Tensor tiles, Tensor total) {
  CpuCall call("square_total", flat, marks, std::nullopt, segments, tiles);
  call.check_norm(partials, tiles, total);
  for (int64_t k = 0; k < call.plan.count; ++k)
    if (call.touched(k) && !(call.marks[k] & kFresh)) call.add(k);

  const Kernels& cpu = kernels();
  double* partial = data<double>(partials);
  call.work.parallel(
      [&](int64_t, int64_t tile, int64_t count) { cpu.square(call.flat, partial + tile, call.tiles + tile, count); });
  double sum = 0;
  for (int64_t k = 0; k < call.plan.count; ++k) {
    if (!call.touched(k)) continue;
    call.marks[k] |= kFresh;
    const double* own = partial + call.plan.first_tile[k];
    for (int64_t t = 0; t < tiles_of(call.numel(k)); ++t) sum += own[t];
  }
  *data<double>(total) = sum;
}

void close_window(Tensor scalars, Tensor steps, Tensor marks, const OptionalTensor& live, Tensor total, Tensor divisor,
                  double max_norm, bool skip_nonfinite) {
  check_close(scalars, steps, marks, live, total, divisor, aoti_torch_device_type_cpu());

  const host::Closing closing =
      host::close_window(*data<double>(total), *data<double>(divisor), max_norm, skip_nonfinite);
  float* out = data<float>(scalars);
  out[0] = closing.multiplier;
  out[1] = closing.skip;
  out[2] = closing.norm;
  if (closing.skip != 0) return;
  for (int64_t k = 0; k < marks.numel(); ++k)
    if (data<uint8_t>(marks)[k] & kTouched && (!live || data<uint8_t>(*live)[k])) data<float>(steps)[k] += 1;
}

void rescale(Tensor flat, Tensor marks, Tensor segments, Tensor tiles, Tensor factor) {
  CpuCall call("rescale", flat, marks, std::nullopt, segments, tiles);
  call.check.one("factor", factor, ScalarType::Float, {1});
  call.add_touched();

  const Kernels& cpu = kernels();
  const float value = *data<float>(factor);
  call.work.parallel(
      [&](int64_t, int64_t tile, int64_t count) { cpu.rescale(call.flat, value, call.tiles + tile, count); });
  call.mark_stale();
}

void emit(Tensor flat, Tensor marks, const OptionalTensor& live, Tensor segments, Tensor tiles, Tensor scalars,
          const Tensors& grads) {
  CpuCall call("emit", flat, marks, live, segments, tiles);
  call.check.one("scalars", scalars, ScalarType::Float, {3});
  const std::vector<Elements> targets = call.list("grads", grads, true);
  call.add_counting();

  const Kernels& cpu = kernels();
  const float multiplier = data<float>(scalars)[0], skip = data<float>(scalars)[1];
  if (skip != 0) return;
  call.work.parallel([&](int64_t k, int64_t tile, int64_t count) {
    cpu.emit(call.flat, targets[k], multiplier, call.tiles + tile, count);
  });
}

// What the update rules share: scalars, and for each touched segment the factors of its (group, step), made once where
// neighbours have the same.
template <class Factors>
struct Update {
  float multiplier;
  bool skip;
  std::vector<Factors> factors;
  std::vector<int32_t> which;  // factors of each segment

  template <class Make>
  Update(const CpuCall& call, const Tensor& scalars, const Tensor& steps, const Tensor& groups, const Tensor& hyper,
         int64_t columns, const Make& make)
      : which(call.plan.count) {
    call.check_update(scalars, steps, groups, hyper, columns);
    multiplier = data<float>(scalars)[0];
    skip = data<float>(scalars)[1] != 0;
    int64_t group = -1;
    float step = 0;
    for (int64_t k = 0; k < call.plan.count; ++k) {
      const int64_t own = data<int64_t>(groups)[k];
      if (own < 0 || own >= hyper.size(0))
        call.check.fail(call.check.at("groups", k), text("be a row of hyper, 0 to ", hyper.size(0) - 1), text(own),
                        kPlanWayOut);
      if (!call.counts(k)) continue;
      if (own != group || data<float>(steps)[k] != step) {
        group = own;
        step = data<float>(steps)[k];
        factors.push_back(make(data<double>(hyper) + group * columns, step, multiplier));
      }
      which[k] = int32_t(factors.size()) - 1;
    }
  }
};

// A skipped window changes nothing but the zeros that were asked for.
void skip_update(const CpuCall& call, bool zero) {
  if (!zero) return;
  const Kernels& cpu = kernels();
  call.work.parallel([&](int64_t, int64_t tile, int64_t count) { cpu.zero(call.flat, call.tiles + tile, count); });
}

void adam(Tensor flat, Tensor marks, const OptionalTensor& live, Tensor segments, Tensor tiles, Tensor scalars,
          Tensor steps, Tensor groups, Tensor hyper, const Tensors& params, const Tensors& exp_avgs,
          const Tensors& exp_avg_sqs, const Tensors& max_exp_avg_sqs, const Tensors& masters,
          const OptionalTensor& random, bool zero) {
  CpuCall call("adam", flat, marks, live, segments, tiles);
  const Update<AdamFactors> update(call, scalars, steps, groups, hyper, kAdamColumns, host::adam_factors);
  const int64_t* noise = call.check_random(random);
  const auto [p, m, v, v_max, master] = call.adam_lists(params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, masters);
  call.add_counting();

  if (update.skip) return skip_update(call, zero);
  const Kernels& cpu = kernels();
  call.work.parallel([&](int64_t k, int64_t tile, int64_t count) {
    AdamFactors factors = update.factors[update.which[k]];
    factors.amsgrad = factors.amsgrad && v_max[k].data != nullptr;
    const Rounding rounding = call.rounding(noise, k, p[k], master[k]);
    cpu.adam({call.flat, p[k], m[k], v[k], v_max[k], static_cast<float*>(master[k].data), factors, rounding, zero},
             call.tiles + tile, count);
  });
}

void sgd(Tensor flat, Tensor marks, const OptionalTensor& live, Tensor segments, Tensor tiles, Tensor scalars,
         Tensor steps, Tensor groups, Tensor hyper, const Tensors& params, const Tensors& momentum_buffers,
         const Tensors& masters, const OptionalTensor& random, bool zero) {
  CpuCall call("sgd", flat, marks, live, segments, tiles);
  const Update<SgdFactors> update(call, scalars, steps, groups, hyper, kSgdColumns, host::sgd_factors);
  const int64_t* noise = call.check_random(random);
  const auto [p, b, master] = call.sgd_lists(params, momentum_buffers, masters);
  call.add_counting();

  if (update.skip) return skip_update(call, zero);
  const Kernels& cpu = kernels();
  call.work.parallel([&](int64_t k, int64_t tile, int64_t count) {
    const SgdFactors& factors = update.factors[update.which[k]];
    const Elements buffer = factors.momentum != 0 ? b[k] : Elements{};
    const Rounding rounding = call.rounding(noise, k, p[k], master[k]);
    cpu.sgd({call.flat, p[k], buffer, static_cast<float*>(master[k].data), factors, rounding, zero}, call.tiles + tile,
            count);
  });
}

}  // namespace
}  // namespace fusedaccum

STABLE_TORCH_LIBRARY(fusedaccum, m) {
  for (const char* schema : fusedaccum::kSchemas) m.def(schema);
}

// For every backend that has no kernels of its own, not for the CPU alone: a tensor that lies elsewhere, or a sparse
// one, is then refused by name.
STABLE_TORCH_LIBRARY_IMPL(fusedaccum, CompositeExplicitAutograd, m) { FUSEDACCUM_IMPLEMENT(m); }
