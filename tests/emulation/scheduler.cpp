// Runs launches: every block's threads in turns, in an order that can be chosen, until each waits or has ended; then
// what is complete goes on (a barrier where all have arrived, a warp operation where all lanes of its mask have).
//
// Settings, from the environment or emulation_set():
//   EMULATION_ORDER=forward | reverse | random    of the threads in each turn, and of the blocks
//   EMULATION_SEED=number                         of the random order
//   EMULATION_STRICT=1    abort also where a GPU may let it pass: a barrier that threads reach at different places or
//                         that some have left the block before, a mask that names a lane that has ended or is not
//                         there, or that lacks the calling lane. Not strict, who has ended counts as arrived.
//   EMULATION_WORKERS=n   OS threads that run blocks
//
// Threads that wait for each other for ever are always reported. A loop that polls memory hangs, as it may on a GPU.
//
// This file is compiled without ThreadSanitizer, which would take what the fibers share here for races. What orders
// the threads of a kernel is told to it in so many words: the launch, barriers, warp operations, fenced atomics.
#include <algorithm>
#include <cstdarg>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "emulation.h"
#include "fiber.h"

__thread uint3 threadIdx, blockIdx;
__thread dim3 blockDim, gridDim;

namespace emulation {
namespace {

constexpr int kLanes = 32;
constexpr int kMaxThreads = 1024;

enum class Order { kForward, kReverse, kRandom };
struct Settings {
  Order order = Order::kForward;
  uint64_t seed = 0;
  bool strict = false;
  int workers = 1;
};

[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...) {
  va_list values;
  va_start(values, format);
  fputs("emulation: ", stderr);
  vfprintf(stderr, format, values);
  fputc('\n', stderr);
  va_end(values);
  abort();
}

Settings parse(const char* order, const char* seed, const char* strict, const char* workers) {
  Settings s;
  const std::string name = order ? order : "forward";
  if (name == "reverse")
    s.order = Order::kReverse;
  else if (name == "random")
    s.order = Order::kRandom;
  else if (name != "forward")
    fail("the order of threads is forward, reverse or random, not %s", order);
  if (seed) s.seed = strtoull(seed, nullptr, 10);
  s.strict = strict && std::string(strict) != "0";
  if (workers) s.workers = atoi(workers);
  if (s.workers < 1 || s.workers > 64) fail("the number of workers is 1 to 64, not %s", workers);
  return s;
}

Settings settings =
    parse(getenv("EMULATION_ORDER"), getenv("EMULATION_SEED"), getenv("EMULATION_STRICT"), getenv("EMULATION_WORKERS"));

// splitmix64 (Steele, Lea and Flood 2014).
struct Random {
  uint64_t state;
  uint64_t operator()() {
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
};

template <class T>
void put_in_order(std::vector<T>& sequence, Random& random) {
  for (size_t i = 0; i < sequence.size(); ++i) sequence[i] = T(i);
  if (settings.order == Order::kReverse) std::reverse(sequence.begin(), sequence.end());
  if (settings.order != Order::kRandom) return;
  for (size_t i = sequence.size(); i > 1; --i) std::swap(sequence[i - 1], sequence[random() % i]);
}

void acquire(void* address) {
  if (__tsan_acquire) __tsan_acquire(address);
}
void release(void* address) {
  if (__tsan_release) __tsan_release(address);
}

// Something that threads release to when they arrive and acquire from when they leave. Two addresses in turn: who is
// quick may arrive at the next meeting before who is slow has left this one.
struct Meeting {
  uint64_t addresses[2];
  unsigned held = 0;
  void* address() { return &addresses[held & 1]; }
};

enum class State { kReady, kBarrier, kWarp, kEnded };

struct Thread {
  Fiber fiber;
  State state;
  Site site;       // of what it waits for
  WarpKind kind;   // of the warp operation it waits for
  unsigned mask;   // of it
  uint64_t value;  // what it passed, then what it gets
  int source;
  bool fenced;  // since its last atomic
  static constexpr unsigned kRead = 16;
  void* read[kRead];  // addresses of the last atomics since its last fence
  unsigned read_count;
};

struct Worker {
  Fiber fiber;  // of the OS thread
  const Launch* launch = nullptr;
  int64_t block = 0;
  int count = 0;
  Random random{};
  std::unique_ptr<Thread[]> threads{new Thread[kMaxThreads]};
  std::vector<int> order;
  Meeting boundary, barrier;                    // of the blocks of this worker, of the threads of a block
  Meeting warps[kMaxThreads / kLanes][kLanes];  // by warp and by the lowest lane of the mask

  int index(const Thread& thread) const { return int(&thread - threads.get()); }
};

thread_local Worker* worker = nullptr;
thread_local Thread* self = nullptr;

std::string describe(const Thread& thread) {
  const int index = worker->index(thread);
  std::string text = "thread " + std::to_string(index);
  if (index >= worker->count) return text + ", which the block does not have";
  if (thread.state == State::kEnded) return text + ", which has ended";
  text +=
      std::string(" at ") + thread.site.call + " (" + thread.site.file + ":" + std::to_string(thread.site.line) + ")";
  if (thread.state != State::kWarp) return text;
  char mask[32];
  snprintf(mask, sizeof mask, " with mask 0x%08x", thread.mask);
  return text + mask;
}

[[noreturn]] void fail_at(const Thread& thread, const char* why, const Thread& other) {
  fail("%s, block %lld: %s: %s; %s", worker->launch->kernel, (long long)worker->block, why, describe(thread).c_str(),
       describe(other).c_str());
}

void wait(State state, Site site) {
  self->state = state;
  self->site = site;
  self->fiber.switch_to(worker->fiber);
}

void run_thread() {
  Fiber::arrived();
  acquire(&worker->boundary.addresses[worker->boundary.held & 1]);
  worker->launch->run(worker->launch->arguments);
  release(&worker->boundary.addresses[(worker->boundary.held + 1) & 1]);
  self->state = State::kEnded;
  self->fiber.switch_to(worker->fiber, true);
}

// Every thread that can runs until it waits or ends. True if there was one.
bool take_turns() {
  bool any = false;
  if (settings.order == Order::kRandom) put_in_order(worker->order, worker->random);
  for (const int index : worker->order) {
    Thread& thread = worker->threads[index];
    if (thread.state != State::kReady) continue;
    any = true;
    self = &thread;
    threadIdx = {unsigned(index), 0, 0};
    worker->fiber.switch_to(thread.fiber);
  }
  return any;
}

// What lane `to` gets. A lane that takes no part has nothing to give: all ones, which is not a number.
uint64_t warp_result(const Thread& to, const Thread* warp, const bool* takes_part, const uint64_t* values) {
  if (to.kind == WarpKind::kSync) return 0;
  if (to.kind == WarpKind::kShuffle) return takes_part[to.source] ? values[to.source] : ~uint64_t(0);
  uint64_t ballot = 0;
  for (int lane = 0; lane < kLanes; ++lane)
    if (takes_part[lane] && (warp[lane].mask >> lane & 1) && values[lane]) ballot |= uint64_t(1) << lane;
  return ballot;
}

bool ended(const Thread& thread) { return worker->index(thread) >= worker->count || thread.state == State::kEnded; }

// The lane named by thread's mask that has not arrived, if there is one.
const Thread* missing_lane(const Thread& thread, const Thread* warp) {
  for (int lane = 0; lane < kLanes; ++lane) {
    const Thread& other = warp[lane];
    if (!(thread.mask >> lane & 1)) continue;
    if (ended(other)) {
      if (settings.strict) fail_at(thread, "a mask names a lane that is not there", other);
    } else if (other.state != State::kWarp || other.kind != thread.kind || other.mask != thread.mask) {
      return &other;
    }
  }
  return nullptr;
}

// Lets the lanes go on that wait for the same operation as `thread`, if all of its mask do. Lanes that the mask lacks
// take part too, as they do on a GPU whose warp has not diverged.
bool complete_warp(Thread& thread, Thread* warp) {
  const int lane = int(&thread - warp);
  if (settings.strict && !(thread.mask >> lane & 1)) fail_at(thread, "a mask lacks the calling lane", thread);
  if (missing_lane(thread, warp)) return false;
  bool takes_part[kLanes];
  uint64_t values[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    const Thread& other = warp[i];
    takes_part[i] =
        !ended(other) && other.state == State::kWarp && other.kind == thread.kind && other.mask == thread.mask;
    values[i] = takes_part[i] ? other.value : 0;
    if (settings.strict && takes_part[i] && !(other.mask >> i & 1))
      fail_at(other, "a mask lacks the calling lane", thread);
  }
  for (int i = 0; i < kLanes; ++i)
    if (takes_part[i]) warp[i].value = warp_result(warp[i], warp, takes_part, values);
  for (int i = 0; i < kLanes; ++i)
    if (takes_part[i]) warp[i].state = State::kReady;
  return true;
}

Meeting& meeting(const Thread& thread) {
  return worker->warps[worker->index(thread) / kLanes][thread.mask ? __builtin_ctz(thread.mask) : 0];
}

// Lets all threads go on from a barrier.
bool complete_barrier() {
  const Thread* first = nullptr;
  for (int i = 0; i < worker->count; ++i)
    if (!first && worker->threads[i].state == State::kBarrier) first = &worker->threads[i];
  if (!first) return false;
  for (int i = 0; i < worker->count; ++i) {
    Thread& thread = worker->threads[i];
    if (settings.strict && thread.state == State::kEnded)
      fail_at(*first, "a barrier that not all threads of the block reach", thread);
    if (settings.strict && (thread.site.line != first->site.line || strcmp(thread.site.file, first->site.file) != 0))
      fail_at(*first, "threads of one block wait at different barriers", thread);
    if (thread.state == State::kBarrier) thread.state = State::kReady;
  }
  ++worker->barrier.held;
  return true;
}

// Every thread waits or has ended: lets go on who can. False when all have ended.
bool complete() {
  const Thread* waits_in_warp = nullptr;
  bool any = false, all_ended = true;
  for (int i = 0; i < worker->count; ++i) {
    Thread& thread = worker->threads[i];
    Thread* warp = &worker->threads[i / kLanes * kLanes];
    all_ended = all_ended && thread.state == State::kEnded;
    if (thread.state != State::kWarp) continue;
    if (complete_warp(thread, warp)) {
      ++meeting(thread).held;
      any = true;
    } else if (!waits_in_warp) {
      waits_in_warp = &thread;
    }
  }
  if (any || all_ended) return any;
  if (!waits_in_warp) return complete_barrier();
  const Thread* warp = &worker->threads[worker->index(*waits_in_warp) / kLanes * kLanes];
  fail_at(*waits_in_warp, "deadlock, the lanes of a mask wait at different places",
          *missing_lane(*waits_in_warp, warp));
}

void run_block(int64_t block) {
  worker->block = block;
  worker->random.state = settings.seed ^ uint64_t(block) << 20;
  blockIdx = {unsigned(block), 0, 0};
  for (int i = 0; i < worker->count; ++i) {
    Thread& thread = worker->threads[i];
    thread.state = State::kReady;
    thread.fenced = false;
    thread.read_count = 0;
    thread.fiber.start(run_thread);
  }
  put_in_order(worker->order, worker->random);
  do take_turns();
  while (complete());
  ++worker->boundary.held;
}

// The blocks at place `first`, `first` + `step` and so on of the launch's order.
void run_blocks(Worker& runs_here, const Launch& launch, const std::vector<unsigned>& shuffled, int first, int step) {
  worker = &runs_here;
  worker->launch = &launch;
  worker->count = int(launch.threads);
  worker->order.resize(worker->count);
  worker->fiber.adopt();
  blockDim = {unsigned(launch.threads), 1, 1};
  gridDim = {unsigned(launch.blocks), 1, 1};
  release(worker->boundary.address());
  for (int64_t i = first; i < launch.blocks; i += step) {
    const int64_t block = settings.order == Order::kForward   ? i
                          : settings.order == Order::kReverse ? launch.blocks - 1 - i
                                                              : shuffled[i];
    run_block(block);
  }
  acquire(worker->boundary.address());
  worker = nullptr;
}

// Kept between launches: a worker's fibers have stacks.
Worker& worker_at(int i) {
  static std::vector<std::unique_ptr<Worker>> workers;
  while (int(workers.size()) <= i) workers.emplace_back(new Worker);
  return *workers[i];
}

}  // namespace

void run(const Launch& launch) {
  if (worker) fail("%s is launched from a kernel", launch.kernel);
  if (launch.blocks < 1 || launch.blocks > 0x7fffffff || launch.threads < 1 || launch.threads > kMaxThreads) {
    last_error = cudaErrorInvalidConfiguration;
    return;
  }
  std::vector<unsigned> shuffled(settings.order == Order::kRandom ? launch.blocks : 0);
  Random random{settings.seed};
  put_in_order(shuffled, random);
  const int workers = int(std::min<int64_t>(settings.workers, launch.blocks));
  if (workers == 1) return run_blocks(worker_at(0), launch, shuffled, 0, 1);
  std::vector<std::thread> pool;
  for (int i = 0; i < workers; ++i) {
    Worker& runs_there = worker_at(i);
    pool.emplace_back([&, i, workers] { run_blocks(runs_there, launch, shuffled, i, workers); });
  }
  for (std::thread& thread : pool) thread.join();
}

void wait_at_barrier(Site site) {
  void* address = worker->barrier.address();
  release(address);
  wait(State::kBarrier, site);
  acquire(address);
}

uint64_t wait_in_warp(WarpKind kind, unsigned mask, uint64_t value, int source, Site site) {
  self->kind = kind;
  self->mask = mask;
  self->value = value;
  self->source = source;
  void* address = meeting(*self).address();
  release(address);
  wait(State::kWarp, site);
  acquire(address);
  return self->value;
}

int this_lane() { return int(threadIdx.x) % kLanes; }

void before_atomic(void* address) {
  if (!self) return;
  if (self->fenced) release(address);
  self->fenced = false;
}

void after_atomic(void* address) {
  if (self) self->read[self->read_count++ % Thread::kRead] = address;
}

void fence() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  if (!self) return;
  for (unsigned i = 0; i < std::min(self->read_count, Thread::kRead); ++i) acquire(self->read[i]);
  self->read_count = 0;
  self->fenced = true;
}

}  // namespace emulation

// Values as in the environment; null: the default.
extern "C" void emulation_set(const char* order, const char* seed, const char* strict, const char* workers) {
  emulation::settings = emulation::parse(order, seed, strict, workers);
}
