// What the operators share on every device: the checked arguments of one call, and the marks that it leaves behind.
#pragma once

#include <array>
#include <vector>

#include "check.h"

namespace fusedaccum {

template <class T>
T* data(const Tensor& t) {
  return static_cast<T*>(t.data_ptr());
}

inline uint8_t* check_live(const Check& check, const OptionalTensor& live, int64_t count) {
  if (!live) return nullptr;
  check.one("live", *live, ScalarType::Byte, {count});
  return data<uint8_t>(*live);
}

struct Call {
  Check check;
  Plan plan;
  float* flat;
  uint8_t* marks;     // on the host
  uint8_t* live;      // on the device; null where every touched segment counts
  const Tile* tiles;  // on the device

  Call(const char* op, const Tensor& flat_, const Tensor& marks_, const OptionalTensor& live_, const Tensor& segments,
       const Tensor& tiles_, int32_t device_type)
      : check(op, "flat", flat_, device_type), plan(check, flat_, marks_, segments, tiles_) {
    live = check_live(check, live_, plan.count);
    flat = data<float>(flat_);
    marks = data<uint8_t>(marks_);
    tiles = data<const Tile>(tiles_);
  }

  int64_t numel(int64_t k) const { return plan.segments[k].numel; }
  bool touched(int64_t k) const { return marks[k] & kTouched; }

  void check_fold(const Tensor& partials, const Tensor& tiles_, const Tensor& scale) const {
    check.one("partials", partials, ScalarType::Double, {tiles_.size(0)});
    check.one("scale", scale, ScalarType::Float, {1});
  }
  void check_norm(const Tensor& partials, const Tensor& tiles_, const Tensor& total) const {
    check.one("partials", partials, ScalarType::Double, {tiles_.size(0)});
    check.one("total", total, ScalarType::Double, {kTotal});
  }
  void check_update(const Tensor& scalars, const Tensor& steps, const Tensor& groups, const Tensor& hyper,
                    int64_t columns) const {
    check.one("scalars", scalars, ScalarType::Float, {3});
    check.one("steps", steps, ScalarType::Float, {plan.count});
    check.one("groups", groups, ScalarType::Long, {plan.count});
    check.one("hyper", hyper, ScalarType::Double, {-1, columns});
  }

  // Null where everything is rounded to nearest.
  const int64_t* check_random(const OptionalTensor& random) const {
    if (!random) return nullptr;
    check.one("random", *random, ScalarType::Long, {plan.count + 2});
    return data<int64_t>(*random);
  }

  // One entry for each segment, without data where there is no gradient.
  std::vector<Elements> gradients(const OptionalTensors& grads) const {
    check.length("grads", grads.size(), plan.count);
    std::vector<Elements> entries(plan.count);
    for (int64_t k = 0; k < plan.count; ++k)
      if (grads[k]) entries[k] = check.entry("grads", k, *grads[k], numel(k));
    return entries;
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

  std::array<std::vector<Elements>, 5> adam_lists(const Tensors& params, const Tensors& exp_avgs,
                                                  const Tensors& exp_avg_sqs, const Tensors& max_exp_avg_sqs,
                                                  const Tensors& masters) const {
    return {list("params", params, true), list("exp_avgs", exp_avgs, true), list("exp_avg_sqs", exp_avg_sqs, true),
            list("max_exp_avg_sqs", max_exp_avg_sqs, false), list("masters", masters, false, true)};
  }
  std::array<std::vector<Elements>, 3> sgd_lists(const Tensors& params, const Tensors& momentum_buffers,
                                                 const Tensors& masters) const {
    return {list("params", params, true), list("momentum_buffers", momentum_buffers, false),
            list("masters", masters, false, true)};
  }

  void mark_folded(const OptionalTensors& grads, bool norm) const {
    for (int64_t k = 0; k < plan.count; ++k)
      if (grads[k]) marks[k] = norm ? kTouched | kFresh : kTouched;
  }
  void mark_fresh() const {
    for (int64_t k = 0; k < plan.count; ++k)
      if (touched(k)) marks[k] |= kFresh;
  }
  void mark_stale() const {
    for (int64_t k = 0; k < plan.count; ++k) marks[k] &= kTouched;
  }
};

// The arguments of close_window, which has no flat buffer to compare them with.
inline Check check_close(const Tensor& scalars, const Tensor& steps, const Tensor& marks, const OptionalTensor& live,
                         const Tensor& total, const Tensor& divisor, int32_t device_type) {
  const Check check("close_window", "scalars", scalars, device_type);
  check.one("scalars", scalars, ScalarType::Float, {3});
  check.one_on_cpu("marks", marks, ScalarType::Byte, {-1});
  check.one("steps", steps, ScalarType::Float, {marks.numel()});
  check_live(check, live, marks.numel());
  check.one("total", total, ScalarType::Double, {1});
  check.one("divisor", divisor, ScalarType::Double, {1});
  return check;
}

}  // namespace fusedaccum
