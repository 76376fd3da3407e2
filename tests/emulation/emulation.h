// Executes CUDA C++ on a CPU: compile a .cu file as C++ with this header included first (build.py does).
//
// Every CUDA thread is a fiber, so barriers and warp operations really wait (scheduler.cpp). A launch runs to its end
// before it returns; streams are ignored. What a run reports is said in scheduler.cpp, what it cannot see is:
// speed, registers, real memory ordering (ThreadSanitizer models it: atomics.h), streams and dynamic shared memory.
#pragma once

#include <math.h>  // with <cmath>, the float overloads are in the global namespace, as in CUDA

#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>

#include "cuda_runtime_api.h"
#include "vectors.h"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __launch_bounds__(...)
// Forced, with a sanitizer's checks in every copy, the largest kernel took 97 s to compile; so it takes 10.
#define __forceinline__ inline
#define __align__(bytes) __attribute__((aligned(bytes)))
// A block runs on one OS thread, and one block at a time.
#define __shared__ static thread_local
// A kernel reads such an argument where the launch has put it: each thread's own copy of 32 KB would take minutes. It
// stands between the type and the name, where a reference is declared.
#define __grid_constant__ &

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
};

extern __thread uint3 threadIdx, blockIdx;
extern __thread dim3 blockDim, gridDim;
constexpr int warpSize = 32;

namespace emulation {

// Where in the source a thread waits.
struct Site {
  const char* call;
  const char* file;
  int line;
};

enum class WarpKind { kSync, kShuffle, kBallot };

struct Launch {
  const char* kernel;
  int64_t blocks, threads;
  void (*run)(void* arguments);  // what one CUDA thread does
  void* arguments;
};

// In scheduler.cpp.
void run(const Launch& launch);
void wait_at_barrier(Site site);
// Waits for the lanes in `mask`. kShuffle: the result is what lane `source` passed; kBallot: a bit for each lane that
// passed something other than 0.
uint64_t wait_in_warp(WarpKind kind, unsigned mask, uint64_t value, int source, Site site);
int this_lane();

// call(arguments...) runs the kernel for one thread. The arguments are copied once, as a launch does.
template <class Call, class... Arguments>
void launch(const char* name, int64_t blocks, int64_t threads, cudaStream_t, const Call& call,
            const Arguments&... arguments) {
  static_assert((0 + ... + sizeof(std::decay_t<Arguments>)) <= 32764, "a kernel takes 32,764 bytes of arguments");
  std::tuple<const Call&, std::decay_t<Arguments>...> copies(call, arguments...);
  const auto run_thread = [](void* data) {
    std::apply([](const Call& function, const auto&... values) { function(values...); },
               *static_cast<decltype(copies)*>(data));
  };
  run({name, blocks, threads, run_thread, &copies});
}

template <class T>
T shuffle(unsigned mask, T value, int source, Site site) {
  static_assert(std::is_arithmetic_v<T> && sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = wait_in_warp(WarpKind::kShuffle, mask, bits, source, site);
  memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace emulation

#define FUSEDACCUM_LAUNCH(kernel, blocks, threads, stream, ...) \
  emulation::launch(                                            \
      #kernel, blocks, threads, stream, [&](const auto&... arguments) { kernel(arguments...); }, __VA_ARGS__)

// The defaulted arguments are evaluated where the function is called.
#define EMULATION_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(EMULATION_CALLER) { emulation::wait_at_barrier({"__syncthreads", file, line}); }

inline void __syncwarp(unsigned mask = 0xffffffffu, EMULATION_CALLER) {
  emulation::wait_in_warp(emulation::WarpKind::kSync, mask, 0, 0, {"__syncwarp", file, line});
}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMULATION_CALLER) {
  const int first = emulation::this_lane() & ~(width - 1);
  return emulation::shuffle(mask, value, first + (source & (width - 1)), {"__shfl_sync", file, line});
}

// A lane whose source would be outside its group of `width` lanes gets its own value.
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATION_CALLER) {
  const int lane = emulation::this_lane();
  const int source = (lane & (width - 1)) + int(delta) < width ? lane + int(delta) : lane;
  return emulation::shuffle(mask, value, source, {"__shfl_down_sync", file, line});
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATION_CALLER) {
  const int lane = emulation::this_lane();
  const int source = (lane & (width - 1)) >= int(delta) ? lane - int(delta) : lane;
  return emulation::shuffle(mask, value, source, {"__shfl_up_sync", file, line});
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, EMULATION_CALLER) {
  const int lane = emulation::this_lane(), end = (lane & ~(width - 1)) + width;
  const int source = (lane ^ lanes) < end ? lane ^ lanes : lane;
  return emulation::shuffle(mask, value, source, {"__shfl_xor_sync", file, line});
}

inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATION_CALLER) {
  const emulation::Site site{"__ballot_sync", file, line};
  return unsigned(emulation::wait_in_warp(emulation::WarpKind::kBallot, mask, predicate != 0, 0, site));
}

inline int __any_sync(unsigned mask, int predicate, EMULATION_CALLER) {
  const emulation::Site site{"__any_sync", file, line};
  return emulation::wait_in_warp(emulation::WarpKind::kBallot, mask, predicate != 0, 0, site) != 0;
}

inline int __all_sync(unsigned mask, int predicate, EMULATION_CALLER) {
  const emulation::Site site{"__all_sync", file, line};
  return emulation::wait_in_warp(emulation::WarpKind::kBallot, mask, predicate == 0, 0, site) == 0;
}

#include "atomics.h"
