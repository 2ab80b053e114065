// Greedy choice, logit bias and penalties on the CPU. Edits are computed in double and rounded once.
#include <cmath>

#include "common/parallel.h"
#include "common/vec.h"
#include "sampling/checks.h"
#include "sampling/penalty.h"
#include "sampling/row_scan.h"
#include "sampling/sampling.h"

namespace gristmill {
namespace {

template <typename T>
void penalise_row(T* logits, const bool* in_prompt, const int32_t* count, int64_t vocab, const Penalty& penalty) {
  for (int64_t v = 0; v < vocab; ++v) {
    if (!in_prompt[v] && count[v] == 0) continue;
    logits[v] = penalty.applied(logits[v], in_prompt[v], count[v]);
  }
}

}  // namespace

void greedy(const Tensor& out, const Tensor& logits) {
  constexpr const char* op = "greedy";
  check_greedy(out, logits, op);
  const int64_t rows = logits.size(0), vocab = logits.size(1), stride = logits.stride(0);
  int32_t* ids = mutable_data<int32_t>(out);
  dispatch_float(logits.scalar_type(), op, "logits", [&](auto tag) {
    using T = decltype(tag);
    const T* x = data<T>(logits);
    parallel_units(rows, vocab * 2,
                   [&](int64_t row) { ids[row] = static_cast<int32_t>(scan_row(x + row * stride, vocab).best); });
  });
}

void apply_logit_bias(const Tensor& logits, const Tensor& indptr, const Tensor& ids, const Tensor& values) {
  constexpr const char* op = "apply_logit_bias";
  check_logit_bias(logits, indptr, ids, values, op);
  const int64_t rows = logits.size(0), vocab = logits.size(1), stride = logits.stride(0);
  const int32_t* bounds = data<int32_t>(indptr);
  const int32_t* id = data<int32_t>(ids);
  const float* value = data<float>(values);
  for (int64_t b = 0; b < rows; ++b) {
    STD_TORCH_CHECK(0 <= bounds[b] && bounds[b] <= bounds[b + 1] && bounds[b + 1] <= ids.size(0), op, ": indptr[", b,
                    "] = ", bounds[b], " and the next, ", bounds[b + 1], ", must be ascending and at most ",
                    ids.size(0));
  }
  dispatch_float(logits.scalar_type(), op, "logits", [&](auto tag) {
    using T = decltype(tag);
    T* x = mutable_data<T>(logits);
    for (int64_t b = 0; b < rows; ++b) {
      for (int64_t i = bounds[b]; i < bounds[b + 1]; ++i) {
        if (id[i] < 0 || id[i] >= vocab) continue;  // padding
        T& target = x[b * stride + id[i]];
        target = from_float<T>(static_cast<float>(static_cast<double>(to_float(target)) + value[i]));
      }
    }
  });
}

void apply_penalties(const Tensor& logits, const Tensor& prompt_mask, const Tensor& output_counts,
                     const Tensor& presence, const Tensor& frequency, const Tensor& repetition) {
  constexpr const char* op = "apply_penalties";
  check_penalties(logits, prompt_mask, output_counts, presence, frequency, repetition, op);
  const int64_t rows = logits.size(0), vocab = logits.size(1), stride = logits.stride(0);
  const bool* mask = data<bool>(prompt_mask);
  const int32_t* counts = data<int32_t>(output_counts);
  const int64_t mask_stride = prompt_mask.stride(0), count_stride = output_counts.stride(0);
  dispatch_float(logits.scalar_type(), op, "logits", [&](auto tag) {
    using T = decltype(tag);
    T* x = mutable_data<T>(logits);
    parallel_units(rows, vocab * 8, [&](int64_t b) {
      const Penalty penalty{data<float>(presence)[b], data<float>(frequency)[b], data<float>(repetition)[b]};
      penalise_row(x + b * stride, mask + b * mask_stride, counts + b * count_stride, vocab, penalty);
    });
  });
}

void apply_token_bitmask(const Tensor& logits, const Tensor& bitmask) {
  constexpr const char* op = "apply_token_bitmask";
  check_token_bitmask(logits, bitmask, op);
  const int64_t rows = logits.size(0), vocab = logits.size(1), stride = logits.stride(0);
  const int32_t* words = data<int32_t>(bitmask);
  const int64_t word_stride = bitmask.stride(0);
  dispatch_float(logits.scalar_type(), op, "logits", [&](auto tag) {
    using T = decltype(tag);
    T* x = mutable_data<T>(logits);
    parallel_units(rows, vocab, [&](int64_t b) {
      for (int64_t v = 0; v < vocab; ++v) {
        const uint32_t word = static_cast<uint32_t>(words[b * word_stride + v / 32]);
        if ((word >> (v % 32) & 1) == 0) x[b * stride + v] = from_float<T>(-INFINITY);
      }
    });
  });
}

}  // namespace gristmill
