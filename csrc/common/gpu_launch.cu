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

}  // namespace gristmill::gpu
#endif
