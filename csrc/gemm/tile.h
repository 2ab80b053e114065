// Register tiles of the packed linear layer: up to kTileRows rows of x times one panel of 32 columns, over a range of
// K. Along K an output element is summed in chains of kChain steps of fused multiply-adds, whose results are added in
// order: short chains keep the rounding error of long sums small, and the order does not depend on the number of rows
// in the tile.
#pragma once

#include "common/vec.h"
#include "gemm/layout.h"

namespace gristmill {

inline constexpr int kPanelVectors = static_cast<int>(kPanelColumns) / kLanes;
#if defined(GRISTMILL_AVX512)
inline constexpr int kTileRows = 14;  // 28 accumulators of 32 registers
#else
inline constexpr int kTileRows = 3;  // 12 of 16 (AVX2), 24 of 32 (NEON)
#endif

// K elements summed in one chain.
inline constexpr int64_t kChain = 64;

// How the rows of x are laid out for a tile, and how the tile multiplies: [K / kGroup][rows] elements of `Left`.
// K runs in steps of kGroup.
template <typename T>
struct TileTraits {
  using Left = float;
  static constexpr int kGroup = 1;
};

#if defined(__AVX512BF16__) && defined(GRISTMILL_AVX512)
template <>
struct TileTraits<BFloat16> {
  using Left = uint32_t;  // a pair of bfloat16 along K
  static constexpr int kGroup = 2;
};
#endif

// x[rows][k] -> left[k / group][tile_rows], converted; rows beyond `rows` are zero.
template <typename T>
inline void pack_rows(typename TileTraits<T>::Left* left, const T* x, int64_t row_stride, int64_t rows,
                      int64_t tile_rows, int64_t k) {
  using Left = typename TileTraits<T>::Left;
  constexpr int64_t group = TileTraits<T>::kGroup;
  const int64_t steps = padded_k<T>(k) / group;
  for (int64_t r = 0; r < tile_rows; ++r) {
    const T* row = x + r * row_stride;
    const int64_t filled = r < rows ? k / group : 0;
    for (int64_t s = 0; s < filled; ++s) {
      if constexpr (group == 1) {
        left[s * tile_rows + r] = to_float(row[s]);
      } else {
        std::memcpy(&left[s * tile_rows + r], row + 2 * s, sizeof(Left));
      }
    }
    for (int64_t s = filled; s < steps; ++s) left[s * tile_rows + r] = Left{};
    if constexpr (group == 2) {
      if (r < rows && k % 2 != 0) left[filled * tile_rows + r] = row[k - 1].bits;
    }
  }
}

// One step of the product: K elements [s * kGroup, (s + 1) * kGroup) for float and half.
template <typename T, int kRows>
inline void tile_step(vf (&acc)[kRows][kPanelVectors], const float* left, const T* panel) {
  vf w[kPanelVectors];
  for (int v = 0; v < kPanelVectors; ++v) w[v] = vload(panel + v * kLanes);
  for (int r = 0; r < kRows; ++r) {
    const vf x = vset1(left[r]);
    for (int v = 0; v < kPanelVectors; ++v) acc[r][v] = vfma(x, w[v], acc[r][v]);
  }
}

// Part of a panel, `rows` elements along K, to float [rows][32].
inline void widen_panel(float* to, const Half* panel, int64_t rows) {
  for (int64_t i = 0; i < rows * kPanelColumns; i += kLanes) vstore(to + i, vload(panel + i));
}

inline void widen_panel(float* to, const BFloat16* panel, int64_t rows) {
  for (int64_t s = 0; s < rows; s += 2) {
    for (int64_t c = 0; c < kPanelColumns; c += kLanes) {
      vu pair;
      std::memcpy(&pair, panel + s * kPanelColumns + 2 * c, sizeof(pair));
      vstore(to + s * kPanelColumns + c, as_float(pair << 16));
      vstore(to + (s + 1) * kPanelColumns + c, as_float(pair & 0xffff0000u));
    }
  }
}

// How far ahead, into the L2 cache; measured.
inline constexpr int64_t kPrefetchBytes = 8192;

// With few rows the weights come from memory at full speed; asking ahead keeps the stream alive across pages.
template <typename T, int kRows>
inline void prefetch_panel(const T* panel) {
  if constexpr (kRows <= 8) {
    constexpr int64_t line = 64 / static_cast<int64_t>(sizeof(T));
    for (int64_t i = 0; i < kPanelColumns; i += line) __builtin_prefetch(panel + kPrefetchBytes / sizeof(T) + i, 0, 2);
  }
}

// acc = sum over `steps` steps, from zero.
template <typename T, int kRows>
inline void tile_chain(vf (&acc)[kRows][kPanelVectors], const typename TileTraits<T>::Left* left, const T* panel,
                       int64_t steps) {
  for (auto& row : acc) {
    for (vf& v : row) v = vzero();
  }
  if constexpr (!std::is_same_v<T, BFloat16>) {
    for (int64_t s = 0; s < steps; ++s) {
      prefetch_panel<T, kRows>(panel + s * kPanelColumns);
      tile_step<T, kRows>(acc, left + s * kRows, panel + s * kPanelColumns);
    }
#if defined(__AVX512BF16__) && defined(GRISTMILL_AVX512)
  } else {
    for (int64_t s = 0; s < steps; ++s) {
      __m512bh w[kPanelVectors];
      std::memcpy(w, panel + s * 2 * kPanelColumns, sizeof(w));
      for (int r = 0; r < kRows; ++r) {
        const __m512bh x = (__m512bh)_mm512_set1_epi32(static_cast<int>(left[s * kRows + r]));
        for (int v = 0; v < kPanelVectors; ++v) acc[r][v] = _mm512_dpbf16_ps(acc[r][v], x, w[v]);
      }
    }
#else
  } else {
    // Two elements along K share a 32-bit lane: the even one in its low half.
    for (int64_t s = 0; s < steps; s += 2) {
      prefetch_panel<T, kRows>(panel + s * kPanelColumns);
      prefetch_panel<T, kRows>(panel + (s + 1) * kPanelColumns);
      for (int v = 0; v < kPanelVectors; ++v) {
        vu pair;
        std::memcpy(&pair, panel + s * kPanelColumns + v * 2 * kLanes, sizeof(pair));
        const vf even = as_float(pair << 16), odd = as_float(pair & 0xffff0000u);
        for (int r = 0; r < kRows; ++r) {
          acc[r][v] = vfma(vset1(left[s * kRows + r]), even, acc[r][v]);
          acc[r][v] = vfma(vset1(left[(s + 1) * kRows + r]), odd, acc[r][v]);
        }
      }
    }
#endif
  }
}

// c[rows][32] = (first ? 0 : c) + sum over `steps` steps.
template <typename T, int kRows>
void tile_block(float* c, const typename TileTraits<T>::Left* left, const T* panel, int64_t steps, bool first) {
  constexpr int64_t group = TileTraits<T>::kGroup, chain = kChain / group;
  for (int64_t s = 0; s < steps; s += chain) {
    vf acc[kRows][kPanelVectors];
    tile_chain<T, kRows>(acc, left + s * kRows, panel + s * group * kPanelColumns,
                         steps - s < chain ? steps - s : chain);
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kPanelVectors; ++v) {
        float* target = c + r * kPanelColumns + v * kLanes;
        vstore(target, first && s == 0 ? acc[r][v] : vload(target) + acc[r][v]);
      }
    }
  }
}

}  // namespace gristmill
