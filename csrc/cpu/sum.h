// What a tile of a segment sums up to: what the flat buffer holds, and gradients, added one after the other in
// registers. For any number of gradients in any mixture of dtypes; fold.h has loops of their own for the usual ones.
#pragma once

#include "../rules.h"
#include "kernels.h"
#include "vec.h"

namespace fusedaccum::FUSEDACCUM_ISA {

class TileSum {
 public:
  TileSum(const Sum& sum, const float* flat, const Tile& tile) : sum_(sum), flat_(flat), start_(tile.start) {}

  // The sums of the pack that begins at element i of the tile.
  template <class Extent>
  FUSEDACCUM_INLINE Vec at(int64_t i, Extent extent) const {
    Vec x(0.0f);
    int32_t j = 0;
    if (sum_.start == Start::kFlat) x = load(flat_ + i, extent);
    if (sum_.start == Start::kNothing) x = fold_first(Vec(sum_.sources[j++].scale), grad(0, i, extent));
    for (; j < sum_.count; ++j) x = fold_next(Vec(sum_.sources[j].scale), grad(j, i, extent), x);
    return x;
  }

 private:
  template <class Extent>
  FUSEDACCUM_INLINE Vec grad(int32_t j, int64_t i, Extent extent) const {
    return load(sum_.sources[j].grad, start_ + i, extent);
  }

  const Sum sum_;
  const float* const flat_;
  const int64_t start_;
};

// The sums that an update reads, and their squares where it leaves partials behind. kPlain: those in the flat buffer,
// and nothing beside them.
template <bool kPlain>
class UpdateSums {
 public:
  UpdateSums(const Sum& late, const float* flat, const Tile& tile, double* partial)
      : sum_(late, flat, tile), flat_(flat), partial_(partial) {}

  template <class Extent>
  FUSEDACCUM_INLINE Vec at(int64_t i, Extent extent) {
    if (kPlain) return load(flat_ + i, extent);
    const Vec x = sum_.at(i, extent);
    if (partial_) squares_.add(x, extent);
    return x;
  }
  void finish() const {
    if (!kPlain && partial_) *partial_ = squares_.total();
  }

 private:
  const TileSum sum_;
  const float* const flat_;
  double* const partial_;
  Squares squares_;
};

// Whether an update reads what is in the flat buffer, and nothing beside it.
template <class Run>
static bool is_plain(const Run& run) {
  return run.late.count == 0 && run.late.start == Start::kFlat && run.partial == nullptr;
}

}  // namespace fusedaccum::FUSEDACCUM_ISA
