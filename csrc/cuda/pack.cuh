// All memory movement of the CUDA kernels: packs of neighbouring elements, the three dtypes, unaligned sources, tails.
//
// A block works on one tile. A thread loads all that it needs for two packs before it computes on either, so that
// enough loads are in flight. Whole packs at aligned addresses are moved as vectors of up to 16 bytes, other elements
// one by one.
#pragma once

#include <type_traits>

#include "../rules.h"
#include "../tiles.h"
#include "launch.cuh"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#else
#include "../convert.h"
#endif

#define FUSEDACCUM_DEVICE __device__ __forceinline__

namespace fusedaccum::cuda {

constexpr int kUnroll = 2;

// One float, as the rules compute on it.
struct Lane {
  float x;

  Lane() = default;
  FUSEDACCUM_HD explicit Lane(float value) : x(value) {}
};

FUSEDACCUM_HD Lane operator+(Lane a, Lane b) { return Lane(a.x + b.x); }
FUSEDACCUM_HD Lane operator-(Lane a, Lane b) { return Lane(a.x - b.x); }
FUSEDACCUM_HD Lane operator*(Lane a, Lane b) { return Lane(a.x * b.x); }
FUSEDACCUM_HD Lane operator/(Lane a, Lane b) { return Lane(a.x / b.x); }
FUSEDACCUM_HD Lane fma(Lane a, Lane b, Lane c) { return Lane(::fmaf(a.x, b.x, c.x)); }
FUSEDACCUM_HD Lane sqrt(Lane a) { return Lane(::sqrtf(a.x)); }
FUSEDACCUM_HD Lane maximum(Lane a, Lane b) { return a.x > b.x || a.x != a.x ? a : b; }

#if defined(__CUDACC__)
FUSEDACCUM_DEVICE uint32_t bits_of(float x) { return __float_as_uint(x); }
FUSEDACCUM_DEVICE float float_of(uint32_t bits) { return __uint_as_float(bits); }
FUSEDACCUM_DEVICE float to_float(BFloat16 x) { return float_of(uint32_t(x.bits) << 16); }
FUSEDACCUM_DEVICE float to_float(Float16 x) { return __half2float(__ushort_as_half(x.bits)); }
FUSEDACCUM_DEVICE BFloat16 to_bfloat16(float x) { return {__bfloat16_as_ushort(__float2bfloat16_rn(x))}; }
FUSEDACCUM_DEVICE Float16 to_float16(float x) { return {__half_as_ushort(__float2half_rn(x))}; }
#endif

FUSEDACCUM_DEVICE float to_float(float x) { return x; }
FUSEDACCUM_DEVICE void convert(float x, float& out) { out = x; }
FUSEDACCUM_DEVICE void convert(float x, BFloat16& out) { out = to_bfloat16(x); }
FUSEDACCUM_DEVICE void convert(float x, Float16& out) { out = to_float16(x); }

// kWidth elements as they lie in memory.
template <class T, int kWidth>
struct alignas(sizeof(T) * kWidth < 16 ? sizeof(T) * kWidth : 16) Pack {
  T at[kWidth];
};

// The vector that a pack is moved in: 16 bytes, or the whole pack where it has less.
template <int kBytes>
struct Vector {
  using Type = uint4;
};
template <>
struct Vector<8> {
  using Type = uint2;
};

// How many elements of a pack there are: all of them at addresses that fit vectors, or `count`, wherever they lie.
struct Full {};
struct Some {
  int count;
};

template <class V>
FUSEDACCUM_DEVICE bool is_aligned(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % sizeof(V) == 0;
}

template <class T, int kWidth>
FUSEDACCUM_DEVICE void load(Pack<T, kWidth>& pack, const T* p, Full) {
  using V = typename Vector<sizeof(pack)>::Type;
#pragma unroll
  for (int i = 0; i < int(sizeof(pack) / sizeof(V)); ++i)
    reinterpret_cast<V*>(&pack)[i] = reinterpret_cast<const V*>(p)[i];
}

template <class T, int kWidth>
FUSEDACCUM_DEVICE void store(const Pack<T, kWidth>& pack, T* p, Full) {
  using V = typename Vector<sizeof(pack)>::Type;
#pragma unroll
  for (int i = 0; i < int(sizeof(pack) / sizeof(V)); ++i)
    reinterpret_cast<V*>(p)[i] = reinterpret_cast<const V*>(&pack)[i];
}

template <class T, int kWidth>
FUSEDACCUM_DEVICE void load(Pack<T, kWidth>& pack, const T* p, Some some) {
  if (some.count == kWidth && is_aligned<typename Vector<sizeof(pack)>::Type>(p)) return load(pack, p, Full());
#pragma unroll
  for (int i = 0; i < kWidth; ++i)
    if (i < some.count) pack.at[i] = p[i];
}

template <class T, int kWidth>
FUSEDACCUM_DEVICE void store(const Pack<T, kWidth>& pack, T* p, Some some) {
  if (some.count == kWidth && is_aligned<typename Vector<sizeof(pack)>::Type>(p)) return store(pack, p, Full());
#pragma unroll
  for (int i = 0; i < kWidth; ++i)
    if (i < some.count) p[i] = pack.at[i];
}

FUSEDACCUM_DEVICE bool is_inside(int, Full) { return true; }
FUSEDACCUM_DEVICE bool is_inside(int i, Some some) { return i < some.count; }

// A tensor of one dtype, from the tile's first element on.
template <class T, int kWidth>
struct Stream {
  using Raw = Pack<std::remove_const_t<T>, kWidth>;
  static constexpr bool kPresent = true;
  T* p;

  FUSEDACCUM_DEVICE bool aligned() const { return is_aligned<typename Vector<sizeof(Raw)>::Type>(p); }
  FUSEDACCUM_DEVICE bool is_bfloat16() const { return std::is_same_v<T, BFloat16>; }
  template <class Extent>
  FUSEDACCUM_DEVICE void read(Raw& raw, int64_t i, Extent extent) const {
    load(raw, p + i, extent);
  }
  template <class Extent>
  FUSEDACCUM_DEVICE void write(const Raw& raw, int64_t i, Extent extent) const {
    store(raw, p + i, extent);
  }
  FUSEDACCUM_DEVICE static float get(const Raw& raw, int i) { return to_float(raw.at[i]); }
  FUSEDACCUM_DEVICE static void set(Raw& raw, int i, float x) { convert(x, raw.at[i]); }
};

// Where there is no tensor: reads leave things as they are, writes do nothing.
template <int kWidth>
struct NoStream {
  struct Raw {};
  static constexpr bool kPresent = false;

  FUSEDACCUM_DEVICE bool aligned() const { return true; }
  template <class Extent>
  FUSEDACCUM_DEVICE void read(Raw&, int64_t, Extent) const {}
  template <class Extent>
  FUSEDACCUM_DEVICE void write(const Raw&, int64_t, Extent) const {}
  FUSEDACCUM_DEVICE static float get(const Raw&, int) { return 0.0f; }
  FUSEDACCUM_DEVICE static void set(Raw&, int, float) {}
};

// A tensor whose dtype is looked at for every pack: for mixtures that are too rare for code of their own.
template <int kWidth>
struct AnyStream {
  using Raw = Pack<float, kWidth>;
  static constexpr bool kPresent = true;
  Entry entry;
  int64_t start;

  FUSEDACCUM_DEVICE bool aligned() const { return false; }
  FUSEDACCUM_DEVICE bool is_bfloat16() const { return entry.dtype() == DType::kBFloat16; }
  template <class Extent>
  FUSEDACCUM_DEVICE void read(Raw& raw, int64_t i, Extent extent) const {
    if (entry.absent()) return;
    if (entry.dtype() == DType::kFloat32) return read_as<float>(raw, i, extent);
    if (entry.dtype() == DType::kBFloat16) return read_as<BFloat16>(raw, i, extent);
    read_as<Float16>(raw, i, extent);
  }
  template <class Extent>
  FUSEDACCUM_DEVICE void write(const Raw& raw, int64_t i, Extent extent) const {
    if (entry.absent()) return;
    if (entry.dtype() == DType::kFloat32) return write_as<float>(raw, i, extent);
    if (entry.dtype() == DType::kBFloat16) return write_as<BFloat16>(raw, i, extent);
    write_as<Float16>(raw, i, extent);
  }
  FUSEDACCUM_DEVICE static float get(const Raw& raw, int i) { return raw.at[i]; }
  FUSEDACCUM_DEVICE static void set(Raw& raw, int i, float x) { raw.at[i] = x; }

 private:
  template <class T, class Extent>
  FUSEDACCUM_DEVICE void read_as(Raw& raw, int64_t i, Extent extent) const {
    Pack<T, kWidth> pack;
    load(pack, entry.data<T>() + start + i, extent);
#pragma unroll
    for (int j = 0; j < kWidth; ++j)
      if (is_inside(j, extent)) raw.at[j] = to_float(pack.at[j]);
  }
  template <class T, class Extent>
  FUSEDACCUM_DEVICE void write_as(const Raw& raw, int64_t i, Extent extent) const {
    Pack<T, kWidth> pack;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) convert(raw.at[j], pack.at[j]);
    store(pack, entry.data<T>() + start + i, extent);
  }
};

// This thread's packs of a tile: work.load(slot, i, extent) for kUnroll of them, then work.use(slot, i, extent) for
// each; i is the pack's first element. vectors: whether every stream of the tile lies at an aligned address.
template <int kWidth, class Work>
FUSEDACCUM_DEVICE void each_pack(int64_t count, bool vectors, Work& work) {
  constexpr int kStride = kThreads * kWidth;
  const int own = int(threadIdx.x) * kWidth;
  if (vectors && count == kTile) {
    for (int base = 0; base < kTile; base += kUnroll * kStride) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) work.load(u, base + u * kStride + own, Full());
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) work.use(u, base + u * kStride + own, Full());
    }
    return;
  }
  for (int i = own; i < count; i += kStride) {
    const Some some{int(count) - i < kWidth ? int(count) - i : kWidth};
    work.load(0, i, some);
    work.use(0, i, some);
  }
}

}  // namespace fusedaccum::cuda
