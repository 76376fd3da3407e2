// The random bits of a tile, and rounding with them.
#pragma once

#include "../rules.h"
#include "vec.h"

namespace fusedaccum::FUSEDACCUM_ISA {

struct RandomBits {
  uint32_t words[kTile / 2];

  RandomBits() {}  // written out: GCC compiles implicit constructors for the default target

  // A loop of its own, which compilers make vectors of; whole packs, also at the tile's end.
  void fill(const Noise& noise, const Tile& tile) {
    const int64_t blocks = (tile.count + kLanes - 1) / kLanes * (kLanes / 8);
    for (int64_t b = 0; b < blocks; ++b) {
      const Philox block = random_block(noise, tile.start + 8 * b);
      for (int w = 0; w < 4; ++w) words[4 * b + w] = block.word[w];
    }
  }

  // Rounds a pack to bfloat16. i: of its first element in the tile.
  FUSEDACCUM_INLINE Vec round(Vec a, int64_t i) const {
    for (int r = 0; r < kRegs; ++r) a.r[r] = rounded_stochastically(a.r[r], words, i + r * kRegLanes);
    return a;
  }
};

}  // namespace fusedaccum::FUSEDACCUM_ISA
