// The element types of the kernels as plain 16-bit structs with float conversion, and the switch from a tensor's dtype
// to a type.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace gristmill {

#if !defined(__F16C__)
// The compiler's half type: aarch64 GCC has had __fp16 in C++ long before _Float16.
#if defined(__aarch64__)
using NativeHalf = __fp16;
#else
using NativeHalf = _Float16;
#endif
#endif

struct BFloat16 {
  uint16_t bits;
};

struct Half {
  uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(BFloat16 x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof(f));
  return f;
}

inline float to_float(Half x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  NativeHalf h;
  std::memcpy(&h, &x.bits, sizeof(h));
  return static_cast<float>(h);
#endif
}

template <typename T>
T from_float(float x);

template <>
inline float from_float<float>(float x) {
  return x;
}

template <>
inline BFloat16 from_float<BFloat16>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  if (x != x) return BFloat16{static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return BFloat16{static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

template <>
inline Half from_float<Half>(float x) {
  Half r;
#if defined(__F16C__)
  r.bits = static_cast<uint16_t>(_cvtss_sh(x, 0));
#else
  NativeHalf h = static_cast<NativeHalf>(x);
  std::memcpy(&r.bits, &h, sizeof(h));
#endif
  return r;
}

}  // namespace gristmill
