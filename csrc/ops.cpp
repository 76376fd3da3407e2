// The operators, for tensors on the CPU: check everything, collect addresses, divide the tiles among threads, and hand
// them to the kernels.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "check.h"
#include "cpu/isa.h"
#include "cpu/work.h"
#include "rules.h"
#include "schema.h"

namespace fusedaccum {
namespace {

template <class T>
T* data(const Tensor& t) {
  return static_cast<T*>(t.data_ptr());
}

// Non-temporal stores write past the caches. Below this many elements (32 MB) what is written may still be in a cache
// when it is read again.
constexpr int64_t kStreamFrom = int64_t(8) << 20;

// What all operators on the flat buffer share.
struct Call {
  Check check;
  float* flat;
  uint8_t* marks;
  const Tile* tiles;
  Plan plan;
  Work work;

  Call(const char* op, const Tensor& flat_, const Tensor& marks_, const Tensor& segments, const Tensor& tiles_)
      : check(op, "flat", flat_, aoti_torch_device_type_cpu()), plan(check, flat_, marks_, segments, tiles_) {
    flat = data<float>(flat_);
    marks = data<uint8_t>(marks_);
    tiles = data<const Tile>(tiles_);
  }

  int64_t numel(int64_t k) const { return plan.segments[k].numel; }
  bool touched(int64_t k) const { return marks[k] & kTouched; }

  void add(int64_t k) {
    plan.check_tiles(check, tiles, k);
    work.add(k, plan.first_tile[k], numel(k));
  }

  void add_touched() {
    for (int64_t k = 0; k < plan.count; ++k)
      if (touched(k)) add(k);
  }

  // One entry for each segment. A tensor of 0 elements, or an empty list, says that an entry does not apply; that is an
  // error where the segment is touched and the entry is `needed`.
  std::vector<Elements> list(const char* name, const Tensors& tensors, bool needed, bool only_float32 = false) const {
    std::vector<Elements> entries(plan.count);
    const bool none = tensors.empty();
    for (int64_t k = 0; none && needed && k < plan.count; ++k)
      if (touched(k)) check.length(name, 0, plan.count);
    if (none) return entries;
    check.length(name, tensors.size(), plan.count);
    for (int64_t k = 0; k < plan.count; ++k) {
      const bool may_be_left_out = !(needed && touched(k));
      if (may_be_left_out && tensors[k].numel() == 0) continue;
      entries[k] = check.entry(name, k, tensors[k], numel(k), only_float32);
    }
    return entries;
  }
};

void fold(Tensor flat, Tensor partials, Tensor marks, Tensor segments, Tensor tiles, const OptionalTensors& grads,
          Tensor scale, bool norm) {
  Call call("fold", flat, marks, segments, tiles);
  call.check.one("partials", partials, ScalarType::Double, {tiles.size(0)});
  call.check.one("scale", scale, ScalarType::Float, {1});
  call.check.length("grads", grads.size(), call.plan.count);
  std::vector<Elements> sources(call.plan.count);
  for (int64_t k = 0; k < call.plan.count; ++k) {
    if (!grads[k]) continue;
    sources[k] = call.check.entry("grads", k, *grads[k], call.numel(k));
    call.add(k);
  }

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
  for (int64_t k = 0; k < call.plan.count; ++k)
    if (grads[k]) call.marks[k] = norm ? kTouched | kFresh : kTouched;
}

void square_total(Tensor flat, Tensor partials, Tensor marks, Tensor segments, Tensor tiles, Tensor total) {
  Call call("square_total", flat, marks, segments, tiles);
  call.check.one("partials", partials, ScalarType::Double, {tiles.size(0)});
  call.check.one("total", total, ScalarType::Double, {kTotal});
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

void close_window(Tensor scalars, Tensor steps, Tensor marks, Tensor total, Tensor divisor, double max_norm) {
  const Check check("close_window", "scalars", scalars, aoti_torch_device_type_cpu());
  check.one("scalars", scalars, ScalarType::Float, {3});
  check.one_on_cpu("marks", marks, ScalarType::Byte, {-1});
  check.one("steps", steps, ScalarType::Float, {marks.numel()});
  check.one("total", total, ScalarType::Double, {1});
  check.one("divisor", divisor, ScalarType::Double, {1});

  const host::Closing closing = host::close_window(*data<double>(total), *data<double>(divisor), max_norm);
  float* out = data<float>(scalars);
  out[0] = closing.multiplier;
  out[1] = closing.skip;
  out[2] = closing.norm;
  if (closing.skip != 0) return;
  for (int64_t k = 0; k < marks.numel(); ++k)
    if (data<uint8_t>(marks)[k] & kTouched) data<float>(steps)[k] += 1;
}

void rescale(Tensor flat, Tensor marks, Tensor segments, Tensor tiles, Tensor factor) {
  Call call("rescale", flat, marks, segments, tiles);
  call.check.one("factor", factor, ScalarType::Float, {1});
  call.add_touched();

  const Kernels& cpu = kernels();
  const float value = *data<float>(factor);
  call.work.parallel(
      [&](int64_t, int64_t tile, int64_t count) { cpu.rescale(call.flat, value, call.tiles + tile, count); });
  for (int64_t k = 0; k < call.plan.count; ++k) call.marks[k] &= kTouched;
}

void emit(Tensor flat, Tensor marks, Tensor segments, Tensor tiles, Tensor scalars, const Tensors& grads) {
  Call call("emit", flat, marks, segments, tiles);
  call.check.one("scalars", scalars, ScalarType::Float, {3});
  const std::vector<Elements> targets = call.list("grads", grads, true);
  call.add_touched();

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
  Update(const Call& call, const Tensor& scalars, const Tensor& steps, const Tensor& groups, const Tensor& hyper,
         int64_t columns, const Make& make)
      : which(call.plan.count) {
    call.check.one("scalars", scalars, ScalarType::Float, {3});
    call.check.one("steps", steps, ScalarType::Float, {call.plan.count});
    call.check.one("groups", groups, ScalarType::Long, {call.plan.count});
    call.check.one("hyper", hyper, ScalarType::Double, {-1, columns});
    multiplier = data<float>(scalars)[0];
    skip = data<float>(scalars)[1] != 0;
    int64_t group = -1;
    float step = 0;
    for (int64_t k = 0; k < call.plan.count; ++k) {
      const int64_t own = data<int64_t>(groups)[k];
      if (own < 0 || own >= hyper.size(0))
        call.check.fail(call.check.at("groups", k), text("be a row of hyper, 0 to ", hyper.size(0) - 1), text(own),
                        kPlanWayOut);
      if (!call.touched(k)) continue;
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
void skip_update(const Call& call, bool zero) {
  if (!zero) return;
  const Kernels& cpu = kernels();
  call.work.parallel([&](int64_t, int64_t tile, int64_t count) { cpu.zero(call.flat, call.tiles + tile, count); });
}

void adam(Tensor flat, Tensor marks, Tensor segments, Tensor tiles, Tensor scalars, Tensor steps, Tensor groups,
          Tensor hyper, const Tensors& params, const Tensors& exp_avgs, const Tensors& exp_avg_sqs,
          const Tensors& max_exp_avg_sqs, const Tensors& masters, bool zero) {
  Call call("adam", flat, marks, segments, tiles);
  const Update<AdamFactors> update(call, scalars, steps, groups, hyper, kAdamColumns, host::adam_factors);
  const auto p = call.list("params", params, true);
  const auto m = call.list("exp_avgs", exp_avgs, true);
  const auto v = call.list("exp_avg_sqs", exp_avg_sqs, true);
  const auto v_max = call.list("max_exp_avg_sqs", max_exp_avg_sqs, false);
  const auto master = call.list("masters", masters, false, true);
  call.add_touched();

  if (update.skip) return skip_update(call, zero);
  const Kernels& cpu = kernels();
  call.work.parallel([&](int64_t k, int64_t tile, int64_t count) {
    AdamFactors factors = update.factors[update.which[k]];
    factors.amsgrad = factors.amsgrad && v_max[k].data != nullptr;
    cpu.adam({call.flat, p[k], m[k], v[k], v_max[k], static_cast<float*>(master[k].data), factors, zero},
             call.tiles + tile, count);
  });
}

void sgd(Tensor flat, Tensor marks, Tensor segments, Tensor tiles, Tensor scalars, Tensor steps, Tensor groups,
         Tensor hyper, const Tensors& params, const Tensors& momentum_buffers, const Tensors& masters, bool zero) {
  Call call("sgd", flat, marks, segments, tiles);
  const Update<SgdFactors> update(call, scalars, steps, groups, hyper, kSgdColumns, host::sgd_factors);
  const auto p = call.list("params", params, true);
  const auto b = call.list("momentum_buffers", momentum_buffers, false);
  const auto master = call.list("masters", masters, false, true);
  call.add_touched();

  if (update.skip) return skip_update(call, zero);
  const Kernels& cpu = kernels();
  call.work.parallel([&](int64_t k, int64_t tile, int64_t count) {
    const SgdFactors& factors = update.factors[update.which[k]];
    const Elements buffer = factors.momentum != 0 ? b[k] : Elements{};
    cpu.sgd({call.flat, p[k], buffer, static_cast<float*>(master[k].data), factors, zero}, call.tiles + tile, count);
  });
}

}  // namespace
}  // namespace fusedaccum

STABLE_TORCH_LIBRARY(fusedaccum, m) {
  for (const char* schema : fusedaccum::kSchemas) m.def(schema);
}

// For every backend that has no kernels of its own, not for the CPU alone: a tensor that lies elsewhere, or a sparse
// one, is then refused by name.
STABLE_TORCH_LIBRARY_IMPL(fusedaccum, CompositeExplicitAutograd, m) {
  m.impl("fold", TORCH_BOX(&fusedaccum::fold));
  m.impl("square_total", TORCH_BOX(&fusedaccum::square_total));
  m.impl("close_window", TORCH_BOX(&fusedaccum::close_window));
  m.impl("rescale", TORCH_BOX(&fusedaccum::rescale));
  m.impl("emit", TORCH_BOX(&fusedaccum::emit));
  m.impl("adam", TORCH_BOX(&fusedaccum::adam));
  m.impl("sgd", TORCH_BOX(&fusedaccum::sgd));
}
