// Which tiles an operator works on, and their division among threads: by elements, since a tile can hold one element or
// 4,096, and over all tensors at once.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "../tiles.h"

namespace fusedaccum {

// Fewer elements than this are not worth a thread of their own.
constexpr int64_t kGrain = 32768;

// A segment to be worked on. Its tiles stand in a row in the table.
struct Item {
  int64_t segment;
  int64_t first_tile;
  int64_t numel;
  int64_t before;  // elements of the items before it
};

class Work {
 public:
  void add(int64_t segment, int64_t first_tile, int64_t numel) {
    if (numel == 0) return;
    items_.push_back({segment, first_tile, numel, total_});
    total_ += numel;
  }

  int64_t total() const { return total_; }

  // run(segment, first tile, number of tiles) for all work, each tile in one call; then finish(), on every thread.
  template <class Run, class Finish>
  void parallel(const Run& run, const Finish& finish) const {
    torch::stable::parallel_for(0, total_, kGrain, [&](int64_t begin, int64_t end) {
      share(begin, end, run);
      finish();
    });
  }

  template <class Run>
  void parallel(const Run& run) const {
    parallel(run, [] {});
  }

 private:
  // The tiles whose first element is one of [begin, end).
  template <class Run>
  void share(int64_t begin, int64_t end, const Run& run) const {
    auto item = std::upper_bound(items_.begin(), items_.end(), begin,
                                 [](int64_t position, const Item& i) { return position < i.before; });
    for (--item; item != items_.end() && item->before < end; ++item) {
      const int64_t first = tiles_of(std::max<int64_t>(begin - item->before, 0));
      const int64_t last = tiles_of(std::min(end - item->before, item->numel));
      if (first < last) run(item->segment, item->first_tile + first, last - first);
    }
  }

  std::vector<Item> items_;
  int64_t total_ = 0;
};

}  // namespace fusedaccum
