// exp, exp of non-positive numbers, log and tanh over vectors, accurate to about one unit in the last place.
#pragma once

#include "common/vec.h"

namespace gristmill {

inline constexpr float kLog2e = 1.44269504088896340736f;
// ln 2 in two parts; the high one has few enough bits that n * kLn2High is exact for the n of float's range.
inline constexpr float kLn2High = 0.693145751953125f;
inline constexpr float kLn2Low = 1.42860682030941723212e-6f;

// e^x = (mantissa + mantissa_low) * 2^exponent with a mantissa in about [0.7, 1.42]. |x| must be below 2^20.
struct ExpParts {
  vf mantissa;
  vf mantissa_low;
  vi exponent;
};

inline ExpParts vexp_parts(vf x) {
  const vf n = vround(x * kLog2e);
  const vf r = vfma(n, vset1(-kLn2Low), vfma(n, vset1(-kLn2High), x));
  // Taylor series: on |r| <= ln2 / 2 the first term left out is below 2^-27.
  vf p = vfma(vset1(1.0f / 5040), r, vset1(1.0f / 720));
  p = vfma(p, r, vset1(1.0f / 120));
  p = vfma(p, r, vset1(1.0f / 24));
  p = vfma(p, r, vset1(1.0f / 6));
  p = vfma(p, r, vset1(0.5f));
  p = vfma(p * r, r, r);
  const vf mantissa = 1.0f + p;
  return {mantissa, p - (mantissa - 1.0f), vto_int(n)};
}

inline vf vpow2(vi n) { return as_float((n + 127) << 23); }

// x * 2^n in two steps, so that results in the denormal range are rounded once and large ones overflow to infinity.
inline vf vscale(vf x, vi n) {
  const vi half = n >> 1;
  return x * vpow2(half) * vpow2(n - half);
}

// e^x for x <= 0 (a NaN stays one); results below the normal range are 0.
inline vf vexp_negative(vf x) {
  const vf floor = vset1(-87.3f);
  const vf clamped = x < floor ? floor : x;
  const ExpParts e = vexp_parts(clamped);
  const vf y = e.mantissa * vpow2(e.exponent);
  return x < floor ? vzero() : y;
}

// Natural logarithm of positive normal numbers (Cephes logf).
inline vf vlog(vf x) {
  const vu bits = as_uint(x);
  // x = 2^n * m with m in [sqrt(1/2), sqrt(2))
  vi n = reinterpret_cast<vi>(bits >> 23) - 127;
  vf m = as_float((bits & 0x007fffffu) | 0x3f800000u);
  const auto large = m >= 1.41421356f;
  m = large ? m * 0.5f : m;
  n = large ? n + 1 : n;
  const vf f = m - 1.0f;
  const vf square = f * f;
  vf p = vfma(vset1(7.0376836292e-2f), f, vset1(-1.1514610310e-1f));
  p = vfma(p, f, vset1(1.1676998740e-1f));
  p = vfma(p, f, vset1(-1.2420140846e-1f));
  p = vfma(p, f, vset1(1.4249322787e-1f));
  p = vfma(p, f, vset1(-1.6668057665e-1f));
  p = vfma(p, f, vset1(2.0000714765e-1f));
  p = vfma(p, f, vset1(-2.4999993993e-1f));
  p = vfma(p, f, vset1(3.3333331174e-1f));
  const vf exponent = __builtin_convertvector(n, vf);
  const vf low = vfma(exponent, vset1(kLn2Low), vfma(square, vset1(-0.5f), square * f * p));
  return vfma(exponent, vset1(kLn2High), f + low);
}

// tanh: an odd polynomial near 0 (Cephes tanhf), 1 - 2 / (e^2x + 1) elsewhere.
inline vf vtanh(vf x) {
  const vf a = vabs(x);
  const vf s = x * x;
  vf p = vfma(vset1(-5.70498872745e-3f), s, vset1(2.06390887954e-2f));
  p = vfma(p, s, vset1(-5.37397155531e-2f));
  p = vfma(p, s, vset1(1.33314422036e-1f));
  p = vfma(p, s, vset1(-3.33332819422e-1f));
  const vf small = vfma(p * s, x, x);
  const vf e = vexp_negative(a * -2.0f);
  const vf magnitude = (1.0f - e) / (1.0f + e);
  const vf large = as_float(as_uint(magnitude) | (as_uint(x) & 0x80000000u));
  return a < 0.625f ? small : large;
}

}  // namespace gristmill
