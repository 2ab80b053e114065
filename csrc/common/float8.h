// The 8-bit floats of KV caches a vector at a time: exact conversion to float and rounding conversion from it, in
// integer arithmetic and normal numbers only (so a thread that flushes denormals computes the same).
#pragma once

#include <cstdint>
#include <cstring>

#include "common/float8_format.h"
#include "common/vec.h"

namespace gristmill {

typedef uint8_t vu8 __attribute__((vector_size(kLanes)));

// kLanes bytes as 32-bit lanes; GCC 12 converts 8-bit vectors one element at a time.
inline vu load_bytes(const uint8_t* p) {
#if defined(GRISTMILL_AVX512)
  return reinterpret_cast<vu>(_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(GRISTMILL_AVX2)
  return reinterpret_cast<vu>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  vu8 bytes;
  std::memcpy(&bytes, p, sizeof(bytes));
  return __builtin_convertvector(bytes, vu);
#endif
}

template <Float8 T>
inline vf vload(const T* p) {
  const vu code = load_bytes(&p->bits);
  const vu x = code & 0x7fu;
  // Below 2^kMantissa the code counts the smallest number there is.
  constexpr float unit = 1.0f / static_cast<float>(int64_t{1} << (T::kBias - 1 + T::kMantissa));
  const vu small = as_uint(__builtin_convertvector(reinterpret_cast<vi>(x), vf) * unit);
  const vu normal = (x << (23 - T::kMantissa)) + (static_cast<uint32_t>(127 - T::kBias) << 23);
  vu bits = x < (1u << T::kMantissa) ? small : normal;
  if constexpr (T::kTop == Float8Top::kOneNan) bits = x == 0x7fu ? bits | 0x7fc00000u : bits;
  if constexpr (T::kTop == Float8Top::kInfinity) bits = x >= 0x7cu ? bits | 0x7f800000u : bits;
  bits |= (code & 0x80u) << 24;
  if constexpr (T::kTop == Float8Top::kNegativeZero) bits = code == 0x80u ? vu{} + 0x7fc00000u : bits;
  return as_float(bits);
}

// Rounds to nearest even; what lies beyond the largest number, infinities included, saturates; a NaN stays one.
template <Float8 T>
inline void vstore(T* p, vf v) {
  const vu all = as_uint(v);
  const vu sign = (all >> 24) & 0x80u;
  const vf limit = vset1(T::kLargest);
  const vf magnitude = vabs(v) > limit ? limit : vabs(v);
  const vu a = as_uint(magnitude);
  constexpr int shift = 23 - T::kMantissa;
  constexpr uint32_t offset = static_cast<uint32_t>(127 - T::kBias) << T::kMantissa;
  const vu normal = ((a + ((1u << (shift - 1)) - 1) + ((a >> shift) & 1u)) >> shift) - offset;
  constexpr float units = static_cast<float>(int64_t{1} << (T::kBias - 1 + T::kMantissa));
  const auto is_small = a < (static_cast<uint32_t>(128 - T::kBias) << 23);
  const vu small = reinterpret_cast<vu>(vto_int(vround((is_small ? magnitude : vzero()) * units)));
  const vu x = is_small ? small : normal;
  vu code = x | sign;
  if constexpr (T::kTop == Float8Top::kNegativeZero) {
    code = x == 0u ? x : code;
    code = v != v ? vu{} + 0x80u : code;
  } else {
    code = v != v ? sign | 0x7fu : code;
  }
#if defined(GRISTMILL_AVX512)
  const __m128i bytes = _mm512_maskz_cvtepi32_epi8(0xffff, reinterpret_cast<__m512i>(code));
#else
  const vu8 bytes = __builtin_convertvector(code, vu8);
#endif
  std::memcpy(p, &bytes, sizeof(bytes));
}

}  // namespace gristmill
