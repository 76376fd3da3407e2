// Windows for the driver: segments, tiles and listed tensors, each in memory of its exact size, so that
// AddressSanitizer sees one byte too far; and what the kernels must have left there, in plain arithmetic.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "cuda/kernels.h"

namespace driver {

using fusedaccum::DType;
using fusedaccum::Elements;
using fusedaccum::kAlign;
using fusedaccum::kFresh;
using fusedaccum::kTile;
using fusedaccum::kTotal;
using fusedaccum::kTouched;
using fusedaccum::Tile;
using fusedaccum::cuda::Buffer;
using fusedaccum::cuda::Device;

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

// significant bits, the exponent of the smallest number, the largest number
struct Format {
  int digits, lowest;
  double largest;
};

inline Format format_of(DType dtype) {
  if (dtype == DType::kFloat32) return {24, -149, FLT_MAX};
  return dtype == DType::kBFloat16 ? Format{8, -133, 0x1.fep127} : Format{11, -24, 65504};
}

// Between x and its neighbours in the format.
inline double spacing(double x, DType dtype) {
  const Format f = format_of(dtype);
  return std::ldexp(1, x == 0 ? f.lowest : std::max(std::ilogb(x) - f.digits + 1, f.lowest));
}

// To nearest even.
inline double rounded(double x, DType dtype) {
  if (!std::isfinite(x)) return x;
  const double step = spacing(x, dtype), y = std::nearbyint(x / step) * step;
  return std::fabs(y) > format_of(dtype).largest ? std::copysign(HUGE_VAL, x) : y;
}

// Elements in memory that ends where they end, `shift` elements after an address that fits every vector.
class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, int64_t numel, int shift = 0)
      : dtype_(dtype), numel_(numel), size_(dtype == DType::kFloat32 ? 4 : 2) {
    memory_.reset(new char[(shift + numel) * size_]);
    data_ = memory_.get() + shift * size_;
  }

  int64_t numel() const { return numel_; }
  DType dtype() const { return dtype_; }
  bool absent() const { return numel_ == 0; }
  Elements elements() const { return {absent() ? nullptr : data_, dtype_}; }
  float* floats() const { return reinterpret_cast<float*>(data_); }
  std::vector<char> bytes() const { return std::vector<char>(data_, data_ + numel_ * size_); }

  double get(int64_t i) const {
    if (size_ == 4) return floats()[i];
    const uint16_t bits = reinterpret_cast<const uint16_t*>(data_)[i];
    const int digits = format_of(dtype_).digits - 1, fraction = bits & ((1 << digits) - 1);
    const int exponents = (1 << (15 - digits)) - 1, exponent = bits >> digits & exponents;
    double x = std::ldexp(exponent ? fraction + (1 << digits) : fraction,
                          std::max(exponent, 1) - 1 + format_of(dtype_).lowest);
    if (exponent == exponents) x = fraction ? NAN : HUGE_VAL;
    return bits & 0x8000 ? -x : x;
  }

  void set(int64_t i, double value) {
    const double x = rounded(value, dtype_);
    if (size_ == 4) {
      floats()[i] = float(x);
      return;
    }
    const Format f = format_of(dtype_);
    const int digits = f.digits - 1, exponents = (1 << (15 - digits)) - 1;
    int bits = exponents << digits;
    if (std::isnan(x)) {
      bits |= 1 << (digits - 1);
    } else if (std::isfinite(x)) {
      const int above = x == 0 ? 0 : std::max(0, std::ilogb(x) - f.digits + 1 - f.lowest);
      bits = (above << digits) + int(std::ldexp(std::fabs(x), -above - f.lowest));
    }
    reinterpret_cast<uint16_t*>(data_)[i] = uint16_t(bits | (std::signbit(x) ? 0x8000 : 0));
  }

 private:
  std::unique_ptr<char[]> memory_;
  char* data_ = nullptr;
  DType dtype_ = DType::kFloat32;
  int64_t numel_ = 0;
  int size_ = 4;
};

using Tensors = std::vector<Tensor>;

inline std::vector<Elements> elements_of(const Tensors& tensors) {
  std::vector<Elements> all(tensors.size());
  for (size_t k = 0; k < all.size(); ++k) all[k] = tensors[k].elements();
  return all;
}

using Random = std::mt19937;

inline double draw(Random& random, double low, double high) { return low + (high - low) * (random() / 4294967296.0); }

// A tensor for segment k: every second one at an address that fits only its dtype.
inline Tensor tensor_for(int64_t k, DType dtype, int64_t numel, Random& random, double low, double high) {
  Tensor t(dtype, numel, k % 2 ? 0 : 1 + int(random() % 7));
  for (int64_t i = 0; i < numel; ++i) t.set(i, draw(random, low, high));
  return t;
}

struct Window {
  std::vector<int64_t> numel, offset, first_tile;
  std::vector<Tile> tiles;
  std::vector<uint8_t> marks;
  mutable std::vector<uint8_t> live;  // empty where every touched segment counts
  Tensor flat;

  explicit Window(const std::vector<int64_t>& numels) : numel(numels), offset(count()), first_tile(count() + 1) {
    int64_t end = 0;
    std::vector<Tile> made;
    for (int64_t k = 0; k < count(); ++k) {
      offset[k] = (end + kAlign - 1) / kAlign * kAlign;
      end = offset[k] + numel[k];
      for (int64_t start = 0; start < numel[k]; start += kTile)
        made.push_back({k, start, offset[k] + start, std::min(kTile, numel[k] - start)});
      first_tile[k + 1] = int64_t(made.size());
    }
    tiles = std::vector<Tile>(made.begin(), made.end());  // no room at its end
    marks = std::vector<uint8_t>(count(), 0);
    flat = Tensor(DType::kFloat32, end);
    std::fill_n(flat.floats(), end, NAN);  // what is not touched, and the padding, must not be looked at
  }

  int64_t count() const { return int64_t(numel.size()); }
  bool touched(int64_t k) const { return marks[k] & kTouched; }
  bool counts(int64_t k) const { return touched(k) && (live.empty() || live[k]); }
  Buffer buffer() const {
    return {flat.floats(), tiles.data(), first_tile.data(), marks.data(), live.empty() ? nullptr : live.data(),
            count()};
  }

  // As after the last fold of a window: three of four segments hold a sum. with_live: of some all folds were skipped.
  void touch(Random& random, bool with_live = false) {
    live.assign(with_live ? count() : 0, 0);
    for (size_t k = 0; k < live.size(); ++k) live[k] = k % 5 != 2;
    for (int64_t k = 0; k < count(); ++k) {
      marks[k] = k % 4 == 3 ? 0 : kTouched;
      for (int64_t i = 0; touched(k) && i < numel[k]; ++i) flat.floats()[offset[k] + i] = float(draw(random, -3, 3));
    }
  }
};

// Reports the first few differences; the program's exit status is whether there was one.
class Checks {
 public:
  int failures = 0;
  const char* op = "";
  int count = 0;

  void equal(double seen, double right, const char* what, int64_t k, int64_t i) {
    ++count;
    if (seen == right ? std::signbit(seen) == std::signbit(right) : std::isnan(seen) && std::isnan(right)) return;
    report(seen, right, 0, what, k, i);
  }
  void near(double seen, double right, double bound, const char* what, int64_t k, int64_t i) {
    ++count;
    if (!(std::fabs(seen - right) <= bound)) report(seen, right, bound, what, k, i);
  }
  void same(const Tensor& tensor, const std::vector<char>& before, const char* what, int64_t k) {
    ++count;
    if (tensor.bytes() != before) report(0, 0, 0, what, k, -1);
  }

  // flat must be right(k, i, before) in touched segments and as before elsewhere.
  template <class Right>
  void flat(const Window& w, const std::vector<float>& before, const Right& right) {
    std::vector<bool> seen(before.size());
    for (int64_t k = 0; k < w.count(); ++k)
      for (int64_t i = 0; i < w.numel[k]; ++i) {
        const int64_t at = w.offset[k] + i;
        seen[at] = true;
        equal(w.flat.floats()[at], w.touched(k) ? right(k, i, before[at]) : before[at], "flat", k, i);
      }
    for (size_t at = 0; at < before.size(); ++at)
      if (!seen[at]) equal(w.flat.floats()[at], NAN, "padding", -1, int64_t(at));
  }

 private:
  void report(double seen, double right, double bound, const char* what, int64_t k, int64_t i) {
    if (++failures <= 10)
      printf("wrong result: %s: %s, segment %lld, element %lld: %.9g, not %.9g (within %.3g)\n", op, what, (long long)k,
             (long long)i, seen, right, bound);
  }
};

inline std::vector<float> copy_of_flat(const Window& w) {
  return std::vector<float>(w.flat.floats(), w.flat.floats() + w.flat.numel());
}

// In steps.cpp.
void check_adam(Checks& checks, const Device& device, Window& window, Random& random, bool any_mix, bool zero,
                bool stochastic);
void check_sgd(Checks& checks, const Device& device, Window& window, Random& random, bool zero, bool stochastic);
void check_skip(Checks& checks, const Device& device, Window& window, Random& random, bool zero);

}  // namespace driver
