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

inline bool is_empty(AtenTensorHandle t) {
  int64_t numel;
  aoti_torch_get_numel(t, &numel);
  return numel == 0;
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
  bool fresh(int64_t k) const { return marks[k] & kFresh; }

  void check_partials(const Tensor& partials, const Tensor& tiles_) const {
    check.one("partials", partials, ScalarType::Double, {tiles_.size(0)});
  }
  // Returns the number of micro-batches.
  int64_t check_fold(const Tensor& partials, const Tensor& tiles_, const OptionalTensors& grads,
                     const Tensor& scale) const {
    check_partials(partials, tiles_);
    const int64_t batches = check_batches("grads", grads, "scale", scale);
    if (batches == 0)
      check.fail("scale", "have at least 1 entry, one for each micro-batch", "0", "pass the scale of each micro-batch");
    return batches;
  }
  int64_t check_batches(const char* name, const OptionalTensors& grads, const char* scale_name,
                        const Tensor& scale) const {
    check.one(scale_name, scale, ScalarType::Float, {-1});
    const int64_t batches = scale.size(0);
    if (int64_t(grads.size()) != batches * plan.count)
      check.fail(name,
                 text("have ", batches * plan.count, " entries, one for each segment and each of the ", batches,
                      " entries of ", scale_name),
                 text(grads.size()), kPlanWayOut);
    return batches;
  }
  void check_norm(const Tensor& partials, const Tensor& tiles_, const Tensor& total) const {
    check_partials(partials, tiles_);
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
    each_gradient("grads", grads, [&](int64_t, int64_t k, Elements elements) { entries[k] = elements; });
    return entries;
  }

  // use(micro-batch, segment, elements) for each gradient that is there, in the list's order.
  template <class Use>
  void each_gradient(const char* name, const OptionalTensors& grads, const Use& use) const {
    for (int64_t i = 0, batch = 0; i < int64_t(grads.size()); ++batch)
      for (int64_t k = 0; k < plan.count; ++k, ++i)
        if (grads[i]) use(batch, k, check.entry(name, i, grads[i], numel(k)));
  }

  // Whether the marks allow what there is of late gradients. fresh_will_do: a VOID segment that is FRESH needs none.
  void check_late_marks(const OptionalTensors& late, bool fresh_will_do) const {
    std::vector<bool> has(plan.count);
    for (size_t i = 0; i < late.size(); ++i) {
      if (!late[i]) continue;
      const int64_t k = int64_t(i) % plan.count;
      has[k] = true;
      if (!touched(k))
        check.fail(check.at("late", int64_t(i)),
                   text("be of a segment that is TOUCHED, as others are left alone (segment ", k, ")"),
                   text("mark ", int(marks[k])), "set its mark, or fold the gradient");
    }
    for (int64_t k = 0; k < plan.count; ++k)
      if (touched(k) && (marks[k] & kVoid) && !has[k] && !(fresh_will_do && fresh(k)))
        check.fail("late", text("have a gradient for segment ", k, ", which is VOID"), "None",
                   "pass what was held back of it, or fold that first");
  }

  // What the update rules ask of late gradients and partials. Returns partials, or null.
  double* check_late_update(const OptionalTensors& late, const Tensor& late_scale, const OptionalTensor& partials,
                            const Tensor& tiles_) const {
    for (const auto& [name, is_given] : {std::pair("late", !late.empty()), {"partials", partials.has_value()}})
      if (live && is_given)
        check.fail(name, "be left out where live is given", "both", "fold first, and have square_total take the norm");
    if (partials) check_partials(*partials, tiles_);
    check_batches("late", late, "late_scale", late_scale);
    check_late_marks(late, false);
    return partials ? data<double>(*partials) : nullptr;
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
      if (may_be_left_out && is_empty(tensors[k])) continue;
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
    for (size_t i = 0; i < grads.size(); ++i)
      if (grads[i]) marks[i % plan.count] = norm ? kTouched | kFresh : kTouched;
  }
  void mark_fresh() const {
    for (int64_t k = 0; k < plan.count; ++k)
      if (touched(k)) marks[k] |= kFresh;
  }
  void mark_stale() const {
    for (int64_t k = 0; k < plan.count; ++k) marks[k] &= ~kFresh;
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
