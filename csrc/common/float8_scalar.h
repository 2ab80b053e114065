// The 8-bit floats one at a time, for GPU kernels: the same numbers as common/float8.h gives a vector at a time.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/dtypes.h"
#include "common/float8_format.h"
#include "common/target.h"

namespace gristmill {

GRISTMILL_HOST_DEVICE inline uint32_t float_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

GRISTMILL_HOST_DEVICE inline float bits_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

template <Float8 T>
GRISTMILL_HOST_DEVICE inline float to_float(T value) {
  const uint32_t code = value.bits;
  const uint32_t x = code & 0x7fu;
  // Below 2^kMantissa the code counts the smallest number there is.
  constexpr float unit = 1.0f / static_cast<float>(int64_t{1} << (T::kBias - 1 + T::kMantissa));
  uint32_t bits = x < (1u << T::kMantissa) ? float_bits(static_cast<float>(x) * unit)
                                           : (x << (23 - T::kMantissa)) + (static_cast<uint32_t>(127 - T::kBias) << 23);
  if constexpr (T::kTop == Float8Top::kOneNan) bits = x == 0x7fu ? bits | 0x7fc00000u : bits;
  if constexpr (T::kTop == Float8Top::kInfinity) bits = x >= 0x7cu ? bits | 0x7f800000u : bits;
  bits |= (code & 0x80u) << 24;
  if constexpr (T::kTop == Float8Top::kNegativeZero) bits = code == 0x80u ? 0x7fc00000u : bits;
  return bits_float(bits);
}

// Rounds to nearest even; what lies beyond the largest number, infinities included, saturates; a NaN stays one.
template <Float8 T>
GRISTMILL_HOST_DEVICE inline T to_float8(float value) {
  const uint32_t sign = (float_bits(value) >> 24) & 0x80u;
  if (value != value) {
    return T{static_cast<uint8_t>(T::kTop == Float8Top::kNegativeZero ? 0x80u : sign | 0x7fu)};
  }
  const float all = std::fabs(value);
  const float magnitude = all > T::kLargest ? T::kLargest : all;
  const uint32_t a = float_bits(magnitude);
  constexpr int shift = 23 - T::kMantissa;
  constexpr uint32_t offset = static_cast<uint32_t>(127 - T::kBias) << T::kMantissa;
  constexpr float units = static_cast<float>(int64_t{1} << (T::kBias - 1 + T::kMantissa));
  const bool is_small = a < (static_cast<uint32_t>(128 - T::kBias) << 23);
  const uint32_t normal = ((a + ((1u << (shift - 1)) - 1) + ((a >> shift) & 1u)) >> shift) - offset;
  const uint32_t x = is_small ? static_cast<uint32_t>(std::rint(magnitude * units)) : normal;
  if (T::kTop == Float8Top::kNegativeZero && x == 0) return T{0};
  return T{static_cast<uint8_t>(x | sign)};
}

}  // namespace gristmill
