// Rows as 8-bit numbers on the CPU: the largest magnitude of a group, then its quotients, while the group is in cache.
#include <cfloat>

#include "common/float8.h"
#include "common/parallel.h"
#include "common/vec.h"
#include "quant/problem.h"
#include "quant/quant.h"

namespace gristmill {
namespace {

// Rounds to nearest even; what lies beyond 127, infinities included, saturates; a NaN becomes 0.
inline void vstore(Int8* p, vf v) {
  const vf limit = vset1(Int8::kLargest);
  const vf bounded = vmin(vmax(v, -limit), limit);
  const vi rounded = vto_int(vround(v == v ? bounded : vzero()));
  for (int i = 0; i < kLanes; ++i) p[i].bits = static_cast<int8_t>(rounded[i]);
}

inline vf finite_magnitude(vf v) {
  const vf magnitude = vabs(v);
  return magnitude <= vset1(FLT_MAX) ? magnitude : vzero();
}

template <typename T>
float largest_magnitude(const T* x, int64_t width) {
  vf largest = vzero();
  for_lanes(
      width, [&](int64_t i) { largest = vmax(largest, finite_magnitude(vload(x + i))); },
      [&](int64_t i, int64_t n) { largest = vmax(largest, finite_magnitude(vload_n(x + i, n))); });
  return vhmax(largest);
}

template <typename T, typename To>
void store_quotients(To* out, const T* x, int64_t width, float scale) {
  const vf divisor = vset1(scale);
  for_lanes(
      width, [&](int64_t i) { vstore(out + i, vload(x + i) / divisor); },
      [&](int64_t i, int64_t n) {
        To codes[kLanes];
        vstore(codes, vload_n(x + i, n) / divisor);
        std::memcpy(out + i, codes, static_cast<size_t>(n));
      });
}

// row(out, x, index) for every row of x.
template <typename T, typename To, typename F>
void for_rows(const Tensor& out, const Tensor& x, const F& row) {
  parallel_ranges(x.size(0), x.size(1) * 8, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      row(mutable_data<To>(out) + r * out.stride(0), data<T>(x) + r * x.stride(0), r);
  });
}

template <typename T, typename To>
void quantise(const Tensor& out, const Tensor& scales, const Tensor& x, const Groups& shape) {
  float* scale = mutable_data<float>(scales);
  for_rows<T, To>(out, x, [&](To* to, const T* from, int64_t row) {
    for (int64_t g = 0; g < shape.groups; ++g) {
      const int64_t first = g * shape.width;
      const float own = scale_of<To>(largest_magnitude(from + first, shape.width));
      scale[row * scales.stride(0) + g * scales.stride(1)] = own;
      store_quotients(to + first, from + first, shape.width, own);
    }
  });
}

void quantise_to_float8(const Tensor& out, const Tensor& scales, const Tensor& x, const Groups& shape, const char* op) {
  check_float8_codes(out, op);
  dispatch_float(x.scalar_type(), op, "x", [&](auto from) {
    dispatch_float8(out.scalar_type(), [&](auto to) { quantise<decltype(from), decltype(to)>(out, scales, x, shape); });
  });
}

}  // namespace

void quant_fp8(const Tensor& out, const Tensor& x, const Tensor& scale) {
  constexpr const char* op = "quant_fp8";
  check_codes(out, x, op);
  check_float8_codes(out, op);
  check_given_scale(scale, op);
  const float given = *data<float>(scale);
  dispatch_float(x.scalar_type(), op, "x", [&](auto from) {
    dispatch_float8(out.scalar_type(), [&](auto to) {
      using T = decltype(from);
      using To = decltype(to);
      for_rows<T, To>(out, x, [&](To* codes, const T* row, int64_t) { store_quotients(codes, row, x.size(1), given); });
    });
  });
}

void per_token_quant_fp8(const Tensor& out, const Tensor& scales, const Tensor& x) {
  constexpr const char* op = "per_token_quant_fp8";
  quantise_to_float8(out, scales, x, check_per_token(out, scales, x, op), op);
}

void per_token_quant_int8(const Tensor& out, const Tensor& scales, const Tensor& x) {
  constexpr const char* op = "per_token_quant_int8";
  const Groups shape = check_per_token(out, scales, x, op);
  check_dtype(out, ScalarType::Char, op, "out");
  dispatch_float(x.scalar_type(), op, "x", [&](auto from) { quantise<decltype(from), Int8>(out, scales, x, shape); });
}

void per_group_quant_fp8(const Tensor& out, const Tensor& scales, const Tensor& x, int64_t group_size) {
  constexpr const char* op = "per_group_quant_fp8";
  quantise_to_float8(out, scales, x, check_per_group(out, scales, x, group_size, op), op);
}

}  // namespace gristmill
