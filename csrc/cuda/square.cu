// square_total: the squares of stale tiles, and the sum of all touched tiles' partials in a fixed order.
#define FUSEDACCUM_ISA cuda
#include "reduce.cuh"

namespace fusedaccum::cuda {
namespace {

constexpr int kWidth = 8;
constexpr int64_t kSumBlocks = kTotal - 2;  // total: the sum, a counter, and a sum for each block
constexpr int64_t kTilesPerBlock = 1024;

struct Squares {
  using Flat = Stream<const float, kWidth>;
  Flat flat;
  Flat::Raw x[kUnroll];
  double sum = 0;

  template <class Extent>
  FUSEDACCUM_DEVICE void load(int u, int64_t i, Extent extent) {
    flat.read(x[u], i, extent);
  }

  template <class Extent>
  FUSEDACCUM_DEVICE void use(int u, int64_t, Extent extent) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j)
      if (is_inside(j, extent)) sum += square(Flat::get(x[u], j));
  }
};

template <int kBytes>
__global__ void __launch_bounds__(kThreads)
    square_kernel(const float* flat, const Tile* tiles, double* partials, int64_t first_segment,
                  const Table<uint8_t, kBytes> __grid_constant__ marks) {
  const Tile tile = tiles[blockIdx.x];
  if ((marks.at[tile.segment - first_segment] & (kTouched | kFresh)) != kTouched) return;
  Squares work;
  work.flat.p = flat + tile.flat_start;
  each_pack<kWidth>(tile.count, true, work);
  const double sum = block_sum(work.sum);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// Whether this is the last of the grid's blocks to come here. What the others wrote before they came is then visible.
FUSEDACCUM_DEVICE bool is_last_block(unsigned* counter) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicInc(counter, gridDim.x - 1) == gridDim.x - 1;  // wraps to 0, ready for the next launch
    __threadfence();
  }
  __syncthreads();
  return last;
}

struct SumCall {
  const double* partials;
  const Tile* tiles;
  int64_t tile_count;
  int64_t per_block;
  int64_t first_segment;
  double* total;
  bool add;  // to what an earlier launch has left in total
};

// Partials of untouched segments are left over from earlier windows, and may be anything: they are not read.
template <int kBytes>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(const SumCall call, const Table<uint8_t, kBytes> __grid_constant__ marks) {
  const int64_t begin = blockIdx.x * call.per_block;
  const int64_t end = begin + call.per_block < call.tile_count ? begin + call.per_block : call.tile_count;
  double own = 0;
  for (int64_t t = begin + threadIdx.x; t < end; t += kThreads)
    if (marks.at[call.tiles[t].segment - call.first_segment] & kTouched) own += call.partials[t];
  const double sum = block_sum(own);
  volatile double* of_block = call.total + 2;
  if (threadIdx.x == 0) of_block[blockIdx.x] = sum;
  if (!is_last_block(reinterpret_cast<unsigned*>(call.total + 1)) || threadIdx.x != 0) return;
  double all = call.add ? call.total[0] : 0.0;
  for (unsigned b = 0; b < gridDim.x; ++b) all += of_block[b];
  call.total[0] = all;
}

void sum_touched(const Device& device, const Buffer& buffer, const double* partials, double* total) {
  bool add = false;
  const auto launch = [&](const Part& part, const auto& marks) {
    const int64_t wished = (part.tile_count + kTilesPerBlock - 1) / kTilesPerBlock;
    const int64_t blocks = std::clamp(wished, int64_t(1), kSumBlocks);
    const SumCall call{partials + part.first_tile,
                       buffer.tiles + part.first_tile,
                       part.tile_count,
                       (part.tile_count + blocks - 1) / blocks,
                       part.begin,
                       total,
                       add};
    auto* kernel = sum_kernel<kSizeOf<decltype(marks)>>;
    FUSEDACCUM_LAUNCH(kernel, blocks, kThreads, device.stream, call, marks);
    add = true;
  };
  launch_with_marks("square_total", device, buffer, [&](int64_t k) { return touched(buffer, k); }, launch);
  if (add) return;
  launch(Part{0, 0, 0, 0}, Table<uint8_t, kNarrowBytes>{});  // nothing is touched: the sum is 0
  check_launch("square_total");
}

}  // namespace

void square_total(const Device& device, const Buffer& buffer, double* partials, double* total) {
  const auto stale = [&](int64_t k) { return touched(buffer, k) && !(buffer.marks[k] & kFresh); };
  launch_with_marks("square_total", device, buffer, stale, [&](const Part& part, const auto& marks) {
    auto* kernel = square_kernel<kSizeOf<decltype(marks)>>;
    FUSEDACCUM_LAUNCH(kernel, part.tile_count, kThreads, device.stream, buffer.flat, buffer.tiles + part.first_tile,
                      partials + part.first_tile, part.begin, marks);
  });
  sum_touched(device, buffer, partials, total);
}

}  // namespace fusedaccum::cuda
