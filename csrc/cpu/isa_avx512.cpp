// The kernels compiled for AVX-512. Standard headers come before the target is set: what they define inline may be
// merged with other translation units, and must run everywhere. The target then holds to the end of the file, where
// templates are instantiated.
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>

#if !defined(__clang__)
// GCC's own intrinsics leave the value under an all-ones mask undefined and warn about it.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

#define FUSEDACCUM_ISA avx512
#define FUSEDACCUM_REG_AVX512
#include "table.h"

namespace fusedaccum {
namespace {
constexpr Kernels kAvx512Table = avx512::table("avx512");
}
const Kernels* const kAvx512 = &kAvx512Table;
}  // namespace fusedaccum

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else
#include "kernels.h"
const fusedaccum::Kernels* const fusedaccum::kAvx512 = nullptr;
#endif
