// Gated activations on GPUs, a pack of 16 bytes of the result per thread. float32 is computed in double.
#include <torch/csrc/stable/library.h>

#include "activation/activation.h"
#include "common/gpu_launch.h"
#include "common/gpu_rows.h"

namespace gristmill::gpu {
namespace {

constexpr int kThreads = 256;

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, float>, double, float>;

__device__ inline float exponential(float x) { return expf(x); }
__device__ inline double exponential(double x) { return exp(x); }
__device__ inline float complement(float x) { return erfcf(x); }
__device__ inline double complement(double x) { return erfc(x); }

// gate / (1 + e^-s) * up. Nothing overflows, and for s < 0 the factor that may be tiny meets `up` first.
template <typename A>
__device__ inline A sigmoid_mul(A gate, A s, A up) {
  const A e = exponential(s < 0 ? s : -s);
  return s < 0 ? gate / (1 + e) * (e * up) : gate / (1 + e) * up;
}

struct Silu {
  template <typename A>
  __device__ A operator()(A gate, A up) const {
    return sigmoid_mul(gate, gate, up);
  }
};

// gate * Phi(gate) * up, Phi being the normal distribution function
struct Gelu {
  template <typename A>
  __device__ A operator()(A gate, A up) const {
    return gate * (complement(gate * static_cast<A>(-0.70710678118654752440)) * static_cast<A>(0.5)) * up;
  }
};

// gate / 2 * (1 + tanh(y)) = gate / (1 + e^-2y) with y = sqrt(2 / pi) * (gate + 0.044715 * gate^3)
struct GeluTanh {
  template <typename A>
  __device__ A operator()(A gate, A up) const {
    const A two_y = static_cast<A>(1.5957691216057308) * gate * (1 + static_cast<A>(0.044715) * gate * gate);
    return sigmoid_mul(gate, two_y, up);
  }
};

// A comparison with NaN is false, so a NaN passes through the bounds.
struct SwigluOai {
  float alpha, limit;
  template <typename A>
  __device__ A operator()(A gate, A up) const {
    const A most = static_cast<A>(limit);
    gate = gate > most ? most : gate;
    up = up > most ? most : up;
    up = up < -most ? -most : up;
    return sigmoid_mul(gate, gate * static_cast<A>(alpha), up + 1);
  }
};

// `kAlternating`: gate and factor take turns, else the gates of a row come first.
template <typename T, typename Gate, bool kAlternating, bool kPlain>
__global__ void __launch_bounds__(kThreads)
    gated_kernel(T* out, const T* x, const RowsFor<kPlain> out_rows, const RowsFor<kPlain> x_rows, int64_t width,
                 int64_t packs, bool aligned, const Gate gate) {
  constexpr int N = kPackElements<T>;
  using A = Wide<T>;
  follow_previous_kernel();
  const int64_t row = blockIdx.x, pack = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x;
  if (pack >= packs) return;
  const int64_t first = pack * N;
  const T* in = x + x_rows.offset(row);
  Pack<T, N> result;
  if constexpr (kAlternating) {
    const auto low = load_row<kPlain, N>(in, 2 * first, 2 * width, aligned);
    const auto high = load_row<kPlain, N>(in, 2 * first + N, 2 * width, aligned);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const auto& pairs = i < N / 2 ? low : high;
      const int at = 2 * i % N;
      result[i] = from_float<T>(
          static_cast<float>(gate(static_cast<A>(to_float(pairs[at])), static_cast<A>(to_float(pairs[at + 1])))));
    }
  } else {
    const auto gates = load_row<kPlain, N>(in, first, width, aligned);
    const auto factors = load_row<kPlain, N>(in + width, first, width, aligned);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      result[i] = from_float<T>(
          static_cast<float>(gate(static_cast<A>(to_float(gates[i])), static_cast<A>(to_float(factors[i])))));
    }
  }
  store_row<kPlain, N>(out + out_rows.offset(row), first, width, aligned, result);
}

template <bool kAlternating, typename Gate>
void gated(const Tensor& out, const Tensor& x, const Gate& gate, const char* op) {
  const GatedRows rows(out, x, op);
  dispatch_float(x.scalar_type(), op, "x", [&](auto tag) {
    using T = decltype(tag);
    constexpr int N = kPackElements<T>;
    const int64_t width = rows.out.width(), packs = (width + N - 1) / N;
    const bool halves = kAlternating || width % N == 0;
    const bool aligned = halves && rows.x.begins_aligned(x, sizeof(T)) && rows.out.begins_aligned(out, sizeof(T));
    const bool plain = aligned && width % N == 0 && rows.x.two_steps() && rows.out.two_steps();
    const int threads = packs < kThreads ? static_cast<int>((packs + kWarp - 1) / kWarp * kWarp) : kThreads;
    dim3 grid(static_cast<unsigned>(rows.out.count()));
    grid.y = blocks_for(packs, threads > 0 ? threads : 1).x;
    const Launch launch(x);
    const auto run = [&](auto is_plain) {
      constexpr bool kPlain = decltype(is_plain)::value;
      const RowsFor<kPlain> to(rows.out), from(rows.x);
      launch.early<gated_kernel<T, Gate, kAlternating, kPlain>>(grid, dim3(static_cast<unsigned>(threads)),
                                                                mutable_data<T>(out), data<T>(x), to, from, width,
                                                                packs, aligned, gate);
    };
    plain ? run(std::true_type{}) : run(std::false_type{});
  });
}

}  // namespace

void silu_and_mul(const Tensor& out, const Tensor& x) { gated<false>(out, x, Silu{}, "silu_and_mul"); }

void gelu_and_mul(const Tensor& out, const Tensor& x) { gated<false>(out, x, Gelu{}, "gelu_and_mul"); }

void gelu_tanh_and_mul(const Tensor& out, const Tensor& x) { gated<false>(out, x, GeluTanh{}, "gelu_tanh_and_mul"); }

void swiglu_oai(const Tensor& out, const Tensor& x, double alpha, double limit) {
  constexpr const char* op = "swiglu_oai";
  STD_TORCH_CHECK(limit >= 0, op, ": limit must be at least 0, got ", limit);
  gated<true>(out, x, SwigluOai{static_cast<float>(alpha), static_cast<float>(limit)}, op);
}

}  // namespace gristmill::gpu

STABLE_TORCH_LIBRARY_IMPL(GRISTMILL_GPU_NAMESPACE, GRISTMILL_GPU_KEY, m) {
  m.impl("silu_and_mul", TORCH_BOX(&gristmill::gpu::silu_and_mul));
  m.impl("gelu_and_mul", TORCH_BOX(&gristmill::gpu::gelu_and_mul));
  m.impl("gelu_tanh_and_mul", TORCH_BOX(&gristmill::gpu::gelu_tanh_and_mul));
  m.impl("swiglu_oai", TORCH_BOX(&gristmill::gpu::swiglu_oai));
}
