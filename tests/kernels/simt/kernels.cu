// Small kernels for test_emulator.py, most of them wrong on purpose. Compiled once per warp width; called by ctypes.
#include <exception>
#include <string>

#include "common/gpu.h"

namespace gristmill::gpu {
namespace {

constexpr int kThreads = 128;

// --- whole blocks

enum class Barrier { kThere, kMissing, kHalfTheWarp, kHalfTheWarps, kInTwoPlaces, kSomeLeave };

// out[i] = in[n - 1 - i] through shared memory.
template <Barrier kBarrier>
__global__ void reverse(float* out, const float* in) {
  GRISTMILL_SHARED(float, row, kThreads);
  const int i = thread_index();
  row[i] = in[i];
  if constexpr (kBarrier == Barrier::kThere) {
    sync_block();
  } else if constexpr (kBarrier == Barrier::kHalfTheWarp) {
    if (i % 2 == 0) sync_block();
  } else if constexpr (kBarrier == Barrier::kHalfTheWarps) {
    if (warp_index() == 0) sync_block();
  } else if constexpr (kBarrier == Barrier::kInTwoPlaces) {
    if (warp_index() == 0) {
      sync_block();
    } else {
      sync_block();
    }
  } else if constexpr (kBarrier == Barrier::kSomeLeave) {
    if (i >= kThreads / 2) return;
    sync_block();
  }
  out[i] = row[kThreads - 1 - i];
}

// Two rounds through one buffer: without the second barrier a fast warp overwrites what a slow one still reads.
template <bool kSecondBarrier>
__global__ void rotate_twice(float* out, const float* in) {
  GRISTMILL_SHARED(float, row, kThreads);
  const int i = thread_index();
  float value = in[i];
  for (int round = 0; round < 2; ++round) {
    row[i] = value;
    sync_block();
    value = row[(i + kWarp) % kThreads];
    if constexpr (kSecondBarrier) sync_block();
  }
  out[i] = value;
}

// --- warps

// Sums of each warp by a tree of `width` lanes.
__global__ void warp_sum(float* out, const float* in, int width) {
  float sum = in[thread_index()];
  for (int mask = width / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
  out[thread_index()] = sum;
}

// Every lane reads its neighbour's value from shared memory.
template <bool kSync>
__global__ void neighbour(float* out, const float* in) {
  GRISTMILL_SHARED(float, row, kThreads);
  const int i = thread_index();
  row[i] = in[i];
  if constexpr (kSync) sync_warp();
  out[i] = row[i / kWarp * kWarp + (i + 1) % kWarp];
}

__global__ void lane_missing(float* out, const float* in) {
  const int i = thread_index();
  out[i] = lane_index() == 3 ? in[i] : shuffle(in[i], 0);
}

__global__ void lane_finished(float* out, const float* in) {
  const int i = thread_index();
  if (lane_index() == kWarp - 1) return;
  out[i] = shuffle_down(in[i], 1);
}

__global__ void different_collectives(float* out, const float* in) {
  const int i = thread_index();
  out[i] = lane_index() < 8 ? shuffle(in[i], 0) : static_cast<float>(ballot(in[i] > 0));
}

// All that a correct warp may do: out is what shuffle, _up, _down and ballot give, one row each.
__global__ void collectives(float* out, const float* in) {
  const int i = thread_index();
  out[i] = shuffle(in[i], (lane_index() + 5) % kWarp);
  out[kThreads + i] = shuffle_up(in[i], 3);
  out[2 * kThreads + i] = shuffle_down(in[i], 2);
  out[3 * kThreads + i] = static_cast<float>(ballot(lane_index() % 3 == 0) >> lane_index() & 1);
}

__global__ void largest_of_a_warp(float* out) {
  const int i = thread_index(), shuffled = 7 * lane_index() % kWarp;
  out[i] = static_cast<float>(warp_largest(static_cast<uint32_t>(i / kWarp + shuffled)));
}

__global__ void lane_out_of_range(float* out, const float* in) {
  out[thread_index()] = shuffle(in[thread_index()], kWarp + lane_index());
}

// --- memory

__global__ void pack(float* out, const float* in, int offset) {
  const int i = thread_index();
  if (i < kThreads / 4 - 1) store_pack(out + 4 * i, load_pack<4>(in + 4 * i + offset));
}

__global__ void overrun(float* out, const float* in, int past) {
  GRISTMILL_SHARED(float, row, kThreads);
  const int i = thread_index();
  row[i + past] = in[i];
  sync_block();
  out[i] = row[i];
}

__global__ void overrun_dynamic(float* out, const float* in, int past) {
  float* const row = dynamic_shared<float>();
  const int i = thread_index();
  row[i + past] = in[i];
  sync_block();
  out[i] = row[i];
}

__global__ void wild(float* out, const float* in) {
  if (thread_index() == 7) *reinterpret_cast<volatile float*>(16) = in[0];
  out[thread_index()] = in[thread_index()];
}

enum class Copies { kRight, kNoWait, kNoCommit, kNoBarrier, kWaitTooFew, kOverwriteEarly };

// Adds 4 tiles of a float4 per thread through two buffers filled by asynchronous copies; thread i reads what its
// neighbour in the next warp copied.
template <Copies kCopies>
__global__ void copy_tiles(float* out, const float* in) {
  constexpr int kTiles = 4, kTile = 4 * kThreads;
  GRISTMILL_SHARED(float, buffers, 2 * kTile);
  const int i = thread_index();
  const auto issue = [&](int tile) {
    if (tile < kTiles) copy_async_16(buffers + tile % 2 * kTile + 4 * i, in + tile * kTile + 4 * i);
    if constexpr (kCopies != Copies::kNoCommit) copy_async_commit();
  };
  issue(0);
  float sum = 0;
  for (int tile = 0; tile < kTiles; ++tile) {
    issue(tile + 1);
    if constexpr (kCopies == Copies::kWaitTooFew) {
      copy_async_wait<2>();
    } else if constexpr (kCopies != Copies::kNoWait) {
      copy_async_wait<1>();
    }
    if constexpr (kCopies != Copies::kNoBarrier) sync_block();
    const float* from = buffers + tile % 2 * kTile + (i + kWarp) % kThreads * 4;
    for (int j = 0; j < 4; ++j) sum += from[j];
    if constexpr (kCopies != Copies::kOverwriteEarly) sync_block();
  }
  out[i] = sum;
}

// Counts threads of all blocks.
__global__ void count(int* counter) { atomic_add(counter, 1); }

#if defined(GRISTMILL_HAS_MMA)
// d[16][8] = a[16][16] b[16][8], all of it row-major, by one warp. With `kTransposed` b comes through the transposing
// load, otherwise it is first laid out as its transpose.
template <typename T, bool kTransposed>
__global__ void product(float* d, const T* a, const T* b) {
  GRISTMILL_SHARED(T, tile_a, 16 * 16);
  GRISTMILL_SHARED(T, tile_b, 16 * 16);
  const int lane = lane_index();
  for (int i = lane; i < 256; i += kWarp) tile_a[i] = a[i];
  for (int i = lane; i < 256; i += kWarp) tile_b[i] = T{0};
  sync_warp();
  for (int i = lane; i < 128; i += kWarp) {
    const int k = i / 8, n = i % 8;
    tile_b[kTransposed ? 16 * k + n : 16 * n + k] = b[i];
  }
  sync_warp();
  uint32_t fa[4], fb[4];
  // a: rows 0-7 and 8-15 of columns 0-7, then of columns 8-15.
  load_matrix_4(fa, tile_a + lane % 16 * 16 + lane / 16 * 8);
  if constexpr (kTransposed) {
    load_matrix_4_transposed(fb, tile_b + lane % 16 * 16 + lane / 16 * 8);  // k 0-7, k 8-15
  } else {
    load_matrix_4(fb, tile_b + lane % 8 * 16 + lane / 8 % 2 * 8);
  }
  float c[4] = {1, 1, 1, 1};
  multiply_16x8x16<T>(c, fa, fb[0], fb[1]);
  for (int i = 0; i < 4; ++i) d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = c[i];
}
#endif

std::string last_error;

}  // namespace

#define GRISTMILL_EXPORT extern "C" __attribute__((visibility("default")))

// Runs one kernel over one block and returns null, or what went wrong.
template <typename Kernel>
const char* run(dim3 grid, dim3 block, size_t shared_bytes, const Kernel& kernel) {
  try {
    simt::launch(grid, block, shared_bytes, kernel);
    return nullptr;
  } catch (const std::exception& error) {
    last_error = error.what();
    return last_error.c_str();
  }
}

#define GRISTMILL_TEST_KERNEL(name, ...)                                                 \
  GRISTMILL_EXPORT const char* test_##name(float* out, const float* in, int extra) {     \
    (void)extra;                                                                         \
    return run(dim3(1), dim3(kThreads), kThreads * sizeof(float), [&] { __VA_ARGS__; }); \
  }

GRISTMILL_TEST_KERNEL(reverse, reverse<Barrier::kThere>(out, in))
GRISTMILL_TEST_KERNEL(barrier_missing, reverse<Barrier::kMissing>(out, in))
GRISTMILL_TEST_KERNEL(barrier_of_half_the_warp, reverse<Barrier::kHalfTheWarp>(out, in))
GRISTMILL_TEST_KERNEL(barrier_of_half_the_warps, reverse<Barrier::kHalfTheWarps>(out, in))
GRISTMILL_TEST_KERNEL(barrier_in_two_places, reverse<Barrier::kInTwoPlaces>(out, in))
GRISTMILL_TEST_KERNEL(barrier_after_some_left, reverse<Barrier::kSomeLeave>(out, in))
GRISTMILL_TEST_KERNEL(rotate_twice, rotate_twice<true>(out, in))
GRISTMILL_TEST_KERNEL(rotate_twice_unguarded, rotate_twice<false>(out, in))
GRISTMILL_TEST_KERNEL(warp_sum, warp_sum(out, in, extra))
GRISTMILL_TEST_KERNEL(neighbour, neighbour<true>(out, in))
GRISTMILL_TEST_KERNEL(largest_of_a_warp, largest_of_a_warp(out))
GRISTMILL_TEST_KERNEL(neighbour_unsynchronised, neighbour<false>(out, in))
GRISTMILL_TEST_KERNEL(lane_missing, lane_missing(out, in))
GRISTMILL_TEST_KERNEL(lane_finished, lane_finished(out, in))
GRISTMILL_TEST_KERNEL(different_collectives, different_collectives(out, in))
GRISTMILL_TEST_KERNEL(collectives, collectives(out, in))
GRISTMILL_TEST_KERNEL(lane_out_of_range, lane_out_of_range(out, in))
GRISTMILL_TEST_KERNEL(pack, pack(out, in, extra))
GRISTMILL_TEST_KERNEL(overrun, overrun(out, in, extra))
GRISTMILL_TEST_KERNEL(overrun_dynamic, overrun_dynamic(out, in, extra))
GRISTMILL_TEST_KERNEL(wild, wild(out, in))
GRISTMILL_TEST_KERNEL(copies, copy_tiles<Copies::kRight>(out, in))
GRISTMILL_TEST_KERNEL(copies_without_wait, copy_tiles<Copies::kNoWait>(out, in))
GRISTMILL_TEST_KERNEL(copies_without_commit, copy_tiles<Copies::kNoCommit>(out, in))
GRISTMILL_TEST_KERNEL(copies_without_barrier, copy_tiles<Copies::kNoBarrier>(out, in))
GRISTMILL_TEST_KERNEL(copies_waited_for_too_little, copy_tiles<Copies::kWaitTooFew>(out, in))
GRISTMILL_TEST_KERNEL(copies_over_what_is_read, copy_tiles<Copies::kOverwriteEarly>(out, in))

GRISTMILL_EXPORT const char* count_threads(int* counter, int x, int y, int z, int threads) {
  return run(dim3(x, y, z), dim3(threads), 0, [&] { count(counter); });
}

// The numbers of blocks in the order in which they ran.
GRISTMILL_EXPORT const char* block_order(int* order, int blocks) {
  int at = 0;
  return run(dim3(blocks), dim3(1), 0, [&] { order[at++] = static_cast<int>(blockIdx.x); });
}

#if defined(GRISTMILL_HAS_MMA)
GRISTMILL_EXPORT const char* multiply(float* d, const uint16_t* a, const uint16_t* b, int half, int transposed) {
  const auto launch = [&]<typename T>(T) {
    const auto* pa = reinterpret_cast<const T*>(a);
    const auto* pb = reinterpret_cast<const T*>(b);
    return run(dim3(1), dim3(kWarp), 0,
               [&] { transposed ? product<T, true>(d, pa, pb) : product<T, false>(d, pa, pb); });
  };
  return half ? launch(Half{}) : launch(BFloat16{});
}

GRISTMILL_EXPORT uint32_t pack_two_floats(float low, float high, int half) {
  return half ? pack_two<Half>(low, high) : pack_two<BFloat16>(low, high);
}
#endif

}  // namespace gristmill::gpu
