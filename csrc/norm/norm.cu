// RMS and layer normalisation on GPUs. A row belongs to one warp or to one block and is read once: its threads keep it
// in registers between the sum and the result, up to kMaxPacks packs each. float32 rows are computed in double.
#include <torch/csrc/stable/library.h>

#include "common/gpu_launch.h"
#include "common/gpu_rows.h"
#include "norm/norm.h"

namespace gristmill::gpu {
namespace {

constexpr int kMaxPacks = 4;
constexpr int kThreadsOfNarrowRows = 128;
constexpr int kMaxThreads = 512;

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, float>, double, float>;

__device__ inline float inverse_root(float x) { return rsqrtf(x); }
__device__ inline double inverse_root(double x) { return 1.0 / sqrt(x); }

enum class Kind { kRms, kLayer };

// A vector of factors or summands per column, in any of the float types.
struct Columns {
  const void* data;
  ScalarType type;
  bool aligned;

  template <typename T, bool kPlain, int N>
  __device__ void load(int64_t first, int64_t width, float (&to)[N]) const {
    if constexpr (kPlain) {
      const auto pack = load_pack<N>(static_cast<const T*>(data) + first);
#pragma unroll
      for (int i = 0; i < N; ++i) to[i] = to_float(pack[i]);
      return;
    }
    switch (type) {
      case ScalarType::Float:
        return read<float, N>(first, width, to);
      case ScalarType::BFloat16:
        return read<BFloat16, N>(first, width, to);
      default:
        return read<Half, N>(first, width, to);
    }
  }

 private:
  template <typename W, int N>
  __device__ void read(int64_t first, int64_t width, float (&to)[N]) const {
    constexpr int kStep = N < kPackElements<W> ? N : kPackElements<W>;
#pragma unroll
    for (int i = 0; i < N; i += kStep) {
      const auto pack = load_elements<kStep>(static_cast<const W*>(data), first + i, width, aligned);
#pragma unroll
      for (int j = 0; j < kStep; ++j) to[i + j] = to_float(pack[j]);
    }
  }
};

template <typename T>
struct Problem {
  T* out;
  const T* x;
  T* residual;  // null, or what x is added to first
  Rows out_rows, x_rows, residual_rows;
  bool aligned;  // every row, on 16 bytes
  Columns weight, bias;
  float weight_offset;  // 1 for Gemma's norms
  double eps;
  int64_t rows, width;
};

// What one thread has of a row: packs of N elements, `lanes` packs apart.
template <typename T, Kind kKind, bool kAdd, int kPacks, bool kPlain>
struct Row {
  static constexpr int N = kPackElements<T>;
  using A = Wide<T>;

  const Problem<T>& problem;
  const T* x;
  T* residual;
  T* out;
  int lane, lanes;
  Pack<T, N> kept[kPacks > 0 ? kPacks : 1];
  Pack<T, N> factors[kPacks > 0 && kPlain ? kPacks : 1];  // the weight, asked for before the sums need a barrier

  __device__ Row(const Problem<T>& p, int64_t row, int lane, int lanes)
      : problem(p),
        x(p.x + row_offset<kPlain>(p.x_rows, row)),
        residual(kAdd ? p.residual + row_offset<kPlain>(p.residual_rows, row) : nullptr),
        out(p.out + row_offset<kPlain>(p.out_rows, row)),
        lane(lane),
        lanes(lanes) {}

  // f(first element, pack): on the first pass packs are read, later they are at hand.
  template <bool kFirst, typename F>
  __device__ void visit(F&& f) {
    if constexpr (kPacks > 0) {
      if constexpr (kFirst) {
#pragma unroll
        for (int i = 0; i < kPacks; ++i) {
          if (first_of(i) < problem.width) kept[i] = read(first_of(i));
        }
      }
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        if (first_of(i) < problem.width) f(i, first_of(i), kept[i]);
      }
    } else {
      for (int i = 0; first_of(i) < problem.width; ++i)
        f(i, first_of(i), kFirst ? read(first_of(i)) : reread(first_of(i)));
    }
  }

  __device__ void load_factors() {
    if constexpr (kPlain && kPacks > 0) {
      if (problem.weight.data == nullptr) return;
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        if (first_of(i) < problem.width)
          factors[i] = load_pack<N>(static_cast<const T*>(problem.weight.data) + first_of(i));
      }
    }
  }

  __device__ int64_t first_of(int i) const { return (static_cast<int64_t>(i) * lanes + lane) * N; }

  // The sum with the residual is rounded to T before it is normalised, as the unfused pair of ops would do.
  __device__ Pack<T, N> read(int64_t first) {
    auto pack = load_row<kPlain, N>(x, first, problem.width, problem.aligned);
    if constexpr (kAdd) {
      const auto before = load_row<kPlain, N>(residual, first, problem.width, problem.aligned);
#pragma unroll
      for (int i = 0; i < N; ++i) pack[i] = from_float<T>(to_float(pack[i]) + to_float(before[i]));
      store_row<kPlain, N>(residual, first, problem.width, problem.aligned, pack);
    }
    return pack;
  }
  __device__ Pack<T, N> reread(int64_t first) const {
    return load_row<kPlain, N>(kAdd ? residual : x, first, problem.width, problem.aligned);
  }

  template <bool kFirst>
  __device__ A sum_of_squares(A mean) {
    A sum = 0;
    visit<kFirst>([&](int, int64_t first, const Pack<T, N>& pack) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const A value = static_cast<A>(to_float(pack[i])) - mean;
        if (kKind == Kind::kRms || first + i < problem.width) sum += value * value;
      }
    });
    return sum;
  }
  __device__ A sum_of_values() {
    A sum = 0;
    visit<true>([&](int, int64_t, const Pack<T, N>& pack) {
#pragma unroll
      for (int i = 0; i < N; ++i) sum += static_cast<A>(to_float(pack[i]));
    });
    return sum;
  }

  __device__ void write(A mean, A scale) {
    visit<false>([&](int i_pack, int64_t first, const Pack<T, N>& pack) {
      float weight[N], bias[N];
      if constexpr (kPlain && kPacks > 0) {
#pragma unroll
        for (int i = 0; i < N; ++i) weight[i] = to_float(factors[i_pack][i]);
      } else if (problem.weight.data != nullptr) {
        problem.weight.template load<T, kPlain>(first, problem.width, weight);
      }
      if (problem.bias.data != nullptr) problem.bias.template load<T, kPlain>(first, problem.width, bias);
      Pack<T, N> result;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        A value = (static_cast<A>(to_float(pack[i])) - mean) * scale;
        if (problem.weight.data != nullptr) value *= static_cast<A>(weight[i]) + static_cast<A>(problem.weight_offset);
        if (problem.bias.data != nullptr) value += static_cast<A>(bias[i]);
        result[i] = from_float<T>(static_cast<float>(value));
      }
      store_row<kPlain, N>(out, first, problem.width, problem.aligned, result);
    });
  }
};

template <typename T, Kind kKind, bool kAdd, int kPacks, bool kPlain, typename Sum>
__device__ void normalise(const Problem<T>& problem, int64_t row, int lane, int lanes, Sum&& sum) {
  using A = Wide<T>;
  Row<T, kKind, kAdd, kPacks, kPlain> mine(problem, row, lane, lanes);
  mine.load_factors();
  const A width = static_cast<A>(problem.width);
  A mean = 0;
  if constexpr (kKind == Kind::kLayer) mean = sum(mine.sum_of_values(), 0) / width;
  const A squares = sum(mine.template sum_of_squares<kKind == Kind::kRms>(mean), 1);
  mine.write(mean, inverse_root(squares / width + static_cast<A>(problem.eps)));
}

template <typename T, Kind kKind, bool kAdd, int kPacks, bool kPlain>
__global__ void __launch_bounds__(kThreadsOfNarrowRows) narrow_kernel(const Problem<T> problem) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreadsOfNarrowRows / kWarp) + warp_index();
  if (row >= problem.rows) return;
  normalise<T, kKind, kAdd, kPacks, kPlain>(problem, row, lane_index(), kWarp,
                                            [](auto value, int) { return warp_sum(value); });
}

template <typename T, Kind kKind, bool kAdd, int kPacks, bool kPlain>
__global__ void __launch_bounds__(kMaxThreads) wide_kernel(const Problem<T> problem) {
  GRISTMILL_SHARED(Wide<T>, scratch, 2 * kMaxThreads / kWarp);
  normalise<T, kKind, kAdd, kPacks, kPlain>(
      problem, blockIdx.x, static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x),
      [&](auto value, int which) { return block_sum(value, scratch + which * kMaxThreads / kWarp); });
}

// A warp per row where two packs per thread suffice, else a block of as many threads as give each two packs, if it can.
template <typename T, Kind kKind, bool kAdd>
void run(const Launch& launch, const Problem<T>& problem, bool plain) {
  const int64_t packs = (problem.width + kPackElements<T> - 1) / kPackElements<T>;
  if (packs <= 2 * kWarp) {
    const auto kernel = !plain           ? narrow_kernel<T, kKind, kAdd, 0, false>
                        : packs <= kWarp ? narrow_kernel<T, kKind, kAdd, 1, true>
                                         : narrow_kernel<T, kKind, kAdd, 2, true>;
    return launch(kernel, blocks_for(problem.rows * kWarp, kThreadsOfNarrowRows), dim3(kThreadsOfNarrowRows), 0,
                  problem);
  }
  int threads = 2 * kWarp;
  while (threads < kMaxThreads && threads * 2 < packs) threads *= 2;
  const int64_t each = (packs + threads - 1) / threads;
  const auto kernel = !plain              ? wide_kernel<T, kKind, kAdd, 0, false>
                      : each <= 2         ? wide_kernel<T, kKind, kAdd, 2, true>
                      : each <= kMaxPacks ? wide_kernel<T, kKind, kAdd, kMaxPacks, true>
                                          : wide_kernel<T, kKind, kAdd, 0, true>;
  launch(kernel, dim3(static_cast<unsigned>(problem.rows)), dim3(static_cast<unsigned>(threads)), 0, problem);
}

Columns columns(const OptionalTensor& t, int64_t width, const char* op, const char* name) {
  if (!t.has_value()) return {nullptr, ScalarType::Float, false};
  check_dim(*t, 1, op, name);
  check_size(*t, 0, width, op, name);
  check_inner(*t, op, name);
  dispatch_float(t->scalar_type(), op, name, [](auto) {});
  return {t->const_data_ptr(), t->scalar_type(), reinterpret_cast<uintptr_t>(t->const_data_ptr()) % 16 == 0};
}

struct Options {
  OptionalTensor weight, bias;
  float weight_offset;
  double eps;
};

// out = norm(x), or with a residual: residual += x, out = norm(residual).
template <Kind kKind, bool kAdd>
void normalise_rows(const Tensor& out, const Tensor& x, const OptionalTensor& residual, const Options& options,
                    const char* op) {
  const Rows x_rows(x, op, "x"), out_rows(out, op, "out"), residual_rows(residual.value_or(x), op, "residual");
  dispatch_float(x.scalar_type(), op, "x", [&](auto tag) {
    using T = decltype(tag);
    bool aligned = x_rows.begins_aligned(x, sizeof(T)) && out_rows.begins_aligned(out, sizeof(T));
    if constexpr (kAdd) aligned = aligned && residual_rows.begins_aligned(*residual, sizeof(T));
    const int64_t width = x_rows.width();
    const Problem<T> problem = {mutable_data<T>(out),
                                data<T>(x),
                                kAdd ? mutable_data<T>(*residual) : nullptr,
                                out_rows,
                                x_rows,
                                residual_rows,
                                aligned,
                                columns(options.weight, width, op, "weight"),
                                columns(options.bias, width, op, "bias"),
                                options.weight_offset,
                                options.eps,
                                x_rows.count(),
                                width};
    const auto alike = [&](const Columns& c) { return c.data == nullptr || (c.aligned && c.type == x.scalar_type()); };
    const bool plain = aligned && width % kPackElements<T> == 0 && x_rows.even() && out_rows.even() &&
                       residual_rows.even() && alike(problem.weight) && alike(problem.bias);
    run<T, kKind, kAdd>(Launch(x), problem, plain);
  });
}

void plain(const Tensor& out, const Tensor& x, const Options& options, const char* op) {
  check_same_shape(out, x, op, "out", "x");
  check_dtype(out, x.scalar_type(), op, "out");
  normalise_rows<Kind::kRms, false>(out, x, std::nullopt, options, op);
}

void with_residual(const Tensor& x, const Tensor& residual, const Options& options, const char* op) {
  check_same_shape(residual, x, op, "residual", "x");
  check_dtype(residual, x.scalar_type(), op, "residual");
  normalise_rows<Kind::kRms, true>(x, x, residual, options, op);
}

}  // namespace

void rms_norm(const Tensor& out, const Tensor& x, const Tensor& weight, double eps) {
  plain(out, x, {weight, std::nullopt, 0, eps}, "rms_norm");
}

void fused_add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  with_residual(x, residual, {weight, std::nullopt, 0, eps}, "fused_add_rms_norm");
}

void gemma_rms_norm(const Tensor& out, const Tensor& x, const Tensor& weight, double eps) {
  plain(out, x, {weight, std::nullopt, 1, eps}, "gemma_rms_norm");
}

void gemma_fused_add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  with_residual(x, residual, {weight, std::nullopt, 1, eps}, "gemma_fused_add_rms_norm");
}

void layer_norm(const Tensor& out, const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                double eps) {
  check_same_shape(out, x, "layer_norm", "out", "x");
  check_dtype(out, x.scalar_type(), "layer_norm", "out");
  normalise_rows<Kind::kLayer, false>(out, x, std::nullopt, {weight, bias, 0, eps}, "layer_norm");
}

}  // namespace gristmill::gpu

STABLE_TORCH_LIBRARY_IMPL(GRISTMILL_GPU_NAMESPACE, GRISTMILL_GPU_KEY, m) {
  m.impl("rms_norm", TORCH_BOX(&gristmill::gpu::rms_norm));
  m.impl("fused_add_rms_norm", TORCH_BOX(&gristmill::gpu::fused_add_rms_norm));
  m.impl("gemma_rms_norm", TORCH_BOX(&gristmill::gpu::gemma_rms_norm));
  m.impl("gemma_fused_add_rms_norm", TORCH_BOX(&gristmill::gpu::gemma_fused_add_rms_norm));
  m.impl("layer_norm", TORCH_BOX(&gristmill::gpu::layer_norm));
}
