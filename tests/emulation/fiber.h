// A fiber: a stack of its own, and a place to continue at. On x86-64 a switch is twelve instructions; elsewhere
// (and with -DEMULATION_UCONTEXT) ucontext does it, with a system call each time.
//
// The sanitizers are told of every switch. Their functions are weak: null unless the program is linked with them.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if defined(__x86_64__) && !defined(EMULATION_UCONTEXT)
#define EMULATION_OWN_SWITCH
#else
#include <ucontext.h>
#endif

extern "C" {
#define EMULATION_WEAK __attribute__((weak))
EMULATION_WEAK void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t size);
EMULATION_WEAK void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom, size_t* size);
EMULATION_WEAK void* __tsan_get_current_fiber();
EMULATION_WEAK void* __tsan_create_fiber(unsigned flags);
EMULATION_WEAK void __tsan_switch_to_fiber(void* fiber, unsigned flags);
EMULATION_WEAK void __tsan_acquire(void* address);
EMULATION_WEAK void __tsan_release(void* address);
#undef EMULATION_WEAK
}

#ifdef EMULATION_OWN_SWITCH
// Pushes what a function must preserve, stores the stack pointer, continues where the other stack was left.
extern "C" void emulation_switch(void** save, void* restore);
asm(R"(
.text
.p2align 4
.type emulation_switch, @function
emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulation_switch, .-emulation_switch
)");
#endif

namespace emulation {

class Fiber {
 public:
  Fiber() = default;
  Fiber(const Fiber&) = delete;

  // The fiber of the calling OS thread itself: it is switched away from first.
  void adopt() {
    if (__tsan_get_current_fiber) tsan_ = __tsan_get_current_fiber();
  }

  // The next switch to this fiber calls `entry`, which must end with a last switch and not return.
  void start(void (*entry)()) {
    if (!stack_) allocate();
#ifdef EMULATION_OWN_SWITCH
    // What emulation_switch pops: six registers and the entry. Above them lies the return address of an entry that
    // does not return, 8 bytes under a multiple of 16 as in every call.
    uintptr_t* top = reinterpret_cast<uintptr_t*>(stack_ + kStackBytes) - 1;
    top[0] = 0;
    top[-1] = reinterpret_cast<uintptr_t>(entry);
    for (int i = 2; i <= 7; ++i) top[-i] = 0;
    stack_pointer_ = top - 7;
#else
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack_;
    context_.uc_stack.ss_size = kStackBytes;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
#endif
  }

  // last: this fiber has ended.
  void switch_to(Fiber& to, bool last = false) {
    previous_ = this;
    if (__sanitizer_start_switch_fiber)
      __sanitizer_start_switch_fiber(last ? nullptr : &fake_stack_, to.bottom_, to.size_);
    constexpr unsigned kNoSync = 1;  // a switch orders nothing: what does is told by acquire and release
    if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(to.tsan_, kNoSync);
#ifdef EMULATION_OWN_SWITCH
    emulation_switch(&stack_pointer_, to.stack_pointer_);
#else
    swapcontext(&context_, &to.context_);
#endif
    arrived(fake_stack_);
  }

  // What an entry calls first. It learns where the stack of an adopted fiber lies.
  static void arrived(void* fake_stack = nullptr) {
    if (__sanitizer_finish_switch_fiber)
      __sanitizer_finish_switch_fiber(fake_stack, &previous_->bottom_, &previous_->size_);
  }

 private:
  static constexpr size_t kStackBytes = 256 << 10;  // sanitizers make frames large; untouched pages cost nothing

  void allocate() {
    const size_t guard = size_t(sysconf(_SC_PAGESIZE));
    void* memory = mmap(nullptr, guard + kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, guard, PROT_NONE) != 0) {
      perror("emulation: no memory for the stack of a thread");
      abort();
    }
    stack_ = static_cast<char*>(memory) + guard;
    bottom_ = stack_;
    size_ = kStackBytes;
    if (__tsan_create_fiber) tsan_ = __tsan_create_fiber(0);
  }

  static inline thread_local Fiber* previous_ = nullptr;

  char* stack_ = nullptr;  // is kept for the next start
  const void* bottom_ = nullptr;
  size_t size_ = 0;
  void* fake_stack_ = nullptr;
  void* tsan_ = nullptr;
#ifdef EMULATION_OWN_SWITCH
  void* stack_pointer_ = nullptr;
#else
  ucontext_t context_;
#endif
};

}  // namespace emulation
