// Who runs when. A warp's lanes run one after another, each up to its next collective; then the warp is looked at: all
// lanes at one collective exchange and may go on, all at a barrier wait for the other warps, anything else is an error.
#include <algorithm>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#include "simt/faults.h"
#include "simt/fiber.h"
#include "simt/shared.h"
#include "simt/simt.h"

simt::Index threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace simt {
namespace {

enum class State : uint8_t { kReady, kWaiting, kFinished, kFailed };

struct AsyncCopy {
  void* to;
  const void* from;  // null: zeros
  int group;

  void run() const {
    if (from == nullptr) {
      std::memset(to, 0, 16);
    } else {
      std::memcpy(to, from, 16);
    }
  }
};

struct Thread {
  Fiber fiber;
  Index index;
  int number;
  State state;
  Collective waits_for;
  Site site;
  Resolve resolve;
  unsigned char value[Meeting::kBytes];
  size_t value_bytes;
  std::vector<AsyncCopy> copies;
  int copy_group;
};

struct Warp {
  int begin, end;  // its threads
  State state;     // kWaiting: at a barrier of the block
  Meeting meeting;
};

const char* name_of(Collective kind) {
  constexpr const char* names[] = {"sync_block", "sync_warp",     "a shuffle",
                                   "ballot",     "load_matrix_4", "multiply_16x8x16"};
  return names[static_cast<int>(kind)];
}

std::string text_of(const Site& site) {
  const std::string file = site.file_name();
  const size_t slash = file.find_last_of('/');
  return (slash == std::string::npos ? file : file.substr(slash + 1)) + ":" + std::to_string(site.line());
}

bool same_site(const Site& a, const Site& b) {
  return a.line() == b.line() && a.column() == b.column() && std::strcmp(a.file_name(), b.file_name()) == 0;
}

std::string doing(const Thread& thread) {
  const std::string who = "thread " + std::to_string(thread.number);
  if (thread.state == State::kFinished) return who + " has finished";
  return who + " waits at " + name_of(thread.waits_for) + " in " + text_of(thread.site);
}

bool together(const Thread& a, const Thread& b) {
  if (a.state != b.state) return false;
  return a.state == State::kFinished || (a.waits_for == b.waits_for && same_site(a.site, b.site));
}

class Machine {
 public:
  void launch(dim3 grid, dim3 block, size_t shared_bytes, void (*body)(const void*), const void* context);

  void run_body() {
    try {
      body_(context_);
    } catch (...) {
      exception_ = std::current_exception();
    }
    current_->state = exception_ ? State::kFailed : State::kFinished;
  }

  Thread& current() { return *current_; }
  bool is_running() const { return current_ != nullptr; }
  Warp& warp_of(const Thread& thread) { return warps_[thread.number / kWarp]; }
  SharedMemory& shared() { return *shared_; }
  unsigned char poison() const { return poison_; }

  // Whether an asynchronous copy that may run now or later does so now.
  bool copies_at_once() {
    if (order_ < 2) return order_ == 1;
    return (random_() & 1) != 0;
  }

  void fail_current(std::string what) {
    failure_ = std::move(what);
    current_->state = State::kFailed;
  }

 private:
  void check(dim3 grid, dim3 block, size_t shared_bytes) const;
  void prepare(dim3 grid, dim3 block, size_t shared_bytes);
  void run_grid();
  void run_block();
  void run_warp(Warp& warp);
  void settle(Warp& warp);
  void exchange(Warp& warp);
  void release_barrier();
  [[noreturn]] void fail(const std::string& what) const;
  // The ready warp whose turn it is; null when none is ready.
  Warp* next_warp();

  // 0: threads and blocks in order, 1: in reverse, more: the seed of a random order that changes at every collective.
  unsigned order_ = 0;
  std::mt19937 random_;
  unsigned char poison_ = 0xff;
  void (*body_)(const void*) = nullptr;
  const void* context_ = nullptr;
  Stacks stacks_;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::vector<int> ready_;
  std::vector<int> lanes_;
  std::unique_ptr<SharedMemory> shared_ = std::make_unique<SharedMemory>();
  Thread* current_ = nullptr;
  std::string failure_;
  std::exception_ptr exception_;
};

void on_fault(const char* what);

Machine& machine() {
  static Machine& the_machine = *new Machine;  // outlives whatever runs at exit
  return the_machine;
}

void Machine::fail(const std::string& what) const {
  throw std::runtime_error("simt: block (" + std::to_string(blockIdx.x) + ", " + std::to_string(blockIdx.y) + ", " +
                           std::to_string(blockIdx.z) + "): " + what);
}

void Machine::check(dim3 grid, dim3 block, size_t shared_bytes) const {
  const auto refuse = [](const std::string& what) { throw std::runtime_error("simt: a launch with " + what); };
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > kMaxThreads) refuse(std::to_string(threads) + " threads per block");
  if (block.z > 64) refuse("more than 64 threads in z");
  if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) refuse("more blocks than a grid may have");
  if (shared_bytes > SharedMemory::kMaxBytes) refuse(std::to_string(shared_bytes) + " bytes of shared memory");
}

void Machine::prepare(dim3 grid, dim3 block, size_t shared_bytes) {
  const char* order = std::getenv("GRISTMILL_SIMT_ORDER");
  order_ = order == nullptr ? 0 : static_cast<unsigned>(std::strtoul(order, nullptr, 10));
  random_.seed(order_);
  constexpr unsigned char poisons[] = {0xff, 0x7f, 0xfe};
  poison_ = poisons[order_ % 3];
  gridDim = grid;
  blockDim = block;
  const int count = static_cast<int>(block.x * block.y * block.z);
  threads_.resize(count);
  for (int i = 0; i < count; ++i) {
    const unsigned n = static_cast<unsigned>(i);
    threads_[i].number = i;
    threads_[i].index = {n % block.x, n / block.x % block.y, n / block.x / block.y};
  }
  warps_.resize((count + kWarp - 1) / kWarp);
  for (int i = 0; i < static_cast<int>(warps_.size()); ++i) {
    warps_[i].begin = i * kWarp;
    warps_[i].end = std::min(count, (i + 1) * kWarp);
  }
  shared_->begin_launch(shared_bytes, poison_);
}

void Machine::launch(dim3 grid, dim3 block, size_t shared_bytes, void (*body)(const void*), const void* context) {
  check(grid, block, shared_bytes);
  prepare(grid, block, shared_bytes);
  body_ = body;
  context_ = context;
  exception_ = nullptr;
  failure_.clear();
  try {
    const FaultGuard faults(&on_fault);
    run_grid();
  } catch (...) {
    current_ = nullptr;
    stacks_.abandon();
    throw;
  }
}

void Machine::run_grid() {
  const uint64_t blocks = uint64_t{gridDim.x} * gridDim.y * gridDim.z;
  std::vector<uint64_t> shuffled;
  if (order_ > 1) {
    shuffled.resize(blocks);
    std::iota(shuffled.begin(), shuffled.end(), uint64_t{0});
    std::shuffle(shuffled.begin(), shuffled.end(), random_);
  }
  for (uint64_t i = 0; i < blocks; ++i) {
    const uint64_t block = order_ > 1 ? shuffled[i] : order_ == 1 ? blocks - 1 - i : i;
    blockIdx = {static_cast<unsigned>(block % gridDim.x), static_cast<unsigned>(block / gridDim.x % gridDim.y),
                static_cast<unsigned>(block / gridDim.x / gridDim.y)};
    run_block();
  }
}

void Machine::run_block() {
  shared_->begin_block();
  for (Thread& thread : threads_) {
    thread.fiber.restart(stacks_[thread.number], thread.number);
    thread.state = State::kReady;
    thread.copies.clear();
    thread.copy_group = 0;
  }
  for (Warp& warp : warps_) warp.state = State::kReady;
  for (;;) {
    while (Warp* warp = next_warp()) {
      run_warp(*warp);
      settle(*warp);
    }
    if (warps_[0].state == State::kFinished &&
        std::all_of(warps_.begin(), warps_.end(), [](const Warp& warp) { return warp.state == State::kFinished; })) {
      break;
    }
    release_barrier();
  }
  if (!shared_->borders_intact()) fail("shared memory was written outside an array");
}

Warp* Machine::next_warp() {
  ready_.clear();
  for (size_t i = 0; i < warps_.size(); ++i) {
    if (warps_[i].state == State::kReady) ready_.push_back(static_cast<int>(i));
  }
  if (ready_.empty()) return nullptr;
  if (order_ == 0) return &warps_[ready_.front()];
  if (order_ == 1) return &warps_[ready_.back()];
  return &warps_[ready_[random_() % ready_.size()]];
}

void Machine::run_warp(Warp& warp) {
  lanes_.resize(warp.end - warp.begin);
  std::iota(lanes_.begin(), lanes_.end(), warp.begin);
  if (order_ == 1) std::reverse(lanes_.begin(), lanes_.end());
  if (order_ > 1) std::shuffle(lanes_.begin(), lanes_.end(), random_);
  for (const int lane : lanes_) {
    Thread& thread = threads_[lane];
    if (thread.state != State::kReady) continue;
    current_ = &thread;
    threadIdx = thread.index;
    thread.fiber.resume();
    current_ = nullptr;
    if (thread.state == State::kFailed) {
      if (exception_) std::rethrow_exception(exception_);
      fail("thread " + std::to_string(thread.number) + ": " + failure_);
    }
  }
}

// Every lane has run as far as it could alone.
void Machine::settle(Warp& warp) {
  const Thread& first = threads_[warp.begin];
  for (int i = warp.begin + 1; i < warp.end; ++i) {
    if (!together(first, threads_[i])) {
      fail("the lanes of a warp part: " + doing(first) + ", " + doing(threads_[i]));
    }
  }
  if (first.state == State::kFinished) {
    warp.state = State::kFinished;
  } else if (first.waits_for == Collective::kSyncBlock) {
    warp.state = State::kWaiting;
  } else {
    exchange(warp);
  }
}

void Machine::exchange(Warp& warp) {
  Meeting& meeting = warp.meeting;
  meeting.present = 0;
  for (int i = warp.begin; i < warp.end; ++i) {
    Thread& thread = threads_[i];
    meeting.present |= uint64_t{1} << (i - warp.begin);
    std::memcpy(meeting.values[i - warp.begin], thread.value, thread.value_bytes);
    thread.state = State::kReady;
  }
  if (threads_[warp.begin].resolve != nullptr) threads_[warp.begin].resolve(meeting);
}

// On the signal's own stack, which the switch leaves for good. A fault of the emulation itself is not caught.
void on_fault(const char* what) {
  if (!machine().is_running()) std::abort();
  machine().fail_current(what);
  machine().current().fiber.pause();
}

void Machine::release_barrier() {
  const Thread& first = threads_[0];
  for (const Thread& thread : threads_) {
    if (!together(first, thread)) fail("the threads of a block part: " + doing(first) + ", " + doing(thread));
  }
  for (Thread& thread : threads_) thread.state = State::kReady;
  for (Warp& warp : warps_) warp.state = State::kReady;
}

}  // namespace

void fiber_main() {
  machine().run_body();
  machine().current().fiber.pause(true);
}

void fail(const std::string& what, const Site& site) {
  if (!machine().is_running()) throw std::runtime_error("simt: " + what + " in " + text_of(site));
  machine().fail_current(what + " in " + text_of(site));
  machine().current().fiber.pause();
  std::abort();
}

const Meeting& meet(Collective kind, const void* value, size_t bytes, const Site& site, Resolve resolve) {
  Thread& thread = machine().current();
  if (bytes > 0) std::memcpy(thread.value, value, bytes);
  thread.value_bytes = bytes;
  thread.waits_for = kind;
  thread.site = site;
  thread.resolve = resolve;
  thread.state = State::kWaiting;
  thread.fiber.pause();
  return machine().warp_of(thread).meeting;
}

void sync_block(const Site& site) { meet(Collective::kSyncBlock, nullptr, 0, site); }

void* shared_array(const void* place, size_t bytes, const Site& site) {
  void* data = machine().shared().array(place, bytes);
  if (data == nullptr) fail("more than 48 KiB of static shared memory", site);
  return data;
}

void* dynamic_shared_memory() { return machine().shared().dynamic(); }

void copy_async_16(void* shared, const void* global, bool present, const Site& site) {
  check_alignment(shared, 16, "an asynchronous copy to shared memory", site);
  check_alignment(global, 16, "an asynchronous copy from global memory", site);
  if (!machine().shared().contains(shared, 16)) fail("an asynchronous copy to somewhere outside shared memory", site);
  if (present && machine().shared().contains(global, 16)) fail("an asynchronous copy from shared memory", site);
  Thread& thread = machine().current();
  const AsyncCopy copy = {shared, present ? global : nullptr, thread.copy_group};
  if (machine().copies_at_once()) {
    copy.run();
  } else {
    thread.copies.push_back(copy);
  }
}

void copy_async_commit() { ++machine().current().copy_group; }

// Of the committed groups, all but the latest `groups_left` arrive.
void copy_async_wait(int groups_left) {
  Thread& thread = machine().current();
  const auto arrives = [&](const AsyncCopy& copy) { return copy.group < thread.copy_group - groups_left; };
  for (const AsyncCopy& copy : thread.copies) {
    if (arrives(copy)) copy.run();
  }
  std::erase_if(thread.copies, arrives);
}

unsigned char poison_byte() { return machine().poison(); }

void launch_blocks(dim3 grid, dim3 block, size_t shared_bytes, void (*body)(const void*), const void* context) {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  machine().launch(grid, block, shared_bytes, body, context);
}

}  // namespace simt
