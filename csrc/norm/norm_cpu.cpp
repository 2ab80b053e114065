// RMS and layer normalisation on the CPU: sums are taken in double, so the result is within rounding of the exact one
// at any width.
#include <cmath>
#include <cstring>
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

// What a stored weight multiplies by.
enum class Factor { kWeight, kOnePlusWeight };

template <Factor kFactor>
inline vf factor(vf weight) {
  return kFactor == Factor::kWeight ? weight : 1.0f + weight;
}

template <Factor kFactor, typename T, typename W>
void scale_row(T* out, const T* x, const W* weight, int64_t width, double inverse_rms) {
  const float scale = static_cast<float>(inverse_rms);
  const float low = static_cast<float>(inverse_rms - scale);
  for_lanes(
      width,
      [&](int64_t i) { vstore(out + i, scaled<T>(vload(x + i), scale, low, factor<kFactor>(vload(weight + i)))); },
      [&](int64_t i, int64_t n) {
        vstore_n(out + i, scaled<T>(vload_n(x + i, n), scale, low, factor<kFactor>(vload_n(weight + i, n))), n);
      });
}

template <Factor kFactor, typename T, typename W>
void rms_norm_row(T* out, const T* x, const W* weight, int64_t width, double eps) {
  SquareSum squares;
  for_lanes(
      width, [&](int64_t i) { squares.add(vload(x + i)); },
      [&](int64_t i, int64_t n) { squares.add(vload_n(x + i, n)); });
  scale_row<kFactor>(out, x, weight, width, squares.inverse_rms(width, eps));
}

// The sum is rounded to T before it is normalised, as the unfused pair of ops would do.
template <Factor kFactor, typename T, typename W>
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
  scale_row<kFactor>(x, residual, weight, width, squares.inverse_rms(width, eps));
}

void check_weight(const Tensor& weight, int64_t width, const char* op) {
  check_dim(weight, 1, op, "weight");
  check_size(weight, 0, width, op, "weight");
  check_inner(weight, op, "weight");
}

template <Factor kFactor>
void normalise(const Tensor& out, const Tensor& x, const Tensor& weight, double eps, const char* op) {
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
          rms_norm_row<kFactor>(result + out_rows.offset(row), in + x_rows.offset(row), w, width, eps);
        }
      });
    });
  });
}

template <Factor kFactor>
void add_and_normalise(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps, const char* op) {
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
          fused_add_rms_norm_row<kFactor>(in_out + x_rows.offset(row), sum + residual_rows.offset(row), w, width, eps);
        }
      });
    });
  });
}

struct Moments {
  double mean;
  double inverse_deviation;  // 1 / sqrt(variance + eps)
};

// One pass over deviations from the row's first element x0. A large mean costs nothing: the variance of n numbers is at
// least (x0 - mean)^2 / n, so their mean square deviation from x0 is at most n + 1 times the variance, and the
// subtraction below loses no more than log2(n + 1) of double's 53 bits.
template <typename T>
Moments moments_of_row(const T* x, int64_t width, double eps) {
  if (width == 0) return {0, 0};
  const double origin = static_cast<double>(to_float(x[0]));
  vd sum_low = {}, sum_high = {}, square_low = {}, square_high = {};
  const auto add = [&](vd low, vd high) {
    sum_low += low;
    sum_high += high;
    square_low += low * low;
    square_high += high * high;
  };
  for_lanes(
      width,
      [&](int64_t i) {
        const vf v = vload(x + i);
        add(vlow_double(v) - origin, vhigh_double(v) - origin);
      },
      [&](int64_t i, int64_t n) {
        double deviation[kLanes] = {};  // the lanes behind the row deviate by nothing
        for (int64_t lane = 0; lane < n; ++lane) deviation[lane] = static_cast<double>(to_float(x[i + lane])) - origin;
        vd low, high;
        std::memcpy(&low, deviation, sizeof(low));
        std::memcpy(&high, deviation + kLanes / 2, sizeof(high));
        add(low, high);
      });
  const double count = static_cast<double>(width);
  const double shift = vsum(sum_low + sum_high) / count;
  const double variance = vsum(square_low + square_high) / count - shift * shift;
  return {origin + shift, 1.0 / std::sqrt((variance < 0 ? 0 : variance) + eps)};
}

// weight and bias may be null. The mean comes in two floats, since x - mean may be far smaller than either.
template <typename T>
void layer_norm_row(T* out, const T* x, const T* weight, const T* bias, int64_t width, double eps) {
  const auto [mean, inverse_deviation] = moments_of_row(x, width, eps);
  const float scale = static_cast<float>(inverse_deviation);
  const float mean_high = static_cast<float>(mean);
  const float mean_low = static_cast<float>(mean - mean_high);
  const auto normal = [&](vf v, vf w, vf b) { return vfma((v - mean_high - mean_low) * scale, w, b); };
  for_lanes(
      width,
      [&](int64_t i) {
        vstore(out + i,
               normal(vload(x + i), weight ? vload(weight + i) : vset1(1.0f), bias ? vload(bias + i) : vzero()));
      },
      [&](int64_t i, int64_t n) {
        const vf w = weight ? vload_n(weight + i, n) : vset1(1.0f), b = bias ? vload_n(bias + i, n) : vzero();
        vstore_n(out + i, normal(vload_n(x + i, n), w, b), n);
      });
}

void check_affine(const OptionalTensor& t, ScalarType type, int64_t width, const char* op, const char* name) {
  if (t) check_vector(*t, type, width, op, name);
}

}  // namespace

void rms_norm(const Tensor& out, const Tensor& x, const Tensor& weight, double eps) {
  normalise<Factor::kWeight>(out, x, weight, eps, "rms_norm");
}

void fused_add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  add_and_normalise<Factor::kWeight>(x, residual, weight, eps, "fused_add_rms_norm");
}

void gemma_rms_norm(const Tensor& out, const Tensor& x, const Tensor& weight, double eps) {
  normalise<Factor::kOnePlusWeight>(out, x, weight, eps, "gemma_rms_norm");
}

void gemma_fused_add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  add_and_normalise<Factor::kOnePlusWeight>(x, residual, weight, eps, "gemma_fused_add_rms_norm");
}

void layer_norm(const Tensor& out, const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                double eps) {
  constexpr const char* op = "layer_norm";
  check_same_shape(out, x, op, "out", "x");
  check_dtype(out, x.scalar_type(), op, "out");
  const Rows x_rows(x, op, "x");
  const Rows out_rows(out, op, "out");
  const int64_t width = x_rows.width();
  check_affine(weight, x.scalar_type(), width, op, "weight");
  check_affine(bias, x.scalar_type(), width, op, "bias");
  dispatch_float(x.scalar_type(), op, "x", [&](auto tag) {
    using T = decltype(tag);
    const T* in = data<T>(x);
    T* result = mutable_data<T>(out);
    const T* w = weight ? data<T>(*weight) : nullptr;
    const T* b = bias ? data<T>(*bias) : nullptr;
    parallel_ranges(x_rows.count(), width * 8, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        layer_norm_row(result + out_rows.offset(row), in + x_rows.offset(row), w, b, width, eps);
      }
    });
  });
}

}  // namespace gristmill
