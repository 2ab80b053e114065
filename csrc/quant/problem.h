// What the quantising ops ask of their arguments, on the CPU and on GPUs, and how large a scale is.
//
// Every op divides groups of neighbours in a row by one scale each: whole rows, parts of them, or all by a given one.
#pragma once

#include "common/check.h"
#include "common/float8_format.h"

namespace gristmill {

// A symmetric 8-bit integer; -128 is not used.
struct Int8 {
  static constexpr float kLargest = 127;
  int8_t bits;
};

// Scales are normal numbers, so that no quotient depends on how subnormal numbers are treated.
inline constexpr float kLeastScale = 0x1p-126f;
// The largest that 127 can be multiplied by. FLT_MAX / 127 rounds up, to what times 127 is infinite; FLT_MAX over the
// largest 8-bit floats is exact.
inline constexpr float kLargestScale = 0x1.020406p121f;

// Of a group whose largest finite magnitude is `amax`.
template <typename To>
GRISTMILL_HOST_DEVICE inline float scale_of(float amax) {
  const float scale = amax / To::kLargest;
  if (scale < kLeastScale) return kLeastScale;
  return scale > kLargestScale ? kLargestScale : scale;
}

// Rows of `groups` groups of `width` elements.
struct Groups {
  int64_t rows, groups, width;
};

inline void check_codes(const Tensor& out, const Tensor& x, const char* op) {
  check_dim(x, 2, op, "x");
  check_inner(x, op, "x");
  check_same_shape(out, x, op, "out", "x");
  check_inner(out, op, "out");
}

inline void check_float8_codes(const Tensor& out, const char* op) {
  STD_TORCH_CHECK(is_float8(out.scalar_type()), op, ": out must be float8_e4m3fn, float8_e5m2 or float8_e4m3fnuz, got ",
                  dtype_name(out.scalar_type()));
}

// Scales may lie in any order: [T, G] with either stride.
inline Groups check_groups(const Tensor& out, const Tensor& scales, const Tensor& x, int64_t width, const char* op) {
  check_codes(out, x, op);
  const int64_t groups = width == x.size(1) ? 1 : x.size(1) / width;
  check_dim(scales, 2, op, "scales");
  check_dtype(scales, ScalarType::Float, op, "scales");
  check_size(scales, 0, x.size(0), op, "scales");
  check_size(scales, 1, groups, op, "scales");
  return {x.size(0), groups, width};
}

inline Groups check_per_token(const Tensor& out, const Tensor& scales, const Tensor& x, const char* op) {
  check_dim(x, 2, op, "x");
  return check_groups(out, scales, x, x.size(1), op);
}

inline Groups check_per_group(const Tensor& out, const Tensor& scales, const Tensor& x, int64_t width, const char* op) {
  check_dim(x, 2, op, "x");
  STD_TORCH_CHECK(width == 32 || width == 64 || width == 128 || width == 256, op,
                  ": group_size must be 32, 64, 128 or 256, got ", width);
  STD_TORCH_CHECK(x.size(1) % width == 0, op, ": group_size must divide the ", x.size(1), " columns of x, got ", width);
  return check_groups(out, scales, x, width, op);
}

inline void check_given_scale(const Tensor& scale, const char* op) {
  check_dtype(scale, ScalarType::Float, op, "scale");
  STD_TORCH_CHECK(scale.numel() == 1, op, ": scale must have one element, got ", scale.numel());
}

}  // namespace gristmill
