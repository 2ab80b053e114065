// The device side that every .cu file is written against, once for CUDA, for HIP (hipified) and for the CPU emulation
// of csrc/simt: warps of either width, shared memory, barriers, vector memory accesses, asynchronous copies and the
// tensor cores' products. Kernels use these names only; vendor intrinsics and inline assembly stay in this file.
//
// Under the emulation (GRISTMILL_SIMT) csrc/simt/device.h defines the same names.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/dtypes.h"
#include "common/float8_scalar.h"
#include "common/target.h"

#if defined(GRISTMILL_SIMT)
#include "simt/device.h"
#else

#include <cuda_runtime.h>

namespace gristmill::gpu {

// Threads that run in step: 32, on AMD's data-centre GPUs 64.
#if defined(__HIPCC__) && defined(__GFX9__)
inline constexpr int kWarp = 64;
#else
inline constexpr int kWarp = 32;
#endif

#if defined(__HIPCC__)
using LaneMask = uint64_t;
#else
using LaneMask = uint32_t;
#endif
inline constexpr LaneMask kAllLanes = ~LaneMask{0};

__device__ inline int thread_index() {
  return static_cast<int>(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z));
}
__device__ inline int lane_index() { return thread_index() % kWarp; }
__device__ inline int warp_index() { return thread_index() / kWarp; }

// All threads of the block, or all lanes of the warp, must come here together. Both order shared memory.
__device__ inline void sync_block() { __syncthreads(); }
__device__ inline void sync_warp() { __syncwarp(); }

// Exchanges within a warp; all lanes must take part. T has 4 or 8 bytes.
template <typename T>
__device__ inline T shuffle(T value, int source) {
  return __shfl_sync(kAllLanes, value, source, kWarp);
}
template <typename T>
__device__ inline T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(kAllLanes, value, mask, kWarp);
}
// The value of the lane `delta` below (above); lanes without such a neighbour keep their own.
template <typename T>
__device__ inline T shuffle_up(T value, int delta) {
  return __shfl_up_sync(kAllLanes, value, static_cast<unsigned>(delta), kWarp);
}
template <typename T>
__device__ inline T shuffle_down(T value, int delta) {
  return __shfl_down_sync(kAllLanes, value, static_cast<unsigned>(delta), kWarp);
}
// The largest of the lanes' numbers, in every lane.
__device__ inline uint32_t warp_largest(uint32_t value) {
#if defined(__CUDA_ARCH__)
  return __reduce_max_sync(kAllLanes, value);
#else
  for (int mask = 1; mask < kWarp; mask *= 2) {
    const uint32_t other = shuffle_xor(value, mask);
    value = other > value ? other : value;
  }
  return value;
#endif
}
// Bit i is lane i's predicate.
__device__ inline uint64_t ballot(bool predicate) { return __ballot_sync(kAllLanes, predicate); }

// Shared memory of a fixed size: GRISTMILL_SHARED(float, sums, 32) declares `float* sums`, one array per block and
// place.
#define GRISTMILL_SHARED(Type, name, count)             \
  __shared__ __align__(16) Type name##_storage_[count]; \
  Type* const name = name##_storage_

// The block's dynamic shared memory, as large as the launch asked for, aligned to 128 bytes.
template <typename T>
__device__ inline T* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char gristmill_dynamic_shared[];
  return reinterpret_cast<T*>(gristmill_dynamic_shared);
}

// N elements that are loaded and stored at once; addresses must be multiples of sizeof(T) * N (1 to 16 bytes).
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T values[N];
  __device__ T& operator[](int i) { return values[i]; }
  __device__ const T& operator[](int i) const { return values[i]; }
};
// The type that the hardware moves so many bytes as. Without it the compiler may move the elements of a pack one by
// one.
template <int kBytes>
using Raw =
    std::conditional_t<kBytes == 16, uint4,
                       std::conditional_t<kBytes == 8, uint2,
                                          std::conditional_t<kBytes == 4, uint32_t,
                                                             std::conditional_t<kBytes == 2, uint16_t, uint8_t> > > >;
template <int N, typename T>
__device__ inline Pack<T, N> load_pack(const T* from) {
  const auto raw = *reinterpret_cast<const Raw<sizeof(T) * N>*>(from);
  Pack<T, N> pack;
  memcpy(&pack, &raw, sizeof(pack));
  return pack;
}
template <int N, typename T>
__device__ inline void store_pack(T* to, const Pack<T, N>& pack) {
  Raw<sizeof(T) * N> raw;
  memcpy(&raw, &pack, sizeof(raw));
  *reinterpret_cast<Raw<sizeof(T) * N>*>(to) = raw;
}
// For data read once: through the read-only path, without keeping it in the first-level cache. 16 bytes.
template <int N, typename T>
__device__ inline Pack<T, N> load_pack_once(const T* from) {
#if defined(__CUDA_ARCH__)
  static_assert(sizeof(Pack<T, N>) == 16);
  uint4 raw;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
               : "l"(from));
  return *reinterpret_cast<Pack<T, N>*>(&raw);
#else
  return load_pack<N>(from);
#endif
}

// Between two uses of a pack of 16 bytes: the second one unpacks it again. Without this the compiler may hold the
// unpacked elements from the first one on, in twice the registers.
template <typename T, int N>
__device__ inline void keep_packed(Pack<T, N>& pack) {
  static_assert(sizeof(pack) == 16);
#if defined(__CUDA_ARCH__)
  uint4 raw;
  memcpy(&raw, &pack, sizeof(raw));
  asm volatile("" : "+r"(raw.x), "+r"(raw.y), "+r"(raw.z), "+r"(raw.w));
  memcpy(&pack, &raw, sizeof(raw));
#endif
}

// Asynchronous copies of 16 bytes from global to shared memory, both aligned to 16. Without `present` nothing is read
// and zeros are written. A thread's copies since its last commit form a group; wait<N> returns when all but the N
// latest groups of this thread have arrived, and other threads see them after the next barrier.
__device__ inline uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}
__device__ inline void copy_async_16(void* shared, const void* global, bool present = true) {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(present ? 16 : 0)
               : "memory");
#else
  *reinterpret_cast<uint4*>(shared) = present ? *reinterpret_cast<const uint4*>(global) : uint4{0, 0, 0, 0};
#endif
}
__device__ inline void copy_async_commit() {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int N>
__device__ inline void copy_async_wait() {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// Tensor-core products of a warp of 32. Fragments as PTX defines them for ldmatrix and mma.sync.m16n8k16.
#if !defined(__HIPCC__)
#define GRISTMILL_HAS_MMA 1
// Loads four 8x8 matrices of 16-bit elements: lane i gives the address of row i % 8 of matrix i / 8.
__device__ inline void load_matrix_4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}
__device__ inline void load_matrix_4_transposed(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}
// d += a b, a 16x16, b 16x8, both of T (BFloat16 or Half), d float32.
template <typename T>
__device__ inline void multiply_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static_assert(std::is_same_v<T, BFloat16> || std::is_same_v<T, Half>);
  if constexpr (std::is_same_v<T, BFloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}
// Two floats rounded to T, the first in the low half.
template <typename T>
__device__ inline uint32_t pack_two(float low, float high) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&both);
  } else {
    const __half2 both = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&both);
  }
}
#endif

// Two floats as the nearest 8-bit floats, the first in the low byte: what to_float8 gives, but for the sign of a NaN.
template <Float8 T>
__device__ inline uint16_t pack_two_float8(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t both;
  if constexpr (std::is_same_v<T, Float8E4M3>) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
    return both;
  } else if constexpr (std::is_same_v<T, Float8E5M2>) {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
    return both;
  }
#endif
  return static_cast<uint16_t>(to_float8<T>(low).bits | to_float8<T>(high).bits << 8);
}

// The nearest integer, ties to even; 0 for NaN.
__device__ inline int round_to_int(float x) {
#if defined(__CUDA_ARCH__)
  return __float2int_rn(x);
#else
  return x == x ? static_cast<int>(rintf(x)) : 0;
#endif
}

// Four integers from -128 to 127 as bytes, the first in the lowest.
__device__ inline uint32_t pack_four_int8(int a, int b, int c, int d) {
#if defined(__CUDA_ARCH__)
  uint32_t high, all;
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(high) : "r"(d), "r"(c), "r"(0));
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(all) : "r"(b), "r"(a), "r"(high));
  return all;
#else
  return (a & 0xff) | (b & 0xff) << 8 | (c & 0xff) << 16 | static_cast<uint32_t>(d) << 24;
#endif
}

// 2^x to within 2 ulp; 2^-inf is 0.
__device__ inline float exp2_fast(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

// For a kernel that was launched while the one before it on the stream was still running (Launch::early): returns when
// that one is done and what it wrote can be seen. Nothing that it writes may be read, and nothing that it reads
// written, before.
__device__ inline void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// From here on the next kernel of the stream may start, if it is launched early, once every block of this one has come
// here or ended.
__device__ inline void start_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// For a kernel that has nothing to do before the previous one is done.
__device__ inline void follow_previous_kernel() {
  wait_for_previous_kernel();
  start_next_kernel();
}

// Adds to a number in global or shared memory and returns what was there.
__device__ inline int atomic_add(int* at, int value) { return atomicAdd(at, value); }
__device__ inline uint32_t atomic_add(uint32_t* at, uint32_t value) { return atomicAdd(at, value); }
__device__ inline uint64_t atomic_add(uint64_t* at, uint64_t value) {
  return atomicAdd(reinterpret_cast<unsigned long long*>(at), value);
}

}  // namespace gristmill::gpu
#endif  // GRISTMILL_SIMT
