// The kernels of one instruction set, as a table of functions, and what they are called with. Plain data: this header
// is shared between translation units that are compiled for different instruction sets, so it holds no code.
//
// Every kernel works on a run: `count` tiles in a row of one segment, starting at `tile`.
#pragma once

#include "../rules.h"
#include "../tiles.h"

namespace fusedaccum {

struct FoldRun {
  float* flat;
  Elements grad;
  double* partial;  // of the first tile; null where no norm is wanted
  float scale;
  bool first;   // the segment's first touch
  bool stream;  // flat's base allows non-temporal stores, and there is enough to write for them to pay
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
  bool zero;  // store zeros to flat in the same pass
};

struct SgdRun {
  float* flat;
  Elements param, momentum_buffer;
  float* master;
  SgdFactors factors;
  Rounding rounding;
  bool zero;
};

struct Kernels {
  const char* isa;
  void (*fold)(const FoldRun& run, const Tile* tile, int64_t count);
  bool (*all_finite)(Elements grad, const Tile* tile, int64_t count);
  void (*square)(const float* flat, double* partial, const Tile* tile, int64_t count);
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
