// The kernels compiled for AVX2, FMA and F16C. Standard headers come before the target is set: what they define inline
// may be merged with other translation units, and must run everywhere. The target then holds to the end of the file,
// where templates are instantiated.
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#define FUSEDACCUM_ISA avx2
#define FUSEDACCUM_REG_AVX2
#include "table.h"

namespace fusedaccum {
namespace {
constexpr Kernels kAvx2Table = avx2::table("avx2");
}
const Kernels* const kAvx2 = &kAvx2Table;
}  // namespace fusedaccum

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else
#include "kernels.h"
const fusedaccum::Kernels* const fusedaccum::kAvx2 = nullptr;
#endif
