#include "common/gpu_launch.h"

#if !defined(GRISTMILL_SIMT)
#include <array>
#include <atomic>

namespace gristmill::gpu {

namespace {

// One number for every device, 0 until it is asked for.
using Known = std::array<std::atomic<int>, 64>;

int attribute_of(Known& known, cudaDeviceAttr attribute, int device) {
  const auto ask = [&] {
    int value = 0;
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
    return value;
  };
  if (device < 0 || device >= static_cast<int>(known.size())) return ask();
  int value = known[device].load(std::memory_order_relaxed);
  if (value == 0) known[device].store(value = ask(), std::memory_order_relaxed);
  return value;
}

}  // namespace

int processors_of(int device) {
  static Known known{};
  return attribute_of(known, cudaDevAttrMultiProcessorCount, device);
}

int shared_per_processor_of(int device) {
  static Known known{};
  return attribute_of(known, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
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
