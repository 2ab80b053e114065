// Rows as 8-bit numbers on GPUs. A group of elements that share a scale belongs to some lanes of a warp or to one block
// and is read once: its threads keep it in registers between the largest magnitude and the quotients, up to kManyPacks
// packs each.
#include <torch/csrc/stable/library.h>

#include <cfloat>

#include "common/gpu_launch.h"
#include "common/gpu_rows.h"
#include "quant/gpu_codes.h"
#include "quant/problem.h"
#include "quant/quant.h"

namespace gristmill::gpu {
namespace {

constexpr int kThreadsOfNarrowGroups = 256;
constexpr int kMaxThreads = 512;  // of wide groups
constexpr int kFewPacks = 2, kManyPacks = 8;
constexpr int kNarrowPacks = 2;
constexpr int64_t kMaxWidth = int64_t{1} << 30;

template <typename T, typename To>
struct Problem {
  To* out;
  const T* x;
  float* scales;
  const float* given;  // null, or the scale of everything
  int64_t out_step, x_step, scale_step, scale_group_step;
  int64_t units;    // groups in all, fewer than 2^31
  uint32_t groups;  // per row
  int32_t width;
  bool aligned;  // groups of x on 16 bytes, those of out on as many as become of these
};

// What one thread has of a group: packs of N elements, `lanes` packs apart. kPlain: aligned, and whole packs wide.
template <typename T, typename To, int kPacks, int kLanes, bool kPlain>
struct Share {
  static constexpr int N = kPackElements<T>;

  const Problem<T, To>& problem;
  const T* x;
  To* out;
  float* scale;
  int32_t width;
  int lane;
  bool exists;
  Pack<T, N> kept[kPacks > 0 ? kPacks : 1];

  // A group that there is not has nothing that could be read.
  __device__ Share(const Problem<T, To>& p, int64_t wanted, int lane) : problem(p), lane(lane) {
    exists = wanted < p.units;
    const uint32_t unit = exists ? static_cast<uint32_t>(wanted) : 0;
    const uint32_t row = p.groups == 1 ? unit : unit / p.groups, group = unit - row * p.groups;
    const int64_t first = static_cast<int64_t>(group) * p.width;
    width = exists ? p.width : 0;
    x = p.x + row * p.x_step + first;
    out = p.out + row * p.out_step + first;
    scale = p.scales + row * p.scale_step + group * p.scale_group_step;
  }

  __device__ int32_t first_of(int i) const {
    return (i * (kLanes > 0 ? kLanes : static_cast<int>(blockDim.x)) + lane) * N;
  }
  __device__ Pack<T, N> read(int32_t first) const { return load_row<kPlain, N>(x, first, width, problem.aligned); }

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
      reread(f);
    }
  }
  // The same where speed does not matter but short code does.
  template <typename F>
  __device__ void reread(F&& f) {
#pragma unroll 1
    for (int i = 0; first_of(i) < width; ++i) f(first_of(i), read(first_of(i)));
  }

  __device__ float largest() {
    float largest = 0;
    visit([&](int32_t, const Pack<T, N>& pack) { largest = largest_magnitude<false>(pack, largest); });
    return largest;
  }
  __device__ float largest_finite() {
    float largest = 0;
    reread([&](int32_t, const Pack<T, N>& pack) { largest = largest_magnitude<true>(pack, largest); });
    return largest;
  }

  template <bool kMultiplies>
  __device__ void store(int32_t first, const Pack<T, N>& pack, const Divisor& by) {
    const auto words = quotients<To, kMultiplies>(pack, by);
    if constexpr (kPlain) {
      store_pack<N / 4>(reinterpret_cast<uint32_t*>(out + first), words);
    } else {
      Pack<To, N> codes;
      memcpy(&codes, &words, sizeof(codes));
      store_elements<N>(out, first, width, problem.aligned, codes);
    }
  }
  // `most`: none of the values is larger.
  __device__ void write(const Divisor& by, float most) {
    if (by.multiplies(most)) {
      visit([&](int32_t first, const Pack<T, N>& pack) { store<true>(first, pack, by); });
    } else {
      reread([&](int32_t first, const Pack<T, N>& pack) { store<false>(first, pack, by); });
    }
  }
  __device__ void write(const Divisor& by) {
    visit([&](int32_t first, const Pack<T, N>& pack) {
      by.multiplies(largest_magnitude<false>(pack, 0.0f)) ? store<true>(first, pack, by)
                                                          : store<false>(first, pack, by);
    });
  }
};

// The threads that share a scale: lanes of a warp.
template <int kLanes>
struct Lanes {
  __device__ float largest(float value, int) const { return warp_max<kLanes>(value); }
  // Whether any thread says so that takes part in the same exchanges.
  __device__ bool any(bool mine) const { return ballot(mine) != 0; }
};

// A block. `which` tells two uses of the scratch memory apart.
struct Block {
  float* scratch;
  __device__ float largest(float value, int which) const {
    return block_max<kMaxThreads>(value, scratch + which * kMaxThreads / kWarp);
  }
  __device__ bool any(bool same_for_all) const { return same_for_all; }
};

template <typename ShareOf, typename T, typename To, typename Threads>
__device__ void quantise(const Problem<T, To>& problem, int64_t unit, int lane, const Threads& threads) {
  ShareOf mine(problem, unit, lane);
  mine.read_all();
  const float most = threads.largest(mine.largest(), 0);
  float largest = most;
  // Rare: what counts is the largest of the finite values.
  if (threads.any(most > FLT_MAX)) largest = threads.largest(mine.largest_finite(), 1);
  const float scale = scale_of<To>(largest);
  if (lane == 0 && mine.exists) *mine.scale = scale;
  mine.write(Divisor(scale), most);
}

// kLanes neighbours per group.
template <typename T, typename To, int kPacks, int kLanes, bool kPlain>
__global__ void __launch_bounds__(kThreadsOfNarrowGroups) narrow_kernel(const Problem<T, To> problem) {
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * (kThreadsOfNarrowGroups / kLanes) + thread / kLanes;
  quantise<Share<T, To, kPacks, kLanes, kPlain>>(problem, unit, thread % kLanes, Lanes<kLanes>{});
}

// A block per group.
template <typename T, typename To, int kPacks, bool kPlain>
__global__ void __launch_bounds__(kMaxThreads) wide_kernel(const Problem<T, To> problem) {
  GRISTMILL_SHARED(float, scratch, 2 * kMaxThreads / kWarp);
  quantise<Share<T, To, kPacks, 0, kPlain>>(problem, blockIdx.x, static_cast<int>(threadIdx.x), Block{scratch});
}

// A block per row, and a scale that is there already.
template <typename T, typename To, int kPacks, bool kPlain>
__global__ void __launch_bounds__(kMaxThreads) given_kernel(const Problem<T, To> problem) {
  Share<T, To, kPacks, 0, kPlain> mine(problem, blockIdx.x, static_cast<int>(threadIdx.x));
  mine.read_all();
  mine.write(Divisor(*problem.given));
}

// At most 64 packs: so many lanes as have kNarrowPacks each. Else a block of as many threads as have some packs each,
// if it can: many packs each where there are groups enough to fill the device. Which thread has what changes no bit.
template <typename T, typename To>
struct Kernels {
  const Problem<T, To>& problem;
  int64_t packs;

  int threads(int packs_each) const {
    int threads = 64;
    while (threads < kMaxThreads && threads * packs_each < packs) threads *= 2;
    return threads;
  }

  template <int kPacks, int kLanes, bool kPlain>
  void narrow(const Launch& launch) const {
    launch(narrow_kernel<T, To, kPacks, kLanes, kPlain>, blocks_for(problem.units * kLanes, kThreadsOfNarrowGroups),
           dim3(kThreadsOfNarrowGroups), 0, problem);
  }
  template <int kPacks, bool kPlain>
  void wide(const Launch& launch, int packs_each) const {
    auto kernel = wide_kernel<T, To, kPacks, kPlain>;
    if constexpr (Float8<To>) {
      if (problem.given != nullptr) kernel = given_kernel<T, To, kPacks, kPlain>;
    }
    launch(kernel, dim3(static_cast<unsigned>(problem.units)), dim3(static_cast<unsigned>(threads(packs_each))), 0,
           problem);
  }
  void wide(const Launch& launch) const {
    const bool few = problem.given != nullptr || problem.units < 2 * launch.processors();
    if (few && packs <= int64_t{kFewPacks} * kMaxThreads) return wide<kFewPacks, true>(launch, kFewPacks);
    const int packs_each = few ? kFewPacks : kManyPacks;
    packs <= int64_t{kManyPacks} * kMaxThreads ? wide<kManyPacks, true>(launch, packs_each)
                                               : wide<0, true>(launch, packs_each);
  }

  void run(const Launch& launch) const {
    const bool is_narrow = packs <= kNarrowPacks * 32 && problem.given == nullptr;
    if (!problem.aligned || problem.width % kPackElements<T> != 0) {
      return is_narrow ? narrow<0, 32, false>(launch) : wide<0, false>(launch, kFewPacks);
    }
    if (!is_narrow) return wide(launch);
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
                                  static_cast<uint32_t>(shape.groups),
                                  static_cast<int32_t>(shape.width),
                                  steps_by(x, 16) && steps_by(out, N) && (shape.groups <= 1 || shape.width % N == 0)};
  Kernels<T, To>{problem, (shape.width + N - 1) / N}.run(Launch(x));
}

void check_extent(const Groups& shape, const char* op) {
  STD_TORCH_CHECK(shape.width <= kMaxWidth, op, ": rows may have ", kMaxWidth, " elements, got ", shape.width);
  const int64_t units = shape.rows * shape.groups;
  STD_TORCH_CHECK(units < int64_t{1} << 31, op, ": x has ", units, " groups, fewer than 2^31 are supported");
}

void quantise_to_float8(const Tensor& out, const OptionalTensor& scales, const Tensor& x, const float* given,
                        const Groups& shape, const char* op) {
  check_float8_codes(out, op);
  check_extent(shape, op);
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
  check_extent(shape, op);
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
