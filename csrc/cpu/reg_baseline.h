// One float: what vec.h needs of a register, for every processor. The compiler makes vectors of the loops in vec.h
// where the target has them (NEON on arm64); elsewhere fma is a library call, right and slow.
#pragma once

#include "../convert.h"
#include "../tiles.h"

namespace fusedaccum::FUSEDACCUM_ISA {

using Reg = float;
constexpr int kRegLanes = 1;

inline Reg splat(float x) { return x; }
inline Reg fma(Reg a, Reg b, Reg c) { return __builtin_fmaf(a, b, c); }
inline Reg sqrt(Reg a) { return __builtin_sqrtf(a); }
inline Reg maximum(Reg a, Reg b) { return a > b || a != a ? a : b; }

inline Reg load(const float* p) { return *p; }
inline void store(float* p, Reg a) { *p = a; }
inline void stream(float* p, Reg a) { *p = a; }
inline void fence() {}

inline Reg load(const BFloat16* p) { return to_float(*p); }
inline Reg load(const Float16* p) { return to_float(*p); }
inline void store(BFloat16* p, Reg a) { *p = to_bfloat16(a); }
inline void store(Float16* p, Reg a) { *p = to_float16(a); }

// The 16 random bits of element i are the lower half of a word where i is even, else the upper one.
inline Reg rounded_stochastically(Reg a, const uint32_t* words, int64_t i) {
  return float_of(rounded_stochastically(bits_of(a), words[i / 2] >> i % 2 * 16 & 0xffff));
}

// A sum of squares in float64. The square of a float is exact there, so it needs no fused multiply-add.
struct RegSquares {
  double sum = 0;

  void add(Reg a) { sum += double(a) * double(a); }
  void store(double* lanes) const { *lanes = sum; }
};

}  // namespace fusedaccum::FUSEDACCUM_ISA
