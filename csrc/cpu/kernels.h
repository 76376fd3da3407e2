// The kernels of one instruction set, as a table of functions, and what they are called with. Plain data: this header
// is shared between translation units that are compiled for different instruction sets, so it holds no code.
//
// Every kernel works on a run: `count` tiles in a row of one segment, starting at `tile`.
#pragma once

#include "../rules.h"
#include "../tiles.h"

namespace fusedaccum {

// One micro-batch's gradient of a segment. Its scale is not 0.
struct Source {
  Elements grad;
  float scale;
};

// What the sources are added to: what is in the flat buffer, zeros, or nothing (scale * grad is the first value then).
enum class Start : int32_t { kFlat, kZero, kNothing };

// How the sums of a segment come about: the sources are added one after the other.
struct Sum {
  const Source* sources = nullptr;
  int32_t count = 0;  // at least 1 where the start is kNothing
  Start start = Start::kFlat;
};

struct FoldRun {
  float* flat;
  Sum sum;
  double* partial;  // of the first tile; null where no norm is wanted
  bool stream;      // flat's base allows non-temporal stores, and there is enough to write for them to pay
};

// How a parameter is rounded: to nearest, or stochastically.
struct Rounding {
  bool stochastic;
  Noise noise;
};

struct AdamRun {
  float* flat;
  Elements param, exp_avg, exp_avg_sq, max_exp_avg_sq;
  float* master;
  AdamFactors factors;
  Rounding rounding;
  bool zero;        // store zeros to flat in the same pass
  Sum late;         // what is added to flat for this update
  double* partial;  // of the first tile, of the sums; null where none are wanted
};

struct SgdRun {
  float* flat;
  Elements param, momentum_buffer;
  float* master;
  SgdFactors factors;
  Rounding rounding;
  bool zero;
  Sum late;
  double* partial;
};

struct Kernels {
  const char* isa;
  void (*fold)(const FoldRun& run, const Tile* tile, int64_t count);
  bool (*all_finite)(Elements grad, const Tile* tile, int64_t count);
  void (*square)(const float* flat, const Sum& late, double* partial, const Tile* tile, int64_t count);
  void (*rescale)(float* flat, float factor, const Tile* tile, int64_t count);
  void (*emit)(const float* flat, Elements grad, float multiplier, const Tile* tile, int64_t count);
  void (*adam)(const AdamRun& run, const Tile* tile, int64_t count);
  void (*sgd)(const SgdRun& run, const Tile* tile, int64_t count);
  void (*zero)(float* flat, const Tile* tile, int64_t count);
  void (*fence)();  // makes non-temporal stores visible to other threads
};

// The instruction sets of this binary; an entry is null where the target has no such thing.
extern const Kernels kBaseline;
extern const Kernels* const kAvx2;
extern const Kernels* const kAvx512;

}  // namespace fusedaccum
