// close_window: what the step reads, made from the norm, the divisor and the largest norm; and the count of updates.
#define FUSEDACCUM_ISA cuda
#include "launch.cuh"

namespace fusedaccum::cuda {

namespace {

struct CloseCall {
  float* scalars;
  float* steps;
  const uint8_t* live;
  const double* total;
  const double* divisor;
  double max_norm;
  bool skip_nonfinite;
  int64_t count;
};

template <int kBytes>
__global__ void __launch_bounds__(kThreads)
    close_kernel(const CloseCall call, const Table<uint8_t, kBytes> __grid_constant__ marks) {
  const Closing closing = close_window(*call.total, *call.divisor, call.max_norm, call.skip_nonfinite);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    call.scalars[0] = closing.multiplier;
    call.scalars[1] = closing.skip;
    call.scalars[2] = closing.norm;
  }
  const int64_t k = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (k >= call.count || closing.skip != 0 || !(marks.at[k] & kTouched)) return;
  if (!call.live || call.live[k]) call.steps[k] += 1;
}

}  // namespace

void close_window(const Device& device, const uint8_t* marks, const uint8_t* live, int64_t count, float* scalars,
                  float* steps, const double* total, const double* divisor, double max_norm, bool skip_nonfinite) {
  const auto fill = [&](int64_t k, uint8_t* mark) { *mark = marks[k]; };
  int64_t begin = 0;
  do {
    const Part part{begin, std::min(count, begin + table_size<uint8_t>(device)), 0, 0};
    const CloseCall call{scalars,        steps + begin,   live ? live + begin : nullptr, total, divisor, max_norm,
                         skip_nonfinite, part.end - begin};
    const int64_t blocks = std::max<int64_t>(1, (call.count + kThreads - 1) / kThreads);
    with_table<uint8_t>(part, 1, fill, [&](const auto& table) {
      auto* kernel = close_kernel<kSizeOf<decltype(table)>>;
      FUSEDACCUM_LAUNCH(kernel, blocks, kThreads, device.stream, call, table);
    });
    check_launch("close_window");
    begin = part.end;
  } while (begin < count);
}

}  // namespace fusedaccum::cuda
