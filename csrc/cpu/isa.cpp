#include "isa.h"

#include <cstdlib>
#include <stdexcept>

namespace fusedaccum {
namespace {

bool has_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

bool has_avx512() {
#if defined(__x86_64__)
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

struct Candidate {
  std::string name;
  const Kernels* kernels;  // null where the binary has none
  bool runs_here;
};

std::vector<Candidate> candidates() {
  return {{"avx512", kAvx512, has_avx512()}, {"avx2", kAvx2, has_avx2()}, {"baseline", &kBaseline, true}};
}

const Kernels& choose() {
  const char* wanted = std::getenv("FUSEDACCUM_ISA");
  const bool any = wanted == nullptr || *wanted == '\0';
  for (const Candidate& c : candidates()) {
    const bool runs = c.kernels != nullptr && c.runs_here;
    if (any && runs) return *c.kernels;
    if (any || c.name != wanted) continue;
    if (runs) return *c.kernels;
    throw std::runtime_error("FUSEDACCUM_ISA=" + c.name + (c.kernels ? ": this processor has no " : ": not built: ") +
                             c.name + "; unset it to take the widest that runs here");
  }
  throw std::runtime_error(std::string("FUSEDACCUM_ISA=") + wanted +
                           " is not known; use avx512, avx2 or baseline, or " +
                           "unset it to take the widest that runs here");
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

std::vector<std::string> isas_built() {
  std::vector<std::string> names;
  for (const Candidate& c : candidates())
    if (c.kernels != nullptr) names.push_back(c.name);
  return names;
}

}  // namespace fusedaccum
