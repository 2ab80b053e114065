// The host side of a .cu file: where a kernel runs and how it is launched.
#pragma once

#include <atomic>
#include <cstddef>
#include <utility>

#include "common/check.h"
#include "common/gpu.h"

#if !defined(GRISTMILL_SIMT)
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#endif

// Under which namespace and dispatch key a .cu file registers its ops:
//   STABLE_TORCH_LIBRARY_IMPL(GRISTMILL_GPU_NAMESPACE, GRISTMILL_GPU_KEY, m) { m.impl("op",
//   TORCH_BOX(&gristmill::gpu::op)); }
#define GRISTMILL_GPU_NAMESPACE gristmill_native
#if defined(GRISTMILL_SIMT)
#define GRISTMILL_GPU_KEY CPU
#else
#define GRISTMILL_GPU_KEY CUDA
#endif

namespace gristmill::gpu {

// Blocks of `threads` that give each of `units` a thread.
inline dim3 blocks_for(int64_t units, int threads) {
  return dim3(static_cast<unsigned>((units + threads - 1) / threads));
}

#if !defined(GRISTMILL_SIMT)
// Asked of the driver once per device.
int processors_of(int device);
int shared_per_processor_of(int device);

// Whether one kernel waits for the kernel before it by itself, per device: its code there must be compiled for Hopper
// or later, which PTX of an older architecture on a newer device is not.
class EarlyStart {
 public:
  bool allowed(const void* kernel, int device);

 private:
  std::atomic<uint64_t> asked_{0}, allowed_{0};
};
#endif

// A block may have 48 KiB of shared memory without asking, of which a kernel's own arrays take a part.
inline constexpr size_t kSharedUnasked = 32 * 1024;

// A launch on the current stream of a tensor's device. Grids with a dimension of 0 launch nothing.
//   const Launch launch(x);
//   launch(kernel<T>, dim3(rows), dim3(256), shared_bytes, arguments...);
class Launch {
 public:
  explicit Launch(const Tensor& on);

  template <typename... Parameters, typename... Arguments>
  void operator()(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                  Arguments&&... arguments) const {
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
#if defined(GRISTMILL_SIMT)
    simt::launch(grid, block, shared_bytes, [&] { kernel(static_cast<Parameters>(arguments)...); });
#else
    ask_for_shared(reinterpret_cast<const void*>(kernel), shared_bytes);
    // clang-format off
    kernel<<<grid, block, shared_bytes, stream_>>>(static_cast<Parameters>(arguments)...);
    // clang-format on
    STD_CUDA_KERNEL_LAUNCH_CHECK();
#endif
  }

  // The same for a kernel that calls wait_for_previous_kernel: from Hopper on it is started, up to that call, while the
  // previous kernel of the stream comes to its end.
  template <auto kKernel, typename... Arguments>
  void early(dim3 grid, dim3 block, Arguments&&... arguments) const {
    early_shared<kKernel>(grid, block, 0, std::forward<Arguments>(arguments)...);
  }
  template <auto kKernel, typename... Arguments>
  void early_shared(dim3 grid, dim3 block, size_t shared_bytes, Arguments&&... arguments) const {
#if !defined(GRISTMILL_SIMT) && !defined(__HIPCC__)
    static EarlyStart early_start;
    if (early_start.allowed(reinterpret_cast<const void*>(kKernel), device_)) {
      return overlap(kKernel, grid, block, shared_bytes, std::forward<Arguments>(arguments)...);
    }
#endif
    (*this)(kKernel, grid, block, shared_bytes, std::forward<Arguments>(arguments)...);
  }

  // Multiprocessors of the device.
  int processors() const { return processors_; }

  // Bytes of shared memory of one of them, for all its blocks together; 0 if that does not matter.
  int shared_per_processor() const {
#if defined(GRISTMILL_SIMT)
    return 0;
#else
    return shared_per_processor_of(device_);
#endif
  }

 private:
#if !defined(GRISTMILL_SIMT)
  static void ask_for_shared(const void* kernel, size_t bytes) {
    if (bytes <= kSharedUnasked) return;
    STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  }

  template <typename... Parameters, typename... Arguments>
  void overlap(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
               Arguments&&... arguments) const {
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
    ask_for_shared(reinterpret_cast<const void*>(kernel), shared_bytes);
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared_bytes, config.stream = stream_;
    config.attrs = &attribute, config.numAttrs = 1;
    STD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
  }
#endif

  int processors_;
#if !defined(GRISTMILL_SIMT)
  int device_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
#endif
};

#if defined(GRISTMILL_SIMT)
// As few as there can be, so that loops over the work of a block go round more than once.
inline Launch::Launch(const Tensor&) : processors_(1) {}
#else
inline Launch::Launch(const Tensor& on)
    : processors_(processors_of(on.get_device_index())), device_(on.get_device_index()), guard_(on.get_device_index()) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(on.get_device_index(), &stream));
  stream_ = static_cast<cudaStream_t>(stream);
}
#endif

}  // namespace gristmill::gpu
