// Attention of a few query rows over one chunk of at most 256 keys: the only place where scores, exponentials and
// weighted sums are computed, for decode and for extend. Every number of a row comes from a chain of operations that
// neither the other rows nor the tile shape can change, so a decode row equals the same row of an extend call bit for
// bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "attention/problem.h"
#include "attention/transpose.h"
#include "common/float8.h"
#include "common/scratch.h"
#include "common/vec_math.h"

namespace gristmill {

// Register tile: kRowBlock rows times kVectors vectors.
inline constexpr int kVectors = 4;
#if defined(GRISTMILL_AVX2)
inline constexpr int kRowBlock = 3;
#else
inline constexpr int kRowBlock = 6;
#endif
// Keys transposed at once.
inline constexpr int64_t kKeyBlock = kVectors * kLanes;
static_assert(kChunk % kKeyBlock == 0);

inline int64_t round_up_lanes(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// Softmax state of a row over the keys seen so far; its output is sum / total.
struct RowState {
  float largest;  // -INFINITY when nothing was seen
  float total;    // sum of e^(score - largest)
  bool empty() const { return largest == -INFINITY && total == 0; }
};

// Keys [begin, end) of the chunk that a row sees. With a mask, those of them whose byte is set.
struct RowRange {
  int64_t begin;
  int64_t end;
  const uint8_t* mask;  // by key of the chunk, or null
};

// Rows of an 8-bit cache as bfloat16, which holds each of its numbers exactly.
struct WideRows {
  Scratch k, v;
};

// The keys and values of a chunk: rows of the pool, null for a hole. An 8-bit cache is read as T = BFloat16; its rows
// count only once widen() has made them.
template <typename T>
struct ChunkKeys {
  const T* k[kChunk];
  const T* v[kChunk];
  int64_t count;
  bool holes;

  // Keys [start, start + count) of a request's list.
  void locate(const AttentionProblem& p, int64_t request, int64_t kv_head, int64_t start, BadSlot& bad) {
    count = std::min(kChunk, p.kv_len(request) - start);
    holes = false;
    const int64_t first = p.kv_indptr[request] + start;
    const int64_t bytes = is_float8(p.cache_dtype) ? 1 : static_cast<int64_t>(sizeof(T));
    const auto row = [bytes](const void* pool, int64_t offset) {
      return reinterpret_cast<const T*>(static_cast<const std::byte*>(pool) + offset * bytes);
    };
    for (int64_t j = 0; j < count; ++j) {
      const int64_t slot = p.kv_indices != nullptr ? p.kv_indices[first + j] : first + j;
      const bool hole = slot < 0 || slot >= p.num_slots;
      if (slot >= p.num_slots) bad.set(slot);
      holes |= hole;
      k[j] = hole ? nullptr : row(p.k, slot * p.k_slot + kv_head * p.k_head);
      v[j] = hole ? nullptr : row(p.v, slot * p.v_slot + kv_head * p.v_head);
    }
  }

  // Keys [begin, end) of an 8-bit cache become rows in `memory`; nothing looks at the others, which become holes.
  void widen(const AttentionProblem& p, int64_t begin, int64_t end, WideRows& memory)
    requires std::is_same_v<T, BFloat16>
  {
    const bool shared = p.v == p.k && p.v_slot == p.k_slot && p.v_head == p.k_head && p.head_dim_v <= p.head_dim;
    BFloat16* keys = memory.k.get<BFloat16>(kChunk * p.head_dim);
    BFloat16* values = shared ? nullptr : memory.v.get<BFloat16>(kChunk * p.head_dim_v);
    dispatch_float8(p.cache_dtype, [&](auto tag) {
      const auto wide = [](BFloat16* to, const T* row, int64_t width) -> const T* {
        if (row == nullptr) return nullptr;
        const auto* from = reinterpret_cast<const decltype(tag)*>(row);
        for_lanes(
            width, [&](int64_t i) { vstore(to + i, vload(from + i)); },
            [&](int64_t i, int64_t n) { vstore_n(to + i, vload_n(from + i, n), n); });
        return to;
      };
      for (int64_t j = 0; j < count; ++j) {
        const bool used = begin <= j && j < end;
        if (used && j + kPrefetchKeys < end) {
          prefetch_bytes(k[j + kPrefetchKeys], p.head_dim);
          if (!shared) prefetch_bytes(v[j + kPrefetchKeys], p.head_dim_v);
        }
        k[j] = used ? wide(keys + j * p.head_dim, k[j], p.head_dim) : nullptr;
        v[j] = !used ? nullptr : shared ? k[j] : wide(values + j * p.head_dim_v, v[j], p.head_dim_v);
      }
    });
  }

 private:
  static constexpr int64_t kPrefetchKeys = 8;
  static void prefetch_bytes(const void* row, int64_t width) { prefetch_row(static_cast<const uint8_t*>(row), width); }
};

// scores[r][j] for kRows rows and one block of transposed keys: a chain of fused multiply-adds along the head.
template <int kRows>
inline void score_block(float* scores, const float* q, int64_t q_pitch, const float* keys, int64_t head_dim) {
  vf acc[kRows][kVectors] = {};
  for (int64_t d = 0; d < head_dim; ++d) {
    vf k[kVectors];
    for (int v = 0; v < kVectors; ++v) k[v] = vload(keys + d * kKeyBlock + v * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const vf x = vset1(q[r * q_pitch + d]);
      for (int v = 0; v < kVectors; ++v) acc[r][v] = vfma(x, k[v], acc[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) vstore(scores + r * kChunk + v * kLanes, acc[r][v]);
  }
}

// sum[r][column..] += weight[r][j] * value[j] for j in [begin, end), kColumns vectors wide.
template <typename V, int kRows, int kColumns>
inline void value_block(float* sum, int64_t pitch, const float* weights, const V* const* values, int64_t column,
                        int64_t begin, int64_t end) {
  vf acc[kRows][kColumns];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kColumns; ++c) acc[r][c] = vload(sum + r * pitch + column + c * kLanes);
  }
  for (int64_t j = begin; j < end; ++j) {
    vf v[kColumns];
    for (int c = 0; c < kColumns; ++c) v[c] = vload(values[j] + column + c * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const vf w = vset1(weights[r * kChunk + j]);
      for (int c = 0; c < kColumns; ++c) acc[r][c] = vfma(w, v[c], acc[r][c]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kColumns; ++c) vstore(sum + r * pitch + column + c * kLanes, acc[r][c]);
  }
}

template <typename V, int kRows>
inline void value_rows(float* sum, int64_t pitch, const float* weights, const V* const* values, int64_t begin,
                       int64_t end) {
  if (begin >= end) return;
  int64_t column = 0;
  for (; column + kVectors * kLanes <= pitch; column += kVectors * kLanes) {
    value_block<V, kRows, kVectors>(sum, pitch, weights, values, column, begin, end);
  }
  for (; column < pitch; column += kLanes) value_block<V, kRows, 1>(sum, pitch, weights, values, column, begin, end);
}

// Calls f with std::integral_constant<int, rows>, rows in [1, kRowBlock].
template <int kRows = kRowBlock, typename F>
inline void with_rows(int64_t rows, F&& f) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return with_rows<kRows - 1>(rows, std::forward<F>(f));
  }
  f(std::integral_constant<int, kRows>());
}

// Scores -> weights e^(score - largest) in place, 0 for what the row does not see.
inline RowState softmax_row(float* scores, const RowRange& range, float scale, float logit_cap) {
  const int64_t first = range.begin / kLanes * kLanes;
  const int64_t last = round_up_lanes(range.end);
  vi lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  vf largest = vset1(-INFINITY);
  for (int64_t j = first; j < last; j += kLanes) {
    vf s = vload(scores + j) * scale;
    if (logit_cap > 0) s = vtanh(s / logit_cap) * logit_cap;
    const vi key = lane + static_cast<int32_t>(j);
    vi seen = (key >= static_cast<int32_t>(range.begin)) & (key < static_cast<int32_t>(range.end));
    if (range.mask != nullptr) {
      vi byte;
      for (int i = 0; i < kLanes; ++i) byte[i] = j + i < range.end ? range.mask[j + i] : 0;
      seen &= byte != 0;
    }
    s = seen ? s : vset1(-INFINITY);
    vstore(scores + j, s);
    largest = vmax(s, largest);
  }
  RowState state{vhmax(largest), 0};
  // A row of -inf scores has weights 0, not NaN.
  const float base = state.largest == -INFINITY ? 0 : state.largest;
  vf total = vzero();
  for (int64_t j = first; j < last; j += kLanes) {
    const vf w = vexp_negative(vload(scores + j) - base);
    vstore(scores + j, w);
    total += w;
  }
  state.total = vsum(total);
  return state;
}

// Weighted sum of one row over the keys that its mask shows, run by run: a hidden value is not even multiplied by 0,
// for it may be NaN.
template <typename V>
inline void masked_values(float* sum, int64_t pitch, const float* weights, const V* const* values,
                          const RowRange& range) {
  int64_t j = range.begin;
  while (j < range.end) {
    while (j < range.end && range.mask[j] == 0) ++j;
    const int64_t begin = j;
    while (j < range.end && range.mask[j] != 0) ++j;
    value_rows<V, 1>(sum, pitch, weights, values, begin, j);
  }
}

// Rows in blocks: the keys that all of a block see go through the register tile, the ragged ends (causal diagonal,
// window) row by row.
template <typename V>
inline void sum_values(float* sums, int64_t pitch, const float* weights, const V* const* values, int64_t rows,
                       const RowRange* ranges) {
  for (int64_t r = 0; r < rows; r += kRowBlock) {
    const int64_t block = std::min<int64_t>(kRowBlock, rows - r);
    int64_t begin = 0, end = kChunk;
    bool masked = false;
    for (int64_t i = r; i < r + block; ++i) {
      begin = std::max(begin, ranges[i].begin);
      end = std::min(end, ranges[i].end);
      masked |= ranges[i].mask != nullptr;
    }
    const auto row_alone = [&](int64_t i, int64_t from, int64_t to) {
      value_rows<V, 1>(sums + i * pitch, pitch, weights + i * kChunk, values, from, to);
    };
    if (masked) {
      for (int64_t i = r; i < r + block; ++i)
        masked_values(sums + i * pitch, pitch, weights + i * kChunk, values, ranges[i]);
    } else if (begin >= end) {
      for (int64_t i = r; i < r + block; ++i) row_alone(i, ranges[i].begin, ranges[i].end);
    } else {
      for (int64_t i = r; i < r + block; ++i) row_alone(i, ranges[i].begin, begin);
      with_rows(block,
                [&](auto n) { value_rows<V, n()>(sums + r * pitch, pitch, weights + r * kChunk, values, begin, end); });
      for (int64_t i = r; i < r + block; ++i) row_alone(i, end, ranges[i].end);
    }
  }
}

// Working memory of one thread.
struct ChunkScratch {
  Scratch keys, staging, scores, values;
};

// Rows `rows` of q (float, pitch q_pitch) over one chunk -> states[rows] and sums[rows][pitch], pitch = head_dim_v
// rounded up to lanes. ranges[r] tells what row r sees. `widen_values` converts the values once, for many rows; head
// dims that fill no whole vector need it.
template <typename T>
void attend_chunk(const AttentionProblem& p, const ChunkKeys<T>& chunk, const float* q, int64_t q_pitch, int64_t rows,
                  const RowRange* ranges, bool widen_values, ChunkScratch& scratch, RowState* states, float* sums) {
  float* keys = scratch.keys.get<float>(round_up_lanes(p.head_dim) * kKeyBlock);
  float* staging = scratch.staging.get<float>(kLanes * (round_up_lanes(p.head_dim) + kLanes));
  float* scores = scratch.scores.get<float>(rows * kChunk);
  const int64_t pitch = round_up_lanes(p.head_dim_v);
  for (int64_t first = 0; first < chunk.count; first += kKeyBlock) {
    bool loaded = false;
    for (int64_t r = 0; r < rows; r += kRowBlock) {
      const int64_t block = std::min<int64_t>(kRowBlock, rows - r);
      bool seen = false;
      for (int64_t i = r; i < r + block; ++i) seen |= ranges[i].begin < first + kKeyBlock && ranges[i].end > first;
      if (!seen) continue;
      if (!loaded) {
        const int64_t count = std::min(kKeyBlock, chunk.count - first);
        for (int64_t j = first; j < first + count; ++j) prefetch_row(chunk.v[j], p.head_dim_v);
        transpose_keys(keys, kKeyBlock, chunk.k + first, count, p.head_dim, staging);
      }
      loaded = true;
      with_rows(block, [&](auto n) {
        score_block<n()>(scores + r * kChunk + first, q + r * q_pitch, q_pitch, keys, p.head_dim);
      });
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    states[r] = ranges[r].begin < ranges[r].end ? softmax_row(scores + r * kChunk, ranges[r], p.scale, p.logit_cap)
                                                : RowState{-INFINITY, 0};
  }
  std::fill(sums, sums + rows * pitch, 0.0f);
  if (widen_values || chunk.holes || pitch != p.head_dim_v) {
    const float* wide[kChunk];
    float* values = scratch.values.get<float>(kChunk * pitch);
    int64_t begin = chunk.count, end = 0;
    for (int64_t r = 0; r < rows; ++r) {
      if (ranges[r].begin >= ranges[r].end) continue;
      begin = std::min(begin, ranges[r].begin);
      end = std::max(end, ranges[r].end);
    }
    for (int64_t j = begin; j < end; ++j) {
      float* to = values + j * pitch;
      wide[j] = to;
      widen_row(to, chunk.v[j], p.head_dim_v);
    }
    sum_values<float>(sums, pitch, scores, wide, rows, ranges);
  } else {
    sum_values<T>(sums, pitch, scores, chunk.v, rows, ranges);
  }
}

// (sum, state) += (other_sum, other): both are rescaled to the larger maximum. Chunks are merged in ascending order
// everywhere.
inline void merge_chunk(float* sum, RowState& state, const float* other_sum, const RowState& other, int64_t width) {
  if (other.empty()) return;
  const bool first = state.empty();
  const float largest = std::max(state.largest, other.largest);
  const float base = largest == -INFINITY ? 0 : largest;
  const float scale = first ? 0 : std::exp(state.largest - base);
  const float other_scale = first ? 1 : std::exp(other.largest - base);
  const auto merged = [&](vf a, vf b) { return first ? b : vfma(a, vset1(scale), b * other_scale); };
  for_lanes(
      width, [&](int64_t i) { vstore(sum + i, merged(vload(sum + i), vload(other_sum + i))); },
      [&](int64_t i, int64_t n) { vstore_n(sum + i, merged(vload_n(sum + i, n), vload_n(other_sum + i, n)), n); });
  state.total = first ? other.total : fma1(state.total, scale, other.total * other_scale);
  state.largest = largest;
}

// Normalises a finished row, with the sink (a logit without a value) of its head, and writes out and lse.
inline void finish_row(const AttentionProblem& p, int64_t row, int64_t head, const float* sum, RowState state) {
  float scale = 1;
  if (p.sinks != nullptr) {
    const float largest = std::max(state.largest, p.sinks[head]);
    const float base = largest == -INFINITY ? 0 : largest;
    scale = std::exp(state.largest - base);
    state.total = state.total * scale + std::exp(p.sinks[head] - base);
    state.largest = largest;
  }
  const bool nothing = state.total == 0;
  p.store_out(row, head, sum, nothing ? 0 : scale / state.total * p.v_scale);
  p.store_lse(row, head, nothing ? -INFINITY : state.largest + std::log(state.total));
}

}  // namespace gristmill
