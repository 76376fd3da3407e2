// Sums in float64, added in an order that never changes: two runs give the same bits.
#pragma once

#include "launch.cuh"
#include "pack.cuh"

namespace fusedaccum::cuda {

constexpr int kWarp = 32;

// The sum over the block's threads, which all call this; thread 0 has it.
FUSEDACCUM_DEVICE double block_sum(double value) {
  __shared__ double of_warp[kThreads / kWarp];
  for (int width = kWarp / 2; width > 0; width /= 2) value += __shfl_down_sync(0xffffffffu, value, width);
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = value;
  __syncthreads();
  double sum = 0;
  if (threadIdx.x == 0)
    for (int i = 0; i < kThreads / kWarp; ++i) sum += of_warp[i];
  return sum;
}

// The square of a float is exact in float64, so it needs no fused multiply-add.
FUSEDACCUM_DEVICE double square(float x) { return double(x) * double(x); }

}  // namespace fusedaccum::cuda
