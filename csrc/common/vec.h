// One float vector of the widest kind the compile flags allow, with the few operations the kernels use.
// Everything that depends on the instruction set lives here; the kernels are written against `vf` and `kLanes`.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/dtypes.h"

#if defined(__x86_64__) && !defined(GRISTMILL_ISA_GENERIC)
#include <immintrin.h>
#endif

namespace gristmill {

#if defined(__AVX512F__) && !defined(GRISTMILL_ISA_GENERIC)
#define GRISTMILL_AVX512 1
inline constexpr int kLanes = 16;
#elif defined(__AVX2__) && !defined(GRISTMILL_ISA_GENERIC)
#define GRISTMILL_AVX2 1
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif

// Compiler vectors: arithmetic, comparison and ?: work lane by lane on GCC and Clang.
typedef float vf __attribute__((vector_size(4 * kLanes)));
typedef int32_t vi __attribute__((vector_size(4 * kLanes)));
typedef uint32_t vu __attribute__((vector_size(4 * kLanes)));
typedef uint16_t vu16 __attribute__((vector_size(2 * kLanes)));
// Half as many lanes of double: the accumulator of sums that must not lose bits.
typedef double vd __attribute__((vector_size(4 * kLanes)));
typedef float vf_half __attribute__((vector_size(2 * kLanes)));

inline vf vset1(float x) { return x - vf{}; }  // x - 0 folds to a broadcast
inline vf vzero() { return vf{}; }
inline vi as_int(vf x) { return reinterpret_cast<vi>(x); }
inline vu as_uint(vf x) { return reinterpret_cast<vu>(x); }
inline vf as_float(vi x) { return reinterpret_cast<vf>(x); }
inline vf as_float(vu x) { return reinterpret_cast<vf>(x); }

// a * b + c with one rounding.
inline vf vfma(vf a, vf b, vf c) {
#if defined(GRISTMILL_AVX512)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(GRISTMILL_AVX2)
  return _mm256_fmadd_ps(a, b, c);
#else
  vf r = {};
  for (int i = 0; i < kLanes; ++i) {
#if defined(__FMA__) || defined(__aarch64__)
    r[i] = __builtin_fmaf(a[i], b[i], c[i]);
#else
    // The product of two floats is exact in double, so this is an fma but for a rare double rounding.
    r[i] = static_cast<float>(static_cast<double>(a[i]) * static_cast<double>(b[i]) + static_cast<double>(c[i]));
#endif
  }
  return r;
#endif
}

inline float fma1(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return static_cast<float>(static_cast<double>(a) * static_cast<double>(b) + static_cast<double>(c));
#endif
}

// The larger of two; where b is NaN the result is b, where a is NaN it is b.
inline vf vmax(vf a, vf b) { return a > b ? a : b; }
inline vf vmin(vf a, vf b) { return a < b ? a : b; }
inline vf vabs(vf a) { return as_float(as_uint(a) & 0x7fffffffu); }

// maskz forms: the plain ones of GCC 12 draw false -Wmaybe-uninitialized warnings.
inline vf vround(vf x) {
#if defined(GRISTMILL_AVX512)
  return _mm512_maskz_roundscale_ps(0xffff, x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(GRISTMILL_AVX2)
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  vf r = {};
  for (int i = 0; i < kLanes; ++i) r[i] = __builtin_rintf(x[i]);
  return r;
#endif
}

inline vi vto_int(vf x) {
#if defined(GRISTMILL_AVX512)
  return reinterpret_cast<vi>(_mm512_maskz_cvtps_epi32(0xffff, x));
#elif defined(GRISTMILL_AVX2)
  return reinterpret_cast<vi>(_mm256_cvtps_epi32(x));
#else
  return __builtin_convertvector(x, vi);
#endif
}

// Lane sums in a fixed tree, so a result depends on the library's width only.
inline float vsum(vf x) {
  float lane[kLanes];
  std::memcpy(lane, &x, sizeof(x));
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  }
  return lane[0];
}

inline double vsum(vd x) {
  double sum = 0;
  for (int i = 0; i < kLanes / 2; ++i) sum += x[i];
  return sum;
}

// The largest lane that is no NaN; -inf when there is none.
inline float vhmax(vf x) {
  float best = -INFINITY;
  for (int i = 0; i < kLanes; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

// Whether any lane is nonzero.
inline bool vany(vi x) {
#if defined(GRISTMILL_AVX512)
  const __m512i bits = reinterpret_cast<__m512i>(x);
  return _mm512_test_epi32_mask(bits, bits) != 0;
#elif defined(GRISTMILL_AVX2)
  const __m256i bits = reinterpret_cast<__m256i>(x);
  return !_mm256_testz_si256(bits, bits);
#else
  int32_t any = 0;
  for (int i = 0; i < kLanes; ++i) any |= x[i];
  return any != 0;
#endif
}

inline vd vlow_double(vf x) {
  vf_half h;
  std::memcpy(&h, &x, sizeof(h));
  return __builtin_convertvector(h, vd);
}

inline vd vhigh_double(vf x) {
  vf_half h;
  std::memcpy(&h, reinterpret_cast<const char*>(&x) + sizeof(h), sizeof(h));
  return __builtin_convertvector(h, vd);
}

// Loads of kLanes elements, converted to float. Pointers need no alignment beyond the element's.
inline vf vload(const float* p) {
  vf v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

inline vf vload(const BFloat16* p) {
  vu16 v;
  std::memcpy(&v, p, sizeof(v));
  return as_float(__builtin_convertvector(v, vu) << 16);
}

inline vf vload(const Half* p) {
#if defined(GRISTMILL_AVX512)
  return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(GRISTMILL_AVX2)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  vf v;
  for (int i = 0; i < kLanes; ++i) v[i] = to_float(p[i]);
  return v;
#endif
}

// Elements 0, 2, 4, ... and 1, 3, 5, ... of the pair (low, high).
inline vf veven(vf low, vf high) {
#if defined(GRISTMILL_AVX512)
  return _mm512_permutex2var_ps(low, _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
                                high);
#elif defined(GRISTMILL_AVX2)
  const __m256 crossed = _mm256_shuffle_ps(low, high, 0x88);
  return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(crossed), 0xd8));
#else
  vf r;
  for (int i = 0; i < kLanes / 2; ++i) {
    r[i] = low[2 * i];
    r[kLanes / 2 + i] = high[2 * i];
  }
  return r;
#endif
}

inline vf vodd(vf low, vf high) {
#if defined(GRISTMILL_AVX512)
  return _mm512_permutex2var_ps(low, _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31),
                                high);
#elif defined(GRISTMILL_AVX2)
  const __m256 crossed = _mm256_shuffle_ps(low, high, 0xdd);
  return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(crossed), 0xd8));
#else
  vf r;
  for (int i = 0; i < kLanes / 2; ++i) {
    r[i] = low[2 * i + 1];
    r[kLanes / 2 + i] = high[2 * i + 1];
  }
  return r;
#endif
}

inline void vstore(float* p, vf v) { std::memcpy(p, &v, sizeof(v)); }

// Round to nearest even; a NaN stays a quiet NaN. (vcvtneps2bf16 is not used: it flushes denormals.)
inline void vstore(BFloat16* p, vf v) {
  vu bits = as_uint(v);
  vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  rounded = (v != v) ? ((bits >> 16) | 0x40u) : rounded;
  vu16 out = __builtin_convertvector(rounded, vu16);
  std::memcpy(p, &out, sizeof(out));
}

inline void vstore(Half* p, vf v) {
#if defined(GRISTMILL_AVX512)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(GRISTMILL_AVX2)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kLanes; ++i) p[i] = from_float<Half>(v[i]);
#endif
}

// The first n < kLanes elements; the other lanes are 0 and their memory is not touched.
template <typename T>
inline vf vload_n(const T* p, int64_t n) {
  T lane[kLanes] = {};
  std::memcpy(lane, p, static_cast<size_t>(n) * sizeof(T));
  return vload(lane);
}

template <typename T>
inline void vstore_n(T* p, vf v, int64_t n) {
  T lane[kLanes];
  vstore(lane, v);
  std::memcpy(p, lane, static_cast<size_t>(n) * sizeof(T));
}

// f(offset, load, store) style loops are spelled out in the kernels; this walks [0, n) in whole vectors plus one
// partial one.
template <typename F, typename G>
inline void for_lanes(int64_t n, F&& whole, G&& partial) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) whole(i);
  if (i < n) partial(i, n - i);
}

}  // namespace gristmill
