// One float: what vec.h needs of a register, for every processor. The compiler makes vectors of the loops in vec.h
// where the target has them (NEON on arm64); elsewhere fma is a library call, right and slow.
#pragma once

#include "../tiles.h"

namespace fusedaccum::FUSEDACCUM_ISA {

using Reg = float;
constexpr int kRegLanes = 1;

inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

inline Reg splat(float x) { return x; }
inline Reg fma(Reg a, Reg b, Reg c) { return __builtin_fmaf(a, b, c); }
inline Reg sqrt(Reg a) { return __builtin_sqrtf(a); }
inline Reg maximum(Reg a, Reg b) { return a > b || a != a ? a : b; }

inline Reg load(const float* p) { return *p; }
inline void store(float* p, Reg a) { *p = a; }
inline void stream(float* p, Reg a) { *p = a; }
inline void fence() {}

inline Reg load(const BFloat16* p) { return float_of(uint32_t(p->bits) << 16); }

// To nearest even in integers.
inline void store(BFloat16* p, Reg a) {
  const uint32_t bits = bits_of(a);
  p->bits = a != a ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline Reg load(const Float16* p) {
  const uint32_t sign = uint32_t(p->bits & 0x8000) << 16, exponent = p->bits & 0x7c00, fraction = p->bits & 0x3ff;
  if (exponent == 0) return float_of(sign | bits_of(float(fraction) * 0x1p-24f));
  if (exponent == 0x7c00) return float_of(sign | 0x7f800000 | fraction << 13 | (fraction ? 0x400000 : 0));
  return float_of(sign | (((exponent | fraction) << 13) + 0x38000000));  // the exponent's bias is 112 larger
}

inline void store(Float16* p, Reg a) {
  const uint32_t sign = bits_of(a) >> 16 & 0x8000, bits = bits_of(a) & 0x7fffffff;
  uint32_t half;
  if (bits > 0x7f800000) {  // not a number: made quiet, the upper fraction bits kept, as the processors do
    half = 0x7e00 | (bits >> 13 & 0x3ff);
  } else if (bits >= 0x47800000) {  // 65536 and more
    half = 0x7c00;
  } else if (bits < 0x38800000) {  // subnormal: next to 0.5 a float's last bit is worth 2^-24, so the addition rounds
    half = bits_of(float_of(bits) + 0.5f) - bits_of(0.5f);
  } else {
    half = (bits + 0xfff + (bits >> 13 & 1) - 0x38000000) >> 13;
  }
  p->bits = uint16_t(sign | half);
}

// A sum of squares in float64. The square of a float is exact there, so it needs no fused multiply-add.
struct RegSquares {
  double sum = 0;

  void add(Reg a) { sum += double(a) * double(a); }
  void store(double* lanes) const { *lanes = sum; }
};

}  // namespace fusedaccum::FUSEDACCUM_ISA
