// The layout of a packed weight [N, K], the same for every instruction set: panels of 32 output columns, each panel
// stored along K.
//   float32, float16:  [N / 32][K][32]
//   bfloat16:          [N / 32][K / 2][32][2], K padded to a multiple of 32: pairs along K, as vdpbf16ps and AMX read
//   them
// Padding is zero.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/dtypes.h"

namespace gristmill {

inline constexpr int64_t kPanelColumns = 32;
inline constexpr int64_t kPairBlock = 32;

inline int64_t num_panels(int64_t n) { return (n + kPanelColumns - 1) / kPanelColumns; }

template <typename T>
inline int64_t padded_k(int64_t k) {
  return std::is_same_v<T, BFloat16> ? (k + kPairBlock - 1) / kPairBlock * kPairBlock : k;
}

// Elements of one panel, and of a whole weight.
template <typename T>
inline int64_t panel_size(int64_t k) {
  return kPanelColumns * padded_k<T>(k);
}

template <typename T>
inline int64_t packed_size(int64_t n, int64_t k) {
  return num_panels(n) * panel_size<T>(k);
}

}  // namespace gristmill
