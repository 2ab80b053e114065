// RMS and layer normalisation on GPUs. A row belongs to one warp or to one block and is read once: its threads keep it
// in registers between the sum and the result, up to kPacksWanted packs each. float32 rows are computed in double.
//
// Where there are few rows, more threads share each: then it is the time of one row that counts, not how much is under
// way. Sums are taken in an order that does not depend on it.
#include <torch/csrc/stable/library.h>

#include "common/gpu_launch.h"
#include "common/gpu_rows.h"
#include "norm/norm.h"

namespace gristmill::gpu {
namespace {

constexpr int kThreadsOfNarrowRows = 128;
constexpr int kMaxThreads = 512;  // of wide rows
constexpr int kPacksWanted = 4;
constexpr int64_t kMaxWidth = int64_t{1} << 30;

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

  __device__ bool given() const { return data != nullptr; }

  template <int N>
  __device__ void load(int32_t first, int32_t width, float (&to)[N]) const {
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
  __device__ void read(int32_t first, int32_t width, float (&to)[N]) const {
    constexpr int kStep = N < kPackElements<W> ? N : kPackElements<W>;
#pragma unroll
    for (int i = 0; i < N; i += kStep) {
      const auto pack = load_elements<kStep>(static_cast<const W*>(data), first + i, width, aligned);
#pragma unroll
      for (int j = 0; j < kStep; ++j) to[i + j] = to_float(pack[j]);
    }
  }
};

// The same for a vector of the rows' type that is aligned like them.
template <typename T>
struct PlainColumns {
  const T* data;

  explicit PlainColumns(const Columns& c) : data(static_cast<const T*>(c.data)) {}
  __device__ bool given() const { return data != nullptr; }

  template <int N>
  __device__ void load(int32_t first, int32_t, float (&to)[N]) const {
    unpack(load_pack<N>(data + first), to);
  }
  template <int N>
  __device__ static void unpack(const Pack<T, N>& pack, float (&to)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = to_float(pack[i]);
  }
};

// kPlain: rows of at most two dimensions that are aligned and whole packs wide, and so are the vectors.
template <typename T, bool kPlain>
struct Problem {
  T* out;
  const T* x;
  T* residual;  // null, or what x is added to first
  std::conditional_t<kPlain, PlainColumns<T>, Columns> weight, bias;
  RowsFor<kPlain> out_rows, x_rows, residual_rows;
  Wide<T> eps;
  int64_t rows;
  int32_t width;
  float weight_offset;  // 1 for Gemma's norms
  bool aligned;         // every row, on 16 bytes
};

// What one thread has of a row: packs of N elements, `lanes` packs apart.
template <typename T, Kind kKind, bool kAdd, int kPacks, int kLanes, bool kPlain>
struct Row {
  static constexpr int N = kPackElements<T>;
  static constexpr bool kCentred = kKind == Kind::kLayer;
  static constexpr int kParts = kPacks > 0 ? kPacks : 1;  // of a sum
  // A thread that has few packs reads the vectors' before it waits for the sum.
  static constexpr bool kHolds = kPlain && kPacks > 0 && kPacks <= 2;
  using A = Wide<T>;

  const Problem<T, kPlain>& problem;
  const T* x;
  T* residual;
  T* out;
  int lane;
  int32_t width;
  Pack<T, N> kept[kParts];
  Pack<T, N> factors[kHolds ? kPacks : 1], summands[kHolds ? kPacks : 1];

  // A row that there is not has nothing that could be read.
  __device__ Row(const Problem<T, kPlain>& p, int64_t wanted, int lane)
      : Row(p, wanted < p.rows ? wanted : 0, lane, wanted < p.rows ? p.width : 0) {}
  __device__ Row(const Problem<T, kPlain>& p, int64_t row, int lane, int32_t width)
      : problem(p),
        x(p.x + p.x_rows.offset(row)),
        residual(kAdd ? p.residual + p.residual_rows.offset(row) : nullptr),
        out(p.out + p.out_rows.offset(row)),
        lane(lane),
        width(width) {}

  __device__ bool scaled() const { return kKind == Kind::kRms || problem.weight.given(); }
  __device__ bool shifted() const { return kKind == Kind::kLayer && problem.bias.given(); }

  // f(number, first element, pack) for all packs: on the first pass they are read, later they are at hand.
  template <bool kFirst, typename F>
  __device__ void visit(F&& f) {
    if constexpr (kPacks > 0) {
      if constexpr (kFirst) read_all();
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        if constexpr (!kFirst) keep_packed(kept[i]);
        if (first_of(i) < width) f(i, first_of(i), kept[i]);
      }
    } else {
      for (int i = 0; first_of(i) < width; ++i) f(0, first_of(i), kFirst ? read(first_of(i)) : reread(first_of(i)));
    }
  }

  __device__ int32_t first_of(int i) const {
    return (i * (kLanes > 0 ? kLanes : static_cast<int>(blockDim.x)) + lane) * N;
  }

  // All reads are under way before the first is waited for.
  __device__ void read_all() {
    Pack<T, N> before[kAdd ? kPacks : 1];
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (first_of(i) >= width) continue;
      kept[i] = load_row<kPlain, N>(x, first_of(i), width, problem.aligned);
      if constexpr (kAdd) before[i] = load_row<kPlain, N>(residual, first_of(i), width, problem.aligned);
      if constexpr (kHolds) {
        if (scaled()) factors[i] = load_pack<N>(problem.weight.data + first_of(i));
        if (shifted()) summands[i] = load_pack<N>(problem.bias.data + first_of(i));
      }
    }
    if constexpr (kAdd) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        if (first_of(i) < width) kept[i] = added(first_of(i), kept[i], before[i]);
      }
    }
  }

  __device__ Pack<T, N> read(int32_t first) {
    const auto pack = load_row<kPlain, N>(x, first, width, problem.aligned);
    if constexpr (kAdd) {
      return added(first, pack, load_row<kPlain, N>(residual, first, width, problem.aligned));
    } else {
      return pack;
    }
  }
  __device__ Pack<T, N> reread(int32_t first) const {
    return load_row<kPlain, N>(kAdd ? residual : x, first, width, problem.aligned);
  }

  // The sum with the residual is rounded to T before it is normalised, as the unfused pair of ops would do.
  __device__ Pack<T, N> added(int32_t first, Pack<T, N> pack, const Pack<T, N>& before) {
#pragma unroll
    for (int i = 0; i < N; ++i) pack[i] = from_float<T>(to_float(pack[i]) + to_float(before[i]));
    keep_packed(pack);
    store_row<kPlain, N>(residual, first, width, problem.aligned, pack);
    return pack;
  }

  template <bool kFirst>
  __device__ void sum_squares(A mean, A (&parts)[kParts]) {
    visit<kFirst>([&](int part, int32_t first, const Pack<T, N>& pack) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const A value = static_cast<A>(to_float(pack[i])) - mean;
        if (kKind == Kind::kRms || first + i < width) parts[part] += value * value;
      }
    });
  }
  __device__ void sum_values(A (&parts)[kParts]) {
    visit<true>([&](int part, int32_t, const Pack<T, N>& pack) {
#pragma unroll
      for (int i = 0; i < N; ++i) parts[part] += static_cast<A>(to_float(pack[i]));
    });
  }

  template <typename Vector>
  __device__ void factors_of(const Vector& vector, const Pack<T, N>& held, int32_t first, float (&to)[N]) const {
    if constexpr (kHolds) {
      Vector::unpack(held, to);
    } else {
      vector.load(first, width, to);
    }
  }

  __device__ void write(A mean, A scale) {
    visit<false>([&](int i, int32_t first, const Pack<T, N>& pack) {
      float weight[N], bias[N];
      if (scaled()) factors_of(problem.weight, factors[kHolds ? i : 0], first, weight);
      if (shifted()) factors_of(problem.bias, summands[kHolds ? i : 0], first, bias);
      Pack<T, N> result;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        A value = (static_cast<A>(to_float(pack[i])) - mean) * scale;
        if (scaled()) value *= static_cast<A>(weight[i]) + static_cast<A>(problem.weight_offset);
        if (shifted()) value += static_cast<A>(bias[i]);
        result[i] = from_float<T>(static_cast<float>(value));
      }
      store_row<kPlain, N>(out, first, width, problem.aligned, result);
    });
  }
};

template <typename RowOf, typename Problem, typename Sum>
__device__ void normalise(const Problem& problem, int64_t row, int lane, Sum&& sum) {
  using A = typename RowOf::A;
  follow_previous_kernel();
  RowOf mine(problem, row, lane);
  const A width = static_cast<A>(problem.width);
  A mean = 0, squares[RowOf::kParts] = {};
  if constexpr (RowOf::kCentred) {
    A values[RowOf::kParts] = {};
    mine.sum_values(values);
    mean = sum(values, 0) / width;
  }
  mine.template sum_squares<!RowOf::kCentred>(mean, squares);
  mine.write(mean, inverse_root(sum(squares, 1) / width + problem.eps));
}

// A group of kLanes neighbours per row.
template <typename T, Kind kKind, bool kAdd, int kPacks, int kLanes, bool kPlain>
__global__ void __launch_bounds__(kThreadsOfNarrowRows) narrow_kernel(const Problem<T, kPlain> problem) {
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreadsOfNarrowRows / kLanes) + thread / kLanes;
  using RowOf = Row<T, kKind, kAdd, kPacks, kLanes, kPlain>;
  normalise<RowOf>(problem, row, thread % kLanes, [](const auto& parts, int) {
    auto value = parts[0];
#pragma unroll
    for (int i = 1; i < RowOf::kParts; ++i) value += parts[i];
    return warp_sum<kLanes>(value);
  });
}

// A block per row, of kThreads, or of any number if that is 0.
template <typename T, Kind kKind, bool kAdd, int kPacks, int kThreads, bool kPlain>
__global__ void __launch_bounds__(kThreads > 0 ? kThreads : kMaxThreads) wide_kernel(const Problem<T, kPlain> problem) {
  using RowOf = Row<T, kKind, kAdd, kPacks, kThreads, kPlain>;
  constexpr int kSums = (kThreads > 0 ? kThreads : kMaxThreads) / kWarp * RowOf::kParts;
  GRISTMILL_SHARED(Wide<T>, scratch, 2 * kSums);
  normalise<RowOf>(problem, blockIdx.x, static_cast<int>(threadIdx.x),
                   [&](const auto& parts, int which) { return block_sum<kSums>(parts, scratch + which * kSums); });
}

// At most 64 packs: a group of as many threads as there are packs, but no more than 32. Else a block of as many threads
// as give each kPacksWanted, if it can, or less where there are few rows. The general kernels take sums in the same
// order.
template <typename T, Kind kKind, bool kAdd>
struct Kernels {
  int64_t packs;

  template <int kPacks, int kLanes, bool kPlain>
  void narrow(const Launch& launch, const Problem<T, kPlain>& problem) const {
    launch.early<narrow_kernel<T, kKind, kAdd, kPacks, kLanes, kPlain>>(
        blocks_for(problem.rows * kLanes, kThreadsOfNarrowRows), dim3(kThreadsOfNarrowRows), problem);
  }
  template <int kPacks, int kThreads, bool kPlain>
  void wide(const Launch& launch, const Problem<T, kPlain>& problem, int threads = kThreads) const {
    launch.early<wide_kernel<T, kKind, kAdd, kPacks, kThreads, kPlain>>(dim3(static_cast<unsigned>(problem.rows)),
                                                                        dim3(static_cast<unsigned>(threads)), problem);
  }

  void run(const Launch& launch, const Problem<T, false>& problem) const {
    if (packs <= 64) return narrow<2, 32>(launch, problem);
    if (packs > int64_t{kPacksWanted} * kMaxThreads) return wide<0, kMaxThreads>(launch, problem);
    int threads = 64;
    while (threads * kPacksWanted < packs) threads *= 2;
    wide<kPacksWanted, 0>(launch, problem, threads);
  }
  void run(const Launch& launch, const Problem<T, true>& problem) const {
    if (packs <= 8) return narrow<1, 8>(launch, problem);
    if (packs <= 16) return narrow<1, 16>(launch, problem);
    if (packs <= 32) return narrow<1, 32>(launch, problem);
    if (packs <= 64) return narrow<2, 32>(launch, problem);
    if (packs > int64_t{kPacksWanted} * kMaxThreads) return wide<0, kMaxThreads>(launch, problem);
    if (problem.rows <= 2 * launch.processors() && packs <= 2 * kMaxThreads) return few(launch, problem);
    if (packs <= 64 * kPacksWanted) return wide<kPacksWanted, 64>(launch, problem);
    if (packs <= 128 * kPacksWanted) return wide<kPacksWanted, 128>(launch, problem);
    if (packs <= 256 * kPacksWanted) return wide<kPacksWanted, 256>(launch, problem);
    wide<kPacksWanted, kMaxThreads>(launch, problem);
  }
  void few(const Launch& launch, const Problem<T, true>& problem) const {
    if (packs <= 256) return wide<1, 256>(launch, problem);
    if (packs <= kMaxThreads) return wide<1, kMaxThreads>(launch, problem);
    wide<2, kMaxThreads>(launch, problem);
  }
};

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
    STD_TORCH_CHECK(width <= kMaxWidth, op, ": rows may have ", kMaxWidth, " elements, got ", width);
    const Columns weight = columns(options.weight, width, op, "weight"),
                  bias = columns(options.bias, width, op, "bias");
    const auto alike = [&](const Columns& c) { return c.data == nullptr || (c.aligned && c.type == x.scalar_type()); };
    const bool plain = aligned && width % kPackElements<T> == 0 && x_rows.two_steps() && out_rows.two_steps() &&
                       residual_rows.two_steps() && alike(weight) && alike(bias);
    const auto run = [&](auto is_plain) {
      constexpr bool kPlain = decltype(is_plain)::value;
      using Vector = std::conditional_t<kPlain, PlainColumns<T>, Columns>;
      using Steps = RowsFor<kPlain>;
      const Problem<T, kPlain> problem = {mutable_data<T>(out),
                                          data<T>(x),
                                          kAdd ? mutable_data<T>(*residual) : nullptr,
                                          Vector(weight),
                                          Vector(bias),
                                          Steps(out_rows),
                                          Steps(x_rows),
                                          Steps(residual_rows),
                                          static_cast<Wide<T>>(options.eps),
                                          x_rows.count(),
                                          static_cast<int32_t>(width),
                                          options.weight_offset,
                                          aligned};
      const Kernels<T, kKind, kAdd> kernels = {(width + kPackElements<T> - 1) / kPackElements<T>};
      kernels.run(Launch(x), problem);
    };
    plain ? run(std::true_type{}) : run(std::false_type{});
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
