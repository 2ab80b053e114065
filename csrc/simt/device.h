// The names of common/gpu.h for the emulation. Included by common/gpu.h only.
#pragma once

#include <math.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "common/dtypes.h"
#include "common/float8_scalar.h"
#include "simt/matrix.h"
#include "simt/simt.h"

namespace gristmill::gpu {

using simt::Site;

inline constexpr int kWarp = simt::kWarp;
using LaneMask = std::conditional_t<kWarp == 64, uint64_t, uint32_t>;
inline constexpr LaneMask kAllLanes = ~LaneMask{0};

inline int thread_index() {
  return static_cast<int>(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z));
}
inline int lane_index() { return thread_index() % kWarp; }
inline int warp_index() { return thread_index() / kWarp; }

inline void sync_block(const Site& site = Site::current()) { simt::sync_block(site); }
inline void sync_warp(const Site& site = Site::current()) { simt::meet(simt::Collective::kSyncWarp, nullptr, 0, site); }

// A lane that does not exist gives poison.
template <typename T>
inline T value_of_lane(const simt::Meeting& meeting, int lane) {
  if (lane < 0 || lane >= kWarp || (meeting.present >> lane & 1) == 0) return simt::poison<T>();
  T value;
  std::memcpy(static_cast<void*>(&value), meeting.values[lane], sizeof(T));
  return value;
}

template <typename T>
inline const simt::Meeting& trade(const T& value, const Site& site) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), "shuffles take numbers of 4 or 8 bytes");
  return simt::meet(simt::Collective::kShuffle, &value, sizeof(T), site);
}

template <typename T>
inline T shuffle(T value, int source, const Site& site = Site::current()) {
  return value_of_lane<T>(trade(value, site), source);
}
template <typename T>
inline T shuffle_xor(T value, int mask, const Site& site = Site::current()) {
  return value_of_lane<T>(trade(value, site), lane_index() ^ mask);
}
template <typename T>
inline T shuffle_up(T value, int delta, const Site& site = Site::current()) {
  const simt::Meeting& meeting = trade(value, site);
  return lane_index() - delta < 0 ? value : value_of_lane<T>(meeting, lane_index() - delta);
}
template <typename T>
inline T shuffle_down(T value, int delta, const Site& site = Site::current()) {
  const simt::Meeting& meeting = trade(value, site);
  return lane_index() + delta >= kWarp ? value : value_of_lane<T>(meeting, lane_index() + delta);
}
inline uint32_t warp_largest(uint32_t value, const Site& site = Site::current()) {
  const simt::Meeting& meeting = trade(value, site);
  uint32_t largest = 0;
  for (int lane = 0; lane < kWarp; ++lane) largest = std::max(largest, value_of_lane<uint32_t>(meeting, lane));
  return largest;
}
inline uint64_t ballot(bool predicate, const Site& site = Site::current()) {
  const uint32_t mine = predicate;
  const simt::Meeting& meeting = simt::meet(simt::Collective::kBallot, &mine, sizeof(mine), site);
  uint64_t lanes = 0;
  for (int lane = 0; lane < kWarp; ++lane) {
    if ((meeting.present >> lane & 1) != 0) lanes |= static_cast<uint64_t>(meeting.values[lane][0]) << lane;
  }
  return lanes;
}

// The address of the variable in the lambda tells one place, and one instance of a template, from another.
#define GRISTMILL_SHARED(Type, name, count)                                                                   \
  Type* const name = [](const ::simt::Site& site) {                                                           \
    static char place;                                                                                        \
    return static_cast<Type*>(::simt::shared_array(&place, sizeof(Type) * static_cast<size_t>(count), site)); \
  }(::simt::Site::current())

template <typename T>
inline T* dynamic_shared() {
  return static_cast<T*>(simt::dynamic_shared_memory());
}

template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  static_assert(sizeof(T) * N <= 16, "no GPU loads more than 16 bytes at once");
  T values[N];
  T& operator[](int i) { return values[i]; }
  const T& operator[](int i) const { return values[i]; }
};
template <int N, typename T>
inline Pack<T, N> load_pack(const T* from, const Site& site = Site::current()) {
  simt::check_alignment(from, sizeof(Pack<T, N>), "a pack is loaded", site);
  return *reinterpret_cast<const Pack<T, N>*>(from);
}
template <int N, typename T>
inline void store_pack(T* to, const Pack<T, N>& pack, const Site& site = Site::current()) {
  simt::check_alignment(to, sizeof(Pack<T, N>), "a pack is stored", site);
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}
template <int N, typename T>
inline Pack<T, N> load_pack_once(const T* from, const Site& site = Site::current()) {
  static_assert(sizeof(Pack<T, N>) == 16);
  return load_pack<N>(from, site);
}
template <typename T, int N>
inline void keep_packed(Pack<T, N>&) {}

inline void copy_async_16(void* shared, const void* global, bool present = true, const Site& site = Site::current()) {
  simt::copy_async_16(shared, global, present, site);
}
inline void copy_async_commit() { simt::copy_async_commit(); }
template <int N>
inline void copy_async_wait() {
  simt::copy_async_wait(N);
}

#if GRISTMILL_SIMT_WARP == 32
#define GRISTMILL_HAS_MMA 1
inline void load_matrix_4(uint32_t (&r)[4], const void* row, const Site& site = Site::current()) {
  simt::load_matrix_4(r, row, site);
}
inline void load_matrix_4_transposed(uint32_t (&r)[4], const void* row, const Site& site = Site::current()) {
  simt::load_matrix_4_transposed(r, row, site);
}
template <typename T>
inline void multiply_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                             const Site& site = Site::current()) {
  static_assert(std::is_same_v<T, BFloat16> || std::is_same_v<T, Half>);
  simt::multiply_16x8x16(d, a, b0, b1, std::is_same_v<T, Half>, site);
}
template <typename T>
inline uint32_t pack_two(float low, float high) {
  return static_cast<uint32_t>(from_float<T>(low).bits) | static_cast<uint32_t>(from_float<T>(high).bits) << 16;
}
#endif

template <Float8 T>
inline uint16_t pack_two_float8(float low, float high) {
  return static_cast<uint16_t>(to_float8<T>(low).bits | to_float8<T>(high).bits << 8);
}

inline int round_to_int(float x) { return x == x ? static_cast<int>(rintf(x)) : 0; }

inline uint32_t pack_four_int8(int a, int b, int c, int d) {
  return static_cast<uint32_t>((a & 0xff) | (b & 0xff) << 8 | (c & 0xff) << 16) | static_cast<uint32_t>(d) << 24;
}

// Flushes what is below the normal numbers to zero, as the instruction does.
inline float exp2_fast(float x) {
  const float y = exp2f(x);
  return y < 0x1p-126f ? 0.0f : y;
}

inline void wait_for_previous_kernel() {}  // launches run one after another
inline void start_next_kernel() {}
inline void follow_previous_kernel() {}

inline int atomic_add(int* at, int value) {
  const int before = *at;
  *at += value;
  return before;
}
inline uint32_t atomic_add(uint32_t* at, uint32_t value) {
  const uint32_t before = *at;
  *at += value;
  return before;
}

inline uint64_t atomic_add(uint64_t* at, uint64_t value) {
  const uint64_t before = *at;
  *at += value;
  return before;
}

// CUDA has these at global scope.
template <typename A, typename B>
  requires std::is_arithmetic_v<A> && std::is_arithmetic_v<B>
inline std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmin(static_cast<T>(a), static_cast<T>(b));
  return std::min(static_cast<T>(a), static_cast<T>(b));
}
template <typename A, typename B>
  requires std::is_arithmetic_v<A> && std::is_arithmetic_v<B>
inline std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmax(static_cast<T>(a), static_cast<T>(b));
  return std::max(static_cast<T>(a), static_cast<T>(b));
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __popcll(uint64_t x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(int64_t x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<uint32_t>(x)); }
inline int __clzll(int64_t x) { return x == 0 ? 64 : __builtin_clzll(static_cast<uint64_t>(x)); }
inline uint32_t __float_as_uint(float x) { return std::bit_cast<uint32_t>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }
inline float __uint_as_float(uint32_t x) { return std::bit_cast<float>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }

}  // namespace gristmill::gpu
