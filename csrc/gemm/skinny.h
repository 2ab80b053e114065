// What skinny_linear accepts, for the CPU and for GPUs.
#pragma once

#include "common/check.h"

namespace gristmill {

// The most rows of x.
inline constexpr int64_t kSkinnyRows = 16;

inline void check_skinny_linear(const Tensor& out, const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  constexpr const char* op = "skinny_linear";
  check_dim(x, 2, op, "x");
  check_inner(x, op, "x");
  const int64_t m = x.size(0), k = x.size(1);
  STD_TORCH_CHECK(m <= kSkinnyRows, op, ": x has ", m, " rows, at most ", kSkinnyRows, " are supported");
  STD_TORCH_CHECK(k < int64_t{1} << 30, op, ": x has rows of ", k, " elements, which is too many");
  check_dim(weight, 2, op, "weight");
  check_inner(weight, op, "weight");
  check_size(weight, 1, k, op, "weight");
  check_dtype(weight, x.scalar_type(), op, "weight");
  const int64_t n = weight.size(0);
  check_dim(out, 2, op, "out");
  check_inner(out, op, "out");
  check_size(out, 0, m, op, "out");
  check_size(out, 1, n, op, "out");
  check_dtype(out, x.scalar_type(), op, "out");
  if (bias) check_vector(*bias, x.scalar_type(), n, op, "bias");
}

}  // namespace gristmill
