// Key rows to columns: [keys][head_dim] in the pool -> float [head_dim][kKeyBlock], so that scores of neighbouring keys
// fill a vector.
#pragma once

#include <cstdint>
#include <utility>

#include "common/vec.h"

namespace gristmill {

#if defined(__clang__) || __GNUC__ >= 12
// One exchange step: lanes whose index has bit `kHalf` move between the two vectors.
template <int kHalf, int... kLane>
inline void exchange(vf& a, vf& b, std::integer_sequence<int, kLane...>) {
  const vf low = __builtin_shufflevector(a, b, ((kLane & kHalf) == 0 ? kLane : kLanes + kLane - kHalf)...);
  const vf high = __builtin_shufflevector(a, b, ((kLane & kHalf) == 0 ? kLane + kHalf : kLanes + kLane)...);
  a = low;
  b = high;
}
#else
#error "GCC 12 or Clang is required (__builtin_shufflevector)"
#endif

// In-place transpose of a square of kLanes vectors.
template <int kHalf = kLanes / 2>
inline void transpose_square(vf (&rows)[kLanes]) {
  if constexpr (kHalf > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if ((i & kHalf) == 0) exchange<kHalf>(rows[i], rows[i + kHalf], std::make_integer_sequence<int, kLanes>());
    }
    transpose_square<kHalf / 2>(rows);
  }
}

// Asks for a row of the pool ahead of its use; the hardware cannot guess where the next slot lies.
template <typename T>
inline void prefetch_row(const T* row, int64_t width) {
  if (row == nullptr) return;
  for (int64_t i = 0; i < width; i += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(row + i, 0, 2);
}

// Row to float, padded with zeros to whole vectors; a null row is all zeros.
template <typename T>
inline void widen_row(float* to, const T* from, int64_t width) {
  const int64_t whole = width / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) vstore(to + i, from != nullptr ? vload(from + i) : vzero());
  if (whole < width) vstore(to + whole, from != nullptr ? vload_n(from + whole, width - whole) : vzero());
}

// `count` rows; rows beyond it, and null rows, are zero. Writes head_dim rounded up to lanes rows of `pitch` floats.
// Rows are first copied whole to `staging` (kLanes rows): each is then read from the pool in one sweep.
template <typename T>
inline void transpose_keys(float* to, int64_t pitch, const T* const* rows, int64_t count, int64_t head_dim,
                           float* staging) {
  const int64_t staging_pitch = (head_dim + kLanes - 1) / kLanes * kLanes + kLanes;
  for (int64_t j = 0; j < pitch; j += kLanes) {
    for (int i = 0; i < kLanes; ++i) {
      widen_row<T>(staging + i * staging_pitch, j + i < count ? rows[j + i] : nullptr, head_dim);
      if (j + i + kLanes < count) prefetch_row(rows[j + i + kLanes], head_dim);
    }
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      vf square[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) square[i] = vload(staging + i * staging_pitch + d);
      transpose_square(square);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) vstore(to + (d + i) * pitch + j, square[i]);
    }
  }
}

}  // namespace gristmill
