// What a GPU thread makes of a pack of elements: their quotients by a scale, rounded to 8 bits.
#pragma once

#include "common/float8_scalar.h"
#include "common/gpu_rows.h"
#include "quant/problem.h"
#include "quant/quotient.h"

namespace gristmill::gpu {

// Rounds to nearest even; what lies beyond 127, infinities included, saturates; a NaN becomes 0.
__device__ inline Int8 to_int8(float x) {
  const float bounded = fminf(fmaxf(x, -Int8::kLargest), Int8::kLargest);
  // 1.5 * 2^23: the last bit of the sum is worth 1.
  const uint32_t sum = float_bits(bounded + 0x1.8p23f);
  return Int8{static_cast<int8_t>(x == x ? sum & 0xffu : 0u)};
}

template <typename To, int N>
__device__ inline Pack<To, N> rounded(const float (&x)[N]) {
  Pack<To, N> codes;
  if constexpr (Float8<To>) {
    uint16_t pairs[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) pairs[i] = pack_two_float8<To>(x[2 * i], x[2 * i + 1]);
    memcpy(&codes, pairs, sizeof(codes));
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) codes[i] = to_int8(x[i]);
  }
  return codes;
}

// `multiplies`: as the divisor says of the largest magnitude in the pack.
template <typename To, typename From, int N>
__device__ inline Pack<To, N> quotients(const Pack<From, N>& pack, const Divisor& by, bool multiplies) {
  float x[N];
  to_floats(pack, x);
  if (multiplies) {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = by.quotient(x[i]);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = by.divided(x[i]);
  }
  return rounded<To>(x);
}

// The largest magnitude in a pack, or `largest` if that is larger. kFinite: among the finite values. fmaxf passes over
// NaN, which an infinity times 0 is too.
template <bool kFinite, typename From, int N>
__device__ inline float largest_magnitude(const Pack<From, N>& pack, float largest) {
  float x[N];
  to_floats(pack, x);
#pragma unroll
  for (int i = 0; i < N; ++i) largest = fmaxf(largest, kFinite ? fmaf(x[i], 0.0f, fabsf(x[i])) : fabsf(x[i]));
  return largest;
}

}  // namespace gristmill::gpu
