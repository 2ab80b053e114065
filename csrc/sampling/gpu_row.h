// A row of logits before the threads of one block: in packs, each of whole blocks of four random words.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common/gpu_launch.h"
#include "common/gpu_rank.h"
#include "common/gpu_rows.h"

namespace gristmill::gpu {

// The same maximum in every thread. `scratch` holds one element per warp and is free once all threads are past the
// block's next barrier.
template <typename A>
__device__ inline A block_max(A value, A* scratch) {
  value = warp_max(value);
  if (lane_index() == 0) scratch[warp_index()] = value;
  sync_block();
  value = scratch[0];
  for (int w = 1; w < static_cast<int>(blockDim.x) / kWarp; ++w) value = scratch[w] > value ? scratch[w] : value;
  return value;
}

template <typename T>
struct LogitRow {
  static constexpr int N = kPackElements<T>;
  const T* x;
  int64_t vocab;
  bool aligned;
  int64_t base = 0;  // the first id, where the row is a piece of one; a multiple of N

  // f(first place, pack) for the packs of this thread. With kAtOnce the compiler has several calls before it, whose
  // reads it moves forward if f does nothing but compute.
  template <int kAtOnce, typename F>
  __device__ void packs(F&& f) const {
    const int64_t step = static_cast<int64_t>(blockDim.x) * N;
#pragma unroll kAtOnce
    for (int64_t first = static_cast<int64_t>(threadIdx.x) * N; first < vocab; first += step)
      f(first, load_elements<N>(x, first, vocab, aligned));
  }
  // The same, with the next kAhead packs on their way while f does what it does.
  template <int kAhead, typename F>
  __device__ void packs_ahead(F&& f) const {
    const int64_t step = static_cast<int64_t>(blockDim.x) * N;
    int64_t first = static_cast<int64_t>(threadIdx.x) * N;
    Pack<T, N> next[kAhead];
    const auto load = [&](int64_t at) { return at < vocab ? load_elements<N>(x, at, vocab, aligned) : Pack<T, N>{}; };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) next[i] = load(first + i * step);
    for (; first < vocab; first += step) {
      const Pack<T, N> pack = next[0];
#pragma unroll
      for (int i = 0; i + 1 < kAhead; ++i) next[i] = next[i + 1];
      next[kAhead - 1] = load(first + kAhead * step);
      f(first, pack);
    }
  }
  // f(id, logit) for those logits of a pack that are not -inf.
  template <typename F>
  __device__ void each_of(int64_t first, const Pack<T, N>& pack, F&& f) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float value = to_float(pack[i]);
      if (first + i < vocab && value != -INFINITY) f(static_cast<int32_t>(base + first + i), value);
    }
  }
};

// Few rows are cut into pieces, so that all multiprocessors read: into how many at most, and how long they are.
inline constexpr int64_t kMostPieces = 32;
inline int64_t pieces_of(const Launch& launch, int64_t rows, int64_t vocab, int64_t least) {
  if (rows == 0) return 1;
  return std::min({2 * launch.processors() / rows, vocab / least, kMostPieces});
}
template <typename T>
int64_t piece_of(int64_t vocab, int64_t pieces) {
  constexpr int64_t N = kPackElements<T>;
  return ((vocab + pieces - 1) / pieces + N - 1) / N * N;
}

// One past all ranks: the row holds a NaN or +inf.
inline constexpr uint64_t kBroken = ~uint64_t{0};

// The best rank among this thread's logits; 0 if there are none but -inf, kBroken if one cannot be ranked.
template <typename T>
__device__ inline uint64_t best_of_thread(const LogitRow<T>& row) {
  float best = -INFINITY;
  int32_t id = -1;
  bool broken = false;
  row.template packs<4>([&](int64_t first, const auto& pack) {
    row.each_of(first, pack, [&](int32_t v, float x) {
      broken = broken || !(x < INFINITY);
      if (x > best) {
        best = x;
        id = v;
      }
    });
  });
  if (broken) return kBroken;
  return id < 0 ? 0 : rank_of(key_of(best), id);
}

}  // namespace gristmill::gpu
