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

  // Room for `rows` rows; fill them through row(), then call ready().
  void resize(const AttentionProblem& p, int64_t rows) {
    rows_ = rows;
    pitch_ = round_up_lanes(p.head_dim);
    sum_pitch_ = round_up_lanes(p.head_dim_v);
    q_ = q_memory_.get<float>(rows * pitch_);
    sums_ = sums_memory_.get<float>(rows * sum_pitch_);
    states_.resize(static_cast<size_t>(rows));
    ranges_.resize(static_cast<size_t>(rows));
  }

  float* row(int64_t r) { return q_ + r * pitch_; }
  RowRange& range(int64_t r) { return ranges_[static_cast<size_t>(r)]; }
  const RowState& state(int64_t r) const { return states_[static_cast<size_t>(r)]; }
  const float* sum(int64_t r) const { return sums_ + r * sum_pitch_; }
  int64_t sum_pitch() const { return sum_pitch_; }

  void ready([[maybe_unused]] const AttentionProblem& p) {
#if defined(GRISTMILL_AMX)
    if (use_amx(p)) queries_ = pack_queries(amx_.queries, q_, pitch_, rows_, p.head_dim);
#endif
  }

  // Attends the keys of `chunk` that the ranges name; states and sums then hold the chunk's part.
  void attend(const AttentionProblem& p, const ChunkKeys<T>& chunk) {
#if defined(GRISTMILL_AMX)
    if constexpr (kMayUseAmx) {
      if (use_amx(p)) return AmxChunk(p, chunk, queries_, rows_, ranges_.data(), amx_, states_.data(), sums_).run();
    }
#endif
    const bool widen_values = !std::is_same_v<T, float> && rows_ > kRowBlock;
    attend_chunk(p, chunk, q_, pitch_, rows_, ranges_.data(), widen_values, chunk_, states_.data(), sums_);
  }

 private:
  static bool use_amx(const AttentionProblem& p) {
    return kMayUseAmx && p.dtype == ScalarType::BFloat16 && amx_available();
  }

  Scratch q_memory_, sums_memory_;
  ChunkScratch chunk_;
#if defined(GRISTMILL_AMX)
  AmxScratch amx_;
  const BFloat16* queries_ = nullptr;
#endif
  float* q_ = nullptr;
  float* sums_ = nullptr;
  int64_t rows_ = 0, pitch_ = 0, sum_pitch_ = 0;
  std::vector<RowState> states_;
  std::vector<RowRange> ranges_;
};

}  // namespace gristmill
