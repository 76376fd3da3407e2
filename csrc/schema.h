// The signature of every operator. fusedaccum/ops.py says what they do; names and order of the arguments are the same.
#pragma once

namespace fusedaccum {

constexpr const char* kSchemas[] = {
    "fold(Tensor(a!) flat, Tensor(b!) partials, Tensor(c!) marks, Tensor(d!)? live, Tensor segments, Tensor tiles, "
    "Tensor?[] grads, Tensor scale, bool norm) -> ()",

    "found_inf(Tensor flat, Tensor marks, Tensor segments, Tensor tiles, Tensor?[] grads, Tensor(a!) found_inf) -> ()",

    "square_total(Tensor flat, Tensor(a!) partials, Tensor(b!) marks, Tensor segments, Tensor tiles, "
    "Tensor(c!) total) -> ()",

    "close_window(Tensor(a!) scalars, Tensor(b!) steps, Tensor marks, Tensor? live, Tensor total, Tensor divisor, "
    "float max_norm, bool skip_nonfinite) -> ()",

    "rescale(Tensor(a!) flat, Tensor(b!) marks, Tensor segments, Tensor tiles, Tensor factor) -> ()",

    "emit(Tensor flat, Tensor marks, Tensor? live, Tensor segments, Tensor tiles, Tensor scalars, Tensor(a!)[] grads) "
    "-> ()",

    "adam(Tensor(a!) flat, Tensor marks, Tensor? live, Tensor segments, Tensor tiles, Tensor scalars, Tensor steps, "
    "Tensor groups, "
    "Tensor hyper, Tensor(b!)[] params, Tensor(c!)[] exp_avgs, Tensor(d!)[] exp_avg_sqs, "
    "Tensor(e!)[] max_exp_avg_sqs, Tensor(f!)[] masters, Tensor? random, bool zero) -> ()",

    "sgd(Tensor(a!) flat, Tensor marks, Tensor? live, Tensor segments, Tensor tiles, Tensor scalars, Tensor steps, "
    "Tensor groups, "
    "Tensor hyper, Tensor(b!)[] params, Tensor(c!)[] momentum_buffers, Tensor(d!)[] masters, Tensor? random, "
    "bool zero) -> ()",
};

}  // namespace fusedaccum

// The functions of these names, registered as the operators. The schemas above and this list name them all.
#define FUSEDACCUM_IMPLEMENT(m)                                 \
  m.impl("fold", TORCH_BOX(&fusedaccum::fold));                 \
  m.impl("found_inf", TORCH_BOX(&fusedaccum::found_inf));       \
  m.impl("square_total", TORCH_BOX(&fusedaccum::square_total)); \
  m.impl("close_window", TORCH_BOX(&fusedaccum::close_window)); \
  m.impl("rescale", TORCH_BOX(&fusedaccum::rescale));           \
  m.impl("emit", TORCH_BOX(&fusedaccum::emit));                 \
  m.impl("adam", TORCH_BOX(&fusedaccum::adam));                 \
  m.impl("sgd", TORCH_BOX(&fusedaccum::sgd))
