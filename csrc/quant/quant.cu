// Rows as 8-bit numbers on GPUs. A group of elements that share a scale belongs to some lanes of a warp or to one block
// and is read once: its threads keep it in registers between the largest magnitude and the quotients, up to
// kPacksWanted packs each.
#include <torch/csrc/stable/library.h>

#include "common/gpu_launch.h"
#include "common/gpu_rows.h"
#include "quant/gpu_codes.h"
#include "quant/problem.h"
#include "quant/quant.h"

namespace gristmill::gpu {
namespace {

constexpr int kThreadsOfNarrowGroups = 256;
constexpr int kMaxThreads = 512;  // of wide groups
constexpr int kPacksWanted = 4;
constexpr int kNarrowPacks = 2;
constexpr int64_t kMaxWidth = int64_t{1} << 30;

template <typename T, typename To>
struct Problem {
  To* out;
  const T* x;
  float* scales;
  const float* given;  // null, or the scale of everything
  int64_t out_step, x_step, scale_step, scale_group_step;
  int64_t units, groups;  // groups in all and per row
  int32_t width;
  bool aligned;  // groups of x on 16 bytes, those of out on as many as become of these

  __device__ float* scale(int64_t unit) const {
    const auto [row, group] = divide(unit, groups);
    return scales + row * scale_step + group * scale_group_step;
  }
};

// What one thread has of a group: packs of N elements, `lanes` packs apart. kPlain: aligned, and whole packs wide.
template <typename T, typename To, int kPacks, int kLanes, bool kPlain>
struct Share {
  static constexpr int N = kPackElements<T>;

  const T* x;
  To* out;
  int32_t width;
  int lane;
  bool aligned;
  Pack<T, N> kept[kPacks > 0 ? kPacks : 1];

  // A group that there is not has nothing that could be read.
  __device__ Share(const Problem<T, To>& p, int64_t wanted, int lane)
      : width(wanted < p.units ? p.width : 0), lane(lane), aligned(p.aligned) {
    const auto [row, group] = divide(wanted < p.units ? wanted : 0, p.groups);
    x = p.x + row * p.x_step + group * p.width;
    out = p.out + row * p.out_step + group * p.width;
  }

  __device__ int32_t first_of(int i) const {
    return (i * (kLanes > 0 ? kLanes : static_cast<int>(blockDim.x)) + lane) * N;
  }
  __device__ Pack<T, N> read(int32_t first) const { return load_row<kPlain, N>(x, first, width, aligned); }

  // All reads are under way before the first is waited for.
  __device__ void read_all() {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (first_of(i) < width) kept[i] = read(first_of(i));
    }
  }

  // f(first element, pack) for all packs: at hand if they are kept, else read.
  template <typename F>
  __device__ void visit(F&& f) {
    if constexpr (kPacks > 0) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        if (first_of(i) < width) f(first_of(i), kept[i]);
      }
    } else {
      for (int i = 0; first_of(i) < width; ++i) f(first_of(i), read(first_of(i)));
    }
  }

  __device__ float largest() {
    float largest = 0;
    visit([&](int32_t, const Pack<T, N>& pack) { largest = largest_magnitude(pack, largest); });
    return largest;
  }
  __device__ void write(const Divisor& by) {
    visit([&](int32_t first, const Pack<T, N>& pack) {
      store_row<kPlain, N>(out, first, width, aligned, quotients<To>(pack, by));
    });
  }
};

// `largest_of` combines the numbers of all threads of a group.
template <typename ShareOf, typename T, typename To, typename F>
__device__ void quantise(const Problem<T, To>& problem, int64_t unit, int lane, F&& largest_of) {
  ShareOf mine(problem, unit, lane);
  mine.read_all();
  const float scale = scale_of<To>(largest_of(mine.largest()));
  if (lane == 0 && unit < problem.units) *problem.scale(unit) = scale;
  mine.write(Divisor(scale));
}

// kLanes neighbours per group.
template <typename T, typename To, int kPacks, int kLanes, bool kPlain>
__global__ void __launch_bounds__(kThreadsOfNarrowGroups) narrow_kernel(const Problem<T, To> problem) {
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * (kThreadsOfNarrowGroups / kLanes) + thread / kLanes;
  quantise<Share<T, To, kPacks, kLanes, kPlain>>(problem, unit, thread % kLanes,
                                                 [](float largest) { return warp_max<kLanes>(largest); });
}

// A block per group.
template <typename T, typename To, int kPacks, bool kPlain>
__global__ void __launch_bounds__(kMaxThreads) wide_kernel(const Problem<T, To> problem) {
  GRISTMILL_SHARED(float, scratch, kMaxThreads / kWarp);
  quantise<Share<T, To, kPacks, 0, kPlain>>(problem, blockIdx.x, static_cast<int>(threadIdx.x),
                                            [&](float largest) { return block_max<kMaxThreads>(largest, scratch); });
}

// A block per row, and a scale that is there already.
template <typename T, typename To, int kPacks, bool kPlain>
__global__ void __launch_bounds__(kMaxThreads) given_kernel(const Problem<T, To> problem) {
  Share<T, To, kPacks, 0, kPlain> mine(problem, blockIdx.x, static_cast<int>(threadIdx.x));
  mine.read_all();
  mine.write(Divisor(*problem.given));
}

// At most 64 packs: so many lanes as have kNarrowPacks each. Else a block of as many threads as have kPacksWanted each,
// if it can.
template <typename T, typename To>
struct Kernels {
  const Problem<T, To>& problem;
  int64_t packs;

  int threads() const {
    int threads = 64;
    while (threads < kMaxThreads && threads * kPacksWanted < packs) threads *= 2;
    return threads;
  }

  template <int kPacks, int kLanes, bool kPlain>
  void narrow(const Launch& launch) const {
    launch(narrow_kernel<T, To, kPacks, kLanes, kPlain>, blocks_for(problem.units * kLanes, kThreadsOfNarrowGroups),
           dim3(kThreadsOfNarrowGroups), 0, problem);
  }
  template <int kPacks, bool kPlain>
  void wide(const Launch& launch) const {
    auto kernel = wide_kernel<T, To, kPacks, kPlain>;
    if constexpr (Float8<To>) {
      if (problem.given != nullptr) kernel = given_kernel<T, To, kPacks, kPlain>;
    }
    launch(kernel, dim3(static_cast<unsigned>(problem.units)), dim3(static_cast<unsigned>(threads())), 0, problem);
  }

  void run(const Launch& launch) const {
    const bool narrow_groups = packs <= kNarrowPacks * 32 && problem.given == nullptr;
    if (!problem.aligned || problem.width % kPackElements<T> != 0) {
      return narrow_groups ? narrow<0, 32, false>(launch) : wide<0, false>(launch);
    }
    if (!narrow_groups) {
      return packs <= int64_t{kPacksWanted} * kMaxThreads ? wide<kPacksWanted, true>(launch) : wide<0, true>(launch);
    }
    if (packs <= 2 * kNarrowPacks) return narrow<kNarrowPacks, 2, true>(launch);
    if (packs <= 4 * kNarrowPacks) return narrow<kNarrowPacks, 4, true>(launch);
    if (packs <= 8 * kNarrowPacks) return narrow<kNarrowPacks, 8, true>(launch);
    if (packs <= 16 * kNarrowPacks) return narrow<kNarrowPacks, 16, true>(launch);
    return narrow<kNarrowPacks, 32, true>(launch);
  }
};

// Without `scales` everything has the scale `given`.
template <typename T, typename To>
void launch_groups(const Tensor& out, const OptionalTensor& scales, const Tensor& x, const float* given,
                   const Groups& shape) {
  constexpr int N = kPackElements<T>;
  const Problem<T, To> problem = {mutable_data<To>(out),
                                  data<T>(x),
                                  scales ? mutable_data<float>(*scales) : nullptr,
                                  given,
                                  out.stride(0),
                                  x.stride(0),
                                  scales ? scales->stride(0) : 0,
                                  scales ? scales->stride(1) : 0,
                                  shape.rows * shape.groups,
                                  shape.groups,
                                  static_cast<int32_t>(shape.width),
                                  steps_by(x, 16) && steps_by(out, N) && (shape.groups <= 1 || shape.width % N == 0)};
  Kernels<T, To>{problem, (shape.width + N - 1) / N}.run(Launch(x));
}

void check_width(const Groups& shape, const char* op) {
  STD_TORCH_CHECK(shape.width <= kMaxWidth, op, ": rows may have ", kMaxWidth, " elements, got ", shape.width);
}

void quantise_to_float8(const Tensor& out, const OptionalTensor& scales, const Tensor& x, const float* given,
                        const Groups& shape, const char* op) {
  check_float8_codes(out, op);
  check_width(shape, op);
  dispatch_float(x.scalar_type(), op, "x", [&](auto from) {
    dispatch_float8(out.scalar_type(),
                    [&](auto to) { launch_groups<decltype(from), decltype(to)>(out, scales, x, given, shape); });
  });
}

}  // namespace

void quant_fp8(const Tensor& out, const Tensor& x, const Tensor& scale) {
  constexpr const char* op = "quant_fp8";
  check_codes(out, x, op);
  check_given_scale(scale, op);
  quantise_to_float8(out, std::nullopt, x, data<float>(scale), {x.size(0), 1, x.size(1)}, op);
}

void per_token_quant_fp8(const Tensor& out, const Tensor& scales, const Tensor& x) {
  constexpr const char* op = "per_token_quant_fp8";
  quantise_to_float8(out, scales, x, nullptr, check_per_token(out, scales, x, op), op);
}

void per_token_quant_int8(const Tensor& out, const Tensor& scales, const Tensor& x) {
  constexpr const char* op = "per_token_quant_int8";
  const Groups shape = check_per_token(out, scales, x, op);
  check_dtype(out, ScalarType::Char, op, "out");
  check_width(shape, op);
  dispatch_float(x.scalar_type(), op, "x",
                 [&](auto from) { launch_groups<decltype(from), Int8>(out, scales, x, nullptr, shape); });
}

void per_group_quant_fp8(const Tensor& out, const Tensor& scales, const Tensor& x, int64_t group_size) {
  constexpr const char* op = "per_group_quant_fp8";
  quantise_to_float8(out, scales, x, nullptr, check_per_group(out, scales, x, group_size, op), op);
}

}  // namespace gristmill::gpu

STABLE_TORCH_LIBRARY_IMPL(GRISTMILL_GPU_NAMESPACE, GRISTMILL_GPU_KEY, m) {
  m.impl("quant_fp8", TORCH_BOX(&gristmill::gpu::quant_fp8));
  m.impl("per_token_quant_fp8", TORCH_BOX(&gristmill::gpu::per_token_quant_fp8));
  m.impl("per_token_quant_int8", TORCH_BOX(&gristmill::gpu::per_token_quant_int8));
  m.impl("per_group_quant_fp8", TORCH_BOX(&gristmill::gpu::per_group_quant_fp8));
}
