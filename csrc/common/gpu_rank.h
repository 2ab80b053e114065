// A float and the place it stands in as one number: what is larger ranks higher, and equals by the lower place.
#pragma once

#include <cstdint>

#include "common/gpu.h"

namespace gristmill::gpu {

// Floats in the order of their keys; 0 and -0 share one.
__device__ inline uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits ^ (bits >> 31 != 0 ? 0xffffffffu : 0x80000000u);
}
__device__ inline float value_of(uint32_t key) {
  return __uint_as_float(key ^ (key >> 31 != 0 ? 0x80000000u : 0xffffffffu));
}
// No rank is 0.
__device__ inline uint64_t rank_of(uint32_t key, int32_t id) {
  return static_cast<uint64_t>(key) << 32 | static_cast<uint32_t>(~id);
}
__device__ inline int32_t id_of(uint64_t rank) { return static_cast<int32_t>(~static_cast<uint32_t>(rank)); }

}  // namespace gristmill::gpu
