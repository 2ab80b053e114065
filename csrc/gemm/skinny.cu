// skinny_linear on GPUs: which kernel of skinny_gpu.h runs, and in tiles of how many rows of the weight. Neither
// changes a bit of a result.
#include <torch/csrc/stable/library.h>

#include "common/gpu_launch.h"
#include "gemm/gemm.h"
#include "gemm/skinny.h"
#include "gemm/skinny_gpu.h"

namespace gristmill::gpu {
namespace {

bool aligned(const void* address, int64_t stride, int64_t rows, size_t element) {
  return reinterpret_cast<uintptr_t>(address) % 16 == 0 &&
         (rows <= 1 || stride * static_cast<int64_t>(element) % 16 == 0);
}

#if defined(GRISTMILL_HAS_MMA)
// Blocks that begin while others end would take places as these become free, more on one multiprocessor than on
// another. Where all blocks run at once, and a multiprocessor's share of them leaves places, as much shared memory more
// for each closes these. `own` is what a block has besides.
size_t shared_that_spreads(const Launch& launch, int64_t blocks, size_t needed, size_t own) {
  constexpr size_t kReserved = 1024;  // of every block
  const size_t all = static_cast<size_t>(launch.shared_per_processor()), fit = all / (needed + own + kReserved),
               share = static_cast<size_t>((blocks + launch.processors() - 1) / launch.processors());
  if (share == 0 || share >= fit || fit % share == 0) return needed;
  return all / (share + 1) + kReserved - own;
}

template <typename T, int kTiles, int kStages, bool kTall, bool kWide>
void launch_mma(const Launch& launch, const SkinnyArguments<T>& args) {
  constexpr int kColumns = kTiles * 8, kThreads = kSkinnyWarps * 32;
  constexpr size_t kSums = sizeof(float) * kSkinnyWarps * (kTall ? 16 : 8) * kColumns;
  const size_t ring = kWide ? size_t{kStages} * kTiles * 2 * kThreads * sizeof(Eight) : 0;
  const int64_t blocks = (args.n + kColumns - 1) / kColumns;
  launch.early_shared<skinny_mma_kernel<T, kTiles, kStages, kTall, kWide>>(
      dim3(static_cast<unsigned>(blocks)), dim3(kThreads), kWide ? shared_that_spreads(launch, blocks, ring, kSums) : 0,
      args);
}

// Measured on one H200: two tiles of three stages, four blocks a processor, read fastest.
template <typename T>
void run_mma(const Launch& launch, const SkinnyArguments<T>& args, bool wide) {
  constexpr int kTiles = 2, kStages = 3;
  if (!wide) return launch_mma<T, kTiles, kStages, true, false>(launch, args);
  if (args.m > 8) return launch_mma<T, kTiles, kStages, true, true>(launch, args);
  launch_mma<T, kTiles, kStages, false, true>(launch, args);
}
#endif

template <typename T, int kRows, int kColumns>
void launch_fma(const Launch& launch, const SkinnyArguments<T>& args, bool wide) {
  const dim3 grid(static_cast<unsigned>((args.n + kColumns - 1) / kColumns));
  if (wide) {
    launch.early<skinny_fma_kernel<T, kRows, kColumns, true>>(grid, dim3(kSkinnyThreads), args);
  } else {
    launch.early<skinny_fma_kernel<T, kRows, kColumns, false>>(grid, dim3(kSkinnyThreads), args);
  }
}

template <typename T>
void run_fma(const Launch& launch, const SkinnyArguments<T>& args, bool wide) {
  if (args.m <= 1) return launch_fma<T, 1, 4>(launch, args, wide);
  if (args.m <= 4) return launch_fma<T, 4, 4>(launch, args, wide);
  if (args.m <= 8) return launch_fma<T, 8, 4>(launch, args, wide);
  return launch_fma<T, 16, 2>(launch, args, wide);
}

template <typename T>
void run(const Launch& launch, const SkinnyArguments<T>& args, bool wide) {
#if defined(GRISTMILL_HAS_MMA)
  if constexpr (std::is_same_v<T, float>) {
    run_fma(launch, args, wide);
  } else {
    run_mma(launch, args, wide);
  }
#else
  run_fma(launch, args, wide);
#endif
}

}  // namespace

void skinny_linear(const Tensor& out, const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  check_skinny_linear(out, x, weight, bias);
  const int64_t m = x.size(0), n = weight.size(0), k = x.size(1);
  if (m == 0) return;
  dispatch_float(x.scalar_type(), "skinny_linear", "x", [&](auto tag) {
    using T = decltype(tag);
    const SkinnyArguments<T> args{
        mutable_data<T>(out), data<T>(x),         data<T>(weight),  bias ? data<T>(*bias) : nullptr,
        out.stride(0),        x.stride(0),        weight.stride(0), n,
        static_cast<int>(m),  static_cast<int>(k)};
    const bool wide = k * static_cast<int64_t>(sizeof(T)) % 16 == 0 && aligned(args.x, args.x_stride, m, sizeof(T)) &&
                      aligned(args.weight, args.weight_stride, n, sizeof(T));
    const Launch launch(x);
    run(launch, args, wide);
  });
}

}  // namespace gristmill::gpu

STABLE_TORCH_LIBRARY_IMPL(GRISTMILL_GPU_NAMESPACE, GRISTMILL_GPU_KEY, m) {
  m.impl("skinny_linear", TORCH_BOX(&gristmill::gpu::skinny_linear));
}
