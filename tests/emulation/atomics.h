// Atomics and fences. As in CUDA an atomic orders nothing but itself: the builtins are relaxed.
//
// ThreadSanitizer knows no fences, so they are told to it here. An atomic releases to other threads only if its thread
// has executed __threadfence() since its last atomic; what an atomic has read is acquired by its thread's next fence.
// A write between a fence and the atomic after it counts as released, although it is not: no hook sees plain writes.
// A kernel is right when the thread that takes the ticket fences before and after it, and tells its block by a barrier.
#pragma once

#include <type_traits>

namespace emulation {

#if defined(__SANITIZE_THREAD__)
#define EMULATION_THREAD_SANITIZER
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define EMULATION_THREAD_SANITIZER
#endif
#endif

// In scheduler.cpp.
void before_atomic(void* address);
void after_atomic(void* address);
void fence();

template <class T, class Operation>
T atomic(T* address, Operation operation) {
#ifdef EMULATION_THREAD_SANITIZER
  before_atomic(address);
#endif
  const T old = operation(address);
#ifdef EMULATION_THREAD_SANITIZER
  after_atomic(address);
#endif
  return old;
}

// For what has no builtin: compute(old) is stored.
template <class T, class Compute>
T atomic_update(T* address, Compute compute) {
  return atomic(address, [&](T* a) {
    T old, wanted;
    __atomic_load(a, &old, __ATOMIC_RELAXED);
    do wanted = compute(old);
    while (!__atomic_compare_exchange(a, &old, &wanted, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return old;
  });
}

}  // namespace emulation

inline void __threadfence() { emulation::fence(); }
// Orders memory within the block only. Barriers do that too, and TSan sees nothing of this fence.
inline void __threadfence_block() {}

#define EMULATION_ATOMIC(name, type, expression)                                                \
  inline type name(type* address, type value) {                                                 \
    return emulation::atomic_update(address, [value](type old) -> type { return expression; }); \
  }

EMULATION_ATOMIC(atomicAdd, int, int(unsigned(old) + unsigned(value)))
EMULATION_ATOMIC(atomicAdd, unsigned, old + value)
EMULATION_ATOMIC(atomicAdd, unsigned long long, old + value)
EMULATION_ATOMIC(atomicAdd, float, old + value)
EMULATION_ATOMIC(atomicAdd, double, old + value)
EMULATION_ATOMIC(atomicInc, unsigned, old >= value ? 0 : old + 1)
EMULATION_ATOMIC(atomicMax, int, old > value ? old : value)
EMULATION_ATOMIC(atomicMax, unsigned, old > value ? old : value)
EMULATION_ATOMIC(atomicMax, unsigned long long, old > value ? old : value)
EMULATION_ATOMIC(atomicMin, int, old < value ? old : value)
EMULATION_ATOMIC(atomicMin, unsigned, old < value ? old : value)
EMULATION_ATOMIC(atomicOr, int, old | value)
EMULATION_ATOMIC(atomicOr, unsigned, old | value)
EMULATION_ATOMIC(atomicAnd, unsigned, old& value)
EMULATION_ATOMIC(atomicExch, int, (void(old), value))
EMULATION_ATOMIC(atomicExch, unsigned, (void(old), value))
#undef EMULATION_ATOMIC

template <class T>
T atomicCAS(T* address, std::remove_cv_t<T> expected, std::remove_cv_t<T> value) {
  return emulation::atomic(address, [&](T* a) {
    T old = expected;  // becomes what was there
    __atomic_compare_exchange(a, &old, &value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return old;
  });
}
