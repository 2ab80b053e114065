// The element types of the kernels as plain 16-bit structs with float conversion, on the CPU and on GPUs.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/target.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#elif defined(__F16C__)
#include <immintrin.h>
#endif

namespace gristmill {

#if !defined(__CUDACC__) && !defined(__F16C__)
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

GRISTMILL_HOST_DEVICE inline float to_float(float x) { return x; }

GRISTMILL_HOST_DEVICE inline float to_float(BFloat16 x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof(f));
  return f;
}

GRISTMILL_HOST_DEVICE inline float to_float(Half x) {
#if defined(__CUDACC__)
  return __half2float(__half(__half_raw{x.bits}));
#elif defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  NativeHalf h;
  std::memcpy(&h, &x.bits, sizeof(h));
  return static_cast<float>(h);
#endif
}

template <typename T>
GRISTMILL_HOST_DEVICE T from_float(float x);

template <>
GRISTMILL_HOST_DEVICE inline float from_float<float>(float x) {
  return x;
}

template <>
GRISTMILL_HOST_DEVICE inline BFloat16 from_float<BFloat16>(float x) {
#if defined(__CUDA_ARCH__)
  return BFloat16{__nv_bfloat16_raw(__float2bfloat16_rn(x)).x};
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  if (x != x) return BFloat16{static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return BFloat16{static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
#endif
}

template <>
GRISTMILL_HOST_DEVICE inline Half from_float<Half>(float x) {
#if defined(__CUDACC__)
  return Half{__half_raw(__float2half_rn(x)).x};
#elif defined(__F16C__)
  Half r;
  r.bits = static_cast<uint16_t>(_cvtss_sh(x, 0));
  return r;
#else
  NativeHalf h = static_cast<NativeHalf>(x);
  Half r;
  std::memcpy(&r.bits, &h, sizeof(h));
  return r;
#endif
}

}  // namespace gristmill
