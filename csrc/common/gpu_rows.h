// Rows on a GPU: the elements of one as packs of 16 bytes, whether or not it begins at a multiple of 16, and what its
// threads add up. Which thread has which elements, and in which order sums are taken, depends on the width alone.
#pragma once

#include <cstdint>

#include "common/check.h"
#include "common/float8_scalar.h"
#include "common/gpu.h"

namespace gristmill::gpu {

template <typename T>
inline constexpr int kPackElements = 16 / static_cast<int>(sizeof(T));

// Whether a tensor and all its steps but the last dimension's are multiples of `bytes`.
inline bool steps_by(const Tensor& t, int64_t bytes) {
  bool even = reinterpret_cast<uintptr_t>(t.const_data_ptr()) % static_cast<uintptr_t>(bytes) == 0;
  for (int64_t d = 0; d + 1 < t.dim(); ++d)
    even = even && (t.size(d) <= 1 || t.stride(d) * t.element_size() % bytes == 0);
  return even;
}

// a / b and a % b of numbers that are not negative; 32-bit division where it will do.
struct Divided {
  int64_t quotient, rest;
};
__device__ inline Divided divide(int64_t a, int64_t b) {
  if (((a | b) >> 32) == 0) {
    const uint32_t small_a = static_cast<uint32_t>(a), small_b = static_cast<uint32_t>(b);
    const uint32_t quotient = small_a / small_b;
    return {quotient, small_a - quotient * small_b};
  }
  return {a / b, a % b};
}

// A pack as floats. Two bfloat16 in a register take one instruction each.
template <typename T, int N>
__device__ inline void to_floats(const Pack<T, N>& pack, float (&to)[N]) {
  if constexpr (std::is_same_v<T, BFloat16> && N % 2 == 0) {
    uint32_t pairs[N / 2];
    memcpy(pairs, &pack, sizeof(pairs));
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      to[2 * i] = bits_float(pairs[i] << 16);
      to[2 * i + 1] = bits_float(pairs[i] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = to_float(pack[i]);
  }
}

// Elements [first, first + N) of a row; zeros from `width` on.
template <int N, typename T>
__device__ inline Pack<T, N> load_elements(const T* row, int64_t first, int64_t width, bool aligned) {
  if (aligned && first + N <= width) return load_pack<N>(row + first);
  Pack<T, N> pack;
#pragma unroll
  for (int i = 0; i < N; ++i) pack[i] = first + i < width ? row[first + i] : T{};
  return pack;
}

template <int N, typename T>
__device__ inline void store_elements(T* row, int64_t first, int64_t width, bool aligned, const Pack<T, N>& pack) {
  if (aligned && first + N <= width) return store_pack<N>(row + first, pack);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (first + i < width) row[first + i] = pack[i];
  }
}

// The same, where the caller knows (kPlain) that the row is aligned and its width a multiple of N.
template <bool kPlain, int N, typename T>
__device__ inline Pack<T, N> load_row(const T* row, int64_t first, int64_t width, bool aligned) {
  if constexpr (kPlain) {
    return load_pack<N>(row + first);
  } else {
    return load_elements<N>(row, first, width, aligned);
  }
}
template <bool kPlain, int N, typename T>
__device__ inline void store_row(T* row, int64_t first, int64_t width, bool aligned, const Pack<T, N>& pack) {
  if constexpr (kPlain) {
    store_pack<N>(row + first, pack);
  } else {
    store_elements<N>(row, first, width, aligned, pack);
  }
}
// Rows of at most two dimensions. A kernel that knows them to be (kPlain) is spared the sizes of all dimensions, whose
// first reading at the start of a short kernel takes longer than its work.
struct PlainRows {
  int64_t outer_step, inner_step, inner;
  explicit PlainRows(const Rows& rows)
      : outer_step(rows.outer_step()), inner_step(rows.inner_step()), inner(rows.inner()) {}
  __device__ int64_t offset(int64_t row) const {
    if (inner == 1) return row * outer_step;
    const auto [outer, rest] = divide(row, inner);
    return outer * outer_step + rest * inner_step;
  }
};
template <bool kPlain>
using RowsFor = std::conditional_t<kPlain, PlainRows, Rows>;

// The same sum in every lane of each group of kLanes neighbours; lanes are added pairwise, near ones first.
template <int kLanes = kWarp, typename A>
__device__ inline A warp_sum(A value) {
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) value += shuffle_xor(value, mask);
  return value;
}

template <int kLanes = kWarp, typename A>
__device__ inline A warp_max(A value) {
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) {
    const A other = shuffle_xor(value, mask);
    value = other > value ? other : value;
  }
  return value;
}

// The same sum in every thread of the block, whose size is a multiple of kWarp, of what each has for kParts packs of a
// row, a block's threads apart: of kWarp packs beside each other first, then of those in a fixed order. So it does not
// depend on how many threads share the row. `scratch` holds kSums elements, at least one per warp and part, and is in
// use until the block's next barrier.
template <int kSums, int kParts, typename A>
__device__ inline A block_sum(const A (&parts)[kParts], A* scratch) {
  constexpr int kChains = 4;  // so that not every addition waits for the one before
  const int warps = static_cast<int>(blockDim.x) / kWarp;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const A sum = warp_sum(parts[part]);
    if (lane_index() == 0) scratch[part * warps + warp_index()] = sum;
  }
  sync_block();
  A sums[kChains] = {};
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    if (i < warps * kParts) sums[i % kChains] += scratch[i];
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// The largest in the same way; kMaxThreads / kWarp is a power of two.
template <int kMaxThreads, typename A>
__device__ inline A block_max(A value, A* scratch) {
  value = warp_max(value);
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  if (warps <= 1) return value;
  if (lane_index() == 0) scratch[warp_index()] = value;
  sync_block();
  const int other = lane_index() % (kMaxThreads / kWarp);
  return warp_max<kMaxThreads / kWarp>(scratch[other < warps ? other : 0]);
}

}  // namespace gristmill::gpu
