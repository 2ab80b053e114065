// The query rows of one work item, prepared once and attended chunk by chunk with the best code that the library has
// for their type.
#pragma once

#include <type_traits>
#include <vector>

#include "attention/amx_chunk.h"
#include "attention/chunk_cpu.h"

namespace gristmill {

template <typename T>
class QueryRows {
 public:
  static constexpr bool kMayUseAmx =
#if defined(GRISTMILL_AMX)
      std::is_same_v<T, BFloat16>;
#else
      false;
#endif

  // Rows of a work item that amortise the unpacking of a chunk, while scores and sums still fit the L2 cache.
  static int64_t target_rows(const AttentionProblem& p) { return use_amx(p) ? 256 : 96; }

  // Room for `rows` rows; fill them through load() and range(), then call ready().
  void resize(const AttentionProblem& p, int64_t rows) {
    rows_ = rows;
    sum_pitch_ = round_up_lanes(p.head_dim_v);
    sums_ = sums_memory_.get<float>(rows * sum_pitch_);
    states_.resize(static_cast<size_t>(rows));
    ranges_.resize(static_cast<size_t>(rows));
#if defined(GRISTMILL_AMX)
    if (use_amx(p)) {
      pitch_ = round_up_pairs(p.head_dim);
      amx_rows_ = amx_.rows.get<BFloat16>(rows * pitch_);
      return;
    }
#endif
    pitch_ = round_up_lanes(p.head_dim);
    q_ = q_memory_.get<float>(rows * pitch_);
  }

  // Row r is query `row`, head `head`.
  void load(const AttentionProblem& p, int64_t r, int64_t row, int64_t head) {
#if defined(GRISTMILL_AMX)
    if (use_amx(p)) {
      BFloat16* to = amx_rows_ + r * pitch_;
      p.copy_q(to, row, head);
      std::fill(to + p.head_dim, to + pitch_, BFloat16{0});
      return;
    }
#endif
    p.load_q(q_ + r * pitch_, row, head);
  }

  RowRange& range(int64_t r) { return ranges_[static_cast<size_t>(r)]; }
  const RowState& state(int64_t r) const { return states_[static_cast<size_t>(r)]; }
  const float* sum(int64_t r) const { return sums_ + r * sum_pitch_; }
  int64_t sum_pitch() const { return sum_pitch_; }

  void ready([[maybe_unused]] const AttentionProblem& p) {
#if defined(GRISTMILL_AMX)
    if (!use_amx(p)) return;
    queries_ = amx_.queries.get<BFloat16>((rows_ + kTile - 1) / kTile * kTile * pitch_);
    pack_queries(queries_, amx_rows_, rows_, pitch_);
#endif
  }

  // Attends the keys of `chunk` that the ranges name; states and sums then hold the chunk's part.
  void attend(const AttentionProblem& p, ChunkKeys<T>& chunk) {
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (is_float8(p.cache_dtype)) widen(p, chunk);
    }
#if defined(GRISTMILL_AMX)
    if constexpr (kMayUseAmx) {
      if (use_amx(p)) return AmxChunk(p, chunk, queries_, rows_, ranges_.data(), amx_, states_.data(), sums_).run();
    }
#endif
    const bool widen_values = !std::is_same_v<T, float> && rows_ > kRowBlock;
    attend_chunk(p, chunk, q_, pitch_, rows_, ranges_.data(), widen_values, chunk_, states_.data(), sums_);
  }

 private:
  void widen(const AttentionProblem& p, ChunkKeys<T>& chunk) {
    int64_t begin = chunk.count, end = 0;
    for (int64_t r = 0; r < rows_; ++r) {
      const RowRange& range = ranges_[static_cast<size_t>(r)];
      if (range.begin >= range.end) continue;
      begin = std::min(begin, range.begin);
      end = std::max(end, range.end);
    }
    chunk.widen(p, begin, end, wide_);
  }

  static bool use_amx(const AttentionProblem& p) {
    return kMayUseAmx && p.dtype == ScalarType::BFloat16 && amx_available();
  }

  Scratch q_memory_, sums_memory_;
  WideRows wide_;
  ChunkScratch chunk_;
#if defined(GRISTMILL_AMX)
  AmxScratch amx_;
  BFloat16* amx_rows_ = nullptr;
  BFloat16* queries_ = nullptr;
#endif
  float* q_ = nullptr;
  float* sums_ = nullptr;
  int64_t rows_ = 0, pitch_ = 0, sum_pitch_ = 0;
  std::vector<RowState> states_;
  std::vector<RowRange> ranges_;
};

}  // namespace gristmill
