// The two 16-bit formats to float and back, one element at a time, in plain integers: for processors and compilers
// without instructions for it.
#pragma once

#include <cstdint>
#include <cstring>

#include "rules.h"
#include "tiles.h"

namespace fusedaccum::FUSEDACCUM_ISA {

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

inline float to_float(BFloat16 x) { return float_of(uint32_t(x.bits) << 16); }

// To nearest even.
inline BFloat16 to_bfloat16(float a) {
  const uint32_t bits = bits_of(a);
  return {a != a ? uint16_t(0x7fc0) : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline float to_float(Float16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, exponent = x.bits & 0x7c00, fraction = x.bits & 0x3ff;
  if (exponent == 0) return float_of(sign | bits_of(float(fraction) * 0x1p-24f));
  if (exponent == 0x7c00) return float_of(sign | 0x7f800000 | fraction << 13 | (fraction ? 0x400000 : 0));
  return float_of(sign | (((exponent | fraction) << 13) + 0x38000000));  // the exponent's bias is 112 larger
}

// To nearest even.
inline Float16 to_float16(float a) {
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
  return {uint16_t(sign | half)};
}

}  // namespace fusedaccum::FUSEDACCUM_ISA
