// One AVX2 register of floats (with FMA and F16C): what vec.h needs of it.
#pragma once

#include "../rules.h"
#include "../tiles.h"

namespace fusedaccum::FUSEDACCUM_ISA {

using Reg = __m256;
constexpr int kRegLanes = 8;

inline Reg splat(float x) { return _mm256_set1_ps(x); }
inline Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
inline Reg sqrt(Reg a) { return _mm256_sqrt_ps(a); }

// vmaxps gives b where either is not a number; a must win there if it is the one.
inline Reg maximum(Reg a, Reg b) { return _mm256_blendv_ps(_mm256_max_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q)); }

inline Reg load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Reg a) { _mm256_storeu_ps(p, a); }
inline void stream(float* p, Reg a) { _mm256_stream_ps(p, a); }
inline void fence() { _mm_sfence(); }

inline Reg load(const BFloat16* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

// To nearest even in integers. The blend by bytes keeps the lower half, where no result has a bit set.
inline void store(BFloat16* p, Reg a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i upper = _mm256_srli_epi32(rounded, 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  const __m256i chosen = _mm256_blendv_epi8(upper, _mm256_set1_epi32(0x7fc0), nan);
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(chosen), _mm256_extracti128_si256(chosen, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}

// The 16 random bits of element i and of those after it are the halves of words, the lower one first.
inline Reg rounded_stochastically(Reg a, const uint32_t* words, int64_t i) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i random = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(words + i / 2)));
  const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
  const __m256i small = _mm256_cmpgt_epi32(_mm256_set1_epi32(kLargestBFloat16), magnitude);
  const __m256i cut = _mm256_and_si256(_mm256_add_epi32(bits, random), _mm256_set1_epi32(0xffff0000));
  return _mm256_castsi256_ps(_mm256_blendv_epi8(bits, cut, small));
}

inline Reg load(const Float16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }

inline void store(Float16* p, Reg a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}

// A sum of squares in float64 for each lane.
struct RegSquares {
  __m256d low, high;

  RegSquares() : low(_mm256_setzero_pd()), high(_mm256_setzero_pd()) {}

  void add(Reg a) {
    const __m256d l = _mm256_cvtps_pd(_mm256_castps256_ps128(a));
    const __m256d h = _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1));
    low = _mm256_fmadd_pd(l, l, low);
    high = _mm256_fmadd_pd(h, h, high);
  }
  void store(double* lanes) const {
    _mm256_storeu_pd(lanes, low);
    _mm256_storeu_pd(lanes + 4, high);
  }
};

}  // namespace fusedaccum::FUSEDACCUM_ISA
