// What a GPU thread makes of a pack of elements: their quotients by a scale, rounded to 8 bits.
#pragma once

#include "common/float8_scalar.h"
#include "common/gpu_rows.h"
#include "quant/problem.h"
#include "quant/quotient.h"

namespace gristmill::gpu {

// Rounds to nearest even; what lies beyond 127, infinities included, saturates; a NaN becomes 0. kBounded: nothing
// rounds to more than 127.
template <bool kBounded>
__device__ inline int to_int8(float x) {
  if constexpr (kBounded) return round_to_int(x);
  return round_to_int(x > Int8::kLargest ? Int8::kLargest : (x < -Int8::kLargest ? -Int8::kLargest : x));
}

// Four codes as a word.
template <typename To, bool kBounded>
__device__ inline uint32_t rounded(float a, float b, float c, float d) {
  if constexpr (Float8<To>) {
    return pack_two_float8<To>(a, b) | static_cast<uint32_t>(pack_two_float8<To>(c, d)) << 16;
  } else {
    return pack_four_int8(to_int8<kBounded>(a), to_int8<kBounded>(b), to_int8<kBounded>(c), to_int8<kBounded>(d));
  }
}

// The codes of a pack as words, which is how they are stored: taken as bytes, the compiler would part and join them.
// kMultiplies: as the divisor says of the largest magnitude in the pack. Quotients by a scale of int8 are then bounded,
// since that was made of a magnitude at least as large.
template <typename To, bool kMultiplies, typename From, int N>
__device__ inline Pack<uint32_t, N / 4> quotients(const Pack<From, N>& pack, const Divisor& by) {
  float x[N];
  to_floats(pack, x);
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = kMultiplies ? by.quotient(x[i]) : by.divided(x[i]);
  Pack<uint32_t, N / 4> words;
#pragma unroll
  for (int i = 0; i < N; i += 4) words[i / 4] = rounded<To, kMultiplies>(x[i], x[i + 1], x[i + 2], x[i + 3]);
  return words;
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
