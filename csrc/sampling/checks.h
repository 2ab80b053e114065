// Argument checks of the ops on logits, the same for every device.
#pragma once

#include "common/check.h"

namespace gristmill {

inline void check_logits(const Tensor& logits, const char* op) {
  check_dim(logits, 2, op, "logits");
  check_inner(logits, op, "logits");
}

inline void check_greedy(const Tensor& out, const Tensor& logits, const char* op) {
  check_logits(logits, op);
  check_vector(out, ScalarType::Int, logits.size(0), op, "out");
}

inline void check_sample(const Tensor& out, const Tensor& logits, const Tensor& temperature, const Tensor& top_k,
                         const Tensor& top_p, const Tensor& min_p, const Tensor& seeds, const Tensor& positions,
                         const char* op) {
  check_greedy(out, logits, op);
  const int64_t rows = logits.size(0);
  check_vector(temperature, ScalarType::Float, rows, op, "temperature");
  check_vector(top_k, ScalarType::Int, rows, op, "top_k");
  check_vector(top_p, ScalarType::Float, rows, op, "top_p");
  check_vector(min_p, ScalarType::Float, rows, op, "min_p");
  check_vector(seeds, ScalarType::Long, rows, op, "seeds");
  check_vector(positions, ScalarType::Int, rows, op, "positions");
}

inline void check_logit_bias(const Tensor& logits, const Tensor& indptr, const Tensor& ids, const Tensor& values,
                             const char* op) {
  check_logits(logits, op);
  check_vector(indptr, ScalarType::Int, logits.size(0) + 1, op, "indptr");
  check_vector(ids, ScalarType::Int, -1, op, "ids");
  check_vector(values, ScalarType::Float, ids.size(0), op, "values");
}

inline void check_penalties(const Tensor& logits, const Tensor& prompt_mask, const Tensor& output_counts,
                            const Tensor& presence, const Tensor& frequency, const Tensor& repetition, const char* op) {
  check_logits(logits, op);
  check_same_shape(prompt_mask, logits, op, "prompt_mask", "logits");
  check_dtype(prompt_mask, ScalarType::Bool, op, "prompt_mask");
  check_inner(prompt_mask, op, "prompt_mask");
  check_same_shape(output_counts, logits, op, "output_counts", "logits");
  check_dtype(output_counts, ScalarType::Int, op, "output_counts");
  check_inner(output_counts, op, "output_counts");
  check_vector(presence, ScalarType::Float, logits.size(0), op, "presence");
  check_vector(frequency, ScalarType::Float, logits.size(0), op, "frequency");
  check_vector(repetition, ScalarType::Float, logits.size(0), op, "repetition");
}

inline void check_token_bitmask(const Tensor& logits, const Tensor& bitmask, const char* op) {
  check_logits(logits, op);
  check_dim(bitmask, 2, op, "bitmask");
  check_dtype(bitmask, ScalarType::Int, op, "bitmask");
  check_size(bitmask, 0, logits.size(0), op, "bitmask");
  check_size(bitmask, 1, (logits.size(1) + 31) / 32, op, "bitmask");
  check_inner(bitmask, op, "bitmask");
}

}  // namespace gristmill
