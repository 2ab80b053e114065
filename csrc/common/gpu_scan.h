// Running sums on a GPU: of the numbers before a thread's own, within its warp and its block, and of any numbers before
// a place, for blocks that find out by themselves where their part of a list begins. Sums are int64, which wraps for no
// int32 numbers that memory can hold.
#pragma once

#include <cstdint>

#include "common/gpu.h"
#include "common/gpu_rows.h"

namespace gristmill::gpu {

// The sum of the lanes up to this one, its own value included.
template <typename A>
__device__ inline A warp_running_sum(A value) {
#pragma unroll
  for (int delta = 1; delta < kWarp; delta *= 2) {
    const A below = shuffle_up(value, delta);
    if (lane_index() >= delta) value += below;
  }
  return value;
}

// What the threads before this one hold, and what all of the block do.
template <typename A>
struct Running {
  A before, all;
};

// For blocks of kThreads. `scratch` holds one element per warp, and is in use until the block's next barrier.
template <int kThreads, typename A>
__device__ inline Running<A> block_running_sum(A value, A* scratch) {
  const A up_to = warp_running_sum(value);
  if (lane_index() == kWarp - 1) scratch[warp_index()] = up_to;
  sync_block();
  Running<A> sums{up_to - value, A{}};
#pragma unroll
  for (int w = 0; w < kThreads / kWarp; ++w) {
    if (w < warp_index()) sums.before += scratch[w];
    sums.all += scratch[w];
  }
  return sums;
}

// N sums over the numbers 0, 1, .. of a list up to a place that only grows; the same in all threads of the block.
template <int N, int kThreads>
class SumsBefore {
  static constexpr int kWarps = kThreads / kWarp;

 public:
  // Two sets, used in turn: one may still be read while the next one is written.
  static constexpr int kScratch = 2 * N * kWarps;

  // add(i, sums) adds the numbers at i. All threads of the block come here together, with the same `place`.
  template <typename Add>
  __device__ void advance(int64_t place, int64_t* scratch, const Add& add) {
    if (place == place_) return;
    int64_t own[N] = {};
#pragma unroll 4
    for (int64_t i = place_ + threadIdx.x; i < place; i += kThreads) add(i, own);
    place_ = place;
    int64_t* const of_warps = scratch + (turn_ ? N * kWarps : 0);
    turn_ = !turn_;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      own[n] = warp_sum(own[n]);
      if (lane_index() == 0) of_warps[n * kWarps + warp_index()] = own[n];
    }
    sync_block();
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sums_[n] += of_warps[n * kWarps + w];
    }
  }

  __device__ int64_t operator[](int n) const { return sums_[n]; }

 private:
  int64_t place_ = 0;
  int64_t sums_[N] = {};
  bool turn_ = false;
};

}  // namespace gristmill::gpu
