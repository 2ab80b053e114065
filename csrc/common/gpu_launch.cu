#include "common/gpu_launch.h"

#if !defined(GRISTMILL_SIMT)
#include <array>
#include <atomic>

namespace gristmill::gpu {

int processors_of(int device) {
  static std::array<std::atomic<int>, 64> known{};
  const auto ask = [&] {
    int count = 0;
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    return count;
  };
  if (device < 0 || device >= static_cast<int>(known.size())) return ask();
  int count = known[device].load(std::memory_order_relaxed);
  if (count == 0) known[device].store(count = ask(), std::memory_order_relaxed);
  return count;
}

bool EarlyStart::allowed(const void* kernel, int device) {
  if (device < 0 || device >= 64) return false;
  const uint64_t bit = uint64_t{1} << device;
  if ((asked_.load(std::memory_order_acquire) & bit) == 0) {
    cudaFuncAttributes attributes = {};
    STD_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
    if (attributes.ptxVersion >= 90 && attributes.binaryVersion >= 90)
      allowed_.fetch_or(bit, std::memory_order_relaxed);
    asked_.fetch_or(bit, std::memory_order_release);
  }
  return (allowed_.load(std::memory_order_relaxed) & bit) != 0;
}

}  // namespace gristmill::gpu
#endif
