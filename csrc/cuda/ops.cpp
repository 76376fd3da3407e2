// The operators, for tensors on a CUDA device: check everything, collect addresses, and launch on torch's current
// stream of that device. Nothing here waits for the device.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include "../call.h"
#include "../schema.h"
#include "kernels.h"

namespace fusedaccum {
namespace {

void check_torch(AOTITorchError error, const char* what) {
  if (error != AOTI_TORCH_SUCCESS) throw std::runtime_error(std::string("fusedaccum: torch could not ") + what);
}

// Makes the device of a tensor current while it lives, and finds torch's current stream there.
class OnDeviceOf {
 public:
  explicit OnDeviceOf(const Tensor& tensor) {
    const int32_t index = Place(tensor).index;
    check_torch(aoti_torch_create_cuda_guard(index, &guard_), "make the tensor's device current");
    void* stream = nullptr;
    const AOTITorchError error = aoti_torch_get_current_cuda_stream(index, &stream);
    if (error != AOTI_TORCH_SUCCESS) aoti_torch_delete_cuda_guard(guard_);
    check_torch(error, "tell the current stream");
    static const bool wide = cuda::takes_wide_arguments();
    device = {static_cast<cudaStream_t>(stream), wide};
  }
  ~OnDeviceOf() { aoti_torch_delete_cuda_guard(guard_); }
  OnDeviceOf(const OnDeviceOf&) = delete;
  OnDeviceOf& operator=(const OnDeviceOf&) = delete;

  cuda::Device device;

 private:
  CUDAGuardHandle guard_ = nullptr;
};

struct CudaCall : Call {
  cuda::Buffer buffer;

  CudaCall(const char* op, const Tensor& flat_, const Tensor& marks_, const OptionalTensor& live_,
           const Tensor& segments, const Tensor& tiles_)
      : Call(op, flat_, marks_, live_, segments, tiles_, aoti_torch_device_type_cuda()) {
    if (reinterpret_cast<uintptr_t>(flat) % 16 != 0)
      check.fail("flat", "start at a multiple of 16 bytes", "a tensor that does not", "allocate it by itself");
    plan.first_tile.push_back(tiles_.size(0));
    buffer = {flat, tiles, plan.first_tile.data(), marks, live, plan.count};
  }
};

void fold(Tensor flat, Tensor partials, Tensor marks, const OptionalTensor& live, Tensor segments, Tensor tiles,
          const OptionalTensors& grads, Tensor scale, bool norm) {
  const CudaCall call("fold", flat, marks, live, segments, tiles);
  call.check_fold(partials, tiles, scale);
  const std::vector<Elements> sources = call.gradients(grads);

  const OnDeviceOf on(flat);
  double* partial = norm ? data<double>(partials) : nullptr;
  cuda::fold(on.device, call.buffer, sources.data(), data<float>(scale), partial);
  call.mark_folded(grads, norm);
}

void found_inf(Tensor flat, Tensor marks, Tensor segments, Tensor tiles, const OptionalTensors& grads,
               Tensor found_inf) {
  const CudaCall call("found_inf", flat, marks, std::nullopt, segments, tiles);
  call.check.one("found_inf", found_inf, ScalarType::Float, {1});
  const std::vector<Elements> sources = call.gradients(grads);

  const OnDeviceOf on(flat);
  cuda::found_inf(on.device, call.buffer, sources.data(), data<float>(found_inf));
}

void square_total(Tensor flat, Tensor partials, Tensor marks, Tensor segments, Tensor tiles, Tensor total) {
  const CudaCall call("square_total", flat, marks, std::nullopt, segments, tiles);
  call.check_norm(partials, tiles, total);

  const OnDeviceOf on(flat);
  cuda::square_total(on.device, call.buffer, data<double>(partials), data<double>(total));
  call.mark_fresh();
}

void close_window(Tensor scalars, Tensor steps, Tensor marks, const OptionalTensor& live, Tensor total, Tensor divisor,
                  double max_norm, bool skip_nonfinite) {
  check_close(scalars, steps, marks, live, total, divisor, aoti_torch_device_type_cuda());

  const OnDeviceOf on(scalars);
  cuda::close_window(on.device, data<uint8_t>(marks), live ? data<uint8_t>(*live) : nullptr, marks.numel(),
                     data<float>(scalars), data<float>(steps), data<double>(total), data<double>(divisor), max_norm,
                     skip_nonfinite);
}

void rescale(Tensor flat, Tensor marks, Tensor segments, Tensor tiles, Tensor factor) {
  const CudaCall call("rescale", flat, marks, std::nullopt, segments, tiles);
  call.check.one("factor", factor, ScalarType::Float, {1});

  const OnDeviceOf on(flat);
  cuda::rescale(on.device, call.buffer, data<float>(factor));
  call.mark_stale();
}

void emit(Tensor flat, Tensor marks, const OptionalTensor& live, Tensor segments, Tensor tiles, Tensor scalars,
          const Tensors& grads) {
  const CudaCall call("emit", flat, marks, live, segments, tiles);
  call.check.one("scalars", scalars, ScalarType::Float, {3});
  const std::vector<Elements> targets = call.list("grads", grads, true);

  const OnDeviceOf on(flat);
  cuda::emit(on.device, call.buffer, data<float>(scalars), targets.data());
}

cuda::Update update_of(const CudaCall& call, const Tensor& scalars, const Tensor& steps, const Tensor& groups,
                       const Tensor& hyper, int64_t columns, const OptionalTensor& random, bool zero) {
  call.check_update(scalars, steps, groups, hyper, columns);
  const int64_t* noise = call.check_random(random);
  return {data<float>(scalars), data<float>(steps), data<int64_t>(groups), data<double>(hyper), noise, zero};
}

void adam(Tensor flat, Tensor marks, const OptionalTensor& live, Tensor segments, Tensor tiles, Tensor scalars,
          Tensor steps, Tensor groups, Tensor hyper, const Tensors& params, const Tensors& exp_avgs,
          const Tensors& exp_avg_sqs, const Tensors& max_exp_avg_sqs, const Tensors& masters,
          const OptionalTensor& random, bool zero) {
  const CudaCall call("adam", flat, marks, live, segments, tiles);
  const cuda::Update update = update_of(call, scalars, steps, groups, hyper, kAdamColumns, random, zero);
  const auto [p, m, v, v_max, master] = call.adam_lists(params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, masters);

  const OnDeviceOf on(flat);
  const Elements* const lists[] = {p.data(), m.data(), v.data(), v_max.data(), master.data()};
  cuda::adam(on.device, call.buffer, update, lists);
}

void sgd(Tensor flat, Tensor marks, const OptionalTensor& live, Tensor segments, Tensor tiles, Tensor scalars,
         Tensor steps, Tensor groups, Tensor hyper, const Tensors& params, const Tensors& momentum_buffers,
         const Tensors& masters, const OptionalTensor& random, bool zero) {
  const CudaCall call("sgd", flat, marks, live, segments, tiles);
  const cuda::Update update = update_of(call, scalars, steps, groups, hyper, kSgdColumns, random, zero);
  const auto [p, b, master] = call.sgd_lists(params, momentum_buffers, masters);

  const OnDeviceOf on(flat);
  const Elements* const lists[] = {p.data(), b.data(), master.data()};
  cuda::sgd(on.device, call.buffer, update, lists);
}

}  // namespace
}  // namespace fusedaccum

// The tests build this file for the CPU, as operators of another name.
#ifndef FUSEDACCUM_CUDA_OPERATORS
#define FUSEDACCUM_CUDA_OPERATORS STABLE_TORCH_LIBRARY_IMPL(fusedaccum, CUDA, m)
#endif

FUSEDACCUM_CUDA_OPERATORS { FUSEDACCUM_IMPLEMENT(m); }
