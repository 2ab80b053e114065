// silu(gate) * up on the CPU; the first half of a row is the gate, the second the factor.
#include <type_traits>

#include "activation/activation.h"
#include "common/parallel.h"
#include "common/vec_math.h"

namespace gristmill {
namespace {

// gate / (1 + e^-gate) * up. With e = e^-|gate| nothing overflows (below -174 the result is 0 for any sane factor; the
// bound keeps vscale exact). For gate < 0 the power of two of e is applied last, so that results keep all their bits
// down to the denormal range. The *_low parts carry the rounding errors of their namesakes to the end, where the result
// is rounded once; the 16-bit types need no such care.
template <typename T>
inline vf silu_mul(vf gate, vf up) {
  vf a = -vabs(gate);
  a = a < -174.0f ? vset1(-174.0f) : a;
  const ExpParts exp = vexp_parts(a);
  const vf e = vscale(exp.mantissa, exp.exponent);
  const vf divisor = 1.0f + e;
  const auto negative = gate < 0.0f;
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

template <typename T>
void silu_and_mul_row(T* out, const T* x, int64_t width) {
  const T* up = x + width;
  for_lanes(
      width, [&](int64_t i) { vstore(out + i, silu_mul<T>(vload(x + i), vload(up + i))); },
      [&](int64_t i, int64_t n) { vstore_n(out + i, silu_mul<T>(vload_n(x + i, n), vload_n(up + i, n)), n); });
}

}  // namespace

void silu_and_mul(const Tensor& out, const Tensor& x) {
  constexpr const char* op = "silu_and_mul";
  const Rows x_rows(x, op, "x");
  const Rows out_rows(out, op, "out");
  const int64_t width = out_rows.width();
  STD_TORCH_CHECK(x_rows.width() == 2 * width, op, ": x must be twice as wide as out (", 2 * width, "), got ",
                  x_rows.width());
  STD_TORCH_CHECK(x_rows.count() == out_rows.count(), op, ": out must have as many rows as x (", x_rows.count(),
                  "), got ", out_rows.count());
  check_dtype(out, x.scalar_type(), op, "out");
  dispatch_float(x.scalar_type(), op, "x", [&](auto tag) {
    using T = decltype(tag);
    const T* in = data<T>(x);
    T* result = mutable_data<T>(out);
    parallel_ranges(x_rows.count(), width * 8, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        silu_and_mul_row(result + out_rows.offset(row), in + x_rows.offset(row), width);
    });
  });
}

}  // namespace gristmill
