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
    for (int i = 0; i < kLanes; ++i) {
      if ((i & kHalf) == 0) exchange<kHalf>(rows[i], rows[i + kHalf], std::make_integer_sequence<int, kLanes>());
    }
    transpose_square<kHalf / 2>(rows);
  }
}

// `count` rows; rows beyond it, and null rows, are zero. Writes head_dim rounded up to lanes rows of `pitch` floats.
template <typename T>
inline void transpose_keys(float* to, int64_t pitch, const T* const* rows, int64_t count, int64_t head_dim) {
  for (int64_t j = 0; j < pitch; j += kLanes) {
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      vf square[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const T* row = j + i < count ? rows[j + i] : nullptr;
        if (row == nullptr) {
          square[i] = vzero();
        } else {
          square[i] = d + kLanes <= head_dim ? vload(row + d) : vload_n(row + d, head_dim - d);
        }
      }
      transpose_square(square);
      for (int i = 0; i < kLanes; ++i) vstore(to + (d + i) * pitch + j, square[i]);
    }
  }
}

}  // namespace gristmill
