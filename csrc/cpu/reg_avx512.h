// One AVX-512 register of floats: what vec.h needs of it.
#pragma once

#include "../rules.h"
#include "../tiles.h"

namespace fusedaccum::FUSEDACCUM_ISA {

using Reg = __m512;
constexpr int kRegLanes = 16;

inline Reg splat(float x) { return _mm512_set1_ps(x); }
inline Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
inline Reg sqrt(Reg a) { return _mm512_sqrt_ps(a); }

// vmaxps gives b where either is not a number; a must win there if it is the one.
inline Reg maximum(Reg a, Reg b) {
  return _mm512_mask_mov_ps(_mm512_max_ps(a, b), _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a);
}

inline Reg load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Reg a) { _mm512_storeu_ps(p, a); }
inline void stream(float* p, Reg a) { _mm512_stream_ps(p, a); }
inline void fence() { _mm_sfence(); }

inline Reg load(const BFloat16* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

// To nearest even in integers: vcvtneps2bf16 flushes subnormals.
inline void store(BFloat16* p, Reg a) {
  const __m512i bits = _mm512_castps_si512(a);
  const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
  const __m512i half = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
  const __m512i rounded = _mm512_mask_add_epi32(half, odd, half, _mm512_set1_epi32(1));
  const __mmask16 number = _mm512_cmp_ps_mask(a, a, _CMP_ORD_Q);
  const __m512i upper = _mm512_mask_srli_epi32(_mm512_set1_epi32(0x7fc0), number, rounded, 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(upper));
}

// The 16 random bits of element i and of those after it are the halves of words, the lower one first.
inline Reg rounded_stochastically(Reg a, const uint32_t* words, int64_t i) {
  const __m512i bits = _mm512_castps_si512(a);
  const __m512i random = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + i / 2)));
  const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
  const __mmask16 small = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(kLargestBFloat16));
  const __m512i sum = _mm512_add_epi32(bits, random);
  return _mm512_castsi512_ps(_mm512_mask_and_epi32(bits, small, sum, _mm512_set1_epi32(0xffff0000)));
}

inline Reg load(const Float16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

inline void store(Float16* p, Reg a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}

// A sum of squares in float64 for each lane.
struct RegSquares {
  __m512d low, high;

  RegSquares() : low(_mm512_setzero_pd()), high(_mm512_setzero_pd()) {}

  void add(Reg a) {
    const __m512d l = _mm512_cvtps_pd(_mm512_castps512_ps256(a));
    const __m512d h = _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1));
    low = _mm512_fmadd_pd(l, l, low);
    high = _mm512_fmadd_pd(h, h, high);
  }
  void store(double* lanes) const {
    _mm512_storeu_pd(lanes, low);
    _mm512_storeu_pd(lanes + 8, high);
  }
};

}  // namespace fusedaccum::FUSEDACCUM_ISA
