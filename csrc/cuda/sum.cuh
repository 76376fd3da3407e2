// A tile's sum with the gradients of several micro-batches: added one after the other in registers, in one pass.
#pragma once

#include <vector>

#include "reduce.cuh"

namespace fusedaccum::cuda {

constexpr int kSumWidth = 8;

// Of one launch: where the entries of its gradients stand in the table, and what they are scaled by.
struct Gradients {
  const float* scale;
  int64_t first_segment;
  int stride;  // entries of a segment
  int slot;    // the first of them that is a gradient's
  int most;    // gradients of a segment; after its last one the entries are absent
};

// The gradients of one segment.
template <int kBytes>
struct OfSegment {
  const Table<Entry, kBytes>& table;
  const Gradients& call;
  int64_t segment;

  FUSEDACCUM_DEVICE Entry operator[](int j) const {
    return table.at[(segment - call.first_segment) * call.stride + call.slot + j];
  }
  FUSEDACCUM_DEVICE float scale(int j) const { return call.scale[(*this)[j].batch()]; }
  FUSEDACCUM_DEVICE int count() const {
    int count = 0;
    while (count < call.most && !(*this)[count].absent()) ++count;
    return count;
  }
  FUSEDACCUM_DEVICE bool same_dtype(int count) const {
    bool same = true;
    for (int j = 1; j < count; ++j) same &= (*this)[j].dtype() == (*this)[0].dtype();
    return same;
  }
};

// With a scale of 0 the gradient must not be looked at: 0 * inf is not 0.
FUSEDACCUM_DEVICE float with_gradient(float scale, float gradient, float before) {
  return scale == 0 ? before : fold_next(Lane(scale), Lane(gradient), Lane(before)).x;
}

// What a first touch adds to instead of what is stored: a product plus -0 is that product, with its sign if it is 0. A
// contribution that is exactly 0 leaves +0.
FUSEDACCUM_DEVICE float nothing_yet(float first_scale) { return first_scale == 0 ? 0.0f : -0.0f; }

// sink.take(raw, i, extent) gets every pack of sums. kCount gradients of type T; without any the sum is what is stored.
// There is code for at most four, which take at most Sink::kMostBytes an element; more are read one after the other.
template <class T, int kCount, class Sink>
struct Sum {
  using Grad = Stream<const T, kSumWidth>;
  using Flat = Stream<float, kSumWidth>;
  static constexpr int kPacks = (kCount * int(sizeof(T)) + 4) * kSumWidth > 64 ? 1 : kUnroll;
  Sink& sink;
  Flat flat;
  bool first;
  Grad grad[kCount > 0 ? kCount : 1] = {};
  float scale[kCount > 0 ? kCount : 1] = {};
  typename Grad::Raw g[kCount > 0 ? kCount : 1][kPacks] = {};
  typename Flat::Raw x[kPacks] = {};

  FUSEDACCUM_DEVICE bool aligned() const {
    bool aligned = true;
#pragma unroll
    for (int j = 0; j < kCount; ++j) aligned &= grad[j].aligned();
    return aligned;
  }

  template <class Extent>
  FUSEDACCUM_DEVICE void load(int u, int64_t i, Extent extent) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) grad[j].read(g[j][u], i, extent);
    if (!first) return flat.read(x[u], i, extent);
#pragma unroll
    for (int e = 0; e < kSumWidth; ++e) x[u].at[e] = nothing_yet(scale[0]);
  }

  template <class Extent>
  FUSEDACCUM_DEVICE void use(int u, int64_t i, Extent extent) {
#pragma unroll
    for (int e = 0; e < kSumWidth; ++e) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) x[u].at[e] = with_gradient(scale[j], Grad::get(g[j][u], e), x[u].at[e]);
    }
    sink.take(x[u], i, extent);
  }
};

// Any number of gradients, each of any dtype.
template <class OfSegment, class Sink>
struct AnySum {
  using Any = AnyStream<kSumWidth>;
  using Flat = Stream<float, kSumWidth>;
  Sink& sink;
  Flat flat;
  bool first;
  const OfSegment& grads;
  int count;
  int64_t start;
  Flat::Raw x = {};

  template <class Extent>
  FUSEDACCUM_DEVICE void load(int, int64_t i, Extent extent) {
    if (!first) return flat.read(x, i, extent);
#pragma unroll
    for (int e = 0; e < kSumWidth; ++e) x.at[e] = nothing_yet(grads.scale(0));
  }

  template <class Extent>
  FUSEDACCUM_DEVICE void use(int, int64_t i, Extent extent) {
    for (int j = 0; j < count; ++j) {
      Any::Raw g = {};
      Any{grads[j], start}.read(g, i, extent);
      const float scale = grads.scale(j);
#pragma unroll
      for (int e = 0; e < kSumWidth; ++e) x.at[e] = with_gradient(scale, g.at[e], x.at[e]);
    }
    sink.take(x, i, extent);
  }
};

template <class T, int kCount, class OfSegment, class Sink>
FUSEDACCUM_DEVICE void sum_tile_of(const OfSegment& grads, const Tile& tile, float* flat, Sink& sink) {
  Sum<T, kCount, Sink> work{sink, {flat}, kCount > 0 && grads[0].first()};
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    work.grad[j].p = grads[j].template data<const T>() + tile.start;
    work.scale[j] = grads.scale(j);
  }
  each_pack<kSumWidth, work.kPacks>(tile.count, work.aligned(), work);
}

// Whether there were as few gradients as there is code for.
template <class T, class OfSegment, class Sink>
FUSEDACCUM_DEVICE bool sum_tile_by_count(const OfSegment& grads, int count, const Tile& tile, float* flat, Sink& sink) {
  constexpr int kMost = Sink::kMostBytes / int(sizeof(T)) < 4 ? Sink::kMostBytes / int(sizeof(T)) : 4;
  if (count > kMost) return false;
  if (count == 1) sum_tile_of<T, 1>(grads, tile, flat, sink);
  if (count == 2) sum_tile_of<T, 2>(grads, tile, flat, sink);
  if constexpr (kMost >= 3)
    if (count == 3) sum_tile_of<T, 3>(grads, tile, flat, sink);
  if constexpr (kMost >= 4)
    if (count == 4) sum_tile_of<T, 4>(grads, tile, flat, sink);
  return true;
}

template <class OfSegment, class Sink>
FUSEDACCUM_DEVICE bool sum_tile_of_one_dtype(const OfSegment& grads, int count, const Tile& tile, float* flat,
                                             Sink& sink) {
  if (!grads.same_dtype(count)) return false;
  switch (grads[0].dtype()) {
    case DType::kFloat32:
      return sum_tile_by_count<float>(grads, count, tile, flat, sink);
    case DType::kBFloat16:
      return sum_tile_by_count<BFloat16>(grads, count, tile, flat, sink);
    default:
      return sum_tile_by_count<Float16>(grads, count, tile, flat, sink);
  }
}

// flat: the tile's first element in the flat buffer.
template <class OfSegment, class Sink>
FUSEDACCUM_DEVICE void sum_tile(const OfSegment& grads, const Tile& tile, float* flat, Sink& sink) {
  const int count = grads.count();
  if (count == 0) return sum_tile_of<float, 0>(grads, tile, flat, sink);
  if (sum_tile_of_one_dtype(grads, count, tile, flat, sink)) return;
  AnySum<OfSegment, Sink> work{sink, {flat}, grads[0].first(), grads, count, tile.start};
  each_pack<kSumWidth, 1>(tile.count, false, work);
}

// The squares of a pack's elements, added in the order of the elements: the same for every sink, whatever it stores.
template <class Raw, class Extent>
FUSEDACCUM_DEVICE void add_squares(double& squares, const Raw& raw, Extent extent) {
#pragma unroll
  for (int e = 0; e < kSumWidth; ++e)
    if (is_inside(e, extent)) squares += square(raw.at[e]);
}

// On the host: micro-batches [begin, end) of a list, as many as an entry can number.
struct Run {
  const Batches& batches;
  int64_t begin, end;

  const Elements& at(int64_t batch, int64_t k) const { return batches.grads[batch * batches.segments + k]; }
  int64_t count_of(int64_t k, int64_t from, int64_t to) const {
    int64_t count = 0;
    for (int64_t batch = from; batch < to; ++batch) count += at(batch, k).data != nullptr;
    return count;
  }
  int64_t count_of(int64_t k) const { return count_of(k, begin, end); }
  int most() const {
    int64_t most = 0;
    for (int64_t k = 0; k < batches.segments; ++k) most = std::max(most, count_of(k));
    return int(most);
  }
  // Writes `most` entries: the gradients that are there, in order. mark: of the segment, before the first micro-batch.
  void fill(int64_t k, uint8_t mark, int most, Entry* entries) const {
    bool first = !holds_sum(mark) && count_of(k, 0, begin) == 0;
    Entry* next = entries;
    for (int64_t batch = begin; batch < end; ++batch) {
      if (at(batch, k).data == nullptr) continue;
      *next++ = Entry::of(at(batch, k), first, int(batch - begin));
      first = false;
    }
    std::fill(next, entries + most, Entry{0});
  }
};

}  // namespace fusedaccum::cuda
