// Runs GPU kernels on the CPU: every thread of a block is a fiber that runs until it needs the others (a barrier, a
// shuffle), and the scheduler of scheduler.cpp decides who goes next. What a GPU leaves undefined is made to go wrong:
// shared memory starts as poison, threads run in any order, and threads that fail to meet are an error.
//
// This is the interface of the emulation proper; device.h puts the names of common/gpu.h on top of it.
#pragma once

#if !defined(__x86_64__) || !defined(__linux__)
#error "the SIMT emulation switches stacks, which it knows how to do on x86-64 Linux only"
#endif
#if !defined(GRISTMILL_SIMT_WARP) || (GRISTMILL_SIMT_WARP != 32 && GRISTMILL_SIMT_WARP != 64)
#error "GRISTMILL_SIMT_WARP must be 32 or 64"
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <source_location>
#include <string>

// The words of CUDA's language. Everything is inlined or not as the C++ compiler likes.
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace simt {

inline constexpr int kWarp = GRISTMILL_SIMT_WARP;
inline constexpr int kMaxThreads = 1024;

// Which line of a kernel: collectives of one warp, and barriers of one block, meet at one line only.
using Site = std::source_location;

struct Index {
  unsigned x, y, z;
};

enum class Collective : uint8_t { kSyncBlock, kSyncWarp, kShuffle, kBallot, kLoadMatrix, kMultiply };

// What the lanes of a warp brought to a collective.
struct Meeting {
  static constexpr int kBytes = 64;
  alignas(16) unsigned char values[kWarp][kBytes];
  uint64_t present;  // bit i: lane i exists (a block's last warp may be short)
};

// Runs in the scheduler once all lanes have come, before any of them goes on.
using Resolve = void (*)(Meeting&);

// Waits for the other lanes of this warp, and gives what each brought. Valid until this thread's next collective.
const Meeting& meet(Collective kind, const void* value, size_t bytes, const Site& site, Resolve resolve = nullptr);
void sync_block(const Site& site);

// One array of shared memory per `place` and block, aligned to 16 bytes and no more.
void* shared_array(const void* place, size_t bytes, const Site& site);
// The dynamic shared memory of the launch, aligned to 128 bytes and no more.
void* dynamic_shared_memory();

// Asynchronous copies of 16 bytes: done when they are issued, or only by the wait that is said to wait for them, as the
// order of the run decides.
void copy_async_16(void* shared, const void* global, bool present, const Site& site);
void copy_async_commit();
void copy_async_wait(int groups_left);

// The byte that fills what has no value. NaN, a huge positive and a huge negative number take turns from order to
// order, because a maximum overlooks NaN, and an index of -1 may mean "nothing to do".
unsigned char poison_byte();
template <typename T>
inline T poison() {
  T value;
  std::memset(static_cast<void*>(&value), poison_byte(), sizeof(T));
  return value;
}

// Ends the launch with an error that names the running thread. Returns to nobody: the threads' stacks are abandoned.
[[noreturn]] void fail(const std::string& what, const Site& site);

inline void check_alignment(const void* address, size_t alignment, const char* what, const Site& site) {
  if (reinterpret_cast<uintptr_t>(address) % alignment != 0) [[unlikely]] {
    fail(std::string(what) + " at an address that is no multiple of " + std::to_string(alignment) + " bytes", site);
  }
}

void launch_blocks(dim3 grid, dim3 block, size_t shared_bytes, void (*body)(const void*), const void* context);

// Runs `kernel` once per thread of the grid. Throws std::runtime_error when the threads did what a GPU does not allow.
template <typename Kernel>
inline void launch(dim3 grid, dim3 block, size_t shared_bytes, const Kernel& kernel) {
  launch_blocks(
      grid, block, shared_bytes, [](const void* context) { (*static_cast<const Kernel*>(context))(); }, &kernel);
}

}  // namespace simt

// Of the thread that runs.
extern simt::Index threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
