// What merge_state and merge_states ask of their arguments, on the CPU and on GPUs.
#pragma once

#include "common/check.h"

namespace gristmill {

inline void check_lse(const Tensor& lse, const Tensor& o, const char* op, const char* name) {
  check_dim(lse, 2, op, name);
  check_dtype(lse, ScalarType::Float, op, name);
  check_size(lse, 0, o.size(0), op, name);
  check_size(lse, 1, o.size(1), op, name);
}

inline void check_merge_state(const Tensor& out, const Tensor& out_lse, const Tensor& o_a, const Tensor& lse_a,
                              const Tensor& o_b, const Tensor& lse_b, const char* op) {
  check_dim(o_a, 3, op, "o_a");
  check_same_shape(o_b, o_a, op, "o_b", "o_a");
  check_same_shape(out, o_a, op, "out", "o_a");
  check_dtype(o_b, o_a.scalar_type(), op, "o_b");
  check_dtype(out, o_a.scalar_type(), op, "out");
  check_inner(o_a, op, "o_a");
  check_inner(o_b, op, "o_b");
  check_inner(out, op, "out");
  check_lse(lse_a, o_a, op, "lse_a");
  check_lse(lse_b, o_a, op, "lse_b");
  check_lse(out_lse, o_a, op, "out_lse");
}

inline void check_merge_states(const Tensor& out, const Tensor& out_lse, const Tensor& o, const Tensor& lse,
                               const char* op) {
  check_dim(o, 4, op, "o");
  check_dim(out, 3, op, "out");
  for (int64_t d = 0; d < 3; ++d) check_size(out, d, o.size(d + 1), op, "out");
  check_dtype(out, o.scalar_type(), op, "out");
  check_inner(o, op, "o");
  check_inner(out, op, "out");
  check_lse(out_lse, out, op, "out_lse");
  check_dim(lse, 3, op, "lse");
  check_dtype(lse, ScalarType::Float, op, "lse");
  for (int64_t d = 0; d < 3; ++d) check_size(lse, d, o.size(d), op, "lse");
}

}  // namespace gristmill
