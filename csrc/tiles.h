// What every kernel works on: segments of the flat buffer, cut into tiles. Plain data, host and device.
#pragma once

#include <cstdint>

namespace fusedaccum {

constexpr int64_t kTile = 4096;  // elements; a segment's last tile may hold fewer
constexpr int64_t kTotal = 66;   // elements of square_total's `total`: the sum, and workspace
constexpr int64_t kAlign = 64;   // elements; segments start at multiples of it

// Bits of a segment's mark.
constexpr uint8_t kTouched = 1;  // it holds the sum of this window
constexpr uint8_t kFresh = 2;    // the partials of its tiles are those of its present values

struct Segment {
  int64_t offset;  // in the flat buffer
  int64_t numel;
};

struct Tile {
  int64_t segment;
  int64_t start;       // in the segment
  int64_t flat_start;  // in the flat buffer
  int64_t count;
};

constexpr int64_t tiles_of(int64_t numel) { return (numel + kTile - 1) / kTile; }

// The two 16-bit formats, as types of their own so that loads and stores can be overloaded on them.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

enum class DType : int32_t { kFloat32, kBFloat16, kFloat16 };

// The elements of one listed tensor. data is null where the entry does not apply.
struct Elements {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
};

}  // namespace fusedaccum
