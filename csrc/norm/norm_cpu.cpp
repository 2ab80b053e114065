// RMS normalisation on the CPU: squares are summed in double, so the result is within rounding of the exact one at any
// width.
#include <cmath>
#include <type_traits>

#include "common/parallel.h"
#include "common/vec.h"
#include "norm/norm.h"

namespace gristmill {
namespace {

// Sum of squares of a row whose vectors load(i) gives; a partial last vector is padded with zeros.
class SquareSum {
 public:
  void add(vf v) {
    const vd low = vlow_double(v);
    const vd high = vhigh_double(v);
    low_ += low * low;
    high_ += high * high;
  }
  // 1 / sqrt(mean + eps)
  double inverse_rms(int64_t width, double eps) const {
    return 1.0 / std::sqrt(vsum(low_ + high_) / static_cast<double>(width) + eps);
  }

 private:
  vd low_ = {};
  vd high_ = {};
};

// x * scale * weight. float32 keeps the errors of the scale and of the first product, and so rounds once.
template <typename T>
inline vf scaled(vf x, float scale, float scale_low, vf weight) {
  const vf product = x * scale;
  if constexpr (!std::is_same_v<T, float>) return product * weight;
  const vf product_low = vfma(x, vset1(scale_low), vfma(x, vset1(scale), -product));
  return vfma(product, weight, product_low * weight);
}

template <typename T, typename W>
void scale_row(T* out, const T* x, const W* weight, int64_t width, double inverse_rms) {
  const float scale = static_cast<float>(inverse_rms);
  const float low = static_cast<float>(inverse_rms - scale);
  for_lanes(
      width, [&](int64_t i) { vstore(out + i, scaled<T>(vload(x + i), scale, low, vload(weight + i))); },
      [&](int64_t i, int64_t n) {
        vstore_n(out + i, scaled<T>(vload_n(x + i, n), scale, low, vload_n(weight + i, n)), n);
      });
}

template <typename T, typename W>
void rms_norm_row(T* out, const T* x, const W* weight, int64_t width, double eps) {
  SquareSum squares;
  for_lanes(
      width, [&](int64_t i) { squares.add(vload(x + i)); },
      [&](int64_t i, int64_t n) { squares.add(vload_n(x + i, n)); });
  scale_row(out, x, weight, width, squares.inverse_rms(width, eps));
}

// The sum is rounded to T before it is normalised, as the unfused pair of ops would do.
template <typename T, typename W>
void fused_add_rms_norm_row(T* x, T* residual, const W* weight, int64_t width, double eps) {
  SquareSum squares;
  for_lanes(
      width,
      [&](int64_t i) {
        vstore(residual + i, vload(x + i) + vload(residual + i));
        squares.add(vload(residual + i));
      },
      [&](int64_t i, int64_t n) {
        vstore_n(residual + i, vload_n(x + i, n) + vload_n(residual + i, n), n);
        squares.add(vload_n(residual + i, n));
      });
  scale_row(x, residual, weight, width, squares.inverse_rms(width, eps));
}

void check_weight(const Tensor& weight, int64_t width, const char* op) {
  check_dim(weight, 1, op, "weight");
  check_size(weight, 0, width, op, "weight");
  check_inner(weight, op, "weight");
}

}  // namespace

void rms_norm(const Tensor& out, const Tensor& x, const Tensor& weight, double eps) {
  constexpr const char* op = "rms_norm";
  check_same_shape(out, x, op, "out", "x");
  check_dtype(out, x.scalar_type(), op, "out");
  const Rows x_rows(x, op, "x");
  const Rows out_rows(out, op, "out");
  const int64_t width = x_rows.width();
  check_weight(weight, width, op);
  dispatch_float(x.scalar_type(), op, "x", [&](auto x_tag) {
    dispatch_float(weight.scalar_type(), op, "weight", [&](auto w_tag) {
      using T = decltype(x_tag);
      using W = decltype(w_tag);
      const T* in = data<T>(x);
      T* result = mutable_data<T>(out);
      const W* w = data<W>(weight);
      parallel_ranges(x_rows.count(), width * 4, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          rms_norm_row(result + out_rows.offset(row), in + x_rows.offset(row), w, width, eps);
        }
      });
    });
  });
}

void fused_add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  constexpr const char* op = "fused_add_rms_norm";
  check_same_shape(residual, x, op, "residual", "x");
  check_dtype(residual, x.scalar_type(), op, "residual");
  const Rows x_rows(x, op, "x");
  const Rows residual_rows(residual, op, "residual");
  const int64_t width = x_rows.width();
  check_weight(weight, width, op);
  dispatch_float(x.scalar_type(), op, "x", [&](auto x_tag) {
    dispatch_float(weight.scalar_type(), op, "weight", [&](auto w_tag) {
      using T = decltype(x_tag);
      using W = decltype(w_tag);
      T* in_out = mutable_data<T>(x);
      T* sum = mutable_data<T>(residual);
      const W* w = data<W>(weight);
      parallel_ranges(x_rows.count(), width * 8, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          fused_add_rms_norm_row(in_out + x_rows.offset(row), sum + residual_rows.offset(row), w, width, eps);
        }
      });
    });
  });
}

}  // namespace gristmill
