// What the kernels of the update rules share: their lists by value, the factors of a tile's (group, step).
#pragma once

#include "launch.cuh"
#include "pack.cuh"

namespace fusedaccum::cuda {

// Four elements: an update has up to six streams, and eight of each would not fit into the registers.
constexpr int kStepWidth = 4;
constexpr int kMaxLists = 5;

struct StepCall {
  float* flat;
  const Tile* tiles;
  const uint8_t* live;
  Update update;
  int64_t first_segment;
  int stride;           // entries of a segment: the parameter first
  int slot[kMaxLists];  // where in them each list stands; -1 where the list is empty
};

using None = NoStream<kStepWidth>;

template <class T>
FUSEDACCUM_DEVICE Stream<T, kStepWidth> stream_of(Entry entry, const Tile& tile) {
  return {entry.data<T>() + tile.start};
}

// The entries of one segment.
template <int kBytes>
struct Entries {
  const Table<Entry, kBytes>& table;
  const StepCall& call;
  int64_t segment;

  FUSEDACCUM_DEVICE Entry operator[](int list) const {
    if (call.slot[list] < 0) return Entry{0};
    return table.at[(segment - call.first_segment) * call.stride + call.slot[list]];
  }
};

// How a pack of a parameter is rounded before it is stored. Here not at all: to nearest is how every store rounds.
struct Nearest {
  struct Bits {};

  FUSEDACCUM_DEVICE Bits bits(int64_t) const { return {}; }
  FUSEDACCUM_DEVICE float round(float x, Bits, int) const { return x; }
};

// Stochastically where the parameter is bfloat16. start: of the tile in its segment.
struct Stochastic {
  struct Bits {
    uint32_t word[kStepWidth / 2];
  };
  const Noise& noise;
  int64_t start;
  bool bfloat16;

  // A pack is half of a block.
  FUSEDACCUM_DEVICE Bits bits(int64_t i) const {
    // Read anew for each pack: the keys of all rounds, kept from one pack to the next, would not fit into the
    // registers.
    const volatile uint64_t& seed = noise.seed;
    const Philox block = random_block({seed, noise.stream, noise.update}, start + i);
    const bool upper = i & kStepWidth;
    return {{block.word[upper ? 2 : 0], block.word[upper ? 3 : 1]}};
  }
  FUSEDACCUM_DEVICE float round(float x, const Bits& bits, int j) const {
    return bfloat16 ? float_of(rounded_stochastically(bits_of(x), bits.word[j / 2] >> j % 2 * 16 & 0xffff)) : x;
  }
};

// kRandom: whether the launch rounds stochastically; parameters with a master are rounded to nearest all the same.
template <bool kRandom, class Param, class Master>
FUSEDACCUM_DEVICE auto rounding_of(const Noise& noise, const Tile& tile, const Param& param, const Master&) {
  if constexpr (kRandom && !Master::kPresent)
    return Stochastic{noise, tile.start, param.is_bfloat16()};
  else
    return Nearest{};
}

// What a tile's elements have in common. In shared memory, which takes fewer registers than a copy in each thread.
template <class Factors>
struct Common {
  Factors factors;
  Noise noise;
};

// Made by one thread and read by all: it takes float64 roots and powers.
template <bool kRandom, class Factors, class Make>
FUSEDACCUM_DEVICE const Common<Factors>& shared_by_threads(const Update& update, const Tile& tile, const Make& make) {
  __shared__ Common<Factors> common;
  if (threadIdx.x == 0) {
    common.factors = make();
    const int64_t* random = update.random;
    if (kRandom) common.noise = {uint64_t(random[0]), uint32_t(random[2 + tile.segment]), uint32_t(random[1])};
  }
  __syncthreads();
  return common;
}

struct Zeros {
  Stream<float, 8> flat;

  template <class Extent>
  FUSEDACCUM_DEVICE void load(int, int64_t, Extent) const {}
  template <class Extent>
  FUSEDACCUM_DEVICE void use(int, int64_t i, Extent extent) const {
    flat.write(Stream<float, 8>::Raw{}, i, extent);
  }
};

FUSEDACCUM_DEVICE void zero_tile(float* flat, int64_t count) {
  Zeros work;
  work.flat.p = flat;
  each_pack<8>(count, true, work);
}

// Whether the rule is to be applied to a tile. Where the update is skipped, what was asked of zeroing is done here.
template <bool kZero>
FUSEDACCUM_DEVICE bool is_updated(const StepCall& call, const Tile& tile, Entry param) {
  if (param.absent() || (call.live && !call.live[tile.segment])) return false;
  if (call.update.scalars[1] == 0) return true;
  if (kZero) zero_tile(call.flat + tile.flat_start, tile.count);
  return false;
}

// Calls launch(part, call, table) for all touched segments. lists[0] are the parameters.
template <int kLists, class Launch>
void launch_steps(const char* op, const Device& device, const Buffer& buffer, const Update& update,
                  const Elements* const (&lists)[kLists], const Launch& launch) {
  StepCall call{buffer.flat, nullptr, buffer.live, update, 0, 0, {}};
  const auto any = [&](const Elements* list) {
    return std::any_of(list, list + buffer.count, [](const Elements& e) { return e.data != nullptr; });
  };
  for (int i = 0; i < kLists; ++i) call.slot[i] = any(lists[i]) ? call.stride++ : -1;
  if (call.stride == 0) return;
  const auto wanted = [&](int64_t k) { return touched(buffer, k); };
  const auto fill = [&](int64_t k, Entry* entries) {
    for (int i = 0; i < kLists; ++i)
      if (call.slot[i] >= 0) entries[call.slot[i]] = wanted(k) ? Entry::of(lists[i][k]) : Entry{0};
  };
  launch_parts<Entry>(op, device, buffer, call.stride, wanted, fill, [&](const Part& part, const auto& table) {
    call.tiles = buffer.tiles + part.first_tile;
    call.first_segment = part.begin;
    launch(part, call, table);
  });
}

}  // namespace fusedaccum::cuda
