// What the emulation's barriers, warp operations, atomics and launches do, against what CUDA says that they do.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <memory>
#include <vector>

namespace {

int failures = 0;

void expect(bool holds, const char* what, int line) {
  if (holds) return;
  printf("wrong result: line %d: %s\n", line, what);
  ++failures;
}
#define EXPECT(...) expect(__VA_ARGS__, #__VA_ARGS__, __LINE__)

constexpr unsigned kAll = 0xffffffffu;

// One warp; out has a row of 32 for each operation.
__global__ void warp_operations(double* out) {
  const int lane = threadIdx.x;
  double* own = out + lane;
  own[0 * 32] = __shfl_sync(kAll, lane, 5);
  own[1 * 32] = __shfl_sync(kAll, unsigned(lane), 5, 8);
  own[2 * 32] = __shfl_down_sync(kAll, float(lane), 3);
  own[3 * 32] = __shfl_down_sync(kAll, double(lane), 3, 8);
  own[4 * 32] = __shfl_up_sync(kAll, lane, 3, 16);
  own[5 * 32] = __shfl_xor_sync(kAll, lane, 6);
  own[6 * 32] = __ballot_sync(kAll, lane % 3 == 0);
  own[7 * 32] = __any_sync(kAll, lane == 9);
  own[8 * 32] = __all_sync(kAll, lane != 9);
  own[9 * 32] = __all_sync(kAll, lane < 32);
  const unsigned half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
  if (lane < 16)
    own[10 * 32] = __shfl_xor_sync(half, lane, 1);
  else
    own[10 * 32] = __ballot_sync(half, lane > 20);
}

void check_warp_operations() {
  std::vector<double> out(11 * 32);
  FUSEDACCUM_LAUNCH(warp_operations, 1, 32, nullptr, out.data());
  const auto at = [&](int row, int lane) { return out[row * 32 + lane]; };
  for (int lane = 0; lane < 32; ++lane) {
    EXPECT(at(0, lane) == 5);
    EXPECT(at(1, lane) == lane / 8 * 8 + 5);
    EXPECT(at(2, lane) == (lane + 3 < 32 ? lane + 3 : lane));
    EXPECT(at(3, lane) == (lane % 8 + 3 < 8 ? lane + 3 : lane));
    EXPECT(at(4, lane) == (lane % 16 >= 3 ? lane - 3 : lane));
    EXPECT(at(5, lane) == (lane ^ 6));
    EXPECT(at(6, lane) == double(0x49249249u));
    EXPECT(at(7, lane) == 1);
    EXPECT(at(8, lane) == 0);
    EXPECT(at(9, lane) == 1);
    EXPECT(at(10, lane) == (lane < 16 ? double(lane ^ 1) : double(0xffe00000u)));
  }
}

struct Counts {
  int integer, largest;
  unsigned wrapping, bits, swapped;
  unsigned long long wide;
  float real;
  double exact;
};

__global__ void atomics(Counts* c) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  atomicAdd(&c->integer, -1);
  atomicAdd(&c->wide, 1ull << 40);
  atomicAdd(&c->real, 0.5f);
  atomicAdd(&c->exact, 0.25);
  atomicInc(&c->wrapping, 6);
  atomicMax(&c->largest, i * 7 % 100);
  atomicOr(&c->bits, 1u << i % 20);
  if (atomicCAS(&c->swapped, 0u, 1u) == 0) atomicAdd(&c->swapped, 10u);
}

void check_atomics() {
  Counts c{};
  FUSEDACCUM_LAUNCH(atomics, 4, 50, nullptr, &c);
  EXPECT(c.integer == -200);
  EXPECT(c.wide == 200ull << 40);
  EXPECT(c.real == 100);
  EXPECT(c.exact == 50);
  EXPECT(c.wrapping == 200 % 7);
  EXPECT(c.largest == 99);
  EXPECT(c.bits == (1u << 20) - 1);
  EXPECT(c.swapped == 11);
}

// Sums in a tree: a barrier in a loop, in a block that is not whole warps.
__global__ void tree(const int* in, int* out) {
  __shared__ int sums[100];
  sums[threadIdx.x] = in[blockIdx.x * blockDim.x + threadIdx.x];
  for (unsigned width = 64; width > 0; width /= 2) {
    __syncthreads();
    if (threadIdx.x < width && threadIdx.x + width < blockDim.x) sums[threadIdx.x] += sums[threadIdx.x + width];
  }
  if (threadIdx.x == 0) out[blockIdx.x] = sums[0];
}

void check_barriers() {
  std::vector<int> in(700), out(7);
  for (int i = 0; i < 700; ++i) in[i] = i;
  FUSEDACCUM_LAUNCH(tree, 7, 100, nullptr, in.data(), out.data());
  for (int b = 0; b < 7; ++b) EXPECT(out[b] == 10000 * b + 4950);
}

struct Wide {
  int values[8000];
};

__global__ void change_argument(Wide wide, int* out) {
  out[blockIdx.x] = wide.values[blockIdx.x];
  wide.values[blockIdx.x] = -1;
}

void check_arguments() {
  const std::unique_ptr<Wide> wide(new Wide{{3, 4}});
  std::vector<int> out(2);
  FUSEDACCUM_LAUNCH(change_argument, 2, 1, nullptr, *wide, out.data());
  EXPECT(out[0] == 3 && out[1] == 4 && wide->values[0] == 3);
}

void check_errors() {
  int out = 7;
  const Wide wide{};
  const int64_t cases[][2] = {{0, 1}, {-1, 1}, {int64_t(1) << 31, 1}, {1, 0}, {1, 1025}};
  for (const auto& [blocks, threads] : cases) {
    FUSEDACCUM_LAUNCH(change_argument, blocks, threads, nullptr, wide, &out);
    EXPECT(cudaPeekAtLastError() == cudaErrorInvalidConfiguration);
    EXPECT(cudaGetLastError() == cudaErrorInvalidConfiguration);
    EXPECT(cudaGetLastError() == cudaSuccess);
  }
  EXPECT(out == 7);
}

}  // namespace

int main() {
  check_warp_operations();
  check_atomics();
  check_barriers();
  check_arguments();
  check_errors();
  return failures > 0;
}
