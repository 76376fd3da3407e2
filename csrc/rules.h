// The arithmetic of every operator for one element, on host and device.
//
// V is the value type: float on a GPU, a pack of floats on a CPU. It has a constructor from float, + - * /, and the
// functions fma, sqrt and maximum. Every multiply-add is written as fma, and the build turns contraction off, so that
// all compilers and instruction sets round alike.
//
// The functions live in an inner namespace that each translation unit names after its instruction set: the linker must
// never merge code made for one instruction set with code made for another.
#pragma once

#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#define FUSEDACCUM_HD __host__ __device__ __forceinline__
#else
#define FUSEDACCUM_HD inline __attribute__((always_inline))
#endif

#ifndef FUSEDACCUM_ISA
#define FUSEDACCUM_ISA host
#endif

namespace fusedaccum {

enum class Decay : int32_t { kNone, kCoupled, kDecoupled };

// What the rules need per segment, made once per (group, step) in float64 and rounded once.
struct AdamFactors {
  float multiplier;  // of the flat buffer; negative where the group maximizes
  float decay;       // weight_decay, times lr where decoupled
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float step_size;  // lr / (1 - beta1^step) * root
  float eps;        // eps * root, with root = sqrt(1 - beta2^step)
  Decay decay_kind;
  bool amsgrad;
};

struct SgdFactors {
  float multiplier;
  float weight_decay;
  float momentum;
  float one_minus_dampening;
  float lr;
  bool nesterov;
  bool first;  // the segment's first update: the momentum buffer starts as the gradient
};

// What the random numbers of a segment's elements are made of.
struct Noise {
  uint64_t seed;
  uint32_t stream, update;
};

// A counter, and what is made of it.
struct Philox {
  uint32_t word[4];
};

constexpr uint32_t kLargestBFloat16 = 0x7f7f0000;  // as a float's bits

constexpr int64_t kAdamColumns = 8;
constexpr int64_t kSgdColumns = 6;

namespace FUSEDACCUM_ISA {

template <class V>
FUSEDACCUM_HD V fold_first(V scale, V grad) {
  return scale * grad;
}

template <class V>
FUSEDACCUM_HD V fold_next(V scale, V grad, V flat) {
  return fma(scale, grad, flat);
}

// What the step reads: the multiplier of the flat buffer, whether the update is skipped, the norm of the mean.
struct Closing {
  float multiplier, skip, norm;
};

// A norm that is not a number passes through the clip factor: every comparison with it is false.
FUSEDACCUM_HD Closing close_window(double total, double divisor, double max_norm, bool skip_nonfinite) {
  if (divisor == 0) return {0.0f, 1.0f, 0.0f};
  const double norm = ::sqrt(total) / divisor;
  if (skip_nonfinite && !(total < HUGE_VAL)) return {0.0f, 1.0f, float(norm)};
  const double clip = max_norm == HUGE_VAL ? 1.0 : max_norm / (norm + 1e-6);
  return {float(1 / divisor * (clip >= 1.0 ? 1.0 : clip)), 0.0f, float(norm)};
}

// base^exponent for a whole number, by repeated squaring: the same bits on every device, which pow does not promise.
FUSEDACCUM_HD double power(double base, int64_t exponent) {
  double result = 1;
  for (; exponent > 0; exponent >>= 1, base *= base)
    if (exponent & 1) result *= base;
  return result;
}

// Philox4x32-10: Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3". 128 random bits.
FUSEDACCUM_HD Philox philox(Philox counter, uint64_t seed) {
  uint32_t key[2] = {uint32_t(seed), uint32_t(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(0xD2511F53) * counter.word[0], b = uint64_t(0xCD9E8D57) * counter.word[2];
    counter = {{uint32_t(b >> 32) ^ counter.word[1] ^ key[0], uint32_t(b), uint32_t(a >> 32) ^ counter.word[3] ^ key[1],
                uint32_t(a)}};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return counter;
}

// The block that holds 16 random bits for element i of a segment, and for its 7 neighbours.
FUSEDACCUM_HD Philox random_block(const Noise& noise, int64_t i) {
  const uint64_t block = uint64_t(i) / 8;
  return philox({{uint32_t(block), uint32_t(block >> 32), noise.stream, noise.update}}, noise.seed);
}

// The bits of a float, rounded stochastically to bfloat16: those below bfloat16's last carry into it with the
// probability that they stand for. From the largest finite bfloat16 on, which must not become infinite by chance, they
// are left to rounding to nearest.
FUSEDACCUM_HD uint32_t rounded_stochastically(uint32_t bits, uint32_t random) {
  return (bits & 0x7fffffff) < kLargestBFloat16 ? (bits + random) & 0xffff0000 : bits;
}

// hyper: one row in the order of ADAM_COLUMNS.
FUSEDACCUM_HD AdamFactors adam_factors(const double* hyper, double step, float multiplier) {
  const double lr = hyper[0], beta1 = hyper[1], beta2 = hyper[2], eps = hyper[3], weight_decay = hyper[4];
  const bool decoupled = hyper[5] != 0, amsgrad = hyper[6] != 0, maximize = hyper[7] != 0;
  AdamFactors f;
  f.multiplier = maximize ? -multiplier : multiplier;
  f.decay = float(decoupled ? lr * weight_decay : weight_decay);
  f.one_minus_beta1 = float(1 - beta1);
  f.beta2 = float(beta2);
  f.one_minus_beta2 = float(1 - beta2);
  // m / (sqrt(v) / root + eps) = root * m / (sqrt(v) + eps * root): one division and one rounding less per element.
  const double root = ::sqrt(1 - power(beta2, int64_t(step)));
  f.step_size = float(lr / (1 - power(beta1, int64_t(step))) * root);
  f.eps = float(eps * root);
  f.decay_kind = weight_decay == 0 ? Decay::kNone : decoupled ? Decay::kDecoupled : Decay::kCoupled;
  f.amsgrad = amsgrad;
  return f;
}

template <class V>
struct AdamState {
  V p, m, v, v_max;
};

template <class V>
FUSEDACCUM_HD void adam(const AdamFactors& f, V flat, AdamState<V>& s) {
  V g = flat * V(f.multiplier);
  // A weight decay of 0 is left out: 0 * p is not 0 where p is infinite.
  if (f.decay_kind == Decay::kDecoupled) s.p = fma(V(-f.decay), s.p, s.p);
  if (f.decay_kind == Decay::kCoupled) g = fma(V(f.decay), s.p, g);
  s.m = fma(V(f.one_minus_beta1), g - s.m, s.m);
  s.v = fma(V(f.one_minus_beta2) * g, g, V(f.beta2) * s.v);
  if (f.amsgrad) s.v_max = maximum(s.v_max, s.v);
  const V root = sqrt(f.amsgrad ? s.v_max : s.v);
  s.p = fma(V(-f.step_size), s.m / (root + V(f.eps)), s.p);
}

// hyper: one row in the order of SGD_COLUMNS.
FUSEDACCUM_HD SgdFactors sgd_factors(const double* hyper, double step, float multiplier) {
  const double lr = hyper[0], momentum = hyper[1], dampening = hyper[2], weight_decay = hyper[3];
  const bool nesterov = hyper[4] != 0, maximize = hyper[5] != 0;
  SgdFactors f;
  f.multiplier = maximize ? -multiplier : multiplier;
  f.weight_decay = float(weight_decay);
  f.momentum = float(momentum);
  f.one_minus_dampening = float(1 - dampening);
  f.lr = float(lr);
  f.nesterov = nesterov;
  f.first = step == 1;
  return f;
}

template <class V>
struct SgdState {
  V p, b;
};

// with_momentum: the group has momentum and the segment has a buffer for it.
template <class V>
FUSEDACCUM_HD void sgd(const SgdFactors& f, bool with_momentum, V flat, SgdState<V>& s) {
  V g = flat * V(f.multiplier);
  if (f.weight_decay != 0) g = fma(V(f.weight_decay), s.p, g);
  if (with_momentum) {
    s.b = f.first ? g : fma(V(f.momentum), s.b, V(f.one_minus_dampening) * g);
    g = f.nesterov ? fma(V(f.momentum), s.b, g) : s.b;
  }
  s.p = fma(V(-f.lr), g, s.p);
}

}  // namespace FUSEDACCUM_ISA
}  // namespace fusedaccum
