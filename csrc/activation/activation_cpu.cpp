// Gated activations on the CPU. The first half of a row is the gate, the second the factor; in swiglu_oai they
// alternate.
#include <cstring>
#include <type_traits>

#include "activation/activation.h"
#include "common/parallel.h"
#include "common/vec_math.h"

namespace gristmill {
namespace {

// gate / (1 + e^-s) * up. With e = e^-|s| nothing overflows (below -174 the result is 0 for any sane factor; the
// bound keeps vscale exact). For s < 0 the power of two of e is applied last, so that results keep all their bits
// down to the denormal range. The *_low parts carry the rounding errors of their namesakes to the end, where the result
// is rounded once; the 16-bit types need no such care.
template <typename T>
inline vf sigmoid_mul(vf gate, vf s, vf up) {
  vf a = -vabs(s);
  a = a < -174.0f ? vset1(-174.0f) : a;
  const ExpParts exp = vexp_parts(a);
  const vf e = vscale(exp.mantissa, exp.exponent);
  const vf divisor = 1.0f + e;
  const auto negative = s < 0.0f;
  const vi exponent = negative ? exp.exponent : vi{};
  const vf product = gate * exp.mantissa;
  if constexpr (!std::is_same_v<T, float>) return vscale((negative ? product : gate) / divisor * up, exponent);
  const vf divisor_low = e - (divisor - 1.0f);
  const vf product_low = vfma(gate, exp.mantissa_low, vfma(gate, exp.mantissa, -product));
  const vf numerator = negative ? product : gate;
  const vf numerator_low = negative ? product_low : vzero();
  const vf inverse = 1.0f / divisor;
  const vf quotient = numerator * inverse;
  const vf rest = vfma(-quotient, divisor_low, vfma(-quotient, divisor, numerator) + numerator_low);
  const vf quotient_low = rest * inverse;
  return vscale(vfma(quotient, up, quotient_low * up), exponent);
}

struct Silu {
  template <typename T>
  static vf apply(vf gate, vf up) {
    return sigmoid_mul<T>(gate, gate, up);
  }
};

// gate / 2 * (1 + tanh(y)) = gate / (1 + e^-2y) with y = sqrt(2 / pi) * (gate + 0.044715 * gate^3).
struct GeluTanh {
  template <typename T>
  static vf apply(vf gate, vf up) {
    constexpr float two_y = 1.5957691216057308f, cubic = 1.5957691216057308f * 0.044715f;
    return sigmoid_mul<T>(gate, gate * vfma(vset1(cubic), gate * gate, vset1(two_y)), up);
  }
};

// Phi(-a) * e^(a^2 / 2) for a in [0, 19], Phi being the normal distribution function: an own least-squares fit to
// 2.3 * 2^-24 in float arithmetic, a polynomial in (a - 4) / (a + 4) over 1 + a.
inline vf mills(vf a) {
  const vf u = (a - 4.0f) / (a + 4.0f);
  vf p = vfma(vset1(-7.453208200e-05f), u, vset1(-6.736325430e-05f));
  p = vfma(p, u, vset1(6.901600431e-04f));
  p = vfma(p, u, vset1(-2.998579721e-04f));
  p = vfma(p, u, vset1(-5.001692834e-03f));
  p = vfma(p, u, vset1(1.793956867e-02f));
  p = vfma(p, u, vset1(-3.219789802e-02f));
  p = vfma(p, u, vset1(2.860000513e-02f));
  p = vfma(p, u, vset1(1.399964120e-02f));
  p = vfma(p, u, vset1(-9.670346673e-02f));
  p = vfma(p, u, vset1(4.720532064e-01f));
  return p / (1.0f + a);
}

// gate * Phi(gate) * up. For gate < 0 the small factor Phi(-|gate|) is a product, never a difference, so its relative
// error stays small; what e^(-a^2 / 2) loses to the rounding of a^2 is put back. Beyond 18.6 the result is 0 for any
// sane factor.
struct Gelu {
  template <typename T>
  static vf apply(vf gate, vf up) {
    const vf a = vmin(vabs(gate), vset1(18.6f));
    const vf square = a * a;
    const vf square_low = vfma(a, a, -square);
    const ExpParts exp = vexp_parts(square * -0.5f);
    const vf mantissa = vfma(exp.mantissa, square_low * -0.5f, exp.mantissa) * mills(a);
    const auto negative = gate < 0.0f;
    const vf tail = vscale(mantissa, exp.exponent);
    return negative ? vscale(gate * mantissa * up, exp.exponent) : gate * (1.0f - tail) * up;
  }
};

template <typename Gate, typename T>
void gated_row(T* out, const T* x, int64_t width) {
  const T* up = x + width;
  for_lanes(
      width, [&](int64_t i) { vstore(out + i, Gate::template apply<T>(vload(x + i), vload(up + i))); },
      [&](int64_t i, int64_t n) {
        vstore_n(out + i, Gate::template apply<T>(vload_n(x + i, n), vload_n(up + i, n)), n);
      });
}

// Pairs (gate, up); a comparison with NaN is false, so a NaN passes through the bounds.
template <typename T>
inline vf swiglu(vf gate, vf up, float alpha, float limit) {
  const vf most = vset1(limit);
  gate = gate > most ? most : gate;
  up = up > most ? most : up;
  up = up < -most ? -most : up;
  return sigmoid_mul<T>(gate, gate * alpha, up + 1.0f);
}

template <typename T>
void swiglu_oai_row(T* out, const T* x, int64_t width, float alpha, float limit) {
  for_lanes(
      width,
      [&](int64_t i) {
        const vf low = vload(x + 2 * i), high = vload(x + 2 * i + kLanes);
        vstore(out + i, swiglu<T>(veven(low, high), vodd(low, high), alpha, limit));
      },
      [&](int64_t i, int64_t n) {
        T lanes[2 * kLanes] = {};
        std::memcpy(lanes, x + 2 * i, static_cast<size_t>(2 * n) * sizeof(T));
        const vf low = vload(lanes), high = vload(lanes + kLanes);
        vstore_n(out + i, swiglu<T>(veven(low, high), vodd(low, high), alpha, limit), n);
      });
}

// row(result, in, width) for every row of x.
template <typename F>
void for_gated_rows(const Tensor& out, const Tensor& x, const char* op, const F& row_function) {
  const GatedRows rows(out, x, op);
  const int64_t width = rows.out.width();
  dispatch_float(x.scalar_type(), op, "x", [&](auto tag) {
    using T = decltype(tag);
    const T* in = data<T>(x);
    T* result = mutable_data<T>(out);
    parallel_ranges(rows.x.count(), width * 8, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        row_function(result + rows.out.offset(row), in + rows.x.offset(row), width);
    });
  });
}

}  // namespace

void silu_and_mul(const Tensor& out, const Tensor& x) {
  for_gated_rows(out, x, "silu_and_mul", [](auto* to, const auto* from, int64_t n) { gated_row<Silu>(to, from, n); });
}

void gelu_and_mul(const Tensor& out, const Tensor& x) {
  for_gated_rows(out, x, "gelu_and_mul", [](auto* to, const auto* from, int64_t n) { gated_row<Gelu>(to, from, n); });
}

void gelu_tanh_and_mul(const Tensor& out, const Tensor& x) {
  for_gated_rows(out, x, "gelu_tanh_and_mul",
                 [](auto* to, const auto* from, int64_t n) { gated_row<GeluTanh>(to, from, n); });
}

void swiglu_oai(const Tensor& out, const Tensor& x, double alpha, double limit) {
  constexpr const char* op = "swiglu_oai";
  STD_TORCH_CHECK(limit >= 0, op, ": limit must be at least 0, got ", limit);
  for_gated_rows(out, x, op, [&](auto* to, const auto* from, int64_t n) {
    swiglu_oai_row(to, from, n, static_cast<float>(alpha), static_cast<float>(limit));
  });
}

}  // namespace gristmill
