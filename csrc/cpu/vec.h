// The pack of 16 floats that the CPU kernels compute on, and all memory movement: full and partial packs, the three
// dtypes, non-temporal stores. 16 lanes on every instruction set, so that sums have one order and results the same
// bits.
#pragma once

#include "../tiles.h"

#if defined(FUSEDACCUM_REG_AVX512)
#include "reg_avx512.h"
#elif defined(FUSEDACCUM_REG_AVX2)
#include "reg_avx2.h"
#else
#include "reg_baseline.h"
#endif

#define FUSEDACCUM_INLINE inline __attribute__((always_inline))

namespace fusedaccum::FUSEDACCUM_ISA {

constexpr int kLanes = 16;
constexpr int kRegs = kLanes / kRegLanes;

struct Vec {
  Reg r[kRegs];

  Vec() = default;
  explicit Vec(float x) {
    for (int i = 0; i < kRegs; ++i) r[i] = splat(x);
  }
};

FUSEDACCUM_INLINE Vec operator+(Vec a, Vec b) {
  for (int i = 0; i < kRegs; ++i) a.r[i] = a.r[i] + b.r[i];
  return a;
}
FUSEDACCUM_INLINE Vec operator-(Vec a, Vec b) {
  for (int i = 0; i < kRegs; ++i) a.r[i] = a.r[i] - b.r[i];
  return a;
}
FUSEDACCUM_INLINE Vec operator*(Vec a, Vec b) {
  for (int i = 0; i < kRegs; ++i) a.r[i] = a.r[i] * b.r[i];
  return a;
}
FUSEDACCUM_INLINE Vec operator/(Vec a, Vec b) {
  for (int i = 0; i < kRegs; ++i) a.r[i] = a.r[i] / b.r[i];
  return a;
}

FUSEDACCUM_INLINE Vec maximum(Vec a, Vec b) {
  for (int i = 0; i < kRegs; ++i) a.r[i] = maximum(a.r[i], b.r[i]);
  return a;
}

FUSEDACCUM_INLINE Vec fma(Vec a, Vec b, Vec c) {
  for (int i = 0; i < kRegs; ++i) a.r[i] = fma(a.r[i], b.r[i], c.r[i]);
  return a;
}

FUSEDACCUM_INLINE Vec sqrt(Vec a) {
  for (int i = 0; i < kRegs; ++i) a.r[i] = sqrt(a.r[i]);
  return a;
}

// How many elements of a pack there are: all of them, or what a tile's end leaves.
struct Full {};
struct Part {
  int count;
};

template <class T>
FUSEDACCUM_INLINE Vec load(const T* p, Full) {
  Vec out;
  for (int i = 0; i < kRegs; ++i) out.r[i] = load(p + i * kRegLanes);
  return out;
}

template <class T>
FUSEDACCUM_INLINE void store(T* p, Vec a, Full) {
  for (int i = 0; i < kRegs; ++i) store(p + i * kRegLanes, a.r[i]);
}

// A partial pack goes through a whole one in memory; its other lanes are 0.
template <class T>
FUSEDACCUM_INLINE Vec load(const T* p, Part part) {
  T pack[kLanes] = {};
  memcpy(pack, p, part.count * sizeof(T));
  return load(pack, Full());
}

template <class T>
FUSEDACCUM_INLINE void store(T* p, Vec a, Part part) {
  T pack[kLanes];
  store(pack, a, Full());
  memcpy(p, pack, part.count * sizeof(T));
}

// Non-temporal: p is a multiple of 64 bytes, and whoever calls this calls fence() before anyone else reads.
FUSEDACCUM_INLINE void stream(float* p, Vec a, Full) {
  for (int i = 0; i < kRegs; ++i) stream(p + i * kRegLanes, a.r[i]);
}
FUSEDACCUM_INLINE void stream(float* p, Vec a, Part part) { store(p, a, part); }

// The dtype is looked at once per pack: the branch is always the same one, and one loop serves all mixtures of dtypes.
// bfloat16 comes first, on the straight path: 4 % slower for float32, which waits for memory, and 14 % faster for
// bfloat16, which waits for this code (adam in AVX-512, all data in the L2 cache).
FUSEDACCUM_INLINE bool is(DType seen, DType dtype) { return __builtin_expect(seen == dtype, true); }

template <class Extent>
FUSEDACCUM_INLINE Vec load(Elements e, int64_t i, Extent extent) {
  if (is(e.dtype, DType::kBFloat16)) return load(static_cast<const BFloat16*>(e.data) + i, extent);
  if (is(e.dtype, DType::kFloat32)) return load(static_cast<const float*>(e.data) + i, extent);
  return load(static_cast<const Float16*>(e.data) + i, extent);
}

template <class Extent>
FUSEDACCUM_INLINE void store(Elements e, int64_t i, Vec a, Extent extent) {
  if (is(e.dtype, DType::kBFloat16)) return store(static_cast<BFloat16*>(e.data) + i, a, extent);
  if (is(e.dtype, DType::kFloat32)) return store(static_cast<float*>(e.data) + i, a, extent);
  store(static_cast<Float16*>(e.data) + i, a, extent);
}

// Sum of squares in float64, lane by lane, the lanes added in a fixed order.
struct Squares {
  RegSquares lanes[kRegs];

  Squares() {}  // written out: GCC compiles implicit constructors for the default target

  void add(Vec a, Full) {
    for (int i = 0; i < kRegs; ++i) lanes[i].add(a.r[i]);
  }
  // Lanes past the end must add nothing, and a computed value need not be 0 there: inf * 0.
  void add(Vec a, Part part) {
    float pack[kLanes];
    store(pack, a, Full());
    add(load(pack, part), Full());
  }
  double total() const {
    double sum[kLanes];
    for (int i = 0; i < kRegs; ++i) lanes[i].store(sum + i * kRegLanes);
#pragma GCC unroll 4
    for (int width = kLanes / 2; width > 0; width /= 2)
#pragma GCC unroll 8
      for (int i = 0; i < width; ++i) sum[i] += sum[i + width];
    return sum[0];
  }
};

// A function that loops over packs. Left alone, GCC calls the loop's body as a function on AVX2.
#define FUSEDACCUM_KERNEL __attribute__((flatten)) static

// body(i, extent) for each pack of `count` elements; i is the index of its first.
template <class Body>
FUSEDACCUM_INLINE void each_pack(int64_t count, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) body(i, Full());
  if (i < count) body(i, Part{int(count - i)});
}

}  // namespace fusedaccum::FUSEDACCUM_ISA
