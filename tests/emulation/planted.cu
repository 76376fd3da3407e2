// Small kernels that are right, and the same with one planted bug each. planted CASE|all right|bug runs them
// and compares; test_emulation.py knows which runs must find which bug.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace {

constexpr int kThreads = 64;
constexpr int kBlocks = 8;
constexpr int kElements = kThreads * kBlocks;

// What a kernel reads and writes. Each array has its exact size on the heap.
struct Data {
  const float* in;  // kElements + 4, values 1, 2, 3 ...
  float* out;       // count
  float* sums;      // kBlocks
  unsigned* counter;
  int count;
};

// Each thread takes what its left neighbour has left in shared memory.
template <bool kBug>
__global__ void missing_barrier(Data d) {
  __shared__ float values[kThreads];
  const int t = threadIdx.x, i = blockIdx.x * kThreads + t;
  values[t] = d.in[i];
  if (!kBug) __syncthreads();
  if (i < d.count) d.out[i] = values[t > 0 ? t - 1 : 0];
}

template <bool kBug>
__global__ void divergent_barrier(Data d) {
  __shared__ float values[kThreads];
  const int t = threadIdx.x, i = blockIdx.x * kThreads + t;
  values[t] = d.in[i];
  if (kBug && t % 2)
    __syncthreads();
  else
    __syncthreads();
  if (i < d.count) d.out[i] = values[t > 0 ? t - 1 : 0];
}

// The threads that have no element leave before the barrier.
template <bool kBug>
__global__ void barrier_after_exit(Data d) {
  __shared__ float values[kThreads];
  const int t = threadIdx.x, i = blockIdx.x * kThreads + t;
  if (kBug && i >= d.count) return;
  values[t] = d.in[i];
  __syncthreads();
  if (i < d.count) d.out[i] = values[t > 0 ? t - 1 : 0];
}

template <bool kBug>
__global__ void missing_bound(Data d) {
  const int t = threadIdx.x, i = blockIdx.x * kThreads + t;
  if (kBug || i < d.count) d.out[i] = d.in[t > 0 ? i - 1 : i];
}

// Vectors of four; the bug takes the neighbour's by moving the address instead of picking from two vectors.
template <bool kBug>
__global__ void misaligned_vector(Data d) {
  const int t = threadIdx.x, i = blockIdx.x * kThreads + t;
  if (t % 4 != 0 || i >= d.count) return;
  const float4 here = *reinterpret_cast<const float4*>(d.in + i);
  float4 left = make_float4(t > 0 ? d.in[i - 1] : here.x, here.x, here.y, here.z);
  if (kBug && t > 0) left = *reinterpret_cast<const float4*>(d.in + i - 1);
  const float values[4] = {left.x, left.y, left.z, left.w};
  for (int j = 0; j < 4 && i + j < d.count; ++j) d.out[i + j] = values[j];
}

// The last block to finish adds up what all of them have left.
template <bool kBug>
__global__ void missing_fence(Data d) {
  if (threadIdx.x != 0) return;
  d.sums[blockIdx.x] = d.in[blockIdx.x];
  if (!kBug) __threadfence();
  const bool last = atomicInc(d.counter, gridDim.x - 1) == gridDim.x - 1;
  __threadfence();
  if (!last) return;
  float sum = 0;
  for (int b = 0; b < kBlocks; ++b) sum += d.sums[b];
  d.sums[0] = sum;
}

template <bool kBug>
__global__ void plain_counter(Data d) {
  const float value = d.in[blockIdx.x * kThreads + threadIdx.x];
  if (int(value) % 3 != 0) return;
  if (kBug)
    *d.counter += 1;
  else
    atomicAdd(d.counter, 1u);
}

// The sum of each block's first warp, which all of its lanes take part in.
template <bool kBug>
__global__ void wrong_mask(Data d) {
  if (threadIdx.x >= 32) return;
  const unsigned mask = kBug ? 0x0000ffffu : 0xffffffffu;
  float sum = d.in[blockIdx.x * kThreads + threadIdx.x];
  for (int width = 16; width > 0; width /= 2) sum += __shfl_down_sync(mask, sum, width);
  if (threadIdx.x == 0) d.sums[blockIdx.x] = sum;
}

// Each lane takes what its left neighbour in the warp has left.
template <bool kBug>
__global__ void missing_syncwarp(Data d) {
  __shared__ float values[kThreads];
  const int t = threadIdx.x, i = blockIdx.x * kThreads + t;
  values[t] = d.in[i];
  if (!kBug) __syncwarp();
  if (i < d.count) d.out[i] = t % 32 > 0 ? values[t - 1] : d.in[t > 0 ? i - 1 : i];
}

// With the bug half of each warp waits for the other half, which waits at the barrier.
template <bool kBug>
__global__ void deadlock(Data d) {
  const int t = threadIdx.x, i = blockIdx.x * kThreads + t;
  if (t % 32 < 16) __syncwarp(kBug ? 0xffffffffu : 0x0000ffffu);
  __syncthreads();
  if (i < d.count) d.out[i] = d.in[t > 0 ? i - 1 : i];
}

// What a case's arrays must hold afterwards.
enum class Expect { kNeighbours, kTotal, kCount, kWarpSums };

struct Case {
  const char* name;
  Expect expect;
  void (*right)(Data);
  void (*bug)(Data);
};

#define CASE(name, expect) {#name, expect, name<false>, name<true>}
constexpr Case kCases[] = {
    CASE(missing_barrier, Expect::kNeighbours),    CASE(divergent_barrier, Expect::kNeighbours),
    CASE(barrier_after_exit, Expect::kNeighbours), CASE(missing_bound, Expect::kNeighbours),
    CASE(misaligned_vector, Expect::kNeighbours),  CASE(missing_fence, Expect::kTotal),
    CASE(plain_counter, Expect::kCount),           CASE(wrong_mask, Expect::kWarpSums),
    CASE(missing_syncwarp, Expect::kNeighbours),   CASE(deadlock, Expect::kNeighbours),
};

int wrong(const char* what, int i, float seen, float right) {
  printf("wrong result: %s[%d] is %g, not %g\n", what, i, seen, right);
  return 1;
}

int compare(Expect expect, const Data& d) {
  switch (expect) {
    case Expect::kNeighbours:
      for (int i = 0; i < d.count; ++i)
        if (const int right = i % kThreads > 0 ? i : i + 1; d.out[i] != right) return wrong("out", i, d.out[i], right);
      return 0;
    case Expect::kTotal:
      return d.sums[0] == 36 ? 0 : wrong("sums", 0, d.sums[0], 36);
    case Expect::kCount:
      return *d.counter == kElements / 3 ? 0 : wrong("counter", 0, *d.counter, kElements / 3);
    case Expect::kWarpSums:
      for (int b = 0; b < kBlocks; ++b)
        if (const int right = 32 * b * kThreads + 528; d.sums[b] != right) return wrong("sums", b, d.sums[b], right);
      return 0;
  }
  return 1;
}

int run(const Case& which, bool bug) {
  constexpr int kCount = kElements - 1;  // the last thread has none
  const std::unique_ptr<float[]> in(new float[kElements + 4]), out(new float[kCount]), sums(new float[kBlocks]);
  const std::unique_ptr<unsigned> counter(new unsigned(0));
  for (int i = 0; i < kElements + 4; ++i) in[i] = i + 1;
  const Data data{in.get(), out.get(), sums.get(), counter.get(), kCount};
  void (*kernel)(Data) = bug ? which.bug : which.right;
  FUSEDACCUM_LAUNCH(kernel, kBlocks, kThreads, nullptr, data);
  if (cudaGetLastError() != cudaSuccess) return printf("wrong result: the launch failed\n"), 1;
  return compare(which.expect, data);
}

}  // namespace

int main(int argc, char** argv) {
  const bool bug = argc == 3 && strcmp(argv[2], "bug") == 0;
  if (argc == 3 && (bug || strcmp(argv[2], "right") == 0)) {
    bool known = false;
    for (const Case& each : kCases) {
      if (strcmp("all", argv[1]) != 0 && strcmp(each.name, argv[1]) != 0) continue;
      if (run(each, bug) != 0) return 1;
      known = true;
    }
    if (known) return 0;
  }
  fprintf(stderr, "usage: planted CASE|all right|bug\n");
  return 2;
}
