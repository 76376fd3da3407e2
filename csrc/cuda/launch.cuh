// How kernels are launched: the macro, what they get by value, and the division of many segments among launches.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "kernels.h"

// The tests execute the kernels on a CPU and say themselves what a launch is.
#ifndef FUSEDACCUM_LAUNCH
#define FUSEDACCUM_LAUNCH(kernel, blocks, threads, stream, ...) kernel<<<blocks, threads, 0, stream>>>(__VA_ARGS__)
#endif

namespace fusedaccum::cuda {

constexpr int kThreads = 256;

// What fits into the arguments of one kernel, with 176 bytes or more left for the rest of them.
constexpr int kNarrowBytes = 3920;
#if defined(CUDART_VERSION) && CUDART_VERSION < 12010
constexpr int kWideBytes = kNarrowBytes;
#else
constexpr int kWideBytes = 32000;
#endif

// A table that a kernel gets by value. It is passed as `const Table<...> __grid_constant__ name`, in this order of
// words for the tests' sake, and then read in place by any index.
template <class T, int kBytes>
struct Table {
  static constexpr int kSize = kBytes;
  static constexpr int64_t kItems = kBytes / sizeof(T);
  T at[kItems];
};

template <class T>
constexpr int kSizeOf = std::decay_t<T>::kSize;

// A tensor's address with what else a kernel must know of it: addresses have 57 bits at most.
struct Entry {
  uint64_t bits;

  static constexpr int kDTypeShift = 62, kFirstShift = 61;
  static constexpr uint64_t kAddress = (uint64_t(1) << kFirstShift) - 1;

  static Entry of(const Elements& e, bool first = false) {
    return {reinterpret_cast<uint64_t>(e.data) | uint64_t(e.dtype) << kDTypeShift | uint64_t(first) << kFirstShift};
  }
  FUSEDACCUM_HD bool absent() const { return (bits & kAddress) == 0; }
  FUSEDACCUM_HD bool first() const { return bits >> kFirstShift & 1; }
  FUSEDACCUM_HD DType dtype() const { return DType(bits >> kDTypeShift); }
  template <class T>
  FUSEDACCUM_HD T* data() const {
#if defined(__CUDA_ARCH__)
    // Says that the memory is global: without it nvcc emits accesses that first find out, and that are narrower.
    return static_cast<T*>(__cvta_global_to_generic(bits & kAddress));
#else
    return reinterpret_cast<T*>(bits & kAddress);
#endif
  }
};

inline void check_launch(const char* op) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess)
    throw std::runtime_error(std::string(op) + ": the kernel must start, got \"" + cudaGetErrorString(error) +
                             "\"; an error of an earlier kernel shows here too: CUDA_LAUNCH_BLOCKING=1 tells which");
}

// Segments [begin, end) of one launch. tiles: those of its first segment on.
struct Part {
  int64_t begin, end;
  int64_t first_tile, tile_count;
};

// Calls launch(part) for the segments that are `wanted`, `most` at a time; segments before the first and after the last
// wanted one are left out.
template <class Wanted, class Launch>
void for_each_part(const Buffer& buffer, int64_t most, const Wanted& wanted, const Launch& launch) {
  int64_t begin = 0;
  while (begin < buffer.count) {
    while (begin < buffer.count && !wanted(begin)) ++begin;
    const int64_t limit = std::min(buffer.count, begin + most);
    int64_t end = limit;
    while (end > begin && !wanted(end - 1)) --end;
    const int64_t first = buffer.first_tile[begin], tiles = buffer.first_tile[end] - first;
    if (tiles > 0) launch(Part{begin, end, first, tiles});
    begin = limit;
  }
}

// Fills a table of the size that the part needs and calls launch(table). fill(segment, items): `stride` of them each.
template <class T, class Fill, class Launch>
void with_table(const Part& part, int64_t stride, const Fill& fill, const Launch& launch) {
  const auto filled = [&](auto& table) {
    for (int64_t k = part.begin; k < part.end; ++k) fill(k, table.at + (k - part.begin) * stride);
    launch(table);
  };
  if ((part.end - part.begin) * stride <= Table<T, kNarrowBytes>::kItems) {
    Table<T, kNarrowBytes> table;
    filled(table);
  } else {
    Table<T, kWideBytes> table;
    filled(table);
  }
}

// How many items of type T a launch can be given.
template <class T>
int64_t table_size(const Device& device) {
  return device.wide ? Table<T, kWideBytes>::kItems : Table<T, kNarrowBytes>::kItems;
}

// For the `wanted` segments, in as few launches as their tables allow: launch(part, table).
template <class T, class Wanted, class Fill, class Launch>
void launch_parts(const char* op, const Device& device, const Buffer& buffer, int64_t stride, const Wanted& wanted,
                  const Fill& fill, const Launch& launch) {
  for_each_part(buffer, table_size<T>(device) / stride, wanted, [&](const Part& part) {
    with_table<T>(part, stride, fill, [&](const auto& table) { launch(part, table); });
    check_launch(op);
  });
}

// The same with the segments' marks.
template <class Wanted, class Launch>
void launch_with_marks(const char* op, const Device& device, const Buffer& buffer, const Wanted& wanted,
                       const Launch& launch) {
  const auto fill = [&](int64_t k, uint8_t* mark) { *mark = buffer.marks[k]; };
  launch_parts<uint8_t>(op, device, buffer, 1, wanted, fill, launch);
}

inline bool touched(const Buffer& buffer, int64_t k) { return buffer.marks[k] & kTouched; }

}  // namespace fusedaccum::cuda
