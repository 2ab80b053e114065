// Attention of query rows over one chunk of bfloat16 keys on AMX tiles. Everything is transposed: scores are [keys][16
// queries], so that maxima and sums run down the vectors, and weights go from the softmax into the second product
// without a shuffle. As in chunk_cpu.h, every number of a row comes from one chain of operations over the head or over
// the keys, whatever the rows beside it.
#pragma once

#include "attention/chunk_cpu.h"
#include "common/amx_tiles.h"

#if defined(GRISTMILL_AMX)

namespace gristmill {

// Rows of the pool that are asked for ahead of the one being packed.
inline constexpr int64_t kPrefetchRows = 16;

inline int64_t round_up_pairs(int64_t n) { return (n + kTilePairs - 1) / kTilePairs * kTilePairs; }

// Rows [rows][depth], zero beyond the head -> right operands [rows / 16][depth / 32][16 pairs][16 rows][2].
inline void pack_queries(BFloat16* to, const BFloat16* rows, int64_t count, int64_t depth) {
  for (int64_t r = 0; r < count; r += kTile) {
    for (int64_t d = 0; d < depth; d += kTilePairs, to += kTileElements) {
      vf square[kLanes] = {};  // 32-bit lanes: pairs of bfloat16
      for (int64_t i = 0; i < std::min(kTile, count - r); ++i)
        std::memcpy(&square[i], rows + (r + i) * depth + d, sizeof(vf));
      transpose_square(square);
      std::memcpy(to, square, sizeof(square));
    }
  }
}

// Key rows -> left operands [keys / 16][head_dim / 32][16 keys][32].
inline void pack_keys(BFloat16* to, const ChunkKeys<BFloat16>& chunk, int64_t begin, int64_t end, int64_t head_dim) {
  const int64_t depth = round_up_pairs(head_dim);
  for (int64_t j = begin; j < end; ++j) {
    BFloat16* tile = to + j / kTile * kTile * depth + j % kTile * kTilePairs;
    const BFloat16* row = j < chunk.count ? chunk.k[j] : nullptr;
    if (j + kPrefetchRows < chunk.count) prefetch_row(chunk.k[j + kPrefetchRows], head_dim);
    for (int64_t d = 0; d < depth; d += kTilePairs, tile += kTileElements) {
      const int64_t width = row == nullptr ? 0 : std::clamp<int64_t>(head_dim - d, 0, kTilePairs);
      if (width == kTilePairs) {
        std::memcpy(tile, row + d, kTilePairs * sizeof(BFloat16));
      } else {
        std::fill_n(tile, kTilePairs, BFloat16{0});
        if (width > 0) std::memcpy(tile, row + d, static_cast<size_t>(width) * sizeof(BFloat16));
      }
    }
  }
}

// 16 bfloat16 in the low halves of 32-bit lanes.
inline vu load_bits(const BFloat16* p) {
  vu16 v;
  std::memcpy(&v, p, sizeof(v));
  return __builtin_convertvector(v, vu);
}

// Value rows -> tiles [head_dim_v / 16][keys / 32]. Transposed they are left operands [16 columns][32 keys]; else,
// cheaper to make, right operands [16 pairs of keys][16 columns][2]. A row with an infinity or a NaN is packed as zeros
// and listed in `odd`: multiplied by the weight 0 of a query that does not see it, it would spoil that query's output.
template <bool kTransposed>
inline int64_t pack_values(BFloat16* to, const ChunkKeys<BFloat16>& chunk, int64_t begin, int64_t end,
                           int64_t head_dim_v, int16_t* odd) {
  const int64_t width = round_up_pairs(head_dim_v);
  int64_t num_odd = 0;
  static thread_local Scratch scratch;
  BFloat16* rows = scratch.get<BFloat16>(kTilePairs * width);
  for (int64_t j = begin; j < end; j += kTilePairs) {
    for (int64_t i = 0; i < kTilePairs; ++i) {
      BFloat16* staged = rows + i * width;
      const BFloat16* row = j + i < chunk.count ? chunk.v[j + i] : nullptr;
      if (j + i + kPrefetchRows < chunk.count) prefetch_row(chunk.v[j + i + kPrefetchRows], head_dim_v);
      const __m512i exponent = _mm512_set1_epi16(0x7f80);
      __mmask32 found = 0;
      for (int64_t d = 0; d < width; d += kTilePairs) {
        const int64_t n = row == nullptr ? 0 : std::clamp<int64_t>(head_dim_v - d, 0, kTilePairs);
        const __mmask32 lanes = n == kTilePairs ? ~__mmask32{0} : static_cast<__mmask32>((uint64_t{1} << n) - 1);
        const __m512i bits = _mm512_maskz_loadu_epi16(lanes, row + d);
        found |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(bits, exponent), exponent);
        _mm512_store_si512(staged + d, bits);
      }
      if (found != 0) {
        std::fill_n(staged, width, BFloat16{0});
        odd[num_odd++] = static_cast<int16_t>(j + i);
      }
    }
    for (int64_t d = 0; d < width; d += kTilePairs) {
      vf low[kTile], high[kTile];  // pair t of keys, columns d.. and d + 16..: 32-bit lanes of two bfloat16
#pragma GCC unroll 16
      for (int t = 0; t < kTile; ++t) {
        const BFloat16* even = rows + 2 * t * width + d;
        const BFloat16* uneven = even + width;
        low[t] = as_float(load_bits(even) | (load_bits(uneven) << 16));
        high[t] = as_float(load_bits(even + kTile) | (load_bits(uneven + kTile) << 16));
      }
      if constexpr (kTransposed) {
        transpose_square(low);
        transpose_square(high);
      }
      BFloat16* tile = to + (d / kTile * (kChunk / kTilePairs) + j / kTilePairs) * kTileElements;
      BFloat16* next = tile + kChunk / kTilePairs * kTileElements;
#pragma GCC unroll 16
      for (int t = 0; t < kTile; ++t) {
        std::memcpy(tile + t * kTilePairs, &low[t], sizeof(vf));
        std::memcpy(next + t * kTilePairs, &high[t], sizeof(vf));
      }
    }
  }
  return num_odd;
}

// sums[kLeft][kRight] tiles = left[kLeft] x right[kRight] over `steps` tiles; kLeft and kRight are 1 or 2. Pitches are
// elements from the first operand of a side to its second.
template <int kLeft, int kRight>
inline void tile_product(float* sums, int64_t sum_pitch, const BFloat16* left, int64_t left_pitch,
                         const BFloat16* right, int64_t right_pitch, int64_t steps) {
  tile_fence();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t s = 0; s < steps; ++s, left += kTileElements, right += kTileElements) {
    _tile_loadd(4, left, 64);
    _tile_loadd(6, right, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kLeft == 2) {
      _tile_loadd(5, left + left_pitch, 64);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (kRight == 2) {
      _tile_loadd(7, right + right_pitch, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kLeft == 2 && kRight == 2) _tile_dpbf16ps(3, 5, 7);
  }
  const int stride = static_cast<int>(sum_pitch * static_cast<int64_t>(sizeof(float)));
  _tile_stored(0, sums, stride);
  if constexpr (kLeft == 2) _tile_stored(2, sums + kTile * sum_pitch, stride);
  if constexpr (kRight == 2) _tile_stored(1, sums + kTile, stride);
  if constexpr (kLeft == 2 && kRight == 2) _tile_stored(3, sums + kTile * sum_pitch + kTile, stride);
}

// 2^x for x <= 0; a NaN stays one. The Taylor series' first term left out is below 2^-22 on |r| <= 1/2: the weights
// become bfloat16.
inline vf vexp2_negative(vf x) {
  const vf clamped = x < -200.0f ? vset1(-200.0f) : x;
  const vf n = vround(clamped);
  const vf r = clamped - n;
  vf p = vfma(vset1(1.5403530e-4f), r, vset1(1.3333558e-3f));
  p = vfma(p, r, vset1(9.6181291e-3f));
  p = vfma(p, r, vset1(5.5504109e-2f));
  p = vfma(p, r, vset1(2.4022651e-1f));
  p = vfma(p, r, vset1(6.9314718e-1f));
  p = vfma(p, r, vset1(1.0f));
  return _mm512_maskz_scalef_ps(0xffff, p, n);
}

// What the 16 rows of a block see of the chunk; absent rows see nothing.
struct BlockRanges {
  vi begin, end;
  int64_t first, last;                // keys that some row sees lie in [first, last)
  int64_t common_first, common_last;  // keys that all rows see
  const uint8_t* mask[kTile];
  bool masked;

  BlockRanges(const RowRange* ranges, int64_t rows)
      : begin{}, end{}, first(kChunk), last(0), common_first(0), common_last(kChunk), masked(false) {
    for (int64_t i = 0; i < kTile; ++i) {
      mask[i] = i < rows ? ranges[i].mask : nullptr;
      masked |= mask[i] != nullptr;
      const bool sees = i < rows && ranges[i].begin < ranges[i].end;
      begin[i] = sees ? static_cast<int32_t>(ranges[i].begin) : 0;
      end[i] = sees ? static_cast<int32_t>(ranges[i].end) : 0;
      if (i < rows) {
        common_first = std::max<int64_t>(common_first, begin[i]);
        common_last = std::min<int64_t>(common_last, end[i]);
      }
      if (!sees) continue;
      first = std::min<int64_t>(first, ranges[i].begin);
      last = std::max<int64_t>(last, ranges[i].end);
    }
  }

  vi sees(int64_t key) const {
    vi seen = (begin <= static_cast<int32_t>(key)) & (end > static_cast<int32_t>(key));
    if (masked) {
      for (int i = 0; i < kTile; ++i) {
        if (mask[i] != nullptr && (seen[i] == 0 || mask[i][key] == 0)) seen[i] = 0;
      }
    }
    return seen;
  }
};

// Scores [keys][pitch] of one block of 16 rows -> weights as right operands [keys / 32][16 pairs][16 rows][2], and the
// states of the rows. Keys [first, last) are whole pairs of tiles.
inline void softmax_block(float* scores, int64_t pitch, BFloat16* weights, const BlockRanges& ranges, int64_t first,
                          int64_t last, float scale, float logit_cap, vf& largest, vf& total) {
  largest = vset1(-INFINITY);
  for (int64_t j = first; j < last; ++j) {
    vf s = vload(scores + j * pitch) * scale;
    if (logit_cap > 0) s = vtanh(s / logit_cap) * logit_cap;
    if (ranges.masked || j < ranges.common_first || j >= ranges.common_last) s = ranges.sees(j) ? s : vset1(-INFINITY);
    vstore(scores + j * pitch, s);
    largest = vmax(s, largest);
  }
  const vf base = (largest == -INFINITY ? vzero() : largest) * -kLog2e;
  vf totals[4] = {};
  for (int64_t j = first; j < last; j += 4) {
    vf w[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      w[i] = vexp2_negative(vfma(vload(scores + (j + i) * pitch), vset1(kLog2e), base));
      totals[i] += w[i];
    }
#pragma GCC unroll 2
    for (int i = 0; i < 4; i += 2) {
      // To bfloat16, nearest (ties away from zero): the even key in the low half of the lane.
      const vu pair = ((as_uint(w[i]) + 0x8000u) >> 16) | ((as_uint(w[i + 1]) + 0x8000u) & 0xffff0000u);
      std::memcpy(weights + (j + i) / 2 * kTilePairs, &pair, sizeof(pair));
    }
  }
  total = (totals[0] + totals[1]) + (totals[2] + totals[3]);
}

struct AmxScratch {
  Scratch rows, queries, keys, values, scores, weights, outputs;
};

// As attend_chunk of chunk_cpu.h, for rows packed by pack_queries.
class AmxChunk {
 public:
  AmxChunk(const AttentionProblem& p, const ChunkKeys<BFloat16>& chunk, const BFloat16* queries, int64_t rows,
           const RowRange* ranges, AmxScratch& scratch, RowState* states, float* sums)
      : p_(p),
        chunk_(chunk),
        queries_(queries),
        rows_(rows),
        ranges_(ranges),
        states_(states),
        sums_(sums),
        depth_(round_up_pairs(p.head_dim)),
        width_(round_up_pairs(p.head_dim_v)),
        pitch_(round_up_lanes(p.head_dim_v)),
        keys_(scratch.keys.get<BFloat16>(kChunk * depth_)),
        values_(scratch.values.get<BFloat16>(kChunk * width_)),
        scores_(scratch.scores.get<float>(kChunk * kScorePitch)),
        weights_(scratch.weights.get<BFloat16>(kChunk * kScorePitch)),
        outputs_(scratch.outputs.get<float>(width_ * kScorePitch)) {}

  void run() {
    int64_t first = kChunk, last = 0;
    for (int64_t r = 0; r < rows_; ++r) {
      if (ranges_[r].begin >= ranges_[r].end) continue;
      first = std::min(first, ranges_[r].begin);
      last = std::max(last, ranges_[r].end);
    }
    const bool few_rows = rows_ <= kTile;
    if (first < last) {
      first = first / kTilePairs * kTilePairs;
      last = round_up_pairs(last);
      pack_keys(keys_, chunk_, first, last, p_.head_dim);
      num_odd_ = few_rows ? pack_values<false>(values_, chunk_, first, last, p_.head_dim_v, odd_)
                          : pack_values<true>(values_, chunk_, first, last, p_.head_dim_v, odd_);
    }
    const TileSession session(kTile);
    if (few_rows) {
      attend_one();
    } else {
      for (int64_t r = 0; r < rows_; r += 2 * kTile) attend_two(r);
    }
  }

 private:
  static constexpr int64_t kScorePitch = 2 * kTile;
  static constexpr int64_t kColumnTiles = kChunk * kTile;  // elements of the value tiles of 16 columns

  BlockRanges block_ranges(int64_t r) const {
    const int64_t first = std::min(r, rows_);
    return BlockRanges(ranges_ + first, std::min(kTile, rows_ - first));
  }

  const BFloat16* value_tiles(int64_t column, int64_t key) const { return values_ + column * kChunk + key * kTile; }

  // All rows in one block: the weights are transposed instead of the values.
  void attend_one() {
    const BlockRanges ranges = block_ranges(0);
    const int64_t first = ranges.first / kTilePairs * kTilePairs, last = std::max(first, round_up_pairs(ranges.last));
    for (int64_t j = first; j < last; j += kTilePairs) {
      tile_product<2, 1>(scores_ + j * kScorePitch, kScorePitch, keys_ + j * depth_, kTile * depth_, queries_, 0,
                         depth_ / kTilePairs);
    }
    vf largest, total;
    softmax_block(scores_, kScorePitch, weights_, ranges, first, last, p_.scale, p_.logit_cap, largest, total);
    for (int64_t j = first; j < last; j += kTilePairs) {
      vf square[kLanes];
      std::memcpy(square, weights_ + j * kTile, sizeof(square));
      transpose_square(square);
      std::memcpy(weights_ + j * kTile, square, sizeof(square));
    }
    for (int64_t d = 0; d < width_; d += kTilePairs) {
      tile_product<1, 2>(outputs_ + d, width_, weights_ + first * kTile, 0, value_tiles(d, first), kColumnTiles,
                         (last - first) / kTilePairs);
    }
    for (int64_t r = 0; r < rows_; ++r) std::copy_n(outputs_ + r * width_, pitch_, sums_ + r * pitch_);
    finish_block(0, ranges, scores_, largest, total);
  }

  // Rows [r, r + 32).
  void attend_two(int64_t r) {
    const BlockRanges ranges[2] = {block_ranges(r), block_ranges(r + kTile)};
    const int64_t first = std::min(ranges[0].first, ranges[1].first) / kTilePairs * kTilePairs;
    const int64_t last = std::max(first, round_up_pairs(std::max(ranges[0].last, ranges[1].last)));
    const bool both = rows_ - r > kTile;
    for (int64_t j = first; j < last; j += kTilePairs) {
      const auto product = both ? tile_product<2, 2> : tile_product<2, 1>;
      product(scores_ + j * kScorePitch, kScorePitch, keys_ + j * depth_, kTile * depth_, queries_ + r * depth_,
              kTile * depth_, depth_ / kTilePairs);
    }
    vf largest[2], total[2];
    for (int64_t b = 0; b < 1 + both; ++b) {
      softmax_block(scores_ + b * kTile, kScorePitch, weights_ + b * kChunk * kTile, ranges[b], first, last, p_.scale,
                    p_.logit_cap, largest[b], total[b]);
    }
    for (int64_t d = 0; d < width_; d += kTilePairs) {
      const auto product = both ? tile_product<2, 2> : tile_product<2, 1>;
      product(outputs_ + d * kScorePitch, kScorePitch, value_tiles(d, first), kColumnTiles, weights_ + first * kTile,
              kChunk * kTile, (last - first) / kTilePairs);
    }
    for (int64_t b = 0; b < 1 + both; ++b) {
      store_transposed(r + b * kTile, outputs_ + b * kTile);
      finish_block(r + b * kTile, ranges[b], scores_ + b * kTile, largest[b], total[b]);
    }
  }

  // outputs [columns][kScorePitch] of 16 rows -> sums.
  void store_transposed(int64_t r, const float* outputs) {
    const int64_t count = std::min(kTile, rows_ - r);
    for (int64_t d = 0; d < pitch_; d += kTile) {
      vf square[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) square[i] = vload(outputs + (d + i) * kScorePitch);
      transpose_square(square);
      for (int64_t i = 0; i < count; ++i) vstore(sums_ + (r + i) * pitch_ + d, square[i]);
    }
  }

  void finish_block(int64_t r, const BlockRanges& ranges, const float* scores, vf largest, vf total) {
    const int64_t count = std::min(kTile, rows_ - r);
    for (int64_t i = 0; i < count; ++i) {
      states_[r + i] = RowState{largest[i], total[i]};
      if (num_odd_ > 0) add_odd_values(r, i, ranges, scores, largest[i] == -INFINITY ? 0 : largest[i]);
    }
  }

  // What the values that are not finite give to the queries that see them.
  void add_odd_values(int64_t r, int64_t i, const BlockRanges& ranges, const float* scores, float base) {
    float* sum = sums_ + (r + i) * pitch_;
    for (int64_t o = 0; o < num_odd_; ++o) {
      const int64_t j = odd_[o];
      if (j < ranges.first || j >= ranges.last || ranges.sees(j)[i] == 0) continue;
      const float weight = std::exp(scores[j * kScorePitch + i] - base);
      for (int64_t d = 0; d < p_.head_dim_v; ++d) sum[d] += weight * to_float(chunk_.v[j][d]);
    }
  }

  const AttentionProblem& p_;
  const ChunkKeys<BFloat16>& chunk_;
  const BFloat16* queries_;
  int64_t rows_;
  const RowRange* ranges_;
  RowState* states_;
  float* sums_;
  int64_t depth_, width_, pitch_;
  BFloat16 *keys_, *values_;
  float* scores_;
  BFloat16* weights_;
  float* outputs_;
  int16_t odd_[kChunk];
  int64_t num_odd_ = 0;
};

}  // namespace gristmill

#endif
